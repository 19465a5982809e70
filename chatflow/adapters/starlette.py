"""A lifespan with a runner in it, for Starlette and for what is made of it, such as FastAPI."""

from __future__ import annotations

import inspect
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, nullcontext
from typing import Any, Final

from starlette.requests import HTTPConnection
from starlette.types import Lifespan, StatefulLifespan

from chatflow.core.backend import StoreBackend
from chatflow.runner import Runner
from chatflow.running.worker import OnResponse

_in_use: Final[dict[object, StoreBackend]] = {}
"""The stores of this process's lifespans that have not ended, several times where several have one store."""


def lifespan(
    runner: Runner | Callable[[], Runner],
    *,
    on_response: OnResponse | None = None,
    name: str = "runner",
    own: Lifespan[Any] | None = None,
    grace: float = 10,
) -> StatefulLifespan[Any]:
    """``Starlette(lifespan=lifespan(runner))`` does a runner's work while the application runs, then closes its store.

    Requests find the runner in their state, under *name*: ``request.state.runner``, or `runner_of`. *on_response* and
    *grace* are those of `Runner.working`. Given a function, it makes the runner each time the application starts: a
    store that was closed stays closed, and tests start an application many times.

    *own* is the application's own lifespan. It is entered first and left last, so that *on_response* may use what it
    opens, and its state is kept. For a second runner, *own* is the first one's lifespan, under another *name*. A store
    that several lifespans have is closed by the last of them to end.

    When the application starts it raises what `Runner.working` does, `ValueError` if *own* has a state of that *name*,
    and `TypeError` if the function has made no runner.

    Raises:
        TypeError: *runner* is neither a runner nor a function.
    """
    if not isinstance(runner, Runner) and not callable(runner):
        raise TypeError(f"runner must be a Runner, or a function that makes one, not {runner!r}")

    @asynccontextmanager
    async def entered(app: Any) -> AsyncGenerator[Mapping[str, Any]]:
        async with AsyncExitStack() as stack:
            theirs: AbstractAsyncContextManager[Mapping[str, Any] | None] = nullcontext() if own is None else own(app)
            state = await stack.enter_async_context(theirs) or {}
            if name in state:
                raise ValueError(f"the lifespan's state has a {name!r} already; give this runner another name")
            mine = runner if isinstance(runner, Runner) else _made(runner())
            await stack.enter_async_context(_closed_by_the_last(mine.session_store.backend))
            await stack.enter_async_context(mine.working(on_response, grace=grace))
            yield {**state, name: mine}

    return entered


def _made(runner: object) -> Runner:
    if isinstance(runner, Runner):
        return runner
    if inspect.iscoroutine(runner):
        runner.close()  # else Python warns that nobody has awaited it
    raise TypeError(f"the function given to lifespan must return a Runner, not {type(runner).__name__}")


@asynccontextmanager
async def _closed_by_the_last(store: StoreBackend) -> AsyncGenerator[None]:
    use = object()
    _in_use[use] = store
    try:
        yield
    finally:
        del _in_use[use]
        if not any(other is store for other in tuple(_in_use.values())):
            await store.aclose()


def runner_of(connection: HTTPConnection, name: str = "runner") -> Runner:
    """The runner that `lifespan` has put into the state of a request or a WebSocket under *name*.

    Raises:
        RuntimeError: There is none: the application has no such lifespan, or its server has not run it.
    """
    runner = getattr(connection.state, name, None)
    if not isinstance(runner, Runner):
        raise RuntimeError(  # noqa: TRY004  # not the caller's argument is wrong, but how the application was made
            f"this request's state has no runner {name!r}; give the application lifespan(runner, name={name!r}), and"
            " use a server, or a test client, that runs it"
        )
    return runner
