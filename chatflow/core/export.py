"""All that is kept of an owner, as lines of JSON, read from the storage as they are asked for."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any, Final

import attrs
import msgspec

from chatflow.core.codec import FORMAT_VERSION, entry_to_json, response_to_json
from chatflow.core.envelopes import encode
from chatflow.core.owners import RememberedId, Stored, TakenOut
from chatflow.core.records import Key, PendingTurn
from chatflow.core.session_form import to_data
from chatflow.core.values import freeze
from chatflow.exceptions import CorruptSessionError

if TYPE_CHECKING:
    from chatflow.core.backend import StoreBackend

_PAGE: Final = 100
"""Rows that are read at once; of conversations only their ids are."""


async def lines_of_owner(backend: StoreBackend, owner: str) -> AsyncIterator[str]:
    """Everything of *owner*, as `BaseSessionStore.export_owner` says."""
    yield _line("export", format=FORMAT_VERSION, owner=encode(owner))
    after = ""
    while ids := await backend.page_of_session_ids(owner, after, _PAGE):
        for session_id in ids:
            line = await _conversation_line(backend, Key(owner, session_id))
            if line is not None:
                yield line
        after = ids[-1]
    last = 0
    while turns := await backend.page_of_turns(owner, last, _PAGE):
        for turn in turns:
            yield await _turn_line(backend, turn)
        last = turns[-1].turn_id
    seen = ("", "")
    while remembered := await backend.page_of_processed(owner, seen, _PAGE):
        for each in remembered:
            yield _id_line(each)
        seen = (remembered[-1].session_id, remembered[-1].message_id)
    number = 0
    while taken_out := await backend.page_of_set_aside(owner, number, _PAGE):
        for taken in taken_out:
            yield _set_aside_line(taken)
        number = taken_out[-1].number


def _line(kind: str, **fields: Any) -> str:
    return msgspec.json.encode({"kind": kind, **fields}).decode()


async def _conversation_line(backend: StoreBackend, key: Key) -> str | None:
    """None for one that is gone by now."""
    try:
        stored = await backend.read_session(key)
    except CorruptSessionError as error:
        return _line("unreadable", session_id=encode(error.session_id), row=error.row, reason=error.reason)
    return None if stored is None else conversation_line(key, stored, backend.default_max_turns)


def conversation_line(key: Key, stored: Stored, default_max_turns: int) -> str:
    """One conversation, whole, in the form that `SessionContext.from_dict` reads."""
    own = stored.snapshot.max_turns
    snapshot = attrs.evolve(stored.snapshot, max_turns=default_max_turns if own is None else own)
    return _line(
        "conversation",
        created_at=stored.created_at.isoformat(),
        updated_at=stored.updated_at.isoformat(),
        session=to_data(key, snapshot, for_client=False),
    )


async def _turn_line(backend: StoreBackend, turn: PendingTurn) -> str:
    session_id = encode(turn.session_id)
    try:
        journal = await backend.read_journal(turn.turn_id)
    except CorruptSessionError as error:
        return _line("unreadable", session_id=session_id, row=error.row, reason=error.reason)
    return _line(
        "turn",
        turn_id=turn.turn_id,
        session_id=session_id,
        message_id=encode(turn.message_id),
        user_message=encode(turn.user_message),
        decision=None if turn.decision is None else encode(turn.decision.to_data()),
        metadata=encode(turn.metadata),
        agent=encode(turn.agent_name),
        state=encode(turn.state),
        attempts=turn.attempts,
        queued_at=turn.queued_at.isoformat(),
        journal=[msgspec.Raw(entry_to_json(entry)) for entry in journal],
    )


def _id_line(remembered: RememberedId) -> str:
    response, fault = remembered.response, remembered.fault
    if fault is not None:
        return _line("unreadable", session_id=encode(fault.session_id), row=encode(fault.row), reason=fault.reason)
    return _line(
        "message_id",
        session_id=encode(remembered.session_id) or None,
        message_id=encode(remembered.message_id),
        processed_at=remembered.processed_at.isoformat(),
        response=None if response is None else msgspec.Raw(response_to_json(response)),
    )


def _set_aside_line(taken: TakenOut) -> str:
    return _line(
        "set_aside",
        session_id=encode(taken.session_id),
        source=encode(taken.source),
        content=encode(freeze(taken.content)),
        reason=encode(taken.reason),
        set_aside_at=taken.set_aside_at,
    )
