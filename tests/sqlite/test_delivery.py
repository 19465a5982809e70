"""How results and errors come back from the threads."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import anyio
import pytest

from chatflow import Agent, SQLiteSessionStore
from chatflow.exceptions import StoreError
from chatflow.sqlite.database import Connection, FileDatabase


async def test_results_arrive_in_the_order_of_the_writes(tmp_path: Path) -> None:
    """What was written first is heard of first, in however many groups it was committed."""
    arrived: list[int] = []
    started, go_on = [threading.Event(), threading.Event()], [threading.Event(), threading.Event()]
    over = threading.Event()
    async with SQLiteSessionStore(tmp_path / "chat.db") as store:
        database = store._database
        assert isinstance(database, FileDatabase)

        async def write(number: int, waits: int | None = None) -> None:
            def operation(_connection: Connection) -> None:
                if waits is not None:
                    started[waits].set()
                    go_on[waits].wait()

            await database.write(operation, durable=False)
            arrived.append(number)

        async with anyio.create_task_group() as group:
            group.start_soon(write, 0, 0)
            await asyncio.to_thread(started[0].wait)
            # While the first one runs, ten wait for a group; while that one runs, ten more.
            for number in range(1, 11):
                group.start_soon(write, number, 1 if number == 1 else None)
            await asyncio.sleep(0)
            go_on[0].set()
            await asyncio.to_thread(started[1].wait)
            for number in range(11, 21):
                group.start_soon(write, number)
            await asyncio.sleep(0)
            database._writer.post(over.set)
            go_on[1].set()
            # The loop stands still until both groups are committed.
            over.wait()
    assert arrived == list(range(21))


async def test_a_connection_that_may_not_write_is_not_kept(tmp_path: Path) -> None:
    """A store that was opened while its file could not be written to works once it can."""
    agent = Agent("Support", "Help.", "none")
    async with SQLiteSessionStore(tmp_path / "chat.db") as store:
        await store.get_or_create("before", agent)
        database = store._database
        assert isinstance(database, FileDatabase)
        assert database._write_connection is not None
        database._write_connection.execute("PRAGMA query_only=ON")
        with pytest.raises(StoreError, match="make the file and its folder writable"):
            await store.get_or_create("after", agent)
        assert (await store.get_or_create("after", agent)).session_id == "after"
