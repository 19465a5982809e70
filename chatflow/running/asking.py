"""Asking a model: what it is sent of the conversation; where a service keeps that, what the service has not seen."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final

import attrs

from chatflow.core.agent import Agent
from chatflow.core.budget import OnContextWindow, Windows
from chatflow.core.engine import Engine, EngineReply, EngineRequest, generated, service_of, stream_of
from chatflow.core.events import Report, RunEvent, TextDelta
from chatflow.core.messages import Message, Role
from chatflow.core.prompt import to_prompt
from chatflow.core.service import OnLostServiceSession, ServiceSession, ServiceStep, digest_of, id_key
from chatflow.core.service_prompt import to_service_prompt
from chatflow.core.tools import Tool
from chatflow.core.turn import Turn
from chatflow.exceptions import ContextWindowError, EngineError, ServiceSessionLostError, SessionError, counted, shorten
from chatflow.running.contents import Contents
from chatflow.running.fitting import count_of, fit, too_long
from chatflow.running.pieces import joined

logger = logging.getLogger("chatflow.runner")


@attrs.frozen(kw_only=True)
class AskingRules:
    """How models are asked: a runner's settings.

    *on_lost* says what to do where a service has lost its session, *on_context_window* where a provider finds a prompt
    too long, and *max_prompt_tokens* is for agents without a number of their own.
    """

    on_lost: OnLostServiceSession = "raise"
    max_prompt_tokens: int | None = None
    on_context_window: OnContextWindow = "raise"


class Asking:
    """What the models of one turn are asked.

    What they say is told to *report*, in pieces where the engine gives some.
    """

    def __init__(self, turn: Turn, rules: AskingRules, report: Report | None = None) -> None:
        self._turn: Final = turn
        self._rules: Final = rules
        self._report: Final = report
        self._has_told = False
        self._has_logged_left_out = False
        self.since = 0
        """How often the turn's messages had changed when a model was asked last."""
        self.left_out: tuple[Message, ...] = ()
        """What the model that was asked last was not sent of the history, since all of it would have been too long."""

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
        request = _request(agent, prompt.messages, tools, service_session_id=kept.id)
        limit = self.limit(agent)
        if limit is not None and (tokens := await count_of(engine, request)) > limit:
            raise too_long(self._turn.session.session_id, agent, tokens, limit, "what the service has not seen yet")
        try:
            reply = await self._generate(engine, request)
        except ServiceSessionLostError as error:
            if self._rules.on_lost == "raise":
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
        """Ask with as much of the history as may be sent; *keep* has the service begin a session with it."""
        agent, session = contents.run.agent, self._turn.session
        messages, own = await contents.messages()
        windows = Windows(messages, own, self._refused(agent, messages))

        def draft(index: int | None) -> tuple[EngineRequest, tuple[str, ...]]:
            gone = len(windows.left_out(index))
            prompt = to_prompt(windows.window(index), instructions, numbered_from=gone)
            return _request(agent, prompt.messages, tools, keep_at_service=keep), prompt.repairs

        async def count(index: int) -> int:
            return await count_of(engine, draft(index)[0])

        async def send(index: int | None) -> EngineReply:
            request, repairs = draft(index)
            self._log(repairs)
            self._leave_out(agent, windows.left_out(index))
            return await self._generate(engine, request)

        index, limit = None, self.limit(agent)
        if limit is not None:
            index, tokens = await fit(windows.last, limit, count)
            if index is None:
                raise too_long(session.session_id, agent, tokens, limit, "this turn alone")
        reply = await self._shrinking(agent, windows, index, send)
        if reply.service_session_id is not None:
            self._refuse_choice(agent)
        return reply

    async def _shrinking(
        self,
        agent: Agent,
        windows: Windows,
        index: int | None,
        send: Callable[[int | None], Awaitable[EngineReply]],
    ) -> EngineReply:
        """Ask with the window at *index*, and with half of it as long as the provider finds that too long."""
        session = self._turn.session
        while True:
            try:
                return await send(index)
            except ContextWindowError as error:
                found = windows.last if index is None else index
                index = windows.half(found)
                if self._rules.on_context_window == "raise" or self._has_told or index == found:
                    raise
                logger.warning(
                    "session %s: %s; asked again, with %s in place of %d",
                    shorten(session.session_id),
                    error,
                    counted(windows.turns[index], "turn"),
                    windows.turns[found],
                )
                session.no_room[agent.name] = windows.left_out(index)

    async def foresee(
        self, contents: Contents, engine: Engine, tools: tuple[Tool, ...], result: Message, limit: int
    ) -> None:
        """Make sure that the agent can be asked within the *limit* once its turn has come to *result*.

        Raises:
            ContextWindowError: Even the least would be too long.
        """
        agent = contents.run.agent
        windows = Windows(*await contents.expected(result))
        prompt = to_prompt(windows.window(0), await contents.instructions())
        request = _request(agent, prompt.messages, tools)
        if (tokens := await count_of(engine, request)) > limit:
            what = "the turn of the call that was approved"
            raise too_long(self._turn.session.session_id, agent, tokens, limit, what, "run or sent")

    def _refused(self, agent: Agent, messages: Sequence[Message]) -> frozenset[int]:
        """Which of *messages*, by ids, are not sent to *agent*: with them a prompt was too long for its provider."""
        known = self._turn.session.no_room.get(agent.name)
        if not known or self._rules.on_context_window == "raise":
            return frozenset()
        refused = frozenset(map(id, known)) & set(map(id, messages))
        self._turn.session.no_room[agent.name] = tuple(message for message in known if id(message) in refused)
        return refused

    def limit(self, agent: Agent) -> int | None:
        """How many tokens *agent* may be sent; None for any number."""
        return self._rules.max_prompt_tokens if agent.max_prompt_tokens is None else agent.max_prompt_tokens

    def _leave_out(self, agent: Agent, messages: tuple[Message, ...]) -> None:
        """Note what is not sent to *agent*, and log it once."""
        # What a provider has chosen is no window: what is left out of that has not left the conversation.
        self.left_out = messages if agent.history_provider is None else ()
        if messages and not self._has_logged_left_out:
            self._has_logged_left_out = True
            logger.info(
                "session %s: %s, %s, are not sent to agent %s: they would be too long",
                shorten(self._turn.session.session_id),
                counted(sum(message.role is Role.USER for message in messages), "older turn"),
                counted(len(messages), "message"),
                shorten(agent.name),
            )

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
        self._has_told = False
        if report is not None and in_pieces is not None:

            def telling(event: RunEvent) -> None:
                self._has_told = True
                report(event)

            return await joined(in_pieces(request), request, telling, type(engine).__name__)
        reply = await generated(engine, request)
        if report is not None and reply.text:
            report(TextDelta(reply.text, request.agent.name))
        return reply

    def _log(self, repairs: tuple[str, ...]) -> None:
        """Once for each thing, whatever its place is by now: a repair comes with each request that the fault is in."""
        session = self._turn.session
        found = {repair.partition(": ")[2]: repair for repair in repairs}
        new = [repair for what, repair in found.items() if what not in session.repairs_told]
        if new:
            session.repairs_told |= found.keys()
            logger.warning("session %s: repaired for the model: %s", shorten(session.session_id), "; ".join(new))

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


def _request(agent: Agent, messages: tuple[Message, ...], tools: tuple[Tool, ...], **where: Any) -> EngineRequest:
    schema = None if agent.output is None else agent.output.schema
    return EngineRequest(
        agent=agent, messages=messages, tools=tools, output_schema=schema, settings=agent.settings, **where
    )
