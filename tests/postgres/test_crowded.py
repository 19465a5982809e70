"""Servers that have no place or no time for many turns at once: each is told so, and may be taken again."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

import anyio
import psycopg
import pytest

from chatflow.core.agent import Agent
from chatflow.core.engine import EngineReply, EngineRequest
from chatflow.core.messages import Role, ToolCall
from chatflow.core.session import AgentSession
from chatflow.core.tools import tool
from chatflow.exceptions import StoreBusyError
from chatflow.postgres import database
from chatflow.postgres.store import PostgresSessionStore
from chatflow.runner import Runner
from chatflow.testing.conformance.conversation import until
from tests.postgres import server
from tests.postgres.conftest import OpenStore
from tests.postgres.test_failures import SUPPORT, dsn_of, role, texts, user

__all__ = ["role"]

MANY = [str(number) for number in range(8)]


async def say(sessions: Iterable[AgentSession], text: str) -> list[StoreBusyError]:
    """Say it in all of them at the same time, and return what those were told that could not."""
    told: list[StoreBusyError] = []

    async def say_in(session: AgentSession) -> None:
        try:
            await session.add_message(user(text))
        except StoreBusyError as error:
            told.append(error)

    async with anyio.create_task_group() as group:
        for session in sessions:
            group.start_soon(say_in, session)
    return told


async def test_too_many_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of many turns at once on a server with few connections, those are refused that get none, and leave no trace."""
    monkeypatch.setattr(database, "BUSY_SECONDS", 0.2)
    limits = ("max_connections=3", "superuser_reserved_connections=0", "reserved_connections=0")
    crowded = await asyncio.to_thread(server.another, *(part for limit in limits for part in ("-c", limit)))
    async with PostgresSessionStore(crowded.dsn, max_connections=len(MANY)) as store:
        sessions = [await store.get_or_create(name, SUPPORT) for name in MANY]
        with psycopg.connect(crowded.dsn), psycopg.connect(crowded.dsn):
            told = await say(sessions, "first")
        assert told
        assert min(error.waited_seconds for error in told) >= 0.2
        refused = [session for session in sessions if not session.history]
        assert len(refused) == len(told)
        for session in refused:
            await session.add_message(user("first"))
        assert [await texts(store, name) for name in MANY] == [["first"]] * len(MANY)
        assert await store.pending_turns() == ()
    await asyncio.to_thread(crowded.remove)


async def test_statement_timeout(
    open_store: OpenStore, connection: psycopg.Connection[Any], role: str, schema: str
) -> None:
    """Of many turns whose commits the server breaks off none leaves a trace, and each can be taken again.

    What a tool had done before is not done again.
    """
    connection.execute(f"ALTER ROLE {role} SET statement_timeout = 500".encode())
    store = open_store(dsn_of(role))
    charged, asked, locked = list[str](), list[str](), anyio.Event()
    all_asked = anyio.Event()

    @tool
    async def charge(customer: str) -> str:
        charged.append(customer)
        return "charged"

    class Engine:
        """Calls the tool, and answers once the conversations are locked."""

        async def generate(self, request: EngineRequest) -> EngineReply:
            last = request.messages[-1]
            if last.role is Role.USER:
                return EngineReply(tool_calls=(ToolCall(id="call", name="charge", args={"customer": last.text}),))
            asked.append("")
            if len(asked) == len(MANY):
                all_asked.set()
            await locked.wait()
            return EngineReply(text="done")

    runner = Runner(Agent("Support", tools=[charge]), store, Engine())
    told: list[StoreBusyError] = []

    async def run(name: str) -> None:
        try:
            await runner.run_async(name, name, message_id=name)
        except StoreBusyError as error:
            told.append(error)

    async with anyio.create_task_group() as group:
        for name in MANY:
            await store.get_or_create(name, runner.starting_agent)
            group.start_soon(run, name)
        await all_asked.wait()
        with connection.transaction():
            connection.execute(f'SELECT 1 FROM "{schema}".chatflow_sessions FOR UPDATE'.encode())
            locked.set()
            await until(lambda: len(told) == len(MANY))
    assert min(error.waited_seconds for error in told) >= 0.5
    assert [await texts(store, name) for name in MANY] == [[]] * len(MANY)
    for name in MANY:
        assert (await runner.run_async(name, name, message_id=name)).content == "done"
    assert sorted(charged) == MANY
    assert [len(await texts(store, name)) for name in MANY] == [4] * len(MANY)
    assert await store.pending_turns() == ()
    await store.aclose()
