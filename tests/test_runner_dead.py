"""A message that was begun too often, and those behind it."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import anyio
import anyio.lowlevel
import pytest

from chatflow import Agent, Runner, ScriptedEngine, SQLiteSessionStore
from chatflow.core import turn
from chatflow.core.records import Dead, Key, Lost, Place, Snapshot
from tests.runs import session_of, texts


class _Pausing(SQLiteSessionStore):
    """A store in which the first row that was taken starts only once it is let go on."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.taken = anyio.Event()
        self.go_on = anyio.Event()

    async def start_turn(
        self, turn_id: int, attempt: int, key: Key, known: Snapshot | None, max_attempts: int | None
    ) -> Place | Dead | Lost:
        """Wait, then start."""
        first = not self.taken.is_set()
        self.taken.set()
        if first:
            await self.go_on.wait()
        return await super().start_turn(turn_id, attempt, key, known, max_attempts)


async def test_those_behind_a_message_that_is_given_up_are_woken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A turn that waits behind a message of its own process starts when that is given up."""
    monkeypatch.setattr(turn, "_LOOK_BEHIND_OWN", 3600)
    path = tmp_path / "chat.db"
    async with _Pausing(path) as store:
        runner = Runner(Agent("Support", "Help.", "none"), store, ScriptedEngine(default="Hello."), max_attempts=3)
        await runner.accept("s", "poison", message_id="m")
        with closing(sqlite3.connect(path)) as connection, connection:
            connection.execute("UPDATE chatflow_turns SET attempts = 3")
        async with runner.working(), anyio.create_task_group() as group:
            await store.taken.wait()
            group.start_soon(runner.run_async, "s", "behind it")
            while len(store.line._waiters) < 2:  # nothing tells that it waits
                await anyio.lowlevel.checkpoint()
            store.go_on.set()
        assert texts(await session_of(runner)) == ["behind it", "Hello."]
        assert [(found.message_id, found.state) for found in await store.pending_turns()] == [("m", "dead")]
