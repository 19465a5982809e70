from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from typing import Any, Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chatflow.core.agent import Agent
from chatflow.core.engine import EngineRequest
from chatflow.core.memory import SessionStore
from chatflow.core.messages import ADDED_BY_KEY, Message
from chatflow.core.providers import ContextProvider, HistoryProvider, RunContext
from chatflow.core.pruning import prune
from chatflow.core.session import AgentSession
from chatflow.core.tools import ToolContext
from chatflow.engines.scripted import ScriptedEngine
from chatflow.exceptions import SessionError, SessionStateError
from chatflow.runner import Runner
from chatflow.testing.conformance.conversation import system, user
from chatflow.testing.conformance.provider_scripts import (
    ACTIONS,
    LOOK,
    Choosing,
    Scripted,
    adding,
    agent_with,
    asked,
    shown,
)
from chatflow.testing.conformance.service_engine import A2AEngine
from tests.runs import session_of, texts
from tests.strategies import histories

CALL = ScriptedEngine.call


# --- at the door ---


class Memory(ContextProvider):
    """A provider that says no name."""


class Named(ContextProvider):
    """A provider that says its name."""

    name = "memory"


class AlsoNamed(Named):
    """A provider whose base class says its name."""


def test_names() -> None:
    """A provider's name is that of its class, unless the class, one it derives from, or the object says another."""
    found = [Memory(), Named(), AlsoNamed(), Scripted("mine"), HistoryProvider()]
    assert [each.name for each in found] == ["Memory", "memory", "memory", "mine", "HistoryProvider"]


def test_providers_of_an_agent() -> None:
    """An agent tells its providers in the order they were given."""
    memory, named = Memory(), Named()
    assert agent_with(memory, named).context_providers == (memory, named)
    assert Agent("Support").context_providers == ()


class Duck:
    """Looks like a provider."""

    name = "duck"
    on_error = "fail"

    async def before_run(self, agent: Agent, session: AgentSession, context: RunContext) -> None:
        """Do nothing."""


@pytest.mark.parametrize(
    ("providers", "error", "message"),
    [
        ([Memory], TypeError, r"instances of ContextProvider, not <class"),
        ([Duck()], TypeError, r"instances of ContextProvider, not <"),
        (Memory(), TypeError, "context_providers must be a list"),
        ([Scripted(" ")], ValueError, "provider's name must not be blank"),
        ([Scripted(5)], TypeError, "provider's name must be a string, not int"),  # type: ignore[arg-type]
        ([Scripted("a", on_error="skip")], ValueError, "must be 'fail' or 'log', not 'skip'"),  # type: ignore[arg-type]
        ([Named(), AlsoNamed()], ValueError, "two context providers are named 'memory'"),
        ([HistoryProvider(), Choosing(lambda _: [])], ValueError, "one HistoryProvider chooses"),
    ],
)
def test_refused_providers(providers: Any, error: type[Exception], message: str) -> None:
    """An agent refuses what is no provider, two of one name, and two that choose the history."""
    with pytest.raises(error, match=message):
        Agent("Support", context_providers=providers)


# --- when they are called ---


async def test_order() -> None:
    """They are called once in a turn, in order before the first request, in reverse order after the answer."""
    log: list[str] = []

    def reply(request: EngineRequest) -> str:
        log.append("asked")
        return "hello"

    agent = agent_with(Scripted("a", log), Scripted("b", log), tools=[LOOK])
    runner = Runner(agent, engine=ScriptedEngine([CALL("look"), CALL("look")], default=reply))
    await runner.run_async("s", "hi")
    begun = ["a before Support", "b before Support"]
    ended = ["b after Support: hello", "b done", "a after Support: hello", "a done"]
    assert log == [*begun, "asked", *ended]
    await runner.run_async("s", "again")
    assert log == [*begun, "asked", *ended] * 2


async def test_providers_that_do_nothing() -> None:
    """A provider that overrides nothing changes nothing."""
    agent, plain = agent_with(ContextProvider(), Memory()), Agent("Support", "Be brief.")
    first, second = ScriptedEngine(["hello"]), ScriptedEngine(["hello"])
    runner = Runner(agent, engine=first)
    response = await runner.run_async("s", "hi")
    assert response == await Runner(plain, engine=second).run_async("s", "hi")
    assert asked(first) == asked(second)
    assert (await session_of(runner)).state == {}


async def test_handoff() -> None:
    """A provider is called when its agent is first asked in the turn, also after a handoff, and not again later."""
    log: list[str] = []
    billing = agent_with(Scripted("b", log), name="Billing")
    support = agent_with(Scripted("a", log), handoffs=[billing, agent_with(Scripted("c", log), name="Idle")])
    billing.add_handoff(support)
    transfers = [CALL("transfer_to_billing"), CALL("transfer_to_support"), CALL("transfer_to_billing")]
    await Runner(support, engine=ScriptedEngine(transfers, default="done")).run_async("s", "hi")
    assert log == [
        *("a before Support", "b before Billing"),
        *("b after Billing: done", "b done", "a after Support: done", "a done"),
    ]


async def test_resumed() -> None:
    """A turn that goes on from its journal calls them anew, also those of agents that are not asked any more."""
    log: list[str] = []
    billing = agent_with(Scripted("b", log), name="Billing")
    support = agent_with(Scripted("a", log), handoffs=[billing])
    engine = ScriptedEngine([CALL("transfer_to_billing"), LookupError(), "done"])
    runner = Runner(support, engine=engine)
    with pytest.raises(LookupError):
        await runner.run_async("s", "hi", message_id="m")
    failed = ["b after Billing: LookupError()", "b done", "a after Support: LookupError()", "a done"]
    assert log == ["a before Support", "b before Billing", *failed]
    log.clear()
    await runner.run_async("s", "hi", message_id="m")
    answered = ["b after Billing: done", "b done", "a after Support: done", "a done"]
    assert log == ["a before Support", "b before Billing", *answered]


async def test_resumed_for_another_agent() -> None:
    """A turn that goes on begins with the agent that had begun it, whoever answers by now."""
    log: list[str] = []
    billing = agent_with(Scripted("b", log), name="Billing")
    support = agent_with(Scripted("a", log), handoffs=[billing], tools=[LOOK])
    runner = Runner(support, engine=ScriptedEngine([CALL("look"), LookupError(), "done"]))
    with pytest.raises(LookupError):
        await runner.run_async("s", "hi", message_id="m")
    await (await session_of(runner)).set_active_agent(billing)
    log.clear()
    await runner.run_async("s", "hi", message_id="m")
    assert [line for line in log if "before" in line] == ["a before Support", "b before Billing"]


async def test_duplicate() -> None:
    """A duplicate is answered without them."""
    log: list[str] = []
    runner = Runner(agent_with(Scripted("a", log)), engine=ScriptedEngine(["hello"]))
    await runner.run_async("s", "hi", message_id="m")
    before = list(log)
    assert (await runner.run_async("s", "hi", message_id="m")).duplicate
    assert log == before


# --- what they see ---


async def test_what_is_seen() -> None:
    """They see the user's message, what the turn has said so far, and at the end its answer."""
    seen: list[Any] = []

    async def see(session: AgentSession, context: RunContext) -> None:
        said = [shown(message) for message in context.messages]
        content = None if context.response is None else context.response.content
        seen.append((context.input.text, said, len(session.history), content, context.error))

    billing = agent_with(Scripted("b", before=see), name="Billing")
    support = agent_with(Scripted("a", before=see, after=see), handoffs=[billing])
    runner = Runner(support, engine=ScriptedEngine([CALL("transfer_to_billing")], default="done"))
    await runner.run_async("s", "hi")
    said = ["hi", "transfer_to_billing", "{'transferred_to': 'Billing'}"]
    assert seen == [
        ("hi", [], 0, None, None),
        ("hi", said, 3, None, None),
        ("hi", [*said, "done"], 4, "done", None),
    ]


async def test_input_is_the_message_of_the_history() -> None:
    """The user's message that they see is the one that the history will hold."""
    seen: list[Message] = []

    async def see(session: AgentSession, context: RunContext) -> None:
        seen.append(context.input)

    runner = Runner(agent_with(Scripted("a", before=see)), engine=ScriptedEngine(["hello"]))
    await runner.run_async("s", "hi")
    assert (await session_of(runner)).history[0] is seen[0]


async def test_belong_to_the_turn() -> None:
    """What they do to the session belongs to the turn, in both hooks."""

    async def before(session: AgentSession, context: RunContext) -> None:
        await session.add_message(user("noted before"))
        session.metadata["before"] = True

    async def after(session: AgentSession, context: RunContext) -> None:
        await session.add_message(user("noted after"))
        session.state["after"] = True

    store = SessionStore()
    runner = Runner(agent_with(Scripted("a", before=before, after=after)), store, ScriptedEngine(["hello"]))
    await runner.run_async("s", "hi")
    session = await session_of(runner)
    assert texts(session) == ["noted before", "hi", "hello", "noted after"]
    assert (session.metadata, session.state) == ({"before": True}, {"after": True})


async def test_agent_chosen_by_a_provider() -> None:
    """Where the first agent's provider sets another active agent, that one is asked."""
    billing = agent_with(Scripted("b"), name="Billing", engine=ScriptedEngine(["billing here"]))

    async def route(session: AgentSession, context: RunContext) -> None:
        await session.set_active_agent(billing)

    support = agent_with(Scripted("a", before=route), handoffs=[billing])
    response = await Runner(support).run_async("s", "hi")
    assert (response.content, response.active_agent_name) == ("billing here", "Billing")


# --- their part of the state ---

STEPS: Final = st.lists(
    st.one_of(
        st.tuples(st.just("set"), st.sampled_from("abc"), st.integers(0, 2) | st.lists(st.integers(0, 2), max_size=2)),
        st.tuples(st.just("remove"), st.sampled_from("abc"), st.none()),
        st.tuples(st.just("update"), st.dictionaries(st.sampled_from("abc"), st.integers(0, 2)), st.none()),
        st.tuples(st.just("clear"), st.none(), st.none()),
    ),
    max_size=8,
)


def change(values: Any, what: str, key: Any, value: Any) -> None:
    """Do a step to a mapping."""
    if what == "set":
        values[key] = value
    elif what == "remove":
        values.pop(key, None)
    elif what == "update":
        values.update(key)
    else:
        values.clear()


@given(STEPS, STEPS)
async def test_state_is_a_mapping(in_the_turn: list[Any], afterwards: list[Any]) -> None:
    """A provider's state is like a dict, in the turn and outside, and no key of the session's where it is empty."""
    expected: dict[str, Any] = {}
    kept: list[Any] = []

    async def before(session: AgentSession, context: RunContext) -> None:
        kept.append(context.state)
        for step in in_the_turn:
            change(context.state, *step)
            change(expected, *step)
            check(session)

    def check(session: AgentSession) -> None:
        (state,) = kept
        assert state == expected
        assert (list(state), len(state), repr(state)) == (list(expected), len(expected), repr(expected))
        assert session.state == ({"other": 1, "_notes": expected} if expected else {"other": 1})

    runner = Runner(agent_with(Scripted("notes", before=before)), engine=ScriptedEngine(["hello"]))
    session = await runner.session_store.get_or_create("s", runner.starting_agent)
    session.state["other"] = 1
    await runner.run_async("s", "hi")
    check(session)
    for step in afterwards:
        change(kept[0], *step)
        change(expected, *step)
        check(session)
    await session.save()
    check(session)


@pytest.mark.parametrize(
    ("key", "value", "path"), [("a", object(), "state._notes.a"), (5, 1, r"state._notes\[5\]"), ("a", [print], "a")]
)
async def test_unstorable_state(key: Any, value: Any, path: str) -> None:
    """What can't be kept in a provider's state is refused by its path, and nothing has changed."""

    async def before(session: AgentSession, context: RunContext) -> None:
        context.state["b"] = 1
        with pytest.raises(SessionStateError, match=path):
            context.state.update({"b": 2, key: value})
        with pytest.raises(SessionStateError, match=path):
            context.state[key] = value
        with pytest.raises(KeyError):
            del context.state["a"]
        assert context.state.__eq__(5) is NotImplemented
        assert session.state == {"_notes": {"b": 1}}

    await Runner(agent_with(Scripted("notes", before=before)), engine=ScriptedEngine(["hello"])).run_async("s", "hi")


async def test_something_else_under_its_key() -> None:
    """Where something else than a mapping stands under a provider's key, it is told so, and that stays."""

    async def before(session: AgentSession, context: RunContext) -> None:
        session.state["_notes"] = 5
        with pytest.raises(SessionStateError, match="a mapping is kept here, not int"):
            context.state.get("a")
        with pytest.raises(SessionStateError, match="a mapping is kept here, not int"):
            context.state["a"] = 1
        assert session.state["_notes"] == 5

    await Runner(agent_with(Scripted("notes", before=before)), engine=ScriptedEngine(["hello"])).run_async("s", "hi")


@pytest.fixture
def restless() -> Iterator[None]:
    """Lets threads take turns all the time."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("restless")
async def test_state_in_threads() -> None:
    """Tools in threads that change a provider's state at the same time lose nothing of each other's."""

    async def before(session: AgentSession, context: RunContext) -> None:
        all_here = threading.Barrier(8)

        def note(name: str) -> str:
            all_here.wait()
            for number in range(200):
                context.state[f"{name}{number}"] = number
            return name

        context.add_tools(note)

    calls = [CALL("note", name=name) for name in "abcdefgh"]
    runner = Runner(agent_with(Scripted("notes", before=before)), engine=ScriptedEngine([calls, "done"]))
    await runner.run_async("s", "hi")
    assert len((await session_of(runner)).state["_notes"]) == 1600


# --- choosing the history ---


async def test_history_is_chosen() -> None:
    """A history provider chooses what is sent of what came before; this turn's messages always follow."""
    log: list[str] = []
    engine = ScriptedEngine(["one", "two", CALL("look"), "three"])
    chooser = Choosing(lambda context: prune(context.history, 1), log)
    runner = Runner(
        agent_with(chooser, Scripted("a", log, before=adding(user("context"))), tools=[LOOK]), engine=engine
    )
    for text in ("first", "second", "third"):
        await runner.run_async("s", text)
    assert asked(engine, 2) == ["Be brief.", "second", "two", "context", "third"]
    assert asked(engine, 3) == ["Be brief.", "second", "two", "context", "third", "look", "found"]
    assert log[-4:-2] == ["a before Support", "Choosing chooses for Support"]
    assert log.count("Choosing chooses for Support") == 3
    assert len((await session_of(runner)).history) == 8


async def test_system_messages_are_chosen_too() -> None:
    """Stored system messages are sent only if they are chosen."""
    engine = ScriptedEngine(["one"])
    runner = Runner(agent_with(Choosing(lambda context: context.history[1:])), engine=engine)
    session = await runner.session_store.get_or_create("s", runner.starting_agent)
    await session.add_message(system("Speak Spanish."))
    await runner.run_async("s", "hi")
    assert asked(engine) == ["Be brief.", "hi"]


async def test_chosen_once_for_each_agent() -> None:
    """It is asked once for each agent, and what it chooses of this turn is not sent twice."""
    log: list[str] = []
    billing = agent_with(
        Choosing(lambda context: [*context.history, *context.messages], log), name="Billing", tools=[LOOK]
    )
    support = agent_with(Choosing(lambda context: [], log), handoffs=[billing])
    engine = ScriptedEngine(["zero", CALL("transfer_to_billing"), CALL("look"), "done"])
    runner = Runner(support, engine=engine)
    await runner.run_async("s", "before")
    await runner.run_async("s", "hi")
    assert log == [*["Choosing chooses for Support"] * 2, "Choosing chooses for Billing"]
    said = ["hi", "transfer_to_billing", "{'transferred_to': 'Billing'}"]
    assert asked(engine, 1) == ["Be brief.", "hi"]
    assert asked(engine, 2) == ["Be brief.", "before", "zero", *said]
    assert asked(engine, 3) == ["Be brief.", "before", "zero", *said, "look", "found"]


async def test_what_is_cleared_is_not_sent() -> None:
    """What a tool takes out of the history is not sent any more, though it was chosen."""
    engine = ScriptedEngine(["zero", CALL("clear"), "done"])

    async def clear(context: ToolContext) -> str:
        await context.session.clear_history()
        return "cleared"

    runner = Runner(agent_with(HistoryProvider(), tools=[clear]), engine=engine)
    await runner.run_async("s", "secret")
    await runner.run_async("s", "forget it")
    assert asked(engine, 1) == ["Be brief.", "secret", "zero", "forget it"]
    assert asked(engine, 2) == ["Be brief.", "forget it", "clear", "cleared"]


@given(history=histories(), actions=ACTIONS, max_turns=st.integers(1, 4))
async def test_default_choice_changes_nothing(history: list[Message], actions: list[str], max_turns: int) -> None:
    """A plain history provider sends what is sent without one."""

    async def requests(*providers: ContextProvider) -> list[list[str]]:
        checkpoints: list[Any] = []

        async def act(what: str, context: ToolContext) -> str:
            session = context.session
            checkpoints.append(session.checkpoint())
            if what == "clear":
                await session.clear_history()
            elif what == "back":
                await session.rollback_to(checkpoints[0])
            elif what == "add":
                await session.add_message(user("by a tool"))
            return what

        replies = [CALL("transfer_to_billing") if each == "hand over" else CALL("act", what=each) for each in actions]
        engine = ScriptedEngine(replies, default="done")
        billing = agent_with(*providers, name="Billing", tools=[act])
        support = agent_with(*providers, tools=[act], handoffs=[billing])
        runner = Runner(support, SessionStore(default_max_turns=max_turns), engine)
        session = await runner.session_store.get_or_create("s", support)
        async with session.turn():
            for message in history:
                await session.add_message(message)
        await runner.run_async("s", "hi")
        return [asked(engine, number) for number in range(len(engine.requests))]

    assert await requests(HistoryProvider()) == await requests()


async def test_made_up_history_is_marked() -> None:
    """What a history provider sends that is not of the history is marked as added by it; the rest is sent as it is."""
    engine = ScriptedEngine(["one", "two"])
    chooser = Choosing(lambda context: [user("Summary."), *context.history[-1:]])
    runner = Runner(agent_with(chooser), engine=engine)
    await runner.run_async("s", "first")
    await runner.run_async("s", "second")
    assert asked(engine) == ["Be brief.", "Summary.", "one", "second"]
    marks = [message.extra.get(ADDED_BY_KEY) for message in engine.requests[1].messages]
    assert marks == [None, "Choosing", None, None]
    assert texts(await session_of(runner)) == ["first", "one", "second", "two"]


@pytest.mark.parametrize("chosen", [5, None, ["hi"], [user("a"), None]])
async def test_choice_of_what_is_no_message(chosen: Any, caplog: pytest.LogCaptureFixture) -> None:
    """A choice of anything but messages is an error, or is logged, and the whole window sent."""
    with pytest.raises(TypeError):
        await Runner(agent_with(Choosing(lambda _: chosen)), engine=ScriptedEngine(["no"])).run_async("s", "hi")
    engine = ScriptedEngine(["one", "two"])
    runner = Runner(agent_with(Choosing(lambda _: chosen, on_error="log")), engine=engine)
    await runner.run_async("s", "first")
    await runner.run_async("s", "second")
    assert asked(engine) == ["Be brief.", "first", "one", "second"]
    assert "provider 'Choosing' failed in get_messages" in caplog.text


# --- a service that keeps the history ---


async def test_no_choice_of_a_services_history() -> None:
    """Where a service keeps the history, a history provider is refused before the service is asked."""
    engine, log = A2AEngine(), list[str]()
    plain, choosing = Agent("Support", engine=engine), agent_with(Choosing(lambda _: [], log), engine=engine)
    session = plain.create_session("s")
    await plain.run("one", session=session)
    with pytest.raises(SessionError, match=r"'s': a service keeps its history, and provider 'Choosing' of agent"):
        await choosing.run("two", session=session)
    assert (len(engine.requests), log) == (1, [])
    assert texts(session) == ["one", "yes"]


async def test_no_choice_where_a_service_begins() -> None:
    """A history provider is refused as well where the reply begins to keep the history."""
    agent = agent_with(HistoryProvider(), engine=A2AEngine())
    session = agent.create_session("s")
    with pytest.raises(SessionError, match="a service keeps its history"):
        await agent.run("one", session=session)
    assert (len(session.history), session.service_session_id) == (0, None)


async def test_service_is_sent_additions_once() -> None:
    """A service is sent what was added once, before the user's message; instructions and system messages each time."""
    inner = ScriptedEngine(["zero", CALL("look"), "one", "two"])
    engine = A2AEngine(inner)

    async def add(session: AgentSession, context: RunContext) -> None:
        context.add_messages(system("Monday."), user(f"for {context.input.text}"))

    agent = agent_with(Scripted("a", before=add), tools=[LOOK], engine=engine)
    session = agent.create_session("s")
    for text in ("before", "first", "second"):
        await agent.run(text, session=session)
    always = ["Be brief.", "Monday."]
    assert [asked(engine, number) for number in range(4)] == [
        [*always, "for before", "before"],
        [*always, "for first", "first"],
        [*always, "found"],
        [*always, "for second", "second"],
    ]


async def test_service_is_sent_additions_after_a_handoff() -> None:
    """What is added for an agent that came by a handoff is sent after the handoff's result, once."""
    inner = ScriptedEngine(["zero", CALL("transfer_to_billing"), CALL("look"), "one"])
    engine = A2AEngine(inner)
    billing = agent_with(Scripted("b", before=adding(user("context"))), name="Billing", engine=engine, tools=[LOOK])
    support = agent_with(Scripted("a", before=adding(user("mine"))), handoffs=[billing], engine=engine)
    session = support.create_session("s")
    await support.run("before", session=session)
    await support.run("hi", session=session)
    assert [asked(engine, number)[1:] for number in range(4)] == [
        ["mine", "before"],
        ["mine", "hi"],
        ["{'transferred_to': 'Billing'}", "context"],
        ["found"],
    ]
