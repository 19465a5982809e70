"""Our values in the form that litellm takes for all providers, OpenAI's chat completions, and back: pure functions."""

from __future__ import annotations

import base64
import datetime as dt
import json
import math
import re
from collections.abc import Iterable, Mapping
from typing import Any, Final, cast

from chatflow.core.engine import EngineReply
from chatflow.core.messages import (
    AudioPart,
    FilePart,
    ImagePart,
    Message,
    Part,
    Role,
    TextPart,
    ToolCall,
    ToolResult,
    UnknownPart,
)
from chatflow.core.tools import Tool
from chatflow.core.values import freeze_mapping, thaw
from chatflow.exceptions import EngineUnavailableError, UnstorableValueError, shorten

PROVIDER_KEY: Final = "chatflow_provider"
"""In `extra`: whose fields these are. They go back to that provider, and to no other, which would refuse them."""

CALL_FIELDS_KEY: Final = "chatflow_tool_call_fields"
"""In `extra`: what the provider said with each call, such as a thought signature; a list, one mapping for each call."""

INVALID_ARGUMENTS_KEY: Final = "chatflow_invalid_arguments"
"""In `extra`: arguments that are no JSON object, as the model wrote them, by the call's position: ``{"0": "{..."}``.

The call itself has empty arguments. A position and not an id, since ids may be empty or used twice in one message.
"""

_BARE_NAMES: Final = (
    # Bare Gemini names go to Vertex AI in litellm, whose credentials few people have.
    (re.compile(r"gemini-"), "gemini"),
    (re.compile(r"claude-"), "anthropic"),
    (re.compile(r"(ft:)?gpt-|chatgpt-|o\d"), "openai"),
    (re.compile(r"grok-"), "xai"),
    (re.compile(r"mistral-"), "mistral"),
    (re.compile(r"deepseek-"), "deepseek"),
    (re.compile(r"command-"), "cohere"),
)

_NOT_SENT_BACK: Final = frozenset({"annotations", "audio", "images", "refusal"})
"""Fields that models answer with and that requests do not have."""

_FUNCTION_NAME: Final = re.compile(r"[^a-zA-Z0-9_-]")

_LONGEST_INT: Final = 4096
"""Bits; Python refuses to write much longer ones as decimals."""

_EMPTY: Final = "(empty message)"
"""Some providers refuse a message without text, or drop it."""


def litellm_name(model: str) -> str:
    """The name by which litellm knows a model: with its provider in front, where it is clear which one is meant."""
    if "/" not in model:
        for pattern, provider in _BARE_NAMES:
            if pattern.match(model):
                return f"{provider}/{model}"
    return model


def provider_of(model: str) -> str:
    """The provider in litellm's name of a model."""
    return litellm_name(model).partition("/")[0]


def to_litellm_messages(messages: Iterable[Message], model: str) -> list[dict[str, Any]]:
    """Messages as litellm takes them, for *model*.

    A tool's message becomes one for each result: text as it is, other values as JSON (what JSON lacks as readable
    text), an error marked as one. A user's or model's message without text gets one that says so; a system message
    without text is left out.
    """
    sent: list[dict[str, Any]] = []
    for message in messages:
        if message.role is Role.USER:
            sent.append({"role": "user", "content": _user_content(message)})
        elif message.role is Role.MODEL:
            sent.append(_assistant(message, provider_of(model)))
        elif message.role is Role.TOOL:
            sent.extend(_tool_message(result) for result in message.tool_results)
        elif message.text.strip():
            sent.append({"role": "system", "content": _sendable(message.text)})
    return sent


def to_litellm_tools(tools: Iterable[Tool]) -> list[dict[str, Any]]:
    """Tools as litellm takes them."""
    return [_function(tool.name, tool.description, tool.parameters) for tool in tools]


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
        try:
            args = freeze_mapping(json.loads(raw.strip() or "{}"), "args")
        except (ValueError, RecursionError, UnstorableValueError):
            args = None
            invalid[str(position)] = raw
        fields = _given(call, "id", "type", "index", "function")
        calls.append(ToolCall(id=_call_id(call, fields), name=function.get("name") or "", args=args or {}))
        inner = _given(function, "name", "arguments")
        call_fields.append({**fields, "function": inner} if inner else fields)
    extra = _given(message, "role", "content", "tool_calls", "function_call")
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
        usage=_counts(data.get("usage") or {}) or None,
        extra=extra,
        finish_reason=choices[0].get("finish_reason"),
    )


def _user_content(message: Message) -> str | list[dict[str, Any]]:
    if isinstance(message.content, tuple) and message.content:
        return [_part(part) for part in message.content]
    return _sendable(message.text) if message.text.strip() else _EMPTY


def _part(part: Part) -> dict[str, Any]:
    if isinstance(part, TextPart):
        return {"type": "text", "text": _sendable(part.text) if part.text.strip() else _EMPTY}
    if isinstance(part, UnknownPart):
        return {"type": "text", "text": f"(a part of type {part.type}, which can't be sent)"}
    kind = {"format": part.media_type} if part.media_type is not None else {}
    if isinstance(part, ImagePart):
        return {"type": "image_url", "image_url": {"url": part.url or _data_uri(part, "image/png"), **kind}}
    if isinstance(part, AudioPart) and part.data is not None:
        audio = {"data": _base64(part.data), "format": _audio_format(part.media_type)}
        return {"type": "input_audio", "input_audio": audio}
    if part.data is None:
        return {"type": "file", "file": {"file_id": part.url, **kind}}
    named = {"filename": (part.filename if isinstance(part, FilePart) else None) or "file"}
    return {"type": "file", "file": {"file_data": _data_uri(part, "application/octet-stream"), **named, **kind}}


def _data_uri(part: ImagePart | AudioPart | FilePart, default: str) -> str:
    return f"data:{part.media_type or default};base64,{_base64(part.data or b'')}"


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


def _audio_format(media_type: str | None) -> str:
    # "audio/ogg; codecs=opus", as voice messages come, is "ogg"
    kind = (media_type or "audio/wav").partition(";")[0].rpartition("/")[2].strip().removeprefix("x-")
    return {"mpeg": "mp3", "wave": "wav"}.get(kind, kind)


def _assistant(message: Message, provider: str) -> dict[str, Any]:
    extra: dict[str, Any] = thaw(message.extra) if message.extra.get(PROVIDER_KEY) == provider else {}
    sent: dict[str, Any] = {
        name: value for name, value in extra.items() if name not in _NOT_SENT_BACK and not name.startswith("chatflow_")
    }
    text = _sendable(message.text) if message.text.strip() else None
    sent |= {"role": "assistant", "content": text or (None if message.tool_calls else _EMPTY)}
    if message.tool_calls:
        fields: list[dict[str, Any]] = extra.get(CALL_FIELDS_KEY) or []
        if len(fields) != len(message.tool_calls):  # another call's signature would be worse than none
            fields = [{}] * len(message.tool_calls)
        sent["tool_calls"] = [_call(call, theirs) for call, theirs in zip(message.tool_calls, fields, strict=True)]
    return sent


def _call(call: ToolCall, theirs: Mapping[str, Any]) -> dict[str, Any]:
    function = {**theirs.get("function", {}), "name": _function_name(call.name), "arguments": _json(call.args)}
    return {**theirs, "id": call.id, "type": "function", "function": function}


def _tool_message(result: ToolResult) -> dict[str, Any]:
    text = _sendable(result.content) if isinstance(result.content, str) else _json(result.content)
    if result.is_error and not text.startswith("Error"):
        text = f"Error: {text}"
    return {"role": "tool", "tool_call_id": result.tool_call_id, "content": text}


def _function(name: str, description: str, parameters: Mapping[str, Any]) -> dict[str, Any]:
    function = {"name": _function_name(name), "description": description, "parameters": dict(parameters)}
    return {"type": "function", "function": function}


def _function_name(name: str) -> str:
    # A model may make up a tool's name, and in the history no provider takes back what it would not have taken first.
    return _FUNCTION_NAME.sub("_", name)[:64] or "unknown"


def tools_of_the_past(messages: Iterable[Message]) -> list[dict[str, Any]]:
    """Stand-ins for the tools called in *messages*: some providers refuse calls in a request that names no tools."""
    names = dict.fromkeys(call.name for message in messages for call in message.tool_calls)
    return [_function(name, "No longer available.", {"type": "object", "properties": {}}) for name in names]


def _call_id(call: Mapping[str, Any], fields: Mapping[str, Any]) -> str:
    # litellm writes Gemini's signatures, thousands of letters, into ids too; the ids are stored more than once
    id_: str = call.get("id") or ""
    plain, _, signature = id_.partition("__thought__")
    kept: Mapping[str, Any] = fields.get("provider_specific_fields") or {}
    return plain if signature and kept.get("thought_signature") == signature else id_


def _given(fields: Mapping[str, Any], *without: str) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if name not in without and not _is_blank(value)}


def _is_blank(value: Any) -> bool:
    values = cast("dict[str, Any]", value).values() if isinstance(value, dict) else [value or None]
    return all(each is None for each in values)


def _counts(usage: Mapping[str, Any]) -> dict[str, Any]:
    counts: dict[str, Any] = {}
    for name, value in usage.items():
        if isinstance(value, int):
            counts[name] = value
        elif isinstance(value, dict) and (details := _counts(cast("dict[str, Any]", value))):
            counts[name] = details
    return counts


def _sendable(text: str) -> str:
    """The text, with what UTF-8 lacks replaced: lone surrogates can be stored, but not be sent."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _json(value: Any) -> str:
    return _sendable(json.dumps(_plain(value), ensure_ascii=False))


def _plain(value: Any) -> Any:
    """A value as JSON has it; what JSON lacks becomes text that a model can read."""
    items: Any = value  # checkers know a value's kind in each case, and nothing of what is in it
    match value:
        case dict():
            plain: Any = {_key(key): _plain(item) for key, item in items.items()}
        case list() | tuple():
            plain = [_plain(item) for item in items]
        case set() | frozenset():
            plain = [_plain(item) for item in sorted(items, key=repr)]  # one order always: providers cache prompts
        case dt.date():
            plain = value.isoformat()
        case bytes():
            plain = _text_of(value)
        case float() if not math.isfinite(value):
            plain = str(value)
        case int() if value.bit_length() > _LONGEST_INT:
            plain = hex(value)
        case None | str() | int() | float():
            plain = value
        case _:
            plain = str(value)
    return plain


def _text_of(data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return _base64(data)


def _key(key: Any) -> str:
    plain = _plain(key)
    return plain if isinstance(plain, str) else json.dumps(plain, ensure_ascii=False)
