"""What passes between the rules in `core` and the storage below them: frozen values, and nothing that acts.

Many small values, each used on both sides, in one place to look them up.
"""

from __future__ import annotations

import datetime as dt
import enum
import hashlib
import math
from collections.abc import Mapping
from typing import Any, Final, Generic, TypeVar

import attrs

from chatflow.core.approvals import OWN_MARK, Decision
from chatflow.core.history import EMPTY_HISTORY, History
from chatflow.core.journal import Entry
from chatflow.core.messages import AgentResponse, Message
from chatflow.core.rows import End, State
from chatflow.core.service import ServiceSession
from chatflow.core.values import EMPTY, FrozenDict
from chatflow.exceptions import shorten

_T = TypeVar("_T")

LONGEST_SPAN: Final = 100 * 366 * 24 * 3600.0
"""A hundred years, in seconds. Dates end at some point."""


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


def check_message_id(value: object) -> str:
    """*value* itself if it can be a message's id."""
    found = check_id(value, "message_id")
    if found.startswith(OWN_MARK):
        raise ValueError(f"message_id must not begin with a NUL, as chatflow's own ids do: {shorten(value)}")
    return found


def check_seconds(name: str, value: object) -> float:
    """*value* itself if it is a number of seconds above 0."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise TypeError(f"{name} must be a number of seconds, not {value!r}")
    if not 0 < value < math.inf:
        raise ValueError(f"{name} must be above 0, not {value}")
    return float(value)


def check_span(name: str, value: object) -> float:
    """The seconds of *value*, a timedelta or a number above 0, in which a moment may lie before or after now."""
    seconds = check_seconds(name, value.total_seconds() if isinstance(value, dt.timedelta) else value)
    if seconds > LONGEST_SPAN:
        raise ValueError(f"{name} must be at most a hundred years, not {value}")
    if not dt.timedelta(seconds=seconds):
        raise ValueError(f"{name} must be a microsecond at least, not {value}")
    return seconds


def check_grace(value: object) -> float:
    """*value* itself if it is a number of seconds to wait for what is under way."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise TypeError(f"grace must be a number of seconds, not {value!r}")
    if not value >= 0:
        raise ValueError(f"grace must be at least 0, not {value}")
    return float(value)


def system_place(position: int) -> int:
    """Where a system message stands in a conversation's order: before all others, whose place is their position."""
    return position - 2**62


def fresh_position(version: int) -> int:
    """A position past all that the conversation had when it got *version*.

    Each commit has a version of its own and moves on from here or from the last position, by a message each.
    """
    return version << 24


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
    owner: str = ""


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
    in the history's body and among its system messages: they order the rows of a file, and only grow. *service* is
    there where a service keeps the history, and *history* mirrors it.
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
    service: ServiceSession | None = None
    expires_after: float | None = None
    """Seconds without a commit after which `purge` deletes it; None for no limit of its own."""
    spent: FrozenDict = EMPTY
    """What was spent on messages that have left the window, as `spent_on` gives it."""

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


NOTHING_SEEN: Final = Snapshot(
    session_key=0,
    version=0,
    agent_name="",
    metadata=EMPTY,
    state=EMPTY,
    max_turns=None,
    history=EMPTY_HISTORY,
    start=0,
    system_start=0,
)
"""What stands for a conversation before it is read."""


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
    service: ServiceSession | None = None
    expires_after: float | None = None


def _digest_of_input(claim: Claim) -> str:
    asked = claim.input
    # A person's reason makes no other decision.
    text = asked if isinstance(asked, str) else "approved" if asked.approved else "rejected"
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


@attrs.frozen
class Claim:
    """A message's id, its text, and what its caller noted: enough for somebody else to answer it.

    Or, in place of the text, what a person has decided about a call, under an id of chatflow's own. The same id with
    another *digest* is another message.
    """

    message_id: str
    input: str | Decision
    metadata: FrozenDict = EMPTY
    digest: str = attrs.field(init=False, default=attrs.Factory(_digest_of_input, takes_self=True))


@attrs.frozen(kw_only=True)
class Ticket:
    """A turn asks for its place.

    *known* is what the asking session has seen, None for one that is created with its first turn, as *new* says.
    *agent_name* is that of the runner's starting agent, None for a turn without a runner. *ancestors* are the open
    turns that the asking code belongs to, outermost first.
    """

    key: Key
    known: Snapshot | None
    new: NewSession | None
    agent_name: str | None
    claim: Claim | None
    ancestors: tuple[int, ...]
    lease_seconds: float
    max_attempts: int | None


@attrs.frozen(kw_only=True)
class PendingTurn:
    """A turn that has its row in the store: it has not committed, or its answer is on its way to `on_response`.

    *state* is ``"queued"``, ``"running"``, ``"accepted"`` (nobody does it yet), ``"interrupted"`` (its process is
    gone, or it is a decision whose tool has begun, and failed), ``"told"`` (it failed and its caller knows; sent again
    it goes on), ``"dead"`` (given up) or ``"answered"``.
    *attempts* counts its starts, less those whose end its caller was told of. *age* is the time since *queued_at*.
    A turn without a message id has neither *user_message* nor *metadata*, and one without a runner no *agent_name*.
    One that approves or rejects a call has a *decision* in place of a *user_message*.
    """

    turn_id: int
    session_id: str
    message_id: str | None
    user_message: str | None
    metadata: Mapping[str, Any]
    agent_name: str | None
    state: str
    attempts: int
    queued_at: dt.datetime
    age: dt.timedelta
    owner: str = ""
    decision: Decision | None = None


def pending_turn(
    key: Key,
    asked: str | Decision | None = None,
    metadata: FrozenDict = EMPTY,
    *,
    turn_id: int,
    message_id: str | None,
    agent_name: str | None,
    state: str,
    attempts: int,
    queued_at: dt.datetime,
    now: dt.datetime,
) -> PendingTurn:
    """The turn of a row, as it is *now*, from what was read of it."""
    return PendingTurn(
        turn_id=turn_id,
        session_id=key.session_id,
        message_id=message_id,
        user_message=asked if isinstance(asked, str) else None,
        metadata=metadata,
        agent_name=agent_name,
        state=state,
        attempts=attempts,
        queued_at=queued_at,
        age=now - queued_at,
        owner=key.owner,
        decision=asked if isinstance(asked, Decision) else None,
    )


@attrs.frozen
class Receipt:
    """What `Runner.accept` has stored: the turn, or None for a message that was answered before.

    *duplicate* says that the message was known already, and nothing was added.
    """

    turn_id: int | None
    duplicate: bool


@attrs.frozen(kw_only=True)
class Work:
    """A turn's row with all that is needed to do it, for whoever has taken it.

    *response* is there for one that is answered, and only to be handed on.
    """

    turn: PendingTurn
    key: Key
    attempt: int
    response: AgentResponse | None = None

    @property
    def claim(self) -> Claim:
        """The message it answers."""
        asked, metadata = self.turn.decision or self.turn.user_message, self.turn.metadata
        assert self.turn.message_id is not None
        assert asked is not None
        assert isinstance(metadata, FrozenDict)
        return Claim(self.turn.message_id, asked, metadata)


@attrs.frozen(kw_only=True)
class Place:
    """A turn's row: its id, whether it runs, and the fence, which changes each time the row is taken.

    *behind_own* says of a queued row that the one directly before it belongs to this process. *session* is what the
    conversation is like now, where something runs; None means that it is as *known* to the one who asked. *work* is
    what runs instead, and is to be done first. *journal* is what an earlier attempt has left.
    """

    turn_id: int
    running: bool
    attempt: int
    behind_own: bool
    session: Snapshot | None
    work: Work | None = None
    journal: tuple[Entry, ...] = ()


@attrs.frozen
class Answered:
    """The message was answered before: with what text (None: marked by hand) and how (None: nobody kept it)."""

    digest: str | None
    response: AgentResponse | None


@attrs.frozen
class InProgress:
    """The message is being answered by the turn *turn_id*; *held* is false while nobody does it."""

    digest: str
    turn_id: int
    held: bool = True


@attrs.frozen
class Dead:
    """The message was given up after so many attempts."""

    digest: str
    attempts: int


@attrs.frozen
class Accepted:
    """The message waits in the turn *turn_id*; *known* says that it did so before."""

    turn_id: int
    digest: str
    known: bool


@attrs.frozen(kw_only=True)
class Leaving:
    """A turn's row to be given back: how it ended, and whether its holder keeps it until it tries again.

    *is_decision* says that it was a decision about a call. Told of, it is forgotten as long as it has no journal, and
    stays in its place once it has one.
    """

    turn_id: int
    attempt: int
    end: End
    max_attempts: int | None = None
    hold: bool = False
    is_decision: bool = False


@attrs.frozen
class Left:
    """A row given back: what became of it (None: nothing is left), and which row of this process may run next."""

    state: State | None
    next_turn: int | None


@attrs.frozen(kw_only=True)
class Beat:
    """The sign of life of a held row, and how many seconds its holder may be silent."""

    turn_id: int
    attempt: int
    beat: int
    lease_seconds: float


@attrs.frozen(kw_only=True)
class Beaten:
    """What a beat has found: which of the caller's rows are still its own, by their attempt, and how others fare."""

    own: Mapping[int, int]
    others: tuple[Beat, ...]


@attrs.frozen
class Cycle:
    """The turn would wait for one that waits for it."""


@attrs.frozen(kw_only=True)
class Commit:
    """What a turn changed, and the whole it leads to.

    A backend that stores rows writes the difference: *bodies* from the position *body_start* on, *systems* from
    *system_start* on, and drops rows before *drop_before*; with *replace* the messages given are all there are. A
    backend that keeps objects takes *snapshot*. Metadata is merged key by key, since others may have merged theirs in
    the meantime. *claim* and *response* become the stored answer. The row of an accepted turn stays, answered, in the
    hands of its holder where *hands_on*, who then tells `on_response`.
    """

    turn_id: int
    attempt: int
    snapshot: Snapshot
    agent_name: str | None
    state: FrozenDict | None
    spent: FrozenDict | None
    metadata_set: Mapping[str, Any]
    metadata_removed: tuple[str, ...]
    body_start: int
    bodies: tuple[Message, ...]
    system_start: int
    systems: tuple[Message, ...]
    drop_before: int | None
    replace: bool
    changes_service: bool
    claim: Claim | None
    response: AgentResponse | None
    hands_on: bool

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
            or self.changes_service
        )


@attrs.frozen
class Committed:
    """A commit that holds: the version it made, the metadata it merged into, and the turn that may run next.

    *answered* says that the turn had been accepted, and its row stays until `on_response` has returned.
    """

    version: int
    metadata: FrozenDict
    next_turn: int | None
    answered: bool = False
