from __future__ import annotations

import pytest

from tests.faults.load import loaded
from tests.faults.storage import Storage

SEED = 1


@pytest.mark.slow
async def test_load(storage: Storage) -> None:
    """Of 20,000 messages, delivered twice to 8 processes that are killed all the time, each has one turn, in order."""
    (row,) = await loaded(storage, SEED)
    assert row.details == []
    assert (row.acknowledged, row.lost, row.doubled, row.out_of_order) == (20_000, 0, 0, 0)
    assert row.injected
