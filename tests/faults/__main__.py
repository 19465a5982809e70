"""Inject faults, print the table: ``python -m tests.faults [--seconds N] [--seed S] [--only NAME ...] [--markdown]``.

Every scenario is run once; then all again with other seeds, until the time is over. The exit status is 1 if anything
was lost, doubled, out of order or broken, or if a named point was never hit.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import tempfile
import time
from pathlib import Path

from tests.faults.scenarios import LONG, SCENARIOS
from tests.faults.steps import never_hit
from tests.faults.table import Row, render


def say(text: str) -> None:
    """Print at once."""
    print(text, flush=True)  # noqa: T201  # this is a program


def run(arguments: argparse.Namespace) -> list[Row]:
    """All rows, the same fault's of several rounds in one."""
    began = time.monotonic()
    rows: dict[str, Row] = {}
    base = Path(tempfile.mkdtemp(prefix="chatflow-faults-"))
    say(f"seed {arguments.seed}; files and the workers' logs are kept in {base}")
    turn, longest = 0, 0.0
    while turn == 0 or time.monotonic() - began + longest < arguments.seconds:
        started = time.monotonic()
        for name in arguments.only or SCENARIOS:
            seed = arguments.seed + turn
            folder = base / f"{name}-{seed}"
            folder.mkdir()
            now = time.monotonic()
            try:
                # Which time a point is hit is another one each round.
                found = asyncio.run({**SCENARIOS, **LONG}[name](folder, seed, turn + 1))
            except Exception as error:  # noqa: BLE001  # the other scenarios are run all the same
                found = [Row(fault=name, layer="-", injected=0, details=[f"the scenario failed: {error!r}"])]
            for row in found:
                if row.fault in rows:
                    rows[row.fault].merge(row)
                else:
                    rows[row.fault] = row
            bad = [detail for row in found for detail in row.details]
            say(f"  {time.monotonic() - now:6.1f} s  {name}, seed {seed}: {'; '.join(bad)[:300] if bad else 'good'}")
            if bad:
                say(f"      again: python -m tests.faults --seconds 0 --seed {seed} --only {name}   (files: {folder})")
        longest = max(longest, time.monotonic() - started)
        turn += 1
    say(f"{turn} rounds in {time.monotonic() - began:.0f} s\n")
    return list(rows.values())


def main() -> int:
    """Run, print, and tell whether all is well."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("--seconds", type=float, default=420, help="how long to go on with further rounds")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    parser.add_argument("--only", nargs="+", choices=[*SCENARIOS, *LONG], help="these scenarios instead of all")
    parser.add_argument("--markdown", action="store_true", help="print the table as Markdown")
    arguments = parser.parse_args()
    rows = run(arguments)
    say(render(rows, markdown=arguments.markdown))
    missed = never_hit(rows) if not arguments.only or "points" in arguments.only else []
    for point in missed:
        say(f"never hit: {point}")
    good = not missed and all(row.is_good for row in rows)
    say("\nnothing was lost, doubled or out of order" if good else "\nSOMETHING IS WRONG, see above")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
