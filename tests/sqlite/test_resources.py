from __future__ import annotations

import asyncio
import datetime as dt
import subprocess
import sys
import threading
from itertools import pairwise
from pathlib import Path
from typing import Final

import anyio
import pytest

from chatflow.sqlite.database import Connection
from chatflow.sqlite.store import SQLiteSessionStore
from tests.sqlite.files import SUPPORT, connect, database_of, query, say

USE: Final = """
import asyncio, gc, sys
from chatflow.core.agent import Agent
from chatflow.sqlite.store import SQLiteSessionStore

async def use():
    store = SQLiteSessionStore(sys.argv[1])
    session = await store.get_or_create("s", Agent(name="Support"))
    async with session.turn():
        pass
    return store, session
"""
ENDS: Final = {
    "a global": "kept = asyncio.run(use())",
    "forgotten": "asyncio.run(use()); gc.collect()",
    "forgotten in a cycle": "asyncio.run(use())",
    "an exception": "kept = asyncio.run(use()); raise ZeroDivisionError",
    "an exception in the loop": """
async def fail():
    kept = await use()
    1 / 0
asyncio.run(fail())
""",
    "sys.exit": "kept = asyncio.run(use()); sys.exit(3)",
    "a loop that died": """
async def leave():
    store, session = await use()
    asyncio.create_task(store.mark_message_processed("m"))
    await asyncio.sleep(0)
    return store
kept = asyncio.run(leave())
""",
    "a loop that was never closed": "loop = asyncio.new_event_loop(); kept = loop.run_until_complete(use())",
    "a turn that is open": """
async def leave():
    store, session = await use()
    turn = session.turn()
    await turn.__aenter__()
    return store, session, turn
kept = asyncio.run(leave())
""",
}


@pytest.mark.parametrize("spelling", ["file", ":memory:"])
@pytest.mark.parametrize("end", ENDS)
def test_unclosed_at_exit(end: str, spelling: str, path: Path) -> None:
    """A program with an unclosed store exits, however it ends, and a ResourceWarning names the store."""
    code = USE + ENDS[end]
    address = str(path) if spelling == "file" else spelling
    ran = subprocess.run(
        [sys.executable, "-W", "always", "-c", code, address],
        stderr=subprocess.PIPE,
        text=True,
        check=False,
        timeout=50,
    )
    wanted = {"an exception": 1, "an exception in the loop": 1, "sys.exit": 3}.get(end, 0)
    assert ran.returncode == wanted, ran.stderr
    assert ran.stderr.count(f"SQLiteSessionStore {address!r}> was never closed") == 1, ran.stderr


@pytest.mark.parametrize("spelling", ["file", ":memory:"])
def test_closed_at_exit(spelling: str, path: Path) -> None:
    """A program that has closed its store ends without a word."""
    code = USE + "async def close():\n    store, _ = await use()\n    await store.aclose()\nasyncio.run(close())"
    ran = subprocess.run(
        [sys.executable, "-W", "always", "-c", code, str(path) if spelling == "file" else spelling],
        stderr=subprocess.PIPE,
        text=True,
        check=True,
        timeout=50,
    )
    assert ran.stderr == ""


def test_made_at_import(path: Path) -> None:
    """A store that is made when a module is imported and never used makes no file, and the program ends silently."""
    code = USE + "store = SQLiteSessionStore(sys.argv[1])"
    ran = subprocess.run(
        [sys.executable, "-W", "always", "-c", code, str(path)],
        stderr=subprocess.PIPE,
        text=True,
        check=True,
        timeout=50,
    )
    assert (ran.stderr, path.exists()) == ("", False)


def _open_files() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


async def _fill(path: Path, conversations: int) -> None:
    threads, files = threading.active_count(), _open_files()
    async with SQLiteSessionStore(path) as store:
        sessions = []

        async def one(number: int) -> None:
            session = await store.get_or_create(f"s{number}", SUPPORT)
            sessions.append(session)
            await say(session, "hello")

        for start in range(0, conversations, 500):
            async with anyio.create_task_group() as group:
                for number in range(start, start + 500):
                    group.start_soon(one, number)
        assert threading.active_count() - threads <= 2
        assert _open_files() - files < 10
        assert len(sessions) == conversations
    assert query(path, "SELECT count(*) FROM chatflow_messages") == [conversations]


async def test_1000_conversations(path: Path) -> None:
    """1,000 conversations on one store have 2 threads and fewer than 10 open files."""
    await _fill(path, 1_000)


@pytest.mark.slow
async def test_10000_conversations(path: Path) -> None:
    """10,000 conversations on one store have 2 threads and fewer than 10 open files."""
    await _fill(path, 10_000)


async def test_stores_share_threads(path: Path) -> None:
    """50 stores on one file have 2 threads together."""
    threads = threading.active_count()
    stores = [SQLiteSessionStore(path) for _ in range(50)]
    for store in stores:
        await store.get_or_create("s", SUPPORT)
    assert threading.active_count() - threads == 2
    for store in stores:
        await store.aclose()


# --- expired message ids ---


async def _expire(store: SQLiteSessionStore, path: Path, count: int) -> None:
    await store.get("s")
    old = (dt.datetime.now(dt.UTC) - dt.timedelta(days=9)).isoformat(timespec="microseconds")
    with connect(path) as connection:
        connection.execute(
            """
            WITH RECURSIVE n (i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < ?)
            INSERT INTO chatflow_processed_messages (owner, session_id, message_id, processed_at)
            SELECT '', '', 'm' || i, ? FROM n
            """,
            (count, old),
        )


class Deletions:
    """How many expired ids each transaction of a connection has deleted."""

    def __init__(self, connection: Connection) -> None:
        self.by_transaction = [0]
        self._connection = connection
        self._before = connection.total_changes
        self._deletes = False
        connection.set_trace_callback(self._see)

    def _see(self, sql: str) -> None:
        # A statement is seen when it begins: what changed since belongs to the one before.
        changes = self._connection.total_changes
        if self._deletes:
            self.by_transaction[-1] += changes - self._before
        self._before, self._deletes = changes, "DELETE FROM chatflow_processed_messages" in sql
        if sql.startswith("BEGIN"):
            self.by_transaction.append(0)


async def _purge(path: Path, count: int) -> None:
    async with SQLiteSessionStore(path) as store:
        await _expire(store, path, count)
        session = await store.get_or_create("s", SUPPORT)
        deletions = await database_of(store).write(Deletions, durable=False)
        turns = 0
        purging = asyncio.create_task(store.purge_processed_messages())
        while not purging.done():
            await say(session, "hello")
            turns += 1
        assert await purging == count
        assert turns > 1
        assert query(path, "SELECT count(*) FROM chatflow_processed_messages") == [0]
    assert sum(deletions.by_transaction) == count
    assert max(deletions.by_transaction) <= 1_000


async def test_purge_5000(path: Path) -> None:
    """Purging 5,000 expired ids deletes at most 1,000 rows in a transaction, and turns commit in between."""
    await _purge(path, 5_000)


@pytest.mark.slow
async def test_purge_1000000(path: Path) -> None:
    """Purging 1,000,000 expired ids deletes at most 1,000 rows in a transaction, and turns commit in between."""
    await _purge(path, 1_000_000)


async def test_purge_with_marks(path: Path) -> None:
    """The first id that a store marks, and each sixteenth after it, forgets expired ones, more than were added."""
    left: list[int] = []
    async with SQLiteSessionStore(path) as store:
        await _expire(store, path, 1_000)
        for number in range(33):
            await store.mark_message_processed(f"new{number}")
            left += query(path, "SELECT count(*) FROM chatflow_processed_messages")
    assert [number for number, (before, after) in enumerate(pairwise([1_000, *left])) if after < before] == [0, 16, 32]
    assert 33 < left[-1] < 1_000 - 33
