"""The files that commands open: to read, to change what is there, or to begin."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final
from urllib.parse import quote

from chatflow.cli.app import Failed
from chatflow.core.store import BaseSessionStore
from chatflow.exceptions import shorten
from chatflow.sqlite.store import SQLiteSessionStore

SERVER: Final = ("postgresql://", "postgres://")
"""How the address of a PostgreSQL database begins."""


def to_read(db: str) -> SQLiteSessionStore:
    """A store on a file that is there, which changes nothing in it."""
    return SQLiteSessionStore(read_only(existing(db)))


def read_only(path: Path) -> str:
    """The address of a file in which nothing can change."""
    # As it was named, since errors name it so; two slashes in front would begin a host's name.
    name = re.sub("^/+", "/", str(path))
    return f"file:{quote(name, errors='surrogateescape')}?mode=ro"


def to_change(db: str) -> SQLiteSessionStore:
    """A store on a file that is there."""
    return SQLiteSessionStore(existing(db))


def to_begin(db: str) -> SQLiteSessionStore:
    """A store on a file that is made where it is not there; ``:memory:`` is none, and is forgotten at the end.

    Raises:
        Failed: Its folder is not there. A store would make it; at a command line it is a slip of the finger. Or it is
            no file, but a server's.
    """
    _refuse_server(db, "--db")
    if db == ":memory:":
        return SQLiteSessionStore(db)
    path = Path(db)
    if not path.parent.is_dir():
        raise Failed(f"there is no folder {shorten(str(path.parent))}; make it, or name another file with --db")
    return SQLiteSessionStore(path)


def existing(db: str, given_as: str = "--db") -> Path:
    """The file of that name; *given_as* is the option or argument that names it.

    Raises:
        Failed: There is none, or it is no file, but a server's.
    """
    _refuse_server(db, given_as)
    path = Path(db)
    if path.is_dir():
        raise Failed(f"{shorten(db)} is a folder; name a file in it as {given_as}")
    if not path.is_file():
        raise Failed(f"there is no file {shorten(db)}; {given_as} names the file that holds the conversations")
    return path


def _refuse_server(db: str, given_as: str) -> None:
    if db.startswith(SERVER):
        # Not as it was given: the password may be in it.
        raise Failed(
            f"{given_as} names a file, and this is the address of a PostgreSQL database: there a program looks, by"
            " `PostgresSessionStore(...).check()` for instance, or SQL does (docs/scaling.md)"
        )


def of_owner(store: SQLiteSessionStore, owner: str | None) -> BaseSessionStore:
    """The conversations of *owner*, or those without one."""
    return store if owner is None else store.for_owner(owner)
