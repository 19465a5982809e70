"""Loading a conversation of 40 turns."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Final

from benchmarks.conversation import WINDOW
from benchmarks.measuring import in_microseconds, repeated
from benchmarks.stage import Stage
from benchmarks.themes.base import Case, Column, Theme, over_floor

CONVERSATIONS: Final = 16


class Load(Theme):
    """A conversation is read and every message touched: what the first message after a restart waits for."""

    title = "Loading 40 turns, 160 messages"
    tells = "Every message is touched. The floor fetches the rows, and reads each by `json.loads`. Peers keep nothing."
    columns = (
        Column("median µs", "median_us"),
        over_floor("median_us"),
        Column("p99 µs", "p99_us"),
        Column("CPU µs", "cpu_us"),
    )

    def cases(self, scale: float) -> Sequence[Case]:
        """From the storage, and what is in memory already."""
        return (Case("cold", {"cold": True}), Case("warm", {"cold": False}))

    async def prepare(self, stage: Stage, settings: dict[str, Any]) -> dict[str, Any]:
        """Full windows."""
        system = await stage.renew()
        await system.fill(range(CONVERSATIONS), WINDOW)
        self._number = 0
        return {"characters": await system.load(0)}

    async def measure(self, stage: Stage, settings: dict[str, Any]) -> dict[str, float]:
        """Loads for some time."""
        system = stage.system
        used: list[float] = []

        async def step() -> float:
            self._number += 1
            conversation = self._number % CONVERSATIONS
            if settings["cold"]:
                await system.forget(conversation)
            cpu, began = time.process_time(), time.perf_counter()
            await system.load(conversation)
            ended = time.perf_counter()
            used.append(time.process_time() - cpu)
            return ended - began

        took = await repeated(step, stage.seconds)
        return in_microseconds(took) | {"cpu_us": sum(used) / len(used) * 1e6}
