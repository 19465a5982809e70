"""What a system promises, found out and not believed: asked of the connection that commits, in what it commits."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final
from unittest.mock import patch

from benchmarks.systems.on_server import OnServer

LEVELS: Final = ("OFF", "NORMAL", "FULL", "EXTRA")
"""What the numbers mean."""

FLUSHED: Final = "FULL"
"""With what the word for a commit begins that is on the disk when it is acknowledged."""


@contextmanager
def watched_commits() -> Iterator[list[str]]:
    """What each commit runs at, of connections that are opened meanwhile; the last one is that of the last commit.

    Asked in the transaction that is committed: inside it the level can't change any more.
    """
    seen: list[str] = []
    connect: Any = sqlite3.connect

    class Watched(sqlite3.Connection):
        def _ask(self) -> None:
            ask = super().execute
            (level,), (journal,) = ask("PRAGMA synchronous").fetchone(), ask("PRAGMA journal_mode").fetchone()
            is_file = any(path for _, name, path in ask("PRAGMA database_list") if name == "main")
            seen.append(f"{LEVELS[level]}, {journal.upper()}" if is_file else "in memory")

        def execute(self, sql: str, *parameters: Any) -> sqlite3.Cursor:
            if self.in_transaction and sql.lstrip().upper().startswith(("COMMIT", "END")):
                self._ask()
            return super().execute(sql, *parameters)

        def commit(self) -> None:
            if self.in_transaction:
                self._ask()
            super().commit()

    def connect_watched(*arguments: Any, **options: Any) -> sqlite3.Connection:
        connection: sqlite3.Connection = connect(*arguments, **{"factory": Watched, **options})
        return connection

    with patch.object(sqlite3, "connect", connect_watched):
        yield seen


_NOTE: Final = """
    CREATE FUNCTION {schema}.note() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
        INSERT INTO {schema}.noted VALUES (current_setting('fsync'), current_setting('synchronous_commit'));
        RETURN NULL;
    END $$
"""
_ASK_AT_COMMIT: Final = """
    DO $$ DECLARE name text; BEGIN
        FOR name IN SELECT relname FROM pg_class
            WHERE relnamespace = '{schema}'::regnamespace AND relkind = 'r' AND relname LIKE '%messages'
        LOOP
            EXECUTE format(
                'CREATE CONSTRAINT TRIGGER note AFTER INSERT ON {schema}.%I DEFERRABLE INITIALLY DEFERRED'
                ' FOR EACH ROW EXECUTE FUNCTION {schema}.note()', name
            );
        END LOOP;
    END $$
"""
"""A deferred trigger runs when its transaction commits, in the session that commits it."""
_NOTED: Final = "SELECT DISTINCT fsync, synchronous_commit FROM {schema}.noted"


async def promise_on_server(system: OnServer) -> str:
    """What the commit of a turn runs at, in the first conversation of *system*."""
    await system.ask(
        f"CREATE TABLE {system.schema}.noted (fsync text, synchronous_commit text)",
        _NOTE.format(schema=system.schema),
        _ASK_AT_COMMIT.format(schema=system.schema),
    )
    await system.turn(0)
    ((fsync, level),) = await system.ask(_NOTED.format(schema=system.schema))
    return f"{FLUSHED if fsync == level == 'on' else 'weaker'}: fsync {fsync}, synchronous_commit {level}"
