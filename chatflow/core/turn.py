"""The turn: its place in the conversation's line, what it changes, and its one commit.

One object from the first to the last, which is why this is longer than other modules: whatever ends it, it knows which
row is to be given back.
"""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, Any, Final

import attrs

from chatflow.core.approvals import Decision
from chatflow.core.beats import DEFAULT_LEASE_SECONDS, Beats
from chatflow.core.ending import give_back
from chatflow.core.finish import finish, is_cancellation
from chatflow.core.journal import Entry
from chatflow.core.membership import before_waiting, join, leave_ended, open_turns
from chatflow.core.messages import AgentResponse
from chatflow.core.records import (
    Answered,
    Claim,
    Commit,
    Cycle,
    Dead,
    InProgress,
    Known,
    Leaving,
    Lost,
    Place,
    Ticket,
    Work,
)
from chatflow.core.rows import WAITING, End, State
from chatflow.core.working import Change, Kind, Working
from chatflow.exceptions import (
    ApprovalDecidedError,
    ChatflowError,
    MessageDeadError,
    MessageInProgressError,
    MessageMismatchError,
    SessionConflictError,
    SessionError,
    StoreClosedError,
    StoreError,
    TurnInsideTurnError,
    shorten,
)

if TYPE_CHECKING:
    from chatflow.core.session import AgentSession

logger = logging.getLogger("chatflow.turn")

_LOOK_BEHIND_OTHERS: Final = 0.25
"""Seconds between looks at a queued row where another process has to go first: nobody there can wake us."""

_LOOK_BEHIND_OWN: Final = 5.0
"""Seconds between looks where a turn of this process has to go first, which will wake us."""

_SEEN_SECONDS: Final = 0.05
"""How long a member of a turn takes it for the running one without asking the storage."""


class Turn:
    """One turn of one conversation, from its place in the line to its commit.

    *agent_name* is that of the runner's starting agent: work of its application before this turn is to be done first,
    by whoever holds this one. None for a turn without a runner, which passes such work by.
    """

    def __init__(
        self,
        session: AgentSession,
        claim: Claim | None = None,
        agent_name: str | None = None,
        *,
        lease_seconds: float = DEFAULT_LEASE_SECONDS,
        max_attempts: int | None = None,
    ) -> None:
        self.session = session
        self.claim = claim
        self.agent_name = agent_name
        self.lease_seconds = lease_seconds
        self.response: AgentResponse | None = None
        self.is_open = False
        self.is_ending = False
        """Whether its commit, or the giving back of its row, is under way."""
        self.is_dropped = False
        self.has_waited = False
        """Whether it has had a place in the line, or waited for its message's: a deletion from then on ends it."""
        self.turn_id: int | None = None
        self.attempt = 0
        self.journal: tuple[Entry, ...] = ()
        self.work: Work | None = None
        """What it does for somebody else, who is not there to be told how it ends."""
        self.place: Place | None = None
        """Where it is to begin, if it was found by another turn."""
        self.hands_on = False
        """Whether the row stays in hand after a failure, to be tried again, and after an answer, to hand it on."""
        self.made: Known | None = None
        """The commit it has made, where nobody's but its own changes are in it."""
        self.left: State | None = None
        """What became of its row when it ended without a commit."""
        self.task: asyncio.Task[Any] | None = None
        self._max_attempts = max_attempts
        self._pending: dict[Kind, dict[str, Change]] = {}
        self._working: Working | None = None
        self._is_lost = False
        self._seen_at = 0.0
        self._beats: Beats | None = None
        self._first: Turn | None = None

    @classmethod
    def of_work(
        cls,
        session: AgentSession,
        work: Work,
        *,
        lease_seconds: float,
        max_attempts: int | None,
    ) -> Turn:
        """The turn of a row that was taken, to be done for whoever asked for it."""
        turn = cls(session, work.claim, work.turn.agent_name, lease_seconds=lease_seconds, max_attempts=max_attempts)
        turn.work = work
        turn._hold(work.turn.turn_id, work.attempt)
        return turn

    @property
    def working(self) -> Working:
        """What its members see."""
        assert self._working is not None
        return self._working

    async def take(self, *, wait_for_duplicate: bool = True) -> Answered | Turn | None:
        """Wait for the conversation's turn, bring the session up to date, and begin.

        Returns the stored answer instead, without a turn, if the message was answered before; or the turn of work that
        is to be done first, which has its *place* and is to `begin`: once that has ended, call this again.

        Raises:
            TurnInsideTurnError: The turn could only start once the asking code's own turn has ended.
            SessionDeletedError: The conversation was deleted.
            MessageMismatchError: The message's id was used before with another text.
            ApprovalDecidedError: It is a decision about a call, and the other one was made before.
            MessageInProgressError: The message is being answered, and *wait_for_duplicate* is false; or it waits for
                another application's runner.
            MessageDeadError: The message was given up.
        """
        self._refuse_nesting()
        try:
            found = await self._place(wait_for_duplicate=wait_for_duplicate)
            if isinstance(found, Answered):
                return found
            self._refuse_closing()
            self._refuse_other_service(found)
        except BaseException as error:
            first, self._first = self._first, None
            try:
                if first is not None:
                    await first.let_go()
            finally:
                await self._leave(self._end_by(error), hold=self.hands_on)
            raise
        first, self._first = self._first, None
        if first is None:
            self.begin(found)
        else:
            first.place = found
        return first

    def _refuse_nesting(self) -> None:
        session = self.session
        for turn in open_turns():
            if turn.session.store.line is session.store.line and turn.session.key == session.key:
                raise TurnInsideTurnError(
                    session_id=session.session_id,
                    reason="this code already runs inside a turn of this conversation; use the session it has",
                )

    async def _place(self, *, wait_for_duplicate: bool) -> Place | Answered:
        store, session = self.session.store, self.session
        watched: int | None = None
        with ExitStack() as watching:
            while True:
                session.refuse_deleted()
                found = None if self.turn_id is not None else await finish(self._queue())
                if found is None or isinstance(found, Place):
                    running = await self._wait_for_place(found)
                    if running is not None:
                        return running
                    if self.work is not None:
                        raise SessionConflictError(
                            session_id=session.session_id, reason="somebody else has taken this turn over"
                        )
                    continue
                refusal = self._refusal(found)
                if refusal is not None:
                    raise refusal
                if isinstance(found, Answered):
                    return found
                assert isinstance(found, InProgress)
                if not wait_for_duplicate or not found.held:
                    assert self.claim is not None
                    raise MessageInProgressError(
                        session_id=session.session_id, message_id=self.claim.message_id, held=found.held
                    )
                if found.turn_id != watched:
                    watching.close()
                    watching.enter_context(store.beats.watching(found.turn_id))
                    watched = found.turn_id
                await self._wait_for_end(found)

    def _refusal(self, found: Answered | InProgress | Dead | Cycle | Lost) -> ChatflowError | None:
        """The error that *found* means, if it means one."""
        store, session = self.session.store, self.session
        if isinstance(found, Lost):
            return self._lost(found)
        if isinstance(found, Cycle):
            return TurnInsideTurnError(
                session_id=session.session_id,
                reason="its turn would wait for one that waits for this code's own turn to end",
            )
        claim = self.claim
        assert claim is not None
        if found.digest is not None and found.digest != claim.digest:
            return self._mismatch(claim)
        if isinstance(found, Dead):
            store.line.wake_all()  # it may just have given up its place in the line
            return MessageDeadError(session_id=session.session_id, message_id=claim.message_id, attempts=found.attempts)
        return None

    def _mismatch(self, claim: Claim) -> ChatflowError:
        session_id, asked = self.session.session_id, claim.input
        if isinstance(asked, Decision):
            return ApprovalDecidedError(session_id=session_id, call_id=asked.call_id, approved=not asked.approved)
        return MessageMismatchError(session_id=session_id, message_id=claim.message_id)

    async def _queue(self) -> Place | Answered | InProgress | Dead | Cycle | Lost:
        session, store = self.session, self.session.store
        ancestors = (turn.turn_id for turn in open_turns() if turn.session.store.line is store.line)
        ticket = Ticket(
            key=session.key,
            known=session.known,
            new=session.new,
            agent_name=self.agent_name,
            claim=self.claim,
            ancestors=tuple(turn_id for turn_id in ancestors if turn_id is not None),
            lease_seconds=self.lease_seconds,
            max_attempts=self._max_attempts,
        )
        self._refuse_closing()
        await give_back(store)
        found = await store.queue_turn(ticket)
        self.has_waited = self.has_waited or isinstance(found, Place | InProgress)
        if isinstance(found, Place):
            self._note(found)
        return found

    def _note(self, place: Place) -> None:
        """Note which rows are held now, inside the operation: a cancelled caller still knows what to give back."""
        self._hold(place.turn_id, place.attempt)
        if place.work is not None:
            self._first = Turn.of_work(
                self.session, place.work, lease_seconds=self.lease_seconds, max_attempts=self._max_attempts
            )

    def _refuse_closing(self) -> None:
        # What the turns under way need for their own end may still begin.
        store = self.session.store
        if store.is_closing and not any(turn.session.store is store for turn in open_turns()):
            raise StoreClosedError(store=store.name)

    def _refuse_other_service(self, place: Place) -> None:
        """Refuse a conversation that was found with another service's session than the asking one was made for."""
        session, found = self.session, place.session
        wanted = None if session.new is None else session.new.service
        kept = None if found is None else found.service
        if wanted is not None and found is not None and (kept is None or kept.id != wanted.id):
            raise SessionError(
                f"session {shorten(session.session_id)} is stored already, and not with the service's session that it"
                " was made for; give that one another session_id",
                session_id=session.session_id,
            )

    def _hold(self, turn_id: int, attempt: int) -> None:
        self.turn_id, self.attempt = turn_id, attempt
        self._is_lost = False
        self._beats = self.session.store.beats
        self._beats.hold(turn_id, self)

    def _release(self) -> int | None:
        turn_id, self.turn_id = self.turn_id, None
        if turn_id is not None and self._beats is not None:
            self._beats.release(turn_id, self)
        return turn_id

    def lose(self, silent_seconds: float) -> None:
        """The storage says that the row is somebody else's, or gone; the event loop had not run for so long before."""
        if not self._is_lost:
            self._log_loss(silent_seconds)
        self._is_lost = True
        # Whoever waits for it, or behind it, waits for somebody else now, who wakes nobody here.
        self.session.store.line.wake_all()

    def _log_loss(self, silent_seconds: float) -> None:
        logger.warning(
            "session %s: turn %s lost its place: %s",
            shorten(self.session.session_id),
            self.turn_id,
            f"its event loop was blocked for {silent_seconds:.1f} s, and its lease is {self.lease_seconds:g} s"
            if silent_seconds > self.lease_seconds / 3
            else "it was taken, or the conversation deleted",
        )

    async def _wait_for_end(self, found: InProgress) -> None:
        store = self.session.store
        self._let_go()
        with store.line.waiting(found.turn_id) as waiter:
            if await store.is_held(found.turn_id):
                # Once only: asked again, the storage also tells whether that turn waits for this code by now.
                await waiter.wait(_LOOK_BEHIND_OTHERS)

    async def _wait_for_place(self, place: Place | None) -> Place | None:
        """The row that runs now, or None if this one is gone and a new one is needed."""
        if place is not None and place.running:
            return place
        store, session, turn_id = self.session.store, self.session, self.turn_id
        assert turn_id is not None
        self._let_go()
        is_watched = False
        with store.line.waiting(turn_id) as waiter:
            while place is None or not place.running:
                session.refuse_deleted()  # a deletion before this row was waited for has woken nobody
                if place is not None:
                    if not place.behind_own and not is_watched:
                        store.beats.look_soon()
                        is_watched = True
                    await waiter.wait(_LOOK_BEHIND_OWN if place.behind_own else _LOOK_BEHIND_OTHERS)
                session.refuse_deleted()
                self._refuse_closing()
                await finish(give_back(store))
                found = await finish(self._start(turn_id))
                if not isinstance(found, Place):
                    self._release()
                    if found is Lost.TURN:
                        store.line.wake_all()  # whoever waits behind it waits for somebody else now
                        return None
                    refusal = self._refusal(found)
                    assert refusal is not None
                    raise refusal
                place = found
        return place

    async def _start(self, turn_id: int) -> Place | Dead | Lost:
        session = self.session
        found = await session.store.start_turn(turn_id, self.attempt, session.key, session.known, self._max_attempts)
        if isinstance(found, Place):
            self._note(found)
        return found

    def _let_go(self) -> None:
        let_go = before_waiting.get()
        if let_go is not None:
            let_go()

    def begin(self, place: Place) -> None:
        """Its place has come: members work on a copy from now on."""
        session = self.session
        if place.session is not None:
            session.show(place.session)
        self.journal = place.journal
        self._pending = {name: dict(changes) for name, changes in session.pending.items()}
        self._working = Working(session.committed, session.take_window(), session.max_turns, self._pending)
        self.is_open = True
        self.task = asyncio.current_task()
        self._seen_at = time.monotonic()
        join(self)

    def _end(self) -> None:
        # Before anything is awaited: what members do from here on belongs to a turn of their own.
        self.is_open = False
        self.task = None
        leave_ended()

    def cancel(self) -> None:
        """Cancel the task that began the turn, from any thread."""
        task = self.task
        if task is not None:
            with suppress(RuntimeError):  # its loop has been closed in this moment, and the task goes with it
                task.get_loop().call_soon_threadsafe(task.cancel)

    @property
    def is_under_way(self) -> bool:
        """Whether it has begun and not ended, in an event loop that is still there."""
        if not self.is_open and not self.is_ending:
            return False
        assert self._beats is not None
        return not self._beats.is_over

    async def look(self) -> None:
        """Make sure that the turn is still the running one, as far as that was not seen a moment ago.

        Raises:
            SessionDeletedError: The conversation was deleted.
            SessionConflictError: The turn's row was taken; nothing of it will be written.
        """
        session = self.session
        session.refuse_deleted()
        now = time.monotonic()
        if not self._is_lost and now - self._seen_at < _SEEN_SECONDS:
            return
        assert self.turn_id is not None
        lost = await session.store.look_at_turn(self.turn_id, self.attempt, session.key, session.known)
        if lost is not None:
            raise self._lost(lost)
        self._is_lost, self._seen_at = False, now

    def _lost(self, lost: Lost) -> ChatflowError:
        if lost is Lost.SESSION:
            return self.session.mark_deleted()
        assert self._beats is not None
        self.lose(self._beats.silent_seconds)
        return SessionConflictError(
            session_id=self.session.session_id,
            reason="this turn was no longer the running one: it was taken over, or the database crashed and lost it",
        )

    async def note(self, entry: Entry, *, durable: bool) -> None:
        """Write a line of the journal; *durable*: flushed to the disk when this returns, whatever cancels it.

        Raises:
            SessionDeletedError: The conversation was deleted.
            SessionConflictError: The turn's row was taken.
        """
        self.session.refuse_deleted()
        assert self.turn_id is not None
        now = time.monotonic()
        lost = await finish(
            self.session.store.write_journal(
                self.turn_id, self.attempt, entry, self.session.key, self.session.known, durable=durable
            )
        )
        if lost is not None:
            raise self._lost(lost)
        self._seen_at = now

    async def commit(self) -> bool:
        """Make all that happened durable, as one, whatever cancels the caller in the meantime.

        True says that the turn had been accepted, and its answer is still to be told; the row is held until then.

        Raises:
            SessionDeletedError: The conversation was deleted.
            SessionConflictError: The turn's row is no longer its own; nothing was written.
            StoreError: The storage failed; nothing was written.
        """
        assert self.turn_id is not None
        session, working = self.session, self.working
        self._end()
        self.is_ending = True
        try:
            return await self._commit(session, working)
        except BaseException as error:
            self.is_dropped = True
            # After an error of the storage not now: whoever holds the file would be waited for a second time.
            await self._leave(self._end_by(error), hold=self.hands_on, later=isinstance(error, StoreError))
            raise
        finally:
            self.is_ending = False

    async def _commit(self, session: AgentSession, working: Working) -> bool:
        assert self.turn_id is not None
        front_stays = working.front_stays
        commit = working.commit(self.turn_id, self.attempt, self.claim, self.response, hands_on=self.hands_on)
        session.refuse_deleted()
        if commit.changes_session or commit.claim is not None:
            return await finish(self._write(commit, front_stays=front_stays))
        session.keep_window(working.window, working.base)
        session.settle(self._pending)
        await self._leave(End.TOLD)
        return False

    async def _write(self, commit: Commit, *, front_stays: bool) -> bool:
        session = self.session
        outcome = await session.store.commit_turn(commit, session.key)
        if isinstance(outcome, Lost):
            error = self._lost(outcome)
            self._release()
            raise error
        if not (outcome.answered and self.hands_on):
            self._release()
        snapshot = attrs.evolve(commit.snapshot, version=outcome.version, metadata=outcome.metadata)
        if snapshot.metadata == commit.snapshot.metadata:
            # Else it has joined what others have merged meanwhile.
            self.made = snapshot.known
        session.show(snapshot, front_stays=front_stays)
        session.keep_window(self.working.window, snapshot)
        session.settle(self._pending)
        session.store.line.ended(commit.turn_id, outcome.next_turn)
        return outcome.answered

    async def drop(self, error: BaseException | None = None) -> None:
        """End without a trace in the conversation, because of *error*."""
        if self.is_open:
            self.is_dropped = True
            self._end()
        self.is_ending = True
        try:
            # Work done for somebody else stays in hand until it is tried again: the next one would do that at once.
            await self._leave(self._end_by(error), hold=self.hands_on or self.work is not None)
        finally:
            self.is_ending = False

    async def let_go(self) -> None:
        """Leave the row as it is to whoever goes on with it."""
        await self._leave(End.LET_GO)

    async def handed_on(self) -> None:
        """The answer of this accepted turn has reached whoever it is for: nothing is left to do."""
        assert self.turn_id is not None
        await finish(self.session.store.end_answered(self.turn_id, self.attempt))
        self._release()

    def ended_as(self, state: State | None) -> None:
        """Note what became of the row that was left."""
        self.left = state
        if state not in WAITING:
            self._release()

    def _end_by(self, error: BaseException | None) -> End:
        if self.work is None:
            return End.TOLD
        # Neither a cancellation nor a fault of the storage is the work's own; a cancellation that nobody asked for is.
        may_be_its_own = isinstance(error, Exception | asyncio.CancelledError) and not isinstance(error, StoreError)
        return End.FAILED if may_be_its_own and not is_cancellation(error) else End.LET_GO

    @property
    def leaving(self) -> Leaving:
        """What gives its row to whoever goes on with it."""
        assert self.turn_id is not None
        return Leaving(turn_id=self.turn_id, attempt=self.attempt, end=End.LET_GO, max_attempts=self._max_attempts)

    async def _leave(self, end: End, *, hold: bool = False, later: bool = False) -> None:
        turn_id = self.turn_id if hold else self._release()
        if turn_id is None:
            return
        leaving = Leaving(
            turn_id=turn_id,
            attempt=self.attempt,
            end=end,
            max_attempts=self._max_attempts,
            hold=hold,
            is_decision=self.claim is not None and isinstance(self.claim.input, Decision),
        )
        store = self.session.store
        store.line.abandoned.append((leaving, self))
        if not later:
            await finish(give_back(store))
