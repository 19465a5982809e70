"""StoreBackend: what lies below every store: its storage, and all that is shared by the owners' stores on it.

One object with all that a process has of a storage, which is why it has many methods: each is short.
"""

from __future__ import annotations

import asyncio
import datetime as dt
import threading
import warnings
import weakref
from collections.abc import Callable, Iterable
from typing import Final

import attrs
from anyio.lowlevel import checkpoint as yield_once

from chatflow.core.agent import Agent
from chatflow.core.beats import Beats
from chatflow.core.ending import end_turns
from chatflow.core.finish import finish
from chatflow.core.live import LiveSessions
from chatflow.core.owners import Erased, Hidden, Purged
from chatflow.core.pruning import check_max_turns
from chatflow.core.records import NOTHING_SEEN, Key, NewSession, Seen, Snapshot, check_grace
from chatflow.core.repairs import Part, Repair
from chatflow.core.session import SessionContext
from chatflow.core.storage import Storage
from chatflow.core.store import AgentResolver, BaseSessionStore
from chatflow.core.turn import Turn
from chatflow.core.upkeep import SLICE

_HUNDRED_YEARS: Final = 100 * 366 * 24
"""In hours. No message is delivered again after that, and dates end at some point."""


_ERASED_AT_ONCE: Final = 100
"""Conversations whose rows one transaction erases, which writes each freed page."""


def _check_hours(hours: object) -> float:
    if not isinstance(hours, int | float) or isinstance(hours, bool):
        raise TypeError(f"dedup_ttl_hours must be a number, not {hours!r}")
    if not 0 < hours <= _HUNDRED_YEARS:
        raise ValueError(f"dedup_ttl_hours must be above 0 and at most {_HUNDRED_YEARS} (a hundred years), not {hours}")
    return float(hours)


def _utc_now() -> dt.datetime:
    return dt.datetime.now(dt.UTC)


class StoreBackend(BaseSessionStore, Storage):
    """A store with a storage of its own. What users call on it is of the conversations without an owner.

    To write a store for another storage, derive from this class and implement the primitives of `Storage`, the abstract
    methods. Live sessions, signs of life and the resolver are kept here, once for the stores of all owners.
    """

    def __init__(self, default_max_turns: int, dedup_ttl_hours: float) -> None:
        self._default_max_turns = check_max_turns(default_max_turns, "default_max_turns")
        self._dedup_ttl_hours = _check_hours(dedup_ttl_hours)
        self._is_closing = False
        self.requires_owner = False
        """Whether `require_owner` was called."""
        self.clock: Callable[[], dt.datetime] = _utc_now
        """What time it is, in UTC: a storage asks nothing else, so that a test can let time pass."""
        self._live = LiveSessions()
        self._entering: dict[tuple[asyncio.AbstractEventLoop, Key], asyncio.Future[None]] = {}
        # Kept by their loop's timer and by the turns they beat, so that they keep no loop alive themselves.
        self._beats: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, weakref.ref[Beats]] = (
            weakref.WeakKeyDictionary()
        )
        self._beats_lock = threading.Lock()
        self._resolver: AgentResolver | None = None

    @property
    def backend(self) -> StoreBackend:
        """Itself."""
        return self

    @property
    def owner(self) -> str:
        """Nobody."""
        return ""

    @property
    def default_max_turns(self) -> int:
        """How many turns a conversation without a number of its own keeps."""
        return self._default_max_turns

    @property
    def dedup_ttl_hours(self) -> float:
        """How long message ids are remembered."""
        return self._dedup_ttl_hours

    @property
    def is_closing(self) -> bool:
        """Whether `aclose` was called."""
        return self._is_closing

    # --- conversations ---

    async def get_or_create_session(self, key: Key, default_agent: Agent, new: NewSession) -> SessionContext:
        """The conversation *key*, created as *new* says, or with its metadata merged."""
        # Whoever asks first goes on first, however long it took to find or make the conversation.
        place = (asyncio.get_running_loop(), key)
        earlier = self._entering.get(place)
        mine = self._entering[place] = place[0].create_future()
        try:
            live = self._live.get(key)
            found: Snapshot | Seen = Seen.ABSENT
            if not new.metadata:
                found = await self.load_session(key, None if live is None else live.known)
            if found is Seen.ABSENT:
                found = await finish(self.create_session(key, new))
            if earlier is not None and not earlier.done():
                await asyncio.wait([earlier])
            session = self._session_of(key, found, live)
            session.answer_with(default_agent)
            return session
        finally:
            if self._entering.get(place) is mine:
                del self._entering[place]
            _end_after(earlier, mine)

    def session_at_hand(self, key: Key, default_agent: Agent) -> SessionContext | None:
        """The running loop's object of the conversation *key*, unread: its next turn will see what is stored.

        None where there is none yet, or somebody who has asked before is still waiting for one.
        """
        session = None if (asyncio.get_running_loop(), key) in self._entering else self._live.get(key)
        if session is None or session.known is None:
            return None
        session.answer_with(default_agent)
        return session

    async def session_of(self, key: Key) -> SessionContext | None:
        """The conversation *key* as the storage has it now, or None."""
        live, handed_out = self._live.get(key), self._live.all_of(key)
        found = await self.load_session(key, None if live is None else live.known)
        if found is Seen.ABSENT:
            self._forget(handed_out)
            return None
        return self._session_of(key, found, live)

    def adopt(self, session: SessionContext) -> None:
        """Hand *session*, which was made elsewhere, out from now on, unless another one of its conversation is."""
        if self._live.get(session.key) is None:
            self._live.add(session)

    def unread_session(self, key: Key) -> SessionContext:
        """A session of the conversation *key* that has seen nothing of it yet."""
        return SessionContext.of_store(self, key, NOTHING_SEEN)

    async def delete_one(self, key: Key) -> bool:
        """Delete the conversation *key*; False if there was none."""
        # Those handed out so far: one that is created anew under this id once the old one is gone is not meant.
        handed_out = self._live.all_of(key)
        turns = await self.delete_session(key)
        self._forget(handed_out)
        self.line.wake(turns or ())
        return turns is not None

    async def delete_all(self, owner: str) -> None:
        """Delete all of the owner's conversations, a slice at a time."""
        handed_out = self._live.all_of_owner(owner)
        last: int | None = None
        while True:
            last, turns = await finish(self.delete_sessions(owner, last, SLICE))
            self.line.wake(turns)
            if last is None:
                self._forget(handed_out)
                return
            await yield_once()  # where a cancellation can end it, which the slices hold off

    async def session_at_service(self, owner: str, service_key: str, agent: Agent) -> SessionContext | None:
        """The owner's conversation that holds that id of a service's, given to *agent*, to its peers, or to any."""
        agent_names = frozenset(agent.reachable())
        while True:
            key = await self.find_service_session(owner, service_key, agent_names)
            session = None if key is None else await self.session_of(key)
            service = None if session is None else session.committed.service
            # In between it may have been deleted, or got another.
            if key is None or (service is not None and service.key == service_key and service.is_for(agent_names)):
                break
        if session is not None:
            session.answer_with(agent)
        return session

    async def purge_all(self, owner: str | None, idle_for: float | None) -> int:
        """Delete what was left alone for too long, a slice at a time, and what is left of erased owners."""
        count, after = 0, None
        while True:
            purged = await finish(self._purge_slice(owner, idle_for, after))
            count, after = count + len(purged.sessions), purged.next
            if after is None:
                break
            await yield_once()  # as in delete_all()
        await self._drop_hidden(rewrite=False)
        return count

    async def _purge_slice(self, owner: str | None, idle_for: float | None, after: object | None) -> Purged:
        purged = await self.purge_sessions(owner, idle_for, after, SLICE)
        for key, session_key in purged.sessions:
            self._forget(each for each in self._live.all_of(key) if each.committed.session_key == session_key)
        self.line.wake(purged.turns)
        return purged

    async def erase(self, owner: str, *, rewrite: bool) -> Erased:
        """Hide all of an owner, then delete it, a slice at a time."""
        hidden = await finish(self._hide(owner))
        flushed = await self._drop_hidden(rewrite=rewrite)
        return attrs.evolve(hidden.counts, flushed=flushed)

    async def _hide(self, owner: str) -> Hidden:
        handed_out = self._live.all_of_owner(owner)
        hidden = await self.hide_owner(owner)
        self._forget(handed_out)
        self.line.wake(hidden.turns)
        return hidden

    async def _drop_hidden(self, *, rewrite: bool) -> bool:
        while await finish(self.drop_hidden(_ERASED_AT_ONCE)):
            await yield_once()  # as in delete_all()
        return await finish(self.flush_hidden(rewrite=rewrite))

    async def repair_slice(self, after: object | None) -> Part[Repair]:
        """Mend the next slice, and show what became of it to whoever has a conversation open."""
        part = await finish(self.mend(after))
        changed = {Key(each.fault.owner, each.fault.session_id) for each in part.items if each.is_done}
        for key in changed:
            live = self._live.get(key)
            found = Seen.ABSENT if live is None else await self.load_session(key, live.known)
            if live is not None and isinstance(found, Snapshot):
                live.show(found)
        return part

    def _session_of(self, key: Key, found: Snapshot | Seen, asked: SessionContext | None) -> SessionContext:
        if not isinstance(found, Snapshot):
            # Nothing newer than what the object that was alive when we asked has seen.
            assert asked is not None
            return asked
        live = self._live.get(key)
        if live is not None and (live.known is None or live.committed.session_key == found.session_key):
            live.show(found)
            return live
        if live is not None:
            live.mark_deleted()
        session = SessionContext.of_store(self, key, found)
        self._live.add(session)
        return session

    def _forget(self, sessions: Iterable[SessionContext]) -> None:
        for session in sessions:
            # One that has yet to create its conversation has nothing that could have been deleted.
            if session.known is not None:
                self._live.remove(session)
                session.mark_deleted()

    # --- agents ---

    def set_agent_resolver(self, resolver: AgentResolver) -> None:
        """Let *resolver* give the live agent for a stored name."""
        if not callable(resolver):
            raise TypeError("the resolver must be callable with an agent's name")
        self._resolver = resolver

    @property
    def has_agent_resolver(self) -> bool:
        """Whether `set_agent_resolver` was called."""
        return self._resolver is not None

    def resolve_agent(self, name: str) -> Agent | None:
        """The live agent of that name, if the resolver knows it."""
        return None if self._resolver is None else self._resolver(name)

    # --- turns ---

    @property
    def beats(self) -> Beats:
        """The signs of life of this store's turns in the running event loop."""
        loop = asyncio.get_running_loop()
        with self._beats_lock:
            known = self._beats.get(loop)
            beats = None if known is None else known()
            if beats is None:
                beats = Beats(self, loop)
                self._beats[loop] = weakref.ref(beats)
        return beats

    @property
    def turns(self) -> list[Turn]:
        """The turns of this store that run or wait for their place, in all event loops."""
        with self._beats_lock:
            found = [known() for known in self._beats.values()]
        return [turn for beats in found if beats is not None for turn in beats.turns]

    # --- the end ---

    async def aclose(self, grace: float = 10) -> None:
        """Close the storage, once the turns under way have ended, or after *grace* seconds."""
        check_grace(grace)
        self._is_closing = True
        try:
            await end_turns(self, grace)
        finally:
            await finish(self.close())

    def __del__(self) -> None:
        # A constructor that refused its arguments has left nothing to close.
        if self.__dict__.get("_live") is not None and self.abandon():
            warnings.warn(
                f"{self!r} was never closed; use `async with` or `await store.aclose()`", ResourceWarning, stacklevel=1
            )

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name!r}>"


def _end_after(earlier: asyncio.Future[None] | None, mine: asyncio.Future[None]) -> None:
    """Let those behind *mine* go on once *earlier* has ended too: a cancelled call does not wait for it itself."""
    if earlier is None:
        mine.set_result(None)
    else:
        earlier.add_done_callback(lambda _: mine.set_result(None))
