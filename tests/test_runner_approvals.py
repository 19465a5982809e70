from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import anyio
import attrs
import pytest

from chatflow.core.agent import Agent
from chatflow.core.approvals import AWAITS_APPROVAL_KEY, held_back
from chatflow.core.engine import EngineReply
from chatflow.core.events import (
    ApprovalRequested,
    Done,
    TextDelta,
    ToolFinished,
    ToolStarted,
)
from chatflow.core.messages import AgentResponse, Handoff, Message, Role, ToolCall, ToolResult
from chatflow.core.prompt import ARRIVED, AWAITING
from chatflow.core.providers import ContextProvider, HistoryProvider, RunContext
from chatflow.core.pruning import prune
from chatflow.core.session import AgentSession
from chatflow.core.store import BaseSessionStore
from chatflow.core.tools import Tool, ToolContext, tool
from chatflow.engines.common_form import INVALID_ARGUMENTS_KEY
from chatflow.engines.scripted import Scripted, ScriptedEngine
from chatflow.exceptions import ApprovalNotFoundError, SessionError, TurnInsideTurnError
from chatflow.runner import Runner
from chatflow.testing.conformance.service_engine import A2AEngine
from tests.runs import results, session_of, texts

CALL = ScriptedEngine.call
REFUND = CALL("refund", euros=5)


class Shop:
    """An agent with a refund that needs a person, and what was paid back."""

    def __init__(self, *replies: Scripted, **options: Any) -> None:
        self.paid: list[int] = []
        self.engine = ScriptedEngine(replies, default="done")
        self.agent = Agent("Support", engine=self.engine)
        self.tool = self.agent.tool(requires_approval=True)(self.refund)
        self.runner = Runner(self.agent, **options)

    async def refund(self, euros: int) -> str:
        """Pay it back."""
        self.paid.append(euros)
        return f"{euros} paid"

    async def ask(self) -> ToolCall:
        """Have the model ask for what one person has to approve."""
        (call,) = (await self.runner.run_async("s", "refund it")).awaiting_approval
        return call

    async def results(self) -> list[ToolResult]:
        """All results of the conversation."""
        return results(await session_of(self.runner))


# --- what is asked about ---


@pytest.mark.parametrize(
    ("reply", "said"),
    [
        (CALL("refund", euros="many"), "euros: Input should be a valid integer"),
        (CALL("refund"), "euros: missing"),
        (CALL("refund", euros=5, to="me"), "to: unknown"),
        (CALL("restore", euros=5), "no tool named 'restore'"),
        (EngineReply(tool_calls=[CALL("refund")], extra={INVALID_ARGUMENTS_KEY: {"0": "{"}}), "not a JSON object"),
    ],
    ids=["wrong", "missing", "unknown argument", "unknown tool", "no JSON"],
)
async def test_what_can_not_run_is_not_asked_about(reply: Scripted, said: str) -> None:
    """A call that can't run gets its error at once, and nobody is asked: the model may call again."""
    shop = Shop(reply, "sorry")
    assert (await shop.runner.run_async("s", "hi")).content == "sorry"
    (result,) = await shop.results()
    assert (result.is_error, shop.paid) == (True, [])
    assert said in result.content


async def test_unreadable_arguments_are_not_asked_about() -> None:
    """Arguments that are no JSON are an error at once, also where the tool would run without any."""
    ran: list[str] = []

    async def forget() -> None:
        ran.append("forget")

    reply = EngineReply(tool_calls=[CALL("forget")], extra={INVALID_ARGUMENTS_KEY: {"0": "{"}})
    agent = Agent("Support", tools=[Tool(forget, requires_approval=True)])
    runner = Runner(agent, engine=ScriptedEngine([reply], default="done"))
    assert (await runner.run_async("s", "hi")).content == "done"
    assert ("not a JSON object" in results(await session_of(runner))[0].content, ran) == (True, [])


@pytest.mark.parametrize("error", [LookupError("down"), asyncio.CancelledError()], ids=["error", "cancellation"])
@pytest.mark.parametrize("failures", [2, 1])
async def test_check_that_fails(failures: int, error: BaseException, caplog: pytest.LogCaptureFixture) -> None:
    """A check of arguments that raises anything lets nothing run, not even if it passes the second time."""
    from typing import Annotated

    from pydantic import BeforeValidator

    left, ran = [error] * failures, list[int]()

    def check(value: int) -> int:
        if left:
            raise left.pop()
        return value

    @tool(requires_approval=True)
    async def refund(euros: Annotated[int, BeforeValidator(check)]) -> str:
        ran.append(euros)
        return "paid"

    runner = Runner(Agent("Support", tools=[refund]), engine=ScriptedEngine([REFUND], default="done"))
    assert (await runner.run_async("s", "hi")).content == "done"
    (result,) = results(await session_of(runner))
    assert (result.is_error, ran) == (True, [])
    assert ("The tool failed" in result.content) is (failures == 2)
    assert ("nobody was asked; it was not run" in result.content) is (failures == 1)


async def test_note_of_an_engine(caplog: pytest.LogCaptureFixture) -> None:
    """An engine can't have a call wait, nor say that another one does."""
    extra = {AWAITS_APPROVAL_KEY: {"0": "0" * 32}}
    shop = Shop(EngineReply(tool_calls=[CALL("look")], extra=extra))
    shop.agent.tool(name="look")(lambda: "found")
    assert (await shop.runner.run_async("s", "hi")).content == "done"
    assert [result.content for result in await shop.results()] == ["found"]


async def test_approval_is_wanted_since_an_interrupted_attempt() -> None:
    """A call of an earlier attempt is not run again by a tool that has come to require approval meanwhile."""
    ran, engine = list[str](), ScriptedEngine([CALL("charge")], default="done")

    def charge() -> str:
        ran.append("charge")
        raise SystemExit

    store = Runner(Agent("Support")).session_store
    with pytest.raises(SystemExit):
        await Runner(Agent("Support", tools=[Tool(charge, idempotent=True)]), store, engine).run_async(
            "s", "hi", message_id="m"
        )
    changed = Agent("Support", tools=[Tool(charge, idempotent=True, requires_approval=True)])
    runner = Runner(changed, store, engine)
    assert (await runner.run_async("s", "hi", message_id="m")).content == "done"
    assert ran == ["charge"]
    assert "nobody was asked" in results(await session_of(runner))[0].content


async def test_text_beside_the_call() -> None:
    """What the model says with its call is the response's content, once."""
    shop = Shop(EngineReply(text="I ask somebody.", tool_calls=[REFUND, REFUND]))
    response = await shop.runner.run_async("s", "hi")
    assert (response.content, len(response.awaiting_approval)) == ("I ask somebody.", 2)
    assert (await shop.runner.reject("s", response.awaiting_approval[0].id)).content == ""


async def test_same_ids_in_one_message() -> None:
    """Of calls with one id in one message, the one that waits is told from the other, which runs."""
    calls = [ToolCall(id="c", name="refund", args={"euros": 5}), ToolCall(id="c", name="look")]
    shop = Shop(calls)
    shop.agent.tool(name="look")(lambda: "found")
    call = await shop.ask()
    assert [(result.tool_call_id, result.content) for result in await shop.results()] == [("c", "found")]
    await shop.runner.approve("s", call.id)
    assert [result.content for result in shop.engine.requests[1].messages[-1].tool_results] == ["5 paid", "found"]


async def test_stream() -> None:
    """A stream tells which calls wait, after all that runs beside them, and then the answer."""
    shop = Shop(EngineReply(text="One moment.", tool_calls=[REFUND, CALL("look")]))
    shop.agent.tool(name="look")(lambda: "found")
    async with shop.runner.run_stream("s", "hi") as stream:
        events = [event async for event in stream]
    told = [type(event) for event in events if not isinstance(event, TextDelta)]
    assert told == [ToolStarted, ToolFinished, ApprovalRequested, Done]
    (call,) = stream.response.awaiting_approval
    assert events[-2] == ApprovalRequested(call, "Support")


async def test_stream_of_an_approval() -> None:
    """An approval's stream tells of its call, then of what the model says and calls, and the answer."""
    shop = Shop(REFUND, EngineReply(text="More?", tool_calls=[REFUND]))
    call = await shop.ask()
    async with shop.runner.approve_stream("s", call.id, metadata={"by": "Ann"}) as stream:
        events = [event async for event in stream]
    (again,) = stream.response.awaiting_approval
    (result,) = await shop.results()
    assert events == [
        ToolStarted(call, "Support"),
        ToolFinished(call, result),
        TextDelta("More?", "Support"),
        ApprovalRequested(again, "Support"),
        Done(stream.response),
    ]
    assert ((await session_of(shop.runner)).metadata, shop.paid) == ({"by": "Ann"}, [5])
    assert await shop.runner.approve_stream("s", call.id).collect() == attrs.evolve(stream.response, duplicate=True)


async def test_stream_of_a_rejection() -> None:
    """A rejection's stream tells what the model says to it."""
    shop = Shop(REFUND, "Pity.")
    call = await shop.ask()
    async with shop.runner.reject_stream("s", call.id, "too much") as stream:
        events = [event async for event in stream]
    assert events == [TextDelta("Pity.", "Support"), Done(stream.response)]
    assert ("too much" in (await shop.results())[0].content, shop.paid) == (True, [])


@pytest.mark.parametrize("approved", [True, False])
@pytest.mark.parametrize("calls", [1, 2])
async def test_streamed_decision_is_the_same(approved: bool, calls: int) -> None:
    """A streamed decision stores and returns what an unstreamed one does."""
    came_of: list[Any] = []
    for streams in (False, True):
        shop = Shop([CALL("refund", euros=each) for each in range(calls)], CALL("look"), "Paid.")
        shop.agent.tool(name="look")(lambda: "found")
        answers: list[AgentResponse] = []
        waiting = (await shop.runner.run_async("s", "refund it")).awaiting_approval
        for call in waiting:
            runner = shop.runner
            if streams:
                stream = runner.approve_stream if approved else runner.reject_stream
                answers.append(await stream("s", call.id).collect())
            else:
                answers.append(await (runner.approve if approved else runner.reject)("s", call.id))
        session = await session_of(shop.runner)
        said = [
            (message.role, message.text, *(each.content for each in message.tool_results))
            for message in session.history
        ]
        came_of.append(
            (said, [(each.content, each.stop_reason, each.tool_calls_executed) for each in answers], shop.paid)
        )
    assert came_of[0] == came_of[1]


@pytest.mark.parametrize(("arguments", "error"), [(("", "c"), ValueError), (("s", 5), TypeError)])
async def test_stream_of_bad_arguments(arguments: Any, error: type[Exception]) -> None:
    """Arguments of a wrong type are refused before anything is entered; that nothing waits, by the stream."""
    shop = Shop(REFUND)
    with pytest.raises(error):
        shop.runner.approve_stream(*arguments)
    with pytest.raises(error):
        shop.runner.reject_stream(*arguments)
    await shop.ask()
    with pytest.raises(ApprovalNotFoundError):
        await shop.runner.approve_stream("s", "c").collect()


@pytest.mark.parametrize("reason", ["", " \n"])
async def test_blank_reason(reason: str) -> None:
    """A reason without a word is none."""
    shop = Shop(REFUND)
    await shop.runner.reject("s", (await shop.ask()).id, reason)
    (result,) = await shop.results()
    assert result.content == "A person has refused this call; it was not run, and should not be made again as it is."


async def test_long_reason() -> None:
    """What a model is told of a rejection is cut as other results are."""
    shop = Shop(REFUND, max_result_characters=200)
    await shop.runner.reject("s", (await shop.ask()).id, "no " * 1000 + "never")
    (result,) = await shop.results()
    assert (len(result.content) <= 200, result.is_error) == (True, True)
    assert result.content.startswith("A person has refused this call;")
    assert result.content.endswith("never")
    assert "characters were left out here" in result.content


async def test_agent_run() -> None:
    """An agent's own run ends with what waits, and the session at hand can be decided in."""
    shop = Shop(REFUND)
    session = shop.agent.create_session()
    (call,) = (await shop.agent.run("refund it", session=session)).awaiting_approval
    assert session.pending_approvals == (call,)
    assert (await shop.agent.approve(call.id, session=session)).content == "done"
    assert shop.paid == [5]


# --- what becomes of a decision ---


async def test_arguments_that_do_not_fit_any_more() -> None:
    """An approved call whose tool has changed meanwhile, and does not take its arguments, is an error for the model."""
    shop = Shop(REFUND)
    call = await shop.ask()

    async def refund(cents: int) -> str:
        return f"{cents} paid"

    changed = Agent("Support", tools=[Tool(refund, requires_approval=True)], engine=shop.engine)
    await Runner(changed, shop.runner.session_store).approve("s", call.id)
    (result,) = await shop.results()
    assert result.is_error
    assert "cents: missing" in result.content


@pytest.mark.parametrize("approving", [True, False])
async def test_tool_gone(approving: bool, caplog: pytest.LogCaptureFixture) -> None:
    """An approved call whose tool is gone is an error for the model; a rejection does not need the tool."""
    shop = Shop(REFUND)
    call = await shop.ask()
    runner = Runner(Agent("Support", engine=shop.engine), shop.runner.session_store)
    assert (await (runner.approve if approving else runner.reject)("s", call.id)).content == "done"
    (result,) = await shop.results()
    assert result.is_error
    assert ("no tool named 'refund'" in result.content) is ("is not there" in caplog.text) is approving


async def test_agent_gone(caplog: pytest.LogCaptureFixture) -> None:
    """An approved call whose agent is out of reach is an error for the model, and logged."""
    shop = Shop(REFUND)
    call = await shop.ask()
    runner = Runner(Agent("Sales", engine=shop.engine), shop.runner.session_store)
    response = await runner.approve("s", call.id)
    assert (response.content, response.active_agent_name, shop.paid) == ("done", "Sales", [])
    (result,) = await shop.results()
    assert "The agent that made this call is not there any more" in result.content
    assert "no agent within reach is named 'Support', which made an approved call of tool 'refund'" in caplog.text


async def test_agent_gone_since_an_interrupted_attempt() -> None:
    """A call that had begun, and whose agent is gone since, is answered as interrupted."""
    billing = Agent("Billing", engine=ScriptedEngine([CALL("charge"), LookupError], default="billing"))

    @billing.tool(requires_approval=True)
    async def charge() -> str:
        raise SystemExit

    support = Agent("Support", handoffs=[billing], engine=ScriptedEngine([CALL("transfer_to_billing")]))
    runner = Runner(support)
    (call,) = (await runner.run_async("s", "hi")).awaiting_approval
    with pytest.raises(SystemExit):
        await runner.approve("s", call.id)
    left = Runner(Agent("Support", engine=ScriptedEngine(default="done")), runner.session_store)
    assert (await left.approve("s", call.id)).content == "done"
    assert "The call was interrupted" in results(await session_of(runner))[-1].content


async def test_tool_that_fails() -> None:
    """An approved call that fails is an error for the model, as any other, and not run again."""
    shop = Shop(REFUND)
    runner = Runner(Agent("Support", tools=[Tool(fail_to_refund, name="refund")], engine=shop.engine))
    runner = Runner(runner.starting_agent, shop.runner.session_store)
    call = await shop.ask()
    assert (await runner.approve("s", call.id)).content == "done"
    (result,) = await shop.results()
    assert "The tool failed" in result.content


async def fail_to_refund(euros: int) -> str:
    """Fail."""
    raise LookupError(str(euros))


async def test_tool_that_takes_too_long() -> None:
    """An approved call is given up after *tool_timeout*."""
    shop = Shop(REFUND)
    call = await shop.ask()

    async def refund(euros: int) -> None:
        await anyio.sleep_forever()

    runner = Runner(Agent("Support", tools=[refund], engine=shop.engine), shop.runner.session_store, tool_timeout=0.1)
    await runner.approve("s", call.id)
    (result,) = await shop.results()
    assert "whether it took effect is unknown" in result.content


async def test_model_has_its_tools_again() -> None:
    """After a decision the model may be asked with tools as often as in any turn."""
    shop = Shop(REFUND, REFUND, max_tool_iterations=1)
    first = await shop.ask()
    response = await shop.runner.approve("s", first.id)
    assert response.stop_reason == "approval"
    shop.agent.tool(name="look")(lambda: "found")
    shop.engine._replies.append(CALL("look"))
    limited = await shop.runner.approve("s", response.awaiting_approval[0].id)
    assert (limited.stop_reason, limited.content) == ("tool_limit", "done")


# --- handoffs ---


def colleagues(*replies: Scripted) -> tuple[Agent, Agent]:
    """An agent that may refund and hand over, and the one it hands over to, who says its name."""
    billing = Agent("Billing", engine=ScriptedEngine(default="Billing here"))
    support = Agent("Support", handoffs=[billing], engine=ScriptedEngine(replies, default="Support here"))
    return support, billing


async def test_handoff_beside_a_call_that_waits() -> None:
    """A handoff beside a call that waits takes effect at once; the call is its own agent's, and the other goes on."""
    support, _ = colleagues([CALL("refund", euros=5), CALL("transfer_to_billing")])
    agents: list[str] = []

    @support.tool(requires_approval=True)
    async def refund(euros: int, context: ToolContext) -> str:
        agents.append(context.agent.name)
        return "paid"

    runner = Runner(support)
    response = await runner.run_async("s", "hi")
    assert (response.stop_reason, response.active_agent_name) == ("approval", "Billing")
    assert response.handoff is not None
    response = await runner.approve("s", response.awaiting_approval[0].id)
    assert (response.content, agents) == ("Billing here", ["Support"])


@pytest.mark.parametrize("most", [1, 0])
async def test_handoff_that_is_approved(most: int) -> None:
    """A tool that hands over may require approval: it hands over then, within the decision's own turn and limits."""
    support, _ = colleagues(CALL("escalate"))

    @support.tool(requires_approval=True)
    async def escalate() -> Handoff:
        return Handoff(target_agent_name="Billing", context_updates={"urgent": True})

    runner = Runner(support, max_handoffs_per_turn=most)
    response = await runner.run_async("s", "hi")
    assert response.active_agent_name == "Support"
    response = await runner.approve("s", response.awaiting_approval[0].id)
    session = await session_of(runner)
    assert response.active_agent_name == session.active_agent_name == ("Billing" if most else "Support")
    assert session.state == ({"urgent": True} if most else {})
    assert results(session)[0].is_error is not bool(most)


# --- what a tool does to the history ---


@pytest.mark.parametrize("between", [(), ("well?",)])
async def test_approved_tool_clears_the_history(between: Sequence[str]) -> None:
    """The turn of an approved call outlives a tool that clears the history; those since then do not."""
    agent = Agent("Support", engine=ScriptedEngine(["hello", CALL("forget")], default="done"))

    @agent.tool(requires_approval=True)
    async def forget(context: ToolContext) -> str:
        await context.session.clear_history()
        return "forgotten"

    runner = Runner(agent)
    await runner.run_async("s", "hi")
    (call,) = (await runner.run_async("s", "forget it")).awaiting_approval
    for text in between:
        await runner.run_async("s", text)
    assert (await runner.approve("s", call.id)).content == "done"
    session = await session_of(runner)
    assert texts(session) == ["forget it", "", "", "done"]
    assert session.pending_approvals == ()


async def clearing_shop(*replies: Scripted) -> tuple[Shop, ToolCall]:
    """A shop with an open call of an earlier turn, and the call that waits of a tool that clears the history."""
    shop = Shop(REFUND, *replies)

    @shop.agent.tool(requires_approval=True)
    async def forget(context: ToolContext) -> str:
        await context.session.clear_history()
        return "forgotten"

    await shop.ask()
    waiting = (await shop.runner.run_async("s", "forget it")).awaiting_approval
    return shop, waiting[-1]


async def test_late_result_before_the_history_is_cleared() -> None:
    """A late result goes with its call where an approved tool clears the history; what was said since stays."""
    shop, forget = await clearing_shop(CALL("forget"))
    await shop.runner.approve("s", (await session_of(shop.runner)).pending_approvals[0].id)
    assert (await shop.runner.approve("s", forget.id)).content == "done"
    session = await session_of(shop.runner)
    assert texts(session) == ["forget it", "", "done", "", "done"]
    assert ([result.content for result in results(session)], shop.paid) == (["forgotten"], [5])


async def test_late_results_in_one_message_before_the_history_is_cleared() -> None:
    """Of several late results in one message those stay, once, whose call stays, whatever tools do later on."""
    shop, forget = await clearing_shop([REFUND, CALL("forget")], CALL("mark"), CALL("go_back"))
    marks: list[Any] = []

    @shop.agent.tool
    async def mark(context: ToolContext) -> str:
        marks.append(context.session.checkpoint())
        return "marked"

    @shop.agent.tool
    async def go_back(context: ToolContext) -> str:
        await context.session.rollback_to(marks[0])
        return "back"

    session = await session_of(shop.runner)
    late = [
        ToolResult(tool_call_id=call.id, name="refund", content=f"by hand {place}")
        for place, call in enumerate(session.pending_approvals[:2])
    ]
    await session.add_message(Message(Role.TOOL, tool_results=late))
    assert (await shop.runner.approve("s", forget.id)).content == "done"
    assert [result.content for result in await shop.results()] == ["by hand 1", "forgotten", "marked", "back"]


async def test_approved_tool_adds_messages() -> None:
    """A user's message that an approved tool adds stands before its result, which is sent with its call."""
    agent = Agent("Support", engine=ScriptedEngine([[CALL("note"), CALL("note")]], default="done"))

    @agent.tool(requires_approval=True)
    async def note(context: ToolContext) -> str:
        await context.session.add_message(Message(Role.USER, "by the way"))
        return "noted"

    store = Runner(agent).session_store
    runner = Runner(agent, store)
    session = await store.get_or_create("s", agent, max_turns=1)
    first, second = (await runner.run_async("s", "hi")).awaiting_approval
    assert (await runner.approve("s", first.id)).awaiting_approval == (second,)
    assert session.pending_approvals == (second,)
    assert (await runner.approve("s", second.id)).content == "done"


# --- around it ---


class Bank(ContextProvider):
    """Brings the tool, and notes what it is called with."""

    def __init__(self, refund: Tool) -> None:
        self.refund = refund
        self.inputs: list[str] = []
        self.histories: list[int] = []
        self.advice = Message(Role.USER, "Be quick.")
        self.responses: list[AgentResponse | None] = []

    async def before_run(self, agent: Agent, session: AgentSession, context: RunContext) -> None:
        self.inputs.append(context.input.text)
        self.histories.append(len(context.history))
        context.add_tools(self.refund)
        context.add_messages(self.advice)

    async def after_run(self, agent: Agent, session: AgentSession, context: RunContext) -> None:
        self.responses.append(context.response)


async def test_providers() -> None:
    """A provider's tool may require approval; the decision's turn goes on to answer the same message."""
    shop = Shop(REFUND, "Paid.")
    bank = Bank(shop.tool)
    agent = Agent("Support", engine=shop.engine, context_providers=[bank])
    runner = Runner(agent)
    asked = await runner.run_async("s", "refund it")
    answer = await runner.approve("s", asked.awaiting_approval[0].id)
    assert (bank.inputs, bank.responses, shop.paid) == (["refund it"] * 2, [asked, answer], [5])
    assert bank.histories == [0, 0]
    first, second = shop.engine.requests
    assert [message.text for message in first.messages] == ["Be quick.", "refund it"]
    assert second.messages[:2] == first.messages
    assert [message.role for message in second.messages[2:]] == [Role.MODEL, Role.TOOL]


class Newest(HistoryProvider):
    """Chooses the last turn."""

    async def get_messages(self, agent: Agent, session: AgentSession, context: RunContext) -> Sequence[Message]:
        return prune(context.history, 1)


async def test_history_provider() -> None:
    """Whatever is chosen of the history, the turn of the decided call is sent, before what was said since."""
    shop = Shop("one!", "two!", REFUND, "It waits.", "It still waits.")
    agent = Agent("Support", tools=[shop.tool], engine=shop.engine, context_providers=[Newest()])
    runner = Runner(agent)
    for text in ("one", "two"):
        await runner.run_async("s", text)
    (call,) = (await runner.run_async("s", "refund it")).awaiting_approval
    for text in ("well?", "and now?"):
        await runner.run_async("s", text)
    assert (await runner.approve("s", call.id)).content == "done"
    said = [message.text for message in shop.engine.requests[-1].messages]
    assert said == ["refund it", "", "", "and now?", "It still waits.", ARRIVED]
    assert [text.text for text in shop.engine.requests[-2].messages][-1] == "and now?"


async def test_service_and_a_provider() -> None:
    """A service is sent a provider's message after the result of the call that it waits for."""
    shop, engine = service_shop(REFUND, "Paid.")
    bank = Bank(shop.tool)
    runner = Runner(Agent("Support", engine=engine, context_providers=[bank]))
    (call,) = (await runner.run_async("s", "refund it")).awaiting_approval
    assert (await runner.approve("s", call.id)).content == "Paid."
    assert sent(engine) == [["Be quick.", "refund it"], ["5 paid", "Be quick."]]


async def test_decided_inside_its_own_turn() -> None:
    """A tool can't decide in its own conversation: that would be a turn inside its turn."""
    shop = Shop(REFUND, CALL("decide"))
    call = await shop.ask()

    @shop.agent.tool
    async def decide() -> str:
        with pytest.raises(TurnInsideTurnError):
            await shop.runner.approve("s", call.id)
        return "no"

    assert (await shop.runner.run_async("s", "well?")).content == "done"
    assert shop.paid == []


async def test_seen_inside_a_turn() -> None:
    """Inside a turn, *pending_approvals* are those of its own history."""
    shop = Shop(REFUND)
    call = await shop.ask()
    session = await session_of(shop.runner)
    async with session.turn():
        assert [each.id for each in session.pending_approvals] == [call.id]
        await session.clear_history()
        assert list(session.pending_approvals) == []


async def test_session_of_another_agent() -> None:
    """A session whose agent is out of reach is refused, as for a run."""
    shop = Shop(REFUND)
    call = await shop.ask()
    session = await session_of(shop.runner)
    for decide in (Agent("Sales").approve, Agent("Sales").reject):
        with pytest.raises(SessionError, match="can't reach"):
            await decide(call.id, session=session)


async def test_session_without_an_agent() -> None:
    """In a session that no agent has run in so far, the one that decides goes on."""
    shop = Shop()
    call = ToolCall(id="c", name="refund", args={"euros": 5})
    session = AgentSession()
    await session.add_message(Message(Role.USER, "refund it"))
    await session.add_message(held_back(Message(Role.MODEL, tool_calls=[call], agent_name="Support"), [0], []))
    assert (await shop.agent.approve("c", session=session)).content == "done"
    assert (shop.paid, session.active_agent_name) == ([5], "Support")


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"session_id": 5}, TypeError),
        ({"session_id": ""}, ValueError),
        ({"call_id": 5}, TypeError),
        ({"call_id": ""}, ValueError),
        ({"metadata": {"x": object()}}, SessionError),
        ({"reason": 5}, TypeError),
    ],
)
async def test_bad_arguments(arguments: dict[str, Any], error: type[Exception]) -> None:
    """Arguments of a wrong type are refused, and nothing is changed."""
    shop = Shop(REFUND)
    call = await shop.ask()
    with pytest.raises(error):
        await shop.runner.reject(**{"session_id": "s", "call_id": call.id, **arguments})
    assert (await session_of(shop.runner)).pending_approvals == (call,)


async def test_what_is_no_session() -> None:
    """What is no session is refused."""
    shop = Shop()
    with pytest.raises(TypeError, match="session must be an AgentSession"):
        await shop.runner.approve_session("s", "c")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="session must be an AgentSession"):
        await shop.agent.reject("c", session=None)  # type: ignore[arg-type]


# --- where a service keeps the history ---


def service_shop(*replies: Scripted) -> tuple[Shop, A2AEngine]:
    """A shop that is answered by an engine whose service keeps the history, and refuses what real ones refuse."""
    shop = Shop(*replies)
    engine = A2AEngine(shop.engine)
    shop.runner = Runner(shop.agent, shop.runner.session_store)
    agent = Agent("Support", tools=[shop.tool], engine=engine)
    shop.agent, shop.runner = agent, Runner(agent)
    return shop, engine


def sent(engine: A2AEngine) -> list[list[str]]:
    """What each request sends."""
    return [
        [
            message.text or ", ".join(str(result.content) for result in message.tool_results)
            for message in request.messages
        ]
        for request in engine.requests
    ]


async def test_service() -> None:
    """A service is sent the result of an approved call, and nothing else."""
    shop, engine = service_shop([REFUND, REFUND])
    first, second = (await shop.runner.run_async("s", "refund it")).awaiting_approval
    await shop.runner.approve("s", first.id)
    assert (await shop.runner.approve("s", second.id)).content == "done"
    assert sent(engine) == [["refund it"], ["5 paid, 5 paid"]]


async def test_service_and_a_message_in_between() -> None:
    """A service is told that the call waits where a message comes in between, and of the result once it is there."""
    shop, engine = service_shop(REFUND, "It waits.", "Paid.")
    call = await shop.ask()
    assert (await shop.runner.run_async("s", "well?")).content == "It waits."
    assert (await shop.runner.approve("s", call.id)).content == "Paid."
    late = "(The result of an earlier call of the tool refund has arrived only now: 5 paid)"
    assert sent(engine) == [["refund it"], [AWAITING, "well?"], [late]]


async def test_service_that_gives_ids_again() -> None:
    """Calls keep the ids that a service knows them by, also where it gives them again."""
    call = ToolCall(id="c", name="refund", args={"euros": 5})
    shop, _ = service_shop(call, "Paid.", call, "Paid again.")
    for answer in ("Paid.", "Paid again."):
        assert (await shop.ask()).id == "c"
        assert (await shop.runner.approve("s", "c")).content == answer
    assert shop.paid == [5, 5]


async def test_store_that_is_closed() -> None:
    """Nothing is decided in a store that is closed; the error says so."""
    shop = Shop(REFUND)
    call = await shop.ask()
    store: BaseSessionStore = shop.runner.session_store
    await store.aclose()
    with pytest.raises(Exception, match="was closed"):
        await shop.runner.approve("s", call.id)


async def test_not_found_is_a_lookup_error() -> None:
    """`ApprovalNotFoundError` is caught as the look-up that it is."""
    shop = Shop()
    await shop.runner.run_async("s", "hi")
    with pytest.raises(LookupError) as caught:
        await shop.runner.approve("s", "c")
    assert isinstance(caught.value, ApprovalNotFoundError)


async def test_output_type() -> None:
    """Words beside a call that waits are no answer, and not read as one, also where they come from the store."""

    @attrs.frozen
    class Refund:
        euros: int

    shop = Shop(EngineReply(text="One moment.", tool_calls=[REFUND]), '{"euros": 5}')
    runner = Runner(Agent("Support", tools=[shop.tool], engine=shop.engine, output_type=Refund))
    for _ in range(2):
        response = await runner.run_async("s", "hi", message_id="m")
        assert (response.content, response.output) == ("One moment.", None)
    for duplicate in (False, True):
        answer = await runner.approve("s", response.awaiting_approval[0].id)
        assert (answer.duplicate, answer.output) == (duplicate, Refund(5))
