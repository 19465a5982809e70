"""chatflow, over one of the stores that its tests run on, with session objects that are at hand as in a running bot."""

from __future__ import annotations

import asyncio
import datetime as dt
import sqlite3
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Final

from benchmarks.conversation import AGENT, ANSWER, FOUND, QUESTION, TOOL, WINDOW, name_of
from benchmarks.systems.base import System
from chatflow import (
    Agent,
    AgentResponse,
    EngineReply,
    EngineRequest,
    Message,
    Role,
    Runner,
    SessionContext,
    SQLiteSessionStore,
    StoreBackend,
    ToolCall,
    ToolResult,
    tool,
)
from chatflow.core.codec import message_to_json
from chatflow.core.records import Claim
from chatflow.core.turn import Turn
from tests.backends import BACKENDS

_AT_ONCE: Final = 64
_NUMBERS: Final = (
    "WITH RECURSIVE numbers (n) AS (SELECT :start UNION ALL SELECT n + 1 FROM numbers WHERE n + 1 < :stop)"
)


@tool(name=TOOL)
async def _find_order(order: int) -> dict[str, Any]:
    """Find an order."""
    return FOUND


class _Instant:
    """A model that calls the tool, and answers once it has its result."""

    def __init__(self) -> None:
        self._calls = 0

    async def generate(self, request: EngineRequest) -> EngineReply:
        """Look at who has spoken last."""
        if request.messages[-1].role is Role.TOOL:
            return EngineReply(text=ANSWER)
        self._calls += 1
        return EngineReply(tool_calls=[ToolCall(id=f"asked_{self._calls}", name=TOOL, args={"order": self._calls})])


class Chatflow(System):
    """A turn is `async with session.turn()`; with a message id it is what `Runner.run_async` makes of one."""

    def __init__(self, folder: Path, window: int = WINDOW, *, backend: str = "sqlite-file") -> None:
        super().__init__(folder, window)
        self._backend = backend
        self.store = self.make_store()
        self.sessions: dict[int, SessionContext] = {}
        self._runner: Runner | None = None
        self._calls = 0

    def make_store(self) -> StoreBackend:
        """The store that is measured."""
        (make,) = (each.make for each in BACKENDS if each.name == self._backend)
        return make(self.folder, default_max_turns=self.window)

    async def fill(self, conversations: range, turns: int) -> None:
        """Each in one turn, and as many at once as are committed together."""
        for start in range(0, len(conversations), _AT_ONCE):
            async with asyncio.TaskGroup() as group:
                for conversation in conversations[start : start + _AT_ONCE]:
                    group.create_task(self._fill(conversation, turns))

    async def _fill(self, conversation: int, turns: int) -> None:
        session = await self.store.get_or_create(name_of(conversation), Agent(AGENT))
        self.sessions[conversation] = session
        async with session.turn():
            for _ in range(turns):
                await self._say(session)

    async def turn(self, conversation: int, message_id: str | None = None) -> float:
        """The commit is handed over where the block ends."""
        session = self.sessions[conversation]
        if message_id is not None:
            return await self._turn_with_claim(session, message_id)
        async with session.turn():
            await self._say(session)
            return time.perf_counter()

    async def _turn_with_claim(self, session: SessionContext, message_id: str) -> float:
        turn = Turn(session, Claim(message_id, QUESTION), AGENT)
        await turn.take()
        await self._say(session)
        turn.response = AgentResponse(content=ANSWER, active_agent_name=AGENT, tool_calls_executed=[TOOL])
        ended = time.perf_counter()
        await turn.commit()
        return ended

    async def _say(self, session: SessionContext) -> None:
        self._calls += 1
        for message in messages(self._calls):
            await session.add_message(message)

    async def forget(self, conversation: int) -> None:
        """Let go of the session object, as the store does of those that were not used lately."""
        session = self.sessions.pop(conversation, None)
        if session is not None:
            self.store._live.remove(session)  # noqa: SLF001  # else 512 others would have to be used first

    async def load(self, conversation: int) -> int:
        """`store.get`, and the history."""
        session = self.sessions.get(conversation) or await self.store.get(name_of(conversation))
        assert session is not None
        if conversation in self.sessions:
            # Held already, so asked whether it is still as the storage has it.
            await self.store.get(name_of(conversation))
        self.sessions[conversation] = session
        return touched(session.history)

    async def claim(self, message_id: str) -> bool:
        """In a scope without a conversation."""
        return await self.store.mark_message_processed(message_id)

    async def remember(self, count: int) -> None:
        """In one statement, where there are statements."""
        if not isinstance(self.store, SQLiteSessionStore):
            for number in range(count):
                await self.store.mark_message_processed(f"stored-{number}")
            return
        await self._execute(
            f"{_NUMBERS} INSERT OR IGNORE INTO chatflow_processed_messages (session_id, message_id, processed_at)"
            " SELECT '', 'stored-' || n, :now FROM numbers",
            start=0,
            stop=count,
        )

    async def page(self, after: Any) -> tuple[int, Any]:
        """The newest commit first."""
        page = await self.store.list_sessions(limit=100, after=after)
        return len(page.items), page.next

    async def add_others(self, start: int, stop: int) -> None:
        """In two statements, where there are statements."""
        if not isinstance(self.store, SQLiteSessionStore):
            for number in range(start, stop):
                session = await self.store.get_or_create(f"other-{number}", Agent(AGENT))
                await session.add_message(Message(Role.USER, QUESTION))
            return
        await self._execute(
            f"{_NUMBERS} INSERT INTO chatflow_sessions"
            " (session_id, active_agent_name, version, created_at, updated_at)"
            " SELECT 'other-' || n, 'assistant',"
            " n - :start + 1 + (SELECT coalesce(max(version), 0) FROM chatflow_sessions), :now, :now FROM numbers",
            f"{_NUMBERS} INSERT INTO chatflow_messages (session_key, place, message_json)"
            " SELECT session_key, 0, :text FROM numbers"
            " JOIN chatflow_sessions ON owner = '' AND session_id = 'other-' || n",
            start=start,
            stop=stop,
        )

    async def _execute(self, *statements: str, start: int, stop: int) -> None:
        assert isinstance(self.store, SQLiteSessionStore)
        values = {
            "start": start,
            "stop": stop,
            "now": dt.datetime.now(dt.UTC).isoformat(timespec="microseconds"),
            "text": message_to_json(Message(Role.USER, QUESTION)),
        }

        def execute(connection: sqlite3.Connection) -> None:
            for statement in statements:
                connection.execute(statement, values)

        write: Callable[..., Any] = self.store._database.write  # noqa: SLF001  # a million calls would take minutes
        await write(execute, durable=True)

    async def run(self, conversation: int, message_id: str | None = None) -> None:
        """`Runner.run_async`."""
        if self._runner is None:
            agent = Agent(AGENT, instructions="Help with orders.", tools=[_find_order])
            self._runner = Runner(agent, self.store, _Instant())
        await self._runner.run_async(name_of(conversation), QUESTION, message_id=message_id)

    def make_messages(self) -> object:
        """Frozen values, as sessions hold them."""
        self._calls += 1
        return messages(self._calls)

    async def close(self) -> None:
        """Close the store."""
        await self.store.aclose()


def messages(number: int) -> list[Message]:
    """A turn, with a call of its own."""
    call = f"call_{number}"
    return [
        Message(Role.USER, QUESTION),
        Message(Role.MODEL, tool_calls=[ToolCall(id=call, name=TOOL, args={"order": number})], agent_name=AGENT),
        Message(Role.TOOL, tool_results=[ToolResult(tool_call_id=call, name=TOOL, content=FOUND)]),
        Message(Role.MODEL, ANSWER, agent_name=AGENT),
    ]


def touched(history: Iterable[Message]) -> int:
    """Read every message of *history*."""
    length = 0
    for message in history:
        length += len(message.content or "")
        for call in message.tool_calls:
            length += len(call.args)
        for result in message.tool_results:
            length += len(result.content)
    return length
