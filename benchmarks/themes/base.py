"""Theme: one thing that is measured, of all systems that can take part, in a few cases."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, Final

import attrs

from benchmarks.stage import Stage
from benchmarks.systems import ALL_BUT_VARIANTS


@attrs.frozen
class Case:
    """One table of a theme."""

    name: str
    settings: dict[str, Any] = attrs.field(factory=dict)
    systems: tuple[str, ...] | None = None
    """Only these, where it makes no sense for others, or would take them hours."""


@attrs.frozen
class Column:
    """One figure of a table: the median of the rounds, and, with *spread*, the lowest and the highest.

    With *ratio* it is divided by the floor's figure in the same round.
    """

    head: str
    key: str
    form: str = ".0f"
    factor: float = 1
    spread: bool = False
    ratio: bool = False


def over_floor(key: str, form: str = ".2f") -> Column:
    """The column that is to be compared."""
    return Column("÷ floor", key, form, spread=True, ratio=True)


COST: Final = (
    Column("CPU µs", "cpu_us"),
    Column("fsyncs/1000", "fsyncs_per_1000"),
)
GAPS: Final = (
    Column("gap p99 ms", "gap_p99_ms", ".1f"),
    Column("longest gap ms", "gap_max_ms", ".1f", spread=True),
    Column("less GC", "gap_without_collections_ms", ".1f"),
)


class Theme(ABC):
    """What is measured, and how. Both halves stand here: what is asked, and what the system's own process does."""

    title: ClassVar[str]
    tells: ClassVar[str]
    """A sentence above its tables."""
    columns: ClassVar[tuple[Column, ...]]
    systems: ClassVar[tuple[str, ...]] = ALL_BUT_VARIANTS
    rounds: ClassVar[int | None] = None
    """How many there are, where another number than the one that was asked for makes no sense."""

    @abstractmethod
    def cases(self, scale: float) -> Sequence[Case]:
        """The cases, with sizes times *scale*."""

    async def prepare(self, stage: Stage, settings: dict[str, Any]) -> dict[str, Any]:
        """Get a system ready for a case, before its rounds; facts about it."""
        return {}

    @abstractmethod
    async def measure(self, stage: Stage, settings: dict[str, Any]) -> dict[str, float]:
        """One round of a case."""


def scaled(number: int, scale: float, least: int) -> int:
    """*number* times *scale*."""
    return max(least, round(number * scale))
