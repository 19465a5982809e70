"""What many live conversations take of the process."""

from __future__ import annotations

import asyncio
import gc
import tracemalloc
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from benchmarks.stage import Stage
from benchmarks.systems import FLOOR, OURS
from benchmarks.themes.base import Case, Column, Theme, scaled

AT_ONCE: Final = 256
"""Conversations that are in a turn at the same time."""
TURNS: Final = 2
FEW: Final = 200
"""As many as a package can hold that has a thread, or several files, for each."""


class Resources(Theme):
    """Threads, open files and memory, with all conversations held as a running bot holds them."""

    title = "Live conversations"
    tells = (
        f"Each has taken two turns, {AT_ONCE} conversations at once, and what a program holds of it is held. Threads"
        " and files are the most there were at any time; bytes are what Python holds (tracemalloc), in all and beyond"
        " the messages."
    )
    columns = (
        Column("threads", "threads"),
        Column("open files", "files"),
        Column("bytes each", "bytes_each", ",.0f"),
        Column("beyond messages", "bytes_beyond", ",.0f"),
    )
    rounds = 1

    def cases(self, scale: float) -> Sequence[Case]:
        """A few for all, many for those that can."""
        many = scaled(10_000, scale, FEW)
        return (
            Case(f"{FEW:,} conversations", {"count": FEW}),
            Case(f"{many:,} conversations", {"count": many}, (FLOOR, *OURS)),
        )

    async def prepare(self, stage: Stage, settings: dict[str, Any]) -> dict[str, Any]:
        """One conversation, so that all modules are loaded that are loaded on first use."""
        system = await stage.renew()
        await system.fill(range(1), 1)
        await stage.close()
        return {}

    async def measure(self, stage: Stage, settings: dict[str, Any]) -> dict[str, float]:
        """Start them all."""
        await stage.close()
        most = {"threads": 0, "files": 0}
        files_before = _count("fd")
        tracemalloc.start()
        before = _allocated()
        system = await stage.renew()
        watching = asyncio.create_task(_watch(most))
        await system.fill(range(settings["count"]), 1)
        async with asyncio.TaskGroup() as group:
            for first in range(AT_ONCE):
                group.create_task(_talk(stage, range(first, settings["count"], AT_ONCE)))
        await asyncio.sleep(0.1)
        watching.cancel()
        each = (_allocated() - before) / settings["count"]
        figures = {"threads": most["threads"], "files": most["files"] - files_before, "bytes_each": each}
        if stage.name in OURS:
            bare = _allocated()
            copies = [system.make_messages() for _ in range(TURNS * settings["count"])]
            figures["bytes_beyond"] = each - TURNS * (_allocated() - bare) / len(copies)
        tracemalloc.stop()
        return figures


async def _talk(stage: Stage, conversations: range) -> None:
    for conversation in conversations:
        try:
            await stage.system.turn(conversation)
        except Exception:
            # A peer whose database is locked holds the conversation all the same.
            if stage.entry.package is None:
                raise


async def _watch(most: dict[str, int]) -> None:
    while True:
        most["threads"] = max(most["threads"], _count("task"))
        most["files"] = max(most["files"], _count("fd"))
        await asyncio.sleep(0.05)


def _count(what: str) -> int:
    return sum(1 for _ in Path(f"/proc/self/{what}").iterdir())


def _allocated() -> int:
    gc.collect()
    return tracemalloc.get_traced_memory()[0]
