"""A turn, from its place to its commit: the flow of core/turn.py around the storage's real operations."""

from __future__ import annotations

import math
from contextlib import ExitStack

import attrs

from chatflow import AgentResponse
from chatflow.core.journal import Entry
from chatflow.core.records import (
    Answered,
    Claim,
    Commit,
    Committed,
    Cycle,
    Dead,
    InProgress,
    Leaving,
    Lost,
    Place,
    Ticket,
    Work,
)
from chatflow.core.rows import WAITING, End, State
from chatflow.core.values import FrozenDict
from tests.model.ledger import Message
from tests.model.process import Process, Session, Slot, Told
from tests.model.simulator import Cancelled, Flow, Pause, Signal

LOOK_BEHIND_OTHERS = 0.25
LOOK_BEHIND_OWN = 5.0
"""As in core/turn.py."""


class Turn:
    """One turn of one conversation."""

    def __init__(
        self, process: Process, session: Session, claim: Claim | None, agent: str | None, outer: tuple[Turn, ...] = ()
    ) -> None:
        self.process = process
        self.shared = process.shared
        self.session = session
        self.claim = claim
        self.agent = agent
        self.outer = outer
        self.lease = process.lease
        self.max_attempts = None if agent is None else process.shared.max_attempts
        self.turn_id: int | None = None
        self.attempt = 0
        self.journal: tuple[Entry, ...] = ()
        self.work: Work | None = None
        self.hands_on = False
        self.is_open = False
        self.left: State | None = None
        self.first: Turn | None = None
        self.place: Place | None = None
        self.waiting_since = 0.0
        self.base = session.snapshot
        self.state: dict[str, object] = {}
        self.slot: Slot | None = None
        self.begun_at = 0.0
        self.queued_at = self.shared.simulator.now
        self.disturbed_at = -math.inf
        self.shared.names += 1
        self.name = f"t{self.shared.names}" if claim is None else claim.message_id

    @classmethod
    def of_work(cls, process: Process, session: Session, work: Work) -> Turn:
        """The turn of a row that was taken."""
        turn = cls(process, session, work.claim, work.turn.agent_name)
        turn.work = work
        turn._hold(work.turn.turn_id, work.attempt)
        return turn

    # --- its place ---

    def take(self) -> Flow[Answered | Turn | None]:
        """Wait for the place, and begin."""
        if any(turn.is_open and turn.session.key == self.session.key for turn in self.outer):
            raise Told("turn inside turn")
        try:
            found = yield from self._place()
            if isinstance(found, Answered):
                return found
        except (Told, Cancelled) as error:
            if self.first is not None:
                yield from self.first.let_go()
            yield from self._leave(self._end_by(error), hold=self.hands_on)
            raise
        first, self.first = self.first, None
        if first is None:
            self.begin(found)
        else:
            first.place = found
        return first

    def _place(self) -> Flow[Place | Answered]:
        process, habits = self.process, self.shared.habits
        with ExitStack() as watching:
            while True:
                if self.session.is_deleted:
                    raise Told("deleted")
                if self.turn_id is not None:
                    running = yield from self._wait_for_place(None)
                    if running is not None:
                        return running
                found = yield from process.op(self._queue)
                if isinstance(found, Place):
                    running = yield from self._wait_for_place(found)
                    if running is not None:
                        return running
                    continue
                self._refuse(found)
                if isinstance(found, Answered):
                    return found
                assert isinstance(found, InProgress)
                if not found.held:
                    raise Told("in progress")
                watching.close()
                process.beats.watched[found.turn_id] += 1
                watching.callback(process.beats.watched.subtract, {found.turn_id: 1})
                process.beats.look_soon()
                yield from self._wait_for_end(found)
                if not habits.duplicates_try_again:
                    raise Told("in progress")

    def _refuse(self, found: Answered | InProgress | Dead | Cycle | Lost) -> None:
        if isinstance(found, Lost):
            raise self._lost(found)
        if isinstance(found, Cycle):
            raise Told("turn inside turn")
        assert self.claim is not None
        if self.shared.habits.compares_texts and found.digest not in {None, self.claim.digest}:
            raise Told("mismatch")
        if isinstance(found, Dead):
            self.process.wake_all()
            raise Told("dead")

    def _queue(self) -> Place | Answered | InProgress | Dead | Cycle | Lost:
        shared = self.shared
        ticket = Ticket(
            key=self.session.key,
            known=self.session.snapshot,
            new=None,
            agent_name=self.agent,
            claim=self.claim,
            ancestors=tuple(turn.turn_id for turn in self.outer if turn.is_open and turn.turn_id is not None),
            lease_seconds=self.lease,
            max_attempts=self.max_attempts,
        )
        found = shared.storage.queue(self.process.holder, ticket)
        message = self._message()
        if isinstance(found, Place):
            if message is not None:
                shared.ledger.arrived(message)
            self._note_place(found)
        elif isinstance(found, Dead) and message is not None and self.claim and found.digest == self.claim.digest:
            shared.ledger.died(message)
        return found

    def _note_place(self, place: Place) -> None:
        self._hold(place.turn_id, place.attempt)
        if place.work is not None:
            self.first = Turn.of_work(self.process, self.session, place.work)
        if place.running:
            starts = self.first or self
            assert starts.turn_id is not None
            self.shared.ledger.say(f"{self.process} starts turn {starts.turn_id} {starts.name} by {self.name}")
            self.shared.ledger.started(starts.turn_id, self.session.key, self.process.agent)

    def _message(self) -> Message | None:
        return None if self.claim is None else self.shared.ledger.messages.get((self.session.key, self.name))

    def _hold(self, turn_id: int, attempt: int) -> None:
        self.turn_id, self.attempt = turn_id, attempt
        self.process.beats.hold(self)

    def _release(self) -> int | None:
        turn_id, self.turn_id = self.turn_id, None
        if turn_id is not None:
            self.process.beats.release(turn_id, self)
        return turn_id

    def _waiting(self, turn_id: int, stack: ExitStack) -> Signal:
        signal, waiters = Signal(), self.process.waiters
        waiters.setdefault(turn_id, []).append(signal)
        stack.callback(lambda: waiters[turn_id].remove(signal))
        stack.callback(self.process.called_early.discard, turn_id)
        signal.is_set = turn_id in self.process.called_early
        return signal

    def _wait_for_end(self, found: InProgress) -> Flow[None]:
        self._let_go_of_slots()
        with ExitStack() as stack:
            signal = self._waiting(found.turn_id, stack)
            held = yield from self.process.op(lambda: self.shared.storage.is_held(self.process.holder, found.turn_id))
            if held:
                yield from signal.wait(LOOK_BEHIND_OTHERS)

    def _wait_for_place(self, place: Place | None) -> Flow[Place | None]:
        if place is not None and place.running:
            return place
        turn_id = self.turn_id
        assert turn_id is not None
        self._let_go_of_slots()
        self.waiting_since = self.shared.simulator.now
        with ExitStack() as stack:
            signal = self._waiting(turn_id, stack)
            is_watched = False
            while place is None or not place.running:
                if place is not None:
                    if not place.behind_own and not is_watched:
                        is_watched = True
                        self.process.beats.look_soon()
                    yield from signal.wait(LOOK_BEHIND_OWN if place.behind_own else LOOK_BEHIND_OTHERS)
                if self.session.is_deleted:
                    raise Told("deleted")
                found = yield from self.process.op(self._start)
                if found is Lost.SESSION:
                    self.session.is_deleted = True
                    raise Told("deleted")
                if isinstance(found, Lost):
                    if not self.shared.habits.queues_again:
                        yield Pause(math.inf)
                    self._release()
                    self.process.wake_all()
                    return None
                if isinstance(found, Dead):
                    self._release()
                    self.process.wake_all()
                    raise Told("dead")
                place = found
        return place

    def _start(self) -> Place | Dead | Lost:
        assert self.turn_id is not None
        found = self.shared.storage.start(
            self.process.holder,
            self.turn_id,
            self.attempt,
            self.session.key,
            self.session.snapshot,
            self.max_attempts,
        )
        if isinstance(found, Place):
            self._note_place(found)
            row = self.shared.storage.find(self.turn_id)
            if found.running and row is not None:
                self.shared.ledger.begins(row, max(self.waiting_since, self.process.disturbed_at))
        elif isinstance(found, Dead):
            message = self._message()
            assert message is not None
            self.shared.ledger.died(message)
        return found

    def _let_go_of_slots(self) -> None:
        for turn in self.outer:
            if turn.slot is not None and self.shared.habits.slot_given_back:
                turn.slot.give_back()

    # --- its life ---

    def begin(self, place: Place) -> None:
        """Its place has come."""
        if place.session is not None:
            self.session.snapshot = place.session
        self.base = self.session.snapshot
        self.state = dict(self.base.state)
        self.journal = place.journal
        self.is_open = True
        self.begun_at = self.shared.simulator.now

    def look(self) -> Flow[None]:
        """See whether it still runs."""
        if not self.shared.habits.looks:
            return
        yield Pause(self.shared.random.random() * 0.01, shielded=True)
        assert self.turn_id is not None
        lost = self.shared.storage.look(
            self.process.holder, self.turn_id, self.attempt, self.session.key, self.session.snapshot
        )
        if lost is not None:
            raise self._lost(lost)

    def _lost(self, lost: Lost) -> Told:
        if lost is Lost.SESSION:
            self.session.is_deleted = True
            return Told("deleted")
        return Told("conflict")

    def note(self, entry: Entry) -> Flow[None]:
        """A line of the journal."""
        assert self.turn_id is not None
        turn_id = self.turn_id
        lost = yield from self.process.op(lambda: self._note(turn_id, entry))
        if lost is not None:
            raise self._lost(lost)

    def _note(self, turn_id: int, entry: Entry) -> Lost | None:
        shared = self.shared
        lost = shared.storage.note(
            self.process.holder, turn_id, self.attempt, entry, self.session.key, self.session.snapshot
        )
        if lost is None and entry.result is not None:
            shared.ledger.finished.setdefault((self.base.session_key, self.name, entry.iteration), shared.simulator.now)
        return lost

    def commit(self, response: AgentResponse | None) -> Flow[bool]:
        """Its one commit."""
        self.is_open = False
        turn_id = self.turn_id
        outcome = yield from self.process.op(lambda: self._commit(response))
        if isinstance(outcome, Lost):
            self._release()
            raise self._lost(outcome)
        if not (outcome.answered and self.hands_on):
            self._release()
        self.process.ended(turn_id, outcome.next_turn)
        return outcome.answered

    def _commit(self, response: AgentResponse | None) -> Committed | Lost:
        assert self.turn_id is not None
        shared, base = self.shared, self.base
        log = self.state.get("log", ())
        assert isinstance(log, tuple)
        entries = (*log, self.name)
        state = FrozenDict({**self.state, "log": entries})
        commit = Commit(
            turn_id=self.turn_id,
            attempt=self.attempt,
            snapshot=attrs.evolve(base, state=state),
            agent_name=None,
            state=state,
            spent=None,
            metadata_set={},
            metadata_removed=(),
            body_start=0,
            bodies=(),
            system_start=0,
            systems=(),
            drop_before=None,
            replace=False,
            changes_service=False,
            claim=self.claim,
            response=response,
            hands_on=self.hands_on,
        )
        outcome = shared.storage.commit(self.process.holder, commit, self.session.key)
        if isinstance(outcome, Committed):
            shared.ledger.changed[base.session_key] = shared.simulator.now
            shared.ledger.say(f"{self.process} commits turn {self.turn_id} {self.name}")
            message = self._message()
            shared.ledger.committed(self.name, message, base, entries)
            if message is not None and message.is_accepted:
                message.owed = True
            self.session.snapshot = attrs.evolve(commit.snapshot, version=outcome.version, metadata=outcome.metadata)
        return outcome

    def drop(self, error: Exception | None) -> Flow[None]:
        """End without a trace."""
        self.is_open = False
        yield from self._leave(self._end_by(error), hold=self._keeps())

    def let_go(self) -> Flow[None]:
        """Leave the row to others."""
        self.is_open = False
        yield from self._leave(End.LET_GO)

    def handed_on(self) -> Flow[None]:
        """Nothing is left to do."""
        turn_id = self._release()
        if turn_id is not None:
            yield from self.process.op(
                lambda: self.shared.storage.end_answered(self.process.holder, turn_id, self.attempt)
            )

    def _keeps(self) -> bool:
        return self.hands_on or (self.work is not None and self.shared.habits.keeps_failed_work)

    def _end_by(self, error: Exception | None) -> End:
        if self.work is None:
            return End.TOLD
        return End.FAILED if isinstance(error, Told) else End.LET_GO

    def _leave(self, end: End, *, hold: bool = False) -> Flow[None]:
        turn_id = self.turn_id if hold else self._release()
        if turn_id is None:
            return
        leaving = Leaving(turn_id=turn_id, attempt=self.attempt, end=end, max_attempts=self.max_attempts, hold=hold)
        yield from self.process.op(lambda: self._leave_now(leaving))

    def _leave_now(self, leaving: Leaving) -> None:
        shared = self.shared
        row = shared.storage.find(leaving.turn_id)
        left = shared.storage.leave(self.process.holder, leaving)
        if row is not None and row.is_of(self.process.holder, leaving.attempt):
            shared.ledger.say(f"{self.process} leaves turn {row.turn_id} {self.name}: {leaving.end.name} {left.state}")
            shared.ledger.changed[row.session_key] = shared.simulator.now
            shared.ledger.left(row, self.session.key, leaving.end, left.state)
        self.left = left.state
        if left.state not in WAITING:
            self._release()
        self.process.ended(leaving.turn_id, left.next_turn)
