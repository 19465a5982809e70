from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Final

import pytest

from chatflow.engines.scripted import ScriptedEngine
from chatflow.exceptions import CorruptSessionError, StoreError
from chatflow.runner import Runner
from chatflow.sqlite.database import CONNECTION_PRAGMAS, FILE_PRAGMAS, Connection
from chatflow.sqlite.schema import MIGRATIONS
from chatflow.sqlite.store import SQLiteSessionStore
from tests.sqlite.conftest import OpenStore
from tests.sqlite.damage import unguarded
from tests.sqlite.files import RELEASED, SUPPORT, connect, database_of, query, say, schema_of, together

NUMBERS: Final = {"ON": 1, "OFF": 0, "NORMAL": 1, "FULL": 2, "MEMORY": 2, "WAL": "wal"}


def in_force(name: str) -> Callable[[Connection], Any]:
    """An operation that reads a pragma."""
    return lambda connection: connection.execute(f"PRAGMA {name}").fetchone()[0]


def pragmas_of(table: tuple[tuple[str, str, str], ...]) -> dict[str, Any]:
    """The values that a connection shows, where the table has been followed."""
    return {name: NUMBERS.get(value, int(value) if value.isdigit() else value) for name, value, _ in table}


async def test_pragmas_for_writing(store: SQLiteSessionStore) -> None:
    """The writing connection has every pragma of both tables, and waits for others."""
    wanted = {**pragmas_of(CONNECTION_PRAGMAS), **pragmas_of(FILE_PRAGMAS), "busy_timeout": 10_000}
    await store.get("s")
    found = {name: await database_of(store).write(in_force(name), durable=True) for name in wanted}
    assert found == wanted


async def test_pragmas_for_reading(store: SQLiteSessionStore) -> None:
    """The reading connection has the pragmas of every connection, and can't write."""
    wanted = {**pragmas_of(CONNECTION_PRAGMAS), "journal_mode": "wal", "query_only": 1, "busy_timeout": 10_000}
    found = {name: await database_of(store).read(in_force(name)) for name in wanted}
    assert found == wanted


async def test_pragmas_in_memory(open_store: OpenStore) -> None:
    """A connection in memory has the pragmas of every connection, and never waits on the loop."""
    wanted = {**pragmas_of(CONNECTION_PRAGMAS), "busy_timeout": 0}
    store = open_store(":memory:")
    found = {name: await database_of(store).read(in_force(name)) for name in wanted}
    assert found == wanted


async def test_flushed_where_durable(store: SQLiteSessionStore) -> None:
    """What is to survive a power cut is committed at FULL, places in the line at NORMAL."""
    await store.get("s")
    database = database_of(store)
    levels = [await database.write(in_force("synchronous"), durable=durable) for durable in (False, True, False)]
    assert levels == [1, 2, 1]


async def test_mixed_group_is_flushed(store: SQLiteSessionStore) -> None:
    """A group that holds one durable write is committed at FULL."""
    await store.get("s")
    assert set(await together(database_of(store), [in_force("synchronous")] * 2)) == {2}


async def test_every_table_is_strict(store: SQLiteSessionStore, path: Path) -> None:
    """No table takes a value of a wrong type, whoever writes it."""
    await store.get("s")
    tables = query(path, "SELECT name, strict FROM pragma_table_list WHERE name LIKE 'chatflow%'")
    assert len(tables) == 7
    assert {strict for _, strict in tables} == {1}


async def test_released_schema(store: SQLiteSessionStore, path: Path) -> None:
    """A new file has the schema that was released as this format: a released entry is never edited."""
    await store.get("s")
    assert schema_of(path) == (RELEASED / f"{len(MIGRATIONS)}.sql").read_text(encoding="utf-8")


def test_every_format_is_kept() -> None:
    """The schema of each released format is kept."""
    assert sorted(each.stem for each in RELEASED.glob("[0-9]*.sql")) == [str(n + 1) for n in range(len(MIGRATIONS))]


@pytest.mark.parametrize("released", [each.stem for each in RELEASED.glob("[0-9]*.sql")])
async def test_released_format_opens(released: str, path: Path, open_store: OpenStore) -> None:
    """A file of each released format opens."""
    with connect(path) as connection:
        connection.executescript((RELEASED / f"{released}.sql").read_text(encoding="utf-8"))
        connection.execute("INSERT INTO chatflow_meta VALUES ('format', ?)", (released,))
    await say(await open_store().get_or_create("s", SUPPORT), "hello")


# --- rows that can't be read ---


async def spoil(path: Path, sql: str, *values: Any) -> SQLiteSessionStore:
    """A store on a file with two conversations, of which the one named "s" was changed by *sql*."""
    async with SQLiteSessionStore(path) as store:
        await say(await store.get_or_create("other", SUPPORT, {"a": 1}), "hello")
        session = await store.get_or_create("s", SUPPORT, {"a": 1})
        session.state["b"] = 2
        await say(session, *(f"{number}" for number in range(5)))
    with unguarded(path) as connection:
        assert connection.execute(sql, values).rowcount == 1
    return SQLiteSessionStore(path)


OF_S: Final = "session_key = (SELECT session_key FROM chatflow_sessions WHERE session_id = 's')"
SPOILT: Final[dict[str, tuple[str, ...]]] = {
    "message": (
        f"UPDATE chatflow_messages SET message_json = 'x' WHERE place = 2 AND {OF_S}",
        "chatflow_messages",
        "place 2",
    ),
    "message at the very last place": (
        f"UPDATE chatflow_messages SET place = 9223372036854775807 WHERE place = 2 AND {OF_S}",
        "the row is missing",
        "place 2",
    ),
    "missing message": (f"DELETE FROM chatflow_messages WHERE place = 2 AND {OF_S}", "the row is missing", "place 2"),
    "message of another type": (
        f"UPDATE chatflow_messages SET message_json = '[]' WHERE place = 4 AND {OF_S}",
        "chatflow_messages",
        "place 4",
    ),
    "metadata": (
        "UPDATE chatflow_sessions SET metadata_json = '{' WHERE session_id = 's'",
        "chatflow_sessions",
        "metadata_json",
    ),
    "state": (
        "UPDATE chatflow_sessions SET state_json = '[1]' WHERE session_id = 's'",
        "chatflow_sessions",
        "state_json",
    ),
}
NO_UTF8: Final = "CAST(x'63ff66' AS TEXT)"
MORE_SPOILT: Final = {
    "message in no UTF-8": (
        f"UPDATE chatflow_messages SET message_json = {NO_UTF8} WHERE place = 2 AND {OF_S}",
        "chatflow_messages",
        "place 2",
        "not text in UTF-8",
    ),
    **{
        f"{name} in no UTF-8": (
            f"UPDATE chatflow_sessions SET {name} = {NO_UTF8} WHERE session_id = 's'",
            "chatflow_sessions",
            name,
            "not text in UTF-8",
        )
        for name in ("metadata_json", "state_json", "active_agent_name")
    },
    "agent without a name": (
        "UPDATE chatflow_sessions SET active_agent_name = '' WHERE session_id = 's'",
        "chatflow_sessions",
        "active_agent_name",
        "it is empty",
    ),
    "number of turns": (
        "UPDATE chatflow_sessions SET max_turns = -1 WHERE session_id = 's'",
        "chatflow_sessions",
        "max_turns",
        "at least 1",
    ),
}
SPOILT.update(MORE_SPOILT)
LOADS: Final[dict[str, Callable[[SQLiteSessionStore], Awaitable[object]]]] = {
    "get": lambda store: store.get("s"),
    "get_or_create": lambda store: store.get_or_create("s", SUPPORT),
    "merge metadata": lambda store: store.get_or_create("s", SUPPORT, {"c": 3}),
    "turn": lambda store: Runner(SUPPORT, store, ScriptedEngine(["hello"])).run_async("s", "hello"),
}


@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize("kind", SPOILT)
async def test_corrupt(kind: str, load: str, path: Path) -> None:
    """A conversation with a row that can't be read is refused, by conversation, table, row and reason."""
    sql, *parts = SPOILT[kind]
    async with await spoil(path, sql) as store:
        with pytest.raises(CorruptSessionError) as caught:
            await LOADS[load](store)
    assert caught.value.session_id == "s"
    assert [part for part in ("'s'", *parts) if part not in str(caught.value)] == []


@pytest.mark.parametrize("kind", SPOILT)
async def test_others_are_fine(kind: str, path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The other conversations of a file with one that can't be read load, and all are listed, newest first."""
    async with await spoil(path, SPOILT[kind][0]) as store:
        other = await store.get("other")
        assert other is not None
        assert other.metadata == {"a": 1}
        page = await store.list_sessions()
        assert [each.session_id for each in page.items] == ["s", "other"]


async def test_listed_without_its_metadata(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A conversation whose metadata can't be read is listed without them, and a warning names it."""
    async with await spoil(path, SPOILT["metadata"][0]) as store:
        with caplog.at_level(logging.WARNING, "chatflow"):
            page = await store.list_sessions()
    assert [each.metadata for each in page.items] == [{}, {"a": 1}]
    assert ["'s'" in record.getMessage() and "metadata_json" in record.getMessage() for record in caplog.records] == [
        True
    ]


@pytest.mark.parametrize("kind", SPOILT)
async def test_corrupt_can_be_deleted(kind: str, path: Path) -> None:
    """A conversation that can't be read can be deleted, and its id used anew."""
    async with await spoil(path, SPOILT[kind][0]) as store:
        assert await store.delete("s")
        session = await store.get_or_create("s", SUPPORT)
        assert session.history == []


async def test_no_damage(store: SQLiteSessionStore, path: Path) -> None:
    """An error that is none of a damaged file is not taken for a conversation that can't be read."""
    await say(await store.get_or_create("s", SUPPORT), "hello")
    with connect(path) as connection:
        connection.execute("ALTER TABLE chatflow_messages RENAME COLUMN place TO position")
    await store.aclose()
    async with SQLiteSessionStore(path) as opened:
        with pytest.raises(StoreError, match="no such column"):
            await opened.get("s")


async def test_corrupt_page(path: Path) -> None:
    """A page of messages that holds one that can't be read is refused by its row, and another page is not."""
    async with await spoil(path, SPOILT["message"][0]) as store:
        page = await store.messages("s", limit=2)
        assert [message.text for message in page.items] == ["3", "4"]
        with pytest.raises(CorruptSessionError, match="place 2"):
            await store.messages("s", limit=2, before=page.next)


@pytest.mark.parametrize("column", ["created_at", "updated_at"])
@pytest.mark.parametrize("value", ["'yesterday'", "''", NO_UTF8])
async def test_listed_without_a_moment(column: str, value: str, path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A conversation whose moments can't be read is listed, and loads."""
    async with await spoil(path, f"UPDATE chatflow_sessions SET {column} = {value} WHERE session_id = 's'") as store:
        infos = (await store.list_sessions()).items
        assert await store.get("s") is not None
    assert [(info.session_id, getattr(info, column).year == 1) for info in infos] == [("s", True), ("other", False)]


@pytest.mark.parametrize("column", ["response_json", "digest"])
async def test_corrupt_answer(column: str, store: SQLiteSessionStore, path: Path) -> None:
    """A stored answer that can't be read is refused by its message's id."""
    runner = Runner(SUPPORT, store, ScriptedEngine(["hello"]))
    await runner.run_async("s", "hello", message_id="m1")
    with connect(path) as connection:
        connection.execute(f"UPDATE chatflow_processed_messages SET {column} = {NO_UTF8}")
    with pytest.raises(CorruptSessionError, match=r"message_id 'm1'.*not text in UTF-8"):
        await runner.run_async("s", "hello", message_id="m1")


async def test_corrupt_while_in_use(store: SQLiteSessionStore, path: Path) -> None:
    """A turn whose conversation's metadata were spoilt by another program meanwhile is refused, and leaves no row."""
    session = await store.get_or_create("s", SUPPORT, {"a": 1})

    async def turn() -> None:
        async with session.turn():
            session.metadata["b"] = 2
            with connect(path) as connection:
                connection.execute("UPDATE chatflow_sessions SET metadata_json = '{', version = version + 1")

    with pytest.raises(CorruptSessionError, match="metadata_json"):
        await turn()
    assert query(path, "SELECT count(*) FROM chatflow_turns") == [0]
