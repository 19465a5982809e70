"""What is wrong with what is kept of a message id, and what it would be like without that. Reads only."""

from __future__ import annotations

from typing import Any, Final, LiteralString

import attrs

from chatflow.core import reading
from chatflow.core.codec import values_to_json
from chatflow.core.notes import Notes, SetAside
from chatflow.core.owners import RESERVED
from chatflow.core.records import Key
from chatflow.core.repairs import Repair
from chatflow.core.values import freeze_mapping
from chatflow.exceptions import CorruptSessionError, shorten

LOOK_AT_ANSWER: Final[LiteralString] = """
    SELECT owner, session_id, message_id, processed_at, digest, response_json FROM chatflow_processed_messages
    WHERE owner = CAST(:owner AS TEXT) AND session_id = CAST(:session_id AS TEXT)
        AND message_id = CAST(:message_id AS TEXT)
"""
"""What is kept of a message id. Its key is given in bytes, which need not be UTF-8."""


_COLUMNS: Final = ("owner", "session_id", "message_id", "processed_at", "digest", "response_json")

AnswerKey = tuple[bytes, bytes, bytes]
"""Owner, session id and message id, as they stand in the file."""


def named_as(owner: str, session_id: str, message_id: str) -> AnswerKey:
    """The key of a row that was read."""
    return (reading.original(owner), reading.original(session_id), reading.original(message_id))


def named(key: AnswerKey) -> dict[str, bytes]:
    """*key* as the parameters of a statement."""
    return {"owner": key[0], "session_id": key[1], "message_id": key[2]}


@attrs.frozen(kw_only=True)
class AnswerDiagnosis:
    """What is wrong with what is kept of a message id: *columns* are those that change, None for a row that goes."""

    key: AnswerKey
    repairs: tuple[Repair, ...]
    set_aside: tuple[SetAside, ...]
    columns: dict[str, Any] | None


def diagnose_answer(row: tuple[Any, ...]) -> AnswerDiagnosis:
    """Look at one row of what is kept of message ids."""
    owner, session_id, message_id, processed_at, digest, response = row
    if owner.startswith(RESERVED):
        # All of it is about to go.
        return AnswerDiagnosis(key=named_as(owner, session_id, message_id), repairs=(), set_aside=(), columns={})
    key = Key(reading.shown(owner), reading.shown(session_id))
    notes = Notes(key, key)
    where = f"chatflow_processed_messages, message_id {shorten(reading.shown(message_id))}"
    columns: dict[str, Any] | None = None
    if all(reading.shown(each) == each for each in (owner, session_id, message_id)):
        columns = {}
        for column, value, read in (
            ("processed_at", processed_at, reading.moment),
            ("digest", digest, reading.text),
            ("response_json", response, reading.response),
        ):
            try:
                if value is not None or column == "processed_at":
                    read(session_id, f"{where}, {column}", value)
            except CorruptSessionError as error:
                notes.take("answer", error.row, error.reason, value, "replaced")
                columns[column] = None
    else:
        text = values_to_json(freeze_mapping(dict(zip(_COLUMNS, row, strict=True)), ""))
        notes.take("answer", where, "its key is not text in UTF-8, and no message can have it", text)
    return AnswerDiagnosis(
        key=named_as(owner, session_id, message_id),
        repairs=tuple(notes.repairs),
        set_aside=tuple(notes.set_aside),
        columns=columns,
    )
