"""What tests of the runner share: an engine and a barrier to meet at, and a look at what was stored."""

from __future__ import annotations

from collections.abc import Iterable

import anyio

from chatflow.core.engine import EngineReply, EngineRequest
from chatflow.core.messages import ToolResult
from chatflow.core.session import SessionContext
from chatflow.runner import Runner


class Barrier:
    """Lets nobody on until *parties* have come."""

    def __init__(self, parties: int) -> None:
        self._missing = parties
        self._all_here = anyio.Event()

    async def meet(self) -> None:
        """Wait for the others."""
        self._missing -= 1
        if not self._missing:
            self._all_here.set()
        await self._all_here.wait()


class PausingEngine:
    """Answers once it is let go on."""

    def __init__(self) -> None:
        self.asked = anyio.Event()
        self.go_on = anyio.Event()

    async def generate(self, request: EngineRequest) -> EngineReply:
        """Wait, then answer."""
        self.asked.set()
        await self.go_on.wait()
        return EngineReply(text="answer")


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
