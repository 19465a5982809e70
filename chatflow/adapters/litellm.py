"""Lists of messages as people keep them with litellm, those of chat completions, as ours and back. Pure functions.

litellm itself is not needed for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, cast

from chatflow.adapters.parts import content_of
from chatflow.adapters.verbatim import given_back, kept
from chatflow.core.messages import MODEL_KEY, Message, Role, ToolResult
from chatflow.core.prompt import to_prompt
from chatflow.core.values import freeze_mapping
from chatflow.engines.call_ids import SIGNATURE, with_ids_for
from chatflow.engines.litellm_form import from_litellm_response, to_litellm_messages
from chatflow.exceptions import UnstorableValueError

MESSAGE_KEY: Final = "chatflow_litellm_message"
"""In `extra`: the message as it came, as `verbatim` keeps it."""

_UNKNOWN: Final = "unknown"
"""A model of no provider's: what only one provider understands goes to none."""

_NOT_TO_BE_READ: Final = (AttributeError, IndexError, KeyError, RecursionError, TypeError, ValueError)


def from_litellm(
    messages: Iterable[Any], *, model: str | None = None, agent_name: str | None = None
) -> tuple[Message, ...]:
    """The messages of such a list, one for each: a mapping, or what litellm's responses hold, as ``choice.message``.

    `to_litellm` gives them back equal, whatever else they hold, such as names or cache controls. A call whose arguments
    are no JSON object has none here. *model* is the one that has answered, by litellm's name, and *agent_name* who: a
    chatflow Runner sends that model's thoughts back to its provider then. To go on with them, add them to a session::

        async with session.turn():
            for message in from_litellm(messages):
                await session.add_message(message)

    Raises:
        UnstorableValueError: A message is no mapping, or holds what can't be kept; the error names its path.
        ValueError: A message is not one of a chat completion; the error names its place in the list.
    """
    reading = _Reading(model, agent_name)
    found: list[Message] = []
    for place, given in enumerate(messages):
        path = f"messages[{place}]"
        item = freeze_mapping(given.model_dump(warnings=False) if hasattr(given, "model_dump") else given, path)
        try:
            found.append(reading.message_of(item))
        except UnstorableValueError:
            raise
        except _NOT_TO_BE_READ as error:
            reason = f"it has no {error}" if isinstance(error, KeyError) else str(error)
            raise ValueError(f"{path} is no message of a chat completion: {reason}") from error
    return tuple(found)


def to_litellm(messages: Sequence[Message], *, model: str | None = None) -> list[dict[str, Any]]:
    """The messages as ``litellm.acompletion(messages=...)`` takes them.

    Without a *model* each that `from_litellm` has made is as it came, and others are as OpenAI takes them: the list to
    keep. With one it is the list to send, as `LiteLLMEngine` would: every call answered directly after it, a user
    message first, with the ids, names and thoughts that the model's provider takes.
    """
    if model is not None:
        return to_litellm_messages(to_prompt(messages).messages, model)
    found: list[dict[str, Any]] = []
    for message, with_id in zip(messages, with_ids_for(_UNKNOWN, messages), strict=True):
        found += given_back(message, MESSAGE_KEY, "content") or to_litellm_messages([with_id], _UNKNOWN)
    return found


class _Reading:
    """Messages taken one by one."""

    def __init__(self, model: str | None, agent_name: str | None) -> None:
        self._model = model or _UNKNOWN
        self._extra: dict[str, Any] = {} if model is None else {MODEL_KEY: model}
        self._agent_name = agent_name
        self._names: dict[str, str] = {}

    def message_of(self, item: Mapping[str, Any]) -> Message:
        role, content = (
            item.get("role") or "assistant",
            item.get("content"),
        )  # litellm takes one without a role for that
        content = content if content is None else content_of(content)
        extra = {MESSAGE_KEY: kept([item], [content], "content")}
        if role == "user":
            return Message(Role.USER, content, extra=extra)
        if role in {"system", "developer"}:
            return Message(Role.SYSTEM, content, extra=extra)
        if role == "assistant":
            return self._answer(item, content, extra)
        if role not in {"tool", "function"}:
            raise ValueError(f"role {role!r} is not known")
        # A signature of Gemini's, which litellm writes into ids, is none of the call's id here: see litellm_form.
        call_id = item["tool_call_id"].partition(SIGNATURE)[0] if role == "tool" else ""
        name = item.get("name") or self._names.get(call_id) or "unknown"
        return Message(
            Role.TOOL, tool_results=[ToolResult(tool_call_id=call_id, name=name, content=content)], extra=extra
        )

    def _answer(self, item: Mapping[str, Any], content: Any, extra: Mapping[str, Any]) -> Message:
        said: dict[str, Any] = {**item, "content": content if isinstance(content, str) else None}
        if item.get("function_call") and not item.get("tool_calls"):  # before there were several at once, and ids
            said["tool_calls"] = [{"id": "", "function": item["function_call"]}]
        calls: Iterable[Mapping[str, Any]] = said.get("tool_calls") or ()
        for call in calls:
            function: Mapping[str, Any] = call.get("function") or {}
            if not isinstance(function.get("arguments") or "", str):
                raise TypeError("the arguments of a call must be text, a JSON object")
        reply = from_litellm_response({"choices": [{"message": said}]}, self._model)
        self._names.update((call.id, call.name) for call in reply.tool_calls)
        return Message(
            Role.MODEL,
            cast("Any", content if isinstance(content, list) else reply.text),
            tool_calls=reply.tool_calls,
            extra={**self._extra, **reply.extra, **extra},
            agent_name=self._agent_name,
        )
