"""Disks that are full or fail, and what others do to the file; `make faults` does more of each."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import pytest

from tests.faults import disk, outside
from tests.faults.storage import SQLiteFile
from tests.faults.table import Row

SEED: Final = 1


def check(rows: list[Row]) -> None:
    """Nothing was lost, doubled or out of order; a fault that can't be made on this machine is skipped."""
    assert [detail for row in rows for detail in row.details] == []
    if not any(row.injected for row in rows):
        pytest.skip("; ".join(note for row in rows for note in row.notes))


async def test_full(tmp_path: Path) -> None:
    """A full disk refuses, says so, and everything works once there is room."""
    check(await disk.full(tmp_path, SEED, rounds=1))


@pytest.mark.parametrize("kind", ["write", "sync", "short"])
async def test_failing(tmp_path: Path, kind: str) -> None:
    """A call of the system that fails below SQLite leaves no half turn."""
    check(await disk.failing(tmp_path, SEED, rounds=1, kinds=[kind]))


async def test_forbidden(tmp_path: Path) -> None:
    """A file that may not be written to any more refuses, says so, and works once it may."""
    check(await disk.forbidden(tmp_path, SEED, rounds=1))


async def test_log_cut(tmp_path: Path) -> None:
    """A log that was cut or deleted takes turns away as a whole and from the end."""
    check(await outside.log_cut(SQLiteFile(tmp_path), SEED, rounds=1))


async def test_clock(tmp_path: Path) -> None:
    """No rule hangs on a clock that others can set."""
    check(await outside.clock(SQLiteFile(tmp_path), SEED, rounds=2))


async def test_foreign_writer(tmp_path: Path) -> None:
    """A foreign writer delays turns, and no event loop."""
    check(await outside.foreign_writer(SQLiteFile(tmp_path), SEED, rounds=1))
