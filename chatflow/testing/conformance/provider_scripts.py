"""Context providers for tests: what they do is given to them, and what happens to them is noted."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final

from hypothesis import strategies as st

from chatflow.core.agent import Agent
from chatflow.core.messages import Message
from chatflow.core.providers import ContextProvider, HistoryProvider, OnError, RunContext
from chatflow.core.session import AgentSession
from chatflow.core.tools import Tool
from chatflow.engines.scripted import ScriptedEngine
from chatflow.testing.conformance.service_engine import A2AEngine

Hook = Callable[[AgentSession, RunContext], Awaitable[object]]


async def nothing(session: AgentSession, context: RunContext) -> None:
    """Happens where a test gives no hook."""


class Scripted(ContextProvider):
    """Does what its hooks do, and notes in *log* when they began, and when `after_run` ended."""

    def __init__(
        self,
        name: str,
        log: list[str] | None = None,
        *,
        before: Hook = nothing,
        after: Hook = nothing,
        on_error: OnError = "fail",
    ) -> None:
        self.name = name
        self.on_error = on_error
        self.log: list[str] = [] if log is None else log
        self._before = before
        self._after = after

    async def before_run(self, agent: Agent, session: AgentSession, context: RunContext) -> None:
        """Note it, and do what is to be done."""
        self.log.append(f"{self.name} before {agent.name}")
        await self._before(session, context)

    async def after_run(self, agent: Agent, session: AgentSession, context: RunContext) -> None:
        """Note how the run ended, and do what is to be done."""
        said = repr(context.error) if context.response is None else context.response.content
        self.log.append(f"{self.name} after {agent.name}: {said}")
        await self._after(session, context)
        self.log.append(f"{self.name} done")


class Choosing(HistoryProvider):
    """Chooses what *choose* makes of the context, and notes that it was asked."""

    def __init__(
        self,
        choose: Callable[[RunContext], Sequence[Message]],
        log: list[str] | None = None,
        *,
        on_error: OnError = "fail",
    ) -> None:
        self.on_error = on_error
        self.log: list[str] = [] if log is None else log
        self._choose = choose

    async def get_messages(self, agent: Agent, session: AgentSession, context: RunContext) -> Sequence[Message]:
        """Note it, and choose."""
        self.log.append(f"{self.name} chooses for {agent.name}")
        return self._choose(context)


def adding(*messages: Message, store: bool = False) -> Hook:
    """A hook that adds these messages."""

    async def add(session: AgentSession, context: RunContext) -> None:
        context.add_messages(*messages, store=store)

    return add


def raising(error: BaseException) -> Hook:
    """A hook that raises that error."""

    async def fail(session: AgentSession, context: RunContext) -> None:
        raise error

    return fail


def look() -> str:
    """Look."""
    return "found"


LOOK: Final = Tool(look)


def named_look() -> Tool:
    """Another tool of the same name."""
    return Tool(look, name="look")


def agent_with(*providers: ContextProvider, name: str = "Support", **options: Any) -> Agent:
    """An agent with these providers."""
    return Agent(name, "Be brief.", context_providers=providers, **options)


def asked(engine: ScriptedEngine | A2AEngine, number: int = -1) -> list[str]:
    """What a request sends: text, or what was called, or what was found."""
    return [shown(message) for message in engine.requests[number].messages]


def shown(message: Message) -> str:
    """A message in few letters."""
    called = [call.name for call in message.tool_calls]
    found = [str(result.content) for result in message.tool_results]
    return message.text or ",".join(called or found)


ACTIONS: Final = st.lists(st.sampled_from(["look", "clear", "back", "add", "hand over"]), max_size=4)
"""What tools do in a turn: nothing, clear the history, roll it back, add to it, or hand the conversation over."""
