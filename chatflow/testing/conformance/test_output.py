"""Answers of an output type: read anew from what is stored, and asked for again where a service keeps the history."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Final

import anyio.lowlevel
import attrs
import pytest

from chatflow.core.agent import Agent
from chatflow.core.backend import StoreBackend
from chatflow.core.engine import EngineReply, EngineRequest
from chatflow.core.messages import AgentResponse, Message, Role
from chatflow.core.providers import ContextProvider, RunContext
from chatflow.core.records import PendingTurn
from chatflow.core.service import id_key
from chatflow.core.session import AgentSession
from chatflow.core.values import thaw
from chatflow.engines.scripted import ScriptedEngine
from chatflow.exceptions import EngineOutputError
from chatflow.runner import Runner
from chatflow.testing.conformance.conftest import Restart
from chatflow.testing.conformance.service_engine import A2AEngine
from chatflow.testing.conformance.work import nothing_left

GOOD: Final = '{"id": 404}'
BAD: Final = '{"id": "none"}'


@attrs.frozen
class Order:
    id: int


@attrs.frozen
class Renamed:
    number: int


def runner_on(store: StoreBackend, *replies: Any, output_type: Any = Order) -> Runner:
    """A runner whose model says these replies."""
    return Runner(Agent("Support", output_type=output_type), store, ScriptedEngine(replies))


# --- what was stored ---


async def test_duplicate(store: StoreBackend) -> None:
    """A duplicate gets the stored answer as the type, another instance of it each time."""
    runner = runner_on(store, GOOD)
    first = await runner.run_async("s", "order?", message_id="m1")
    others = [await runner.run_async("s", "order?", message_id="m1") for _ in range(2)]
    assert [response.output for response in (first, *others)] == [Order(404)] * 3
    assert len({id(response.output) for response in (first, *others)}) == 3
    assert others[0] == attrs.evolve(first, duplicate=True)


async def test_duplicate_after_a_restart(store: StoreBackend, restart: Restart) -> None:
    """After a restart a duplicate gets the stored answer as the type."""
    await runner_on(store, GOOD).run_async("s", "order?", message_id="m1")
    again = await runner_on(await restart(store)).run_async("s", "order?", message_id="m1")
    assert (again.output, again.content, again.duplicate) == (Order(404), GOOD, True)


async def test_only_the_text_is_stored(store: StoreBackend) -> None:
    """No output is stored: an agent without an output type gives a duplicate the text alone."""
    await runner_on(store, GOOD).run_async("s", "order?", message_id="m1")
    again = await runner_on(store, output_type=None).run_async("s", "order?", message_id="m1")
    assert (again.output, again.content) == (None, GOOD)


async def test_agent_that_is_gone(store: StoreBackend) -> None:
    """The stored answer of an agent that is there no more has no output."""
    other = Agent("Other", output_type=Order)
    engine = ScriptedEngine([ScriptedEngine.call("transfer_to_other"), GOOD])
    with_other = Runner(Agent("Support", handoffs=[other]), store, engine)
    assert (await with_other.run_async("s", "order?", message_id="m1")).output == Order(404)
    again = await runner_on(store).run_async("s", "order?", message_id="m1")
    assert (again.output, again.content) == (None, GOOD)


async def test_type_that_has_changed(store: StoreBackend, caplog: pytest.LogCaptureFixture) -> None:
    """A stored answer that the type refuses by now comes without output, which is logged without its text."""
    await runner_on(store, GOOD).run_async("s", "order?", message_id="m1")
    with caplog.at_level(logging.WARNING, "chatflow.runner"):
        again = await runner_on(store, output_type=Renamed).run_async("s", "order?", message_id="m1")
    assert (again.output, again.content, again.duplicate) == (None, GOOD, True)
    assert "session 's': the stored answer of agent 'Support' is not of its output_type now" in caplog.text
    assert "404" not in caplog.text


async def test_answer_that_nobody_kept(store: StoreBackend, caplog: pytest.LogCaptureFixture) -> None:
    """A duplicate without a stored answer has no output, and nothing is logged of it."""
    runner = runner_on(store)
    await store.get_or_create("s", runner.starting_agent)
    await store.mark_message_processed("m1", session_id="s")
    response = await runner.run_async("s", "order?", message_id="m1")
    assert (response.output, response.stop_reason, caplog.text) == (None, "not_stored", "")


async def test_on_response(store: StoreBackend) -> None:
    """A worker's listener gets the answer as the type."""
    runner, heard = runner_on(store, BAD, GOOD), list[AgentResponse]()

    async def hear(turn: PendingTurn, response: AgentResponse) -> None:
        heard.append(response)

    await runner.accept("s", "order?", message_id="m1")
    async with runner.working(hear):
        await nothing_left(store)
    assert [response.output for response in heard] == [Order(404)]


async def test_on_response_of_another_worker(store: StoreBackend) -> None:
    """An answer that an earlier worker has left to be told is read anew for the one that tells it."""
    runner, heard = runner_on(store, GOOD), list[AgentResponse]()
    await runner.accept("s", "order?", message_id="m1")

    def fail(turn: PendingTurn, response: AgentResponse) -> None:
        raise LookupError("down")

    async with runner.working(fail):
        while [turn.state for turn in await store.pending_turns()] != ["answered"]:
            await anyio.lowlevel.checkpoint()
    async with runner_on(store).working(lambda _, response: heard.append(response)):
        await nothing_left(store)
    assert [response.output for response in heard] == [Order(404)]


async def test_refused_twice(store: StoreBackend) -> None:
    """A turn whose answer is refused twice leaves no trace, and its message is answered when it comes again."""
    runner = runner_on(store, BAD, BAD, GOOD)
    with pytest.raises(EngineOutputError):
        await runner.run_async("s", "order?", message_id="m1")
    assert (await store.messages("s")).items == ()
    assert (await runner.run_async("s", "order?", message_id="m1")).output == Order(404)


# --- where a service keeps the history ---


class ConversationEngine(A2AEngine):
    """A service whose conversation has one id, under which it goes on with whatever it was asked and has answered."""

    async def generate(self, request: EngineRequest) -> EngineReply:
        """Answer, and keep all of it under the same id."""
        reply = await super().generate(request)
        if request.service_session_id is None or reply.service_session_id is None:
            return reply
        key = id_key(request.service_session_id)
        self.kept[key] = self.kept.pop(id_key(reply.service_session_id))
        return attrs.evolve(reply, service_session_id=request.service_session_id)


def sent(request: EngineRequest) -> list[tuple[Role, str]]:
    """Who says what in a request, but for the schema's instructions."""
    return [(message.role, message.text) for message in request.messages]


def last_kept(engine: A2AEngine) -> list[str]:
    """What the service has of its last conversation."""
    return [message.text for message in next(reversed(engine.kept.values()))]


@pytest.mark.parametrize("begun", [False, True])
async def test_service_forgets_the_refused_answer(store: StoreBackend, begun: bool) -> None:
    """A service is asked again from where it was asked before, so that it goes on from what is stored here alone."""
    engine = A2AEngine(ScriptedEngine([*([GOOD] if begun else []), BAD, GOOD, GOOD]))
    agent = Agent("Support", "Be brief.", engine=engine, output_type=Order)
    session = agent.create_session("s", store=store)
    if begun:
        await agent.run("first?", session=session)
    assert (await agent.run("order?", session=session)).output == Order(404)
    refused, again = engine.requests[-2:]
    assert again.service_session_id == refused.service_session_id
    (role, text) = sent(again)[1]
    assert (role, BAD in text, "answer.id: Input should be a valid integer" in text) == (Role.SYSTEM, True, True)
    assert [sent(again)[0], *sent(again)[2:]] == sent(refused)
    assert last_kept(engine) == [message.text for message in session.history]
    await agent.run("and?", session=session)
    assert sent(engine.requests[-1]) == [(Role.SYSTEM, "Be brief."), (Role.USER, "and?")]
    assert last_kept(engine) == [message.text for message in session.history]


async def test_service_after_tools(store: StoreBackend) -> None:
    """After a tool's result it is asked again with that result, from the reply that had called the tool."""
    engine = A2AEngine(ScriptedEngine([ScriptedEngine.call("look"), BAD, GOOD, GOOD]))
    agent = Agent("Support", engine=engine, output_type=Order)
    agent.tool(name="look")(lambda: "there")
    session = agent.create_session("s", store=store)
    await agent.run("order?", session=session)
    refused, again = engine.requests[-2:]
    assert (
        thaw(again.service_session_id)
        == thaw(refused.service_session_id)
        == {"contextId": "context-1", "taskId": "task-1"}
    )
    assert [role for role, _ in sent(again)] == [Role.SYSTEM, Role.TOOL]
    await agent.run("and?", session=session)
    assert last_kept(engine) == [message.text for message in session.history]


async def test_added_messages_are_sent_again(store: StoreBackend) -> None:
    """What a provider adds was told to the service with the refused answer, and is told again with the next."""

    class Adding(ContextProvider):
        name = "adding"

        async def before_run(self, agent: Agent, session: AgentSession, context: RunContext) -> None:
            context.add_messages(Message(Role.USER, "by the way"))

    engine = A2AEngine(ScriptedEngine([GOOD, BAD, GOOD]))
    agent = Agent("Support", engine=engine, output_type=Order, context_providers=[Adding()])
    session = agent.create_session("s", store=store)
    await agent.run("first?", session=session)
    await agent.run("order?", session=session)
    refused, again = engine.requests[-2:]
    assert [text for role, text in sent(refused)] == [text for role, text in sent(again) if role is not Role.SYSTEM]
    assert (Role.USER, "by the way") in sent(again)


async def test_conversation_holds_the_refused_answer(store: StoreBackend) -> None:
    """A conversation of one id has the answer already: it is only told what is wrong, and goes on as it is."""
    engine = ConversationEngine(ScriptedEngine([GOOD, BAD, GOOD, GOOD]))
    agent = Agent("Support", engine=engine, output_type=Order)
    session = agent.create_session("s", store=store)
    await agent.run("first?", session=session)
    assert (await agent.run("order?", session=session)).output == Order(404)
    again = engine.requests[-1]
    assert [role for role, _ in sent(again)] == [Role.USER]
    assert "That answer can't be used" in sent(again)[0][1]
    assert [message.text for message in session.history] == ["first?", GOOD, "order?", GOOD]
    await agent.run("and?", session=session)
    assert sent(engine.requests[-1]) == [(Role.USER, "and?")]
    assert last_kept(engine)[2:] == ["order?", BAD, sent(again)[0][1], GOOD, "and?", GOOD]


async def test_conversation_with_calls_that_nobody_answers(store: StoreBackend) -> None:
    """Where a refused answer has called tools that it was not offered, the conversation is left for a new one."""
    calls = EngineReply(text=BAD, tool_calls=[ScriptedEngine.call("look")])
    engine = ConversationEngine(ScriptedEngine([GOOD, ScriptedEngine.call("look"), calls, GOOD, GOOD]))
    agent = Agent("Support", engine=engine, output_type=Order)
    agent.tool(name="look")(lambda: "there")
    runner = Runner(agent, store, max_tool_iterations=1)
    await runner.run_async("s", "first?")
    assert (await runner.run_async("s", "order?")).output == Order(404)
    again = engine.requests[-1]
    assert again.service_session_id is None
    assert [role for role, _ in sent(again)] == [Role.SYSTEM, Role.USER, Role.MODEL, Role.USER, Role.MODEL, Role.TOOL]
    await runner.run_async("s", "and?")
    assert sent(engine.requests[-1]) == [(Role.USER, "and?")]


@pytest.mark.parametrize("kind", [A2AEngine, ConversationEngine])
async def test_refused_twice_at_a_service(store: StoreBackend, kind: Callable[[Any], A2AEngine]) -> None:
    """A turn whose answer is refused twice leaves the service's session as it was here."""
    engine = kind(ScriptedEngine([GOOD, BAD, BAD, GOOD]))
    agent = Agent("Support", engine=engine, output_type=Order)
    session = agent.create_session("s", store=store)
    await agent.run("first?", session=session)
    before = session.service_session_id
    with pytest.raises(EngineOutputError):
        await agent.run("order?", session=session)
    assert session.service_session_id == before
    await agent.run("order?", session=session)
    assert sent(engine.requests[-1]) == [(Role.USER, "order?")]


async def test_lost_while_it_is_asked_again(store: StoreBackend) -> None:
    """A service that has lost its session by then is told the whole history, and what was wrong."""

    class Losing(A2AEngine):
        async def generate(self, request: EngineRequest) -> EngineReply:
            reply = await super().generate(request)
            if reply.text == BAD:
                self.forget()
            return reply

    engine = Losing(ScriptedEngine([GOOD, BAD, GOOD, GOOD]))
    agent = Agent("Support", engine=engine, output_type=Order)
    session = agent.create_session("s", store=store)
    await agent.run("first?", session=session)
    response = await agent.run("order?", session=session, on_lost_service_session="replay")
    assert response.output == Order(404)
    assert last_kept(engine) == [message.text for message in session.history]
    await agent.run("and?", session=session)
    assert sent(engine.requests[-1]) == [(Role.USER, "and?")]
