"""Signs of life in virtual time: which rows are beaten, when, and what becomes of those that are not."""

from __future__ import annotations

import asyncio
import gc
import logging
import subprocess
import sys
import threading
import weakref
from collections.abc import Coroutine, Iterator
from itertools import pairwise
from typing import Any, Final

import attrs
import pytest

from chatflow.core.beats import DEFAULT_LEASE_SECONDS
from chatflow.core.memory import SessionStore
from chatflow.core.records import Beat, Beaten, Claim, Commit, Committed, Key, Lost, Place, Snapshot, Ticket
from chatflow.core.session import SessionContext
from chatflow.core.store import BaseSessionStore
from chatflow.core.turn import Turn
from chatflow.exceptions import SessionConflictError, StoreClosedError, StoreError
from chatflow.testing.conformance.conversation import SUPPORT, outside, texts, user
from chatflow.testing.conformance.places import leave, place_of, ticket
from tests.virtual_time import VirtualLoop

LEASE: Final = 9.0


@attrs.frozen
class Beating:
    """One statement that raises beats."""

    at: float
    held: frozenset[int]
    watched: frozenset[int]
    everything: bool


class Store(SessionStore):
    """Notes each beat; how long each has to wait for the storage, and how long a commit's answer is under way."""

    def __init__(self) -> None:
        super().__init__()
        self.beatings: list[Beating] = []
        self.waits = 0.0
        self.fails: Exception | None = None
        self.interrupted: list[int] = []
        self.answers_after = 0.0

    async def commit_turn(self, commit: Commit, key: Key) -> Committed | Lost:
        committed = await super().commit_turn(commit, key)
        await asyncio.sleep(self.answers_after)
        return committed

    async def beat_turns(self, held: frozenset[int], watched: frozenset[int], *, everything: bool) -> Beaten:
        self.beatings.append(Beating(asyncio.get_running_loop().time(), held, watched, everything))
        await asyncio.sleep(self.waits)
        if self.fails is not None:
            raise self.fails
        return await super().beat_turns(held, watched, everything=everything)

    async def interrupt_turn(self, beat: Beat) -> bool:
        self.interrupted.append(beat.turn_id)
        return await super().interrupt_turn(beat)

    @property
    def times(self) -> list[float]:
        """When it was beaten."""
        return [beating.at for beating in self.beatings]


@pytest.fixture
def loop() -> Iterator[VirtualLoop]:
    """A loop in virtual time."""
    loop = VirtualLoop()
    yield loop
    loop.end()


@pytest.fixture
def store() -> Store:
    """A store in memory that notes its beats."""
    return Store()


async def session_of(store: BaseSessionStore, session_id: str = "s") -> SessionContext:
    """A conversation."""
    return await store.get_or_create(session_id, SUPPORT)


async def hold(session: SessionContext, seconds: float, lease_seconds: float = LEASE) -> int:
    """Have a turn for so long, and return its row's id."""
    async with session.turn(lease_seconds=lease_seconds):
        assert session.member_turn is not None
        assert session.member_turn.turn_id is not None
        turn_id = session.member_turn.turn_id
        await asyncio.sleep(seconds)
    return turn_id


# --- what is beaten, and when ---


def test_each_third_of_the_lease(loop: VirtualLoop, store: Store) -> None:
    """A running turn is beaten each third of its lease, and no more once it has ended."""

    async def one() -> int:
        turn_id = await hold(await session_of(store), 10)
        await asyncio.sleep(1000)
        return turn_id

    turn_id = loop.run(one())
    assert store.beatings == [Beating(at, frozenset({turn_id}), frozenset(), everything=False) for at in (3, 6, 9)]


def test_one_statement_for_all(loop: VirtualLoop, store: Store) -> None:
    """However many turns begin, one statement each third of the lease beats all of them."""

    async def many() -> None:
        async with asyncio.TaskGroup() as group:
            for number in range(50):
                group.create_task(outside(hold(await session_of(store, str(number)), 20 - number * 0.1)))
                await asyncio.sleep(0.1)

    loop.run(many())
    assert store.times == [3, 6, 9, 12, 15, 18]
    assert [len(beating.held) for beating in store.beatings] == [30, 50, 50, 50, 50, 50]


def test_a_row_that_its_own_commit_has_ended(loop: VirtualLoop, store: Store, caplog: pytest.LogCaptureFixture) -> None:
    """A beat that finds a row gone while its commit's answer is under way takes nothing for lost, and says nothing."""
    store.answers_after = 4

    async def one() -> None:
        session = await session_of(store)
        async with session.turn(lease_seconds=LEASE):
            await session.add_message(user("hello"))
        assert [message.text for message in session.history] == ["hello"]

    loop.run(one())
    assert store.times == [3]
    assert caplog.messages == []


def test_by_the_shortest_lease(loop: VirtualLoop, store: Store) -> None:
    """While turns of several leases run, all are beaten each third of the shortest."""

    async def several() -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(outside(hold(await session_of(store, "long"), 7, 30)))
            await asyncio.sleep(1)
            group.create_task(outside(hold(await session_of(store, "short"), 3.5, 3)))

    loop.run(several())
    assert store.times == [2, 3, 4, 5]
    assert [len(beating.held) for beating in store.beatings] == [2, 2, 2, 1]


def test_queued_turns(loop: VirtualLoop, store: Store) -> None:
    """Turns that wait for their place are beaten as those that run."""

    async def line() -> None:
        session = await session_of(store)
        async with asyncio.TaskGroup() as group:
            for _ in range(3):
                group.create_task(outside(hold(session, 4)))

    loop.run(line())
    assert [len(beating.held) for beating in store.beatings] == [3, 2, 1]
    assert store.times == [3, 6, 9]


def test_only_what_is_awaited(loop: VirtualLoop, store: Store) -> None:
    """A row that nobody of this process awaits is not beaten, though it bears the process's name."""

    async def beside() -> None:
        await place_of(store, ticket(await session_of(store, "another's")))
        await hold(await session_of(store), 10)

    loop.run(beside())
    assert [len(beating.held) for beating in store.beatings] == [1, 1, 1]


def test_short_turns(loop: VirtualLoop, store: Store) -> None:
    """Turns that end within a third of their lease are not beaten, one after the other for however long."""

    async def talk() -> None:
        session = await session_of(store)
        for _ in range(100):
            await hold(session, 0.5)

    loop.run(talk())
    assert len(store.times) == 16
    assert [now - before for before, now in pairwise(store.times)] == [3] * 15


def test_nothing_to_beat(loop: VirtualLoop, store: Store) -> None:
    """A store without turns under way has neither a task nor a beat, and its timer is not set again."""

    async def idle() -> tuple[int, int]:
        await hold(await session_of(store), 0)
        await asyncio.sleep(1000)
        return len(asyncio.all_tasks()), len(loop._scheduled)  # type: ignore[attr-defined]  # asyncio's own

    assert loop.run(idle()) == (1, 0)
    assert store.beatings == []


def test_loops_beat_their_own(store: Store) -> None:
    """Each event loop beats its own turns and no other's."""
    loops = [VirtualLoop(), VirtualLoop()]
    ids: list[int] = []

    async def open_one(session_id: str) -> Turn:
        turn = Turn(await session_of(store, session_id), lease_seconds=LEASE)
        await turn.take()
        assert turn.turn_id is not None
        ids.append(turn.turn_id)
        return turn

    turns = [each.run(open_one(str(number))) for number, each in enumerate(loops)]
    for each in loops:
        each.run(asyncio.sleep(3.5))
    assert [beating.held for beating in store.beatings] == [{turn_id} for turn_id in ids]
    assert store.turns == turns
    for each, turn in zip(loops, turns, strict=True):
        each.run(turn.drop())
        each.end()


def test_in_a_context_of_its_own(loop: VirtualLoop, store: Store) -> None:
    """What beats belongs to no turn, though it was a turn's code that began it."""
    seen: list[bool] = []

    class Looking(Store):
        async def beat_turns(self, held: frozenset[int], watched: frozenset[int], *, everything: bool) -> Beaten:
            seen.append(session.member_turn is not None)
            return await super().beat_turns(held, watched, everything=everything)

    async def nest() -> None:
        async with session.turn(lease_seconds=LEASE):
            await hold(await session_of(session.store, "inner"), 2.5, 3)

    session = loop.run(session_of(Looking()))
    loop.run(nest())
    assert seen == [False, False]


# --- those behind which somebody waits ---


def test_takes_over_from_a_silent_one(loop: VirtualLoop, store: Store, caplog: pytest.LogCaptureFixture) -> None:
    """Who waits behind a row that is never beaten has its place after four beats of its own, with the first at once."""

    async def wait() -> None:
        session = await session_of(store)
        assert (await place_of(store, ticket(session, lease_seconds=LEASE))).running
        # In memory all rows bear one name, so that it takes them for those of another event loop.
        await hold(session, 0)

    caplog.set_level(logging.WARNING, "chatflow.turn")
    loop.run(wait())
    assert store.times[-1] - store.times[0] == pytest.approx(4 * LEASE / 3)
    assert len(store.interrupted) == 1
    assert "gave no sign of life for longer than its lease of 9 s" in caplog.text


class Elsewhere(Store):
    """Says of each place that another process's turn stands before it."""

    async def queue_turn(self, ticket: Ticket) -> Any:
        return elsewhere_of(await super().queue_turn(ticket))

    async def start_turn(
        self, turn_id: int, attempt: int, key: Key, known: Snapshot | None, max_attempts: int | None
    ) -> Any:
        return elsewhere_of(await super().start_turn(turn_id, attempt, key, known, max_attempts))


def elsewhere_of(found: Any) -> Any:
    """The place as one behind another process."""
    return attrs.evolve(found, behind_own=False) if isinstance(found, Place) else found


def test_behind_another_process(loop: VirtualLoop) -> None:
    """Who waits behind another process looks for its place often, and beats once at first, then each third."""
    store = Elsewhere()

    async def wait() -> float:
        session = await session_of(store)
        await place_of(store, ticket(session, lease_seconds=LEASE))
        await asyncio.sleep(1)
        async with session.turn(lease_seconds=LEASE):
            return loop.time()

    assert 13 <= loop.run(wait()) <= 13.5
    assert store.times == [1, 4, 7, 10, 13]


def test_place_that_has_come_elsewhere(loop: VirtualLoop) -> None:
    """Who waits behind another process has its place soon after that one has left, though nobody wakes it."""
    store = Elsewhere()

    async def wait() -> None:
        session = await session_of(store)
        place = await place_of(store, ticket(session, lease_seconds=LEASE))
        waiting = asyncio.create_task(outside(hold(session, 0)))
        await asyncio.sleep(5)
        await leave(store, place)
        await asyncio.sleep(1)
        assert waiting.done()

    loop.run(wait())
    assert store.interrupted == []


def test_not_from_one_that_beats(loop: VirtualLoop, store: Store) -> None:
    """Who waits behind a row that is beaten in time waits for as long as that takes."""

    async def wait() -> None:
        session = await session_of(store)
        place = await place_of(store, ticket(session, lease_seconds=LEASE))
        waiting = asyncio.create_task(outside(hold(session, 0)))
        for _ in range(100):
            await asyncio.sleep(LEASE)
            await SessionStore.beat_turns(store, frozenset({place.turn_id}), frozenset(), everything=False)
        assert not waiting.done()
        assert store.interrupted == []
        await asyncio.sleep(2 * LEASE)
        assert waiting.done()

    loop.run(wait())


def test_beat_that_comes_at_the_last_moment(loop: VirtualLoop, caplog: pytest.LogCaptureFixture) -> None:
    """A row that is beaten after its watcher has looked, and before it marks the row, is watched on, and not logged."""

    class Late(Store):
        async def interrupt_turn(self, beat: Beat) -> bool:
            if not self.interrupted:
                await SessionStore.beat_turns(self, frozenset({beat.turn_id}), frozenset(), everything=False)
            return await super().interrupt_turn(beat)

    store = Late()

    async def wait() -> None:
        session = await session_of(store)
        await place_of(store, ticket(session, lease_seconds=LEASE))
        await hold(session, 0)

    caplog.set_level(logging.WARNING, "chatflow.turn")
    loop.run(wait())
    assert len(store.interrupted) == 2
    assert caplog.text.count("gave no sign of life") == 1


def test_storage_was_held_by_somebody_else(loop: VirtualLoop, store: Store) -> None:
    """While nobody can write for many leases nobody is taken for silent, not by whoever gets to write first either."""

    async def wait() -> None:
        session = await session_of(store)
        place = await place_of(store, ticket(session, lease_seconds=LEASE))
        waiting = asyncio.create_task(outside(hold(session, 0)))
        await asyncio.sleep(1)
        for _ in range(20):
            store.waits = 10 * LEASE
            await asyncio.sleep(10 * LEASE + 2)
            # The holder's own beat has waited as well, and comes a moment after.
            store.waits = 0
            await SessionStore.beat_turns(store, frozenset({place.turn_id}), frozenset(), everything=False)
        assert not waiting.done()
        waiting.cancel()
        await asyncio.wait([waiting])

    loop.run(wait())
    assert store.interrupted == []


def test_beats_that_fail(loop: VirtualLoop, store: Store, caplog: pytest.LogCaptureFixture) -> None:
    """A beat that can't be written is logged and tried again in time; it counts for nobody's silence."""

    async def wait() -> None:
        session = await session_of(store)
        await place_of(store, ticket(session, lease_seconds=LEASE))
        waiting = asyncio.create_task(outside(hold(session, 0)))
        store.fails = StoreError("no room", store="s")
        await asyncio.sleep(30)
        assert store.interrupted == []
        failed = list(store.times)
        assert [now - before for before, now in pairwise(failed[1:])] == [3] * (len(failed) - 2)
        store.fails = None
        await waiting
        assert store.times[-1] - store.times[len(failed)] >= 4 * LEASE / 3

    caplog.set_level(logging.WARNING, "chatflow.turn")
    loop.run(wait())
    assert "no beat of the turns under way could be written: no room" in caplog.text


def test_duplicate_watches_the_first(loop: VirtualLoop, store: Store) -> None:
    """Who waits for the answer to its message watches the row that answers it, and takes it over if it is silent."""

    async def wait() -> None:
        session = await session_of(store)
        first = await place_of(store, ticket(session, "m", lease_seconds=LEASE))
        turn = Turn(session, Claim("m", "hello"), "Support", lease_seconds=LEASE)
        assert await turn.take() is None
        assert turn.turn_id == first.turn_id
        await turn.drop()

    loop.run(wait())
    assert store.beatings[0].watched == store.beatings[-1].watched
    assert len(store.beatings[0].watched) == 1
    assert store.times[-1] - store.times[0] == pytest.approx(4 * LEASE / 3)
    assert len(store.times) == 5


def test_two_that_watch_one_row(loop: VirtualLoop, store: Store) -> None:
    """A row that two wait for is watched until the second has left."""

    async def watch() -> None:
        beats = store.beats
        with beats.watching(7):
            with beats.watching(7):
                await asyncio.sleep(1)
            await asyncio.sleep(10)
        await asyncio.sleep(100)

    loop.run(watch())
    assert {beating.watched for beating in store.beatings} == {frozenset({7})}
    assert store.times == pytest.approx([0, *(number * DEFAULT_LEASE_SECONDS / 3 for number in (1, 2, 3))])


def test_watching_all(loop: VirtualLoop, store: Store) -> None:
    """Whoever does others' work watches every row that somebody holds, and interrupts the silent ones alone."""

    async def watch() -> None:
        silent = await place_of(store, ticket(await session_of(store, "silent"), "m", lease_seconds=LEASE))
        holding = asyncio.create_task(outside(hold(await session_of(store, "living"), 40)))
        with store.beats.watching_all(LEASE):
            await asyncio.sleep(30)
        assert store.interrupted == [silent.turn_id]
        assert {turn.turn_id: turn.state for turn in await store.pending_turns()}[silent.turn_id] == "interrupted"
        await holding

    loop.run(watch())
    assert {beating.everything for beating in store.beatings if beating.at < 30} == {True}
    assert {beating.everything for beating in store.beatings if beating.at > 30} == {False}


# --- a turn that was taken away ---


def elsewhere(operation: Coroutine[Any, Any, object]) -> None:
    """Run *operation* in another thread's loop, while this one is blocked."""
    thread = threading.Thread(target=asyncio.run, args=(operation,))
    thread.start()
    thread.join()


def interrupt_meanwhile(store: Store, session: SessionContext) -> None:
    """Take the open turn away, as somebody does who has watched it."""
    turn = session.member_turn
    assert turn is not None
    assert turn.turn_id is not None
    found = store._tables.rows.turn(turn.turn_id)
    beat = Beat(turn_id=turn.turn_id, attempt=turn.attempt, beat=found.beat, lease_seconds=LEASE)
    elsewhere(SessionStore.interrupt_turn(store, beat))


BLOCKED: Final = "its event loop was blocked for 17.0 s, and its lease is 9 s"


@pytest.mark.parametrize("first", ["commit", "beat", "method"])
def test_blocked_loop(first: str, loop: VirtualLoop, store: Store, caplog: pytest.LogCaptureFixture) -> None:
    """A turn whose code blocks the loop for longer than the lease is lost, and the log says once how long that was."""

    async def block() -> None:
        session = await session_of(store)
        with pytest.raises(SessionConflictError):  # noqa: PT012  # the turn fails at its end
            async with session.turn(lease_seconds=LEASE):
                await session.add_message(user("lost"))
                loop.passes(20)
                interrupt_meanwhile(store, session)
                assert session.member_turn is not None
                session.member_turn._seen_at = 0
                if first == "beat":
                    await asyncio.sleep(10)
                if first == "method":
                    with pytest.raises(SessionConflictError):
                        await session.add_message(user("lost too"))
        assert session.history == []
        await session.add_message(user("next"))
        assert texts(session.history) == ["next"]

    caplog.set_level(logging.WARNING, "chatflow.turn")
    loop.run(block())
    assert caplog.text.count("lost its place") == 1
    assert BLOCKED in caplog.text


def test_blocked_and_not_taken(loop: VirtualLoop, store: Store, caplog: pytest.LogCaptureFixture) -> None:
    """A turn whose loop was blocked for longer than its lease, and that nobody took, commits as usual."""

    async def block() -> None:
        session = await session_of(store)
        async with session.turn(lease_seconds=LEASE):
            await session.add_message(user("hello"))
            loop.passes(1000)
        assert texts((await store.messages("s")).items) == ["hello"]

    loop.run(block())
    assert caplog.text == ""


def test_taken_while_the_loop_ran(loop: VirtualLoop, store: Store, caplog: pytest.LogCaptureFixture) -> None:
    """A turn that was taken away though its loop ran, since it could not write, is told apart in the log."""

    async def lose() -> None:
        session = await session_of(store)
        with pytest.raises(SessionConflictError):  # noqa: PT012  # the turn fails at its end
            async with session.turn(lease_seconds=LEASE):
                interrupt_meanwhile(store, session)
                await asyncio.sleep(10)
                assert "lost its place" in caplog.text
                await session.add_message(user("lost"))

    caplog.set_level(logging.WARNING, "chatflow.turn")
    loop.run(lose())
    assert "lost its place: it was taken, or the conversation deleted" in caplog.text


def test_queued_place_taken(loop: VirtualLoop, store: Store) -> None:
    """A queued turn learns by its beat that its place was taken, and queues again behind those who came meanwhile."""

    async def lose() -> None:
        session = await session_of(store)
        async with session.turn(lease_seconds=LEASE):
            waiting = asyncio.create_task(outside(session.add_message(user("waits"))))
            await asyncio.sleep(0.1)
            (queued,) = [turn.turn_id for turn in await store.pending_turns() if turn.state == "queued"]
            behind = asyncio.create_task(outside(session.add_message(user("came meanwhile"))))
            await asyncio.sleep(0.1)
            (attempt,) = [turn.attempt for turn in store.turns if turn.turn_id == queued]
            silent = Beat(turn_id=queued, attempt=attempt, beat=0, lease_seconds=LEASE)
            await SessionStore.interrupt_turn(store, silent)
            await asyncio.sleep(4)
            assert [turn.state for turn in await store.pending_turns()] == ["running", "queued", "queued"]
        await asyncio.wait([waiting, behind])
        assert texts(session.history) == ["came meanwhile", "waits"]

    loop.run(lose())


# --- what is kept alive ---


def test_forgotten_store(loop: VirtualLoop) -> None:
    """A store that is forgotten goes, though the timer of a turn it has had is still set."""

    async def forget() -> weakref.ref[Store]:
        store = Store()
        await hold(await session_of(store), 0)
        return weakref.ref(store)

    forgotten = loop.run(forget())
    gc.collect()
    assert loop._scheduled  # type: ignore[attr-defined]  # asyncio's own
    assert forgotten() is None
    loop.run(asyncio.sleep(10))


def test_beat_of_a_forgotten_store(loop: VirtualLoop) -> None:
    """A beat whose store is gone does nothing, and is the last."""

    async def forget() -> None:
        beats = Store().beats
        gc.collect()
        with beats.watching(7):
            await asyncio.sleep(0.1)
        await asyncio.sleep(10)

    loop.run(forget())


def test_closed_loops(store: Store) -> None:
    """A store keeps no event loop alive that is closed, whatever it did in there last."""
    loops: list[weakref.ref[VirtualLoop]] = []

    async def use() -> None:
        await hold(await session_of(store), 10)
        with store.beats.watching(7):
            await asyncio.sleep(1)

    for _ in range(3):
        loop = VirtualLoop()
        loop.run(use())
        loop.end()
        loops.append(weakref.ref(loop))
        del loop
    gc.collect()
    assert [found() for found in loops] == [None] * 3


def test_closed_store(loop: VirtualLoop, store: Store) -> None:
    """Turns whose store was closed are not beaten any more."""

    async def close() -> None:
        session = await session_of(store)
        turn = Turn(session, lease_seconds=LEASE)
        await turn.take()
        await store.aclose()
        await asyncio.sleep(1000)
        assert store.turns == []
        await turn.drop()

    loop.run(close())
    assert store.times == [3]


def test_queued_when_the_store_is_closed(loop: VirtualLoop, store: Store) -> None:
    """Turns that wait for their places when their store is closed are refused in the same moment."""

    async def close() -> float:
        session = await session_of(store)
        holding = asyncio.create_task(outside(hold(session, 5)))
        await asyncio.sleep(0.1)
        waiting = [asyncio.create_task(outside(hold(session, 0))) for _ in range(3)]
        await asyncio.sleep(1)
        closing = asyncio.create_task(outside(store.aclose()))
        await asyncio.wait(waiting)
        refused_at = loop.time()
        assert [type(each.exception()) for each in waiting] == [StoreClosedError] * 3
        await asyncio.wait([holding, closing])
        return refused_at

    assert loop.run(close()) == pytest.approx(1.1)
    assert 5 <= loop.time() < 5.5


USE: Final = """
import asyncio
from chatflow import Agent, SessionStore

async def use(store):
    session = await store.get_or_create("s", Agent(name="Support"))
    other = await store.get_or_create("t", Agent(name="Support"))
    kept.append(session.turn(lease_seconds=0.03))
    await kept[0].__aenter__()
    waiting = asyncio.get_running_loop().create_task(wait(other))
    await asyncio.sleep(0.1)

async def wait(other):
    async with other.turn(lease_seconds=0.03):
        await asyncio.Event().wait()

kept, store = [], SessionStore()
END
"""
ENDS: Final = {
    "asyncio.run": "asyncio.run(use(store))",
    "cancelled by hand": """
loop = asyncio.new_event_loop()
loop.run_until_complete(use(store))
left = asyncio.all_tasks(loop)
for task in left:
    task.cancel()
loop.run_until_complete(asyncio.wait(left))
loop.close()
""",
}


@pytest.mark.parametrize("end", ENDS)
def test_end_of_the_program(end: str) -> None:
    """A program that ends with turns open, which were beaten until then, ends without a word."""
    code = USE.replace("END", ENDS[end])
    ran = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        stderr=subprocess.PIPE,
        text=True,
        check=True,
        timeout=50,
    )
    assert ran.stderr == ""


def test_loop_closed_without_cancelling(loop: VirtualLoop, store: Store) -> None:
    """A loop that stops between two beats has no task of the store's in it, only a timer, which goes with it."""

    async def open_turn() -> Turn:
        turn = Turn(await session_of(store), lease_seconds=LEASE)
        await turn.take()
        await asyncio.sleep(10)
        return turn

    turn = loop.run(open_turn())
    assert store.times == [3, 6, 9]
    assert asyncio.all_tasks(loop) == set()
    loop.close()
    assert turn.is_open
    assert not turn.is_under_way
    turn.cancel()


def test_loop_stopped_in_a_beat(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    """A loop that is stopped and closed in the middle of a beat takes the beat with it, and nobody is told."""
    loop = VirtualLoop()

    async def open_turn() -> Turn:
        turn = Turn(await session_of(store), lease_seconds=LEASE)
        await turn.take()
        await asyncio.sleep(3.5)
        return turn

    store.waits = 1
    turn = loop.run(open_turn())
    assert len(asyncio.all_tasks(loop)) == 1
    loop.close()
    gc.collect()
    assert store.times == [3]
    assert turn.is_open
    del turn, loop
    gc.collect()
    assert caplog.text == ""


async def test_cancelled_beat(store: Store) -> None:
    """A beat that is cancelled, as whatever runs is where a program ends, is made up for by the next."""
    loop = asyncio.get_running_loop()
    turn = Turn(await session_of(store), lease_seconds=0.03)
    await turn.take()
    while not store.beatings:
        await asyncio.sleep(0)
        for task in asyncio.all_tasks(loop) - {asyncio.current_task()}:
            if store.beatings and "_beat" in repr(task.get_coro()):
                task.cancel()
    while len(store.beatings) < 3:  # noqa: ASYNC110  # what is looked at sets no event
        await asyncio.sleep(0)
    await turn.drop()
