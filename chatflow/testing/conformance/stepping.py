"""Cancelling an operation at each of its steps in turn: at the first time it waits, the second, and so on.

A step is a place where the operation gives control to the event loop. Steps are counted where they happen, inside the
task, so that a worker thread's pace has no part in it.
"""

from __future__ import annotations

import asyncio
import types
from collections.abc import Awaitable, Callable, Coroutine, Generator
from typing import Any, Final, Literal

import anyio
import attrs

Operation = Callable[[], Coroutine[Any, Any, object]]
Moment = Literal["waiting", "ready"]
"""When the cancellation comes: while what the step waits for is under way, or when it is there and not yet taken."""

MOMENTS: Final[tuple[Moment, ...]] = ("waiting", "ready")


@attrs.define
class Steps:
    """Counts the steps of one operation, and calls *cancel* at the one asked for."""

    cancel_at: int
    moment: Moment
    cancel: Callable[[], object]
    taken: int = 0

    @types.coroutine
    def drive(self, operation: Coroutine[Any, Any, object]) -> Generator[Any, Any, object]:
        """Run *operation*, and cancel it at the step asked for: 0 is before it begins."""
        thrown: BaseException | None = None
        if not self.cancel_at:
            self.cancel()
        while True:
            try:
                waits_for = operation.send(None) if thrown is None else operation.throw(thrown)
            except StopIteration as end:
                return end.value
            self.taken += 1
            if self.taken == self.cancel_at:
                self._cancel(waits_for)
            thrown = None
            try:
                yield waits_for
            except BaseException as error:  # noqa: BLE001  # whatever comes is the operation's to deal with
                thrown = error

    def _cancel(self, waits_for: asyncio.Future[Any] | None) -> None:
        if waits_for is None or self.moment == "waiting":
            self.cancel()
        else:
            # The task's own wake-up is added after this returns, and comes after this one.
            waits_for.add_done_callback(lambda _: self.cancel())


async def cancelled_by_asyncio(operation: Operation, step: int, moment: Moment) -> bool:
    """Cancel the operation's task at *step*; False if it has fewer steps. One that was cancelled must end so."""
    steps = Steps(step, moment, lambda: task.cancel())  # noqa: PLW0108  # the task comes after it

    async def run() -> object:
        return await steps.drive(operation())

    task = asyncio.create_task(run())
    await asyncio.wait([task])
    if steps.taken < step:
        task.result()
        return False
    assert task.cancelled(), f"the cancellation at step {step} was lost: {task.exception()!r}"
    return True


async def cancelled_by_anyio(operation: Operation, step: int, moment: Moment) -> bool:
    """Cancel the scope around the operation at *step*; False if it has fewer steps."""
    with anyio.CancelScope() as scope:
        steps = Steps(step, moment, scope.cancel)
        await steps.drive(operation())
    return steps.taken >= step


Canceller = Callable[[Operation, int, Moment], Awaitable[bool]]
CANCELLERS: Final[dict[str, Canceller]] = {"asyncio": cancelled_by_asyncio, "anyio": cancelled_by_anyio}
