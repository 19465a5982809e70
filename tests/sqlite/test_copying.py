from __future__ import annotations

import datetime as dt
import sqlite3
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any, Final

import pytest

from chatflow.core.agent import Agent
from chatflow.core.copying import COLUMNS, Item, Kind, Numbers, Tally
from chatflow.core.messages import Message, Role
from chatflow.engines.scripted import ScriptedEngine
from chatflow.exceptions import CorruptSessionError
from chatflow.runner import Runner
from chatflow.sqlite import copying
from chatflow.sqlite.database import read_once
from chatflow.sqlite.location import locate
from chatflow.sqlite.store import SQLiteSessionStore

SUPPORT: Final = Agent(name="Support", engine=ScriptedEngine(default="answer"))
NOW: Final = "2030-01-01T00:00:00.000000+00:00"


async def fill(store: SQLiteSessionStore) -> None:
    """Conversations of two owners, message ids, and a message that waits."""
    for owner in ("", "ann"):
        runner = Runner(SUPPORT, store.for_owner(owner) if owner else store)
        for session_id in ("s", "t"):
            await runner.run_async(session_id, f"{session_id} of {owner}", message_id="m")
        await runner.accept("s", "later", message_id="n")


def execute(path: Path, *statements: str) -> None:
    """Change the file behind the store's back, whatever refers to what."""
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("PRAGMA ignore_check_constraints = ON")
        for statement in statements:
            connection.execute(statement)


async def read(path: Path, kind: Kind) -> dict[Any, Item]:
    """All items of a kind, slice by slice."""
    items: dict[Any, Item] = {}
    after = copying.BEGINNINGS[kind]
    while after is not None:
        part = await read_once(locate(path), partial(copying.slice_after, kind, after))
        assert (part.kind, part.after, items.keys() & part.items.keys()) == (kind, after, set())
        items |= part.items
        after = part.last
    return items


async def rows_of(path: Path, kind: Kind) -> dict[str, list[Any]]:
    """The rows of a kind, by table."""
    rows: dict[str, list[Any]] = {}
    for item in (await read(path, kind)).values():
        for table, each in item.rows.items():
            rows.setdefault(table, []).extend(each)
    return rows


def plain(value: object) -> object:
    """A value as the file has it."""
    return value.isoformat(timespec="microseconds") if isinstance(value, dt.datetime) else value


@pytest.mark.parametrize("limit", ["_CONVERSATIONS", "_ROWS", "_CHARACTERS", "_SINGLES", None])
async def test_all(path: Path, monkeypatch: pytest.MonkeyPatch, limit: str | None) -> None:
    """Every row comes once, with all that stands in it, in slices of whatever size."""
    async with SQLiteSessionStore(path) as store:
        await fill(store)
    execute(
        path,
        f"INSERT INTO chatflow_set_aside VALUES (7, 'ann', 's', 'there', 'text', 'odd', '{NOW}')",
        f"INSERT INTO chatflow_set_aside VALUES (9, '', NULL, 'there', NULL, 'odd', '{NOW}')",
        "INSERT INTO chatflow_journal SELECT turn_id, 1, '{}' FROM chatflow_turns",
    )
    if limit is not None:
        monkeypatch.setattr(copying, limit, 1)
    with closing(sqlite3.connect(path)) as connection:
        expected = {
            table: connection.execute(f"SELECT {', '.join(columns)} FROM {table}").fetchall()
            for table, columns in COLUMNS.items()
        }
    found = {table: rows for kind in Kind for table, rows in (await rows_of(path, kind)).items()}
    assert found.keys() == expected.keys()
    for table, rows in expected.items():
        assert rows
        assert sorted(map(repr, rows)) == sorted(repr(tuple(map(plain, map(_as_number, row)))) for row in found[table])


def _as_number(value: object) -> object:
    return int(value) if isinstance(value, bool) else value


async def test_numbers(path: Path) -> None:
    """What was given out last is known, also of what is gone."""
    async with SQLiteSessionStore(path) as store:
        location = locate(path)
        assert await store.get("s") is None
        assert await read_once(location, copying.highest_numbers) == Numbers(
            session_key=0, version=0, turn_id=0, set_aside_id=0
        )
        await fill(store)
        await store.delete("t")
        await store.delete("s")
    execute(path, "INSERT INTO chatflow_journal SELECT turn_id, 1, '{}' FROM chatflow_turns")
    execute(path, f"INSERT INTO chatflow_set_aside VALUES (7, 'ann', 's', 'there', 'text', 'odd', '{NOW}')")
    numbers = await read_once(location, copying.highest_numbers)
    assert (numbers.session_key, numbers.turn_id, numbers.set_aside_id) == (4, 6, 7)
    assert await read_once(location, copying.count_conversations) == 2


async def test_changes(path: Path) -> None:
    """A commit of anybody else is seen."""
    async with SQLiteSessionStore(path) as store:
        session = await store.get_or_create("s", SUPPORT)
        async with SQLiteSessionStore(f"file:{path}?mode=ro") as reader:
            before = await reader._read(copying.changes)
            assert await reader._read(copying.changes) == before
            await session.add_message(Message(Role.USER, "hello"))
            assert await reader._read(copying.changes) != before


async def test_in_hand(path: Path) -> None:
    """A turn in somebody's hands is read as it is left when its process is killed."""
    async with SQLiteSessionStore(path) as store:
        session = await store.get_or_create("s", SUPPORT)
        await Runner(SUPPORT, store).accept("s", "hello", message_id="accepted")
        async with session.turn():
            await Runner(SUPPORT, store).accept("s", "more", message_id="held")
            await Runner(SUPPORT, store).accept("s", "more", message_id="answered")
            for message_id, state in (("held", "queued"), ("answered", "answered")):
                execute(
                    path,
                    f"UPDATE chatflow_turns SET holder = 'x', state = '{state}' WHERE message_id = '{message_id}'",
                )
            rows = (await rows_of(path, Kind.CONVERSATIONS))["chatflow_turns"]
    assert [(row[8], row[2]) for row in rows] == [
        ("accepted", "accepted"),
        ("held", "interrupted"),
        ("answered", "answered"),
    ]


async def test_erased(path: Path) -> None:
    """What is being erased stays behind."""
    async with SQLiteSessionStore(path) as store:
        await fill(store)
    execute(
        path,
        f"INSERT INTO chatflow_set_aside VALUES (7, 'ann', 's', 'there', 'text', 'odd', '{NOW}')",
        *(
            f"UPDATE {table} SET owner = char(0) || 'x' WHERE owner = 'ann'"
            for table in ("chatflow_sessions", "chatflow_processed_messages", "chatflow_set_aside")
        ),
    )
    for kind, count in ((Kind.CONVERSATIONS, 2), (Kind.MESSAGE_IDS, 2), (Kind.SET_ASIDE, 0)):
        items = await read(path, kind)
        assert (len(items), {item.owner for item in items.values()}) == (count, {""} if count else set())


@pytest.mark.parametrize(
    ("content", "text"), [("CAST(x'ff61' AS TEXT)", "b'\\xffa'"), ("x'00'", "b'\\x00'"), ("7", "7"), ("'é'", "é")]
)
async def test_what_is_no_text(path: Path, content: str, text: str) -> None:
    """What was set aside as bytes or as a number comes as Python writes it."""
    async with SQLiteSessionStore(path) as store:
        await store.get("s")
    execute(path, f"INSERT INTO chatflow_set_aside VALUES (7, '', 's', 'there', {content}, 'odd', '{NOW}')")
    [item] = (await read(path, Kind.SET_ASIDE)).values()
    assert item.rows["chatflow_set_aside"][0][4] == text


NO_TEXT: Final = "CAST(x'ff' AS TEXT)"


@pytest.mark.parametrize(
    ("damage", "row"),
    [
        (f"UPDATE chatflow_sessions SET session_id = {NO_TEXT} WHERE session_key = 1", "chatflow_sessions, session"),
        (f"UPDATE chatflow_sessions SET state_json = {NO_TEXT} WHERE session_key = 1", "chatflow_sessions, session"),
        ("UPDATE chatflow_sessions SET created_at = 'then' WHERE session_key = 1", "chatflow_sessions, session_key 1"),
        (f"UPDATE chatflow_messages SET message_json = {NO_TEXT} WHERE session_key = 1", "chatflow_messages, session"),
        (f"UPDATE chatflow_turns SET agent_name = {NO_TEXT}", "chatflow_turns, turn_id"),
        ("UPDATE chatflow_turns SET state = 'lost'", "chatflow_turns, turn_id"),
        (f"INSERT INTO chatflow_journal SELECT turn_id, 1, {NO_TEXT} FROM chatflow_turns", "chatflow_journal, turn_id"),
        ("INSERT INTO chatflow_messages VALUES (99, 1, '{}')", "session_key 99"),
        (f"UPDATE chatflow_processed_messages SET digest = {NO_TEXT}", "chatflow_processed_messages, message_id"),
        (f"UPDATE chatflow_set_aside SET reason = {NO_TEXT}", "chatflow_set_aside, set_aside_id 7"),
    ],
)
async def test_damaged(path: Path, damage: str, row: str) -> None:
    """What can't be read is refused by the name of its row, whatever it stands in."""
    async with SQLiteSessionStore(path) as store:
        await fill(store)
    execute(path, f"INSERT INTO chatflow_set_aside VALUES (7, '', NULL, 'there', 'text', 'odd', '{NOW}')", damage)

    async def read_all() -> None:
        for kind in Kind:
            await read(path, kind)

    with pytest.raises(CorruptSessionError) as caught:
        await read_all()
    assert row in caught.value.row


async def test_journal_without_its_turn(path: Path) -> None:
    """A journal that no conversation would bring along is refused."""
    async with SQLiteSessionStore(path) as store:
        await store.get("s")
    execute(path, "INSERT INTO chatflow_journal VALUES (5, 1, '{}')")
    with pytest.raises(CorruptSessionError, match="chatflow_journal, turn_id 5: its turn does not exist"):
        await read_once(locate(path), copying.highest_numbers)


def test_tally() -> None:
    """A checksum tells another value, another kind of value, and another order."""
    rows = [(1, 0, "{}"), (1, 1, "{}")]
    checksums: set[str] = set()
    for each in (rows, rows[::-1], [(1, 0, "{ }"), rows[1]], [(1, 0, None), rows[1]], rows[:1]):
        tally = Tally()
        tally.add(Item("", "s", {"chatflow_messages": list(each)}))
        assert tally.counts["chatflow_messages"] == len(each)
        checksums.add(tally.checksum("chatflow_messages"))
    assert len(checksums) == 5
