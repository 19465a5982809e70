"""A turn with a message id goes on where it was broken off."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from itertools import count
from typing import Any

import anyio
import pytest
from hypothesis import given, settings

from chatflow.core.agent import Agent
from chatflow.core.backend import StoreBackend
from chatflow.core.engine import EngineReply, EngineRequest
from chatflow.core.messages import AgentResponse, Role, ToolResult
from chatflow.core.tools import ToolContext
from chatflow.engines.scripted import ScriptedEngine
from chatflow.exceptions import MessageDeadError, MessageMismatchError, SessionConflictError, StoreError
from chatflow.runner import Runner
from chatflow.testing import Faults
from chatflow.testing.conformance.attempts import (
    KINDS,
    UNTIMED,
    Attempts,
    Break,
    Broken,
    Kind,
    Reply,
    Script,
    plans,
    said,
    scripts,
)
from chatflow.testing.conformance.conftest import Clock, Restart
from chatflow.testing.conformance.conversation import model, outside, stored, texts, user
from chatflow.testing.conformance.stepping import CANCELLERS, MOMENTS, Moment

CALL = ScriptedEngine.call

numbers = count()


async def outcome(
    store: StoreBackend, replies: Sequence[Reply], plan: Sequence[Break]
) -> tuple[dict[str, Any], Script, Attempts]:
    """What a turn comes to whose attempts are broken off as planned, and how it came to it."""
    session_id, attempts = f"s{next(numbers)}", Attempts(plan)
    script = Script(replies, attempts)
    session = await store.get_or_create(session_id, script.agent, {"a": "first"})
    session.state["a"] = "first"
    async with session.turn():
        await session.add_message(user("before"))
        await session.add_message(model("before!"))
    runner = Runner(script.agent, store, tool_timeout=None)
    response = await attempts.until_done(lambda: runner.run_async(session_id, "hi", {"noted": 1}, message_id="m"))
    left = await stored(store, session_id)
    assert left is not None
    assert await store.pending_turns() == ()
    return {**left, "history": said(left["history"]), "response": response}, script, attempts


@given(replies=scripts(), plan=plans)
@settings(UNTIMED, max_examples=60)
async def test_broken_off_anywhere(store: StoreBackend, replies: list[Reply], plan: list[Break]) -> None:
    """However often a turn is broken off, wherever and however, it comes to what it would have come to at once."""
    wanted, whole, _ = await outcome(store, replies, [])
    found, script, _ = await outcome(store, replies, plan)
    assert found == wanted
    assert script.given == whole.given == len(replies)
    assert script.ended == whole.ended
    assert all(len(keys) == 1 for keys in script.keys.values())


# --- at every step ---


async def nothing(_: object) -> None:
    """Happens where a test puts nothing in."""


class Shop:
    """A model that asks for two calls at once, then for one, then answers; and tools that note what they did."""

    def __init__(self, *, idempotent: bool = False) -> None:
        self.asked: list[int] = []
        self.begun: list[str] = []
        self.ended: list[str] = []
        self.keys: dict[str, set[str]] = {}
        self.before_asking: Callable[[EngineRequest], Awaitable[None]] = nothing
        self.before_ordering: Callable[[str], Awaitable[None]] = nothing
        self.agent = Agent("Support", engine=self)
        self.agent.tool(idempotent=idempotent)(self.order)

    async def generate(self, request: EngineRequest) -> EngineReply:
        """The reply that is due, by the calls that were answered."""
        await self.before_asking(request)
        answered = sum(message.role is Role.TOOL for message in request.messages)
        self.asked.append(answered)
        calls = [["tea", "milk"], ["bill"]][answered : answered + 1]
        if not calls:
            return EngineReply(text="done", usage={"tokens": 1})
        made = [CALL("order", item=item) for item in calls[0]]
        return await ScriptedEngine([EngineReply(tool_calls=made, usage={"tokens": 1})]).generate(request)

    async def order(self, item: str, context: ToolContext) -> str:
        """Order it."""
        self.begun.append(item)
        self.keys.setdefault(item, set()).add(context.idempotency_key)
        await self.before_ordering(item)
        context.session.state[item] = [1]
        self.ended.append(item)
        return f"{item} ordered"


HISTORY = ["hi", "tea,milk", "tea ordered,milk ordered", "bill", "bill ordered", "done"]


async def history(store: StoreBackend, session_id: str = "s") -> list[str]:
    """What was said in the conversation; calls by what they order, results by what they say."""
    shown: list[str] = []
    for message in (await store.messages(session_id)).items:
        ordered = [str(each.args["item"]) for each in message.tool_calls]
        found = [str(each.content) for each in message.tool_results]
        shown.append(message.text or ",".join(ordered or found))
    return shown


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("canceller", CANCELLERS)
async def test_plain_calls_cancelled_at_any_step(store: StoreBackend, canceller: str, moment: Moment) -> None:
    """Wherever a turn was cancelled, no plain call is made twice, and the model is told of each whether it is known."""
    for step in count():
        shop, session_id = Shop(), f"s{step}"
        runner = Runner(shop.agent, store)

        async def run(runner: Runner = runner, session_id: str = session_id) -> AgentResponse:
            return await runner.run_async(session_id, "hi", message_id="m")

        cancelled = await CANCELLERS[canceller](run, step, moment)
        assert (await run()).content == "done"
        found = results_of((await store.messages(session_id)).items)
        known = [str(result.content).removesuffix(" ordered") for result in found if not result.is_error]
        assert len(found) == 3
        assert sorted(shop.begun) == sorted(shop.ended) == sorted(known)
        session = await store.get(session_id)
        assert session is not None
        assert sorted(session.state) == sorted(known)
        if not cancelled:
            break


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("canceller", CANCELLERS)
async def test_cancelled_at_any_step(store: StoreBackend, canceller: str, moment: Moment) -> None:
    """A turn cancelled at any of its steps goes on when its message is sent again: no call is made a second time."""
    for step in count():
        shop, session_id = Shop(idempotent=True), f"s{step}"
        runner = Runner(shop.agent, store)

        async def run(runner: Runner = runner, session_id: str = session_id) -> AgentResponse:
            return await runner.run_async(session_id, "hi", {"noted": 1}, message_id="m")

        cancelled = await CANCELLERS[canceller](run, step, moment)
        response = await run()
        assert (response.content, response.usage) == ("done", {"tokens": 3})
        assert response.tool_calls_executed == ("order", "order", "order")
        assert await history(store, session_id) == HISTORY
        assert (sorted(shop.ended), len(shop.begun)) == (["bill", "milk", "tea"], 3)
        session = await store.get(session_id)
        assert session is not None
        assert (session.state, session.metadata) == ({"tea": [1], "milk": [1], "bill": [1]}, {"noted": 1})
        assert await store.pending_turns() == ()
        if not cancelled:
            break


# --- calls that had not ended ---


def breaking(shop: Shop, item: str, kind: Kind) -> Attempts:
    """Attempts of which the first is broken off inside the call for *item*."""
    attempts = Attempts([Break(1, 8, kind)])

    async def happens(called: str) -> None:
        if called == item:
            await attempts.point()

    shop.before_ordering = happens
    return attempts


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("item", ["tea", "milk", "bill"])
async def test_idempotent_call_runs_again(store: StoreBackend, item: str, kind: Kind) -> None:
    """A call that had not ended runs again with the same key if its tool says so; those beside it do not."""
    shop = Shop(idempotent=True)
    attempts, runner = breaking(shop, item, kind), Runner(shop.agent, store)
    await attempts.until_done(lambda: runner.run_async("s", "hi", message_id="m"))
    assert attempts.broken == 1
    assert await history(store) == HISTORY
    assert sorted(shop.begun) == sorted(["bill", "milk", "tea", item])
    assert sorted(shop.ended) == ["bill", "milk", "tea"]
    assert [len(keys) for keys in shop.keys.values()] == [1, 1, 1]
    assert shop.asked == [0, 1, 2]


@pytest.mark.parametrize("kind", KINDS)
async def test_plain_call_does_not_run_again(store: StoreBackend, kind: Kind) -> None:
    """A call that had not ended is answered as interrupted, its outcome unknown, and its tool not run again."""
    shop = Shop()
    attempts, runner = breaking(shop, "milk", kind), Runner(shop.agent, store)
    await attempts.until_done(lambda: runner.run_async("s", "hi", message_id="m"))
    assert (sorted(shop.begun), sorted(shop.ended)) == (["bill", "milk", "tea"], ["bill", "tea"])
    found = [result for message in (await store.messages("s")).items for result in message.tool_results]
    assert [result.is_error for result in found] == [False, True, False]
    assert "interrupted" in found[1].content
    assert "unknown" in found[1].content
    session = await store.get("s")
    assert session is not None
    assert session.state == {"tea": [1], "bill": [1]}


async def test_answer_to_an_interrupted_call_is_noted(store: StoreBackend) -> None:
    """That a call was interrupted is itself noted: an attempt after that tells the model the same."""
    shop, failures = Shop(), iter([LookupError, LookupError])
    attempts, runner = breaking(shop, "tea", "error"), Runner(shop.agent, store)

    async def fail_after_calls(request: EngineRequest) -> None:
        error = next(failures, None) if request.messages[-1].role is Role.TOOL else None
        if error is not None:
            raise error

    shop.before_asking = fail_after_calls
    with pytest.raises(LookupError):
        await attempts.until_done(lambda: runner.run_async("s", "hi", message_id="m"))
    with pytest.raises(LookupError):
        await runner.run_async("s", "hi", message_id="m")
    await runner.run_async("s", "hi", message_id="m")
    assert sorted(shop.begun) == ["bill", "milk", "tea"]
    assert shop.asked == [0, 1, 2]


async def test_timed_out(store: StoreBackend) -> None:
    """A turn that took too long goes on when its message is sent again."""
    shop = Shop(idempotent=True)
    hangs = True

    async def happens(item: str) -> None:
        if hangs and item == "bill":
            await anyio.sleep_forever()

    shop.before_ordering = happens
    seconds = 0.1
    while "bill" not in shop.begun:
        # However slow the machine is: a turn that ended before that is not what is looked at.
        await store.delete("s")
        shop.begun.clear()
        seconds *= 2
        with pytest.raises(TimeoutError):
            await Runner(shop.agent, store, turn_timeout=seconds).run_async("s", "hi", message_id="m")
    hangs = False
    await Runner(shop.agent, store).run_async("s", "hi", message_id="m")
    assert await history(store) == HISTORY
    assert sorted(shop.begun) == ["bill", "bill", "milk", "tea"]
    assert len(shop.keys["bill"]) == 1


async def test_values_of_a_resumed_turn_are_frozen(store: StoreBackend) -> None:
    """What a tool has put into the state is as unchangeable in a turn that goes on as in any other."""
    shop = Shop()
    attempts, runner = breaking(shop, "bill", "error"), Runner(shop.agent, store)
    await attempts.until_done(lambda: runner.run_async("s", "hi", message_id="m"))
    session = await store.get("s")
    assert session is not None
    with pytest.raises(TypeError):
        session.state["tea"].append(2)


async def test_conversation_inside_a_tool(store: StoreBackend) -> None:
    """A turn that goes on leaves to other conversations what its tools did to them."""
    agent = Agent("Support")
    inner = Runner(Agent("Inner"), store, ScriptedEngine(default="inner answer"))

    @agent.tool
    async def delegate() -> str:
        other = await store.get_or_create("other", agent)
        other.state["x"] = 1
        await other.save()
        return (await inner.run_async("inner", "from a tool")).content

    runner = Runner(agent, store, ScriptedEngine([CALL("delegate"), LookupError, "done"]))
    with pytest.raises(LookupError):
        await runner.run_async("s", "hi", message_id="m")
    await runner.run_async("s", "hi", message_id="m")
    session = await store.get("s")
    assert session is not None
    assert [message.role for message in session.history] == [Role.USER, Role.MODEL, Role.TOOL, Role.MODEL]
    assert session.state == {}


async def test_handoff_is_made_again(store: StoreBackend) -> None:
    """A handoff that was noted is made again, and counts again."""
    billing = Agent("Billing", engine=ScriptedEngine([LookupError, CALL("transfer_to_support"), "done"]))
    support = Agent("Support", handoffs=[billing], engine=ScriptedEngine([CALL("transfer_to_billing")]))
    billing.add_handoff(support)
    runner = Runner(support, store, max_handoffs_per_turn=1)
    with pytest.raises(LookupError):
        await runner.run_async("s", "hi", message_id="m")
    response = await runner.run_async("s", "hi", message_id="m")
    assert (response.content, response.active_agent_name) == ("done", "Billing")
    assert response.handoff is not None
    assert response.handoff.target_agent_name == "Billing"
    found = [result for message in (await store.messages("s")).items for result in message.tool_results]
    assert [result.is_error for result in found] == [False, True]


async def test_calls_belong_to_the_agent_that_made_them(store: StoreBackend) -> None:
    """A call that runs again is made with the tools of the agent that had asked for it, whoever answers by now."""
    billing = Agent("Billing", engine=ScriptedEngine(["billing answers"]))
    support, called = Agent("Support", handoffs=[billing], engine=ScriptedEngine([CALL("charge")])), list[str]()

    @support.tool(idempotent=True)
    def charge() -> str:
        called.append("charge")
        if len(called) == 1:
            raise Broken
        return "charged"

    runner = Runner(support, store)
    with pytest.raises(Broken):
        await runner.run_async("s", "hi", message_id="m")
    session = await store.get("s")
    assert session is not None
    await session.set_active_agent(billing)
    assert (await runner.run_async("s", "hi", message_id="m")).content == "billing answers"
    assert [result.content for result in results_of(session.history)] == ["charged"]


# --- told ---


async def fail(runner: Runner, **details: Any) -> None:
    """A run of a message that fails."""
    with pytest.raises(LookupError):
        await runner.run_async("s", "hi", **({"message_id": "m"} | details))


async def test_steps_aside(store: StoreBackend) -> None:
    """A turn whose caller was told steps aside: others go on, and sent again it comes after them, on what they left."""
    agent = Agent("Support")

    @agent.tool
    async def note(context: ToolContext) -> str:
        context.session.state["mine"] = context.session.state["both"] = "first"
        return "noted"

    runner = Runner(agent, store, ScriptedEngine([CALL("note"), LookupError, "second answer", "first answer"]))
    await fail(runner)
    session = await store.get("s")
    assert session is not None
    assert (list(session.history), dict(session.state)) == ([], {})
    async with session.turn():
        session.state["theirs"] = session.state["both"] = "bare"
    assert (await runner.run_async("s", "second")).content == "second answer"
    assert (await runner.run_async("s", "hi", message_id="m")).content == "first answer"
    assert texts(session.history)[0:3] == ["second", "second answer", "hi"]
    assert session.state == {"mine": "first", "theirs": "bare", "both": "first"}


async def test_told_ends_do_not_count(store: StoreBackend) -> None:
    """A message may fail any number of times, as long as its caller is told each time."""
    runner = Runner(Agent("Support"), store, ScriptedEngine([LookupError] * 4 + ["done"]), max_attempts=2)
    for _ in range(4):
        await fail(runner)
        (turn,) = await store.pending_turns()
        assert (turn.state, turn.attempts, turn.message_id, turn.user_message) == ("told", 0, "m", "hi")
    assert (await runner.run_async("s", "hi", message_id="m")).content == "done"
    assert await store.pending_turns() == ()


async def test_other_text_after_a_failure(store: StoreBackend) -> None:
    """The id of a message that failed with another text is refused, and the message can still be sent again."""
    runner = Runner(Agent("Support"), store, ScriptedEngine([LookupError, "done"]))
    await fail(runner)
    with pytest.raises(MessageMismatchError):
        await runner.run_async("s", "bye", message_id="m")
    assert (await runner.run_async("s", "hi", message_id="m")).content == "done"


async def test_duplicates_of_a_message_that_fails(store: StoreBackend) -> None:
    """Of the deliveries that wait for one that fails, one goes on with its turn, and the others get its answer."""
    agent, failing, go_on, called = Agent("Support"), anyio.Event(), anyio.Event(), list[str]()

    @agent.tool
    async def charge() -> str:
        called.append("charge")
        return "charged"

    async def fail_later(request: EngineRequest) -> str:
        failing.set()
        await go_on.wait()
        raise LookupError

    engine = ScriptedEngine([CALL("charge"), fail_later, "done"])
    runner = Runner(agent, store, engine)
    responses: list[AgentResponse] = []

    async def again() -> None:
        responses.append(await runner.run_async("s", "hi", message_id="m"))

    async with anyio.create_task_group() as group:
        group.start_soon(fail, runner)
        await failing.wait()
        for _ in range(3):
            group.start_soon(again)
        await anyio.wait_all_tasks_blocked()
        go_on.set()
    assert [response.content for response in responses] == ["done"] * 3
    assert sorted(response.duplicate for response in responses) == [False, True, True]
    assert (called, len(engine.requests)) == (["charge"], 3)


# --- interrupted ---


async def lose_all(store: StoreBackend) -> None:
    """Interrupt every turn that anybody holds, as a watcher does whose beats they have not kept up with."""
    for beat in (await store.beat_turns(frozenset(), frozenset(), everything=True)).others:
        assert await store.interrupt_turn(beat)


async def test_gone_holders_count(store: StoreBackend) -> None:
    """A message is dead once it was started as often as it may be with nobody told; the conversation goes on."""

    async def lose(request: EngineRequest) -> str:
        await outside(lose_all(store))
        return "nobody hears this"

    engine = ScriptedEngine([lose, lose], default="hello")
    runner = Runner(Agent("Support"), store, engine, max_attempts=2)
    for attempts in (1, 2):
        with pytest.raises(SessionConflictError):
            await runner.run_async("s", "hi", message_id="m")
        (turn,) = await store.pending_turns()
        assert (turn.state, turn.attempts) == ("interrupted", attempts)
    with pytest.raises(MessageDeadError) as caught:
        await runner.run_async("s", "hi", message_id="m")
    assert (caught.value.session_id, caught.value.message_id, caught.value.attempts) == ("s", "m", 2)
    with pytest.raises(MessageDeadError):
        await runner.run_async("s", "hi", message_id="m")
    with pytest.raises(MessageMismatchError):
        await runner.run_async("s", "bye", message_id="m")
    (turn,) = await store.pending_turns()
    assert (turn.state, turn.attempts) == ("dead", 2)
    assert (await runner.run_async("s", "next")).content == "hello"
    assert texts((await store.messages("s")).items) == ["next", "hello"]


async def test_interrupted_turn_is_done_first(store: StoreBackend) -> None:
    """The conversation's next runner finishes an interrupted turn before its own, and the answer is kept for it."""
    agent, called = Agent("Support"), list[str]()

    @agent.tool
    async def charge() -> str:
        called.append("charge")
        return "charged"

    async def lose(request: EngineRequest) -> str:
        await outside(lose_all(store))
        return "nobody hears this"

    engine = ScriptedEngine([CALL("charge"), lose, "first answer", "second answer"])
    runner = Runner(agent, store, engine)
    with pytest.raises(SessionConflictError):
        await runner.run_async("s", "hi", {"of": "first"}, message_id="m")
    assert (await runner.run_async("s", "second")).content == "second answer"
    found = texts((await store.messages("s")).items)
    assert (found[0], found[3:]) == ("hi", ["first answer", "second", "second answer"])
    session = await store.get("s")
    assert session is not None
    assert session.metadata == {"of": "first"}
    again = await runner.run_async("s", "hi", message_id="m")
    assert (again.content, again.duplicate, called) == ("first answer", True, ["charge"])


async def test_bare_turn_passes_an_interrupted_one(store: StoreBackend) -> None:
    """A turn without a runner passes an interrupted one by, which goes on after it."""

    async def lose(request: EngineRequest) -> str:
        await outside(lose_all(store))
        return "nobody hears this"

    runner = Runner(Agent("Support"), store, ScriptedEngine([lose, "first answer"]))
    with pytest.raises(SessionConflictError):
        await runner.run_async("s", "hi", message_id="m")
    session = await store.get("s")
    assert session is not None
    await session.add_message(user("bare"))
    assert texts(session.history) == ["bare"]
    assert (await runner.run_async("s", "hi", message_id="m")).content == "first answer"
    assert texts(session.history) == ["bare", "hi", "first answer"]


# --- what is left of a journal ---


async def charging(store: StoreBackend) -> tuple[Runner, list[str]]:
    """A runner whose message has failed after a call, and what was called."""
    agent, called = Agent("Support"), list[str]()

    @agent.tool
    async def charge(context: ToolContext) -> str:
        context.session.state["charged"] = True
        called.append("charge")
        return "charged"

    def answer(request: EngineRequest) -> Any:
        return CALL("charge") if request.messages[-1].role is Role.USER else "done"

    runner = Runner(agent, store, ScriptedEngine([CALL("charge"), LookupError], default=answer))
    await fail(runner)
    return runner, called


async def test_journal_is_no_history(store: StoreBackend) -> None:
    """What a journal holds is nowhere to be seen in the conversation, nor in its pages or the list."""
    await charging(store)
    session = await store.get("s")
    assert session is not None
    assert (list(session.history), dict(session.state), dict(session.metadata)) == ([], {}, {})
    assert (await store.messages("s")).items == ()
    assert not await store.is_message_processed("m", session_id="s")


async def test_journal_goes_with_the_commit(store: StoreBackend) -> None:
    """Once a turn has committed nothing of its journal is left: the id used in another conversation begins anew."""
    runner, called = await charging(store)
    await runner.run_async("s", "hi", message_id="m")
    assert await store.pending_turns() == ()
    await runner.run_async("other", "hi", message_id="m")
    assert called == ["charge", "charge"]


async def test_journal_goes_with_the_conversation(store: StoreBackend) -> None:
    """A conversation that uses a deleted one's id has nothing of its journals."""
    runner, called = await charging(store)
    await store.delete("s")
    assert await store.pending_turns() == ()
    assert (await runner.run_async("s", "hi", message_id="m")).content == "done"
    assert called == ["charge", "charge"]


async def test_journal_goes_when_its_id_is_forgotten(store: StoreBackend, clock: Clock) -> None:
    """A failed message that is not sent again is forgotten when ids are, and its journal with it."""
    runner, called = await charging(store)
    clock.passes(hours=store.dedup_ttl_hours - 1)
    await store.purge_processed_messages()
    assert [turn.state for turn in await store.pending_turns()] == ["told"]
    clock.passes(hours=2)
    await store.purge_processed_messages()
    assert await store.pending_turns() == ()
    await runner.run_async("s", "hi", message_id="m")
    assert called == ["charge", "charge"]


async def test_journal_without_a_message_id(store: StoreBackend) -> None:
    """A turn without a message id leaves nothing behind when it fails."""
    agent = Agent("Support")
    agent.tool(lambda: "looked", name="look")
    runner = Runner(agent, store, ScriptedEngine([CALL("look"), LookupError]))
    await fail(runner, message_id=None)
    assert await store.pending_turns() == ()


async def test_goes_on_after_a_restart(store: StoreBackend, restart: Restart) -> None:
    """A turn that failed goes on in another process: what its tools did is kept, and not done again."""
    _, called = await charging(store)
    store = await restart(store)
    agent = Agent("Support")
    agent.tool(lambda: called.append("again"), name="charge")
    runner = Runner(agent, store, ScriptedEngine(["done"]))
    assert (await runner.run_async("s", "hi", message_id="m")).content == "done"
    session = await store.get("s")
    assert session is not None
    assert (session.state, called) == ({"charged": True}, ["charge"])
    assert [result.content for result in results_of(session.history)] == ["charged"]


def results_of(messages: Sequence[Any]) -> list[ToolResult]:
    """All results in them."""
    return [result for message in messages for result in message.tool_results]


async def test_journal_that_cannot_be_written(store: StoreBackend) -> None:
    """No tool runs whose call could not be noted; and one whose result could not be is answered as interrupted."""
    shop = Shop()
    runner, full = Runner(shop.agent, store), StoreError("the disk is full", store=store.name)
    Faults(store).before("write_journal", full, None, full)
    with pytest.raises(StoreError):
        await runner.run_async("s", "hi", message_id="m")
    assert shop.begun == []
    with pytest.raises(StoreError):
        await runner.run_async("s", "hi", message_id="m")
    assert sorted(shop.begun) == ["milk", "tea"]
    await runner.run_async("s", "hi", message_id="m")
    assert sorted(shop.begun) == ["bill", "milk", "tea"]
    assert sorted(result.is_error for result in results_of((await store.messages("s")).items)) == [False, False, True]
