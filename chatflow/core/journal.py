"""The journal of a turn with a message id: what it must not do twice, kept until it commits.

Before the calls of a model run, they are noted; when one has ended, its result, and with it what the tool did to the
conversation. A turn that is tried again does these things over from the journal instead of calling anything. The
entries are changes, not states: what others have committed meanwhile stays.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Literal

import attrs

from chatflow.core.messages import Handoff, Message, ToolResult
from chatflow.core.service import ServiceStep

Done = Literal["set", "remove", "agent", "add", "clear", "drop", "mark", "restore"]


@attrs.frozen(kw_only=True)
class Deed:
    """One thing that a tool did to its conversation.

    ``set`` and ``remove`` name a *key* of metadata or state, by *kind*, or with *inner* a key of the mapping that
    stands there; ``agent`` sets the active agent to the name *value*; ``add`` is a *message*; ``drop`` takes the last
    *value* messages away; ``mark`` is a checkpoint, of the number *value*, and ``restore`` goes back to it; the number
    0 is the moment that the turn began.
    """

    what: Done
    kind: Literal["metadata", "state"] | None = None
    key: str | None = None
    inner: str | None = None
    value: Any = None
    message: Message | None = None


@attrs.frozen(kw_only=True)
class Entry:
    """A line of the journal, of the turn's *iteration*: a model's *message* with calls, or what call *index* led to.

    *service* is what the message has made of a service's session, where one keeps the history.
    """

    iteration: int
    message: Message | None = None
    service: ServiceStep | None = None
    index: int | None = None
    result: ToolResult | None = None
    handoff: Handoff | None = None
    deeds: tuple[Deed, ...] = ()


_recorded: ContextVar[tuple[tuple[object, list[Deed]], ...]] = ContextVar("chatflow_deeds", default=())


@contextmanager
def recording(working: object) -> Generator[list[Deed]]:
    """What the code inside, and what it starts, does to that working copy, in order.

    A tool may run another conversation: what happens there is not its own conversation's, and what that one's tools do
    to this one is.
    """
    deeds: list[Deed] = []
    token = _recorded.set((*_recorded.get(), (working, deeds)))
    try:
        yield deeds
    finally:
        _recorded.reset(token)


def record(working: object, what: Done, **facts: Any) -> None:
    """Note that this `Deed` was done to that working copy, if anybody records it."""
    for recorded, deeds in _recorded.get():
        if recorded is working:
            deeds.append(Deed(what=what, **facts))


class Journal:
    """The journal of one turn, as it was found: what was called in each iteration, and what that led to."""

    def __init__(self, entries: Iterable[Entry] = ()) -> None:
        self._called: dict[int, Entry] = {}
        self._returned: dict[int, dict[int, Entry]] = {}
        for entry in entries:
            if entry.message is not None:
                self._called[entry.iteration] = entry
            elif entry.index is not None:
                self._returned.setdefault(entry.iteration, {})[entry.index] = entry

    def called(self, iteration: int) -> Entry | None:
        """The line with the model's message of that iteration, if it has been noted."""
        return self._called.get(iteration)

    def returned(self, iteration: int) -> dict[int, Entry]:
        """What has ended of that iteration's calls, by their index, in the order of their ends."""
        return self._returned.get(iteration, {})
