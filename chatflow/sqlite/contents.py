"""What a database is: empty, ours and of which format, chatflow-agent's, or another program's.

Its tables tell, by names and columns. `user_version` tells nothing: chatflow-agent sets it to 1 at every start.
"""

from __future__ import annotations

from typing import Final

from chatflow.exceptions import StoreFormatError, shorten
from chatflow.sqlite.database import Connection

CHATFLOW_AGENT: Final = -1
"""The format of chatflow-agent 0.3.4."""

CHATFLOW_AGENT_TABLES: Final[dict[str, tuple[str, ...]]] = {
    "chatflow_sessions": ("session_id", "active_agent_name", "metadata_json", "created_at", "updated_at"),
    "chatflow_messages": ("id", "session_id", "role", "content", "message_json", "created_at"),
    "chatflow_processed_messages": ("message_id", "processed_at"),
}
"""Its tables in the order it makes them, each by itself: a start that was cut short leaves only the first."""

_OUR_TABLES: Final = {"chatflow_sessions", "chatflow_messages", "chatflow_processed_messages", "chatflow_turns"}

_OBJECTS: Final = """
    SELECT type, lower(name), lower(tbl_name) FROM sqlite_master WHERE name NOT LIKE 'sqlite\\_%' ESCAPE '\\'
"""
_COLUMNS: Final = "SELECT lower(name) FROM pragma_table_info(:table) ORDER BY cid"
_READ_FORMAT: Final = "SELECT value FROM chatflow_meta WHERE key = 'format'"
_REFERRING: Final = """
    SELECT master.name FROM sqlite_master AS master, pragma_foreign_key_list(master.name) AS reference
    WHERE master.type = 'table' AND lower(master.name) <> 'chatflow_messages'
    AND lower(reference."table") IN ('chatflow_sessions', 'chatflow_messages', 'chatflow_processed_messages')
"""


def format_of(connection: Connection, name: str, newest: int) -> int:
    """The format of the file *name*, up to *newest*; 0 of an empty one, `CHATFLOW_AGENT` of chatflow-agent's.

    Raises:
        StoreFormatError: The file is not ours, or newer.
    """
    objects: list[tuple[str, str, str]] = connection.execute(_OBJECTS).fetchall()
    if not objects:
        return 0
    tables = {each for kind, each, _ in objects if kind == "table"}
    if "chatflow_meta" in tables and _columns(connection, "chatflow_meta") == ("key", "value"):
        return _own_format(connection, name, newest, tables)
    old = CHATFLOW_AGENT_TABLES.keys() & tables
    if "chatflow_sessions" in old:
        if any(_columns(connection, table) != CHATFLOW_AGENT_TABLES[table] for table in old):
            reason = "its table chatflow_sessions is neither chatflow's nor that of chatflow-agent 0.3.4"
            raise StoreFormatError(store=name, reason=reason)
        _refuse_what_hangs_on_it(connection, name, objects)
        return CHATFLOW_AGENT
    raise StoreFormatError(store=name, reason=_ANOTHERS)


_ANOTHERS: Final = "it is another program's database"


def refuse_others(connection: Connection, name: str) -> None:
    """Refuse a file in which nothing has a name of ours, the only thing certain while a transaction is half undone.

    Raises:
        StoreFormatError: It is another program's.
    """
    names = [each for _, each, _ in connection.execute(_OBJECTS)]
    if names and not any(each.startswith("chatflow_") for each in names):
        raise StoreFormatError(store=name, reason=_ANOTHERS)


def _columns(connection: Connection, table: str) -> tuple[str, ...]:
    return tuple(row[0] for row in connection.execute(_COLUMNS, {"table": table}))


def _own_format(connection: Connection, name: str, newest: int, tables: set[str]) -> int:
    row = connection.execute(_READ_FORMAT).fetchone()
    text = None if row is None else row[0]
    # Compared as text: a number that somebody else has written may have any number of digits.
    known = {str(number): number for number in range(1, newest + 1)}
    if isinstance(text, str) and text in known:
        if tables >= _OUR_TABLES:
            return known[text]
        reason = f"it has a table chatflow_meta and no table {min(_OUR_TABLES - tables)}"
    elif isinstance(text, str) and text.isascii() and text.isdigit():
        reason = f"its format is {shorten(text)}, and this version of chatflow reads up to {newest}"
    else:
        reason = "its table chatflow_meta names no format"
    raise StoreFormatError(store=name, reason=reason)


def _refuse_what_hangs_on_it(connection: Connection, name: str, objects: list[tuple[str, str, str]]) -> None:
    """An upgrade replaces chatflow-agent's tables; what of another program stands in the way is that program's."""
    for kind, each, table in objects:
        if each.startswith("chatflow_") and (kind, each) not in {("table", old) for old in CHATFLOW_AGENT_TABLES}:
            reason = f"its {kind} {each} has a name that chatflow needs; rename it, then open it again"
            raise StoreFormatError(store=name, reason=reason)
        if kind == "trigger" and table in CHATFLOW_AGENT_TABLES:
            reason = f"the upgrade would lose its trigger {each} on {table}; drop it, then open it again"
            raise StoreFormatError(store=name, reason=reason)
    row = connection.execute(_REFERRING).fetchone()
    if row is not None:
        reason = f"its table {row[0]} refers to chatflow-agent's tables, which an upgrade replaces; drop the reference"
        raise StoreFormatError(store=name, reason=reason)
