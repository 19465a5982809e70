from __future__ import annotations

from chatflow.core.store import BaseSessionStore
from chatflow.testing.conformance.conversation import SUPPORT, call, result, say, stored, system, user


async def converse(store: BaseSessionStore) -> None:
    """A conversation with all that one can have."""
    session = await store.get_or_create("s", SUPPORT, {"a": 1}, max_turns=2)
    await session.add_message(system("be brief"))
    session.state["b"] = 2
    await say(session, "one", "two", "three")
    await session.add_message(call("c"))
    await session.add_message(result("c"))
    await store.mark_message_processed("m1")
    await (await store.get_or_create("empty", SUPPORT)).clear_history()


async def test_empty_store(store: BaseSessionStore) -> None:
    """A store without conversations has no fault, and nothing to repair."""
    assert (await store.check(), await store.repair()) == ((), ())


async def test_healthy_store(store: BaseSessionStore) -> None:
    """What a store has written has no fault."""
    await converse(store)
    assert await store.check() == ()


async def test_repair_of_healthy_store(store: BaseSessionStore) -> None:
    """Repairing what has no fault does nothing: conversations, their order and their sessions are as before."""
    await converse(store)
    session = await store.get("s")
    assert session is not None
    before = (await stored(store, "s"), await store.list_sessions(), session.committed)
    assert await store.repair() == ()
    assert (await stored(store, "s"), await store.list_sessions(), session.committed) == before


async def test_in_a_turn(store: BaseSessionStore) -> None:
    """A turn can be under way meanwhile, the caller's own too."""
    session = await store.get_or_create("s", SUPPORT)
    async with session.turn():
        assert (await store.check(), await store.repair()) == ((), ())
        await session.add_message(user("hello"))
    assert await store.check() == ()
