"""Compare: `python -m benchmarks [--themes turn load] [--systems floor-full sqlite-file] [--rounds 5] ...`.

Prints a table a case, writes build/bench/THEME.json and THEME.md, plots of what grows, and, last, the goals.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import attrs

from benchmarks.goals import summary
from benchmarks.machine import compile_shim, machine
from benchmarks.plan import ROOT, Plan
from benchmarks.plots import draw
from benchmarks.promise import FLUSHED
from benchmarks.results import Results, Table
from benchmarks.rounds import run_theme
from benchmarks.server import server_of
from benchmarks.systems import ON_SERVER, SYSTEMS
from benchmarks.tables import show
from benchmarks.themes import THEMES


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """What is asked for."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--themes", nargs="+", choices=THEMES, default=list(THEMES))
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--scale", type=float, default=0.1, help="of the largest sizes; 1 is a million (default 0.1)")
    parser.add_argument("--seconds", type=float, default=0.2, help="for one measurement (default 0.2)")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()), help="on the disk to measure")
    parser.add_argument("--peers", type=Path, default=ROOT / "build" / "peers", help="their virtual environment")
    parser.add_argument("--server", help="a PostgreSQL database to measure on, rather than one that is started")
    parser.add_argument("--output", type=Path, default=ROOT / "build" / "bench", help="where to save it all")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> Results:
    """Measure, print and save."""
    options = parse(arguments)
    python = options.peers.absolute() / "bin" / "python"
    peers = python if python.exists() else None
    began = time.monotonic()
    options.output.mkdir(parents=True, exist_ok=True)
    (options.output / "log.txt").write_text("")
    with tempfile.TemporaryDirectory(dir=options.folder) as name, ExitStack() as stack:
        folder = Path(name).resolve()
        results = Results(machine(folder, peers), ["python", "-m", "benchmarks", *(arguments or sys.argv[1:])])
        print(describe(results.about) + "\n")
        if results.about["file system"] in {"tmpfs", "ramfs", "overlay"}:
            print(f"It is on {results.about['file system']}: an fsync may cost nothing. --folder names another disk.\n")
        shim = compile_shim(folder)
        server = None
        if any(name in THEMES[theme].systems for theme in options.themes for name in {*options.systems} & {*ON_SERVER}):
            server = stack.enter_context(server_of(options.server, options.folder.resolve(), shim))
        plan = Plan(
            systems=tuple(options.systems),
            rounds=options.rounds,
            scale=options.scale,
            seconds=options.seconds,
            folder=folder,
            peers=peers,
            shim=shim,
            server=server,
            log=options.output / "log.txt",
        )
        for theme in options.themes:
            print(f"## {THEMES[theme].title}\n\n{THEMES[theme].tells}\n")
            for table in run_theme(theme, plan):
                results.tables.append(table)
                refuse_weaker_promise(table)
                print(show(table) + "\n")
            save(results, theme, options.output)
    results.about["load after"] = round(os.getloadavg()[0], 2)
    results.about["minutes"] = round((time.monotonic() - began) / 60, 1)
    goals = summary(results)
    print(f"## Goals\n\n{goals}\n")
    save_all(results, goals, options)
    return results


def describe(about: dict[str, Any]) -> str:
    """In a line or two."""
    versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
    facts = ", ".join(f"{name} {value}" for name, value in about.items() if name != "versions")
    return f"{facts}\n{versions}"


def refuse_weaker_promise(table: Table) -> None:
    """Stop where turns one at a time were not flushed one at a time: the figures would be another promise's."""
    for system, cell in table.cells.items():
        if table.theme == "turn" and str(cell.facts.get("commits at", "")).startswith(FLUSHED):
            for figures in cell.rounds:
                # Without the library that counts there are none at all.
                if 0 < figures["fsyncs_per_1000"] < 999:
                    raise SystemExit(f"{system} says FULL, and has flushed fewer times than it has committed")


def save(results: Results, theme: str, folder: Path) -> None:
    """A theme's rounds and tables, so that a run of a few themes leaves the others' as they are."""
    tables = results.of_theme(theme)
    content = {"about": results.about, "command": results.command, "tables": [attrs.asdict(table) for table in tables]}
    (folder / f"{theme}.json").write_text(json.dumps(content, indent=1))
    page = [f"## {THEMES[theme].title}", THEMES[theme].tells, *map(show, tables), f"`{' '.join(results.command)}`"]
    (folder / f"{theme}.md").write_text("\n\n".join([*page, describe(results.about)]) + "\n")


def save_all(results: Results, goals: str, options: argparse.Namespace) -> None:
    """The goals and the plots, and say where everything is."""
    page = f"## Goals\n\n{goals}\n\n`{' '.join(results.command)}`\n\n{describe(results.about)}\n"
    (options.output / "goals.md").write_text(page)
    plots = draw(results, options.output)
    about = results.about
    print(
        f"Load of the machine: {about['load before']} before, {about['load after']} after; {about['minutes']} minutes."
    )
    print(f"Rounds and tables are in {options.output}" + (f", with {len(plots)} plots." if plots else "."))
    for failure in results.failures:
        print(f"{failure} (see log.txt there)", file=sys.stderr)


if __name__ == "__main__":
    if main().failures:
        raise SystemExit(1)
