"""Tables as text: the same in a terminal and in a page."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence

from benchmarks.results import Table
from benchmarks.systems import SYSTEMS
from benchmarks.themes import THEMES
from benchmarks.themes.base import Column


def show(table: Table) -> str:
    """One case of a theme."""
    columns = THEMES[table.theme].columns
    facts = list(dict.fromkeys(name for cell in table.cells.values() for name in cell.facts))
    rows: list[list[str]] = []
    for system, cell in table.cells.items():
        title = SYSTEMS[system].title
        if cell.note is not None:
            rows.append([f"{title} ({cell.note})"])
        else:
            told = [str(cell.facts.get(fact, "-")) for fact in facts]
            rows.append([title, *(_cell(table.values(system, column), column) for column in columns), *told])
    return render([table.case, *(column.head for column in columns), *facts], rows)


def _cell(values: Sequence[float], column: Column) -> str:
    if not values:
        return "-"
    if column.spread and len(values) > 1:
        return spread(values, column.form)
    return f"{statistics.median(values):{column.form}}"


def spread(values: Sequence[float], form: str) -> str:
    """The median, and from where to where the values go."""
    return f"{statistics.median(values):{form}} ({min(values):{form}} to {max(values):{form}})"


def render(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in markdown, with its columns aligned; short rows are filled up."""
    filled = [[*row, *[""] * (len(head) - len(row))] for row in rows]
    widths = [max(len(line[place]) for line in [list(head), *filled]) for place in range(len(head))]
    lines = [list(head), [f"{'-' * (width - 1)}:" if place else "-" * width for place, width in enumerate(widths)]]
    return "\n".join(
        "| "
        + " | ".join(
            text.rjust(width) if place else text.ljust(width)
            for place, (text, width) in enumerate(zip(line, widths, strict=True))
        )
        + " |"
        for line in [*lines, *filled]
    )
