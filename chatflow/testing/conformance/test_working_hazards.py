"""What user code does to a worker must not stop the work of others, nor lose or double an answer."""

from __future__ import annotations

import asyncio
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from chatflow.core.agent import Agent
from chatflow.core.backend import StoreBackend
from chatflow.core.messages import AgentResponse
from chatflow.core.records import PendingTurn
from chatflow.core.turn import Turn
from chatflow.engines.scripted import ScriptedEngine
from chatflow.exceptions import SessionConflictError, StoreClosedError
from chatflow.runner import Runner
from chatflow.testing.conformance.conversation import outside
from chatflow.testing.conformance.work import Heard, lose_all, nothing_left, states

CALL = ScriptedEngine.call


@pytest.fixture(autouse=True)
def _no_delays(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("chatflow.runner", "chatflow.running.worker"):
        monkeypatch.setattr(f"{module}.delay", lambda _failures, _error: 0)


async def awaits_a_cancelled_task() -> None:
    """Raise what a cancellation raises, though nobody has cancelled the caller."""
    task = asyncio.create_task(anyio.sleep_forever())
    task.cancel()
    await task


async def test_a_cancelled_task_in_a_tool(store: StoreBackend) -> None:
    """A tool that awaits a cancelled task has failed, and everybody's work goes on."""
    agent, heard = Agent("Support"), Heard()
    agent.tool(awaits_a_cancelled_task, name="spoilt")
    runner = Runner(agent, store, ScriptedEngine([CALL("spoilt"), "told", "next"]))
    async with runner.working(heard):
        await runner.accept("s", "1", message_id="1")
        await heard.of(1)
        await runner.accept("other", "2", message_id="2")
        await heard.of(2)
    assert (heard.contents(), heard.contents("other")) == (["told"], ["next"])


async def test_a_cancelled_task_in_instructions(store: StoreBackend) -> None:
    """Instructions that await a cancelled task fail their message, which is given up, and everybody's work goes on."""
    heard = Heard()
    spoilt = [True, True]

    async def instructions(_session: Any) -> str:
        if spoilt:
            spoilt.pop()
            await awaits_a_cancelled_task()
        return "help"

    agent = Agent("Support", instructions=instructions)
    runner = Runner(agent, store, ScriptedEngine(default="fine"), max_attempts=2)
    async with runner.working(heard):
        await runner.accept("s", "1", message_id="1")
        await runner.accept("s", "2", message_id="2")
        await heard.of(1)
    assert [state for _, state, _ in await states(store)] == ["dead"]


async def test_a_cancelled_task_in_on_response(store: StoreBackend) -> None:
    """An on_response that awaits a cancelled task is called again."""
    calls: list[str] = []
    heard = anyio.Event()

    async def on_response(turn: PendingTurn, response: AgentResponse) -> None:
        calls.append(response.content)
        if len(calls) == 1:
            await awaits_a_cancelled_task()
        heard.set()

    runner = Runner(Agent("Support"), store, ScriptedEngine(default="fine"))
    async with runner.working(on_response):
        await runner.accept("s", "1", message_id="1")
        await heard.wait()
        await nothing_left(store)
    assert calls == ["fine", "fine"]


@pytest.mark.parametrize("steps", range(12))
async def test_left_at_once(steps: int, store: StoreBackend) -> None:
    """A worker that is left just after it has taken work holds nothing any more."""
    runner = Runner(Agent("Support"), store, ScriptedEngine(default="fine"))
    await runner.accept("s", "1", message_id="1")

    async def work() -> None:
        async with runner.working(Heard(), grace=0):
            for _ in range(steps):
                await anyio.lowlevel.checkpoint()

    await outside(work())
    assert {state for _, state, _ in await states(store)} <= {"accepted", "interrupted", "answered"}
    assert store.turns == []
    heard = Heard()
    async with runner.working(heard):
        await nothing_left(store)


async def test_plain_function(store: StoreBackend) -> None:
    """A function that is not async hears each answer once."""
    heard: list[str] = []
    runner = Runner(Agent("Support"), store, ScriptedEngine(default="fine"))
    async with runner.working(lambda _turn, response: heard.append(response.content)):
        await runner.accept("s", "1", message_id="1")
        await nothing_left(store)
    assert heard == ["fine"]


async def test_answers_in_order_between_workers(store: StoreBackend) -> None:
    """An answer is not told by one worker before an earlier one that another worker is still telling."""
    order: list[str] = []
    telling, may_end = anyio.Event(), anyio.Event()

    async def slow(turn: PendingTurn, response: AgentResponse) -> None:
        telling.set()
        await may_end.wait()
        order.append(f"slow {turn.message_id}")

    async def quick(turn: PendingTurn, response: AgentResponse) -> None:
        order.append(f"quick {turn.message_id}")

    runner = Runner(Agent("Support"), store, ScriptedEngine(default="fine"), max_concurrent_turns=1)
    async with runner.working(slow):
        await runner.accept("s", "1", message_id="1")
        await telling.wait()
        other = Runner(Agent("Support"), store, ScriptedEngine(default="fine"))
        await other.run_async("s", "2", message_id="2")  # no accepted one, whose answer nobody waits for
        await other.accept("s", "3", message_id="3")
        async with other.working(quick):
            while {state for _, state, _ in await states(store)} != {"answered"}:
                await anyio.lowlevel.checkpoint()
            assert order == []
            may_end.set()
            await nothing_left(store)
    assert [each.split()[1] for each in order] == ["1", "3"]


async def test_deleted_before_it_is_heard(store: StoreBackend) -> None:
    """What a deleted conversation would have been told is told nobody, however often it had been tried."""
    tried: list[str] = []

    async def on_response(turn: PendingTurn, response: AgentResponse) -> None:
        tried.append(response.content)
        await store.delete("s")
        raise LookupError

    runner = Runner(Agent("Support"), store, ScriptedEngine(default="fine"))
    async with runner.working(on_response):
        await runner.accept("s", "1", message_id="1")
        while not tried or store.turns:
            await anyio.lowlevel.checkpoint()
    assert tried == ["fine"]


@pytest.mark.parametrize("fails", ["turn", "on_response"])
async def test_waits_do_not_hold_up_the_end(fails: str, store: StoreBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    """What only waits to be tried again is left to the next worker at once."""
    asked = anyio.Event()

    def long_delay(_failures: int, _error: BaseException) -> float:
        asked.set()
        return 1000

    monkeypatch.setattr("chatflow.running.worker.delay", long_delay)

    async def on_response(turn: PendingTurn, response: AgentResponse) -> None:
        raise LookupError

    runner = Runner(Agent("Support"), store, ScriptedEngine([LookupError] if fails == "turn" else [], default="fine"))
    async with runner.working(on_response, grace=1000):
        await runner.accept("s", "1", message_id="1")
        await asked.wait()
    assert [state for _, state, _ in await states(store)] == ["accepted" if fails == "turn" else "answered"]
    assert store.turns == []


async def test_a_worker_that_fails(
    store: StoreBackend, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A worker that fails at what no storage should raise says so at once, and again where it is left."""
    failed = anyio.Event()

    async def fail(*_: Any, **__: Any) -> None:
        failed.set()
        raise ZeroDivisionError

    monkeypatch.setattr(store, "take_work", fail)
    runner = Runner(Agent("Support"), store, ScriptedEngine(default="fine"))
    with pytest.raises(ExceptionGroup) as caught:  # it is left with the error
        async with runner.working():
            await failed.wait()
    assert caught.group_contains(ZeroDivisionError)
    assert "no more work is done" in caplog.text


@pytest.mark.parametrize(("lease", "error"), [("x", TypeError), (True, TypeError), (0, ValueError), (-1, ValueError)])
async def test_refused_leases(lease: Any, error: type[Exception], store: StoreBackend) -> None:
    """A lease is a number of seconds above 0, of a turn as of a runner."""
    session = await store.get_or_create("s", Agent("Support"))
    with pytest.raises(error, match="lease_seconds"):
        session.turn(lease_seconds=lease)
    with pytest.raises(error, match="lease_seconds"):
        Runner(Agent("Support"), store, lease_seconds=lease)


async def test_redone_rollback_to_before_the_turn(store: StoreBackend) -> None:
    """A tool that went back to before its turn has done so when the turn goes on in another attempt."""
    agent = Agent("Support")
    session = await store.get_or_create("s", agent, {"a": 1})
    session.state["b"] = 2
    await session.save()
    before = session.checkpoint()

    async def back() -> str:
        session.state["b"] = 3
        await session.rollback_to(before)
        return "back"

    agent.tool(back)
    runner = Runner(agent, store, ScriptedEngine([CALL("back"), LookupError, "done"]))
    with pytest.raises(LookupError):
        await runner.run_async("s", "hi", message_id="m")
    assert (await runner.run_async("s", "hi", message_id="m")).content == "done"
    assert (session.state, session.metadata) == ({"b": 2}, {"a": 1})


async def test_work_that_was_taken_over(store: StoreBackend) -> None:
    """Work whose row somebody else has taken meanwhile is left to them."""
    runner = Runner(Agent("Support"), store, ScriptedEngine(default="fine"))
    await runner.accept("s", "1", message_id="1")
    (work,) = await store.take_work("Support", 10, 5, answers=True)
    await lose_all(store)
    session = await store.get("s")
    assert session is not None
    turn = Turn.of_work(session, work, lease_seconds=10, max_attempts=5)
    with pytest.raises(SessionConflictError):
        await turn.take()
    assert [state for _, state, _ in await states(store)] == ["interrupted"]


async def test_refused_arguments(store: StoreBackend) -> None:
    """A worker is refused a grace that is no number of seconds, an on_response that is no function, a closed store."""
    runner = Runner(Agent("Support"), store, ScriptedEngine(default="fine"))
    for options, error in (
        ({"grace": "1"}, TypeError),
        ({"grace": True}, TypeError),
        ({"grace": -1}, ValueError),
        ({"on_response": 5}, TypeError),
    ):
        with pytest.raises(error):
            async with runner.working(**options):
                pass
    await store.aclose()
    with pytest.raises(StoreClosedError):
        async with runner.working():
            pass
