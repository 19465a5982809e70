"""A server that crashes loses what it had not flushed, and those who were told of it live on."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any, Final

import anyio
import psycopg
import pytest

from chatflow.core.agent import Agent
from chatflow.core.engine import EngineReply, EngineRequest
from chatflow.core.messages import AgentResponse, Role, ToolCall
from chatflow.core.records import PendingTurn
from chatflow.core.tools import tool
from chatflow.engines.scripted import user_text
from chatflow.exceptions import SessionConflictError
from chatflow.postgres.store import PostgresSessionStore
from chatflow.runner import Runner
from tests.postgres import server


@pytest.fixture
def crashing() -> Iterator[server.Server]:
    """A server that flushes nothing by itself for ten seconds: what has not waited for the disk goes with a crash."""
    crashing = server.another()
    with psycopg.connect(crashing.dsn, autocommit=True) as connection:
        connection.execute("ALTER SYSTEM SET wal_writer_delay = '10s'")
    crashing.restart()
    yield crashing
    crashing.remove()


class Charging:
    """A model that calls a tool once for each message, when it is let go on; *charged* is what the tool did."""

    def __init__(self) -> None:
        self.asked: Final = defaultdict[str, int](int)
        self.go_on: Final = defaultdict[str, anyio.Event](anyio.Event)
        self.charged: Final[list[str]] = []
        self._news = anyio.Event()

    async def generate(self, request: EngineRequest) -> EngineReply:
        """Wait, and have the customer charged."""
        text = user_text(request)
        if request.messages[-1].role is not Role.USER:
            return EngineReply(text="done")
        self.asked[text] += 1
        self._news.set()
        await self.go_on[text].wait()
        return EngineReply(tool_calls=(ToolCall(id=f"call-{text}", name="charge", args={"customer": text}),))

    async def until_asked(self, text: str, times: int = 1) -> None:
        """Wait until it was asked so often about that message."""
        while self.asked[text] < times:
            self._news = anyio.Event()
            await self._news.wait()

    def runner(self, store: PostgresSessionStore) -> Runner:
        """An application with that model and that tool."""

        @tool
        async def charge(customer: str) -> str:
            self.charged.append(customer)
            return "charged"

        return Runner(Agent("Support", tools=[charge]), store, self)


def rows(crashing: server.Server, columns: str) -> list[tuple[Any, ...]]:
    """The turns' rows as they stand on the server."""
    with psycopg.connect(crashing.dsn) as connection:
        return connection.execute(f"SELECT {columns} FROM chatflow.chatflow_turns ORDER BY turn_id".encode()).fetchall()


async def test_turn_id_given_again(crashing: server.Server) -> None:
    """A turn whose row was lost is not taken for another one, to which the server has given the same number since."""
    model, refused = Charging(), anyio.Event()
    async with PostgresSessionStore(crashing.dsn) as store, anyio.create_task_group() as group:
        runner = model.runner(store)
        for name in ("first", "second"):
            await store.get_or_create(name, runner.starting_agent)

        async def run(name: str) -> None:
            try:
                await runner.run_async(name, name, message_id=name)
            except SessionConflictError:
                refused.set()

        group.start_soon(run, "first")
        await model.until_asked("first")
        (lost,) = rows(crashing, "turn_id")
        await anyio.to_thread.run_sync(crashing.restart)
        group.start_soon(run, "second")
        await model.until_asked("second")
        assert rows(crashing, "turn_id") == [lost]
        model.go_on["first"].set()
        await refused.wait()
        model.go_on["second"].set()
    assert model.charged == ["second"]


async def test_taken_again(crashing: server.Server) -> None:
    """A worker whose taking of a message was lost takes it again, and what it had begun before does nothing more."""
    model, heard = Charging(), list[str]()
    told = anyio.Event()

    async def hear(turn: PendingTurn, response: AgentResponse) -> None:
        heard.append(response.content)
        told.set()

    async with PostgresSessionStore(crashing.dsn) as store:
        runner = model.runner(store)
        await runner.accept("s", "hello", message_id="m")
        async with runner.working(hear):
            await model.until_asked("hello")
            await anyio.to_thread.run_sync(crashing.restart)
            await model.until_asked("hello", 2)
            model.go_on["hello"].set()
            await told.wait()
    assert model.charged == ["hello"]
    assert heard == ["done"]
