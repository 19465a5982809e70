"""What went wrong with a provider, as one of our errors: by the HTTP status, litellm's kind of error, or a code."""

from __future__ import annotations

import email.utils
import json
import math
import os
import re
from collections import deque
from collections.abc import Collection, Iterator, Mapping
from typing import Any, Final, cast

from chatflow.engines.common_form import plain_code, provider_of
from chatflow.exceptions import (
    ContextWindowError,
    EngineAuthenticationError,
    EngineBadRequestError,
    EngineError,
    EngineRateLimitError,
    EngineTimeoutError,
    EngineUnavailableError,
    ServiceSessionLostError,
    shorten,
)

KEY_NAMES: Final[Mapping[str, tuple[str, ...]]] = {
    "anthropic": ("ANTHROPIC_API_KEY", "ANTHROPIC_AUTH_TOKEN"),
    "cohere": ("COHERE_API_KEY", "CO_API_KEY"),
    "deepseek": ("DEEPSEEK_API_KEY",),
    "gemini": ("GEMINI_API_KEY", "GOOGLE_API_KEY"),
    "groq": ("GROQ_API_KEY",),
    "mistral": ("MISTRAL_API_KEY",),
    "openai": ("OPENAI_API_KEY", "OPENAI_ADMIN_KEY"),
    "openrouter": ("OPENROUTER_API_KEY", "OR_API_KEY"),
    "xai": ("XAI_API_KEY",),
}
"""Where litellm looks for each provider's key."""

_SAYS_NO_KEY: Final = re.compile(
    r"missing credentials|missing \w+ api key|api[ _]key is not set|unable to locate credentials", re.IGNORECASE
)

_SAYS_UNREADABLE: Final = re.compile(r"error converting to valid response block", re.IGNORECASE)
"""litellm can't read what Google has answered, and says that the request was refused."""

_SAYS_NO_PROVIDER: Final = re.compile(r"LLM Provider NOT provided")
"""litellm can't tell from the model's name whom to ask."""

_SAYS_NOT_THERE: Final = re.compile(r"not found|does not exist", re.IGNORECASE)

_SAYS_NO_PAIR: Final = re.compile(
    r"no tool (output found for function call|call found for function call output)", re.IGNORECASE
)
"""What the service keeps has calls or results that the other side lacks, as a conversation has after a failed turn."""

_REFUSED: Final = (
    "bio_policy",
    "data_residency",
    "empty_image",
    "failed_to_download",
    "image_",
    "invalid_",
    "misalignment_policy",
    "unsupported_",
)
"""How the codes begin with which an answer failed because of what it was asked (`openai.types.responses`)."""

_TOO_LONG: Final = (
    "the conversation is longer than it can take; max_prompt_tokens, on_context_window='shrink', a compactor or a lower"
    " max_turns sends less"
)
_NAMES: Final = re.compile(r"\w+")

_TOO_MANY: Final = "the provider takes no more requests for now"
_REFUSAL: Final = "the request is refused as it is"


def failure_by_code(code: object, model: str) -> EngineError | None:
    """The error that a provider's code names by itself, where no status goes with it; None for an unknown code."""
    kind: type[EngineError] | None = None
    what = ""
    if code in {"rate_limit_exceeded", "insufficient_quota"}:
        kind, what = EngineRateLimitError, _TOO_MANY
    elif code == "context_length_exceeded":
        kind, what = ContextWindowError, _TOO_LONG
    elif isinstance(code, str) and code.startswith(_REFUSED):
        kind, what = EngineBadRequestError, _REFUSAL
    if kind is None:
        return None
    word = plain_code(code)
    return kind(f"model {shorten(model)}: {what}" + (f" ({word})" if word else ""), model=model, code=word)


def failure_of(
    error: Exception,
    litellm: Any,
    *,
    model: str,
    timeout: float,
    session: str | None,
    lacks_key: bool,
    api_base: str | None,
    settings: Collection[str],
) -> EngineError:
    """What *error* of litellm, or of what it uses, means.

    *lacks_key* is whether a key is needed that litellm can't have: it says so in many words, or in none. *settings* are
    the names of those that were given.
    """
    said = _said(error)
    error = _unwrapped(error)
    headers: Mapping[str, str] = getattr(error, "litellm_response_headers", None) or {}
    status = _status_of(error, headers)
    if status is None and (named := failure_by_code(said.get("code"), model)) is not None:
        return named
    # It also has one kind of error for several statuses.
    kind: type[EngineError] = EngineUnavailableError
    what = f"the provider can't be reached or failed, and litellm raised {type(error).__name__}"
    if status is None and (_SAYS_NO_KEY.search(str(error)) or lacks_key):
        kind = EngineAuthenticationError
        names = " or ".join(KEY_NAMES.get(provider_of(model), ("the provider's key",)))
        what = f"there is no API key; set {names} in the environment"
    elif isinstance(error, TimeoutError | litellm.Timeout) or status == 408:
        kind, what = EngineTimeoutError, f"no answer within {timeout:g} s"
    elif isinstance(error, litellm.ContextWindowExceededError) or said.get("code") == "context_length_exceeded":
        kind, what = ContextWindowError, _TOO_LONG
    elif isinstance(error, litellm.RateLimitError) or status == 429:
        kind, what = EngineRateLimitError, _TOO_MANY
    elif isinstance(error, litellm.AuthenticationError) or status in {401, 403}:
        kind, what = EngineAuthenticationError, "the provider refuses the API key, or what is done with it"
    elif session is not None and status in {400, 404} and _is_lost(said, session):
        kind = ServiceSessionLostError
        what = (
            f"the service can't go on from {shorten(session)}, which it does not know any more or keeps otherwise"
            " than we do; on_lost_service_session='replay' begins a new one from the local copy"
        )
    elif said.get("code") == "conversation_locked":
        what = "another request of the same conversation is under way at the service; try again in a few seconds"
    elif _is_refusal(error, litellm, status):
        kind, what = EngineBadRequestError, _why_refused(error, litellm, said, model, api_base, settings)
    word = _word(said)
    code = "" if status is None else f" (HTTP {status}{f', {word}' if word else ''})"
    text = f"model {shorten(model)}: {what}{code}"
    return kind(text, model=model, status=status, code=word, retry_after=retry_after(headers))


def lacks_key(litellm: Any, model: str) -> bool:
    """Whether *model* needs a key that litellm finds nowhere; asked after a failure, to tell it from a network's."""
    provider = provider_of(model)
    names = KEY_NAMES.get(provider)
    places = ("api_key", f"{provider}_key", "secret_manager_client")
    if names is None or any(map(os.environ.get, names)):
        return False
    return not any(getattr(litellm, place, None) for place in places)


def retry_after(headers: Mapping[str, str]) -> float | None:
    """The seconds that a provider asks to wait, in milliseconds, seconds or as a time; None where it says nothing."""
    seconds = math.nan
    for name, scale in (("retry-after", 1), ("retry-after-ms", 1000)):
        if name in headers:
            try:
                seconds = float(headers[name]) / scale
            except ValueError:
                seconds = _until(headers[name], headers.get("date"))
    return seconds if 0 <= seconds < math.inf else None


def _until(then: str, now: str | None) -> float:
    """From one time to another, both as HTTP writes them and by the provider's own clock."""
    try:
        return (email.utils.parsedate_to_datetime(then) - email.utils.parsedate_to_datetime(now or "")).total_seconds()
    except (TypeError, ValueError):  # one has a time zone and the other none, or one is no time
        return math.nan


def _unwrapped(error: Exception) -> Exception:
    """What lies in what litellm wraps around an error in mid-stream, for a router that we don't use."""
    while isinstance(inner := getattr(error, "original_exception", None), Exception):
        error = inner
    return error


def _said(error: Exception) -> Mapping[str, Any]:
    """What the provider says is wrong, in OpenAI's form; empty where it says nothing in that form."""
    for each in _led_to(error):
        found: object = getattr(each, "body", None)
        if isinstance(found, dict):
            return _inner(cast("dict[str, Any]", found))
    _, brace, rest = str(error).partition("{")
    try:
        found, _ = json.JSONDecoder().raw_decode(brace + rest)
    except (ValueError, RecursionError):
        return {}
    return _inner(cast("dict[str, Any]", found))


def _status_of(error: Exception, headers: Mapping[str, str]) -> int | None:
    """The status of the provider's answer: litellm gives one also to errors that no server sent."""
    status: int | None = getattr(error, "status_code", None) if headers else None
    return None if status == 422 and _SAYS_UNREADABLE.search(str(error)) else status


def _is_refusal(error: Exception, litellm: Any, status: int | None) -> bool:
    if status is None:
        return isinstance(error, litellm.BadRequestError) and not _SAYS_UNREADABLE.search(str(error))
    return 400 <= status < 500


def _why_refused(
    error: Exception, litellm: Any, said: Mapping[str, Any], model: str, api_base: str | None, settings: Collection[str]
) -> str:
    """What the provider, or litellm before it asks one, refuses, in words of ours: theirs may quote the prompt."""
    words = str(error)
    if _SAYS_NO_PROVIDER.search(words):
        if api_base is not None:
            return f"no provider is known for it; for the server at api_base name it {shorten(f'openai/{model}')}"
        return "no provider is known for it; name it as provider/model, such as 'openai/gpt-4o'"
    at_fault = [str(said.get("param")).partition(".")[0]]
    if isinstance(error, litellm.UnsupportedParamsError):
        at_fault = _NAMES.findall(words.partition("To drop")[0])
    refused = [shorten(name) for name in settings if name in at_fault]
    if refused:
        return f"it does not take the setting{'s' * (len(refused) > 1)} {', '.join(refused)}, or not with that value"
    return f"{_REFUSAL}; the error's __context__ has the provider's words"


def _word(said: Mapping[str, Any]) -> str | None:
    """The provider's word for what is wrong: OpenAI has codes, Anthropic kinds, Google statuses."""
    words = (plain_code(said.get(name)) for name in ("code", "type", "status"))
    return next((word for word in words if word is not None), None)


def _led_to(error: BaseException) -> Iterator[BaseException]:
    """An error and all that it was made or raised from: litellm leaves out what a provider says in mid-stream."""
    ahead: deque[object] = deque([error])
    seen: set[int] = set()
    while ahead:
        each = ahead.popleft()
        if isinstance(each, BaseException) and id(each) not in seen:
            seen.add(id(each))
            yield each
            ahead += [getattr(each, "original_exception", None), each.__cause__, each.__context__]


def _inner(body: dict[str, Any]) -> dict[str, Any]:
    inner: object = body.get("error")
    return cast("dict[str, Any]", inner) if isinstance(inner, dict) else body


def _is_lost(said: Mapping[str, Any], session: str) -> bool:
    """Whether the service means *session*, and no other thing that it does not find, such as the model."""
    if said.get("code") == "previous_response_not_found":
        return True
    message = str(said.get("message"))
    return bool((session in message and _SAYS_NOT_THERE.search(message)) or _SAYS_NO_PAIR.search(message))
