from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest

from chatflow.exceptions import StoreBusyError, StoreError
from chatflow.sqlite.database import Connection, Database, FileDatabase
from chatflow.sqlite.store import SQLiteSessionStore
from chatflow.testing.conformance.conversation import outside
from tests.sqlite.conftest import Failing, OpenStore
from tests.sqlite.files import RELEASED, SUPPORT, Gate, around, database_of, held, query, together, until

NOTES = "SELECT text FROM notes ORDER BY text"


class BrokenError(Exception):
    """What an operation raises by itself."""


@pytest.fixture
async def database(store: SQLiteSessionStore) -> Database:
    """The store's database, with tables of the test's own."""
    await store.get_or_create("s", SUPPORT)

    def make(connection: Connection) -> None:
        connection.execute("CREATE TABLE notes (text)")
        connection.execute("CREATE TABLE parents (id INTEGER PRIMARY KEY)")
        connection.execute("CREATE TABLE children (parent REFERENCES parents DEFERRABLE INITIALLY DEFERRED)")

    await database_of(store).write(make, durable=True)
    return database_of(store)


def note(text: str) -> Callable[[Connection], str]:
    """An operation that writes *text* and returns it."""

    def write(connection: Connection) -> str:
        connection.execute("INSERT INTO notes VALUES (?)", (text,))
        return text

    return write


def orphan(connection: Connection) -> None:
    """An operation after which COMMIT fails."""
    connection.execute("INSERT INTO children VALUES (1)")


async def test_committed_together(database: Database, path: Path) -> None:
    """Writes that wait together are one transaction: none of them is in the file before all are."""
    seen: list[list[str]] = []

    def look(connection: Connection) -> None:
        seen.append(query(path, NOTES))

    await together(database, [note("a"), look, note("b"), look])
    assert seen == [[], []]
    assert query(path, NOTES) == ["a", "b"]


async def test_disk_full(store: SQLiteSessionStore, path: Path) -> None:
    """Of 8 conversations that are created together, the one that fills the disk is refused and the 7 others stored."""
    await store.get_or_create("s", SUPPORT)
    database = database_of(store)

    def limit(connection: Connection) -> None:
        (pages,) = connection.execute("PRAGMA page_count").fetchone()
        connection.execute(f"PRAGMA max_page_count={pages + 2}")

    await database.write(limit, durable=False)
    gate = Gate(database)
    await gate.close()
    tasks = [
        asyncio.create_task(store.get_or_create(f"s{number}", SUPPORT, {"x": "y" * 1_000_000 if number == 2 else ""}))
        for number in range(8)
    ]
    assert isinstance(database, FileDatabase)
    await until(lambda: len(database._waiting) == 8)
    await gate.open()
    told = await asyncio.gather(*tasks, return_exceptions=True)
    assert [number for number, outcome in enumerate(told) if isinstance(outcome, StoreError)] == [2]
    assert "make room on the disk" in str(told[2])
    stored = query(path, "SELECT session_id FROM chatflow_sessions ORDER BY session_key")
    assert stored == ["s", "s0", "s1", "s3", "s4", "s5", "s6", "s7"]
    assert await store.mark_message_processed("m")


async def test_group_undone(database: Database, path: Path) -> None:
    """An operation whose error undoes the whole transaction is refused alone: the others run again, and once each."""

    def undo(connection: Connection) -> None:
        connection.execute("INSERT INTO notes VALUES ('undone')")
        connection.execute("ROLLBACK")
        raise sqlite3.OperationalError("disk I/O error")

    told = await together(database, [note("a"), undo, note("b"), _break, note("c")])
    assert [str(each) for each in told] == ["a", str(told[1]), "b", "", "c"]
    assert (type(told[1]), type(told[3])) == (StoreError, BrokenError)
    assert query(path, NOTES) == ["a", "b", "c"]


def _break(connection: Connection) -> None:
    connection.execute("INSERT INTO notes VALUES ('broken')")
    raise BrokenError


async def test_alone_undone(database: Database, path: Path) -> None:
    """An operation that is alone and whose error undoes the transaction is refused, and the next write works."""

    def undo(connection: Connection) -> None:
        connection.execute("ROLLBACK")
        raise BrokenError

    with pytest.raises(BrokenError):
        await database.write(undo, durable=True)
    assert await database.write(note("a"), durable=True) == "a"
    assert query(path, NOTES) == ["a"]


async def test_own_error(database: Database, path: Path) -> None:
    """An operation's own error is raised as it is, leaves nothing of it, and its neighbours are stored."""
    told = await together(database, [note("a"), _break, note("b")])
    assert (told[0], type(told[1]), told[2]) == ("a", BrokenError, "b")
    assert query(path, NOTES) == ["a", "b"]


async def test_driver_error(database: Database, path: Path) -> None:
    """The driver's error in an operation is ours with that as its cause, and its neighbours are stored."""
    told = await together(database, [note("a"), lambda connection: connection.execute("SELECT missing"), note("b")])
    assert isinstance(told[1], StoreError)
    assert isinstance(told[1].__cause__, sqlite3.OperationalError)
    assert query(path, NOTES) == ["a", "b"]


async def test_commit_fails(database: Database, path: Path) -> None:
    """A COMMIT that fails is an error for each, nothing of the group is stored, and the next write works."""
    told = await together(database, [note("a"), orphan, note("b")])
    assert [type(each) for each in told] == [StoreError] * 3
    assert "FOREIGN KEY" in str(told[0])
    assert told[0] is not told[2]
    assert query(path, NOTES) + query(path, "SELECT * FROM children") == []
    assert await database.write(note("c"), durable=True) == "c"
    assert query(path, NOTES) == ["c"]


async def test_commit_fails_beside_own_error(database: Database) -> None:
    """In a group whose COMMIT fails, an operation that failed before keeps its own error."""
    told = await together(database, [_break, orphan])
    assert [type(each) for each in told] == [BrokenError, StoreError]


async def test_commit_fails_but_holds(failing: type[Failing], database: Database, path: Path) -> None:
    """A COMMIT that reports an error although it is in the file is a success."""
    told = await together(database, [lambda _: failing.after.add("COMMIT"), note("a"), note("b")])
    assert told == [None, "a", "b"]
    assert not failing.after
    assert query(path, NOTES) == ["a", "b"]


async def test_outcome_unknown(database: Database, path: Path) -> None:
    """Where a COMMIT fails and the file can't be read any more, the error says that the outcome is not known."""

    def lose(connection: Connection) -> None:
        orphan(connection)
        path.chmod(0o444)

    told = await together(database, [note("a"), lose])
    assert [type(each) for each in told] == [StoreError] * 2
    assert "is not known" in str(told[0])
    path.chmod(0o644)
    assert await database.write(note("b"), durable=True) == "b"
    assert query(path, NOTES) == ["b"]


async def test_empty_commit_fails(failing: type[Failing], database: Database) -> None:
    """A COMMIT of no change that fails is everyone's error, and the next write works."""
    told = await together(database, [lambda _: failing.before.add("COMMIT"), lambda _: 2])
    assert [type(each) for each in told] == [StoreError] * 2
    failing.before.clear()
    assert await database.write(note("a"), durable=True) == "a"


async def test_rollback_fails(failing: type[Failing], database: Database, path: Path) -> None:
    """Where not even ROLLBACK works, the next write has a connection of its own."""
    told = await together(database, [lambda _: failing.before.update({"COMMIT", "ROLLBACK"})])
    assert isinstance(told[0], StoreError)
    failing.before.clear()
    assert await database.write(note("a"), durable=True) == "a"
    assert query(path, NOTES) == ["a"]


async def test_opening_fails(failing: type[Failing], path: Path, open_store: OpenStore) -> None:
    """A new file whose first COMMIT fails is as good as new, and the next operation opens it."""
    failing.before.add("COMMIT")
    store = open_store()
    with pytest.raises(StoreError, match="disk I/O error"):
        await store.get("s")
    assert query(path, "SELECT * FROM sqlite_master") == []
    failing.before.clear()
    assert await store.get("s") is None


async def test_reading_connection_fails(failing: type[Failing], store: SQLiteSessionStore) -> None:
    """A reading connection that can't be opened is an error for who reads; writing goes on, and closing works."""
    await store.mark_message_processed("m")
    failing.before.add("PRAGMA foreign_keys=ON")
    with pytest.raises(StoreError, match="disk I/O error"):
        await store.get("s")
    assert await store.mark_message_processed("n")
    await store.aclose()


async def test_close_fails_to_tidy(failing: type[Failing], database: Database, store: SQLiteSessionStore) -> None:
    """A store whose rows can't be removed when it is closed closes all the same."""
    failing.before.add("DELETE FROM chatflow_turns WHERE holder = :holder")
    await store.aclose()


async def test_loop_runs_while_busy(store: SQLiteSessionStore, path: Path, impatient: None) -> None:
    """While a write waits for whoever holds the file, the loop runs on; then it is refused, and the next one works."""
    await store.get_or_create("s", SUPPORT)
    steps = 0
    with held(path):
        marking = asyncio.create_task(store.mark_message_processed("m"))
        while not marking.done():
            await asyncio.sleep(0)
            steps += 1
        with pytest.raises(StoreBusyError):
            await marking
    assert steps > 100
    assert await store.mark_message_processed("m")


@pytest.mark.parametrize("begin", ["BEGIN EXCLUSIVE", "BEGIN"])
async def test_new_file_held(begin: str, path: Path, open_store: OpenStore, impatient: None) -> None:
    """A new file that is held while it is opened is waited for as well, and opened once it is free."""
    with held(path) as other:
        other.executescript(RELEASED.joinpath("1.sql").read_text(encoding="utf-8"))
        other.execute("INSERT INTO chatflow_meta VALUES ('format', '1')")
        other.execute(begin)
        other.execute("SELECT * FROM chatflow_meta").fetchone()
        store = open_store()
        with pytest.raises(StoreBusyError):
            await store.get("s")
    path.unlink()
    assert await store.get("s") is None


@pytest.mark.parametrize("spelling", ["file::memory:?cache=shared", "file:/held?vfs=memdb"])
async def test_memory_held(spelling: str, open_store: OpenStore, impatient: None) -> None:
    """A shared database in memory that another connection holds is waited for while the loop runs on, then refused."""
    store = open_store(spelling)
    await store.get_or_create("s", SUPPORT)
    steps = 0
    with held(spelling):
        marking = asyncio.create_task(store.mark_message_processed("m"))
        while not marking.done():
            await asyncio.sleep(0)
            steps += 1
        with pytest.raises(StoreBusyError):
            await marking
    assert steps > 100
    assert await store.mark_message_processed("m")


async def test_memory_own_error(open_store: OpenStore) -> None:
    """An operation's error in memory leaves nothing of it, and the next one works."""
    store = open_store(":memory:")
    await store.get_or_create("s", SUPPORT)

    def fail(connection: Connection) -> None:
        connection.execute("DELETE FROM chatflow_sessions")
        connection.execute("SELECT missing")

    with pytest.raises(StoreError, match="no such column"):
        await database_of(store).write(fail, durable=True)
    assert await store.get("s") is not None


async def test_memory_not_ours(open_store: OpenStore) -> None:
    """A shared database in memory that holds another program's tables is refused, and let go of."""
    spelling = "file:theirs?mode=memory&cache=shared"
    with held(spelling) as other:
        other.execute("CREATE TABLE orders (id)")
        other.execute("COMMIT")
        with pytest.raises(StoreError, match="another program's"):
            await open_store(spelling).get("s")
    assert await open_store(spelling).get("s") is None


async def test_memory_undone(open_store: OpenStore) -> None:
    """An error in memory that has undone the transaction is raised as it is."""

    def undo(connection: Connection) -> None:
        connection.execute("ROLLBACK")
        raise BrokenError

    with pytest.raises(BrokenError):
        await database_of(open_store(":memory:")).write(undo, durable=True)


async def test_no_files_left(store: SQLiteSessionStore, path: Path) -> None:
    """A store that is closed leaves its one file and nothing beside it."""
    await store.get_or_create("s", SUPPORT)
    await store.get("s")
    await store.aclose()
    assert around(path) == [path.name]


async def test_urgent_first(database: Database, path: Path) -> None:
    """What is urgent goes before what waited already, in a group of its own, and the others keep their order."""
    before = groups(path, database)
    gate = Gate(database)
    await gate.close()
    asked = [("a", False), ("b", False), ("c", True), ("d", False), ("e", True)]
    tasks = [asyncio.create_task(database.write(note(text), durable=urgent, urgent=urgent)) for text, urgent in asked]
    await asyncio.sleep(0)
    await gate.open()
    await asyncio.gather(*tasks)
    assert query(path, "SELECT text FROM notes ORDER BY rowid") == ["c", "e", "a", "b", "d"]
    assert groups(path, database) - before == 2


async def test_turns_end_before_others_begin(store: SQLiteSessionStore) -> None:
    """A turn's commit does not wait for the places of turns that were asked for before it."""
    sessions = [await store.get_or_create(f"s{number}", SUPPORT) for number in range(3)]
    database, order = database_of(store), list[str]()
    assert isinstance(database, FileDatabase)
    gate = Gate(database)

    async def begin(number: int) -> None:
        async with sessions[number].turn():
            order.append(f"began {number}")

    async def end() -> None:
        async with sessions[0].turn() as session:
            session.state["x"] = 1
            await gate.close()
            tasks.extend(asyncio.create_task(outside(begin(number))) for number in (1, 2))
            await until(lambda: len(database._waiting) == 2)
        order.append("ended 0")

    tasks: list[asyncio.Task[None]] = []
    ending = asyncio.create_task(end())
    await until(lambda: len(database._waiting) + len(database._urgent) == 3)
    await gate.open()
    await asyncio.gather(ending, *tasks)
    assert order == ["ended 0", "began 1", "began 2"]


def groups(path: Path, database: Database) -> int:
    """How many groups that changed something the file has had from this process."""
    (number,) = query(path, f"SELECT value FROM chatflow_meta WHERE key = 'commit:{database.holder}'")
    return int(number)
