from __future__ import annotations

import json
import os
import random
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, Final

import anyio
import psycopg
import pytest
from click.testing import CliRunner

from chatflow.cli.commands import chatflow
from chatflow.cli.copier import Copied, Copier, open_copier
from chatflow.core.agent import Agent
from chatflow.core.backend import StoreBackend
from chatflow.core.messages import AgentResponse, Message, Role
from chatflow.core.owners import ALL
from chatflow.core.records import PendingTurn
from chatflow.core.tools import tool
from chatflow.engines.scripted import ScriptedEngine
from chatflow.exceptions import StoreFormatError
from chatflow.postgres.copying import Copy as PostgresCopy
from chatflow.postgres.store import PostgresSessionStore
from chatflow.runner import Runner
from chatflow.sqlite.store import SQLiteSessionStore
from tests.cli.conftest import Ran, fill
from tests.cli.processes import ROOT, holding_a_turn
from tests.cli.terminal import at_terminal
from tests.postgres import server

SUPPORT: Final = Agent("Support", engine=ScriptedEngine(default="answer"))
OWNERS: Final = ("", "ann")
NUL: Final = "of\0\1 the \ud83d"
"""What has no place in a PostgreSQL text as it is."""

Copy = Callable[..., Ran]


@tool
async def ship(order_id: str) -> str:
    """Ship an order."""
    return f"{order_id} is on its way"


async def chats(store: SQLiteSessionStore) -> None:
    """All that a store can hold."""
    for owner in OWNERS:
        face = store.for_owner(owner) if owner else store
        runner = Runner(SUPPORT, face)
        await runner.run_async("answered", f"hello {NUL}", metadata={NUL: 1e300, "n": -0.0}, message_id="m\0")
        await face.mark_message_processed("by hand")
        session = await face.get_or_create("limited", SUPPORT, max_turns=7, expires_after=3600.5)
        async with session.turn():
            await session.add_message(Message(Role.SYSTEM, "be kind"))
            await session.add_message(Message(Role.USER, "hello"))
            session.state["seen"] = {1, 2}
        down = ScriptedEngine([ScriptedEngine.call("ship", order_id="404"), RuntimeError("down")])
        failing = Runner(Agent("Orders", tools=[ship], engine=down), face)
        with pytest.raises(RuntimeError):
            await failing.run_async("told", "ship 404", message_id="t")
        await runner.accept("waits", "first", message_id="1")
        await runner.accept("waits", "second", message_id="2", metadata={"channel": "web"})


def damage(path: Path, *statements: str) -> None:
    """Change the file behind the store's back."""
    with closing(sqlite3.connect(path)) as connection, connection:
        for statement in statements:
            connection.execute(statement)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A file with conversations in it, whose name is no plain one."""
    path = tmp_path / "chat ?#%41.db"
    fill(path, chats)
    damage(
        path,
        "INSERT INTO chatflow_set_aside VALUES"
        " (7, 'ann', 'limited', 'there', 'text', 'odd', '2030-01-01T00:00:00.000001+00:00')",
    )
    return path


@pytest.fixture
def copy(path: Path, schema: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Copy]:
    """Copies the file into the test's schema."""

    def run(*args: str, source: Path = path) -> Ran:
        words = ["copy", f"sqlite:///{source}", server.dsn(), "--schema", schema, *args]
        result = CliRunner().invoke(chatflow, words, prog_name="chatflow")
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return Ran(result.exit_code, result.stdout, result.stderr)

    yield run
    # What a test has done to the tables is nobody else's.
    server.forget(schema)


def with_store(store: StoreBackend, work: Callable[[Any], Awaitable[Any]]) -> Any:
    """What *work* with a store gives."""

    async def main() -> Any:
        async with store:
            return await work(store)

    return anyio.run(main)


def with_copy(schema: str, work: Callable[[PostgresSessionStore], Awaitable[Any]]) -> Any:
    """What *work* with a store on the copy gives."""
    return with_store(PostgresSessionStore(server.dsn(), schema=schema), work)


async def all_of(store: StoreBackend) -> tuple[list[Any], list[Any]]:
    """All that a store shows: what is kept of each owner, and all conversations in their order."""
    kept = [json.loads(line) for owner in OWNERS async for line in store.export_owner(owner)]
    listed = (await store.list_sessions(owner=ALL)).items
    return [each for each in kept if each["kind"] != "export"], [(each.owner, each.session_id) for each in listed]


def holds_the_same(path: Path, schema: str) -> bool:
    """Whether both stores show the same."""
    there = with_copy(schema, all_of)
    here = with_store(SQLiteSessionStore(f"file:{path.as_uri().removeprefix('file://')}?mode=ro"), all_of)
    assert here[0]
    return bool(here == there)


@contextmanager
def as_it_is(schema: str) -> Iterator[None]:
    """The copy without its note, which is put back: a store may use it, be it whole or not."""
    with psycopg.connect(server.dsn(), autocommit=True) as connection:
        delete = f"DELETE FROM \"{schema}\".chatflow_meta WHERE key = 'copy' RETURNING value"
        [(note,)] = connection.execute(delete.encode()).fetchall()
        yield
        connection.execute(f"INSERT INTO \"{schema}\".chatflow_meta VALUES ('copy', %s)".encode(), (note,))


def test_copy(copy: Copy, path: Path, schema: str) -> None:
    """All that a file holds is in the copy, which is said with its numbers, and the file stays as it was."""
    before = path.read_bytes()
    ran = copy()
    assert ran.status == 0
    assert [line.split("\t")[:2] for line in ran.out.splitlines()] == [
        ["chatflow_sessions", "8"],
        ["chatflow_messages", "8"],
        ["chatflow_turns", "6"],
        ["chatflow_journal", "4"],
        ["chatflow_processed_messages", "4"],
        ["chatflow_set_aside", "1"],
    ]
    assert ran.err.startswith("8 conversations written; postgresql://")
    assert path.read_bytes() == before
    assert holds_the_same(path, schema)


def test_json(copy: Copy, path: Path) -> None:
    """As JSON it is one object, with each table on both sides."""
    [report] = copy("--json").documents
    assert (report["written"], report["changed"], report["differing"]) == (8, False, [])
    for table in report["tables"]:
        assert (table["rows"], table["checksum"]) == (table["copied_rows"], table["copied_checksum"])


def test_terminal(path: Path, schema: str, tmp_path: Path) -> None:
    """To a person at a terminal it shows how far it has come, first copying and then comparing."""
    words = ("copy", f"sqlite:///{path}", server.dsn(), "--schema", schema)
    with at_terminal(*words, folder=tmp_path, COLUMNS="500") as terminal:
        terminal.until("copying")
        terminal.until("comparing")
        terminal.until("8 conversations written")
        assert terminal.status() == 0


def test_it_goes_on(copy: Copy, path: Path, schema: str) -> None:
    """In the copy a turn is taken, a duplicate gets its stored answer, and what waits is done, in its order."""
    copy()

    async def go_on(store: PostgresSessionStore) -> None:
        runner = Runner(SUPPORT, store)
        again = await runner.run_async("answered", f"hello {NUL}", message_id="m\0")
        assert (again.content, again.duplicate) == ("answer", True)
        assert await store.is_message_processed("by hand")
        resumed = Agent("Orders", tools=[ship], engine=ScriptedEngine(["shipped"]))
        response = await Runner(resumed, store).run_async("told", "ship 404", message_id="t")
        assert response.tool_calls_executed == ("ship",)
        heard: list[str | None] = []

        async def hear(turn: PendingTurn, response: AgentResponse) -> None:
            heard.append(f"{turn.owner}{turn.message_id}")
            if len(heard) == 4:
                done.set()

        done = anyio.Event()
        async with runner.working(hear):
            await done.wait()
        assert [each for each in heard if not (each or "").startswith("ann")] == ["1", "2"]
        assert [each for each in heard if (each or "").startswith("ann")] == ["ann1", "ann2"]
        session = await store.get_or_create("limited", SUPPORT)
        assert (session.max_turns, session.state["seen"], session.expires_after) == (7, {1, 2}, session.expires_after)
        await session.add_message(Message(Role.USER, "and then"))
        assert [message.text for message in session.history] == ["be kind", "hello", "and then"]
        assert (await store.list_sessions()).items[0].session_id == "limited"
        assert (await store.get_or_create("new", SUPPORT)).history == ()
        assert await store.check() == ()

    with_copy(schema, go_on)


def test_again(copy: Copy, path: Path, schema: str) -> None:
    """A second copy writes what has changed since the first, and takes away what is gone."""
    copy()
    assert copy().err.startswith("0 conversations written")

    async def change(store: SQLiteSessionStore) -> None:
        await store.for_owner("ann").delete("waits")
        await store.delete("limited")
        session = await store.get_or_create("answered", SUPPORT)
        await session.add_message(Message(Role.USER, "more"))
        await Runner(SUPPORT, store).accept("told", "more", message_id="more")
        await store.mark_message_processed("by hand, too")
        await store.get_or_create("limited", SUPPORT)

    fill(path, change)
    damage(path, "DELETE FROM chatflow_processed_messages WHERE message_id = 'by hand' AND owner = ''")
    assert copy().err.startswith("3 conversations written")
    assert holds_the_same(path, schema)


def test_version_of_a_deleted_one(copy: Copy, path: Path, schema: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A version that was another conversation's, until that was deleted, moves with its conversation."""
    monkeypatch.setattr("chatflow.sqlite.copying._CONVERSATIONS", 1)
    copy()

    async def change(store: SQLiteSessionStore) -> None:
        newest = (await store.list_sessions(owner=ALL, limit=1)).items[0]
        assert await store.for_owner(newest.owner).delete(newest.session_id)
        session = await store.get_or_create("answered", SUPPORT)
        await session.add_message(Message(Role.USER, "more"))

    fill(path, change)
    assert copy().err.startswith("1 conversation written; ")
    assert holds_the_same(path, schema)


def test_emptied(copy: Copy, path: Path, schema: str) -> None:
    """A copy of a file from which everything was erased is empty too."""
    copy()

    async def erase(store: SQLiteSessionStore) -> None:
        for owner in OWNERS:
            await store.erase_owner(owner)

    fill(path, erase)
    ran = copy()
    assert (ran.status, {line.split("\t")[1] for line in ran.out.splitlines()}) == (0, {"0"})
    assert with_copy(schema, all_of) == ([], [])


def test_beside_an_application(copy: Copy, path: Path, schema: str) -> None:
    """A turn that another process has in hand is left to it, and is no part of the copy."""

    async def pending(store: StoreBackend) -> list[tuple[str, str | None, str]]:
        return [(turn.session_id, turn.message_id, turn.state) for turn in await store.pending_turns()]

    with holding_a_turn(path):
        copy()
        with as_it_is(schema):
            copied = with_copy(schema, pending)
        assert copied[-1] == ("conversation-7", "wamid.2", "accepted")
        assert with_store(SQLiteSessionStore(path), pending) == [*copied, ("conversation-7", None, "running")]


KILLED: Final = """
import os, signal, sys
from chatflow.cli.commands import chatflow
from chatflow.postgres import copying
from chatflow.sqlite import copying as reading

reading._CONVERSATIONS = 3
name, nth, phase = sys.argv[1], int(sys.argv[2]), sys.argv[3]
owner = copying.Copy if hasattr(copying.Copy, name) else copying
function = getattr(owner, name)
calls = 0

async def wrapped(*args):
    global calls
    calls += 1
    if calls == nth and phase == "before":
        os.kill(os.getpid(), signal.SIGKILL)
    result = await function(*args)
    if calls == nth and phase == "after":
        os.kill(os.getpid(), signal.SIGKILL)
    return result

setattr(owner, name, wrapped)
chatflow(sys.argv[4:], prog_name="chatflow")
"""


@pytest.mark.parametrize(
    ("point", "left"),
    [
        ("_note 1 after", 8),  # its note has not committed
        ("begin 1 after", 8),
        ("_write 1 after", 8),  # the first three conversations have not committed
        ("write 1 after", 5),
        ("_write 2 after", 5),
        ("write 3 after", 0),
        ("_write 4 after", 0),  # the message ids have not
        ("_write 5 after", 0),  # what was set aside has not
        ("read 7 before", 0),  # while it compares
    ],
)
def test_killed(copy: Copy, path: Path, schema: str, point: str, left: int) -> None:
    """Killed at any moment and started again, it goes on, and ends equal."""
    words = ["copy", f"sqlite:///{path}", server.dsn(), "--schema", schema]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    ran = subprocess.run([sys.executable, "-c", KILLED, *point.split(), *words], env=environment, check=False)
    assert ran.returncode == -signal.SIGKILL
    ran_again = copy()
    assert (ran_again.status, int(ran_again.err.split()[0])) == (0, left)
    assert holds_the_same(path, schema)


def test_interrupted(copy: Copy, path: Path, schema: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """After Ctrl-C no store uses what is there, and the copy goes on when it is started again, as it says."""
    monkeypatch.setattr("chatflow.sqlite.copying._CONVERSATIONS", 3)
    write = PostgresCopy.write

    async def write_until_interrupted(*args: Any) -> None:
        await write(*args)
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(PostgresCopy, "write", write_until_interrupted)
    # Of a process that was started in the background it may be ignored.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        ran = copy()
    finally:
        signal.signal(signal.SIGINT, before)
    assert (ran.status, ran.err.split("\n")[0]) == (130, "what was copied stays: started again, the copy goes on")
    with pytest.raises(StoreFormatError) as refused:
        with_copy(schema, all_of)
    assert f"the copy of {os.uname().nodename}:{path} in it is not whole: stop what uses the file" in str(refused.value)
    monkeypatch.undo()
    assert copy().err.startswith("5 conversations written")
    assert holds_the_same(path, schema)


def test_note_of_0_1_0(copy: Copy, connection: psycopg.Connection[Any], path: Path, schema: str) -> None:
    """What 0.1.0 has copied can be used, and copied again."""
    copy()
    shortened = "(value::jsonb - 'whole' - 'found')::text"
    connection.execute(f"UPDATE \"{schema}\".chatflow_meta SET value = {shortened} WHERE key = 'copy'".encode())
    assert holds_the_same(path, schema)
    assert copy().status == 0


# --- two at once ---

HELD_BACK: Final = """
import sys
from chatflow.cli.commands import chatflow
from chatflow.postgres import copying
from chatflow.sqlite import copying as reading

reading._CONVERSATIONS = 3
name, nth, phase = sys.argv[1], int(sys.argv[2]), sys.argv[3]
function = getattr(copying.Copy, name)
calls = 0

async def wrapped(*args):
    global calls
    calls += 1
    if (calls, phase) == (nth, "before"):
        print("there", flush=True)
        sys.stdin.readline()
    result = await function(*args)
    if (calls, phase) == (nth, "after"):
        print("there", flush=True)
        sys.stdin.readline()
    return result

setattr(copying.Copy, name, wrapped)
chatflow(sys.argv[4:], prog_name="chatflow")
"""


def copying(path: Path, schema: str, point: str) -> subprocess.Popen[str]:
    """A process that copies up to *point*, and waits there for a line."""
    words = ["copy", f"sqlite:///{path}", server.dsn(), "--schema", schema]
    process = subprocess.Popen(
        [sys.executable, "-c", HELD_BACK, *point.split(), *words],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "there\n"
    return process


@pytest.mark.parametrize(
    ("point", "said"),
    [
        ("_note 1 before", "holds a copy of this file in a newer state"),  # it has looked, and has not begun
        ("_raise_numbers 1 before", "another copy into it has begun since this one"),
        ("begin 1 after", "another copy into it has begun since this one"),
        ("write 1 before", "another copy into it has begun since this one"),  # what it has read is older by now
        ("_write 1 after", "another copy into it has begun since this one"),  # what it has written has not committed
        ("write 2 after", "another copy into it has begun since this one"),
        ("read 7 before", "another copy into it has begun since this one"),  # while it compares
    ],
)
def test_two_at_once(copy: Copy, path: Path, schema: str, point: str, said: str) -> None:
    """Of two copies at once the one that began last goes on, and the other one ends without a trace in it."""
    process = copying(path, schema, point)

    async def change(store: SQLiteSessionStore) -> None:
        session = await store.get_or_create("answered", SUPPORT)
        await session.add_message(Message(Role.USER, "more"))
        await store.delete("limited")

    fill(path, change)
    assert (copy().status, holds_the_same(path, schema)) == (0, True)
    _, errors = process.communicate("\n")
    assert (process.returncode, said in errors) == (1, True)
    assert holds_the_same(path, schema)
    assert copy().status == 0


def test_all_at_once(copy: Copy, path: Path, schema: str) -> None:
    """Of processes that begin at the same time one ends well, and the others are told of it."""
    command = [sys.executable, "-m", "chatflow", "copy", f"sqlite:///{path}", server.dsn(), "--schema", schema]
    processes = [
        subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    said = [process.communicate()[1] for process in processes]
    assert 0 in {process.returncode for process in processes}
    for process, each in zip(processes, said, strict=True):
        assert process.returncode == 0 or "another copy into it has begun since" in each
    assert holds_the_same(path, schema)


@pytest.mark.parametrize("use", ["before it is deleted", "before it is compared"])
def test_used_meanwhile(copy: Copy, path: Path, schema: str, monkeypatch: pytest.MonkeyPatch, use: str) -> None:
    """What an application writes into a copy that is still being made stays, and ends the copy."""
    monkeypatch.setattr("chatflow.sqlite.copying._CONVERSATIONS", 3)
    owner, name = (PostgresCopy, "write") if use == "before it is deleted" else (Copier, "compare")
    function = getattr(owner, name)
    used: list[bool] = []

    async def after_a_use(*args: Any) -> Any:
        if not used:
            used.append(True)
            async with PostgresSessionStore(server.dsn(), schema=schema) as store:
                session = await store.get_or_create("new", SUPPORT)
                await session.add_message(Message(Role.USER, "mine"))
        return await function(*args)

    monkeypatch.setattr(owner, name, after_a_use)
    ran = copy()
    assert (ran.status, "was used since it was copied" in ran.err) == (1, True)
    with as_it_is(schema):
        found = with_copy(schema, lambda store: store.messages("new"))
    assert [message.text for message in found.items] == ["mine"]


# --- what is compared ---


def alter(connection: psycopg.Connection[Any], schema: str, table: str, change: str) -> None:
    """Let something else change what is written into a table."""
    connection.execute(
        f"""
        CREATE FUNCTION "{schema}".alter_it() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN {change} RETURN NEW; END $$
        """.encode()
    )
    trigger = f'CREATE TRIGGER altering BEFORE INSERT ON "{schema}".{table} FOR EACH ROW'
    connection.execute(f'{trigger} EXECUTE FUNCTION "{schema}".alter_it()'.encode())


def heal(connection: psycopg.Connection[Any], schema: str) -> None:
    """Let nothing change it any more."""
    connection.execute(f'DROP FUNCTION "{schema}".alter_it() CASCADE'.encode())


@pytest.mark.parametrize(
    ("table", "change", "named"),
    [
        ("chatflow_messages", "NEW.message_json = replace(NEW.message_json::text, 'kind', 'mean')::json;", "'limited'"),
        ("chatflow_sessions", "NEW.max_turns = NEW.max_turns + 1;", "'limited'"),
        ("chatflow_turns", "NEW.work_json = replace(NEW.work_json::text, 'first', 'last')::json;", "'waits'"),
        ("chatflow_processed_messages", "NEW.digest = 'other';", "'answered'"),
        ("chatflow_processed_messages", "NEW.processed_at = now();", "what is of no session"),
        ("chatflow_set_aside", "NEW.content = '';", "'limited' of owner 'ann'"),
    ],
)
def test_altered(
    copy: Copy, connection: psycopg.Connection[Any], path: Path, schema: str, table: str, change: str, named: str
) -> None:
    """A copy that is not the same is an error, which names the conversations, and the next one mends it."""
    alter(connection, schema, table, change)
    ran = copy()
    assert (ran.status, len(ran.err.splitlines())) == (1, 1)
    assert f"{named} " in ran.err.replace(",", " ")
    assert "is not the same as the file" in ran.err
    lines = ran.out.splitlines()
    [altered] = [line for line in lines if line.startswith(f"{table}, copied\t")]
    original = lines[lines.index(altered) - 1]
    assert original.split("\t")[:2] == [table, altered.split("\t")[1]]
    assert original.split("\t")[2] != altered.split("\t")[2]
    assert copy("--json").documents[0]["differing"]
    heal(connection, schema)
    assert copy().status == 0
    assert holds_the_same(path, schema)


def test_missing(copy: Copy, connection: psycopg.Connection[Any], schema: str) -> None:
    """What does not get into the copy is an error too."""
    alter(connection, schema, "chatflow_processed_messages", "IF NEW.owner = 'ann' THEN RETURN NULL; END IF;")
    ran = copy()
    assert ran.status == 1
    assert "what is of no session of owner 'ann', 'answered' of owner 'ann' differ" in ran.err
    assert "chatflow_processed_messages, copied\t2\t" in ran.out


def test_added(copy: Copy, connection: psycopg.Connection[Any], path: Path, schema: str) -> None:
    """What something else adds to a copy is an error too, and is taken away by the next one."""
    copy()
    columns = "owner, session_id, active_agent_name, version, created_at, updated_at"
    values = "'bob', 'new', 'Support', 99999, now(), now()"
    add = f'INSERT INTO "{schema}".chatflow_sessions ({columns}) VALUES ({values});'
    alter(connection, schema, "chatflow_set_aside", add)
    damage(path, "UPDATE chatflow_set_aside SET reason = 'other'")
    ran = copy()
    assert (ran.status, "the file: 'new' of owner 'bob' differ" in ran.err) == (1, True)
    heal(connection, schema)
    assert copy().status == 0
    assert holds_the_same(path, schema)


@pytest.mark.parametrize(
    ("writes", "said"),
    [
        (True, "the file was changed meanwhile: stop the application, then do this again"),
        (
            False,
            "what is of no session, what is of no session of owner 'ann' differ now: stop the application, then do",
        ),
    ],
)
def test_changed_meanwhile(
    copy: Copy, path: Path, schema: str, monkeypatch: pytest.MonkeyPatch, writes: bool, said: str
) -> None:
    """A file that is changed while it is copied is said to have been, with a status, and no store uses the copy."""
    compare = Copier.compare

    async def compare_after_a_commit(self: Copier, step: Callable[[], None]) -> Copied:
        # Past every store, since one process knows a file by one name.
        change = "UPDATE chatflow_processed_messages SET digest = 'meanwhile' WHERE session_id = ''"
        await anyio.to_thread.run_sync(damage, path, change)
        if writes:
            await self.write(step)
        return await compare(self, step)

    monkeypatch.setattr(Copier, "compare", compare_after_a_commit)
    ran = copy()
    assert (ran.status, "the file was changed meanwhile" in ran.err, said in ran.err) == (1, True, True)
    with pytest.raises(StoreFormatError, match="is not whole"):
        with_copy(schema, all_of)
    monkeypatch.undo()
    assert (copy().status, holds_the_same(path, schema)) == (0, True)


def test_many_differ(copy: Copy, connection: psycopg.Connection[Any], path: Path, schema: str) -> None:
    """Of many conversations that differ some are named, and the others counted."""
    alter(connection, schema, "chatflow_sessions", "NEW.updated_at = now();")
    ran = copy()
    assert "'answered', 'limited', 'told', 'waits', 'answered' of owner 'ann' and 3 more differ" in ran.err


# --- what is refused ---


def test_other_conversations(copy: Copy, schema: str) -> None:
    """A schema that holds what no copy has brought there is left untouched."""
    with_copy(schema, lambda store: store.get_or_create("mine", SUPPORT))
    ran = copy()
    assert (ran.status, ran.out, len(ran.err.splitlines())) == (1, "", 1)
    assert "holds what no copy has brought there; it was left untouched: name a schema that is new" in ran.err
    assert with_copy(schema, all_of)[1] == [("", "mine")]


def test_wherever_it_lies(copy: Copy, path: Path, schema: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file is known again under another path, and on a machine of another name."""
    copy()
    link = path.with_name("link.db")
    link.symlink_to(path)
    monkeypatch.setattr("socket.gethostname", lambda: "another")
    ran = copy(source=link)
    assert (ran.status, ran.err.startswith("0 conversations written")) == (0, True)


def test_file_of_0_1_0(copy: Copy, path: Path, tmp_path: Path, schema: str) -> None:
    """A file that was given no id is known by its path, also after it was given one."""
    damage(path, "DELETE FROM chatflow_meta WHERE key = 'store_id'")
    copy()
    assert copy().status == 0
    damage(path, "INSERT INTO chatflow_meta VALUES ('store_id', 'x')")
    assert copy().status == 0
    other = tmp_path / "other.db"
    path.rename(other)
    assert copy(source=other).status == 0
    damage(other, "DELETE FROM chatflow_meta WHERE key = 'store_id'")
    assert copy(source=other).status == 0


def test_made_anew(copy: Copy, path: Path, schema: str) -> None:
    """A file that was made anew under the same name is another one."""
    copy()
    path.unlink()
    fill(path, chats)
    ran = copy()
    assert (ran.status, f":{path} as it was before it was made anew, and this is" in ran.err) == (1, True)


def test_another_file(copy: Copy, path: Path, tmp_path: Path, schema: str) -> None:
    """A copy of one file is not overwritten with another's."""
    copy()
    other = tmp_path / "other.db"
    fill(other, chats)
    ran = copy(source=other)
    assert ran.status == 1
    assert f"holds a copy of {os.uname().nodename}:{path}, and this is {os.uname().nodename}:{other}; it" in ran.err
    assert holds_the_same(path, schema)


@pytest.mark.parametrize(
    "use",
    [
        lambda store: store.get_or_create("new", SUPPORT),
        lambda store: Runner(SUPPORT, store).run_async("answered", "since then"),
    ],
    ids=["conversation", "turn"],
)
def test_older_backup(
    copy: Copy, path: Path, tmp_path: Path, schema: str, use: Callable[[SQLiteSessionStore], Awaitable[Any]]
) -> None:
    """A copy is not overwritten with an older state of its file."""
    older = tmp_path / "older.db"
    with closing(sqlite3.connect(path)) as file, closing(sqlite3.connect(older)) as backup:
        file.backup(backup)
    fill(path, use)
    copy()
    ran = copy(source=older)
    assert (ran.status, "in a newer state, and what is given now is older; it was left" in ran.err) == (1, True)
    assert holds_the_same(path, schema)


@pytest.mark.parametrize(
    "use",
    [
        lambda store: store.get_or_create("new", SUPPORT),
        lambda store: Runner(SUPPORT, store).accept("answered", "since then", message_id="new"),
        lambda store: store.delete("limited"),
        lambda store: store.mark_message_processed("since then"),
        lambda store: store.erase_owner("ann"),
    ],
    ids=["version", "turn", "delete", "mark", "erase"],
)
def test_used(copy: Copy, schema: str, use: Callable[[PostgresSessionStore], Awaitable[Any]]) -> None:
    """A copy that was used is not overwritten with what was before."""
    copy()
    with_copy(schema, use)
    ran = copy()
    assert ran.status == 1
    assert "was used since it was copied, which another copy would undo" in ran.err


async def hand_on(store: StoreBackend, error: Exception | None) -> None:
    """Work until an answer is handed on, which may fail."""
    heard = anyio.Event()

    async def hear(turn: PendingTurn, response: AgentResponse) -> None:
        heard.set()
        if error is not None:
            raise error

    async with Runner(SUPPORT, store).working(hear):
        await heard.wait()


def test_used_by_a_worker(copy: Copy, path: Path, schema: str) -> None:
    """A copy from which nothing but an answer was handed on was used too: it would be handed on again."""
    fill(path, lambda store: hand_on(store, RuntimeError("the network is down")))
    damage(path, "DELETE FROM chatflow_journal", "DELETE FROM chatflow_turns WHERE state <> 'answered'")
    assert copy().status == 0
    with_copy(schema, lambda store: hand_on(store, None))
    ran = copy()
    assert (ran.status, "was used since it was copied" in ran.err) == (1, True)


@pytest.mark.parametrize(
    ("broken", "reason"),
    [
        ("UPDATE chatflow_messages SET message_json = 'not json' WHERE session_key = 2", "invalid input syntax"),
        ("UPDATE chatflow_turns SET digest = NULL, session_key = 2 WHERE session_key = 3", "violates check constraint"),
        ("UPDATE chatflow_sessions SET service_key = :long WHERE session_key = 2", "too long for an index"),
    ],
)
@pytest.mark.parametrize("alone", [False, True])
def test_what_has_no_place(
    copy: Copy, path: Path, schema: str, monkeypatch: pytest.MonkeyPatch, broken: str, reason: str, alone: bool
) -> None:
    """What PostgreSQL can't keep is an error that names the conversation; those before it are written."""
    letters = "".join(random.Random(8).choices("abcdefghijklmnopqrstuvwxyz0123456789", k=20_000))  # no secret
    damage(path, broken.replace(":long", f"'{letters}'"))
    if alone:
        monkeypatch.setattr("chatflow.sqlite.copying._CONVERSATIONS", 1)
    ran = copy()
    assert (ran.status, len(ran.err.splitlines())) == (1, 1)
    assert "chatflow: session 'limited' can't be kept by PostgreSQL: " in ran.err
    assert reason in ran.err
    with as_it_is(schema):
        assert with_copy(schema, all_of)[1] == [("", "answered")]


def test_only_beside_others(copy: Copy, connection: psycopg.Connection[Any], path: Path, schema: str) -> None:
    """What the server refuses only beside others is written by itself."""
    connection.execute(
        f"""
        CREATE FUNCTION "{schema}".alter_it() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
            IF (SELECT count(*) FROM given) > 1 THEN RAISE check_violation; END IF; RETURN NULL;
        END $$;
        CREATE TRIGGER altering AFTER INSERT ON "{schema}".chatflow_sessions REFERENCING NEW TABLE AS given
            EXECUTE FUNCTION "{schema}".alter_it()
        """.encode()
    )
    assert (copy().status, holds_the_same(path, schema)) == (0, True)


def test_what_another_has_broken(copy: Copy, connection: psycopg.Connection[Any], path: Path, schema: str) -> None:
    """What has nothing to do with a value is the server's own error, also where it comes with one value alone."""
    alter(connection, schema, "chatflow_messages", "RAISE 'no more today';")
    ran = copy()
    assert (ran.status, "no more today (P0001); nothing was written" in ran.err) == (1, True)
    heal(connection, schema)
    assert (copy().status, holds_the_same(path, schema)) == (0, True)


async def test_beside_stores_of_this_process(path: Path, schema: str) -> None:
    """A copy leaves stores of the same process on either side open."""
    address = f"file:{path.as_uri().removeprefix('file://')}?mode=ro"
    async with SQLiteSessionStore(address) as here, PostgresSessionStore(server.dsn(), schema=schema) as there:
        assert await there.get("answered") is None
        assert await here.get("answered") is not None
        async with open_copier(path, server.dsn(), schema) as copier:
            await copier.begin()
            await copier.write(lambda: None)
        assert await here.get("waits") is not None
        assert await there.get("answered") is not None
