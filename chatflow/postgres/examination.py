"""Finding what is wrong, a slice at a time, so that no connection is held for long."""

from __future__ import annotations

from functools import partial
from typing import Any, Final, Literal

import attrs

from chatflow.core.repairs import Fault, Part
from chatflow.postgres.connection import Transaction
from chatflow.postgres.database import Database
from chatflow.postgres.diagnosis import ANSWERS_AFTER, AnswerDiagnosis, Diagnosis, diagnose_after, diagnose_answer
from chatflow.postgres.operations import HIDDEN

LAST_KEY: Final = 2**63 - 1

_CONVERSATIONS: Final = 50
_ANSWERS: Final = 500


@attrs.frozen(kw_only=True)
class Progress:
    """How far an examination has come: which stage is next, and after what in it."""

    stage: Literal["conversations", "answers"] = "conversations"
    after: int = 0
    after_answer: tuple[str, str, str] = ("", "", "")


async def look_at_conversations(database: Database, progress: Progress) -> Part[Diagnosis]:
    """What is wrong with the next conversations."""
    found, last = await database.read(partial(diagnose_after, progress.after, LAST_KEY, _CONVERSATIONS))
    following = attrs.evolve(progress, stage="answers") if last is None else attrs.evolve(progress, after=last)
    return Part(tuple(each for each in found if each.repairs), following)


async def look_at_answers(database: Database, progress: Progress) -> Part[AnswerDiagnosis]:
    """What is wrong with what is kept of the next message ids."""
    rows = await database.read(partial(_answers_after, progress.after_answer))
    following = attrs.evolve(progress, after_answer=rows[-1][:3]) if len(rows) == _ANSWERS else None
    diagnoses = map(diagnose_answer, rows)
    return Part(tuple(each for each in diagnoses if each.repairs), following)


async def _answers_after(after: tuple[str, str, str], transaction: Transaction) -> list[tuple[Any, ...]]:
    owner, session_id, message_id = after
    return await transaction.ask(
        ANSWERS_AFTER, owner=owner, session_id=session_id, message_id=message_id, limit=_ANSWERS, **HIDDEN
    )


async def examine_next(database: Database, after: Progress | None) -> Part[Fault]:
    """The next faults."""
    progress = after or Progress()
    diagnoses: Part[Diagnosis] | Part[AnswerDiagnosis]
    if progress.stage == "conversations":
        diagnoses = await look_at_conversations(database, progress)
    else:
        diagnoses = await look_at_answers(database, progress)
    return Part(tuple(repair.fault for each in diagnoses.items for repair in each.repairs), diagnoses.next)
