from __future__ import annotations

import asyncio
import gc
import types
from collections.abc import Callable, Coroutine, Generator, Iterator
from functools import partial
from typing import Any, Final

import anyio
import psycopg
import pytest
from psycopg import conninfo

from chatflow.core.agent import Agent
from chatflow.core.backend import StoreBackend
from chatflow.core.messages import Message, Role
from chatflow.core.tools import tool
from chatflow.engines.scripted import ScriptedEngine
from chatflow.exceptions import StoreBusyError, StoreClosedError, StoreError
from chatflow.postgres import database
from chatflow.postgres.store import PostgresSessionStore
from chatflow.runner import Runner
from chatflow.testing.conformance.conversation import PausingEngine, until
from tests.postgres import server
from tests.postgres.conftest import OpenStore
from tests.postgres.proxy import How, Proxy

SUPPORT: Final = Agent(name="Support")
TIMES: Final = 100


async def texts(store: StoreBackend, session_id: str = "s") -> list[str]:
    """What stands in the conversation."""
    return [message.text for message in (await store.messages(session_id, limit=1000)).items]


def user(text: str) -> Message:
    """What a user says."""
    return Message(Role.USER, text)


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Operations give up at once rather than after ten seconds."""
    monkeypatch.setattr(database, "BUSY_SECONDS", 0.1)


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """What failed is tried again without a pause."""
    monkeypatch.setattr(database, "_PAUSE", 0.0)


@pytest.fixture
def role(connection: psycopg.Connection[Any]) -> Iterator[str]:
    """A user of the test's own, who may do everything."""
    connection.execute("CREATE ROLE limited SUPERUSER LOGIN PASSWORD 'limited'")
    yield "limited"
    connection.execute("DROP ROLE limited")


def dsn_of(role: str) -> str:
    """The server's address for another user, whose password is its name."""
    return conninfo.make_conninfo(server.dsn(), user=role, password=role)


# --- connections that break ---


@pytest.mark.parametrize("how", ["after", "before"])
async def test_cut_while_committing(proxy: Proxy, open_store: OpenStore, how: How) -> None:
    """Of a hundred turns whose connection breaks at the commit, none is lost and none doubled: it is found out."""
    store = open_store(proxy.dsn, default_max_turns=TIMES)
    session = await store.get_or_create("s", SUPPORT)
    for number in range(TIMES):
        async with session.turn():
            await session.add_message(user(str(number)))
            proxy.plan = [how]
    assert proxy.cut == TIMES
    assert await texts(store) == [str(number) for number in range(TIMES)]


@pytest.mark.parametrize("times", [2, 3])
async def test_cut_while_it_is_found_out(proxy: Proxy, open_store: OpenStore, times: int) -> None:
    """A turn whose connection breaks at the commit, and the next ones when they have looked, is found out as well."""
    store = open_store(proxy.dsn, default_max_turns=TIMES)
    session = await store.get_or_create("s", SUPPORT)
    for number in range(10):
        async with session.turn():
            await session.add_message(user(str(number)))
            proxy.plan = ["after"] * times
    assert proxy.cut == 10 * times
    assert await texts(store) == [str(number) for number in range(10)]


async def test_commit_that_arrives_late(proxy: Proxy, open_store: OpenStore) -> None:
    """A commit that reaches the server after it was looked for comes to nothing: it was done again meanwhile."""
    store = open_store(proxy.dsn, default_max_turns=TIMES)
    session = await store.get_or_create("s", SUPPORT)
    for number in range(20):
        async with session.turn():
            await session.add_message(user(str(number)))
            proxy.plan = ["late"]
        await proxy.deliver_late()
    assert proxy.cut == 20
    assert await texts(store) == [str(number) for number in range(20)]


@pytest.mark.parametrize("how", ["after", "before", "late"])
async def test_cut_while_marking(
    proxy: Proxy, open_store: OpenStore, how: How, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever marks an id is told so, exactly once, though the connection breaks while the mark commits.

    One that is late to commit holds its locks until the server ends it.
    """
    soon = "SELECT set_config('idle_in_transaction_session_timeout', '20ms', true)"
    monkeypatch.setattr(database, "LIMITED", soon)
    store = open_store(proxy.dsn)
    await store.get("s")
    for number in range(20):
        proxy.plan = [how]
        assert await store.mark_message_processed(str(number)) is True
        await proxy.deliver_late()
        assert await store.mark_message_processed(str(number)) is False


@pytest.mark.parametrize("how", ["after", "before"])
async def test_cut_while_a_message_is_answered(proxy: Proxy, open_store: OpenStore, how: How) -> None:
    """A message whose connections break at every commit is answered once, and delivered again gets that answer."""
    store = open_store(proxy.dsn)
    engine = ScriptedEngine(["hi"])
    runner = Runner(SUPPORT, store, engine)
    await store.get("s")
    proxy.plan = [how] * 3
    assert (await runner.run_async("s", "hello", message_id="m")).content == "hi"
    proxy.plan = [how]
    again = await runner.run_async("s", "hello", message_id="m")
    assert (again.content, again.duplicate) == ("hi", True)
    assert await texts(store) == ["hello", "hi"]


@pytest.mark.parametrize("how", ["after", "before"])
async def test_cut_while_a_call_is_noted(proxy: Proxy, open_store: OpenStore, how: How) -> None:
    """A call whose connections break when it, its result and its turn are stored, runs once."""
    ran: list[str] = []

    @tool
    async def ring() -> str:
        """Ring."""
        ran.append("ring")
        return "done"

    store = open_store(proxy.dsn)
    engine = ScriptedEngine([ScriptedEngine.call("ring"), "hi"])
    runner = Runner(Agent(name="Support", tools=[ring]), store, engine)
    await store.get_or_create("s", SUPPORT)
    proxy.plan = [how] * 3
    assert (await runner.run_async("s", "hello", message_id="m")).content == "hi"
    assert (proxy.cut, ran) == (3, ["ring"])


async def test_accepted_turn_cut_while_committing(proxy: Proxy, open_store: OpenStore) -> None:
    """An accepted turn whose connection breaks at the commit is told of, once."""
    store = open_store(proxy.dsn)
    paused = PausingEngine()
    runner = Runner(SUPPORT, store, paused)
    heard: list[str] = []
    told = anyio.Event()

    async def hear(turn: Any, response: Any) -> None:
        heard.append(response.content)
        told.set()

    await runner.accept("s", "hello", message_id="m")
    async with runner.working(hear):
        await paused.asked.wait()
        proxy.plan = ["after"]
        paused.go_on.set()
        await told.wait()
    assert heard == ["answer"]
    assert proxy.cut >= 1
    assert await texts(store) == ["hello", "answer"]
    assert await store.pending_turns() == ()


async def test_connections_ended_by_the_server(open_store: OpenStore, connection: psycopg.Connection[Any]) -> None:
    """Turns under way go on when the server ends all their connections, over and over."""
    store = open_store(default_max_turns=1000)
    sessions = [await store.get_or_create(str(number), SUPPORT) for number in range(8)]

    async def turns(number: int) -> None:
        for turn in range(20):
            await sessions[number].add_message(user(str(turn)))

    def end_all() -> None:
        connection.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'chatflow'")

    async with anyio.create_task_group() as group:
        for number in range(8):
            group.start_soon(turns, number)
        for _ in range(10):
            await anyio.to_thread.run_sync(end_all)
            await anyio.lowlevel.checkpoint()
    for number in range(8):
        assert await texts(store, str(number)) == [str(turn) for turn in range(20)]


async def test_connection_between_turns(open_store: OpenStore) -> None:
    """While a turn's model or tools run, the turn has no connection."""
    store = open_store(max_connections=1)
    session = await store.get_or_create("s", SUPPORT)
    async with session.turn():
        assert len(store._database._pool._idle) == 1
        await session.add_message(user("hello"))
        assert await store.get("other") is None


# --- a server that has no place, or no time ---


@pytest.mark.usefixtures("soon")
async def test_all_connections_in_use(open_store: OpenStore, connection: psycopg.Connection[Any], schema: str) -> None:
    """Where all connections are in use for too long, an operation says so, and the next one goes through."""
    store = open_store(max_connections=1)
    await store.get_or_create("s", SUPPORT)
    lock = f'SELECT 1 FROM "{schema}".chatflow_sessions FOR UPDATE'
    async with anyio.create_task_group() as group:
        with connection.transaction():
            connection.execute(lock.encode())
            group.start_soon(store.get_or_create, "s", SUPPORT, {"a": 1})
            await until(lambda: not store._database._pool._idle)
            with pytest.raises(StoreBusyError, match=r"all in use \(max_connections=1\)") as raised:
                await store.get("s")
            assert raised.value.waited_seconds == 0.1
    session = await store.get("s")
    assert session is not None
    assert session.metadata == {"a": 1}


@pytest.mark.usefixtures("soon")
async def test_too_many_connections(open_store: OpenStore, connection: psycopg.Connection[Any], role: str) -> None:
    """A server without a free connection is busy; once it has one, the store goes on."""
    connection.execute(f"ALTER ROLE {role} NOSUPERUSER CONNECTION LIMIT 0".encode())
    store = open_store(dsn_of(role))
    with pytest.raises(StoreBusyError, match='too many connections for role "limited"; end some of its connections'):
        await store.get("s")
    connection.execute(f"ALTER ROLE {role} SUPERUSER CONNECTION LIMIT -1".encode())
    assert await store.get("s") is None
    await store.aclose()


@pytest.mark.usefixtures("soon")
async def test_statement_timeout(
    open_store: OpenStore, connection: psycopg.Connection[Any], role: str, schema: str
) -> None:
    """A statement that the server breaks off fails cleanly: nothing is written, and the turn is taken again."""
    connection.execute(f"ALTER ROLE {role} SET statement_timeout = 50".encode())
    store = open_store(dsn_of(role))
    session = await store.get_or_create("s", SUPPORT)
    lock = f'SELECT 1 FROM "{schema}".chatflow_sessions FOR UPDATE'
    with connection.transaction():
        connection.execute(lock.encode())
        with pytest.raises(StoreBusyError, match=r"due to statement timeout \(57014\)"):
            await session.add_message(user("hello"))
    await session.add_message(user("again"))
    assert await texts(store) == ["again"]
    await store.aclose()


@pytest.mark.usefixtures("soon")
async def test_no_server(open_store: OpenStore) -> None:
    """A server that can't be reached is named by its address, without the password, which no error shows."""
    store = open_store("postgresql://somebody:secret@127.0.0.1:1/there")
    with pytest.raises(StoreError, match=r"somebody@127\.0\.0\.1:1/there") as raised:
        await store.get("s")
    assert "secret" not in str(raised.value)
    assert "secret" not in repr(store)


async def test_silent_server(proxy: Proxy, open_store: OpenStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """An operation that the server does not answer fails, and its connection is not used again."""
    store = open_store(proxy.dsn)
    await store.get_or_create("s", SUPPORT)
    monkeypatch.setattr(database, "ANSWER_SECONDS", 0.1)
    proxy.is_silent = True
    with pytest.raises(StoreError, match="silent"):
        await store.get("s")
    proxy.is_silent = False
    assert await store.get("s") is not None


@pytest.mark.usefixtures("soon")
async def test_nobody_to_ask(proxy: Proxy, open_store: OpenStore) -> None:
    """Where a connection breaks at the commit and the server can't be asked, the error says that nobody knows."""
    store = open_store(proxy.dsn)
    await store.get("s")
    proxy.plan, proxy.refuses_after_cut = ["after"], True
    with pytest.raises(StoreError, match="whether it holds the change is not known"):
        await store.mark_message_processed("m")
    proxy.refuses = False
    assert await store.mark_message_processed("m") is False


async def test_closed_while_in_use(open_store: OpenStore) -> None:
    """A store that is closed refuses what comes after, also what is under way elsewhere."""
    store = open_store()
    await store.get("s")
    database = store._database
    await store.aclose()
    with pytest.raises(StoreClosedError):
        await database.ask("SELECT 1")


async def test_line_after_close(open_store: OpenStore) -> None:
    """A store that was closed unused has no line of waiters, and connects to nothing for one."""
    store = open_store()
    await store.aclose()
    with pytest.raises(StoreClosedError):
        store.line.wake_all()


async def test_wrong_password(open_store: OpenStore) -> None:
    """A server that refuses the user is not asked again, and the error says what to look at."""
    store = open_store(dsn_of("nobody"))
    with pytest.raises(StoreError, match="refuses the connection"):
        await store.get("s")


async def test_no_rights(open_store: OpenStore, connection: psycopg.Connection[Any], role: str) -> None:
    """A user without the right to the tables is told what is missing."""
    connection.execute(f"ALTER ROLE {role} NOSUPERUSER".encode())
    store = open_store(dsn_of(role))
    with pytest.raises(StoreError, match="grant the user what it needs"):
        await store.get("s")
    await store.aclose()


async def test_no_answer_to_a_commit(proxy: Proxy, open_store: OpenStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """A commit that is not answered is looked up as one whose connection broke."""
    store = open_store(proxy.dsn)
    session = await store.get_or_create("s", SUPPORT)
    monkeypatch.setattr(database, "ANSWER_SECONDS", 0.5)
    async with session.turn():
        await session.add_message(user("hello"))
        proxy.plan = ["mute"]
    proxy.plan = ["mute"]
    assert await store.mark_message_processed("m") is True
    assert proxy.cut == 2
    assert await texts(store) == ["hello"]


# --- event loops that are closed ---


def cut(operation: Callable[[], Coroutine[Any, Any, Any]], times: int) -> bool:
    """Close the event loop of *operation* once its tasks have waited so many times; whether it had ended by then.

    What was cut off is thrown away while another loop runs.
    """
    loop = asyncio.new_event_loop()
    waits = 0

    @types.coroutine
    def counted(coroutine: Coroutine[Any, Any, Any]) -> Generator[Any, None, Any]:
        nonlocal waits
        while True:
            try:
                waited = coroutine.send(None)
            except StopIteration as ended:
                return ended.value
            waits += 1
            if waits == times:
                loop.stop()
            yield waited

    async def whole(coroutine: Coroutine[Any, Any, Any]) -> Any:
        return await counted(coroutine)

    async def throw_away() -> None:
        tasks.clear()
        gc.collect()

    loop.set_task_factory(lambda loop, coroutine: asyncio.Task(whole(coroutine), loop=loop))
    tasks = [loop.create_task(operation())]
    tasks[0].add_done_callback(lambda _: loop.stop())
    loop.run_forever()
    has_ended = tasks[0].done()
    loop.close()
    asyncio.run(throw_away())
    return has_ended


# The scopes that are thrown away find themselves in another task.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited:RuntimeWarning")
@pytest.mark.parametrize("is_prepared", [True, False])
def test_event_loop_that_is_closed(connection: psycopg.Connection[Any], schema: str, *, is_prepared: bool) -> None:
    """Wherever an event loop is closed in the middle of an operation, its connection is free again, and works."""
    times, has_ended = 0, False
    while not has_ended:
        times += 1
        connection.execute(f'DROP SCHEMA IF EXISTS "{schema}" CASCADE'.encode())
        store = PostgresSessionStore(server.dsn(), schema=schema, max_connections=1)
        if is_prepared:
            asyncio.run(store.mark_message_processed("before"))
        has_ended = cut(partial(store.mark_message_processed, "m"), times)
        asyncio.run(store.mark_message_processed("m"))
        assert len(store._database._pool._idle) == 1
        assert asyncio.run(store.is_message_processed("m"))
        asyncio.run(store.aclose())
    assert times > 1
