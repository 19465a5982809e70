"""The conversations of chatflow-agent 0.3.4, moved into our tables inside the caller's transaction.

Nothing is lost: what can't be part of a conversation here goes to `chatflow_set_aside` as it was, with the reason.
"""

from __future__ import annotations

import datetime as dt
import json
import logging
from collections.abc import Callable, Iterator
from typing import Any, Final, LiteralString, cast

import attrs
import msgspec

from chatflow.core import reading
from chatflow.core.codec import message_from_json, message_to_json, values_to_json
from chatflow.core.envelopes import encode
from chatflow.core.messages import Message, Role
from chatflow.core.notes import SetAside
from chatflow.core.pruning import Window
from chatflow.core.records import system_place
from chatflow.core.values import freeze_mapping
from chatflow.exceptions import SessionFormatError, UnstorableValueError
from chatflow.sqlite.aside import put_aside
from chatflow.sqlite.database import Connection

logger = logging.getLogger("chatflow.store")

_COMPLETE: Final[tuple[LiteralString, ...]] = (
    "CREATE TABLE IF NOT EXISTS chatflow_messages (id INTEGER PRIMARY KEY, session_id, message_json, created_at)",
    "CREATE TABLE IF NOT EXISTS chatflow_processed_messages (message_id PRIMARY KEY, processed_at)",
    "CREATE INDEX IF NOT EXISTS idx_chatflow_messages_session ON chatflow_messages (session_id, id)",
)
"""What a first start that was cut short has not made."""

_RENAME: Final[tuple[LiteralString, ...]] = (
    "ALTER TABLE chatflow_sessions RENAME TO chatflow_agent_sessions",
    "ALTER TABLE chatflow_messages RENAME TO chatflow_agent_messages",
    "ALTER TABLE chatflow_processed_messages RENAME TO chatflow_agent_ids",
)
"""Makes room for our tables, which have the same names."""

_DROP: Final[tuple[LiteralString, ...]] = (
    "DROP TABLE chatflow_agent_messages",
    "DROP TABLE chatflow_agent_sessions",
    "DROP TABLE chatflow_agent_ids",
)
"""Their indexes go with them."""

_OLD_SESSIONS: Final[LiteralString] = """
    SELECT rowid, session_id, active_agent_name, metadata_json, created_at, updated_at
    FROM chatflow_agent_sessions ORDER BY datetime(updated_at), rowid
"""
"""The one changed last comes last. Times are to the second, and many are the same."""

_OLD_MESSAGES: Final[LiteralString] = """
    SELECT id, message_json, created_at FROM chatflow_agent_messages
    WHERE session_id = (SELECT session_id FROM chatflow_agent_sessions WHERE rowid = :rowid) ORDER BY id
"""
"""A conversation's messages in the order they were added. Asked for by rowid: the id may be no text."""

_COUNT_DELETED: Final[LiteralString] = """
    SELECT count(*) FROM chatflow_agent_messages
    WHERE NOT EXISTS (
        SELECT 1 FROM chatflow_agent_sessions WHERE session_id = chatflow_agent_messages.session_id
    )
"""
"""Messages whose conversation was deleted: a session object still in use had added them afterwards."""

_OLD_IDS: Final[LiteralString] = "SELECT rowid, message_id, processed_at FROM chatflow_agent_ids"
"""All message ids, also those that have expired."""

_ADD_SESSION: Final[LiteralString] = """
    INSERT INTO chatflow_sessions
        (session_key, session_id, active_agent_name, metadata_json, version, created_at, updated_at)
    VALUES (:number, :session_id, :active_agent_name, :metadata_json, :number, :created_at, :updated_at)
"""
"""A conversation; its number is its key and its version."""

_ADD_MESSAGE: Final[LiteralString] = """
    INSERT INTO chatflow_messages (session_key, place, message_json) VALUES (:session_key, :place, :message_json)
"""
"""A message that stays."""

_ADD_ID: Final[LiteralString] = """
    INSERT INTO chatflow_processed_messages (session_id, message_id, processed_at)
    VALUES ('', :message_id, :processed_at)
"""
"""A message id, in the scope of those that were marked without a conversation: chatflow-agent kept none with it."""


@attrs.define
class Moved:
    """What an upgrade found, in numbers."""

    sessions: int = 0
    messages: int = 0
    ids: int = 0
    set_aside: int = 0
    deleted: int = 0

    def log(self, name: str) -> None:
        """Tell it, as a warning where anything did not stay."""
        logger.log(
            logging.WARNING if self.set_aside or self.deleted else logging.INFO,
            "store %r was written by chatflow-agent and has been upgraded: %d sessions, %d messages and %d message ids"
            " moved, %d set aside (table chatflow_set_aside says why), %d messages of deleted sessions deleted",
            name,
            self.sessions,
            self.messages,
            self.ids,
            self.set_aside,
            self.deleted,
        )


def upgrade(connection: Connection, create_tables: Callable[[], None]) -> Moved:
    """Replace chatflow-agent's tables by ours, which *create_tables* makes, and move what they hold."""
    for statement in (*_COMPLETE, *_RENAME):
        connection.execute(statement)
    create_tables()
    upgraded = _Upgrade(connection)
    upgraded.move_sessions()
    upgraded.move_ids()
    upgraded.moved.deleted = connection.execute(_COUNT_DELETED).fetchone()[0]
    for statement in _DROP:
        connection.execute(statement)
    return upgraded.moved


class _Upgrade:
    def __init__(self, connection: Connection) -> None:
        self.moved = Moved()
        self._connection = connection
        self._now = dt.datetime.now(dt.UTC).isoformat(timespec="microseconds")

    def _set_aside(self, session_id: str | None, source: str, content: object, reason: str) -> None:
        self.moved.set_aside += 1
        taken = SetAside(session_id=session_id, source=source, content=content, reason=reason)
        put_aside([taken], self._now, self._connection)

    # --- sessions ---

    def move_sessions(self) -> None:
        """Move all conversations, those changed last at the end."""
        for rowid, *columns in self._connection.execute(_OLD_SESSIONS):
            session_id, agent_name, *rest = columns
            if reading.is_text(session_id) and reading.is_text(agent_name):
                self._move_session(rowid, session_id, agent_name, *rest)
            else:
                self._set_session_aside(rowid, columns)

    def _set_session_aside(self, rowid: int, columns: list[Any]) -> None:
        reason = "the session's id or its agent's name is no text"
        content = json.dumps([_shown(column) for column in columns], ensure_ascii=False)
        self._set_aside(None, f"chatflow_sessions, rowid {rowid}", content, reason)
        for number, text, _ in self._connection.execute(_OLD_MESSAGES, {"rowid": rowid}):
            self._set_aside(None, f"chatflow_messages, id {number}", text, reason)

    def _move_session(
        self, rowid: int, session_id: str, agent_name: str, metadata: object, created_at: object, updated_at: object
    ) -> None:
        self.moved.sessions += 1
        self._connection.execute(
            _ADD_SESSION,
            {
                "number": self.moved.sessions,
                "session_id": session_id,
                "active_agent_name": agent_name,
                "metadata_json": self._metadata(session_id, metadata),
                "created_at": self._time(session_id, "created_at", created_at),
                "updated_at": self._time(session_id, "updated_at", updated_at),
            },
        )
        rows = list(self._messages(rowid, session_id))
        self.moved.messages += len(rows)
        self._connection.executemany(_ADD_MESSAGE, rows)

    def _metadata(self, session_id: str, text: object) -> str:
        try:
            return values_to_json(freeze_mapping(_json(text), "")) if text else "{}"
        except _UNREADABLE as error:
            self._set_aside(session_id, _column("metadata_json", session_id), text, f"can't be read: {error}")
            return "{}"

    def _time(self, session_id: str, name: str, text: object) -> str:
        moment = _moment(text)
        if moment is None:
            self._set_aside(session_id, _column(name, session_id), text, "is no time; the time of the upgrade stands")
        return moment or self._now

    # --- messages ---

    def _messages(self, rowid: int, session_id: str) -> Iterator[dict[str, Any]]:
        """A conversation's messages as rows of ours: what pruning keeps of them, with no limit on turns."""
        window = Window()
        for number, text, created_at in self._connection.execute(_OLD_MESSAGES, {"rowid": rowid}):
            reason = _add(window, text, created_at)
            if reason is not None:
                self._set_aside(session_id, f"chatflow_messages, id {number}", text, reason)
        history = window.history()
        for position, message in enumerate(history):
            place = position - history.system_count
            yield {
                "session_key": self.moved.sessions,
                "place": system_place(position) if place < 0 else place,
                "message_json": message_to_json(message),
            }

    # --- message ids ---

    def move_ids(self) -> None:
        """Move all message ids."""
        for rowid, message_id, processed_at in self._connection.execute(_OLD_IDS):
            moment = _moment(processed_at)
            if reading.is_text(message_id) and moment is not None:
                self.moved.ids += 1
                self._connection.execute(_ADD_ID, {"message_id": message_id, "processed_at": moment})
            else:
                content = json.dumps([_shown(message_id), _shown(processed_at)], ensure_ascii=False)
                reason = "the id is no text, or its time no time"
                self._set_aside(None, f"chatflow_processed_messages, rowid {rowid}", content, reason)


def _add(window: Window, text: object, created_at: object) -> str | None:
    """Add the message to *window*; the reason if it, or a part of it, can't stay."""
    try:
        message = _message(_json(text), created_at)
    except _UNREADABLE as error:
        return f"can't be read: {error}"
    if not window.add(message):
        return _ORPHANS if window.turns else "stands before the first user message"
    if message.role is not Role.TOOL:
        return None
    kept = {result.tool_call_id for result in window.history()[-1].tool_results}
    lost = [result.tool_call_id for result in message.tool_results if result.tool_call_id not in kept]
    return f"{_ORPHANS}: {json.dumps(lost)}; its other results stay in the history" if lost else None


_ORPHANS: Final = "holds results without a call before them"
_UNREADABLE: Final = (SessionFormatError, UnstorableValueError, TypeError, ValueError, RecursionError)
"""What is raised by text that is no JSON, or no message or metadata."""


def _message(data: object, created_at: object) -> Message:
    """A message as chatflow-agent wrote it."""
    fields = _fields(data)
    if fields is None:
        raise SessionFormatError(path="", reason="a message must be an object")
    escaped = {name: _escaped(name, value) for name, value in fields.items()}
    if escaped.get("timestamp") is None:
        escaped["timestamp"] = created_at
    return message_from_json(msgspec.json.encode(escaped))


def _escaped(name: str, value: object) -> object:
    """A message's field as our wire format has it, in which a dict that only looks like an envelope is none."""
    if name in {"tool_calls", "tool_results"} and isinstance(value, list):
        return [_escaped_item(item) for item in cast("list[object]", value)]
    return encode(value)


def _escaped_item(item: object) -> object:
    fields = _fields(item)
    return item if fields is None else {name: encode(value) for name, value in fields.items()}


def _fields(data: object) -> dict[str, object] | None:
    return cast("dict[str, object]", data) if isinstance(data, dict) else None


# --- values of columns, which may hold anything -------------------------------------------------------------------


def _json(text: object) -> Any:
    """*text* read. Not by msgspec, which refuses half a surrogate pair."""
    if not reading.is_text(text):
        raise SessionFormatError(path="", reason="it is no text")
    return json.loads(text)


def _shown(value: object) -> str | None:
    """*value* as text for a list of columns, in which bytes that are no text are written as Python writes them."""
    if isinstance(value, str):
        value = reading.original(value)
    if isinstance(value, bytes):
        return value.decode("utf-8", "backslashreplace")
    return None if value is None else str(value)


def _moment(text: object) -> str | None:
    """A time as our columns hold it; chatflow-agent wrote UTC without saying so."""
    try:
        moment = dt.datetime.fromisoformat(cast("str", text))
        utc = moment.replace(tzinfo=dt.UTC) if moment.tzinfo is None else moment.astimezone(dt.UTC)
    except (TypeError, ValueError, OverflowError):
        return None
    return utc.isoformat(timespec="microseconds")


def _column(name: str, session_id: str) -> str:
    return f"chatflow_sessions, session_id {session_id!r}, {name}"
