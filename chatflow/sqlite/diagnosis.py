"""What is wrong with one conversation, and what it would be like without that. Reads only.

A conversation is looked at by its number, whether its own row exists or only rows that refer to it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Final, LiteralString

import attrs

from chatflow.core import reading
from chatflow.core.notes import Notes, SetAside
from chatflow.core.owners import RESERVED
from chatflow.core.records import Key, fresh_position
from chatflow.core.repairs import Repair
from chatflow.core.sorting import history_of
from chatflow.exceptions import CorruptSessionError
from chatflow.sqlite import statements
from chatflow.sqlite.database import Connection
from chatflow.sqlite.operations import expiry
from chatflow.sqlite.turn_diagnosis import (
    LOOK_AT_TURNS,
    TURN_COLUMNS,
    TurnDiagnosis,
    as_json,
    diagnose_turns,
    keep_journal,
)
from chatflow.sqlite.turn_statements import READ_JOURNAL

LOOK_AT_SESSION: Final[LiteralString] = """
    SELECT
        owner, session_id, active_agent_name, metadata_json, state_json, max_turns, version, created_at, updated_at,
        service_json, service_key, expires_after, expires_at, spent_json
    FROM chatflow_sessions WHERE session_key = :session_key
"""
"""A conversation's own row."""

LOOK_AT_MESSAGES: Final[LiteralString] = """
    SELECT place, message_json FROM chatflow_messages WHERE session_key = :session_key ORDER BY place
"""
"""All its messages, wherever they stand."""


@attrs.frozen(kw_only=True)
class Diagnosis:
    """What is wrong with a conversation, and what mending it means. Nothing, if there are no *repairs*.

    *seen* is the version that was looked at, None where the conversation has no row of its own. *messages* are
    all it is to have, by place; with *drop_before* the rows before that place go, and the others stay as they are.
    """

    session_key: int
    seen: Any
    now: Key
    later: Key
    own_repairs: tuple[Repair, ...]
    set_aside: tuple[SetAside, ...]
    columns: dict[str, Any]
    """Those of its row that change."""
    expires_after: float | None = None
    """What it will have: mending is a commit, from which the time counts anew."""
    drop_before: int | None = None
    messages: tuple[tuple[int, str], ...] | None = None
    looked_at: int
    """How many messages it has: what the look has cost."""
    turns: tuple[TurnDiagnosis, ...] = ()
    """What is wrong with its turns."""

    @property
    def repairs(self) -> tuple[Repair, ...]:
        """What is wrong with all of it."""
        return (*self.own_repairs, *(repair for turn in self.turns for repair in turn.repairs))


def diagnose(session_key: int, connection: Connection) -> Diagnosis:
    """Look at everything that one conversation has."""
    row = connection.execute(LOOK_AT_SESSION, {"session_key": session_key}).fetchone()
    if row is None:
        return _without_session(session_key, connection)
    owner, session_id, *_ = row
    if isinstance(owner, str) and owner.startswith(RESERVED):
        return _being_erased(session_key)
    now = Key(reading.shown(owner), reading.shown(session_id))
    notes = Notes(now, _name(session_key, owner, session_id, connection))
    columns = _columns(session_key, row, notes)
    messages = connection.execute(LOOK_AT_MESSAGES, {"session_key": session_key}).fetchall()
    version = row[6]
    expires_after = None if "expires_after" in columns else row[11]
    drop_before, written = history_of(session_key, messages, fresh_position(columns.get("version", version)), notes)
    return Diagnosis(
        session_key=session_key,
        seen=version,
        now=notes.now,
        later=notes.later,
        own_repairs=tuple(notes.repairs),
        set_aside=tuple(notes.set_aside),
        columns=columns,
        expires_after=expires_after,
        drop_before=drop_before,
        messages=written,
        looked_at=len(messages),
        turns=diagnose_turns(session_key, notes.now, notes.later, connection),
    )


def _being_erased(session_key: int) -> Diagnosis:
    """Nothing to mend: all of it is about to go."""
    nobody = Key("", "")
    return Diagnosis(
        session_key=session_key,
        seen=None,
        now=nobody,
        later=nobody,
        own_repairs=(),
        set_aside=(),
        columns={},
        looked_at=0,
    )


def _name(session_key: int, owner: object, session_id: object, connection: Connection) -> Key:
    """The conversation's name, or one that is nobody else's where a part of it can't be read."""
    found = Key(_readable(owner, session_key), _readable(session_id, session_key, may_be_empty=False))
    while found != Key(reading.shown(owner), reading.shown(session_id)) and _is_taken(found, connection):
        found = attrs.evolve(found, session_id=f"{found.session_id}*")
    return found


def _readable(value: object, session_key: int, *, may_be_empty: bool = True) -> str:
    shown = reading.shown(value)
    return shown if shown == value and (shown or may_be_empty) else f"{shown} (session_key {session_key})".lstrip()


def _is_taken(key: Key, connection: Connection) -> bool:
    found = connection.execute(statements.LOAD_SESSION, {"owner": key.owner, "session_id": key.session_id})
    return found.fetchone() is not None


def _columns(session_key: int, row: tuple[Any, ...], notes: Notes) -> dict[str, Any]:
    """The columns that can't be read, each with what it is to hold; None is the moment of mending, or no number."""
    owner, session_id, agent_name, metadata, state, max_turns, version, created_at, updated_at, *others = row
    columns: dict[str, Any] = {}

    def look(
        column: str, value: object, read: Callable[[str, str, Any], object], otherwise: Any, then: str = ""
    ) -> None:
        where = f"chatflow_sessions, session_key {session_key}, {column}"
        try:
            read(notes.now.session_id, where, value)
        except CorruptSessionError as error:
            notes.take("session", where, f"{error.reason}{then}", value, "replaced")
            columns[column] = otherwise

    later = notes.later
    look("owner", owner, reading.text, later.owner, f"; repair() calls it {later.owner!r}")
    look("session_id", session_id, reading.name, later.session_id, f"; repair() calls it {later.session_id!r}")
    look("active_agent_name", agent_name, reading.name, reading.shown(agent_name) or "unknown")
    look("metadata_json", metadata, reading.values, "{}")
    look("state_json", state, reading.values, "{}")
    look("max_turns", max_turns, reading.max_turns, None)
    look("version", version, reading.number, 0)
    look("updated_at", updated_at, reading.moment, None)
    look("created_at", created_at, reading.moment, None if "updated_at" in columns else updated_at)
    service_json, service_key, expires_after, expires_at, spent_json = others
    look("service_json", service_json, reading.service, None)
    if "service_json" in columns:
        columns["service_key"] = None
    else:
        key = _service_key(service_json)
        look("service_key", service_key, partial(_be, key, "it is not the id that its service_json holds"), key)
    look("spent_json", spent_json, reading.spent, None)
    look("expires_after", expires_after, reading.optional_seconds, None)
    if "expires_after" not in columns and "updated_at" not in columns:
        # Mended with the row, whatever is wrong with it: that is a commit, from which the time counts anew.
        expected = expiry(updated_at, expires_after)
        look("expires_at", expires_at, partial(_be, expected, "it is not expires_after past updated_at"), None)
    return columns


def _be(expected: object, reason: str, session_id: str, where: str, value: object) -> None:
    if value != expected:
        raise CorruptSessionError(session_id=session_id, row=where, reason=reason)


def _service_key(service_json: object) -> str | None:
    service = reading.service("", "", service_json)
    return None if service is None else service.key


def _without_session(session_key: int, connection: Connection) -> Diagnosis:
    """Rows whose conversation is not there: nobody can reach them."""
    nobody, reason = Key("", ""), "its conversation does not exist"
    notes = Notes(nobody, nobody)
    for place, text in connection.execute(LOOK_AT_MESSAGES, {"session_key": session_key}):
        notes.take(
            "reference", f"chatflow_messages, session_key {session_key}, place {reading.shown(place)}", reason, text
        )
    for turn_id, *values in connection.execute(LOOK_AT_TURNS, {"session_key": session_key}):
        row = dict(zip(TURN_COLUMNS, values, strict=True))
        notes.take("reference", f"chatflow_turns, turn_id {turn_id}", reason, as_json(turn_id, row))
        keep_journal(turn_id, connection.execute(READ_JOURNAL, {"turn_id": turn_id}).fetchall(), reason, notes)
    return Diagnosis(
        session_key=session_key,
        seen=None,
        now=nobody,
        later=nobody,
        own_repairs=tuple(notes.repairs),
        set_aside=tuple(notes.set_aside),
        columns={},
        messages=(),
        looked_at=len(notes.repairs),
    )
