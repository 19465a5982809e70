"""Operations: each is one function of a connection, run whole in one transaction, and reads from top to bottom."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Any, Final, LiteralString, TypeVar

import attrs
import orjson

from chatflow.core.codec import message_to_json, values_to_json
from chatflow.core.history import History
from chatflow.core.messages import Message
from chatflow.core.records import (
    Answered,
    Commit,
    Committed,
    Cycle,
    InProgress,
    Key,
    Lost,
    NewSession,
    Page,
    Place,
    Seen,
    SessionInfo,
    Snapshot,
    Ticket,
    system_place,
)
from chatflow.core.values import EMPTY, FrozenDict
from chatflow.exceptions import CorruptSessionError
from chatflow.sqlite import rows, statements
from chatflow.sqlite.database import Connection, is_damaged, living_holders
from chatflow.sqlite.holder import is_gone

logger = logging.getLogger("chatflow.store")

_T = TypeVar("_T")

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
    history, start, system_start = _load_history(key, session_key, fresh_position(version), known, connection)
    where, session_id = f"chatflow_sessions, session_key {session_key}", key.session_id
    return Snapshot(
        session_key=session_key,
        version=version,
        agent_name=rows.name(session_id, f"{where}, active_agent_name", agent_name),
        metadata=rows.values(session_id, f"{where}, metadata_json", metadata_json),
        state=rows.values(session_id, f"{where}, state_json", state_json),
        max_turns=rows.max_turns(session_id, f"{where}, max_turns", max_turns),
        history=history,
        start=start,
        system_start=system_start,
    )


def _rows_of(
    key: Key, session_key: int, statement: LiteralString, values: dict[str, int], connection: Connection
) -> list[tuple[Any, ...]]:
    """A conversation's message rows; where the disk pages that hold them are damaged, the others' may be sound."""
    try:
        return connection.execute(statement, {"session_key": session_key, **values}).fetchall()
    except Exception as error:
        if not is_damaged(error):
            raise
        row = f"chatflow_messages, session_key {session_key}"
        raise CorruptSessionError(session_id=key.session_id, row=row, reason=str(error)) from error


def fresh_position(version: int) -> int:
    """A position past all that the conversation had when it got *version*.

    Each commit has a version of its own and moves on from here or from the last position, by a message each.
    """
    return version << 24


def _load_history(
    key: Key, session_key: int, fresh: int, known: Snapshot | None, connection: Connection
) -> tuple[History, int, int]:
    """The messages, of which those that *known* has need not be read again: a place never means two messages.

    Where there are none, no place tells which were used: the next one stands at the position *fresh*.
    """
    first_system, first = _rows_of(key, session_key, statements.FIRST_PLACES, {}, connection)[0]
    for place in (first_system, first):
        if not isinstance(place, int | None):
            row = f"chatflow_messages, session_key {session_key}, place {rows.shown(place)}"
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
    for place, text in _rows_of(key, session_key, statements.LOAD_MESSAGES, new, connection):
        is_system = isinstance(place, int) and place < 0
        expected = system_place(system_start) + len(systems) if is_system else start + len(body)
        if place != expected:
            row = f"chatflow_messages, session_key {session_key}, place {expected}"
            raise CorruptSessionError(session_id=key.session_id, row=row, reason="the row is missing")
        (systems if is_system else body).append(rows.message(key.session_id, session_key, place, text))
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
    if created:
        return attrs.evolve(snapshot, start=0, system_start=0)
    if not new.metadata:
        return snapshot
    metadata = FrozenDict({**snapshot.metadata, **new.metadata})
    version = _update(connection, snapshot.session_key, snapshot.version, now, metadata=metadata)
    assert version is not None
    return attrs.evolve(snapshot, version=version, metadata=metadata)


def _update(
    connection: Connection,
    session_key: int,
    seen: int,
    now: str,
    *,
    metadata: FrozenDict | None = None,
    agent_name: str | None = None,
    state_json: str | None = None,
) -> int | None:
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


def delete(key: Key, connection: Connection) -> tuple[int, ...] | None:
    """Delete the conversation, if it is there."""
    names = {"owner": key.owner, "session_id": key.session_id}
    row = connection.execute(statements.LOAD_SESSION, names).fetchone()
    connection.execute(statements.FORGET_SET_ASIDE, names)
    return None if row is None else _delete_one(row[0], connection)


def _delete_one(session_key: int, connection: Connection) -> tuple[int, ...]:
    turns = connection.execute(statements.TURNS_OF_SESSION, {"session_key": session_key}).fetchall()
    connection.execute(statements.FORGET_RESPONSES, {"session_key": session_key})
    connection.execute(statements.DELETE_SESSION, {"session_key": session_key})
    return tuple(row[0] for row in turns)


def delete_slice(owner: str, after: int, limit: int, connection: Connection) -> tuple[int | None, tuple[int, ...]]:
    """Delete up to *limit* of the owner's conversations."""
    found = connection.execute(statements.SESSIONS_AFTER, {"owner": owner, "after": after, "limit": limit}).fetchall()
    turns: list[int] = []
    for _, session_key, session_id in found:
        connection.execute(statements.FORGET_SET_ASIDE, {"owner": owner, "session_id": rows.shown(session_id)})
        turns += _delete_one(session_key, connection)
    if len(found) == limit:
        return found[-1][0], tuple(turns)
    # What is left was set aside of conversations that are gone, or that nobody can name.
    connection.execute(statements.FORGET_SET_ASIDE_OF_OWNER, {"owner": owner})
    return None, tuple(turns)


def page_of_sessions(owner: str, limit: int, before: int, connection: Connection) -> Page[SessionInfo]:
    """A page of the owner's conversations."""
    found = connection.execute(
        statements.PAGE_OF_SESSIONS, {"owner": owner, "before": before, "limit": limit + 1}
    ).fetchall()
    return Page(tuple(map(_info, found[:limit])), found[limit - 1][0] if len(found) > limit else None)


def _info(row: tuple[Any, ...]) -> SessionInfo:
    _, session_id, agent_name, metadata_json, created_at, updated_at = row
    return SessionInfo(
        session_id=rows.shown(session_id),
        active_agent_name=rows.shown(agent_name),
        metadata=_listed(session_id, "metadata_json", metadata_json, rows.values, EMPTY),
        created_at=_listed(session_id, "created_at", created_at, rows.moment, rows.LONG_AGO),
        updated_at=_listed(session_id, "updated_at", updated_at, rows.moment, rows.LONG_AGO),
    )


def _listed(session_id: str, column: str, value: object, read: Callable[[str, str, object], _T], otherwise: _T) -> _T:
    # One conversation that can't be read must not hide all others.
    try:
        return read(session_id, f"chatflow_sessions, {column}", value)
    except CorruptSessionError as error:
        logger.warning("%s; it is listed without its %s", error, column)
        return otherwise


def page_of_messages(key: Key, limit: int, before: int, connection: Connection) -> Page[Message] | None:
    """A page of one conversation."""
    row = connection.execute(statements.LOAD_SESSION, {"owner": key.owner, "session_id": key.session_id}).fetchone()
    if row is None:
        return None
    session_key = row[0]
    found = _rows_of(key, session_key, statements.PAGE_OF_MESSAGES, {"before": before, "limit": limit + 1}, connection)
    page = found[:limit]
    items = tuple(rows.message(key.session_id, session_key, place, text) for place, text in reversed(page))
    return Page(items, page[-1][0] if len(found) > limit else None)


def queue(
    ticket: Ticket, holder: str, now: str, expired_before: str, connection: Connection
) -> Place | Answered | InProgress | Cycle | Lost:
    """Look the claim up, insert the row, and start it where the line is empty."""
    key, claim = ticket.key, ticket.claim
    if claim is not None:
        answered = find_processed(key, claim.message_id, expired_before, connection)
        if answered is not None:
            return answered
    session: Snapshot | Seen | None = None
    if ticket.known is None:
        assert ticket.new is not None
        found = load(key, None, connection)
        session = found if isinstance(found, Snapshot) else create(key, ticket.new, now, connection)
        known = session
    else:
        known = ticket.known
    if claim is not None:
        row = connection.execute(
            statements.TURN_OF_MESSAGE, {"session_key": known.session_key, "message_id": claim.message_id}
        ).fetchone()
        if row is not None and not _is_abandoned(row[2], holder, known.session_key, connection):
            return Cycle() if _waits_for(ticket, known.session_key, connection) else InProgress(row[1], row[0])
    if _waits_for(ticket, known.session_key, connection):
        return Cycle()
    row = connection.execute(
        statements.QUEUE_TURN,
        {
            "session_key": known.session_key,
            "holder": holder,
            "agent_name": ticket.agent_name,
            "message_id": None if claim is None else claim.message_id,
            "digest": None if claim is None else claim.digest,
            "parent": ticket.ancestors[-1] if ticket.ancestors else None,
            "now": now,
        },
    ).fetchone()
    if row is None:
        return Lost.SESSION
    turn_id, running, version = row
    if running and version != known.version:
        session = load(key, known, connection)
    return Place(
        turn_id=turn_id,
        running=bool(running),
        attempt=int(running),
        behind_own=bool(running) or _is_behind(holder, known.session_key, turn_id, connection),
        session=session if running and isinstance(session, Snapshot) else None,
    )


def _waits_for(ticket: Ticket, session_key: int, connection: Connection) -> bool:
    """Whether a turn in the line waits, directly or through others, for the one that the asking code belongs to."""
    if not ticket.ancestors:
        return False
    awaited = connection.execute(statements.WAITS_FOR, {"session_key": session_key})
    return not {row[0] for row in awaited}.isdisjoint(ticket.ancestors)


def _is_behind(holder: str, session_key: int, turn_id: int, connection: Connection) -> bool:
    row = connection.execute(statements.HOLDER_AHEAD, {"session_key": session_key, "turn_id": turn_id}).fetchone()
    # Behind one that is gone it is looked at again soon, as behind another process, and then finds the line shorter.
    return row is not None and not _is_abandoned(row[0], holder, session_key, connection) and row[0] == holder


def _is_abandoned(other: str, holder: str, session_key: int, connection: Connection) -> bool:
    """Whether a row's process is gone; its places in this line are then given back."""
    if other == holder or not is_gone(other, living_holders()):
        return False
    connection.execute(statements.LEAVE_LINE, {"session_key": session_key, "holder": other})
    logger.warning("a process that is gone (%s) had its place in the line of session_key %d", other, session_key)
    return True


def start(turn_id: int, key: Key, known: Snapshot | None, holder: str, connection: Connection) -> Place | Lost:
    """Start the row if it is the first of its line."""
    connection.execute(statements.START_TURN, {"turn_id": turn_id, "holder": holder}).fetchone()
    row = connection.execute(statements.READ_TURN, {"turn_id": turn_id, "holder": holder}).fetchone()
    if row is None:
        return _lost(key, known, connection)
    running, attempt, session_key = row
    session = load(key, known, connection) if running else Seen.UNCHANGED
    return Place(
        turn_id=turn_id,
        running=bool(running),
        attempt=attempt,
        behind_own=bool(running) or _is_behind(holder, session_key, turn_id, connection),
        session=session if isinstance(session, Snapshot) else None,
    )


def _lost(key: Key, known: Snapshot | None, connection: Connection) -> Lost:
    row = connection.execute(statements.LOAD_SESSION, {"owner": key.owner, "session_id": key.session_id}).fetchone()
    gone = row is None or (known is not None and row[0] != known.session_key)
    return Lost.SESSION if gone else Lost.TURN


def texts_of(messages: Iterable[Message]) -> str:
    """*messages* as one list of their texts, for one statement to write."""
    return orjson.dumps([message_to_json(message) for message in messages]).decode()


@attrs.frozen(kw_only=True)
class WriteCommit:
    """A turn's commit, ready to be written."""

    commit: Commit
    key: Key
    system_texts: str
    body_texts: str
    state_json: str | None
    response_json: str | None
    holder: str
    now: str
    expired_before: str

    def __call__(self, connection: Connection) -> Committed | Lost:
        """Delete the turn's row, which is the fence, and write what it changed."""
        commit, base = self.commit, self.commit.snapshot
        ended = connection.execute(
            statements.END_TURN, {"turn_id": commit.turn_id, "holder": self.holder, "attempt": commit.attempt}
        ).fetchone()
        if ended is None:
            return _lost(self.key, base, connection)
        version, metadata = base.version, base.metadata
        if commit.changes_session:
            version, metadata = self._write_session(connection)
            self._write_messages(connection)
        if commit.claim is not None:
            mark(
                self.key,
                commit.claim.message_id,
                commit.claim.digest,
                self.response_json,
                self.now,
                self.expired_before,
                connection,
            )
        return Committed(version, metadata, ended[1])

    def _write_session(self, connection: Connection) -> tuple[int, FrozenDict]:
        commit, base = self.commit, self.commit.snapshot
        changed = bool(commit.metadata_set or commit.metadata_removed)
        version = self._update(connection, base.version, base.metadata if changed else None)
        if version is not None:
            return version, base.metadata
        # Somebody has merged metadata since the turn began, without a turn: ours joins it, key by key.
        seen, text = connection.execute(statements.READ_METADATA, {"session_key": base.session_key}).fetchone()
        row = f"chatflow_sessions, session_key {base.session_key}, metadata_json"
        theirs = rows.values(self.key.session_id, row, text)
        kept = {name: value for name, value in theirs.items() if name not in commit.metadata_removed}
        merged = FrozenDict({**kept, **commit.metadata_set})
        version = self._update(connection, seen, merged)
        assert version is not None
        return version, merged

    def _update(self, connection: Connection, seen: int, metadata: FrozenDict | None) -> int | None:
        return _update(
            connection,
            self.commit.snapshot.session_key,
            seen,
            self.now,
            metadata=metadata,
            agent_name=self.commit.agent_name,
            state_json=self.state_json,
        )

    def _write_messages(self, connection: Connection) -> None:
        commit, session_key = self.commit, self.commit.snapshot.session_key
        if commit.replace:
            connection.execute(statements.DELETE_ALL_MESSAGES, {"session_key": session_key})
        elif commit.drop_before is not None:
            connection.execute(
                statements.DELETE_MESSAGES_BEFORE, {"session_key": session_key, "place": commit.drop_before}
            )
        if commit.systems:
            place = system_place(commit.system_start)
            connection.execute(
                statements.INSERT_MESSAGES, {"session_key": session_key, "place": place, "texts": self.system_texts}
            )
        if commit.bodies:
            connection.execute(
                statements.INSERT_MESSAGES,
                {"session_key": session_key, "place": commit.body_start, "texts": self.body_texts},
            )


def leave(turn_id: int, holder: str, connection: Connection) -> int | None:
    """Give a place back, and tell which row of ours comes next."""
    row = connection.execute(statements.LEAVE_TURN, {"turn_id": turn_id, "holder": holder}).fetchone()
    return None if row is None else row[1]


def turn_exists(turn_id: int, connection: Connection) -> bool:
    """Whether the row is there."""
    row = connection.execute(statements.TURN_EXISTS, {"turn_id": turn_id}).fetchone()
    return row is not None and not is_gone(row[0], living_holders())


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
        digest = rows.text(scope.session_id, f"{where}, digest", digest)
    return Answered(digest, None if response is None else rows.response(scope.session_id, where, response))


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
    """Delete a slice of the expired ids."""
    return connection.execute(statements.PURGE_PROCESSED, {"expired_before": expired_before, "limit": limit}).rowcount
