"""Claiming a message's id."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from benchmarks.measuring import in_microseconds, repeated
from benchmarks.stage import Stage
from benchmarks.themes.base import COST, Case, Column, Theme, over_floor, scaled

MOST = 1_000_000


class Dedup(Theme):
    """Is a message new? What a webhook asks first, durably; the same however many ids are stored?"""

    title = "Claiming a message id"
    tells = "An id that is new, noted durably, one after the other."
    columns = (
        Column("median µs", "median_us"),
        over_floor("median_us"),
        Column("p99 µs", "p99_us"),
        *COST,
    )

    def cases(self, scale: float) -> Sequence[Case]:
        """None stored, and many."""
        return tuple(Case(f"{count:,} ids stored", {"count": count}) for count in (0, scaled(MOST, scale, 100)))

    async def prepare(self, stage: Stage, settings: dict[str, Any]) -> dict[str, Any]:
        """Store ids."""
        system = await stage.renew()
        if settings["count"]:
            await system.remember(settings["count"])
            if await system.claim("stored-7"):
                raise RuntimeError("an id that is stored could be claimed")
        await system.claim("new-0")  # which opens what is not open yet
        self._number = 0
        return {}

    async def measure(self, stage: Stage, settings: dict[str, Any]) -> dict[str, float]:
        """Claims for some time."""
        system = stage.system

        async def step() -> float:
            self._number += 1
            began = time.perf_counter()
            is_new = await system.claim(f"new-{self._number}")
            ended = time.perf_counter()
            if not is_new:
                raise RuntimeError("a new id could not be claimed")
            return ended - began

        fsyncs, cpu = stage.flushes.count, time.process_time()
        took = await repeated(step, stage.seconds)
        return in_microseconds(took) | {
            "cpu_us": (time.process_time() - cpu) / len(took) * 1e6,
            "fsyncs_per_1000": (stage.flushes.count - fsyncs) / len(took) * 1e3,
        }
