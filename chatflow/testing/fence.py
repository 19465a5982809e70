"""The fence around the event loop: in a test, a call from chatflow that blocks it raises `BlockingError`."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from importlib import import_module
from typing import Final

from blockbuster import BlockBuster, BlockBusterFunction, blockbuster_ctx

NOT_ON_ITS_LIST: Final = ("sqlite3.connect", "sqlite3.Connection.close", "sqlite3.Connection.backup")
"""Calls that BlockBuster doesn't watch by itself and that wait for the disk: closing may run a checkpoint."""

MAY_CALL_SQLITE: Final = ("chatflow/sqlite/database.py", {"run_on_loop"})
"""The one place that may call SQLite on the loop: a database in memory waits for no disk, and takes less time than a
hop to a thread would."""

MAY_ASK_FOR_THE_FOLDER: Final = ("chatflow/sqlite/location.py", {"locate", "_locate_uri"})
"""A relative path means the folder that is current when the store is made; the kernel knows it, not the disk."""

MAY_TELL_WHERE_IT_STANDS: Final = ("pytest_timeout.py", {"timeout_sigalrm"})
"""pytest-timeout interrupts a test wherever that is, in chatflow too, and first prints what all threads do."""


@contextmanager
def fence() -> Generator[BlockBuster]:
    """Let no call that chatflow makes, a store's own among them, block the event loop: by the disk, a lock, a socket.

    What the tests do themselves is not looked at.
    """
    # The first tool loads pydantic, and an import reads files: without this line, the fence would fail whichever test
    # comes first and declares a tool on the loop.
    import_module("pydantic").TypeAdapter(int)
    with blockbuster_ctx("chatflow", excluded_modules=["chatflow.testing"]) as blockbuster:
        for name in NOT_ON_ITS_LIST:
            blockbuster.functions[name] = BlockBusterFunction(
                None, name, scanned_modules="chatflow", excluded_modules=["chatflow.testing"]
            ).activate()
        for name, function in blockbuster.functions.items():
            function.can_block_in(*MAY_TELL_WHERE_IT_STANDS)
            if name.startswith("sqlite3."):
                function.can_block_in(*MAY_CALL_SQLITE)
        # coverage's tracer takes a lock of its own underneath whatever line is being traced, chatflow's too; and `with
        # lock:`, as chatflow writes it, is no call that could be watched.
        blockbuster.functions["threading.Lock.acquire"].deactivate()
        blockbuster.functions["os.getcwd"].can_block_in(*MAY_ASK_FOR_THE_FOLDER)
        yield blockbuster
