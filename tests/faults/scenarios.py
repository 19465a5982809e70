"""All scenarios, by name; each takes a folder, a seed, and the number of its round."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from functools import partial
from pathlib import Path
from typing import Any, Final

from tests.faults import crowds, disk, kills, load, outside, postgres, steps
from tests.faults.points import POINTS
from tests.faults.storage import SQLiteFile
from tests.faults.table import Row

Scenario = Callable[[Path, int, int], Coroutine[Any, Any, list[Row]]]


def _plain(scenario: Callable[[Path, int], Coroutine[Any, Any, list[Row]]]) -> Scenario:
    return lambda folder, seed, turn: scenario(folder, seed)


def _on_file(scenario: Callable[[SQLiteFile, int], Coroutine[Any, Any, list[Row]]]) -> Scenario:
    return lambda folder, seed, turn: scenario(SQLiteFile(folder), seed)


def _on_postgres(scenario: Callable[[Path, int], Coroutine[Any, Any, list[Row]]]) -> Scenario:
    async def run(folder: Path, seed: int, turn: int) -> list[Row]:
        rows = await scenario(folder, seed)
        for row in rows:
            row.fault = f"PostgreSQL: {row.fault}"
        return rows

    return run


async def _points(folder: Path, seed: int, turn: int) -> list[Row]:
    return await steps.at_points(folder, seed, POINTS, nth=turn)


async def _stops_at_points(folder: Path, seed: int, turn: int) -> list[Row]:
    return await steps.stops_at_points(folder, seed, nth=turn)


SCENARIOS: Final[dict[str, Scenario]] = {
    "kills": _on_file(kills.killed),
    "stops": _on_file(kills.stopped),
    "applications": _on_file(kills.two_applications),
    "conversation": _on_file(crowds.one_conversation),
    "deletes": _on_file(crowds.deleted),
    "poison": _on_file(crowds.poisoned),
    "full-disk": _plain(disk.full),
    "failing-disk": _plain(disk.failing),
    "permissions": _plain(disk.forbidden),
    "log": _on_file(outside.log_cut),
    "clock": _on_file(outside.clock),
    "writer": _on_file(outside.foreign_writer),
    "postgres-kills": _on_postgres(postgres.on_postgres(kills.killed)),
    "postgres-stops": _on_postgres(postgres.on_postgres(kills.stopped)),
    "postgres-applications": _on_postgres(postgres.on_postgres(kills.two_applications)),
    "postgres-conversation": _on_postgres(postgres.on_postgres(partial(crowds.one_conversation, each=8))),
    "postgres-deletes": _on_postgres(postgres.on_postgres(crowds.deleted)),
    "postgres-poison": _on_postgres(postgres.on_postgres(crowds.poisoned)),
    "postgres-restarts": _on_postgres(postgres.restarted),
    "postgres-cuts": _on_postgres(postgres.cut_off),
    "postgres-failover": _on_postgres(postgres.failed_over),
    "postgres-full-disk": _on_postgres(postgres.full),
    "stop-points": _stops_at_points,
    "points": _points,
}

LONG: Final[dict[str, Scenario]] = {
    "load": _on_file(load.loaded),
    "postgres-load": _on_postgres(postgres.on_postgres(load.loaded)),
}
"""Those that take many minutes, and are run only where they are asked for by name."""
