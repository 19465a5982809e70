"""The turns' rows in SQLite, for the rules of core/lines.py, inside one transaction."""

from __future__ import annotations

import logging
from typing import Any, Final

import attrs

from chatflow.core import reading
from chatflow.core.holder import is_gone
from chatflow.core.lines import Rows, interrupt
from chatflow.core.records import Key, Ticket
from chatflow.core.rows import LIVE, Row
from chatflow.core.writing import work_to_json
from chatflow.exceptions import CorruptSessionError
from chatflow.sqlite import turn_statements as statements
from chatflow.sqlite.database import Connection, living_holders

logger = logging.getLogger("chatflow.store")

_MARKS: Final = "SELECT substr(key, 8) FROM chatflow_meta WHERE key >= 'commit:' AND key < 'commit;'"
_DELETE_MARK: Final = "DELETE FROM chatflow_meta WHERE key = 'commit:' || :holder"


class SqliteRows(Rows):
    """The rows as one transaction sees them."""

    def __init__(self, connection: Connection, holder: str, now: str) -> None:
        self.holder = holder
        self._connection = connection
        self.now = now

    def _row(self, statement: str, **parameters: Any) -> Row | None:
        found = self._connection.execute(statement, parameters).fetchone()
        return None if found is None else _read(found, self._connection)

    def find(self, turn_id: int) -> Row | None:
        """By its id."""
        return self._row(statements.READ_ROW, turn_id=turn_id)

    def of_message(self, session_key: int, message_id: str) -> Row | None:
        """By its message."""
        return self._row(statements.ROW_OF_MESSAGE, session_key=session_key, message_id=message_id)

    def running(self, session_key: int) -> Row | None:
        """By its conversation."""
        return self._row(statements.RUNNING_ROW, session_key=session_key)

    def next_in_line(self, session_key: int, above: int, below: int) -> Row | None:
        """By its place."""
        return self._row(statements.NEXT_IN_LINE, session_key=session_key, above=above, below=below)

    def insert(self, row: Row, ticket: Ticket) -> Row:
        """Add it."""
        turn_id = self._connection.execute(
            statements.INSERT_ROW,
            {
                "session_key": row.session_key,
                "state": row.state.value,
                "holder": row.holder,
                "attempt": row.attempt,
                "attempts": row.attempts,
                "lease_seconds": ticket.lease_seconds,
                "accepted": row.accepted,
                "agent_name": row.agent_name,
                "message_id": row.message_id,
                "digest": row.digest,
                "work_json": work_to_json(ticket.claim),
                "parent": _parent(ticket),
                "now": self.now,
            },
        ).fetchone()[0]
        return attrs.evolve(row, turn_id=turn_id)

    def write(self, row: Row) -> None:
        """Store what a rule changes."""
        self._connection.execute(
            statements.WRITE_ROW,
            {
                "turn_id": row.turn_id,
                "state": row.state.value,
                "holder": row.holder,
                "attempt": row.attempt,
                "attempts": row.attempts,
                "accepted": row.accepted,
                "message_id": row.message_id,
                "now": self.now,
            },
        )

    def delete(self, row: Row) -> None:
        """Remove it; its journal cascades."""
        self._connection.execute(statements.DELETE_ROW, {"turn_id": row.turn_id})

    def awaits(self, row: Row, ticket: Ticket) -> None:
        """Store what its new holder says."""
        self._connection.execute(
            statements.AWAIT_ROW,
            {"turn_id": row.turn_id, "parent": _parent(ticket), "lease_seconds": ticket.lease_seconds},
        )

    def share_lease(self, row: Row, of: Row) -> None:
        """Copy it."""
        self._connection.execute(statements.SHARE_LEASE, {"turn_id": row.turn_id, "of": of.turn_id})

    def move_journal(self, old: Row, new: Row) -> None:
        """Rename its lines."""
        self._connection.execute(statements.MOVE_JOURNAL, {"old": old.turn_id, "new": new.turn_id})

    def has_journal(self, row: Row) -> bool:
        """Look for a line."""
        return self._connection.execute(statements.HAS_JOURNAL, {"turn_id": row.turn_id}).fetchone() is not None

    def drop_journal(self, row: Row) -> None:
        """Delete its lines."""
        self._connection.execute(statements.DROP_JOURNAL, {"turn_id": row.turn_id})

    def beat(self, row: Row) -> int:
        """Read it."""
        beat: int = self._connection.execute(statements.READ_BEAT, {"turn_id": row.turn_id}).fetchone()[0]
        return beat

    def waits_for(self, session_key: int, ancestors: tuple[int, ...]) -> bool:
        """Follow the lines and the calls, in one statement."""
        if not ancestors:
            return False
        awaited = self._connection.execute(statements.WAITS_FOR, {"session_key": session_key})
        return not {row[0] for row in awaited}.isdisjoint(ancestors)

    def is_gone(self, holder: str) -> bool:
        """Ask the system about its process."""
        return is_gone(holder, living_holders())


def _parent(ticket: Ticket) -> int | None:
    return ticket.ancestors[-1] if ticket.ancestors else None


def _read(found: tuple[Any, ...], connection: Connection) -> Row:
    try:
        return _row_of("", *found)
    except CorruptSessionError as error:
        # Asked for only now, since nearly every row can be read.
        key = key_of(found[0], connection)
        raise CorruptSessionError(session_id=key.session_id, row=error.row, reason=error.reason) from error


def _row_of(
    named: str,
    turn_id: int,
    session_key: int,
    state: object,
    holder: object,
    attempt: object,
    attempts: object,
    accepted: object,
    agent_name: object,
    message_id: object,
    digest: object,
) -> Row:
    where = f"chatflow_turns, turn_id {turn_id}"
    row = Row(
        turn_id=turn_id,
        session_key=session_key,
        state=reading.state(named, f"{where}, state", state),
        holder=reading.optional_text(named, f"{where}, holder", holder),
        attempt=reading.number(named, f"{where}, attempt", attempt),
        attempts=reading.number(named, f"{where}, attempts", attempts),
        accepted=bool(reading.number(named, f"{where}, accepted", accepted)),
        agent_name=reading.optional_text(named, f"{where}, agent_name", agent_name),
        message_id=reading.optional_text(named, f"{where}, message_id", message_id),
        digest=reading.optional_text(named, f"{where}, digest", digest),
    )
    # Neither is ever so, and the rules rely on it.
    if row.state in LIVE:
        reading.name(named, f"{where}, holder", holder)
    if row.message_id is not None:
        reading.text(named, f"{where}, digest", digest)
    return row


def key_of(turn_id: int, connection: Connection) -> Key:
    """Whose turn it is, as far as that can be read."""
    owner, session_id = connection.execute(statements.KEY_OF_TURN, {"turn_id": turn_id}).fetchone()
    return Key(reading.shown(owner), reading.shown(session_id))


def release(holder: str, connection: Connection) -> None:
    """Interrupt all that *holder*, who is gone or about to go, has in hand."""
    rows = SqliteRows(connection, holder, now="")  # no row leaves its line by that
    for found in connection.execute(statements.ROWS_OF_HOLDER, {"holder": holder}).fetchall():
        try:
            row = _read(found, connection)
        except CorruptSessionError as error:
            # One row must not keep all others from being free, and the file from being opened.
            logger.warning("a turn that nobody has in hand any more stays as it is: %s", error)
        else:
            interrupt(rows, row)
    connection.execute(_DELETE_MARK, {"holder": holder})


def release_the_gone(holder: str, connection: Connection) -> bool:
    """Interrupt all that processes have in hand which are gone from this machine. True if there was any."""
    living = living_holders() | {holder}
    holders = {row[0] for statement in (statements.HOLDERS, _MARKS) for row in connection.execute(statement)}
    gone = [other for other in holders if reading.is_text(other) and is_gone(other, living)]
    for other in gone:
        logger.info("what a process that is gone had in hand is free again (%s)", other)
        release(other, connection)
    return bool(gone)
