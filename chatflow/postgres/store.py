"""PostgresSessionStore: conversations in a PostgreSQL database; each primitive is one operation."""

from __future__ import annotations

import datetime as dt
from contextlib import suppress
from functools import partial
from typing import Final

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
from chatflow.exceptions import StoreError
from chatflow.postgres import erasing, exporting, operations, statements, turns
from chatflow.postgres.commit import WriteCommit
from chatflow.postgres.connection import locate
from chatflow.postgres.copying import take_up
from chatflow.postgres.database import Database, open_database, release_database
from chatflow.postgres.examination import Progress, examine_next
from chatflow.postgres.mending import mend_next
from chatflow.postgres.retention import PurgeProgress, purge_sessions
from chatflow.postgres.room import refuse_long, refuse_long_ticket
from chatflow.postgres.turns import At

_LAST_VERSION: Final = 2**63 - 1


class PostgresSessionStore(DatabaseStore[Database]):
    """Conversations in a PostgreSQL database, for any number of processes on any number of machines.

    *dsn* is an address such as ``"postgresql://user:password@host/database"``, or in libpq's other form. The tables
    stand in *schema*, both are made with the first operation. At most *max_connections* connections are open, shared by
    all stores of this process with the same address, and none is in use while a model or a tool runs. PgBouncer may
    stand between, also in transaction mode.

    An owner, a session id, a message id or an agent's name that the server's indexes have no room for is an
    `UnstorableValueError`, before a turn begins.

    Raises:
        ValueError: *default_max_turns* or *max_connections* below 1, *dedup_ttl_hours* not above 0, a *dsn* that can't
            be read, or a *schema* that can't be a name.
        TypeError: One of them is of a wrong type.
    """

    def __init__(
        self,
        dsn: str,
        default_max_turns: int = DEFAULT_MAX_TURNS,
        dedup_ttl_hours: float = DEFAULT_DEDUP_TTL_HOURS,
        *,
        schema: str = "chatflow",
        max_connections: int = 10,
    ) -> None:
        address = locate(dsn, schema)
        if not isinstance(max_connections, int) or isinstance(max_connections, bool):
            raise TypeError(f"max_connections must be an integer, not {max_connections!r}")
        if max_connections < 1:
            raise ValueError(f"max_connections must be at least 1, not {max_connections}")
        super().__init__(default_max_turns, dedup_ttl_hours)
        self._address = address
        self._max_connections = max_connections

    @property
    def name(self) -> str:
        """Its address, without the password."""
        return self._address.name

    def _open(self) -> Database:
        return open_database(self._address, self._max_connections, partial(take_up, self._address.name))

    def _release(self, database: Database) -> bool:
        return release_database(database)

    async def _close(self, database: Database) -> None:
        await database.close(lambda transaction: turns.release([database.holder], database.holder, transaction))

    async def _let_go(self, held: tuple[Leaving, ...], database: Database) -> None:
        at = self._at_of(database)
        await database.write(lambda transaction: turns.let_go(held, at, transaction), flushed=False)

    def _expired_before(self) -> dt.datetime:
        return self.clock() - dt.timedelta(hours=self.dedup_ttl_hours)

    def _at_of(self, database: Database) -> At:
        return At(database.holder, self.clock(), self._expired_before(), self._address.schema)

    def _at(self) -> At:
        return self._at_of(self._in_use())

    async def _purge_now_and_then(self) -> None:
        purged = self._purging.due()
        if purged:
            # The commit or the mark holds, whatever comes of this.
            with suppress(StoreError):
                await self.purge_processed(purged)

    # --- conversations ---

    async def load_session(self, key: Key, known: Snapshot | None) -> Snapshot | Seen:
        """Look whether it is as known, and read it where not."""
        return await operations.load(key, known, self._in_use())

    async def create_session(self, key: Key, new: NewSession) -> Snapshot:
        """Insert, or merge the metadata."""
        await refuse_long(self._in_use(), key)
        return await self._in_use().write(partial(operations.create, key, new, self.clock()))

    async def delete_session(self, key: Key) -> tuple[int, ...] | None:
        """Delete; the messages and turns cascade."""
        return await self._in_use().write(partial(operations.delete, key))

    async def delete_sessions(self, owner: str, after: int | None, limit: int) -> tuple[int | None, tuple[int, ...]]:
        """Delete a slice."""
        return await self._in_use().write(partial(operations.delete_slice, owner, after or 0, limit))

    async def page_of_sessions(self, owner: str | None, limit: int, after: int | None) -> Page[SessionInfo]:
        """Read a page by version."""
        before = _LAST_VERSION if after is None else after
        return await operations.page_of_sessions(owner, limit, before, self._in_use())

    async def find_service_session(self, owner: str, service_key: str, agent_names: frozenset[str]) -> Key | None:
        """By an index."""
        return await operations.find_service_session(owner, service_key, agent_names, self._in_use())

    async def page_of_messages(self, key: Key, limit: int, before: int | None) -> Page[Message] | None:
        """Read a page by place."""
        last = _LAST_VERSION if before is None else before
        return await operations.page_of_messages(key, limit, last, self._in_use())

    # --- turns ---

    async def queue_turn(self, ticket: Ticket) -> Place | Answered | InProgress | Dead | Cycle | Lost:
        """Insert the row where nothing is before it; else look, insert or take, and start what may run."""
        database = self._in_use()
        await refuse_long_ticket(database, ticket)
        async with database.gates.through(ticket.key):
            return await turns.queue(ticket, self._at(), database)

    async def start_turn(
        self, turn_id: int, attempt: int, key: Key, known: Snapshot | None, max_attempts: int | None
    ) -> Place | Dead | Lost:
        """Start what may run."""
        database, at = self._in_use(), self._at()
        async with database.gates.through(key):
            return await database.write(
                lambda transaction: turns.start(turn_id, attempt, key, known, max_attempts, at, transaction),
                flushed=False,
            )

    async def accept_turn(self, ticket: Ticket) -> Accepted | Answered | Dead:
        """Store the work."""
        database = self._in_use()
        await refuse_long_ticket(database, ticket)
        async with database.gates.through(ticket.key):
            return await database.write(partial(turns.accept, ticket, self._at()))

    async def commit_turn(self, commit: Commit, key: Key) -> Committed | Lost:
        """Write the difference."""
        write = WriteCommit.of(commit, key, self._at())
        outcome = await write.write(self._in_use())
        if commit.claim is not None and isinstance(outcome, Committed):
            await self._purge_now_and_then()
        return outcome

    async def leave_turn(self, leaving: Leaving) -> Left:
        """Change or delete the row."""
        return await self._in_use().write(partial(turns.leave, leaving, self._at()), flushed=False)

    async def look_at_turn(self, turn_id: int, attempt: int, key: Key, known: Snapshot | None) -> Lost | None:
        """Read the row."""
        return await self._in_use().read(partial(turns.look, turn_id, attempt, key, known, self._at()))

    async def is_held(self, turn_id: int) -> bool:
        """Read the row."""
        return await turns.is_held(turn_id, self._at(), self._in_use())

    async def write_journal(
        self, turn_id: int, attempt: int, entry: Entry, key: Key, known: Snapshot | None, *, durable: bool
    ) -> Lost | None:
        """Insert a line."""
        at, database = self._at(), self._in_use()
        return await turns.write_journal(turn_id, attempt, entry, key, known, at, database, flushed=durable)

    async def beat_turns(self, held: frozenset[int], watched: frozenset[int], *, everything: bool) -> Beaten:
        """Update the beats, and read others'."""
        return await turns.beat(held, watched, everything, self._at(), self._in_use())

    async def interrupt_turn(self, beat: Beat) -> bool:
        """Change the row, if its beat is the same."""
        return await self._in_use().write(partial(turns.interrupt, beat, self._at()), flushed=False)

    async def take_work(self, agent_name: str, lease_seconds: float, limit: int, *, answers: bool) -> tuple[Work, ...]:
        """Look first, since there is mostly nothing, and then take."""
        if not await turns.is_work_at_hand(agent_name, answers, self._in_use()):
            return ()
        operation = partial(turns.take_work, agent_name, lease_seconds, limit, answers, self._at())
        return await self._in_use().write(operation, flushed=False)

    async def is_next_to_tell(self, turn_id: int, attempt: int) -> bool | None:
        """Read those before it."""
        return await turns.is_next_to_tell(turn_id, attempt, self._at(), self._in_use())

    async def end_answered(self, turn_id: int, attempt: int) -> None:
        """Delete the row."""
        await turns.end_answered(turn_id, attempt, self._at(), self._in_use())

    async def page_of_turns(self, owner: str | None, after: int, limit: int) -> tuple[PendingTurn, ...]:
        """Read a page by id."""
        return await turns.page(owner, after, limit, self._at(), self._in_use())

    # --- message ids ---

    async def is_processed(self, scope: Key, message_id: str) -> bool:
        """Look the id up."""
        asked = {**operations.named(scope), "message_id": message_id, "expired_before": self._expired_before()}
        return bool(await self._in_use().ask(statements.READ_PROCESSED, **asked))

    async def mark_processed(self, scope: Key, message_id: str) -> bool:
        """Claim the id."""
        await refuse_long(self._in_use(), scope, message_id)
        operation = partial(operations.mark, scope, message_id, self.clock(), self._expired_before())
        marked = await self._in_use().write(operation)
        await self._purge_now_and_then()
        return marked

    async def purge_processed(self, limit: int) -> int:
        """Delete a slice."""
        return await self._in_use().write(partial(operations.purge, limit, self._expired_before()), flushed=False)

    # --- whole owners ---

    async def purge_sessions(
        self, owner: str | None, idle_for: float | None, after: object | None, limit: int
    ) -> Purged:
        """Read a slice in the order of moments or of commits, and delete what may go."""
        assert after is None or isinstance(after, PurgeProgress)
        now = self.clock()
        idle_before = None if idle_for is None else now - dt.timedelta(seconds=idle_for)
        operation = partial(purge_sessions, owner, idle_before, now, after or PurgeProgress(), limit)
        return await self._in_use().write(operation)

    async def hide_owner(self, owner: str) -> Hidden:
        """Delete the turns, and rename the rest."""
        return await self._in_use().write(partial(erasing.hide_owner, owner))

    async def drop_hidden(self, limit: int) -> bool:
        """Look first, since there is mostly nothing, and then delete."""
        if not await erasing.notes(self._in_use()):
            return False
        return await self._in_use().write(partial(erasing.drop_hidden, limit))

    async def flush_hidden(self, *, rewrite: bool) -> bool:
        """Vacuum the tables. The server's log and its archive are the server's own."""
        noted = await erasing.notes(self._in_use())
        if rewrite or any(not is_left for _, is_left in noted):
            await erasing.flush(noted, self._in_use(), rewrite=rewrite)
        return True

    async def page_of_session_ids(self, owner: str, after: str, limit: int) -> tuple[str, ...]:
        """Read a page by id."""
        return await exporting.page_of_session_ids(owner, after, limit, self._in_use())

    async def read_session(self, key: Key) -> Stored | None:
        """Read it whole."""
        return await self._in_use().read(partial(exporting.read_session, key))

    async def read_journal(self, turn_id: int) -> tuple[Entry, ...]:
        """Read its lines."""
        return await self._in_use().read(partial(exporting.read_journal, turn_id))

    async def page_of_processed(self, owner: str, after: tuple[str, str], limit: int) -> tuple[RememberedId, ...]:
        """Read a page by id."""
        return await exporting.page_of_processed(owner, after, limit, self._in_use())

    async def page_of_set_aside(self, owner: str, after: int, limit: int) -> tuple[TakenOut, ...]:
        """Read a page by number."""
        return await exporting.page_of_set_aside(owner, after, limit, self._in_use())

    # --- damage ---

    async def examine(self, after: object | None) -> Part[Fault]:
        """Read a slice."""
        assert after is None or isinstance(after, Progress)
        return await examine_next(self._in_use(), after)

    async def mend(self, after: object | None) -> Part[Repair]:
        """Read a slice, and write what it needs, an operation for each conversation."""
        assert after is None or isinstance(after, Progress)
        return await mend_next(self._in_use(), after, self.clock())
