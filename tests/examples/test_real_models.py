"""With MODEL set, each example asks a model through litellm: here OpenAI's language, spoken by a server on loopback."""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Final

import anyio
import httpx
import pytest

from tests.examples.running import EXAMPLES, environment, served
from tests.model_server import HANG, ModelServer, Partly, error, model_server, tool_calls

KEY: Final = "sk-of-the-test"

[OPTIONS] = re.findall(
    r"uvicorn fastapi_service:app --app-dir examples(.*)", (EXAMPLES / "fastapi_service.py").read_text(encoding="utf-8")
)
"""What the service's own command says."""

pytestmark = pytest.mark.timeout(120)  # litellm takes seconds to load, in each process that asks


@pytest.fixture
async def model() -> AsyncIterator[ModelServer]:
    """The model."""
    async with model_server() as server:
        yield server


def named(model: ModelServer) -> dict[str, str]:
    """What has an example ask it."""
    return {
        "MODEL": "gpt-4o",
        "OPENAI_API_KEY": KEY,
        "OPENAI_API_BASE": model.url,
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    }


async def printed(model: ModelServer, name: str, *args: str, folder: Path) -> list[str]:
    """The lines that an example prints, whose agents ask the model."""
    command = [sys.executable, str(EXAMPLES / name), *args]
    done = await anyio.run_process(command, env=environment(**named(model)), cwd=folder, check=False)
    assert (done.returncode, done.stderr) == (0, b"")
    assert set(model.keys) == {KEY}
    assert {request["model"] for request in model.requests} == {"gpt-4o"}
    return done.stdout.decode().splitlines()


async def test_swarm(model: ModelServer, tmp_path: Path) -> None:
    """The agents of the swarm hand over as their models say."""
    model.script(
        tool_calls(("a", "plan_journey", '{"city": "Kyoto", "nights": 2}')),
        tool_calls(("b", "book_flight", "{}")),
        tool_calls(("c", "book_hotel", "{}")),
        "All is booked.",
    )
    lines = await printed(model, "swarm.py", "Kyoto, two nights", folder=tmp_path)
    assert lines[-2] == "Hotels: All is booked."
    assert "'flight': 'JL 408', 'fare': 940, 'hotel': 'Ryokan Kamo', 'room': 260" in lines[-1]


async def test_human_approval(model: ModelServer, tmp_path: Path) -> None:
    """A model's call waits for a person, and the model is told what came of it."""
    model.script(tool_calls(("call_7", "refund", '{"order_id": "404", "euros": 20}')))
    asked = await printed(model, "human_approval.py", "say", "ann", "It is broken.", folder=tmp_path)
    assert asked == ["call_7 waits for approval: refund {'order_id': '404', 'euros': 20}"]
    model.script("You will have it tomorrow.")
    decided = await printed(model, "human_approval.py", "approve", "ann", "call_7", folder=tmp_path)
    assert decided[-1] == "Support: You will have it tomorrow."
    assert "20 euros are on their way." in str(model.requests[0]["messages"][-1])


async def test_several_workers(model: ModelServer, tmp_path: Path) -> None:
    """What a worker was killed over is asked again by the next one."""
    model.script(*["It arrives tomorrow."] * 10)
    lines = await printed(model, "several_workers.py", "3", "1", folder=tmp_path)
    assert lines[-1] == "each message has one answer, in its place"


async def test_persistent_conversation(model: ModelServer, tmp_path: Path) -> None:
    """The conversation in a file of the application's own is with the model."""
    model.script("Three days in autumn.")
    lines = await printed(model, "persistent_conversation.py", folder=tmp_path)
    assert lines[1] == "Guide: Three days in autumn."


async def test_webhook_bot(model: ModelServer, tmp_path: Path) -> None:
    """The bot sends what the model answers."""
    model.script("It arrives tomorrow.")
    message = {"id": "wamid.1", "from": "15550199", "type": "text", "text": {"body": "Where is it?"}}
    async with served("webhook_bot:app", tmp_path, **named(model)) as server:
        body = {"entry": [{"changes": [{"value": {"messages": [message]}}]}]}
        assert (await server.client.post("/webhook", json=body)).json() == {"wamid.1": "new"}
        await server.until("to 15550199, answering wamid.1: 'It arrives tomorrow.'")


async def test_fastapi_service(model: ModelServer, tmp_path: Path) -> None:
    """The service streams the model's words."""
    model.script("It arrives tomorrow.")
    async with served("fastapi_service:app", tmp_path, **named(model)) as server:
        body = {"id": "1", "text": "Where is it?"}
        answer = await server.client.post("/messages", json=body, headers={"X-User": "ann"})
    assert [line for line in answer.text.splitlines() if line.startswith("data: ")] == [
        'data: {"text": "It"}',
        'data: {"text": " arrives"}',
        'data: {"text": " tomorrow."}',
        'data: {"text": "It arrives tomorrow.", "agent": "Support", "duplicate": false}',
    ]


@pytest.mark.parametrize(
    ("name", "args"),
    [
        ("swarm", ["Lisbon, two nights"]),
        ("persistent_conversation", []),
        ("human_approval", ["say", "ann", "Hello"]),
        ("several_workers", ["3", "1"]),
    ],
)
async def test_wrong_key(model: ModelServer, name: str, args: list[str], tmp_path: Path) -> None:
    """An example that its model's provider turns away says so in a line, and ends."""
    model.script(error(401, "Incorrect API key provided", code="invalid_api_key"))
    command = [sys.executable, str(EXAMPLES / f"{name}.py"), *args]
    done = await anyio.run_process(command, env=environment(**named(model)), cwd=tmp_path, check=False)
    [said] = done.stderr.decode().splitlines()
    assert said.startswith(f"{name}: ")
    assert "the provider refuses the API key" in said
    assert done.returncode == 1


@pytest.mark.slow  # the server waits for seconds, as it promises
async def test_fastapi_service_is_stopped(model: ModelServer, tmp_path: Path) -> None:
    """By its own command, a service that is told to stop ends, also while a client reads an answer that does not."""
    body, user = {"id": "1", "text": "Where is it?"}, {"X-User": "ann"}
    model.script(Partly("It arrives tomorrow.", 3, HANG), "It arrives tomorrow.")
    async with served("fastapi_service:app", tmp_path, *OPTIONS.split(), **named(model)) as server:
        async with server.client.stream("POST", "/messages", json=body, headers=user) as answer:
            lines = answer.aiter_lines()
            while not (await anext(lines)).startswith("data: "):
                pass
            server.process.terminate()
            with contextlib.suppress(httpx.RemoteProtocolError):
                async for line in lines:
                    assert not line.startswith(("event: done", "event: error"))  # it is cut off, and has not ended
        await server.process.wait()
    async with served("fastapi_service:app", tmp_path, **named(model)) as server:
        again = await server.client.post("/messages", json=body, headers=user)
    assert '"text": "It arrives tomorrow.", "agent": "Support", "duplicate": false' in again.text
