"""What tests of the runner share: a look at what was stored."""

from __future__ import annotations

from collections.abc import Iterable

from chatflow.core.messages import ToolResult
from chatflow.core.session import SessionContext
from chatflow.runner import Runner


async def session_of(runner: Runner, session_id: str = "s") -> SessionContext:
    """The conversation, which is there."""
    session = await runner.get_session(session_id)
    assert session is not None
    return session


def texts(session: SessionContext) -> list[str]:
    """What was said in it."""
    return [message.text for message in session.history]


def results(session: SessionContext) -> list[ToolResult]:
    """All tool results in it."""
    return list(_results(session))


def _results(session: SessionContext) -> Iterable[ToolResult]:
    for message in session.history:
        yield from message.tool_results
