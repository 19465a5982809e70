"""BaseSessionStore: what users call, for one owner's conversations, over a backend that the stores of all owners share.

Its docstrings are the specification, which is why it is long.
"""

from __future__ import annotations

import datetime as dt
from abc import abstractmethod
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self

from anyio.lowlevel import checkpoint as yield_once

from chatflow.core.agent import Agent
from chatflow.core.finish import finish
from chatflow.core.messages import Message
from chatflow.core.owners import AllOwners, check_owner
from chatflow.core.pruning import check_max_turns
from chatflow.core.records import NewSession, Page, SessionInfo, check_grace, check_message_id, check_span
from chatflow.core.service import ServiceSessionId, id_key
from chatflow.core.session import SessionContext
from chatflow.core.upkeep import Upkeep
from chatflow.core.values import freeze_mapping
from chatflow.exceptions import (
    SessionNotFoundError,
    SessionStateError,
    UnstorableValueError,
    shorten,
)

if TYPE_CHECKING:
    from chatflow.core.backend import StoreBackend

DEFAULT_DEDUP_TTL_HOURS: Final = 192
"""How long a message id is remembered: 8 days, since WhatsApp delivers a webhook again for up to 7."""

_MOST: Final = 2**62
"""What every storage can count to."""

AgentResolver = Callable[[str], Agent | None]


class BaseSessionStore(Upkeep):
    """Where conversations are kept. Every operation is awaited, and yields to the event loop at least once.

    A store serves several event loops and threads at once. The constructor touches no loop, file or thread; the first
    operation opens what is needed. Close it with `aclose`, or use it as ``async with store:``.

    It shows the conversations without an owner, and `for_owner` gives a store of an owner's. Neither sees anything of
    the other's: the same session id, or message id, under two owners is two. Absent and not yours look the same.

    A store for another storage derives from `StoreBackend`.
    """

    # --- owners ---

    def for_owner(self, owner: str) -> BaseSessionStore:
        """The store of that owner's conversations alone, over the same storage, connections and live sessions.

        Made in a microsecond, for each request. To close it, or leave its ``async with``, closes nothing. What concerns
        all owners is refused there with `StoreScopeError`: `require_owner`, `check`, `repair`,
        `purge_processed_messages`, ``owner=ALL``, another owner's name.

        Raises:
            TypeError: *owner* is not a string.
            ValueError: It is empty, begins with a NUL, or UTF-8 can't encode it.
            StoreScopeError: This is another owner's store.
        """
        name = check_owner(owner)
        if name != self.owner:
            self.refuse_owners("for_owner() of another owner")
        return OwnerStore(self.backend, name)

    def require_owner(self) -> None:
        """From now on each call about the conversations without an owner is `StoreOwnerRequiredError`, in this process.

        So that no code forgets `for_owner`. What names its owners, or concerns the storage, goes on as before:
        ``owner=ALL``, `check`, `repair`, `purge_processed_messages`, `erase_owner`, `export_owner`, `aclose`,
        `Runner.working`. So do session objects that were handed out before: call it where the store is made.
        """
        self.refuse_owners("require_owner()")
        self.backend.requires_owner = True

    # --- what users call ---

    async def get_or_create(
        self,
        session_id: str,
        default_agent: Agent,
        metadata: Mapping[str, Any] | None = None,
        *,
        max_turns: int | None = None,
        expires_after: dt.timedelta | float | None = None,
    ) -> SessionContext:
        """The conversation *session_id*, created durably with *default_agent* if it does not exist.

        The same id asked for twice while the object is alive, in one event loop, gives the same object. *metadata* is
        merged into the stored one by top-level key, durably, without waiting for a turn. *max_turns*, when given to a
        conversation that is created by this call, is stored and wins over the store's default. So is *expires_after*, a
        timedelta or seconds: after so long without a commit `purge` deletes it.

        Raises:
            SessionStateError: *metadata* holds what can't be kept; nothing changed.
            CorruptSessionError: The stored conversation can't be read.
        """
        key = self.key_of(session_id)
        if not isinstance(default_agent, Agent):
            raise TypeError(f"default_agent must be an Agent, not {type(default_agent).__name__}")
        if max_turns is not None:
            check_max_turns(max_turns)
        seconds = None if expires_after is None else check_span("expires_after", expires_after)
        try:
            frozen = freeze_mapping(metadata or {}, "metadata")
        except UnstorableValueError as error:
            raise SessionStateError(session_id=session_id, path=error.path, reason=error.reason) from error
        new = NewSession(agent_name=default_agent.name, metadata=frozen, max_turns=max_turns, expires_after=seconds)
        return await self.backend.get_or_create_session(key, default_agent, new)

    async def get(self, session_id: str) -> SessionContext | None:
        """The conversation *session_id* as the storage has it now, or None.

        Raises:
            CorruptSessionError: The stored conversation can't be read.
        """
        return await self.backend.session_of(self.key_of(session_id))

    async def get_by_service_id(self, agent: Agent, service_session_id: ServiceSessionId) -> SessionContext | None:
        """The conversation whose history a service keeps under that id, if it is this owner's and this agent's.

        That is: given to *agent*, to one that its handoffs lead to, or to any. Of several the one with the newest
        commit. None where there is none, or it is not yours.

        Raises:
            TypeError: *agent* is not an Agent, or the id neither a string nor a mapping.
            ValueError: The id is empty.
            CorruptSessionError: The stored conversation can't be read.
        """
        if not isinstance(agent, Agent):
            raise TypeError(f"agent must be an Agent, not {type(agent).__name__}")
        return await self.backend.session_at_service(self._own(), id_key(service_session_id), agent)

    async def delete(self, session_id: str) -> bool:
        """Remove the conversation with all it has, without waiting for a turn. False if there was none.

        Whoever still uses it gets `SessionDeletedError`. Stored answers go; the ids of answered messages stay known
        until they expire, those of unfinished turns are forgotten.
        """
        return await finish(self.backend.delete_one(self.key_of(session_id)))

    async def clear(self) -> None:
        """Remove all conversations, as `delete` does, a slice at a time. One created meanwhile may stay."""
        await self.backend.delete_all(self._own())

    async def list_sessions(
        self, *, limit: int = 100, after: int | None = None, owner: AllOwners | None = None
    ) -> Page[SessionInfo]:
        """A page of conversations, newest commit first; *after* is the `next` of the page before.

        With ``owner=ALL`` they are those of all owners, and each says whose it is.
        """
        asked = self._asked(owner, "list_sessions")
        return await self.backend.page_of_sessions(asked, _check_limit(limit), _check_cursor(after, "after"))

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
        return await self.backend.is_processed(self._scope(session_id), check_message_id(message_id))

    async def mark_message_processed(self, message_id: str, *, session_id: str | None = None) -> bool:
        """Mark the id, durably. True only for the one call that marked it; False if it was marked already.

        A mark without *session_id* has a scope of its own, which `Runner.run_async` never reads. One with it says that
        the conversation's message needs no turn: `run_async` takes it for a duplicate whose answer nobody kept.
        """
        return await finish(self.backend.mark_processed(self._scope(session_id), check_message_id(message_id)))

    @abstractmethod
    def set_agent_resolver(self, resolver: AgentResolver) -> None:
        """Let *resolver* give the live agent for a stored name, or None for a name it does not know."""

    @property
    @abstractmethod
    def has_agent_resolver(self) -> bool:
        """Whether `set_agent_resolver` was called."""

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


class OwnerStore(BaseSessionStore):
    """The store of one owner's conversations. `BaseSessionStore.for_owner` makes it."""

    def __init__(self, backend: StoreBackend, owner: str) -> None:
        self._backend = backend
        self._owner = owner

    @property
    def backend(self) -> StoreBackend:
        """What it was made of."""
        return self._backend

    @property
    def owner(self) -> str:
        """Whose conversations these are."""
        return self._owner

    @property
    def name(self) -> str:
        """The whole store's."""
        return self._backend.name

    @property
    def default_max_turns(self) -> int:
        """The whole store's."""
        return self._backend.default_max_turns

    @property
    def dedup_ttl_hours(self) -> float:
        """The whole store's."""
        return self._backend.dedup_ttl_hours

    @property
    def is_closing(self) -> bool:
        """Whether the whole store is."""
        return self._backend.is_closing

    def set_agent_resolver(self, resolver: AgentResolver) -> None:
        """Set it for the whole store."""
        self._backend.set_agent_resolver(resolver)

    @property
    def has_agent_resolver(self) -> bool:
        """Whether the whole store has one."""
        return self._backend.has_agent_resolver

    async def aclose(self, grace: float = 10) -> None:
        """Close nothing: the storage is the whole store's."""
        check_grace(grace)
        await yield_once()

    def __repr__(self) -> str:
        return f"<{type(self._backend).__name__} {self.name!r} of owner {shorten(self._owner)}>"


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
