from __future__ import annotations

import json
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import aclosing
from typing import Any, Final, TypeAlias

import anyio
import attrs
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from chatflow import Runner, exceptions
from chatflow.core.agent import Agent
from chatflow.core.engine import EngineReply, EngineRequest, ReplyPart
from chatflow.core.events import Done, ReasoningDelta, TextDelta
from chatflow.core.messages import MODEL_KEY, Message, Role
from chatflow.engines import LiteLLMEngine
from chatflow.engines.arguments import Asked
from chatflow.engines.litellm_stream import ResponsePieces
from tests.engines.failing import KEY, QUESTION
from tests.model_server import (
    DISCONNECT,
    DRIP,
    END,
    HANG,
    Events,
    ModelServer,
    Partly,
    Status,
    error,
    serving,
    tool_calls,
)
from tests.responses_server import ResponsesServer, calls, message, reasoning

TEXT: Final = "It is on its way."
CALLS: Final = (("c1", "look_up", '{"order_id": "404"}'), ("c2", "look_up", '{"order_id": '), ("c3", "look_up", ""))

MakeEngine: TypeAlias = Callable[..., LiteLLMEngine]


@pytest.fixture
def make(server: ResponsesServer) -> MakeEngine:
    """Makes an engine that asks the server once for each request."""

    def made(service_history: bool = False, model: str = "openai/gpt-4o", **arguments: Any) -> LiteLLMEngine:
        known = {"attempts": 1, "api_key": KEY, "api_base": server.url, **arguments}
        return LiteLLMEngine(model, service_history=service_history, **known)

    return made


@pytest.fixture(params=[False, True], ids=["completions", "responses"])
def engine(request: pytest.FixtureRequest, make: MakeEngine) -> LiteLLMEngine:
    """An engine that asks for chat completions, and one that asks the Responses API."""
    return make(request.param)


def question(**fields: Any) -> EngineRequest:
    """A request of one question."""
    return EngineRequest(agent=Agent("Support"), messages=[Message(Role.USER, QUESTION)], **fields)


async def follow(engine: LiteLLMEngine, tell: Callable[[ReplyPart], None]) -> None:
    """Tells what the engine streams as it comes."""
    async for part in engine.stream(question()):
        tell(part)


async def streamed(engine: LiteLLMEngine, asked: EngineRequest | None = None) -> list[ReplyPart]:
    """All that the engine streams."""
    return [part async for part in engine.stream(asked or question())]


def text_of(parts: list[ReplyPart]) -> str:
    """What the pieces tell of the answer."""
    return "".join(part.text for part in parts if isinstance(part, TextDelta))


def without_id(reply: EngineReply) -> EngineReply:
    """The reply without its session, which is another for each response."""
    return attrs.evolve(reply, service_session_id=None)


# -- the whole -----------------------------------------------------------------------------------------------------


async def test_pieces(server: ResponsesServer, engine: LiteLLMEngine) -> None:
    """Text comes in pieces as the provider sends it, and the whole reply is the last."""
    server.script(TEXT)
    *pieces, whole = await streamed(engine)
    assert pieces == [TextDelta(word) for word in ("It", " is", " on", " its", " way.")]
    assert isinstance(whole, EngineReply)
    assert whole.text == TEXT
    assert whole.extra == {MODEL_KEY: "openai/gpt-4o"}


async def test_what_is_asked(server: ResponsesServer, make: MakeEngine) -> None:
    """A stream is asked for as a whole answer is, and for its counts too."""
    server.script(TEXT, TEXT)
    engine = make(settings={"temperature": 0})
    await streamed(engine)
    await engine.generate(question())
    asked, whole = server.requests
    assert asked == {**whole, "stream": True, "stream_options": {"include_usage": True}}


@pytest.mark.parametrize("options", [None, {"include_usage": False}])
async def test_options_of_a_stream(server: ResponsesServer, make: MakeEngine, options: Any) -> None:
    """A stream's options are the caller's to choose, and go with streams alone; what nobody counts is no guess."""
    server.script(TEXT, TEXT)
    engine = make(settings={"stream_options": options})
    whole = (await streamed(engine))[-1]
    assert isinstance(whole, EngineReply)
    assert (whole.text, whole.usage) == (TEXT, None)
    assert (await engine.generate(question())).usage is not None
    assert [request.get("stream_options") for request in server.requests] == [options, None]


COMPLETIONS: Final[list[Any]] = [
    TEXT,
    "",
    tool_calls(*CALLS),
    tool_calls(*CALLS[:1], content="One moment."),
    {"role": "assistant", "content": "Yes.", "reasoning_content": "Hm. Let me see."},
    tool_calls(*CALLS[:2], reasoning_content="Hm."),
    {"role": "assistant", "content": None, "refusal": "I can't say."},
]

SEVERAL: Final = {
    "output": [
        reasoning(summary=[{"type": "summary_text", "text": "Hm. "}, {"type": "summary_text", "text": "So it is."}]),
        message("First."),
        message("And then."),
        message(""),
    ]
}

RESPONSES: Final[list[Any]] = [
    TEXT,
    "",
    calls(*CALLS),
    calls(*CALLS[:1], text="One moment."),
    SEVERAL,
    {"output": [reasoning(content=[{"type": "reasoning_text", "text": "In clear."}]), message("Yes.")]},
    {"output": [{**message(""), "content": [{"type": "refusal", "refusal": "I can't say."}]}]},
    {"output": [message("Hel")], "status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}},
]

ANSWERS: Final = [
    *((False, "openai/gpt-4o", answer) for answer in COMPLETIONS),
    *((True, "openai/gpt-4o", answer) for answer in RESPONSES),
    *((True, "openai/unknown", answer) for answer in RESPONSES),  # which litellm does not ask to stream
]


@pytest.mark.parametrize(("service_history", "model", "answer"), ANSWERS)
async def test_whole(server: ResponsesServer, make: MakeEngine, service_history: bool, model: str, answer: Any) -> None:
    """A stream ends with the reply that `generate` would have returned, and its pieces are the reply's text."""
    server.script(answer, answer)
    engine = make(service_history, model)
    *pieces, whole = await streamed(engine)
    assert isinstance(whole, EngineReply)
    assert without_id(whole) == without_id(await engine.generate(question()))
    assert (whole.service_session_id is not None) is service_history
    assert text_of(pieces) == (whole.text or "")
    assert len(server.requests) == 2


WORDS: Final = st.text(st.characters(exclude_categories=["Cs", "Cc"]), max_size=40)
ARGUMENTS: Final = st.dictionaries(WORDS, WORDS, max_size=2).map(json.dumps) | WORDS
DRAWN_CALLS: Final = st.lists(st.tuples(st.uuids().map(str), st.just("look_up"), ARGUMENTS), max_size=3)


@given(text=WORDS, thoughts=WORDS, called=DRAWN_CALLS)
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
async def test_whole_of_any_answer(
    server: ResponsesServer, make: MakeEngine, text: str, thoughts: str, called: list[tuple[str, str, str]]
) -> None:
    """Whatever a provider answers, streamed it is the same."""
    said: dict[str, Any] = {"role": "assistant", "content": text}
    if called:
        said = tool_calls(*called, content=text or None)
    if thoughts:
        said["reasoning_content"] = thoughts
    for service_history, answer in ((False, said), (True, calls(*called, text=text))):
        engine = make(service_history)
        server.script(answer, answer)
        *pieces, whole = await streamed(engine)
        assert isinstance(whole, EngineReply)
        assert without_id(whole) == without_id(await engine.generate(question()))
        assert text_of(pieces) == (whole.text or "")


async def test_reasoning(server: ResponsesServer, make: MakeEngine) -> None:
    """What a model thinks comes in pieces of its own."""
    server.script({"role": "assistant", "content": "Yes.", "reasoning_content": "Hm. Let me see."})
    pieces = (await streamed(make()))[:-1]
    assert pieces == [*map(ReasoningDelta, ("Hm.", " Let", " me", " see.")), TextDelta("Yes.")]


async def test_between(server: ResponsesServer, make: MakeEngine) -> None:
    """Texts, and thoughts, of which a response holds several, are told apart as they are in its text."""
    server.script(SEVERAL)
    pieces = (await streamed(make(service_history=True)))[:-1]
    assert "".join(piece.text for piece in pieces if isinstance(piece, ReasoningDelta)) == "Hm. \n\nSo it is."
    assert text_of(pieces) == "First.\n\nAnd then."


async def test_chain(server: ResponsesServer, make: MakeEngine) -> None:
    """A streamed response can be gone on from, and a conversation keeps its id."""
    conversation = server.new_conversation()
    server.script("One.", "Two.", "Three.")
    engine = make(service_history=True)
    first = (await streamed(engine))[-1]
    assert isinstance(first, EngineReply)
    await streamed(engine, question(service_session_id=first.service_session_id))
    third = (await streamed(engine, question(service_session_id=conversation)))[-1]
    assert isinstance(third, EngineReply)
    assert third.service_session_id == conversation
    assert server.chained == [None, first.service_session_id, conversation]


async def test_run(server: ResponsesServer, engine: LiteLLMEngine) -> None:
    """A streamed run tells the pieces and stores the whole."""
    server.script(TEXT)
    runner = Runner(Agent("Support", engine=engine))
    async with runner.run_stream("c1", QUESTION) as stream:
        events = [event async for event in stream]
    assert [event.text for event in events if isinstance(event, TextDelta)] == ["It", " is", " on", " its", " way."]
    assert isinstance(events[-1], Done)
    session = await runner.session_store.get("c1")
    assert session is not None
    assert session.history[-1].text == TEXT


class Anthropic(ModelServer):
    """Streams a text in Anthropic's language: *count* events of it, and then *then*."""

    count = 6
    then = END

    def answer(self, path: str, request: Mapping[str, Any]) -> Events:
        """The stream: a beginning, two words, an end that says why, and one that says nothing."""
        assert path.endswith("/messages")
        assert request["stream"] is True
        message = {"id": "msg_1", "type": "message", "role": "assistant", "model": "m", "content": []}
        block = {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}}
        words = [
            {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": word}}
            for word in ("Hello", " there.")
        ]
        usage = {"input_tokens": 11, "output_tokens": 7}
        events = [
            {"type": "message_start", "message": {**message, "usage": usage}},
            block,
            *words,
            {"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": {"output_tokens": 7}},
            {"type": "message_stop"},
        ]
        return Events([json.dumps(event) for event in events], self.count, self.then)


@pytest.mark.parametrize("events", range(7))
async def test_another_language(server: ResponsesServer, events: int) -> None:
    """From a provider with a language of its own too an answer comes whole or, where it is cut, not at all."""
    told: list[ReplyPart] = []
    async with serving(Anthropic) as anthropic:
        anthropic.count = events
        engine = LiteLLMEngine("anthropic/m", api_key=KEY, api_base=anthropic.url.removesuffix("/v1"), attempts=1)
        try:
            await follow(engine, told.append)
        except exceptions.EngineUnavailableError:
            assert events < 5
            assert not any(isinstance(part, EngineReply) for part in told)
        else:
            assert events >= 5
            assert told[:-1] == [TextDelta("Hello"), TextDelta(" there.")]
            assert isinstance(told[-1], EngineReply)
            assert told[-1].text == "Hello there."
            assert told[-1].usage is not None


async def test_closing_another_language(server: ResponsesServer) -> None:
    """Who leaves such a stream early hangs up on its provider too."""
    async with serving(Anthropic) as anthropic:
        anthropic.count, anthropic.then = 3, HANG
        engine = LiteLLMEngine("anthropic/m", api_key=KEY, api_base=anthropic.url.removesuffix("/v1"))
        async with aclosing(engine.stream(question())) as stream:
            assert await anext(stream) == TextDelta("Hello")
        await anthropic.left.wait()


# -- what goes wrong -------------------------------------------------------------------------------------------------


def failing(code: str) -> str:
    """The event by which OpenAI says in mid-stream that it failed, in both of its languages."""
    said = {"code": code, "message": f"{KEY} {QUESTION}", "param": None}
    return json.dumps({"type": "error", **said, "sequence_number": 9, "error": {"type": "x", **said}})


FAULTS: Final = [
    (END, exceptions.EngineUnavailableError),
    (DISCONNECT, exceptions.EngineUnavailableError),
    (HANG, exceptions.EngineTimeoutError),
    (failing("rate_limit_exceeded"), exceptions.EngineRateLimitError),
    (failing("context_length_exceeded"), exceptions.ContextWindowError),
    (failing("server_error"), exceptions.EngineUnavailableError),
]


@pytest.mark.parametrize("events", [0, 1, 4])
@pytest.mark.parametrize("service_history", [False, True], ids=["completions", "responses"])
@pytest.mark.parametrize(("fault", "kind"), FAULTS)
async def test_faults(
    server: ResponsesServer,
    make: MakeEngine,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
    fault: str,
    kind: type[exceptions.EngineError],
    service_history: bool,
    events: int,
) -> None:
    """A stream that is cut, hangs or says that it fails is one request and an error, with no word of key or prompt."""
    server.script(Partly(TEXT, events, fault))
    engine = make(service_history, timeout=1 if fault == HANG else 60)
    told: list[ReplyPart] = []
    with caplog.at_level(logging.INFO), pytest.raises(exceptions.EngineError) as caught:
        await follow(engine, told.append)
    assert type(caught.value) is kind
    assert all(isinstance(part, TextDelta) for part in told)
    assert TEXT.startswith(text_of(told))
    assert len(server.requests) == 1
    logged = f"{caught.value} {caplog.text} {capsys.readouterr()}"
    assert KEY not in logged
    assert QUESTION not in logged


@pytest.mark.parametrize("fault", ["{nope", "[1]", "null", '{"choices": [7]}'])
@pytest.mark.parametrize("events", range(9))
@pytest.mark.parametrize("service_history", [False, True], ids=["completions", "responses"])
async def test_malformed_events(
    server: ResponsesServer, make: MakeEngine, service_history: bool, fault: str, events: int
) -> None:
    """Where an event can't be read the answer comes whole all the same, or not at all."""
    server.script(Partly(TEXT, events, fault))
    told: list[ReplyPart] = []
    try:
        await follow(make(service_history), told.append)
    except exceptions.EngineUnavailableError:
        assert not any(isinstance(part, EngineReply) for part in told)
    else:
        assert isinstance(told[-1], EngineReply)
        assert told[-1].text == text_of(told) == TEXT


FAILED: Final = [
    ("rate_limit_exceeded", exceptions.EngineRateLimitError),
    ("context_length_exceeded", exceptions.ContextWindowError),
    ("invalid_prompt", exceptions.EngineBadRequestError),
    ("server_error", exceptions.EngineUnavailableError),
]


@pytest.mark.parametrize(("code", "kind"), FAILED)
@pytest.mark.parametrize("model", ["openai/gpt-4o", "openai/unknown"])
async def test_failed_response(
    server: ResponsesServer, make: MakeEngine, code: str, kind: type[exceptions.EngineError], model: str
) -> None:
    """A response that failed is the same error streamed as it is whole."""
    failed = {"output": [], "status": "failed", "error": {"code": code, "message": QUESTION}}
    server.script(failed, failed)
    engine = make(service_history=True, model=model)
    with pytest.raises(exceptions.EngineError) as caught:
        await streamed(engine)
    with pytest.raises(exceptions.EngineError) as whole:
        await engine.generate(question())
    assert type(caught.value) is type(whole.value) is kind
    assert str(caught.value) == str(whole.value)


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (error(429, "no", headers={"retry-after": "7"}), exceptions.EngineRateLimitError),
        (error(401, "no"), exceptions.EngineAuthenticationError),
        (error(400, "no"), exceptions.EngineBadRequestError),
        (Status(200, b"{nope"), exceptions.EngineUnavailableError),
        (DISCONNECT, exceptions.EngineUnavailableError),
    ],
)
async def test_refused(
    server: ResponsesServer, engine: LiteLLMEngine, answer: Any, kind: type[exceptions.EngineError]
) -> None:
    """A request for a stream that gets none fails as one for a whole answer does."""
    server.script(answer, answer)
    with pytest.raises(exceptions.EngineError) as caught:
        await streamed(engine)
    with pytest.raises(exceptions.EngineError) as whole:
        await engine.generate(question())
    assert type(caught.value) is type(whole.value) is kind
    assert caught.value.retry_after == whole.value.retry_after


async def test_provider_that_keeps_nothing(server: ResponsesServer, make: MakeEngine) -> None:
    """A provider without a Responses API is not asked to stream what it should keep."""
    with pytest.raises(exceptions.EngineBadRequestError, match="knows no service"):
        await streamed(make(model="gemini/test"), question(keep_at_service=True))
    assert server.requests == []


async def test_lost_session(server: ResponsesServer, make: MakeEngine) -> None:
    """A session that the service does not know is told before anything else is."""
    server.script("never said")
    with pytest.raises(exceptions.ServiceSessionLostError):
        await streamed(make(), question(service_session_id="resp_gone"))


@pytest.mark.parametrize("service_history", [False, True], ids=["completions", "responses"])
async def test_timeout_of_the_whole(server: ResponsesServer, make: MakeEngine, service_history: bool) -> None:
    """A stream that goes on and on is given up when its time is over, though no event is late."""
    server.script(Partly(TEXT, 5, DRIP))
    with pytest.raises(exceptions.EngineTimeoutError):
        await streamed(make(service_history, timeout=1))


class Ready:
    """A stream whose events are all there, so that none is waited for."""

    def __aiter__(self) -> AsyncIterator[object]:
        return self

    async def __anext__(self) -> object:
        return object()


async def test_timeout_without_a_wait(engine: LiteLLMEngine) -> None:
    """The time of a stream ends also where its events have arrived faster than they are read."""
    await engine.warm_up()
    asked = Asked(question(), "openai/gpt-4o", at_service=True, session=None)
    coming = ResponsePieces(Ready(), "openai/gpt-4o", None)
    with pytest.raises(exceptions.EngineTimeoutError):
        await engine._next(Ready(), coming, anyio.current_time(), asked)


async def test_nothing_is_guessed(server: ResponsesServer, make: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a stream that breaks litellm counts no tokens, for which it would load a tokenizer on the event loop."""
    counted: list[object] = []

    def count(**arguments: object) -> int:
        counted.append(arguments)
        return 0

    monkeypatch.setattr("litellm.litellm_core_utils.streaming_chunk_builder_utils.token_counter", count)
    server.script(Partly(TEXT, 4, DISCONNECT))
    with pytest.raises(exceptions.EngineUnavailableError):
        await streamed(make())
    assert counted == []


@pytest.mark.parametrize("pieces", [1, 2])
async def test_closing(server: ResponsesServer, engine: LiteLLMEngine, pieces: int) -> None:
    """Who leaves a stream early hangs up on the provider."""
    server.script(Partly(TEXT, 6, HANG))
    async with aclosing(engine.stream(question())) as stream:
        for _ in range(pieces):
            await anext(stream)
    await server.left.wait()


async def test_cancelling(server: ResponsesServer, engine: LiteLLMEngine) -> None:
    """A reader who is cancelled while it waits for a piece hangs up on the provider."""
    server.script(Partly(TEXT, 4, HANG))
    async with anyio.create_task_group() as tasks:

        async def read() -> None:
            async for part in engine.stream(question()):
                if part == TextDelta("It"):
                    tasks.cancel_scope.cancel()

        tasks.start_soon(read)
    await server.left.wait()
