"""Operations: each is one function of a connection, run whole in one transaction, and reads from top to bottom."""

from __future__ import annotations

import datetime as dt
import logging
from typing import Final

import attrs

from chatflow.core.codec import (
    message_from_json,
    response_from_json,
    values_from_json,
    values_to_json,
)
from chatflow.core.history import History
from chatflow.core.messages import AgentResponse, Message
from chatflow.core.records import (
    Answered,
    Key,
    Lost,
    NewSession,
    Page,
    Seen,
    SessionInfo,
    Snapshot,
    system_place,
)
from chatflow.core.values import EMPTY, FrozenDict
from chatflow.exceptions import CorruptSessionError, SessionFormatError
from chatflow.sqlite import statements
from chatflow.sqlite.database import Connection
from chatflow.sqlite.turn_statements import PURGE_TURNS, TURNS_OF_SESSION

logger = logging.getLogger("chatflow.store")

_PURGED_WITH_EACH_MARK: Final = 10
"""Expired ids that a mark removes: more than it adds, so that none pile up."""


def load(key: Key, known: Snapshot | None, connection: Connection) -> Snapshot | Seen:
    """The conversation with its messages, unless it is as *known*."""
    row = connection.execute(statements.LOAD_SESSION, {"owner": key.owner, "session_id": key.session_id}).fetchone()
    if row is None:
        return Seen.ABSENT
    session_key, version, agent_name, metadata_json, state_json, max_turns = row
    if known is not None and known.session_key != session_key:
        known = None
    if known is not None and known.version == version:
        return Seen.UNCHANGED
    history, start, system_start = _load_history(key, session_key, known, connection)
    where = f"chatflow_sessions, session_key {session_key}"
    return Snapshot(
        session_key=session_key,
        version=version,
        agent_name=agent_name,
        metadata=values(key, f"{where}, metadata_json", metadata_json),
        state=values(key, f"{where}, state_json", state_json),
        max_turns=max_turns,
        history=history,
        start=start,
        system_start=system_start,
    )


def values(key: Key, row: str, text: str) -> FrozenDict:
    """Metadata or state as they were stored."""
    try:
        return values_from_json(text)
    except SessionFormatError as error:
        raise CorruptSessionError(session_id=key.session_id, row=row, reason=str(error)) from error


def _message(key: Key, session_key: int, place: int, text: str) -> Message:
    try:
        return message_from_json(text)
    except SessionFormatError as error:
        row = f"chatflow_messages, session_key {session_key}, place {place}"
        raise CorruptSessionError(session_id=key.session_id, row=row, reason=str(error)) from error


def _load_history(
    key: Key, session_key: int, known: Snapshot | None, connection: Connection
) -> tuple[History, int, int]:
    """The messages, of which those that *known* has need not be read again: a place never means two messages."""
    first_system, first = connection.execute(statements.FIRST_PLACES, {"session_key": session_key}).fetchone()
    system_start = 0 if first_system is None else first_system - system_place(0)
    start = first or 0
    systems: list[Message] = []
    body: list[Message] = []
    if known is not None and known.system_start <= system_start:
        systems += known.history.systems_from(system_start - known.system_start)
    if known is not None and known.start <= start:
        body += known.history.body_from(start - known.start)
    rows = connection.execute(
        statements.LOAD_MESSAGES,
        {
            "session_key": session_key,
            "system_place": system_place(system_start) + len(systems),
            "place": start + len(body),
        },
    )
    for place, text in rows:
        expected = start + len(body) if place >= 0 else system_place(system_start) + len(systems)
        if place != expected:
            row = f"chatflow_messages, session_key {session_key}, place {expected}"
            raise CorruptSessionError(session_id=key.session_id, row=row, reason="the row is missing")
        (body if place >= 0 else systems).append(_message(key, session_key, place, text))
    return History(systems, len(systems), body, 0, len(body)), start, system_start


def create(key: Key, new: NewSession, now: str, connection: Connection) -> Snapshot:
    """Create the conversation, or merge *new*'s metadata into the one that is there."""
    created = connection.execute(
        statements.CREATE_SESSION,
        {
            "owner": key.owner,
            "session_id": key.session_id,
            "active_agent_name": new.agent_name,
            "metadata_json": values_to_json(new.metadata),
            "max_turns": new.max_turns,
            "now": now,
        },
    ).rowcount
    snapshot = load(key, None, connection)
    assert isinstance(snapshot, Snapshot)
    if created or not new.metadata:
        return snapshot
    metadata = FrozenDict({**snapshot.metadata, **new.metadata})
    version = update(connection, snapshot.session_key, snapshot.version, now, metadata=metadata)
    assert version is not None
    return attrs.evolve(snapshot, version=version, metadata=metadata)


def update(
    connection: Connection,
    session_key: int,
    seen: int,
    now: str,
    *,
    metadata: FrozenDict | None = None,
    agent_name: str | None = None,
    state_json: str | None = None,
) -> int | None:
    """Change a conversation that still has the version *seen*, and return the new one; None for another version."""
    row = connection.execute(
        statements.UPDATE_SESSION,
        {
            "session_key": session_key,
            "seen": seen,
            "active_agent_name": agent_name,
            "metadata_json": None if metadata is None else values_to_json(metadata),
            "state_json": state_json,
            "now": now,
        },
    ).fetchone()
    return None if row is None else row[0]


def find_session(key: Key, connection: Connection) -> int | None:
    """The number of the conversation that has this id now."""
    row = connection.execute(statements.LOAD_SESSION, {"owner": key.owner, "session_id": key.session_id}).fetchone()
    return None if row is None else row[0]


def lost(key: Key, known: Snapshot | None, connection: Connection) -> Lost:
    """What a turn has lost that does not find its row: the conversation, or only the row."""
    session_key = find_session(key, connection)
    gone = session_key is None or (known is not None and session_key != known.session_key)
    return Lost.SESSION if gone else Lost.TURN


def delete(key: Key, connection: Connection) -> tuple[int, ...] | None:
    """Delete the conversation, if it is there."""
    session_key = find_session(key, connection)
    return None if session_key is None else _delete_one(key, session_key, connection)


def _delete_one(key: Key, session_key: int, connection: Connection) -> tuple[int, ...]:
    turns = connection.execute(TURNS_OF_SESSION, {"session_key": session_key}).fetchall()
    connection.execute(statements.DELETE_SESSION, {"session_key": session_key})
    named = {"owner": key.owner, "session_id": key.session_id}
    connection.execute(statements.FORGET_RESPONSES, named)
    connection.execute(statements.DELETE_SET_ASIDE, named)
    return tuple(row[0] for row in turns)


def delete_slice(owner: str, after: int, limit: int, connection: Connection) -> tuple[int | None, tuple[int, ...]]:
    """Delete up to *limit* of the owner's conversations."""
    rows = connection.execute(statements.SESSIONS_AFTER, {"owner": owner, "after": after, "limit": limit}).fetchall()
    turns = [turn for _, key, session_id in rows for turn in _delete_one(Key(owner, session_id), key, connection)]
    return (rows[-1][0] if len(rows) == limit else None), tuple(turns)


def page_of_sessions(owner: str, limit: int, before: int, connection: Connection) -> Page[SessionInfo]:
    """A page of the owner's conversations."""
    rows = connection.execute(
        statements.PAGE_OF_SESSIONS, {"owner": owner, "before": before, "limit": limit + 1}
    ).fetchall()
    items = tuple(
        SessionInfo(
            session_id=session_id,
            active_agent_name=agent_name,
            metadata=_listed(Key(owner, session_id), metadata_json),
            created_at=dt.datetime.fromisoformat(created_at),
            updated_at=dt.datetime.fromisoformat(updated_at),
        )
        for _, session_id, agent_name, metadata_json, created_at, updated_at in rows[:limit]
    )
    return Page(items, rows[limit - 1][0] if len(rows) > limit else None)


def _listed(key: Key, metadata_json: str) -> FrozenDict:
    # One conversation that can't be read must not hide all others.
    try:
        return values(key, "chatflow_sessions, metadata_json", metadata_json)
    except CorruptSessionError as error:
        logger.warning("%s; it is listed without its metadata", error)
        return EMPTY


def page_of_messages(key: Key, limit: int, before: int, connection: Connection) -> Page[Message] | None:
    """A page of one conversation."""
    session_key = find_session(key, connection)
    if session_key is None:
        return None
    rows = connection.execute(
        statements.PAGE_OF_MESSAGES, {"session_key": session_key, "before": before, "limit": limit + 1}
    ).fetchall()
    page = rows[:limit]
    items = tuple(_message(key, session_key, place, text) for place, text in reversed(page))
    return Page(items, page[-1][0] if len(rows) > limit else None)


def find_processed(scope: Key, message_id: str, expired_before: str, connection: Connection) -> Answered | None:
    """The stored answer, if the id is remembered."""
    row = connection.execute(
        statements.READ_PROCESSED,
        {
            "owner": scope.owner,
            "session_id": scope.session_id,
            "message_id": message_id,
            "expired_before": expired_before,
        },
    ).fetchone()
    if row is None:
        return None
    digest, text = row
    return Answered(digest, None if text is None else _response(scope, message_id, text))


def _response(scope: Key, message_id: str, text: str) -> AgentResponse:
    try:
        return response_from_json(text)
    except SessionFormatError as error:
        row = f"chatflow_processed_messages, message_id {message_id!r}"
        raise CorruptSessionError(session_id=scope.session_id, row=row, reason=str(error)) from error


def mark(
    scope: Key,
    message_id: str,
    digest: str | None,
    response_json: str | None,
    now: str,
    expired_before: str,
    connection: Connection,
) -> bool:
    """Claim the id; False if it was claimed before."""
    marked = connection.execute(
        statements.MARK_PROCESSED,
        {
            "owner": scope.owner,
            "session_id": scope.session_id,
            "message_id": message_id,
            "digest": digest,
            "response_json": response_json,
            "now": now,
            "expired_before": expired_before,
        },
    ).fetchone()
    purge(_PURGED_WITH_EACH_MARK, expired_before, connection)
    return marked is not None


def purge(limit: int, expired_before: str, connection: Connection) -> int:
    """Delete a slice of the expired ids, and of the turns that ended as long ago without being sent again."""
    connection.execute(PURGE_TURNS, {"expired_before": expired_before, "limit": limit})
    return connection.execute(statements.PURGE_PROCESSED, {"expired_before": expired_before, "limit": limit}).rowcount
