"""Messages that are cancelled at each step of their way: told and resumable, or answered, and nothing in between."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Final

import anyio
import pytest

from chatflow.core.agent import Agent
from chatflow.core.backend import StoreBackend
from chatflow.core.engine import EngineReply, EngineRequest
from chatflow.core.messages import Role, ToolCall
from chatflow.core.tools import tool
from chatflow.runner import Runner
from chatflow.testing.conformance.conversation import outside, texts
from chatflow.testing.conformance.places import leave, place_of, ticket
from chatflow.testing.conformance.stepping import CANCELLERS, MOMENTS, Canceller, Moment
from chatflow.testing.conformance.test_cancellation import MOST_STEPS, works


class Engine:
    """Calls a tool for each message that a user has sent, then repeats the message."""

    async def generate(self, request: EngineRequest) -> EngineReply:
        await asyncio.sleep(0)
        if request.messages[-1].role is Role.TOOL or not request.tools:
            said = next(message for message in reversed(request.messages) if message.role is Role.USER)
            return EngineReply(text=f"{said.text}!")
        return EngineReply(tool_calls=[ToolCall(id="c", name="look_up", args={})])


def runner_of(store: StoreBackend, called: list[str]) -> Runner:
    """A runner whose agent's tool notes its calls."""

    @tool
    async def look_up() -> str:
        """Look it up."""
        called.append("called")
        await asyncio.sleep(0)
        return "found"

    return Runner(Agent(name="Support", tools=[look_up]), store, Engine())


async def left(store: StoreBackend, session_id: str | None = None) -> dict[str | None, str]:
    """The states of messages of which a row is left."""
    turns = await store.pending_turns()
    return {turn.message_id: turn.state for turn in turns if session_id in {None, turn.session_id}}


async def said(store: StoreBackend, session_id: str) -> list[str]:
    """What the users and the model have said, without calls."""
    items = (await store.messages(session_id)).items
    return [message.text for message in items if message.text and message.role is not Role.TOOL]


ANSWERED: Final = ["hello", "hello!"]


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("canceller", CANCELLERS.values(), ids=CANCELLERS.keys())
async def test_message(store: StoreBackend, canceller: Canceller, moment: Moment) -> None:
    """A message cancelled at any step is answered or goes on when sent again, and its tool runs once at most."""
    for step in range(MOST_STEPS):
        session_id, called = f"s{step}", list[str]()
        runner = runner_of(store, called)

        async def run(runner: Runner = runner, session_id: str = session_id) -> None:
            await runner.run_async(session_id, "hello", message_id="m")

        reached = await canceller(run, step, moment)
        answered = await store.is_message_processed("m", session_id=session_id)
        there = await store.get(session_id)
        assert (await said(store, session_id) if there else []) == (ANSWERED if answered else [])
        assert await left(store) in ({}, {"m": "told"})
        assert store.turns == []
        again = await outside(runner.run_async(session_id, "hello", message_id="m"))
        assert (again.content, again.duplicate) == ("hello!", answered)
        assert await said(store, session_id) == ANSWERED
        assert len(called) <= 1
        assert await left(store) == {}
        await works(store, session_id)
        if not reached:
            assert answered
            return
    pytest.fail(f"more than {MOST_STEPS} steps")


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("canceller", CANCELLERS.values(), ids=CANCELLERS.keys())
@pytest.mark.parametrize("message_id", [None, "m"])
async def test_run_that_does_another_message_first(
    store: StoreBackend, message_id: str | None, canceller: Canceller, moment: Moment
) -> None:
    """A run that is cancelled while it does accepted work first, or at any step before or after, loses none of it."""
    for step in range(MOST_STEPS):
        session_id, called = f"s{step}", list[str]()
        runner = runner_of(store, called)
        await runner.accept(session_id, "accepted", message_id="a")

        async def run(runner: Runner = runner, session_id: str = session_id) -> None:
            await runner.run_async(session_id, "hello", message_id=message_id)

        reached = await canceller(run, step, moment)
        first, mine = [["accepted", "accepted!"], ANSWERED]
        found = await said(store, session_id)
        assert found in ([], first, first + mine), f"cancelled at step {step}"
        states = await left(store, session_id)
        assert states.pop("a", None) in (("answered",) if found else ("accepted", "interrupted"))
        assert states in ({}, {"m": "told"})
        assert store.turns == []
        # Whoever comes next finishes it, and it is not tried more often than it may be.
        if not found:
            await outside(runner.run_async(session_id, "next"))
            assert await said(store, session_id) == [*first, "next", "next!"]
        assert await store.is_message_processed("a", session_id=session_id)
        if message_id is not None:
            assert (await outside(runner.run_async(session_id, "hello", message_id="m"))).content == "hello!"
        await works(store, session_id)
        if not reached:
            assert found == first + mine
            return
    pytest.fail(f"more than {MOST_STEPS} steps")


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("canceller", CANCELLERS.values(), ids=CANCELLERS.keys())
async def test_accepting(store: StoreBackend, canceller: Canceller, moment: Moment) -> None:
    """Accepting a message that is cancelled at any step stores it whole or not at all, and can be tried again."""
    for step in range(MOST_STEPS):
        session_id = f"s{step}"
        runner = runner_of(store, [])

        async def accept(runner: Runner = runner, session_id: str = session_id) -> None:
            await runner.accept(session_id, "hello", message_id="m", metadata={"channel": "sms"})

        reached = await canceller(accept, step, moment)
        stored = await left(store)
        assert stored in ({}, {"m": "accepted"})
        receipt = await runner.accept(session_id, "hello", message_id="m", metadata={"channel": "sms"})
        assert receipt.duplicate is bool(stored)
        again = await runner.run_async(session_id, "hello", {"channel": "sms"}, message_id="m")
        assert again.content == "hello!"
        session = await store.get(session_id)
        assert session is not None
        assert session.metadata == {"channel": "sms"}
        # Its answer is still to be handed on; nobody here does that.
        await store.delete(session_id)
        if not reached:
            assert stored
            return
    pytest.fail(f"more than {MOST_STEPS} steps")


@pytest.mark.parametrize("canceller", CANCELLERS.values(), ids=CANCELLERS.keys())
async def test_waiting_duplicate(store: StoreBackend, canceller: Canceller) -> None:
    """A delivery that waits for the answer to its message and is cancelled at any step takes nothing from the first."""
    for step in range(MOST_STEPS):
        session = await store.get_or_create(f"s{step}", Agent(name="Support"))
        first = await place_of(store, ticket(session, "m"))
        runner = runner_of(store, [])

        async def wait(runner: Runner = runner, session_id: str = session.session_id) -> None:
            with anyio.move_on_after(0.05):
                await runner.run_async(session_id, "hello", message_id="m")

        reached = await canceller(wait, step, "waiting")
        assert await left(store) == {"m": "running"}
        assert store.turns == []
        assert store.line._waiters == {}
        await leave(store, first)
        assert (await outside(runner.run_async(session.session_id, "hello", message_id="m"))).content == "hello!"
        await works(store, session.session_id)
        if not reached:
            return
    pytest.fail(f"more than {MOST_STEPS} steps")


async def test_ways_to_be_cancelled(store: StoreBackend) -> None:
    """However a run is given up, by a time limit, by wait_for, or with its group, its message goes on later."""

    class Silent:
        async def generate(self, request: EngineRequest) -> EngineReply:
            asked.set()
            await anyio.sleep_forever()
            raise AssertionError

    async def by_time_limit() -> None:
        with anyio.move_on_after(0.3):
            await silent.run_async("s", "hello", message_id="m")

    async def by_wait_for() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(silent.run_async("s", "hello", message_id="m"), 0.3)

    async def by_group() -> None:
        async with anyio.create_task_group() as group:
            group.start_soon(lambda: silent.run_async("s", "hello", message_id="m"))
            await asked.wait()
            group.cancel_scope.cancel()

    async def by_failing_neighbour() -> None:
        with suppress(BaseExceptionGroup):
            async with anyio.create_task_group() as group:
                group.start_soon(lambda: silent.run_async("s", "hello", message_id="m"))
                await asked.wait()
                raise ZeroDivisionError

    silent = Runner(Agent(name="Support"), store, Silent())
    for give_up in (by_time_limit, by_wait_for, by_group, by_failing_neighbour):
        asked = asyncio.Event()
        await outside(give_up())
        assert await left(store) == {"m": "told"}
        assert store.turns == []
    assert (await store.messages("s")).items == ()
    await outside(runner_of(store, []).run_async("s", "hello", message_id="m"))
    assert await said(store, "s") == ANSWERED


async def test_told_ends_do_not_count(store: StoreBackend) -> None:
    """A message whose caller gave up more often than max_attempts is still answered when it is sent again."""
    runner = Runner(Agent(name="Support"), store, Engine(), max_attempts=1)
    for step in range(1, 20):
        await CANCELLERS["asyncio"](lambda: runner.run_async("s", "hello", message_id="m"), step, "waiting")
    assert (await runner.run_async("s", "hello", message_id="m")).content == "hello!"
    assert texts((await store.messages("s")).items) == ANSWERED
