"""A worker does accepted turns and what processes that are gone have left, and tells their answers."""

from __future__ import annotations

import asyncio
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from chatflow.core.agent import Agent
from chatflow.core.backend import StoreBackend
from chatflow.core.engine import EngineReply, EngineRequest
from chatflow.core.messages import AgentResponse
from chatflow.core.records import Key, PendingTurn
from chatflow.core.tools import ToolContext
from chatflow.engines.scripted import ScriptedEngine
from chatflow.exceptions import EngineRateLimitError, SessionConflictError, StoreError
from chatflow.runner import Runner
from chatflow.running.worker import delay
from chatflow.testing import Faults
from chatflow.testing.conformance.conftest import Clock, Restart
from chatflow.testing.conformance.conversation import SUPPORT, Crowd, PausingEngine, outside, texts, until, user
from chatflow.testing.conformance.work import Heard, lose_all, nothing_left, states

CALL = ScriptedEngine.call


@pytest.fixture(autouse=True)
def delays(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, str]]:
    """The waits that were asked for, after how many failures and why; none is made."""
    asked: list[tuple[int, str]] = []

    def none(failures: int, error: BaseException) -> float:
        asked.append((failures, type(error).__name__))
        return 0

    for module in ("chatflow.runner", "chatflow.running.worker"):
        monkeypatch.setattr(f"{module}.delay", none)
    return asked


def runner_on(store: StoreBackend, *replies: Any, name: str = "Support", **options: Any) -> Runner:
    """A runner whose model says these replies."""
    return Runner(Agent(name), store, ScriptedEngine(replies), **options)


def echoing(store: StoreBackend, **options: Any) -> Runner:
    """A runner whose model repeats what the user said."""
    return Runner(Agent("Support"), store, ScriptedEngine(default=lambda request: f"{last(request)}!"), **options)


def last(request: EngineRequest) -> str:
    """What the user said last."""
    return request.messages[-1].text


async def said(store: StoreBackend, session_id: str = "s") -> list[str]:
    """What was said in the conversation."""
    return texts((await store.messages(session_id)).items)


async def accept(runner: Runner, *said: str, session_id: str = "s") -> None:
    """Accept these messages, each with its text for its id."""
    for text in said:
        await runner.accept(session_id, text, message_id=text)


# --- order, and turns at once ---


async def test_in_order(store: StoreBackend) -> None:
    """Messages of one conversation are done, and their answers told, in the order they were accepted."""
    runner, heard = echoing(store), Heard()
    await accept(runner, "1", "2", "3")
    async with runner.working(heard):
        await heard.of(3)
        await accept(runner, "4")
        await heard.of(4)
    assert heard.contents() == ["1!", "2!", "3!", "4!"]
    assert await said(store) == ["1", "1!", "2", "2!", "3", "3!", "4", "4!"]
    await nothing_left(store)
    assert [(turn.state, turn.message_id) for turn in heard.turns][:2] == [("answered", "1"), ("answered", "2")]


async def test_conversations_at_once(store: StoreBackend) -> None:
    """Conversations are worked on at the same time: all of them meet inside the model."""
    barrier, heard = asyncio.Barrier(5), Heard()

    async def meet(request: EngineRequest) -> str:
        await barrier.wait()
        return "met"

    runner = Runner(Agent("Support"), store, ScriptedEngine(default=meet))
    for number in range(5):
        await accept(runner, "hi", session_id=f"s{number}")
    async with runner.working(heard):
        await heard.of(5)


async def test_no_more_at_once_than_allowed(store: StoreBackend) -> None:
    """No more turns run at once than max_concurrent_turns, those that are awaited included."""
    crowd, heard = Crowd(), Heard()
    runner = Runner(Agent("Support"), store, ScriptedEngine(default=crowd.answer), max_concurrent_turns=2)
    for number in range(6):
        await accept(runner, "hi", session_id=f"s{number}")
    async with runner.working(heard), anyio.create_task_group() as group:
        for number in range(3):
            group.start_soon(runner.run_async, f"awaited {number}", "hi")
        await heard.of(6)
    assert crowd.most <= 2


async def test_two_workers(store: StoreBackend) -> None:
    """Two workers on one store do each message once, and each conversation's in order."""
    runner, heard = echoing(store), Heard()
    for number in range(4):
        await accept(runner, "1", "2", "3", session_id=f"s{number}")
    async with runner.working(heard), echoing(store).working(heard):
        await heard.of(12)
    for number in range(4):
        assert await said(store, f"s{number}") == ["1", "1!", "2", "2!", "3", "3!"]
        assert sorted(heard.contents(f"s{number}")) == ["1!", "2!", "3!"]


async def test_worker_of_another_store(store: StoreBackend, second: StoreBackend) -> None:
    """What was accepted on one store is done by a worker of another on the same data."""
    runner, heard = echoing(store), Heard()
    async with echoing(second).working(heard):
        await accept(runner, "1", "2")
        await heard.of(2)
    assert await said(store) == ["1", "1!", "2", "2!"]


async def test_without_on_response(store: StoreBackend) -> None:
    """A worker may work for nobody: the answers can be sent for again, and are kept for a worker that tells them."""
    runner, heard = echoing(store), Heard()
    async with runner.working():
        await accept(runner, "1", "2")
        while {turn.state for turn in await store.pending_turns()} != {"answered"}:
            await anyio.lowlevel.checkpoint()
        assert (await runner.run_async("s", "2", message_id="2")).content == "2!"
    assert await said(store) == ["1", "1!", "2", "2!"]
    async with runner.working(heard):
        await heard.of(2)
        await nothing_left(store)
    assert heard.contents() == ["1!", "2!"]


async def test_belongs_to_no_turn(store: StoreBackend) -> None:
    """Work begun inside a turn of the same conversation waits for that turn, and is no part of it."""
    runner, heard = echoing(store), Heard()
    async with (await store.get_or_create("s", SUPPORT)).turn() as session:
        await session.add_message(user("bare"))
        await accept(runner, "1")
        working = runner.working(heard)
        await working.__aenter__()
    await heard.of(1)
    await working.__aexit__(None, None, None)
    assert await said(store) == ["bare", "1", "1!"]


async def test_tells_outside_of_every_turn(store: StoreBackend) -> None:
    """What a worker calls belongs to no turn of whoever opened it: it sees the last commit."""
    runner, seen, told = echoing(store), list[list[str]](), anyio.Event()
    async with (await store.get_or_create("s", SUPPORT)).turn() as session:
        await session.add_message(user("not committed"))

        async def look(turn: PendingTurn, response: AgentResponse) -> None:
            seen.append(texts(session.history))
            told.set()

        async with runner.working(look):
            await accept(runner, "1", session_id="other")
            await told.wait()
    assert seen == [[]]


async def test_accepting_wakes_the_worker(store: StoreBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker of the same process is woken by what is accepted, and need not look for it."""
    monkeypatch.setattr("chatflow.running.worker._LOOK", 10**6)
    runner, heard = echoing(store), Heard()
    async with runner.working(heard):
        await anyio.wait_all_tasks_blocked()
        await accept(runner, "1")
        await heard.of(1)


async def test_takes_no_more_than_it_can_do(store: StoreBackend) -> None:
    """What a worker has no slot for is left to others."""
    engine, heard = PausingEngine(), Heard()
    busy = Runner(Agent("Support"), store, engine, max_concurrent_turns=1)
    for session_id in ("a", "b", "c"):
        await accept(busy, "1", session_id=session_id)
    async with busy.working():
        await engine.asked.wait()
        async with echoing(store).working(heard):
            await heard.of(2)
        engine.go_on.set()
    assert sorted(heard.answers) == [("b", "1!"), ("c", "1!")]


async def test_response_may_start_turns(store: StoreBackend) -> None:
    """`on_response` may itself run messages, also of the same conversation."""
    runner, told = echoing(store), anyio.Event()

    async def answer_again(turn: PendingTurn, response: AgentResponse) -> None:
        await runner.run_async("s", f"after {response.content}")
        told.set()

    async with runner.working(answer_again):
        await accept(runner, "1")
        await told.wait()
    assert await said(store) == ["1", "1!", "after 1!", "after 1!!"]


# --- failures ---


async def test_tried_again_in_its_place(store: StoreBackend, delays: list[tuple[int, str]]) -> None:
    """A turn that fails is tried again with growing delays before the next of its conversation, and is told once."""
    runner, heard = runner_on(store, LookupError, TimeoutError, "1!", "2!"), Heard()
    await accept(runner, "1", "2")
    async with runner.working(heard):
        await heard.of(2)
    assert delays == [(1, "LookupError"), (2, "TimeoutError")]
    assert heard.contents() == ["1!", "2!"]
    assert await said(store) == ["1", "1!", "2", "2!"]


async def test_holds_its_place_while_it_waits(store: StoreBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    """A turn that waits to be tried again is accepted still, and whoever comes after it waits behind it."""
    failed, go_on, heard = anyio.Event(), anyio.Event(), Heard()

    async def wait(seconds: float) -> None:
        failed.set()
        await go_on.wait()

    monkeypatch.setattr("chatflow.running.worker.anyio.sleep", wait)
    runner, responses = runner_on(store, LookupError, "1!", "2!"), list[AgentResponse]()

    async def run() -> None:
        responses.append(await runner.run_async("s", "2"))

    await accept(runner, "1")
    async with runner.working(heard), anyio.create_task_group() as group:
        await failed.wait()
        assert await states(store) == [("1", "accepted", 1)]
        group.start_soon(run)
        await until(lambda: bool(store.line._waiters))
        go_on.set()
    assert await said(store) == ["1", "1!", "2", "2!"]
    assert heard.contents() == ["1!"]


async def test_taken_while_it_waits(
    store: StoreBackend, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A turn that waits to be tried again, and turns out to have been taken over, is left to whoever has taken it."""
    failed, go_on, heard = anyio.Event(), anyio.Event(), Heard()

    async def wait(seconds: float) -> None:
        failed.set()
        await go_on.wait()

    monkeypatch.setattr("chatflow.running.worker.anyio.sleep", wait)
    Faults(store).before("leave_turn", StoreError("no room", store=store.name))
    runner = runner_on(store, LookupError, "1!", "2!")
    await accept(runner, "1")
    async with runner.working(heard):
        await failed.wait()
        await lose_all(store)
        assert (await runner.run_async("s", "1", message_id="1")).content == "1!"
        go_on.set()
        await nothing_left(store)
    assert await said(store) == ["1", "1!"]
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


async def test_given_up(store: StoreBackend, caplog: pytest.LogCaptureFixture) -> None:
    """A turn that has failed as often as it may is given up and listed; the next one is done, and nobody told."""
    runner, heard = runner_on(store, LookupError, LookupError, "2!", max_attempts=2), Heard()
    await accept(runner, "1", "2")
    async with runner.working(heard):
        await heard.of(1)
    assert await states(store) == [("1", "dead", 2)]
    assert (heard.contents(), await said(store)) == (["2!"], ["2", "2!"])
    assert "was given up; store.pending_turns() lists it" in caplog.text


async def test_goes_on_from_its_journal(store: StoreBackend) -> None:
    """A turn that is tried again makes no call twice that had ended."""
    agent, called, heard = Agent("Support"), list[str](), Heard()

    @agent.tool
    async def charge(context: ToolContext) -> str:
        called.append("charge")
        context.session.state["charged"] = True
        return "charged"

    runner = Runner(agent, store, ScriptedEngine([CALL("charge"), LookupError, LookupError, "done"]))
    await accept(runner, "1")
    async with runner.working(heard):
        await heard.of(1)
    session = await store.get("s")
    assert session is not None
    assert (called, session.state) == (["charge"], {"charged": True})


@pytest.mark.parametrize(
    ("method", "lease_seconds"),
    [
        ("take_work", 1000),
        ("start_turn", 1000),
        ("commit_turn", 1000),
        ("leave_turn", 1000),
        ("session_of", 1000),
        ("end_answered", 1000),
    ],
)
async def test_storage_fails_for_a_while(
    store: StoreBackend, monkeypatch: pytest.MonkeyPatch, method: str, lease_seconds: float
) -> None:
    """A storage that fails for a while delays the work, and nothing is lost; answers are told at least once."""
    replies = [LookupError] if method == "leave_turn" else []
    engine = ScriptedEngine(replies, default=lambda request: f"{last(request)}!")
    runner, heard, failing = Runner(Agent("Support"), store, engine, lease_seconds=lease_seconds), Heard(), [True]
    working = getattr(store, method)

    async def fail_at_first(*arguments: Any, **options: Any) -> Any:
        if failing:
            failing.pop()
            raise StoreError("the disk is full", store=store.name)
        return await working(*arguments, **options)

    monkeypatch.setattr(store, method, fail_at_first)
    await accept(runner, "1", "2")
    async with runner.working(heard):
        await heard.of(2)
        await nothing_left(store)
    assert not failing
    assert list(dict.fromkeys(heard.contents())) == ["1!", "2!"]
    assert await said(store) == ["1", "1!", "2", "2!"]


async def test_store_is_closed_meanwhile(store: StoreBackend) -> None:
    """A worker whose store is closed ends, without an error."""
    runner, heard = echoing(store), Heard()
    async with runner.working(heard):
        await accept(runner, "1")
        await heard.of(1)
        await store.aclose()


async def test_store_is_closed_during_a_turn(store: StoreBackend) -> None:
    """A store that is closed while a worker's turn runs cancels it, and the worker ends without an error."""
    engine, heard = PausingEngine(), Heard()
    runner = Runner(Agent("Support"), store, engine)
    async with runner.working(heard):
        await accept(runner, "1")
        await engine.asked.wait()
        await store.aclose(grace=0)
    assert heard.calls == 0


# --- telling the answers ---


async def test_told_again_after_an_error(store: StoreBackend, delays: list[tuple[int, str]]) -> None:
    """`on_response` is called again with growing delays until it returns; the answers after it wait for that."""
    runner, heard = echoing(store), Heard(LookupError(), LookupError())
    await accept(runner, "1", "2")
    async with runner.working(heard):
        await heard.of(2)
    assert (heard.contents(), heard.calls) == (["1!", "2!"], 4)
    assert delays == [(1, "LookupError"), (2, "LookupError")]
    assert await said(store) == ["1", "1!", "2", "2!"]


async def test_next_turn_runs_while_the_answer_is_told(store: StoreBackend) -> None:
    """A conversation's next turn runs while an answer is told; its own answer is told after that."""
    go_on, told, heard = anyio.Event(), list[str](), Heard()

    async def slowly(turn: PendingTurn, response: AgentResponse) -> None:
        if response.content == "1!":
            await go_on.wait()
        told.append(response.content)
        await heard(turn, response)

    runner = echoing(store)
    await accept(runner, "1", "2")
    async with runner.working(slowly):
        while await said(store) != ["1", "1!", "2", "2!"]:
            await anyio.lowlevel.checkpoint()
        await anyio.wait_all_tasks_blocked()
        assert told == []
        go_on.set()
        await heard.of(2)
    assert told == ["1!", "2!"]


async def test_told_after_the_worker_was_stopped(store: StoreBackend) -> None:
    """An answer whose `on_response` was cancelled at the end of the grace is told by the next worker."""
    runner, telling, heard = echoing(store), anyio.Event(), Heard()

    async def never(turn: PendingTurn, response: AgentResponse) -> None:
        telling.set()
        await anyio.sleep_forever()

    await accept(runner, "1", "2")
    async with runner.working(never, grace=0):
        await telling.wait()
    async with runner.working(heard):
        await heard.of(2)
    assert heard.contents() == ["1!", "2!"]
    assert await said(store) == ["1", "1!", "2", "2!"]


async def test_answered_by_others_is_told(store: StoreBackend) -> None:
    """An accepted turn that somebody else's run has answered is told by the next worker."""
    runner, heard = echoing(store), Heard()
    await accept(runner, "1", "2")
    await runner.run_async("s", "3")
    async with runner.working(heard):
        await heard.of(2)
        await accept(runner, "4")
        await heard.of(3)
    assert heard.contents() == ["1!", "2!", "4!"]


async def test_answer_that_was_forgotten(store: StoreBackend) -> None:
    """An answered turn whose conversation was deleted is not told."""
    runner, heard = echoing(store), Heard()
    await accept(runner, "1")
    await runner.run_async("s", "2")
    await store.delete("s")
    await accept(runner, "3", session_id="other")
    async with runner.working(heard):
        await heard.of(1)
    assert heard.answers == [("other", "3!")]


async def test_answer_that_was_told_late(store: StoreBackend, clock: Clock) -> None:
    """An answer is told also where its message's id has expired in the meantime, as long as it is there."""
    runner, heard = echoing(store), Heard()
    await accept(runner, "1")
    await runner.run_async("s", "1", message_id="1")
    clock.passes(hours=store.dedup_ttl_hours + 1)
    async with runner.working(heard):
        await heard.of(1)
    assert heard.contents() == ["1!"]


async def test_answer_that_is_no_longer_there(store: StoreBackend, clock: Clock) -> None:
    """An answered turn whose answer was forgotten before anybody was told is not told."""
    failing = runner_on(store, *[LookupError] * 12)
    for number in range(12):
        with pytest.raises(LookupError):
            await failing.run_async("failed", "hi", message_id=str(number))
    runner, heard = echoing(store), Heard()
    await accept(runner, "1")
    await runner.run_async("s", "1", message_id="1")
    clock.passes(hours=store.dedup_ttl_hours + 1)
    await store.purge_processed(10)
    async with runner.working(heard):
        await accept(runner, "2")
        await heard.of(1)
    assert heard.contents() == ["2!"]


# --- what is left of others ---


def losing(store: StoreBackend, *replies: Any) -> Runner:
    """A runner that loses its first turn."""

    async def lose(request: EngineRequest) -> str:
        await outside(lose_all(store))
        return "nobody hears this"

    return runner_on(store, lose, *replies)


async def test_interrupted_turn(store: StoreBackend) -> None:
    """A worker finishes what a process that is gone has left, and keeps the answer for who sends it again."""
    runner, heard = losing(store, "1!", "2!"), Heard()
    with pytest.raises(SessionConflictError):
        await runner.run_async("s", "1", message_id="1")
    await accept(runner, "2")
    async with runner.working(heard):
        await heard.of(1)
    assert (heard.contents(), await said(store)) == (["2!"], ["1", "1!", "2", "2!"])
    again = await runner.run_async("s", "1", message_id="1")
    assert (again.content, again.duplicate) == ("1!", True)


async def test_interrupted_turn_that_fails(store: StoreBackend, caplog: pytest.LogCaptureFixture) -> None:
    """An interrupted turn that fails steps aside, since nobody has asked for more; sent again it goes on."""
    runner, heard = losing(store, LookupError, "2!", "1!"), Heard()
    with pytest.raises(SessionConflictError):
        await runner.run_async("s", "1", message_id="1")
    await accept(runner, "2")
    async with runner.working(heard):
        await heard.of(1)
    assert await states(store) == [("1", "told", 2)]
    assert (await runner.run_async("s", "1", message_id="1")).content == "1!"
    assert "ended" in caplog.text


async def test_worker_loses_its_turn(store: StoreBackend) -> None:
    """A worker that loses a turn does no more of it, and goes on with what is left of it."""
    runner, heard = losing(store, "1!"), Heard()
    await accept(runner, "1")
    async with runner.working(heard):
        await heard.of(1)
    assert (heard.contents(), await said(store)) == (["1!"], ["1", "1!"])


async def test_taken_by_another_while_it_waits_to_be_tried_again(
    store: StoreBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A turn that was taken by another while its worker waited is left to that one, which has it told."""
    runner, heard = runner_on(store, LookupError, "1!"), Heard()

    async def lose(seconds: float) -> None:
        await lose_all(store)
        await runner.run_async("s", "1", message_id="1")

    monkeypatch.setattr("chatflow.running.worker.anyio.sleep", lose)
    await accept(runner, "1")
    async with runner.working(heard):
        await heard.of(1)
    assert (heard.contents(), await said(store)) == (["1!"], ["1", "1!"])


async def test_other_application(store: StoreBackend) -> None:
    """Two applications on one store do only their own work."""
    mine, theirs = runner_on(store, "mine!"), runner_on(store, "theirs!", name="Other")
    heard_mine, heard_theirs = Heard(), Heard()
    await theirs.accept("s", "theirs", message_id="theirs")
    await mine.accept("s", "mine", message_id="mine")
    async with mine.working(heard_mine):
        await heard_mine.of(1)
        assert [found for found in await states(store) if found[0] != "mine"] == [("theirs", "accepted", 0)]
        async with theirs.working(heard_theirs):
            await heard_theirs.of(1)
    assert (heard_mine.contents(), heard_theirs.contents()) == (["mine!"], ["theirs!"])


async def test_behind_another_application(store: StoreBackend) -> None:
    """Work that stands behind another application's turn is not taken before that has ended."""
    engine, heard = PausingEngine(), Heard()
    other, runner = Runner(Agent("Other"), store, engine), echoing(store)
    async with anyio.create_task_group() as group:
        group.start_soon(other.run_async, "s", "theirs")
        await engine.asked.wait()
        await accept(runner, "1")
        assert await store.take_work("Support", 10, 5, answers=True) == ()
        assert await states(store) == [(None, "running", 1), ("1", "accepted", 0)]
        engine.go_on.set()
    async with runner.working(heard):
        await heard.of(1)
    assert await said(store) == ["theirs", "answer", "1", "1!"]


async def test_after_a_restart(store: StoreBackend, restart: Restart) -> None:
    """A worker does the rows of a former process: waiting, and cut off in the middle of a call."""
    agent, heard = Agent("Support"), Heard()
    engine = PausingEngine()
    runner = Runner(agent, store, engine)
    await accept(runner, "1", "2")
    async with runner.working(heard, grace=0):
        await engine.asked.wait()
    assert [state for _, state, _ in await states(store)] == ["accepted", "accepted"]
    store = await restart(store)
    async with echoing(store).working(heard):
        await heard.of(2)
    assert heard.contents() == ["1!", "2!"]


async def test_work_that_comes_before_it_by_now(store: StoreBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    """A turn that a worker has lost, and that failed elsewhere, comes after what was accepted meanwhile."""
    runner = losing(store, "lost in the storage", LookupError, "2!", "1!")
    take, commit = store.take_work, store.commit_turn

    async def fail_once(*_: Any) -> Any:
        monkeypatch.setattr(store, "commit_turn", commit)
        monkeypatch.setattr(store, "take_work", nothing)
        raise StoreError("the disk is full", store=store.name)

    async def nothing(*_: Any, **__: Any) -> tuple[()]:
        return ()

    async def meanwhile(seconds: float) -> None:
        await lose_all(store)
        with pytest.raises(LookupError):
            await runner.run_async("s", "1", message_id="1")
        await accept(runner, "2")

    with pytest.raises(SessionConflictError):
        await runner.run_async("s", "1", message_id="1")
    monkeypatch.setattr(store, "commit_turn", fail_once)
    monkeypatch.setattr("chatflow.running.worker.anyio.sleep", meanwhile)
    async with runner.working():
        while await said(store) != ["2", "2!", "1", "1!"]:
            await anyio.lowlevel.checkpoint()
    monkeypatch.setattr(store, "take_work", take)
    heard = Heard()
    async with runner.working(heard):
        await heard.of(1)
    assert heard.contents() == ["2!"]


# --- the end ---


async def test_end_waits_for_what_is_under_way(store: StoreBackend) -> None:
    """At the end no more is taken, and what is under way may end, its answer told."""
    engine, heard = PausingEngine(), Heard()
    runner = Runner(Agent("Support"), store, engine)
    await accept(runner, "1", "2")
    async with anyio.create_task_group() as group, runner.working(heard):
        await engine.asked.wait()

        async def go_on() -> None:
            await anyio.wait_all_tasks_blocked()
            engine.go_on.set()

        group.start_soon(go_on)
    assert heard.contents() == ["answer"]
    assert await states(store) == [("2", "accepted", 0)]


async def test_end_after_the_grace(store: StoreBackend) -> None:
    """What has not ended within the grace is cancelled, and waits for the next worker with no attempt counted."""
    engine, heard = PausingEngine(), Heard()
    runner = Runner(Agent("Support"), store, engine)
    await accept(runner, "1")
    async with runner.working(heard, grace=0):
        await engine.asked.wait()
    assert await states(store) == [("1", "accepted", 0)]
    assert heard.calls == 0
    async with echoing(store).working(heard):
        await heard.of(1)
    assert heard.contents() == ["1!"]


async def test_end_while_it_waits_to_try_again(store: StoreBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    """A turn that waits to be tried again when the worker ends is free for the next one, its failure counted."""
    failed, heard = anyio.Event(), Heard()

    async def wait(seconds: float) -> None:
        failed.set()
        await anyio.Event().wait()

    runner = runner_on(store, LookupError, "1!")
    await accept(runner, "1")
    with monkeypatch.context() as patched:
        patched.setattr("chatflow.running.worker.anyio.sleep", wait)
        async with runner.working(heard, grace=0):
            await failed.wait()
    assert await states(store) == [("1", "accepted", 1)]
    async with runner.working(heard):
        await heard.of(1)


async def test_telling_fails_at_the_end(store: StoreBackend) -> None:
    """An answer whose telling fails while the worker ends is not tried again there, and told by the next one."""
    runner, telling, go_on, heard = echoing(store), anyio.Event(), anyio.Event(), Heard()

    async def fail_late(turn: PendingTurn, response: AgentResponse) -> None:
        telling.set()
        await go_on.wait()
        raise LookupError

    await accept(runner, "1")
    async with anyio.create_task_group() as group, runner.working(fail_late):
        await telling.wait()

        async def later() -> None:
            await anyio.wait_all_tasks_blocked()
            go_on.set()

        group.start_soon(later)
    assert await states(store) == [("1", "answered", 1)]
    async with runner.working(heard):
        await heard.of(1)
    assert heard.contents() == ["1!"]


async def test_body_fails(store: StoreBackend) -> None:
    """An error of the code inside `working` leaves as it is, after the worker has ended."""
    runner = echoing(store)
    with pytest.raises(LookupError):  # the worker ends with it
        async with runner.working():
            raise LookupError
    await accept(runner, "1")
    for _ in range(20):
        await anyio.lowlevel.checkpoint()
    assert await states(store) == [("1", "accepted", 0)]


@pytest.mark.parametrize("cancel", ["asyncio", "anyio"])
async def test_body_is_cancelled(store: StoreBackend, cancel: str) -> None:
    """A cancellation of the code inside `working` leaves the work to the next one."""
    engine = PausingEngine()
    runner = Runner(Agent("Support"), store, engine)
    await accept(runner, "1")

    async def work() -> None:
        async with runner.working(grace=10):
            await anyio.sleep_forever()

    if cancel == "anyio":
        async with anyio.create_task_group() as group:
            group.start_soon(work)
            await engine.asked.wait()
            group.cancel_scope.cancel()
    else:
        task = asyncio.create_task(work())
        await engine.asked.wait()
        for _ in range(2):
            task.cancel()
            await anyio.wait_all_tasks_blocked()
        await asyncio.wait([task])
        assert task.cancelled()
    assert await states(store) == [("1", "accepted", 0)]


async def test_end_while_it_takes(store: StoreBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was being taken when the worker was stopped is given back, unless its conversation has gone meanwhile."""
    runner, take, taken, go_on = echoing(store), store.take_work, anyio.Event(), anyio.Event()

    async def take_slowly(*arguments: Any, **details: Any) -> Any:
        found = await take(*arguments, **details)
        taken.set()
        await go_on.wait()
        return found

    for session_id in ("a", "b", "c"):
        await accept(runner, "1", session_id=session_id)
    with monkeypatch.context() as patched:
        patched.setattr(store, "take_work", take_slowly)
        async with anyio.create_task_group() as group, runner.working(grace=0):
            await taken.wait()
            await store.delete("b")

            async def later() -> None:
                await anyio.wait_all_tasks_blocked()
                go_on.set()

            group.start_soon(later)
    assert await states(store) == [("1", "accepted", 0)] * 2
    heard = Heard()
    async with runner.working(heard):
        await heard.of(2)
    assert sorted(heard.answers) == [("a", "1!"), ("c", "1!")]


async def test_taken_in_the_last_moment(store: StoreBackend) -> None:
    """What is taken while the worker ends is not begun, and given back."""
    runner, heard, taking, go_on = echoing(store), Heard(), anyio.Event(), anyio.Event()

    async def wait() -> None:
        taking.set()
        await go_on.wait()

    await accept(runner, "1")
    Faults(store).before("take_work", wait)
    async with anyio.create_task_group() as group, runner.working(heard):
        await taking.wait()

        async def later() -> None:
            await anyio.wait_all_tasks_blocked()
            go_on.set()

        group.start_soon(later)
    assert await states(store) == [("1", "accepted", 0)]
    assert (await store.take_work("Support", 10, 5, answers=True))[0].turn.message_id == "1"
    assert heard.calls == 0


async def test_left_before_it_begins(store: StoreBackend) -> None:
    """A worker that is left at once has taken nothing."""
    runner = echoing(store)
    await accept(runner, "1")
    async with runner.working():
        pass
    assert await states(store) == [("1", "accepted", 0)]


# --- deleting ---


async def test_deleted_while_it_waits(store: StoreBackend) -> None:
    """An accepted message of a conversation that is deleted is gone: nothing comes back, and nobody is told."""
    runner, heard = echoing(store), Heard()
    await accept(runner, "1")
    await store.delete("s")
    await accept(runner, "2", session_id="other")
    async with runner.working(heard):
        await heard.of(1)
    assert heard.answers == [("other", "2!")]
    assert await store.get("s") is None


async def test_deleted_while_it_is_taken(store: StoreBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    """A conversation deleted at the moment that its message is taken is left alone."""
    runner, heard, look = echoing(store), Heard(), store.session_of

    async def delete_first(key: Key) -> Any:
        if key.session_id == "s":
            await store.delete("s")
        return await look(key)

    monkeypatch.setattr(store, "session_of", delete_first)
    await accept(runner, "1")
    await accept(runner, "2", session_id="other")
    async with runner.working(heard):
        await heard.of(1)
    assert heard.answers == [("other", "2!")]
    assert await store.get("s") is None


@pytest.mark.parametrize("how", ["delete", "clear"])
async def test_deleted_while_it_runs(store: StoreBackend, how: str) -> None:
    """A conversation deleted while its accepted message runs stays deleted, and nobody is told."""
    heard = Heard()

    async def delete(request: EngineRequest) -> EngineReply | str:
        if last(request) == "1":
            await outside(store.delete("s") if how == "delete" else store.clear())
        return f"{last(request)}!"

    runner = Runner(Agent("Support"), store, ScriptedEngine(default=delete))
    await accept(runner, "1")
    async with runner.working(heard):
        while await store.pending_turns():
            await anyio.lowlevel.checkpoint()
        await accept(runner, "2", session_id="other")
        await heard.of(1)
    assert heard.answers == [("other", "2!")]
    assert await store.get("s") is None


async def test_deleted_and_used_anew_while_it_waits_to_be_tried_again(
    store: StoreBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The new conversation of a deleted one's id gets nothing of a message that was to be tried again."""
    runner, heard = runner_on(store, LookupError, "2!"), Heard()

    async def delete(seconds: float) -> None:
        await store.delete("s")
        await accept(runner, "2")

    monkeypatch.setattr("chatflow.running.worker.anyio.sleep", delete)
    await accept(runner, "1")
    async with runner.working(heard):
        await heard.of(1)
    assert (heard.contents(), await said(store)) == (["2!"], ["2", "2!"])


async def test_deleted_while_it_is_told(store: StoreBackend) -> None:
    """A conversation may be deleted while its answer is told."""
    heard = Heard()

    async def delete(turn: PendingTurn, response: AgentResponse) -> None:
        await store.delete("s")
        await heard(turn, response)

    runner = echoing(store)
    await accept(runner, "1")
    async with runner.working(delete):
        await heard.of(1)
    assert await store.pending_turns() == ()


# --- how long to wait ---


@pytest.mark.parametrize(
    ("failures", "seconds"), [(1, 1), (2, 4), (3, 16), (4, 64), (5, 256), (6, 300), (600, 300), (10**6, 300)]
)
def test_delays(failures: int, seconds: float) -> None:
    """The wait after each failure is four times the one before, up to five minutes, for ever."""
    assert delay(failures, LookupError()) == seconds


def test_delay_that_a_provider_asks_for() -> None:
    """Where a provider says how long to wait, so long is waited, up to five minutes."""

    def asked(seconds: float) -> EngineRateLimitError:
        return EngineRateLimitError("slow down", model="gpt", retry_after=seconds)

    assert [delay(1, asked(7)), delay(3, asked(7)), delay(1, asked(1000))] == [7, 16, 300]
