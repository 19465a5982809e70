"""Which turns of a conversation a summary is to stand for, and how one is told from other system messages. Pure.

Turns leave by lots: once one has to, all but the newest few do, so that not every turn pays for a summary. Who makes it
may have no room for all of them: then as many leave as there is room for, and the others with the next.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import attrs

from chatflow.core.messages import Message, Role
from chatflow.core.pruning import Window

SUMMARY_KEY: Final = "chatflow"
SUMMARY: Final = "summary"
"""In a system message's `extra`, under ``"chatflow"``: it stands for turns that have left the conversation."""


def is_summary(message: Message) -> bool:
    """Whether *message* stands for turns that have left its conversation."""
    return message.role is Role.SYSTEM and message.extra.get(SUMMARY_KEY) == SUMMARY


@attrs.frozen
class Leaving:
    """Turns that leave: *messages*, from the position *begin* on.

    They may be parted at *cuts*, the oldest first; the last is where they end. Those before *forced* leave with this
    commit, whether there is a summary of them or not.
    """

    begin: int
    messages: tuple[Message, ...]
    cuts: tuple[int, ...]
    forced: int

    @property
    def start(self) -> int:
        """The position of what stays."""
        return self.cuts[-1]

    def between(self, begin: int, end: int) -> tuple[Message, ...]:
        """Those from one position to another."""
        return self.messages[begin - self.begin : end - self.begin]


def leaving(
    window: Window,
    max_turns: int,
    *,
    earlier: Iterable[Message],
    left_out: Iterable[Message] = (),
    keep_turns: int | None = None,
) -> Leaving | None:
    """What is to leave *window* at the commit of a turn that began with *earlier*; None where nothing has to.

    Something has to where a commit would keep *max_turns* turns of more, or where *left_out* was not sent. Then all but
    the newest *keep_turns* turns leave, by default half of those that may stay, and never the running turn. Turns that
    a pair joins leave together. A call that has no result yet keeps its turn, and those after it, for as long as
    *max_turns* does: whoever it waits for may still answer it.
    """
    body = window.history().body_from(0)
    gone = set(map(id, left_out))
    unsent = next((place + 1 for place in reversed(range(len(body))) if id(body[place]) in gone), 0)
    stays = max(1, min(_turns(body[unsent:]), max_turns))
    if stays >= window.turns:
        return None
    before = set(map(id, earlier))
    own = _turns(message for message in body if id(message) not in before)
    keeps = min(max(keep_turns or stays // 2, own, 1), stays)
    start = min(_cut(window, keeps), _cut_before(window, window.first_open))
    forced = _cut(window, max_turns)
    start = max(start, forced)
    messages = tuple(body[: start - window.start])
    cuts = tuple(cut for cut in window.cuts() if window.start < cut <= start)
    return Leaving(window.start, messages, cuts, forced) if messages else None


def _turns(messages: Iterable[Message]) -> int:
    return sum(message.role is Role.USER for message in messages)


def _cut(window: Window, turns: int) -> int:
    return window.end - window.history(turns).body_length


def _cut_before(window: Window, position: int | None) -> int:
    """The last place to cut at that leaves what stands at *position* whole."""
    if position is None:
        return window.end
    return next(cut for cut in reversed(window.cuts()) if cut <= position)
