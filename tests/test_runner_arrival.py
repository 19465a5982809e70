"""Messages that reach a runner in an order are answered in it."""

from __future__ import annotations

import anyio
import anyio.lowlevel

from chatflow import Agent, Runner, ScriptedEngine, SessionStore
from chatflow.core.records import Key, NewSession, Snapshot
from chatflow.testing import Faults
from tests.runs import session_of, texts


class _SlowToSay(SessionStore):
    """A store whose conversations are there before whoever created them hears of it."""

    def __init__(self) -> None:
        super().__init__()
        self.created = anyio.Event()
        self.go_on = anyio.Event()

    async def create_session(self, key: Key, new: NewSession) -> Snapshot:
        """Create, then wait."""
        snapshot = await super().create_session(key, new)
        self.created.set()
        await self.go_on.wait()
        return snapshot


async def test_the_message_that_creates_a_conversation_is_its_first() -> None:
    """A message that comes while another one creates the conversation does not overtake it."""
    store = _SlowToSay()
    runner = Runner(Agent("Support", "Help.", "none"), store, ScriptedEngine(default="Hello."))
    async with anyio.create_task_group() as group:
        group.start_soon(runner.run_async, "s", "first")
        await store.created.wait()
        group.start_soon(runner.run_async, "s", "second")
        for _ in range(100):
            await anyio.lowlevel.checkpoint()
        store.go_on.set()
    assert texts(await session_of(runner)) == ["first", "Hello.", "second", "Hello."]


async def test_one_that_still_reads_its_conversation_is_not_overtaken() -> None:
    """A message whose conversation has come to hand does not overtake an earlier one that is still reading it."""
    store = SessionStore()
    runner = Runner(Agent("Support", "Help.", "none"), store, ScriptedEngine(default="Hello."))
    created = await store.get_or_create("s", runner.starting_agent)
    store._live.remove(created)
    reads, go_on = anyio.Event(), anyio.Event()

    async def wait() -> None:
        reads.set()
        await go_on.wait()

    Faults(store).before("load_session", wait)
    async with anyio.create_task_group() as group:
        group.start_soon(runner.run_async, "s", "first")
        await reads.wait()
        await store.get("s")
        group.start_soon(runner.run_async, "s", "second")
        for _ in range(100):
            await anyio.lowlevel.checkpoint()
        go_on.set()
    assert texts(await session_of(runner)) == ["first", "Hello.", "second", "Hello."]
