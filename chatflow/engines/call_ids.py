"""Ids of calls as the model's provider takes them: a history may have been begun with another one. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable
from operator import is_
from typing import Final

import attrs

from chatflow.core.messages import Message, ToolCall, ToolResult
from chatflow.core.prompt import new_ids
from chatflow.engines.common_form import litellm_name

_TAKEN: Final = (
    # By the model's name, since others serve these models too. Mistral: "must be a-z, A-Z, 0-9, with a length of 9".
    (re.compile(r"[sx]tral"), re.compile(r"[a-zA-Z0-9]{9}")),
    # OpenAI: "Expected a string with maximum length 40"; its Responses API takes 64.
    (re.compile(r"[/.:](gpt-|chatgpt-|o\d)|^azure"), re.compile(r"[\w.:-]{1,40}", re.ASCII)),
    # Anthropic: "String should match pattern '^[a-zA-Z0-9_-]+$'". litellm would make it so, and of two ids one.
    (re.compile(r"claude|anthropic"), re.compile(r"[\w-]{1,64}", re.ASCII)),
)

_TAKEN_BY_OTHERS: Final = re.compile(r"[\w.:-]{1,64}", re.ASCII)
"""What Bedrock takes, and "functions.look_up:0", without which Kimi loses the thread."""

SIGNATURE: Final = "__thought__"
"""What follows it in an id is a signature to litellm, and no part of the id."""


def with_ids_for(model: str, messages: Iterable[Message]) -> list[Message]:
    """The messages with ids that the provider of *model* takes, each once, the same in call and result.

    An id that will do is sent as it is. The same beginning of a conversation gets the same ids. The id of a result
    whose call is not among the messages is that of a service, which knows it.
    """
    name = litellm_name(model)
    taken = next((ids for models, ids in _TAKEN if models.search(name)), _TAKEN_BY_OTHERS)
    sent: set[str] = set()
    made = new_ids(sent)
    ids: dict[str, str] = {}

    def named(call: ToolCall) -> ToolCall:
        fits = taken.fullmatch(call.id) and SIGNATURE not in call.id and call.id not in sent
        ids[call.id] = call.id if fits else next(made)
        sent.add(ids[call.id])
        return call if fits else attrs.evolve(call, id=ids[call.id])

    def answering(result: ToolResult) -> ToolResult:
        id_ = ids.get(result.tool_call_id, result.tool_call_id)
        sent.add(id_)
        return result if id_ == result.tool_call_id else attrs.evolve(result, tool_call_id=id_)

    found: list[Message] = []
    for message in messages:
        calls, results = [*map(named, message.tool_calls)], [*map(answering, message.tool_results)]
        if not all(map(is_, (*calls, *results), (*message.tool_calls, *message.tool_results))):
            message = attrs.evolve(message, tool_calls=calls, tool_results=results)  # noqa: PLW2901  # the same, renamed
        found.append(message)
    return found
