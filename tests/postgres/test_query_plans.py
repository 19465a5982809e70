from __future__ import annotations

import importlib
import pkgutil
import re
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import psycopg
import pytest

import chatflow.postgres
from tests.postgres import server

NOW: Final = datetime(2026, 1, 1, tzinfo=UTC)

FILLING: Final = """
    INSERT INTO chatflow_sessions (
        owner, session_id, active_agent_name, service_key, expires_after, expires_at, version, created_at, updated_at
    )
    SELECT
        CASE WHEN n % 2 = 0 THEN '' ELSE 'owner ' || n % 1000 END, 's' || n, 'Support',
        CASE WHEN n % 10 = 0 THEN 'service ' || n END, CASE WHEN n % 10 = 1 THEN 1 END,
        CASE WHEN n % 10 = 1 THEN timestamptz '2026-01-01Z' + n * interval '1 s' END, nextval('chatflow_versions'),
        '2026-01-01Z', timestamptz '2026-01-01Z' + n * interval '1 s'
    FROM generate_series(1, 10000) AS n;

    INSERT INTO chatflow_messages SELECT session_key, place, '{"role": "user"}'
    FROM chatflow_sessions, generate_series(0, 9) AS place;

    INSERT INTO chatflow_processed_messages (owner, session_id, message_id, processed_at)
    SELECT owner, session_id, 'm' || n, updated_at FROM chatflow_sessions, generate_series(1, 5) AS n;

    INSERT INTO chatflow_turns (
        session_key, state, holder, attempt, attempts, lease_seconds, accepted, agent_name, message_id, digest, parent,
        queued_at, ended_at
    )
    SELECT
        session_key, state, CASE WHEN state IN ('queued', 'running') THEN 'holder ' || session_key % 1000 END, 1, 1, 10,
        false, 'Support', state, 'digest', CASE WHEN state = 'queued' THEN session_key END, '2026-01-01Z',
        CASE WHEN state NOT IN ('queued', 'running', 'accepted') THEN updated_at END
    FROM chatflow_sessions, unnest(ARRAY['running', 'queued', 'accepted', 'answered', 'dead']) AS state
    WHERE state = 'dead' OR session_key % 200 = 0;

    INSERT INTO chatflow_journal SELECT turn_id, step, '{}' FROM chatflow_turns, generate_series(1, 2) AS step;

    INSERT INTO chatflow_set_aside (owner, session_id, source, reason, set_aside_at)
    SELECT owner, session_id, 'there', 'odd', updated_at FROM chatflow_sessions;

    INSERT INTO chatflow_marks SELECT 'mark ' || n, n FROM generate_series(1, 10000) AS n;
"""
"""As much of everything as makes the planner choose as it would with a million: most conversations are at rest."""

VALUES: Final[dict[str, Any]] = {
    "hidden": "\1\1",
    "shown": "\1\2",
    **dict.fromkeys(("now", "expired_before", "expires_at", "created_at", "queued_at"), NOW),
    **dict.fromkeys(("metadata_json", "service_json", "state_json", "spent_json", "response_json", "work_json"), "{}"),
    **dict.fromkeys(("message_json", "entry_json"), "{}"),
    **dict.fromkeys(("system_texts", "body_texts"), "[]"),
    **dict.fromkeys(("schema", "digest", "content", "reason", "source", "format", "table", "note"), "some text"),
    **dict.fromkeys(("active_agent_name", "agent_name"), "Support"),
    **dict.fromkeys(("before", "after", "after_key"), 5000),
    **dict.fromkeys(("version", "seen", "parent", "shared", "old", "new", "mark", "set_aside_id", "max_turns"), 7),
    **dict.fromkeys(("attempt", "attempts", "drop_before", "place"), 1),
    **dict.fromkeys(("system_place", "known_system", "known_place", "drop_from"), -1),
    **dict.fromkeys(("lease_seconds", "expires_after"), 1.0),
    **dict.fromkeys(("changes_session", "answers", "flushed", "hands_on"), True),
    **dict.fromkeys(("accepted", "changes_service", "all"), False),
    **dict.fromkeys(("session_key", "known_key"), 2020),
    **dict.fromkeys(("owner", "after_owner", "last_owner"), "owner 1"),
    **dict.fromkeys(("session_id", "after_session_id"), "s1"),
    **dict.fromkeys(("message_id", "after_message_id", "last_message_id"), "m1"),
    "keys": [5001, 5002],
    "versions": [5001],
    "held": [3, 4],
    "watched": [5],
    "session_keys": [20, 40, 60],
    "session_ids": ["s1"],
    "message_ids": ["m1"],
    "owners": ["owner 1"],
    "last_session_id": "s2",
    "service_key": "service 20",
    "turn_id": 777,
    "state": "running",
    "holder": "holder 1",
    "holders": ["holder 1"],
    "mark_id": "mark 7",
    "mark_ids": ["mark 7"],
    "notes": ["erasing:1"],
    "last": 5100,
    "pid": 1,
    "wait": "10s",
    "limit": 100,
}
"""What statements are given, by the names of their parameters."""

OTHERWISE: Final[dict[str, dict[str, Any]]] = {
    "exporting.SESSION_IDS_AFTER": {"after": "s1"},
    "retention.EXPIRED": {"after": NOW},
}
"""Where a name means something else."""

SMALL: Final = {
    "chatflow_meta",  # a handful of rows
    *("chatflow_versions", "chatflow_turn_ids"),  # sequences
    *("pg_namespace", "pg_class_relname_nsp_index"),  # the catalogue, when tables are made
}
"""What any statement may read from end to end."""

EXCEPTED: Final = {
    # Whether there is anything: up to the first row.
    "copy_statements.LOOK": {"chatflow_sessions", "chatflow_processed_messages", "chatflow_set_aside"},
    # Once in a copy, which reads all of it in any case.
    "copy_statements.DELETE_IDS_TO_THE_END": {"chatflow_processed_messages"},
    # A row for each connection of the last days, now and then.
    "statements.PURGE_MARKS": {"chatflow_marks"},
    # All rows that somebody holds; the index has no others.
    "turn_statements.BEATS_OF_ALL": {"chatflow_turns_turn_id_idx"},
    "turn_statements.HOLDERS": {"chatflow_turns_turn_id_idx"},
    "turn_statements.SESSIONS_OF_HOLDERS": {"chatflow_turns_turn_id_idx"},
}

NO_QUERIES: Final = {
    *("database._BEGIN", "database._BEGIN_READING", "schema.MIGRATIONS"),
    *("erasing.VACUUM", "erasing.REWRITE"),  # all that there is, when an owner was erased
    *("copying._HELD", "copying._OTHERS", "copying._DELETE", "copying._INSERT"),  # others' by the kind of what moves
}


def all_named() -> Iterator[tuple[str, object]]:
    """All that is declared as SQL, wherever it stands, by its module's name and its own."""
    for found in pkgutil.iter_modules(chatflow.postgres.__path__):
        module = importlib.import_module(f"chatflow.postgres.{found.name}")
        for name, annotation in module.__annotations__.items():
            if "LiteralString" in annotation:
                yield f"{found.name}.{name}", getattr(module, name)


def all_statements() -> Iterator[tuple[str, str]]:
    """Every statement that there is a plan for, by its name."""
    for name, value in all_named():
        if name in NO_QUERIES:
            continue
        if isinstance(value, str):
            yield name, value
        else:
            assert isinstance(value, tuple)
            yield from ((f"{name} {number}", each) for number, each in enumerate(value))


STATEMENTS: Final = dict(all_statements())

MODES: Final = ("custom", "generic")
"""A connection may get a statement planned each time, for its values, or keep one plan for all values."""


@pytest.fixture(scope="module")
def connection(tmp_path_factory: pytest.TempPathFactory) -> Iterator[psycopg.Connection[Any]]:
    """A connection to filled tables, of which the planner knows what is in them."""
    schema = server.schema_of(tmp_path_factory.mktemp("plans"))
    with psycopg.connect(server.dsn(), autocommit=True) as connection:
        connection.execute(f'SET search_path = "{schema}"'.encode())
        connection.execute(FILLING.encode())
        connection.execute("ANALYZE")
        yield connection
    server.forget(schema)


@pytest.fixture(scope="module")
def indexes(connection: psycopg.Connection[Any]) -> dict[str, str]:
    """The first column of each index."""
    found = connection.execute(
        """
        SELECT indexrelid::regclass::text, pg_get_indexdef(indexrelid, 1, false)
        FROM pg_index JOIN pg_class ON pg_class.oid = indrelid WHERE relnamespace = current_schema()::regnamespace
        """
    )
    return dict(found.fetchall())


def type_of(value: Any) -> str:
    """The type that a store says a parameter has; of text the server finds out what it stands for."""
    if isinstance(value, list):
        return f"{type_of(value[0]).replace('unknown', 'text')}[]" if value else "unknown"
    return {bool: "boolean", int: "bigint", float: "float8", datetime: "timestamptz"}.get(type(value), "unknown")


def plan(connection: psycopg.Connection[Any], name: str, statement: str, mode: str) -> dict[str, Any]:
    """How the server would run a statement: planned for these values, or for all that there may be."""
    known = {**VALUES, **OTHERWISE.get(name, {})}
    arrays = set(re.findall(r"%\((\w+)\)s::[a-z ]+\[\]", statement))
    values: dict[str, Any] = {}
    for each in re.findall(r"%\((\w+)\)s", statement):
        if each.startswith("has_"):
            values[each] = True
        elif each in arrays and not isinstance(known.get(each), list):
            values[each] = []  # the columns of rows that are inserted
        else:
            values[each] = known[each]
    numbers = {each: f"${number}" for number, each in enumerate(values, 1)}
    types = f"({', '.join(map(type_of, values.values()))})" if values else ""
    given = f"({', '.join(['%s'] * len(values))})" if values else ""
    sql = re.sub(r"%\((\w+)\)s", lambda found: numbers[found[1]], statement)
    connection.execute(f"SET plan_cache_mode = force_{mode}_plan".encode())
    connection.execute(f"PREPARE looked_at {types} AS {sql}".encode())
    try:
        cursor = psycopg.ClientCursor(connection)
        cursor.execute(f"EXPLAIN (FORMAT JSON) EXECUTE looked_at {given}".encode(), list(values.values()))
        ((found,),) = cursor.fetchall()
    finally:
        connection.execute("DEALLOCATE looked_at")
    root: dict[str, Any] = found[0]["Plan"]
    return root


def scans(node: dict[str, Any], indexes: dict[str, str]) -> Iterator[str]:
    """What a plan reads from end to end: tables, and indexes of which it does not look up the first column."""
    if node["Node Type"] == "Seq Scan":
        yield node["Relation Name"]
    index: str | None = node.get("Index Name")
    if index is not None and not re.search(rf"\b{indexes.get(index)}\b", node.get("Index Cond", "")):
        yield index
    for each in node.get("Plans", ()):
        yield from scans(each, indexes)


@pytest.mark.parametrize("name", STATEMENTS)
@pytest.mark.parametrize("mode", MODES)
def test_no_scan(name: str, mode: str, connection: psycopg.Connection[Any], indexes: dict[str, str]) -> None:
    """A statement reads no table, and no index, from end to end."""
    found = set(scans(plan(connection, name, STATEMENTS[name], mode), indexes))
    assert found - SMALL - EXCEPTED.get(name, set()) == set()


def test_all_are_looked_at() -> None:
    """What is left out is no query, and every query is used by an operation."""
    others = [value for name, value in all_named() if name in NO_QUERIES and isinstance(value, str)]
    assert not any(re.match(r"\s*(SELECT|INSERT|UPDATE|DELETE|WITH)\b", each) for each in others)
    folder = Path(chatflow.postgres.__path__[0])
    source = "".join(path.read_text(encoding="utf-8") for path in folder.glob("*.py"))
    names = {name.partition(" ")[0].rpartition(".")[2] for name in STATEMENTS}
    assert {name for name in names if len(re.findall(rf"\b{name}\b", source)) < 2} == set()


@pytest.mark.parametrize("mode", MODES)
def test_deleting_cascades_by_index(mode: str, connection: psycopg.Connection[Any], indexes: dict[str, str]) -> None:
    """Deleting a conversation finds its messages and turns by an index that begins with its key, a turn its lines."""
    for table, column in (("messages", "session_key"), ("turns", "session_key"), ("journal", "turn_id")):
        statement = f"SELECT 1 FROM chatflow_{table} WHERE {column} = %({column})s"
        assert set(scans(plan(connection, "", statement, mode), indexes)) == set()


def test_a_turn_is_found_by_itself(indexes: dict[str, str]) -> None:
    """No index begins with who holds a turn: a process may hold thousands, and would look at all for each."""
    assert "holder" not in indexes.values()


@pytest.mark.parametrize("mode", MODES)
def test_bites(mode: str, connection: psycopg.Connection[Any], indexes: dict[str, str]) -> None:
    """A statement without an index is seen, and one that reads a whole index."""
    by_moment = "SELECT 1 FROM chatflow_sessions WHERE updated_at = %(now)s"
    assert set(scans(plan(connection, "", by_moment, mode), indexes)) == {"chatflow_sessions"}
    by_order = "SELECT service_key FROM chatflow_sessions ORDER BY version LIMIT %(limit)s"
    assert set(scans(plan(connection, "", by_order, mode), indexes)) == {"chatflow_sessions_version_key"}
