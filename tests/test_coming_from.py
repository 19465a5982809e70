"""The pages for who comes from another package: the names in their tables are there, ours and theirs."""

from __future__ import annotations

import re
from collections.abc import Iterator
from types import FunctionType, SimpleNamespace
from typing import Any, Final

import attrs
import pytest

import chatflow
import chatflow.postgres
from chatflow.core.providers import RunContext
from tests.pages import ROOT

FOLDER: Final = ROOT / "docs" / "coming-from"
OURS: Final[dict[str, Any]] = {
    "agent": chatflow.Agent,
    "attrs": attrs,
    "context": RunContext,
    "response": chatflow.AgentResponse,
    "runner": chatflow.Runner,
    "session": chatflow.SessionContext,
    "store": chatflow.BaseSessionStore,
    "tool": chatflow.Tool,
}
"""What a name before a dot stands for."""

THEIRS: Final[dict[str, dict[str, str]]] = {
    "chatflow_agent": {
        "agent": "Agent",
        "runner": "Runner",
        "session": "SessionContext",
        "store": "SQLiteSessionStore",
        "tool": "Tool",
    },
    "agents": {
        "agent": "Agent",
        "result": "RunResult",
        "session": "SQLiteSession",
        "state": "RunState",
        "stream": "RunResultStreaming",
    },
    "agent_framework": {
        "agent": "Agent",
        "context": "SessionContext",
        "response": "AgentResponse",
        "session": "AgentSession",
        "store": "FileSessionStore",
    },
}
PAGES: Final = {"chatflow_agent": "chatflow-agent", "agents": "openai-agents", "agent_framework": "agent-framework"}
ELSEWHERE: Final = {
    "AsyncSQLiteSession",  # of a module of its own
    "HandoffBuilder",  # of another package
    "LitellmModel",  # as AsyncSQLiteSession
    "OpenAIChatClient",  # as HandoffBuilder
    "Order",  # the reader's own
    "SQLAlchemySession",  # as AsyncSQLiteSession
    "UserPrefs",  # as Order
}


def columns(package: str) -> Iterator[tuple[str, str]]:
    """The code in the left and in the right cell of each row of the page's table of names."""
    page = (FOLDER / f"{PAGES[package]}.md").read_text(encoding="utf-8").split("## What behaves differently")[0]
    for left, right in re.findall(r"^\| (.*?) \| (.*?) \|$", page, re.MULTILINE):
        yield " ; ".join(re.findall(r"`(.*?)`", left)), " ; ".join(re.findall(r"`(.*?)`", right))


def missing(code: str, package: Any, meant: dict[str, Any]) -> set[str]:
    """The names in *code* that are not in the package, or not in the class that the word before a dot stands for."""
    code = re.sub(r'"[^"]*"', '""', code)
    found = {
        f"{word}.{name}"
        for word, name in re.findall(r"(?<![\w.])(\w+)\.(\w+)", code)
        if word in meant and not has(meant[word], name)
    }
    capitalised = set(re.findall(r"(?<![\w.\"])([A-Z][a-z]\w+)", code)) - ELSEWHERE - {"None", "True"}
    return found | {name for name in capitalised if not hasattr(package, name)}


def has(kind: Any, name: str) -> bool:
    """Whether instances have it: an attribute of the class, or one that it declares, or sets when it is made."""
    if not isinstance(kind, type):
        return hasattr(kind, name)
    declared = {each for base in kind.__mro__ for each in getattr(base, "__annotations__", {})}
    made = {each for base in kind.__mro__ for each in _names_in(vars(base).get("__init__"))}
    return hasattr(kind, name) or name in declared | made


def _names_in(function: Any) -> tuple[str, ...]:
    return function.__code__.co_names if isinstance(function, FunctionType) else ()


@pytest.mark.parametrize("package", PAGES)
def test_ours(package: str) -> None:
    """What the page says is here is here."""
    ours = SimpleNamespace(**vars(chatflow), PostgresSessionStore=chatflow.postgres.PostgresSessionStore)
    rows = list(columns(package))
    assert len(rows) > 20
    for _, right in rows:
        assert missing(right, ours, OURS) == set()


@pytest.mark.parametrize("package", PAGES)
def test_theirs(package: str) -> None:
    """What the page says is there is there, in the version that it names."""
    theirs = pytest.importorskip(package)
    meant = {word: getattr(theirs, name) for word, name in THEIRS[package].items()}
    for left, _ in columns(package):
        assert missing(left, theirs, meant) == set()
