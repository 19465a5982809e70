"""chatflow, as a subject."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from chatflow import (
    Agent,
    BaseSessionStore,
    ChatflowError,
    EngineReply,
    EngineRequest,
    Message,
    Role,
    Runner,
    SessionContext,
    SQLiteSessionStore,
    ToolCall,
    ToolResult,
)
from chatflow.engines.litellm_form import to_litellm_messages
from tests.peers.subject import AGENT, Bot, Call, Conversation, Model, Result, Said, Store, Tool, instructions


class Chatflow:
    """chatflow itself."""

    error: type[Exception] = ChatflowError

    @asynccontextmanager
    async def open(self, db_path: str | Path, max_turns: int = 40) -> AsyncIterator[Store]:
        """A store on that file, or in memory."""
        async with SQLiteSessionStore(db_path, default_max_turns=max_turns) as store:
            yield _Store(store)


class _Store:
    def __init__(self, store: BaseSessionStore) -> None:
        self._store = store

    async def conversation(self, session_id: str) -> Conversation:
        return _Conversation(await self._store.get_or_create(session_id, Agent(AGENT)))

    async def session_ids(self) -> list[str]:
        return [info.session_id for info in (await self._store.list_sessions()).items]

    async def delete(self, session_id: str) -> None:
        await self._store.delete(session_id)

    def bot(self, model: Model, *, tools: Sequence[Tool] = (), specialists: Sequence[str] = ()) -> Bot:
        others = [Agent(name, instructions(name)) for name in specialists]
        agent = Agent(AGENT, instructions(AGENT), tools=tools, handoffs=others)
        return _Bot(Runner(agent, self._store, engine=_Engine(model)))


class _Conversation:
    def __init__(self, session: SessionContext) -> None:
        self._session = session

    @property
    def history(self) -> list[Said]:
        return [_said(message) for message in self._session.history]

    async def add(self, said: Said) -> None:
        await self._session.add_message(_message(said))


class _Bot:
    def __init__(self, runner: Runner) -> None:
        self._runner = runner

    async def answer(self, session_id: str, text: str, message_id: str | None = None) -> str | None:
        response = await self._runner.run_async(session_id, text, message_id=message_id)
        return None if response.duplicate else response.content


class _Engine:
    def __init__(self, model: Model) -> None:
        self._model = model

    async def generate(self, request: EngineRequest) -> EngineReply:
        reply = await self._model(to_litellm_messages(request.messages, request.agent.model))
        if isinstance(reply, str):
            return EngineReply(text=reply)
        return EngineReply(tool_calls=[ToolCall(id=call.id, name=call.name, args=call.args) for call in reply])


def _message(said: Said) -> Message:
    return Message(
        Role(said.role),
        said.text,
        tool_calls=[ToolCall(id=call.id, name=call.name, args=call.args) for call in said.calls],
        tool_results=[
            ToolResult(tool_call_id=result.call_id, name=result.name, content=result.content) for result in said.results
        ],
    )


def _said(message: Message) -> Said:
    return Said(
        message.role.value,
        message.content if message.content is None else message.text,
        tuple(Call(call.id, call.name, call.args) for call in message.tool_calls),
        tuple(Result(result.tool_call_id, result.name, result.content) for result in message.tool_results),
    )
