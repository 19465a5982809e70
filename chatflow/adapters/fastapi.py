"""The runner of `chatflow.adapters.starlette.lifespan` as a FastAPI dependency."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Annotated, TypeAlias

from fastapi import Depends
from starlette.requests import HTTPConnection

from chatflow.adapters.starlette import lifespan, runner_of
from chatflow.runner import Runner

__all__ = ["CurrentRunner", "get_runner", "lifespan", "runner_named"]


async def get_runner(connection: HTTPConnection) -> Runner:
    """The application's runner; ``app.dependency_overrides[get_runner]`` puts another in its place."""
    return runner_of(connection)


CurrentRunner: TypeAlias = Annotated[Runner, Depends(get_runner)]
"""``async def chat(text: str, runner: CurrentRunner)``: the application's runner, in a request or a WebSocket."""


def runner_named(name: str) -> Callable[[HTTPConnection], Awaitable[Runner]]:
    """A dependency on one of several runners, as ``Annotated[Runner, Depends(runner_named("billing"))]``."""

    async def get(connection: HTTPConnection) -> Runner:
        return runner_of(connection, name)

    return get
