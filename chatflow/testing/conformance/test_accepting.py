"""Accepting a message stores it as a turn to be done."""

from __future__ import annotations

from itertools import count
from typing import Any

import anyio
import pytest

from chatflow.core.agent import Agent
from chatflow.core.backend import StoreBackend
from chatflow.core.engine import EngineRequest
from chatflow.core.messages import AgentResponse
from chatflow.core.records import Receipt
from chatflow.engines.scripted import ScriptedEngine
from chatflow.exceptions import (
    MessageDeadError,
    MessageInProgressError,
    MessageMismatchError,
    SessionConflictError,
    SessionStateError,
    StoreClosedError,
    StoreError,
)
from chatflow.runner import Runner
from chatflow.testing import Faults
from chatflow.testing.conformance.conftest import Clock, Restart
from chatflow.testing.conformance.conversation import SUPPORT, PausingEngine, outside, queued, texts, user
from chatflow.testing.conformance.stepping import CANCELLERS, MOMENTS, Moment
from chatflow.testing.conformance.work import Heard, lose_all, nothing_left, states

CALL = ScriptedEngine.call


def runner_on(store: StoreBackend, *replies: Any, name: str = "Support", **options: Any) -> Runner:
    """A runner whose model says these replies."""
    return Runner(Agent(name), store, ScriptedEngine(replies), **options)


async def said(store: StoreBackend, session_id: str = "s") -> list[str]:
    """What was said in the conversation."""
    return texts((await store.messages(session_id)).items)


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever failed is tried again without a wait."""
    for module in ("chatflow.runner", "chatflow.running.worker"):
        monkeypatch.setattr(f"{module}.delay", lambda *_: 0)


async def test_receipt(store: StoreBackend, clock: Clock) -> None:
    """An accepted message waits in its conversation, which exists from then on, and nothing of it is said yet."""
    runner = runner_on(store)
    receipt = await runner.accept("s", "hi", message_id="m", metadata={"channel": "web"})
    accepted_at = clock.now
    clock.passes(minutes=5)
    (turn,) = await store.pending_turns()
    assert receipt == Receipt(turn.turn_id, duplicate=False)
    assert (turn.session_id, turn.message_id, turn.user_message) == ("s", "m", "hi")
    assert (turn.metadata, turn.agent_name) == ({"channel": "web"}, "Support")
    assert (turn.state, turn.attempts, turn.queued_at) == ("accepted", 0, accepted_at)
    assert type(turn.state) is str
    assert turn.age.total_seconds() == 300
    session = await store.get("s")
    assert session is not None
    assert (list(session.history), dict(session.metadata), session.active_agent_name) == ([], {}, "Support")
    assert not await store.is_message_processed("m", session_id="s")


async def test_delivered_again_while_it_waits(store: StoreBackend) -> None:
    """A message accepted twice waits once."""
    runner = runner_on(store)
    first = await runner.accept("s", "hi", message_id="m")
    again = await runner.accept("s", "hi", message_id="m", metadata={"late": True})
    assert again == Receipt(first.turn_id, duplicate=True)
    (turn,) = await store.pending_turns()
    assert turn.metadata == {}


async def test_delivered_again_many_times_at_once(store: StoreBackend) -> None:
    """Of several deliveries at once one is accepted and the others are its duplicates."""
    runner, receipts = runner_on(store), list[Receipt]()

    async def accept() -> None:
        receipts.append(await runner.accept("s", "hi", message_id="m"))

    async with anyio.create_task_group() as group:
        for _ in range(8):
            group.start_soon(accept)
    assert sorted(receipt.duplicate for receipt in receipts) == [False] + [True] * 7
    assert len({receipt.turn_id for receipt in receipts}) == 1


async def test_delivered_again_after_the_answer(store: StoreBackend) -> None:
    """A message that was answered is a duplicate without a turn."""
    runner = runner_on(store, "hello")
    await runner.run_async("s", "hi", message_id="m")
    assert await runner.accept("s", "hi", message_id="m") == Receipt(None, duplicate=True)
    assert await store.pending_turns() == ()


async def test_marked_by_hand(store: StoreBackend) -> None:
    """A message whose id was marked by hand needs no turn."""
    await store.mark_message_processed("m", session_id="s")
    assert await runner_on(store).accept("s", "hi", message_id="m") == Receipt(None, duplicate=True)
    assert await store.pending_turns() == ()


async def test_answered_in_a_deleted_conversation(store: StoreBackend) -> None:
    """A message answered in a conversation that was deleted since needs no turn."""
    runner = runner_on(store, "hello")
    await runner.run_async("s", "hi", message_id="m")
    await store.delete("s")
    assert await runner.accept("s", "hi", message_id="m") == Receipt(None, duplicate=True)


async def test_answered_turn_that_waits_to_be_told(store: StoreBackend) -> None:
    """A message whose answer nobody has been told yet is a duplicate of an answered one."""
    runner = runner_on(store, "hello")
    await runner.accept("s", "hi", message_id="m")
    await runner.run_async("s", "hi", message_id="m")
    assert await runner.accept("s", "hi", message_id="m") == Receipt(None, duplicate=True)


async def test_accepted_while_it_runs(store: StoreBackend) -> None:
    """A message that somebody runs becomes accepted: when it fails, its caller is told and a worker tries again."""
    failing, go_on = anyio.Event(), anyio.Event()

    async def fail_later(request: EngineRequest) -> str:
        failing.set()
        await go_on.wait()
        raise LookupError

    engine = ScriptedEngine([fail_later, "hello"])
    runner, heard = Runner(Agent("Support"), store, engine), Heard()

    async def run() -> None:
        with pytest.raises(LookupError):
            await runner.run_async("s", "hi", message_id="m")

    async with anyio.create_task_group() as group:
        group.start_soon(run)
        await failing.wait()
        (running,) = await store.pending_turns()
        assert await runner.accept("s", "hi", message_id="m") == Receipt(running.turn_id, duplicate=True)
        go_on.set()
    assert await states(store) == [("m", "accepted", 1)]
    async with runner.working(heard):
        assert await heard.of(1) == [("s", "hello")]
    assert await said(store) == ["hi", "hello"]


async def test_accepted_while_it_runs_and_answered(store: StoreBackend) -> None:
    """A message accepted while it runs is answered to its caller, and `on_response` hears of it too."""
    engine, heard = PausingEngine(), Heard()
    runner, responses = Runner(Agent("Support"), store, engine), list[AgentResponse]()

    async def run() -> None:
        responses.append(await runner.run_async("s", "hi", message_id="m"))

    async with anyio.create_task_group() as group:
        group.start_soon(run)
        await engine.asked.wait()
        await runner.accept("s", "hi", message_id="m")
        engine.go_on.set()
    async with runner.working(heard):
        assert await heard.of(1) == [("s", "answer")]
    assert (responses[0].content, responses[0].duplicate) == ("answer", False)


async def test_accepted_after_a_failure(store: StoreBackend) -> None:
    """A message that failed and is then accepted takes a new place, with its journal."""
    agent, called = Agent("Support"), list[str]()

    @agent.tool
    async def charge() -> str:
        called.append("charge")
        return "charged"

    runner = Runner(agent, store, ScriptedEngine([CALL("charge"), LookupError, "hello"]))
    with pytest.raises(LookupError):
        await runner.run_async("s", "hi", message_id="m")
    (told,) = await store.pending_turns()
    receipt = await runner.accept("s", "hi", message_id="m")
    assert receipt.turn_id is not None
    assert (receipt.duplicate, receipt.turn_id > told.turn_id) == (False, True)
    assert await states(store) == [("m", "accepted", 0)]
    heard = Heard()
    async with runner.working(heard):
        assert await heard.of(1) == [("s", "hello")]
    assert called == ["charge"]


async def test_accepted_while_interrupted(store: StoreBackend) -> None:
    """What is left of a turn whose process is gone can be accepted, and keeps its place."""

    async def lose(request: EngineRequest) -> str:
        await outside(lose_all(store))
        return "nobody hears this"

    runner, heard = runner_on(store, lose, "hello"), Heard()
    with pytest.raises(SessionConflictError):
        await runner.run_async("s", "hi", message_id="m")
    (turn,) = await store.pending_turns()
    assert await runner.accept("s", "hi", message_id="m") == Receipt(turn.turn_id, duplicate=True)
    async with runner.working(heard):
        assert await heard.of(1) == [("s", "hello")]


async def test_other_text(store: StoreBackend) -> None:
    """The id of a message in any state with another text is refused, and changes nothing."""
    engine = PausingEngine()
    runner = runner_on(store, LookupError, "hello")
    await runner.accept("accepted", "hi", message_id="m")
    with pytest.raises(LookupError):
        await runner.run_async("told", "hi", message_id="m")
    await runner.run_async("answered", "hi", message_id="m")
    async with anyio.create_task_group() as group:
        pausing = Runner(Agent("Support"), store, engine)
        group.start_soon(lambda: pausing.run_async("running", "hi", message_id="m"))
        await engine.asked.wait()
        before = await states(store)
        for session_id in ("accepted", "running", "told", "answered"):
            with pytest.raises(MessageMismatchError) as caught:
                await runner.accept(session_id, "bye", message_id="m")
            assert (caught.value.session_id, caught.value.message_id) == (session_id, "m")
        assert await states(store) == before
        engine.go_on.set()
    assert sorted(await states(store)) == [("m", "accepted", 0), ("m", "told", 0)]


async def test_dead(store: StoreBackend) -> None:
    """A message that was given up is not accepted again."""
    runner, heard = runner_on(store, LookupError, max_attempts=1), Heard()
    await runner.accept("s", "hi", message_id="m")
    with pytest.raises(LookupError):
        await runner.run_async("s", "hi", message_id="m")
    assert await states(store) == [("m", "dead", 1)]
    with pytest.raises(MessageDeadError) as caught:
        await runner.accept("s", "hi", message_id="m")
    assert (caught.value.session_id, caught.value.message_id, caught.value.attempts) == ("s", "m", 1)
    with pytest.raises(MessageMismatchError):
        await runner.accept("s", "bye", message_id="m")
    async with runner.working(heard):
        await runner_on(store, "next answer").run_async("s", "next")
    assert (await said(store), heard.calls) == (["next", "next answer"], 0)


@pytest.mark.parametrize("where", ["turn", "tool"])
async def test_inside_a_turn(store: StoreBackend, where: str) -> None:
    """Accepting waits for no turn: inside one, also of the same conversation, the message comes after it."""
    agent, heard = Agent("Support"), Heard()
    runner: Runner = Runner(agent, store, ScriptedEngine([CALL("accept"), "first answer"] if where == "tool" else []))

    @agent.tool
    async def accept() -> str:
        await runner.accept("s", "second", message_id="m2")
        return "accepted"

    if where == "tool":
        await runner.run_async("s", "first")
    else:
        async with (await store.get_or_create("s", agent)).turn() as session:
            await session.add_message(user("first"))
            await runner.accept("s", "second", message_id="m2")
    async with runner_on(store, "second answer").working(heard):
        assert await heard.of(1) == [("s", "second answer")]
    found = await said(store)
    assert (found[0], found[-2:]) == ("first", ["second", "second answer"])


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"session_id": ""}, ValueError),
        ({"session_id": 1}, TypeError),
        ({"message_id": ""}, ValueError),
        ({"message_id": None}, TypeError),
        ({"user_message": None}, TypeError),
        ({"metadata": {"x": object()}}, SessionStateError),
        ({"metadata": {1: 2}}, SessionStateError),
    ],
)
async def test_bad_arguments(store: StoreBackend, arguments: dict[str, Any], error: type[Exception]) -> None:
    """What can't be a message is refused, and nothing is stored."""
    usual: dict[str, Any] = {"session_id": "s", "user_message": "hi", "message_id": "m"}
    with pytest.raises(error):
        await runner_on(store).accept(**(usual | arguments))
    assert await store.pending_turns() == ()
    assert await store.get("s") is None


async def test_closed(store: StoreBackend) -> None:
    """A closed store accepts nothing."""
    await store.aclose()
    with pytest.raises(StoreClosedError):
        await runner_on(store).accept("s", "hi", message_id="m")


async def test_after_a_restart(store: StoreBackend, restart: Restart) -> None:
    """An accepted message is still there after a restart, with all that was said about it."""
    await runner_on(store).accept("s", "hi", message_id="m", metadata={"x": (1, 2)})
    store, heard = await restart(store), Heard()
    async with runner_on(store, "hello").working(heard):
        assert await heard.of(1) == [("s", "hello")]
    session = await store.get("s")
    assert session is not None
    assert (texts(session.history), session.metadata) == (["hi", "hello"], {"x": (1, 2)})


# --- whoever comes next does it first ---


async def test_done_before_the_next_turn(store: StoreBackend) -> None:
    """The next runner of the conversation does accepted messages in their order, then its own."""
    runner = runner_on(store, "one!", "two!", "three!", "four!")
    await runner.accept("s", "one", message_id="m1", metadata={"of": "one"})
    await runner.accept("s", "two", message_id="m2")
    assert (await runner.run_async("s", "three")).content == "three!"
    assert await said(store) == ["one", "one!", "two", "two!", "three", "three!"]
    assert (await runner.run_async("s", "one", message_id="m1")).content == "one!"
    heard = Heard()
    async with runner.working(heard):
        await heard.of(2)
    assert heard.contents() == ["one!", "two!"]


async def test_its_error_is_not_shown(store: StoreBackend, caplog: pytest.LogCaptureFixture) -> None:
    """Whoever does an accepted message first is not told of its errors: it is tried again, and then given up."""
    runner = runner_on(store, LookupError, LookupError, "second answer", max_attempts=2)
    await runner.accept("s", "first", message_id="m")
    assert (await runner.run_async("s", "second")).content == "second answer"
    assert await said(store) == ["second", "second answer"]
    assert await states(store) == [("m", "dead", 2)]
    assert "done before the next one, failed; it is tried again" in caplog.text


async def test_its_error_is_not_shown_and_it_is_tried_again(store: StoreBackend) -> None:
    """An accepted message that fails once is answered before the next one nevertheless."""
    runner = runner_on(store, LookupError, "first answer", "second answer")
    await runner.accept("s", "first", message_id="m")
    assert (await runner.run_async("s", "second")).content == "second answer"
    assert await said(store) == ["first", "first answer", "second", "second answer"]


async def test_its_doer_is_cancelled(store: StoreBackend) -> None:
    """Whoever is cancelled while doing an accepted message leaves it without a holder, and no attempt is counted."""
    engine = PausingEngine()
    runner, other = Runner(Agent("Support"), store, engine), runner_on(store, "first!", "third!")
    await runner.accept("s", "first", message_id="m")
    async with anyio.create_task_group() as group:

        async def run() -> None:
            await runner.run_async("s", "second", message_id="m2")

        group.start_soon(run)
        await engine.asked.wait()
        group.cancel_scope.cancel()
    assert await states(store) == [("m", "accepted", 0), ("m2", "told", 0)]
    assert (await other.run_async("s", "third")).content == "third!"
    assert await said(store) == ["first", "first!", "third", "third!"]


async def test_its_own_message(store: StoreBackend) -> None:
    """Who sends an accepted message gets its answer, in its place in the line."""
    runner, heard = runner_on(store, "one!", "two!"), Heard()
    await runner.accept("s", "one", message_id="m1")
    await runner.accept("s", "two", message_id="m2")
    response = await runner.run_async("s", "two", message_id="m2")
    assert (response.content, response.duplicate) == ("two!", False)
    async with runner.working(heard):
        await heard.of(2)
    assert heard.contents() == ["one!", "two!"]
    assert await said(store) == ["one", "one!", "two", "two!"]


async def test_bare_turns_pass(store: StoreBackend) -> None:
    """Turns without a runner pass accepted messages by."""
    await runner_on(store).accept("s", "first", message_id="m")
    session = await store.get_or_create("s", SUPPORT)
    await session.add_message(user("bare"))
    assert await said(store) == ["bare"]
    assert await states(store) == [("m", "accepted", 0)]


async def test_other_applications_pass(store: StoreBackend) -> None:
    """Runners of another starting agent pass accepted messages by, and can't take them."""
    heard = Heard()
    await runner_on(store).accept("s", "first", message_id="m")
    other = runner_on(store, "other answer", name="Other")
    assert (await other.run_async("s", "second")).content == "other answer"
    with pytest.raises(MessageInProgressError):
        await other.run_async("s", "first", message_id="m")
    async with other.working(heard):
        assert (await runner_on(store, "third", name="Third").run_async("t", "x")).content == "third"
    assert (await states(store), heard.calls) == ([("m", "accepted", 0)], 0)
    assert await said(store) == ["second", "other answer"]


async def test_waits_behind_a_running_turn(store: StoreBackend) -> None:
    """A message accepted while another runs is done after it, and before one that came later."""
    engine, heard = PausingEngine(), Heard()
    runner = Runner(Agent("Support"), store, engine)
    async with anyio.create_task_group() as group:
        group.start_soon(runner.run_async, "s", "first")
        await engine.asked.wait()
        await runner.accept("s", "second", message_id="m")
        group.start_soon(runner.run_async, "s", "third")
        await queued(store, 1)
        engine.go_on.set()
    assert [text for text in await said(store) if text != "answer"] == ["first", "second", "third"]
    async with runner.working(heard):
        await heard.of(1)
    await nothing_left(store)


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("canceller", CANCELLERS)
async def test_its_doer_is_cancelled_at_any_step(store: StoreBackend, canceller: str, moment: Moment) -> None:
    """Wherever a run is cancelled that does an accepted message first, that message is free or done."""
    for step in count():
        agent, called, session_id = Agent("Support"), list[str](), f"s{step}"

        @agent.tool(idempotent=True)
        async def charge(called: list[str] = called) -> str:
            called.append("charge")
            return "charged"

        def answer(request: EngineRequest) -> Any:
            said = request.messages[-1]
            return CALL("charge") if said.text == "first" else f"{said.text}!"

        runner = Runner(agent, store, ScriptedEngine(default=answer))
        await runner.accept(session_id, "first", message_id="m1")

        async def run(runner: Runner = runner, session_id: str = session_id) -> AgentResponse:
            return await runner.run_async(session_id, "second", message_id="m2")

        cancelled = await CANCELLERS[canceller](run, step, moment)
        left = {turn.message_id: turn.state for turn in await store.pending_turns() if turn.session_id == session_id}
        assert left.get("m1", "accepted") in {"accepted", "interrupted", "answered"}
        assert left.get("m2", "told") == "told"
        assert (await run()).content == "second!"
        assert called == ["charge"]
        found = [text for text in await said(store, session_id) if not text.startswith("call")]
        assert found == ["first", "!", "second", "second!"]
        assert {state for _, state, _ in await states(store)} == {"answered"}
        if not cancelled:
            break


async def test_storage_fails_while_it_is_done_first(store: StoreBackend) -> None:
    """Where the storage fails, whoever does an accepted message first is told of it, and the message waits."""
    runner = runner_on(store, "first!", "first!", "second!")
    await runner.accept("s", "first", message_id="m")
    Faults(store).before("commit_turn", StoreError("the disk is full", store=store.name))
    with pytest.raises(StoreError):
        await runner.run_async("s", "second")
    assert (await runner.run_async("s", "second")).content == "second!"
    assert await said(store) == ["first", "first!", "second", "second!"]


async def test_marked_while_it_waits(store: StoreBackend) -> None:
    """An accepted message that is marked by hand meanwhile is answered all the same, once, and its answer is kept."""
    runner = runner_on(store, "hello", "one more")
    await runner.accept("s", "hi", message_id="m")
    assert await store.mark_message_processed("m", session_id="s") is True
    await runner.run_async("s", "another")
    heard = Heard()
    async with runner.working(heard):
        assert await heard.of(1) == [("s", "hello")]
    again = await runner.run_async("s", "hi", message_id="m")
    assert (again.content, again.duplicate) == ("hello", True)
    assert await said(store) == ["hi", "hello", "another", "one more"]
