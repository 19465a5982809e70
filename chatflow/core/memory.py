"""SessionStore: conversations in memory, gone with the process. The same rules as on disk; only the storage differs."""

from __future__ import annotations

import datetime as dt
import threading
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable
from itertools import chain, count, islice
from typing import Any, Final, TypeVar

import attrs
from anyio.lowlevel import checkpoint as yield_once

from chatflow.core import lines
from chatflow.core.history import EMPTY_HISTORY
from chatflow.core.journal import Entry
from chatflow.core.line import Line
from chatflow.core.memory_rows import MemoryRows
from chatflow.core.messages import AgentResponse, Message
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
    system_place,
)
from chatflow.core.rows import WAITING, Row, State, taken
from chatflow.core.session import DEFAULT_MAX_TURNS, SessionContext
from chatflow.core.store import DEFAULT_DEDUP_TTL_HOURS, BaseSessionStore
from chatflow.core.values import EMPTY, FrozenDict
from chatflow.core.working import merged
from chatflow.exceptions import StoreClosedError

_T = TypeVar("_T")

_PURGED_WITH_EACH_MARK: Final = 10


@attrs.define(eq=False)
class _Session:
    key: Key
    snapshot: Snapshot
    created_at: dt.datetime
    updated_at: dt.datetime
    answered: set[str] = attrs.field(factory=set[str])


@attrs.frozen
class _Processed:
    at: dt.datetime
    digest: str | None
    response: AgentResponse | None


def _utc_now() -> dt.datetime:
    return dt.datetime.now(dt.UTC)


class SessionStore(BaseSessionStore):
    """Conversations in memory: for tests, tools and services whose conversations may end with the process.

    Raises:
        ValueError: *default_max_turns* below 1, or *dedup_ttl_hours* not above 0.
        TypeError: One of them is not a number.
    """

    def __init__(
        self, default_max_turns: int = DEFAULT_MAX_TURNS, dedup_ttl_hours: float = DEFAULT_DEDUP_TTL_HOURS
    ) -> None:
        super().__init__(default_max_turns, dedup_ttl_hours)
        self._clock: Callable[[], dt.datetime] = _utc_now
        self._lock = threading.Lock()
        self._line = Line()
        self._closed = False
        self._sessions: dict[Key, _Session] = {}
        self._by_version: OrderedDict[int, _Session] = OrderedDict()
        self._rows = MemoryRows(self._now)
        self._processed: OrderedDict[tuple[Key, str], _Processed] = OrderedDict()
        self._session_keys = count(1)
        self._versions = count(1)

    def _now(self) -> dt.datetime:
        return self._clock()

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

    async def load_session(self, key: Key, known: Snapshot | None) -> Snapshot | Seen:
        """The stored snapshot itself: frozen, so that nobody can change it."""
        return await self._operation(self._load, key, known)

    def _load(self, key: Key, known: Snapshot | None) -> Snapshot | Seen:
        session = self._sessions.get(key)
        if session is None:
            return Seen.ABSENT
        return Seen.UNCHANGED if session.snapshot.same_as(known) else session.snapshot

    async def create_session(self, key: Key, new: NewSession) -> Snapshot:
        """Create or merge."""
        return await self._operation(self._create, key, new)

    def _create(self, key: Key, new: NewSession) -> Snapshot:
        now = self._clock()
        session = self._sessions.get(key)
        if session is None:
            snapshot = Snapshot(
                session_key=next(self._session_keys),
                version=0,
                agent_name=new.agent_name,
                metadata=new.metadata,
                state=EMPTY,
                max_turns=new.max_turns,
                history=EMPTY_HISTORY,
                start=0,
                system_start=0,
            )
            session = self._sessions[key] = _Session(key, snapshot, now, now)
        elif new.metadata:
            metadata = FrozenDict({**session.snapshot.metadata, **new.metadata})
            session.snapshot = attrs.evolve(session.snapshot, metadata=metadata)
        else:
            return session.snapshot
        return self._renew(session, session.snapshot)

    def _renew(self, session: _Session, snapshot: Snapshot) -> Snapshot:
        self._by_version.pop(session.snapshot.version, None)
        session.snapshot = attrs.evolve(snapshot, version=next(self._versions))
        session.updated_at = self._clock()
        self._by_version[session.snapshot.version] = session
        return session.snapshot

    async def delete_session(self, key: Key) -> tuple[int, ...] | None:
        """Delete one conversation."""
        return await self._operation(self._delete, key)

    def _delete(self, key: Key) -> tuple[int, ...] | None:
        session = self._sessions.pop(key, None)
        if session is None:
            return None
        del self._by_version[session.snapshot.version]
        turns = self._rows.turn_ids(session.snapshot.session_key)
        for turn_id in turns:
            self._rows.delete(self._rows.turn(turn_id).row)
        for message_id in session.answered:
            processed = self._processed[key, message_id]
            self._processed[key, message_id] = attrs.evolve(processed, response=None)
        return turns

    async def delete_sessions(self, owner: str, after: int | None, limit: int) -> tuple[int | None, tuple[int, ...]]:
        """Delete a slice."""
        return await self._operation(self._delete_slice, owner, limit)

    def _delete_slice(self, owner: str, limit: int) -> tuple[int | None, tuple[int, ...]]:
        keys = list(islice((key for key in self._sessions if key.owner == owner), limit))
        turns = [turn for key in keys for turn in self._delete(key) or ()]
        return (0 if len(keys) == limit else None), tuple(turns)

    async def page_of_sessions(self, owner: str, limit: int, after: int | None) -> Page[SessionInfo]:
        """Newest version first."""
        return await self._operation(self._page_of_sessions, owner, limit, after)

    def _page_of_sessions(self, owner: str, limit: int, after: int | None) -> Page[SessionInfo]:
        newest_first = (
            session
            for version, session in reversed(self._by_version.items())
            if session.key.owner == owner and (after is None or version < after)
        )
        found = list(islice(newest_first, limit + 1))
        items = tuple(
            SessionInfo(
                session_id=session.key.session_id,
                active_agent_name=session.snapshot.agent_name,
                metadata=session.snapshot.metadata,
                created_at=session.created_at,
                updated_at=session.updated_at,
            )
            for session in found[:limit]
        )
        return Page(items, found[limit - 1].snapshot.version if len(found) > limit else None)

    async def page_of_messages(self, key: Key, limit: int, before: int | None) -> Page[Message] | None:
        """A slice of the history."""
        return await self._operation(self._page_of_messages, key, limit, before)

    def _page_of_messages(self, key: Key, limit: int, before: int | None) -> Page[Message] | None:
        session = self._sessions.get(key)
        if session is None:
            return None
        snapshot, history = session.snapshot, session.snapshot.history
        places = [
            *(system_place(snapshot.system_start + index) for index in range(history.system_count)),
            *range(snapshot.start, snapshot.start + history.body_length),
        ]
        end = len(places) if before is None else bisect_left(places, before)
        start = max(0, end - limit)
        return Page(history[start:end], places[start] if start else None)

    async def queue_turn(self, ticket: Ticket) -> Place | Answered | InProgress | Dead | Cycle | Lost:
        """Insert a row, or take the message's own."""
        return await self._operation(self._queue, ticket)

    def _queue(self, ticket: Ticket) -> Place | Answered | InProgress | Dead | Cycle | Lost:
        answered = self._find_answer(ticket)
        if answered is not None:
            return answered
        session = self._find_session(ticket)
        if session is None:
            return Lost.SESSION
        found = lines.queue(self._rows, session.snapshot.session_key, ticket)
        return self._place(found, session, ticket.known, ticket.max_attempts) if isinstance(found, Row) else found

    def _find_answer(self, ticket: Ticket) -> Answered | None:
        if ticket.claim is None:
            return None
        processed = self._find_processed(ticket.key, ticket.claim.message_id)
        return None if processed is None else Answered(processed.digest, processed.response)

    def _find_session(self, ticket: Ticket) -> _Session | None:
        """The conversation that the ticket means; made, if it may be."""
        session = self._sessions.get(ticket.key)
        if ticket.known is not None:
            same = session is not None and session.snapshot.session_key == ticket.known.session_key
            return session if same else None
        if session is None:
            assert ticket.new is not None
            self._create(ticket.key, ticket.new)
        return self._sessions[ticket.key]

    def _place(self, row: Row, session: _Session, known: Snapshot | None, max_attempts: int | None) -> Place | Dead:
        found = lines.start(self._rows, row, max_attempts)
        if isinstance(found, Dead):
            return found
        row, runs = found
        snapshot = session.snapshot
        return Place(
            turn_id=row.turn_id,
            running=runs is not None,
            attempt=row.attempt,
            behind_own=True,
            session=None if runs is None or snapshot.same_as(known) else snapshot,
            work=None if runs is None or runs is row else self._rows.work(self._rows.turn(runs.turn_id)),
            journal=() if runs is None else tuple(self._rows.turn(runs.turn_id).journal),
        )

    async def start_turn(
        self, turn_id: int, attempt: int, key: Key, known: Snapshot | None, max_attempts: int | None
    ) -> Place | Dead | Lost:
        """Start what may run."""
        return await self._operation(self._start, turn_id, attempt, key, known, max_attempts)

    def _start(
        self, turn_id: int, attempt: int, key: Key, known: Snapshot | None, max_attempts: int | None
    ) -> Place | Dead | Lost:
        row = self._own(turn_id, attempt)
        return self._lost(key, known) if row is None else self._place(row, self._sessions[key], known, max_attempts)

    def _own(self, turn_id: int, attempt: int) -> Row | None:
        row = self._rows.find(turn_id)
        return row if row is not None and row.is_of(self._rows.holder, attempt) else None

    def _lost(self, key: Key, known: Snapshot | None) -> Lost:
        session = self._sessions.get(key)
        gone = session is None or (known is not None and session.snapshot.session_key != known.session_key)
        return Lost.SESSION if gone else Lost.TURN

    async def accept_turn(self, ticket: Ticket) -> Accepted | Answered | Dead:
        """Insert work to be done."""
        return await self._operation(self._accept, ticket)

    def _accept(self, ticket: Ticket) -> Accepted | Answered | Dead:
        answered = self._find_answer(ticket)
        if answered is not None:
            return answered
        session = self._find_session(ticket)
        assert session is not None
        return lines.accept(self._rows, session.snapshot.session_key, ticket)

    async def commit_turn(self, commit: Commit, key: Key) -> Committed | Lost:
        """Take the snapshot."""
        return await self._operation(self._commit, commit, key)

    def _commit(self, commit: Commit, key: Key) -> Committed | Lost:
        row = self._own(commit.turn_id, commit.attempt)
        if row is None or row.state is not State.RUNNING:
            return self._lost(key, commit.snapshot)
        session = self._sessions[key]
        snapshot = session.snapshot
        if commit.changes_session:
            changes: dict[str, Any] = {**commit.metadata_set}
            metadata = merged(snapshot.metadata, changes)
            for name in commit.metadata_removed:
                metadata.pop(name, None)
            snapshot = self._renew(session, attrs.evolve(commit.snapshot, metadata=FrozenDict(metadata)))
        if commit.claim is not None:
            # Noted first: the mark purges, and what it purges is no longer noted.
            session.answered.add(commit.claim.message_id)
            self._mark(key, commit.claim.message_id, commit.claim.digest, commit.response)
        if row.accepted:
            holder = row.holder if commit.hands_on else None
            self._rows.write(attrs.evolve(row, state=State.ANSWERED, holder=holder))
            self._rows.drop_journal(row)
        else:
            self._rows.delete(row)
        return Committed(snapshot.version, snapshot.metadata, self._rows.next_of(row.session_key), row.accepted)

    async def leave_turn(self, leaving: Leaving) -> Left:
        """Change or delete the row."""
        return await self._operation(self._leave, leaving)

    def _leave(self, leaving: Leaving) -> Left:
        row = self._rows.find(leaving.turn_id)
        if row is None:
            return Left(None, None)
        left = lines.leave(self._rows, leaving)
        return Left(None if left is None else left.state, self._rows.next_of(row.session_key))

    async def look_at_turn(self, turn_id: int, attempt: int, key: Key, known: Snapshot | None) -> Lost | None:
        """Look the row up."""
        return await self._operation(self._look, turn_id, attempt, key, known)

    def _look(self, turn_id: int, attempt: int, key: Key, known: Snapshot | None) -> Lost | None:
        row = self._own(turn_id, attempt)
        return None if row is not None and row.state is State.RUNNING else self._lost(key, known)

    async def is_held(self, turn_id: int) -> bool:
        """Look the row up."""
        row = await self._operation(self._rows.find, turn_id)
        return row is not None and row.holder is not None

    async def write_journal(
        self, turn_id: int, attempt: int, entry: Entry, key: Key, known: Snapshot | None, *, durable: bool
    ) -> Lost | None:
        """Keep the entry."""
        return await self._operation(self._note, turn_id, attempt, entry, key, known)

    def _note(self, turn_id: int, attempt: int, entry: Entry, key: Key, known: Snapshot | None) -> Lost | None:
        lost = self._look(turn_id, attempt, key, known)
        if lost is None:
            self._rows.turn(turn_id).journal.append(entry)
        return lost

    async def beat_turns(self, held: frozenset[int], watched: frozenset[int], *, everything: bool) -> Beaten:
        """Count, and read the others' counts."""
        return await self._operation(self._beat, held, watched, everything)

    def _beat(self, held: frozenset[int], watched: frozenset[int], everything: bool) -> Beaten:
        own: dict[int, int] = {}
        lines_watched: set[int] = set()
        for turn in self._rows:
            row = turn.row
            if row.turn_id in held and row.holder is not None:
                turn.beat += 1
                own[row.turn_id] = row.attempt
                if row.state is State.QUEUED:
                    lines_watched.add(row.session_key)
        others = tuple(
            Beat(
                turn_id=turn.row.turn_id,
                attempt=turn.row.attempt,
                beat=turn.beat,
                lease_seconds=turn.lease_seconds,
            )
            for turn in self._rows
            if turn.row.holder is not None
            and turn.row.turn_id not in own
            and (everything or turn.row.turn_id in watched or turn.row.session_key in lines_watched)
        )
        return Beaten(own=own, others=others)

    async def interrupt_turn(self, beat: Beat) -> bool:
        """Change the row, if its beat is the same."""
        return await self._operation(lines.interrupt_silent, self._rows, beat)

    async def take_work(self, agent_name: str, limit: int) -> tuple[Work, ...]:
        """Take answers to hand on, then work to do."""
        return await self._operation(self._take, agent_name, limit)

    def _take(self, agent_name: str, limit: int) -> tuple[Work, ...]:
        at_hand = [turn for turn in self._rows if turn.row.holder is None and turn.row.agent_name == agent_name]
        answers = [turn for turn in at_hand if turn.row.state is State.ANSWERED]
        todo = (turn for turn in at_hand if turn.row.state in WAITING and lines.first_to_take(self._rows, turn.row))
        found: list[Work] = []
        for turn in islice(chain(answers, todo), limit):
            row, answer = turn.row, None
            if row.state is State.ANSWERED:
                assert row.message_id is not None
                # Also one that has expired in the meantime, as long as it is there.
                processed = self._processed.get((turn.key, row.message_id))
                answer = None if processed is None else processed.response
                if answer is None:
                    self._rows.delete(row)
                    continue
                self._rows.write(attrs.evolve(row, holder=self._rows.holder, attempt=row.attempt + 1))
            else:
                self._rows.write(taken(row, self._rows.holder))
            found.append(attrs.evolve(self._rows.work(turn), response=answer))
        return tuple(found)

    async def end_answered(self, turn_id: int, attempt: int) -> None:
        """Drop the row."""
        await self._operation(self._end_answered, turn_id, attempt)

    def _end_answered(self, turn_id: int, attempt: int) -> None:
        row = self._own(turn_id, attempt)
        if row is not None:
            self._rows.delete(row)

    async def page_of_turns(self, owner: str, after: int, limit: int) -> tuple[PendingTurn, ...]:
        """A slice of the rows."""
        return await self._operation(self._page_of_turns, owner, after, limit)

    def _page_of_turns(self, owner: str, after: int, limit: int) -> tuple[PendingTurn, ...]:
        found = (
            turn
            for turn in self._rows
            if turn.row.turn_id > after and turn.key.owner == owner and turn.row.state is not State.ANSWERED
        )
        return tuple(self._rows.pending(turn) for turn in islice(found, limit))

    def _find_processed(self, scope: Key, message_id: str) -> _Processed | None:
        processed = self._processed.get((scope, message_id))
        return None if processed is None or processed.at < self._expired_before() else processed

    def _expired_before(self) -> dt.datetime:
        return self._clock() - dt.timedelta(hours=self.dedup_ttl_hours)

    def _mark(self, scope: Key, message_id: str, digest: str | None, response: AgentResponse | None) -> None:
        self._processed[scope, message_id] = _Processed(self._clock(), digest, response)
        self._processed.move_to_end((scope, message_id))
        self._purge(_PURGED_WITH_EACH_MARK)

    async def is_processed(self, scope: Key, message_id: str) -> bool:
        """Look the id up."""
        return await self._operation(self._find_processed, scope, message_id) is not None

    async def mark_processed(self, scope: Key, message_id: str) -> bool:
        """Mark the id."""
        return await self._operation(self._mark_new, scope, message_id)

    def _mark_new(self, scope: Key, message_id: str) -> bool:
        if self._find_processed(scope, message_id) is not None:
            return False
        self._mark(scope, message_id, None, None)
        return True

    async def purge_processed(self, limit: int) -> int:
        """Drop the oldest."""
        return await self._operation(self._purge, limit)

    def _purge(self, limit: int) -> int:
        expired_before = self._expired_before()
        self._rows.purge(expired_before, limit)
        oldest = islice(self._processed.items(), limit)
        expired = [place for place, processed in oldest if processed.at < expired_before]
        for scope, message_id in expired:
            del self._processed[scope, message_id]
            session = self._sessions.get(scope)
            if session is not None:
                session.answered.discard(message_id)
        return len(expired)

    async def close(self) -> None:
        """Drop everything."""
        await yield_once()
        with self._lock:
            self._closed = True
            self._sessions.clear()
            self._by_version.clear()
            self._rows.clear()
            self._processed.clear()
        self._line.wake_all()

    def abandon(self) -> bool:
        """Nothing is held open that would outlive the object."""
        return False


# Where chatflow-agent's documentation imports them from.
__all__ = ["DEFAULT_DEDUP_TTL_HOURS", "SessionContext", "SessionStore"]
