from __future__ import annotations

import importlib.util
import itertools
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Final

import httpx
import pytest

EXAMPLES: Final = Path(__file__).parent.parent / "examples"
TAKES_LONGER: Final = pytest.mark.timeout(240)  # the demo itself waits for its server for up to a minute
RESTART: Final = "  -------- the server was stopped and started again --------"


def environment() -> dict[str, str]:
    """That of the tests, in which no model is named and the package is found even where it is not installed."""
    unset = {"MODEL", "CHAT_DB", "VERIFY_TOKEN"}
    paths = [str(EXAMPLES.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {key: value for key, value in os.environ.items() if key not in unset} | {
        "PYTHONPATH": os.pathsep.join(paths)
    }


@pytest.fixture
async def bot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[httpx.AsyncClient]:
    """A client of the bot, which runs in this process on a file of its own."""
    for name in ("MODEL", "VERIFY_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("CHAT_DB", str(tmp_path / "chat_sessions.db"))
    spec = importlib.util.spec_from_file_location("webhook_bot", EXAMPLES / "webhook_bot.py")
    assert spec is not None
    assert spec.loader is not None
    webhook_bot = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, webhook_bot)  # pydantic looks there for what annotations name
    spec.loader.exec_module(webhook_bot)
    app = webhook_bot.app
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://bot") as client,
    ):
        yield client


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
        "delivered twice, one after the other: the stored answer, and no tool run again",
        "delivered twice at once: one turn",
        "the tool ran once for both",
        "two at once in one conversation: two whole turns, in the order they came",
        "a handoff: Billing answers",
        "metadata and agent (Billing) as before",
        "delivered once more after the restart: still the stored answer",
    ):
        assert claim in guaranteed
    assert "  Billing  It is order 404: IN_TRANSIT, arriving Tomorrow." in lines[lines.index(RESTART) :]


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


async def test_a_picture_is_answered_politely_once(bot: httpx.AsyncClient) -> None:
    """A message without text is answered without asking a model, and known when it comes again."""
    picture = delivery({"id": "wamid.1", "from": "15550199", "type": "image", "image": {"id": "1"}})
    replies = [(await bot.post("/webhook", json=picture)).json()["replies"] for _ in range(2)]
    reply = {"id": "wamid.1", "to": "15550199", "text": "Sorry, I can only read text.", "agent": None}
    assert replies == [[reply | {"duplicate": False}], [reply | {"duplicate": True}]]
    assert (await bot.get("/conversations/15550199")).status_code == 404


async def test_a_status_is_ignored(bot: httpx.AsyncClient) -> None:
    """News of the bot's own messages is taken, and nobody is answered."""
    status = {"entry": [{"changes": [{"value": {"statuses": [{"id": "wamid.1", "status": "read"}]}}]}]}
    response = await bot.post("/webhook", json=status)
    assert (response.status_code, response.json()) == (200, {"replies": [], "failed": []})


async def test_a_failure_is_of_its_own_conversation_only(bot: httpx.AsyncClient) -> None:
    """What fails in one conversation is reported for redelivery, and the other conversations are answered."""
    await bot.post("/webhook", json=delivery(text("wamid.1", "15550199", "Thanks!")))
    batch = delivery(
        text("wamid.1", "15550199", "Another text under a used id"),
        text("wamid.2", "15550199", "What waits behind it"),
        text("wamid.3", "15550142", "Hello"),
    )
    response = await bot.post("/webhook", json=batch)
    assert (response.status_code, response.json()["failed"]) == (500, ["wamid.1"])
    assert [reply["id"] for reply in response.json()["replies"]] == ["wamid.3"]


async def test_a_batch_is_answered_in_order(bot: httpx.AsyncClient) -> None:
    """Messages of one conversation in one delivery are answered one after the other, as they stand there."""
    texts = ["Where is order 404?", "Thanks!", "I want a refund."]
    batch = delivery(*(text(f"wamid.{number}", "15550199", body) for number, body in enumerate(texts)))
    await bot.post("/webhook", json=batch)
    conversation = (await bot.get("/conversations/15550199")).json()
    assert [message["text"] for message in conversation["messages"] if message["role"] == "user"] == texts
    assert conversation["agent"] == "Billing"


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
