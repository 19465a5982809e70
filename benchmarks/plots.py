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

    name: str
    theme: str
    size: str
    key: str
    across: str
    up: str


_HISTORY: Final = ("history", "size")
_STORE: Final = ("store", "size")
_TOGETHER: Final = ("together", "count")
PLOTS: Final = (
    Plot("history-turn", *_HISTORY, "median_us", "messages in the conversation", "a turn, µs"),
    Plot("history-load", *_HISTORY, "load_ms", "messages in the conversation", "loading them, ms"),
    Plot("store-turn", *_STORE, "median_us", "conversations in the store", "a turn, µs"),
    Plot("store-load", *_STORE, "load_ms", "conversations in the store", "loading one, ms"),
    Plot("together-turns", *_TOGETHER, "turns_per_second", "conversations at once", "turns/s"),
    Plot("together-acknowledged", *_TOGETHER, "acknowledged_p99_ms", "conversations at once", "p99 until durable, ms"),
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
        path = folder / f"{plot.name}.png"
        figure.savefig(path, dpi=120)
        written.append(path)
    return written


def _line(axes: object, plot: Plot, tables: Sequence[Table], name: str) -> None:
    points = [
        (table.settings[plot.size], cell.values(plot.key))
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
