"""The body that litellm would send each provider of our messages, as its own code makes it, offline."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from chatflow.core.agent import Agent
from chatflow.core.engine import EngineRequest
from chatflow.core.messages import Message
from chatflow.engines.arguments import Asked, completion_arguments

os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")

Body = dict[str, Any]


def body_for(model: str, messages: Sequence[Message]) -> Body:
    """The body of the request that goes to the provider of *model*, as it is read back from its JSON."""
    request = EngineRequest(agent=Agent("Support", model=model), messages=messages)
    arguments = completion_arguments(Asked(request, model, at_service=False, session=None), {}, stream=False)
    sent, tools = arguments["messages"], arguments.get("tools", [])
    # httpx writes bodies like this, and refuses what JSON or UTF-8 lack
    written = json.dumps(_converter(model)(sent, tools), allow_nan=False, ensure_ascii=False).encode()
    body: Body = json.loads(written)
    return body


@cache
def _converter(model: str) -> Callable[[list[Any], list[Any]], Any]:
    import litellm
    from litellm.llms.vertex_ai.gemini.transformation import transform_request_body
    from litellm.types.utils import LlmProviders

    name, provider, _, _ = litellm.get_llm_provider(model)
    if provider == "gemini":
        return lambda sent, tools: transform_request_body(sent, name, {}, "gemini", {}, None)
    config: Any = litellm.ProviderConfigManager.get_provider_chat_config(name, LlmProviders(provider))

    def convert(sent: list[Any], tools: list[Any]) -> Any:
        options: dict[str, Any] = config.map_openai_params({"tools": tools}, {}, name, False) if tools else {}
        return config.transform_request(name, sent, options, {}, {})

    return convert
