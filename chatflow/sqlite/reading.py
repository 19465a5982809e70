"""Reading what stands in rows, of which anything may be damaged: the value, or the row and the reason by name."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable
from typing import Final, TypeVar

from chatflow.core.codec import message_from_json, response_from_json, values_from_json
from chatflow.core.messages import AgentResponse, Message
from chatflow.core.pruning import check_max_turns
from chatflow.core.values import FrozenDict
from chatflow.exceptions import CorruptSessionError, SessionFormatError

_T = TypeVar("_T")

LONG_AGO: Final = dt.datetime(1, 1, 1, tzinfo=dt.UTC)
"""Shown for a moment that can't be read."""


def text(session_id: str, row: str, value: object) -> str:
    """*value* itself, if it is text.

    The connection gives bytes that are no UTF-8 as lone surrogates, so that one row can't fail a whole statement.
    """
    if not isinstance(value, str):
        kind = "nothing" if value is None else type(value).__name__
        raise CorruptSessionError(session_id=shown(session_id), row=row, reason=f"it is not text but {kind}")
    if shown(value) != value:
        raise CorruptSessionError(session_id=shown(session_id), row=row, reason="it is not text in UTF-8")
    return value


def name(session_id: str, row: str, value: object) -> str:
    """*value* itself, if it is text and not empty."""
    found = text(session_id, row, value)
    if not found:
        raise CorruptSessionError(session_id=shown(session_id), row=row, reason="it is empty")
    return found


def shown(value: object) -> str:
    """*value* as text that can be read, whatever it is."""
    if isinstance(value, str):
        return value if value.isascii() else original(value).decode("utf-8", "replace")
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)


def original(value: str) -> bytes:
    """The bytes in the file of a text that was read from it."""
    return value.encode("utf-8", "surrogateescape")


def values(session_id: str, row: str, value: object) -> FrozenDict:
    """A state or metadata column."""
    return _parsed(session_id, row, value, values_from_json)


def message(session_id: str, session_key: int, place: object, value: object) -> Message:
    """A message's column."""
    # The way of every message of every conversation: its row is named only when it can't be read.
    if isinstance(value, str):
        try:
            return message_from_json(value)
        except SessionFormatError:
            pass
    row = f"chatflow_messages, session_key {session_key}, place {shown(place)}"
    return _parsed(session_id, row, value, message_from_json)


def response(session_id: str, row: str, value: object) -> AgentResponse:
    """A stored answer's column."""
    return _parsed(session_id, row, value, response_from_json)


def _parsed(session_id: str, row: str, value: object, parse: Callable[[str], _T]) -> _T:
    found = text(session_id, row, value)
    try:
        return parse(found)
    except SessionFormatError as error:
        raise CorruptSessionError(session_id=shown(session_id), row=row, reason=str(error)) from error


def max_turns(session_id: str, row: str, value: object) -> int | None:
    """A conversation's own number of turns, if it has one."""
    if value is None:
        return None
    try:
        return check_max_turns(value)
    except (TypeError, ValueError) as error:
        raise CorruptSessionError(session_id=shown(session_id), row=row, reason=str(error)) from error


def number(session_id: str, row: str, value: object) -> int:
    """A column of numbers."""
    if not isinstance(value, int):
        raise CorruptSessionError(session_id=shown(session_id), row=row, reason="it is not a number")
    return value


def moment(session_id: str, row: str, value: object) -> dt.datetime:
    """A moment's column."""
    found = text(session_id, row, value)
    try:
        return dt.datetime.fromisoformat(found)
    except ValueError as error:
        raise CorruptSessionError(session_id=shown(session_id), row=row, reason=f"it is no moment: {error}") from error
