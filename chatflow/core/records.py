"""What passes between the rules in `core` and the storage below them: frozen values, and nothing that acts."""

from __future__ import annotations

import datetime as dt
import enum
from collections.abc import Mapping
from typing import Any, Generic, TypeVar

import attrs

from chatflow.core.history import History
from chatflow.core.messages import AgentResponse, Message
from chatflow.core.values import FrozenDict
from chatflow.exceptions import shorten

_T = TypeVar("_T")


def check_id(value: object, name: str) -> str:
    """*value* itself if it can be an id: text that is not empty and that UTF-8 can encode."""
    if not isinstance(value, str):
        raise TypeError(f"{name} must be a string, not {type(value).__name__}")
    if not value:
        raise ValueError(f"{name} must not be empty")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{name} must be text that UTF-8 can encode: {shorten(value)}") from error
    return str.__str__(value)


def system_place(position: int) -> int:
    """Where a system message stands in a conversation's order: before all others, whose place is their position."""
    return position - 2**62


@attrs.frozen
class Page(Generic[_T]):
    """A part of a longer list: its *items*, and *next*, which asks for the part after it (None at the end)."""

    items: tuple[_T, ...]
    next: int | None


@attrs.frozen(kw_only=True)
class SessionInfo:
    """A conversation as a list shows it, without its messages."""

    session_id: str
    active_agent_name: str
    metadata: Mapping[str, Any]
    created_at: dt.datetime
    updated_at: dt.datetime


@attrs.frozen
class Key:
    """What names a conversation: its owner and its id."""

    owner: str
    session_id: str


@attrs.frozen
class Known:
    """Names a commit: which incarnation of the conversation's id, and which version of that."""

    session_key: int
    version: int


@attrs.frozen(kw_only=True)
class Snapshot:
    """A conversation as one commit left it.

    *session_key* tells an id's incarnations apart: a deleted id that is used anew has another one, and none is ever
    given out again. *version* grows with each change. *start* and *system_start* are the positions of the first message
    in the history's body and among its system messages: they order the rows of a file, and only grow.
    """

    session_key: int
    version: int
    agent_name: str
    metadata: FrozenDict
    state: FrozenDict
    max_turns: int | None
    history: History
    start: int
    system_start: int

    @property
    def known(self) -> Known:
        """Which commit it is of."""
        return Known(self.session_key, self.version)

    @property
    def end(self) -> int:
        """The position after the last message in the history's body."""
        return self.start + self.history.body_length

    @property
    def system_end(self) -> int:
        """The position after the last system message."""
        return self.system_start + self.history.system_count

    def same_as(self, other: Snapshot | None) -> bool:
        """Whether *other* is of the same commit."""
        return other is not None and self.known == other.known


class Seen(enum.Enum):
    """What a look at the storage found where it found no newer snapshot."""

    UNCHANGED = enum.auto()
    ABSENT = enum.auto()


class Lost(enum.Enum):
    """What a turn finds gone: its own row, or the whole conversation."""

    TURN = enum.auto()
    SESSION = enum.auto()


@attrs.frozen(kw_only=True)
class NewSession:
    """How a conversation begins."""

    agent_name: str
    metadata: FrozenDict
    max_turns: int | None


@attrs.frozen
class Claim:
    """A message's id, and a digest of its text: the same id with another digest is another message."""

    message_id: str
    digest: str


@attrs.frozen(kw_only=True)
class Ticket:
    """A turn asks for its place.

    *known* is what the asking session has seen, None for one that is created with its first turn, as *new* says.
    *ancestors* are the open turns that the asking code belongs to, outermost first.
    """

    key: Key
    known: Snapshot | None
    new: NewSession | None
    agent_name: str
    claim: Claim | None
    ancestors: tuple[int, ...]


@attrs.frozen(kw_only=True)
class Place:
    """A turn's row: its id, whether it runs, and the fence, which changes each time the row is taken.

    *behind_own* says of a queued row that the one directly before it belongs to this process. *session* is what the
    conversation is like now, for a row that runs; None means that it is as *known* to the one who asked.
    """

    turn_id: int
    running: bool
    attempt: int
    behind_own: bool
    session: Snapshot | None


@attrs.frozen
class Answered:
    """The message was answered before: with what text (None: marked by hand) and how (None: nobody kept it)."""

    digest: str | None
    response: AgentResponse | None


@attrs.frozen
class InProgress:
    """The message is being answered by the turn *turn_id*."""

    digest: str
    turn_id: int


@attrs.frozen
class Cycle:
    """The turn would wait for one that waits for it."""


@attrs.frozen(kw_only=True)
class Commit:
    """What a turn changed, and the whole it leads to.

    A backend that stores rows writes the difference: *bodies* from the position *body_start* on, *systems* from
    *system_start* on, and drops rows before *drop_before*; with *replace* the messages given are all there are. A
    backend that keeps objects takes *snapshot*. Metadata is merged key by key, since others may have merged theirs in
    the meantime. *claim* and *response* become the stored answer.
    """

    turn_id: int
    attempt: int
    snapshot: Snapshot
    agent_name: str | None
    state: FrozenDict | None
    metadata_set: Mapping[str, Any]
    metadata_removed: tuple[str, ...]
    body_start: int
    bodies: tuple[Message, ...]
    system_start: int
    systems: tuple[Message, ...]
    drop_before: int | None
    replace: bool
    claim: Claim | None
    response: AgentResponse | None

    @property
    def changes_session(self) -> bool:
        """Whether the conversation differs after it."""
        return bool(
            self.agent_name is not None
            or self.state is not None
            or self.metadata_set
            or self.metadata_removed
            or self.bodies
            or self.systems
            or self.drop_before is not None
            or self.replace
        )


@attrs.frozen
class Committed:
    """A commit that holds: the version it made, the metadata it merged into, and the turn that may run next."""

    version: int
    metadata: FrozenDict
    next_turn: int | None
