"""Erasing an owner: one transaction gives all its rows a name that nobody can ask for, others delete them in slices."""

from __future__ import annotations

import uuid
from typing import Final, LiteralString

from chatflow.core.owners import RESERVED, Erased, Hidden
from chatflow.sqlite import statements
from chatflow.sqlite.database import Connection

COUNT_MESSAGES: Final[LiteralString] = """
    SELECT count(*) FROM chatflow_messages
    WHERE session_key IN (SELECT session_key FROM chatflow_sessions WHERE owner = :owner)
"""
"""How many messages an owner has."""

DELETE_TURNS_OF_OWNER: Final[LiteralString] = """
    DELETE FROM chatflow_turns
    WHERE session_key IN (SELECT session_key FROM chatflow_sessions WHERE owner = :owner)
    RETURNING turn_id
"""
"""An owner's turns: none that is under way can commit."""

HIDE_SESSIONS: Final[LiteralString] = """
    UPDATE chatflow_sessions SET owner = :hidden, service_key = NULL, expires_at = NULL WHERE owner = :owner
"""
"""An owner's conversations, out of everybody's sight."""

HIDE_IDS: Final[LiteralString] = "UPDATE chatflow_processed_messages SET owner = :hidden WHERE owner = :owner"
"""An owner's message ids."""

HIDE_SET_ASIDE: Final[LiteralString] = "UPDATE chatflow_set_aside SET owner = :hidden WHERE owner = :owner"
"""What was set aside of an owner's."""

HIDDEN_SESSIONS: Final[LiteralString] = """
    SELECT session_key FROM chatflow_sessions WHERE owner >= char(0) AND owner < char(1) LIMIT :limit
"""
"""A slice of the conversations that were hidden."""

DELETE_HIDDEN_IDS: Final[LiteralString] = """
    DELETE FROM chatflow_processed_messages WHERE (owner, session_id, message_id) IN (
        SELECT owner, session_id, message_id FROM chatflow_processed_messages
        WHERE owner >= char(0) AND owner < char(1) LIMIT :limit
    )
"""
"""A slice of the message ids that were hidden."""

DELETE_HIDDEN_SET_ASIDE: Final[LiteralString] = """
    DELETE FROM chatflow_set_aside WHERE set_aside_id IN (
        SELECT set_aside_id FROM chatflow_set_aside WHERE owner >= char(0) AND owner < char(1) LIMIT :limit
    )
"""
"""A slice of what was set aside, and hidden."""

NOTE_ERASING: Final[LiteralString] = "INSERT INTO chatflow_meta (key, value) VALUES ('erasing:' || :number, '')"
"""Something was hidden, and the log holds what it was. The note stays until the log is flushed."""

ERASING: Final[LiteralString] = """
    SELECT substr(key, 9), EXISTS (
        SELECT 1 FROM chatflow_sessions WHERE owner = char(0) || substr(key, 9)
        UNION ALL
        SELECT 1 FROM chatflow_processed_messages WHERE owner = char(0) || substr(key, 9)
        UNION ALL
        SELECT 1 FROM chatflow_set_aside WHERE owner = char(0) || substr(key, 9)
    )
    FROM chatflow_meta WHERE key >= 'erasing:' AND key < 'erasing;'
"""
"""What was hidden since the log was flushed, and whether rows of it are left."""

FORGET_ERASING: Final[LiteralString] = "DELETE FROM chatflow_meta WHERE key = 'erasing:' || :number"
"""The log holds nothing of it any more."""


def hide_owner(owner: str, connection: Connection) -> Hidden:
    """Delete the owner's turns, and rename all else."""
    number, named = uuid.uuid4().hex, {"owner": owner}
    messages = connection.execute(COUNT_MESSAGES, named).fetchone()[0]
    turns = connection.execute(DELETE_TURNS_OF_OWNER, named).fetchall()
    renamed = {**named, "hidden": f"{RESERVED}{number}"}
    counts = Erased(
        conversations=connection.execute(HIDE_SESSIONS, renamed).rowcount,
        messages=messages,
        turns=len(turns),
        message_ids=connection.execute(HIDE_IDS, renamed).rowcount,
        set_aside=connection.execute(HIDE_SET_ASIDE, renamed).rowcount,
    )
    if counts.conversations or counts.message_ids or counts.set_aside:
        connection.execute(NOTE_ERASING, {"number": number})
    return Hidden(counts, tuple(row[0] for row in turns))


def is_anything_noted(connection: Connection) -> bool:
    """Whether anything is to be dropped or flushed."""
    return connection.execute(ERASING).fetchone() is not None


def drop_hidden(limit: int, connection: Connection) -> bool:
    """Delete a slice; False if there was nothing."""
    asked = {"limit": limit}
    found = connection.execute(HIDDEN_SESSIONS, asked).fetchall()
    for (session_key,) in found:
        connection.execute(statements.DELETE_SESSION, {"session_key": session_key})
    return bool(
        found
        or connection.execute(DELETE_HIDDEN_IDS, asked).rowcount
        or connection.execute(DELETE_HIDDEN_SET_ASIDE, asked).rowcount
    )


def dropped(connection: Connection) -> tuple[str, ...]:
    """What was hidden and is gone, and is still to be flushed."""
    return tuple(number for number, is_left in connection.execute(ERASING) if not is_left)


def forget(numbers: tuple[str, ...], connection: Connection) -> None:
    """It was flushed."""
    connection.executemany(FORGET_ERASING, [{"number": number} for number in numbers])
