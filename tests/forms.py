"""Sessions as data: one with everything in it, and what only seems to be data."""

from __future__ import annotations

import decimal
import json
from typing import Any, Final

import attrs

from chatflow import Agent, Message, Role, SessionContext, ToolCall
from chatflow.core.records import NOTHING_SEEN
from chatflow.core.values import MARK, freeze
from tests.strategies import LONG_AGO, history_of, says

CALL: Final = {
    "role": "model",
    "tool_calls": [{"id": "1", "name": "refund", "args": {"amount": {MARK: "decimal", "v": "9.50"}}}],
    "agent_name": "Support",
    "timestamp": "2026-01-02T03:04:05+00:00",
}
HI: Final = {"role": "user", "content": "hi", "timestamp": "2026-01-02T03:04:05+00:00"}


def everything(**changes: Any) -> SessionContext:
    """A session with a little of everything, and a call that nobody has answered yet, or with *changes* to that."""
    call = Message(
        Role.MODEL,
        tool_calls=[ToolCall(id="1", name="refund", args={"amount": decimal.Decimal("9.50")})],
        agent_name="Support",
        usage={"input": 3},
        extra={"signature": b"s"},
        timestamp=LONG_AGO,
    )
    begun = attrs.evolve(
        NOTHING_SEEN,
        agent_name="Support",
        metadata=freeze({"channel": "whatsapp"}),
        state=freeze({"theme": "dark", "_secret": {1, 2}}),
        max_turns=5,
        history=history_of([says(Role.SYSTEM, "Be brief."), says(Role.USER, "hi"), call]),
        expires_after=3600.0,
    )
    session = SessionContext("c7", Agent("Support"))
    session.keep_alone(session.key, attrs.evolve(begun, **changes), None)
    return session


def through_json(data: dict[str, Any]) -> Any:
    """*data* as somebody gets it who was sent its text."""
    return json.loads(json.dumps(data, allow_nan=False))


def nested(levels: int, kind: str) -> Any:
    """That many lists, dicts or envelopes around nothing."""
    value: Any = 0
    for _ in range(levels):
        value = {"list": [value], "dict": {"a": value}, "tuple": {MARK: "tuple", "v": [value]}}[kind]
    return value


def in_itself() -> Any:
    """A list that holds a dict that holds the list."""
    value: list[Any] = []
    value.append({"again": value})
    return value


class LyingDict(dict[str, Any]):
    """Holds what it does not show."""

    def items(self) -> Any:
        raise RuntimeError

    __iter__ = keys = __contains__ = get = __len__ = items  # type: ignore[assignment]


class LyingText(str):
    """Is equal to everything."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        raise RuntimeError

    def __hash__(self) -> int:
        return hash("session_id")


class LyingKind(type):
    """Says that its class is equal to any, and has no name."""

    def __eq__(cls, other: object) -> bool:
        return True

    def __hash__(cls) -> int:
        return 0

    def __getattribute__(cls, name: str) -> Any:
        raise RuntimeError


class Lying(metaclass=LyingKind):
    """A value of a class that lies."""
