from __future__ import annotations

import asyncio
import contextvars
import gc
import itertools
import re
from collections.abc import AsyncGenerator, Sequence
from contextlib import suppress
from typing import Any, Final

import anyio
import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chatflow import (
    Agent,
    AgentResponse,
    AgentSession,
    Done,
    EngineError,
    EngineReply,
    EngineRequest,
    HandedOff,
    Handoff,
    Message,
    MessageInProgressError,
    ReasoningDelta,
    Role,
    RunEvent,
    Runner,
    RunStream,
    ScriptedEngine,
    SessionError,
    SessionStateError,
    SessionStore,
    StoreClosedError,
    TextDelta,
    ToolContext,
    ToolFinished,
    ToolStarted,
    TurnInsideTurnError,
    UsageReported,
)
from chatflow.testing.conformance.conversation import PausingEngine
from tests.runs import results, session_of, texts
from tests.strategies import LONG_AGO

CALL = ScriptedEngine.call


async def events_of(stream: RunStream) -> list[RunEvent]:
    """Everything that a run tells."""
    async with stream:
        return [event async for event in stream]


def said(events: Sequence[RunEvent]) -> str:
    """The text that was told, all pieces together."""
    return "".join(event.text for event in events if isinstance(event, TextDelta))


# --- whatever a run does ---


class Broken(BaseException):
    """No Exception: what it ends is told to no model."""


def family() -> Agent:
    """Two agents that hand over to each other, with a tool that works and some that do not."""

    async def note(key: str, value: int, context: ToolContext) -> str:
        context.state[key] = value
        return f"{key} noted"

    async def fail() -> str:
        raise LookupError

    async def break_off() -> str:
        raise Broken

    async def say(text: str, context: ToolContext) -> str:
        await context.session.add_message(Message(Role.SYSTEM, text))
        return "said"

    def hand_over(to: str) -> Handoff:
        return Handoff(target_agent_name=to, context_updates={"handed": to})

    support, billing = (Agent(name) for name in ("Support", "Billing"))
    support.add_handoff(billing)
    billing.add_handoff(support)
    for agent in (support, billing):
        for function in (note, fail, break_off, say, hand_over):
            agent.tool(function)
    return support


SUPPORT: Final = family()

_calls: Final = st.one_of(
    st.builds(CALL, st.just("note"), key=st.sampled_from("ab"), value=st.integers(0, 9)),
    st.builds(CALL, st.just("note"), key=st.integers()),  # it takes no such arguments
    st.builds(CALL, st.sampled_from(["fail", "not_there", "transfer_to_billing", "transfer_to_support"])),
    st.builds(CALL, st.just("say"), text=st.text(max_size=3)),
    st.builds(CALL, st.just("hand_over"), to=st.sampled_from(["Support", "Billing", "Nobody"])),
)
_texts: Final = st.none() | st.text(" \nabé.", max_size=12)
_usages: Final = st.none() | st.dictionaries(st.sampled_from(["in", "out"]), st.integers(0, 9))
_extras: Final = st.sampled_from([{}, {"reasoning_content": "let me think"}, {"reasoning_content": None}])
_asking: Final = st.builds(
    EngineReply, text=_texts, tool_calls=st.lists(_calls, min_size=1, max_size=3), usage=_usages, extra=_extras
)
_breaking: Final = st.builds(EngineReply, tool_calls=st.just([CALL("break_off")]))
_last: Final = st.one_of(
    st.builds(EngineReply, text=_texts, usage=_usages, extra=_extras),
    st.sampled_from([EngineError("down", model="m"), LookupError("mine"), Broken("off")]),
    _breaking,
)
scripts: Final = st.builds(lambda asking, last: [*asking, last], st.lists(_asking, max_size=3), _last)
"""What a model says in one turn: calls of all kinds, then an answer or something that ends the turn."""


@attrs.define
class Outcome:
    """What a turn came to: what is stored, and what its caller was told."""

    session: dict[str, Any]
    response: AgentResponse | None
    error: str
    events: list[RunEvent]


async def come_to(script: Sequence[Any], *, streams: bool) -> Outcome:
    """Run a turn of this script, after one that was not streamed."""
    runner = Runner(SUPPORT, engine=ScriptedEngine(["yes", *script]), max_tool_iterations=3, max_handoffs_per_turn=2)
    await runner.run_async("s", "hello")
    response, error, events = None, "", list[RunEvent]()
    try:
        if streams:
            async with runner.run_stream("s", "hi", {"channel": "x"}) as stream:
                async for event in stream:
                    events.append(event)  # those that came before an error count too
            response = stream.response
        else:
            response = await runner.run_async("s", "hi", {"channel": "x"})
    except (Exception, Broken) as caught:  # noqa: BLE001  # what was raised is compared
        error = repr(caught)
    session = await session_of(runner)
    stored = {
        "history": [attrs.evolve(message, timestamp=LONG_AGO) for message in session.history],
        "agent": session.active_agent_name,
        "state": dict(session.state),
        "metadata": dict(session.metadata),
        "version": session.committed.version,
    }
    return Outcome(stored, response, error, events)


def without_references(value: object) -> str:
    """How a value reads, without the numbers by which failures are found in the log."""
    return re.sub(r"reference \w{12}", "reference", repr(value))


@given(scripts)
@settings(max_examples=200)
async def test_commits_what_a_run_would(script: list[Any]) -> None:
    """A streamed turn commits what a run would have, answers the same and raises the same, whatever happens in it."""
    wanted, found = await come_to(script, streams=False), await come_to(script, streams=True)
    assert without_references(found.session) == without_references(wanted.session)
    assert (found.response, found.error) == (wanted.response, wanted.error)


answered: Final = scripts.filter(lambda script: isinstance(script[-1], EngineReply) and not script[-1].tool_calls)
"""Those that come to an answer."""


async def answer_of(script: Sequence[Any]) -> tuple[AgentResponse, list[RunEvent], list[Message]]:
    """What a streamed turn of this script answers, tells, and stores besides system messages."""
    found = await come_to(script, streams=True)
    assert found.response is not None
    told = [message for message in found.session["history"] if message.role is not Role.SYSTEM]
    return found.response, found.events, told[2:]


@given(answered)
async def test_last_comes_the_answer(script: list[Any]) -> None:
    """The last event, and no other, is Done with the answer."""
    response, events, _ = await answer_of(script)
    assert [event for event in events if isinstance(event, Done)] == [Done(response)] == events[-1:]


@given(scripts)
async def test_no_done_without_an_answer(script: list[Any]) -> None:
    """A turn that fails tells no Done."""
    found = await come_to(script, streams=True)
    assert any(isinstance(event, Done) for event in found.events) is (not found.error)


@given(answered)
async def test_tells_all_text(script: list[Any]) -> None:
    """The pieces of text are the stored ones, message by message, by the name of the agent stored with them."""
    _, events, stored = await answer_of(script)
    pieces = [event for event in events if isinstance(event, TextDelta)]
    for message in stored:
        text = ""
        while message.role is Role.MODEL and text != message.text:
            assert pieces[0].agent_name == message.agent_name
            text += pieces.pop(0).text
    assert pieces == []


@given(answered)
async def test_tells_all_results(script: list[Any]) -> None:
    """Each call that is stored starts once and then finishes once, with the result that is stored."""
    _, events, stored = await answer_of(script)
    for message, after in itertools.pairwise(stored):
        for call, result in zip(message.tool_calls, after.tool_results, strict=True):
            name = message.agent_name or ""
            assert events.index(ToolStarted(call, name)) < events.index(ToolFinished(call, result))
    calls = sum(len(message.tool_calls) for message in stored)
    for kind in (ToolStarted, ToolFinished):
        assert sum(isinstance(event, kind) for event in events) == calls


@given(answered)
async def test_tells_all_handoffs(script: list[Any]) -> None:
    """The last handoff that is told is the answer's, and its agent the one that answers."""
    response, events, _ = await answer_of(script)
    handed_over = [event for event in events if isinstance(event, HandedOff)]
    assert [event.handoff for event in handed_over[-1:]] == ([] if response.handoff is None else [response.handoff])
    assert [event.agent_name for event in handed_over[-1:]] in ([], [response.active_agent_name])


@given(answered)
async def test_tells_all_costs(script: list[Any]) -> None:
    """What is told of costs are those of the stored messages, in order; their sum is the answer's."""
    response, events, stored = await answer_of(script)
    costs = [event.usage for event in events if isinstance(event, UsageReported)]
    assert costs == [message.usage for message in stored if message.usage is not None]
    names = {name for cost in costs for name in cost}
    assert (response.usage or {}) == {name: sum(cost.get(name, 0) for cost in costs) for name in names}


# --- beginning ---


async def test_nothing_before_it_is_entered() -> None:
    """A stream that is never entered asks nobody, stores nothing and leaves nothing behind."""
    engine = ScriptedEngine(default="hello")
    runner = Runner(Agent("Support"), engine=engine)
    tasks = asyncio.all_tasks()
    stream = runner.run_stream("s", "hi")
    await asyncio.sleep(0)
    assert asyncio.all_tasks() == tasks
    del stream
    gc.collect()
    assert engine.requests == []
    assert await runner.get_session("s") is None


def test_made_outside_of_a_loop() -> None:
    """A stream can be made where no event loop runs, and be collected in one."""
    stream = Agent("Support", engine=ScriptedEngine(["hello"])).run_stream("hi")
    assert asyncio.run(stream.collect()).content == "hello"


async def test_collect() -> None:
    """To collect a stream is to run it, and gives the answer."""
    runner = Runner(Agent("Support"), engine=ScriptedEngine(["hello"]))
    stream = runner.run_stream("s", "hi")
    response = await stream.collect()
    assert (response.content, stream.response) == ("hello", response)
    assert texts(await session_of(runner)) == ["hi", "hello"]


async def test_once_only() -> None:
    """A stream is entered or collected once."""
    runner = Runner(Agent("Support"), engine=ScriptedEngine(default="hello"))
    stream = runner.run_stream("s", "hi")
    async with stream:
        with pytest.raises(RuntimeError, match="was entered or collected before"):
            await stream.collect()
        assert [type(event) async for event in stream] == [TextDelta, Done]
    for again in (stream.collect, stream.__aenter__):
        with pytest.raises(RuntimeError, match="<RunStream of session 's'> was entered or collected before"):
            await again()
    assert texts(await session_of(runner)) == ["hi", "hello"]


async def test_entered_twice_at_once() -> None:
    """Of two that enter a stream at the same time, one does."""
    stream = Runner(Agent("Support"), engine=ScriptedEngine(default="hello")).run_stream("s", "hi")
    both = [asyncio.create_task(stream.__aenter__()) for _ in range(2)]
    await asyncio.wait(both)
    assert [type(each.exception()) for each in both] == [type(None), RuntimeError]
    await stream.__aexit__(None, None, None)


async def test_read_before_it_is_entered() -> None:
    """A stream that was not entered can't be read or left, and has no response."""
    stream = Runner(Agent("Support"), engine=ScriptedEngine()).run_stream("s", "hi")
    with pytest.raises(RuntimeError, match="has not begun; use `async with`"):
        await anext(stream)
    with pytest.raises(RuntimeError, match="has no response: it is there once Done has come"):
        _ = stream.response


async def test_read_in_another_loop() -> None:
    """A stream can't be read in another event loop than its own, where nobody would wake the reader."""
    async with Runner(Agent("Support"), engine=ScriptedEngine(["hello"])).run_stream("s", "hi") as stream:
        with pytest.raises(RuntimeError, match="belongs to the event loop in which it was entered"):
            await anyio.to_thread.run_sync(lambda: asyncio.run(anext(stream)))


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"session_id": ""}, ValueError),
        ({"user_message": 7}, TypeError),
        ({"metadata": {"a": object()}}, SessionStateError),
        ({"message_id": ""}, ValueError),
        ({"on_duplicate": "wait"}, ValueError),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], error: type[Exception]) -> None:
    """Bad arguments are refused when the stream is made."""
    runner = Runner(Agent("Support"), engine=ScriptedEngine())
    with pytest.raises(error):
        runner.run_stream(**{"session_id": "s", "user_message": "hi", **arguments})


# --- by an agent itself ---


async def test_agent() -> None:
    """An agent streams a turn of the session it is given, which its next run goes on from."""
    engine = ScriptedEngine(default="hello there")
    agent = Agent("Support", engine=engine)
    session = agent.create_session()
    events = await events_of(agent.run_stream("hi", session=session, metadata={"channel": "x"}))
    assert said(events) == "hello there"
    assert [message.text for message in session.history] == ["hi", "hello there"]
    assert session.metadata == {"channel": "x"}
    assert (await agent.run_stream("and?", session=session).collect()).content == "hello there"
    assert [len(request.messages) for request in engine.requests] == [1, 3]


async def test_agent_without_a_session() -> None:
    """Without a session, each stream is one turn of a fresh one."""
    engine = ScriptedEngine(default="hello")
    agent = Agent("Support", engine=engine)
    for _ in range(2):
        await agent.run_stream("hi").collect()
    assert [len(request.messages) for request in engine.requests] == [1, 1]


async def test_session_of_another_agent() -> None:
    """A stream in a session whose agent is out of reach raises what a run does, and nothing is changed."""
    session = Agent("Billing").create_session()
    stream = Agent("Support", engine=ScriptedEngine(["hello"])).run_stream("hi", session=session)
    with pytest.raises(SessionError, match="is with agent 'Billing', which agent 'Support' can't reach"):
        await stream.collect()
    assert session.history == []


def test_session_of_a_wrong_type() -> None:
    """What is no session is refused when the stream is made."""
    wrong: Any = "s"
    agent = Agent("Support", engine=ScriptedEngine())
    with pytest.raises(TypeError, match="session must be an AgentSession or left out, not str"):
        agent.run_stream("hi", session=wrong)
    with pytest.raises(TypeError, match="session must be an AgentSession, not str"):
        Runner(agent).stream_session(wrong, "hi")


# --- reading ---


async def test_turn_waits_for_no_reader() -> None:
    """A turn whose events nobody reads commits by itself, and they are there for whoever reads later."""
    runner = Runner(Agent("Support"), engine=ScriptedEngine(default="well hello there"))
    async with runner.run_stream("s", "one") as stream:
        assert (await anext(stream)) == TextDelta("well", "Support")
        await runner.run_async("s", "two")  # waits for the first
        assert stream.response.content == "well hello there"
        assert said([event async for event in stream]) == " hello there"
    assert texts(await session_of(runner)) == ["one", "well hello there", "two", "well hello there"]


async def test_left_after_the_commit() -> None:
    """To leave a stream whose turn has committed, whatever was read of it, changes nothing."""
    runner = Runner(Agent("Support"), engine=ScriptedEngine(default="hello"))
    async with runner.run_stream("s", "one") as stream:
        await runner.run_async("s", "two")
    assert stream.response.content == "hello"
    assert texts(await session_of(runner)) == ["one", "hello", "two", "hello"]


async def test_done_is_durable() -> None:
    """When Done comes the turn is stored."""
    runner = Runner(Agent("Support"), engine=ScriptedEngine(["hello"]))
    async with runner.run_stream("s", "hi") as stream:
        async for event in stream:
            stored = texts(await session_of(runner))
            assert stored == (["hi", "hello"] if isinstance(event, Done) else stored)
    assert isinstance(event, Done)


async def test_reader_is_no_member() -> None:
    """The code that reads is not part of the turn: it sees the last commit, and what it does waits for the turn."""
    engine = PausingEngine()
    runner = Runner(Agent("Support"), engine=engine)
    async with runner.run_stream("s", "hi") as stream:
        await engine.asked.wait()
        session = await session_of(runner)
        assert session.history == []
        engine.go_on.set()
        await session.add_message(Message(Role.USER, "after"))
        assert stream.response.content == "answer"
    assert texts(session) == ["hi", "answer", "after"]


async def test_two_readers() -> None:
    """Two that read one stream get each event once, and both come to its end."""
    engine = PausingEngine()
    runner = Runner(Agent("Support"), engine=engine)
    read: list[RunEvent] = []

    async def read_all() -> None:
        async for event in stream:
            read.append(event)  # noqa: PERF401  # two fill one list

    async with runner.run_stream("s", "hi") as stream:
        readers = [asyncio.create_task(read_all()) for _ in range(2)]
        await engine.asked.wait()
        engine.go_on.set()
        await asyncio.wait(readers)
    assert [type(event) for event in read] == [TextDelta, Done]


async def test_reader_of_a_stream_that_was_left() -> None:
    """Whoever still reads a stream when another task leaves it comes to its end, and is not cancelled."""
    engine = PausingEngine()
    async with Runner(Agent("Support"), engine=engine).run_stream("s", "hi") as stream:
        reader = asyncio.create_task(anext(stream, None))
        await engine.asked.wait()
    assert await reader is None


async def test_context() -> None:
    """A turn runs in the context of whoever enters the stream, and what it sets there is its own."""
    tenant: contextvars.ContextVar[str] = contextvars.ContextVar("tenant")
    seen: list[str] = []

    async def answer(request: EngineRequest) -> str:
        seen.append(tenant.get())
        tenant.set("changed")
        return "hello"

    stream = Runner(Agent("Support"), engine=ScriptedEngine([answer])).run_stream("s", "hi")
    tenant.set("acme")
    await stream.collect()
    assert (seen, tenant.get()) == (["acme"], "acme")


# --- leaving ---


async def test_left_before_the_end() -> None:
    """A stream that is left before its turn has committed stores nothing, and the next turn works."""
    engine = PausingEngine()
    runner = Runner(Agent("Support"), engine=engine)
    async with runner.run_stream("s", "hi", {"channel": "x"}) as stream:
        await engine.asked.wait()
    session = await session_of(runner)
    assert (len(session.history), session.metadata) == (0, {})
    with pytest.raises(RuntimeError, match="has no response"):
        _ = stream.response
    assert [event async for event in stream] == []
    engine.go_on.set()
    assert (await runner.run_async("s", "hi")).content == "answer"


async def test_error_of_the_reader() -> None:
    """What the code inside raises leaves as it is, and the turn stores nothing."""
    engine = PausingEngine()
    runner = Runner(Agent("Support"), engine=engine)
    error = ZeroDivisionError()
    with pytest.raises(ZeroDivisionError) as caught:  # noqa: PT012  # the block is what raises
        async with runner.run_stream("s", "hi"):
            await engine.asked.wait()
            raise error
    assert caught.value is error
    assert (await session_of(runner)).history == []


async def test_collecting_cancelled() -> None:
    """Whoever collects and is cancelled is so once the turn is rolled back."""
    engine = PausingEngine()
    runner = Runner(Agent("Support"), engine=engine)
    async with anyio.create_task_group() as group:
        group.start_soon(runner.run_stream("s", "hi").collect)
        await engine.asked.wait()
        group.cancel_scope.cancel()
    assert runner.session_store.backend.turns == []
    assert (await session_of(runner)).history == []


class Slow(PausingEngine):
    """An engine that takes its time to end when it is cancelled."""

    def __init__(self) -> None:
        super().__init__()
        self.may_end = anyio.Event()
        self.has_ended = False

    async def generate(self, request: EngineRequest) -> EngineReply:
        """Wait, and end when it may."""
        try:
            return await super().generate(request)
        finally:
            with anyio.CancelScope(shield=True):
                await self.may_end.wait()
            self.has_ended = True


async def test_cancelled_again_by_its_task() -> None:
    """However often the task of whoever leaves is cancelled, it waits until the turn is rolled back."""
    engine = Slow()
    task = asyncio.create_task(Agent("Support", engine=engine).run_stream("hi").collect())
    await engine.asked.wait()
    for _ in range(3):
        task.cancel()
        for _ in range(5):
            await asyncio.sleep(0)
        assert not task.done()
    engine.may_end.set()
    await asyncio.wait([task])
    assert task.cancelled()
    assert engine.has_ended


async def test_cancelled_by_a_scope_while_it_leaves() -> None:
    """Whoever leaves inside a scope that is cancelled waits until the turn is rolled back."""
    engine = Slow()
    async with anyio.create_task_group() as group:
        group.start_soon(Agent("Support", engine=engine).run_stream("hi").collect)
        await engine.asked.wait()
        group.cancel_scope.cancel()
        with anyio.CancelScope(shield=True):
            await anyio.wait_all_tasks_blocked()
        engine.may_end.set()
    assert engine.has_ended


async def test_reading_can_be_cancelled() -> None:
    """A cancellation ends the reading also while there are events, and none of them is lost."""
    runner = Runner(Agent("Support"), engine=ScriptedEngine(default="hello"))
    async with runner.run_stream("s", "one") as stream:
        await runner.run_async("s", "two")
        with anyio.CancelScope() as scope:
            scope.cancel()
            await anext(stream)
        assert scope.cancelled_caught
        assert [type(event) async for event in stream] == [TextDelta, Done]


async def test_left_in_another_task() -> None:
    """A stream may be left in another task than it was entered in, as a generator is that its server closes."""
    engine = PausingEngine()
    runner = Runner(Agent("Support"), engine=engine)

    async def pieces() -> AsyncGenerator[str]:
        async with runner.run_stream("s", "hi") as stream:
            yield "begun"
            async for event in stream:
                yield repr(event)

    generator = pieces()
    assert await anext(generator) == "begun"
    await engine.asked.wait()
    await asyncio.create_task(generator.aclose())
    assert (await session_of(runner)).history == []


async def test_dropped() -> None:
    """A stream that is entered and forgotten holds nobody up: its turn commits by itself."""
    runner = Runner(Agent("Support"), engine=ScriptedEngine(default="hello"))
    await runner.run_stream("s", "one").__aenter__()
    gc.collect()
    await runner.run_async("s", "two")
    assert texts(await session_of(runner)) == ["one", "hello", "two", "hello"]


def test_loop_closed() -> None:
    """The turn of a stream whose event loop was closed is taken over by whoever comes next."""
    store = SessionStore()
    engine = PausingEngine()

    async def enter() -> None:
        await Runner(Agent("Support"), store, engine, lease_seconds=0.03).run_stream("s", "one").__aenter__()
        await engine.asked.wait()

    loop = asyncio.new_event_loop()
    loop.run_until_complete(enter())
    loop.close()
    runner = Runner(Agent("Support"), store, ScriptedEngine(["hello"]), lease_seconds=0.03)
    assert asyncio.run(runner.run_async("s", "two")).content == "hello"


def test_collected_with_its_loop(caplog: pytest.LogCaptureFixture) -> None:
    """A stream that goes with its event loop, in the middle of its turn, has not failed."""

    async def wait(report: object) -> AgentResponse:
        await asyncio.get_running_loop().create_future()
        raise AssertionError

    loop = asyncio.new_event_loop()
    loop.run_until_complete(RunStream("s", SessionStore(), wait).__aenter__())
    loop.close()
    del loop
    gc.collect()
    assert "chatflow.runner" not in {record.name for record in caplog.records}


# --- errors ---


async def test_error_of_the_turn() -> None:
    """What the turn raises is raised by the iteration as the same object, and not again on leaving."""
    error = LookupError("mine")
    engine = ScriptedEngine([EngineReply(text="well", tool_calls=[CALL("not_there")]), error])
    read: list[RunEvent] = []
    async with Runner(Agent("Support"), engine=engine).run_stream("s", "hi") as stream:
        with pytest.raises(LookupError) as caught:  # noqa: PT012  # the iteration is what raises
            async for event in stream:
                read.append(event)  # noqa: PERF401  # those before the error are looked at
        assert [event async for event in stream] == []
    assert caught.value is error
    assert [type(event) for event in read] == [TextDelta, ToolStarted, ToolFinished]


async def test_error_that_nobody_reads() -> None:
    """What the turn raises, and nobody has read, is raised on leaving."""
    error = LookupError("mine")
    runner = Runner(Agent("Support"), engine=ScriptedEngine([error, "hello"]))
    with pytest.raises(LookupError) as caught:
        async with runner.run_stream("s", "hi"):
            await runner.run_async("s", "two")
    assert caught.value is error


async def test_error_beside_the_readers(caplog: pytest.LogCaptureFixture) -> None:
    """Where the code inside raises, what the turn has raised and nobody has read is logged."""
    runner = Runner(Agent("Support"), engine=ScriptedEngine([LookupError("mine"), "hello"]))
    with pytest.raises(ZeroDivisionError):  # noqa: PT012  # the block is what raises
        async with runner.run_stream("s", "hi"):
            await runner.run_async("s", "two")
            raise ZeroDivisionError
    [record] = caplog.records
    assert record.message == "session 's': a streamed turn has failed, and nobody has read it"
    assert "LookupError: mine" in caplog.text


async def test_error_of_one_that_was_dropped(caplog: pytest.LogCaptureFixture) -> None:
    """What the turn of a forgotten stream raises is logged."""
    runner = Runner(Agent("Support"), engine=ScriptedEngine([LookupError("mine"), "hello"]))
    await runner.run_stream("s", "one").__aenter__()
    await runner.run_async("s", "two")
    gc.collect()
    assert "session 's': a streamed turn has failed, and nobody has read it" in caplog.text


async def test_error_while_it_is_left() -> None:
    """An engine that answers its cancellation with an error of its own is heard, by whoever leaves."""

    class Stubborn(PausingEngine):
        async def generate(self, request: EngineRequest) -> EngineReply:
            try:
                return await super().generate(request)
            except asyncio.CancelledError:
                raise LookupError("mine") from None

    engine = Stubborn()
    with pytest.raises(LookupError, match="mine"):
        async with Runner(Agent("Support"), engine=engine).run_stream("s", "hi"):
            await engine.asked.wait()


async def test_exit() -> None:
    """An exit in a tool reaches whoever reads, and does not end the event loop."""

    async def leave() -> str:
        raise SystemExit(3)

    runner = Runner(Agent("Support", tools=[leave]), engine=ScriptedEngine([CALL("leave")]))
    with pytest.raises(SystemExit):
        await runner.run_stream("s", "hi").collect()
    assert (await session_of(runner)).history == []


async def test_cancellation_that_nobody_asked_for() -> None:
    """A cancellation that an engine raises by itself is raised as any other error."""
    error = asyncio.CancelledError("mine")
    runner = Runner(Agent("Support"), engine=ScriptedEngine([error]))
    with pytest.raises(asyncio.CancelledError) as caught:
        await runner.run_stream("s", "hi").collect()
    assert caught.value is error


async def test_cancellation_that_nobody_has_read() -> None:
    """Such a cancellation is raised on leaving as well, where nobody has read it."""
    runner = Runner(Agent("Support"), engine=ScriptedEngine([asyncio.CancelledError("mine"), "hello"]))
    with pytest.raises(asyncio.CancelledError, match="mine"):
        async with runner.run_stream("s", "hi"):
            await runner.run_async("s", "two")


async def test_store_closed_meanwhile() -> None:
    """A turn that is cancelled because its store is closed raises StoreClosedError, and its reader is not cancelled."""
    engine = PausingEngine()
    runner = Runner(Agent("Support"), engine=engine)
    async with runner.run_stream("s", "hi") as stream:
        await engine.asked.wait()
        await runner.session_store.aclose(0)
        with pytest.raises(StoreClosedError):
            await anext(stream)


async def test_left_while_the_store_is_closed() -> None:
    """A stream that is left while its store waits for it is left in silence."""
    engine = PausingEngine()
    runner = Runner(Agent("Support"), engine=engine)
    async with runner.run_stream("s", "hi"):
        await engine.asked.wait()
        closing = asyncio.create_task(runner.session_store.aclose(1000))
        while not runner.session_store.is_closing:  # noqa: ASYNC110  # what is looked at sets no event
            await asyncio.sleep(0)
    await closing


# --- among others ---


async def test_two_in_one_conversation() -> None:
    """Two streams of one conversation run in the order they were entered."""
    engine = PausingEngine()
    runner = Runner(Agent("Support"), engine=engine)
    async with runner.run_stream("s", "one") as first:
        await engine.asked.wait()
        async with runner.run_stream("s", "two") as second:
            engine.go_on.set()
            assert [type(event) async for event in second] == [TextDelta, Done]
            assert first.response.content == "answer"
    assert texts(await session_of(runner)) == ["one", "answer", "two", "answer"]


async def test_in_a_tool_of_its_own_conversation() -> None:
    """A stream of the conversation that the running tool belongs to is refused, as a run is."""

    async def ask(context: ToolContext) -> str:
        with pytest.raises(TurnInsideTurnError):
            await runner.run_stream("s", "again").collect()
        with pytest.raises(TurnInsideTurnError):
            await agent.run_stream("again", session=context.session).collect()
        return "refused"

    agent = Agent("Support", tools=[ask], engine=ScriptedEngine([CALL("ask"), "done"]))
    runner = Runner(agent)
    await runner.run_stream("s", "hi").collect()
    assert [result.content for result in results(await session_of(runner))] == ["refused"]


async def test_in_a_tool_of_another_conversation() -> None:
    """A stream inside a tool uses the slot of the run around it, and its turn is its own."""

    async def ask() -> str:
        return (await runner.run_stream("other", "inner").collect()).content

    engine = ScriptedEngine([CALL("ask"), "inner answer", "outer answer"])
    runner = Runner(Agent("Support", tools=[ask]), engine=engine, max_concurrent_turns=1)
    assert (await runner.run_stream("s", "outer").collect()).content == "outer answer"
    assert texts(await session_of(runner, "other")) == ["inner", "inner answer"]
    assert [result.content for result in results(await session_of(runner))] == ["inner answer"]


async def test_in_a_tool_that_is_cancelled() -> None:
    """A stream inside a tool ends with the run around it."""
    inner = PausingEngine()
    asker = Agent("Asker", engine=inner)

    async def ask() -> str:
        return (await Runner(asker, runner.session_store).run_stream("other", "inner").collect()).content

    runner = Runner(Agent("Support", tools=[ask], engine=ScriptedEngine([CALL("ask")])))
    async with runner.run_stream("s", "outer"):
        await inner.asked.wait()
    assert runner.session_store.backend.turns == []
    assert (await session_of(runner, "other")).history == []


# --- messages with an id ---


async def test_duplicate() -> None:
    """Of a message that was answered before only Done comes, with the stored answer."""
    runner = Runner(Agent("Support"), engine=ScriptedEngine(["hello"]))
    first = await runner.run_stream("s", "hi", message_id="m").collect()
    events = await events_of(runner.run_stream("s", "hi", message_id="m"))
    assert events == [Done(attrs.evolve(first, duplicate=True))]


async def test_duplicate_of_one_under_way() -> None:
    """Of a message that is being answered only Done comes, or it is refused, as asked for."""
    engine = PausingEngine()
    runner = Runner(Agent("Support"), engine=engine)
    async with runner.run_stream("s", "hi", message_id="m") as first:
        await engine.asked.wait()
        with pytest.raises(MessageInProgressError):
            await runner.run_stream("s", "hi", message_id="m", on_duplicate="raise").collect()
        async with runner.run_stream("s", "hi", message_id="m") as second:
            engine.go_on.set()
            assert [event async for event in second] == [Done(attrs.evolve(second.response, duplicate=True))]
        assert [type(event) async for event in first] == [TextDelta, Done]


async def test_resumed() -> None:
    """A message that goes on tells what had been said as one piece, and results that were there without a start."""

    async def order(item: str) -> str:
        return item

    asked = EngineReply(
        text="let me order", tool_calls=[CALL("order", item="tea"), CALL("transfer_to_billing")], usage={"tokens": 1}
    )
    engine = ScriptedEngine([asked, EngineError("down", model="m"), "done"])
    runner = Runner(Agent("Support", tools=[order], handoffs=[Agent("Billing")]), engine=engine)
    with pytest.raises(EngineError):
        await runner.run_async("s", "hi", message_id="m")
    events = await events_of(runner.run_stream("s", "hi", message_id="m"))
    kinds = [TextDelta, UsageReported, ToolFinished, HandedOff, ToolFinished, TextDelta, Done]
    assert [type(event) for event in events] == kinds
    assert events[0] == TextDelta("let me order", "Support")
    assert events[-2] == TextDelta("done", "Billing")


# --- engines ---


class InPieces:
    """An engine that gives these pieces."""

    def __init__(self, *pieces: Any) -> None:
        self.pieces = pieces

    async def generate(self, request: EngineRequest) -> EngineReply:
        """Is not asked where somebody listens."""
        raise NotImplementedError

    async def stream(self, request: EngineRequest) -> AsyncGenerator[Any]:
        """Give them."""
        for piece in self.pieces:
            yield piece


async def test_engine_without_pieces() -> None:
    """What an engine without `stream` says is one piece, and nothing where it says nothing."""
    engine = PausingEngine()
    engine.go_on.set()
    events = await events_of(Runner(Agent("Support"), engine=engine).run_stream("s", "hi"))
    assert [type(event) for event in events] == [TextDelta, Done]
    assert events[0] == TextDelta("answer", "Support")

    class Silent(PausingEngine):
        async def generate(self, request: EngineRequest) -> EngineReply:
            return EngineReply()

    assert [type(event) for event in await events_of(Agent("A", engine=Silent()).run_stream("hi"))] == [Done]


async def test_pieces() -> None:
    """Pieces are told by the name of the agent that was asked, empty ones left out."""
    engine = InPieces(ReasoningDelta("hm"), TextDelta(""), TextDelta("hel"), TextDelta("lo"), EngineReply(text="hello"))
    events = await events_of(Agent("Support", engine=engine).run_stream("hi"))
    assert events[:-1] == [
        ReasoningDelta("hm", "Support"),
        TextDelta("hel", "Support"),
        TextDelta("lo", "Support"),
    ]


async def test_whole_reply_without_pieces() -> None:
    """The text of a reply of which no text came in pieces is one piece."""
    engine = InPieces(ReasoningDelta("hm"), EngineReply(text="hello"))
    events = await events_of(Agent("Support", engine=engine).run_stream("hi"))
    assert events[:-1] == [ReasoningDelta("hm", "Support"), TextDelta("hello", "Support")]


@pytest.mark.parametrize(
    ("pieces", "message"),
    [
        ((), r"InPieces.stream\(\) must end with an EngineReply, and gave none"),
        (("hello",), r"InPieces.stream\(\) must give TextDelta, ReasoningDelta and at the end an EngineReply, not str"),
        (
            (EngineReply(), TextDelta("x")),
            r"InPieces.stream\(\) must end with its EngineReply, and gave TextDelta after it",
        ),
        (
            (TextDelta("one "), TextDelta("three"), EngineReply(text="one two")),
            r"InPieces.stream\(\) must end with an EngineReply whose text is what its TextDelta pieces told, joined",
        ),
        ((TextDelta("one"), EngineReply()), r"InPieces.stream\(\) must end with an EngineReply whose text is what"),
    ],
)
async def test_wrong_pieces(pieces: tuple[Any, ...], message: str) -> None:
    """An engine that gives something else than pieces and then its reply fails the turn, and is named."""
    with pytest.raises(TypeError, match=message):
        await Agent("Support", engine=InPieces(*pieces)).run_stream("hi").collect()


async def test_no_generator() -> None:
    """An engine whose `stream` is no async generator fails the turn, and is named."""

    class Wrong(InPieces):
        def stream(self, request: EngineRequest) -> Any:
            return [EngineReply()]

    with pytest.raises(TypeError, match=r"Wrong.stream\(\) must be an async generator, not return list"):
        await Agent("Support", engine=Wrong()).run_stream("hi").collect()


async def test_error_between_pieces() -> None:
    """What an engine raises between its pieces ends the turn as it is, after the pieces before it."""
    error = EngineError("cut off", model="m")

    class CutOff(InPieces):
        async def stream(self, request: EngineRequest) -> AsyncGenerator[Any]:
            yield TextDelta("hel")
            raise error

    session: AgentSession = Agent("Support").create_session()
    async with Agent("Support", engine=CutOff()).run_stream("hi", session=session) as stream:
        assert await anext(stream) == TextDelta("hel", "Support")
        with pytest.raises(EngineError) as caught:
            await anext(stream)
    assert caught.value is error
    assert session.history == []


@pytest.mark.parametrize("piece", [TextDelta("again "), "wrong"], ids=["left", "refused"])
async def test_engine_is_closed_where_it_was_begun(piece: Any) -> None:
    """An engine's generator that is cut off has ended, in the task that began it, when the stream is left."""
    tasks: list[Any] = []

    class Endless(InPieces):
        async def stream(self, request: EngineRequest) -> AsyncGenerator[Any]:
            tasks.append(asyncio.current_task())
            try:
                while True:
                    yield piece
                    await asyncio.sleep(0)
            finally:
                tasks.append(asyncio.current_task())

    async with Agent("Support", engine=Endless()).run_stream("hi") as stream:
        with suppress(TypeError):
            await anext(stream)
    assert tasks[0] is tasks[1] is stream._task


async def test_run_asks_for_no_pieces() -> None:
    """A run that nobody listens to asks the engine for its whole reply."""
    with pytest.raises(NotImplementedError):
        await Agent("Support", engine=InPieces(EngineReply())).run("hi")


@pytest.mark.parametrize("kind", [TextDelta, ReasoningDelta])
def test_piece_that_is_no_text(kind: type[TextDelta | ReasoningDelta]) -> None:
    """A piece whose text is no text is refused where it is made."""
    with pytest.raises(TypeError, match="text"):
        kind(5)  # type: ignore[arg-type]  # what an engine may get from a server
