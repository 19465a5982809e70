"""A server that crashes loses what it had not flushed, and those who were told of it live on."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any, Final

import anyio
import psycopg
import pytest

from chatflow.core.agent import Agent
from chatflow.core.engine import EngineReply, EngineRequest
from chatflow.core.messages import AgentResponse, Message, Role, ToolCall
from chatflow.core.records import PendingTurn
from chatflow.core.session import AgentSession
from chatflow.core.tools import tool
from chatflow.engines.scripted import user_text
from chatflow.exceptions import SessionConflictError, StoreError
from chatflow.postgres import database
from chatflow.postgres.store import PostgresSessionStore
from chatflow.runner import Runner
from tests.faults.disk import NOT_MOUNTED, empty, fill, mounted
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


@pytest.mark.parametrize("why", ["full", "forbidden"])
async def test_log_that_cannot_grow(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the server ends as a turn commits, the error says what it said last, and the turn has left no trace."""
    monkeypatch.setattr(database, "BUSY_SECONDS", 0.1)
    with ExitStack() as stack:
        log = server.nowhere().folder
        if why == "full" and not mounted(log, "16m", stack):
            pytest.skip(NOT_MOUNTED)
        options = (*server.LOG_OF_MEGABYTES, f"--waldir={log}")
        ending = await anyio.to_thread.run_sync(lambda: server.another(*options))
        async with PostgresSessionStore(ending.dsn) as store:
            session = await store.get_or_create("s", Agent("Support"))
            if why == "full":
                fill(log)
                said = r"No space left on device \(53100\); make room on the server's disk"
            else:
                log.chmod(0o500)
                said = r"Permission denied \(42501\); the server has ended"
            await anyio.to_thread.run_sync(ending.use_up_log, 20_000)
            with pytest.raises(StoreError, match=f"not known until .* could not .*{said}"):
                await say_until_refused(session)
            if why == "full":
                empty(log)
            log.chmod(0o700)
            await anyio.to_thread.run_sync(ending.bring_up)
            await session.add_message(Message(Role.USER, "last"))
            found = (await store.messages("s")).items
            assert found == tuple(session.history)
            assert 1 < len(found) < 20
        await anyio.to_thread.run_sync(ending.remove)


async def say_until_refused(session: AgentSession) -> None:
    """Say more than there is room for."""
    for _ in range(20):
        await session.add_message(Message(Role.USER, "x" * 2000))


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
