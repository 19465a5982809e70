"""AgentSession and SessionContext: one conversation, as the code that answers in it sees it.

One class with all that users call on a conversation, which is why it is long.
"""

from __future__ import annotations

import datetime as dt
import logging
import secrets
import weakref
from collections.abc import Iterable, Mapping, MutableMapping
from typing import TYPE_CHECKING, Any, Final, Self, TypeVar, cast, overload

import attrs

from chatflow.core.agent import Agent, reach
from chatflow.core.approvals import open_calls
from chatflow.core.beats import DEFAULT_LEASE_SECONDS
from chatflow.core.handle import Checkpoint, Handle, current_task
from chatflow.core.history import History
from chatflow.core.messages import Message, ToolCall
from chatflow.core.owners import check_owner
from chatflow.core.pruning import check_max_turns
from chatflow.core.records import NOTHING_SEEN, Key, NewSession, Snapshot, check_id, check_seconds, check_span
from chatflow.core.scopes import OwnTurn, TurnScope
from chatflow.core.service import ServiceSession, ServiceSessionId
from chatflow.core.session_form import DEFAULT_MAX_CHARACTERS, from_data, to_data
from chatflow.core.state import Values
from chatflow.core.typed import MismatchError, check_comes_back, typed
from chatflow.core.usage import Usage, usage_of
from chatflow.core.values import FrozenDict, freeze_mapping
from chatflow.core.working import Kind, Working
from chatflow.exceptions import (
    SessionConflictError,
    SessionError,
    SessionKeyError,
    SessionStateError,
    UnstorableValueError,
    shorten,
)

if TYPE_CHECKING:
    from chatflow.core.backend import StoreBackend
    from chatflow.core.store import BaseSessionStore

logger = logging.getLogger("chatflow.session")

DEFAULT_MAX_TURNS: Final = 40

_T = TypeVar("_T")
_D = TypeVar("_D")
_NO_DEFAULT: Final[Any] = object()
_NO_TYPES: Final[Any] = (int, float, str, bytes, list, tuple, dict, set)
"""What somebody gives for a type who means a default."""


def new_session_id() -> str:
    """An id that nobody can guess: 128 bits from the system's cryptographic source."""
    return secrets.token_hex(16)


class AgentSession(Handle):
    """One conversation: its history, its state, the agent that answers.

    Made by an agent (`Agent.create_session`), by a store, or on its own: then it lives in a private in-memory store,
    and carries its own history. The first agent that runs in one that was made here is its active agent. Without a
    *session_id* it has a random one of 128 bits. A *service_session_id* is a service's own id for the conversation,
    where the service keeps the history: nothing is checked about it.

    Every awaited method raises `SessionDeletedError` once the conversation was deleted.

    Raises:
        TypeError: An argument is of a wrong type.
        ValueError: An id is empty.
        SessionStateError: *state* holds what can't be kept.
    """

    __slots__ = ()

    def __init__(
        self,
        session_id: str | None = None,
        service_session_id: ServiceSessionId | None = None,
        state: Mapping[str, Any] | None = None,
    ) -> None:
        key = Key("", new_session_id() if session_id is None else check_id(session_id, "session_id"))
        service = None if service_session_id is None else ServiceSession(service_session_id)
        kept = _frozen(key, "state", state)
        self.keep_alone(key, attrs.evolve(NOTHING_SEEN, state=kept, service=service), None)

    @classmethod
    def of_store(
        cls,
        store: StoreBackend,
        key: Key,
        snapshot: Snapshot,
        *,
        agent: Agent | None = None,
        new: NewSession | None = None,
    ) -> Self:
        """The session that *store* hands out; *new* says how it begins where its first turn is to create it."""
        session = cls.__new__(cls)
        session.set_up(store, key, snapshot, agent, new)
        return session

    def keep_alone(self, key: Key, snapshot: Snapshot, agent: Agent | None) -> None:
        """Begin as *snapshot* says, in a store of its own."""
        # A session of its own needs a store, and the store's module needs this one.
        from chatflow.core.memory import SessionStore

        store = SessionStore()
        self.set_up(store, key, store.keep(key, snapshot), agent)

    # --- what users read ---

    @property
    def service_session_id(self) -> str | Mapping[str, Any] | None:
        """The service's own id for the conversation, where a service keeps the history; changed by turns alone."""
        working = self._working
        service = self.committed.service if working is None else working.service
        return None if service is None else service.id

    @property
    def usage(self) -> Usage:
        """What the conversation has cost, by its providers' counts of tokens: whole, by agent, by model, by turn.

        Messages that pruning or `clear_history` has removed count, those of a turn that failed or was rolled back do
        not. Summed each time it is read.
        """
        working = self._working
        spent = self.committed.spent if working is None else working.spent
        return usage_of(spent, self.history)

    @property
    def max_turns(self) -> int:
        """How many turns a commit keeps: the session's own number, or the store's."""
        own = self.committed.max_turns
        return self.store.default_max_turns if own is None else own

    @property
    def expires_after(self) -> dt.timedelta | None:
        """After how long without a commit `BaseSessionStore.purge` deletes it; None for no limit of its own."""
        seconds = self.committed.expires_after
        return None if seconds is None else dt.timedelta(seconds=seconds)

    @property
    def history(self) -> History:
        """The messages: in a turn its members' working copy, else the last commit. A snapshot; it never changes.

        Where a service keeps the history, this mirrors what went through here.
        """
        working = self._working
        return self.committed.history if working is None else working.history

    @property
    def pending_approvals(self) -> tuple[ToolCall, ...]:
        """The calls of the history that wait for a person, in order: see `Runner.approve`."""
        return tuple(held.call for held in open_calls(self.history))

    @property
    def metadata(self) -> MutableMapping[str, Any]:
        """What the application notes about the conversation."""
        return Values(self, "metadata")

    @metadata.setter
    def metadata(self, values: Mapping[str, Any]) -> None:
        self._replace_values("metadata", values)

    @property
    def state(self) -> MutableMapping[str, Any]:
        """What agents and tools keep between turns."""
        return Values(self, "state")

    @state.setter
    def state(self, values: Mapping[str, Any]) -> None:
        self._replace_values("state", values)

    @property
    def active_agent_name(self) -> str:
        """The name of the agent that answers, as it is stored."""
        working = self._working
        return self.committed.agent_name if working is None else working.agent_name

    @property
    def active_agent(self) -> Agent:
        """The live agent of that name.

        An agent given to this object comes first, then the store's resolver, then what the default agent can hand off
        to. A name that nobody knows is logged once and answered by the default agent, or by a stand-in of that name
        without tools where the session came from `store.get`; the stored name stays.

        Raises:
            SessionError: The session was made without an agent, and none has run in it yet.
        """
        name = self.active_agent_name
        if not name:
            raise SessionError(
                f"session {shorten(self.session_id)}: no agent has run in it yet; agent.run(..., session=session) does",
                session_id=self.session_id,
            )
        known = self._agents.get(name) or self.store.resolve_agent(name)
        if known is None and self._fallback is not None:
            known = self._fallback.reachable().get(name)
        if known is not None:
            return known
        if name not in self._known_unknowns:
            self._known_unknowns.add(name)
            logger.warning(
                "session %s: no agent is named %s; %s answers for it. Give the store a resolver:"
                " store.set_agent_resolver(...)",
                shorten(self.session_id),
                shorten(name),
                "a stand-in" if self._fallback is None else shorten(self._fallback.name),
            )
        return Agent(name=name) if self._fallback is None else self._fallback

    def __repr__(self) -> str:
        return (
            f"<{type(self).__name__} {shorten(self.session_id)} agent={shorten(self.active_agent_name)}"
            f" messages={len(self.history)}>"
        )

    # --- typed state ---

    def set(self, key: str, value: Any) -> None:
        """Keep *value* in the state under *key*: what `get` gives back as the type it had, equal.

        Raises:
            SessionStateError: It can't be kept, or would not come back equal; the error names the path, and nothing has
                changed.
            SessionDeletedError: The conversation is known to be deleted.
        """
        self.refuse_deleted()
        kept = self.freeze_values("state", {key: value})[key]
        try:
            check_comes_back(value, kept, f"state.{key}")
        except MismatchError as error:
            raise SessionStateError(session_id=self.session_id, path=error.path, reason=error.reason) from error
        self.set_value("state", key, kept)

    @overload
    def get(self, key: str, *, default: Any = ...) -> Any: ...
    @overload
    def get(self, key: str, kind: type[_T]) -> _T: ...
    @overload
    def get(self, key: str, kind: type[_T], default: _D) -> _T | _D: ...
    @overload
    def get(self, key: str, kind: Any, default: Any = ...) -> Any: ...
    def get(self, key: str, kind: Any = Any, default: Any = _NO_DEFAULT) -> Any:
        """What the state holds under *key*, as an instance of *kind*, which the caller may change.

        *kind* is the class it was set as, or whatever can stand in an annotation, such as ``list[Order]``; without one
        the plain value is given. Nothing is coerced. Fields that the class has got since take their defaults. A
        *default* comes third, or by its name; where it is to come second, ``session.state.get`` is a mapping's own.

        Raises:
            SessionKeyError: There is no such key, and no *default* to give instead.
            SessionStateError: The value is not of that kind; the error names the path, such as ``state.prefs.theme``.
            TypeError: *kind* is no type that values come back as.
            SessionDeletedError: The conversation is known to be deleted.
        """
        self.refuse_deleted()
        if kind is None or isinstance(kind, _NO_TYPES):
            raise TypeError(f"kind must be a type, not {shorten(kind)}; a default is given as default=...")
        values = self.values("state")
        if key not in values:
            if default is _NO_DEFAULT:
                raise SessionKeyError(session_id=self.session_id, key=key)
            return default
        try:
            return typed(values[key], kind, f"state.{key}")
        except MismatchError as error:
            raise SessionStateError(session_id=self.session_id, path=error.path, reason=error.reason) from error

    def delete(self, key: str) -> bool:
        """Remove *key* from the state. False if there was none.

        Raises:
            SessionDeletedError: The conversation is known to be deleted.
        """
        self.refuse_deleted()
        is_there = key in self.values("state")
        if is_there:
            del self.state[key]
        return is_there

    # --- as data ---

    def to_dict(self, *, for_client: bool = False) -> dict[str, Any]:
        """The conversation as plain JSON (``json.dumps`` takes it as it is), from which `from_dict` makes an equal one.

        It is what the running code sees: in a turn its working copy, else the last commit with the changes that wait.
        Nothing of it is shared with the session. It is complete: history with calls that nobody has answered yet, the
        active agent's name, state, metadata, owner, limits, and a service's session.

        With *for_client* it is what a client may see and bring back: without the owner, the metadata, the service's
        session, state whose key begins with an underscore, system messages, what context providers have stored, and of
        the other messages *extra* (reasoning, signatures) and *usage*. Tools' arguments and results are in it.

        Raises:
            SessionDeletedError: The conversation is known to be deleted.
        """
        self.refuse_deleted()
        working = self._working
        seen = attrs.evolve(
            self.committed,
            agent_name=self.active_agent_name,
            metadata=FrozenDict(self.values("metadata")),
            state=FrozenDict(self.values("state")),
            max_turns=self.max_turns,
            history=self.history,
            start=self.committed.start if working is None else working.start,
            service=self.committed.service if working is None else working.service,
        )
        return to_data(self.key, seen, for_client=for_client)

    @classmethod
    def from_dict(
        cls,
        data: Mapping[str, Any],
        *,
        owner: str = "",
        from_client: bool = False,
        agents: Agent | Iterable[Agent] | Mapping[str, Agent] = (),
        max_characters: int = DEFAULT_MAX_CHARACTERS,
    ) -> Self:
        """The conversation that `to_dict` gave, in a private in-memory store; *data* is neither changed nor kept.

        *data* is not trusted: what `to_dict` would not have given is refused, whatever it is, before there is a
        session. It is a dict, and all in it plain JSON. *owner* is whose session it must be.

        *from_client* says that a client sent it, as does its mark: it may then bring nothing that `to_dict` leaves out
        for one, and is *owner*'s. Its history, its state and the agent that answers next are the client's word.

        *agents* are those that may be active in it, and reach by handoffs whoever else may be, or a mapping of them by
        the names they are stored under. The first one answers for a name that nobody knows; the stored name stays.

        *max_characters* bounds what is read: each value counts as many as its text and its key have, and 32. Nesting
        ends where that of values ends.

        Raises:
            SessionFormatError: *data* is no such conversation, or is another owner's. The error names the path, and the
                session where *data* does.
            TypeError: Another argument is of a wrong type.
            ValueError: *max_characters* is below 1, or *owner* can't be an owner's name.
            HandoffError: Two different agents have one name.
        """
        check_owner(owner, may_be_empty=True)
        check_max_turns(max_characters, "max_characters")
        several, by_name = _agents(agents)
        key, snapshot = from_data(data, owner=owner, from_client=from_client, max_characters=max_characters)
        session = cls.__new__(cls)
        session.keep_alone(key, snapshot, next(iter(several), None))
        if several:
            session.store.set_agent_resolver(lambda name: by_name.get(name) or reach(*several).get(name))
        return session

    # --- what users do ---

    def turn(self, *, lease_seconds: float = DEFAULT_LEASE_SECONDS) -> TurnScope:
        """``async with session.turn():`` makes all that happens inside one commit.

        It waits for the conversation's turn (first come, first served, in every task, loop and process on the store),
        brings the session up to date, and commits at the end, durably. On an exception or a cancellation everything is
        as before, and the exception leaves as it is. What the block starts belongs to the turn; everyone else sees the
        last commit meanwhile.

        A turn whose process gives no sign of life for *lease_seconds*, since it was stopped or its event loop blocked,
        may be taken for gone by those who wait behind it; its commit then fails. Signs are given by the event loop, a
        third of the lease apart.

        Raises:
            ValueError: *lease_seconds* is not above 0.
            TurnInsideTurnError: At once, inside a turn of the same conversation, or where waiting would never end.
            SessionConflictError: At the end, if the turn was taken away; nothing was written.
        """
        return TurnScope(self, check_seconds("lease_seconds", lease_seconds))

    @property
    def lock(self) -> TurnScope:
        """``async with session.lock:`` is ``async with session.turn():``, for code that comes from chatflow-agent."""
        return TurnScope(self)

    async def add_message(self, message: Message) -> None:
        """Add *message*: in a turn to its commit, else as a turn of its own, durable on return.

        A message that pruning would drop at once, before any user message, is not stored, and a warning is logged.

        Raises:
            UnmatchedToolResultError: A result in it belongs to no call in the history; nothing changed.
        """
        async with self._own_turn() as working:
            working.add(message, self.session_id)

    async def set_active_agent(self, agent: Agent) -> None:
        """Let *agent* answer from now on; its name is what is stored."""
        if not isinstance(agent, Agent):
            raise TypeError(f"set_active_agent takes an Agent, not {type(agent).__name__}")
        async with self._own_turn() as working:
            working.hand_to(agent.name)
            self._agents[agent.name] = agent

    async def clear_history(self) -> None:
        """Remove all messages, system messages too. Agent, state and metadata stay."""
        async with self._own_turn() as working:
            working.clear()

    async def save(self) -> None:
        """Make changes of metadata and state that wait durable: an empty turn. In a turn, its commit will."""
        async with self._own_turn():
            pass

    def checkpoint(self) -> Checkpoint:
        """A token for `rollback_to`: this moment's history, agent, metadata and state.

        Raises:
            SessionConflictError: Outside a turn, of a session that has yet to read what is stored, or to create it.
        """
        turn, line = self.member_turn, self.store.line
        if turn is not None:
            return Checkpoint(turn.working.mark(), turn, self.key, line, turn.working.base.known, None)
        if self.known is None:
            raise SessionConflictError(
                session_id=self.session_id, reason="nothing of it has been read yet that one could go back to"
            )
        snapshot = attrs.evolve(
            self.committed,
            metadata=freeze_mapping(self.values("metadata"), "metadata"),
            state=freeze_mapping(self.values("state"), "state"),
        )
        token = Checkpoint(snapshot, None, self.key, line, self.committed.known, current_task())
        if self._checkpoints is None:
            self._checkpoints = weakref.WeakSet()
        self._checkpoints.add(token)
        return token

    async def rollback_to(self, checkpoint: Checkpoint | int) -> None:
        """Go back to exactly the state that *checkpoint* was taken in, also when turns were pruned since.

        Outside a turn this is a turn of its own. A length of `history` is taken too, as long as no message was pruned
        or moved to the front since it can have been taken.

        Raises:
            SessionConflictError: Outside a turn, somebody else's turn has committed since.
            ValueError: A length that no longer means the same messages, or was never reached.
        """
        async with self._own_turn() as working:
            if isinstance(checkpoint, Checkpoint):
                self._refuse_stale(checkpoint, working)
                working.restore(checkpoint.snapshot)
                if checkpoint.turn is None:
                    # Exactly what was stored, also where fewer turns are kept by now: the next turn prunes.
                    working.max_turns = max(working.max_turns, working.window.turns)
            else:
                self._refuse_meaningless(checkpoint, working)
                working.restore_length(checkpoint)

    def _own_turn(self) -> OwnTurn:
        return OwnTurn(self)

    def _prune_history(self) -> None:
        """Prune to whole turns. It runs by itself, with every message and commit, so there is nothing left to do."""

    def _refuse_stale(self, checkpoint: Checkpoint, working: Working) -> None:
        if checkpoint.turn is not None and checkpoint.turn is not self.member_turn:
            raise SessionConflictError(session_id=self.session_id, reason="the checkpoint is of a turn that has ended")
        if checkpoint.key != self.key or checkpoint.line is not self.store.line:
            raise SessionConflictError(
                session_id=self.session_id, reason="the checkpoint is of another conversation, or of another store"
            )
        if checkpoint.committed != working.base.known:
            raise SessionConflictError(
                session_id=self.session_id, reason="another turn has committed since the checkpoint was taken"
            )

    def _refuse_meaningless(self, length: object, working: Working) -> None:
        if not isinstance(length, int) or isinstance(length, bool):
            raise TypeError(f"rollback_to takes a checkpoint or a length of history, not {length!r}")
        if not 0 <= length <= len(working.history):
            raise ValueError(f"rollback_to: the history has {len(working.history)} messages, never {length}")
        if self._reshaped or not working.front_stays:
            raise ValueError(
                f"session {shorten(self.session_id)}: messages were pruned or moved to the front since {length} can"
                " have been the history's length; use a token of checkpoint()"
            )


class SessionContext(AgentSession):
    """One conversation with the agent that answers first: what stores hand out.

    Made on its own it lives in a private in-memory store. *metadata* is a mapping of values that can be kept, as
    messages' are.

    Raises:
        TypeError: *max_turns* is not an integer, or *session_id* not a string.
        ValueError: *max_turns* is below 1, or *session_id* empty.
        SessionStateError: *metadata* holds what can't be kept.
    """

    __slots__ = ()

    def __init__(
        self,
        session_id: str,
        initial_agent: Agent,
        max_turns: int = DEFAULT_MAX_TURNS,
        metadata: Mapping[str, Any] | None = None,
    ) -> None:
        check_max_turns(max_turns)
        if not isinstance(initial_agent, Agent):
            raise TypeError(f"initial_agent must be an Agent, not {type(initial_agent).__name__}")
        key = Key("", check_id(session_id, "session_id"))
        kept = _frozen(key, "metadata", metadata)
        begun = attrs.evolve(NOTHING_SEEN, agent_name=initial_agent.name, metadata=kept, max_turns=max_turns)
        self.keep_alone(key, begun, initial_agent)


def _frozen(key: Key, kind: Kind, values: Mapping[str, Any] | None) -> FrozenDict:
    try:
        return freeze_mapping({} if values is None else values, kind)
    except UnstorableValueError as error:
        raise SessionStateError(session_id=key.session_id, path=error.path, reason=error.reason) from error


def _agents(agents: Agent | Iterable[Agent] | Mapping[str, Agent]) -> tuple[tuple[Agent, ...], dict[str, Agent]]:
    """The agents, and those that a mapping gives other names."""
    by_name: dict[str, Agent] = {}
    several: tuple[Agent, ...]
    if isinstance(agents, Agent):
        several = (agents,)
    elif isinstance(agents, Mapping):
        by_name.update(cast("Mapping[str, Agent]", agents))
        several = tuple(by_name.values())
    else:
        several = tuple(agents)
    for agent in several:
        if not isinstance(agent, Agent):
            raise TypeError(f"agents must be agents, not {type(agent).__name__}")
    reach(*several)
    return several, by_name


def begin_session(
    agent: Agent,
    session_id: str | None,
    store: BaseSessionStore | None,
    *,
    service: ServiceSession | None = None,
    max_turns: int | None = None,
    expires_after: dt.timedelta | float | None = None,
) -> SessionContext:
    """A session with *agent* that is not written before its first turn, in *store* or in one of its own."""
    if store is not None and not isinstance(getattr(store, "owner", None), str):
        raise TypeError(f"store must be a session store, not {shorten(store)}")
    begun = attrs.evolve(
        NOTHING_SEEN,
        agent_name=agent.name,
        max_turns=None if max_turns is None else check_max_turns(max_turns),
        expires_after=None if expires_after is None else check_span("expires_after", expires_after),
        service=service,
    )
    id_ = new_session_id() if session_id is None else check_id(session_id, "session_id")
    if store is None:
        session = SessionContext.__new__(SessionContext)
        session.keep_alone(Key("", id_), begun, agent)
        return session
    new = NewSession(
        agent_name=agent.name,
        metadata=begun.metadata,
        max_turns=begun.max_turns,
        service=service,
        expires_after=begun.expires_after,
    )
    return SessionContext.of_store(store.backend, store.key_of(id_), begun, agent=agent, new=new)
