from __future__ import annotations

import logging
import re
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import anyio
import pytest

from chatflow import (
    Agent,
    AgentResponse,
    MessageDeadError,
    MessageMismatchError,
    PendingTurn,
    Runner,
    ScriptedEngine,
    SessionStore,
)
from tests.pages import ROOT, texts_of

README: Final = (ROOT / "README.md").read_text()

_LINKED: Final = re.compile(r"\]\((?!https?://)([^)#]+)\)")
_NAMED: Final = re.compile(r"`([\w.-]+/[\w./-]*)`")


PROGRAM, WEBHOOK = texts_of(README, "python")
PAGES: Final = {name: (ROOT / name).read_text() for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")}
NAMED_PATHS: Final = sorted(
    (page, path) for page, text in PAGES.items() for path in {*_LINKED.findall(text), *_NAMED.findall(text)}
)


def test_program_is_short() -> None:
    """The README's program has at most 20 lines."""
    assert len([line for line in PROGRAM.splitlines() if line.strip()]) <= 20


def test_program(tmp_path: Path) -> None:
    """The README's program runs as printed, in an empty folder, without a warning, and prints what the README says."""
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    (tmp_path / "empty").mkdir()
    run = subprocess.run(
        [sys.executable, "-W", "error", program],
        cwd=tmp_path / "empty",
        env={"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    [said] = re.findall(r"^It prints `([^`]+)`", README, re.MULTILINE)
    assert (run.returncode, run.stdout, run.stderr) == (0, f"{said}\n", "")


async def test_webhook() -> None:
    """The README's webhook answers 200 before the message is answered, and the answer is sent once."""
    said: list[tuple[str, str]] = []
    sent = anyio.Event()

    async def send(session_id: str, text: str) -> None:
        said.append((session_id, text))
        sent.set()

    store = SessionStore()
    names: dict[str, Any] = {
        "store": store,
        "runner": Runner(Agent("Support"), store, ScriptedEngine(default="hello")),
        "send": send,
        "Any": Any,
        "AsyncIterator": AsyncIterator,
        "AgentResponse": AgentResponse,
        "PendingTurn": PendingTurn,
        "Inbound": SimpleNamespace,
        "Response": SimpleNamespace,
        "asynccontextmanager": asynccontextmanager,
        "logger": logging.getLogger("webhook"),
        "MessageDeadError": MessageDeadError,
        "MessageMismatchError": MessageMismatchError,
    }
    exec(WEBHOOK, names)
    message = SimpleNamespace(id="wamid.1", sender="conversation-7", text="hi")
    async with names["lifespan"](None):
        for _ in range(2):
            assert (await names["webhook"](message)).status_code == 200
        await sent.wait()
    assert said == [("conversation-7", "hello")]


@pytest.mark.parametrize(("page", "path"), NAMED_PATHS)
def test_paths(page: str, path: str) -> None:
    """Every path that the README and the pages beside it name is there."""
    assert (ROOT / path).exists()


def test_commands() -> None:
    """The README has two commands, and each that a page names is one of the Makefile's."""
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert re.findall(r"^make (\w+)", "".join(texts_of(README, "sh")), re.MULTILINE) == ["demo", "test"]
    commands = set(re.findall(r"(?:^|`)make ([\w-]+)", "\n".join(PAGES.values()), re.MULTILINE))
    assert commands <= targets, commands - targets
