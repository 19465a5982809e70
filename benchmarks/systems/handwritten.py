"""The floor: the obvious code, sqlite3 on the event loop, a transaction a turn."""

from __future__ import annotations

import datetime as dt
import json
import sqlite3
import time
from pathlib import Path
from typing import Any, Final

import msgspec

from benchmarks.conversation import AGENT, ANSWER, FOUND, MESSAGES, QUESTION, TOOL, WINDOW, name_of
from benchmarks.systems.base import System

_TABLES: Final = (
    "CREATE TABLE sessions (id TEXT PRIMARY KEY, agent TEXT NOT NULL, updated_at TEXT NOT NULL)",
    "CREATE TABLE messages (session TEXT, place INT, body TEXT, PRIMARY KEY (session, place)) WITHOUT ROWID",
    "CREATE TABLE processed (id TEXT PRIMARY KEY, at TEXT NOT NULL) WITHOUT ROWID",
)


class Handwritten(System):
    """It blocks its event loop for each transaction, and nobody's place is kept: that is what makes it the floor."""

    def __init__(self, folder: Path, window: int = WINDOW, *, level: str = "FULL", in_memory: bool = False) -> None:
        super().__init__(folder, window)
        self._connection = sqlite3.connect(":memory:" if in_memory else folder / "floor.db", isolation_level=None)
        for statement in ("PRAGMA journal_mode=WAL", f"PRAGMA synchronous={level}", *_TABLES):
            self._connection.execute(statement)
        self._ends: dict[int, int] = {}

    async def fill(self, conversations: range, turns: int) -> None:
        """In one transaction."""
        self._connection.execute("BEGIN IMMEDIATE")
        for conversation in conversations:
            for _ in range(turns):
                self._write(conversation)
        self._connection.execute("COMMIT")

    async def turn(self, conversation: int, message_id: str | None = None) -> float:
        """Nothing else runs meanwhile."""
        began = time.perf_counter()
        self._connection.execute("BEGIN IMMEDIATE")
        if message_id is None or self._note(message_id):
            self._write(conversation)
        self._connection.execute("COMMIT")
        return began

    def _write(self, conversation: int) -> None:
        name, end, now = name_of(conversation), self._ends.get(conversation, 0), dt.datetime.now(dt.UTC).isoformat()
        messages = bodies_of(end, now)
        self._connection.execute(
            "INSERT INTO sessions VALUES (?, ?, ?) ON CONFLICT (id) DO UPDATE SET updated_at = excluded.updated_at",
            (name, AGENT, now),
        )
        self._connection.executemany(
            "INSERT INTO messages VALUES (?, ?, ?)",
            [(name, end + index, msgspec.json.encode(message).decode()) for index, message in enumerate(messages)],
        )
        self._ends[conversation] = end + MESSAGES
        oldest = self._ends[conversation] - MESSAGES * self.window
        self._connection.execute("DELETE FROM messages WHERE session = ? AND place < ?", (name, oldest))

    def _note(self, message_id: str) -> bool:
        now = dt.datetime.now(dt.UTC).isoformat()
        return bool(
            self._connection.execute("INSERT OR IGNORE INTO processed VALUES (?, ?)", (message_id, now)).rowcount
        )

    async def load(self, conversation: int) -> int:
        """Each message by `json.loads`, as the obvious code does."""
        rows = self._connection.execute(
            "SELECT body FROM messages WHERE session = ? ORDER BY place", (name_of(conversation),)
        ).fetchall()
        length = 0
        for (body,) in rows:
            length += length_of(json.loads(body))
        return length

    async def claim(self, message_id: str) -> bool:
        """One statement, durable when it returns."""
        return self._note(message_id)

    async def remember(self, count: int) -> None:
        """In one statement."""
        self._connection.execute(
            "WITH RECURSIVE numbers (n) AS (SELECT 0 UNION ALL SELECT n + 1 FROM numbers WHERE n < :count)"
            " INSERT OR IGNORE INTO processed SELECT 'stored-' || n, :now FROM numbers LIMIT :count",
            {"count": count, "now": dt.datetime.now(dt.UTC).isoformat()},
        )

    async def page(self, after: Any) -> tuple[int, Any]:
        """In the order of ids: an index by time would make each turn dearer."""
        rows = self._connection.execute(
            "SELECT id, agent, updated_at FROM sessions WHERE id > ? ORDER BY id LIMIT 100", (after or "",)
        ).fetchall()
        return len(rows), rows[-1][0] if len(rows) == 100 else None

    async def add_others(self, start: int, stop: int) -> None:
        """In two statements."""
        numbers = (
            "WITH RECURSIVE numbers (n) AS (SELECT :start UNION ALL SELECT n + 1 FROM numbers WHERE n + 1 < :stop)"
        )
        message = {"role": "user", "content": QUESTION, "timestamp": dt.datetime.now(dt.UTC).isoformat()}
        values = {"start": start, "stop": stop, "now": message["timestamp"], "body": json.dumps(message)}
        self._connection.execute("BEGIN")
        for select in (
            "INSERT INTO sessions SELECT 'other-' || n, 'assistant', :now FROM numbers",
            "INSERT INTO messages SELECT 'other-' || n, 0, :body FROM numbers",
        ):
            self._connection.execute(f"{numbers} {select}", values)
        self._connection.execute("COMMIT")

    async def close(self) -> None:
        """Close the file."""
        self._connection.close()


def bodies_of(end: int, now: str) -> tuple[dict[str, Any], ...]:
    """The messages of the turn that begins at *end*."""
    call = f"call_{end}"
    return (
        {"role": "user", "content": QUESTION, "timestamp": now},
        {"role": "model", "tool_calls": [{"id": call, "name": TOOL, "args": {"order": end}}], "timestamp": now},
        {"role": "tool", "tool_results": [{"tool_call_id": call, "name": TOOL, "content": FOUND}], "timestamp": now},
        {"role": "model", "content": ANSWER, "agent": AGENT, "timestamp": now},
    )


def length_of(message: dict[str, Any]) -> int:
    """Touch what is in it."""
    length = len(message.get("content") or "")
    for call in message.get("tool_calls", ()):
        length += len(call["args"])
    for result in message.get("tool_results", ()):
        length += len(result["content"])
    return length
