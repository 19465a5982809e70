"""Calls that wait for a person: they outlive all but their turn, and each is decided once and run at most once."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from itertools import count
from typing import Any

import anyio
import pytest
from anyio.lowlevel import checkpoint

from chatflow.core.agent import Agent
from chatflow.core.approvals import AWAITS_APPROVAL_KEY, Decision, held_back
from chatflow.core.backend import StoreBackend
from chatflow.core.engine import EngineRequest
from chatflow.core.messages import AgentResponse, Message, Role, ToolCall, ToolResult
from chatflow.core.prompt import ARRIVED, AWAITING
from chatflow.core.session import SessionContext
from chatflow.core.tools import ToolContext
from chatflow.engines.scripted import Scripted, ScriptedEngine
from chatflow.exceptions import (
    ApprovalDecidedError,
    ApprovalNotFoundError,
    MessageInProgressError,
    SessionConflictError,
    SessionDeletedError,
    SessionError,
    SessionNotFoundError,
    StoreScopeError,
)
from chatflow.runner import Runner
from chatflow.testing.conformance.attempts import KINDS, Attempts, Break, Broken, Kind
from chatflow.testing.conformance.conftest import Clock, OpenStore, Restart
from chatflow.testing.conformance.conversation import outside, texts
from chatflow.testing.conformance.stepping import CANCELLERS, MOMENTS, Moment
from chatflow.testing.conformance.work import Heard, lose_all, nothing_left

CALL = ScriptedEngine.call


async def nothing() -> None:
    """Happens where a test puts nothing in."""


class Till:
    """A model that says *replies* and then that it is done, and refunds that a person has to approve."""

    def __init__(self, *replies: Scripted, idempotent: bool = False) -> None:
        self.engine = ScriptedEngine(replies, default="done")
        self.begun: list[int] = []
        self.paid: list[int] = []
        self.keys: set[str] = set()
        self.before: Callable[[], Awaitable[None]] = nothing
        self.after: Callable[[], Awaitable[None]] = nothing
        self.agent = Agent("Support", engine=self.engine)
        self.agent.tool(requires_approval=True, idempotent=idempotent)(self.refund)
        self.agent.tool(self.look)

    async def refund(self, euros: int, context: ToolContext) -> str:
        """Pay it back."""
        self.begun.append(euros)
        self.keys.add(context.idempotency_key)
        await self.before()
        context.state[f"paid {euros}"] = True
        self.paid.append(euros)
        await self.after()
        return f"{euros} paid"

    async def look(self) -> str:
        """Look it up."""
        return "found"


def refunds(*euros: int) -> Scripted:
    """A reply that asks for refunds."""
    return [CALL("refund", euros=each) for each in euros]


async def history(store: StoreBackend, session_id: str = "s") -> list[str]:
    """What was said: calls by their arguments, results by what they say."""
    shown: list[str] = []
    for message in (await store.messages(session_id)).items:
        made = [f"{call.name} {call.args.get('euros', '')}".strip() for call in message.tool_calls]
        found = [str(each.content) for each in message.tool_results]
        shown.append(message.text or ", ".join(made or found))
    return shown


async def session_in(store: StoreBackend, session_id: str = "s") -> SessionContext:
    """The conversation, which is there."""
    session = await store.get(session_id)
    assert session is not None
    return session


async def pending(store: StoreBackend, session_id: str = "s") -> list[str]:
    """The ids of the calls that wait."""
    return [call.id for call in (await session_in(store, session_id)).pending_approvals]


# --- waiting ---


async def test_turn_commits_with_its_call_open(store: StoreBackend) -> None:
    """A turn whose model asks for what needs approval commits at once, with the call open and nothing run."""
    till = Till(refunds(5))
    response = await Runner(till.agent, store).run_async("s", "refund it", {"a": 1}, message_id="m")
    (call,) = response.awaiting_approval
    assert (response.stop_reason, response.content, response.tool_calls_executed) == ("approval", "", ())
    assert (call.name, call.args) == ("refund", {"euros": 5})
    assert (await history(store), till.begun, len(till.engine.requests)) == (["refund it", "refund 5"], [], 1)
    session = await session_in(store)
    assert (session.pending_approvals, session.metadata) == ((call,), {"a": 1})
    assert await store.pending_turns() == ()


async def test_duplicate_of_a_waiting_turn(store: StoreBackend) -> None:
    """The message that led to the call, sent again, gets the same answer, with the call that waits."""
    runner = Runner(Till(refunds(5)).agent, store)
    first = await runner.run_async("s", "refund it", message_id="m")
    again = await runner.run_async("s", "refund it", message_id="m")
    assert (again.duplicate, again.stop_reason, again.awaiting_approval) == (True, "approval", first.awaiting_approval)


async def test_approve(store: StoreBackend) -> None:
    """Approving runs the tool in a turn of its own, adds the result, and has the model go on from it."""
    till = Till(refunds(5))
    runner = Runner(till.agent, store)
    (call,) = (await runner.run_async("s", "refund it")).awaiting_approval
    response = await runner.approve("s", call.id, metadata={"by": "Ann"})
    assert (response.content, response.stop_reason, response.duplicate) == ("done", "answer", False)
    assert (response.tool_calls_executed, response.awaiting_approval) == (("refund",), ())
    assert await history(store) == ["refund it", "refund 5", "5 paid", "done"]
    session = await session_in(store)
    assert (dict(session.state), dict(session.metadata)) == ({"paid 5": True}, {"by": "Ann"})
    assert session.pending_approvals == ()
    assert await store.pending_turns() == ()


@pytest.mark.parametrize("reason", [None, "too much"])
async def test_reject(store: StoreBackend, reason: str | None) -> None:
    """Rejecting runs nothing: the model is told that a person has refused, and why, and goes on."""
    till = Till(refunds(5))
    runner = Runner(till.agent, store)
    (call,) = (await runner.run_async("s", "refund it")).awaiting_approval
    response = await runner.reject("s", call.id, reason, metadata={"by": "Ann"})
    assert (response.content, response.tool_calls_executed, till.begun) == ("done", (), [])
    session = await session_in(store)
    (result,) = session.history[2].tool_results
    assert (result.tool_call_id, result.is_error, session.metadata) == (call.id, True, {"by": "Ann"})
    assert "A person has refused" in result.content
    assert ("too much" in result.content) is (reason is not None)
    assert till.engine.requests[1].messages[-1].tool_results == (result,)


async def test_survives_a_restart(store: StoreBackend, restart: Restart) -> None:
    """A call that waits still waits after a restart, and can be approved there."""
    till = Till(refunds(5))
    (call,) = (await Runner(till.agent, store).run_async("s", "refund it")).awaiting_approval
    store = await restart(store)
    assert (await session_in(store)).pending_approvals == (call,)
    assert (await Runner(till.agent, store).approve("s", call.id)).content == "done"
    store = await restart(store)
    assert (await Runner(till.agent, store).approve("s", call.id)).duplicate
    assert (till.paid, await pending(store)) == ([5], [])


async def test_sessions_at_hand(store: StoreBackend, second: StoreBackend) -> None:
    """An agent decides in a session at hand as in a run, also if others have made the calls since it was read."""
    till = Till(refunds(5, 6))
    session = await store.get_or_create("s", till.agent)
    first, other = (await Runner(till.agent, second).run_async("s", "refund it")).awaiting_approval
    assert session.pending_approvals == ()
    rest = await till.agent.approve(first.id, session=session, metadata={"by": "Ann"})
    assert (rest.stop_reason, rest.awaiting_approval) == ("approval", (other,))
    assert (await till.agent.reject(other.id, session=session, reason="no")).content == "done"
    assert (till.paid, session.metadata) == ([5], {"by": "Ann"})


async def test_session_that_is_not_stored_yet(store: StoreBackend) -> None:
    """In a session that has not been stored so far no call waits."""
    till = Till()
    session = till.agent.create_session("s", store=store)
    with pytest.raises(ApprovalNotFoundError):
        await till.agent.approve("call_1", session=session)
    assert await store.get("s") is None


# --- several ---


async def test_others_run_at_once(store: StoreBackend) -> None:
    """Calls beside the one that waits run at once, and their results are stored with the turn."""
    till = Till([CALL("look"), CALL("refund", euros=5), CALL("look")])
    runner = Runner(till.agent, store)
    response = await runner.run_async("s", "refund it")
    assert response.tool_calls_executed == ("look", "look")
    assert await history(store) == ["refund it", "look, refund 5, look", "found, found"]
    (call,) = response.awaiting_approval
    await runner.approve("s", call.id)
    sent = till.engine.requests[1].messages[-1]
    assert [result.content for result in sent.tool_results] == ["found", "5 paid", "found"]


async def test_last_decision_asks_the_model(store: StoreBackend) -> None:
    """As long as others of the message wait, a decision asks no model; in whatever order they are decided."""
    till = Till(refunds(1, 2, 3))
    runner = Runner(till.agent, store)
    first, second, third = (await runner.run_async("s", "refund it")).awaiting_approval
    response = await runner.approve("s", third.id)
    assert (response.stop_reason, response.content) == ("approval", "")
    assert (response.awaiting_approval, response.tool_calls_executed) == ((first, second), ("refund",))
    assert (await runner.reject("s", first.id)).awaiting_approval == (second,)
    assert (len(till.engine.requests), (await session_in(store)).pending_approvals) == (1, (second,))
    assert (await runner.approve("s", second.id)).content == "done"
    sent = till.engine.requests[1].messages[-1]
    assert [result.is_error for result in sent.tool_results] == [True, False, False]
    assert till.paid == [3, 2]


async def test_decision_leads_to_another(store: StoreBackend) -> None:
    """The model that goes on after a decision may ask for approval again."""
    till = Till(refunds(1), refunds(2))
    runner = Runner(till.agent, store)
    (first,) = (await runner.run_async("s", "refund it")).awaiting_approval
    response = await runner.approve("s", first.id)
    (second,) = response.awaiting_approval
    assert (response.stop_reason, second.args) == ("approval", {"euros": 2})
    assert (await runner.approve("s", second.id)).content == "done"
    assert till.paid == [1, 2]


# --- a user's message in between ---


async def test_message_in_between(store: StoreBackend) -> None:
    """A message in between tells the model that the call waits; decided later, the result stands with its call."""
    till = Till(refunds(5), "It waits.", "Paid.")
    runner = Runner(till.agent, store)
    (call,) = (await runner.run_async("s", "refund it")).awaiting_approval
    assert (await runner.run_async("s", "well?")).content == "It waits."
    between = till.engine.requests[1].messages
    assert [message.role for message in between] == [Role.USER, Role.MODEL, Role.TOOL, Role.USER]
    assert [(each.content, each.is_error) for each in between[2].tool_results] == [(AWAITING, False)]
    assert await pending(store) == [call.id]
    assert (await runner.approve("s", call.id)).content == "Paid."
    later = till.engine.requests[2].messages
    assert texts(later) == ["refund it", call.id, call.id, "well?", "It waits.", ARRIVED]
    assert later[2].tool_results[0].content == "5 paid"
    assert await history(store) == ["refund it", "refund 5", "well?", "It waits.", "5 paid", "Paid."]


async def test_prompts_with_waiting_calls_are_no_repairs(store: StoreBackend, caplog: pytest.LogCaptureFixture) -> None:
    """That a call waits, or has waited long, is nothing to be logged as repaired."""
    till = Till(refunds(5))
    runner = Runner(till.agent, store)
    (call,) = (await runner.run_async("s", "refund it")).awaiting_approval
    await runner.run_async("s", "well?")
    await runner.approve("s", call.id)
    await runner.run_async("s", "thanks")
    assert "repaired" not in caplog.text


async def test_decided_in_part_before_a_message(store: StoreBackend) -> None:
    """A message between two decisions sees the one and that the other waits; the last one asks the model."""
    till = Till(refunds(1, 2))
    runner = Runner(till.agent, store)
    first, second = (await runner.run_async("s", "refund it")).awaiting_approval
    await runner.approve("s", first.id)
    await runner.run_async("s", "well?")
    sent = till.engine.requests[1].messages[2]
    assert [result.content for result in sent.tool_results] == ["1 paid", AWAITING]
    assert (await runner.reject("s", second.id)).content == "done"
    assert len(till.engine.requests) == 3


# --- once ---


async def test_approved_again(store: StoreBackend) -> None:
    """A second click gets the stored answer, and runs and asks nothing."""
    till = Till(refunds(5))
    runner = Runner(till.agent, store)
    (call,) = (await runner.run_async("s", "refund it")).awaiting_approval
    first = await runner.approve("s", call.id)
    again = await runner.approve("s", call.id)
    assert (first.duplicate, again.duplicate, again.content) == (False, True, "done")
    assert (till.paid, len(till.engine.requests)) == ([5], 2)


async def test_rejected_again(store: StoreBackend) -> None:
    """Who rejects what is rejected gets the stored answer; the first reason stands."""
    till = Till(refunds(5))
    runner = Runner(till.agent, store)
    (call,) = (await runner.run_async("s", "refund it")).awaiting_approval
    await runner.reject("s", call.id, "first")
    assert (await runner.reject("s", call.id, "second")).duplicate
    assert "first" in (await history(store))[2]


@pytest.mark.parametrize("approved", [True, False])
async def test_decided_the_other_way(store: StoreBackend, approved: bool) -> None:
    """A decision can't be turned round: the other one is refused by an error of its own, and changes nothing."""
    till = Till(refunds(5))
    runner = Runner(till.agent, store)
    (call,) = (await runner.run_async("s", "refund it")).awaiting_approval
    decide, other = (runner.approve, runner.reject) if approved else (runner.reject, runner.approve)
    await decide("s", call.id)
    before = await history(store)
    with pytest.raises(ApprovalDecidedError) as caught:
        await other("s", call.id)
    assert (caught.value.session_id, caught.value.call_id, caught.value.approved) == ("s", call.id, approved)
    assert (await history(store), len(till.paid)) == (before, int(approved))


async def test_two_clicks_at_once(store: StoreBackend, second: StoreBackend) -> None:
    """Of approvals at once, by two workers, one runs the tool, and the others wait for its answer."""
    till, begun, go_on = Till(refunds(5)), anyio.Event(), anyio.Event()
    runners = [Runner(till.agent, each) for each in (store, second, store, second)]
    (call,) = (await runners[0].run_async("s", "refund it")).awaiting_approval
    responses: list[AgentResponse] = []

    async def pause() -> None:
        begun.set()
        await go_on.wait()

    async def click(runner: Runner) -> None:
        responses.append(await runner.approve("s", call.id))

    till.before = pause
    async with anyio.create_task_group() as group:
        for runner in runners:
            group.start_soon(click, runner)
        await begun.wait()
        with pytest.raises(ApprovalDecidedError):
            await runners[1].reject("s", call.id)
        go_on.set()
    assert sorted(response.duplicate for response in responses) == [False, True, True, True]
    assert [response.content for response in responses] == ["done"] * 4
    assert (till.begun, len(till.engine.requests)) == ([5], 2)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("idempotent", [True, False])
async def test_broken_off_after_the_tool(store: StoreBackend, kind: Kind, idempotent: bool) -> None:
    """A decision that was broken off after its tool had ended goes on when it is made again, and runs it no more."""
    attempts = Attempts([Break(1, 1, kind)])

    async def broken(request: EngineRequest) -> str:
        await attempts.point()
        return "never said"

    till = Till(refunds(5), broken, idempotent=idempotent)
    runner = Runner(till.agent, store)
    (call,) = (await runner.run_async("s", "refund it")).awaiting_approval
    response = await attempts.until_done(lambda: runner.approve("s", call.id))
    assert (attempts.broken, response.content, response.duplicate) == (1, "done", False)
    assert till.begun == till.paid == [5]
    assert await history(store) == ["refund it", "refund 5", "5 paid", "done"]
    assert (await session_in(store)).state == {"paid 5": True}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("idempotent", [True, False])
async def test_broken_off_inside_the_tool(store: StoreBackend, kind: Kind, idempotent: bool) -> None:
    """A tool that was under way when its decision was broken off is run again only if that does no harm."""
    till, attempts = Till(refunds(5), idempotent=idempotent), Attempts([Break(1, 1, kind)])
    till.before = attempts.point
    runner = Runner(till.agent, store)
    (call,) = (await runner.run_async("s", "refund it")).awaiting_approval
    await attempts.until_done(lambda: runner.approve("s", call.id))
    assert (till.begun, till.paid) == (([5, 5], [5]) if idempotent else ([5], []))
    assert len(till.keys) == 1
    assert ("interrupted" in (await history(store))[2]) is not idempotent


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("canceller", CANCELLERS)
async def test_cancelled_at_any_step(store: StoreBackend, canceller: str, moment: Moment) -> None:
    """Wherever an approval was cancelled, made again it comes to one run of its tool at most, and an answer."""
    for step in count():
        till, session_id = Till(refunds(5)), f"s{step}"
        runner = Runner(till.agent, store)
        (call,) = (await runner.run_async(session_id, "refund it")).awaiting_approval

        async def approve(
            runner: Runner = runner, session_id: str = session_id, call: ToolCall = call
        ) -> AgentResponse:
            return await runner.approve(session_id, call.id)

        cancelled = await CANCELLERS[canceller](approve, step, moment)
        assert (await approve()).content == "done"
        (result,) = (await session_in(store, session_id)).history[2].tool_results
        assert till.begun == till.paid == ([] if result.is_error else [5])
        assert (await pending(store, session_id), await store.pending_turns()) == ([], ())
        if not cancelled:
            break


@pytest.mark.parametrize("approved", [True, False])
async def test_decision_that_has_done_nothing(store: StoreBackend, approved: bool) -> None:
    """A decision that failed before it had run anything leaves nothing behind: a person may decide otherwise."""
    till = Till(refunds(5), LookupError)
    runner = Runner(till.agent, store)
    (call,) = (await runner.run_async("s", "refund it")).awaiting_approval
    if approved:
        with pytest.raises(SessionError):  # an agent that it is not with
            await Agent("Sales").approve(call.id, session=await session_in(store))
    else:
        with pytest.raises(LookupError):
            await runner.reject("s", call.id)
    assert (await store.pending_turns(), await pending(store)) == ((), [call.id])
    till.engine = ScriptedEngine(default="done")
    runner = Runner(Agent("Support", tools=till.agent.tools, engine=till.engine), store)
    assert (await (runner.reject if approved else runner.approve)("s", call.id)).content == "done"
    assert till.paid == ([] if approved else [5])


async def failed_after(store: StoreBackend, till: Till) -> str:
    """Approve, and have the model fail once the tool has run; the call's id."""
    runner = Runner(till.agent, store)
    (call,) = (await runner.run_async("s", "refund it")).awaiting_approval
    with pytest.raises(LookupError):
        await runner.approve("s", call.id)
    (turn,) = await store.pending_turns()
    assert (turn.state, turn.decision) == ("interrupted", Decision(call_id=call.id, approved=True))
    return call.id


async def test_decision_that_has_run_its_tool(store: StoreBackend) -> None:
    """A decision that failed after its tool had run keeps its place, is listed, and can't be turned round."""
    till = Till(refunds(5), LookupError)
    call_id = await failed_after(store, till)
    runner = Runner(till.agent, store)
    with pytest.raises(ApprovalDecidedError):
        await runner.reject("s", call_id)
    assert (await runner.approve("s", call_id)).content == "done"
    assert (till.begun, await store.pending_turns()) == ([5], ())


async def test_decision_that_failed_is_finished_by_the_next_run(store: StoreBackend, restart: Restart) -> None:
    """A decision that failed after its tool had run is finished before the next message, which sees the result."""
    till = Till(refunds(5), LookupError, "Paid.", "Next.")
    call_id = await failed_after(store, till)
    store = await restart(store)
    runner = Runner(till.agent, store)
    assert (await runner.run_async("s", "next")).content == "Next."
    assert await history(store) == ["refund it", "refund 5", "5 paid", "Paid.", "next", "Next."]
    assert AWAITING not in str(till.engine.requests)
    again = await runner.approve("s", call_id)
    assert (again.duplicate, again.content, till.begun) == (True, "Paid.", [5])


async def test_decision_that_failed_is_finished_by_a_worker(store: StoreBackend) -> None:
    """Whoever works finishes a decision that failed after its tool had run."""
    till = Till(refunds(5), LookupError, "Paid.")
    call_id = await failed_after(store, till)
    runner = Runner(till.agent, store)
    async with runner.working():
        await nothing_left(store)
    assert ((await history(store))[2:], till.begun) == (["5 paid", "Paid."], [5])
    assert (await runner.approve("s", call_id)).duplicate


async def test_decision_that_failed_twice_steps_aside(store: StoreBackend) -> None:
    """One that fails again when the next message has it finished holds nobody up, and goes on when it is made again."""
    till = Till(refunds(5), LookupError, LookupError, "Next.", "And next.", LookupError, "Paid.")
    call_id = await failed_after(store, till)
    runner = Runner(till.agent, store)
    for text, answer in (("next", "Next."), ("and next", "And next.")):
        assert (await runner.run_async("s", text)).content == answer
        (turn,) = await store.pending_turns()
        assert turn.state == "told"
        (waiting,) = till.engine.requests[-1].messages[2].tool_results
        assert (waiting.content, waiting.is_error) == (AWAITING, False)
    with pytest.raises(LookupError):
        await runner.approve("s", call_id)
    (turn,) = await store.pending_turns()
    assert turn.state == "interrupted"
    assert (await runner.approve("s", call_id)).content == "Paid."
    assert (till.begun, await store.pending_turns()) == ([5], ())


async def test_decision_that_has_run_its_tool_does_not_die(store: StoreBackend) -> None:
    """However often it fails, and whoever tries, what an approved tool has done is kept until the model hears of it."""
    failures = [failure for _ in range(3) for failure in (LookupError, "Next.", LookupError)]
    till = Till(refunds(5), LookupError, *failures, "Paid.")
    call_id = await failed_after(store, till)
    runner = Runner(till.agent, store, max_attempts=1)
    for _ in range(3):
        assert (await runner.run_async("s", "next")).content == "Next."
        (turn,) = await store.pending_turns()
        assert turn.state == "told"
        with pytest.raises(LookupError):
            await runner.approve("s", call_id)
    assert (await runner.approve("s", call_id)).content == "Paid."
    assert (till.begun, await store.pending_turns()) == ([5], ())


async def test_decision_that_was_cancelled_inside_its_tool(store: StoreBackend) -> None:
    """One that was cancelled while its tool ran is finished before the next message, and the tool not run again."""
    till = Till(refunds(5), "Unknown.", "Next.")
    runner = Runner(till.agent, store)
    (call,) = (await runner.run_async("s", "refund it")).awaiting_approval
    with anyio.CancelScope() as scope:

        async def cancel() -> None:
            scope.cancel()
            await checkpoint()

        till.before = cancel
        await runner.approve("s", call.id)
    assert scope.cancelled_caught
    assert (await runner.run_async("s", "next")).content == "Next."
    assert (till.begun, till.paid, (await history(store))[3:]) == ([5], [], ["Unknown.", "next", "Next."])


async def lost_after(store: StoreBackend, till: Till) -> str:
    """Approve, and lose the turn to a watcher after the tool has run, as a killed process does; the call's id."""

    async def lose() -> None:
        await outside(lose_all(store))

    till.after = lose
    runner = Runner(till.agent, store)
    (call,) = (await runner.run_async("s", "refund it")).awaiting_approval
    with pytest.raises(SessionConflictError):
        await runner.approve("s", call.id, metadata={"by": "Ann"})
    till.after = nothing
    (turn,) = await store.pending_turns()
    assert (turn.state, turn.user_message) == ("interrupted", None)
    assert turn.decision == Decision(call_id=call.id, approved=True)
    assert turn.metadata == {"by": "Ann"}
    return call.id


async def test_interrupted_decision_is_finished_by_the_next_run(store: StoreBackend, restart: Restart) -> None:
    """A decision whose process is gone is finished before the next message, and its answer kept."""
    till = Till(refunds(5), "Paid.", "Next.")
    call_id = await lost_after(store, till)
    store = await restart(store)
    runner = Runner(till.agent, store)
    assert (await runner.run_async("s", "next")).content == "Next."
    found = await history(store)
    assert (found[2].startswith("The call was interrupted"), found[3:]) == (True, ["Paid.", "next", "Next."])
    again = await runner.approve("s", call_id)
    assert (again.duplicate, again.content, till.begun) == (True, "Paid.", [5])
    assert (await session_in(store)).metadata == {"by": "Ann"}


async def test_interrupted_decision_is_finished_by_a_worker(store: StoreBackend) -> None:
    """Whoever works finishes a decision whose process is gone; nobody is told of the answer but who decides again."""
    till, heard = Till(refunds(5), "Paid.", idempotent=True), Heard()
    call_id = await lost_after(store, till)
    runner = Runner(till.agent, store)
    async with runner.working(heard):
        await nothing_left(store)
    assert ((await history(store))[2:], heard.calls, len(till.keys)) == (["5 paid", "Paid."], 0, 1)
    assert (await runner.approve("s", call_id)).duplicate


async def test_interrupted_decision_stands(store: StoreBackend) -> None:
    """What was approved by a process that is gone can't be rejected, only approved: the tool may have run."""
    till = Till(refunds(5))
    call_id = await lost_after(store, till)
    runner = Runner(till.agent, store)
    with pytest.raises(ApprovalDecidedError):
        await runner.reject("s", call_id)
    assert (await runner.approve("s", call_id)).content == "done"
    assert till.begun == [5]


async def test_messages_that_move_do_not_make_another_call(store: StoreBackend) -> None:
    """A rollback between a lost approval and the next one moves the call, and yet it is the same: it runs once."""
    till = Till(refunds(5))
    call_id = await lost_after(store, till)
    session = await session_in(store)
    async with session.turn():
        before = len(session.history)
        await session.add_message(Message(Role.USER, "dropped"))
        await session.rollback_to(before)
    assert (await Runner(till.agent, store).approve("s", call_id)).content == "done"
    assert (till.begun, await pending(store)) == ([5], [])


async def test_rolled_back_before_the_decision(store: StoreBackend) -> None:
    """Rolling back to before a decision does not undo it: made again, it gets the stored answer."""
    till = Till(refunds(5))
    runner = Runner(till.agent, store)
    (call,) = (await runner.run_async("s", "refund it")).awaiting_approval
    await runner.approve("s", call.id)
    session = await session_in(store)
    await session.rollback_to(2)
    assert await pending(store) == [call.id]
    assert (await runner.approve("s", call.id)).duplicate
    assert till.paid == [5]


async def test_rolled_back_and_forgotten(open_store: OpenStore) -> None:
    """Once a decision is forgotten, a call that a rollback has opened again can be decided about anew."""
    store = open_store(dedup_ttl_hours=1)
    store.clock = clock = Clock()
    till = Till(refunds(5))
    runner = Runner(till.agent, store)
    (call,) = (await runner.run_async("s", "refund it")).awaiting_approval
    await runner.approve("s", call.id)
    await (await session_in(store)).rollback_to(2)
    clock.passes(hours=2)
    assert not (await runner.reject("s", call.id)).duplicate
    assert till.paid == [5]


async def test_decision_that_costs_its_process(store: StoreBackend) -> None:
    """However often a decision has cost its process, whoever makes it again has it tried again."""
    till = Till(refunds(5), idempotent=True)

    async def lose() -> None:
        await outside(lose_all(store))

    till.after = lose
    runner = Runner(till.agent, store, max_attempts=2)
    (call,) = (await runner.run_async("s", "refund it")).awaiting_approval
    for _ in range(3):
        with pytest.raises(SessionConflictError):
            await runner.approve("s", call.id)
    till.after = nothing
    assert (await runner.approve("s", call.id)).content == "done"


async def test_other_application(store: StoreBackend) -> None:
    """An interrupted decision of another application waits for that one."""
    call_id = await lost_after(store, Till(refunds(5)))
    other = Runner(Agent("Sales", engine=ScriptedEngine(default="hello")), store)
    with pytest.raises(MessageInProgressError):
        await other.approve("s", call_id)


# --- accepted ---


async def test_accepted_turn(store: StoreBackend) -> None:
    """An accepted turn whose model asks for approval is answered with that, as `on_response` hears."""
    till, responses = Till(refunds(5)), list[AgentResponse]()
    runner = Runner(till.agent, store)
    await runner.accept("s", "refund it", message_id="m")
    async with runner.working(lambda _, response: responses.append(response)):
        await nothing_left(store)
    (call,) = responses[0].awaiting_approval
    assert (responses[0].stop_reason, await pending(store)) == ("approval", [call.id])


async def test_broken_off_turn_waits_the_same(store: StoreBackend) -> None:
    """A turn broken off after its model has asked goes on to wait for the same call, and asks the model no more."""
    till = Till([CALL("look"), CALL("refund", euros=5)])

    @till.agent.tool(name="break", idempotent=True)
    async def break_off() -> str:
        if not broken:
            broken.append(True)
            raise Broken
        return "mended"

    broken: list[bool] = []
    till.engine = ScriptedEngine([[CALL("break"), CALL("refund", euros=5)]], default="done")
    runner = Runner(Agent("Support", tools=till.agent.tools, engine=till.engine), store)
    with pytest.raises(Broken):
        await runner.run_async("s", "hi", message_id="m")
    response = await runner.run_async("s", "hi", message_id="m")
    assert (len(till.engine.requests), response.stop_reason) == (1, "approval")
    assert await history(store) == ["hi", "break, refund 5", "mended"]
    assert [call.id for call in response.awaiting_approval] == await pending(store)


# --- gone ---


async def refused(runner: Runner, call_id: str, session_id: str = "s") -> ApprovalNotFoundError:
    """The error that both decisions raise, which have changed nothing."""
    before = await history(runner.session_store.backend, session_id)
    with pytest.raises(ApprovalNotFoundError):
        await runner.approve(session_id, call_id)
    with pytest.raises(ApprovalNotFoundError) as caught:
        await runner.reject(session_id, call_id)
    assert await history(runner.session_store.backend, session_id) == before
    assert await runner.session_store.backend.pending_turns() == ()
    return caught.value


async def test_unknown_call(store: StoreBackend) -> None:
    """An id that no call of the conversation has is an error that names it."""
    runner = Runner(Till().agent, store)
    await runner.run_async("s", "hi")
    error = await refused(runner, "call_9")
    assert (error.session_id, error.call_id) == ("s", "call_9")
    assert isinstance(error, LookupError)


async def test_call_that_never_waited(store: StoreBackend) -> None:
    """A call that nobody was asked about can't be decided about."""
    runner = Runner(Till([CALL("look")]).agent, store)
    await runner.run_async("s", "hi")
    await refused(runner, "call_1")


async def test_left_the_window(open_store: OpenStore) -> None:
    """A call that has left the window with its turn can't be decided about any more."""
    store = open_store(default_max_turns=2)
    runner = Runner(Till(refunds(5)).agent, store)
    (call,) = (await runner.run_async("s", "refund it")).awaiting_approval
    await runner.run_async("s", "one")
    assert await pending(store) == [call.id]
    await runner.run_async("s", "two")
    assert await pending(store) == []
    await refused(runner, call.id)


async def test_cleared(store: StoreBackend) -> None:
    """A call that was cleared away with the history can't be decided about."""
    runner = Runner(Till(refunds(5)).agent, store)
    (call,) = (await runner.run_async("s", "refund it")).awaiting_approval
    await (await session_in(store)).clear_history()
    await refused(runner, call.id)


async def test_rolled_back(store: StoreBackend) -> None:
    """A call that a rollback has undone can't be decided about."""
    runner = Runner(Till(refunds(5)).agent, store)
    (call,) = (await runner.run_async("s", "refund it")).awaiting_approval
    await (await session_in(store)).rollback_to(0)
    await refused(runner, call.id)


async def test_answered_by_hand(store: StoreBackend) -> None:
    """A call whose result the application has added itself waits no more."""
    till = Till(refunds(5))
    runner = Runner(till.agent, store)
    (call,) = (await runner.run_async("s", "refund it")).awaiting_approval
    result = ToolResult(tool_call_id=call.id, name="refund", content="paid in cash")
    await (await session_in(store)).add_message(Message(Role.TOOL, tool_results=[result]))
    assert await pending(store) == []
    await refused(runner, call.id)


async def test_answer_forgotten(open_store: OpenStore) -> None:
    """Once the answer to a decision is forgotten, making it again is an error, and runs nothing."""
    store = open_store(dedup_ttl_hours=1)
    store.clock = clock = Clock()
    till = Till(refunds(5))
    runner = Runner(till.agent, store)
    (call,) = (await runner.run_async("s", "refund it")).awaiting_approval
    await runner.approve("s", call.id)
    clock.passes(hours=2)
    await refused(runner, call.id)
    assert till.paid == [5]


@pytest.mark.parametrize("put", [False, True])
async def test_cleared_while_the_decision_waits(store: StoreBackend, put: bool) -> None:
    """A decision whose call is cleared away while it waits for its turn runs nothing, not even another of that id."""
    till, errors = Till(refunds(5)), list[ApprovalNotFoundError]()
    runner = Runner(till.agent, store)
    (call,) = (await runner.run_async("s", "refund it")).awaiting_approval

    async def approve() -> None:
        with pytest.raises(ApprovalNotFoundError) as caught:
            await runner.approve("s", call.id)
        errors.append(caught.value)

    session = await session_in(store)
    async with anyio.create_task_group() as group, session.turn():
        await outside_started(group, approve)
        await session.clear_history()
        if put:
            other = Message(Role.MODEL, tool_calls=[call], agent_name="Support")
            await session.add_message(Message(Role.USER, "refund it all"))
            await session.add_message(held_back(other, [0], []))
    assert (len(errors), till.begun) == (1, [])
    assert await store.pending_turns() == ()


async def outside_started(group: Any, operation: Callable[[], Awaitable[None]]) -> None:
    """Start *operation* as code of no turn, and let it come to its wait."""

    async def run() -> None:
        await outside(operation())  # type: ignore[arg-type]  # it is a coroutine function

    group.start_soon(run)
    await anyio.wait_all_tasks_blocked()


async def test_no_conversation(store: StoreBackend) -> None:
    """Where there is no conversation there is nothing to decide, and none is made."""
    runner = Runner(Till().agent, store)
    with pytest.raises(SessionNotFoundError):
        await runner.approve("s", "call_1")
    with pytest.raises(SessionNotFoundError):
        await runner.reject("s", "call_1")
    assert await store.get("s") is None


async def test_deleted(store: StoreBackend) -> None:
    """A deleted conversation's calls are gone; the id used anew knows nothing of them."""
    till = Till(refunds(5), refunds(6))
    runner = Runner(till.agent, store)
    (call,) = (await runner.run_async("s", "refund it")).awaiting_approval
    session = await session_in(store)
    await store.delete("s")
    with pytest.raises(SessionDeletedError):
        await till.agent.approve(call.id, session=session)
    with pytest.raises(SessionNotFoundError):
        await runner.approve("s", call.id)
    (other,) = (await runner.run_async("s", "refund it")).awaiting_approval
    await refused(runner, call.id)
    assert (await runner.approve("s", other.id)).content == "done"
    assert till.paid == [6]


async def test_deleted_elsewhere(store: StoreBackend, second: StoreBackend) -> None:
    """A session at hand learns by deciding that another store has deleted the conversation, or used its id anew."""
    till = Till(refunds(5))
    sessions = [await store.get_or_create(name, till.agent) for name in ("s", "t")]
    for session in sessions:
        await second.delete(session.session_id)
    await second.get_or_create("t", till.agent)
    for session in sessions:
        with pytest.raises(SessionDeletedError):
            await till.agent.approve("call_1", session=session)


async def test_same_call_in_an_id_used_anew(store: StoreBackend) -> None:
    """What was decided in a deleted conversation decides nothing in one that has its id and the same calls."""
    call = ToolCall(id="call_0", name="refund", args={"euros": 5})
    till = Till(call, "Paid.", call, "Paid again.")
    runner = Runner(till.agent, store)
    for answer in ("Paid.", "Paid again."):
        await runner.run_async("s", "refund it")
        assert (await runner.approve("s", "call_0")).content == answer
        await store.delete("s")
    assert till.paid == [5, 5]


# --- owners ---


async def test_owners(store: StoreBackend) -> None:
    """A call waits in its owner's conversation, and nobody else's runner reaches it."""
    till = Till(refunds(5))
    runner = Runner(till.agent, store)
    mine, theirs = runner.for_owner("ann"), runner.for_owner("bob")
    (call,) = (await mine.run_async("s", "refund it")).awaiting_approval
    for other in (runner, theirs):
        with pytest.raises(SessionNotFoundError):
            await other.approve("s", call.id)
    session = await mine.get_session("s")
    assert session is not None
    with pytest.raises(StoreScopeError):
        await theirs.approve_session(session, call.id)
    with pytest.raises(StoreScopeError):
        await theirs.reject_session(session, call.id)
    assert (await mine.approve("s", call.id)).content == "done"
    assert till.paid == [5]


async def test_export(store: StoreBackend) -> None:
    """An owner's export holds decisions that were broken off."""
    till = Till(refunds(5), RuntimeError)
    runner = Runner(till.agent, store).for_owner("ann")
    (call,) = (await runner.run_async("s", "refund it")).awaiting_approval
    with pytest.raises(RuntimeError):
        await runner.approve("s", call.id)
    lines = [line async for line in store.export_owner("ann")]
    assert any(f'"decision":{{"call_id":"{call.id}","approved":true,"reason":null}}' in line for line in lines)


# --- ids ---


async def test_ids_given_again(store: StoreBackend) -> None:
    """Calls of a provider that gives ids again wait under ids of their own: what is approved is what was shown."""
    first = [ToolCall(id="call_0", name="refund", args={"euros": 1})]
    then = [ToolCall(id="call_0", name="refund", args={"euros": 2})]
    till = Till(first, then)
    runner = Runner(till.agent, store)
    (one,) = (await runner.run_async("s", "refund one")).awaiting_approval
    (two,) = (await runner.run_async("s", "refund two")).awaiting_approval
    assert await pending(store) == [one.id, two.id]
    await runner.approve("s", one.id)
    assert till.paid == [1]
    await runner.approve("s", two.id)
    assert till.paid == [1, 2]


@pytest.mark.parametrize("approved", [True, False])
async def test_id_given_again_after_the_decision(store: StoreBackend, approved: bool) -> None:
    """A second click gets the stored answer, or that it was decided, also where a plain call has had the id since."""
    till = Till(ToolCall(id="call_0", name="refund", args={"euros": 5}), ToolCall(id="call_0", name="look"))
    runner = Runner(till.agent, store)
    await runner.run_async("s", "refund it")
    decide, other = (runner.approve, runner.reject) if approved else (runner.reject, runner.approve)
    await decide("s", "call_0")
    again = await decide("s", "call_0")
    assert (again.duplicate, again.content) == (True, "done")
    with pytest.raises(ApprovalDecidedError):
        await other("s", "call_0")
    assert len(till.paid) == int(approved)


@pytest.mark.parametrize("call_id", [" ", "\ud800", "a\0", "\0approval:" + "0" * 32])
async def test_id_that_nobody_can_say(store: StoreBackend, call_id: str) -> None:
    """A call whose id is no text that can be passed on waits under another one, by which it is decided."""
    till = Till(ToolCall(id=call_id, name="refund", args={"euros": 5}))
    runner = Runner(till.agent, store)
    (call,) = (await runner.run_async("s", "refund it")).awaiting_approval
    assert (call.id.isalnum(), await pending(store)) == (True, [call.id])
    assert (await runner.approve("s", call.id)).content == "done"
    assert (await runner.approve("s", call.id)).duplicate
    assert till.paid == [5]


async def test_message_ids_can_not_be_decisions(store: StoreBackend) -> None:
    """No message of a user's can take the id that a decision goes by."""
    runner = Runner(Till().agent, store)
    for take in (
        lambda: runner.run_async("s", "hi", message_id="\0approval:5"),
        lambda: runner.accept("s", "hi", message_id="\0approval:5"),
        lambda: store.mark_message_processed("\0approval:5", session_id="s"),
        lambda: store.is_message_processed("\0approval:5", session_id="s"),
    ):
        with pytest.raises(ValueError, match="must not begin with a NUL"):
            await take()


async def test_as_data(store: StoreBackend) -> None:
    """A conversation carries its waiting calls along as data; a client's copy holds none that could be approved."""
    till = Till(refunds(5))
    (call,) = (await Runner(till.agent, store).run_async("s", "refund it")).awaiting_approval
    session = await session_in(store)
    copy = SessionContext.from_dict(session.to_dict(), agents=till.agent)
    assert copy.pending_approvals == (call,)
    client = SessionContext.from_dict(session.to_dict(for_client=True), agents=till.agent, from_client=True)
    assert client.pending_approvals == ()
    with pytest.raises(ApprovalNotFoundError):
        await till.agent.approve(call.id, session=client)
    assert (await till.agent.approve(call.id, session=copy)).content == "done"
    assert (till.paid, AWAITS_APPROVAL_KEY in copy.history[1].extra) == ([5], True)
