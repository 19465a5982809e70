"""PostgreSQL servers that are killed, cut connections, or have no room; `make faults` does more of each."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Final

import pytest

from tests.faults import kills, postgres
from tests.faults.table import Row

SEED: Final = 1


def check(rows: list[Row]) -> None:
    """Nothing was lost, doubled or out of order; a fault that can't be made on this machine is skipped."""
    assert [detail for row in rows for detail in row.details] == []
    if not any(row.injected for row in rows):
        pytest.skip("; ".join(note for row in rows for note in row.notes))


async def test_killed(tmp_path: Path) -> None:
    """Whatever moment a process is killed at, each message has one turn, in order, and no effect is doubled."""
    check(await postgres.on_postgres(partial(kills.killed, times=4))(tmp_path, SEED))


async def test_restarted(tmp_path: Path) -> None:
    """A server that is killed under load and comes back has lost no turn, and none is doubled."""
    check(await postgres.restarted(tmp_path, SEED, times=3))


async def test_failed_over(tmp_path: Path) -> None:
    """Work goes on over a failover to a synchronous standby, and nothing that was acknowledged is lost."""
    check(await postgres.failed_over(tmp_path, SEED))


async def test_cut_off(tmp_path: Path) -> None:
    """A server that cuts all connections under load, also those that commit, loses and doubles nothing."""
    check(await postgres.cut_off(tmp_path, SEED, times=8))


async def test_full(tmp_path: Path) -> None:
    """A server without room refuses turns, in its own words, or ends, and work goes on once there is room."""
    check(await postgres.full(tmp_path, SEED, rounds=1))
