from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack, suppress
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from chatflow.core.records import Claim
from chatflow.core.session import SessionContext
from chatflow.core.store import BaseSessionStore
from chatflow.core.turn import Turn
from chatflow.engines.scripted import ScriptedEngine
from chatflow.exceptions import TurnInsideTurnError
from chatflow.runner import Runner
from chatflow.testing.conformance.conftest import OpenStore
from chatflow.testing.conformance.conversation import (
    BILLING,
    SUPPORT,
    call,
    outside,
    queued,
    result,
    say,
    stored,
    system,
    texts,
    user,
)


class BrokenError(Exception):
    """What a body raises to end its turn."""


async def change_everything(session: SessionContext) -> None:
    """Make a change of every kind, enough to prune what was there."""
    for text in ("x", "y", "z"):
        await session.add_message(user(text))
    await session.add_message(system("be brief"))
    await session.set_active_agent(BILLING)
    session.state["seen"] = True
    del session.state["old"]
    session.metadata["channel"] = "sms"
    del session.metadata["old"]


async def by_exception(session: SessionContext) -> None:
    """End the turn with an exception."""
    with suppress(BrokenError):
        async with session.turn():
            await change_everything(session)
            raise BrokenError


async def by_base_exception(session: SessionContext) -> None:
    """End the turn with what is no Exception."""
    with suppress(GeneratorExit):
        async with session.turn():
            await change_everything(session)
            raise GeneratorExit


async def by_scope(session: SessionContext) -> None:
    """End the turn by cancelling the scope around it."""
    with anyio.CancelScope() as scope:
        async with session.turn():
            await change_everything(session)
            scope.cancel()
            await anyio.sleep_forever()


async def by_cancel(session: SessionContext) -> None:
    """End the turn by cancelling its task."""
    changed = asyncio.Event()

    async def turn() -> None:
        async with session.turn():
            await change_everything(session)
            changed.set()
            await anyio.sleep_forever()

    task = asyncio.create_task(turn())
    await changed.wait()
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled()


async def by_fail_after(session: SessionContext) -> None:
    """End the turn by anyio's time limit."""
    with suppress(TimeoutError), anyio.fail_after(None) as scope:
        async with session.turn():
            await change_everything(session)
            scope.deadline = anyio.current_time()
            await anyio.sleep_forever()


async def by_timeout(session: SessionContext) -> None:
    """End the turn by asyncio's time limit."""
    with suppress(TimeoutError):
        async with asyncio.timeout(None) as limit, session.turn():
            await change_everything(session)
            limit.reschedule(asyncio.get_running_loop().time())
            await anyio.sleep_forever()


async def by_child(session: SessionContext) -> None:
    """End the turn by a failure of a task it started."""

    async def child() -> None:
        await change_everything(session)
        raise BrokenError

    with suppress(BaseExceptionGroup):
        async with session.turn(), anyio.create_task_group() as group:
            group.start_soon(child)


FAILURES = [by_exception, by_base_exception, by_scope, by_cancel, by_fail_after, by_timeout, by_child]
Failure = Callable[[SessionContext], Coroutine[Any, Any, None]]


async def full_session(open_store: OpenStore) -> SessionContext:
    """A conversation with something of every kind, and as many turns as it keeps."""
    session = await open_store(default_max_turns=2).get_or_create("s", SUPPORT, {"channel": "web", "old": 1})
    session.state["old"] = 1
    await say(session, "one", "two")
    return session


@pytest.mark.parametrize("fail", FAILURES)
async def test_failed_turn_leaves_no_trace(open_store: OpenStore, fail: Failure) -> None:
    """A turn that fails leaves history (what it pruned included), agent, state and metadata as they were (P2)."""
    session = await full_session(open_store)
    before = await stored(session.store, "s")
    await fail(session)
    assert {
        "history": list(session.history),
        "agent": session.active_agent_name,
        "state": dict(session.state),
        "metadata": dict(session.metadata),
        "max_turns": 2,
    } == before
    assert await stored(session.store, "s") == before


@pytest.mark.parametrize("fail", FAILURES)
async def test_turn_after_failed_one(open_store: OpenStore, fail: Failure) -> None:
    """After a failed turn the next one starts, and commits what it does and nothing else."""
    session = await full_session(open_store)
    await fail(session)
    await say(session, "three")
    assert texts(session.history) == ["two", "two!", "three", "three!"]
    assert texts((await session.store.messages("s")).items) == ["two", "two!", "three", "three!"]


async def test_failed_turn_on_disk(store: BaseSessionStore, second: BaseSessionStore) -> None:
    """Another store on the same data sees nothing of a turn that failed."""
    session = await store.get_or_create("s", SUPPORT, {"old": 1})
    session.state["old"] = 1
    await session.save()
    before = await stored(second, "s")
    await by_exception(session)
    assert await stored(second, "s") == before


async def test_exception_leaves_as_it_is(store: BaseSessionStore) -> None:
    """What a turn's body raises leaves the turn as the same object, in no group and with no other cause."""
    session = await store.get_or_create("s", SUPPORT)
    error = BrokenError()
    with pytest.raises(BrokenError) as caught:
        async with session.turn():
            raise error
    assert caught.value is error
    assert error.__cause__ is None


async def test_turn_gives_session(store: BaseSessionStore) -> None:
    """`async with session.turn() as s` gives the session itself."""
    session = await store.get_or_create("s", SUPPORT)
    async with session.turn() as inside:
        assert inside is session


async def test_commits_as_one(store: BaseSessionStore, second: BaseSessionStore) -> None:
    """Nothing of a turn can be seen by others before its end, and all of it after."""
    session = await store.get_or_create("s", SUPPORT, {"old": 1})
    session.state["old"] = 1
    await session.save()
    before = await stored(second, "s")
    async with session.turn():
        await change_everything(session)
        assert await stored(second, "s") == before
    after = await stored(second, "s")
    assert after is not None
    assert texts(after["history"]) == ["be brief", "x", "y", "z"]
    assert (after["agent"], after["state"], after["metadata"]) == ("Billing", {"seen": True}, {"channel": "sms"})


async def test_lock_is_a_turn(store: BaseSessionStore) -> None:
    """`async with session.lock:` is a turn, which a failure undoes."""
    session = await store.get_or_create("s", SUPPORT)
    async with session.lock:
        await session.add_message(user("hello"))
    with suppress(BrokenError):
        async with session.lock:
            await session.add_message(user("again"))
            raise BrokenError
    assert texts(session.history) == ["hello"]


async def test_operation_outside_is_durable(store: BaseSessionStore, second: BaseSessionStore) -> None:
    """add_message and set_active_agent outside a turn are durable when they return."""
    session = await store.get_or_create("s", SUPPORT)
    await session.add_message(user("hello"))
    await session.set_active_agent(BILLING)
    seen = await stored(second, "s")
    assert seen is not None
    assert (texts(seen["history"]), seen["agent"]) == (["hello"], "Billing")


async def test_add_message_survives(store: BaseSessionStore, restart: Any) -> None:
    """A message added outside a turn is there after a restart."""
    await (await store.get_or_create("s", SUPPORT)).add_message(user("hello"))
    assert texts((await (await restart(store)).messages("s")).items) == ["hello"]


async def test_turn_brings_session_up_to_date(store: BaseSessionStore, second: BaseSessionStore) -> None:
    """A turn begins with what others have committed since the session was last looked at."""
    session = await store.get_or_create("s", SUPPORT)
    other = await second.get_or_create("s", SUPPORT)
    await say(other, "hello")
    other.state["a"] = 1
    await other.save()
    async with session.turn():
        assert (texts(session.history), session.state) == (["hello", "hello!"], {"a": 1})
        await session.add_message(user("again"))
    await second.get("s")
    assert texts(other.history) == ["hello", "hello!", "again"]


async def test_others_cleared_history(store: BaseSessionStore, second: BaseSessionStore) -> None:
    """A session shows that another store has cleared the history."""
    session = await store.get_or_create("s", SUPPORT)
    await session.add_message(system("be brief"))
    await say(session, "hello")
    other = await second.get("s")
    assert other is not None
    await other.clear_history()
    await store.get("s")
    assert session.history == []


async def test_said_anew_after_clearing(
    open_store: OpenStore, store: BaseSessionStore, second: BaseSessionStore
) -> None:
    """A session that has seen neither the clearing nor what was said then takes none of its old messages for new."""
    session = await store.get_or_create("s", SUPPORT)
    await session.add_message(system("be brief"))
    await say(session, "hello")
    other = await second.get("s")
    assert other is not None
    await other.clear_history()
    third = await open_store().get("s")
    assert third is not None
    await third.add_message(system("be kind"))
    await say(third, "good morning", "how are you?")
    async with session.turn():
        assert texts(session.history) == texts(third.history)
    assert texts(session.history)[:2] == ["be kind", "good morning"]


async def test_stores_take_turns(store: BaseSessionStore, second: BaseSessionStore) -> None:
    """A turn of another store on the same data waits for this one's."""
    session = await store.get_or_create("s", SUPPORT)
    other = await second.get_or_create("s", SUPPORT)
    waiting: list[asyncio.Task[None]] = []
    async with session.turn():
        waiting.append(asyncio.create_task(outside(other.add_message(user("second")))))
        await queued(store, 1)
        await session.add_message(user("first"))
    await waiting[0]
    assert texts(other.history) == ["first", "second"]


# --- membership ---


async def test_members_see_working_copy(store: BaseSessionStore) -> None:
    """Inside a turn its own changes are seen at once: messages, agent, state and metadata."""
    session = await store.get_or_create("s", SUPPORT, {"old": 1})
    session.state["old"] = 1
    async with session.turn():
        await change_everything(session)
        assert texts(session.history) == ["be brief", "x", "y", "z"]
        assert session.active_agent is BILLING
        assert (session.state, session.metadata) == ({"seen": True}, {"channel": "sms"})


async def test_members_see_pruned_history(open_store: OpenStore) -> None:
    """Inside a turn the history is already what its commit would leave."""
    session = await full_session(open_store)
    async with session.turn():
        await session.add_message(user("three"))
        assert texts(session.history) == ["two", "two!", "three"]


async def test_child_tasks_are_members(store: BaseSessionStore) -> None:
    """Tasks that a turn starts see its working copy, and what they do is part of its commit."""
    session = await store.get_or_create("s", SUPPORT)

    async def child(number: int) -> None:
        assert texts(session.history)[0] == "hello"
        await session.add_message(user(str(number)))
        session.state[str(number)] = number

    with suppress(BrokenError):
        async with session.turn():
            await session.add_message(user("hello"))
            async with anyio.create_task_group() as group:
                for number in range(3):
                    group.start_soon(child, number)
            assert len(session.history) == 4
            raise BrokenError
    assert (list(session.history), dict(session.state)) == ([], {})


async def test_threads_started_are_members(store: BaseSessionStore) -> None:
    """A worker thread that a turn starts sees its working copy."""
    session = await store.get_or_create("s", SUPPORT)
    async with session.turn():
        await session.add_message(user("hello"))
        assert await anyio.to_thread.run_sync(lambda: texts(session.history)) == ["hello"]


async def test_grandchildren_are_members(store: BaseSessionStore) -> None:
    """A task started by a task that a turn started is a member too."""
    session = await store.get_or_create("s", SUPPORT)

    async def grandchild() -> None:
        await session.add_message(user("from below"))

    async def child() -> None:
        await asyncio.create_task(grandchild())

    async with session.turn():
        await asyncio.create_task(child())
        assert texts(session.history) == ["from below"]


async def test_earlier_task_is_no_member(store: BaseSessionStore) -> None:
    """A task that was running when the turn began sees the last commit, and its change takes a turn of its own."""
    session = await store.get_or_create("s", SUPPORT)
    await session.add_message(user("before"))
    began, seen = asyncio.Event(), []

    async def earlier() -> None:
        await began.wait()
        seen.append((texts(session.history), session.active_agent_name, dict(session.state)))
        await session.add_message(user("after"))

    task = asyncio.create_task(earlier())
    async with session.turn():
        await session.add_message(user("inside"))
        await session.set_active_agent(BILLING)
        session.state["a"] = 1
        began.set()
        await queued(store, 1)
    await task
    assert seen == [(["before"], "Support", {})]
    assert texts(session.history) == ["before", "inside", "after"]


async def test_membership_ends_with_turn(store: BaseSessionStore) -> None:
    """A task that a turn started and that outlives it takes turns of its own afterwards."""
    session = await store.get_or_create("s", SUPPORT)
    ended, added = asyncio.Event(), asyncio.Event()

    async def late() -> None:
        await ended.wait()
        await session.add_message(user("late"))
        assert texts(session.history) == ["hello", "late"]
        added.set()

    async with session.turn():
        task = asyncio.create_task(late())
        await session.add_message(user("hello"))
    with suppress(BrokenError):
        async with session.turn():
            await session.add_message(user("lost"))
            ended.set()
            await queued(store, 1)
            raise BrokenError
    await task
    assert added.is_set()
    assert texts((await store.messages("s")).items) == ["hello", "late"]


async def test_callback_of_outsider(store: BaseSessionStore) -> None:
    """Code that runs in a context from before the turn sees the last commit."""
    session = await store.get_or_create("s", SUPPORT)
    before = contextvars.copy_context()
    async with session.turn():
        await session.add_message(user("hello"))
        assert before.run(lambda: len(session.history)) == 0
        assert len(session.history) == 1


# --- a turn inside a turn ---


async def test_turn_inside_turn(store: BaseSessionStore) -> None:
    """A turn inside a turn of the same conversation is refused at once, and the outer one goes on."""
    session = await store.get_or_create("s", SUPPORT)
    async with session.turn():
        with pytest.raises(TurnInsideTurnError) as caught:
            await session.turn().__aenter__()
        await session.add_message(user("hello"))
    assert caught.value.session_id == "s"
    assert texts(session.history) == ["hello"]


async def test_turn_inside_child_task(store: BaseSessionStore) -> None:
    """A task that a turn started can't take another turn of that conversation."""
    session = await store.get_or_create("s", SUPPORT)
    async with session.turn():
        with pytest.raises(TurnInsideTurnError):
            await asyncio.create_task(session.turn().__aenter__())


async def test_turn_inside_turn_of_other_store(store: BaseSessionStore, second: BaseSessionStore) -> None:
    """A turn inside a turn is refused also where the inner one goes through another store on the same data."""
    session = await store.get_or_create("s", SUPPORT)
    other = await second.get_or_create("s", SUPPORT)
    async with session.turn():
        with pytest.raises(TurnInsideTurnError):
            await other.add_message(user("hello"))
    assert (await store.messages("s")).items == ()


async def test_same_id_in_unrelated_store(store: BaseSessionStore) -> None:
    """A conversation of the same id in a store with other data is another conversation."""
    session = await store.get_or_create("s", SUPPORT)
    alone = SessionContext("s", SUPPORT)
    async with session.turn(), alone.turn():
        await alone.add_message(user("alone"))
        await session.add_message(user("hello"))
    assert (texts(session.history), texts(alone.history)) == (["hello"], ["alone"])


async def test_turn_of_other_conversation_inside(store: BaseSessionStore) -> None:
    """A turn of another conversation inside a turn is a commit of its own, which the outer one's failure leaves."""
    outer, inner = await store.get_or_create("outer", SUPPORT), await store.get_or_create("inner", SUPPORT)
    with suppress(BrokenError):
        async with outer.turn():
            await outer.add_message(user("lost"))
            async with inner.turn():
                await inner.add_message(user("kept"))
                assert texts(outer.history) == ["lost"]
            assert texts(outer.history) == ["lost"]
            raise BrokenError
    assert (texts(outer.history), texts(inner.history)) == ([], ["kept"])


async def test_turn_inside_turn_through_another(store: BaseSessionStore) -> None:
    """A turn of A inside one of B inside one of A is refused at once; both go on."""
    a, b = await store.get_or_create("a", SUPPORT), await store.get_or_create("b", SUPPORT)
    async with a.turn(), b.turn():
        with pytest.raises(TurnInsideTurnError):
            await a.turn().__aenter__()
        await a.add_message(user("to a"))
        await b.add_message(user("to b"))
    assert (texts(a.history), texts(b.history)) == (["to a"], ["to b"])


async def test_cycle_of_two_tasks(store: BaseSessionStore) -> None:
    """Of two tasks that each hold a conversation and want the other's, one is refused and the other completes."""
    await cycle_of(2, store)


async def test_cycle_of_four_tasks(store: BaseSessionStore) -> None:
    """Of four tasks that each hold a conversation and want the next one's, one is refused and the others complete."""
    await cycle_of(4, store)


async def cycle_of(size: int, store: BaseSessionStore) -> None:
    """Close a circle of turns that wait for one another, and see it opened."""
    sessions = [await store.get_or_create(str(number), SUPPORT) for number in range(size)]
    holding = 0
    all_hold = asyncio.Event()
    refused: list[int] = []

    async def hold_and_want(number: int) -> None:
        nonlocal holding
        async with sessions[number].turn():
            holding += 1
            if holding == size:
                all_hold.set()
            await all_hold.wait()
            wanted = sessions[(number + 1) % size]
            try:
                await wanted.add_message(user(f"from {number}"))
            except TurnInsideTurnError:
                refused.append(number)

    async with anyio.create_task_group() as group:
        for number in range(size):
            group.start_soon(hold_and_want, number)
    assert len(refused) == 1
    said = [texts((await store.messages(str(number))).items) for number in range(size)]
    assert said == [[f"from {(n - 1) % size}"] if (n - 1) % size not in refused else [] for n in range(size)]


async def test_cycle_through_waiter(store: BaseSessionStore) -> None:
    """A turn is refused that would wait behind one that waits for this code's own turn."""
    a, b = await store.get_or_create("a", SUPPORT), await store.get_or_create("b", SUPPORT)
    waiting: list[asyncio.Task[None]] = []

    async def holds_b_wants_a() -> None:
        async with b.turn():
            await a.add_message(user("second"))

    async with a.turn():
        waiting.append(asyncio.create_task(outside(holds_b_wants_a())))
        await queued(store, 1)
        with pytest.raises(TurnInsideTurnError):
            await b.add_message(user("never"))
        await a.add_message(user("first"))
    await waiting[0]
    assert (texts(a.history), texts(b.history)) == (["first", "second"], [])


async def test_waiting_that_ends_is_no_cycle(store: BaseSessionStore) -> None:
    """A turn inside a turn waits for another conversation whose holder waits for nobody."""
    a, b = await store.get_or_create("a", SUPPORT), await store.get_or_create("b", SUPPORT)
    holds, go_on = asyncio.Event(), asyncio.Event()

    async def holds_b() -> None:
        async with b.turn():
            holds.set()
            await go_on.wait()
            await b.add_message(user("first"))

    async with anyio.create_task_group() as group:
        group.start_soon(holds_b)
        await holds.wait()
        async with a.turn():
            group.start_soon(wake_once_queued, store, go_on)
            await b.add_message(user("second"))
    assert texts(b.history) == ["first", "second"]


async def wake_once_queued(store: BaseSessionStore, event: asyncio.Event) -> None:
    """Set *event* as soon as a turn waits."""
    await queued(store, 1)
    event.set()


async def test_members_share_another_conversation(store: BaseSessionStore) -> None:
    """Two tasks of one turn that want the same other conversation get it one after the other."""
    a, b = await store.get_or_create("a", SUPPORT), await store.get_or_create("b", SUPPORT)
    async with a.turn(), anyio.create_task_group() as group:
        for number in range(4):
            group.start_soon(b.add_message, user(str(number)))
    assert texts(b.history) == ["0", "1", "2", "3"]


# --- the line ---


async def test_turns_run_in_order(store: BaseSessionStore) -> None:
    """Queued turns run in the order they were queued."""
    session = await store.get_or_create("s", SUPPORT)
    tasks: list[asyncio.Task[None]] = []
    async with session.turn():
        for number in range(10):
            tasks.append(asyncio.create_task(outside(session.add_message(user(str(number))))))
            await queued(store, number + 1)
    await asyncio.wait(tasks)
    assert texts(session.history) == [str(number) for number in range(10)]


async def test_hundred_tasks(open_store: OpenStore) -> None:
    """A hundred tasks on one conversation get a turn each, no two at once, in the order they asked (P3)."""
    session = await open_store(default_max_turns=1000).get_or_create("s", SUPPORT)
    inside = 0

    async def turn(number: int) -> None:
        nonlocal inside
        async with session.turn():
            inside += 1
            assert inside == 1
            await session.add_message(user(str(number)))
            await asyncio.sleep(0)  # a step in which another turn could run, were it let
            inside -= 1

    async with anyio.create_task_group() as group:
        for number in range(100):
            group.start_soon(turn, number)
    assert texts(session.history) == [str(number) for number in range(100)]


async def test_conversations_run_at_once(store: BaseSessionStore) -> None:
    """Turns of different conversations are open at the same time."""
    open_turns, all_open = 0, asyncio.Event()

    async def turn(number: int) -> None:
        nonlocal open_turns
        session = await store.get_or_create(str(number), SUPPORT)
        async with session.turn():
            open_turns += 1
            if open_turns == 8:
                all_open.set()
            await all_open.wait()

    async with anyio.create_task_group() as group:
        for number in range(8):
            group.start_soon(turn, number)


async def test_cancelled_waiter_gives_way(store: BaseSessionStore) -> None:
    """A turn that is cancelled while it waits leaves the line, and the one behind it moves up."""
    session = await store.get_or_create("s", SUPPORT)
    tasks: list[asyncio.Task[None]] = []
    async with session.turn():
        for number in range(3):
            tasks.append(asyncio.create_task(outside(session.add_message(user(str(number))))))
            await queued(store, number + 1)
        tasks[1].cancel()
        await asyncio.wait([tasks[1]])
    await asyncio.wait(tasks)
    assert [task.cancelled() for task in tasks] == [False, True, False]
    assert texts(session.history) == ["0", "2"]


async def test_failed_turn_lets_the_next_run(store: BaseSessionStore) -> None:
    """A queued turn runs after one that failed."""
    session = await store.get_or_create("s", SUPPORT)
    tasks: list[asyncio.Task[None]] = []
    with suppress(BrokenError):
        async with session.turn():
            tasks.append(asyncio.create_task(outside(session.add_message(user("next")))))
            await queued(store, 1)
            raise BrokenError
    await tasks[0]
    assert texts(session.history) == ["next"]


async def test_empty_turn_lets_the_next_run(store: BaseSessionStore) -> None:
    """A queued turn runs after one that changed nothing."""
    session = await store.get_or_create("s", SUPPORT)
    tasks: list[asyncio.Task[None]] = []
    async with session.turn():
        tasks.append(asyncio.create_task(outside(session.add_message(user("next")))))
        await queued(store, 1)
    await tasks[0]
    assert texts(session.history) == ["next"]


async def test_left_in_another_task(store: BaseSessionStore) -> None:
    """A turn may be left in another task than it was entered in, and commits."""
    session = await store.get_or_create("s", SUPPORT)
    stack = AsyncExitStack()

    async def enter() -> None:
        await stack.enter_async_context(session.turn())
        await session.add_message(user("hello"))

    await asyncio.create_task(enter())
    assert session.history == []
    await asyncio.create_task(stack.aclose())
    await say(session, "again")
    assert texts(session.history) == ["hello", "again", "again!"]


async def test_failed_in_another_task(store: BaseSessionStore) -> None:
    """A turn left with an exception in another task than it was entered in leaves no trace."""
    session = await store.get_or_create("s", SUPPORT)
    stack = AsyncExitStack()

    async def enter() -> None:
        await stack.enter_async_context(session.turn())
        await session.add_message(user("hello"))

    async def leave() -> None:
        async with stack:
            raise BrokenError

    await asyncio.create_task(enter())
    with pytest.raises(BrokenError):
        await asyncio.create_task(leave())
    await say(session, "again")
    assert texts(session.history) == ["again", "again!"]


async def test_scope_is_entered_once(store: BaseSessionStore) -> None:
    """One turn() object can't be entered again while it is open."""
    session = await store.get_or_create("s", SUPPORT)
    turn = session.turn()
    async with turn:
        with pytest.raises(TurnInsideTurnError):
            await outside(turn.__aenter__())
    assert (await store.messages("s")).items == ()


async def test_scope_may_be_used_again(store: BaseSessionStore) -> None:
    """A turn() object can be entered again after it was left, for another turn."""
    session = await store.get_or_create("s", SUPPORT)
    turn = session.turn()
    for text in ("one", "two"):
        async with turn:
            await session.add_message(user(text))
    assert texts(session.history) == ["one", "two"]


async def test_call_and_result_in_one_turn(store: BaseSessionStore) -> None:
    """A call and its result added in one turn are both committed."""
    session = await store.get_or_create("s", SUPPORT)
    async with session.turn():
        for message in (user("where is it?"), call("c1"), result("c1")):
            await session.add_message(message)
    assert texts((await store.messages("s")).items) == ["where is it?", "c1", "c1"]


# --- a session on its own ---


async def test_alone() -> None:
    """A session made without a store takes turns as others do."""
    session = SessionContext("s", SUPPORT, max_turns=1, metadata={"channel": "web"})
    await say(session, "one", "two")
    assert texts(session.history) == ["two", "two!"]
    assert (session.metadata, session.max_turns) == ({"channel": "web"}, 1)


async def test_alone_fails() -> None:
    """A failed first turn of a session without a store leaves it as it was made."""
    session = SessionContext("s", SUPPORT, metadata={"old": 1})
    session.state["old"] = 1
    await by_exception(session)
    assert (list(session.history), dict(session.state), dict(session.metadata)) == ([], {"old": 1}, {"old": 1})
    assert session.active_agent is SUPPORT


async def test_failed_first_turn(store: BaseSessionStore) -> None:
    """A failed first turn leaves the conversation there, empty."""
    session = await store.get_or_create("s", SUPPORT, {"old": 1})
    session.state["old"] = 1
    await by_exception(session)
    after = await stored(store, "s")
    assert after is not None
    assert after["history"] == []


async def _answered(runner: Runner, ends: list[object], session_id: str, message_id: str | None = None) -> None:
    try:
        ends.append((await runner.run_async(session_id, "hi", message_id=message_id)).content)
    except TurnInsideTurnError as error:
        ends.append(type(error))


@pytest.mark.parametrize("duplicate_first", [True, False])
async def test_ring_through_a_duplicate(store: BaseSessionStore, *, duplicate_first: bool) -> None:
    """Two turns that wait for each other, one of them for the other's message, don't wait for ever: one is refused."""
    runner = Runner(SUPPORT, store, ScriptedEngine(default="done"))
    a, b = await store.get_or_create("a", SUPPORT), await store.get_or_create("b", SUPPORT)
    claimed = Turn(b, Claim("m", "hi"))
    await claimed.take()
    ends: list[object] = []
    a_is_taken, a_may_go_on = anyio.Event(), anyio.Event()

    async def hold_a() -> None:
        async with a.turn():
            a_is_taken.set()
            await a_may_go_on.wait()
            await _answered(runner, ends, "b", "m")

    async with anyio.create_task_group() as group:
        contextvars.Context().run(group.start_soon, hold_a)
        await a_is_taken.wait()
        if duplicate_first:
            a_may_go_on.set()
            await anyio.wait_all_tasks_blocked()
            await _answered(runner, ends, "a")
        else:
            group.start_soon(_answered, runner, ends, "a")
            await anyio.wait_all_tasks_blocked()
            a_may_go_on.set()
            while not ends:
                await anyio.lowlevel.checkpoint()
        await claimed.drop()
    assert TurnInsideTurnError in ends
