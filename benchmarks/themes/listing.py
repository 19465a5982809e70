"""Listing many conversations."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

from benchmarks.measuring import gaps_beside, in_microseconds, repeated
from benchmarks.stage import Stage
from benchmarks.themes.base import GAPS, Case, Column, Theme, scaled


class Listing(Theme):
    """What a support desk's page of conversations takes, and walking through all of them."""

    title = "Listing conversations"
    tells = (
        "First page: the first 100, or all where there are no pages. All: page by page to the end, beside a heartbeat."
    )
    columns = (
        Column("first page µs", "median_us"),
        Column("p99 µs", "p99_us"),
        Column("all, s", "all_seconds", ".2f"),
        *GAPS,
    )

    def cases(self, scale: float) -> Sequence[Case]:
        """One size."""
        count = scaled(100_000, scale, 200)
        return (Case(f"{count:,} conversations", {"count": count}),)

    async def prepare(self, stage: Stage, settings: dict[str, Any]) -> dict[str, Any]:
        """Store them."""
        system = await stage.renew()
        await system.add_others(0, settings["count"])
        return {}

    async def measure(self, stage: Stage, settings: dict[str, Any]) -> dict[str, float]:
        """The first page for some time, then all once."""
        system = stage.system

        async def first_page() -> float:
            began = time.perf_counter()
            await system.page(None)
            return time.perf_counter() - began

        async def all_pages() -> None:
            found, after = await system.page(None)
            while after is not None:
                await asyncio.sleep(0)  # as a loop that has other things to do
                count, after = await system.page(after)
                found += count
            if found != settings["count"]:
                raise RuntimeError(f"{found} conversations were listed")

        took = await repeated(first_page, stage.seconds)
        began = time.perf_counter()
        gaps = await gaps_beside(all_pages)
        return in_microseconds(took) | gaps | {"all_seconds": time.perf_counter() - began}
