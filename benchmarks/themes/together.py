"""Many conversations at once."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from functools import partial
from typing import Any, Final

from benchmarks.conversation import WINDOW
from benchmarks.measuring import gaps_beside, in_microseconds, percentile
from benchmarks.stage import Stage
from benchmarks.systems import FLOOR, ON_SERVER
from benchmarks.themes.base import COST, GAPS, Case, Column, Theme, over_floor

SLOW_DISK: Final = 1000
"""Microseconds that are added to each fsync."""


class Together(Theme):
    """A task for each conversation, each taking turns: what a busy bot gets done, and how long its loop stands."""

    title = "Conversations at once"
    tells = (
        "Each takes a turn after the other, in a task of its own. A turn's time includes the wait for the event loop;"
        " acknowledged: from handing over the commit until it is durable. Failed: turns of a peer that ended with an"
        " error, such as a locked database."
    )
    columns = (
        Column("turns/s", "turns_per_second", ",.0f"),
        over_floor("turns_per_second"),
        Column("median ms", "median_us", ".2f", 1e-3),
        Column("p99 ms", "p99_us", ".2f", 1e-3),
        Column("acknowledged p99 ms", "acknowledged_p99_ms", ".1f"),
        *COST,
        *GAPS,
        Column("failed", "failed"),
    )

    def cases(self, scale: float) -> Sequence[Case]:
        """The last one on a disk that takes a millisecond more for each fsync."""
        return (
            *(Case(f"{count} at once", {"count": count, "added_us": 0}) for count in (1, 8, 64, 256)),
            Case(
                f"64 at once, {SLOW_DISK} µs added to each fsync",
                {"count": 64, "added_us": SLOW_DISK},
                (FLOOR, "floor-normal", "sqlite-file", "chatflow-agent", "openai-sqlite", *ON_SERVER),
            ),
        )

    async def prepare(self, stage: Stage, settings: dict[str, Any]) -> dict[str, Any]:
        """Full windows."""
        promise = await stage.promise()
        system = await stage.renew()
        await system.fill(range(settings["count"]), WINDOW)
        for conversation in range(settings["count"]):
            await system.turn(conversation)
        stage.flushes.slow_down(settings["added_us"])
        fsync = stage.fsync_microseconds()
        if stage.flushes.is_there and fsync < settings["added_us"]:
            raise RuntimeError(f"an fsync takes {fsync:.0f} µs: what is to be added is not")
        return {"commits at": promise, "an fsync takes, µs": round(fsync)}

    async def measure(self, stage: Stage, settings: dict[str, Any]) -> dict[str, float]:
        """The turns without a heartbeat, and then the gaps with one."""
        await stage.system.restore()
        talks = Talks(stage)
        fsyncs, cpu, began = stage.flushes.count, time.process_time(), time.perf_counter()
        await talks.all_of(settings["count"])
        took, seconds = talks.took, time.perf_counter() - began
        figures = in_microseconds(took) | {
            "turns_per_second": len(took) / seconds,
            "acknowledged_p99_ms": percentile(talks.acknowledged, 99) * 1e3,
            "failed": talks.failed,
            "cpu_us": (time.process_time() - cpu) / len(took) * 1e6,
            "fsyncs_per_1000": (stage.flushes.count - fsyncs) / len(took) * 1e3,
        }
        return figures | await gaps_beside(partial(Talks(stage).all_of, settings["count"]))


class Talks:
    """Conversations that take turns at once, for as long as a measurement may take, each at least one."""

    def __init__(self, stage: Stage) -> None:
        self.took: list[float] = []
        self.acknowledged: list[float] = []
        self.failed = 0
        self._stage = stage

    async def all_of(self, count: int) -> None:
        """So many of them."""
        until = time.perf_counter() + self._stage.seconds
        async with asyncio.TaskGroup() as group:
            for conversation in range(count):
                group.create_task(self._talk(conversation, until))

    async def _talk(self, conversation: int, until: float) -> None:
        while True:
            began = time.perf_counter()
            # The loop's other work comes first, as it does for a message that has just been received.
            await asyncio.sleep(0)
            try:
                handed_over = await self._stage.system.turn(conversation)
            except Exception:
                # A peer may fail under load, and that is a result; the floor and chatflow may not.
                if self._stage.entry.package is None:
                    raise
                self.failed += 1
            else:
                ended = time.perf_counter()
                self.took.append(ended - began)
                self.acknowledged.append(ended - handed_over)
            if time.perf_counter() > until:
                return
