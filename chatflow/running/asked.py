"""What is asked of a runner, and a runner's own numbers, looked at.

Asked is the answer to a user's message, or that a call goes on about which a person has decided.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, get_args

import attrs

from chatflow.core.approvals import Decision, find_held
from chatflow.core.records import Claim, check_id, check_message_id
from chatflow.core.session import AgentSession
from chatflow.core.values import FrozenDict, freeze_mapping
from chatflow.exceptions import ApprovalNotFoundError, SessionStateError, UnstorableValueError

OnDuplicate = Literal["response", "raise"]


@attrs.frozen
class Asked:
    """A user's message, or a person's decision, and what was said with it.

    *waits*: for the answer, where it is under way already.
    """

    input: str | Decision
    metadata: FrozenDict
    claim: Claim | None
    waits: bool


def asked_at(
    session: AgentSession,
    user_message: str,
    metadata: Mapping[str, Any] | None,
    message_id: str | None,
    on_duplicate: OnDuplicate,
) -> Asked:
    """What is asked in a session at hand, once all of its arguments are found good."""
    require_session(session)
    return asked_in(session.session_id, user_message, metadata, message_id, on_duplicate)


def asked_in(
    session_id: str,
    user_message: str,
    metadata: Mapping[str, Any] | None,
    message_id: str | None,
    on_duplicate: OnDuplicate,
) -> Asked:
    """What is asked in a conversation that is named, once all of its arguments are found good."""
    if on_duplicate not in get_args(OnDuplicate):
        raise ValueError(f"on_duplicate must be 'response' or 'raise', not {on_duplicate!r}")
    noted = checked_metadata(session_id, user_message, metadata)
    claim = None if message_id is None else Claim(check_message_id(message_id), user_message, noted)
    return Asked(user_message, noted, claim, waits=on_duplicate == "response")


def checked_metadata(session_id: str, user_message: str, metadata: Mapping[str, Any] | None) -> FrozenDict:
    """The *metadata*, frozen, once all of a message's arguments are found good."""
    check_id(session_id, "session_id")
    if not isinstance(user_message, str):
        raise TypeError(f"user_message must be a string, not {type(user_message).__name__}")
    return _frozen(session_id, metadata)


def decided(
    session_id: str, call_id: str, reason: str | None, metadata: Mapping[str, Any] | None, *, approved: bool
) -> Asked:
    """What a person asks by a decision, once all of its arguments are found good; the call is still to be found."""
    check_id(session_id, "session_id")
    if not isinstance(reason, str | None):
        raise TypeError(f"reason must be a string, not {type(reason).__name__}")
    given = reason if reason is not None and reason.strip() else None
    decision = Decision(call_id=check_id(call_id, "call_id"), approved=approved, reason=given)
    return Asked(decision, _frozen(session_id, metadata), None, waits=True)


def about(asked: Asked, session: AgentSession) -> Asked:
    """*asked*, a decision, as one about a call of *session*: one that waits, or was decided about.

    Raises:
        ApprovalNotFoundError: Nobody was asked about a call of its id, as far as the history goes.
    """
    decision = asked.input
    assert isinstance(decision, Decision)
    held = find_held(session.committed.history, decision.call_id)
    if held is None:
        raise ApprovalNotFoundError(session_id=session.session_id, call_id=decision.call_id)
    return attrs.evolve(asked, claim=Claim(held.decision_id, decision, asked.metadata))


def _frozen(session_id: str, metadata: Mapping[str, Any] | None) -> FrozenDict:
    try:
        return freeze_mapping({} if metadata is None else metadata, "metadata")
    except UnstorableValueError as error:
        raise SessionStateError(session_id=session_id, path=error.path, reason=error.reason) from error


def require_session(value: object) -> None:
    """Refuse what is no session."""
    if not isinstance(value, AgentSession):
        raise TypeError(f"session must be an AgentSession, not {type(value).__name__}")


def check_count(name: str, value: object, least: int) -> int:
    """*value* itself if it is a number of things, and not below *least*."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name} must be an integer, not {value!r}")
    if value < least:
        raise ValueError(f"{name} must be at least {least}, not {value}")
    return value


def check_count_or_none(name: str, value: object, least: int) -> int | None:
    """*value* itself if it is a number of things, and not below *least*, or None for no limit."""
    return None if value is None else check_count(name, value, least)


def check_seconds_or_none(name: str, value: object) -> float | None:
    """*value* itself if it is a number of seconds above 0, perhaps infinitely many, or None for no limit."""
    if value is None:
        return None
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise TypeError(f"{name} must be a number of seconds or None, not {value!r}")
    if not value > 0:
        raise ValueError(f"{name} must be above 0, not {value}")
    return value
