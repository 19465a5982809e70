"""Owners: whose conversations are whose, and what is handed on of a whole owner."""

from __future__ import annotations

import datetime as dt
import enum
from typing import Any, Final

import attrs

from chatflow.core.messages import AgentResponse
from chatflow.core.records import Key, Snapshot, check_id
from chatflow.exceptions import CorruptSessionError

RESERVED: Final = "\0"
"""What no owner's name begins with: under such names stand rows that are being erased."""


class AllOwners(enum.Enum):
    """The type of `ALL`."""

    ALL = "all"

    def __repr__(self) -> str:
        return "ALL"


ALL: Final = AllOwners.ALL
"""Asks a question of administration over all owners: ``await store.list_sessions(owner=ALL)``."""


def check_owner(value: object, *, may_be_empty: bool = False) -> str:
    """*value* itself if it can be an owner's name; the empty one stands for those without an owner."""
    if may_be_empty and value == "":
        return ""
    name = check_id(value, "owner")
    if name.startswith(RESERVED):
        raise ValueError(f"owner must not begin with a NUL, which is reserved: {name[:80]!r}")
    return name


@attrs.frozen(kw_only=True)
class Erased:
    """What `erase_owner` has erased, in numbers.

    *flushed* says whether nothing of it is left in the log beside a file. False where another program was reading an
    old state of the file all the time: the next `erase_owner` or `purge`, of whatever owner, tries again.
    """

    conversations: int
    messages: int
    turns: int
    message_ids: int
    set_aside: int
    flushed: bool = True


@attrs.frozen
class Hidden:
    """An owner's rows, hidden by one commit: how many they are, and the turns that went at once."""

    counts: Erased
    turns: tuple[int, ...]


@attrs.frozen
class Purged:
    """A slice of what was left alone for too long.

    *sessions* are the conversations that went, each with its session key, *turns* went with them; *next* is where to go
    on, None at the end.
    """

    sessions: tuple[tuple[Key, int], ...]
    turns: tuple[int, ...]
    next: object | None


@attrs.frozen(kw_only=True)
class Stored:
    """A conversation with its times, as one commit left it."""

    snapshot: Snapshot
    created_at: dt.datetime
    updated_at: dt.datetime


@attrs.frozen(kw_only=True)
class RememberedId:
    """What is kept of a message id; without a *session_id* it was marked for none."""

    session_id: str
    message_id: str
    processed_at: dt.datetime
    response: AgentResponse | None
    fault: CorruptSessionError | None = None
    """What can't be read of it."""


@attrs.frozen(kw_only=True)
class TakenOut:
    """What an upgrade or a repair has taken out of a conversation, as it stood."""

    number: int
    session_id: str | None
    source: str
    content: Any
    reason: str
    set_aside_at: str
