from __future__ import annotations

import os
from pathlib import Path

import pytest

from chatflow.core.messages import Message, Role
from chatflow.exceptions import StoreError, StoreFormatError
from chatflow.sqlite.store import SQLiteSessionStore
from tests.sqlite.chatflow_agent import old_file
from tests.sqlite.conftest import OpenStore
from tests.sqlite.files import SUPPORT, connect


def read_only(path: Path) -> str:
    """The address under which a store only reads *path*."""
    return f"file:{path}?mode=ro"


async def _filled(store: SQLiteSessionStore) -> None:
    session = await store.get_or_create("s", SUPPORT)
    await session.add_message(Message(Role.USER, "hello"))


async def test_reads(open_store: OpenStore, path: Path) -> None:
    """A store that only reads shows what is in the file, and does not change a byte of it."""
    writer = open_store()
    await _filled(writer)
    await writer.aclose()
    before = path.read_bytes()
    async with SQLiteSessionStore(read_only(path)) as reader:
        assert [message.text for message in (await reader.messages("s")).items] == ["hello"]
        assert await reader.check() == ()
    assert path.read_bytes() == before


async def test_beside_a_writer(open_store: OpenStore, path: Path) -> None:
    """In one process, a store that writes and one that only reads live side by side on a file."""
    writer, reader = open_store(), open_store(read_only(path))
    await _filled(writer)
    assert len((await reader.messages("s")).items) == 1
    await (await writer.get_or_create("s", SUPPORT)).add_message(Message(Role.MODEL, "hi"))
    assert len((await reader.messages("s")).items) == 2


async def test_writes_nothing(open_store: OpenStore, path: Path) -> None:
    """What would change the file is refused, and reading goes on."""
    await _filled(open_store())
    reader = open_store(read_only(path))
    session = await reader.get("s")
    assert session is not None
    with pytest.raises(StoreError, match=r"is only read \(mode=ro\)"):
        await session.add_message(Message(Role.MODEL, "no"))
    with pytest.raises(StoreError, match=r"is only read \(mode=ro\)"):
        await reader.delete("s")
    assert len((await reader.messages("s")).items) == 1


async def test_makes_no_file(open_store: OpenStore, path: Path) -> None:
    """A file that does not exist is an error, and is not made."""
    with pytest.raises(StoreError, match="can't be reached"):
        await open_store(read_only(path)).list_sessions()
    assert not path.exists()


async def test_reads_files_alone(open_store: OpenStore, path: Path) -> None:
    """What is no file is refused, and not waited for."""
    os.mkfifo(path)
    with pytest.raises(StoreError, match="is no file"):
        await open_store(read_only(path)).list_sessions()


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (old_file, "it was written by chatflow-agent, and has to be upgraded first"),
        (Path.touch, "it is empty; opening it for writing makes it a store"),
        (lambda path: path.write_text("Dear diary,\n" * 1000), "not an SQLite database"),
    ],
    ids=["chatflow-agent's", "empty", "text"],
)
async def test_not_ready(open_store: OpenStore, path: Path, make: object, reason: str) -> None:
    """A file that has to be upgraded first, or is no store, is refused untouched."""
    assert callable(make)
    make(path)
    before = path.read_bytes()
    with pytest.raises(StoreFormatError, match=reason):
        await open_store(read_only(path)).list_sessions()
    assert path.read_bytes() == before


async def test_log_of_a_crash(open_store: OpenStore, path: Path, tmp_path: Path) -> None:
    """What a killed program has left in the log is read too, and stays in the log."""
    await _filled(open_store())
    copy = tmp_path / "copy.db"
    log = Path(f"{copy}-wal")
    for source, target in ((path, copy), (Path(f"{path}-wal"), log)):
        target.write_bytes(source.read_bytes())
    before = log.read_bytes()
    async with SQLiteSessionStore(read_only(copy)) as reader:
        assert len((await reader.messages("s")).items) == 1
    assert log.read_bytes() == before


async def test_replaced(open_store: OpenStore, path: Path) -> None:
    """A file that takes the place of the one that was opened is not taken for it."""
    await _filled(open_store())
    reader = open_store(read_only(path))
    await reader.list_sessions()
    path.rename(path.with_name("old.db"))
    with connect(path) as connection:
        connection.execute("CREATE TABLE other (id)")
    with pytest.raises(StoreError, match="another one since it was opened"):
        await reader.list_sessions()
