from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Final

import pytest

from chatflow.exceptions import StoreError, StoreFormatError
from chatflow.sqlite.store import SQLiteSessionStore
from tests.sqlite.chatflow_agent import old_file
from tests.sqlite.conftest import OpenStore
from tests.sqlite.files import RELEASED, SUPPORT, around, connect, query

Spoil = Callable[[Path], object]

ALMOST_CHATFLOW_AGENTS: Final = """
    CREATE TABLE chatflow_sessions (
        session_id TEXT PRIMARY KEY, active_agent_name TEXT, metadata_json TEXT, created_at TEXT, updated_at TEXT
    );
    CREATE TABLE chatflow_messages (id INTEGER PRIMARY KEY, session_id TEXT, message_json TEXT, created_at TEXT);
    PRAGMA user_version = 1;
"""


def _of(script: str) -> Spoil:
    def make(path: Path) -> None:
        with connect(path) as connection:
            connection.executescript(script)

    return make


def _of_chatflow_agent(script: str) -> Spoil:
    return lambda path: _of(script)(old_file(path))


def _of_format(value: str) -> Spoil:
    return _of(f"CREATE TABLE chatflow_meta (key, value); INSERT INTO chatflow_meta VALUES ('format', {value})")


FORMATS: Final[dict[str, tuple[Spoil, str]]] = {
    "text": (lambda path: path.write_text("Dear diary,\n" * 1000), "not an SQLite database"),
    "short text": (lambda path: path.write_text("x"), "not an SQLite database"),
    "garbage with a header": (
        lambda path: path.write_bytes(b"SQLite format 3\0" + bytes(range(256)) * 64),
        "not an SQLite database",
    ),
    "another program's": (_of("CREATE TABLE orders (id)"), "another program's"),
    "another program's in WAL mode": (_of("PRAGMA journal_mode=WAL; CREATE TABLE orders (id)"), "another program's"),
    "with nothing but a view": (_of("CREATE VIEW orders AS SELECT 1 AS id"), "another program's"),
    "newer": (_of_format("'999'"), "its format is '999'"),
    "far newer": (_of_format("'" + "9" * 5000 + "'"), "its format is '999"),
    "of no format": (_of("CREATE TABLE chatflow_meta (key, value)"), "names no format"),
    "of a format that is no number": (_of_format("'²'"), "names no format"),
    "of a format of another type": (_of_format("-1"), "names no format"),
    "of our format without our tables": (_of_format("'1'"), "no table chatflow_messages"),
    "with a table of the name of ours": (_of("CREATE TABLE chatflow_meta (id, name)"), "another program's"),
    "with sessions of its own": (_of(ALMOST_CHATFLOW_AGENTS), "neither chatflow's nor that of chatflow-agent"),
    "with sessions of its own alone": (_of("CREATE TABLE chatflow_sessions (id)"), "neither chatflow's nor"),
    "chatflow-agent's with a table in our way": (
        _of_chatflow_agent("CREATE TABLE Chatflow_Turns (id)"),
        "its table chatflow_turns has a name that chatflow needs; rename it",
    ),
    "chatflow-agent's with a trigger": (
        _of_chatflow_agent("CREATE TRIGGER mine AFTER INSERT ON chatflow_messages BEGIN SELECT 1; END"),
        "lose its trigger mine on chatflow_messages; drop it",
    ),
    "chatflow-agent's with a reference": (
        _of_chatflow_agent("CREATE TABLE orders (session REFERENCES Chatflow_Sessions (session_id))"),
        "its table orders refers to chatflow-agent's tables",
    ),
}


@pytest.mark.parametrize("kind", FORMATS)
async def test_not_ours(kind: str, path: Path, open_store: OpenStore) -> None:
    """A file that is not ours, or newer, is refused by name and reason, and is byte for byte as it was."""
    spoil, reason = FORMATS[kind]
    spoil(path)
    before, files = path.read_bytes(), around(path)
    store = open_store()
    with pytest.raises(StoreFormatError, match=reason) as caught:
        await store.get_or_create("s", SUPPORT)
    assert (caught.value.store, path.name in str(caught.value)) == (str(path), True)
    await store.aclose()
    assert (path.read_bytes(), around(path)) == (before, files)


@pytest.mark.parametrize("kind", FORMATS)
async def test_works_once_mended(kind: str, path: Path, open_store: OpenStore) -> None:
    """The same store works once the file that it refused is gone."""
    FORMATS[kind][0](path)
    store = open_store()
    with pytest.raises(StoreFormatError):
        await store.get("s")
    for each in path.parent.iterdir():
        each.unlink()
    await store.get_or_create("s", SUPPORT)
    assert await store.get("s") is not None


WITH_A_LOG: Final = """
import os, sqlite3, sys
connection = sqlite3.connect(sys.argv[1], isolation_level=None)
connection.execute("PRAGMA journal_mode=WAL")
connection.execute("CREATE TABLE orders (id)")
os._exit(0)
"""
WITH_A_JOURNAL: Final = """
import os, sqlite3, sys
connection = sqlite3.connect(sys.argv[1], isolation_level=None)
connection.execute("CREATE TABLE orders (id)")
connection.execute("INSERT INTO orders VALUES (zeroblob(100000))")
connection.execute("PRAGMA cache_size=1")
connection.execute("BEGIN")
connection.execute("UPDATE orders SET id = zeroblob(200000)")
os._exit(0)
"""


def crash(path: Path, script: str) -> dict[str, bytes]:
    """Let another program crash with the file open, and return what it has left."""
    subprocess.run([sys.executable, "-c", script, str(path)], check=True, timeout=50)
    return contents(path)


def contents(path: Path) -> dict[str, bytes]:
    """The files of its folder."""
    return {each.name: each.read_bytes() for each in path.parent.iterdir()}


@pytest.mark.parametrize("script", [WITH_A_LOG, WITH_A_JOURNAL])
@pytest.mark.parametrize("address", ["{}", "file:{}", "file:{}?cache=private"])
async def test_crashed_of_another_program(script: str, address: str, path: Path, open_store: OpenStore) -> None:
    """A database in which another program crashed is refused, its log and journal byte for byte as they were."""
    before = crash(path, script)
    assert len(before) > 1
    store = open_store(address.format(path))
    with pytest.raises(StoreFormatError, match="another program's"):
        await store.get("s")
    await store.aclose()
    assert contents(path) == before


async def test_crashed_by_another_name(path: Path, open_store: OpenStore) -> None:
    """The log that is looked for is that of the file which a link leads to."""
    before = crash(path, WITH_A_LOG)
    folder = path.parent / "links"
    folder.mkdir()
    link = folder / "link.db"
    link.symlink_to(path)
    with pytest.raises(StoreFormatError, match="another program's"):
        await open_store(link).get("s")
    link.unlink()
    folder.rmdir()
    assert contents(path) == before


async def test_log_without_index(path: Path, open_store: OpenStore) -> None:
    """A copy of such a database that lacks the log's index is refused, its file and log byte for byte as they were."""
    before = crash(path, WITH_A_LOG)
    path.with_name(f"{path.name}-shm").unlink()
    with pytest.raises(StoreFormatError, match="another program's"):
        await open_store().get("s")
    after = contents(path)
    assert [after[name] for name in (path.name, f"{path.name}-wal")] == [
        before[name] for name in (path.name, f"{path.name}-wal")
    ]


@pytest.mark.parametrize(
    "script",
    [WITH_A_LOG, WITH_A_JOURNAL.replace('"UPDATE', '"CREATE TABLE chatflow_x (id)"); connection.execute("UPDATE')],
)
async def test_crashed_of_ours(script: str, path: Path, open_store: OpenStore) -> None:
    """A database that a crash left with a log or journal, and that may be ours, is opened once SQLite has mended it."""
    released = RELEASED.joinpath("1.sql").read_text(encoding="utf-8")
    create = f'''connection.executescript("""{released}INSERT INTO chatflow_meta VALUES ('format', '1')""")'''
    crash(
        path,
        script.replace(
            'connection.execute("CREATE TABLE orders (id)")',
            create + "\n" + 'connection.execute("CREATE TABLE orders (id)")',
        ),
    )
    await open_store().get_or_create("s", SUPPORT)
    assert query(path, "SELECT name FROM sqlite_master WHERE name IN ('orders', 'chatflow_x')") == ["orders"]


def _truncate(path: Path) -> None:
    with connect(path) as connection:
        connection.executescript(
            "CREATE TABLE chatflow_meta (key, value); CREATE TABLE t (x); INSERT INTO t VALUES (zeroblob(100000))"
        )
    os.truncate(path, 1000)


async def test_truncated(path: Path, open_store: OpenStore) -> None:
    """A database of which a part is missing is refused as damaged, with advice, and left as it was."""
    _truncate(path)
    before = path.read_bytes()
    with pytest.raises(StoreError, match="recover") as caught:
        await open_store().get("s")
    assert (caught.value.store, type(caught.value.__cause__)) == (str(path), sqlite3.DatabaseError)
    assert path.read_bytes() == before


def _fill(path: Path) -> None:
    with connect(path) as connection:
        connection.execute("CREATE TABLE orders (id)")


async def test_errors_of_one_group(path: Path, open_store: OpenStore) -> None:
    """Two tasks that a file is refused to get an error each, not one between them."""
    _fill(path)
    store = open_store()
    errors = []
    for _ in range(2):
        with pytest.raises(StoreFormatError) as caught:
            await store.get("s")
        errors.append(caught.value)
    assert errors[0] is not errors[1]


async def test_folder(path: Path, open_store: OpenStore) -> None:
    """A folder is refused, and stays empty."""
    path.mkdir()
    store = open_store()
    with pytest.raises(StoreError, match="is a folder") as caught:
        await store.get("s")
    assert caught.value.store == str(path)
    assert (around(path), list(path.iterdir())) == ([path.name], [])
    path.rmdir()
    assert await store.get("s") is None


async def test_folders_are_made(tmp_path: Path, open_store: OpenStore) -> None:
    """The folders above a file are created."""
    path = tmp_path / "a" / "b" / "chat.db"
    await open_store(path).get_or_create("s", SUPPORT)
    assert query(path, "SELECT session_id FROM chatflow_sessions") == ["s"]


async def test_folder_is_a_file(path: Path, open_store: OpenStore) -> None:
    """A path through a file is refused, the file untouched, and works once the file is gone."""
    path.write_text("hello")
    store = open_store(path / "x" / "chat.db")
    with pytest.raises(StoreError, match="can't be reached") as caught:
        await store.get("s")
    assert isinstance(caught.value.__cause__, OSError)
    assert path.read_text() == "hello"
    path.unlink()
    assert await store.get("s") is None


async def test_name_too_long(tmp_path: Path, open_store: OpenStore) -> None:
    """A name that the file system does not take is refused."""
    with pytest.raises(StoreError, match="can't be reached"):
        await open_store(tmp_path / ("x" * 10_000)).get("s")


async def test_read_only(path: Path, open_store: OpenStore) -> None:
    """A file that nobody may write to is refused, untouched, also for root; once it may be written to it works."""
    await open_store().get_or_create("s", SUPPORT)
    await open_store().aclose()
    earlier = SQLiteSessionStore(path)
    await earlier.aclose()
    copy = path.with_name("copy.db")
    with connect(path) as connection, connect(copy) as target:
        connection.backup(target)
    copy.chmod(0o444)
    before = copy.read_bytes()
    store = open_store(copy)
    with pytest.raises(StoreError, match="is read-only; make the file writable"):
        await store.get("s")
    assert copy.read_bytes() == before
    assert [name for name in around(path) if name.startswith("copy.db-")] == []
    copy.chmod(0o644)
    assert await store.get("s") is not None


AS_SOMEBODY: Final = """
import asyncio, json, os, sys
from chatflow.core.agent import Agent
from chatflow.exceptions import StoreError
from chatflow.sqlite.store import SQLiteSessionStore

async def main(path):
    store = SQLiteSessionStore(path)
    try:
        await store.get_or_create("s", Agent(name="Support"))
    except StoreError as error:
        print(json.dumps([type(error).__name__, str(error)]))
    await store.aclose()

if os.geteuid() == 0:
    os.seteuid(65534)
asyncio.run(main(sys.argv[1]))
"""


@pytest.mark.parametrize("existing", [False, True])
def test_folder_without_permission(existing: bool) -> None:
    """A folder that may not be written to is refused by the file's name, and nothing in it changes."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "chat.db"
        if existing:
            with connect(path) as connection:
                connection.executescript("PRAGMA journal_mode=WAL")
            path.chmod(0o666)
        before = {each.name: each.read_bytes() for each in path.parent.iterdir()}
        path.parent.chmod(0o555)
        ran = subprocess.run(
            [sys.executable, "-c", AS_SOMEBODY, str(path)], stdout=subprocess.PIPE, check=True, timeout=50
        )
        kind, message = json.loads(ran.stdout)
        assert (kind, str(path) in message) == ("StoreError", True)
        assert {each.name: each.read_bytes() for each in path.parent.iterdir()} == before
        path.parent.chmod(0o755)


async def test_empty_file(path: Path, open_store: OpenStore) -> None:
    """An empty file is taken."""
    path.touch()
    await open_store().get_or_create("s", SUPPORT)
    assert query(path, "SELECT session_id FROM chatflow_sessions") == ["s"]


async def test_others_tables(path: Path, open_store: OpenStore) -> None:
    """A file that has our tables is ours, and another program's table in it stays as it is."""
    first = open_store()
    await first.get_or_create("s", SUPPORT)
    await first.aclose()
    with connect(path) as connection:
        connection.executescript(
            """
            CREATE TABLE orders (id INTEGER PRIMARY KEY, session TEXT);
            INSERT INTO orders (session) VALUES ('s');
            PRAGMA user_version = 42;
            PRAGMA application_id = 7;
            """
        )
    store = open_store()
    assert await store.delete("s")
    await store.clear()
    await store.aclose()
    assert query(path, "SELECT * FROM orders") == [(1, "s")]
    assert query(path, "PRAGMA user_version") + query(path, "PRAGMA application_id") == [42, 7]


async def test_dangling_link(path: Path, open_store: OpenStore) -> None:
    """A link to a file that is not there yet makes that file."""
    path.symlink_to(path.with_name("target.db"))
    await open_store().get_or_create("s", SUPPORT)
    assert query(path.with_name("target.db"), "SELECT session_id FROM chatflow_sessions") == ["s"]
