"""Reading all that is kept of an owner, a page at a time, in orders that no commit changes."""

from __future__ import annotations

from typing import Any, Final, LiteralString

from chatflow.core import reading
from chatflow.core.journal import Entry
from chatflow.core.owners import RememberedId, Stored, TakenOut
from chatflow.core.records import Key, Snapshot
from chatflow.exceptions import CorruptSessionError, shorten
from chatflow.sqlite import operations
from chatflow.sqlite.database import Connection
from chatflow.sqlite.rows import key_of
from chatflow.sqlite.turn_statements import READ_JOURNAL

SESSION_IDS_AFTER: Final[LiteralString] = """
    SELECT session_id FROM chatflow_sessions
    WHERE owner = :owner AND session_id > CAST(:after AS TEXT) ORDER BY session_id LIMIT :limit
"""
"""The next ids of an owner's conversations. The last one is given in bytes, which need not be UTF-8."""

TIMES_OF_SESSION: Final[LiteralString] = """
    SELECT created_at, updated_at FROM chatflow_sessions WHERE session_key = :session_key
"""
"""When a conversation began, and when it was last changed."""

IDS_AFTER: Final[LiteralString] = """
    SELECT session_id, message_id, processed_at, response_json FROM chatflow_processed_messages
    WHERE owner = :owner AND (session_id, message_id) > (CAST(:session_id AS TEXT), CAST(:message_id AS TEXT))
    ORDER BY session_id, message_id LIMIT :limit
"""
"""The next message ids of an owner."""

SET_ASIDE_AFTER: Final[LiteralString] = """
    SELECT set_aside_id, session_id, source, content, reason, set_aside_at FROM chatflow_set_aside
    WHERE set_aside_id > :after AND +owner = :owner ORDER BY set_aside_id LIMIT :limit
"""
"""What was set aside next of an owner's. By number, in which an owner's are mostly together."""


def page_of_session_ids(owner: str, after: str, limit: int, connection: Connection) -> tuple[str, ...]:
    """The next ids."""
    asked = {"owner": owner, "after": reading.original(after), "limit": limit}
    return tuple(row[0] for row in connection.execute(SESSION_IDS_AFTER, asked))


def read_session(key: Key, connection: Connection) -> Stored | None:
    """A conversation, whole, with its times."""
    if not reading.is_text(key.session_id):
        row = f"chatflow_sessions, session_id {shorten(reading.shown(key.session_id))}"
        raise CorruptSessionError(
            session_id=reading.shown(key.session_id), row=row, reason="its id is not text in UTF-8"
        )
    snapshot = operations.load(key, None, connection)
    if not isinstance(snapshot, Snapshot):
        return None
    session_key = snapshot.session_key
    created_at, updated_at = connection.execute(TIMES_OF_SESSION, {"session_key": session_key}).fetchone()
    where = f"chatflow_sessions, session_key {session_key}"
    return Stored(
        snapshot=snapshot,
        created_at=reading.moment(key.session_id, f"{where}, created_at", created_at),
        updated_at=reading.moment(key.session_id, f"{where}, updated_at", updated_at),
    )


def read_journal(turn_id: int, connection: Connection) -> tuple[Entry, ...]:
    """What a turn has noted; nothing, if it is gone."""
    lines = connection.execute(READ_JOURNAL, {"turn_id": turn_id}).fetchall()
    return reading.entries_of(turn_id, key_of(turn_id, connection).session_id, lines) if lines else ()


def page_of_processed(
    owner: str, after: tuple[str, str], limit: int, connection: Connection
) -> tuple[RememberedId, ...]:
    """The next message ids."""
    session_id, message_id = map(reading.original, after)
    asked = {"owner": owner, "session_id": session_id, "message_id": message_id, "limit": limit}
    return tuple(_remembered(*row) for row in connection.execute(IDS_AFTER, asked))


def _remembered(session_id: str, message_id: str, processed_at: object, response_json: object) -> RememberedId:
    where = f"chatflow_processed_messages, message_id {shorten(reading.shown(message_id))}"
    moment, response, fault = reading.LONG_AGO, None, None
    try:
        moment = reading.moment(session_id, f"{where}, processed_at", processed_at)
        if response_json is not None:
            response = reading.response(session_id, f"{where}, response_json", response_json)
    except CorruptSessionError as error:
        fault = error
    return RememberedId(
        session_id=session_id, message_id=message_id, processed_at=moment, response=response, fault=fault
    )


def page_of_set_aside(owner: str, after: int, limit: int, connection: Connection) -> tuple[TakenOut, ...]:
    """What was set aside next."""
    found = connection.execute(SET_ASIDE_AFTER, {"owner": owner, "after": after, "limit": limit})
    return tuple(_taken_out(*row) for row in found)


def _taken_out(
    number: int, session_id: Any, source: object, content: Any, reason: object, set_aside_at: object
) -> TakenOut:
    return TakenOut(
        number=number,
        session_id=None if session_id is None else reading.shown(session_id),
        source=reading.shown(source),
        content=reading.as_stood(content),
        reason=reading.shown(reason),
        set_aside_at=reading.shown(set_aside_at),
    )
