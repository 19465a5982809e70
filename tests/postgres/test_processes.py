from __future__ import annotations

import asyncio
import gc
import os
import subprocess
import sys
import traceback
import warnings
from contextlib import suppress
from typing import Any, Final

import anyio
import psycopg
import pytest

from chatflow.core.agent import Agent
from chatflow.core.messages import Message, Role
from chatflow.core.records import Beat
from chatflow.exceptions import SessionConflictError, StoreClosedError
from chatflow.postgres import database
from chatflow.postgres.store import PostgresSessionStore
from tests.postgres import server
from tests.postgres.conftest import OpenStore

SUPPORT: Final = Agent(name="Support")

HOLDS_A_TURN: Final = """
import asyncio, os, sys
from chatflow.core.agent import Agent
from chatflow.core.messages import Message, Role
from chatflow.postgres import PostgresSessionStore
from chatflow.runner import Runner

class Hangs:
    async def generate(self, request):
        print("asked", flush=True)
        await asyncio.to_thread(sys.stdin.read)  # until whoever has started it is gone

async def main():
    store = PostgresSessionStore(sys.argv[1], schema=sys.argv[2])
    await Runner(Agent("Support"), store, Hangs()).run_async("s", "hello", message_id="m")

asyncio.run(main())
"""


def held_by_a_process(schema: str) -> subprocess.Popen[str]:
    """A process whose turn runs in the conversation."""
    command = [sys.executable, "-c", HOLDS_A_TURN, server.dsn(), schema]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "asked\n"
    return process


def end(process: subprocess.Popen[str]) -> None:
    """Kill it."""
    with process:
        process.kill()


async def test_killed(open_store: OpenStore, schema: str) -> None:
    """What a process of this machine held is free as soon as it is killed, before its lease is over."""
    store = open_store()
    await store.get_or_create("s", SUPPORT)
    process = await anyio.to_thread.run_sync(held_by_a_process, schema)
    assert [turn.state for turn in await store.pending_turns()] == ["running"]
    await anyio.to_thread.run_sync(end, process)
    session = await store.get_or_create("s", SUPPORT)
    await session.add_message(Message(Role.USER, "mine"))
    assert [turn.state for turn in await store.pending_turns()] == ["interrupted"]


async def test_killed_before_a_start(open_store: OpenStore, schema: str) -> None:
    """Whoever starts frees what killed processes of its machine have held."""
    process = await anyio.to_thread.run_sync(held_by_a_process, schema)
    await anyio.to_thread.run_sync(end, process)
    assert [turn.state for turn in await open_store().pending_turns()] == ["interrupted"]


async def test_on_another_machine(open_store: OpenStore, connection: psycopg.Connection[Any], schema: str) -> None:
    """Of a holder on another machine nothing is known but its beats: its turn is left to it until they stand still."""
    store = open_store()
    session = await store.get_or_create("s", SUPPORT)
    turn = session.turn()
    await turn.__aenter__()
    held = f"UPDATE \"{schema}\".chatflow_turns SET holder = 'elsewhere,boot,ns/1/1/x' RETURNING turn_id, attempt, beat"
    ((turn_id, attempt, beat),) = connection.execute(held.encode()).fetchall()
    await store.beat_turns(frozenset(), frozenset(), everything=True)
    assert await store.is_held(turn_id)
    assert await store.interrupt_turn(Beat(turn_id=turn_id, attempt=attempt, beat=beat, lease_seconds=10))
    await session.add_message(Message(Role.USER, "lost"))
    with pytest.raises(SessionConflictError):
        await turn.__aexit__(None, None, None)


def test_forked(schema: str) -> None:
    """A process that is forked refuses its parent's store, uses one of its own, and the parent goes on."""

    def store_here() -> PostgresSessionStore:
        return PostgresSessionStore(server.dsn(), schema=schema)

    async def in_child(inherited: PostgresSessionStore) -> None:
        with pytest.raises(StoreClosedError, match="before this process was forked"):
            await inherited.get("s")
        await inherited.aclose()
        async with store_here() as own:
            session = await own.get_or_create("s", SUPPORT)
            await session.add_message(Message(Role.USER, "child"))

    async def before() -> PostgresSessionStore:
        store = store_here()
        session = await store.get_or_create("s", SUPPORT)
        await session.add_message(Message(Role.USER, "parent"))
        return store

    async def after(store: PostgresSessionStore) -> list[str]:
        session = await store.get_or_create("s", SUPPORT)
        await session.add_message(Message(Role.USER, "parent again"))
        await store.aclose()
        return [message.text for message in session.history]

    store = asyncio.run(before())
    child = os.fork()
    if not child:
        try:
            asyncio.run(in_child(store))
            assert not store.abandon()
        except BaseException:  # noqa: BLE001  # nothing of the test may go on in the child
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert asyncio.run(after(store)) == ["parent", "child", "parent again"]


def test_forgotten(schema: str) -> None:
    """A store that is forgotten without being closed says so, and its connections are closed."""

    async def use() -> None:
        store = PostgresSessionStore(server.dsn(), schema=schema)
        await store.get("s")

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        asyncio.run(use())
        gc.collect()
    assert any("was never closed" in str(each.message) for each in caught)
    assert not any("psycopg" in str(each.message) for each in caught)


async def test_forgotten_beside_another(open_store: OpenStore) -> None:
    """A store that is forgotten leaves the connections to another one of its process on the same database."""
    store, forgotten = open_store(), open_store()
    await store.get("s")
    await forgotten.get("s")
    assert forgotten.abandon()
    assert await store.get("s") is None


async def test_server_restarts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Turns under way wait for a server that is killed and comes back, and none is lost or doubled.

    The server may have lost the places of the last moment, which it need not flush: such a turn leaves no trace.
    """
    monkeypatch.setattr(database, "BUSY_SECONDS", 50)
    restarting = await anyio.to_thread.run_sync(server.another)
    async with PostgresSessionStore(restarting.dsn, default_max_turns=1000) as store:
        sessions = [await store.get_or_create(str(number), SUPPORT) for number in range(4)]
        under_way = anyio.Event()

        async def turns(number: int) -> None:
            turn = 0
            while turn < 15:
                with suppress(SessionConflictError):
                    async with sessions[number].turn():
                        await sessions[number].add_message(Message(Role.USER, str(turn)))
                        if turn == 5:
                            under_way.set()
                    turn += 1

        async with anyio.create_task_group() as group:
            for number in range(4):
                group.start_soon(turns, number)
            await under_way.wait()
            await anyio.to_thread.run_sync(restarting.restart)
        for number in range(4):
            found = (await store.messages(str(number))).items
            assert [message.text for message in found] == [str(turn) for turn in range(15)]
    await anyio.to_thread.run_sync(restarting.remove)
