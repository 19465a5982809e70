"""What a conversation has cost: the counts that providers gave with each message, summed."""

from __future__ import annotations

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
    known = cast("Mapping[str, Any]", total) if isinstance(total, dict) else EMPTY
    summed: dict[str, Any] = dict(known)
    for name, count in counts.items():
        before = summed.get(name)
        if type(count) in _NUMBERS:
            summed[name] = count + before if type(before) in _NUMBERS else count
        elif isinstance(count, Mapping):
            summed[name] = added(before, cast("Mapping[str, Any]", count))
    return FrozenDict(summed)


_NUMBERS: Final = frozenset({int, float})


def spent_on(messages: Iterable[Message], before: FrozenDict = EMPTY) -> FrozenDict:
    """What *messages* have cost, on top of *before*: in total, by agent and by model, as it is kept.

    *before* itself where they have cost nothing.
    """
    for message in messages:
        if message.usage is not None:
            parts = {"total": message.usage}
            if message.agent_name is not None:
                parts["by_agent"] = {message.agent_name: message.usage}
            model = message.extra.get(MODEL_KEY)
            if isinstance(model, str):
                parts["by_model"] = {model: message.usage}
            before = added(before, parts)
    return before


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
