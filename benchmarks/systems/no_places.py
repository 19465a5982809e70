"""chatflow without what makes turns come one at a time: it shows what that costs, and is good for nothing else."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import attrs

from benchmarks.systems.ours import Chatflow
from chatflow import StoreBackend
from chatflow.core.records import Key, Place, Snapshot, Ticket
from chatflow.sqlite.commit import WriteCommit
from chatflow.sqlite.store import SQLiteSessionStore


class ChatflowWithoutPlaces(Chatflow):
    """A store whose turns have no row: nobody's place is kept, nothing is beaten, and no commit is fenced."""

    def make_store(self) -> StoreBackend:
        """In the file that the other one would have."""
        return _WithoutPlaces(self.folder / "chat.db", default_max_turns=self.window)


class _WithoutPlaces(SQLiteSessionStore):
    async def queue_turn(self, ticket: Ticket) -> Place:
        """Every turn runs at once, on what its session has seen."""
        await asyncio.sleep(0)
        return Place(turn_id=0, running=True, attempt=1, behind_own=True, session=None)

    async def look_at_turn(self, turn_id: int, attempt: int, key: Key, known: Snapshot | None) -> None:
        """It is always there."""
        await asyncio.sleep(0)

    async def _write(
        self, operation: Callable[..., Any], *args: Any, durable: bool = True, urgent: bool = False
    ) -> Any:
        if isinstance(operation, WriteCommit):
            operation = _CommitWithoutRow(**attrs.asdict(operation, recurse=False))
        return await super()._write(operation, *args, durable=durable, urgent=urgent)


class _CommitWithoutRow(WriteCommit):
    def _end_turn(self, connection: Any) -> tuple[tuple[int, int | None] | None, bool]:
        return (0, None), False
