"""Systems on a PostgreSQL server that are spoken to by psycopg: the floor there, and chatflow."""

from __future__ import annotations

import asyncio
import datetime as dt
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import msgspec
import psycopg

from benchmarks.conversation import AGENT, MESSAGES, WINDOW, name_of
from benchmarks.systems.handwritten import bodies_of, length_of
from benchmarks.systems.on_server import OnServer
from benchmarks.systems.ours import Chatflow
from chatflow import Message, Role, StoreBackend
from chatflow.core.codec import message_to_json
from chatflow.postgres import PostgresSessionStore

CONNECTIONS: Final = 10
"""As many as chatflow opens at most by default."""


class ByPsycopg(OnServer):
    """Connections of psycopg's, beside the system's own."""

    async def ask(self, *statements: str) -> list[tuple[Any, ...]]:
        """One after the other."""
        async with await self._connect() as connection:
            for statement in statements:
                cursor = await connection.execute(statement)
            return await cursor.fetchall() if cursor.description is not None else []

    async def _connect(self) -> psycopg.AsyncConnection[tuple[Any, ...]]:
        return await psycopg.AsyncConnection.connect(self.dsn, autocommit=True, options=f"-c search_path={self.schema}")


_TABLES: Final = (
    "CREATE TABLE IF NOT EXISTS sessions (id text PRIMARY KEY, agent text NOT NULL, updated_at timestamptz NOT NULL)",
    "CREATE TABLE IF NOT EXISTS messages (session text, place bigint, body json, PRIMARY KEY (session, place))",
    "CREATE TABLE IF NOT EXISTS processed (id text PRIMARY KEY, at timestamptz NOT NULL)",
)

_TURN: Final = """
    WITH new AS (
        INSERT INTO processed SELECT %(message_id)s::text, now() WHERE %(message_id)s::text IS NOT NULL
        ON CONFLICT DO NOTHING RETURNING id
    ), session AS (
        INSERT INTO sessions SELECT %(name)s, %(agent)s, now() WHERE %(message_id)s::text IS NULL OR EXISTS (TABLE new)
        ON CONFLICT (id) DO UPDATE SET updated_at = excluded.updated_at RETURNING id
    ), dropped AS (
        DELETE FROM messages USING session WHERE session = id AND place < %(oldest)s
    )
    INSERT INTO messages SELECT id, %(end)s::bigint + number - 1, body
    FROM session, json_array_elements(%(bodies)s::json) WITH ORDINALITY AS each (body, number)
"""
"""A turn whole, and nothing that keeps another one out."""


class HandwrittenOnServer(ByPsycopg):
    """The obvious code: a turn is one statement, prepared, in one round trip. Nobody's place is kept."""

    def __init__(self, folder: Path, window: int = WINDOW) -> None:
        super().__init__(folder, window)
        self._connections: list[psycopg.AsyncConnection[tuple[Any, ...]]] = []
        self._free: asyncio.LifoQueue[psycopg.AsyncConnection[tuple[Any, ...]]] = asyncio.LifoQueue()
        self._ends: dict[int, int] = {}

    async def open(self) -> None:
        """Connect, and make the tables."""
        await self.ask(f"CREATE SCHEMA IF NOT EXISTS {self.schema}", *_TABLES)
        for _ in range(CONNECTIONS):
            self._connections.append(await self._connect())
            self._free.put_nowait(self._connections[-1])

    @asynccontextmanager
    async def _connection(self) -> AsyncIterator[psycopg.AsyncConnection[tuple[Any, ...]]]:
        connection = await self._free.get()
        yield connection
        self._free.put_nowait(connection)

    async def fill(self, conversations: range, turns: int) -> None:
        """The first by its own way, and copies of it."""
        first = conversations[0]
        for _ in range(turns):
            await self.turn(first)
        numbers = f"FROM generate_series({first + 1}, {conversations.stop - 1}) AS n"
        await self.ask(
            f"INSERT INTO sessions SELECT 'conversation-' || n, '{AGENT}', now() {numbers}",
            f"INSERT INTO messages SELECT 'conversation-' || n, place, body {numbers}, messages"
            f" WHERE session = '{name_of(first)}'",
        )
        self._ends |= dict.fromkeys(conversations, self._ends[first])

    async def turn(self, conversation: int, message_id: str | None = None) -> float:
        """One statement."""
        end = self._ends.get(conversation, 0)
        self._ends[conversation] = end + MESSAGES
        bodies = bodies_of(end, dt.datetime.now(dt.UTC).isoformat())
        values = {
            "name": name_of(conversation),
            "agent": AGENT,
            "end": end,
            "oldest": end + MESSAGES - MESSAGES * self.window,
            "bodies": msgspec.json.encode(bodies).decode(),
            "message_id": message_id,
        }
        began = time.perf_counter()
        async with self._connection() as connection:
            await connection.execute(_TURN, values)
        return began

    async def load(self, conversation: int) -> int:
        """Each message by `json.loads`, which is what psycopg makes of the type json."""
        async with self._connection() as connection:
            cursor = await connection.execute(
                "SELECT body FROM messages WHERE session = %s ORDER BY place", (name_of(conversation),)
            )
            return sum(length_of(body) for (body,) in await cursor.fetchall())

    async def claim(self, message_id: str) -> bool:
        """One statement."""
        async with self._connection() as connection:
            cursor = await connection.execute(
                "INSERT INTO processed VALUES (%s, now()) ON CONFLICT DO NOTHING", (message_id,)
            )
            return bool(cursor.rowcount)

    async def remember(self, count: int) -> None:
        """In one statement."""
        await self.ask(f"INSERT INTO processed SELECT 'stored-' || n, now() FROM generate_series(0, {count - 1}) AS n")

    async def page(self, after: Any) -> tuple[int, Any]:
        """In the order of ids."""
        async with self._connection() as connection:
            cursor = await connection.execute(
                "SELECT id, agent, updated_at FROM sessions WHERE id > %s ORDER BY id LIMIT 100", (after or "",)
            )
            rows = await cursor.fetchall()
        return len(rows), rows[-1][0] if len(rows) == 100 else None

    async def add_others(self, start: int, stop: int) -> None:
        """In two statements."""
        (body, *_) = bodies_of(0, dt.datetime.now(dt.UTC).isoformat())
        numbers = f"FROM generate_series({start}, {stop - 1}) AS n"
        await self.ask(
            f"INSERT INTO sessions SELECT 'other-' || n, '{AGENT}', now() {numbers}",
            f"INSERT INTO messages SELECT 'other-' || n, 0, '{msgspec.json.encode(body).decode()}' {numbers}",
        )

    async def close(self) -> None:
        """Close the connections."""
        for connection in self._connections:
            await connection.close()


class ChatflowOnServer(ByPsycopg, Chatflow):
    """chatflow as on a file, with another store."""

    def make_store(self) -> StoreBackend:
        """In its schema."""
        return PostgresSessionStore(self.dsn, schema=self.schema, default_max_turns=self.window)

    async def remember(self, count: int) -> None:
        """In one statement."""
        await self.store.get("nobody")  # which makes the tables
        await self.ask(
            "INSERT INTO chatflow_processed_messages (session_id, message_id, processed_at)"
            f" SELECT '', 'stored-' || n, now() FROM generate_series(0, {count - 1}) AS n"
        )

    async def add_others(self, start: int, stop: int) -> None:
        """In two statements."""
        await self.store.get("nobody")
        await self.ask(
            "INSERT INTO chatflow_sessions (session_id, active_agent_name, version, created_at, updated_at)"
            f" SELECT 'other-' || n, '{AGENT}', nextval('chatflow_versions'), now(), now()"
            f" FROM generate_series({start}, {stop - 1}) AS n",
            "INSERT INTO chatflow_messages (session_key, place, message_json)"
            f" SELECT session_key, 0, '{message_to_json(Message(Role.USER, 'Where is it?'))}' FROM chatflow_sessions"
            f" WHERE session_id LIKE 'other-%' AND substr(session_id, 7)::bigint >= {start}",
        )
