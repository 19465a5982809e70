from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from contextlib import aclosing
from pathlib import Path
from typing import Any, Final

import httpx

from tests.examples.running import Served, served

APP: Final = "fastapi_service:app"
WHERE: Final = "Where is order 404?"
ANSWER: Final = "Order 404 is in transit, and arrives tomorrow."


async def said(server: Served, message_id: str, text: str, *, user: str = "ann") -> AsyncGenerator[tuple[str, Any]]:
    """The events that answer a message, each its kind and its data."""
    body = {"id": message_id, "text": text}
    async with server.client.stream("POST", "/messages", json=body, headers={"X-User": user}) as response:
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/event-stream")
        kind = ""
        async for line in response.aiter_lines():
            name, _, value = line.partition(": ")
            if name == "event":
                kind = value
            elif name == "data":
                yield kind, json.loads(value)


async def events(server: Served, message_id: str, text: str, *, user: str = "ann") -> list[tuple[str, Any]]:
    """All of them."""
    return [event async for event in said(server, message_id, text, user=user)]


async def leave_in_the_middle(server: Served) -> None:
    """Ask where an order is, and hang up while the tool is at work."""
    async with aclosing(said(server, "1", WHERE)) as answer:
        assert (await anext(answer))[0] == "tool"
    await server.until("looking up order '404'")


async def conversation(server: Served, user: str = "ann") -> list[dict[str, str]]:
    """What is stored of a user's conversation."""
    response = await server.client.get("/messages", headers={"X-User": user})
    stored: list[dict[str, str]] = response.raise_for_status().json()
    return stored


STORED: Final = [{"name": "user", "text": WHERE}, {"name": "Support", "text": ANSWER}]


async def test_streamed(tmp_path: Path) -> None:
    """An answer comes in pieces, and at last whole, when it is stored; sent again, it comes whole at once."""
    async with served(APP, tmp_path) as server:
        first = await events(server, "1", WHERE)
        assert first[0] == ("tool", {"name": "check_order_status"})
        assert "".join(data["text"] for kind, data in first if kind == "text") == ANSWER
        assert first[-1] == ("done", {"text": ANSWER, "agent": "Support", "duplicate": False})
        assert await conversation(server) == STORED
        again = await events(server, "1", WHERE)
        assert again == [("done", {"text": ANSWER, "agent": "Support", "duplicate": True})]
        assert server.log.count("looking up order") == 1


async def test_client_gone(tmp_path: Path) -> None:
    """The turn of a client that hangs up goes on; the message sent again waits for it, and nothing is done twice."""
    async with served(APP, tmp_path) as server:
        await leave_in_the_middle(server)
        again = await events(server, "1", WHERE)
        assert again == [("done", {"text": ANSWER, "agent": "Support", "duplicate": True})]
        assert await conversation(server) == STORED
        assert server.log.count("looking up order") == 1


async def test_server_killed(tmp_path: Path) -> None:
    """What a killed server had begun is answered by the next one, whether or not its client asks again."""
    async with served(APP, tmp_path) as server:
        await leave_in_the_middle(server)
        server.process.kill()
    async with served(APP, tmp_path) as server:
        while await conversation(server) != STORED:
            pass
        again = await events(server, "1", WHERE)
        assert again == [("done", {"text": ANSWER, "agent": "Support", "duplicate": True})]


async def test_server_stopped(tmp_path: Path) -> None:
    """A server that is told to stop first ends what its clients have begun."""
    async with served(APP, tmp_path) as server:
        await leave_in_the_middle(server)
    async with served(APP, tmp_path) as server:
        assert await conversation(server) == STORED


async def test_users_apart(tmp_path: Path) -> None:
    """Each user has a conversation, also where two clients number their messages alike."""
    async with served(APP, tmp_path) as server:
        await events(server, "1", WHERE)
        kinds = [kind for kind, _ in await events(server, "1", "I was charged twice.", user="ben")]
        assert kinds[:2] == ["tool", "agent"]
        assert (await conversation(server, "ben"))[-1]["name"] == "Billing"
        assert await conversation(server) == STORED


async def test_refused(tmp_path: Path) -> None:
    """A used id, and what can be none, are refused by name, and the log has the reason; strangers do not get so far."""
    async with served(APP, tmp_path) as server:
        await events(server, "1", "Hello")
        assert await events(server, "1", "Another text") == [("error", {"kind": "MessageMismatchError"})]
        assert await events(server, "\0", "Hello") == [("error", {"kind": "ValueError"})]
        await server.until("was used before with another user message")
        stranger = await server.client.get("/messages")
        assert stranger.status_code == httpx.codes.UNPROCESSABLE_ENTITY
