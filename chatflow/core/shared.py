"""DatabaseStore: a store over a database that all stores of its process at one address share."""

from __future__ import annotations

import threading
from abc import abstractmethod
from contextlib import suppress
from typing import Generic, Protocol, TypeVar

from chatflow.core.backend import StoreBackend
from chatflow.core.line import Line
from chatflow.core.purging import Purging
from chatflow.core.records import Leaving
from chatflow.exceptions import StoreClosedError, StoreError


class SharedDatabase(Protocol):
    """A database, as far as its stores' coming and going is concerned."""

    line: Line
    """The waiters of this process on it."""

    @property
    def is_inherited(self) -> bool:
        """Whether it belongs to the process that this one was forked from."""
        ...

    def abandon(self) -> None:
        """Release everything without waiting."""
        ...


_D = TypeVar("_D", bound=SharedDatabase)


class DatabaseStore(StoreBackend, Generic[_D]):
    """A store that opens its database with the first operation, and gives it back when it is closed."""

    def __init__(self, default_max_turns: int, dedup_ttl_hours: float) -> None:
        super().__init__(default_max_turns, dedup_ttl_hours)
        self._opening = threading.Lock()
        self._opened: _D | None = None
        self._closed = False
        self._purging = Purging()

    @abstractmethod
    def _open(self) -> _D:
        """This process's database, for one more user."""

    @abstractmethod
    def _release(self, database: _D) -> bool:
        """Give *database* back. True if nobody else uses it, and it is to be closed."""

    @abstractmethod
    async def _close(self, database: _D) -> None:
        """Close *database*, which nobody uses any more."""

    @abstractmethod
    async def _let_go(self, held: tuple[Leaving, ...], database: _D) -> None:
        """Give the rows *held* back, which were this store's."""

    @property
    def line(self) -> Line:
        """The waiters of this process on the same database."""
        return self._database.line

    @property
    def _database(self) -> _D:
        opened = self._opened
        if opened is None:
            with self._opening:
                if self._closed:
                    raise StoreClosedError(store=self.name)
                # Another thread may have opened it in the meantime.
                opened = self._opened = self._opened or self._open()
        return opened

    def _in_use(self) -> _D:
        if self._closed:
            raise StoreClosedError(store=self.name)
        return self._database

    async def close(self) -> None:
        """Close the database, if no other store of this process uses it."""
        held = tuple(turn.leaving for turn in self.turns if turn.turn_id is not None)
        database = self._take_database()
        if database is not None:
            if self._release(database):
                await self._close(database)
            elif held:
                # The last one to close gives everything back. Before that, others hold rows under the same name.
                with suppress(StoreError):
                    await self._let_go(held, database)
            database.line.wake_all()

    def abandon(self) -> bool:
        """Let go of the database without waiting."""
        database = self._take_database()
        if database is None or database.is_inherited:
            # What this process's parent opened is the parent's to close.
            return False
        if self._release(database):
            database.abandon()
        return True

    def _take_database(self) -> _D | None:
        with self._opening:
            if self._closed:
                return None
            self._closed = True
            return self._opened
