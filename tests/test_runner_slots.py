from __future__ import annotations

import asyncio
from typing import Any

import anyio
import anyio.lowlevel
import anyio.to_thread
import pytest

from chatflow.core.agent import Agent
from chatflow.core.engine import EngineRequest
from chatflow.core.memory import SessionStore
from chatflow.core.messages import AgentResponse
from chatflow.engines.scripted import ScriptedEngine
from chatflow.exceptions import TurnInsideTurnError
from chatflow.runner import Runner
from chatflow.running.slots import TurnSlots, give_back_slots
from chatflow.testing.conformance.conversation import Crowd, PausingEngine
from tests.runs import results, session_of, texts

CALL = ScriptedEngine.call


@pytest.mark.parametrize("limit", [1, 3])
async def test_turns_at_once(limit: int) -> None:
    """At most max_concurrent_turns turns run at once, and all get their answer."""
    crowd = Crowd()
    runner = Runner(Agent("Support"), engine=ScriptedEngine(default=crowd.answer), max_concurrent_turns=limit)
    async with anyio.create_task_group() as group:
        for number in range(8):
            group.start_soon(runner.run_async, f"s{number}", "hi")
    assert crowd.most == limit
    assert [texts(await session_of(runner, f"s{number}")) for number in range(8)] == [["hi", "answer"]] * 8


async def test_as_many_as_allowed_meet() -> None:
    """As many turns as max_concurrent_turns allows do run at once: three meet inside the engine."""
    barrier = asyncio.Barrier(3)

    async def meet(request: EngineRequest) -> str:
        await barrier.wait()
        return "met"

    runner = Runner(Agent("Support"), engine=ScriptedEngine(default=meet), max_concurrent_turns=3)
    async with anyio.create_task_group() as group:
        for number in range(3):
            group.start_soon(runner.run_async, f"s{number}", "hi")


async def test_waiting_in_line_takes_no_slot() -> None:
    """Messages that wait for their conversation leave the slots to other conversations."""
    engine = PausingEngine()
    busy = Agent("Busy", engine=engine)
    runner = Runner(busy, max_concurrent_turns=2)
    other = Agent("Other", engine=ScriptedEngine(["hello"]))
    busy.add_handoff(other)
    session = await runner.session_store.get_or_create("elsewhere", busy)
    await session.set_active_agent(other)
    async with anyio.create_task_group() as group:
        for _ in range(4):
            group.start_soon(runner.run_async, "s", "hi")
        await engine.asked.wait()
        await anyio.wait_all_tasks_blocked()
        assert (await runner.run_async("elsewhere", "hi")).content == "hello"
        engine.go_on.set()


async def test_failed_turn_gives_its_slot_back() -> None:
    """A turn that fails gives its slot back."""
    engine = ScriptedEngine([LookupError, "hello"])
    runner = Runner(Agent("Support"), engine=engine, max_concurrent_turns=1)
    with pytest.raises(LookupError):
        await runner.run_async("s", "hi")
    assert (await runner.run_async("s", "hi")).content == "hello"


async def test_cancelled_while_waiting_for_a_slot() -> None:
    """A run cancelled while it waits for a slot leaves its conversation to the next one."""
    engine = PausingEngine()
    runner = Runner(Agent("Support"), engine=engine, max_concurrent_turns=1)
    waiting = anyio.CancelScope()

    async def wait() -> None:
        with waiting:
            await runner.run_async("b", "hi")

    async with anyio.create_task_group() as group:
        group.start_soon(runner.run_async, "a", "hi")
        await engine.asked.wait()
        group.start_soon(wait)
        await anyio.wait_all_tasks_blocked()
        waiting.cancel()
        await anyio.wait_all_tasks_blocked()
        engine.go_on.set()
        await runner.run_async("b", "again")
    assert texts(await session_of(runner, "b")) == ["again", "answer"]


async def test_waiting_for_a_slot_is_not_part_of_the_turn() -> None:
    """The time a run waits for a slot does not count for its turn_timeout."""
    asked, go_on, deadlines = anyio.Event(), anyio.Event(), list[float]()

    async def wait(request: EngineRequest) -> str:
        asked.set()
        await go_on.wait()
        return "answer"

    async def answer(request: EngineRequest) -> str:
        deadlines.append(anyio.current_effective_deadline())
        return "answer"

    engine = ScriptedEngine([wait, answer])
    runner = Runner(Agent("Support"), engine=engine, turn_timeout=100, max_concurrent_turns=1)
    async with anyio.create_task_group() as group:
        group.start_soon(runner.run_async, "a", "hi")
        await asked.wait()
        group.start_soon(runner.run_async, "b", "hi")
        await anyio.wait_all_tasks_blocked()
        begins = anyio.current_time()
        go_on.set()
    assert deadlines[0] >= begins + 100


def nesting(runner_of: Any, session_id: str = "inner") -> Agent:
    """An agent whose tool runs another conversation, with the runner that *runner_of* gives."""
    outer = Agent("Outer")

    @outer.tool
    async def delegate() -> str:
        runner: Runner = runner_of()
        return (await runner.run_async(session_id, "from a tool")).content

    return outer


async def test_run_inside_a_tool() -> None:
    """A run of another conversation inside a tool uses the slot of the run around it."""
    engine = ScriptedEngine([CALL("delegate"), "inner answer", "outer answer"])
    runner: Runner = Runner(nesting(lambda: runner), engine=engine, max_concurrent_turns=1)
    assert (await runner.run_async("s", "hi")).content == "outer answer"
    assert texts(await session_of(runner, "inner")) == ["from a tool", "inner answer"]
    assert [result.content for result in results(await session_of(runner))] == ["inner answer"]


async def test_others_do_not_get_the_slot_of_a_run_inside_a_tool() -> None:
    """A run inside a tool that need not wait keeps the slot: others wait until the outer run has ended."""
    order: list[str] = []

    async def inner(request: EngineRequest) -> str:
        order.append("inner")
        await anyio.wait_all_tasks_blocked()
        return "inner answer"

    async def other(request: EngineRequest) -> str:
        order.append("other")
        return "other answer"

    async def outer(request: EngineRequest) -> str:
        order.append("outer")
        return "outer answer"

    engine = ScriptedEngine([CALL("delegate"), inner, outer, other])
    runner: Runner = Runner(nesting(lambda: runner), engine=engine, max_concurrent_turns=1)
    async with anyio.create_task_group() as group:
        group.start_soon(runner.run_async, "s", "hi")
        group.start_soon(runner.run_async, "other", "hi")
    assert order == ["inner", "outer", "other"]


async def test_run_inside_a_tool_that_has_to_wait() -> None:
    """A run inside a tool that waits for a conversation whose turn waits for a slot gives the slot to it."""
    ready, go_on = anyio.Event(), anyio.Event()

    async def call(request: EngineRequest) -> Any:
        ready.set()
        await go_on.wait()
        return CALL("delegate")

    engine = ScriptedEngine([call, "first of inner", "from the tool", "outer answer"])
    runner: Runner = Runner(nesting(lambda: runner), engine=engine, max_concurrent_turns=1, tool_timeout=None)
    async with anyio.create_task_group() as group:
        group.start_soon(runner.run_async, "s", "hi")
        await ready.wait()
        group.start_soon(runner.run_async, "inner", "first")
        await anyio.wait_all_tasks_blocked()  # it has the conversation, and no slot
        go_on.set()
    assert texts(await session_of(runner, "inner")) == ["first", "first of inner", "from a tool", "from the tool"]
    assert texts(await session_of(runner))[-1] == "outer answer"


async def test_duplicate_inside_a_tool_that_has_to_wait() -> None:
    """A second delivery inside a tool waits for the first without a slot; the run around it then waits for its own."""
    outer, ready, go_on, go_on_again = Agent("Outer"), anyio.Event(), anyio.Event(), anyio.Event()

    @outer.tool
    async def deliver_again() -> str:
        response = await runner.run_async("inner", "hi", message_id="m1")
        assert response.duplicate
        return response.content

    async def call(request: EngineRequest) -> Any:
        ready.set()
        await go_on.wait()
        return CALL("deliver_again")

    async def wait(request: EngineRequest) -> str:
        await go_on_again.wait()
        return "third answer"

    engine = ScriptedEngine([call, "inner answer", wait, "outer answer"])
    runner: Runner = Runner(outer, engine=engine, max_concurrent_turns=1, tool_timeout=None)
    async with anyio.create_task_group() as group:
        group.start_soon(runner.run_async, "s", "hi")
        await ready.wait()
        group.start_soon(lambda: runner.run_async("inner", "hi", message_id="m1"))
        await anyio.wait_all_tasks_blocked()
        group.start_soon(runner.run_async, "third", "hi")
        await anyio.wait_all_tasks_blocked()
        go_on.set()
        await anyio.wait_all_tasks_blocked()
        assert len(engine.requests) == 3  # the third has the slot, and the outer run waits for it
        go_on_again.set()
    assert [result.content for result in results(await session_of(runner))] == ["inner answer"]
    assert texts(await session_of(runner, "third")) == ["hi", "third answer"]


async def test_several_runs_inside_tools_wait() -> None:
    """Several runs inside one run's tools that wait at the same time get one slot between them."""
    outer, ready, go_on = Agent("Outer"), anyio.Event(), anyio.Event()

    @outer.tool
    async def delegate(to: str) -> str:
        return (await runner.run_async(to, "from a tool")).content

    async def call(request: EngineRequest) -> Any:
        ready.set()
        await go_on.wait()
        return [CALL("delegate", to="a"), CALL("delegate", to="b"), CALL("delegate", to="c")]

    engine = ScriptedEngine([call], default="answer")
    runner: Runner = Runner(outer, engine=engine, max_concurrent_turns=1, tool_timeout=None)
    async with anyio.create_task_group() as group:
        group.start_soon(runner.run_async, "s", "hi")
        await ready.wait()
        for name in "abc":
            group.start_soon(runner.run_async, name, "first")
        await anyio.wait_all_tasks_blocked()
        go_on.set()
    assert [len((await session_of(runner, name)).history) for name in "abcs"] == [4, 4, 4, 4]


async def test_runners_inside_each_others_tools() -> None:
    """Two runners with one slot each, each running inside the other's tools, don't wait for each other."""
    barrier = asyncio.Barrier(2)

    async def call(request: EngineRequest) -> Any:
        await barrier.wait()
        return CALL("delegate")

    store = SessionStore()
    options: dict[str, Any] = {"max_concurrent_turns": 1, "tool_timeout": None}
    one: Runner = Runner(nesting(lambda: two, "of two"), store, ScriptedEngine([call], default="one"), **options)
    two: Runner = Runner(nesting(lambda: one, "of one"), store, ScriptedEngine([call], default="two"), **options)
    async with anyio.create_task_group() as group:
        group.start_soon(one.run_async, "a", "hi")
        group.start_soon(two.run_async, "b", "hi")
    assert texts(await session_of(one, "a"))[-1] == "one"
    assert texts(await session_of(one, "of one")) == ["from a tool", "one"]


async def test_run_that_outlives_the_one_around_it() -> None:
    """A run that a tool started and left behind keeps the slot until it ends, and then gives it back."""
    outer, left_behind = Agent("Outer"), set[asyncio.Task[Any]]()
    asked, go_on = anyio.Event(), anyio.Event()

    @outer.tool
    async def start() -> str:
        left_behind.add(asyncio.create_task(runner.run_async("inner", "hi")))
        await asked.wait()
        return "started"

    async def wait(request: EngineRequest) -> str:
        asked.set()
        await go_on.wait()
        return "inner answer"

    engine = ScriptedEngine([CALL("start"), wait, "outer answer", "next answer"])
    runner: Runner = Runner(outer, engine=engine, max_concurrent_turns=1)
    assert (await runner.run_async("s", "hi")).content == "outer answer"
    async with anyio.create_task_group() as group:
        group.start_soon(runner.run_async, "next", "hi")
        await anyio.wait_all_tasks_blocked()
        assert len(engine.requests) == 3
        go_on.set()
    assert (await left_behind.pop()).content == "inner answer"
    assert texts(await session_of(runner, "next")) == ["hi", "next answer"]


async def test_runs_started_after_the_one_around_them() -> None:
    """Runs that were left behind and start only after the run around them has ended take a slot each."""
    outer, left_behind = Agent("Outer"), set[asyncio.Task[Any]]()
    ended = anyio.Event()
    crowd = Crowd()

    async def run_later(session_id: str) -> AgentResponse:
        await ended.wait()
        return await runner.run_async(session_id, "hi")

    @outer.tool
    async def start() -> str:
        left_behind.update(asyncio.create_task(run_later(name)) for name in "abc")
        return "started"

    engine = ScriptedEngine([CALL("start"), "outer answer"], default=crowd.answer)
    runner: Runner = Runner(outer, engine=engine, max_concurrent_turns=1)
    await runner.run_async("s", "hi")
    ended.set()
    assert [(await task).content for task in left_behind] == ["answer"] * 3
    assert crowd.most == 1


async def test_run_of_the_same_conversation_inside_a_tool() -> None:
    """A run of the same conversation inside a tool is refused, and the tool's call answered with an error."""
    engine = ScriptedEngine([CALL("delegate"), "outer answer"])
    runner: Runner = Runner(nesting(lambda: runner, "s"), engine=engine, max_concurrent_turns=1)
    assert (await runner.run_async("s", "hi")).content == "outer answer"
    assert [result.is_error for result in results(await session_of(runner))] == [True]


async def test_circle_of_runs_inside_tools() -> None:
    """Two conversations whose tools run each other are not left waiting: one of the runs is refused."""
    outer, refused = Agent("Outer"), list[str]()

    @outer.tool
    async def delegate(to: str) -> str:
        try:
            return (await runner.run_async(to, "from a tool")).content
        except TurnInsideTurnError:
            refused.append(to)
            raise

    barrier = asyncio.Barrier(2)

    async def call(request: EngineRequest) -> Any:
        await barrier.wait()
        return CALL("delegate", to="b" if request.messages[0].text == "a" else "a")

    engine = ScriptedEngine([call, call], default="answer")
    runner: Runner = Runner(outer, engine=engine, max_concurrent_turns=2, tool_timeout=None)
    async with anyio.create_task_group() as group:
        for name in "ab":
            group.start_soon(runner.run_async, name, name)
    assert len(refused) == 1


async def test_slots_are_each_loops_own() -> None:
    """Each event loop has max_concurrent_turns slots of its own, also in a thread that a tool's run starts."""
    outer = Agent("Outer")

    @outer.tool
    def delegate() -> str:
        return asyncio.run(runner.run_async("inner", "from a thread")).content

    engine = ScriptedEngine([CALL("delegate"), "inner answer", "outer answer"])
    runner: Runner = Runner(outer, engine=engine, max_concurrent_turns=1)
    assert (await runner.run_async("s", "hi")).content == "outer answer"
    assert [result.content for result in results(await session_of(runner))] == ["inner answer"]


async def test_waiting_in_another_loop_keeps_the_slot() -> None:
    """Code that waits in another loop, in a thread that a tool's run starts, gives back no slot of the tool's loop."""

    async def wait() -> None:
        give_back_slots()

    with TurnSlots(1).entered() as slot:
        await slot.hold()
        await anyio.to_thread.run_sync(lambda: asyncio.run(wait()))
        assert slot.limiter.borrowed_tokens == 1
        give_back_slots()
        assert slot.limiter.borrowed_tokens == 0


async def test_slot_held_by_several_at_once() -> None:
    """Several members of one run that want its slot back at the same time get it once."""
    slots = TurnSlots(1)
    with slots.entered() as other, slots.entered() as slot:
        assert slot is other
        async with anyio.create_task_group() as group:
            for _ in range(3):
                group.start_soon(slot.hold)
        assert slot.limiter.borrowed_tokens == 1
    assert slot.limiter.borrowed_tokens == 0


async def test_bare_turn_in_a_tool_waits_without_the_slot() -> None:
    """A tool that waits for another conversation's turn lets that conversation's run have the only slot."""
    engine = ScriptedEngine(default="hello").when("look", call="look_elsewhere")
    support = Agent("Support", engine=engine)
    runner = Runner(support, max_concurrent_turns=1)
    other = await runner.session_store.get_or_create("other", support)
    tool_runs, other_is_taken = anyio.Event(), anyio.Event()

    @support.tool
    async def look_elsewhere() -> str:
        tool_runs.set()
        await other_is_taken.wait()
        async with other.turn():
            return f"{len(other.history)} messages"

    async def run_the_other() -> None:
        # Has the other conversation's place, and waits for the slot that the first run holds.
        await runner.run_async("other", "hi")

    async def tell_when_taken() -> None:
        await tool_runs.wait()
        await anyio.wait_all_tasks_blocked()
        other_is_taken.set()

    async with anyio.create_task_group() as group:
        group.start_soon(runner.run_async, "s", "look")
        await tool_runs.wait()
        group.start_soon(run_the_other)
        group.start_soon(tell_when_taken)
    assert texts(await session_of(runner, "other")) == ["hi", "hello"]
