"""Database: what a process has of one PostgreSQL database: a pool of connections, the waiters, the holder's name.

An operation is tried until it has gone through, or for `BUSY_SECONDS`: a server that restarts, or a connection that
breaks, is waited for. Where a connection breaks while a transaction commits, what it has left behind tells whether it
holds, and only one that does not is tried again.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, Final, LiteralString, TypeVar

import anyio
import attrs

from chatflow.core.finish import finish
from chatflow.core.holder import new_holder
from chatflow.core.line import Line
from chatflow.exceptions import StoreBusyError, StoreClosedError, StoreError
from chatflow.postgres import statements
from chatflow.postgres.connection import Address, Connection, Error, Row, Step, Transaction
from chatflow.postgres.failures import is_lost, is_worth_another_try, translate, word_of
from chatflow.postgres.gates import Gates
from chatflow.postgres.pool import Pool, Slot
from chatflow.postgres.schema import prepare
from chatflow.postgres.turn_statements import LIMITED, NOT_FLUSHED

_T = TypeVar("_T")

Operation = Callable[[Transaction], Awaitable[_T]]

Settle = Callable[[str, Transaction], Awaitable[None]]
"""What is done once when a holder opens a database: it may refuse, and frees what those have in hand who are gone."""

BUSY_SECONDS: Final = 10.0
"""How long an operation waits for a connection, or for a server that does not take it."""

ANSWER_SECONDS: Final = 30.0
"""How long an operation may take on a connection; one that is silent for so long is closed."""

CLOSING_SECONDS: Final = 2.0
"""The same for what is given back at the end: where the server is away, others see that this holder is gone."""

_PAUSE: Final = 0.05
"""Seconds between tries."""

_BEGIN: Final[LiteralString] = "BEGIN"
_BEGIN_READING: Final[LiteralString] = "BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY"

_living: dict[Address, Database] = {}
# Entered again by a store that the garbage collector finds in the middle of it.
_living_lock = threading.RLock()


class _Unknown(Exception):  # noqa: N818  # not an error yet: it is looked up
    """A transaction was committing when its connection went; *why*, where the server has said so."""

    def __init__(self, mark_id: str, number: int, result: Any, why: str | None = None) -> None:
        super().__init__()
        self.why = why
        self.mark_id = mark_id
        self.number = number
        self.result = result


class Database:
    """One database of this process, shared by all stores on it, in whatever event loop."""

    def __init__(self, address: Address, max_connections: int, settle: Settle) -> None:
        self.address = address
        self.holder = new_holder()
        self.line = Line()
        self.gates = Gates()
        self.users = 0
        self._settle = settle
        self._pool = Pool(max_connections)
        self._pid = os.getpid()
        self._closed = False
        self._is_prepared = False
        self._used_marks: list[str] = []

    # --- operations ---

    async def write(self, operation: Operation[_T], *, flushed: bool = True, seconds: float | None = None) -> _T:
        """Run *operation* in a transaction that has committed when this returns, flushed to the disk if *flushed*.

        It runs to its end, whatever cancels the caller.

        Raises:
            StoreError: The driver's error in our words, as the cause.
        """

        async def attempt(connection: Connection) -> _T:
            number = connection.marks = connection.marks + 1
            ending: list[_T] = []

            async def body(transaction: Transaction) -> _T:
                await transaction.set(LIMITED)
                if not flushed:
                    await transaction.set(NOT_FLUSHED)
                result = await operation(transaction)
                if transaction.changed:
                    await transaction.change(statements.MARK, mark_id=connection.mark_id, mark=number)
                    ending.append(result)
                return result

            return await self._known(connection, number, connection.transact(_BEGIN, body), ending)

        return await self._run(attempt, seconds)

    async def read(self, operation: Operation[_T]) -> _T:
        """Run *operation* on a consistent view of what is committed."""
        return await self._run(lambda connection: connection.transact(_BEGIN_READING, operation))

    async def ask(self, statement: LiteralString, **values: Any) -> list[Row]:
        """What one statement answers, which changes nothing, or may be done twice."""
        return (await self.fly(Step(statement, values)))[0]

    async def fly(self, *steps: Step) -> list[list[Row]]:
        """What some statements answer, in one round trip and one transaction; they may be done twice."""
        return await self._run(lambda connection: connection.fly(*steps))

    async def fly_once(self, *steps: Step) -> list[list[Row]] | None:
        """The same for statements that leave a mark themselves; None where they hold and their answer was lost."""

        async def attempt(connection: Connection) -> list[list[Row]] | None:
            number = connection.marks = connection.marks + 1
            mark = {"mark_id": connection.mark_id, "mark": number}
            marked = [attrs.evolve(step, values={**step.values, **mark}) for step in steps]
            return await self._known(connection, number, connection.fly(*marked), [None])

        return await self._run(attempt)

    async def _known(self, connection: Connection, number: int, flight: Awaitable[_T], ending: list[Any]) -> _T:
        """What *flight* returns; where its connection went after *ending* was known, that has to be looked up."""
        try:
            return await flight
        except Error as error:
            if ending and is_lost(error, connection):
                raise _Unknown(connection.mark_id, number, ending[0], word_of(error)) from error
            raise
        except BaseException:
            if ending and not connection.is_usable:
                raise _Unknown(connection.mark_id, number, ending[0]) from None
            raise

    async def _run(self, attempt: Callable[[Connection], Awaitable[_T]], seconds: float | None = None) -> _T:
        self._refuse_inherited()
        if self._closed:
            raise StoreClosedError(store=self.address.name)
        return await finish(self._run_to_the_end(attempt, BUSY_SECONDS if seconds is None else seconds))

    async def _run_to_the_end(self, attempt: Callable[[Connection], Awaitable[_T]], seconds: float) -> _T:
        slot = await self._pool.take(seconds)
        if slot is None:
            reason = (
                f"this process's connections were all in use (max_connections={self._pool.limit}); find what they wait"
                " for, or allow more"
            )
            raise StoreBusyError(store=self.address.name, waited_seconds=seconds, reason=reason)
        try:
            return await self._try(slot, attempt, seconds)
        finally:
            self._pool.give(slot)

    async def _try(self, slot: Slot, attempt: Callable[[Connection], Awaitable[_T]], seconds: float) -> _T:
        began = time.monotonic()
        why: str | None = None
        while True:
            connection: Connection | None = None
            try:
                connection = await self._connection_of(slot)
                return await _in_time(connection, attempt)
            except _Unknown as unknown:
                why = unknown.why or why
                if await self._holds(slot, unknown):
                    return unknown.result  # type: ignore[no-any-return]  # it is what the attempt would have returned
                waited = time.monotonic() - began
                if waited > seconds + ANSWER_SECONDS:
                    # A server that did not answer once is given another chance.
                    name = self.address.name
                    raise StoreError(
                        f"store {name!r}: the server did not answer a commit, over and over again for {waited:.1f} s;"
                        " nothing was written",
                        store=name,
                    ) from unknown.__cause__
            except Error as error:
                lost = is_lost(error, connection)
                again = lost or is_worth_another_try(error)
                if connection is not None and (again or not connection.is_usable):
                    # Through a bouncer, or after a failover, another connection may lead to another server.
                    connection.close()
                why = word_of(error) or why
                waited = time.monotonic() - began
                if not again or waited > seconds:
                    name = self.address.name
                    if lost and why is not None:
                        # It has said why it would go away.
                        raise StoreError(f"store {name!r}: {why}", store=name) from error
                    raise translate(error, name, round(waited, 1)) from error
            except TimeoutError as error:
                name = self.address.name
                raise StoreError(
                    f"store {name!r}: the server was silent for {ANSWER_SECONDS:g} s; nothing was written", store=name
                ) from error
            await anyio.sleep(_PAUSE)

    async def _connection_of(self, slot: Slot) -> Connection:
        connection = slot.connection
        if connection is None or not connection.is_usable:
            connection = slot.connection = await Connection.open(self.address)
            self._used_marks.append(connection.mark_id)
        if not self._is_prepared:
            await prepare(connection, self.address.schema, self.address.name)
            await connection.transact(_BEGIN, self._take_up)
            self._is_prepared = True
        return connection

    async def _holds(self, slot: Slot, unknown: _Unknown) -> bool:
        """Whether the transaction is in the database, after which it can't get there any more."""
        values = {"mark_id": unknown.mark_id}

        async def close_mark(transaction: Transaction) -> int:
            steps = [Step(statement, values) for statement in statements.CLOSE_MARK]
            _, found, _ = await transaction.ask_all(*steps)
            return int(found[0][0])

        deadline = time.monotonic() + BUSY_SECONDS
        while True:
            try:
                connection = await self._connection_of(slot)
                found = await _in_time(connection, lambda each: each.transact(_BEGIN, close_mark))
            except (Error, TimeoutError) as error:
                if time.monotonic() > deadline:
                    name = self.address.name
                    said = f"; it has said: {unknown.why}" if unknown.why is not None else ""
                    raise StoreError(
                        f"store {name!r}: the connection broke while it committed, and the server can't be asked:"
                        f" whether it holds the change is not known until it can be reached again{said}",
                        store=name,
                    ) from error
                await anyio.sleep(_PAUSE)
            else:
                return found == unknown.number

    async def _take_up(self, transaction: Transaction) -> None:
        await self._settle(self.holder, transaction)

    # --- the end ---

    @property
    def is_inherited(self) -> bool:
        """Whether it belongs to the process that this one was forked from."""
        return os.getpid() != self._pid

    def _refuse_inherited(self) -> None:
        if self.is_inherited:
            raise StoreClosedError(
                store=self.address.name, reason="it was opened before this process was forked from its parent"
            )

    async def close(self, release: Operation[None]) -> None:
        """Give back what this process has in hand, wait for what is under way, and close all connections."""
        if self._is_prepared:
            # Where the server can't be reached, others see that this holder is gone.
            with suppress(StoreError):
                await self.write(release, flushed=False, seconds=CLOSING_SECONDS)
                await self.fly(Step(statements.DELETE_MARKS, {"mark_ids": self._used_marks}))
        self._closed = True
        await self._pool.drain(CLOSING_SECONDS)
        self._pool.close()

    def abandon(self) -> None:
        """Close all connections without waiting."""
        self._closed = True
        self._pool.close()


async def _in_time(connection: Connection, attempt: Callable[[Connection], Awaitable[_T]]) -> _T:
    try:
        with anyio.fail_after(ANSWER_SECONDS):
            return await attempt(connection)
    except BaseException as error:
        if not isinstance(error, Exception) or isinstance(error, TimeoutError):
            # Cut off in the middle of something.
            connection.close()
        raise


def open_database(address: Address, max_connections: int, settle: Settle) -> Database:
    """This process's database at *address*, for one more user; `release_database` gives it back."""
    with _living_lock:
        database = _living.get(address)
        if database is None:
            database = _living[address] = Database(address, max_connections, settle)
        database.users += 1
    return database


def release_database(database: Database) -> bool:
    """Give *database* back. True if nobody else uses it, and the caller is to close it."""
    if database.is_inherited:
        return False
    with _living_lock:
        database.users -= 1
        if database.users:
            return False
        del _living[database.address]
    return True


def living_holders() -> set[str]:
    """The holders of this process's open databases."""
    with _living_lock:
        return {database.holder for database in _living.values()}


def _forget_the_parents() -> None:
    global _living_lock  # noqa: PLW0603  # a thread that this process has not got may hold the old one
    _living_lock = threading.RLock()
    _inherited.extend(_living.values())
    _living.clear()


_inherited: list[Database] = []
"""What the parent of a forked process had open. Kept, since to close it here would end the parent's connections."""

os.register_at_fork(after_in_child=_forget_the_parents)
