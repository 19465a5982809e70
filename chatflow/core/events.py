"""What a streamed run tells while it goes on: a frozen value for each thing that happens."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import attrs

from chatflow.core.messages import AgentResponse, Handoff, ToolCall, ToolResult


@attrs.frozen
class TextDelta:
    """The next piece of what a model says: joined, the pieces of a reply are its text, also where it calls tools too.

    An engine leaves *agent_name* out, and the run fills it in.
    """

    text: str = attrs.field(validator=attrs.validators.instance_of(str))
    agent_name: str = ""


@attrs.frozen
class ReasoningDelta:
    """The next piece of what a model thinks before it answers; it is no part of the answer.

    An engine leaves *agent_name* out, and the run fills it in.
    """

    text: str = attrs.field(validator=attrs.validators.instance_of(str))
    agent_name: str = ""


@attrs.frozen
class ToolStarted:
    """A call of *agent_name* is taken up. It may still be refused, unknown for instance: its result then says so."""

    call: ToolCall
    agent_name: str


@attrs.frozen
class ToolFinished:
    """What a call led to, errors included; as it happens, so that calls of one message may finish in any order.

    Each call has one, but for those that wait for a person. A call that had ended in an earlier attempt of the message
    is not taken up again, and has only this.
    """

    call: ToolCall
    result: ToolResult


@attrs.frozen
class ApprovalRequested:
    """A call of *agent_name* waits for a person; the turn ends with that. It is decided on once `Done` has come."""

    call: ToolCall
    agent_name: str


@attrs.frozen
class HandedOff:
    """The conversation is with *agent_name* now; `ToolFinished` of the call that led to it comes next."""

    handoff: Handoff
    agent_name: str


@attrs.frozen
class AnswerRejected:
    """The answer that was just told, by *agent_name*, is not of its output type, and is asked for once more.

    What shows it should clear it: all text since the last `ToolFinished`, or since the beginning. It is not stored.
    *problems* say what is wrong, by place, such as ``answer.items[3].amount``.
    """

    problems: Mapping[str, str]
    agent_name: str


@attrs.frozen
class UsageReported:
    """What one reply of a model cost, as its provider counts; the response's `usage` is the sum of all."""

    usage: Mapping[str, Any]


@attrs.frozen
class Done:
    """The answer, which is stored durably. Nothing comes after it."""

    response: AgentResponse


RunEvent: TypeAlias = (
    TextDelta
    | ReasoningDelta
    | ToolStarted
    | ToolFinished
    | ApprovalRequested
    | HandedOff
    | AnswerRejected
    | UsageReported
    | Done
)

Report: TypeAlias = Callable[[RunEvent], None]
"""Takes what happens in a run, in the run's event loop. It never waits, and raises nothing."""
