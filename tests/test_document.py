"""The code of the documentation that chatflow keeps true, as written there, with `await` added.

"Sesiones y Estado de Conversación" describes chatflow-agent; the only other change is the package's name. What a sample
leaves open is closed at the test's end.
"""

from __future__ import annotations

import asyncio
import json
import sqlite3
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, Final

import pytest
from blockbuster import BlockBuster

from chatflow import LiteLLMEngine, ScriptedEngine
from tests.model_server import ModelServer, model_server, tool_calls

CALL: Final = tool_calls(("call_1", "check_order_status", json.dumps({"order_id": "404"})))
ANSWER: Final = "Order 404 is in transit and arrives tomorrow."


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, empty: the samples name files without one."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(autouse=True)
def fence(fence: BlockBuster) -> BlockBuster:
    """Lets two stats through: litellm looks for certificates when it makes its first client."""
    fence.functions["os.stat"].can_block_in("litellm/llms/custom_httpx/http_handler.py", {"get_ssl_configuration"})
    return fence


@pytest.fixture
async def server() -> AsyncIterator[ModelServer]:
    """A server that answers as OpenAI does; litellm, whose clients outlive each call, closes them before it stops."""
    async with model_server() as server:
        engine = LiteLLMEngine()
        await engine.warm_up()
        yield server
        await engine._litellm.close_litellm_async_clients()


@pytest.fixture
def engine(server: ModelServer) -> LiteLLMEngine:
    """Asks the server, whatever model an agent names."""
    return LiteLLMEngine(model="openai/gpt-4o", api_base=server.url, api_key="sk-loopback")


def columns(file: str) -> dict[str, set[str]]:
    """The tables of a file, and their columns."""
    with sqlite3.connect(file) as connection:
        tables = [name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        found = {table: {row[1] for row in connection.execute(f"PRAGMA table_info({table})")} for table in tables}
    connection.close()
    return found


# --- La Arquitectura de SessionContext ---


def test_session_context() -> None:
    """Section "La Arquitectura de SessionContext": a session on its own, with its agent and metadata."""
    from chatflow import Agent
    from chatflow.core.memory import SessionContext

    agent = Agent(name="Assistant", instructions="Helpful bot", model="gpt-4o")

    session = SessionContext(
        session_id="user-session-1001",
        initial_agent=agent,
        max_turns=40,
        metadata={"user_id": "cust_882", "channel": "whatsapp"},
    )

    assert session.active_agent.name == "Assistant"
    assert session.metadata["channel"] == "whatsapp"


# --- El Algoritmo de Poda por Turnos Completos ---


async def test_pruning() -> None:
    """Section "El Algoritmo de Poda por Turnos Completos": system messages stay, then come the last whole turns."""
    from chatflow import Agent, Message, Role, ToolCall, ToolResult
    from chatflow.core.memory import SessionContext

    session = SessionContext("s", Agent("Bot"), max_turns=2)
    for number in range(4):
        await session.add_message(Message(Role.SYSTEM, f"rule {number}"))
        await session.add_message(Message(Role.USER, f"q{number}"))
        await session.add_message(Message(Role.MODEL, tool_calls=[ToolCall(id=f"c{number}", name="look_up")]))
        result = ToolResult(tool_call_id=f"c{number}", name="look_up", content=number)
        await session.add_message(Message(Role.TOOL, tool_results=[result]))
    session._prune_history()

    turn = [Role.USER, Role.MODEL, Role.TOOL]
    assert [message.role for message in session.history] == [Role.SYSTEM] * 4 + turn * 2
    assert [message.text for message in session.history if message.role is Role.USER] == ["q2", "q3"]


# --- Almacenamiento de Sesiones ---


async def test_session_store() -> None:
    """Section "Almacenamiento en Memoria (SessionStore)": sessions are created when they are asked for."""
    from chatflow import Agent, Runner, SessionStore

    store = SessionStore(default_max_turns=40)
    agent = Agent(name="Bot", instructions="Assistant", model="gpt-4o")
    runner = Runner(starting_agent=agent, session_store=store)

    # Las sesiones se crean bajo demanda
    session = await store.get_or_create(session_id="session-alpha", default_agent=agent)
    assert session.session_id == "session-alpha"

    assert await runner.get_session("session-alpha") is session


async def test_sqlite_session_store() -> None:
    """Section "Almacenamiento Persistente en SQLite (SQLiteSessionStore)": conversations survive a restart."""
    from chatflow import SQLiteSessionStore

    # Almacenamiento persistente en base de datos local SQLite
    sqlite_store = SQLiteSessionStore(
        db_path="conversations.db",
        default_max_turns=40,
    )

    from chatflow import Agent, Message, Role

    async with sqlite_store:
        session = await sqlite_store.get_or_create("s", Agent("Bot"))
        await session.add_message(Message(Role.USER, "hello"))
    async with SQLiteSessionStore(db_path="conversations.db", default_max_turns=40) as store:
        again = await store.get("s")
        assert again is not None
        assert [message.text for message in again.history] == ["hello"]


@pytest.mark.parametrize(
    ("table", "documented"),
    [
        ("chatflow_sessions", {"session_id", "active_agent_name", "metadata_json", "created_at", "updated_at"}),
        ("chatflow_messages", {"message_json"}),
        ("chatflow_processed_messages", {"message_id", "processed_at"}),
    ],
)
async def test_tables(table: str, documented: set[str]) -> None:
    """Section "Esquema de la Base de Datos Relacional": the three tables are there, with the columns it names."""
    from chatflow import SQLiteSessionStore

    async with SQLiteSessionStore(db_path="conversations.db") as store:
        await store.mark_message_processed("m1")
    assert columns("conversations.db")[table] >= documented


async def test_messages_go_with_their_session() -> None:
    """Section "Esquema de la Base de Datos Relacional": messages are deleted in cascade."""
    from chatflow import Agent, Message, Role, SQLiteSessionStore

    async with SQLiteSessionStore(db_path="conversations.db") as store:
        session = await store.get_or_create("s", Agent("Bot"))
        await session.add_message(Message(Role.USER, "hello"))
        await store.delete("s")
    with sqlite3.connect("conversations.db") as connection:
        [(_, _, parent, _, _, _, on_delete, _)] = connection.execute("PRAGMA foreign_key_list(chatflow_messages)")
        assert (parent, on_delete) == ("chatflow_sessions", "CASCADE")
        assert connection.execute("SELECT count(*) FROM chatflow_messages").fetchone() == (0,)
    connection.close()


async def test_agent_resolver() -> None:
    """Section "El Patrón Agent Resolver": the stored name leads to the live agent, by the runner or by a resolver."""
    from chatflow import Agent, Runner, SQLiteSessionStore

    billing = Agent(name="Billing", instructions="Billing specialist", model="gpt-4o")
    support = Agent(name="Support", instructions="Support", handoffs=[billing], model="gpt-4o")

    # Antes del reinicio
    async with SQLiteSessionStore(db_path="agents.db") as store:
        session = await store.get_or_create("session-101", support)
        await session.set_active_agent(billing)

    store = SQLiteSessionStore(db_path="agents.db")

    # Runner vincula automáticamente el resolutor de su registro interno
    runner = Runner(starting_agent=support, session_store=store)

    bound = await runner.get_session("session-101")
    assert bound is not None
    assert bound.active_agent is billing

    # Si cargas sesiones independientemente fuera de Runner:
    store.set_agent_resolver(lambda name: billing if name == "Billing" else support)
    session_101 = await store.get("session-101")
    assert session_101 is not None
    assert session_101.active_agent.name in ["Billing", "Support"]

    assert session_101.active_agent is billing
    await store.aclose()


async def test_stand_in_without_a_resolver(caplog: pytest.LogCaptureFixture) -> None:
    """Section "Falta de Agent Resolvers al Reconectar": without one, an agent of that name without tools stands in."""
    from chatflow import Agent, SQLiteSessionStore

    billing = Agent("Billing", tools=[print_invoice])
    async with SQLiteSessionStore(db_path="agents.db") as store:
        await store.get_or_create("session-101", billing)
    async with SQLiteSessionStore(db_path="agents.db") as store:
        session = await store.get("session-101")
        assert session is not None
        assert (session.active_agent.name, session.active_agent.tools) == ("Billing", ())
    assert "set_agent_resolver" in caplog.text


def print_invoice() -> str:
    """Print the invoice."""
    return "printed"


# --- Deduplicación de Mensajes para Webhooks ---


async def test_deduplication() -> None:
    """Section "Deduplicación de Mensajes para Webhooks": an id that was marked is known for 192 hours."""
    from chatflow.core.memory import DEFAULT_DEDUP_TTL_HOURS, SessionStore

    # El TTL predeterminado es 192 horas (8 días), superando la ventana de reintento de 7 días de WhatsApp
    assert DEFAULT_DEDUP_TTL_HOURS == 192

    store = SessionStore()

    ran = 0
    for _ in range(2):
        msg_id = "wamid.HBgLMjAyNjEwMzAA"
        if not await store.is_message_processed(msg_id):
            await store.mark_message_processed(msg_id)
            # Procesar el turno de forma segura sin ejecuciones duplicadas
            ran += 1
    assert ran == 1
    assert store.dedup_ttl_hours == 192


# --- Diferencias de Versión y Características de Pre-lanzamiento ---


async def test_atomic_rollback() -> None:
    """Section "Versión Estable (v0.3.4)": a session can be rolled back, also by the length its history had."""
    from chatflow import Agent, Message, Role, SessionContext

    session = SessionContext("s", Agent("Bot"))
    await session.add_message(Message(Role.USER, "hello"))
    before, length = session.checkpoint(), len(session.history)
    await session.add_message(Message(Role.MODEL, "wrong"))
    await session.rollback_to(length)
    assert [message.text for message in session.history] == ["hello"]
    await session.rollback_to(before)
    assert [message.text for message in session.history] == ["hello"]


async def test_threads() -> None:
    """Section "Mejoras de Pre-lanzamiento", E/S bloqueante: a store on a file has at most four threads of its own."""
    from chatflow import Agent, Message, Role, SQLiteSessionStore

    before = set(threading.enumerate())
    async with SQLiteSessionStore(db_path="conversations.db") as store:
        for number in range(20):
            session = await store.get_or_create(f"session-{number}", Agent("Bot"))
            await session.add_message(Message(Role.USER, "hello"))
        assert 1 <= len(set(threading.enumerate()) - before) <= 4


@pytest.mark.parametrize("db_path", [":memory:", "file::memory:?cache=shared", "file:chats?mode=memory&cache=shared"])
async def test_memory_has_no_threads(folder: Path, db_path: str) -> None:
    """Section "Mejoras de Pre-lanzamiento", Detección Efímera: memory is recognised, and has no thread and no file."""
    from chatflow import Agent, Message, Role, SQLiteSessionStore

    before = set(threading.enumerate())  # of which some may be ending still
    async with SQLiteSessionStore(db_path=db_path) as store:
        session = await store.get_or_create("s", Agent("Bot"))
        await session.add_message(Message(Role.USER, "hello"))
        assert set(threading.enumerate()) <= before
    assert await asyncio.to_thread(lambda: list(folder.iterdir())) == []


async def test_session_deleted_error() -> None:
    """Section "Mejoras de Pre-lanzamiento", SessionDeletedError: whoever uses a deleted session is told."""
    from chatflow import Agent, Message, Role, SessionDeletedError, SQLiteSessionStore

    async with SQLiteSessionStore(db_path="conversations.db") as store:
        session = await store.get_or_create("session-101", Agent("Bot"))
        await store.delete("session-101")
        with pytest.raises(SessionDeletedError, match="session-101"):
            await session.add_message(Message(Role.USER, "still there?"))


@pytest.mark.parametrize("turns", [0, -1])
def test_strict_validation(turns: int) -> None:
    """Section "Mejoras de Pre-lanzamiento", Validación Estricta: max_turns below 1 is a ValueError, at once."""
    from chatflow import Agent, SessionContext, SessionStore, SQLiteSessionStore

    with pytest.raises(ValueError, match="max_turns must be at least 1"):
        SessionContext("s", Agent("Bot"), max_turns=turns)
    for store in (SessionStore, SQLiteSessionStore):
        with pytest.raises(ValueError, match="default_max_turns must be at least 1"):
            store(default_max_turns=turns)


# --- Ejemplo Completo: Sesión Persistente para Webhook ---


async def test_complete_example(engine: LiteLLMEngine, server: ModelServer, capsys: pytest.CaptureFixture[str]) -> None:
    """Section "Ejemplo Completo: Sesión Persistente para Webhook": a tool is called, and a duplicate is skipped."""
    from chatflow import Agent, Runner, SQLiteSessionStore, tool

    @tool
    def check_order_status(order_id: str) -> dict[str, str]:
        """Check shipment tracking for an order ID."""
        return {"order_id": order_id, "status": "IN_TRANSIT", "eta": "Tomorrow"}

    agent = Agent(
        name="OrderTrackingAgent",
        instructions="Assist customers with order queries. Use check_order_status.",
        tools=[check_order_status],
        model="gemini-2.5-flash",
    )

    # En v0.3.x, utiliza una ruta de archivo para almacenamiento SQLite persistente
    store = SQLiteSessionStore(db_path="./chat_sessions.db", default_max_turns=30)
    runner = Runner(starting_agent=agent, session_store=store, engine=engine)

    async def handle_inbound_webhook(user_phone: str, message_text: str, webhook_msg_id: str) -> str | None:
        # 1. Protección contra duplicados
        if await store.is_message_processed(webhook_msg_id):
            print(f"Skipping duplicate webhook: {webhook_msg_id}")  # noqa: T201  # as in the document
            return None

        await store.mark_message_processed(webhook_msg_id)

        # 2. Ejecutar turno con sesión persistente
        response = await runner.run_async(
            session_id=user_phone,
            user_message=message_text,
            metadata={"channel": "whatsapp", "phone": user_phone},
        )
        return response.content

    server.script(CALL, ANSWER)

    # Ejecutar turno simulado
    res = await handle_inbound_webhook("+15550199", "Where is order 404?", "msg_id_001")
    print("Webhook Response:", res)  # noqa: T201  # as in the document

    assert await handle_inbound_webhook("+15550199", "Where is order 404?", "msg_id_001") is None
    assert capsys.readouterr().out.splitlines() == [
        f"Webhook Response: {ANSWER}",
        "Skipping duplicate webhook: msg_id_001",
    ]
    assert_order_was_looked_up(server)
    await store.aclose()
    await assert_stored("./chat_sessions.db", "+15550199", {"channel": "whatsapp", "phone": "+15550199"})


async def test_complete_example_with_message_id(engine: LiteLLMEngine, server: ModelServer) -> None:
    """Section "Ejemplo Completo", with *message_id*: marking is the runner's, and the duplicate gets the answer."""
    from chatflow import Agent, AgentResponse, Runner, SQLiteSessionStore, tool

    @tool
    def check_order_status(order_id: str) -> dict[str, str]:
        """Check shipment tracking for an order ID."""
        return {"order_id": order_id, "status": "IN_TRANSIT", "eta": "Tomorrow"}

    agent = Agent(name="OrderTrackingAgent", instructions="Assist customers.", tools=[check_order_status])

    server.script(CALL, ANSWER)
    async with SQLiteSessionStore("chat_sessions.db", default_max_turns=30) as store:
        runner = Runner(starting_agent=agent, session_store=store, engine=engine)

        async def handle_inbound_webhook(user_phone: str, message_text: str, webhook_msg_id: str) -> AgentResponse:
            return await runner.run_async(user_phone, message_text, message_id=webhook_msg_id)

        first = await handle_inbound_webhook("+15550199", "Where is order 404?", "msg_id_001")
        again = await handle_inbound_webhook("+15550199", "Where is order 404?", "msg_id_001")

    assert (first.content, first.duplicate, first.tool_calls_executed) == (ANSWER, False, ("check_order_status",))
    assert (again.content, again.duplicate) == (ANSWER, True)
    assert_order_was_looked_up(server)
    await assert_stored("chat_sessions.db", "+15550199", {})


def assert_order_was_looked_up(server: ModelServer) -> None:
    """The model was asked twice: with the tool, and again with what the tool gave."""
    first, second = server.requests
    assert [each["function"]["name"] for each in first["tools"]] == ["check_order_status"]
    assert [message["role"] for message in first["messages"]] == ["system", "user"]
    assert [message["role"] for message in second["messages"]] == ["system", "user", "assistant", "tool"]
    result = second["messages"][-1]
    assert result["tool_call_id"] == "call_1"
    assert json.loads(result["content"]) == {"order_id": "404", "status": "IN_TRANSIT", "eta": "Tomorrow"}


async def assert_stored(db_path: str, session_id: str, metadata: dict[str, Any]) -> None:
    """After a restart the whole turn is there, once."""
    from chatflow import SQLiteSessionStore

    async with SQLiteSessionStore(db_path) as store:
        session = await store.get(session_id)
        assert session is not None
        assert [message.role for message in session.history] == ["user", "model", "tool", "model"]
        assert session.history[-1].text == ANSWER
        assert session.metadata == metadata


# --- Errores Comunes y Buenas Prácticas ---


async def test_unsupported_arguments() -> None:
    """Section "Pasar Argumentos No Soportados a SQLiteSessionStore": busy_timeout is a TypeError."""
    from chatflow import SQLiteSessionStore

    # [INCORRECTO]: "busy_timeout" no es un parámetro aceptado
    make: Callable[..., SQLiteSessionStore] = SQLiteSessionStore
    with pytest.raises(TypeError, match="busy_timeout"):
        make(db_path="app.db", busy_timeout=5000)  # TypeError!

    # [CORRECTO]: Pasa solo db_path y default_max_turns
    store = SQLiteSessionStore(db_path="app.db", default_max_turns=50)

    assert store.default_max_turns == 50


CUTS: Final[dict[str, Callable[[Any], object]]] = {
    "del": lambda history: history.__delitem__(0),
    "pop": lambda history: history.pop(),
    "clear": lambda history: history.clear(),
    "slice": lambda history: history.__setitem__(slice(0, 1), []),
}


@pytest.mark.parametrize("cut", CUTS)
async def test_history_is_not_cut_by_hand(cut: str) -> None:
    """Section "Recortar el Historial Manualmente": a history refuses it, and names what to use instead."""
    from chatflow import Agent, Message, Role, SessionContext

    session = SessionContext("s", Agent("Bot"))
    await session.add_message(Message(Role.USER, "hello"))
    with pytest.raises(TypeError, match="rollback_to"):
        CUTS[cut](session.history)
    assert len(session.history) == 1


async def test_runner_is_the_resolver() -> None:
    """Section "Falta de Agent Resolvers al Reconectar": with a runner, the agent that answers has its tools."""
    from chatflow import Agent, Runner, SQLiteSessionStore

    async def run(text: str, *replies: Any) -> str:
        billing = Agent("Billing", tools=[print_invoice])
        agent = Agent("Support", handoffs=[billing])
        async with SQLiteSessionStore(db_path="app.db", default_max_turns=50) as store:
            response = await Runner(agent, store, ScriptedEngine(replies)).run_async("s", text)
        return response.active_agent_name

    call = ScriptedEngine.call
    assert await run("a bill", call("transfer_to_billing"), "Billing here.") == "Billing"
    assert await run("the invoice", call("print_invoice"), "Here it is.") == "Billing"
