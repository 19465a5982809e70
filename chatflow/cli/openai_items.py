"""What openai-agents' files hold, as messages by chatflow's rules, with a note of each change. Pure functions."""

from __future__ import annotations

import datetime as dt
import json
from collections.abc import Iterable
from typing import Any, cast

import attrs

from chatflow.adapters.openai_items import NOT_TO_BE_READ, Item, Reading
from chatflow.core.messages import Message
from chatflow.core.pruning import Pairing
from chatflow.core.repairs import Row, sort_out
from chatflow.sqlite.openai_agents import StoredItem


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
    reading = Reading(agent_name)
    notes = [note for item in items if (note := _take(reading, item)) is not None]
    found = sort_out(Row(key=read.number, among_systems=False, message=read.message) for read in reading.end())
    for verdict in found.verdicts:
        reason = f"{verdict.reason}; it stands in front now" if verdict.kind == "place" else verdict.reason
        notes.append(Note(verdict.row.key, reason, is_kept=verdict.kind == "place"))
    messages = tuple(row.message for row in (*found.systems, *found.bodies))
    notes.extend(_unanswered(found.bodies))
    return Converted(messages, tuple(sorted(notes, key=lambda note: note.row)))


def _take(reading: Reading, stored: StoredItem) -> Note | None:
    try:
        if not stored.is_main:
            raise ValueError("it belongs to another branch than main")  # one way out for all
        change = reading.take(stored.number, _item(stored.data), _moment(stored.created_at))
    except NOT_TO_BE_READ as error:
        return Note(stored.number, _reason(error), is_kept=False)
    return None if change is None else Note(stored.number, change, is_kept=True)


def _reason(error: Exception) -> str:
    match error:
        case KeyError():
            return f"it has no {error}"
        case RecursionError():
            return "it is nested too deeply"
        case ValueError():
            return str(error)
        case _:
            return f"it is not as its kind should be: {error}"


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


def _moment(stored: Any) -> dt.datetime | None:
    """When an item was stored, which SQLite writes in UTC without saying so; None, where nobody has noted it."""
    try:
        moment = dt.datetime.fromisoformat(stored)
    except (TypeError, ValueError):
        return None
    return moment if moment.tzinfo is not None else moment.replace(tzinfo=dt.UTC)
