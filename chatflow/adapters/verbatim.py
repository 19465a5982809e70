"""What other packages say with a message, kept beside it as they said it, so that it comes back equal. Pure functions.

A message of ours says less than theirs: ids, statuses and annotations have no place in it. So theirs are kept whole in
its `extra`, in order, but for a text that is the message's own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

from chatflow.core.messages import Message, Role
from chatflow.core.values import thaw


def kept(items: Iterable[Mapping[str, Any]], said: Iterable[Any], field: str) -> list[dict[str, Any]]:
    """The *items* without their *field* where it is the text that the message has *said* in their place."""
    return [
        {name: value for name, value in item.items() if name != field or not _is_text(text) or value != text}
        for item, text in zip(items, said, strict=True)
    ]


def given_back(message: Message, key: str, field: str) -> list[dict[str, Any]] | None:
    """The items that `kept` has made and that *message* has in its `extra` under *key*; None where it has none.

    Also where a repair has left it fewer results than items: what it says by itself is right then.
    """
    found: object = thaw(message.extra.get(key))
    if not isinstance(found, list) or not all(isinstance(item, dict) for item in cast("list[object]", found)):
        return None
    items = cast("list[dict[str, Any]]", found)
    said = texts_of(message, len(items))
    if not items or len(said) != len(items):
        return None
    return [
        {**item, field: text} if _is_text(text) and field not in item else item
        for item, text in zip(items, said, strict=True)
    ]


def texts_of(message: Message, count: int) -> Sequence[Any]:
    """What each of *count* items could repeat of *message*: its results, or its text, where it is clear whose that is.

    A user's is that of the last item; what stands before it are instructions.
    """
    if message.tool_results:
        return [result.content for result in message.tool_results]
    is_last = count == 1 or message.role is Role.USER
    return [*[None] * (count - 1), message.content if is_last else None]


def _is_text(said: object) -> bool:
    return isinstance(said, str)
