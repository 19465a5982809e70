"""Addresses of several hosts, of which one may be written to, and what is said where none is left."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anyio
import psycopg
import pytest
from psycopg import conninfo

from chatflow.core.agent import Agent
from chatflow.exceptions import StoreError
from chatflow.postgres import database
from chatflow.postgres.connection import CONNECT_SECONDS, locate
from chatflow.testing.conformance.conversation import until
from tests.postgres import server
from tests.postgres.conftest import OpenStore
from tests.postgres.proxy import Proxy
from tests.postgres.test_failures import dsn_of

NOBODY = {"host": "127.0.0.1", "port": "1"}


@pytest.fixture
def reader(connection: psycopg.Connection[Any]) -> Iterator[str]:
    """A user for whom the server is as a standby is: one that only lets him read."""
    connection.execute("CREATE ROLE reader SUPERUSER LOGIN PASSWORD 'reader'")
    connection.execute("ALTER ROLE reader SET default_transaction_read_only = on")
    yield "reader"
    connection.execute("DROP ROLE reader")


@pytest.mark.parametrize(
    ("dsn", "name"),
    [
        ("postgresql://me:secret@a:1,b:2/chat?target_session_attrs=read-write", "postgresql://me@a:1,b:2/chat"),
        ("host=a,b port=5433 dbname=chat", "postgresql://a:5433,b:5433/chat"),
        ("host=a,b port=1,2", "postgresql://a:1,b:2/"),
        ("host=/run/a,/run/b dbname=chat", "postgresql:///run/a,/run/b/chat"),
        ("dbname=chat", "postgresql://localhost/chat"),
    ],
)
def test_name(dsn: str, name: str) -> None:
    """A store of several hosts is named by all of them."""
    assert locate(dsn, "chatflow").name == name


@pytest.mark.parametrize(("said", "seconds"), [("", str(CONNECT_SECONDS)), (" connect_timeout=3", "3")])
def test_connect_timeout(said: str, seconds: str) -> None:
    """How long each host may take is the address's to say."""
    parts = conninfo.conninfo_to_dict(locate(f"host=a,b{said}", "chatflow").conninfo)
    assert parts["connect_timeout"] == seconds


async def test_first_host_is_away(open_store: OpenStore) -> None:
    """The second host is asked where the first one does not answer."""
    parts = conninfo.conninfo_to_dict(server.dsn())
    hosts = ",".join((NOBODY["host"], str(parts.get("host") or "localhost")))
    ports = ",".join((NOBODY["port"], str(parts.get("port") or 5432)))
    dsn = conninfo.make_conninfo(server.dsn(), host=hosts, port=ports, target_session_attrs="read-write")
    assert await open_store(dsn).get("s") is None


async def test_none_may_be_written_to(open_store: OpenStore, reader: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where all servers that answer only let one read, the error says so."""
    monkeypatch.setattr(database, "BUSY_SECONDS", 0.1)
    store = open_store(conninfo.make_conninfo(dsn_of(reader), target_session_attrs="read-write"))
    with pytest.raises(StoreError, match="no server was found that may be written to"):
        await store.get("s")
    await store.aclose()


async def test_why_it_went(open_store: OpenStore, proxy: Proxy, reader: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a server has said what is wrong before it went away, the error keeps its word."""
    await open_store().get("s")
    monkeypatch.setattr(database, "BUSY_SECONDS", 1)
    store = open_store(conninfo.make_conninfo(proxy.dsn, user=reader, password=reader))

    async def refuse() -> None:
        await until(lambda: proxy.served > 2)
        proxy.refuses = True

    async with anyio.create_task_group() as group:
        group.start_soon(refuse)
        with pytest.raises(StoreError, match="name the one that may be written to"):
            await store.get_or_create("s", Agent("Support"))
    await store.aclose()
