"""What litellm is called with for one request, in either form: pure functions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final, cast

import attrs

from chatflow.core.engine import DECIDED_ELSEWHERE, EngineRequest
from chatflow.core.messages import Role
from chatflow.engines.common_form import provider_of
from chatflow.engines.litellm_form import to_litellm_messages, to_litellm_tools, tools_of_the_past
from chatflow.engines.responses_form import (
    is_conversation,
    to_input,
    to_instructions,
    to_responses_settings,
    to_responses_tools,
)
from chatflow.engines.schema_form import form_of, takes_both, with_schema
from chatflow.engines.thoughts import without_thinking_where_none_began

_OURS: Final[Mapping[str, str]] = {
    **DECIDED_ELSEWHERE,
    "api_base": "give it to LiteLLMEngine(api_base=...)",
    "api_key": "give it to LiteLLMEngine(api_key=...)",
    "background": "an answer is waited for",
    "context_window_fallback_dict": "see Runner(on_context_window=...)",
    "conversation": "a session has it: agent.get_session(id)",
    "fallbacks": "name them with LiteLLMEngine(models=[...])",
    "input": "it is the conversation",
    "max_retries": "see LiteLLMEngine(attempts=...)",
    "n": "there is one answer to a request",
    "num_retries": "see LiteLLMEngine(attempts=...)",
    "previous_response_id": "a session has it: agent.get_session(id)",
    "retry_policy": "see LiteLLMEngine(attempts=...)",
    "timeout": "give it to LiteLLMEngine(timeout=...)",
    "use_chat_completions_api": "see LiteLLMEngine(service_history=...)",
}
"""Settings that the engine itself decides about, and what to do instead."""

_ONLY_WITH_TOOLS: Final = ("parallel_tool_calls", "tool_choice")
"""Settings that providers refuse in a request that names no tools, such as the last one of a turn."""


@attrs.frozen
class Asked:
    """One model's request: which way it goes, to which session of a service, and if the model takes a schema."""

    request: EngineRequest
    model: str
    at_service: bool
    session: str | None
    takes_schema: bool = False


def checked_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of *settings*.

    Raises:
        TypeError: They are no mapping.
        ValueError: One is one that the engine itself decides about.
    """
    if not isinstance(settings, Mapping):
        raise TypeError(f"settings must be a mapping, not {type(settings).__name__}")
    for name in settings:
        if name in _OURS:
            raise ValueError(f"settings can't hold {name!r}: {_OURS[name]}")
    return dict(settings)


def completion_arguments(asked: Asked, settings: Mapping[str, Any], *, stream: bool) -> dict[str, Any]:
    """What `litellm.acompletion` takes; the request's settings come before *settings*.

    What the answer is to be goes as ``response_format``, unless the model does not take that, or the settings have it.
    """
    request, provider = asked.request, provider_of(asked.model)
    options = {"stream_options": {"include_usage": True}} if stream else {}
    arguments: dict[str, Any] = {**options, **settings, **checked_settings(request.settings)}
    tools = to_litellm_tools(request.tools)
    _fit(arguments, request, stream=stream)
    if not tools and provider in {"anthropic", "bedrock", "vertex_ai"}:
        tools = tools_of_the_past(request.messages)
        if tools and provider != "bedrock":
            arguments["tool_choice"] = "none"
    if tools:  # an empty list is refused
        arguments["tools"] = tools
    messages, schema = request.messages, request.output_schema
    if schema is not None:
        if _by_parameter(asked, tools=bool(tools)) and "response_format" not in arguments:
            arguments["response_format"] = {"type": "json_schema", "json_schema": form_of(schema, asked.model)}
        else:
            messages = with_schema(messages, schema)
    arguments["messages"] = to_litellm_messages(messages, asked.model, tools)
    without_thinking_where_none_began(arguments, asked.model)
    return arguments


def responses_arguments(asked: Asked, settings: Mapping[str, Any], *, stream: bool) -> dict[str, Any]:
    """What `litellm.aresponses` takes; the request's settings come before *settings*.

    What the answer is to be goes as ``text.format``, unless the model does not take that, or the settings have it.
    """
    request, session = asked.request, asked.session
    arguments: dict[str, Any] = {
        **to_responses_settings({**settings, **checked_settings(request.settings)}),
        "input": to_input(request.messages, asked.model),
        "store": True,  # a service's default need not be OpenAI's
    }
    tools = to_responses_tools(request.tools)
    _fit(arguments, request, stream=stream)
    if tools:
        arguments["tools"] = tools
    messages, schema = request.messages, request.output_schema
    if schema is not None:
        text: Mapping[str, Any] = arguments.get("text") or {}
        if _by_parameter(asked, tools=bool(tools)) and "format" not in text:
            arguments["text"] = {**text, "format": {"type": "json_schema", **form_of(schema, asked.model)}}
        else:
            messages = with_schema(messages, schema)
    instructions = to_instructions(messages)
    if instructions is not None:
        arguments["instructions"] = instructions
    if session is not None:
        # litellm has no argument for a conversation, and in its own for a response would take a proxy's id apart.
        name = "conversation" if is_conversation(session) else "previous_response_id"
        arguments["extra_body"] = {**(arguments.get("extra_body") or {}), name: session}
    return arguments


def _by_parameter(asked: Asked, *, tools: bool) -> bool:
    return asked.takes_schema and (takes_both(asked.model) or not tools)


def _fit(arguments: dict[str, Any], request: EngineRequest, *, stream: bool) -> None:
    """Leave out the settings that do not fit such a request, and say that it is a stream if it is one.

    A model that must call a tool each time would never answer: it must until it has, and then may.
    """
    unfit: Iterable[str] = (*(() if request.tools else _ONLY_WITH_TOOLS), *(() if stream else ("stream_options",)))
    if _forces_a_call(arguments.get("tool_choice")) and _has_called(request):
        unfit = (*unfit, "tool_choice")
    for name in unfit:
        arguments.pop(name, None)
    if stream:
        arguments["stream"] = True


def _forces_a_call(choice: object) -> bool:
    """Whether *choice* has the model call any tool, or one by name."""
    if isinstance(choice, Mapping):
        return cast("Mapping[str, Any]", choice).get("type") in {"any", "custom", "function", "tool"}
    return isinstance(choice, str) and choice in {"any", "required"}


def _has_called(request: EngineRequest) -> bool:
    """Whether the agent has results of its own calls since the user spoke last."""
    for message in reversed(request.messages):
        if message.role is Role.USER:
            return False
        if message.tool_calls and message.agent_name == request.agent.name:
            return True
    # A service that keeps the history has the calls, and is sent their results alone.
    return any(message.role is Role.TOOL for message in request.messages)
