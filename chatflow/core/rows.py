"""The rules of a turn's row: what may happen to it, and what then becomes of it. Pure, and the same for every storage.

A row stands in its conversation's line while it is queued, running, accepted or interrupted. The first two are held:
somebody awaits them and raises their beat. The other two are work that nobody does at the moment; they keep their
place. Told, dead and answered rows have stepped out of the line.
"""

from __future__ import annotations

import enum
import secrets
from typing import Final

import attrs


class State(enum.StrEnum):
    """What a turn's row is."""

    QUEUED = "queued"
    """A place in the line that somebody awaits."""
    RUNNING = "running"
    """The right to run: the lease."""
    ACCEPTED = "accepted"
    """Work to be done."""
    INTERRUPTED = "interrupted"
    """What is left of a turn whose process is gone, or whose doer had to stop; or a decision that failed on the way."""
    TOLD = "told"
    """It ended without a commit, and its caller knows; it goes on when its message is sent again."""
    DEAD = "dead"
    """Tried as often as it may be."""
    ANSWERED = "answered"
    """Committed; whoever is to hear of it has not been told yet."""


WAITING: Final = frozenset({State.ACCEPTED, State.INTERRUPTED})
"""In line, and done by nobody, unless a worker holds it until it tries again."""
LIVE: Final = frozenset({State.QUEUED, State.RUNNING})
"""In line, and held."""
IN_LINE: Final = WAITING | LIVE
GIVEN_UP: Final = frozenset({State.TOLD, State.DEAD})
"""Out of the line, and nothing is owed to anybody: the conversation may be purged."""


class End(enum.Enum):
    """How a turn ended without a commit."""

    TOLD = enum.auto()
    """Its caller was told, by an error or its own cancellation."""
    FAILED = enum.auto()
    """It was done for somebody who is not there to be told."""
    LET_GO = enum.auto()
    """Whoever did it for another had to stop; that is not the turn's fault."""


@attrs.frozen(kw_only=True)
class Row:
    """A turn's row, as far as the rules look at it.

    *holder* and *attempt* are the fence: both are tested by all that the turn does, and *attempt* grows each time the
    row is taken, by `next_attempt`. *attempts* counts the starts, less those whose end the caller was told of.
    *agent_name* tells which application's work it is; None for a turn that belongs to no runner.
    """

    turn_id: int
    session_key: int
    state: State
    holder: str | None
    attempt: int
    attempts: int
    accepted: bool
    agent_name: str | None
    message_id: str | None
    digest: str | None

    def is_of(self, holder: str, attempt: int) -> bool:
        """Whether that fence still holds."""
        return self.holder == holder and self.attempt == attempt


def passes(agent_name: str | None, other: Row) -> bool:
    """Whether a turn may overtake *other*: waiting work of another application, and any for one without a runner."""
    return other.state in WAITING and other.agent_name != agent_name


def next_attempt(attempt: int = 0) -> int:
    """A fence's next number: above *attempt*, by a random step.

    A server that crashes may lose that a row was taken, or that its id was given out, and do the same for the same
    holder again. What that one began before must not pass for what it began then.
    """
    return attempt + 1 + secrets.randbits(32)


def taken(row: Row, holder: str) -> Row:
    """The row in the hands of somebody new, who waits for its place."""
    return attrs.evolve(row, state=State.QUEUED, holder=holder, attempt=next_attempt(row.attempt))


def started(row: Row, holder: str) -> Row:
    """The row as it begins to run."""
    attempt = next_attempt(row.attempt)
    return attrs.evolve(row, state=State.RUNNING, holder=holder, attempt=attempt, attempts=row.attempts + 1)


def is_spent(row: Row, max_attempts: int | None) -> bool:
    """Whether it may not be started any more."""
    return row.message_id is not None and max_attempts is not None and row.attempts >= max_attempts


def dead(row: Row) -> Row:
    """The row given up."""
    return attrs.evolve(row, state=State.DEAD, holder=None)


def interrupted(row: Row) -> Row | None:
    """The row after its holder is gone; None if nothing remains of it."""
    if row.message_id is None:
        return None
    if row.state in LIVE:
        return attrs.evolve(row, state=State.INTERRUPTED, holder=None)
    return attrs.evolve(row, holder=None)


def ended(row: Row, end: End, max_attempts: int | None) -> Row | None:
    """The row after its holder let go of it; None if nothing remains of it."""
    if row.message_id is None:
        return None
    if row.state not in LIVE:
        return attrs.evolve(row, holder=None)
    counted = end is End.FAILED or (end is End.TOLD and row.accepted) or row.state is not State.RUNNING
    attempts = row.attempts if counted else row.attempts - 1
    left = attrs.evolve(row, attempts=attempts, holder=None)
    if end is End.LET_GO:
        fresh = row.accepted and attempts == 0
        return attrs.evolve(left, state=State.ACCEPTED if fresh else State.INTERRUPTED)
    if is_spent(left, max_attempts) and counted:
        return dead(left)
    return attrs.evolve(left, state=State.ACCEPTED if row.accepted else State.TOLD)
