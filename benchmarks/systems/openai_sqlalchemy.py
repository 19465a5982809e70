"""openai-agents on a PostgreSQL server: an SQLAlchemySession a conversation, over one engine, as one program has it."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import asyncpg
from agents.extensions.memory import SQLAlchemySession
from sqlalchemy.ext.asyncio import create_async_engine

from benchmarks.conversation import WINDOW, name_of
from benchmarks.systems.on_server import OnServer
from benchmarks.systems.openai_agents import Items

_COPY: Final = (
    "INSERT INTO agent_sessions (session_id) SELECT {name} FROM {numbers} AS n",
    """
    INSERT INTO agent_messages (session_id, message_data, created_at)
    SELECT {name}, message_data, created_at FROM {numbers} AS n, agent_messages WHERE session_id = '{source}'
    ORDER BY n, id
    """,
)


class SqlAlchemySessions(Items, OnServer):
    """What its runner does at the end of a turn, at its best: `add_items` once, with all four. It never drops any."""

    def __init__(self, folder: Path, window: int = WINDOW) -> None:
        super().__init__(folder, window)
        self._engine = create_async_engine(
            self.dsn.replace("postgresql:", "postgresql+asyncpg:"),
            connect_args={"server_settings": {"search_path": self.schema}},
        )

    async def open(self) -> None:
        """The schema; the first session makes the tables."""
        await self.ask(f"CREATE SCHEMA IF NOT EXISTS {self.schema}")
        await self._session("nobody").get_items(limit=1)

    def _session(self, name: str) -> Any:
        return SQLAlchemySession(name, engine=self._engine, create_tables=True)

    async def ask(self, *statements: str) -> list[tuple[Any, ...]]:
        """One after the other."""
        connection = await asyncpg.connect(self.dsn, server_settings={"search_path": self.schema})
        try:
            for statement in statements:
                rows = await connection.fetch(statement)
            return [tuple(row) for row in rows]
        finally:
            await connection.close()

    async def fill(self, conversations: range, turns: int) -> None:
        """Start the first, and copy it."""
        first = conversations[0]
        await self._begin(name_of(first), turns)
        await self._copy(name_of(first), "'conversation-' || n", first + 1, conversations.stop)
        for conversation in conversations:
            self.sessions[conversation] = self._session(name_of(conversation))

    async def add_others(self, start: int, stop: int) -> None:
        """Start the first, with a turn, and copy it."""
        await self._begin(f"other-{start}", 1)
        await self._copy(f"other-{start}", "'other-' || n", start + 1, stop)

    async def _begin(self, name: str, turns: int) -> None:
        await self._session(name).add_items([item for _ in range(turns) for item in self.items()])

    async def _copy(self, source: str, name: str, start: int, stop: int) -> None:
        numbers = f"generate_series({start}, {stop - 1})"
        await self.ask(*(statement.format(source=source, name=name, numbers=numbers) for statement in _COPY))

    async def close(self) -> None:
        """The engine, which has the connections."""
        await self._engine.dispose()
