"""The usual messages, read without the converter.

Whoever loads a conversation waits for each of its messages, and most of the time that the converter takes goes into
being able to say what is wrong with one. So a message that is plainly as `codec` writes it is decoded in one step, and
made in a sixth of the time. Anything else is left to the converter: another field, a wrong type, an envelope.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable
from typing import Any, Final, TypeVar, cast

import msgspec

from chatflow.core.messages import Message, Role, ToolCall, ToolResult
from chatflow.core.values import EMPTY, MARK, MAX_DEPTH, FrozenDict, FrozenList

_T = TypeVar("_T")


class _UnusualError(Exception):
    """What was read may be a message, and is not as most of them are."""


_DEEPEST: Final = MAX_DEPTH // 2
"""Levels that are surely kept, wherever a value stands."""


class _CallRead(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    id: str
    name: str
    args: dict[str, Any] | msgspec.UnsetType = msgspec.UNSET


class _ResultRead(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    tool_call_id: str
    name: str
    content: Any
    is_error: bool = False


class _MessageRead(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    role: Role
    timestamp: str
    content: str | None = None
    tool_calls: tuple[_CallRead, ...] = ()
    tool_results: tuple[_ResultRead, ...] = ()
    agent_name: str | None = None
    usage: dict[str, Any] | None = None
    extra: dict[str, Any] | None = None


_decode: Final = msgspec.json.Decoder(_MessageRead).decode


def _unfrozen(kind: type[_T]) -> type[Any]:
    """A class whose instances are in all as those of *kind*, but for what refuses to change them.

    An instance of it is filled, and then told to be of *kind*. What is read needs no conversion and no check, and this
    takes a third of the time of setting each field past its refusal.
    """
    plain = {"__slots__": (), "__setattr__": object.__setattr__, "__delattr__": object.__delattr__}
    return type(kind.__name__, (kind,), plain)


_UnfrozenMessage: Final = _unfrozen(Message)
_UnfrozenCall: Final = _unfrozen(ToolCall)
_UnfrozenResult: Final = _unfrozen(ToolResult)

_new: Final[Callable[[type[Any]], Any]] = object.__new__
_moment: Final = dt.datetime.fromisoformat
_UTC: Final = dt.UTC
_TOOL: Final = Role.TOOL
_MODEL: Final = Role.MODEL


def usual_message(text: Any) -> Message | None:
    """The message in *text*; None for what is no text, no message, or one that the converter is to read."""
    try:
        read = _decode(text)
        timestamp = _moment(read.timestamp)
        role, calls, results, usage, extra = read.role, read.tool_calls, read.tool_results, read.usage, read.extra
        if timestamp.tzinfo is not _UTC or (calls and role is not _MODEL) or bool(results) is not (role is _TOOL):
            return None
        message = _new(_UnfrozenMessage)
        message.role = role
        message.content = read.content
        message.tool_calls = tuple(map(_call, calls)) if calls else ()
        message.tool_results = tuple(map(_result, results)) if results else ()
        message.agent_name = read.agent_name
        message.usage = None if usage is None else _dict(usage, 0)
        message.extra = EMPTY if extra is None else _dict(extra, 0)
        message.timestamp = timestamp
        message.__class__ = Message
    except (_UnusualError, msgspec.DecodeError, TypeError, ValueError, RecursionError):
        return None
    return cast("Message", message)


def _call(read: _CallRead) -> ToolCall:
    call = _new(_UnfrozenCall)
    call.id = read.id
    call.name = read.name
    args = read.args
    call.args = _dict(args, 0) if type(args) is dict else EMPTY
    call.__class__ = ToolCall
    return cast("ToolCall", call)


def _result(read: _ResultRead) -> ToolResult:
    result = _new(_UnfrozenResult)
    result.tool_call_id = read.tool_call_id
    result.name = read.name
    content: object = read.content
    kind = type(content)
    result.content = _dict(content, 0) if kind is dict else _list(content, 0) if kind is list else content
    result.is_error = read.is_error
    result.__class__ = ToolResult
    return cast("ToolResult", result)


# What is read is nobody's else, so that it may be changed on the way to being frozen.


def _dict(value: Any, depth: int) -> FrozenDict:
    fields: dict[str, object] = value
    if MARK in fields or depth > _DEEPEST:
        raise _UnusualError
    for key, item in fields.items():
        kind = type(item)
        if kind is dict:
            fields[key] = _dict(item, depth + 1)
        elif kind is list:
            fields[key] = _list(item, depth + 1)
    return FrozenDict(fields)


def _list(value: Any, depth: int) -> FrozenList:
    items: list[object] = value
    if depth > _DEEPEST:
        raise _UnusualError
    for index, item in enumerate(items):
        kind = type(item)
        if kind is dict:
            items[index] = _dict(item, depth + 1)
        elif kind is list:
            items[index] = _list(item, depth + 1)
    return FrozenList(items)
