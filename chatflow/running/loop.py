"""The loop of one turn: ask the model, run the tools it calls, hand over, ask again, until it answers.

One object with all that happens in a turn, in the order in which it may happen, which is why it is long.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import attrs

from chatflow.core.agent import Agent
from chatflow.core.approvals import Decision, HeldCall, find_held, open_calls, tokens_of, turn_of
from chatflow.core.compaction import leaving
from chatflow.core.engine import EngineReply
from chatflow.core.events import (
    AnswerRejected,
    ApprovalRequested,
    HandedOff,
    Report,
    RunEvent,
    TextDelta,
    ToolFinished,
    UsageReported,
)
from chatflow.core.journal import Entry, Journal
from chatflow.core.messages import AgentResponse, Handoff, Message, Role, StopReason, ToolCall, ToolResult
from chatflow.core.output import Output, OutputError
from chatflow.core.service import ServiceStep
from chatflow.core.session import AgentSession
from chatflow.core.tools import Tool
from chatflow.core.turn import Turn
from chatflow.core.usage import added
from chatflow.core.values import EMPTY
from chatflow.exceptions import (
    ApprovalNotFoundError,
    EngineOutputError,
    SessionError,
    UnmatchedToolResultError,
    counted,
    listed,
    shorten,
)
from chatflow.running.approving import hold_back, refusal
from chatflow.running.asking import Asking
from chatflow.running.batch import Batch, error_result
from chatflow.running.compacting import Compacting, Compactor
from chatflow.running.providing import Providing
from chatflow.running.registry import Registry
from chatflow.running.results import ResultLimits
from chatflow.running.slots import Slot

logger = logging.getLogger("chatflow.runner")


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
    tools_at_once: int | None
    result_limits: ResultLimits
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
        """Take the user's message, and go on until there is an answer to it, or a person is to be asked.

        What an earlier attempt has noted in the turn's journal is not asked or called again.
        """
        journal = await self._begin()
        question = Message(Role.USER, user_message)
        self.providing.begin(question)
        await self.providing.prepare(self._agent_of(journal.called(0)))
        await self._say(question)
        return await self._converse(journal, 0)

    async def go_on(self, decision: Decision) -> AgentResponse:
        """Take what a person has decided about a call, and go on as with a user's message, once all beside it are.

        Raises:
            ApprovalNotFoundError: Others have removed the call, or answered it, since it was looked for.
        """
        journal = await self._begin()
        held = self._held(decision)
        self.providing.go_on(turn_of(self.session.history, held))
        if decision.approved:
            if journal.called(0) is None:
                await self._foresee(held)
            await self._run_held(held, journal)
        else:
            result = refusal(held.call, decision.reason)
            content, _ = self.result_limits.cut(result.content)
            await self._say_results([attrs.evolve(result, content=content)])
        waiting = self._waiting(held.message)
        if waiting:
            return await self._conclude(self._active_agent(), "", "approval", waiting=waiting)
        return await self._converse(journal, 1)

    async def _begin(self) -> Journal:
        if not self.session.active_agent_name:
            await self.session.set_active_agent(self.registry.starting_agent)
        self._active_agent()
        return Journal(self.turn.journal)

    async def _converse(self, journal: Journal, first: int) -> AgentResponse:
        """Ask and act in turns, from the iteration *first* of the journal on."""
        for iteration in range(first, first + self.max_tool_iterations):
            called, ended = journal.called(iteration), None
            agent = self._agent_of(called)
            if called is not None:
                assert called.message is not None
                ended = journal.returned(iteration)
                if called.message.text:
                    self._tell(TextDelta(called.message.text, agent.name))
            else:
                reply, service = await self._ask(agent)
                if not reply.tool_calls:
                    return await self._finish(agent, reply, service, "answer")
                called = Entry(iteration=iteration, message=_calls(agent, reply), service=service)
            message = await self._act(agent, called, ended)
            waiting = self._waiting(message)
            if waiting:
                for call in waiting:
                    self._tell(ApprovalRequested(call, agent.name))
                return await self._conclude(self._active_agent(), message.text, "approval", waiting=waiting)
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
        return await self._conclude(agent, message.text, stop_reason, output=output)

    async def _conclude(
        self,
        agent: Agent,
        text: str,
        stop_reason: StopReason,
        *,
        waiting: tuple[ToolCall, ...] = (),
        output: object = None,
    ) -> AgentResponse:
        response = AgentResponse(
            content=text,
            active_agent_name=agent.name,
            tool_calls_executed=self.called,
            handoff=self.handoff,
            usage=self.usage,
            stop_reason=stop_reason,
            output=output,
            awaiting_approval=waiting,
        )
        await self.providing.succeed(response)
        return response

    async def _ask_again(
        self, agent: Agent, reply: EngineReply, service: ServiceStep | None, problems: Mapping[str, str]
    ) -> tuple[EngineReply, ServiceStep | None]:
        """Ask once more, without tools, for the answer that *reply* was to be; nothing of *reply* is stored."""
        logger.warning(
            "session %s: the answer of agent %s is not of its output_type (%s); it is asked for once more",
            shorten(self.session.session_id),
            shorten(agent.name),
            counted(len(problems), "problem"),
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
        compacting = Compacting(self.turn, compactor, answered, self.registry.engine_for, self.asking.limit)
        await compacting.compact(leaves)
        if compacting.reply is not None:
            self._count(compacting.reply.usage)
        return attrs.evolve(response, usage=self.usage)

    def _held(self, decision: Decision) -> HeldCall:
        """The call that was decided about; it is found by its id, and known by its token."""
        claim = self.turn.claim
        assert claim is not None
        held = find_held(self.session.history, decision.call_id)
        if held is None or not held.is_open or held.decision_id != claim.message_id:
            raise ApprovalNotFoundError(session_id=self.session.session_id, call_id=decision.call_id)
        return held

    def _waiting(self, message: Message) -> tuple[ToolCall, ...]:
        """The calls of *message* that wait for a person still."""
        tokens = set(tokens_of(message).values())
        return tuple(held.call for held in open_calls(self.session.history) if held.token in tokens) if tokens else ()

    async def _foresee(self, held: HeldCall) -> None:
        """Have nothing run of which the model could not be told: a limit of tokens may leave no room for its turn."""
        agent = self._active_agent()
        limit, is_sent_alone = self.asking.limit(agent), self.turn.working.service is not None
        if limit is None or is_sent_alone or len(self._waiting(held.message)) > 1:
            return
        contents = await self.providing.prepare(agent)
        result = ToolResult(tool_call_id=held.call.id, name=held.call.name, content="")
        engine = self.registry.engine_for(agent)
        await self.asking.foresee(contents, engine, contents.tools, Message(Role.TOOL, tool_results=[result]), limit)

    async def _run_held(self, held: HeldCall, journal: Journal) -> None:
        """Run a call that was approved, with the tools of the agent that made it, and store what it led to."""
        called, call = journal.called(0), held.call
        self.called.append(call.name)
        agent = self.registry.agents().get(held.message.agent_name or "")
        if agent is None and called is None:
            logger.warning(
                "session %s: no agent within reach is named %s, which made an approved call of tool %s",
                shorten(self.session.session_id),
                shorten(held.message.agent_name),
                shorten(call.name),
            )
            text = "The agent that made this call is not there any more; it was not run."
            await self._say_results([error_result(call, text)])
            return
        tools = () if agent is None else (await self.providing.prepare(agent)).tools
        await self._run(
            agent or self._active_agent(),
            {tool.name: tool for tool in tools},
            Entry(iteration=0, message=held.message) if called is None else called,
            [held.index],
            None if called is None else journal.returned(0),
            approved=True,
        )

    async def _act(self, agent: Agent, called: Entry, ended: Mapping[int, Entry] | None) -> Message:
        """Store a message's calls, run those that wait for nobody, and store what they led to; return the message.

        *ended* is what had ended before.
        """
        message = called.message
        assert message is not None
        self._count(message.usage)
        tools = {tool.name: tool for tool in (await self.providing.prepare(agent)).tools}
        if ended is None:
            message = hold_back(message, tools, None if called.service is not None else self.session.history)
            called = attrs.evolve(called, message=message)
        service, since = called.service, self.asking.since
        if ended is not None and service is not None:
            since = self.turn.working.changes
            if not self.turn.working.resumes(service):
                service = None  # others have gone on there: these calls are news to it
        await self._say(message, service, since)
        held = tokens_of(message)
        indexes = [index for index in range(len(message.tool_calls)) if index not in held]
        self.called += [message.tool_calls[index].name for index in indexes]
        await self._run(agent, tools, called, indexes, ended)
        return message

    async def _run(
        self,
        agent: Agent,
        tools: Mapping[str, Tool],
        called: Entry,
        indexes: Sequence[int],
        ended: Mapping[int, Entry] | None,
        *,
        approved: bool = False,
    ) -> None:
        """Run the calls at *indexes* of the message in *called*, and store what they led to."""
        message = called.message
        assert message is not None
        keeps_journal = self.turn.claim is not None
        if keeps_journal and ended is None:
            named = (tools.get(message.tool_calls[index].name) for index in indexes)
            # Before what must not be done twice, the note of it has to be on the disk.
            durable = any(tool is not None and not tool.idempotent for tool in named)
            await self.turn.note(called, durable=durable)
        batch = Batch(
            session=self.session,
            agent=agent,
            tools=tools,
            message=message,
            indexes=indexes,
            iteration=called.iteration,
            key=f"{self.key}:{called.iteration}",
            at_once=self.tools_at_once,
            timeout=self.tool_timeout,
            limits=self.result_limits,
            ended=ended,
            note=partial(self.turn.note, durable=False) if keeps_journal else None,
            report=self.report,
            approved=approved,
        )
        outcomes = await batch.run()
        results: list[ToolResult] = []
        handed_over = self.handoffs
        for index, outcome in zip(indexes, outcomes, strict=True):
            call = message.tool_calls[index]
            if not isinstance(outcome, Handoff):
                results.append(outcome)
                continue
            if self.handoffs > handed_over:
                result = error_result(call, "Only one handoff at a time; another one of these took effect.")
            else:
                result = batch.limited(await self._hand_over(call, outcome))
            results.append(result)
            self._tell(ToolFinished(call, result))
        if results:
            await self._say_results(results)

    async def _say_results(self, results: Sequence[ToolResult]) -> None:
        answers = Message(Role.TOOL, tool_results=results)
        try:
            await self._say(answers)
        except UnmatchedToolResultError:
            # A tool cleared the history, or rolled it back; what this turn has said so far is still to be answered.
            present = {id(message) for message in self.session.history}
            said = self.providing.said
            for place, earlier in enumerate(said):
                if id(earlier) in present:
                    continue
                standing = self.turn.working.window.matched(earlier)
                if standing is not None:  # else it held late results alone, of calls that are gone
                    said[place] = standing
                    await self.session.add_message(standing)
            await self._say(answers)

    async def _hand_over(self, call: ToolCall, handoff: Handoff) -> ToolResult:
        session, name = self.session, handoff.target_agent_name
        if self.handoffs >= self.max_handoffs:
            return error_result(call, "No more handoffs in this turn. Answer the user yourself.")
        agents = self.registry.agents()
        target = agents.get(name)
        if target is None:
            logger.warning("session %s: handoff to unknown agent %s", shorten(session.session_id), shorten(name))
            return error_result(
                call, f"There is no agent named {shorten(name)}. The agents there are: {listed(agents)}."
            )
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
