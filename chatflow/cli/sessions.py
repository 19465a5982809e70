"""``chatflow sessions``: what conversations there are, one of them, all of an owner's, and how to be rid of them."""

from __future__ import annotations

import datetime as dt
import json
import re
from collections.abc import AsyncGenerator
from contextlib import aclosing
from functools import partial
from typing import Any, Final

import click
from anyio import to_thread

from chatflow.cli.app import Commands, confirm, run, with_all_owners, with_db, with_json, with_owner, with_yes
from chatflow.cli.files import of_owner, to_change, to_read
from chatflow.cli.output import Output
from chatflow.cli.transcript import print_session, session_data
from chatflow.core.envelopes import encode
from chatflow.core.owners import ALL
from chatflow.core.records import SessionInfo
from chatflow.exceptions import SessionNotFoundError, shorten
from chatflow.sqlite.store import SQLiteSessionStore

_PAGE: Final = 500

_SPAN: Final = re.compile(r"(\d+(?:\.\d+)?)\s*([smhdw])")
_SECONDS: Final = {"s": 1, "m": 60, "h": 3600, "d": 24 * 3600, "w": 7 * 24 * 3600}


@click.group(cls=Commands)
def sessions() -> None:
    """The conversations of a file: list, show, export, delete, purge."""


@sessions.command("list")
@with_db
@with_owner
@with_all_owners
@click.option("--limit", type=click.IntRange(min=1), default=100, show_default=True, help="How many at most.")
@with_json
def list_sessions(db: str, owner: str | None, all_owners: bool, limit: int, is_json: bool) -> None:
    """List the conversations, the one with the newest commit first.

    One line each: its id, the agent that answers, when it last changed, its metadata; with --all-owners its owner
    before that.
    """
    if all_owners and owner is not None:
        raise click.UsageError("--owner and --all-owners exclude each other")
    output, store = Output(is_json=is_json), to_read(db)

    found, more = run(partial(_newest, store, owner, limit, all_owners=all_owners))
    if is_json:
        for info in found:
            output.json(_info_data(info))
    else:
        columns = ["session", "agent", "last commit", "metadata"]
        rows = [[info.session_id, info.active_agent_name, moment(info.updated_at), _metadata(info)] for info in found]
        if all_owners:
            columns.insert(0, "owner")
            rows = [[info.owner, *row] for info, row in zip(found, rows, strict=True)]
        output.table(columns, rows)
    if not found:
        output.note("there are no conversations" + ("" if all_owners else _whose(owner)))
    elif more:
        output.note(f"there are more; --limit {limit * 10} shows more of them")


async def _newest(
    store: SQLiteSessionStore, owner: str | None, limit: int, *, all_owners: bool
) -> tuple[list[SessionInfo], bool]:
    """The newest *limit* conversations, and whether there are more."""
    found: list[SessionInfo] = []
    after: int | None = None
    async with store:
        while len(found) < limit:
            size = min(_PAGE, limit - len(found))
            if all_owners:
                page = await store.list_sessions(limit=size, after=after, owner=ALL)
            else:
                page = await of_owner(store, owner).list_sessions(limit=size, after=after)
            found += page.items
            after = page.next
            if after is None:
                break
    return found, after is not None


def _whose(owner: str | None) -> str:
    return " without an owner; --all-owners shows the others" if owner is None else f" of {shorten(owner)}"


def moment(when: dt.datetime) -> str:
    """A moment as it is shown: to the second, in UTC."""
    return f"{when.astimezone(dt.UTC):%Y-%m-%d %H:%M:%SZ}"


def _metadata(info: SessionInfo) -> str:
    return json.dumps(encode(info.metadata), ensure_ascii=False) if info.metadata else ""


def _info_data(info: SessionInfo) -> dict[str, Any]:
    return {
        "owner": encode(info.owner),
        "session_id": encode(info.session_id),
        "active_agent_name": encode(info.active_agent_name),
        "metadata": encode(info.metadata),
        "created_at": info.created_at.isoformat(),
        "updated_at": info.updated_at.isoformat(),
    }


@sessions.command("show")
@click.argument("session_id")
@with_db
@with_owner
@click.option("--full", is_flag=True, help="Cut no long texts.")
@with_json
def show(session_id: str, db: str, owner: str | None, full: bool, is_json: bool) -> None:
    """Show a conversation: who spoke, which tools ran, where the window begins, what waits, what it cost."""
    output, store = Output(is_json=is_json), to_read(db)

    async def work() -> None:
        async with store:
            session = await of_owner(store, owner).get(session_id)
        if session is None:
            raise SessionNotFoundError(session_id=session_id)
        if is_json:
            output.json(session_data(session))
        else:
            print_session(session, output, full=full)

    run(work)


@sessions.command("export")
@click.argument("session_id", required=False)
@with_db
@with_owner
@click.option("--output", "-o", "target", type=click.File("w", lazy=True), help="A file to write to.")
@with_json
def export(session_id: str | None, db: str, owner: str | None, target: Any, is_json: bool) -> None:
    """Write a conversation as JSON, or, without SESSION_ID, all that is kept of the owner as lines of JSON.

    The first is what AgentSession.from_dict reads, the second what store.export_owner gives. It is JSON in any case.
    """
    output, store = Output(is_json=True), to_read(db)

    async def lines() -> AsyncGenerator[str]:
        async with store:
            if session_id is None:
                async with aclosing(store.export_owner(owner or "")) as all_of_it:
                    async for line in all_of_it:
                        yield line
                return
            session = await of_owner(store, owner).get(session_id)
            if session is None:
                raise SessionNotFoundError(session_id=session_id)
            yield json.dumps(session.to_dict())

    async def work() -> int:
        count = 0
        async with aclosing(lines()) as written:
            async for line in written:
                await to_thread.run_sync(output.json_text, line, target)
                count += 1
        return count

    with output.working("reading the conversations"):
        count = run(work)
    if target is not None:
        output.note(f"{count} {'line' if count == 1 else 'lines'} written to {target.name}")


@sessions.command("delete")
@click.argument("session_id")
@with_db
@with_owner
@with_yes
@with_json
def delete(session_id: str, db: str, owner: str | None, yes: bool, is_json: bool) -> None:
    """Delete a conversation with all it has. Whoever still uses it is told so by an error."""
    output, store = Output(is_json=is_json), to_change(db)
    confirm(f"Delete the conversation {shorten(session_id)} for good?", yes=yes)

    async def work() -> bool:
        async with store:
            return await of_owner(store, owner).delete(session_id)

    if not run(work):
        raise SessionNotFoundError(session_id=session_id)
    if is_json:
        output.json({"session_id": encode(session_id), "deleted": True})
    else:
        output.line(f"deleted {session_id}")


@sessions.command("purge")
@with_db
@with_owner
@with_all_owners
@click.option("--idle-for", metavar="TIME", help="Also those without a commit for so long: 30d, 12h, 90m, 2w, 45s.")
@with_yes
@with_json
def purge(db: str, owner: str | None, all_owners: bool, idle_for: str | None, yes: bool, is_json: bool) -> None:
    """Delete the conversations whose own time to expire is over, and with --idle-for those left alone for so long.

    None goes with a turn that is in line, runs, was accepted or interrupted, or whose answer is still to be told.
    """
    if all_owners and owner is not None:
        raise click.UsageError("--owner and --all-owners exclude each other")
    span = None if idle_for is None else _span(idle_for)
    output, store = Output(is_json=is_json), to_change(db)
    which = "whose time to expire is over" + ("" if span is None else f", or without a commit for {idle_for}")
    confirm(f"Delete all conversations {which}, for good?", yes=yes)

    async def work() -> int:
        async with store:
            if all_owners:
                return await store.purge(span, owner=ALL)
            return await of_owner(store, owner).purge(span)

    with output.working("deleting conversations"):
        count = run(work)
    if is_json:
        output.json({"purged": count})
    else:
        output.line(f"deleted {count} {'conversation' if count == 1 else 'conversations'}")


def _span(text: str) -> dt.timedelta:
    found = _SPAN.fullmatch(text.strip())
    if found is None or not float(found[1]):
        raise click.BadParameter(
            f"{shorten(text)} is no time such as 30d, 12h, 90m, 2w or 45s", param_hint="--idle-for"
        )
    try:
        return dt.timedelta(seconds=float(found[1]) * _SECONDS[found[2]])
    except OverflowError:
        raise click.BadParameter(f"{shorten(text)} is too long", param_hint="--idle-for") from None
