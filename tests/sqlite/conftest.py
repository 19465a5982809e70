"""Stores on files of their own, and a way to be impatient with others that hold them."""

from __future__ import annotations

import sqlite3
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pytest

from chatflow.sqlite import database, schema
from chatflow.sqlite.store import SQLiteSessionStore

OpenStore = Callable[..., SQLiteSessionStore]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Where the store's file is, or is to be."""
    return tmp_path / "chat.db"


@pytest.fixture
async def open_store(anyio_backend: str, path: Path) -> AsyncIterator[OpenStore]:
    """Makes stores, on *path* unless told otherwise, and closes them at the end."""
    made: list[SQLiteSessionStore] = []

    def open_one(db_path: Any = path, **options: Any) -> SQLiteSessionStore:
        made.append(SQLiteSessionStore(db_path, **options))
        return made[-1]

    yield open_one
    for store in made:
        await store.aclose()


@pytest.fixture
def store(open_store: OpenStore) -> SQLiteSessionStore:
    """A store on *path*."""
    return open_store()


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever holds a database is not waited for long."""
    monkeypatch.setattr(database, "BUSY_SECONDS", 0.05)
    monkeypatch.setattr(schema, "BUSY_SECONDS", 0.2)


class Failing(sqlite3.Connection):
    """A connection whose statements fail when a test says so, before they run or after."""

    before: ClassVar[set[str]] = set()
    after: ClassVar[set[str]] = set()
    message: ClassVar[str] = "disk I/O error"
    code: ClassVar[int] = sqlite3.SQLITE_ERROR

    def execute(self, sql: str, parameters: Any = (), /) -> sqlite3.Cursor:
        """Run it, and fail."""
        if sql in self.before:
            raise self._error()
        cursor = super().execute(sql, parameters)
        if sql in self.after:
            self.after.discard(sql)
            raise self._error()
        return cursor

    def _error(self) -> sqlite3.OperationalError:
        error = sqlite3.OperationalError(self.message)
        error.sqlite_errorcode = self.code
        return error


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> type[Failing]:
    """Connections opened from now on fail when told to."""
    monkeypatch.setattr(Failing, "before", set())
    monkeypatch.setattr(Failing, "after", set())
    monkeypatch.setattr(sqlite3, "connect", partial(sqlite3.connect, factory=Failing))
    return Failing
