from __future__ import annotations

import asyncio
import contextvars
import gc
import json
import re
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from subprocess import PIPE, Popen
from typing import Any, cast

import anyio
import pytest
from agents import Agent, Runner
from agents.memory import Session, SessionSettings, SQLiteSession
from agents.testing import function_call
from hypothesis import given

from chatflow import Agent as ChatflowAgent
from chatflow import (
    BaseSessionStore,
    ScriptedEngine,
    SessionDeletedError,
    SessionStore,
    SQLiteSessionStore,
    StoreOwnerRequiredError,
    TurnInsideTurnError,
    UnstorableValueError,
)
from chatflow import Runner as ChatflowRunner
from chatflow.adapters.openai_agents import ChatflowSession
from chatflow.testing.conformance.stepping import CANCELLERS, MOMENTS, Canceller, Moment, Operation
from tests.adapters.items import Conversation, conversations
from tests.adapters.runs import SCENARIOS, Run, check, compacting, inputs, model, refund, said, several_turns

CALL: Any = {"type": "function_call", "call_id": "call_1", "name": "check", "arguments": "{}"}
OUTPUT: Any = {"type": "function_call_output", "call_id": "call_1", "output": "in transit"}


def user(text: object) -> Any:
    """What a user says."""
    return {"role": "user", "content": text}


def answer(text: str) -> Any:
    """What a model says."""
    return {"role": "assistant", "content": text}


def texts(items: list[Any]) -> list[str]:
    """What the items say."""
    return [item["content"] if isinstance(item["content"], str) else item["content"][0]["text"] for item in items]


@pytest.fixture(params=["memory", "file"])
async def store(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[BaseSessionStore]:
    """A store in memory, and one in a file."""
    async with SessionStore() if request.param == "memory" else SQLiteSessionStore(tmp_path / "chat.db") as store:
        yield store


@pytest.mark.parametrize("scenario", SCENARIOS)
async def test_as_the_sdks_own(store: BaseSessionStore, scenario: Run) -> None:
    """Whatever happens in runs, the model is sent, and the session holds, what it does with the SDK's SQLiteSession."""
    theirs, ours = SQLiteSession("conversation-7"), ChatflowSession("conversation-7", store)
    try:
        sent = await scenario(theirs)
        assert await scenario(ours) == sent
        assert await ours.get_items() == await theirs.get_items()
        # Whoever opens the conversation later finds the same.
        assert await ChatflowSession("conversation-7", store).get_items() == await theirs.get_items()
    finally:
        theirs.close()


def test_protocol() -> None:
    """It is a session by the SDK's own protocol."""
    session: Session = ChatflowSession("conversation-7", SessionStore())
    assert isinstance(session, Session)
    assert (session.session_id, session.session_settings) == ("conversation-7", None)
    assert repr(session) == "<ChatflowSession 'conversation-7' in <SessionStore 'memory'>>"


@given(conversations)
async def test_any_items(conversation: Conversation) -> None:
    """Whatever items are added in whatever pieces, all come back, one by one from the end too."""
    async with SQLiteSessionStore(":memory:", default_max_turns=1000) as store:
        session = ChatflowSession("conversation-7", store)
        for piece in conversation.pieces:
            await session.add_items(cast("Any", piece))
        assert await session.get_items() == conversation.items
        for item in reversed(conversation.items):
            assert await session.pop_item() == item
        assert await session.pop_item() is None


async def test_window(store: BaseSessionStore) -> None:
    """The model is sent whole turns, as many as the conversation keeps, and no call without its result."""
    session = ChatflowSession("conversation-7", store, max_turns=2)
    steps: list[Any] = []
    for number in range(6):
        steps += [[function_call("check", {"order_id": str(number)}, call_id=f"call_{number}")], said(str(number))]
    script = model(*steps)
    for number in range(6):
        await Runner.run(Agent(name="Support", tools=[check], model=script), f"And {number}?", session=session)
    sent = inputs(script)[-1]
    assert [item["content"] for item in sent if item.get("role") == "user"] == ["And 3?", "And 4?", "And 5?"]
    assert sent[0]["role"] == "user"
    ids = [item["call_id"] for item in sent if "call_id" in item]
    assert ids == ["call_3", "call_3", "call_4", "call_4", "call_5", "call_5"]
    assert len(await session.get_items()) == 8
    found = await store.get("conversation-7")
    assert found is not None
    assert found.max_turns == 2


async def test_limit(store: BaseSessionStore) -> None:
    """The limit is an argument's, or that of the settings, and is reached by whole turns."""
    session = ChatflowSession("conversation-7", store, session_settings=SessionSettings(limit=2))
    await session.add_items([user("one"), answer("1"), user("two"), answer("2")])
    assert texts(await session.get_items()) == ["two", "2"]
    assert texts(await session.get_items(limit=3)) == ["one", "1", "two", "2"]
    assert texts(await session.get_items(limit=1)) == ["two", "2"]
    assert await session.get_items(limit=0) == []
    with pytest.raises(ValueError, match="limit must be at least 0, not -1"):
        await session.get_items(limit=-1)
    script = model(said("3"))
    await Runner.run(Agent(name="Support", model=script), "three", session=session)
    assert texts(inputs(script)[0]) == ["two", "2", "three"]


async def test_no_turn_yet(store: BaseSessionStore) -> None:
    """Where no user has spoken yet, what stands there stays together, whatever the limit."""
    session = ChatflowSession("conversation-7", store)
    await session.add_items([answer("Welcome!"), CALL, OUTPUT])
    assert await session.get_items(limit=1) == [answer("Welcome!"), CALL, OUTPUT]
    assert await session.get_items(limit=0) == []


async def test_nothing_is_made_by_looking(store: BaseSessionStore) -> None:
    """A conversation that is only looked at, or that nothing is added to, is not created."""
    session = ChatflowSession("conversation-7", store)
    assert await session.get_items() == []
    assert await session.pop_item() is None
    await session.clear_session()
    await session.add_items([])
    assert await store.get("conversation-7") is None


async def test_clearing(store: BaseSessionStore) -> None:
    """A cleared session is empty, goes on, and is the same conversation."""
    session = ChatflowSession("conversation-7", store)
    async with session.turn() as conversation:
        conversation.state["language"] = "de"
        await session.add_items([user("one"), answer("1")])
    await session.clear_session()
    assert await session.get_items() == []
    await session.add_items([user("two")])
    found = await store.get("conversation-7")
    assert found is not None
    assert ([message.text for message in found.history], dict(found.state)) == (["two"], {"language": "de"})


@pytest.mark.parametrize("left", ["pruned", "cleared"])
async def test_a_late_approval(store: BaseSessionStore, caplog: pytest.LogCaptureFixture, left: str) -> None:
    """A run approved when its call has left ends with its answer; the result alone is left out, with a warning."""
    session = ChatflowSession("conversation-7", store, max_turns=2)
    script = model(
        [function_call("refund", {"order_id": "4"}, call_id="call_1")], said("1"), said("2"), said("Done."), said("Bye")
    )
    agent = Agent(name="Support", tools=[refund], model=script)
    waiting = await Runner.run(agent, "Refund it", session=session)
    for text in ("one", "two"):
        await Runner.run(agent, text, session=session)
    if left == "cleared":
        await session.clear_session()
    state = waiting.to_state()
    state.approve(waiting.interruptions[0])
    result = await Runner.run(agent, state, session=session)
    assert result.final_output == "Done."
    assert texts(await session.get_items()) == {"pruned": ["one", "1", "two", "2", "Done."], "cleared": ["Done."]}[left]
    [record] = caplog.records
    assert record.getMessage() == (
        "session 'conversation-7': the result of call 'call_1' was left out: its call has left the conversation, which"
        " was pruned or cleared in the meantime"
    )
    await Runner.run(agent, "Thanks", session=session)
    assert texts(inputs(script)[-1])[-2:] == ["Done.", "Thanks"]


async def test_a_late_result_in_a_turn(store: BaseSessionStore) -> None:
    """A result finds its call in a turn of its own, also where the commit would have pruned the call without it."""
    session = ChatflowSession("conversation-7", store, max_turns=1)
    async with session.turn():
        await session.add_items([user("one"), CALL])
        await session.add_items([user("two"), answer("2")])
        await session.add_items([OUTPUT])
    assert await session.get_items() == [user("one"), CALL, user("two"), answer("2"), OUTPUT]


@pytest.mark.parametrize("limit", [5, 41])
async def test_compacting_what_was_not_seen(store: BaseSessionStore, limit: int) -> None:
    """The SDK's compaction never puts a summary in the place of what a limit has kept from it."""
    session = ChatflowSession("conversation-7", store)
    await session.add_items([user("I'm Ada."), answer("Hello.")])
    for number in range(30):
        await session.add_items([user(f"question {number}"), answer(f"answer {number}")])
    sent = await compacting(session, SessionSettings(limit=limit))
    assert not any("Ada" in json.dumps(each) for each in sent)
    assert (await session.get_items())[0] == user("I'm Ada.")


async def test_compacting_what_was_seen(store: BaseSessionStore) -> None:
    """The SDK compacts by itself where it has seen all of the conversation."""
    session = ChatflowSession("conversation-7", store)
    await session.add_items([user("I'm Ada."), answer("1")])
    sent = await compacting(session, SessionSettings())
    assert texts(sent[0]) == ["I'm Ada.", "1", "second", "two"]
    assert [item.get("type") for item in await session.get_items()] == ["compaction", None, "message"]


async def test_what_cant_be_kept(store: BaseSessionStore) -> None:
    """Items that would not come back equal are refused by their path, and none is added."""
    session = ChatflowSession("conversation-7", store)
    with pytest.raises(UnstorableValueError, match=re.escape("items[1].content can't be stored")):
        await session.add_items([user("one"), user(object())])
    assert await session.get_items() == []


async def test_popping_a_part(store: BaseSessionStore) -> None:
    """Of calls side by side one is taken at a time; what is left is a message as before, of its time and agent."""
    session = ChatflowSession("conversation-7", store, agent_name="Support")
    calls: list[Any] = [{**CALL, "call_id": f"call_{number}"} for number in (1, 2)]
    await session.add_items([user("one"), *calls])
    found = await store.get("conversation-7")
    assert found is not None
    before = found.history[1]
    assert await session.pop_item() == calls[1]
    found = await store.get("conversation-7")
    assert found is not None
    after = found.history[1]
    assert (after.tool_calls, after.timestamp, after.agent_name) == (
        before.tool_calls[:1],
        before.timestamp,
        "Support",
    )
    await session.add_items([OUTPUT])
    assert await session.get_items() == [user("one"), calls[0], OUTPUT]


async def test_popping_at_once(store: BaseSessionStore) -> None:
    """Whoever takes items at the same time gets different ones, and the last of them nothing."""
    session = ChatflowSession("conversation-7", store)
    await session.add_items([user("one"), answer("1")])
    popped: list[Any] = []

    async def pop(session: ChatflowSession) -> None:
        popped.append(await session.pop_item())

    async with anyio.create_task_group() as tasks:
        for _ in range(3):
            tasks.start_soon(pop, ChatflowSession("conversation-7", store))
    assert popped == [answer("1"), user("one"), None]


async def test_a_turn_is_atomic(store: BaseSessionStore) -> None:
    """A run inside a turn is one commit: others see nothing before its end, and nothing of one that fails."""
    session, other = ChatflowSession("conversation-7", store), ChatflowSession("conversation-7", store)
    seen: list[Any] = []

    async def look() -> None:
        seen.append(await other.get_items())

    script = model([function_call("check", {"order_id": "4"}, call_id="call_1")], said("In transit."))
    agent = Agent(name="Support", tools=[check], model=script)
    async with session.turn():
        await Runner.run(agent, "Where is it?", session=session)
        await asyncio.create_task(look(), context=contextvars.Context())
    assert seen == [[]]
    assert len(await other.get_items()) == 4
    failing = Agent(name="Support", model=model(RuntimeError("down")))
    with pytest.raises(RuntimeError, match="down"):
        async with session.turn():
            await Runner.run(failing, "And now?", session=session)
    assert len(await other.get_items()) == 4


async def test_a_lease() -> None:
    """A turn's lease is the caller's to say."""
    session = ChatflowSession("conversation-7", SessionStore())
    with pytest.raises(ValueError, match="lease_seconds"):
        session.turn(lease_seconds=0)


async def test_a_streamed_turn(store: BaseSessionStore) -> None:
    """A streamed run that is left in the middle of its turn leaves no trace."""
    session = ChatflowSession("conversation-7", store)
    script = model([function_call("check", {"order_id": "4"}, call_id="call_1")], said("In transit."))
    agent = Agent(name="Support", tools=[check], model=script)

    async def leave() -> None:
        async with session.turn():
            streamed = Runner.run_streamed(agent, "Where is it?", session=session)
            async for event in streamed.stream_events():
                if event.type == "run_item_stream_event" and event.name == "tool_output":
                    streamed.cancel()
                    raise RuntimeError("enough")

    with pytest.raises(RuntimeError, match="enough"):
        await leave()
    assert await session.get_items() == []
    async with session.turn():
        await several_turns(session)
    assert texts(await session.get_items()) == ["first", "one", "second", "two", "third", "three"]


async def test_one_run_at_a_time(store: BaseSessionStore) -> None:
    """Runs inside turns go one after another, each with all that was said before it."""
    script = model(*(said(str(number)) for number in range(5)))

    async def run() -> None:
        session = ChatflowSession("conversation-7", store)
        async with session.turn():
            await Runner.run(Agent(name="Support", model=script), "Next", session=session)

    async with anyio.create_task_group() as tasks:
        for _ in range(5):
            tasks.start_soon(run)
    assert [len(sent) for sent in inputs(script)] == [1, 3, 5, 7, 9]
    assert texts(await ChatflowSession("conversation-7", store).get_items())[1::2] == ["0", "1", "2", "3", "4"]


async def test_two_sessions_of_one_turn(store: BaseSessionStore) -> None:
    """Another session of the same conversation inside a turn is an error at once, and no wait for ever."""
    session, other = ChatflowSession("conversation-7", store), ChatflowSession("conversation-7", store)
    async with session.turn():
        with pytest.raises(TurnInsideTurnError):
            await other.add_items([user("one")])


async def test_runs_side_by_side(store: BaseSessionStore) -> None:
    """Runs at the same time without turns lose nothing and part no pair, as with the SDK's own sessions."""
    session = ChatflowSession("conversation-7", store)

    async def run(number: int) -> None:
        call = function_call("check", {"order_id": str(number)}, call_id=f"call_{number}")
        await Runner.run(
            Agent(name="Support", tools=[check], model=model([call], said(str(number)))), "Next", session=session
        )

    async with anyio.create_task_group() as tasks:
        for number in range(5):
            tasks.start_soon(run, number)
    items: list[Any] = await session.get_items()
    assert len(items) == 20
    for number in range(5):
        kinds = [item["type"] for item in items if item.get("call_id") == f"call_{number}"]
        assert kinds == ["function_call", "function_call_output"]


async def test_deleted(store: BaseSessionStore) -> None:
    """Once its conversation was deleted every method says so, also when the id is used anew; a new session goes on."""
    session = ChatflowSession("conversation-7", store)
    await session.add_items([user("one")])
    await store.delete("conversation-7")
    again = ChatflowSession("conversation-7", store)
    await again.add_items([user("two")])
    operations: list[Callable[[], Any]] = [
        session.get_items,
        lambda: session.add_items([answer("1")]),
        session.pop_item,
        session.clear_session,
        session.turn().__aenter__,
    ]
    for operation in operations:
        with pytest.raises(SessionDeletedError):
            await operation()
    with pytest.raises(SessionDeletedError):
        await Runner.run(Agent(name="Support", model=model(said("1"))), "Still there?", session=session)
    assert texts(await again.get_items()) == ["two"]


@pytest.mark.parametrize("canceller", CANCELLERS.values(), ids=list(CANCELLERS))
@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("name", ["add", "pop", "clear"])
async def test_cancelled(store: BaseSessionStore, canceller: Canceller, moment: Moment, name: str) -> None:
    """An operation that is cancelled at any of its steps has happened or has not, and the next one works."""
    before = [user("one"), CALL, OUTPUT, answer("1")]
    after = {"add": [*before, user("two"), answer("2")], "pop": before[:-1], "clear": []}[name]
    for step in range(200):
        session = ChatflowSession(f"conversation-{step}", store)
        await session.add_items(before)
        operations: dict[str, Operation] = {
            "add": partial(session.add_items, [user("two"), answer("2")]),
            "pop": session.pop_item,
            "clear": session.clear_session,
        }
        went_on = await canceller(operations[name], step, moment)
        assert await session.get_items() in [before, after]
        await session.add_items([user("three")])
        assert (await session.get_items())[-1] == user("three")
        if not went_on:
            break
    else:
        pytest.fail("it never came to its end")


def test_event_loops(tmp_path: Path) -> None:
    """One session serves several event loops, one after another; those that are gone are forgotten."""
    store = SQLiteSessionStore(tmp_path / "chat.db")
    session = ChatflowSession("conversation-7", store)
    script = model(said("1"), said("2"), said("3"))

    async def run(text: str) -> None:
        await Runner.run(Agent(name="Support", model=script), text, session=session)

    async def close() -> None:
        async with store:
            assert texts(await session.get_items()) == ["one", "1", "two", "2", "three", "3"]

    try:
        for text in ("one", "two", "three"):
            asyncio.run(run(text))
        gc.collect()
        assert len(session._sessions) <= 1  # the last one may still be held
    finally:
        asyncio.run(close())


def test_processes(tmp_path: Path) -> None:
    """Runs inside turns go one after another in several processes too, each with all that was said before it."""
    count, runs = 3, 8
    with ExitStack() as stack:
        command = [sys.executable, "-m", "tests.adapters.program", str(tmp_path / "chat.db"), str(runs)]
        processes = [
            stack.enter_context(Popen(command, stdin=PIPE, stdout=PIPE, text=True, cwd=Path(__file__).parents[2]))
            for _ in range(count)
        ]
        for process in processes:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
        lengths = [length for process in processes for length in json.loads(process.communicate("\n")[0])]
    assert sorted(lengths) == [1 + 2 * number for number in range(count * runs)]

    async def look() -> list[str]:
        async with SQLiteSessionStore(tmp_path / "chat.db") as store:
            return texts(await ChatflowSession("conversation-7", store).get_items())

    said = asyncio.run(look())
    # Each question is followed by its own answer, nobody else's.
    assert [text.replace("question", "answer") for text in said[::2]] == said[1::2]


async def test_owners(store: BaseSessionStore) -> None:
    """An owner's session is a conversation of theirs alone; a store that requires an owner refuses one without."""
    await ChatflowSession("conversation-7", store.for_owner("ada")).add_items([user("mine")])
    assert await ChatflowSession("conversation-7", store.for_owner("bob")).get_items() == []
    store.require_owner()
    with pytest.raises(StoreOwnerRequiredError):
        ChatflowSession("conversation-7", store)


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"session_id": ""}, ValueError),
        ({"session_id": 7}, TypeError),
        ({"session_id": None}, TypeError),
        ({"store": "chat.db"}, TypeError),
        ({"agent_name": ""}, ValueError),
        ({"max_turns": 0}, ValueError),
        ({"session_settings": {"limit": 5}}, TypeError),
    ],
)
def test_bad_arguments(arguments: Any, error: type[Exception]) -> None:
    """Arguments that can't be are refused where they were written."""
    with pytest.raises(error):
        ChatflowSession(**{"session_id": "conversation-7", "store": SessionStore(), **arguments})


async def test_a_chatflow_runner_goes_on(store: BaseSessionStore) -> None:
    """A chatflow Runner goes on in the conversation, and the SDK after it, with all that was said."""
    session = ChatflowSession("conversation-7", store)
    script = model([function_call("check", {"order_id": "4"}, call_id="call_1")], said("In transit."), said("Bye."))
    agent = Agent(name="Support", tools=[check], model=script)
    await Runner.run(agent, "Where is it?", session=session)
    engine = ScriptedEngine(["It was in transit."])
    runner = ChatflowRunner(ChatflowAgent("Support", engine=engine), store)
    await runner.run_async("conversation-7", "What did you say?")
    assert [message.role.value for message in engine.requests[0].messages] == ["user", "model", "tool", "model", "user"]
    await Runner.run(agent, "Thanks", session=session)
    assert texts([item for item in inputs(script)[-1] if "role" in item]) == [
        "Where is it?",
        "In transit.",
        "What did you say?",
        "It was in transit.",
        "Thanks",
    ]
    # One that chatflow has written can be taken back too.
    for _ in range(3):
        last = await session.pop_item()
    assert texts([last]) == ["It was in transit."]
    assert texts((await session.get_items())[-1:]) == ["What did you say?"]
