"""What answers for an agent: the Engine protocol, what it is asked and what it replies."""

from __future__ import annotations

import inspect
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeAlias

import attrs

from chatflow.core.events import ReasoningDelta, TextDelta
from chatflow.core.messages import Message, ToolCall
from chatflow.core.values import EMPTY

if TYPE_CHECKING:
    from chatflow.core.agent import Agent
    from chatflow.core.tools import Tool


DECIDED_ELSEWHERE: Final[Mapping[str, str]] = {
    "instructions": "give them to Agent(instructions=...)",
    "messages": "they are the conversation",
    "model": "give it to Agent(model=...) or to the engine",
    "stream": "call run_stream in place of run",
    "tools": "give them to Agent(tools=...)",
}
"""Names that no setting may have, whatever the engine, and what to do instead."""


def _messages(items: Iterable[Message]) -> tuple[Message, ...]:
    return tuple(items)


def _tools(items: Iterable[Tool]) -> tuple[Tool, ...]:
    return tuple(items)


def _calls(items: Iterable[ToolCall]) -> tuple[ToolCall, ...]:
    return tuple(items)


def _is_mapping(reply: object, field: attrs.Attribute[Any], value: object) -> None:
    if not isinstance(value, Mapping):
        raise TypeError(f"{field.name} must be a mapping, not {type(value).__name__}")


@attrs.frozen(kw_only=True)
class EngineRequest:
    """One question to a model.

    *messages* is the prompt: the active agent's instructions and the stored system messages first, then a user message,
    each call answered directly after it, ids non-empty and unique. *tools* are all the tools of the run, those that
    hand off included; empty means that the model must answer in words. *settings* are the agent's.

    With a *service_session_id* the service keeps the history: *messages* are the system messages, which are sent each
    time, and what the service has not seen yet, which may begin with a tool's results. With *keep_at_service* and no id
    the service is to begin a session of its own, from all the messages.

    *output_schema* is the JSON Schema of an object that the answer is to be, where the agent has an output type: the
    engine tells the model. It stands there also where the model may call tools instead.
    """

    agent: Agent
    messages: tuple[Message, ...] = attrs.field(converter=_messages)
    tools: tuple[Tool, ...] = attrs.field(default=(), converter=_tools)
    service_session_id: str | Mapping[str, Any] | None = None
    keep_at_service: bool = False
    output_schema: Mapping[str, Any] | None = None
    settings: Mapping[str, Any] = attrs.field(factory=lambda: EMPTY)


@attrs.frozen(kw_only=True)
class EngineReply:
    """What a model replied: text, calls, or both. *extra* goes into the stored message and back to the provider.

    *service_session_id* is there if the service keeps the history from now on: what the next request is to name.
    """

    text: str | None = attrs.field(default=None, validator=attrs.validators.optional(attrs.validators.instance_of(str)))
    tool_calls: tuple[ToolCall, ...] = attrs.field(default=(), converter=_calls)
    usage: Mapping[str, Any] | None = attrs.field(default=None, validator=attrs.validators.optional(_is_mapping))
    extra: Mapping[str, Any] = attrs.field(factory=lambda: EMPTY, validator=_is_mapping)
    service_session_id: str | Mapping[str, Any] | None = None
    finish_reason: str | None = None


ReplyPart: TypeAlias = TextDelta | ReasoningDelta | EngineReply
"""What an engine gives that replies in pieces: pieces, and at the end the whole reply."""


class Engine(Protocol):
    """Anything with this method answers for an agent.

    An engine that can reply in pieces has another one, ``async def stream(request)``, an async generator that is asked
    in place of `generate` where somebody listens. It yields `TextDelta` and `ReasoningDelta`, without an agent's name,
    as they come, and at the end one `EngineReply`: the whole, equal to what `generate` would have returned. Joined, the
    text of its pieces is the text of its reply. It raises
    what `generate` does, and `ServiceSessionLostError` before its first piece. A reply of which it gave no text is told
    as one piece, as is the reply of an engine without it. It is run to its end, or closed, in the task that began it.

    An engine whose service can keep a conversation's history has a second one, ``service_of(agent) -> str``: the name
    of the service that would answer for that agent. Ids of one service are never sent to another, nor to an engine
    without this method.

    An engine that can count has ``async def count_tokens(request) -> int``: how many tokens the provider would count in
    that request, tools included, as well as can be said without asking it. *max_prompt_tokens* needs it.
    """

    async def generate(self, request: EngineRequest) -> EngineReply:
        """Ask the model once.

        Raises:
            EngineError: The model could not be asked, or its answer not be used.
            ServiceSessionLostError: The service knows nothing of the request's *service_session_id*.
        """
        ...


def check_engine(engine: object) -> None:
    """Refuse what can't be an engine.

    Raises:
        TypeError: It is a class, or has no method ``generate``.
    """
    if isinstance(engine, type):
        raise TypeError(f"engine must be an instance: {engine.__name__}(...), not the class itself")
    if not callable(getattr(engine, "generate", None)):
        raise TypeError(f"engine must have an async method generate(request); {type(engine).__name__} has none")


async def generated(engine: Engine, request: EngineRequest) -> EngineReply:
    """What *engine* replies.

    Raises:
        TypeError: That is no reply.
        Exception: Whatever the engine raises, unchanged.
    """
    what = f"{type(engine).__name__}.generate()"
    reply = await awaited(engine.generate(request), what)
    if not isinstance(reply, EngineReply):
        raise TypeError(f"{what} must return an EngineReply, not {type(reply).__name__}")
    return reply


async def awaited(made: object, what: str) -> Any:
    """What comes of *made*, which *what* has returned.

    Raises:
        TypeError: It can't be awaited.
    """
    if not inspect.isawaitable(made):
        raise TypeError(f"{what} must be async: it returned {type(made).__name__}, which can't be awaited")
    return await made


def stream_of(engine: Engine) -> Callable[[EngineRequest], AsyncGenerator[ReplyPart]] | None:
    """The engine's way to reply in pieces, None for one that has none."""
    return getattr(engine, "stream", None)


def counter_of(engine: Engine) -> Callable[[EngineRequest], Awaitable[int]] | None:
    """The engine's way to count what it is sent, None for one that has none."""
    return getattr(engine, "count_tokens", None)


def service_of(engine: Engine, agent: Agent) -> str | None:
    """The service that would keep the conversation, None for an engine that has none."""
    ask: Callable[[Agent], object] | None = getattr(engine, "service_of", None)
    if ask is None:
        return None
    name = ask(agent)
    if not isinstance(name, str):
        raise TypeError(f"{type(engine).__name__}.service_of() must return a service's name, not {type(name).__name__}")
    return name
