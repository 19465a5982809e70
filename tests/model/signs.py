"""The signs of life of one process, and what it watches: the flow of core/beats.py around its real `Watch`."""

from __future__ import annotations

import math
from collections import Counter
from typing import TYPE_CHECKING

from chatflow.core.beats import Watch
from chatflow.core.records import (
    Beat,
    Beaten,
)
from tests.model.simulator import Flow, Pause, Signal

if TYPE_CHECKING:
    from tests.model.process import Process
    from tests.model.turn import Turn

PARTS = 3
CLOSEST = 0.1
"""As in core/beats.py."""


class Beats:
    """The signs of life of one process, and what it watches."""

    def __init__(self, process: Process) -> None:
        self.process = process
        self.held: dict[int, Turn] = {}
        self.signs: dict[int, float] = {}
        self.watched: Counter[int] = Counter()
        self.everything = 0
        self.watch = Watch()
        self.signal = Signal()
        self.soon = math.inf
        self.seen: dict[tuple[int, int], float] = {}

    def hold(self, turn: Turn) -> None:
        """Beat the turn's row."""
        assert turn.turn_id is not None
        if self.held.get(turn.turn_id) is not turn:
            self.signs[turn.turn_id] = self.process.shared.simulator.now
        self.held[turn.turn_id] = turn
        self.signal.fire()

    def release(self, turn_id: int, turn: Turn) -> None:
        """The row is gone, or somebody else's."""
        if self.held.get(turn_id) is turn:
            del self.held[turn_id]

    def look_soon(self) -> None:
        """Watch what is before those held."""
        self.soon = self.process.shared.simulator.now
        self.signal.fire()

    def run(self) -> Flow[None]:
        """Beat as long as there is anything to beat or to watch."""
        last = -math.inf
        time = self.process.shared.simulator
        while True:
            if not (self.held or +self.watched or self.everything):
                self.seen.clear()
                yield from self.signal.wait(math.inf)
                self.soon = time.now if self.everything or +self.watched else self.soon
                last = max(last, time.now - self._distance() * 0.9)
                continue
            due = max(min(self.soon, last + self._distance(), self._due()), last + self._distance() * CLOSEST)
            if due > time.now:
                yield from self.signal.wait(due - time.now)
                continue
            self.soon = math.inf
            yield from self._beat()
            last = time.now

    def _due(self) -> float:
        due = self.watch.due()
        return math.inf if due is None else due

    def _distance(self) -> float:
        leases = [turn.lease for turn in self.held.values()]
        return min((*leases, *([self.process.lease] if self.everything else ())), default=self.process.lease) / PARTS

    def _beat(self) -> Flow[None]:
        process, shared = self.process, self.process.shared
        habits, time = shared.habits, shared.simulator
        if process.slow_until > time.now:
            yield Pause(process.slow_until - time.now, shielded=True)
        asked = time.now
        held = {turn_id: (turn, turn.attempt) for turn_id, turn in self.held.items()}
        beaten_ids = frozenset(
            turn_id for turn_id, (turn, _) in held.items() if habits.beats_queued or turn.is_open or turn.hands_on
        )
        beaten = yield from process.op(lambda: self._beat_now(beaten_ids))
        for turn_id, (turn, before) in held.items():
            attempt = beaten.own.get(turn_id)
            if turn_id not in beaten_ids:
                continue
            is_lost = attempt is None or (turn.is_open and attempt != before)
            if is_lost and turn.attempt == before and self.held.get(turn_id) is turn:
                self.release(turn_id, turn)
                process.wake_all()
        others = beaten.others
        if not (habits.watches_line or self.everything):
            others = tuple(beat for beat in others if self.watched[beat.turn_id] > 0)
        for beat in self.watch.look(others, time.now, asked=asked):
            done = yield from process.op(lambda beat=beat: self._interrupt(beat))  # type: ignore[misc]
            if done:
                process.wake_all()
        self._check_recovery(beaten.others)

    def _beat_now(self, held: frozenset[int]) -> Beaten:
        shared = self.process.shared
        watched = frozenset(+self.watched if shared.habits.watches_duplicates else ())
        everything = self.everything > 0 and shared.habits.worker_watches
        beaten = shared.storage.beat(self.process.holder, held, watched, everything=everything)
        self.signs.update(dict.fromkeys(beaten.own, shared.simulator.now))
        return beaten

    def _interrupt(self, beat: Beat) -> bool:
        shared = self.process.shared
        row = shared.storage.find(beat.turn_id)
        if not shared.storage.interrupt(self.process.holder, beat):
            return False
        assert row is not None
        shared.ledger.changed[row.session_key] = shared.simulator.now
        shared.ledger.say(f"{self.process} interrupts turn {row.turn_id} of {row.holder}")
        holder = shared.processes[row.holder or ""]
        turn = holder.beats.held.get(row.turn_id)
        if holder.alive and turn is not None:
            sign, now = holder.beats.signs[row.turn_id], shared.simulator.now
            silent = now - sign - max(0.0, min(now, shared.stalled_until) - max(sign, shared.stalled_from))
            if silent <= turn.lease:
                raise shared.ledger.fail(
                    "robbed", f"turn {row.turn_id} was taken from {holder} after {silent:.2f} s; lease {turn.lease} s"
                )
        return True

    def _check_recovery(self, others: tuple[Beat, ...]) -> None:
        """A dead holder is found out within one and a half leases of first being seen."""
        process, shared = self.process, self.process.shared
        time = shared.simulator
        before, self.seen = self.seen, {}
        for beat in others:
            row = shared.storage.find(beat.turn_id)
            if row is None or row.attempt != beat.attempt or row.holder is None or shared.processes[row.holder].alive:
                continue
            first = before.get((beat.turn_id, beat.attempt), time.now)
            first = first if first > process.disturbed_at else time.now
            self.seen[beat.turn_id, beat.attempt] = first
            # A watcher of a longer lease beats less densely, and comes a little late each time.
            late = 4 * CLOSEST * max(0.0, self._distance() - beat.lease_seconds / PARTS)
            if time.now - first > 1.5 * beat.lease_seconds + 10 * shared.latency + late:
                raise shared.ledger.fail("recovery", f"{process} waits {time.now - first:.2f} s for dead {row.holder}")
