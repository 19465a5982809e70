"""Who waits in this process: waking a turn whose place has come, across event loops and threads.

Only a shortcut. The truth is in the storage, and whoever is not woken asks it again.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from typing import TYPE_CHECKING

import anyio
import attrs

if TYPE_CHECKING:
    from chatflow.core.records import Leaving
    from chatflow.core.turn import Turn


@attrs.define(eq=False)
class Waiter:
    """Someone of one event loop who waits for a turn's row to move or to end."""

    loop: asyncio.AbstractEventLoop
    event: anyio.Event

    async def wait(self, seconds: float) -> None:
        """Return once woken, or after *seconds*."""
        with anyio.move_on_after(seconds):
            await self.event.wait()
        self.event = anyio.Event()

    def _set(self) -> None:
        self.event.set()

    def wake(self) -> None:
        """Wake it, from any thread."""
        try:
            self.loop.call_soon_threadsafe(self._set)
        except RuntimeError:
            # Its loop is closed, and nobody waits there any more.
            return


class Line:
    """The waiters of one storage in this process, by the row they wait for."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiters: dict[int, list[Waiter]] = {}
        self._called_early: set[int] = set()
        self.abandoned: list[tuple[Leaving, Turn]] = []
        """Rows of ended turns that are still to be given back."""
        self._work: set[Waiter] = set()

    @contextmanager
    def waiting(self, turn_id: int) -> Generator[Waiter]:
        """Be woken when the row *turn_id* may run or has ended."""
        waiter = Waiter(asyncio.get_running_loop(), anyio.Event())
        with self._lock:
            self._waiters.setdefault(turn_id, []).append(waiter)
            if turn_id in self._called_early:
                waiter.event.set()
        try:
            yield waiter
        finally:
            with self._lock:
                waiters = self._waiters[turn_id]
                waiters.remove(waiter)
                if not waiters:
                    del self._waiters[turn_id]
                    self._called_early.discard(turn_id)

    def wake(self, turn_ids: Iterable[int]) -> None:
        """Wake all who wait for one of these rows."""
        with self._lock:
            found = [waiter for turn_id in turn_ids for waiter in self._waiters.get(turn_id, ())]
        for waiter in found:
            waiter.wake()

    def ended(self, turn_id: int, next_turn: int | None) -> None:
        """Wake those who wait for the end of the row *turn_id*, and the one whose place has come with it.

        The next one may not wait yet: in another thread it may just have been given its row. It finds the call then.
        """
        with self._lock:
            self._called_early.discard(turn_id)
            if next_turn is not None and next_turn not in self._waiters:
                self._called_early.add(next_turn)
        self.wake((turn_id,) if next_turn is None else (turn_id, next_turn))

    @contextmanager
    def waiting_for_work(self) -> Generator[Waiter]:
        """Be woken when there may be work that nobody does."""
        waiter = Waiter(asyncio.get_running_loop(), anyio.Event())
        with self._lock:
            self._work.add(waiter)
        try:
            yield waiter
        finally:
            with self._lock:
                self._work.discard(waiter)

    def wake_workers(self) -> None:
        """Wake those that look for work."""
        with self._lock:
            found = list(self._work)
        for waiter in found:
            waiter.wake()

    def wake_all(self) -> None:
        """Wake everyone, for instance because the storage was closed."""
        with self._lock:
            found = [waiter for waiters in self._waiters.values() for waiter in waiters] + list(self._work)
        for waiter in found:
            waiter.wake()
