"""A reply that litellm streams, in pieces and then as a whole: what stands in each of its events."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import AsyncIterator, Iterator
from typing import Any, Final

import anyio.to_thread

from chatflow.core.engine import EngineReply
from chatflow.core.events import ReasoningDelta, TextDelta
from chatflow.engines.common_form import litellm_name
from chatflow.engines.litellm_form import from_litellm_response
from chatflow.engines.responses_form import BETWEEN
from chatflow.engines.responses_reply import failure_in, from_responses_response
from chatflow.exceptions import EngineError, EngineUnavailableError, shorten

_TEXT: Final = frozenset({"response.output_text.delta", "response.refusal.delta"})

_REASONING: Final = frozenset({"response.reasoning_summary_text.delta", "response.reasoning_text.delta"})

_ENDS: Final = frozenset({"response.completed", "response.incomplete", "response.failed"})

_SAID_TO_END: Final = ("received_finish_reason", "intermittent_finish_reason", "received_any_finish_reason")
"""Where litellm notes that a provider has said why its stream ends: which place it is depends on the provider."""

_GOOGLES: Final = re.compile(r"gemini/|vertex_ai/gemini-")


class CompletionPieces:
    """The pieces of a chat completion that litellm streams, and the reply that they come to."""

    def __init__(self, stream: Any, litellm: Any, model: str) -> None:
        self._stream: Final = stream
        self._litellm: Final = litellm
        self._model: Final = model
        self._watched: _Watched | None = None
        if hasattr(stream.completion_stream, "__aiter__") and inspect.iscoroutinefunction(
            getattr(stream.completion_stream, "close", None)
        ):  # it is the stream of OpenAI's client, as it is of all providers that speak its language
            stream.completion_stream = self._watched = _Watched(stream.completion_stream)
        self._google: Final = _Google(stream) if _GOOGLES.match(litellm_name(model)) else None

    def of(self, chunk: Any) -> Iterator[TextDelta | ReasoningDelta]:
        """What stands in a chunk."""
        for choice in chunk.choices[:1]:
            reasoning, text = getattr(choice.delta, "reasoning_content", None), choice.delta.content
            if reasoning:
                yield ReasoningDelta(reasoning)
            if text:
                yield TextDelta(text)

    def failure(self) -> EngineError | None:
        """What the answer itself says has failed: nothing, in this form."""
        return None

    async def reply(self) -> EngineReply:
        """The reply, once there are no more chunks.

        Raises:
            EngineUnavailableError: The stream ended before the provider had said that it ends.
        """
        # litellm writes an end of its own where a provider's stream has none.
        ended = any(getattr(self._stream, name, None) for name in _SAID_TO_END)
        if not (ended if self._google is None else self._google.ended):
            raise EngineUnavailableError(
                f"model {shorten(self._model)}: the answer was cut off in mid-stream", model=self._model
            )
        chunks: list[Any] = self._stream.chunks
        build = functools.partial(
            self._litellm.stream_chunk_builder, chunks, logging_obj=getattr(self._stream, "logging_obj", None)
        )
        # Where the provider counts no tokens litellm does, which takes its time and a file; we keep no guesses.
        built = await anyio.to_thread.run_sync(build)
        data: dict[str, Any] = built.model_dump(warnings=False)
        if not any(getattr(chunk, "usage", None) for chunk in chunks):
            data["usage"] = None
        message: dict[str, Any] = data["choices"][0]["message"]
        message["refusal"] = None if self._watched is None else self._watched.refusal or None
        if message.get("tool_calls") or message["refusal"]:
            message["content"] = message.get("content") or None  # as it is in an answer that comes whole
        return from_litellm_response(data, self._model)


class ResponsePieces:
    """The pieces of a response that litellm streams, and the reply that they come to."""

    def __init__(self, stream: Any, model: str, session: str | None) -> None:
        self._stream: Final = stream
        self._model: Final = model
        self._session: Final = session
        self._whole: Any = None
        self._last: Final[dict[type, tuple[Any, Any]]] = {}

    def of(self, event: Any) -> Iterator[TextDelta | ReasoningDelta]:
        """What stands in an event."""
        kind: str = event.type
        delta: object = getattr(event, "delta", None)
        if kind in _ENDS:
            self._whole = event.response
        elif isinstance(delta, str) and delta and (kind in _TEXT or kind in _REASONING):
            made = TextDelta if kind in _TEXT else ReasoningDelta
            place = (getattr(event, "output_index", None), getattr(event, "summary_index", None))
            between = BETWEEN if self._last.setdefault(made, place) != place else ""
            self._last[made] = place
            yield made(between + delta)

    async def reply(self) -> EngineReply:
        """The reply, once there are no more events.

        Raises:
            EngineError: The response failed, by kind, or there is none.
        """
        return from_responses_response(self._whole or {}, self._model, self._session)

    def failure(self) -> EngineError | None:
        """What the response itself says has failed, if it does; litellm's error says less."""
        ended = getattr(self._stream, "completed_response", None)
        if ended is None or ended.type != "response.failed":
            return None
        return failure_in(ended.response, self._model)


class _Watched:
    """A provider's stream as it is, and what litellm passes over in it: words of refusal, and chunks that are none."""

    def __init__(self, chunks: Any) -> None:
        self._chunks: Final = chunks
        self._iterator: Final[AsyncIterator[Any]] = aiter(chunks)
        self.refusal = ""

    def __aiter__(self) -> AsyncIterator[Any]:
        return self

    async def __anext__(self) -> Any:
        chunk = await anext(self._iterator)
        if chunk is None:
            raise ValueError("a chunk of the stream is null")
        for choice in (getattr(chunk, "choices", None) or ())[:1]:
            self.refusal += getattr(choice.delta, "refusal", None) or ""
        return chunk

    async def aclose(self) -> None:
        await self._chunks.close()


class _Google:
    """Whether Google has said why its stream ends: litellm says that each of its chunks is the last."""

    def __init__(self, stream: Any) -> None:
        self.ended = False
        self._make_call: Final = stream.make_call
        stream.make_call = self._call

    async def _call(self, **arguments: Any) -> Any:
        chunks = await self._make_call(**arguments)
        parse = chunks.chunk_parser

        def watched(chunk: dict[str, Any]) -> Any:
            candidates: list[dict[str, Any]] = chunk.get("candidates") or []
            blocked: dict[str, Any] = chunk.get("promptFeedback") or {}
            if any(each.get("finishReason") for each in candidates) or blocked.get("blockReason"):
                self.ended = True
            return parse(chunk=chunk)

        chunks.chunk_parser = watched
        return chunks
