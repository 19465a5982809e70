from __future__ import annotations

import re
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, Final

import pytest

from chatflow.sqlite import answers, database, diagnosis, examination, mending, schema, statements
from chatflow.sqlite.store import SQLiteSessionStore
from tests.sqlite.conftest import OpenStore
from tests.sqlite.files import SUPPORT

PARTS_OF_STATEMENTS: Final = {
    "FIRST_PLACES": {"SCAN CONSTANT ROW"},  # one row, of two look-ups
    "WAITS_FOR": {"SCAN awaited"},  # its own queue, which is as long as the answer
    "QUEUE_TURN": {"SCAN CONSTANT ROW", "SCAN line"},  # one row, whether the line is empty
    "INSERT_MESSAGES": {"SCAN json_each VIRTUAL TABLE INDEX 1:"},  # what it inserts
    "SESSION_KEYS_AFTER": {"SCAN CONSTANT ROW", "SCAN found"},  # its own queue, which is as long as the answer
}
ON_OPENING_AND_CLOSING: Final = {
    # The turns that are open or were left, once a start or an end: an index would cost each turn more.
    "_HOLDERS": {"SCAN chatflow_turns", "USE TEMP B-TREE FOR DISTINCT"},
    "_DELETE_TURNS": {"SCAN chatflow_turns"},
    "_DELETE_OWN_TURNS": {"SCAN chatflow_turns"},
    "_TABLES": {"SCAN sqlite_master"},  # a dozen rows
}


def all_statements() -> dict[str, str]:
    """Every statement, by its name, wherever it stands."""
    return {
        name: value
        for module in (statements, database, schema, answers, diagnosis, examination, mending)
        for name, value in vars(module).items()
        if isinstance(value, str) and re.match(r"\s*(SELECT|INSERT|UPDATE|DELETE|WITH)\b", value)
    }


STATEMENTS: Final = all_statements()


@pytest.fixture
async def connection(anyio_backend: str, path: Path) -> Any:
    """A connection to a file that a store has prepared."""
    async with SQLiteSessionStore(path) as store:
        await store.get_or_create("s", SUPPORT)
    with closing(sqlite3.connect(path)) as connection:
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
    """The statements that are looked at are all that `statements` has, and those of opening and closing a file."""
    public = {name for name, value in vars(statements).items() if name.isupper() and isinstance(value, str)}
    assert public | {"_MARK_GROUP", "_DELETE_OWN_TURNS", "_HOLDERS", "_READ_VERSION"} <= STATEMENTS.keys()


def test_all_are_used() -> None:
    """Every statement is used by an operation."""
    source = Path(statements.__file__).with_name("operations.py").read_text(encoding="utf-8")
    unused = {name for name in vars(statements) if name.isupper() and f"statements.{name}" not in source}
    assert unused == set()


def test_deleting_cascades_by_index(connection: sqlite3.Connection) -> None:
    """Deleting a conversation finds its messages and turns by an index that begins with its key."""
    for table in ("chatflow_messages", "chatflow_turns"):
        steps = list(plan(connection, f"SELECT 1 FROM {table} WHERE session_key = :session_key"))
        assert all(step.startswith("SEARCH") for step in steps)


async def test_bites(open_store: OpenStore, connection: sqlite3.Connection) -> None:
    """A statement without an index is seen."""
    assert any("SCAN" in step for step in plan(connection, "SELECT 1 FROM chatflow_sessions WHERE updated_at = :now"))
