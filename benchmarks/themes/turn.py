"""A turn after the other."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Final

from benchmarks.conversation import WINDOW
from benchmarks.measuring import bytes_written, in_microseconds, repeated
from benchmarks.stage import Stage
from benchmarks.systems import FLOOR, OURS, SYSTEMS
from benchmarks.themes.base import COST, Case, Column, Theme, over_floor

CONVERSATIONS: Final = 16
"""In turn, so that none grows far beyond its window where nothing is ever dropped."""


class Turn(Theme):
    """One conversation at a time takes a turn: what a message costs that nothing else waits for."""

    title = "A turn after the other"
    tells = "A turn of four messages into a window of 40 turns that is full. With a message id, the id is claimed too."
    columns = (
        Column("median µs", "median_us"),
        over_floor("median_us"),
        Column("p99 µs", "p99_us"),
        *COST,
        Column("bytes written", "bytes_written"),
    )
    systems = tuple(SYSTEMS)

    def cases(self, scale: float) -> Sequence[Case]:
        """With and without a message id."""
        with_ids = (FLOOR, *OURS, "floor-postgres", "chatflow-agent")
        return (
            Case("without a message id", {"ids": False}),
            Case("with a message id", {"ids": True}, with_ids),
        )

    async def prepare(self, stage: Stage, settings: dict[str, Any]) -> dict[str, Any]:
        """Full windows; before that, what a commit promises."""
        promise = await stage.promise()
        system = await stage.renew()
        await system.fill(range(CONVERSATIONS), WINDOW)
        for conversation in range(CONVERSATIONS):
            await system.turn(conversation)
        self._number = 0
        return {"commits at": promise, "an fsync takes, µs": round(stage.fsync_microseconds())}

    async def measure(self, stage: Stage, settings: dict[str, Any]) -> dict[str, float]:
        """Turns for some time."""
        system = stage.system
        await system.restore()

        async def step() -> float:
            self._number += 1
            message_id = f"message-{self._number}" if settings["ids"] else None
            began = time.perf_counter()
            await system.turn(self._number % CONVERSATIONS, message_id)
            return time.perf_counter() - began

        fsyncs, written, cpu = stage.flushes.count, bytes_written(), time.process_time()
        took = await repeated(step, stage.seconds)
        return in_microseconds(took) | {
            "cpu_us": (time.process_time() - cpu) / len(took) * 1e6,
            "fsyncs_per_1000": (stage.flushes.count - fsyncs) / len(took) * 1e3,
            "bytes_written": (bytes_written() - written) / len(took),
        }
