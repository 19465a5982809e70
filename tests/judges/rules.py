"""What each provider refuses, by its documentation and its errors, judged on the very body that would be sent.

A body is first read into turns, which all providers have, and then judged by the rules of its provider. Nothing here
knows how chatflow makes a prompt.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, Final, Literal

import attrs
from mistral_common.protocol.instruct.request import ChatCompletionRequest
from mistral_common.protocol.instruct.validator import (
    MistralRequestValidatorV11,
    MistralRequestValidatorV13,
    ValidationMode,
)

from tests import anthropic_rules, gemini_rules, model_server


@attrs.frozen
class Block:
    """A piece of a turn: *text* is a text's own, a result's, or a call's arguments as JSON."""

    kind: Literal["text", "call", "result", "image", "thought"]
    text: str = ""
    id: str | None = None
    name: str | None = None


@attrs.frozen
class Turn:
    """What one side says, or what tools have given back."""

    role: str
    blocks: tuple[Block, ...]

    def of(self, kind: str) -> list[Block]:
        """The blocks of that kind."""
        return [block for block in self.blocks if block.kind == kind]


@attrs.frozen
class Told:
    """A request as all providers understand it."""

    systems: tuple[str, ...]
    turns: tuple[Turn, ...]


@attrs.frozen
class Judge:
    """How a provider's bodies are read, and what it refuses in them."""

    read: Callable[[Mapping[str, Any]], Told]
    ids: str
    names: str = r"[a-zA-Z0-9_-]{1,64}"
    alternates: bool = False
    extra: Callable[[Mapping[str, Any]], Iterable[str]] = lambda body: ()

    def faults(self, body: Mapping[str, Any]) -> list[str]:
        """What the provider would refuse."""
        told = self.read(body)
        return [*_order(told, alternates=self.alternates), *_pairs(told), *self._words(told), *self.extra(body)]

    def _words(self, told: Told) -> Iterator[str]:
        seen: set[str | None] = set()
        if not all(text.strip() for text in told.systems):
            yield "an empty system text"
        for block in (block for turn in told.turns for block in turn.blocks):
            if block.kind == "text" and not block.text.strip():
                yield "an empty text"
            if block.kind in {"call", "result"}:
                if not re.fullmatch(self.ids, block.id or ""):
                    yield f"the id {block.id!r:.80}"
                if block.name is not None and not re.fullmatch(self.names, block.name):
                    yield f"the name {block.name!r:.80}"
            if block.kind == "call":
                if block.id and block.id in seen:
                    yield f"the id {block.id!r:.80} twice"
                seen.add(block.id)
                if not isinstance(json.loads(block.text), dict):
                    yield "arguments that are no object"


def _order(told: Told, *, alternates: bool) -> Iterator[str]:
    roles = [turn.role for turn in told.turns]
    if roles[:1] != ["user"]:
        yield f"the first to speak is {roles[:1]}"
    if any(not turn.blocks for turn in told.turns):
        yield "a turn that is empty"
    sides = ["model" if role == "model" else "user" for role in roles]
    if alternates and any(one == other for one, other in pairwise(sides)):
        yield "two turns of one side in a row"


def _pairs(told: Told) -> Iterator[str]:
    waiting: list[Block] = []
    for turn in told.turns:
        results = turn.of("result")
        # Results come first in what follows the calls; Anthropic refuses text before them.
        if list(turn.blocks[: len(results)]) != results:
            yield "something before the results"
        if sorted(str(each.id) for each in results) != sorted(str(each.id) for each in waiting):
            yield f"calls {[each.id for each in waiting]} are answered by {[each.id for each in results]}"
        names = [(each.name, call.name) for each, call in zip(results, waiting, strict=False) if each.name is not None]
        if any(one != other for one, other in names):
            yield f"results under other names: {names}"
        waiting = turn.of("call")
    if waiting:
        yield "calls without results at the end"


# --- how bodies are read ----------------------------------------------------------------------------------------------


def _chat(body: Mapping[str, Any]) -> Told:
    """A body in the form of OpenAI's chat completions, which others have taken over."""
    systems = [message["content"] for message in body["messages"] if message["role"] == "system"]
    turns: list[Turn] = []
    for message in body["messages"]:
        blocks = [*_chat_content(message.get("content") or ())]
        if message["role"] == "tool":
            block = Block("result", message["content"], message["tool_call_id"])
            if turns and turns[-1].role == "tool":
                turns[-1] = Turn("tool", (*turns[-1].blocks, block))
            else:
                turns.append(Turn("tool", (block,)))
        elif message["role"] != "system":
            for call in message.get("tool_calls") or ():
                function = call["function"]
                blocks.append(Block("call", function["arguments"], call["id"], function["name"]))
            turns.append(Turn({"assistant": "model"}.get(message["role"], message["role"]), tuple(blocks)))
    return Told(tuple(systems), tuple(turns))


def _chat_content(content: str | Sequence[Mapping[str, Any]]) -> Iterator[Block]:
    if isinstance(content, str):
        yield Block("text", content)
        return
    for part in content:
        kinds: Any = {"text": "text", "image_url": "image", "thinking": "thought"}
        yield Block(kinds[part["type"]], part.get("text", ""))


def _anthropic(body: Mapping[str, Any]) -> Told:
    turns = [
        Turn({"assistant": "model"}.get(each["role"], each["role"]), tuple(map(_anthropic_block, each["content"])))
        for each in body["messages"]
    ]
    return Told(tuple(each["text"] for each in body.get("system", ())), tuple(turns))


def _anthropic_block(block: Mapping[str, Any]) -> Block:
    match block["type"]:
        case "text":
            return Block("text", block["text"])
        case "tool_use":
            return Block("call", json.dumps(block["input"], ensure_ascii=False), block["id"], block["name"])
        case "tool_result":
            return Block("result", block["content"], block["tool_use_id"])
        case "thinking":
            return Block("thought", block["thinking"])
        case kind:
            return Block({"image": "image"}[kind])  # type: ignore[arg-type]


def _anthropic_rules(body: Mapping[str, Any]) -> Iterator[str]:
    last = body["messages"][-1]
    if last["role"] == "assistant" and last["content"][-1].get("text", "").endswith((" ", "\n")):
        yield "final assistant content cannot end with trailing whitespace"
    names = [tool["name"] for tool in body.get("tools", ())]
    if len(set(names)) < len(names):
        yield "tool names must be unique"
    if not names and any("tool" in block["type"] for each in body["messages"] for block in each["content"]):
        yield "requests which include tool_use or tool_result blocks must define tools"
    if last["role"] == "user":  # others are no question
        yield from _said(anthropic_rules.refusal(body))


def _gemini(body: Mapping[str, Any]) -> Told:
    turns = [Turn(each["role"], tuple(map(_gemini_part, each["parts"]))) for each in body["contents"]]
    systems = body.get("system_instruction", {"parts": []})["parts"]
    # An earlier Gemini has no ids: calls and results are matched by their order.
    return Told(tuple(part["text"] for part in systems), tuple(_numbered(turns)))


def _numbered(turns: Iterable[Turn]) -> Iterator[Turn]:
    calls: list[str] = []
    for position, turn in enumerate(turns):
        blocks: list[Block] = []
        results = 0
        for block in turn.blocks:
            id_ = block.id
            if id_ is None and block.kind == "call":
                id_ = f"{position}.{len(blocks)}"
            elif id_ is None and block.kind == "result":
                id_ = calls[results] if results < len(calls) else "none"
            results += block.kind == "result"
            blocks.append(attrs.evolve(block, id=id_))
        calls = [str(block.id) for block in blocks if block.kind == "call"]
        yield Turn(turn.role, tuple(blocks))


def _gemini_part(part: Mapping[str, Any]) -> Block:
    if "function_call" in part:
        call = part["function_call"]
        return Block("call", json.dumps(call["args"], ensure_ascii=False), call.get("id"), call["name"])
    if "function_response" in part:
        response = part["function_response"]
        shown: Any = response["response"]
        text = shown["content"] if shown.keys() == {"content"} else json.dumps(shown, ensure_ascii=False)
        return Block("result", text, response.get("id"), response["name"])
    if "inline_data" in part:
        return Block("image")
    # litellm adds a blank to a picture, and Gemini takes it
    return Block("thought" if part.get("thought") else "text", part["text"] if part["text"] != " " else "(blank)")


def _gemini_rules(body: Mapping[str, Any]) -> Iterator[str]:
    before: Mapping[str, Any] = {"parts": []}
    for content in body["contents"]:
        kinds = [{"function_call", "function_response"} & part.keys() for part in content["parts"]]
        if {"function_call"} in kinds and before.get("role") != "user":
            yield "a function call turn must come after a user turn or a function response turn"
        if {"function_response"} in kinds and any(kind != {"function_response"} for kind in kinds):
            yield "a function response turn with other parts"
        before = content
    if before["role"] == "user":
        yield from _said(gemini_rules.refusal(body, "gemini-3-pro" if _knows_ids(body) else "gemini-2.5-flash"))


def _knows_ids(body: Mapping[str, Any]) -> bool:
    parts = [part for content in body["contents"] for part in content["parts"]]
    return any("id" in part.get("function_call", {}) for part in parts)


def _bedrock(body: Mapping[str, Any]) -> Told:
    turns = [
        Turn({"assistant": "model"}.get(each["role"], each["role"]), tuple(map(_bedrock_block, each["content"])))
        for each in body["messages"]
    ]
    return Told(tuple(each["text"] for each in body.get("system", ())), tuple(turns))


def _bedrock_block(block: Mapping[str, Any]) -> Block:
    if "toolUse" in block:
        call = block["toolUse"]
        return Block("call", json.dumps(call["input"], ensure_ascii=False), call["toolUseId"], call["name"])
    if "toolResult" in block:
        result = block["toolResult"]
        return Block("result", "".join(each.get("text", "") for each in result["content"]), result["toolUseId"])
    if "text" in block:
        return Block("text", block["text"])
    return Block("image" if "image" in block else {"reasoningContent": "thought"}[next(iter(block))])  # type: ignore[arg-type]


def _bedrock_rules(body: Mapping[str, Any]) -> Iterator[str]:
    results = [block["toolResult"] for each in body["messages"] for block in each["content"] if "toolResult" in block]
    if not all("image" in each or each["text"].strip() for result in results for each in result["content"]):
        yield "the text field in the ContentBlock object is blank"
    if results and "toolConfig" not in body:
        yield "the toolConfig field must be defined when using toolUse and toolResult content blocks"


def _openai_rules(body: Mapping[str, Any]) -> Iterator[str]:
    yield from _said(model_server.refusal(body))


def _said(refusal: str | None) -> list[str]:
    """What one of the servers on loopback says, whose rules were written for themselves."""
    return [] if refusal is None else [refusal]


def _mistral_rules(body: Mapping[str, Any]) -> Iterator[str]:
    """Mistral's own validators: of the 13th version, and of the one before it, whose rule for ids the API still has."""
    mode = ValidationMode.agnostic if body["messages"][-1]["role"] == "assistant" else ValidationMode.serving
    request = ChatCompletionRequest.from_openai(body["messages"], body.get("tools"), model=body["model"])
    for validator in (MistralRequestValidatorV13(mode), MistralRequestValidatorV11(mode)):
        try:
            validator.validate_request(request)
        except Exception as error:  # noqa: BLE001  # of several unrelated kinds
            yield f"{type(validator).__name__}: {error}"


JUDGES: Final[Mapping[str, Judge]] = {
    "openai": Judge(_chat, ids=r".{1,40}", extra=_openai_rules),
    "anthropic": Judge(
        _anthropic, ids=r"[a-zA-Z0-9_-]+", names=r"[a-zA-Z0-9_-]{1,128}", alternates=True, extra=_anthropic_rules
    ),
    "gemini": Judge(_gemini, ids=r".+", names=r"[a-zA-Z_][a-zA-Z0-9_.:-]{0,63}", extra=_gemini_rules),
    "mistral": Judge(_chat, ids=r"[a-zA-Z0-9]{9}", extra=_mistral_rules),
    "cohere": Judge(_chat, ids=r".+"),
    "bedrock": Judge(_bedrock, ids=r"[a-zA-Z0-9_.:-]{1,64}", alternates=True, extra=_bedrock_rules),
}
"""By the provider in litellm's name of a model."""
