from __future__ import annotations

import sqlite3
import threading
from contextlib import closing
from pathlib import Path
from typing import Any, Final

import pytest

from chatflow.exceptions import StoreError
from chatflow.sqlite.location import locate
from chatflow.sqlite.store import SQLiteSessionStore
from tests.sqlite.conftest import OpenStore
from tests.sqlite.files import SUPPORT, around, query

PRIVATE: Final = (":memory:", "file::memory:", "file:x?mode=memory", "file:x?vfs=memdb", "file:%3Amemory%3A")
SHARED: Final = (
    "file::memory:?cache=shared",
    "file:x?mode=memory&cache=shared",
    "file:x?cache=shared&mode=memory#part",
    "file:y%20z?mode=%6demory&cache=shared",
    "file:/x?vfs=memdb",
)
FILES: Final = (
    "chat.db",
    "./:memory:",
    ":MEMORY:",
    "memory",
    "file",
    "FILE:x?mode=memory",
    "a?mode=memory",
    "50%.db",
    "file:disk.db?cache=shared",
    "file:disk.db",
    "file:disk.db?mode=rwc#part",
    "file:x%3Fmode=memory",
    "file:x%3Fmode%3Dmemory%26cache%3Dshared",
    "file:a+b.db",
    "file:a%20b.db",
    "file:a\nb.db",
    "file:x?modus=memory",
)


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def files_that_sqlite_makes(spelling: str) -> list[str]:
    """What SQLite itself makes of a spelling."""
    with closing(sqlite3.connect(spelling, uri=spelling.startswith("file:"))) as connection:
        connection.execute("CREATE TABLE t (x)")
        connection.commit()
    return sorted(each.name for each in Path().iterdir())


@pytest.mark.parametrize("spelling", [*PRIVATE, *SHARED])
def test_memory_as_sqlite_has_it(spelling: str) -> None:
    """An address in memory is one for SQLite, too: it makes no file."""
    assert locate(spelling).path is None
    assert files_that_sqlite_makes(spelling) == []


@pytest.mark.parametrize("spelling", FILES)
def test_file_as_sqlite_has_it(spelling: str) -> None:
    """Every other spelling is the file that SQLite makes of it."""
    path = locate(spelling).path
    assert path is not None
    assert files_that_sqlite_makes(spelling) == [path.name]


@pytest.mark.parametrize("spelling", PRIVATE)
async def test_private(spelling: str, open_store: OpenStore) -> None:
    """Each store on an address that is not shared has a database of its own."""
    store, second = open_store(spelling), open_store(spelling)
    await store.get_or_create("s", SUPPORT)
    assert await second.get("s") is None


@pytest.mark.parametrize("spelling", SHARED)
async def test_shared(spelling: str, open_store: OpenStore) -> None:
    """Two stores on a shared address have the same conversations."""
    store, second = open_store(spelling), open_store(spelling)
    await store.get_or_create("s", SUPPORT)
    assert await second.get("s") is not None


@pytest.mark.parametrize("spelling", SHARED)
async def test_shared_with_sqlite(spelling: str, open_store: OpenStore) -> None:
    """A plain connection of the same program reads what a store on a shared address holds."""
    await open_store(spelling).get_or_create("s", SUPPORT)
    assert query(spelling, "SELECT session_id FROM chatflow_sessions") == ["s"]


@pytest.mark.parametrize("spelling", SHARED)
async def test_gone_with_the_last(spelling: str, open_store: OpenStore) -> None:
    """What a shared address holds stays while one store is open, and is gone after the last one."""
    store, second = open_store(spelling), open_store(spelling)
    await store.get_or_create("s", SUPPORT)
    await second.get("s")
    await store.aclose()
    assert await second.get("s") is not None
    await second.aclose()
    assert await open_store(spelling).get("s") is None


@pytest.mark.parametrize("spelling", ["file:?mode=memory&cache=shared", "file:?vfs=memdb"])
async def test_without_a_name(spelling: str, open_store: OpenStore) -> None:
    """A database in memory that is to be shared but has no name is private, as it is for SQLite."""
    store, second = open_store(spelling), open_store(spelling)
    await store.get_or_create("s", SUPPORT)
    assert await second.get("s") is None


@pytest.mark.parametrize("spelling", [*PRIVATE, *SHARED])
async def test_no_thread(spelling: str, open_store: OpenStore) -> None:
    """A database in memory starts no thread."""
    before = set(threading.enumerate())
    store = open_store(spelling)
    await store.get_or_create("s", SUPPORT)
    assert await store.mark_message_processed("m")
    assert set(threading.enumerate()) == before


@pytest.mark.parametrize("path", [Path(":memory:"), Path("file::memory:?cache=shared"), Path("~/x.db")], ids=str)
async def test_path_object(path: Path, open_store: OpenStore) -> None:
    """A path object is a file, whatever its name looks like."""
    store = open_store(path)
    await store.get_or_create("s", SUPPORT)
    assert query(path.absolute(), "SELECT session_id FROM chatflow_sessions") == ["s"]


async def test_relative(tmp_path: Path, open_store: OpenStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """A relative path means the folder in which the store was made, also when the program goes elsewhere."""
    (tmp_path / "elsewhere").mkdir()
    plain, address = open_store("chat.db"), open_store("file:disk.db?cache=shared")
    monkeypatch.chdir(tmp_path / "elsewhere")
    await plain.get_or_create("s", SUPPORT)
    await address.get_or_create("s", SUPPORT)
    assert list(Path().iterdir()) == []
    assert {"chat.db", "disk.db"} <= {each.name for each in tmp_path.iterdir()}


@pytest.mark.parametrize(
    "spellings", [("chat.db", "./x/../chat.db"), ("chat.db", "file:chat.db"), ("chat.db", Path("chat.db"))]
)
async def test_one_database_a_file(spellings: tuple[Any, Any], open_store: OpenStore) -> None:
    """Two stores of a process on one file share its two threads."""
    before = set(threading.enumerate())
    for spelling in spellings:
        await open_store(spelling).get_or_create("s", SUPPORT)
    assert len(set(threading.enumerate()) - before) == 2


@pytest.mark.parametrize("link", ["symlink_to", "hardlink_to"])
async def test_second_name(link: str, path: Path, open_store: OpenStore) -> None:
    """A file that is open in this process is refused under another name, and the error names both."""
    await open_store().get_or_create("s", SUPPORT)
    other = path.with_name("other.db")
    getattr(other, link)(path)
    with pytest.raises(StoreError, match=r"other\.db.* is open in this process as .*chat\.db") as caught:
        await open_store(other).get_or_create("t", SUPPORT)
    assert caught.value.store == str(other)


async def test_second_name_later(path: Path, open_store: OpenStore) -> None:
    """A name that was refused works once the other store is closed, and does not hold up the first name."""
    first = open_store()
    await first.get_or_create("s", SUPPORT)
    other = path.with_name("other.db")
    other.symlink_to(path)
    second = open_store(other)
    with pytest.raises(StoreError):
        await second.get("s")
    await first.aclose()
    third = open_store()
    assert await third.get("s") is not None
    await third.aclose()
    assert await second.get("s") is not None


@pytest.mark.parametrize(
    "spelling", ["", "a\0b", "file:a%00b", "file:", "file:?cache=shared", "file://elsewhere/chat.db", Path("a\0b")]
)
def test_no_file(spelling: Any) -> None:
    """A name that can't be a file's is refused when the store is made."""
    with pytest.raises(ValueError, match="db_path"):
        SQLiteSessionStore(spelling)


@pytest.mark.parametrize("spelling", [None, 5, b"chat.db", True])
def test_no_path(spelling: Any) -> None:
    """What is neither text nor a path is refused when the store is made."""
    with pytest.raises(TypeError, match="db_path"):
        SQLiteSessionStore(spelling)


def test_path_of_bytes() -> None:
    """A path object that stands for bytes is refused when the store is made."""

    class Bytes:
        def __fspath__(self) -> bytes:
            return b"chat.db"

    with pytest.raises(TypeError, match="bytes"):
        SQLiteSessionStore(Bytes())  # type: ignore[arg-type]


@pytest.mark.parametrize("spelling", ["file:///{}/chat.db", "file://localhost/{}/chat.db", "file:{}/chat.db"])
async def test_absolute_address(spelling: str, tmp_path: Path, path: Path, open_store: OpenStore) -> None:
    """An address with an absolute path is that file."""
    await open_store(spelling.format(str(tmp_path).lstrip("/") if "//" in spelling else tmp_path)).get("s")
    assert "chat.db" in around(path)
