"""What is taken out of conversations, by a repair or with work that can't be read, and kept as it stood."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterable
from typing import Final, LiteralString

import attrs

from chatflow.core.notes import SetAside
from chatflow.core.records import Key
from chatflow.postgres.connection import Transaction
from chatflow.postgres.turn_statements import READ_JOURNAL

SET_ASIDE: Final[LiteralString] = """
    INSERT INTO chatflow_set_aside (owner, session_id, source, content, reason, set_aside_at)
    VALUES (%(owner)s, %(session_id)s, %(source)s, %(content)s, %(reason)s, %(now)s)
"""
"""What can't stay where it was."""


async def put_aside(taken: Iterable[SetAside], now: dt.datetime, transaction: Transaction) -> None:
    """Keep *taken*, inside the transaction that takes it out."""
    for each in taken:
        values = attrs.asdict(each, recurse=False)
        content = None if each.content is None else str(each.content)
        await transaction.change(SET_ASIDE, **{**values, "content": content}, now=now)


async def put_journal_aside(turn_id: int, key: Key, reason: str, now: dt.datetime, transaction: Transaction) -> None:
    """Keep all lines of a turn's journal, which is given up."""
    found = await transaction.ask(READ_JOURNAL, turn_id=turn_id)
    taken = (
        SetAside(
            owner=key.owner,
            session_id=key.session_id,
            source=f"chatflow_journal, turn_id {turn_id}, step {step}",
            content=text,
            reason=reason,
        )
        for step, text in found
    )
    await put_aside(taken, now, transaction)
