from __future__ import annotations

import asyncio
import contextvars
import math
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from chatflow.core import turn
from chatflow.core.backend import StoreBackend
from chatflow.core.messages import Message
from chatflow.core.records import Lost, NewSession
from chatflow.core.session import SessionContext
from chatflow.core.values import EMPTY
from chatflow.exceptions import SessionDeletedError, UnmatchedToolResultError
from chatflow.testing.conformance.conftest import Restart
from chatflow.testing.conformance.conversation import (
    BILLING,
    SUPPORT,
    call,
    outside,
    queued,
    result,
    say,
    stored,
    texts,
    user,
)
from chatflow.testing.conformance.places import ticket

Deletion = Callable[[StoreBackend], Awaitable[object]]
DELETE: dict[str, Deletion] = {"delete": lambda store: store.delete("s"), "clear": lambda store: store.clear()}

NEW = NewSession(agent_name="Support", metadata=EMPTY, max_turns=None)

USES: dict[str, Callable[[SessionContext], Coroutine[Any, Any, object]]] = {
    "add_message": lambda session: session.add_message(user("back")),
    "set_active_agent": lambda session: session.set_active_agent(BILLING),
    "clear_history": lambda session: session.clear_history(),
    "save": lambda session: session.save(),
    "rollback_to": lambda session: session.rollback_to(session.checkpoint()),
    "rollback_to a length": lambda session: session.rollback_to(0),
}


async def test_delete(store: StoreBackend) -> None:
    """Delete says whether there was a conversation, and it is gone."""
    await say(await store.get_or_create("s", SUPPORT), "hello")
    assert await store.delete("s") is True
    assert await store.get("s") is None
    assert (await store.list_sessions()).items == ()
    assert await store.delete("s") is False


async def test_delete_leaves_others(store: StoreBackend) -> None:
    """Delete removes nothing of other conversations."""
    for session_id in ("s", "t"):
        await say(await store.get_or_create(session_id, SUPPORT), "hello")
    await store.delete("s")
    assert texts((await store.messages("t")).items) == ["hello", "hello!"]


@pytest.mark.parametrize("delete", DELETE.values(), ids=DELETE.keys())
async def test_deletion_survives(store: StoreBackend, restart: Restart, delete: Deletion) -> None:
    """A conversation that was deleted is still gone after a restart."""
    await say(await store.get_or_create("s", SUPPORT), "hello")
    await delete(store)
    assert await (await restart(store)).get("s") is None


@pytest.mark.parametrize("use", USES.values(), ids=USES.keys())
@pytest.mark.parametrize("delete", DELETE.values(), ids=DELETE.keys())
async def test_session_of_deleted(
    store: StoreBackend, delete: Deletion, use: Callable[[SessionContext], Coroutine[Any, Any, object]]
) -> None:
    """Every awaited method of a session whose conversation was deleted says so, and brings nothing back (P7)."""
    session = await store.get_or_create("s", SUPPORT)
    await say(session, "hello")
    await delete(store)
    session.state["x"] = 1
    with pytest.raises(SessionDeletedError) as caught:
        await use(session)
    assert caught.value.session_id == "s"
    with pytest.raises(SessionDeletedError):
        async with session.turn():
            pass
    assert await store.get("s") is None


@pytest.mark.parametrize("use", USES.values(), ids=USES.keys())
@pytest.mark.parametrize("delete", DELETE.values(), ids=DELETE.keys())
async def test_deleted_during_turn(
    store: StoreBackend, delete: Deletion, use: Callable[[SessionContext], Coroutine[Any, Any, object]]
) -> None:
    """Inside a turn whose conversation is deleted every awaited method says so, and so does the turn's end (P7)."""
    session = await store.get_or_create("s", SUPPORT)
    with pytest.raises(SessionDeletedError):  # noqa: PT012  # the turn fails at its end
        async with session.turn():
            await session.add_message(user("hello"))
            await delete(store)
            with pytest.raises(SessionDeletedError):
                await use(session)
    assert await store.get("s") is None


async def test_deleted_by_other_store_during_turn(store: StoreBackend, second: StoreBackend) -> None:
    """A turn whose conversation another store deletes can't commit, and brings nothing back."""
    session = await store.get_or_create("s", SUPPORT)
    with pytest.raises(SessionDeletedError):  # noqa: PT012  # the turn fails at its end
        async with session.turn():
            await session.add_message(user("hello"))
            await second.delete("s")
    assert await store.get("s") is None
    assert await second.get("s") is None


@pytest.mark.parametrize("use", USES.values(), ids=USES.keys())
async def test_deleted_by_other_store(
    store: StoreBackend,
    second: StoreBackend,
    use: Callable[[SessionContext], Coroutine[Any, Any, object]],
) -> None:
    """A session whose conversation another store has deleted says so, also when the id has been used anew."""
    session = await store.get_or_create("s", SUPPORT)
    await second.delete("s")
    new = await second.get_or_create("s", SUPPORT)
    await new.add_message(user("new"))
    with pytest.raises(SessionDeletedError):
        await use(session)
    assert texts((await second.messages("s")).items) == ["new"]
    again = await store.get_or_create("s", SUPPORT)
    assert again is not session
    assert texts(again.history) == ["new"]


async def test_failing_turn_of_deleted(store: StoreBackend) -> None:
    """A turn that fails after its conversation was deleted ends with its own exception."""
    session = await store.get_or_create("s", SUPPORT)
    with pytest.raises(ZeroDivisionError):  # noqa: PT012  # the turn fails at its end
        async with session.turn():
            await store.delete("s")
            raise ZeroDivisionError
    assert await store.get("s") is None


async def test_empty_turn_of_deleted(store: StoreBackend) -> None:
    """A turn that changes nothing says at its end that its conversation was deleted."""
    session = await store.get_or_create("s", SUPPORT)
    with pytest.raises(SessionDeletedError):  # the turn fails at its end
        async with session.turn():
            await store.delete("s")


async def test_delete_waits_for_no_turn(store: StoreBackend) -> None:
    """Delete returns while a turn of the conversation is open, inside the turn and outside."""
    session = await store.get_or_create("s", SUPPORT)
    with suppress(SessionDeletedError):
        async with session.turn():
            assert await outside(store.delete("s"))


@pytest.mark.parametrize("delete", DELETE.values(), ids=DELETE.keys())
async def test_queued_turns_of_deleted(store: StoreBackend, delete: Deletion) -> None:
    """Turns that wait when their conversation is deleted are told so."""
    session = await store.get_or_create("s", SUPPORT)
    waiting: list[asyncio.Task[None]] = []
    with suppress(SessionDeletedError):
        async with session.turn():
            for number in range(3):
                waiting.append(asyncio.create_task(outside(session.add_message(user(str(number))))))
                await queued(store, number + 1)
            await delete(store)
    await asyncio.wait(waiting)
    assert [type(task.exception()) for task in waiting] == [SessionDeletedError] * 3
    assert await store.get("s") is None


@pytest.mark.parametrize("delete", DELETE.values(), ids=DELETE.keys())
async def test_id_used_anew(store: StoreBackend, delete: Deletion) -> None:
    """A conversation created under a deleted one's id has nothing of the old (P7)."""
    session = await store.get_or_create("s", SUPPORT, {"old": 1}, max_turns=3)
    async with session.turn():
        await session.add_message(user("old"))
        await session.add_message(call("c"))
        await session.set_active_agent(BILLING)
        session.state["old"] = 1
    await delete(store)
    new = await store.get_or_create("s", SUPPORT)
    assert new is not session
    assert await stored(store, "s") == {
        "history": [],
        "agent": "Support",
        "state": {},
        "metadata": {},
        "max_turns": 40,
    }
    await new.add_message(user("new"))
    with pytest.raises(UnmatchedToolResultError):
        await new.add_message(result("c"))
    assert texts((await store.messages("s")).items) == ["new"]


@pytest.mark.parametrize("delete", DELETE.values(), ids=DELETE.keys())
async def test_old_turn_and_id_used_anew(store: StoreBackend, delete: Deletion) -> None:
    """A turn of a deleted conversation can't commit into one created anew under its id (P7)."""
    session = await store.get_or_create("s", SUPPORT)
    with pytest.raises(SessionDeletedError):  # noqa: PT012  # the turn fails at its end
        async with session.turn():
            await session.add_message(user("old"))
            await delete(store)
            new = await outside(store.get_or_create("s", SUPPORT))
            await outside(new.add_message(user("new")))
    assert texts((await store.messages("s")).items) == ["new"]
    assert (await store.get("s")) is new


async def test_old_session_and_id_used_anew(store: StoreBackend) -> None:
    """A deleted conversation's session can't write into one created anew under its id."""
    session = await store.get_or_create("s", SUPPORT)
    session.state["old"] = 1
    await store.delete("s")
    await store.get_or_create("s", SUPPORT)
    with pytest.raises(SessionDeletedError):
        await session.save()
    after = await stored(store, "s")
    assert after is not None
    assert after["state"] == {}


async def test_place_in_deleted_conversation(store: StoreBackend) -> None:
    """A turn of a conversation that was deleted gets no place in the line of the one created anew under its id."""
    session = await store.get_or_create("s", SUPPORT)
    asks = ticket(session)
    await store.delete("s")
    assert await store.queue_turn(asks) is Lost.SESSION
    await store.get_or_create("s", SUPPORT)
    assert await store.queue_turn(asks) is Lost.SESSION


async def test_what_a_deleted_session_shows(store: StoreBackend) -> None:
    """A session whose conversation was deleted goes on showing what it showed."""
    session = await store.get_or_create("s", SUPPORT)
    await say(session, "hello")
    await store.delete("s")
    assert texts(session.history) == ["hello", "hello!"]


async def test_clear(store: StoreBackend) -> None:
    """Clear removes all conversations, more than one transaction deletes."""
    for number in range(1_050):
        await store.create_session(store.key_of(str(number)), NEW)
    await store.clear()
    assert (await store.list_sessions()).items == ()
    await store.clear()


async def test_clear_and_create_at_once(store: StoreBackend) -> None:
    """A conversation created while clear runs is either gone, and its session says so, or there and usable."""

    async def create(number: int) -> None:
        for _ in range(number):
            await asyncio.sleep(0)  # a step, so that the creations meet clear at different places
        session = await store.get_or_create(str(number), SUPPORT)
        await agrees(store, session, user("hello"))

    for number in range(20):
        await store.get_or_create(f"old{number}", SUPPORT)
    async with anyio.create_task_group() as group:
        group.start_soon(store.clear)
        for number in range(20):
            group.start_soon(create, number)


async def test_delete_and_create_at_once(store: StoreBackend) -> None:
    """A session got while its id is deleted over and over either says that it was deleted, or is there and usable."""
    deleted = 0

    async def delete() -> None:
        nonlocal deleted
        for _ in range(50):
            deleted += await store.delete("s")

    async def create() -> None:
        while deleted < 20:
            session = await store.get_or_create("s", SUPPORT)
            await agrees(store, session, user("hello"))

    async with anyio.create_task_group() as group:
        group.start_soon(create)
        group.start_soon(create)
        while deleted < 20:
            await delete()


async def agrees(store: StoreBackend, session: SessionContext, message: Message) -> None:
    """A session takes a message, or the conversation it stands for is gone from the store."""
    try:
        await session.add_message(message)
    except SessionDeletedError:
        there = await store.get(session.session_id)
        assert there is None or there.committed.session_key != session.committed.session_key


async def test_deleted_before_it_waits(store: StoreBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    """A turn whose conversation is deleted between its queueing and its waiting is told so, though nothing wakes it."""
    monkeypatch.setattr(turn, "_LOOK_BEHIND_OWN", math.inf)  # it does not look by itself
    session = await store.get_or_create("s", SUPPORT)
    told = anyio.Event()

    async def queue() -> None:
        try:
            async with session.turn():
                pass
        except SessionDeletedError:
            told.set()

    async def hold() -> None:
        async with session.turn(), anyio.create_task_group() as group:
            contextvars.Context().run(group.start_soon, queue)
            await anyio.lowlevel.checkpoint()
            await store.delete("s")
            await told.wait()

    with pytest.raises(SessionDeletedError):
        await hold()
