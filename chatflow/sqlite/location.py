"""What a *db_path* means: a file, or a database in memory, private or shared."""

from __future__ import annotations

import os
from pathlib import Path
from urllib.parse import quote, unquote

import attrs


@attrs.frozen
class Location:
    """Where a database is.

    *target* is what SQLite opens, as a URI where *is_uri*. *identity* is the same for all stores that share one
    database, and None for a private one. *path* is the file, and None in memory. *name* is what errors call it: the
    file as it was named, or the address of what is in memory. With *read_only* the file is there and stays as it is.
    """

    target: str
    is_uri: bool
    identity: str | None
    path: Path | None
    name: str
    read_only: bool = False

    def with_options(self, options: str) -> str:
        """The same as a URI with *options* too; SQLite takes the last word on how a file is opened."""
        address = self.target if self.is_uri else f"file:{quote(self.target, errors='surrogateescape')}"
        return f"{address}{'&' if '?' in address else '?'}{options}"


def locate(db_path: str | os.PathLike[str]) -> Location:
    """Tell what *db_path* means, by its parsed URI: a path that only looks like an address in memory is a file.

    Raises:
        TypeError: Neither text nor a path.
        ValueError: Empty, with a NUL, or on another host.
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
    # Absolute, so that no name can be taken for an address, and a later chdir() changes nothing. Links are not
    # followed: that would ask the disk.
    path = Path(os.path.normpath(Path(name).absolute()))
    return Location(str(path), is_uri=False, identity=str(path), path=path, name=name)


def _locate_uri(uri: str) -> Location:
    # Taken apart as SQLite does it: a URL's parser drops line ends, and reads a plus as a space.
    address, _, query = uri.removeprefix("file:").partition("#")[0].partition("?")
    if address.startswith("//"):
        host, slash, rest = address[2:].partition("/")
        if host not in {"", "localhost"}:
            raise ValueError(f"db_path names a file on another host: {uri!r}")
        address = slash + rest
    path = unquote(address, errors="surrogateescape")
    if "\0" in path:
        raise ValueError(f"db_path must be a file's name, not {uri!r}")
    options: dict[str, str] = {}
    for option in query.split("&"):
        name, _, value = option.partition("=")
        options[unquote(name)] = unquote(value)
    if options.get("vfs") == "memdb":
        identity = f"memdb:{path}" if path.startswith("/") else None
        return Location(uri, is_uri=True, identity=identity, path=None, name=uri)
    if path == ":memory:" or options.get("mode") == "memory":
        identity = f"memory:{path}" if path and options.get("cache") == "shared" else None
        return Location(uri, is_uri=True, identity=identity, path=None, name=uri)
    if not path:
        raise ValueError(f"db_path must name a file, not {uri!r}")
    file = Path(os.path.normpath(Path(path).absolute()))
    target = f"file:{quote(str(file), errors='surrogateescape')}" + (f"?{query}" if query else "")
    read_only = options.get("mode") == "ro"
    # One that only reads is another database of this process than one that writes the same file.
    identity = f"read only:{file}" if read_only else str(file)
    return Location(target, is_uri=True, identity=identity, path=file, name=path, read_only=read_only)
