"""Each rule of a turn's row, taken out: some schedule breaks a promise then. What nothing misses would have to go."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import count
from typing import Any

import attrs
import pytest

from chatflow.core import beats, lines, memory_rows, memory_tables, rows
from chatflow.core.memory_rows import MemoryRows
from chatflow.core.records import Beat, Dead, InProgress, Ticket
from chatflow.core.rows import IN_LINE, LIVE, WAITING, End, Row, State, dead, ended, interrupted, passes, started, taken
from tests.model import runs, worker
from tests.model.broken import (
    CommitWithoutRow,
    ForgottenAnswer,
    ForgottenIds,
    NoJournal,
    RowsStay,
    TakenFromOthers,
    TakenWhileIdle,
    UnfencedCommit,
    UnfencedJournal,
)
from tests.model.ledger import Violation
from tests.model.process import ALL_HABITS, Habits
from tests.model.settings import HARSH, MIXED, NESTED, STREAMS, Setting
from tests.model.storage import Clock, Memory, Storage
from tests.model.world import play

SCHEDULES = 600
"""In how many a rule that was taken out has to be missed."""

Patch = pytest.MonkeyPatch


@attrs.frozen
class Mutant:
    """A rule taken out: how, in which schedules it is missed, and which promise is broken then."""

    setting: Setting
    broken: tuple[str, ...]
    patch: Callable[[Patch], None] = lambda patch: None
    habits: Habits = ALL_HABITS
    storage: Callable[[Clock], Storage] = Memory


def _lines(name: str, mutated: Callable[..., Any]) -> Callable[[Patch], None]:
    """The rule of that name is another wherever it is used."""

    def patch(patch: Patch) -> None:
        for module in (lines, memory_tables):
            if hasattr(module, name):
                patch.setattr(module, name, mutated)

    return patch


def _rows(name: str, mutated: Callable[..., Any]) -> Callable[[Patch], None]:
    return lambda patch: patch.setattr(MemoryRows, name, mutated)


def _ids_again(patch: Patch) -> None:
    insert = MemoryRows.insert

    def mutated(self: MemoryRows, row: Row, ticket: Ticket) -> Row:
        self._ids = count(max(self._turns, default=0) + 1)
        return insert(self, row, ticket)

    patch.setattr(MemoryRows, "insert", mutated)
    for module in (rows, lines):
        patch.setattr(module, "next_attempt", lambda attempt=0: attempt + 1)


def _at_once(patch: Patch) -> None:
    for module in (runs, worker):
        patch.setattr(module, "delay", lambda failures, error: 0.0)


def _still_once(patch: Patch) -> None:
    patch.setattr(beats, "_STILL", 1)


def _by_the_clock(patch: Patch) -> None:
    """A watcher that was stopped itself takes the time for silence."""

    def mutated(self: beats.Watch, others: Iterable[Beat], now: float, *, asked: float | None = None) -> list[Beat]:
        before, self._observed = self._observed, {}
        silent: list[Beat] = []
        for beat in others:
            seen = before.get(beat.turn_id)
            if seen is None or seen.beat != beat:
                seen = beats._Observed(beat, now)
            elif now > seen.at + 4 / 3 * beat.lease_seconds:
                silent.append(beat)
            self._observed[beat.turn_id] = seen
        return silent

    patch.setattr(beats.Watch, "look", mutated)


def _by_own_lease(patch: Patch) -> None:
    """A watcher counts a third of its own lease, whatever the row's is."""
    look = beats.Watch.look

    def mutated(self: beats.Watch, others: Iterable[Beat], now: float, *, asked: float | None = None) -> list[Beat]:
        short = [attrs.evolve(beat, lease_seconds=1.0) for beat in others]
        return look(self, short, now, asked=asked)

    patch.setattr(beats.Watch, "look", mutated)


def _any_beat(rows: lines.Rows, beat: Beat) -> bool:
    row = rows.find(beat.turn_id)
    if row is None or row.holder is None:
        return False
    lines.interrupt(rows, row)
    return True


def _kept_without_id(row: Row) -> Row:
    return interrupted(row) or attrs.evolve(row, state=State.INTERRUPTED, holder=None)


def _interrupted_steps_aside(row: Row) -> Row | None:
    left = interrupted(row)
    return left if left is None or left.state is not State.INTERRUPTED else attrs.evolve(left, state=State.TOLD)


def _ended(change: Callable[[Row, Row], Row]) -> Callable[[Row, End, int | None], Row | None]:
    def mutated(row: Row, end: End, max_attempts: int | None) -> Row | None:
        left = ended(row, end, max_attempts)
        return None if left is None else change(row, left)

    return mutated


def _instead(before: State, after: State) -> Callable[[Row, Row], Row]:
    return lambda row, left: attrs.evolve(left, state=after) if left.state is before else left


def _known(change: Callable[[Row], bool]) -> Callable[..., Dead | InProgress | None]:
    known = lines._known
    return lambda own, claim, ticket: None if change(own) else known(own, claim, ticket)


def _taken_is_passed(agent_name: str | None, other: Row) -> bool:
    return passes(agent_name, other) or (other.state is State.QUEUED and other.accepted and agent_name is None)


PASSING = attrs.evolve(
    HARSH,
    conversations=1,
    processes=3,
    messages=2,
    bare=12,
    working=0.0,
    pauses=5,
    kills=0,
    failing=0.0,
    poison=0.0,
    thinking=5.0,
    accepted=0.0,
    slow=0,
    stalls=0,
    anonymous=0,
    nested=0.0,
)
"""Turns that pass what a paused process had in hand."""

MUTANTS = {
    "1 one runs at a time": Mutant(MIXED, ("overlap",), _rows("running", lambda self, session_key: None)),
    "1 in the order of ids": Mutant(MIXED, ("order",), _rows("next_in_line", lambda self, key, above, below: None)),
    "1 an id or its fence is never given out again": Mutant(
        HARSH, ("overlap", "order", "attempts", "doubled", "robbed", "in progress"), _ids_again
    ),
    "2 a start changes the fence": Mutant(
        HARSH,
        ("robbed", "effects", "attempts", "overlap"),
        _lines("started", lambda row, holder: attrs.evolve(started(row, holder), attempt=row.attempt)),
    ),
    "2 taking changes the fence": Mutant(
        HARSH,
        ("robbed", "hurried", "paid"),
        _lines("taken", lambda row, holder: attrs.evolve(taken(row, holder), attempt=row.attempt)),
    ),
    "2 a commit is fenced": Mutant(PASSING, ("overlap", "doubled", "robbed"), storage=UnfencedCommit),
    "2 a commit without its row changes nothing": Mutant(
        HARSH, ("overlap", "doubled", "attempts"), storage=CommitWithoutRow
    ),
    "2 a journal is fenced": Mutant(HARSH, ("journal", "effects"), storage=UnfencedJournal),
    "2 a turn looks before it pays": Mutant(HARSH, ("paid",), habits=Habits(looks=False)),
    "2 a deletion takes the rows along": Mutant(
        MIXED, ("doubled", "attempts", "unasked", "left over", "crash"), storage=RowsStay
    ),
    "3 queued rows are beaten": Mutant(HARSH, ("robbed", "blocked"), habits=Habits(beats_queued=False)),
    "3 whoever lost its place queues again": Mutant(HARSH, ("blocked",), habits=Habits(queues_again=False)),
    "4 a beat has to stand still four times": Mutant(HARSH, ("robbed",), _still_once),
    "4 a watcher counts beats of its own": Mutant(HARSH, ("robbed",), _by_the_clock),
    "4 a third of the watched row's lease apart": Mutant(MIXED, ("robbed",), _by_own_lease),
    "4 the lease is its doer's": Mutant(MIXED, ("robbed",), _rows("share_lease", lambda self, row, of: None)),
    "4 only what still has the same beat": Mutant(
        attrs.evolve(HARSH, slow=8, kills=0, pauses=0, latency=0.3), ("robbed",), _lines("interrupt_silent", _any_beat)
    ),
    "4 who waits watches": Mutant(HARSH, ("blocked", "recovery"), habits=Habits(watches_line=False)),
    "4 a duplicate watches": Mutant(HARSH, ("blocked",), habits=Habits(watches_duplicates=False)),
    "4 a worker watches all": Mutant(HARSH, ("left over",), habits=Habits(worker_watches=False)),
    "5 interrupted work stays": Mutant(
        HARSH, ("order", "lost", "effects", "attempts", "handed on"), _lines("interrupted", lambda row: None)
    ),
    "5 it keeps its place": Mutant(
        HARSH, ("order", "lost", "left over", "handed on"), _lines("interrupted", _interrupted_steps_aside)
    ),
    "5 without a message id it goes": Mutant(
        HARSH, ("left over", "blocked", "crash"), _lines("interrupted", _kept_without_id)
    ),
    "5 a runner does its own application's first": Mutant(
        MIXED, ("order",), _lines("passes", lambda agent_name, other: other.state in WAITING)
    ),
    "6 a bare turn passes waiting work": Mutant(
        MIXED,
        ("blocked", "left over", "late", "agents"),
        _lines("passes", lambda agent_name, other: agent_name is not None and passes(agent_name, other)),
    ),
    "6 another application passes it": Mutant(
        MIXED,
        ("agents",),
        _lines("passes", lambda agent_name, other: agent_name is None and passes(agent_name, other)),
    ),
    "6 a worker takes work while another turn runs": Mutant(STREAMS, ("starved",), storage=TakenWhileIdle),
    "6 nobody passes what was taken": Mutant(STREAMS, ("order",), _lines("passes", _taken_is_passed)),
    "6 a worker takes only what nobody has": Mutant(MIXED, ("robbed", "late"), storage=TakenFromOthers),
    "7 told turns step aside": Mutant(
        MIXED, ("unasked", "order"), _lines("ended", _ended(_instead(State.TOLD, State.INTERRUPTED)))
    ),
    "7 accepted ones do not": Mutant(
        MIXED, ("lost", "order", "handed on"), _lines("ended", _ended(_instead(State.ACCEPTED, State.TOLD)))
    ),
    "7 a told turn keeps its journal": Mutant(
        MIXED, ("effects", "journal"), _rows("move_journal", lambda self, old, new: None)
    ),
    "7 it is tried again after a while": Mutant(MIXED, ("hurried",), _at_once),
    "7 nobody else tries it meanwhile": Mutant(MIXED, ("hurried", "late"), habits=Habits(keeps_failed_work=False)),
    "7 nobody is told another's error": Mutant(
        MIXED, ("others' error", "left over"), habits=Habits(tells_others_errors=True)
    ),
    "7 a cancelled caller lets go of another's work": Mutant(
        attrs.evolve(MIXED, cancelled=0.8, impatient=0.9),
        ("blocked", "left over", "lost"),
        habits=Habits(cancelled_keeps_work=True),
    ),
    "8 starts count": Mutant(
        MIXED,
        ("attempts",),
        _lines("started", lambda row, holder: attrs.evolve(started(row, holder), attempts=row.attempts)),
    ),
    "8 told ends do not": Mutant(
        MIXED,
        ("attempts",),
        _lines("ended", _ended(lambda row, left: attrs.evolve(left, attempts=row.attempts))),
    ),
    "8 there is an end to it": Mutant(
        MIXED, ("endless", "blocked", "left over"), _lines("is_spent", lambda row, most: False)
    ),
    "8 dead turns step aside": Mutant(
        MIXED,
        ("blocked", "endless", "left over"),
        _lines("dead", lambda row: attrs.evolve(dead(row), state=State.INTERRUPTED)),
    ),
    "9 an answer waits to be handed on": Mutant(MIXED, ("handed on",), storage=ForgottenAnswer),
    "9 out of the line": Mutant(
        MIXED,
        ("blocked", "order", "late"),
        lambda patch: patch.setattr(memory_rows, "IN_LINE", IN_LINE | {State.ANSWERED}),
    ),
    "10 a duplicate takes no place": Mutant(
        MIXED, ("robbed", "answer", "paid", "overlap", "late"), _lines("_known", _known(lambda own: own.state in LIVE))
    ),
    "10 an answered id is known": Mutant(
        MIXED,
        ("doubled", "attempts"),
        lambda patch: patch.setattr(memory_tables.MemoryTables, "_find_answer", lambda self, ticket: None),
    ),
    "10 also once its conversation was deleted": Mutant(
        attrs.evolve(MIXED, deletes=2), ("doubled", "late"), storage=ForgottenIds
    ),
    "10 told of a failure, a duplicate tries again": Mutant(
        MIXED, ("in progress",), habits=Habits(duplicates_try_again=False)
    ),
    "10 another text is another message": Mutant(MIXED, ("answer", "blocked"), habits=Habits(compares_texts=False)),
    "11 there is a journal": Mutant(MIXED, ("effects", "journal"), storage=NoJournal),
    "11 of changes": Mutant(MIXED, ("overlap",), habits=Habits(journal_of_states=True)),
    "12 a slot is taken at the head of the line": Mutant(
        NESTED, ("blocked", "left over"), habits=Habits(slot_at_head=False)
    ),
    "12 and given back before a wait": Mutant(NESTED, ("blocked", "left over"), habits=Habits(slot_given_back=False)),
    "13 a ring is refused": Mutant(
        NESTED, ("blocked", "left over"), _rows("waits_for", lambda self, key, ancestors: False)
    ),
    "13 time runs from the start": Mutant(MIXED, ("timeout",), habits=Habits(timeout_from_start=False)),
}


@pytest.mark.parametrize("rule", MUTANTS)
def test_rule_is_missed(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the rule, one of the first few hundred schedules breaks a promise, and the one that the rule is for."""
    mutant = MUTANTS[rule]
    mutant.patch(monkeypatch)
    for seed in range(SCHEDULES):
        try:
            play(seed, mutant.setting, mutant.storage, mutant.habits)
        except Exception as error:  # noqa: BLE001  # without its rule the code may trip over itself as well
            kind = error.invariant if isinstance(error, Violation) else "crash"
            assert kind in mutant.broken, f"seed {seed}: {error!r}"  # noqa: PT017  # it ends the search
            return
    pytest.fail(f"nothing misses the rule in {SCHEDULES} schedules")
