from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from chatflow.core.agent import Agent
from chatflow.core.approvals import held_back
from chatflow.core.engine import EngineReply, EngineRequest, ReplyPart
from chatflow.core.events import RunEvent, TextDelta
from chatflow.core.memory import SessionStore
from chatflow.core.messages import Message, Role, ToolCall, ToolResult
from chatflow.core.prompt import ARRIVED, to_prompt
from chatflow.core.providers import ContextProvider, HistoryProvider, RunContext
from chatflow.core.pruning import prune
from chatflow.core.session import AgentSession, SessionContext
from chatflow.core.store import BaseSessionStore
from chatflow.core.tools import ToolContext, tool
from chatflow.engines.scripted import ScriptedEngine
from chatflow.exceptions import ContextWindowError
from chatflow.runner import Runner
from chatflow.sqlite import SQLiteSessionStore
from chatflow.testing.conformance.service_engine import A2AEngine
from tests.runs import session_of, texts
from tests.strategies import calls, histories, results, says
from tests.test_budget import Drawn, windows_plainly
from tests.test_prompt import check_valid
from tests.test_pruning import numbered

CALL = ScriptedEngine.call
TOO_LONG = "model 'm': the prompt is too long"
SECRET = "account 4711"

numbers = ("one", "two", "three", "four", "five")


@tool
def look(what: str = "") -> str:
    """Look."""
    return f"found {what}"


def sent(request: EngineRequest) -> list[str]:
    """What a request sends, a word for a call or a result."""
    return [
        message.text
        or ",".join([*(each.name for each in message.tool_calls), *(each.name for each in message.tool_results)])
        for message in request.messages
    ]


async def talk(runner: Runner, *said: str, session_id: str = "s") -> None:
    """A turn for each text."""
    for text in said:
        await runner.run_async(session_id, text)


def too_long(request: EngineRequest | None = None) -> ContextWindowError:
    """What a provider says to a long prompt; another object each time, as each has a traceback of its own."""
    return ContextWindowError(TOO_LONG, model="m", status=400)


# --- a limit of tokens -------------------------------------------------------------------------------------------


async def test_oldest_turns_are_not_sent() -> None:
    """The oldest whole turns are left out of what is sent, as few as possible."""
    engine = ScriptedEngine(default="yes")
    await talk(Runner(Agent("Support"), engine=engine, max_prompt_tokens=5), *numbers)
    assert [sent(request) for request in engine.requests] == [
        ["one"],
        ["one", "yes", "two"],
        ["one", "yes", "two", "yes", "three"],
        ["two", "yes", "three", "yes", "four"],
        ["three", "yes", "four", "yes", "five"],
    ]


async def test_nothing_leaves_the_conversation() -> None:
    """What is not sent stays in the history, and is sent again to an agent that may be sent more."""
    runner = Runner(Agent("Support"), engine=ScriptedEngine(default="yes"), max_prompt_tokens=3)
    await talk(runner, *numbers)
    assert len((await session_of(runner)).history) == 10


async def test_instructions_and_tools_count() -> None:
    """Instructions and tools are part of what is counted, and never left out."""
    engine = ScriptedEngine(default="yes")
    agent = Agent("Support", "Be very kind.", tools=[look], max_prompt_tokens=7)
    await talk(Runner(agent, engine=engine), *numbers)
    assert sent(engine.requests[-1]) == ["Be very kind.", "four", "yes", "five"]


async def test_agents_own_limit_comes_first() -> None:
    """An agent's own number comes before its runner's, larger or smaller."""
    engine = ScriptedEngine(default="yes")
    billing = Agent("Billing", engine=engine, max_prompt_tokens=100)
    support = Agent("Support", engine=engine, handoffs=[billing])
    runner = Runner(support, max_prompt_tokens=4)
    await talk(runner, *numbers)
    session = await session_of(runner)
    await session.set_active_agent(billing)
    await talk(runner, "six")
    assert [len(request.messages) for request in engine.requests] == [1, 3, 3, 3, 3, 11]


async def test_system_messages_stay() -> None:
    """Stored system messages are always sent."""
    engine = ScriptedEngine(default="yes")
    runner = Runner(Agent("Support"), engine=engine, max_prompt_tokens=4)
    await talk(runner, "one", "two")
    await (await session_of(runner)).add_message(Message(Role.SYSTEM, "VIP"))
    await talk(runner, "three")
    assert sent(engine.requests[-1]) == ["VIP", "two", "yes", "three"]


async def test_results_of_the_turn_push_others_out() -> None:
    """What the running turn has said is always sent, and the turns before it make room."""
    engine = ScriptedEngine(["yes", "yes", [CALL("look", what=f"a b {SECRET}"), CALL("look", what="c")], "done"])
    runner = Runner(Agent("Support", tools=[look]), engine=engine, max_prompt_tokens=18)
    await talk(runner, "one", "two words", "three")
    assert sent(engine.requests[2]) == ["one", "yes", "two words", "yes", "three"]
    assert sent(engine.requests[3]) == ["three", "look,look", "look,look"]
    check_valid(engine.requests[3].messages)


async def test_turn_alone_is_over() -> None:
    """A turn that is over by itself is an error that says by how much, before anything is sent, and leaves no trace."""
    engine = ScriptedEngine(default="yes")
    runner = Runner(Agent("Support", "Be kind.", model="m"), engine=engine, max_prompt_tokens=7)
    await talk(runner, "one", "two")
    with pytest.raises(ContextWindowError) as caught:
        await talk(runner, f"this is {SECRET} and so on")
    error = caught.value
    assert (error.session_id, error.tokens, error.max_prompt_tokens, error.model) == ("s", 9, 7, "m")
    assert str(error) == (
        "session 's': this turn alone and what goes with it have 9 tokens, and max_prompt_tokens of agent 'Support' is"
        " 7; nothing was sent. Shorten instructions, tools or the message, or raise max_prompt_tokens"
    )
    assert len(engine.requests) == 2
    assert texts(await session_of(runner)) == ["one", "yes", "two", "yes"]


async def test_pair_of_an_earlier_turn() -> None:
    """A turn that adds the result of an earlier call is sent that call's turn, and the one that it stands in."""

    class Answers(ContextProvider):
        async def before_run(self, agent: Agent, session: AgentSession, context: RunContext) -> None:
            if context.input.text == "five":
                context.add_messages(results("a"), store=True)

    engine = ScriptedEngine(default="yes")
    agent, store = Agent("Support", engine=engine, context_providers=[Answers()]), SessionStore()
    await talk(Runner(agent, store), "one", "two")
    await (await session_of(Runner(agent, store))).add_message(calls("a"))
    await talk(Runner(agent, store), "three", "four")
    with pytest.raises(ContextWindowError, match="this turn alone and what goes with it have 25 tokens"):
        await talk(Runner(agent, store, max_prompt_tokens=24), "five")
    await talk(Runner(agent, store, max_prompt_tokens=26), "five")
    assert sent(engine.requests[-1]) == ["two", "yes", "look", "look", "four", "yes", ARRIVED, "five"]
    assert engine.requests[-1].messages[3].tool_results[0].content is None


@attrs.frozen
class Context(ContextProvider):
    """Adds messages that are only sent."""

    messages: Sequence[Message]
    name: str = "context"

    async def before_run(self, agent: Agent, session: AgentSession, context: RunContext) -> None:
        context.add_messages(*self.messages)


async def test_what_providers_add_stays() -> None:
    """What a provider adds for the run is never left out, of whatever role it is."""
    engine = ScriptedEngine(default="yes")
    added = [Message(Role.SYSTEM, "weather"), Message(Role.USER, "profile"), Message(Role.MODEL, "noted")]
    agent = Agent("Support", engine=engine, context_providers=[Context(added)], max_prompt_tokens=6)
    await talk(Runner(agent), *numbers)
    assert sent(engine.requests[-1]) == ["weather", "four", "yes", "profile", "noted", "five"]


async def test_what_a_provider_has_chosen_is_cut() -> None:
    """Of a history that a provider has chosen, the oldest turns are left out as of any other."""

    class Every(HistoryProvider):
        async def get_messages(self, agent: Agent, session: AgentSession, context: RunContext) -> Sequence[Message]:
            made_up = [Message(Role.USER, "once"), Message(Role.MODEL, "long ago")]
            return [*made_up, *prune(context.history, 2)]

    engine = ScriptedEngine(default="yes")
    agent = Agent("Support", engine=engine, context_providers=[Every()], max_prompt_tokens=5)
    await talk(Runner(agent), *numbers)
    assert sent(engine.requests[0]) == ["once", "long ago", "one"]
    assert sent(engine.requests[-1]) == ["three", "yes", "four", "yes", "five"]


async def test_what_is_wrong_with_an_answer_stays() -> None:
    """An answer that was refused, and what is wrong with it, are part of the turn, and older turns make room."""
    engine = ScriptedEngine(["1", "2", "no number", "3"])
    runner = Runner(Agent("Support", engine=engine, output_type=int), max_prompt_tokens=35)
    await talk(runner, "one", "two " * 10, "three")
    assert len(engine.requests[2].messages) == 5
    assert sent(engine.requests[3])[:2] == ["three", "no number"]
    assert len(engine.requests[3].messages) == 3


async def test_no_limit_counts_nothing() -> None:
    """Without a limit nothing is counted, so that any engine will do."""

    class Plain:
        async def generate(self, request: EngineRequest) -> EngineReply:
            return EngineReply(text="yes")

    assert (await Runner(Agent("Support"), engine=Plain()).run_async("s", "hi")).content == "yes"


async def test_engine_that_can_not_count() -> None:
    """A limit with an engine that can't count fails the turn, with what to do."""

    class Plain:
        async def generate(self, request: EngineRequest) -> EngineReply:
            return EngineReply(text="yes")

    runner = Runner(Agent("Support", engine=Plain()), max_prompt_tokens=5)
    with pytest.raises(TypeError, match=r"and Plain, .* 'Support', can't: give it an async method count_tokens\("):
        await talk(runner, "one")


@pytest.mark.parametrize("tokens", [True, 2.5, -1, None], ids=repr)
async def test_count_of_wrong_type(tokens: Any) -> None:
    """A count that is none fails the turn, and names the engine."""

    class Wrong(ScriptedEngine):
        async def count_tokens(self, request: EngineRequest) -> int:
            counted: int = tokens
            return counted

    runner = Runner(Agent("Support"), engine=Wrong(default="yes"), max_prompt_tokens=5)
    with pytest.raises(TypeError, match=rf"^Wrong.count_tokens\(\) must return a number of tokens, not {tokens!r}$"):
        await talk(runner, "one")


async def test_count_that_is_not_async() -> None:
    """An engine whose count_tokens is no async method fails the turn, and is named."""

    class Counting(ScriptedEngine):
        def count_tokens(self, request: EngineRequest) -> int:  # type: ignore[override]
            return 5

    runner = Runner(Agent("Support"), engine=Counting(default="yes"), max_prompt_tokens=5)
    with pytest.raises(TypeError, match=r"^Counting.count_tokens\(\) must be async: it returned int, which can't be"):
        await talk(runner, "one")


async def test_left_out_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    """What is left out is logged once a turn, by counts."""
    caplog.set_level(logging.INFO, "chatflow")
    engine = ScriptedEngine(["yes", "yes", "yes", [CALL("look", what="x")], [CALL("look", what="y")], "done"])
    runner = Runner(Agent("Support", engine=engine, tools=[look]), max_prompt_tokens=17)
    await talk(runner, f"{SECRET} and much more", f"{SECRET} again", f"{SECRET} once more")
    caplog.clear()
    await talk(runner, "four")
    assert [record.message for record in caplog.records if record.name == "chatflow.runner"] == [
        "session 's': 1 older turn, 2 messages, are not sent to agent 'Support': they would be too long"
    ]


@pytest.mark.parametrize("limit", [None, 16], ids=str)
async def test_repairs_name_the_place_in_the_history(limit: int | None, caplog: pytest.LogCaptureFixture) -> None:
    """What is repaired is named by its place in the history, however much of that is sent."""
    engine = ScriptedEngine(default="yes")
    store = SessionStore()
    await talk(Runner(Agent("Support"), store, engine), "one", "two", "three")
    await (await session_of(Runner(Agent("Support"), store))).add_message(calls("a"))
    await talk(Runner(Agent("Support"), store, engine, max_prompt_tokens=limit), "four")
    assert len(engine.requests[-1].messages) == (9 if limit is None else 5)
    assert "repaired for the model: message 6: the call 'a' has no result" in caplog.text


class Till:
    """An agent with a payment that a person has to approve, and what was paid."""

    def __init__(self, *replies: Any, **options: Any) -> None:
        self.paid: list[int] = []
        self.engine = ScriptedEngine(replies, default="yes")
        self.agent = Agent("Support", engine=self.engine, **options)
        self.agent.tool(requires_approval=True)(self.pay)

    async def pay(self, euros: int) -> str:
        """Pay."""
        self.paid.append(euros)
        return f"paid {euros}"

    async def ask(self, runner: Runner) -> ToolCall:
        """Have it asked for."""
        (call,) = (await runner.run_async("s", "pay it")).awaiting_approval
        return call


async def test_late_decision() -> None:
    """With a late decision goes the turn of its call, and the newest of the others that there is room for."""
    till = Till("yes", CALL("pay", euros=5))
    runner = Runner(till.agent)
    await talk(runner, "zero")
    call = await till.ask(runner)
    await talk(runner, *numbers)
    await Runner(till.agent, runner.session_store, max_prompt_tokens=29).approve("s", call.id)
    assert sent(till.engine.requests[-1]) == ["pay it", "pay", "pay", "four", "yes", "five", "yes", ARRIVED]
    await talk(Runner(till.agent, runner.session_store, max_prompt_tokens=30), "six")
    assert sent(till.engine.requests[-1]) == ["pay it", "pay", "pay", "five", "yes", ARRIVED, "yes", "six"]


async def test_decision_that_can_not_be_told() -> None:
    """Where not even the turn of the call has room, that is said before the tool runs, and nothing is decided."""
    till = Till(CALL("pay", euros=5))
    runner = Runner(till.agent)
    call = await till.ask(runner)
    await talk(runner, *numbers)
    bounded = Runner(till.agent, runner.session_store, max_prompt_tokens=6)
    told = "the turn of the call that was approved and .* 7 tokens, .*nothing was run or sent"
    for decide, said in ((bounded.approve, told), (bounded.reject, "this turn alone")):
        with pytest.raises(ContextWindowError, match=said) as caught:
            await decide("s", call.id)
        assert (caught.value.session_id, caught.value.max_prompt_tokens) == ("s", 6)
        assert (till.paid, await runner.session_store.pending_turns()) == ([], ())
        assert (await session_of(runner)).pending_approvals == (call,)
    assert (await runner.reject("s", call.id)).content == "yes"


async def test_result_that_has_no_room() -> None:
    """A result that has no room is kept: once there is room the decision goes on, and the tool is not run again."""
    till = Till(CALL("pay", euros=5))
    runner = Runner(till.agent)
    call = await till.ask(runner)
    bounded = Runner(till.agent, runner.session_store, max_prompt_tokens=7)
    for _ in range(2):
        with pytest.raises(ContextWindowError, match="this turn alone and what goes with it have 8 tokens"):
            await bounded.approve("s", call.id)
    with pytest.raises(ContextWindowError, match="nothing was sent"):  # and not that nothing was run
        await Runner(till.agent, runner.session_store, max_prompt_tokens=1).approve("s", call.id)
    assert (await runner.approve("s", call.id)).content == "yes"
    assert till.paid == [5]


async def test_decision_that_asks_nobody() -> None:
    """As long as others of its message wait, no model is asked, and a decision needs no room."""
    till = Till([CALL("pay", euros=1), CALL("pay", euros=2)])
    runner = Runner(till.agent)
    first, second = (await runner.run_async("s", "pay it")).awaiting_approval
    bounded = Runner(till.agent, runner.session_store, max_prompt_tokens=1)
    assert (await bounded.approve("s", first.id)).awaiting_approval == (second,)
    with pytest.raises(ContextWindowError):
        await bounded.approve("s", second.id)
    assert till.paid == [1]


async def test_decision_where_a_service_keeps_the_history() -> None:
    """Where a service keeps the history a decision is sent alone, and needs no room for the turn of its call."""
    engine = CountingService(ScriptedEngine([CALL("pay", euros=5)], default="yes"))
    agent = Agent("Support", engine=engine)
    agent.tool(requires_approval=True, name="pay")(lambda euros: f"paid {euros}")
    runner = Runner(agent)
    (call,) = (await runner.run_async("s", "pay " * 20)).awaiting_approval
    assert (await Runner(agent, runner.session_store, max_prompt_tokens=5).approve("s", call.id)).content == "yes"
    assert len(engine.requests[-1].messages) == 1


async def test_decision_and_an_engine_that_can_not_count() -> None:
    """An engine that can't count is found before an approved tool runs."""

    class Plain:
        async def generate(self, request: EngineRequest) -> EngineReply:
            return EngineReply(text="yes")

    till = Till(CALL("pay", euros=5))
    runner = Runner(till.agent)
    call = await till.ask(runner)
    bounded = Runner(Agent("Support", tools=till.agent.tools), runner.session_store, Plain(), max_prompt_tokens=90)
    with pytest.raises(TypeError, match="can't: give it an async method count_tokens"):
        await bounded.approve("s", call.id)
    assert till.paid == []


class Chosen(HistoryProvider):
    """Chooses the newest turns."""

    def __init__(self, turns: int) -> None:
        super().__init__()
        self.turns = turns

    async def get_messages(self, agent: Agent, session: AgentSession, context: RunContext) -> Sequence[Message]:
        return prune(context.history, self.turns)


@pytest.mark.parametrize(
    ("turns", "limit", "expected"),
    [
        (7, 100, ["zero", "yes", "pay it", "pay", "pay", "one", "yes", "two", "yes", "three", "yes", ARRIVED]),
        (2, 100, ["pay it", "pay", "pay", "two", "yes", "three", "yes", ARRIVED]),
        (7, 30, ["pay it", "pay", "pay", "two", "yes", "three", "yes", ARRIVED]),
        (2, 28, ["pay it", "pay", "pay", "three", "yes", ARRIVED]),
    ],
)
async def test_late_decision_and_a_history_provider(turns: int, limit: int, expected: list[str]) -> None:
    """What a provider chooses stands around the turn of the decided call, and leaves where there is no room."""
    till = Till("yes", CALL("pay", euros=5), context_providers=[Chosen(turns)])
    runner = Runner(till.agent)
    await talk(runner, "zero")
    call = await till.ask(runner)
    await talk(runner, *numbers[:3])
    await Runner(till.agent, runner.session_store, max_prompt_tokens=limit).approve("s", call.id)
    assert sent(till.engine.requests[-1]) == expected


async def test_calls_decided_at_different_times_and_a_history_provider() -> None:
    """What was decided in between about another call of the message is sent with it, whatever a provider chooses."""
    till = Till([CALL("pay", euros=1), CALL("pay", euros=2)], context_providers=[Chosen(1)])
    runner = Runner(till.agent)
    first, second = (await runner.run_async("s", "pay it")).awaiting_approval
    await talk(runner, "one")
    await runner.approve("s", first.id)
    await talk(runner, "two", "three")
    await runner.approve("s", second.id)
    assert sent(till.engine.requests[-1]) == ["pay it", "pay,pay", "pay,pay", "three", "yes", ARRIVED]
    assert [each.content for each in till.engine.requests[-1].messages[2].tool_results] == ["paid 1", "paid 2"]


@given(histories(max_size=24), st.integers(3, 40), st.booleans())
async def test_any_history(history: list[Message], limit: int, calls_a_tool: bool) -> None:
    """Each prompt is valid, within the limit, and the largest that is: found here by trying all windows."""
    engine = ScriptedEngine([[CALL("look", what="x")], "done"] if calls_a_tool else ["done"])
    agent = Agent("Support", "Be kind.", tools=[look], max_prompt_tokens=limit)
    session = SessionContext("s", agent, max_turns=100)
    async with session.turn():
        for message in history:
            await session.add_message(message)
    before = list(session.history)
    failed: ContextWindowError | None = None
    try:
        await Runner(agent, session.store, engine).run_session(session, "question")
    except ContextWindowError as error:
        failed = error
    said = [says(Role.USER, "question")]
    if calls_a_tool:
        said += pair("look", "found x", what="x")
    for number, request in enumerate(engine.requests):
        check_valid(request.messages)
        expected = await largest(agent, before, said[: 1 + 2 * number], limit)
        assert expected is not None
        assert sent(request) == expected
        assert "question" in expected
    if failed is not None:
        assert await largest(agent, before, said[: 1 + 2 * len(engine.requests)], limit) is None
        assert (failed.tokens or 0) > limit


@given(histories(max_size=12), histories(max_size=12), st.integers(3, 60), st.sampled_from(["yes", "no", "look"]))
async def test_any_decision(history: list[Message], since: list[Message], limit: int, decided: str) -> None:
    """As many turns as fit are sent with the turn of a decided call, however late that is; or nothing is run.

    Those since the call leave last, and what is sent is valid.
    """
    paid: list[int] = []
    engine = ScriptedEngine([[CALL("look", what="x")], "done"] if decided == "look" else ["done"])
    agent = Agent("Support", "Be kind.", tools=[look], max_prompt_tokens=limit)

    @agent.tool(requires_approval=True)
    async def pay(euros: int) -> str:
        """Pay."""
        paid.append(euros)
        return "found it"

    held = held_back(Message(Role.MODEL, tool_calls=[ToolCall(id="held", name="pay", args={"euros": 5})]), [0], [])
    session = SessionContext("s", agent, max_turns=100)
    async with session.turn():
        for message in (*history, says(Role.USER, "pay it"), attrs.evolve(held, agent_name="Support"), *since):
            await session.add_message(message)
    before = list(session.history)
    turn = next(at for at, message in enumerate(before) if message.text == "pay it")
    runner = Runner(agent, session.store, engine)
    failed: ContextWindowError | None = None
    try:
        await (runner.reject_session(session, "held") if decided == "no" else runner.approve_session(session, "held"))
    except ContextWindowError as error:
        failed = error
    refused = "A person has refused this call; it was not run, and should not be made again as it is."
    said = [answer("pay", refused, "held", is_error=True) if decided == "no" else answer("pay", "found it", "held")]
    if decided == "look":
        said += pair("look", "found x", what="x")
    again = range(turn, turn + 2)
    for number, request in enumerate(engine.requests):
        check_valid(request.messages)
        assert sent(request) == await largest(agent, before, said[: 1 + 2 * number], limit, again)
    if failed is None:
        assert (paid, texts(session)[-1]) == ([] if decided == "no" else [5], "done")
        return
    assert await largest(agent, before, said[: 1 + 2 * len(engine.requests)], limit, again) is None
    assert list(session.history) == before
    if await largest(agent, before, [answer("pay", "", "held")], limit, again) is None:
        assert paid == []


def answer(name: str, found: str, call_id: str = "x", *, is_error: bool = False) -> Message:
    """The message that holds a result."""
    result = ToolResult(tool_call_id=call_id, name=name, content=found, is_error=is_error)
    return Message(Role.TOOL, tool_results=[result])


def pair(name: str, found: str, **args: Any) -> list[Message]:
    """A call and its result."""
    return [Message(Role.MODEL, tool_calls=[ToolCall(id="x", name=name, args=args)]), answer(name, found)]


async def largest(
    agent: Agent, before: list[Message], own: list[Message], limit: int, again: range = range(0)
) -> list[str] | None:
    """What is sent of the largest window within *limit*, by trying all of them."""
    whole = [*before, *own]
    for places in windows_plainly(Drawn(numbered(whole), len(before), again)):
        messages = to_prompt([whole[at] for at in sorted(places)], "Be kind.").messages
        made = EngineRequest(agent=agent, messages=messages, tools=tuple(agent.tools))
        if await ScriptedEngine().count_tokens(made) <= limit:
            return sent(made)
    return None


# --- a provider that finds it too long ---------------------------------------------------------------------------


def too_long_for(most: int, *replies: Any) -> ScriptedEngine:
    """An engine whose model takes so many messages at most."""
    engine = ScriptedEngine(default="yes")
    said = iter(replies)
    engine.when(
        lambda request: True,
        reply=lambda request: too_long() if len(request.messages) > most else next(said, "yes"),
    )
    return engine


async def test_error_is_raised() -> None:
    """Unless asked to, the provider's error is the turn's, and nothing is asked again."""
    engine = too_long_for(3)
    runner = Runner(Agent("Support"), engine=engine)
    await talk(runner, "one", "two")
    with pytest.raises(ContextWindowError, match=f"^{TOO_LONG}$"):
        await talk(runner, "three")
    assert len(engine.requests) == 3


async def test_shrinks(caplog: pytest.LogCaptureFixture) -> None:
    """Asked to, the model is asked again, with at most half of the turns, and that is logged."""
    engine = too_long_for(5)
    runner = Runner(Agent("Support"), engine=engine, on_context_window="shrink")
    await talk(runner, *numbers[:4])
    assert [sent(request) for request in engine.requests[3:]] == [
        ["one", "yes", "two", "yes", "three", "yes", "four"],
        ["three", "yes", "four"],
    ]
    assert [record.message for record in caplog.records if record.levelno == logging.WARNING] == [
        f"session 's': {TOO_LONG}; asked again, with 2 turns in place of 4"
    ]
    assert len((await session_of(runner)).history) == 8


async def test_shrinks_until_it_fits(caplog: pytest.LogCaptureFixture) -> None:
    """The window is halved until it fits, down to the running turn, and each time that is logged."""
    engine = too_long_for(1)
    runner = Runner(Agent("Support"), engine=too_long_for(100))
    await talk(runner, *numbers)
    await talk(Runner(Agent("Support"), runner.session_store, engine, on_context_window="shrink"), "six")
    assert [len(request.messages) for request in engine.requests] == [11, 5, 1]
    assert [record.message.partition("; ")[2] for record in caplog.records] == [
        "asked again, with 3 turns in place of 6",
        "asked again, with 1 turn in place of 3",
    ]


async def test_running_turn_alone_is_too_long() -> None:
    """Where the running turn alone is too long, the provider's error is raised, and nothing is stored."""
    engine = too_long_for(0)
    runner = Runner(Agent("Support"), engine=too_long_for(100))
    await talk(runner, *numbers)
    with pytest.raises(ContextWindowError):
        await talk(Runner(Agent("Support"), runner.session_store, engine, on_context_window="shrink"), "six")
    assert [len(request.messages) for request in engine.requests] == [11, 5, 1]
    assert len((await session_of(runner)).history) == 10


@pytest.mark.parametrize("make_store", [SessionStore, lambda: SQLiteSessionStore(":memory:")], ids=["memory", "sqlite"])
async def test_later_turns_begin_with_what_fitted(make_store: Callable[[], BaseSessionStore]) -> None:
    """A later turn begins with what fitted and what was said since, and is halved again once that is too long."""
    engine = too_long_for(5)
    async with make_store() as store:
        runner = Runner(Agent("Support"), store, engine, on_context_window="shrink")
        await talk(runner, *map(str, range(10)))
        assert [len(request.messages) for request in engine.requests] == [1, 3, 5, 7, 3, 5, 7, 3, 5, 7, 3, 5, 7, 3]
        assert sent(engine.requests[5]) == ["2", "yes", "3", "yes", "4"]
        assert len((await session_of(runner)).history) == 20


async def test_note_of_what_fitted_is_for_who_shrinks() -> None:
    """What was left out for one agent is sent to others, and by a runner that does not shrink."""
    engine, other = too_long_for(5), ScriptedEngine(default="yes")
    runner = Runner(Agent("Support"), engine=engine, on_context_window="shrink")
    await talk(runner, *numbers[:4])
    await talk(Runner(Agent("Support"), runner.session_store, other), "five")
    await (await session_of(runner)).set_active_agent(sales := Agent("Sales"))
    await talk(Runner(sales, runner.session_store, other, on_context_window="shrink"), "six")
    assert [len(request.messages) for request in other.requests] == [9, 11]


async def test_note_of_what_fitted_forgets_what_is_gone() -> None:
    """What has left the conversation is not kept any longer for the note of it."""
    engine = too_long_for(5)
    runner = Runner(Agent("Support"), engine=engine, on_context_window="shrink")
    await talk(runner, *numbers[:4])
    session = await session_of(runner)
    assert [message.text for message in session.no_room["Support"]] == ["one", "yes", "two", "yes"]
    await session.clear_history()
    await talk(runner, "five")
    assert session.no_room == {"Support": ()}


async def test_decision_about_a_call_that_was_left_out() -> None:
    """The turn of a decided call is sent also if it was left out of earlier turns since they were too long."""
    engine = too_long_for(5, CALL("pay"))
    agent = Agent("Support")
    agent.tool(requires_approval=True, name="pay")(lambda: "paid")
    runner = Runner(agent, engine=engine, on_context_window="shrink")
    (call,) = (await runner.run_async("s", "pay it")).awaiting_approval
    await talk(runner, "two", "three")
    assert (await runner.approve("s", call.id)).content == "yes"
    assert [sent(request) for request in engine.requests[2:]] == [
        ["pay it", "pay", "pay", "two", "yes", "three"],
        ["three"],
        ["pay it", "pay", "pay", "three", "yes", ARRIVED],
        ["pay it", "pay", "pay"],
    ]


async def test_nothing_to_leave_out() -> None:
    """Where the running turn is all there is, the error is raised at once."""
    engine = too_long_for(0)
    with pytest.raises(ContextWindowError):
        await talk(Runner(Agent("Support"), engine=engine, on_context_window="shrink"), "one")
    assert len(engine.requests) == 1


async def test_rest_of_the_turn_stays_small() -> None:
    """What was left out is not sent again in that turn; what its tools have found may have more left out."""
    engine = too_long_for(6, "yes", "yes", "yes", [CALL("look")], "done", [CALL("look")], [CALL("look")], "done")
    runner = Runner(Agent("Support", tools=[look]), engine=engine, on_context_window="shrink")
    await talk(runner, "one", "two", "three", "four")
    assert [sent(request) for request in engine.requests[3:]] == [
        ["one", "yes", "two", "yes", "three", "yes", "four"],
        ["three", "yes", "four"],
        ["three", "yes", "four", "look", "look"],
    ]
    await talk(runner, "five")
    assert [sent(request) for request in engine.requests[6:]] == [
        ["three", "yes", "four", "look", "look", "done", "five"],
        ["five"],
        ["five", "look", "look"],
        ["five", "look", "look", "look", "look"],
    ]


async def test_each_agent_by_itself() -> None:
    """What was left out for one agent is sent to the one that the conversation is handed to in the turn."""
    billing = Agent("Billing", engine=too_long_for(5))
    support = Agent("Support", engine=too_long_for(3, "yes", CALL("transfer_to_billing")), handoffs=[billing])
    runner = Runner(support, on_context_window="shrink")
    await talk(runner, "one", "two")
    await talk(runner, "three")
    assert [len(request.messages) for request in support.engine.requests] == [1, 3]  # type: ignore[union-attr]
    assert [sent(request) for request in billing.engine.requests] == [  # type: ignore[union-attr]
        ["one", "yes", "two", "transfer_to_billing", "transfer_to_billing"],
        ["one", "yes", "two", "transfer_to_billing", "transfer_to_billing", "yes", "three"],
        ["three"],
    ]


async def test_limit_and_shrinking() -> None:
    """A provider that counts more than the engine does still gets half of what the limit lets through."""
    engine = too_long_for(3)
    runner = Runner(Agent("Support"), engine=too_long_for(100))
    await talk(runner, *numbers)
    again = Runner(Agent("Support"), runner.session_store, engine, max_prompt_tokens=7, on_context_window="shrink")
    await talk(again, "six")
    assert [sent(request) for request in engine.requests] == [
        ["three", "yes", "four", "yes", "five", "yes", "six"],
        ["five", "yes", "six"],
    ]


async def test_streamed_run_shrinks_too() -> None:
    """A streamed run is asked again as well, since nothing was told before the error."""
    engine = too_long_for(3, "one!", "two!", "three it is")
    runner = Runner(Agent("Support"), engine=engine, on_context_window="shrink")
    await talk(runner, "one", "two")
    events: list[RunEvent] = []
    async with runner.run_stream("s", "three") as stream:
        events += [event async for event in stream]
    assert "".join(event.text for event in events if isinstance(event, TextDelta)) == "three it is"
    assert [len(request.messages) for request in engine.requests] == [1, 3, 5, 1]


async def test_not_after_a_piece_was_told() -> None:
    """An error after a piece was told is raised: its reader would hear two beginnings."""

    class Late(ScriptedEngine):
        async def stream(self, request: EngineRequest) -> AsyncGenerator[ReplyPart]:
            self.requests.append(request)
            yield TextDelta("well")
            raise too_long()

    runner = Runner(Agent("Support"), engine=ScriptedEngine(default="yes"))
    await talk(runner, "one", "two")
    engine = Late()
    with pytest.raises(ContextWindowError):
        await (
            Runner(Agent("Support"), runner.session_store, engine, on_context_window="shrink")
            .run_stream("s", "three")
            .collect()
        )
    assert len(engine.requests) == 1


@pytest.mark.parametrize("arguments", [{"max_prompt_tokens": 9}, {"on_context_window": "shrink"}], ids=str)
async def test_streamed_turn_is_the_same(arguments: Any) -> None:
    """A streamed turn sends and stores what an unstreamed one does."""
    said: list[Any] = []
    for streams in (False, True):
        engine = too_long_for(5, "yes", [CALL("look", what="x")], "b", "c", [CALL("look", what="y")], "d")
        runner = Runner(Agent("Support", tools=[look]), engine=engine, **arguments)
        for text in numbers[:4]:
            if streams:
                await runner.run_stream("s", text).collect()
            else:
                await runner.run_async("s", text)
        session = await session_of(runner)
        said.append(([sent(request) for request in engine.requests], texts(session), len(session.history)))
    assert said[0] == said[1]


# --- where a service keeps the history ---------------------------------------------------------------------------


class CountingService(A2AEngine):
    """A service whose engine counts words."""

    async def count_tokens(self, request: EngineRequest) -> int:
        """As `ScriptedEngine` counts."""
        return await ScriptedEngine().count_tokens(request)


async def test_service_is_sent_what_is_new() -> None:
    """Where a service keeps the history the limit is for what is sent, which is what is new."""
    engine = CountingService()
    runner = Runner(Agent("Support", engine=engine), max_prompt_tokens=2)
    await talk(runner, *numbers)
    assert [sent(request) for request in engine.requests] == [[text] for text in numbers]
    with pytest.raises(ContextWindowError, match="what the service has not seen yet and what goes with it have 3 tok"):
        await talk(runner, "six is longer")
    assert len(engine.requests) == 5


async def test_service_begins_with_what_fits() -> None:
    """A session that a service begins is sent as many of the turns as fit, and goes on from there."""
    engine = CountingService()
    runner = Runner(Agent("Support"), engine=ScriptedEngine(default="yes"))
    await talk(runner, *numbers)
    at_service = Runner(Agent("Support", engine=engine), runner.session_store, max_prompt_tokens=5)
    await talk(at_service, "six", "seven")
    assert [sent(request) for request in engine.requests] == [["four", "yes", "five", "yes", "six"], ["seven"]]


async def test_service_is_replayed_what_fits() -> None:
    """A session that begins anew, since the service has lost it, is sent as many of the turns as fit."""
    engine = CountingService()
    runner = Runner(Agent("Support", engine=engine), max_prompt_tokens=5, on_lost_service_session="replay")
    await talk(runner, *numbers)
    engine.forget()
    await talk(runner, "six")
    assert sent(engine.requests[-1]) == ["four", "yes", "five", "yes", "six"]
    assert engine.requests[-1].keep_at_service


async def test_service_is_not_shrunk() -> None:
    """A history that a service keeps can't be sent smaller, so that its error is raised."""
    engine = CountingService(ScriptedEngine(["yes", "yes", too_long]))
    runner = Runner(Agent("Support", engine=engine), on_context_window="shrink")
    await talk(runner, "one", "two")
    with pytest.raises(ContextWindowError):
        await talk(runner, "three")
    assert len(engine.requests) == 3


async def test_service_that_begins_is_shrunk() -> None:
    """A session that a service is to begin may be begun with less."""
    engine = CountingService(too_long_for(5))
    runner = Runner(Agent("Support"), engine=ScriptedEngine(default="yes"))
    await talk(runner, *numbers)
    await talk(Runner(Agent("Support", engine=engine), runner.session_store, on_context_window="shrink"), "six")
    assert [len(request.messages) for request in engine.requests] == [11, 5]


async def test_history_cleared_in_the_turn() -> None:
    """A tool that clears the history leaves nothing to leave out, and the turn goes on."""
    engine = ScriptedEngine(["yes", "yes", [CALL("forget")], "done"])

    async def forget(context: ToolContext) -> str:
        """Forget."""
        await context.session.clear_history()
        return "forgotten"

    runner = Runner(Agent("Support", engine=engine, tools=[forget]), max_prompt_tokens=6)
    await talk(runner, "one", "two", "three")
    assert sent(engine.requests[-1]) == ["three", "forget", "forget"]
    assert texts(await session_of(runner)) == ["three", "", "", "done"]
