"""What is wrong with conversations and stored answers, and what they would be like without that. Reads only.

The server keeps types, references and text in order; what is left is what stands in the values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import groupby
from operator import itemgetter
from typing import Any, Final, LiteralString

import attrs

from chatflow.core import reading
from chatflow.core.beats import DEFAULT_LEASE_SECONDS
from chatflow.core.codec import values_to_json
from chatflow.core.notes import Notes, SetAside
from chatflow.core.owners import RESERVED
from chatflow.core.records import Key, fresh_position
from chatflow.core.repairs import Repair
from chatflow.core.sorting import history_of
from chatflow.core.values import FrozenDict
from chatflow.core.writing import expiry
from chatflow.exceptions import CorruptSessionError, shorten
from chatflow.postgres.connection import Row, Step, Transaction
from chatflow.postgres.operations import HIDDEN
from chatflow.postgres.reading import moment

LOOK_AT_SESSIONS: Final[LiteralString] = """
    SELECT
        session_key, owner, session_id, version, active_agent_name, metadata_json, state_json, max_turns, created_at,
        updated_at, service_json, service_key, expires_after, expires_at, spent_json
    FROM chatflow_sessions
    WHERE session_key > %(after)s AND session_key <= %(last)s AND NOT (owner >= %(hidden)s AND owner < %(shown)s)
    ORDER BY session_key LIMIT %(limit)s
"""
"""Some conversations' own rows."""

LOOK_AT_MESSAGES: Final[LiteralString] = """
    SELECT session_key, place, message_json FROM chatflow_messages
    WHERE session_key = ANY(%(session_keys)s) ORDER BY session_key, place
"""
"""All their messages, wherever they stand."""

LOOK_AT_TURNS: Final[LiteralString] = """
    SELECT session_key, turn_id, holder, message_id, state, lease_seconds, work_json, queued_at, ended_at
    FROM chatflow_turns WHERE session_key = ANY(%(session_keys)s) ORDER BY session_key, turn_id
"""
"""What a fault can stand in of their turns."""

LOOK_AT_JOURNALS: Final[LiteralString] = """
    SELECT turn_id, step, entry_json FROM chatflow_journal
    WHERE turn_id IN (SELECT turn_id FROM chatflow_turns WHERE session_key = ANY(%(session_keys)s))
    ORDER BY turn_id, step
"""
"""All that their turns have noted."""

ANSWERS_AFTER: Final[LiteralString] = """
    SELECT owner, session_id, message_id, processed_at, response_json FROM chatflow_processed_messages
    WHERE (owner, session_id, message_id) > (%(owner)s, %(session_id)s, %(message_id)s)
        AND NOT (owner >= %(hidden)s AND owner < %(shown)s)
    ORDER BY owner, session_id, message_id LIMIT %(limit)s
"""
"""What is kept of the next message ids."""


@attrs.frozen(kw_only=True)
class TurnDiagnosis:
    """What is wrong with a turn: *columns* change, and then it *is_dead*, or gone where no message would find it."""

    turn_id: int
    holder: str | None
    has_message: bool
    is_dead: bool
    columns: dict[str, Any]
    repairs: tuple[Repair, ...]
    set_aside: tuple[SetAside, ...]


@attrs.frozen(kw_only=True)
class Diagnosis:
    """What is wrong with a conversation, and what mending it means. Nothing, if there are no *repairs*.

    *messages* are all it is to have, by place; with *drop_before* those before that place go, and the others stay.
    """

    session_key: int
    columns: dict[str, Any]
    """Those of its row that change."""
    expires_after: float | None
    drop_before: int | None
    messages: tuple[tuple[int, str], ...] | None
    own_repairs: tuple[Repair, ...]
    set_aside: tuple[SetAside, ...]
    turns: tuple[TurnDiagnosis, ...]
    running: str | None
    """Who has its turn."""

    @property
    def repairs(self) -> tuple[Repair, ...]:
        """What is wrong with all of it."""
        return (*self.own_repairs, *(repair for turn in self.turns for repair in turn.repairs))


async def diagnose_after(
    after: int, last: int, limit: int, transaction: Transaction
) -> tuple[list[Diagnosis], int | None]:
    """Look at everything that the next conversations have; and where to go on, None at the end."""
    sessions = await transaction.ask(LOOK_AT_SESSIONS, after=after, last=last, limit=limit, **HIDDEN)
    asked = {"session_keys": [row[0] for row in sessions]}
    messages, turns, journals = await transaction.ask_all(
        Step(LOOK_AT_MESSAGES, asked), Step(LOOK_AT_TURNS, asked), Step(LOOK_AT_JOURNALS, asked)
    )
    messages_of, turns_of, lines_of = _grouped(messages), _grouped(turns), _grouped(journals)
    found = [_diagnose(row, messages_of.get(row[0], []), turns_of.get(row[0], []), lines_of) for row in sessions]
    return found, sessions[-1][0] if len(sessions) == limit else None


def _grouped(rows: Iterable[Row]) -> dict[int, list[Row]]:
    return {key: [row[1:] for row in group] for key, group in groupby(rows, itemgetter(0))}


def _diagnose(row: Row, messages: list[Row], turns: list[Row], lines_of: dict[int, list[Row]]) -> Diagnosis:
    session_key, owner, session_id, version = row[:4]
    notes = Notes(Key(owner, session_id), Key(owner, session_id))
    columns = _columns(session_key, row, notes)
    pairs = [(place, text) for place, text in messages]
    drop_before, written = history_of(session_key, pairs, fresh_position(version), notes)
    return Diagnosis(
        session_key=session_key,
        columns=columns,
        expires_after=None if "expires_after" in columns else row[12],
        drop_before=drop_before,
        messages=written,
        own_repairs=tuple(notes.repairs),
        set_aside=tuple(notes.set_aside),
        turns=tuple(
            turn for each in turns if (turn := _diagnose_turn(each, lines_of.get(each[0], []), notes.now)).repairs
        ),
        running=next((holder for _, holder, _, state, *_ in turns if state == "running"), None),
    )


def _columns(session_key: int, row: Row, notes: Notes) -> dict[str, Any]:
    """The columns that can't be read, each with what it is to hold; None is the moment of mending, or nothing."""
    _, _, session_id, _, agent_name, metadata, state, max_turns, created_at, updated_at, *others = row
    service_json, service_key, expires_after, expires_at, spent_json = others
    columns: dict[str, Any] = {}

    def look(column: str, value: Any, read: Callable[[str, str, Any], object], otherwise: Any) -> None:
        where = f"chatflow_sessions, session_key {session_key}, {column}"
        try:
            read(session_id, where, value)
        except CorruptSessionError as error:
            notes.take("session", where, error.reason, value, "replaced")
            columns[column] = otherwise

    look("session_id", session_id, reading.name, f"(session_key {session_key})")
    look("active_agent_name", agent_name, reading.name, "unknown")
    look("metadata_json", metadata, reading.values, "{}")
    look("state_json", state, reading.values, "{}")
    look("max_turns", max_turns, reading.max_turns, None)
    look("updated_at", updated_at, moment, None)
    look("created_at", created_at, moment, None if "updated_at" in columns else updated_at)
    look("service_json", service_json, reading.service, None)
    key = None if "service_json" in columns else _service_key(service_json)
    look("service_key", service_key, _be(key, "it is not the id that its service_json holds"), key)
    look("spent_json", spent_json, reading.spent, None)
    look("expires_after", expires_after, reading.optional_seconds, None)
    if not {"expires_after", "updated_at"} & columns.keys():
        expected = expiry(updated_at, expires_after)
        look("expires_at", expires_at, _be(expected, "it is not expires_after past updated_at"), None)
    return columns


def _be(expected: object, reason: str) -> Callable[[str, str, Any], object]:
    def read(session_id: str, where: str, value: object) -> None:
        if value != expected:
            raise CorruptSessionError(session_id=session_id, row=where, reason=reason)

    return read


def _service_key(service_json: object) -> str | None:
    service = reading.service("", "", service_json)
    return None if service is None else service.key


def _diagnose_turn(row: Row, lines: list[Row], key: Key) -> TurnDiagnosis:
    turn_id, holder, message_id, _, lease_seconds, work_json, queued_at, ended_at = row
    notes, columns = Notes(key, key), dict[str, Any]()
    where, fatal = f"chatflow_turns, turn_id {turn_id}", list[CorruptSessionError]()

    def look(column: str, value: Any, read: Callable[[str, str, Any], object], otherwise: Any) -> None:
        try:
            read(key.session_id, f"{where}, {column}", value)
        except CorruptSessionError as error:
            notes.take("turn", error.row, error.reason, value, "replaced")
            columns[column] = otherwise
            if column == "work_json":
                fatal.append(error)

    look("lease_seconds", lease_seconds, reading.seconds, DEFAULT_LEASE_SECONDS)
    look("work_json", work_json, reading.work, None)
    look("queued_at", queued_at, moment, None)
    if ended_at is not None:
        look("ended_at", ended_at, moment, None)
    try:
        reading.entries_of(turn_id, key.session_id, lines)
    except CorruptSessionError as error:
        notes.note("journal", error.row, error.reason, "set aside")
        fatal.append(error)
    if fatal:
        why = f"its turn is given up: {fatal[0].row}: {fatal[0].reason}"
        for step, text in lines:
            notes.keep(f"chatflow_journal, turn_id {turn_id}, step {step}", why, text)
    if fatal and message_id is None:
        kept = values_to_json(FrozenDict(turn_id=turn_id, work_json=work_json))
        notes.keep(where, "no message would ever find it", kept)
    return TurnDiagnosis(
        turn_id=turn_id,
        holder=holder,
        has_message=message_id is not None,
        is_dead=bool(fatal),
        columns=columns,
        repairs=tuple(notes.repairs),
        set_aside=tuple(notes.set_aside),
    )


@attrs.frozen(kw_only=True)
class AnswerDiagnosis:
    """What is wrong with what is kept of a message id: *columns* are those that change."""

    key: Key
    message_id: str
    columns: dict[str, Any]
    repairs: tuple[Repair, ...]
    set_aside: tuple[SetAside, ...]


def diagnose_answer(row: Row) -> AnswerDiagnosis:
    """Look at one row of what is kept of message ids."""
    owner, session_id, message_id, processed_at, response = row
    assert not owner.startswith(RESERVED)
    key = Key(owner, session_id)
    notes = Notes(key, key)
    columns: dict[str, Any] = {}
    for column, value, read in (
        ("processed_at", processed_at, moment),
        ("response_json", response, _optional_response),
    ):
        where = f"chatflow_processed_messages, message_id {shorten(message_id)}, {column}"
        try:
            read(session_id, where, value)
        except CorruptSessionError as error:
            notes.take("answer", error.row, error.reason, value, "replaced")
            columns[column] = None
    return AnswerDiagnosis(
        key=key,
        message_id=message_id,
        columns=columns,
        repairs=tuple(notes.repairs),
        set_aside=tuple(notes.set_aside),
    )


def _optional_response(session_id: str, where: str, value: object) -> object:
    return None if value is None else reading.response(session_id, where, value)
