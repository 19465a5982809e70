"""Operations on conversations and message ids: each is one transaction, or one flight of statements."""

from __future__ import annotations

import datetime as dt
import logging
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeVar

import attrs

from chatflow.core import reading, writing
from chatflow.core.codec import values_to_json
from chatflow.core.history import History
from chatflow.core.messages import Message
from chatflow.core.owners import RESERVED
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
from chatflow.postgres import statements
from chatflow.postgres.connection import Row, Step, Transaction
from chatflow.postgres.database import Database
from chatflow.postgres.reading import moment
from chatflow.postgres.turn_statements import PURGE_TURNS, TURNS_OF_SESSIONS

logger = logging.getLogger("chatflow.store")

_T = TypeVar("_T")

HIDDEN: Final = {"hidden": RESERVED, "shown": chr(ord(RESERVED) + 1)}
"""Between these stand the owners that are being erased."""

_NOT_KNOWN: Final = -1


def named(key: Key) -> dict[str, Any]:
    """*key* as the parameters of a statement."""
    return {"owner": key.owner, "session_id": key.session_id}


# --- loading ---


async def load(key: Key, known: Snapshot | None, database: Database) -> Snapshot | Seen:
    """The conversation with its messages, unless it is as *known*."""
    if known is not None:
        # It mostly is, and one statement tells.
        found = await database.ask(statements.LOAD_SESSION, **named(key))
        if not found:
            return Seen.ABSENT
        if known.session_key == found[0][0] and known.version == found[0][1]:
            return Seen.UNCHANGED

    async def read(transaction: Transaction) -> Snapshot | Seen:
        return await load_inside(transaction, key, known)

    return await database.read(read)


async def load_inside(transaction: Transaction, key: Key, known: Snapshot | None) -> Snapshot | Seen:
    """The same, inside a transaction for which nothing of it changes meanwhile."""
    return snapshot_of(key, known, await transaction.ask_all(*steps_to_load(key, known)))


def steps_to_load(key: Key, known: Snapshot | None) -> tuple[Step, Step]:
    """What to ask for a conversation."""
    places = {"known_key": _NOT_KNOWN, "known_system": 0, "known_place": 0, "system_place": 0, "place": 0}
    if known is not None:
        # A place never means two messages: those that are known need not be read again.
        places = {
            "known_key": known.session_key,
            "known_system": system_place(known.system_start),
            "known_place": known.start,
            "system_place": system_place(known.system_end),
            "place": known.end,
        }
    return Step(statements.LOAD_SESSION, named(key)), Step(statements.LOAD_MESSAGES, {**named(key), **places})


def snapshot_of(key: Key, known: Snapshot | None, answers: Sequence[Sequence[Row]]) -> Snapshot | Seen:
    """What the answers say of the conversation."""
    sessions, messages = answers
    if not sessions:
        return Seen.ABSENT
    session_key, version, agent_name, metadata, state, max_turns, service, expires_after, spent, *_ = sessions[0]
    first_system, first = sessions[0][-2:]
    if known is not None and known.session_key != session_key:
        known = None
    if known is not None and known.version == version:
        return Seen.UNCHANGED
    history, start, system_start = _history(
        key, session_key, fresh_position(version), (first_system, first), known, messages
    )
    where, session_id = f"chatflow_sessions, session_key {session_key}", key.session_id
    return Snapshot(
        session_key=session_key,
        version=version,
        agent_name=reading.name(session_id, f"{where}, active_agent_name", agent_name),
        metadata=reading.values(session_id, f"{where}, metadata_json", metadata),
        state=reading.values(session_id, f"{where}, state_json", state),
        max_turns=reading.max_turns(session_id, f"{where}, max_turns", max_turns),
        history=history,
        start=start,
        system_start=system_start,
        service=reading.service(session_id, f"{where}, service_json", service),
        expires_after=reading.optional_seconds(session_id, f"{where}, expires_after", expires_after),
        spent=reading.spent(session_id, f"{where}, spent_json", spent),
    )


def _history(
    key: Key,
    session_key: int,
    fresh: int,
    firsts: tuple[int | None, int | None],
    known: Snapshot | None,
    messages: Sequence[Row],
) -> tuple[History, int, int]:
    """The messages, of which those that *known* has were not read again, and where they begin.

    Where there are none, no place tells which were used: the next one stands at the position *fresh*.
    """
    lowest, first = firsts
    system_start = fresh if lowest is None or lowest >= 0 else lowest - system_place(0)
    start = fresh if first is None else first
    systems: list[Message] = []
    body: list[Message] = []
    if known is not None and known.system_start <= system_start:
        systems += known.history.systems_from(system_start - known.system_start)
    if known is not None and known.start <= start:
        body += known.history.body_from(start - known.start)
    for place, text in messages:
        expected = system_place(system_start) + len(systems) if place < 0 else start + len(body)
        if place != expected:
            row = f"chatflow_messages, session_key {session_key}, place {expected}"
            raise CorruptSessionError(session_id=key.session_id, row=row, reason="the row is missing")
        (systems if place < 0 else body).append(reading.message(key.session_id, session_key, place, text))
    return History(systems, len(systems), body, 0, len(body)), start, system_start


# --- making and deleting ---


async def create(key: Key, new: NewSession, now: dt.datetime, transaction: Transaction) -> Snapshot:
    """Create the conversation, or merge *new*'s metadata into the one that is there."""
    values = {
        **named(key),
        "active_agent_name": new.agent_name,
        "metadata_json": values_to_json(new.metadata),
        "max_turns": new.max_turns,
        "service_json": writing.service_to_json(new.service),
        "service_key": None if new.service is None else new.service.key,
        "expires_after": new.expires_after,
        "expires_at": writing.expiry(now, new.expires_after),
        "now": now,
    }
    created: list[Row] = []
    locked: list[Row] = []
    while not locked:
        # What was there when it was to be made may be deleted before it is locked.
        created = await transaction.changed_rows(statements.CREATE_SESSION, **values)
        locked = await transaction.ask(statements.LOCK_SESSION, **named(key))
    snapshot = await load_inside(transaction, key, None)
    assert isinstance(snapshot, Snapshot)
    if created:
        return attrs.evolve(snapshot, start=0, system_start=0)
    if not new.metadata:
        return snapshot
    metadata = FrozenDict({**snapshot.metadata, **new.metadata})
    ((version,),) = await transaction.changed_rows(
        statements.MERGE_METADATA,
        session_key=snapshot.session_key,
        metadata_json=values_to_json(metadata),
        expires_at=writing.expiry(now, snapshot.expires_after),
        now=now,
    )
    return attrs.evolve(snapshot, version=version, metadata=metadata)


async def lost(key: Key, known: Snapshot | None, transaction: Transaction) -> Lost:
    """What a turn has lost that does not find its row: the conversation, or only the row."""
    found = await transaction.ask(statements.LOAD_SESSION, **named(key))
    gone = not found or (known is not None and found[0][0] != known.session_key)
    return Lost.SESSION if gone else Lost.TURN


async def delete(key: Key, transaction: Transaction) -> tuple[int, ...] | None:
    """Delete the conversation, if it is there."""
    found = await transaction.ask(statements.LOCK_SESSION, **named(key))
    await transaction.change(statements.FORGET_SET_ASIDE_OF, **named(key))
    return await delete_rows([session_key for (session_key,) in found], transaction) if found else None


async def delete_rows(session_keys: list[int], transaction: Transaction) -> tuple[int, ...]:
    """Delete conversations that are locked, with all that hangs on their numbers; their turns."""
    turns = await transaction.ask(TURNS_OF_SESSIONS, session_keys=session_keys)
    await transaction.change(statements.FORGET_SET_ASIDE, session_keys=session_keys)
    await transaction.change(statements.FORGET_RESPONSES, session_keys=session_keys)
    await transaction.change(statements.DELETE_SESSIONS, session_keys=session_keys)
    return tuple(turn_id for (turn_id,) in turns)


async def delete_slice(
    owner: str, after: int, limit: int, transaction: Transaction
) -> tuple[int | None, tuple[int, ...]]:
    """Delete up to *limit* of the owner's conversations."""
    found = await transaction.ask(statements.SESSIONS_AFTER, owner=owner, after=after, limit=limit)
    turns = await delete_rows([session_key for (session_key,) in found], transaction) if found else ()
    if len(found) == limit:
        return found[-1][0], turns
    # What is left was set aside of conversations that are gone, or that nobody can name.
    await transaction.change(statements.FORGET_SET_ASIDE_OF_OWNER, owner=owner)
    return None, turns


# --- lists ---


async def page_of_sessions(owner: str | None, limit: int, before: int, database: Database) -> Page[SessionInfo]:
    """A page of the owner's conversations, or of all owners'."""
    asked = {"before": before, "limit": limit + 1}
    if owner is None:
        found = await database.ask(statements.PAGE_OF_ALL_SESSIONS, **asked, **HIDDEN)
    else:
        found = await database.ask(statements.PAGE_OF_SESSIONS, **asked, owner=owner)
    return Page(tuple(map(_info, found[:limit])), found[limit - 1][0] if len(found) > limit else None)


def _info(row: Row) -> SessionInfo:
    _, owner, session_id, agent_name, metadata_json, created_at, updated_at = row
    return SessionInfo(
        owner=owner,
        session_id=session_id,
        active_agent_name=agent_name,
        metadata=_listed(session_id, "metadata_json", metadata_json, reading.values, EMPTY),
        created_at=_listed(session_id, "created_at", created_at, moment, reading.LONG_AGO),
        updated_at=_listed(session_id, "updated_at", updated_at, moment, reading.LONG_AGO),
    )


def _listed(session_id: str, column: str, value: object, read: Callable[[str, str, object], _T], otherwise: _T) -> _T:
    # One conversation that can't be read must not hide all others.
    try:
        return read(session_id, f"chatflow_sessions, {column}", value)
    except CorruptSessionError as error:
        logger.warning("%s; it is listed without its %s", error, column)
        return otherwise


async def find_service_session(
    owner: str, service_key: str, agent_names: frozenset[str], database: Database
) -> Key | None:
    """The newest conversation that holds the id and may be given to one of these agents."""
    for session_id, text in await database.ask(statements.SESSIONS_AT_SERVICE, owner=owner, service_key=service_key):
        try:
            service = reading.service(session_id, "chatflow_sessions, service_json", text)
        except CorruptSessionError as error:
            # Nobody can tell any more which agent it was given to.
            logger.warning("%s; it is not found by its service's id", error)
            continue
        if service is not None and service.key == service_key and service.is_for(agent_names):
            return Key(owner, session_id)
    return None


async def page_of_messages(key: Key, limit: int, before: int, database: Database) -> Page[Message] | None:
    """A page of one conversation."""
    found = await database.ask(statements.PAGE_OF_MESSAGES, **named(key), before=before, limit=limit + 1)
    if not found:
        return None
    rows = [row for row in found if row[1] is not None]
    page = rows[:limit]
    items = tuple(reading.message(key.session_id, *row) for row in reversed(page))
    return Page(items, page[-1][1] if len(rows) > limit else None)


# --- message ids ---


def answered_of(scope: Key, message_id: str, found: Sequence[Row]) -> Answered | None:
    """The stored answer, if the id is remembered."""
    if not found:
        return None
    digest, response = found[0]
    where = f"chatflow_processed_messages, message_id {message_id!r}"
    return Answered(digest, None if response is None else reading.response(scope.session_id, where, response))


async def mark(
    scope: Key, message_id: str, now: dt.datetime, expired_before: dt.datetime, transaction: Transaction
) -> bool:
    """Claim the id; False if it was claimed before."""
    values = {"message_id": message_id, "now": now, "expired_before": expired_before}
    marked = await transaction.changed_rows(statements.MARK_PROCESSED, **named(scope), **values)
    return bool(marked)


async def purge(limit: int, expired_before: dt.datetime, transaction: Transaction) -> int:
    """Delete a slice of the expired ids, and of the turns that ended as long ago without being sent again."""
    await transaction.change(PURGE_TURNS, expired_before=expired_before, limit=limit)
    await transaction.change(statements.PURGE_MARKS)
    ((count,),) = await transaction.changed_rows(statements.PURGE_PROCESSED, expired_before=expired_before, limit=limit)
    return int(count)
