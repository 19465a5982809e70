"""What every test gets: asyncio, Hypothesis' settings, and the fence around the event loop."""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib import import_module
from typing import Final

import pytest
from blockbuster import BlockBuster, BlockBusterFunction, blockbuster_ctx
from hypothesis import HealthCheck, settings

# How long an example takes says more about the machine than about the code, so neither profile looks at time.
settings.register_profile("dev", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("ci", settings.get_profile("dev"), print_blob=True, derandomize=False, max_examples=200)
settings.load_profile("ci" if os.environ.get("CI") else "dev")

# The first tool loads pydantic, and an import reads files: without this line, the fence would fail whichever test comes
# first and declares a tool on the loop.
import_module("pydantic").TypeAdapter(int)

NOT_ON_ITS_LIST: Final = ("sqlite3.connect", "sqlite3.Connection.close", "sqlite3.Connection.backup")
"""Calls that BlockBuster doesn't watch by itself and that wait for the disk: closing may run a checkpoint."""

MAY_CALL_SQLITE: Final = ("chatflow/sqlite/database.py", {"run_on_loop"})
"""The one place that may call SQLite on the loop: a database in memory waits for no disk, and takes less time than a
hop to a thread would."""


MAY_ASK_FOR_THE_FOLDER: Final = ("chatflow/sqlite/location.py", {"locate", "_locate_uri"})
"""A relative path means the folder that is current when the store is made; the kernel knows it, not the disk."""


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    """The only backend chatflow runs on: aiosqlite fails under trio."""
    return "asyncio"


@pytest.fixture(autouse=True)
def fence() -> Iterator[BlockBuster]:
    """Fails any test in which chatflow blocks the event loop: by the disk, SQLite, a lock, a socket, a sleep."""
    with blockbuster_ctx("chatflow") as blockbuster:
        for name in NOT_ON_ITS_LIST:
            blockbuster.functions[name] = BlockBusterFunction(None, name, scanned_modules="chatflow").activate()
        for name, function in blockbuster.functions.items():
            if name.startswith("sqlite3."):
                function.can_block_in(*MAY_CALL_SQLITE)
        # coverage's tracer takes a lock of its own underneath whatever line is being traced, chatflow's too; and `with
        # lock:`, as chatflow writes it, is no call that could be watched.
        blockbuster.functions["threading.Lock.acquire"].deactivate()
        blockbuster.functions["os.getcwd"].can_block_in(*MAY_ASK_FOR_THE_FOLDER)
        yield blockbuster
