from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Annotated, Any

import anyio
import httpx
import pytest
import uvicorn
from fastapi import Depends, FastAPI, WebSocket
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.testclient import TestClient

from chatflow import (
    Agent,
    AgentResponse,
    PendingTurn,
    Runner,
    ScriptedEngine,
    SessionStore,
    SQLiteSessionStore,
    StoreClosedError,
)
from chatflow.adapters.fastapi import CurrentRunner, get_runner, runner_named
from chatflow.adapters.starlette import lifespan, runner_of

Answers = list[tuple[str, str]]


def runner_for(name: str = "Support", store: SessionStore | SQLiteSessionStore | None = None) -> Runner:
    """A runner whose agent says its name."""
    return Runner(Agent(name, engine=ScriptedEngine(default=f"{name} here.")), store or SessionStore())


async def chat(request: Request) -> Response:
    """Answer with the runner that is in the request's state."""
    response = await request.state.runner.run_async(request.path_params["id"], "hello")
    return JSONResponse({"text": response.content})


ROUTES = [Route("/chat/{id}", chat, methods=["POST"])]


@asynccontextmanager
async def served(app: Any) -> AsyncIterator[httpx.AsyncClient]:
    """The application in a real server on loopback; its lifespan has ended at the end."""
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error"))
    task = asyncio.create_task(server.serve())
    while not server.started:
        assert not task.done()
        await anyio.lowlevel.checkpoint()
    host, port = server.servers[0].sockets[0].getsockname()[:2]
    try:
        async with httpx.AsyncClient(base_url=f"http://{host}:{port}") as client:
            yield client
    finally:
        server.should_exit = True
        await task


async def test_work_is_done(tmp_path: Path) -> None:
    """While a real server runs, what was accepted is answered; once it has stopped the store is closed."""
    answers: Answers = []
    answered = anyio.Event()

    async def on_response(turn: PendingTurn, response: AgentResponse) -> None:
        answers.append((turn.session_id, response.content))
        answered.set()

    async def webhook(request: Request) -> Response:
        await runner_of(request).accept("conversation-7", "hello", message_id="m1")
        return Response()

    runner = runner_for(store=SQLiteSessionStore(tmp_path / "chat.db"))
    routes = [Route("/webhook", webhook, methods=["POST"])]
    async with served(Starlette(routes=routes, lifespan=lifespan(runner, on_response=on_response))) as client:
        assert (await client.post("/webhook")).status_code == 200
        await answered.wait()
    assert answers == [("conversation-7", "Support here.")]
    with pytest.raises(StoreClosedError):
        await runner.get_session("conversation-7")


def test_own_lifespan() -> None:
    """An application's own lifespan is entered first and left last, and its state stays beside the runner."""
    events: list[str] = []
    store = SessionStore()

    @asynccontextmanager
    async def own(app: Starlette) -> AsyncIterator[dict[str, Any]]:
        events.append(f"opened, store {'closing' if store.is_closing else 'open'}")
        yield {"client": "theirs"}
        events.append(f"left, store {'closing' if store.is_closing else 'open'}")

    async def state(request: Request) -> Response:
        return JSONResponse({"client": request.state.client, "runner": request.state.runner is runner})

    runner = runner_for(store=store)
    with TestClient(Starlette(routes=[Route("/", state)], lifespan=lifespan(runner, own=own))) as client:
        assert client.get("/").json() == {"client": "theirs", "runner": True}
    assert events == ["opened, store open", "left, store closing"]


def test_own_lifespan_without_state() -> None:
    """An application's own lifespan need not have a state."""

    @asynccontextmanager
    async def own(app: Starlette) -> AsyncIterator[None]:
        yield

    with TestClient(Starlette(routes=ROUTES, lifespan=lifespan(runner_for(), own=own))) as client:
        assert client.post("/chat/7").json() == {"text": "Support here."}


def test_several_starts() -> None:
    """A function makes a runner for each start of the application."""
    app = Starlette(routes=ROUTES, lifespan=lifespan(runner_for))
    for _ in range(2):
        with TestClient(app) as client:
            assert client.post("/chat/7").json() == {"text": "Support here."}


@pytest.mark.parametrize("shared", [True, False])
def test_several_runners(shared: bool) -> None:
    """Runners have names of their own; a store that two of them have is open until both have ended their work."""
    first = SessionStore()
    second = first if shared else SessionStore()
    open_until: list[bool] = []

    class Watched(Runner):
        @asynccontextmanager
        async def working(self, *arguments: Any, **options: Any) -> AsyncIterator[None]:
            async with super().working(*arguments, **options):
                yield
            open_until.append(not self.session_store.is_closing)

    def watched(name: str, store: SessionStore) -> Runner:
        return Watched(Agent(name, engine=ScriptedEngine(default=f"{name} here.")), store)

    async def both(request: Request) -> Response:
        names = ("support", "billing")
        responses = [await runner_of(request, name).run_async(name, "hello") for name in names]
        return JSONResponse([response.content for response in responses])

    support = lifespan(watched("Support", first), name="support")
    billing = lifespan(watched("Billing", second), name="billing", own=support)
    with TestClient(Starlette(routes=[Route("/", both)], lifespan=billing)) as client:
        assert client.get("/").json() == ["Support here.", "Billing here."]
    assert open_until == [True, True]
    assert first.is_closing
    assert second.is_closing


def test_several_applications() -> None:
    """A store that two applications have is open until both have ended, whichever is first."""
    store = SessionStore()
    first, second = (TestClient(Starlette(routes=ROUTES, lifespan=lifespan(runner_for(store=store)))) for _ in range(2))
    with second:
        with first:
            assert first.post("/chat/7").json() == {"text": "Support here."}
        assert second.post("/chat/7").json() == {"text": "Support here."}
    assert store.is_closing


def test_a_store_that_own_has_not_opened() -> None:
    """A store is closed also where the application's own lifespan has another runner on it."""
    store = SessionStore()

    @asynccontextmanager
    async def own(app: Starlette) -> AsyncIterator[dict[str, Any]]:
        yield {"admin": runner_for("Admin", store)}
        assert store.is_closing

    with TestClient(Starlette(lifespan=lifespan(runner_for(store=store), own=own))):
        assert not store.is_closing
    assert store.is_closing


@pytest.mark.parametrize("made", [7, None, "coroutine"])
def test_a_function_that_makes_no_runner(made: object) -> None:
    """What the function makes must be a runner, and an error says what it was when the application starts."""

    async def make() -> Runner:
        return runner_for()

    function: Any = make if made == "coroutine" else lambda: made
    app = Starlette(lifespan=lifespan(function))
    kind = "coroutine" if made == "coroutine" else type(made).__name__
    with pytest.raises(TypeError, match=f"must return a Runner, not {kind}"), TestClient(app):
        pass


@pytest.mark.parametrize("runner", [None, 7])
def test_no_runner(runner: Any) -> None:
    """What is neither a runner nor a function is refused where it was written."""
    with pytest.raises(TypeError, match=f"runner must be a Runner, or a function that makes one, not {runner}"):
        lifespan(runner)


def test_one_name_twice() -> None:
    """Two runners of one name are an error when the application starts, and the first one's store is closed."""
    store = SessionStore()
    twice = lifespan(runner_for("Billing"), own=lifespan(runner_for(store=store)))
    with pytest.raises(ValueError, match="has a 'runner' already"), TestClient(Starlette(lifespan=twice)):
        pass
    assert store.is_closing


def test_no_lifespan() -> None:
    """A request without a runner says what is missing."""

    async def find(request: Request) -> Response:
        runner_of(request, "billing")
        return Response()

    client = TestClient(Starlette(routes=[Route("/", find)]))
    with pytest.raises(
        RuntimeError, match=r"no runner 'billing'; give the application lifespan\(runner, name='billing'"
    ):
        client.get("/")


def fastapi_app(**options: Any) -> FastAPI:
    """An application that answers with its runner, in requests and WebSockets."""
    app = FastAPI(**options)

    @app.post("/chat/{session_id}")
    async def chat(session_id: str, text: str, runner: CurrentRunner) -> dict[str, str]:
        return {"text": (await runner.run_async(session_id, text)).content}

    @app.websocket("/chat/{session_id}")
    async def converse(websocket: WebSocket, session_id: str, runner: CurrentRunner) -> None:
        await websocket.accept()
        response = await runner.run_async(session_id, await websocket.receive_text())
        await websocket.send_text(response.content)
        await websocket.close()

    return app


def test_fastapi() -> None:
    """A path operation, and a WebSocket, get the application's runner by its annotation, which no schema shows."""
    with TestClient(fastapi_app(lifespan=lifespan(runner_for()))) as client:
        assert client.post("/chat/7", params={"text": "hello"}).json() == {"text": "Support here."}
        with client.websocket_connect("/chat/7") as websocket:
            websocket.send_text("hello")
            assert websocket.receive_text() == "Support here."
        parameters = client.get("/openapi.json").json()["paths"]["/chat/{session_id}"]["post"]["parameters"]
        assert [parameter["name"] for parameter in parameters] == ["session_id", "text"]


async def test_fastapi_on_a_server() -> None:
    """It does so in a real server."""
    async with served(fastapi_app(lifespan=lifespan(runner_for()))) as client:
        response = await client.post("/chat/7", params={"text": "hello"})
        assert response.json() == {"text": "Support here."}


def test_fastapi_overrides() -> None:
    """A test puts another runner in its place, without any lifespan."""
    app = fastapi_app()
    app.dependency_overrides[get_runner] = lambda: runner_for("Test")
    assert TestClient(app).post("/chat/7", params={"text": "hello"}).json() == {"text": "Test here."}


async def owned(owner: str, runner: Annotated[Runner, Depends(runner_named("billing"))]) -> Runner:
    """That owner's runner, as an application writes it."""
    return runner.for_owner(owner)


def test_fastapi_owners_and_names() -> None:
    """Dependencies build on it: an owner's runner, a runner of another name."""
    app = FastAPI(lifespan=lifespan(runner_for("Billing"), name="billing"))

    @app.post("/chat/{session_id}")
    async def chat(session_id: str, runner: Annotated[Runner, Depends(owned)]) -> list[str]:
        await runner.run_async(session_id, "hello")
        session = await runner.get_session(session_id)
        assert session is not None
        return [message.text for message in session.history]

    with TestClient(app) as client:
        for owner in ("ada", "bob"):
            assert client.post("/chat/7", params={"owner": owner}).json() == ["hello", "Billing here."]
