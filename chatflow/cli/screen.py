"""What a turn of ``chatflow chat`` looks like while it happens."""

from __future__ import annotations

from typing import Final

from rich.status import Status
from rich.text import Text

from chatflow.cli.output import Output
from chatflow.cli.safe import one_line
from chatflow.cli.transcript import WAITING, call_text, label_of, result_text
from chatflow.cli.wrapping import Flow
from chatflow.core.events import (
    AnswerRejected,
    ApprovalRequested,
    Done,
    HandedOff,
    ReasoningDelta,
    RunEvent,
    TextDelta,
    ToolFinished,
    ToolStarted,
)
from chatflow.core.messages import AgentResponse, ToolResult

_LONGEST: Final = 300


class Screen:
    """Prints events as they come: text in pieces behind its agent's name, and a line for all else."""

    def __init__(self, output: Output) -> None:
        self._output: Final = output
        self._speaker: str | None = None
        self._flow: Flow | None = None
        """What the speaker is saying."""
        self._status: Status | None = None
        self._has_said = False

    def begin(self) -> None:
        """A turn begins: until something happens, show that it is waited for."""
        self._has_said = False
        if self._output.err.is_terminal and self._output.out.is_terminal:
            self._status = self._output.err.status("...")
            self._status.start()

    def tell(self, event: RunEvent) -> None:
        """Print what has happened."""
        self._stop_waiting()
        match event:
            case TextDelta(text, agent_name):
                self._say(label_of(agent_name), text, "")
                self._has_said = True
            case ReasoningDelta(text, agent_name) if self._output.out.is_terminal:
                self._say(f"{label_of(agent_name)} thinks", text, "dim italic")
            case ToolStarted(call, agent_name):
                self._line(f"{agent_name} calls {call_text(call)}", "yellow")
            case ToolFinished(_, result):
                self._gave(result)
            case ApprovalRequested(call, agent_name):
                self._line(f"{agent_name} wants to call {call_text(call)}, and waits for approval", WAITING)
            case HandedOff(handoff, agent_name):
                why = f": {handoff.reason}" if handoff.reason else ""
                self._line(f"handed over to {agent_name}{why}", "magenta")
            case AnswerRejected(_, agent_name):
                self._line(f"{agent_name}'s answer was not of its output type, and is asked for once more", "yellow")
            case Done(response):
                self.done(response)
            case _:
                pass

    def done(self, response: AgentResponse) -> None:
        """The turn is stored; print its answer if it was not told in pieces."""
        self._stop_waiting()
        if response.content and not self._has_said:
            self._say(label_of(response.active_agent_name), response.content, "")
        self.end()

    def end(self) -> None:
        """The turn is over, however it ended."""
        self._stop_waiting()
        flow, self._flow, self._speaker = self._flow, None, None
        if flow is not None:
            flow.end()

    def _say(self, who: str, text: str, style: str) -> None:
        if self._flow is None or self._speaker != who:
            self.end()
            self._speaker = who
            begin = Text(f"{who}: ", "bold green")
            self._flow = self._output.flow(begin, None if self._output.out.is_terminal else Text())
        self._flow.add(text, style)

    def _gave(self, result: ToolResult) -> None:
        gave = "failed:" if result.is_error else "gave"
        text = f"{result.name} {gave} {one_line(result_text(result), _LONGEST)}"
        self._line(text, "red" if result.is_error else "yellow")

    def _line(self, text: str, style: str) -> None:
        self.end()
        self._output.line(text, style, begin="  ")

    def _stop_waiting(self) -> None:
        status, self._status = self._status, None
        if status is not None:
            status.stop()
