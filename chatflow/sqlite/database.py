"""Database: operations on one SQLite database, each a function of a connection, run whole in one transaction.

A file has two worker threads, one that writes and one that reads; an operation is one hop. Writes that wait together
are committed together: each in a savepoint of its own, one fsync for all. A database in memory has no thread: its
operations run where they are awaited, which takes microseconds.

Of `aiosqlite` this uses the connection's thread and queue. SQLite is named here and nowhere else.
"""

from __future__ import annotations

import asyncio
import os
import sqlite3
import stat
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, Final, Generic, TypeAlias, TypeVar

import aiosqlite
import attrs
from anyio.lowlevel import checkpoint as yield_once

from chatflow.core.line import Line
from chatflow.exceptions import StoreBusyError, StoreClosedError, StoreError, StoreFormatError
from chatflow.sqlite.holder import new_holder
from chatflow.sqlite.location import Location

_T = TypeVar("_T")

Connection: TypeAlias = sqlite3.Connection
Operation: TypeAlias = Callable[[Connection], _T]
Prepare: TypeAlias = Callable[[Connection, "Database"], None]

BUSY_SECONDS: Final = 10.0
"""How long a write waits, on its thread, for another program that holds the file."""

_GROUP: Final = 64
"""Writes committed together at most; more would delay the first one for the last one's sake."""

_DELIVERED_AT_ONCE: Final = 16
"""Results handed over in one step of the event loop, so that other callbacks run in between."""

CONNECTION_PRAGMAS: Final = (
    ("foreign_keys", "ON", "deleting a conversation deletes its messages and turns"),
    ("busy_timeout", f"{int(BUSY_SECONDS * 1000)}", "another process's write is waited for, on the thread"),
    ("trusted_schema", "OFF", "a file from elsewhere runs no functions of its own"),
    ("temp_store", "MEMORY", "sorting writes no files"),
)
FILE_PRAGMAS: Final = (
    ("journal_mode", "WAL", "readers and the writer don't wait for each other"),
    ("synchronous", "FULL", "an acknowledged commit survives a power cut; places are written at NORMAL"),
    ("wal_autocheckpoint", "1000", "measured: the lowest p99 of a commit"),
)

_living: dict[str, Database] = {}
_living_lock = threading.Lock()


@attrs.define(eq=False)
class _Write(Generic[_T]):
    operation: Operation[_T]
    durable: bool
    loop: asyncio.AbstractEventLoop
    future: asyncio.Future[_T]
    result: _T | None = None
    error: BaseException | None = None


class Database(ABC):
    """One database of this process, shared by all stores on it."""

    def __init__(self, location: Location, prepare: Prepare) -> None:
        self.location = location
        self.holder = new_holder()
        self.line = Line()
        self._prepare = prepare
        self._pid = os.getpid()
        self._users = 0
        self._closed = False

    @abstractmethod
    async def write(self, operation: Operation[_T], *, durable: bool) -> _T:
        """Run *operation* in a transaction that has committed when this returns, flushed to the disk if *durable*.

        Once it is queued it runs, whatever cancels the caller. Its own error leaves nothing of it behind, and nothing
        else is touched by it.

        Raises:
            StoreError: The driver's error in our words, as the cause.
        """

    @abstractmethod
    async def read(self, operation: Operation[_T]) -> _T:
        """Run *operation* on a consistent view of what is committed."""

    @abstractmethod
    async def close(self) -> None:
        """Run what is queued, then release everything."""

    @abstractmethod
    def abandon(self) -> None:
        """Release everything without waiting."""

    def _refuse_use(self) -> None:
        if self._closed:
            raise StoreClosedError(store=self.location.name)
        if os.getpid() != self._pid:
            raise StoreClosedError(
                store=self.location.name, reason="it was opened before this process was forked from its parent"
            )

    def _open(self) -> Connection:
        try:
            connection = sqlite3.connect(
                self.location.target,
                uri=self.location.is_uri,
                timeout=BUSY_SECONDS,
                isolation_level=None,
                check_same_thread=False,
            )
        except sqlite3.Error as error:
            raise translate(error, self.location.name) from error
        try:
            for name, value, _ in CONNECTION_PRAGMAS:
                connection.execute(f"PRAGMA {name}={value}")
        except BaseException:
            connection.close()
            raise
        return connection


def open_database(location: Location, prepare: Prepare) -> Database:
    """This process's database at *location*, for one more user; `release_database` gives it back."""
    kind = FileDatabase if location.path is not None else MemoryDatabase
    if location.identity is None:
        database: Database = kind(location, prepare)
    else:
        # A child of fork() may not touch what its parent opened, and opens its own.
        key = f"{os.getpid()}/{location.identity}"
        with _living_lock:
            found = _living.get(key)
            database = _living[key] = found if found is not None else kind(location, prepare)
    database._users += 1
    return database


def release_database(database: Database) -> bool:
    """Give *database* back. True if nobody else uses it, and the caller is to close it."""
    with _living_lock:
        database._users -= 1
        if database._users:
            return False
        for key in [key for key, value in _living.items() if value is database]:
            del _living[key]
    return True


def living_holders() -> set[str]:
    """The holders of this process's open databases."""
    with _living_lock:
        return {database.holder for database in _living.values()}


def is_busy(error: BaseException) -> bool:
    """Whether somebody else holds the database right now."""
    code = getattr(error, "sqlite_errorcode", None)
    return code is not None and code & 0xFF in {sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED}


def translate(error: sqlite3.Error, name: str) -> StoreError:
    """The driver's error in our words."""
    code = getattr(error, "sqlite_errorcode", None)
    primary = None if code is None else code & 0xFF
    if is_busy(error):
        return StoreBusyError(store=name, waited_seconds=BUSY_SECONDS)
    if primary == sqlite3.SQLITE_NOTADB:
        return StoreFormatError(store=name, reason="it is not an SQLite database")
    advice = {
        sqlite3.SQLITE_FULL: "make room on the disk and try again",
        sqlite3.SQLITE_IOERR: "look at the disk and its file system, then try again",
        sqlite3.SQLITE_READONLY: "make the file and its folder writable",
        sqlite3.SQLITE_CANTOPEN: "check that its folder exists and may be written to",
        sqlite3.SQLITE_CORRUPT: "restore a backup, or salvage it with SQLite's .recover",
    }.get(primary, "nothing was written")
    return StoreError(f"store {name!r}: {error}; {advice}", store=name)


class MemoryDatabase(Database):
    """A database in memory. Its operations run on the awaiting event loop, one at a time."""

    def __init__(self, location: Location, prepare: Prepare) -> None:
        super().__init__(location, prepare)
        self._lock = threading.RLock()
        self._connection: Connection | None = None

    async def write(self, operation: Operation[_T], *, durable: bool) -> _T:
        """Run *operation*; memory has nothing to flush."""
        await yield_once()
        return self.run_on_loop(operation)

    async def read(self, operation: Operation[_T]) -> _T:
        """Run *operation*."""
        await yield_once()
        return self.run_on_loop(operation)

    def run_on_loop(self, operation: Operation[_T]) -> _T:
        """The one place that calls SQLite on an event loop: in memory it waits for no disk."""
        with self._lock:
            self._refuse_use()
            try:
                if self._connection is None:
                    connection = self._open()
                    self._prepare(connection, self)
                    self._connection = connection
                return _in_transaction(self._connection, operation)
            except sqlite3.Error as error:
                raise translate(error, self.location.name) from error

    async def close(self) -> None:
        """Close the connection; what a shared one held goes with the last one."""
        await yield_once()
        self.abandon()

    def abandon(self) -> None:
        """Close the connection."""
        with self._lock:
            self._closed = True
            if self._connection is not None:
                self._connection.close()
                self._connection = None


def _in_transaction(connection: Connection, operation: Operation[_T], begin: str = "BEGIN IMMEDIATE") -> _T:
    connection.execute(begin)
    try:
        result = operation(connection)
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise
    return result


class _Worker(aiosqlite.Connection):
    """An aiosqlite connection whose thread runs whole functions.

    aiosqlite's queue takes (future, function); a function without a future is one whose results go another way, here to
    futures of several event loops, a group at a time.
    """

    def __init__(self, name: str) -> None:
        super().__init__(_no_connector, iter_chunk_size=64)
        # Not a daemon thread, it would keep the interpreter from exiting while a store is not closed.
        self._thread.daemon = True
        self._thread.name = name

    def post(self, function: Callable[[], object]) -> None:
        """Run *function* on the thread, after all that was posted before."""
        if self._thread.ident is None:
            self._thread.start()
        self._tx.put_nowait((None, function))

    def end(self) -> None:
        """Let the thread end after what is posted."""
        if self._thread.ident is not None:
            self._running = False
            self.stop()


def _no_connector() -> Connection:
    raise AssertionError("the database opens its connections itself")


class FileDatabase(Database):
    """A database in a file: one thread that writes, one that reads."""

    def __init__(self, location: Location, prepare: Prepare) -> None:
        super().__init__(location, prepare)
        self._lock = threading.Lock()
        self._waiting: deque[_Write[Any]] = deque()
        self._draining = False
        self._opened = False
        self._writer = _Worker("chatflow-writer")
        self._reader = _Worker("chatflow-reader")
        self._write_connection: Connection | None = None
        self._read_connection: Connection | None = None
        self._synchronous = ""
        self._groups = 0

    # --- on the event loops ---

    async def write(self, operation: Operation[_T], *, durable: bool) -> _T:
        """Queue *operation* for the writing thread's next group."""
        loop = asyncio.get_running_loop()
        write = _Write(operation, durable, loop, loop.create_future())
        with self._lock:
            self._refuse_use()
            self._waiting.append(write)
            if not self._draining:
                self._draining = True
                self._writer.post(self._drain)
        return await write.future

    async def read(self, operation: Operation[_T]) -> _T:
        """Run *operation* on the reading thread, beside the writes."""
        if not self._opened:
            await self.write(_nothing, durable=False)
        loop = asyncio.get_running_loop()
        read = _Write(operation, False, loop, loop.create_future())
        with self._lock:
            self._refuse_use()
            self._reader.post(lambda: self._run_read(read))
        return await read.future

    async def close(self) -> None:
        """Let both threads finish what is queued, close their connections, and end them."""
        loop = asyncio.get_running_loop()
        ended = [_Write(_nothing, False, loop, loop.create_future()) for _ in range(2)]
        with self._lock:
            if self._closed or os.getpid() != self._pid:
                return
            self._closed = True
            self._reader.post(lambda: self._close_reader(ended[0]))
            self._writer.post(lambda: self._close_writer(ended[1]))
        for each in ended:
            await each.future
        self._reader.end()
        self._writer.end()

    def abandon(self) -> None:
        """Close without waiting; the threads end by themselves."""
        with self._lock:
            if self._closed or os.getpid() != self._pid:
                return
            self._closed = True
            self._reader.post(self._close_reader)
            self._writer.post(self._close_writer)
        self._reader.end()
        self._writer.end()

    # --- on the reading thread ---

    def _run_read(self, read: _Write[Any]) -> None:
        try:
            if self._read_connection is None:
                self._read_connection = self._open()
                self._read_connection.execute("PRAGMA query_only=ON")
            read.result = _in_transaction(self._read_connection, read.operation, "BEGIN")
        except BaseException as error:  # noqa: BLE001  # handed to whoever awaits it
            read.error = self._explain(error)
        _deliver([read])

    def _close_reader(self, ended: _Write[Any] | None = None) -> None:
        if self._read_connection is not None:
            self._read_connection.close()
            self._read_connection = None
        _deliver([ended] if ended is not None else [])

    # --- on the writing thread ---

    def _drain(self) -> None:
        while True:
            with self._lock:
                group = [self._waiting.popleft() for _ in range(min(_GROUP, len(self._waiting)))]
                if not group:
                    self._draining = False
                    return
            try:
                self._run_group(group)
            except BaseException as error:  # noqa: BLE001  # everybody in the group waits for an answer
                self._undo()
                for write in group:
                    write.error = self._explain(write.error or error)
            _deliver(group)

    def _run_group(self, group: list[_Write[Any]]) -> None:
        connection = self._writing_connection()
        todo = group
        while todo:
            self._flush_at("FULL" if any(write.durable for write in todo) else "NORMAL", connection)
            connection.execute("BEGIN IMMEDIATE")
            before = connection.total_changes
            lost = _run_each(connection, todo)
            if lost is None:
                self._commit(connection, [write for write in todo if write.error is None], before)
                break
            # The whole transaction is gone, with what the others had done in it: they run again.
            lost.error = self._explain(lost.error)
            todo = [write for write in todo if write is not lost]
            for write in todo:
                write.result = write.error = None
        for write in group:
            write.error = None if write.error is None else self._explain(write.error)

    def _undo(self) -> None:
        connection = self._write_connection
        if connection is not None and connection.in_transaction:
            try:
                connection.execute("ROLLBACK")
            except sqlite3.Error:
                # Closing it undoes the transaction too; the next write opens another.
                self._write_connection = None
                connection.close()

    def _commit(self, connection: Connection, group: list[_Write[Any]], before: int) -> None:
        if connection.total_changes == before:
            connection.execute("COMMIT")
            return
        self._groups += 1
        connection.execute(_MARK_GROUP, {"key": f"commit:{self.holder}", "value": str(self._groups)})
        try:
            connection.execute("COMMIT")
        except sqlite3.Error as error:
            if self._find_out(self._groups):
                return
            for write in group:
                write.error = error

    def _find_out(self, number: int) -> bool:
        """Whether the group of that number is in the file, after a COMMIT that failed: it may be, or not."""
        if self._write_connection is not None:
            self._write_connection.close()
            self._write_connection = None
        try:
            row = self._writing_connection().execute(_READ_MARK, {"key": f"commit:{self.holder}"}).fetchone()
        except (sqlite3.Error, StoreError) as error:
            name = self.location.name
            raise StoreError(
                f"store {name!r} failed while it committed, and can't be read: whether it holds the change is not known"
                " until it can be opened again",
                store=name,
            ) from error
        return row is not None and row[0] == str(number)

    def _flush_at(self, level: str, connection: Connection) -> None:
        if self._synchronous != level:
            connection.execute(f"PRAGMA synchronous={level}")
            self._synchronous = level

    def _writing_connection(self) -> Connection:
        if self._write_connection is None:
            self._check_path()
            connection = self._open()
            try:
                self._prepare(connection, self)
            except BaseException:
                connection.close()
                raise
            self._synchronous = ""
            self._write_connection = connection
            self._opened = True
        return self._write_connection

    def _check_path(self) -> None:
        path, name = self.location.path, self.location.name
        assert path is not None
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if path.is_dir():
                raise StoreError(f"store {name!r} is a folder; name a file in it", store=name)
            if path.exists() and not path.stat().st_mode & (stat.S_IWUSR | stat.S_IWGRP | stat.S_IWOTH):
                raise StoreError(f"store {name!r} is read-only; make the file writable", store=name)
        except OSError as error:
            raise StoreError(f"store {name!r} can't be reached: {error}", store=name) from error

    def _close_writer(self, ended: _Write[Any] | None = None) -> None:
        self._drain()
        connection, self._write_connection = self._write_connection, None
        if connection is not None:
            try:
                connection.execute(_DELETE_OWN_TURNS, {"holder": self.holder})
                connection.execute(_DELETE_MARK, {"key": f"commit:{self.holder}"})
            except sqlite3.Error:
                # A full disk or a foreign lock: whoever opens the file next removes them, as after a kill.
                pass
            connection.close()
        _deliver([ended] if ended is not None else [])

    def _explain(self, error: BaseException | None) -> BaseException | None:
        if isinstance(error, sqlite3.Error):
            ours = translate(error, self.location.name)
            ours.__cause__ = error
            return ours
        return error


_MARK_GROUP: Final = """
    INSERT INTO chatflow_meta (key, value) VALUES (:key, :value) ON CONFLICT (key) DO UPDATE SET value = excluded.value
"""
_READ_MARK: Final = "SELECT value FROM chatflow_meta WHERE key = :key"
_DELETE_MARK: Final = "DELETE FROM chatflow_meta WHERE key = :key"
_DELETE_OWN_TURNS: Final = "DELETE FROM chatflow_turns WHERE holder = :holder"


def _nothing(_connection: Connection) -> None:
    return None


def _run_each(connection: Connection, group: list[_Write[Any]]) -> _Write[Any] | None:
    """Run each write in a savepoint of its own. Returns the one whose error has undone the whole transaction, or None."""
    for write in group:
        connection.execute("SAVEPOINT one")
        try:
            write.result = write.operation(connection)
        except BaseException as error:  # noqa: BLE001  # handed to whoever awaits it
            write.error = error
            if not connection.in_transaction:
                return write
            connection.execute("ROLLBACK TO one")
        connection.execute("RELEASE one")
    return None


def _deliver(group: Iterable[_Write[Any]]) -> None:
    """Hand results to the event loops that wait for them, from a worker thread."""
    by_loop: dict[asyncio.AbstractEventLoop, deque[_Write[Any]]] = {}
    for write in group:
        by_loop.setdefault(write.loop, deque()).append(write)
    for loop, writes in by_loop.items():
        try:
            loop.call_soon_threadsafe(_settle, loop, writes)
        except RuntimeError:
            # The loop is closed, and nobody waits there any more.
            continue


def _settle(loop: asyncio.AbstractEventLoop, writes: deque[_Write[Any]]) -> None:
    for _ in range(min(_DELIVERED_AT_ONCE, len(writes))):
        write = writes.popleft()
        if write.future.done():
            continue
        if write.error is None:
            write.future.set_result(write.result)
        else:
            write.future.set_exception(write.error)
    if writes:
        loop.call_soon(_settle, loop, writes)


