"""Mending what was found: each conversation, and each stored answer, in one transaction of its own."""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from typing import Final, LiteralString

import attrs

from chatflow.core.repairs import Action, Fault, Part, Repair
from chatflow.exceptions import StoreError
from chatflow.sqlite import statements
from chatflow.sqlite.answers import LOOK_AT_ANSWER, AnswerKey, diagnose_answer, named
from chatflow.sqlite.aside import put_aside
from chatflow.sqlite.database import Connection, Database
from chatflow.sqlite.diagnosis import Diagnosis, diagnose
from chatflow.sqlite.examination import (
    Progress,
    is_of_index,
    look_at_answers,
    look_at_conversations,
    look_at_file,
    look_at_journals,
)
from chatflow.sqlite.journals import mend_journal
from chatflow.sqlite.operations import expiry
from chatflow.sqlite.turn_diagnosis import diagnose_turns
from chatflow.sqlite.turn_mending import changes, is_held, mend_turns

SESSION_NOW: Final[LiteralString] = """
    SELECT version, (
        SELECT holder FROM chatflow_turns WHERE session_key = :session_key AND state = 'running'
    ) FROM chatflow_sessions WHERE session_key = :session_key
"""
"""Whether a conversation is as it was when it was looked at, and who has its turn."""

MEND_SESSION: Final[LiteralString] = """
    UPDATE chatflow_sessions SET
        owner = iif(:has_owner, :owner, owner),
        session_id = iif(:has_session_id, :session_id, session_id),
        active_agent_name = iif(:has_active_agent_name, :active_agent_name, active_agent_name),
        metadata_json = iif(:has_metadata_json, :metadata_json, metadata_json),
        state_json = iif(:has_state_json, :state_json, state_json),
        max_turns = iif(:has_max_turns, NULL, max_turns),
        service_json = iif(:has_service_json, NULL, service_json),
        service_key = iif(:has_service_key, :service_key, service_key),
        spent_json = iif(:has_spent_json, NULL, spent_json),
        expires_after = iif(:has_expires_after, NULL, expires_after),
        expires_at = :expires_at,
        created_at = iif(:has_created_at, coalesce(:created_at, :now), created_at),
        version = (
            SELECT coalesce(max(version), 0) + 1 FROM chatflow_sessions WHERE version < 9223372036854775807
        ),
        updated_at = :now
    WHERE session_key = :session_key
"""
"""What could not be read gives way to what can. A change like any other: the version grows over all others."""

LEAVE_SERVICE: Final[LiteralString] = """
    UPDATE chatflow_sessions SET service_json = NULL, service_key = NULL WHERE session_key = :session_key
"""
"""A conversation whose history is no more what a service has seen."""

MEND_ANSWER: Final[LiteralString] = """
    UPDATE chatflow_processed_messages SET
        processed_at = iif(:has_processed_at, :now, processed_at),
        digest = iif(:has_digest, NULL, digest),
        response_json = iif(:has_response_json, NULL, response_json)
    WHERE owner = CAST(:owner AS TEXT) AND session_id = CAST(:session_id AS TEXT)
        AND message_id = CAST(:message_id AS TEXT)
"""
"""A message id stays known, without what could not be read of its answer."""

DELETE_ANSWER: Final[LiteralString] = """
    DELETE FROM chatflow_processed_messages
    WHERE owner = CAST(:owner AS TEXT) AND session_id = CAST(:session_id AS TEXT)
        AND message_id = CAST(:message_id AS TEXT)
"""
"""A message id that no message can have."""

DELETE_TURNS: Final[LiteralString] = "DELETE FROM chatflow_turns WHERE session_key = :session_key"
"""The turns of a conversation that does not exist."""

INSERT_MESSAGE: Final[LiteralString] = """
    INSERT INTO chatflow_messages (session_key, place, message_json) VALUES (:session_key, :place, :message_json)
"""
"""One message, as its text stood in the file."""

_REINDEX: Final[tuple[LiteralString, ...]] = (
    "REINDEX chatflow_sessions",
    "REINDEX chatflow_messages",
    "REINDEX chatflow_processed_messages",
    "REINDEX chatflow_turns",
    "REINDEX chatflow_journal",
    "REINDEX chatflow_set_aside",
)

_SESSION_COLUMNS: Final = (
    *("owner", "session_id", "active_agent_name", "metadata_json", "state_json"),
    *("max_turns", "created_at", "service_json", "service_key", "spent_json", "expires_after"),
)
_ANSWER_COLUMNS: Final = ("processed_at", "digest", "response_json")


async def mend_next(database: Database, after: Progress | None, now: str) -> Part[Repair]:
    """Mend what is wrong with the next slice. What is wrong below the rows is reported at the end."""
    if after is None:
        found = await look_at_file(database)
        left = found
        if any(map(is_of_index, found)):
            await _reindex(database)
            left = await look_at_file(database)
        return Part(_gone(found, left, "reindexed"), Progress(stage="conversations", found=left))
    if after.stage == "file again":
        left = await look_at_file(database)
        # Some have gone with the rows that were set aside.
        return Part((*_gone(after.found, left, "set aside"), *(Repair(fault, "not mended") for fault in left)), None)
    repairs: list[Repair] = []
    if after.stage == "conversations":
        conversations, unseen = await look_at_conversations(database, after)
        following = conversations.next
        for diagnosis in conversations.items:
            repairs += await database.write(partial(mend, diagnosis, now), durable=True)
    elif after.stage == "journals":
        journals, unseen = await look_at_journals(database, after)
        following = journals.next
        for journal in journals.items:
            repairs += await database.write(partial(mend_journal, journal.turn_id, now), durable=True)
    else:
        answers, unseen = await look_at_answers(database, after)
        following = answers.next
        for answer in answers.items:
            repairs += await database.write(partial(mend_answer, answer.key, now), durable=True)
    return Part((*repairs, *(Repair(fault, "not mended") for fault in unseen)), following)


async def _reindex(database: Database) -> None:
    for statement in _REINDEX:
        # An index that allows no doubles can't be built over a table that has some: it stays as it is, and is reported.
        with suppress(StoreError):
            await database.write(partial(_run, statement), durable=True)


def _run(statement: LiteralString, connection: Connection) -> None:
    connection.execute(statement)


def _gone(found: tuple[Fault, ...], left: tuple[Fault, ...], action: Action) -> tuple[Repair, ...]:
    return tuple(Repair(fault, action) for fault in found if fault not in left)


def mend(diagnosis: Diagnosis, now: str, connection: Connection) -> tuple[Repair, ...]:
    """Mend one conversation and its turns, but for what somebody has in hand."""
    session_key = {"session_key": diagnosis.session_key}
    found = connection.execute(SESSION_NOW, session_key).fetchone()
    version, holder = found or (None, None)
    if version != diagnosis.seen:
        # Somebody has committed since it was looked at, and may have changed all of it.
        diagnosis = diagnose(diagnosis.session_key, connection)
    repairs = diagnosis.own_repairs
    if not repairs:
        pass
    elif is_held(holder):
        repairs = tuple(attrs.evolve(repair, action="left alone") for repair in repairs)
    else:
        _mend_session(diagnosis, now, connection, exists=found is not None)
    # Looked at again, since turns come and go without a commit.
    turns = diagnose_turns(diagnosis.session_key, diagnosis.now, diagnosis.later, connection) if found else ()
    return (*repairs, *mend_turns(turns, now, connection))


def _mend_session(diagnosis: Diagnosis, now: str, connection: Connection, *, exists: bool) -> None:
    session_key = {"session_key": diagnosis.session_key}
    put_aside(diagnosis.set_aside, now, connection)
    if exists:
        values = changes(_SESSION_COLUMNS, diagnosis.columns)
        expires_at = expiry(now, diagnosis.expires_after)
        connection.execute(MEND_SESSION, {**session_key, **values, "expires_at": expires_at, "now": now})
    else:
        connection.execute(DELETE_TURNS, session_key)
    if diagnosis.drop_before is not None:
        connection.execute(statements.DELETE_MESSAGES_BEFORE, {**session_key, "place": diagnosis.drop_before})
    if diagnosis.messages is not None:
        # The history stands at new positions, and a service that keeps it has not seen it so.
        connection.execute(LEAVE_SERVICE, session_key)
        connection.execute(statements.DELETE_ALL_MESSAGES, session_key)
        connection.executemany(
            INSERT_MESSAGE,
            [{**session_key, "place": place, "message_json": text} for place, text in diagnosis.messages],
        )


def mend_answer(key: AnswerKey, now: str, connection: Connection) -> tuple[Repair, ...]:
    """Mend what is kept of one message id, as it is now."""
    names = named(key)
    row = connection.execute(LOOK_AT_ANSWER, names).fetchone()
    if row is None:
        return ()
    diagnosis = diagnose_answer(row)
    put_aside(diagnosis.set_aside, now, connection)
    if diagnosis.columns is None:
        connection.execute(DELETE_ANSWER, names)
    elif diagnosis.columns:
        values = changes(_ANSWER_COLUMNS, diagnosis.columns)
        connection.execute(MEND_ANSWER, {**names, **values, "now": now})
    return diagnosis.repairs
