from __future__ import annotations

from typing import Any

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from chatflow.core.rows import IN_LINE, LIVE, WAITING, End, Row, State, dead, ended, interrupted, is_spent, passes
from chatflow.core.rows import started as start
from chatflow.core.rows import taken as take


def row(state: State = State.QUEUED, **fields: Any) -> Row:
    """A row of a message, held by somebody if rows of that state are."""
    usual: dict[str, Any] = {
        "turn_id": 1,
        "session_key": 1,
        "state": state,
        "holder": "me" if state in LIVE else None,
        "attempt": 1,
        "attempts": 0,
        "accepted": False,
        "agent_name": "Support",
        "message_id": "m",
        "digest": "d",
    }
    return Row(**(usual | fields))


rows = st.builds(
    row,
    st.sampled_from(State),
    holder=st.none() | st.just("me"),
    attempt=st.integers(1, 5),
    attempts=st.integers(0, 6),
    accepted=st.booleans(),
    agent_name=st.sampled_from([None, "Support", "Billing"]),
    message_id=st.sampled_from([None, "m"]),
)


@given(rows)
def test_a_new_fence_each_time(each: Row) -> None:
    """Whoever takes or starts a row has another fence than all before, and than if it is done once more."""
    once, again = take(each, "me"), take(each, "me")
    assert each.attempt < min(once.attempt, again.attempt, start(each, "me").attempt)
    assert not once.is_of("me", again.attempt)
    assert not take(each, "you").is_of("me", once.attempt)
    assert (take(each, "me").state, start(each, "me").state) == (State.QUEUED, State.RUNNING)


@given(rows)
def test_only_starts_count(each: Row) -> None:
    """Every start counts, and taking a place does not."""
    assert (take(each, "me").attempts, start(each, "me").attempts) == (each.attempts, each.attempts + 1)


@given(rows, st.sampled_from([None, "Support", "Billing"]))
def test_what_is_passed(other: Row, agent_name: str | None) -> None:
    """Waiting work of another application is passed, and any by a turn without a runner; what is held is not."""
    expected = other.state in WAITING and other.agent_name != agent_name
    assert passes(agent_name, other) is expected


def test_own_work_is_not_passed() -> None:
    """A runner's turn passes no work of its own application."""
    assert not passes("Support", row(State.ACCEPTED))
    assert passes("Billing", row(State.ACCEPTED))
    assert passes(None, row(State.INTERRUPTED))
    assert not passes("Billing", row(State.QUEUED))


@pytest.mark.parametrize(
    ("attempts", "limit", "spent"), [(4, 5, False), (5, 5, True), (6, 5, True), (6, None, False), (0, 1, False)]
)
def test_spent(attempts: int, limit: int | None, *, spent: bool) -> None:
    """A message is spent once it was started as often as it may be."""
    assert is_spent(row(attempts=attempts), limit) is spent


def test_without_a_message_never_spent() -> None:
    """A turn without a message id is not counted."""
    assert not is_spent(row(message_id=None, attempts=9), 1)


@given(rows)
def test_interrupted(each: Row) -> None:
    """After its holder is gone a message's row keeps its place without one, and its attempts; any other is gone."""
    left = interrupted(each)
    if each.message_id is None:
        assert left is None
        return
    state = State.INTERRUPTED if each.state in LIVE else each.state
    assert left == attrs.evolve(each, state=state, holder=None)


@given(rows, st.sampled_from(End), st.none() | st.integers(1, 5))
def test_ended(each: Row, end: End, max_attempts: int | None) -> None:
    """However it ends, a row has no holder then, keeps its fence, and loses at most the attempt that has just ended."""
    left = ended(each, end, max_attempts)
    if each.message_id is None:
        assert left is None
        return
    assert left is not None
    assert (left.holder, left.attempt, left.accepted) == (None, each.attempt, each.accepted)
    assert each.attempts - left.attempts in ({0, 1} if each.state is State.RUNNING else {0})
    if each.state not in LIVE:
        assert left.state is each.state
    elif each.accepted:
        assert left.state in WAITING | {State.DEAD}
    if left.state is State.DEAD and each.state is not State.DEAD:
        assert is_spent(left, max_attempts)


@pytest.mark.parametrize(
    ("end", "accepted", "attempts", "left"),
    [
        (End.TOLD, False, 1, (State.TOLD, 0)),
        (End.TOLD, True, 1, (State.ACCEPTED, 1)),
        (End.TOLD, False, 5, (State.TOLD, 4)),
        (End.TOLD, True, 5, (State.DEAD, 5)),
        (End.TOLD, False, 6, (State.TOLD, 5)),
        (End.FAILED, False, 1, (State.TOLD, 1)),
        (End.FAILED, True, 1, (State.ACCEPTED, 1)),
        (End.FAILED, False, 5, (State.DEAD, 5)),
        (End.FAILED, True, 5, (State.DEAD, 5)),
        (End.LET_GO, False, 1, (State.INTERRUPTED, 0)),
        (End.LET_GO, True, 1, (State.ACCEPTED, 0)),
        (End.LET_GO, True, 2, (State.INTERRUPTED, 1)),
        (End.LET_GO, False, 5, (State.INTERRUPTED, 4)),
    ],
)
def test_how_a_running_turn_ends(end: End, attempts: int, left: tuple[State, int], *, accepted: bool) -> None:
    """What becomes of a running row says whether somebody was told, whose fault it was, and whether it was accepted."""
    after = ended(row(State.RUNNING, attempts=attempts, accepted=accepted), end, 5)
    assert after is not None
    assert (after.state, after.attempts) == left


@pytest.mark.parametrize("end", End)
def test_leaving_a_place_costs_no_attempt(end: End) -> None:
    """Who leaves while waiting has not tried."""
    left = ended(row(State.QUEUED, attempts=2), end, 5)
    assert left is not None
    assert left.attempts == 2


def test_dead() -> None:
    """A row that was given up is out of its line, with nobody holding it."""
    assert dead(row(State.RUNNING, attempts=5)) == row(State.DEAD, attempts=5)


def test_states() -> None:
    """Told, dead and answered rows are out of the line, and the others are either held or waiting."""
    assert set(State) - IN_LINE == {State.TOLD, State.DEAD, State.ANSWERED}
    assert not WAITING & LIVE
