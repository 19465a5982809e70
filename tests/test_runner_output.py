"""Answers of an output type: validated, asked for once more, and an error if they are not even then."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Any, Final

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from chatflow import (
    Agent,
    AgentResponse,
    AgentSession,
    AnswerRejected,
    ContextProvider,
    Done,
    EngineError,
    EngineOutputError,
    EngineReply,
    EngineRequest,
    Message,
    Role,
    RunContext,
    RunEvent,
    Runner,
    ScriptedEngine,
    SessionStore,
    TextDelta,
    UsageReported,
)
from chatflow.core.values import thaw
from tests.runs import session_of, texts
from tests.strategies import LONG_AGO

CALL = ScriptedEngine.call

GOOD: Final = '{"id": 404, "status": "sent"}'
BAD: Final = '{"id": "none"}'


@attrs.frozen
class Order:
    """An order."""

    id: int
    status: str


SENT: Final = Order(404, "sent")


def look_up(order_id: str) -> str:
    """Look up an order."""
    return "sent"


def runner_of(*replies: Any, store: SessionStore | None = None, **options: Any) -> tuple[Runner, ScriptedEngine]:
    """A runner of an agent that answers with orders, and the engine that says these replies."""
    engine = ScriptedEngine(replies)
    return Runner(Agent("Support", "Be brief.", tools=[look_up], output_type=Order), store, engine, **options), engine


def shown(request: EngineRequest) -> list[tuple[str, str]]:
    """What a request says, and who says it."""
    return [(message.role.value, message.text) for message in request.messages]


# --- an answer of the type ---


async def test_output() -> None:
    """The response holds the answer as an instance of the type, and its text as the model has said it."""
    runner, _ = runner_of(GOOD)
    response = await runner.run_async("s", "order 404?")
    assert (response.output, response.content) == (SENT, GOOD)
    assert texts(await session_of(runner)) == ["order 404?", GOOD]


async def test_text_has_no_output() -> None:
    """Without an output type there is no output, and the engine is told no schema."""
    engine = ScriptedEngine([GOOD])
    response = await Agent("Support", engine=engine).run("order 404?")
    assert response.output is None
    assert engine.requests[0].output_schema is None


async def test_schema_goes_with_each_request() -> None:
    """The engine is given the schema with each request of the agent, beside its tools."""
    runner, engine = runner_of(CALL("look_up", order_id="404"), GOOD)
    assert (await runner.run_async("s", "order 404?")).output == SENT
    assert [thaw(request.output_schema or {})["required"] for request in engine.requests] == [["id", "status"]] * 2
    assert [len(request.tools) for request in engine.requests] == [1, 1]


async def test_agent_that_answers_decides() -> None:
    """After a handoff the answer is of the other agent's type; each request has the schema of its agent."""
    billing = Agent("Billing", output_type=int)
    engine = ScriptedEngine([CALL("transfer_to_billing"), "42", '"back"', "hello"])
    runner = Runner(Agent("Support", handoffs=[billing], output_type=Order), engine=engine)
    assert (await runner.run_async("s", "how much?")).output == 42
    assert [set(request.output_schema or {}) for request in engine.requests] == [
        {"type", "description", "properties", "required", "additionalProperties"},
        {"type", "properties", "required", "additionalProperties"},
    ]


async def test_after_the_tool_limit() -> None:
    """The answer of a model that was cut off from its tools is of the type as well."""
    runner, engine = runner_of(CALL("look_up", order_id="404"), BAD, GOOD, max_tool_iterations=1)
    response = await runner.run_async("s", "order 404?")
    assert (response.output, response.stop_reason) == (SENT, "tool_limit")
    assert len(engine.requests) == 3


async def test_provider_sees_the_output() -> None:
    """A context provider is told of the answer with its output."""
    seen: list[Any] = []

    class Seeing(ContextProvider):
        name = "seeing"

        async def after_run(self, agent: Agent, session: AgentSession, context: RunContext) -> None:
            assert context.response is not None
            seen.append(context.response.output)

    engine = ScriptedEngine([GOOD])
    await Agent("Support", engine=engine, output_type=Order, context_providers=[Seeing()]).run("order 404?")
    assert seen == [SENT]


def test_equality_is_that_of_what_is_stored() -> None:
    """Two responses that differ in their output alone are equal, and hash the same."""
    outputs: tuple[Any, Any] = SENT, []
    responses = [AgentResponse(content=GOOD, active_agent_name="Support", output=output) for output in outputs]
    assert responses[0] == responses[1]
    assert hash(responses[0]) == hash(responses[1])


@pytest.mark.parametrize("kind", [look_up, SENT, "Order"])
def test_type_without_a_schema(kind: Any) -> None:
    """A type that can't be described to a model is refused when the agent is made, by the agent's name."""
    with pytest.raises(
        TypeError, match=r"the output_type of agent 'Support' can't be described to a model: ."
    ) as caught:
        Agent("Support", output_type=kind)
    assert caught.value.__cause__ is not None


def test_type_that_was_given() -> None:
    """An agent tells which output type it has."""
    assert Agent("Support", output_type=Order).output_type is Order
    assert Agent("Support").output_type is None


# --- an answer that is not ---


async def test_asked_again() -> None:
    """An answer that is not of the type is asked for once more, without tools, with what is wrong with it."""
    runner, engine = runner_of(BAD, GOOD)
    assert (await runner.run_async("s", "order 404?")).output == SENT
    first, again = engine.requests
    assert shown(first) == [("system", "Be brief."), ("user", "order 404?")]
    assert shown(again)[:3] == [*shown(first), ("model", BAD)]
    role, text = shown(again)[3]
    assert role == "user"
    assert "- answer.id: Input should be a valid integer" in text
    assert "- answer.status: Field required" in text
    assert "JSON and nothing else" in text
    assert (len(again.messages), again.tools, again.output_schema) == (4, (), first.output_schema)


async def test_only_the_good_answer_is_stored() -> None:
    """Neither the refused answer nor what was said of it is stored, or sent with the next message."""
    runner, engine = runner_of(BAD, GOOD, GOOD)
    await runner.run_async("s", "order 404?")
    assert texts(await session_of(runner)) == ["order 404?", GOOD]
    await runner.run_async("s", "sure?")
    assert shown(engine.requests[2])[1:] == [("user", "order 404?"), ("model", GOOD), ("user", "sure?")]


async def test_after_tools() -> None:
    """What tools have done in the turn stands before the refused answer."""
    runner, engine = runner_of(CALL("look_up", order_id="404"), BAD, GOOD)
    assert (await runner.run_async("s", "order 404?")).output == SENT
    assert [role for role, _ in shown(engine.requests[2])] == ["system", "user", "model", "tool", "model", "user"]


async def test_empty_answer() -> None:
    """An answer without text is asked for again too; there is nothing of it to send."""
    runner, engine = runner_of(EngineReply(), GOOD)
    assert (await runner.run_async("s", "order 404?")).output == SENT
    assert [role for role, _ in shown(engine.requests[1])] == ["system", "user", "user"]


async def test_calls_in_the_second_answer() -> None:
    """Tools that a model calls when it is asked again are not run: its words are the answer."""
    runner, _ = runner_of(BAD, EngineReply(text=GOOD, tool_calls=[CALL("look_up", order_id="404")]))
    response = await runner.run_async("s", "order 404?")
    assert (response.output, response.tool_calls_executed) == (SENT, ())
    assert [message.tool_calls for message in (await session_of(runner)).history] == [(), ()]


async def test_calls_in_the_first_answer() -> None:
    """What a provider says of calls that were not taken up does not go back to it with the refused answer."""
    calls = EngineReply(text=BAD, tool_calls=[CALL("look_up", order_id="1")], extra={"signature": "of a call"})
    runner, engine = runner_of(CALL("look_up", order_id="404"), calls, GOOD, max_tool_iterations=1)
    assert (await runner.run_async("s", "order 404?")).output == SENT
    refused = engine.requests[2].messages[-2]
    assert (refused.text, refused.tool_calls, refused.extra) == (BAD, (), {})


async def test_what_belongs_to_the_answer_goes_back() -> None:
    """What a provider wants back with its answer goes back with the refused one."""
    runner, engine = runner_of(EngineReply(text=BAD, extra={"signature": "of a thought"}), GOOD)
    await runner.run_async("s", "order 404?")
    assert engine.requests[1].messages[-2].extra == {"signature": "of a thought"}


async def test_many_problems() -> None:
    """A model is told ten problems and how many more there are."""
    engine = ScriptedEngine([str([None] * 12).replace("None", '"x"'), "[1]"])
    assert (await Agent("Support", engine=engine, output_type=list[int]).run("numbers?")).output == [1]
    lines = engine.requests[1].messages[-1].text.splitlines()
    assert (len(lines), lines[10], lines[11]) == (13, "- answer[9]: " + lines[10].partition(": ")[2], "- and 2 more")


@pytest.mark.parametrize(
    ("usages", "expected"),
    [
        (({"tokens": 5}, {"tokens": 7}), {"tokens": 12}),
        (({"tokens": 5, "tier": "low"}, None), {"tokens": 5}),
        ((None, {"tokens": 7}), {"tokens": 7}),
        ((None, None), None),
    ],
)
async def test_cost(usages: tuple[Any, Any], expected: Any) -> None:
    """Both answers are paid for: the stored message and the session hold the sum, as the response does."""
    runner, _ = runner_of(
        *(EngineReply(text=text, usage=usage) for text, usage in zip((BAD, GOOD), usages, strict=True))
    )
    response = await runner.run_async("s", "order 404?")
    session = await session_of(runner)
    assert session.history[-1].usage == expected
    assert (response.usage or {}).get("tokens") == (expected or {}).get("tokens")
    assert session.usage.total.get("tokens") == (expected or {}).get("tokens")


async def test_refused_twice(caplog: pytest.LogCaptureFixture) -> None:
    """An answer that is refused again is an error without its text, and the turn leaves no trace."""
    runner, engine = runner_of(GOOD, "the secret", '{"id": 1, "secret": 2}')
    await runner.run_async("s", "order 404?")
    with caplog.at_level(logging.INFO, "chatflow"), pytest.raises(EngineOutputError) as caught:
        await runner.run_async("s", "and 405?")
    error = caught.value
    assert isinstance(error, EngineError)
    assert (error.model, error.agent) == ("gemini-2.5-flash", "Support")
    assert error.problems == {"answer.status": "Field required", "answer.secret": "Extra inputs are not permitted"}
    assert "agent 'Support'" in str(error)
    assert "is asked for once more" in caplog.text
    assert "secret" not in str(error) + caplog.text
    assert (error.__cause__, error.__suppress_context__) == (None, True)
    assert texts(await session_of(runner)) == ["order 404?", GOOD]
    assert len(engine.requests) == 3


async def test_broken_off_while_it_is_asked_again() -> None:
    """A turn that fails while the answer is asked for again is tried again from what its tools have done."""
    runner, engine = runner_of(CALL("look_up", order_id="404"), BAD, EngineError("down", model="m"), GOOD)
    with pytest.raises(EngineError, match="down"):
        await runner.run_async("s", "order 404?", message_id="m1")
    assert (await runner.run_async("s", "order 404?", message_id="m1")).output == SENT
    assert [role for role, _ in shown(engine.requests[3])] == ["system", "user", "model", "tool"]
    assert len((await session_of(runner)).history) == 4


async def test_error_of_a_validator() -> None:
    """What a type's own code raises, other than a refusal, is raised as it is and not asked for again."""

    @attrs.define
    class Failing:
        id: int

        def __attrs_post_init__(self) -> None:
            raise LookupError("my fault")

    engine = ScriptedEngine(['{"id": 1}'])
    with pytest.raises(LookupError, match="my fault"):
        await Agent("Support", engine=engine, output_type=Failing).run("order?")


async def test_validator_that_cancels_nothing() -> None:
    """A cancellation that nobody asked for, raised by a type's own code, is an error of that and cancels no caller."""

    @attrs.define
    class Failing:
        id: int

        def __attrs_post_init__(self) -> None:
            raise asyncio.CancelledError

    engine = ScriptedEngine(['{"id": 1}'])
    with pytest.raises(RuntimeError, match="a validator raised CancelledError"):
        await Agent("Support", engine=engine, output_type=Failing).run("order?")


# --- streaming ---


async def told(runner: Runner) -> list[RunEvent]:
    """What a streamed turn tells."""
    async with runner.run_stream("s", "order 404?") as stream:
        return [event async for event in stream]


async def test_rejection_is_told() -> None:
    """A refused answer is told in pieces, then that it is refused, then the new one."""
    bad, good = (EngineReply(text=text, usage={"tokens": 1}) for text in (BAD, GOOD))
    runner, _ = runner_of(bad, good)
    events = await told(runner)
    (rejected,) = (event for event in events if isinstance(event, AnswerRejected))
    assert (list(rejected.problems), rejected.agent_name) == (["answer.id", "answer.status"], "Support")
    place = events.index(rejected)
    pieces = [
        "".join(event.text for event in part if isinstance(event, TextDelta))
        for part in (events[:place], events[place:])
    ]
    assert pieces == [BAD, GOOD]
    assert [type(event) for event in events if not isinstance(event, TextDelta)] == [
        UsageReported,
        AnswerRejected,
        UsageReported,
        Done,
    ]
    done = events[-1]
    assert isinstance(done, Done)
    assert done.response.output == SENT


_answers: Final = st.sampled_from(
    [
        GOOD,
        BAD,
        "no",
        f"Here: {GOOD}",
        EngineReply(text=BAD, usage={"tokens": 1}),
        EngineReply(text=GOOD, usage={"tokens": 2}),
    ]
)
_scripts: Final = st.tuples(
    st.lists(st.builds(CALL, st.just("look_up"), order_id=st.just("404")), max_size=2), _answers, _answers
).map(lambda drawn: [*drawn[0], *drawn[1:]])


async def come_to(script: Sequence[Any], *, streams: bool) -> tuple[Any, ...]:
    """What is stored, and what the caller is told, of a turn of this script."""
    runner, engine = runner_of(*script, max_tool_iterations=2)
    response: AgentResponse | None = None
    error = ""
    try:
        if streams:
            response = await runner.run_stream("s", "order 404?").collect()
        else:
            response = await runner.run_async("s", "order 404?")
    except EngineOutputError as caught:
        error = f"{caught} {caught.problems}"
    history: Sequence[Message] = (await session_of(runner)).history
    stored = [attrs.evolve(message, timestamp=LONG_AGO) for message in history]
    return stored, response, response and response.output, error, [shown(request) for request in engine.requests]


@given(_scripts)
async def test_commits_what_a_run_would(script: list[Any]) -> None:
    """A streamed turn stores, answers, raises and asks what a run would, whether answers are refused or not."""
    assert await come_to(script, streams=True) == await come_to(script, streams=False)


@given(_scripts)
async def test_answer_is_of_the_type_or_there_is_none(script: list[Any]) -> None:
    """Whatever a model says, a turn has stored an answer of the type as its last message, or nothing at all."""
    stored, response, output, error, requests = await come_to(script, streams=False)
    if error:
        assert (stored, response) == ([], None)
    else:
        assert output == SENT
        assert (stored[-1].role, stored[-1].text) == (Role.MODEL, response.content)
    assert len(requests) <= len(script)
