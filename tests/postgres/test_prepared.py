"""Statements whose plans the server keeps, where a connection leads to one process of it and not through a bouncer."""

from __future__ import annotations

from typing import Final

import pytest

from chatflow.core.agent import Agent
from chatflow.core.messages import Message, Role
from chatflow.exceptions import StoreError
from chatflow.postgres.connection import Step
from chatflow.postgres.store import PostgresSessionStore
from tests.postgres.conftest import OpenStore
from tests.postgres.proxy import How, Proxy

SUPPORT: Final = Agent(name="Support")
USUAL: Final = 5
"""Turns after which all that a turn sends is prepared."""


async def take_turns(store: PostgresSessionStore, count: int) -> None:
    """Say something so many times."""
    session = await store.get_or_create("s", SUPPORT)
    for _ in range(count):
        await session.add_message(Message(Role.USER, "hello"))


async def prepared(store: PostgresSessionStore) -> int:
    """How many statements the server keeps for the one connection of *store*, as that one alone is told."""
    ((count,),) = await store._in_use().ask("SELECT count(*) FROM pg_prepared_statements")
    return int(count)


async def test_a_connection_of_ones_own(open_store: OpenStore) -> None:
    """What is sent again and again is prepared where a connection leads to one process of the server."""
    store = open_store(max_connections=1)
    await take_turns(store, USUAL)
    assert await prepared(store) > 0


async def test_behind_a_bouncer(proxy: Proxy, open_store: OpenStore) -> None:
    """Behind a bouncer nothing is: the next transaction may get another process."""
    proxy.is_bouncer = True
    store = open_store(proxy.dsn, max_connections=1)
    await take_turns(store, USUAL)
    assert await prepared(store) == 0


@pytest.mark.parametrize("how", ["after", "before"])
async def test_a_prepared_commit_that_is_cut(proxy: Proxy, open_store: OpenStore, how: How) -> None:
    """A commit that is prepared and whose connection breaks is found out about too."""
    store = open_store(proxy.dsn, default_max_turns=100, max_connections=1)
    await take_turns(store, USUAL)
    assert await prepared(store) > 0
    proxy.plan = [how]
    await take_turns(store, 1)
    assert proxy.cut == 1
    assert len((await store.messages("s")).items) == USUAL + 1


async def test_a_statement_after_one_that_fails(open_store: OpenStore) -> None:
    """What the server did not get to prepare, since a statement before it failed, works the next time."""
    store = open_store(max_connections=1)
    await take_turns(store, 1)
    database = store._in_use()  # no operation of a store can be made to fail so
    for divisor in (1, 1, 0, 1):  # it is to be prepared with the third one
        flight = database.fly(Step("SELECT 1 / %(divisor)s", {"divisor": divisor}), Step("SELECT 'second'"))
        if divisor:
            assert await flight == [[(1,)], [("second",)]]
        else:
            with pytest.raises(StoreError, match="division by zero"):
                await flight
