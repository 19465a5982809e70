"""What is taken out of conversations, by an upgrade or a repair, and kept as it stood."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final, LiteralString

import attrs

from chatflow.sqlite import reading
from chatflow.sqlite.database import Connection

SET_ASIDE: Final[LiteralString] = """
    INSERT INTO chatflow_set_aside (owner, session_id, source, content, reason, set_aside_at)
    VALUES (:owner, :session_id, :source, :content, :reason, :now)
"""
"""What can't stay where it was."""


@attrs.frozen(kw_only=True)
class SetAside:
    """What is taken out, from where, and why. Without a *session_id* it belonged to no conversation."""

    owner: str = ""
    session_id: str | None
    source: str
    content: Any = attrs.field(converter=reading.as_stood)
    reason: str


def put_aside(taken: Iterable[SetAside], now: str, connection: Connection) -> None:
    """Keep *taken*, inside the transaction that takes it out."""
    connection.executemany(SET_ASIDE, [{**attrs.asdict(each, recurse=False), "now": now} for each in taken])
