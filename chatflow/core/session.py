"""SessionContext: one conversation, as the code that answers in it sees it.

One class with all that users call on a conversation, which is why it is long.
"""

from __future__ import annotations

import asyncio
import logging
import weakref
from collections.abc import Iterable, Mapping, MutableMapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Final

import attrs

from chatflow.core.agent import Agent
from chatflow.core.beats import DEFAULT_LEASE_SECONDS
from chatflow.core.history import EMPTY_HISTORY, History
from chatflow.core.journal import Deed, recording
from chatflow.core.membership import open_turns, refuse_left_over
from chatflow.core.messages import Message
from chatflow.core.pruning import Window, check_max_turns
from chatflow.core.records import Key, Known, NewSession, Snapshot, check_id, check_seconds
from chatflow.core.scopes import OwnTurn, TurnScope
from chatflow.core.state import Values
from chatflow.core.turn import Turn
from chatflow.core.values import EMPTY, freeze_mapping
from chatflow.core.working import REMOVED, Change, Kind, Working, with_changes
from chatflow.exceptions import (
    SessionConflictError,
    SessionDeletedError,
    SessionStateError,
    UnstorableValueError,
    shorten,
)

if TYPE_CHECKING:
    from chatflow.core.store import BaseSessionStore

logger = logging.getLogger("chatflow.session")

DEFAULT_MAX_TURNS: Final = 40


@attrs.define(eq=False)
class Checkpoint:
    """A conversation at one moment, to go back to. `SessionContext.checkpoint` makes it."""

    snapshot: Snapshot
    turn: Turn | None = attrs.field(repr=False)
    """The turn it was taken in, and is good for; None outside."""
    committed: Known = attrs.field(repr=False)
    """Outside a turn, the commit it is good for: the running task's own operations carry it along."""
    task: weakref.ref[asyncio.Task[Any]] | None = attrs.field(repr=False)


class SessionContext:
    """One conversation: its history, the agent that answers, metadata and state.

    Made by a store, or on its own: then it lives in a private in-memory store. *metadata* is a mapping of values that
    can be kept, as messages' are. Every awaited method raises `SessionDeletedError` once the conversation was deleted.

    Raises:
        TypeError: *max_turns* is not an integer, or *session_id* not a string.
        ValueError: *max_turns* is below 1, or *session_id* empty.
        SessionStateError: *metadata* holds what can't be kept.
    """

    __slots__ = (
        "__weakref__",
        "_agents",
        "_checkpoints",
        "_fallback",
        "_known_unknowns",
        "_reshaped",
        "_window",
        "committed",
        "deleted",
        "key",
        "new",
        "pending",
        "store",
    )
    committed: Snapshot
    new: NewSession | None

    def __init__(
        self,
        session_id: str,
        initial_agent: Agent,
        max_turns: int = DEFAULT_MAX_TURNS,
        metadata: Mapping[str, Any] | None = None,
    ) -> None:
        # A session of its own needs a store, and the store's module needs this one.
        from chatflow.core.memory import SessionStore

        check_max_turns(max_turns)
        if not isinstance(initial_agent, Agent):
            raise TypeError(f"initial_agent must be an Agent, not {type(initial_agent).__name__}")
        self._set_up(SessionStore(), Key("", check_id(session_id, "session_id")), initial_agent)
        frozen = self.freeze_values("metadata", metadata or {})
        self.new = NewSession(agent_name=initial_agent.name, metadata=frozen, max_turns=max_turns)
        self.committed = Snapshot(
            session_key=0,
            version=0,
            agent_name=initial_agent.name,
            metadata=frozen,
            state=EMPTY,
            max_turns=max_turns,
            history=EMPTY_HISTORY,
            start=0,
            system_start=0,
        )

    @classmethod
    def of_store(cls, store: BaseSessionStore, key: Key, snapshot: Snapshot) -> SessionContext:
        """The session that *store* hands out."""
        session = cls.__new__(cls)
        cls._set_up(session, store, key, None)
        session.committed = snapshot
        return session

    def _set_up(self, store: BaseSessionStore, key: Key, fallback: Agent | None) -> None:
        self.store = store
        self.key = key
        self.new = None
        self.deleted = False
        self.pending: dict[Kind, dict[str, Change]] = {"metadata": {}, "state": {}}
        self._fallback = fallback
        self._agents: dict[str, Agent] = {}
        self._known_unknowns: set[str] = set()
        self._window: Window | None = None
        self._checkpoints: weakref.WeakSet[Checkpoint] | None = None
        self._reshaped = False

    # --- what users read ---

    @property
    def session_id(self) -> str:
        """The conversation's id."""
        return self.key.session_id

    @property
    def max_turns(self) -> int:
        """How many turns a commit keeps: the session's own number, or the store's."""
        own = self.committed.max_turns
        return self.store.default_max_turns if own is None else own

    @property
    def history(self) -> History:
        """The messages: in a turn its members' working copy, else the last commit. A snapshot; it never changes."""
        working = self._working
        return self.committed.history if working is None else working.history

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
        """
        name = self.active_agent_name
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
            f"<SessionContext {shorten(self.session_id)} agent={shorten(self.active_agent_name)}"
            f" messages={len(self.history)}>"
        )

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
        """A token for `rollback_to`: this moment's history, agent, metadata and state."""
        turn = self.member_turn
        if turn is not None:
            return Checkpoint(turn.working.mark(), turn, self.committed.known, None)
        snapshot = attrs.evolve(
            self.committed,
            metadata=freeze_mapping(self.values("metadata"), "metadata"),
            state=freeze_mapping(self.values("state"), "state"),
        )
        token = Checkpoint(snapshot, None, self.committed.known, _current_task())
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
            else:
                self._refuse_meaningless(checkpoint, working)
                working.restore_length(checkpoint)

    def _prune_history(self) -> None:
        """Prune to whole turns. It runs by itself, with every message and commit, so there is nothing left to do."""

    def _refuse_stale(self, checkpoint: Checkpoint, working: Working) -> None:
        if checkpoint.turn is not None and checkpoint.turn is not self.member_turn:
            raise SessionConflictError(session_id=self.session_id, reason="the checkpoint is of a turn that has ended")
        if checkpoint.committed != working.base.known and checkpoint.committed.session_key:
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

    # --- what the turn and the store do with it ---

    @property
    def member_turn(self) -> Turn | None:
        """The open turn of this conversation that the running code belongs to."""
        # Not the one that runs now: a turn that was overtaken keeps its members until it ends.
        return next((turn for turn in open_turns() if turn.session is self), None)

    @property
    def _working(self) -> Working | None:
        turn = self.member_turn
        return None if turn is None else turn.working

    def _own_turn(self) -> OwnTurn:
        return OwnTurn(self)

    @property
    def known(self) -> Snapshot | None:
        """What this object has seen of the storage; None for a conversation that does not exist yet."""
        return self.committed if self.committed.session_key else None

    def values(self, kind: Kind) -> Mapping[str, Any]:
        """Metadata or state as the running code sees it."""
        working = self._working
        if working is not None:
            return working.values[kind]
        committed: Mapping[str, Any] = getattr(self.committed, kind)
        pending = self.pending[kind]
        return with_changes(committed, pending) if pending else committed

    def freeze_values(self, kind: Kind, values: Mapping[str, Any]) -> Any:
        """Frozen copies of *values*, or `SessionStateError`."""
        try:
            return freeze_mapping(values, kind)
        except UnstorableValueError as error:
            raise SessionStateError(session_id=self.session_id, path=error.path, reason=error.reason) from error

    def set_value(self, kind: Kind, key: str, value: Any) -> None:
        """Set or remove one key, in the turn the running code belongs to, or to wait for the next one."""
        working = self._working
        if working is None:
            refuse_left_over(self)
            self.pending[kind][key] = Change(value)
        else:
            working.set(kind, key, value)

    def recording(self) -> AbstractContextManager[list[Deed]]:
        """What the code inside does to the turn that the running code belongs to."""
        return recording(self._working)

    def redo(self, deeds: Iterable[Deed]) -> None:
        """Do again what a tool did in an attempt of this turn that did not commit."""
        working = self._working
        assert working is not None
        working.redo(deeds, self.session_id)

    def _replace_values(self, kind: Kind, values: Mapping[str, Any]) -> None:
        frozen = self.freeze_values(kind, values)
        for key in self.values(kind).keys() - frozen.keys():
            self.set_value(kind, key, REMOVED)
        for key, value in frozen.items():
            self.set_value(kind, key, value)

    def show(self, snapshot: Snapshot, *, front_stays: bool | None = None) -> None:
        """Take *snapshot* for the last commit, unless a newer one is known.

        *front_stays* says whether a length of the history means the same messages as before; None: see for yourself.
        """
        before = self.committed
        if before.session_key == snapshot.session_key and snapshot.version <= before.version:
            return
        if front_stays is None:
            both_empty = not before.history.body_length and not snapshot.history.body_length
            front_stays = not before.session_key or (
                (both_empty or snapshot.start == before.start)
                and snapshot.history.system_count == before.history.system_count
            )
        self._reshaped = self._reshaped or not front_stays
        self.new = None
        self.committed = snapshot
        self._window = None

    def answer_with(self, fallback: Agent) -> None:
        """Let *fallback* answer, and those it can hand over to, where no agent of the stored name is known."""
        self._fallback = fallback

    def take_window(self) -> Window:
        """The committed messages, for one turn to go on from."""
        window, self._window = self._window, None
        return window or Window.of(self.committed.history, self.committed.start)

    def keep_window(self, window: Window) -> None:
        """Keep what a turn has left, which is what was committed, for the next turn."""
        self._window = window

    def settle(self, applied: Mapping[Kind, Mapping[str, Change]]) -> None:
        """Drop the waiting changes that a commit has made durable."""
        for kind, changes in applied.items():
            waiting = self.pending[kind]
            for key, change in changes.items():
                if waiting.get(key) is change:
                    del waiting[key]

    def follow(self, before: Known) -> None:
        """Let the running task's checkpoints outlast a commit of its own operation."""
        task = _current_task()
        for token in self._checkpoints or ():
            if token.task == task and token.committed == before:
                token.committed = self.committed.known

    def refuse_deleted(self) -> None:
        """Raise `SessionDeletedError` if the conversation is known to be deleted."""
        if self.deleted:
            raise SessionDeletedError(session_id=self.session_id)

    def mark_deleted(self) -> SessionDeletedError:
        """Note that the conversation is gone, and return the error that says so."""
        self.deleted = True
        return SessionDeletedError(session_id=self.session_id)


def _current_task() -> weakref.ref[asyncio.Task[Any]] | None:
    # By reference and not by id, which another task may have once this one is gone.
    try:
        task = asyncio.current_task()
    except RuntimeError:
        return None
    return None if task is None else weakref.ref(task)
