"""A service keeps the history: only what is new is sent, and the service's session is part of the commit."""

from __future__ import annotations

import logging
from typing import Any

import attrs
import pytest

from chatflow.core.agent import Agent
from chatflow.core.engine import EngineReply, EngineRequest
from chatflow.core.messages import Message, Role, ToolCall, ToolResult
from chatflow.core.providers import ContextProvider, RunContext
from chatflow.core.service import id_key
from chatflow.core.session import AgentSession
from chatflow.core.store import BaseSessionStore
from chatflow.core.tools import ToolContext
from chatflow.core.values import thaw
from chatflow.engines.scripted import ScriptedEngine
from chatflow.exceptions import EngineBadRequestError, EngineError, ServiceSessionLostError, SessionError
from chatflow.runner import Runner
from chatflow.testing.conformance.conftest import OpenStore, Restart
from chatflow.testing.conformance.conversation import user
from chatflow.testing.conformance.service_engine import A2AEngine


def sent(request: EngineRequest) -> list[str]:
    """What a request sends, system messages aside."""
    return [
        message.text or ",".join(result.name for result in message.tool_results)
        for message in request.messages
        if message.role is not Role.SYSTEM
    ]


def agent_of(engine: Any, name: str = "Support") -> Agent:
    """An agent that *engine* answers for."""
    return Agent(name=name, instructions="Be brief.", engine=engine)


async def test_only_new_messages_are_sent(store: BaseSessionStore) -> None:
    """Each request names the session that the reply before has given, and sends the messages since then."""
    engine = A2AEngine()
    agent = agent_of(engine)
    session = agent.create_session("s", store=store)
    for text in ("one", "two", "three"):
        await agent.run(text, session=session)
    assert [sent(request) for request in engine.requests] == [["one"], ["two"], ["three"]]
    assert engine.requests[0].service_session_id is None
    assert thaw(engine.requests[2].service_session_id) == {"contextId": "context-1", "taskId": "task-2"}
    assert session.service_session_id == {"contextId": "context-1", "taskId": "task-3"}


async def test_instructions_are_sent_each_time(store: BaseSessionStore) -> None:
    """Instructions and stored system messages go along with each request, since they may have changed."""
    engine = A2AEngine()
    agent = agent_of(engine)
    session = agent.create_session("s", store=store)
    await agent.run("one", session=session)
    await session.add_message(Message(Role.SYSTEM, "Speak Spanish."))
    await agent.run("two", session=session)
    assert [message.text for message in engine.requests[1].messages] == ["Be brief.", "Speak Spanish.", "two"]


async def test_mirror_is_kept(store: BaseSessionStore) -> None:
    """What went through here is in the history as well."""
    agent = agent_of(A2AEngine())
    session = agent.create_session("s", store=store)
    await agent.run("one", session=session)
    assert [message.text for message in session.history] == ["one", "yes"]


async def test_survives_restart(store: BaseSessionStore, restart: Restart) -> None:
    """After a restart the conversation goes on where the service has left it."""
    engine = A2AEngine()
    agent = agent_of(engine)
    await agent.run("one", session=agent.create_session("s", store=store))
    store = await restart(store)
    await agent.run("two", session=agent.create_session("s", store=store))
    assert sent(engine.requests[1]) == ["two"]
    assert engine.requests[1].service_session_id == {"contextId": "context-1", "taskId": "task-1"}


async def test_seen_by_others(store: BaseSessionStore, second: BaseSessionStore) -> None:
    """A session object that was read before goes on from what another store's turn has come to."""
    engine = A2AEngine()
    agent = agent_of(engine)
    mine = await store.get_or_create("s", agent)
    theirs = await second.get_or_create("s", agent)
    await agent.run("one", session=mine)
    await agent.run("two", session=theirs)
    await agent.run("three", session=mine)
    assert [sent(request) for request in engine.requests] == [["one"], ["two"], ["three"]]
    assert len(next(reversed(engine.kept.values()))) == 6


async def test_tool_results_are_sent_alone(store: BaseSessionStore) -> None:
    """After a call, the request sends its result and nothing that the service has seen."""
    inner = ScriptedEngine().when("order", call="look").when(result_of="look", reply="It is on its way.")
    engine = A2AEngine(inner)
    agent = agent_of(engine)

    @agent.tool
    async def look() -> str:
        """Look."""
        return "on its way"

    session = agent.create_session("s", store=store)
    response = await agent.run("my order?", session=session)
    assert response.content == "It is on its way."
    assert [sent(request) for request in engine.requests] == [["my order?"], ["look"]]


async def test_messages_added_by_hand_are_new(store: BaseSessionStore) -> None:
    """What the application adds between two turns is sent with the next one."""
    engine = A2AEngine()
    agent = agent_of(engine)
    session = agent.create_session("s", store=store)
    await agent.run("one", session=session)
    await session.add_message(user("by the way"))
    await agent.run("two", session=session)
    assert sent(engine.requests[1]) == ["by the way", "two"]


async def test_failed_turn_leaves_no_trace(store: BaseSessionStore) -> None:
    """A turn that fails after the service has answered leaves the session as it was, and the next sends its own."""
    inner = ScriptedEngine(["one!", ScriptedEngine.call("look"), RuntimeError("down"), "two!"])
    engine = A2AEngine(inner)
    agent = agent_of(engine)
    agent.tool(name="look")(lambda: "there")
    session = agent.create_session("s", store=store)
    await agent.run("one", session=session)
    before = session.service_session_id
    with pytest.raises(RuntimeError, match="down"):
        await agent.run("two", session=session)
    assert session.service_session_id == before
    await agent.run("two", session=session)
    assert sent(engine.requests[-1]) == ["two"]
    assert engine.requests[-1].service_session_id == before


async def test_resumed_turn_goes_on_at_the_service(store: BaseSessionStore) -> None:
    """A turn that is tried again from its journal goes on from the reply that had made the calls."""
    inner = ScriptedEngine([ScriptedEngine.call("look"), RuntimeError("down"), "done"])
    engine = A2AEngine(inner)
    agent = agent_of(engine)
    agent.tool(name="look")(lambda: "there")
    runner = Runner(agent, store)
    with pytest.raises(RuntimeError, match="down"):
        await runner.run_async("s", "go", message_id="m1")
    response = await runner.run_async("s", "go", message_id="m1")
    assert response.content == "done"
    assert [sent(request) for request in engine.requests] == [["go"], ["look"], ["look"]]
    assert engine.requests[2].service_session_id == {"contextId": "context-1", "taskId": "task-1"}


async def test_rollback_goes_back_at_the_service(store: BaseSessionStore) -> None:
    """Going back to a checkpoint goes back to the service's session of that moment too."""
    engine = A2AEngine()
    agent = agent_of(engine)
    session = agent.create_session("s", store=store)
    await agent.run("one", session=session)
    async with session.turn():
        checkpoint = session.checkpoint()
        await session.add_message(user("no"))
        await session.clear_history()
        assert session.service_session_id is None
        await session.rollback_to(checkpoint)
    assert session.service_session_id == {"contextId": "context-1", "taskId": "task-1"}


async def test_rollback_to_a_length(store: BaseSessionStore) -> None:
    """Going back to before what the service has seen begins a new session there; going back after that does not."""
    engine = A2AEngine()
    agent = agent_of(engine)
    session = agent.create_session("s", store=store)
    await agent.run("one", session=session)
    await agent.run("two", session=session)
    await session.add_message(user("no"))
    await session.rollback_to(4)
    assert session.service_session_id == {"contextId": "context-1", "taskId": "task-2"}
    await session.rollback_to(3)
    assert session.service_session_id is None
    await agent.run("three", session=session)
    assert sent(engine.requests[-1]) == ["one", "yes", "two", "three"]


async def test_clearing_begins_anew(store: BaseSessionStore) -> None:
    """A cleared conversation begins a new session: the service would remember the old one."""
    engine = A2AEngine()
    agent = agent_of(engine)
    session = agent.create_session("s", store=store)
    await agent.run("one", session=session)
    await session.clear_history()
    assert session.service_session_id is None
    await agent.run("two", session=session)
    assert engine.requests[-1].service_session_id is None


async def test_goes_on_with_what_a_service_has(store: BaseSessionStore) -> None:
    """A session made for a service's id goes on with it, unchanged, and is stored with its first turn."""
    engine = A2AEngine()
    agent = agent_of(engine)
    id_ = engine.new_id()
    engine.kept[id_key(id_)] = (Message(Role.USER, "before"), Message(Role.MODEL, "yes"))
    session = agent.get_session(id_, store=store)
    assert await store.get(session.session_id) is None
    await agent.run("Continue this conversation.", session=session)
    assert engine.requests[0].service_session_id == id_
    assert sent(engine.requests[0]) == ["Continue this conversation."]
    stored = await store.get(session.session_id)
    assert stored is not None
    assert stored.service_session_id == {"contextId": "context-1", "taskId": "task-2"}


async def test_failed_first_turn_keeps_the_given_id(store: BaseSessionStore) -> None:
    """Where the first turn fails, the session still has the id it was made for."""
    engine = A2AEngine(ScriptedEngine([RuntimeError("down")], default="yes"))
    agent = agent_of(engine)
    id_ = engine.new_id()
    engine.kept[id_key(id_)] = ()
    session = agent.get_session(id_, store=store)
    with pytest.raises(RuntimeError, match="down"):
        await agent.run("one", session=session)
    assert session.service_session_id == id_
    await agent.run("one", session=session)
    assert engine.requests[1].service_session_id == id_


async def test_lost_session_is_an_error(store: BaseSessionStore) -> None:
    """A service that has lost its session fails the turn, by default."""
    engine = A2AEngine()
    agent = agent_of(engine)
    session = agent.create_session("s", store=store)
    await agent.run("one", session=session)
    engine.forget()
    with pytest.raises(ServiceSessionLostError):
        await agent.run("two", session=session)
    assert [message.text for message in session.history] == ["one", "yes"]


async def test_lost_session_is_replayed(store: BaseSessionStore, caplog: pytest.LogCaptureFixture) -> None:
    """Asked to, a new session begins with the local copy, and the next turn goes on from that."""
    engine = A2AEngine(begins=False)
    agent = agent_of(engine)
    id_ = engine.new_id()
    engine.kept[id_key(id_)] = ()
    session = agent.get_session(id_, store=store)
    await agent.run("one", session=session)
    engine.forget()
    with caplog.at_level(logging.WARNING, "chatflow.runner"):
        await agent.run("two", session=session, on_lost_service_session="replay")
    assert "a new one begins with the local copy of the history" in caplog.text
    assert [sent(request) for request in engine.requests] == [["one"], ["two"], ["one", "yes", "two"]]
    assert engine.requests[2].keep_at_service
    assert engine.requests[2].service_session_id is None
    await agent.run("three", session=session)
    assert sent(engine.requests[3]) == ["three"]


async def test_replay_needs_a_service(store: BaseSessionStore) -> None:
    """An engine that begins no new session when it is to is an error, and nothing is committed."""

    class Forgetful(A2AEngine):
        async def generate(self, request: EngineRequest) -> Any:
            if request.keep_at_service:
                return await self.inner.generate(request)
            return await super().generate(request)

    engine = Forgetful()
    agent = agent_of(engine)
    session = agent.create_session("s", store=store)
    await agent.run("one", session=session)
    engine.forget()
    with pytest.raises(EngineError, match="gave no id"):
        await agent.run("two", session=session, on_lost_service_session="replay")
    assert [message.text for message in session.history] == ["one", "yes"]


async def test_local_history_and_service(store: BaseSessionStore) -> None:
    """A local history and a service's session that it did not come from are refused together."""
    engine = A2AEngine()
    agent = agent_of(engine)
    id_ = engine.new_id()
    engine.kept[id_key(id_)] = ()
    session = agent.get_session(id_, store=store)
    await session.add_message(user("said elsewhere"))
    with pytest.raises(SessionError, match="both a service's session and a local history"):
        await agent.run("one", session=session)
    assert engine.requests == []


async def test_other_agent(store: BaseSessionStore) -> None:
    """A session that was given to an agent out of reach is refused, naming both."""
    engine = A2AEngine()
    mine = agent_of(engine, "Mine")
    session = mine.create_session("s", store=store)
    await mine.run("one", session=session)
    other = agent_of(engine, "Other")
    await session.set_active_agent(other)
    with pytest.raises(SessionError, match=r"'Mine'.*'Other'"):
        await other.run("two", session=session)


async def test_colleagues_share_it(store: BaseSessionStore) -> None:
    """A handoff to an agent of the same service goes on with the same session."""
    inner = ScriptedEngine(["one!", ScriptedEngine.call("transfer_to_billing"), "billing here"])
    engine = A2AEngine(inner)
    billing = agent_of(engine, "Billing")
    support = Agent("Support", handoffs=[billing], engine=engine)
    session = support.create_session("s", store=store)
    await support.run("one", session=session)
    response = await support.run("invoice", session=session)
    assert (response.content, response.active_agent_name) == ("billing here", "Billing")
    assert [sent(request) for request in engine.requests] == [["one"], ["invoice"], ["transfer_to_billing"]]


async def test_other_service(store: BaseSessionStore) -> None:
    """An id of one service is never sent to another, nor to an engine that knows none."""
    mine = agent_of(A2AEngine(name="a2a"))
    session = mine.create_session("s", store=store)
    await mine.run("one", session=session)
    elsewhere = A2AEngine(name="other")
    with pytest.raises(SessionError, match=r"'a2a'.*'other'"):
        await agent_of(elsewhere).run("two", session=session)
    plain = ScriptedEngine(default="yes")
    with pytest.raises(SessionError, match="ScriptedEngine"):
        await agent_of(plain).run("two", session=session)
    assert (elsewhere.requests, plain.requests) == ([], [])


async def test_engine_refuses_what_it_cannot_use(store: BaseSessionStore) -> None:
    """An id of a shape that the engine can't use is refused by the engine."""
    agent = agent_of(A2AEngine())
    with pytest.raises(EngineBadRequestError, match="a context and a task"):
        await agent.run("one", session=agent.get_session("resp_1", store=store))


async def test_service_that_keeps_its_id(store: BaseSessionStore) -> None:
    """An engine that names no new id goes on under the one it was given."""

    class Same(A2AEngine):
        async def generate(self, request: EngineRequest) -> Any:
            self.requests.append(request)
            return await self.inner.generate(request)

    engine = Same()
    agent = agent_of(engine)
    session: AgentSession = agent.get_session("conv_1", store=store)
    await agent.run("one", session=session)
    await agent.run("two", session=session)
    assert [sent(request) for request in engine.requests] == [["one"], ["two"]]
    assert session.service_session_id == "conv_1"


async def test_in_a_tool(store: BaseSessionStore) -> None:
    """Inside a turn, members see the session that the last reply has come to."""
    inner = ScriptedEngine([ScriptedEngine.call("look"), "done"])
    agent = agent_of(A2AEngine(inner))
    seen: list[Any] = []

    @agent.tool
    async def look(context: ToolContext) -> str:
        """Look."""
        seen.append(context.session.service_session_id)
        return "there"

    session = agent.create_session("s", store=store)
    await agent.run("go", session=session)
    assert seen == [{"contextId": "context-1", "taskId": "task-1"}]


async def test_given_id_meets_a_stored_conversation(store: BaseSessionStore) -> None:
    """A session that is made for a service's id, under the name of a conversation without it, is refused."""
    engine = A2AEngine()
    agent = agent_of(engine)
    stored = await store.get_or_create("s", agent)
    session = agent.get_session(engine.new_id(), "s", store=store)
    with pytest.raises(SessionError, match="not with the service's session"):
        await agent.run("one", session=session)
    await stored.add_message(user("still works"))
    assert engine.requests == []


# --- what others do meanwhile ---


def failing_after_its_tool(store: BaseSessionStore) -> tuple[A2AEngine, Agent, Runner]:
    """An agent whose message "go" fails once its tool has run, and goes on when it is sent again."""
    inner = ScriptedEngine(["one!", ScriptedEngine.call("look"), RuntimeError("down")], default="yes")
    engine = A2AEngine(inner)
    agent = agent_of(engine)
    agent.tool(name="look")(lambda: "there")
    return engine, agent, Runner(agent, store)


async def fail(runner: Runner) -> None:
    """Take the turn that fails."""
    await runner.run_async("s", "one")
    with pytest.raises(RuntimeError, match="down"):
        await runner.run_async("s", "go", message_id="m1")


async def test_resumed_after_another_turn(store: BaseSessionStore) -> None:
    """Where another turn has gone on at the service, a resumed one tells it what it had called, and loses nothing."""
    engine, _, runner = failing_after_its_tool(store)
    await fail(runner)
    await runner.run_async("s", "between")
    after = engine.requests[-1]
    await runner.run_async("s", "go", message_id="m1")
    last = engine.requests[-1]
    assert sent(after) == ["between"]
    assert [message.role for message in last.messages] == [Role.SYSTEM, Role.USER, Role.MODEL, Role.TOOL]
    assert sent(last)[0] == "go"
    assert last.service_session_id == {"contextId": "context-1", "taskId": "task-3"}
    assert len(next(reversed(engine.kept.values()))) == 8


async def test_resumed_after_a_message_by_hand(store: BaseSessionStore) -> None:
    """What the application has added in between reaches the service with the resumed turn."""
    engine, _, runner = failing_after_its_tool(store)
    await fail(runner)
    session = await runner.get_session("s")
    assert session is not None
    await session.add_message(user("by the way"))
    await runner.run_async("s", "go", message_id="m1")
    assert sent(engine.requests[-1])[:2] == ["by the way", "go"]


async def test_resumed_after_clearing(store: BaseSessionStore) -> None:
    """What was cleared in between stays forgotten: a resumed turn begins a new session."""
    engine, _, runner = failing_after_its_tool(store)
    await fail(runner)
    session = await runner.get_session("s")
    assert session is not None
    await session.clear_history()
    await runner.run_async("s", "go", message_id="m1")
    assert engine.requests[-1].service_session_id is None
    assert sent(engine.requests[-1])[0] == "go"


async def test_cleared_by_a_tool(store: BaseSessionStore) -> None:
    """A tool that clears the history ends the service's session: it would remember."""
    inner = ScriptedEngine(["noted", ScriptedEngine.call("forget"), "forgotten", "what secret?"])
    engine = A2AEngine(inner)
    agent = agent_of(engine)

    @agent.tool
    async def forget(context: ToolContext) -> str:
        """Forget."""
        await context.session.clear_history()
        return "done"

    session = agent.create_session("s", store=store)
    await agent.run("my secret", session=session)
    await agent.run("forget all", session=session)
    assert engine.requests[2].service_session_id is None
    assert sent(engine.requests[2])[0] == "forget all"
    await agent.run("what is it?", session=session)
    assert sent(engine.requests[3]) == ["what is it?"]
    assert "my secret" not in str(next(reversed(engine.kept.values())))


async def test_reply_without_text(store: BaseSessionStore) -> None:
    """A reply that says nothing is a reply: what came before it is not sent again."""
    engine = A2AEngine(ScriptedEngine(["hi", " "], default="yes"))
    agent = agent_of(engine)
    session = agent.create_session("s", store=store)
    for text in ("one", "two", "three"):
        await agent.run(text, session=session)
    assert [sent(request) for request in engine.requests] == [["one"], ["two"], ["three"]]


async def test_many_messages_by_hand(open_store: OpenStore) -> None:
    """Where the window has moved past what the service has seen, it is sent all that was left of the rest."""
    engine = A2AEngine()
    agent = agent_of(engine)
    session = agent.create_session("s", store=open_store(default_max_turns=2))
    await agent.run("one", session=session)
    for text in ("two", "three", "four"):
        await session.add_message(user(text))
    await agent.run("five", session=session)
    assert sent(engine.requests[-1]) == ["three", "four", "five"]
    await agent.run("six", session=session)
    assert sent(engine.requests[-1]) == ["six"]


async def test_pruned_between(open_store: OpenStore) -> None:
    """With the smallest window too, only what is new is sent."""
    engine = A2AEngine()
    agent = agent_of(engine)
    session = agent.create_session("s", store=open_store(default_max_turns=1))
    for text in ("one", "two", "three"):
        await agent.run(text, session=session)
    assert [sent(request) for request in engine.requests] == [["one"], ["two"], ["three"]]


async def test_late_result_reaches_the_service(store: BaseSessionStore) -> None:
    """A result that comes after the service was told that there is none is sent as text."""
    engine = A2AEngine()
    agent = agent_of(engine)
    session = agent.create_session("s", store=store)
    await agent.run("one", session=session)
    async with session.turn():
        await session.add_message(user("two"))
        await session.add_message(Message(Role.MODEL, tool_calls=[ToolCall(id="c1", name="look")]))
    await agent.run("three", session=session)
    result = ToolResult(tool_call_id="c1", name="look", content="LATE")
    await session.add_message(Message(Role.TOOL, tool_results=[result]))
    await agent.run("four", session=session)
    assert "LATE" in sent(engine.requests[-1])[0]
    assert sent(engine.requests[-1])[1:] == ["four"]


async def test_ids_that_a_service_uses_again(store: BaseSessionStore) -> None:
    """A result goes back under the id that the service has given its call, though it has given it before."""
    look = ToolCall(id="c1", name="look")
    engine = A2AEngine(ScriptedEngine([[look], "one!", [look], "two!"]))
    agent = agent_of(engine)
    agent.tool(name="look")(lambda: "there")
    session = agent.create_session("s", store=store)
    await agent.run("one", session=session)
    await agent.run("two", session=session)
    ids = [[r.tool_call_id for m in request.messages for r in m.tool_results] for request in engine.requests]
    assert ids == [[], ["c1"], [], ["c1"]]


async def test_copied_messages_carry_no_session(store: BaseSessionStore) -> None:
    """Messages that are copied from another conversation bring nothing of its service's session along."""
    engine = A2AEngine()
    agent = agent_of(engine)
    mine = agent.create_session("s", store=store)
    await agent.run("one", session=mine)
    other = await store.get_or_create("t", agent)
    for message in mine.history:
        await other.add_message(message)
    assert other.service_session_id is None


async def test_engine_that_names_no_service(store: BaseSessionStore) -> None:
    """An id from an engine that does not say of which service it is fails the turn, before it is bound to it."""

    class Nameless:
        async def generate(self, request: EngineRequest) -> EngineReply:
            return EngineReply(text="yes", service_session_id="resp_1")

    class Wrong(Nameless):
        def service_of(self, agent: Agent) -> int:
            return 3

    for engine, said in ((Nameless(), "needs a method"), (Wrong(), "must return a service's name, not int")):
        agent = agent_of(engine)
        session = agent.create_session("s", store=store)
        with pytest.raises(TypeError, match=said):
            await agent.run("one", session=session)
        assert list(session.history) == []
        assert session.service_session_id is None


async def test_id_that_no_engine_has_used(store: BaseSessionStore) -> None:
    """An id is not found by `get_by_service_id` before an engine has used it: nobody has said whose it is."""
    engine = A2AEngine(ScriptedEngine([RuntimeError("down")], default="yes"))
    agent = agent_of(engine)
    id_ = engine.new_id()
    engine.kept[id_key(id_)] = ()
    session = agent.get_session(id_, "s", store=store)
    with pytest.raises(RuntimeError, match="down"):
        await agent.run("one", session=session)
    assert await store.get_by_service_id(agent, id_) is None
    await agent.run("one", session=session)
    assert session.service_session_id is not None
    assert await store.get_by_service_id(agent, session.service_session_id) is session


async def test_resumed_after_the_same_number_of_others(store: BaseSessionStore) -> None:
    """Where what the service was told has been taken back, a resumed turn goes on without it."""
    engine, _, runner = failing_after_its_tool(store)
    await runner.run_async("s", "one")
    session = await runner.get_session("s")
    assert session is not None
    await session.add_message(user("draft"))
    with pytest.raises(RuntimeError, match="down"):
        await runner.run_async("s", "go", message_id="m1")
    await session.rollback_to(len(session.history) - 1)
    await session.add_message(user("corrected"))
    await runner.run_async("s", "go", message_id="m1")
    assert sent(engine.requests[-1])[:2] == ["corrected", "go"]
    assert "draft" not in str(next(reversed(engine.kept.values())))


async def test_resumed_after_a_replay_and_clearing(store: BaseSessionStore) -> None:
    """What was cleared after a replay is not taken up again by the turn that had replayed it."""
    engine, agent, _ = failing_after_its_tool(store)
    runner = Runner(agent, store, on_lost_service_session="replay")
    await runner.run_async("s", "SECRET")
    engine.forget()
    with pytest.raises(RuntimeError, match="down"):
        await runner.run_async("s", "go", message_id="m1")
    session = await runner.get_session("s")
    assert session is not None
    await session.clear_history()
    await runner.run_async("s", "go", message_id="m1")
    assert "SECRET" not in str(next(reversed(engine.kept.values())))


@pytest.mark.parametrize("does", ["adds", "clears"])
async def test_changed_while_the_model_is_asked(store: BaseSessionStore, does: str) -> None:
    """What the turn's own tasks change while the model is asked ends the service's session, which can't know of it."""
    changed: list[AgentSession] = []

    class Slow(A2AEngine):
        async def generate(self, request: EngineRequest) -> EngineReply:
            reply = await super().generate(request)
            for session in changed:
                await (session.add_message(user("LATER")) if does == "adds" else session.clear_history())
            changed.clear()
            return reply

    engine = Slow(ScriptedEngine(["one!", ScriptedEngine.call("look"), "done"], default="yes"))
    agent = agent_of(engine)

    @agent.tool
    async def look(context: ToolContext) -> str:
        """Look."""
        changed.append(context.session)
        return "there"

    session = agent.create_session("s", store=store)
    await agent.run("one", session=session)
    await agent.run("two", session=session)
    assert session.service_session_id is None
    await agent.run("three", session=session)
    kept = "".join(message.text for message in next(reversed(engine.kept.values())))
    assert ("LATER" in kept) == (does == "adds")
    assert ("one!" in kept) == (does == "adds")


async def test_window_that_moves_within_a_turn(open_store: OpenStore) -> None:
    """The results of the service's calls are sent though the window has moved past them in the same turn."""

    class Noting(ContextProvider):
        async def before_run(self, agent: Agent, session: AgentSession, context: RunContext) -> None:
            context.add_messages(user("STORED"), store=True)

    engine = A2AEngine(ScriptedEngine(["one!", ScriptedEngine.call("transfer_to_billing"), "billing here"]))
    billing = Agent("Billing", engine=engine, context_providers=[Noting()])
    support = Agent("Support", engine=engine, handoffs=[billing])
    session = support.create_session("s", store=open_store(default_max_turns=1))
    await support.run("one", session=session)
    await support.run("two", session=session)
    assert sent(engine.requests[-1]) == ["transfer_to_billing", "STORED"]


async def test_calls_that_nobody_answers(store: BaseSessionStore) -> None:
    """A service that calls tools when it was offered none is left, since it would wait for answers for ever."""
    call = ScriptedEngine.call("look")
    engine = A2AEngine(ScriptedEngine([call, call, "fresh"]))
    agent = agent_of(engine)
    agent.tool(name="look")(lambda: "there")
    runner = Runner(agent, store, max_tool_iterations=1)
    response = await runner.run_async("s", "one")
    assert response.stop_reason == "tool_limit"
    assert (await runner.run_async("s", "two")).content == "fresh"
    assert engine.requests[-1].service_session_id is None


async def test_one_id_for_life_can_not_go_back(store: BaseSessionStore) -> None:
    """A service that keeps its id is left where a checkpoint goes back behind what it has seen."""

    class Same(A2AEngine):
        async def generate(self, request: EngineRequest) -> EngineReply:
            self.requests.append(request)
            return attrs.evolve(await self.inner.generate(request), service_session_id="conv_1")

    engine = Same()
    agent = agent_of(engine)
    session = agent.create_session("s", store=store)
    await agent.run("one", session=session)
    async with session.turn():
        checkpoint = session.checkpoint()
        await session.add_message(user("no"))
        await session.rollback_to(checkpoint)
        assert session.service_session_id == "conv_1"
        turn = session.member_turn
        assert turn is not None
        assert turn.working.service is not None
        await session.add_message(user("two"))
        turn.working.go_on_at_service(turn.working.service)
        await session.rollback_to(checkpoint)
    assert session.service_session_id is None


async def test_added_once_in_a_turn(store: BaseSessionStore) -> None:
    """What a context provider adds without storing it is sent once, whatever a tool takes back in between."""

    class Noting(ContextProvider):
        async def before_run(self, agent: Agent, session: AgentSession, context: RunContext) -> None:
            context.add_messages(user("CONTEXT"))

    call = ScriptedEngine.call("look")
    engine = A2AEngine(ScriptedEngine([call, call, "done"]))
    agent = Agent("Support", engine=engine, context_providers=[Noting()])
    agent.tool(name="look")(lambda: "there")
    await agent.run("one", session=agent.create_session("s", store=store))
    assert [sent(request) for request in engine.requests] == [["CONTEXT", "one"], ["look"], ["look"]]


async def test_same_id_again(store: BaseSessionStore) -> None:
    """A session that is made for the id that its conversation has already goes on with it."""
    engine = A2AEngine()
    agent = agent_of(engine)
    session = agent.create_session("s", store=store)
    await agent.run("one", session=session)
    assert session.service_session_id is not None
    again = agent.get_session(session.service_session_id, "s", store=store)
    await agent.run("two", session=again)
    assert sent(engine.requests[-1]) == ["two"]
