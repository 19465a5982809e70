"""LiteLLMEngine: any provider's model, by way of litellm.

The one module that names litellm, with all that is said to it, which is why it is long.
"""

from __future__ import annotations

import importlib
import math
import os
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Iterable, Mapping
from contextlib import aclosing, contextmanager
from typing import Any, Final, TypeVar, cast

import anyio
import anyio.to_thread
import attrs
from anyio.lowlevel import checkpoint_if_cancelled

from chatflow.core.agent import Agent
from chatflow.core.engine import EngineReply, EngineRequest, ReplyPart
from chatflow.core.events import ReasoningDelta, TextDelta
from chatflow.core.messages import MODEL_KEY
from chatflow.core.values import FrozenDict
from chatflow.engines.arguments import Asked, checked_settings, completion_arguments, responses_arguments
from chatflow.engines.common_form import litellm_name, provider_of
from chatflow.engines.counting import count
from chatflow.engines.failures import failure_of, lacks_key
from chatflow.engines.litellm_form import from_litellm_response
from chatflow.engines.litellm_stream import CompletionPieces, ResponsePieces
from chatflow.engines.responses_form import is_conversation, to_responses_settings
from chatflow.engines.responses_reply import from_responses_response
from chatflow.engines.schema_form import may_take_schema
from chatflow.engines.thoughts import thought_after
from chatflow.engines.trying import Trying
from chatflow.exceptions import EngineBadRequestError, EngineError, EngineUnavailableError, shorten

_T = TypeVar("_T")

_CLOSING: Final = 5.0
"""Seconds that hanging up on a provider may take."""


class LiteLLMEngine:
    """Asks the agent's model, or *model* for all agents, through litellm; the provider follows from the model's name.

    A bare name means the provider that people mean: ``gemini-…`` Google's Gemini API (not Vertex AI), ``claude-…``
    Anthropic, ``gpt-…``, ``chatgpt-…`` and ``o3`` and the like OpenAI, ``grok-…`` xAI, ``mistral-…``, ``deepseek-…``,
    ``command-…`` Cohere. Any other name is litellm's, such as ``openrouter/meta-llama/llama-3.3-70b-instruct``.

    litellm takes seconds to load, so that it is loaded on first use, in a thread; `warm_up` does it beforehand. Loading
    sets ``LITELLM_LOCAL_MODEL_COST_MAP`` and ``LITELLM_LOCAL_ANTHROPIC_BETA_HEADERS`` in the environment to True unless
    they are set, or litellm would fetch tables from the network, and ``litellm.suppress_debug_info``, or it would
    print. litellm itself reads a ``.env`` file.

    Where a provider takes no more requests for now, does not answer in time or can't be reached, the model is asked
    again, *attempts* times in all: after a second, two, four and so on up to eight and up to a second more, or as long
    as the provider asks to wait (``retry-after``). One that asks for more than 30 s is not asked again. Then the next
    of *models* is, in the same way. Nothing is asked again once a piece of the answer was told, nor after any other
    failure; litellm's and its clients' own retries are off. Each time asked again is logged.

    A request whose history the service keeps (one with `service_session_id` or `keep_at_service`, or all of them with
    *service_history*) goes to OpenAI's Responses API, or that of another provider for which litellm has it; any other
    one to chat completions. There ``resp_…`` ids, and all but the following, go as ``previous_response_id``, and
    ``conv_…`` ids of OpenAI's conversations as ``conversation``. A conversation keeps its id; each response has a new
    one, and what went before stays as it was, so that the id of an earlier one goes on from there. Instructions and
    tools are not part of what is kept and go with each request. A service may keep what it answered in a turn that
    failed here: a response that nobody goes on from does no harm, but a conversation then holds it for good. So a
    ``conv_…`` conversation is asked again only if the service has refused the request: after a timeout or a cut line
    it may hold what it was sent. Other models are asked for a history that a service keeps if they are the same
    provider's.

    A reply's ``extra["chatflow_model"]`` is the model that has answered.

    Args:
        model: The model to ask instead of each agent's.
        models: The same, with others to ask where the one before can't answer, in this order.
        attempts: How often each of them is asked at most.
        timeout: Seconds for one attempt: a whole answer, also where it comes in pieces.
        api_key: The key; by default litellm finds it in the environment, by the provider.
        api_base: The address of a server of one's own; ``openai/<name>`` is the model's name for most.
        settings: Anything else that `litellm.acompletion` takes, such as ``{"temperature": 0}``, or where the service
            keeps the history, `litellm.aresponses`; ``max_tokens`` serves for both. An agent's settings come before
            these. ``tool_choice`` and ``parallel_tool_calls`` are left out of a request without tools, a
            ``tool_choice`` that forces a call once the agent has results of its calls in the turn, and
            ``stream_options`` of one that is not streamed.
        service_history: Let the service keep the history of every conversation.

    Raises:
        TypeError: An argument is of a wrong type.
        ValueError: *timeout* is not above 0, or *attempts* below 1; both *model* and *models* are given, or *models*
            of several providers with one *api_key* and no *api_base*; or a setting is one that the engine itself
            decides about, or one that contradicts *service_history*.
    """

    def __init__(
        self,
        model: str | None = None,
        *,
        models: Iterable[str] = (),
        attempts: int = 3,
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
        if isinstance(attempts, bool) or not isinstance(attempts, int):
            raise TypeError(f"attempts must be an integer, not {type(attempts).__name__}")
        if attempts < 1:
            raise ValueError(f"attempts must be at least 1, not {attempts}")
        self._models: Final = _checked_models(model, models)
        if api_key is not None and api_base is None and len({provider_of(each) for each in self._models}) > 1:
            raise ValueError("api_key is one provider's, and models are of several; leave it to the environment")
        self._trying = Trying(attempts)
        self._attempts: Final = attempts
        self._timeout: Final = timeout
        self._api_key: Final = api_key
        self._api_base: Final = api_base
        self._settings: Final = checked_settings(settings or {})
        if service_history:
            to_responses_settings(self._settings)
        self._service_history: Final = service_history
        self._litellm: Any = None

    def __repr__(self) -> str:
        return f"LiteLLMEngine(models={list(self._models)!r}, timeout={self._timeout!r}, attempts={self._attempts!r})"

    async def warm_up(self) -> None:
        """Load litellm now, in a thread, so that the first request need not wait for it; once is enough."""
        if self._litellm is None:
            self._litellm = await anyio.to_thread.run_sync(_load, abandon_on_cancel=True)

    def service_of(self, agent: Agent) -> str:
        """The provider of the agent's model, by litellm's name of it, such as ``"openai"``."""
        return provider_of(self._models_for(agent)[0])

    async def generate(self, request: EngineRequest) -> EngineReply:
        """Ask the model, and again or another one where it may help.

        The provider's fields (reasoning, thought signatures) stand in the reply's `extra` and go back with the message
        when the same provider is asked again. Arguments that are no JSON object stand there too: see
        `INVALID_ARGUMENTS_KEY`.

        Raises:
            ServiceSessionLostError: The service does not know the `service_session_id`, or keeps something under it
                that what is new does not fit: a call whose result never came, say.
            EngineError: By kind. What litellm raised, which may quote the prompt and the key, is at its `__context__`,
                and is not printed with it. An id that is no text, or a provider without a Responses API where one is
                needed, is a bad request, and nothing is sent.
            ValueError: The request's settings hold one that the engine itself decides about, or one that the Responses
                API does not have.
        """
        return await self._first_answer(request, self._generate)

    async def stream(self, request: EngineRequest) -> AsyncGenerator[ReplyPart]:
        """Ask as `generate` does, and give the answer in pieces as they come, and at the end the whole.

        A stream that is cut, or whose pieces don't come to what it ends with, is an error and never a reply. Once the
        first piece has come nothing is asked again. Closing the generator hangs up on the provider.

        Raises:
            Exception: As `generate` does.
        """
        first, pieces = await self._first_answer(request, self._open)
        async with aclosing(pieces):
            yield first
            async for piece in pieces:
                yield piece

    async def count_tokens(self, request: EngineRequest) -> int:
        """How many tokens the request's messages and tools have for the model that is asked first; nothing is sent.

        Counted in a thread by the tokenizers that come with litellm: Anthropic's and DeepSeek's for their own models,
        and OpenAI's for all others. So it is exact for none, and close for most: leave some room. Of sound it takes 100
        bytes for a token.

        Raises:
            ValueError: As `generate` does.
            EngineBadRequestError: litellm can't count what is in it.
        """
        await self.warm_up()
        model = self._models_for(request.agent)[0]
        asked = Asked(request, model, at_service=False, session=None)
        return await anyio.to_thread.run_sync(self._count, asked, abandon_on_cancel=True)

    def _count(self, asked: Asked) -> int:
        arguments = completion_arguments(asked, self._settings, stream=False)
        try:
            return count(self._litellm.token_counter, asked.model, arguments)
        except Exception as error:
            raise EngineBadRequestError(
                f"model {shorten(asked.model)}: the tokens of a request can't be counted; the cause has more",
                model=asked.model,
            ) from error

    async def _first_answer(self, request: EngineRequest, ask: Callable[[Asked], Awaitable[_T]]) -> _T:
        models = self._models_for(request.agent)
        session = _session_id(request, models[0])
        at_service = self._service_history or request.keep_at_service or session is not None
        if at_service:  # no other provider has what this one keeps
            models = tuple(each for each in models if provider_of(each) == provider_of(models[0]))
        await self.warm_up()
        return await self._trying.first_answer(
            models,
            lambda model: ask(Asked(request, model, at_service, session, self._takes_schema(request, model))),
            only_if_refused=session is not None and is_conversation(session),
        )

    async def _generate(self, asked: Asked) -> EngineReply:
        arguments = self._arguments_for(asked)
        try:
            # litellm's own timeout is one for each read: a server that drips would never reach it.
            with anyio.fail_after(self._timeout):
                response = await self._call(asked, arguments)
        except EngineError:
            raise
        except Exception as error:
            raise self._failure(error, asked) from None
        with _readable(asked.model):
            if asked.at_service:
                reply = from_responses_response(response, asked.model, asked.session)
            else:
                reply = from_litellm_response(response, asked.model)
            return _signed(reply, asked, arguments)

    async def _open(self, asked: Asked) -> tuple[ReplyPart, AsyncGenerator[ReplyPart]]:
        """The first piece, or the whole reply where there are none, and what gives the others."""
        pieces = self._pieces(asked)
        return await anext(pieces), pieces

    async def _pieces(self, asked: Asked) -> AsyncGenerator[ReplyPart]:
        arguments = self._arguments_for(asked, stream=True)
        deadline = anyio.current_time() + self._timeout
        try:
            with anyio.fail_after(self._timeout):
                stream = await self._call(asked, arguments)
        except EngineError:
            raise
        except Exception as error:
            raise self._failure(error, asked) from None
        coming = (
            ResponsePieces(stream, asked.model, asked.session)
            if asked.at_service
            else CompletionPieces(stream, self._litellm, asked.model)
        )
        # Where a stream breaks litellm would count, on the event loop, what has come: its tokenizer takes a second and
        # 100 MB to load, and what has come is thrown away.
        stream._record_partial_usage_for_failure = _nothing  # noqa: SLF001
        told: list[str] = []
        try:
            while (pieces := await self._next(stream, coming, deadline, asked)) is not None:
                for piece in pieces:
                    if isinstance(piece, TextDelta):
                        told.append(piece.text)
                    yield piece
            with _readable(asked.model):
                reply = _signed(await coming.reply(), asked, arguments)
        finally:
            with anyio.move_on_after(_CLOSING, shield=True):
                await (getattr(stream, "aclose", None) or stream.response.aclose)()
        rest = _untold(reply, "".join(told), asked.model)
        if rest:
            yield TextDelta(rest)
        yield reply

    async def _next(
        self, stream: Any, coming: CompletionPieces | ResponsePieces, deadline: float, asked: Asked
    ) -> list[TextDelta | ReasoningDelta] | None:
        """What stands in the next event of *stream*, None after the last one."""
        try:
            with anyio.fail_after(deadline - anyio.current_time()):
                await checkpoint_if_cancelled()  # what has arrived already comes without a wait that could end
                event = await anext(stream, None)
            return None if event is None else list(coming.of(event))
        except Exception as error:
            raise coming.failure() or self._failure(error, asked, begun=True) from None

    async def _call(self, asked: Asked, arguments: dict[str, Any]) -> Any:
        if asked.at_service:
            self._require_responses(asked.model)
            return await self._litellm.aresponses(**arguments)
        return await self._litellm.acompletion(**arguments)

    def _arguments_for(self, asked: Asked, *, stream: bool = False) -> dict[str, Any]:
        form = responses_arguments if asked.at_service else completion_arguments
        return {**form(asked, self._settings, stream=stream), **self._always(asked.model)}

    def _takes_schema(self, request: EngineRequest, model: str) -> bool:
        if request.output_schema is None or not may_take_schema(model):
            return False
        return bool(self._litellm.supports_response_schema(litellm_name(model)))

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

    def _failure(self, error: Exception, asked: Asked, *, begun: bool = False) -> EngineError:
        """What *error* means; once an answer has *begun* there was a key."""
        litellm, model = self._litellm, asked.model
        keyless = not begun and self._api_key is None and self._api_base is None and lacks_key(litellm, model)
        return failure_of(
            error,
            litellm,
            model=model,
            timeout=self._timeout,
            session=asked.session,
            lacks_key=keyless,
            api_base=self._api_base,
            settings={**self._settings, **asked.request.settings},
        )

    def _models_for(self, agent: Agent) -> tuple[str, ...]:
        return self._models or (agent.model,)


@contextmanager
def _readable(model: str) -> Generator[None]:
    """An answer in a form that no provider gives is an error like one that is no JSON, whatever reading it raises."""
    try:
        yield
    except EngineError:
        raise
    except Exception:
        raise EngineUnavailableError(f"model {shorten(model)}: the answer can't be read", model=model) from None


def _load() -> Any:
    # Without these it would look for newer ones of the tables that it comes with, on the network.
    os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    os.environ.setdefault("LITELLM_LOCAL_ANTHROPIC_BETA_HEADERS", "True")
    litellm: Any = importlib.import_module("litellm")
    litellm.suppress_debug_info = True
    return litellm


def _nothing() -> None:
    pass


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


def _signed(reply: EngineReply, asked: Asked, arguments: Mapping[str, Any]) -> EngineReply:
    """The reply with the name of the model that has answered, and what its thoughts were thought after."""
    after = {} if asked.at_service else thought_after(reply.extra, arguments, asked.model)
    return attrs.evolve(reply, extra=FrozenDict({**reply.extra, **after, MODEL_KEY: asked.model}))


def _untold(reply: EngineReply, told: str, model: str) -> str:
    """What of the reply's text no piece has told, such as a refusal."""
    text = reply.text or ""
    if not text.startswith(told):
        raise EngineUnavailableError(
            f"model {shorten(model)}: the pieces of the answer are not the text that it ends with", model=model
        )
    return text[len(told) :]


def _checked_models(model: object, models: Any) -> tuple[str, ...]:
    if isinstance(models, str) or not isinstance(models, Iterable):
        raise TypeError(f"models must be a list of names, not {type(models).__name__}")
    several: tuple[object, ...] = tuple(cast("Iterable[object]", models))
    if model is not None and several:
        raise ValueError("give either model or models; the first of models is asked first")
    for each in several:
        if not isinstance(each, str):
            raise TypeError(f"models are names, not {type(each).__name__}")
    return cast("tuple[str, ...]", several if model is None else (model,))
