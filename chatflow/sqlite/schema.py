"""The tables, how a file gets them, and which files are refused."""

from __future__ import annotations

import time
from typing import Final

from chatflow.exceptions import StoreFormatError
from chatflow.sqlite.database import BUSY_SECONDS, FILE_PRAGMAS, Connection, Database, is_busy, living_holders
from chatflow.sqlite.holder import is_gone

MIGRATIONS: Final[tuple[tuple[str, ...], ...]] = (
    # 1: chatflow 0.1.0
    (
        # The format's version stands here, since chatflow-agent sets user_version to 1 at every start.
        """
        CREATE TABLE chatflow_meta (
            key TEXT PRIMARY KEY,
            value TEXT NOT NULL
        ) STRICT, WITHOUT ROWID
        """,
        # session_key tells an id's incarnations apart; AUTOINCREMENT, so that none is ever given out again.
        # version grows with each change, over all conversations: it orders lists by commit.
        """
        CREATE TABLE chatflow_sessions (
            session_key INTEGER PRIMARY KEY AUTOINCREMENT,
            owner TEXT NOT NULL DEFAULT '',
            session_id TEXT NOT NULL,
            active_agent_name TEXT NOT NULL,
            metadata_json TEXT NOT NULL DEFAULT '{}',
            state_json TEXT NOT NULL DEFAULT '{}',
            max_turns INTEGER,
            version INTEGER NOT NULL UNIQUE,
            created_at TEXT NOT NULL,
            updated_at TEXT NOT NULL,
            UNIQUE (owner, session_id)
        ) STRICT
        """,
        "CREATE INDEX chatflow_sessions_by_commit ON chatflow_sessions (owner, version)",
        # place orders a conversation's messages, system messages first. WITHOUT ROWID keeps them together on the disk:
        # loading one conversation reads one stretch.
        """
        CREATE TABLE chatflow_messages (
            session_key INTEGER NOT NULL REFERENCES chatflow_sessions (session_key) ON DELETE CASCADE,
            place INTEGER NOT NULL,
            message_json TEXT NOT NULL,
            PRIMARY KEY (session_key, place)
        ) STRICT, WITHOUT ROWID
        """,
        # An empty session_id is the scope of marks without a conversation.
        """
        CREATE TABLE chatflow_processed_messages (
            owner TEXT NOT NULL DEFAULT '',
            session_id TEXT NOT NULL,
            message_id TEXT NOT NULL,
            processed_at TEXT NOT NULL,
            digest TEXT,
            response_json TEXT,
            PRIMARY KEY (owner, session_id, message_id)
        ) STRICT, WITHOUT ROWID
        """,
        "CREATE INDEX chatflow_processed_by_age ON chatflow_processed_messages (processed_at)",
        # A row is a place in the conversation's line, then the right to run. Ids are never given out again: they are
        # the order, and part of the fence.
        """
        CREATE TABLE chatflow_turns (
            turn_id INTEGER PRIMARY KEY AUTOINCREMENT,
            session_key INTEGER NOT NULL REFERENCES chatflow_sessions (session_key) ON DELETE CASCADE,
            state TEXT NOT NULL CHECK (state IN ('queued', 'running')),
            holder TEXT NOT NULL,
            attempt INTEGER NOT NULL,
            agent_name TEXT NOT NULL,
            message_id TEXT,
            digest TEXT,
            parent INTEGER,
            queued_at TEXT NOT NULL
        ) STRICT
        """,
        "CREATE INDEX chatflow_turns_in_line ON chatflow_turns (session_key)",
        "CREATE UNIQUE INDEX chatflow_turns_one_runs ON chatflow_turns (session_key) WHERE state = 'running'",
        """
        CREATE UNIQUE INDEX chatflow_turns_one_a_message ON chatflow_turns (session_key, message_id)
        WHERE message_id IS NOT NULL
        """,
        "CREATE INDEX chatflow_turns_by_parent ON chatflow_turns (parent) WHERE parent IS NOT NULL",
        # What a repair or an upgrade has taken out of conversations, as it stood in the file.
        """
        CREATE TABLE chatflow_set_aside (
            set_aside_id INTEGER PRIMARY KEY,
            owner TEXT NOT NULL,
            session_id TEXT NOT NULL,
            source TEXT NOT NULL,
            content ANY,
            reason TEXT NOT NULL,
            set_aside_at TEXT NOT NULL
        ) STRICT
        """,
        "CREATE INDEX chatflow_set_aside_by_session ON chatflow_set_aside (owner, session_id)",
    ),
)
"""In order; a released entry is never edited. The format's version is how many a file has had."""

_TABLES: Final = "SELECT name FROM sqlite_master WHERE type = 'table' AND name NOT LIKE 'sqlite\\_%' ESCAPE '\\'"
_READ_VERSION: Final = "SELECT value FROM chatflow_meta WHERE key = 'format'"
_WRITE_VERSION: Final = """
    INSERT INTO chatflow_meta (key, value) VALUES ('format', :version)
    ON CONFLICT (key) DO UPDATE SET value = excluded.value
"""
_HOLDERS: Final = "SELECT DISTINCT holder FROM chatflow_turns"
_MARKS: Final = "SELECT substr(key, 8) FROM chatflow_meta WHERE key >= 'commit:' AND key < 'commit;'"
_DELETE_TURNS: Final = "DELETE FROM chatflow_turns WHERE holder = :holder"
_DELETE_MARK: Final = "DELETE FROM chatflow_meta WHERE key = 'commit:' || :holder"


def prepare(connection: Connection, database: Database) -> None:
    """Make the file ready: refuse what is not ours, create or upgrade the tables, remove what dead processes left.

    Raises:
        StoreFormatError: The file is not ours, or newer than this version; it was left untouched.
    """
    name = database.location.name
    version = _version(connection, name)
    if database.location.path is not None:
        for pragma, value, _ in FILE_PRAGMAS:
            _set_when_free(connection, f"PRAGMA {pragma}={value}")
    # On an error the connection is closed, and all of it undone.
    connection.execute("BEGIN IMMEDIATE")
    if version < len(MIGRATIONS):
        # Asked again inside: another process may have been faster.
        for statements in MIGRATIONS[_version(connection, name) :]:
            for statement in statements:
                connection.execute(statement)
        connection.execute(_WRITE_VERSION, {"version": str(len(MIGRATIONS))})
    _remove_the_dead(connection, living_holders() | {database.holder})
    connection.execute("COMMIT")


def _version(connection: Connection, name: str) -> int:
    tables = {row[0] for row in connection.execute(_TABLES)}
    if "chatflow_meta" in tables:
        row = connection.execute(_READ_VERSION).fetchone()
        version = int(row[0]) if row is not None and str(row[0]).isdecimal() else 0
        if not 1 <= version <= len(MIGRATIONS):
            raise StoreFormatError(
                store=name,
                reason=f"its format is {version}, and this version of chatflow reads up to {len(MIGRATIONS)}",
            )
        return version
    if "chatflow_sessions" in tables:
        raise StoreFormatError(store=name, reason="it was written by chatflow-agent; this version can't upgrade it")
    if tables:
        raise StoreFormatError(store=name, reason="it is another program's database")
    return 0


def _set_when_free(connection: Connection, pragma: str) -> None:
    """Turning a new file to WAL needs it for itself for a moment, and does not wait for that by itself."""
    deadline = time.monotonic() + BUSY_SECONDS
    while True:
        try:
            connection.execute(pragma)
        except Exception as error:
            if not is_busy(error) or time.monotonic() > deadline:
                raise
            time.sleep(0.01)
        else:
            return


def _remove_the_dead(connection: Connection, living: set[str]) -> None:
    holders = {row[0] for statement in (_HOLDERS, _MARKS) for row in connection.execute(statement)}
    for holder in holders:
        if is_gone(holder, living):
            connection.execute(_DELETE_TURNS, {"holder": holder})
            connection.execute(_DELETE_MARK, {"holder": holder})
