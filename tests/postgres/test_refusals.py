"""What is wrong with an address, or with a server that lets nobody in: the error names it."""

from __future__ import annotations

import psycopg
import pytest
from psycopg import conninfo

from chatflow.exceptions import StoreBusyError, StoreError
from chatflow.postgres.connection import locate
from chatflow.postgres.failures import is_lost, translate
from tests.postgres.conftest import OpenStore
from tests.postgres.proxy import Proxy

AT = 'connection failed: connection to server at "10.0.0.1", port 5432 failed: '

REFUSED = [
    (
        f'{AT}FATAL:  database "nodb" does not exist',
        'the server refuses the connection: database "nodb" does not exist; check the user',
    ),
    (
        f'{AT}FATAL:  password authentication failed for user "chat"',
        'the server refuses the connection: password authentication failed for user "chat"; check the user',
    ),
    (
        f'{AT}FATAL:  no pg_hba.conf entry for host "10.0.0.2", user "chat", database "chat", no encryption',
        'refuses the connection: no pg_hba.conf entry for host "10.0.0.2", user "chat", database "chat", no enc',
    ),
    (
        f"{AT}server does not support SSL, but SSL was required",
        "client and server do not agree on TLS: server does not support SSL, but SSL was required; check sslmode",
    ),
    (
        f'{AT}root certificate file "/home/chat/.postgresql/root.crt" does not exist\nEither provide the file',
        'not agree on TLS: root certificate file "/home/chat/.postgresql/root.crt" does not exist; check sslmode',
    ),
]
"""What a server or the driver says that trying again does not change, and what it becomes."""

AWAY = [
    (
        "failed to resolve host 'db': [Errno -2] Name or service not known",
        "the host's name leads nowhere: failed to resolve host 'db': [Errno -2] Name or service not known; check",
    ),
    (
        f"{AT}Connection refused\n\tIs the server running on that host?",
        "the server can't be reached, or has closed the connection: Connection refused; look whether it runs",
    ),
    (
        f"{AT}session is read-only\nMultiple connection attempts failed. All failures were:\n- host: 'a'",
        "no server was found that may be written to: session is read-only; look which of them is the primary",
    ),
    (
        f"{AT}{'x' * 1000}",
        f"the server can't be reached, or has closed the connection: {'x' * 197}...; look whether it runs",
    ),
]
"""The same of what may be otherwise a moment later."""

FULL = [
    f'{AT}FATAL:  too many connections for role "chat"',
    f"{AT}FATAL:  sorry, too many clients already",
]


@pytest.mark.parametrize(("said", "told"), REFUSED + AWAY)
def test_why(said: str, told: str) -> None:
    """An error says what is wrong in the words of whoever has found it, and what to do."""
    error = psycopg.OperationalError(said)
    assert told in str(translate(error, "postgresql://chat@db/chat", 10.0))
    assert is_lost(error, None) == ((said, told) in AWAY)


@pytest.mark.parametrize("said", FULL)
def test_full(said: str) -> None:
    """A server without a connection for this user is busy, and the error has its word for it."""
    error = translate(psycopg.OperationalError(said), "postgresql://chat@db/chat", 10.0)
    assert isinstance(error, StoreBusyError)
    assert str(error).startswith(
        f"store 'postgresql://chat@db/chat' was busy for 10 s: {said.removeprefix(f'{AT}FATAL:  ')}; end some"
    )


def test_error_of_the_driver_alone() -> None:
    """Of the driver's own errors only the name is told: what they say may quote a value."""
    assert "secret" not in str(translate(psycopg.ProgrammingError("can't adapt 'secret'"), "db", 0.0))


async def test_tls_that_the_server_has_not(proxy: Proxy, open_store: OpenStore) -> None:
    """A server without TLS that is to be spoken to with it is asked once, and the error says so."""
    store = open_store(conninfo.make_conninfo(proxy.dsn, sslmode="require"))
    with pytest.raises(StoreError, match="not agree on TLS: server does not support SSL, but SSL was required"):
        await store.get("s")
    assert proxy.served == 1


@pytest.mark.parametrize("dsn", ["postgresql://chat:secret@db/chat?sslmode=require&foo=1", "host=db foo=1"])
def test_unknown_parameter(dsn: str) -> None:
    """An address with a parameter that there is not is refused by the parameter's name."""
    with pytest.raises(ValueError, match="it has no parameter 'foo'"):
        locate(dsn, "chatflow")


@pytest.mark.parametrize(
    "dsn", ["postgresql://chat:a/b?secret=1@db/chat", "host=db password=a secret=b", "chat.db", "postgresql://db/?x"]
)
def test_address_that_cannot_be_read(dsn: str) -> None:
    """What may be a part of a password that was not quoted is not shown."""
    with pytest.raises(ValueError, match="what was given can't be read") as raised:
        locate(dsn, "chatflow")
    assert "secret" not in str(raised.value)
