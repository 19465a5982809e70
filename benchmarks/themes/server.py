"""Several processes on one store, and what their turns ask of a server."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, Final

from benchmarks.client import AT_ONCE
from benchmarks.conversation import WINDOW
from benchmarks.measuring import in_microseconds, seconds_of
from benchmarks.roundtrips import counted_round_trips
from benchmarks.stage import Stage
from benchmarks.systems import ON_SERVER
from benchmarks.systems.base import System
from benchmarks.systems.on_server import DSN, OnServer, socket_of
from benchmarks.themes.base import Case, Column, Theme, scaled

_LOG_AND_PROCESS: Final = """
    SELECT (pg_current_wal_insert_lsn() - '0/0')::bigint, split_part(pg_read_file('postmaster.pid'), E'\\n', 1)::int
"""
"""How far the log is written, and the server's first process."""

MOST: Final = 4
"""Processes at the same time."""

RUN: Final = ("sqlite-file", "postgres")
WITH_IDS: Final = (*RUN, "floor-postgres")
"""Those that have a runner, and those that know message ids."""

COUNTED: Final = 20
"""Turns of which the round trips are counted."""


class ServerLoad(Theme):
    """How far does one server, or one file, go, and what bounds it?"""

    title = "Several processes"
    tells = (
        f"Each process has {AT_ONCE} tasks that take turns, in conversations of its own. CPU: of the processes, and of"
        " the server beside them, a turn. Log: bytes of write-ahead log a turn. The first change to a page after a"
        " checkpoint logs it whole; in the last case nearly every turn makes such changes."
    )
    columns = (
        Column("turns/s", "turns_per_second", ",.0f", spread=True),
        Column("median ms", "median_us", ".1f", 1e-3),
        Column("p99 ms", "p99_us", ".1f", 1e-3),
        Column("CPU µs", "cpu_us"),
        Column("server's CPU µs", "server_cpu_us"),
        Column("log, bytes", "log_bytes", ",.0f"),
        Column("fsyncs/1000", "fsyncs_per_1000"),
    )
    systems = ("sqlite-file", *ON_SERVER)

    def cases(self, scale: float) -> Sequence[Case]:
        """One to four processes, one whose messages have ids, one with the runner too, and one after a checkpoint."""
        few, many = min(AT_ONCE, scaled(10 * AT_ONCE, scale, 4)), scaled(10_000, scale, AT_ONCE)
        usual = {"processes": 1, "count": few, "ids": False, "runs": False}
        return (
            *(Case(f"processes: {processes}", usual | {"processes": processes}) for processes in (1, 2, MOST)),
            Case("processes: 1, with message ids", usual | {"ids": True}, WITH_IDS),
            Case("processes: 1, run_async with message ids", usual | {"ids": True, "runs": True}, RUN),
            Case(f"processes: 1, {many:,} conversations, after a checkpoint", usual | {"count": many}, ON_SERVER),
        )

    def __init__(self) -> None:
        self._facts: dict[str, Any] = {}

    async def prepare(self, stage: Stage, settings: dict[str, Any]) -> dict[str, Any]:
        """Full windows; before that, what a commit promises, and what it waits for."""
        if not self._facts:
            self._facts = {"commits at": await stage.promise(), "round trips": await _round_trips(stage)}
        count, processes = settings["count"], settings["processes"]
        if len(stage.clients.processes) in {0, *range(processes, MOST + 1)}:
            await stage.renew()
        # Those of the case before go on.
        for number in range(len(stage.clients.processes), processes):
            await stage.clients.add(stage.name, stage.system.folder, number * count, count)
        kept = await stage.system.bytes_on_disk() / (processes * count * WINDOW)
        return self._facts | {"kept, bytes a turn": f"{kept:,.0f}"}

    async def measure(self, stage: Stage, settings: dict[str, Any]) -> dict[str, float]:
        """Turns of all processes for some time."""
        system = stage.system
        if settings["count"] > AT_ONCE:
            assert isinstance(system, OnServer)
            await system.ask("CHECKPOINT")
        fsyncs = stage.flushes.count
        before = await _server(system)
        answers = await stage.clients.take_turns(seconds=stage.seconds, ids=settings["ids"], runs=settings["runs"])
        after = await _server(system)
        took = [seconds for answer in answers for seconds in answer["took"]]
        figures = {name: (after[name] - before[name]) / len(took) for name in before}
        return (
            in_microseconds(took)
            | figures
            | {
                "turns_per_second": sum(len(answer["took"]) / answer["seconds"] for answer in answers),
                "cpu_us": sum(answer["cpu"] for answer in answers) / len(took) * 1e6,
                "fsyncs_per_1000": (stage.flushes.count - fsyncs) / len(took) * 1e3,
            }
        )


async def _round_trips(stage: Stage) -> str:
    """How often a turn waits for the server."""
    if not stage.entry.on_server or socket_of(os.environ[DSN]) is None:
        return "-"
    async with counted_round_trips() as trips:
        system = await stage.renew()
        await system.fill(range(1), WINDOW)
        before = trips.count
        for _ in range(COUNTED):
            await system.turn(0)
        found = (trips.count - before) / COUNTED
        await stage.close()
    return f"{found:g}"


async def _server(system: System) -> dict[str, float]:
    """What the server has done so far, for whomever."""
    if not isinstance(system, OnServer):
        return {}
    ((log, pid),) = await system.ask(_LOG_AND_PROCESS)
    figures = {"log_bytes": float(log)}
    if socket_of(system.dsn) is not None:
        # It is on this machine.
        figures["server_cpu_us"] = seconds_of(pid) * 1e6
    return figures
