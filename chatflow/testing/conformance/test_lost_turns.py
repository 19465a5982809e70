"""Turns whose row is gone or can't be given back: what is lost is told, and the conversation goes on."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

import pytest

from chatflow.core.backend import StoreBackend
from chatflow.core.messages import AgentResponse
from chatflow.core.records import Claim, InProgress, Leaving, Left, Lost, Place
from chatflow.core.rows import End
from chatflow.core.session import SessionContext
from chatflow.core.turn import Turn
from chatflow.exceptions import SessionConflictError, SessionDeletedError, StoreError
from chatflow.testing.conformance.conversation import BILLING, SUPPORT, outside, queued, say, stored, texts, until, user
from chatflow.testing.conformance.places import first_ticket, leave, place_of, start, take_away, ticket


class BrokenError(Exception):
    """What a body raises to end its turn."""


# --- a running turn ---


async def test_running_row_lost(store: StoreBackend) -> None:
    """A turn whose row was taken away can't commit: the error says so, and nothing of it is stored or shown."""
    session = await store.get_or_create("s", SUPPORT, {"channel": "web"})
    await say(session, "one")
    before = await stored(store, "s")
    with pytest.raises(SessionConflictError) as caught:  # noqa: PT012  # the turn fails at its end
        async with session.turn():
            await session.add_message(user("lost"))
            await session.set_active_agent(BILLING)
            session.state["lost"] = 1
            session.metadata["lost"] = 1
            await take_away(session)
    assert caught.value.session_id == "s"
    assert await stored(store, "s") == before
    assert texts(session.history) == ["one", "one!"]


async def test_after_running_row_lost(store: StoreBackend) -> None:
    """The conversation takes the next turn after one that lost its row."""
    session = await store.get_or_create("s", SUPPORT)
    with pytest.raises(SessionConflictError):  # noqa: PT012  # the turn fails at its end
        async with session.turn():
            await session.add_message(user("lost"))
            await take_away(session)
    await session.add_message(user("next"))
    assert texts((await store.messages("s")).items) == ["next"]


async def test_next_turn_commits_meanwhile(store: StoreBackend) -> None:
    """A turn whose row was taken away and that others overtook changes nothing of what they have committed."""
    session = await store.get_or_create("s", SUPPORT)
    with pytest.raises(SessionConflictError):  # noqa: PT012  # the turn fails at its end
        async with session.turn():
            await session.add_message(user("lost"))
            place = await place_of(store, ticket(session))
            assert not place.running
            await take_away(session)
            started = await start(session, place)
            assert isinstance(started, Place)
            assert started.running
            await leave(store, started)
            await outside(store.get_or_create("s", SUPPORT, {"theirs": 1}))
    there = await stored(store, "s")
    assert there is not None
    assert (there["history"], there["metadata"]) == ([], {"theirs": 1})


async def test_claimed_row_lost(store: StoreBackend) -> None:
    """A message whose turn lost its row is not processed, and is answered when it comes again."""
    session = await store.get_or_create("s", SUPPORT)

    async def answer(before_commit: Callable[[SessionContext], Awaitable[None]] | None = None) -> None:
        turn = Turn(session, claim=Claim("m", "hello"))
        assert await turn.take() is None
        await session.add_message(user("hello"))
        turn.response = AgentResponse(content="yes", active_agent_name="Support")
        if before_commit is not None:
            await before_commit(session)
        await turn.commit()

    with pytest.raises(SessionConflictError):
        await outside(answer(take_away))
    assert not await store.is_message_processed("m", session_id="s")
    await outside(answer())
    assert await store.is_message_processed("m", session_id="s")
    assert texts(session.history) == ["hello"]


async def test_waiting_changes_outlast_lost_row(store: StoreBackend) -> None:
    """A change that waited for a turn whose row was taken away goes on waiting, and joins the next."""
    session = await store.get_or_create("s", SUPPORT)
    session.state["waits"] = 1
    with pytest.raises(SessionConflictError):  # the turn fails at its end
        async with session.turn():
            await take_away(session)
    assert session.state == {"waits": 1}
    await session.save()
    there = await stored(store, "s")
    assert there is not None
    assert there["state"] == {"waits": 1}


# --- a queued turn ---


async def test_queued_row_lost(store: StoreBackend) -> None:
    """A turn that waits and whose row was taken away queues again, and is done once its place has come."""
    session = await store.get_or_create("s", SUPPORT)
    async with session.turn():
        waiting = asyncio.create_task(outside(say(session, "hello")))
        await queued(store, 1)
        (lost,) = store.line._waiters
        (attempt,) = [turn.attempt for turn in store.turns if turn.turn_id == lost]
        await store.leave_turn(Leaving(turn_id=lost, attempt=attempt, end=End.TOLD))
        store.line.wake([lost])
        await until(lambda: bool(store.line._waiters) and lost not in store.line._waiters)
        assert not waiting.done()
    await waiting
    assert texts(session.history) == ["hello", "hello!"]


async def test_conversation_lost_while_queued(store: StoreBackend) -> None:
    """A turn that waits and whose conversation somebody else has deleted finds that out by itself, once woken."""
    session = await store.get_or_create("s", SUPPORT)
    assert (await place_of(store, ticket(session))).running
    waiting = asyncio.create_task(outside(say(session, "hello")))
    await queued(store, 1)
    store.line.wake(await store.delete_session(session.key) or ())
    await asyncio.wait([waiting])
    assert isinstance(waiting.exception(), SessionDeletedError)
    assert await store.get("s") is None


async def test_start_of_lost_row(store: StoreBackend) -> None:
    """A row that is gone can't be started, and the answer tells it from a conversation that is gone."""
    session = await store.get_or_create("s", SUPPORT)
    place = await place_of(store, ticket(session))
    await leave(store, place)
    assert await start(session, place) is Lost.TURN
    await store.delete("s")
    assert await start(session, place) is Lost.SESSION
    await store.get_or_create("s", SUPPORT)
    assert await start(session, place) is Lost.SESSION


async def test_leaving_twice(store: StoreBackend) -> None:
    """A row that is gone can be given back again, which changes nothing and calls nobody."""
    session = await store.get_or_create("s", SUPPORT)
    places = [await place_of(store, ticket(session)) for _ in range(2)]
    assert await leave(store, places[0]) == Left(None, places[1].turn_id)
    assert await leave(store, places[0]) == Left(None, None)


# --- places ---


async def test_message_behind_other_turns(store: StoreBackend) -> None:
    """A message queues behind turns of other messages and of none, and only one of its own is under way."""
    session = await store.get_or_create("s", SUPPORT)
    assert (await place_of(store, ticket(session))).running
    assert not (await place_of(store, ticket(session, "other"))).running
    mine = await place_of(store, ticket(session, "m"))
    assert not mine.running
    assert await store.queue_turn(ticket(session, "m")) == InProgress(Claim("m", "hello").digest, mine.turn_id)


async def test_two_first_turns(store: StoreBackend) -> None:
    """Of two turns that would both create their conversation, the second queues behind the first in the same one."""
    first, second = [await place_of(store, first_ticket("s")) for _ in range(2)]
    assert (first.running, second.running) == (True, False)
    assert len((await store.list_sessions()).items) == 1
    assert await leave(store, first) == Left(None, second.turn_id)


async def test_first_turns_alone_at_once() -> None:
    """First turns that a session of its own takes at once run one after the other in one conversation."""
    session = SessionContext("s", SUPPORT, metadata={"channel": "web"})
    await asyncio.gather(*(outside(session.add_message(user(text))) for text in ("one", "two", "three")))
    assert texts(session.history) == ["one", "two", "three"]
    assert session.metadata == {"channel": "web"}


# --- places that can't be given back ---


def failing_with(error: Exception) -> Callable[[Leaving], Awaitable[Left]]:
    """What stands in for giving a place back while the storage fails."""

    async def leave_turn(leaving: Leaving) -> Left:
        raise error

    return leave_turn


async def fail(session: SessionContext) -> None:
    """Take a turn that fails."""
    async with session.turn():
        await session.add_message(user("lost"))
        raise BrokenError


async def goes_on(session: SessionContext) -> None:
    """The conversation's next turn gives back what was left, and runs."""
    assert session.store.line.abandoned
    await session.add_message(user("next"))
    assert session.store.line.abandoned == []
    assert texts((await session.store.messages("s")).items) == ["next"]
    assert (await place_of(session.store, ticket(session))).running


async def test_failing_turn_of_failing_store(
    store: StoreBackend, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A turn that fails while the storage does ends with its own error; its place is given back before the next."""
    session = await store.get_or_create("s", SUPPORT)
    with monkeypatch.context() as failing:
        failing.setattr(store, "leave_turn", failing_with(StoreError("no room", store=store.name)))
        with caplog.at_level(logging.WARNING, "chatflow.turn"), pytest.raises(BrokenError):
            await fail(session)
    assert "will be given back later" in caplog.text
    await goes_on(session)


async def test_unforeseen_failure(store: StoreBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error that no storage should raise is not hidden, and the place is still given back before the next turn."""
    session = await store.get_or_create("s", SUPPORT)
    with monkeypatch.context() as failing:
        failing.setattr(store, "leave_turn", failing_with(ZeroDivisionError()))
        with pytest.raises(ZeroDivisionError):
            await fail(session)
    await goes_on(session)


async def test_failing_turn_of_closed_store(store: StoreBackend) -> None:
    """A turn that fails after its store was closed ends with its own error."""
    session = await store.get_or_create("s", SUPPORT)
    with pytest.raises(BrokenError):  # noqa: PT012  # the turn fails at its end
        async with session.turn():
            await store.aclose()
            raise BrokenError
