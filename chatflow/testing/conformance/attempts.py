"""Turns that are broken off at chosen points, again and again, and what their models and tools do meanwhile."""

from __future__ import annotations

import asyncio
import datetime as dt
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any, Final, Literal, TypeVar

import anyio
import anyio.lowlevel
import attrs
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from chatflow.core.agent import Agent
from chatflow.core.engine import EngineReply, EngineRequest
from chatflow.core.messages import Message, ToolCall
from chatflow.core.session import AgentSession
from chatflow.core.tools import ToolContext
from chatflow.testing.conformance.conversation import model, system, user

_T = TypeVar("_T")

Kind = Literal["error", "asyncio", "anyio"]
KINDS: Final[tuple[Kind, ...]] = ("error", "asyncio", "anyio")


class Broken(BaseException):  # no tool's failure, which would be told to the model
    """Ends an attempt."""


@attrs.frozen
class Break:
    """Where an attempt ends: at its point number *at*, so many steps of the loop later, and how."""

    at: int
    later: int = 0
    kind: Kind = "error"


class Attempts:
    """Runs one thing again and again, and breaks off the first attempts as planned."""

    def __init__(self, plan: Iterable[Break] = ()) -> None:
        self._plan = list(plan)
        self._now: Break | None = None
        self._passed = 0
        self._scope = anyio.CancelScope()
        self._task: asyncio.Task[Any] | None = None
        self.broken = 0

    async def point(self) -> None:
        """A point at which an attempt may be broken off."""
        self._passed += 1
        now = self._now
        if now is None or self._passed != now.at:
            return
        for _ in range(now.later):
            await anyio.lowlevel.checkpoint()
        if now.kind == "error":
            raise Broken
        if now.kind == "anyio":
            self._scope.cancel()
        elif self._task is not None:
            self._task.cancel()
        await anyio.sleep_forever()

    async def until_done(self, run: Callable[[], Awaitable[_T]]) -> _T:
        """What the first attempt returns that is not broken off."""
        while True:
            self._now, self._passed = (self._plan.pop(0) if self._plan else None), 0
            self._task = task = asyncio.create_task(self._attempt(run))
            await asyncio.wait([task])
            if not task.cancelled() and not isinstance(task.exception(), Broken):
                done, returned = task.result()
                if done:
                    return returned  # type: ignore[return-value]  # it is what *run* returned
            self.broken += 1

    async def _attempt(self, run: Callable[[], Awaitable[_T]]) -> tuple[bool, _T | None]:
        with anyio.CancelScope() as self._scope:
            return True, await run()
        return False, None


Step = Sequence[Any]
Reply = str | Sequence[ToolCall]


class Script:
    """A model that says its replies in order, and two agents whose tools do what their calls say."""

    def __init__(self, replies: Sequence[Reply], attempts: Attempts) -> None:
        self._replies = replies
        self._attempts = attempts
        self.given = 0
        self.ended: Counter[str] = Counter()
        self.keys: dict[str, set[str]] = {}
        self.agent = Agent("Support", engine=self)
        billing = Agent("Billing", engine=self)
        self.agent.add_handoff(billing)
        billing.add_handoff(self.agent)
        for agent in (self.agent, billing):
            agent.tool(idempotent=True)(self.act)
        self._billing = billing

    async def generate(self, request: EngineRequest) -> EngineReply:
        """Say what comes next; a reply that was on its way when the attempt ended comes again."""
        await self._attempts.point()
        reply = self._replies[self.given]
        self.given += 1
        usage = {"tokens": 1, "by_kind": {"output": self.given}}
        return (
            EngineReply(text=reply, usage=usage)
            if isinstance(reply, str)
            else EngineReply(tool_calls=reply, usage=usage)
        )

    async def act(self, name: str, steps: list[Any], context: ToolContext) -> str:
        """Do *steps* to the conversation, with a point before, between and after them."""
        await self._attempts.point()
        self.keys.setdefault(name, set()).add(context.idempotency_key)
        checkpoints = [context.session.checkpoint()]
        for step in steps:
            await self._do(context.session, checkpoints, *step)
            await self._attempts.point()
        self.ended[name] += 1
        return f"{name} done"

    async def _do(self, session: AgentSession, checkpoints: list[Any], what: str, *how: Any) -> None:
        if what == "set":
            getattr(session, how[0])[how[1]] = how[2]
        elif what == "remove":
            getattr(session, how[0]).pop(how[1], None)
        elif what == "agent":
            await session.set_active_agent(self.agent if how[0] == "Support" else self._billing)
        elif what == "add":
            await self._add(session, {"user": user, "model": model, "system": system}[how[0]](how[1]))
        elif what == "clear":
            await session.clear_history()
        elif what == "mark":
            checkpoints.append(session.checkpoint())
        else:
            await session.rollback_to(checkpoints[how[0] % len(checkpoints)])

    async def _add(self, session: AgentSession, message: Message) -> None:
        await session.add_message(message)


_AT_SOME_TIME: Final = dt.datetime(2026, 1, 2, 3, 4, 5, tzinfo=dt.UTC)


def said(history: Iterable[Message]) -> list[Message]:
    """The messages, as if all were said at one time."""
    return [attrs.evolve(message, timestamp=_AT_SOME_TIME) for message in history]


_kinds: Final = st.sampled_from(["state", "metadata"])
_names: Final = st.sampled_from("ab")
_any_step: Final = st.one_of(
    st.tuples(st.just("set"), _kinds, _names, st.integers(0, 3) | st.lists(st.integers(0, 3), max_size=2)),
    st.tuples(st.just("remove"), _kinds, _names),
    st.tuples(st.just("agent"), st.sampled_from(["Support", "Billing"])),
    st.tuples(st.just("add"), st.sampled_from(["user", "model", "system"]), st.text("xy", max_size=2)),
    st.just(("clear",)),
    st.just(("mark",)),
    st.tuples(st.just("rollback"), st.integers(0, 2)),
).map(list)


@st.composite
def scripts(draw: st.DrawFn) -> list[Reply]:
    """Up to three replies with calls, then one of words."""
    replies: list[Reply] = []
    for iteration in range(draw(st.integers(1, 3))):
        width = draw(st.integers(1, 3))
        calls: list[ToolCall] = []
        for index in range(width):
            name = f"{iteration}.{index}"
            if draw(st.integers(0, 4)) == 0:
                to = draw(st.sampled_from(["billing", "support"]))
                calls.append(ToolCall(id=name, name=f"transfer_to_{to}", args={"reason": name}))
                continue
            # Calls that run at the same time do nothing to each other, or nobody could say what comes of it.
            own = st.tuples(st.just("set"), _kinds, st.just(name), st.integers(0, 3)).map(list)
            steps = draw(st.lists(_any_step if width == 1 else own, max_size=4))
            calls.append(ToolCall(id=name, name="act", args={"name": name, "steps": steps}))
        replies.append(calls)
    return [*replies, "done"]


UNTIMED: Final = settings(
    deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
)
"""How long an example takes says more about the machine than about the store. Each has conversations of its own."""

plans: Final = st.lists(
    st.builds(Break, st.integers(1, 14), st.integers(0, 4), st.sampled_from(KINDS)), min_size=1, max_size=4
)
