"""The loop of one turn: ask the model, run the tools it calls, hand over, ask again, until it answers."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import cache, partial
from typing import Any, Final

import attrs

from chatflow.core.agent import Agent
from chatflow.core.compaction import leaving
from chatflow.core.engine import Engine, EngineReply
from chatflow.core.events import AnswerRejected, HandedOff, Report, RunEvent, TextDelta, ToolFinished, UsageReported
from chatflow.core.journal import Entry, Journal
from chatflow.core.messages import AgentResponse, Handoff, Message, Role, StopReason, ToolCall, ToolResult
from chatflow.core.output import Output, OutputError
from chatflow.core.service import ServiceStep
from chatflow.core.session import AgentSession
from chatflow.core.turn import Turn
from chatflow.core.usage import added
from chatflow.core.values import EMPTY
from chatflow.engines.litellm import LiteLLMEngine
from chatflow.exceptions import EngineOutputError, SessionError, UnmatchedToolResultError, shorten
from chatflow.running.asking import Asking
from chatflow.running.batch import Batch, error_result
from chatflow.running.compacting import Compacting, Compactor
from chatflow.running.providing import Providing
from chatflow.running.slots import Slot

logger = logging.getLogger("chatflow.runner")


class Registry:
    """The agents of one runner, and what answers for them.

    Nobody else's agents count, not even those that the session was given: after a restart they would be gone.
    """

    def __init__(self, starting_agent: Agent, engine: Engine | None) -> None:
        self.starting_agent: Final = starting_agent
        self._engine: Final = engine

    def agents(self) -> dict[str, Agent]:
        """The starting agent and all that handoffs lead to, by name, as things stand now."""
        return self.starting_agent.reachable()

    def engine_for(self, agent: Agent) -> Engine:
        """The agent's own engine, else the runner's, else one that asks by the agent's model."""
        return agent.engine or self._engine or _default_engine()

    def with_output(self, response: AgentResponse, session_id: str) -> AgentResponse:
        """A stored answer with its output, as the type that its agent's answers are of now; None where it is not."""
        agent = self.agents().get(response.active_agent_name)
        if agent is None or agent.output is None or response.stop_reason == "not_stored":
            return response
        try:
            return attrs.evolve(response, output=agent.output.read(response.content))
        except Exception as error:  # noqa: BLE001  # what was answered stays answered, whatever a type makes of it now
            logger.warning(
                "session %s: the stored answer of agent %s is not of its output_type now (%s)",
                shorten(session_id),
                shorten(agent.name),
                type(error).__name__,
            )
            return response


@cache
def _default_engine() -> Engine:
    # One for all: it keeps nothing of whom it answers, and a runner may be made for each message.
    return LiteLLMEngine()


@attrs.define(kw_only=True)
class Loop:
    """What happens in *turn*, which the running code is a member of; it neither begins nor ends the turn.

    *key* is the same when the turn's message is tried again, and another for every other turn. *strict* refuses a
    conversation whose agent is out of reach, which otherwise the starting agent answers. What happens is told to
    *report*; of what models say, *asking* tells.
    """

    registry: Registry
    turn: Turn
    slot: Slot
    key: str
    max_handoffs: int
    max_tool_iterations: int
    tool_timeout: float | None
    asking: Asking
    providing: Providing
    strict: bool = False
    report: Report | None = None
    called: list[str] = attrs.field(factory=list[str])
    usage: Mapping[str, Any] | None = None
    handoff: Handoff | None = None
    handoffs: int = 0
    unknown: set[str] = attrs.field(factory=set[str])

    @property
    def session(self) -> AgentSession:
        """The conversation."""
        return self.turn.session

    async def answer(self, user_message: str) -> AgentResponse:
        """Take the user's message, and go on until there is an answer to it.

        What an earlier attempt has noted in the turn's journal is not asked or called again.
        """
        journal = Journal(self.turn.journal)
        if not self.session.active_agent_name:
            await self.session.set_active_agent(self.registry.starting_agent)
        self._active_agent()
        question = Message(Role.USER, user_message)
        await self.providing.begin(question, self._agent_of(journal.called(0)))
        await self._say(question)
        for iteration in range(self.max_tool_iterations):
            called = journal.called(iteration)
            agent = self._agent_of(called)
            if called is not None:
                assert called.message is not None
                if called.message.text:
                    self._tell(TextDelta(called.message.text, agent.name))
                await self._act(agent, called, called.message, journal.returned(iteration))
                continue
            reply, service = await self._ask(agent)
            if not reply.tool_calls:
                return await self._finish(agent, reply, service, "answer")
            message = _calls(agent, reply)
            await self._act(agent, Entry(iteration=iteration, message=message, service=service), message, None)
        agent = self._active_agent()
        logger.warning(
            "session %s: the model asked for tools %d times in a row; it is asked once more without them",
            shorten(self.session.session_id),
            self.max_tool_iterations,
        )
        reply, service = await self._ask(agent, with_tools=False)
        return await self._finish(agent, reply, service, "tool_limit")

    def _agent_of(self, called: Entry | None) -> Agent:
        """The agent that has said what *called* notes of an earlier attempt; else the one that answers now."""
        message = None if called is None else called.message
        agent = None if message is None else self.registry.agents().get(message.agent_name or "")
        return agent or self._active_agent()

    def _active_agent(self) -> Agent:
        """The live agent that answers now: the starting agent where the stored name is unknown, which stays."""
        name, starting_agent = self.session.active_agent_name, self.registry.starting_agent
        agent = self.registry.agents().get(name)
        if agent is None and self.strict:
            raise SessionError(
                f"session {shorten(self.session.session_id)} is with agent {shorten(name)}, which agent"
                f" {shorten(starting_agent.name)} can't reach by handoffs; run it with that agent, or with one that"
                " reaches it",
                session_id=self.session.session_id,
            )
        if agent is None and name not in self.unknown:
            self.unknown.add(name)
            logger.warning(
                "session %s: no agent within reach of %s is named %s; %s answers, and the stored name stays",
                shorten(self.session.session_id),
                shorten(starting_agent.name),
                shorten(name),
                shorten(starting_agent.name),
            )
        return agent or starting_agent

    def _tell(self, event: RunEvent) -> None:
        if self.report is not None:
            self.report(event)

    async def _say(self, message: Message, service: ServiceStep | None = None, since: int | None = None) -> None:
        """Add *message*, which has made *service* of a service's session, where one keeps the history.

        *since* is how often the messages had changed when it was asked for.
        """
        await self.session.add_message(message)
        self.providing.said.append(message)
        if service is not None:
            self.turn.working.go_on_at_service(service.session, since)

    async def _ask(self, agent: Agent, *, with_tools: bool = True) -> tuple[EngineReply, ServiceStep | None]:
        contents = await self.providing.prepare(agent)
        await self.slot.hold()
        await self.turn.look()  # nobody pays for an answer that would be thrown away
        tools = contents.tools if with_tools else ()
        family = self.registry.agents()
        return await self.asking.ask(contents, self.registry.engine_for(agent), tools, frozenset(family))

    def _count(self, usage: Mapping[str, Any] | None) -> None:
        if usage is not None:
            self.usage = added(self.usage, usage)
            self._tell(UsageReported(usage))

    async def _finish(
        self, agent: Agent, reply: EngineReply, service: ServiceStep | None, stop_reason: StopReason
    ) -> AgentResponse:
        message = _answer(agent, reply)
        self._count(message.usage)
        output = None
        if agent.output is not None:
            try:
                output = agent.output.read(message.text)
            except OutputError as error:
                cost = message.usage
                reply, service = await self._ask_again(agent, reply, service, error.problems)
                message = _answer(agent, reply)
                self._count(message.usage)
                if cost is not None:
                    message = attrs.evolve(message, usage=added(cost, message.usage or EMPTY))
                output = self._read_again(agent, agent.output, message.text)
        await self._say(message, service, self.asking.since)
        if reply.tool_calls:
            # It was offered no tools: nobody will answer these calls, which the service would wait for.
            self.turn.working.service = None
        response = AgentResponse(
            content=message.text,
            active_agent_name=agent.name,
            tool_calls_executed=self.called,
            handoff=self.handoff,
            usage=self.usage,
            stop_reason=stop_reason,
            output=output,
        )
        await self.providing.succeed(response)
        return response

    async def _ask_again(
        self, agent: Agent, reply: EngineReply, service: ServiceStep | None, problems: Mapping[str, str]
    ) -> tuple[EngineReply, ServiceStep | None]:
        """Ask once more, without tools, for the answer that *reply* was to be; nothing of *reply* is stored."""
        logger.warning(
            "session %s: the answer of agent %s is not of its output_type (%d problems); it is asked for once more",
            shorten(self.session.session_id),
            shorten(agent.name),
            len(problems),
        )
        self._tell(AnswerRejected(problems, agent.name))
        (await self.providing.prepare(agent)).correct(reply, service, problems)
        return await self._ask(agent, with_tools=False)

    def _read_again(self, agent: Agent, output: Output, text: str) -> Any:
        try:
            return output.read(text)
        except OutputError as error:
            raise EngineOutputError(model=agent.model, agent=agent.name, problems=error.problems) from None

    async def compact(self, compactor: Compactor, response: AgentResponse) -> AgentResponse:
        """Have a summary stand for what leaves the window with this turn, if anything does.

        Returns:
            The response, with what the summary has cost.
        """
        working = self.turn.working
        if working.service is not None:
            return response  # the service would remember what is gone here
        leaves = leaving(
            working.window,
            working.max_turns,
            earlier=working.base.history,
            left_out=self.asking.left_out,
            keep_turns=compactor.keep_turns,
        )
        if leaves is None:
            return response
        await self.slot.hold()
        await self.turn.look()  # as before any model is asked
        answered = self.registry.agents().get(response.active_agent_name, self.registry.starting_agent)
        compacting = Compacting(self.turn, compactor, answered, self.registry.engine_for)
        await compacting.compact(leaves)
        if compacting.reply is not None:
            self._count(compacting.reply.usage)
        return attrs.evolve(response, usage=self.usage)

    async def _act(self, agent: Agent, called: Entry, message: Message, ended: Mapping[int, Entry] | None) -> None:
        """Store a message's calls, run them, and store what they led to; *ended* is what had ended before."""
        self._count(message.usage)
        contents = await self.providing.prepare(agent)
        service, since = called.service, self.asking.since
        if ended is not None and service is not None:
            since = self.turn.working.changes
            if not self.turn.working.resumes(service):
                service = None  # others have gone on there: these calls are news to it
        await self._say(message, service, since)
        self.called += [call.name for call in message.tool_calls]
        tools = {tool.name: tool for tool in contents.tools}
        keeps_journal = self.turn.claim is not None
        if keeps_journal and ended is None:
            named = (tools.get(call.name) for call in message.tool_calls)
            # Before what must not be done twice, the note of it has to be on the disk.
            durable = any(tool is not None and not tool.idempotent for tool in named)
            await self.turn.note(called, durable=durable)
        batch = Batch(
            session=self.session,
            agent=agent,
            tools=tools,
            message=message,
            iteration=called.iteration,
            key=f"{self.key}:{called.iteration}",
            timeout=self.tool_timeout,
            ended=ended,
            note=partial(self.turn.note, durable=False) if keeps_journal else None,
            report=self.report,
        )
        outcomes = await batch.run()
        results: list[ToolResult] = []
        handed_over = self.handoffs
        for call, outcome in zip(message.tool_calls, outcomes, strict=True):
            if not isinstance(outcome, Handoff):
                results.append(outcome)
                continue
            if self.handoffs > handed_over:
                result = error_result(call, "Only one handoff at a time; another one of these took effect.")
            else:
                result = await self._hand_over(call, outcome)
            results.append(result)
            self._tell(ToolFinished(call, result))
        answers = Message(Role.TOOL, tool_results=results)
        try:
            await self._say(answers)
        except UnmatchedToolResultError:
            # A tool cleared the history, or rolled it back; what this turn has said so far is still to be answered.
            present = {id(message) for message in self.session.history}
            for earlier in self.providing.said:
                if id(earlier) not in present:
                    await self.session.add_message(earlier)
            await self._say(answers)

    async def _hand_over(self, call: ToolCall, handoff: Handoff) -> ToolResult:
        session, name = self.session, handoff.target_agent_name
        if self.handoffs >= self.max_handoffs:
            return error_result(call, "No more handoffs in this turn. Answer the user yourself.")
        agents = self.registry.agents()
        target = agents.get(name)
        if target is None:
            known = ", ".join(agents)
            logger.warning("session %s: handoff to unknown agent %s", shorten(session.session_id), shorten(name))
            return error_result(call, f"There is no agent named {shorten(name)}. The agents there are: {known}.")
        await session.set_active_agent(target)
        session.state.update(handoff.context_updates)
        self.handoff = handoff
        self.handoffs += 1
        self._tell(HandedOff(handoff, name))
        logger.info("session %s: handed over to agent %s", shorten(session.session_id), shorten(name))
        content = {"transferred_to": name} | ({} if handoff.reason is None else {"reason": handoff.reason})
        return ToolResult(tool_call_id=call.id, name=call.name, content=content)


def _answer(agent: Agent, reply: EngineReply) -> Message:
    """The message that holds the reply's words."""
    return Message(Role.MODEL, reply.text or "", agent_name=agent.name, usage=reply.usage, extra=reply.extra)


def _calls(agent: Agent, reply: EngineReply) -> Message:
    """The message that holds the reply's calls."""
    return Message(
        Role.MODEL,
        reply.text,
        tool_calls=reply.tool_calls,
        agent_name=agent.name,
        usage=reply.usage,
        extra=reply.extra,
    )
