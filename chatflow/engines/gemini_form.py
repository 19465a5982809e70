"""What litellm's conversion for Gemini would otherwise lose or stumble over. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final

from chatflow.core.messages import ToolResult
from chatflow.engines.common_form import as_json, provider_of

_PROVIDERS: Final = frozenset({"gemini", "vertex_ai", "vertex_ai_beta"})

_TELLS_CALLS_APART: Final = re.compile(r"gemini-([3-9]|[1-9]\d)")
"""Models whose calls have ids, so that no two are equal."""


def is_for_gemini(model: str) -> bool:
    """Whether litellm's conversion for Gemini makes the request to this model."""
    return provider_of(model) in _PROVIDERS


def gemini_text(result: ToolResult, text: str) -> str:
    """The *text* of a result as litellm takes it for Gemini: an object, so that it looks for none in the text.

    It would read text that looks like JSON, of any depth and with NaN in it, and text that looks like a picture.
    """
    return text if isinstance(result.content, dict) and not result.is_error else as_json({"content": text})


def with_equal_calls_apart(sent: Sequence[dict[str, Any]], model: str) -> Iterator[dict[str, Any]]:
    """The same messages, one with equal calls as several, of which each is answered before the next.

    litellm leaves out a call that equals another one of the same message, and keeps the results of both.
    """
    answers = {message["tool_call_id"]: message for message in sent if message["role"] == "tool"}
    moved: set[str] = set()
    for message in sent:
        groups = [] if _TELLS_CALLS_APART.search(model) else _groups_without_equals(message.get("tool_calls") or ())
        if len(groups) < 2:
            if message.get("tool_call_id") not in moved:
                yield message
            continue
        for number, group in enumerate(groups):
            beside = message if number == 0 else {"role": "assistant", "content": None}
            yield {**beside, "tool_calls": group}
            for id_ in (call["id"] for call in group if call["id"] in answers):
                moved.add(id_)
                yield answers[id_]


def _groups_without_equals(calls: Iterable[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """The calls in as few groups as it takes, each in order."""
    groups: list[list[dict[str, Any]]] = []
    seen: list[tuple[str, Any]] = []
    for call in calls:
        said = (call["function"]["name"], json.loads(call["function"]["arguments"]))  # 1 equals true, as for litellm
        place = seen.count(said)
        seen.append(said)
        groups += [[]] * (place == len(groups))
        groups[place] = [*groups[place], call]
    return groups
