"""LiteLLMEngine: any provider's model, by way of litellm."""

from __future__ import annotations

import importlib
import json
import math
import os
import re
from collections.abc import Mapping
from typing import Any, Final, cast

import anyio
import anyio.to_thread

from chatflow.core.agent import Agent
from chatflow.core.engine import EngineReply, EngineRequest
from chatflow.core.values import thaw
from chatflow.engines.common_form import litellm_name, plain_code, provider_of
from chatflow.engines.litellm_form import (
    from_litellm_response,
    to_litellm_messages,
    to_litellm_tools,
    tools_of_the_past,
)
from chatflow.engines.responses_form import (
    is_conversation,
    to_input,
    to_instructions,
    to_responses_settings,
    to_responses_tools,
    to_text,
)
from chatflow.engines.responses_reply import from_responses_response
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

_SAYS_NOT_THERE: Final = re.compile(r"not found|does not exist", re.IGNORECASE)

_SAYS_NO_PAIR: Final = re.compile(
    r"no tool (output found for function call|call found for function call output)", re.IGNORECASE
)
"""What the service keeps has calls or results that the other side lacks, as a conversation has after a failed turn."""

_OURS: Final = frozenset(
    {
        "api_base",
        "api_key",
        "background",
        "conversation",
        "input",
        "instructions",
        "max_retries",
        "messages",
        "model",
        "n",
        "num_retries",
        "previous_response_id",
        "stream",
        "timeout",
        "tools",
        "use_chat_completions_api",
    }
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

    A request whose history the service keeps (one with `service_session_id` or `keep_at_service`, or all of them with
    *service_history*) goes to OpenAI's Responses API, or that of another provider for which litellm has it; any other
    one to chat completions. There ``resp_…`` ids, and all but the following, go as ``previous_response_id``, and
    ``conv_…`` ids of OpenAI's conversations as ``conversation``. A conversation keeps its id; each response has a new
    one, and what went before stays as it was, so that the id of an earlier one goes on from there. Instructions and
    tools are not part of what is kept and go with each request. A service may keep what it answered in a turn that
    failed here: a response that nobody goes on from does no harm, but a conversation then holds it for good.

    Args:
        model: The model to ask instead of each agent's.
        timeout: Seconds for a whole answer.
        api_key: The key; by default litellm finds it in the environment, by the provider.
        api_base: The address of a server of one's own; ``openai/<name>`` is the model's name for most.
        settings: Anything else that `litellm.acompletion` takes, such as ``{"temperature": 0}``, or where the service
            keeps the history, `litellm.aresponses`; ``max_tokens`` serves for both. The settings of a request come
            before these.
        service_history: Let the service keep the history of every conversation.

    Raises:
        TypeError: An argument is of a wrong type.
        ValueError: *timeout* is not above 0, or a setting is one that the engine itself decides about, or one that
            contradicts *service_history*.
    """

    def __init__(
        self,
        model: str | None = None,
        *,
        timeout: float = 60,
        api_key: str | None = None,
        api_base: str | None = None,
        settings: Mapping[str, Any] | None = None,
        service_history: bool = False,
    ) -> None:
        for name, value in (("model", model), ("api_key", api_key), ("api_base", api_base)):
            if value is not None and not isinstance(value, str):
                raise TypeError(f"{name} must be a string or None, not {type(value).__name__}")
        if isinstance(timeout, bool) or not isinstance(timeout, int | float):
            raise TypeError(f"timeout must be a number of seconds, not {type(timeout).__name__}")
        if not 0 < timeout < math.inf:
            raise ValueError(f"timeout must be above 0 and finite, not {timeout}")
        if not isinstance(service_history, bool):
            raise TypeError(f"service_history must be True or False, not {service_history!r}")
        self._model: Final = model
        self._timeout: Final = timeout
        self._api_key: Final = api_key
        self._api_base: Final = api_base
        self._settings: Final = _checked_settings(settings or {})
        if service_history:
            to_responses_settings(self._settings)
        self._service_history: Final = service_history
        self._litellm: Any = None

    def __repr__(self) -> str:
        return f"LiteLLMEngine(model={self._model!r}, timeout={self._timeout!r})"

    async def warm_up(self) -> None:
        """Load litellm now, in a thread, so that the first request need not wait for it; once is enough."""
        if self._litellm is None:
            self._litellm = await anyio.to_thread.run_sync(_load, abandon_on_cancel=True)

    def service_of(self, agent: Agent) -> str:
        """The provider of the agent's model, by litellm's name of it, such as ``"openai"``."""
        return provider_of(self._model or agent.model)

    async def generate(self, request: EngineRequest) -> EngineReply:
        """Ask the model once.

        The provider's fields (reasoning, thought signatures) stand in the reply's `extra` and go back with the message
        when the same provider is asked again. Arguments that are no JSON object stand there too: see
        `INVALID_ARGUMENTS_KEY`.

        Raises:
            ServiceSessionLostError: The service does not know the `service_session_id`, or keeps something under it
                that what is new does not fit: a call whose result never came, say.
            EngineError: By kind. What litellm raised is the cause, and may quote the prompt; the message does not. An
                id that is no text, or a provider without a Responses API where one is needed, is a bad request, and
                nothing is sent.
            ValueError: The request's settings hold one that the engine itself decides about, or one that the Responses
                API does not have.
        """
        model = self._model or request.agent.model
        session = _session_id(request, model)
        at_service = self._service_history or request.keep_at_service or session is not None
        arguments = (
            self._responses_arguments(request, model, session) if at_service else self._arguments(request, model)
        )
        await self.warm_up()
        try:
            # litellm's own timeout is one for each read: a server that drips would never reach it.
            with anyio.fail_after(self._timeout):
                if at_service:
                    self._require_responses(model)
                    response = await self._litellm.aresponses(**arguments)
                else:
                    response = await self._litellm.acompletion(**arguments)
        except EngineError:
            raise
        except Exception as error:
            raise self._as_ours(error, model, session) from error
        if at_service:
            return from_responses_response(response, model, session)
        return from_litellm_response(response, model)

    def _arguments(self, request: EngineRequest, model: str) -> dict[str, Any]:
        arguments: dict[str, Any] = {
            **self._settings,
            **_checked_settings(request.settings),
            "messages": to_litellm_messages(request.messages, model),
            **self._always(model),
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
        return arguments

    def _responses_arguments(self, request: EngineRequest, model: str, session: str | None) -> dict[str, Any]:
        arguments: dict[str, Any] = {
            **to_responses_settings({**self._settings, **_checked_settings(request.settings)}),
            "input": to_input(request.messages, model),
            "store": True,  # a service's default need not be OpenAI's
            **self._always(model),
        }
        instructions = to_instructions(request.messages)
        if instructions is not None:
            arguments["instructions"] = instructions
        tools = to_responses_tools(request.tools)
        if tools:
            arguments["tools"] = tools
        if request.output_schema is not None:
            arguments["text"] = to_text(arguments.get("text"), request.output_schema)
        if session is not None:
            # litellm has no argument for a conversation, and in its own for a response would take a proxy's id apart.
            name = "conversation" if is_conversation(session) else "previous_response_id"
            arguments["extra_body"] = {**(arguments.get("extra_body") or {}), name: session}
        return arguments

    def _always(self, model: str) -> dict[str, Any]:
        given = {"api_key": self._api_key, "api_base": self._api_base}
        return {
            "model": litellm_name(model),
            "timeout": self._timeout,
            "max_retries": 0,  # of the provider's client
            "num_retries": 0,  # of litellm, before its global setting
            **{name: value for name, value in given.items() if value is not None},
        }

    def _require_responses(self, model: str) -> None:
        """Refuse a provider without a Responses API: litellm would ask for a chat completion, which keeps nothing."""
        litellm = self._litellm
        name, provider, _, _ = litellm.get_llm_provider(litellm_name(model), api_base=self._api_base)
        found = litellm.ProviderConfigManager.get_provider_responses_api_config(provider=provider, model=name)
        if found is None or "previous_response_id" not in found.get_supported_openai_params(name):
            raise EngineBadRequestError(
                f"model {shorten(model)}: litellm knows no service of {shorten(provider)} that keeps a conversation's"
                " history; leave service_history and keep_at_service out for it",
                model=model,
            )

    def _as_ours(self, error: Exception, model: str, session: str | None) -> EngineError:
        litellm = self._litellm
        headers: Mapping[str, str] = getattr(error, "litellm_response_headers", None) or {}
        # litellm gives a status also to errors that no server sent, and one kind of error to several statuses.
        status: int | None = getattr(error, "status_code", None) if headers else None
        said = _said(error)
        kind: type[EngineError] = EngineUnavailableError
        what = "the provider can't be reached or failed; the cause has more"
        if status is None and (_SAYS_NO_KEY.search(str(error)) or self._has_no_key(model)):
            kind = EngineAuthenticationError
            names = " or ".join(_KEY_NAMES.get(provider_of(model), ("the provider's key",)))
            what = f"there is no API key; set {names} in the environment, or give api_key="
        elif isinstance(error, TimeoutError | litellm.Timeout) or status == 408:
            kind, what = EngineTimeoutError, f"no answer within {self._timeout:g} s"
        elif isinstance(error, litellm.ContextWindowExceededError):
            kind, what = ContextWindowError, "the conversation is longer than it can take; a lower max_turns sends less"
        elif isinstance(error, litellm.RateLimitError) or status == 429:
            kind, what = EngineRateLimitError, "the provider takes no more requests for now"
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
        elif (isinstance(error, litellm.BadRequestError) and (status is None or status < 500)) or (
            status is not None and 400 <= status < 500
        ):
            kind, what = EngineBadRequestError, "the request is refused as it is; the cause has the provider's words"
        word = plain_code(said.get("code"))
        code = "" if status is None else f" (HTTP {status}{f', {word}' if word else ''})"
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


def _session_id(request: EngineRequest, model: str) -> str | None:
    session = request.service_session_id
    if session is None or isinstance(session, str):
        return session
    keys = ", ".join(shorten(key) for key in session)
    raise EngineBadRequestError(
        f"model {shorten(model)}: LiteLLMEngine can't go on from a service's session that is a mapping (with the keys"
        f" {keys}): the Responses API knows a conversation by one id, a text",
        model=model,
    )


def _said(error: Exception) -> Mapping[str, Any]:
    """What the provider says is wrong, in OpenAI's form; empty where it says nothing in that form."""
    found: object = getattr(error, "body", None)
    if not isinstance(found, dict):
        _, brace, rest = str(error).partition("{")
        try:
            found, _ = json.JSONDecoder().raw_decode(brace + rest)
        except (ValueError, RecursionError):
            return {}
    body = cast("dict[str, Any]", found)
    inner: object = body.get("error")
    return cast("dict[str, Any]", inner) if isinstance(inner, dict) else body


def _is_lost(said: Mapping[str, Any], session: str) -> bool:
    """Whether the service means *session*, and no other thing that it does not find, such as the model."""
    if said.get("code") == "previous_response_not_found":
        return True
    message = str(said.get("message"))
    return bool((session in message and _SAYS_NOT_THERE.search(message)) or _SAYS_NO_PAIR.search(message))


def _retry_after(headers: Mapping[str, str]) -> float | None:
    try:
        seconds = float(headers["retry-after"])
    except (KeyError, ValueError):
        return None
    return seconds if 0 <= seconds < math.inf else None
