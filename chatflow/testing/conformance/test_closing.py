"""Closing a store while turns are under way: what ends in time is kept, the rest leaves no trace and is free."""

from __future__ import annotations

import asyncio
import contextvars
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import anyio
import anyio.to_thread
import pytest

from chatflow.core.backend import StoreBackend
from chatflow.core.engine import EngineReply, EngineRequest
from chatflow.core.messages import AgentResponse
from chatflow.core.records import Claim
from chatflow.core.session import SessionContext
from chatflow.core.turn import Turn
from chatflow.engines.scripted import ScriptedEngine
from chatflow.exceptions import StoreClosedError
from chatflow.runner import Runner
from chatflow.testing import Faults
from chatflow.testing.conformance.conftest import OpenStore, Restart
from chatflow.testing.conformance.conversation import SUPPORT, outside, queued, texts, until, user


@asynccontextmanager
async def closing(store: StoreBackend, grace: float = 1000) -> AsyncIterator[asyncio.Task[None]]:
    """Meanwhile the store is being closed, in another task."""
    task = asyncio.create_task(outside(store.aclose(grace)))
    await until(lambda: store.is_closing)
    await asyncio.sleep(0)
    try:
        yield task
    finally:
        with suppress(asyncio.CancelledError):
            await task


class Held:
    """A turn in a task of its own, open until it is told to end."""

    def __init__(self, session: SessionContext) -> None:
        self.session = session
        self.end = asyncio.Event()
        self.is_open = asyncio.Event()
        self.task = asyncio.create_task(self._hold(), context=contextvars.Context())

    async def _hold(self) -> None:
        async with self.session.turn():
            self.is_open.set()
            await self.end.wait()
            await self.session.add_message(user("in time"))


async def held(store: StoreBackend, session_id: str = "s") -> Held:
    """A turn that is open."""
    found = Held(await store.get_or_create(session_id, SUPPORT))
    await found.is_open.wait()
    return found


async def test_waits_for_turns(store: StoreBackend) -> None:
    """A store is closed only once the turns under way have ended, and they commit."""
    turns = [await held(store, each) for each in ("s", "t")]
    async with closing(store) as task:
        for each in turns:
            assert not task.done()
            each.end.set()
            await each.task
    assert [texts(each.session.history) for each in turns] == [["in time"]] * 2
    with pytest.raises(StoreClosedError):
        await store.get("s")


async def test_nothing_under_way(store: StoreBackend) -> None:
    """A store without turns under way is closed at once, whatever the grace."""
    await (await store.get_or_create("s", SUPPORT)).add_message(user("hello"))
    await store.aclose(math.inf)


async def test_waits_for_turns_of_threads(store: StoreBackend) -> None:
    """A store waits for turns of other event loops as well."""
    loop, here, end = asyncio.get_running_loop(), asyncio.Event(), anyio.Event()
    theirs: list[asyncio.AbstractEventLoop] = []

    async def hold() -> list[str]:
        session = await store.get_or_create("s", SUPPORT)
        async with session.turn():
            theirs.append(asyncio.get_running_loop())
            loop.call_soon_threadsafe(here.set)
            await end.wait()
            await session.add_message(user("in time"))
        return texts(session.history)

    thread = asyncio.create_task(outside(anyio.to_thread.run_sync(lambda: asyncio.run(hold()))))
    await here.wait()
    async with closing(store) as task:
        assert not task.done()
        theirs[0].call_soon_threadsafe(end.set)
        assert await thread == ["in time"]


async def test_cancels_after_grace(store: StoreBackend) -> None:
    """A turn that has not ended in time is cancelled, and leaves no trace."""
    turn = await held(store)
    await store.aclose(0)
    await asyncio.wait([turn.task])
    assert turn.task.cancelled()
    assert turn.session.history == []


async def test_cancels_turns_of_threads(store: StoreBackend) -> None:
    """A turn of another event loop that has not ended in time is cancelled as well."""
    loop, here = asyncio.get_running_loop(), asyncio.Event()

    async def hold() -> str:
        session = await store.get_or_create("s", SUPPORT)
        try:
            async with session.turn():
                loop.call_soon_threadsafe(here.set)
                await anyio.sleep_forever()
        except asyncio.CancelledError:
            return "cancelled"
        return "ended"

    thread = asyncio.create_task(outside(anyio.to_thread.run_sync(lambda: asyncio.run(hold()))))
    await here.wait()
    await store.aclose(0.01)
    assert await thread == "cancelled"


async def test_one_that_ignores_it(store: StoreBackend) -> None:
    """A turn that does not end when it is cancelled is left alone: the store is closed, and its commit fails."""
    is_open, end = asyncio.Event(), asyncio.Event()
    session = await store.get_or_create("s", SUPPORT)

    async def ignore() -> None:
        async with session.turn():
            await session.add_message(user("too late"))
            is_open.set()
            while not end.is_set():
                with suppress(asyncio.CancelledError):
                    await end.wait()

    task = asyncio.create_task(outside(ignore()))
    await is_open.wait()
    await store.aclose(0)
    end.set()
    with pytest.raises(StoreClosedError):
        await task


async def test_queued_turns(store: StoreBackend) -> None:
    """Turns that wait for their places are refused at once, and the one they wait for may end."""
    turn = await held(store)
    waiting = [asyncio.create_task(outside(turn.session.add_message(user("waits")))) for _ in range(3)]
    await queued(store, 3)
    async with closing(store) as task:
        await asyncio.wait(waiting)
        assert not task.done()
        turn.end.set()
    for each in waiting:
        assert isinstance(each.exception(), StoreClosedError)
    await turn.task
    assert texts(turn.session.history) == ["in time"]


async def test_waiting_duplicates(store: StoreBackend) -> None:
    """A delivery that waits for the answer to its message has it if it comes in time, and no turn of its own."""
    asked, answer = asyncio.Event(), asyncio.Event()

    class Engine:
        async def generate(self, request: EngineRequest) -> EngineReply:
            asked.set()
            await answer.wait()
            return EngineReply(text="yes")

    runner = Runner(SUPPORT, store, Engine())
    first = asyncio.create_task(outside(runner.run_async("s", "hello", message_id="m")))
    await asked.wait()
    second = asyncio.create_task(outside(runner.run_async("s", "hello", message_id="m")))
    await queued(store, 1)
    async with closing(store) as task:
        await asyncio.wait([second])
        assert isinstance(second.exception(), StoreClosedError)
        assert not task.done()
        answer.set()
        assert (await first).content == "yes"


async def test_new_turns(store: StoreBackend) -> None:
    """While a store is being closed no turn begins, of no conversation."""
    turn = await held(store)
    other = await store.get_or_create("t", SUPPORT)
    async with closing(store):
        for session in (turn.session, other):
            with pytest.raises(StoreClosedError):
                await outside(session.add_message(user("new")))
        with pytest.raises(StoreClosedError):
            await outside(Runner(SUPPORT, store, ScriptedEngine(["no"])).run_async("t", "new"))
        turn.end.set()


async def test_turn_that_begins_just_then(store: StoreBackend) -> None:
    """A turn that is given its place in the moment in which the store begins to close is refused, and leaves it."""
    session = await store.get_or_create("s", SUPPORT)
    placed, go_on = asyncio.Event(), asyncio.Event()

    async def wait() -> None:
        placed.set()
        await go_on.wait()

    turn = await held(store, "t")
    Faults(store).after("queue_turn", wait)
    beginning = asyncio.create_task(outside(session.add_message(user("new"))))
    await placed.wait()
    async with closing(store):
        go_on.set()
        with pytest.raises(StoreClosedError):
            await beginning
        assert [each.session_id for each in await store.pending_turns()] == ["t"]
        turn.end.set()


async def test_turns_inside_a_turn(store: StoreBackend) -> None:
    """What a turn under way needs for its own end may still begin: a turn of another conversation inside it."""
    session, other = await store.get_or_create("s", SUPPORT), await store.get_or_create("t", SUPPORT)
    is_open, go_on = asyncio.Event(), asyncio.Event()

    async def nest() -> None:
        async with session.turn():
            is_open.set()
            await go_on.wait()
            await other.add_message(user("inside"))
            await session.add_message(user("around"))

    task = asyncio.create_task(outside(nest()))
    await is_open.wait()
    async with closing(store):
        go_on.set()
        await task
    assert (texts(session.history), texts(other.history)) == (["around"], ["inside"])


async def test_queued_inside_a_turn(store: StoreBackend) -> None:
    """A turn that waits inside one under way goes on waiting, and has its place."""
    turn = await held(store, "t")
    session = await store.get_or_create("s", SUPPORT)

    async def nest() -> None:
        async with session.turn():
            await turn.session.add_message(user("inside"))

    task = asyncio.create_task(outside(nest()))
    await queued(store, 1)
    async with closing(store):
        turn.end.set()
        await task
    assert texts(turn.session.history) == ["in time", "inside"]


async def test_inside_a_turn_of_another_store(store: StoreBackend, open_store: OpenStore) -> None:
    """A turn inside one of another store is none that this store's turns under way need, and is refused."""
    turn = await held(store)
    around = await open_store().get_or_create("around", SUPPORT)
    inner = await store.get_or_create("inner", SUPPORT)
    async with closing(store):
        async with around.turn():
            with pytest.raises(StoreClosedError):
                await inner.add_message(user("inside"))
        turn.end.set()


@pytest.mark.parametrize("where", ["itself", "a child"])
async def test_inside_its_own_turn(where: str, store: StoreBackend) -> None:
    """Closing inside a turn does not wait for that turn, which can't commit any more."""
    session = await store.get_or_create("s", SUPPORT)
    with pytest.raises(StoreClosedError):  # noqa: PT012  # the turn fails at its end
        async with session.turn():
            await session.add_message(user("hello"))
            if where == "itself":
                await store.aclose(1000)
            else:
                await asyncio.create_task(store.aclose(1000))
    assert session.history == []


async def test_in_the_task_of_an_open_turn(store: StoreBackend) -> None:
    """Closing in the task that opened a turn does not wait for it, though the code is no member of the turn."""
    session = await store.get_or_create("s", SUPPORT)
    turn = Turn(session)

    async def open_and_close() -> None:
        before = contextvars.copy_context()
        await turn.take()
        closing = store.aclose(1000)
        # A coroutine's steps run in whatever context they are sent in.
        while True:
            try:
                waits_for = before.run(closing.send, None)
            except StopIteration:
                return
            while waits_for is not None and not waits_for.done():  # noqa: ASYNC110  # a future is waited for by hand
                await asyncio.sleep(0)

    await asyncio.create_task(open_and_close())
    await turn.drop()


async def test_cancelled(store: StoreBackend) -> None:
    """A cancellation of whoever closes ends the wait and not the closing: the store is closed when it comes through."""
    turn = await held(store)
    async with closing(store) as task:
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()
        with pytest.raises(StoreClosedError):
            await store.get("s")
    turn.end.set()
    with pytest.raises(StoreClosedError):
        await turn.task


async def test_cancelled_by_a_time_limit(store: StoreBackend) -> None:
    """A store whose closing takes longer than its caller waits is closed all the same."""
    turn = await held(store)
    with anyio.move_on_after(0.01) as limit:
        await store.aclose(1000)
    assert limit.cancelled_caught
    with pytest.raises(StoreClosedError):
        await store.get("s")
    turn.task.cancel()
    await asyncio.wait([turn.task])


async def test_end_of_a_block_that_was_cancelled(open_store: OpenStore) -> None:
    """A store whose block is left by a cancellation is closed, and the turn in it leaves no trace."""
    stores: list[StoreBackend] = []
    is_open = asyncio.Event()

    async def use() -> None:
        async with open_store() as store:
            stores.append(store)
            session = await store.get_or_create("s", SUPPORT)
            async with session.turn():
                is_open.set()
                await anyio.sleep_forever()

    task = asyncio.create_task(use())
    await is_open.wait()
    task.cancel()
    await asyncio.wait([task])
    with pytest.raises(StoreClosedError):
        await stores[0].get("s")


@pytest.mark.parametrize("grace", [0, 1000])
async def test_commit_under_way(grace: float, store: StoreBackend) -> None:
    """A turn that has ended and whose commit is on its way to the storage is waited for, past the grace too."""
    arrived, go_on = asyncio.Event(), asyncio.Event()

    async def wait() -> None:
        arrived.set()
        await go_on.wait()

    Faults(store).before("commit_turn", wait)
    session = await store.get_or_create("s", SUPPORT)
    committing = asyncio.create_task(outside(session.add_message(user("hello"))))
    await arrived.wait()
    async with closing(store, grace) as task:
        for _ in range(10):
            await asyncio.sleep(0)
        assert not task.done()
        go_on.set()
        await committing
    assert texts(session.history) == ["hello"]


async def test_turn_of_a_loop_that_is_gone(store: StoreBackend) -> None:
    """A turn that was left open in an event loop that has ended is not waited for."""

    async def leave_open() -> Turn:
        turn = Turn(await store.get_or_create("s", SUPPORT))
        await turn.take()
        return turn

    turn = await anyio.to_thread.run_sync(lambda: asyncio.run(leave_open()))
    await store.aclose(1000)
    assert turn.is_open


@pytest.mark.parametrize("grace", [None, "10", True, 1j])
async def test_grace_of_a_wrong_type(grace: Any, store: StoreBackend) -> None:
    """A grace that is no number is refused, and the store stays open."""
    with pytest.raises(TypeError, match="grace must be a number of seconds"):
        await store.aclose(grace)
    assert await store.get("s") is None
    await (await store.get_or_create("s", SUPPORT)).add_message(user("hello"))


@pytest.mark.parametrize("grace", [-1, -math.inf, math.nan])
async def test_grace_that_makes_no_sense(grace: float, store: StoreBackend) -> None:
    """A grace below 0 is refused, and the store stays open."""
    with pytest.raises(ValueError, match="grace must be at least 0"):
        await store.aclose(grace)
    await (await store.get_or_create("s", SUPPORT)).add_message(user("hello"))


# --- what is left of messages ---


class Silent:
    """Never answers."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()

    async def generate(self, request: EngineRequest) -> EngineReply:
        self.asked.set()
        await anyio.sleep_forever()
        raise AssertionError


async def close_under_a_message(store: StoreBackend) -> None:
    """Have a message under way when the store is closed, and its caller told of it."""
    engine = Silent()
    running = asyncio.create_task(outside(Runner(SUPPORT, store, engine).run_async("s", "hello", message_id="m")))
    await engine.asked.wait()
    await store.aclose(0)
    await asyncio.wait([running])
    assert running.cancelled()


async def test_message_goes_on_elsewhere(store: StoreBackend, second: StoreBackend) -> None:
    """A message whose store was closed under it is not forgotten, and goes on in another store on the same data."""
    await second.get("s")
    await close_under_a_message(store)
    (left,) = await second.pending_turns()
    assert (left.message_id, left.state, left.user_message) == ("m", "told", "hello")
    answer = await Runner(SUPPORT, second, ScriptedEngine(["later"])).run_async("s", "hello", message_id="m")
    assert answer.content == "later"


async def test_message_goes_on_after_a_restart(store: StoreBackend, restart: Restart) -> None:
    """A message whose store was closed under it goes on after a restart."""
    await close_under_a_message(store)
    after = await restart(store)
    (left,) = await after.pending_turns()
    assert (left.message_id, left.state) == ("m", "told")


async def test_row_of_one_that_ignores_it(store: StoreBackend, second: StoreBackend) -> None:
    """What a closed store still has in hand is free at once for another store on the same data, and not forgotten."""
    session = await store.get_or_create("s", SUPPORT)
    await second.get("s")
    turn = Turn(session, Claim("m", "hello"), "Support")
    assert await turn.take() is None
    bare = Turn(await store.get_or_create("t", SUPPORT))
    assert await bare.take() is None
    await store.aclose(0)
    (left,) = await second.pending_turns()
    assert (left.message_id, left.state) == ("m", "interrupted")
    await outside((await outside(second.get_or_create("t", SUPPORT))).add_message(user("free")))
    turn.response = AgentResponse(content="too late", active_agent_name="Support")
    with pytest.raises(StoreClosedError):
        await turn.commit()
    assert not await second.is_message_processed("m", session_id="s")
    await bare.drop()


async def test_accepted_message(store: StoreBackend, second: StoreBackend) -> None:
    """An accepted message that is being done when the store is closed waits for the next who works."""
    engine = Silent()
    await second.get("s")
    runner = Runner(SUPPORT, store, engine)
    await runner.accept("s", "hello", message_id="m")
    async with runner.working(grace=0):
        await engine.asked.wait()
        await store.aclose(0)
    (left,) = await second.pending_turns()
    assert (left.message_id, left.state) in {("m", "accepted"), ("m", "interrupted")}
    assert left.attempts <= 1
    answered = asyncio.Event()

    async def on_response(turn: object, response: AgentResponse) -> None:
        answered.set()

    async with Runner(SUPPORT, second, ScriptedEngine(["later"])).working(on_response):
        await answered.wait()
    assert await second.pending_turns() == ()
