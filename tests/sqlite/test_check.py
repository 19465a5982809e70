from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Final

import pytest

from chatflow.core.store import BaseSessionStore
from chatflow.exceptions import CorruptSessionError, StoreClosedError, StoreError, StoreFormatError
from chatflow.sqlite import examination
from chatflow.sqlite.store import SQLiteSessionStore
from tests.sqlite.conftest import OpenStore
from tests.sqlite.damage import MENDABLE, fill, holds, smash, smash_page_with, sql
from tests.sqlite.files import SUPPORT, connect, query, say


def outline(faults: Any) -> list[tuple[str, str, str]]:
    """Of each fault what a test names."""
    return [(fault.kind, fault.row, fault.reason) for fault in faults]


def is_as(found: list[tuple[str, str, str]], expected: tuple[tuple[str, str, str], ...]) -> bool:
    """Whether the faults are those, each with the same kind, and the part of the row and of the reason."""
    return len(found) == len(expected) and all(
        kind == wanted and part in row and why in reason
        for (kind, row, reason), (wanted, part, why) in zip(found, expected, strict=True)
    )


@pytest.mark.parametrize("kind", MENDABLE)
async def test_finds(kind: str, path: Path, open_store: OpenStore) -> None:
    """Check reports each fault with its row and reason, and nothing else, and changes nothing."""
    await fill(path)
    MENDABLE[kind].damage(path)
    before = holds(path)
    found = outline(await open_store().check())
    assert is_as(found, MENDABLE[kind].faults), found
    assert holds(path) == before


THE_LIST: Final = {"index", "version", "id that is taken once it can be read"}
"""Damage to the list itself, or to the other conversation's name."""


@pytest.mark.parametrize("kind", sorted(MENDABLE.keys() - THE_LIST))
async def test_listed_and_others_work(kind: str, path: Path, open_store: OpenStore) -> None:
    """Whatever is damaged in one conversation, those that have a row are listed, and another works."""
    await fill(path)
    MENDABLE[kind].damage(path)
    store = open_store()
    other = await store.get("other")
    assert other is not None
    await say(other, "again")
    hidden = MENDABLE[kind].history is None
    assert len((await store.list_sessions()).items) == (1 if hidden else 2)


@pytest.mark.parametrize("kind", [kind for kind, each in MENDABLE.items() if each.faults[-1][0] in {"message", "gap"}])
async def test_refused_by_row(kind: str, path: Path, open_store: OpenStore) -> None:
    """A conversation with a message that can't be read is CorruptSessionError, with the row that check names."""
    await fill(path)
    MENDABLE[kind].damage(path)
    store = open_store()
    with pytest.raises(CorruptSessionError) as caught:
        await store.get("s")
    assert caught.value.session_id == "s"
    assert "chatflow_messages, session_key 2, place" in caught.value.row


async def test_names_the_conversation(path: Path, open_store: OpenStore) -> None:
    """A fault names the conversation and its owner."""
    await fill(path)
    sql("UPDATE chatflow_messages SET message_json = 'x' WHERE session_key = 2 AND place = 3")(path)
    sql("UPDATE chatflow_sessions SET owner = 'ann' WHERE session_id = 's'")(path)
    faults = await open_store().check()
    assert [(fault.owner, fault.session_id) for fault in faults] == [("ann", "s")]


async def test_finds_in_slices(path: Path, open_store: OpenStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """However small the slices are, check finds the same."""
    async with SQLiteSessionStore(path) as store:
        for number in range(7):
            await say(await store.get_or_create(f"{number}", SUPPORT), "a", "b")
            await store.mark_message_processed(f"m{number}")
    sql(
        "UPDATE chatflow_messages SET message_json = 'x' WHERE session_key % 2 AND place = 1",
        "UPDATE chatflow_processed_messages SET processed_at = 'x' WHERE message_id > 'm3'",
        "DELETE FROM chatflow_sessions WHERE session_key IN (3, 7)",
    )(path)
    store = open_store()
    at_once = await store.check()
    assert len(at_once) == 2 + 4 + 3
    for conversations, messages in ((1, 100), (2, 100), (100, 1), (7, 3)):
        monkeypatch.setattr(examination, "_CONVERSATIONS", conversations)
        monkeypatch.setattr(examination, "_MESSAGES", messages)
        monkeypatch.setattr(examination, "_ANSWERS", conversations)
        assert await store.check() == at_once


async def test_ends_of_slices(path: Path, open_store: OpenStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """A slice ends with so many conversations, or with the one that brings it to so many messages."""
    await fill(path)
    store = open_store()

    async def slices() -> int:
        count, part = 1, await store.examine(None)
        while part.next is not None:
            count, part = count + 1, await store.examine(part.next)
        return count

    at_once = await slices()
    assert at_once == 4  # the file, the conversations, the journals, the answers
    monkeypatch.setattr(examination, "_MESSAGES", 3)
    assert await slices() == at_once + 2
    monkeypatch.setattr(examination, "_MESSAGES", 500)
    monkeypatch.setattr(examination, "_CONVERSATIONS", 1)
    assert await slices() == at_once + 2


async def test_reference_of_another_table(path: Path, open_store: OpenStore) -> None:
    """A reference to nothing in a table of ours that this version does not know is reported, a foreign one's is not."""
    await fill(path)
    with connect(path) as connection:
        connection.executescript(
            """
            CREATE TABLE chatflow_more (session_key INTEGER REFERENCES chatflow_sessions);
            CREATE TABLE orders (session_key INTEGER REFERENCES chatflow_sessions);
            INSERT INTO chatflow_more VALUES (99); INSERT INTO orders VALUES (99);
            """
        )
    store = open_store()
    assert outline(await store.check()) == [
        ("file", "chatflow_more, rowid 1", "the row of chatflow_sessions that it names does not exist")
    ]
    assert [each.action for each in await store.repair()] == ["not mended"]
    assert query(path, "SELECT count(*) FROM orders") == [1]


@pytest.mark.parametrize("table", ["chatflow_messages", "chatflow_sessions", "chatflow_processed_messages"])
async def test_page(table: str, path: Path, open_store: OpenStore) -> None:
    """A page that SQLite can't read is reported, with the advice to restore a backup; repair changes nothing there."""
    await fill(path)
    smash(table)(path)
    store = open_store()
    faults = await store.check()
    assert {fault.kind for fault in faults} == {"file"}
    assert [fault for fault in faults if "backup" not in fault.reason and "anew" not in fault.reason] == []
    assert any(table in fault.row for fault in faults), faults
    repairs = await store.repair()
    assert {each.action for each in repairs} == {"not mended"}


async def test_page_of_messages_is_corrupt(path: Path, open_store: OpenStore) -> None:
    """A conversation on a page that SQLite can't read is CorruptSessionError, and is listed."""
    await fill(path)
    smash("chatflow_messages")(path)
    store = open_store()
    with pytest.raises(CorruptSessionError, match="chatflow_messages, session_key 2: database disk image is malformed"):
        await store.get("s")
    with pytest.raises(CorruptSessionError, match="malformed"):
        await store.messages("s")
    assert len((await store.list_sessions()).items) == 2


async def test_file_that_can_not_be_opened(path: Path, open_store: OpenStore) -> None:
    """A file that can't be opened at all is the error that says so, for check and repair."""
    await fill(path)
    os.truncate(path, 1000)
    store: BaseSessionStore = open_store()
    for operation in (store.check, store.repair):
        with pytest.raises(StoreError, match="recover"):
            await operation()


async def test_file_that_is_none(path: Path, open_store: OpenStore) -> None:
    """A file that is not a database is refused as such."""
    path.write_text("Dear diary,\n" * 1000)
    with pytest.raises(StoreFormatError):
        await open_store().check()


async def fill_pages(path: Path) -> None:
    """Ten conversations whose messages lie on pages of their own."""
    async with SQLiteSessionStore(path) as store:
        for number in range(10):
            session = await store.get_or_create(f"{number}", SUPPORT)
            await say(session, *(f"said in {number}: {'x' * 1000}" for _ in range(10)))


async def test_one_page(path: Path, open_store: OpenStore) -> None:
    """Conversations on a page that SQLite can't read are named one by one; the others work, and are mended."""
    await fill_pages(path)
    smash_page_with("said in 5: ")(path)
    sql("UPDATE chatflow_messages SET message_json = 'x' WHERE session_key = 2 AND place = 0")(path)
    store = open_store()
    works = {"0", "2", "8"}
    for session_id in works:
        await say((await store.get(session_id)) or pytest.fail(session_id), "again")
    with pytest.raises(CorruptSessionError, match="session_key 6: database disk image is malformed"):
        await store.get("5")
    faults = {fault.session_id: fault for fault in await store.check() if fault.session_id}
    assert faults["5"].row == "chatflow_messages, session_key 6"
    assert (faults["1"].kind, works & faults.keys()) == ("message", set())
    assert {(each.fault.session_id, each.action) for each in await store.repair()} >= {
        ("1", "set aside"),
        ("5", "not mended"),
    }
    assert await store.get("1") is not None


async def test_one_page_in_slices(path: Path, open_store: OpenStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Looked at one by one, conversations are looked at in slices too."""
    await fill_pages(path)
    smash_page_with("said in 5: ")(path)
    store = open_store()
    at_once = await store.check()
    monkeypatch.setattr(examination, "_CONVERSATIONS", 3)
    assert await store.check() == at_once


async def test_no_damage(path: Path, open_store: OpenStore) -> None:
    """An error that is none of a damaged file is raised, and not taken for a fault."""
    await fill(path)
    with connect(path) as connection:
        connection.execute("ALTER TABLE chatflow_processed_messages RENAME COLUMN digest TO other")
    with pytest.raises(StoreError, match="no such column"):
        await open_store().check()


async def test_closed(store: SQLiteSessionStore) -> None:
    """A closed store is neither checked nor repaired."""
    await store.aclose()
    for operation in (store.check, store.repair):
        with pytest.raises(StoreClosedError):
            await operation()
