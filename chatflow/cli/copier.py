"""Copying a file into a PostgreSQL schema: what differs is written anew, and at the end all of it is compared.

Nothing is noted of how far a copy has come. What is there already, and equal, stays, so that one that was killed goes
on, and a second one writes what has changed. Half of a conversation is never there: each slice is one transaction.
"""

from __future__ import annotations

import socket
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final

import attrs

from chatflow.cli.files import read_only
from chatflow.core.copying import COLUMNS, Kind, Slice, Source, Tally
from chatflow.postgres.copying import Copy, open_copy
from chatflow.sqlite import copying as reading
from chatflow.sqlite.database import Database, open_database, release_database
from chatflow.sqlite.location import locate
from chatflow.sqlite.schema import LIFECYCLE

Step = Callable[[], None]
"""Called after each conversation."""

_NAMED: Final = 100
"""Differing conversations that are named at most."""


@attrs.frozen(kw_only=True)
class Table:
    """A table on both sides: how many rows it has, and a checksum over them, in order."""

    name: str
    rows: int
    checksum: str
    copied_rows: int
    copied_checksum: str


@attrs.frozen(kw_only=True)
class Copied:
    """What came of a copy.

    *written* are the conversations that this run has written. *differing* are owners and session ids, at most 100, of
    what is not the same on both sides, and *has_changed* says that somebody has committed to the file meanwhile.
    """

    tables: tuple[Table, ...]
    written: int
    differing: tuple[tuple[str, str], ...]
    has_changed: bool


class Copier:
    """A file, and a copy of it."""

    def __init__(self, source: Database, source_name: str, copy: Copy) -> None:
        self._source: Final = source
        self._source_name: Final = source_name
        self._copy: Final = copy
        self._changes: int | None = None
        self.name: Final = copy.name
        self.written = 0

    async def begin(self) -> int:
        """Take the schema, and say how many conversations there are."""
        self._changes = await self._source.read(reading.changes)
        numbers = await self._source.read(reading.highest_numbers)
        source = Source(self._source_name, await self._source.read(reading.store_id))
        await self._copy.begin(source, numbers)
        return await self._source.read(reading.count_conversations)

    async def write(self, step: Step) -> None:
        """Write what is not there as it is in the file, and delete what is not in the file."""
        async for part in self._slices():
            held = await self._copy.read(part)
            changed = [key for key, item in part.items.items() if held.items.get(key) != item]
            if changed or held.others:
                await self._copy.write(part, changed)
            if part.kind is Kind.CONVERSATIONS:
                self.written += len(changed)
            _count(part, step)

    async def compare(self, step: Step) -> Copied:
        """Read all of it on both sides. If both are the same, and the file has stayed, stores may use the copy."""
        ours, theirs = Tally(), Tally()
        differing: dict[tuple[str, str], None] = {}
        async for part in self._slices():
            held = await self._copy.read(part)
            for key, item in part.items.items():
                ours.add(item)
                copied = held.items.get(key)
                if copied is not None:
                    theirs.add(copied)
                if copied != item:
                    differing[item.owner, item.session_id] = None
            differing |= dict.fromkeys(held.others)
            _count(part, step)
        tables = (
            Table(
                name=table,
                rows=ours.counts[table],
                checksum=ours.checksum(table),
                copied_rows=theirs.counts[table],
                copied_checksum=theirs.checksum(table),
            )
            for table in COLUMNS
        )
        has_changed = await self._source.read(reading.changes) != self._changes
        if not differing and not has_changed:
            await self._copy.end()
        return Copied(
            tables=tuple(tables),
            written=self.written,
            differing=tuple(differing)[:_NAMED],
            has_changed=has_changed,
        )

    async def _slices(self) -> AsyncIterator[Slice]:
        for kind in Kind:
            after: Any = reading.BEGINNINGS[kind]
            while after is not None:
                part = await self._source.read(partial(reading.slice_after, kind, after))
                yield part
                after = part.last


def _count(part: Slice, step: Step) -> None:
    if part.kind is Kind.CONVERSATIONS:
        for _ in part.items:
            step()


@asynccontextmanager
async def open_copier(path: Path, dsn: str, schema: str) -> AsyncGenerator[Copier]:
    """Open both sides, the file so that nothing in it can change."""
    location = locate(read_only(path))
    source = open_database(location, LIFECYCLE)
    try:
        async with open_copy(dsn, schema) as copy:
            yield Copier(source, f"{socket.gethostname()}:{location.path}", copy)
    finally:
        if release_database(source):
            await source.close()
