"""Answers streamed as server-sent events.

    uvicorn fastapi_service:app --app-dir examples --timeout-graceful-shutdown 5
    curl -N localhost:8000/messages -H 'X-User: ann' --json '{"id": "1", "text": "Where is order 404?"}'
    curl localhost:8000/messages -H 'X-User: ann'

The client numbers its messages. Whoever loses the connection sends the same message again, and gets the answer of the
first time, or waits for it: a turn goes on without its reader. One whose server is killed goes on in the next server.

A server that is told to stop gives its streams the five seconds of the command, and then its turns ten to end. One
that has not ended by then goes on when its message is sent again. Without the option uvicorn would wait for streams as
long as they take, and say to nobody that it is to stop.

Set in the environment: CHAT_DB, the SQLite file (./service.db); MODEL, the model that answers, and its provider's key
(without a model a script answers).
"""

import contextlib
import logging
import math
import os
from collections.abc import AsyncIterator
from typing import Annotated

import anyio
from anyio.abc import TaskGroup
from anyio.streams.memory import MemoryObjectSendStream
from fastapi import Depends, FastAPI, Header, Request
from fastapi.sse import EventSourceResponse, ServerSentEvent
from pydantic import BaseModel, Field

from chatflow import (
    Agent,
    Done,
    HandedOff,
    LiteLLMEngine,
    Role,
    Runner,
    ScriptedEngine,
    SQLiteSessionStore,
    TextDelta,
    ToolStarted,
    last_result,
    tool,
)
from chatflow.adapters.fastapi import CurrentRunner, lifespan

logging.basicConfig(level=logging.INFO, format="%(levelname)s: %(name)s: %(message)s")
logger = logging.getLogger("fastapi_service")
MODEL = os.environ.get("MODEL")
CONVERSATION = "main"


@tool(idempotent=True)  # it only reads: a call that was cut off by a kill is made again
async def check_order_status(order_id: str) -> str:
    """Check shipment tracking for an order ID."""
    logger.info("looking up order %r", order_id)
    await anyio.sleep(0.5)  # stands for the carrier's service
    return f"Order {order_id} is in transit, and arrives tomorrow."


billing = Agent("Billing", "Billing specialist. Be brief.", model=MODEL or "gpt-4o")
support = Agent(
    "Support",
    "Help with orders. Hand over what is about money. Be brief.",
    model=MODEL or "gpt-4o",
    tools=[check_order_status],
    handoffs=[billing],
)


def scripted() -> ScriptedEngine:
    """What the agents say where no model is named."""
    engine = ScriptedEngine(default="Tell me an order's number, and I will look where it is.")
    engine.when(agent="Billing", reply="Billing here. Which invoice is it?")
    engine.when(r"order (?P<order_id>\d+)", call="check_order_status")
    engine.when(result_of="check_order_status", reply=last_result)
    engine.when("invoice|charged", call="transfer_to_billing", args={"reason": "a charge"})
    return engine


engine = LiteLLMEngine() if MODEL else scripted()
store = SQLiteSessionStore(os.environ.get("CHAT_DB", "./service.db"), default_max_turns=30)
store.require_owner()
runner = Runner(support, store, engine)


@contextlib.asynccontextmanager
async def answering(app: FastAPI) -> AsyncIterator[dict[str, TaskGroup]]:
    """Where turns run, which outlive their requests. The store, closed before this, gives them ten seconds to end."""
    if isinstance(engine, LiteLLMEngine):
        await engine.warm_up()
    async with anyio.create_task_group() as tasks:
        yield {"tasks": tasks}


app = FastAPI(lifespan=lifespan(runner, own=answering))  # also finishes what a killed server has left


class Inbound(BaseModel):
    """What a user says; the client makes up the *id*, and uses it again when it sends the same message again."""

    id: str = Field(min_length=1)
    text: str


def runner_of_user(runner: CurrentRunner, user: Annotated[str, Header(alias="X-User", min_length=1)]) -> Runner:
    """The runner over one user's conversations. The header stands for your log-in: take the user from that."""
    return runner.for_owner(user)


UserRunner = Annotated[Runner, Depends(runner_of_user)]


async def answer(message: Inbound, runner: Runner, told: MemoryObjectSendStream[ServerSentEvent]) -> None:
    """Run a message's turn to its end, and tell what happens in it to whoever still listens."""

    def tell(event: str, **data: object) -> None:
        with contextlib.suppress(anyio.BrokenResourceError):  # the client has gone, and the turn goes on
            told.send_nowait(ServerSentEvent(event=event, data=data))

    with told:
        try:
            async with runner.run_stream(CONVERSATION, message.text, message_id=message.id) as stream:
                async for event in stream:
                    match event:
                        case TextDelta(text):
                            tell("text", text=text)
                        case ToolStarted(call):
                            tell("tool", name=call.name)
                        case HandedOff(_, agent):
                            tell("agent", name=agent)
                        case Done(response):
                            tell(
                                "done",
                                text=response.content,
                                agent=response.active_agent_name,
                                duplicate=response.duplicate,
                            )
        except Exception as error:
            logger.exception("a message was not answered")
            tell("error", kind=type(error).__name__)  # its text is for the log: not all of it is the client's business


@app.post("/messages", response_class=EventSourceResponse)
async def say(message: Inbound, runner: UserRunner, request: Request) -> AsyncIterator[ServerSentEvent]:
    """Answer a message: pieces of text as they come, and at last ``done`` with all of it, which is stored by then."""
    told, events = anyio.create_memory_object_stream[ServerSentEvent](math.inf)
    tasks: TaskGroup = request.state.tasks
    tasks.start_soon(answer, message, runner, told)
    with events:
        async for event in events:
            yield event


@app.get("/messages")
async def conversation(runner: UserRunner) -> list[dict[str, str]]:
    """What user and agents have said."""
    session = await runner.get_session(CONVERSATION)
    history = () if session is None else session.history
    said = (message for message in history if message.text and message.role in {Role.USER, Role.MODEL})
    return [{"name": message.agent_name or message.role.value, "text": message.text} for message in said]
