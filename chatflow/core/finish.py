"""Running an operation to its end whatever cancels the one who waits for it, or apart from what surrounds it."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Coroutine
from typing import Any, TypeVar

import anyio

_T = TypeVar("_T")


async def finish(operation: Coroutine[Any, Any, _T]) -> _T:
    """Await *operation* to its end, then raise the cancellation that came in the meantime, if one did.

    An error of the operation goes before a cancellation: whoever cancelled is not told of it.
    """
    loop = asyncio.get_running_loop()
    task = loop.create_task(operation)
    ended: asyncio.Future[None] = loop.create_future()
    # Not the task itself: a cancellation of whoever waits would be handed on to it.
    task.add_done_callback(lambda _: None if ended.done() else ended.set_result(None))
    try:
        await ended
    except asyncio.CancelledError:
        await _outlast(task)
        task.result()
        raise
    return task.result()


def is_cancellation(error: BaseException | None) -> bool:
    """Whether *error* says that somebody has cancelled the running task: awaiting a cancelled one raises the same."""
    task = asyncio.current_task()
    return isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling() > 0


async def apart(operation: Coroutine[Any, Any, _T]) -> _T:
    """Await *operation* in a context of its own: it belongs to no turn of the code that asks for it.

    A cancellation of the caller cancels it, and leaves once it has ended.
    """
    task = asyncio.get_running_loop().create_task(operation, context=contextvars.Context())
    try:
        await asyncio.wait([task])
    except asyncio.CancelledError:
        task.cancel()
        await _outlast(task)
        raise
    return task.result()


async def _outlast(task: asyncio.Task[Any]) -> None:
    """Wait for *task*, whatever comes.

    The scope holds off anyio's cancellations, which come again at each await; the loop outlasts asyncio's own, which
    come once.
    """
    with anyio.CancelScope(shield=True):
        while not task.done():
            try:
                await asyncio.wait([task])
            except asyncio.CancelledError:
                continue
