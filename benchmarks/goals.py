"""What performance is to reach, beside what was measured in the run."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Final

import attrs

from benchmarks.results import Results, Table
from benchmarks.systems import FLOOR, PEERS
from benchmarks.tables import render, spread

Measured = Callable[[Results], Sequence[float]]
"""The rounds' values; empty where they were not measured."""


@attrs.frozen
class Goal:
    """A figure, and the limit it is to keep."""

    theme: str
    says: str
    most: float | None
    least: float | None
    measured: Measured
    form: str = ".2f"

    def is_met(self, value: float) -> bool:
        """Whether the median keeps the limit."""
        return (self.most is None or value <= self.most) and (self.least is None or value >= self.least)

    @property
    def limit(self) -> str:
        """In words."""
        if self.most is None:
            return f"≥ {self.least:g}"
        return f"≤ {self.most:g}" if self.least is None else f"{self.least:g} to {self.most:g}"


FILE: Final = "sqlite-file"


def _of(theme: str, case: str, use: Callable[[Table], Sequence[float]]) -> Measured:
    def measured(results: Results) -> Sequence[float]:
        table = results.table(theme, case)
        return () if table is None else use(table)

    return measured


def figure(theme: str, case: str, key: str, factor: float = 1, system: str = FILE) -> Measured:
    """A figure of a system."""

    def use(table: Table) -> Sequence[float]:
        cell = table.cells.get(system)
        return () if cell is None else [value * factor for value in cell.values(key)]

    return _of(theme, case, use)


def in_last(theme: str, key: str, factor: float = 1) -> Measured:
    """A figure of the file store in the theme's largest case."""

    def measured(results: Results) -> Sequence[float]:
        tables = results.of_theme(theme)
        cell = tables[-1].cells.get(FILE) if tables else None
        return () if cell is None else [value * factor for value in cell.values(key)]

    return measured


def over(theme: str, case: str, key: str, other: str = FLOOR, system: str = FILE) -> Measured:
    """A figure of a system over another one's, in the same round."""
    return _of(theme, case, lambda table: table.ratios(system, other, key))


def over_best_peer(theme: str, case: str, key: str, *, higher_is_better: bool = False) -> Measured:
    """A figure of the file store over that of the best of the peers."""

    def use(table: Table) -> Sequence[float]:
        found = [(value, name) for name in PEERS if (value := table.median(name, key)) is not None]
        if not found:
            return ()
        _, best = max(found) if higher_is_better else min(found)
        return table.ratios(FILE, best, key)

    return _of(theme, case, use)


def difference(theme: str, case: str, key: str, system: str, other: str) -> Measured:
    """By how much a figure of a system exceeds another one's, in the same round."""

    def use(table: Table) -> Sequence[float]:
        if system not in table.cells or other not in table.cells:
            return ()
        return [
            one - two for one, two in zip(table.cells[system].values(key), table.cells[other].values(key), strict=False)
        ]

    return _of(theme, case, use)


def last_over_first(theme: str, key: str, *, first: str = "", last: str = "") -> Measured:
    """A figure of the file store in the largest case over that in the smallest, or in two cases by name.

    The cases are measured one after the other, so the machine must be as busy in one as in the other.
    """

    def measured(results: Results) -> Sequence[float]:
        tables = [table for table in results.of_theme(theme) if table.cells.get(FILE) and table.cells[FILE].rounds]
        starts = [table for table in tables if table.case.startswith(first)]
        ends = [table for table in tables if table.case.startswith(last)]
        if not starts or not ends or starts[0] is ends[-1]:
            return ()
        one, two = starts[0].cells[FILE].values(key), ends[-1].cells[FILE].values(key)
        return [end / start for start, end in zip(one, two, strict=False)]

    return measured


SLOW: Final = "64 at once, 1000"
GOALS: Final = (
    Goal("turn", "durable turn, ÷ FULL floor", 2, None, over("turn", "without", "median_us")),
    Goal("turn", "durable turn, ÷ fastest peer", 1, None, over_best_peer("turn", "without", "median_us")),
    Goal(
        "together",
        "64 at once, 1 ms added to each fsync: turns/s ÷ FULL floor",
        None,
        4,
        over("together", SLOW, "turns_per_second"),
    ),
    Goal("together", "64 at once: turns/s ÷ FULL floor", None, 1, over("together", "64 at once", "turns_per_second")),
    Goal(
        "together",
        "64 at once: turns/s ÷ best peer",
        None,
        5,
        over_best_peer("together", "64 at once", "turns_per_second", higher_is_better=True),
    ),
    Goal(
        "together",
        "256 at once: turns/s ÷ those at 64",
        None,
        1,
        last_over_first("together", "turns_per_second", first="64 at once", last="256 at once"),
    ),
    Goal(
        "together",
        "256 at once: commit acknowledged, p99 ms",
        30,
        None,
        figure("together", "256", "acknowledged_p99_ms"),
        ".1f",
    ),
    Goal("together", "64 at once: loop gap p99, ms", 3, None, figure("together", "64 at once", "gap_p99_ms"), ".1f"),
    Goal(
        "together", "64 at once: longest loop gap, ms", 10, None, figure("together", "64 at once", "gap_max_ms"), ".1f"
    ),
    Goal("load", "cold load of 160 messages, ÷ by hand", 1.3, None, over("load", "cold", "median_us")),
    Goal("load", "cold load of 160 messages, ÷ fastest peer", 1, None, over_best_peer("load", "cold", "median_us")),
    Goal(
        "turn",
        '":memory:" turn, µs over sqlite3 in memory',
        100,
        None,
        difference("turn", "without", "median_us", "sqlite-memory", "floor-memory"),
        ".0f",
    ),
    Goal("dedup", "claim, ÷ its floor", 2.2, None, over("dedup", "0 ids", "median_us")),
    Goal("dedup", "claim with the most ids ÷ with none", 1.2, 0.8, last_over_first("dedup", "median_us")),
    Goal("history", "turn in the longest history ÷ in the shortest", 1.2, 0.8, last_over_first("history", "median_us")),
    Goal("store", "turn in the largest store ÷ in the smallest", 1.2, 0.8, last_over_first("store", "median_us")),
    Goal("resources", "live conversations: threads", 4, None, in_last("resources", "threads"), ".0f"),
    Goal("resources", "live conversations: files of the store", 9, None, in_last("resources", "files"), ".0f"),
    Goal(
        "resources",
        "live conversations: KB each beyond messages",
        5,
        None,
        in_last("resources", "bytes_beyond", 1e-3),
        ".1f",
    ),
    Goal("imports", "import chatflow, s", 0.25, None, figure("imports", "import", "seconds")),
    Goal("imports", "import chatflow: litellm comes along", 0, None, figure("imports", "import", "litellm"), ".0f"),
    Goal("imports", "import chatflow: pydantic comes along", 0, None, figure("imports", "import", "pydantic"), ".0f"),
    Goal(
        "running",
        "runner, one tool call, durable: CPU ms a turn",
        1,
        None,
        figure("running", "without", "cpu_us", 1e-3),
    ),
)


def summary(results: Results) -> str:
    """A line a goal whose theme was run."""
    ran = {table.theme for table in results.tables}
    rows: list[list[str]] = []
    for goal in GOALS:
        if goal.theme in ran:
            values = goal.measured(results)
            if values:
                verdict = "met" if goal.is_met(statistics.median(values)) else "NOT met"
                rows.append([goal.says, goal.limit, spread(values, goal.form), verdict])
            else:
                rows.append([goal.says, goal.limit, "not measured", ""])
    return render(["goal", "limit", "measured", ""], rows)
