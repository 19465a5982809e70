"""Every operation, cancelled at each of its steps: then all of it is stored or nothing, and the next one works."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest

from chatflow.core.backend import StoreBackend
from chatflow.core.messages import AgentResponse
from chatflow.core.records import Claim
from chatflow.core.session import SessionContext
from chatflow.core.turn import Turn
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
from chatflow.testing.conformance.places import leave, place_of, ticket
from chatflow.testing.conformance.stepping import CANCELLERS, MOMENTS, Canceller, Moment

MOST_STEPS = 200


async def sample(store: StoreBackend, session_id: str) -> SessionContext:
    """A conversation with something of every kind, and one turn from pruning."""
    session = await store.get_or_create(session_id, SUPPORT, {"old": 1}, max_turns=2)
    async with session.turn():
        await session.add_message(user("one"))
        session.state["old"] = 1
    await session.add_message(user("two"))
    return session


async def whole_turn(session: SessionContext) -> None:
    """A turn with a change of every kind."""
    async with session.turn():
        await session.add_message(user("three"))
        await session.add_message(call("c"))
        await session.set_active_agent(BILLING)
        session.state["new"] = 1
        await session.add_message(result("c"))
        session.metadata["new"] = 1
        del session.metadata["old"]


async def claimed_turn(session: SessionContext) -> None:
    """A turn for a message, as the runner takes it."""
    turn = Turn(session, claim=Claim("m", "digest"))
    if await turn.take() is not None:
        return
    try:
        await session.add_message(user("three"))
        turn.response = AgentResponse(content="yes", active_agent_name="Support")
    except BaseException:
        await turn.drop()
        raise
    await turn.commit()


async def roll_back(session: SessionContext) -> None:
    """Go back to the beginning."""
    await session.rollback_to(0)


async def replaced(session: SessionContext) -> None:
    """A turn that clears the history and begins anew."""
    async with session.turn():
        await session.clear_history()
        await session.add_message(user("three"))


Use = Callable[[SessionContext], Coroutine[Any, Any, object]]
OPERATIONS: dict[str, Use] = {
    "whole turn": whole_turn,
    "claimed turn": claimed_turn,
    "replacing turn": replaced,
    "add_message": lambda session: session.add_message(user("three")),
    "set_active_agent": lambda session: session.set_active_agent(BILLING),
    "clear_history": lambda session: session.clear_history(),
    "rollback_to": roll_back,
    "save": lambda session: session.save(),
    "merge": lambda session: session.store.get_or_create(session.session_id, SUPPORT, {"new": 1, "more": 2}),
    "get_or_create": lambda session: session.store.get_or_create(session.session_id, SUPPORT),
    "get": lambda session: session.store.get(session.session_id),
    "delete": lambda session: session.store.delete(session.session_id),
    "create": lambda session: session.store.get_or_create(f"new {session.session_id}", SUPPORT, {"new": 1}),
    "clear": lambda session: session.store.clear(),
    "list_sessions": lambda session: session.store.list_sessions(),
    "messages": lambda session: session.store.messages(session.session_id),
    "mark": lambda session: session.store.mark_message_processed("m", session_id=session.session_id),
    "is_message_processed": lambda session: session.store.is_message_processed("m", session_id=session.session_id),
    "purge": lambda session: session.store.purge_processed_messages(),
}


async def all_of(store: StoreBackend, session_id: str) -> dict[str, Any]:
    """All that an operation on the conversation can have changed, without times."""
    there = await stored(store, session_id)
    if there is not None:
        there["history"] = texts(there["history"])
    new = await stored(store, f"new {session_id}")
    return {
        "there": there,
        "new": new,
        "processed": await store.is_message_processed("m", session_id=session_id),
    }


async def works(store: StoreBackend, session_id: str) -> None:
    """The conversation takes a turn, a message and a mark, and nobody is left in its line."""
    session = await outside(store.get_or_create(session_id, SUPPORT))
    place = await place_of(store, ticket(session))
    assert place.running, "a row was left in the line"
    await leave(store, place)
    await outside(say(session, "again"))
    assert texts((await store.messages(session_id)).items)[-2:] == ["again", "again!"]
    await store.mark_message_processed("next", session_id=session_id)
    assert await store.is_message_processed("next", session_id=session_id)
    assert store.line._waiters == {}
    assert store.line.abandoned == []
    assert store.turns == [], "a row is still beaten"


async def sweep(store: StoreBackend, operation: Use, canceller: Canceller, moment: Moment) -> None:
    """Cancel *operation* at each of its steps, each time in a new conversation."""
    await operation(await sample(store, "done"))
    after = await all_of(store, "done")
    before = await all_of(store, (await sample(store, "not done")).session_id)
    for step in range(MOST_STEPS):
        session_id = f"s{step}"
        session = await sample(store, session_id)
        session.state["waits"] = 1
        reached = await canceller(lambda session=session: operation(session), step, moment)  # type: ignore[misc]
        found = await all_of(store, session_id)
        if found["there"] is not None:
            found["there"]["state"].pop("waits", None)
        assert found in (before, after), f"cancelled at step {step}"
        await works(store, session_id)
        if not reached:
            assert found == after
            return
    pytest.fail(f"more than {MOST_STEPS} steps")


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("canceller", CANCELLERS.values(), ids=CANCELLERS.keys())
@pytest.mark.parametrize("operation", OPERATIONS.values(), ids=OPERATIONS.keys())
async def test_all_or_nothing(store: StoreBackend, operation: Use, canceller: Canceller, moment: Moment) -> None:
    """An operation that is cancelled at any step has happened whole or not at all, and the next one works (P2)."""
    await sweep(store, operation, canceller, moment)


@asynccontextmanager
async def held(session: SessionContext) -> AsyncIterator[asyncio.Event]:
    """Somebody else holds the conversation's turn until the event is set."""
    holds, release = asyncio.Event(), asyncio.Event()

    async def hold() -> None:
        async with session.turn():
            holds.set()
            await release.wait()

    task = asyncio.create_task(outside(hold()))
    await holds.wait()
    try:
        yield release
    finally:
        release.set()
        await task


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("canceller", CANCELLERS.values(), ids=CANCELLERS.keys())
async def test_queued_turn(store: StoreBackend, canceller: Canceller, moment: Moment) -> None:
    """A turn that has to wait and is cancelled at any step leaves the line, and the one behind it runs (P2)."""
    for step in range(MOST_STEPS):
        session = await store.get_or_create(f"s{step}", SUPPORT)
        behind: list[asyncio.Task[None]] = []

        async def wait_for_turn(session: SessionContext = session) -> None:
            await session.add_message(user("cancelled"))

        async with held(session) as release:

            async def let_go_on(
                session: SessionContext = session,
                release: asyncio.Event = release,
                behind: list[asyncio.Task[None]] = behind,
            ) -> None:
                await queued(store, 1)
                behind.append(asyncio.create_task(session.add_message(user("behind"))))
                await queued(store, 2)
                release.set()

            other = asyncio.create_task(let_go_on())
            reached = await canceller(wait_for_turn, step, moment)
            if not other.done():
                release.set()
                other.cancel()
                await asyncio.wait([other])
        with suppress(asyncio.CancelledError):
            for task in behind:
                await task
        said = texts((await store.messages(session.session_id)).items)
        assert said in ([], ["cancelled"], ["behind"], ["cancelled", "behind"]), f"cancelled at step {step}"
        assert len(behind) == said.count("behind")
        await works(store, session.session_id)
        if not reached:
            assert "cancelled" in said
            return
    pytest.fail(f"more than {MOST_STEPS} steps")


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("canceller", CANCELLERS.values(), ids=CANCELLERS.keys())
async def test_failing_turn(store: StoreBackend, canceller: Canceller, moment: Moment) -> None:
    """A turn that fails and is cancelled at any step, its ending included, leaves no trace (P2)."""

    async def fail(session: SessionContext) -> None:
        with suppress(ZeroDivisionError):
            async with session.turn():
                await session.add_message(user("three"))
                raise ZeroDivisionError

    await sweep(store, fail, canceller, moment)


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("canceller", CANCELLERS.values(), ids=CANCELLERS.keys())
async def test_answer_and_mark_go_together(store: StoreBackend, canceller: Canceller, moment: Moment) -> None:
    """However a message's turn was cancelled, the message is processed exactly if its turn is in the history (P4)."""
    for step in range(MOST_STEPS):
        session = await sample(store, f"s{step}")
        reached = await canceller(lambda session=session: claimed_turn(session), step, moment)  # type: ignore[misc]
        answered = "three" in texts((await store.messages(session.session_id)).items)
        assert await store.is_message_processed("m", session_id=session.session_id) is answered
        await claimed_turn(session)
        assert texts(session.history).count("three") == 1
        if not reached:
            return
    pytest.fail(f"more than {MOST_STEPS} steps")


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("canceller", CANCELLERS.values(), ids=CANCELLERS.keys())
async def test_inner_turn(store: StoreBackend, canceller: Canceller, moment: Moment) -> None:
    """A turn inside another conversation's turn, cancelled at any step, leaves both conversations usable."""
    for step in range(MOST_STEPS):
        outer, inner = await sample(store, f"outer{step}"), await sample(store, f"inner{step}")

        async def nested(outer: SessionContext = outer, inner: SessionContext = inner) -> None:
            async with outer.turn():
                await outer.add_message(user("three"))
                async with inner.turn():
                    await inner.add_message(user("three"))

        reached = await canceller(nested, step, moment)
        kept = ["three" in texts((await store.messages(each.session_id)).items) for each in (outer, inner)]
        assert kept in ([False, False], [False, True], [True, True])
        for session in (outer, inner):
            await works(store, session.session_id)
        if not reached:
            assert kept == [True, True]
            return
    pytest.fail(f"more than {MOST_STEPS} steps")


@pytest.mark.parametrize("canceller", CANCELLERS.values(), ids=CANCELLERS.keys())
async def test_closing(open_store: Callable[..., StoreBackend], canceller: Canceller) -> None:
    """A store whose closing was cancelled at any step can be closed again and lets nothing through afterwards."""
    for step in range(MOST_STEPS):
        store = open_store()
        await store.get_or_create("s", SUPPORT)
        reached = await canceller(store.aclose, step, "waiting")
        await store.aclose()
        if not reached:
            return
    pytest.fail(f"more than {MOST_STEPS} steps")
