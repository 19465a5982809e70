"""What a file of openai-agents' SQLiteSession holds. Reads only.

Its sessions are rows of ``agent_sessions``; their items, one JSON text each, rows of ``agent_messages`` in the order of
their ids. An AdvancedSQLiteSession notes in ``message_structure`` which branch an item belongs to.
"""

from __future__ import annotations

from typing import Any, Final, LiteralString

import attrs

from chatflow.exceptions import StoreFormatError
from chatflow.sqlite.database import Connection

_TABLES: Final[LiteralString] = "SELECT lower(name) FROM sqlite_master WHERE type = 'table'"

_SESSION_IDS: Final[LiteralString] = """
    SELECT session_id FROM agent_sessions UNION SELECT session_id FROM agent_messages ORDER BY session_id
"""
"""Also those of which only items are left: foreign keys are off there."""

_ITEMS: Final[LiteralString] = """
    SELECT id, message_data, created_at, 1 FROM agent_messages WHERE session_id IS :session_id ORDER BY id
"""

_ITEMS_OF_BRANCHES: Final[LiteralString] = """
    SELECT id, message_data, created_at,
        NOT EXISTS (SELECT 1 FROM message_structure WHERE message_id = agent_messages.id)
        OR EXISTS (SELECT 1 FROM message_structure WHERE message_id = agent_messages.id AND branch_id = 'main')
    FROM agent_messages WHERE session_id IS :session_id ORDER BY id
"""
"""Its items, and whether each belongs to the main branch."""


@attrs.frozen
class StoredItem:
    """A row of ``agent_messages``; *is_main* says that it belongs to the main branch."""

    number: int
    data: Any
    created_at: Any
    is_main: bool


def session_ids(connection: Connection, name: str) -> list[Any]:
    """The ids of all sessions in the file *name*.

    Raises:
        StoreFormatError: It is not such a file.
    """
    if not _tables(connection) >= {"agent_sessions", "agent_messages"}:
        reason = "it has no tables agent_sessions and agent_messages, as openai-agents' SQLiteSession makes them"
        raise StoreFormatError(store=name, reason=reason)
    return [row[0] for row in connection.execute(_SESSION_IDS)]


def items_of(connection: Connection, session_id: Any) -> list[StoredItem]:
    """The items of a session, in order."""
    statement = _ITEMS_OF_BRANCHES if "message_structure" in _tables(connection) else _ITEMS
    rows = connection.execute(statement, {"session_id": session_id})
    return [StoredItem(number, data, created_at, bool(is_main)) for number, data, created_at, is_main in rows]


def _tables(connection: Connection) -> set[str]:
    return {row[0] for row in connection.execute(_TABLES)}
