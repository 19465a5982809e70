"""Bytes on disk."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from benchmarks.conversation import WINDOW
from benchmarks.stage import Stage
from benchmarks.themes.base import Case, Column, Theme

CONVERSATIONS: Final = 4


class Disk(Theme):
    """What a turn takes on disk, while the window fills and once it is full."""

    title = "Bytes on disk"
    tells = (
        f"{CONVERSATIONS} conversations take {WINDOW} turns, and then {WINDOW} more. Kept: the files' size after the"
        " first ones, a turn. Added: by how much they have grown after the others, a turn."
    )
    columns = (
        Column("kept, bytes a turn", "kept", ",.0f"),
        Column("÷ floor", "kept", ".2f", ratio=True),
        Column("added, bytes a turn", "added", ",.0f"),
    )
    rounds = 1

    def cases(self, scale: float) -> Sequence[Case]:
        """Just one."""
        return (Case(f"{CONVERSATIONS} conversations"),)

    async def measure(self, stage: Stage, settings: dict[str, Any]) -> dict[str, float]:
        """By the system's own ways, all of them."""
        system = await stage.renew()
        await system.fill(range(CONVERSATIONS), 1)
        sizes: list[int] = []
        for turns in (WINDOW - 1, WINDOW):
            for conversation in range(CONVERSATIONS):
                for _ in range(turns):
                    await system.turn(conversation)
            sizes.append(await system.bytes_on_disk())
        kept, all_of_it = sizes
        each = CONVERSATIONS * WINDOW
        return {"kept": kept / each, "added": (all_of_it - kept) / each}
