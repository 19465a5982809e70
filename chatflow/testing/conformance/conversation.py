"""The agents and messages that the conformance tests talk with."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, Final, TypeVar

import anyio
import anyio.lowlevel

from chatflow.core.agent import Agent
from chatflow.core.engine import EngineReply, EngineRequest
from chatflow.core.messages import Message, Role, ToolCall, ToolResult
from chatflow.core.session import SessionContext
from chatflow.core.store import BaseSessionStore

_T = TypeVar("_T")

BILLING: Final = Agent(name="Billing")
SUPPORT: Final = Agent(name="Support", handoffs=[BILLING])


class PausingEngine:
    """Answers once it is let go on."""

    def __init__(self) -> None:
        self.asked = anyio.Event()
        self.go_on = anyio.Event()

    async def generate(self, request: EngineRequest) -> EngineReply:
        """Wait, then answer."""
        self.asked.set()
        await self.go_on.wait()
        return EngineReply(text="answer")


class Crowd:
    """Answers slowly, and notes how many were asked at the same time: *most*."""

    def __init__(self) -> None:
        self.most = self._now = 0

    async def answer(self, request: EngineRequest) -> str:
        """What a `ScriptedEngine` says."""
        self._now += 1
        self.most = max(self.most, self._now)
        for _ in range(20):
            await anyio.lowlevel.checkpoint()
        self._now -= 1
        return "answer"


def user(text: str) -> Message:
    """A user's message."""
    return Message(Role.USER, text)


def model(text: str) -> Message:
    """A model's message."""
    return Message(Role.MODEL, text)


def system(text: str) -> Message:
    """A system message."""
    return Message(Role.SYSTEM, text)


def call(*ids: str) -> Message:
    """A model's message that calls a tool once for each id."""
    return Message(Role.MODEL, tool_calls=[ToolCall(id=each, name="look_up") for each in ids])


def result(*ids: str) -> Message:
    """A tool's message that answers those calls."""
    return Message(
        Role.TOOL, tool_results=[ToolResult(tool_call_id=each, name="look_up", content="found") for each in ids]
    )


def texts(messages: Iterable[Message]) -> list[str]:
    """What was said, with a tool message shown as the ids it answers and a call as the ids it asks for."""
    return [
        message.text
        or ",".join(each.id for each in message.tool_calls)
        or ",".join(each.tool_call_id for each in message.tool_results)
        for message in messages
    ]


async def say(session: SessionContext, *said: str) -> None:
    """One turn for each text: the user says it and the model repeats it."""
    for text in said:
        async with session.turn():
            await session.add_message(user(text))
            await session.add_message(model(f"{text}!"))


async def stored(store: BaseSessionStore, session_id: str) -> dict[str, Any] | None:
    """All that the store has of a conversation, as code outside every turn sees it."""

    async def look() -> dict[str, Any] | None:
        session = await store.get(session_id)
        if session is None:
            return None
        return {
            "history": list(session.history),
            "agent": session.active_agent_name,
            "state": dict(session.state),
            "metadata": dict(session.metadata),
            "max_turns": session.max_turns,
        }

    return await outside(look())


async def outside(operation: Coroutine[Any, Any, _T]) -> _T:
    """Await *operation* as code that belongs to no turn."""
    return await asyncio.create_task(operation, context=contextvars.Context())


async def queued(store: BaseSessionStore, turns: int) -> None:
    """Let the loop run until so many turns wait for their places in this process."""
    await until(lambda: len(store.backend.line._waiters) >= turns)


async def until(reached: Callable[[], bool]) -> None:
    """Let the loop run, a step at a time, until something is so that sets no event."""
    while not reached():  # noqa: ASYNC110  # what is looked at sets no event
        await asyncio.sleep(0)
