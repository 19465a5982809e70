"""Erasing an owner: one transaction gives all its rows a name that nobody can ask for, others delete them in slices."""

from __future__ import annotations

import uuid
from typing import Final, LiteralString

from chatflow.core.owners import RESERVED, Erased, Hidden
from chatflow.postgres.connection import Step, Transaction
from chatflow.postgres.database import Database
from chatflow.postgres.operations import HIDDEN

LOCK_OWNER: Final[LiteralString] = """
    SELECT session_key FROM chatflow_sessions WHERE owner = %(owner)s ORDER BY session_key FOR UPDATE
"""
"""An owner's conversations; nobody is at one of them meanwhile."""

COUNT_MESSAGES: Final[LiteralString] = """
    SELECT count(*) FROM chatflow_messages
    WHERE session_key IN (SELECT session_key FROM chatflow_sessions WHERE owner = %(owner)s)
"""
"""How many messages an owner has."""

DELETE_TURNS_OF_OWNER: Final[LiteralString] = """
    DELETE FROM chatflow_turns
    WHERE session_key IN (SELECT session_key FROM chatflow_sessions WHERE owner = %(owner)s)
    RETURNING turn_id
"""
"""An owner's turns: none that is under way can commit."""

HIDE: Final[LiteralString] = """
    WITH sessions AS (
        UPDATE chatflow_sessions SET owner = %(hidden)s, service_key = NULL, expires_at = NULL
        WHERE owner = %(owner)s RETURNING 1
    ), ids AS (
        UPDATE chatflow_processed_messages SET owner = %(hidden)s WHERE owner = %(owner)s RETURNING 1
    ), aside AS (
        UPDATE chatflow_set_aside SET owner = %(hidden)s WHERE owner = %(owner)s RETURNING 1
    )
    SELECT
        (SELECT count(*) FROM sessions), (SELECT count(*) FROM ids), (SELECT count(*) FROM aside),
        nextval('chatflow_versions')
"""
"""All that is an owner's, out of everybody's sight."""

DROP_HIDDEN: Final[LiteralString] = """
    WITH sessions AS (
        DELETE FROM chatflow_sessions WHERE session_key IN (
            SELECT session_key FROM chatflow_sessions
            WHERE owner >= %(hidden)s AND owner < %(shown)s LIMIT %(limit)s FOR UPDATE
        ) RETURNING 1
    ), ids AS (
        DELETE FROM chatflow_processed_messages WHERE (owner, session_id, message_id) IN (
            SELECT owner, session_id, message_id FROM chatflow_processed_messages
            WHERE owner >= %(hidden)s AND owner < %(shown)s LIMIT %(limit)s
        ) RETURNING 1
    ), aside AS (
        DELETE FROM chatflow_set_aside WHERE set_aside_id IN (
            SELECT set_aside_id FROM chatflow_set_aside
            WHERE owner >= %(hidden)s AND owner < %(shown)s LIMIT %(limit)s
        ) RETURNING 1
    )
    SELECT EXISTS (SELECT 1 FROM sessions) OR EXISTS (SELECT 1 FROM ids) OR EXISTS (SELECT 1 FROM aside)
"""
"""A slice of what was hidden."""

NOTE_ERASING: Final[LiteralString] = "INSERT INTO chatflow_meta (key, value) VALUES (%(note)s, '')"
"""Something was hidden. The note stays until the tables are vacuumed."""

ERASING: Final[LiteralString] = """
    SELECT key, EXISTS (
        SELECT 1 FROM chatflow_sessions WHERE owner >= %(hidden)s AND owner < %(shown)s
        UNION ALL
        SELECT 1 FROM chatflow_processed_messages WHERE owner >= %(hidden)s AND owner < %(shown)s
        UNION ALL
        SELECT 1 FROM chatflow_set_aside WHERE owner >= %(hidden)s AND owner < %(shown)s
    )
    FROM chatflow_meta WHERE key >= 'erasing:' AND key < 'erasing;'
"""
"""What was hidden since the tables were vacuumed, and whether any of it is left."""

FORGET_ERASING: Final[LiteralString] = "DELETE FROM chatflow_meta WHERE key = ANY(%(notes)s)"
"""The tables hold nothing of it any more."""

VACUUM: Final[tuple[LiteralString, ...]] = (
    "VACUUM chatflow_messages",
    "VACUUM chatflow_sessions",
    "VACUUM chatflow_processed_messages",
    "VACUUM chatflow_turns",
    "VACUUM chatflow_journal",
    "VACUUM chatflow_set_aside",
)
"""What was deleted leaves the tables."""

REWRITE: Final[tuple[LiteralString, ...]] = (
    "VACUUM FULL chatflow_messages",
    "VACUUM FULL chatflow_sessions",
    "VACUUM FULL chatflow_processed_messages",
    "VACUUM FULL chatflow_turns",
    "VACUUM FULL chatflow_journal",
    "VACUUM FULL chatflow_set_aside",
)
"""The tables are written anew, in files of their own, and the old ones go."""


async def hide_owner(owner: str, transaction: Transaction) -> Hidden:
    """Delete the owner's turns, and rename all else."""
    number = uuid.uuid4().hex
    _, ((messages,),) = await transaction.ask_all(
        Step(LOCK_OWNER, {"owner": owner}), Step(COUNT_MESSAGES, {"owner": owner})
    )
    turns = await transaction.changed_rows(DELETE_TURNS_OF_OWNER, owner=owner)
    ((conversations, ids, aside, _),) = await transaction.changed_rows(HIDE, owner=owner, hidden=f"{RESERVED}{number}")
    counts = Erased(conversations=conversations, messages=messages, turns=len(turns), message_ids=ids, set_aside=aside)
    if conversations or ids or aside:
        await transaction.change(NOTE_ERASING, note=f"erasing:{number}")
    return Hidden(counts, tuple(turn_id for (turn_id,) in turns))


async def notes(database: Database) -> list[tuple[str, bool]]:
    """What is to be dropped or flushed, and whether rows of it are left."""
    return [(key, is_left) for key, is_left in await database.ask(ERASING, **HIDDEN)]


async def drop_hidden(limit: int, transaction: Transaction) -> bool:
    """Delete a slice; False if there was nothing."""
    ((found,),) = await transaction.changed_rows(DROP_HIDDEN, limit=limit, **HIDDEN)
    return bool(found)


async def flush(noted: list[tuple[str, bool]], database: Database, *, rewrite: bool) -> None:
    """Vacuum the tables, each by itself: that can't be part of a transaction."""
    for statement in REWRITE if rewrite else VACUUM:
        await database.ask(statement)
    dropped = [key for key, is_left in noted if not is_left]
    await database.fly(Step(FORGET_ERASING, {"notes": dropped}))
