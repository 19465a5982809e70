"""An engine whose service keeps histories itself, named as an A2A agent names them: by a context and a task."""

from __future__ import annotations

import itertools
from typing import Any, Final

import attrs

from chatflow.core.agent import Agent
from chatflow.core.engine import Engine, EngineReply, EngineRequest
from chatflow.core.messages import Message, Role
from chatflow.core.service import id_key
from chatflow.engines.scripted import ScriptedEngine
from chatflow.exceptions import EngineBadRequestError, ServiceSessionLostError


class A2AEngine:
    """Keeps what it is sent, and lets *inner* answer to all of it.

    Each reply ends a task of its context, which another request may go on from. *begins* says whether a conversation
    that has no session here is kept without being asked. *kept* is what each task has seen.
    """

    def __init__(self, inner: Engine | None = None, *, begins: bool = True, name: str = "a2a") -> None:
        self.inner: Final = ScriptedEngine(default="yes") if inner is None else inner
        self.requests: Final[list[EngineRequest]] = []
        self.kept: Final[dict[str, tuple[Message, ...]]] = {}
        self._begins: Final = begins
        self._name: Final = name
        self._numbers: Final = itertools.count(1)

    def service_of(self, agent: Agent) -> str:
        """Its one service."""
        return self._name

    def new_id(self, context: object = None) -> dict[str, Any]:
        """The name of a task that has not been given out before, of *context* or of a new one."""
        number = next(self._numbers)
        return {"contextId": f"context-{number}" if context is None else context, "taskId": f"task-{number}"}

    def forget(self) -> None:
        """Lose everything."""
        self.kept.clear()

    async def generate(self, request: EngineRequest) -> EngineReply:
        """Answer what is kept together with what is new."""
        self.requests.append(request)
        id_ = request.service_session_id
        if isinstance(id_, str):
            raise EngineBadRequestError("an A2A agent knows a context and a task", model=request.agent.model)
        if id_ is not None and id_key(id_) not in self.kept:
            raise ServiceSessionLostError("there is no such task", model=request.agent.model, status=404)
        if id_ is None and not self._begins and not request.keep_at_service:
            return await self.inner.generate(request)
        before = () if id_ is None else self.kept[id_key(id_)]
        seen = (*before, *(message for message in request.messages if message.role is not Role.SYSTEM))
        _refuse_broken(seen, request)
        whole = attrs.evolve(request, messages=seen, service_session_id=None)
        reply = await self.inner.generate(whole)
        said = Message(Role.MODEL, reply.text, tool_calls=reply.tool_calls)
        new = self.new_id(None if id_ is None else id_.get("contextId"))
        self.kept[id_key(new)] = (*seen, said)
        return attrs.evolve(reply, service_session_id=new)


def _refuse_broken(messages: tuple[Message, ...], request: EngineRequest) -> None:
    """What a real service does with a call that is not answered, or answered twice, or an answer without a call."""
    open_calls: list[str] = []
    for message in messages:
        if message.role is Role.TOOL:
            for result in message.tool_results:
                if result.tool_call_id not in open_calls:
                    raise EngineBadRequestError("an answer without a call", model=request.agent.model, status=400)
                open_calls.remove(result.tool_call_id)
        elif open_calls:
            raise EngineBadRequestError("a call without an answer", model=request.agent.model, status=400)
        open_calls += [call.id for call in message.tool_calls]
