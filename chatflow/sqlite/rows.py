"""The turns' rows in SQLite, for the rules of core/lines.py, inside one transaction."""

from __future__ import annotations

import logging
from typing import Any, Final

import attrs

from chatflow.core.codec import values_from_json, values_to_json
from chatflow.core.lines import Rows, interrupt
from chatflow.core.records import Claim, Ticket
from chatflow.core.rows import Row, State
from chatflow.core.values import FrozenDict
from chatflow.exceptions import SessionFormatError
from chatflow.sqlite import turn_statements as statements
from chatflow.sqlite.database import Connection, living_holders
from chatflow.sqlite.holder import is_gone

logger = logging.getLogger("chatflow.store")

_MARKS: Final = "SELECT substr(key, 8) FROM chatflow_meta WHERE key >= 'commit:' AND key < 'commit;'"
_DELETE_MARK: Final = "DELETE FROM chatflow_meta WHERE key = 'commit:' || :holder"


def work_to_json(claim: Claim | None) -> str | None:
    """What somebody else would need to answer the message."""
    if claim is None:
        return None
    return values_to_json(FrozenDict(user_message=claim.user_message, metadata=claim.metadata))


def work_from_json(text: str) -> tuple[str, FrozenDict]:
    """The user's message and the metadata; `SessionFormatError` for anything else."""
    work = values_from_json(text)
    user_message, metadata = work.get("user_message"), work.get("metadata")
    if not isinstance(user_message, str) or not isinstance(metadata, FrozenDict):
        raise SessionFormatError(path="work_json", reason="it is not a message and its metadata")
    return user_message, metadata


class SqliteRows(Rows):
    """The rows as one transaction sees them."""

    def __init__(self, connection: Connection, holder: str, now: str) -> None:
        self.holder = holder
        self._connection = connection
        self.now = now

    def _row(self, statement: str, **parameters: Any) -> Row | None:
        found = self._connection.execute(statement, parameters).fetchone()
        return None if found is None else _read(found)

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

    def move_journal(self, old: Row, new: Row) -> None:
        """Rename its lines."""
        self._connection.execute(statements.MOVE_JOURNAL, {"old": old.turn_id, "new": new.turn_id})

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


def _read(found: tuple[Any, ...]) -> Row:
    turn_id, session_key, state, holder, attempt, attempts, accepted, agent_name, message_id, digest = found
    return Row(
        turn_id=turn_id,
        session_key=session_key,
        state=State(state),
        holder=holder,
        attempt=attempt,
        attempts=attempts,
        accepted=bool(accepted),
        agent_name=agent_name,
        message_id=message_id,
        digest=digest,
    )


def release(holder: str, connection: Connection) -> None:
    """Interrupt all that *holder*, who is gone or about to go, has in hand."""
    rows = SqliteRows(connection, holder, now="")  # no row leaves its line by that
    for found in connection.execute(statements.ROWS_OF_HOLDER, {"holder": holder}).fetchall():
        interrupt(rows, _read(found))
    connection.execute(_DELETE_MARK, {"holder": holder})


def release_the_gone(holder: str, connection: Connection) -> bool:
    """Interrupt all that processes have in hand which are gone from this machine. True if there was any."""
    living = living_holders() | {holder}
    holders = {row[0] for statement in (statements.HOLDERS, _MARKS) for row in connection.execute(statement)}
    gone = [other for other in holders if is_gone(other, living)]
    for other in gone:
        logger.info("what a process that is gone had in hand is free again (%s)", other)
        release(other, connection)
    return bool(gone)
