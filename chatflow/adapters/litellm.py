"""Lists of messages as people keep them with litellm, those of chat completions, as ours and back. Pure functions.

litellm itself is not needed for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, cast

from chatflow.adapters.parts import content_of, expected
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
    messages: Iterable[Any],
    *,
    model: str | None = None,
    agent_name: str | None = None,
    history: Iterable[Message] | None = None,
) -> tuple[Message, ...]:
    """The messages of such a list, one for each: a mapping, or what litellm's responses hold, as ``choice.message``.

    `to_litellm` gives them back equal, whatever else they hold, such as names or cache controls. A call whose arguments
    are no JSON object has none here. *model* is the one that has answered, by litellm's name, and *agent_name* who: a
    chatflow Runner sends that model's thoughts back to its provider then.

    To go on with them, add them to a session, and give its *history*::

        async with session.turn():
            for message in from_litellm(messages, history=session.history):
                await session.add_message(message)

    A session stores nothing but system messages before the first user message. With a *history* to be added to, what
    comes before that, such as a greeting, is made a system message without text, which `to_litellm` gives back as it
    was and no model is sent. Results of calls in the history get these calls' names.

    Raises:
        UnstorableValueError: A message is no mapping, or holds what can't be kept; the error names its path.
        ValueError: A message is not one of a chat completion; the error names its place in the list.
    """
    reading = _Reading(model, agent_name, history)
    found: list[Message] = []
    for place, given in enumerate(messages):
        path = f"messages[{place}]"
        item = freeze_mapping(given.model_dump(warnings=False) if hasattr(given, "model_dump") else given, path)
        try:
            found.append(reading.take(item))
        except UnstorableValueError:
            raise
        except _NOT_TO_BE_READ as error:
            raise ValueError(f"{path} is no message of a chat completion: {_reason(error)}") from error
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


def _reason(error: Exception) -> str:
    match error:
        case KeyError():
            return f"it has no {error}"
        case ValueError():
            return str(error)
        case _:
            return "something in it is of another type than is documented"


class _Reading:
    """Messages taken one by one, to be added to a *history* if there is one."""

    def __init__(self, model: str | None, agent_name: str | None, history: Iterable[Message] | None) -> None:
        self._model = model or _UNKNOWN
        self._extra: dict[str, Any] = {} if model is None else {MODEL_KEY: model}
        self._agent_name = agent_name
        before = [] if history is None else [*history]
        self._names = {call.id: call.name for message in before for call in message.tool_calls}
        self._has_begun = history is None or any(message.role is Role.USER for message in before)

    def take(self, item: Mapping[str, Any]) -> Message:
        message = self._message_of(item)
        self._has_begun = self._has_begun or message.role is Role.USER
        if not self._has_begun and message.role is not Role.SYSTEM:
            return Message(Role.SYSTEM, extra={MESSAGE_KEY: kept([item], [None], "content")})
        return message

    def _message_of(self, item: Mapping[str, Any]) -> Message:
        # litellm takes a message without a role for an answer
        role = expected(item.get("role") or "assistant", str, "its role must be text")
        content = item.get("content")
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
        call_id = _asked(item["tool_call_id"]) if role == "tool" else ""
        name = item.get("name") or self._names.get(call_id) or "unknown"
        return Message(
            Role.TOOL, tool_results=[ToolResult(tool_call_id=call_id, name=name, content=content)], extra=extra
        )

    def _answer(self, item: Mapping[str, Any], content: Any, extra: Mapping[str, Any]) -> Message:
        said: dict[str, Any] = {**item, "content": content if isinstance(content, str) else None}
        if item.get("function_call") and not item.get("tool_calls"):  # before there were several at once, and ids
            said["tool_calls"] = [{"id": "", "function": item["function_call"]}]
        calls: Iterable[Any] = said.get("tool_calls") or ()
        for call in calls:
            function: Any = expected(call, Mapping, "a call must be a mapping").get("function")
            if function:
                arguments = expected(function, Mapping, "a call's function must be a mapping").get("arguments")
                expected(arguments or "", str, "the arguments of a call must be text, a JSON object")
        reply = from_litellm_response({"choices": [{"message": said}]}, self._model)
        self._names.update((call.id, call.name) for call in reply.tool_calls)
        return Message(
            Role.MODEL,
            cast("Any", content if isinstance(content, list) else reply.text),
            tool_calls=reply.tool_calls,
            extra={**self._extra, **reply.extra, **extra},
            agent_name=self._agent_name,
        )


def _asked(call_id: object) -> str:
    """The id of the call that a result names, as the call has it here."""
    given: str = expected("" if call_id is None else call_id, str, "its tool_call_id must be text")
    # A signature of Gemini's, which litellm writes into ids, is none of the call's id here: see litellm_form.
    plain, _, signature = given.partition(SIGNATURE)
    return plain if signature else given
