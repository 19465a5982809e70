"""An event loop whose time passes at once, and only while it waits: for what is planned in seconds."""

from __future__ import annotations

import asyncio
import contextvars
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

_T = TypeVar("_T")


class _Selector(selectors.DefaultSelector):
    """Says how long it would have waited, and does not wait."""

    def __init__(self, passes: Callable[[float], None]) -> None:
        super().__init__()
        self._passes = passes

    def select(self, timeout: float | None = None) -> list[Any]:
        """Look at what is there; what is not there in time never comes, since no thread is waited for."""
        ready = super().select(0)
        if not ready and timeout:
            self._passes(timeout)
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    """Its clock begins at 0 and stands still while anything can run."""

    def __init__(self) -> None:
        self.now = 0.0
        super().__init__(_Selector(self.passes))

    def time(self) -> float:
        """Its own seconds."""
        return self.now

    def passes(self, seconds: float) -> None:
        """Let time go by, as code does that blocks the loop."""
        self.now += seconds

    def run(self, operation: Coroutine[Any, Any, _T]) -> _T:
        """Run *operation* to its end, as code that belongs to no turn."""
        return self.run_until_complete(self.create_task(operation, context=contextvars.Context()))

    def end(self) -> None:
        """Cancel what is left, as asyncio.run does, and close."""
        left = asyncio.all_tasks(self)
        for task in left:
            task.cancel()
        if left:
            self.run(_ended(left))
        self.close()


async def _ended(tasks: set[asyncio.Task[Any]]) -> None:
    await asyncio.wait(tasks)
