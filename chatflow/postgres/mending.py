"""Mending what was found: each conversation, and each stored answer, in one transaction of its own."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterable
from functools import partial
from typing import Any, Final, LiteralString

import attrs

from chatflow.core.holder import is_gone
from chatflow.core.lines import give_up
from chatflow.core.repairs import Part, Repair
from chatflow.core.writing import expiry
from chatflow.postgres.aside import put_aside
from chatflow.postgres.connection import Transaction
from chatflow.postgres.database import Database, living_holders
from chatflow.postgres.diagnosis import AnswerDiagnosis, Diagnosis, TurnDiagnosis, diagnose_after, diagnose_answer
from chatflow.postgres.examination import Progress, look_at_answers, look_at_conversations
from chatflow.postgres.operations import named
from chatflow.postgres.rows import PostgresRows
from chatflow.postgres.turn_statements import LOCK_SESSIONS, READ_ROW

MEND_SESSION: Final[LiteralString] = """
    UPDATE chatflow_sessions SET
        session_id = CASE WHEN %(has_session_id)s THEN %(session_id)s ELSE session_id END,
        active_agent_name = CASE WHEN %(has_active_agent_name)s THEN %(active_agent_name)s ELSE active_agent_name END,
        metadata_json = CASE WHEN %(has_metadata_json)s THEN '{}' ELSE metadata_json END,
        state_json = CASE WHEN %(has_state_json)s THEN '{}' ELSE state_json END,
        max_turns = CASE WHEN NOT %(has_max_turns)s THEN max_turns END,
        service_json = CASE WHEN NOT %(has_service_json)s THEN service_json END,
        service_key = CASE WHEN %(has_service_key)s THEN %(service_key)s ELSE service_key END,
        spent_json = CASE WHEN NOT %(has_spent_json)s THEN spent_json END,
        expires_after = CASE WHEN NOT %(has_expires_after)s THEN expires_after END,
        expires_at = %(expires_at)s,
        created_at = CASE WHEN %(has_created_at)s THEN coalesce(%(created_at)s, %(now)s) ELSE created_at END,
        version = nextval('chatflow_versions'),
        updated_at = %(now)s
    WHERE session_key = %(session_key)s
"""
"""What could not be read gives way to what can. A change like any other: the version grows over all others."""

LEAVE_SERVICE: Final[LiteralString] = """
    UPDATE chatflow_sessions SET service_json = NULL, service_key = NULL WHERE session_key = %(session_key)s
"""
"""A conversation whose history is no more what a service has seen."""

DELETE_MESSAGES: Final[LiteralString] = """
    DELETE FROM chatflow_messages
    WHERE session_key = %(session_key)s AND (%(all)s OR (place >= 0 AND place < %(place)s))
"""
"""All messages, before those that remain are written again; or those before a place."""

INSERT_MESSAGE: Final[LiteralString] = """
    INSERT INTO chatflow_messages (session_key, place, message_json)
    VALUES (%(session_key)s, %(place)s, %(message_json)s)
"""
"""One message, as its text stood."""

MEND_TURN: Final[LiteralString] = """
    UPDATE chatflow_turns SET
        lease_seconds = CASE WHEN %(has_lease_seconds)s THEN %(lease_seconds)s ELSE lease_seconds END,
        work_json = CASE WHEN NOT %(has_work_json)s THEN work_json END,
        queued_at = CASE WHEN %(has_queued_at)s THEN %(now)s ELSE queued_at END,
        ended_at = CASE WHEN %(has_ended_at)s THEN %(now)s ELSE ended_at END
    WHERE turn_id = %(turn_id)s
"""
"""What could not be read gives way to what can; what that makes of the row, the rules of lines say then."""

LOOK_AT_ANSWER: Final[LiteralString] = """
    SELECT owner, session_id, message_id, processed_at, response_json FROM chatflow_processed_messages
    WHERE owner = %(owner)s AND session_id = %(session_id)s AND message_id = %(message_id)s
    FOR UPDATE
"""
"""What is kept of a message id, as it is now."""

MEND_ANSWER: Final[LiteralString] = """
    UPDATE chatflow_processed_messages SET
        processed_at = CASE WHEN %(has_processed_at)s THEN %(now)s ELSE processed_at END,
        response_json = CASE WHEN NOT %(has_response_json)s THEN response_json END
    WHERE owner = %(owner)s AND session_id = %(session_id)s AND message_id = %(message_id)s
"""
"""A message id stays known, without what could not be read of its answer."""

_SESSION_COLUMNS: Final = (
    *("session_id", "active_agent_name", "metadata_json", "state_json", "max_turns", "created_at"),
    *("service_json", "service_key", "spent_json", "expires_after"),
)
_TURN_COLUMNS: Final = ("lease_seconds", "work_json", "queued_at", "ended_at")
_ANSWER_COLUMNS: Final = ("processed_at", "response_json")


async def mend_next(database: Database, after: Progress | None, now: dt.datetime) -> Part[Repair]:
    """Mend what is wrong with the next slice."""
    progress = after or Progress()
    repairs: list[Repair] = []
    if progress.stage == "conversations":
        conversations = await look_at_conversations(database, progress)
        for diagnosis in conversations.items:
            repairs += await database.write(partial(_mend, diagnosis.session_key, now))
        return Part(tuple(repairs), conversations.next)
    answers = await look_at_answers(database, progress)
    for answer in answers.items:
        repairs += await database.write(partial(_mend_answer, answer, now))
    return Part(tuple(repairs), answers.next)


async def _mend(session_key: int, now: dt.datetime, transaction: Transaction) -> tuple[Repair, ...]:
    """Mend one conversation and its turns as they are now, but for what somebody has in hand."""
    await transaction.ask(LOCK_SESSIONS, session_keys=[session_key])
    found, _ = await diagnose_after(session_key - 1, session_key, 1, transaction)
    repairs: list[Repair] = []
    for diagnosis in found:
        if not diagnosis.own_repairs:
            pass
        elif is_held(diagnosis.running):
            repairs += (attrs.evolve(repair, action="left alone") for repair in diagnosis.own_repairs)
        else:
            await _mend_session(diagnosis, now, transaction)
            repairs += diagnosis.own_repairs
        repairs += await _mend_turns(diagnosis.turns, now, transaction)
    return tuple(repairs)


def is_held(holder: str | None) -> bool:
    """Whether somebody has in hand what *holder* has."""
    return holder is not None and not is_gone(holder, living_holders())


async def _mend_session(diagnosis: Diagnosis, now: dt.datetime, transaction: Transaction) -> None:
    await put_aside(diagnosis.set_aside, now, transaction)
    values = _changes(_SESSION_COLUMNS, diagnosis.columns)
    named_row = {"session_key": diagnosis.session_key}
    expires_at = expiry(now, diagnosis.expires_after)
    await transaction.change(MEND_SESSION, **values, **named_row, expires_at=expires_at, now=now)
    if diagnosis.drop_before is not None:
        await transaction.change(DELETE_MESSAGES, **named_row, all=False, place=diagnosis.drop_before)
    if diagnosis.messages is not None:
        # The history stands at new positions, and a service that keeps it has not seen it so.
        await transaction.change(LEAVE_SERVICE, **named_row)
        await transaction.change(DELETE_MESSAGES, **named_row, all=True, place=0)
        for place, text in diagnosis.messages:
            await transaction.change(INSERT_MESSAGE, **named_row, place=place, message_json=text)


async def _mend_turns(
    diagnoses: Iterable[TurnDiagnosis], now: dt.datetime, transaction: Transaction
) -> tuple[Repair, ...]:
    repairs: list[Repair] = []
    for diagnosis in diagnoses:
        if is_held(diagnosis.holder):
            repairs += (attrs.evolve(repair, action="left alone") for repair in diagnosis.repairs)
            continue
        repairs += diagnosis.repairs
        await put_aside(diagnosis.set_aside, now, transaction)
        values = _changes(_TURN_COLUMNS, diagnosis.columns)
        await transaction.change(MEND_TURN, **values, turn_id=diagnosis.turn_id, now=now)
        if diagnosis.is_dead:
            rows = PostgresRows(await transaction.ask(READ_ROW, turn_id=diagnosis.turn_id), "", now)
            row = rows.find(diagnosis.turn_id)
            assert row is not None
            if diagnosis.has_message:
                give_up(rows, row)
            else:
                rows.delete(row)
            await rows.send(transaction)
    return tuple(repairs)


async def _mend_answer(answer: AnswerDiagnosis, now: dt.datetime, transaction: Transaction) -> tuple[Repair, ...]:
    asked = {**named(answer.key), "message_id": answer.message_id}
    found = await transaction.ask(LOOK_AT_ANSWER, **asked)
    if not found:
        return ()
    diagnosis = diagnose_answer(found[0])
    await put_aside(diagnosis.set_aside, now, transaction)
    if diagnosis.columns:
        await transaction.change(MEND_ANSWER, **asked, **_changes(_ANSWER_COLUMNS, diagnosis.columns), now=now)
    return diagnosis.repairs


def _changes(columns: tuple[str, ...], changed: dict[str, Any]) -> dict[str, Any]:
    """The parameters of a statement that changes some of *columns*."""
    return {
        **{column: changed.get(column) for column in columns},
        **{f"has_{column}": column in changed for column in columns},
    }
