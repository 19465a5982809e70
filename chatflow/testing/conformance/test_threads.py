from __future__ import annotations

import contextvars
import threading
from collections.abc import Awaitable, Callable
from functools import partial

import anyio
import anyio.to_thread

from chatflow.core.backend import StoreBackend
from chatflow.core.session import SessionContext
from chatflow.exceptions import SessionDeletedError
from chatflow.testing.conformance.conftest import OpenStore
from chatflow.testing.conformance.conversation import SUPPORT, queued, say, texts, user

THREADS = 8
TURNS = 100


async def in_threads(body: Callable[[int], Awaitable[None]], threads: int = THREADS) -> None:
    """Run *body* with its number in so many threads, each with an event loop of its own."""

    def run(number: int) -> None:
        contextvars.Context().run(anyio.run, body, number)

    limiter = anyio.CapacityLimiter(threads)
    async with anyio.create_task_group() as group:
        for number in range(threads):
            group.start_soon(partial(anyio.to_thread.run_sync, run, number, limiter=limiter))


async def test_turns_of_threads(open_store: OpenStore) -> None:
    """Eight loops with a hundred turns each give 800 turns, no two at once, all kept, in the order queued (P3).

    A turn's id is given out when its row joins the line, so the ids tell the order in which the turns were queued.
    """
    store = open_store(default_max_turns=THREADS * TURNS)
    await store.get_or_create("s", SUPPORT)
    inside = threading.Semaphore(1)
    ran: list[tuple[int, int, int]] = []

    async def turns(thread: int) -> None:
        session = await store.get_or_create("s", SUPPORT)
        for number in range(TURNS):
            async with session.turn():
                assert inside.acquire(blocking=False), "two turns at once"
                assert session.member_turn is not None
                assert session.member_turn.turn_id is not None
                ran.append((session.member_turn.turn_id, thread, number))
                await session.add_message(user(f"{thread}/{number}"))
                inside.release()

    await in_threads(turns)
    assert len(ran) == THREADS * TURNS
    assert ran == sorted(ran)
    for thread in range(THREADS):
        assert [number for _, each, number in ran if each == thread] == list(range(TURNS))
    said = [f"{thread}/{number}" for _, thread, number in ran]
    session = await store.get("s")
    assert session is not None
    assert texts(session.history) == said
    assert texts((await store.messages("s", limit=1000)).items) == said


async def test_turn_ids_tell_the_order(store: StoreBackend) -> None:
    """Turns that are queued one after the other, by loops in turn, have growing ids."""
    ids: list[int] = []
    lock = threading.Lock()

    async def turn(number: int) -> None:
        session = await store.get_or_create("s", SUPPORT)
        with lock:
            async with session.turn():
                assert session.member_turn is not None
                assert session.member_turn.turn_id is not None
                ids.append(session.member_turn.turn_id)

    await in_threads(turn)
    assert ids == sorted(set(ids))


async def test_queue_of_threads(store: StoreBackend) -> None:
    """Turns that eight loops have queued behind an open one run in the order they were queued."""
    mine = await store.get_or_create("s", SUPPORT)
    may_queue = [threading.Event() for _ in range(THREADS)]

    async def turn(number: int) -> None:
        session = await store.get_or_create("s", SUPPORT)
        await anyio.to_thread.run_sync(may_queue[number].wait)
        await session.add_message(user(str(number)))

    async def let_queue() -> None:
        async with mine.turn():
            for number in (5, 2, 7, 0, 1, 6, 3, 4):
                before = len(store.line._waiters)
                may_queue[number].set()
                await queued(store, before + 1)

    async with anyio.create_task_group() as group:
        group.start_soon(in_threads, turn)
        group.start_soon(let_queue)
    await store.get("s")
    assert texts(mine.history) == ["5", "2", "7", "0", "1", "6", "3", "4"]


async def test_many_turns_queued_by_threads(open_store: OpenStore) -> None:
    """With eight loops that queue ten turns each at once, the turns run in the order queued and none is lost."""
    store = open_store(default_max_turns=1000)
    await store.get_or_create("s", SUPPORT)
    ran: list[int] = []

    async def turn(session: SessionContext) -> None:
        async with session.turn():
            assert session.member_turn is not None
            assert session.member_turn.turn_id is not None
            ran.append(session.member_turn.turn_id)
            await session.add_message(user(str(session.member_turn.turn_id)))

    async def turns(thread: int) -> None:
        session = await store.get_or_create("s", SUPPORT)
        async with anyio.create_task_group() as group:
            for _ in range(10):
                group.start_soon(turn, session)

    await in_threads(turns)
    assert len(ran) == 80
    assert ran == sorted(ran)
    assert texts((await store.messages("s")).items) == [str(turn_id) for turn_id in ran]


async def test_conversations_of_threads(store: StoreBackend) -> None:
    """Loops that use conversations of their own don't get in each other's way."""

    async def turns(thread: int) -> None:
        session = await store.get_or_create(str(thread), SUPPORT)
        await say(session, "one", "two", "three")

    await in_threads(turns)
    for thread in range(THREADS):
        assert len((await store.messages(str(thread))).items) == 6


async def test_object_a_loop(store: StoreBackend) -> None:
    """Each loop has a session object of its own, which shows what the others have committed."""
    mine = await store.get_or_create("s", SUPPORT)
    found: list[SessionContext] = []

    async def use(thread: int) -> None:
        session = await store.get_or_create("s", SUPPORT)
        assert await store.get_or_create("s", SUPPORT) is session
        await session.add_message(user(str(thread)))
        found.append(session)

    await in_threads(use, 2)
    assert len({id(session) for session in (mine, *found)}) == 3
    await store.get("s")
    assert sorted(texts(mine.history)) == ["0", "1"]


async def test_one_winner_of_eight_threads(store: StoreBackend) -> None:
    """Of eight loops that mark the same ids at once, exactly one is told True for each (P4)."""
    won: list[str] = []

    async def mark(thread: int) -> None:
        won.extend([str(number) for number in range(50) if await store.mark_message_processed(str(number))])

    await in_threads(mark)
    assert sorted(won) == sorted(str(number) for number in range(50))


async def test_created_once_by_threads(store: StoreBackend) -> None:
    """Loops that create the same conversation at once, each with metadata, get one with the metadata of all."""

    async def create(thread: int) -> None:
        await store.get_or_create("s", SUPPORT, {str(thread): thread})

    await in_threads(create)
    assert len((await store.list_sessions()).items) == 1
    session = await store.get("s")
    assert session is not None
    assert session.metadata == {str(thread): thread for thread in range(THREADS)}


async def test_deleted_by_another_loop(store: StoreBackend) -> None:
    """A session whose conversation another loop has deleted says so."""
    session = await store.get_or_create("s", SUPPORT)

    async def delete(thread: int) -> None:
        await store.delete("s")

    await in_threads(delete, 1)
    refused = False
    try:
        await session.add_message(user("back"))
    except SessionDeletedError:
        refused = True
    assert refused
    assert await store.get("s") is None


async def test_store_outlives_loops(store: StoreBackend) -> None:
    """A store goes on in a new loop after the loop that used it first has ended."""

    async def use(number: int) -> None:
        await say(await store.get_or_create("s", SUPPORT), "hello")

    await in_threads(use, 1)
    await in_threads(use, 1)
    assert len((await store.messages("s")).items) == 4
