"""``chatflow check``, ``repair`` and ``upgrade``: whether a file is whole, and how to make it so."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from functools import partial
from typing import Any, Final

import attrs
import click

from chatflow.cli.app import Command, Failed, Found, confirm, run, with_db, with_json, with_yes
from chatflow.cli.files import existing, to_change, to_read
from chatflow.cli.output import Output
from chatflow.core.envelopes import encode
from chatflow.core.owners import ALL, TakenOut
from chatflow.core.repairs import Fault, Repair
from chatflow.sqlite.contents import CHATFLOW_AGENT, format_of
from chatflow.sqlite.database import read_once
from chatflow.sqlite.location import locate
from chatflow.sqlite.schema import MIGRATIONS
from chatflow.sqlite.store import SQLiteSessionStore

_PAGE: Final = 500

_TAKE_OUT: Final = frozenset({"message", "front", "result"})
"""Kinds of faults for which a message, or a part of it, leaves its conversation."""


@click.command("check", cls=Command)
@with_db
@with_json
def check(db: str, is_json: bool) -> None:
    """Look for all that is wrong with a file, and change nothing. The status is 1 if anything is.

    One line each: its kind, its owner, the conversation, the row, what is wrong with it.
    """
    output = Output(is_json=is_json)
    faults = _faults_of(to_read(db), output)
    if is_json:
        for fault in faults:
            output.json(_fault_data(fault))
    else:
        output.table(["kind", "owner", "session", "row", "what"], map(_fault_row, faults))
    if faults:
        output.note(f"{_count(len(faults), 'fault')}; `chatflow repair` mends what can be mended by rule")
        raise Found
    output.note("nothing is wrong")


def _faults_of(store: SQLiteSessionStore, output: Output) -> tuple[Fault, ...]:
    async def work() -> tuple[Fault, ...]:
        async with store:
            return await store.check()

    with output.working("reading all of it"):
        return run(work)


def _messages(faults: Iterable[Fault]) -> int:
    """How many messages `repair` takes out of their conversations for these faults, all of one or a part of it."""
    return len({fault.row for fault in faults if fault.kind in _TAKE_OUT})


@click.command("repair", cls=Command)
@with_db
@with_yes
@with_json
def repair(db: str, yes: bool, is_json: bool) -> None:
    """Mend what can be mended by rule; what is taken out is set aside in the file. The status is 1 if faults are left.

    Without --yes it reads all of it first, and asks, if anything is wrong. One line each: what was done, and the fault
    as `chatflow check` shows it.
    """
    output, store = Output(is_json=is_json), to_change(db)
    if not yes:
        faults = _faults_of(to_read(db), output)
        if not faults:
            output.note("nothing was wrong")
            return
        going = _messages(faults)
        leave = "leaves its conversation" if going == 1 else "leave their conversations"
        which = f": {_count(going, 'message')} {leave}, whole or in part, and can be found in chatflow_set_aside"
        confirm(f"Mend {_count(len(faults), 'fault')}{which if going else ''}?", yes=False)

    async def work() -> tuple[Repair, ...]:
        async with store:
            return await store.repair()

    with output.working("reading and mending"):
        repairs = run(work)
    if is_json:
        for each in repairs:
            output.json({"action": each.action, "done": each.is_done, **_fault_data(each.fault)})
    else:
        rows = ([each.action, *_fault_row(each.fault)] for each in repairs)
        output.table(["done", "kind", "owner", "session", "row", "what"], rows)
    gone = _messages(each.fault for each in repairs if each.action == "set aside")
    if gone:
        output.note(f"{_count(gone, 'message')} set aside, whole or in part, in the table chatflow_set_aside")
    left = sum(not each.is_done for each in repairs)
    if left:
        output.note(f"{_count(left, 'fault')} left; those of turns under way are mended when they have ended")
        raise Found
    output.note("nothing was wrong" if not repairs else _count(len(repairs), "fault") + " mended")


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def _fault_row(fault: Fault) -> list[str]:
    return [fault.kind, fault.owner, fault.session_id, fault.row, fault.reason]


def _fault_data(fault: Fault) -> dict[str, Any]:
    return {name: encode(value) for name, value in attrs.asdict(fault).items()}


@attrs.frozen
class _Upgraded:
    before: str
    conversations: int
    set_aside: list[TakenOut]


@click.command("upgrade", cls=Command)
@click.argument("file")
@with_json
def upgrade(file: str, is_json: bool) -> None:
    """Bring a file of chatflow-agent 0.3.4, or of an older chatflow, to this version's format, in place.

    Nothing is lost: what can't be part of a conversation is set aside in the file. There is no way back, so keep a
    copy. A file that is of this version already stays as it is.
    """
    output, path = Output(is_json=is_json), existing(file, "FILE")

    async def work() -> _Upgraded:
        found = await read_once(locate(path), partial(format_of, name=file, newest=len(MIGRATIONS)))
        if found == 0:
            raise Failed(
                f"{file!r} is empty, and there is nothing to upgrade; chatflow makes it a store when it opens it"
            )
        async with SQLiteSessionStore(path) as store:
            count, after = 0, None
            while True:
                page = await store.list_sessions(limit=_PAGE, after=after, owner=ALL)
                count, after = count + len(page.items), page.next
                if after is None:
                    break
            aside = [] if found > 0 else [each async for each in _set_aside(store)]
        return _Upgraded(_name(found), count, aside)

    with output.working("upgrading, in one transaction"):
        done = run(work)
    if is_json:
        aside = [
            {"session_id": encode(each.session_id), "source": encode(each.source), "reason": encode(each.reason)}
            for each in done.set_aside
        ]
        output.json({"file": encode(file), "was": done.before, "conversations": done.conversations, "set_aside": aside})
        return
    output.line(f"{file} was {done.before}, and holds {_count(done.conversations, 'conversation')}")
    output.table(
        ["set aside", "session", "why"], ([each.source, each.session_id or "", each.reason] for each in done.set_aside)
    )


def _name(found: int) -> str:
    if found == CHATFLOW_AGENT:
        return "chatflow-agent's"
    return "of this version" if found == len(MIGRATIONS) else f"of format {found}"


async def _set_aside(store: SQLiteSessionStore) -> AsyncIterator[TakenOut]:
    number = 0
    while taken := await store.page_of_set_aside("", number, _PAGE):
        for each in taken:
            yield each
        number = taken[-1].number
