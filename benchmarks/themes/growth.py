"""Histories and stores that grow."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from functools import partial
from typing import Any, ClassVar, Final

from benchmarks.conversation import MESSAGES, WINDOW
from benchmarks.measuring import gaps_beside, in_microseconds, repeated
from benchmarks.stage import Stage
from benchmarks.systems import OURS, PEERS
from benchmarks.themes.base import GAPS, Case, Column, Theme, over_floor

_COLUMNS: Final = (
    Column("turn, median µs", "median_us"),
    over_floor("median_us"),
    Column("turn, p99 µs", "p99_us"),
    Column("turn, CPU µs", "cpu_us"),
    Column("load, ms", "load_ms", ".2f"),
    *GAPS,
)


class _Growth(Theme):
    columns = _COLUMNS
    systems = ("floor-full", *OURS, *PEERS)
    sizes: ClassVar[tuple[int, ...]]

    def cases(self, scale: float) -> Sequence[Case]:
        """The smallest size, and those up to the largest one times *scale*."""
        largest = max(self.sizes[0], self.sizes[-1] * scale)
        return tuple(Case(f"{size:,}", {"size": size}, self.systems_at(size)) for size in self.sizes if size <= largest)

    def systems_at(self, size: int) -> tuple[str, ...] | None:
        """Those that can be as large."""
        return None

    async def measure(self, stage: Stage, settings: dict[str, Any]) -> dict[str, float]:
        """Turns in the conversation, some beside a heartbeat, and one load of it."""
        system = stage.system
        await system.restore()

        async def turn() -> float:
            await asyncio.sleep(0)  # as a loop that has other things to do
            began = time.perf_counter()
            await system.turn(0)
            return time.perf_counter() - began

        cpu = time.process_time()
        took = await repeated(turn, stage.seconds)
        cpu_us = (time.process_time() - cpu) / len(took) * 1e6
        gaps = await gaps_beside(partial(repeated, turn, stage.seconds / 2))
        await system.forget(0)
        began = time.perf_counter()
        await system.load(0)
        load = time.perf_counter() - began
        return in_microseconds(took) | gaps | {"cpu_us": cpu_us, "load_ms": load * 1e3}


class GrowingHistory(_Growth):
    """One conversation that keeps more and more: does the next message cost more than the first?"""

    title = "A history that grows"
    tells = "A turn in a conversation of so many messages, all of which its window holds; and loading them all, cold."
    sizes = (10, 100, 1_000, 10_000, 100_000)

    async def prepare(self, stage: Stage, settings: dict[str, Any]) -> dict[str, Any]:
        """Fill its window."""
        turns = max(2, settings["size"] // MESSAGES)
        system = await stage.renew(window=turns)
        await system.fill(range(1), turns)
        await system.turn(0)
        return {}


class GrowingStore(_Growth):
    """More and more conversations in one store: does one of them notice the others?"""

    title = "A store that grows"
    tells = f"A turn in a conversation of {WINDOW} turns, in a store that holds so many; and loading it, cold."
    sizes = (1, 100, 10_000, 1_000_000)

    def systems_at(self, size: int) -> tuple[str, ...] | None:
        """A million conversations as Python's objects take more memory than most machines have."""
        return None if size < 1_000_000 else tuple(name for name in self.systems if name != "memory")

    async def prepare(self, stage: Stage, settings: dict[str, Any]) -> dict[str, Any]:
        """Add what is missing."""
        size = settings["size"]
        if size == self.sizes[0]:
            system = await stage.renew()
            await system.fill(range(1), WINDOW)
        else:
            await stage.system.add_others(self.sizes[self.sizes.index(size) - 1], size)
        await stage.system.turn(0)
        return {}
