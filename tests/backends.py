"""The stores that every conformance test runs on: the only list of them. A new store is one line."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import attrs

from chatflow.core.backend import StoreBackend
from chatflow.core.memory import SessionStore
from chatflow.postgres.store import PostgresSessionStore
from chatflow.sqlite.store import SQLiteSessionStore
from tests.postgres import server


@attrs.frozen
class Backend:
    """A way to make stores. It chooses which tests can run, and no test asks it anything."""

    name: str
    make: Callable[..., StoreBackend]
    """Takes a folder of the test's own, where stores that share data find each other, and the store's options."""

    shares: bool = False
    """A second store made in the same folder has the same conversations."""

    survives: bool = False
    """The conversations are still there when a store is made after all others were closed."""

    copy: Callable[[Path, Path], object] = shutil.copytree
    """Takes what survives as it is at this moment, in a folder, for stores that are made in another one."""


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
    *([Backend("postgres", _postgres, shares=True, survives=True, copy=server.copy)] if server.IS_WANTED else []),
)
SHARING: Final = tuple(backend for backend in BACKENDS if backend.shares)
SURVIVING: Final = tuple(backend for backend in BACKENDS if backend.survives)
