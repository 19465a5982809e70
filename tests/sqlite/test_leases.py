"""Turns of several processes: stopped ones are overtaken, living ones waited for, and dead ones seen at once."""

from __future__ import annotations

import asyncio
import contextvars
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import pytest

from chatflow.core.holder import new_holder
from chatflow.core.messages import Message, Role
from chatflow.core.records import Beat, Beaten
from chatflow.core.session import SessionContext
from chatflow.engines.scripted import ScriptedEngine
from chatflow.exceptions import SessionDeletedError, StoreError
from chatflow.runner import Runner
from chatflow.sqlite.store import SQLiteSessionStore
from tests.sqlite.files import SUPPORT, connect, held, query, say, until
from tests.sqlite.processes import started

SHORT: Final = 0.3
"""The lease of a process that is stopped: what it is matters only to who waits for it."""

LONG: Final = 1.5
"""The lease of a process that lives: it beats twice a second, and this machine may be slow."""

ENOUGH: Final = 2 * 4 * LONG / SHORT
"""Beats of one that waits, by its own lease, in which it would have overtaken a stopped process twice."""


class Watching(SQLiteSessionStore):
    """Notes its beats, and what came of them."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.beaten = 0
        self.failed = 0
        self.interrupted: list[Beat] = []

    async def beat_turns(self, held: frozenset[int], watched: frozenset[int], *, everything: bool) -> Beaten:
        try:
            found = await super().beat_turns(held, watched, everything=everything)
        except StoreError:
            self.failed += 1
            raise
        self.beaten += 1
        return found

    async def interrupt_turn(self, beat: Beat) -> bool:
        marked = await super().interrupt_turn(beat)
        if marked:
            self.interrupted.append(beat)
        return marked


@pytest.fixture
async def watching(anyio_backend: str, path: Path) -> AsyncIterator[Watching]:
    """A store that notes its beats."""
    async with Watching(path) as store:
        yield store


async def turn(session: SessionContext, said: str, lease_seconds: float = SHORT) -> None:
    """Take a turn; who waits for it beats by its own lease."""
    async with session.turn(lease_seconds=lease_seconds):
        await session.add_message(Message(Role.USER, said))


@asynccontextmanager
async def waiting(store: SQLiteSessionStore, said: str = "went on") -> AsyncIterator[asyncio.Task[None]]:
    """Meanwhile a turn waits for its place."""
    session = await store.get_or_create("s", SUPPORT)
    task = asyncio.create_task(turn(session, said))
    await until(lambda: store.line._waiters)
    yield task
    await task


def said_in(path: Path) -> list[str]:
    """What is stored of the conversation."""
    return query(path, "SELECT message_json ->> 'content' FROM chatflow_messages ORDER BY place")


@pytest.mark.parametrize("then", ["method", "commit"])
async def test_stopped_process(then: str, path: Path, watching: Watching) -> None:
    """A process that was stopped is overtaken after four beats of who waits, can do nothing more, and changes nothing.

    The first beat of the five is the one that sees it for the first time.
    """
    with started("lease", path, SHORT, then) as other:
        assert other.heard() == "holding"
        other.stop()
        before = watching.beaten
        async with waiting(watching):
            pass
        assert len(watching.interrupted) == 1
        assert watching.beaten - before >= 5
        other.resume()
        other.go_on()
        assert other.heard() == ["SessionConflictError"] * (2 if then == "method" else 1)
    assert said_in(path) == ["went on"]
    assert query(path, "SELECT count(*) FROM chatflow_turns") == [0]


async def test_stopped_run(path: Path, watching: Watching) -> None:
    """A run that was overtaken while its process was stopped asks no model and calls no tool any more."""
    with started("lease_of_run", path, SHORT) as other:
        assert other.heard() == "asked"
        other.stop()
        runner = Runner(SUPPORT, watching, ScriptedEngine(["answered here"]), lease_seconds=SHORT)
        assert (await runner.run_async("s", "hello", message_id="m")).content == "answered here"
        other.resume()
        other.go_on()
        assert other.heard() == ["SessionConflictError", 1, 0]
    assert said_in(path) == ["hello", "answered here"]


async def test_stopped_and_not_waited_for(path: Path, watching: Watching) -> None:
    """A process that was stopped for longer than its lease, and that nobody waited behind, commits as usual."""
    session = await watching.get_or_create("t", SUPPORT)
    with started("lease", path, SHORT, "method") as other:
        assert other.heard() == "holding"
        other.stop()
        async with session.turn(lease_seconds=SHORT):
            await until(lambda: watching.beaten >= 6)
        other.resume()
        other.go_on()
        assert other.heard() == []
    assert said_in(path) == ["from the other process", "more of it"]


async def test_living_process(path: Path, watching: Watching) -> None:
    """A process that lives is waited for, for twice as many beats as would take a stopped one's place."""
    with started("lease", path, LONG, "commit") as other:
        assert other.heard() == "holding"
        async with waiting(watching) as task:
            await until(lambda: watching.beaten >= ENOUGH)
            assert not task.done()
            other.go_on()
            assert other.heard() == []
    assert watching.interrupted == []
    assert said_in(path) == ["from the other process", "went on"]


async def test_file_held_by_another_program(path: Path, watching: Watching, tmp_path: Path) -> None:
    """Who waits and can't write, since another program holds the file, takes nobody for silent in that time."""
    with started("lease", path, LONG, "commit") as other:
        assert other.heard() == "holding"
        async with waiting(watching) as task, Watching(tmp_path / "clock.db") as clock:
            await until(lambda: watching.beaten)
            with held(path):
                async with (await clock.get_or_create("s", SUPPORT)).turn(lease_seconds=SHORT):
                    await until(lambda: clock.beaten >= ENOUGH)
            beaten = watching.beaten
            await until(lambda: watching.beaten >= beaten + 5)
            assert not task.done()
            other.go_on()
            assert other.heard() == []
    assert watching.interrupted == []
    assert said_in(path) == ["from the other process", "went on"]


async def test_killed_process(path: Path, watching: Watching) -> None:
    """A process of this machine that was killed is seen to be gone at once, without a beat that stands still."""
    with started("lease", path, 3600, "commit") as other:
        assert other.heard() == "holding"
        async with waiting(watching):
            other.kill()
    assert watching.interrupted == []
    assert said_in(path) == ["went on"]


HOLDERS: Final = {
    "another machine": "another.example,,/1/1/x",
    "another container": re.sub(r"pid:\[\d+\]", "pid:[1]", new_holder()),
}


@pytest.mark.parametrize("holder", HOLDERS.values(), ids=HOLDERS.keys())
async def test_holder_from_elsewhere(holder: str, path: Path, watching: Watching) -> None:
    """Of a process on another machine, or in another container, nothing but its lease tells that it is gone."""
    await watching.get_or_create("s", SUPPORT)
    with connect(path) as connection:
        connection.execute(
            "INSERT INTO chatflow_turns"
            " (session_key, state, holder, attempt, attempts, lease_seconds, accepted, queued_at)"
            " SELECT session_key, 'running', ?, 1, 1, ?, 0, '2030-01-01T00:00:00+00:00' FROM chatflow_sessions",
            (holder, SHORT),
        )
    await watching.aclose()
    async with Watching(path) as store:
        async with waiting(store):
            pass
        assert len(store.interrupted) == 1
        assert store.beaten >= 5


async def test_blocked_loop(path: Path, watching: Watching) -> None:
    """A process whose code blocks its event loop for longer than the lease loses its turn, and logs for how long."""
    with started("block", path, SHORT) as other:
        assert other.heard() == "blocking"
        async with waiting(watching):
            pass
        other.go_on()
        error, logged = other.heard()
    assert error == "SessionConflictError"
    (message,) = logged
    found = re.search(r"its event loop was blocked for (\d+\.\d) s, and its lease is 0\.3 s", message)
    assert found is not None, message
    assert said_in(path) == ["went on"]


async def test_order_across_processes(path: Path, watching: Watching) -> None:
    """Turns of several processes have their places in the order they came, whoever's they are and whoever gives up."""
    session = await watching.get_or_create("s", SUPPORT)
    mine: list[asyncio.Task[None]] = []
    with started("waits_and_is_cancelled", path) as other:
        async with session.turn():
            assert other.heard() == "waiting"
            for number in range(2):
                mine.append(asyncio.create_task(say(session, f"mine {number}"), context=contextvars.Context()))
                await until(lambda number=number: len(watching.line._waiters) > number)  # type: ignore[misc]
            other.go_on()
            assert other.heard() == "cancelled"
        assert other.heard() == "done"
        await asyncio.wait(mine)
    assert said_in(path) == ["theirs 0", "theirs 2", "mine 0", "mine 1"]


async def test_brought_up_to_date(path: Path, watching: Watching) -> None:
    """A session that is behind the file is brought up to date before its turn begins, at once or after a wait."""
    session = await watching.get_or_create("s", SUPPORT)
    with started("lease", path, LONG, "commit") as other:
        assert other.heard() == "holding"
        async with waiting(watching, "after it"):
            other.go_on()
            assert other.heard() == []
    assert [message.text for message in session.history] == ["from the other process", "after it"]
    with started("lease", path, LONG, "method") as other:
        assert other.heard() == "holding"
        other.go_on()
        assert other.heard() == []
    assert len(session.history) == 2
    async with session.turn():
        assert [message.text for message in session.history][2:] == ["from the other process", "more of it"]


@pytest.mark.parametrize(("then", "errors"), [("method", 2), ("commit", 1)])
async def test_deleted_by_another_process(then: str, errors: int, path: Path, watching: Watching) -> None:
    """A turn whose conversation another process deletes is told at its next touch, and nothing comes back (P7)."""
    with started("lease", path, LONG, then) as other:
        assert other.heard() == "holding"
        assert await watching.delete("s")
        new = await watching.get_or_create("s", SUPPORT)
        await turn(new, "new")
        other.go_on()
        told: Any = other.heard()
    # Within 50 ms of its last look a member may still believe; its commit finds out.
    assert told in (["SessionDeletedError"] * errors, ["SessionDeletedError"])
    assert said_in(path) == ["new"]
    assert query(path, "SELECT count(*) FROM chatflow_turns") == [0]


async def test_deleted_while_queued_behind_another_process(path: Path, watching: Watching) -> None:
    """A turn that waits behind another process's is told when that one's conversation is deleted."""
    with started("lease", path, LONG, "commit") as other:
        assert other.heard() == "holding"
        session = await watching.get_or_create("s", SUPPORT)
        task = asyncio.create_task(turn(session, "waits"))
        await until(lambda: watching.line._waiters)
        with connect(path) as connection:  # as a third process does
            connection.execute("PRAGMA foreign_keys=ON")
            connection.execute("DELETE FROM chatflow_sessions")
        with pytest.raises(SessionDeletedError):
            await task
        other.go_on()
        assert other.heard() == ["SessionDeletedError"]
    assert said_in(path) == []


async def test_file_held_while_turns_wait(path: Path, watching: Watching) -> None:
    """While another program holds the file turns wait, and the loop does other things; then they commit."""
    session = await watching.get_or_create("s", SUPPORT)
    with started("lock", path) as other:
        assert other.heard() == "holding"
        tasks = [asyncio.create_task(say(session, "hello")), asyncio.create_task(turn(session, "again"))]
        for _ in range(1000):
            await asyncio.sleep(0)
        assert not any(task.done() for task in tasks)
        assert (await watching.messages("s")).items == ()
        other.go_on()
        assert other.heard() == "done"
        await asyncio.gather(*tasks)
    assert said_in(path) == ["hello", "again"]
