"""Runs of openai-agents' real Runner with a model that says what it is told to, over any session."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final

import httpx
from agents import (
    Agent,
    GuardrailFunctionOutput,
    InputGuardrail,
    InputGuardrailTripwireTriggered,
    MaxTurnsExceeded,
    RunConfig,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from agents.memory import OpenAIResponsesCompactionSession, Session, SessionSettings
from agents.testing import ScriptedModel, assistant_message, function_call
from openai import AsyncOpenAI
from openai.types.responses import ResponseFunctionWebSearch, ResponseReasoningItem
from openai.types.responses.response_function_web_search import ActionSearch

set_tracing_disabled(True)

Run = Callable[[Session], Awaitable[list[Any]]]
"""A scenario: what the model was sent in it, call by call."""


@function_tool
def check(order_id: str) -> str:
    """Where an order is."""
    return f"order {order_id} in transit"


@function_tool(failure_error_function=None)
def burn() -> str:
    """Raise."""
    raise ValueError("on fire")


@function_tool(needs_approval=True)
def refund(order_id: str) -> str:
    """Give money back."""
    return f"order {order_id} refunded"


def thought(number: int) -> ResponseReasoningItem:
    """What the model thought, encrypted."""
    return ResponseReasoningItem(id=f"rs_{number}", summary=[], type="reasoning", encrypted_content="abc")


def model(*steps: Any) -> ScriptedModel:
    """A model that says these, one after another."""
    return ScriptedModel(steps)


def said(text: str) -> list[Any]:
    """An answer."""
    return [assistant_message(text)]


def inputs(*models: ScriptedModel) -> list[Any]:
    """What they were sent."""
    return [call.input for each in models for call in each.calls]


async def several_turns(session: Session) -> list[Any]:
    """Three answers."""
    script = model(said("one"), said("two"), said("three"))
    for text in ("first", "second", "third"):
        await Runner.run(Agent(name="Support", model=script), text, session=session)
    return inputs(script)


async def parallel_calls(session: Session) -> list[Any]:
    """A thought, a search, two calls side by side, then another thought and call, in two turns."""
    search = ResponseFunctionWebSearch(
        id="ws_1", action=ActionSearch(query="q", type="search"), status="completed", type="web_search_call"
    )
    calls = [function_call("check", {"order_id": str(n)}, call_id=f"call_{n}") for n in (1, 2)]
    more = function_call("check", '{"order_id":  "3"}', call_id="call_3")
    script = model([thought(1), search, *calls], [thought(2), more], said("Both."), said("As I said."))
    agent = Agent(name="Support", tools=[check], model=script)
    await Runner.run(agent, "Where are they?", session=session)
    await Runner.run(agent, "Sure?", session=session)
    return inputs(script)


async def handoff(session: Session) -> list[Any]:
    """One agent hands over to another, which answers; the next turn goes to that one."""
    theirs = model(said("I'm Billing."), said("Still here."))
    billing = Agent(name="Billing", model=theirs)
    ours = model([function_call("transfer_to_billing", {}, call_id="call_1")])
    result = await Runner.run(Agent(name="Support", handoffs=[billing], model=ours), "A refund", session=session)
    await Runner.run(result.last_agent, "Hello?", session=session)
    return inputs(ours, theirs)


async def streaming(session: Session) -> list[Any]:
    """A run with a tool, read as a stream, and one after it."""
    script = model([function_call("check", {"order_id": "4"}, call_id="call_1")], said("In transit."), said("Yes."))
    agent = Agent(name="Support", tools=[check], model=script)
    for text in ("Where is it?", "Really?"):
        streamed = Runner.run_streamed(agent, text, session=session)
        async for _ in streamed.stream_events():
            pass
    return inputs(script)


async def failing_model(session: Session) -> list[Any]:
    """The model fails in the middle of a run; then another run."""
    script = model([function_call("check", {"order_id": "4"}, call_id="call_1")], RuntimeError("down"), said("Here."))
    agent = Agent(name="Support", tools=[check], model=script)
    try:
        await Runner.run(agent, "Where is it?", session=session)
    except RuntimeError:
        await Runner.run(agent, "Are you there?", session=session)
    return inputs(script)


async def failing_tool(session: Session) -> list[Any]:
    """A tool raises; then another run."""
    script = model([function_call("burn", {}, call_id="call_1")], said("Here."))
    agent = Agent(name="Support", tools=[burn], model=script)
    try:
        await Runner.run(agent, "Do it", session=session)
    except Exception:  # noqa: BLE001  # the SDK's own error, which versions name differently
        await Runner.run(agent, "Are you there?", session=session)
    return inputs(script)


async def most_turns(session: Session) -> list[Any]:
    """The run has too many turns; then another run."""
    calls = [[function_call("check", {"order_id": "4"}, call_id=f"call_{n}")] for n in (1, 2)]
    script = model(*calls, said("Here."))
    agent = Agent(name="Support", tools=[check], model=script)
    try:
        await Runner.run(agent, "Where is it?", session=session, max_turns=2)
    except MaxTurnsExceeded:
        await Runner.run(agent, "Are you there?", session=session)
    return inputs(script)


async def guardrail(session: Session) -> list[Any]:
    """A guardrail stops the first run; then another run."""

    async def trips(_: Any, __: Any, text: Any) -> GuardrailFunctionOutput:
        return GuardrailFunctionOutput(output_info=None, tripwire_triggered="secret" in str(text[-1]))

    script = model(said("Hello."), said("Here."))
    guarded = Agent(name="Support", model=script, input_guardrails=[InputGuardrail(trips, run_in_parallel=False)])
    try:
        await Runner.run(guarded, "The secret, please", session=session)
    except InputGuardrailTripwireTriggered:
        await Runner.run(Agent(name="Support", model=script), "Are you there?", session=session)
    return inputs(script)


async def approval(session: Session) -> list[Any]:
    """A call waits for a person, who approves it; its result is saved by a run of its own."""
    script = model([function_call("refund", {"order_id": "4"}, call_id="call_1")], said("Done."), said("Yes."))
    agent = Agent(name="Support", tools=[refund], model=script)
    first = await Runner.run(agent, "Refund it", session=session)
    state = first.to_state()
    [waiting] = first.interruptions
    state.approve(waiting)
    await Runner.run(agent, state, session=session)
    await Runner.run(agent, "Really?", session=session)
    return inputs(script)


async def left_call(session: Session) -> list[Any]:
    """A call waits for a person, and the user goes on without them."""
    script = model([thought(1), function_call("refund", {"order_id": "4"}, call_id="call_1")], said("Something else?"))
    agent = Agent(name="Support", tools=[refund], model=script)
    await Runner.run(agent, "Refund it", session=session)
    await Runner.run(agent, "Never mind", session=session)
    return inputs(script)


async def lists_of_items(session: Session) -> list[Any]:
    """The input is items: instructions, a picture, an answer of before."""
    script = model(said("A cat."), said("Ada."))
    agent = Agent(name="Support", model=script)
    picture = {"type": "input_image", "detail": "high", "image_url": "data:image/png;base64,YWJj"}
    first: Sequence[Any] = [
        {"role": "assistant", "content": "Welcome!"},
        {"role": "user", "content": [{"type": "input_text", "text": "What is it?"}, picture]},
    ]
    second: Sequence[Any] = [{"role": "developer", "content": "The user is Ada."}, {"role": "user", "content": "Me?"}]
    await Runner.run(agent, [*first], session=session)
    await Runner.run(agent, [*second], session=session)
    return inputs(script)


class Compactions:
    """OpenAI's endpoint for compactions, which puts one item in the place of all that it is sent."""

    def __init__(self) -> None:
        self.sent: Final[list[Any]] = []

    def respond(self, request: httpx.Request) -> httpx.Response:
        """Note what was sent, and answer."""
        self.sent.append(json.loads(request.content)["input"])
        compaction = {"type": "compaction", "id": "cmp_1", "encrypted_content": "abc"}
        usage = {"input_tokens": 1, "output_tokens": 1, "total_tokens": 2}
        details = {"input_tokens_details": {"cached_tokens": 0}, "output_tokens_details": {"reasoning_tokens": 0}}
        response = {"id": "resp_1", "object": "response.compaction", "created_at": 0, "output": [compaction]}
        return httpx.Response(200, json={**response, "usage": {**usage, **details}})

    def client(self) -> AsyncOpenAI:
        """A client that asks it."""
        # The types of openai's client name the successor of httpx that it comes with, and httpx will do.
        http: Any = httpx.AsyncClient(transport=httpx.MockTransport(self.respond))
        return AsyncOpenAI(api_key="none", http_client=http)


async def compacted(session: Session) -> list[Any]:
    """The SDK's compaction puts one item in the place of all that was said; then another run."""
    script = model(said("one"), said("two"))
    async with Compactions().client() as client:
        wrapped = OpenAIResponsesCompactionSession("conversation-7", session, client=client)
        await Runner.run(Agent(name="Support", model=script), "first", session=wrapped)
        await wrapped.run_compaction({"force": True, "compaction_mode": "input"})
        await Runner.run(Agent(name="Support", model=script), "second", session=wrapped)
    return inputs(script)


async def compacting(session: Session, settings: SessionSettings) -> list[Any]:
    """What was sent to be compacted by itself in two runs with these settings."""
    script, compactions = model(said("two"), said("three")), Compactions()
    async with compactions.client() as client:
        wrapped = OpenAIResponsesCompactionSession(
            "conversation-7",
            session,
            client=client,
            compaction_mode="input",
            should_trigger_compaction=lambda context: len(context["session_items"]) > 3,
        )
        for text in ("second", "third"):
            config = RunConfig(session_settings=settings)
            await Runner.run(Agent(name="Support", model=script), text, session=wrapped, run_config=config)
    return compactions.sent


SCENARIOS: Final[tuple[Run, ...]] = (
    compacted,
    several_turns,
    parallel_calls,
    handoff,
    streaming,
    failing_model,
    failing_tool,
    most_turns,
    guardrail,
    approval,
    left_call,
    lists_of_items,
)
