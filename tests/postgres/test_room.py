from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, Final

import psycopg
import pytest

from chatflow.core.agent import Agent
from chatflow.core.messages import Message, Role
from chatflow.engines.scripted import ScriptedEngine
from chatflow.exceptions import StoreError, UnstorableValueError
from chatflow.postgres.room import ROOM
from chatflow.postgres.store import PostgresSessionStore
from chatflow.runner import Runner

SUPPORT: Final = Agent("Support", engine=ScriptedEngine(default="answer"))
TABLES: Final = ("messages", "processed_messages", "turns")


def letters(count: int) -> str:
    """So many characters, which compress badly."""
    return "".join(random.Random(8).choices("abcdefghijklmnopqrstuvwxyz0123456789", k=count))  # no secret


LONG: Final = letters(20_000)


async def run(
    store: PostgresSessionStore,
    session_id: str = "s",
    message_id: str | None = None,
    owner: str = "",
    agent: Agent = SUPPORT,
) -> Any:
    """Take a turn."""
    return await Runner(agent, store.for_owner(owner) if owner else store).run_async(
        session_id, "hello", message_id=message_id
    )


LONG_AGENT: Final = Agent(LONG, engine=SUPPORT.engine)


@pytest.mark.parametrize(
    ("path", "work"),
    [
        ("session_id", lambda store: store.get_or_create(LONG, SUPPORT)),
        ("session_id", lambda store: run(store, LONG)),
        ("session_id", lambda store: store.mark_message_processed("m", session_id=LONG)),
        ("message_id", lambda store: store.mark_message_processed(LONG)),
        ("message_id", lambda store: run(store, message_id=LONG)),
        ("message_id", lambda store: Runner(SUPPORT, store).accept("s", "hello", message_id=LONG)),
        ("owner", lambda store: run(store, owner=LONG)),
        ("agent.name", lambda store: run(store, agent=LONG_AGENT)),
        ("agent.name", lambda store: Runner(LONG_AGENT, store).accept("s", "hello", message_id="m")),
    ],
    ids=["create", "run", "mark in", "mark", "message", "accept", "owner", "agent", "accept of agent"],
)
async def test_what_no_index_has_room_for(
    store: PostgresSessionStore,
    connection: psycopg.Connection[Any],
    schema: str,
    path: str,
    work: Callable[[PostgresSessionStore], Any],
) -> None:
    """An id, an owner or a name that no index has room for is refused by its path, before a turn begins."""
    await store.get("s")
    with pytest.raises(UnstorableValueError, match="more than an index of PostgreSQL has room for") as raised:
        await work(store)
    assert raised.value.path == path
    for table in TABLES:
        assert connection.execute(f'SELECT FROM "{schema}".chatflow_{table}'.encode()).fetchall() == []
    assert (await run(store)).content == "answer"


async def test_message_id_that_has_no_room_beside_its_session(store: PostgresSessionStore) -> None:
    """A message id that only together with its session's id has no room is refused before the model is asked."""
    engine = ScriptedEngine(default="answer")
    session_id = letters(2000)
    with pytest.raises(UnstorableValueError, match=session_id[:20]) as raised:
        await Runner(SUPPORT, store, engine).run_async(session_id, "hello", message_id=letters(2100))
    assert (raised.value.path, engine.requests) == ("message_id", [])


async def test_what_has_room(store: PostgresSessionStore) -> None:
    """As many bytes as are promised always have room, and so does what compresses well; nothing is left of a try."""
    third = letters(ROOM // 3)
    assert (await run(store, third, third, third)).content == "answer"
    assert (await run(store, third, third, third)).duplicate
    text = "x" * 10_000
    assert (await run(store, text, text, text, agent=Agent(text, engine=SUPPORT.engine))).content == "answer"
    assert await store.mark_message_processed(text) is True
    assert await store.mark_message_processed(text) is False


async def test_server_that_fails_while_it_is_asked(
    store: PostgresSessionStore, connection: psycopg.Connection[Any], schema: str
) -> None:
    """Another error of the server, while it is asked whether it has room, is told as what it is."""
    await store.get("s")
    connection.execute(f'ALTER TABLE "{schema}".chatflow_processed_messages RENAME TO gone'.encode())
    with pytest.raises(StoreError, match="does not exist"):
        await store.mark_message_processed(LONG)
    connection.execute(f'ALTER TABLE "{schema}".gone RENAME TO chatflow_processed_messages'.encode())


async def test_agent_of_a_turn_without_a_runner(store: PostgresSessionStore) -> None:
    """A turn without a runner has no agent's name in an index, and may have any."""
    session = await store.get_or_create("s", Agent(LONG))
    await session.add_message(Message(Role.USER, "hello"))
    assert session.active_agent_name == LONG
