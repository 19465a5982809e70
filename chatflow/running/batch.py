"""The tool calls of one model message, run at the same time; whatever happens to one, the others have their results."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import anyio
import attrs
import msgspec

from chatflow.core.agent import Agent
from chatflow.core.envelopes import encode
from chatflow.core.events import Report, RunEvent, ToolFinished, ToolStarted
from chatflow.core.finish import is_cancellation
from chatflow.core.journal import Deed, Entry
from chatflow.core.messages import Handoff, Message, ToolCall, ToolResult, freeze_result
from chatflow.core.session import AgentSession
from chatflow.core.tools import Tool, ToolContext
from chatflow.engines.common_form import INVALID_ARGUMENTS_KEY, parse_arguments
from chatflow.exceptions import ToolArgumentError, ToolError, UnstorableValueError, cut, listed, shorten
from chatflow.running.results import ResultLimits

logger = logging.getLogger("chatflow.runner")


def error_result(call: ToolCall, text: str) -> ToolResult:
    """The answer to a call that led to nothing; *text* is for the model."""
    return ToolResult(tool_call_id=call.id, name=call.name, content=text, is_error=True)


@attrs.frozen(kw_only=True)
class Batch:
    """The calls of *message* at *indexes*, which *agent* answers with its *tools*, by name.

    A tool that requires approval is run only where a person has *approved* these calls.

    *key* is the same when this batch is run again, and another for every other batch. *at_once* calls run at the same
    time; the others wait for one of them to end, in call order. *timeout* is each call's, in seconds, from when it
    begins to run. *limits* are each result's. *ended* is what an earlier attempt has noted of these calls; None where
    there was none. Each call's outcome is noted by *note*, if there is a journal, and told to *report*, but for
    handoffs: others may come in their way.
    """

    session: AgentSession
    agent: Agent
    tools: Mapping[str, Tool]
    message: Message
    indexes: Sequence[int]
    iteration: int
    key: str
    at_once: int | None
    timeout: float | None
    limits: ResultLimits
    ended: Mapping[int, Entry] | None
    note: Callable[[Entry], Awaitable[None]] | None
    report: Report | None
    approved: bool = False

    async def run(self) -> list[ToolResult | Handoff]:
        """What each call led to, in the calls' order.

        What goes wrong is a result that says so to the model, also a cancellation that nobody asked for. Only one of
        the run itself, or an exit, ends the other calls and leaves, as it is and never in a group.
        """
        calls = self.message.tool_calls
        outcomes: dict[int, ToolResult | Handoff] = {}
        ends: list[BaseException] = []
        for index, entry in (self.ended or {}).items():
            self.session.redo(entry.deeds)
            outcome = entry.handoff if entry.result is None else self.limited(entry.result)
            assert outcome is not None
            outcomes[index] = outcome
            self._tell_end(index, outcome)
        refused = {index: self._unrun(index) for index in self.indexes if index not in outcomes}
        slots = anyio.Semaphore(self.at_once or len(calls), fast_acquire=True)

        async def run_one(index: int) -> None:
            try:
                self._tell(ToolStarted(calls[index], self.agent.name))
                with self.session.recording() as deeds:
                    outcome = outcomes[index] = refused[index] or await self._invoke(index)
                await self._note(index, outcome, deeds)
                self._tell_end(index, outcome)
            except BaseException as end:  # noqa: BLE001  # raised below, where no group wraps it
                ends.append(end)
                group.cancel_scope.cancel()
            finally:
                slots.release()

        async with anyio.create_task_group() as group:
            # What is refused first, since it is known, and would be lost with a call that ends the run.
            for index in sorted(refused, key=lambda index: refused[index] is None):
                await slots.acquire()
                group.start_soon(run_one, index)
        if ends:
            raise ends[0]
        return [outcomes[index] for index in self.indexes]

    def limited(self, result: ToolResult) -> ToolResult:
        """The result as it is stored: what of it is larger than the limits is left out."""
        content, left_out = self.limits.cut(result.content)
        if not left_out:
            return result
        self._log(result, f"gave back more than is stored; left out: {left_out}")
        return attrs.evolve(result, content=content)

    def _tell(self, event: RunEvent) -> None:
        if self.report is not None:
            self.report(event)

    def _tell_end(self, index: int, outcome: ToolResult | Handoff) -> None:
        if not isinstance(outcome, Handoff):
            self._tell(ToolFinished(self.message.tool_calls[index], outcome))

    async def _note(self, index: int, outcome: ToolResult | Handoff, deeds: Sequence[Deed]) -> None:
        if self.note is None:
            return
        result, handoff = (None, outcome) if isinstance(outcome, Handoff) else (outcome, None)
        await self.note(
            Entry(iteration=self.iteration, index=index, result=result, handoff=handoff, deeds=tuple(deeds))
        )

    def _unrun(self, index: int) -> ToolResult | None:
        """The answer to a call that is not run; None where it is."""
        call = self.message.tool_calls[index]
        tool = self.tools.get(call.name)
        if tool is None and self.ended is not None:
            return self._interrupted(call)  # it was there when it was called
        if tool is None:
            self._log(call, "is not there")
            return error_result(
                call, f"There is no tool named {shorten(call.name)}. The tools there are: {listed(self.tools)}."
            )
        refusal = self._refusal(index, tool)
        if refusal is None and self.ended is not None and not tool.idempotent:
            return self._interrupted(call)
        return None if refusal is None else error_result(call, refusal)

    def _refusal(self, index: int, tool: Tool) -> str | None:
        """What to tell the model where the tool must not be run."""
        call = self.message.tool_calls[index]
        invalid: Mapping[str, Any] = self.message.extra.get(INVALID_ARGUMENTS_KEY, {})
        if str(index) in invalid:
            self._log(call, "was called with arguments that are no JSON object")
            return (
                f"The arguments are not a JSON object ({_fault(invalid[str(index)])}); the tool was not run. Call it"
                " again with one JSON object."
            )
        return self._unfit(call, tool) if tool.requires_approval and not self.approved else None

    def _unfit(self, call: ToolCall, tool: Tool) -> str:
        """Why nobody was asked about the call; it is not run, whatever the check says now."""
        try:
            tool.check(call.args)
        except ToolArgumentError as error:
            self._log(call, "was called with arguments that it does not take")
            return str(error)
        except Exception as error:  # noqa: BLE001  # an annotation's check may raise anything
            return self._failure(call, error)
        self._log(call, "requires approval, and nobody was asked")
        return "The tool requires a person's approval, and nobody was asked; it was not run. Call it again."

    def _failure(self, call: ToolCall, error: BaseException) -> str:
        reference = uuid.uuid4().hex[:12]
        self._log(call, f"failed (reference {reference})", error)
        return f"The tool failed; the error was logged (reference {reference}). Try another way, or tell the user."

    def _interrupted(self, call: ToolCall) -> ToolResult:
        self._log(call, "had been called in an attempt that was interrupted; it is not run again")
        return error_result(
            call, "The call was interrupted; whether it took effect is unknown. It was not run again. Find out first."
        )

    async def _invoke(self, index: int) -> ToolResult | Handoff:
        call = self.message.tool_calls[index]
        try:
            with anyio.move_on_after(self.timeout):
                return self._kept(call, await self.tools[call.name].invoke(call.args, self._context(index)))
        except ToolArgumentError as error:
            if self.ended is not None:
                return self._interrupted(call)  # the tool took them when it was called
            self._log(call, "was called with arguments that it does not take")
            return error_result(call, str(error))
        except ToolError as error:
            return self._told(call, error)
        except (Exception, asyncio.CancelledError) as error:
            # A tool may raise anything, also what a cancelled task of its own has ended with.
            if is_cancellation(error):
                raise
            return error_result(call, self._failure(call, error))
        self._log(call, f"was given up after tool_timeout={self.timeout:g} s")
        return error_result(
            call, f"The tool did not answer within {self.timeout:g} seconds; whether it took effect is unknown."
        )

    def _told(self, call: ToolCall, error: ToolError) -> ToolResult:
        """What a tool has failed with that says why to the model."""
        try:
            text = str(error) or "The tool failed."
        except Exception as fault:  # noqa: BLE001  # a class of the application's, which may fail as its tool does
            return error_result(call, self._failure(call, fault))
        self._log(call, "failed, and says why to the model")
        return self.limited(error_result(call, text))

    def _kept(self, call: ToolCall, value: Any) -> ToolResult | Handoff:
        if isinstance(value, Handoff):
            return value
        is_error = False
        if isinstance(value, ToolResult):
            value, is_error = value.content, value.is_error
        try:
            content = freeze_result(value, "result")
        except UnstorableValueError as error:
            self._log(call, "returned what can't be stored", error)
            return error_result(
                call,
                f"The tool was run, but its result can't be kept: {cut(error.path, 200)} is of a kind that can't be"
                " stored.",
            )
        return self.limited(ToolResult(tool_call_id=call.id, name=call.name, content=content, is_error=is_error))

    def _context(self, index: int) -> ToolContext:
        session, call = self.session, self.message.tool_calls[index]
        # With the arguments, since a model that is asked again may ask for something else in the same place.
        identity = [self.key, index, call.name, encode(call.args)]
        key = hashlib.sha256(msgspec.json.encode(identity, order="sorted")).hexdigest()[:32]
        return ToolContext(session=session, state=session.state, agent=self.agent, idempotency_key=key)

    def _log(self, call: ToolCall | ToolResult, what: str, error: BaseException | None = None) -> None:
        logger.log(
            logging.WARNING if error is None else logging.ERROR,
            "session %s: tool %s %s",
            shorten(self.session.session_id),
            shorten(call.name),
            what,
            exc_info=error,
        )


def _fault(raw: Any) -> str:
    try:
        parse_arguments(raw)
    except ValueError as error:
        return str(error)
    except AttributeError:  # written by another engine than ours
        return "they are no text"
    return "they could not be read"
