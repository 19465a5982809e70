"""A theme, case by case: the systems take turns, one process at a time, a round of one after a round of the other."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from benchmarks.plan import Plan
from benchmarks.process import Process
from benchmarks.results import Cell, Table
from benchmarks.systems import SYSTEMS
from benchmarks.themes import THEMES
from benchmarks.themes.base import Case

PATIENCE: Final = 120
"""Seconds. A system for which the next larger case would take longer than that is left out of it."""


def run_theme(name: str, plan: Plan) -> Iterator[Table]:
    """The theme's tables, as they come."""
    theme = THEMES[name]
    names = [system for system in theme.systems if system in plan.systems]
    rounds = theme.rounds or plan.rounds
    spent: dict[str, tuple[int, float]] = {}
    with _processes(name, names, plan) as processes:
        for case in theme.cases(plan.scale):
            table = Table(name, case.name, case.settings)
            for system in names:
                if case.systems is None or system in case.systems:
                    table.cells[system] = Cell(note=_why_not(name, system, case, spent, plan))
            print(f"  {name}: {case.name} ", end="", file=sys.stderr, flush=True)
            running = [system for system, cell in table.cells.items() if cell.note is None]
            times = dict.fromkeys(running, 0.0)
            for system in running:
                began = time.monotonic()
                _prepare(table.cells[system], processes[system], case)
                times[system] += time.monotonic() - began
            for number in range(rounds):
                running = [system for system in running if table.cells[system].note is None]
                turn = number % max(1, len(running))
                # Not always in the same order, so that none always follows the same one.
                for system in running[turn:] + running[:turn]:
                    began = time.monotonic()
                    _measure(table.cells[system], processes[system], case)
                    times[system] += max(0, time.monotonic() - began - 3 * plan.seconds)
                print(".", end="", file=sys.stderr, flush=True)
            print(file=sys.stderr)
            if "size" in case.settings:
                spent |= {system: (case.settings["size"], seconds) for system, seconds in times.items()}
            yield table


@contextmanager
def _processes(theme: str, names: list[str], plan: Plan) -> Iterator[dict[str, Process]]:
    processes: dict[str, Process] = {}
    try:
        for name in names:
            if theme not in SYSTEMS[name].lacks and (SYSTEMS[name].package is None or plan.peers is not None):
                processes[name] = Process(theme, name, plan)
        yield processes
    finally:
        for process in processes.values():
            process.end()


def _why_not(theme: str, system: str, case: Case, spent: dict[str, tuple[int, float]], plan: Plan) -> str | None:
    entry = SYSTEMS[system]
    if theme in entry.lacks:
        return entry.lacks[theme]
    if entry.package is not None and plan.peers is None:
        return "not installed"
    if "size" in case.settings and spent:
        if system not in spent:
            return "left out"
        size, seconds = spent[system]
        if seconds > PATIENCE / 10 and seconds * case.settings["size"] / size > PATIENCE:
            return f"left out: {seconds:.0f} s at {size:,}"
    return None


def _prepare(cell: Cell, process: Process, case: Case) -> None:
    answer = process.ask("prepare", case.settings)
    cell.facts = answer.get("facts", {})
    if "failed" in answer:
        cell.note = f"failed: {answer['failed']}"


def _measure(cell: Cell, process: Process, case: Case) -> None:
    answer = process.ask("measure", case.settings)
    if "failed" in answer:
        cell.note = f"failed: {answer['failed']}"
    else:
        cell.rounds.append(answer["figures"])
