"""Mending the turns of one conversation, by the rules of core/lines.py, inside the transaction that mends it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final, LiteralString

import attrs

from chatflow.core import reading
from chatflow.core.holder import is_gone
from chatflow.core.lines import give_up, interrupt
from chatflow.core.repairs import Repair
from chatflow.sqlite.aside import put_aside
from chatflow.sqlite.database import Connection, living_holders
from chatflow.sqlite.rows import SqliteRows
from chatflow.sqlite.turn_diagnosis import TURN_COLUMNS, Fate, TurnDiagnosis
from chatflow.sqlite.turn_statements import DELETE_ROW

MEND_TURN: Final[LiteralString] = """
    UPDATE chatflow_turns SET
        state = iif(:has_state, :state, state),
        holder = iif(:has_holder, :holder, holder),
        attempt = iif(:has_attempt, :attempt, attempt),
        attempts = iif(:has_attempts, :attempts, attempts),
        beat = iif(:has_beat, :beat, beat),
        lease_seconds = iif(:has_lease_seconds, :lease_seconds, lease_seconds),
        accepted = iif(:has_accepted, :accepted, accepted),
        agent_name = iif(:has_agent_name, :agent_name, agent_name),
        digest = iif(:has_digest, :digest, digest),
        work_json = iif(:has_work_json, NULL, work_json),
        parent = iif(:has_parent, NULL, parent),
        queued_at = iif(:has_queued_at, :now, queued_at),
        ended_at = iif(:has_ended_at, iif(state IN ('told', 'dead', 'answered'), :now, NULL), ended_at)
    WHERE turn_id = :turn_id
"""
"""What could not be read gives way to what can; what that makes of the row, the rules of lines say then."""


def is_held(holder: object) -> bool:
    """Whether somebody has in hand what *holder* has."""
    return reading.is_text(holder) and holder != "" and not is_gone(holder, living_holders())


def mend_turns(diagnoses: Iterable[TurnDiagnosis], now: str, connection: Connection) -> tuple[Repair, ...]:
    """Mend each turn, unless somebody has it in hand."""
    repairs: list[Repair] = []
    for diagnosis in diagnoses:
        if is_held(diagnosis.holder):
            repairs += (attrs.evolve(repair, action="left alone") for repair in diagnosis.repairs)
        else:
            _mend_turn(diagnosis, now, connection)
            repairs += diagnosis.repairs
    return tuple(repairs)


def _mend_turn(diagnosis: TurnDiagnosis, now: str, connection: Connection) -> None:
    put_aside(diagnosis.set_aside, now, connection)
    if diagnosis.fate is Fate.GONE:
        connection.execute(DELETE_ROW, {"turn_id": diagnosis.turn_id})
        return
    if diagnosis.columns:
        values = changes(TURN_COLUMNS, diagnosis.columns)
        connection.execute(MEND_TURN, {**values, "turn_id": diagnosis.turn_id, "now": now})
    rows = SqliteRows(connection, "", now)
    row = rows.find(diagnosis.turn_id)
    assert row is not None
    if diagnosis.fate is Fate.DEAD:
        give_up(rows, row)
    elif diagnosis.fate is Fate.INTERRUPTED:
        interrupt(rows, row)


def changes(columns: tuple[str, ...], changed: dict[str, Any]) -> dict[str, Any]:
    """The parameters of a statement that changes some of *columns*."""
    return {
        **{column: changed.get(column) for column in columns},
        **{f"has_{column}": column in changed for column in columns},
    }
