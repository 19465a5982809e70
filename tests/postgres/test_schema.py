from __future__ import annotations

from itertools import chain
from typing import Any, Final, LiteralString

import anyio
import psycopg
import pytest
from psycopg import conninfo

from chatflow.core.agent import Agent
from chatflow.core.messages import Message, Role
from chatflow.core.owners import RESERVED
from chatflow.exceptions import StoreError, StoreFormatError
from chatflow.postgres.connection import Transaction
from chatflow.postgres.database import Database
from chatflow.postgres.schema import MIGRATIONS
from chatflow.postgres.store import PostgresSessionStore
from tests.postgres import server
from tests.postgres.conftest import OpenStore

SUPPORT: Final = Agent(name="Support")


async def nothing(holder: str, transaction: Transaction) -> None:
    """Free nobody's rows."""


def drop(connection: psycopg.Connection[Any], schema: str) -> None:
    """Leave the test a database without its schema; the next test that gets it finds one again."""
    connection.execute(f'DROP SCHEMA "{schema}" CASCADE'.encode())
    server.forget(schema)


async def test_ten_start_at_once(connection: psycopg.Connection[Any], open_store: OpenStore, schema: str) -> None:
    """Ten workers that start at once on a database without tables get them made once, and all go on."""
    drop(connection, schema)
    address = open_store()._address
    databases = [Database(address, 1, nothing) for _ in range(10)]
    async with anyio.create_task_group() as group:
        for each in databases:
            group.start_soon(each.ask, "SELECT count(*) FROM chatflow_sessions")
    for each in databases:
        each.abandon()
    found = connection.execute(f'SELECT key, value FROM "{schema}".chatflow_meta'.encode()).fetchall()
    assert found == [("format", str(len(MIGRATIONS)))]


async def test_in_a_schema_that_is_there(
    connection: psycopg.Connection[Any], open_store: OpenStore, schema: str
) -> None:
    """An empty schema that somebody else has made is used."""
    drop(connection, schema)
    connection.execute(f'CREATE SCHEMA "{schema}"'.encode())
    assert await open_store().get("s") is None


def tables(connection: psycopg.Connection[Any], schema: str) -> list[Any]:
    """What there is in a schema: columns, indexes and constraints."""
    queries: tuple[LiteralString, ...] = (
        """
        SELECT table_name, column_name, data_type, is_nullable, column_default
        FROM information_schema.columns WHERE table_schema = %s
        """,
        "SELECT tablename, indexname, indexdef FROM pg_indexes WHERE schemaname = %s",
        """
        SELECT conrelid::regclass::text, pg_get_constraintdef(oid)
        FROM pg_constraint WHERE connamespace = %s::regnamespace
        """,
    )
    return [sorted(map(str, connection.execute(query, [schema]))) for query in queries]


@pytest.mark.parametrize("version", range(1, len(MIGRATIONS)))
async def test_upgrade(connection: psycopg.Connection[Any], open_store: OpenStore, schema: str, version: int) -> None:
    """The tables of every older format become those of the newest, with what is in them."""
    newest = tables(connection, schema)
    drop(connection, schema)
    with connection.transaction():
        connection.execute(f'CREATE SCHEMA "{schema}"; SET LOCAL search_path = "{schema}"'.encode())
        for statement in chain.from_iterable(MIGRATIONS[:version]):
            connection.execute(statement)
        connection.execute("INSERT INTO chatflow_meta VALUES ('format', %s)", [str(version)])
        connection.execute(
            "INSERT INTO chatflow_sessions (session_id, active_agent_name, version, created_at, updated_at)"
            " VALUES ('s', 'Support', nextval('chatflow_versions'), now(), now())"
        )
    session = await open_store().get_or_create("s", SUPPORT)
    await session.add_message(Message(Role.USER, "still here"))
    assert session.committed.version == 2
    assert tables(connection, schema) == newest


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (
            "UPDATE chatflow_meta SET value = '99'",
            f"its format is '99', and this version of chatflow reads up to {len(MIGRATIONS)}",
        ),
        ("UPDATE chatflow_meta SET value = 'x'", "its table chatflow_meta names no format"),
        ("DELETE FROM chatflow_meta", "its table chatflow_meta names no format"),
        ("DROP TABLE chatflow_meta", "holds 'chatflow_journal' and no table chatflow_meta"),
    ],
)
async def test_refused(
    connection: psycopg.Connection[Any], open_store: OpenStore, schema: str, change: str, reason: str
) -> None:
    """A schema of a newer version, or of another program, is refused and left untouched."""
    with connection.transaction():
        connection.execute(f'SET LOCAL search_path = "{schema}"'.encode())
        connection.execute(change.encode())
    tables = "SELECT count(*) FROM pg_tables WHERE schemaname = %s"
    before = connection.execute(tables, [schema]).fetchone()
    with pytest.raises(StoreFormatError) as raised:
        await open_store().get("s")
    assert reason in raised.value.reason
    assert connection.execute(tables, [schema]).fetchone() == before
    drop(connection, schema)


async def test_other_encoding(connection: psycopg.Connection[Any], open_store: OpenStore) -> None:
    """A database that does not store text in UTF-8 is refused."""
    connection.execute("CREATE DATABASE latin ENCODING 'LATIN1' LC_COLLATE 'C' LC_CTYPE 'C' TEMPLATE template0")
    store = open_store(conninfo.make_conninfo(server.dsn(), dbname="latin"))
    with pytest.raises(StoreFormatError, match="encoding is LATIN1"):
        await store.get("s")
    await store.aclose()
    connection.execute("DROP DATABASE latin")


async def test_old_server(open_store: OpenStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that is too old is refused."""
    monkeypatch.setattr("chatflow.postgres.schema.OLDEST_SERVER", 990000)
    with pytest.raises(StoreFormatError, match="is the oldest that will do"):
        await open_store().get("s")


async def test_tables_gone(connection: psycopg.Connection[Any], open_store: OpenStore, schema: str) -> None:
    """A table that is dropped under a store is an error that names it."""
    store = open_store()
    await store.get("s")
    drop(connection, schema)
    with pytest.raises(StoreError, match="chatflow_sessions"):
        await store.get("s")


async def test_every_text(open_store: OpenStore) -> None:
    """Names come back as they were given, with what PostgreSQL can't keep, and in the order of code points."""
    store = open_store()
    names = ["a\0b", "a\1b", "a\1\1b", "a\1\2b", "a\2b", "\x7f", "é", "\uffff", "\U0001f600"]
    for name in reversed(names):
        session = await store.get_or_create(name, Agent(name=f"agent {name}"))
        await session.add_message(Message(Role.USER, name))
    for name in names:
        session_found = await store.get(name)
        assert session_found is not None
        assert session_found.committed.agent_name == f"agent {name}"
        assert [message.text for message in session_found.history] == [name]
    assert await store.page_of_session_ids("", "", 100) == tuple(sorted(names))
    assert RESERVED == "\0"


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"dsn": 5}, "dsn must be a string"),
        ({"dsn": "secret"}, "can't be read"),
        ({"schema": 5}, "schema must be a string"),
        ({"schema": 'x"; DROP'}, "schema must be of small letters"),
        ({"max_connections": "5"}, "max_connections must be an integer"),
        ({"max_connections": True}, "max_connections must be an integer"),
        ({"max_connections": 0}, "max_connections must be at least 1"),
        ({"default_max_turns": 0}, "default_max_turns must be at least 1"),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], error: str) -> None:
    """What can't be meant is refused when the store is made, before anything is connected to."""
    with pytest.raises((TypeError, ValueError), match=error):
        PostgresSessionStore(**{"dsn": "postgresql://localhost/x", **arguments})


@pytest.mark.parametrize(
    ("dsn", "schema", "name"),
    [
        ("postgresql://ann:secret@db.example:6432/chat", "chatflow", "postgresql://ann@db.example:6432/chat"),
        ("host=db user=ann password=secret dbname=chat", "tests", "postgresql://ann@db/chat#tests"),
        ("postgresql:///chat", "chatflow", "postgresql://localhost/chat"),
    ],
)
def test_name(dsn: str, schema: str, name: str) -> None:
    """A store is called by its address without the password."""
    assert PostgresSessionStore(dsn, schema=schema).name == name
