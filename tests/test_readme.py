from __future__ import annotations

import logging
import re
import subprocess
import sys
import textwrap
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import anyio
import pytest

from chatflow import (
    ALL,
    Agent,
    AgentResponse,
    ContextProvider,
    HistoryProvider,
    Message,
    MessageDeadError,
    MessageMismatchError,
    PendingTurn,
    Role,
    Runner,
    ScriptedEngine,
    SessionContext,
    SessionStore,
    SQLiteSessionStore,
    StoreOwnerRequiredError,
    TextDelta,
    prune,
)

ROOT: Final = Path(__file__).parent.parent
README: Final = (ROOT / "README.md").read_text()
CONCEPTS: Final = (ROOT / "docs" / "concepts.md").read_text()

_LINKED: Final = re.compile(r"\]\((?!https?://)([^)#]+)\)")
_NAMED: Final = re.compile(r"`([\w.-]+/[\w./-]*)`")


def blocks(text: str, language: str) -> list[str]:
    """The code blocks of a page."""
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


[PROGRAM, WEBHOOK] = blocks(README, "python")
NAMED_PATHS: Final = sorted({*_LINKED.findall(README), *_NAMED.findall(README)})


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


@pytest.mark.parametrize("path", NAMED_PATHS)
def test_paths(path: str) -> None:
    """Every path that the README names is there."""
    assert (ROOT / path).exists()


def test_commands() -> None:
    """Every command of the README is one of the Makefile's."""
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    commands = re.findall(r"^make (\w+)", "".join(blocks(README, "sh")), re.MULTILINE)
    assert commands == ["demo", "test"]
    assert set(commands) <= targets


TURN, ORDERS, LAST_TWO_TURNS, STREAM, APPROVAL, OWNERS = blocks(CONCEPTS, "python")


async def test_turn_of_concepts() -> None:
    """The turn on the page on concepts runs in a coroutine that has a session."""
    names: dict[str, Any] = {"Message": Message, "Role": Role}
    exec("async def run(session):\n" + textwrap.indent(TURN, "    "), names)
    async with SessionStore() as store:
        session: SessionContext = await store.get_or_create("s", Agent("Support"))
        await names["run"](session)
        stored = await store.messages("s")
    assert [message.role for message in stored.items] == [Role.USER, Role.MODEL]
    assert session.state == {"order_id": "404"}


async def test_approval_of_concepts(capsys: pytest.CaptureFixture[str]) -> None:
    """The approval on the page on concepts asks a person, runs the tool once it is approved, and prints the answer."""
    call = ScriptedEngine.call("refund", order_id="404", euros=20)
    support = Agent("Support", engine=ScriptedEngine([call, "20 euros are on their way."]))
    async with SessionStore() as store:
        names: dict[str, Any] = {"Runner": Runner, "support": support, "store": store}
        exec("async def run():\n" + textwrap.indent(APPROVAL, "    "), names)
        await names["run"]()
        session = await store.get("conversation-7")
    assert session is not None
    assert capsys.readouterr().out == "May I refund 20 euros?\n20 euros are on their way.\n"
    assert session.history[2].tool_results[0].content == "20 euros of order 404 are on their way."
    assert session.metadata == {"approved_by": "Ann"}


async def test_stream_of_concepts(capsys: pytest.CaptureFixture[str]) -> None:
    """The stream on the page on concepts prints the answer as it comes, and takes one turn."""
    agent = Agent("Support", engine=ScriptedEngine(["It arrives tomorrow."]))
    names: dict[str, Any] = {"TextDelta": TextDelta, "agent": agent}
    exec("async def run(session):\n" + textwrap.indent(STREAM, "    "), names)
    session = agent.create_session()
    await names["run"](session)
    assert [message.role for message in session.history] == [Role.USER, Role.MODEL]
    assert "It arrives tomorrow." in capsys.readouterr().out


async def test_owners_of_concepts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The function on the page on concepts answers each user in a conversation of their own."""
    monkeypatch.chdir(tmp_path)
    support = Agent("Support", engine=ScriptedEngine(["to ann", "to bob"]))
    names: dict[str, Any] = {"SQLiteSessionStore": SQLiteSessionStore, "Runner": Runner, "support": support}
    exec(OWNERS, names)
    store: SQLiteSessionStore = names["store"]
    async with store:
        assert [await names["answer"](user, "hello") for user in ("ann", "bob")] == ["to ann", "to bob"]
        assert {(info.owner, info.session_id) for info in (await store.list_sessions(owner=ALL)).items} == {
            ("ann", "main"),
            ("bob", "main"),
        }
        with pytest.raises(StoreOwnerRequiredError):
            await store.get("main")


async def test_providers_of_concepts() -> None:
    """The context provider on the page on concepts tells the next turn what the last one was about."""
    names: dict[str, Any] = {"ContextProvider": ContextProvider, "Agent": Agent, "re": re}
    exec(ORDERS, names)
    engine = ScriptedEngine(default="It is on its way.")
    runner = Runner(names["support"], engine=engine)
    await runner.run_async("s", "Where is order 404?")
    await runner.run_async("s", "And now?")
    instructions = [request.messages[0].text for request in engine.requests]
    assert instructions == ["Help with orders.", "Help with orders.\n\nThe user's last order is 404."]


async def test_history_provider_of_concepts() -> None:
    """The history provider on the page on concepts sends two turns and the question."""
    names: dict[str, Any] = {"HistoryProvider": HistoryProvider, "prune": prune}
    exec(LAST_TWO_TURNS, names)
    engine = ScriptedEngine(default="yes")
    runner = Runner(Agent("Support", context_providers=[names["LastTwoTurns"]()]), engine=engine)
    for number in range(5):
        await runner.run_async("s", str(number))
    assert [message.text for message in engine.requests[-1].messages] == ["2", "yes", "3", "yes", "4"]
