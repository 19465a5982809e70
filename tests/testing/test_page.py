"""The page on testing; `test_pages.py` runs its samples."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from chatflow.core.storage import Storage
from chatflow.testing.faults import STEPS

PAGE: Final = (Path(__file__).parents[2] / "docs" / "testing.md").read_text(encoding="utf-8")


def test_operations() -> None:
    """The page names all that a storage has to write, and nothing else."""
    table = PAGE[PAGE.index("| of | operations |") :].partition("\n\n")[0]
    assert sorted(re.findall(r"`(\w+)`", table)) == sorted(Storage.__abstractmethods__)


def test_steps() -> None:
    """All of a storage that is awaited, but for its end, is a step at which a fault may happen."""
    assert Storage.__abstractmethods__ - STEPS == {"name", "line", "close", "abandon"}
