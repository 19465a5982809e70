"""What other processes do in the tests: ``python -m tests.sqlite.program NAME ARGUMENT...``.

A program says in lines of JSON how far it is, and goes on when it is told.
"""

from __future__ import annotations

import asyncio
import contextvars
import json
import os
import resource
import signal
import sqlite3
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, Final

import anyio

from chatflow.core.engine import EngineReply, EngineRequest
from chatflow.core.messages import AgentResponse, Message, Role
from chatflow.core.records import PendingTurn
from chatflow.exceptions import StoreError
from chatflow.runner import Runner
from chatflow.sqlite import upgrade
from chatflow.sqlite.store import SQLiteSessionStore
from tests.sqlite.chatflow_agent import writes_of
from tests.sqlite.files import SUPPORT, held, say, until


def tell(value: object) -> None:
    """Say something to the test."""
    print(json.dumps(value), flush=True)  # noqa: T201  # that is how


async def wait() -> None:
    """Wait until the test says to go on; a test that is gone ends the program."""
    if not await asyncio.to_thread(sys.stdin.readline):
        sys.exit(0)


async def mark(path: str, count: str) -> None:
    """Mark the ids 0, 1, 2 ... and tell which were won."""
    won: list[int] = []
    async with SQLiteSessionStore(path) as store:

        async def one(number: int) -> None:
            if await store.mark_message_processed(str(number)):
                won.append(number)

        await store.is_message_processed("before")
        tell("ready")
        await wait()
        async with anyio.create_task_group() as group:
            for number in range(int(count)):
                group.start_soon(one, number)
    tell(won)


class _Counting:
    def __init__(self) -> None:
        self.asked = 0

    async def generate(self, request: EngineRequest) -> EngineReply:
        """Answer with the process's number."""
        self.asked += 1
        return EngineReply(text=str(os.getpid()))


async def run(path: str, messages: str) -> None:
    """Answer messages by their ids, and tell the answers and how many of them were made here."""
    engine = _Counting()
    async with SQLiteSessionStore(path) as store:
        runner = Runner(SUPPORT, store, engine)
        tell("ready")
        await wait()
        answers = [
            (await runner.run_async("s", "hello", message_id=f"m{number}")).content for number in range(int(messages))
        ]
    tell([answers, engine.asked])


async def create(path: str) -> None:
    """Open the file, at the same moment as others, and make a conversation."""
    tell("ready")
    await wait()
    async with SQLiteSessionStore(path) as store:
        await store.get_or_create(str(os.getpid()), SUPPORT)
    tell("created")


async def hold(path: str) -> None:
    """Have a turn that runs and one that waits behind it, until told to end them."""
    async with SQLiteSessionStore(path) as store:
        session = await store.get_or_create("s", SUPPORT)
        async with session.turn():
            await session.add_message(Message(Role.USER, "from the other process"))
            other = asyncio.create_task(say(session, "behind it"), context=contextvars.Context())
            await until(lambda: store.line._waiters)
            tell("holding")
            await wait()
        await other
    tell("done")


class _Silent:
    async def generate(self, request: EngineRequest) -> EngineReply:
        """Never answer."""
        tell("asked")
        await anyio.sleep_forever()
        return EngineReply()


async def ask(path: str) -> None:
    """Run a message whose model never answers."""
    async with SQLiteSessionStore(path) as store:
        await Runner(SUPPORT, store, _Silent(), turn_timeout=None).run_async("s", "hello", message_id="m")


async def accept(path: str) -> None:
    """Accept a message, and be gone at the moment that it is."""
    await Runner(SUPPORT, SQLiteSessionStore(path), _Silent()).accept("s", "hello", message_id="m")
    os.kill(os.getpid(), signal.SIGKILL)


async def answer(path: str) -> None:
    """Accept messages, answer them, and never return from telling the first answer."""

    async def never(turn: PendingTurn, response: AgentResponse) -> None:
        tell([turn.message_id, response.content])
        await anyio.sleep_forever()

    async with SQLiteSessionStore(path) as store:
        runner = Runner(SUPPORT, store, _Counting())
        for number in range(2):
            await runner.accept("s", "hello", message_id=f"m{number}")
        async with runner.working(never):
            await anyio.sleep_forever()


async def talk(path: str, turns: str) -> None:
    """Take turns on one conversation, several at once, each alone with a file that only one may make."""
    mine = Path(path).with_suffix(".mine")
    async with SQLiteSessionStore(path) as store:
        session = await store.get_or_create("s", SUPPORT)

        async def one(number: int) -> None:
            async with session.turn():
                mine.touch(exist_ok=False)
                await session.add_message(Message(Role.USER, f"{os.getpid()} {number}"))
                await asyncio.sleep(0)
                mine.unlink()

        tell("ready")
        await wait()
        async with anyio.create_task_group() as group:
            for number in range(int(turns)):
                group.start_soon(one, number)
    tell(os.getpid())


async def lock(path: str) -> None:
    """Hold the file as a writer until told to let go."""
    with held(path):
        tell("holding")
        await wait()
    tell("done")


async def no_room(path: str) -> None:
    """Commit what the disk has no room for, and tell what came of it, before and after there is room again."""
    async with SQLiteSessionStore(path) as store:
        await store.get_or_create("before", SUPPORT)
        size = Path(f"{path}-wal").stat().st_size
        _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size + 100_000, most))
        said: list[object] = []
        big = {"x": "y" * 1_000_000}
        try:
            await store.get_or_create("big", SUPPORT, big)
        except StoreError as error:
            said.append(str(error))
        said.append(await store.get("big") is not None)
        await store.get_or_create("small", SUPPORT)
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
        await store.get_or_create("big", SUPPORT, big)
        said.append(await store.get("big") is not None)
    tell(said)


async def upgrade_halfway(path: str, step: str) -> None:
    """Open a file of chatflow-agent, and stop before a step of its upgrade."""

    def stop(_: object) -> None:
        tell("halfway")
        sys.stdin.readline()

    setattr(upgrade._Upgrade, step, stop)
    async with SQLiteSessionStore(path) as store:
        await store.get("whole")


async def chatflow_agent(path: str) -> None:
    """Use a file with chatflow-agent; then try all that it can write, and tell the errors."""
    writes = writes_of(Path(path))
    tell(sorted(writes))
    await wait()
    errors: dict[str, str | None] = dict.fromkeys(writes)
    for name, write in writes.items():
        try:
            write()
        except sqlite3.Error as error:
            errors[name] = str(error)
    tell(errors)


PROGRAMS: Final[dict[str, Callable[..., Coroutine[Any, Any, None]]]] = {
    each.__name__: each
    for each in (
        mark,
        run,
        create,
        hold,
        ask,
        accept,
        answer,
        talk,
        lock,
        no_room,
        upgrade_halfway,
        chatflow_agent,
    )
}

if __name__ == "__main__":
    asyncio.run(PROGRAMS[sys.argv[1]](*sys.argv[2:]))
