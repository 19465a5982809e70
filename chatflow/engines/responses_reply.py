"""What a response of OpenAI's Responses API says, as litellm gives it: pure functions."""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping
from typing import Any, Final, cast

from chatflow.core.engine import EngineReply
from chatflow.core.messages import ToolCall
from chatflow.engines.common_form import (
    INVALID_ARGUMENTS_KEY,
    PROVIDER_KEY,
    arguments_of,
    counts,
    given,
    plain_code,
    provider_of,
)
from chatflow.engines.failures import failure_by_code
from chatflow.engines.responses_form import (
    BETWEEN,
    OUTPUT_KEY,
    is_conversation,
    phase_of,
    plain_order,
    speaks_for_itself,
)
from chatflow.exceptions import EngineError, EngineUnavailableError, shorten

_WRAPPED: Final = re.compile(rb"litellm:custom_llm_provider:[^;]*;model_id:None;response_id:(.+)", re.DOTALL)
"""What litellm writes into a response's id. A litellm proxy writes a model's id too; its ids are left as they are."""


def own_id(id_: str) -> str:
    """The provider's own id of a response, out of the one that litellm has put around it."""
    try:
        found = _WRAPPED.fullmatch(base64.b64decode(id_.removeprefix("resp_"), validate=True))
        return found[1].decode() if found else id_
    except ValueError:  # no base64, or no text in it
        return id_


def from_responses_response(response: Any, model: str, session: str | None = None) -> EngineReply:
    """The reply in a response (litellm's object, or the same as a dict) of *model*, asked to go on from *session*.

    Its own session is the same conversation, or the response itself. It has none if it is a first one and the service
    says that it was not stored, as it is with accounts that may keep no data.

    Raises:
        EngineError: The response failed, by kind, or holds no answer.
    """
    failure = failure_in(response, model)
    if failure is not None:
        raise failure
    data = _fields(response)
    status, items = data.get("status"), data.get("output")
    if status in {"cancelled", "in_progress", "queued"} or not isinstance(items, list):
        raise EngineUnavailableError(f"model {shorten(model)}: the response holds no answer", model=model)
    output = _Output()
    for item in cast("list[dict[str, Any]]", items):
        output.take(item)
    return EngineReply(
        text=BETWEEN.join(output.texts) if output.speaks else None,
        tool_calls=tuple(output.calls),
        usage=_usage(data.get("usage") or {}) or None,
        extra=output.beyond_text_and_calls(provider_of(model)),
        service_session_id=_session_after(data, session),
        finish_reason=_finish_reason(data, bool(output.calls)),
    )


def failure_in(response: Any, model: str) -> EngineError | None:
    """What has failed, by kind, where the response says that it did."""
    data = _fields(response)
    if data.get("status") != "failed":
        return None
    error: Mapping[str, Any] = data.get("error") or {}
    code: object = error.get("code")
    word = plain_code(code)
    what = "the provider failed to make an answer" + (f" ({word})" if word else "")
    return failure_by_code(code, model) or EngineUnavailableError(
        f"model {shorten(model)}: {what}", model=model, code=word
    )


def _fields(response: Any) -> dict[str, Any]:
    fields: dict[str, Any] = response.model_dump(warnings=False) if hasattr(response, "model_dump") else response
    return fields


def _session_after(data: Mapping[str, Any], session: str | None) -> str | None:
    if session is not None and is_conversation(session):
        return session
    id_ = data.get("id")
    stored = session is not None or data.get("store") is not False
    return own_id(id_) if isinstance(id_, str) and stored else None


class _Output:
    """What a response's items say, taken one by one."""

    def __init__(self) -> None:
        self.texts: Final[list[str]] = []
        self.speaks = False
        self.refusals: Final[list[str]] = []
        self.calls: Final[list[ToolCall]] = []
        self.invalid: Final[dict[str, str]] = {}
        self.order: Final[list[dict[str, Any]]] = []

    def take(self, item: Mapping[str, Any]) -> None:
        if item.get("type") == "message":
            self._take_message(item)
        elif item.get("type") == "function_call":
            self._take_call(item)
        elif item.get("type") != "reasoning" or speaks_for_itself(item) or item.get("summary"):
            self.order.append(given(item))

    def _take_message(self, item: Mapping[str, Any]) -> None:
        self.speaks = True
        parts: list[Mapping[str, Any]] = item.get("content") or []
        text = "".join(part.get("text") or part.get("refusal") or "" for part in parts)
        self.refusals.extend(part["refusal"] for part in parts if part.get("refusal"))
        if text:
            self.texts.append(text)
            self.order.append({"type": "message", "length": len(text), **phase_of(item)})

    def _take_call(self, item: Mapping[str, Any]) -> None:
        raw: str = item.get("arguments") or ""
        args = arguments_of(raw)
        if args is None:
            self.invalid[str(len(self.calls))] = raw
        id_ = item.get("call_id") or item.get("id") or ""
        self.calls.append(ToolCall(id=id_, name=item.get("name") or "", args=args or {}))
        self.order.append({"type": "function_call"})

    def beyond_text_and_calls(self, provider: str) -> dict[str, Any]:
        extra: dict[str, Any] = {}
        if self.order != plain_order(BETWEEN.join(self.texts), len(self.calls)):
            extra[OUTPUT_KEY] = self.order
        if self.refusals:
            extra["refusal"] = "".join(self.refusals)
        if extra:
            extra[PROVIDER_KEY] = provider
        if self.invalid:
            extra[INVALID_ARGUMENTS_KEY] = self.invalid
        return extra


def _finish_reason(data: Mapping[str, Any], calls: bool) -> str:
    if data.get("status") == "incomplete":
        details: Mapping[str, Any] = data.get("incomplete_details") or {}
        reason: str = details.get("reason") or "max_output_tokens"
        return "length" if reason == "max_output_tokens" else reason
    return "tool_calls" if calls else "stop"


def _usage(usage: Mapping[str, Any]) -> dict[str, Any]:
    """The counts under the names that they have in chat completions, so that those of a conversation add up."""
    names = {"input": "prompt", "output": "completion"}
    renamed: dict[str, Any] = {}
    for name, count in counts(usage).items():
        first, _, rest = name.partition("_")
        renamed[f"{names.get(first, first)}_{rest}" if rest else name] = count
    return renamed
