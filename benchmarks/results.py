"""What was measured: figures of each round, and what is read off them."""

from __future__ import annotations

import statistics
from typing import Any

import attrs

from benchmarks.systems import FLOOR
from benchmarks.themes.base import Column


@attrs.define
class Cell:
    """One system in one case: its rounds, or why there are none."""

    rounds: list[dict[str, float]] = attrs.field(factory=list)
    facts: dict[str, Any] = attrs.field(factory=dict)
    note: str | None = None

    def values(self, key: str) -> list[float]:
        """That figure of each round; empty where the system has none."""
        return [figures[key] for figures in self.rounds if key in figures]


@attrs.define
class Table:
    """One case of a theme: all systems, in the same rounds."""

    theme: str
    case: str
    settings: dict[str, Any]
    cells: dict[str, Cell] = attrs.field(factory=dict)

    def values(self, system: str, column: Column) -> list[float]:
        """What a column has of a system, a value a round."""
        found = self.cells[system].values(column.key)
        if not column.ratio:
            return [value * column.factor for value in found]
        return self.ratios(system, FLOOR, column.key)

    def ratios(self, system: str, other: str, key: str) -> list[float]:
        """A figure of one system over another one's, each in the same round."""
        if system not in self.cells or other not in self.cells:
            return []
        mine, theirs = self.cells[system].values(key), self.cells[other].values(key)
        return [one / two for one, two in zip(mine, theirs, strict=False) if two]

    def median(self, system: str, key: str) -> float | None:
        """The median of a system's rounds, None where it has none."""
        found = self.cells[system].values(key) if system in self.cells else []
        return statistics.median(found) if found else None


@attrs.define
class Results:
    """A run: what it was made with, and its tables."""

    about: dict[str, Any]
    command: list[str]
    tables: list[Table] = attrs.field(factory=list)

    def of_theme(self, theme: str) -> list[Table]:
        """The tables of one theme, in the order of its cases."""
        return [table for table in self.tables if table.theme == theme]

    def table(self, theme: str, case: str) -> Table | None:
        """The table of the case whose name begins so."""
        return next((table for table in self.of_theme(theme) if table.case.startswith(case)), None)

    @property
    def failures(self) -> list[str]:
        """What should have been measured, and could not be."""
        return [
            f"{table.theme}, {table.case}: {name}: {cell.note}"
            for table in self.tables
            for name, cell in table.cells.items()
            if cell.note is not None and cell.note.startswith("failed")
        ]
