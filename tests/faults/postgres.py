"""What befalls a PostgreSQL server under load: it is killed, cuts its connections, or has no room."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, Final

import psycopg

from tests.faults import disk
from tests.faults.kills import Blow, kill, storm
from tests.faults.processes import Crew, until
from tests.faults.sender import Sender
from tests.faults.storage import PostgresDatabase, Storage
from tests.faults.table import Row
from tests.postgres import server

SERVER: Final = "server"


@asynccontextmanager
async def running(folder: Path, *options: str) -> AsyncIterator[tuple[server.Server, PostgresDatabase]]:
    """A server of the scenario's own, and its database."""
    started = await asyncio.to_thread(server.another, *options)
    try:
        yield started, PostgresDatabase(folder, started.dsn)
    finally:
        await asyncio.to_thread(started.remove)


def on_postgres(
    scenario: Callable[[Storage, int], Coroutine[Any, Any, list[Row]]],
) -> Callable[[Path, int], Coroutine[Any, Any, list[Row]]]:
    """A scenario that breaks something else than the server."""

    async def run(folder: Path, seed: int) -> list[Row]:
        async with running(folder) as (_, database):
            return await scenario(database, seed)

    return run


def restart(of: server.Server) -> Blow:
    """Kill the server, and start it again."""

    async def blow(crew: Crew, sender: Sender, choices: random.Random) -> None:
        sender.hit()
        await asyncio.to_thread(of.restart)

    return blow


def cut(database: PostgresDatabase) -> Blow:
    """Have the server end all connections."""

    async def blow(crew: Crew, sender: Sender, choices: random.Random) -> None:
        sender.hit()
        with database.connected() as query:
            query("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'chatflow'")

    return blow


def fail_over(primary: server.Server, standby: server.Server) -> Blow:
    """Kill the primary for good, and promote the standby, which had not heard of its last moment."""

    async def blow(crew: Crew, sender: Sender, choices: random.Random) -> None:
        sender.hit()
        with psycopg.connect(standby.dsn, autocommit=True) as connection:
            connection.execute("ALTER SYSTEM SET primary_conninfo = ''")
            connection.execute("SELECT pg_reload_conf()")
        await asyncio.sleep(choices.uniform(0.1, 0.5))  # what is committed now can't be acknowledged
        await asyncio.to_thread(primary.control, "stop")
        await asyncio.to_thread(standby.control, "promote")

    return blow


async def failed_over(folder: Path, seed: int) -> list[Row]:
    """What was acknowledged is on the standby, since the primary waits for it (`synchronous_commit`)."""
    fault = "primary killed and its standby promoted, and workers killed"
    async with running(folder) as (primary, _):
        standby = await asyncio.to_thread(server.standby_of, primary)
        with psycopg.connect(primary.dsn, autocommit=True) as connection:
            connection.execute("ALTER SYSTEM SET synchronous_standby_names = '*'")
            connection.execute("SELECT pg_reload_conf()")
            await until(lambda: connection.execute(_IS_WAITED_FOR).fetchone() == ("sync",))
        hosts = f"{primary.folder},{standby.folder}"
        database = PostgresDatabase(folder, f"postgresql://postgres@/postgres?host={hosts}&{_ONE_THAT_WRITES}")
        try:
            return [await storm(database, seed, fault, [fail_over(primary, standby), *[kill] * 3], layer=SERVER)]
        finally:
            await asyncio.to_thread(standby.remove)


_IS_WAITED_FOR: Final = "SELECT sync_state FROM pg_stat_replication"
_ONE_THAT_WRITES: Final = "target_session_attrs=read-write"


async def full(folder: Path, seed: int, rounds: int = disk.ROUNDS) -> list[Row]:
    """No room for the tables, of which turns are told one by one; or for the log, which ends the server."""
    rows: list[Row] = []
    for fault, scenario in (("tables", _full_tables), ("log", _full_log)):
        place = folder / fault
        place.mkdir()
        row = Row(fault=f"disk of the {fault} full", layer="file system (tmpfs, 16 MB)", injected=0)
        with ExitStack() as stack:
            small = await asyncio.to_thread(server.nowhere)
            if disk.mounted(small.folder, "16m", stack):
                await scenario(place, small.folder, seed, row, rounds)
            else:
                row.notes.append(disk.NOT_MOUNTED)
        rows.append(row)
    return rows


async def _full_tables(folder: Path, small: Path, seed: int, row: Row, rounds: int) -> None:
    async with running(folder) as (started, _):
        with psycopg.connect(started.dsn, autocommit=True) as connection:
            connection.execute(f"CREATE TABLESPACE small LOCATION '{small}'".encode())
            connection.execute("CREATE DATABASE small TABLESPACE small")
        database = PostgresDatabase(folder, started.dsn.replace("/postgres?", "/small?"))

        async def take_room(_crew: Crew) -> None:
            disk.fill(small)

        async def make_room(_crew: Crew) -> None:
            disk.empty(small)

        await disk.disturbed(database, seed, row, take_room, make_room, says=_SAYS, rounds=rounds)


async def _full_log(folder: Path, small: Path, seed: int, row: Row, rounds: int) -> None:
    async with running(folder, *server.LOG_OF_MEGABYTES, f"--waldir={small}") as (started, database):

        async def take_room(_crew: Crew) -> None:
            disk.fill(small)
            # The end of the last file is less than a round writes.
            await asyncio.to_thread(started.use_up_log, 20_000)

        async def make_room(_crew: Crew) -> None:
            disk.empty(small)
            await asyncio.to_thread(started.bring_up)

        await disk.disturbed(database, seed, row, take_room, make_room, says="StoreError", rounds=rounds, patience=1)


_SAYS: Final = "No space left on device (53100); make room on the server's disk"


async def restarted(folder: Path, seed: int, times: int = 6) -> list[Row]:
    """It has to recover each time, and may have lost the places of the last moment."""
    fault = "server killed (immediate) and started again, and workers killed"
    async with running(folder) as (started, database):
        return [await storm(database, seed, fault, [*[restart(started)] * times, *[kill] * 2], layer=SERVER)]


async def cut_off(folder: Path, seed: int, times: int = 20) -> list[Row]:
    """Also those whose turns are committing."""
    fault = "all connections cut (pg_terminate_backend)"
    async with running(folder) as (_, database):
        return [await storm(database, seed, fault, [cut(database)] * times, layer=SERVER)]
