"""Where the conversations are: what workers open, and what the judge reads with plain SQL."""

from __future__ import annotations

import re
import sqlite3
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from pathlib import Path
from typing import Any, Final, LiteralString

import attrs
import psycopg

from tests.faults.ledger import Ledger

Query = Callable[[LiteralString], list[tuple[Any, ...]]]


@attrs.frozen
class Storage(ABC):
    """A storage. The ledger and the workers' log are kept in *folder*, beside it."""

    folder: Path

    @property
    def ledger(self) -> Ledger:
        """What has happened outside of it."""
        return Ledger(self.folder / "ledger")

    @property
    @abstractmethod
    def address(self) -> str:
        """What a worker opens."""

    @abstractmethod
    def connected(self) -> AbstractContextManager[Query]:
        """A connection past every store. Names of tables need no schema."""

    @abstractmethod
    def damage(self) -> list[str]:
        """What the database itself finds wrong with its data."""

    @abstractmethod
    def general(self, error: str) -> str:
        """*error* without what is another each time."""


@attrs.frozen
class SQLiteFile(Storage):
    """A file, by default in *folder*."""

    path: Path = attrs.field()

    @path.default
    def _in_folder(self) -> Path:
        return self.folder / "chat.db"

    @property
    def address(self) -> str:
        """Its path."""
        return str(self.path)

    @contextmanager
    def connected(self) -> Iterator[Query]:
        """Autocommitting."""
        with closing(sqlite3.connect(self.path, isolation_level=None)) as connection:
            yield lambda statement: connection.execute(statement).fetchall()

    def damage(self) -> list[str]:
        """Ask SQLite."""
        with self.connected() as query:
            faults = [f"integrity_check: {row[0]}" for row in query("PRAGMA integrity_check") if row[0] != "ok"]
            return faults + [f"foreign_key_check: {row}" for row in query("PRAGMA foreign_key_check")]

    def general(self, error: str) -> str:
        """Without the folder."""
        return error.replace(str(self.path), self.path.name)


@attrs.frozen
class PostgresDatabase(Storage):
    """A database that nobody else uses."""

    dsn: str

    @property
    def address(self) -> str:
        """Its DSN."""
        return self.dsn

    @contextmanager
    def connected(self) -> Iterator[Query]:
        """Autocommitting."""
        with psycopg.connect(self.dsn, autocommit=True, options="-c search_path=chatflow,public") as connection:
            yield lambda statement: _rows_of(connection.execute(statement))

    def damage(self) -> list[str]:
        """Ask amcheck, of all tables and indexes."""
        with self.connected() as query:
            query("CREATE EXTENSION IF NOT EXISTS amcheck SCHEMA public")
            faults = [f"verify_heapam: {row}" for row in query(_CHECK_TABLES)]
            try:
                query(_CHECK_INDEXES)
            except psycopg.Error as error:
                faults.append(f"bt_index_check: {error}")
        return faults

    def general(self, error: str) -> str:
        """Without folders, and without the numbers of processes and files."""
        for pattern, name in ((r"/[\w/-]*chatflow-postgres-\w+/\d+", "SERVER"), (r"xlogtemp\.\d+", "xlogtemp")):
            error = re.sub(pattern, name, error)
        return re.sub(r"pg_tblspc/[\w/]+", "pg_tblspc/...", error)


_CHECK_TABLES: Final = """
    SELECT relname, blkno, msg FROM pg_class CROSS JOIN LATERAL verify_heapam(pg_class.oid)
    WHERE relnamespace = 'chatflow'::regnamespace AND relkind = 'r'
"""
_CHECK_INDEXES: Final = """
    SELECT bt_index_check(pg_index.indexrelid, true) FROM pg_index JOIN pg_class ON pg_class.oid = pg_index.indrelid
    WHERE relnamespace = 'chatflow'::regnamespace
"""


def _rows_of(cursor: psycopg.Cursor[Any]) -> list[tuple[Any, ...]]:
    return cursor.fetchall() if cursor.description is not None else []
