"""The languages that litellm is made to speak here: for each a server, a model, and how its words are scripted."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, Final

import attrs

from chatflow.engines import LiteLLMEngine
from tests import anthropic_server as claude
from tests import gemini_server as google
from tests import model_server as openai
from tests import responses_server as service
from tests.model_server import ModelServer, Status, tool_calls

KEY: Final = "sk-canary-7f3a9e21"
QUESTION: Final = "canary-question-55d1"
ECHO: Final = f"{QUESTION} was asked with {KEY}"
"""What a provider says of a failed request at its worst."""

Call = tuple[str, str, Mapping[str, Any]]
"""A call to be scripted: its id, its name, its arguments."""


@attrs.frozen
class Protocol:
    """A language, and one of the models that are asked in it."""

    name: str
    model: str
    serve: Callable[[], AbstractAsyncContextManager[ModelServer]]
    said: Callable[[str | None, str | None, Iterable[Call]], Any]
    error: Callable[..., Status]
    failing: Mapping[str, Any]
    """What a stream says in its midst where the provider fails."""
    begun: int = 4
    """How many events it takes until some text has been told."""
    settings: Mapping[str, Any] = attrs.field(factory=dict)
    service_history: bool = False

    def engine(self, server: ModelServer, **arguments: Any) -> LiteLLMEngine:
        """An engine that asks the server, once unless told otherwise."""
        known = {"attempts": 1, "api_key": KEY, "settings": self.settings, "service_history": self.service_history}
        return LiteLLMEngine(self.model, api_base=server.url, **{**known, **arguments})


@asynccontextmanager
async def asked(protocol: Protocol) -> AsyncIterator[ModelServer]:
    """The protocol's server; litellm, whose clients outlive each call, closes them before it stops."""
    async with protocol.serve() as server:
        engine = LiteLLMEngine()
        await engine.warm_up()
        yield server
        await engine._litellm.close_litellm_async_clients()


def _in_completions(text: str | None, thought: str | None, calls: Iterable[Call]) -> Any:
    thoughts = {} if thought is None else {"reasoning_content": thought}
    made = [(id_, name, json.dumps(arguments)) for id_, name, arguments in calls]
    if made:
        return tool_calls(*made, **thoughts, content=text)
    return {"role": "assistant", "content": text, **thoughts}


def _in_responses(text: str | None, thought: str | None, calls: Iterable[Call]) -> Any:
    thoughts = [] if thought is None else [service.reasoning(encrypted_content=f"({thought})")]
    texts = [] if text is None else [service.message(text)]
    return {"output": [*thoughts, *texts, *(service.made_call(i, n, json.dumps(a)) for i, n, a in calls)]}


def _in_messages(text: str | None, thought: str | None, calls: Iterable[Call]) -> Any:
    thoughts = [] if thought is None else [claude.thinking(thought)]
    texts = [] if text is None else [claude.text(text)]
    return [*thoughts, *texts, *(claude.tool_use(*call) for call in calls)]


def _in_contents(text: str | None, thought: str | None, calls: Iterable[Call], *, ids: bool = True) -> Any:
    thoughts = [] if thought is None else [google.thought(thought)]
    texts = [] if text is None else [google.text(text)]
    return [*thoughts, *texts, *(google.function_call(name, args, id_ if ids else None) for id_, name, args in calls)]


_FAILS: Final = {"message": ECHO, "code": "server_error", "param": None}
_OVERLOADED: Final = {"type": "error", "error": {"type": "overloaded_error", "message": ECHO}}

COMPLETIONS: Final = Protocol(
    "completions",
    "openai/think",
    openai.model_server,
    _in_completions,
    openai.error,
    {"error": {**_FAILS, "type": "server_error"}},
)
RESPONSES: Final = Protocol(
    "responses",
    "openai/gpt-5",
    service.responses_server,
    _in_responses,
    openai.error,
    {"type": "error", "sequence_number": 9, **_FAILS},
    begun=5,
    service_history=True,
)
CLAUDE: Final = Protocol(
    "claude",
    "anthropic/claude-sonnet-4-5",
    claude.anthropic_server,
    _in_messages,
    claude.error,
    _OVERLOADED,
    settings={"thinking": {"type": "enabled", "budget_tokens": 1024}},
)
BINDING: Final = attrs.evolve(
    CLAUDE, name="claude-5", model="anthropic/claude-fable-5-2", settings={"thinking": {"type": "adaptive"}}
)
GEMINI: Final = Protocol(
    "gemini",
    "gemini/gemini-3-pro-preview",
    google.gemini_server,
    _in_contents,
    google.error,
    {"error": {"code": 503, "message": ECHO, "status": "UNAVAILABLE"}},
    begun=2,
)
GEMINI_2: Final = attrs.evolve(
    GEMINI,
    name="gemini-2",
    model="gemini/gemini-2.5-flash",
    said=lambda text, thought, calls: _in_contents(text, thought, calls, ids=False),
)

ALL: Final = (COMPLETIONS, RESPONSES, CLAUDE, BINDING, GEMINI, GEMINI_2)
