from __future__ import annotations

import contextlib
import importlib.util
import itertools
import os
import re
import signal
import socket
import sqlite3
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import anyio
import httpx
import pytest
from anyio.streams.memory import MemoryObjectReceiveStream

from chatflow import EngineUnavailableError, Runner, ScriptedEngine
from tests.examples.running import EXAMPLES, environment

TAKES_LONGER: Final = pytest.mark.timeout(240)  # the demo itself waits for its server for up to a minute
RESTART: Final = "  -------- the server was stopped and started again --------"
KILL: Final = "  -------- the server was killed while a tool was at work, and started again --------"
AT_MOST: Final = 30
"""Seconds that a test waits for the bot: where pytest's own limit ends it, anyio's plugin waits on for ever."""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The bot's module, on a file of its own."""
    for name in ("MODEL", "VERIFY_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("CHAT_DB", str(tmp_path / "chat_sessions.db"))
    spec = importlib.util.spec_from_file_location("webhook_bot", EXAMPLES / "webhook_bot.py")
    assert spec is not None
    assert spec.loader is not None
    webhook_bot = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, webhook_bot)  # pydantic looks there for what annotations name
    spec.loader.exec_module(webhook_bot)
    return webhook_bot


Sent = MemoryObjectReceiveStream[tuple[str, str, str | None]]


@pytest.fixture
async def sent(module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Sent]:
    """What the provider is given: the phone, the text, and the message that is answered."""
    put, get = anyio.create_memory_object_stream[tuple[str, str, str | None]](100)
    with put, get:

        async def send(phone: str, text: str, message_id: str | None) -> None:
            await put.send((phone, text, message_id))

        monkeypatch.setattr(module, "send", send)
        yield get


@pytest.fixture
async def client(module: ModuleType) -> AsyncIterator[httpx.AsyncClient]:
    """A client of the bot, in this process, whose lifespan has not begun: it can be asked, and nobody works."""
    transport = httpx.ASGITransport(module.app)
    async with module.store, httpx.AsyncClient(transport=transport, base_url="http://bot") as client:
        yield client


@pytest.fixture
async def bot(module: ModuleType, client: httpx.AsyncClient) -> AsyncIterator[httpx.AsyncClient]:
    """A client of the bot, which runs in this process."""
    async with module.app.router.lifespan_context(module.app):
        yield client


async def received(sent: Sent) -> tuple[str, str, str | None]:
    """The next that the provider is given."""
    with anyio.fail_after(AT_MOST):
        return await sent.receive()


def delivery(*messages: Any) -> dict[str, Any]:
    """The messages in WhatsApp's wrapping."""
    return {"entry": [{"changes": [{"value": {"messages": list(messages)}}]}]}


def text(message_id: str, sender: str, body: str) -> dict[str, Any]:
    """A text as WhatsApp delivers it."""
    return {"id": message_id, "from": sender, "type": "text", "text": {"body": body}}


@TAKES_LONGER
def test_the_demo_shows_that_every_guarantee_held() -> None:
    """The demo ends well, on a page that a reader takes in, with every guarantee checked."""
    done = subprocess.run(
        [sys.executable, EXAMPLES / "demo.py"], env=environment(), capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    lines = done.stdout.splitlines()
    assert len(lines) <= 40
    assert max(map(len, lines)) <= 100
    assert "FAIL" not in done.stdout
    guaranteed = "\n".join(line for line in lines if line.startswith("  ok"))
    for claim in (
        "delivered twice, one after the other: known, nothing changes, and no tool is run again",
        "delivered twice at once: one turn",
        "of a message delivered twice the tool runs once",
        "two at once in one conversation: two whole turns, in the order they came",
        "metadata and agent (Billing) as before",
        "delivered once more after the restart: still known",
        "a handoff holds: Billing answers after it too",
        "killed in the middle of a tool call: what it had acknowledged is answered, in order",
        "the call that was cut off, and it alone, was made again",
        "each of the 11 messages got one answer",
    ):
        assert claim in guaranteed
    assert "  Billing  It is order 404: IN_TRANSIT, arriving Tomorrow." in lines[lines.index(RESTART) :]
    at_the_kill = lines.index(KILL)
    assert lines[at_the_kill - 1] == "  user     And where is order 504?"
    assert lines[at_the_kill + 2] == "  Support  I have looked up order 504: IN_TRANSIT, arriving Tomorrow."


@TAKES_LONGER
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_demo_leaves_no_server(number: signal.Signals) -> None:
    """A demo that is interrupted or told to stop ends its server first."""
    with subprocess.Popen(
        [sys.executable, EXAMPLES / "demo.py"], env=environment(), stdout=subprocess.PIPE, text=True
    ) as demo:
        assert demo.stdout is not None
        found = re.search(r"http://127\.0\.0\.1:(\d+)", demo.stdout.readline())
        assert found is not None
        demo.send_signal(number)
        assert "Interrupted; the server has ended." in demo.stdout.read()
    assert demo.returncode == 130
    with socket.socket() as client:
        assert client.connect_ex(("127.0.0.1", int(found[1]))) != 0


@TAKES_LONGER
def test_a_demo_whose_server_does_not_start_says_why(tmp_path: Path) -> None:
    """A demo that can't start its server fails, and shows the server's own words."""
    (tmp_path / "starlette.py").write_text("raise ImportError('there is no starlette today')\n")
    env = environment()
    env["PYTHONPATH"] = os.pathsep.join([str(tmp_path), env["PYTHONPATH"]])
    done = subprocess.run([sys.executable, EXAMPLES / "demo.py"], env=env, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (1, "")
    assert "The demo failed: DemoError: the server did not start" in done.stdout
    assert "there is no starlette today" in done.stdout


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"\xff",
        b"[]",
        b"{}",
        b"[" * 100_000,
        b'{"entry": 5}',
        b'{"entry": [{"changes": [{"value": {"messages": [{"id": "wamid.1"}]}}]}]}',
        b'{"entry": [{"changes": [{"value": {"messages": [{"id": "", "from": "15550199"}]}}]}]}',
        b'{"entry": [{"changes": [{"value": {"messages": [{"id": "wamid.1", "from": "\\ud800"}]}}]}]}',
        b'{"entry": [{"changes": [{"value": {"messages": [{"id": "wamid.1", "from": "1", "text": {"body": 5}}]}}]}]}',
    ],
    ids=itertools.count(),
)
async def test_what_is_no_delivery_is_refused(bot: httpx.AsyncClient, body: bytes) -> None:
    """A body that is no delivery is answered with 400 and the reason."""
    response = await bot.post("/webhook", content=body)
    assert response.status_code == 400
    assert response.json()["error"].startswith("not a delivery: ")


async def test_a_refused_delivery_leaves_no_trace(bot: httpx.AsyncClient) -> None:
    """Where one message of a delivery is malformed, none of it is answered."""
    broken = delivery(text("wamid.1", "15550199", "Where is order 404?"), {"id": "wamid.2"})
    assert (await bot.post("/webhook", json=broken)).status_code == 400
    assert (await bot.get("/conversations/15550199")).status_code == 404


async def test_a_picture_is_answered_politely_once(bot: httpx.AsyncClient, sent: Sent) -> None:
    """A message without text is answered without asking a model, and known when it comes again."""
    picture = delivery({"id": "wamid.1", "from": "15550199", "type": "image", "image": {"id": "1"}})
    responses = [await bot.post("/webhook", json=picture) for _ in range(2)]
    assert [response.status_code for response in responses] == [200, 200]
    assert [response.json() for response in responses] == [{"wamid.1": "new"}, {"wamid.1": "duplicate"}]
    assert sent.receive_nowait() == ("15550199", "Sorry, I can only read text.", "wamid.1")
    assert sent.statistics().current_buffer_used == 0
    assert (await bot.get("/conversations/15550199")).status_code == 404


async def test_a_status_is_ignored(bot: httpx.AsyncClient, sent: Sent) -> None:
    """News of the bot's own messages is taken, and nobody is answered."""
    status = {"entry": [{"changes": [{"value": {"statuses": [{"id": "wamid.1", "status": "read"}]}}]}]}
    response = await bot.post("/webhook", json=status)
    assert (response.status_code, response.json()) == (200, {})
    assert sent.statistics().current_buffer_used == 0


async def test_what_is_acknowledged_is_answered_later(
    module: ModuleType, client: httpx.AsyncClient, sent: Sent
) -> None:
    """A message is acknowledged once it is stored, whoever works; the answer is sent once somebody does."""
    question = delivery(text("wamid.1", "15550199", "Where is order 404?"))
    responses = [await client.post("/webhook", json=question) for _ in range(2)]
    assert [response.status_code for response in responses] == [200, 200]
    assert [response.json() for response in responses] == [{"wamid.1": "new"}, {"wamid.1": "duplicate"}]
    [turn] = await module.store.pending_turns()
    assert (turn.message_id, turn.state, turn.user_message) == ("wamid.1", "accepted", "Where is order 404?")
    async with module.app.router.lifespan_context(module.app):
        answer = await received(sent)
    assert answer == ("15550199", "I have looked up order 404: IN_TRANSIT, arriving Tomorrow.", "wamid.1")
    assert sent.statistics().current_buffer_used == 0


async def test_what_can_not_be_stored_is_to_be_delivered_again(
    module: ModuleType, client: httpx.AsyncClient, tmp_path: Path
) -> None:
    """A fault of the storage is answered with 500; delivered again, all is stored once, and nothing is overtaken."""
    await module.store.pending_turns()  # the file is there
    batch = delivery(*(text(f"wamid.{number}", "15550199", f"Number {number}") for number in (1, 2, 3)))
    fault = "CREATE TRIGGER fault BEFORE INSERT ON chatflow_turns WHEN new.message_id = 'wamid.2'"
    with contextlib.closing(sqlite3.connect(tmp_path / "chat_sessions.db", isolation_level=None)) as file:
        file.execute(f"{fault} BEGIN SELECT RAISE(ABORT, 'no room'); END")
        response = await client.post("/webhook", json=batch)
        assert (response.status_code, response.json()) == (500, {"error": "message wamid.2 was not stored"})
        file.execute("DROP TRIGGER fault")
    response = await client.post("/webhook", json=batch)
    assert response.status_code == 200
    assert response.json() == {"wamid.1": "duplicate", "wamid.2": "new", "wamid.3": "new"}
    assert [turn.message_id for turn in await module.store.pending_turns()] == ["wamid.1", "wamid.2", "wamid.3"]


async def test_a_used_id_with_another_text_is_refused_for_good(client: httpx.AsyncClient) -> None:
    """A message that could never be stored is not asked for again, and the rest of its delivery is stored."""
    await client.post("/webhook", json=delivery(text("wamid.1", "15550199", "Thanks!")))
    batch = delivery(
        text("wamid.1", "15550199", "Another text under a used id"),
        text("wamid.2", "15550199", "What comes behind it"),
        text("wamid.3", "15550142", "Hello"),
    )
    response = await client.post("/webhook", json=batch)
    assert response.status_code == 200
    assert response.json() == {"wamid.1": "refused", "wamid.2": "new", "wamid.3": "new"}


async def test_what_can_be_no_id_is_refused_for_good(client: httpx.AsyncClient) -> None:
    """A message whose id the store would not take is not asked for again, and the rest of its delivery is stored."""
    picture = {"id": "\0picture", "from": "15550199", "type": "image", "image": {"id": "1"}}
    batch = delivery(text("\0text", "15550199", "Hello"), picture, text("wamid.1", "15550199", "Hello"))
    response = await client.post("/webhook", json=batch)
    assert response.status_code == 200
    assert response.json() == {"\0text": "refused", "\0picture": "refused", "wamid.1": "new"}


async def test_a_message_that_was_given_up_is_refused_for_good(
    module: ModuleType, client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A message that was tried as often as it may be is not asked for again."""
    engine = ScriptedEngine(default=EngineUnavailableError("out of order", model="gpt-4o"))
    runner = Runner(module.support, module.store, engine, max_attempts=1)
    monkeypatch.setattr(module, "runner", runner)
    question = delivery(text("wamid.1", "15550199", "Where is order 404?"))
    await client.post("/webhook", json=question)
    async with runner.working():
        with anyio.fail_after(AT_MOST):
            while [turn.state for turn in await module.store.pending_turns()] != ["dead"]:
                await anyio.lowlevel.checkpoint()
    response = await client.post("/webhook", json=question)
    assert (response.status_code, response.json()) == (200, {"wamid.1": "refused"})


async def test_a_batch_is_answered_in_order(bot: httpx.AsyncClient, sent: Sent) -> None:
    """Messages of one conversation in one delivery are answered one after the other, as they stand there."""
    texts = ["Where is order 404?", "Thanks!", "I want a refund."]
    batch = delivery(*(text(f"wamid.{number}", "15550199", body) for number, body in enumerate(texts)))
    await bot.post("/webhook", json=batch)
    assert [(await received(sent))[2] for _ in texts] == ["wamid.0", "wamid.1", "wamid.2"]
    conversation = (await bot.get("/conversations/15550199")).json()
    assert [message["text"] for message in conversation["messages"] if message["role"] == "user"] == texts
    assert conversation["agent"] == "Billing"
    assert conversation["metadata"] == {"channel": "whatsapp", "phone": "15550199"}


@pytest.mark.parametrize(
    ("token", "answer"), [("chatflow", (200, "1158201444")), ("guessed", (403, "wrong hub.verify_token"))]
)
async def test_the_webhook_proves_itself_to_the_provider(
    bot: httpx.AsyncClient, token: str, answer: tuple[int, str]
) -> None:
    """The challenge is returned to whoever knows the token, and to nobody else."""
    asked = {"hub.mode": "subscribe", "hub.verify_token": token, "hub.challenge": "1158201444"}
    response = await bot.get("/webhook", params=asked)
    assert (response.status_code, response.text) == answer
