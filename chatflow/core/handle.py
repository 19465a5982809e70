"""A session as the turn and the store use it: a handle on the last commit, and what waits beside that.

Users see `AgentSession`, which adds what they call.
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import attrs

from chatflow.core.agent import Agent
from chatflow.core.journal import Deed, recording
from chatflow.core.line import Line
from chatflow.core.membership import open_turns, refuse_left_over
from chatflow.core.messages import Message
from chatflow.core.pruning import Window
from chatflow.core.records import Key, Known, NewSession, Seen, Snapshot
from chatflow.core.values import freeze_mapping
from chatflow.core.working import REMOVED, Change, Kind, Working, with_changes, with_inner
from chatflow.exceptions import SessionDeletedError, SessionStateError, UnstorableValueError

if TYPE_CHECKING:
    from chatflow.core.backend import StoreBackend
    from chatflow.core.turn import Turn


@attrs.define(eq=False)
class Checkpoint:
    """A conversation at one moment, to go back to. `SessionContext.checkpoint` makes it."""

    snapshot: Snapshot
    turn: Turn | None = attrs.field(repr=False)
    """The turn it was taken in, and is good for; None outside."""
    key: Key
    line: Line = attrs.field(repr=False)
    """Of the storage that it was taken in: numbers of commits mean something there alone."""
    committed: Known = attrs.field(repr=False)
    """Outside a turn, the commit it is good for: the running task's own operations carry it along."""
    task: weakref.ref[asyncio.Task[Any]] | None = attrs.field(repr=False)


class Handle:
    """One conversation in one event loop: what of it is committed, and what waits for a turn."""

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
        "no_room",
        "pending",
        "repairs_told",
        "store",
    )
    committed: Snapshot
    new: NewSession | None
    no_room: dict[str, tuple[Message, ...]]
    """By agent, what its model's provider had no room for: a later turn begins with what fitted."""
    repairs_told: frozenset[str]
    """What was logged as repaired for a model: a repair comes with each request that the fault is in."""

    def set_up(
        self,
        store: StoreBackend,
        key: Key,
        committed: Snapshot,
        fallback: Agent | None,
        new: NewSession | None = None,
    ) -> None:
        """Make it a handle on that conversation, last seen as *committed*; *fallback* answers for unknown agents.

        *new* says how the conversation begins where its first turn is to create it.
        """
        self.store = store
        self.key = key
        self.committed = committed
        self.new = new
        self.deleted = False
        self.pending: dict[Kind, dict[str, Change]] = {"metadata": {}, "state": {}}
        self.no_room = {}
        self.repairs_told = frozenset()
        self._fallback = fallback
        self._agents: dict[str, Agent] = {}
        self._known_unknowns: set[str] = set()
        self._window: Window | None = None
        self._checkpoints: weakref.WeakSet[Checkpoint] | None = None
        self._reshaped = False

    @property
    def session_id(self) -> str:
        """The conversation's id."""
        return self.key.session_id

    @property
    def member_turn(self) -> Turn | None:
        """The open turn of this conversation that the running code belongs to."""
        # Not the one that runs now: a turn that was overtaken keeps its members until it ends.
        for turn in open_turns():
            if turn.session is self:
                return turn
        return None

    @property
    def _working(self) -> Working | None:
        turn = self.member_turn
        return None if turn is None else turn.working

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

    def set_inside(self, key: str, inner: str, value: Any) -> None:
        """Set or remove one key of the mapping that the state has under *key*, as `set_value` does with a whole key."""
        working = self._working
        if working is None:
            refuse_left_over(self)
            self.pending["state"][key] = Change(with_inner(self.values("state").get(key), inner, value))
        else:
            working.set_inside(key, inner, value)

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
            # Whoever has read nothing yet knows no length of the history.
            front_stays = (both_empty or (bool(before.session_key) and snapshot.start == before.start)) and (
                snapshot.history.system_count == before.history.system_count
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

    def keep_window(self, window: Window, snapshot: Snapshot) -> None:
        """Keep *window*, which a turn has left and which holds the messages of *snapshot*, for the next turn.

        Not where *snapshot* is not the last commit that is known here: metadata may have been merged beside the turn,
        somebody may have overtaken it, and what has come after its commit may have been shown before it. The messages
        are others then, or stand at other positions, and what a turn adds to the wrong window is lost.
        """
        if snapshot is self.committed:
            self._window = window

    def settle(self, applied: Mapping[Kind, Mapping[str, Change]]) -> None:
        """Drop the waiting changes that a commit has made durable."""
        for kind, changes in applied.items():
            waiting = self.pending[kind]
            for key, change in changes.items():
                if waiting.get(key) is change:
                    del waiting[key]

    def follow(self, before: Known, after: Known) -> None:
        """Let the running task's checkpoints outlast *after*, the commit of its own operation, which followed *before*.

        Not over the last commit that is known here, which may be somebody else's by now.
        """
        task = current_task()
        for token in self._checkpoints or ():
            if token.task == task and token.committed == before:
                token.committed = after

    async def catch_up(self) -> None:
        """Take note of what others have committed. One that is yet to be created has nothing to be noted.

        Raises:
            SessionDeletedError: The conversation was deleted.
        """
        self.refuse_deleted()
        known = self.known
        found = await self.store.load_session(self.key, known)
        if known is not None and (
            found is Seen.ABSENT or (isinstance(found, Snapshot) and found.session_key != known.session_key)
        ):
            raise self.mark_deleted()
        if isinstance(found, Snapshot):
            self.show(found)

    def refuse_deleted(self) -> None:
        """Raise `SessionDeletedError` if the conversation is known to be deleted."""
        if self.deleted:
            raise SessionDeletedError(session_id=self.session_id)

    def mark_deleted(self) -> SessionDeletedError:
        """Note that the conversation is gone, and return the error that says so."""
        self.deleted = True
        return SessionDeletedError(session_id=self.session_id)


def current_task() -> weakref.ref[asyncio.Task[Any]] | None:
    """The running task, if there is one."""
    # By reference and not by id, which another task may have once this one is gone.
    try:
        task = asyncio.current_task()
    except RuntimeError:
        return None
    return None if task is None else weakref.ref(task)
