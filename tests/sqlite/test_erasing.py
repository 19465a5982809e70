"""What erasing an owner leaves in a file, byte by byte, and after a kill at each step."""

from __future__ import annotations

import json
import random
import subprocess
from pathlib import Path
from typing import Any, Final

import pytest

from chatflow.core.agent import Agent
from chatflow.core.messages import Message, Role
from chatflow.core.owners import ALL
from chatflow.core.records import NewSession
from chatflow.core.service import ServiceSession
from chatflow.core.store import BaseSessionStore
from chatflow.core.values import EMPTY
from chatflow.engines.scripted import ScriptedEngine
from chatflow.exceptions import StoreError
from chatflow.runner import Runner
from chatflow.sqlite import database
from chatflow.sqlite.store import SQLiteSessionStore
from chatflow.testing.conformance.conversation import texts
from tests.sqlite.conftest import Failing, OpenStore
from tests.sqlite.damage import NO_UTF8, sql
from tests.sqlite.files import SUPPORT, connect, query, say
from tests.sqlite.processes import started

MARK: Final = "SECRET-OF-ANN"
ANN: Final = f"ann {MARK}"
HIDDEN: Final = "owner >= char(0) AND owner < char(1)"


async def fill(store: BaseSessionStore, mark: str = MARK) -> None:
    """Everything that can be kept of an owner, with *mark* in all of it."""
    service = ServiceSession(f"{mark} service", "Support")
    new = NewSession(agent_name="Support", metadata=EMPTY, max_turns=2, service=service, expires_after=60.0)
    await store.backend.create_session(store.key_of(f"{mark} s"), new)
    session = await store.get_or_create(f"{mark} s", SUPPORT, {f"{mark} key": f"{mark} value"})
    for number in range(6):
        session.state[f"{mark} {number}"] = mark
        await say(session, f"{mark} {number} {'x' * 500 * number}")
    runner = Runner(SUPPORT, store, ScriptedEngine([f"{mark} answer", OSError("no")]))
    await runner.run_async(f"{mark} t", f"{mark} said", message_id=f"{mark} id")
    with pytest.raises(OSError, match="no"):
        await runner.run_async(f"{mark} t", f"{mark} fails", message_id=f"{mark} failing")
    await runner.accept(f"{mark} t", f"{mark} accepted", message_id=f"{mark} later")
    await store.mark_message_processed(f"{mark} marked")


async def set_aside(path: Path, owner: str = ANN) -> None:
    """Something that was taken out of the owner's conversations."""
    with connect(path) as connection:
        connection.execute(
            "INSERT INTO chatflow_set_aside (owner, session_id, source, content, reason, set_aside_at)"
            " VALUES (?, ?, 'somewhere', ?, 'a reason', '2030-01-01T00:00:00+00:00')",
            (owner, f"{MARK} s", f"{MARK} content"),
        )


def bytes_of(path: Path) -> bytes:
    """All that stands in the file and beside it, read by another process: to close it here would drop our locks."""
    return b"".join(
        subprocess.run(["cat", each], capture_output=True, check=True).stdout for each in path.parent.iterdir()
    )


async def seen(store: SQLiteSessionStore) -> set[str]:
    """Whose conversations can be seen."""
    return {info.owner for info in (await store.list_sessions(owner=ALL)).items}


@pytest.mark.parametrize("rewrite", [False, True])
async def test_no_byte_is_left(path: Path, open_store: OpenStore, rewrite: bool) -> None:
    """After erasing, no byte of the owner's is in the file, its log, or pages that are free, while it is open."""
    store = open_store()
    await fill(store.for_owner(ANN))
    await fill(store.for_owner("bob"), "of bob")
    await set_aside(path)
    assert MARK.encode() in bytes_of(path)
    erased = await store.erase_owner(ANN, rewrite_file=rewrite)
    assert (erased.conversations, erased.set_aside, erased.flushed) == (2, 1, True)
    assert MARK.encode() not in bytes_of(path)
    assert b"of bob" in bytes_of(path)
    await store.aclose()
    assert MARK.encode() not in bytes_of(path)


async def test_among_many(path: Path, open_store: OpenStore) -> None:
    """Where rows were moved between pages before, a file that is written anew holds nothing of the owner's."""
    store, draw = open_store(default_max_turns=20), random.Random(3)
    sessions = [
        await store.for_owner(ANN if number % 2 else "bob").get_or_create(f"s{number}", SUPPORT) for number in range(40)
    ]
    for number in range(800):
        session = draw.choice(sessions)
        whose = MARK if session.key.owner == ANN else "of bob"
        await session.add_message(Message(Role.USER, f"{number} {whose} " * draw.choice([1, 10, 40])))
    before = {session.session_id: texts(session.history) for session in sessions if session.key.owner == "bob"}
    assert (await store.erase_owner(ANN, rewrite_file=True)).conversations == 20
    assert MARK.encode() not in bytes_of(path)
    for session_id, said in before.items():
        assert texts((await store.for_owner("bob").messages(session_id)).items) == said
    assert await store.check() == ()


STEPS: Final = ("hide_owner", *(f"drop_hidden {number}" for number in range(6)), "flush_hidden")


@pytest.mark.parametrize("step", STEPS)
async def test_killed(path: Path, open_store: OpenStore, step: str) -> None:
    """Killed before any of its steps, erasing has hidden all or nothing, and the next purge leaves no byte of it."""
    async with SQLiteSessionStore(path) as store:
        await fill(store.for_owner(ANN))
        await fill(store.for_owner("bob"), "of bob")
        await set_aside(path)
    with started("erase", path, ANN, step) as program:
        assert program.heard() == "there"
        program.kill()
    store = open_store()
    if step == "hide_owner":
        assert await seen(store) == {ANN, "bob"}
        await store.erase_owner(ANN)
    assert await seen(store) == {"bob"}
    assert await store.check() == ()
    assert await store.repair() == ()
    await store.for_owner("bob").purge()
    assert query(path, f"SELECT count(*) FROM chatflow_sessions WHERE {HIDDEN}") == [0]
    assert query(path, "SELECT count(*) FROM chatflow_meta WHERE key LIKE 'erasing%'") == [0]
    assert MARK.encode() not in bytes_of(path)


async def test_in_use_by_others(path: Path, open_store: OpenStore) -> None:
    """A turn that another process has open when its owner is erased can't commit."""
    with started("hold", path) as other:
        assert other.heard() == "holding"
        store = open_store()
        erased = await store.erase_owner("")
        assert (erased.conversations, erased.turns) == (1, 2)
        other.go_on()
        assert await seen(store) == set()
        assert query(path, "SELECT count(*) FROM chatflow_messages") == [0]
        other.kill()


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Readers are not waited for."""
    monkeypatch.setattr(database, "_FLUSHES", 2)
    monkeypatch.setattr(database, "_FLUSH_MILLISECONDS", 1)


@pytest.mark.usefixtures("hasty")
async def test_reader_in_the_way(path: Path, open_store: OpenStore) -> None:
    """Where another program reads an old state the log can't be emptied, which is said, and the next purge does it."""
    store = open_store()
    await fill(store.for_owner(ANN))
    with connect(path) as reader:
        reader.execute("BEGIN")
        reader.execute("SELECT count(*) FROM chatflow_sessions").fetchone()
        assert (await store.erase_owner(ANN)).flushed is False
        assert await seen(store) == set()
        await store.purge()
        assert MARK.encode() in bytes_of(path)
        reader.execute("ROLLBACK")
    await store.purge()
    assert MARK.encode() not in bytes_of(path)
    assert query(path, "SELECT count(*) FROM chatflow_meta WHERE key LIKE 'erasing%'") == [0]


async def test_what_another_erases_meanwhile(path: Path, open_store: OpenStore) -> None:
    """What another has hidden, and not dropped yet, is still to be flushed when this one is done."""
    store = open_store()
    await fill(store.for_owner(ANN))
    flush = store.flush_hidden

    async def and_then(*, rewrite: bool) -> bool:
        await fill(store.for_owner("cid"), "of cid")
        await store.hide_owner("cid")
        return await flush(rewrite=rewrite)

    store.flush_hidden = and_then  # type: ignore[method-assign]
    await store.erase_owner(ANN)
    assert query(path, "SELECT count(*) FROM chatflow_meta WHERE key LIKE 'erasing%'") == [1]
    store.flush_hidden = flush  # type: ignore[method-assign]
    await store.purge()
    assert b"of cid" not in bytes_of(path)


@pytest.mark.parametrize("statement", ["VACUUM", "PRAGMA wal_checkpoint(TRUNCATE)"])
async def test_storage_that_fails(path: Path, open_store: OpenStore, failing: type[Failing], statement: str) -> None:
    """Where the file can't be written anew, or its log not emptied, the error says so; what was hidden stays hidden."""
    store = open_store()
    await fill(store.for_owner(ANN))
    failing.before.add(statement)
    with pytest.raises(StoreError, match="I/O"):
        await store.erase_owner(ANN, rewrite_file=True)
    assert await seen(store) == set()
    failing.before.clear()
    await store.purge()
    assert MARK.encode() not in bytes_of(path)
    assert query(path, "PRAGMA integrity_check") == ["ok"]


async def test_damaged_rows_of_an_erased_owner(path: Path, open_store: OpenStore) -> None:
    """What can't be read of a hidden conversation is no fault, is not mended, and goes with it."""
    store = open_store()
    await fill(store.for_owner(ANN))
    sql(
        "UPDATE chatflow_messages SET message_json = 'x'",
        "UPDATE chatflow_sessions SET metadata_json = 'x', service_json = 'x'",
        "UPDATE chatflow_processed_messages SET response_json = 'x', processed_at = 'x'",
    )(path)
    await store.hide_owner(ANN)
    assert await store.check() == ()
    assert await store.repair() == ()
    await store.purge()
    assert query(path, "SELECT count(*) FROM chatflow_messages") == [0]


async def test_export_of_damage(path: Path, open_store: OpenStore) -> None:
    """An export names what can't be read, and gives all else."""
    store = open_store()
    for session_id in "abcd":
        await say(await store.get_or_create(session_id, SUPPORT), "hello")
    runner = Runner(Agent(name="Support"), store, ScriptedEngine(["hi", OSError("no")]))
    await runner.run_async("e", "hello", message_id="m")
    with pytest.raises(OSError, match="no"):
        await runner.run_async("e", "hello", message_id="m2")
    await store.mark_message_processed("m3")
    sql(
        "UPDATE chatflow_messages SET message_json = 'x' WHERE session_key = 2",
        f"UPDATE chatflow_sessions SET session_id = {NO_UTF8} WHERE session_key = 3",
        "UPDATE chatflow_sessions SET created_at = 'x' WHERE session_key = 4",
        "UPDATE chatflow_processed_messages SET response_json = 'x' WHERE message_id = 'm'",
        "UPDATE chatflow_turns SET work_json = 'x'",
        "INSERT INTO chatflow_journal SELECT turn_id, 1, 'x' FROM chatflow_turns",
    )(path)
    await set_aside(path, "")
    found: list[Any] = [json.loads(line) async for line in store.export_owner("")]
    kinds = [each["kind"] for each in found]
    assert kinds == [
        *("export", "conversation", "unreadable", "unreadable", "unreadable", "conversation"),
        *("unreadable", "message_id", "unreadable", "set_aside"),
    ]
    reasons = [each["row"] for each in found if each["kind"] == "unreadable"]
    assert reasons == [
        "chatflow_messages, session_key 2, place 0",
        "chatflow_sessions, session_id 'c\ufffdf'",
        "chatflow_sessions, session_key 4, created_at",
        "chatflow_journal, turn_id 6, step 1",
        "chatflow_processed_messages, message_id 'm', response_json",
    ]
    assert found[-1]["content"] == f"{MARK} content"
    await store.repair()
    assert "unreadable" not in {json.loads(line)["kind"] async for line in store.export_owner("")}
