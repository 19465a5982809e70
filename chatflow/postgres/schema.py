"""The tables, how a database gets them, and which are refused."""

from __future__ import annotations

from typing import Final, LiteralString

from chatflow.exceptions import StoreFormatError, shorten
from chatflow.postgres.connection import Connection, Step, Transaction
from chatflow.postgres.failures import is_undefined

OLDEST_SERVER: Final = 130000
"""PostgreSQL 13, as its version number: the oldest that the statements were written for."""

MIGRATIONS: Final[tuple[tuple[LiteralString, ...], ...]] = (
    # 1: chatflow 0.1.0
    (
        'CREATE TABLE chatflow_meta (key text COLLATE "C" PRIMARY KEY, value text NOT NULL)',
        # Both only grow, and neither gives a number out twice: an id's incarnations, commits and places in lines are
        # told apart by them. Versions are those of all conversations: they order lists by commit. Whatever else a copy
        # would undo draws one as well: so it is known that a copy was used.
        "CREATE SEQUENCE chatflow_versions",
        "CREATE SEQUENCE chatflow_turn_ids",
        # Text is compared by code points, so that an order is the same whatever the server's language. JSON is kept as
        # it was written: jsonb would make another number of 1e300, and another order of keys.
        """
        CREATE TABLE chatflow_sessions (
            session_key bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
            owner text COLLATE "C" NOT NULL DEFAULT '',
            session_id text COLLATE "C" NOT NULL,
            active_agent_name text COLLATE "C" NOT NULL,
            metadata_json json NOT NULL DEFAULT '{}',
            state_json json NOT NULL DEFAULT '{}',
            max_turns bigint,
            service_json json,
            service_key text COLLATE "C",
            spent_json json,
            expires_after double precision,
            expires_at timestamptz,
            version bigint NOT NULL UNIQUE,
            created_at timestamptz NOT NULL,
            updated_at timestamptz NOT NULL,
            UNIQUE (owner, session_id)
        )
        """,
        "CREATE INDEX ON chatflow_sessions (owner, version)",
        "CREATE INDEX ON chatflow_sessions (owner, service_key, version) WHERE service_key IS NOT NULL",
        "CREATE INDEX ON chatflow_sessions (owner, expires_at, session_key) WHERE expires_at IS NOT NULL",
        "CREATE INDEX ON chatflow_sessions (expires_at, session_key) WHERE expires_at IS NOT NULL",
        # place orders a conversation's messages, system messages first.
        """
        CREATE TABLE chatflow_messages (
            session_key bigint NOT NULL REFERENCES chatflow_sessions ON DELETE CASCADE,
            place bigint NOT NULL,
            message_json json NOT NULL,
            PRIMARY KEY (session_key, place)
        )
        """,
        # An empty session_id is the scope of marks without a conversation.
        """
        CREATE TABLE chatflow_processed_messages (
            owner text COLLATE "C" NOT NULL DEFAULT '',
            session_id text COLLATE "C" NOT NULL,
            message_id text COLLATE "C" NOT NULL,
            processed_at timestamptz NOT NULL,
            digest text,
            response_json json,
            PRIMARY KEY (owner, session_id, message_id)
        )
        """,
        "CREATE INDEX ON chatflow_processed_messages (processed_at)",
        # What a row is, and what may happen to it, is said in core/rows.py. holder and attempt are the fence; no clock
        # is compared with another process's, so beat is a number: the one column that changes all the time, and no
        # index has it. parent is the turn that the asking code ran in; ended_at is when a row left the line for good.
        """
        CREATE TABLE chatflow_turns (
            turn_id bigint PRIMARY KEY DEFAULT nextval('chatflow_turn_ids'),
            session_key bigint NOT NULL REFERENCES chatflow_sessions ON DELETE CASCADE,
            state text NOT NULL CHECK (
                state IN ('queued', 'running', 'accepted', 'interrupted', 'told', 'dead', 'answered')
            ),
            holder text COLLATE "C",
            attempt bigint NOT NULL,
            attempts bigint NOT NULL,
            beat bigint NOT NULL DEFAULT 0,
            lease_seconds double precision NOT NULL,
            accepted boolean NOT NULL,
            agent_name text COLLATE "C",
            message_id text COLLATE "C",
            digest text,
            work_json json,
            parent bigint,
            queued_at timestamptz NOT NULL,
            ended_at timestamptz,
            CHECK (holder IS NOT NULL OR state NOT IN ('queued', 'running')),
            CHECK (digest IS NOT NULL OR message_id IS NULL)
        ) WITH (fillfactor = 70)
        """,
        "CREATE INDEX ON chatflow_turns (session_key)",
        "CREATE UNIQUE INDEX ON chatflow_turns (session_key) WHERE state = 'running'",
        "CREATE UNIQUE INDEX ON chatflow_turns (session_key, message_id) WHERE message_id IS NOT NULL",
        "CREATE INDEX ON chatflow_turns (parent) WHERE parent IS NOT NULL",
        "CREATE INDEX ON chatflow_turns (holder) WHERE holder IS NOT NULL",
        "CREATE INDEX ON chatflow_turns (agent_name, state) WHERE holder IS NULL",
        "CREATE INDEX ON chatflow_turns (ended_at) WHERE ended_at IS NOT NULL",
        # What a turn with a message id must not do twice. It goes with the row.
        """
        CREATE TABLE chatflow_journal (
            turn_id bigint NOT NULL REFERENCES chatflow_turns ON DELETE CASCADE,
            step bigint NOT NULL,
            entry_json json NOT NULL,
            PRIMARY KEY (turn_id, step)
        )
        """,
        # What a repair has taken out of conversations, as it stood. source is the table and key it stood in. Without a
        # session_id it belonged to no conversation.
        """
        CREATE TABLE chatflow_set_aside (
            set_aside_id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
            owner text COLLATE "C" NOT NULL DEFAULT '',
            session_id text COLLATE "C",
            source text NOT NULL,
            content text,
            reason text NOT NULL,
            set_aside_at timestamptz NOT NULL
        )
        """,
        "CREATE INDEX ON chatflow_set_aside (owner, session_id)",
        # The number of each connection's last transaction. Where a connection breaks while one commits, it is read, and
        # set so high that nothing which is still on its way can pass.
        """
        CREATE TABLE chatflow_marks (
            mark_id text COLLATE "C" PRIMARY KEY,
            number bigint NOT NULL,
            marked_at timestamptz NOT NULL DEFAULT now()
        ) WITH (fillfactor = 50)
        """,
        "CREATE INDEX ON chatflow_marks (marked_at)",
    ),
    # 2: after chatflow 0.1.0
    (
        # What is held is few rows, and is mostly wanted whole. Where the server knew no better, it took an index by who
        # holds them for that of a turn's id, and each commit looked at all that its process held.
        "DROP INDEX chatflow_turns_holder_idx",
        "CREATE INDEX ON chatflow_turns (turn_id) WHERE holder IS NOT NULL",
        # What workers look for, in the order in which they take it: its first is found among any number of others.
        "DROP INDEX chatflow_turns_agent_name_state_idx",
        """
        CREATE INDEX chatflow_turns_work_idx ON chatflow_turns (agent_name, turn_id)
        WHERE holder IS NULL AND state IN ('accepted', 'interrupted')
        """,
        """
        CREATE INDEX chatflow_turns_answered_idx ON chatflow_turns (agent_name, turn_id)
        WHERE holder IS NULL AND state = 'answered'
        """,
        # A mark is written with every transaction. With its moment in an index each of them was a new row for both
        # indexes; without, it takes the place of an old one.
        "DROP INDEX chatflow_marks_marked_at_idx",
    ),
)
"""In order; a released entry is never edited. The format's version is how many a database has had."""

_LOCK: Final[LiteralString] = "SELECT pg_advisory_xact_lock(hashtext(%(schema)s), 0)"
"""One at a time makes or upgrades the tables of a schema. Gone with the transaction, as PgBouncer needs it."""

_HAS_SCHEMA: Final[LiteralString] = "SELECT EXISTS (SELECT 1 FROM pg_namespace WHERE nspname = %(schema)s)"

_FORMAT: Final[LiteralString] = "SELECT value FROM chatflow_meta WHERE key = 'format'"

_FOREIGN: Final[LiteralString] = """
    SELECT relname FROM pg_class JOIN pg_namespace ON pg_namespace.oid = relnamespace
    WHERE nspname = %(schema)s AND relkind IN ('r', 'v', 'm', 'p', 'f', 'S') ORDER BY relname LIMIT 1
"""

_WRITE_FORMAT: Final[LiteralString] = """
    INSERT INTO chatflow_meta (key, value) VALUES ('format', %(format)s)
    ON CONFLICT (key) DO UPDATE SET value = excluded.value
"""


async def prepare(connection: Connection, schema: str, name: str) -> None:
    """Make the schema ready: refuse what is not ours, create or upgrade the tables.

    Raises:
        StoreFormatError: It is not ours, or newer than this version; it was left untouched.
    """
    if connection.server_version < OLDEST_SERVER:
        version = connection.server_version // 10000
        raise StoreFormatError(
            store=name, reason=f"the server is PostgreSQL {version}, and 13 is the oldest that will do"
        )
    if connection.server_encoding != "UTF8":
        reason = f"the database's encoding is {connection.server_encoding}; create it with ENCODING 'UTF8'"
        raise StoreFormatError(store=name, reason=reason)
    if await _format(connection, name) == len(MIGRATIONS):
        return

    async def migrate(transaction: Transaction) -> None:
        await transaction.ask(_LOCK, schema=schema)
        # Asked again under the lock: another process may have been faster.
        version = await _format_inside(transaction, schema, name)
        if not version and not (await transaction.ask(_HAS_SCHEMA, schema=schema))[0][0]:
            await transaction.create_schema()
        for statements in MIGRATIONS[version:]:
            for statement in statements:
                await transaction.change(statement)
        await transaction.change(_WRITE_FORMAT, format=str(len(MIGRATIONS)))

    await connection.transact("BEGIN", migrate)


async def _format(connection: Connection, name: str) -> int:
    try:
        (found,) = await connection.fly(Step(_FORMAT))
    except Exception as error:
        if not is_undefined(error):
            raise
        return 0
    return _checked(found, name)


async def _format_inside(transaction: Transaction, schema: str, name: str) -> int:
    """The same where an error would end the transaction: the catalogue says first what is there."""
    if not await transaction.ask(_HAS_META, schema=schema, table=_META):
        foreign = await transaction.ask(_FOREIGN, schema=schema)
        if foreign:
            reason = f"its schema {schema} holds {shorten(foreign[0][0])} and no table chatflow_meta: it is another"
            raise StoreFormatError(store=name, reason=f"{reason} program's; name another schema")
        return 0
    return _checked(await transaction.ask(_FORMAT), name)


_META: Final = "chatflow_meta"

_HAS_META: Final[LiteralString] = """
    SELECT 1 FROM pg_class JOIN pg_namespace ON pg_namespace.oid = relnamespace
    WHERE nspname = %(schema)s AND relname = %(table)s
"""


def _checked(found: list[tuple[str]] | list[tuple[object, ...]], name: str) -> int:
    text = found[0][0] if found else None
    # Compared as text: a number that somebody else has written may have any number of digits.
    known = {str(number): number for number in range(1, len(MIGRATIONS) + 1)}
    if isinstance(text, str) and text in known:
        return known[text]
    if isinstance(text, str) and text.isascii() and text.isdigit():
        reason = f"its format is {shorten(text)}, and this version of chatflow reads up to {len(MIGRATIONS)}"
    else:
        reason = "its table chatflow_meta names no format"
    raise StoreFormatError(store=name, reason=reason)
