"""All scenarios, by name; each takes a folder, a seed, and the number of its round."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, Final

from tests.faults import crowds, disk, kills, outside, steps
from tests.faults.points import POINTS
from tests.faults.table import Row

Scenario = Callable[[Path, int, int], Coroutine[Any, Any, list[Row]]]


def _plain(scenario: Callable[[Path, int], Coroutine[Any, Any, list[Row]]]) -> Scenario:
    async def run(folder: Path, seed: int, turn: int) -> list[Row]:
        return await scenario(folder, seed)

    return run


async def _points(folder: Path, seed: int, turn: int) -> list[Row]:
    return await steps.at_points(folder, seed, POINTS, nth=turn)


async def _stops_at_points(folder: Path, seed: int, turn: int) -> list[Row]:
    return await steps.stops_at_points(folder, seed, nth=turn)


SCENARIOS: Final[dict[str, Scenario]] = {
    "kills": _plain(kills.killed),
    "stops": _plain(kills.stopped),
    "applications": _plain(kills.two_applications),
    "conversation": _plain(crowds.one_conversation),
    "deletes": _plain(crowds.deleted),
    "poison": _plain(crowds.poisoned),
    "full-disk": _plain(disk.full),
    "failing-disk": _plain(disk.failing),
    "permissions": _plain(disk.forbidden),
    "log": _plain(outside.log_cut),
    "clock": _plain(outside.clock),
    "writer": _plain(outside.foreign_writer),
    "stop-points": _stops_at_points,
    "points": _points,
}
