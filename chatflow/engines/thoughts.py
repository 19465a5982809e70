"""Thoughts that Claude takes back on conditions: pure functions.

Newer models bind what they think to all that the request said before it: instructions, tools, messages. After another
beginning they refuse the request, or forget the thoughts. The beginning changes when a turn is pruned, a late result
arrives, or another agent with other instructions answers; then the thoughts that follow are left out, as Anthropic
advises. Older models look at the signature alone, and want the thoughts of the turn that is under way, all of them: or
else they must be asked for none.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from chatflow.engines.result_form import FROM_TOOLS

AFTER_KEY: Final = "chatflow_thought_after"
"""In `extra`: a digest of what the message's thoughts were thought after."""

_THOUGHTS: Final = ("thinking_blocks", "reasoning_content")

_BINDS: Final = re.compile(r"claude-(?![23]|[a-z]+-[1-4]\b)")
"""Claude from version 5 on: to one that does not bind, thoughts that are left out do no harm."""

_MUST_GO_ON: Final = re.compile(r"claude-([23]|[a-z]+-[1-4]\b)")
"""Claude before version 5: one that is to think must have thought from the beginning of the turn that is under way."""


class Beginning:
    """What a request with these *tools* says, message by message, as a digest."""

    def __init__(self, tools: Iterable[Mapping[str, Any]]) -> None:
        self._digest: Final = hashlib.blake2s(digest_size=16)
        self._add(list(tools))

    def add(self, message: Mapping[str, Any]) -> None:
        """Go on with a message, in litellm's form."""
        self._add(message)

    def fitting(self, messages: Iterable[dict[str, Any]], after: object) -> Iterator[dict[str, Any]]:
        """Go on with these messages, without their thoughts if they were thought after something else."""
        fits = after is None or after == self.digest
        for message in messages:
            fitting = message if fits else {name: message[name] for name in message if name not in _THOUGHTS}
            self.add(fitting)
            yield fitting

    @property
    def digest(self) -> str:
        """The digest of all so far."""
        return self._digest.hexdigest()

    def _add(self, said: Any) -> None:
        self._digest.update(json.dumps(said).encode())


def thought_after(extra: Mapping[str, Any], arguments: Mapping[str, Any], model: str) -> dict[str, str]:
    """What goes into a reply's *extra* so that its thoughts find their place.

    *arguments* are what litellm was given.
    """
    blocks: Iterable[Mapping[str, Any]] = extra.get("thinking_blocks") or ()
    signed = any(block.get("signature") or block.get("data") for block in blocks)
    if not signed or not _BINDS.search(model):
        return {}
    beginning = Beginning(arguments.get("tools") or ())
    for message in arguments["messages"]:
        beginning.add(message)
    return {AFTER_KEY: beginning.digest}


def without_thinking_where_none_began(arguments: dict[str, Any], model: str) -> None:
    """Ask for no thoughts in the middle of a turn whose calls so far came without them, as from another provider."""
    if not _MUST_GO_ON.search(model) or not _goes_on_without_thoughts(arguments["messages"]):
        return
    arguments.pop("reasoning_effort", None)
    thinking: Mapping[str, Any] = arguments.get("thinking") or {}
    if thinking.get("type") == "enabled":
        del arguments["thinking"]


def _goes_on_without_thoughts(messages: Sequence[Mapping[str, Any]]) -> bool:
    for message in reversed(messages):
        if message["role"] == "user" and not _is_from_tools(message["content"]):
            break
        if message["role"] == "assistant" and not message.get("thinking_blocks"):
            return True
    return False


def _is_from_tools(content: str | Sequence[Mapping[str, Any]]) -> bool:
    return not isinstance(content, str) and content[0].get("text") == FROM_TOOLS
