"""What moves when a store is copied into another: its rows, in one form for every storage, and how both are compared.

Values are as they stand in the columns: text and JSON as they were written, moments in UTC. A turn that somebody has in
hand moves as it is left when its process is killed.
"""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Mapping
from typing import Any, Final, TypeAlias

import attrs

Row: TypeAlias = tuple[Any, ...]

COLUMNS: Final[dict[str, tuple[str, ...]]] = {
    "chatflow_sessions": (
        *("session_key", "owner", "session_id", "active_agent_name", "metadata_json", "state_json", "max_turns"),
        *("service_json", "service_key", "spent_json", "expires_after", "expires_at", "version"),
        *("created_at", "updated_at"),
    ),
    "chatflow_messages": ("session_key", "place", "message_json"),
    "chatflow_turns": (
        *("turn_id", "session_key", "state", "attempt", "attempts", "lease_seconds", "accepted", "agent_name"),
        *("message_id", "digest", "work_json", "queued_at", "ended_at"),
    ),
    "chatflow_journal": ("turn_id", "step", "entry_json"),
    "chatflow_processed_messages": (*("owner", "session_id", "message_id", "processed_at", "digest", "response_json"),),
    "chatflow_set_aside": ("set_aside_id", "owner", "session_id", "source", "content", "reason", "set_aside_at"),
}
"""The tables in the order in which they are filled, with the columns that move, in the order of a row's values."""


@attrs.frozen
class Source:
    """What is copied: a name for people, and the id that the store was given when it was made.

    Stores of chatflow 0.1.0 have none, and are known by their names.
    """

    name: str
    store_id: str | None

    def is_the_same(self, other: Source) -> bool:
        """Whether both are one store, wherever it is seen from."""
        if self.store_id is None or other.store_id is None:
            return self.name == other.name
        return self.store_id == other.store_id


class Kind(enum.Enum):
    """What a store is copied in, one after the other, each in the order of its keys."""

    CONVERSATIONS = enum.auto()
    """With messages, turns and journals; a key is a session key."""
    MESSAGE_IDS = enum.auto()
    """A key is an owner, a session id and a message id."""
    SET_ASIDE = enum.auto()
    """A key is a number."""


@attrs.frozen
class Item:
    """What is written as a whole, and compared as a whole: a conversation, a message id, something set aside."""

    owner: str
    session_id: str
    rows: Mapping[str, list[Row]]
    """By table, in the order of their keys."""


@attrs.frozen
class Slice:
    """All items of a kind whose keys are above *after* and up to *last*; with None it is the end."""

    kind: Kind
    after: Any
    last: Any
    items: Mapping[Any, Item]


@attrs.frozen(kw_only=True)
class Numbers:
    """The highest number of each sort that was given out: none of them is given out again."""

    session_key: int
    version: int
    turn_id: int
    set_aside_id: int


class Tally:
    """How many rows each table has on one side, and a checksum over them, in order."""

    def __init__(self) -> None:
        self.counts: Final = dict.fromkeys(COLUMNS, 0)
        self._hashes: Final = {table: hashlib.blake2b(digest_size=8) for table in COLUMNS}

    def add(self, item: Item) -> None:
        """Count its rows."""
        for table, rows in item.rows.items():
            self.counts[table] += len(rows)
            for row in rows:
                self._hashes[table].update(repr(row).encode())

    def checksum(self, table: str) -> str:
        """16 hexadecimal digits."""
        return self._hashes[table].hexdigest()
