"""The page on engines: its tables say what the engine does."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from chatflow.engines.common_form import provider_of
from chatflow.engines.failures import KEY_NAMES
from chatflow.engines.trying import LONGEST_WAIT

ROOT: Final = Path(__file__).parent.parent
PAGE: Final = (ROOT / "docs" / "engines.md").read_text()


def test_keys() -> None:
    """The page names every key that the engine knows, and for each name the provider that is asked."""
    table = re.findall(r"^\| (`.*?) \| .*? \| (`.*?) \|$", PAGE, re.MULTILINE)
    told: dict[str, tuple[str, ...]] = {}
    for models, keys in table:
        names = [name.replace("…", "x") for name in re.findall(r"`(.*?)`", models)]
        (provider,) = {provider_of(name) for name in names}
        told[provider] = tuple(re.findall(r"`(.*?)`", keys))
    assert told == dict(KEY_NAMES)


def test_longest_wait() -> None:
    """The page says how long the engine waits when it is asked to."""
    assert f"more than {LONGEST_WAIT:g} s" in PAGE
