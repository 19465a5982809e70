"""Which windows of a conversation may be sent where all of it is too long: whole turns, and always the running one.

Pure. A window is cut as pruning cuts a history: at a user message that no pair straddles.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from functools import cached_property
from typing import Final, Literal

from chatflow.core.messages import Message
from chatflow.core.pruning import Window

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
    """What may be sent of *before*, ahead of all that the *turn* has to send; the least first, and *last* all of it.

    System messages are in each of them. So are the turns before the running one that hold the call of a result in it.
    Nothing is looked for before it is asked for: mostly all of it is sent.
    """

    def __init__(self, before: Sequence[Message], turn: Sequence[Message]) -> None:
        self._before: Final = before
        self._turn: Final = turn
        self._window: Final = Window()

    @cached_property
    def turns(self) -> list[int]:
        """How many turns each of them has."""
        window = self._window
        for message in self._before:
            window.add(message)
        begun = window.end
        for message in self._turn:
            window.add(message)
        own, sizes = window.end - begun, window.sizes()
        least = bisect_left(sizes, own, key=lambda turns: window.history(turns).body_length)
        return sizes[least:] or [0]

    @property
    def last(self) -> int:
        """The index of the one that is all of it."""
        return len(self.turns) - 1

    def window(self, index: int | None) -> Sequence[Message]:
        """The messages of the one at *index*; of all of it for None."""
        if index is None or index == self.last:
            return [*self._before, *self._turn]
        return self._window.history(self.turns[index])

    def left_out(self, index: int | None) -> tuple[Message, ...]:
        """What that one leaves out, in order."""
        if index is None or index == self.last:
            return ()
        sent = set(map(id, self.window(index)))
        return tuple(message for message in self._before if id(message) not in sent)

    def half(self, index: int) -> int:
        """The largest one with at most half the turns of that at *index*; the least where pairs hold more together."""
        return max(0, bisect_right(self.turns, self.turns[index] // 2) - 1)
