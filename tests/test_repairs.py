from __future__ import annotations

from typing import Final

from hypothesis import given

from chatflow.core.messages import Message, Role
from chatflow.core.pruning import prune
from chatflow.core.repairs import Row, sort_out
from tests import strategies
from tests.strategies import calls, results, says

UNCUT: Final = 10_000
"""More turns than any history here has."""


def rows_of(messages: list[Message]) -> list[Row[int]]:
    """Rows as a storage would have them, each message where its kind stands."""
    return [Row(key=key, among_systems=each.role is Role.SYSTEM, message=each) for key, each in enumerate(messages)]


@given(strategies.any_history)
def test_as_prune(messages: list[Message]) -> None:
    """What is left is what prune leaves."""
    history = sort_out(rows_of(messages))
    assert [row.message for row in (*history.systems, *history.bodies)] == list(prune(messages, UNCUT))


@given(strategies.any_history)
def test_every_row_is_accounted_for(messages: list[Message]) -> None:
    """Each row either stays or is said to go, and one that stays as it was is the very same."""
    rows = rows_of(messages)
    history = sort_out(rows)
    stay = [row.key for row in (*history.systems, *history.bodies)]
    go = [verdict.row.key for verdict in history.verdicts if not verdict.stays]
    assert sorted(stay + go) == [row.key for row in rows]
    changed = {verdict.row.key for verdict in history.verdicts if verdict.stays}
    kept = {row.key: row for row in (*history.systems, *history.bodies)}
    assert all(kept[key] is rows[key] for key in kept.keys() - changed)


@given(strategies.any_history)
def test_sound_history(messages: list[Message]) -> None:
    """Of a history that the rules allow nothing goes and nothing changes."""
    history = sort_out(rows_of(list(prune(messages, UNCUT))))
    assert history.verdicts == ()


def test_verdicts() -> None:
    """Each verdict names its row, its kind, and the reason."""
    messages = [
        *(says(Role.MODEL), results("z"), says(Role.USER), calls("a"), results("a", "b"), results("c")),
        *(says(Role.SYSTEM), says(Role.USER)),
    ]
    rows = rows_of(messages)
    rows[6] = Row(key=6, among_systems=False, message=messages[6])
    rows[7] = Row(key=7, among_systems=True, message=messages[7])
    found = [(each.row.key, each.kind, each.stays, each.reason) for each in sort_out(rows).verdicts]
    front = "it stands before the first user message"
    assert found == [
        (0, "front", False, front),
        (1, "front", False, front),
        (4, "result", True, "a result of it names the call 'b', and no call of that id stands before it"),
        (5, "result", False, "a result of it names the call 'c', and no call of that id stands before it"),
        (6, "place", True, "a system message stands among the other messages"),
        (7, "place", True, "a user message stands among the system messages"),
    ]
