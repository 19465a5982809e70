"""What Anthropic's Messages API refuses, and in what words: pure functions of a request's body.

From its documentation, and from the answers that others have quoted in the trackers of their libraries. Neighbours of
one role are looked at as one message, since the API joins them.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import attrs

Block = dict[str, Any]
"""A part of a message's content."""

_FIELDS: Final = {
    *("container", "context_management", "inference_geo", "max_tokens", "mcp_servers", "messages", "metadata", "model"),
    *("output_config", "output_format", "service_tier", "stop_sequences", "stream", "system", "temperature"),
    *("thinking", "tool_choice", "tools", "top_k", "top_p"),
}
_BLOCKS: Final = {
    "text": {"text"},
    "image": {"source"},
    "document": {"source"},
    "thinking": {"thinking", "signature"},
    "redacted_thinking": {"data"},
    "tool_use": {"id", "name", "input"},
    "tool_result": {"tool_use_id"},
}
"""The fields that a block must have."""

_ALLOWED: Final = {"tool_result": {"content", "is_error"}, "document": {"title", "context", "citations"}}
"""Those that it may have besides, and `cache_control`."""

_OF_THE_USER: Final = {"text", "image", "document", "tool_result"}
_OF_THE_MODEL: Final = {"text", "thinking", "redacted_thinking", "tool_use"}
_ID: Final = re.compile(r"[a-zA-Z0-9_-]+")
_NAME: Final = re.compile(r"[a-zA-Z0-9_-]{1,128}")
_BOUND: Final = re.compile(r"fable|mythos|5-5")
"""The models that take a thought back only after the beginning of the conversation that it was thought after."""


@attrs.frozen
class Told:
    """A thought as it was told, and the digest of all that came before it."""

    block: Block
    after: str


def refusal(request: Mapping[str, Any], told: Mapping[str, Told] | None = None) -> str | None:
    """Why Anthropic would refuse the request, in its words; None where it would not.

    *told* are the thoughts that the server has signed, by their signatures; without it no signature is looked at.
    """
    return next(_faults(request, told), None)


def beginning(request: Mapping[str, Any], before: int | None = None) -> str:
    """A digest of all that a request says before the block at *before*, counted over all its messages."""
    blocks = [(role, _plain(block)) for role, block in blocks_of(request)][:before]
    return _digest([request.get("system"), request.get("tools"), blocks])


def blocks_of(request: Mapping[str, Any]) -> list[tuple[str, Block]]:
    """The blocks of all messages, each with its role: where one message ends and the next begins says nothing."""
    return [(message["role"], block) for message in request["messages"] for block in _content(message)]


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _plain(block: Block) -> Block:
    return {name: value for name, value in block.items() if name != "cache_control"}


def _content(message: Mapping[str, Any]) -> list[Block]:
    content = message["content"]
    return [{"type": "text", "text": content}] if isinstance(content, str) else list(content)


def _faults(request: Mapping[str, Any], told: Mapping[str, Told] | None) -> Iterator[str]:
    for name in sorted(set(request) - _FIELDS):
        yield f"{name}: Extra inputs are not permitted"
    for name in ("model", "max_tokens", "messages"):
        if name not in request:
            yield f"{name}: Field required"
    if not request["messages"]:
        yield "messages: at least one message is required"
    for position, message in enumerate(request["messages"]):
        yield from _message_faults(message, f"messages.{position}")
    joined = _joined(request["messages"])
    if joined[0]["role"] != "user":
        yield 'messages: first message must use the "user" role'
    if joined[-1]["role"] != "user":
        yield "This model does not support assistant message prefill. The conversation must end with a user message."
    yield from _pair_faults(joined)
    yield from _tool_faults(request)
    yield from _thinking_faults(request, joined)
    if told is not None:
        yield from _signature_faults(request, told)


def _message_faults(message: Mapping[str, Any], path: str) -> Iterator[str]:
    role = message.get("role")
    if role not in {"user", "assistant"}:
        yield f'{path}.role: Unexpected role "{role}". Use the top-level `system` parameter for system prompts'
    if set(message) != {"role", "content"}:
        yield f"{path}: Extra inputs are not permitted"
    if not message["content"]:
        yield f"{path}: all messages must have non-empty content except for the optional final assistant message"
    for number, block in enumerate(_content(message)):
        yield from _block_faults(block, f"{path}.content.{number}", _OF_THE_USER if role == "user" else _OF_THE_MODEL)


def _block_faults(block: Block, path: str, allowed: set[str]) -> Iterator[str]:
    kind = block.get("type")
    if kind not in allowed:
        yield f"{path}: Input tag '{kind}' found using 'type' does not match any of the expected tags"
        return
    for name in sorted(_BLOCKS[kind] - set(block)):
        yield f"{path}.{kind}.{name}: Field required"
    for name in sorted(set(block) - _BLOCKS[kind] - _ALLOWED.get(kind, set()) - {"type", "cache_control"}):
        yield f"{path}.{kind}.{name}: Extra inputs are not permitted"
    if kind == "tool_result" and not isinstance(block.get("content", ""), str):
        for number, part in enumerate(block["content"]):
            yield from _block_faults(part, f"{path}.tool_result.content.{number}", {"text", "image", "document"})
    yield from _value_faults(block, f"{path}.{kind}")


def _value_faults(block: Block, path: str) -> Iterator[str]:
    kind = block["type"]
    if kind == "text" and not block["text"].strip():
        yield "messages: text content blocks must contain non-whitespace text"
    if kind == "thinking" and not (isinstance(block["thinking"], str) and isinstance(block["signature"], str)):
        yield f"{path}.thinking: Input should be a valid string"
    for name in {"id", "tool_use_id"} & set(block):
        if not _ID.fullmatch(block[name]):
            yield f"{path}.{name}: String should match pattern '^[a-zA-Z0-9_-]+$'"
    if kind == "tool_use" and not _NAME.fullmatch(block["name"]):
        yield f"{path}.name: String should match pattern '^[a-zA-Z0-9_-]{{1,128}}$'"
    if kind == "tool_use" and not isinstance(block["input"], dict):
        yield f"{path}.input: Input should be a valid dictionary"


def _joined(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    joined: list[dict[str, Any]] = []
    for message in messages:
        if joined and joined[-1]["role"] == message["role"]:
            joined[-1]["content"] += _content(message)
        else:
            joined.append({"role": message["role"], "content": _content(message)})
    return joined


def _pair_faults(messages: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """What is wrong with calls and results."""
    seen: set[str] = set()
    called: list[str] = []
    for position, message in enumerate(messages):
        path = f"messages.{position}"
        results = [block["tool_use_id"] for block in message["content"] if block["type"] == "tool_result"]
        for number, id_ in enumerate(results):
            if id_ not in called:
                yield (
                    f"{path}.content.{number}: unexpected `tool_use_id` found in `tool_result` blocks: {id_}. Each"
                    " `tool_result` block must have a corresponding `tool_use` block in the previous message."
                )
            if id_ in results[:number]:
                yield (
                    f"{path}: each tool_use must have a single result. Found multiple `tool_result` blocks with id:"
                    f" {id_}"
                )
        first = [block["tool_use_id"] for block in message["content"][: len(results)] if "tool_use_id" in block]
        missing = [id_ for id_ in called if id_ not in first]
        if missing:
            yield (
                f"{path}: `tool_use` ids were found without `tool_result` blocks immediately after:"
                f" {', '.join(missing)}. Each `tool_use` block must have a corresponding `tool_result` block in the"
                " next message."
            )
        called = [block["id"] for block in message["content"] if block["type"] == "tool_use"]
        for number, id_ in enumerate(called):
            if id_ in seen or id_ in called[:number]:
                yield f"{path}.content.{number}: `tool_use` ids must be unique"
        seen.update(called)


def _tool_faults(request: Mapping[str, Any]) -> Iterator[str]:
    tools, choice = request.get("tools"), request.get("tool_choice")
    if not tools and choice is not None:
        yield "tool_choice: may only be specified while providing `tools`."
    if not tools and any(block["type"] in {"tool_use", "tool_result"} for _, block in blocks_of(request)):
        yield "Requests which include `tool_use` or `tool_result` blocks must define tools."
    names = [tool["name"] for tool in tools or ()]
    if len(names) != len(set(names)):
        yield "tools: Tool names must be unique."
    for position, tool in enumerate(tools or ()):
        if not _NAME.fullmatch(tool["name"]):
            yield f"tools.{position}.custom.name: String should match pattern '^[a-zA-Z0-9_-]{{1,128}}$'"
        if tool["input_schema"].get("type") != "object":
            yield f"tools.{position}.custom.input_schema.type: Field required"


def _thinking_faults(request: Mapping[str, Any], messages: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    for position, message in enumerate(messages):
        if message["content"][-1]["type"] in {"thinking", "redacted_thinking"}:
            yield f"messages.{position}: The final block in an assistant message cannot be `thinking`."
    form = request.get("thinking") or {"type": "disabled"}
    if form["type"] == "disabled":
        return
    if (request.get("tool_choice") or {}).get("type") in {"any", "tool"}:
        yield "Thinking may not be enabled when tool_choice forces tool use."
    if request.get("temperature", 1) != 1:
        yield "`temperature` may only be set to 1 when thinking is enabled or in adaptive mode."
    if form["type"] != "enabled":
        return
    if request["max_tokens"] <= form["budget_tokens"]:
        yield "`max_tokens` must be greater than `thinking.budget_tokens`."
    for position in _under_way(messages):
        kind = messages[position]["content"][0]["type"]
        if kind not in {"thinking", "redacted_thinking"}:
            yield (
                f"messages.{position}.content.0.type: Expected `thinking` or `redacted_thinking`, but found `{kind}`."
                " When `thinking` is enabled, a final `assistant` message must start with a thinking block (preceeding"
                " the lastmost set of `tool_use` and `tool_result` blocks)."
            )


def _under_way(messages: Sequence[Mapping[str, Any]]) -> Iterator[int]:
    """The places of the model's messages since the user has spoken last: a turn that its tools' results continue."""
    for position in range(len(messages) - 1, -1, -1):
        message = messages[position]
        if message["role"] == "assistant":
            yield position
        elif any(block["type"] != "tool_result" for block in message["content"]):
            return


def _signature_faults(request: Mapping[str, Any], told: Mapping[str, Told]) -> Iterator[str]:
    for number, (_, block) in enumerate(blocks_of(request)):
        kind = block["type"]
        if kind not in {"thinking", "redacted_thinking"}:
            continue
        name = "signature" if kind == "thinking" else "data"
        known = told.get(block[name])
        if known is None:
            yield f"block {number}: Invalid `{name}` in `{kind}` block"
        elif _plain(block) != known.block:
            yield f"block {number}: `thinking` or `redacted_thinking` blocks cannot be modified."
        elif _BOUND.search(request["model"]) and beginning(request, number) != known.after:
            yield f"block {number}: Invalid `{name}` in `{kind}` block. The block is bound to a different conversation."
