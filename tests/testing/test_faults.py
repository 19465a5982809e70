"""What `Faults` does to a store, and what a bot that is sound makes of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import anyio
import pytest

from chatflow import (
    Agent,
    Runner,
    ScriptedEngine,
    SessionStore,
    SQLiteSessionStore,
    StoreClosedError,
    StoreError,
    ToolContext,
    tool,
)
from chatflow.testing import Faults, Killed

OpenStore = Callable[..., SQLiteSessionStore]


def support() -> Agent:
    """An agent that answers everything."""
    return Agent("Support", engine=ScriptedEngine(default="Hello."))


async def texts(store: SQLiteSessionStore | SessionStore, session_id: str = "s") -> list[str]:
    """What was said."""
    return [message.text for message in (await store.messages(session_id)).items]


async def test_before(chatflow_store: SessionStore) -> None:
    """An error before a step keeps it from being done; then the step works again."""
    faults = Faults(chatflow_store)
    faults.before("commit_turn", StoreError("the disk is full", store="memory"))
    runner = Runner(support(), chatflow_store)
    with pytest.raises(StoreError, match="the disk is full"):
        await runner.run_async("s", "hello", message_id="m")
    assert await texts(chatflow_store) == []
    await runner.run_async("s", "hello", message_id="m")
    assert await texts(chatflow_store) == ["hello", "Hello."]


async def test_after(chatflow_store: SessionStore) -> None:
    """An error after a commit hides it, and the message sent again gets the answer that was stored."""
    Faults(chatflow_store).after("commit_turn", StoreError("the answer was lost", store="memory"))
    runner = Runner(support(), chatflow_store)
    with pytest.raises(StoreError, match="the answer was lost"):
        await runner.run_async("s", "hello", message_id="m")
    assert (await runner.run_async("s", "hello", message_id="m")).duplicate
    assert await texts(chatflow_store) == ["hello", "Hello."]


async def test_in_turn(chatflow_store: SessionStore) -> None:
    """Of several faults one happens each time, and None lets the step pass."""
    faults = Faults(chatflow_store)
    faults.before("mark_processed", None, OSError("first"))
    faults.before("mark_processed", OSError("second"))
    assert await chatflow_store.mark_message_processed("1")
    for said in ("first", "second"):
        with pytest.raises(OSError, match=said):
            await chatflow_store.mark_message_processed("2")
    assert await chatflow_store.mark_message_processed("2")


async def test_of_an_owner(chatflow_store: SessionStore) -> None:
    """Faults of an owner's store are those of the whole."""
    Faults(chatflow_store.for_owner("alice")).before("mark_processed", OSError)
    with pytest.raises(OSError, match=r"^$"):
        await chatflow_store.mark_message_processed("m")


async def test_functions(chatflow_store: SessionStore) -> None:
    """A function is called, and an async one awaited: so a test makes a step wait, and looks at what it left."""
    faults, reached, go_on, called = Faults(chatflow_store), anyio.Event(), anyio.Event(), []

    async def wait() -> None:
        reached.set()
        await go_on.wait()

    faults.before("commit_turn", wait)
    faults.after("commit_turn", lambda: called.append(True))
    async with anyio.create_task_group() as group:
        group.start_soon(Runner(support(), chatflow_store).run_async, "s", "hello")
        await reached.wait()
        assert await texts(chatflow_store) == []
        assert not called
        go_on.set()
    assert await texts(chatflow_store) == ["hello", "Hello."]
    assert called


async def test_steps(chatflow_store: SessionStore) -> None:
    """The steps that were begun are noted in order."""
    faults = Faults(chatflow_store)
    await Runner(support(), chatflow_store).run_async("s", "hello")
    assert faults.steps[-2:] == ["queue_turn", "commit_turn"]


def test_no_such_step(chatflow_store: SessionStore) -> None:
    """A step that does not exist is refused, and the error names those that do."""
    with pytest.raises(ValueError, match=r"no step 'commit'; the steps are accept_turn, .*commit_turn, "):
        Faults(chatflow_store).before("commit", OSError)


@pytest.mark.parametrize("moment", ["before", "after"])
async def test_killed_at_the_commit(open_chatflow_store: OpenStore, moment: str) -> None:
    """A turn killed before its commit goes on after the restart, its tool not; one killed after it is there."""
    looked: list[str] = []

    @tool
    async def look_up(order: str, context: ToolContext) -> str:
        """Look an order up."""
        looked.append(order)
        return "sent"

    engine = ScriptedEngine([ScriptedEngine.call("look_up", order="404"), "It was sent.", "It was sent, as I said."])
    agent = Agent("Support", tools=[look_up], engine=engine)
    store = open_chatflow_store()
    faults = Faults(store)
    getattr(faults, moment)("commit_turn", faults.kill)
    with pytest.raises(Killed):
        await Runner(agent, store).run_async("s", "Where is order 404?", message_id="m")
    with pytest.raises(StoreClosedError):
        await store.get("s")
    restarted = open_chatflow_store()
    assert len((await restarted.messages("s")).items) == (0 if moment == "before" else 4)
    response = await Runner(agent, restarted).run_async("s", "Where is order 404?", message_id="m")
    assert looked == ["404"]
    assert response.duplicate is (moment == "after")
    assert (await texts(restarted))[-1] == response.content


async def test_killed_worker(open_chatflow_store: OpenStore) -> None:
    """A worker that is killed ends, and the one of the next process does its work."""
    store, died, heard = open_chatflow_store(), anyio.Event(), anyio.Event()
    faults = Faults(store)

    def die() -> NoReturn:
        died.set()
        faults.kill()

    async def on_response(*_: object) -> None:
        heard.set()

    async def accept_and_die() -> None:
        runner = Runner(support(), store)
        async with runner.working(on_response):
            await runner.accept("s", "hello", message_id="m")
            await died.wait()

    faults.before("commit_turn", die)
    with pytest.raises(BaseExceptionGroup) as ended:
        await accept_and_die()
    assert ended.group_contains(Killed)
    assert not heard.is_set()
    restarted = open_chatflow_store()
    async with Runner(support(), restarted).working(on_response):
        await heard.wait()
    assert await texts(restarted) == ["hello", "Hello."]


def test_killed_in_memory(chatflow_store: SessionStore) -> None:
    """A store in memory can't be killed: nothing would be left to look at."""
    with pytest.raises(TypeError, match="nothing of <SessionStore 'memory'> outlives its process"):
        Faults(chatflow_store).kill()


async def test_killed_before_it_was_opened(open_chatflow_store: OpenStore) -> None:
    """A store dies at its first step too, and as often as that is planned; it stays dead, and can be closed."""
    store = open_chatflow_store()
    faults = Faults(store)
    faults.before("load_session", faults.kill, faults.kill)
    for _ in range(2):
        with pytest.raises(Killed):
            await store.get("s")
    with pytest.raises(StoreClosedError):
        await store.get("s")
    await store.aclose()
    assert await open_chatflow_store().get("s") is None


@pytest.mark.parametrize("fault", ["boom", [StoreError("the disk is full", store="memory")], 5])
async def test_no_fault(chatflow_store: SessionStore, fault: Any) -> None:
    """What would happen to nobody is refused at once, with all that it is given with."""
    faults = Faults(chatflow_store)
    with pytest.raises(TypeError, match="a fault must be an error, a function or None, not "):
        faults.after("mark_processed", OSError, fault)
    assert await chatflow_store.mark_message_processed("m")


def test_no_store() -> None:
    """Faults befall a store, and nothing else."""
    nothing: Any = 7
    with pytest.raises(TypeError, match="store must be a session store, not int"):
        Faults(nothing)
