"""Stores on files of their own, and a way to be impatient with others that hold them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

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
