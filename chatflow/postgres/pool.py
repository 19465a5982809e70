"""Pool: a limited number of connections, shared by the event loops and threads of a process.

A connection belongs to whoever has taken it, in whatever loop, and to nobody in between: the driver waits for it in the
loop that runs at the moment.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque

import anyio
import attrs

from chatflow.postgres.connection import Connection


@attrs.define(eq=False)
class Slot:
    """The right to one connection, which may still have to be opened."""

    connection: Connection | None = None


@attrs.define(eq=False)
class _Waiter:
    loop: asyncio.AbstractEventLoop
    event: anyio.Event
    slot: Slot | None = None


class Pool:
    """Slots for at most *limit* connections. The one given back last is taken first, so that few are in use."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        # Entered again by a store that the garbage collector finds in the middle of it.
        self._lock = threading.RLock()
        self._idle: list[Slot] = [Slot() for _ in range(limit)]
        self._taken: dict[Slot, asyncio.AbstractEventLoop] = {}
        self._waiters: deque[_Waiter] = deque()
        self._closed = False

    async def take(self, seconds: float) -> Slot | None:
        """A slot, once one is free; None if none was for so long. Who asks first gets the first."""
        loop = asyncio.get_running_loop()
        with self._lock:
            if not self._idle:
                self._take_back()
            if self._idle:
                slot = self._idle.pop()
                self._taken[slot] = loop
                return slot
            waiter = _Waiter(loop, anyio.Event())
            self._waiters.append(waiter)
        # Whoever gives it a slot wakes it, or the time that it waits at most.
        timer = waiter.loop.call_later(seconds, waiter.event.set)
        try:
            await waiter.event.wait()
        except BaseException:
            given = self._leave(waiter)
            if given is not None:
                self.give(given)
            raise
        finally:
            timer.cancel()
        return self._leave(waiter)

    def _leave(self, waiter: _Waiter) -> Slot | None:
        with self._lock:
            if waiter in self._waiters:
                self._waiters.remove(waiter)
            return waiter.slot

    def _take_back(self) -> None:
        # What ran in an event loop that was closed never goes on, and may never be thrown away either: anyio keeps the
        # tasks that are in one of its scopes.
        for slot, loop in tuple(self._taken.items()):
            if loop.is_closed():
                del self._taken[slot]
                if slot.connection is not None:
                    slot.connection.close()
                self._pass_on(Slot())

    async def drain(self, seconds: float) -> None:
        """Return once nobody has a connection any more, or after *seconds*."""
        taken: list[Slot] = []
        deadline = time.monotonic() + seconds
        while len(taken) < self.limit:
            slot = await self.take(max(0.0, deadline - time.monotonic()))
            if slot is None:
                break
            taken.append(slot)
        for slot in taken:
            self.give(slot)

    def give(self, slot: Slot) -> None:
        """Give *slot* back, to whoever waits for one longest."""
        connection = slot.connection
        if connection is not None and (self._closed or not connection.is_usable):
            connection.close()
            slot.connection = None
        with self._lock:
            # Unless it was taken back.
            if self._taken.pop(slot, None) is not None:
                self._pass_on(slot)

    def _pass_on(self, slot: Slot) -> None:
        while self._waiters:
            waiter = self._waiters.popleft()
            try:
                waiter.loop.call_soon_threadsafe(waiter.event.set)
            except RuntimeError:
                # Its loop is closed, and nobody waits there any more.
                continue
            waiter.slot = slot
            self._taken[slot] = waiter.loop
            return
        # One that is connected is taken before one that is not.
        self._idle.insert(len(self._idle) if slot.connection is not None else 0, slot)

    def close(self) -> None:
        """Close all connections; those in use when they are given back."""
        with self._lock:
            self._closed = True
            idle = [slot for slot in self._idle if slot.connection is not None]
            connections = [slot.connection for slot in idle if slot.connection is not None]
            for slot in idle:
                slot.connection = None
        for connection in connections:
            connection.close()
