"""``chatflow turns``: what waits, runs, or was given up."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable
from typing import Any

import click

from chatflow.cli.app import Commands, run, with_all_owners, with_db, with_json, with_owner
from chatflow.cli.files import of_owner, to_read
from chatflow.cli.output import Output
from chatflow.cli.safe import one_line
from chatflow.core.envelopes import encode
from chatflow.core.owners import ALL
from chatflow.core.records import PendingTurn
from chatflow.core.rows import State


@click.group(cls=Commands)
def turns() -> None:
    """The turns of a file that have not committed: pending, dead."""


@turns.command("pending")
@with_db
@with_owner
@with_all_owners
@with_json
def pending(db: str, owner: str | None, all_owners: bool, is_json: bool) -> None:
    """List the turns that wait, run or go on later, in the order they came.

    One line each: its number, its state, the conversation, the message's id, how often it was started, how old it is,
    what it is to answer. "told" ones failed, and go on when their message is sent again; "answered" ones are to be
    told to on_response.
    """
    _list(db, owner, all_owners, is_json, lambda turn: turn.state != State.DEAD, "nothing waits")


@turns.command("dead")
@with_db
@with_owner
@with_all_owners
@with_json
def dead(db: str, owner: str | None, all_owners: bool, is_json: bool) -> None:
    """List the turns that were given up, after as many attempts as a message has; the columns are those of pending."""
    _list(db, owner, all_owners, is_json, lambda turn: turn.state == State.DEAD, "nothing was given up")


def _list(
    db: str, owner: str | None, all_owners: bool, is_json: bool, is_asked: Callable[[PendingTurn], bool], none: str
) -> None:
    if all_owners and owner is not None:
        raise click.UsageError("--owner and --all-owners exclude each other")
    output, store = Output(is_json=is_json), to_read(db)

    async def work() -> tuple[PendingTurn, ...]:
        async with store:
            return await (store.pending_turns(owner=ALL) if all_owners else of_owner(store, owner).pending_turns())

    found = list(filter(is_asked, run(work)))
    if is_json:
        for turn in found:
            output.json(_data(turn))
    else:
        columns = ["turn", "state", "session", "message", "attempts", "age", "what"]
        rows = [_row(turn) for turn in found]
        if all_owners:
            columns.insert(2, "owner")
            for turn, row in zip(found, rows, strict=True):
                row.insert(2, turn.owner)
        output.table(columns, rows)
    if not found:
        output.note(none)


def _row(turn: PendingTurn) -> list[str]:
    return [
        str(turn.turn_id),
        turn.state,
        turn.session_id,
        "" if turn.decision is not None else turn.message_id or "",
        str(turn.attempts),
        age_text(turn.age),
        one_line(_what(turn), 60),
    ]


def _what(turn: PendingTurn) -> str:
    if turn.decision is not None:
        return f"({'approves' if turn.decision.approved else 'rejects'} {turn.decision.call_id})"
    return turn.user_message or ""


def age_text(age: dt.timedelta) -> str:
    """An age in its largest unit."""
    seconds = max(0, int(age.total_seconds()))
    for size, unit in ((24 * 3600, "d"), (3600, "h"), (60, "m")):
        if seconds >= size:
            return f"{seconds // size}{unit}"
    return f"{seconds}s"


def _data(turn: PendingTurn) -> dict[str, Any]:
    decision = turn.decision
    return {
        "turn_id": turn.turn_id,
        "state": turn.state,
        "owner": encode(turn.owner),
        "session_id": encode(turn.session_id),
        "message_id": encode(turn.message_id),
        "user_message": encode(turn.user_message),
        "decision": None if decision is None else encode(decision.to_data()),
        "metadata": encode(turn.metadata),
        "agent_name": encode(turn.agent_name),
        "attempts": turn.attempts,
        "queued_at": turn.queued_at.isoformat(),
        "age_seconds": turn.age.total_seconds(),
    }
