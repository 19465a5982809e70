"""RunStream: a run that tells what happens while it happens, in a task of its own."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from types import TracebackType
from typing import Final, Self

import anyio
from anyio.lowlevel import checkpoint as yield_once

from chatflow.core.events import Done, Report, RunEvent
from chatflow.core.finish import finish
from chatflow.core.messages import AgentResponse
from chatflow.core.store import BaseSessionStore
from chatflow.exceptions import StoreClosedError, shorten

logger = logging.getLogger("chatflow.runner")


class RunStream:
    """A run that tells what happens while it happens: text in pieces, tools, handoffs, usage, and at last `Done`.

    `Agent.run_stream` and `Runner.run_stream` make it. Nothing happens before it is entered or collected, once::

        async with agent.run_stream("Where is order 404?", session=session) as stream:
            async for event in stream:
                if isinstance(event, TextDelta):
                    print(event.text, end="")
        print(stream.response.active_agent_name)

    The turn runs in a task of its own, with the context of the code that enters, and commits what `run_async` would
    have. It waits for no reader: whoever is slow, or stops to read, finds the events later, and the turn commits
    meanwhile. The code inside the block is not part of the turn, and sees the last commit.

    To leave the block before the turn has committed cancels it, however the block is left; once it is left, the turn
    is rolled back. A commit that has begun runs to its end. What the turn raises is raised once, as it is: by the
    iteration, or on leaving if nobody has read so far; where another exception leaves the block, it is logged.
    """

    def __init__(
        self, session_id: str, store: BaseSessionStore, answer: Callable[[Report], Awaitable[AgentResponse]]
    ) -> None:
        self._session_id: Final = session_id
        self._store: Final = store
        self._answer: Final = answer
        self._events: Final[deque[RunEvent]] = deque()
        self._more = anyio.Event()
        self._task: asyncio.Task[None] | None = None
        self._is_left = False
        self._response: AgentResponse | None = None
        self._error: BaseException | None = None
        """What the turn has raised, until somebody is told of it."""

    @property
    def response(self) -> AgentResponse:
        """The answer, once the turn has committed.

        Raises:
            RuntimeError: It has not come so far, or the stream was left before it did.
        """
        if self._response is None:
            raise RuntimeError(f"{self!r} has no response: it is there once Done has come")
        return self._response

    async def collect(self) -> AgentResponse:
        """Run it, and return the answer: all that happens in between is left out.

        Raises:
            RuntimeError: It was entered or collected before.
            Exception: As `Runner.run_async` does.
        """
        async with self:
            async for _ in self:
                pass
        return self.response

    async def __aenter__(self) -> Self:
        if self._task is not None:
            raise RuntimeError(f"{self!r} was entered or collected before; make another for another run")
        self._task = asyncio.get_running_loop().create_task(self._run())
        self._task.add_done_callback(self._wake)
        try:
            await yield_once()  # it takes its first step, and so asks for its turn before the code inside does
        except asyncio.CancelledError as cancelled:
            await self.__aexit__(type(cancelled), cancelled, None)
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        task = self._begun()
        is_over = task.done()
        self._is_left = True
        try:
            if not is_over:
                task.cancel()
                await finish(_ended(task))
        finally:
            unread, self._error = self._error, None
            if unread is not None and (is_over or not isinstance(unread, asyncio.CancelledError)):
                if error is None:
                    raise unread
                self._log(unread)

    def __aiter__(self) -> AsyncIterator[RunEvent]:
        return self

    async def __anext__(self) -> RunEvent:
        task = self._begun()
        await yield_once()
        while not self._events and not task.done():
            if self._more.is_set():
                self._more = anyio.Event()
            await self._more.wait()
        if self._events:
            return self._events.popleft()
        if self._error is None or self._is_left:
            raise StopAsyncIteration
        error, self._error = self._error, None
        raise error

    def __del__(self) -> None:
        if self._error is not None:
            self._log(self._error)

    def __repr__(self) -> str:
        return f"<RunStream of session {shorten(self._session_id)}>"

    def _begun(self) -> asyncio.Task[None]:
        task = self._task
        if task is None:
            raise RuntimeError(f"{self!r} has not begun; use `async with`, or `await stream.collect()`")
        if task.get_loop() is not asyncio.get_running_loop():
            raise RuntimeError(f"{self!r} belongs to the event loop in which it was entered")
        return task

    async def _run(self) -> None:
        # What it raises is kept and not left to its task: an exit would end the event loop, and asyncio would complain
        # of what is read too late.
        try:
            self._response = await self._answer(self._tell)
        except asyncio.CancelledError as error:
            self._error = error
            if self._store.is_closing and not self._is_left:
                # To its reader that would be a cancellation that nobody has asked for.
                self._error = StoreClosedError(store=self._store.name)
        except BaseException as error:  # noqa: BLE001  # raised to whoever reads or leaves
            self._error = error
        else:
            self._tell(Done(self._response))

    def _tell(self, event: RunEvent) -> None:
        self._events.append(event)
        self._more.set()

    def _wake(self, task: asyncio.Task[None]) -> None:
        self._more.set()

    def _log(self, error: BaseException) -> None:
        logger.error(
            "session %s: a streamed turn has failed, and nobody has read it",
            shorten(self._session_id),
            exc_info=error,
        )


async def _ended(task: asyncio.Task[None]) -> None:
    await asyncio.wait([task])
