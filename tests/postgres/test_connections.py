"""What a connection has to cope with: values larger than what is sent at once, and settings of its user."""

from __future__ import annotations

import asyncio
from typing import Final

import pytest
from psycopg.conninfo import make_conninfo

from chatflow.core.agent import Agent
from chatflow.core.messages import Message, Role
from chatflow.exceptions import StoreError
from chatflow.postgres.connection import Step
from chatflow.postgres.store import PostgresSessionStore
from tests.postgres import server
from tests.postgres.conftest import OpenStore
from tests.postgres.proxy import Proxy

SUPPORT: Final = Agent(name="Support")
LARGE: Final = 4_000_000
"""Characters, which no socket takes at once."""


async def test_large_values(store: PostgresSessionStore, open_store: OpenStore) -> None:
    """A value of some megabytes comes back, whatever has written it."""
    first, second, third = ("1" * LARGE, "2" * LARGE, "3" * LARGE)
    await store.get_or_create("s", SUPPORT, metadata={"first": first})
    session = await store.get_or_create("s", SUPPORT, metadata={"second": second})
    async with session.turn():
        session.state["third"] = third
        await session.add_message(Message(Role.USER, first))
    again = await open_store().get("s")
    assert again is not None
    assert again.metadata == {"first": first, "second": second}
    assert again.state == {"third": third}
    assert [message.content for message in again.history] == [first]


async def test_large_values_both_ways(store: PostgresSessionStore) -> None:
    """A large answer and a large value after it do not wait for each other."""
    text = "x" * LARGE * 4
    ask = Step("SELECT repeat('x', %(count)s::bigint::integer)", {"count": len(text)})
    found = await store._in_use().fly(ask, Step("SELECT length(%(text)s::text)", {"text": text}))
    assert found == [[(text,)], [(len(text),)]]


@pytest.mark.parametrize("level", ["repeatable read", "serializable"])
async def test_isolation_of_the_user(open_store: OpenStore, level: str) -> None:
    """A user's own level of isolation is not that of the store, whose statements see what they have waited for."""
    options = "-c default_transaction_isolation=" + level.replace(" ", "\\ ")
    store = open_store(make_conninfo(server.dsn(), options=options))
    assert await store._in_use().ask("SHOW transaction_isolation") == [("read committed",)]
    session = await store.get_or_create("s", SUPPORT)
    async with asyncio.TaskGroup() as group:
        for number in range(10):
            group.create_task(session.add_message(Message(Role.USER, str(number))))
    assert [message.content for message in session.history] == [str(number) for number in range(10)]


async def test_isolation_behind_a_bouncer(proxy: Proxy, open_store: OpenStore) -> None:
    """Behind a bouncer it can't be changed for a session, and the error says what to do."""
    proxy.is_bouncer = True
    options = "-c default_transaction_isolation=serializable"
    store = open_store(make_conninfo(proxy.dsn, options=options))
    with pytest.raises(StoreError, match=r"default_transaction_isolation is serializable .* ALTER ROLE"):
        await store.get_or_create("s", SUPPORT)
