"""Readers beside writers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any, Final

from benchmarks.conversation import WINDOW
from benchmarks.measuring import percentile
from benchmarks.stage import Stage
from benchmarks.themes.base import Case, Column, Theme, over_floor

WRITERS: Final = 16
READERS: Final = 8


class Readers(Theme):
    """Some conversations take turns while others are loaded: does one wait for the other?"""

    title = "Readers beside writers"
    tells = (
        f"{WRITERS} conversations take turns while {READERS} tasks load {READERS} others from the storage all the time."
        " Left: what is left of the turns and of the loads that there are when each has the store alone."
    )
    columns = (
        Column("turns/s", "turns_per_second", ",.0f"),
        over_floor("turns_per_second"),
        Column("turns left", "turns_left", ".2f", spread=True),
        Column("turn p99 ms", "turn_p99_ms", ".1f"),
        Column("loads/s", "loads_per_second", ",.0f"),
        Column("loads left", "loads_left", ".2f", spread=True),
        Column("load p99 ms", "load_p99_ms", ".1f"),
    )

    def cases(self, scale: float) -> Sequence[Case]:
        """Just one."""
        return (Case(f"{WRITERS} writers, {READERS} readers"),)

    async def prepare(self, stage: Stage, settings: dict[str, Any]) -> dict[str, Any]:
        """Full windows."""
        system = await stage.renew()
        await system.fill(range(WRITERS + READERS), WINDOW)
        return {}

    async def measure(self, stage: Stage, settings: dict[str, Any]) -> dict[str, float]:
        """Writers alone, readers alone, and both."""
        await stage.system.restore()
        turns_alone, _ = await _both(stage, WRITERS, 0)
        _, loads_alone = await _both(stage, 0, READERS)
        turns, loads = await _both(stage, WRITERS, READERS)
        return {
            "turns_per_second": turns.rate,
            "turns_left": turns.rate / turns_alone.rate,
            "turn_p99_ms": turns.p99_ms,
            "loads_per_second": loads.rate,
            "loads_left": loads.rate / loads_alone.rate,
            "load_p99_ms": loads.p99_ms,
        }


class _Done:
    def __init__(self) -> None:
        self.took: list[float] = []
        self.seconds = 0.0

    @property
    def rate(self) -> float:
        return len(self.took) / self.seconds

    @property
    def p99_ms(self) -> float:
        return percentile(self.took, 99) * 1e3


async def _both(stage: Stage, writers: int, readers: int) -> tuple[_Done, _Done]:
    turns, loads = _Done(), _Done()
    began = time.perf_counter()
    until = began + stage.seconds / 2

    async def write(conversation: int) -> None:
        while True:  # at least once, however short the time
            start = time.perf_counter()
            await asyncio.sleep(0)
            await stage.system.turn(conversation)
            turns.took.append(time.perf_counter() - start)
            if time.perf_counter() >= until:
                break
        turns.seconds = time.perf_counter() - began

    async def read(conversation: int) -> None:
        while True:
            await stage.system.forget(conversation)
            start = time.perf_counter()
            await asyncio.sleep(0)
            await stage.system.load(conversation)
            loads.took.append(time.perf_counter() - start)
            if time.perf_counter() >= until:
                break
        loads.seconds = time.perf_counter() - began

    async with asyncio.TaskGroup() as group:
        for conversation in range(writers):
            group.create_task(write(conversation))
        for conversation in range(readers):
            group.create_task(read(WRITERS + conversation))
    return turns, loads
