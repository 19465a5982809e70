from __future__ import annotations

import asyncio
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any, Final

import attrs
import pytest

from chatflow.core.codec import entry_to_json
from chatflow.core.journal import Entry
from chatflow.core.messages import Message, Role, ToolCall
from chatflow.core.repairs import Repair
from chatflow.engines.scripted import ScriptedEngine
from chatflow.exceptions import CorruptSessionError, MessageDeadError
from chatflow.runner import Runner
from chatflow.sqlite import examination, mending
from chatflow.sqlite.diagnosis import diagnose
from chatflow.sqlite.journals import mend_journal
from chatflow.sqlite.store import SQLiteSessionStore
from tests.sqlite.conftest import OpenStore
from tests.sqlite.damage import NO_UTF8, Damaging, holds, loose, smash, sql, unguarded
from tests.sqlite.files import SUPPORT, connect, database_of, query
from tests.sqlite.test_check import is_as, outline

ELSEWHERE: Final = "another host/1/2/3"
"""A holder of whom nobody here knows that it is gone."""
NOTED: Final = entry_to_json(
    Entry(iteration=0, message=Message(Role.MODEL, tool_calls=[ToolCall(id="one", name="pay", args={})]))
)


def runner_of(store: SQLiteSessionStore) -> Runner:
    """An application of which everything is one answer."""
    return Runner(SUPPORT, store, ScriptedEngine(["done"] * 10))


async def fill(path: Path) -> None:
    """Accepted turns: 1, which was interrupted with a journal of three lines, and 2 behind it; 3 of another one."""
    async with SQLiteSessionStore(path) as store:
        runner = runner_of(store)
        await runner.accept("s", "pay", message_id="m1", metadata={"a": 1})
        await runner.accept("s", "and again", message_id="m2")
        await runner.accept("other", "hello", message_id="m3")
    sql(
        "UPDATE chatflow_turns SET state = 'interrupted', attempt = 2, attempts = 1 WHERE turn_id = 1",
        *(f"INSERT INTO chatflow_journal VALUES (1, {step}, '{NOTED}')" for step in (1, 2, 3)),
    )(path)


def set_turn(*changes: str, turn_id: int = 1) -> str:
    """The statement that changes a turn's row."""
    return f"UPDATE chatflow_turns SET {', '.join(changes)} WHERE turn_id = {turn_id}"


def states(path: Path) -> dict[int, str]:
    """What the rows are."""
    return dict(query(path, "SELECT turn_id, state FROM chatflow_turns ORDER BY turn_id"))


@attrs.frozen
class Damage:
    """What is done to the file, what `check` says, what `repair` does, and what turn 1 then is."""

    damage: Damaging
    faults: tuple[tuple[str, str, str], ...]
    actions: tuple[str, ...]
    state: str | None = "dead"
    keeps_journal: bool = False


FILE: Final = ("file", "the file", "value in chatflow_turns")
CHECK: Final = ("file", "the file", "CHECK constraint failed in chatflow_turns")
LINE: Final = "UPDATE chatflow_journal SET"
DAMAGE: Final = {
    "work that is no JSON": Damage(
        sql(set_turn("work_json = 'x'")), (("turn", "turn_id 1, work_json", "not JSON"),), ("replaced",)
    ),
    "work that is none": Damage(
        sql(set_turn("work_json = '{}'")), (("turn", "work_json", "neither a message nor a decision"),), ("replaced",)
    ),
    "work that is no UTF-8": Damage(
        sql(set_turn(f"work_json = {NO_UTF8}")), (("turn", "work_json", "not text in UTF-8"),), ("replaced",)
    ),
    "line that is no JSON": Damage(
        sql(f"{LINE} entry_json = 'x' WHERE step = 2"), (("journal", "turn_id 1, step 2", "not JSON"),), ("set aside",)
    ),
    "line that is no UTF-8": Damage(
        sql(f"{LINE} entry_json = {NO_UTF8} WHERE step = 2"), (("journal", "step 2", "UTF-8"),), ("set aside",)
    ),
    "line that is gone": Damage(
        sql("DELETE FROM chatflow_journal WHERE step = 2"),
        (("journal", "turn_id 1, step 2", "the row is missing"),),
        ("set aside",),
    ),
    "first line that is gone": Damage(
        sql("DELETE FROM chatflow_journal WHERE step = 1"), (("journal", "step 1", "missing"),), ("set aside",)
    ),
    "step that is no number": Damage(
        loose(f"{LINE} step = 'x' WHERE step = 3"),
        (("file", "the file", "value in chatflow_journal"), ("journal", "turn_id 1, step x", "not a number")),
        ("set aside", "set aside"),
    ),
    "lines and work": Damage(
        sql(f"{LINE} entry_json = 'x' WHERE step < 3", set_turn("work_json = 'x'")),
        (("turn", "work_json", "JSON"), ("journal", "step 1", "JSON"), ("journal", "step 2", "JSON")),
        ("replaced", "set aside", "set aside"),
    ),
    "state": Damage(
        sql(set_turn("state = 'asleep'")), (CHECK, ("turn", "state", "'asleep'")), ("replaced", "set aside")
    ),
    "state that is nothing": Damage(
        loose(set_turn("state = NULL")), (FILE, CHECK, ("turn", "state", "nothing")), ("replaced", *["set aside"] * 2)
    ),
    "attempt": Damage(
        loose("UPDATE chatflow_turns SET attempt = x'00' WHERE turn_id = 1"),
        (FILE, ("turn", "attempt", "not a number")),
        ("replaced", "set aside"),
    ),
    "agent's name": Damage(sql(set_turn(f"agent_name = {NO_UTF8}")), (("turn", "agent_name", "UTF-8"),), ("replaced",)),
    "holder": Damage(
        sql(set_turn(f"holder = {NO_UTF8}")), (("turn", "holder", "UTF-8"),), ("replaced",), "interrupted", True
    ),
    "holder of a running row": Damage(
        sql(set_turn("state = 'running'", f"holder = {NO_UTF8}")),
        (("turn", "holder", "UTF-8"),),
        ("replaced",),
        "interrupted",
        True,
    ),
    "no holder of a running row": Damage(
        sql(set_turn("state = 'running'")),
        (CHECK, ("turn", "holder", "not text but nothing")),
        ("replaced", "set aside"),
        "interrupted",
        True,
    ),
    "no holder of a queued row": Damage(
        sql(set_turn("state = 'queued'", "holder = ''")),
        (("turn", "holder", "empty"),),
        ("replaced",),
        "interrupted",
        True,
    ),
    "bare row without a holder": Damage(
        sql(set_turn("state = 'queued'", f"holder = {NO_UTF8}", "message_id = NULL", "work_json = NULL")),
        (("turn", "holder", "UTF-8"),),
        ("replaced",),
        None,
    ),
    "bare row": Damage(
        loose(set_turn("state = 'running'", "holder = NULL", "message_id = NULL", "attempts = NULL")),
        (FILE, CHECK, ("turn", "holder", "nothing"), ("turn", "attempts", "not a number")),
        ("set aside",) * 4,
        None,
    ),
    "message id": Damage(
        sql(set_turn(f"message_id = {NO_UTF8}")), (("turn", "message_id", "UTF-8"),), ("set aside",), None
    ),
    "digest": Damage(
        sql(set_turn(f"digest = {NO_UTF8}")), (("turn", "digest", "UTF-8"),), ("replaced",), "interrupted", True
    ),
    "no digest": Damage(
        sql(set_turn("digest = NULL")), (("turn", "digest", "nothing"),), ("replaced",), "interrupted", True
    ),
    "digest and work": Damage(
        sql(set_turn("digest = NULL", "work_json = 'x'")),
        (("turn", "digest", "nothing"), ("turn", "work_json", "JSON")),
        ("replaced",) * 2,
    ),
    "digest without work": Damage(
        sql(set_turn("digest = NULL", "work_json = NULL")), (("turn", "digest", "nothing"),), ("replaced",)
    ),
    "what tells no more than when": Damage(
        loose(
            set_turn("beat = NULL", "lease_seconds = -1", "parent = 'x'", "queued_at = 'x'", "ended_at = '2026-01-01'")
        ),
        (
            FILE,
            FILE,
            ("turn", "beat", "number"),
            ("turn", "lease_seconds", "number of seconds"),
            ("turn", "parent", "number"),
            ("turn", "queued_at", "moment"),
            ("turn", "ended_at", "time zone"),
        ),
        (*("replaced",) * 5, *("set aside",) * 2),
        "interrupted",
        True,
    ),
    "moment of an ended turn": Damage(
        sql(set_turn("state = 'told'", "ended_at = 'x'")),
        (("turn", "ended_at", "moment"),),
        ("replaced",),
        "told",
        True,
    ),
}
"""Damage to turns, to the file that `fill` makes. Nothing of it is left after a repair."""


def actions(repairs: tuple[Repair, ...]) -> list[str]:
    """What was done."""
    return [each.action for each in repairs]


@pytest.mark.parametrize("kind", DAMAGE)
async def test_finds(kind: str, path: Path, open_store: OpenStore) -> None:
    """Check reports what is wrong with a turn by its row and reason, and changes nothing."""
    await fill(path)
    DAMAGE[kind].damage(path)
    before = holds(path)
    faults = await open_store().check()
    assert is_as(outline(faults), DAMAGE[kind].faults), outline(faults)
    assert {(fault.session_id, fault.kind != "file") for fault in faults} <= {("s", True), ("", False)}
    assert holds(path) == before


@pytest.mark.parametrize("kind", DAMAGE)
async def test_mends(kind: str, path: Path, open_store: OpenStore) -> None:
    """Repair makes of a turn what can be known of it, once; check finds nothing then, and the other turns stay."""
    await fill(path)
    damage = DAMAGE[kind]
    damage.damage(path)
    store = open_store()
    faults, repairs = await store.check(), await store.repair()
    assert sorted(actions(repairs)) == sorted(damage.actions)
    assert Counter(each.fault for each in repairs) == Counter(faults)
    found = states(path)
    assert found.pop(1, None) == damage.state
    assert found == {2: "accepted", 3: "accepted"}
    assert await store.check() == ()
    before = holds(path)
    assert await store.repair() == ()
    assert holds(path) == before


@pytest.mark.parametrize("kind", DAMAGE)
async def test_journal_after_repair(kind: str, path: Path, open_store: OpenStore) -> None:
    """Of a turn that can't go on the whole journal is set aside, line by line as it stood; another keeps it."""
    await fill(path)
    DAMAGE[kind].damage(path)
    was = Counter(row[2] for row in holds(path)["chatflow_journal"])
    await open_store().repair()
    kept = Counter(row[2] for row in holds(path)["chatflow_journal"])
    aside = Counter(
        row[4] for row in holds(path)["chatflow_set_aside"] if row[3].startswith(b"chatflow_journal, turn_id 1, step")
    )
    if kind == "bare row without a holder":
        assert (kept, aside) == (Counter(), Counter())  # no turn without a message id has a journal
    else:
        assert (kept, aside) == ((was, Counter()) if DAMAGE[kind].keeps_journal else (Counter(), was))


@pytest.mark.parametrize("kind", [kind for kind, each in DAMAGE.items() if each.state is not None])
async def test_sent_again(kind: str, path: Path, open_store: OpenStore) -> None:
    """A message whose turn was given up is told so when it is sent again, and no tool runs; another is answered."""
    await fill(path)
    sql("DELETE FROM chatflow_journal WHERE turn_id = 1")(path) if DAMAGE[kind].keeps_journal else None
    DAMAGE[kind].damage(path)
    store = open_store()
    await store.repair()
    runner = runner_of(store)
    if DAMAGE[kind].state != "dead":
        assert (await runner.run_async("s", "pay", message_id="m1")).content == "done"
    elif "digest" not in kind:
        with pytest.raises(MessageDeadError):
            await runner.run_async("s", "pay", message_id="m1")
    assert (await runner.run_async("s", "and again", message_id="m2")).content == "done"


async def test_what_is_set_aside(path: Path, open_store: OpenStore) -> None:
    """What could not be read of a turn is set aside with its row, and a row that goes as a whole."""
    await fill(path)
    sql(set_turn("work_json = 'x'"), set_turn(f"message_id = {NO_UTF8}", turn_id=2))(path)
    await open_store().repair()
    aside = query(path, "SELECT session_id, source, content FROM chatflow_set_aside WHERE source LIKE '%_turns%'")
    assert aside[:2] == [
        ("s", "chatflow_turns, turn_id 1, work_json", "x"),
        ("s", "chatflow_turns, turn_id 2, message_id", b"c\xfff"),
    ]
    assert (aside[2][:2], "and again" in aside[2][2]) == (("s", "chatflow_turns, turn_id 2"), True)


# --- in somebody's hand ---


async def test_held(path: Path, open_store: OpenStore) -> None:
    """A turn that somebody has in hand, on another host too, is left alone; its conversation is mended if it waits."""
    await fill(path)
    sql(
        set_turn("state = 'queued'", f"holder = '{ELSEWHERE}'", "work_json = 'x'"),
        "UPDATE chatflow_sessions SET state_json = 'x' WHERE session_id = 's'",
    )(path)
    store = open_store()
    assert sorted(actions(await store.repair())) == ["left alone", "replaced"]
    assert (states(path)[1], actions(await store.repair())) == ("queued", ["left alone"])


async def test_runs_elsewhere(path: Path, open_store: OpenStore) -> None:
    """A conversation with a running turn whose holder is not known to be gone is left alone."""
    await fill(path)
    sql(
        set_turn("state = 'running'", f"holder = '{ELSEWHERE}'"),
        "UPDATE chatflow_sessions SET state_json = 'x' WHERE session_id = 's'",
    )(path)
    assert actions(await open_store().repair()) == ["left alone"]


async def test_runs_nowhere(path: Path, open_store: OpenStore) -> None:
    """A running row without a holder that can be read keeps its conversation from nothing."""
    await fill(path)
    sql(
        set_turn("state = 'running'", f"holder = {NO_UTF8}"),
        "UPDATE chatflow_sessions SET state_json = 'x' WHERE session_id = 's'",
    )(path)
    assert actions(await open_store().repair()) == ["replaced", "replaced"]
    assert states(path)[1] == "interrupted"


async def test_gone_since_it_was_looked_at(path: Path, open_store: OpenStore) -> None:
    """A turn that has ended since it was looked at needs nothing."""
    await fill(path)
    sql(set_turn("work_json = 'x'"))(path)
    store = open_store()
    database = database_of(store)
    diagnosis = await database.read(partial(diagnose, 1))
    assert diagnosis.repairs
    sql("DELETE FROM chatflow_turns WHERE turn_id = 1", "DELETE FROM chatflow_journal")(path)
    before = holds(path)
    assert await database.write(partial(mending.mend, diagnosis, "now"), durable=True) == ()
    assert holds(path) == before


async def test_journal_gone_since_it_was_looked_at(path: Path, open_store: OpenStore) -> None:
    """A journal that is gone by the time it would be set aside needs nothing."""
    await fill(path)
    before = holds(path)
    assert await database_of(open_store()).write(partial(mend_journal, 99, "now"), durable=True) == ()
    assert holds(path) == before


# --- without a turn, or a conversation ---


async def test_journal_without_a_turn(path: Path, open_store: OpenStore) -> None:
    """Journals without their turns are found and set aside, in slices of any size; they belong to no conversation."""
    await fill(path)
    with connect(path) as connection:
        connection.execute("DELETE FROM chatflow_turns WHERE turn_id = 1")
        connection.execute("INSERT INTO chatflow_journal VALUES (-5, 1, 'x'), (7, 1, 'y'), (3, 1, ?)", (NOTED,))
    store = open_store()
    faults = await store.check()
    assert outline(faults) == [
        ("reference", f"chatflow_journal, turn_id {turn_id}, step {step}", "its turn does not exist")
        for turn_id, step in ((-5, 1), (1, 1), (1, 2), (1, 3), (7, 1))
    ]
    assert actions(await store.repair()) == ["set aside"] * 5
    assert query(path, "SELECT turn_id FROM chatflow_journal") == [3]
    aside = query(path, "SELECT owner, session_id, content FROM chatflow_set_aside")
    assert aside == [("", None, content) for content in ("x", *[NOTED] * 3, "y")]
    assert await store.check() == ()


async def test_journals_in_slices(path: Path, open_store: OpenStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """However small the slices are, all journals are looked at."""
    await fill(path)
    with connect(path) as connection:
        connection.execute("INSERT INTO chatflow_journal VALUES (-5, 1, 'x'), (7, 1, 'y'), (8, 1, 'z')")
    monkeypatch.setattr(examination, "_JOURNALS", 1)
    store = open_store()
    assert len(await store.check()) == 3
    assert actions(await store.repair()) == ["set aside"] * 3
    assert await store.check() == ()


async def test_page_of_journals(path: Path, open_store: OpenStore) -> None:
    """A page of journals that SQLite can't read is reported, and keeps nothing else from being looked at."""
    await fill(path)
    smash("chatflow_journal")(path)
    faults = await open_store().check()
    assert "chatflow_journal" in {fault.row for fault in faults}
    assert {fault.kind for fault in faults} == {"file"}


async def test_turn_without_a_conversation(path: Path, open_store: OpenStore) -> None:
    """The turns of a conversation that does not exist are set aside with their journals."""
    await fill(path)
    with unguarded(path) as connection:
        connection.execute("DELETE FROM chatflow_sessions WHERE session_id = 's'")
    store = open_store()
    assert outline(await store.check()) == [
        ("reference", f"chatflow_turns, turn_id {turn_id}", "its conversation does not exist") for turn_id in (1, 2)
    ]
    await store.repair()
    assert (states(path), query(path, "SELECT count(*) FROM chatflow_journal")) == ({3: "accepted"}, [0])
    sources = query(path, "SELECT substr(source, 1, 14) FROM chatflow_set_aside WHERE session_id IS NULL")
    assert Counter(sources) == {"chatflow_turns": 2, "chatflow_journ": 3}
    assert await store.check() == ()


# --- in use, before a repair ---


@pytest.mark.parametrize("kind", [kind for kind, each in DAMAGE.items() if each.faults[-1][0] == "journal"])
async def test_journal_gives_it_up(kind: str, path: Path, open_store: OpenStore) -> None:
    """An accepted message whose journal can't be read, or has a gap, is given up."""
    await fill(path)
    DAMAGE[kind].damage(path)
    runner = runner_of(open_store())
    for _ in range(2):
        with pytest.raises(MessageDeadError, match="'m1'"):
            await runner.run_async("s", "pay", message_id="m1")
    assert states(path)[1] == "dead"


UNREADABLE: Final = (
    "state",
    "state that is nothing",
    "attempt",
    "holder of a running row",
    "no holder of a running row",
)


@pytest.mark.parametrize("kind", UNREADABLE)
async def test_row_is_refused(kind: str, path: Path, open_store: OpenStore) -> None:
    """A message whose row can't be read is refused by the row and its column, and other conversations go on."""
    await fill(path)
    DAMAGE[kind].damage(path)
    store = open_store()
    runner = runner_of(store)
    with pytest.raises(CorruptSessionError, match=r"session 's'.*chatflow_turns, turn_id 1, "):
        await runner.run_async("s", "pay", message_id="m1")
    assert (await runner.run_async("other", "hello", message_id="m3")).content == "done"


@pytest.mark.parametrize("kind", DAMAGE)
async def test_listed(kind: str, path: Path, open_store: OpenStore) -> None:
    """Whatever is damaged in one turn, all are listed as pending, it too."""
    await fill(path)
    DAMAGE[kind].damage(path)
    pending = await open_store().pending_turns()
    assert [turn.user_message for turn in pending][1:] == ["and again", "hello"]


@pytest.mark.parametrize("damage", [f"{LINE} entry_json = 'x' WHERE step = 2", set_turn("work_json = 'x'")])
async def test_message_behind_it(damage: str, path: Path, open_store: OpenStore) -> None:
    """A message behind a turn that can't be read is answered: that turn is given up, its journal set aside."""
    await fill(path)
    sql(damage)(path)
    store = open_store()
    assert (await runner_of(store).run_async("s", "and again", message_id="m2")).content == "done"
    assert states(path)[1] == "dead"
    assert Counter(row[4] for row in holds(path)["chatflow_set_aside"]).total() == 3
    assert query(path, "SELECT count(*) FROM chatflow_journal") == [0]


async def test_work_is_done_beside_it(path: Path, open_store: OpenStore) -> None:
    """A worker does what can be read, and gives up a turn that can't be: its journal is set aside then, too."""
    await fill(path)
    sql(set_turn("work_json = 'x'"))(path)
    store = open_store()
    await work_until_done(store, {"and again", "hello"})
    assert states(path) == {1: "dead"}
    assert query(path, "SELECT session_id, content FROM chatflow_set_aside") == [("s", NOTED)] * 3
    assert actions(await store.repair()) == ["replaced"]


async def test_work_behind_a_row(path: Path, open_store: OpenStore) -> None:
    """A worker leaves a line alone in which a row can't be read, and does the others."""
    await fill(path)
    sql(set_turn("state = 'queued'"))(path)
    sql(set_turn("message_id = 'm4'", "digest = NULL", turn_id=3))(path)
    async with SQLiteSessionStore(path) as store:
        await runner_of(store).accept("third", "hi", message_id="m5")
    store = open_store()
    await work_until_done(store, {"hi"})
    assert states(path) == {1: "queued", 2: "accepted", 3: "accepted"}


async def work_until_done(store: SQLiteSessionStore, expected: set[str]) -> None:
    """Let a worker run until it has done these."""
    left = set(expected)
    done = asyncio.Event()

    async def on_response(turn: Any, response: Any) -> None:
        left.discard(turn.user_message)
        if not left:
            done.set()

    async with runner_of(store).working(on_response):
        await done.wait()


async def test_answer_that_can_not_be_read(path: Path, open_store: OpenStore) -> None:
    """An answer that can't be read can't be handed on: its turn is given up, and the others are handed on."""
    await fill(path)
    with connect(path) as connection:
        connection.execute(set_turn("state = 'answered'", "ended_at = '2999-01-01T00:00:00+00:00'", turn_id=3))
        connection.execute(
            "INSERT INTO chatflow_processed_messages (session_id, message_id, processed_at, digest, response_json)"
            " SELECT 'other', 'm3', '2999-01-01T00:00:00+00:00', digest, 'x' FROM chatflow_turns WHERE turn_id = 3"
        )
    store = open_store()
    sql("DELETE FROM chatflow_journal")(path)
    await work_until_done(store, {"pay", "and again"})
    assert states(path) == {3: "dead"}


async def test_answered_row_is_not_taken(path: Path, open_store: OpenStore) -> None:
    """An answered row that can't be read is not taken, and keeps no other from being done."""
    await fill(path)
    sql(set_turn("state = 'answered'", "digest = NULL", turn_id=3), "DELETE FROM chatflow_journal")(path)
    await work_until_done(open_store(), {"pay", "and again"})
    assert states(path) == {3: "answered"}


async def test_opens(path: Path, open_store: OpenStore) -> None:
    """A file opens whatever its turns hold, of processes that are gone too; what can be read is free then."""
    await fill(path)
    async with SQLiteSessionStore(path) as store:
        gone = database_of(store).holder
    sql(
        set_turn("state = 'running'", f"holder = '{gone}'", "digest = NULL"),
        set_turn("state = 'queued'", f"holder = '{gone}'", turn_id=2),
        set_turn("state = 'queued'", f"holder = CAST(CAST('{gone}' AS BLOB) || x'ff' AS TEXT)", turn_id=3),
    )(path)
    store = open_store()
    assert await store.get("other") is not None
    assert states(path) == {1: "running", 2: "interrupted", 3: "queued"}


async def test_beat_that_can_not_be_read(path: Path, open_store: OpenStore) -> None:
    """A watcher makes nothing of a lease that can't be read, and goes on with all others."""
    await fill(path)
    loose(set_turn("state = 'queued'", f"holder = '{ELSEWHERE}'", "lease_seconds = 'x'"))(path)
    await work_until_done(open_store(), {"hello"})
