"""Operations on turns: each is one function of a connection, run whole in one transaction.

The rules are those of core/lines.py. What is written here beside them is one statement for the usual case, a turn that
nobody stands before. Each operation is short; there is one for each thing that can happen to a turn.
"""

from __future__ import annotations

import datetime as dt
import logging
from typing import Any

import attrs
import msgspec

from chatflow.core import lines, reading
from chatflow.core.journal import Entry
from chatflow.core.records import (
    Accepted,
    Answered,
    Beat,
    Beaten,
    Cycle,
    Dead,
    InProgress,
    Key,
    Leaving,
    Left,
    Lost,
    PendingTurn,
    Place,
    Snapshot,
    Ticket,
    Work,
    pending_turn,
)
from chatflow.core.rows import Row, State, taken
from chatflow.core.writing import work_to_json
from chatflow.exceptions import CorruptSessionError
from chatflow.sqlite import operations
from chatflow.sqlite import turn_statements as statements
from chatflow.sqlite.aside import put_journal_aside
from chatflow.sqlite.database import Connection
from chatflow.sqlite.rows import SqliteRows, key_of, release_the_gone

logger = logging.getLogger("chatflow.store")


@attrs.frozen
class At:
    """Who asks, and when: what every operation on turns is given."""

    holder: str
    now: str
    ttl: dt.timedelta

    @property
    def expired_before(self) -> str:
        """When an id must have been processed to be forgotten by now."""
        return operations.text_of(dt.datetime.fromisoformat(self.now) - self.ttl)

    def rows(self, connection: Connection) -> SqliteRows:
        """The rows, for the rules."""
        return SqliteRows(connection, self.holder, self.now)


def queue(ticket: Ticket, at: At, connection: Connection) -> Place | Answered | InProgress | Dead | Cycle | Lost:
    """Look the claim up, insert the row or take the message's own, and start what may run."""
    claim, rows = ticket.claim, at.rows(connection)
    if claim is not None:
        answered = operations.find_processed(ticket.key, claim.message_id, at.expired_before, connection)
        if answered is not None:
            return answered
    known, found_now = _session_for(ticket, at, connection)
    if claim is None or rows.of_message(known.session_key, claim.message_id) is None:
        place = _queue_first(ticket, known, at, connection)
        if place is not None:
            return place if place.session is not None or found_now is None else attrs.evolve(place, session=found_now)
    if operations.lost(ticket.key, known, connection) is Lost.SESSION:
        return Lost.SESSION
    found = lines.queue(rows, known.session_key, ticket)
    if not isinstance(found, Row):
        return found
    return _place(rows, found, ticket.key, ticket.known, ticket.max_attempts, connection)


def _session_for(ticket: Ticket, at: At, connection: Connection) -> tuple[Snapshot, Snapshot | None]:
    """The conversation as the asking session knows it, or as it has just been found or made, and whether it was."""
    if ticket.known is not None:
        return ticket.known, None
    assert ticket.new is not None
    found = operations.load(ticket.key, None, connection)
    session = found if isinstance(found, Snapshot) else operations.create(ticket.key, ticket.new, at.now, connection)
    return session, session


def _queue_first(ticket: Ticket, known: Snapshot, at: At, connection: Connection) -> Place | None:
    claim = ticket.claim
    row = connection.execute(
        statements.QUEUE_FIRST,
        {
            "session_key": known.session_key,
            "owner": ticket.key.owner,
            "holder": at.holder,
            "lease_seconds": ticket.lease_seconds,
            "agent_name": ticket.agent_name,
            "message_id": None if claim is None else claim.message_id,
            "digest": None if claim is None else claim.digest,
            "work_json": work_to_json(claim),
            "parent": ticket.ancestors[-1] if ticket.ancestors else None,
            "now": at.now,
        },
    ).fetchone()
    if row is None:
        return None
    turn_id, version = row
    session = None if version == known.version else operations.load(ticket.key, known, connection)
    return Place(
        turn_id=turn_id,
        running=True,
        attempt=1,
        behind_own=True,
        session=session if isinstance(session, Snapshot) else None,
    )


def start(
    turn_id: int,
    attempt: int,
    key: Key,
    known: Snapshot | None,
    max_attempts: int | None,
    at: At,
    connection: Connection,
) -> Place | Dead | Lost:
    """Start what may run, if the row is still its caller's."""
    rows = at.rows(connection)
    row = rows.find(turn_id)
    if row is None or not row.is_of(at.holder, attempt):
        return operations.lost(key, known, connection)
    return _place(rows, row, key, known, max_attempts, connection)


def _place(
    rows: SqliteRows,
    row: Row,
    key: Key,
    known: Snapshot | None,
    max_attempts: int | None,
    connection: Connection,
) -> Place | Dead:
    """Start what may run for whoever holds the row; work that can't be read is given up, and the next one looked at."""
    while True:
        found = lines.start(rows, row, max_attempts)
        if isinstance(found, Dead):
            return found
        row, runs = found
        if runs is None:
            return Place(
                turn_id=row.turn_id,
                running=False,
                attempt=row.attempt,
                behind_own=_is_behind_own(rows, row, connection),
                session=None,
            )
        try:
            journal = read_journal(runs, key, connection)
            work = None if runs.turn_id == row.turn_id else _work(runs.turn_id, rows.now, connection)
        except CorruptSessionError as error:
            own = runs.turn_id == row.turn_id
            if own and not runs.accepted:
                raise  # its caller is told, and the row steps aside
            _give_up(rows, runs, error, connection)
            if own:
                # Not raised: that would undo it, and the message would be tried for ever.
                assert row.digest is not None
                return Dead(row.digest, runs.attempts)
            continue
        session = operations.load(key, known, connection)
        return Place(
            turn_id=row.turn_id,
            running=True,
            attempt=row.attempt,
            behind_own=True,
            session=session if isinstance(session, Snapshot) else None,
            work=work,
            journal=journal,
        )


def _is_behind_own(rows: SqliteRows, row: Row, connection: Connection) -> bool:
    found = connection.execute(
        statements.HOLDER_BEFORE, {"session_key": row.session_key, "turn_id": row.turn_id}
    ).fetchone()
    # Where nobody stands before it, one that has passed it runs, and that may be anybody's.
    return found is not None and found[0] == rows.holder


def read_journal(row: Row, key: Key, connection: Connection) -> tuple[Entry, ...]:
    """What an earlier attempt has left."""
    if row.message_id is None:
        return ()
    lines = connection.execute(statements.READ_JOURNAL, {"turn_id": row.turn_id})
    return reading.entries_of(row.turn_id, key.session_id, lines)


def _give_up(rows: SqliteRows, row: Row, error: CorruptSessionError, connection: Connection) -> None:
    """Give up work that can't be read; of its journal, nobody knows any more what it keeps from being done twice."""
    logger.error("turn %d is given up: %s", row.turn_id, error)
    put_journal_aside(
        row.turn_id, key_of(row.turn_id, connection), f"its turn was given up: {error}", rows.now, connection
    )
    lines.give_up(rows, row)


def _work(turn_id: int, now: str, connection: Connection) -> Work:
    found = connection.execute(statements.READ_WORK, {"turn_id": turn_id}).fetchone()
    return Work(turn=_pending(found, now), key=Key(found[1], found[2]), attempt=found[9])


def _pending(found: tuple[Any, ...], now: str) -> PendingTurn:
    turn_id, owner, session_id, message_id, work_json, agent_name, state, attempts, queued_at, _ = found
    where = f"chatflow_turns, turn_id {turn_id}"
    return pending_turn(
        Key(reading.shown(owner), reading.shown(session_id)),
        *reading.work(session_id, f"{where}, work_json", work_json),
        turn_id=turn_id,
        message_id=reading.optional_text(session_id, f"{where}, message_id", message_id),
        agent_name=reading.optional_text(session_id, f"{where}, agent_name", agent_name),
        state=reading.state(session_id, f"{where}, state", state).value,
        attempts=reading.number(session_id, f"{where}, attempts", attempts),
        queued_at=reading.moment(session_id, f"{where}, queued_at", queued_at),
        now=dt.datetime.fromisoformat(now),
    )


def accept(ticket: Ticket, at: At, connection: Connection) -> Accepted | Answered | Dead:
    """Store work to be done."""
    assert ticket.claim is not None
    answered = operations.find_processed(ticket.key, ticket.claim.message_id, at.expired_before, connection)
    if answered is not None:
        return answered
    assert ticket.new is not None
    session_key = operations.find_session(ticket.key, connection)
    if session_key is None:
        session_key = operations.create(ticket.key, ticket.new, at.now, connection).session_key
    return lines.accept(at.rows(connection), session_key, ticket)


def leave(leaving: Leaving, at: At, connection: Connection) -> Left:
    """Give the row back, and tell which row of this holder is next in its line."""
    rows = at.rows(connection)
    row = rows.find(leaving.turn_id)
    if row is None:
        return Left(None, None)
    left = lines.leave(rows, leaving)
    (following,) = connection.execute(
        statements.NEXT_OF_HOLDER, {"session_key": row.session_key, "holder": at.holder}
    ).fetchone()
    return Left(None if left is None else left.state, following)


def let_go(held: tuple[Leaving, ...], at: At, connection: Connection) -> None:
    """Give back what a store that is closed still has in hand, where others of its process go on under its name."""
    rows = at.rows(connection)
    for leaving in held:
        lines.leave(rows, leaving)


def look(turn_id: int, attempt: int, key: Key, known: Snapshot | None, at: At, connection: Connection) -> Lost | None:
    """Whether the row still runs under that fence."""
    row = at.rows(connection).find(turn_id)
    if row is not None and row.state is State.RUNNING and row.is_of(at.holder, attempt):
        return None
    return operations.lost(key, known, connection)


def is_held(turn_id: int, at: At, connection: Connection) -> bool:
    """Whether somebody has the row in hand."""
    rows = at.rows(connection)
    row = rows.find(turn_id)
    return row is not None and row.holder is not None and (row.holder == at.holder or not rows.is_gone(row.holder))


def write_journal(
    turn_id: int, attempt: int, entry_json: str, key: Key, known: Snapshot | None, at: At, connection: Connection
) -> Lost | None:
    """Add a line, under the fence."""
    written = connection.execute(
        statements.WRITE_JOURNAL,
        {"turn_id": turn_id, "attempt": attempt, "holder": at.holder, "entry_json": entry_json},
    ).fetchone()
    return operations.lost(key, known, connection) if written is None else None


def beat(held: frozenset[int], watched: frozenset[int], everything: bool, at: At, connection: Connection) -> Beaten:
    """Raise the beats of *held*, and read those to be watched."""
    own_ids, watched_ids = msgspec.json.encode(list(held)).decode(), msgspec.json.encode(list(watched)).decode()
    own: dict[int, int] = dict(connection.execute(statements.BEAT, {"held": own_ids, "holder": at.holder}).fetchall())
    if everything:
        release_the_gone(at.holder, connection)
        found = connection.execute(statements.BEATS_OF_ALL).fetchall()
    else:
        found = connection.execute(statements.BEATS_IN_LINES, {"held": own_ids, "watched": watched_ids}).fetchall()
    others = tuple(
        Beat(turn_id=turn_id, attempt=attempt, beat=count, lease_seconds=lease_seconds)
        for turn_id, attempt, count, lease_seconds in found
        # What can't be read is no sign of life, nor of its end.
        if turn_id not in own and all(isinstance(each, int | float) for each in (attempt, count, lease_seconds))
    )
    return Beaten(own=own, others=others)


def interrupt(silent: Beat, at: At, connection: Connection) -> bool:
    """Interrupt a row whose beat has stood still."""
    return lines.interrupt_silent(at.rows(connection), silent)


def is_work_at_hand(agent_name: str, answers: bool, connection: Connection) -> bool:
    """Whether there is anything to take, in a line or out of it."""
    asked = {"agent_name": agent_name, "answers": answers}
    return bool(connection.execute(statements.IS_WORK_AT_HAND, asked).fetchone()[0])


def take_work(
    agent_name: str, lease_seconds: float, limit: int, answers: bool, at: At, connection: Connection
) -> tuple[Work, ...]:
    """Take answers to hand on, then work to do."""
    rows = at.rows(connection)
    answered = [
        turn_id
        for (turn_id,) in connection.execute(
            statements.ANSWERED_AT_HAND, {"agent_name": agent_name, "limit": limit if answers else 0}
        ).fetchall()
    ]
    todo: list[int] = []
    found = connection.execute(statements.WORK_AT_HAND, {"agent_name": agent_name})
    while len(answered) + len(todo) < limit:
        row = found.fetchone()
        if row is None:
            break
        try:
            work = rows.find(row[0])
            assert work is not None
            if lines.first_to_take(rows, work):
                todo.append(row[0])
        except CorruptSessionError as error:
            # A line that can't be read must not keep the others waiting.
            logger.warning("turn %d is not taken: %s", row[0], error)
    found.close()
    works = [_take(rows, turn_id, lease_seconds, connection) for turn_id in (*answered, *todo)]
    return tuple(work for work in works if work is not None)


def _take(rows: SqliteRows, turn_id: int, lease_seconds: float, connection: Connection) -> Work | None:
    try:
        row = rows.find(turn_id)
    except CorruptSessionError as error:
        logger.warning("turn %d is not taken: %s", turn_id, error)
        return None
    assert row is not None
    answered = row.state is State.ANSWERED
    row = attrs.evolve(row, holder=rows.holder, attempt=row.attempt + 1) if answered else taken(row, rows.holder)
    rows.write(row)
    connection.execute(statements.TAKE_LEASE, {"turn_id": turn_id, "lease_seconds": lease_seconds})
    try:
        work = _work(turn_id, rows.now, connection)
        if not answered:
            return work
        assert row.message_id is not None
        answer = operations.find_processed(work.key, row.message_id, "", connection)
    except CorruptSessionError as error:
        _give_up(rows, row, error, connection)
        return None
    if answer is None or answer.response is None:
        # Nobody kept what there was to say.
        rows.delete(row)
        return None
    return attrs.evolve(work, response=answer.response)


def is_next_to_tell(turn_id: int, attempt: int, at: At, connection: Connection) -> bool | None:
    """Whether no answered row of its conversation stands before it; None if it is not this holder's."""
    fence = {"turn_id": turn_id, "attempt": attempt, "holder": at.holder}
    found = connection.execute(statements.IS_NEXT_TO_TELL, fence).fetchone()
    return None if found is None else bool(found[0])


def end_answered(turn_id: int, attempt: int, at: At, connection: Connection) -> None:
    """Delete a row whose answer has been handed on."""
    connection.execute(statements.END_ANSWERED, {"turn_id": turn_id, "attempt": attempt, "holder": at.holder})


def page(owner: str | None, after: int, limit: int, at: At, connection: Connection) -> tuple[PendingTurn, ...]:
    """A page of an owner's turns, or of all owners'."""
    found = connection.execute(statements.PAGE_OF_TURNS, {"owner": owner, "after": after, "limit": limit})
    return tuple(_listed(row, at.now) for row in found)


def _listed(found: tuple[Any, ...], now: str) -> PendingTurn:
    # One row that can't be read must not hide all others.
    try:
        return _pending(found, now)
    except CorruptSessionError as error:
        logger.warning("%s; it is listed without its message", error)
    turn_id, owner, session_id, message_id, _, agent_name, state, attempts, queued_at, _ = found
    asked = dt.datetime.fromisoformat(now)
    try:
        queued = reading.moment(session_id, "", queued_at)
    except CorruptSessionError:
        queued = asked
    return pending_turn(
        Key(reading.shown(owner), reading.shown(session_id)),
        turn_id=turn_id,
        message_id=None if message_id is None else reading.shown(message_id),
        agent_name=None if agent_name is None else reading.shown(agent_name),
        state=reading.shown(state),
        attempts=attempts if isinstance(attempts, int) else 0,
        queued_at=queued,
        now=asked,
    )
