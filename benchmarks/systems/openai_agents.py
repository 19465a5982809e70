"""openai-agents: a session object a conversation, with a connection for each thread, or a thread of its own."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from agents.extensions.memory import AsyncSQLiteSession
from agents.memory import SQLiteSession

from benchmarks.conversation import AGENT, ANSWER, FOUND_TEXT, MESSAGES, QUESTION, TOOL, WINDOW, name_of
from benchmarks.systems.base import System
from benchmarks.systems.copying import CopyingSystem


class Items(System):
    """A turn's four items, and what all of its sessions are asked."""

    def __init__(self, folder: Path, window: int = WINDOW) -> None:
        super().__init__(folder, window)
        self.sessions: dict[int, Any] = {}
        self._calls = 0

    def items(self) -> list[Any]:
        """As its runner makes them."""
        self._calls += 1
        call = f"call_{self._calls}"
        text = {"type": "output_text", "text": ANSWER, "annotations": []}
        arguments = json.dumps({"order": self._calls})
        return [
            {"role": "user", "content": QUESTION},
            {"type": "function_call", "call_id": call, "name": TOOL, "arguments": arguments},
            {"type": "function_call_output", "call_id": call, "output": FOUND_TEXT},
            {"type": "message", "role": "assistant", "content": [text], "agent": AGENT},
        ]

    async def turn(self, conversation: int, message_id: str | None = None) -> float:
        """Four inserts and a commit."""
        items = self.items()
        began = time.perf_counter()
        await self.sessions[conversation].add_items(items)
        return began

    async def load(self, conversation: int) -> int:
        """The last items; it keeps none."""
        length = 0
        for item in await self.sessions[conversation].get_items(limit=MESSAGES * self.window):
            content = item.get("content") or item.get("arguments") or item.get("output")
            length += len(content) if isinstance(content, str) else sum(len(part["text"]) for part in content)
        return length


class _Sessions(Items, CopyingSystem):
    """What its runner does at the end of a turn, at its best: `add_items` once, with all four. It never drops any."""

    tables = (("agent_sessions", "session_id"), ("agent_messages", "session_id"))
    kind: Any

    async def begin(self, name: str, turns: int) -> None:
        """In one call."""
        session = self.kind(name, str(self.path))
        await session.add_items([item for _ in range(turns) for item in self.items()])
        await _closed(session)

    async def attach(self, conversation: int) -> None:
        """The session object, and its connection."""
        self.sessions[conversation] = session = self.kind(name_of(conversation), str(self.path))
        await session.get_items(limit=1)

    async def close(self) -> None:
        """Each of them; a thread that is left would keep the process from its end."""
        for session in self.sessions.values():
            await _closed(session)


async def _closed(session: Any) -> None:
    waiting = session.close()
    if waiting is not None:
        await waiting


class SyncSessions(_Sessions):
    """`SQLiteSession`: each operation by `asyncio.to_thread`."""

    kind = SQLiteSession


class AsyncSessions(_Sessions):
    """`AsyncSQLiteSession`: an aiosqlite connection, and so a thread, for each."""

    kind = AsyncSQLiteSession
