"""What a model is sent of a conversation that a service keeps: what the service has not seen. Pure, as `prompt` is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import attrs
import msgspec

from chatflow.core.envelopes import encode
from chatflow.core.messages import Message, Part, Role, TextPart, ToolResult
from chatflow.core.prompt import Prompt, to_prompt
from chatflow.core.pruning import Pairing

_BEFORE: Final = Message(Role.USER, "(what the service has seen)")
"""Stands for what came before the service's last words: it is not sent."""


def to_service_prompt(history: Sequence[Message], seen: int, instructions: str | None = None) -> Prompt:
    """What a service is sent that has seen the first *seen* messages of *history*; the last one of them was its own.

    System messages stand first, whether it has seen them or not: what it is told to be may have changed. Then come the
    results of the calls that it made last, as it named them, a call without one answered as interrupted; then what is
    new, valid as a prompt of its own. A result of an earlier call comes as a user's message, since the service was told
    before that the call was interrupted, or has had a result, and takes no other.
    """
    systems = [message for message in history if message.role is Role.SYSTEM]
    last = history[seen - 1] if seen and history[seen - 1].tool_calls else None
    known = [_BEFORE] if last is None else [_BEFORE, last]
    new = [message for message in _new(history, seen) if message.role is not Role.SYSTEM]
    first = to_prompt(systems, instructions)
    rest = to_prompt([*known, *new], numbered_from=seen - len(known))
    sent = list(rest.messages[len(known) :])
    if last is not None:
        named = zip(sent[0].tool_results, last.tool_calls, strict=True)
        results = [attrs.evolve(result, tool_call_id=call.id) for result, call in named]
        sent[0] = attrs.evolve(sent[0], tool_results=results)
    return Prompt((*first.messages, *sent), (*first.repairs, *rest.repairs))


def _new(history: Sequence[Message], seen: int) -> Iterator[Message]:
    """What stands after the first *seen* messages; results of earlier calls than the last ones as text."""
    pairing = Pairing()
    for position, message in enumerate(history):
        if position < seen:
            pairing.call(position, message.tool_calls)
            for result in message.tool_results:
                pairing.answer(result.tool_call_id)
            continue
        pairing.call(position, message.tool_calls)
        late: list[ToolResult] = []
        for result in message.tool_results:
            found = pairing.answer(result.tool_call_id)
            if found is not None and found[0].position < seen - 1:
                late.append(result)
        if not late:
            yield message
            continue
        others = [result for result in message.tool_results if all(result is not each for each in late)]
        if others:
            yield attrs.evolve(message, tool_results=others)
        yield Message(Role.USER, _told(late), timestamp=message.timestamp)


def _told(late: Sequence[ToolResult]) -> str | list[Part]:
    """Results as what a user says: as parts where one has parts, else as text."""
    parts: list[Part] = []
    for result in late:
        begun = f"(The result of an earlier call of the tool {result.name} has arrived only now"
        if result.parts:
            parts += [TextPart(f"{begun}, and follows)"), *result.parts]
        else:
            content = result.content
            shown = content if isinstance(content, str) else msgspec.json.encode(encode(content)).decode()
            parts.append(TextPart(f"{begun}: {shown})"))
    if any(result.parts for result in late):
        return parts
    return "\n".join(part.text for part in parts if isinstance(part, TextPart))
