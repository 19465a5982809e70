"""Our values in the form of OpenAI's Responses API, as litellm takes it: pure functions.

Items go without their ids. With an id the service would look for its own copy of the item, and refuse the request
where it has none, or where the item that it was made with is missing; calls and results are paired by ``call_id``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final, cast

from chatflow.core.messages import (
    AudioPart,
    FilePart,
    ImagePart,
    Message,
    Part,
    Role,
    TextPart,
    UnknownPart,
)
from chatflow.core.tools import Tool
from chatflow.core.values import thaw
from chatflow.engines.call_ids import with_ids_for
from chatflow.engines.common_form import (
    PROVIDER_KEY,
    all_sendable,
    as_json,
    audio_format,
    base64_text,
    data_uri,
    function_name,
    provider_of,
    sendable,
    text_or_mark,
)
from chatflow.engines.result_form import place_in_response, to_sent_results

OUTPUT_KEY: Final = "chatflow_responses_output"
"""In `extra`: a response's items in order, where they say more than the message's text and calls do.

An item that holds text stands as ``{"type": "message", "length": 12}``, perhaps with its phase, a call as
``{"type": "function_call"}``; what they hold is the message's own. Others, such as reasoning, are as they came.
"""

BETWEEN: Final = "\n\n"
"""What separates the texts of a response that holds several, such as a remark and then the answer."""

_SENT_BACK: Final[Mapping[str, frozenset[str]]] = {
    "compaction": frozenset({"type", "encrypted_content"}),
    "reasoning": frozenset({"type", "summary", "content", "encrypted_content"}),
}
"""Other items that a request may hold and that can say all they have to say themselves, and what of them is sent."""

_RENAMED: Final = {"max_completion_tokens": "max_output_tokens", "max_tokens": "max_output_tokens"}
"""Settings that have another name here."""

_ONLY_IN_COMPLETIONS: Final = frozenset(
    {
        "audio",
        "frequency_penalty",
        "function_call",
        "functions",
        "logit_bias",
        "logprobs",
        "modalities",
        "prediction",
        "presence_penalty",
        "response_format",
        "seed",
        "stop",
        "verbosity",
        "web_search_options",
    }
)
"""Settings that litellm would leave out without a word."""

_OF_THE_ENGINE: Final = frozenset({"background", "conversation", "input", "instructions", "previous_response_id"})


def is_conversation(id_: str) -> bool:
    """Whether this is the id of a conversation, which keeps it; any other is one of a response."""
    return id_.startswith("conv_")


def to_instructions(messages: Iterable[Message]) -> str | None:
    """All that the system messages say, or None if they say nothing."""
    texts = (message.text for message in messages if message.role is Role.SYSTEM and message.text.strip())
    return sendable(BETWEEN.join(texts)) or None


def to_input(messages: Iterable[Message], model: str) -> list[dict[str, Any]]:
    """Messages as items of a request's input, for *model*; system messages are no part of it.

    A model's message becomes an item for its text and one for each call, a tool's message one for each result, which
    holds its pictures and files, and perhaps a user's for recordings: see `result_form`. A user's message without text
    gets one that says so, as does a model's without text and calls.
    """
    items: list[dict[str, Any]] = []
    for message in with_ids_for(model, messages):
        if message.role is Role.USER:
            items.append({"role": "user", "content": _user_content(message)})
        elif message.role is Role.MODEL:
            items.extend(_said(message, provider_of(model)))
        elif message.role is Role.TOOL:
            items.extend(_outputs(message))
    return all_sendable(items)


def to_responses_tools(tools: Iterable[Tool]) -> list[dict[str, Any]]:
    """Tools as the Responses API takes them; it would be strict about schemas unless told otherwise."""
    return [
        {
            "type": "function",
            "name": function_name(tool.name),
            "description": tool.description,
            "parameters": dict(tool.parameters),
            "strict": False,
        }
        for tool in tools
    ]


def to_responses_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings under the names that the Responses API has for them.

    Raises:
        ValueError: A setting is one that the engine itself decides about, one that the Responses API does not have, or
            ``store`` other than True: what is not stored can't be gone on with.
    """
    sent: dict[str, Any] = {}
    beside: Mapping[str, Any] = settings.get("extra_body") or {}
    for name, value in (*settings.items(), *beside.items()):
        if name in _OF_THE_ENGINE:
            raise ValueError(f"settings can't hold {name!r}: the engine itself decides about it")
        if name == "store" and value is not True:
            raise ValueError(
                f"settings can't hold 'store' as {value!r} where the service keeps the history: what is not stored"
                " can't be gone on with"
            )
    for name, value in settings.items():
        if name in _ONLY_IN_COMPLETIONS:
            raise ValueError(
                f"settings can't hold {name!r} where the service keeps the history: it is one of chat"
                " completions alone; `litellm.aresponses` has what there is instead"
            )
        sent[_RENAMED.get(name, name)] = value
    return sent


def _user_content(message: Message) -> str | list[dict[str, Any]]:
    if isinstance(message.content, tuple) and message.content:
        return [_part(part) for part in message.content]
    return text_or_mark(message.text)


def _part(part: Part) -> dict[str, Any]:
    if isinstance(part, TextPart):
        return {"type": "input_text", "text": text_or_mark(part.text)}
    if isinstance(part, UnknownPart):
        return {"type": "input_text", "text": f"(a part of type {part.type}, which can't be sent)"}
    if isinstance(part, ImagePart):
        place = {"image_url": data_uri(part, "image/png")} if part.url is None else _by_url(part.url, "image_url")
        return {"type": "input_image", "detail": "auto", **place}
    if isinstance(part, AudioPart) and part.data is not None:
        audio = {"data": base64_text(part.data), "format": audio_format(part.media_type)}
        return {"type": "input_audio", "input_audio": audio}
    if part.url is not None:
        return {"type": "input_file", **_by_url(part.url, "file_url")}
    name = (part.filename if isinstance(part, FilePart) else None) or "file"
    return {"type": "input_file", "filename": name, "file_data": data_uri(part, "application/octet-stream")}


def _outputs(message: Message) -> Iterator[dict[str, Any]]:
    sent, beside = to_sent_results(message.tool_results, place_in_response)
    for each in sent:
        output = [{"type": "input_text", "text": each.text}, *map(_part, each.inside)] if each.inside else each.text
        yield {"type": "function_call_output", "call_id": each.result.tool_call_id, "output": output}
    if beside:
        yield {"role": "user", "content": [_part(part) for part in beside]}


def _by_url(url: str, field: str) -> dict[str, str]:
    # A file that the provider keeps has an id, which is no URL.
    return {field: url} if ":" in url else {"file_id": url}


def _said(message: Message, provider: str) -> Iterator[dict[str, Any]]:
    """The items of a model's message."""
    items = _order_of(message, provider)
    calls, texts = iter(message.tool_calls), _texts(message.text, items)
    for item in items:
        if item["type"] == "message":
            yield {"role": "assistant", "content": text_or_mark(next(texts)), **phase_of(item)}
        elif item["type"] == "function_call":
            call = next(calls)
            name, arguments = function_name(call.name), as_json(call.args)
            yield {"type": "function_call", "call_id": call.id, "name": name, "arguments": arguments}
        else:
            yield item


def _order_of(message: Message, provider: str) -> list[dict[str, Any]]:
    """The message's items: as its provider gave them, where that still fits the message, or its text and its calls."""
    plain = plain_order(message.text if message.text.strip() else "", len(message.tool_calls))
    stored: object = thaw(message.extra.get(OUTPUT_KEY)) if message.extra.get(PROVIDER_KEY) == provider else None
    items = [item for item in map(_sent_back, cast("list[object]", stored)) if item] if isinstance(stored, list) else []
    while items and items[-1]["type"] in _SENT_BACK:
        items.pop()  # they belong to what follows them, and nothing does
    calls = sum(item["type"] == "function_call" for item in items)
    texts = list(_texts(message.text, items))
    fits = all(texts) and BETWEEN.join(texts) == message.text and calls == len(message.tool_calls)
    return (items if fits else plain) or [{"type": "message", "length": 0}]


def _texts(text: str, items: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    """The parts of a message's text, one for each item that holds text."""
    start = 0
    for item in items:
        if item["type"] == "message":
            yield text[start : start + item["length"]]
            start += item["length"] + len(BETWEEN)


def _sent_back(stored: object) -> dict[str, Any] | None:
    """An item of `OUTPUT_KEY` as it can be sent, or None: others than `from_responses_response` may have written it."""
    item = cast("dict[str, Any]", stored) if isinstance(stored, dict) else {}
    kind = item.get("type")
    if kind == "function_call" or (kind == "message" and isinstance(item.get("length"), int)):
        return item
    if not isinstance(kind, str) or kind not in _SENT_BACK or not speaks_for_itself(item):
        return None
    # Servers whose thoughts are in clear take OpenAI's types at their word, where an item has an id, and keep none.
    names = _SENT_BACK[kind] if item.get("encrypted_content") else {*_SENT_BACK[kind], "id"}
    sent = {name: value for name, value in item.items() if name in names}
    return {"summary": [], **sent} if kind == "reasoning" else sent


def phase_of(item: Mapping[str, Any]) -> dict[str, str]:
    """Whether a text is a remark on the way or the answer, where its item says so."""
    phase = item.get("phase")
    return {"phase": phase} if isinstance(phase, str) and phase else {}


def plain_order(text: str, calls: int) -> list[dict[str, Any]]:
    """The order of items of which nobody has said anything: the text, then the calls."""
    message = {"type": "message", "length": len(text)}
    return [message] * bool(text) + [{"type": "function_call"}] * calls


def speaks_for_itself(item: Mapping[str, Any]) -> bool:
    """Whether the item holds what it says, and not only the id under which the service keeps it."""
    return bool(item.get("encrypted_content") or item.get("content"))
