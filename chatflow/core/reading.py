"""Reading what stands in rows, of which anything may be damaged: the value, or the row and the reason by name."""

from __future__ import annotations

import datetime as dt
import math
from collections.abc import Callable, Iterable
from typing import Any, Final, TypeGuard, TypeVar

from chatflow.core.approvals import Decision
from chatflow.core.codec import (
    entry_from_json,
    message_from_json,
    response_from_json,
    values_from_json,
)
from chatflow.core.journal import Entry
from chatflow.core.messages import AgentResponse, Message
from chatflow.core.pruning import check_max_turns
from chatflow.core.quick import usual_message
from chatflow.core.records import LONGEST_SPAN
from chatflow.core.rows import State
from chatflow.core.service import ServiceSession
from chatflow.core.usage import checked_spent
from chatflow.core.values import EMPTY, FrozenDict
from chatflow.exceptions import CorruptSessionError, SessionFormatError, shorten

_T = TypeVar("_T")

LONG_AGO: Final = dt.datetime(1, 1, 1, tzinfo=dt.UTC)
"""Shown for a moment that can't be read."""

_STATES: Final = frozenset(State)


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


def optional_text(session_id: str, row: str, value: object) -> str | None:
    """*value* itself, if it is text or nothing."""
    return None if value is None else text(session_id, row, value)


def is_text(value: object) -> TypeGuard[str]:
    """Whether it is text in UTF-8."""
    return isinstance(value, str) and shown(value) == value


def shown(value: object) -> str:
    """*value* as text that can be read, whatever it is."""
    if isinstance(value, str):
        return value if value.isascii() else original(value).decode("utf-8", "replace")
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)


def original(value: str) -> bytes:
    """The bytes in the file of a text that was read from it."""
    return value.encode("utf-8", "surrogateescape")


def as_stood(value: object) -> object:
    """*value* as it stands in the file: bytes, where it was read as text and is none."""
    return original(value) if isinstance(value, str) and shown(value) != value else value


def values(session_id: str, row: str, value: object) -> FrozenDict:
    """A state or metadata column."""
    return _parsed(session_id, row, value, values_from_json)


def service(session_id: str, row: str, value: object) -> ServiceSession | None:
    """A service's session, if the conversation has one."""
    return None if value is None else _parsed(session_id, row, value, _service_from_json)


def _service_from_json(value: str) -> ServiceSession:
    try:
        return ServiceSession.from_data(values_from_json(value))
    except (TypeError, ValueError) as error:
        raise SessionFormatError(path="", reason=str(error)) from error


def spent(session_id: str, row: str, value: object) -> FrozenDict:
    """What was spent on messages that are gone, if anything was."""
    return EMPTY if value is None else _parsed(session_id, row, value, _spent_from_json)


def _spent_from_json(value: str) -> FrozenDict:
    try:
        return checked_spent(values_from_json(value))
    except TypeError as error:
        raise SessionFormatError(path="", reason=str(error)) from error


def message(session_id: str, session_key: int, place: object, value: object) -> Message:
    """A message's column."""
    usual = usual_message(value)
    if usual is not None:
        return usual
    row = f"chatflow_messages, session_key {session_key}, place {shown(place)}"
    return _parsed(session_id, row, value, message_from_json)


def response(session_id: str, row: str, value: object) -> AgentResponse:
    """A stored answer's column."""
    return _parsed(session_id, row, value, response_from_json)


def entry(session_id: str, row: str, value: object) -> Entry:
    """A journal's line."""
    return _parsed(session_id, row, value, entry_from_json)


def entries_of(turn_id: int, session_id: str, lines: Iterable[tuple[Any, Any]]) -> tuple[Entry, ...]:
    """A journal's lines, read."""
    entries: list[Entry] = []
    for expected, (step, text) in enumerate(lines, start=1):
        where = f"chatflow_journal, turn_id {turn_id}, step {expected}"
        if step != expected:
            raise CorruptSessionError(session_id=session_id, row=where, reason="the row is missing")
        entries.append(entry(session_id, where, text))
    return tuple(entries)


def work(session_id: str, row: str, value: object) -> tuple[str | Decision | None, FrozenDict]:
    """What a turn is to answer, a user's message or a person's decision, and the metadata, if it has any."""
    return (None, EMPTY) if value is None else _parsed(session_id, row, value, _work_from_json)


def _work_from_json(value: str) -> tuple[str | Decision, FrozenDict]:
    match values_from_json(value):
        case {"user_message": str(user_message), "metadata": FrozenDict() as metadata}:
            return user_message, metadata
        case {"decision": decision, "metadata": FrozenDict() as metadata}:
            try:
                return Decision.from_data(decision), metadata
            except TypeError as error:
                raise SessionFormatError(path="decision", reason=str(error)) from error
        case _:
            raise SessionFormatError(path="", reason="it is neither a message nor a decision, with its metadata")


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


def optional_number(session_id: str, row: str, value: object) -> int | None:
    """A column of numbers that may hold nothing."""
    return None if value is None else number(session_id, row, value)


def seconds(session_id: str, row: str, value: object) -> float:
    """A span's column."""
    # Comparisons with what is not a number are all false.
    if not isinstance(value, int | float) or not 0 < value < math.inf:
        raise CorruptSessionError(session_id=shown(session_id), row=row, reason="it is not a number of seconds")
    return value


def optional_seconds(session_id: str, row: str, value: object) -> float | None:
    """A span's column that may hold nothing."""
    found = None if value is None else seconds(session_id, row, value)
    if found is not None and found > LONGEST_SPAN:
        raise CorruptSessionError(session_id=shown(session_id), row=row, reason="it is longer than a hundred years")
    return found


def state(session_id: str, row: str, value: object) -> State:
    """What a turn's row is."""
    found = text(session_id, row, value)
    if found not in _STATES:
        raise CorruptSessionError(session_id=shown(session_id), row=row, reason=f"no turn's row is {shorten(found)}")
    return State(found)


def optional_moment(session_id: str, row: str, value: object) -> dt.datetime | None:
    """A moment's column that may hold nothing."""
    return None if value is None else moment(session_id, row, value)


def moment(session_id: str, row: str, value: object) -> dt.datetime:
    """A moment's column."""
    given = text(session_id, row, value)
    try:
        found = dt.datetime.fromisoformat(given)
    except ValueError as error:
        raise CorruptSessionError(session_id=shown(session_id), row=row, reason=f"it is no moment: {error}") from error
    if found.tzinfo is None:
        reason = "it is no moment: nothing says in which time zone"
        raise CorruptSessionError(session_id=shown(session_id), row=row, reason=reason)
    return found
