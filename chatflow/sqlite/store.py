"""SQLiteSessionStore: the primitives, each one function over one connection."""

from __future__ import annotations

import datetime as dt
import os
import threading
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Final, TypeVar

import attrs

from chatflow.core.codec import (
    message_from_json,
    message_to_json,
    response_from_json,
    response_to_json,
    values_from_json,
    values_to_json,
)
from chatflow.core.history import History
from chatflow.core.line import Line
from chatflow.core.messages import AgentResponse, Message
from chatflow.core.records import (
    Answered,
    Commit,
    Committed,
    Cycle,
    InProgress,
    Key,
    Known,
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
from chatflow.core.session import DEFAULT_MAX_TURNS
from chatflow.core.store import DEFAULT_DEDUP_TTL_HOURS, BaseSessionStore
from chatflow.core.values import FrozenDict
from chatflow.exceptions import CorruptSessionError, SessionFormatError, StoreClosedError
from chatflow.sqlite import statements
from chatflow.sqlite.database import Connection, Database, open_database, release_database
from chatflow.sqlite.location import locate
from chatflow.sqlite.schema import prepare

_T = TypeVar("_T")

_PURGED_WITH_EACH_MARK: Final = 10
_LAST_VERSION: Final = 2**63 - 1


def _utc_now() -> dt.datetime:
    return dt.datetime.now(dt.UTC)


def _text(moment: dt.datetime) -> str:
    # Always with microseconds, so that the order of the texts is that of the moments.
    return moment.isoformat(timespec="microseconds")


class SQLiteSessionStore(BaseSessionStore):
    """Conversations in an SQLite file, or in memory.

    *db_path* is a file, whose folders are created, or an address: ``":memory:"`` is a database of this store's own;
    ``"file::memory:?cache=shared"`` and ``"file:NAME?mode=memory&cache=shared"`` are shared by all stores of the process,
    and gone when the last one is closed. In memory operations run on the event loop; a file has two worker threads,
    shared by all stores of the process on it. A file lives on a local file system.

    Raises:
        ValueError: *default_max_turns* below 1, *dedup_ttl_hours* not above 0, or an empty path.
        TypeError: One of them is of a wrong type.
    """

    def __init__(
        self,
        db_path: str | os.PathLike[str] = "chatflow.db",
        default_max_turns: int = DEFAULT_MAX_TURNS,
        dedup_ttl_hours: float = DEFAULT_DEDUP_TTL_HOURS,
    ) -> None:
        location = locate(db_path)
        super().__init__(default_max_turns, dedup_ttl_hours)
        self._location = location
        self._clock: Callable[[], dt.datetime] = _utc_now
        self._opening = threading.Lock()
        self._opened: Database | None = None
        self._closed = False

    @property
    def name(self) -> str:
        """Its path as it was given."""
        return self._location.name

    @property
    def line(self) -> Line:
        """The waiters of this process on the same database."""
        return self._database.line

    @property
    def _database(self) -> Database:
        with self._opening:
            if self._opened is None:
                if self._closed:
                    raise StoreClosedError(store=self.name)
                self._opened = open_database(self._location, prepare)
            return self._opened

    async def _write(self, operation: Callable[..., _T], *args: Any, durable: bool = True) -> _T:
        return await self._in_use().write(partial(operation, *args), durable=durable)

    async def _read(self, operation: Callable[..., _T], *args: Any) -> _T:
        return await self._in_use().read(partial(operation, *args))

    def _in_use(self) -> Database:
        if self._closed:
            raise StoreClosedError(store=self.name)
        return self._database

    async def close(self) -> None:
        """Close the file, if no other store of this process uses it."""
        database = self._take_database()
        if database is not None and release_database(database):
            await database.close()

    def abandon(self) -> bool:
        """Let the threads close the file when they get to it."""
        database = self._take_database()
        if database is not None and release_database(database):
            database.abandon()
        return database is not None

    def _take_database(self) -> Database | None:
        with self._opening:
            if self._closed:
                return None
            self._closed = True
            return self._opened

    def _expired_before(self) -> str:
        return _text(self._clock() - dt.timedelta(hours=self.dedup_ttl_hours))

    # --- conversations ---

    async def load_session(self, key: Key, known: Known | None) -> Snapshot | Seen:
        """Read on the reading thread."""
        return await self._read(_load, key, known)

    async def create_session(self, key: Key, new: NewSession) -> Snapshot:
        """Insert, or merge the metadata."""
        return await self._write(_create, key, new, _text(self._clock()))

    async def delete_session(self, key: Key) -> tuple[int, ...] | None:
        """Delete; the messages and turns cascade."""
        return await self._write(_delete, key)

    async def delete_sessions(self, owner: str, after: int | None, limit: int) -> tuple[int | None, tuple[int, ...]]:
        """Delete a slice."""
        return await self._write(_delete_slice, owner, after or 0, limit)

    async def page_of_sessions(self, owner: str, limit: int, after: int | None) -> Page[SessionInfo]:
        """Read a page by version."""
        return await self._read(_page_of_sessions, owner, limit, _LAST_VERSION if after is None else after)

    async def page_of_messages(self, key: Key, limit: int, before: int | None) -> Page[Message] | None:
        """Read a page by place."""
        return await self._read(_page_of_messages, key, limit, _LAST_VERSION if before is None else before)

    # --- turns ---

    async def queue_turn(self, ticket: Ticket) -> Place | Answered | InProgress | Cycle | Lost:
        """Look the claim up, insert the row, start it where the line is empty."""
        now, expired_before = _text(self._clock()), self._expired_before()
        holder = self._database.holder
        return await self._write(_queue, ticket, holder, now, expired_before, durable=False)

    async def start_turn(self, turn_id: int, key: Key, known: Known | None) -> Place | Lost:
        """Start the row, or tell who is before it."""
        return await self._write(_start, turn_id, key, known, self._database.holder, durable=False)

    async def commit_turn(self, commit: Commit, key: Key) -> Committed | Lost:
        """Write the difference."""
        # Encoded before it is queued: an error here has changed nothing, and the writing thread only writes.
        rows = [
            *_rows(commit.snapshot.session_key, system_place(commit.system_start), commit.systems),
            *_rows(commit.snapshot.session_key, commit.body_start, commit.bodies),
        ]
        state = None if commit.state is None else values_to_json(commit.state)
        response = None if commit.response is None else response_to_json(commit.response)
        write = _WriteCommit(
            commit=commit,
            key=key,
            rows=rows,
            state_json=state,
            response_json=response,
            holder=self._database.holder,
            now=_text(self._clock()),
            expired_before=self._expired_before(),
        )
        return await self._write(write)

    async def leave_turn(self, turn_id: int) -> int | None:
        """Delete the row."""
        return await self._write(_leave, turn_id, self._database.holder, durable=False)

    async def turn_exists(self, turn_id: int) -> bool:
        """Look the row up."""
        return await self._read(_exists, turn_id)

    # --- message ids ---

    async def is_processed(self, scope: Key, message_id: str) -> bool:
        """Look the id up."""
        return await self._read(_find_processed, scope, message_id, self._expired_before()) is not None

    async def mark_processed(self, scope: Key, message_id: str) -> bool:
        """Claim the id."""
        return await self._write(_mark, scope, message_id, None, None, _text(self._clock()), self._expired_before())

    async def purge_processed(self, limit: int) -> int:
        """Delete a slice."""
        return await self._write(_purge, limit, self._expired_before(), durable=False)


# --- operations: each runs whole, in one transaction -------------------------------------------------------------


def _load(key: Key, known: Known | None, connection: Connection) -> Snapshot | Seen:
    row = connection.execute(
        statements.LOAD_SESSION, {"owner": key.owner, "session_id": key.session_id}
    ).fetchone()
    if row is None:
        return Seen.ABSENT
    session_key, version, agent_name, metadata_json, state_json, max_turns = row
    if known == Known(session_key, version):
        return Seen.UNCHANGED
    history, start, system_start = _load_history(key, session_key, connection)
    where = f"chatflow_sessions, session_key {session_key}"
    return Snapshot(
        session_key=session_key,
        version=version,
        agent_name=agent_name,
        metadata=_values(key, f"{where}, metadata_json", metadata_json),
        state=_values(key, f"{where}, state_json", state_json),
        max_turns=max_turns,
        history=history,
        start=start,
        system_start=system_start,
    )


def _values(key: Key, row: str, text: str) -> FrozenDict:
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


def _load_history(key: Key, session_key: int, connection: Connection) -> tuple[History, int, int]:
    systems: list[Message] = []
    body: list[Message] = []
    start = system_start = 0
    for place, text in connection.execute(statements.LOAD_MESSAGES, {"session_key": session_key}):
        message = _message(key, session_key, place, text)
        if place < 0:
            system_start = system_start if systems else place - system_place(0)
            systems.append(message)
        else:
            start = start if body else place
            body.append(message)
        expected = system_place(system_start) + len(systems) if place < 0 else start + len(body)
        if place + 1 != expected:
            row = f"chatflow_messages, session_key {session_key}, place {expected - 1}"
            raise CorruptSessionError(session_id=key.session_id, row=row, reason="the row is missing")
    return History(systems, len(systems), body, 0, len(body)), start, system_start


def _create(key: Key, new: NewSession, now: str, connection: Connection) -> Snapshot:
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
    snapshot = _load(key, None, connection)
    assert isinstance(snapshot, Snapshot)
    if created or not new.metadata:
        return snapshot
    metadata = FrozenDict({**snapshot.metadata, **new.metadata})
    version = _update(connection, snapshot.session_key, now, metadata=metadata)
    return attrs.evolve(snapshot, version=version, metadata=metadata)


def _update(
    connection: Connection,
    session_key: int,
    now: str,
    *,
    metadata: FrozenDict | None = None,
    agent_name: str | None = None,
    state_json: str | None = None,
) -> int:
    row = connection.execute(
        statements.UPDATE_SESSION,
        {
            "session_key": session_key,
            "active_agent_name": agent_name,
            "metadata_json": None if metadata is None else values_to_json(metadata),
            "state_json": state_json,
            "now": now,
        },
    ).fetchone()
    version: int = row[0]
    return version


def _delete(key: Key, connection: Connection) -> tuple[int, ...] | None:
    row = connection.execute(
        statements.LOAD_SESSION, {"owner": key.owner, "session_id": key.session_id}
    ).fetchone()
    return None if row is None else _delete_one(key, row[0], connection)


def _delete_one(key: Key, session_key: int, connection: Connection) -> tuple[int, ...]:
    turns = connection.execute(statements.TURNS_OF_SESSION, {"session_key": session_key}).fetchall()
    connection.execute(statements.DELETE_SESSION, {"session_key": session_key})
    connection.execute(statements.FORGET_RESPONSES, {"owner": key.owner, "session_id": key.session_id})
    return tuple(row[0] for row in turns)


def _delete_slice(owner: str, after: int, limit: int, connection: Connection) -> tuple[int | None, tuple[int, ...]]:
    rows = connection.execute(
        statements.SESSIONS_AFTER, {"owner": owner, "after": after, "limit": limit}
    ).fetchall()
    turns = [turn for key, session_id in rows for turn in _delete_one(Key(owner, session_id), key, connection)]
    return (rows[-1][0] if len(rows) == limit else None), tuple(turns)


def _page_of_sessions(owner: str, limit: int, before: int, connection: Connection) -> Page[SessionInfo]:
    rows = connection.execute(
        statements.PAGE_OF_SESSIONS, {"owner": owner, "before": before, "limit": limit + 1}
    ).fetchall()
    items = tuple(
        SessionInfo(
            session_id=session_id,
            active_agent_name=agent_name,
            metadata=_values(Key(owner, session_id), "chatflow_sessions, metadata_json", metadata_json),
            created_at=dt.datetime.fromisoformat(created_at),
            updated_at=dt.datetime.fromisoformat(updated_at),
        )
        for _, session_id, agent_name, metadata_json, created_at, updated_at in rows[:limit]
    )
    return Page(items, rows[limit - 1][0] if len(rows) > limit else None)


def _page_of_messages(key: Key, limit: int, before: int, connection: Connection) -> Page[Message] | None:
    row = connection.execute(
        statements.LOAD_SESSION, {"owner": key.owner, "session_id": key.session_id}
    ).fetchone()
    if row is None:
        return None
    session_key = row[0]
    rows = connection.execute(
        statements.PAGE_OF_MESSAGES, {"session_key": session_key, "before": before, "limit": limit + 1}
    ).fetchall()
    page = rows[:limit]
    items = tuple(_message(key, session_key, place, text) for place, text in reversed(page))
    return Page(items, page[-1][0] if len(rows) > limit else None)


def _queue(
    ticket: Ticket, holder: str, now: str, expired_before: str, connection: Connection
) -> Place | Answered | InProgress | Cycle | Lost:
    key, claim = ticket.key, ticket.claim
    if claim is not None:
        answered = _find_processed(key, claim.message_id, expired_before, connection)
        if answered is not None:
            return answered
    if ticket.known is None:
        assert ticket.new is not None
        session: Snapshot | Seen = _create(key, ticket.new, now, connection)
    else:
        session = _load(key, ticket.known, connection)
    if session is Seen.UNCHANGED:
        assert ticket.known is not None
        session_key = ticket.known.session_key
    elif isinstance(session, Snapshot) and (ticket.known is None or session.session_key == ticket.known.session_key):
        session_key = session.session_key
    else:
        return Lost.SESSION
    if claim is not None:
        row = connection.execute(
            statements.TURN_OF_MESSAGE, {"session_key": session_key, "message_id": claim.message_id}
        ).fetchone()
        if row is not None:
            return InProgress(row[1], row[0])
    if ticket.ancestors:
        awaited = connection.execute(statements.WAITS_FOR, {"session_key": session_key})
        if not {row[0] for row in awaited}.isdisjoint(ticket.ancestors):
            return Cycle()
    turn_id, running = connection.execute(
        statements.QUEUE_TURN,
        {
            "session_key": session_key,
            "holder": holder,
            "agent_name": ticket.agent_name,
            "message_id": None if claim is None else claim.message_id,
            "digest": None if claim is None else claim.digest,
            "parent": ticket.ancestors[-1] if ticket.ancestors else None,
            "now": now,
        },
    ).fetchone()
    return Place(
        turn_id=turn_id,
        running=bool(running),
        attempt=int(running),
        behind_own=bool(running) or _is_behind(holder, session_key, turn_id, connection),
        session=session if isinstance(session, Snapshot) else None,
    )


def _is_behind(holder: str, session_key: int, turn_id: int, connection: Connection) -> bool:
    row = connection.execute(
        statements.HOLDER_AHEAD, {"session_key": session_key, "turn_id": turn_id}
    ).fetchone()
    return row is not None and row[0] == holder


def _start(turn_id: int, key: Key, known: Known | None, holder: str, connection: Connection) -> Place | Lost:
    connection.execute(statements.START_TURN, {"turn_id": turn_id, "holder": holder}).fetchone()
    row = connection.execute(statements.READ_TURN, {"turn_id": turn_id, "holder": holder}).fetchone()
    if row is None:
        return _lost(key, known, connection)
    running, attempt, session_key = row
    session = _load(key, known, connection) if running else Seen.UNCHANGED
    return Place(
        turn_id=turn_id,
        running=bool(running),
        attempt=attempt,
        behind_own=bool(running) or _is_behind(holder, session_key, turn_id, connection),
        session=session if isinstance(session, Snapshot) else None,
    )


def _lost(key: Key, known: Known | None, connection: Connection) -> Lost:
    row = connection.execute(
        statements.LOAD_SESSION, {"owner": key.owner, "session_id": key.session_id}
    ).fetchone()
    gone = row is None or (known is not None and row[0] != known.session_key)
    return Lost.SESSION if gone else Lost.TURN


def _rows(session_key: int, start: int, messages: Iterable[Message]) -> list[tuple[int, int, str]]:
    return [(session_key, start + index, message_to_json(message)) for index, message in enumerate(messages)]


@attrs.frozen(kw_only=True)
class _WriteCommit:
    """A turn's commit, ready to be written."""

    commit: Commit
    key: Key
    rows: list[tuple[int, int, str]]
    state_json: str | None
    response_json: str | None
    holder: str
    now: str
    expired_before: str

    def __call__(self, connection: Connection) -> Committed | Lost:
        commit, base = self.commit, self.commit.snapshot
        ended = connection.execute(
            statements.END_TURN, {"turn_id": commit.turn_id, "holder": self.holder, "attempt": commit.attempt}
        ).fetchone()
        if ended is None:
            return _lost(self.key, base.known, connection)
        version, metadata = base.version, base.metadata
        if commit.changes_session:
            version, metadata = self._write_session(connection)
            self._write_messages(connection)
        if commit.claim is not None:
            _mark(
                self.key,
                commit.claim.message_id,
                commit.claim.digest,
                self.response_json,
                self.now,
                self.expired_before,
                connection,
            )
        return Committed(version, metadata, _next_turn(base.session_key, self.holder, connection))

    def _write_session(self, connection: Connection) -> tuple[int, FrozenDict]:
        commit, session_key = self.commit, self.commit.snapshot.session_key
        metadata: FrozenDict | None = None
        before, text = connection.execute(statements.READ_METADATA, {"session_key": session_key}).fetchone()
        if before != commit.snapshot.version:
            metadata = _values(self.key, f"chatflow_sessions, session_key {session_key}, metadata_json", text)
            kept = {name: value for name, value in metadata.items() if name not in commit.metadata_removed}
            metadata = FrozenDict({**kept, **commit.metadata_set})
        elif commit.metadata_set or commit.metadata_removed:
            metadata = commit.snapshot.metadata
        version = _update(
            connection,
            session_key,
            self.now,
            metadata=metadata,
            agent_name=commit.agent_name,
            state_json=self.state_json,
        )
        return version, commit.snapshot.metadata if metadata is None else metadata

    def _write_messages(self, connection: Connection) -> None:
        commit, session_key = self.commit, self.commit.snapshot.session_key
        if commit.replace:
            connection.execute(statements.DELETE_ALL_MESSAGES, {"session_key": session_key})
        elif commit.drop_before is not None:
            connection.execute(
                statements.DELETE_MESSAGES_BEFORE, {"session_key": session_key, "place": commit.drop_before}
            )
        connection.executemany(statements.INSERT_MESSAGE, self.rows)


def _next_turn(session_key: int, holder: str, connection: Connection) -> int | None:
    row = connection.execute(statements.NEXT_TURN, {"session_key": session_key}).fetchone()
    return row[0] if row is not None and row[1] == holder else None


def _leave(turn_id: int, holder: str, connection: Connection) -> int | None:
    row = connection.execute(statements.LEAVE_TURN, {"turn_id": turn_id, "holder": holder}).fetchone()
    return None if row is None else _next_turn(row[0], holder, connection)


def _exists(turn_id: int, connection: Connection) -> bool:
    return connection.execute(statements.TURN_EXISTS, {"turn_id": turn_id}).fetchone() is not None


def _find_processed(scope: Key, message_id: str, expired_before: str, connection: Connection) -> Answered | None:
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


def _mark(
    scope: Key,
    message_id: str,
    digest: str | None,
    response_json: str | None,
    now: str,
    expired_before: str,
    connection: Connection,
) -> bool:
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
    _purge(_PURGED_WITH_EACH_MARK, expired_before, connection)
    return marked is not None


def _purge(limit: int, expired_before: str, connection: Connection) -> int:
    return connection.execute(
        statements.PURGE_PROCESSED, {"expired_before": expired_before, "limit": limit}
    ).rowcount
