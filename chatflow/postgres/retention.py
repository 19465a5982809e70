"""Deleting conversations that were left alone for too long: those whose own time is over, then those that are idle."""

from __future__ import annotations

import datetime as dt
from typing import Any, Final, Literal, LiteralString

import attrs

from chatflow.core.owners import Purged
from chatflow.core.records import Key
from chatflow.postgres.connection import Row, Transaction
from chatflow.postgres.operations import HIDDEN, delete_rows

EXPIRED: Final[LiteralString] = """
    SELECT session_key, version, expires_at, owner, session_id FROM chatflow_sessions
    WHERE (%(owner)s::text IS NULL OR owner = %(owner)s)
        AND expires_at <= %(now)s AND (expires_at, session_key) > (%(after)s, %(after_key)s)
    ORDER BY expires_at, session_key LIMIT %(limit)s
"""
"""Conversations whose own time is over. What is being erased does not expire."""

OLDEST_COMMITS: Final[LiteralString] = """
    SELECT session_key, version, updated_at, owner, session_id FROM chatflow_sessions
    WHERE owner = %(owner)s AND version > %(after)s ORDER BY version LIMIT %(limit)s
"""
"""An owner's conversations in the order of their last commits."""

OLDEST_COMMITS_OF_ALL: Final[LiteralString] = """
    SELECT session_key, version, updated_at, owner, session_id FROM chatflow_sessions
    WHERE version > %(after)s AND NOT (owner >= %(hidden)s AND owner < %(shown)s)
    ORDER BY version LIMIT %(limit)s
"""
"""Those of all owners, but for what is being erased."""

LOCK_TO_DELETE: Final[LiteralString] = """
    SELECT session_key, version FROM chatflow_sessions WHERE session_key = ANY(%(session_keys)s)
    ORDER BY session_key FOR UPDATE
"""
"""Conversations as they are now; nobody changes them before they are deleted."""

IN_USE: Final[LiteralString] = """
    SELECT DISTINCT session_key FROM chatflow_turns
    WHERE session_key = ANY(%(session_keys)s) AND state NOT IN ('told', 'dead')
"""
"""Those that a turn holds."""

_LONG_AGO: Final = dt.datetime.min.replace(tzinfo=dt.UTC)


@attrs.frozen(kw_only=True)
class PurgeProgress:
    """How far a purge has come: in the order of the moments in which conversations expire, then in that of commits."""

    stage: Literal["expired", "idle"] = "expired"
    expired: tuple[Any, int] = (_LONG_AGO, 0)
    version: int = 0


async def purge_sessions(
    owner: str | None,
    idle_before: dt.datetime | None,
    now: dt.datetime,
    progress: PurgeProgress,
    limit: int,
    transaction: Transaction,
) -> Purged:
    """Look at a slice, and delete what may go."""
    if progress.stage == "expired":
        return await _purge_expired(owner, idle_before, now, progress, limit, transaction)
    assert idle_before is not None
    return await _purge_idle(owner, idle_before, now, progress, limit, transaction)


async def _purge_expired(
    owner: str | None,
    idle_before: dt.datetime | None,
    now: dt.datetime,
    progress: PurgeProgress,
    limit: int,
    transaction: Transaction,
) -> Purged:
    moment, session_key = progress.expired
    found = await transaction.ask(EXPIRED, owner=owner, now=now, after=moment, after_key=session_key, limit=limit)
    following: PurgeProgress | None = None
    if len(found) == limit:
        following = attrs.evolve(progress, expired=(found[-1][2], found[-1][0]))
    elif idle_before is not None:
        following = attrs.evolve(progress, stage="idle")
    return await _purged(found, following, transaction)


async def _purge_idle(
    owner: str | None,
    idle_before: dt.datetime,
    now: dt.datetime,
    progress: PurgeProgress,
    limit: int,
    transaction: Transaction,
) -> Purged:
    asked = {"after": progress.version, "limit": limit}
    if owner is None:
        found = await transaction.ask(OLDEST_COMMITS_OF_ALL, **asked, **HIDDEN)
    else:
        found = await transaction.ask(OLDEST_COMMITS, **asked, owner=owner)
    idle: list[Row] = []
    following = attrs.evolve(progress, version=found[-1][1]) if len(found) == limit else None
    for row in found:
        updated_at = row[2]
        # What lies in the future, or can't be read, says nothing of what comes after it.
        if not isinstance(updated_at, dt.datetime) or updated_at > now:
            continue
        if updated_at > idle_before:
            following = None
            break
        idle.append(row)
    return await _purged(idle, following, transaction)


async def _purged(rows: list[Row], following: PurgeProgress | None, transaction: Transaction) -> Purged:
    names = {row[0]: Key(row[3], row[4]) for row in rows}
    seen = {row[0]: row[1] for row in rows}
    locked = await transaction.ask(LOCK_TO_DELETE, session_keys=list(names)) if rows else []
    still = [session_key for session_key, version in locked if seen[session_key] == version]
    in_use = {row[0] for row in await transaction.ask(IN_USE, session_keys=still)}
    going = [session_key for session_key in still if session_key not in in_use]
    turns = await delete_rows(going, transaction) if going else ()
    return Purged(tuple((names[session_key], session_key) for session_key in going), turns, following)
