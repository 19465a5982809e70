"""Turns whose session has been shown a newer commit before they have ended: what comes next builds on that one (P2)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Final

import pytest

from chatflow.core.backend import StoreBackend
from chatflow.core.messages import AgentResponse
from chatflow.core.records import Claim, NewSession
from chatflow.core.session import AgentSession
from chatflow.core.turn import Turn
from chatflow.core.values import FrozenDict
from chatflow.engines.scripted import ScriptedEngine
from chatflow.exceptions import SessionConflictError
from chatflow.runner import Runner
from chatflow.testing import Faults
from chatflow.testing.conformance.conversation import SUPPORT, model, outside, say, texts, user
from chatflow.testing.conformance.places import take_away


async def nothing(session: AgentSession) -> None:
    """Leave everything as it is."""


async def what_is_not_stored(session: AgentSession) -> None:
    """Add a message that a history can't begin with, if there is none yet."""
    if not session.history:
        await session.add_message(model("how can I help?"))


async def what_is_rolled_back(session: AgentSession) -> None:
    """Add a message, and go back."""
    token = session.checkpoint()
    await session.add_message(user("wrong"))
    await session.rollback_to(token)


Idle = Callable[[AgentSession], Awaitable[None]]
IDLE: Final[dict[str, Idle]] = {
    "empty": nothing,
    "not stored": what_is_not_stored,
    "rolled back": what_is_rolled_back,
}
MERGED: Final = NewSession(agent_name="Support", metadata=FrozenDict({"channel": "web"}), max_turns=None)
idle_in_all_ways: Final = pytest.mark.parametrize("do", IDLE.values(), ids=IDLE.keys())


async def history_is(store: StoreBackend, *expected: str) -> None:
    """The store and the living session both have these messages."""
    session = await outside(store.get("s"))
    assert session is not None
    assert texts(session.history) == list(expected)
    assert texts((await store.messages("s")).items) == list(expected)


async def merged(store: StoreBackend) -> AgentSession:
    """The conversation after metadata was merged into it, without a turn, as every delivery of a webhook may do."""
    return await outside(store.get_or_create("s", SUPPORT, {"channel": "web"}))


# --- metadata that was merged beside a turn ---


@idle_in_all_ways
async def test_merged_beside_an_idle_turn(store: StoreBackend, do: Idle) -> None:
    """A message is stored after a turn that changed nothing and beside which metadata was merged."""
    session = await store.get_or_create("s", SUPPORT)
    async with session.turn():
        await do(session)
        await merged(store)
    await session.add_message(user("hello"))
    await history_is(store, "hello")


async def test_run_after_an_idle_turn(store: StoreBackend) -> None:
    """What a run has answered is stored after a turn that changed nothing and beside which metadata was merged."""
    session = await store.get_or_create("s", SUPPORT)
    async with session.turn():
        await merged(store)
    await Runner(SUPPORT, store, ScriptedEngine(["hi"])).run_async("s", "hello", message_id="m")
    await history_is(store, "hello", "hi")


async def test_merged_beside_an_idle_answer(store: StoreBackend) -> None:
    """A message is stored after a turn that answered another, changed nothing, and had metadata merged beside it."""
    session = await store.get_or_create("s", SUPPORT)
    turn = Turn(session, Claim("m", "hello"), "Support")
    assert await turn.take() is None
    await merged(store)
    turn.response = AgentResponse(content="yes", active_agent_name="Support")
    await turn.commit()
    await session.add_message(user("and now?"))
    await history_is(store, "and now?")


async def test_merged_before_a_commit_is_told(store: StoreBackend) -> None:
    """A message is stored after a turn whose commit was not back yet when metadata was merged."""
    session = await store.get_or_create("s", SUPPORT)
    session.state["seen"] = True
    Faults(store).after("commit_turn", lambda: merged(store))
    await session.save()
    await session.add_message(user("hello"))
    await history_is(store, "hello")
    assert (session.state, session.metadata) == ({"seen": True}, {"channel": "web"})


async def test_read_before_a_commit_is_told(store: StoreBackend) -> None:
    """A message is stored after a turn whose commit was read before it was back."""
    session = await store.get_or_create("s", SUPPORT)
    session.state["seen"] = True
    Faults(store).after("commit_turn", lambda: outside(store.get("s")))
    await session.save()
    await session.add_message(user("hello"))
    await history_is(store, "hello")


async def test_rollback_in_turn_after_metadata_merged(store: StoreBackend) -> None:
    """A checkpoint of a turn is good in that turn, whenever metadata is merged beside it, and what was merged stays."""
    session = await store.get_or_create("s", SUPPORT)
    async with session.turn():
        before = session.checkpoint()
        await session.add_message(user("hello"))
        await merged(store)
        after = session.checkpoint()
        await session.add_message(user("wrong"))
        await session.rollback_to(after)
        assert texts(session.history) == ["hello"]
        await session.rollback_to(before)
        assert texts(session.history) == []
        await session.rollback_to(after)
    await history_is(store, "hello")
    assert session.metadata == {"channel": "web"}


async def test_rollback_over_merged_metadata(store: StoreBackend) -> None:
    """A rollback is refused that would undo the merging of metadata beside the task's own operation."""
    session = await store.get_or_create("s", SUPPORT)
    token = session.checkpoint()
    Faults(store).before("commit_turn", lambda: store.create_session(session.key, MERGED))
    await session.add_message(user("hello"))
    with pytest.raises(SessionConflictError):
        await session.rollback_to(token)
    await history_is(store, "hello")
    assert session.metadata == {"channel": "web"}


# --- turns that others have committed ---


@idle_in_all_ways
async def test_overtaken_idle_turn(store: StoreBackend, do: Idle) -> None:
    """What was committed while a turn that changed nothing had lost its row stays when the next turn commits."""
    session = await store.get_or_create("s", SUPPORT)
    await say(session, "before")
    async with session.turn():
        await do(session)
        await take_away(session)
        await outside(session.add_message(user("theirs")))
    await session.add_message(user("mine"))
    await history_is(store, "before", "before!", "theirs", "mine")


async def test_others_commit_before_a_commit_is_told(store: StoreBackend) -> None:
    """What was committed after a turn and before its own commit was back stays when the next turn commits."""
    session = await store.get_or_create("s", SUPPORT)
    Faults(store).after("commit_turn", lambda: outside(say(session, "theirs")))
    await session.add_message(user("first"))
    await session.add_message(user("mine"))
    await history_is(store, "first", "theirs", "theirs!", "mine")


async def test_others_commit_read_before_a_commit_is_told(store: StoreBackend, second: StoreBackend) -> None:
    """What another store has committed and this one has read before its own commit was back stays likewise."""
    session = await store.get_or_create("s", SUPPORT)

    async def happens() -> None:
        await say(await second.get_or_create("s", SUPPORT), "theirs")
        await store.get("s")

    Faults(store).after("commit_turn", lambda: outside(happens()))
    await session.add_message(user("first"))
    await session.add_message(user("mine"))
    await history_is(store, "first", "theirs", "theirs!", "mine")


async def test_rollback_over_others_commit(store: StoreBackend) -> None:
    """A rollback is refused that would undo what others committed before the task's own commit was back."""
    session = await store.get_or_create("s", SUPPORT)
    token = session.checkpoint()
    Faults(store).after("commit_turn", lambda: outside(say(session, "theirs")))
    await session.add_message(user("first"))
    with pytest.raises(SessionConflictError):
        await session.rollback_to(token)
    await history_is(store, "first", "theirs", "theirs!")


async def test_rollback_over_others_commit_beside_an_idle_turn(store: StoreBackend) -> None:
    """A rollback is refused that would undo what others committed while an own turn changed nothing."""
    session = await store.get_or_create("s", SUPPORT)
    token = session.checkpoint()
    Faults(store).after("leave_turn", lambda: outside(say(session, "theirs")))
    await session.save()
    with pytest.raises(SessionConflictError):
        await session.rollback_to(token)
    await history_is(store, "theirs", "theirs!")
