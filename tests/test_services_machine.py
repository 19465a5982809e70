"""A service that keeps the history, under drawn schedules: what it has is always what the conversation has."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable
from typing import Any, Final

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from chatflow.core.agent import Agent
from chatflow.core.engine import EngineRequest
from chatflow.core.memory import SessionStore
from chatflow.core.messages import Message, Role, ToolCall
from chatflow.core.prompt import to_prompt
from chatflow.core.service import id_key
from chatflow.core.session import AgentSession
from chatflow.core.store import BaseSessionStore
from chatflow.core.tools import ToolContext
from chatflow.engines.scripted import Reply, ScriptedEngine
from chatflow.runner import Runner
from chatflow.sqlite.store import SQLiteSessionStore
from chatflow.testing.conformance.conversation import user
from chatflow.testing.conformance.service_engine import A2AEngine


class DownError(Exception):
    """The model can't be reached."""


@attrs.frozen
class Send:
    """A message is sent, or sent again: its tools run so many times, and the request after that may fail."""

    message_id: str | None
    calls: int
    fails: bool
    clears: bool = False


sends: Final = st.builds(Send, st.sampled_from([None, "m1", "m2"]), st.integers(0, 2), st.booleans(), st.booleans())
steps: Final = st.one_of(
    sends,
    sends,
    st.sampled_from(["add", "clear", "back to a checkpoint", "back by one", "forget"]),
)


def said(messages: Iterable[Message]) -> list[Any]:
    """What was said, by whom, with the names and the outcomes of calls; system messages aside."""
    return [
        (
            message.role,
            message.text,
            [call.id for call in message.tool_calls],
            [r.content for r in message.tool_results],
        )
        for message in messages
        if message.role is not Role.SYSTEM
    ]


class Schedule:
    """One conversation, and what happens to it."""

    def __init__(self, store: BaseSessionStore) -> None:
        self.plan: Send = Send(None, 0, fails=False)
        self.asked = 0
        self.number = 0
        self.engine = A2AEngine(ScriptedEngine(default=self.reply))
        self.agent = Agent("Support", instructions="Be brief.", engine=self.engine)
        self.agent.tool(name="look", idempotent=True)(self.look)
        self.runner = Runner(self.agent, store, on_lost_service_session="replay")

    def reply(self, request: EngineRequest) -> Reply:
        """What the model says next by the plan."""
        rounds = sum(message.role is Role.TOOL for message in request.messages[self.last_question(request) :])
        if rounds < self.plan.calls:
            self.number += 1
            return ToolCall(id=f"c{self.number}", name="look")
        if self.plan.fails:
            raise DownError
        return f"answer {len(request.messages)}"

    @staticmethod
    def last_question(request: EngineRequest) -> int:
        """Where the last user message stands."""
        return max(place for place, message in enumerate(request.messages) if message.role is Role.USER)

    async def look(self, context: ToolContext) -> str:
        """Look, and perhaps forget everything."""
        if self.plan.clears:
            await context.session.clear_history()
        return "there"

    def compare(self, session: AgentSession, *, is_new: bool) -> None:
        """What the service has is what a model without one would be sent; all of it after a turn that *is_new*."""
        id_ = session.service_session_id
        kept = None if id_ is None else self.engine.kept.get(id_key(id_))
        if kept is not None:
            expected = said(to_prompt(session.history).messages)
            assert said(kept) == (expected if is_new else expected[: len(kept)])

    async def step(self, step: Any) -> None:
        """Do one thing, and compare."""
        session = await self.runner.session_store.get_or_create("s", self.agent)
        before = session.service_session_id, said(session.history)
        if isinstance(step, Send):
            self.plan = step
            self.asked += step.message_id is None
            text = f"question {step.message_id or self.asked}"
            try:
                response = await self.runner.run_async("s", text, message_id=step.message_id)
            except DownError:
                assert (session.service_session_id, said(session.history)) == before
                return
            self.compare(session, is_new=not response.duplicate)
        elif step == "add":
            self.asked += 1
            await session.add_message(user(f"note {self.asked}"))
        elif step == "clear":
            await session.clear_history()
            assert session.service_session_id is None
        elif step == "back by one":
            with contextlib.suppress(ValueError):  # a length may mean nothing any more
                await session.rollback_to(max(0, len(session.history) - 1))
        elif step == "forget":
            self.engine.forget()
        else:
            token = session.checkpoint()
            await session.add_message(user("never mind"))
            await session.rollback_to(token)
            assert (session.service_session_id, said(session.history)) == before


@pytest.mark.parametrize("make", [SessionStore, lambda: SQLiteSessionStore(":memory:")], ids=["memory", "sqlite"])
@given(script=st.lists(steps, max_size=12))
def test_service_has_what_the_conversation_has(make: Any, script: list[Any]) -> None:
    """After each turn the service has exactly the conversation's messages, whatever failed, went or was sent again."""

    async def run() -> None:
        async with make() as store:
            schedule = Schedule(store)
            for step in script:
                await schedule.step(step)

    asyncio.run(run())
