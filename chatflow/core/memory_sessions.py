"""The conversations of a store in memory, and the orders and indexes in which they are found."""

from __future__ import annotations

import datetime as dt
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Iterator
from heapq import nsmallest
from itertools import count, islice

import attrs

from chatflow.core.history import EMPTY_HISTORY
from chatflow.core.messages import Message
from chatflow.core.owners import Stored
from chatflow.core.records import Key, NewSession, Page, Seen, SessionInfo, Snapshot, system_place
from chatflow.core.values import EMPTY, FrozenDict


@attrs.define(eq=False)
class Conversation:
    """A stored conversation, and which of its messages were answered."""

    key: Key
    snapshot: Snapshot
    created_at: dt.datetime
    updated_at: dt.datetime
    answered: set[str] = attrs.field(factory=set[str])
    service_place: tuple[str, str] | None = None
    """Where it stands in the index of services' ids."""


def is_over(session: Conversation, now: dt.datetime) -> bool:
    """Whether its own time without a commit is over."""
    return is_idle(session, session.snapshot.expires_after, now)


def is_idle(session: Conversation, seconds: float | None, now: dt.datetime) -> bool:
    """Whether it had no commit for so long."""
    return seconds is not None and now - session.updated_at >= dt.timedelta(seconds=seconds)


class MemorySessions:
    """All conversations of one store."""

    def __init__(self, clock: Callable[[], dt.datetime]) -> None:
        self._clock = clock
        self._sessions: dict[Key, Conversation] = {}
        self._by_version: OrderedDict[int, Conversation] = OrderedDict()
        self._by_service: dict[tuple[str, str], dict[Key, Conversation]] = {}
        self._expiring: dict[Key, Conversation] = {}
        self._session_keys = count(1)
        self._versions = count(1)

    def clear(self) -> None:
        """Forget everything."""
        self._sessions.clear()
        self._by_version.clear()
        self._by_service.clear()
        self._expiring.clear()

    def find(self, key: Key) -> Conversation | None:
        """By its key."""
        return self._sessions.get(key)

    def of(self, key: Key) -> Conversation:
        """The one of that key, which is there."""
        return self._sessions[key]

    def keys_of(self, owner: str) -> Iterator[Key]:
        """The keys of all of an owner's."""
        return (key for key in self._sessions if key.owner == owner)

    def load(self, key: Key, known: Snapshot | None) -> Snapshot | Seen:
        """The stored snapshot itself: frozen, so that nobody can change it."""
        session = self._sessions.get(key)
        if session is None:
            return Seen.ABSENT
        return Seen.UNCHANGED if session.snapshot.same_as(known) else session.snapshot

    def create(self, key: Key, new: NewSession) -> Snapshot:
        """Create the conversation, or merge its metadata."""
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
                service=new.service,
                expires_after=new.expires_after,
            )
            session = self._sessions[key] = Conversation(key, snapshot, now, now)
        elif new.metadata:
            metadata = FrozenDict({**session.snapshot.metadata, **new.metadata})
            session.snapshot = attrs.evolve(session.snapshot, metadata=metadata)
        else:
            return session.snapshot
        return self.renew(session, session.snapshot)

    def keep(self, key: Key, snapshot: Snapshot) -> Snapshot:
        """Add a conversation that is like *snapshot*; there is none of that key."""
        now = self._clock()
        kept = attrs.evolve(snapshot, session_key=next(self._session_keys))
        session = self._sessions[key] = Conversation(key, kept, now, now)
        return self.renew(session, kept)

    def renew(self, session: Conversation, snapshot: Snapshot) -> Snapshot:
        """Make *snapshot* the conversation, with a version above all others."""
        self._by_version.pop(session.snapshot.version, None)
        session.snapshot = attrs.evolve(snapshot, version=next(self._versions))
        session.updated_at = self._clock()
        self._by_version[session.snapshot.version] = session
        if snapshot.expires_after is not None:
            self._expiring[session.key] = session
        service = snapshot.service
        key = None if service is None else service.key
        self._note_service(session, None if key is None else (session.key.owner, key))
        return session.snapshot

    def _note_service(self, session: Conversation, place: tuple[str, str] | None) -> None:
        before, session.service_place = session.service_place, place
        if before is not None and before != place:
            del self._by_service[before][session.key]
            if not self._by_service[before]:
                del self._by_service[before]
        if place is not None:
            self._by_service.setdefault(place, {})[session.key] = session

    def find_service_session(self, owner: str, service_key: str, agent_names: frozenset[str]) -> Key | None:
        """The newest of those that hold the id."""
        found = [
            session
            for session in self._by_service.get((owner, service_key), {}).values()
            if session.snapshot.service is not None and session.snapshot.service.is_for(agent_names)
        ]
        return max(found, key=lambda session: session.snapshot.version).key if found else None

    def remove(self, session: Conversation) -> None:
        """Forget one."""
        del self._sessions[session.key]
        del self._by_version[session.snapshot.version]
        self._expiring.pop(session.key, None)
        self._note_service(session, None)

    def left_alone(self, owner: str | None, idle_for: float | None, now: dt.datetime) -> Iterator[Conversation]:
        """Those that may go; some twice."""
        for session in self._expiring.values():
            if owner in {None, session.key.owner} and is_over(session, now):
                yield session
        for session in self._by_version.values() if idle_for is not None else ():
            if owner in {None, session.key.owner}:
                if session.updated_at <= now and not is_idle(session, idle_for, now):
                    return
                yield session

    def page_of_session_ids(self, owner: str, after: str, limit: int) -> tuple[str, ...]:
        """The next ids in order."""
        found = (key.session_id for key in self._sessions if key.owner == owner and key.session_id > after)
        return tuple(nsmallest(limit, found))

    def read(self, key: Key) -> Stored | None:
        """The conversation and its times."""
        session = self._sessions.get(key)
        if session is None:
            return None
        return Stored(snapshot=session.snapshot, created_at=session.created_at, updated_at=session.updated_at)

    def page_of_sessions(self, owner: str | None, limit: int, after: int | None) -> Page[SessionInfo]:
        """Newest version first."""
        newest_first = (
            session
            for version, session in reversed(self._by_version.items())
            if owner in {None, session.key.owner} and (after is None or version < after)
        )
        found = list(islice(newest_first, limit + 1))
        items = tuple(
            SessionInfo(
                session_id=session.key.session_id,
                active_agent_name=session.snapshot.agent_name,
                metadata=session.snapshot.metadata,
                created_at=session.created_at,
                updated_at=session.updated_at,
                owner=session.key.owner,
            )
            for session in found[:limit]
        )
        return Page(items, found[limit - 1].snapshot.version if len(found) > limit else None)

    def page_of_messages(self, key: Key, limit: int, before: int | None) -> Page[Message] | None:
        """A slice of the history."""
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
