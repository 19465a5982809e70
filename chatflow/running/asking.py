"""Asking a model: what it is sent of the conversation; where a service keeps that, what the service has not seen."""

from __future__ import annotations

import logging
from itertools import takewhile
from typing import Final, Literal

import attrs

from chatflow.core.agent import Agent
from chatflow.core.engine import Engine, EngineReply, EngineRequest, service_of, stream_of
from chatflow.core.events import Report, TextDelta
from chatflow.core.messages import Message, Role
from chatflow.core.prompt import to_prompt
from chatflow.core.service import SERVICE_KEY, ServiceSession, unseen
from chatflow.core.tools import Tool
from chatflow.core.turn import Turn
from chatflow.core.values import FrozenDict
from chatflow.exceptions import EngineError, ServiceSessionLostError, SessionError, shorten
from chatflow.running.contents import Contents
from chatflow.running.pieces import joined

logger = logging.getLogger("chatflow.runner")

OnLostServiceSession = Literal["raise", "replay"]


class Asking:
    """What the models of one turn are asked. *on_lost* says what to do where a service has lost its session.

    What they say is told to *report*, in pieces where the engine gives some.
    """

    def __init__(self, turn: Turn, on_lost: OnLostServiceSession, report: Report | None = None) -> None:
        self._turn: Final = turn
        self._on_lost: Final = on_lost
        self._report: Final = report
        self._logged: Final[set[str]] = set()

    async def ask(
        self, contents: Contents, engine: Engine, tools: tuple[Tool, ...], family: frozenset[str]
    ) -> EngineReply:
        """Ask a model once; *family* are the names of the agents that a service's session may belong to."""
        session, agent = self._turn.session, contents.run.agent
        kept = self._turn.working.service
        if kept is not None:
            self._refuse_choice(agent)
        prompt = to_prompt(await contents.messages(), await contents.instructions())
        self._log(prompt.repairs)
        asked = EngineRequest(agent=agent, messages=prompt.messages, tools=tools)
        if kept is None:
            reply = await self._generate(engine, asked)
            if reply.service_session_id is not None:
                self._refuse_choice(agent)
            return self._marked(reply, agent, engine, None)
        self._refuse_other(kept, agent, engine, family)
        known_there = attrs.evolve(asked, messages=self._new_to(kept, prompt.messages), service_session_id=kept.id)
        try:
            return self._marked(await self._generate(engine, known_there), agent, engine, kept)
        except ServiceSessionLostError as error:
            if self._on_lost == "raise":
                raise
            logger.warning(
                "session %s: %s; a new one begins with the local copy of the history",
                shorten(session.session_id),
                error,
            )
        reply = self._marked(
            await self._generate(engine, attrs.evolve(asked, keep_at_service=True)), agent, engine, None
        )
        if reply.service_session_id is None:
            raise EngineError(
                f"{type(engine).__name__} was to begin a new session at its service and gave no id of one",
                model=agent.model,
            )
        return reply

    async def _generate(self, engine: Engine, request: EngineRequest) -> EngineReply:
        report, in_pieces = self._report, stream_of(engine)
        if report is not None and in_pieces is not None:
            return await joined(in_pieces(request), request, report, type(engine).__name__)
        reply = await engine.generate(request)
        if not isinstance(reply, EngineReply):
            raise TypeError(
                f"{type(engine).__name__}.generate() must return an EngineReply, not {type(reply).__name__}"
            )
        if report is not None and reply.text:
            report(TextDelta(reply.text, request.agent.name))
        return reply

    def _log(self, repairs: tuple[str, ...]) -> None:
        new = [repair for repair in repairs if repair not in self._logged]
        if new:
            self._logged.update(new)
            logger.warning(
                "session %s: repaired for the model: %s", shorten(self._turn.session.session_id), "; ".join(new)
            )

    def _refuse_choice(self, agent: Agent) -> None:
        """Refuse to choose of a history that a service keeps: it would remember what was not chosen."""
        chooser = agent.history_provider
        if chooser is not None:
            session_id = self._turn.session.session_id
            raise SessionError(
                f"session {shorten(session_id)}: a service keeps its history, and provider {shorten(chooser.name)} of"
                f" agent {shorten(agent.name)} chooses what is sent of it; use one of them",
                session_id=session_id,
            )

    def _refuse_other(self, kept: ServiceSession, agent: Agent, engine: Engine, family: frozenset[str]) -> None:
        session_id = self._turn.session.session_id
        if kept.agent_name is not None and kept.agent_name not in family:
            raise SessionError(
                f"session {shorten(session_id)}: its service's session was given to agent {shorten(kept.agent_name)},"
                f" which agent {shorten(agent.name)} is no colleague of; use that agent, or begin a new session",
                session_id=session_id,
            )
        service = service_of(engine, agent)
        if service is None:
            raise SessionError(
                f"session {shorten(session_id)}: a service keeps its history, and {type(engine).__name__}, which"
                f" answers for agent {shorten(agent.name)}, knows none; use the engine that the session began with",
                session_id=session_id,
            )
        if kept.service not in {None, service}:
            raise SessionError(
                f"session {shorten(session_id)}: service {shorten(kept.service)} keeps its history, and agent"
                f" {shorten(agent.name)} is answered by {shorten(service)}; begin a new session with that one",
                session_id=session_id,
            )

    def _new_to(self, kept: ServiceSession, messages: tuple[Message, ...]) -> tuple[Message, ...]:
        """What the service is sent: the system messages, and what it has not seen yet."""
        new = unseen(messages, kept)
        if new is not None:
            return (*takewhile(lambda message: message.role is Role.SYSTEM, messages), *new)
        base = self._turn.working.base.history
        if base.body_length and unseen(base, kept) is None:
            session_id = self._turn.session.session_id
            raise SessionError(
                f"session {shorten(session_id)} has both a service's session and a local history that did not come from"
                " it; begin a new session for one of them",
                session_id=session_id,
            )
        return messages

    def _marked(self, reply: EngineReply, agent: Agent, engine: Engine, kept: ServiceSession | None) -> EngineReply:
        """The reply with the mark of the service that has made it, if one keeps the history."""
        id_ = reply.service_session_id or (None if kept is None else kept.id)
        if id_ is None:
            return reply
        session = ServiceSession(id_, agent.name, service_of(engine, agent))
        return attrs.evolve(reply, extra=FrozenDict({**reply.extra, SERVICE_KEY: session.to_data()}))
