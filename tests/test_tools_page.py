"""The page on tools: its numbers are the runner's."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Final

import pytest

import chatflow
from chatflow.running.results import ResultLimits

ROOT: Final = Path(__file__).parent.parent
PAGE: Final = (ROOT / "docs" / "tools.md").read_text()


@pytest.mark.parametrize(
    "name", ["max_concurrent_tool_calls", "max_result_characters", "max_result_bytes", "tool_timeout"]
)
def test_defaults(name: str) -> None:
    """The page names each limit with its default."""
    default = inspect.signature(chatflow.Runner).parameters[name].default
    assert re.search(rf"`{name}` \({default:,}", PAGE)


def test_marker() -> None:
    """The page shows the marker as it is written."""
    shown = re.search(r"`(\[\.\.\. .*?\])`", PAGE)
    assert shown is not None
    stored, _ = ResultLimits(characters=246, size=None).cut("x" * 2000)
    assert shown[1] in stored
