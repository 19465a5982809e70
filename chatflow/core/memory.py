"""SessionStore: conversations in memory, gone with the process. The same rules as on disk; only the storage differs."""

from __future__ import annotations

import datetime as dt
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from anyio.lowlevel import checkpoint as yield_once

from chatflow.core.backend import StoreBackend
from chatflow.core.journal import Entry
from chatflow.core.line import Line
from chatflow.core.memory_tables import MemoryTables
from chatflow.core.messages import Message
from chatflow.core.owners import Hidden, Purged, RememberedId, Stored, TakenOut
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
    Page,
    PendingTurn,
    Place,
    Seen,
    SessionInfo,
    Snapshot,
    Ticket,
    Work,
)
from chatflow.core.repairs import Fault, Part, Repair
from chatflow.core.session import DEFAULT_MAX_TURNS, SessionContext
from chatflow.core.store import DEFAULT_DEDUP_TTL_HOURS
from chatflow.exceptions import StoreClosedError

_T = TypeVar("_T")


class SessionStore(StoreBackend):
    """Conversations in memory: for tests, tools and services whose conversations may end with the process.

    Raises:
        ValueError: *default_max_turns* below 1, or *dedup_ttl_hours* not above 0.
        TypeError: One of them is not a number.
    """

    def __init__(
        self, default_max_turns: int = DEFAULT_MAX_TURNS, dedup_ttl_hours: float = DEFAULT_DEDUP_TTL_HOURS
    ) -> None:
        super().__init__(default_max_turns, dedup_ttl_hours)
        self._lock = threading.Lock()
        self._line = Line()
        self._closed = False
        self._tables = MemoryTables(self._now, self.dedup_ttl_hours)

    def _now(self) -> dt.datetime:
        return self.clock()

    @property
    def name(self) -> str:
        """What errors call it."""
        return "memory"

    @property
    def line(self) -> Line:
        """Its own waiters."""
        return self._line

    async def _operation(self, function: Callable[..., _T], *args: Any) -> _T:
        await yield_once()
        with self._lock:
            if self._closed:
                raise StoreClosedError(store=self.name)
            return function(*args)

    def keep(self, key: Key, snapshot: Snapshot) -> Snapshot:
        """Add a conversation that is like *snapshot*: a session that was made without a store begins with it."""
        with self._lock:
            return self._tables.sessions.keep(key, snapshot)

    async def load_session(self, key: Key, known: Snapshot | None) -> Snapshot | Seen:
        """The stored snapshot itself: frozen, so that nobody can change it."""
        return await self._operation(self._tables.sessions.load, key, known)

    async def create_session(self, key: Key, new: NewSession) -> Snapshot:
        """Create or merge."""
        return await self._operation(self._tables.sessions.create, key, new)

    async def delete_session(self, key: Key) -> tuple[int, ...] | None:
        """Delete one conversation."""
        return await self._operation(self._tables.delete, key)

    async def delete_sessions(self, owner: str, after: int | None, limit: int) -> tuple[int | None, tuple[int, ...]]:
        """Delete a slice."""
        return await self._operation(self._tables.delete_slice, owner, limit)

    async def page_of_sessions(self, owner: str | None, limit: int, after: int | None) -> Page[SessionInfo]:
        """Newest version first."""
        return await self._operation(self._tables.sessions.page_of_sessions, owner, limit, after)

    async def find_service_session(self, owner: str, service_key: str, agent_names: frozenset[str]) -> Key | None:
        """By an index."""
        return await self._operation(self._tables.sessions.find_service_session, owner, service_key, agent_names)

    async def page_of_messages(self, key: Key, limit: int, before: int | None) -> Page[Message] | None:
        """A slice of the history."""
        return await self._operation(self._tables.sessions.page_of_messages, key, limit, before)

    async def queue_turn(self, ticket: Ticket) -> Place | Answered | InProgress | Dead | Cycle | Lost:
        """Insert a row, or take the message's own."""
        return await self._operation(self._tables.queue, ticket)

    async def start_turn(
        self, turn_id: int, attempt: int, key: Key, known: Snapshot | None, max_attempts: int | None
    ) -> Place | Dead | Lost:
        """Start what may run."""
        return await self._operation(self._tables.start, turn_id, attempt, key, known, max_attempts)

    async def accept_turn(self, ticket: Ticket) -> Accepted | Answered | Dead:
        """Insert work to be done."""
        return await self._operation(self._tables.accept, ticket)

    async def commit_turn(self, commit: Commit, key: Key) -> Committed | Lost:
        """Take the snapshot."""
        return await self._operation(self._tables.commit, commit, key)

    async def leave_turn(self, leaving: Leaving) -> Left:
        """Change or delete the row."""
        return await self._operation(self._tables.leave, leaving)

    async def look_at_turn(self, turn_id: int, attempt: int, key: Key, known: Snapshot | None) -> Lost | None:
        """Look the row up."""
        return await self._operation(self._tables.look, turn_id, attempt, key, known)

    async def is_held(self, turn_id: int) -> bool:
        """Look the row up."""
        row = await self._operation(self._tables.rows.find, turn_id)
        return row is not None and row.holder is not None

    async def write_journal(
        self, turn_id: int, attempt: int, entry: Entry, key: Key, known: Snapshot | None, *, durable: bool
    ) -> Lost | None:
        """Keep the entry."""
        return await self._operation(self._tables.note, turn_id, attempt, entry, key, known)

    async def beat_turns(self, held: frozenset[int], watched: frozenset[int], *, everything: bool) -> Beaten:
        """Count, and read the others' counts."""
        return await self._operation(self._tables.beat, held, watched, everything)

    async def interrupt_turn(self, beat: Beat) -> bool:
        """Change the row, if its beat is the same."""
        return await self._operation(self._tables.interrupt, beat)

    async def take_work(self, agent_name: str, lease_seconds: float, limit: int, *, answers: bool) -> tuple[Work, ...]:
        """Take answers to hand on, then work to do."""
        return await self._operation(self._tables.take, agent_name, lease_seconds, limit, answers)

    async def is_next_to_tell(self, turn_id: int, attempt: int) -> bool | None:
        """Look at those before it."""
        return await self._operation(self._tables.is_next_to_tell, turn_id, attempt)

    async def end_answered(self, turn_id: int, attempt: int) -> None:
        """Drop the row."""
        await self._operation(self._tables.end_answered, turn_id, attempt)

    async def page_of_turns(self, owner: str | None, after: int, limit: int) -> tuple[PendingTurn, ...]:
        """A slice of the rows."""
        return await self._operation(self._tables.page_of_turns, owner, after, limit)

    async def is_processed(self, scope: Key, message_id: str) -> bool:
        """Look the id up."""
        return await self._operation(self._tables.find_processed, scope, message_id) is not None

    async def mark_processed(self, scope: Key, message_id: str) -> bool:
        """Mark the id."""
        return await self._operation(self._tables.mark_new, scope, message_id)

    async def purge_processed(self, limit: int) -> int:
        """Drop the oldest."""
        return await self._operation(self._tables.purge, limit)

    async def purge_sessions(
        self, owner: str | None, idle_for: float | None, after: object | None, limit: int
    ) -> Purged:
        """List those that may go, and look at a slice of them."""
        assert after is None or isinstance(after, tuple)
        return await self._operation(self._tables.purge_sessions, owner, idle_for, after, limit)

    async def hide_owner(self, owner: str) -> Hidden:
        """Delete all of it."""
        return await self._operation(self._tables.erase, owner)

    async def drop_hidden(self, limit: int) -> bool:
        """Nothing: it is gone already."""
        return await self._operation(bool)

    async def flush_hidden(self, *, rewrite: bool) -> bool:
        """Nothing: there is no file."""
        return not await self._operation(bool)

    async def page_of_session_ids(self, owner: str, after: str, limit: int) -> tuple[str, ...]:
        """The next ids in order."""
        return await self._operation(self._tables.sessions.page_of_session_ids, owner, after, limit)

    async def read_session(self, key: Key) -> Stored | None:
        """The stored snapshot itself."""
        return await self._operation(self._tables.sessions.read, key)

    async def read_journal(self, turn_id: int) -> tuple[Entry, ...]:
        """What is kept of the turn."""
        return await self._operation(self._tables.rows.read_journal, turn_id)

    async def page_of_processed(self, owner: str, after: tuple[str, str], limit: int) -> tuple[RememberedId, ...]:
        """The next ids in order."""
        return await self._operation(self._tables.page_of_processed, owner, after, limit)

    async def page_of_set_aside(self, owner: str, after: int, limit: int) -> tuple[TakenOut, ...]:
        """Nothing: nothing was ever taken out."""
        return await self._operation(tuple[TakenOut, ...])

    async def examine(self, after: object | None) -> Part[Fault]:
        """Nothing: what is kept are frozen objects, which only the rules have made, and nobody can damage."""
        return await self._operation(Part[Fault], (), None)

    async def mend(self, after: object | None) -> Part[Repair]:
        """Nothing, as there is nothing to find."""
        return await self._operation(Part[Repair], (), None)

    async def close(self) -> None:
        """Drop everything."""
        await yield_once()
        with self._lock:
            self._closed = True
            self._tables.clear()
        self._line.wake_all()

    def abandon(self) -> bool:
        """Nothing is held open that would outlive the object."""
        return False


# Where chatflow-agent's documentation imports them from.
__all__ = ["DEFAULT_DEDUP_TTL_HOURS", "SessionContext", "SessionStore"]
