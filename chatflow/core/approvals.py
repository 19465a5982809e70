"""Calls that wait for a person: how a message notes them, which are open, and what a person decides. Pure."""

from __future__ import annotations

import re
import uuid
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, cast

import attrs

from chatflow.core.messages import Message, Role, ToolCall
from chatflow.core.pruning import CallPlace, Pairing, is_blank_id
from chatflow.core.values import FrozenDict, is_plain

AWAITS_APPROVAL_KEY: Final = "chatflow_awaits_approval"
"""In a model message's `extra`: the calls that a person is asked about, by position, each with a token of its own.

``{"1": "5f0c…"}``. The token, and not the id or the place, names the call for life: providers give ids again, and a
rollback moves messages. So whatever happens to the conversation, what was decided once is not decided again.
"""

OWN_MARK: Final = "\0"
"""What ids begin with that are chatflow's own, and no message of a user's can have."""

_DECISION_MARK: Final = f"{OWN_MARK}approval:"

_TOKEN: Final = re.compile(r"[0-9a-f]{32}")


@attrs.frozen(kw_only=True)
class Decision:
    """What a person has said about a call that waited: whether it may run, and why not.

    The first one stands: whoever decides the same later gets its answer, whatever their *reason*.
    """

    call_id: str
    approved: bool
    reason: str | None = None

    def to_data(self) -> FrozenDict:
        """The form that is kept."""
        return FrozenDict(call_id=self.call_id, approved=self.approved, reason=self.reason)

    @classmethod
    def from_data(cls, data: object) -> Decision:
        """What `to_data` gave; `TypeError` for anything else."""
        match data:
            case {"call_id": str(call_id), "approved": bool(approved), "reason": str() | None as reason}:
                return cls(call_id=call_id, approved=approved, reason=reason)
            case _:
                raise TypeError("a decision names a call, whether it was approved, and a reason, if any")


@attrs.frozen(kw_only=True)
class HeldCall:
    """A call that was held back for a person: of the *message* at a *position* of the history, the one at *index*.

    *is_open* as long as it has no result.
    """

    position: int
    message: Message
    index: int
    token: str
    is_open: bool

    @property
    def call(self) -> ToolCall:
        """The call itself."""
        return self.message.tool_calls[self.index]

    @property
    def decision_id(self) -> str:
        """What the decision about it goes by where messages go by their ids: made once, whoever decides."""
        return f"{_DECISION_MARK}{self.token}"


def is_decision_id(message_id: str | None) -> bool:
    """Whether it is what a decision goes by, and no message."""
    return message_id is not None and message_id.startswith(_DECISION_MARK)


def tokens_of(message: Message) -> dict[int, str]:
    """The tokens of the calls in *message* that a person is asked about, by the call's index."""
    noted: object = message.extra.get(AWAITS_APPROVAL_KEY)
    if not isinstance(noted, Mapping):
        return {}
    tokens = cast("Mapping[object, object]", noted)
    found = {index: tokens.get(str(index)) for index in range(len(message.tool_calls))}
    # Others than `held_back` may have written it, and an id has to be made of it.
    return {index: token for index, token in found.items() if isinstance(token, str) and _TOKEN.fullmatch(token)}


def held_back(message: Message, indexes: Iterable[int], history: Iterable[Message] | None) -> Message:
    """*message*, which follows *history*, with the note that its calls at *indexes* wait, and without any other.

    A person names a call by its id, and must not approve another one by it. So a call that waits gets an id of its own
    where nobody could name it by its id, or some other call has it. Without *history* ids stay as they are: a service
    that keeps the history itself knows no others.
    """
    extra = {name: value for name, value in message.extra.items() if name != AWAITS_APPROVAL_KEY}
    tokens = {index: uuid.uuid4().hex for index in indexes}
    if tokens:
        extra[AWAITS_APPROVAL_KEY] = {str(index): token for index, token in tokens.items()}
    elif len(extra) == len(message.extra):
        return message
    calls = list(message.tool_calls)
    if tokens and history is not None:
        given = Counter(call.id for said in (*history, message) for call in said.tool_calls)
        for index, token in tokens.items():
            call_id = calls[index].id
            if given[call_id] > 1 or is_blank_id(call_id) or not is_plain(call_id):
                calls[index] = attrs.evolve(calls[index], id=token[:9])  # nine of these are an id for every provider
    return attrs.evolve(message, tool_calls=calls, extra=extra)


def open_calls(history: Iterable[Message]) -> list[HeldCall]:
    """The calls that wait, in order."""
    pairing = Pairing()
    waiting: dict[CallPlace, HeldCall] = {}
    for position, message in enumerate(history):
        pairing.call(position, message.tool_calls)
        for index, token in tokens_of(message).items():
            held = HeldCall(position=position, message=message, index=index, token=token, is_open=True)
            waiting[CallPlace(position, index)] = held
        for result in message.tool_results:
            found = pairing.answer(result.tool_call_id)
            if found is not None:
                waiting.pop(found[0], None)
    return list(waiting.values())


def turn_of(history: Sequence[Message], held: HeldCall) -> list[Message]:
    """The turn that *held* was made in, from its user's message on, and what has come later of its calls."""
    users = [position for position, message in enumerate(history) if message.role is Role.USER]
    turn = range(
        max((position for position in users if position < held.position), default=0),
        min((position for position in users if position > held.position), default=len(history)),
    )
    pairing, said = Pairing(), list(history[turn.start : turn.stop])
    for position, message in enumerate(history):
        pairing.call(position, message.tool_calls)
        found = [pairing.answer(result.tool_call_id) for result in message.tool_results]
        if position >= turn.stop and any(each is not None and each[0].position in turn for each in found):
            said.append(message)
    return said


def find_held(history: Sequence[Message], call_id: str) -> HeldCall | None:
    """The call that a result for *call_id* would belong to, if a person was asked about it.

    If nobody was, the last answered one of that id about which somebody was: providers give ids again.
    """
    pairing = Pairing()
    held: HeldCall | None = None

    def held_at(found: tuple[CallPlace, bool] | None, *, is_open: bool) -> HeldCall | None:
        if found is None:
            return None
        position, index = found[0].position, found[0].index
        token = tokens_of(history[position]).get(index)
        if token is None:
            return None
        return HeldCall(position=position, message=history[position], index=index, token=token, is_open=is_open)

    for position, message in enumerate(history):
        pairing.call(position, message.tool_calls)
        for result in message.tool_results:
            found = pairing.answer(result.tool_call_id)
            if result.tool_call_id == call_id:
                held = held_at(found, is_open=False) or held
    found = pairing.answer(call_id)
    return held_at(found, is_open=found is not None and not found[1]) or held
