"""Asking a model: what it is sent of the conversation; where a service keeps that, what the service has not seen."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, Final

from chatflow.core.agent import Agent
from chatflow.core.engine import Engine, EngineReply, EngineRequest, service_of, stream_of
from chatflow.core.events import Report, TextDelta
from chatflow.core.messages import Message
from chatflow.core.prompt import to_prompt
from chatflow.core.service import OnLostServiceSession, ServiceSession, ServiceStep, digest_of, id_key
from chatflow.core.service_prompt import to_service_prompt
from chatflow.core.tools import Tool
from chatflow.core.turn import Turn
from chatflow.exceptions import EngineError, ServiceSessionLostError, SessionError, shorten
from chatflow.running.contents import Contents
from chatflow.running.pieces import joined

logger = logging.getLogger("chatflow.runner")


class Asking:
    """What the models of one turn are asked. *on_lost* says what to do where a service has lost its session.

    What they say is told to *report*, in pieces where the engine gives some.
    """

    def __init__(self, turn: Turn, on_lost: OnLostServiceSession, report: Report | None = None) -> None:
        self._turn: Final = turn
        self._on_lost: Final = on_lost
        self._report: Final = report
        self._logged: Final[set[str]] = set()
        self.since = 0
        """How often the turn's messages had changed when a model was asked last."""

    async def ask(
        self, contents: Contents, engine: Engine, tools: tuple[Tool, ...], family: frozenset[str]
    ) -> tuple[EngineReply, ServiceStep | None]:
        """Ask a model once, and say what that has made of a service's session, if one keeps the history.

        *family* are the names of the agents that the session may belong to.
        """
        agent, instructions = contents.run.agent, await contents.instructions()
        working = self._turn.working
        kept, self.since = working.service, working.changes
        if kept is None:
            new = working.unseen
            reply = await self._ask_anew(contents, engine, tools, instructions)
            return reply, self._step(reply, engine, agent, None, new)
        self._refuse_choice(agent)
        self._refuse_other(kept, agent, engine, family)
        messages, seen = contents.unseen()
        self._refuse_unknown(kept)
        prompt = to_service_prompt(messages, seen, instructions)
        self._log(prompt.repairs)
        new = working.unseen
        request = EngineRequest(
            agent=agent,
            messages=prompt.messages,
            tools=tools,
            service_session_id=kept.id,
            output_schema=_schema_of(agent),
            settings=agent.settings,
        )
        try:
            reply = await self._generate(engine, request)
        except ServiceSessionLostError as error:
            if self._on_lost == "raise":
                raise
            logger.warning(
                "session %s: %s; a new one begins with the local copy of the history",
                shorten(self._turn.session.session_id),
                error,
            )
            return await self._replay(contents, engine, tools, instructions)
        return reply, self._step(reply, engine, agent, kept, new)

    async def _ask_anew(
        self, contents: Contents, engine: Engine, tools: tuple[Tool, ...], instructions: str, *, keep: bool = False
    ) -> EngineReply:
        """Ask with all of the history; *keep* has the service begin a session with it."""
        prompt = to_prompt(await contents.messages(), instructions)
        self._log(prompt.repairs)
        agent = contents.run.agent
        request = EngineRequest(
            agent=agent,
            messages=prompt.messages,
            tools=tools,
            keep_at_service=keep,
            output_schema=_schema_of(agent),
            settings=agent.settings,
        )
        reply = await self._generate(engine, request)
        if reply.service_session_id is not None:
            self._refuse_choice(agent)
        return reply

    async def _replay(
        self, contents: Contents, engine: Engine, tools: tuple[Tool, ...], instructions: str
    ) -> tuple[EngineReply, ServiceStep | None]:
        agent, new = contents.run.agent, self._turn.working.window.history().body_from(0)
        reply = await self._ask_anew(contents, engine, tools, instructions, keep=True)
        if reply.service_session_id is None:
            raise EngineError(
                f"{type(engine).__name__} was to begin a new session at its service and gave no id of one",
                model=agent.model,
            )
        return reply, self._step(reply, engine, agent, None, new)

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
        if not kept.is_for(family):
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

    def _refuse_unknown(self, kept: ServiceSession) -> None:
        """Refuse an id that no engine has used yet beside a history that did not come from it."""
        if kept.service is None and self._turn.working.base.history.body_length:
            session_id = self._turn.session.session_id
            raise SessionError(
                f"session {shorten(session_id)} has both a service's session and a local history that did not come from"
                " it; begin a new session for one of them",
                session_id=session_id,
            )

    def _step(
        self, reply: EngineReply, engine: Engine, agent: Agent, kept: ServiceSession | None, new: Sequence[Message]
    ) -> ServiceStep | None:
        """What the reply has made of the session *kept*, or of none."""
        id_ = reply.service_session_id or (None if kept is None else kept.id)
        if id_ is None:
            return None
        service = service_of(engine, agent)
        if service is None:
            name = type(engine).__name__
            raise TypeError(
                f"{name} gave a service_session_id and does not say of which service: it needs a method"
                " service_of(agent) that returns the service's name"
            )
        after = None if kept is None else id_key(kept.id)
        return ServiceStep(ServiceSession(id_, agent.name, service), after, digest_of(new))


def _schema_of(agent: Agent) -> Mapping[str, Any] | None:
    return None if agent.output is None else agent.output.schema
