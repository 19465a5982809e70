"""Thousands of schedules of one setting each, over the real rules: nothing is lost, doubled, overlapping or blocked."""

from __future__ import annotations

import pytest

from tests.model.settings import ALL
from tests.model.storage import Memory, Sqlite
from tests.model.world import play

QUICK = {"mixed": 1000, "harsh": 800, "nested": 600, "streams": 100}
"""Schedules in memory; a tenth of them are run over SQLite as well."""

SLOW = 20


def seeds(name: str, first: int, count: int) -> list[object]:
    """Slices of schedules that are run together."""
    return [
        pytest.param(name, range(start, min(start + 200, first + count)), id=f"{name}-{start}")
        for start in range(first, first + count, 200)
    ]


@pytest.mark.parametrize(("name", "slice_"), [case for name in ALL for case in seeds(name, 0, QUICK[name])])
def test_every_schedule_in_memory_keeps_all_promises(name: str, slice_: range) -> None:
    """Whatever is killed, paused, sent again, deleted or cancelled, no promise is broken."""
    for seed in slice_:
        play(seed, ALL[name], Memory)


@pytest.mark.parametrize(("name", "slice_"), [case for name in ALL for case in seeds(name, 0, QUICK[name] // 10)])
def test_every_schedule_in_sqlite_keeps_all_promises(name: str, slice_: range) -> None:
    """The operations on a database keep the same promises."""
    for seed in slice_:
        play(seed, ALL[name], Sqlite)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "slice_"), [case for name in ALL for case in seeds(name, 100_000, SLOW * QUICK[name])]
)
def test_many_more_schedules_in_memory_keep_all_promises(name: str, slice_: range) -> None:
    """As above, for as long as there is time."""
    for seed in slice_:
        play(seed, ALL[name], Memory)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "slice_"), [case for name in ALL for case in seeds(name, 100_000, 2 * QUICK[name])])
def test_many_more_schedules_in_sqlite_keep_all_promises(name: str, slice_: range) -> None:
    """As above, for as long as there is time."""
    for seed in slice_:
        play(seed, ALL[name], Sqlite)


@pytest.mark.parametrize("seed", range(20))
def test_both_storages_tell_the_same_story(seed: int) -> None:
    """A schedule runs the same over memory and SQLite, step by step."""
    memory, sqlite = (play(seed, ALL["mixed"], storage) for storage in (Memory, Sqlite))
    assert memory.ledger.trace == sqlite.ledger.trace
