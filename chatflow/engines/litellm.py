"""LiteLLMEngine: any provider's model, by way of litellm."""

from __future__ import annotations

import importlib
import math
import os
import re
from collections.abc import Mapping
from typing import Any, Final, cast

import anyio
import anyio.to_thread

from chatflow.core.engine import EngineReply, EngineRequest
from chatflow.core.values import thaw
from chatflow.engines.litellm_form import (
    from_litellm_response,
    litellm_name,
    provider_of,
    to_litellm_messages,
    to_litellm_tools,
    tools_of_the_past,
)
from chatflow.exceptions import (
    ContextWindowError,
    EngineAuthenticationError,
    EngineBadRequestError,
    EngineError,
    EngineRateLimitError,
    EngineTimeoutError,
    EngineUnavailableError,
    shorten,
)

_KEY_NAMES: Final[Mapping[str, tuple[str, ...]]] = {
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

_OURS: Final = frozenset(
    {"api_base", "api_key", "max_retries", "messages", "model", "n", "num_retries", "stream", "timeout", "tools"}
)


class LiteLLMEngine:
    """Asks the agent's model, or *model* for all agents, through litellm; the provider follows from the model's name.

    A bare name means the provider that people mean: ``gemini-…`` Google's Gemini API (not Vertex AI), ``claude-…``
    Anthropic, ``gpt-…``, ``chatgpt-…`` and ``o3`` and the like OpenAI, ``grok-…`` xAI, ``mistral-…``, ``deepseek-…``,
    ``command-…`` Cohere. Any other name is litellm's, such as ``openrouter/meta-llama/llama-3.3-70b-instruct``.

    litellm takes seconds to load, so that it is loaded on first use, in a thread; `warm_up` does it beforehand. Loading
    sets ``LITELLM_LOCAL_MODEL_COST_MAP=True`` in the environment unless it is set, or litellm would fetch a price list
    from the network, and ``litellm.suppress_debug_info``, or it would print. litellm itself reads a ``.env`` file.

    Each `generate` is one request: litellm's and its clients' own retries are off.

    Args:
        model: The model to ask instead of each agent's.
        timeout: Seconds for a whole answer.
        api_key: The key; by default litellm finds it in the environment, by the provider.
        api_base: The address of a server of one's own; ``openai/<name>`` is the model's name for most.
        settings: Anything else that `litellm.acompletion` takes, such as ``{"temperature": 0}``. The settings of a
            request come before these.

    Raises:
        TypeError: An argument is of a wrong type.
        ValueError: *timeout* is not above 0, or a setting is one that the engine itself decides about.
    """

    def __init__(
        self,
        model: str | None = None,
        *,
        timeout: float = 60,
        api_key: str | None = None,
        api_base: str | None = None,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        for name, value in (("model", model), ("api_key", api_key), ("api_base", api_base)):
            if value is not None and not isinstance(value, str):
                raise TypeError(f"{name} must be a string or None, not {type(value).__name__}")
        if isinstance(timeout, bool) or not isinstance(timeout, int | float):
            raise TypeError(f"timeout must be a number of seconds, not {type(timeout).__name__}")
        if not 0 < timeout < math.inf:
            raise ValueError(f"timeout must be above 0 and finite, not {timeout}")
        self._model: Final = model
        self._timeout: Final = timeout
        self._api_key: Final = api_key
        self._api_base: Final = api_base
        self._settings: Final = _checked_settings(settings or {})
        self._litellm: Any = None

    def __repr__(self) -> str:
        return f"LiteLLMEngine(model={self._model!r}, timeout={self._timeout!r})"

    async def warm_up(self) -> None:
        """Load litellm now, in a thread, so that the first request need not wait for it; once is enough."""
        if self._litellm is None:
            self._litellm = await anyio.to_thread.run_sync(_load, abandon_on_cancel=True)

    async def generate(self, request: EngineRequest) -> EngineReply:
        """Ask the model once.

        The provider's fields (reasoning, thought signatures) stand in the reply's `extra` and go back with the message
        when the same provider is asked again. Arguments that are no JSON object stand there too: see
        `INVALID_ARGUMENTS_KEY`.

        Raises:
            EngineError: By kind. What litellm raised is the cause, and may quote the prompt; the message does not.
            ValueError: The request's settings hold one that the engine itself decides about.
        """
        model = self._model or request.agent.model
        arguments = self._arguments(request, model)
        await self.warm_up()
        try:
            # litellm's own timeout is one for each read: a server that drips would never reach it.
            with anyio.fail_after(self._timeout):
                response = await self._litellm.acompletion(**arguments)
        except Exception as error:
            raise self._as_ours(error, model) from error
        return from_litellm_response(response, model)

    def _arguments(self, request: EngineRequest, model: str) -> dict[str, Any]:
        arguments: dict[str, Any] = {
            **self._settings,
            **_checked_settings(request.settings),
            "model": litellm_name(model),
            "messages": to_litellm_messages(request.messages, model),
            "timeout": self._timeout,
            "max_retries": 0,  # of the provider's client
            "num_retries": 0,  # of litellm, before its global setting
        }
        tools = to_litellm_tools(request.tools)
        if not tools and provider_of(model) in {"anthropic", "bedrock", "vertex_ai"}:
            tools = tools_of_the_past(request.messages)
            if tools and provider_of(model) != "bedrock":
                arguments["tool_choice"] = "none"
        if tools:  # an empty list is refused
            arguments["tools"] = tools
        if request.output_schema is not None:
            schema = {"name": "answer", "schema": thaw(request.output_schema)}
            arguments["response_format"] = {"type": "json_schema", "json_schema": schema}
        given = {"api_key": self._api_key, "api_base": self._api_base}
        return arguments | {name: value for name, value in given.items() if value is not None}

    def _as_ours(self, error: Exception, model: str) -> EngineError:
        litellm = self._litellm
        headers: Mapping[str, str] = getattr(error, "litellm_response_headers", None) or {}
        # litellm gives a status also to errors that no server sent.
        status: int | None = getattr(error, "status_code", None) if headers else None
        kind: type[EngineError] = EngineUnavailableError
        what = "the provider can't be reached or failed; the cause has more"
        if status is None and (_SAYS_NO_KEY.search(str(error)) or self._has_no_key(model)):
            kind = EngineAuthenticationError
            names = " or ".join(_KEY_NAMES.get(provider_of(model), ("the provider's key",)))
            what = f"there is no API key; set {names} in the environment, or give api_key="
        elif isinstance(error, TimeoutError | litellm.Timeout):
            kind, what = EngineTimeoutError, f"no answer within {self._timeout:g} s"
        elif isinstance(error, litellm.ContextWindowExceededError):
            kind, what = ContextWindowError, "the conversation is longer than it can take; a lower max_turns sends less"
        elif isinstance(error, litellm.RateLimitError):
            kind, what = EngineRateLimitError, "the provider takes no more requests for now"
        elif isinstance(error, litellm.AuthenticationError) or status in {401, 403}:
            kind, what = EngineAuthenticationError, "the provider refuses the API key, or what is done with it"
        elif isinstance(error, litellm.BadRequestError) or (status is not None and 400 <= status < 500):
            kind, what = EngineBadRequestError, "the request is refused as it is; the cause has the provider's words"
        code = "" if status is None else f" (HTTP {status}{_code(error)})"
        text = f"model {shorten(model)}: {what}{code}"
        return kind(text, model=model, status=status, retry_after=_retry_after(headers))

    def _has_no_key(self, model: str) -> bool:
        """Whether a key is needed that litellm can't have; asked after a failure, to tell it from a network's."""
        provider = provider_of(model)
        names = _KEY_NAMES.get(provider)
        if names is None or self._api_key is not None or self._api_base is not None:
            return False
        places = ("api_key", f"{provider}_key", "secret_manager_client")
        return not any(map(os.environ.get, names)) and not any(getattr(self._litellm, place, None) for place in places)


def _load() -> Any:
    os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    litellm: Any = importlib.import_module("litellm")
    litellm.suppress_debug_info = True
    return litellm


def _checked_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    if not isinstance(settings, Mapping):
        raise TypeError(f"settings must be a mapping, not {type(settings).__name__}")
    for name in settings:
        if name in _OURS:
            raise ValueError(f"settings can't hold {name!r}: the engine itself decides about it")
    return dict(settings)


def _code(error: Exception) -> str:
    """The provider's word for what is wrong, where it is a mere word: a text could quote the prompt or the key."""
    body: object = getattr(error, "body", None)
    code = cast("dict[str, object]", body).get("code") if isinstance(body, dict) else None
    return f", {code}" if isinstance(code, str) and re.fullmatch(r"[a-z]+(_[a-z]+)+", code) else ""


def _retry_after(headers: Mapping[str, str]) -> float | None:
    try:
        seconds = float(headers["retry-after"])
    except (KeyError, ValueError):
        return None
    return seconds if 0 <= seconds < math.inf else None
