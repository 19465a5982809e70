from __future__ import annotations

from chatflow import Agent, SessionContext
from chatflow.core.live import LiveSessions


async def test_forgets_no_other_of_that_key() -> None:
    """A session is forgotten by itself: one that has taken its key meanwhile stays."""
    live = LiveSessions()
    first, second = (SessionContext("s", Agent("Support")) for _ in range(2))
    live.add(first)
    live.add(second)
    live.remove(first)
    assert live.get(first.key) is second
    live.remove(second)
    assert live.get(first.key) is None
