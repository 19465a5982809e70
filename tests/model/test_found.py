"""What the model has found in the rules, each as one short story for every storage."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator

import pytest
from anyio.lowlevel import checkpoint

from chatflow import Agent, EngineError, MessageDeadError, Runner, ScriptedEngine, SessionStore
from chatflow.core.records import Beat, Beaten, Claim, Cycle, Key, Leaving, NewSession, Place, Ticket, Work
from chatflow.core.rows import End
from chatflow.core.turn import Turn
from chatflow.core.values import EMPTY
from tests.model.storage import Memory, Sqlite, Storage

NOON = dt.datetime(2026, 1, 1, 12, tzinfo=dt.UTC)
HERE, THERE = Key("", "here"), Key("", "there")


@pytest.fixture(params=[Memory, Sqlite])
def storage(request: pytest.FixtureRequest) -> Iterator[Storage]:
    """Each storage, empty."""
    storage: Storage = request.param(lambda: NOON)
    yield storage
    storage.close()


def ticket(
    key: Key,
    message_id: str | None = None,
    agent_name: str | None = "Support",
    *,
    inside: int | None = None,
    lease_seconds: float = 1.0,
) -> Ticket:
    """A turn that asks for its place."""
    return Ticket(
        key=key,
        known=None,
        new=NewSession(agent_name="Support", metadata=EMPTY, max_turns=None),
        agent_name=agent_name,
        claim=None if message_id is None else Claim(message_id, "text"),
        ancestors=() if inside is None else (inside,),
        lease_seconds=lease_seconds,
        max_attempts=5,
    )


def place(storage: Storage, holder: str, asked: Ticket) -> Place:
    """A place that was given."""
    found = storage.queue(holder, asked)
    assert isinstance(found, Place)
    return found


def started(storage: Storage, holder: str, work: Work) -> Place:
    """Work that was taken begins."""
    found = storage.start(holder, work.turn.turn_id, work.attempt, work.key, None, 5)
    assert isinstance(found, Place)
    assert found.running
    return found


def fails_in_hand(storage: Storage, holder: str, running: Place | Work) -> None:
    """Work failed, and its holder keeps it to try again."""
    turn_id = running.turn_id if isinstance(running, Place) else running.turn.turn_id
    storage.leave(holder, Leaving(turn_id=turn_id, attempt=running.attempt, end=End.FAILED, max_attempts=5, hold=True))


def beats(storage: Storage) -> dict[int, Beat]:
    """What a worker of another process sees."""
    return {beat.turn_id: beat for beat in storage.beat("watcher", frozenset(), frozenset(), everything=True).others}


def test_lease_of_work_that_is_done_first_is_that_of_its_doer(storage: Storage) -> None:
    """Work done before a caller's own turn may be silent for as long as that caller, who beats it now."""
    storage.accept("p1", ticket(HERE, "m1"))
    done = place(storage, "p2", ticket(HERE, "m2", lease_seconds=9.0))
    assert done.work is not None
    assert [beat.lease_seconds for beat in beats(storage).values()] == [9.0, 9.0]


def test_lease_of_work_that_was_taken_is_that_of_its_worker(storage: Storage) -> None:
    """Work that a worker has taken may be silent for as long as that worker, who beats it now."""
    storage.accept("p1", ticket(HERE, "m1"))
    (work,) = storage.take_work("p2", "Support", 9.0, 5)
    assert beats(storage)[work.turn.turn_id].lease_seconds == 9.0


def test_ring_through_a_turn_that_has_passed_is_refused(storage: Storage) -> None:
    """A turn waits for the running one also where that came later and passed it, and such a ring is refused."""
    storage.accept("p1", ticket(HERE, "m1"))
    passing = place(storage, "p1", ticket(HERE, agent_name=None))
    outer = place(storage, "p1", ticket(THERE))
    assert passing.running
    assert outer.running
    assert not place(storage, "p1", ticket(HERE, "m1", inside=outer.turn_id)).running
    assert isinstance(storage.queue("p1", ticket(THERE, inside=passing.turn_id)), Cycle)


def test_place_behind_work_in_hand_is_not_behind_ones_own(storage: Storage) -> None:
    """Whoever waits behind another process's turn looks for its end, also with work of its own process in between."""
    storage.accept("p2", ticket(HERE, "m1"))
    (work,) = storage.take_work("p2", "Support", 1.0, 5)
    fails_in_hand(storage, "p2", started(storage, "p2", work))
    assert place(storage, "p1", ticket(HERE, agent_name=None)).running
    assert not place(storage, "p2", ticket(HERE, agent_name=None)).behind_own


async def test_turn_that_lost_its_row_to_a_neighbour_leaves_it_its_beat() -> None:
    """A turn that gives up a row does not end the beat of the one in its process that has taken it since."""
    async with SessionStore() as store:
        session = await store.get_or_create("here", Agent(name="Support"))
        first, second = Turn(session), Turn(session)
        store.beats.hold(1, first)
        store.beats.hold(1, second)
        store.beats.release(1, first)
        assert store.beats.turns == [second]
        store.beats.release(1, second)
        assert not store.beats.turns


async def test_turn_that_starts_while_it_is_beaten_is_not_lost() -> None:
    """A turn that has started since a beat has read its row is not taken for lost, and beaten on."""

    class Store(SessionStore):
        async def beat_turns(self, held: frozenset[int], watched: frozenset[int], *, everything: bool) -> Beaten:
            beaten = await super().beat_turns(held, watched, everything=everything)
            turn.attempt, turn.is_open = 2, True
            return beaten

    async with Store() as store:
        session = await store.get_or_create("here", Agent(name="Support"))
        await store.queue_turn(ticket(session.key, agent_name=None))
        queued = await store.queue_turn(ticket(session.key, agent_name=None))
        assert isinstance(queued, Place)
        turn = Turn(session)
        turn._hold(queued.turn_id, queued.attempt)
        await store.beats._beat_once(store)
        assert store.beats.turns == [turn]
        turn.is_open = False
        turn._release()


async def test_waiting_turns_look_again_once_one_was_lost() -> None:
    """A turn that was taken from this process wakes those that may have waited behind it."""
    async with SessionStore() as store:
        session = await store.get_or_create("here", Agent(name="Support"))
        with store.line.waiting(99) as waiter:
            Turn(session).lose(0.0)
            await checkpoint()
            assert waiter.event.is_set()


async def test_waiting_turns_look_again_once_a_message_is_dead() -> None:
    """A message that turns out to be dead wakes those that may have waited behind it."""
    engine = ScriptedEngine([EngineError("down", model="m"), "answer"])
    async with SessionStore() as store:
        runner = Runner(Agent(name="Support"), store, engine, max_attempts=1)
        await runner.accept("here", "first", message_id="m1")
        await runner.run_async("here", "second")
        with store.line.waiting(99) as waiter:
            with pytest.raises(MessageDeadError):
                await runner.run_async("here", "first", message_id="m1")
            await checkpoint()
            assert waiter.event.is_set()


async def test_work_that_failed_is_in_hand_until_it_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Work that failed before another turn stays in that one's hands while it waits, and nobody tries it at once."""
    taken: list[object] = []

    def at_once(failures: int, error: BaseException) -> float:
        taken.extend(store._tables.take("Support", 1.0, 5, True))
        return 0.0

    monkeypatch.setattr("chatflow.runner.delay", at_once)
    engine = ScriptedEngine([EngineError("down", model="m"), "one", "two"])
    async with SessionStore() as store:
        runner = Runner(Agent(name="Support"), store, engine)
        await runner.accept("here", "first", message_id="m1")
        response = await runner.run_async("here", "second")
    assert response.content == "two"
    assert not taken


def test_back_off_holds_its_place_until_it_ends(storage: Storage) -> None:
    """Work held between two attempts is nobody else's, and free once its holder lets go."""
    storage.accept("p1", ticket(HERE, "m1"))
    first = place(storage, "p1", ticket(HERE, "m2")).work
    assert first is not None
    fails_in_hand(storage, "p1", first)
    assert storage.take_work("p2", "Support", 1.0, 5) == ()
    storage.leave("p1", Leaving(turn_id=first.turn.turn_id, attempt=first.attempt, end=End.LET_GO))
    assert len(storage.take_work("p2", "Support", 1.0, 5)) == 1
