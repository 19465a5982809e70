"""What is wrong with the turns of a conversation and their journals, and what becomes of each. Reads only."""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any, Final, LiteralString

import attrs

from chatflow.core import reading
from chatflow.core.beats import DEFAULT_LEASE_SECONDS
from chatflow.core.codec import values_to_json
from chatflow.core.notes import Notes, SetAside
from chatflow.core.records import Claim, Key
from chatflow.core.repairs import Repair
from chatflow.core.rows import LIVE
from chatflow.core.values import freeze_mapping
from chatflow.exceptions import CorruptSessionError
from chatflow.sqlite.database import Connection
from chatflow.sqlite.turn_statements import READ_JOURNAL

LOOK_AT_TURNS: Final[LiteralString] = """
    SELECT
        turn_id, state, holder, attempt, attempts, beat, lease_seconds, accepted, agent_name, message_id, digest,
        work_json, parent, queued_at, ended_at
    FROM chatflow_turns WHERE session_key = :session_key
"""
"""All rows of a conversation's turns, whether it exists or not."""


class Fate(enum.IntEnum):
    """What a fault makes of a turn's row; of several, the last one here."""

    STAYS = enum.auto()
    """It is what it was, with a value that can be read."""
    INTERRUPTED = enum.auto()
    """Nobody can be told to have it in hand."""
    DEAD = enum.auto()
    """What it was to do, or has done already, can't be known."""
    GONE = enum.auto()
    """No message would ever find it."""


@attrs.frozen
class _Column:
    read: Callable[[str, str, Any], object]
    otherwise: Any
    fate: Fate


_COLUMNS: Final = {
    "state": _Column(reading.state, "interrupted", Fate.DEAD),
    # Not nothing, which a row in hand may not have: it is interrupted next.
    "holder": _Column(reading.optional_text, "nobody", Fate.INTERRUPTED),
    "attempt": _Column(reading.number, 0, Fate.DEAD),
    "attempts": _Column(reading.number, 0, Fate.DEAD),
    "beat": _Column(reading.number, 0, Fate.STAYS),
    "lease_seconds": _Column(reading.seconds, DEFAULT_LEASE_SECONDS, Fate.STAYS),
    "accepted": _Column(reading.number, 0, Fate.DEAD),
    "agent_name": _Column(reading.optional_text, None, Fate.DEAD),
    "message_id": _Column(reading.optional_text, None, Fate.GONE),
    "digest": _Column(reading.optional_text, "", Fate.DEAD),
    "work_json": _Column(reading.work, None, Fate.DEAD),
    "parent": _Column(reading.optional_number, None, Fate.STAYS),
    # None of a moment is the one of mending.
    "queued_at": _Column(reading.moment, None, Fate.STAYS),
    "ended_at": _Column(reading.optional_moment, None, Fate.STAYS),
}
TURN_COLUMNS: Final = tuple(_COLUMNS)


@attrs.frozen(kw_only=True)
class TurnDiagnosis:
    """What is wrong with a turn's row and its journal: *columns* are those that change before its *fate*.

    *holder* is who has it in hand, if that can be read.
    """

    turn_id: int
    holder: str | None
    fate: Fate
    columns: dict[str, Any]
    repairs: tuple[Repair, ...]
    set_aside: tuple[SetAside, ...]


@attrs.define
class _Found:
    """What a look at one turn has found so far."""

    fate: Fate = Fate.STAYS
    columns: dict[str, Any] = attrs.field(factory=dict[str, Any])
    errors: list[tuple[CorruptSessionError, Any]] = attrs.field(factory=list[tuple[CorruptSessionError, Any]])

    def note(self, error: CorruptSessionError, value: object, fate: Fate) -> None:
        self.errors.append((error, value))
        self.fate = max(self.fate, fate)


def diagnose_turns(session_key: int, now: Key, later: Key, connection: Connection) -> tuple[TurnDiagnosis, ...]:
    """Look at all turns of one conversation, which is named *now* and will be named *later*."""
    rows = connection.execute(LOOK_AT_TURNS, {"session_key": session_key}).fetchall()
    diagnoses = [
        _diagnose_turn(turn_id, dict(zip(TURN_COLUMNS, values, strict=True)), Notes(now, later), connection)
        for turn_id, *values in rows
    ]
    return tuple(each for each in diagnoses if each.repairs)


def _diagnose_turn(turn_id: int, row: dict[str, Any], notes: Notes, connection: Connection) -> TurnDiagnosis:
    found = _Found()
    _look_at_columns(turn_id, row, notes.now.session_id, found)
    lines = connection.execute(READ_JOURNAL, {"turn_id": turn_id}).fetchall()
    unreadable = _look_at_journal(turn_id, lines, notes.now.session_id)
    if unreadable:
        found.fate = max(found.fate, Fate.DEAD)
    if found.fate is Fate.DEAD and row["message_id"] is None:
        found.fate = Fate.GONE
    for error, value in found.errors:
        notes.take("turn", error.row, error.reason, value, "set aside" if found.fate is Fate.GONE else "replaced")
    for error in unreadable:
        notes.note("journal", error.row, error.reason, "set aside")
    if found.fate >= Fate.DEAD:
        first = [*unreadable, *(error for error, _ in found.errors)][0]
        why = f"its turn is given up: {first.row}: {first.reason}"
        keep_journal(turn_id, lines, why, notes)
    if found.fate is Fate.GONE:
        notes.keep(f"chatflow_turns, turn_id {turn_id}", "no message would ever find it", as_json(turn_id, row))
    return TurnDiagnosis(
        turn_id=turn_id,
        holder=row["holder"] if reading.is_text(row["holder"]) else None,
        fate=found.fate,
        columns=found.columns,
        repairs=tuple(notes.repairs),
        set_aside=tuple(notes.set_aside),
    )


def _look_at_columns(turn_id: int, row: dict[str, Any], session_id: str, found: _Found) -> None:
    for name, column in _COLUMNS.items():
        read = column.read
        if name == "holder" and row["state"] in LIVE:
            read = reading.name  # what is in hand is in somebody's hand
        elif name == "digest" and row["message_id"] is not None:
            read = reading.text
        try:
            read(session_id, f"chatflow_turns, turn_id {turn_id}, {name}", row[name])
        except CorruptSessionError as error:
            digest = _digest(row["work_json"]) if name == "digest" else None
            found.note(error, row[name], column.fate if digest is None else Fate.STAYS)
            found.columns[name] = digest or column.otherwise


def _digest(work_json: object) -> str | None:
    """What tells the message from others of the same id, if the message can be read."""
    try:
        asked, _ = reading.work("", "", work_json)
    except CorruptSessionError:
        return None
    return None if asked is None else Claim("", asked).digest


def _look_at_journal(turn_id: int, lines: list[tuple[Any, Any]], session_id: str) -> list[CorruptSessionError]:
    """What can't be read of a journal, or is missing in it."""
    errors: list[CorruptSessionError] = []
    where = f"chatflow_journal, turn_id {turn_id}, step"
    expected = 1
    for step, text in lines:
        try:
            number = reading.number(session_id, f"{where} {reading.shown(step)}", step)
            if number != expected:
                row, expected = f"{where} {expected}", number
                errors.append(CorruptSessionError(session_id=session_id, row=row, reason="the row is missing"))
            expected += 1
            reading.entry(session_id, f"{where} {number}", text)
        except CorruptSessionError as error:
            errors.append(error)
    return errors


def keep_journal(turn_id: int, lines: list[tuple[Any, Any]], reason: str, notes: Notes) -> None:
    """Set a whole journal aside."""
    for step, text in lines:
        notes.keep(f"chatflow_journal, turn_id {turn_id}, step {reading.shown(step)}", reason, text)


def as_json(turn_id: int, row: dict[str, Any]) -> str:
    """A row with all it holds."""
    return values_to_json(freeze_mapping({"turn_id": turn_id, **row}, ""))
