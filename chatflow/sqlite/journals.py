"""Journals whose turn does not exist: nobody reads them, and no turn's end would delete them."""

from __future__ import annotations

from typing import Final, LiteralString

import attrs

from chatflow.core import reading
from chatflow.core.notes import Notes, SetAside
from chatflow.core.records import Key
from chatflow.core.repairs import Repair
from chatflow.sqlite.aside import put_aside
from chatflow.sqlite.database import Connection
from chatflow.sqlite.turn_statements import DROP_JOURNAL, READ_JOURNAL

JOURNALS_AFTER: Final[LiteralString] = """
    WITH RECURSIVE found (turn_id) AS (
        SELECT :after
        UNION ALL
        SELECT coalesce(
            (SELECT min(turn_id) FROM chatflow_journal WHERE turn_id > found.turn_id AND turn_id < :last), :last
        )
        FROM found WHERE found.turn_id < :last
        LIMIT :limit + 1
    )
    SELECT turn_id FROM found WHERE turn_id > :after AND turn_id < :last
"""
"""The turns of the next journals, whether they exist or not."""

TURN_EXISTS: Final[LiteralString] = "SELECT 1 FROM chatflow_turns WHERE turn_id = :turn_id"
"""Whether a journal has its turn."""

_NOBODY: Final = Key("", "")


@attrs.frozen(kw_only=True)
class JournalDiagnosis:
    """A journal without its turn; nothing, if there are no *repairs*."""

    turn_id: int
    repairs: tuple[Repair, ...]
    set_aside: tuple[SetAside, ...]


def diagnose_journal(turn_id: int, connection: Connection) -> JournalDiagnosis:
    """Look whether the turn of a journal exists."""
    notes = Notes(_NOBODY, _NOBODY)
    named = {"turn_id": turn_id}
    if connection.execute(TURN_EXISTS, named).fetchone() is None:
        for step, text in connection.execute(READ_JOURNAL, named):
            where = f"chatflow_journal, turn_id {turn_id}, step {reading.shown(step)}"
            notes.take("reference", where, "its turn does not exist", text)
    return JournalDiagnosis(turn_id=turn_id, repairs=tuple(notes.repairs), set_aside=tuple(notes.set_aside))


def mend_journal(turn_id: int, now: str, connection: Connection) -> tuple[Repair, ...]:
    """Set the journal aside, as it is now, if it has no turn."""
    diagnosis = diagnose_journal(turn_id, connection)
    if diagnosis.repairs:
        put_aside(diagnosis.set_aside, now, connection)
        connection.execute(DROP_JOURNAL, {"turn_id": turn_id})
    return diagnosis.repairs
