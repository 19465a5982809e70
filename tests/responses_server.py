"""A model server on loopback that speaks OpenAI's Responses API, keeps what it was told, and says what it is told to.

Use it as a service that keeps a conversation's history::

    async with responses_server() as server:
        server.script("Hello.", calls(("c1", "look_up", '{"order_id": "404"}')), "It is on its way.")
        engine = LiteLLMEngine("openai/test", api_key="k", api_base=server.url, service_history=True)
        ...
        assert server.inputs == [[user("Hi")], [user("Where is order 404?")], [output("c1", "sent")]]
        assert server.chained == [None, "resp_1", "resp_2"]

It builds the whole context of each request from the responses or the conversation that it kept, and refuses what
OpenAI would refuse, with its status, code and words: so a test whose history is broken fails. It is stricter in one
thing: a result sent twice is refused.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, Final, TypeAlias

import attrs

from tests.model_server import (
    DISCONNECT,
    HANG,
    Answer,
    Events,
    ModelServer,
    Partly,
    Status,
    error,
    refused_form,
    serving,
    streamed,
    words,
)

Item: TypeAlias = dict[str, Any]
"""An item of a request's input or of a response's output."""


@attrs.frozen
class Unheard:
    """The service makes this answer and keeps it, and its line is cut before the client has heard of it."""

    answer: Answer


Said: TypeAlias = "Answer | Unheard"
"""Text to answer with, `calls`, fields of a response, an HTTP answer, HANG, DISCONNECT; or one that nobody hears."""


def user(text: str) -> Item:
    """A user's message, as it is sent."""
    return {"role": "user", "content": text}


def assistant(text: str) -> Item:
    """A model's message, as it is sent when a history is told anew."""
    return {"role": "assistant", "content": text}


def call(id_: str, name: str, arguments: str) -> Item:
    """A call, as it is sent when a history is told anew."""
    return {"type": "function_call", "call_id": id_, "name": name, "arguments": arguments}


def output(id_: str, text: str) -> Item:
    """A call's result, as it is sent."""
    return {"type": "function_call_output", "call_id": id_, "output": text}


def calls(*named: tuple[str, str, str], text: str | None = None) -> dict[str, Any]:
    """An answer that calls tools (each an id, a name and arguments as text), perhaps after some text."""
    said = [] if text is None else [message(text)]
    return {"output": [*said, *(made_call(*each) for each in named)]}


def message(text: str, **fields: Any) -> Item:
    """A text as an item of an answer's output."""
    content = [{"type": "output_text", "text": text, "annotations": [], "logprobs": []}]
    return {"type": "message", "id": "msg_1", "status": "completed", "role": "assistant", "content": content, **fields}


def made_call(id_: str, name: str, arguments: str) -> Item:
    """A call as an item of an answer's output."""
    return {"id": f"fc_{id_}", "status": "completed", **call(id_, name, arguments)}


def reasoning(**fields: Any) -> Item:
    """A model's thoughts as an item of an answer's output; by themselves only an id."""
    return {"type": "reasoning", "id": "rs_1", "summary": [], **fields}


class ResponsesServer(ModelServer):
    """What it was asked, what it keeps, and what it will say.

    `script` takes text, `calls`, fields of a response (``{"output": [...], "status": "incomplete"}``), an HTTP answer
    (`error`, `Status`), HANG, DISCONNECT, or one of these as `Unheard`. Chat completions are answered too, from the
    same script.

    Attributes:
        url: The address for *api_base*.
        requests: The bodies of all requests since the last `script`, those that were refused too.
        keys: Their bearer tokens.
        kept: For each response that can be gone on with, by its id: the items of its whole context, its own included.
        conversations: For each conversation, by its id, its items.
    """

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.kept: Final[dict[str, tuple[Item, ...]]] = {}
        self.conversations: Final[dict[str, tuple[Item, ...]]] = {}
        self._numbers: Final = itertools.count(1)

    def script(self, *answers: Said) -> None:
        """Answer the next requests with these, in order, and forget what was asked before; what is kept stays."""
        super().script()
        self._answers.extend(answers)

    @property
    def inputs(self) -> list[list[Item]]:
        """The new items of each request."""
        return [request["input"] for request in self.requests]

    @property
    def chained(self) -> list[str | None]:
        """What each request named: the response to go on from, or the conversation."""
        return [request.get("previous_response_id") or request.get("conversation") for request in self.requests]

    def new_conversation(self, *items: Item) -> str:
        """Begin a conversation, as ``POST /conversations`` does; its id."""
        id_ = f"conv_{next(self._numbers)}"
        self.conversations[id_] = items
        return id_

    def forget(self, id_: str | None = None) -> None:
        """Forget this response or conversation, as after its time or when it was deleted, or all of them."""
        for kept in (self.kept, self.conversations):
            for each in [id_] if id_ is not None else list(kept):
                kept.pop(each, None)

    def answer(self, path: str, request: Mapping[str, Any]) -> Status | Events | str:
        """The next answer to a request for *path*: an HTTP answer, a stream of events, HANG or DISCONNECT."""
        if not path.endswith("/responses"):
            return super().answer(path, request)
        refused = self.refusal(request)
        if refused is not None:
            return refused
        scripted: Any = self.next_scripted()
        unheard = isinstance(scripted, Unheard)
        answer: Any = scripted.answer if unheard else scripted
        if isinstance(answer, Status) or answer in (HANG, DISCONNECT):
            unmade: Status | str = answer
            return unmade
        whole = answer.answer if isinstance(answer, Partly) else answer
        response = self._response({"output": [message(whole)]} if isinstance(whole, str) else whole, request)
        if request.get("stream") and not unheard:
            told = attrs.evolve(answer, answer=response) if isinstance(answer, Partly) else response
            return streamed(told, _events)
        return DISCONNECT if unheard else Status(200, response)

    def context(self, request: Mapping[str, Any]) -> tuple[Item, ...]:
        """All items that the model would see."""
        before: tuple[Item, ...] = ()
        if request.get("previous_response_id") is not None:
            before = self.kept[request["previous_response_id"]]
        elif request.get("conversation") is not None:
            before = self.conversations[request["conversation"]]
        return (*before, *request["input"])

    def _response(self, answer: Mapping[str, Any], request: Mapping[str, Any]) -> dict[str, Any]:
        id_ = f"resp_{next(self._numbers)}"
        conversation = request.get("conversation")
        response = {
            "id": id_,
            "object": "response",
            "created_at": 1,
            "status": "completed",
            "error": None,
            "incomplete_details": None,
            "instructions": request.get("instructions"),
            "model": request["model"],
            "output": [],
            "previous_response_id": request.get("previous_response_id"),
            "conversation": conversation and {"id": conversation},
            "store": request.get("store", True),
            "usage": {
                "input_tokens": 11,
                "input_tokens_details": {"cached_tokens": 4},
                "output_tokens": 7,
                "output_tokens_details": {"reasoning_tokens": 2},
                "total_tokens": 18,
            },
            **answer,
        }
        if response["store"] and response["status"] in {"completed", "incomplete"}:
            context = (*self.context(request), *(response["output"] or ()))
            self.kept[response["id"]] = context
            if conversation is not None:
                self.conversations[conversation] = context
        return response

    def refusal(self, request: Mapping[str, Any]) -> Status | None:
        """What OpenAI would answer where it refuses the request: for its form, then for what it refers to."""
        fault = next(_faults(request), None)
        if fault is not None:
            return error(400, fault)
        previous, conversation = request.get("previous_response_id"), request.get("conversation")
        if previous is not None and conversation is not None:
            text = (
                "Mutually exclusive parameters: ''. Ensure you are only providing one of: 'pre..._id' or"
                " 'conversation'."
            )
            return error(400, text, code="mutually_exclusive_parameters")
        if previous is not None and previous not in self.kept:
            return error(400, f"Previous response with id '{previous}' not found.", code="previous_response_not_found")
        if conversation is not None and conversation not in self.conversations:
            return error(404, f"Conversation with id '{conversation}' not found.")
        unpaired = _refused_pairs(self.context(request))
        return None if unpaired is None else error(400, unpaired)


def _events(response: Mapping[str, Any]) -> list[str]:
    """A response as OpenAI streams it: its beginning, each item's words, and the whole at the end."""
    begun = {**response, "status": "in_progress", "output": [], "usage": None}
    told: list[dict[str, Any]] = [
        {"type": f"response.{kind}", "response": begun} for kind in ("created", "in_progress")
    ]
    for index, item in enumerate(response["output"] or ()):
        place = {"output_index": index, "item_id": item.get("id")}
        told.append({"type": "response.output_item.added", "item": item, **place})
        for number, part in enumerate(item.get("summary") or ()):
            told += [
                {"type": "response.reasoning_summary_text.delta", "delta": word, "summary_index": number, **place}
                for word in words(part["text"])
            ]
        for number, part in enumerate(item.get("content") or ()):
            kind = {"refusal": "refusal", "reasoning_text": "reasoning_text"}.get(part["type"], "output_text")
            told += [
                {"type": f"response.{kind}.delta", "delta": word, "content_index": number, "logprobs": [], **place}
                for word in words(part.get("text") or part.get("refusal") or "")
            ]
        told += [
            {"type": "response.function_call_arguments.delta", "delta": word, **place}
            for word in words(item.get("arguments") or "")
        ]
        told.append({"type": "response.output_item.done", "item": item, **place})
    told.append({"type": f"response.{response['status']}", "response": response})
    return [json.dumps({**event, "sequence_number": number}) for number, event in enumerate(told)]


def responses_server() -> AbstractAsyncContextManager[ResponsesServer]:
    """Serve on a free port of loopback until left."""
    return serving(ResponsesServer)


_PARAMETERS: Final = {
    "include",
    "input",
    "instructions",
    "max_output_tokens",
    "metadata",
    "model",
    "parallel_tool_calls",
    "previous_response_id",
    "conversation",
    "reasoning",
    "service_tier",
    "store",
    "stream",
    "temperature",
    "text",
    "tool_choice",
    "tools",
    "top_p",
    "truncation",
}
_FIELDS: Final[Mapping[str, tuple[set[str], set[str]]]] = {
    "message": ({"role", "content"}, {"type", "phase"}),
    "function_call": ({"type", "call_id", "name", "arguments"}, {"id", "status"}),
    "function_call_output": ({"type", "call_id", "output"}, {"id", "status"}),
    "reasoning": ({"type", "summary"}, {"id", "encrypted_content", "content"}),
    "compaction": ({"type", "encrypted_content"}, {"id"}),
}
"""The fields that an item must have, and those that it may."""

_PARTS: Final[Mapping[str, set[str]]] = {
    "input_text": {"text"},
    "input_image": {"image_url", "file_id", "detail"},
    "input_audio": {"input_audio"},
    "input_file": {"file_data", "file_id", "file_url", "filename"},
}
_IN_OUTPUTS: Final = {"input_text", "input_image", "input_file"}
"""What a call's result may hold."""

_NAME: Final = re.compile(r"[a-zA-Z0-9_-]{1,64}")


def _faults(request: Mapping[str, Any]) -> Iterator[str]:
    """What is wrong with the form of a request."""
    for name in set(request) - _PARAMETERS:
        yield f"Unknown parameter: '{name}'."
    if not isinstance(request.get("instructions", ""), str):
        yield "Invalid type for 'instructions': expected a string"
    if not request["input"] and request.get("previous_response_id") is None and request.get("conversation") is None:
        yield 'One of "input" or "previous_response_id" or "prompt" or "conversation" must be provided.'
    for position, item in enumerate(request["input"]):
        yield from _item_faults(item, f"input[{position}]")
    for position, tool in enumerate(request.get("tools", ())):
        yield from _tool_faults(tool, f"tools[{position}]")
    for position, item in enumerate(request["input"]):
        if item.get("type") == "reasoning" and not any(map(_is_of_the_model, request["input"][position + 1 :][:1])):
            yield f"Item '{item.get('id')}' of type 'reasoning' was provided without its required following item."
    form = request.get("text", {}).get("format", {"type": "text"})
    if form["type"] == "json_schema":
        yield from _missing(form, {"name", "schema"}, "text.format")
        refused = refused_form(form, "text.format")
        if refused is not None:
            yield refused


def _is_of_the_model(item: Item) -> bool:
    return item.get("role") == "assistant" or item.get("type") in {"function_call", "reasoning"}


def _missing(fields: Mapping[str, Any], needed: set[str], path: str) -> Iterator[str]:
    for name in sorted(needed - set(fields)):
        yield f"Missing required parameter: '{path}.{name}'."


def _unknown(fields: Mapping[str, Any], known: set[str], path: str) -> Iterator[str]:
    for name in sorted(set(fields) - known):
        yield f"Unknown parameter: '{path}.{name}'."


def _item_faults(item: Mapping[str, Any], path: str) -> Iterator[str]:
    kind = item.get("type", "message")
    if kind not in _FIELDS:
        yield f"Invalid value: '{kind}'. - '{path}'"
        return
    needed, allowed = _FIELDS[kind]
    yield from _missing(item, needed, path)
    yield from _unknown(item, needed | allowed, path)
    if kind == "message":
        yield from _message_faults(item, path)
    if not 0 < len(item.get("call_id", "id")) <= 64:
        yield f"Invalid '{path}.call_id': string of wrong length. Expected a string with 1 to 64 characters."
    if not _NAME.fullmatch(item.get("name", "name")):
        yield f"Invalid '{path}.name': string does not match pattern. Expected '^[a-zA-Z0-9_-]+$'."
    if not isinstance(item.get("arguments", ""), str):
        yield f"Invalid type for '{path}.arguments': expected a string"
    if not isinstance(item.get("output", ""), str | list):
        yield f"Invalid type for '{path}.output': expected a string or an array"
    if isinstance(item.get("output"), list):
        yield from _part_faults(item["output"], _IN_OUTPUTS, f"{path}.output")
    if kind == "reasoning" and not item.get("encrypted_content") and not item.get("content"):
        yield f"Item with id '{item.get('id')}' not found."


def _message_faults(item: Mapping[str, Any], path: str) -> Iterator[str]:
    role, content = item.get("role"), item.get("content")
    if role not in {"assistant", "user"}:  # OpenAI takes others too, and what they say belongs to the instructions
        yield f"Invalid value: '{role}'. - '{path}'"
    if "phase" in item and role != "assistant":
        yield f"Unknown parameter: '{path}.phase'."
    if isinstance(content, list):
        yield from _part_faults(content, set() if role == "assistant" else set(_PARTS), f"{path}.content")


def _part_faults(parts: Sequence[Mapping[str, Any]], kinds: set[str], path: str) -> Iterator[str]:
    for part in parts:
        kind = part["type"]
        if kind not in kinds:
            yield f"Invalid value: '{kind}'. - '{path}'"
        yield from _unknown(part, {"type", *_PARTS.get(kind, ())}, path)
        if "file_data" in part:
            yield from _missing(part, {"filename"}, path)


def _tool_faults(tool: Mapping[str, Any], path: str) -> Iterator[str]:
    yield from _missing(tool, {"type", "name", "parameters"}, path)
    if tool.get("strict") is not False:
        yield f"Invalid schema for function '{tool.get('name')}': 'additionalProperties' is required to be supplied."
    if not _NAME.fullmatch(tool.get("name", "")) or tool.get("parameters", {}).get("type") != "object":
        yield f"Invalid schema for function '{tool.get('name')}'"


def _refused_pairs(context: Sequence[Item]) -> str | None:
    opened: dict[str, bool] = {}
    for item in context:
        id_ = item.get("call_id", "")
        if item.get("type") == "function_call":
            opened[id_] = True
        elif item.get("type") == "function_call_output":
            if not opened.get(id_):
                return f"No tool call found for function call output with call_id {id_}."
            opened[id_] = False
    unanswered = [id_ for id_, is_open in opened.items() if is_open]
    return f"No tool output found for function call {unanswered[0]}." if unanswered else None
