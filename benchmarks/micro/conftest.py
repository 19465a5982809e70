"""The history that all of them work on."""

from __future__ import annotations

import pytest

from benchmarks.conversation import WINDOW
from benchmarks.systems.ours import messages
from chatflow import Message


@pytest.fixture(scope="session")
def history() -> list[Message]:
    """40 turns, 160 messages."""
    return [message for turn in range(WINDOW) for message in messages(turn)]
