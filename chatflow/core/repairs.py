"""What `check` finds and `repair` does, as values; and how a damaged history becomes one that the rules allow."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Generic, Literal, TypeVar

import attrs

from chatflow.core.messages import Message, Role
from chatflow.core.pruning import Window
from chatflow.exceptions import shorten

_T = TypeVar("_T")

FaultKind = Literal[
    "message", "gap", "place", "front", "result", "session", "turn", "journal", "answer", "reference", "file"
]
Action = Literal["set aside", "replaced", "moved", "reindexed", "left alone", "not mended"]


@attrs.frozen(kw_only=True)
class Fault:
    """Something that is wrong with what a store holds.

    *kind* is one of

    - ``"message"``: a message that can't be read;
    - ``"gap"``: messages that are missing in the middle of a history;
    - ``"place"``: a system message among the others, or another among the system messages;
    - ``"front"``: a message before the first user message;
    - ``"result"``: a tool result without its call, by the rules of `prune`;
    - ``"session"``: a value of the conversation's own row that can't be read: its metadata, for instance;
    - ``"turn"``: a value of a turn's row can't be read: the message it is to answer, for instance;
    - ``"journal"``: what a turn has noted of its tool calls can't be read, or has gaps;
    - ``"answer"``: a stored answer, or what else is kept of a message id, that can't be read;
    - ``"reference"``: a row of a conversation, or a turn, that does not exist;
    - ``"file"``: what the storage itself finds wrong below the rows.

    *owner* and *session_id* name the conversation; both are empty where there is none to name. *row* is the table and
    key that a person can look up, *reason* what is wrong with it.
    """

    kind: FaultKind
    session_id: str
    row: str
    reason: str
    owner: str = ""


@attrs.frozen
class Repair:
    """What `repair` did about a fault.

    *action* is one of

    - ``"set aside"``: the row, or the part of it that the reason names, is out of the conversation and kept apart;
    - ``"replaced"``: the value is kept apart, and one that can be read stands in its place;
    - ``"moved"``: the messages follow each other again, system messages first;
    - ``"reindexed"``: the index was built anew from its table;
    - ``"left alone"``: a turn of the conversation is under way, or somebody has the turn itself in hand; repair again
      when it has ended;
    - ``"not mended"``: nothing that `repair` can do helps; the fault's reason says what may.
    """

    fault: Fault
    action: Action

    @property
    def is_done(self) -> bool:
        """Whether the fault is gone."""
        return self.action not in {"left alone", "not mended"}


@attrs.frozen
class Part(Generic[_T]):
    """A slice of what a backend found or did: its *items*, and where to go on (None at the end)."""

    items: tuple[_T, ...]
    next: object | None


@attrs.frozen(kw_only=True)
class Row(Generic[_T]):
    """A stored message: *key* is the storage's own, *among_systems* says that it stands among the system messages."""

    key: _T
    among_systems: bool
    message: Message


@attrs.frozen
class Verdict(Generic[_T]):
    """What the rules say about a row: it goes, or *stays* at another place or as another message."""

    row: Row[_T]
    kind: FaultKind
    reason: str
    stays: bool


@attrs.frozen
class Sorted(Generic[_T]):
    """A history by the rules: rows in order, those that go or change beside them."""

    systems: tuple[Row[_T], ...]
    bodies: tuple[Row[_T], ...]
    verdicts: tuple[Verdict[_T], ...]


def sort_out(rows: Iterable[Row[_T]]) -> Sorted[_T]:
    """The history that `prune` would leave of *rows*, were it to cut no turns, and what it takes out, with the reason.

    A row whose message the rules leave as it is stays the very same object; of a tool message that loses a part of its
    results, the row holds the message that is left.
    """
    window = Window()
    systems: list[Row[_T]] = []
    bodies: list[Row[_T]] = []
    verdicts: list[Verdict[_T]] = []
    for row in rows:
        message = row.message
        orphan = window.unmatched(message)
        if not window.add(message):
            verdicts.append(Verdict(row, *_why(orphan if window.turns else None), stays=False))
            continue
        is_system = message.role is Role.SYSTEM
        if is_system != row.among_systems:
            where = "among the other messages" if is_system else "among the system messages"
            verdicts.append(Verdict(row, "place", f"a {message.role.value} message stands {where}", stays=True))
        if orphan is not None:
            verdicts.append(Verdict(row, *_why(orphan), stays=True))
            row = attrs.evolve(row, message=window.history()[-1])  # noqa: PLW2901  # the message, less those results
        (systems if is_system else bodies).append(row)
    return Sorted(tuple(systems), tuple(bodies), tuple(verdicts))


def _why(orphan: str | None) -> tuple[FaultKind, str]:
    if orphan is None:
        return "front", "it stands before the first user message"
    return "result", f"a result of it names the call {shorten(orphan)}, and no call of that id stands before it"
