from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Final, TypeAlias

import anyio
import anyio.lowlevel
import pytest

from chatflow import Runner, exceptions
from chatflow.core.agent import Agent
from chatflow.core.engine import EngineReply, EngineRequest
from chatflow.core.events import TextDelta
from chatflow.core.messages import MODEL_KEY, Message, Role
from chatflow.engines import LiteLLMEngine
from chatflow.engines.failures import retry_after
from chatflow.engines.trying import LONGEST_WAIT, Trying, may_pass
from tests.engines.failing import KEY, QUESTION
from tests.model_server import DISCONNECT, HANG, Partly, Status, error
from tests.responses_server import ResponsesServer, Unheard, assistant, user

BUSY: Final = error(429, f"{KEY} {QUESTION}")
DOWN: Final = error(503, f"{KEY} {QUESTION}")

MakeEngine: TypeAlias = Callable[..., LiteLLMEngine]


class Waits(list[float]):
    """Takes the place of the clock: each wait is noted, and over at once."""

    async def __call__(self, seconds: float) -> None:
        self.append(seconds)
        await anyio.lowlevel.checkpoint()


@pytest.fixture
def waits() -> Waits:
    """What was waited, in seconds."""
    return Waits()


@pytest.fixture
def make(server: ResponsesServer, waits: Waits) -> MakeEngine:
    """Makes an engine that asks the server up to three times, and waits for nothing."""

    def made(*models: str, attempts: int = 3, **arguments: Any) -> LiteLLMEngine:
        engine = LiteLLMEngine(
            models=models or ["openai/gpt-4o"], api_key=KEY, api_base=server.url, attempts=attempts, **arguments
        )
        engine._trying = Trying(attempts, waits)
        return engine

    return made


@pytest.fixture(params=["whole", "streamed"])
def answer(request: pytest.FixtureRequest) -> Callable[..., Any]:
    """Asks an engine for a reply, by either of its methods."""

    async def asked(engine: LiteLLMEngine, **fields: Any) -> EngineReply:
        question = EngineRequest(agent=Agent("Support"), messages=[Message(Role.USER, QUESTION)], **fields)
        if request.param == "whole":
            return await engine.generate(question)
        reply = [part async for part in engine.stream(question)][-1]
        assert isinstance(reply, EngineReply)
        return reply

    return asked


# -- asking again ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("service_history", [False, True], ids=["completions", "responses"])
@pytest.mark.parametrize("failure", [BUSY, DOWN, error(500, "no"), error(408, "no"), DISCONNECT, Status(200, b"{nope")])
async def test_asked_again(
    server: ResponsesServer, make: MakeEngine, answer: Any, failure: Any, service_history: bool
) -> None:
    """What may pass is asked again, the same as before, until there is an answer."""
    server.script(failure, failure, "Hello.")
    reply = await answer(make(service_history=service_history))
    assert reply.text == "Hello."
    first, second, third = server.requests
    assert first == second == third


@pytest.mark.parametrize(
    ("failure", "kind"),
    [(BUSY, exceptions.EngineRateLimitError), (DOWN, exceptions.EngineUnavailableError)],
)
async def test_attempts(
    server: ResponsesServer, make: MakeEngine, waits: Waits, answer: Any, failure: Any, kind: type[Exception]
) -> None:
    """After so many attempts the last failure is raised."""
    server.script(*[failure] * 9)
    with pytest.raises(kind):
        await answer(make(attempts=4))
    assert len(server.requests) == 4
    assert len(waits) == 3


@pytest.mark.parametrize(
    "failure",
    [
        error(400, "no"),
        error(400, "maximum context length", code="context_length_exceeded"),
        error(401, "no"),
        error(403, "no"),
        error(404, "no"),
        error(422, "no"),
    ],
)
async def test_asked_once(server: ResponsesServer, make: MakeEngine, answer: Any, failure: Any) -> None:
    """What the provider refuses for what it is is asked once, of one model."""
    server.script(failure)
    with pytest.raises((exceptions.EngineBadRequestError, exceptions.EngineAuthenticationError)):
        await answer(make("openai/gpt-4o", "openai/gpt-4.1"))
    assert len(server.requests) == 1


async def test_timeout_is_asked_again(server: ResponsesServer, make: MakeEngine, answer: Any) -> None:
    """A model that does not answer in time is asked again, and each attempt has its own time."""
    server.script(HANG, "Hello.")
    assert (await answer(make(timeout=1))).text == "Hello."
    assert len(server.requests) == 2


async def test_back_off(server: ResponsesServer, make: MakeEngine, waits: Waits, answer: Any) -> None:
    """Waits double from a second to eight, and each has up to a second more."""
    server.script(*[BUSY] * 9)
    with pytest.raises(exceptions.EngineRateLimitError):
        await answer(make(attempts=6))
    assert [int(seconds) for seconds in waits] == [1, 2, 4, 8, 8]
    assert len(set(waits)) == 5


@pytest.mark.parametrize(
    ("headers", "whole_seconds"),
    [
        ({"retry-after": "7"}, 7),
        ({"retry-after": "0"}, 1),
        ({"retry-after-ms": "9500", "retry-after": "10"}, 9),
        ({"retry-after": "Thu, 01 Jan 2026 00:00:09 GMT", "date": "Thu, 01 Jan 2026 00:00:00 GMT"}, 9),
        ({"retry-after": "soon"}, 1),
        ({"retry-after": str(LONGEST_WAIT)}, 30),
    ],
)
async def test_retry_after(
    server: ResponsesServer,
    make: MakeEngine,
    waits: Waits,
    answer: Any,
    headers: dict[str, str],
    whole_seconds: int,
) -> None:
    """As long as a provider asks to wait is waited, and never less than otherwise."""
    server.script(error(429, "no", headers=headers), "Hello.")
    await answer(make())
    (seconds,) = waits
    assert whole_seconds <= seconds <= whole_seconds + 1.5


async def test_retry_after_too_long(server: ResponsesServer, make: MakeEngine, waits: Waits, answer: Any) -> None:
    """A provider that asks to wait for long is not asked again; the next model is, at once."""
    server.script(error(429, "no", headers={"retry-after": "31"}), "Hello.")
    reply = await answer(make("openai/gpt-4o", "openai/gpt-4.1"))
    assert reply.extra[MODEL_KEY] == "openai/gpt-4.1"
    assert waits == []


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ({}, None),
        ({"retry-after": "1.5"}, 1.5),
        ({"retry-after-ms": "1500"}, 1.5),
        ({"retry-after": "-1"}, None),
        ({"retry-after": "inf"}, None),
        ({"retry-after": "Thu, 01 Jan 2026 00:00:09 GMT"}, None),
        ({"retry-after": "Thu, 01 Jan 2026 00:00:09 GMT", "date": "Thu, 01 Jan 2026 00:00:00 -0000"}, None),
        ({"retry-after": "Thu, 01 Jan 2026 00:00:00 GMT", "date": "Thu, 01 Jan 2026 00:00:09 GMT"}, None),
    ],
)
def test_what_is_asked_for(headers: dict[str, str], expected: float | None) -> None:
    """What a provider asks to wait is a number, or a time by its own clock, and nonsense is nothing."""
    assert retry_after(headers) == expected


async def test_log(server: ResponsesServer, make: MakeEngine, answer: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Each time asked again is logged, with the reason and without key and prompt."""
    server.script(BUSY, BUSY, "Hello.")
    with caplog.at_level(logging.INFO):
        await answer(make("openai/gpt-4o", "openai/gpt-4.1", attempts=2))
    again, instead = (record.getMessage() for record in caplog.records if record.name == "chatflow.engines")
    assert again.startswith("model 'openai/gpt-4o': the provider takes no more requests for now (HTTP 429, ")
    assert "; asked again in " in again
    assert again.endswith(" s, attempt 2")
    assert instead.endswith("(HTTP 429, invalid_request_error); model 'openai/gpt-4.1' is asked instead")
    assert KEY not in caplog.text
    assert QUESTION not in caplog.text


async def test_cancelled_wait(server: ResponsesServer, answer: Any) -> None:
    """A wait ends when its task is cancelled, and nothing is asked any more."""
    server.script(error(429, "no", headers={"retry-after": "30"}), "never said")
    engine = LiteLLMEngine("openai/gpt-4o", api_key=KEY, api_base=server.url)
    waiting = anyio.Event()

    async def sleep(seconds: float) -> None:
        waiting.set()
        await anyio.sleep(seconds)

    engine._trying = Trying(3, sleep)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(answer, engine)
        await waiting.wait()
        tasks.cancel_scope.cancel()
    assert len(server.requests) == 1


async def test_nothing_after_a_piece(server: ResponsesServer, make: MakeEngine) -> None:
    """Once a piece was told nothing is asked again, not of another model either."""
    server.script(Partly("Hello there.", 4, DISCONNECT), "never said")
    told: list[object] = []
    with pytest.raises(exceptions.EngineUnavailableError):
        await _follow(make("openai/gpt-4o", "openai/gpt-4.1"), told.append)
    assert told[0] == TextDelta("Hello")
    assert len(server.requests) == 1


async def _follow(engine: LiteLLMEngine, tell: Callable[[object], None]) -> None:
    async for part in engine.stream(EngineRequest(agent=Agent("Support"), messages=[Message(Role.USER, "Hi")])):
        tell(part)


async def test_broken_before_a_piece(server: ResponsesServer, make: MakeEngine) -> None:
    """A stream that breaks before it has told anything is asked again, and only the second one is told."""
    server.script(Partly("Hello there.", 1, DISCONNECT), "Hello again.")
    told: list[object] = []
    await _follow(make(), told.append)
    assert told[:-1] == [TextDelta("Hello"), TextDelta(" again.")]
    assert len(server.requests) == 2


# -- other models ----------------------------------------------------------------------------------------------------


async def test_other_models(server: ResponsesServer, make: MakeEngine, answer: Any) -> None:
    """Models are asked in order, each as often as it may be, and the reply says which has answered."""
    server.script(*[DOWN] * 4, "Hello.")
    reply = await answer(make("openai/a", "openai/b", "openai/c", attempts=2))
    assert [request["model"] for request in server.requests] == ["a", "a", "b", "b", "c"]
    assert reply.extra[MODEL_KEY] == "openai/c"


async def test_no_more_models(server: ResponsesServer, make: MakeEngine, answer: Any) -> None:
    """Where none can answer, the error is the last one's."""
    server.script(BUSY, DOWN)
    with pytest.raises(exceptions.EngineUnavailableError) as caught:
        await answer(make("openai/a", "openai/b", attempts=1))
    assert caught.value.model == "openai/b"


async def test_other_provider_with_a_service(server: ResponsesServer, make: MakeEngine, answer: Any) -> None:
    """A history that a service keeps is no other provider's, whose models are left out."""
    server.script(DOWN, DOWN)
    engine = make("openai/a", "gemini/b", "xai/c", "openai/d", attempts=1, service_history=True)
    with pytest.raises(exceptions.EngineUnavailableError):
        await answer(engine)
    assert [request["model"] for request in server.requests] == ["a", "d"]


async def test_stored_model(server: ResponsesServer, make: MakeEngine) -> None:
    """The model that has answered stands in the stored message."""
    server.script(DOWN, "Hello.")
    runner = Runner(Agent("Support", engine=make("openai/a", "openai/b", attempts=1)))
    await runner.run_async("c1", "Hi")
    session = await runner.session_store.get("c1")
    assert session is not None
    assert session.history[-1].extra[MODEL_KEY] == "openai/b"


@pytest.mark.parametrize("models", ["openai/a", 7, [7]])
def test_models_of_a_wrong_type(models: Any) -> None:
    """What are no names of models is refused."""
    with pytest.raises(TypeError, match="models"):
        LiteLLMEngine(models=models)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"model": "openai/a", "models": ["openai/b"]}, "either model or models"),
        ({"models": ["openai/a", "xai/b"], "api_key": KEY}, "one provider's"),
        ({"attempts": 0}, "at least 1, not 0"),
    ],
)
def test_arguments(arguments: dict[str, Any], said: str) -> None:
    """What can't be meant is refused, and a key is sent to no other provider."""
    with pytest.raises(ValueError, match=said):
        LiteLLMEngine(**arguments)


@pytest.mark.parametrize("attempts", ["3", True, 1.0])
def test_attempts_of_a_wrong_type(attempts: Any) -> None:
    """A number of attempts that is none is refused."""
    with pytest.raises(TypeError, match="attempts"):
        LiteLLMEngine(attempts=attempts)


# -- a service that keeps the history --------------------------------------------------------------------------------


@pytest.mark.parametrize("failure", [DISCONNECT, Unheard("Hello?"), DOWN, error(500, "no"), error(408, "no")])
async def test_conversation_is_not_told_twice(
    server: ResponsesServer, make: MakeEngine, answer: Any, failure: Any
) -> None:
    """A conversation that may hold what it was sent is not sent it again, by another model neither."""
    conversation = server.new_conversation()
    server.script(failure, "never said")
    with pytest.raises(exceptions.EngineError):
        await answer(make("openai/a", "openai/b", service_history=True), service_session_id=conversation)
    assert len(server.requests) == 1


@pytest.mark.parametrize("failure", [BUSY, error(409, "no", code="conversation_locked")])
async def test_conversation_that_refused(server: ResponsesServer, make: MakeEngine, answer: Any, failure: Any) -> None:
    """A conversation that has refused the request for now is asked again, and holds it once."""
    conversation = server.new_conversation()
    server.script(failure, "Hello.")
    await answer(make(service_history=True), service_session_id=conversation)
    assert [item.get("role") for item in server.conversations[conversation]] == ["user", "assistant"]


async def test_response_is_gone_on_from_again(server: ResponsesServer, make: MakeEngine, answer: Any) -> None:
    """An answer that nobody heard is no part of what goes on from the response before it."""
    server.script("One.", Unheard("Two?"), "Two.")
    engine = make(service_history=True)
    first = await answer(engine)
    second = await answer(engine, service_session_id=first.service_session_id)
    assert server.chained == [None, first.service_session_id, first.service_session_id]
    kept = server.kept[second.service_session_id]
    assert list(kept[:1]) == [user(QUESTION)]
    assert len(kept) == 4
    assert assistant("Two?") not in kept


async def test_lost_session_is_asked_once(server: ResponsesServer, make: MakeEngine, answer: Any) -> None:
    """A session that the service has lost is asked for once."""
    with pytest.raises(exceptions.ServiceSessionLostError):
        await answer(make("openai/a", "openai/b", service_history=True), service_session_id="resp_gone")
    assert len(server.requests) == 1


# -- the rule --------------------------------------------------------------------------------------------------------

KINDS: Final[list[tuple[type[exceptions.EngineError], bool]]] = [
    (exceptions.EngineRateLimitError, True),
    (exceptions.EngineTimeoutError, True),
    (exceptions.EngineUnavailableError, True),
    (exceptions.EngineError, False),
    (exceptions.EngineAuthenticationError, False),
    (exceptions.EngineBadRequestError, False),
    (exceptions.ContextWindowError, False),
    (exceptions.ServiceSessionLostError, False),
]


@pytest.mark.parametrize(("kind", "passes"), KINDS)
@pytest.mark.parametrize(("status", "refused"), [(None, False), (408, False), (409, True), (429, True), (503, False)])
def test_what_may_pass(kind: type[exceptions.EngineError], passes: bool, status: int | None, refused: bool) -> None:
    """What may pass follows from the kind, and where nothing may be told twice from the status too."""
    failure = kind("no", model="m", status=status)
    assert may_pass(failure) is passes
    assert may_pass(failure, only_if_refused=True) is (passes and refused)


def test_what_else_is_raised() -> None:
    """What is no engine's error is never asked again."""
    assert not may_pass(ValueError())
