from __future__ import annotations

import asyncio

import anyio

from chatflow.core.records import Key
from chatflow.postgres.gates import Gates
from chatflow.postgres.pool import Pool, Slot

KEY = Key("", "s")


async def test_first_come_first_served() -> None:
    """Whoever waits longest gets the slot that is given back."""
    pool, got = Pool(1), list[int]()
    mine = await pool.take(0)
    assert mine is not None

    async def take(number: int) -> None:
        slot = await pool.take(10)
        assert slot is mine
        got.append(number)
        pool.give(slot)

    async with anyio.create_task_group() as group:
        for number in range(3):
            group.start_soon(take, number)
        await anyio.wait_all_tasks_blocked()
        pool.give(mine)
    assert got == [0, 1, 2]


async def test_cancelled_while_waiting() -> None:
    """A slot that is given to somebody who is cancelled at that moment goes to the next one."""
    pool = Pool(1)
    mine = await pool.take(0)
    assert mine is not None
    first = asyncio.create_task(pool.take(10))
    second = asyncio.create_task(pool.take(10))
    third = asyncio.create_task(pool.take(10))
    await anyio.wait_all_tasks_blocked()
    second.cancel()
    await asyncio.wait([second])
    first.cancel()
    pool.give(mine)
    assert await third is mine
    assert first.cancelled()


def test_loop_that_is_gone() -> None:
    """A waiter whose event loop is closed is passed over."""
    pool, slots = Pool(1), list[Slot | None]()

    async def take(seconds: float) -> None:
        slots.append(await pool.take(seconds))

    there = asyncio.new_event_loop()
    there.run_until_complete(take(0))
    gone = asyncio.new_event_loop()
    waiting = gone.create_task(take(10))
    gone.run_until_complete(asyncio.sleep(0))
    gone.run_until_complete(asyncio.sleep(0))
    waiting._log_destroy_pending = False  # type: ignore[attr-defined]
    gone.close()
    mine = slots[0]
    assert mine is not None
    pool.give(mine)
    there.run_until_complete(take(0))
    there.close()
    assert slots[1] is mine


def test_taken_in_a_loop_that_is_gone() -> None:
    """A slot that was taken in an event loop that is closed is free for others, and no second one if it comes back."""
    pool = Pool(1)
    before = asyncio.run(pool.take(0))
    assert before is not None
    after = asyncio.run(pool.take(0))
    assert after is not None
    assert after is not before
    pool.give(before)
    there = asyncio.new_event_loop()
    assert there.run_until_complete(pool.take(0)) is not None
    assert there.run_until_complete(pool.take(0)) is None
    there.close()


async def test_gate_is_left_by_whoever_is_cancelled() -> None:
    """A gate that is opened for somebody who is cancelled at that moment is open for the next one."""
    gates, through = Gates(), list[int]()

    async def go(number: int) -> None:
        async with gates.through(KEY):
            through.append(number)

    async with gates.through(KEY):
        tasks = [asyncio.create_task(go(number)) for number in range(3)]
        await anyio.wait_all_tasks_blocked()
        tasks[1].cancel()
        await asyncio.wait([tasks[1]])
        tasks[0].cancel()
    await tasks[2]
    assert through == [2]
    assert tasks[0].cancelled()
    assert gates._waiters == {}


def test_gate_of_a_loop_that_is_gone() -> None:
    """Whoever waits at a gate in an event loop that is closed is passed over."""
    gates = Gates()

    async def go() -> None:
        async with gates.through(KEY):
            pass

    async def hold() -> None:
        async with gates.through(KEY):
            waiting = gone.create_task(go())
            waiting._log_destroy_pending = False  # type: ignore[attr-defined]
            await asyncio.to_thread(gone.run_until_complete, asyncio.sleep(0))
            await asyncio.to_thread(gone.run_until_complete, asyncio.sleep(0))
            gone.close()

    gone = asyncio.new_event_loop()
    asyncio.run(hold())
    assert gates._waiters == {}


def test_gate_that_is_held_in_a_loop_that_is_gone() -> None:
    """Whoever is inside in an event loop that is closed is passed over, and lets nobody in who leaves after that."""
    gates = Gates()
    there = gates.through(KEY)
    gone = asyncio.new_event_loop()
    gone.run_until_complete(there.__aenter__())
    gone.close()

    async def go() -> None:
        async with gates.through(KEY):
            inside = gates._inside[KEY]
            await there.__aexit__(None, None, None)
            assert gates._inside[KEY] is inside

    asyncio.run(go())
    assert gates._inside == {}


async def test_closed_pool() -> None:
    """A pool in use is not waited for longer than it may take, and what is given back to a closed one is closed."""
    pool = Pool(1)
    slot = await pool.take(0)
    assert slot is not None
    await pool.drain(0)
    pool.close()
    pool.give(slot)
    assert slot.connection is None
    await pool.drain(10)
