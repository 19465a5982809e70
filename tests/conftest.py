"""What every test here gets: asyncio, and the fence around the event loop."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from blockbuster import BlockBuster

from chatflow.testing.fence import fence as around_the_loop


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    """The only backend chatflow runs on: aiosqlite fails under trio."""
    return "asyncio"


@pytest.fixture(autouse=True)
def fence() -> Iterator[BlockBuster]:
    """Fails any test in which chatflow blocks the event loop: by the disk, SQLite, a lock, a socket, a sleep."""
    with around_the_loop() as fence:
        yield fence
