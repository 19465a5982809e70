"""Writing a copy of another store, a slice at a time, and comparing with it: keys and numbers are those of the other.

A schema holds one copy and nothing else. Once it is used it is no copy any more, and is not written again. Between two
slices no lock is held and no connection: a note in the schema says who writes, and whether the copy is whole.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import AsyncGenerator, Collection, Mapping
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, Final, LiteralString

import attrs

from chatflow.core.copying import COLUMNS, Item, Kind, Numbers, Row, Slice, Source
from chatflow.exceptions import StoreError, StoreFormatError, shorten
from chatflow.postgres import copy_statements as statements
from chatflow.postgres.connection import Step, Transaction, locate
from chatflow.postgres.database import Database, open_database, release_database
from chatflow.postgres.failures import is_too_long, refused_value
from chatflow.postgres.turns import release, release_the_gone

_HELD: Final[dict[Kind, dict[str, LiteralString]]] = {
    Kind.CONVERSATIONS: {
        "chatflow_sessions": statements.HELD_SESSIONS,
        "chatflow_messages": statements.HELD_MESSAGES,
        "chatflow_turns": statements.HELD_TURNS,
        "chatflow_journal": statements.HELD_JOURNALS,
    },
    Kind.MESSAGE_IDS: {"chatflow_processed_messages": statements.HELD_IDS},
    Kind.SET_ASIDE: {"chatflow_set_aside": statements.HELD_SET_ASIDE},
}
_OTHERS: Final[dict[Kind, tuple[LiteralString, LiteralString]]] = {
    Kind.CONVERSATIONS: (statements.OTHER_SESSIONS, statements.OTHER_SESSIONS),
    Kind.MESSAGE_IDS: (statements.OTHER_IDS, statements.OTHER_IDS_TO_THE_END),
    Kind.SET_ASIDE: (statements.OTHER_SET_ASIDE, statements.OTHER_SET_ASIDE),
}
"""For a slice, and for the last one."""
_DELETE: Final[dict[Kind, tuple[LiteralString, LiteralString]]] = {
    Kind.CONVERSATIONS: (statements.DELETE_SESSIONS, statements.DELETE_SESSIONS),
    Kind.MESSAGE_IDS: (statements.DELETE_IDS, statements.DELETE_IDS_TO_THE_END),
    Kind.SET_ASIDE: (statements.DELETE_SET_ASIDE, statements.DELETE_SET_ASIDE),
}
_INSERT: Final[dict[str, LiteralString]] = {
    "chatflow_sessions": statements.INSERT_SESSIONS,
    "chatflow_messages": statements.INSERT_MESSAGES,
    "chatflow_turns": statements.INSERT_TURNS,
    "chatflow_journal": statements.INSERT_JOURNALS,
    "chatflow_processed_messages": statements.INSERT_IDS,
    "chatflow_set_aside": statements.INSERT_SET_ASIDE,
}

_CONNECTIONS: Final = 1
_LAST: Final = 2**63 - 1
_NAMED: Final = 100
"""Others that are told of at most, of a slice."""


@attrs.frozen
class Held:
    """What a copy has of a slice: the *items* with its keys, and whose others there are (owners and session ids)."""

    items: dict[Any, Item]
    others: list[tuple[str, str]]


@attrs.frozen
class Copy:
    """A copy of another store in a schema of its own, by one run of whoever writes it.

    Of several runs the one that began last goes on. Each slice is written under the note that says who that is, so that
    what another one had read before can't get over what is newer.
    """

    _database: Database
    _run: str = attrs.field(init=False, factory=lambda: uuid.uuid4().hex)

    @property
    def name(self) -> str:
        """Its address, without the password."""
        return self._database.address.name

    async def begin(self, source: Source, numbers: Numbers) -> None:
        """Take the schema for a copy of *source*, which has given out *numbers*, or go on with one.

        Raises:
            StoreError: Something else is in it, the copy was used, or *source* is as it was before an earlier copy; it
                was left untouched.
        """
        noted = await self._database.write(partial(self._note, source, numbers))
        # After the note has committed: sequences know no transaction, and one that is above the note was used.
        await self._database.write(partial(self._raise_numbers, attrs.asdict(numbers) | noted))

    async def _note(self, source: Source, numbers: Numbers, transaction: Transaction) -> dict[str, int]:
        await transaction.ask(statements.LOCK_NOTE)
        ((text, is_filled, version, turn_id),) = await transaction.ask(statements.LOOK)
        if text is not None:
            note = json.loads(text)
            before = Source(note["source"], note.get("id"))
            if not source.is_the_same(before):
                renewed = " as it was before it was made anew" if before.name == source.name else ""
                raise self._refused(f"holds a copy of {before.name}{renewed}, and this is {source.name}")
            self._refuse_if_used(note, version, turn_id)
            self._refuse_if_older(note, numbers)
        elif is_filled:
            raise self._refused("holds what no copy has brought there")
        noted = {"version": max(version, numbers.version), "turn_id": max(turn_id, numbers.turn_id)}
        found = {"session_key": numbers.session_key, "turn_id": numbers.turn_id}
        note = {"source": source.name, "id": source.store_id, "run": self._run, **noted, "found": found, "whole": False}
        await transaction.change(statements.NOTE_COPY, note=json.dumps(note))
        return noted

    async def _raise_numbers(self, numbers: dict[str, int], transaction: Transaction) -> None:
        await transaction.ask(statements.LOCK_NOTE)
        self._refuse_if_lost(await transaction.ask(statements.READ_NOTE))
        await transaction.ask(statements.RAISE_NUMBERS, **numbers)

    def _refused(self, reason: str) -> StoreError:
        return StoreError(
            f"store {self.name!r} {reason}; it was left untouched: name a schema that is new, or drop this one",
            store=self.name,
        )

    def _refuse_if_used(self, note: Mapping[str, Any], version: int, turn_id: int) -> None:
        if version > note["version"] or turn_id > note["turn_id"]:
            raise self._refused("was used since it was copied, which another copy would undo")

    def _refuse_if_older(self, note: Mapping[str, Any], numbers: Numbers) -> None:
        """Refuse what has given out less than before. Versions don't tell: they go with their conversations."""
        found = note.get("found", {})
        if any(getattr(numbers, name) < number for name, number in found.items()):
            raise self._refused("holds a copy of this file in a newer state, and what is given now is older")

    def _refuse_if_lost(self, found: list[Row]) -> dict[str, Any]:
        """Refuse to go on where another run has begun, or the copy is in use already; else what is noted."""
        ((text, version, turn_id),) = found
        note: dict[str, Any] = json.loads(text)
        if note.get("run") != self._run:
            raise StoreError(
                f"store {self.name!r}: another copy into it has begun since this one, and goes on; this one has ended:"
                " wait for that one, then do this again",
                store=self.name,
            )
        self._refuse_if_used(note, version, turn_id)
        return note

    async def end(self) -> None:
        """Note that both sides are the same: from now on stores may use it.

        Raises:
            StoreError: As `read`.
        """
        await self._database.write(self._note_end)

    async def _note_end(self, transaction: Transaction) -> None:
        await transaction.ask(statements.LOCK_NOTE)
        note = self._refuse_if_lost(await transaction.ask(statements.READ_NOTE))
        await transaction.change(statements.NOTE_COPY, note=json.dumps({**note, "whole": True}))

    async def read(self, part: Slice) -> Held:
        """What there is of a slice.

        Raises:
            StoreError: Another copy has begun meanwhile, or somebody has used this one.
        """
        return await self._database.read(partial(self._read, part))

    async def _read(self, part: Slice, transaction: Transaction) -> Held:
        asked = _asked(part, part.items)
        held = _HELD[part.kind]
        note, *found, others = await transaction.ask_all(
            Step(statements.READ_NOTE),
            *(Step(statement, asked) for statement in held.values()),
            Step(_OTHERS[part.kind][part.last is None], {**asked, "limit": _NAMED}),
        )
        self._refuse_if_lost(note)
        if part.kind is Kind.MESSAGE_IDS:
            found = [[(row[:3], *row) for row in found[0]]]
        rows: dict[Any, dict[str, list[Row]]] = {}
        for table, lines in zip(held, found, strict=True):
            for key, *row in lines:
                rows.setdefault(key, {each: [] for each in held})[table].append(tuple(row))
        names = {key: (item.owner, item.session_id) for key, item in part.items.items()}
        items = {key: Item(*names[key], each) for key, each in rows.items()}
        return Held(items, [(each[0], each[1]) for each in others])

    async def write(self, part: Slice, changed: Collection[Any]) -> None:
        """Write *changed* items of a slice anew, and delete what the other store has not got of it.

        Raises:
            StoreError: As `read`; or the server can't keep one of them, which is named, and those before it may have
                been written.
        """
        try:
            await self._database.write(partial(self._write, part, changed))
        except StoreError as error:
            reason = refused_value(error.__cause__)
            if reason is None:
                raise
            # What another run is just writing is refused as what is there already.
            self._refuse_if_lost(await self._database.ask(statements.READ_NOTE))
            if len(changed) > 1:
                for key in changed:
                    await self.write(part, (key,))
                return
            (item,) = (part.items[key] for key in changed)
            whose = f" of owner {shorten(item.owner)}" if item.owner else ""
            told = (
                "an id, the owner or a name is too long for an index; delete it from the file, or stay with the file"
                if is_too_long(error.__cause__)
                else "`chatflow check` says whether it is damaged, and `chatflow repair` mends what is"
            )
            raise StoreError(
                f"session {shorten(item.session_id)}{whose} can't be kept by PostgreSQL: {reason}; {told}",
                store=self.name,
            ) from error

    async def _write(self, part: Slice, changed: Collection[Any], transaction: Transaction) -> None:
        items = [part.items[key] for key in changed]
        stay = part.items.keys() - set(changed)
        versions = [row[_VERSION] for item in items for row in item.rows.get("chatflow_sessions", ())]
        await transaction.change(_DELETE[part.kind][part.last is None], **_asked(part, stay), versions=versions)
        for table in _HELD[part.kind]:
            rows = [row for item in items for row in item.rows[table]]
            if rows:
                columns = map(list, zip(*rows, strict=True))
                await transaction.change(_INSERT[table], **dict(zip(COLUMNS[table], columns, strict=True)))
        # Last: what was deleted was there before somebody who uses the copy was given a number.
        self._refuse_if_lost(await transaction.ask(statements.HOLD_NOTE))


_VERSION: Final = COLUMNS["chatflow_sessions"].index("version")


def _asked(part: Slice, keys: Collection[Any]) -> dict[str, Any]:
    """The bounds of a slice, and some of its keys, as parameters."""
    if part.kind is not Kind.MESSAGE_IDS:
        return {"after": part.after, "last": _LAST if part.last is None else part.last, "keys": list(keys)}
    owners, session_ids, message_ids = map(list, zip(*keys, strict=True)) if keys else ([], [], [])
    after, last = part.after, part.last or ("", "", "")
    return {
        "after_owner": after[0],
        "after_session_id": after[1],
        "after_message_id": after[2],
        "last_owner": last[0],
        "last_session_id": last[1],
        "last_message_id": last[2],
        "owners": owners,
        "session_ids": session_ids,
        "message_ids": message_ids,
    }


async def take_up(name: str, holder: str, transaction: Transaction) -> None:
    """Begin to use a schema as *holder*: free what those have in hand who are gone.

    Raises:
        StoreFormatError: A copy into it has begun, and has not ended with both sides the same.
    """
    for (text,) in await transaction.ask(statements.READ_NOTE_ALONE):
        note: dict[str, Any] = json.loads(text)
        # Of an older version's copy it is not known.
        if not note.get("whole", True):
            reason = (
                f"the copy of {note['source']} in it is not whole: stop what uses the file, and do `chatflow copy`"
                " again until its status is 0 (docs/scaling.md says how to use it as it is)"
            )
            raise StoreFormatError(store=name, reason=reason)
    await release_the_gone(holder, transaction)


@asynccontextmanager
async def open_copy(dsn: str, schema: str) -> AsyncGenerator[Copy]:
    """A copy in the *schema* of a database.

    Raises:
        ValueError: A *dsn* that can't be read, or a *schema* that can't be a name.
    """
    database = open_database(locate(dsn, schema), _CONNECTIONS, release_the_gone)
    try:
        yield Copy(database)
    finally:
        if release_database(database):
            await database.close(partial(release, [database.holder], database.holder))
