"""Disks that are full, fail, are taken away or held: an error says so, memory as before, and the next one works."""

from __future__ import annotations

import asyncio
import contextvars
import os
import shutil
import sqlite3
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import attrs
import pytest

from chatflow.core.agent import Agent
from chatflow.core.messages import Message, Role, ToolCall
from chatflow.core.session import SessionContext
from chatflow.engines.scripted import ScriptedEngine
from chatflow.exceptions import StoreBusyError, StoreError
from chatflow.runner import Runner
from chatflow.sqlite import statements, turn_statements
from chatflow.sqlite.store import SQLiteSessionStore
from tests.sqlite.conftest import Failing, OpenStore
from tests.sqlite.files import SUPPORT, held, query, say
from tests.sqlite.processes import started

BILLING: Final = Agent(name="Billing")


@attrs.frozen
class Fault:
    """What SQLite says, and what we say to that."""

    code: int
    message: str
    advice: str


FAULTS: Final = {
    "full": Fault(sqlite3.SQLITE_FULL, "database or disk is full", "make room on the disk"),
    "I/O": Fault(sqlite3.SQLITE_IOERR, "disk I/O error", "look at the disk and its file system"),
    "I/O, extended": Fault(sqlite3.SQLITE_IOERR_FSYNC, "disk I/O error", "look at the disk and its file system"),
    "read-only": Fault(sqlite3.SQLITE_READONLY, "attempt to write a readonly database", "folder writable"),
    "damaged": Fault(sqlite3.SQLITE_CORRUPT, "database disk image is malformed", "restore a backup"),
}
MOMENTS: Final = {
    "queue": turn_statements.QUEUE_FIRST,
    "end": turn_statements.END_TURN,
    "messages": statements.INSERT_MESSAGES,
    "COMMIT": "COMMIT",
}


def shown(session: SessionContext) -> dict[str, Any]:
    """All that a session shows."""
    return {
        "history": [message.text for message in session.history],
        "agent": session.active_agent_name,
        "state": dict(session.state),
        "metadata": dict(session.metadata),
    }


async def change(session: SessionContext) -> None:
    """A turn that changes everything."""
    async with session.turn():
        await session.add_message(Message(Role.USER, "changed"))
        await session.set_active_agent(BILLING)
        session.state["changed"] = True
        session.metadata["changed"] = True


CHANGED: Final = {
    "history": ["hello", "changed"],
    "agent": "Billing",
    "state": {"changed": True},
    "metadata": {"channel": "web", "changed": True},
}


@asynccontextmanager
async def sample(store: SQLiteSessionStore) -> AsyncIterator[SessionContext]:
    """A conversation that is to be as before at the end of the block, in memory and on the disk, and then to work."""
    session = await store.get_or_create("s", SUPPORT, {"channel": "web"})
    await say(session, "hello")
    before = shown(session)
    yield session
    assert shown(session) == before
    again = await store.get("s")
    assert again is session
    assert shown(session) == before
    await change(session)
    assert shown(session) == CHANGED
    assert query(store.name, "SELECT count(*) FROM chatflow_turns") == [0]


@pytest.mark.parametrize("moment", MOMENTS.values(), ids=MOMENTS.keys())
@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS.keys())
async def test_failing_turn(
    fault: Fault, moment: str, failing: type[Failing], store: SQLiteSessionStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A turn that the disk fails at any step leaves memory and file as before, says why, and the next one works."""
    monkeypatch.setattr(failing, "code", fault.code)
    monkeypatch.setattr(failing, "message", fault.message)
    async with sample(store) as session:
        failing.before.add(moment)
        with pytest.raises(StoreError) as caught:
            await change(session)
        failing.before.clear()
        assert store.name in str(caught.value)
        if moment != "COMMIT":  # of which the file itself is asked what came of it
            assert fault.message in str(caught.value)
            assert fault.advice in str(caught.value)
            assert isinstance(caught.value.__cause__, sqlite3.OperationalError)


async def test_failing_method_outside_turns(failing: type[Failing], store: SQLiteSessionStore) -> None:
    """A method outside of turns that the disk fails leaves memory and file as before, and works when tried again."""
    async with sample(store) as session:
        failing.before.add(statements.INSERT_MESSAGES)
        for _ in range(2):
            with pytest.raises(StoreError):
                await session.add_message(Message(Role.USER, "lost"))
        failing.before.clear()


async def test_waiting_changes(failing: type[Failing], store: SQLiteSessionStore) -> None:
    """A change that waited for a turn which the disk has failed goes on waiting, and joins the next."""
    session = await store.get_or_create("s", SUPPORT)
    session.state["waits"] = 1
    failing.before.add(turn_statements.END_TURN)
    with pytest.raises(StoreError):
        await session.save()
    failing.before.clear()
    assert session.state == {"waits": 1}
    await session.save()
    assert query(store.name, "SELECT state_json FROM chatflow_sessions") == ['{"waits":1}']


async def test_failing_journal(failing: type[Failing], store: SQLiteSessionStore) -> None:
    """A run whose journal can't be written calls no tool, and goes on when its message is sent again."""
    failing.before.add(turn_statements.WRITE_JOURNAL)
    agent = Agent(name="Support", tools=[look_up])
    called.clear()
    engine = ScriptedEngine([ToolCall(id="c", name="look_up"), ToolCall(id="c", name="look_up"), "found"])
    runner = Runner(agent, store, engine)
    with pytest.raises(StoreError):
        await runner.run_async("s", "hello", message_id="m")
    assert called == []
    failing.before.clear()
    assert (await runner.run_async("s", "hello", message_id="m")).content == "found"
    assert called == [1]


called: list[int] = []


async def look_up() -> str:
    """Look it up."""
    called.append(1)
    return "found"


async def test_place_given_back_later(failing: type[Failing], store: SQLiteSessionStore) -> None:
    """Where not even the place of a failed turn can be given back, that is done before the next turn."""
    async with sample(store) as session:
        failing.before.update({turn_statements.END_TURN, turn_statements.DELETE_ROW})
        with pytest.raises(StoreError):
            await change(session)
        assert query(store.name, "SELECT state FROM chatflow_turns") == ["running"]
        failing.before.clear()


def test_no_room_for_a_turn(path: Path) -> None:
    """A message whose answer a full disk has no room for leaves no trace, and goes on when there is room."""
    with started("no_room_for_a_turn", path) as program:
        refused, after, content, later, history, pending = program.heard()
    assert str(path) in refused
    assert (after, content, later) == (0, "small", 1_000_000)
    assert history == ["hello", "small", "big", "yyyyy"]
    assert pending == 0
    assert query(path, "PRAGMA integrity_check") == ["ok"]


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that everyone can reach."""
    folder = Path(tempfile.mkdtemp(prefix="chatflow"))
    folder.chmod(0o755)
    yield folder
    folder.chmod(0o755)
    shutil.rmtree(folder)


def test_read_only_folder(open_folder: Path) -> None:
    """A store in a folder that may not be written to says so, and works as soon as it may."""
    with started("in_read_only_folder", open_folder) as program:
        refused, history = program.heard()
    assert str(open_folder) in refused
    assert "writ" in refused
    assert history == ["before", "after"]


async def test_read_only_file(path: Path, open_store: OpenStore) -> None:
    """A store on a file that may not be written to says so, and works as soon as it may."""
    first = open_store()
    await say(await first.get_or_create("s", SUPPORT), "before")
    await first.aclose()
    path.chmod(0o444)
    store = open_store()
    with pytest.raises(StoreError, match="is read-only; make the file writable"):
        await store.get_or_create("s", SUPPORT)
    path.chmod(0o644)
    session = await store.get_or_create("s", SUPPORT)
    await say(session, "after")
    assert [message.text for message in session.history] == ["before", "after"]


async def test_file_held_at_commit(path: Path, store: SQLiteSessionStore, impatient: None) -> None:
    """A turn whose commit somebody else's lock outlasts leaves no trace, says so, and the next one works."""
    async with sample(store) as session:
        with pytest.raises(StoreBusyError):  # noqa: PT012  # the turn fails at its end
            async with session.turn():
                await session.add_message(Message(Role.USER, "lost"))
                lock = held(path)
                lock.__enter__()  # until after the turn
        lock.__exit__(None, None, None)


# --- files that are taken away ---


def unlink(path: Path) -> None:
    """Delete the file, but keep what it has been, as a program does that still has it open."""
    os.link(path, path.with_suffix(".kept"))
    path.unlink()


def replace(path: Path) -> None:
    """Put another file in its place."""
    unlink(path)
    path.with_suffix(".new").touch()
    path.with_suffix(".new").rename(path)


TAKEN: Final[dict[str, tuple[Callable[[Path], None], str]]] = {
    "deleted": (unlink, "is gone"),
    "replaced": (replace, "is another one"),
}


@pytest.mark.parametrize(("take", "what"), TAKEN.values(), ids=TAKEN.keys())
async def test_file_taken_away(take: Callable[[Path], None], what: str, path: Path, store: SQLiteSessionStore) -> None:
    """Where its file was deleted or replaced a store says so for whatever it is asked; put back, all goes on."""
    async with sample(store) as session:
        take(path)
        with pytest.raises(StoreError, match=f"{what} since it was opened"):
            await change(session)
        with pytest.raises(StoreError, match=f"{what} since it was opened"):
            await store.get("s")
        with pytest.raises(StoreError, match=f"{what} since it was opened"):
            await store.mark_message_processed("m")
        path.with_suffix(".kept").rename(path)


async def test_file_taken_away_under_a_turn(path: Path, store: SQLiteSessionStore) -> None:
    """A turn whose file is deleted meanwhile can't commit: nobody is told of an answer that nobody finds again."""
    async with sample(store) as session:
        with pytest.raises(StoreError, match="is gone since"):  # noqa: PT012  # the turn fails at its end
            async with session.turn():
                await session.add_message(Message(Role.USER, "lost"))
                unlink(path)
        path.with_suffix(".kept").rename(path)


async def test_opened_again_without_its_file(failing: type[Failing], path: Path, store: SQLiteSessionStore) -> None:
    """A store that has to open its file again, after an error, makes no new one where the file was taken away."""
    await say(await store.get_or_create("s", SUPPORT), "hello")
    failing.before.update({"COMMIT", "ROLLBACK"})
    with pytest.raises(StoreError):
        await store.mark_message_processed("m")
    failing.before.clear()
    unlink(path)
    with pytest.raises(StoreError, match="is gone since it was opened"):
        await store.mark_message_processed("m")
    assert not path.exists()
    path.with_suffix(".kept").rename(path)
    assert await store.mark_message_processed("m")


async def test_opened_anew(path: Path, store: SQLiteSessionStore, open_store: OpenStore) -> None:
    """A store that is closed and opened again takes the file that is there now."""
    await say(await store.get_or_create("s", SUPPORT), "hello")
    path.unlink()
    with pytest.raises(StoreError, match="is gone"):
        await store.get("s")
    await store.aclose()
    again = open_store()
    assert await again.get("s") is None
    await say(await again.get_or_create("s", SUPPORT), "new")


async def test_many_turns_on_a_failing_disk(failing: type[Failing], store: SQLiteSessionStore) -> None:
    """Of many turns at once on a disk that fails for a while, those told of success are stored, and no other."""
    sessions = [await store.get_or_create(str(number), SUPPORT) for number in range(20)]
    failing.after.add("COMMIT")
    failing.before.add(statements.INSERT_MESSAGES)

    async def one(session: SessionContext) -> bool:
        try:
            await say(session, "hello")
        except StoreError:
            return False
        return True

    tasks = [asyncio.create_task(one(session), context=contextvars.Context()) for session in sessions]
    await tasks[0]
    failing.before.clear()
    told = await asyncio.gather(*tasks)
    assert not told[0]
    for session, success in zip(sessions, told, strict=True):
        assert len((await store.messages(session.session_id)).items) == len(session.history) == success
        await say(session, "again")
