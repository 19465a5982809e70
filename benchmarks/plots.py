"""Growth curves as PNG, where matplotlib is installed (the bench group)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

import attrs

from benchmarks.results import Results, Table
from benchmarks.systems import SYSTEMS


@attrs.frozen
class Plot:
    """A theme's figure over the size of its cases."""

    theme: str
    size: str
    key: str
    factor: float
    across: str
    up: str


PLOTS: Final = (
    Plot("history", "size", "median_us", 1, "messages in the conversation", "a turn, µs"),
    Plot("history", "size", "load_ms", 1, "messages in the conversation", "loading them, ms"),
    Plot("store", "size", "median_us", 1, "conversations in the store", "a turn, µs"),
    Plot("store", "size", "load_ms", 1, "conversations in the store", "loading one, ms"),
    Plot("together", "count", "turns_per_second", 1, "conversations at once", "turns/s"),
    Plot("together", "count", "acknowledged_p99_ms", 1, "conversations at once", "commit acknowledged, p99 ms"),
)


def draw(results: Results, folder: Path) -> list[Path]:
    """Write each plot that has at least two points; the files."""
    try:
        from matplotlib.figure import Figure  # noqa: PLC0415  # the tables do without it
    except ImportError:
        print("No plots: matplotlib is not installed (`make bench` installs it).")
        return []
    written: list[Path] = []
    for plot in PLOTS:
        tables = [table for table in results.of_theme(plot.theme) if not table.settings.get("added_us")]
        if len(tables) < 2:
            continue
        figure = Figure(figsize=(9, 5.5), layout="constrained")
        axes = figure.subplots()
        for name in tables[0].cells:
            _line(axes, plot, tables, name)
        axes.set(xscale="log", yscale="log", xlabel=plot.across, ylabel=plot.up)
        axes.grid(alpha=0.3, which="both")
        figure.legend(loc="outside right upper", fontsize="small", frameon=False)
        path = folder / f"{plot.theme}-{plot.key.rpartition('_')[0]}.png"
        figure.savefig(path, dpi=120)
        written.append(path)
    return written


def _line(axes: object, plot: Plot, tables: Sequence[Table], name: str) -> None:
    points = [
        (table.settings[plot.size], [value * plot.factor for value in cell.values(plot.key)])
        for table in tables
        if (cell := table.cells.get(name)) is not None and cell.rounds
    ]
    if points:
        sizes = [size for size, _ in points]
        medians = [sorted(values)[len(values) // 2] for _, values in points]
        style = "-" if SYSTEMS[name].package is None else "--"
        axes.plot(sizes, medians, style, marker="o", markersize=3, label=SYSTEMS[name].title)  # type: ignore[attr-defined]
        axes.fill_between(  # type: ignore[attr-defined]  # from the lowest to the highest round
            sizes, [min(values) for _, values in points], [max(values) for _, values in points], alpha=0.15
        )
