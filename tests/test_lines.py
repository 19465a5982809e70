"""Who may start and who may be taken, over rows in memory: single transitions of the rules."""

from __future__ import annotations

import datetime as dt
from typing import Any

import attrs
import pytest

from chatflow.core import lines
from chatflow.core.journal import Entry
from chatflow.core.memory_rows import MemoryRows
from chatflow.core.messages import Message, Role
from chatflow.core.records import Accepted, Beat, Claim, Cycle, Dead, InProgress, Key, Leaving, Ticket
from chatflow.core.rows import End, Row, State

SESSION = 7


class Rows(MemoryRows):
    """Rows in memory that several holders share, some of whom are gone."""

    def __init__(self) -> None:
        super().__init__(lambda: dt.datetime(2030, 1, 1, tzinfo=dt.UTC))
        self.holder = "me"
        self.gone: set[str] = set()

    def is_gone(self, holder: str) -> bool:
        """As the test says."""
        return holder in self.gone

    def states(self) -> list[tuple[State, str | None]]:
        """What the rows are, in order."""
        return [(turn.row.state, turn.row.holder) for turn in self]


@pytest.fixture
def rows() -> Rows:
    """No rows yet."""
    return Rows()


def ticket(
    message_id: str | None = None, text: str = "hi", agent_name: str | None = "Support", **details: Any
) -> Ticket:
    """Asks for a place."""
    usual: dict[str, Any] = {
        "key": Key("", "s"),
        "known": None,
        "new": None,
        "agent_name": agent_name,
        "claim": None if message_id is None else Claim(message_id, text),
        "ancestors": (),
        "lease_seconds": 10.0,
        "max_attempts": 2,
    }
    return Ticket(**(usual | details))


def queued(rows: Rows, asks: Ticket, holder: str = "me") -> Row:
    """A place in the line."""
    rows.holder = holder
    found = lines.queue(rows, SESSION, asks)
    rows.holder = "me"
    assert isinstance(found, Row)
    return found


def runs(rows: Rows, row: Row, max_attempts: int | None = 2) -> Row | None:
    """What runs for the row's holder now."""
    rows.holder = row.holder or "me"
    found = lines.start(rows, row, max_attempts)
    rows.holder = "me"
    assert not isinstance(found, Dead)
    return found[1]


def running(rows: Rows, asks: Ticket, holder: str = "me") -> Row:
    """A row that runs."""
    row = runs(rows, queued(rows, asks, holder))
    assert row is not None
    return row


def accepted(rows: Rows, message_id: str, **details: Any) -> Row:
    """Work to be done."""
    found = lines.accept(rows, SESSION, ticket(message_id, **details))
    assert isinstance(found, Accepted)
    row = rows.find(found.turn_id)
    assert row is not None
    return row


def leave(rows: Rows, row: Row, end: End, *, hold: bool = False) -> Row | None:
    """The row after its holder has let go of it."""
    leaving = Leaving(turn_id=row.turn_id, attempt=row.attempt, end=end, max_attempts=2, hold=hold)
    return lines.leave(rows, leaving)


# --- starting ---


def test_one_after_the_other(rows: Rows) -> None:
    """A row starts when no smaller one stands before it."""
    first, second, third = (queued(rows, ticket()) for _ in range(3))
    assert runs(rows, second) is None
    started = runs(rows, first)
    assert started is not None
    assert (started.turn_id, started.state) == (first.turn_id, State.RUNNING)
    assert runs(rows, second) is runs(rows, third) is None
    leave(rows, started, End.TOLD)
    assert runs(rows, third) is None
    after = runs(rows, second)
    assert after is not None
    assert after.turn_id == second.turn_id


def test_asked_again_while_it_runs(rows: Rows) -> None:
    """A row that runs already is not started a second time."""
    row = running(rows, ticket())
    assert runs(rows, row) == row


def test_ids_are_not_given_out_again(rows: Rows) -> None:
    """The id of a row that has gone is not given to another."""
    first = running(rows, ticket())
    leave(rows, first, End.TOLD)
    assert queued(rows, ticket()).turn_id > first.turn_id


def test_work_before_it_comes_first(rows: Rows) -> None:
    """Waiting work of the same application before a row is what runs for its holder."""
    work, row = accepted(rows, "m"), queued(rows, ticket())
    started = runs(rows, row)
    assert started is not None
    assert (started.turn_id, started.holder, started.attempts) == (work.turn_id, "me", 1)


@pytest.mark.parametrize("agent_name", [None, "Other"])
def test_work_of_others_is_passed(rows: Rows, agent_name: str | None) -> None:
    """Waiting work is passed by turns without a runner, and by other applications'."""
    accepted(rows, "m")
    row = queued(rows, ticket(agent_name=agent_name))
    started = runs(rows, row)
    assert started is not None
    assert started.turn_id == row.turn_id


def test_work_that_somebody_holds_is_waited_for(rows: Rows) -> None:
    """Work that somebody keeps until it is tried again is waited for."""
    work = running(rows, ticket("m"))
    lines.accept(rows, SESSION, ticket("m"))
    left = leave(rows, work, End.FAILED, hold=True)
    assert left is not None
    assert (left.state, left.holder) == (State.ACCEPTED, "me")
    assert runs(rows, queued(rows, ticket())) is None


def test_spent_work_is_given_up(rows: Rows) -> None:
    """Work that was started as often as it may be is given up, and the next one is looked at."""
    work = accepted(rows, "m")
    for _ in range(2):
        started = runs(rows, work)
        assert started is not None
        lines.interrupt(rows, started)
        found = rows.find(work.turn_id)
        assert found is not None
        work = found
    row = queued(rows, ticket())
    started = runs(rows, row)
    assert started is not None
    assert (started.turn_id, rows.states()[0]) == (row.turn_id, (State.DEAD, None))


def test_spent_row_is_dead(rows: Rows) -> None:
    """A message that was started as often as it may be is dead for whoever has its place, and its journal gone."""
    for _ in range(2):
        started = running(rows, ticket("m"))
        rows.turn(started.turn_id).journal.append(Entry(iteration=0, message=Message(Role.MODEL, "x")))
        lines.interrupt(rows, started)
    row = queued(rows, ticket("m"))
    assert lines.start(rows, row, 2) == Dead(Claim("m", "hi").digest, 2)
    assert rows.states() == [(State.DEAD, None)]
    assert rows.turn(row.turn_id).journal == []
    assert lines.queue(rows, SESSION, ticket("m")) == Dead(Claim("m", "hi").digest, 2)


# --- holders that are gone ---


@pytest.mark.parametrize("runner", ["Support", None])
def test_running_row_of_a_gone_holder(rows: Rows, runner: str | None) -> None:
    """A running row whose holder is gone is interrupted at once, and done first by its application's next turn."""
    lost = running(rows, ticket("m"), "gone")
    rows.gone.add("gone")
    row = queued(rows, ticket(agent_name=runner))
    started = runs(rows, row)
    assert started is not None
    assert started.turn_id == (lost.turn_id if runner else row.turn_id)
    assert not lost.is_of(started.holder or "", started.attempt)


def test_places_of_a_gone_holder(rows: Rows) -> None:
    """Places of a holder that is gone are no longer waited for: bare ones go, and messages become work."""
    first = running(rows, ticket())
    queued(rows, ticket(), "gone")
    message = queued(rows, ticket("m"), "gone")
    row = queued(rows, ticket())
    rows.gone.add("gone")
    leave(rows, first, End.TOLD)
    started = runs(rows, row)
    assert started is not None
    assert started.turn_id == message.turn_id
    assert rows.states() == [(State.RUNNING, "me"), (State.QUEUED, "me")]


def test_message_of_a_gone_holder(rows: Rows) -> None:
    """A message whose holder is gone is taken over by whoever sends it again, in its place, or accepted there."""
    lost = running(rows, ticket("m"), "gone")
    assert lines.queue(rows, SESSION, ticket("m")) == InProgress(Claim("m", "hi").digest, lost.turn_id)
    rows.gone.add("gone")
    assert lines.accept(rows, SESSION, ticket("m")) == Accepted(lost.turn_id, Claim("m", "hi").digest, known=True)
    assert rows.states() == [(State.INTERRUPTED, None)]
    row = queued(rows, ticket("m"))
    assert (row.turn_id, row.accepted, row.attempt > lost.attempt) == (lost.turn_id, True, True)


def beat_of(rows: Rows, row: Row) -> Beat:
    """The row's beat as a watcher reads it."""
    return Beat(turn_id=row.turn_id, attempt=row.attempt, beat=rows.beat(row), lease_seconds=10)


def test_silent_row_is_interrupted(rows: Rows) -> None:
    """A row whose beat is still the same is interrupted; one that has beaten, was taken, or was left is not."""
    row = running(rows, ticket("m"))
    before = beat_of(rows, row)
    rows.turn(row.turn_id).beat += 1
    assert not lines.interrupt_silent(rows, before)
    now = beat_of(rows, row)
    assert lines.interrupt_silent(rows, now)
    assert rows.states() == [(State.INTERRUPTED, None)]
    assert not lines.interrupt_silent(rows, now)
    again = queued(rows, ticket("m"))
    assert not lines.interrupt_silent(rows, now)
    leave(rows, again, End.TOLD)
    rows.delete(again)
    assert not lines.interrupt_silent(rows, now)


# --- leaving ---


def test_leaving_under_an_old_fence(rows: Rows) -> None:
    """Who has lost a row can't leave it."""
    row = running(rows, ticket("m"))
    lines.interrupt(rows, row)
    again = queued(rows, ticket("m"))
    assert leave(rows, row, End.TOLD) is None
    assert rows.find(row.turn_id) == again
    rows.holder = "other"
    assert leave(rows, again, End.TOLD) is None
    rows.delete(again)
    assert leave(rows, again, End.TOLD) is None


def test_left_row_is_not_held_out_of_line(rows: Rows) -> None:
    """A row that steps out of the line is held by nobody, also where its holder would keep it."""
    row = running(rows, ticket("m"))
    left = leave(rows, row, End.TOLD, hold=True)
    assert left is not None
    assert (left.state, left.holder) == (State.TOLD, None)


@pytest.mark.parametrize(
    ("end", "noted", "left_as"),
    [
        (End.TOLD, False, None),
        (End.FAILED, False, None),
        (End.LET_GO, False, State.INTERRUPTED),
        (End.TOLD, True, State.INTERRUPTED),
        (End.FAILED, True, State.TOLD),
        (End.LET_GO, True, State.INTERRUPTED),
    ],
)
def test_decision_that_is_left(rows: Rows, end: End, noted: bool, left_as: State | None) -> None:
    """A decision of which nothing has come is forgotten; else it keeps its place until it fails for somebody else."""
    row = running(rows, ticket("m"))
    if noted:
        rows.turn(row.turn_id).journal.append(Entry(iteration=0, message=Message(Role.MODEL, "x")))
    left = lines.leave(rows, Leaving(turn_id=row.turn_id, attempt=row.attempt, end=end, is_decision=True))
    assert (None if left is None else left.state) is left_as
    assert (rows.find(row.turn_id) is None) is (left_as is None)


def test_given_up_when_left(rows: Rows) -> None:
    """Work that fails for the last time is dead when it is left, and its journal gone."""
    for left_as in (State.ACCEPTED, State.DEAD):
        work = rows.of_message(SESSION, "m") or accepted(rows, "m")
        started = runs(rows, work)
        assert started is not None
        rows.turn(started.turn_id).journal.append(Entry(iteration=0, message=Message(Role.MODEL, "x")))
        left = leave(rows, started, End.FAILED)
        assert left is not None
        assert left.state is left_as
    assert [turn.journal for turn in rows] == [[]]


# --- messages ---


def test_told_message_takes_a_new_place(rows: Rows) -> None:
    """A message that failed comes after those that came meanwhile, and brings its attempts and its journal."""
    first = running(rows, ticket("m"))
    entry = Entry(iteration=0, message=Message(Role.MODEL, "x"))
    rows.turn(first.turn_id).journal.append(entry)
    leave(rows, first, End.FAILED)
    other = queued(rows, ticket())
    again = queued(rows, ticket("m"))
    assert (again.turn_id > other.turn_id, again.attempts) == (True, 1)
    assert rows.turn(again.turn_id).journal == [entry]
    assert rows.find(first.turn_id) is None


def test_told_message_with_another_text(rows: Rows) -> None:
    """The id of a message that failed with another text is told of the first one's, and nothing is changed."""
    first = running(rows, ticket("m"))
    leave(rows, first, End.TOLD)
    digest = Claim("m", "hi").digest
    assert lines.queue(rows, SESSION, ticket("m", "bye")) == InProgress(digest, first.turn_id)
    assert lines.accept(rows, SESSION, ticket("m", "bye")) == Accepted(first.turn_id, digest, known=True)
    assert rows.states() == [(State.TOLD, None)]
    assert not rows.turn(first.turn_id).row.accepted


def test_accepted_message_with_another_text(rows: Rows) -> None:
    """A message under way is not accepted by its id with another text."""
    row = running(rows, ticket("m"))
    assert lines.accept(rows, SESSION, ticket("m", "bye")) == Accepted(row.turn_id, Claim("m", "hi").digest, known=True)
    assert not rows.turn(row.turn_id).row.accepted


def test_dead_message(rows: Rows) -> None:
    """A dead message is dead for whoever accepts it."""
    row = running(rows, ticket("m"))
    lines.give_up(rows, row)
    assert lines.accept(rows, SESSION, ticket("m")) == Dead(Claim("m", "hi").digest, 1)


def test_message_of_another_application(rows: Rows) -> None:
    """Waiting work is not taken by the runner of another application, and nobody has it in hand."""
    work = accepted(rows, "m")
    found = lines.queue(rows, SESSION, ticket("m", agent_name="Other"))
    assert found == InProgress(Claim("m", "hi").digest, work.turn_id, held=False)


@pytest.mark.parametrize("holder", ["me", None])
def test_answered_message(rows: Rows, holder: str | None) -> None:
    """A message whose answer is still to be told is under way while somebody tells it."""
    row = running(rows, ticket("m"))
    rows.write(attrs.evolve(row, state=State.ANSWERED, holder=holder))
    found = lines.queue(rows, SESSION, ticket("m"))
    assert found == InProgress(Claim("m", "hi").digest, row.turn_id, held=holder is not None)


# --- circles ---


def test_circle(rows: Rows) -> None:
    """A turn that would wait for one that waits for it gets no place."""
    outer = running(rows, ticket())
    assert lines.queue(rows, SESSION, ticket(ancestors=(outer.turn_id,))) == Cycle()
    other = lines.queue(rows, SESSION + 1, ticket(ancestors=(outer.turn_id,)))
    assert isinstance(other, Row)


def test_circle_through_a_duplicate(rows: Rows) -> None:
    """A duplicate that would wait for the first, which waits for it, is refused; work that waits is no circle."""
    outer = running(rows, ticket("m"))
    assert lines.queue(rows, SESSION, ticket("m", ancestors=(outer.turn_id,))) == Cycle()
    assert isinstance(lines.queue(rows, SESSION, ticket("m", ancestors=(99,))), InProgress)


# --- taking work ---


def test_first_to_take(rows: Rows) -> None:
    """Of a line only the first work may be taken, what its application passes not counted."""
    other, first, second = accepted(rows, "0", agent_name="Other"), accepted(rows, "1"), accepted(rows, "2")
    assert [lines.first_to_take(rows, each) for each in (other, first, second)] == [True, True, False]
    started = runs(rows, first)
    assert started is not None
    assert not lines.first_to_take(rows, second)
    leave(rows, started, End.LET_GO)
    bare = queued(rows, ticket(agent_name=None))
    assert lines.first_to_take(rows, first)
    rows.delete(first)
    rows.delete(bare)
    assert lines.first_to_take(rows, second)


def test_holders_in_memory() -> None:
    """In memory no holder goes before the others."""
    assert not MemoryRows(lambda: dt.datetime(2030, 1, 1, tzinfo=dt.UTC)).is_gone("somebody")
