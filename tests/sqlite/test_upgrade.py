"""Files of chatflow-agent 0.3.4, upgraded when they are opened."""

from __future__ import annotations

import asyncio
import datetime as dt
import json
import logging
import re
import sqlite3
import tempfile
from pathlib import Path
from typing import Any, Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chatflow.core.agent import Agent
from chatflow.core.messages import Message, Role
from chatflow.core.pruning import prune
from chatflow.engines.scripted import ScriptedEngine
from chatflow.runner import Runner
from chatflow.sqlite import schema
from chatflow.sqlite.store import SQLiteSessionStore
from tests.sqlite import chatflow_agent
from tests.sqlite.chatflow_agent import add, add_all, add_messages, dump, empty_file, old_file, written
from tests.sqlite.conftest import OpenStore
from tests.sqlite.files import RELEASED, SUPPORT, connect, query, say, schema_of
from tests.sqlite.processes import all_at_once, started
from tests.strategies import any_history, says

SET_ASIDE: Final = "SELECT session_id, source, content, reason FROM chatflow_set_aside ORDER BY set_aside_id"
WRITTEN_AT: Final = "2026-11-30 20:00:00"
BILLING: Final = Agent(name="Billing")


@pytest.fixture
def old(path: Path) -> Path:
    """The file that chatflow-agent has written, at *path*."""
    return old_file(path)


@pytest.fixture
def empty(path: Path) -> Path:
    """One with its tables and nothing in them."""
    return empty_file(path)


async def history_of(store: SQLiteSessionStore, session_id: str) -> list[Message]:
    """The messages of a conversation."""
    session = await store.get(session_id)
    assert session is not None
    return list(session.history)


# --- what is kept ---


async def test_sessions(old: Path, store: SQLiteSessionStore) -> None:
    """Every session is kept, with its agent's name, metadata and times."""
    before = {
        row[0]: row[1:]
        for row in query(
            old,
            "SELECT session_id, active_agent_name, metadata_json, datetime(created_at), datetime(updated_at)"
            " FROM chatflow_sessions",
        )
    }
    page = await store.list_sessions()
    after = {
        each.session_id: (
            each.active_agent_name,
            dict(each.metadata),
            f"{each.created_at:%Y-%m-%d %H:%M:%S}",
            f"{each.updated_at:%Y-%m-%d %H:%M:%S}",
        )
        for each in page.items
    }
    assert after == {key: (agent, json.loads(text), *times) for key, (agent, text, *times) in before.items()}
    assert {each.updated_at.tzinfo for each in page.items} == {dt.UTC}


async def test_messages(old: Path, store: SQLiteSessionStore) -> None:
    """Every message of a whole conversation is kept, in its order, with its time, calls and results."""
    texts = query(old, "SELECT message_json FROM chatflow_messages WHERE session_id = 'whole' ORDER BY id")
    history = await history_of(store, "whole")
    assert [json.loads(written(message)) for message in history] == [json.loads(text) for text in texts]
    assert history[0].timestamp == dt.datetime(2026, 3, 1, 12, 0, 0, 250_000, dt.UTC)


async def test_conversations_go_on(old: Path, store: SQLiteSessionStore) -> None:
    """An upgraded conversation goes on where it was, with its agent."""
    engine = ScriptedEngine(["It is on its way."])
    runner = Runner(Agent(name="Support", handoffs=[BILLING]), store, engine)
    response = await runner.run_async("whole", "And now?", message_id="new")
    assert (response.content, response.active_agent_name) == ("It is on its way.", "Billing")
    assert [message.text for message in await history_of(store, "whole")][-3:] == [
        "Gracias",
        "And now?",
        "It is on its way.",
    ]


async def test_same_schema(old: Path, store: SQLiteSessionStore) -> None:
    """An upgraded file has the schema of a new one, and nothing else."""
    await store.get("whole")
    assert schema_of(old) == (RELEASED / "1.sql").read_text(encoding="utf-8")
    others = "SELECT name FROM sqlite_master WHERE name NOT LIKE 'chatflow%' AND name NOT LIKE 'sqlite%'"
    assert query(old, others) == []
    assert query(old, "PRAGMA integrity_check") + query(old, "PRAGMA foreign_key_check") == ["ok"]


async def test_opened_again(old: Path, open_store: OpenStore, caplog: pytest.LogCaptureFixture) -> None:
    """A file that was upgraded is as any other when it is opened again."""
    first = open_store()
    await say(await first.get_or_create("whole", SUPPORT), "more")
    await first.aclose()
    before = dump(old)
    caplog.clear()
    second = open_store()
    await second.get("whole")
    await second.aclose()
    assert (dump(old), caplog.messages) == (before, [])


async def test_foreign_keys_are_on(old: Path, store: SQLiteSessionStore) -> None:
    """The connection that has upgraded a file deletes a conversation's messages with it."""
    await store.get("whole")
    for session_id in ("whole", "broken", "empty"):
        assert await store.delete(session_id)
    assert query(old, "SELECT count(*) FROM chatflow_messages") == [0]


async def test_order(empty: Path, store: SQLiteSessionStore) -> None:
    """The conversation changed last is the first in the list, and of several at the same second the one made last."""
    times = {"b": "2026-01-02 00:00:00", "c": "2026-01-01 00:00:00", "a": "2026-01-02 00:00:00", "d": "2026-01-03"}
    rows = [{"session_id": each, "active_agent_name": "Support", "updated_at": time} for each, time in times.items()]
    add_all(empty, "sessions", rows)
    page = await store.list_sessions()
    assert [each.session_id for each in page.items] == ["d", "a", "b", "c"]
    versions = query(empty, "SELECT version FROM chatflow_sessions ORDER BY version")
    assert versions == sorted(set(versions))


async def test_not_cut(empty: Path, open_store: OpenStore) -> None:
    """A history longer than the store's window is kept whole, until a commit prunes it."""
    add(empty, "sessions", session_id="s", active_agent_name="Support")
    add_messages(empty, "s", [written(says(Role.USER, str(number))) for number in range(9)])
    store = open_store(default_max_turns=2)
    assert len(await history_of(store, "s")) == 9
    await say(await store.get_or_create("s", SUPPORT), "9")
    assert [message.text for message in await history_of(store, "s")] == ["8", "9"]


async def test_values_of_any_form(empty: Path, store: SQLiteSessionStore) -> None:
    """Values that look like those of our format, large integers, NaN and lone surrogates are what they were."""
    value = {"$chatflow": "bytes", "v": "AA=="}
    add(empty, "sessions", session_id="s", active_agent_name="Support", metadata_json=json.dumps({"x": value}))
    call = {"id": "1", "name": "look", "args": {"x": value, "big": 2**70, "half": "\ud800"}}
    result = {"tool_call_id": "1", "name": "look", "content": [value, 1e999], "$chatflow": "mine"}
    add_messages(
        empty,
        "s",
        [
            written(says(Role.USER)),
            json.dumps({"role": "model", "tool_calls": [call], "timestamp": WRITTEN_AT}),
            json.dumps({"role": "tool", "tool_results": [result], "timestamp": WRITTEN_AT, "$chatflow": value}),
        ],
    )
    session = await store.get("s")
    assert session is not None
    assert session.metadata == {"x": value}
    assert session.history[1].tool_calls[0].args == call["args"]
    assert session.history[2].tool_results[0].content == result["content"]
    assert session.history[2].extra == {"$chatflow": value, "tool_results[0].$chatflow": "mine"}
    assert session.history[2].timestamp == dt.datetime(2026, 11, 30, 20, tzinfo=dt.UTC)


async def test_message_without_a_time(empty: Path, store: SQLiteSessionStore) -> None:
    """A message that does not say when it was said has the time at which its row was written."""
    add(empty, "sessions", session_id="s", active_agent_name="Support")
    for text in ('{"role": "user"}', '{"role": "user", "timestamp": null}'):
        add(empty, "messages", session_id="s", role="user", message_json=text, created_at=WRITTEN_AT)
    stamps = {message.timestamp for message in await history_of(store, "s")}
    assert stamps == {dt.datetime(2026, 11, 30, 20, tzinfo=dt.UTC)}


# --- message ids ---


async def test_processed_ids(old: Path, store: SQLiteSessionStore) -> None:
    """A message id that chatflow-agent recorded is processed, and whoever marks first and then runs is told so."""
    store.clock = lambda: dt.datetime.fromisoformat(processed[0]).replace(tzinfo=dt.UTC) + dt.timedelta(hours=191)
    processed = query(old, "SELECT processed_at FROM chatflow_processed_messages")
    assert [await store.is_message_processed(each) for each in ("wamid.1", "wamid.2", "wamid.3")] == [True, True, False]
    assert [await store.mark_message_processed(each) for each in ("wamid.1", "wamid.3")] == [False, True]
    runner = Runner(SUPPORT, store, ScriptedEngine(["hello"]))
    assert (await runner.run_async("s", "hi", message_id="wamid.3")).content == "hello"


async def test_processed_ids_expire(old: Path, store: SQLiteSessionStore) -> None:
    """They are remembered as long as any other, from when they were recorded."""
    processed = query(old, "SELECT processed_at FROM chatflow_processed_messages")
    store.clock = lambda: dt.datetime.fromisoformat(processed[0]).replace(tzinfo=dt.UTC) + dt.timedelta(hours=193)
    assert await store.mark_message_processed("wamid.1")


# --- what is set aside ---


async def test_broken(old: Path, store: SQLiteSessionStore) -> None:
    """What the rules take out of a broken history is set aside as it was, with its row and the reason."""
    texts = dict(query(old, "SELECT id, message_json FROM chatflow_messages WHERE session_id = 'broken'"))
    history = await history_of(store, "broken")
    assert [(message.role.value, len(message.tool_results)) for message in history] == [
        ("system", 0),
        ("user", 0),
        ("model", 0),
        ("tool", 1),
    ]
    aside = query(old, SET_ASIDE)
    assert [(session_id, content) for session_id, _, content, _ in aside] == [
        ("broken", texts[number]) for number in (7, 8, 10, 12, 14)
    ]
    assert [source for _, source, _, _ in aside] == [f"chatflow_messages, id {number}" for number in (7, 8, 10, 12, 14)]
    assert [reason for *_, reason in aside] == [
        "stands before the first user message",
        "stands before the first user message",
        "holds results without a call before them",
        'holds results without a call before them: ["nor this"]; its other results stay in the history',
        "can't be read: data: a message of role tool needs tool_results",
    ]


UNREADABLE: Final[dict[str, tuple[Any, str]]] = {
    "no JSON": ("{", "can't be read"),
    "no object": ("[]", "a message must be an object"),
    "no role": ('{"content": "x"}', "role: it is missing"),
    "calls that are no list": ('{"role": "model", "tool_calls": 5}', "tool_calls"),
    "a call that is no object": ('{"role": "model", "tool_calls": [5]}', "tool_calls"),
    "no time": ('{"role": "user", "timestamp": "soon"}', "timestamp"),
    "nested too deeply": ('{"role": "user", "x": ' + "[" * 300 + "]" * 300 + "}", "can't be read"),
    "nested without end": ("[" * 100_000, "can't be read"),
    "a number of 5,000 digits": ('{"role": "user", "x": ' + "9" * 5000 + "}", "can't be read"),
    "bytes": (b"\xff{}", "it is no text"),
}


@pytest.mark.parametrize("kind", UNREADABLE)
async def test_unreadable_message(kind: str, empty: Path, store: SQLiteSessionStore) -> None:
    """A message that can't be read is set aside as it was, with the reason; those around it are kept."""
    text, reason = UNREADABLE[kind]
    add(empty, "sessions", session_id="s", active_agent_name="Support")
    add_messages(empty, "s", [written(says(Role.USER, "before")), text, written(says(Role.USER, "after"))])
    assert [message.text for message in await history_of(store, "s")] == ["before", "after"]
    [(session_id, source, content, told)] = query(empty, SET_ASIDE)
    assert (session_id, content) == ("s", text)
    assert re.fullmatch(r"chatflow_messages, id \d+", source)
    assert reason in told


async def test_bytes_that_are_no_text(empty: Path, store: SQLiteSessionStore) -> None:
    """Text that is not UTF-8 is set aside as the bytes that it is."""
    add(empty, "sessions", session_id="s", active_agent_name="Support")
    with connect(empty) as connection:
        connection.execute(
            "INSERT INTO chatflow_messages (session_id, role, message_json)"
            " VALUES ('s', 'user', CAST(x'7bff7d' AS TEXT))"
        )
    assert await history_of(store, "s") == []
    assert [content for _, _, content, _ in query(empty, SET_ASIDE)] == [b"{\xff}"]


@pytest.mark.parametrize("text", ["{", "[]", "null", '{"a": ' + "[" * 300 + "]" * 300 + "}"])
async def test_unreadable_metadata(text: str, empty: Path, store: SQLiteSessionStore) -> None:
    """Metadata that can't be read is set aside, and its conversation kept without it."""
    add(empty, "sessions", session_id="s", active_agent_name="Support", metadata_json=text)
    session = await store.get("s")
    assert session is not None
    assert session.metadata == {}
    [(session_id, source, content, reason)] = query(empty, SET_ASIDE)
    assert (session_id, source, content) == ("s", "chatflow_sessions, session_id 's', metadata_json", text)
    assert reason.startswith("can't be read")


async def test_no_metadata(empty: Path, store: SQLiteSessionStore) -> None:
    """Empty text for metadata is none, as it was for chatflow-agent."""
    add(empty, "sessions", session_id="s", active_agent_name="Support", metadata_json="")
    assert (await store.get_or_create("s", SUPPORT)).metadata == {}
    assert query(empty, SET_ASIDE) == []


@pytest.mark.parametrize("time", ["soon", None, 5, "0001-01-01T00:00:00+23:00"])
async def test_unreadable_time(time: Any, empty: Path, store: SQLiteSessionStore) -> None:
    """A time that can't be read is set aside, and the time of the upgrade stands in its place."""
    add(
        empty,
        "sessions",
        session_id="s",
        active_agent_name="Support",
        created_at=time,
        updated_at="2026-01-02T03:00+01",
    )
    [info] = (await store.list_sessions()).items
    assert info.created_at > info.updated_at == dt.datetime(2026, 1, 2, 2, tzinfo=dt.UTC)
    [(_, source, content, reason)] = query(empty, SET_ASIDE)
    assert source == "chatflow_sessions, session_id 's', created_at"
    assert (content, "time of the upgrade" in reason) == (time, True)


async def test_session_without_text(empty: Path, store: SQLiteSessionStore) -> None:
    """A session whose id is no text can't be asked for, and is set aside with its messages."""
    add(empty, "sessions", session_id=b"\xff", active_agent_name="Support", created_at="c", updated_at="u")
    add_messages(empty, b"\xff", ["{}", "[]"])  # type: ignore[arg-type]  # that is what it is about
    assert (await store.list_sessions()).items == ()
    aside = query(empty, SET_ASIDE)
    assert [(session_id, content) for session_id, _, content, _ in aside] == [
        (None, '["\\\\xff", "Support", "{}", "c", "u"]'),
        (None, "{}"),
        (None, "[]"),
    ]


async def test_unreadable_ids(empty: Path, store: SQLiteSessionStore) -> None:
    """A message id that is no text, or has no time, is set aside; the others are kept."""
    rows: list[dict[str, Any]] = [
        {"message_id": b"\xff", "processed_at": WRITTEN_AT},
        {"message_id": "a", "processed_at": None},
        {"message_id": "b", "processed_at": WRITTEN_AT},
    ]
    add_all(empty, "processed_messages", rows)
    await store.get("s")
    assert query(empty, "SELECT session_id, message_id, processed_at FROM chatflow_processed_messages") == [
        ("", "b", "2026-11-30T20:00:00.000000+00:00")
    ]
    assert [content for _, _, content, _ in query(empty, SET_ASIDE)] == [
        '["\\\\xff", "2026-11-30 20:00:00"]',
        '["a", null]',
    ]


async def test_set_aside_goes_with_its_session(old: Path, store: SQLiteSessionStore) -> None:
    """What was taken out of a conversation is deleted with it."""
    await store.get("whole")
    assert query(old, "SELECT count(*) FROM chatflow_set_aside") == [5]
    await store.delete("broken")
    assert query(old, "SELECT count(*) FROM chatflow_set_aside") == [0]


BROKEN_TEXTS: Final = st.sampled_from(["{", "[]", "{}", '{"role": "nobody"}', '{"role": "tool", "content": "x"}'])
EXPECTED_LIMIT: Final = 10**6


@given(st.lists(any_history.map(lambda each: [*each]) | BROKEN_TEXTS.map(lambda text: [text]), max_size=4))
async def test_any_history(parts: list[list[Message | str]]) -> None:
    """Of any messages the history holds what the rules keep; that and what was set aside is all, in order."""
    rows = [each for part in parts for each in part]
    texts = [each if isinstance(each, str) else written(each) for each in rows]
    kept = prune([each for each in rows if isinstance(each, Message)], EXPECTED_LIMIT)
    # A message of which the rules keep a part is another one then: what it was is set aside too.
    unchanged = {id(message) for message in kept}
    with tempfile.TemporaryDirectory() as folder:
        path = empty_file(Path(folder) / "chat.db")
        add(path, "sessions", session_id="s", active_agent_name="Support")
        add_messages(path, "s", texts)
        ids = query(path, "SELECT id FROM chatflow_messages ORDER BY id")
        async with SQLiteSessionStore(path) as store:
            assert await history_of(store, "s") == list(kept)
        aside = query(path, "SELECT source, content FROM chatflow_set_aside ORDER BY set_aside_id")
    assert aside == [
        (f"chatflow_messages, id {number}", text)
        for number, each, text in zip(ids, rows, texts, strict=True)
        if id(each) not in unchanged
    ]


# --- what is told ---


async def test_told(old: Path, store: SQLiteSessionStore, caplog: pytest.LogCaptureFixture) -> None:
    """One warning tells how much was moved, set aside, and deleted as of deleted sessions."""
    with caplog.at_level(logging.INFO, "chatflow"):
        await store.get("whole")
    [record] = caplog.records
    assert record.levelno == logging.WARNING
    assert "3 sessions, 10 messages and 2 message ids moved, 5 set aside" in record.getMessage()
    assert "1 messages of deleted sessions deleted" in record.getMessage()
    assert str(old) in record.getMessage()


async def test_told_where_all_is_well(empty: Path, store: SQLiteSessionStore, caplog: pytest.LogCaptureFixture) -> None:
    """It is no warning where everything stayed."""
    with caplog.at_level(logging.INFO, "chatflow"):
        await store.get("s")
    assert [record.levelno for record in caplog.records] == [logging.INFO]


# --- by what the tables are ---


@pytest.mark.parametrize("version", [0, 1, 42])
async def test_user_version_says_nothing(version: int, old: Path, store: SQLiteSessionStore) -> None:
    """A file is recognised whatever its user_version is, and keeps it."""
    with connect(old) as connection:
        connection.execute(f"PRAGMA user_version={version}")
    assert len(await history_of(store, "whole")) == 6
    assert query(old, "PRAGMA user_version") == [version]


@pytest.mark.parametrize("left", [1, 2])
async def test_first_start_cut_short(left: int, old: Path, open_store: OpenStore) -> None:
    """A file in which chatflow-agent had not made all its tables yet is upgraded with those it has."""
    missing = ["chatflow_messages", "chatflow_processed_messages"][left - 1 :]
    with connect(old) as connection:
        for table in missing:
            connection.execute(f"DROP TABLE {table}")
    store = open_store()
    assert len((await store.list_sessions()).items) == 3
    assert len(await history_of(store, "whole")) == (6 if left == 2 else 0)


async def test_others_tables(old: Path, store: SQLiteSessionStore) -> None:
    """Tables, views, triggers and rows of others in the file are as they were."""
    with connect(old) as connection:
        connection.executescript(
            """
            CREATE TABLE orders (id INTEGER PRIMARY KEY, session_id TEXT);
            CREATE TABLE items (order_id REFERENCES orders (id) ON DELETE CASCADE);
            CREATE VIEW said AS SELECT session_id, content FROM chatflow_messages;
            CREATE VIEW broken AS SELECT * FROM absent;
            CREATE TRIGGER ordered AFTER INSERT ON orders BEGIN INSERT INTO items VALUES (NEW.id); END;
            INSERT INTO orders VALUES (1, 'whole');
            """
        )
    others = "SELECT * FROM sqlite_master WHERE tbl_name IN ('orders', 'items', 'said', 'broken') ORDER BY name"
    before = [row[:3] + row[4:] for row in query(old, others)]
    await store.get("whole")
    assert [row[:3] + row[4:] for row in query(old, others)] == before
    assert query(old, "SELECT * FROM orders") + query(old, "SELECT * FROM items") == [(1, "whole"), 1]


async def test_in_memory(open_store: OpenStore) -> None:
    """A database in memory that others have filled so is upgraded too."""
    address = "file:old?mode=memory&cache=shared"
    with connect(address) as connection:
        connection.executescript(chatflow_agent.DUMP.read_text(encoding="utf-8"))
        assert len(await history_of(open_store(address), "whole")) == 6


# --- crashes and others ---


@pytest.mark.parametrize("step", ["move_sessions", "move_ids"])
def test_killed(step: str, old: Path) -> None:
    """A process that is killed in the middle of an upgrade leaves the file as it was, and the next one upgrades it."""
    # Enough for the transaction to be written to the log before it ends.
    add_messages(old, "whole", [written(says(Role.USER, "x" * 100_000))] * 50)
    before = dump(old)
    with started("upgrade_halfway", old, step) as program:
        assert program.heard() == "halfway"
        program.kill()
    log = old.with_name(f"{old.name}-wal")
    assert (log.stat().st_size > 1_000_000) is (step == "move_ids")
    assert dump(old) == before
    assert all_at_once(1, "create", old) == ["created"]
    assert query(old, "SELECT count(*) FROM chatflow_messages") == [60]


def test_two_at_once(old: Path) -> None:
    """Processes that open an old file at the same moment upgrade it once, and all work."""
    add_messages(old, "whole", [written(says(Role.USER, "x" * 1000))] * 2000)
    assert all_at_once(4, "create", old) == ["created"] * 4
    counts = [
        query(old, f"SELECT count(*) FROM chatflow_{table}")[0]
        for table in ("sessions", "messages", "processed_messages", "set_aside")
    ]
    assert counts == [7, 2010, 2, 5]


async def test_upgraded_meanwhile(old: Path, store: SQLiteSessionStore) -> None:
    """A process that took a file for an old one, which another has upgraded since, leaves it as it is."""
    await store.get("whole")
    before = dump(old)

    def upgrade_again() -> int:
        with connect(old) as connection:
            return schema._upgrade_chatflow_agent(connection, "chat.db")

    assert await asyncio.to_thread(upgrade_again) == 1
    assert dump(old) == before


# --- a chatflow-agent that still runs on it ---

OLD_WRITES: Final[dict[str, str]] = {
    "start": "CREATE INDEX IF NOT EXISTS idx_chatflow_messages_session ON chatflow_messages(session_id, id)",
    "get_or_create": """
        INSERT INTO chatflow_sessions (session_id, active_agent_name, metadata_json) VALUES ('whole', 'Support', '{}')
        ON CONFLICT(session_id) DO NOTHING
    """,
    "add_message": """
        INSERT INTO chatflow_messages (session_id, role, content, message_json) VALUES ('whole', 'user', 'hi', '{}')
    """,
    "rollback_to": "SELECT id FROM chatflow_messages WHERE session_id = 'whole' ORDER BY id ASC",
    "set_active_agent": """
        UPDATE chatflow_sessions SET active_agent_name = 'Support', updated_at = CURRENT_TIMESTAMP
        WHERE session_id = 'whole'
    """,
    "clear_history": "DELETE FROM chatflow_messages WHERE session_id = 'whole'",
    "record_processed_message": """
        DELETE FROM chatflow_processed_messages WHERE processed_at < datetime('now', '-192 hours');
        INSERT OR REPLACE INTO chatflow_processed_messages (message_id, processed_at) VALUES ('m', CURRENT_TIMESTAMP)
    """,
    "delete": "DELETE FROM chatflow_messages WHERE session_id = 'whole'",
    "clear": "DELETE FROM chatflow_messages; DELETE FROM chatflow_sessions",
}
"""Its statements, as it runs them in one transaction; `test_living_process` shows that these are all."""


@pytest.mark.parametrize("name", OLD_WRITES)
async def test_old_writes(name: str, old: Path, store: SQLiteSessionStore) -> None:
    """What chatflow-agent would write to an upgraded file is an error, and changes nothing."""
    await store.get("whole")
    before = dump(old)
    with connect(old) as connection, pytest.raises(sqlite3.Error):
        connection.executescript(f"BEGIN; {OLD_WRITES[name]}; COMMIT")
    assert dump(old) == before


async def test_deleting_without_foreign_keys(old: Path, store: SQLiteSessionStore) -> None:
    """A program that deletes a session is told to turn foreign keys on, and once they are on it may."""
    await store.get("whole")
    with connect(old) as connection:
        with pytest.raises(sqlite3.IntegrityError, match="PRAGMA foreign_keys=ON"):
            connection.execute("DELETE FROM chatflow_sessions WHERE session_id = 'empty'")
        connection.execute("PRAGMA foreign_keys=ON")
        connection.execute("DELETE FROM chatflow_sessions")
    assert query(old, "SELECT count(*) FROM chatflow_messages") == [0]


# --- the package itself ---


@pytest.mark.slow
def test_dump_is_its_own(tmp_path: Path) -> None:
    """The dump that the tests use is what chatflow-agent writes, but for the time."""

    def timeless(text: str) -> str:
        return re.sub(r"'\d{4}-\d\d-\d\d \d\d:\d\d:\d\d'", "'now'", text)

    chatflow_agent.write_example(tmp_path / "real.db")
    assert timeless(dump(tmp_path / "real.db")) == timeless(dump(old_file(tmp_path / "kept.db")))


@pytest.mark.slow
async def test_real_file(path: Path, store: SQLiteSessionStore) -> None:
    """A file that chatflow-agent has just written is upgraded."""
    chatflow_agent.write_example(path)
    assert [each.session_id for each in (await store.list_sessions()).items] == ["empty", "broken", "whole"]
    assert len(await history_of(store, "whole")) == 6
    assert query(path, "SELECT count(*) FROM chatflow_set_aside") == [5]


@pytest.mark.slow
async def test_living_process(path: Path, store: SQLiteSessionStore) -> None:
    """A process of chatflow-agent that runs on gets an error from all that it writes after the upgrade."""
    chatflow_agent.write_example(path)
    with started("chatflow_agent", path) as program:
        names = program.heard()
        await store.get("whole")
        before = dump(path)
        program.go_on()
        errors = program.heard()
    assert {name: isinstance(errors[name], str) for name in names} == dict.fromkeys(names, True)
    assert dump(path) == before
