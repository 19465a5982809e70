"""Operations on turns: each is one transaction, and decides under the lock of its conversation.

The rules are those of core/lines.py. What is written here beside them is one flight for the usual case, a turn that
nobody stands before. Each operation is short; there is one for each thing that can happen to a turn.
"""

from __future__ import annotations

import datetime as dt
import logging
from collections.abc import Collection, Iterator
from functools import partial
from typing import Any, Final

import attrs

from chatflow.core import lines, reading
from chatflow.core.codec import entry_to_json
from chatflow.core.holder import is_gone
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
from chatflow.core.rows import WAITING, Row, State, next_attempt, taken
from chatflow.core.writing import work_to_json
from chatflow.exceptions import CorruptSessionError
from chatflow.postgres import operations
from chatflow.postgres import statements as session_statements
from chatflow.postgres import turn_statements as statements
from chatflow.postgres.aside import put_journal_aside
from chatflow.postgres.connection import Step, Transaction
from chatflow.postgres.database import Database, living_holders
from chatflow.postgres.operations import named
from chatflow.postgres.reading import moment
from chatflow.postgres.rows import PostgresRows

logger = logging.getLogger("chatflow.store")

_LOOKED_AT_ONCE: Final = 50
"""Pieces of work whose lines are read together, to find some that may be taken."""

_NO_TURN: Final = 0


@attrs.frozen
class At:
    """Who asks, and when: what every operation on turns is given."""

    holder: str
    now: dt.datetime
    expired_before: dt.datetime
    schema: str


# --- queueing ---


async def queue(ticket: Ticket, at: At, database: Database) -> Place | Answered | InProgress | Dead | Cycle | Lost:
    """Look the claim up, insert the row or take the message's own, and start what may run."""
    if ticket.known is not None:
        place = await _queue_first(ticket, ticket.known, at, database)
        if place is not None:
            return place
    return await database.write(lambda transaction: _queue(ticket, at, transaction), flushed=ticket.known is None)


async def _queue_first(ticket: Ticket, known: Snapshot, at: At, database: Database) -> Place | None:
    claim = ticket.claim
    attempt = next_attempt()
    asked = {"session_key": known.session_key, "owner": ticket.key.owner, "holder": at.holder, "attempt": attempt}
    flight = await database.fly_once(
        Step(statements.LOCK_FOR_A_PLACE, asked),
        Step(
            statements.QUEUE_FIRST,
            {
                **asked,
                "lease_seconds": ticket.lease_seconds,
                "agent_name": ticket.agent_name,
                "message_id": None if claim is None else claim.message_id,
                "digest": None if claim is None else claim.digest,
                "work_json": work_to_json(claim),
                "parent": ticket.ancestors[-1] if ticket.ancestors else None,
                "now": at.now,
                "expired_before": at.expired_before,
            },
        ),
    )
    found = flight[1] if flight is not None else await database.ask(statements.RUNS_FOR, **asked)
    if not found:
        return None
    turn_id, version = found[0]
    session = None if version == known.version else await operations.load(ticket.key, known, database)
    return Place(
        turn_id=turn_id,
        running=True,
        attempt=attempt,
        behind_own=True,
        session=session if isinstance(session, Snapshot) else None,
    )


async def _queue(
    ticket: Ticket, at: At, transaction: Transaction
) -> Place | Answered | InProgress | Dead | Cycle | Lost:
    claim, key = ticket.claim, ticket.key
    if ticket.ancestors:
        await transaction.ask(statements.LOCK_CYCLES, schema=at.schema)
    found, answers = await transaction.ask_all(*_steps_to_claim(ticket, at))
    if claim is not None:
        answered = operations.answered_of(key, claim.message_id, answers)
        if answered is not None:
            return answered
    if not found:
        if ticket.new is None:
            return Lost.SESSION
        await operations.create(key, ticket.new, at.now, transaction)
    rows = await _rows_to_queue(ticket, at, transaction)
    ((session_key, *_),) = await transaction.ask(session_statements.LOCK_SESSION, **named(key))
    if ticket.known is not None and ticket.known.session_key != session_key:
        return Lost.SESSION
    row = lines.queue(rows, session_key, ticket)
    if not isinstance(row, Row):
        await rows.send(transaction)
        return row
    return await _place(rows, row, key, ticket.known, ticket.max_attempts, transaction)


def _steps_to_claim(ticket: Ticket, at: At) -> tuple[Step, Step]:
    message_id = None if ticket.claim is None else ticket.claim.message_id
    asked = {**named(ticket.key), "message_id": message_id, "expired_before": at.expired_before}
    return Step(session_statements.LOCK_SESSION, asked), Step(session_statements.READ_PROCESSED, asked)


async def _rows_to_queue(ticket: Ticket, at: At, transaction: Transaction) -> PostgresRows:
    message_id = None if ticket.claim is None else ticket.claim.message_id
    steps = [
        Step(statements.READ_LINE, {**named(ticket.key), "turn_id": _NO_TURN, "message_id": message_id}),
        Step(statements.NEXT_TURN_ID),
    ]
    if ticket.ancestors:
        steps.append(Step(statements.WAITS_FOR, named(ticket.key)))
    line, ((next_turn_id,),), *awaited = await transaction.ask_all(*steps)
    return PostgresRows(line, at.holder, at.now, next_turn_id=next_turn_id, awaited=awaited[0] if awaited else ())


async def _rows_of_line(key: Key, turn_id: int, at: At, transaction: Transaction) -> PostgresRows:
    """The conversation's line, locked, with the row of that id."""
    _, line = await transaction.ask_all(
        Step(session_statements.LOCK_SESSION, named(key)),
        Step(statements.READ_LINE, {**named(key), "turn_id": turn_id, "message_id": None}),
    )
    return PostgresRows(line, at.holder, at.now)


async def _rows_of_turn(turn_id: int, at: At, transaction: Transaction) -> PostgresRows:
    """The line that the row stands in, locked."""
    asked = {"turn_id": turn_id}
    _, line = await transaction.ask_all(
        Step(statements.LOCK_ROWS_SESSION, asked), Step(statements.READ_ROWS_LINE, asked)
    )
    return PostgresRows(line, at.holder, at.now)


# --- starting ---


async def start(
    turn_id: int,
    attempt: int,
    key: Key,
    known: Snapshot | None,
    max_attempts: int | None,
    at: At,
    transaction: Transaction,
) -> Place | Dead | Lost:
    """Start what may run, if the row is still its caller's."""
    rows = await _rows_of_line(key, turn_id, at, transaction)
    row = rows.find(turn_id)
    if row is None or not row.is_of(at.holder, attempt):
        return await operations.lost(key, known, transaction)
    return await _place(rows, row, key, known, max_attempts, transaction)


async def _place(
    rows: PostgresRows,
    row: Row,
    key: Key,
    known: Snapshot | None,
    max_attempts: int | None,
    transaction: Transaction,
) -> Place | Dead:
    """Start what may run for whoever holds the row; work that can't be read is given up, and the next one looked at."""
    while True:
        found = lines.start(rows, row, max_attempts)
        await rows.send(transaction)
        if isinstance(found, Dead):
            return found
        row, runs = found
        if runs is None:
            # Where nobody stands before it, one that has passed it runs, and that may be anybody's.
            return Place(
                turn_id=row.turn_id,
                running=False,
                attempt=row.attempt,
                behind_own=rows.holder_before(row) == rows.holder,
                session=None,
            )
        asked = {"turn_id": runs.turn_id}
        noted, work_rows, *answers = await transaction.ask_all(
            Step(statements.READ_JOURNAL, asked),
            Step(statements.READ_WORK, asked),
            *operations.steps_to_load(key, known),
        )
        own = runs.turn_id == row.turn_id
        try:
            journal = () if runs.message_id is None else reading.entries_of(runs.turn_id, key.session_id, noted)
            work = None if own else _work(work_rows[0], rows.now)
        except CorruptSessionError as error:
            if own and not runs.accepted:
                raise  # its caller is told, and the row steps aside
            await _give_up(rows, runs, error, transaction)
            if own:
                # Not raised: that would undo it, and the message would be tried for ever.
                assert row.digest is not None
                return Dead(row.digest, runs.attempts)
            continue
        session = operations.snapshot_of(key, known, answers)
        return Place(
            turn_id=row.turn_id,
            running=True,
            attempt=row.attempt,
            behind_own=True,
            session=session if isinstance(session, Snapshot) else None,
            work=work,
            journal=journal,
        )


async def _give_up(rows: PostgresRows, row: Row, error: CorruptSessionError, transaction: Transaction) -> None:
    """Give up work that can't be read; of its journal, nobody knows any more what it keeps from being done twice."""
    logger.error("turn %d is given up: %s", row.turn_id, error)
    ((owner, session_id),) = await transaction.ask(statements.KEY_OF_TURN, turn_id=row.turn_id)
    reason = f"its turn was given up: {error}"
    await put_journal_aside(row.turn_id, Key(owner, session_id), reason, rows.now, transaction)
    lines.give_up(rows, row)
    await rows.send(transaction)


def _work(found: tuple[Any, ...], now: dt.datetime) -> Work:
    return Work(turn=_pending(found, now), key=Key(found[1], found[2]), attempt=found[9])


def _pending(found: tuple[Any, ...], now: dt.datetime) -> PendingTurn:
    turn_id, owner, session_id, message_id, work_json, agent_name, state, attempts, queued_at, _ = found
    where = f"chatflow_turns, turn_id {turn_id}"
    return pending_turn(
        Key(owner, session_id),
        *reading.work(session_id, f"{where}, work_json", work_json),
        turn_id=turn_id,
        message_id=message_id,
        agent_name=agent_name,
        state=state,
        attempts=attempts,
        queued_at=moment(session_id, f"{where}, queued_at", queued_at),
        now=now,
    )


async def accept(ticket: Ticket, at: At, transaction: Transaction) -> Accepted | Answered | Dead:
    """Store work to be done."""
    assert ticket.claim is not None
    assert ticket.new is not None
    found, answers = await transaction.ask_all(*_steps_to_claim(ticket, at))
    answered = operations.answered_of(ticket.key, ticket.claim.message_id, answers)
    if answered is not None:
        return answered
    if found:
        session_key = found[0][0]
    else:
        session_key = (await operations.create(ticket.key, ticket.new, at.now, transaction)).session_key
    rows = await _rows_to_queue(ticket, at, transaction)
    accepted = lines.accept(rows, session_key, ticket)
    await rows.send(transaction)
    return accepted


# --- what becomes of a turn's row ---


async def leave(leaving: Leaving, at: At, transaction: Transaction) -> Left:
    """Give the row back, and tell which row of this holder is next in its line."""
    rows = await _rows_of_turn(leaving.turn_id, at, transaction)
    row = rows.find(leaving.turn_id)
    if row is None:
        return Left(None, None)
    left = lines.leave(rows, leaving)
    await rows.send(transaction)
    return Left(None if left is None else left.state, rows.next_of_holder(row.session_key))


async def let_go(held: tuple[Leaving, ...], at: At, transaction: Transaction) -> None:
    """Give back what a store that is closed still has in hand, where others of its process go on under its name."""
    for leaving in sorted(held, key=lambda each: each.turn_id):
        await leave(leaving, at, transaction)


async def look(
    turn_id: int, attempt: int, key: Key, known: Snapshot | None, at: At, transaction: Transaction
) -> Lost | None:
    """Whether the row still runs under that fence."""
    found = await transaction.ask(statements.READ_ROW, turn_id=turn_id)
    row = PostgresRows(found, at.holder, at.now).find(turn_id)
    if row is not None and row.state is State.RUNNING and row.is_of(at.holder, attempt):
        return None
    return await operations.lost(key, known, transaction)


async def is_held(turn_id: int, at: At, database: Database) -> bool:
    """Whether somebody has the row in hand."""
    found = await database.ask(statements.READ_ROW, turn_id=turn_id)
    row = PostgresRows(found, at.holder, at.now).find(turn_id)
    return row is not None and row.holder is not None


async def write_journal(
    turn_id: int,
    attempt: int,
    entry: Entry,
    key: Key,
    known: Snapshot | None,
    at: At,
    database: Database,
    *,
    flushed: bool,
) -> Lost | None:
    """Add a line, if the fence holds."""
    fence = {"turn_id": turn_id, "attempt": attempt, "holder": at.holder}
    flight = await database.fly_once(
        Step(statements.LOCK_TURN, {**fence, "flushed": flushed}),
        Step(statements.WRITE_JOURNAL, {**fence, "entry_json": entry_to_json(entry)}),
    )
    if flight is None or flight[1]:
        return None
    return await database.read(partial(operations.lost, key, known))


async def beat(held: frozenset[int], watched: frozenset[int], everything: bool, at: At, database: Database) -> Beaten:
    """Raise the beats of *held*, and read those to be watched."""
    asked = {"held": list(held), "watched": list(watched), "holder": at.holder}
    if everything:
        await database.write(partial(release_the_gone, at.holder), flushed=False)
    others = statements.BEATS_OF_ALL if everything else statements.BEATS_IN_LINES
    _, _, own_rows, found = await database.fly(
        Step(statements.NOT_FLUSHED),
        Step(statements.BEAT, asked),
        Step(statements.STILL_HELD, asked),
        Step(others, asked),
    )
    own: dict[int, int] = dict(own_rows)
    return Beaten(
        own=own,
        others=tuple(
            Beat(turn_id=turn_id, attempt=attempt, beat=count, lease_seconds=lease_seconds)
            for turn_id, attempt, count, lease_seconds in found
            if turn_id not in own
        ),
    )


async def interrupt(silent: Beat, at: At, transaction: Transaction) -> bool:
    """Interrupt a row whose beat has stood still."""
    rows = await _rows_of_turn(silent.turn_id, at, transaction)
    interrupted = lines.interrupt_silent(rows, silent)
    await rows.send(transaction)
    return interrupted


async def release(holders: list[str], holder: str, transaction: Transaction) -> None:
    """Interrupt all that *holders*, who are gone or about to go, have in hand; *holder* is who says so."""
    found = await transaction.ask(statements.SESSIONS_OF_HOLDERS, holders=holders)
    if not found:
        return
    asked = {"session_keys": [session_key for (session_key,) in found]}
    _, line = await transaction.ask_all(Step(statements.LOCK_SESSIONS, asked), Step(statements.READ_LINES, asked))
    rows = PostgresRows(line, holder, None)  # no row leaves its line by that
    for row in rows.held_by(holders):
        lines.interrupt(rows, row)
    await rows.send(transaction)


async def release_the_gone(holder: str, transaction: Transaction) -> None:
    """Interrupt all that processes have in hand which are gone from this machine."""
    living = living_holders() | {holder}
    gone = [other for (other,) in await transaction.ask(statements.HOLDERS) if is_gone(other, living)]
    for other in gone:
        logger.info("what a process that is gone had in hand is free again (%s)", other)
    if gone:
        await release(gone, holder, transaction)


# --- work ---


async def is_work_at_hand(agent_name: str, answers: bool, database: Database) -> bool:
    """Whether there is anything to take, in a line or out of it."""
    ((found,),) = await database.ask(statements.IS_WORK_AT_HAND, agent_name=agent_name, answers=answers)
    return bool(found)


async def take_work(
    agent_name: str, lease_seconds: float, limit: int, answers: bool, at: At, transaction: Transaction
) -> tuple[Work, ...]:
    """Take answers to hand on, then work to do."""
    works: list[Work] = []
    if answers:
        found = await transaction.ask(statements.ANSWERED_AT_HAND, agent_name=agent_name, limit=limit)
        rows = await _rows_of_sessions(found, at, transaction)
        for row in _free(rows, found, (State.ANSWERED,)):
            works += await _take(rows, row, lease_seconds, transaction)
    after = 0
    while len(works) < limit:
        found = await transaction.ask(
            statements.WORK_AT_HAND, agent_name=agent_name, after=after, limit=_LOOKED_AT_ONCE
        )
        rows = await _rows_of_sessions(found, at, transaction)
        for row in _free(rows, found, WAITING):
            if len(works) < limit and lines.first_to_take(rows, row):
                works += await _take(rows, row, lease_seconds, transaction)
        if len(found) < _LOOKED_AT_ONCE:
            break
        after = found[-1][1]
    return tuple(works)


async def _rows_of_sessions(found: list[tuple[Any, ...]], at: At, transaction: Transaction) -> PostgresRows:
    session_keys = sorted({session_key for session_key, _ in found})
    line = await transaction.ask(statements.READ_LINES, session_keys=session_keys) if found else []
    return PostgresRows(line, at.holder, at.now)


def _free(rows: PostgresRows, found: list[tuple[Any, ...]], states: Collection[State]) -> Iterator[Row]:
    """What was found, but for what somebody has taken, or ended, before its conversation was locked."""
    for _, turn_id in found:
        row = rows.find(turn_id)
        if row is not None and row.holder is None and row.state in states:
            yield row


async def _take(rows: PostgresRows, row: Row, lease_seconds: float, transaction: Transaction) -> tuple[Work, ...]:
    turn_id = row.turn_id
    answered = row.state is State.ANSWERED
    row = (
        attrs.evolve(row, holder=rows.holder, attempt=next_attempt(row.attempt))
        if answered
        else taken(row, rows.holder)
    )
    rows.write(row)
    rows.take_lease(row, lease_seconds)
    await rows.send(transaction)
    (found,) = await transaction.ask(statements.READ_WORK, turn_id=turn_id)
    try:
        work = _work(found, rows.now)
        if not answered:
            return (work,)
        assert row.message_id is not None
        kept = await transaction.ask(
            session_statements.READ_PROCESSED,
            **named(work.key),
            message_id=row.message_id,
            expired_before=dt.datetime.min.replace(tzinfo=dt.UTC),
        )
        answer = operations.answered_of(work.key, row.message_id, kept)
    except CorruptSessionError as error:
        await _give_up(rows, row, error, transaction)
        return ()
    if answer is None or answer.response is None:
        # Nobody kept what there was to say.
        rows.delete(row)
        await rows.send(transaction)
        return ()
    return (attrs.evolve(work, response=answer.response),)


async def is_next_to_tell(turn_id: int, attempt: int, at: At, database: Database) -> bool | None:
    """Whether no answered row of its conversation stands before it; None if it is not this holder's."""
    found = await database.ask(statements.IS_NEXT_TO_TELL, turn_id=turn_id, attempt=attempt, holder=at.holder)
    return bool(found[0][0]) if found else None


async def page(owner: str | None, after: int, limit: int, at: At, database: Database) -> tuple[PendingTurn, ...]:
    """A page of an owner's turns, or of all owners'."""
    found = await database.ask(statements.PAGE_OF_TURNS, owner=owner, after=after, limit=limit)
    return tuple(_listed(row, at.now) for row in found)


def _listed(found: tuple[Any, ...], now: dt.datetime) -> PendingTurn:
    # One row that can't be read must not hide all others.
    try:
        return _pending(found, now)
    except CorruptSessionError as error:
        logger.warning("%s; it is listed without its message", error)
    turn_id, owner, session_id, message_id, _, agent_name, state, attempts, queued_at, _ = found
    return pending_turn(
        Key(owner, session_id),
        turn_id=turn_id,
        message_id=message_id,
        agent_name=agent_name,
        state=state,
        attempts=attempts,
        queued_at=queued_at.astimezone(dt.UTC) if isinstance(queued_at, dt.datetime) else now,
        now=now,
    )


async def end_answered(turn_id: int, attempt: int, at: At, database: Database) -> None:
    """Delete a row whose answer has been handed on."""
    await database.fly(
        Step(statements.NOT_FLUSHED),
        Step(statements.END_ANSWERED, {"turn_id": turn_id, "attempt": attempt, "holder": at.holder}),
    )
