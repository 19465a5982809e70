"""chatflow-agent, as a subject: the real package, from the package index. Only the slow run imports this module.

It is typed, and our gates run without it, so that what comes from it is `Any` here.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from importlib import import_module
from pathlib import Path
from typing import Any, Final

from tests.peers.subject import AGENT, Bot, Call, Conversation, Model, Result, Said, Store, Tool, instructions

peer: Final[Any] = import_module("chatflow_agent")
engines: Final[Any] = import_module("chatflow_agent.core.engines")


class ChatflowAgent:
    """chatflow-agent. Its methods block; they are called on the loop, as its own runner does."""

    error: type[Exception] = peer.ChatFlowError

    @asynccontextmanager
    async def open(self, db_path: str | Path, max_turns: int = 40) -> AsyncIterator[Store]:
        """A store on that file; it keeps no connection open, so there is nothing to close."""
        yield _Store(peer.SQLiteSessionStore(db_path, default_max_turns=max_turns))


class _Store:
    def __init__(self, store: Any) -> None:
        self._store = store

    async def conversation(self, session_id: str) -> Conversation:
        return _Conversation(self._store.get_or_create(session_id, peer.Agent(AGENT, instructions(AGENT))))

    async def session_ids(self) -> list[str]:
        return list(self._store.list_sessions())

    async def delete(self, session_id: str) -> None:
        self._store.delete(session_id)

    def bot(self, model: Model, *, tools: Sequence[Tool] = (), specialists: Sequence[str] = ()) -> Bot:
        others = [peer.Agent(name, instructions(name)) for name in specialists]
        agent = peer.Agent(AGENT, instructions(AGENT), tools=list(tools), handoffs=others)
        return _Bot(self._store, peer.Runner(agent, self._store, engine=_Engine(model)))


class _Conversation:
    def __init__(self, session: Any) -> None:
        self._session = session

    @property
    def history(self) -> list[Said]:
        return [_said(message) for message in self._session.history]

    async def add(self, said: Said) -> None:
        self._session.add_message(_message(said))


class _Bot:
    def __init__(self, store: Any, runner: Any) -> None:
        self._store = store
        self._runner = runner

    async def answer(self, session_id: str, text: str, message_id: str | None = None) -> str | None:
        # As its own WhatsApp channel does.
        if message_id is not None and not self._store.record_processed_message(message_id):
            return None
        response = await self._runner.run_async(session_id=session_id, user_message=text)
        return str(response.content)


class _Engine:
    """Asks *model* what its engine for OpenAI would ask."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._openai = engines.OpenAIEngine(api_key="unused")

    async def generate_turn_async(self, agent: Any, history: Any) -> Any:
        reply = await self._model(self._openai._format_history_to_messages(agent.get_instructions(), history))
        if isinstance(reply, str):
            return engines.EngineTurnResult(text=reply)
        return engines.EngineTurnResult(tool_calls=[_call(call) for call in reply])


def _call(call: Call) -> Any:
    return peer.ToolCall(id=call.id, name=call.name, args=dict(call.args))


def _message(said: Said) -> Any:
    results = [
        peer.ToolResult(tool_call_id=result.call_id, name=result.name, content=result.content)
        for result in said.results
    ]
    return peer.Message(
        role=peer.Role(said.role),
        content=said.text,
        tool_calls=[_call(call) for call in said.calls] or None,
        tool_results=results or None,
    )


def _said(message: Any) -> Said:
    return Said(
        message.role.value,
        message.content,
        tuple(Call(call.id, call.name, call.args) for call in message.tool_calls or ()),
        tuple(Result(result.tool_call_id, result.name, result.content) for result in message.tool_results or ()),
    )
