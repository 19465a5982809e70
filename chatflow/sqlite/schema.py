"""The tables, how a file gets them, and which files are refused."""

from __future__ import annotations

import time
from typing import Final

from chatflow.exceptions import StoreFormatError
from chatflow.sqlite.database import BUSY_SECONDS, FILE_PRAGMAS, Connection, Database, is_busy
from chatflow.sqlite.rows import release_the_gone

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
        # What a row is, and what may happen to it, is said in core/rows.py. Ids are never given out again: they are the
        # order. holder and attempt are the fence; no clock is compared with another process's, so beat is a number.
        # parent is the turn that the asking code ran in; ended_at is when a row left the line for good.
        """
        CREATE TABLE chatflow_turns (
            turn_id INTEGER PRIMARY KEY AUTOINCREMENT,
            session_key INTEGER NOT NULL REFERENCES chatflow_sessions (session_key) ON DELETE CASCADE,
            state TEXT NOT NULL CHECK (
                state IN ('queued', 'running', 'accepted', 'interrupted', 'told', 'dead', 'answered')
            ),
            holder TEXT,
            attempt INTEGER NOT NULL,
            attempts INTEGER NOT NULL,
            beat INTEGER NOT NULL DEFAULT 0,
            lease_seconds REAL NOT NULL,
            accepted INTEGER NOT NULL,
            agent_name TEXT,
            message_id TEXT,
            digest TEXT,
            work_json TEXT,
            parent INTEGER,
            queued_at TEXT NOT NULL,
            ended_at TEXT,
            CHECK (holder IS NOT NULL OR state NOT IN ('queued', 'running'))
        ) STRICT
        """,
        "CREATE INDEX chatflow_turns_in_line ON chatflow_turns (session_key)",
        "CREATE UNIQUE INDEX chatflow_turns_one_runs ON chatflow_turns (session_key) WHERE state = 'running'",
        """
        CREATE UNIQUE INDEX chatflow_turns_one_a_message ON chatflow_turns (session_key, message_id)
        WHERE message_id IS NOT NULL
        """,
        "CREATE INDEX chatflow_turns_by_parent ON chatflow_turns (parent) WHERE parent IS NOT NULL",
        "CREATE INDEX chatflow_turns_held ON chatflow_turns (holder) WHERE holder IS NOT NULL",
        "CREATE INDEX chatflow_turns_at_hand ON chatflow_turns (agent_name, state) WHERE holder IS NULL",
        "CREATE INDEX chatflow_turns_by_end ON chatflow_turns (ended_at) WHERE ended_at IS NOT NULL",
        # What a turn with a message id must not do twice. It goes with the row.
        """
        CREATE TABLE chatflow_journal (
            turn_id INTEGER NOT NULL REFERENCES chatflow_turns (turn_id) ON DELETE CASCADE,
            step INTEGER NOT NULL,
            entry_json TEXT NOT NULL,
            PRIMARY KEY (turn_id, step)
        ) STRICT, WITHOUT ROWID
        """,
    ),
)
"""In order; a released entry is never edited. The format's version is how many a file has had."""

_TABLES: Final = "SELECT name FROM sqlite_master WHERE type = 'table' AND name NOT LIKE 'sqlite\\_%' ESCAPE '\\'"
_READ_VERSION: Final = "SELECT value FROM chatflow_meta WHERE key = 'format'"
_WRITE_VERSION: Final = """
    INSERT INTO chatflow_meta (key, value) VALUES ('format', :version)
    ON CONFLICT (key) DO UPDATE SET value = excluded.value
"""


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
    release_the_gone(database.holder, connection)
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
