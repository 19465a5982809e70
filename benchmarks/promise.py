"""What a system promises, found out and not believed: `PRAGMA synchronous`, asked of the connection that commits."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final
from unittest.mock import patch

LEVELS: Final = ("OFF", "NORMAL", "FULL", "EXTRA")
"""What the numbers mean."""


@contextmanager
def watched_commits() -> Iterator[list[str]]:
    """What each commit runs at, of connections that are opened meanwhile; the last one is that of the last commit.

    Asked in the transaction that is committed: inside it the level can't change any more.
    """
    seen: list[str] = []
    connect: Any = sqlite3.connect

    class Watched(sqlite3.Connection):
        def _ask(self) -> None:
            ask = super().execute
            (level,), (journal,) = ask("PRAGMA synchronous").fetchone(), ask("PRAGMA journal_mode").fetchone()
            is_file = any(path for _, name, path in ask("PRAGMA database_list") if name == "main")
            seen.append(f"{LEVELS[level]}, {journal.upper()}" if is_file else "in memory")

        def execute(self, sql: str, *parameters: Any) -> sqlite3.Cursor:
            if self.in_transaction and sql.lstrip().upper().startswith(("COMMIT", "END")):
                self._ask()
            return super().execute(sql, *parameters)

        def commit(self) -> None:
            if self.in_transaction:
                self._ask()
            super().commit()

    def connect_watched(*arguments: Any, **options: Any) -> sqlite3.Connection:
        connection: sqlite3.Connection = connect(*arguments, **{"factory": Watched, **options})
        return connection

    with patch.object(sqlite3, "connect", connect_watched):
        yield seen
