"""Compaction: turns that leave, and the summary that stands for them, are part of the commit that made them go."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chatflow.core.agent import Agent
from chatflow.core.backend import StoreBackend
from chatflow.core.engine import EngineReply
from chatflow.core.messages import MODEL_KEY, Message, Role
from chatflow.core.store import BaseSessionStore
from chatflow.engines.scripted import ScriptedEngine
from chatflow.exceptions import SessionDeletedError, StoreError
from chatflow.runner import Runner
from chatflow.running.compacting import Compactor
from chatflow.testing.conformance.attempts import UNTIMED
from chatflow.testing.conformance.conftest import OpenStore, Restart
from chatflow.testing.conformance.conversation import outside, stored, system, texts

NUMBERS = ("one", "two", "three", "four", "five", "six", "seven", "eight")
AGENT = Agent("Support")


async def numbering(messages: Sequence[Message]) -> str:
    """A summary that says how many messages it stands for, those of the one before included."""
    before = sum(int(message.text) for message in messages if message.role is Role.SYSTEM)
    return str(before + sum(message.role is not Role.SYSTEM for message in messages))


def runner_of(store: BaseSessionStore, compactor: Any = numbering, engine: Any = None, **arguments: Any) -> Runner:
    """A runner whose model always says yes."""
    return Runner(AGENT, store, engine or ScriptedEngine(default="yes"), compactor=compactor, **arguments)


async def talk(runner: Runner, *said: str) -> None:
    """A turn for each text."""
    for text in said:
        await runner.run_async("s", text)


async def history_of(store: BaseSessionStore) -> list[str]:
    """What the store has of the conversation."""
    found = await stored(store, "s")
    assert found is not None
    return texts(found["history"])


async def test_survives_restart(open_store: OpenStore, restart: Restart) -> None:
    """A summary is there after a restart, where it stood, and with all that it had."""
    engine = ScriptedEngine(default=EngineReply(text="said", usage={"total": 3}, extra={"chatflow_model": "m"}))
    store = open_store(default_max_turns=2)
    await talk(runner_of(store, Compactor(Agent("Short")), engine), "one", "two", "three")
    before = await stored(store, "s")
    store = await restart(store, default_max_turns=2)
    after = await stored(store, "s")
    assert after == before
    assert after is not None
    summary = after["history"][0]
    assert (summary.role, summary.text, summary.usage) == (Role.SYSTEM, "said", {"total": 3})
    assert summary.extra == {"chatflow": "summary", "chatflow_model": "m"}


async def test_replaced_by_the_next(open_store: OpenStore, restart: Restart) -> None:
    """The next summary is made of the one before and takes its place, also after a restart in between."""
    store = open_store(default_max_turns=4)
    await talk(runner_of(store), *NUMBERS[:5])
    assert await history_of(store) == ["6", "four", "yes", "five", "yes"]
    store = await restart(store, default_max_turns=4)
    await talk(runner_of(store), *NUMBERS[5:])
    assert await history_of(store) == ["12", "seven", "yes", "eight", "yes"]
    store = await restart(store, default_max_turns=4)
    assert await history_of(store) == ["12", "seven", "yes", "eight", "yes"]
    await talk(runner_of(store), "nine")
    assert await history_of(store) == ["12", "seven", "yes", "eight", "yes", "nine", "yes"]


async def test_other_system_messages(open_store: OpenStore, restart: Restart) -> None:
    """Other system messages stay, in order, around the summary."""
    store = open_store(default_max_turns=1)
    runner = runner_of(store)
    await talk(runner, "one")
    session = await store.get_or_create("s", AGENT)
    await session.add_message(system("before"))
    await talk(runner, "two")
    await session.add_message(system("after"))
    await talk(runner, "three")
    expected = ["before", "4", "after", "three", "yes"]
    assert texts(session.history) == await history_of(store) == expected
    store = await restart(store, default_max_turns=1)
    assert await history_of(store) == expected


async def test_step_by_step(open_store: OpenStore, restart: Restart) -> None:
    """Turns that are too many for one summary leave in steps, with one commit: one summary, and what all have cost."""
    engine = ScriptedEngine(default=EngineReply(text="yes", usage={"total": 1}))
    engine.when(agent="Short", reply=EngineReply(text="so far", usage={"total": 100}))
    await talk(runner_of(open_store(), None, engine), *NUMBERS)
    store = await restart(open_store(), default_max_turns=2)
    await talk(runner_of(store, Compactor(Agent("Short", max_prompt_tokens=14)), engine), "nine")
    steps = sum(request.agent.name == "Short" for request in engine.requests)
    assert steps > 1
    expected = ["so far", "eight", "yes", "nine", "yes"]
    assert await history_of(store) == expected
    store = await restart(store, default_max_turns=2)
    assert await history_of(store) == expected
    usage = (await store.get_or_create("s", AGENT)).usage
    assert usage.by_agent == {"Support": {"total": 9}, "Short": {"total": 100 * steps}}


async def test_seen_by_others(open_store: OpenStore, second: BaseSessionStore) -> None:
    """A session object that was read before sees the summary and what has stayed, whoever has made it."""
    store = open_store(default_max_turns=2)
    theirs = await second.get_or_create("s", AGENT)
    for number, text in enumerate(NUMBERS):
        await talk(runner_of(store), text)
        if number % 3 == 2:
            await theirs.save()
            assert texts(theirs.history) == await history_of(store)


async def test_one_commit(open_store: OpenStore) -> None:
    """While a summary is made everybody else sees the conversation as it was, and then all of the change."""
    store = open_store(default_max_turns=1)
    seen: list[list[str]] = []

    async def look(messages: Sequence[Message]) -> str:
        seen.append(await outside(history_of(store)))
        return "so far"

    runner = runner_of(store, look)
    await talk(runner, "one", "two")
    seen.append(await history_of(store))
    assert seen == [["one", "yes"], ["so far", "two", "yes"]]


async def test_failed_commit(open_store: OpenStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """A turn whose commit fails leaves no summary, and no turn has gone."""
    store = open_store(default_max_turns=1)
    runner = runner_of(store)
    await talk(runner, "one")

    async def fail(*arguments: Any) -> Any:
        raise StoreError("the disk is full", store=store.name)

    with monkeypatch.context() as patched:
        patched.setattr(store, "commit_turn", fail)
        with pytest.raises(StoreError):
            await talk(runner, "two")
    assert await history_of(store) == ["one", "yes"]
    await talk(runner, "three")
    assert await history_of(store) == ["2", "three", "yes"]


async def test_deleted_meanwhile(open_store: OpenStore) -> None:
    """A conversation that is deleted while a summary is made stays deleted."""
    store = open_store(default_max_turns=1)

    async def delete(messages: Sequence[Message]) -> str:
        await outside(store.delete("s"))
        return "so far"

    runner = runner_of(store, delete)
    await talk(runner, "one")
    with pytest.raises(SessionDeletedError):
        await talk(runner, "two")
    assert await stored(store, "s") is None


async def test_answer_is_stored_with_its_usage(open_store: OpenStore) -> None:
    """A duplicate gets the answer with what the summary had cost."""
    store = open_store(default_max_turns=1)
    engine = ScriptedEngine(default=EngineReply(text="yes", usage={"total": 2}))
    runner = runner_of(store, Compactor(), engine)
    await runner.run_async("s", "one", message_id="1")
    first = await runner.run_async("s", "two", message_id="2")
    again = await runner.run_async("s", "two", message_id="2")
    assert (first.usage, again.usage, again.duplicate) == ({"total": 4}, {"total": 4}, True)
    assert len(engine.requests) == 3


async def test_usage(open_store: OpenStore, restart: Restart) -> None:
    """What turns had cost that a summary stands for counts, and what each summary did, also of those replaced."""
    store = open_store(default_max_turns=2)
    engine = ScriptedEngine(default=EngineReply(text="yes", usage={"total": 1}, extra={MODEL_KEY: "large"}))
    engine.when(agent="Short", reply=EngineReply(text="so far", usage={"total": 100}, extra={MODEL_KEY: "small"}))
    await talk(runner_of(store, Compactor(Agent("Short")), engine), *NUMBERS)
    usage = (await (await restart(store, default_max_turns=2)).get_or_create("s", AGENT)).usage
    assert usage.total == {"total": 308}
    assert usage.by_agent == {"Support": {"total": 8}, "Short": {"total": 300}}
    assert usage.by_model == {"large": {"total": 8}, "small": {"total": 300}}
    assert usage.by_turn == ({"total": 1}, {"total": 1})


async def test_rollback_past_a_summary(open_store: OpenStore) -> None:
    """A checkpoint of before leads back to the turns that a summary stood for, and a length means nothing any more."""
    store = open_store(default_max_turns=2)
    runner = runner_of(store)
    await talk(runner, "one", "two")
    session = await store.get_or_create("s", AGENT)
    async with session.turn():
        before = session.checkpoint()
        await session.rollback_to(before)
    await talk(runner, "three")
    with pytest.raises(ValueError, match="pruned or moved"):
        await session.rollback_to(2)
    assert texts(session.history) == ["4", "three", "yes"]


@given(
    max_turns=st.integers(1, 4),
    keep_turns=st.none() | st.integers(1, 5),
    limit=st.none() | st.integers(3, 12),
    failing=st.sets(st.integers(0, 9)),
)
@settings(UNTIMED, max_examples=25)
async def test_nothing_is_lost(
    open_store: OpenStore, max_turns: int, keep_turns: int | None, limit: int | None, failing: set[int]
) -> None:
    """Whatever leaves in whatever lots, the summary stands for all of it; what a failing compactor leaves is pruned."""
    store = open_store(default_max_turns=max_turns)
    made: list[int] = []

    async def summarise(messages: Sequence[Message]) -> str:
        if number in failing:
            raise RuntimeError("no")
        made.append(number)
        return await numbering(messages)

    runner = runner_of(store, Compactor(summarise, keep_turns=keep_turns), max_prompt_tokens=limit)
    plain: list[str] = []
    summed = 0
    for number in range(10):
        await talk(runner, str(number))
        plain += [str(number), "yes"]
        history = await history_of(store)
        if number in made:
            stays = len(history) - 1
            summed += len(plain) - stays
            plain = plain[-stays:]
        plain = plain[-2 * max_turns :]
        assert history == ([str(summed)] if summed else []) + plain
    await store.delete("s")


async def test_accepted_turns(store: StoreBackend) -> None:
    """Turns that a worker does, or that are done before another, are summarised as any other."""
    runner = runner_of(store, max_prompt_tokens=3)
    for text in NUMBERS[:4]:
        await runner.accept("s", text, message_id=text)
    await talk(runner, "five")
    assert await history_of(store) == ["8", "five", "yes"]
