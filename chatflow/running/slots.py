"""How many turns run at once: a slot for each, taken at the head of the line and given back while its turn waits.

A run inside a tool uses the slot of the run around it, or a tool could wait for a slot that its own turn holds. Whoever
waits for something that another turn has to do first holds no slot meanwhile, or the two could wait for each other. A
turn that has given its slot back asks for it again before its next call of a model; tools that it had started beside
the waiting one go on until then.
"""

from __future__ import annotations

import asyncio
import math
import threading
import weakref
from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Final

import anyio

from chatflow.core.membership import before_waiting

_entered: ContextVar[tuple[Slot, ...]] = ContextVar("chatflow_slots", default=())


class Slot:
    """The slot that a run and the runs inside it share."""

    def __init__(self, limiter: anyio.CapacityLimiter, loop: asyncio.AbstractEventLoop) -> None:
        self.limiter: Final = limiter
        self.loop: Final = loop
        self.users = 0
        self._lock: Final = anyio.Lock()
        self._held = False

    async def hold(self) -> None:
        """Have the slot, waiting for it if need be; the running code's other slots are given back before the wait."""
        if self._held:
            return
        async with self._lock:
            if self._held:
                return
            try:
                self.limiter.acquire_on_behalf_of_nowait(self)
            except anyio.WouldBlock:
                give_back_slots()
                await self.limiter.acquire_on_behalf_of(self)
            self._held = True

    def give_back(self) -> None:
        """Let another turn have it."""
        if self._held:
            self._held = False
            self.limiter.release_on_behalf_of(self)


class TurnSlots:
    """The slots of one runner: *total* in each event loop, or as many as are asked for."""

    def __init__(self, total: int | None) -> None:
        self._total: Final = math.inf if total is None else total
        self._lock: Final = threading.Lock()
        self._limiters: Final[weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, anyio.CapacityLimiter]] = (
            weakref.WeakKeyDictionary()
        )

    @contextmanager
    def entered(self) -> Generator[Slot]:
        """The slot for a run, not held yet: that of the run around it, if that one has not ended."""
        before = _entered.get()
        limiter = self._limiter()
        around = (slot for slot in before if slot.limiter is limiter and slot.users)
        slot = next(around, None) or Slot(limiter, asyncio.get_running_loop())
        slot.users += 1
        _entered.set((*(each for each in before if each is not slot), slot))
        before_waiting.set(give_back_slots)
        try:
            yield slot
        finally:
            _entered.set(before)
            slot.users -= 1
            if not slot.users:
                slot.give_back()

    def _limiter(self) -> anyio.CapacityLimiter:
        loop = asyncio.get_running_loop()
        with self._lock:
            limiter = self._limiters.get(loop)
            if limiter is None:
                limiter = self._limiters[loop] = anyio.CapacityLimiter(self._total)
            return limiter


def give_back_slots() -> None:
    """Give back the slots that the running code uses, of all runners, because it is about to wait."""
    loop = asyncio.get_running_loop()
    for slot in _entered.get():
        if slot.loop is loop:  # another loop's belongs to another thread
            slot.give_back()
