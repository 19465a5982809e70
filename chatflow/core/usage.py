"""What a conversation has cost: the counts that providers gave with each message, summed."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, cast

import attrs

from chatflow.core.messages import MODEL_KEY, Message, Role
from chatflow.core.values import EMPTY, FrozenDict


@attrs.frozen(kw_only=True)
class Usage:
    """What a conversation has cost, by its providers' counts; `AgentSession.usage` makes it.

    *total*, *by_agent* and *by_model* are of its whole life, turns that have left the window included; *by_turn* is of
    the turns that the window holds, in their order, with an empty mapping for one that cost nothing.
    """

    total: Mapping[str, Any]
    by_agent: Mapping[str, Mapping[str, Any]]
    by_model: Mapping[str, Mapping[str, Any]]
    by_turn: tuple[Mapping[str, Any], ...]


def added(total: object, counts: Mapping[str, Any]) -> FrozenDict:
    """*total* with *counts* added, also those in mappings inside; what is no number is left out."""
    summed: dict[str, Any] = {}
    if isinstance(total, Mapping):
        _add(summed, cast("Mapping[str, Any]", total), _DEEPEST)
    _add(summed, counts, _DEEPEST)
    return cast("FrozenDict", _frozen(summed))


def _add(summed: dict[str, Any], counts: Mapping[str, Any], levels: int) -> None:
    for name, count in counts.items():
        if type(count) in _NUMBERS:
            before: Any = summed.get(name)
            summed[name] = _sum(before, count) if type(before) in _NUMBERS else count
        elif levels and isinstance(count, Mapping):
            inner = summed.get(name)
            if not isinstance(inner, dict):
                inner = summed[name] = {}
            _add(cast("dict[str, Any]", inner), cast("Mapping[str, Any]", count), levels - 1)


def _sum(one: float, other: float) -> float:
    try:
        return one + other
    except OverflowError:  # an int that no float can hold, and a float
        return math.inf


def _frozen(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    return FrozenDict({name: _frozen(item) for name, item in cast("dict[str, Any]", value).items()})


_NUMBERS: Final = frozenset({int, float})

_DEEPEST: Final = 8
"""Levels of mappings that are summed. No provider has more than two; what is summed must nest less than can be kept."""


def spent_on(messages: Iterable[Message], before: FrozenDict = EMPTY) -> FrozenDict:
    """What *messages* have cost, on top of *before*: in total, by agent and by model, as it is kept.

    *before* itself where they have cost nothing.
    """
    summed: dict[str, Any] | None = None
    for message in messages:
        if message.usage is not None:
            if summed is None:
                summed = {}
                _add(summed, before, _DEEPEST + 2)
            _add(summed, _parts(message, message.usage), _DEEPEST + 2)
    return before if summed is None else cast("FrozenDict", _frozen(summed))


def _parts(message: Message, usage: Mapping[str, Any]) -> dict[str, Any]:
    parts: dict[str, Any] = {"total": usage}
    if message.agent_name is not None:
        parts["by_agent"] = {message.agent_name: usage}
    model = message.extra.get(MODEL_KEY)
    if isinstance(model, str):
        parts["by_model"] = {model: usage}
    return parts


def checked_spent(value: FrozenDict) -> FrozenDict:
    """*value* itself if it is what `spent_on` gives; `TypeError` for anything else."""
    for part, counts in value.items():
        if part not in {"total", "by_agent", "by_model"}:
            raise TypeError(f"it has no part {part!r}")
        groups = counts.values() if part != "total" and isinstance(counts, FrozenDict) else [counts]
        if not all(isinstance(each, FrozenDict) for each in groups):
            raise TypeError(f"{part} must hold counts by name")
    return value


def usage_of(spent: FrozenDict, history: Sequence[Message]) -> Usage:
    """The cost of *history*, on top of what was *spent* on messages that have left it."""
    whole = spent_on(history, spent)
    turns: list[FrozenDict] = []
    for message in history:
        if message.role is Role.USER:
            turns.append(EMPTY)
        elif turns and message.usage is not None:
            turns[-1] = added(turns[-1], message.usage)
    return Usage(
        total=whole.get("total", EMPTY),
        by_agent=whole.get("by_agent", EMPTY),
        by_model=whole.get("by_model", EMPTY),
        by_turn=tuple(turns),
    )
