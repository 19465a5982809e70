from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from chatflow.core.agent import Agent
from chatflow.core.engine import EngineReply
from chatflow.core.events import ToolFinished, ToolStarted
from chatflow.core.messages import Handoff, ImagePart, Role, TextPart, ToolCall, ToolResult
from chatflow.core.tools import ToolContext, tool
from chatflow.engines.common_form import INVALID_ARGUMENTS_KEY
from chatflow.engines.scripted import Scripted, ScriptedEngine
from chatflow.exceptions import ToolError
from chatflow.runner import Runner
from tests.runs import results, session_of

CALL = ScriptedEngine.call


def runner_of(agent: Agent, *replies: Scripted, **options: Any) -> Runner:
    """A runner whose model says *replies* and then that it is done."""
    return Runner(agent, engine=ScriptedEngine(replies, default="done"), **options)


async def results_of(runner: Runner) -> list[ToolResult]:
    """The tool results of a run that ends well."""
    assert (await runner.run_async("s", "hi")).content == "done"
    return results(await session_of(runner))


def agent_with(*tools: Callable[..., Any]) -> Agent:
    """An agent with these tools."""
    return Agent("Support", tools=tools)


def echo(text: str) -> str:
    """Say it again."""
    return text


# --- a batch ---


async def test_calls_and_results_are_stored() -> None:
    """A model's calls are stored as one message and their results as the next, and the model sees both."""
    calls_made = [CALL("echo", text="a")]
    reply = EngineReply(text="one moment", tool_calls=calls_made, usage={"n": 1}, extra={"signature": "x"})
    engine = ScriptedEngine([reply, "done"])
    runner = Runner(agent_with(echo), engine=engine)
    await runner.run_async("s", "hi")
    _, calls, answers, _ = (await session_of(runner)).history
    assert (calls.role, calls.content, calls.agent_name) == (Role.MODEL, "one moment", "Support")
    assert (calls.usage, calls.extra) == ({"n": 1}, {"signature": "x"})
    assert calls.tool_calls == (ToolCall(id="call_1", name="echo", args={"text": "a"}),)
    assert (answers.role, answers.tool_results) == (
        Role.TOOL,
        (ToolResult(tool_call_id="call_1", name="echo", content="a"),),
    )
    assert engine.requests[1].messages[-2:] == (calls, answers)


async def test_calls_run_at_once() -> None:
    """A model's parallel calls run at the same time: eight meet inside the tools, also where all ids are the same."""
    barrier = asyncio.Barrier(8)

    async def meet(number: int) -> int:
        await barrier.wait()
        return number

    calls = [ToolCall(id="c", name="meet", args={"number": number}) for number in range(8)]
    found = await results_of(runner_of(agent_with(meet), calls))
    assert [(result.content, result.is_error) for result in found] == [(number, False) for number in range(8)]


class Gates:
    """A tool each of whose calls waits until it is let go on."""

    def __init__(self, calls: int) -> None:
        self.begun: list[int] = []
        self.gates = [anyio.Event() for _ in range(calls)]
        self.at_once = 0
        self.most = 0

    async def work(self, number: int) -> int:
        """Work."""
        self.begun.append(number)
        self.at_once += 1
        self.most = max(self.most, self.at_once)
        try:
            await self.gates[number].wait()
        finally:
            self.at_once -= 1
        return number

    def calls(self) -> list[ToolCall]:
        """A call for each gate."""
        return [CALL("work", number=number) for number in range(len(self.gates))]


async def test_calls_wait_for_one_another() -> None:
    """At most so many calls run at once; when one ends the next in call order begins."""
    gates = Gates(5)
    runner = runner_of(agent_with(gates.work), gates.calls(), max_concurrent_tool_calls=2)
    async with anyio.create_task_group() as group:
        group.start_soon(runner.run_async, "s", "hi")
        for ending, begun in ((1, [0, 1]), (0, [0, 1, 2]), (3, [0, 1, 2, 3]), (2, [0, 1, 2, 3, 4])):
            await anyio.wait_all_tasks_blocked()
            assert gates.begun == begun
            gates.gates[ending].set()
        gates.gates[4].set()
    assert gates.most == 2
    assert [result.content for result in results(await session_of(runner))] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(("limit", "at_once"), [(None, 12), (8, 8), (1, 1)])
async def test_number_of_calls_at_once(limit: int | None, at_once: int) -> None:
    """As many calls as the limit allows do run at once, all of them where there is none."""
    gates = Gates(12)
    runner = runner_of(agent_with(gates.work), gates.calls(), max_concurrent_tool_calls=limit)
    async with anyio.create_task_group() as group:
        group.start_soon(runner.run_async, "s", "hi")
        await anyio.wait_all_tasks_blocked()
        assert gates.begun == list(range(at_once))
        for gate in gates.gates:
            gate.set()
    assert gates.most == at_once


async def test_waiting_call_has_not_started() -> None:
    """A call is told to have started when it begins to run, and not while it waits for others."""
    runner = runner_of(agent_with(echo), [CALL("echo", text=text) for text in "abc"], max_concurrent_tool_calls=1)
    async with runner.run_stream("s", "hi") as stream:
        events = [event async for event in stream]
    told = [
        (type(event).__name__, event.call.args["text"])
        for event in events
        if isinstance(event, ToolStarted | ToolFinished)
    ]
    assert told == [(name, text) for text in "abc" for name in ("ToolStarted", "ToolFinished")]


async def test_waiting_is_no_part_of_the_timeout() -> None:
    """A call that waits for another to run out of time has all of its own time."""

    async def work(how: str) -> str:
        if how == "hang":
            await anyio.sleep_forever()
        await anyio.lowlevel.checkpoint()
        return how

    calls = [CALL("work", how="hang"), CALL("work", how="a"), CALL("work", how="hang"), CALL("work", how="b")]
    found = await results_of(runner_of(agent_with(work), calls, max_concurrent_tool_calls=1, tool_timeout=0.02))
    assert [result.is_error for result in found] == [True, False, True, False]


async def test_failing_call_lets_the_next_one_begin() -> None:
    """A call that fails, is refused or is cancelled by its own doing makes room like any other."""

    async def fail(how: str) -> None:
        if how == "cancel":
            raise asyncio.CancelledError
        raise LookupError

    calls = [CALL("fail", how="raise"), CALL("fail", how="cancel"), CALL("fail"), CALL("gone"), CALL("echo", text="a")]
    found = await results_of(runner_of(agent_with(fail, echo), calls, max_concurrent_tool_calls=1))
    assert [result.is_error for result in found] == [True, True, True, True, False]


async def test_exit_ends_waiting_calls() -> None:
    """A call that waits for others does not begin once an exit has ended them."""
    error = KeyboardInterrupt()
    begun: list[str] = []

    async def leave(name: str) -> None:
        begun.append(name)
        raise error

    runner = runner_of(
        agent_with(leave), [CALL("leave", name="a"), CALL("leave", name="b")], max_concurrent_tool_calls=1
    )
    with pytest.raises(KeyboardInterrupt) as caught:
        await runner.run_async("s", "hi")
    assert (caught.value, begun) == (error, ["a"])
    assert (await runner.run_async("s", "hi")).content == "done"


async def test_run_inside_a_tool_has_its_own_limit() -> None:
    """Calls of a run inside a tool do not wait for the call around them."""
    inner = runner_of(agent_with(echo), [CALL("echo", text="a"), CALL("echo", text="b")], max_concurrent_tool_calls=1)

    async def ask() -> str:
        return (await inner.run_async("inner", "hi")).content

    found = await results_of(runner_of(agent_with(ask), [CALL("ask"), CALL("ask")], max_concurrent_tool_calls=1))
    assert [result.content for result in found] == ["done", "done"]


async def test_ended_calls_take_no_slot() -> None:
    """Calls that had ended in an earlier attempt keep nobody waiting when the message is tried again."""
    gates = Gates(4)
    agent = Agent("Support", tools=[tool(gates.work, idempotent=True)])
    runner = runner_of(agent, gates.calls(), max_concurrent_tool_calls=2)
    for number in (0, 1):
        gates.gates[number].set()
    async with anyio.create_task_group() as group:
        group.start_soon(partial(runner.run_async, "s", "hi", message_id="m"))
        await anyio.wait_all_tasks_blocked()
        group.cancel_scope.cancel()
    assert gates.begun == [0, 1, 2, 3]
    async with anyio.create_task_group() as group:
        group.start_soon(partial(runner.run_async, "s", "hi", message_id="m"))
        await anyio.wait_all_tasks_blocked()
        assert gates.begun == [0, 1, 2, 3, 2, 3]
        for gate in gates.gates:
            gate.set()
    assert [result.content for result in results(await session_of(runner))] == [0, 1, 2, 3]


async def test_results_in_call_order() -> None:
    """Results stand in the calls' order in one message, in whatever order the tools end."""
    second_ended = anyio.Event()

    async def first() -> str:
        await second_ended.wait()
        return "first"

    async def second() -> str:
        second_ended.set()
        return "second"

    runner = runner_of(agent_with(first, second), [CALL("first"), CALL("second")])
    response = await runner.run_async("s", "hi")
    assert response.tool_calls_executed == ("first", "second")
    (message,) = [message for message in (await session_of(runner)).history if message.role is Role.TOOL]
    assert [result.content for result in message.tool_results] == ["first", "second"]


async def test_context() -> None:
    """A tool sees the turn's session, its state and the agent that answers, and what it changes is committed."""
    support = Agent("Support")

    @support.tool
    async def look(context: ToolContext) -> int:
        assert context.agent is support
        context.state["looked"] = True
        context.session.metadata["by"] = context.agent.name
        return len(context.session.history)

    runner = runner_of(support, CALL("look"))
    assert [result.content for result in await results_of(runner)] == [2]
    session = await session_of(runner)
    assert (session.state, session.metadata) == ({"looked": True}, {"by": "Support"})


async def test_tool_in_a_thread() -> None:
    """A tool that is no async function belongs to the turn, too."""

    def look(context: ToolContext) -> int:
        context.state["looked"] = True
        return len(context.session.history)

    runner = runner_of(agent_with(look), CALL("look"))
    assert [result.content for result in await results_of(runner)] == [2]
    assert (await session_of(runner)).state == {"looked": True}


async def test_several_batches() -> None:
    """The model is asked again after each batch, until it calls nothing."""
    runner = runner_of(agent_with(echo), CALL("echo", text="a"), [CALL("echo", text="b"), CALL("echo", text="c")])
    assert [result.content for result in await results_of(runner)] == ["a", "b", "c"]


# --- what goes wrong ---


async def test_tool_that_raises(caplog: pytest.LogCaptureFixture) -> None:
    """A tool that raises is an error result that says nothing of the error but a reference to the logged traceback."""

    async def fail() -> None:
        raise LookupError("password=hunter2")

    (result,) = await results_of(runner_of(agent_with(fail), CALL("fail")))
    assert result.is_error
    assert "hunter2" not in result.content
    assert "LookupError" not in result.content
    reference = re.search(r"reference (\w+)", result.content)
    assert reference is not None
    (record,) = caplog.records
    assert record.getMessage() == f"session 's': tool 'fail' failed (reference {reference[1]})"
    assert record.exc_info is not None
    assert str(record.exc_info[1]) == "password=hunter2"


@pytest.mark.parametrize(("text", "told"), [("No such order.", "No such order."), ("", "The tool failed.")])
async def test_tool_that_says_why_it_fails(caplog: pytest.LogCaptureFixture, text: str, told: str) -> None:
    """A tool that raises a ToolError is an error result with its text, which the log does not have."""

    async def fail() -> None:
        raise ToolError(text)

    (result,) = await results_of(runner_of(agent_with(fail), CALL("fail")))
    assert result == ToolResult(tool_call_id="call_1", name="fail", content=told, is_error=True)
    (record,) = caplog.records
    assert (record.levelname, record.exc_info) == ("WARNING", None)
    assert record.getMessage() == "session 's': tool 'fail' failed, and says why to the model"


async def test_tool_error_without_a_text() -> None:
    """A ToolError that can't say what it is fails like any other exception, and takes nobody along."""

    class MuteError(ToolError):
        def __str__(self) -> str:
            raise ValueError

    def fail() -> None:
        raise MuteError("x")

    (result,) = await results_of(runner_of(agent_with(fail), CALL("fail")))
    assert result.is_error
    assert result.content.startswith("The tool failed; the error was logged")


async def test_long_text_of_a_failure() -> None:
    """What a ToolError says is cut as results are."""

    def fail() -> None:
        raise ToolError("a" * 200)

    runner = runner_of(agent_with(fail), CALL("fail"), max_result_characters=100)
    (result,) = await results_of(runner)
    assert (len(result.content), result.is_error) == (100, True)


@pytest.mark.parametrize("is_error", [False, True])
async def test_tool_that_returns_a_result(is_error: bool) -> None:
    """A result that a tool returns is taken for its content, and for whether it is an error; it is the call's."""

    async def look() -> ToolResult:
        content = ["seen", ImagePart(data=b"png")]
        return ToolResult(tool_call_id="mine", name="mine", content=content, is_error=is_error)

    (result,) = await results_of(runner_of(agent_with(look), CALL("look")))
    assert (result.tool_call_id, result.name, result.is_error) == ("call_1", "look", is_error)
    assert result.parts == (TextPart("seen"), ImagePart(data=b"png"))


async def test_result_that_holds_what_cant_be_stored() -> None:
    """A result that a tool returns is refused like any other value where its content can't be stored."""

    async def look() -> ToolResult:
        return ToolResult(tool_call_id="", name="", content=[object()])

    (result,) = await results_of(runner_of(agent_with(look), CALL("look")))
    assert (result.is_error, "result[0] is of a kind that can't be stored" in result.content) == (True, True)


@pytest.mark.parametrize("error", [ExceptionGroup("several", [OSError()]), StopIteration(), TimeoutError("mine")])
@pytest.mark.parametrize("in_thread", [False, True])
async def test_tool_that_raises_something_odd(error: Exception, in_thread: bool) -> None:
    """Whatever exception a tool raises, it is an error result."""

    async def fail() -> None:
        raise error

    def fail_in_thread() -> None:
        raise error

    name = "fail_in_thread" if in_thread else "fail"
    (result,) = await results_of(runner_of(agent_with(fail, fail_in_thread), CALL(name)))
    assert (result.is_error, "The tool failed" in result.content) == (True, True)


async def test_failing_tool_leaves_its_siblings_alone() -> None:
    """A failing tool takes no other call's result, also where it fails while the others still run."""
    failed = anyio.Event()

    async def fail() -> None:
        failed.set()
        raise LookupError

    async def wait() -> str:
        await failed.wait()
        await anyio.lowlevel.checkpoint()
        return "waited"

    found = await results_of(runner_of(agent_with(fail, wait), [CALL("wait"), CALL("fail"), CALL("wait")]))
    assert [result.is_error for result in found] == [False, True, False]
    assert (found[0].content, found[2].content) == ("waited", "waited")


async def test_wrong_arguments() -> None:
    """Arguments that the tool does not take are an error result that says which and why; the tool is not run."""
    found = await results_of(runner_of(agent_with(echo), [CALL("echo", text=5), CALL("echo", test="a")]))
    assert [result.is_error for result in found] == [True, True]
    assert "text: Input should be a valid string" in found[0].content
    assert "test: unknown" in found[1].content


async def test_unknown_tool() -> None:
    """A call of a tool that is not there is an error result that names those that are."""
    support = Agent("Support", tools=[echo], handoffs=[Agent("Billing")])
    (result,) = await results_of(runner_of(support, CALL("shout")))
    assert (result.is_error, result.name) == (True, "shout")
    assert result.content == "There is no tool named 'shout'. The tools there are: echo, transfer_to_billing."


async def test_unknown_tool_among_many() -> None:
    """Of very many tools that are there some are named, and the others counted; the one that is not is cut."""
    support = Agent("Support", tools=[tool(echo, name=f"{'echo' * 12}_{number}") for number in range(100)])
    (result,) = await results_of(runner_of(support, CALL("shout" * 10_000)))
    assert result.content.endswith(f"{'echo' * 12}_4 and 95 more.")
    assert len(result.content) < 500


async def test_call_without_any_tools() -> None:
    """A call where there are no tools is an error result that says so."""
    (result,) = await results_of(runner_of(Agent("Support"), CALL("shout")))
    assert result.content == "There is no tool named 'shout'. The tools there are: none."


@pytest.mark.parametrize(
    ("raw", "fault"),
    [
        ('{"text": ', "Expecting value: line 1 column 10"),
        ("[1]", "they are a list"),
        ('"text"', "they are a string"),
        ("null", "they are null"),
        ("5", "they are a number"),
        ("true", "they are a boolean"),
        ("NaN", "NaN is no number in JSON"),
        ('{"text": -Infinity}', "-Infinity is no number in JSON"),
        ('{"text": 1e999}', "the number 1e999 is too large"),
        ('{"text": ' + "9" * 5000 + "}", "4300 digits"),
        ('{"text": "a", "text": "b"}', "the key 'text' stands in them twice"),
        ('{"text": {"a": 1, "b": 2, "a": 3}}', "the key 'a' stands in them twice"),
        ('{"' + "k" * 10_000 + '": 1, "' + "k" * 10_000 + '": 2}', "kkk...kkk"),
        ('{"text": 1' + "0" * 10_000 + ".0}", "is too large"),
        ("[" * 100_000, "they nest too deeply"),
        ('{"text": ' + "[" * 300 + "]" * 300 + "}", "nested deeper than 200 levels"),
        ('{"text": "a"', "Expecting ',' delimiter"),
        (None, "they are no text"),
        (["text"], "they are no text"),
        ('{"text": "a"}', "they could not be read"),
    ],
    ids=lambda value: str(value)[:20],
)
async def test_arguments_that_are_no_json_object(raw: Any, fault: str) -> None:
    """Arguments that an engine could not read are an error result that says what is wrong; the tool is not run."""
    reply = EngineReply(tool_calls=[CALL("echo", text="a"), CALL("echo")], extra={INVALID_ARGUMENTS_KEY: {"1": raw}})
    found = await results_of(runner_of(agent_with(echo), reply))
    assert [result.is_error for result in found] == [False, True]
    assert "not a JSON object" in found[1].content
    assert fault in found[1].content
    assert len(found[1].content) < 300


async def test_tool_timeout(caplog: pytest.LogCaptureFixture) -> None:
    """A call that takes longer than tool_timeout is an error result; its siblings' results stay."""
    cancelled = anyio.Event()

    async def hang() -> None:
        try:
            await anyio.Event().wait()
        finally:
            cancelled.set()

    async def answer() -> str:
        return "a"

    runner = runner_of(agent_with(hang, answer), [CALL("hang"), CALL("answer")], tool_timeout=0.01)
    found = await results_of(runner)
    assert cancelled.is_set()
    assert [result.is_error for result in found] == [True, False]
    assert found[0].content == "The tool did not answer within 0.01 seconds; whether it took effect is unknown."
    assert [record.getMessage() for record in caplog.records] == [
        "session 's': tool 'hang' was given up after tool_timeout=0.01 s"
    ]


async def test_result_that_cannot_be_stored(caplog: pytest.LogCaptureFixture) -> None:
    """A result that can't be stored is an error result that names the path, and is logged."""

    async def look_up() -> dict[str, Any]:
        return {"items": [1, object()]}

    found = await results_of(runner_of(agent_with(look_up, echo), [CALL("look_up"), CALL("echo", text="a")]))
    assert [result.is_error for result in found] == [True, False]
    assert "result.items[1]" in found[0].content
    assert "tool 'look_up' returned what can't be stored" in caplog.text


async def test_result_with_something_else_among_parts(caplog: pytest.LogCaptureFixture) -> None:
    """A value that stands beside a part in a list is an error result that names the place, and the log says why."""

    async def look_up() -> list[Any]:
        return [ImagePart(url="https://pictures.example/1"), {"width": 3}]

    (result,) = await results_of(runner_of(agent_with(look_up), CALL("look_up")))
    assert "result[1] is of a kind" in result.content
    assert "dict is neither a part nor text" in caplog.text


async def test_path_to_what_cannot_be_stored_stays_short() -> None:
    """The path that names what can't be stored is cut where it is very long."""

    async def look_up() -> Any:
        value: Any = object()
        for _ in range(100):
            value = {"k" * 70: value}
        return value

    (result,) = await results_of(runner_of(agent_with(look_up), CALL("look_up")))
    assert len(result.content) < 400


async def test_result_that_raises() -> None:
    """A result that raises when it is looked at is a failure of the tool."""

    class Broken(dict[str, Any]):
        def items(self) -> Any:
            raise LookupError

    async def look_up() -> Any:
        return Broken(a=1)

    (result,) = await results_of(runner_of(agent_with(look_up), CALL("look_up")))
    assert "The tool failed" in result.content


async def test_result_of_none() -> None:
    """A tool that returns nothing has None for its result, and no error."""

    async def act() -> None:
        return None

    assert [(each.content, each.is_error) for each in await results_of(runner_of(agent_with(act), CALL("act")))] == [
        (None, False)
    ]


async def test_turn_timeout_in_a_tool() -> None:
    """A turn that runs out of time in a tool raises TimeoutError, in no group, and leaves nothing."""

    async def hang() -> None:
        await anyio.Event().wait()

    runner = runner_of(agent_with(hang), [CALL("hang"), CALL("hang")], turn_timeout=0.05)
    with pytest.raises(TimeoutError, match=r"turn_timeout=0\.05"):
        await runner.run_async("s", "hi")
    assert len((await session_of(runner)).history) == 0
    assert (
        await runner_of(Agent("Support"), session_store=runner.session_store).run_async("s", "hi")
    ).content == "done"


# --- cancellation and exits ---


class Hanging:
    """A tool that changes the state and then waits for ever."""

    def __init__(self) -> None:
        self.entered = anyio.Event()

    async def hang(self, context: ToolContext) -> None:
        """Wait."""
        context.state["hung"] = True
        self.entered.set()
        await anyio.Event().wait()


async def left_nothing(runner: Runner) -> None:
    """Check that the turn has left no trace, and that the next one works."""
    session = await session_of(runner)
    assert (len(session.history), session.state) == (0, {})
    assert (await runner.run_async("s", "hi")).content == "done"


async def test_cancelled_by_a_scope_in_a_tool() -> None:
    """A run cancelled by a scope while tools run leaves nothing, and the next one works."""
    hanging = Hanging()
    runner = runner_of(agent_with(hanging.hang), [CALL("hang"), CALL("hang")])
    async with anyio.create_task_group() as group:
        group.start_soon(runner.run_async, "s", "hi")
        await hanging.entered.wait()
        group.cancel_scope.cancel()
    await left_nothing(runner)


async def test_cancelled_by_its_task_in_a_tool() -> None:
    """A run whose task is cancelled while tools run leaves nothing, and the next one works."""
    hanging = Hanging()
    runner = runner_of(agent_with(hanging.hang), [CALL("hang"), CALL("hang")])
    task = asyncio.create_task(runner.run_async("s", "hi"))
    await hanging.entered.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await left_nothing(runner)


@pytest.mark.parametrize("end", [KeyboardInterrupt, SystemExit])
async def test_tool_that_ends_everything(end: type[BaseException]) -> None:
    """An exit that a tool raises ends its siblings, and leaves the run as it is."""
    hanging, error = Hanging(), end()

    async def leave() -> None:
        await hanging.entered.wait()
        raise error

    runner = runner_of(agent_with(hanging.hang, leave), [CALL("hang"), CALL("leave")])
    with pytest.raises(end) as caught:
        await runner.run_async("s", "hi")
    assert caught.value is error
    await left_nothing(runner)


async def test_tool_that_cancels_its_task() -> None:
    """A tool that cancels its own task ends the run with a cancellation, and the next one works."""

    async def leave() -> None:
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        await anyio.lowlevel.checkpoint()

    runner = runner_of(agent_with(leave), CALL("leave"))
    with pytest.raises(asyncio.CancelledError):
        await runner.run_async("s", "hi")
    await left_nothing(runner)


# --- handoffs ---


def support_and_billing() -> tuple[Agent, Agent]:
    """Two agents that may hand over to one another, each with a tool of its own."""
    support, billing = Agent("Support", "You are Support."), Agent("Billing", "You are Billing.", tools=[echo])
    support.add_handoff(billing)
    billing.add_handoff(support)
    return support, billing


async def test_handoff() -> None:
    """After a handoff the next model call goes to the new agent, with its instructions and tools."""
    support, billing = support_and_billing()
    engine = ScriptedEngine([CALL("transfer_to_billing", reason="a bill"), "done"])
    runner = Runner(support, engine=engine)
    response = await runner.run_async("s", "hi")
    assert response.active_agent_name == "Billing"
    assert response.handoff == Handoff(target_agent_name="Billing", reason="a bill")
    assert response.tool_calls_executed == ("transfer_to_billing",)
    request = engine.requests[1]
    assert request.agent is billing
    assert request.messages[0].text == "You are Billing."
    assert [tool.name for tool in request.tools] == ["echo", "transfer_to_support"]
    session = await session_of(runner)
    assert session.active_agent is billing
    assert [result.content for result in results(session)] == [{"transferred_to": "Billing", "reason": "a bill"}]


async def test_handoff_without_a_reason() -> None:
    """A handoff without a reason has a result without one."""
    (result,) = await results_of(runner_of(support_and_billing()[0], CALL("transfer_to_billing")))
    assert (result.content, result.is_error) == ({"transferred_to": "Billing"}, False)


async def test_handoff_by_a_tool_of_ones_own() -> None:
    """Any tool that returns a Handoff hands over, and its context updates are merged into the state."""
    support, _ = support_and_billing()

    @support.tool
    async def escalate(context: ToolContext) -> Handoff:
        context.state["kept"] = 1
        return Handoff(target_agent_name="Billing", context_updates={"order": {"id": 7}})

    runner = runner_of(support, CALL("escalate"))
    response = await runner.run_async("s", "hi")
    assert response.active_agent_name == "Billing"
    assert (await session_of(runner)).state == {"kept": 1, "order": {"id": 7}}


async def test_two_handoffs_in_one_batch() -> None:
    """Of two handoffs in one batch the first in call order wins, and the other is answered with an error."""
    first_ended = anyio.Event()
    support = Agent("Support", handoffs=[Agent("Billing"), Agent("Sales")])

    @support.tool
    async def escalate() -> Handoff:
        await first_ended.wait()
        return Handoff(target_agent_name="Billing", context_updates={"by": "first"})

    @support.tool
    async def sell() -> Handoff:
        first_ended.set()
        return Handoff(target_agent_name="Sales", context_updates={"by": "second"})

    runner = runner_of(support, [CALL("escalate"), CALL("sell"), CALL("transfer_to_sales")])
    found = await results_of(runner)
    assert [result.is_error for result in found] == [False, True, True]
    session = await session_of(runner)
    assert (session.active_agent_name, session.state) == ("Billing", {"by": "first"})


async def test_handoff_beside_a_tool() -> None:
    """A handoff takes no result from the tools called beside it."""
    support = Agent("Support", tools=[echo], handoffs=[Agent("Billing")])
    found = await results_of(runner_of(support, [CALL("transfer_to_billing"), CALL("echo", text="a")]))
    assert [result.content for result in found] == [{"transferred_to": "Billing"}, "a"]


async def test_handoff_to_an_unknown_agent() -> None:
    """A handoff to an agent that is not there is an error result that names those that are; the agent stays."""
    support, _ = support_and_billing()

    @support.tool
    async def escalate() -> Handoff:
        return Handoff(target_agent_name="Sales", context_updates={"lost": True})

    runner = runner_of(support, CALL("escalate"))
    response = await runner.run_async("s", "hi")
    session = await session_of(runner)
    (result,) = results(session)
    assert result.is_error
    assert result.content == "There is no agent named 'Sales'. The agents there are: Support, Billing."
    assert (response.active_agent_name, response.handoff, session.state) == ("Support", None, {})


async def test_handoff_to_an_unknown_agent_among_many() -> None:
    """Of very many agents some are named to the model, and the others counted."""
    support = Agent("Support", handoffs=[Agent(f"{number:05}{'Billing' * 8}") for number in range(100)])

    @support.tool
    async def escalate() -> Handoff:
        return Handoff(target_agent_name="Sales")

    (result,) = await results_of(runner_of(support, CALL("escalate")))
    assert result.content.endswith(f"00003{'Billing' * 8} and 96 more.")


async def test_handoff_after_one_to_an_unknown_agent() -> None:
    """A handoff to an agent that is not there does not keep the next one in its batch from taking effect."""
    support, _ = support_and_billing()

    @support.tool
    async def escalate() -> Handoff:
        return Handoff(target_agent_name="Sales")

    found = await results_of(runner_of(support, [CALL("escalate"), CALL("transfer_to_billing")]))
    assert [result.is_error for result in found] == [True, False]


async def test_handoff_limit() -> None:
    """Past max_handoffs_per_turn a handoff is answered with an error, and the agent stays."""
    back_and_forth = [CALL("transfer_to_billing"), CALL("transfer_to_support"), CALL("transfer_to_billing")]
    runner = runner_of(support_and_billing()[0], *back_and_forth, max_handoffs_per_turn=2)
    response = await runner.run_async("s", "hi")
    found = results(await session_of(runner))
    assert [result.is_error for result in found] == [False, False, True]
    assert found[2].content == "No more handoffs in this turn. Answer the user yourself."
    assert response.active_agent_name == "Support"
    assert response.handoff == Handoff(target_agent_name="Support")
    assert response.tool_calls_executed == ("transfer_to_billing", "transfer_to_support", "transfer_to_billing")


async def test_no_handoffs() -> None:
    """With max_handoffs_per_turn=0 no handoff takes effect."""
    runner = runner_of(support_and_billing()[0], CALL("transfer_to_billing"), max_handoffs_per_turn=0)
    assert [result.is_error for result in await results_of(runner)] == [True]
    assert (await session_of(runner)).active_agent_name == "Support"


async def test_handoffs_are_counted_by_turn() -> None:
    """The next turn has all its handoffs again."""
    replies: list[Scripted] = [CALL("transfer_to_billing"), "one", CALL("transfer_to_support")]
    runner = runner_of(support_and_billing()[0], *replies, max_handoffs_per_turn=1)
    await runner.run_async("s", "hi")
    assert (await runner.run_async("s", "hi")).active_agent_name == "Support"


async def test_handoff_to_oneself() -> None:
    """An agent may hand over to itself, which counts like any handoff."""
    support = Agent("Support")

    @support.tool
    async def restart() -> Handoff:
        return Handoff(target_agent_name="Support", context_updates={"step": 1})

    runner = runner_of(support, CALL("restart"))
    assert [result.content for result in await results_of(runner)] == [{"transferred_to": "Support"}]
    assert (await session_of(runner)).state == {"step": 1}


async def test_failed_turn_takes_its_handoff_back() -> None:
    """A handoff in a turn that fails later has not happened."""
    runner = runner_of(support_and_billing()[0], CALL("transfer_to_billing"), LookupError)
    with pytest.raises(LookupError):
        await runner.run_async("s", "hi")
    assert (await session_of(runner)).active_agent_name == "Support"
