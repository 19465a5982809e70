"""The usual messages, read without the converter.

Whoever loads a conversation waits for each of its messages, and most of the time that the converter takes goes into
being able to say what is wrong with one. So a message that is plainly as `codec` writes it is made here, in a quarter
of the time (`make bench-micro`), and anything else is left to the converter: another field, a wrong type, an envelope.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable
from typing import Any, Final, TypeVar, cast

import attrs
import orjson

from chatflow.core.messages import Message, Role, ToolCall, ToolResult
from chatflow.core.values import EMPTY, MARK, MAX_DEPTH, FrozenDict, FrozenList

_T = TypeVar("_T")


class _UnusualError(Exception):
    """What was read may be a message, and is not as most of them are."""


_ROLES: Final = {role.value: role for role in Role}
_TOOL: Final = Role.TOOL
_MODEL: Final = Role.MODEL
_UTC: Final = dt.UTC

_DEEPEST: Final = MAX_DEPTH // 2
"""Levels that are surely kept, wherever a value stands."""


def _setters(kind: type[Any]) -> tuple[Callable[[Any, Any], None], ...]:
    """What sets each field of a frozen instance, in their order: what is read needs no conversion and no check."""
    return tuple(kind.__dict__[field.name].__set__ for field in attrs.fields(kind))


(
    _set_role,
    _set_content,
    _set_tool_calls,
    _set_tool_results,
    _set_agent_name,
    _set_usage,
    _set_extra,
    _set_timestamp,
) = _setters(Message)
_set_call_id, _set_call_name, _set_args = _setters(ToolCall)
_set_result_id, _set_result_name, _set_result_content, _set_is_error = _setters(ToolResult)


def usual_message(text: Any) -> Message | None:
    """The message in *text*; None for what is no text, no message, or one that the converter is to read."""
    try:
        return _message(orjson.loads(text))
    except (_UnusualError, KeyError, TypeError, ValueError):
        return None


def _message(data: Any) -> Message:  # noqa: C901  # a function for each field would take longer than the field
    if type(data) is not dict:
        raise _UnusualError
    fields = cast("dict[str, Any]", data)
    role, content, timestamp = _ROLES[fields["role"]], fields.get("content"), fields["timestamp"]
    agent_name, usage, extra = fields.get("agent_name"), fields.get("usage"), fields.get("extra")
    known = 2
    calls: tuple[ToolCall, ...] = ()
    results: tuple[ToolResult, ...] = ()
    if content is not None:
        known += 1
        if type(content) is not str:
            raise _UnusualError
    if agent_name is not None:
        known += 1
        if type(agent_name) is not str:
            raise _UnusualError
    if usage is not None:
        known += 1
        usage = _mapping(usage)
    if extra is not None:
        known += 1
        extra = _mapping(extra)
    if role is _TOOL:
        known += 1
        results = _each(_result, fields["tool_results"])
    elif role is _MODEL and "tool_calls" in fields:
        known += 1
        calls = _each(_call, fields["tool_calls"])
    moment = dt.datetime.fromisoformat(timestamp)
    if known != len(fields) or moment.tzinfo is not _UTC:
        raise _UnusualError
    message = Message.__new__(Message)
    _set_role(message, role)
    _set_content(message, content)
    _set_tool_calls(message, calls)
    _set_tool_results(message, results)
    _set_agent_name(message, agent_name)
    _set_usage(message, usage)
    _set_extra(message, EMPTY if extra is None else extra)
    _set_timestamp(message, moment)
    return message


def _each(make: Callable[[Any], _T], data: Any) -> tuple[_T, ...]:
    if type(data) is not list or not data:
        raise _UnusualError
    items = cast("list[object]", data)
    return tuple([make(item) for item in items])


def _call(data: Any) -> ToolCall:
    if type(data) is not dict:
        raise _UnusualError
    fields = cast("dict[str, Any]", data)
    id_, name, args = fields["id"], fields["name"], fields.get("args")
    if type(id_) is not str or type(name) is not str or len(fields) != (2 if args is None else 3):
        raise _UnusualError
    call = ToolCall.__new__(ToolCall)
    _set_call_id(call, id_)
    _set_call_name(call, name)
    _set_args(call, EMPTY if args is None else _mapping(args))
    return call


def _result(data: Any) -> ToolResult:
    if type(data) is not dict:
        raise _UnusualError
    fields = cast("dict[str, Any]", data)
    id_, name, content, is_error = fields["tool_call_id"], fields["name"], fields["content"], fields.get("is_error")
    if type(id_) is not str or type(name) is not str or len(fields) != (3 if is_error is None else 4):
        raise _UnusualError
    if is_error is not None and type(is_error) is not bool:
        raise _UnusualError
    result = ToolResult.__new__(ToolResult)
    _set_result_id(result, id_)
    _set_result_name(result, name)
    _set_result_content(result, _kept(content, 0) if type(content) in _NESTED else content)
    _set_is_error(result, is_error is True)
    return result


def _mapping(value: Any) -> FrozenDict:
    if type(value) is not dict:
        raise _UnusualError
    return cast("FrozenDict", _kept(value, 0))


def _kept(value: Any, depth: int) -> Any:
    """A dict or list, frozen. What is read is nobody's else, so that it may be changed on the way."""
    if depth > _DEEPEST:
        raise _UnusualError
    if type(value) is list:
        items = cast("list[object]", value)
        return FrozenList([_kept(item, depth + 1) if type(item) in _NESTED else item for item in items])
    if MARK in value:
        raise _UnusualError
    for key, item in value.items():
        if type(item) in _NESTED:
            value[key] = _kept(item, depth + 1)
    return FrozenDict(value)


_NESTED: Final = frozenset({dict, list})
