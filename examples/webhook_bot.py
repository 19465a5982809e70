"""A WhatsApp bot whose conversations survive restarts: ``uvicorn webhook_bot:app --app-dir examples``.

The webhook stores a message and answers 200. What is stored is answered after that, also if the server was killed in
between; what fails each time is given up, logged, and listed by ``store.pending_turns()``.

Set in the environment: CHAT_DB, the SQLite file (./chat_sessions.db); MODEL, the model that answers, and its provider's
key (without a model a script answers); VERIFY_TOKEN, what the webhook is registered with.
"""

import contextlib
import logging
import os
from collections.abc import AsyncIterator

import anyio
from pydantic import AliasPath, BaseModel, Field, ValidationError
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from chatflow import (
    Agent,
    AgentResponse,
    ChatflowError,
    EngineRequest,
    LiteLLMEngine,
    PendingTurn,
    Role,
    Runner,
    ScriptedEngine,
    SQLiteSessionStore,
    StoreError,
    tool,
)

logging.basicConfig(level=logging.INFO, format="%(levelname)s: %(name)s: %(message)s")
logger = logging.getLogger("webhook_bot")
MODEL = os.environ.get("MODEL")


@tool(idempotent=True)  # it only reads: a call that was cut off by a kill is made again, with the same idempotency_key
async def check_order_status(order_id: str) -> dict[str, str]:
    """Check shipment tracking for an order ID."""
    logger.info("looking up order %r", order_id)
    await anyio.sleep(0.5)  # stands for the carrier's service
    return {"order_id": order_id, "status": "IN_TRANSIT", "eta": "Tomorrow"}


billing = Agent(name="Billing", instructions="Billing specialist. Be brief.", model=MODEL or "gpt-4o")
support = Agent(
    name="Support",
    instructions="Help with orders; use check_order_status. Hand over what is about money. Be brief.",
    tools=[check_order_status],
    handoffs=[billing],
    model=MODEL or "gemini-2.5-flash",
)


def scripted() -> ScriptedEngine:
    """What the agents say where no model is named."""

    def order(request: EngineRequest) -> str:
        results = (result for message in reversed(request.messages) for result in message.tool_results)
        looked_up = (each for each in results if each.name == check_order_status.name and not each.is_error)
        found = next((result.content for result in looked_up), None)
        return "order {order_id}: {status}, arriving {eta}".format(**found) if found else "no order I know of"

    engine = ScriptedEngine(default="Tell me an order's number, and I will look where it is.")
    engine.when(r"order (?P<order_id>\w*\d+)", agent="Support", call="check_order_status")
    engine.when(result_of="check_order_status", reply=lambda request: f"I have looked up {order(request)}.")
    engine.when("thank", agent="Support", reply="You are welcome.")
    engine.when("charged|refund|invoice", agent="Support", call="transfer_to_billing", args={"reason": "a charge"})
    engine.when("which", agent="Billing", reply=lambda request: f"It is {order(request)}.")
    engine.when(agent="Billing", reply=lambda request: f"Billing here. This is about {order(request)}?")
    return engine


engine = LiteLLMEngine() if MODEL else scripted()
store = SQLiteSessionStore(os.environ.get("CHAT_DB", "./chat_sessions.db"), default_max_turns=30)
runner = Runner(starting_agent=support, session_store=store, engine=engine)


class Inbound(BaseModel):
    """One message of a user; a picture, a recording, a place have no *text*."""

    id: str = Field(min_length=1)
    sender: str = Field(min_length=1, alias="from")
    text: str | None = Field(default=None, validation_alias=AliasPath("text", "body"))


class Change(BaseModel):
    """Messages, or statuses of our own ones, which nobody here waits for."""

    messages: list[Inbound] = Field(default=[], validation_alias=AliasPath("value", "messages"))


class Entry(BaseModel):
    """What happened to one business account."""

    changes: list[Change]


class Delivery(BaseModel):
    """The body of one request of the WhatsApp Cloud API, as far as it is read here."""

    entry: list[Entry]


async def send(phone: str, text: str, message_id: str | None) -> None:
    """Send the answer to a message; a real bot posts it to the provider's API here, with the id as what it answers."""
    logger.info("to %s, answering %s: %r", phone, message_id, text)


async def send_answer(turn: PendingTurn, response: AgentResponse) -> None:
    """Send what the agents have answered: at least once, so twice if the server is killed right after sending it.

    Where the provider's API takes an idempotency key, ``turn.message_id`` makes that once. After an exception it is
    called again until it returns, so let none out that would come each time.
    """
    await send(turn.metadata["phone"], response.content, turn.message_id)


async def accept(message: Inbound) -> str:
    """Store a message, to be answered by whoever is `working`; returns what it is: new or a duplicate."""
    if message.text is not None:
        receipt = await runner.accept(
            session_id=message.sender,
            user_message=message.text,
            message_id=message.id,
            metadata={"channel": "whatsapp", "phone": message.sender},
        )
        return "duplicate" if receipt.duplicate else "new"
    if not await store.mark_message_processed(message.id, session_id=message.sender):
        return "duplicate"
    # At most once: a kill before this line loses no more than an excuse.
    await send(message.sender, "Sorry, I can only read text.", message.id)
    return "new"


async def webhook(request: Request) -> Response:
    """Store all messages of a delivery, in their order; 200 says that each is stored, or never will be."""
    try:
        delivery = Delivery.model_validate_json(await request.body())
    except ValidationError as error:
        return JSONResponse({"error": f"not a delivery: {error.errors()[0]['msg']}"}, 400)
    outcomes: dict[str, str] = {}
    for message in (found for entry in delivery.entry for change in entry.changes for found in change.messages):
        try:
            outcomes[message.id] = await accept(message)
        except StoreError:
            # The provider delivers all of it again: what is stored by now will be known, and nothing is overtaken.
            logger.exception("message %s was not stored", message.id)
            return JSONResponse({"error": f"message {message.id} was not stored"}, 500)
        except (ChatflowError, ValueError):
            # Its id was used with another text, or can be no id; it was given up, or its conversation is damaged:
            # delivered again, it would be refused again, and the whole delivery with it.
            logger.exception("message %s is refused", message.id)
            outcomes[message.id] = "refused"
    return JSONResponse(outcomes)


async def verify(request: Request) -> Response:
    """Show the provider, when the webhook is registered, that it is ours."""
    asked = request.query_params
    if asked.get("hub.verify_token") != os.environ.get("VERIFY_TOKEN", "chatflow"):
        return PlainTextResponse("wrong hub.verify_token", 403)
    return PlainTextResponse(asked.get("hub.challenge", ""))


async def conversation(request: Request) -> Response:
    """Show a conversation as it is stored. This is for the demo: a real bot shows it to nobody else."""
    session = await store.get(request.path_params["session_id"])
    if session is None:
        return JSONResponse({"error": "no such conversation"}, 404)
    messages = [
        {
            "at": message.timestamp.isoformat(),
            "role": message.role,
            "name": message.agent_name if message.role is Role.MODEL else message.role,
            "text": message.text,
            "calls": [{"name": call.name, "args": call.args} for call in message.tool_calls],
            "results": [{"name": result.name, "content": result.content} for result in message.tool_results],
        }
        for message in session.history
    ]
    return JSONResponse({"agent": session.active_agent_name, "metadata": dict(session.metadata), "messages": messages})


@contextlib.asynccontextmanager
async def lifespan(app: Starlette) -> AsyncIterator[None]:
    """Answer what is stored, by an earlier server too, as long as this one runs; then close the store."""
    async with store:
        if isinstance(engine, LiteLLMEngine):
            await engine.warm_up()
        async with runner.working(on_response=send_answer):
            yield


app = Starlette(
    routes=[
        Route("/webhook", webhook, methods=["POST"]),
        Route("/webhook", verify, methods=["GET"]),
        Route("/conversations/{session_id}", conversation, methods=["GET"]),
    ],
    lifespan=lifespan,
)
