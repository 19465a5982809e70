"""SessionStore: conversations in memory, gone with the process. The same rules as on disk; only the storage differs."""

from __future__ import annotations

import datetime as dt
import threading
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable
from itertools import count, islice
from typing import Any, Final, TypeVar

import attrs
from anyio.lowlevel import checkpoint as yield_once

from chatflow.core.history import EMPTY_HISTORY
from chatflow.core.line import Line
from chatflow.core.messages import AgentResponse, Message
from chatflow.core.records import (
    Answered,
    Claim,
    Commit,
    Committed,
    Cycle,
    InProgress,
    Key,
    Lost,
    NewSession,
    Page,
    Place,
    Seen,
    SessionInfo,
    Snapshot,
    Ticket,
    system_place,
)
from chatflow.core.repairs import Fault, Part, Repair
from chatflow.core.session import DEFAULT_MAX_TURNS, SessionContext
from chatflow.core.store import DEFAULT_DEDUP_TTL_HOURS, BaseSessionStore
from chatflow.core.values import EMPTY, FrozenDict
from chatflow.core.working import merged
from chatflow.exceptions import StoreClosedError

_T = TypeVar("_T")

_PURGED_WITH_EACH_MARK: Final = 10


@attrs.define(eq=False)
class _Turn:
    turn_id: int
    session: _Session
    claim: Claim | None
    parent: int | None
    running: bool = False
    attempt: int = 0


@attrs.define(eq=False)
class _Session:
    key: Key
    snapshot: Snapshot
    created_at: dt.datetime
    updated_at: dt.datetime
    turns: dict[int, _Turn] = attrs.field(factory=dict[int, "_Turn"])
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
        self._turns: dict[int, _Turn] = {}
        self._processed: OrderedDict[tuple[Key, str], _Processed] = OrderedDict()
        self._session_keys = count(1)
        self._versions = count(1)
        self._turn_ids = count(1)

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
        for turn_id in session.turns:
            del self._turns[turn_id]
        for message_id in session.answered:
            processed = self._processed[key, message_id]
            self._processed[key, message_id] = attrs.evolve(processed, response=None)
        return tuple(session.turns)

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

    async def queue_turn(self, ticket: Ticket) -> Place | Answered | InProgress | Cycle | Lost:
        """Insert a row."""
        return await self._operation(self._queue, ticket)

    def _queue(self, ticket: Ticket) -> Place | Answered | InProgress | Cycle | Lost:
        if ticket.claim is not None:
            processed = self._find_processed(ticket.key, ticket.claim.message_id)
            if processed is not None:
                return Answered(processed.digest, processed.response)
        session = self._sessions.get(ticket.key)
        if ticket.known is None:
            assert ticket.new is not None
            if session is None:
                self._create(ticket.key, ticket.new)
                session = self._sessions[ticket.key]
        elif session is None or session.snapshot.session_key != ticket.known.session_key:
            return Lost.SESSION
        assert session is not None
        if ticket.claim is not None:
            for turn in session.turns.values():
                if turn.claim is not None and turn.claim.message_id == ticket.claim.message_id:
                    waits = self._waits_for(session, set(ticket.ancestors))
                    return Cycle() if waits else InProgress(turn.claim.digest, turn.turn_id)
        if self._waits_for(session, set(ticket.ancestors)):
            return Cycle()
        turn = _Turn(
            next(self._turn_ids),
            session,
            ticket.claim,
            ticket.ancestors[-1] if ticket.ancestors else None,
        )
        self._turns[turn.turn_id] = session.turns[turn.turn_id] = turn
        return self._place(turn, ticket.known)

    def _waits_for(self, session: _Session, ancestors: set[int]) -> bool:
        """Whether a turn in the session's line waits, directly or through others, for one of *ancestors*."""
        seen: set[int] = set()
        waiting = list(session.turns.values()) if ancestors else []
        while waiting:
            turn = waiting.pop()
            if turn.turn_id in ancestors:
                return True
            if turn.turn_id not in seen:
                seen.add(turn.turn_id)
                waiting += [child for child in self._turns.values() if child.parent == turn.turn_id]
                waiting += [ahead for ahead in turn.session.turns.values() if ahead.turn_id < turn.turn_id]
        return False

    def _place(self, turn: _Turn, known: Snapshot | None) -> Place:
        session = turn.session
        if not turn.running and next(iter(session.turns)) == turn.turn_id:
            turn.running = True
            turn.attempt += 1
        snapshot = session.snapshot
        return Place(
            turn_id=turn.turn_id,
            running=turn.running,
            attempt=turn.attempt,
            behind_own=True,
            session=None if snapshot.same_as(known) or not turn.running else snapshot,
        )

    async def start_turn(self, turn_id: int, key: Key, known: Snapshot | None) -> Place | Lost:
        """Start a row."""
        return await self._operation(self._start, turn_id, key, known)

    def _start(self, turn_id: int, key: Key, known: Snapshot | None) -> Place | Lost:
        turn = self._turns.get(turn_id)
        return self._lost(key, known) if turn is None else self._place(turn, known)

    def _lost(self, key: Key, known: Snapshot | None) -> Lost:
        session = self._sessions.get(key)
        gone = session is None or (known is not None and session.snapshot.session_key != known.session_key)
        return Lost.SESSION if gone else Lost.TURN

    async def commit_turn(self, commit: Commit, key: Key) -> Committed | Lost:
        """Take the snapshot."""
        return await self._operation(self._commit, commit, key)

    def _commit(self, commit: Commit, key: Key) -> Committed | Lost:
        turn = self._turns.get(commit.turn_id)
        if turn is None or not turn.running or turn.attempt != commit.attempt:
            return self._lost(key, commit.snapshot)
        session = turn.session
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
        return Committed(snapshot.version, snapshot.metadata, self._remove(turn))

    def _remove(self, turn: _Turn) -> int | None:
        del self._turns[turn.turn_id]
        del turn.session.turns[turn.turn_id]
        return next(iter(turn.session.turns), None)

    async def leave_turn(self, turn_id: int) -> int | None:
        """Delete a row."""
        return await self._operation(self._leave, turn_id)

    def _leave(self, turn_id: int) -> int | None:
        turn = self._turns.get(turn_id)
        return None if turn is None else self._remove(turn)

    async def turn_exists(self, turn_id: int) -> bool:
        """Look the row up."""
        return await self._operation(self._turns.__contains__, turn_id)

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
        oldest = islice(self._processed.items(), limit)
        expired = [place for place, processed in oldest if processed.at < expired_before]
        for scope, message_id in expired:
            del self._processed[scope, message_id]
            session = self._sessions.get(scope)
            if session is not None:
                session.answered.discard(message_id)
        return len(expired)

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
            self._sessions.clear()
            self._by_version.clear()
            self._turns.clear()
            self._processed.clear()
        self._line.wake_all()

    def abandon(self) -> bool:
        """Nothing is held open that would outlive the object."""
        return False


# Where chatflow-agent's documentation imports them from.
__all__ = ["DEFAULT_DEDUP_TTL_HOURS", "SessionContext", "SessionStore"]
