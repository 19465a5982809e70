from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any

import anyio
import pytest

from chatflow.core.agent import Agent
from chatflow.core.engine import EngineReply, EngineRequest
from chatflow.core.memory import SessionStore
from chatflow.core.messages import Message, Role, ToolCall, ToolResult
from chatflow.core.tools import ToolContext, tool
from chatflow.engines.litellm import LiteLLMEngine
from chatflow.engines.scripted import ScriptedEngine
from chatflow.exceptions import (
    EngineError,
    EngineUnavailableError,
    HandoffError,
    SessionDeletedError,
    SessionStateError,
)
from chatflow.runner import Runner
from chatflow.running.compacting import Compactor
from chatflow.running.registry import Registry
from chatflow.testing.conformance.conversation import PausingEngine
from tests.runs import session_of, texts

if TYPE_CHECKING:
    from chatflow.core.session import SessionContext

CALL = ScriptedEngine.call


async def test_answer() -> None:
    """A run answers with what the model says, by the name of the agent that answered."""
    response = await Runner(Agent("Support"), engine=ScriptedEngine(["hello"])).run_async("s", "hi")
    assert (response.content, response.active_agent_name, response.stop_reason) == ("hello", "Support", "answer")
    assert (response.tool_calls_executed, response.handoff, response.usage) == ((), None, None)


async def test_what_is_stored() -> None:
    """The user's message and the model's are stored, with agent, usage and what the provider said besides."""
    reply = EngineReply(text="hello", usage={"total_tokens": 3}, extra={"signature": "x"})
    runner = Runner(Agent("Support"), engine=ScriptedEngine([reply]))
    await runner.run_async("s", "hi")
    question, answer = (await session_of(runner)).history
    assert (question.role, question.content) == (Role.USER, "hi")
    assert (answer.role, answer.content, answer.agent_name) == (Role.MODEL, "hello", "Support")
    assert (answer.usage, answer.extra) == ({"total_tokens": 3}, {"signature": "x"})


async def test_no_text() -> None:
    """A reply without text is an empty answer."""
    runner = Runner(Agent("Support"), engine=ScriptedEngine([EngineReply()]))
    assert (await runner.run_async("s", "hi")).content == ""
    assert texts(await session_of(runner)) == ["hi", ""]


async def test_empty_user_message() -> None:
    """An empty user message is a message like any other."""
    runner = Runner(Agent("Support"), engine=ScriptedEngine(["hello"]))
    await runner.run_async("s", "")
    assert texts(await session_of(runner)) == ["", "hello"]


async def test_conversation_goes_on() -> None:
    """The next run of a conversation shows the model what was said before."""
    engine = ScriptedEngine(["one", "two"])
    runner = Runner(Agent("Support"), engine=engine)
    await runner.run_async("s", "first")
    await runner.run_async("s", "second")
    assert [message.text for message in engine.requests[1].messages] == ["first", "one", "second"]


async def test_request() -> None:
    """The model is asked for the active agent, after its instructions, with all its tools."""
    engine = ScriptedEngine(["hello"])
    support = Agent("Support", "Be kind.", tools=[tool(do_nothing)], handoffs=[Agent("Billing")])
    await Runner(support, engine=engine).run_async("s", "hi")
    (request,) = engine.requests
    assert request.agent is support
    assert [(message.role, message.text) for message in request.messages] == [
        (Role.SYSTEM, "Be kind."),
        (Role.USER, "hi"),
    ]
    assert [each.name for each in request.tools] == ["do_nothing", "transfer_to_billing"]


def do_nothing() -> str:
    """Do nothing."""
    return ""


async def test_instructions_see_the_turn() -> None:
    """Instructions that are a function get the session as the turn has it."""

    def instruct(session: SessionContext) -> str:
        return f"{session.metadata['channel']}, {len(session.history)} message"

    engine = ScriptedEngine(["hello"])
    await Runner(Agent("Support", instruct), engine=engine).run_async("s", "hi", {"channel": "whatsapp"})
    assert engine.requests[0].messages[0].text == "whatsapp, 1 message"


async def test_agents_engine_comes_first() -> None:
    """An agent's own engine answers for it, not the runner's."""
    support = Agent("Support", engine=ScriptedEngine(["mine"]))
    assert (await Runner(support, engine=ScriptedEngine(["theirs"])).run_async("s", "hi")).content == "mine"


def test_engine_without_any() -> None:
    """Agents without any engine share one that asks by the agent's model."""
    support, billing = Agent("Support"), Agent("Billing")
    registry = Registry(support, None)
    engine = registry.engine_for(support)
    assert isinstance(engine, LiteLLMEngine)
    assert registry.engine_for(billing) is engine


@pytest.mark.parametrize("fields", [{"text": 5}, {"usage": [1]}, {"extra": "x"}], ids=["text", "usage", "extra"])
def test_reply_with_fields_of_wrong_types(fields: dict[str, Any]) -> None:
    """An engine's reply refuses what no reply can hold, where the engine makes it."""
    with pytest.raises(TypeError, match=next(iter(fields))):
        EngineReply(**fields)


async def test_reply_of_wrong_type() -> None:
    """An engine that returns no EngineReply fails the turn, and is named."""

    class Wrong:
        async def generate(self, request: EngineRequest) -> Any:
            return "hello"

    runner = Runner(Agent("Support"), engine=Wrong())
    with pytest.raises(TypeError, match=r"Wrong.generate\(\) must return an EngineReply, not str"):
        await runner.run_async("s", "hi")
    assert len((await session_of(runner)).history) == 0


async def test_generate_that_is_not_async() -> None:
    """An engine whose generate is no async method fails the turn, and is named."""

    class Plain:
        def generate(self, request: EngineRequest) -> Any:
            return EngineReply(text="hello")

    runner = Runner(Agent("Support"), engine=Plain())
    with pytest.raises(TypeError, match=r"^Plain.generate\(\) must be async: it returned EngineReply, which can't be"):
        await runner.run_async("s", "hi")


async def test_usage_is_summed() -> None:
    """An answer's usage is the sum over the turn's model calls, also inside; what is no number is left out."""
    replies = [
        EngineReply(tool_calls=[CALL("do_nothing")], usage={"total": 3, "details": {"cached": 1}, "tier": "x"}),
        EngineReply(text="done", usage={"total": 4, "details": {"cached": 2}, "cost": 0.5, "flag": True}),
    ]
    runner = Runner(Agent("Support", tools=[do_nothing]), engine=ScriptedEngine(replies))
    assert (await runner.run_async("s", "hi")).usage == {"total": 7, "details": {"cached": 3}, "cost": 0.5}


async def test_usage_of_changing_form() -> None:
    """A usage field that is a number once and a mapping then counts as what it was last."""
    replies = [
        EngineReply(tool_calls=[CALL("do_nothing")], usage={"a": 3, "b": {"x": 1}}),
        EngineReply(text="done", usage={"a": {"x": 1}, "b": 4}),
    ]
    runner = Runner(Agent("Support", tools=[do_nothing]), engine=ScriptedEngine(replies))
    assert (await runner.run_async("s", "hi")).usage == {"a": {"x": 1}, "b": 4}


# --- a turn is atomic ---


async def test_metadata_joins_the_turn() -> None:
    """A run's metadata is merged into the session's with the turn's commit."""
    runner = Runner(Agent("Support"), engine=ScriptedEngine(default="hello"))
    await runner.run_async("s", "hi", {"channel": "whatsapp", "lang": "es"})
    await runner.run_async("s", "hi", {"lang": "en"})
    assert (await session_of(runner)).metadata == {"channel": "whatsapp", "lang": "en"}


@pytest.mark.parametrize(("metadata", "path"), [({"a": object()}, "metadata.a"), ([1], "metadata")])
async def test_metadata_that_cannot_be_kept(metadata: Any, path: str) -> None:
    """Metadata that can't be kept is refused by path, and the conversation is not created."""
    runner = Runner(Agent("Support"), engine=ScriptedEngine(["hello"]))
    with pytest.raises(SessionStateError) as caught:
        await runner.run_async("s", "hi", metadata)
    assert caught.value.path == path
    assert await runner.get_session("s") is None


async def test_failed_turn_leaves_no_trace() -> None:
    """A turn that fails changes neither history nor agent, state nor metadata."""

    async def meddle(context: ToolContext) -> str:
        context.state["seen"] = True
        context.session.metadata["touched"] = True
        await context.session.add_message(Message(Role.SYSTEM, "remember"))
        return "ok"

    support = Agent("Support", tools=[meddle], handoffs=[Agent("Billing")])
    engine = ScriptedEngine(
        ["hello", [CALL("meddle"), CALL("transfer_to_billing")], EngineUnavailableError("down", model="m"), "again"]
    )
    runner = Runner(support, engine=engine)
    await runner.run_async("s", "one")
    with pytest.raises(EngineUnavailableError, match="down"):
        await runner.run_async("s", "two", {"lang": "es"})
    session = await session_of(runner)
    assert texts(session) == ["one", "hello"]
    assert (session.active_agent_name, session.state, session.metadata) == ("Support", {}, {})
    assert (await runner.run_async("s", "three")).content == "again"


async def test_failed_first_turn_leaves_an_empty_conversation() -> None:
    """A conversation whose first turn fails is there, and empty."""
    runner = Runner(Agent("Support"), engine=ScriptedEngine([EngineError("down", model="m")]))
    with pytest.raises(EngineError):
        await runner.run_async("s", "hi")
    session = await session_of(runner)
    assert (len(session.history), session.metadata) == (0, {})


async def test_error_is_the_engines_own() -> None:
    """What an engine raises leaves the run as the same object, in no group."""
    error = LookupError("mine")
    with pytest.raises(LookupError) as caught:
        await Runner(Agent("Support"), engine=ScriptedEngine([error])).run_async("s", "hi")
    assert caught.value is error


async def test_turn_timeout() -> None:
    """A turn that takes longer than turn_timeout raises TimeoutError, leaves nothing, and the next one works."""
    engine = PausingEngine()
    runner = Runner(Agent("Support"), engine=engine, turn_timeout=0.01)
    with pytest.raises(TimeoutError, match=r"session 's': the turn took longer than turn_timeout=0.01 s"):
        await runner.run_async("s", "hi")
    assert len((await session_of(runner)).history) == 0
    engine.go_on.set()
    assert (await Runner(Agent("Support"), runner.session_store, engine).run_async("s", "hi")).content == "answer"


async def test_turn_without_a_limit() -> None:
    """Without turn_timeout and tool_timeout a turn takes as long as it takes."""
    engine = ScriptedEngine([CALL("do_nothing"), "hello"])
    runner = Runner(Agent("Support", tools=[do_nothing]), engine=engine, turn_timeout=None, tool_timeout=None)
    assert (await runner.run_async("s", "hi")).content == "hello"


async def test_waiting_is_not_part_of_the_turn() -> None:
    """The time a run waits in line does not count for its turn_timeout."""
    first, deadlines = PausingEngine(), list[float]()

    async def answer(request: EngineRequest) -> str:
        deadlines.append(anyio.current_effective_deadline())
        return "answer"

    store = SessionStore()
    second = Runner(Agent("Support"), store, ScriptedEngine([answer]), turn_timeout=100)
    async with anyio.create_task_group() as group:
        group.start_soon(Runner(Agent("Support"), store, first).run_async, "s", "one")
        await first.asked.wait()
        group.start_soon(second.run_async, "s", "two")
        await anyio.wait_all_tasks_blocked()
        begins = anyio.current_time()
        first.go_on.set()
    assert deadlines[0] >= begins + 100


async def test_cancelled_by_a_scope_at_the_engine() -> None:
    """A run cancelled by a scope while the model is asked leaves nothing, and the next one works."""
    engine = PausingEngine()
    runner = Runner(Agent("Support"), engine=engine)
    async with anyio.create_task_group() as group:
        group.start_soon(runner.run_async, "s", "hi", {"lang": "es"})
        await engine.asked.wait()
        group.cancel_scope.cancel()
    session = await session_of(runner)
    assert (len(session.history), session.metadata) == (0, {})
    engine.go_on.set()
    assert (await runner.run_async("s", "hi")).content == "answer"


async def test_cancelled_by_its_task_at_the_engine() -> None:
    """A run whose task is cancelled while the model is asked leaves nothing, and the next one works."""
    engine = PausingEngine()
    runner = Runner(Agent("Support"), engine=engine)
    task = asyncio.create_task(runner.run_async("s", "hi", {"lang": "es"}))
    await engine.asked.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    session = await session_of(runner)
    assert (len(session.history), session.metadata) == (0, {})
    engine.go_on.set()
    assert (await runner.run_async("s", "hi")).content == "answer"


async def test_deleted_meanwhile() -> None:
    """A run whose conversation is deleted meanwhile fails, and brings nothing back."""
    engine = PausingEngine()
    runner = Runner(Agent("Support"), engine=engine)

    async def run() -> None:
        with pytest.raises(SessionDeletedError):
            await runner.run_async("s", "hi")

    async with anyio.create_task_group() as group:
        group.start_soon(run)
        await engine.asked.wait()
        await runner.session_store.delete("s")
        engine.go_on.set()
    assert await runner.get_session("s") is None


async def test_others_see_nothing_before_the_commit() -> None:
    """While a turn runs, others see the conversation as it was before."""
    engine = PausingEngine()
    runner = Runner(Agent("Support"), engine=engine)
    async with anyio.create_task_group() as group:
        group.start_soon(runner.run_async, "s", "hi", {"lang": "es"})
        await engine.asked.wait()
        session = await session_of(runner)
        assert (len(session.history), session.metadata) == (0, {})
        engine.go_on.set()
    assert texts(session) == ["hi", "answer"]


# --- who answers ---


async def test_stored_agent_answers() -> None:
    """The agent that a conversation was handed to answers its next message, also with another runner."""
    store = SessionStore()

    def runner() -> Runner:
        billing = Agent("Billing", engine=ScriptedEngine(default="billing here"))
        support = Agent("Support", handoffs=[billing], engine=ScriptedEngine([CALL("transfer_to_billing")]))
        return Runner(support, store)

    await runner().run_async("s", "my bill")
    response = await runner().run_async("s", "and now?")
    assert (response.content, response.active_agent_name) == ("billing here", "Billing")


async def test_handoff_added_later() -> None:
    """An agent that becomes reachable after the runner was made is known to it."""
    support = Agent("Support", engine=ScriptedEngine([CALL("transfer_to_billing")]))
    runner = Runner(support)
    support.add_handoff(Agent("Billing", engine=ScriptedEngine(["billing here"])))
    assert (await runner.run_async("s", "my bill")).content == "billing here"


@pytest.fixture
async def retired() -> SessionStore:
    """A store with a conversation whose agent no runner knows."""
    store = SessionStore()
    await store.get_or_create("s", Agent("Retired"))
    return store


async def test_unknown_stored_agent(retired: SessionStore) -> None:
    """Where no agent within reach has the stored name the starting agent answers, and the name stays."""
    runner = Runner(Agent("Support"), retired, ScriptedEngine(["hello"]))
    response = await runner.run_async("s", "hi")
    session = await session_of(runner)
    assert (response.content, response.active_agent_name) == ("hello", "Support")
    assert (session.history[-1].agent_name, session.active_agent_name) == ("Support", "Retired")


async def test_unknown_stored_agent_is_logged(retired: SessionStore, caplog: pytest.LogCaptureFixture) -> None:
    """An unknown stored agent's name is logged, once a turn."""
    runner = Runner(Agent("Support", tools=[do_nothing]), retired, ScriptedEngine([CALL("do_nothing"), "hello"]))
    await runner.run_async("s", "hi")
    (record,) = caplog.records
    assert record.name == "chatflow.runner"
    assert record.getMessage() == (
        "session 's': no agent within reach of 'Support' is named 'Retired'; 'Support' answers, and the stored name"
        " stays"
    )


async def test_unknown_stored_agent_hands_over(retired: SessionStore) -> None:
    """A handoff changes a stored name that nobody knows."""
    engine = ScriptedEngine([CALL("transfer_to_billing"), "billing here"])
    runner = Runner(Agent("Support", handoffs=[Agent("Billing")]), retired, engine)
    await runner.run_async("s", "hi")
    assert (await session_of(runner)).active_agent_name == "Billing"


async def test_agent_of_another_runner() -> None:
    """A conversation with another runner's agent is answered by this runner's own, and then by that agent again."""
    store = SessionStore()
    billing = Agent("Billing", engine=ScriptedEngine(default="billing here"))
    one = Runner(Agent("Support", handoffs=[billing], engine=ScriptedEngine([CALL("transfer_to_billing")])), store)
    two = Runner(Agent("Other", engine=ScriptedEngine(default="other here")), store)
    answers = [(await runner.run_async("s", "hi")).active_agent_name for runner in (one, two, one)]
    assert answers == ["Billing", "Other", "Billing"]


async def test_agent_out_of_reach() -> None:
    """An agent that a tool makes active and that no handoff leads to does not answer."""
    other = Agent("Other")

    async def switch(context: ToolContext) -> str:
        await context.session.set_active_agent(other)
        return "ok"

    runner = Runner(Agent("Support", tools=[switch]), engine=ScriptedEngine([CALL("switch"), "hello"]))
    assert (await runner.run_async("s", "hi")).active_agent_name == "Support"


def test_sets_a_resolver() -> None:
    """A store without an agent resolver gets one that knows the runner's agents."""
    store, billing = SessionStore(), Agent("Billing")
    Runner(Agent("Support", handoffs=[billing]), store)
    assert store.resolve_agent("Billing") is billing
    assert store.resolve_agent("Other") is None


def test_keeps_a_resolver() -> None:
    """A store's own agent resolver stays."""
    store, mine = SessionStore(), Agent("Support")
    store.set_agent_resolver({"Support": mine}.get)
    Runner(Agent("Support"), store)
    assert store.resolve_agent("Support") is mine


async def test_runners_share_a_store() -> None:
    """Of several runners on one store each answers with its own agents, also where they have the same names."""
    store = SessionStore()
    one = Runner(Agent("Support"), store, ScriptedEngine(default="one"))
    two = Runner(Agent("Support"), store, ScriptedEngine(default="two"))
    assert [(await runner.run_async("s", "hi")).content for runner in (one, two, one)] == ["one", "two", "one"]


# --- tools, in short ---


async def test_tool_limit() -> None:
    """After max_tool_iterations the model is asked once more without tools, and what it says is the answer."""
    engine = ScriptedEngine([CALL("do_nothing"), CALL("do_nothing"), "that is all"])
    runner = Runner(Agent("Support", tools=[do_nothing]), engine=engine, max_tool_iterations=2)
    response = await runner.run_async("s", "hi")
    assert (response.content, response.stop_reason) == ("that is all", "tool_limit")
    assert response.tool_calls_executed == ("do_nothing", "do_nothing")
    assert [len(request.tools) for request in engine.requests] == [1, 1, 0]


async def test_calls_past_the_tool_limit() -> None:
    """Calls made past the limit are neither run nor stored."""
    engine = ScriptedEngine(default=CALL("do_nothing"))
    runner = Runner(Agent("Support", tools=[do_nothing]), engine=engine, max_tool_iterations=1)
    response = await runner.run_async("s", "hi")
    assert (response.content, response.tool_calls_executed) == ("", ("do_nothing",))
    assert [message.role for message in (await session_of(runner)).history] == ["user", "model", "tool", "model"]
    assert (await session_of(runner)).history[-1].tool_calls == ()


async def test_repairs_are_logged_once_a_turn(caplog: pytest.LogCaptureFixture) -> None:
    """What was repaired in a prompt is logged once a turn, by ids, however often the model is asked."""
    engine = ScriptedEngine([CALL("do_nothing"), "done"])
    runner = Runner(Agent("Support", tools=[do_nothing]), engine=engine)
    session = await runner.session_store.get_or_create("s", runner.starting_agent)
    async with session.turn():
        await session.add_message(Message(Role.USER, "secret"))
        await session.add_message(Message(Role.MODEL, tool_calls=[ToolCall(id="c1", name="do_nothing")]))
    await runner.run_async("s", "hi")
    repaired = [record.getMessage() for record in caplog.records if "repaired" in record.getMessage()]
    assert len(repaired) == 1
    assert "session 's'" in repaired[0]
    assert "'c1'" in repaired[0]
    assert "secret" not in repaired[0]


async def test_tool_that_clears_the_history() -> None:
    """A tool may clear the history: the turn it is called in goes on, and is all that stays."""

    async def forget(context: ToolContext) -> str:
        await context.session.clear_history()
        return "forgotten"

    engine = ScriptedEngine(["one", CALL("forget"), "two"])
    runner = Runner(Agent("Support", tools=[forget]), engine=engine)
    await runner.run_async("s", "first")
    assert (await runner.run_async("s", "forget me")).content == "two"
    history = (await session_of(runner)).history
    assert [message.role for message in history] == ["user", "model", "tool", "model"]
    assert history[0].text == "forget me"


async def test_tool_that_rolls_back() -> None:
    """A tool may roll back what it did itself: what the turn said before stands once."""

    async def undo(context: ToolContext) -> str:
        await context.session.rollback_to(1)
        return "undone"

    runner = Runner(Agent("Support", tools=[undo]), engine=ScriptedEngine([CALL("undo"), "done"]))
    await runner.run_async("s", "hi")
    history = (await session_of(runner)).history
    assert [message.role for message in history] == ["user", "model", "tool", "model"]


async def test_tool_that_adds_messages() -> None:
    """A tool may add messages of its own: the result stands after them, and the model sees it with its call."""

    async def note(context: ToolContext) -> str:
        await context.session.add_message(Message(Role.MODEL, "a note"))
        return "noted"

    engine = ScriptedEngine([CALL("note"), "done"])
    runner = Runner(Agent("Support", tools=[note]), engine=engine)
    await runner.run_async("s", "hi")
    roles = [message.role for message in engine.requests[1].messages]
    assert roles[:3] == ["user", "model", "tool"]
    assert engine.requests[1].messages[2].tool_results == (
        ToolResult(tool_call_id="call_1", name="note", content="noted"),
    )


async def test_log_has_no_content(caplog: pytest.LogCaptureFixture) -> None:
    """What the runner logs are ids and names, never what was said."""
    caplog.set_level(logging.DEBUG)
    support = Agent("Support", tools=[do_nothing], handoffs=[Agent("Billing")])
    calls = [CALL("do_nothing", private="secret"), CALL("nothing", private="secret")]
    engine = ScriptedEngine([[*calls, CALL("transfer_to_billing", reason="secret")], "secret"])
    await Runner(support, engine=engine, max_tool_iterations=1).run_async("s", "secret", {"secret": "secret"})
    assert len(caplog.records) >= 4
    assert "secret" not in caplog.text


# --- side by side ---


async def test_conversations_run_at_once() -> None:
    """Turns of different conversations run at the same time: eight meet inside the engine."""
    barrier = asyncio.Barrier(8)

    async def answer(request: EngineRequest) -> str:
        await barrier.wait()
        return request.messages[-1].text

    runner = Runner(Agent("Support"), engine=ScriptedEngine(default=answer))
    async with anyio.create_task_group() as group:
        for number in range(8):
            group.start_soon(runner.run_async, f"s{number}", f"message {number}")
    assert [texts(await session_of(runner, f"s{number}")) for number in range(8)] == [
        [f"message {number}"] * 2 for number in range(8)
    ]


async def test_messages_of_one_conversation_queue() -> None:
    """Messages of one conversation are answered one after the other, in the order they came."""
    engine = PausingEngine()
    runner = Runner(Agent("Support"), engine=engine)
    async with anyio.create_task_group() as group:
        for number in range(4):
            group.start_soon(runner.run_async, "s", f"message {number}")
            await anyio.wait_all_tasks_blocked()
        engine.go_on.set()
    assert texts(await session_of(runner))[::2] == [f"message {number}" for number in range(4)]


# --- arguments ---


async def test_get_session() -> None:
    """get_session gives the conversation, or None where there is none."""
    runner = Runner(Agent("Support"), engine=ScriptedEngine(["hello"]))
    assert await runner.get_session("s") is None
    await runner.run_async("s", "hi")
    assert (await session_of(runner)).session_id == "s"


def test_attributes() -> None:
    """A runner shows its starting agent, store and limits."""
    store, support = SessionStore(), Agent("Support")
    runner = Runner(support, store)
    assert (runner.starting_agent, runner.session_store) == (support, store)
    assert (runner.max_handoffs_per_turn, runner.max_tool_iterations) == (5, 10)
    assert (runner.turn_timeout, runner.tool_timeout, runner.max_concurrent_turns) == (300, 60, None)
    limits = (runner.max_concurrent_tool_calls, runner.max_result_characters, runner.max_result_bytes)
    assert limits == (8, 50_000, 3_750_000)
    assert repr(runner) == "<Runner starting_agent=<Agent 'Support'> session_store=<SessionStore 'memory'>>"


@pytest.mark.parametrize(
    ("argument", "value", "message"),
    [
        ("starting_agent", "Support", "starting_agent must be an Agent, not str"),
        ("session_store", {}, "session_store must be a session store, not dict"),
        ("engine", "gpt-4o", r"engine must have an async method generate\(request\); str has none"),
        ("engine", ScriptedEngine, r"engine must be an instance: ScriptedEngine\(...\), not the class itself"),
        ("compactor", Compactor, r"a compactor must be an instance: Compactor\(...\), not the class itself"),
        ("max_handoffs_per_turn", True, "max_handoffs_per_turn must be an integer, not True"),
        ("max_tool_iterations", 2.5, "max_tool_iterations must be an integer, not 2.5"),
        ("max_concurrent_turns", "4", "max_concurrent_turns must be an integer, not '4'"),
        ("max_concurrent_tool_calls", 4.0, "max_concurrent_tool_calls must be an integer, not 4.0"),
        ("max_result_characters", "all", "max_result_characters must be an integer, not 'all'"),
        ("max_result_bytes", True, "max_result_bytes must be an integer, not True"),
        ("turn_timeout", "300", "turn_timeout must be a number of seconds or None, not '300'"),
        ("tool_timeout", True, "tool_timeout must be a number of seconds or None, not True"),
    ],
)
def test_argument_of_wrong_type(argument: str, value: Any, message: str) -> None:
    """An argument of a wrong type is refused when the runner is made, with its value."""
    arguments: dict[str, Any] = {"starting_agent": Agent("Support"), argument: value}
    with pytest.raises(TypeError, match=message):
        Runner(**arguments)


@pytest.mark.parametrize(
    ("argument", "value", "message"),
    [
        ("max_handoffs_per_turn", -1, "max_handoffs_per_turn must be at least 0, not -1"),
        ("max_tool_iterations", 0, "max_tool_iterations must be at least 1, not 0"),
        ("max_concurrent_turns", 0, "max_concurrent_turns must be at least 1, not 0"),
        ("max_concurrent_tool_calls", 0, "max_concurrent_tool_calls must be at least 1, not 0"),
        ("max_result_characters", 99, "max_result_characters must be at least 100, not 99"),
        ("max_result_bytes", -1, "max_result_bytes must be at least 0, not -1"),
        ("turn_timeout", 0, "turn_timeout must be above 0, not 0"),
        ("tool_timeout", float("nan"), "tool_timeout must be above 0, not nan"),
    ],
)
def test_number_too_small(argument: str, value: Any, message: str) -> None:
    """A number that makes no sense is refused when the runner is made, with its value."""
    with pytest.raises(ValueError, match=message):
        Runner(Agent("Support"), **{argument: value})


def test_two_agents_of_one_name() -> None:
    """Two different agents of one name are refused when the runner is made."""
    support, first, second = Agent("Support"), Agent("First"), Agent("Second")
    support.add_handoff(first)
    support.add_handoff(second)
    first.add_handoff(Agent("Billing"))
    second.add_handoff(Agent("Billing"))
    with pytest.raises(HandoffError):
        Runner(support)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"session_id": ""}, ValueError, "session_id must not be empty"),
        ({"session_id": 7}, TypeError, "session_id must be a string, not int"),
        ({"user_message": None}, TypeError, "user_message must be a string, not NoneType"),
        ({"message_id": ""}, ValueError, "message_id must not be empty"),
        ({"message_id": 7}, TypeError, "message_id must be a string, not int"),
        ({"on_duplicate": "wait"}, ValueError, "on_duplicate must be 'response' or 'raise', not 'wait'"),
        ({"on_duplicate": None}, ValueError, "on_duplicate must be 'response' or 'raise', not None"),
    ],
)
async def test_refused_run(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    """A run with a bad argument is refused, and the conversation is not created."""
    runner = Runner(Agent("Support"), engine=ScriptedEngine(["hello"]))
    with pytest.raises(error, match=message):
        await runner.run_async(**{"session_id": "s", "user_message": "hi", **arguments})
    assert await runner.get_session("s") is None
