from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import ExitStack

import anyio.to_thread
import pytest

from chatflow.core.line import Line

ROW = 7

WAKE: dict[str, Callable[[Line], None]] = {
    "wake": lambda line: line.wake([ROW]),
    "ended": lambda line: line.ended(ROW, None),
    "its place has come": lambda line: line.ended(ROW - 1, ROW),
    "wake_all": lambda line: line.wake_all(),
}


@pytest.mark.parametrize("wake", WAKE.values(), ids=WAKE.keys())
async def test_woken(wake: Callable[[Line], None]) -> None:
    """Whoever waits for a row is woken when it may run, when it has ended, and when everyone is."""
    line = Line()
    with line.waiting(ROW) as waiter:
        wake(line)
        await waiter.event.wait()


@pytest.mark.parametrize("wake", WAKE.values(), ids=WAKE.keys())
async def test_closed_loop(wake: Callable[[Line], None]) -> None:
    """A waiter whose loop was closed under it is passed over, and those after it are woken."""
    line = Line()
    with ExitStack() as never_left:

        async def wait() -> None:
            never_left.enter_context(line.waiting(ROW))

        await anyio.to_thread.run_sync(asyncio.run, wait())
        with line.waiting(ROW) as waiter:
            wake(line)
            await waiter.event.wait()


async def test_called_early() -> None:
    """A row whose place has come before anyone waits for it is found called by the one who then waits."""
    line = Line()
    line.ended(ROW - 1, ROW)
    with line.waiting(ROW) as waiter:
        assert waiter.event.is_set()
    with line.waiting(ROW) as waiter:
        assert not waiter.event.is_set()
