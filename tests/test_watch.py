"""What a watcher makes of others' beats, by its own clock alone."""

from __future__ import annotations

from typing import Final

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from chatflow.core.beats import Watch
from chatflow.core.records import Beat

LEASE: Final = 9.0
THIRD: Final = 3.0


def beat(count: int = 1, *, turn_id: int = 1, attempt: int = 1, lease_seconds: float = LEASE) -> Beat:
    """A row's sign of life."""
    return Beat(turn_id=turn_id, attempt=attempt, beat=count, lease_seconds=lease_seconds)


def test_silent_for_four_beats() -> None:
    """A row is silent once its beat stood still for four beats of the watcher, a third of the row's lease apart."""
    watch = Watch()
    assert [bool(watch.look([beat()], number * THIRD)) for number in range(6)] == [False] * 4 + [True] * 2


def test_one_that_beats() -> None:
    """A row whose beat moves within three beats of the watcher is never silent."""
    watch = Watch()
    assert not any(watch.look([beat(number // 4)], number * THIRD) for number in range(100))


@pytest.mark.parametrize("after", [beat(2), beat(attempt=2), beat(lease_seconds=1)])
def test_begins_anew(after: Beat) -> None:
    """A row that has moved, or was taken by somebody else, is watched from the beginning."""
    watch = Watch()
    for number in range(4):
        watch.look([beat()], number * THIRD)
    assert not watch.look([after], 4 * THIRD)
    assert [bool(watch.look([after], number * THIRD)) for number in range(5, 9)] == [False] * 3 + [True]


def test_looks_close_together() -> None:
    """Looks that come sooner than a third of the lease count for nothing."""
    watch = Watch()
    for number in range(1000):
        assert not watch.look([beat()], number * 0.001)


def test_watcher_was_stopped() -> None:
    """However long a watcher did not run, it counts one beat for that time."""
    watch = Watch()
    assert not watch.look([beat()], 0)
    assert not watch.look([beat()], 1_000_000)
    assert not watch.look([beat()], 1_000_000 + THIRD)
    assert not watch.look([beat()], 1_000_000 + 2 * THIRD)
    assert watch.look([beat()], 1_000_000 + 3 * THIRD)


def test_stopped_between_reading_and_looking() -> None:
    """What was read before the watcher was stopped says nothing of the time in which it did not run."""
    watch = Watch()
    for number in range(4):
        watch.look([beat()], number * THIRD)
    assert not watch.look([beat()], 1_000_000, asked=3 * THIRD + 0.001)
    assert watch.look([beat()], 1_000_001)


def test_waited_for_the_storage() -> None:
    """The time that a beat waits for the storage counts for nobody's silence: not before the next one has begun."""
    watch = Watch()
    watch.look([beat()], now=100, asked=0)
    assert watch.due() == 100 + THIRD
    assert not watch.look([beat()], now=100 + THIRD, asked=100 + THIRD - 0.001)
    assert watch.due() == 100 + THIRD


def test_no_longer_watched() -> None:
    """A row that was out of sight is watched from the beginning."""
    watch = Watch()
    for number in range(4):
        watch.look([beat()], number * THIRD)
    watch.look([], 4 * THIRD)
    assert not watch.look([beat()], 5 * THIRD)


def test_each_by_its_own_lease() -> None:
    """Rows of different leases are silent each after four beats of its own lease."""
    watch = Watch()
    rows = [beat(turn_id=1, lease_seconds=3), beat(turn_id=2, lease_seconds=9)]
    silent = [{each.turn_id for each in watch.look(rows, now)} for now in range(13)]
    assert silent[3] == set()
    assert silent[4:12] == [{1}] * 8
    assert silent[12] == {1, 2}


def test_when_to_look_again() -> None:
    """The next look is due a third of the shortest watched lease after the last that counted; with nobody, never."""
    watch = Watch()
    assert watch.due() is None
    watch.look([beat(turn_id=1, lease_seconds=9), beat(turn_id=2, lease_seconds=30)], 100)
    assert watch.due() == 103
    watch.look([beat(turn_id=2, lease_seconds=30)], 101)
    assert watch.due() == 110
    watch.look([], 102)
    assert watch.due() is None


@attrs.frozen
class Look:
    asked: float
    now: float
    beat: int | None


@st.composite
def looks(draw: st.DrawFn) -> list[Look]:
    """A watcher's looks at one row, which beats, stands still, or is out of sight."""
    found: list[Look] = []
    now, count = 0.0, 0
    for _ in range(draw(st.integers(1, 30))):
        asked = now + draw(st.sampled_from([0.0, 0.5, 2.9, 3.0, 3.1, 50.0]))
        now = asked + draw(st.sampled_from([0.0, 0.1, 3.0, 50.0]))
        count += draw(st.sampled_from([0, 0, 0, 0, 0, 1]))
        found.append(Look(asked, now, None if draw(st.integers(0, 20)) == 0 else count))
    return found


def counted(seen: list[Look]) -> int:
    """How many of *seen*, the last looks at one beat, are a third of the lease after the one that counted before."""
    count, last = 0, seen[0].now
    for look in seen[1:]:
        if look.asked >= last + THIRD:
            count, last = count + 1, look.now
    return count


@given(looks())
def test_never_too_early_and_never_too_late(seen: list[Look]) -> None:
    """A row is silent with each read that is the fifth of one beat or a later one, a third of a lease apart each."""
    watch = Watch()
    for end, look in enumerate(seen, 1):
        silent = watch.look([] if look.beat is None else [beat(look.beat)], look.now, asked=look.asked)
        start = end - 1
        while start > 0 and seen[start - 1].beat == look.beat:
            start -= 1
        count = counted(seen[start:end])
        counts = start < end - 1 and count > counted(seen[start : end - 1])
        assert bool(silent) is (look.beat is not None and counts and count >= 4)
