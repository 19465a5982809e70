"""Operations: each is one function of a connection, run whole in one transaction, and reads from top to bottom."""

from __future__ import annotations

import datetime as dt
import logging
from collections.abc import Callable
from itertools import count, takewhile
from typing import Any, LiteralString, TypeVar

import attrs

from chatflow.core import reading, writing
from chatflow.core.codec import values_to_json
from chatflow.core.history import History
from chatflow.core.messages import Message
from chatflow.core.quick import usual_message
from chatflow.core.records import (
    Answered,
    Key,
    Lost,
    NewSession,
    Page,
    Seen,
    SessionInfo,
    Snapshot,
    fresh_position,
    system_place,
)
from chatflow.core.values import EMPTY, FrozenDict
from chatflow.exceptions import CorruptSessionError
from chatflow.sqlite import statements
from chatflow.sqlite.database import Connection, as_text, fetch_bytes, is_damaged
from chatflow.sqlite.turn_statements import PURGE_TURNS, TURNS_OF_SESSION

logger = logging.getLogger("chatflow.store")

_T = TypeVar("_T")


def load(key: Key, known: Snapshot | None, connection: Connection) -> Snapshot | Seen:
    """The conversation with its messages, unless it is as *known*."""
    row = connection.execute(statements.LOAD_SESSION, {"owner": key.owner, "session_id": key.session_id}).fetchone()
    if row is None:
        return Seen.ABSENT
    session_key, version, agent_name, metadata_json, state_json, max_turns, service_json, expires_after, spent_json = (
        row
    )
    if known is not None and known.session_key != session_key:
        known = None
    if known is not None and known.version == version:
        return Seen.UNCHANGED
    history, start, system_start = _load_history(key, session_key, fresh_position(version), known, connection)
    where, session_id = f"chatflow_sessions, session_key {session_key}", key.session_id
    return Snapshot(
        session_key=session_key,
        version=version,
        agent_name=reading.name(session_id, f"{where}, active_agent_name", agent_name),
        metadata=reading.values(session_id, f"{where}, metadata_json", metadata_json),
        state=reading.values(session_id, f"{where}, state_json", state_json),
        max_turns=reading.max_turns(session_id, f"{where}, max_turns", max_turns),
        history=history,
        start=start,
        system_start=system_start,
        service=reading.service(session_id, f"{where}, service_json", service_json),
        expires_after=reading.optional_seconds(session_id, f"{where}, expires_after", expires_after),
        spent=reading.spent(session_id, f"{where}, spent_json", spent_json),
    )


def _rows_of(
    key: Key, session_key: int, statement: LiteralString, values: dict[str, int], connection: Connection
) -> list[tuple[Any, ...]]:
    """A conversation's message rows; where the disk pages that hold them are damaged, the others' may be sound."""
    try:
        return fetch_bytes(connection, statement, {"session_key": session_key, **values})
    except Exception as error:
        if not is_damaged(error):
            raise
        row = f"chatflow_messages, session_key {session_key}"
        raise CorruptSessionError(session_id=key.session_id, row=row, reason=str(error)) from error


def _load_history(
    key: Key, session_key: int, fresh: int, known: Snapshot | None, connection: Connection
) -> tuple[History, int, int]:
    """The messages, of which those that *known* has need not be read again: a place never means two messages.

    Where there are none, no place tells which were used: the next one stands at the position *fresh*.
    """
    first_system, first = _rows_of(key, session_key, statements.FIRST_PLACES, {}, connection)[0]
    for place in (first_system, first):
        if not isinstance(place, int | None):
            row = f"chatflow_messages, session_key {session_key}, place {reading.shown(place)}"
            raise CorruptSessionError(session_id=key.session_id, row=row, reason="its place is not a number")
    system_start = fresh if first_system is None else first_system - system_place(0)
    start = fresh if first is None else first
    systems: list[Message] = []
    body: list[Message] = []
    if known is not None and known.system_start <= system_start:
        systems += known.history.systems_from(system_start - known.system_start)
    if known is not None and known.start <= start:
        body += known.history.body_from(start - known.start)
    new = {"system_place": system_place(system_start) + len(systems), "place": start + len(body)}
    rows = _rows_of(key, session_key, statements.LOAD_MESSAGES, new, connection)
    systems_found = sum(1 for _ in takewhile(lambda row: isinstance(row[0], int) and row[0] < 0, rows))
    for kept, expected, found in (
        (systems, new["system_place"], rows[:systems_found]),
        (body, new["place"], rows[systems_found:]),
    ):
        _refuse_gaps(key, session_key, expected, [place for place, _ in found])
        kept += [_message(key, session_key, place, text) for place, text in found]
    return History(systems, len(systems), body, 0, len(body)), start, system_start


def _message(key: Key, session_key: int, place: object, text: object) -> Message:
    return usual_message(text) or reading.message(key.session_id, session_key, place, as_text(text))


def _refuse_gaps(key: Key, session_key: int, expected: int, places: list[int]) -> None:
    if places == [*range(expected, expected + len(places))]:
        return
    missing = next(place for place, found in zip(count(expected), places, strict=False) if place != found)
    row = f"chatflow_messages, session_key {session_key}, place {missing}"
    raise CorruptSessionError(session_id=key.session_id, row=row, reason="the row is missing")


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
            "service_json": writing.service_to_json(new.service),
            "service_key": None if new.service is None else new.service.key,
            "expires_after": new.expires_after,
            "expires_at": expiry(now, new.expires_after),
            "now": now,
        },
    ).rowcount
    snapshot = load(key, None, connection)
    assert isinstance(snapshot, Snapshot)
    if created:
        return attrs.evolve(snapshot, start=0, system_start=0)
    if not new.metadata:
        return snapshot
    metadata = FrozenDict({**snapshot.metadata, **new.metadata})
    version = update(connection, snapshot, snapshot.version, now, metadata=metadata)
    assert version is not None
    return attrs.evolve(snapshot, version=version, metadata=metadata)


def expiry(now: str, expires_after: float | None) -> str | None:
    """`writing.expiry`, as it is stored."""
    if expires_after is None:
        return None
    moment = writing.expiry(dt.datetime.fromisoformat(now), expires_after)
    return None if moment is None else text_of(moment)


def text_of(moment: dt.datetime) -> str:
    """A moment as it is stored: always with microseconds, so that the order of the texts is that of the moments."""
    return moment.isoformat(timespec="microseconds")


def update(
    connection: Connection,
    session: Snapshot,
    seen: int,
    now: str,
    *,
    metadata: FrozenDict | None = None,
    agent_name: str | None = None,
    state_json: str | None = None,
    spent_json: str | None = None,
    changes_service: bool = False,
) -> int | None:
    """Change a conversation that still has the version *seen*, and return the new one; None for another version."""
    row = connection.execute(
        statements.UPDATE_SESSION,
        {
            "session_key": session.session_key,
            "seen": seen,
            "active_agent_name": agent_name,
            "metadata_json": None if metadata is None else values_to_json(metadata),
            "state_json": state_json,
            "spent_json": spent_json,
            "changes_service": changes_service,
            "service_json": writing.service_to_json(session.service),
            "service_key": None if session.service is None else session.service.key,
            "expires_at": expiry(now, session.expires_after),
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
    connection.execute(statements.FORGET_SET_ASIDE, {"owner": key.owner, "session_id": key.session_id})
    return None if session_key is None else delete_row(session_key, connection)


def delete_row(session_key: int, connection: Connection) -> tuple[int, ...]:
    """Delete a conversation with all that hangs on its number; its turns."""
    turns = connection.execute(TURNS_OF_SESSION, {"session_key": session_key}).fetchall()
    connection.execute(statements.FORGET_RESPONSES, {"session_key": session_key})
    connection.execute(statements.DELETE_SESSION, {"session_key": session_key})
    return tuple(row[0] for row in turns)


def delete_slice(owner: str, after: int, limit: int, connection: Connection) -> tuple[int | None, tuple[int, ...]]:
    """Delete up to *limit* of the owner's conversations."""
    found = connection.execute(statements.SESSIONS_AFTER, {"owner": owner, "after": after, "limit": limit}).fetchall()
    turns: list[int] = []
    for _, session_key, session_id in found:
        connection.execute(statements.FORGET_SET_ASIDE, {"owner": owner, "session_id": reading.shown(session_id)})
        turns += delete_row(session_key, connection)
    if len(found) == limit:
        return found[-1][0], tuple(turns)
    # What is left was set aside of conversations that are gone, or that nobody can name.
    connection.execute(statements.FORGET_SET_ASIDE_OF_OWNER, {"owner": owner})
    return None, tuple(turns)


def page_of_sessions(owner: str | None, limit: int, before: int, connection: Connection) -> Page[SessionInfo]:
    """A page of the owner's conversations, or of all owners'."""
    asked = {"before": before, "limit": limit + 1}
    if owner is None:
        found = connection.execute(statements.PAGE_OF_ALL_SESSIONS, asked).fetchall()
    else:
        found = connection.execute(statements.PAGE_OF_SESSIONS, {**asked, "owner": owner}).fetchall()
    return Page(tuple(map(_info, found[:limit])), found[limit - 1][0] if len(found) > limit else None)


def _info(row: tuple[Any, ...]) -> SessionInfo:
    _, owner, session_id, agent_name, metadata_json, created_at, updated_at = row
    return SessionInfo(
        owner=reading.shown(owner),
        session_id=reading.shown(session_id),
        active_agent_name=reading.shown(agent_name),
        metadata=_listed(session_id, "metadata_json", metadata_json, reading.values, EMPTY),
        created_at=_listed(session_id, "created_at", created_at, reading.moment, reading.LONG_AGO),
        updated_at=_listed(session_id, "updated_at", updated_at, reading.moment, reading.LONG_AGO),
    )


def _listed(session_id: str, column: str, value: object, read: Callable[[str, str, object], _T], otherwise: _T) -> _T:
    # One conversation that can't be read must not hide all others.
    try:
        return read(session_id, f"chatflow_sessions, {column}", value)
    except CorruptSessionError as error:
        logger.warning("%s; it is listed without its %s", error, column)
        return otherwise


def find_service_session(
    owner: str, service_key: str, agent_names: frozenset[str], connection: Connection
) -> Key | None:
    """The newest conversation that holds the id and may be given to one of these agents."""
    for session_id, text in connection.execute(
        statements.SESSIONS_AT_SERVICE, {"owner": owner, "service_key": service_key}
    ):
        try:
            service = reading.service(session_id, "chatflow_sessions, service_json", text)
        except CorruptSessionError as error:
            # Nobody can tell any more which agent it was given to.
            logger.warning("%s; it is not found by its service's id", error)
            continue
        if service is not None and service.key == service_key and service.is_for(agent_names):
            return Key(owner, session_id)
    return None


def page_of_messages(key: Key, limit: int, before: int, connection: Connection) -> Page[Message] | None:
    """A page of one conversation."""
    session_key = find_session(key, connection)
    if session_key is None:
        return None
    found = _rows_of(key, session_key, statements.PAGE_OF_MESSAGES, {"before": before, "limit": limit + 1}, connection)
    page = found[:limit]
    items = tuple(_message(key, session_key, place, text) for place, text in reversed(page))
    return Page(items, page[-1][0] if len(found) > limit else None)


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
    digest, response = row
    where = f"chatflow_processed_messages, message_id {message_id!r}"
    if digest is not None:
        digest = reading.text(scope.session_id, f"{where}, digest", digest)
    return Answered(digest, None if response is None else reading.response(scope.session_id, where, response))


def mark(
    scope: Key,
    message_id: str,
    digest: str | None,
    response_json: str | None,
    now: str,
    expired_before: str,
    purged: int,
    connection: Connection,
) -> bool:
    """Claim the id; False if it was claimed before. Up to *purged* expired ids go with it."""
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
    if purged:
        purge(purged, expired_before, connection)
    return marked is not None


def purge(limit: int, expired_before: str, connection: Connection) -> int:
    """Delete a slice of the expired ids, and of the turns that ended as long ago without being sent again."""
    connection.execute(PURGE_TURNS, {"expired_before": expired_before, "limit": limit})
    return connection.execute(statements.PURGE_PROCESSED, {"expired_before": expired_before, "limit": limit}).rowcount
