"""Database: operations on one SQLite database, each a function of a connection, run whole in one transaction.

A file has two worker threads, one that writes and one that reads; an operation is one hop. Writes that wait together
are committed together: each in a savepoint of its own, one fsync for all. A database in memory has no thread: its
operations run where they are awaited, which takes microseconds.

Of `aiosqlite` this uses the connection's thread and queue. Both are named here and nowhere else, which makes this the
longest module.
"""

from __future__ import annotations

import asyncio
import copy
import os
import sqlite3
import stat
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import closing, suppress
from functools import partial
from pathlib import Path
from typing import Any, Final, Generic, LiteralString, TypeAlias, TypeVar

import aiosqlite
import anyio
import attrs
from anyio.lowlevel import checkpoint as yield_once

from chatflow.core.holder import new_holder
from chatflow.core.line import Line
from chatflow.exceptions import StoreBusyError, StoreClosedError, StoreError, StoreFormatError
from chatflow.sqlite.location import Location

_T = TypeVar("_T")

Connection: TypeAlias = sqlite3.Connection
Operation: TypeAlias = Callable[[Connection], _T]


@attrs.frozen
class Lifecycle:
    """What is done with a database when it is opened, and when it is closed.

    *look* refuses one that is not ours, through a connection that changes nothing; its last argument says whether the
    connection shows the file as it was committed. *check* does the same, and refuses one that is not ready as it is.
    *prepare* makes the database ready. *release* gives back what a holder has in hand.
    """

    look: Callable[[Connection, str, bool], object]
    check: Callable[[Connection, str], object]
    prepare: Callable[[Connection, Database], None]
    release: Callable[[str, Connection], None]


BUSY_SECONDS: Final = 10.0
"""How long an operation waits for another program that holds the database; on the thread, where it has one."""

_LOOK_AGAIN: Final = 0.01
"""Seconds between looks at a database in memory that another connection holds."""

_FLUSHES: Final = 20
_FLUSH_MILLISECONDS: Final = 200
"""How often the log is tried to be emptied, and how long each time for readers of an old state."""

_GROUP: Final = 64
"""Writes committed together at most; more would delay the first one for the last one's sake."""

_DELIVERED_AT_ONCE: Final = 4
"""Results handed over in one step of the event loop. Each wakes a task that needs a few more steps: were a group of 64
handed over at once, the loop would do nothing else for that long (measured: gaps of 15 ms, and 8 with 4 at a time)."""

CONNECTION_PRAGMAS: Final = (
    ("foreign_keys", "ON", "deleting a conversation deletes its messages and turns"),
    ("trusted_schema", "OFF", "a file from elsewhere runs no functions of its own"),
    ("temp_store", "MEMORY", "sorting writes no files"),
    ("secure_delete", "ON", "what is deleted is overwritten, also where a page becomes free"),
)
FILE_PRAGMAS: Final = (
    ("journal_mode", "WAL", "readers and the writer don't wait for each other"),
    ("synchronous", "FULL", "an acknowledged commit survives a power cut; places are written at NORMAL"),
    ("wal_autocheckpoint", "1000", "measured: the lowest p99 of a commit"),
)

_ANY_TEXT: Final = partial(str, encoding="utf-8", errors="surrogateescape")
"""How text is read: bytes that are no UTF-8 come as lone surrogates, for whoever reads the row to refuse by its name.
By itself the module would fail the whole statement, and all other rows with it."""

_living: dict[str, Database] = {}
_closing: dict[str, Database] = {}
"""Those that have not yet let go of their place; the next one there waits for it."""

_inherited: list[Database] = []
"""What the parent of a forked process had open. Kept, since to close it here could spoil the file for the parent."""

# Entered again by a store that the garbage collector finds in the middle of it.
_living_lock = threading.RLock()


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

    def __init__(self, location: Location, lifecycle: Lifecycle) -> None:
        self.location = location
        self.holder = new_holder()
        self.line = Line()
        self.file: tuple[int, int] | None = None
        self.predecessor: Database | None = None
        """What has been closed at the same place, and may not yet have let go of it."""
        self.let_go = threading.Event()
        self.users = 0
        self._lifecycle = lifecycle
        self._pid = os.getpid()
        self._closed = False

    @abstractmethod
    async def write(self, operation: Operation[_T], *, durable: bool, urgent: bool = False) -> _T:
        """Run *operation* in a transaction that has committed when this returns, flushed to the disk if *durable*.

        Those that are *urgent* go before all others that wait, and are committed without them: what ends a turn, so
        that no more turns are begun than can be ended. The others keep the order in which they came.

        Once it is queued it runs, whatever cancels the caller. Its own error leaves nothing of it behind, and nothing
        else is touched by it.

        Raises:
            StoreError: The driver's error in our words, as the cause.
        """

    @abstractmethod
    async def read(self, operation: Operation[_T]) -> _T:
        """Run *operation* on a consistent view of what is committed."""

    @abstractmethod
    async def flush(self, *, rewrite: bool) -> bool:
        """Write the log into the file and empty it; with *rewrite* the whole file is written anew before.

        False where somebody was reading an old state of the file all the time.
        """

    @abstractmethod
    async def close(self) -> None:
        """Run what is queued, then release everything."""

    @abstractmethod
    def abandon(self) -> None:
        """Release everything without waiting."""

    @property
    def is_inherited(self) -> bool:
        """Whether it belongs to the process that this one was forked from."""
        return os.getpid() != self._pid

    def _refuse_inherited(self) -> None:
        # Before any lock is taken: a thread that the child has not got may hold it for ever.
        if self.is_inherited:
            raise StoreClosedError(
                store=self.location.name, reason="it was opened before this process was forked from its parent"
            )

    def _refuse_closed(self) -> None:
        if self._closed:
            raise StoreClosedError(store=self.location.name)

    def _refuse_second_name(self) -> None:  # noqa: B027  # a database in memory has one name
        pass

    def _open(self, *, busy_seconds: float) -> Connection:
        connection = sqlite3.connect(
            self.location.target,
            uri=self.location.is_uri,
            timeout=busy_seconds,
            isolation_level=None,
            check_same_thread=False,
        )
        connection.text_factory = _ANY_TEXT
        for name, value, _ in CONNECTION_PRAGMAS:
            connection.execute(f"PRAGMA {name}={value}")
        return connection

    def _open_prepared(self, *, busy_seconds: float) -> Connection:
        connection = self._open(busy_seconds=busy_seconds)
        try:
            self._refuse_second_name()
            self._lifecycle.prepare(connection, self)
        except BaseException:
            connection.close()
            raise
        return connection


def open_database(location: Location, lifecycle: Lifecycle) -> Database:
    """This process's database at *location*, for one more user; `release_database` gives it back."""
    kind = FileDatabase if location.path is not None else MemoryDatabase
    if location.identity is None:
        database: Database = kind(location, lifecycle)
        database.users = 1
        return database
    with _living_lock:
        found = _living.get(location.identity)
        if found is not None:
            found.users += 1
            return found
        database = _living[location.identity] = kind(location, lifecycle)
        database.predecessor = _closing.get(location.identity)
        database.users = 1
    return database


def release_database(database: Database) -> bool:
    """Give *database* back. True if nobody else uses it, and the caller is to close it."""
    if database.is_inherited:
        return False
    with _living_lock:
        database.users -= 1
        if database.users:
            return False
        identity = database.location.identity
        if identity is not None:
            _closing[identity] = _living.pop(identity)
    return True


def _has_let_go(database: Database) -> None:
    with _living_lock:
        for identity in [identity for identity, each in _closing.items() if each is database]:
            del _closing[identity]
    database.let_go.set()


def _forget_the_parents() -> None:
    global _living_lock  # noqa: PLW0603  # a thread that this process has not got may hold the old one
    _living_lock = threading.RLock()
    _inherited.extend((*_living.values(), *_closing.values()))
    _living.clear()
    _closing.clear()


os.register_at_fork(after_in_child=_forget_the_parents)


async def read_once(location: Location, operation: Operation[_T]) -> _T:
    """Run *operation* on a consistent view of a file, of whatever program, and let go of it; nothing is changed.

    Raises:
        StoreError: The driver's error in our words, as the cause.
    """
    return await anyio.to_thread.run_sync(_read_once, location, operation)


def _read_once(location: Location, operation: Operation[_T]) -> _T:
    try:
        with closing(
            sqlite3.connect(location.with_options("mode=ro"), uri=True, timeout=BUSY_SECONDS, isolation_level=None)
        ) as connection:
            connection.text_factory = _ANY_TEXT
            connection.execute("PRAGMA trusted_schema=OFF")
            return _in_transaction(connection, operation, "BEGIN")
    except sqlite3.Error as error:
        raise translate(error, location.name) from error


def living_holders() -> set[str]:
    """The holders of this process's open databases."""
    with _living_lock:
        return {database.holder for database in _living.values()}


def is_busy(error: BaseException) -> bool:
    """Whether somebody else holds the database right now."""
    return isinstance(error, sqlite3.Error) and _primary_code(error) in {sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED}


def is_damaged(error: BaseException) -> bool:
    """Whether a part of the file that the statement needed can't be read."""
    return isinstance(error, sqlite3.Error) and _primary_code(error) == sqlite3.SQLITE_CORRUPT


def _primary_code(error: sqlite3.Error) -> int:
    # Errors that the module raises by itself, such as the use of a closed connection, have no code.
    code: int = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR)
    return code & 0xFF


_ADVICE: Final[dict[int, str]] = {
    sqlite3.SQLITE_FULL: "make room on the disk and try again",
    sqlite3.SQLITE_IOERR: "look at the disk and its file system, then try again",
    sqlite3.SQLITE_READONLY: "make the file and its folder writable",
    sqlite3.SQLITE_CANTOPEN: "check that its folder exists and may be written to",
    sqlite3.SQLITE_CORRUPT: "look at the disk first, since a read that fails looks the same; if it stays, restore a"
    " backup, or salvage it with SQLite's .recover",
}


def _is_read_only(error: BaseException | None) -> bool:
    """Whether a connection may not write: one that was opened while its file could not be written to never may."""
    cause = None if error is None else error.__cause__
    return isinstance(cause, sqlite3.Error) and _primary_code(cause) == sqlite3.SQLITE_READONLY


def translate(error: sqlite3.Error, name: str) -> StoreError:
    """The driver's error in our words."""
    if is_busy(error):
        return StoreBusyError(store=name, waited_seconds=BUSY_SECONDS)
    code = _primary_code(error)
    if code == sqlite3.SQLITE_NOTADB:
        return StoreFormatError(store=name, reason="it is not an SQLite database")
    return StoreError(f"store {name!r}: {error}; {_ADVICE.get(code, 'nothing was written')}", store=name)


class MemoryDatabase(Database):
    """A database in memory. Its operations run on the awaiting event loop, one at a time."""

    def __init__(self, location: Location, lifecycle: Lifecycle) -> None:
        super().__init__(location, lifecycle)
        self._lock = threading.RLock()
        self._connection: Connection | None = None

    async def write(self, operation: Operation[_T], *, durable: bool, urgent: bool = False) -> _T:
        """Run *operation*; memory has nothing to flush, and nothing waits there."""
        return await self._when_free(operation)

    async def read(self, operation: Operation[_T]) -> _T:
        """Run *operation*."""
        return await self._when_free(operation)

    async def flush(self, *, rewrite: bool) -> bool:
        """Nothing: memory has no log, and no pages that outlive their database."""
        return await self._when_free(_is_open)

    async def _when_free(self, operation: Operation[_T]) -> _T:
        """Another connection of the program may hold a shared database: it is waited for, and not on the loop."""
        await yield_once()
        deadline = time.monotonic() + BUSY_SECONDS
        while True:
            try:
                return self.run_on_loop(partial(self._run, operation))
            except StoreBusyError:
                if time.monotonic() > deadline:
                    raise
            await anyio.sleep(_LOOK_AGAIN)

    def run_on_loop(self, call: Callable[[], _T]) -> _T:
        """The one place that calls SQLite on an event loop: in memory it waits for no disk."""
        self._refuse_inherited()
        with self._lock:
            return call()

    def _run(self, operation: Operation[_T]) -> _T:
        self._refuse_closed()
        try:
            if self._connection is None:
                self._connection = self._open_prepared(busy_seconds=0)
            return _in_transaction(self._connection, operation)
        except sqlite3.Error as error:
            raise translate(error, self.location.name) from error

    async def close(self) -> None:
        """Close the connection; what a shared one held goes with the last one."""
        await yield_once()
        self.abandon()

    def abandon(self) -> None:
        """Close the connection."""
        self.run_on_loop(self._close)

    def _close(self) -> None:
        self._closed = True
        if self._connection is not None:
            with suppress(sqlite3.Error):
                # Another connection may hold a shared database; whoever waits there sees that this holder is gone.
                _in_transaction(self._connection, partial(self._lifecycle.release, self.holder))
            self._connection.close()
            self._connection = None
        _has_let_go(self)


def fetch_bytes(
    connection: Connection, statement: LiteralString, values: Mapping[str, object]
) -> list[tuple[Any, ...]]:
    """The rows, in which text is the bytes that it is in UTF-8: enough for who parses it, and quicker to fetch.

    `as_text` makes text of it, as it would else have been read.
    """
    connection.text_factory = bytes
    try:
        return connection.execute(statement, values).fetchall()
    finally:
        connection.text_factory = _ANY_TEXT


def as_text(value: object) -> object:
    """What `fetch_bytes` gave for a column, with text as text."""
    return _ANY_TEXT(value) if isinstance(value, bytes) else value


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

    @property
    def is_started(self) -> bool:
        """Whether it has ever had something to do."""
        return self._thread.ident is not None

    def post(self, function: Callable[[], object]) -> None:
        """Run *function* on the thread, after all that was posted before."""
        if not self.is_started:
            self._thread.start()
        self._tx.put_nowait((None, function))  # pyright: ignore[reportUnknownMemberType]  # aiosqlite names no type

    def end(self) -> None:
        """Let the thread end after what is posted."""
        # Called on the thread itself, where no loop runs, stop() makes no future for a loop that may be closed by then.
        self.post(self.stop)  # pyright: ignore[reportUnknownMemberType, reportUnknownArgumentType]  # as above


def _no_connector() -> Connection:
    raise NotImplementedError("the database opens its connections itself")


class FileDatabase(Database):
    """A database in a file: one thread that writes, one that reads."""

    def __init__(self, location: Location, lifecycle: Lifecycle) -> None:
        super().__init__(location, lifecycle)
        # Entered again by `abandon`, when the garbage collector runs in the middle of it.
        self._lock = threading.RLock()
        self._urgent: deque[_Write[Any]] = deque()
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

    async def write(self, operation: Operation[_T], *, durable: bool, urgent: bool = False) -> _T:
        """Queue *operation* for the writing thread's next group."""
        loop = asyncio.get_running_loop()
        write: _Write[_T] = _Write(operation, durable, loop, loop.create_future())
        self._refuse_inherited()
        with self._lock:
            self._refuse_closed()
            (self._urgent if urgent else self._waiting).append(write)
            if not self._draining:
                self._draining = True
                self._writer.post(self._drain)
        return await write.future

    async def read(self, operation: Operation[_T]) -> _T:
        """Run *operation* on the reading thread, beside the writes."""
        if not self._opened and not self.location.read_only:
            await self.write(_nothing, durable=False)
        loop = asyncio.get_running_loop()
        read: _Write[_T] = _Write(operation, False, loop, loop.create_future())
        self._refuse_inherited()
        with self._lock:
            self._refuse_closed()
            self._reader.post(partial(self._run_read, read))
        return await read.future

    async def flush(self, *, rewrite: bool) -> bool:
        """Flush on the writing thread, beside no transaction; try again where a reader was in the way."""
        for again in range(_FLUSHES):
            if again:
                await anyio.sleep(_LOOK_AGAIN)
            loop = asyncio.get_running_loop()
            flush: _Write[bool] = _Write(_is_open, False, loop, loop.create_future())
            self._refuse_inherited()
            with self._lock:
                self._refuse_closed()
                self._writer.post(partial(self._run_flush, flush, rewrite=rewrite and not again))
            if await flush.future:
                return True
        return False

    async def close(self) -> None:
        """Let both threads finish what is queued, close their connections, and end them, whoever waits for it."""
        loop = asyncio.get_running_loop()
        ended = _Write(_nothing, False, loop, loop.create_future())
        self._end([ended])
        await ended.future

    def abandon(self) -> None:
        """Close without waiting; the threads end by themselves."""
        self._end([])

    def _end(self, ended: list[_Write[None]]) -> None:
        with self._lock:
            self._closed = True
            # The writing connection goes last, since the last one to go writes the log into the file.
            if self._reader.is_started:
                self._reader.post(partial(self._close_reader, ended))
                self._reader.end()
            elif self._writer.is_started:
                self._writer.post(partial(self._close_writer, ended))
                self._writer.end()
            else:
                _has_let_go(self)
                _deliver(ended)

    # --- on the reading thread ---

    def _run_read(self, read: _Write[Any]) -> None:
        try:
            read.result = _in_transaction(self._reading_connection(), read.operation, "BEGIN")
        except BaseException as error:  # noqa: BLE001  # handed to whoever awaits it
            read.error = self._explain(error)
        _deliver([read])

    def _reading_connection(self) -> Connection:
        if self._read_connection is None and self.file is None:
            self.file = self._file_to_read()
        # Before it is opened too, which would make an empty file.
        self._refuse_other_file()
        if self._read_connection is None:
            connection = self._open(busy_seconds=BUSY_SECONDS)
            try:
                connection.execute("PRAGMA query_only=ON")
                if self.location.read_only:
                    self._lifecycle.check(connection, self.location.name)
            except BaseException:
                connection.close()
                raise
            self._read_connection = connection
        return self._read_connection

    def _file_to_read(self) -> tuple[int, int]:
        path, name = self.location.path, self.location.name
        assert path is not None
        try:
            status = path.stat()
        except OSError as error:
            raise StoreError(f"store {name!r} can't be reached: {error}", store=name) from error
        if not stat.S_ISREG(status.st_mode):
            raise StoreError(f"store {name!r} is no file", store=name)
        return status.st_dev, status.st_ino

    def _close_reader(self, ended: list[_Write[None]]) -> None:
        if self._read_connection is not None:
            self._read_connection.close()
            self._read_connection = None
        self._writer.post(partial(self._close_writer, ended))
        self._writer.end()

    # --- on the writing thread ---

    def _drain(self) -> None:
        while True:
            with self._lock:
                waiting = self._urgent or self._waiting
                group = [waiting.popleft() for _ in range(min(_GROUP, len(waiting)))]
                if not group:
                    self._draining = False
                    return
            try:
                self._run_group(group)
            except BaseException as error:  # noqa: BLE001  # everybody in the group waits for an answer
                self._undo()
                for write in group:
                    write.error = self._explain(write.error or error)
            if any(_is_read_only(write.error) for write in group):
                self._let_go_of_connection()
            _deliver(group)

    def _run_group(self, group: list[_Write[Any]]) -> None:
        connection = self._writing_connection()
        self._refuse_other_file()
        todo = group
        while todo:
            self._flush_at("FULL" if any(write.durable for write in todo) else "NORMAL", connection)
            connection.execute("BEGIN IMMEDIATE")
            before = connection.total_changes
            if _run_all(connection, todo):
                self._commit(connection, todo, before)
                break
            connection.execute("BEGIN IMMEDIATE")
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

    def _run_flush(self, flush: _Write[bool], *, rewrite: bool) -> None:
        try:
            connection = self._writing_connection()
            self._refuse_other_file()
            if rewrite:
                _rewrite(connection)
            flush.result = _empty_log(connection)
        except BaseException as error:  # noqa: BLE001  # handed to whoever awaits it
            flush.error = self._explain(error)
        _deliver([flush])

    def _undo(self) -> None:
        connection = self._write_connection
        if connection is not None and connection.in_transaction:
            try:
                connection.execute("ROLLBACK")
            except sqlite3.Error:
                # Closing it undoes the transaction too.
                self._let_go_of_connection()

    def _let_go_of_connection(self) -> None:
        """Close the writing connection; the next write opens another."""
        connection, self._write_connection = self._write_connection, None
        if connection is not None:
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
            if self._find_out(connection, self._groups):
                return
            for write in group:
                write.error = error

    def _find_out(self, connection: Connection, number: int) -> bool:
        """Whether the group of that number is in the file, after a COMMIT that failed: it may be, or not."""
        self._write_connection = None
        connection.close()
        try:
            row = self._writing_connection().execute(_READ_MARK, {"key": f"commit:{self.holder}"}).fetchone()
        except (sqlite3.Error, StoreError) as error:
            name = self.location.name
            raise StoreError(
                f"store {name!r} failed while it committed, and can't be read: whether it holds the change is not known"
                f" until it can be opened again ({error})",
                store=name,
            ) from error
        return row is not None and row[0] == str(number)

    def _flush_at(self, level: str, connection: Connection) -> None:
        if self._synchronous != level:
            connection.execute(f"PRAGMA synchronous={level}")
            self._synchronous = level

    def _writing_connection(self) -> Connection:
        if self.location.read_only:
            name = self.location.name
            raise StoreError(f"store {name!r} is only read (mode=ro); open it without that to change it", store=name)
        if self._write_connection is None:
            if self.predecessor is not None:
                self.predecessor.let_go.wait()
                self.predecessor = None
            if self._opened:
                self._refuse_other_file()
            self._check_path()
            self._look()
            self._write_connection = self._open_prepared(busy_seconds=BUSY_SECONDS)
            self._synchronous = ""
            self._opened = True
        return self._write_connection

    def _refuse_second_name(self) -> None:
        """Two writing connections of one process on one file can damage its WAL (before SQLite 3.51.3)."""
        path, name = self.location.path, self.location.name
        assert path is not None
        status = path.stat()
        file = (status.st_dev, status.st_ino)
        with _living_lock:
            others = [each for each in _living.values() if each is not self and each.file == file]
            if not others:
                self.file = file
        if others:
            raise StoreError(
                f"store {name!r} is open in this process as {others[0].location.name!r}; use one name for one file",
                store=name,
            )

    def _refuse_other_file(self) -> None:
        """What is written to a file that was deleted or replaced while it is open, nobody finds again."""
        path, name = self.location.path, self.location.name
        assert path is not None
        try:
            status = path.stat()
            found = (status.st_dev, status.st_ino)
        except OSError:
            found = None
        if found != self.file:
            what = "gone" if found is None else "another one"
            raise StoreError(
                f"store {name!r}: the file at its path is {what} since it was opened, and nothing was written;"
                " put the old one back, or close the store and open it again",
                store=name,
            )

    def _check_path(self) -> None:
        path, name = self.location.path, self.location.name
        assert path is not None
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if path.is_dir():
                raise StoreError(f"store {name!r} is a folder; name a file in it", store=name)
            status = path.stat() if path.exists() else None
        except OSError as error:
            raise StoreError(f"store {name!r} can't be reached: {error}", store=name) from error
        if status is not None and not status.st_mode & (stat.S_IWUSR | stat.S_IWGRP | stat.S_IWOTH):
            raise StoreError(f"store {name!r} is read-only; make the file writable", store=name)
        if status is not None and status.st_size == 1:
            # SQLite takes a file of one byte for an empty one, and would write over it.
            raise StoreFormatError(store=name, reason="it is not an SQLite database")

    def _look(self) -> None:
        """Refuse what a program that crashed has left and is not ours, before a connection that writes touches it.

        Such a connection would roll back an open transaction when it reads, and write the log into the file when it is
        closed. A file with neither beside it is not changed by being read.
        """
        assert self.location.path is not None
        file = os.path.realpath(self.location.path)
        if _is_filled(f"{file}-wal"):
            # The second is for a log that was copied without its index. It makes one.
            ways, committed = ["mode=ro&readonly_shm=1", "mode=ro"], True
        elif _is_filled(f"{file}-journal"):
            ways, committed = ["immutable=1"], False
        else:
            return
        for way in ways:
            try:
                with closing(sqlite3.connect(self.location.with_options(way), uri=True, timeout=0)) as connection:
                    self._lifecycle.look(connection, self.location.name, committed)
                    return
            except sqlite3.Error:
                # It can't be read in this way; what is wrong will show when it is opened.
                continue

    def _close_writer(self, ended: list[_Write[None]]) -> None:
        self._drain()
        connection, self._write_connection = self._write_connection, None
        if connection is not None:
            with suppress(sqlite3.Error):
                # With a full disk or a foreign lock, whoever opens the file next gives it back, as after a kill.
                _in_transaction(connection, partial(self._lifecycle.release, self.holder))
            connection.close()
        _has_let_go(self)
        _deliver(ended)

    def _explain(self, error: BaseException | None) -> BaseException | None:
        if isinstance(error, sqlite3.Error):
            ours = translate(error, self.location.name)
            ours.__cause__ = error
            return ours
        if isinstance(error, StoreError):
            # An error each: raised in several tasks, one would gather the traceback of all.
            cause, error = error.__cause__, copy.copy(error)
            error.__cause__ = cause
        return error


_MARK_GROUP: Final = """
    INSERT INTO chatflow_meta (key, value) VALUES (:key, :value) ON CONFLICT (key) DO UPDATE SET value = excluded.value
"""
_READ_MARK: Final = "SELECT value FROM chatflow_meta WHERE key = :key"


def _nothing(_connection: Connection) -> None:
    return None


def _is_open(_connection: Connection) -> bool:
    return True


def _rewrite(connection: Connection) -> None:
    # The copy is as large as the file, and must not be made in memory.
    connection.execute("PRAGMA temp_store=FILE")
    try:
        connection.execute("VACUUM")
    finally:
        connection.execute("PRAGMA temp_store=MEMORY")


def _empty_log(connection: Connection) -> bool:
    """Whether nobody was in the way. Writes wait meanwhile, so it is not waited for long."""
    connection.execute(f"PRAGMA busy_timeout={_FLUSH_MILLISECONDS}")
    try:
        busy: int = connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0]
    finally:
        connection.execute(f"PRAGMA busy_timeout={int(BUSY_SECONDS * 1000)}")
    return not busy


def _is_filled(name: str) -> bool:
    try:
        return Path(name).stat().st_size > 0
    except OSError:
        return False


def _run_all(connection: Connection, group: list[_Write[Any]]) -> bool:
    """Run all writes in one transaction. If one fails the transaction is undone, and they are to run apart."""
    try:
        for write in group:
            write.result = write.operation(connection)
    except BaseException:  # noqa: BLE001  # whose it is will show when they run apart
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        return False
    return True


def _run_each(connection: Connection, group: list[_Write[Any]]) -> _Write[Any] | None:
    """Run each write in a savepoint. Returns the one whose error has undone the whole transaction, or None."""
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


class _Undelivered(threading.local):
    """What has come to the event loops of this thread, and has not been handed over."""

    def __init__(self) -> None:
        self.by_loop: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, deque[_Write[Any]]] = (
            weakref.WeakKeyDictionary()
        )


_undelivered: Final = _Undelivered()


def _settle(loop: asyncio.AbstractEventLoop, writes: deque[_Write[Any]]) -> None:
    """Hand over *writes* after all that came before: a group of which some are left does not let the next one by."""
    waiting = _undelivered.by_loop.setdefault(loop, deque())
    is_first = not waiting
    waiting += writes
    if is_first:
        _settle_some(loop, waiting)


def _settle_some(loop: asyncio.AbstractEventLoop, waiting: deque[_Write[Any]]) -> None:
    for _ in range(min(_DELIVERED_AT_ONCE, len(waiting))):
        write = waiting.popleft()
        if write.future.done():
            continue
        if write.error is None:
            write.future.set_result(write.result)
        else:
            write.future.set_exception(write.error)
    if waiting:
        loop.call_soon(_settle_some, loop, waiting)
