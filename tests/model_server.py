"""A model server on loopback that speaks OpenAI's chat completions and says what it is told to.

What OpenAI would refuse it refuses, with 400 and in OpenAI's words, whatever is scripted: such a prompt fails a test.
"""

from __future__ import annotations

import json
import re
import socket
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from typing import Any, Final, TypeAlias, TypeVar

import anyio
import anyio.abc
import attrs

HANG: Final = "<the server never answers>"
DISCONNECT: Final = "<the server hangs up>"


@attrs.frozen
class Status:
    """An HTTP answer as it is: an error, or a body that is no JSON."""

    status: int
    body: Any = None
    headers: Mapping[str, str] = attrs.field(factory=dict)


Answer: TypeAlias = "str | Mapping[str, Any] | Status"
"""Text to answer with, an assistant's message, an HTTP answer, HANG or DISCONNECT."""


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
    """What it was asked (`requests`, bodies; `keys`, the bearer tokens) and what it will say (`script`)."""

    def __init__(self, url: str) -> None:
        self.url: Final = url
        self.requests: Final[list[dict[str, Any]]] = []
        self.keys: Final[list[str]] = []
        self._answers: Final[deque[Any]] = deque()

    def script(self, *answers: Answer) -> None:
        """Answer the next requests with these, in order, and forget what came before."""
        self._answers.clear()
        self._answers.extend(answers)
        self.requests.clear()
        self.keys.clear()

    async def serve(self, stream: anyio.abc.SocketStream) -> None:
        """Answer one request, and hang up."""
        async with stream:
            path, headers, body = await _read(stream)
            request = json.loads(body)
            self.requests.append(request)
            self.keys.append(headers.get("authorization", "").removeprefix("Bearer "))
            answer = self.answer(path, request)
            if answer == HANG:
                await stream.receive()  # returns, with an error, when the client has gone
            if isinstance(answer, Status):
                await stream.send(_http(answer))

    def answer(self, path: str, request: Mapping[str, Any]) -> Status | str:
        """The next answer to a request for *path*: an HTTP answer, HANG or DISCONNECT."""
        assert path.endswith("/chat/completions"), path
        refused = refusal(request)
        if refused is not None:
            return error(400, refused)
        answer = self.next_scripted()
        return answer if isinstance(answer, Status) or answer in (HANG, DISCONNECT) else _completion(answer, request)

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
        _refused_order(messages),
        _refused_tools(request),
    )
    return next((reason for reason in reasons if reason is not None), None)


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
        return next(filter(None, (_refused_part(part, f"{path}.content") for part in content)), None)
    if calls is not None and not calls:
        return f"[] is too short - '{path}.tool_calls'"
    return next(filter(None, (_refused_call(call, f"{path}.tool_calls", thinks) for call in calls or ())), None)


def _refused_part(part: Mapping[str, Any], path: str) -> str | None:
    kind = part.get("type")
    if kind not in _PARTS:
        return f"Invalid value: '{kind}'. Supported values are: {sorted(_PARTS)}. - '{path}'"
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
