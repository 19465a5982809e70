"""Accepted work while the storage fails."""

from __future__ import annotations

import anyio
import pytest

from chatflow import Agent, AgentResponse, PendingTurn, Runner, ScriptedEngine, SessionStore
from chatflow.core.records import Commit, Committed, Key, Lost
from chatflow.exceptions import StoreError
from chatflow.running import worker


class _Failing(SessionStore):
    """A store whose first commits fail."""

    failing = 3

    async def commit_turn(self, commit: Commit, key: Key) -> Committed | Lost:
        """Fail, or commit."""
        if self.failing:
            self.failing -= 1
            raise StoreError("the disk is full", store="this one")
        return await super().commit_turn(commit, key)


async def test_work_whose_commit_fails_is_tried_again_at_the_same_pace(monkeypatch: pytest.MonkeyPatch) -> None:
    """Work whose commit fails stays in its worker's hands, which tries it again at the same pace each time."""
    asked: list[int] = []
    heard = anyio.Event()

    def delay(failures: int, error: BaseException) -> float:
        asked.append(failures)
        return 0

    async def on_response(turn: PendingTurn, response: AgentResponse) -> None:
        heard.set()

    monkeypatch.setattr(worker, "delay", delay)
    runner = Runner(Agent("Support", "Help.", "none"), _Failing(), ScriptedEngine(default="Hello."))
    async with runner.working(on_response):
        await runner.accept("s", "hello", message_id="m")
        await heard.wait()
    assert asked == [1, 1, 1]
