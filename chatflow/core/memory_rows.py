"""The turns' rows of conversations in memory, for the rules of core/lines.py."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Iterator
from itertools import count
from typing import Final

import attrs

from chatflow.core.journal import Entry
from chatflow.core.lines import Rows
from chatflow.core.records import Claim, Key, PendingTurn, Ticket, Work, pending_turn
from chatflow.core.rows import GIVEN_UP, IN_LINE, Row, State
from chatflow.core.values import EMPTY

_OUT_OF_LINE: Final = frozenset(State) - IN_LINE


@attrs.define(eq=False)
class MemoryTurn:
    """A row, and what belongs to it that the rules do not look at."""

    row: Row
    key: Key
    claim: Claim | None
    parent: int | None
    lease_seconds: float
    queued_at: dt.datetime
    beat: int = 0
    journal: list[Entry] = attrs.field(factory=list[Entry])
    ended_at: dt.datetime | None = None


class MemoryRows(Rows):
    """All rows of one store."""

    def __init__(self, clock: Callable[[], dt.datetime]) -> None:
        self.holder = "memory"
        self._clock = clock
        self._turns: dict[int, MemoryTurn] = {}
        self._by_session: dict[int, dict[int, MemoryTurn]] = {}
        self._ids = count(1)

    def __iter__(self) -> Iterator[MemoryTurn]:
        return iter(self._turns.values())

    def turn(self, turn_id: int) -> MemoryTurn:
        """The row with what belongs to it."""
        return self._turns[turn_id]

    def read_journal(self, turn_id: int) -> tuple[Entry, ...]:
        """What the turn has noted, if it is there."""
        turn = self._turns.get(turn_id)
        return () if turn is None else tuple(turn.journal)

    def holds(self, session_key: int) -> bool:
        """Whether a turn keeps its conversation from being purged."""
        return any(turn.row.state not in GIVEN_UP for turn in self._by_session.get(session_key, {}).values())

    def turn_ids(self, session_key: int) -> tuple[int, ...]:
        """All of a conversation's turns."""
        return tuple(self._by_session.get(session_key, ()))

    def clear(self) -> None:
        """Forget everything."""
        self._turns.clear()
        self._by_session.clear()

    def work(self, turn: MemoryTurn) -> Work:
        """All that is needed to do it."""
        return Work(turn=self.pending(turn), key=turn.key, attempt=turn.row.attempt)

    def pending(self, turn: MemoryTurn) -> PendingTurn:
        """The row as users see it."""
        row, claim = turn.row, turn.claim
        return pending_turn(
            turn.key,
            None if claim is None else claim.input,
            EMPTY if claim is None else claim.metadata,
            turn_id=row.turn_id,
            message_id=row.message_id,
            agent_name=row.agent_name,
            state=row.state.value,
            attempts=row.attempts,
            queued_at=turn.queued_at,
            now=self._clock(),
        )

    def next_of(self, session_key: int) -> int | None:
        """Which row is to look first whether its place has come."""
        found = (turn.row for turn in self._by_session.get(session_key, {}).values())
        return next((row.turn_id for row in found if row.state is State.QUEUED), None)

    def purge(self, expired_before: dt.datetime, limit: int) -> None:
        """Forget up to *limit* rows that left their line before that."""
        old = (turn for turn in self._turns.values() if turn.ended_at is not None and turn.ended_at < expired_before)
        for turn in [turn for turn, _ in zip(old, range(limit), strict=False)]:
            self.delete(turn.row)

    # --- what the rules use ---

    def find(self, turn_id: int) -> Row | None:
        """By its id."""
        turn = self._turns.get(turn_id)
        return None if turn is None else turn.row

    def of_message(self, session_key: int, message_id: str) -> Row | None:
        """By its message."""
        rows = (turn.row for turn in self._by_session.get(session_key, {}).values())
        return next((row for row in rows if row.message_id == message_id), None)

    def running(self, session_key: int) -> Row | None:
        """By its conversation."""
        rows = (turn.row for turn in self._by_session.get(session_key, {}).values())
        return next((row for row in rows if row.state is State.RUNNING), None)

    def next_in_line(self, session_key: int, above: int, below: int) -> Row | None:
        """By its place."""
        rows = (turn.row for turn in self._by_session.get(session_key, {}).values())
        return next((row for row in rows if above < row.turn_id < below and row.state in IN_LINE), None)

    def insert(self, row: Row, ticket: Ticket) -> Row:
        """Add it."""
        row = attrs.evolve(row, turn_id=next(self._ids))
        parent = ticket.ancestors[-1] if ticket.ancestors else None
        turn = MemoryTurn(row, ticket.key, ticket.claim, parent, ticket.lease_seconds, self._clock())
        self._turns[row.turn_id] = turn
        self._by_session.setdefault(row.session_key, {})[row.turn_id] = turn
        return row

    def write(self, row: Row) -> None:
        """Replace it."""
        turn = self._turns[row.turn_id]
        turn.row = row
        if row.holder is None:
            turn.parent = None
        if row.state not in _OUT_OF_LINE:
            turn.ended_at = None
        elif turn.ended_at is None:
            turn.ended_at = self._clock()

    def delete(self, row: Row) -> None:
        """Remove it."""
        del self._turns[row.turn_id]
        turns = self._by_session[row.session_key]
        del turns[row.turn_id]
        if not turns:
            del self._by_session[row.session_key]

    def awaits(self, row: Row, ticket: Ticket) -> None:
        """Note it."""
        turn = self._turns[row.turn_id]
        turn.parent = ticket.ancestors[-1] if ticket.ancestors else None
        turn.lease_seconds = ticket.lease_seconds

    def share_lease(self, row: Row, of: Row) -> None:
        """Copy it."""
        self._turns[row.turn_id].lease_seconds = self._turns[of.turn_id].lease_seconds

    def move_journal(self, old: Row, new: Row) -> None:
        """Hand it over."""
        self._turns[new.turn_id].journal = self._turns[old.turn_id].journal

    def has_journal(self, row: Row) -> bool:
        """Look."""
        return bool(self._turns[row.turn_id].journal)

    def drop_journal(self, row: Row) -> None:
        """Forget it."""
        self._turns[row.turn_id].journal = []

    def beat(self, row: Row) -> int:
        """Read it."""
        return self._turns[row.turn_id].beat

    def waits_for(self, session_key: int, ancestors: tuple[int, ...]) -> bool:
        """Follow the lines and the calls."""
        seen: set[int] = set()
        waiting = self._line(session_key) if ancestors else []
        while waiting:
            turn = waiting.pop()
            turn_id = turn.row.turn_id
            if turn_id in ancestors:
                return True
            if turn_id not in seen:
                seen.add(turn_id)
                waiting += [child for child in self._turns.values() if child.parent == turn_id]
                waiting += [ahead for ahead in self._line(turn.row.session_key) if _waits_behind(turn.row, ahead.row)]
        return False

    def _line(self, session_key: int) -> list[MemoryTurn]:
        turns = self._by_session.get(session_key, {}).values()
        return [turn for turn in turns if turn.row.state in IN_LINE]

    def is_gone(self, holder: str) -> bool:
        """They are gone together."""
        return False


def _waits_behind(row: Row, other: Row) -> bool:
    # What runs may have passed the row while it was waiting work, and stands behind it then.
    return other.turn_id < row.turn_id or other.state is State.RUNNING
