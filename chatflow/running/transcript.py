"""A conversation as plain text, for whoever reads it as a whole: pure. Nothing in it is a call or a result any more."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

from chatflow.core.compaction import is_summary
from chatflow.core.messages import Message, Part, Role, TextPart
from chatflow.engines.common_form import as_json
from chatflow.engines.result_form import result_text

LONGEST: Final = 2000
"""Characters of one text, call or result: what is longer is cut in its middle."""


def transcript(messages: Iterable[Message]) -> str:
    """What was said, a paragraph for each text, call and result, with who said it."""
    return "\n\n".join(f"{who}: {_cut(text)}" for who, text in _said(messages) if text.strip())


def _said(messages: Iterable[Message]) -> Iterator[tuple[str, str]]:
    for message in messages:
        if message.role is Role.TOOL:
            for result in message.tool_results:
                yield f"Result of {result.name}", result_text(result)
            continue
        yield _who(message), "\n".join(map(_shown, _parts(message)))
        for call in message.tool_calls:
            yield f"{_who(message)} calls {call.name}", as_json(call.args)


def _who(message: Message) -> str:
    if message.role is Role.SYSTEM:
        return "Summary of what came before" if is_summary(message) else "System"
    return "User" if message.role is Role.USER else message.agent_name or "Assistant"


def _parts(message: Message) -> Iterable[Part]:
    return message.content if isinstance(message.content, tuple) else [TextPart(message.text)]


def _shown(part: Part) -> str:
    return part.text if isinstance(part, TextPart) else f"[{type(part).__name__.removesuffix('Part').lower()}]"


def _cut(text: str) -> str:
    left_out = len(text) - LONGEST
    if left_out <= 0:
        return text
    half = LONGEST // 2
    return f"{text[:half]} [... {left_out} characters left out ...] {text[-half:]}"
