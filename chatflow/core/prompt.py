"""What a model is sent: a conversation's history as a list that every provider takes. Pure: no clock, nothing stored.

The list is always valid: system messages, then a user message, then the rest; each call answered directly after it,
once; ids that are not empty and stand once, the same in call and result. Histories fall short of that for good reasons
(a turn was cut off while a tool ran, a result came turns later, a provider gives all calls the same id), so that what
is missing is filled in here and nowhere else. The same beginning of a history gives the same beginning of the list,
since providers cache prompts by their beginning; only a result that comes late changes what stands before it.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Container, Iterator, Sequence
from itertools import count
from typing import Final

import attrs

from chatflow.core.approvals import tokens_of
from chatflow.core.messages import Content, Message, Part, Role, TextPart, ToolCall, ToolResult
from chatflow.core.pruning import CallPlace, Pairing, is_blank_id
from chatflow.exceptions import shorten

EMPTY_TEXT: Final = "(empty message)"
"""Sent for a user message without content: providers refuse or drop one, and then the model would speak first."""

INTERRUPTED: Final = "The call was interrupted; whether it took effect is unknown."
"""Sent as the result of a call that has none."""

AWAITING: Final = (
    "A person has to approve this call, and what comes of it is not known yet. Don't make it again; say so, and go on."
)
"""Sent as the result of a call that a person is asked about and that has none: decided about or not, run or not."""

ARRIVED: Final = "(A result of an earlier tool call has arrived only now. It stands with its call above.)"
"""Sent as a user message where a late result came while the model had spoken last: a model answers others' words."""

_NO_TIME: Final = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)
"""The timestamp of the instructions, which belong to no moment."""


@attrs.frozen
class Prompt:
    """The messages to send, and what had to be repaired for it.

    *repairs* names each message by its place in the history, and calls by their ids; it never quotes content. System
    messages in front, results gathered in one message, and what is said of calls that wait for a person, or have waited
    long, are the form of a prompt and no repairs.
    """

    messages: tuple[Message, ...]
    repairs: tuple[str, ...] = ()


def to_prompt(history: Sequence[Message], instructions: str | None = None, *, numbered_from: int = 0) -> Prompt:
    """What a model is sent of *history*, after the active agent's *instructions*.

    Any list of messages will do, pruned or not. A result belongs to the call that pruning says it belongs to. Of
    several results of one call the last is sent, in the place of the first: a tool that answers "pending" and later
    "done" has only then told the model something, and the earlier answer is out of date. Messages keep their `extra`,
    and a model's message keeps all its calls in order, so that what a provider said about each stays with it.

    A history that ends with a model's words ends so here too. Without a user message only system messages are sent.
    *numbered_from* is the place that the first message has for repairs.
    """
    first: list[Message] = []
    if instructions is not None and instructions.strip():
        first.append(Message(Role.SYSTEM, instructions, timestamp=_NO_TIME))
    valid = _as_it_stands(history)
    prompt = _mended(history, numbered_from) if valid is None else Prompt(valid)
    return attrs.evolve(prompt, messages=(*first, *prompt.messages))


def _mended(history: Sequence[Message], numbered_from: int) -> Prompt:
    prompt = _Draft(history)
    for position, message in enumerate(history):
        prompt.take(position, message)
    repairs = sorted(prompt.repairs, key=lambda repair: repair[0])
    return Prompt(
        (*prompt.systems, *prompt.body),
        tuple(f"message {position + numbered_from}: {what}" for position, what in repairs),
    )


def _as_it_stands(history: Sequence[Message]) -> tuple[Message, ...] | None:
    """The messages of a history that is valid already, system messages first; None for any other.

    Most are, and each request of a turn takes a prompt: found out in a seventh of the time that mending takes.
    """
    systems: list[Message] = []
    body: list[Message] = []
    ids: set[str] = set()
    calls: tuple[ToolCall, ...] = ()
    for message in history:
        role = message.role
        if role is Role.SYSTEM:
            systems.append(message)
        elif role is Role.TOOL:
            body.append(message)
            if not _answer_each(message.tool_results, calls):
                return None
            calls = ()
            continue
        elif calls or not (body or role is Role.USER):
            return None
        else:
            body.append(message)
            calls = message.tool_calls
            for call in calls:
                if call.id in ids or is_blank_id(call.id):
                    return None
                ids.add(call.id)
            if calls:
                continue
        if _falls_short(message.content, role):
            return None
    return None if calls else (*systems, *body)


def _falls_short(content: Content, role: Role) -> bool:
    if role is Role.USER and isinstance(content, tuple):
        return not content or any(map(_is_blank_part, content))
    return _is_blank(content)


def _answer_each(results: Sequence[ToolResult], calls: Sequence[ToolCall]) -> bool:
    if len(results) != len(calls):
        return False
    for result, call in zip(results, calls, strict=True):
        if result.tool_call_id != call.id or result.name != call.name:
            return False
    return True


def new_ids(taken: Container[str]) -> Iterator[str]:
    """Ids that every provider takes, nine letters and digits; none that is in *taken* when it is given out."""
    return (new for new in map("call{:05}".format, count(1)) if new not in taken)


@attrs.frozen
class _Answer:
    position: int
    message: Message
    result: ToolResult


class _Draft:
    def __init__(self, history: Sequence[Message]) -> None:
        self.systems: list[Message] = []
        self.body: list[Message] = []
        self.repairs: list[tuple[int, str]] = []
        self._answers: dict[CallPlace, _Answer] = {}
        self._sent_ids: set[str] = set()
        self._new_ids = new_ids(self._sent_ids)
        self._long_awaited: Final[set[int]] = set()
        self._pair(history)
        self._sent_from: Final = {answer.position for answer in self._answers.values()}

    def _repaired(self, position: int, what: str) -> None:
        self.repairs.append((position, what))

    def _pair(self, history: Sequence[Message]) -> None:
        """Find the call of each result that is sent."""
        pairing = Pairing()
        begun = False
        last = 0  # where somebody has spoken last, other than a tool
        for position, message in enumerate(history):
            begun = begun or message.role is Role.USER
            if begun and message.role in {Role.USER, Role.MODEL}:
                last = position
                pairing.call(position, message.tool_calls)
            for result in message.tool_results if begun else ():
                found = pairing.answer(result.tool_call_id)
                name = shorten(result.tool_call_id)
                if found is None:
                    self._repaired(position, f"the result for {name} has no call; left out")
                    continue
                place, repeated = found
                if repeated:
                    self._repaired(position, f"another result for {name}; sent in place of the one before")
                elif place.position != last:
                    if place.index in tokens_of(history[place.position]):
                        self._long_awaited.add(position)
                    else:
                        self._repaired(position, f"the result for {name} came late; moved to its call")
                self._answers[place] = _Answer(position, message, result)

    def take(self, position: int, message: Message) -> None:
        """Add what is sent of the message at *position*."""
        if message.role is Role.SYSTEM:
            if _is_blank(message.content):
                self._repaired(position, "a system message without content; left out")
            else:
                self.systems.append(message)
        elif message.role is Role.USER:
            self.body.append(self._user(position, message))
        elif not self.body:
            self._repaired(position, f"a {message.role.value} message before the first user message; left out")
        elif message.role is Role.TOOL:
            # What it holds was sent with the calls; after those it would be the last to speak, but for this.
            if position in self._sent_from and self.body[-1].role is Role.MODEL:
                self.body.append(Message(Role.USER, ARRIVED, timestamp=message.timestamp))
                if position not in self._long_awaited:
                    self._repaired(position, "a note to the model stands where a late result came")
        elif message.tool_calls:
            self._calls(position, message)
        elif _is_blank(message.content):
            self._repaired(position, "a model message with neither text nor calls; left out")
        else:
            self.body.append(message)

    def _user(self, position: int, message: Message) -> Message:
        content = message.content
        if _is_blank(content):
            self._repaired(position, f"a user message without content; sent as {EMPTY_TEXT!r}")
            return attrs.evolve(message, content=EMPTY_TEXT)
        if isinstance(content, tuple) and any(map(_is_blank_part, content)):
            self._repaired(position, "empty text among the parts of a user message; left out")
            return attrs.evolve(message, content=[part for part in content if not _is_blank_part(part)])
        return message

    def _calls(self, position: int, message: Message) -> None:
        """Add a model's message with calls, and directly after it their results."""
        calls: list[ToolCall] = []
        answers: list[_Answer] = []
        awaited = tokens_of(message)
        for index, call in enumerate(message.tool_calls):
            call_id = self._id(position, call.id)
            answer = self._answers.get(CallPlace(position, index))
            if answer is None and index in awaited:
                answer = _Answer(position, message, ToolResult(tool_call_id=call_id, name=call.name, content=AWAITING))
            elif answer is None:
                self._repaired(position, f"the call {shorten(call.id)} has no result; answered as interrupted")
                result = ToolResult(tool_call_id=call_id, name=call.name, content=INTERRUPTED, is_error=True)
                answer = _Answer(position, message, result)
            elif (answer.result.tool_call_id, answer.result.name) != (call_id, call.name):
                if answer.result.name != call.name:
                    self._repaired(answer.position, f"the result for {shorten(call.id)} names another tool; renamed")
                answer = attrs.evolve(answer, result=attrs.evolve(answer.result, tool_call_id=call_id, name=call.name))
            calls.append(call if call_id == call.id else attrs.evolve(call, id=call_id))
            answers.append(answer)
        unchanged = all(mine is theirs for mine, theirs in zip(calls, message.tool_calls, strict=True))
        self.body.append(message if unchanged else attrs.evolve(message, tool_calls=calls))
        self.body.append(_gathered(message, answers))

    def _id(self, position: int, call_id: str) -> str:
        """*call_id* itself, or a new one where it is none or was sent before."""
        if call_id in self._sent_ids or is_blank_id(call_id):
            new = next(self._new_ids)  # only what comes before decides which one: a longer history gives the same
            self._repaired(position, f"the call id {shorten(call_id)} is empty or stands before; sent as {new}")
            call_id = new
        self._sent_ids.add(call_id)
        return call_id


def _gathered(message: Message, answers: Sequence[_Answer]) -> Message:
    """The one tool message that answers *message*: as it was stored where it was stored as one."""
    results = tuple(answer.result for answer in answers)
    sources = list({answer.position: answer.message for answer in answers if answer.message is not message}.values())
    if not sources:
        return Message(Role.TOOL, tool_results=results, agent_name=message.agent_name, timestamp=message.timestamp)
    first = sources[0]
    if list(map(id, results)) == list(map(id, first.tool_results)):
        return first
    extra = {name: value for source in reversed(sources) for name, value in source.extra.items()}
    return attrs.evolve(first, tool_results=results, extra=extra)


def _is_blank_part(part: Part) -> bool:
    return isinstance(part, TextPart) and not part.text.strip()


def _is_blank(content: Content) -> bool:
    if isinstance(content, tuple):
        return all(map(_is_blank_part, content))
    return not content or content.isspace()
