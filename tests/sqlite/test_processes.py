from __future__ import annotations

import asyncio
import logging
import os
import traceback
from pathlib import Path

import anyio
import pytest

from chatflow.core.holder import new_holder
from chatflow.engines.scripted import ScriptedEngine
from chatflow.exceptions import StoreBusyError, StoreClosedError
from chatflow.runner import Runner
from chatflow.sqlite.store import SQLiteSessionStore
from tests.sqlite.conftest import OpenStore
from tests.sqlite.files import SUPPORT, connect, query, say, until
from tests.sqlite.processes import all_at_once, started


def test_marked_once(path: Path) -> None:
    """8 processes that mark the same 200 ids at once have one winner for each id."""
    won = all_at_once(8, "mark", path, 200)
    assert sorted(number for each in won for number in each) == list(range(200))


def test_answered_once(path: Path) -> None:
    """4 processes that are sent the same messages at once ask the model once for each, and give the same answers."""
    told = all_at_once(4, "run", path, 5)
    assert sum(asked for _, asked in told) == 5
    assert len({tuple(answers) for answers, _ in told}) == 1


@pytest.mark.parametrize("attempt", range(3))
def test_opened_at_once(attempt: int, path: Path) -> None:
    """8 processes that open a new file at the same moment all succeed."""
    assert all_at_once(8, "create", path) == ["created"] * 8
    assert query(path, "SELECT count(*) FROM chatflow_sessions") == [8]


@pytest.mark.slow
def test_opened_at_once_often(tmp_path: Path) -> None:
    """8 processes that open a new file at the same moment succeed each of 30 times."""
    for attempt in range(30):
        assert all_at_once(8, "create", tmp_path / f"{attempt}.db") == ["created"] * 8


def test_one_at_a_time(path: Path) -> None:
    """Turns that several processes take on one conversation never overlap, and all of them are in the history."""
    processes = all_at_once(4, "talk", path, 5)
    said = query(path, "SELECT message_json ->> 'content' FROM chatflow_messages ORDER BY place")
    assert sorted(said) == sorted(f"{process} {number}" for process in processes for number in range(5))


async def test_waits_for_other_process(path: Path, open_store: OpenStore) -> None:
    """A turn waits for those that were queued before it in another process, and sees what they said."""
    with started("hold", path) as other:
        assert other.heard() == "holding"
        session = await open_store().get_or_create("s", SUPPORT)
        assert session.history == []
        mine = asyncio.create_task(say(session, "mine"))
        await until(lambda: session.store.line._waiters)
        other.go_on()
        await mine
        assert [message.text for message in session.history] == ["from the other process", "behind it", "mine"]
        assert other.heard() == "done"


async def test_rows_of_a_living_process(path: Path, open_store: OpenStore) -> None:
    """Opening a file leaves the turns of another process that lives as they are."""
    with started("hold", path) as other:
        assert other.heard() == "holding"
        await open_store().get("s")
        assert query(path, "SELECT state FROM chatflow_turns ORDER BY turn_id") == ["running", "queued"]
        other.go_on()
        assert other.heard() == "done"


def _lines(path: Path) -> list[int]:
    return query(path, "SELECT count(*) FROM chatflow_turns") + query(
        path, "SELECT count(*) FROM chatflow_meta WHERE key LIKE 'commit:%'"
    )


async def test_rows_of_a_killed_process(path: Path, open_store: OpenStore) -> None:
    """Opening a file removes what a killed process has left: turns that ran or waited, and its mark of commits."""
    with started("hold", path) as other:
        assert other.heard() == "holding"
        other.kill()
    assert _lines(path) == [2, 1]
    store = open_store()
    session = await store.get("s")
    assert session is not None
    assert _lines(path) == [0, 0]
    await say(session, "goes on")
    assert [message.text for message in session.history] == ["goes on"]


async def test_waiting_behind_a_killed_process(path: Path, open_store: OpenStore) -> None:
    """A turn that waits behind a process that is killed gets its place, though nobody opens the file."""
    store = open_store()
    session = await store.get_or_create("s", SUPPORT)
    with started("hold", path) as other:
        assert other.heard() == "holding"
        waiting = asyncio.create_task(say(session, "goes on"))
        await until(lambda: bool(store.line._waiters))
        other.kill()
        await waiting
    assert [message.text for message in session.history] == ["goes on"]


async def test_message_of_a_killed_process(path: Path, open_store: OpenStore) -> None:
    """A message whose process is killed runs where its second delivery waits, though nobody opens the file."""
    store = open_store()
    await store.get_or_create("s", SUPPORT)
    runner = Runner(SUPPORT, store, ScriptedEngine(["answered here"]))
    answers: list[str] = []

    async def deliver() -> None:
        answers.append((await runner.run_async("s", "hello", message_id="m")).content)

    with started("ask", path) as other:
        assert other.heard() == "asked"
        waiting = asyncio.create_task(deliver())
        await until(lambda: bool(store.line._waiters))
        other.kill()
        await waiting
    assert answers == ["answered here"]


async def test_nothing_left_behind(path: Path) -> None:
    """A store that is closed leaves neither turns nor a mark of its commits in the file."""
    store = SQLiteSessionStore(path)
    session = await store.get_or_create("s", SUPPORT)
    async with session.turn():
        await store.aclose()
        assert _lines(path) == [0, 0]


async def test_rows_of_a_closed_store(path: Path, open_store: OpenStore) -> None:
    """A row that an earlier store of this process could not remove goes when the file is opened again."""
    first = open_store()
    await first.get_or_create("s", SUPPORT)
    await first.aclose()
    with connect(path) as connection:
        connection.execute(
            "INSERT INTO chatflow_turns"
            " (session_key, state, holder, attempt, attempts, lease_seconds, accepted, queued_at)"
            " SELECT session_key, 'running', ?, 1, 1, 10, 0, '' FROM chatflow_sessions",
            (new_holder(),),
        )
    await open_store().get("s")
    assert _lines(path) == [0, 0]


async def test_held_by_another_process(path: Path, open_store: OpenStore, impatient: None) -> None:
    """A write waits for another process that holds the file, and the error says how long; afterwards it works."""
    store = open_store()
    await store.get_or_create("s", SUPPORT)
    with started("lock", path) as other:
        assert other.heard() == "holding"
        with pytest.raises(StoreBusyError, match=r"busy for 0\.05 s: another writer held it") as caught:
            await store.mark_message_processed("m")
        assert (caught.value.store, caught.value.waited_seconds) == (str(path), 0.05)
        assert not await store.is_message_processed("m")
        other.go_on()
        assert other.heard() == "done"
    assert await store.mark_message_processed("m")


async def test_held_for_a_moment(path: Path, open_store: OpenStore) -> None:
    """A write is only delayed by another process that lets go of the file in time, and the loop runs on meanwhile."""
    store = open_store()
    await store.get_or_create("s", SUPPORT)
    with started("lock", path) as other:
        assert other.heard() == "holding"
        marking = asyncio.create_task(store.mark_message_processed("m"))
        for _ in range(100):
            await asyncio.sleep(0)
        assert not marking.done()
        other.go_on()
        assert await marking
        assert other.heard() == "done"


def test_forked(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that is forked refuses its parent's store, uses one of its own, and the parent goes on."""

    async def refused(store: SQLiteSessionStore) -> str:
        try:
            await store.get("s")
        except StoreClosedError as error:
            return str(error)
        return "not refused"

    async def worked(store: SQLiteSessionStore, logged: list[logging.LogRecord]) -> None:
        async with Runner(SUPPORT, store).working():
            with anyio.fail_after(20):  # the parent's time limit does not end this process
                await until(lambda: bool(logged))

    async def in_child(store: SQLiteSessionStore, memory: SQLiteSessionStore) -> None:
        assert "before this process was forked" in await refused(store)
        assert "before this process was forked" in await refused(memory)
        logged: list[logging.LogRecord] = []
        monkeypatch.setattr(logging.getLogger("chatflow.runner"), "handle", logged.append)
        with pytest.raises(StoreClosedError, match="before this process was forked"):
            await worked(store, logged)
        assert logged[0].getMessage() == "no more work is done: the worker has failed"
        await store.aclose()
        await memory.aclose()
        async with SQLiteSessionStore(path) as own:
            session = await own.get("s")
            assert session is not None
            await say(session, "child")
            await own.get_or_create("child's", SUPPORT)

    async def before() -> tuple[SQLiteSessionStore, SQLiteSessionStore]:
        store, memory = SQLiteSessionStore(path), SQLiteSessionStore("file::memory:?cache=shared")
        await say(await store.get_or_create("s", SUPPORT), "parent")
        await memory.get_or_create("s", SUPPORT)
        return store, memory

    async def after(store: SQLiteSessionStore, memory: SQLiteSessionStore) -> list[str]:
        session = await store.get("s")
        assert session is not None
        await say(session, "parent again")
        assert await memory.get("s") is not None
        await store.aclose()
        await memory.aclose()
        return [message.text for message in session.history]

    stores = asyncio.run(before())
    child = os.fork()
    if not child:
        try:
            asyncio.run(in_child(*stores))
        except BaseException:  # noqa: BLE001  # nothing of the test may go on in the child
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert asyncio.run(after(*stores)) == ["parent", "child", "parent again"]


def test_no_room_at_commit(path: Path) -> None:
    """A commit that the disk has no room for is refused and not stored, and what fits is stored before and after."""
    with started("no_room", path) as program:
        refused, stored, stored_later = program.heard()
    assert str(path) in refused
    assert (stored, stored_later) == (False, True)
    assert query(path, "SELECT session_id FROM chatflow_sessions ORDER BY session_key") == ["before", "small", "big"]
