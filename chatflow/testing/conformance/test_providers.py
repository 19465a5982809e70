"""What context providers change is part of the turn: committed with it, or gone with it."""

from __future__ import annotations

from itertools import count
from typing import Any

import anyio.lowlevel
import pytest

from chatflow.core.agent import Agent
from chatflow.core.events import TextDelta
from chatflow.core.messages import ADDED_BY_KEY, AgentResponse
from chatflow.core.providers import ContextProvider, RunContext
from chatflow.core.session import AgentSession
from chatflow.core.store import BaseSessionStore
from chatflow.engines.scripted import ScriptedEngine
from chatflow.runner import Runner
from chatflow.testing.conformance.conftest import Restart
from chatflow.testing.conformance.conversation import PausingEngine, model, stored, texts, user
from chatflow.testing.conformance.provider_scripts import LOOK, Scripted, adding, agent_with, raising
from chatflow.testing.conformance.stepping import CANCELLERS, MOMENTS, Moment

CALL = ScriptedEngine.call


async def count_runs(session: AgentSession, context: RunContext) -> None:
    """Note in the provider's state how often it was called."""
    context.state["runs"] = context.state.get("runs", 0) + 1
    context.state["inputs"] = [*context.state.get("inputs", []), context.input.text]


async def note_end(session: AgentSession, context: RunContext) -> None:
    """Note in the provider's state how many runs have ended."""
    context.state["ended"] = context.state.get("ended", 0) + 1


def counting() -> Agent:
    """An agent with two providers that keep states of their own."""
    providers = [Scripted("a", before=count_runs, after=note_end), Scripted("b", before=count_runs)]
    return agent_with(*providers, engine=ScriptedEngine(default="yes"))


async def test_state_is_committed(store: BaseSessionStore) -> None:
    """What providers keep is committed with the turn, each under its own key, and read by the next turn."""
    runner = Runner(counting(), store)
    await runner.run_async("s", "one")
    await runner.run_async("s", "two")
    left = await stored(store, "s")
    assert left is not None
    runs = {"runs": 2, "inputs": ["one", "two"]}
    assert left["state"] == {"_a": {**runs, "ended": 2}, "_b": runs}


async def test_state_survives_restart(store: BaseSessionStore, restart: Restart) -> None:
    """What providers keep is there after a restart."""
    await Runner(counting(), store).run_async("s", "one")
    store = await restart(store)
    await Runner(counting(), store).run_async("s", "two")
    session = await store.get("s")
    assert session is not None
    assert session.state["_a"] == {"runs": 2, "inputs": ["one", "two"], "ended": 2}


async def test_state_of_conversations(store: BaseSessionStore) -> None:
    """One provider keeps each conversation's state apart."""
    runner = Runner(counting(), store)
    for session_id in ("s", "t"):
        await runner.run_async(session_id, session_id)
    for session_id in ("s", "t"):
        session = await store.get(session_id)
        assert session is not None
        assert session.state["_b"] == {"runs": 1, "inputs": [session_id]}


async def test_state_of_two_stores(store: BaseSessionStore, second: BaseSessionStore) -> None:
    """Turns of two stores go on from what each other's providers have kept."""
    for each in (store, second, store):
        await Runner(counting(), each).run_async("s", "hi")
    session = await second.get("s")
    assert session is not None
    assert session.state["_a"]["runs"] == 3


@pytest.mark.parametrize("place", ["before_run", "the model", "after_run"])
async def test_failed_turn_leaves_nothing(store: BaseSessionStore, place: str) -> None:
    """A turn that fails, wherever it does, leaves its providers' states as they were."""
    await Runner(counting(), store).run_async("s", "one")
    before = await stored(store, "s")
    failing = raising(LookupError("down"))
    hooks: dict[str, Any] = {"before_run": {"before": failing}, "after_run": {"after": failing}}
    providers = [
        Scripted("a", before=count_runs, after=note_end),
        Scripted("other", **hooks.get(place, {})),
        Scripted("b", before=count_runs, after=note_end),
    ]
    engine = ScriptedEngine([LookupError("down")] if place == "the model" else ["yes"])
    with pytest.raises(LookupError):
        await Runner(agent_with(*providers, engine=engine), store).run_async("s", "two")
    assert await stored(store, "s") == before
    await Runner(counting(), store).run_async("s", "three")
    session = await store.get("s")
    assert session is not None
    assert session.state["_a"] == {"runs": 2, "inputs": ["one", "three"], "ended": 2}


async def test_stored_messages(store: BaseSessionStore, restart: Restart) -> None:
    """Messages that a provider stores come back with its mark, and those that it only sends do not."""
    providers = [
        Scripted("a", before=adding(user("kept"), model("noted"), store=True)),
        Scripted("b", before=adding(user("sent"))),
    ]
    await Runner(agent_with(*providers, engine=ScriptedEngine(["yes"])), store).run_async("s", "hi")
    store = await restart(store)
    session = await store.get("s")
    assert session is not None
    assert texts(session.history) == ["kept", "noted", "hi", "yes"]
    assert [message.extra.get(ADDED_BY_KEY) for message in session.history] == ["a", "a", None, None]


class Memory(ContextProvider):
    """Lets the model keep things, and counts its runs."""

    async def before_run(self, agent: Agent, session: AgentSession, context: RunContext) -> None:
        """Offer the tools."""
        context.state["runs"] = context.state.get("runs", 0) + 1

        async def remember(key: str) -> str:
            context.state[key] = context.input.text
            return f"{key} remembered"

        async def forget(key: str) -> str:
            del context.state[key]
            return f"{key} forgotten"

        context.add_tools(remember, forget)


async def test_resumed_turn_overwrites_nothing(store: BaseSessionStore) -> None:
    """What tools have done to a provider's state is done again key by key, on what others have committed since."""
    engine = ScriptedEngine(
        [
            *(CALL("remember", key="gone"), "yes"),
            *(CALL("remember", key="mine"), CALL("forget", key="gone"), LookupError("down")),
            *(CALL("remember", key="theirs"), "yes"),
            "done",
        ]
    )
    runner = Runner(agent_with(Memory(), engine=engine), store)
    await runner.run_async("s", "first")
    with pytest.raises(LookupError):
        await runner.run_async("s", "second", message_id="m")
    await runner.run_async("s", "third")
    assert (await runner.run_async("s", "second", message_id="m")).content == "done"
    session = await store.get("s")
    assert session is not None
    assert session.state == {"_Memory": {"runs": 3, "theirs": "third", "mine": "second"}}


async def test_resumed_turn_calls_no_tool_twice(store: BaseSessionStore) -> None:
    """A call of a provider's tool that had ended is not made again when the turn goes on."""
    called: list[str] = []

    def buy() -> str:
        called.append("buy")
        return "bought"

    async def before(session: AgentSession, context: RunContext) -> None:
        context.add_tools(buy)

    engine = ScriptedEngine([CALL("buy"), LookupError("down"), "done"])
    runner = Runner(agent_with(Scripted("shop", before=before), engine=engine), store)
    with pytest.raises(LookupError):
        await runner.run_async("s", "hi", message_id="m")
    response = await runner.run_async("s", "hi", message_id="m")
    assert (response.content, response.tool_calls_executed, called) == ("done", ("buy",), ["buy"])


class Ledger:
    """Notes of providers, which wait before and after each note."""

    def __init__(self) -> None:
        self.returned: list[str] = []
        self.told: list[str] = []
        self.ended: list[str] = []

    def provider(self, name: str) -> ContextProvider:
        """A provider that notes what has come of its calls."""

        async def before(session: AgentSession, context: RunContext) -> None:
            await anyio.lowlevel.checkpoint()
            await count_runs(session, context)
            context.add_messages(user(name), store=name == "b")
            await anyio.lowlevel.checkpoint()
            self.returned.append(name)

        async def after(session: AgentSession, context: RunContext) -> None:
            self.told.append(name)
            await anyio.lowlevel.checkpoint()
            await note_end(session, context)
            await anyio.lowlevel.checkpoint()
            self.ended.append(name)

        return Scripted(name, before=before, after=after)


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("canceller", CANCELLERS)
async def test_cancelled_at_any_step(store: BaseSessionStore, canceller: str, moment: Moment) -> None:
    """Wherever a turn is cancelled, each provider that had begun is told once, and all or nothing is stored."""
    for step in count():
        ledger, session_id = Ledger(), f"s{step}"
        billing = agent_with(ledger.provider("c"), name="Billing")
        agent = agent_with(ledger.provider("a"), ledger.provider("b"), tools=[LOOK], handoffs=[billing])
        runner = Runner(agent, store, ScriptedEngine([CALL("look"), CALL("transfer_to_billing")], default="done"))

        async def run(runner: Runner = runner, session_id: str = session_id) -> AgentResponse:
            return await runner.run_async(session_id, "hi")

        cancelled = await CANCELLERS[canceller](run, step, moment)
        assert ledger.told == ledger.returned[::-1]
        # The one that the cancellation came upon while the turn was succeeding has ended with it, and no other.
        assert len(ledger.ended) >= len(ledger.told) - 1
        left = await stored(store, session_id)
        if left is not None and left["history"]:
            assert ledger.ended == ledger.told == ["c", "b", "a"]
            assert left["state"] == {f"_{name}": {"runs": 1, "inputs": ["hi"], "ended": 1} for name in "abc"}
        elif left is not None:
            assert left["state"] == {}
        assert (await run()).content == "done"
        if not cancelled:
            break


async def test_streamed(store: BaseSessionStore) -> None:
    """A streamed run calls them as any other, and what they change is part of its commit."""
    log: list[str] = []
    billing = agent_with(Scripted("b", log, before=count_runs, after=note_end), name="Billing")
    support = agent_with(Scripted("a", log, before=adding(user("kept"), store=True)), handoffs=[billing])
    runner = Runner(support, store, ScriptedEngine([CALL("transfer_to_billing")], default="done"))
    response = await runner.run_stream("s", "hi").collect()
    assert response.content == "done"
    ended = ["b after Billing: done", "b done", "a after Support: done", "a done"]
    assert log == ["a before Support", "b before Billing", *ended]
    left = await stored(store, "s")
    assert left is not None
    assert left["state"] == {"_b": {"runs": 1, "inputs": ["hi"], "ended": 1}}
    assert texts(left["history"])[:2] == ["kept", "hi"]


async def test_stream_that_is_left(store: BaseSessionStore) -> None:
    """Once the block of a stream that was left early has ended, its providers have been told, and nothing is stored."""
    log: list[str] = []
    engine = PausingEngine()
    runner = Runner(agent_with(Scripted("a", log, before=count_runs, after=note_end), engine=engine), store)
    async with runner.run_stream("s", "hi"):
        await engine.asked.wait()
    assert log == ["a before Support", "a after Support: CancelledError()", "a done"]
    left = await stored(store, "s")
    assert left is not None
    assert (left["history"], left["state"]) == ([], {})


async def test_stream_of_a_turn_that_a_provider_fails(store: BaseSessionStore) -> None:
    """A provider's error after the answer is raised by the stream, which has told its text, and nothing is stored."""
    runner = Runner(agent_with(Scripted("a", after=raising(LookupError("late")))), store, ScriptedEngine(["hello"]))
    stream = runner.run_stream("s", "hi")

    async def read() -> None:
        async with stream:
            assert isinstance(await anext(stream), TextDelta)  # told before the provider had its say
            assert [type(event) async for event in stream] == []

    with pytest.raises(LookupError, match="late"):
        await read()
    left = await stored(store, "s")
    assert left is not None
    assert left["history"] == []
