"""Locks that other programs hold: an operation waits for them for a while, and then says so."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import psycopg
import pytest

from chatflow.exceptions import StoreBusyError, StoreError
from chatflow.postgres import connection as connections
from chatflow.postgres import database
from chatflow.postgres.connection import Step
from chatflow.postgres.store import PostgresSessionStore
from chatflow.testing.conformance.conversation import until
from tests.postgres.conftest import OpenStore
from tests.postgres.proxy import Proxy
from tests.postgres.test_failures import SUPPORT, dsn_of, role, texts, user

__all__ = ["role"]


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Locks are waited for for half a second."""
    monkeypatch.setattr(connections, "LOCK_SECONDS", 0.5)
    monkeypatch.setattr(database, "BUSY_SECONDS", 0.1)


def hold_messages(connection: psycopg.Connection[Any], schema: str) -> None:
    """Lock the messages, for as long as the transaction lasts."""
    connection.execute(f'LOCK TABLE "{schema}".chatflow_messages IN ACCESS EXCLUSIVE MODE'.encode())


def are_waited_for(connection: psycopg.Connection[Any]) -> bool:
    """Whether somebody waits for a lock."""
    return connection.execute("SELECT 1 FROM pg_locks WHERE NOT granted").fetchone() is not None


async def lock_timeouts(store: PostgresSessionStore) -> tuple[str, str]:
    """What holds for a statement among others, and for a lone one."""
    asked = Step("SELECT current_setting('lock_timeout')")
    flight, alone = await store._in_use().fly(Step("SELECT 1"), asked), await store._in_use().fly(asked)
    return flight[1][0][0], alone[0][0][0]


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("is_bouncer", [False, True])
async def test_turn_that_meets_a_lock(
    proxy: Proxy, open_store: OpenStore, connection: psycopg.Connection[Any], schema: str, *, is_bouncer: bool
) -> None:
    """A turn that finds the messages locked for too long is told so, has written nothing, and can be taken again."""
    proxy.is_bouncer = is_bouncer
    store = open_store(proxy.dsn)
    session = await store.get_or_create("s", SUPPORT)
    with connection.transaction():
        hold_messages(connection, schema)
        with pytest.raises(StoreBusyError, match=r"lock timeout \(55P03\); find which transaction holds the lock"):
            await session.add_message(user("hello"))
    await session.add_message(user("again"))
    assert await texts(store) == ["again"]
    assert await store.pending_turns() == ()


@pytest.mark.usefixtures("impatient")
async def test_reading_that_meets_a_lock(
    open_store: OpenStore, connection: psycopg.Connection[Any], schema: str
) -> None:
    """A reading that finds the messages locked for too long is told so."""
    store = open_store()
    await store.get_or_create("s", SUPPORT)
    with connection.transaction():
        hold_messages(connection, schema)
        with pytest.raises(StoreBusyError, match="lock timeout"):
            await store.messages("s")


@pytest.mark.usefixtures("impatient")
async def test_cancelled_while_it_waits(
    open_store: OpenStore, connection: psycopg.Connection[Any], schema: str
) -> None:
    """A turn that is cancelled while it waits for a lock ends though the lock is still held."""
    store = open_store()
    session = await store.get_or_create("s", SUPPORT)
    with connection.transaction():
        hold_messages(connection, schema)
        turn = asyncio.create_task(session.add_message(user("hello")))
        await until(lambda: are_waited_for(connection))
        turn.cancel()
        with pytest.raises(StoreBusyError):
            await turn
    assert await texts(store) == []


async def test_how_long_locks_are_waited_for(
    proxy: Proxy, open_store: OpenStore, connection: psycopg.Connection[Any], role: str
) -> None:
    """It is ten seconds, unless the user has a time of its own; through a bouncer nothing of it stays at the server."""
    assert await lock_timeouts(open_store()) == ("10s", "10s")
    connection.execute(f"ALTER ROLE {role} SET lock_timeout = 77".encode())
    store = open_store(dsn_of(role))
    assert await lock_timeouts(store) == ("77ms", "77ms")
    await store.aclose()
    proxy.is_bouncer = True
    assert await lock_timeouts(open_store(proxy.dsn)) == ("10s", "0")


async def test_commit_that_is_never_answered(
    open_store: OpenStore, connection: psycopg.Connection[Any], role: str, schema: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A commit that the server does not answer over and over again ends, and is known to have come to nothing."""
    connection.execute(f"ALTER ROLE {role} SET lock_timeout = '1h'".encode())
    store = open_store(dsn_of(role))
    await store.get_or_create("s", SUPPORT)
    monkeypatch.setattr(database, "ANSWER_SECONDS", 0.2)
    monkeypatch.setattr(database, "BUSY_SECONDS", 0.1)
    with connection.transaction():
        hold_messages(connection, schema)
        with pytest.raises(StoreError, match=r"did not answer a commit, .* nothing was written"):
            await store._in_use().fly_once(Step("SELECT 1"), Step("SELECT 1 FROM chatflow_messages"))
    await store.aclose()


async def test_nothing_of_the_driver_is_logged(
    open_store: OpenStore, connection: psycopg.Connection[Any], schema: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A connection that the server ends in the middle of a transaction leaves no line of the driver in the log."""
    store = open_store()
    await store.get_or_create("s", SUPPORT)
    with caplog.at_level(logging.INFO, logger="psycopg"):
        with connection.transaction():
            connection.execute(f'SELECT 1 FROM "{schema}".chatflow_sessions FOR UPDATE'.encode())
            merging = asyncio.create_task(store.get_or_create("s", SUPPORT, {"a": 1}))
            await until(lambda: are_waited_for(connection))
            ends = "SELECT pid, pg_terminate_backend(pid) FROM pg_locks WHERE NOT granted"
            ((pid, _),) = connection.execute(ends).fetchall()
            held = "SELECT 1 FROM pg_locks WHERE pid = %s"
            await until(lambda: connection.execute(held, [pid]).fetchone() is None)
        assert (await merging).metadata == {"a": 1}
    assert [record.getMessage() for record in caplog.records if record.name == "psycopg"] == []
