"""Reading all that is kept of an owner, a page at a time, in orders that no commit changes."""

from __future__ import annotations

import datetime as dt
from typing import Any, Final, LiteralString

from chatflow.core import reading
from chatflow.core.journal import Entry
from chatflow.core.owners import RememberedId, Stored, TakenOut
from chatflow.core.records import Key, Snapshot
from chatflow.exceptions import CorruptSessionError, shorten
from chatflow.postgres import operations
from chatflow.postgres.connection import Step, Transaction
from chatflow.postgres.database import Database
from chatflow.postgres.reading import moment
from chatflow.postgres.turn_statements import KEY_OF_TURN, READ_JOURNAL

SESSION_IDS_AFTER: Final[LiteralString] = """
    SELECT session_id FROM chatflow_sessions
    WHERE owner = %(owner)s AND session_id > %(after)s ORDER BY session_id LIMIT %(limit)s
"""
"""The next ids of an owner's conversations."""

IDS_AFTER: Final[LiteralString] = """
    SELECT session_id, message_id, processed_at, response_json FROM chatflow_processed_messages
    WHERE owner = %(owner)s AND (session_id, message_id) > (%(session_id)s, %(message_id)s)
    ORDER BY session_id, message_id LIMIT %(limit)s
"""
"""The next message ids of an owner."""

SET_ASIDE_AFTER: Final[LiteralString] = """
    SELECT set_aside_id, session_id, source, content, reason, set_aside_at FROM chatflow_set_aside
    WHERE set_aside_id > %(after)s AND owner = %(owner)s ORDER BY set_aside_id LIMIT %(limit)s
"""
"""What was set aside next of an owner's."""


async def page_of_session_ids(owner: str, after: str, limit: int, database: Database) -> tuple[str, ...]:
    """The next ids."""
    found = await database.ask(SESSION_IDS_AFTER, owner=owner, after=after, limit=limit)
    return tuple(session_id for (session_id,) in found)


async def read_session(key: Key, transaction: Transaction) -> Stored | None:
    """A conversation, whole, with its times."""
    sessions, messages = await transaction.ask_all(*operations.steps_to_load(key, None))
    snapshot = operations.snapshot_of(key, None, (sessions, messages))
    if not isinstance(snapshot, Snapshot):
        return None
    where = f"chatflow_sessions, session_key {snapshot.session_key}"
    created_at, updated_at = sessions[0][9:11]
    return Stored(
        snapshot=snapshot,
        created_at=moment(key.session_id, f"{where}, created_at", created_at),
        updated_at=moment(key.session_id, f"{where}, updated_at", updated_at),
    )


async def read_journal(turn_id: int, transaction: Transaction) -> tuple[Entry, ...]:
    """What a turn has noted; nothing, if it is gone."""
    asked = {"turn_id": turn_id}
    names, lines = await transaction.ask_all(Step(KEY_OF_TURN, asked), Step(READ_JOURNAL, asked))
    return reading.entries_of(turn_id, names[0][1], lines) if lines else ()


async def page_of_processed(
    owner: str, after: tuple[str, str], limit: int, database: Database
) -> tuple[RememberedId, ...]:
    """The next message ids."""
    session_id, message_id = after
    found = await database.ask(IDS_AFTER, owner=owner, session_id=session_id, message_id=message_id, limit=limit)
    return tuple(_remembered(*row) for row in found)


def _remembered(session_id: str, message_id: str, processed_at: object, response_json: object) -> RememberedId:
    where = f"chatflow_processed_messages, message_id {shorten(message_id)}"
    at, response, fault = reading.LONG_AGO, None, None
    try:
        at = moment(session_id, f"{where}, processed_at", processed_at)
        if response_json is not None:
            response = reading.response(session_id, f"{where}, response_json", response_json)
    except CorruptSessionError as error:
        fault = error
    return RememberedId(session_id=session_id, message_id=message_id, processed_at=at, response=response, fault=fault)


async def page_of_set_aside(owner: str, after: int, limit: int, database: Database) -> tuple[TakenOut, ...]:
    """What was set aside next."""
    found = await database.ask(SET_ASIDE_AFTER, owner=owner, after=after, limit=limit)
    return tuple(_taken_out(*row) for row in found)


def _taken_out(
    number: int, session_id: str | None, source: str, content: Any, reason: str, set_aside_at: Any
) -> TakenOut:
    at = set_aside_at.astimezone(dt.UTC).isoformat() if isinstance(set_aside_at, dt.datetime) else str(set_aside_at)
    return TakenOut(
        number=number, session_id=session_id, source=source, content=content, reason=reason, set_aside_at=at
    )
