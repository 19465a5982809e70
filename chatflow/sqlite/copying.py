"""Reading a whole file for a copy, a slice at a time: each is one consistent view, and no thread is held for long.

A row that can't be read is refused by its name: what is damaged is mended before it moves.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterable
from typing import Any, Final, LiteralString

import attrs

from chatflow.core import reading
from chatflow.core.copying import Item, Kind, Numbers, Row, Slice
from chatflow.core.owners import RESERVED
from chatflow.core.rows import Row as TurnRow
from chatflow.core.rows import interrupted
from chatflow.exceptions import CorruptSessionError, shorten
from chatflow.sqlite.answers import named, named_as
from chatflow.sqlite.database import Connection
from chatflow.sqlite.examination import ANSWERS_AFTER, SESSION_KEYS_AFTER
from chatflow.sqlite.journals import JOURNALS_AFTER, TURN_EXISTS
from chatflow.sqlite.turn_statements import READ_JOURNAL

CHANGES: Final[LiteralString] = "PRAGMA data_version"
"""Another number once anybody else has committed to the file since this connection asked before."""

COUNT_SESSIONS: Final[LiteralString] = "SELECT count(*) FROM chatflow_sessions"
"""How much there is to do, about."""

READ_STORE_ID: Final[LiteralString] = "SELECT value FROM chatflow_meta WHERE key = 'store_id'"
"""What tells a file from all others."""

HIGHEST_NUMBERS: Final[LiteralString] = """
    SELECT
        (SELECT seq FROM sqlite_sequence WHERE name = 'chatflow_sessions'),
        (SELECT max(version) FROM chatflow_sessions),
        (SELECT seq FROM sqlite_sequence WHERE name = 'chatflow_turns'),
        (SELECT max(set_aside_id) FROM chatflow_set_aside)
"""
"""What was given out last; nothing, if nothing was."""

COPY_SESSION: Final[LiteralString] = """
    SELECT
        session_key, owner, session_id, active_agent_name, metadata_json, state_json, max_turns, service_json,
        service_key, spent_json, expires_after, expires_at, version, created_at, updated_at
    FROM chatflow_sessions WHERE session_key = :session_key
"""
"""A conversation's own row."""

COPY_MESSAGES: Final[LiteralString] = """
    SELECT session_key, place, message_json FROM chatflow_messages WHERE session_key = :session_key ORDER BY place
"""
"""All its messages, system messages first."""

COPY_TURNS: Final[LiteralString] = """
    SELECT
        turn_id, session_key, state, attempt, attempts, lease_seconds, accepted, agent_name, message_id, digest,
        work_json, queued_at, ended_at, holder
    FROM chatflow_turns WHERE session_key = :session_key ORDER BY turn_id
"""
"""Its turns that have not committed, or that somebody is to hear of."""

COPY_SET_ASIDE: Final[LiteralString] = """
    SELECT set_aside_id, owner, session_id, source, content, reason, set_aside_at FROM chatflow_set_aside
    WHERE set_aside_id > :after ORDER BY set_aside_id LIMIT :limit
"""
"""What was set aside next."""

_FIRST: Final = -(2**63)
_LAST: Final = 2**63 - 1
BEGINNINGS: Final[dict[Kind, Any]] = {
    Kind.CONVERSATIONS: _FIRST,
    Kind.MESSAGE_IDS: ("", "", ""),
    Kind.SET_ASIDE: _FIRST,
}
"""The key that is below all others."""

_CONVERSATIONS: Final = 500
_ROWS: Final = 2_000
_CHARACTERS: Final = 4_000_000
"""A slice ends after so many conversations, or with the one that brings it to so many rows, or so much JSON."""

_SINGLES: Final = 500
"""Message ids in a slice, and things set aside."""


def changes(connection: Connection) -> int:
    """A number that is another one after somebody's commit."""
    (found,) = connection.execute(CHANGES).fetchone()
    return int(found)


def store_id(connection: Connection) -> str | None:
    """The id that the file was given when it was made, wherever it lies now; None for one of chatflow 0.1.0."""
    found = connection.execute(READ_STORE_ID).fetchone()
    return None if found is None else str(found[0])


def count_conversations(connection: Connection) -> int:
    """How many conversations there are, with those that are being erased."""
    (found,) = connection.execute(COUNT_SESSIONS).fetchone()
    return int(found)


def highest_numbers(connection: Connection) -> Numbers:
    """What a copy must not give out again; and that no journal is there whose turn is not, which nobody would copy."""
    after = _FIRST
    while journals := connection.execute(JOURNALS_AFTER, {"after": after, "last": _LAST, "limit": _SINGLES}).fetchall():
        for (turn_id,) in journals:
            if connection.execute(TURN_EXISTS, {"turn_id": turn_id}).fetchone() is None:
                row = f"chatflow_journal, turn_id {turn_id}"
                raise CorruptSessionError(session_id="", row=row, reason="its turn does not exist")
        after = journals[-1][0]
    session_key, version, turn_id, set_aside_id = (
        number or 0 for number in connection.execute(HIGHEST_NUMBERS).fetchone()
    )
    return Numbers(session_key=session_key, version=version, turn_id=turn_id, set_aside_id=set_aside_id)


def slice_after(kind: Kind, after: Any, connection: Connection) -> Slice:
    """The next items of a kind.

    Raises:
        CorruptSessionError: Something in it can't be read as what it is to be.
    """
    if kind is Kind.CONVERSATIONS:
        return _conversations_after(after, connection)
    return (_ids_after if kind is Kind.MESSAGE_IDS else _set_aside_after)(after, connection)


# --- conversations ---


def _conversations_after(after: int, connection: Connection) -> Slice:
    asked = {"after": after, "last": _LAST, "limit": _CONVERSATIONS}
    keys = [key for (key,) in connection.execute(SESSION_KEYS_AFTER, asked)]
    items: dict[int, Item] = {}
    count = size = 0
    for key in keys:
        item = _conversation(key, connection)
        if item is None:
            continue
        items[key] = item
        count += sum(map(len, item.rows.values()))
        size += sum(len(row[2]) for row in item.rows["chatflow_messages"])
        if count >= _ROWS or size >= _CHARACTERS:
            return Slice(Kind.CONVERSATIONS, after, key, items)
    return Slice(Kind.CONVERSATIONS, after, keys[-1] if len(keys) == _CONVERSATIONS else None, items)


def _conversation(session_key: int, connection: Connection) -> Item | None:
    """A conversation; None for one that is being erased."""
    asked = {"session_key": session_key}
    found = connection.execute(COPY_SESSION, asked).fetchone()
    if found is None:
        row = f"chatflow_messages or chatflow_turns, session_key {session_key}"
        raise CorruptSessionError(session_id="", row=row, reason="its conversation does not exist")
    _, owner, session_id, *_ = found
    if owner.startswith(RESERVED):
        return None
    read = _Reader(session_id, f"chatflow_sessions, session_key {session_key}")
    session = (*found[:11], read.moment(found[11]), found[12], *map(read.moment, found[13:]))
    read.check(session)
    messages = connection.execute(COPY_MESSAGES, asked).fetchall()
    for _, place, text in messages:
        if not reading.is_text(text):
            reading.text(session_id, f"chatflow_messages, session_key {session_key}, place {place}", text)
    turns: list[Row] = []
    journal: list[Row] = []
    for row in connection.execute(COPY_TURNS, asked).fetchall():
        turn = _turn(session_id, row)
        if turn is not None:
            turns.append(turn)
            journal += _journal(session_id, turn[0], connection)
    rows = {
        "chatflow_sessions": [session],
        "chatflow_messages": messages,
        "chatflow_turns": turns,
        "chatflow_journal": journal,
    }
    return Item(owner, session_id, rows)


def _turn(session_id: str, found: Row) -> Row | None:
    """A turn's row as it is left when its holder is gone; None if nothing is left of it."""
    turn_id, session_key, state, attempt, attempts, lease_seconds, accepted, *texts = found
    agent_name, message_id, digest, work_json, queued_at, ended_at, holder = texts
    read = _Reader(session_id, f"chatflow_turns, turn_id {turn_id}")
    turn = TurnRow(
        turn_id=turn_id,
        session_key=session_key,
        state=reading.state(session_id, f"{read.row}, state", state),
        holder=holder,
        attempt=attempt,
        attempts=attempts,
        accepted=bool(accepted),
        agent_name=agent_name,
        message_id=message_id,
        digest=digest,
    )
    left = turn if holder is None else interrupted(turn)
    if left is None:
        return None
    row = (
        *(turn_id, session_key, left.state.value, attempt, attempts, lease_seconds, left.accepted, agent_name),
        *(message_id, digest, work_json, read.moment(queued_at), read.moment(ended_at)),
    )
    read.check(row)
    return row


def _journal(session_id: str, turn_id: int, connection: Connection) -> Iterable[Row]:
    for step, text in connection.execute(READ_JOURNAL, {"turn_id": turn_id}).fetchall():
        row = f"chatflow_journal, turn_id {turn_id}, step {step}"
        yield turn_id, step, reading.text(session_id, row, text)


# --- what is kept beside them ---


def _ids_after(after: tuple[str, str, str], connection: Connection) -> Slice:
    found = connection.execute(ANSWERS_AFTER, {**named(named_as(*after)), "limit": _SINGLES}).fetchall()
    items: dict[Any, Item] = {}
    for owner, session_id, message_id, processed_at, digest, response in found:
        if owner.startswith(RESERVED):
            continue
        read = _Reader(session_id, f"chatflow_processed_messages, message_id {shorten(reading.shown(message_id))}")
        row = (owner, session_id, message_id, read.moment(processed_at), digest, response)
        read.check(row)
        items[row[:3]] = Item(owner, session_id, {"chatflow_processed_messages": [row]})
    last = found[-1][:3] if len(found) == _SINGLES else None
    return Slice(Kind.MESSAGE_IDS, after, last, items)


def _set_aside_after(after: int, connection: Connection) -> Slice:
    found = connection.execute(COPY_SET_ASIDE, {"after": after, "limit": _SINGLES}).fetchall()
    items: dict[Any, Item] = {}
    for number, owner, session_id, source, content, reason, set_aside_at in found:
        if owner.startswith(RESERVED):
            continue
        read = _Reader(session_id or "", f"chatflow_set_aside, set_aside_id {number}")
        # Bytes are written as Python writes them, as a repair of a database that keeps text alone writes them.
        text = None if content is None else str(reading.as_stood(content))
        row = (number, owner, session_id, source, text, reason, read.moment(set_aside_at))
        read.check(row)
        items[number] = Item(owner, session_id or "", {"chatflow_set_aside": [row]})
    last = found[-1][0] if len(found) == _SINGLES else None
    return Slice(Kind.SET_ASIDE, after, last, items)


@attrs.frozen
class _Reader:
    """Reads the columns of a row of a conversation."""

    session_id: str
    row: str

    def moment(self, value: object) -> dt.datetime | None:
        """A moment in UTC, or nothing."""
        found = reading.optional_moment(self.session_id, self.row, value)
        return None if found is None else found.astimezone(dt.UTC)

    def check(self, row: Row) -> None:
        """Refuse text that is none. The tables themselves see to all other types."""
        for value in row:
            if isinstance(value, str) and not value.isascii():
                reading.text(self.session_id, self.row, value)
