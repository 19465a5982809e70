"""Our values in the form that litellm takes for all providers, OpenAI's chat completions, and back: pure functions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import Any, Final

from chatflow.core.engine import EngineReply
from chatflow.core.messages import (
    MODEL_KEY,
    AudioPart,
    FilePart,
    ImagePart,
    Message,
    Part,
    Role,
    TextPart,
    ToolCall,
    UnknownPart,
)
from chatflow.core.prompt import EMPTY_TEXT
from chatflow.core.tools import Tool
from chatflow.core.values import thaw
from chatflow.engines.call_ids import SIGNATURE, with_ids_for
from chatflow.engines.common_form import (
    INVALID_ARGUMENTS_KEY,
    PROVIDER_KEY,
    all_sendable,
    arguments_of,
    as_json,
    audio_format,
    base64_text,
    counts,
    data_uri,
    function_name,
    given,
    litellm_name,
    provider_of,
    text_or_mark,
)
from chatflow.engines.gemini_form import gemini_text, is_for_gemini, with_equal_calls_apart
from chatflow.engines.result_form import place_in_completion, to_sent_results
from chatflow.engines.thoughts import AFTER_KEY, Beginning
from chatflow.exceptions import EngineUnavailableError, shorten

CALL_FIELDS_KEY: Final = "chatflow_tool_call_fields"
"""In `extra`: what the provider said with each call, such as a thought signature; a list, one mapping for each call."""

_NOT_SENT_BACK: Final = frozenset({"annotations", "audio", "images", "refusal"})
"""Fields that models answer with and that requests do not have."""


def to_litellm_messages(
    messages: Iterable[Message], model: str, tools: Iterable[Mapping[str, Any]] = ()
) -> list[dict[str, Any]]:
    """Messages as litellm takes them, for *model* and beside *tools*.

    A tool's message becomes one for each result, and perhaps a user's message for their pictures: see `result_form`. A
    user's or model's message without text gets one that says so; a system message without text is left out. Calls have
    ids that the provider takes. Signed thoughts stand where they fit: see `thoughts`.
    """
    sent: list[dict[str, Any]] = []
    beginning: Beginning | None = None
    ready = with_ids_for(model, messages)
    if any(AFTER_KEY in message.extra for message in ready):
        beginning = Beginning(tools)
    for message in ready:
        forms = all_sendable(_sent(message, model))
        sent.extend(forms if beginning is None else beginning.fitting(forms, message.extra.get(AFTER_KEY)))
    return list(with_equal_calls_apart(sent, model)) if is_for_gemini(model) else sent


def to_litellm_tools(tools: Iterable[Tool]) -> list[dict[str, Any]]:
    """Tools as litellm takes them."""
    return [_function(tool.name, tool.description, tool.parameters) for tool in tools]


def tools_of_the_past(messages: Iterable[Message]) -> list[dict[str, Any]]:
    """Stand-ins for the tools called in *messages*: some providers refuse calls in a request that names no tools."""
    names = dict.fromkeys(function_name(call.name) for message in messages for call in message.tool_calls)
    return [_function(name, "No longer available.", {"type": "object", "properties": {}}) for name in names]


def from_litellm_response(response: Any, model: str) -> EngineReply:
    """The reply in litellm's response (its object, or the same as a dict) of *model*.

    Raises:
        EngineUnavailableError: The response holds no answer.
    """
    data: dict[str, Any] = response.model_dump(warnings=False) if hasattr(response, "model_dump") else response
    choices: list[dict[str, Any]] | None = data.get("choices")
    if not choices:
        raise EngineUnavailableError(f"model {shorten(model)}: the response holds no answer", model=model)
    message: Mapping[str, Any] = choices[0]["message"]
    calls: list[ToolCall] = []
    call_fields: list[dict[str, Any]] = []
    invalid: dict[str, str] = {}
    for position, call in enumerate(message.get("tool_calls") or ()):
        function: Mapping[str, Any] = call.get("function") or {}
        raw: str = function.get("arguments") or ""
        args = arguments_of(raw)
        if args is None:
            invalid[str(position)] = raw
        id_, fields = _unsigned(call.get("id") or "", given(call, "id", "type", "index", "function"))
        calls.append(ToolCall(id=id_, name=function.get("name") or "", args=args or {}))
        inner = given(function, "name", "arguments")
        call_fields.append({**fields, "function": inner} if inner else fields)
    extra = given(message, "role", "content", "tool_calls", "function_call")
    if "thinking_blocks" in extra and "provider_specific_fields" in extra:
        # litellm has them here once more, of a stream not even whole.
        extra |= given({"provider_specific_fields": given(extra.pop("provider_specific_fields"), "thinking_blocks")})
    if any(call_fields):
        extra[CALL_FIELDS_KEY] = call_fields
    if extra:
        extra[PROVIDER_KEY] = provider_of(model)
    if invalid:
        extra[INVALID_ARGUMENTS_KEY] = invalid
    text = message.get("content")
    return EngineReply(
        text=message.get("refusal") if text is None else text,
        tool_calls=tuple(calls),
        usage=counts(data.get("usage") or {}) or None,
        extra=extra,
        finish_reason=choices[0].get("finish_reason"),
    )


def _sent(message: Message, model: str) -> list[dict[str, Any]]:
    if message.role is Role.USER:
        return [{"role": "user", "content": _user_content(message)}]
    if message.role is Role.MODEL:
        return [_assistant(message, model)]
    if message.role is Role.TOOL:
        return list(_results(message, model))
    return [{"role": "system", "content": message.text}] if message.text.strip() else []


def _user_content(message: Message) -> str | list[dict[str, Any]]:
    if isinstance(message.content, tuple) and message.content:
        return [_part(part) for part in message.content]
    return text_or_mark(message.text)


def _part(part: Part) -> dict[str, Any]:
    if isinstance(part, TextPart):
        return {"type": "text", "text": text_or_mark(part.text)}
    if isinstance(part, UnknownPart):
        return {"type": "text", "text": f"(a part of type {part.type}, which can't be sent)"}
    kind = {"format": part.media_type} if part.media_type is not None else {}
    if isinstance(part, ImagePart):
        return {"type": "image_url", "image_url": {"url": part.url or data_uri(part, "image/png"), **kind}}
    if isinstance(part, AudioPart) and part.data is not None:
        audio = {"data": base64_text(part.data), "format": audio_format(part.media_type)}
        return {"type": "input_audio", "input_audio": audio}
    if part.data is None:
        return {"type": "file", "file": {"file_id": part.url, **kind}}
    named = {"filename": (part.filename if isinstance(part, FilePart) else None) or "file"}
    return {"type": "file", "file": {"file_data": data_uri(part, "application/octet-stream"), **named, **kind}}


def _goes_back(extra: Mapping[str, Any], model: str) -> bool:
    """Whether *model* is sent what its provider gave with a message, such as its thoughts."""
    provider = provider_of(model)
    if extra.get(PROVIDER_KEY) != provider:
        return False
    # That is the name of OpenAI and of every server that speaks its language: only the model tells them apart.
    return provider != "openai" or litellm_name(extra.get(MODEL_KEY, model)) == litellm_name(model)


def _assistant(message: Message, model: str) -> dict[str, Any]:
    extra: dict[str, Any] = thaw(message.extra) if _goes_back(message.extra, model) else {}
    sent: dict[str, Any] = {
        name: value for name, value in extra.items() if name not in _NOT_SENT_BACK and not name.startswith("chatflow_")
    }
    text = message.text if message.text.strip() else None
    sent |= {"role": "assistant", "content": text or (None if message.tool_calls else EMPTY_TEXT)}
    if message.tool_calls:
        fields: list[dict[str, Any]] = extra.get(CALL_FIELDS_KEY) or []
        if len(fields) != len(message.tool_calls):  # another call's signature would be worse than none
            fields = [{}] * len(message.tool_calls)
        sent["tool_calls"] = [_call(call, theirs) for call, theirs in zip(message.tool_calls, fields, strict=True)]
    return sent


def _call(call: ToolCall, theirs: Mapping[str, Any]) -> dict[str, Any]:
    function = {**theirs.get("function", {}), "name": function_name(call.name), "arguments": as_json(call.args)}
    return {**theirs, "id": call.id, "type": "function", "function": function}


def _results(message: Message, model: str) -> Iterator[dict[str, Any]]:
    sent, beside = to_sent_results(message.tool_results, partial(place_in_completion, model=model))
    for each in sent:
        text = gemini_text(each.result, each.text) if is_for_gemini(model) else each.text
        content = [{"type": "text", "text": text}, *map(_part, each.inside)] if each.inside else text
        yield {"role": "tool", "tool_call_id": each.result.tool_call_id, "content": content}
    if beside:
        yield {"role": "user", "content": [_part(part) for part in beside]}


def _function(name: str, description: str, parameters: Mapping[str, Any]) -> dict[str, Any]:
    function = {"name": function_name(name), "description": description, "parameters": dict(parameters)}
    return {"type": "function", "function": function}


def _unsigned(id_: str, fields: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """A call's id without a signature, and its fields with it."""
    # litellm writes Gemini's signatures, thousands of letters, into ids too: no other provider would take those
    plain, _, signature = id_.partition(SIGNATURE)
    if not signature:
        return id_, fields
    kept: Mapping[str, Any] = fields.get("provider_specific_fields") or {}
    return plain, {**fields, "provider_specific_fields": {"thought_signature": signature, **kept}}
