from __future__ import annotations

from typing import Any

import anyio
import pytest

from chatflow.core.agent import Agent
from chatflow.core.engine import EngineRequest
from chatflow.core.memory import SessionStore
from chatflow.core.messages import AgentResponse
from chatflow.core.tools import ToolContext
from chatflow.engines.scripted import Scripted, ScriptedEngine
from chatflow.exceptions import EngineUnavailableError, MessageInProgressError, MessageMismatchError
from chatflow.runner import Runner
from chatflow.testing.conformance.conversation import PausingEngine
from tests.runs import session_of, texts

CALL = ScriptedEngine.call


async def test_delivered_again() -> None:
    """A message delivered again takes no turn and gets the stored answer, marked as a duplicate."""
    engine = ScriptedEngine([[CALL("note"), CALL("transfer_to_billing", reason="a bill")], "hello"])
    support = Agent("Support", handoffs=[Agent("Billing")])

    @support.tool
    def note() -> str:
        return "noted"

    runner = Runner(support, engine=engine)
    first = await runner.run_async("s", "hi", message_id="m1")
    again = await runner.run_async("s", "hi", {"late": True}, message_id="m1")
    assert (first.duplicate, again.duplicate) == (False, True)
    assert (again.content, again.active_agent_name, again.handoff) == ("hello", "Billing", first.handoff)
    assert again.tool_calls_executed == ("note", "transfer_to_billing")
    assert len(engine.requests) == 2
    assert (await session_of(runner)).metadata == {}


async def test_without_an_id() -> None:
    """Messages without an id are each answered."""
    runner = Runner(Agent("Support"), engine=ScriptedEngine(["one", "two"]))
    answers = [(await runner.run_async("s", "hi")).content for _ in range(2)]
    assert answers == ["one", "two"]


async def test_same_id_in_other_conversations() -> None:
    """The same id in another conversation is another message."""
    runner = Runner(Agent("Support"), engine=ScriptedEngine(["one", "two"]))
    answers = [(await runner.run_async(session, "hi", message_id="m1")).content for session in ("a", "b")]
    assert answers == ["one", "two"]


async def test_delivered_several_times_at_once() -> None:
    """Of eight deliveries at once one is answered, and the others get its answer."""
    engine = ScriptedEngine(default="hello")
    runner = Runner(Agent("Support"), engine=engine)
    responses: list[AgentResponse] = []

    async def deliver() -> None:
        responses.append(await runner.run_async("s", "hi", message_id="m1"))

    async with anyio.create_task_group() as group:
        for _ in range(8):
            group.start_soon(deliver)
    assert [response.content for response in responses] == ["hello"] * 8
    assert sorted(response.duplicate for response in responses) == [False] + [True] * 7
    assert len(engine.requests) == 1
    assert texts(await session_of(runner)) == ["hi", "hello"]


async def test_refused_while_under_way() -> None:
    """With on_duplicate="raise" a delivery of a message under way is refused at once."""
    engine = PausingEngine()
    runner = Runner(Agent("Support"), engine=engine)
    async with anyio.create_task_group() as group:
        group.start_soon(lambda: runner.run_async("s", "hi", message_id="m1"))
        await engine.asked.wait()
        with pytest.raises(MessageInProgressError):
            await runner.run_async("s", "hi", message_id="m1", on_duplicate="raise")
        engine.go_on.set()
    assert texts(await session_of(runner)) == ["hi", "answer"]


async def test_answered_before() -> None:
    """With on_duplicate="raise" a message that was answered gets its stored answer all the same."""
    runner = Runner(Agent("Support"), engine=ScriptedEngine(["hello"]))
    await runner.run_async("s", "hi", message_id="m1", on_duplicate="raise")
    again = await runner.run_async("s", "hi", message_id="m1", on_duplicate="raise")
    assert (again.content, again.duplicate) == ("hello", True)


async def test_failed_before() -> None:
    """A message whose turn failed is answered when it comes again."""
    runner = Runner(Agent("Support"), engine=ScriptedEngine([EngineUnavailableError("down", model="m"), "hello"]))
    with pytest.raises(EngineUnavailableError):
        await runner.run_async("s", "hi", message_id="m1")
    response = await runner.run_async("s", "hi", message_id="m1")
    assert (response.content, response.duplicate) == ("hello", False)


async def test_first_fails_while_others_wait() -> None:
    """Where the first delivery fails one that waited tries again, and the rest get its answer."""
    asked, go_on = anyio.Event(), anyio.Event()

    async def fail(request: EngineRequest) -> str:
        asked.set()
        await go_on.wait()
        raise LookupError("down")

    engine = ScriptedEngine([fail, "hello"])
    runner = Runner(Agent("Support"), engine=engine)
    responses: list[AgentResponse] = []

    async def deliver_first() -> None:
        with pytest.raises(LookupError):
            await runner.run_async("s", "hi", message_id="m1")

    async def deliver_again() -> None:
        responses.append(await runner.run_async("s", "hi", message_id="m1"))

    async with anyio.create_task_group() as group:
        group.start_soon(deliver_first)
        await asked.wait()
        for _ in range(3):
            group.start_soon(deliver_again)
        await anyio.wait_all_tasks_blocked()
        go_on.set()
    assert [response.content for response in responses] == ["hello"] * 3
    assert sorted(response.duplicate for response in responses) == [False, True, True]
    assert len(engine.requests) == 2


async def test_first_is_cancelled_while_another_waits() -> None:
    """Where the first delivery is cancelled the one that waited is answered."""
    engine = PausingEngine()
    runner = Runner(Agent("Support"), engine=engine)
    first = anyio.CancelScope()
    responses: list[AgentResponse] = []

    async def deliver_first() -> None:
        with first:
            await runner.run_async("s", "hi", message_id="m1")

    async def deliver_again() -> None:
        responses.append(await runner.run_async("s", "hi", message_id="m1"))

    async with anyio.create_task_group() as group:
        group.start_soon(deliver_first)
        await engine.asked.wait()
        group.start_soon(deliver_again)
        await anyio.wait_all_tasks_blocked()
        first.cancel()
        engine.go_on.set()
    assert [(response.content, response.duplicate) for response in responses] == [("answer", False)]


async def test_other_text_after_the_answer() -> None:
    """The id of an answered message with another text is refused, and nothing is run."""
    engine = ScriptedEngine(["hello"])
    runner = Runner(Agent("Support"), engine=engine)
    await runner.run_async("s", "hi", message_id="m1")
    with pytest.raises(MessageMismatchError):
        await runner.run_async("s", "bye", message_id="m1")
    assert len(engine.requests) == 1


@pytest.mark.parametrize("on_duplicate", ["response", "raise"])
async def test_other_text_while_under_way(on_duplicate: Any) -> None:
    """The id of a message under way with another text is refused at once."""
    engine = PausingEngine()
    runner = Runner(Agent("Support"), engine=engine)
    async with anyio.create_task_group() as group:
        group.start_soon(lambda: runner.run_async("s", "hi", message_id="m1"))
        await engine.asked.wait()
        with pytest.raises(MessageMismatchError):
            await runner.run_async("s", "bye", message_id="m1", on_duplicate=on_duplicate)
        engine.go_on.set()


async def test_text_that_utf8_lacks() -> None:
    """A text with lone surrogates is a message like any other."""
    runner = Runner(Agent("Support"), engine=ScriptedEngine(["hello"]))
    await runner.run_async("s", "\ud800", message_id="m1")
    assert (await runner.run_async("s", "\ud800", message_id="m1")).duplicate


async def test_marked_by_hand() -> None:
    """An id marked by hand for the conversation has no answer: the response is empty and says so."""
    runner = Runner(Agent("Support"), engine=ScriptedEngine())
    await runner.session_store.mark_message_processed("m1", session_id="s")
    response = await runner.run_async("s", "hi", message_id="m1")
    assert response == AgentResponse(content="", active_agent_name="Support", duplicate=True, stop_reason="not_stored")


async def test_marked_without_a_conversation() -> None:
    """Who marks an id without a conversation first and then runs with it is not turned away."""
    store = SessionStore()
    assert await store.mark_message_processed("m1")
    response = await Runner(Agent("Support"), store, ScriptedEngine(["hello"])).run_async("s", "hi", message_id="m1")
    assert (response.content, response.duplicate) == ("hello", False)


async def test_answer_deleted_with_its_conversation() -> None:
    """A message answered in a conversation that was deleted since is known, and its answer is not."""
    runner = Runner(Agent("Support"), engine=ScriptedEngine(["hello"]))
    await runner.run_async("s", "hi", message_id="m1")
    await runner.session_store.delete("s")
    response = await runner.run_async("s", "hi", message_id="m1")
    assert (response.content, response.duplicate, response.stop_reason) == ("", True, "not_stored")


async def test_processed_once_answered() -> None:
    """A message's id counts as processed once its turn has committed, not before."""
    engine = PausingEngine()
    runner = Runner(Agent("Support"), engine=engine)
    store = runner.session_store
    async with anyio.create_task_group() as group:
        group.start_soon(lambda: runner.run_async("s", "hi", message_id="m1"))
        await engine.asked.wait()
        assert not await store.is_message_processed("m1", session_id="s")
        engine.go_on.set()
    assert await store.is_message_processed("m1", session_id="s")


async def keys_of(runner: Runner, keys: list[str], **arguments: Any) -> list[str]:
    """The idempotency keys that the tools of a run get, which fails after them."""
    keys.clear()
    with pytest.raises(LookupError):
        await runner.run_async(**{"session_id": "s", "user_message": "hi", **arguments})
    return sorted(keys)


@pytest.fixture
def keys() -> list[str]:
    """The idempotency keys that tools were given."""
    return []


@pytest.fixture
def charging(keys: list[str]) -> Runner:
    """A runner whose model calls a tool twice with the same arguments, once more, and then fails."""
    support = Agent("Support")

    @support.tool
    async def charge(amount: int, context: ToolContext) -> str:
        keys.append(context.idempotency_key)
        return "ok"

    attempt: list[Scripted] = [
        [CALL("charge", amount=1), CALL("charge", amount=1)],
        CALL("charge", amount=1),
        LookupError,
    ]
    return Runner(support, engine=ScriptedEngine(attempt * 3))


async def test_idempotency_keys_differ(charging: Runner, keys: list[str]) -> None:
    """Each call of a turn has an idempotency key of its own, also where name and arguments are the same."""
    assert len(set(await keys_of(charging, keys, message_id="m1"))) == 3


@pytest.mark.parametrize("other", [{"message_id": "m2"}, {}])
async def test_idempotency_keys_of_another_message(charging: Runner, keys: list[str], other: dict[str, str]) -> None:
    """Another message, with an id or without, gives its calls other idempotency keys."""
    first = await keys_of(charging, keys, message_id="m1")
    second = await keys_of(charging, keys, **other)
    third = await keys_of(charging, keys)
    assert len({*first, *second, *third}) == 9


async def test_idempotency_keys_of_another_conversation(charging: Runner, keys: list[str]) -> None:
    """The same message id in another conversation gives its calls other idempotency keys."""
    first = await keys_of(charging, keys, message_id="m1")
    assert not set(first) & set(await keys_of(charging, keys, session_id="other", message_id="m1"))


@pytest.mark.parametrize("idempotent", [True, False])
async def test_interrupted_call(*, idempotent: bool) -> None:
    """A call that was interrupted is run again with the same idempotency key if its tool says so, and else not."""
    support, keys, answers = Agent("Support"), list[str](), list[EngineRequest]()

    @support.tool(idempotent=idempotent)
    async def charge(amount: int, context: ToolContext) -> str:
        keys.append(context.idempotency_key)
        if len(keys) == 1:
            raise KeyboardInterrupt
        return "charged"

    def last(request: EngineRequest) -> str:
        answers.append(request)
        return "done"

    runner = Runner(support, engine=ScriptedEngine([CALL("charge", amount=1), last]))
    with pytest.raises(KeyboardInterrupt):
        await runner.run_async("s", "hi", message_id="m1")
    assert (await runner.run_async("s", "hi", message_id="m1")).content == "done"
    (result,) = answers[0].messages[-1].tool_results
    assert (len(keys), len(set(keys)), result.is_error) == ((2, 1, False) if idempotent else (1, 1, True))
    assert idempotent or "unknown" in result.content


@pytest.mark.parametrize("change", ["renamed", "other arguments"])
async def test_interrupted_call_of_a_changed_tool(change: str) -> None:
    """A call that was interrupted, and that its tool does not take any more, is answered as interrupted."""
    answers: list[EngineRequest] = []

    def last(request: EngineRequest) -> str:
        answers.append(request)
        return "done"

    async def charge(amount: int) -> str:
        raise KeyboardInterrupt

    async def charge_card(card: str) -> str:
        return "charged"

    store, engine = SessionStore(), ScriptedEngine([CALL("charge", amount=1), last])
    before, after = Agent("Support"), Agent("Support")
    before.tool(idempotent=True)(charge)
    after.tool(charge_card, name="charge_card" if change == "renamed" else "charge", idempotent=True)
    with pytest.raises(KeyboardInterrupt):
        await Runner(before, store, engine).run_async("s", "hi", message_id="m1")
    assert (await Runner(after, store, engine).run_async("s", "hi", message_id="m1")).content == "done"
    (result,) = answers[0].messages[-1].tool_results
    assert result.is_error
    assert "interrupted" in result.content
