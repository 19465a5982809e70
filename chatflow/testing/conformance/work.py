"""What tests of accepted work share: who is told of answers, and turns that others have lost."""

from __future__ import annotations

from typing import Any

import anyio
import anyio.lowlevel

from chatflow.core.backend import StoreBackend
from chatflow.core.messages import AgentResponse
from chatflow.core.records import PendingTurn


class Heard:
    """Is told of answers, and raises first what it is given to raise."""

    def __init__(self, *errors: Exception) -> None:
        self._errors = list(errors)
        self._news = anyio.Event()
        self.calls = 0
        self.turns: list[PendingTurn] = []
        self.answers: list[tuple[str, str]] = []

    async def __call__(self, turn: PendingTurn, response: AgentResponse) -> None:
        """What the worker calls."""
        self.calls += 1
        if self._errors:
            raise self._errors.pop(0)
        self.turns.append(turn)
        self.answers.append((turn.session_id, response.content))
        self._news.set()

    async def of(self, count: int) -> list[tuple[str, str]]:
        """All that was heard, once it is so much."""
        while len(self.answers) < count:
            await self._news.wait()
            self._news = anyio.Event()
        return self.answers

    def contents(self, session_id: str = "s") -> list[str]:
        """What was answered in a conversation."""
        return [content for heard_in, content in self.answers if heard_in == session_id]


async def lose_all(store: StoreBackend) -> None:
    """Interrupt every turn that anybody holds, as a watcher does whose beats they have not kept up with."""
    for beat in (await store.beat_turns(frozenset(), frozenset(), everything=True)).others:
        assert await store.interrupt_turn(beat)


async def states(store: StoreBackend) -> list[tuple[Any, str, int]]:
    """The rows that have not committed: message, state, attempts."""
    return [(turn.message_id, turn.state, turn.attempts) for turn in await store.pending_turns()]


async def nothing_left(store: StoreBackend) -> None:
    """Wait until all rows have gone."""
    while await store.pending_turns():  # what is looked at sets no event
        await anyio.lowlevel.checkpoint()
