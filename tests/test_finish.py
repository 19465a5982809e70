from __future__ import annotations

import asyncio

import anyio
import attrs
import pytest

from chatflow.core.finish import finish


@attrs.define
class Operation:
    """An operation that ends when a test lets it, and notes that it was not cut off."""

    fails: bool = False
    begun: asyncio.Event = attrs.field(factory=asyncio.Event)
    may_end: asyncio.Event = attrs.field(factory=asyncio.Event)
    ended: bool = False

    async def run(self) -> str:
        self.begun.set()
        await self.may_end.wait()
        self.ended = True
        if self.fails:
            raise ZeroDivisionError
        return "done"


async def cancelled_repeatedly(operation: Operation, times: int) -> asyncio.Task[str]:
    """The ended task of one who waits for *operation*, cancelled so many times before the operation could end."""
    task = asyncio.create_task(finish(operation.run()))
    await operation.begun.wait()
    for _ in range(times):
        task.cancel()
        await asyncio.sleep(0)  # a step of the loop, in which the task takes this cancellation
        assert not task.done()
    operation.may_end.set()
    await asyncio.wait([task])
    return task


async def test_result() -> None:
    """An operation that nobody cancels gives its result."""
    operation = Operation()
    operation.may_end.set()
    assert await finish(operation.run()) == "done"


async def test_error() -> None:
    """An operation's error is raised as it is."""
    operation = Operation(fails=True)
    operation.may_end.set()
    with pytest.raises(ZeroDivisionError):
        await finish(operation.run())


@pytest.mark.parametrize("times", [1, 2, 3])
async def test_cancelled(times: int) -> None:
    """However often its waiter is cancelled, an operation runs to its end, and then the waiter is cancelled."""
    operation = Operation()
    task = await cancelled_repeatedly(operation, times)
    assert operation.ended
    assert task.cancelled()


@pytest.mark.parametrize("times", [1, 2, 3])
async def test_error_before_cancellation(times: int) -> None:
    """However often its waiter is cancelled, an operation's error is raised in place of the cancellation."""
    operation = Operation(fails=True)
    task = await cancelled_repeatedly(operation, times)
    assert isinstance(task.exception(), ZeroDivisionError)


async def test_cancelled_scope() -> None:
    """An operation runs to its end inside a scope that is cancelled, and the code after it is not reached."""
    operation = Operation()
    went_on = False
    async with anyio.create_task_group() as group:

        async def wait() -> None:
            nonlocal went_on
            await finish(operation.run())
            went_on = True

        group.start_soon(wait)
        await operation.begun.wait()
        group.cancel_scope.cancel()
        operation.may_end.set()
    assert operation.ended
    assert not went_on
