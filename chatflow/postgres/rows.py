"""The rows of conversations' lines, for the rules of core/lines.py.

The rules ask one row after the other, and a round trip each would be many. So a line is read whole, under the lock of
its conversation; the rules work on that; and what they have changed is sent with one flight.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, LiteralString

import attrs

from chatflow.core.holder import is_gone
from chatflow.core.lines import Rows
from chatflow.core.records import Ticket
from chatflow.core.rows import IN_LINE, LIVE, Row, State
from chatflow.core.writing import work_to_json
from chatflow.postgres import turn_statements as statements
from chatflow.postgres.connection import Step, Transaction
from chatflow.postgres.database import living_holders


@attrs.define(eq=False)
class _Turn:
    """A row, and what belongs to it that the rules ask for."""

    row: Row
    beat: int
    has_journal: bool


class PostgresRows(Rows):
    """The rows that a transaction has read, and the changes that it is to make.

    *next_turn_id* is what a new row gets, *awaited* are the turns that one queued now would wait for.
    """

    def __init__(
        self,
        found: Iterable[tuple[Any, ...]],
        holder: str,
        now: Any,
        *,
        next_turn_id: int | None = None,
        awaited: Iterable[tuple[Any, ...]] = (),
    ) -> None:
        self.holder = holder
        self.now = now
        self._next_turn_id = next_turn_id
        self._awaited = {turn_id for (turn_id,) in awaited}
        self._turns = {each[0]: _Turn(_row_of(*each[:-2]), *each[-2:]) for each in found}
        self._changes: list[Step] = []

    async def send(self, transaction: Transaction) -> None:
        """Send what has changed since the last time."""
        changes, self._changes = self._changes, []
        for step in changes:
            await transaction.change(step.statement, **step.values)

    def _change(self, statement: LiteralString, **values: Any) -> None:
        self._changes.append(Step(statement, values))

    def holder_before(self, row: Row) -> str | None:
        """Whose row stands directly before *row*.

        Waiting work does not count, also where a worker of ours holds it until it tries again: its doer need not be the
        next who ends, and others may pass it.
        """
        before = [turn.row for turn in self._turns.values() if turn.row.turn_id < row.turn_id]
        return next((each.holder for each in reversed(self._ordered(before)) if each.state in LIVE), None)

    def next_of_holder(self, session_key: int) -> int | None:
        """Which row of this holder's is to look first whether its place has come."""
        queued = (
            turn.row.turn_id
            for turn in self._turns.values()
            if turn.row.session_key == session_key and turn.row.state is State.QUEUED and turn.row.holder == self.holder
        )
        return min(queued, default=None)

    def held_by(self, holders: Iterable[str]) -> list[Row]:
        """All that these holders have."""
        asked = set(holders)
        return [turn.row for turn in self._turns.values() if turn.row.holder in asked]

    @staticmethod
    def _ordered(rows: Iterable[Row]) -> list[Row]:
        return sorted(rows, key=lambda row: row.turn_id)

    # --- what the rules use ---

    def find(self, turn_id: int) -> Row | None:
        """By its id."""
        turn = self._turns.get(turn_id)
        return None if turn is None else turn.row

    def of_message(self, session_key: int, message_id: str) -> Row | None:
        """By its message."""
        rows = (turn.row for turn in self._turns.values())
        return next((row for row in rows if (row.session_key, row.message_id) == (session_key, message_id)), None)

    def running(self, session_key: int) -> Row | None:
        """By its conversation."""
        rows = (turn.row for turn in self._turns.values())
        return next((row for row in rows if (row.session_key, row.state) == (session_key, State.RUNNING)), None)

    def next_in_line(self, session_key: int, above: int, below: int) -> Row | None:
        """By its place."""
        between = (
            turn.row
            for turn in self._turns.values()
            if turn.row.session_key == session_key and above < turn.row.turn_id < below and turn.row.state in IN_LINE
        )
        return min(between, key=lambda row: row.turn_id, default=None)

    def insert(self, row: Row, ticket: Ticket) -> Row:
        """Add it, under the id that was drawn for it."""
        assert self._next_turn_id is not None
        row = attrs.evolve(row, turn_id=self._next_turn_id)
        self._next_turn_id = None
        self._turns[row.turn_id] = _Turn(row, 0, has_journal=False)
        self._change(
            statements.INSERT_ROW,
            turn_id=row.turn_id,
            session_key=row.session_key,
            state=row.state.value,
            holder=row.holder,
            attempt=row.attempt,
            attempts=row.attempts,
            lease_seconds=ticket.lease_seconds,
            accepted=row.accepted,
            agent_name=row.agent_name,
            message_id=row.message_id,
            digest=row.digest,
            work_json=work_to_json(ticket.claim),
            parent=_parent(ticket),
            now=self.now,
        )
        return row

    def write(self, row: Row) -> None:
        """Store what a rule changes."""
        self._turns[row.turn_id].row = row
        self._change(
            statements.WRITE_ROW,
            turn_id=row.turn_id,
            state=row.state.value,
            holder=row.holder,
            attempt=row.attempt,
            attempts=row.attempts,
            accepted=row.accepted,
            message_id=row.message_id,
            now=self.now,
        )

    def delete(self, row: Row) -> None:
        """Remove it; its journal cascades."""
        del self._turns[row.turn_id]
        self._change(statements.DELETE_ROW, turn_id=row.turn_id)

    def awaits(self, row: Row, ticket: Ticket) -> None:
        """Store what its new holder says."""
        self._change(
            statements.AWAIT_ROW, turn_id=row.turn_id, parent=_parent(ticket), lease_seconds=ticket.lease_seconds
        )

    def take_lease(self, row: Row, lease_seconds: float) -> None:
        """Store how long its new holder may be silent."""
        self._change(statements.TAKE_LEASE, turn_id=row.turn_id, lease_seconds=lease_seconds)

    def share_lease(self, row: Row, of: Row) -> None:
        """Copy it."""
        self._change(statements.SHARE_LEASE, turn_id=row.turn_id, shared=of.turn_id)

    def move_journal(self, old: Row, new: Row) -> None:
        """Rename its lines."""
        self._turns[new.turn_id].has_journal = self._turns[old.turn_id].has_journal
        self._change(statements.MOVE_JOURNAL, old=old.turn_id, new=new.turn_id)

    def has_journal(self, row: Row) -> bool:
        """As it was read."""
        return self._turns[row.turn_id].has_journal

    def drop_journal(self, row: Row) -> None:
        """Delete its lines."""
        self._turns[row.turn_id].has_journal = False
        self._change(statements.DROP_JOURNAL, turn_id=row.turn_id)

    def beat(self, row: Row) -> int:
        """As it was read."""
        return self._turns[row.turn_id].beat

    def waits_for(self, session_key: int, ancestors: tuple[int, ...]) -> bool:
        """As it was read."""
        return not self._awaited.isdisjoint(ancestors)

    def is_gone(self, holder: str) -> bool:
        """Whether its process ran on this machine, and does not any more; others' are only told by their beats."""
        return is_gone(holder, living_holders())


def _parent(ticket: Ticket) -> int | None:
    return ticket.ancestors[-1] if ticket.ancestors else None


def _row_of(
    turn_id: int,
    session_key: int,
    state: str,
    holder: str | None,
    attempt: int,
    attempts: int,
    accepted: bool,
    agent_name: str | None,
    message_id: str | None,
    digest: str | None,
) -> Row:
    # The table's constraints leave nothing in it that could not be read.
    return Row(
        turn_id=turn_id,
        session_key=session_key,
        state=State(state),
        holder=holder,
        attempt=attempt,
        attempts=attempts,
        accepted=accepted,
        agent_name=agent_name,
        message_id=message_id,
        digest=digest,
    )
