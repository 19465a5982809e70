"""The items of openai-agents' sessions, which are those of OpenAI's Responses API, as messages and back; pure.

A model's items up to the next result or user message are one message: its texts, its calls, and all else, such as
reasoning or a search on the web, in `extra` as `engines.responses_form` keeps it and sends it back. Every kind of call
that has an id is a call here, and every kind of output a result, so that no pair is parted. Beside that each item is
kept as it came, so that it comes back equal.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, cast

import attrs

from chatflow.adapters.parts import content_of
from chatflow.adapters.verbatim import given_back, kept
from chatflow.core.history import History
from chatflow.core.messages import Message, Role, ToolResult
from chatflow.core.pruning import Window
from chatflow.core.values import freeze_mapping
from chatflow.engines.call_ids import with_ids_for
from chatflow.engines.common_form import as_json
from chatflow.engines.responses_form import to_input
from chatflow.engines.responses_reply import from_responses_response
from chatflow.exceptions import EngineError

Item = dict[str, Any]

ITEMS_KEY: Final = "chatflow_openai_items"
"""In `extra`: the items that the message was made of, as `verbatim` keeps them."""

NOT_TO_BE_READ: Final = (AttributeError, EngineError, IndexError, KeyError, RecursionError, TypeError, ValueError)
"""What is raised by an item that is not as its kind is documented."""

_MODEL: Final = "openai/unknown"
"""Whose items these are: what only OpenAI understands goes back to it alone."""

_NO_ARGUMENTS: Final = frozenset({"type", "id", "call_id", "name", "status"})

_REQUEST, _RESPONSE = "mcp_approval_request", "mcp_approval_response"


def to_items(messages: Sequence[Message]) -> list[Item]:
    """The messages as items: those that were made of items as these came, others as they are sent to OpenAI."""
    return [item for items in _items_of_each(messages) for item in items]


def latest(history: History, limit: int | None) -> list[Item]:
    """The items of the last whole turns: as few turns as have *limit* items, or all that there is where it has no more.

    Turns that a call and its result join stay together, and so does what stands before the first turn. Without a
    *limit* it is all of the history, and nothing with 0.
    """
    if limit is None:
        return to_items(history)
    if limit == 0:
        return []
    window = Window()
    for message in history:
        window.add(message)
    starts = {history.system_count + cut for cut in window.cuts()}
    asked_in_front = _asked_by(to_items(history.systems_from(0)))
    messages = with_ids_for(_MODEL, history)
    found: list[list[Item]] = []
    missing, is_joined = limit, False
    for place in reversed(range(len(history))):
        items = _items_of(history[place], messages[place])
        found.append(items)
        missing -= len(items)
        # What stands in front has no calls to the window, and what answers them no results.
        is_joined = is_joined or (
            history[place].role is Role.MODEL and any(_answered(item) in asked_in_front for item in items)
        )
        if missing <= 0 and place in starts and not is_joined:
            break
    return [item for items in reversed(found) for item in items]


def to_messages(
    items: Iterable[Any], history: Iterable[Message], agent_name: str, leave_out: Callable[[str], None]
) -> list[Message]:
    """The messages that these items are, to be added to *history*; the model's are those of *agent_name*.

    `to_items` gives every one of them back, equal and in order, but for results whose call is nowhere: they are left
    out, and *leave_out* is called with the id that each names. An item that we have no message for stands in a message
    of the model's, as do instructions in the middle of a conversation, unless a user message follows: they stand in
    that. What comes before the first user message stands in system messages, which no pruning takes away.

    Raises:
        UnstorableValueError: An item is no mapping, or holds what can't be kept; the error names its path.
    """
    reading, before = Reading(agent_name), list(history)
    reading.names.update((call.id, call.name) for message in before for call in message.tool_calls)
    front = to_items([message for message in before if message.role is Role.SYSTEM])
    asked_in_front = _asked_by(front) - reading.names.keys()
    has_begun = any(message.role is Role.USER for message in before)
    for number, given in enumerate(items):
        item = cast("Item", freeze_mapping(given, f"items[{number}]"))
        answered, begins = _answered(item), _is_message(item, "user")
        if answered is not None and answered not in asked_in_front and answered not in reading.names:
            leave_out(answered)
            continue
        if answered is not None:
            has_place = answered not in asked_in_front
        elif _is_message(item, "system", "developer"):
            has_place = not has_begun
        else:
            has_place = begins or has_begun
        if has_place and reading.takes(number, item):
            asked_in_front -= _asked_by([item])
        elif begins or not has_begun:
            reading.take_alone(number, item, Role.USER if begins else Role.SYSTEM)
            asked_in_front |= _asked_by([item])
        else:
            reading.take_unread(number, item)
        has_begun = has_begun or begins
    return [read.message for read in reading.end()]


def without_last(history: History, agent_name: str) -> tuple[Item, Message | None]:
    """The last item of *history*, and what is left of its message without it."""
    *before, last = history
    *rest, popped = _items_of(last, with_ids_for(_MODEL, history)[-1])
    if not rest:
        return popped, None
    if last.role is Role.TOOL:
        results = last.tool_results[: len(rest)]
        left = attrs.evolve(last, tool_results=results)
        read: Mapping[str, Any] = {ITEMS_KEY: kept(rest, [result.content for result in results], "output")}
    else:
        again = _message_of_model(rest, last.agent_name or agent_name)
        read = again.extra
        if last.role is Role.USER:  # with instructions before it
            role = Role.MODEL if any(message.role is Role.USER for message in before) else Role.SYSTEM
            return popped, attrs.evolve(again, role=role, timestamp=last.timestamp)
        content = again.content if _is_message(popped, "assistant") else last.content
        left = attrs.evolve(last, content=content, tool_calls=last.tool_calls[: len(again.tool_calls)])
    # What is left of a message that was made of no items does without them where it can: as items its calls have ids
    # that depend on all that is before them.
    if given_back(last, ITEMS_KEY, _field_of(last)) or _items_of_each([*before, left])[-1] != rest:
        left = attrs.evolve(left, extra={**last.extra, **read})
    return popped, left


def _message_of_model(items: Iterable[Item], agent_name: str) -> Message:
    """The one message of a model's that these items are."""
    reading = Reading(agent_name)
    for number, item in enumerate(items):
        stands_aside = _answered(item) is not None or _is_message(item, "system", "developer")
        if stands_aside or not reading.takes(number, item):
            reading.take_unread(number, item)
    [read] = reading.end()
    return read.message


@attrs.frozen
class Read:
    """A message, and the number of the first item that it was made of."""

    number: int
    message: Message


@attrs.frozen
class _Said:
    """An item of the model's: as it came, and as the API would give it, or None where it can't be read."""

    number: int
    item: Item
    readable: Item | None
    at: dict[str, Any]


class Reading:
    """Items taken one by one."""

    def __init__(self, agent_name: str) -> None:
        self.names: Final[dict[str, str]] = {}
        """The tools' names by the ids of their calls, which results lack."""
        self._agent_name = agent_name
        self._read: Final[list[Read]] = []
        self._reply: list[_Said] = []
        self._results: list[tuple[int, Item, ToolResult, dict[str, Any]]] = []

    def take(self, number: int, item: Item, at: dt.datetime | None = None) -> str | None:
        """Take an item that was stored *at* some time; now, where nobody knows. What has become of it, if a change.

        Raises:
            AttributeError, EngineError, IndexError, KeyError, RecursionError, TypeError, ValueError: It is not as its
                kind is documented, and was not taken.
        """
        kind, timestamp = item.get("type", "message"), {} if at is None else {"timestamp": at}
        if _is_message(item, "user", "system", "developer"):
            role = Role.USER if item["role"] == "user" else Role.SYSTEM
            self._take_message(number, item, role, content_of(item["content"]), timestamp)
        elif _is_message(item, "assistant"):
            self._take_reply(_Said(number, item, _said(item), timestamp))
        elif not isinstance(kind, str) or kind == "message":
            raise ValueError(f"an item of type {kind!r} and role {item.get('role')!r} is not known")
        elif _answered(item) is not None:
            self._take_result(number, item, kind, timestamp)
        elif kind.endswith("_output") and kind != "tool_search_output":  # which has no id where the service searches
            raise TypeError("a result names its call by a call_id, which is text")
        else:
            is_call = _asked(item) is not None
            self._take_reply(_Said(number, item, self._call(item, kind) if is_call else item, timestamp))
            if kind not in {"function_call", "reasoning"}:
                what = "a call of a tool now" if is_call else "kept beside the model's message as it came"
                return f"an item of type {kind!r} is {what}"
        return None

    def takes(self, number: int, item: Item) -> bool:
        """Take an item, if it is as its kind is documented."""
        try:
            self.take(number, item)
        except NOT_TO_BE_READ:
            return False
        return True

    def take_unread(self, number: int, item: Item) -> None:
        """Take an item for one of the model's, whatever it is."""
        self._end_results()
        self._reply.append(_Said(number, item, None, {}))

    def take_alone(self, number: int, item: Item, role: Role) -> None:
        """Take an item for a message of its own that says nothing, whatever it is."""
        self._take_message(number, item, role, None, {})

    def end(self) -> list[Read]:
        """All messages; nothing is taken after it."""
        self._end_reply()
        self._end_results()
        return self._read

    def _take_message(self, number: int, item: Item, role: Role, content: Any, at: dict[str, Any]) -> None:
        start = len(self._reply)
        while role is Role.USER and start and _is_message(self._reply[start - 1].item, "system", "developer"):
            start -= 1  # instructions directly before a question belong to its turn
        before = self._reply[start:]
        items, said = [*(each.item for each in before), item], [*[None] * len(before), content]
        message = Message(role, content, extra={ITEMS_KEY: kept(items, said, "content")}, **at)
        del self._reply[start:]
        self._end_reply()
        self._end_results()
        self._read.append(Read(before[0].number if before else number, message))

    def _call(self, item: Item, kind: str) -> Item:
        name, arguments, call_id = item.get("name"), item.get("arguments"), _asked(item)
        if kind not in {"function_call", _REQUEST}:
            arguments = {key: value for key, value in item.items() if key not in _NO_ARGUMENTS}
        if not isinstance(arguments, str):
            arguments = as_json(arguments or {})
        if not isinstance(name, str) or not name:
            name = kind.removesuffix("_call")
        assert call_id is not None, "that makes it a call"
        self.names[call_id] = name
        return {"type": "function_call", "call_id": call_id, "name": name, "arguments": arguments}

    def _take_reply(self, said: _Said) -> None:
        # Whether it can be kept at all shows here, so that it spoils nothing beside it.
        self._message_of([said])
        self._end_results()
        self._reply.append(said)

    def _take_result(self, number: int, item: Item, kind: str, at: dict[str, Any]) -> None:
        rest = {key: value for key, value in item.items() if key not in {"type", "id", "call_id", "status"}}
        call_id = _answered(item) or ""
        name = self.names.get(call_id) or item.get("name") or kind.removesuffix("_output").removesuffix("_call")
        result = ToolResult(tool_call_id=call_id, name=name, content=_output(item.get("output", rest)))
        Message(Role.TOOL, tool_results=[result], extra={ITEMS_KEY: [item]})
        self._end_reply()
        self._results.append((number, item, result, at))

    def _message_of(self, said: Sequence[_Said]) -> Message:
        output = [each.readable for each in said if each.readable is not None]
        reply = from_responses_response({"status": "completed", "output": output}, _MODEL)
        items = kept((each.item for each in said), [reply.text if len(said) == 1 else None] * len(said), "content")
        return Message(
            Role.MODEL,
            reply.text,
            tool_calls=reply.tool_calls,
            extra={**reply.extra, ITEMS_KEY: items},
            agent_name=self._agent_name,
            **said[0].at,
        )

    def _end_reply(self) -> None:
        """Make one message of what the model has said."""
        reply, self._reply = self._reply, []
        if reply:
            self._read.append(Read(reply[0].number, self._message_of(reply)))

    def _end_results(self) -> None:
        """Make one message of the results that stand together."""
        results, self._results = self._results, []
        if results:
            number, _, _, at = results[0]
            found = [result for _, _, result, _ in results]
            items = kept([item for _, item, _, _ in results], [result.content for result in found], "output")
            self._read.append(Read(number, Message(Role.TOOL, tool_results=found, extra={ITEMS_KEY: items}, **at)))


def _items_of_each(messages: Sequence[Message]) -> list[list[Item]]:
    return list(map(_items_of, messages, with_ids_for(_MODEL, messages)))


def _items_of(message: Message, with_id: Message) -> list[Item]:
    """The items of a message; *with_id* is the same with ids that OpenAI takes."""
    return given_back(message, ITEMS_KEY, _field_of(message)) or _sent(with_id)


def _field_of(message: Message) -> str:
    """What of its items says what the message says."""
    return "output" if message.role is Role.TOOL else "content"


def _sent(message: Message) -> list[Item]:
    if message.role is Role.SYSTEM:
        return [{"role": "system", "content": message.text}]
    return to_input([message], _MODEL)


def _is_message(item: Mapping[str, Any], *roles: str) -> bool:
    return item.get("type", "message") == "message" and item.get("role") in roles


def _asked(item: Mapping[str, Any]) -> str | None:
    """The id of the call that the item is, by which its result names it."""
    kind = item.get("type")
    is_call = isinstance(kind, str) and (kind.endswith("_call") or kind == "program")
    id_ = item.get("id") if kind == _REQUEST else item.get("call_id") if is_call else None
    return id_ if isinstance(id_, str) else None


def _asked_by(items: Iterable[Item]) -> set[str]:
    """The ids of the calls among the items."""
    return {id_ for id_ in map(_asked, items) if id_ is not None}


def _answered(item: Mapping[str, Any]) -> str | None:
    """The id of the call whose result the item is."""
    kind = item.get("type")
    if kind == _RESPONSE:
        id_ = item.get("approval_request_id")
    elif isinstance(kind, str) and kind.endswith("_output"):
        # What a local shell gave has had the call's id for its own.
        id_ = item.get("call_id") or (item.get("id") if kind == "local_shell_call_output" else None)
    else:
        id_ = None
    return id_ if isinstance(id_, str) else None


def _said(item: Item) -> Item:
    """A message of the model's as the API gives it, where it was written by hand."""
    content = item["content"]
    parts: list[Item] = [{"type": "output_text", "text": content}] if isinstance(content, str) else content
    for part in parts:
        if not isinstance(part.get("text") or part.get("refusal") or "", str):
            raise TypeError("the text of a message must be text")
    return {**item, "type": "message", "content": parts}


def _output(output: Any) -> Any:
    """What a tool gave: parts where they are those of a message, else the value as it is."""
    parts = _list(output)
    if not parts or not all(map(_is_part, parts)):
        return output
    try:
        return content_of(output)
    except NOT_TO_BE_READ:
        return output


def _list(value: Any) -> list[object]:
    return cast("list[object]", value) if isinstance(value, list) else []


def _is_part(part: object) -> bool:
    match part:
        case {"type": "input_text" | "input_image" | "input_file"}:
            return True
        case _:
            return False
