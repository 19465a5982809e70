"""Sessions that an agent makes and runs by itself, on every backend."""

from __future__ import annotations

import datetime as dt
from contextlib import suppress
from typing import Any

import pytest

from chatflow.core.agent import Agent
from chatflow.core.providers import ContextProvider, RunContext
from chatflow.core.session import AgentSession, SessionContext
from chatflow.core.store import BaseSessionStore
from chatflow.engines.scripted import ScriptedEngine, user_text
from chatflow.exceptions import SessionConflictError, SessionDeletedError, SessionError, StoreScopeError
from chatflow.runner import Runner
from chatflow.testing.conformance.conftest import OpenStore, Restart
from chatflow.testing.conformance.conversation import texts, user


def answering(name: str = "Support", **options: Any) -> Agent:
    """An agent that repeats what it is told, with an exclamation mark."""
    return Agent(name=name, engine=ScriptedEngine(default=lambda request: f"{user_text(request)}!"), **options)


async def test_written_with_its_first_turn(store: BaseSessionStore) -> None:
    """A session that an agent has made is not in the store before its first turn, and then it is."""
    agent = answering()
    session = agent.create_session("s", store=store)
    assert await store.get("s") is None
    await agent.run("one", session=session)
    stored = await store.get("s")
    assert stored is not None
    assert texts(stored.history) == ["one", "one!"]
    assert stored.active_agent_name == "Support"


async def test_goes_on_with_what_is_stored(store: BaseSessionStore, restart: Restart) -> None:
    """A session made for an id that is stored goes on with that conversation, in its first turn."""
    agent = answering()
    await agent.run("one", session=agent.create_session("s", store=store))
    store = await restart(store)
    session = agent.create_session("s", store=store)
    response = await agent.run("two", session=session)
    assert response.content == "two!"
    assert texts(session.history) == ["one", "one!", "two", "two!"]


async def test_is_the_session_of_the_store(store: BaseSessionStore) -> None:
    """Once it has run, the store hands out that very session, so that a tool may ask for it inside its turn."""
    agent = answering()
    session = agent.create_session("s", store=store)
    found: list[SessionContext | None] = []

    @agent.tool
    async def look() -> str:
        """Look."""
        found.append(await store.get("s"))
        found.append(await store.get_or_create("s", agent))
        return "there"

    agent = Agent("Support", tools=agent.tools, engine=ScriptedEngine([ScriptedEngine.call("look"), "done"]))
    await agent.run("go", session=session)
    found.append(await store.get("s"))
    assert [each is session for each in found] == [True, True, True]


async def test_two_sessions_of_one_id(store: BaseSessionStore) -> None:
    """Two sessions that were made for one id are one conversation."""
    agent = answering()
    one, other = agent.create_session("s", store=store), agent.create_session("s", store=store)
    await agent.run("one", session=one)
    await agent.run("two", session=other)
    await agent.run("three", session=one)
    assert texts(one.history) == ["one", "one!", "two", "two!", "three", "three!"]


async def test_changes_wait_for_the_first_turn(store: BaseSessionStore) -> None:
    """State that is set before the first turn is committed with it."""
    agent = answering()
    session = agent.create_session("s", store=store)
    session.set("theme", "dark")
    session.metadata["channel"] = "web"
    assert await store.get("s") is None
    await agent.run("one", session=session)
    stored = await store.get("s")
    assert stored is not None
    assert (stored.state, stored.metadata) == ({"theme": "dark"}, {"channel": "web"})


async def test_deleted_before_it_was_written(store: BaseSessionStore) -> None:
    """Deleting an id that has not been written does nothing to the session that is to write it."""
    agent = answering()
    session = agent.create_session("s", store=store)
    assert await store.delete("s") is False
    await agent.run("one", session=session)
    assert texts(session.history) == ["one", "one!"]


async def test_deleted_afterwards(store: BaseSessionStore) -> None:
    """A session that has run is deleted like any other: it writes nothing any more."""
    agent = answering()
    session = agent.create_session("s", store=store)
    await agent.run("one", session=session)
    assert await store.delete("s") is True
    with pytest.raises(SessionDeletedError):
        await agent.run("two", session=session)
    with pytest.raises(SessionDeletedError):
        session.set("theme", "dark")
    with pytest.raises(SessionDeletedError):
        session.delete("theme")
    assert await store.get("s") is None


async def test_duplicate(store: BaseSessionStore) -> None:
    """A message id runs once in the session's conversation."""
    agent = answering()
    session = agent.create_session("s", store=store)
    first = await agent.run("one", session=session, message_id="m1")
    again = await agent.run("one", session=session, message_id="m1")
    assert (first.duplicate, again.duplicate, again.content) == (False, True, "one!")
    assert texts(session.history) == ["one", "one!"]


async def test_metadata_joins_the_turn(store: BaseSessionStore) -> None:
    """Metadata given with a message is committed with its turn."""
    agent = answering()
    session = agent.create_session("s", store=store)
    await agent.run("one", session=session, metadata={"channel": "web"})
    assert session.metadata == {"channel": "web"}


async def test_agent_out_of_reach(store: BaseSessionStore) -> None:
    """A session with an agent that the running one can't reach is refused, naming both, and nothing is changed."""
    mine, other = answering("Mine"), answering("Other")
    session = mine.create_session("s", store=store)
    await mine.run("one", session=session)
    with pytest.raises(SessionError, match=r"'Mine'.*'Other'"):
        await other.run("two", session=session)
    assert texts(session.history) == ["one", "one!"]


async def test_colleague(store: BaseSessionStore) -> None:
    """The active agent answers where the running one can hand over to it."""
    billing = answering("Billing")
    support = answering("Support", handoffs=[billing])
    session = support.create_session("s", store=store)
    await session.set_active_agent(billing)
    response = await support.run("one", session=session)
    assert response.active_agent_name == "Billing"


async def test_session_of_the_store(store: BaseSessionStore) -> None:
    """An agent runs in a session that a store has handed out."""
    agent = answering()
    session = await store.get_or_create("s", agent)
    await agent.run("one", session=session)
    assert texts(session.history) == ["one", "one!"]


async def test_typed_state_commits_and_rolls_back(store: BaseSessionStore) -> None:
    """Keys that are set and deleted in a turn go with it."""
    session: AgentSession = await store.get_or_create("s", answering())
    session.set("theme", "dark")
    await session.save()
    with suppress(ZeroDivisionError):
        async with session.turn():
            assert session.delete("theme") is True
            assert session.delete("theme") is False
            session.set("language", "en")
            raise ZeroDivisionError
    assert session.state == {"theme": "dark"}
    async with session.turn():
        await session.add_message(user("hello"))
        session.delete("theme")
    assert session.state == {}


async def test_checkpoint_before_anything_is_read(store: BaseSessionStore) -> None:
    """A session that has read nothing gives no checkpoint, and takes no length: both would wipe what is stored."""
    agent = answering()
    await agent.run("one", session=agent.create_session("s", store=store))
    session = Agent("Support").create_session("s", store=store)
    with pytest.raises(SessionConflictError, match="nothing of it has been read yet"):
        session.checkpoint()
    with pytest.raises(ValueError, match="pruned or moved to the front"):
        await session.rollback_to(len(session.history))
    assert texts(session.history) == ["one", "one!"]


async def test_checkpoint_of_another_conversation(store: BaseSessionStore, open_store: OpenStore) -> None:
    """A checkpoint is good in its own conversation alone, also where numbers of commits are the same elsewhere."""
    mine = await store.get_or_create("s", answering())
    checkpoint = mine.checkpoint()
    other = await store.get_or_create("t", answering())
    alone = SessionContext("s", answering())
    for session in (other, alone):
        await session.add_message(user("hello"))
        with pytest.raises(SessionConflictError, match="of another conversation"):
            await session.rollback_to(checkpoint)
        assert texts(session.history) == ["hello"]


async def test_limits_are_stored(store: BaseSessionStore, restart: Restart) -> None:
    """The limits of a session that an agent makes are those of the conversation that its first turn creates."""
    agent = answering()
    session = agent.create_session("s", store=store, max_turns=1, expires_after=dt.timedelta(days=1))
    await agent.run("one", session=session)
    store = await restart(store)
    stored = await store.get("s")
    assert stored is not None
    assert (stored.max_turns, stored.expires_after) == (1, dt.timedelta(days=1))


async def test_runner_of_another_owner(store: BaseSessionStore) -> None:
    """One owner's runner refuses another's session, and takes its own and those that are in no store."""
    agent = answering()
    alice = await store.for_owner("alice").get_or_create("s", agent)
    bobs = Runner(agent, store).for_owner("bob")
    with pytest.raises(StoreScopeError, match="a session of another owner"):
        await bobs.run_session(alice, "one")
    assert list(alice.history) == []
    await bobs.run_session(await store.for_owner("bob").get_or_create("s", agent), "one")
    await bobs.run_session(agent.create_session(), "one")


async def test_what_providers_stored_is_not_for_clients(store: BaseSessionStore) -> None:
    """A client does not see what a context provider has stored in the conversation."""

    class Noting(ContextProvider):
        async def before_run(self, agent: Agent, session: AgentSession, context: RunContext) -> None:
            context.add_messages(user("INTERNAL"), store=True)

    agent = answering(context_providers=[Noting()])
    session = agent.create_session("s", store=store)
    await agent.run("one", session=session)
    assert texts(session.history) == ["INTERNAL", "one", "one!"]
    data = session.to_dict(for_client=True)
    assert [message["content"] for message in data["messages"]] == ["one", "one!"]
    assert texts(AgentSession.from_dict(data, from_client=True).history) == ["one", "one!"]
