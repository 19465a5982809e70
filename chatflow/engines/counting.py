"""How many tokens a request has, by litellm's tokenizers, and never by way of the network. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, cast

from chatflow.engines.common_form import as_json, litellm_name, provider_of

_TOKENIZERS_ABOARD: Final = frozenset({"anthropic", "deepseek"})
"""Providers whose tokenizers come with litellm, besides OpenAI's."""

_GENERAL: Final = {"type": "openai_tokenizer", "tokenizer": None}
"""Makes litellm count by OpenAI's tokenizers: for some other models it would download one, and try for 23 seconds."""

_BYTES_OF_SOUND: Final = 100
"""For one token: 32 tokens a second, as Gemini counts, of a voice message with 24 kbit/s. litellm counts no sound."""


def count(token_counter: Callable[..., int], model: str, arguments: Mapping[str, Any]) -> int:
    """The tokens of what `litellm.acompletion` is called with, as *token_counter*, litellm's, counts them."""
    provider, name = provider_of(model), litellm_name(model)
    if provider == "anthropic":
        name = name.removeprefix("anthropic/")  # with it litellm does not see that it has a tokenizer
    messages: list[dict[str, Any]] = arguments["messages"]
    schema = arguments.get("response_format")
    schemas = [] if schema is None else [{"role": "system", "content": as_json(schema)}]
    tokens = token_counter(
        model=name,
        custom_tokenizer=None if provider in _TOKENIZERS_ABOARD else _GENERAL,
        messages=[*schemas, *(message | {"content": _countable(message["content"])} for message in messages)],
        tools=arguments.get("tools"),
    )
    return tokens + sum(len(data) * 3 // 4 // _BYTES_OF_SOUND for data in _sounds(messages))


def _parts(content: Any) -> list[dict[str, Any]]:
    return cast("list[dict[str, Any]]", content) if isinstance(content, list) else []


def _countable(content: Any) -> Any:
    parts = _parts(content)
    return [part for part in parts if "input_audio" not in part] if parts else content


def _sounds(messages: Iterable[Mapping[str, Any]]) -> Iterable[str]:
    for message in messages:
        yield from (part["input_audio"]["data"] for part in _parts(message["content"]) if "input_audio" in part)
