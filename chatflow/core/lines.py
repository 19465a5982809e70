"""What happens in a conversation's line: queueing, starting, accepting, leaving, taking over.

Each function is part of one atomic operation of a storage, which gives it its `Rows`. What a row becomes is said in
`rows`; which rows are looked at, and in which order, here.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator

import attrs

from chatflow.core.approvals import is_decision_id
from chatflow.core.records import Accepted, Beat, Claim, Cycle, Dead, InProgress, Leaving, Ticket
from chatflow.core.rows import (
    LIVE,
    WAITING,
    End,
    Row,
    State,
    dead,
    ended,
    interrupted,
    is_spent,
    next_attempt,
    passes,
    started,
    taken,
)


class Rows(ABC):
    """The rows of a storage, inside one of its operations. *holder* is who asks."""

    holder: str

    @abstractmethod
    def find(self, turn_id: int) -> Row | None:
        """The row of that id."""

    @abstractmethod
    def of_message(self, session_key: int, message_id: str) -> Row | None:
        """The row of that message."""

    @abstractmethod
    def running(self, session_key: int) -> Row | None:
        """The row that runs in that conversation."""

    @abstractmethod
    def next_in_line(self, session_key: int, above: int, below: int) -> Row | None:
        """The first row in line with an id between the two."""

    @abstractmethod
    def insert(self, row: Row, ticket: Ticket) -> Row:
        """Add a row, with an id above all that were ever given out; with what *ticket* says of its work and lease."""

    @abstractmethod
    def write(self, row: Row) -> None:
        """Store the row as it is now. One that leaves the line for good notes when."""

    @abstractmethod
    def delete(self, row: Row) -> None:
        """Remove the row and its journal."""

    @abstractmethod
    def awaits(self, row: Row, ticket: Ticket) -> None:
        """Note on a row that was taken who awaits it now, and for how long it may be silent."""

    @abstractmethod
    def share_lease(self, row: Row, of: Row) -> None:
        """Note that *row* may be silent for as long as *of*: whoever holds that one beats both."""

    @abstractmethod
    def move_journal(self, old: Row, new: Row) -> None:
        """Give the journal of one row to another."""

    @abstractmethod
    def has_journal(self, row: Row) -> bool:
        """Whether the row's turn has noted anything."""

    @abstractmethod
    def drop_journal(self, row: Row) -> None:
        """Remove the row's journal."""

    @abstractmethod
    def beat(self, row: Row) -> int:
        """The row's beat."""

    @abstractmethod
    def waits_for(self, session_key: int, ancestors: tuple[int, ...]) -> bool:
        """Whether a turn in that line waits, directly or through others, for one of *ancestors*."""

    @abstractmethod
    def is_gone(self, holder: str) -> bool:
        """Whether that holder is known not to exist any more, so that its beat need not be watched."""


def queue(rows: Rows, session_key: int, ticket: Ticket) -> Row | InProgress | Dead | Cycle:
    """A place for the ticket's turn: a new one, or that of its message where nobody has it in hand."""
    own = None if ticket.claim is None else _of_message(rows, session_key, ticket.claim.message_id)
    if own is not None:
        assert ticket.claim is not None
        found = _known(own, ticket.claim, ticket)
        if found is not None:
            return Cycle() if own.state in LIVE and rows.waits_for(session_key, ticket.ancestors) else found
    if rows.waits_for(session_key, ticket.ancestors):
        return Cycle()
    if own is not None and own.state is not State.TOLD:
        row = _anew(taken(own, rows.holder))
        rows.write(row)
        rows.awaits(row, ticket)
        return row
    return _insert(rows, session_key, ticket, own, State.QUEUED)


def _of_message(rows: Rows, session_key: int, message_id: str) -> Row | None:
    row = rows.of_message(session_key, message_id)
    return row if row is None or not _holder_is_gone(rows, row) else interrupt(rows, row)


def _known(own: Row, claim: Claim, ticket: Ticket) -> InProgress | Dead | None:
    """What to tell the caller whose message has a row, unless it may go on with it."""
    assert own.digest is not None
    if own.state is State.DEAD:
        return Dead(own.digest, own.attempts)
    if own.state is State.ANSWERED:
        return InProgress(own.digest, own.turn_id, held=own.holder is not None)
    if own.holder is not None or own.digest != claim.digest:
        return InProgress(own.digest, own.turn_id)
    if own.state in WAITING and own.agent_name != ticket.agent_name:
        return InProgress(own.digest, own.turn_id, held=False)
    return None


def _insert(rows: Rows, session_key: int, ticket: Ticket, told: Row | None, state: State) -> Row:
    """A new row at the end of the line; a message that was told of its end brings its attempts and its journal."""
    claim = ticket.claim
    row = Row(
        turn_id=0,
        session_key=session_key,
        state=state,
        holder=rows.holder if state is State.QUEUED else None,
        attempt=next_attempt(),
        attempts=0 if told is None else _anew(told).attempts,
        accepted=state is State.ACCEPTED,
        agent_name=ticket.agent_name,
        message_id=None if claim is None else claim.message_id,
        digest=None if claim is None else claim.digest,
    )
    if told is None:
        return rows.insert(row, ticket)
    # A message has one row at a time: the old one gives up its id first, and goes once its journal is in safety.
    rows.write(attrs.evolve(told, message_id=None))
    row = rows.insert(row, ticket)
    rows.move_journal(told, row)
    rows.delete(told)
    return row


def start(rows: Rows, row: Row, max_attempts: int | None) -> tuple[Row, Row | None] | Dead:
    """The row as it is now, and what runs for its holder: itself, work before it that is to be done first, or nothing.

    What is spent is given up; for the row itself that is `Dead`.
    """
    if row.state in WAITING:
        row = taken(row, rows.holder)
        rows.write(row)
    if row.state is State.RUNNING:
        return row, row
    while True:
        following = _next_to_run(rows, row)
        if following is None:
            return row, None
        if not is_spent(following, max_attempts):
            runs = started(following, rows.holder)
            rows.write(runs)
            if runs.turn_id == row.turn_id:
                return runs, runs
            rows.share_lease(runs, row)
            return row, runs
        _end_spent(rows, following)
        if following.turn_id == row.turn_id:
            assert row.digest is not None
            return Dead(row.digest, row.attempts)


def _next_to_run(rows: Rows, row: Row) -> Row | None:
    running = rows.running(row.session_key)
    if running is not None and not _holder_is_gone(rows, running):
        return None
    if running is not None:
        interrupt(rows, running)
    for found in _before(rows, row):
        other = interrupt(rows, found) if _holder_is_gone(rows, found) else found
        if other is not None and not passes(row.agent_name, other):
            return other if other.state in WAITING and other.holder is None else None
    return row


def _before(rows: Rows, row: Row) -> Iterator[Row]:
    """The rows in line before that one, in order; each is looked up when it is asked for."""
    found = rows.next_in_line(row.session_key, 0, row.turn_id)
    while found is not None:
        yield found
        found = rows.next_in_line(row.session_key, found.turn_id, row.turn_id)


def _holder_is_gone(rows: Rows, row: Row) -> bool:
    return row.holder is not None and row.holder != rows.holder and rows.is_gone(row.holder)


def _anew(row: Row) -> Row:
    """The row as its caller asks for it again; what a person decides is not counted."""
    return attrs.evolve(row, attempts=0) if is_decision_id(row.message_id) else row


def _end_spent(rows: Rows, row: Row) -> Row:
    """The row after its last attempt: dead, but for a decision whose tool has run.

    That one steps aside with its journal, in which the result is: whoever decides again finishes it.
    """
    if is_decision_id(row.message_id) and rows.has_journal(row):
        left = attrs.evolve(row, state=State.TOLD, holder=None)
        rows.write(left)
        return left
    give_up(rows, row)
    return dead(row)


def give_up(rows: Rows, row: Row) -> None:
    """The row is dead; its journal goes."""
    rows.write(dead(row))
    rows.drop_journal(row)


def accept(rows: Rows, session_key: int, ticket: Ticket) -> Accepted | Dead:
    """Work to be done: a new row, or the message's own, which from now on may not step aside."""
    claim = ticket.claim
    assert claim is not None
    own = _of_message(rows, session_key, claim.message_id)
    if own is None or (own.state is State.TOLD and own.digest == claim.digest):
        row = _insert(rows, session_key, ticket, own, State.ACCEPTED)
        return Accepted(row.turn_id, claim.digest, known=False)
    assert own.digest is not None
    if own.state is State.DEAD:
        return Dead(own.digest, own.attempts)
    if own.digest == claim.digest:
        rows.write(attrs.evolve(own, accepted=True))
    return Accepted(own.turn_id, own.digest, known=True)


def leave(rows: Rows, leaving: Leaving) -> Row | None:
    """The row after its holder has let go of it; None if nothing is left of it, or the fence has changed."""
    row = rows.find(leaving.turn_id)
    if row is None or not row.is_of(rows.holder, leaving.attempt):
        return None
    left = ended(row, leaving.end, leaving.max_attempts)
    if left is not None and left.state is State.TOLD and leaving.is_decision:
        if not rows.has_journal(row):
            left = None  # a person may decide otherwise as long as nothing has come of it
        elif leaving.end is End.TOLD:
            # Else the next turn would tell its model of a call that nobody has decided about, and it has run.
            left = attrs.evolve(left, state=State.INTERRUPTED)
    if left is None:
        rows.delete(row)
    elif left.state is State.DEAD:
        left = _end_spent(rows, left)
    else:
        left = attrs.evolve(left, holder=rows.holder if leaving.hold and left.state in WAITING else None)
        rows.write(left)
    return left


def interrupt(rows: Rows, row: Row) -> Row | None:
    """The row after its holder is gone; None if nothing is left of it."""
    left = interrupted(row)
    if left is None:
        rows.delete(row)
    else:
        rows.write(left)
    return left


def interrupt_silent(rows: Rows, beat: Beat) -> bool:
    """Interrupt the row of *beat*, if its beat is still the same, and its fence too."""
    row = rows.find(beat.turn_id)
    if row is None or row.holder is None or row.attempt != beat.attempt or rows.beat(row) != beat.beat:
        return False
    interrupt(rows, row)
    return True


def first_to_take(rows: Rows, row: Row) -> bool:
    """Whether work that nobody has in hand may be taken: no row before it that it may not pass."""
    return all(passes(row.agent_name, other) for other in _before(rows, row))
