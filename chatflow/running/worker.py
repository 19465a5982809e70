"""Work that nobody awaits: accepted turns, and those of processes that are gone.

It is done in order in each conversation, and at the same time across conversations.
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import logging
import weakref
from collections.abc import Awaitable, Callable, Generator
from contextlib import contextmanager, suppress
from typing import Final

import anyio
import attrs
from anyio.abc import TaskGroup

from chatflow.core.backend import StoreBackend
from chatflow.core.finish import finish, is_cancellation
from chatflow.core.line import Waiter
from chatflow.core.messages import AgentResponse
from chatflow.core.records import Key, PendingTurn, Work
from chatflow.core.rows import WAITING, State
from chatflow.core.session import AgentSession
from chatflow.core.turn import Turn
from chatflow.exceptions import (
    ChatflowError,
    EngineError,
    MessageDeadError,
    SessionConflictError,
    SessionDeletedError,
    StoreClosedError,
    StoreError,
    shorten,
)

logger = logging.getLogger("chatflow.runner")

OnResponse = Callable[[PendingTurn, AgentResponse], Awaitable[None] | None]

_LOOK: Final = 0.25
"""Seconds between looks for work that another process has accepted: nobody there can wake us."""

_LOOK_AFTER_FAULT: Final = 2.0
"""Seconds until the next look after the storage has failed."""

_AT_A_TIME: Final = 1000
"""Rows that are taken in one operation at most."""

_LONGEST_DELAY: Final = 300.0


def delay(failures: int, error: BaseException) -> float:
    """Seconds to wait after so many failures: 1, 4, 16, 64, ..., or for as long as a provider asks."""
    asked = error.retry_after if isinstance(error, EngineError) and error.retry_after is not None else 0.0
    # Bounded before it is raised: on_response may fail for ever.
    return min(max(4.0 ** min(failures - 1, 8), asked), _LONGEST_DELAY)


def log_failure(turn: Turn, what: str, error: BaseException) -> None:
    """Log how a turn has ended that was done for somebody who is not there to be told."""
    assert turn.work is not None
    # What others have done meanwhile is no failure.
    is_failure = not isinstance(error, SessionDeletedError | SessionConflictError)
    logger.log(
        logging.ERROR if is_failure else logging.WARNING,
        "session %s: the turn of message %s %s: %s",
        shorten(turn.session.session_id),
        shorten(turn.work.turn.message_id),
        what,
        repr(error),
        exc_info=error if is_failure and not isinstance(error, ChatflowError) else None,
    )


@attrs.frozen(kw_only=True)
class Doing:
    """What a worker needs of its runner: for which application, how many turns at once, and how one is done."""

    store: StoreBackend
    agent_name: str
    lease_seconds: float
    max_attempts: int
    at_once: int
    run: Callable[[Turn], Awaitable[AgentResponse]]
    first: Callable[[Turn], Awaitable[None]]
    """Does work that a turn has to wait for."""
    with_output: Callable[[AgentResponse, str], AgentResponse]
    """Gives the stored answer of a conversation its output."""


class Worker:
    """Takes work while it is open, and does it in tasks of its own."""

    def __init__(self, doing: Doing, on_response: OnResponse | None) -> None:
        self._doing: Final = doing
        self._on_response: Final = on_response
        self._stopping = False
        self._refused: StoreClosedError | None = None
        self._sleeping: Final[set[anyio.CancelScope]] = set()
        self._busy = 0
        self._taken: Final[dict[int, Work]] = {}
        self._waiter: Waiter | None = None
        self._in_order: Final[weakref.WeakValueDictionary[Key, anyio.Lock]] = weakref.WeakValueDictionary()
        # In a context of its own: what is done here belongs to no turn of whoever opened it.
        self._task: Final = asyncio.get_running_loop().create_task(self._run(), context=contextvars.Context())

    async def close(self, grace: float) -> None:
        """Take no more, let what is under way end within *grace* seconds, then give it back as it is."""
        self._stopping = True
        self._wake()
        try:
            await asyncio.wait([self._task], timeout=grace)
        finally:
            self._task.cancel()
            await finish(_ended(self._task))
        if not self._task.cancelled():
            self._task.result()

    def _wake(self) -> None:
        if self._waiter is not None:
            self._waiter.wake()

    async def _run(self) -> None:
        try:
            await self._work()
        except Exception:
            logger.exception("no more work is done: the worker has failed")
            raise
        finally:
            await self._give_back()

    async def _work(self) -> None:
        store = self._doing.store
        with store.beats.watching_all(self._doing.lease_seconds), store.line.waiting_for_work() as waiter:
            self._waiter = waiter
            async with anyio.create_task_group() as group:
                while not self._stopping:
                    await waiter.wait(await self._look(group))
                # Not before the last look has ended, which would take anew what they give back.
                for scope in self._sleeping:
                    scope.cancel()
        if self._refused is not None:
            raise self._refused

    async def _look(self, group: TaskGroup) -> float:
        """Take what can be taken, and start it; the seconds until the next look."""
        free = min(self._doing.at_once - self._busy, _AT_A_TIME)
        found: list[Work] = []
        try:
            if free > 0:
                await finish(self._take(free, found))
        except StoreClosedError as error:
            self._stopping = True
            if not self._doing.store.is_closing:
                self._refused = error  # opened before this process was forked: nobody may think that work is done here
        except StoreError as error:
            logger.warning("no work can be taken for now: %s", error)
            return _LOOK_AFTER_FAULT
        if self._stopping:
            return 0  # what was taken in the last moment is given back
        for work in found:
            self._busy += 1
            group.start_soon(self._do, work)
        return 0 if found else _LOOK

    async def _take(self, limit: int, found: list[Work]) -> None:
        # Noted inside the operation, so that a cancelled worker still knows what to give back.
        doing = self._doing
        found += await doing.store.take_work(
            doing.agent_name, doing.lease_seconds, limit, answers=self._on_response is not None
        )
        self._taken.update({work.turn.turn_id: work for work in found})

    async def _give_back(self) -> None:
        """Let go of what was taken, and not begun by anybody."""
        for work in self._taken.values():
            with suppress(StoreError):
                await self._turn_of(self._doing.store.unread_session(work.key), work).let_go()

    def _turn_of(self, session: AgentSession, work: Work) -> Turn:
        doing = self._doing
        turn = Turn.of_work(session, work, lease_seconds=doing.lease_seconds, max_attempts=doing.max_attempts)
        turn.hands_on = True
        return turn

    async def _turn(self, work: Work) -> Turn:
        """The turn of that row. Where its conversation is gone, or can't be read, that shows when it is taken."""
        store = self._doing.store
        try:
            session = await store.session_of(work.key)
        except ChatflowError:
            session = None
        turn = self._turn_of(session or store.unread_session(work.key), work)
        del self._taken[work.turn.turn_id]
        return turn

    async def _do(self, work: Work) -> None:
        try:
            turn = await self._turn(work)
            try:
                if work.response is None:
                    response = await self._answer(turn)
                else:
                    response = self._doing.with_output(work.response, work.key.session_id)
                if response is not None and self._on_response is not None:
                    with self._idle():
                        await self._hand_on(turn, response, self._on_response)
            finally:
                # Whatever is still in hand here, somebody else may do.
                await turn.let_go()
        except StoreError as error:
            logger.warning(
                "session %s: turn %d is left for later: %s", shorten(work.key.session_id), work.turn.turn_id, error
            )
        finally:
            self._busy -= 1
            self._wake()

    async def _sleep(self, seconds: float) -> bool:
        """Wait before it is tried again; False if there will be no more tries here."""
        with anyio.CancelScope() as scope:
            self._sleeping.add(scope)
            try:
                if not self._stopping:
                    await anyio.sleep(seconds)
            finally:
                self._sleeping.discard(scope)
        return not self._stopping

    @contextmanager
    def _idle(self) -> Generator[None]:
        """Work that waits for a better moment, or for its answer to be heard, keeps nobody from other work."""
        self._busy -= 1
        self._wake()
        try:
            yield
        finally:
            self._busy += 1

    async def _answer(self, turn: Turn) -> AgentResponse | None:
        """Do the turn, again after a while if it fails; None if nobody is to hear of it."""
        failures = 0
        while True:
            try:
                found = await turn.take()
                if isinstance(found, Turn):
                    await self._doing.first(found)
                    continue
                if found is not None:
                    return None  # its row was taken while it waited, and whoever has taken it has answered
                response = await self._doing.run(turn)
            except (Exception, asyncio.CancelledError) as error:
                # Whatever work raises, it is tried again or given up; also a cancellation that is none of ours.
                if is_cancellation(error):
                    raise
                # A storage that fails is not the work's fault: others wait behind it, and go on once it is mended.
                failures += not isinstance(error, StoreError)
                if turn.turn_id is None or turn.left not in {None, *WAITING}:
                    self._log_end(turn, error)
                    return None
                seconds = delay(max(failures, 1), error)
                logger.warning(
                    "session %s: turn %s failed and is tried again in %g s: %s",
                    shorten(turn.session.session_id),
                    turn.turn_id,
                    seconds,
                    repr(error),
                )
                with self._idle():
                    if not await self._sleep(seconds):
                        return None
            else:
                return None if turn.turn_id is None else response

    def _log_end(self, turn: Turn, error: BaseException) -> None:
        is_dead = turn.left is State.DEAD or isinstance(error, MessageDeadError)
        log_failure(turn, "was given up; store.pending_turns() lists it" if is_dead else "ended", error)

    async def _hand_on(self, turn: Turn, response: AgentResponse, on_response: OnResponse) -> None:
        """Tell `on_response`, in the order of the answers in each conversation, until it has heard."""
        assert turn.work is not None
        pending = attrs.evolve(turn.work.turn, state=State.ANSWERED.value)
        lock = self._in_order.setdefault(turn.session.key, anyio.Lock())
        failures = 0
        while True:
            # Not held while it waits: the answer that has to be told before this one may need it, being taken anew.
            async with lock:
                is_next = await self._doing.store.is_next_to_tell(turn.work.turn.turn_id, turn.attempt)
                if is_next is None:
                    return  # its conversation was deleted, or somebody else has it in hand
                error = await _told(on_response, pending, response) if is_next else None
                if is_next and error is None:
                    await turn.handed_on()
                    return
            seconds = _LOOK
            if error is not None:
                failures += 1
                seconds = delay(failures, error)
                logger.error(
                    "session %s: on_response failed; it is called again in %g s",
                    shorten(turn.session.session_id),
                    seconds,
                    exc_info=error,
                )
            if not await self._sleep(seconds):
                return


async def _told(on_response: OnResponse, turn: PendingTurn, response: AgentResponse) -> BaseException | None:
    """Call it, and return what it raises; a cancellation that is none of ours too."""
    try:
        heard = on_response(turn, response)
        if inspect.isawaitable(heard):  # a plain function has heard already
            await heard
    except (Exception, asyncio.CancelledError) as error:
        if is_cancellation(error):
            raise
        return error
    return None


async def _ended(task: asyncio.Task[None]) -> None:
    await asyncio.wait([task])
