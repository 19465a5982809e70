"""Who belongs to a turn: the code that began it, and what that starts, by a context variable."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import TYPE_CHECKING

from chatflow.exceptions import SessionConflictError

if TYPE_CHECKING:
    from chatflow.core.handle import Handle
    from chatflow.core.turn import Turn

_memberships: ContextVar[tuple[Turn, ...]] = ContextVar("chatflow_turns", default=())


before_waiting: ContextVar[Callable[[], None] | None] = ContextVar("chatflow_before_waiting", default=None)
"""Called before the running code waits for another turn, to let go of what that turn may need."""


def open_turns() -> tuple[Turn, ...]:
    """The open turns that the running code belongs to, outermost first."""
    joined = _memberships.get()
    return tuple([turn for turn in joined if turn.is_open]) if joined else ()


def refuse_left_over(session: Handle) -> None:
    """Raise `SessionConflictError` for code of a turn that has ended without a commit: nothing of it may stay."""
    if any(turn.session is session and turn.is_dropped for turn in _memberships.get()):
        raise SessionConflictError(
            session_id=session.session_id, reason="the turn that this code belongs to has ended without a commit"
        )


def join(turn: Turn) -> None:
    """The running code, and what it starts from now on, belongs to *turn* too."""
    _memberships.set((*open_turns(), turn))


def leave_ended() -> None:
    """The running code belongs no more to turns that have ended."""
    _memberships.set(open_turns())
