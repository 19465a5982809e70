"""Conversations deleted while messages are on their way: everyone is told, and nothing of them comes back (P7)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Final

import attrs
import pytest

from chatflow.core.agent import Agent
from chatflow.core.backend import StoreBackend
from chatflow.core.engine import EngineReply, EngineRequest
from chatflow.core.messages import ToolCall
from chatflow.core.records import Claim
from chatflow.core.session import AgentSession
from chatflow.core.tools import ToolContext, tool
from chatflow.core.turn import Turn
from chatflow.engines.scripted import ScriptedEngine
from chatflow.exceptions import SessionDeletedError, SessionError
from chatflow.runner import Runner
from chatflow.testing.conformance.conversation import SUPPORT, outside, queued, stored, texts, user
from chatflow.testing.conformance.places import leave, place_of, ticket

Deletion = Callable[[StoreBackend], Awaitable[object]]
DELETE: Final[dict[str, Deletion]] = {
    "delete": lambda store: store.delete("s"),
    "clear": lambda store: store.clear(),
    # As another process does it: nobody here is told.
    "elsewhere": lambda store: store.delete_session(store.key_of("s")),
}
by_all_ways: Final = pytest.mark.parametrize("delete", DELETE.values(), ids=DELETE.keys())


def seen_long_ago(session: AgentSession) -> None:
    """More than the 50 ms have passed for which a turn believes what it has seen."""
    turn = session.member_turn
    assert turn is not None
    turn._seen_at = 0


async def has_nothing(store: StoreBackend) -> None:
    """The id used anew at once has nothing of the deleted conversation, and works."""
    assert await outside(store.get("s")) is None
    assert await store.pending_turns() == ()
    new = await outside(store.get_or_create("s", SUPPORT))
    there = await stored(store, "s")
    assert there is not None
    assert (there["history"], there["state"], there["metadata"]) == ([], {}, {})
    await outside(new.add_message(user("new")))
    assert texts((await store.messages("s")).items) == ["new"]


@attrs.define
class Talk:
    """An engine that calls a tool, in which, or beside which, something happens."""

    happens: Callable[[ToolContext], Awaitable[object]]
    asked: int = 0
    caught: BaseException | None = None

    def agent(self) -> Agent:
        """An agent with the tool."""

        @tool
        async def look_up(context: ToolContext) -> str:
            """Look it up."""
            try:
                await self.happens(context)
            except SessionDeletedError as error:
                self.caught = error
                raise
            return "found"

        return Agent(name="Support", tools=[look_up])

    async def generate(self, request: EngineRequest) -> EngineReply:
        self.asked += 1
        if self.asked > 1:
            return EngineReply(text="too late")
        return EngineReply(tool_calls=[ToolCall(id="c", name="look_up", args={})])


@by_all_ways
@pytest.mark.parametrize("message_id", [None, "m"])
async def test_inside_a_tool(store: StoreBackend, message_id: str | None, delete: Deletion) -> None:
    """A tool of a deleted conversation is told at its next touch, no model is asked any more, and the run ends so."""

    async def happens(context: ToolContext) -> None:
        session = context.session
        await outside_of_turn(delete(store))
        seen_long_ago(session)
        session.state["lost"] = 1
        await session.add_message(user("lost"))

    talk = Talk(happens)
    with pytest.raises(SessionDeletedError):
        await Runner(talk.agent(), store, talk).run_async("s", "hello", message_id=message_id)
    assert isinstance(talk.caught, SessionDeletedError)
    assert talk.asked == 1
    if message_id is not None:
        assert not await store.is_message_processed(message_id, session_id="s")
    await has_nothing(store)


async def outside_of_turn(operation: Any) -> None:
    """Await it as code that belongs to no turn."""

    async def run() -> None:
        await operation

    await outside(run())


@by_all_ways
async def test_after_a_tool(store: StoreBackend, delete: Deletion) -> None:
    """A run whose conversation is deleted in a tool that does not touch it asks no model any more."""

    async def happens(context: ToolContext) -> None:
        seen_long_ago(context.session)
        await outside_of_turn(delete(store))

    talk = Talk(happens)
    with pytest.raises(SessionDeletedError):
        await Runner(talk.agent(), store, talk).run_async("s", "hello", message_id="m")
    assert talk.asked == 1
    await has_nothing(store)


@by_all_ways
async def test_used_anew_inside_the_turn(store: StoreBackend, delete: Deletion) -> None:
    """A turn of a deleted conversation changes nothing of the one that has its id by then, whatever it does."""
    session = await store.get_or_create("s", SUPPORT)
    with pytest.raises(SessionDeletedError):  # noqa: PT012  # the turn fails at its end
        async with session.turn():
            await session.add_message(user("old"))
            token = session.checkpoint()
            await outside_of_turn(delete(store))
            new = await outside(store.get_or_create("s", SUPPORT, {"new": 1}))
            await outside(new.add_message(user("new")))
            seen_long_ago(session)
            methods: tuple[Callable[[], Awaitable[None]], ...] = (
                lambda: session.rollback_to(token),
                lambda: session.add_message(user("old")),
                session.clear_history,
                session.save,
            )
            for method in methods:
                with pytest.raises(SessionDeletedError):
                    await method()
    there = await stored(store, "s")
    assert there is not None
    assert (texts(there["history"]), there["metadata"]) == (["new"], {"new": 1})


@by_all_ways
async def test_checkpoint_of_a_deleted_conversation(store: StoreBackend, delete: Deletion) -> None:
    """A checkpoint of a deleted conversation brings nothing back, also where the id was used anew."""
    session = await store.get_or_create("s", SUPPORT)
    await session.add_message(user("old"))
    token = session.checkpoint()
    await delete(store)
    with pytest.raises(SessionDeletedError):
        await session.rollback_to(token)
    new = await store.get_or_create("s", SUPPORT)
    for each in (session, new):
        with pytest.raises(SessionError):
            await each.rollback_to(token)
    assert texts((await store.messages("s")).items) == []


@by_all_ways
async def test_queued_runs(store: StoreBackend, delete: Deletion) -> None:
    """Runs that wait for their places when their conversation is deleted are told so, with message ids or without."""
    session = await store.get_or_create("s", SUPPORT)
    place = await place_of(store, ticket(session))
    runner = Runner(SUPPORT, store, ScriptedEngine([]))
    waiting = [
        asyncio.create_task(outside(runner.run_async("s", "hello", message_id=each))) for each in (None, "m", "n")
    ]
    await queued(store, 3)
    await delete(store)
    store.line.wake_all()
    await asyncio.wait(waiting)
    assert [type(task.exception()) for task in waiting] == [SessionDeletedError] * 3
    assert store.turns == []
    await leave(store, place)
    await has_nothing(store)


@by_all_ways
async def test_waiting_duplicate(store: StoreBackend, delete: Deletion) -> None:
    """A delivery that waits for the answer to its message is told when the conversation is deleted."""
    session = await store.get_or_create("s", SUPPORT)
    await place_of(store, ticket(session, "m"))
    runner = Runner(SUPPORT, store, ScriptedEngine([]))
    waiting = asyncio.create_task(outside(runner.run_async("s", "hello", message_id="m")))
    await queued(store, 1)
    await delete(store)
    store.line.wake_all()
    await asyncio.wait([waiting])
    assert isinstance(waiting.exception(), SessionDeletedError)
    await has_nothing(store)


@by_all_ways
async def test_unfinished_messages(store: StoreBackend, delete: Deletion) -> None:
    """Accepted, told and interrupted messages go with their conversation, and their ids can be used anew."""
    runner = Runner(SUPPORT, store, ScriptedEngine([RuntimeError("no"), "new"]))
    with pytest.raises(RuntimeError):
        await runner.run_async("s", "hello", message_id="told")
    await runner.accept("s", "hello", message_id="accepted")
    assert {turn.state for turn in await store.pending_turns()} == {"told", "accepted"}
    await delete(store)
    assert await store.pending_turns() == ()
    assert (await runner.run_async("s", "another text", message_id="told")).content == "new"
    assert not (await runner.accept("s", "another text", message_id="accepted")).duplicate


@by_all_ways
async def test_working(store: StoreBackend, delete: Deletion) -> None:
    """An accepted message whose conversation is deleted while it is done is dropped, and the worker goes on."""
    answered: list[str] = []
    heard, deleted = asyncio.Event(), asyncio.Event()

    async def happens(context: ToolContext) -> None:
        seen_long_ago(context.session)
        await outside_of_turn(delete(store))
        deleted.set()

    async def on_response(turn: Any, response: Any) -> None:
        answered.append(turn.session_id)
        heard.set()

    talk = Talk(happens)
    runner = Runner(talk.agent(), store, talk)
    await runner.accept("s", "hello", message_id="m")
    async with runner.working(on_response):
        await deleted.wait()
        await runner.accept("t", "hello", message_id="n")
        await heard.wait()
    assert answered == ["t"]
    assert talk.asked == 2
    assert await store.get("s") is None


async def test_commit_of_a_deleted_message(store: StoreBackend) -> None:
    """A message whose conversation is deleted elsewhere just before its commit is not answered, and may run again."""
    session = await store.get_or_create("s", SUPPORT)
    turn = Turn(session, Claim("m", "hello"), "Support")
    await turn.take()
    await session.add_message(user("hello"))
    await store.delete_session(session.key)
    with pytest.raises(SessionDeletedError):
        await turn.commit()
    assert not await store.is_message_processed("m", session_id="s")
    with pytest.raises(SessionDeletedError):
        await outside(session.save())


@by_all_ways
async def test_before_the_next_message(store: StoreBackend, delete: Deletion) -> None:
    """A message to a conversation that was deleted begins it anew, also where its session is at hand."""
    runner = Runner(Agent("Support"), store, ScriptedEngine(["first", "second"]))
    await runner.run_async("s", "hello")
    before = await store.get("s")
    assert before is not None
    await delete(store)
    assert (await runner.run_async("s", "again")).content == "second"
    assert texts((await store.messages("s")).items) == ["again", "second"]
    with pytest.raises(SessionDeletedError):
        await before.add_message(user("lost"))


@by_all_ways
async def test_before_a_duplicate(store: StoreBackend, delete: Deletion) -> None:
    """A message that was answered is known once its conversation is deleted, and its answer is not."""
    handing_on = ScriptedEngine([ScriptedEngine.call("transfer_to_billing", reason="a bill"), "first"])
    runner = Runner(Agent("Support", handoffs=[Agent("Billing")]), store, handing_on)
    assert (await runner.run_async("s", "hello", message_id="m")).active_agent_name == "Billing"
    await delete(store)
    response = await runner.run_async("s", "hello", message_id="m")
    assert (response.content, response.duplicate, response.stop_reason) == ("", True, "not_stored")
    assert response.active_agent_name == "Support"


@by_all_ways
async def test_after_its_session_was_told(store: StoreBackend, delete: Deletion) -> None:
    """A message begins its conversation anew, also where the session at hand knows already that it was deleted."""
    runner = Runner(Agent("Support"), store, ScriptedEngine(["first", "second"]))
    await runner.run_async("s", "hello")
    before = await store.get("s")
    assert before is not None
    await delete(store)
    with pytest.raises(SessionDeletedError):
        await before.add_message(user("lost"))
    assert (await runner.run_async("s", "again")).content == "second"
    assert texts((await store.messages("s")).items) == ["again", "second"]
