"""A server that was not written here: aimock, from npm, with its faults. Skipped where npm has no way to it."""

from __future__ import annotations

import json
import logging
import shutil
import subprocess
from collections.abc import AsyncIterator, Iterator
from typing import Any, Final

import attrs
import httpx
import pytest

from chatflow import Agent, Runner, SessionStore, exceptions, tool
from chatflow.core.messages import Message
from chatflow.engines import LiteLLMEngine

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

PACKAGE: Final = "@copilotkit/aimock@1.43.0"

FIRST, SECOND = "Where is order 404?", "And orders 405 and 406?"
ANSWERS: Final = {FIRST: "Order 404 is in Munich.", SECOND: "Both are in Munich."}


def called(*orders: str) -> dict[str, Any]:
    """A response that looks these orders up."""
    calls = [{"name": "look_up", "arguments": {"order_id": order}} for order in orders]
    return {"toolCalls": calls, "finishReason": "stop"}  # as Gemini says it; the others don't mind


def fixtures() -> list[dict[str, Any]]:
    """What it answers: by what users and tools have said, or by number to Gemini, whose results it can't read."""
    found: list[dict[str, Any]] = []
    for number, (text, orders) in enumerate({FIRST: ["404"], SECOND: ["405", "406"]}.items()):
        answer = {"content": ANSWERS[text]}
        found += [
            {"match": {"model": "gemini-2.5-flash", "turnIndex": 2 * number}, "response": called(*orders)},
            {"match": {"model": "gemini-2.5-flash", "turnIndex": 2 * number + 1}, "response": answer},
            {"match": {"userMessage": text, "hasToolResult": False}, "response": called(*orders)},
            {"match": {"toolResultContains": orders[-1]}, "response": answer},
        ]
    return found


@attrs.frozen
class Aimock:
    """The server, and what it says of itself."""

    url: str

    def suffer(self, **rates: float) -> None:
        """Answer from now on with these faults alone, and forget what was asked."""
        httpx.post(f"{self.url}/__aimock/reset/journal").raise_for_status()
        httpx.post(f"{self.url}/__aimock/chaos", json=rates).raise_for_status()

    @property
    def asked(self) -> int:
        """How many requests have come since."""
        return len(httpx.get(f"{self.url}/__aimock/journal").json())


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Aimock]:
    """The server, fetched and started by npm's node, on a free port of loopback."""
    npm, node = shutil.which("npm"), shutil.which("node")
    if npm is None or node is None:
        pytest.skip("npm, or its node, is missing")
    folder = tmp_path_factory.mktemp("aimock")
    fetched = subprocess.run(
        [npm, "install", "--prefix", folder, "--no-audit", "--no-fund", "--ignore-scripts", PACKAGE],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    if fetched.returncode:
        pytest.skip(f"npm can't fetch {PACKAGE}: {fetched.stderr[-200:]}")
    (folder / "fixtures.json").write_text(json.dumps({"fixtures": fixtures()}))
    program = folder / "node_modules/@copilotkit/aimock/dist/cli.js"
    with subprocess.Popen(
        [node, program, "-p", "0", "-f", folder / "fixtures.json", "--validate-on-load"],
        env={"AIMOCK_STRICT_TURN_INDEX": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            said = next(line for line in process.stdout if "listening on" in line)
            yield Aimock(said.rpartition(" ")[2].strip())
        finally:
            process.terminate()


@pytest.fixture
def aimock(running: Aimock) -> Aimock:
    """The server without a fault."""
    running.suffer()
    return running


@pytest.fixture(scope="module", autouse=True)
async def clients(anyio_backend: str) -> AsyncIterator[None]:
    """Closes litellm's clients on the loop that they were made on."""
    engine = LiteLLMEngine()
    await engine.warm_up()
    yield
    await engine._litellm.close_litellm_async_clients()


# --- conversations ----------------------------------------------------------------------------------------------------

WAYS: Final[dict[str, tuple[str, str, dict[str, Any]]]] = {
    "chat completions": ("openai/gpt-4o", "/v1", {}),
    "Responses": ("openai/gpt-4o", "/v1", {"service_history": True}),
    "Anthropic": ("anthropic/claude-sonnet-4-5", "", {}),
    "Gemini": ("gemini/gemini-2.5-flash", "/v1beta", {}),
    "Mistral": ("mistral/mistral-large-latest", "/v1", {}),
}
"""The languages it speaks that litellm can be led to: the model, the path, and what else the engine is given."""


@tool
async def look_up(order_id: str) -> dict[str, str]:
    """Look up an order."""
    return {"order_id": order_id, "at": "Munich"}


def runner_at(aimock: Aimock, way: str, **options: Any) -> Runner:
    """A runner whose agent asks the server in this way."""
    model, path, more = WAYS[way]
    engine = LiteLLMEngine(model, api_base=aimock.url + path, api_key="none", **{"attempts": 1, **more, **options})
    return Runner(Agent("Support", "Help.", tools=[look_up]), SessionStore(), engine=engine)


async def told(runner: Runner, text: str, *, streamed: bool) -> str:
    """The answer to a user's message."""
    if not streamed:
        return (await runner.run_async("c", text)).content
    async with runner.run_stream("c", text) as stream:
        async for _ in stream:
            pass
    return stream.response.content


async def history(runner: Runner) -> tuple[Message, ...]:
    """What is stored."""
    session = await runner.session_store.get("c")
    return () if session is None else tuple(session.history)


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("way", WAYS)
async def test_conversation(aimock: Aimock, way: str, streamed: bool) -> None:
    """Two turns with tool calls, one and then two at once, are had in each language, and stored."""
    runner = runner_at(aimock, way)
    for text, answer in ANSWERS.items():
        assert await told(runner, text, streamed=streamed) == answer
    assert [len(message.tool_calls) for message in await history(runner)] == [0, 1, 0, 0, 0, 2, 0, 0]
    assert aimock.asked == 4


# --- faults -----------------------------------------------------------------------------------------------------------

FAULTS: Final[dict[str, type[exceptions.EngineError]]] = {
    "rateLimitRate": exceptions.EngineRateLimitError,
    "dropRate": exceptions.EngineUnavailableError,
    "malformedRate": exceptions.EngineUnavailableError,
    "disconnectRate": exceptions.EngineUnavailableError,
}


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("way", WAYS)
async def test_fault(aimock: Aimock, way: str, fault: str, streamed: bool) -> None:
    """Whatever befalls the server, the error is of its kind, it was asked once, and the turn leaves no trace."""
    runner = runner_at(aimock, way)
    await told(runner, FIRST, streamed=streamed)
    before = await history(runner)
    aimock.suffer(**{fault: 1})
    with pytest.raises(exceptions.EngineError) as caught:
        await told(runner, SECOND, streamed=streamed)
    assert type(caught.value) is FAULTS[fault]
    assert aimock.asked == 1
    assert await history(runner) == before
    aimock.suffer()
    assert await told(runner, SECOND, streamed=streamed) == ANSWERS[SECOND]


@pytest.mark.parametrize("fault", FAULTS)
async def test_asked_again(aimock: Aimock, fault: str, caplog: pytest.LogCaptureFixture) -> None:
    """A fault that passes is asked about as often as the engine may, and said so."""
    runner = runner_at(aimock, "chat completions", attempts=2)
    aimock.suffer(**{fault: 1})
    with caplog.at_level(logging.WARNING, "chatflow.engines"), pytest.raises(FAULTS[fault]):
        await told(runner, FIRST, streamed=False)
    assert aimock.asked == 2
    assert len(caplog.records) == 1


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("way", WAYS)
async def test_late_answer(aimock: Aimock, way: str, streamed: bool) -> None:
    """An answer that takes longer than the timeout is a timeout, and the conversation goes on."""
    runner = runner_at(aimock, way, timeout=1)
    aimock.suffer(latencyMs=30_000)
    with pytest.raises(exceptions.EngineTimeoutError):
        await told(runner, FIRST, streamed=streamed)
    assert await history(runner) == ()
    aimock.suffer()
    assert await told(runner, FIRST, streamed=streamed) == ANSWERS[FIRST]
