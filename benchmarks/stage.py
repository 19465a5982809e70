"""Stage: where a system is measured, in a process of its own."""

from __future__ import annotations

import gc
import os
import shutil
import statistics
import tempfile
import time
from pathlib import Path

from benchmarks.clients import Clients
from benchmarks.conversation import WINDOW
from benchmarks.measuring import Flushes
from benchmarks.promise import promise_on_server, watched_commits
from benchmarks.systems import SYSTEMS, Entry
from benchmarks.systems.base import System
from benchmarks.systems.on_server import OnServer


class Stage:
    """A folder, and the system that is open in it."""

    def __init__(self, name: str, folder: Path, seconds: float) -> None:
        self.name = name
        self.entry: Entry = SYSTEMS[name]
        self.folder = folder
        self.seconds = seconds
        """How long one measurement may take."""
        self.flushes = Flushes()
        self.clients = Clients()
        """Other processes that use the system's store; they end before it does."""
        self._system: System | None = None
        self._promise: str | None = None

    @property
    def system(self) -> System:
        """The one that is open."""
        assert self._system is not None
        return self._system

    async def renew(self, window: int = WINDOW) -> System:
        """Another system, over a folder of its own; the one before is gone."""
        await self.close()
        folder = Path(tempfile.mkdtemp(dir=self.folder))
        self._system = self.entry.make(folder, window)
        await self._system.open()
        return self._system

    async def close(self) -> None:
        """Close the system, and remove what it has stored."""
        await self.clients.end()
        if self._system is not None:
            system, self._system = self._system, None
            await system.close()
            await system.remove()
            shutil.rmtree(system.folder)
            gc.collect()

    async def promise(self) -> str:
        """What the commit of a turn runs at; closes the system that is open."""
        if self._promise is None and self.entry.on_server:
            system = await self.renew()
            await system.fill(range(1), 1)
            assert isinstance(system, OnServer)
            self._promise = await promise_on_server(system)
            await self.close()
        if self._promise is None:
            with watched_commits() as seen:
                system = await self.renew()
                await system.fill(range(1), 1)
                seen.clear()
                flushed = self.flushes.count
                await system.turn(0)
                is_flushed = self.flushes.count > flushed
                await self.close()
            silent = "never flushed" if self.entry.package else "in memory"
            self._promise = seen[-1] if seen else "flushed" if is_flushed else silent
        return self._promise

    def fsync_microseconds(self) -> float:
        """What one takes here."""
        took: list[float] = []
        with (self.folder / "fsync").open("wb") as file:
            for _ in range(20):
                file.write(bytes(4096))
                file.flush()
                began = time.perf_counter()
                os.fsync(file.fileno())
                took.append((time.perf_counter() - began) * 1e6)
        return statistics.median(took)
