"""What packages that keep conversations in SQLite have in common: one is filled, and the others are copies of it."""

from __future__ import annotations

import sqlite3
from abc import abstractmethod
from contextlib import closing
from pathlib import Path
from typing import ClassVar, Final

from benchmarks.conversation import name_of
from benchmarks.systems.base import System

BUSY_SECONDS: Final = 60
"""How long filling waits for a package that holds its file."""


class CopyingSystem(System):
    """Some need a second to fill one conversation of 40 turns: 256 would keep a benchmark waiting for minutes."""

    tables: ClassVar[tuple[tuple[str, str], ...]]
    """Each with the column that says whose a row is."""

    @property
    def path(self) -> Path:
        """The database."""
        return self.folder / "peer.db"

    @abstractmethod
    async def begin(self, name: str, turns: int) -> None:
        """Start one conversation with so many turns."""

    async def attach(self, conversation: int) -> None:
        """Get hold of what a program has in hand of it."""

    async def fill(self, conversations: range, turns: int) -> None:
        """Start the first, and copy it."""
        names = [name_of(conversation) for conversation in conversations]
        await self.begin(names[0], turns)
        self._copy(names[0], names[1:])
        for conversation in conversations:
            await self.attach(conversation)

    async def add_others(self, start: int, stop: int) -> None:
        """Start the first, with a turn, and copy it."""
        await self.begin(f"other-{start}", 1)
        self._copy(f"other-{start}", [f"other-{number}" for number in range(start + 1, stop)])

    def _copy(self, source: str, targets: list[str]) -> None:
        with closing(sqlite3.connect(self.path, timeout=BUSY_SECONDS)) as connection, connection:
            for table, column in self.tables:
                found = connection.execute(f"PRAGMA table_info({table})").fetchall()
                # An INTEGER PRIMARY KEY is given anew.
                names = [name for _, name, kind, *_, key in found if not (key and kind == "INTEGER")]
                values = ", ".join(":target" if name == column else name for name in names)
                connection.executemany(
                    f"INSERT INTO {table} ({', '.join(names)})"  # names of the package's own tables
                    f" SELECT {values} FROM {table} WHERE {column} = :source",
                    [{"source": source, "target": target} for target in targets],
                )
