"""Finding what is wrong with a file, a slice at a time, so that no thread is held for long."""

from __future__ import annotations

import re
from functools import partial
from typing import Final, Literal, LiteralString

import attrs

from chatflow.core.reading import shown
from chatflow.core.repairs import Fault, Part
from chatflow.exceptions import StoreError
from chatflow.sqlite.answers import AnswerDiagnosis, AnswerKey, diagnose_answer, named
from chatflow.sqlite.database import Connection, Database, is_damaged
from chatflow.sqlite.diagnosis import Diagnosis, diagnose
from chatflow.sqlite.journals import JOURNALS_AFTER, JournalDiagnosis, diagnose_journal

SESSION_KEYS_AFTER: Final[LiteralString] = """
    WITH RECURSIVE found (session_key) AS (
        SELECT :after
        UNION ALL
        SELECT min(
            coalesce((SELECT min(session_key) FROM chatflow_sessions WHERE session_key > found.session_key), :last),
            coalesce((SELECT min(session_key) FROM chatflow_messages WHERE session_key > found.session_key), :last),
            coalesce((SELECT min(session_key) FROM chatflow_turns WHERE session_key > found.session_key), :last)
        )
        FROM found WHERE found.session_key < :last
        LIMIT :limit + 1
    )
    SELECT session_key FROM found WHERE session_key > :after AND session_key < :last
"""
"""The next conversations, with those of which only messages or turns are there."""

SESSIONS_AFTER: Final[LiteralString] = """
    SELECT session_key, owner, session_id FROM chatflow_sessions
    WHERE session_key > :after ORDER BY session_key LIMIT :limit
"""
"""The next conversations that have a row, where the others can't be looked for."""

ANSWERS_AFTER: Final[LiteralString] = """
    SELECT owner, session_id, message_id, processed_at, digest, response_json FROM chatflow_processed_messages
    WHERE (owner, session_id, message_id) > (
        CAST(:owner AS TEXT), CAST(:session_id AS TEXT), CAST(:message_id AS TEXT)
    ) AND typeof(owner) = 'text' AND typeof(session_id) = 'text' AND typeof(message_id) = 'text'
    ORDER BY owner, session_id, message_id LIMIT :limit
"""
"""What is kept of the next message ids. A key of another type is left to the integrity check: it has no place here."""

INTEGRITY_CHECK: Final[LiteralString] = "PRAGMA integrity_check"
"""SQLite's own look at every page and index: one statement, which reads the whole file."""

FOREIGN_KEY_CHECK: Final[LiteralString] = "PRAGMA foreign_key_check"
"""Rows that refer to what is not there, in every table."""

_ADVICE: Final = "restore a backup, or salvage the file with SQLite's .recover"

_FIRST: Final = -(2**63)
_LAST: Final = 2**63 - 1

_CONVERSATIONS: Final = 100
_MESSAGES: Final = 500
"""A slice ends after so many conversations, or with the one that brings it to so many messages: some 5 ms."""

_JOURNALS: Final = 500
_ANSWERS: Final = 500

_INDEX: Final = re.compile(r" index (\S+)$")


@attrs.frozen(kw_only=True)
class Progress:
    """How far an examination has come: which stage is next, and after what in it. *found* is wrong below the rows."""

    stage: Literal["conversations", "journals", "answers", "file again"]
    after: int = _FIRST
    after_journal: int = _FIRST
    after_answer: AnswerKey = (b"", b"", b"")
    found: tuple[Fault, ...] = ()


async def look_at_file(database: Database) -> tuple[Fault, ...]:
    """What SQLite itself finds wrong."""
    await database.read(_nothing)  # a file that can't be opened at all is an error, not a fault of what is in it
    try:
        return await database.read(_file_faults)
    except StoreError as error:
        return (_unreadable("the file", error),)


async def look_at_conversations(database: Database, progress: Progress) -> tuple[Part[Diagnosis], tuple[Fault, ...]]:
    """What is wrong with the next conversations, and what kept that from being seen."""
    try:
        found, last = await database.read(partial(_diagnose_slice, progress.after))
    except StoreError as error:
        return await _one_by_one(database, progress, _unreadable("chatflow_sessions", error))
    return Part(found, _after_conversations(progress, last)), ()


async def _one_by_one(
    database: Database, progress: Progress, fault: Fault
) -> tuple[Part[Diagnosis], tuple[Fault, ...]]:
    """A page is damaged: each conversation will show whether its own can be read."""
    try:
        names = await database.read(partial(_names_after, progress.after))
    except StoreError:
        return Part((), _after_conversations(progress, None)), (fault,)
    found: list[Diagnosis] = []
    unseen: list[Fault] = []
    for session_key, owner, session_id in names:
        try:
            diagnosis = await database.read(partial(diagnose, session_key))
        except StoreError as error:
            damaged = _unreadable(f"chatflow_messages, session_key {session_key}", error)
            unseen.append(attrs.evolve(damaged, owner=shown(owner), session_id=shown(session_id)))
        else:
            found += [diagnosis] if diagnosis.repairs else []
    last = names[-1][0] if len(names) == _CONVERSATIONS else None
    return Part(tuple(found), _after_conversations(progress, last)), tuple(unseen)


def _after_conversations(progress: Progress, last: int | None) -> Progress:
    return attrs.evolve(progress, stage="journals") if last is None else attrs.evolve(progress, after=last)


async def look_at_journals(database: Database, progress: Progress) -> tuple[Part[JournalDiagnosis], tuple[Fault, ...]]:
    """Which of the next journals have no turn, and what kept that from being seen."""
    following = attrs.evolve(progress, stage="answers")
    try:
        found, last = await database.read(partial(_diagnose_journals, progress.after_journal))
    except StoreError as error:
        return Part((), following), (_unreadable("chatflow_journal", error),)
    return Part(found, following if last is None else attrs.evolve(progress, after_journal=last)), ()


async def look_at_answers(database: Database, progress: Progress) -> tuple[Part[AnswerDiagnosis], tuple[Fault, ...]]:
    """What is wrong with what is kept of the next message ids, and what kept that from being seen."""
    following = attrs.evolve(progress, stage="file again") if progress.found else None
    try:
        found, last = await database.read(partial(_diagnose_answers, progress.after_answer))
    except StoreError as error:
        return Part((), following), (_unreadable("chatflow_processed_messages", error),)
    return Part(found, following if last is None else attrs.evolve(progress, after_answer=last)), ()


async def examine_next(database: Database, after: Progress | None) -> Part[Fault]:
    """The next faults."""
    if after is None:
        return Part(await look_at_file(database), Progress(stage="conversations"))
    diagnoses: Part[Diagnosis] | Part[JournalDiagnosis] | Part[AnswerDiagnosis]
    if after.stage == "conversations":
        diagnoses, unseen = await look_at_conversations(database, after)
    elif after.stage == "journals":
        diagnoses, unseen = await look_at_journals(database, after)
    else:
        diagnoses, unseen = await look_at_answers(database, after)
    faults = (repair.fault for diagnosis in diagnoses.items for repair in diagnosis.repairs)
    return Part((*faults, *unseen), diagnoses.next)


def is_of_index(fault: Fault) -> bool:
    """Whether *fault* is one of an index, which can be built anew from its table."""
    return fault.row.startswith("index ")


def _nothing(_connection: Connection) -> None:
    return None


def _unreadable(row: str, error: StoreError) -> Fault:
    if error.__cause__ is None or not is_damaged(error.__cause__):
        raise error
    return Fault(kind="file", session_id="", row=row, reason=f"{error.__cause__}; {_ADVICE}")


def _file_faults(connection: Connection) -> tuple[Fault, ...]:
    lines = [line for row in connection.execute(INTEGRITY_CHECK) for line in str(row[0]).splitlines()]
    faults = [_integrity_fault(line) for line in dict.fromkeys(lines) if line != "ok" and not line.startswith("***")]
    for table, rowid, parent, _ in connection.execute(FOREIGN_KEY_CHECK):
        # Those are looked at by themselves, and other programs' tables are theirs.
        if table.startswith("chatflow_") and table not in {"chatflow_messages", "chatflow_turns", "chatflow_journal"}:
            reason = f"the row of {parent} that it names does not exist"
            faults.append(Fault(kind="file", session_id="", row=f"{table}, rowid {rowid}", reason=reason))
    return tuple(faults)


def _integrity_fault(line: str) -> Fault:
    index = _INDEX.search(line)
    if index is not None:
        row, reason = f"index {index[1]}", f"integrity_check: {line}; repair() builds the index anew"
    else:
        row, reason = "the file", f"integrity_check: {line}; {_ADVICE}"
    return Fault(kind="file", session_id="", row=row, reason=reason)


def _diagnose_slice(after: int, connection: Connection) -> tuple[tuple[Diagnosis, ...], int | None]:
    keys = connection.execute(SESSION_KEYS_AFTER, {"after": after, "last": _LAST, "limit": _CONVERSATIONS}).fetchall()
    found: list[Diagnosis] = []
    messages = 0
    for (session_key,) in keys:
        diagnosis = diagnose(session_key, connection)
        messages += diagnosis.looked_at
        if diagnosis.repairs:
            found.append(diagnosis)
        if messages >= _MESSAGES:
            return tuple(found), session_key
    return tuple(found), keys[-1][0] if len(keys) == _CONVERSATIONS else None


def _diagnose_journals(after: int, connection: Connection) -> tuple[tuple[JournalDiagnosis, ...], int | None]:
    found = connection.execute(JOURNALS_AFTER, {"after": after, "last": _LAST, "limit": _JOURNALS}).fetchall()
    diagnoses = [diagnose_journal(turn_id, connection) for (turn_id,) in found]
    last = diagnoses[-1].turn_id if len(diagnoses) == _JOURNALS else None
    return tuple(each for each in diagnoses if each.repairs), last


def _names_after(after: int, connection: Connection) -> list[tuple[int, object, object]]:
    return connection.execute(SESSIONS_AFTER, {"after": after, "limit": _CONVERSATIONS}).fetchall()


def _diagnose_answers(after: AnswerKey, connection: Connection) -> tuple[tuple[AnswerDiagnosis, ...], AnswerKey | None]:
    answers = connection.execute(ANSWERS_AFTER, {**named(after), "limit": _ANSWERS}).fetchall()
    diagnoses = [diagnose_answer(row) for row in answers]
    last = diagnoses[-1].key if len(answers) == _ANSWERS else None
    return tuple(each for each in diagnoses if each.repairs), last
