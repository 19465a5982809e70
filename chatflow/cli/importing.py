"""``chatflow import``: conversations of other packages."""

from __future__ import annotations

from functools import partial
from typing import Any

import attrs
import click

from chatflow.cli.app import Commands, Found, run, with_db, with_json, with_owner
from chatflow.cli.files import existing, of_owner, to_begin
from chatflow.cli.openai_items import Note, convert
from chatflow.cli.output import Output
from chatflow.core.agent import Agent
from chatflow.core.envelopes import encode
from chatflow.core.messages import Role
from chatflow.core.store import BaseSessionStore
from chatflow.exceptions import shorten
from chatflow.sqlite.database import read_once
from chatflow.sqlite.location import Location, locate
from chatflow.sqlite.openai_agents import items_of, session_ids


@click.group("import", cls=Commands)
def import_() -> None:
    """Bring in conversations of other packages. chatflow-agent's files need none of it: they open as they are."""


@attrs.frozen
class _Outcome:
    """What became of one conversation: *reason* says why it was not brought in."""

    session_id: Any
    messages: int = 0
    notes: tuple[Note, ...] = ()
    skipped: str | None = None
    failed: str | None = None


@import_.command("openai-agents")
@click.argument("file")
@with_db
@with_owner
@click.option("--agent", default="Assistant", show_default=True, help="Who answers in them; the file does not say it.")
@with_json
def openai_agents(file: str, db: str, owner: str | None, agent: str, is_json: bool) -> None:
    """Bring in the sessions of FILE, which openai-agents' SQLiteSession has written. FILE is only read.

    Each is one commit, under its own id. One that is there already, and is not empty, is left alone: so it may be
    done again. No turn is dropped: a conversation that is longer than a store's default may have as many as it has.
    One line each, and one for each item that is not simply a message now. The status is 1 if any item, or session,
    was left out.
    """
    output = Output(is_json=is_json)
    source = locate(existing(file, "FILE"))
    answering, store = Agent(agent), to_begin(db)

    async def work() -> list[_Outcome]:
        ids = await read_once(source, partial(session_ids, name=file))
        outcomes: list[_Outcome] = []
        async with store:
            with output.progress("bringing in", len(ids)) as step:
                for session_id in ids:
                    outcomes.append(await _bring_in(source, session_id, of_owner(store, owner), answering))
                    step()
        return outcomes

    outcomes = run(work)
    for outcome in outcomes:
        if is_json:
            output.json(_data(outcome))
        else:
            _print(outcome, output)
    brought = sum(outcome.skipped is None and outcome.failed is None for outcome in outcomes)
    output.note(f"{brought} of {len(outcomes)} conversations brought in")
    if any(outcome.failed is not None or not all(note.is_kept for note in outcome.notes) for outcome in outcomes):
        output.note("what was left out is still in the file that it came from, which was not changed")
        raise Found


async def _bring_in(source: Location, session_id: Any, store: BaseSessionStore, agent: Agent) -> _Outcome:
    try:
        store.key_of(session_id)
    except (TypeError, ValueError) as error:
        return _Outcome(session_id, failed=str(error))
    items = await read_once(source, partial(items_of, session_id=session_id))
    converted = convert(items, agent.name)
    turns = sum(message.role is Role.USER for message in converted.messages)
    max_turns = max(turns, store.default_max_turns)
    session = await store.get_or_create(session_id, agent, max_turns=max_turns)
    async with session.turn():
        if len(session.history):
            return _Outcome(session_id, skipped="it is there already")
        if session.max_turns < turns:
            return _Outcome(
                session_id, skipped=f"it is there, empty, and keeps {session.max_turns} turns of its {turns}"
            )
        for message in converted.messages:
            await session.add_message(message)
    return _Outcome(session_id, len(converted.messages), converted.notes)


def _print(outcome: _Outcome, output: Output) -> None:
    name = outcome.session_id if isinstance(outcome.session_id, str) else shorten(outcome.session_id)
    if outcome.failed is not None:
        output.line(f"{name}: left out: {outcome.failed}", "red")
    elif outcome.skipped is not None:
        output.line(f"{name}: left alone: {outcome.skipped}", "yellow")
    else:
        output.line(f"{name}: {outcome.messages} messages")
    for note in outcome.notes:
        output.line(f"  item {note.row} {'kept' if note.is_kept else 'left out'}: {note.reason}", "dim")


def _data(outcome: _Outcome) -> dict[str, Any]:
    session_id = outcome.session_id
    return {
        "session_id": encode(session_id) if isinstance(session_id, str) else repr(session_id),
        "messages": outcome.messages,
        "skipped": outcome.skipped,
        "failed": outcome.failed,
        "items": [{"row": note.row, "kept": note.is_kept, "reason": note.reason} for note in outcome.notes],
    }
