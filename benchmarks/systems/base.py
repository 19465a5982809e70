"""System: what is asked of each way to keep conversations, the same few things of all.

What a system has not got stands in its entry in `benchmarks/systems/__init__.py`, and is not asked of it.
"""

from __future__ import annotations

import sqlite3
from abc import ABC, abstractmethod
from contextlib import closing
from pathlib import Path
from typing import Any

from benchmarks.conversation import WINDOW


class System(ABC):
    """Conversations in *folder*, by number, each with the last *window* turns.

    Where a package never drops a turn, its window is what `load` asks for, and the rest stays stored.
    """

    def __init__(self, folder: Path, window: int = WINDOW) -> None:
        self.folder = folder
        self.window = window

    async def open(self) -> None:
        """Open what a program would have open before its first conversation."""

    @abstractmethod
    async def fill(self, conversations: range, turns: int) -> None:
        """Start these conversations, each with so many turns. Not measured, so by whatever way is quick."""

    @abstractmethod
    async def turn(self, conversation: int, message_id: str | None = None) -> float:
        """Take one turn, durably as the system understands it; the moment at which its commit was handed over.

        Of several writes that is the first one. With *message_id* the message's id is claimed too.
        """

    async def forget(self, conversation: int) -> None:
        """Let the next `load` read it from the storage, where the system would keep it in memory."""

    @abstractmethod
    async def load(self, conversation: int) -> int:
        """Load its window and touch every message; how many characters there were."""

    async def claim(self, message_id: str) -> bool:
        """Note a message's id, durably; False if it was noted before."""
        raise NotImplementedError

    async def remember(self, count: int) -> None:
        """Store so many message ids. Not measured."""
        raise NotImplementedError

    async def page(self, after: Any) -> tuple[int, Any]:
        """List the next conversations, 100 if it can; how many, and where to go on, None at the end."""
        raise NotImplementedError

    async def add_others(self, start: int, stop: int) -> None:
        """Store the conversations of those numbers, a message each, beside the ones at hand. Not measured."""
        raise NotImplementedError

    async def run(self, conversation: int, message_id: str | None = None) -> None:
        """A turn with all that is above the store: runner, prompt, a tool, an engine that takes no time."""
        raise NotImplementedError

    def make_messages(self) -> object:
        """The messages of a turn by themselves, to know what they take in memory."""
        raise NotImplementedError

    async def restore(self) -> None:
        """Between measurements: drop what a system that never drops a turn has gathered, where that slows it down."""

    async def close(self) -> None:
        """Close everything."""

    async def remove(self) -> None:
        """Once it is closed: remove what it has stored elsewhere than in its folder."""

    async def bytes_on_disk(self) -> int:
        """How large its files are, once the write-ahead log is in the file."""
        files = [path for path in self.folder.rglob("*") if path.is_file()]
        for path in files:
            if path.suffix == ".db":
                with closing(sqlite3.connect(path)) as connection:
                    connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        return sum(path.stat().st_size for path in files if path.exists() and not path.name.endswith("-shm"))
