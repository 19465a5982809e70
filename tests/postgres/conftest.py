"""Stores on the tests' server, beside the ways to look into it and to disturb it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

from chatflow.postgres.store import PostgresSessionStore
from tests.postgres import server
from tests.postgres.proxy import Proxy, proxy_to

OpenStore = Callable[..., PostgresSessionStore]


@pytest.fixture
def schema(tmp_path: Path) -> str:
    """The test's own schema."""
    return server.schema_of(tmp_path)


@pytest.fixture
async def open_store(anyio_backend: str, schema: str) -> AsyncIterator[OpenStore]:
    """Makes stores in the test's schema; all are closed at the end."""
    made: list[PostgresSessionStore] = []

    def open_one(dsn: str | None = None, **options: Any) -> PostgresSessionStore:
        made.append(PostgresSessionStore(dsn or server.dsn(), **{"schema": schema, **options}))
        return made[-1]

    yield open_one
    for store in made:
        await store.aclose()


@pytest.fixture
def store(open_store: OpenStore) -> PostgresSessionStore:
    """A store with its default options."""
    return open_store()


@pytest.fixture
async def proxy(anyio_backend: str) -> AsyncIterator[Proxy]:
    """A proxy before the server."""
    async with proxy_to(server.dsn()) as proxy:
        yield proxy


@pytest.fixture
def connection() -> Iterator[psycopg.Connection[Any]]:
    """A connection of the test's own, past every store."""
    with psycopg.connect(server.dsn(), autocommit=True, prepare_threshold=None) as connection:
        yield connection
