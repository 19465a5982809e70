"""Which windows of a conversation may be sent where all of it is too long: whole turns, and always the running one.

Pure. Turns that a pair joins are sent together or not at all, whatever stands between them.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Container, Sequence
from functools import cached_property
from itertools import accumulate
from typing import Final, Literal

from chatflow.core.messages import Message, Role
from chatflow.core.pruning import Pairing, Window

OnContextWindow = Literal["raise", "shrink"]


def check_max_prompt_tokens(value: object) -> int | None:
    """*value* itself if it is a number of tokens, or None for no limit."""
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"max_prompt_tokens must be an integer or None, not {value!r}")
    if value < 1:
        raise ValueError(f"max_prompt_tokens must be at least 1, not {value}")
    return value


class Windows:
    """What may be sent of *messages*; the least first, and *last* all of it.

    *own* are, by their ids (Python's), those that the running turn has to send. In each window are these, system
    messages, and the turns that hold the call of a result in them, or the result of a call. The other turns are left
    out from the oldest on; those that a pair joins go with the newest of them. Turns of *refused* messages are in none.

    Nothing is looked for before it is asked for: mostly all of it is sent.
    """

    def __init__(self, messages: Sequence[Message], own: Container[int], refused: frozenset[int] = frozenset()) -> None:
        self._messages: Final = messages
        self._own: Final = own
        self._refused: Final = refused

    @cached_property
    def _kept(self) -> tuple[Sequence[Message], list[int | None]]:
        """What pruning would ever keep, and for each in which window it comes in: the first is 0, None is never."""
        window, ids = Window(), list[int]()
        for message in self._messages:
            if window.add(message) and message.role is not Role.SYSTEM:
                ids.append(id(message))
        body = window.history().body_from(0)
        groups = _groups(body, [each in self._own for each in ids])
        refused = {group for group, each in zip(groups, ids, strict=True) if group and each in self._refused}
        order: dict[int, int | None] = dict.fromkeys(refused)
        order |= {group: place for place, group in enumerate(sorted({0, *groups} - refused))}
        systems = window.history().systems_from(0)
        return [*systems, *body], [*(0 for _ in systems), *(order[group] for group in groups)]

    @cached_property
    def turns(self) -> list[int]:
        """How many turns each of them has."""
        messages, places = self._kept
        sizes = [0] * (1 + max((place for place in places if place is not None), default=0))
        for message, place in zip(messages, places, strict=True):
            if place is not None:
                sizes[place] += message.role is Role.USER
        return list(accumulate(sizes))

    @property
    def last(self) -> int:
        """The index of the one that is all of it."""
        return len(self.turns) - 1

    def window(self, index: int | None) -> Sequence[Message]:
        """The messages of the one at *index*; of all of it for None."""
        if not self._refused and (index is None or index == self.last):
            return self._messages
        most = self.last if index is None else index
        return [message for message, place in zip(*self._kept, strict=True) if place is not None and place <= most]

    def left_out(self, index: int | None) -> tuple[Message, ...]:
        """What that one leaves out, in order."""
        if not self._refused and (index is None or index == self.last):
            return ()
        sent = set(map(id, self.window(index)))
        return tuple(message for message in self._messages if id(message) not in sent and id(message) not in self._own)

    def half(self, index: int) -> int:
        """The largest one with at most half the turns of that at *index*; the least where pairs hold more together."""
        return max(0, bisect_right(self.turns, self.turns[index] // 2) - 1)


def _groups(body: Sequence[Message], own: Sequence[bool]) -> list[int]:
    """Which group each message is in: 0 with all that the running turn has to send, the others by their newest turn."""
    joined = [0]  # by turn, counted from the oldest on: a newer one that it goes with, or itself; 0 is the running one

    def group(turn: int) -> int:
        while joined[turn] != turn:
            joined[turn] = turn = joined[joined[turn]]
        return turn

    turns: list[int] = []
    pairing, has_begun = Pairing(), False
    for position, message in enumerate(body):
        if message.role is Role.USER:
            has_begun = has_begun or own[position]
            if not own[position]:
                joined.append(len(joined))
        turns.append(0 if own[position] else len(joined) - 1)
        if own[position] and not has_begun:
            joined[group(len(joined) - 1)] = 0  # it stands in a turn that was there before
        pairing.call(position, message.tool_calls)
        for result in message.tool_results:
            found = pairing.answer(result.tool_call_id)
            assert found is not None  # the others are not kept
            older, newer = sorted((group(turns[found[0].position]), group(turns[position])))
            if older:
                joined[older] = newer
            else:
                joined[newer] = 0
    # The newest first, after the running one.
    return [len(joined) - turn if turn else 0 for turn in map(group, turns)]
