"""What stands in rows that no constraint of a table can hold to its form: moments that Python has no date for."""

from __future__ import annotations

import datetime as dt

from chatflow.exceptions import CorruptSessionError, shorten


def moment(session_id: str, row: str, value: object) -> dt.datetime:
    """A moment's column, in UTC."""
    if not isinstance(value, dt.datetime):
        reason = f"no date in Python is {shorten(value)}"
        raise CorruptSessionError(session_id=session_id, row=row, reason=reason)
    return value.astimezone(dt.UTC)
