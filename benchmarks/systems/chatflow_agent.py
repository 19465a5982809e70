"""chatflow-agent 0.3.4: a new connection for each message, on the event loop, at NORMAL."""

from __future__ import annotations

import sqlite3
import time
from contextlib import closing
from pathlib import Path
from typing import Any

from chatflow_agent import (
    Agent,
    BaseEngine,
    Message,
    Role,
    Runner,
    SessionContext,
    SQLiteSessionStore,
    ToolCall,
    ToolResult,
)
from chatflow_agent.core.engines import EngineTurnResult

from benchmarks.conversation import AGENT, ANSWER, FOUND, QUESTION, TOOL, WINDOW, name_of
from benchmarks.systems.copying import BUSY_SECONDS, CopyingSystem


def find_order(order: int) -> dict[str, Any]:
    """Find an order."""
    return FOUND


class _Instant(BaseEngine):
    """A model that calls the tool, and answers once it has its result."""

    async def generate_turn_async(self, agent: Agent, history: list[Message]) -> EngineTurnResult:
        """Look at who has spoken last."""
        if history[-1].role is Role.TOOL:
            return EngineTurnResult(text=ANSWER)
        return EngineTurnResult(tool_calls=[ToolCall(id=f"call_{len(history)}", name=TOOL, args={"order": 1})])


class ChatflowAgent(CopyingSystem):
    """What its runner does: `add_message` for each message of the turn."""

    tables = (("chatflow_sessions", "session_id"), ("chatflow_messages", "session_id"))

    def __init__(self, folder: Path, window: int = WINDOW) -> None:
        super().__init__(folder, window)
        self._store = SQLiteSessionStore(str(self.path), default_max_turns=window)
        self._agent = Agent(name=AGENT, instructions="", model="none")
        self._sessions: dict[int, SessionContext] = {}
        self._runner: Runner | None = None
        self._calls = 0

    async def begin(self, name: str, turns: int) -> None:
        """Its rows as it writes them; its own way takes a second for 40 turns."""
        self._store.get_or_create(name, self._agent)
        rows = [
            (name, message.role.value, message.content, message.model_dump_json())
            for _ in range(turns)
            for message in self._messages()
        ]
        with closing(sqlite3.connect(self.path, timeout=BUSY_SECONDS)) as connection, connection:
            connection.executemany(
                "INSERT INTO chatflow_messages (session_id, role, content, message_json) VALUES (?, ?, ?, ?)", rows
            )

    async def attach(self, conversation: int) -> None:
        """The session object."""
        self._sessions[conversation] = self._store.get_or_create(name_of(conversation), self._agent)

    def _messages(self) -> list[Message]:
        self._calls += 1
        call = f"call_{self._calls}"
        return [
            Message(role=Role.USER, content=QUESTION),
            Message(role=Role.MODEL, tool_calls=[ToolCall(id=call, name=TOOL, args={"order": self._calls})]),
            Message(role=Role.TOOL, tool_results=[ToolResult(tool_call_id=call, name=TOOL, content=FOUND)]),
            Message(role=Role.MODEL, content=ANSWER),
        ]

    async def turn(self, conversation: int, message_id: str | None = None) -> float:
        """Each message in a transaction of its own; the id before them, as its webhook does."""
        began = time.perf_counter()
        if message_id is not None:
            self._store.record_processed_message(message_id)
        session = self._sessions[conversation]
        for message in self._messages():
            session.add_message(message)
        return began

    async def run(self, conversation: int, message_id: str | None = None) -> None:
        """`Runner.run_async`; the id before it, as its webhook does."""
        if self._runner is None:
            agent = Agent(name=AGENT, instructions="Help with orders.", model="none", tools=[find_order])
            self._runner = Runner(agent, self._store, _Instant())
        if message_id is not None:
            self._store.record_processed_message(message_id)
        await self._runner.run_async(name_of(conversation), QUESTION)

    async def load(self, conversation: int) -> int:
        """Read whole each time: it keeps no sessions."""
        length = 0
        for message in self._store.get_or_create(name_of(conversation), self._agent).history:
            length += len(message.content or "")
            for call in message.tool_calls or ():
                length += len(call.args)
            for result in message.tool_results or ():
                length += len(result.content)
        return length

    async def claim(self, message_id: str) -> bool:
        """A look, a purge and an insert."""
        return bool(self._store.record_processed_message(message_id))

    async def remember(self, count: int) -> None:
        """Its rows as it writes them."""
        with closing(sqlite3.connect(self.path, timeout=BUSY_SECONDS)) as connection, connection:
            connection.executemany(
                "INSERT OR IGNORE INTO chatflow_processed_messages (message_id) VALUES (?)",
                ((f"stored-{number}",) for number in range(count)),
            )

    async def page(self, after: Any) -> tuple[int, Any]:
        """All ids at once: it knows no pages."""
        return len(self._store.list_sessions()), None
