"""A process of the model: one store, one runner, its slots, its sessions, and who waits in it."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import TypeVar

import attrs

from chatflow.core.records import (
    Key,
    NewSession,
    Snapshot,
)
from chatflow.core.values import EMPTY
from tests.model.ledger import Ledger
from tests.model.signs import Beats
from tests.model.simulator import Cancelled, Flow, Machine, Pause, Signal, Simulator
from tests.model.storage import Storage

_T = TypeVar("_T")


class Told(Exception):  # noqa: N818  # what a caller is told
    """An error of the library, or of the work itself, that the caller sees."""

    def __init__(self, what: str, whose: str | None = None) -> None:
        super().__init__(what)
        self.what = what
        self.whose = whose


class Failed(Told):
    """The work failed."""


@attrs.frozen
class Habits:
    """What the flow does since a rule says so."""

    beats_queued: bool = True
    watches_line: bool = True
    watches_duplicates: bool = True
    worker_watches: bool = True
    looks: bool = True
    queues_again: bool = True
    slot_at_head: bool = True
    slot_given_back: bool = True
    timeout_from_start: bool = True
    tells_others_errors: bool = False
    cancelled_keeps_work: bool = False
    journal_of_states: bool = False
    duplicates_try_again: bool = True
    compares_texts: bool = True
    keeps_failed_work: bool = True


ALL_HABITS = Habits()
"""Every rule holds."""


@attrs.define(eq=False)
class Shared:
    """What all processes of a schedule share."""

    simulator: Simulator
    storage: Storage
    ledger: Ledger
    random: random.Random
    habits: Habits
    max_attempts: int
    turn_timeout: float
    latency: float
    """The most that an operation waits for the storage."""
    processes: dict[str, Process] = attrs.field(factory=dict)
    names: int = 0
    stalled_from: float = 0.0
    stalled_until: float = 0.0
    """Somebody else holds the storage."""
    calm: bool = False
    """Nothing is disturbed any more."""
    dies: Callable[[Process], None] = lambda process: None


@attrs.define(eq=False)
class Session:
    """A process's handle on a conversation."""

    key: Key
    snapshot: Snapshot
    is_deleted: bool = False


class Slots:
    """Turns that run at once in a process."""

    def __init__(self, total: int) -> None:
        self.free = total
        self.waiting: list[Signal] = []

    def release(self) -> None:
        """The first who waits has it."""
        if self.waiting:
            self.waiting.pop(0).fire()
        else:
            self.free += 1


@attrs.define(eq=False)
class Slot:
    """The slot of a run, and of the runs inside it."""

    slots: Slots
    users: int = 0
    held: bool = False

    def hold(self) -> Flow[None]:
        """Have it."""
        if self.held:
            return
        if self.slots.free:
            self.slots.free -= 1
        else:
            signal = Signal()
            self.slots.waiting.append(signal)
            try:
                yield from signal.wait(math.inf)
            except Cancelled:
                if signal in self.slots.waiting:
                    self.slots.waiting.remove(signal)
                else:
                    self.slots.release()
                raise
        if self.held:
            self.slots.release()
        self.held = True

    def give_back(self) -> None:
        """Let another have it."""
        if self.held:
            self.held = False
            self.slots.release()


class Process(Machine):
    """A process: one store, one runner."""

    def __init__(self, shared: Shared, name: str, agent: str, lease: float, slots: int) -> None:
        super().__init__()
        self.shared = shared
        self.name = self.holder = name
        self.agent = agent
        self.lease = lease
        self.slots = Slots(slots)
        self.sessions: dict[Key, Session] = {}
        self.waiters: dict[int, list[Signal]] = {}
        self.called_early: set[int] = set()
        self.for_work: list[Signal] = []
        self.in_order: dict[Key, list[Signal]] = {}
        self.slow_until = 0.0
        self.disturbed_at = -math.inf
        self.beats: Beats = Beats(self)
        shared.simulator.spawn(self.beats.run(), self, f"{name} beats")

    def __repr__(self) -> str:
        return self.name

    def op(self, function: Callable[[], _T]) -> Flow[_T]:
        """One atomic operation: before it, and before its answer is there, the process may be killed or paused."""
        yield Pause(self.shared.random.random() * self.shared.latency, shielded=True)
        while self.shared.stalled_until > self.shared.simulator.now:
            # Who waits for the storage is not served in order.
            wait = self.shared.stalled_until - self.shared.simulator.now + self.shared.random.random() * 0.3
            yield Pause(wait, shielded=True)
        result = function()
        yield Pause(self.shared.random.random() * 0.005, shielded=True)
        return result

    def ended(self, turn_id: int | None, next_turn: int | None) -> None:
        """Wake who waits for the end of one row, and whose place has come with it, who may not wait yet."""
        if next_turn is not None and not self.waiters.get(next_turn):
            self.called_early.add(next_turn)
        self.wake(turn_id, next_turn)

    def wake(self, *turn_ids: int | None) -> None:
        """Wake who waits for one of these rows."""
        for turn_id in turn_ids:
            for signal in self.waiters.get(turn_id or 0, ()):
                signal.fire()

    def wake_all(self) -> None:
        """Wake everybody."""
        self.wake(*self.waiters)
        self.wake_workers()

    def wake_workers(self) -> None:
        """Wake the workers."""
        for signal in self.for_work:
            signal.fire()

    def session(self, key: Key) -> Flow[Session]:
        """Get or create."""
        new = NewSession(agent_name=self.agent, metadata=EMPTY, max_turns=None)
        snapshot = yield from self.op(lambda: self.shared.storage.create(self.holder, key, new))
        return self.hand_out(key, snapshot)

    def hand_out(self, key: Key, snapshot: Snapshot) -> Session:
        """The handle that this process has on that conversation."""
        known = self.sessions.get(key)
        if known is None or known.is_deleted or known.snapshot.session_key != snapshot.session_key:
            if known is not None:
                known.is_deleted = True
            known = self.sessions[key] = Session(key, snapshot)
        return known
