"""How providers fail over HTTP, in whatever language they are asked, and what an engine is to make of it."""

from __future__ import annotations

import logging
from collections.abc import Awaitable
from typing import Any, Final, TypeAlias

import pytest

from chatflow import EngineReply, exceptions
from tests.model_server import DISCONNECT, Status, error
from tests.responses_server import ResponsesServer

KEY: Final = "sk-the-key"
QUESTION: Final = "the secret question"

Failure: TypeAlias = tuple[Any, type[exceptions.EngineError], int | None]
"""What the server answers, and the kind of error that comes of it, with its status."""

FAILURES: Final[tuple[Failure, ...]] = (
    (error(429, f"{KEY} {QUESTION}", code="rate_limit_exceeded"), exceptions.EngineRateLimitError, 429),
    (error(429, f"{KEY} {QUESTION}"), exceptions.EngineRateLimitError, 429),
    (error(500, f"{KEY} {QUESTION}"), exceptions.EngineUnavailableError, 500),
    (error(503, f"{KEY} {QUESTION}"), exceptions.EngineUnavailableError, 503),
    (error(408, f"{KEY} {QUESTION}"), exceptions.EngineTimeoutError, 408),
    (error(401, f"Incorrect API key provided: {KEY}"), exceptions.EngineAuthenticationError, 401),
    (error(403, f"{KEY} {QUESTION}"), exceptions.EngineAuthenticationError, 403),
    (error(404, f"no model {KEY} {QUESTION}"), exceptions.EngineBadRequestError, 404),
    (error(400, f"{KEY} {QUESTION}", code=QUESTION), exceptions.EngineBadRequestError, 400),
    (error(413, f"{KEY} {QUESTION}"), exceptions.EngineBadRequestError, 413),
    (error(422, f"{KEY} {QUESTION}"), exceptions.EngineBadRequestError, 422),
    (Status(200, b"{nope"), exceptions.EngineUnavailableError, None),
    (DISCONNECT, exceptions.EngineUnavailableError, None),
)


async def fails(
    asking: Awaitable[EngineReply],
    server: ResponsesServer,
    kind: type[exceptions.EngineError],
    status: int | None,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Await *asking*: it is to fail as it says, after one request, and nobody may be told the key or the question."""
    with caplog.at_level(logging.INFO), pytest.raises(exceptions.EngineError) as caught:
        await asking
    assert type(caught.value) is kind
    assert (caught.value.status, caught.value.model) == (status, "openai/test")
    assert isinstance(caught.value.__context__, Exception)
    assert len(server.requests) == 1
    told = f"{caught.value} {caplog.text} {capsys.readouterr()}"
    for unwanted in (KEY, QUESTION, "Give Feedback"):
        assert unwanted not in told
