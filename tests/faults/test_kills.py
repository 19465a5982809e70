"""Processes that are killed or stopped; `make faults` does more of each."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import pytest

from tests.faults import crowds, kills, steps
from tests.faults.points import POINTS
from tests.faults.storage import Storage
from tests.faults.table import Row

SEED: Final = 1

NARROW: Final = tuple(point for point in POINTS if point.endswith((": done", ": committed", " tool: after")))
"""The moments between doing a thing and having said so."""


def check(rows: list[Row]) -> None:
    """Nothing was lost, doubled or out of order, and there were faults."""
    assert [detail for row in rows for detail in row.details] == []
    assert all(row.injected for row in rows)


async def test_killed(storage: Storage) -> None:
    """Whatever moment a process is killed at, each message has one turn, in order, and no effect is doubled."""
    check(await kills.killed(storage, SEED, times=4))


async def test_stopped(storage: Storage) -> None:
    """A process that was stopped for longer than its lease changes nothing when it goes on."""
    check([await kills.storm(storage, SEED, "SIGSTOP", [kills.stop] * 2)])


async def test_two_applications(storage: Storage) -> None:
    """Each application finishes its own work only."""
    check(await kills.two_applications(storage, SEED, times=3))


@pytest.mark.parametrize("shard", range(4))
async def test_points(tmp_path: Path, shard: int) -> None:
    """A process killed between doing a thing and saying so has lost nothing and doubled nothing."""
    check(await steps.at_points(tmp_path, SEED, NARROW[shard::4]))


async def test_one_conversation(storage: Storage) -> None:
    """Processes that ask for turns of one conversation at once get them in order, one at a time."""
    check(await crowds.one_conversation(storage, SEED, each=8))


async def test_deletes(storage: Storage) -> None:
    """Nothing of a deleted conversation comes back, whoever runs its turns."""
    check(await crowds.deleted(storage, SEED, rounds=6))


async def test_poison(storage: Storage) -> None:
    """A message that kills its process is given up, and the conversation goes on."""
    check(await crowds.poisoned(storage, SEED))


async def test_stops_at_points(tmp_path: Path) -> None:
    """A process that goes on while another one does its turn runs nothing twice, and commits nothing."""
    points = ("start: after", "journal: committed", "plain tool: before", "plain tool: after", "commit: before")
    check(await steps.stops_at_points(tmp_path, SEED, points))
