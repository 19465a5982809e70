"""Deleting conversations that were left alone for too long: those whose own time is over, then those that are idle."""

from __future__ import annotations

from typing import Any, Final, Literal, LiteralString

import attrs

from chatflow.core import reading
from chatflow.core.owners import Purged
from chatflow.core.records import Key
from chatflow.exceptions import CorruptSessionError
from chatflow.sqlite import operations, statements
from chatflow.sqlite.database import Connection

EXPIRED: Final[LiteralString] = """
    SELECT session_key, owner, session_id, expires_at, EXISTS (
        SELECT 1 FROM chatflow_turns AS turn
        WHERE turn.session_key = session.session_key AND turn.state NOT IN ('told', 'dead')
    )
    FROM chatflow_sessions AS session
    WHERE owner = :owner AND expires_at <= :now AND (expires_at, session_key) > (CAST(:after AS TEXT), :after_key)
    ORDER BY expires_at, session_key LIMIT :limit
"""
"""An owner's conversations whose own time is over, and whether a turn holds them."""

EXPIRED_OF_ALL: Final[LiteralString] = """
    SELECT session_key, owner, session_id, expires_at, EXISTS (
        SELECT 1 FROM chatflow_turns AS turn
        WHERE turn.session_key = session.session_key AND turn.state NOT IN ('told', 'dead')
    )
    FROM chatflow_sessions AS session
    WHERE expires_at <= :now AND (expires_at, session_key) > (CAST(:after AS TEXT), :after_key)
    ORDER BY expires_at, session_key LIMIT :limit
"""
"""Those of all owners. What is being erased does not expire."""

OLDEST_COMMITS: Final[LiteralString] = """
    SELECT session_key, owner, session_id, updated_at, EXISTS (
        SELECT 1 FROM chatflow_turns AS turn
        WHERE turn.session_key = session.session_key AND turn.state NOT IN ('told', 'dead')
    ), version
    FROM chatflow_sessions AS session
    WHERE owner = :owner AND version > :after ORDER BY version LIMIT :limit
"""
"""An owner's conversations in the order of their last commits, and whether a turn holds them."""

OLDEST_COMMITS_OF_ALL: Final[LiteralString] = """
    SELECT session_key, owner, session_id, updated_at, EXISTS (
        SELECT 1 FROM chatflow_turns AS turn
        WHERE turn.session_key = session.session_key AND turn.state NOT IN ('told', 'dead')
    ), version
    FROM chatflow_sessions AS session
    WHERE version > :after AND (owner < char(0) OR owner >= char(1)) ORDER BY version LIMIT :limit
"""
"""Those of all owners, but for what is being erased."""


@attrs.frozen(kw_only=True)
class PurgeProgress:
    """How far a purge has come: in the order of the moments in which conversations expire, then in that of commits."""

    stage: Literal["expired", "idle"] = "expired"
    expired: tuple[Any, int] = ("", 0)
    version: Any = 0


def purge_sessions(
    owner: str | None, idle_before: str | None, now: str, progress: PurgeProgress, limit: int, connection: Connection
) -> Purged:
    """Look at a slice, and delete what may go."""
    if progress.stage == "expired":
        return _purge_expired(owner, idle_before, now, progress, limit, connection)
    assert idle_before is not None
    return _purge_idle(owner, idle_before, now, progress, limit, connection)


def _purge_expired(
    owner: str | None, idle_before: str | None, now: str, progress: PurgeProgress, limit: int, connection: Connection
) -> Purged:
    moment, session_key = progress.expired
    asked = {"now": now, "after": reading.original(moment), "after_key": session_key, "limit": limit}
    if owner is None:
        found = connection.execute(EXPIRED_OF_ALL, asked).fetchall()
    else:
        found = connection.execute(EXPIRED, {**asked, "owner": owner}).fetchall()
    following: PurgeProgress | None = None
    if len(found) == limit:
        following = attrs.evolve(progress, expired=(found[-1][3], found[-1][0]))
    elif idle_before is not None:
        following = attrs.evolve(progress, stage="idle")
    expired = [row[:3] for row in found if _is_moment(row[3]) and not row[4]]
    return _purged(expired, following, connection)


def _purge_idle(
    owner: str | None, idle_before: str, now: str, progress: PurgeProgress, limit: int, connection: Connection
) -> Purged:
    asked = {"after": progress.version, "limit": limit}
    if owner is None:
        found = connection.execute(OLDEST_COMMITS_OF_ALL, asked).fetchall()
    else:
        found = connection.execute(OLDEST_COMMITS, {**asked, "owner": owner}).fetchall()
    idle: list[tuple[Any, ...]] = []
    following = attrs.evolve(progress, version=found[-1][5]) if len(found) == limit else None
    for row in found:
        updated_at, is_held = row[3:5]
        # What lies in the future, or can't be read, says nothing of what comes after it.
        if not _is_moment(updated_at) or updated_at > now:
            continue
        if updated_at > idle_before:
            following = None
            break
        if not is_held:
            idle.append(row[:3])
    return _purged(idle, following, connection)


def _purged(rows: list[tuple[Any, ...]], following: PurgeProgress | None, connection: Connection) -> Purged:
    sessions: list[tuple[Key, int]] = []
    turns: list[int] = []
    for session_key, owner, session_id in rows:
        key = Key(reading.shown(owner), reading.shown(session_id))
        connection.execute(statements.FORGET_SET_ASIDE, {"owner": key.owner, "session_id": key.session_id})
        turns += operations.delete_row(session_key, connection)
        sessions.append((key, session_key))
    return Purged(tuple(sessions), tuple(turns), following)


def _is_moment(value: object) -> bool:
    """Whether it can be read: by what is damaged, nothing is deleted."""
    try:
        reading.moment("", "", value)
    except CorruptSessionError:
        return False
    return True
