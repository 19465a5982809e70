"""What other processes do in the tests: ``python -m tests.sqlite.program NAME ARGUMENT...``.

A program says in lines of JSON how far it is, and goes on when it is told.
"""

from __future__ import annotations

import asyncio
import contextvars
import json
import logging
import os
import resource
import signal
import sqlite3
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, Final, NoReturn

import anyio

from chatflow.core import backend
from chatflow.core.agent import Agent
from chatflow.core.engine import EngineReply, EngineRequest
from chatflow.core.messages import AgentResponse, Message, Role, ToolCall
from chatflow.core.records import PendingTurn
from chatflow.core.tools import tool
from chatflow.engines.scripted import ScriptedEngine
from chatflow.exceptions import ChatflowError, StoreError
from chatflow.runner import Runner
from chatflow.sqlite import upgrade
from chatflow.sqlite.store import SQLiteSessionStore
from tests.sqlite.chatflow_agent import writes_of
from tests.sqlite.files import SUPPORT, held, refunding, say, until


def tell(value: object) -> None:
    """Say something to the test."""
    print(json.dumps(value), flush=True)  # noqa: T201  # that is how


async def wait() -> None:
    """Wait until the test says to go on; a test that is gone ends the program."""
    if not await asyncio.to_thread(sys.stdin.readline):
        sys.exit(0)


async def sleep() -> NoReturn:
    """Do nothing more, for as long as the test is there."""
    while True:
        await wait()


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
        await sleep()
        return EngineReply()


async def ask(path: str) -> None:
    """Run a message whose model never answers."""
    async with SQLiteSessionStore(path) as store:
        await Runner(SUPPORT, store, _Silent(), turn_timeout=None).run_async("s", "hello", message_id="m")


async def accept(path: str) -> None:
    """Accept a message, and be gone at the moment that it is."""
    await Runner(SUPPORT, SQLiteSessionStore(path), _Silent()).accept("s", "hello", message_id="m")
    os.kill(os.getpid(), signal.SIGKILL)


class _Killing:
    async def generate(self, request: EngineRequest) -> EngineReply:
        """Be gone in the middle of a turn."""
        os.kill(os.getpid(), signal.SIGKILL)
        return EngineReply()


async def approve_and_be_gone(path: str, call_id: str, ledger: str) -> None:
    """Approve a call, and be gone once its tool has run and its model is asked."""
    await Runner(refunding(Path(ledger)), SQLiteSessionStore(path), _Killing()).approve("s", call_id)


async def approve(path: str, call_id: str, ledger: str) -> None:
    """Approve a call, at the same moment as others, and tell whether somebody else had done it."""
    async with SQLiteSessionStore(path) as store:
        runner = Runner(refunding(Path(ledger)), store, _Counting())
        await store.get("s")
        tell("ready")
        await wait()
        response = await runner.approve("s", call_id)
    tell([response.content, response.duplicate])


async def answer(path: str) -> None:
    """Accept messages, answer them, and never return from telling the first answer."""

    async def never(turn: PendingTurn, response: AgentResponse) -> None:
        tell([turn.message_id, response.content])
        await sleep()

    async with SQLiteSessionStore(path) as store:
        runner = Runner(SUPPORT, store, _Counting())
        for number in range(2):
            await runner.accept("s", "hello", message_id=f"m{number}")
        async with runner.working(never):
            await sleep()


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


async def no_room_for_a_turn(path: str) -> None:
    """Answer a message that the disk has no room for, and tell what came of it then, and once there is room."""
    runner_said = "y" * 1_000_000
    async with SQLiteSessionStore(path) as store:
        runner = Runner(SUPPORT, store, ScriptedEngine([runner_said, "small", runner_said]))
        session = await store.get_or_create("s", SUPPORT)
        size = Path(f"{path}-wal").stat().st_size
        _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size + 200_000, most))
        said: list[object] = []
        try:
            await runner.run_async("s", "big", message_id="m")
        except StoreError as error:
            said.append(str(error))
        said.append(len(session.history))
        said.append((await runner.run_async("s", "hello")).content)
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
        said.append(len((await runner.run_async("s", "big", message_id="m")).content))
        said.append([message.text[:5] for message in session.history])
        said.append(len(await store.pending_turns()))
    tell(said)


async def in_read_only_folder(folder: str) -> None:
    """Use a store in a folder that may not be written to, as a user for whom that counts; then again when it may."""
    if os.geteuid() == 0:
        os.chown(folder, 65534, 65534)
        os.seteuid(65534)
    path = Path(folder) / "chat.db"
    async with SQLiteSessionStore(path) as store:
        await say(await store.get_or_create("s", SUPPORT), "before")
    Path(folder).chmod(0o555)
    said: list[object] = []
    async with SQLiteSessionStore(path) as store:
        try:
            await store.get_or_create("s", SUPPORT)
        except StoreError as error:
            said.append(str(error))
        Path(folder).chmod(0o755)
        session = await store.get_or_create("s", SUPPORT)
        await say(session, "after")
        said.append([message.text for message in session.history])
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


async def lease(path: str, lease_seconds: str, then: str) -> None:
    """Have a turn of that lease; do something in it when told to, and tell what came of it and of the turn."""
    told: list[str] = []
    async with SQLiteSessionStore(path) as store:
        session = await store.get_or_create("s", SUPPORT)
        try:
            async with session.turn(lease_seconds=float(lease_seconds)):
                await session.add_message(Message(Role.USER, "from the other process"))
                tell("holding")
                await wait()
                try:
                    if then == "method":
                        await session.add_message(Message(Role.USER, "more of it"))
                except ChatflowError as error:
                    told.append(type(error).__name__)
        except ChatflowError as error:
            told.append(type(error).__name__)
        tell(told)


class _Asking:
    """Calls a tool, after telling that it was asked and being told to."""

    asked = 0

    async def generate(self, request: EngineRequest) -> EngineReply:
        self.asked += 1
        tell("asked")
        await wait()
        return EngineReply(tool_calls=[ToolCall(id="c", name="look_up", args={})])


async def lease_of_run(path: str, lease_seconds: str) -> None:
    """Run a message whose model calls a tool when told to; tell what came of it, and how often model and tool ran."""
    engine, called = _Asking(), []

    @tool
    async def look_up() -> str:
        """Look it up."""
        called.append(1)
        return "found"

    agent = Agent(name="Support", tools=[look_up])
    async with SQLiteSessionStore(path) as store:
        runner = Runner(agent, store, engine, lease_seconds=float(lease_seconds))
        try:
            await runner.run_async("s", "hello", message_id="m")
        except ChatflowError as error:
            tell([type(error).__name__, engine.asked, len(called)])


async def block(path: str, lease_seconds: str) -> None:
    """Have a turn whose code blocks the event loop until told to go on, and tell how it ended and what was logged."""
    logged: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: logged.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("chatflow.turn").addHandler(handler)
    async with SQLiteSessionStore(path) as store:
        session = await store.get_or_create("s", SUPPORT)
        try:
            async with session.turn(lease_seconds=float(lease_seconds)):
                await session.add_message(Message(Role.USER, "lost"))
                tell("blocking")
                sys.stdin.readline()
        except ChatflowError as error:
            tell([type(error).__name__, logged])


async def waits_and_is_cancelled(path: str) -> None:
    """Wait for turns, give up the second of three when told to, and tell when the rest has had its turn."""
    async with SQLiteSessionStore(path) as store:
        session = await store.get_or_create("s", SUPPORT)
        waiting = []
        for number in range(3):
            waiting.append(asyncio.create_task(say(session, f"theirs {number}")))
            await until(lambda number=number: len(store.line._waiters) > number)  # type: ignore[misc]
        tell("waiting")
        await wait()
        waiting[1].cancel()
        await asyncio.wait([waiting[1]])
        tell("cancelled")
        await asyncio.wait(waiting)
    tell("done")


async def erase(path: str, owner: str, step: str) -> None:
    """Erase an owner, a conversation at a time, and stop before a step."""
    backend._ERASED_AT_ONCE = 1  # type: ignore[misc]
    name, _, number = step.partition(" ")
    stops = iter([False] * int(number or 0) + [True])
    async with SQLiteSessionStore(path) as store:
        primitive = getattr(store, name)

        async def stopped(*args: Any, **options: Any) -> Any:
            if next(stops, False):
                tell("there")
                await wait()
            return await primitive(*args, **options)

        setattr(store, name, stopped)
        await store.erase_owner(owner)
    tell("done")


PROGRAMS: Final[dict[str, Callable[..., Coroutine[Any, Any, None]]]] = {
    each.__name__: each
    for each in (
        mark,
        run,
        create,
        hold,
        ask,
        accept,
        approve,
        approve_and_be_gone,
        answer,
        talk,
        lock,
        no_room,
        no_room_for_a_turn,
        in_read_only_folder,
        upgrade_halfway,
        chatflow_agent,
        lease,
        lease_of_run,
        block,
        waits_and_is_cancelled,
        erase,
    )
}

if __name__ == "__main__":
    asyncio.run(PROGRAMS[sys.argv[1]](*sys.argv[2:]))
