"""The tables, how a file gets them, and which files are refused."""

from __future__ import annotations

import shlex
import time
from functools import partial
from typing import Final

from chatflow.exceptions import StoreFormatError
from chatflow.sqlite.contents import CHATFLOW_AGENT, format_of, refuse_others
from chatflow.sqlite.database import BUSY_SECONDS, FILE_PRAGMAS, Connection, Database, Lifecycle, is_busy
from chatflow.sqlite.rows import release, release_the_gone
from chatflow.sqlite.upgrade import upgrade

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
        # service_json is a service's session that keeps the history, and service_key its id, to be found by.
        # spent_json is what messages have cost that have left the window.
        # expires_after is in seconds, and expires_at when they will have passed if nothing is committed before.
        # A chatflow-agent 0.3.4 that still runs on a file which was upgraded must fail, whatever it writes. Most of its
        # statements name columns that are gone. Its set_active_agent() doesn't, but it writes CURRENT_TIMESTAMP, which
        # has no T: hence the check.
        """
        CREATE TABLE chatflow_sessions (
            session_key INTEGER PRIMARY KEY AUTOINCREMENT,
            owner TEXT NOT NULL DEFAULT '',
            session_id TEXT NOT NULL,
            active_agent_name TEXT NOT NULL,
            metadata_json TEXT NOT NULL DEFAULT '{}',
            state_json TEXT NOT NULL DEFAULT '{}',
            max_turns INTEGER,
            service_json TEXT,
            service_key TEXT,
            spent_json TEXT,
            expires_after REAL,
            expires_at TEXT,
            version INTEGER NOT NULL UNIQUE,
            created_at TEXT NOT NULL,
            updated_at TEXT NOT NULL CONSTRAINT "chatflow-agent can no longer write to this file"
                CHECK (updated_at GLOB '????-??-??T*'),
            UNIQUE (owner, session_id)
        ) STRICT
        """,
        "CREATE INDEX chatflow_sessions_by_commit ON chatflow_sessions (owner, version)",
        # Few conversations have either, and the others pay nothing for it.
        """
        CREATE INDEX chatflow_sessions_by_service ON chatflow_sessions (owner, service_key, version)
        WHERE service_key IS NOT NULL
        """,
        """
        CREATE INDEX chatflow_sessions_by_expiry ON chatflow_sessions (owner, expires_at)
        WHERE expires_at IS NOT NULL
        """,
        "CREATE INDEX chatflow_sessions_expiring ON chatflow_sessions (expires_at) WHERE expires_at IS NOT NULL",
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
        # A deleted conversation leaves no messages. That holds only for connections with foreign keys on, which
        # SQLite leaves to each of them: so a message is added that goes with the conversation if they are. It stops a
        # chatflow-agent's clear(), which has foreign keys off and would delete all conversations, whoever's they are.
        """
        CREATE TRIGGER chatflow_sessions_deleting BEFORE DELETE ON chatflow_sessions BEGIN
            INSERT OR IGNORE INTO chatflow_messages (session_key, place, message_json)
            VALUES (OLD.session_key, 9223372036854775807, '');
        END
        """,
        """
        CREATE TRIGGER chatflow_sessions_deleted AFTER DELETE ON chatflow_sessions
        WHEN EXISTS (SELECT 1 FROM chatflow_messages WHERE session_key = OLD.session_key) BEGIN
            SELECT RAISE(ABORT, 'foreign keys are off: PRAGMA foreign_keys=ON makes messages go with their session');
        END
        """,
        # An empty session_id is the scope of marks without a conversation. It has no default, which a chatflow-agent's
        # INSERT OR REPLACE would fill in.
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
        # What an upgrade or a repair has taken out of conversations, as it stood, text or bytes. source is the table
        # and key it stood in. Without a session_id it belonged to no conversation.
        """
        CREATE TABLE chatflow_set_aside (
            set_aside_id INTEGER PRIMARY KEY,
            owner TEXT NOT NULL DEFAULT '',
            session_id TEXT,
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

_WRITE_VERSION: Final = """
    INSERT INTO chatflow_meta (key, value) VALUES ('format', :version)
    ON CONFLICT (key) DO UPDATE SET value = excluded.value
"""

_GIVE_ID: Final = """
    INSERT INTO chatflow_meta (key, value) VALUES ('store_id', lower(hex(randomblob(16)))) ON CONFLICT (key) DO NOTHING
"""
"""A file is told from all others by it, when it is copied into another store: its path depends on who looks."""


def look(connection: Connection, name: str, committed: bool) -> None:
    """Refuse a file that is not ours, without a change to it."""
    connection.execute("BEGIN")
    if committed:
        format_of(connection, name, len(MIGRATIONS))
    else:
        refuse_others(connection, name)


def check(connection: Connection, name: str) -> None:
    """Refuse a file that is not ready to be read as it is, without a change to it.

    Raises:
        StoreFormatError: The file is not ours, newer than this version, or has to be upgraded first.
    """
    connection.execute("BEGIN")
    version = format_of(connection, name, len(MIGRATIONS))
    connection.execute("COMMIT")
    if version == 0:
        raise StoreFormatError(store=name, reason="it is empty; opening it for writing makes it a store")
    if version < len(MIGRATIONS):
        what = "it was written by chatflow-agent" if version == CHATFLOW_AGENT else f"its format is {version}"
        how = f"`chatflow upgrade {shlex.quote(name)}` does that, and so does opening it for writing"
        raise StoreFormatError(store=name, reason=f"{what}, and has to be upgraded first: {how}")


def prepare(connection: Connection, database: Database) -> None:
    """Make the file ready: refuse what is not ours, create or upgrade the tables, remove what dead processes left.

    Raises:
        StoreFormatError: The file is not ours, or newer than this version; it was left untouched.
    """
    name = database.location.name
    # One look, so that nobody's upgrade lies between its parts.
    connection.execute("BEGIN")
    version = format_of(connection, name, len(MIGRATIONS))
    connection.execute("COMMIT")
    if database.location.path is not None:
        for pragma, value, _ in FILE_PRAGMAS:
            _set_when_free(connection, f"PRAGMA {pragma}={value}")
    # On an error the connection is closed, and all of it undone.
    if version == CHATFLOW_AGENT:
        version = _upgrade_chatflow_agent(connection, name)
    connection.execute("BEGIN IMMEDIATE")
    if version < len(MIGRATIONS):
        # Asked again inside: another process may have been faster.
        _migrate(connection, format_of(connection, name, len(MIGRATIONS)), len(MIGRATIONS))
    release_the_gone(database.holder, connection)
    connection.execute("COMMIT")


LIFECYCLE: Final = Lifecycle(look, check, prepare, release)


def _migrate(connection: Connection, version: int, wanted: int) -> None:
    for statements in MIGRATIONS[version:wanted]:
        for statement in statements:
            connection.execute(statement)
    connection.execute(_WRITE_VERSION, {"version": str(wanted)})
    connection.execute(_GIVE_ID)


def _upgrade_chatflow_agent(connection: Connection, name: str) -> int:
    """Move chatflow-agent's conversations into our tables, in one transaction, and return the format they have then."""
    # Otherwise renaming the old tables would rewrite other programs' views, or fail at one that is broken.
    connection.execute("PRAGMA legacy_alter_table=ON")
    connection.execute("BEGIN IMMEDIATE")
    version = format_of(connection, name, len(MIGRATIONS))
    if version == CHATFLOW_AGENT:
        version = 1
        moved = upgrade(connection, partial(_migrate, connection, 0, version))
        connection.execute("COMMIT")
        moved.log(name)
    else:
        connection.execute("COMMIT")
    connection.execute("PRAGMA legacy_alter_table=OFF")
    return version


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
