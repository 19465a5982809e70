"""BaseSessionStore: what users call, for one owner's conversations, over a backend that the stores of all owners share.

Its docstrings are the specification, which is why it is long.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self, TypeVar

from anyio.lowlevel import checkpoint as yield_once

from chatflow.core.agent import Agent
from chatflow.core.finish import finish
from chatflow.core.messages import Message
from chatflow.core.pruning import check_max_turns
from chatflow.core.records import Key, NewSession, Page, PendingTurn, SessionInfo, check_id
from chatflow.core.repairs import Fault, Part, Repair
from chatflow.core.session import SessionContext
from chatflow.core.values import freeze_mapping
from chatflow.exceptions import SessionNotFoundError, SessionStateError, UnstorableValueError

if TYPE_CHECKING:
    from chatflow.core.backend import StoreBackend

_T = TypeVar("_T")

DEFAULT_DEDUP_TTL_HOURS: Final = 192
"""How long a message id is remembered: 8 days, since WhatsApp delivers a webhook again for up to 7."""

SLICE: Final = 1000
"""Rows that one transaction deletes at most, so that turns can commit in between."""

_MOST: Final = 2**62
"""What every storage can count to."""

AgentResolver = Callable[[str], Agent | None]


class BaseSessionStore(ABC):
    """Where conversations are kept. Every operation is awaited, and yields to the event loop at least once.

    A store serves several event loops and threads at once. The constructor touches no loop, file or thread; the first
    operation opens what is needed. Close it with `aclose`, or use it as ``async with store:``.

    A store for another storage derives from `StoreBackend`.
    """

    # --- what it is ---

    @property
    @abstractmethod
    def backend(self) -> StoreBackend:
        """What it stands on, and shares with the stores of other owners."""

    @property
    @abstractmethod
    def owner(self) -> str:
        """Whose conversations these are; empty for those without an owner."""

    @property
    @abstractmethod
    def name(self) -> str:
        """What errors and logs call it."""

    @property
    @abstractmethod
    def default_max_turns(self) -> int:
        """How many turns a conversation without a number of its own keeps."""

    @property
    @abstractmethod
    def dedup_ttl_hours(self) -> float:
        """How long message ids are remembered."""

    @property
    @abstractmethod
    def is_closing(self) -> bool:
        """Whether `aclose` was called."""

    def key_of(self, session_id: str) -> Key:
        """What names that conversation in the storage."""
        return Key(self.owner, check_id(session_id, "session_id"))

    def _scope(self, session_id: str | None) -> Key:
        # No conversation has the empty id, so a mark without one can't meet a conversation's own.
        return Key(self.owner, "") if session_id is None else self.key_of(session_id)

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
        key = self.key_of(session_id)
        if not isinstance(default_agent, Agent):
            raise TypeError(f"default_agent must be an Agent, not {type(default_agent).__name__}")
        if max_turns is not None:
            check_max_turns(max_turns)
        try:
            frozen = freeze_mapping(metadata or {}, "metadata")
        except UnstorableValueError as error:
            raise SessionStateError(session_id=session_id, path=error.path, reason=error.reason) from error
        new = NewSession(agent_name=default_agent.name, metadata=frozen, max_turns=max_turns)
        return await self.backend.get_or_create_session(key, default_agent, new)

    async def get(self, session_id: str) -> SessionContext | None:
        """The conversation *session_id* as the storage has it now, or None.

        Raises:
            CorruptSessionError: The stored conversation can't be read.
        """
        return await self.backend.session_of(self.key_of(session_id))

    async def delete(self, session_id: str) -> bool:
        """Remove the conversation with all it has, without waiting for a turn. False if there was none.

        Whoever still uses it gets `SessionDeletedError`. Stored answers go; the ids of answered messages stay known
        until they expire, those of unfinished turns are forgotten.
        """
        return await finish(self.backend.delete_one(self.key_of(session_id)))

    async def clear(self) -> None:
        """Remove all conversations, as `delete` does, a slice at a time. One created meanwhile may stay."""
        await self.backend.delete_all(self.owner)

    async def list_sessions(self, *, limit: int = 100, after: int | None = None) -> Page[SessionInfo]:
        """A page of conversations, newest commit first; *after* is the `next` of the page before."""
        return await self.backend.page_of_sessions(self.owner, _check_limit(limit), _check_cursor(after, "after"))

    async def messages(self, session_id: str, *, limit: int = 100, before: int | None = None) -> Page[Message]:
        """A page of the committed messages, the newest ones first by page, in the history's order within a page.

        Waits for no turn. *before* is the `next` of the page before, which comes later in the history.

        Raises:
            SessionNotFoundError: There is no such conversation.
        """
        key, before = self.key_of(session_id), _check_cursor(before, "before")
        page = await self.backend.page_of_messages(key, _check_limit(limit), before)
        if page is None:
            raise SessionNotFoundError(session_id=session_id)
        return page

    async def is_message_processed(self, message_id: str, *, session_id: str | None = None) -> bool:
        """Whether the id is remembered: marked, or, in the conversation *session_id*, answered.

        A message under way is not processed yet. Ids belong to a conversation, since Telegram's repeat in every chat;
        without *session_id* only marks made without one count.
        """
        return await self.backend.is_processed(self._scope(session_id), check_id(message_id, "message_id"))

    async def mark_message_processed(self, message_id: str, *, session_id: str | None = None) -> bool:
        """Mark the id, durably. True only for the one call that marked it; False if it was marked already.

        A mark without *session_id* has a scope of its own, which `Runner.run_async` never reads. One with it says that
        the conversation's message needs no turn: `run_async` takes it for a duplicate whose answer nobody kept.
        """
        return await finish(self.backend.mark_processed(self._scope(session_id), check_id(message_id, "message_id")))

    async def purge_processed_messages(self) -> int:
        """Forget all expired message ids, at most 1,000 a transaction, and return how many they were.

        Each mark and each turn with a message id forgets a few by itself; this clears a backlog at once.
        """
        purged = 0
        while True:
            count = await finish(self.backend.purge_processed(SLICE))
            purged += count
            if count < SLICE:
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
        return await _gathered(self.backend.examine)

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
        return await _gathered(self.backend.repair_slice)

    @abstractmethod
    def set_agent_resolver(self, resolver: AgentResolver) -> None:
        """Let *resolver* give the live agent for a stored name, or None for a name it does not know."""

    @property
    @abstractmethod
    def has_agent_resolver(self) -> bool:
        """Whether `set_agent_resolver` was called."""

    async def pending_turns(self) -> tuple[PendingTurn, ...]:
        """All turns that have a row in the store, in the order they came.

        They are those that run or wait, the accepted and interrupted ones that nobody does at the moment, those that
        failed and go on when their message is sent again, the dead ones, and answered ones of which `on_response` has
        not heard yet.
        """
        found: list[PendingTurn] = []
        while True:
            page = await self.backend.page_of_turns(self.owner, found[-1].turn_id if found else 0, SLICE)
            found += page
            if len(page) < SLICE:
                return tuple(found)

    @abstractmethod
    async def aclose(self, grace: float = 10) -> None:
        """Close the storage. Whatever uses the store later gets `StoreClosedError`. Closing twice is no error.

        No turn begins any more. Those under way may end within *grace* seconds; then their tasks are cancelled. A
        cancellation of the caller ends the wait, and comes after the store is closed: it is closed also where its
        ``async with`` is left by one.
        """

    async def __aenter__(self) -> Self:
        await yield_once()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()


async def _gathered(slice_after: Callable[[object | None], Awaitable[Part[_T]]]) -> tuple[_T, ...]:
    items: list[_T] = []
    part = await slice_after(None)
    while True:
        items += part.items
        if part.next is None:
            return tuple(items)
        await yield_once()  # where a cancellation can end it, which a repair's slices hold off
        part = await slice_after(part.next)


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
