"""``chatflow chat``: a conversation in the terminal."""

from __future__ import annotations

import asyncio
import signal
import sys
import uuid
from collections.abc import Callable, Coroutine
from contextlib import suppress
from functools import partial
from importlib import import_module
from typing import Any, Final

import anyio
import click

from chatflow.cli.agents import load_agent
from chatflow.cli.app import DEBUG, Command, described, with_db, with_owner
from chatflow.cli.files import of_owner, to_begin
from chatflow.cli.offline import SAYS_SO, offline_agent, offline_engine
from chatflow.cli.output import Output, is_person
from chatflow.cli.screen import Screen
from chatflow.cli.transcript import WAITING, call_text, print_history
from chatflow.core.agent import Agent
from chatflow.core.messages import AgentResponse, ToolCall
from chatflow.core.rows import IN_LINE
from chatflow.core.session import SessionContext
from chatflow.exceptions import MessageDeadError, shorten
from chatflow.runner import Runner
from chatflow.running.stream import RunStream

_SHOWN_TURNS: Final = 10
"""Turns of before that are shown at the beginning."""

OWN: Final = "chatflow-chat-"
"""How the ids of messages begin that were typed here."""

_UNANSWERED: Final = "none of it is in the conversation; typed again it goes on"
_DECIDED: Final = "a call that had begun is finished by the next turn, any other still waits"
"""What remains of a turn that did not come to its end: of a message, and of a decision."""


@click.command("chat", cls=Command)
@with_db
@with_owner
@click.option("--session", "session_id", default="main", show_default=True, metavar="ID", help="Which conversation.")
@click.option("--model", metavar="NAME", help="The model that answers, by litellm's name, such as gpt-4o.")
@click.option("--agents", metavar="MODULE:AGENT", help="The agent that answers, from your own code.")
def chat(db: str, owner: str | None, session_id: str, model: str | None, agents: str | None) -> None:
    """Talk to an agent in the terminal; the conversation is kept, and goes on the next time.

    Ctrl-C cancels a turn, and again at the prompt it leaves, as Ctrl-D does. A turn that was killed goes on the next
    time. Without a terminal each line that is read is a message, and what a person would have to approve waits. Without
    --model and --agents a script answers, offline. With --db :memory: nothing is kept.
    """
    if model is not None and agents is not None:
        raise click.UsageError("--model and --agents exclude each other")
    output = Output()
    agent = load_agent(agents) if agents is not None else _agent(model)
    engine = offline_engine() if agents is None and model is None else None
    if engine is not None:
        output.note(SAYS_SO, "yellow")
    with asyncio.Runner() as loop:
        store = to_begin(db)
        try:
            runner = Runner(agent, of_owner(store, owner), engine)
            Chat(runner, session_id, output, loop).hold()
        finally:
            loop.run(store.aclose())


def _agent(model: str | None) -> Agent:
    if model is None:
        return offline_agent()
    # Not a name that an application's agent may have: its accepted messages are not to be answered from here.
    return Agent("Terminal assistant", "You are a helpful assistant.", model=model)


class Chat:
    """A conversation with a person, or with whatever writes lines.

    The event loop runs while something happens, and not while a person thinks: no turn is open then.
    """

    def __init__(self, runner: Runner, session_id: str, output: Output, loop: asyncio.Runner) -> None:
        self._runner: Final = runner
        self._session_id: Final = session_id
        self._output: Final = output
        self._loop: Final = loop
        self._screen: Final = Screen(output)
        self._is_person: Final = is_person()
        self._is_leaving = False
        """Whether the next Ctrl-C at the prompt leaves."""
        self._is_over = False
        """Whether there is nothing more to be read."""
        self._unanswered: tuple[str, str] | None = None
        """The last message and its id, if its turn was cancelled or failed: typed again it is the same one."""

    def hold(self) -> None:
        """Show what was said before, then ask and answer until there is nothing more."""
        self._output.note(f"conversation {self._session_id!r} in {self._runner.session_store.name!r}")
        session = self._session()
        if session is not None and len(session.history):
            print_history(session, self._output, full=False, last=_SHOWN_TURNS)
            self._leave_a_gap()
        self._go_on()
        session = self._session()
        if session is not None and session.pending_approvals:
            self._ask_about(session.pending_approvals)
            self._leave_a_gap()
        if self._is_person:
            with suppress(ImportError):  # not everywhere; it lets lines be edited, and those of before be had again
                import_module("readline")
        while not self._is_over and (text := self._read("you: ")) is not None:
            if not text.strip():
                continue
            response = self._answer(text, self._id_of(text))
            if response is not None:
                self._ask_about(response.awaiting_approval)
            self._leave_a_gap()

    def _session(self) -> SessionContext | None:
        return self._loop.run(self._runner.get_session(self._session_id))

    def _leave_a_gap(self) -> None:
        """Set what follows apart; what a program reads has no need of it."""
        if self._is_person:
            self._output.line()

    def _go_on(self) -> None:
        """Go on with the messages typed here whose turns a killed process has left."""
        for turn in self._loop.run(self._runner.session_store.pending_turns()):
            if turn.session_id != self._session_id or turn.state not in IN_LINE:
                continue
            text, message_id = turn.user_message, turn.message_id
            if text is None or message_id is None or not message_id.startswith(OWN):
                continue
            if turn.agent_name != self._runner.starting_agent.name:
                self._output.note(
                    f"{shorten(text)} is not answered yet: it waits for the agent {shorten(turn.agent_name)}", "yellow"
                )
                continue
            self._output.note("this was not answered to its end, and goes on:", "yellow")
            self._output.line(text, begin="you: ")
            self._answer(text, message_id)
            self._leave_a_gap()

    def _id_of(self, text: str) -> str:
        if self._unanswered is not None and self._unanswered[0] == text:
            return self._unanswered[1]
        return f"{OWN}{uuid.uuid4().hex}"

    def _answer(self, text: str, message_id: str) -> AgentResponse | None:
        """Have a message answered; None if its turn was cancelled or failed, which has been said then."""
        self._is_leaving = False
        self._unanswered = (text, message_id)
        response = self._run(self._runner.run_stream(self._session_id, text, message_id=message_id), _UNANSWERED)
        if response is not None:
            self._unanswered = None
        return response

    def _read(self, prompt: str) -> str | None:
        """The next line; None at the end."""
        if not self._is_person:
            return self._read_plain()
        while not self._is_over:
            try:
                return input(prompt)
            except EOFError:
                self._is_over = True
            except KeyboardInterrupt:
                self._is_over, self._is_leaving = self._is_leaving, True
            self._output.out.print()
            if not self._is_over:
                self._output.note("Ctrl-C again leaves, as Ctrl-D does")
        return None

    def _read_plain(self) -> str | None:
        line = sys.stdin.readline()
        if not line:
            return None
        text = line.removesuffix("\n")
        self._output.line(f"you: {text}")
        return text

    def _run(self, stream: RunStream, remains: str) -> AgentResponse | None:
        """Run a turn; None if it was cancelled or failed, which has been said then, and what *remains* of it."""
        self._screen.begin()
        try:
            response = self._loop.run(_until_interrupted(partial(self._tell, stream)))
        except KeyboardInterrupt:  # it came before the turn had begun, or after it was cancelled
            response = None
        except Exception as error:
            self._screen.end()
            if not self._is_person or click.get_current_context().meta[DEBUG]:
                raise
            if isinstance(error, MessageDeadError):
                self._unanswered = None
            self._output.note(f"{described(error)} ({remains})", "red")
            return None
        self._screen.end()
        if response is None:
            self._output.note(f"cancelled: {remains}; Ctrl-C again leaves", "yellow")
            self._is_leaving = True
            if not self._is_person:
                raise KeyboardInterrupt
        return response

    async def _tell(self, stream: RunStream) -> AgentResponse:
        async with stream:
            async for event in stream:
                self._screen.tell(event)
        return stream.response

    def _ask_about(self, calls: tuple[ToolCall, ...]) -> None:
        """Let a person decide about the calls that wait, and about those that follow from it."""
        while calls and not self._is_over:
            call, *others = calls
            if not self._is_person:
                self._output.note(f"{call_text(call)} waits for approval, and nobody is here to be asked", WAITING)
                calls = tuple(others)
                continue
            decision = self._decision(call)
            response = None if decision is None else self._run(decision, _DECIDED)
            if response is None:
                calls = tuple(others)
                continue
            known = {each.id for each in response.awaiting_approval}
            calls = (*response.awaiting_approval, *(each for each in others if each.id not in known))

    def _decision(self, call: ToolCall) -> RunStream | None:
        """The turn of what a person decides about a call that waits; None to decide later."""
        self._output.line(f"Run {call_text(call)}?", WAITING)
        text = (self._read('  "y" runs it, "n" and perhaps a reason does not, nothing decides later: ') or "").strip()
        word, _, reason = text.partition(" ")
        if word.lower() in {"y", "yes"}:
            return self._runner.approve_stream(self._session_id, call.id)
        if word.lower() in {"n", "no"}:
            return self._runner.reject_stream(self._session_id, call.id, reason)
        self._output.note("it waits, and is asked about again the next time")
        return None


async def _until_interrupted(work: Callable[[], Coroutine[Any, Any, AgentResponse]]) -> AgentResponse | None:
    """Run *work* until it is done, or Ctrl-C cancels it: then None, once it has been rolled back."""
    loop = asyncio.get_running_loop()
    with anyio.CancelScope() as scope:
        loop.add_signal_handler(signal.SIGINT, scope.cancel)
        try:
            return await work()
        finally:
            loop.remove_signal_handler(signal.SIGINT)
    return None
