"""The items of openai-agents' sessions, which are those of OpenAI's Responses API, as messages. Pure functions.

A model's items up to the next result or user message are one message: its texts, its calls, and all else, such as
reasoning or a search on the web, in `extra` as `engines.responses_form` keeps it and sends it back. Every kind of call
that has a ``call_id`` is a call here, and every kind of output a result, so that no pair is parted.
"""

from __future__ import annotations

import base64
import binascii
import datetime as dt
import json
from collections.abc import Iterable, Mapping
from typing import Any, Final, cast

import attrs

from chatflow.core.messages import (
    AudioPart,
    FilePart,
    ImagePart,
    Message,
    Part,
    Role,
    TextPart,
    ToolResult,
    UnknownPart,
)
from chatflow.core.pruning import Pairing
from chatflow.core.repairs import Row, sort_out
from chatflow.engines.responses_reply import from_responses_response
from chatflow.exceptions import EngineError
from chatflow.sqlite.openai_agents import StoredItem

Item = dict[str, Any]

_MODEL: Final = "openai/unknown"
"""Whose items these are: what only OpenAI understands goes back to it alone."""

_NOT_TO_BE_READ: Final = (AttributeError, EngineError, IndexError, KeyError, RecursionError, TypeError, ValueError)
"""What is raised by an item that is not as its kind is documented."""


@attrs.frozen
class Note:
    """What became of an item that is not simply a message now: its row, and why. *is_kept* where it is still there."""

    row: int
    reason: str
    is_kept: bool


@attrs.frozen
class Converted:
    """A conversation: its messages by the rules of `prune`, and what had to be done for that."""

    messages: tuple[Message, ...]
    notes: tuple[Note, ...]


def convert(items: Iterable[StoredItem], agent_name: str) -> Converted:
    """The conversation of these items, whose model's messages are those of *agent_name*."""
    reading = _Reading(agent_name)
    for item in items:
        reading.take(item)
    reading.end_reply()
    reading.end_results()
    found = sort_out(reading.rows)
    for verdict in found.verdicts:
        reason = f"{verdict.reason}; it stands in front now" if verdict.kind == "place" else verdict.reason
        reading.notes.append(Note(verdict.row.key, reason, is_kept=verdict.kind == "place"))
    messages = tuple(row.message for row in (*found.systems, *found.bodies))
    reading.notes.extend(_unanswered(found.bodies))
    return Converted(messages, tuple(sorted(reading.notes, key=lambda note: note.row)))


def _unanswered(rows: Iterable[Row[int]]) -> list[Note]:
    pairing, calls = Pairing(), dict[tuple[int, int], Note]()
    for position, row in enumerate(rows):
        pairing.call(position, row.message.tool_calls)
        for index, call in enumerate(row.message.tool_calls):
            reason = f"the call {call.id!r} of {call.name} has no result, which a model is told"
            calls[position, index] = Note(row.key, reason, is_kept=True)
        for result in row.message.tool_results:
            answered = pairing.answer(result.tool_call_id)
            assert answered is not None, "the rules leave no result without its call"
            calls.pop((answered[0].position, answered[0].index), None)
    return list(calls.values())


class _Reading:
    """Items taken one by one."""

    def __init__(self, agent_name: str) -> None:
        self.rows: Final[list[Row[int]]] = []
        self.notes: Final[list[Note]] = []
        self._agent_name = agent_name
        self._reply: list[tuple[StoredItem, Item]] = []
        self._results: list[tuple[StoredItem, ToolResult]] = []
        self._names: Final[dict[str, str]] = {}

    def take(self, stored: StoredItem) -> None:
        try:
            if not stored.is_main:
                raise ValueError("it belongs to another branch than main")  # one way out for all
            self._take(stored, _item(stored.data))
        except _NOT_TO_BE_READ as error:
            self._leave_out(stored, error)

    def _leave_out(self, stored: StoredItem, error: Exception) -> None:
        match error:
            case KeyError():
                reason = f"it has no {error}"
            case RecursionError():
                reason = "it is nested too deeply"
            case ValueError():
                reason = str(error)
            case _:
                reason = f"it is not as its kind should be: {error}"
        self.notes.append(Note(stored.number, reason, is_kept=False))

    def _take(self, stored: StoredItem, item: Item) -> None:
        kind, role = item.get("type", "message"), item.get("role")
        if kind == "message" and role in {"user", "system", "developer"}:
            message = Message(Role.USER if role == "user" else Role.SYSTEM, _content(item["content"]), **_at(stored))
            self.end_reply()
            self.end_results()
            self._add(stored, message)
        elif kind == "message" and role == "assistant":
            self._take_reply(stored, _said(item))
        elif not isinstance(kind, str) or kind == "message":
            raise ValueError(f"an item of type {kind!r} and role {role!r} is not known")
        elif kind.endswith("_output"):
            self._take_result(stored, item, kind.removesuffix("_output").removesuffix("_call"))
        else:
            self._take_reply(stored, self._call(item, kind) if kind.endswith("_call") and "call_id" in item else item)
            if kind not in {"function_call", "reasoning"}:
                what = "a call of a tool now" if "call_id" in item else "kept beside the model's message as it came"
                self.notes.append(Note(stored.number, f"an item of type {kind!r} is {what}", is_kept=True))

    def _call(self, item: Item, kind: str) -> Item:
        name, arguments = item.get("name"), item.get("arguments")
        if kind != "function_call":
            rest = {key: value for key, value in item.items() if key not in {"type", "id", "call_id", "name", "status"}}
            name, arguments = name or kind.removesuffix("_call"), json.dumps(rest)
        call_id = item["call_id"]
        if not (isinstance(name, str) and isinstance(call_id, str) and isinstance(arguments, str)):
            raise TypeError("a call has a name, a call_id and arguments, all text")
        self._names[call_id] = name
        return {"type": "function_call", "call_id": call_id, "name": name, "arguments": arguments}

    def _take_reply(self, stored: StoredItem, item: Item) -> None:
        # Whether it can be kept at all shows here, so that it spoils nothing beside it.
        self._message_of([item], stored)
        self.end_results()
        self._reply.append((stored, item))

    def _take_result(self, stored: StoredItem, item: Item, kind: str) -> None:
        call_id = item.get("call_id") or item["id"]
        rest = {key: value for key, value in item.items() if key not in {"type", "id", "call_id", "status"}}
        name = self._names.get(call_id) or item.get("name") or kind
        result = ToolResult(tool_call_id=call_id, name=name, content=_output(item.get("output", rest)))
        Message(Role.TOOL, tool_results=[result])
        self.end_reply()
        self._results.append((stored, result))

    def _message_of(self, items: list[Item], stored: StoredItem) -> Message:
        reply = from_responses_response({"status": "completed", "output": items}, _MODEL)
        return Message(
            Role.MODEL,
            reply.text,
            tool_calls=reply.tool_calls,
            extra=reply.extra,
            agent_name=self._agent_name,
            **_at(stored),
        )

    def end_reply(self) -> None:
        """Make one message of what the model has said."""
        reply, self._reply = self._reply, []
        if reply:
            self._add(reply[0][0], self._message_of([item for _, item in reply], reply[0][0]))

    def end_results(self) -> None:
        """Make one message of the results that stand together."""
        results, self._results = self._results, []
        if results:
            first = results[0][0]
            self._add(first, Message(Role.TOOL, tool_results=[result for _, result in results], **_at(first)))

    def _add(self, stored: StoredItem, message: Message) -> None:
        self.rows.append(Row(key=stored.number, among_systems=False, message=message))


def _item(data: Any) -> Item:
    if not isinstance(data, str):
        raise TypeError("it must be text")
    try:
        found: object = json.loads(data)
    except ValueError as error:
        raise ValueError(f"it is no JSON: {error}") from error
    if not isinstance(found, dict):
        raise TypeError(f"an item must be an object, not {type(found).__name__}")
    item = cast("Item", found)
    if "__enc__" in item:
        raise ValueError("it is encrypted; decrypt it with openai-agents' EncryptedSession first")
    return item


def _at(stored: StoredItem) -> dict[str, Any]:
    """When it was stored, which SQLite writes in UTC without saying so; now, where nobody has noted it."""
    try:
        moment = dt.datetime.fromisoformat(stored.created_at)
    except (TypeError, ValueError):
        return {}
    return {"timestamp": moment if moment.tzinfo is not None else moment.replace(tzinfo=dt.UTC)}


def _said(item: Item) -> Item:
    """A message of the model's as the API gives it, where it was written by hand."""
    content = item["content"]
    parts: list[Item] = [{"type": "output_text", "text": content}] if isinstance(content, str) else content
    for part in parts:
        if not isinstance(part.get("text") or part.get("refusal") or "", str):
            raise TypeError("the text of a message must be text")
    return {**item, "type": "message", "content": parts}


def _content(content: Any) -> str | list[Part]:
    if isinstance(content, str):
        return content
    parts = [_part(part) for part in content]
    return parts[0].text if len(parts) == 1 and isinstance(parts[0], TextPart) else parts


def _output(output: Any) -> Any:
    """What a tool gave: parts where they are those of a message, else the value as it is."""
    parts = _list(output)
    if not parts or not all(map(_is_part, parts)):
        return output
    try:
        return _content(output)
    except _NOT_TO_BE_READ:
        return output


def _list(value: Any) -> list[object]:
    return cast("list[object]", value) if isinstance(value, list) else []


def _is_part(part: object) -> bool:
    match part:
        case {"type": "input_text" | "input_image" | "input_file"}:
            return True
        case _:
            return False


def _part(part: Mapping[str, Any]) -> Part:
    kind = part["type"]
    if kind in {"input_text", "output_text", "text"}:
        return TextPart(part["text"])
    if kind == "input_image":
        return _image(part.get("image_url") or part["file_id"])
    if kind == "input_file":
        name = part.get("filename")
        data = part.get("file_data")
        if data is None:
            return FilePart(url=part.get("file_url") or part["file_id"], filename=name)
        media_type, content = _data_of(data)
        return FilePart(data=content, media_type=media_type, filename=name)
    if kind == "input_audio":
        audio = part["input_audio"]
        return AudioPart(data=_decoded(audio["data"]), media_type=f"audio/{audio['format']}")
    return UnknownPart(kind, {name: value for name, value in part.items() if name != "type"})


def _image(url: str) -> ImagePart:
    if not url.startswith("data:"):
        return ImagePart(url=url)
    media_type, content = _data_of(url)
    return ImagePart(data=content, media_type=media_type)


def _data_of(uri: str) -> tuple[str | None, bytes]:
    """What a ``data:`` address holds, or base64 without one."""
    header, _, data = uri.rpartition(",")
    return header.removeprefix("data:").partition(";")[0] or None, _decoded(data)


def _decoded(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except binascii.Error as error:
        raise ValueError(f"its data is no base64: {error}") from error
