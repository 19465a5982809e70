"""BaseSessionStore: what users call, over the primitives that a backend writes.

Its docstrings are the specification, which is why it is long.
"""

from __future__ import annotations

import asyncio
import threading
import warnings
import weakref
from collections.abc import Awaitable, Callable, Iterable, Mapping
from types import TracebackType
from typing import Any, Final, Self, TypeVar

from anyio.lowlevel import checkpoint as yield_once

from chatflow.core.agent import Agent
from chatflow.core.beats import Beats
from chatflow.core.ending import end_turns
from chatflow.core.finish import finish
from chatflow.core.live import LiveSessions
from chatflow.core.messages import Message
from chatflow.core.pruning import check_max_turns
from chatflow.core.records import (
    NOTHING_SEEN,
    Key,
    NewSession,
    Page,
    PendingTurn,
    Seen,
    SessionInfo,
    Snapshot,
    check_grace,
    check_id,
)
from chatflow.core.repairs import Fault, Part, Repair
from chatflow.core.session import SessionContext
from chatflow.core.storage import Storage
from chatflow.core.turn import Turn
from chatflow.core.values import freeze_mapping
from chatflow.exceptions import SessionNotFoundError, SessionStateError, UnstorableValueError

_T = TypeVar("_T")

DEFAULT_DEDUP_TTL_HOURS: Final = 192
"""How long a message id is remembered: 8 days, since WhatsApp delivers a webhook again for up to 7."""

_SLICE: Final = 1000
"""Rows that one transaction deletes at most, so that turns can commit in between."""

_HUNDRED_YEARS: Final = 100 * 366 * 24
"""In hours. No message is delivered again after that, and dates end at some point."""

_MOST: Final = 2**62
"""What every storage can count to."""

AgentResolver = Callable[[str], Agent | None]


def _check_hours(hours: object) -> float:
    if not isinstance(hours, int | float) or isinstance(hours, bool):
        raise TypeError(f"dedup_ttl_hours must be a number, not {hours!r}")
    if not 0 < hours <= _HUNDRED_YEARS:
        raise ValueError(f"dedup_ttl_hours must be above 0 and at most {_HUNDRED_YEARS} (a hundred years), not {hours}")
    return float(hours)


class BaseSessionStore(Storage):
    """Where conversations are kept. Every operation is awaited, and yields to the event loop at least once.

    A store serves several event loops and threads at once. The constructor touches no loop, file or thread; the first
    operation opens what is needed. Close it with `aclose`, or use it as ``async with store:``.

    A store for another storage implements the primitives of `Storage`, the abstract methods.
    """

    _owner = ""

    def __init__(self, default_max_turns: int, dedup_ttl_hours: float) -> None:
        self.default_max_turns = check_max_turns(default_max_turns, "default_max_turns")
        self.dedup_ttl_hours = _check_hours(dedup_ttl_hours)
        self.is_closing = False
        self._live = LiveSessions()
        self._entering: dict[tuple[asyncio.AbstractEventLoop, Key], asyncio.Future[None]] = {}
        # Kept by their loop's timer and by the turns they beat, so that they keep no loop alive themselves.
        self._beats: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, weakref.ref[Beats]] = (
            weakref.WeakKeyDictionary()
        )
        self._beats_lock = threading.Lock()
        self._resolver: AgentResolver | None = None

    # --- what users call ---

    async def get_or_create(
        self,
        session_id: str,
        default_agent: Agent,
        metadata: Mapping[str, Any] | None = None,
        *,
        max_turns: int | None = None,
    ) -> SessionContext:
        """The conversation *session_id*, created durably with *default_agent* if it does not exist.

        The same id asked for twice while the object is alive, in one event loop, gives the same object. *metadata* is
        merged into the stored one by top-level key, durably, without waiting for a turn. *max_turns*, when given to a
        conversation that is created by this call, is stored and wins over the store's default.

        Raises:
            SessionStateError: *metadata* holds what can't be kept; nothing changed.
            CorruptSessionError: The stored conversation can't be read.
        """
        key = self._key(session_id)
        if not isinstance(default_agent, Agent):
            raise TypeError(f"default_agent must be an Agent, not {type(default_agent).__name__}")
        if max_turns is not None:
            check_max_turns(max_turns)
        try:
            frozen = freeze_mapping(metadata or {}, "metadata")
        except UnstorableValueError as error:
            raise SessionStateError(session_id=session_id, path=error.path, reason=error.reason) from error
        # Whoever asks first goes on first, however long it took to find or make the conversation.
        place = (asyncio.get_running_loop(), key)
        earlier = self._entering.get(place)
        mine = self._entering[place] = place[0].create_future()
        try:
            live = self._live.get(key)
            found: Snapshot | Seen = Seen.ABSENT
            if not frozen:
                found = await self.load_session(key, None if live is None else live.known)
            if found is Seen.ABSENT:
                new = NewSession(agent_name=default_agent.name, metadata=frozen, max_turns=max_turns)
                found = await finish(self.create_session(key, new))
            if earlier is not None and not earlier.done():
                await asyncio.wait([earlier])
            return self._hand_out(key, found, live, default_agent)
        finally:
            if self._entering.get(place) is mine:
                del self._entering[place]
            _end_after(earlier, mine)

    async def get(self, session_id: str) -> SessionContext | None:
        """The conversation *session_id* as the storage has it now, or None.

        Raises:
            CorruptSessionError: The stored conversation can't be read.
        """
        key = self._key(session_id)
        live, handed_out = self._live.get(key), self._live.all_of(key)
        found = await self.load_session(key, None if live is None else live.known)
        if found is Seen.ABSENT:
            self._forget(handed_out)
            return None
        return self._hand_out(key, found, live, None)

    async def delete(self, session_id: str) -> bool:
        """Remove the conversation with all it has, without waiting for a turn. False if there was none.

        Whoever still uses it gets `SessionDeletedError`. Stored answers go; the ids of answered messages stay known
        until they expire, those of unfinished turns are forgotten.
        """
        return await finish(self._delete_one(self._key(session_id)))

    async def _delete_one(self, key: Key) -> bool:
        # Those handed out so far: one that is created anew under this id once the old one is gone is not meant.
        handed_out = self._live.all_of(key)
        turns = await self.delete_session(key)
        self._forget(handed_out)
        self.line.wake(turns or ())
        return turns is not None

    async def clear(self) -> None:
        """Remove all conversations, as `delete` does, a slice at a time. One created meanwhile may stay."""
        handed_out = self._live.all_of_owner(self._owner)
        last: int | None = None
        while True:
            last, turns = await finish(self.delete_sessions(self._owner, last, _SLICE))
            self.line.wake(turns)
            if last is None:
                self._forget(handed_out)
                return
            await yield_once()  # where a cancellation can end it, which the slices hold off

    async def list_sessions(self, *, limit: int = 100, after: int | None = None) -> Page[SessionInfo]:
        """A page of conversations, newest commit first; *after* is the `next` of the page before."""
        return await self.page_of_sessions(self._owner, _check_limit(limit), _check_cursor(after, "after"))

    async def messages(self, session_id: str, *, limit: int = 100, before: int | None = None) -> Page[Message]:
        """A page of the committed messages, the newest ones first by page, in the history's order within a page.

        Waits for no turn. *before* is the `next` of the page before, which comes later in the history.

        Raises:
            SessionNotFoundError: There is no such conversation.
        """
        page = await self.page_of_messages(self._key(session_id), _check_limit(limit), _check_cursor(before, "before"))
        if page is None:
            raise SessionNotFoundError(session_id=session_id)
        return page

    async def is_message_processed(self, message_id: str, *, session_id: str | None = None) -> bool:
        """Whether the id is remembered: marked, or, in the conversation *session_id*, answered.

        A message under way is not processed yet. Ids belong to a conversation, since Telegram's repeat in every chat;
        without *session_id* only marks made without one count.
        """
        return await self.is_processed(self._scope(session_id), check_id(message_id, "message_id"))

    async def mark_message_processed(self, message_id: str, *, session_id: str | None = None) -> bool:
        """Mark the id, durably. True only for the one call that marked it; False if it was marked already.

        A mark without *session_id* has a scope of its own, which `Runner.run_async` never reads. One with it says that
        the conversation's message needs no turn: `run_async` takes it for a duplicate whose answer nobody kept.
        """
        return await finish(self.mark_processed(self._scope(session_id), check_id(message_id, "message_id")))

    async def purge_processed_messages(self) -> int:
        """Forget all expired message ids, at most 1,000 a transaction, and return how many they were.

        Each mark and each turn with a message id forgets a few by itself; this clears a backlog at once.
        """
        purged = 0
        while True:
            count = await finish(self.purge_processed(_SLICE))
            purged += count
            if count < _SLICE:
                return purged
            await yield_once()  # as in clear()

    async def check(self) -> tuple[Fault, ...]:
        """All that is wrong with what the store holds, of every owner; empty if nothing is. Changes nothing.

        It finds rows that can't be read (messages, metadata, state, names, turns, stored answers), histories that break
        the rules of `prune` (its *max_turns* aside) or have gaps, rows whose conversation does not exist, and what the
        storage's own integrity check finds. A fault that only the storage can see, such as an index that lacks a row,
        may be reported beside the row it hides.

        Conversations are looked at a few at a time, so that other operations run in between, and each as one commit
        left it. It reads everything once, on a file's reading thread: about a second for 25,000 messages beside other
        work. The integrity check is one step, and holds up other reads as long as reading the whole file takes; turns
        go on meanwhile, but for those that have to wait for a read. In memory it runs on the event loop.

        Raises:
            StoreError: The storage can't be opened or read at all.
        """
        return await _gathered(self.examine)

    async def repair(self) -> tuple[Repair, ...]:
        """Mend all that can be mended by rule, and return what was done about each fault; empty if there was none.

        Nothing is thrown away: what is taken out is set aside as it stood (in a file, in the table
        ``chatflow_set_aside``), with its owner, session id, source and the reason. It goes when the conversation is
        deleted. The rules:

        - A message that can't be read is set aside. Those after a gap, or after what was taken out, follow on.
        - Then the rules of `prune` decide, with no limit of turns: system messages stand first; what comes before the
          first user message is set aside, and so is a result without its call. Of a tool message with several results
          the others stay; the whole message is set aside as it was.
        - Metadata or state that can't be read is set aside, and empty from then on; a number of turns becomes the
          store's; a moment, another known one or now.
        - A name that can't be read (of an owner, a session or an agent) is written with replacement characters; an
          owner's and a session's get ``(session_key 7)`` appended, so that they are nobody else's.
        - A turn is not run again where nobody can know what it was to do or has done: its message, or a line of its
          journal, can't be read or is missing. What can't be read, and the whole journal, is set aside, and the turn is
          dead; without a message id, or where that can't be read, its row is set aside.
        - A turn that names nobody who has it in hand, though somebody must, is interrupted.
        - A stored answer that can't be read is set aside, and its message id stays known. An id that can't be read is
          set aside with all that is kept of it.
        - Rows whose conversation, or whose turn, does not exist are set aside.
        - Indexes are built anew where the integrity check finds fault with one. What else it finds can't be mended.

        Each conversation is mended in one durable transaction of its own, as a commit: whoever has it open sees it with
        the next turn or `get`, and a session of this store and event loop at once. A conversation with a turn under way
        is left alone, and so is a turn that somebody has in hand: it ends by itself, or is interrupted and then mended.
        Two programs may repair at once; run twice, it finds nothing the second time but what can't be mended. It costs
        what `check` does, two more integrity checks where one finds something, and the writing thread for as long as
        one conversation's messages, or an index, take to be written.

        Raises:
            StoreError: The storage can't be opened, read or written; what was mended before that stays mended.
        """
        return await _gathered(self._repair_slice)

    async def _repair_slice(self, after: object | None) -> Part[Repair]:
        part = await finish(self.mend(after))
        changed = {each.fault.session_id for each in part.items if each.fault.owner == self._owner and each.is_done}
        for session_id in changed:
            key = Key(self._owner, session_id)
            live = self._live.get(key)
            found = Seen.ABSENT if live is None else await self.load_session(key, live.known)
            if live is not None and isinstance(found, Snapshot):
                live.show(found)
        return part

    def set_agent_resolver(self, resolver: AgentResolver) -> None:
        """Let *resolver* give the live agent for a stored name, or None for a name it does not know."""
        if not callable(resolver):
            raise TypeError("the resolver must be callable with an agent's name")
        self._resolver = resolver

    async def pending_turns(self) -> tuple[PendingTurn, ...]:
        """All turns that have a row in the store, in the order they came.

        They are those that run or wait, the accepted and interrupted ones that nobody does at the moment, those that
        failed and go on when their message is sent again, the dead ones, and answered ones of which `on_response` has
        not heard yet.
        """
        found: list[PendingTurn] = []
        while True:
            page = await self.page_of_turns(self._owner, found[-1].turn_id if found else 0, _SLICE)
            found += page
            if len(page) < _SLICE:
                return tuple(found)

    async def aclose(self, grace: float = 10) -> None:
        """Close the storage. Whatever uses the store later gets `StoreClosedError`. Closing twice is no error.

        No turn begins any more. Those under way may end within *grace* seconds; then their tasks are cancelled. A
        cancellation of the caller ends the wait, and comes after the store is closed: it is closed also where its
        ``async with`` is left by one.
        """
        check_grace(grace)
        self.is_closing = True
        try:
            await end_turns(self, grace)
        finally:
            await finish(self.close())

    async def __aenter__(self) -> Self:
        await yield_once()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    def __del__(self) -> None:
        # A constructor that refused its arguments has left nothing to close.
        if self.__dict__.get("_live") is not None and self.abandon():
            warnings.warn(
                f"{self!r} was never closed; use `async with` or `await store.aclose()`", ResourceWarning, stacklevel=1
            )

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name!r}>"

    # --- what sessions and turns use ---

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

    def key_of(self, session_id: str) -> Key:
        """What names that conversation here."""
        return self._key(session_id)

    def unread_session(self, key: Key) -> SessionContext:
        """A session of the conversation *key* that has seen nothing of it yet."""
        return SessionContext.of_store(self, key, NOTHING_SEEN)

    async def session_of(self, key: Key) -> SessionContext | None:
        """The conversation *key*, whoever owns it."""
        live = self._live.get(key)
        found = await self.load_session(key, None if live is None else live.known)
        return None if found is Seen.ABSENT else self._hand_out(key, found, live, None)

    @property
    def has_agent_resolver(self) -> bool:
        """Whether `set_agent_resolver` was called."""
        return self._resolver is not None

    def resolve_agent(self, name: str) -> Agent | None:
        """The live agent of that name, if the resolver knows it."""
        return None if self._resolver is None else self._resolver(name)

    def _key(self, session_id: str) -> Key:
        return Key(self._owner, check_id(session_id, "session_id"))

    def _scope(self, session_id: str | None) -> Key:
        # No conversation has the empty id, so a mark without one can't meet a conversation's own.
        return Key(self._owner, "") if session_id is None else self._key(session_id)

    def _hand_out(
        self, key: Key, found: Snapshot | Seen, asked: SessionContext | None, fallback: Agent | None
    ) -> SessionContext:
        session = self._session_of(key, found, asked)
        if fallback is not None:
            session.answer_with(fallback)
        return session

    def _session_of(self, key: Key, found: Snapshot | Seen, asked: SessionContext | None) -> SessionContext:
        if not isinstance(found, Snapshot):
            # Nothing newer than what the object that was alive when we asked has seen.
            assert asked is not None
            return asked
        live = self._live.get(key)
        if live is not None and live.committed.session_key == found.session_key:
            live.show(found)
            return live
        if live is not None:
            live.mark_deleted()
        session = SessionContext.of_store(self, key, found)
        self._live.add(session)
        return session

    def _forget(self, sessions: Iterable[SessionContext]) -> None:
        for session in sessions:
            self._live.remove(session)
            session.mark_deleted()


async def _gathered(slice_after: Callable[[object | None], Awaitable[Part[_T]]]) -> tuple[_T, ...]:
    items: list[_T] = []
    part = await slice_after(None)
    while True:
        items += part.items
        if part.next is None:
            return tuple(items)
        await yield_once()  # where a cancellation can end it, which a repair's slices hold off
        part = await slice_after(part.next)


def _end_after(earlier: asyncio.Future[None] | None, mine: asyncio.Future[None]) -> None:
    """Let those behind *mine* go on once *earlier* has ended too: a cancelled call does not wait for it itself."""
    if earlier is None:
        mine.set_result(None)
    else:
        earlier.add_done_callback(lambda _: mine.set_result(None))


def _check_cursor(cursor: object, name: str) -> int | None:
    if cursor is not None and (not isinstance(cursor, int) or isinstance(cursor, bool)):
        raise TypeError(f"{name} must be the `next` of the page before, not {cursor!r}")
    if cursor is not None and abs(cursor) > _MOST:
        raise ValueError(f"{name} must be the `next` of the page before; no page has given {cursor}")
    return cursor


def _check_limit(limit: object) -> int:
    if not isinstance(limit, int) or isinstance(limit, bool):
        raise TypeError(f"limit must be an integer, not {limit!r}")
    if limit < 1:
        raise ValueError(f"limit must be at least 1, not {limit}")
    return min(limit, _MOST)
