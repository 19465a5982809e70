"""What is taken out of conversations, by an upgrade or a repair, and kept as it stood."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, LiteralString

import attrs

from chatflow.core import reading
from chatflow.core.notes import SetAside
from chatflow.core.records import Key
from chatflow.sqlite.database import Connection
from chatflow.sqlite.turn_statements import READ_JOURNAL

SET_ASIDE: Final[LiteralString] = """
    INSERT INTO chatflow_set_aside (owner, session_id, source, content, reason, set_aside_at)
    VALUES (:owner, :session_id, :source, :content, :reason, :now)
"""
"""What can't stay where it was."""


def put_aside(taken: Iterable[SetAside], now: str, connection: Connection) -> None:
    """Keep *taken*, inside the transaction that takes it out."""
    connection.executemany(SET_ASIDE, [{**attrs.asdict(each, recurse=False), "now": now} for each in taken])


def put_journal_aside(turn_id: int, key: Key, reason: str, now: str, connection: Connection) -> None:
    """Keep all lines of a turn's journal, which is given up."""
    lines = connection.execute(READ_JOURNAL, {"turn_id": turn_id}).fetchall()
    taken = (
        SetAside(
            owner=key.owner,
            session_id=key.session_id,
            source=f"chatflow_journal, turn_id {turn_id}, step {reading.shown(step)}",
            content=text,
            reason=reason,
        )
        for step, text in lines
    )
    put_aside(taken, now, connection)
