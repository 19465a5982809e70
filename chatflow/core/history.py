"""A conversation's messages as a read-only sequence."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from itertools import chain, islice
from typing import Final, NoReturn, cast, overload

from chatflow.core.messages import Message

_ADVICE: Final = (
    "session.history is read-only, so that no call is parted from its result; use await session.add_message(...),"
    " await session.rollback_to(session.checkpoint()) or await session.clear_history()"
)


def _refuse_change(self: object, *_args: object, **_kwargs: object) -> NoReturn:
    raise TypeError(_ADVICE)


class History(Sequence[Message]):
    """Messages in order, system messages first: bounds into lists that only ever grow at their end.

    Equal to a list or tuple of the same messages. A slice is a tuple. What would change it raises `TypeError` and names
    the method to use. A history shows what it showed when it was taken, whatever the conversation does later.
    """

    __hash__ = None  # type: ignore[assignment]  # compares by content, like the lists it stands for
    __slots__ = ("_body", "_high", "_low", "_system_count", "_systems")

    __setitem__ = __delitem__ = __iadd__ = __imul__ = _refuse_change
    append = clear = extend = insert = pop = remove = reverse = sort = _refuse_change

    def __init__(self, systems: list[Message], system_count: int, body: list[Message], low: int, high: int) -> None:
        self._systems = systems
        self._system_count = system_count
        self._body = body
        self._low = low
        self._high = high

    def __len__(self) -> int:
        return self._system_count + self._high - self._low

    @overload
    def __getitem__(self, index: int) -> Message: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Message, ...]: ...
    def __getitem__(self, index: int | slice) -> Message | tuple[Message, ...]:
        if isinstance(index, slice):
            return tuple(self[position] for position in range(*index.indices(len(self))))
        position = operator.index(index)
        if position < 0:
            position += len(self)
        if not 0 <= position < len(self):
            raise IndexError(f"history index {index} out of range, {len(self)} messages")
        if position < self._system_count:
            return self._systems[position]
        return self._body[self._low + position - self._system_count]

    def __iter__(self) -> Iterator[Message]:
        return chain(islice(self._systems, self._system_count), islice(self._body, self._low, self._high))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, History | list | tuple):
            return NotImplemented
        others = cast("Sequence[object]", other)
        return len(self) == len(others) and all(mine == theirs for mine, theirs in zip(self, others, strict=True))

    def __repr__(self) -> str:
        return f"History({list(self)!r})"

    @property
    def system_count(self) -> int:
        """How many system messages stand at its front."""
        return self._system_count

    @property
    def body_length(self) -> int:
        """How many messages follow the system messages."""
        return self._high - self._low

    def systems_from(self, index: int) -> tuple[Message, ...]:
        """The system messages from the one at *index* on."""
        return tuple(self._systems[index : self._system_count])

    def body_from(self, index: int) -> tuple[Message, ...]:
        """The messages after the system messages, from the one at *index* among them on."""
        return tuple(self._body[self._low + index : self._high])

    def body_before(self, index: int) -> tuple[Message, ...]:
        """The messages after the system messages, up to the one at *index* among them."""
        return tuple(self._body[self._low : self._low + index])

    def grows_from(self, earlier: History, cut: int) -> bool:
        """Whether this is *earlier* less *cut* messages at the front of its body, with nothing but additions since."""
        kept = earlier.body_from(cut)
        return (
            cut >= 0
            and self.system_count >= earlier.system_count
            and self.body_length >= len(kept)
            and all(mine is theirs for mine, theirs in zip(self.systems_from(0), earlier.systems_from(0), strict=False))
            and all(mine is theirs for mine, theirs in zip(self.body_from(0), kept, strict=False))
        )


EMPTY_HISTORY: Final = History([], 0, [], 0, 0)
