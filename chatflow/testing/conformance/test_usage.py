"""What a conversation has cost, over its whole life."""

from __future__ import annotations

from contextlib import suppress

from chatflow.core.messages import Message, Role
from chatflow.core.session import SessionContext
from chatflow.core.store import BaseSessionStore
from chatflow.testing.conformance.conftest import OpenStore, Restart
from chatflow.testing.conformance.conversation import SUPPORT, user


async def turn(session: SessionContext, cost: int) -> None:
    """One turn whose answer has cost so much."""
    async with session.turn():
        await session.add_message(user("hi"))
        await session.add_message(Message(Role.MODEL, "hello", agent_name="Support", usage={"tokens": cost}))


async def again(store: BaseSessionStore) -> SessionContext:
    """The conversation as the store has it."""
    session = await store.get("s")
    assert session is not None
    return session


async def test_counts_what_was_pruned(open_store: OpenStore, restart: Restart) -> None:
    """Turns that have left the window count, in the session at hand and after a restart."""
    store = open_store(default_max_turns=2)
    session = await store.get_or_create("s", SUPPORT)
    for power in range(5):
        await turn(session, 2**power)
        assert session.usage.total == {"tokens": 2 ** (power + 1) - 1}
    assert session.usage.by_turn == ({"tokens": 8}, {"tokens": 16})
    after = await again(await restart(store, default_max_turns=2))
    assert after.usage == session.usage
    await turn(after, 32)
    assert after.usage.by_agent == {"Support": {"tokens": 63}}


async def test_counts_what_was_cleared(open_store: OpenStore) -> None:
    """Clearing the history does not make the conversation cheaper."""
    store = open_store()
    session = await store.get_or_create("s", SUPPORT)
    await turn(session, 1)
    async with session.turn():
        await session.clear_history()
        assert session.usage.total == {"tokens": 1}
        assert session.usage.by_turn == ()
    assert (await again(store)).usage.total == {"tokens": 1}


async def test_leaves_no_trace(open_store: OpenStore) -> None:
    """A turn that fails, or goes back, has cost nothing that is kept."""
    store = open_store(default_max_turns=1)
    session = await store.get_or_create("s", SUPPORT)
    await turn(session, 1)
    before = session.usage
    async with session.turn():
        token = session.checkpoint()
        await session.clear_history()
        await session.rollback_to(token)
    with suppress(ZeroDivisionError):
        async with session.turn():
            await session.add_message(user("again"))
            await session.clear_history()
            raise ZeroDivisionError
    assert session.usage == before
    assert (await again(store)).usage == before


async def test_goes_with_the_conversation(open_store: OpenStore) -> None:
    """A conversation that is deleted and begun anew has cost nothing."""
    store = open_store(default_max_turns=1)
    session = await store.get_or_create("s", SUPPORT)
    await turn(session, 1)
    await turn(session, 2)
    await store.delete("s")
    assert (await store.get_or_create("s", SUPPORT)).usage.total == {}
