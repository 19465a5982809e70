"""How things are measured: percentiles, gaps of the event loop, flushes, processor time."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import os
import statistics
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, Final

BEAT: Final = 0.001
"""Seconds the heartbeat sleeps."""


def percentile(values: Sequence[float], percent: int) -> float:
    """The smallest of *values* that *percent* of them don't exceed."""
    ordered = sorted(values)
    return ordered[(len(ordered) * percent + 99) // 100 - 1]


def in_microseconds(seconds: Sequence[float]) -> dict[str, float]:
    """Median and p99 of *seconds*."""
    return {"median_us": statistics.median(seconds) * 1e6, "p99_us": percentile(seconds, 99) * 1e6}


class Flushes:
    """The preloaded library that counts calls of fsync and fdatasync in this process, and makes them slower."""

    def __init__(self) -> None:
        library = ctypes.CDLL(None)
        self.is_there = hasattr(library, "slow_fsync_count")
        if self.is_there:
            self._count: Callable[[], int] = library.slow_fsync_count
            self._slow_down: Callable[[ctypes.c_long], Any] = library.slow_fsync_by

    @property
    def count(self) -> int:
        """How many there were so far; 0 without the library."""
        return self._count() if self.is_there else 0

    def slow_down(self, microseconds: int) -> None:
        """Let each of them take so much longer from now on."""
        if self.is_there:
            self._slow_down(ctypes.c_long(microseconds))


def bytes_written() -> int:
    """What this process has handed to the kernel to write so far, to files or not; 0 where /proc does not tell."""
    counters = Path("/proc/self/io")
    if not counters.exists():
        return 0
    lines = dict(line.split(": ") for line in counters.read_text().splitlines())
    return int(lines["wchar"])


def seconds_of(main: int) -> float:
    """Seconds of processor time that the process *main* and its children have taken so far, also those that ended."""
    living = [int(folder.name) for folder in Path("/proc").iterdir() if folder.name.isdigit()]
    # One may end meanwhile: then its time is among that of those that have ended, or missing this once.
    seconds = sum(_own_seconds(each) for each in living if each == main or _family(each)[0] == main)
    return seconds + _family(main)[1]


def _family(pid: int) -> tuple[int, float]:
    """The parent of a process, and the seconds that those of its own children took that have ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return 0, 0.0
    return int(fields[1]), (int(fields[13]) + int(fields[14])) / os.sysconf("SC_CLK_TCK")


def _own_seconds(pid: int) -> float:
    try:
        return int(Path(f"/proc/{pid}/schedstat").read_text().split()[0]) / 1e9
    except (FileNotFoundError, ProcessLookupError):
        return 0.0


class Heartbeat:
    """How late each sleep of a millisecond ends: so long the loop did other things, or collected garbage."""

    def __init__(self) -> None:
        self._late: list[float] = []
        self._late_without_collections: list[float] = []
        self._collecting = 0.0
        self._began = 0.0

    async def beat(self) -> None:
        """Go on until cancelled."""
        gc.callbacks.append(self._note_collection)
        try:
            while True:
                self._collecting = 0.0
                began = time.perf_counter()
                await asyncio.sleep(BEAT)
                late = time.perf_counter() - began - BEAT
                self._late.append(late)
                self._late_without_collections.append(late - self._collecting)
        finally:
            gc.callbacks.remove(self._note_collection)

    def _note_collection(self, phase: str, _: object) -> None:
        if phase == "start":
            self._began = time.perf_counter()
        else:
            self._collecting += time.perf_counter() - self._began

    def figures(self) -> dict[str, float]:
        """The gaps, also without the time in them that went to collecting garbage."""
        return {
            "gap_p99_ms": percentile(self._late, 99) * 1e3,
            "gap_max_ms": max(self._late) * 1e3,
            "gap_without_collections_ms": max(self._late_without_collections) * 1e3,
        }


async def gaps_beside(work: Callable[[], Awaitable[object]]) -> dict[str, float]:
    """The event loop's gaps while *work* is done."""
    heartbeat = Heartbeat()
    beating = asyncio.create_task(heartbeat.beat())
    await asyncio.sleep(0)
    await work()
    # One beat more: a gap that lasts to the end is noted at its end.
    await asyncio.sleep(2 * BEAT)
    beating.cancel()
    return heartbeat.figures()


async def repeated(step: Callable[[], Awaitable[float]], seconds: float, *, most: int | None = None) -> list[float]:
    """What *step* gives, again and again for so long, at least once and at most *most* times."""
    found: list[float] = []
    until = time.perf_counter() + seconds
    while not found or (time.perf_counter() < until and (most is None or len(found) < most)):
        found.append(await step())
    return found
