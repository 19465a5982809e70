from __future__ import annotations

import asyncio
import contextvars
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any, Final

import pytest

from chatflow.core.codec import message_to_json
from chatflow.core.messages import Message, Role
from chatflow.core.notes import Notes
from chatflow.core.pruning import prune
from chatflow.core.records import Key
from chatflow.core.repairs import Repair
from chatflow.core.session import SessionContext
from chatflow.core.sorting import history_of
from chatflow.exceptions import CorruptSessionError
from chatflow.sqlite import examination, mending
from chatflow.sqlite.database import Connection
from chatflow.sqlite.diagnosis import diagnose
from chatflow.sqlite.store import SQLiteSessionStore
from chatflow.testing.conformance.conversation import texts
from tests.sqlite.conftest import OpenStore
from tests.sqlite.damage import (
    ALL,
    MENDABLE,
    NO_UTF8,
    column,
    empty_index,
    fill,
    holds,
    loose,
    lost,
    message,
    messages_in,
    messages_set_aside,
    sql,
)
from tests.sqlite.files import SUPPORT, connect, database_of, query, say

NOW: Final = "2026-01-01T00:00:00.000000+00:00"
UNCUT: Final = 10_000
"""More turns than any history here has."""


def actions(repairs: tuple[Repair, ...]) -> list[str]:
    """What was done."""
    return [each.action for each in repairs]


async def session_of(store: SQLiteSessionStore, session_id: str = "s") -> SessionContext:
    """The conversation, which is there."""
    session = await store.get(session_id)
    assert session is not None
    return session


def places(path: Path) -> list[Any]:
    """Where the messages of "s" stand."""
    return query(path, "SELECT place FROM chatflow_messages WHERE session_key = 2 ORDER BY place")


@pytest.mark.parametrize("kind", MENDABLE)
async def test_mends(kind: str, path: Path, open_store: OpenStore) -> None:
    """Repair mends each fault by its rule, check then finds none, and the conversation loads with what is left."""
    await fill(path)
    damage = MENDABLE[kind]
    damage.damage(path)
    store = open_store()
    faults = await store.check()
    repairs = await store.repair()
    assert sorted(actions(repairs)) == sorted(damage.actions)
    assert Counter(each.fault for each in repairs) == Counter(faults)
    assert await store.check() == ()
    session = await store.get(damage.session_id)
    assert (None if session is None else texts(session.history)) == damage.history
    for info in (await store.list_sessions()).items:
        history = (await session_of(store, info.session_id)).history
        assert prune(history, UNCUT) == tuple(history)


@pytest.mark.parametrize("kind", MENDABLE)
async def test_loses_nothing(kind: str, path: Path, open_store: OpenStore) -> None:
    """Each message is either where it was in the order, as it was, or set aside, byte for byte."""
    await fill(path)
    MENDABLE[kind].damage(path)
    before = messages_in(path)
    await open_store().repair()
    kept, aside = messages_in(path), messages_set_aside(path)
    shortened = kept - before
    assert before == kept - shortened + aside
    assert shortened.total() == (kind == "one of two calls gone")


@pytest.mark.parametrize("kind", MENDABLE)
async def test_second_time(kind: str, path: Path, open_store: OpenStore) -> None:
    """Run twice, repair does nothing the second time."""
    await fill(path)
    MENDABLE[kind].damage(path)
    store = open_store()
    await store.repair()
    before = holds(path)
    assert await store.repair() == ()
    assert holds(path) == before


@pytest.mark.parametrize("kind", MENDABLE)
async def test_goes_on(kind: str, path: Path, open_store: OpenStore) -> None:
    """A conversation that was repaired goes on, through a restart too."""
    await fill(path)
    damage = MENDABLE[kind]
    damage.damage(path)
    first = open_store()
    await first.repair()
    await say(await first.get_or_create(damage.session_id, SUPPORT), "again")
    await first.aclose()
    history = (await session_of(open_store(), damage.session_id)).history
    assert texts(history) == [*(damage.history or ()), "again"]


async def test_healthy(path: Path, open_store: OpenStore) -> None:
    """A file without a fault is as it was, byte for byte in its tables, and the returned value is empty."""
    await fill(path)
    before = holds(path)
    store = open_store()
    assert (await store.check(), await store.repair()) == ((), ())
    assert holds(path) == before


async def test_what_is_set_aside(path: Path, open_store: OpenStore) -> None:
    """What is set aside stands in the table with conversation, source, reason and moment; no text becomes bytes."""
    await fill(path)
    sql(message(3, "'x'"), message(5, NO_UTF8), column("max_turns", "0"))(path)
    store = open_store()
    repairs = await store.repair()
    rows = query(path, "SELECT owner, session_id, source, content, reason FROM chatflow_set_aside")
    assert [tuple(row[:2]) for row in rows] == [("", "s")] * 3
    assert {(row[2], row[4]) for row in rows} == {(each.fault.row, each.fault.reason) for each in repairs}
    assert [row[3] for row in rows] == [0, "x", b"c\xfff"]
    assert query(path, "SELECT count(*) FROM chatflow_set_aside WHERE set_aside_at > '2026'") == [3]


async def test_values_after_repair(path: Path, open_store: OpenStore) -> None:
    """Metadata and state that can't be read are empty then, and those that can stay; so does all else of the row."""
    await fill(path)
    sql(column("metadata_json", "'x'"), column("max_turns", "0"), column("created_at", "'x'"))(path)
    store = open_store(default_max_turns=7)
    await store.repair()
    session = await session_of(store)
    assert (dict(session.metadata), dict(session.state), session.max_turns) == ({}, {"b": 2}, 7)
    info = (await store.list_sessions()).items[0]
    assert info.created_at.year >= 2026


async def test_version_after_repair(path: Path, open_store: OpenStore) -> None:
    """A repair is a change like any other: the conversation is listed first, also if its version was damaged."""
    await fill(path)
    MENDABLE["version"].damage(path)
    store = open_store()
    await store.repair()
    versions = query(path, "SELECT version FROM chatflow_sessions ORDER BY session_key DESC")
    assert versions == sorted(versions, reverse=True)
    assert [info.session_id for info in (await store.list_sessions()).items] == ["s", "other"]


async def test_answer_after_repair(path: Path, open_store: OpenStore) -> None:
    """The id of an answer that can't be read stays known, so that its message doesn't run again."""
    await fill(path)
    MENDABLE["answer"].damage(path)
    store = open_store()
    await store.repair()
    assert await store.is_message_processed("m1", session_id="other")


def test_place_that_is_nothing() -> None:
    """A row without a place can't be deleted by its place: the messages are written anew without it."""
    nobody = Key("", "")
    user, unreadable = message_to_json(Message(Role.USER, "hello")), "x"
    drop_before, written = history_of(2, [(None, user), (0, unreadable), (1, user)], 7, Notes(nobody, nobody))
    assert (drop_before, written) == (None, ((7, user),))


@pytest.mark.parametrize("kind", MENDABLE)
async def test_places(kind: str, path: Path, open_store: OpenStore) -> None:
    """Messages keep their places where only the front went, or nothing; else they stand behind all used ones."""
    await fill(path)
    before = places(path)
    MENDABLE[kind].damage(path)
    await open_store().repair()
    after = [place for place in places(path) if isinstance(place, int)]
    kept = set(after) & set(before)
    assert kept == (set(after) if MENDABLE[kind].keeps_places else set())


async def test_open_session_sees_it(path: Path, open_store: OpenStore) -> None:
    """A session object of the store shows the repaired conversation as soon as repair has returned."""
    await fill(path)
    store = open_store()
    session = await session_of(store)
    assert len(session.history) == len(ALL)
    sql(message(0, "'x'"))(path)
    await store.repair()
    assert texts(session.history) == ["be brief", "be kind", "four", "five"]


@pytest.mark.parametrize("damage", ["missing row", "first user message gone", "all user messages gone"])
async def test_session_of_another_store_sees_it(damage: str, path: Path, open_store: OpenStore) -> None:
    """A session of another store, which has seen all of the old messages, takes none of the new for one of them."""
    await fill(path)
    sql(f"DELETE FROM chatflow_messages WHERE session_key = 2 AND place < {-(2**62) + 1}")(path)
    store, second = open_store(), open_store()
    session = await session_of(second)
    MENDABLE[damage].damage(path)
    await store.repair()
    other = await session_of(store)
    await say(other, *"abcdefghi")
    async with session.turn():
        assert texts(session.history) == texts(other.history)
        await session.add_message(Message(Role.USER, "end"))
    assert texts((await session_of(store)).history) == [*texts(other.history)]
    assert other.history[-1].text == "end"


async def test_session_with_damage_at_its_end(path: Path, open_store: OpenStore) -> None:
    """Rows that were lost at the end leave no gap; a session that has seen them takes no repaired message for one."""
    await fill(path)
    store, second = open_store(), open_store()
    session = await session_of(second)
    sql(message(1, "'x'"))(path)
    lost(4, 5)(path)
    await store.repair()
    async with session.turn():
        assert texts(session.history) == ["be brief", "be kind", "zero", "three"]


async def test_turn_under_way(path: Path, open_store: OpenStore) -> None:
    """A conversation with a turn under way is left alone, which is said; once it has ended, it is mended."""
    await fill(path)
    store = open_store()
    session = await session_of(store)
    async with session.turn():
        sql(message(3, "'x'"), column("state_json", "'x'"))(path)
        before = holds(path)
        repairs = await asyncio.create_task(store.repair(), context=contextvars.Context())
        assert {(each.fault.session_id, each.action) for each in repairs} == {("s", "left alone")}
        assert holds(path) == before
        await session.add_message(Message(Role.USER, "six"))
    assert sorted(actions(await store.repair())) == ["replaced", "set aside"]
    assert texts((await session_of(store)).history) == [*(each for each in ALL if each != "three"), "six"]


async def test_queued_turn(path: Path, open_store: OpenStore) -> None:
    """A turn that was only queued meanwhile runs on what was repaired, as if it came later."""
    await fill(path)
    sql(
        message(3, "'x'"),
        """
        INSERT INTO chatflow_turns (
            session_key, state, holder, attempt, attempts, lease_seconds, accepted, agent_name, queued_at
        )
        VALUES (2, 'queued', 'somebody else', 0, 0, 10, 0, 'Support', '2026-01-01T00:00:00+00:00')
        """,
    )(path)
    assert actions(await open_store().repair()) == ["set aside"]


async def test_committed_since_it_was_looked_at(path: Path, open_store: OpenStore) -> None:
    """What was committed between the look and the mending is not undone: the conversation is looked at anew."""
    await fill(path)
    store = open_store()
    session = await session_of(store)
    sql(message(3, "'x'"))(path)
    database = database_of(store)
    diagnosis = await database.read(partial(diagnose, 2))
    await session.add_message(Message(Role.USER, "six"))
    repairs = await database.write(partial(mending.mend, diagnosis, NOW), durable=True)
    assert actions(repairs) == ["set aside"]
    assert texts((await session_of(store)).history)[-2:] == ["five", "six"]


async def test_mended_since_it_was_looked_at(path: Path, open_store: OpenStore) -> None:
    """Of two programs that repair at once, the second does nothing about what the first has mended."""
    await fill(path)
    sql(message(3, "'x'"))(path)
    store = open_store()
    database = database_of(store)
    diagnosis = await database.read(partial(diagnose, 2))
    await store.repair()
    before = holds(path)
    assert await database.write(partial(mending.mend, diagnosis, NOW), durable=True) == ()
    assert holds(path) == before


async def test_gone_since_it_was_looked_at(path: Path, open_store: OpenStore) -> None:
    """A conversation, or an answer, that is gone by the time it would be mended needs nothing."""
    await fill(path)
    store = open_store()
    sql(message(3, "'x'"))(path)
    database = database_of(store)
    diagnosis = await database.read(partial(diagnose, 2))
    await store.delete("s")
    before = holds(path)
    assert await database.write(partial(mending.mend, diagnosis, NOW), durable=True) == ()
    key = (b"", b"other", b"unknown")
    assert await database.write(partial(mending.mend_answer, key, NOW), durable=True) == ()
    answer = (b"", b"other", b"m1")
    assert await database.write(partial(mending.mend_answer, answer, NOW), durable=True) == ()
    assert holds(path) == before


async def test_one_transaction_for_each(path: Path, open_store: OpenStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where mending one conversation fails it stays as it was, whole, and those mended before stay mended."""
    await fill(path)
    sql("UPDATE chatflow_messages SET message_json = 'x' WHERE place = 0")(path)
    store = open_store()
    mend = mending.mend

    def fail(diagnosis: Any, now: str, connection: Connection) -> Any:
        repairs = mend(diagnosis, now, connection)
        if diagnosis.session_key == 2:
            raise OSError("the disk is gone")
        return repairs

    monkeypatch.setattr(mending, "mend", fail)
    with pytest.raises(OSError, match="gone"):
        await store.repair()
    assert {fault.session_id for fault in await store.check()} == {"s"}
    assert query(path, "SELECT DISTINCT session_id FROM chatflow_set_aside") == ["other"]


async def test_cancelled(path: Path, open_store: OpenStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """A repair that is cancelled ends between two slices, and can be run again."""
    await fill(path)
    sql("UPDATE chatflow_messages SET message_json = 'x' WHERE place = 0")(path)
    monkeypatch.setattr(examination, "_CONVERSATIONS", 1)
    store = open_store()
    task = asyncio.create_task(store.repair())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await store.repair() != ()
    assert await store.check() == ()


async def test_in_slices(path: Path, open_store: OpenStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """However small the slices are, everything is mended."""
    async with SQLiteSessionStore(path) as store:
        for number in range(7):
            await say(await store.get_or_create(f"{number}", SUPPORT), "a", "b")
            await store.mark_message_processed(f"m{number}")
    sql(
        "UPDATE chatflow_messages SET message_json = 'x' WHERE place = 1",
        f"UPDATE chatflow_processed_messages SET message_id = {NO_UTF8} WHERE message_id = 'm3'",
        "UPDATE chatflow_processed_messages SET processed_at = 'x' WHERE message_id > 'm3'",
        "DELETE FROM chatflow_sessions WHERE session_key IN (3, 7)",
    )(path)
    for name in ("_CONVERSATIONS", "_MESSAGES", "_ANSWERS"):
        monkeypatch.setattr(examination, name, 1)
    store = open_store()
    assert len(await store.repair()) == 5 + 1 + 3 + 4
    assert await store.check() == ()


async def test_index_over_doubles(path: Path, open_store: OpenStore) -> None:
    """An index that can't be built anew, since its table holds doubles, is reported as not mended; the rest is."""
    await fill(path)
    with connect(path) as connection:
        row = connection.execute("SELECT rowid, * FROM sqlite_master WHERE sql LIKE '%chatflow_turns_one_runs%'")
        rowid, kind, name, table, page, text = row.fetchone()
        connection.executescript("PRAGMA writable_schema=ON")
        connection.execute("DELETE FROM sqlite_master WHERE rowid = ?", (rowid,))
    sql(
        *[
            """
            INSERT INTO chatflow_turns (
                session_key, state, holder, attempt, attempts, lease_seconds, accepted, agent_name, queued_at
            )
            VALUES (1, 'running', 'somebody else', 1, 1, 10, 0, 'Support', '2026-01-01T00:00:00+00:00')
            """
        ]
        * 2
    )(path)
    with connect(path) as connection:
        connection.executescript("PRAGMA writable_schema=ON")
        connection.execute("INSERT INTO sqlite_master VALUES (?, ?, ?, ?, ?)", (kind, name, table, page, text))
    sql(message(3, "'x'"))(path)
    store = open_store()
    repairs = await store.repair()
    assert {(each.fault.kind, each.action) for each in repairs} == {("file", "not mended"), ("message", "set aside")}
    assert {fault.kind for fault in await store.check()} == {"file"}


async def test_index_gives_back_what_it_hid(path: Path, open_store: OpenStore) -> None:
    """A conversation that an index had lost is listed again."""
    await fill(path)
    empty_index("chatflow_sessions_by_commit")(path)
    store = open_store()
    assert (await store.list_sessions()).items == ()
    await store.repair()
    assert len((await store.list_sessions()).items) == 2


@pytest.mark.parametrize("there", [True, False])
async def test_delete(there: bool, path: Path, open_store: OpenStore) -> None:
    """Deleting a conversation, even one that is no longer there, deletes what was set aside of it, and no other's."""
    await fill(path)
    sql("UPDATE chatflow_messages SET message_json = 'x' WHERE place = 0")(path)
    store = open_store()
    await store.repair()
    if not there:
        sql("DELETE FROM chatflow_sessions WHERE session_id = 's'", "DELETE FROM chatflow_messages")(path)
    assert await store.delete("s") is there
    assert query(path, "SELECT DISTINCT session_id FROM chatflow_set_aside") == ["other"]


async def test_clear(path: Path, open_store: OpenStore) -> None:
    """Clearing deletes all that was set aside, of conversations that nobody can name too, and of no other owner."""
    await fill(path)
    sql(message(3, "'x'"), "UPDATE chatflow_messages SET session_key = 99 WHERE session_key = 2 AND place = 4")(path)
    sql("INSERT INTO chatflow_set_aside VALUES (1, 'ann', 's', 'x', 'x', 'x', 'x')")(path)
    store = open_store()
    await store.repair()
    await store.clear()
    assert query(path, "SELECT owner FROM chatflow_set_aside") == ["ann"]


async def test_clear_in_slices(path: Path, open_store: OpenStore) -> None:
    """What was set aside of a conversation goes with the slice that deletes it."""
    await fill(path)
    sql("UPDATE chatflow_messages SET message_json = 'x' WHERE place = 0")(path)
    store = open_store()
    await store.repair()
    await store.delete_sessions("", None, 1)
    left = query(path, "SELECT session_id FROM chatflow_sessions")
    assert len(left) == 1
    assert query(path, "SELECT DISTINCT session_id FROM chatflow_set_aside") == left


@pytest.mark.parametrize("name", [NO_UTF8, "''"])
async def test_clear_before_repair(name: str, path: Path, open_store: OpenStore) -> None:
    """A conversation whose id can't be read is listed, and cleared with the others."""
    await fill(path)
    sql(column("session_id", name))(path)
    store = open_store()
    assert len((await store.list_sessions()).items) == 2
    await store.clear()
    assert query(path, "SELECT count(*) FROM chatflow_messages") == [0]


@pytest.mark.parametrize("first", ["'x'", "2.5"])
async def test_first_place_is_no_number(first: str, path: Path, open_store: OpenStore) -> None:
    """A conversation whose first message has a place that is no number is refused, and mended."""
    await fill(path)
    lost(1, 2, 3, 4, 5)(path)
    loose(f"UPDATE chatflow_messages SET place = {first} WHERE session_key = 2 AND place = 0")(path)
    store = open_store()
    with pytest.raises(CorruptSessionError, match="not a number"):
        await store.get("s")
    await store.repair()
    assert await store.check() == ()
    assert texts((await session_of(store)).history) == ["be brief", "be kind"]
