"""A look at database files from outside, with sqlite3 itself."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, Final

from chatflow.core.agent import Agent
from chatflow.core.messages import Message, Role
from chatflow.core.session import SessionContext
from chatflow.core.tools import Tool
from chatflow.sqlite.database import Connection, Database
from chatflow.sqlite.store import SQLiteSessionStore

SUPPORT: Final = Agent(name="Support")


def refunding(ledger: Path) -> Agent:
    """An agent whose refund a person has to approve, and which is written down outside of every database."""

    async def refund(euros: int) -> str:
        with ledger.open("a") as lines:
            lines.write(f"{euros}\n")
        return f"{euros} paid"

    return Agent("Support", tools=[Tool(refund, requires_approval=True)])


RELEASED: Final = Path(__file__).with_name("schemas")
Write = Callable[[Connection], object]


def connect(path: Path | str) -> closing[sqlite3.Connection]:
    """A connection of another program, with nothing begun."""
    return closing(sqlite3.connect(path, isolation_level=None, uri=str(path).startswith("file:"), timeout=0))


def query(path: Path | str, sql: str, *values: Any) -> list[Any]:
    """Run one statement, and return its rows; those of a single column without their tuples."""
    with connect(path) as connection:
        rows = connection.execute(sql, values).fetchall()
    return [row[0] if len(row) == 1 else row for row in rows]


@contextmanager
def held(path: Path | str, begin: str = "BEGIN IMMEDIATE") -> Iterator[sqlite3.Connection]:
    """Hold the database in a transaction meanwhile."""
    with connect(path) as connection:
        connection.execute(begin)
        yield connection


def around(path: Path) -> list[str]:
    """What lies in its folder."""
    return sorted(each.name for each in path.parent.iterdir())


def schema_of(path: Path) -> str:
    """All that makes up a file's tables, one statement after another."""
    return "".join(f"{sql};\n" for sql in query(path, "SELECT sql FROM sqlite_master WHERE name LIKE 'chatflow%'"))


async def say(session: SessionContext, *said: str) -> None:
    """One turn for each text."""
    for text in said:
        async with session.turn():
            await session.add_message(Message(Role.USER, text))


async def until(condition: Callable[[], object]) -> None:
    """Let the loop run on until *condition* holds."""
    while True:
        if condition():
            return
        await asyncio.sleep(0)


def database_of(store: SQLiteSessionStore) -> Database:
    """The store's database."""
    return store._database


class Gate:
    """Keeps a file's writing thread busy, so that what is written meanwhile waits together."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._open = threading.Event()
        self._held: asyncio.Task[object] | None = None

    async def close(self) -> None:
        """Return once the thread is held."""
        loop, here = asyncio.get_running_loop(), asyncio.Event()

        def wait(_: Connection) -> None:
            loop.call_soon_threadsafe(here.set)
            self._open.wait()

        self._held = asyncio.create_task(self._database.write(wait, durable=False))
        await here.wait()

    async def open(self) -> None:
        """Let the thread go on."""
        assert self._held is not None
        self._open.set()
        await self._held


async def together(database: Database, writes: Sequence[Write]) -> list[object]:
    """Run *writes* as one group, and return what came of each: its result or its error."""
    gate = Gate(database)
    await gate.close()
    tasks = [asyncio.create_task(database.write(write, durable=True)) for write in writes]
    await asyncio.sleep(0)
    await gate.open()
    return list(await asyncio.gather(*tasks, return_exceptions=True))
