"""Turns that give no sign of life: those behind them go on, and what comes of the silent one changes nothing.

A row that was queued past its turn, or is no longer beaten, is what is left of a process that was stopped. Its lease is
short; how long it takes is nobody's business here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Final

import anyio.to_thread
import pytest

from chatflow.core.backend import StoreBackend
from chatflow.core.beats import Beats
from chatflow.core.engine import EngineReply, EngineRequest
from chatflow.core.journal import Entry
from chatflow.core.messages import AgentResponse
from chatflow.core.records import Beat, Beaten, Claim
from chatflow.core.session import SessionContext
from chatflow.core.turn import Turn
from chatflow.engines.scripted import ScriptedEngine
from chatflow.exceptions import SessionConflictError
from chatflow.runner import Runner
from chatflow.testing.conformance.conversation import (
    BILLING,
    SUPPORT,
    model,
    outside,
    queued,
    stored,
    texts,
    until,
    user,
)
from chatflow.testing.conformance.places import place_of, ticket

LEASE: Final = 0.03


def freeze(store: StoreBackend) -> None:
    """Give no more signs of life for the turns under way, as if the process had been stopped."""
    for turn in store.turns:
        assert turn.turn_id is not None
        store.beats.release(turn.turn_id, turn)


async def overtaken(session: SessionContext) -> None:
    """Stop giving signs of life, until somebody else has taken a turn meanwhile."""
    freeze(session.store)
    await outside(session.store.get_or_create("s", SUPPORT))
    await outside(wait_for_turn(session, "went on"))
    turn = session.member_turn
    assert turn is not None
    turn._seen_at = 0  # it was a long time


async def wait_for_turn(session: SessionContext, text: str) -> None:
    """Take a turn; who waits beats by its own lease."""
    async with session.turn(lease_seconds=LEASE):
        await session.add_message(user(text))


def in_line(store: StoreBackend) -> Callable[[], Coroutine[Any, Any, list[str]]]:
    """The states of all turns in the store."""

    async def look() -> list[str]:
        return [turn.state for turn in await store.pending_turns()]

    return look


async def test_waiting_behind_a_silent_turn(store: StoreBackend) -> None:
    """A turn that waits behind one that gives no sign of life has its place, and nothing is left of the silent one."""
    session = await store.get_or_create("s", SUPPORT)
    assert (await place_of(store, ticket(session, lease_seconds=LEASE))).running
    await wait_for_turn(session, "hello")
    assert texts(session.history) == ["hello"]
    assert await in_line(store)() == []


async def test_silent_places_in_line(store: StoreBackend) -> None:
    """A turn that waits behind several silent ones, running and queued, passes all of them."""
    session = await store.get_or_create("s", SUPPORT)
    for _ in range(3):
        await place_of(store, ticket(session, lease_seconds=LEASE))
    await wait_for_turn(session, "hello")
    assert await in_line(store)() == []


async def test_order_behind_a_silent_turn(store: StoreBackend) -> None:
    """Turns that wait behind a silent one have their places in the order they came."""
    session = await store.get_or_create("s", SUPPORT)
    await place_of(store, ticket(session, lease_seconds=LEASE))
    waiting: list[asyncio.Task[None]] = []
    for number in range(5):
        waiting.append(asyncio.create_task(outside(wait_for_turn(session, str(number)))))
        # On a slow machine the first ones may be through before the last one comes.
        await until(lambda: len(store.line._waiters) >= sum(not each.done() for each in waiting))
    await asyncio.gather(*waiting)
    assert texts(session.history) == ["0", "1", "2", "3", "4"]


async def test_living_turn_is_waited_for(store: StoreBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    """A turn that gives signs of life is waited for, for many leases."""
    session = await store.get_or_create("s", SUPPORT)
    beatings = 0
    beat_turns = store.beat_turns

    async def count(held: frozenset[int], watched: frozenset[int], *, everything: bool) -> Beaten:
        nonlocal beatings
        beatings += 1
        return await beat_turns(held, watched, everything=everything)

    monkeypatch.setattr(store, "beat_turns", count)
    async with session.turn(lease_seconds=LEASE):
        waiting = asyncio.create_task(outside(session.add_message(user("second"))))
        await queued(store, 1)
        while beatings < 30:  # noqa: ASYNC110  # what is looked at sets no event
            await asyncio.sleep(0)
        assert not waiting.done()
        await session.add_message(user("first"))
    await waiting
    assert texts(session.history) == ["first", "second"]


METHODS: dict[str, Callable[[SessionContext], Coroutine[Any, Any, object]]] = {
    "add_message": lambda session: session.add_message(user("lost")),
    "set_active_agent": lambda session: session.set_active_agent(BILLING),
    "clear_history": lambda session: session.clear_history(),
    "rollback_to": lambda session: session.rollback_to(0),
    "save": lambda session: session.save(),
}


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS.keys())
async def test_methods_of_an_overtaken_turn(
    store: StoreBackend, method: Callable[[SessionContext], Coroutine[Any, Any, object]]
) -> None:
    """Every awaited method of a turn that was overtaken says so, its end too, and nothing is changed."""
    session = await store.get_or_create("s", SUPPORT)
    with pytest.raises(SessionConflictError) as caught:  # noqa: PT012  # the turn fails at its end
        async with session.turn(lease_seconds=LEASE):
            session.state["lost"] = 1
            session.metadata["lost"] = 1
            await session.add_message(user("lost"))
            await overtaken(session)
            with pytest.raises(SessionConflictError):
                await method(session)
    assert caught.value.session_id == "s"
    there = await stored(store, "s")
    assert there is not None
    assert (texts(there["history"]), there["state"], there["metadata"], there["agent"]) == (
        ["went on"],
        {},
        {},
        "Support",
    )
    assert await in_line(store)() == []


class Overtaken:
    """Answers, and lets the turn be overtaken meanwhile."""

    def __init__(self, store: StoreBackend) -> None:
        self.store = store
        self.asked = 0

    async def generate(self, request: EngineRequest) -> EngineReply:
        self.asked += 1
        session = await self.store.get("s")
        assert session is not None
        await overtaken(session)
        return EngineReply(text="lost")


async def test_overtaken_run(store: StoreBackend) -> None:
    """A run that is overtaken while its model is asked fails, asks nothing more, and its message is not answered."""
    await store.get_or_create("s", SUPPORT)
    engine = Overtaken(store)
    with pytest.raises(SessionConflictError):
        await Runner(SUPPORT, store, engine, lease_seconds=LEASE).run_async("s", "hello", message_id="m")
    assert engine.asked == 1
    assert texts((await store.messages("s")).items) == ["went on"]
    assert not await store.is_message_processed("m", session_id="s")
    (left,) = await store.pending_turns()
    assert (left.message_id, left.state) == ("m", "interrupted")
    answer = await Runner(SUPPORT, store, ScriptedEngine(["again"])).run_async("s", "hello", message_id="m")
    assert answer.content == "again"


async def test_fence(store: StoreBackend) -> None:
    """A message whose row somebody else runs by now neither commits nor writes its journal, nor gives the row back."""
    session = await store.get_or_create("s", SUPPORT)
    taken, committed = asyncio.Event(), asyncio.Event()

    async def take_over() -> None:
        turn = Turn(session, Claim("m", "hello"), "Support", lease_seconds=LEASE)
        assert await turn.take() is None
        assert (turn.turn_id, turn.attempt > first.attempt) == (first.turn_id, True)
        taken.set()
        await committed.wait()
        await session.add_message(user("by the second"))
        turn.response = AgentResponse(content="yes", active_agent_name="Support")
        await turn.commit()

    first = Turn(session, Claim("m", "hello"), "Support", lease_seconds=LEASE)
    await first.take()
    await session.add_message(user("by the first"))
    freeze(store)
    second = asyncio.create_task(outside(take_over()))
    await taken.wait()
    with pytest.raises(SessionConflictError):
        await first.note(Entry(iteration=0, message=model("lost")), durable=True)
    first.response = AgentResponse(content="no", active_agent_name="Support")
    with pytest.raises(SessionConflictError):
        await first.commit()
    assert await in_line(store)() == ["running"]
    committed.set()
    await second
    assert texts((await store.messages("s")).items) == ["by the second"]
    assert await in_line(store)() == []


async def test_silent_and_not_overtaken(store: StoreBackend) -> None:
    """A turn that was silent for long and that nobody waited behind commits as usual."""
    session = await store.get_or_create("s", SUPPORT)
    async with session.turn(lease_seconds=LEASE):
        await session.add_message(user("slow"))
        freeze(store)
        assert session.member_turn is not None
        session.member_turn._seen_at = 0
        await session.add_message(user("and slow"))
    assert texts((await store.messages("s")).items) == ["slow", "and slow"]


async def test_silent_message_is_done_first(store: StoreBackend) -> None:
    """The run behind a silent message answers that first, and then its own; whoever sends it again gets the answer."""
    session = await store.get_or_create("s", SUPPORT)
    assert (await place_of(store, ticket(session, "m", "hello", lease_seconds=LEASE))).running
    runner = Runner(SUPPORT, store, ScriptedEngine(["for m", "for me"]), lease_seconds=LEASE)
    assert (await runner.run_async("s", "and I?")).content == "for me"
    assert texts((await store.messages("s")).items) == ["hello", "for m", "and I?", "for me"]
    again = await runner.run_async("s", "hello", message_id="m")
    assert (again.content, again.duplicate) == ("for m", True)


async def test_turn_passes_a_silent_message(store: StoreBackend) -> None:
    """A turn without a runner passes a silent message by, which keeps its place and waits for a runner."""
    session = await store.get_or_create("s", SUPPORT)
    await place_of(store, ticket(session, "m", "hello", lease_seconds=LEASE))
    await wait_for_turn(session, "bare")
    assert await in_line(store)() == ["interrupted"]


async def test_two_wait_for_one_silent_message(store: StoreBackend) -> None:
    """Of two deliveries that wait for a message whose turn is silent, one goes on with it and both have its answer."""
    session = await store.get_or_create("s", SUPPORT)
    await place_of(store, ticket(session, "m", "hello", lease_seconds=LEASE))
    runner = Runner(SUPPORT, store, ScriptedEngine(["once"]), lease_seconds=LEASE)
    answers = await asyncio.gather(*(outside(runner.run_async("s", "hello", message_id="m")) for _ in range(2)))
    assert [answer.content for answer in answers] == ["once", "once"]
    assert sorted(answer.duplicate for answer in answers) == [False, True]


async def test_beat_that_came_in_time(store: StoreBackend) -> None:
    """A row is not interrupted that has been beaten since its watcher looked, nor one that was taken by another."""
    session = await store.get_or_create("s", SUPPORT)
    place = await place_of(store, ticket(session, "m"))
    seen = Beat(turn_id=place.turn_id, attempt=place.attempt, beat=0, lease_seconds=10)
    beaten = await store.beat_turns(frozenset({place.turn_id}), frozenset(), everything=False)
    assert beaten == Beaten(own={place.turn_id: place.attempt}, others=())
    assert not await store.interrupt_turn(seen)
    assert not await store.interrupt_turn(Beat(turn_id=place.turn_id, attempt=7, beat=1, lease_seconds=10))
    assert await store.interrupt_turn(Beat(turn_id=place.turn_id, attempt=place.attempt, beat=1, lease_seconds=10))
    assert not await store.interrupt_turn(Beat(turn_id=place.turn_id, attempt=place.attempt, beat=1, lease_seconds=10))
    assert not await store.interrupt_turn(Beat(turn_id=place.turn_id + 1, attempt=1, beat=1, lease_seconds=10))


async def test_what_a_beat_reads(store: StoreBackend) -> None:
    """A beat reads the rows in the lines of those held that wait, and those watched; or all that are held."""
    session, other, third = [await store.get_or_create(each, SUPPORT) for each in ("s", "t", "u")]
    runs, waits = [await place_of(store, ticket(session)) for _ in range(2)]
    elsewhere, unseen = await place_of(store, ticket(other)), await place_of(store, ticket(third))

    async def beat(held: set[int], watched: set[int], *, everything: bool = False) -> tuple[set[int], set[int]]:
        found = await store.beat_turns(frozenset(held), frozenset(watched), everything=everything)
        return set(found.own), {each.turn_id for each in found.others}

    assert await beat({waits.turn_id}, set()) == ({waits.turn_id}, {runs.turn_id})
    assert await beat({runs.turn_id}, set()) == ({runs.turn_id}, set())
    assert await beat(set(), {elsewhere.turn_id}) == (set(), {elsewhere.turn_id})
    everything = {each.turn_id for each in (runs, waits, elsewhere, unseen)}
    assert await beat({waits.turn_id}, set(), everything=True) == ({waits.turn_id}, everything - {waits.turn_id})


async def test_open_turn_of_a_loop_that_is_gone(store: StoreBackend) -> None:
    """A turn that was left open in an event loop that has ended holds nobody up for longer than its lease."""

    async def leave_open() -> Turn:
        turn = Turn(await store.get_or_create("s", SUPPORT), lease_seconds=LEASE)
        await turn.take()
        return turn

    turn = await anyio.to_thread.run_sync(lambda: asyncio.run(leave_open()))
    assert turn.is_open
    assert not turn.is_under_way
    session = await store.get_or_create("s", SUPPORT)
    await wait_for_turn(session, "hello")
    await store.aclose()


async def test_loop_that_beats_for_itself(store: StoreBackend) -> None:
    """Turns of two event loops are beaten by their own, and a loop sees the other's as anybody's."""
    session = await store.get_or_create("s", SUPPORT)

    async def wait() -> bool:
        theirs = await store.get_or_create("s", SUPPORT)
        async with theirs.turn(lease_seconds=LEASE):
            return store.beats is not mine

    mine: Beats = store.beats
    async with session.turn(lease_seconds=10):
        waiting = asyncio.create_task(outside(anyio.to_thread.run_sync(lambda: asyncio.run(wait()))))
        await queued(store, 1)
        assert len(store.turns) == 2
        assert len(mine.turns) == 1
    assert await waiting


async def test_message_dead_after_as_many_takeovers(store: StoreBackend) -> None:
    """A message whose holder goes silent each time is given up after max_attempts, and the line goes on."""
    session = await store.get_or_create("s", SUPPORT)
    for _ in range(2):
        turn = Turn(session, Claim("m", "hello"), "Support", lease_seconds=LEASE, max_attempts=2)
        assert await outside(turn.take()) is None
        assert turn.turn_id is not None
        store.beats.release(turn.turn_id, turn)
        await wait_for_turn(session, "passes")
    await Runner(SUPPORT, store, ScriptedEngine(["next"]), max_attempts=2).run_async("s", "next")
    assert await in_line(store)() == ["dead"]
