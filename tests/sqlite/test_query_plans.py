from __future__ import annotations

import re
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, Final

import pytest

from chatflow.sqlite import (
    answers,
    aside,
    contents,
    copying,
    database,
    diagnosis,
    erasing,
    examination,
    exporting,
    journals,
    mending,
    retention,
    rows,
    schema,
    statements,
    turn_diagnosis,
    turn_mending,
    turn_statements,
    upgrade,
)
from chatflow.sqlite.store import SQLiteSessionStore
from tests.sqlite.chatflow_agent import old_file
from tests.sqlite.conftest import OpenStore
from tests.sqlite.files import SUPPORT

PARTS_OF_STATEMENTS: Final = {
    "FIRST_PLACES": {"SCAN CONSTANT ROW"},  # one row, of two look-ups
    "WAITS_FOR": {"SCAN awaited"},  # its own queue, which is as long as the answer
    "BEAT": {"SCAN json_each VIRTUAL TABLE INDEX 1:"},  # the rows to beat
    "BEATS_IN_LINES": {
        "SCAN json_each VIRTUAL TABLE INDEX 1:",  # the rows that wait, and those watched
        "UNION USING TEMP B-TREE",
    },
    "IS_WORK_AT_HAND": {"SCAN CONSTANT ROW"},  # one row, of a look-up
    "WORK_AT_HAND": {"USE TEMP B-TREE FOR ORDER BY"},  # of two states, in the order of ids
    "INSERT_MESSAGES": {"SCAN json_each VIRTUAL TABLE INDEX 1:"},  # what it inserts
    "SESSION_KEYS_AFTER": {"SCAN CONSTANT ROW", "SCAN found"},  # its own queue, which is as long as the answer
    "JOURNALS_AFTER": {"SCAN CONSTANT ROW", "SCAN found"},  # likewise
}
ON_OPENING_AND_CLOSING: Final = {
    # A dozen rows.
    "_OBJECTS": {"SCAN sqlite_master"},
    "_COLUMNS": {"SCAN pragma_table_info VIRTUAL TABLE INDEX 0:", "USE TEMP B-TREE FOR ORDER BY"},
    "_REFERRING": {"SCAN master", "SCAN reference VIRTUAL TABLE INDEX 0:"},
    # Two rows, and how much a copy has to do.
    "HIGHEST_NUMBERS": {"SCAN CONSTANT ROW", "SCAN sqlite_sequence"},
    "COUNT_SESSIONS": {"SCAN chatflow_sessions USING COVERING INDEX sqlite_autoindex_chatflow_sessions_1"},
    # An upgrade reads every row once.
    "_OLD_SESSIONS": {"SCAN chatflow_agent_sessions", "USE TEMP B-TREE FOR ORDER BY"},
    "_COUNT_DELETED": {"SCAN chatflow_agent_messages USING COVERING INDEX idx_chatflow_messages_session"},
    "_OLD_IDS": {"SCAN chatflow_agent_ids"},
}


def all_statements() -> dict[str, str]:
    """Every statement, by its name, wherever it stands."""
    return {
        name: value
        for module in (
            *(statements, turn_statements, rows, database, schema, contents, upgrade),
            *(answers, aside, diagnosis, examination, journals, mending, turn_diagnosis, turn_mending),
            *(erasing, exporting, retention, copying),
        )
        for name, value in vars(module).items()
        if isinstance(value, str) and re.match(r"\s*(SELECT|INSERT|UPDATE|DELETE|WITH)\b", value)
    }


STATEMENTS: Final = all_statements()


@pytest.fixture
async def connection(anyio_backend: str, path: Path) -> Any:
    """A connection to a file that a store has prepared."""
    async with SQLiteSessionStore(path) as store:
        await store.get_or_create("s", SUPPORT)
    old = old_file(path.with_name("old.db"))
    with closing(sqlite3.connect(old)) as connection:
        for statement in upgrade._RENAME:
            connection.execute(statement)
        old_tables = [row[0] for row in connection.execute("SELECT sql FROM sqlite_master WHERE sql IS NOT NULL")]
    with closing(sqlite3.connect(path)) as connection:
        for sql in old_tables:
            if "sqlite_sequence" not in sql:
                connection.execute(sql)
        yield connection


def plan(connection: sqlite3.Connection, sql: str) -> Iterator[str]:
    """The steps in which SQLite would run *sql*."""
    values: Any = dict.fromkeys(re.findall(r":([a-z_]+)", sql)) or (None,) * sql.count("?")
    for *_, step in connection.execute(f"EXPLAIN QUERY PLAN {sql}", values):
        yield step


@pytest.mark.parametrize("name", STATEMENTS)
async def test_no_scan(name: str, connection: sqlite3.Connection) -> None:
    """A statement reads no table from end to end, and sorts nothing."""
    allowed = PARTS_OF_STATEMENTS.get(name, set()) | ON_OPENING_AND_CLOSING.get(name, set())
    steps = list(plan(connection, STATEMENTS[name]))
    assert [step for step in steps if ("SCAN" in step or "TEMP B-TREE" in step) and step not in allowed] == []


def test_all_are_found() -> None:
    """The statements that are looked at are all that there are, and those of opening and closing a file."""
    public = {
        name
        for module in (statements, turn_statements)
        for name, value in vars(module).items()
        if name.isupper() and isinstance(value, str)
    }
    assert public | {"_MARK_GROUP", "_MARKS", "_READ_FORMAT", "_OLD_MESSAGES"} <= STATEMENTS.keys()


def test_all_are_used() -> None:
    """Every statement is used by an operation."""
    folder = Path(statements.__file__).parent
    source = "".join(
        path.read_text(encoding="utf-8") for path in folder.glob("*.py") if not path.stem.endswith("statements")
    )
    names = {name for module in (statements, turn_statements) for name in vars(module) if name.isupper()}
    assert {name for name in names if not re.search(rf"\b{name}\b", source)} == set()


def test_deleting_cascades_by_index(connection: sqlite3.Connection) -> None:
    """Deleting a conversation finds its messages and turns by an index that begins with its key."""
    for table in ("chatflow_messages", "chatflow_turns"):
        steps = list(plan(connection, f"SELECT 1 FROM {table} WHERE session_key = :session_key"))
        assert all(step.startswith("SEARCH") for step in steps)


async def test_bites(open_store: OpenStore, connection: sqlite3.Connection) -> None:
    """A statement without an index is seen."""
    assert any("SCAN" in step for step in plan(connection, "SELECT 1 FROM chatflow_sessions WHERE updated_at = :now"))
