"""SQLiteSessionStore: conversations in an SQLite file; each primitive is one operation of `operations`."""

from __future__ import annotations

import datetime as dt
import os
from collections.abc import Callable
from functools import partial
from typing import Any, Final, TypeVar

from chatflow.core.codec import entry_to_json, response_to_json, values_to_json
from chatflow.core.journal import Entry
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
from chatflow.core.session import DEFAULT_MAX_TURNS
from chatflow.core.shared import DatabaseStore
from chatflow.core.store import DEFAULT_DEDUP_TTL_HOURS
from chatflow.sqlite import erasing, exporting, operations, turns
from chatflow.sqlite.commit import WriteCommit, texts_of
from chatflow.sqlite.database import Database, open_database, release_database
from chatflow.sqlite.examination import Progress, examine_next
from chatflow.sqlite.location import locate
from chatflow.sqlite.mending import mend_next
from chatflow.sqlite.retention import PurgeProgress, purge_sessions
from chatflow.sqlite.schema import LIFECYCLE
from chatflow.sqlite.turns import At

_T = TypeVar("_T")

_LAST_VERSION: Final = 2**63 - 1


class SQLiteSessionStore(DatabaseStore[Database]):
    """Conversations in an SQLite file, or in memory.

    *db_path* is a file, whose folders are created, or an address: ``":memory:"`` is a database of this store's own;
    ``"file::memory:?cache=shared"`` and ``"file:NAME?mode=memory&cache=shared"`` are shared by all stores of the
    process, and gone when the last one is closed. In memory operations run on the event loop; a file has two worker
    threads, shared by all stores of the process on it. A file lives on a local file system.

    ``"file:NAME?mode=ro"`` only reads a file that is there, beside whoever writes to it: nothing in it changes, and
    what would change it is a `StoreError`. (The two files that SQLite keeps beside it may be made, and stay, empty.)

    Raises:
        ValueError: *default_max_turns* below 1, *dedup_ttl_hours* not above 0, or an empty path.
        TypeError: One of them is of a wrong type.
    """

    def __init__(
        self,
        db_path: str | os.PathLike[str] = "chatflow.db",
        default_max_turns: int = DEFAULT_MAX_TURNS,
        dedup_ttl_hours: float = DEFAULT_DEDUP_TTL_HOURS,
    ) -> None:
        location = locate(db_path)
        super().__init__(default_max_turns, dedup_ttl_hours)
        self._location = location

    @property
    def name(self) -> str:
        """Its path as it was given."""
        return self._location.name

    def _open(self) -> Database:
        return open_database(self._location, LIFECYCLE)

    def _release(self, database: Database) -> bool:
        return release_database(database)

    async def _close(self, database: Database) -> None:
        await database.close()

    async def _let_go(self, held: tuple[Leaving, ...], database: Database) -> None:
        await database.write(partial(turns.let_go, held, self._at_in(database)), durable=False)

    async def _write(self, operation: Callable[..., _T], *args: Any, durable: bool = True, urgent: bool = False) -> _T:
        return await self._in_use().write(partial(operation, *args), durable=durable, urgent=urgent)

    async def _read(self, operation: Callable[..., _T], *args: Any) -> _T:
        return await self._in_use().read(partial(operation, *args))

    def _expired_before(self) -> str:
        return operations.text_of(self.clock() - dt.timedelta(hours=self.dedup_ttl_hours))

    # --- conversations ---

    async def load_session(self, key: Key, known: Snapshot | None) -> Snapshot | Seen:
        """Read on the reading thread."""
        return await self._read(operations.load, key, known)

    async def create_session(self, key: Key, new: NewSession) -> Snapshot:
        """Insert, or merge the metadata."""
        return await self._write(operations.create, key, new, operations.text_of(self.clock()))

    async def delete_session(self, key: Key) -> tuple[int, ...] | None:
        """Delete; the messages and turns cascade."""
        return await self._write(operations.delete, key)

    async def delete_sessions(self, owner: str, after: int | None, limit: int) -> tuple[int | None, tuple[int, ...]]:
        """Delete a slice."""
        return await self._write(operations.delete_slice, owner, after or 0, limit)

    async def page_of_sessions(self, owner: str | None, limit: int, after: int | None) -> Page[SessionInfo]:
        """Read a page by version."""
        return await self._read(operations.page_of_sessions, owner, limit, _LAST_VERSION if after is None else after)

    async def find_service_session(self, owner: str, service_key: str, agent_names: frozenset[str]) -> Key | None:
        """By an index."""
        return await self._read(operations.find_service_session, owner, service_key, agent_names)

    async def page_of_messages(self, key: Key, limit: int, before: int | None) -> Page[Message] | None:
        """Read a page by place."""
        return await self._read(operations.page_of_messages, key, limit, _LAST_VERSION if before is None else before)

    # --- turns ---

    def _at(self) -> At:
        return self._at_in(self._database)

    def _at_in(self, database: Database) -> At:
        return At(database.holder, operations.text_of(self.clock()), dt.timedelta(hours=self.dedup_ttl_hours))

    async def queue_turn(self, ticket: Ticket) -> Place | Answered | InProgress | Dead | Cycle | Lost:
        """Look the claim up, insert the row or take the message's own, start what may run."""
        return await self._write(turns.queue, ticket, self._at(), durable=False)

    async def start_turn(
        self, turn_id: int, attempt: int, key: Key, known: Snapshot | None, max_attempts: int | None
    ) -> Place | Dead | Lost:
        """Start what may run."""
        return await self._write(turns.start, turn_id, attempt, key, known, max_attempts, self._at(), durable=False)

    async def accept_turn(self, ticket: Ticket) -> Accepted | Answered | Dead:
        """Store the work."""
        return await self._write(turns.accept, ticket, self._at())

    async def commit_turn(self, commit: Commit, key: Key) -> Committed | Lost:
        """Write the difference."""
        # Encoded before it is queued: an error here has changed nothing, and the writing thread only writes.
        state = None if commit.state is None else values_to_json(commit.state)
        spent = None if commit.spent is None else values_to_json(commit.spent)
        response = None if commit.response is None else response_to_json(commit.response)
        write = WriteCommit(
            commit=commit,
            key=key,
            system_texts=texts_of(commit.systems),
            body_texts=texts_of(commit.bodies),
            state_json=state,
            spent_json=spent,
            response_json=response,
            purged=0 if commit.claim is None else self._purging.due(),
            at=self._at(),
        )
        return await self._write(write, urgent=True)

    async def leave_turn(self, leaving: Leaving) -> Left:
        """Change or delete the row."""
        return await self._write(turns.leave, leaving, self._at(), durable=False)

    async def look_at_turn(self, turn_id: int, attempt: int, key: Key, known: Snapshot | None) -> Lost | None:
        """Read the row."""
        return await self._read(turns.look, turn_id, attempt, key, known, self._at())

    async def is_held(self, turn_id: int) -> bool:
        """Read the row."""
        return await self._read(turns.is_held, turn_id, self._at())

    async def write_journal(
        self, turn_id: int, attempt: int, entry: Entry, key: Key, known: Snapshot | None, *, durable: bool
    ) -> Lost | None:
        """Insert a line."""
        text = entry_to_json(entry)
        return await self._write(turns.write_journal, turn_id, attempt, text, key, known, self._at(), durable=durable)

    async def beat_turns(self, held: frozenset[int], watched: frozenset[int], *, everything: bool) -> Beaten:
        """Update the beats, and read others'."""
        return await self._write(turns.beat, held, watched, everything, self._at(), durable=False)

    async def interrupt_turn(self, beat: Beat) -> bool:
        """Change the row, if its beat is the same."""
        return await self._write(turns.interrupt, beat, self._at(), durable=False)

    async def take_work(self, agent_name: str, lease_seconds: float, limit: int, *, answers: bool) -> tuple[Work, ...]:
        """Look first, since there is mostly nothing, and then take."""
        if not await self._read(turns.is_work_at_hand, agent_name, answers):
            return ()
        return await self._write(turns.take_work, agent_name, lease_seconds, limit, answers, self._at(), durable=False)

    async def is_next_to_tell(self, turn_id: int, attempt: int) -> bool | None:
        """Read those before it."""
        return await self._read(turns.is_next_to_tell, turn_id, attempt, self._at())

    async def end_answered(self, turn_id: int, attempt: int) -> None:
        """Delete the row."""
        await self._write(turns.end_answered, turn_id, attempt, self._at(), durable=False)

    async def page_of_turns(self, owner: str | None, after: int, limit: int) -> tuple[PendingTurn, ...]:
        """Read a page by id."""
        return await self._read(turns.page, owner, after, limit, self._at())

    # --- message ids ---

    async def is_processed(self, scope: Key, message_id: str) -> bool:
        """Look the id up."""
        return await self._read(operations.find_processed, scope, message_id, self._expired_before()) is not None

    async def mark_processed(self, scope: Key, message_id: str) -> bool:
        """Claim the id."""
        return await self._write(
            operations.mark,
            scope,
            message_id,
            None,
            None,
            operations.text_of(self.clock()),
            self._expired_before(),
            self._purging.due(),
        )

    async def purge_processed(self, limit: int) -> int:
        """Delete a slice."""
        return await self._write(operations.purge, limit, self._expired_before(), durable=False)

    # --- whole owners ---

    async def purge_sessions(
        self, owner: str | None, idle_for: float | None, after: object | None, limit: int
    ) -> Purged:
        """Read a slice in the order of moments or of commits, and delete what may go."""
        assert after is None or isinstance(after, PurgeProgress)
        moment = self.clock()
        now = operations.text_of(moment)
        idle_before = None if idle_for is None else operations.text_of(moment - dt.timedelta(seconds=idle_for))
        return await self._write(purge_sessions, owner, idle_before, now, after or PurgeProgress(), limit)

    async def hide_owner(self, owner: str) -> Hidden:
        """Delete the turns, and rename the rest."""
        return await self._write(erasing.hide_owner, owner)

    async def drop_hidden(self, limit: int) -> bool:
        """Look first, since there is mostly nothing, and then delete."""
        return await self._read(erasing.is_anything_noted) and await self._write(erasing.drop_hidden, limit)

    async def flush_hidden(self, *, rewrite: bool) -> bool:
        """Write the log into the file, and empty it."""
        dropped = await self._read(erasing.dropped)
        if not dropped and not rewrite:
            return True
        flushed = await self._in_use().flush(rewrite=rewrite)
        if flushed and dropped:
            await self._write(erasing.forget, dropped, durable=False)
        return flushed

    async def page_of_session_ids(self, owner: str, after: str, limit: int) -> tuple[str, ...]:
        """Read a page by id."""
        return await self._read(exporting.page_of_session_ids, owner, after, limit)

    async def read_session(self, key: Key) -> Stored | None:
        """Read it whole."""
        return await self._read(exporting.read_session, key)

    async def read_journal(self, turn_id: int) -> tuple[Entry, ...]:
        """Read its lines."""
        return await self._read(exporting.read_journal, turn_id)

    async def page_of_processed(self, owner: str, after: tuple[str, str], limit: int) -> tuple[RememberedId, ...]:
        """Read a page by id."""
        return await self._read(exporting.page_of_processed, owner, after, limit)

    async def page_of_set_aside(self, owner: str, after: int, limit: int) -> tuple[TakenOut, ...]:
        """Read a page by number."""
        return await self._read(exporting.page_of_set_aside, owner, after, limit)

    # --- damage ---

    async def examine(self, after: object | None) -> Part[Fault]:
        """Read a slice on the reading thread."""
        assert after is None or isinstance(after, Progress)
        return await examine_next(self._in_use(), after)

    async def mend(self, after: object | None) -> Part[Repair]:
        """Read a slice, and write what it needs, an operation for each conversation."""
        assert after is None or isinstance(after, Progress)
        return await mend_next(self._in_use(), after, operations.text_of(self.clock()))
