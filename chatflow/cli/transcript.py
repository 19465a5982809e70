"""A conversation as a person reads it: who spoke, which tools ran, where the window begins, what waits, its cost."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import attrs
from rich.cells import cell_len, set_cell_size
from rich.text import Text

from chatflow.cli.output import Output
from chatflow.cli.safe import one_line, shown, value_text
from chatflow.core.approvals import open_calls
from chatflow.core.compaction import is_summary
from chatflow.core.envelopes import encode
from chatflow.core.messages import Content, Message, Role, TextPart, ToolCall, ToolResult, UnknownPart
from chatflow.core.pruning import prune
from chatflow.core.session import SessionContext
from chatflow.core.usage import Usage

_LONGEST: Final = 1000
"""Characters of a text that are shown unless all are asked for."""

_WIDEST: Final = 20
"""Cells of a speaker's name."""

_STYLES: Final = {Role.USER: "bold cyan", Role.MODEL: "bold green", Role.SYSTEM: "magenta", Role.TOOL: "yellow"}
WAITING: Final = "bold red"


@attrs.frozen
class Said:
    """A piece of a message: who, what, and how it looks on a terminal."""

    who: str
    text: str
    style: str
    beside: str = ""


def session_data(session: SessionContext) -> dict[str, Any]:
    """What is shown of a session, as JSON."""
    usage = session.usage
    return {
        "session": session.to_dict(),
        "window": {"max_turns": session.max_turns, "turns": _turns(session.history), "begins": _begin(session)},
        "pending_approvals": [
            {"id": encode(call.id), "name": encode(call.name), "args": encode(call.args)}
            for call in session.pending_approvals
        ],
        "usage": {
            "total": encode(usage.total),
            "by_agent": encode(usage.by_agent),
            "by_model": encode(usage.by_model),
            "by_turn": [encode(counts) for counts in usage.by_turn],
        },
    }


def print_session(session: SessionContext, output: Output, *, full: bool) -> None:
    """Print all of a conversation."""
    output.line(session.session_id, "bold")
    for name, value, style in _facts(session):
        output.line(value, style, begin=f"  {name:<9} ")
    print_history(session, output, full=full)


def _facts(session: SessionContext) -> Iterator[tuple[str, str, str]]:
    yield "agent", session.active_agent_name, _STYLES[Role.MODEL]
    turns, most = _turns(session.history), session.max_turns
    full = "; it is full, and each new turn drops the oldest" if turns >= most else ""
    yield "window", f"{turns} of at most {most} turns{full}", ""
    usage = session.usage
    yield "usage", counts_text(usage.total) or "none reported", ""
    for name, groups in _several(usage):
        for who, counts in groups.items():
            yield name, f"{who}: {counts_text(counts)}", "dim"
    if session.metadata:
        yield "metadata", value_text(dict(session.metadata)), ""
    if session.state:
        yield "state", value_text(dict(session.state)), ""
    for call in session.pending_approvals:
        yield "waits", f"for approval: {call_text(call)}, call {call.id}", WAITING


def _several(usage: Usage) -> Iterator[tuple[str, Mapping[str, Mapping[str, Any]]]]:
    for name, groups in (("agents", usage.by_agent), ("models", usage.by_model)):
        if len(groups) > 1:
            yield name, groups


def counts_text(counts: Mapping[str, Any]) -> str:
    """Counts of tokens in words."""
    numbers = {name: count for name, count in counts.items() if isinstance(count, int | float)}
    return ", ".join(f"{count:,} {name.replace('_', ' ')}" for name, count in numbers.items())


def call_text(call: ToolCall) -> str:
    """A call as one would write it."""
    return f"{call.name}({', '.join(f'{name}={value_text_in_call(value)}' for name, value in call.args.items())})"


def value_text_in_call(value: Any) -> str:
    """An argument, as JSON."""
    return one_line(value_text(encode(value)) if not isinstance(value, str) else f'"{value}"', 200)


def _turns(history: Iterable[Message]) -> int:
    return sum(message.role is Role.USER for message in history)


def print_history(session: SessionContext, output: Output, *, full: bool, last: int | None = None) -> None:
    """Print the messages, or those of the *last* turns, and where the window begins."""
    history, begins = session.history, _begin(session)
    waiting = {(held.position, held.index) for held in open_calls(history)}
    width = _width(history)
    costs, turns = session.usage.by_turn, _turns(history)
    turn = 0
    skips = 0 if last is None else max(0, turns - last)
    if skips:
        output.line(f"({skips} earlier turns; `chatflow sessions show` shows them)", "dim")
    for position, message in enumerate(history):
        if message.role is Role.USER:
            turn += 1
        if skips and turn <= skips:
            continue
        if position == begins and begins:
            output.line()
            output.line(f"---- {_window_text(session, begins)} ----", "blue")
        elif message.role is Role.USER or not position:
            output.line()
        if message.role is Role.USER:
            cost = counts_text(costs[turn - 1])
            output.line(f"turn {turn}, {message.timestamp:%Y-%m-%d %H:%M:%SZ}{f', {cost}' if cost else ''}", "dim")
        for said in _pieces(message, position, waiting):
            print_said(said, output, width=width, full=full)


def _begin(session: SessionContext) -> int:
    """The position in the history of the first message that a commit would keep, system messages aside."""
    history = session.history
    return len(history) - (len(prune(history, session.max_turns)) - history.system_count)


def _window_text(session: SessionContext, begins: int) -> str:
    most = session.max_turns
    kept = f"the last {most} turns are kept" if most > 1 else "the last turn is kept"
    text = f"the window begins here: {kept}"
    return f"{text}; the next commit drops what stands above" if begins > session.history.system_count else text


def _width(history: Sequence[Message]) -> int:
    names = {_who(message) for message in history}
    return max(6, *(min(cell_len(shown(name)), _WIDEST) for name in names)) if names else 6


def _who(message: Message) -> str:
    if is_summary(message):
        return "summary"
    return message.agent_name or "model" if message.role is Role.MODEL else message.role.value


def print_said(said: Said, output: Output, *, width: int, full: bool) -> None:
    """Print a piece of a message, with who has said it beside it."""
    label = label_of(said.who)
    text = said.text
    if not full and len(text) > _LONGEST:
        text = f"{text[:_LONGEST]}\n(... {len(said.text) - _LONGEST:,} more characters; --full shows them)"
    begin = Text(" " * (width - cell_len(label))).append(label, said.style).append(" | ", "dim")
    flow = output.flow(begin, Text(" " * width).append(" | ", "dim"))
    flow.add(text, said.beside)
    flow.end()


def label_of(who: str) -> str:
    """The name of a speaker, as it stands beside what was said."""
    name = shown(who)
    return name if cell_len(name) <= _WIDEST else f"{set_cell_size(name, _WIDEST - 3)}..."


def _pieces(message: Message, position: int, waiting: set[tuple[int, int]]) -> Iterator[Said]:
    who = _who(message)
    style = _STYLES[message.role]
    text = content_text(message.content)
    if text or not (message.tool_calls or message.tool_results):
        yield Said(who, text, style)
    for index, call in enumerate(message.tool_calls):
        if (position, index) in waiting:
            yield Said(who, f"wants to call {call_text(call)}, and waits for approval", style, WAITING)
        else:
            yield Said(who, f"calls {call_text(call)}", style, "yellow")
    for result in message.tool_results:
        yield result_said(result)


def result_said(result: ToolResult) -> Said:
    """What a tool gave."""
    gave = "failed:" if result.is_error else "gave"
    text = f"{result.name} {gave} {result_text(result)}"
    return Said("tool", text, _STYLES[Role.TOOL], "red" if result.is_error else "")


def result_text(result: ToolResult) -> str:
    """What a tool gave, as text."""
    return content_text(result.parts) if result.parts else value_text(result.content)


def content_text(content: Content) -> str:
    """The content of a message, with words for what is no text."""
    if not isinstance(content, tuple):
        return content or ""
    parts: list[str] = []
    for part in content:
        if isinstance(part, TextPart):
            parts.append(part.text)
        elif isinstance(part, UnknownPart):
            parts.append(f"({part.type})")
        else:
            kind = type(part).__name__.removesuffix("Part").lower()
            size = f"{len(part.data):,} bytes" if part.data is not None else part.url
            parts.append(f"({kind}: {part.media_type or ''} {size})".replace(":  ", ": "))
    return "\n".join(parts)
