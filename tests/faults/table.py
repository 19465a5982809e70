"""The table: a line a fault, and what it did."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import attrs

from tests.faults.judge import Verdict


@attrs.define(kw_only=True)
class Row:
    """One fault, as often as it was injected.

    *taken* counts acknowledged turns that the fault itself has taken away, where it does so by its nature.
    """

    fault: str
    layer: str
    injected: int
    acknowledged: int = 0
    lost: int = 0
    doubled: int = 0
    out_of_order: int = 0
    taken: int = 0
    recovery: float = 0.0
    notes: list[str] = attrs.field(factory=list[str])
    details: list[str] = attrs.field(factory=list[str])

    def add(self, verdict: Verdict) -> Row:
        """Take a verdict into account."""
        self.acknowledged += len(verdict.acknowledged)
        self.lost += len(verdict.lost)
        self.doubled += len(verdict.doubled)
        self.out_of_order += len(verdict.out_of_order)
        self.recovery = max(self.recovery, verdict.recovery)
        for kind in ("lost", "doubled", "out_of_order", "broken"):
            self.details += [f"{kind}: {what}" for what in getattr(verdict, kind)]
        return self

    def merge(self, other: Row) -> None:
        """Add the same fault's figures of another round."""
        for name in ("injected", "acknowledged", "lost", "doubled", "out_of_order", "taken"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.recovery = max(self.recovery, other.recovery)
        self.notes = list(dict.fromkeys([*self.notes, *other.notes]))
        self.details += other.details

    @property
    def is_good(self) -> bool:
        """Whether nothing was lost, doubled, out of order or broken."""
        return not self.details


LONGEST: Final = 500
"""Characters of a detail that are shown."""

HEAD: Final = (
    "fault",
    "made at",
    "times",
    "turns acknowledged",
    "lost",
    "doubled",
    "out of order",
    "worst recovery s",
)


def cells(row: Row) -> tuple[str, ...]:
    """A row as texts."""
    lost = f"{row.lost} (+{row.taken} by the fault itself)" if row.taken else str(row.lost)
    counts = (str(row.injected), str(row.acknowledged), lost, str(row.doubled), str(row.out_of_order))
    return (row.fault, row.layer, *counts, f"{row.recovery:.2f}")


def render(rows: Iterable[Row], *, markdown: bool) -> str:
    """The table, as text or as Markdown, and below it what there is to say to its rows."""
    rows = list(rows)
    lines = [HEAD, *(cells(row) for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(HEAD))]
    padded = [[text.ljust(width) for text, width in zip(line, widths, strict=True)] for line in lines]
    rule = ["-" * width for width in widths]
    if markdown:
        table = [f"| {' | '.join(line)} |" for line in (padded[0], rule, *padded[1:])]
    else:
        table = ["  ".join(line).rstrip() for line in (padded[0], rule, *padded[1:])]
    notes = [f"{'- ' if markdown else ''}{row.fault}: {note}" for row in rows for note in row.notes]
    details = [f"{row.fault}: {detail[:LONGEST]}" for row in rows for detail in row.details]
    return "\n".join((*table, *([""] if notes else []), *notes, *([""] if details else []), *details))
