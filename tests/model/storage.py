"""The real storages, as several processes use them at once: every call says who asks, and is one atomic operation.

`Memory` is the store in memory with its real rows, which here have several holders. `Sqlite` calls the real operations
on one connection. Neither knows anything of the model around it but its clock and who is gone.
"""

from __future__ import annotations

import datetime as dt
import sqlite3
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar
from unittest.mock import patch

import attrs

from chatflow.core import lines
from chatflow.core.codec import entry_to_json, response_to_json, values_to_json
from chatflow.core.journal import Entry
from chatflow.core.memory_rows import MemoryRows
from chatflow.core.memory_tables import MemoryTables
from chatflow.core.records import (
    Accepted,
    Answered,
    Beat,
    Beaten,
    Commit,
    Committed,
    Cycle,
    Dead,
    InProgress,
    Key,
    Leaving,
    Left,
    Lost,
    NewSession,
    Place,
    Snapshot,
    Ticket,
    Work,
)
from chatflow.core.rows import LIVE, Row, State
from chatflow.sqlite import operations, turns
from chatflow.sqlite import rows as sqlite_rows
from chatflow.sqlite.commit import WriteCommit
from chatflow.sqlite.schema import MIGRATIONS

_T = TypeVar("_T")

Clock = Callable[[], dt.datetime]
Queued = Place | Answered | InProgress | Dead | Cycle | Lost


class Storage(ABC):
    """What the processes of the model share. *gone* are the holders that anybody can see to be gone."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.gone: set[str] = set()

    @abstractmethod
    def create(self, holder: str, key: Key, new: NewSession) -> Snapshot:
        """Create the conversation, or read it."""

    @abstractmethod
    def queue(self, holder: str, ticket: Ticket) -> Queued:
        """A place in the line."""

    @abstractmethod
    def start(
        self, holder: str, turn_id: int, attempt: int, key: Key, known: Snapshot | None, max_attempts: int | None
    ) -> Place | Dead | Lost:
        """Start what may run."""

    @abstractmethod
    def accept(self, holder: str, ticket: Ticket) -> Accepted | Answered | Dead:
        """Work to be done."""

    @abstractmethod
    def commit(self, holder: str, commit: Commit, key: Key) -> Committed | Lost:
        """The end of a turn."""

    @abstractmethod
    def leave(self, holder: str, leaving: Leaving) -> Left:
        """Give a row back."""

    @abstractmethod
    def look(self, holder: str, turn_id: int, attempt: int, key: Key, known: Snapshot | None) -> Lost | None:
        """Whether the turn still runs."""

    @abstractmethod
    def is_held(self, holder: str, turn_id: int) -> bool:
        """Whether somebody has it in hand."""

    @abstractmethod
    def note(
        self, holder: str, turn_id: int, attempt: int, entry: Entry, key: Key, known: Snapshot | None
    ) -> Lost | None:
        """A line of the journal."""

    @abstractmethod
    def beat(self, holder: str, held: frozenset[int], watched: frozenset[int], *, everything: bool) -> Beaten:
        """Signs of life."""

    @abstractmethod
    def interrupt(self, holder: str, beat: Beat) -> bool:
        """Interrupt a silent row."""

    @abstractmethod
    def take_work(self, holder: str, agent_name: str, lease: float, limit: int) -> tuple[Work, ...]:
        """Take work."""

    @abstractmethod
    def end_answered(self, holder: str, turn_id: int, attempt: int) -> None:
        """An answer was handed on."""

    @abstractmethod
    def delete(self, holder: str, key: Key) -> tuple[int, ...] | None:
        """Delete a conversation."""

    @abstractmethod
    def find(self, turn_id: int) -> Row | None:
        """A row, for the model to judge."""

    @abstractmethod
    def rows(self, session_key: int | None = None) -> list[Row]:
        """All rows in the order of their ids, for the model to judge."""

    @abstractmethod
    def close(self) -> None:
        """Forget everything."""


class SharedRows(MemoryRows):
    """Rows in memory with several holders."""

    def __init__(self, clock: Clock, gone: set[str]) -> None:
        super().__init__(clock)
        self._gone = gone

    def next_of(self, session_key: int) -> int | None:
        """The asking holder's."""
        found = (self.turn(turn_id).row for turn_id in self.turn_ids(session_key))
        return next((row.turn_id for row in found if row.state is State.QUEUED and row.holder == self.holder), None)

    def is_gone(self, holder: str) -> bool:
        """Whether its process was seen to die."""
        return holder in self._gone


class SharedTables(MemoryTables):
    """The tables of a store in memory, which several holders ask."""

    def __init__(self, clock: Clock, gone: set[str]) -> None:
        super().__init__(clock, dedup_ttl_hours=192)
        self.rows = SharedRows(clock, gone)

    def of(self, holder: str) -> SharedTables:
        """The tables, asked by that holder."""
        self.rows.holder = holder
        return self

    def forget_answers(self, key: Key) -> None:
        """Forget which messages of the conversation were answered."""
        session = self.sessions.find(key)
        if session is not None:
            for message_id in session.answered:
                self._processed.pop((key, message_id), None)
            session.answered.clear()

    def overwrite(self, key: Key, snapshot: Snapshot) -> Snapshot | None:
        """Make *snapshot* what the conversation is."""
        session = self.sessions.find(key)
        return None if session is None else self.sessions.renew(session, snapshot)


class Memory(Storage):
    """Conversations in memory."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(clock)
        self.tables = SharedTables(clock, self.gone)

    def create(self, holder: str, key: Key, new: NewSession) -> Snapshot:
        return self.tables.of(holder).sessions.create(key, new)

    def queue(self, holder: str, ticket: Ticket) -> Queued:
        return self._placed(holder, self.tables.of(holder).queue(ticket))

    def start(
        self, holder: str, turn_id: int, attempt: int, key: Key, known: Snapshot | None, max_attempts: int | None
    ) -> Place | Dead | Lost:
        return self._placed(holder, self.tables.of(holder).start(turn_id, attempt, key, known, max_attempts))

    def _placed(self, holder: str, found: _T) -> _T:
        """With what a store in memory need not ask: whose row stands directly before."""
        if not isinstance(found, Place) or found.running:
            return found
        row = self.find(found.turn_id)
        assert row is not None
        before = [other for other in self.rows(row.session_key) if other.turn_id < row.turn_id]
        live = [other for other in before if other.state in LIVE]
        return attrs.evolve(found, behind_own=bool(live) and live[-1].holder == holder)

    def accept(self, holder: str, ticket: Ticket) -> Accepted | Answered | Dead:
        return self.tables.of(holder).accept(ticket)

    def commit(self, holder: str, commit: Commit, key: Key) -> Committed | Lost:
        return self.tables.of(holder).commit(commit, key)

    def leave(self, holder: str, leaving: Leaving) -> Left:
        return self.tables.of(holder).leave(leaving)

    def look(self, holder: str, turn_id: int, attempt: int, key: Key, known: Snapshot | None) -> Lost | None:
        return self.tables.of(holder).look(turn_id, attempt, key, known)

    def is_held(self, holder: str, turn_id: int) -> bool:
        row = self.tables.rows.find(turn_id)
        return row is not None and row.holder is not None and (row.holder == holder or row.holder not in self.gone)

    def note(
        self, holder: str, turn_id: int, attempt: int, entry: Entry, key: Key, known: Snapshot | None
    ) -> Lost | None:
        return self.tables.of(holder).note(turn_id, attempt, entry, key, known)

    def beat(self, holder: str, held: frozenset[int], watched: frozenset[int], *, everything: bool) -> Beaten:
        rows = self.tables.of(holder).rows
        # A store in memory has one holder and does not look whose rows it beats, nor whether anybody is gone.
        own = {turn_id for turn_id in held if (row := rows.find(turn_id)) is not None and row.holder == holder}
        if everything:
            for row in self.rows():
                if row.holder in self.gone:
                    lines.interrupt(rows, row)
        return self.tables.beat(frozenset(own), watched, everything)

    def interrupt(self, holder: str, beat: Beat) -> bool:
        return self.tables.of(holder).interrupt(beat)

    def take_work(self, holder: str, agent_name: str, lease: float, limit: int) -> tuple[Work, ...]:
        return self.tables.of(holder).take(agent_name, lease, limit, True)

    def end_answered(self, holder: str, turn_id: int, attempt: int) -> None:
        self.tables.of(holder).end_answered(turn_id, attempt)

    def delete(self, holder: str, key: Key) -> tuple[int, ...] | None:
        return self.tables.of(holder).delete(key)

    def find(self, turn_id: int) -> Row | None:
        return self.tables.rows.find(turn_id)

    def rows(self, session_key: int | None = None) -> list[Row]:
        rows = (turn.row for turn in self.tables.rows)
        return [row for row in rows if session_key is None or row.session_key == session_key]

    def close(self) -> None:
        self.tables.clear()


class Sqlite(Storage):
    """Conversations in a database in memory, through the operations that files use."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(clock)
        self.connection = sqlite3.connect(":memory:", isolation_level=None)
        self.connection.execute("PRAGMA foreign_keys = ON")
        for statements in MIGRATIONS:
            for statement in statements:
                self.connection.execute(statement)

    @contextmanager
    def _operation(self, holder: str) -> Iterator[turns.At]:
        at = turns.At(holder, self.clock().isoformat(timespec="microseconds"), dt.timedelta(days=1))
        self.connection.execute("BEGIN")
        # What the operating system would say of a holder's process.
        with patch("chatflow.sqlite.rows.is_gone", self._is_gone):
            try:
                yield at
            except BaseException:
                self.connection.execute("ROLLBACK")
                raise
            self.connection.execute("COMMIT")

    def _is_gone(self, holder: str, living: set[str]) -> bool:
        return holder in self.gone

    def create(self, holder: str, key: Key, new: NewSession) -> Snapshot:
        with self._operation(holder) as at:
            return operations.create(key, new, at.now, self.connection)

    def queue(self, holder: str, ticket: Ticket) -> Queued:
        with self._operation(holder) as at:
            return turns.queue(ticket, at, self.connection)

    def start(
        self, holder: str, turn_id: int, attempt: int, key: Key, known: Snapshot | None, max_attempts: int | None
    ) -> Place | Dead | Lost:
        with self._operation(holder) as at:
            return turns.start(turn_id, attempt, key, known, max_attempts, at, self.connection)

    def accept(self, holder: str, ticket: Ticket) -> Accepted | Answered | Dead:
        with self._operation(holder) as at:
            return turns.accept(ticket, at, self.connection)

    def commit(self, holder: str, commit: Commit, key: Key) -> Committed | Lost:
        with self._operation(holder) as at:
            write = WriteCommit(
                commit=commit,
                key=key,
                system_texts="[]",
                body_texts="[]",
                state_json=None if commit.state is None else values_to_json(commit.state),
                spent_json=None,
                response_json=None if commit.response is None else response_to_json(commit.response),
                purged=0,
                at=at,
            )
            return write(self.connection)

    def leave(self, holder: str, leaving: Leaving) -> Left:
        with self._operation(holder) as at:
            return turns.leave(leaving, at, self.connection)

    def look(self, holder: str, turn_id: int, attempt: int, key: Key, known: Snapshot | None) -> Lost | None:
        with self._operation(holder) as at:
            return turns.look(turn_id, attempt, key, known, at, self.connection)

    def is_held(self, holder: str, turn_id: int) -> bool:
        with self._operation(holder) as at:
            return turns.is_held(turn_id, at, self.connection)

    def note(
        self, holder: str, turn_id: int, attempt: int, entry: Entry, key: Key, known: Snapshot | None
    ) -> Lost | None:
        with self._operation(holder) as at:
            return turns.write_journal(turn_id, attempt, entry_to_json(entry), key, known, at, self.connection)

    def beat(self, holder: str, held: frozenset[int], watched: frozenset[int], *, everything: bool) -> Beaten:
        with self._operation(holder) as at:
            return turns.beat(held, watched, everything, at, self.connection)

    def interrupt(self, holder: str, beat: Beat) -> bool:
        with self._operation(holder) as at:
            return turns.interrupt(beat, at, self.connection)

    def take_work(self, holder: str, agent_name: str, lease: float, limit: int) -> tuple[Work, ...]:
        with self._operation(holder) as at:
            if not turns.is_work_at_hand(agent_name, True, self.connection):
                return ()
            return turns.take_work(agent_name, lease, limit, True, at, self.connection)

    def end_answered(self, holder: str, turn_id: int, attempt: int) -> None:
        with self._operation(holder) as at:
            turns.end_answered(turn_id, attempt, at, self.connection)

    def delete(self, holder: str, key: Key) -> tuple[int, ...] | None:
        with self._operation(holder):
            return operations.delete(key, self.connection)

    def find(self, turn_id: int) -> Row | None:
        return sqlite_rows.SqliteRows(self.connection, "", "").find(turn_id)

    def rows(self, session_key: int | None = None) -> list[Row]:
        rows = sqlite_rows.SqliteRows(self.connection, "", "")
        where = "" if session_key is None else f"WHERE session_key = {session_key}"
        found = [rows.find(row[0]) for row in self.connection.execute(f"SELECT turn_id FROM chatflow_turns {where}")]
        return [row for row in found if row is not None]

    def close(self) -> None:
        self.connection.close()
