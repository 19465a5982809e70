"""Retention: conversations that were left alone for too long are purged, never one that somebody still needs."""

from __future__ import annotations

import asyncio
import datetime as dt
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from chatflow.core import backend
from chatflow.core.backend import StoreBackend
from chatflow.core.owners import ALL
from chatflow.core.store import BaseSessionStore
from chatflow.engines.scripted import ScriptedEngine
from chatflow.exceptions import SessionDeletedError
from chatflow.runner import Runner
from chatflow.testing.conformance.conftest import Clock, Restart
from chatflow.testing.conformance.conversation import SUPPORT, say, user
from chatflow.testing.conformance.places import leave, place_of, ticket
from chatflow.testing.conformance.work import lose_all

DAY = dt.timedelta(days=1)


async def left(store: BaseSessionStore) -> list[str]:
    """The ids of what is there."""
    return sorted(info.session_id for info in (await store.list_sessions()).items)


async def begin(store: BaseSessionStore, *session_ids: str, **options: Any) -> None:
    """Conversations, one after another."""
    for session_id in session_ids:
        await store.get_or_create(session_id, SUPPORT, **options)


# --- idle ---


@pytest.mark.parametrize("idle_for", [DAY, 86_400, 86_400.0])
async def test_idle(store: StoreBackend, clock: Clock, idle_for: Any) -> None:
    """Conversations without a commit for as long as is said go, and no others."""
    await begin(store, "old", "older but used")
    clock.passes(hours=1)
    await begin(store, "young")
    await say(await store.get_or_create("older but used", SUPPORT), "hello")
    clock.passes(hours=22, minutes=59, seconds=59)
    assert await store.purge(idle_for) == 0
    clock.passes(seconds=1)
    assert await store.purge(idle_for) == 1
    assert await left(store) == ["older but used", "young"]
    clock.passes(hours=1)
    assert await store.purge(idle_for) == 2
    assert await store.purge(idle_for) == 0


async def test_what_is_a_commit(store: StoreBackend, clock: Clock) -> None:
    """A merge of metadata is a commit; reading, and a turn that changes nothing, are none."""
    await begin(store, "merged", "read", "turned")
    clock.passes(days=1)
    await store.get_or_create("merged", SUPPORT, {"a": 1})
    await store.get("read")
    async with (await store.get_or_create("turned", SUPPORT)).turn():
        pass
    assert await store.purge(DAY) == 2
    assert await left(store) == ["merged"]


async def test_as_delete(store: StoreBackend, clock: Clock) -> None:
    """Whoever still uses a purged conversation is told so; its answers go, and their ids stay known."""
    runner = Runner(SUPPORT, store, ScriptedEngine(["hi"]))
    await runner.run_async("s", "hello", message_id="m")
    session = await store.get_or_create("s", SUPPORT)
    clock.passes(days=1)
    await store.purge(DAY)
    with pytest.raises(SessionDeletedError):
        await session.save()
    again = await runner.run_async("s", "hello", message_id="m")
    assert (again.duplicate, again.content) == (True, "")


async def test_id_used_anew(store: StoreBackend, clock: Clock) -> None:
    """A conversation begun anew under a purged one's id is another one, and stays."""
    await begin(store, "s")
    clock.passes(days=1)
    await store.purge(DAY)
    session = await store.get_or_create("s", SUPPORT)
    assert await store.purge(DAY) == 0
    await session.add_message(user("hello"))


async def test_survives(store: StoreBackend, clock: Clock, restart: Restart) -> None:
    """What was purged is gone after a restart."""
    await begin(store, "s")
    clock.passes(days=1)
    await store.purge(DAY)
    assert await left(await restart(store)) == []


# --- what holds a conversation ---

HOLDS: dict[str, bool] = {
    "queued": True,
    "running": True,
    "accepted": True,
    "interrupted": True,
    "answered": True,
    "told": False,
    "dead": False,
}


async def bring_to(store: StoreBackend, state: str) -> None:
    """A turn of the conversation "s" in that state."""
    session = await store.get_or_create("s", SUPPORT)
    replies: dict[str, str | OSError] = {"answered": "hi", "dead": OSError("no"), "told": OSError("no")}
    runner = Runner(SUPPORT, store, ScriptedEngine([replies.get(state, "hi")]), max_attempts=1)
    if state in {"accepted", "answered", "dead"}:
        await runner.accept("s", "hello", message_id="m")
    if state in {"answered", "dead"}:
        async with runner.working():
            while (await store.pending_turns())[0].state != state:
                await anyio.lowlevel.checkpoint()
    if state == "told":
        runner = Runner(SUPPORT, store, ScriptedEngine([OSError("no")]))
        with pytest.raises(OSError, match="no"):
            await runner.run_async("s", "hello", message_id="m")
    if state in {"queued", "running", "interrupted"}:
        place = await place_of(store, ticket(session, "m" if state == "interrupted" else None))
        if state == "queued":
            await place_of(store, ticket(session))
            await leave(store, place)
        elif state == "interrupted":
            await lose_all(store)


@pytest.mark.parametrize("state", HOLDS)
@pytest.mark.parametrize("why", ["idle", "expired"])
async def test_turns(store: StoreBackend, clock: Clock, state: str, why: str) -> None:
    """A conversation with a turn that somebody does, will do, or has to tell of is never purged; others are."""
    await store.get_or_create("s", SUPPORT, expires_after=DAY if why == "expired" else None)
    await bring_to(store, state)
    assert state in {turn.state for turn in await store.pending_turns()}
    await begin(store, "t", expires_after=DAY)
    clock.passes(days=2)
    assert await store.purge(DAY if why == "idle" else None) == (1 if HOLDS[state] else 2)
    assert await left(store) == (["s"] if HOLDS[state] else [])


async def test_goes_after_its_turn(store: StoreBackend, clock: Clock) -> None:
    """A conversation that a turn has held goes when that has ended, and nothing was committed."""
    session = await store.get_or_create("s", SUPPORT)
    place = await place_of(store, ticket(session))
    clock.passes(days=1)
    assert await store.purge(DAY) == 0
    await leave(store, place)
    assert await store.purge(DAY) == 1


async def test_inside_its_turn(store: StoreBackend, clock: Clock) -> None:
    """A purge inside a conversation's own turn leaves it, and the turn commits."""
    session = await store.get_or_create("s", SUPPORT)
    clock.passes(days=1)
    async with session.turn():
        assert await store.purge(DAY) == 0
        await session.add_message(user("hello"))
    assert await left(store) == ["s"]


# --- a conversation's own time ---


async def test_expires_after(store: StoreBackend, clock: Clock) -> None:
    """A conversation's own time counts from its last commit, and needs no idle_for; it is stored when it is created."""
    session = await store.get_or_create("s", SUPPORT, expires_after=DAY)
    assert session.expires_after == DAY
    await begin(store, "t", "u")
    assert (await store.get_or_create("t", SUPPORT, expires_after=1)).expires_after is None
    clock.passes(hours=23)
    await session.add_message(user("hello"))
    clock.passes(hours=23)
    assert await store.purge() == 0
    await store.get_or_create("s", SUPPORT, {"a": 1})
    clock.passes(hours=23)
    assert await store.purge() == 0
    clock.passes(hours=1)
    assert await store.purge() == 1
    assert await left(store) == ["t", "u"]


async def test_expires_after_survives(store: StoreBackend, clock: Clock, restart: Restart) -> None:
    """It is there after a restart, and after commits."""
    session = await store.get_or_create("s", SUPPORT, expires_after=90.5)
    await session.add_message(user("hello"))
    again = await (await restart(store)).get("s")
    assert again is not None
    assert again.expires_after == dt.timedelta(seconds=90.5)


async def test_end_of_dates(store: StoreBackend, clock: Clock) -> None:
    """A conversation whose time would be up past the last date there is stays."""
    clock.now = dt.datetime(9999, 1, 1, tzinfo=dt.UTC)
    await begin(store, "s", expires_after=100 * 365 * DAY)
    clock.passes(days=364)
    assert await store.purge() == 0


async def test_both(store: StoreBackend, clock: Clock) -> None:
    """Whichever time is over first ends a conversation."""
    await begin(store, "short", expires_after=60)
    await begin(store, "long", expires_after=10 * DAY)
    clock.passes(days=1)
    assert await store.purge(2 * DAY) == 1
    assert await left(store) == ["long"]
    clock.passes(days=1)
    assert await store.purge(2 * DAY) == 1


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        (0, ValueError),
        (-1, ValueError),
        (dt.timedelta(0), ValueError),
        (float("nan"), ValueError),
        (float("inf"), ValueError),
        (dt.timedelta(days=40_000), ValueError),
        ("1", TypeError),
        (True, TypeError),
    ],
)
async def test_no_time(store: StoreBackend, wrong: Any, error: type[Exception]) -> None:
    """What is no span of time is refused, and nothing is created or deleted."""
    with pytest.raises(error, match="expires_after must"):
        await store.get_or_create("s", SUPPORT, expires_after=wrong)
    with pytest.raises(error, match="idle_for must"):
        await store.purge(wrong)
    assert await left(store) == []


# --- owners ---


async def test_owners(store: StoreBackend, clock: Clock) -> None:
    """A purge is of one owner's conversations, or of those without one, or with ALL of everybody's."""
    for face in (store, store.for_owner("ann"), store.for_owner("bob"), store.for_owner("cid")):
        await begin(face, "s", expires_after=DAY)
        await begin(face, "t")
    clock.passes(days=1)
    assert await store.for_owner("ann").purge(DAY) == 2
    assert await store.purge() == 1
    assert await store.purge(DAY, owner=ALL) == 5
    assert (await store.list_sessions(owner=ALL)).items == ()


# --- slices and clocks ---


@pytest.mark.parametrize("owner", [None, ALL])
async def test_slices(store: StoreBackend, clock: Clock, monkeypatch: pytest.MonkeyPatch, owner: Any) -> None:
    """However small the slices are, all that may go goes, and what is held is passed by."""
    monkeypatch.setattr(backend, "SLICE", 2)
    for number in range(7):
        await begin(store, f"own{number}", expires_after=DAY)
        await begin(store, f"idle{number}")
    for session_id in ("own3", "idle0", "idle3"):
        session = await store.get_or_create(session_id, SUPPORT)
        await store.queue_turn(ticket(session))
    clock.passes(days=1)
    await begin(store, "young", expires_after=DAY)
    assert await store.purge(DAY, owner=owner) == 11
    assert await left(store) == ["idle0", "idle3", "own3", "young"]


async def test_cancelled(store: StoreBackend, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """A purge that is cancelled ends between two slices, and can be run again."""
    monkeypatch.setattr(backend, "SLICE", 1)
    await begin(store, *"abcdefgh")
    clock.passes(days=1)
    slices = store.purge_sessions

    async def and_then_cancelled(*args: Any) -> Any:
        purged = await slices(*args)
        if purged.sessions:
            task.cancel()
        return purged

    with monkeypatch.context() as patched:
        patched.setattr(store, "purge_sessions", and_then_cancelled)
        task = asyncio.create_task(store.purge(DAY))
        with pytest.raises(asyncio.CancelledError):
            await task
    assert len(await left(store)) == 7
    await store.purge(DAY)
    assert await left(store) == []


async def test_turns_meanwhile(store: StoreBackend, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """A conversation that is used between two slices stays, though it was idle when the purge began."""
    monkeypatch.setattr(backend, "SLICE", 1)
    await begin(store, *"abc")
    session = await store.get_or_create("c", SUPPORT)
    clock.passes(days=1)
    slices = store.purge_sessions

    async def and_then(*args: Any) -> Any:
        purged = await slices(*args)
        if purged.sessions and purged.sessions[0][0].session_id == "a":
            await session.add_message(user("hello"))
        return purged

    monkeypatch.setattr(store, "purge_sessions", and_then)
    assert await store.purge(DAY) == 2
    assert await left(store) == ["c"]


async def test_clock_set_back(store: StoreBackend, clock: Clock) -> None:
    """A commit that lies in the future says nothing: its conversation stays, and does not keep others."""
    clock.passes(days=1000)
    await begin(store, "of the future")
    clock.passes(days=-1000)
    await begin(store, "s")
    clock.passes(days=1)
    assert await store.purge(DAY) == 1
    assert await left(store) == ["of the future"]
    clock.passes(days=1000)
    assert await store.purge(DAY) == 1


async def test_clock_set_back_a_little(store: StoreBackend, clock: Clock) -> None:
    """Behind a commit that is fresh by its clock, one that seems older stays until that one is idle too."""
    await begin(store, "first")
    clock.passes(hours=-2)
    await begin(store, "second")
    clock.passes(hours=25)
    assert await store.purge(DAY) == 0
    clock.passes(hours=1)
    assert await store.purge(DAY) == 2
