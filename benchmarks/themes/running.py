"""A turn of the runner, with a model that takes no time."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Final

from benchmarks.conversation import WINDOW
from benchmarks.measuring import in_microseconds, repeated
from benchmarks.stage import Stage
from benchmarks.systems import OURS
from benchmarks.themes.base import COST, Case, Column, Theme

CONVERSATIONS: Final = 16


class Running(Theme):
    """All that a message costs beside the model: store, prompt, tool call, agents."""

    title = "The runner, with an instant engine"
    tells = (
        "`run_async` with one tool call: two requests to an engine that answers at once, and the commit."
        " With a message id, the call and its result are noted in the journal, flushed, before the tool runs."
    )
    columns = (Column("median µs", "median_us"), Column("p99 µs", "p99_us"), *COST)
    systems = (*OURS, "chatflow-agent")

    def cases(self, scale: float) -> Sequence[Case]:
        """With and without a message id."""
        return (Case("without a message id", {"ids": False}), Case("with a message id", {"ids": True}))

    async def prepare(self, stage: Stage, settings: dict[str, Any]) -> dict[str, Any]:
        """Full windows."""
        promise = await stage.promise()
        system = await stage.renew()
        await system.fill(range(CONVERSATIONS), WINDOW)
        await system.run(0)
        self._number = 0
        return {"commits at": promise}

    async def measure(self, stage: Stage, settings: dict[str, Any]) -> dict[str, float]:
        """Messages for some time."""
        system = stage.system

        async def step() -> float:
            self._number += 1
            message_id = f"message-{self._number}" if settings["ids"] else None
            began = time.perf_counter()
            await system.run(self._number % CONVERSATIONS, message_id)
            return time.perf_counter() - began

        fsyncs, cpu = stage.flushes.count, time.process_time()
        took = await repeated(step, stage.seconds)
        return in_microseconds(took) | {
            "cpu_us": (time.process_time() - cpu) / len(took) * 1e6,
            "fsyncs_per_1000": (stage.flushes.count - fsyncs) / len(took) * 1e3,
        }
