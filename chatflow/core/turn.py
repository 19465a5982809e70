"""The turn: its place in the conversation's line, who belongs to it, what it changes, and its one commit."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextvars import ContextVar
from typing import TYPE_CHECKING, Final

import attrs

from chatflow.core.finish import finish
from chatflow.core.messages import AgentResponse
from chatflow.core.records import (
    Answered,
    Claim,
    Commit,
    Cycle,
    InProgress,
    Lost,
    Place,
    Ticket,
)
from chatflow.core.working import Change, Kind, Working
from chatflow.exceptions import (
    MessageInProgressError,
    MessageMismatchError,
    SessionConflictError,
    StoreClosedError,
    StoreError,
    TurnInsideTurnError,
)

if TYPE_CHECKING:
    from chatflow.core.session import SessionContext
    from chatflow.core.store import BaseSessionStore

logger = logging.getLogger("chatflow.turn")

_LOOK_BEHIND_OTHERS: Final = 0.25
"""Seconds between looks at a queued row where another process has to go first: nobody there can wake us."""

_LOOK_BEHIND_OWN: Final = 5.0
"""Seconds between looks where a turn of this process has to go first, which will wake us."""

_memberships: ContextVar[tuple[Turn, ...]] = ContextVar("chatflow_turns", default=())


before_waiting: ContextVar[Callable[[], None] | None] = ContextVar("chatflow_before_waiting", default=None)
"""Called before the running code waits for another turn, to let go of what that turn may need."""


def open_turns() -> tuple[Turn, ...]:
    """The open turns that the running code belongs to, outermost first."""
    return tuple(turn for turn in _memberships.get() if turn.is_open)


def refuse_left_over(session: SessionContext) -> None:
    """Raise `SessionConflictError` for code of a turn that has ended without a commit: nothing of it may stay."""
    if any(turn.session is session and turn.is_dropped for turn in _memberships.get()):
        raise SessionConflictError(
            session_id=session.session_id, reason="the turn that this code belongs to has ended without a commit"
        )


class Turn:
    """One turn of one conversation, from its place in the line to its commit."""

    def __init__(self, session: SessionContext, claim: Claim | None = None, agent_name: str | None = None) -> None:
        self.session = session
        self.claim = claim
        self.response: AgentResponse | None = None
        self.is_open = False
        self.is_dropped = False
        self.turn_id: int | None = None
        self._attempt = 0
        self._agent_name = agent_name
        self._pending: dict[Kind, dict[str, Change]] = {}
        self._working: Working | None = None

    @property
    def working(self) -> Working:
        """What its members see."""
        assert self._working is not None
        return self._working

    async def take(self, *, wait_for_duplicate: bool = True) -> Answered | None:
        """Wait for the conversation's turn, bring the session up to date, and begin.

        Returns the stored answer instead, without a turn, if the message was answered before.

        Raises:
            TurnInsideTurnError: The turn could only start once the asking code's own turn has ended.
            SessionDeletedError: The conversation was deleted.
            MessageMismatchError: The message's id was used before with another text.
            MessageInProgressError: The message is being answered, and *wait_for_duplicate* is false.
        """
        self._refuse_nesting()
        try:
            found = await self._place(wait_for_duplicate=wait_for_duplicate)
            if isinstance(found, Answered):
                return found
        except BaseException:
            await self._leave()
            raise
        self._begin(found)
        return None

    def _refuse_nesting(self) -> None:
        session = self.session
        for turn in open_turns():
            if turn.session.store.line is session.store.line and turn.session.key == session.key:
                raise TurnInsideTurnError(
                    session_id=session.session_id,
                    reason="this code already runs inside a turn of this conversation; use the session it has",
                )

    async def _place(self, *, wait_for_duplicate: bool) -> Place | Answered:
        session = self.session
        while True:
            session.refuse_deleted()
            found = await finish(self._queue())
            if isinstance(found, Place):
                running = await self._wait_for_place(found)
                if running is not None:
                    return running
                continue
            if isinstance(found, Lost):
                raise session.mark_deleted()
            if isinstance(found, Cycle):
                raise TurnInsideTurnError(
                    session_id=session.session_id,
                    reason="its turn would wait for one that waits for this code's own turn to end",
                )
            self._refuse_other_text(found.digest)
            if isinstance(found, Answered):
                return found
            if not wait_for_duplicate:
                assert self.claim is not None
                raise MessageInProgressError(session_id=session.session_id, message_id=self.claim.message_id)
            await self._wait_for_end(found)

    async def _queue(self) -> Place | Answered | InProgress | Cycle | Lost:
        session, store = self.session, self.session.store
        ancestors = (turn.turn_id for turn in open_turns() if turn.session.store.line is store.line)
        ticket = Ticket(
            key=session.key,
            known=session.known,
            new=session.new,
            agent_name=self._agent_name or session.active_agent_name,
            claim=self.claim,
            ancestors=tuple(turn_id for turn_id in ancestors if turn_id is not None),
        )
        await give_back(store)
        found = await store.queue_turn(ticket)
        if isinstance(found, Place):
            # Noted inside the operation, so that a cancelled caller still knows which row to give back.
            self.turn_id, self._attempt = found.turn_id, found.attempt
        return found

    def _refuse_other_text(self, digest: str | None) -> None:
        claim = self.claim
        assert claim is not None
        if digest is not None and digest != claim.digest:
            raise MessageMismatchError(session_id=self.session.session_id, message_id=claim.message_id)

    async def _wait_for_end(self, found: InProgress) -> None:
        store = self.session.store
        self._let_go()
        with store.line.waiting(found.turn_id) as waiter:
            if await store.turn_exists(found.turn_id):
                # Once only: asked again, the storage also tells whether that turn waits for this code by now.
                await waiter.wait(_LOOK_BEHIND_OTHERS)

    async def _wait_for_place(self, place: Place) -> Place | None:
        """The row once it runs, or None if it is gone and a new one is needed."""
        if place.running:
            return place
        store, session = self.session.store, self.session
        self._let_go()
        with store.line.waiting(place.turn_id) as waiter:
            while not place.running:
                session.refuse_deleted()  # a deletion before this row was waited for has woken nobody
                await waiter.wait(_LOOK_BEHIND_OWN if place.behind_own else _LOOK_BEHIND_OTHERS)
                session.refuse_deleted()
                await finish(give_back(store))
                found = await finish(store.start_turn(place.turn_id, session.key, session.known))
                if found is Lost.SESSION:
                    raise session.mark_deleted()
                if found is Lost.TURN:
                    self.turn_id = None
                    return None
                place = found
        self._attempt = place.attempt
        return place

    def _let_go(self) -> None:
        let_go = before_waiting.get()
        if let_go is not None:
            let_go()

    def _begin(self, place: Place) -> None:
        session = self.session
        if place.session is not None:
            session.show(place.session)
        self._pending = {name: dict(changes) for name, changes in session.pending.items()}
        self._working = Working(session.committed, session.take_window(), session.max_turns, self._pending)
        self.is_open = True
        session.turn_now = self
        _memberships.set((*open_turns(), self))

    def _end(self) -> None:
        # Before anything is awaited: what members do from here on belongs to a turn of their own.
        self.is_open = False
        self.session.turn_now = None
        _memberships.set(open_turns())

    async def commit(self) -> None:
        """Make all that happened durable, as one, whatever cancels the caller in the meantime.

        Raises:
            SessionDeletedError: The conversation was deleted.
            SessionConflictError: The turn's row is no longer its own; nothing was written.
            StoreError: The storage failed; nothing was written.
        """
        assert self.turn_id is not None
        session, working = self.session, self.working
        self._end()
        front_stays = working.front_stays
        commit = working.commit(self.turn_id, self._attempt, self.claim, self.response)
        try:
            session.refuse_deleted()
            if commit.changes_session or commit.claim is not None:
                await finish(self._write(commit, front_stays=front_stays))
            else:
                session.keep_window(working.window)
                session.settle(self._pending)
                await self._leave()
        except BaseException as error:
            self.is_dropped = True
            if isinstance(error, StoreError) and self.turn_id is not None:
                # Not now: whoever holds the file would be waited for a second time.
                session.store.line.abandoned.append(self.turn_id)
                self.turn_id = None
            await self._leave()
            raise

    async def _write(self, commit: Commit, *, front_stays: bool) -> None:
        session = self.session
        outcome = await session.store.commit_turn(commit, session.key)
        self.turn_id = None
        if outcome is Lost.SESSION:
            raise session.mark_deleted()
        if outcome is Lost.TURN:
            raise SessionConflictError(session_id=session.session_id, reason="this turn was no longer the running one")
        snapshot = attrs.evolve(commit.snapshot, version=outcome.version, metadata=outcome.metadata)
        session.show(snapshot, front_stays=front_stays)
        session.keep_window(self.working.window)
        session.settle(self._pending)
        session.store.line.ended(commit.turn_id, outcome.next_turn)

    async def drop(self) -> None:
        """End without a trace in the conversation."""
        self.is_dropped = True
        self._end()
        await self._leave()

    async def _leave(self) -> None:
        if self.turn_id is None:
            return
        turn_id, self.turn_id = self.turn_id, None
        store = self.session.store
        store.line.abandoned.append(turn_id)
        await finish(give_back(store))


async def give_back(store: BaseSessionStore) -> None:
    """Remove the rows whose turns have ended without a commit.

    A row that can't be removed now, because the disk is full for instance, is removed before the next turn queues: the
    error that ended its turn is the one to show, and a row left standing would hold up the conversation.
    """
    abandoned = store.line.abandoned
    while abandoned:
        turn_id = abandoned.pop()
        try:
            next_turn = await store.leave_turn(turn_id)
        except StoreClosedError:
            return
        except StoreError:
            logger.warning("store %s: the place of turn %d will be given back later", store.name, turn_id)
            abandoned.append(turn_id)
            return
        except BaseException:
            abandoned.append(turn_id)
            raise
        store.line.ended(turn_id, next_turn)


class TurnScope:
    """``async with session.turn():``, entered once."""

    def __init__(self, session: SessionContext) -> None:
        self._session = session
        self._turn: Turn | None = None

    async def __aenter__(self) -> SessionContext:
        if self._turn is not None and self._turn.is_open:
            raise TurnInsideTurnError(session_id=self._session.session_id, reason="this turn has been entered already")
        turn = Turn(self._session)
        await turn.take()
        self._turn = turn
        return self._session

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        assert self._turn is not None
        if kind is None:
            await self._turn.commit()
        else:
            await self._turn.drop()


class OwnTurn:
    """One operation: inside the running code's turn if it has one, else as a turn of its own."""

    __slots__ = ("_session", "_turn")

    def __init__(self, session: SessionContext) -> None:
        self._session = session
        self._turn: Turn | None = None

    async def __aenter__(self) -> Working:
        session = self._session
        session.refuse_deleted()
        await asyncio.sleep(
            0
        )  # as every store operation, it yields once; anyio's checkpoint does it at four times the cost
        member = session.member_turn
        if member is not None:
            session.refuse_deleted()
            return member.working
        refuse_left_over(session)
        turn = Turn(session)
        await turn.take()
        self._turn = turn
        return turn.working

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._turn is None:
            return
        if kind is not None:
            await self._turn.drop()
            return
        before = self._session.committed.known
        try:
            await self._turn.commit()
        finally:
            self._session.follow(before)
