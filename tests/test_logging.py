"""What is logged names ids, and never what was said."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Final

import anyio.lowlevel
import pytest

from chatflow import (
    Agent,
    Compactor,
    ContextProvider,
    ContextWindowError,
    EngineError,
    EngineReply,
    Handoff,
    Message,
    Role,
    RunContext,
    Runner,
    ScriptedEngine,
    SQLiteSessionStore,
    ToolContext,
    tool,
)
from chatflow.core.session import AgentSession
from chatflow.engines.common_form import INVALID_ARGUMENTS_KEY
from tests.sqlite.damage import column, sql

SAID: Final = "c4n4ry"
"""Stands in all that is said, told, called with, returned, instructed and noted."""


@tool
async def fine(text: str) -> dict[str, str]:
    """Return what was given."""
    return {"found": text}


@tool
async def unstorable(text: str) -> object:
    """Return what can't be kept."""
    return [text, object()]


@tool
async def forgetful(text: str, context: ToolContext) -> str:
    """Clear the history on the way."""
    context.state["kept"] = text
    await context.session.clear_history()
    return text


@tool
async def lost(text: str) -> Handoff:
    """Hand over to nobody."""
    return Handoff(target_agent_name="Nobody", reason=text, context_updates={"note": text})


class Adding(ContextProvider):
    """Adds to the run, and to what is stored."""

    async def before_run(self, agent: Agent, session: AgentSession, context: RunContext) -> None:
        context.add_instructions(SAID)
        context.add_messages(Message(Role.MODEL, SAID), store=True)


@pytest.fixture
def heard(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    """All that chatflow logs, at every level."""
    caplog.set_level(logging.DEBUG, logger="chatflow")
    return caplog


@pytest.fixture
async def store(anyio_backend: str, tmp_path: Path) -> AsyncIterator[SQLiteSessionStore]:
    """A store in a file, with a small window."""
    async with SQLiteSessionStore(tmp_path / "chat.db", default_max_turns=2) as store:
        yield store


def refuse_what_was_said(heard: pytest.LogCaptureFixture, *expected: str) -> None:
    """Fail if a line quotes what was said, or nothing was logged of what is expected."""
    assert SAID not in heard.text
    for line in expected:
        assert line in heard.text
    assert {record.name.split(".")[0] for record in heard.records} <= {"chatflow"}


def scripted(*replies: Any) -> ScriptedEngine:
    """An engine that answers in the end, with what was said."""
    return ScriptedEngine([*replies, f"It is {SAID}."], default=f"It is {SAID}.")


async def test_tools(store: SQLiteSessionStore, heard: pytest.LogCaptureFixture) -> None:
    """Calls that go well, and calls that are refused, fail to be kept or lead nowhere."""
    call = ScriptedEngine.call
    invalid = EngineReply(
        text=SAID, tool_calls=[call("fine")], extra={INVALID_ARGUMENTS_KEY: {"0": f'{{"text": "{SAID}'}}
    )
    engine = scripted(
        [call("fine", text=SAID), call("fine", wrong=SAID), call("unstorable", text=SAID), call("lost", text=SAID)],
        invalid,
        [call("forgetful", text=SAID), call("missing", text=SAID)],
    )
    agent = Agent(
        "Support",
        SAID,
        tools=[fine, unstorable, forgetful, lost],
        context_providers=[Adding()],
        engine=engine,
    )
    runner = Runner(agent, store, max_tool_iterations=3)
    response = await runner.run_async("s", SAID, {"note": SAID}, message_id="m1")
    assert SAID in response.content
    refuse_what_was_said(
        heard,
        "was called with arguments that it does not take",
        "is not there",
        "returned what can't be stored",
        "no JSON object",
        "handoff to unknown agent",
        "asked for tools 3 times",
    )


async def test_long_conversation(store: SQLiteSessionStore, heard: pytest.LogCaptureFixture) -> None:
    """Turns that are not sent, that no room is left for, and that a summary stands for, or none can be made for."""
    too_long = ContextWindowError("It is too long.", model="none")
    engine = scripted(SAID, SAID, SAID, too_long, SAID, SAID)
    agent = Agent("Support", SAID, engine=engine)
    away = EngineError("Away.", model="none")
    said: list[Any] = [SAID, away, ContextWindowError("It is too long.", model="none"), " "]
    short = Agent("Short", SAID, engine=ScriptedEngine(said), max_prompt_tokens=1000)
    runner = Runner(agent, store, max_prompt_tokens=5, on_context_window="shrink", compactor=Compactor(short))
    for _ in range(8):
        await runner.run_async("s", SAID)
    refuse_what_was_said(
        heard,
        "are not sent to agent 'Support'",
        "asked again, with",
        "a summary stands for",
        "the turn commits without it: Away.",
        "messages is asked for in place of",
        "the turn commits without it: ValueError",
    )


async def test_work_that_fails(store: SQLiteSessionStore, heard: pytest.LogCaptureFixture) -> None:
    """An accepted message whose engine fails, until it is given up."""
    runner = Runner(
        Agent("Support", SAID, engine=ScriptedEngine([EngineError("Away.", model="none")])), store, max_attempts=1
    )
    await runner.accept("s", SAID, message_id="m1", metadata={"note": SAID})
    async with runner.working():
        while [turn.state for turn in await store.pending_turns()] != ["dead"]:
            await anyio.lowlevel.checkpoint()
    refuse_what_was_said(heard, "message 'm1' was given up")


async def test_damage(store: SQLiteSessionStore, tmp_path: Path, heard: pytest.LogCaptureFixture) -> None:
    """Rows that can't be read are named and not quoted."""
    runner = Runner(Agent("Support", engine=scripted()), store)
    await runner.run_async("s", SAID)
    await store.aclose()
    sql(column("metadata_json", f"'{SAID}'"), column("state_json", f"'[\"{SAID}\"]'"))(tmp_path / "chat.db")
    async with SQLiteSessionStore(tmp_path / "chat.db") as again:
        await again.list_sessions()
        assert await again.check()
        assert await again.repair()
    refuse_what_was_said(heard, "metadata_json")
