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


class Gates:
    """One gate for each conversation that somebody is at, across event loops and threads."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._inside: dict[Key, _Waiter] = {}
        self._waiters: dict[Key, deque[_Waiter]] = {}

    @asynccontextmanager
    async def through(self, key: Key) -> AsyncGenerator[None]:
        """Be the only one inside; who came first goes first."""
        me = _Waiter(asyncio.get_running_loop(), anyio.Event())
        await self._enter(key, me)
        try:
            yield
        finally:
            self._leave(key, me)

    async def _enter(self, key: Key, me: _Waiter) -> None:
        with self._lock:
            inside = self._inside.get(key)
            if inside is not None and inside.loop.is_closed():
                # It never goes on, and may never be thrown away either.
                self._leave(key, inside)
            if key not in self._inside:
                self._inside[key], self._waiters[key] = me, deque()
                return
            self._waiters[key].append(me)
        try:
            await me.event.wait()
        except BaseException:
            with self._lock:
                waiters = self._waiters.get(key, ())
                if me in waiters:
                    self._waiters[key].remove(me)
            self._leave(key, me)
            raise

    def _leave(self, key: Key, me: _Waiter) -> None:
        with self._lock:
            if self._inside.get(key) is not me:
                return
            waiters = self._waiters[key]
            while waiters:
                waiter = waiters.popleft()
                try:
                    waiter.loop.call_soon_threadsafe(waiter.event.set)
                except RuntimeError:
                    # Its loop is closed, and nobody waits there any more.
                    continue
                self._inside[key] = waiter
                return
            del self._inside[key], self._waiters[key]
