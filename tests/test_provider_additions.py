from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chatflow.core.agent import Agent
from chatflow.core.messages import ADDED_BY_KEY, Message, Role, ToolCall, ToolResult
from chatflow.core.providers import ContextProvider, RunContext
from chatflow.core.session import AgentSession
from chatflow.core.tools import Tool, ToolContext, tool
from chatflow.engines.common_form import PROVIDER_KEY
from chatflow.engines.litellm_form import to_litellm_messages
from chatflow.engines.responses_form import to_input
from chatflow.engines.scripted import Scripted as Reply
from chatflow.engines.scripted import ScriptedEngine
from chatflow.exceptions import ToolError
from chatflow.runner import Runner
from chatflow.testing.conformance.conversation import model, system, user
from chatflow.testing.conformance.provider_scripts import (
    ACTIONS,
    LOOK,
    Choosing,
    Hook,
    Scripted,
    adding,
    agent_with,
    asked,
    look,
    named_look,
    shown,
)
from tests.runs import session_of, texts
from tests.strategies import any_history, histories
from tests.test_prompt import check_valid

CALL = ScriptedEngine.call


# --- what they add ---


async def test_instructions() -> None:
    """Instructions are joined to the agent's, a blank line between, in order, in each request of the turn."""

    async def add(session: AgentSession, context: RunContext) -> None:
        context.add_instructions("Speak Spanish.")
        context.add_instructions(" ")

    async def add_more(session: AgentSession, context: RunContext) -> None:
        context.add_instructions("The user is Ana.")

    engine = ScriptedEngine([CALL("look"), "one", "two"])
    providers = [Scripted("a", before=add), Scripted("b", before=add_more)]
    runner = Runner(agent_with(*providers, tools=[LOOK]), engine=engine, max_tool_iterations=1)
    response = await runner.run_async("s", "hi")
    assert response.stop_reason == "tool_limit"
    assert [asked(engine, number)[0] for number in (0, 1)] == ["Be brief.\n\nSpeak Spanish.\n\nThe user is Ana."] * 2


async def test_instructions_for_an_agent_without_any() -> None:
    """An agent that has no instructions gets what was added."""

    async def add(session: AgentSession, context: RunContext) -> None:
        context.add_instructions("Speak Spanish.")

    engine = ScriptedEngine(["one"])
    await Runner(Agent("Support", context_providers=[Scripted("a", before=add)]), engine=engine).run_async("s", "hi")
    assert asked(engine) == ["Speak Spanish.", "hi"]


async def test_messages() -> None:
    """Added messages are sent before the user's message in each request of the turn, marked, and not stored."""
    engine = ScriptedEngine(["zero", CALL("look"), "one", "two"])
    log: list[str] = []

    async def add(session: AgentSession, context: RunContext) -> None:
        if context.input.text == "first":
            context.add_messages(user("context"), model("noted"))
            context.add_messages(system("It is Monday."))

    runner = Runner(agent_with(Scripted("a", log, before=add), tools=[LOOK]), engine=engine)
    await runner.run_async("s", "before")
    await runner.run_async("s", "first")
    await runner.run_async("s", "second")
    common = ["Be brief.", "It is Monday.", "before", "zero", "context", "noted", "first"]
    assert asked(engine, 1) == common
    assert asked(engine, 2) == [*common, "look", "found"]
    assert asked(engine, 3) == ["Be brief.", "before", "zero", "first", "look", "found", "one", "second"]
    marked = [message.text for message in engine.requests[1].messages if ADDED_BY_KEY in message.extra]
    assert marked == ["It is Monday.", "context", "noted"]
    assert {message.extra.get(ADDED_BY_KEY) for message in engine.requests[1].messages} == {None, "a"}
    assert texts(await session_of(runner)) == ["before", "zero", "first", "", "", "one", "second", "two"]


async def test_stored_messages() -> None:
    """Added messages that are to be stored are part of the conversation, marked, before the user's message."""
    engine = ScriptedEngine(["one", "two"])
    runner = Runner(
        agent_with(Scripted("a", before=adding(user("context"), model("noted"), store=True))), engine=engine
    )
    await runner.run_async("s", "first")
    session = await session_of(runner)
    assert texts(session) == ["context", "noted", "first", "one"]
    assert [message.extra.get(ADDED_BY_KEY) for message in session.history] == ["a", "a", None, None]
    await runner.run_async("s", "second")
    assert asked(engine) == ["Be brief.", "context", "noted", "first", "one", "context", "noted", "second"]


async def test_stored_and_not_stored() -> None:
    """What is not stored comes after what is, directly before the user's message."""
    engine = ScriptedEngine(["one"])

    async def add(session: AgentSession, context: RunContext) -> None:
        context.add_messages(user("now"))
        context.add_messages(user("for good"), store=True)

    await Runner(agent_with(Scripted("a", before=add)), engine=engine).run_async("s", "hi")
    assert asked(engine) == ["Be brief.", "for good", "now", "hi"]


async def test_messages_after_a_handoff() -> None:
    """For an agent that came by a handoff, stored messages follow what was said; others precede the user's message."""

    async def add(session: AgentSession, context: RunContext) -> None:
        context.add_messages(user("now"))
        context.add_messages(user("for good"), store=True)

    engine = ScriptedEngine([CALL("transfer_to_billing"), "done"])
    support = agent_with(handoffs=[agent_with(Scripted("b", before=add), name="Billing")])
    runner = Runner(support, engine=engine)
    await runner.run_async("s", "hi")
    transferred = "{'transferred_to': 'Billing'}"
    assert asked(engine) == ["Be brief.", "now", "hi", "transfer_to_billing", transferred, "for good"]
    assert [shown(message) for message in (await session_of(runner)).history] == [
        *("hi", "transfer_to_billing", transferred, "for good", "done"),
    ]


async def test_other_agents_get_nothing_of_it() -> None:
    """What is added for one agent is not sent for another, nor are its tools offered."""

    async def add(session: AgentSession, context: RunContext) -> None:
        context.add_instructions("Secret.")
        context.add_messages(user("context"))
        context.add_tools(LOOK)

    engine = ScriptedEngine([CALL("transfer_to_billing"), CALL("transfer_to_support"), "done"])
    billing = agent_with(name="Billing")
    support = agent_with(Scripted("a", before=add), handoffs=[billing])
    billing.add_handoff(support)
    await Runner(support, engine=engine).run_async("s", "hi")
    assert [asked(engine, number)[:2] for number in range(3)] == [
        ["Be brief.\n\nSecret.", "context"],
        ["Be brief.", "hi"],
        ["Be brief.\n\nSecret.", "context"],
    ]
    offered = [[each.name for each in request.tools] for request in engine.requests]
    own = ["transfer_to_billing", "look"]
    assert offered == [own, ["transfer_to_support"], own]


@pytest.mark.parametrize("is_handed_over", [False, True])
async def test_beginning_stays(*, is_handed_over: bool) -> None:
    """Each request of a turn begins as the one before, its system messages and the others, whatever tools add."""

    async def add(session: AgentSession, context: RunContext) -> None:
        context.add_messages(system("Monday."), user("context"))
        context.add_messages(system("Stored."), user("for good"), store=True)

    async def note(context: ToolContext) -> str:
        await context.session.add_message(system("By a tool."))
        await context.session.add_message(user("by a tool"))
        return "noted"

    engine = ScriptedEngine([CALL("note"), [CALL("note"), CALL("note")], CALL("note")], default="done")
    agent = agent_with(Scripted("a", before=add), tools=[note])
    if is_handed_over:
        agent = Agent("First", handoffs=[agent], engine=ScriptedEngine([CALL("transfer_to_support")]))
    runner = Runner(agent, engine=engine)
    session = await runner.session_store.get_or_create("s", agent)
    async with session.turn():
        for message in (system("Old."), user("before"), model("before!")):
            await session.add_message(message)
    await runner.run_async("s", "hi")
    for shorter, longer in pairwise(request.messages for request in engine.requests):
        for are_systems in (True, False):
            begun, goes_on = (
                [message for message in messages if (message.role is Role.SYSTEM) is are_systems]
                for messages in (shorter, longer)
            )
            assert goes_on[: len(begun)] == begun


async def test_history_cleared_by_a_tool() -> None:
    """Where a tool clears the history, what was added is still sent, before what is left."""
    engine = ScriptedEngine([CALL("clear"), "done"])

    async def clear(context: ToolContext) -> str:
        await context.session.clear_history()
        return "cleared"

    runner = Runner(agent_with(Scripted("a", before=adding(user("context"))), tools=[clear]), engine=engine)
    await runner.run_async("s", "hi")
    assert asked(engine) == ["Be brief.", "context", "hi", "clear", "cleared"]


async def test_user_message_gone() -> None:
    """Where the user's message is gone, what was added stands before all that this turn has said."""
    engine = ScriptedEngine([CALL("restart"), "done"])

    async def restart(context: ToolContext) -> str:
        await context.session.clear_history()
        await context.session.add_message(user("again"))
        await context.session.add_message(Message(Role.MODEL, tool_calls=[ToolCall(id="call_1", name="restart")]))
        return "restarted"

    runner = Runner(agent_with(Scripted("a", before=adding(user("context"))), tools=[restart]), engine=engine)
    await runner.run_async("s", "hi")
    assert asked(engine) == ["Be brief.", "context", "again", "restart", "restarted"]


async def test_marks_are_not_sent() -> None:
    """No provider of models is sent a mark: fields of ours stay here, while those of the provider go back to it."""
    engine = ScriptedEngine(["one"])
    remembered = Message(Role.MODEL, "noted", extra={PROVIDER_KEY: "openai", "reasoning": "hm"})
    agent = agent_with(Scripted("a", before=adding(user("context"), remembered, system("Monday."))))
    await Runner(agent, engine=engine).run_async("s", "hi")
    assert sum(ADDED_BY_KEY in message.extra for message in engine.requests[0].messages) == 3
    sent = to_litellm_messages(engine.requests[0].messages, "openai/test")
    assert "chatflow_" not in repr([sent, to_input(engine.requests[0].messages, "openai/test")])
    assert {"role": "assistant", "content": "noted", "reasoning": "hm"} in sent


@pytest.mark.parametrize(
    "add",
    [
        lambda context: context.add_instructions("late"),
        lambda context: context.add_messages(user("late")),
        lambda context: context.add_tools(look),
    ],
    ids=["instructions", "messages", "tools"],
)
async def test_adding_too_late(add: Callable[[RunContext], None]) -> None:
    """What is added once `before_run` has ended is an error, in that provider's tools and in `after_run`."""
    tried: list[str] = []

    def refuse(context: RunContext) -> str:
        with pytest.raises(RuntimeError, match="'a': before_run has ended"):
            add(context)
        tried.append("refused")
        return "refused"

    async def before(session: AgentSession, context: RunContext) -> None:
        context.add_tools(Tool(lambda: refuse(context), name="late"))

    async def after(session: AgentSession, context: RunContext) -> None:
        refuse(context)

    engine = ScriptedEngine([CALL("late"), "done"])
    await Runner(agent_with(Scripted("a", before=before, after=after)), engine=engine).run_async("s", "hi")
    assert tried == ["refused", "refused"]


@pytest.mark.parametrize(
    ("add", "message"),
    [
        (lambda context: context.add_instructions(5), "must be a string, not int"),
        (lambda context: context.add_messages(user("a"), "b"), "takes messages, not str"),
        (lambda context: context.add_tools("look"), "made from a function"),
    ],
    ids=["instructions", "messages", "tools"],
)
async def test_adding_what_is_none(add: Callable[[Any], None], message: str) -> None:
    """What is no text, no message and no tool is refused, and nothing of the call is added."""

    async def before(session: AgentSession, context: RunContext) -> None:
        with pytest.raises(TypeError, match=message):
            add(context)

    engine = ScriptedEngine(["done"])
    await Runner(agent_with(Scripted("a", before=before)), engine=engine).run_async("s", "hi")
    assert asked(engine) == ["Be brief.", "hi"]


# --- tools ---


class Shop(ContextProvider):
    """Adds a tool that notes what was bought."""

    @tool
    async def buy(self, item: str) -> str:
        """Buy it."""
        return f"{item} bought"

    async def before_run(self, agent: Agent, session: AgentSession, context: RunContext) -> None:
        """Add the tool."""
        context.add_tools(self.buy, LOOK, LOOK)


async def test_tools() -> None:
    """Added tools are offered after the agent's, and run when they are called."""
    engine = ScriptedEngine([[CALL("buy", item="tea"), CALL("look")], "done"])
    runner = Runner(agent_with(Shop(), tools=[LOOK], handoffs=[Agent("Billing")]), engine=engine)
    response = await runner.run_async("s", "hi")
    assert [each.name for each in engine.requests[0].tools] == ["look", "transfer_to_billing", "buy"]
    assert response.tool_calls_executed == ("buy", "look")
    assert asked(engine)[-1] == "tea bought,found"


@pytest.mark.parametrize(
    ("providers", "message"),
    [
        ([named_look()], "provider 'p1' adds a tool named look, and agent 'Support' has a tool of that name"),
        ([Tool(look, name="transfer_to_billing")], "agent 'Support' has the handoff to 'Billing' of that name"),
        ([Tool(look, name="seek"), Tool(look, name="seek")], "provider 'p1' has added one of that name"),
    ],
)
async def test_tools_of_one_name(providers: list[Tool], message: str) -> None:
    """A tool whose name the agent, a handoff or another provider has is an error that names both."""

    def offer(added: Tool) -> Hook:
        async def before(session: AgentSession, context: RunContext) -> None:
            context.add_tools(added)

        return before

    scripted = [Scripted(f"p{number}", before=offer(each)) for number, each in enumerate(providers, 1)]
    agent = agent_with(*scripted, tools=[LOOK], handoffs=[Agent("Billing")])
    with pytest.raises(ToolError, match=message):
        await Runner(agent, engine=ScriptedEngine(["no"])).run_async("s", "hi")


async def test_two_tools_of_one_name_in_one_provider() -> None:
    """A provider that adds two tools of one name is told so."""

    async def before(session: AgentSession, context: RunContext) -> None:
        context.add_tools(LOOK, named_look())

    with pytest.raises(ToolError, match="provider 'a' adds a tool named look, and provider 'a' has added one"):
        await Runner(agent_with(Scripted("a", before=before)), engine=ScriptedEngine(["no"])).run_async("s", "hi")


async def test_tool_that_is_an_unbound_method() -> None:
    """A method read from its class is refused, as by an agent."""

    async def before(session: AgentSession, context: RunContext) -> None:
        context.add_tools(Shop.buy)

    with pytest.raises(ToolError, match="is a method"):
        await Runner(agent_with(Scripted("a", before=before)), engine=ScriptedEngine(["no"])).run_async("s", "hi")


async def test_resumed_tools() -> None:
    """A call of a provider's tool that had not ended runs again when the turn goes on, if it may."""
    called: list[str] = []

    class Broken(BaseException):
        """Ends the first attempt."""

    async def before(session: AgentSession, context: RunContext) -> None:
        def buy() -> str:
            called.append("buy")
            if len(called) == 1:
                raise Broken
            return "bought"

        context.add_tools(Tool(buy, idempotent=True))

    engine = ScriptedEngine([CALL("buy"), "done"])
    runner = Runner(agent_with(Scripted("a", before=before)), engine=engine)
    with pytest.raises(Broken):
        await runner.run_async("s", "hi", message_id="m")
    assert (await runner.run_async("s", "hi", message_id="m")).content == "done"
    assert called == ["buy", "buy"]
    assert asked(engine)[-1] == "bought"


# --- a prompt is always valid ---

ANY_MESSAGES: Final = st.lists(
    st.one_of(
        st.sampled_from([user("u"), user(""), model("m"), model(""), system("s"), system("")]),
        st.builds(
            lambda ids: Message(Role.MODEL, tool_calls=[ToolCall(id=each, name="f") for each in ids]),
            st.lists(st.sampled_from(["a", "b", "call_1", ""]), min_size=1, max_size=2),
        ),
        st.builds(
            lambda ids: Message(Role.TOOL, tool_results=[ToolResult(tool_call_id=i, name="f", content=1) for i in ids]),
            st.lists(st.sampled_from(["a", "b", "call_1", ""]), min_size=1, max_size=2),
        ),
    ),
    max_size=4,
)
SCRIPTS: Final = st.lists(
    st.tuples(ANY_MESSAGES, st.sampled_from([False, False, True]), st.booleans()), min_size=1, max_size=3
)


def choosing(chosen: str, made_up: list[Message]) -> list[ContextProvider]:
    """No history provider, or one that chooses so."""
    choices: dict[str, Callable[[RunContext], Sequence[Message]]] = {
        "all": lambda context: context.history,
        "nothing": lambda context: [],
        "end": lambda context: context.history[-3:],
        "twice": lambda context: [*context.history, *context.messages, *context.history],
        "made up": lambda context: made_up,
    }
    return [Choosing(choices[chosen], on_error="log")] if chosen in choices else []


@given(
    history=histories(),
    scripts=SCRIPTS,
    actions=ACTIONS,
    chosen=st.sampled_from(["no choice", "all", "nothing", "end", "twice", "made up"]),
    made_up=any_history | ANY_MESSAGES,
)
async def test_any_addition_gives_valid_prompts(
    history: list[Message], scripts: list[Any], actions: list[str], chosen: str, made_up: list[Message]
) -> None:
    """Whatever providers add, store and choose, and whatever tools do meanwhile, each request is valid."""
    checkpoints: list[Any] = []

    async def act(what: str, context: ToolContext) -> str:
        session = context.session
        if what == "clear":
            await session.clear_history()
        elif what == "back":
            await session.rollback_to(checkpoints[-1])
        elif what == "add":
            await session.add_message(user("by a tool"))
        return what

    async def mark(session: AgentSession, context: RunContext) -> None:
        checkpoints.append(session.checkpoint())

    def providers(prefix: str) -> list[ContextProvider]:
        made = [
            Scripted(f"{prefix}{number}", before=adding(*messages, store=store), on_error="log")
            for number, (messages, store, is_mine) in enumerate(scripts)
            if is_mine or prefix == "a"
        ]
        return [Scripted(f"{prefix}-mark", before=mark), *made, *choosing(chosen, made_up)]

    replies: list[Reply] = [
        CALL("transfer_to_billing") if action == "hand over" else CALL("act", what=action) for action in actions
    ]
    engine = ScriptedEngine(replies, default="done")
    billing = agent_with(*providers("b"), name="Billing", tools=[act])
    support = agent_with(*providers("a"), tools=[act], handoffs=[billing])
    runner = Runner(support, engine=engine)
    session = await runner.session_store.get_or_create("s", support)
    async with session.turn():
        for message in history:
            await session.add_message(message)
    await runner.run_async("s", "hi")
    for request in engine.requests:
        check_valid(request.messages)
