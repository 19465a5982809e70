"""Running an operation to its end whatever cancels the one who waits for it."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

import anyio

_T = TypeVar("_T")


async def finish(operation: Coroutine[Any, Any, _T]) -> _T:
    """Await *operation* to its end, then raise the cancellation that came in the meantime, if one did.

    The scope holds off anyio's cancellations, which come again at each await; the loop outlasts asyncio's own, which
    come once. An error of the operation goes before a cancellation: whoever cancelled is not told of it.
    """
    task = asyncio.ensure_future(operation)
    cancelled: asyncio.CancelledError | None = None
    with anyio.CancelScope(shield=True):
        while not task.done():
            try:
                await asyncio.shield(task)
            except asyncio.CancelledError as error:
                cancelled = error
            except BaseException:  # noqa: BLE001, S110  # the operation's own error, raised below by result()
                pass
    result = task.result()
    if cancelled is not None:
        raise cancelled
    return result
