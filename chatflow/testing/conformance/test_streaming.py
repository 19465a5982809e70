"""Streamed turns: they commit whole or leave no trace, whenever their reader goes."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from itertools import count
from typing import Any, Final

import anyio
import anyio.to_thread
import pytest
from hypothesis import given, settings

from chatflow.core.agent import Agent
from chatflow.core.backend import StoreBackend
from chatflow.core.engine import EngineReply, EngineRequest
from chatflow.core.events import Done, HandedOff, TextDelta, ToolFinished, ToolStarted
from chatflow.core.messages import Handoff
from chatflow.core.session import SessionContext
from chatflow.core.tools import ToolContext
from chatflow.engines.scripted import ScriptedEngine
from chatflow.exceptions import StoreClosedError
from chatflow.runner import Runner
from chatflow.running.stream import RunStream
from chatflow.testing.conformance.attempts import UNTIMED, Attempts, Break, Reply, Script, plans, said, scripts
from chatflow.testing.conformance.conftest import Restart
from chatflow.testing.conformance.conversation import BILLING, outside, stored, texts, until
from chatflow.testing.conformance.stepping import CANCELLERS, MOMENTS, Canceller, Moment, Steps
from chatflow.testing.conformance.test_cancellation import MOST_STEPS, all_of, sample, sweep, works

CALL = ScriptedEngine.call

numbers = count()


async def change(context: ToolContext) -> str:
    """Change the conversation's state."""
    context.state["new"] = 1
    return "changed"


SUPPORT: Final = Agent("Support", tools=[change], handoffs=[BILLING])
ASKED: Final = EngineReply(text="I look", tool_calls=[CALL("change"), CALL("transfer_to_billing")])


def stream_in(session: SessionContext) -> RunStream:
    """A turn with a change of every kind."""
    runner = Runner(SUPPORT, session.store, ScriptedEngine([ASKED, "here it is"]))
    return runner.stream_session(session, "three", {"new": 1}, message_id="m")


async def read(session: SessionContext) -> None:
    """A streamed turn, read to its end."""
    async with stream_in(session) as stream:
        kinds = [type(event) async for event in stream]
    assert kinds[-1] is Done


async def collect(session: SessionContext) -> None:
    """A streamed turn, of which only the answer is looked at."""
    await stream_in(session).collect()


# --- all or nothing ---


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("canceller", CANCELLERS.values(), ids=CANCELLERS.keys())
@pytest.mark.parametrize("use", [read, collect])
async def test_reader_cancelled(store: StoreBackend, use: Any, canceller: Canceller, moment: Moment) -> None:
    """A turn whose reader is cancelled at any of the reader's steps is stored whole or not at all (P2)."""
    await sweep(store, use, canceller, moment)


async def test_left_after_any_event(store: StoreBackend) -> None:
    """A turn whose reader leaves after any event is stored whole or not at all, and wholly after Done (P2)."""
    await read(await sample(store, "done"))
    after = await all_of(store, "done")
    before = await all_of(store, (await sample(store, "not done")).session_id)
    for number in range(MOST_STEPS):
        session = await sample(store, f"s{number}")
        has_come, event = 0, None
        async with stream_in(session) as stream:
            while has_come < number and not isinstance(event, Done):
                event = await anext(stream)
                has_come += 1
        found = await all_of(store, session.session_id)
        assert found in (before, after), f"left after {number} events"
        await works(store, session.session_id)
        if isinstance(event, Done):
            assert found == after
            return
    pytest.fail(f"more than {MOST_STEPS} events")


async def leave_at(session: SessionContext, step: int, moment: Moment) -> bool:
    """Leave the stream when its turn is at its own step *step*; False if it has fewer."""
    go, whole = asyncio.Event(), stream_in(session)
    steps = Steps(step, moment, go.set)

    async def answer(report: Any) -> Any:
        return await steps.drive(whole._answer(report))  # type: ignore[arg-type]  # a coroutine it is

    async with RunStream(session.session_id, session.store, answer) as stream:
        going = asyncio.create_task(go.wait())
        assert stream._task is not None
        await asyncio.wait([going, stream._task], return_when=asyncio.FIRST_COMPLETED)
        going.cancel()
    return steps.taken >= step


@pytest.mark.parametrize("moment", MOMENTS)
async def test_left_at_any_step_of_the_turn(store: StoreBackend, moment: Moment) -> None:
    """A turn whose reader leaves at any of the turn's own steps is stored whole or not at all (P2)."""
    await read(await sample(store, "done"))
    after = await all_of(store, "done")
    before = await all_of(store, (await sample(store, "not done")).session_id)
    for step in range(MOST_STEPS):
        session = await sample(store, f"s{step}")
        reached = await leave_at(session, step, moment)
        found = await all_of(store, session.session_id)
        assert found in (before, after), f"left at step {step}"
        await works(store, session.session_id)
        if not reached:
            assert found == after
            return
    pytest.fail(f"more than {MOST_STEPS} steps")


async def never(request: EngineRequest) -> str:
    """Say nothing."""
    await anyio.sleep_forever()
    raise AssertionError


async def test_goes_on_after_it_was_left(store: StoreBackend) -> None:
    """A message whose stream was left goes on when it is sent again: calls that had ended do not start again (P5)."""
    async with Runner(SUPPORT, store, ScriptedEngine([ASKED], default=never)).run_stream(
        "s", "hi", message_id="m"
    ) as stream:
        while await anext(stream) != HandedOff(Handoff(target_agent_name="Billing"), "Billing"):
            pass
    assert (await store.messages("s")).items == ()
    runner = Runner(SUPPORT, store, ScriptedEngine(["here it is"]))
    async with runner.run_stream("s", "hi", message_id="m") as stream:
        events = [event async for event in stream]
    assert events[0] == TextDelta("I look", "Support")
    assert [event.call.name for event in events if isinstance(event, ToolFinished)] == ["change", "transfer_to_billing"]
    assert not any(isinstance(event, ToolStarted) for event in events)
    assert texts((await store.messages("s")).items)[-1] == "here it is"


# --- the same as a run ---


async def outcome(
    store: StoreBackend, replies: Sequence[Reply], plan: Sequence[Break], *, streams: bool
) -> dict[str, Any]:
    """What a turn comes to whose attempts are broken off as planned."""
    session_id, attempts = f"s{next(numbers)}", Attempts(plan)
    script = Script(replies, attempts)
    await store.get_or_create(session_id, script.agent, {"a": "first"})
    runner = Runner(script.agent, store, tool_timeout=None)

    async def attempt() -> Any:
        if streams:
            return await runner.run_stream(session_id, "hi", {"noted": 1}, message_id="m").collect()
        return await runner.run_async(session_id, "hi", {"noted": 1}, message_id="m")

    response = await attempts.until_done(attempt)
    left = await stored(store, session_id)
    assert left is not None
    assert await store.pending_turns() == ()
    return {**left, "history": said(left["history"]), "response": response}


@given(replies=scripts(), plan=plans)
@settings(UNTIMED, max_examples=40)
async def test_commits_what_a_run_would(store: StoreBackend, replies: list[Reply], plan: list[Break]) -> None:
    """A streamed turn, however often it is broken off, comes to what a run would have come to at once."""
    wanted = await outcome(store, replies, [], streams=False)
    assert await outcome(store, replies, plan, streams=True) == wanted


async def test_survives(store: StoreBackend, restart: Restart) -> None:
    """When Done has come, a store that is opened later has the turn."""
    await store.get_or_create("s", SUPPORT)
    async with Runner(SUPPORT, store, ScriptedEngine(["yes"])).run_stream("s", "hi") as stream:
        async for event in stream:
            if isinstance(event, Done):
                store = await restart(store)
    assert texts((await store.messages("s")).items) == ["hi", "yes"]


# --- among others ---


class Waiting:
    """An engine that waits after its first word."""

    def __init__(self) -> None:
        self.go_on = asyncio.Event()

    async def generate(self, request: EngineRequest) -> EngineReply:
        """Wait, then answer."""
        await self.go_on.wait()
        return EngineReply(text="well, yes")

    async def stream(self, request: EngineRequest) -> AsyncIterator[Any]:
        """Say a word, wait, then answer."""
        yield TextDelta("well,")
        reply = await self.generate(request)
        yield TextDelta(" yes")
        yield reply


@asynccontextmanager
async def closing(store: StoreBackend, grace: float) -> AsyncIterator[None]:
    """Meanwhile the store is being closed."""
    task = asyncio.create_task(outside(store.aclose(grace)))
    await until(lambda: store.is_closing)
    yield
    await task


async def test_closing_waits(store: StoreBackend) -> None:
    """A store that is being closed waits for a streamed turn, which commits although nobody reads."""
    engine = Waiting()
    async with Runner(SUPPORT, store, engine).run_stream("s", "hi") as stream:
        assert await anext(stream) == TextDelta("well,", "Support")
        async with closing(store, 1000):
            engine.go_on.set()
        assert stream.response.content == "well, yes"


async def test_closing_cancels(store: StoreBackend) -> None:
    """A streamed turn that has not ended in time is told that its store is closed."""
    async with Runner(SUPPORT, store, Waiting()).run_stream("s", "hi") as stream:
        assert await anext(stream) == TextDelta("well,", "Support")
        async with closing(store, 0):
            with pytest.raises(StoreClosedError):
                await anext(stream)


async def test_closed_before(store: StoreBackend) -> None:
    """A stream on a store that was closed says so."""
    await store.aclose()
    with pytest.raises(StoreClosedError):
        await Runner(SUPPORT, store, ScriptedEngine(["yes"])).run_stream("s", "hi").collect()


async def test_in_order(store: StoreBackend) -> None:
    """Streams of one conversation run in the order in which they are entered, runs among them too (P3)."""
    runner = Runner(SUPPORT, store, ScriptedEngine(default="yes"))
    async with runner.run_stream("s", "0"), runner.run_stream("s", "1"):
        await runner.run_async("s", "2")
    assert texts((await store.messages("s")).items)[::2] == ["0", "1", "2"]


async def test_several_loops(store: StoreBackend) -> None:
    """Streams of one conversation in several event loops run one at a time, each with its own events (P3)."""
    runner = Runner(SUPPORT, store, ScriptedEngine(default=lambda request: request.messages[-1].text))

    async def stream_some(thread: int) -> None:
        for number in range(5):
            async with runner.run_stream("s", f"{thread}/{number}") as stream:
                pieces = [event.text async for event in stream if isinstance(event, TextDelta)]
            assert "".join(pieces) == f"{thread}/{number}"

    async with anyio.create_task_group() as group:
        for thread in range(3):
            run = partial(contextvars.Context().run, anyio.run, stream_some, thread)
            group.start_soon(anyio.to_thread.run_sync, run)
    heard = texts((await store.messages("s")).items)
    assert heard[::2] == heard[1::2]
    assert sorted(heard[::2]) == sorted(f"{thread}/{number}" for thread in range(3) for number in range(5))
