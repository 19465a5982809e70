"""A model server on loopback that speaks Anthropic's Messages API and says what it is told to.

What Anthropic would refuse it refuses (`anthropic_rules`), whatever is scripted. Thoughts are signed when told.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, Final

from tests.anthropic_rules import Block, Told, beginning, refusal
from tests.model_server import DISCONNECT, HANG, Events, ModelServer, Status, serving, streamed, words


def text(said: str) -> Block:
    """What the model says."""
    return {"type": "text", "text": said}


def thinking(thought: str) -> Block:
    """What the model thinks; signed when it is told."""
    return {"type": "thinking", "thinking": thought}


def redacted(data: str) -> Block:
    """What the model thinks, and nobody may read."""
    return {"type": "redacted_thinking", "data": data}


def tool_use(id_: str, name: str, arguments: Mapping[str, Any]) -> Block:
    """A call."""
    return {"type": "tool_use", "id": id_, "name": name, "input": arguments}


def error(
    status: int, message: str, *, kind: str = "invalid_request_error", headers: Mapping[str, str] | None = None
) -> Status:
    """An error in Anthropic's form."""
    body = {"type": "error", "error": {"type": kind, "message": message}, "request_id": "req_1"}
    return Status(status, body, headers or {})


class AnthropicServer(ModelServer):
    """What it was asked, what it has signed (`told`, thoughts by their signatures), and what it will say.

    `script` takes text, a list of blocks, an HTTP answer, HANG, DISCONNECT, or a `Partly` of the first two.
    """

    def __init__(self, url: str) -> None:
        super().__init__(url.removesuffix("/v1"))
        self.told: Final[dict[str, Told]] = {}

    def answer(self, path: str, request: Mapping[str, Any]) -> Status | Events | str:
        """The next answer to a request for *path*: an HTTP answer, a stream of events, HANG or DISCONNECT."""
        assert path.endswith("/v1/messages"), path
        refused = refusal(request, self.told)
        if refused is not None:
            return error(400, refused)
        answer = self.next_scripted()
        if isinstance(answer, Status) or answer in (HANG, DISCONNECT):
            unmade: Status | str = answer
            return unmade
        if request.get("stream"):
            return streamed(answer, lambda whole: list(_events(self._message(whole, request))))
        return Status(200, self._message(answer, request))

    def key_in(self, path: str, headers: Mapping[str, str]) -> str:
        """The key that came with a request."""
        return headers.get("x-api-key", "")

    def framed(self, data: str) -> bytes:
        """An event of a stream, which has a name here."""
        named = re.match(r'{"type": "(\w+)"', data)
        return (f"event: {named[1]}\n".encode() if named else b"") + super().framed(data)

    def _message(self, answer: str | Sequence[Block], request: Mapping[str, Any]) -> dict[str, Any]:
        blocks: list[Block] = []
        for block in [text(answer)] if isinstance(answer, str) else answer:
            so_far = {**request, "messages": [*request["messages"], {"role": "assistant", "content": blocks}]}
            blocks.append(self._signed(block, beginning(so_far)))
        calls = any(block["type"] == "tool_use" for block in blocks)
        return {
            "id": "msg_1",
            "type": "message",
            "role": "assistant",
            "model": request["model"],
            "content": blocks,
            "stop_reason": "tool_use" if calls else "end_turn",
            "stop_sequence": None,
            "usage": {
                "input_tokens": 7,
                "cache_creation_input_tokens": 0,
                "cache_read_input_tokens": 4,
                "output_tokens": 7,
            },
        }

    def _signed(self, block: Block, after: str) -> Block:
        if block["type"] == "thinking":
            made = hashlib.sha256(f"{len(self.told)} {block}".encode()).hexdigest()
            block = {**block, "signature": f"{made}/+=="}
            self.told[block["signature"]] = Told(block, after)
        elif block["type"] == "redacted_thinking":
            self.told[block["data"]] = Told(block, after)
        return block


def anthropic_server() -> AbstractAsyncContextManager[AnthropicServer]:
    """Serve on a free port of loopback until left."""
    return serving(AnthropicServer)


def _events(message: Mapping[str, Any]) -> Iterator[str]:
    """A message as Anthropic streams it: its beginning, each block in pieces, and the reason of its end."""
    begun = {**message, "content": [], "stop_reason": None, "usage": {**message["usage"], "output_tokens": 1}}
    yield json.dumps({"type": "message_start", "message": begun})
    for index, block in enumerate(message["content"]):
        start, deltas = _pieces(block)
        yield json.dumps({"type": "content_block_start", "index": index, "content_block": start})
        for delta in deltas:
            yield json.dumps({"type": "content_block_delta", "index": index, "delta": delta})
        yield json.dumps({"type": "content_block_stop", "index": index})
    ended = {"stop_reason": message["stop_reason"], "stop_sequence": None}
    yield json.dumps({"type": "message_delta", "delta": ended, "usage": {"output_tokens": 7}})
    yield json.dumps({"type": "message_stop"})


def _pieces(block: Block) -> tuple[Block, list[Block]]:
    """How a block begins, and what follows."""
    if block["type"] == "text":
        return {**block, "text": ""}, [{"type": "text_delta", "text": word} for word in words(block["text"])]
    if block["type"] == "thinking":
        deltas = [{"type": "thinking_delta", "thinking": word} for word in words(block["thinking"])]
        signed = {"type": "signature_delta", "signature": block["signature"]}
        return {**block, "thinking": "", "signature": ""}, [*deltas, signed]
    if block["type"] == "tool_use":
        raw = json.dumps(block["input"])
        parts = ["", raw[: len(raw) // 2], raw[len(raw) // 2 :]]
        return {**block, "input": {}}, [{"type": "input_json_delta", "partial_json": part} for part in parts]
    return block, []
