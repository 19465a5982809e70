"""What befalls a PostgreSQL server under load: it is killed, cuts its connections, or has no room."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

from tests.faults.kills import Blow, kill, storm
from tests.faults.processes import Crew
from tests.faults.sender import Sender
from tests.faults.storage import PostgresDatabase, Storage
from tests.faults.table import Row
from tests.postgres import server

SERVER: Final = "server"


@asynccontextmanager
async def running(folder: Path) -> AsyncIterator[tuple[server.Server, PostgresDatabase]]:
    """A server of the scenario's own, and its database."""
    started = await asyncio.to_thread(server.another)
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
