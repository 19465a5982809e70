"""A model server on loopback that speaks OpenAI's chat completions and says what it is told to.

What OpenAI would refuse it refuses, with 400 and in OpenAI's words, whatever is scripted: such a prompt fails a test.
"""

from __future__ import annotations

import itertools
import json
import re
import socket
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from typing import Any, Final, TypeAlias, TypeVar

import anyio
import anyio.abc
import attrs

HANG: Final = "<the server never answers>"
DISCONNECT: Final = "<the server hangs up>"
END: Final = "<the server ends its stream as if it were whole>"
DRIP: Final = "<the server's stream never ends>"


@attrs.frozen
class Status:
    """An HTTP answer as it is: an error, or a body that is no JSON."""

    status: int
    body: Any = None
    headers: Mapping[str, str] = attrs.field(factory=dict)


@attrs.frozen
class Partly:
    """A streamed answer of which so many events come before *then*: HANG, DISCONNECT, END, DRIP, or an event's data.

    Data comes instead of the next event, and then the others do, as if nothing had been.
    """

    answer: Any
    events: int
    then: str


@attrs.frozen
class Events:
    """A streamed answer: the data of its events, and what comes after so many of them."""

    data: Sequence[str]
    count: int
    then: str


Answer: TypeAlias = "str | Mapping[str, Any] | Sequence[Mapping[str, Any]] | Status | Partly"
"""Text to answer with, what else a model says, an HTTP answer, HANG, DISCONNECT, or a stream that goes wrong."""


def error(status: int, message: str, *, code: str | None = None, headers: Mapping[str, str] | None = None) -> Status:
    """An error in OpenAI's form."""
    body = {"error": {"message": message, "type": "invalid_request_error", "param": None, "code": code}}
    return Status(status, body, headers or {})


def tool_calls(*calls: tuple[str, str, str], **fields: Any) -> dict[str, Any]:
    """An assistant's message with calls, each an id, a name and arguments as text."""
    return {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": id_, "type": "function", "function": {"name": name, "arguments": arguments}}
            for id_, name, arguments in calls
        ],
        **fields,
    }


class ModelServer:
    """What it was asked (`requests`, bodies; `keys`, those that came with them) and what it will say (`script`).

    *left* is set once a client has hung up on a stream that hangs.
    """

    def __init__(self, url: str) -> None:
        self.url: Final = url
        self.requests: Final[list[dict[str, Any]]] = []
        self.keys: Final[list[str]] = []
        self.left = anyio.Event()
        self._answers: Final[deque[Any]] = deque()

    def script(self, *answers: Answer) -> None:
        """Answer the next requests with these, in order, and forget what came before."""
        self._answers.clear()
        self._answers.extend(answers)
        self.requests.clear()
        self.keys.clear()
        self.left = anyio.Event()

    async def serve(self, stream: anyio.abc.SocketStream) -> None:
        """Answer one request, and hang up."""
        async with stream:
            path, headers, body = await _read(stream)
            request = json.loads(body)
            self.requests.append(request)
            self.keys.append(self.key_in(path, headers))
            answer = self.answer(path, request)
            if answer == HANG:
                await stream.receive()  # returns, with an error, when the client has gone
            if isinstance(answer, Events):
                await self._tell(stream, answer)
            if isinstance(answer, Status):
                await stream.send(_http(answer))

    async def _tell(self, stream: anyio.abc.SocketStream, events: Events) -> None:
        await stream.send(_STREAM_HEAD)
        told: Iterable[str] = events.data[: events.count]
        if events.then == DRIP:
            told = itertools.cycle(events.data[1 : events.count])
        elif events.then not in {HANG, DISCONNECT, END}:
            told = [*told, events.then, *events.data[events.count + 1 :]]
        for data in told:
            await stream.send(_chunk(self.framed(data)))
        if events.then == HANG:
            with suppress(anyio.BrokenResourceError, anyio.EndOfStream):
                await stream.receive()
            self.left.set()
        elif events.then != DISCONNECT:
            await stream.send(_chunk(b""))

    def answer(self, path: str, request: Mapping[str, Any]) -> Status | Events | str:
        """The next answer to a request for *path*: an HTTP answer, a stream of events, HANG or DISCONNECT."""
        assert path.endswith("/chat/completions"), path
        refused = refusal(request)
        if refused is not None:
            return error(400, refused)
        answer = self.next_scripted()
        if isinstance(answer, Status) or answer in (HANG, DISCONNECT):
            unmade: Status | str = answer
            return unmade
        if request.get("stream"):
            return streamed(answer, lambda whole: _chunks(_completion(whole, request).body, request))
        return _completion(answer, request)

    def key_in(self, path: str, headers: Mapping[str, str]) -> str:
        """The key that came with a request."""
        return headers.get("authorization", "").removeprefix("Bearer ")

    def framed(self, data: str) -> bytes:
        """An event of a stream, as it is sent."""
        return f"data: {data}\n\n".encode()

    def next_scripted(self) -> Any:
        """What the script says next, off the script; an HTTP error that says so where it has come to its end."""
        return self._answers.popleft() if self._answers else error(500, "the test's script has come to its end")


_Server = TypeVar("_Server", bound=ModelServer)


@asynccontextmanager
async def serving(kind: Callable[[str], _Server]) -> AsyncIterator[_Server]:
    """Serve on a free port of loopback until left."""
    async with await anyio.create_tcp_listener(local_host="127.0.0.1", family=socket.AF_INET) as listener:
        port = listener.extra(anyio.abc.SocketAttribute.local_port)
        server = kind(f"http://127.0.0.1:{port}/v1")

        async def serve(stream: anyio.abc.SocketStream) -> None:
            with suppress(
                anyio.EndOfStream, anyio.BrokenResourceError, anyio.ClosedResourceError
            ):  # the client has gone
                await server.serve(stream)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(listener.serve, serve)
            yield server
            tasks.cancel_scope.cancel()


def model_server() -> AbstractAsyncContextManager[ModelServer]:
    """Serve chat completions on a free port of loopback until left."""
    return serving(ModelServer)


async def _read(stream: anyio.abc.SocketStream) -> tuple[str, dict[str, str], bytes]:
    data = b""
    while b"\r\n\r\n" not in data:
        data += await stream.receive()
    head, _, body = data.partition(b"\r\n\r\n")
    request, *lines = head.decode("latin-1").split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    while len(body) < int(headers["content-length"]):
        body += await stream.receive()
    return request.split(" ")[1], headers, body


def _http(answer: Status) -> bytes:
    body = answer.body if isinstance(answer.body, bytes) else json.dumps(answer.body).encode()
    headers = {"content-type": "application/json", "content-length": str(len(body)), "connection": "close"}
    head = "".join(f"{name}: {value}\r\n" for name, value in {**headers, **answer.headers}.items())
    return f"HTTP/1.1 {answer.status} Scripted\r\n{head}\r\n".encode() + body


def streamed(answer: Any, events: Callable[[Any], list[str]]) -> Events:
    """The stream of an answer whose data, were it whole, *events* gives."""
    if isinstance(answer, Partly):
        return Events(events(answer.answer), answer.events, answer.then)
    data = events(answer)
    return Events(data, len(data), END)


def words(text: str) -> list[str]:
    """The text in pieces, as models stream it."""
    return re.findall(r"\s*\S+|\s+", text)


_STREAM_HEAD: Final = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\nconnection: close\r\n\r\n"
)


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def _chunks(completion: Mapping[str, Any], request: Mapping[str, Any]) -> list[str]:
    """A completion as OpenAI streams it: a role, words, each call's name and then its arguments, the end, the usage."""
    choice = completion["choices"][0]
    message = choice["message"]
    deltas: list[dict[str, Any]] = [{"role": "assistant", "content": "", "refusal": None}]
    for name in ("reasoning_content", "refusal", "content"):
        deltas += [{name: word} for word in words(message.get(name) or "")]
    for index, call in enumerate(message.get("tool_calls") or ()):
        arguments = call["function"]["arguments"]
        half = len(arguments) // 2
        deltas.append({"tool_calls": [{"index": index, **call, "function": {**call["function"], "arguments": ""}}]})
        for part in (arguments[:half], arguments[half:]):
            deltas.append({"tool_calls": [{"index": index, "function": {"arguments": part}}]})
    head = {name: completion[name] for name in ("id", "created", "model", "service_tier")}
    head["object"] = "chat.completion.chunk"
    ended = [(delta, None) for delta in deltas] + [({}, choice["finish_reason"])]
    usage = {"usage": None} if (request.get("stream_options") or {}).get("include_usage") else {}
    chunks: list[dict[str, Any]] = [
        {**head, "choices": [{"index": 0, "delta": delta, "finish_reason": reason, "logprobs": None}], **usage}
        for delta, reason in ended
    ]
    if usage:
        chunks.append({**head, "choices": [], "usage": completion["usage"]})
    return [*map(json.dumps, chunks), "[DONE]"]


def _completion(answer: str | Mapping[str, Any], request: Mapping[str, Any]) -> Status:
    message = {"role": "assistant", "content": answer} if isinstance(answer, str) else dict(answer)
    message = {"refusal": None, "annotations": [], **message}
    reason = "tool_calls" if message.get("tool_calls") else "stop"
    return Status(
        200,
        {
            "id": "chatcmpl-1",
            "object": "chat.completion",
            "created": 1,
            "model": request["model"],
            "choices": [{"index": 0, "finish_reason": reason, "message": message, "logprobs": None}],
            "usage": {
                "prompt_tokens": 11,
                "completion_tokens": 7,
                "total_tokens": 18,
                "prompt_tokens_details": {"cached_tokens": 4, "audio_tokens": 0},
                "completion_tokens_details": {"reasoning_tokens": 2, "audio_tokens": 0},
            },
            "service_tier": "default",
        },
    )


_FIELDS: Final = {
    "system": {"role", "content", "name"},
    "user": {"role", "content", "name"},
    "assistant": {"role", "content", "name", "refusal", "audio", "tool_calls", "function_call"},
    "tool": {"role", "content", "tool_call_id"},
}
_BEYOND_OPENAI: Final = {"reasoning_content", "provider_specific_fields"}
"""What servers that think take back, and this one does too, from models whose name says so."""

_PARTS: Final = {
    "text": {"text"},
    "image_url": {"url", "detail"},
    "input_audio": {"data", "format"},
    "file": {"file_data", "file_id", "filename"},
}
_NAME: Final = re.compile(r"[a-zA-Z0-9_-]{1,64}")


def refusal(request: Mapping[str, Any]) -> str | None:
    """Why OpenAI would refuse the request, in its words; None where it would not."""
    messages: list[dict[str, Any]] = request["messages"]
    if not messages:
        return "[] is too short - 'messages'"
    thinks = "think" in request["model"]
    reasons = (
        *(_refused_message(message, f"messages[{position}]", thinks) for position, message in enumerate(messages)),
        refused_form((request.get("response_format") or {}).get("json_schema"), "response_format"),
        _refused_order(messages),
        _refused_tools(request),
    )
    return next((reason for reason in reasons if reason is not None), None)


def refused_form(form: Mapping[str, Any] | None, where: str) -> str | None:
    """Why OpenAI would refuse this form of an answer; a strict one has more to it."""
    if form is None:
        return None
    if not _NAME.fullmatch(form.get("name", "")):
        return f"Missing required parameter: '{where}.name'."
    fault = f"Invalid schema for {where} '{form['name']}'"
    if form["schema"].get("type") != "object":
        return (
            f"""{fault}: schema must be a JSON Schema of 'type: "object"', got 'type: {form["schema"].get("type")}'."""
        )
    return f"{fault}: not as strict mode wants it" if form.get("strict") and not _is_strict(form["schema"]) else None


def _is_strict(schema: Any) -> bool:
    """Whether every object in it has all of its fields required, and no others."""
    if isinstance(schema, list):
        return all(map(_is_strict, schema))
    if not isinstance(schema, dict):
        return True
    if "default" in schema or ("$ref" in schema and len(schema) > 1):
        return False
    if schema.get("type") == "object":
        named, required = set(schema.get("properties", ())), set(schema.get("required", ()))
        if schema.get("additionalProperties") is not False or named != required:
            return False
    return all(map(_is_strict, schema.values()))


def _refused_message(message: Mapping[str, Any], path: str, thinks: bool) -> str | None:
    role = message.get("role")
    if role not in _FIELDS:
        return f"Invalid value: '{role}' - '{path}.role'"
    content, calls = message.get("content"), message.get("tool_calls")
    unknown = set(message) - _FIELDS[role] - (_BEYOND_OPENAI if thinks else set())
    if unknown:
        return f"Additional properties are not allowed ({sorted(unknown)} were unexpected) - '{path}'"
    if content is None and not (role == "assistant" and calls):
        return f"Invalid value for 'content': expected a string, got null. - '{path}.content'"
    if isinstance(content, list):
        return next(filter(None, (_refused_part(part, role, f"{path}.content") for part in content)), None)
    if calls is not None and not calls:
        return f"[] is too short - '{path}.tool_calls'"
    return next(filter(None, (_refused_call(call, f"{path}.tool_calls", thinks) for call in calls or ())), None)


def _refused_part(part: Mapping[str, Any], role: str, path: str) -> str | None:
    kind = part.get("type")
    taken = set(_PARTS) if role == "user" else {"text"}
    if kind not in taken:
        return f"Invalid value: '{kind}'. Supported values are: {sorted(taken)}. - '{path}'"
    inner = part[kind] if kind != "text" else {"text": part["text"]}
    unknown = set(inner) - _PARTS[kind]
    if unknown:
        return f"Unknown parameter: {sorted(unknown)} - '{path}'"
    if kind == "input_audio" and inner["format"] not in {"wav", "mp3"}:
        return f"Invalid value: '{inner['format']}'. Supported values are: 'wav' and 'mp3'. - '{path}'"
    return None


def _refused_call(call: Mapping[str, Any], path: str, thinks: bool) -> str | None:
    if not thinks and set(call) != {"id", "type", "function"}:
        return f"Unknown parameter: {sorted(set(call) - {'id', 'type', 'function'})} - '{path}'"
    if not 0 < len(call["id"]) <= 40:
        return f"Invalid '{path}.id': expected a string of 1 to 40 characters"
    if not _NAME.fullmatch(call["function"]["name"]):
        return f"Invalid '{path}.function.name': string does not match pattern '^[a-zA-Z0-9_-]+$'"
    if not isinstance(call["function"]["arguments"], str):
        return f"Invalid type for '{path}.function.arguments': expected a string"
    return None


def _refused_order(messages: Iterable[Mapping[str, Any]]) -> str | None:
    unanswered: list[str] = []
    for message in messages:
        if message["role"] == "tool":
            if message.get("tool_call_id") not in unanswered:
                return "messages with role 'tool' must be a response to a preceeding message with 'tool_calls'."
            unanswered.remove(message["tool_call_id"])
            continue
        if unanswered:
            break
        unanswered = [call["id"] for call in message.get("tool_calls") or ()]
    if unanswered:
        return (
            "An assistant message with 'tool_calls' must be followed by tool messages responding to each"
            f" 'tool_call_id'. The following tool_call_ids did not have response messages: {', '.join(unanswered)}"
        )
    return None


def _refused_tools(request: Mapping[str, Any]) -> str | None:
    tools = request.get("tools")
    if tools is None:
        return "'tool_choice' is only allowed when 'tools' are specified." if "tool_choice" in request else None
    if not tools:
        return "[] is too short - 'tools'"
    for tool in tools:
        if not _NAME.fullmatch(tool["function"]["name"]) or tool["function"]["parameters"].get("type") != "object":
            return f"Invalid schema for function '{tool['function']['name']}'"
    return None
