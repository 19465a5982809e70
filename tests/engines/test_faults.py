"""What goes wrong at each provider, over real HTTP: the error's kind, how often was asked, what is kept and shown."""

from __future__ import annotations

import io
import json
import logging
import traceback
from collections.abc import AsyncIterator, Mapping
from typing import Any, Final

import anyio.lowlevel
import attrs
import pytest

from chatflow import Agent, Runner, SessionStore, exceptions
from chatflow.engines.trying import Trying
from tests.engines.protocols import CLAUDE, COMPLETIONS, ECHO, GEMINI, KEY, QUESTION, RESPONSES, Protocol, asked
from tests.model_server import DISCONNECT, END, HANG, ModelServer, Partly, Status


@pytest.fixture(scope="module", params=[COMPLETIONS, RESPONSES, CLAUDE, GEMINI], ids=lambda each: each.name)
def protocol(request: pytest.FixtureRequest) -> Protocol:
    """Each of the languages in turn."""
    chosen: Protocol = request.param
    return chosen


@pytest.fixture(scope="module")
async def running(anyio_backend: str, protocol: Protocol) -> AsyncIterator[ModelServer]:
    """Its server, once it has been asked: the first time takes litellm longer."""
    async with asked(protocol) as server:
        server.script("Hello.", "Hello.")
        agent = Agent("Support", engine=protocol.engine(server))
        await agent.run("Hi")
        await agent.run_stream("Hi").collect()
        yield server


@pytest.fixture(params=[False, True], ids=["whole", "streamed"])
def streamed(request: pytest.FixtureRequest) -> bool:
    """Whether answers come in pieces."""
    chosen: bool = request.param
    return chosen


class Conversation:
    """A conversation with a model that is asked up to *attempts* times, and waits for nothing in between."""

    def __init__(
        self, protocol: Protocol, server: ModelServer, streamed: bool, attempts: int = 3, timeout: float = 60
    ) -> None:
        self.store = SessionStore()
        self.streamed = streamed
        engine = protocol.engine(server, attempts=attempts, timeout=timeout)
        engine._trying = Trying(attempts, self._wait)
        self.waits: list[float] = []
        self.runner = Runner(Agent("Support", "You help.", engine=engine), session_store=self.store)

    async def _wait(self, seconds: float) -> None:
        self.waits.append(seconds)
        await anyio.lowlevel.checkpoint()

    async def ask(self, text: str) -> str:
        """Say something, and hear the answer."""
        if self.streamed:
            return (await self.runner.run_stream("c", text).collect()).content
        return (await self.runner.run_async("c", text)).content

    async def fail(self, text: str) -> exceptions.EngineError:
        """Say something, and be told that it failed."""
        with pytest.raises(exceptions.EngineError) as caught:
            await self.ask(text)
        return caught.value

    async def history(self) -> list[str]:
        """What is stored."""
        session = await self.store.get("c")
        return [] if session is None else [message.text for message in session.history]


@attrs.frozen
class Fault:
    """What the provider does: an HTTP error, or anything else that it answers with; what that is to us."""

    kind: type[exceptions.EngineError]
    answer: Any = None
    status: int | None = None
    text: str = ECHO
    headers: Mapping[str, str] = attrs.field(factory=dict)
    again: bool = False

    def by(self, protocol: Protocol) -> Any:
        """The answer in the provider's language."""
        if self.status is None:
            return self.answer
        return protocol.error(self.status, self.text, headers=self.headers)


UNAVAILABLE: Final = exceptions.EngineUnavailableError
FAULTS: Final = {
    "400": Fault(exceptions.EngineBadRequestError, status=400),
    "401": Fault(exceptions.EngineAuthenticationError, status=401),
    "403": Fault(exceptions.EngineAuthenticationError, status=403),
    "404": Fault(exceptions.EngineBadRequestError, status=404),
    "408": Fault(exceptions.EngineTimeoutError, status=408, again=True),
    "413": Fault(exceptions.EngineBadRequestError, status=413),
    "422": Fault(exceptions.EngineBadRequestError, status=422),
    "429": Fault(exceptions.EngineRateLimitError, status=429, headers={"retry-after": "7"}, again=True),
    "500": Fault(UNAVAILABLE, status=500, again=True),
    "502 of a gateway": Fault(UNAVAILABLE, Status(502, f"<html>{ECHO}</html>".encode()), again=True),
    "503": Fault(UNAVAILABLE, status=503, headers={"retry-after": "7"}, again=True),
    "529": Fault(UNAVAILABLE, status=529, again=True),
    "no answer": Fault(UNAVAILABLE, DISCONNECT, again=True),
    "no JSON": Fault(UNAVAILABLE, Status(200, f"{{{ECHO}".encode()), again=True),
    "other JSON": Fault(UNAVAILABLE, Status(200, {"said": ECHO}), again=True),
    "nothing": Fault(UNAVAILABLE, Status(200, b""), again=True),
}


@attrs.frozen
class Shown:
    """Looks at all that is shown: of an error by itself, in a traceback and a log; in the logs, and on the screen."""

    caplog: pytest.LogCaptureFixture
    capfd: pytest.CaptureFixture[str]

    def of(self, error: BaseException) -> str:
        """What is shown, of *error* too."""
        stream = io.StringIO()
        logger, handler = logging.getLogger("an application's"), logging.StreamHandler(stream)
        logger.addHandler(handler)
        logger.error("it failed: %s", error, exc_info=error)
        logger.removeHandler(handler)
        by_itself = [str(error), repr(error), *traceback.format_exception(error), stream.getvalue()]
        return "\n".join([*by_itself, self.caplog.text, *self.capfd.readouterr()])


@pytest.fixture
def shown(caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]) -> Shown:
    """Looks at all that is shown."""
    caplog.set_level(logging.INFO)
    return Shown(caplog, capfd)


def hides(text: str) -> bool:
    """Whether neither the key, nor its end, nor the prompt is in what is shown."""
    return not any(canary in text for canary in (KEY, KEY[-8:], QUESTION))


async def spoilt(conversation: Conversation, protocol: Protocol, server: ModelServer) -> None:
    """Nothing is left of the turn that has failed, and the conversation goes on."""
    assert await conversation.history() == []
    server.script("Here I am.")
    assert await conversation.ask("Hello?") == "Here I am."
    assert QUESTION not in json.dumps(server.requests)
    assert len(server.requests) == 1
    assert await conversation.history() == ["Hello?", "Here I am."]


@pytest.mark.parametrize("name", FAULTS)
async def test_faults(running: ModelServer, protocol: Protocol, shown: Shown, streamed: bool, name: str) -> None:
    """A failure is an error of its kind, asked as often as it may help; it shows no secrets, and leaves no trace."""
    fault = FAULTS[name]
    conversation = Conversation(protocol, running, streamed)
    running.script(*[fault.by(protocol)] * 3)
    error = await conversation.fail(QUESTION)
    assert type(error) is fault.kind
    assert error.model == protocol.model
    if fault.status is not None:  # litellm has a status of its own for some
        assert error.status is not None
        assert error.status // 100 == fault.status // 100
    assert error.retry_after == (7 if fault.headers else None)
    assert len(running.requests) == (3 if fault.again else 1)
    assert len(conversation.waits) == (2 if fault.again else 0)
    assert hides(shown.of(error))
    await spoilt(conversation, protocol, running)


async def test_asked_once(running: ModelServer, protocol: Protocol, streamed: bool) -> None:
    """An engine that is to ask once sends one request."""
    conversation = Conversation(protocol, running, streamed, attempts=1)
    running.script(protocol.error(503, ECHO), "never said")
    await conversation.fail(QUESTION)
    assert len(running.requests) == 1


async def test_hang(running: ModelServer, protocol: Protocol, streamed: bool) -> None:
    """A provider that never answers is left after the engine's timeout, with one request."""
    conversation = Conversation(protocol, running, streamed, attempts=1, timeout=0.5)
    running.script(HANG)
    assert type(await conversation.fail(QUESTION)) is exceptions.EngineTimeoutError
    assert len(running.requests) == 1
    await spoilt(conversation, protocol, running)


TOO_LONG: Final = {
    "completions": "This model's maximum context length is 8 tokens.",
    "responses": "Your input exceeds the context window of this model.",
    "claude": "prompt is too long: 200001 tokens > 200000 maximum",
    "gemini": "The input token count (1048577) exceeds the maximum number of tokens allowed (1048576).",
}


async def test_context_window(running: ModelServer, protocol: Protocol, streamed: bool) -> None:
    """A prompt that is too long is an error of its own, whatever the provider calls it, and not asked again."""
    conversation = Conversation(protocol, running, streamed)
    code = {"code": "context_length_exceeded"} if protocol.model.startswith("openai/") else {}
    running.script(protocol.error(400, TOO_LONG[protocol.name], **code))
    assert type(await conversation.fail(QUESTION)) is exceptions.ContextWindowError
    assert len(running.requests) == 1


# -- in mid-stream ---------------------------------------------------------------------------------------------------

CUTS: Final = {"disconnect": DISCONNECT, "end": END, "failure": "", "hang": HANG, "no JSON": f"{{{ECHO}"}


@pytest.mark.parametrize(
    ("name", "told"), [*((name, told) for name in list(CUTS)[:-1] for told in (False, True)), ("no JSON", True)]
)
async def test_cut(running: ModelServer, protocol: Protocol, shown: Shown, name: str, told: bool) -> None:
    """A stream that breaks is an error that shows no secrets; asked for again only where nothing has been told."""
    hangs = name == "hang"
    conversation = Conversation(
        protocol, running, streamed=True, attempts=1 if hangs else 3, timeout=0.5 if hangs else 60
    )
    then = json.dumps(protocol.failing) if name == "failure" else CUTS[name]
    running.script(*[Partly("Here I am at last.", protocol.begun if told else 0, then)] * 3)
    error = await conversation.fail(QUESTION)
    assert type(error) is (exceptions.EngineTimeoutError if hangs else exceptions.EngineUnavailableError)
    assert len(running.requests) == (1 if told or hangs else 3)
    assert hides(shown.of(error))
    await spoilt(conversation, protocol, running)


async def test_words_of_the_provider(running: ModelServer, protocol: Protocol, streamed: bool) -> None:
    """What the provider said of a request that it refuses is found where the error says."""
    conversation = Conversation(protocol, running, streamed)
    running.script(protocol.error(400, ECHO))
    error = await conversation.fail(QUESTION)
    assert "__context__ has the provider's words" in str(error)
    assert QUESTION in str(error.__context__)
    assert error.__suppress_context__
