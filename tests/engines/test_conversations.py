"""Conversations over real HTTP with servers that refuse what the providers refuse: none of them ever does."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Final

import pytest

from chatflow import Agent, Runner, SQLiteSessionStore, tool
from chatflow.core.messages import Message, Role, ToolCall, ToolResult
from chatflow.engines import LiteLLMEngine
from tests.engines.protocols import ALL, Protocol, asked
from tests.model_server import ModelServer


@tool
async def look_up(order_id: str) -> dict[str, str]:
    """Look up an order."""
    return {"order_id": order_id, "status": "sent"}


@tool
async def fail() -> str:
    """Always fail."""
    raise RuntimeError("no")


@pytest.fixture(scope="module", params=ALL, ids=lambda each: each.name)
def protocol(request: pytest.FixtureRequest) -> Protocol:
    """Each of the languages in turn."""
    chosen: Protocol = request.param
    return chosen


@pytest.fixture(scope="module")
async def running(anyio_backend: str, protocol: Protocol) -> AsyncIterator[ModelServer]:
    """Its server."""
    async with asked(protocol) as server:
        yield server


@pytest.fixture
def asking(running: ModelServer, protocol: Protocol) -> LiteLLMEngine:
    """An engine that asks it."""
    running.script()
    return protocol.engine(running)


def desk(engine: LiteLLMEngine) -> Agent:
    """Two agents that hand over to each other."""
    support = Agent("Support", "You help.", tools=[look_up, fail], engine=engine)
    billing = Agent("Billing", "You bill.", tools=[look_up], handoffs=[support], engine=engine)
    support.add_handoff(billing)
    return support


async def ask(runner: Runner, text: str, *, streamed: bool) -> str:
    """Say something, and hear the answer whole or in pieces."""
    if not streamed:
        return (await runner.run_async("c", text)).content
    return (await runner.run_stream("c", text).collect()).content


def by_hand(protocol: Protocol) -> list[Message]:
    """What an application may add itself: a question whose answer was cut off, and another one."""
    if protocol.service_history:  # there the history is the service's
        return [Message(Role.USER, "And 6?"), Message(Role.USER, " ")]
    calls = [ToolCall(id="functions.look_up:0", name="look_up", args={"order_id": "5"}), *EQUAL]
    return [
        Message(Role.USER, "And 5?"),
        Message(Role.MODEL, "Wait.", tool_calls=calls),
        Message(Role.TOOL, tool_results=[ToolResult(tool_call_id="same", name="look_up", content="one of two")]),
        Message(Role.USER, "And 6?"),
        Message(Role.USER, " "),
    ]


EQUAL: Final = [ToolCall(id="same", name="look_up", args={"order_id": "6"})] * 2
LATE: Final = ToolResult(tool_call_id="functions.look_up:0", name="look_up", content={"at": "last"})


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
async def test_conversation(
    running: ModelServer, asking: LiteLLMEngine, protocol: Protocol, tmp_path: Path, streamed: bool
) -> None:
    """Tools, handoffs, thoughts, equal calls, reused ids, open calls, late results, empty texts: nothing is refused."""
    said, agent, path = protocol.said, desk(asking), tmp_path / "chat.db"
    twice = [("call_1", "look_up", {"order_id": "1"}), ("call_2", "look_up", {"order_id": "1"}), ("call_3", "fail", {})]
    async with SQLiteSessionStore(path) as store:
        runner = Runner(agent, session_store=store)
        running.script(
            said("One moment.", "Two look-ups.", twice),
            said(None, "Not there yet.", [("call_1", "look_up", {"order_id": "2"})]),
            said("Both are sent.", "Done.", []),
            said("I am still here.", None, []),
        )
        assert await ask(runner, "Where is 1, and 1?", streamed=streamed) == "Both are sent."
        assert await ask(runner, "", streamed=streamed) == "I am still here."
        session = await store.get("c")
        assert session is not None
        for message in by_hand(protocol):
            await session.add_message(message)
    async with SQLiteSessionStore(path) as store:
        runner = Runner(agent, session_store=store)
        running.script(
            said(None, "Billing!", [("call_1", "transfer_to_billing", {}), ("call_2", "look_up", {"order_id": "7"})]),
            said(None, "Mine.", [("call_9", "look_up", {"order_id": "7"})]),
            said(None, "Not mine.", [("call_8", "transfer_to_support", {})]),
            said("Back with you.", "Hm.", []),
        )
        assert await ask(runner, "And 7?", streamed=streamed) == "Back with you."
        session = await store.get("c")
        assert session is not None
        if not protocol.service_history:
            await session.add_message(Message(Role.TOOL, tool_results=[LATE]))
        running.script(
            said(None, "Once more.", [("call_1", "look_up", {"order_id": "8"})]),
            said("No more tools.", None, []),
            said("Bye.", "Polite.", []),
        )
        limited = Runner(agent, session_store=store, max_tool_iterations=1)
        assert await ask(limited, "And 8?", streamed=streamed) == "No more tools."
        assert await ask(limited, "Thanks.", streamed=streamed) == "Bye."
        assert len(running.requests) == 3
