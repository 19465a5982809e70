"""Gates: who of this process comes first to a conversation's line, before any connection is taken.

The database would let one after the other in as well, but in whatever order their connections got there; and a hundred
tasks of one conversation would each hold a connection while they wait, and nobody else would have one.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import anyio
import attrs

from chatflow.core.records import Key


@attrs.define(eq=False)
class _Waiter:
    loop: asyncio.AbstractEventLoop
    event: anyio.Event
    is_let_in: bool = False


class Gates:
    """One gate for each conversation that somebody is at, across event loops and threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiters: dict[Key, deque[_Waiter]] = {}

    @asynccontextmanager
    async def through(self, key: Key) -> AsyncGenerator[None]:
        """Be the only one inside; who came first goes first."""
        await self._enter(key)
        try:
            yield
        finally:
            self._leave(key)

    async def _enter(self, key: Key) -> None:
        with self._lock:
            waiters = self._waiters.get(key)
            if waiters is None:
                self._waiters[key] = deque()
                return
            waiter = _Waiter(asyncio.get_running_loop(), anyio.Event())
            waiters.append(waiter)
        try:
            await waiter.event.wait()
        except BaseException:
            with self._lock:
                is_let_in = waiter.is_let_in
                if waiter in waiters:
                    waiters.remove(waiter)
            if is_let_in:
                self._leave(key)
            raise

    def _leave(self, key: Key) -> None:
        with self._lock:
            waiters = self._waiters[key]
            while waiters:
                waiter = waiters.popleft()
                waiter.is_let_in = True
                try:
                    waiter.loop.call_soon_threadsafe(waiter.event.set)
                except RuntimeError:
                    # Its loop is closed, and nobody waits there any more.
                    waiter.is_let_in = False
                    continue
                return
            del self._waiters[key]
