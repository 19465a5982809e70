"""The stores that every conformance test runs on: the only list of them. A new store is one line."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any, Final

from chatflow.core.backend import StoreBackend
from chatflow.core.memory import SessionStore
from chatflow.postgres.store import PostgresSessionStore
from chatflow.sqlite.store import SQLiteSessionStore
from chatflow.testing import Backend
from tests.postgres import server


def _memory(folder: Path, **options: Any) -> StoreBackend:
    return SessionStore(**options)


def _sqlite_file(folder: Path, **options: Any) -> StoreBackend:
    return SQLiteSessionStore(folder / "chat.db", **options)


def _sqlite_memory(folder: Path, **options: Any) -> StoreBackend:
    return SQLiteSessionStore(":memory:", **options)


def _sqlite_shared_memory(folder: Path, **options: Any) -> StoreBackend:
    return SQLiteSessionStore("file::memory:?cache=shared", **options)


def _postgres(folder: Path, **options: Any) -> StoreBackend:
    return PostgresSessionStore(server.dsn(), schema=server.schema_of(folder), **options)


BACKENDS: Final = (
    Backend("memory", _memory),
    Backend("sqlite-file", _sqlite_file, shares=True, survives=True),
    Backend("sqlite-memory", _sqlite_memory),
    Backend("sqlite-shared-memory", _sqlite_shared_memory, shares=True),
    Backend("postgres", _postgres, shares=True, survives=True),
)


def copy(backend: Backend, folder: Path, to: Path) -> None:
    """Take what survives as it is at this moment in *folder*, for stores that are made in *to*."""
    (server.copy if backend.name == "postgres" else shutil.copytree)(folder, to)


def examples(backend: Backend) -> int:
    """How many sequences of operations a state machine tries on a store: fewer where each step is many round trips."""
    return 25 if backend.name == "postgres" else 60
