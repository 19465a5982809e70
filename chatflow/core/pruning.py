"""Pruning by whole turns: pure functions of values, and the window that does the same step by step.

A turn begins at each user message. A result belongs to the nearest earlier open call of its id; within one message,
calls of one id are answered in order; a further result belongs to the call of its id that was answered last. History is
cut only at a user message that no call-result pair straddles: turns that a pair joins stay or go together, as a block.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from itertools import takewhile
from typing import Final

import attrs

from chatflow.core.history import History
from chatflow.core.messages import Message, Role, ToolCall, ToolResult

_MOST_TURNS: Final = 2**62
"""What every storage can hold as a number."""

_COMPACT_AFTER: Final = 1024
"""Messages cut from the front before the list is copied without them; a copy then costs less than it frees."""


def prune(messages: Iterable[Message], max_turns: int) -> tuple[Message, ...]:
    """The history that a conversation keeps of *messages*.

    System messages come first, in order, then the last *max_turns* turns from a user message on, and as many more to
    the left as hold the call of a result that stays. What comes before the first user message goes, and so does a
    result without its call (of a tool message with several results, the others stay). No message is copied or changed
    but such a tool message. The newest user message always stays.

    Raises:
        ValueError: *max_turns* is below 1.
        TypeError: *max_turns* is not an integer.
    """
    check_max_turns(max_turns)
    window = Window()
    for message in messages:
        window.add(message)
    history = window.history(max_turns)
    return tuple(history)


def check_max_turns(max_turns: object, name: str = "max_turns") -> int:
    """*max_turns* itself, or the error that refuses it."""
    if not isinstance(max_turns, int) or isinstance(max_turns, bool):
        raise TypeError(f"{name} must be an integer, not {max_turns!r}")
    if max_turns < 1:
        raise ValueError(f"{name} must be at least 1, not {max_turns}")
    if max_turns > _MOST_TURNS:
        raise ValueError(f"{name} must be at most {_MOST_TURNS}, not {max_turns}")
    return max_turns


@attrs.frozen
class CallPlace:
    """Where a call stands: the position of its message, and its index among that message's calls."""

    position: int
    index: int


def is_blank_id(call_id: str) -> bool:
    """Whether it names no call."""
    # "null" is what a provider without ids turns into on the way, and Mistral refuses it.
    return call_id == "null" or not call_id.strip()


class Pairing:
    """Which call a result belongs to, told as messages come by in order."""

    __slots__ = ("_answered", "_open")

    def __init__(self) -> None:
        self._open: dict[str, list[CallPlace]] = {}
        self._answered: dict[str, CallPlace] = {}

    def call(self, position: int, calls: Sequence[ToolCall]) -> None:
        """Note the calls of the message at *position*."""
        # The last one noted is the first one answered: backwards within a message, so that its calls answer in order.
        for index in reversed(range(len(calls))):
            self._open.setdefault(calls[index].id, []).append(CallPlace(position, index))

    def knows(self, call_id: str) -> bool:
        """Whether a result for *call_id* would find a call."""
        return bool(self._open.get(call_id)) or call_id in self._answered

    @property
    def first_open(self) -> int | None:
        """The position of the first message with a call that has no result."""
        return min((places[0].position for places in self._open.values()), default=None)

    def answer(self, call_id: str) -> tuple[CallPlace, bool] | None:
        """The call that the next result for *call_id* belongs to, and whether it had been answered before."""
        places = self._open.get(call_id)
        if places:
            place = places.pop()
            if not places:
                del self._open[call_id]
            self._answered[call_id] = place
            return place, False
        answered = self._answered.get(call_id)
        return None if answered is None else (answered, True)

    def forget(self, messages: Iterable[Message], before: int) -> None:
        """Drop what is known of *messages*, all of which stand at positions below *before*."""
        for call in (call for message in messages for call in message.tool_calls):
            places = self._open.get(call.id)
            if places is not None:
                stale = sum(1 for _ in takewhile(lambda place: place.position < before, places))
                del places[:stale]
                if not places:
                    del self._open[call.id]
            answered = self._answered.get(call.id)
            if answered is not None and answered.position < before:
                del self._answered[call.id]


@attrs.define
class _Block:
    """Turns that no cut may part: where the first begins, and how many they are."""

    start: int
    turns: int


class Window:
    """The messages of one conversation as they come, cut to whole turns on demand.

    Positions count every message but system messages since the conversation began; they only grow, and a message keeps
    its position for life. Each step takes the same time however long the history is.
    """

    __slots__ = ("_blocks", "_body", "_offset", "_pairing", "_start", "_systems", "_turns")

    def __init__(self, start: int = 0) -> None:
        self._systems: list[Message] = []
        self._body: list[Message] = []
        self._offset = start  # the position of _body[0]
        self._start = start  # the position of the first message that is kept
        self._blocks: deque[_Block] = deque()
        self._turns = 0
        self._pairing = Pairing()

    @classmethod
    def of(cls, history: History, start: int) -> Window:
        """The window that holds *history*, whose first message after the system messages has the position *start*."""
        window = cls(start)
        for message in history:
            window.add(message)
        return window

    @property
    def start(self) -> int:
        """The position of the first message kept."""
        return self._start

    @property
    def end(self) -> int:
        """The position that the next message will have."""
        return self._offset + len(self._body)

    @property
    def turns(self) -> int:
        """How many turns are kept."""
        return self._turns

    @property
    def first_open(self) -> int | None:
        """The position of the first message kept with a call that has no result; None where all have one."""
        return self._pairing.first_open

    def unmatched(self, message: Message) -> str | None:
        """The id of the first result in *message* that has no call here, or None."""
        for result in message.tool_results:
            if not self._pairing.knows(result.tool_call_id):
                return result.tool_call_id
        return None

    def matched(self, message: Message) -> Message | None:
        """*message* less its results that have no call here; None where it had no others."""
        kept = [result for result in message.tool_results if self._pairing.knows(result.tool_call_id)]
        if len(kept) == len(message.tool_results):
            return message
        return attrs.evolve(message, tool_results=kept) if kept else None

    def add(self, message: Message) -> bool:
        """Take *message*, less its results without a call. False if pruning leaves nothing of it."""
        role = message.role
        if role is Role.SYSTEM:
            self._systems.append(message)
            return True
        if role is Role.USER:
            self._blocks.append(_Block(self.end, 1))
            self._turns += 1
        elif not self._blocks:
            return False
        elif role is Role.TOOL:
            kept: list[ToolResult] = []
            for result in message.tool_results:
                answered = self._pairing.answer(result.tool_call_id)
                if answered is not None:
                    kept.append(result)
                    self._join(answered[0].position)
            if not kept:
                return False
            if len(kept) < len(message.tool_results):
                message = attrs.evolve(message, tool_results=kept)
        elif message.tool_calls:
            self._pairing.call(self.end, message.tool_calls)
        self._body.append(message)
        return True

    def _join(self, position: int) -> None:
        """Make one block of all turns from the one that holds *position* on."""
        while self._blocks[-1].start > position:
            last = self._blocks.pop()
            self._blocks[-1].turns += last.turns

    def history(self, max_turns: int | None = None) -> History:
        """What is kept, or the last *max_turns* turns of it."""
        low = self._start if max_turns is None else self._cut(max_turns)
        return History(self._systems, len(self._systems), self._body, low - self._offset, len(self._body))

    def cuts(self) -> list[int]:
        """The positions that it may be cut at, the oldest first; the first leaves all of it."""
        return [block.start for block in self._blocks]

    def _cut(self, max_turns: int) -> int:
        left = self._turns
        for block in self._blocks:
            left -= block.turns
            if left < max_turns:
                return block.start
        return self.end

    def trim(self, max_turns: int) -> None:
        """Forget all but the last *max_turns* turns. Histories taken before still show them."""
        start = self._cut(max_turns)
        if start == self._start:
            return
        self._pairing.forget(self._body[self._start - self._offset : start - self._offset], start)
        while self._blocks and self._blocks[0].start < start:
            self._turns -= self._blocks.popleft().turns
        self._start = start
        cut = start - self._offset
        if cut > _COMPACT_AFTER and cut * 2 > len(self._body):
            self._body = self._body[cut:]
            self._offset = start
