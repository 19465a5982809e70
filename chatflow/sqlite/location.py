"""What a *db_path* means: a file, or a database in memory, private or shared."""

from __future__ import annotations

import os
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

import attrs


@attrs.frozen
class Location:
    """Where a database is.

    *target* is what SQLite opens, as a URI where *is_uri*. *identity* is the same for every spelling of one database
    that this process can share, and None for a private one. *path* is the file, and None in memory.
    """

    target: str
    is_uri: bool
    identity: str | None
    path: Path | None
    name: str


def locate(db_path: str | os.PathLike[str]) -> Location:
    """Tell what *db_path* means, by its parsed URI: a path that only looks like an address in memory is a file.

    Raises:
        TypeError: Neither text nor a path.
        ValueError: Empty, or with a NUL.
    """
    if not isinstance(db_path, str | os.PathLike):
        raise TypeError(f"db_path must be a string or a path, not {type(db_path).__name__}")
    name = os.fspath(db_path)
    if not isinstance(name, str):
        raise TypeError("db_path must be text, not bytes")
    if not name or "\0" in name:
        raise ValueError(f"db_path must be a file's name, not {name!r}")
    if isinstance(db_path, str) and name == ":memory:":
        return Location(":memory:", is_uri=False, identity=None, path=None, name=name)
    if isinstance(db_path, str) and name.startswith("file:"):
        return _locate_uri(name)
    # Absolute, so that no name can be taken for an address, and a later chdir() changes nothing.
    path = Path(os.path.abspath(name))  # noqa: PTH100  # Path.resolve would follow links, which SQLite does itself
    return Location(str(path), is_uri=False, identity=os.path.realpath(path), path=path, name=name)


def _locate_uri(uri: str) -> Location:
    parts = urlsplit(uri)
    path = unquote(parts.path)
    options = {key: values[-1] for key, values in parse_qs(parts.query, keep_blank_values=True).items()}
    if options.get("vfs") == "memdb":
        shared = path.startswith("/")
        return Location(uri, is_uri=True, identity=f"memdb:{path}" if shared else None, path=None, name=uri)
    if path == ":memory:" or options.get("mode") == "memory":
        shared = options.get("cache") == "shared"
        return Location(uri, is_uri=True, identity=f"memory:{path}" if shared else None, path=None, name=uri)
    return Location(uri, is_uri=True, identity=os.path.realpath(path), path=Path(path), name=uri)
