"""Where the time of one turn goes."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

from benchmarks.conversation import WINDOW
from benchmarks.measuring import repeated
from benchmarks.stage import Stage
from benchmarks.themes.base import Case, Column, Theme

CONVERSATIONS: Final = 16
STEPS: Final = ("handed over", "taken up", "written", "committed", "back")
"""What happens to each of a turn's two operations, its place and its commit."""


class Steps(Theme):
    """One turn at a time, taken apart at the moments when an operation goes from one thread to the other."""

    title = "Where the time of a turn goes"
    tells = (
        "The median of each step of a turn, which nothing else waits for. Both operations go to the thread that writes,"
        " run their statements there, are committed, and come back to the event loop, which does the rest. A hop is"
        " an operation of no statement: two threads waking each other."
    )
    columns = (
        Column("turn µs", "turn_us"),
        Column("on the loop", "loop_us"),
        Column("place: to the thread", "place_taken_up_us"),
        Column("statements", "place_written_us"),
        Column("commit", "place_committed_us"),
        Column("back", "place_back_us"),
        Column("turn: to the thread", "commit_taken_up_us"),
        Column("statements", "commit_written_us"),
        Column("commit", "commit_committed_us"),
        Column("back", "commit_back_us"),
        Column("a hop", "hop_us"),
    )
    systems = ("sqlite-file",)

    def cases(self, scale: float) -> Sequence[Case]:
        """One."""
        return (Case("one at a time"),)

    async def prepare(self, stage: Stage, settings: dict[str, Any]) -> dict[str, Any]:
        """Full windows."""
        system = await stage.renew()
        await system.fill(range(CONVERSATIONS), WINDOW)
        for conversation in range(CONVERSATIONS):
            await system.turn(conversation)
        self._number = 0
        return {"an fsync takes, µs": round(stage.fsync_microseconds())}

    async def measure(self, stage: Stage, settings: dict[str, Any]) -> dict[str, float]:
        """Turns for some time, then hops."""
        system: Any = stage.system  # what measures other packages has no chatflow to import types from
        database = system.store._database  # noqa: SLF001  # its steps are looked at
        took: dict[str, list[float]] = {}

        async def turn() -> float:
            moments.clear()
            self._number += 1
            began = time.perf_counter()
            await system.turn(self._number % CONVERSATIONS)
            whole = time.perf_counter() - began
            if [name for name, _ in moments] == [*STEPS, *STEPS]:  # else a beat of the turns came in between
                for name, seconds in _steps(moments, whole).items():
                    took.setdefault(name, []).append(seconds)
            return whole

        async def hop() -> float:
            began = time.perf_counter()
            await database.write(_nothing, durable=False)
            return time.perf_counter() - began

        moments: list[tuple[str, float]] = []
        untimed = _timed(database, moments)
        try:
            await repeated(turn, stage.seconds)
        finally:
            untimed()
        took["hop_us"] = await repeated(hop, stage.seconds / 4)
        return {name: statistics.median(values) * 1e6 for name, values in took.items()}


def _timed(database: Any, moments: list[tuple[str, float]]) -> Callable[[], None]:
    """Note when each step of the operations of *database* ends; what is returned ends that."""

    def note(name: str) -> None:
        moments.append((name, time.perf_counter()))

    write, run_group, commit = database.write, database._run_group, database._commit  # noqa: SLF001  # as above

    async def timed_write(*args: Any, **options: Any) -> Any:
        note("handed over")
        result = await write(*args, **options)
        note("back")
        return result

    def timed_run_group(*args: Any) -> None:
        note("taken up")
        run_group(*args)

    def timed_commit(*args: Any) -> None:
        note("written")
        commit(*args)
        note("committed")

    database.write, database._run_group, database._commit = timed_write, timed_run_group, timed_commit  # noqa: SLF001  # as above

    def untimed() -> None:
        del database.write, database._run_group, database._commit  # noqa: SLF001  # as above

    return untimed


def _steps(moments: list[tuple[str, float]], whole: float) -> dict[str, float]:
    """How long each step took: both operations', and what the event loop did before, between and after them."""
    found = {"turn_us": whole, "loop_us": whole}
    for operation, at in (("place", 0), ("commit", len(STEPS))):
        times = [moment for _, moment in moments[at : at + len(STEPS)]]
        for name, began, ended in zip(STEPS[1:], times[:-1], times[1:], strict=True):
            found[f"{operation}_{name.replace(' ', '_')}_us"] = ended - began
        found["loop_us"] -= times[-1] - times[0]
    return found


def _nothing(_: object) -> None:
    return None
