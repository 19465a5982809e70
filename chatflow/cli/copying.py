"""``chatflow copy``: a file's conversations into a PostgreSQL database."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from chatflow.cli.app import Command, Failed, Found, run, with_json
from chatflow.cli.files import SERVER, existing
from chatflow.cli.output import Output
from chatflow.core.envelopes import encode
from chatflow.exceptions import counted, shorten

if TYPE_CHECKING:
    from chatflow.cli.copier import Copied

_FILE: Final = "sqlite:///"

_SHOWN: Final = 5
"""Differing conversations that an error names."""


@click.command("copy", cls=Command)
@click.argument("source", metavar="sqlite:///FILE")
@click.argument("target", metavar="postgresql://...")
@click.option("--schema", default="chatflow", show_default=True, metavar="NAME", help="Where the tables are to stand.")
@with_json
def copy(source: str, target: str, schema: str, is_json: bool) -> None:
    """Copy all that FILE holds into a PostgreSQL database, and compare both. FILE is only read.

    The schema holds the copy and nothing else. A copy that was ended goes on when it is started again, and a later one
    writes what has changed, until the copy is used. Stop the application before the last one: the status is 1 if the
    file was changed meanwhile, or if both sides are not the same, and no application can use the copy yet.

    One line for each table: its name, how many rows it has, a checksum over them.
    """
    output, path = Output(is_json=is_json), _path(source)
    if not target.startswith(SERVER):
        raise click.BadParameter(f"{shorten(target)} does not begin with {SERVER[0]}", param_hint="postgresql://...")
    try:
        from chatflow.cli.copier import open_copier  # noqa: PLC0415  # it loads psycopg, of another extra
    except ModuleNotFoundError as error:
        if error.name != "psycopg":
            raise
        raise Failed(str(error)) from error

    async def work() -> tuple[str, Copied]:
        async with open_copier(path, target, schema) as copier:
            total = await copier.begin()
            with output.progress("copying", total) as step:
                await copier.write(step)
            with output.progress("comparing", total) as step:
                return copier.name, await copier.compare(step)

    try:
        name, copied = run(work)
    except KeyboardInterrupt:
        output.note("what was copied stays: started again, the copy goes on")
        raise
    _print(copied, output)
    if copied.differing:
        raise Failed(_difference(copied, name))
    output.note(f"{counted(copied.written, 'conversation')} written; {name} holds what {source} holds")
    if copied.has_changed:
        output.note("the file was changed meanwhile: stop the application, then do this again", "yellow")
        raise Found


def _path(source: str) -> Path:
    if not source.startswith(_FILE) or source == _FILE:
        raise click.BadParameter(f"{shorten(source)} is not of the form sqlite:///FILE", param_hint="sqlite:///FILE")
    return existing(source.removeprefix(_FILE), "sqlite:///FILE")


def _print(copied: Copied, output: Output) -> None:
    if output.is_json:
        tables = [
            {
                "table": table.name,
                "rows": table.rows,
                "checksum": table.checksum,
                "copied_rows": table.copied_rows,
                "copied_checksum": table.copied_checksum,
            }
            for table in copied.tables
        ]
        differing = [{"owner": encode(owner), "session_id": encode(each)} for owner, each in copied.differing]
        output.json(
            {"written": copied.written, "changed": copied.has_changed, "differing": differing, "tables": tables}
        )
        return
    rows: list[list[str]] = []
    for table in copied.tables:
        rows.append([table.name, str(table.rows), table.checksum])
        if (table.rows, table.checksum) != (table.copied_rows, table.copied_checksum):
            rows.append([f"{table.name}, copied", str(table.copied_rows), table.copied_checksum])
    output.table(["table", "rows", "checksum"], rows)


def _difference(copied: Copied, name: str) -> str:
    named = ", ".join(_named(*each) for each in copied.differing[:_SHOWN])
    more = len(copied.differing) - _SHOWN
    named += f" and {more} more" if more > 0 else ""
    if copied.has_changed:
        return f"the file was changed meanwhile, and {named} differ now: stop the application, then do this again"
    return (
        f"the copy in {name} is not the same as the file: {named} differ; look whether anything else writes into"
        " that database, then do this again"
    )


def _named(owner: str, session_id: str) -> str:
    what = shorten(session_id) if session_id else "what is of no session"
    return f"{what} of owner {shorten(owner)}" if owner else what
