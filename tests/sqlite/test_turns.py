"""Turns as rows of a file: what is flushed, what a journal holds, what can't be read, what a killed process leaves."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio.lowlevel
import pytest

from chatflow.core.agent import Agent
from chatflow.core.tools import ToolContext
from chatflow.engines.scripted import ScriptedEngine
from chatflow.exceptions import CorruptSessionError
from chatflow.runner import Runner
from chatflow.sqlite import turns
from chatflow.sqlite.store import SQLiteSessionStore
from chatflow.testing.conformance.work import Heard, states
from tests.sqlite.conftest import OpenStore
from tests.sqlite.files import SUPPORT, query
from tests.sqlite.processes import started

CALL = ScriptedEngine.call
FULL, NORMAL = 2, 1


def runner_on(store: SQLiteSessionStore, *replies: Any, **options: Any) -> Runner:
    """A runner whose model says these replies."""
    return Runner(Agent("Support"), store, ScriptedEngine(replies), **options)


def texts(path: Path) -> list[str]:
    """What is said in the file's conversations."""
    return query(path, "SELECT message_json ->> 'content' FROM chatflow_messages ORDER BY session_key, place")


# --- what is flushed ---


def watched(monkeypatch: pytest.MonkeyPatch, name: str) -> list[int]:
    """How far each run of an operation is flushed: its connection's level."""
    levels: list[int] = []
    operation: Callable[..., Any] = getattr(turns, name)

    def watch(*arguments: Any) -> Any:
        levels.append(arguments[-1].execute("PRAGMA synchronous").fetchone()[0])
        return operation(*arguments)

    monkeypatch.setattr(turns, name, watch)
    return levels


async def test_accepting_is_flushed(store: SQLiteSessionStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """An accepted message is on the disk when `accept` returns."""
    levels = watched(monkeypatch, "accept")
    await runner_on(store).accept("s", "hello", message_id="m")
    assert levels == [FULL]


@pytest.mark.parametrize(("idempotent", "level"), [(False, FULL), (True, NORMAL)])
async def test_calls_are_flushed(
    store: SQLiteSessionStore, monkeypatch: pytest.MonkeyPatch, level: int, *, idempotent: bool
) -> None:
    """The note of calls is on the disk before a tool runs that must not run twice; results need not be."""
    levels, agent = watched(monkeypatch, "write_journal"), Agent("Support")

    @agent.tool(idempotent=idempotent)
    def charge() -> str:
        assert levels == [level]
        return "charged"

    runner = Runner(agent, store, ScriptedEngine([CALL("charge"), "done"]))
    await runner.run_async("s", "hi", message_id="m")
    assert levels == [level, NORMAL]


# --- what a journal holds ---


async def test_calls_are_noted_before_they_run(store: SQLiteSessionStore, path: Path) -> None:
    """What the model asked for is in the file before any of its tools runs."""
    agent, seen = Agent("Support"), list[Any]()

    @agent.tool
    def charge(amount: int) -> str:
        seen.append(query(path, "SELECT entry_json FROM chatflow_journal"))
        return "charged"

    engine = ScriptedEngine([[CALL("charge", amount=1), CALL("charge", amount=2)], "done"])
    await Runner(agent, store, engine).run_async("s", "hi", message_id="m")
    entry = json.loads(seen[0][0])
    assert [call["args"] for call in entry["message"]["tool_calls"]] == [{"amount": 1}, {"amount": 2}]
    assert query(path, "SELECT count(*) FROM chatflow_journal") == [0]


async def test_result_and_changes_in_one_row(store: SQLiteSessionStore, path: Path) -> None:
    """A result is in the same row as what its tool changed."""
    agent = Agent("Support", handoffs=[Agent("Billing")])

    @agent.tool
    async def charge(context: ToolContext) -> str:
        context.session.state["charged"] = True
        context.session.metadata["channel"] = "web"
        await context.session.set_active_agent(agent.handoffs[0])
        return "done"

    with pytest.raises(LookupError):
        await Runner(agent, store, ScriptedEngine([CALL("charge"), LookupError])).run_async("s", "hi", message_id="m")
    _, text = query(path, "SELECT entry_json FROM chatflow_journal ORDER BY step")
    entry = json.loads(text)
    assert (entry["iteration"], entry["index"], entry["result"]["content"]) == (0, 0, "done")
    assert [(deed["what"], deed.get("key"), deed["value"]) for deed in entry["deeds"]] == [
        ("set", "charged", True),
        ("set", "channel", "web"),
        ("agent", None, "Billing"),
    ]


async def test_without_a_message_id(store: SQLiteSessionStore, path: Path) -> None:
    """A turn without a message id keeps no journal, not even while it runs."""
    agent, seen = Agent("Support"), list[Any]()
    agent.tool(lambda: seen.append(query(path, "SELECT count(*) FROM chatflow_journal")), name="look")
    await Runner(agent, store, ScriptedEngine([CALL("look"), "done"])).run_async("s", "hi")
    assert seen == [[0]]


async def test_journal_goes_with_the_dead(store: SQLiteSessionStore, path: Path) -> None:
    """A message that was given up leaves its row and no journal."""
    agent = Agent("Support")
    agent.tool(lambda: "charged", name="charge")
    runner = Runner(agent, store, ScriptedEngine([CALL("charge"), LookupError]), max_attempts=1)
    await runner.accept("s", "hi", message_id="m")
    with pytest.raises(LookupError):
        await runner.run_async("s", "hi", message_id="m")
    assert query(path, "SELECT state, (SELECT count(*) FROM chatflow_journal) FROM chatflow_turns") == [("dead", 0)]


async def test_journal_goes_with_the_answer(store: SQLiteSessionStore, path: Path) -> None:
    """An accepted message that is answered leaves no journal, also while nobody has been told."""
    agent = Agent("Support")
    agent.tool(lambda: "charged", name="charge")
    runner = Runner(agent, store, ScriptedEngine([CALL("charge"), "done"]))
    await runner.accept("s", "hi", message_id="m")
    await runner.run_async("s", "hi", message_id="m")
    assert query(path, "SELECT state, (SELECT count(*) FROM chatflow_journal) FROM chatflow_turns") == [("answered", 0)]


# --- what can't be read ---


@pytest.mark.parametrize(
    "work",
    [
        "",
        "[]",
        '{"user_message": 1, "metadata": {}}',
        '{"user_message": "hi"}',
        '{"decision": {"call_id": "c"}, "metadata": {}}',
    ],
)
async def test_unreadable_work(
    store: SQLiteSessionStore, path: Path, caplog: pytest.LogCaptureFixture, work: str
) -> None:
    """A message that can't be read is given up and listed without its text; the worker does the others."""
    runner, heard = runner_on(store, "1!", "2!"), Heard()
    await runner.accept("broken", "0", message_id="0", metadata={"x": 1})
    await runner.accept("broken", "1", message_id="1")
    await runner.accept("s", "2", message_id="2")
    query(path, "UPDATE chatflow_turns SET work_json = ? WHERE message_id = '0'", work)
    (turn, *_) = await store.pending_turns()
    assert (turn.message_id, turn.user_message, turn.metadata, turn.state) == ("0", None, {}, "accepted")
    async with runner.working(heard):
        await heard.of(2)
    assert await states(store) == [("0", "dead", 0)]
    assert "is given up" in caplog.text


async def test_unreadable_work_before_a_turn(store: SQLiteSessionStore, path: Path) -> None:
    """A message that can't be read holds up nobody who comes after it in its conversation."""
    runner = runner_on(store, "next answer")
    await runner.accept("s", "0", message_id="0")
    query(path, "UPDATE chatflow_turns SET work_json = ''")
    assert (await runner.run_async("s", "next")).content == "next answer"
    assert [state for _, state, _ in await states(store)] == ["dead"]


async def broken_journal(store: SQLiteSessionStore, path: Path, *replies: Any) -> Runner:
    """A runner whose message has failed after a call, and whose journal can't be read."""
    agent = Agent("Support")
    agent.tool(lambda: "charged", name="charge")
    runner = Runner(agent, store, ScriptedEngine([CALL("charge"), LookupError, *replies]))
    with pytest.raises(LookupError):
        await runner.run_async("s", "hi", message_id="m")
    query(path, "UPDATE chatflow_journal SET entry_json = '{}'")
    return runner


async def test_unreadable_journal(store: SQLiteSessionStore, path: Path) -> None:
    """A turn whose journal can't be read can't go on: its caller is told which row it is, and it steps aside."""
    runner = await broken_journal(store, path, "next answer")
    with pytest.raises(CorruptSessionError, match="chatflow_journal, turn_id"):
        await runner.run_async("s", "hi", message_id="m")
    assert [state for _, state, _ in await states(store)] == ["told"]
    assert (await runner.run_async("s", "next")).content == "next answer"


async def test_unreadable_journal_of_accepted_work(store: SQLiteSessionStore, path: Path) -> None:
    """A worker gives up what has a journal that can't be read, and goes on."""
    runner, heard = await broken_journal(store, path, "next answer"), Heard()
    await runner.accept("s", "hi", message_id="m")
    await runner.accept("s", "next", message_id="next")
    async with runner.working(heard):
        await heard.of(1)
    assert heard.contents() == ["next answer"]
    assert [state for _, state, _ in await states(store)] == ["dead"]


async def test_unreadable_journal_before_a_turn(store: SQLiteSessionStore, path: Path) -> None:
    """A turn whose journal can't be read holds up nobody who comes after it in its conversation."""
    runner = await broken_journal(store, path, "next answer")
    await runner.accept("s", "hi", message_id="m")
    assert (await runner.run_async("s", "next")).content == "next answer"
    assert [state for _, state, _ in await states(store)] == ["dead"]


async def test_unreadable_answer(store: SQLiteSessionStore, path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """An answer that can't be read is given up, and the worker goes on."""
    runner, heard = runner_on(store, "1!", "2!"), Heard()
    await runner.accept("s", "1", message_id="1")
    await runner.run_async("s", "1", message_id="1")
    query(path, "UPDATE chatflow_processed_messages SET response_json = '{}'")
    async with runner.working(heard):
        await runner.accept("s", "2", message_id="2")
        await heard.of(1)
    assert heard.contents() == ["2!"]
    assert query(path, "SELECT message_id, state FROM chatflow_turns") == [("1", "dead")]
    assert "is given up" in caplog.text


async def test_many_pending_turns(store: SQLiteSessionStore, path: Path) -> None:
    """All turns are listed, in order, however many there are; one that can't be read does not hide the others."""
    await runner_on(store).accept("s", "0", message_id="0")
    query(
        path,
        "WITH RECURSIVE numbers (n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM numbers WHERE n < 2500)"
        " INSERT INTO chatflow_turns (session_key, state, attempt, attempts, lease_seconds, accepted, agent_name,"
        " message_id, digest, work_json, queued_at)"
        " SELECT session_key, state, attempt, attempts, lease_seconds, accepted, agent_name,"
        " CAST(n AS TEXT), digest, work_json, queued_at FROM chatflow_turns, numbers",
    )
    query(path, "UPDATE chatflow_turns SET work_json = 'x', queued_at = 'yesterday' WHERE message_id IN ('7', '2499')")
    found = await store.pending_turns()
    assert [turn.message_id for turn in found] == [str(number) for number in range(2501)]
    assert [turn.message_id for turn in found if turn.user_message is None] == ["7", "2499"]


async def test_unreadable_time(store: SQLiteSessionStore, path: Path) -> None:
    """A turn that nobody knows the age of is listed as one that has just come."""
    await runner_on(store).accept("s", "0", message_id="0")
    query(path, "UPDATE chatflow_turns SET queued_at = 'yesterday'")
    (turn,) = await store.pending_turns()
    assert turn.age.total_seconds() == 0


# --- what a killed process leaves ---


async def test_killed_after_accepting(path: Path, open_store: OpenStore) -> None:
    """A message accepted in a process that is killed at that moment is done by the next worker."""
    with started("accept", path) as other:
        assert other.process.wait() == -signal.SIGKILL
    store, heard = open_store(), Heard()
    async with runner_on(store, "answered").working(heard):
        assert await heard.of(1) == [("s", "answered")]
    assert texts(path) == ["hello", "answered"]


async def test_killed_while_telling_an_answer(path: Path, open_store: OpenStore) -> None:
    """An answer that was being told when its process was killed is told again, and the others after it."""
    with started("answer", path) as other:
        message_id, answer = other.heard()
        other.kill()
    store, heard = open_store(), Heard()
    async with runner_on(store, "answered here").working(heard):
        await heard.of(2)
    assert (message_id, heard.contents()[0]) == ("m0", answer)
    assert [turn.message_id for turn in heard.turns] == ["m0", "m1"]
    assert len(texts(path)) == 4
    while query(path, "SELECT count(*) FROM chatflow_turns") != [0]:
        await anyio.lowlevel.checkpoint()


async def test_killed_while_asking(path: Path, open_store: OpenStore) -> None:
    """A turn whose process was killed while it asked the model is finished by the next worker, under its own id."""
    with started("ask", path) as other:
        assert other.heard() == "asked"
        other.kill()
    store = open_store()
    runner = Runner(SUPPORT, store, ScriptedEngine(["answered"]))
    async with runner.working():
        while texts(path) != ["hello", "answered"]:
            await anyio.lowlevel.checkpoint()
    again = await runner.run_async("s", "hello", message_id="m")
    assert (again.content, again.duplicate) == ("answered", True)
