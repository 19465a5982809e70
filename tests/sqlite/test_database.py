from __future__ import annotations

import asyncio
import contextvars
import gc
import threading
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, Final

import pytest

from chatflow.exceptions import StoreClosedError
from chatflow.sqlite import database as module
from chatflow.sqlite.database import Connection
from chatflow.sqlite.store import SQLiteSessionStore
from chatflow.testing.conformance.places import first_ticket, place_of
from tests.sqlite.conftest import OpenStore
from tests.sqlite.files import SUPPORT, Gate, around, database_of, query, say, until


def _mark(name: str) -> Callable[[Connection], bool]:
    def write(connection: Connection) -> bool:
        connection.execute("INSERT INTO chatflow_meta VALUES (?, '')", (name,))
        return connection.in_transaction

    return write


async def test_cancelled_write(store: SQLiteSessionStore, path: Path) -> None:
    """A write whose caller is cancelled once it waits is done all the same, nothing stays open, and the next works."""
    await store.get("s")
    database = database_of(store)
    gate = Gate(database)
    await gate.close()
    cancelled = asyncio.create_task(database.write(_mark("cancelled"), durable=True))
    await asyncio.sleep(0)
    cancelled.cancel()
    await asyncio.wait([cancelled])
    await gate.open()
    assert cancelled.cancelled()
    assert await database.write(lambda connection: connection.in_transaction, durable=True)
    assert query(path, "SELECT key FROM chatflow_meta WHERE key = 'cancelled'") == ["cancelled"]


async def test_cancelled_before(store: SQLiteSessionStore, path: Path) -> None:
    """A write whose caller is cancelled before it starts is not done."""
    await store.get("s")
    cancelled = asyncio.create_task(database_of(store).write(_mark("cancelled"), durable=True))
    cancelled.cancel()
    await asyncio.wait([cancelled])
    await database_of(store).write(_mark("next"), durable=True)
    assert query(path, "SELECT key FROM chatflow_meta WHERE key IN ('cancelled', 'next')") == ["next"]


async def test_cancelled_read(store: SQLiteSessionStore) -> None:
    """A read whose caller is cancelled leaves nothing open, and the next works."""
    await store.get_or_create("s", SUPPORT)
    gate = threading.Event()
    cancelled = asyncio.create_task(database_of(store).read(lambda _: gate.wait()))
    await asyncio.sleep(0)
    cancelled.cancel()
    await asyncio.wait([cancelled])
    gate.set()
    assert await store.get("s") is not None


async def test_read_fails(store: SQLiteSessionStore) -> None:
    """A read that fails leaves nothing open, and the next works."""

    def fail(connection: Connection) -> None:
        raise ZeroDivisionError

    await store.get_or_create("s", SUPPORT)
    with pytest.raises(ZeroDivisionError):
        await database_of(store).read(fail)
    assert await store.get("s") is not None


async def test_more_than_one_step_delivers(store: SQLiteSessionStore) -> None:
    """A group's results reach all who wait, also those that take several steps of the loop."""
    await store.get("s")
    database = database_of(store)
    gate = Gate(database)
    await gate.close()
    tasks = [asyncio.create_task(database.write(lambda _, n=number: n, durable=False)) for number in range(150)]  # type: ignore[misc]
    await asyncio.sleep(0)
    await gate.open()
    assert await asyncio.gather(*tasks) == list(range(150))


def test_loop_closed_meanwhile(path: Path) -> None:
    """A loop that is closed while its write is under way loses nothing, and the store serves the next loop."""
    store = SQLiteSessionStore(path)
    go_on = threading.Event()

    async def leave() -> None:
        await store.get("s")
        database, here = database_of(store), asyncio.Event()
        loop = asyncio.get_running_loop()

        def wait(connection: Connection) -> None:
            loop.call_soon_threadsafe(here.set)
            go_on.wait()
            _mark("late")(connection)

        task = asyncio.create_task(database.write(wait, durable=True))
        await here.wait()
        task.cancel()

    async def come_back() -> None:
        await store.get_or_create("s", SUPPORT)
        await store.aclose()

    asyncio.run(leave())
    go_on.set()
    asyncio.run(come_back())
    assert query(path, "SELECT key FROM chatflow_meta WHERE key = 'late'") == ["late"]


@pytest.mark.parametrize("spelling", ["file", ":memory:"])
def test_second_loop(spelling: str, path: Path) -> None:
    """A store serves one event loop after another."""
    store = SQLiteSessionStore(path if spelling == "file" else spelling)

    async def first() -> None:
        await say(await store.get_or_create("s", SUPPORT), "hello")

    async def second() -> None:
        session = await store.get("s")
        assert session is not None
        await say(session, "again")
        assert [message.text for message in session.history] == ["hello", "again"]
        await store.aclose()

    asyncio.run(first())
    asyncio.run(second())


USES: Final[dict[str, Callable[[SQLiteSessionStore], Coroutine[Any, Any, object]]]] = {
    "get_or_create": lambda store: store.get_or_create("s", SUPPORT),
    "get_or_create with metadata": lambda store: store.get_or_create("s", SUPPORT, {"a": 1}),
    "get": lambda store: store.get("s"),
    "delete": lambda store: store.delete("s"),
    "clear": lambda store: store.clear(),
    "list_sessions": lambda store: store.list_sessions(),
    "messages": lambda store: store.messages("s"),
    "is_message_processed": lambda store: store.is_message_processed("m"),
    "mark_message_processed": lambda store: store.mark_message_processed("m"),
    "purge_processed_messages": lambda store: store.purge_processed_messages(),
}


@pytest.mark.parametrize("opened", ["never used", "used", "with another store open"])
@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("spelling", ["file", ":memory:"])
async def test_used_after_close(spelling: str, use: str, opened: str, path: Path, open_store: OpenStore) -> None:
    """A store that was closed refuses every use, whatever had been done with it, and closing it again is no error."""
    store = open_store(path if spelling == "file" else spelling)
    if opened != "never used":
        await store.get_or_create("s", SUPPORT)
    if opened == "with another store open":
        await open_store().get_or_create("s", SUPPORT)
    await store.aclose()
    await store.aclose()
    with pytest.raises(StoreClosedError, match="it was closed") as caught:
        await USES[use](store)
    assert caught.value.store == store.name


async def test_closed_while_used(store: SQLiteSessionStore, open_store: OpenStore) -> None:
    """What waits when a store is closed is done, and what comes after is refused."""
    await store.get("s")
    gate = Gate(database_of(store))
    await gate.close()
    marking = asyncio.create_task(database_of(store).write(_mark("in time"), durable=True))
    await asyncio.sleep(0)
    closing = asyncio.create_task(store.aclose())
    await asyncio.sleep(0)
    late = asyncio.create_task(store.mark_message_processed("late"))
    await asyncio.wait([late])
    assert isinstance(late.exception(), StoreClosedError)
    await gate.open()
    assert await marking
    await closing


async def test_closed_by_one(store: SQLiteSessionStore, open_store: OpenStore) -> None:
    """A store goes on when another one on the same file is closed."""
    second = open_store()
    await store.get_or_create("s", SUPPORT)
    await second.get("s")
    await second.aclose()
    await say(await store.get_or_create("s", SUPPORT), "hello")


async def test_closing_cancelled(store: SQLiteSessionStore, open_store: OpenStore) -> None:
    """A store whose closing is cancelled is closed all the same, and its threads end."""
    before = set(threading.enumerate())
    await store.get_or_create("s", SUPPORT)
    gate = Gate(database_of(store))
    await gate.close()
    closing = asyncio.create_task(store.aclose())
    await until(lambda: database_of(store)._closed)
    closing.cancel()
    await gate.open()
    await asyncio.wait([closing])
    assert closing.cancelled()
    for thread in set(threading.enumerate()) - before:
        await asyncio.to_thread(thread.join)


async def test_opened_while_closing(store: SQLiteSessionStore, open_store: OpenStore, path: Path) -> None:
    """A store opened on a file that is being closed begins once the other has let go of it: it finds all it wrote."""
    await store.get("s")
    database = database_of(store)
    gate = Gate(database)
    await gate.close()
    marking = asyncio.create_task(database.write(_mark("first"), durable=True))
    await asyncio.sleep(0)
    closing = asyncio.create_task(store.aclose())
    await until(lambda: database._closed)
    second = open_store()
    looking = asyncio.create_task(second.get("s"))
    await until(lambda: database_of(second).predecessor is database)
    assert database_of(second) is not database
    await gate.open()
    await marking
    await closing
    await looking
    assert query(path, "SELECT key FROM chatflow_meta WHERE key = 'first'") == ["first"]
    assert not module._closing


def _run_and_collect(coroutine: Coroutine[Any, Any, object]) -> None:
    asyncio.run(coroutine)
    gc.collect()


def test_forgotten_store(path: Path) -> None:
    """A store that the garbage collector finds unclosed warns, and lets go of its file and threads."""
    before = set(threading.enumerate())

    async def forget() -> None:
        store = SQLiteSessionStore(path)
        await store.get_or_create("s", SUPPORT)
        await store.mark_message_processed("m")
        await store.get("s")

    with pytest.warns(ResourceWarning, match=r"chat\.db.* was never closed"):
        _run_and_collect(forget())
    for thread in set(threading.enumerate()) - before:
        thread.join()
    assert around(path) == [path.name]


def test_one_of_two_forgotten(path: Path) -> None:
    """A store goes on when another one on the same file is forgotten."""
    store = SQLiteSessionStore(path)

    async def forget() -> None:
        await SQLiteSessionStore(path).get_or_create("s", SUPPORT)
        await store.get("s")

    async def go_on() -> None:
        assert await store.get("s") is not None
        await store.aclose()

    with pytest.warns(ResourceWarning, match="never closed"):
        _run_and_collect(forget())
    asyncio.run(go_on())


@pytest.mark.parametrize("spelling", ["file", ":memory:", "file::memory:?cache=shared"])
def test_forgotten_in_memory(spelling: str, path: Path) -> None:
    """A forgotten store in memory or on a file warns once, and never when it was not used."""

    async def use(store: SQLiteSessionStore) -> None:
        await store.get("s")

    address: str | Path = path if spelling == "file" else spelling
    SQLiteSessionStore(address)
    gc.collect()
    with pytest.warns(ResourceWarning, match="never closed") as warned:
        _run_and_collect(use(SQLiteSessionStore(address)))
    assert len(warned) == 1


def test_constructor_touches_nothing(path: Path) -> None:
    """Making a store needs no loop, starts no thread and makes no file, and closing an unused one neither."""
    before = set(threading.enumerate())
    store = SQLiteSessionStore(path)
    assert (around(path), set(threading.enumerate())) == ([], before)
    asyncio.run(store.aclose())
    assert (around(path), set(threading.enumerate())) == ([], before)


@pytest.mark.parametrize("spelling", ["file", ":memory:"])
async def test_closed_before_anything(spelling: str, path: Path, open_store: OpenStore) -> None:
    """A store of which only the line of waiters was asked for starts no thread when it is closed."""
    before = set(threading.enumerate())
    store = open_store(path if spelling == "file" else spelling)
    store.line.wake_all()
    await store.aclose()
    assert (around(path), set(threading.enumerate())) == ([], before)


async def test_line_after_close(store: SQLiteSessionStore) -> None:
    """A store that was closed unused has no line of waiters."""
    await store.aclose()
    with pytest.raises(StoreClosedError):
        store.line.wake_all()


async def test_database_after_close(store: SQLiteSessionStore) -> None:
    """What comes to the database after it was closed is refused, also where its store was asked before."""
    await store.get("s")
    database = database_of(store)
    await store.aclose()
    with pytest.raises(StoreClosedError):
        await database.read(lambda _: None)


async def test_unknown_keyword(path: Path) -> None:
    """A keyword that is none of the constructor's is a TypeError, busy_timeout among them."""
    with pytest.raises(TypeError, match="busy_timeout"):
        SQLiteSessionStore(path, busy_timeout=5000)  # type: ignore[call-arg]


async def test_row_taken_away(store: SQLiteSessionStore, path: Path) -> None:
    """A turn that waits and whose row was taken away queues again, and is done."""
    session = await store.get_or_create("s", SUPPORT)
    async with session.turn():
        waiting = asyncio.create_task(say(session, "hello"), context=contextvars.Context())
        await until(lambda: store.line._waiters)
        query(path, "DELETE FROM chatflow_turns WHERE state = 'queued'")
        store.line.wake_all()
        await until(lambda: query(path, "SELECT max(turn_id) FROM chatflow_turns") == [3])
    await waiting
    assert [message.text for message in session.history] == ["hello"]


@pytest.mark.parametrize("there", [True, False])
async def test_created_with_its_first_turn(there: bool, store: SQLiteSessionStore) -> None:
    """A turn of a conversation that nobody has seen yet creates it in the same operation, or finds it there."""
    if there:
        await store.get_or_create("s", SUPPORT)
    place = await place_of(store, first_ticket("s"))
    assert place.running
    assert place.session is not None
    assert await store.get("s") is not None
