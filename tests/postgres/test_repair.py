from __future__ import annotations

import datetime as dt
from functools import partial
from typing import Any, Final

import psycopg
import pytest

from chatflow.core.agent import Agent
from chatflow.core.backend import StoreBackend
from chatflow.core.messages import Message, Role
from chatflow.core.records import Key, NewSession
from chatflow.core.rows import State
from chatflow.core.service import ServiceSession
from chatflow.core.values import EMPTY
from chatflow.engines.scripted import ScriptedEngine
from chatflow.exceptions import CorruptSessionError, MessageDeadError
from chatflow.postgres.diagnosis import AnswerDiagnosis
from chatflow.postgres.mending import _mend_answer
from chatflow.postgres.rows import PostgresRows
from chatflow.postgres.turn_statements import READ_ROW
from chatflow.postgres.turns import _free
from chatflow.runner import Runner
from tests.postgres.conftest import OpenStore

SUPPORT: Final = Agent(name="Support")
SERVICE: Final = ServiceSession("resp_1", "Support", "openai")
SAYS_ELSE: Final = '{"somebody": "else"}'


def change(connection: psycopg.Connection[Any], schema: str, *statements: str) -> None:
    """Change the tables by hand."""
    with connection.transaction():
        connection.execute(f'SET LOCAL search_path = "{schema}"'.encode())
        for statement in statements:
            connection.execute(statement.encode())


async def fill(store: StoreBackend) -> None:
    """A conversation with two messages and a stored answer, an accepted turn, and one that was told of its end."""
    session = await store.get_or_create("s", SUPPORT, {"a": 1}, expires_after=3600)
    await session.add_message(Message(Role.SYSTEM, "be brief"))
    runner = Runner(SUPPORT, store, ScriptedEngine(["hi", LookupError]))
    await runner.run_async("s", "hello", message_id="m")
    with pytest.raises(LookupError):
        await runner.run_async("s", "fails", message_id="told")
    await runner.accept("s", "later", message_id="m2")


SESSION_FAULTS: Final = (
    "session_id = ''",
    "active_agent_name = ''",
    "metadata_json = '[]'",
    "state_json = '5'",
    "max_turns = 0",
    "updated_at = 'infinity'",
    "created_at = '-infinity'",
    "service_json = '[]', service_key = 'x'",
    "service_key = 'x'",
    "spent_json = '[]'",
    "expires_after = 'NaN'",
    "expires_at = NULL",
)


@pytest.mark.parametrize("fault", SESSION_FAULTS)
async def test_session(open_store: OpenStore, connection: psycopg.Connection[Any], schema: str, fault: str) -> None:
    """A value of a conversation's row that can't be read is found, set aside and replaced, and all else stays."""
    store = open_store()
    await fill(store)
    change(connection, schema, f"UPDATE chatflow_sessions SET {fault}")
    faults = await store.check()
    assert {each.kind for each in faults} == {"session"}
    repairs = await store.repair()
    assert tuple(each.fault for each in repairs) == faults
    assert {each.action for each in repairs} == {"replaced"}
    assert await store.check() == ()
    ((name,),) = [(info.session_id,) for info in (await store.list_sessions()).items]
    session = await store.get(name)
    assert session is not None
    assert [message.text for message in session.history] == ["be brief", "hello", "hi"]
    assert len(await store.page_of_set_aside("", 0, 10)) == len(faults)


@pytest.mark.parametrize(
    ("fault", "kinds"),
    [
        (f"UPDATE chatflow_messages SET message_json = '{SAYS_ELSE}' WHERE place = 1", {"message"}),
        ("UPDATE chatflow_messages SET place = place + 5 WHERE place = 1", {"gap"}),
        ("DELETE FROM chatflow_messages WHERE place = 0", {"front"}),
        (f"UPDATE chatflow_turns SET work_json = '{SAYS_ELSE}' WHERE message_id = 'm2'", {"turn"}),
        ("UPDATE chatflow_turns SET lease_seconds = 'NaN' WHERE message_id = 'm2'", {"turn"}),
        ("UPDATE chatflow_turns SET queued_at = 'infinity' WHERE message_id = 'm2'", {"turn"}),
        ("UPDATE chatflow_turns SET ended_at = 'infinity' WHERE message_id = 'told'", {"turn"}),
        (f"INSERT INTO chatflow_journal SELECT turn_id, 1, '{SAYS_ELSE}' FROM chatflow_turns", {"journal"}),
        ("UPDATE chatflow_processed_messages SET processed_at = 'infinity'", {"answer"}),
        (f"UPDATE chatflow_processed_messages SET response_json = '{SAYS_ELSE}'", {"answer"}),
    ],
)
async def test_rows(
    open_store: OpenStore, connection: psycopg.Connection[Any], schema: str, fault: str, kinds: set[str]
) -> None:
    """A row that can't be read, or breaks the rules, is found and mended, and then nothing is left to find."""
    store = open_store()
    await fill(store)
    change(connection, schema, fault)
    faults = await store.check()
    assert {each.kind for each in faults} == kinds
    repairs = await store.repair()
    assert {each.fault for each in repairs} == set(faults)
    assert all(each.is_done for each in repairs)
    assert await store.check() == ()
    assert await store.get("s") is not None
    assert len(await store.pending_turns()) == 2


async def test_turn_of_no_message(open_store: OpenStore, connection: psycopg.Connection[Any], schema: str) -> None:
    """A turn that can't be read and that no message would find is set aside."""
    store = open_store()
    await fill(store)
    change(
        connection,
        schema,
        f"UPDATE chatflow_turns SET message_id = NULL, work_json = '{SAYS_ELSE}' WHERE message_id = 'm2'",
    )
    assert {each.fault.kind for each in await store.repair()} == {"turn"}
    assert [turn.message_id for turn in await store.pending_turns()] == ["told"]
    assert await store.check() == ()


async def test_in_hand(open_store: OpenStore, connection: psycopg.Connection[Any], schema: str) -> None:
    """What somebody has in hand is left alone: a conversation under way, and a turn."""
    store = open_store()
    session = await store.get_or_create("s", SUPPORT)
    async with session.turn():
        change(
            connection,
            schema,
            "UPDATE chatflow_sessions SET state_json = '5'",
            "UPDATE chatflow_turns SET lease_seconds = 'NaN'",
        )
        assert {each.action for each in await store.repair()} == {"left alone"}
    assert {each.action for each in await store.repair()} == {"replaced"}


@pytest.mark.parametrize("service", ["'[]'", "NULL"], ids=["unreadable", "none"])
async def test_of_a_service(
    open_store: OpenStore, connection: psycopg.Connection[Any], schema: str, service: str
) -> None:
    """A conversation whose service can't be read, or is none where a key stands, is not found, and can be mended."""
    store = open_store()
    new = NewSession(agent_name="Support", metadata=EMPTY, max_turns=None, service=SERVICE)
    await store.create_session(store.key_of("s"), new)
    assert await store.get_by_service_id(SUPPORT, "resp_1") is not None
    change(connection, schema, f"UPDATE chatflow_sessions SET service_json = {service}")
    assert await open_store().get_by_service_id(SUPPORT, "resp_1") is None
    assert {each.fault.kind for each in await store.repair()} == {"session"}
    assert await store.check() == ()


async def test_lists_the_others(open_store: OpenStore, connection: psycopg.Connection[Any], schema: str) -> None:
    """A conversation, and a turn, that can't be read are listed with what can, and refused by name when asked for."""
    store = open_store()
    await fill(store)
    change(
        connection,
        schema,
        "UPDATE chatflow_sessions SET metadata_json = '[]', created_at = 'infinity'",
        f"UPDATE chatflow_turns SET work_json = '{SAYS_ELSE}', queued_at = 'infinity'",
        "UPDATE chatflow_messages SET place = place + 5 WHERE place = 1",
        "UPDATE chatflow_processed_messages SET processed_at = 'infinity'",
    )
    (info,) = (await store.list_sessions()).items
    assert (info.session_id, info.metadata) == ("s", {})
    assert [turn.message_id for turn in await store.pending_turns()] == ["told", "m2"]
    with pytest.raises(CorruptSessionError, match="the row is missing"):
        await open_store().get("s")
    lines = [line async for line in store.export_owner("")]
    assert any('"unreadable"' in line for line in lines)


async def test_work_that_cannot_be_read(
    open_store: OpenStore, connection: psycopg.Connection[Any], schema: str
) -> None:
    """Work that can't be read is given up, whoever takes it, and what comes after it is done."""
    store = open_store()
    runner = Runner(SUPPORT, store, ScriptedEngine([]))
    for number in ("1", "2"):
        await runner.accept("s", "hello", message_id=number)
        await runner.accept("t", "hello", message_id=number)
    unreadable = f"UPDATE chatflow_turns SET work_json = '{SAYS_ELSE}' WHERE message_id = '1'"
    change(connection, schema, unreadable)
    assert await store.take_work("Support", 10, 2, answers=True) == ()
    states = {(turn.session_id, turn.message_id): turn.state for turn in await store.pending_turns()}
    assert [states[session_id, "1"] for session_id in ("s", "t")] == ["dead", "dead"]
    works = await store.take_work("Support", 10, 2, answers=True)
    assert {(work.key.session_id, work.turn.message_id) for work in works} == {("s", "2"), ("t", "2")}


NO_FIRST_LINE: Final = "INSERT INTO chatflow_journal SELECT turn_id, 2, '{}' FROM chatflow_turns WHERE message_id = "


async def test_journal_that_cannot_be_read(
    open_store: OpenStore, connection: psycopg.Connection[Any], schema: str
) -> None:
    """A turn whose journal can't be read is not run again: its caller is told; an accepted one is dead."""
    store = open_store()
    await fill(store)
    change(connection, schema, f"{NO_FIRST_LINE} 'told'", f"{NO_FIRST_LINE} 'm2'")
    runner = Runner(SUPPORT, store, ScriptedEngine([]))
    with pytest.raises(MessageDeadError):
        await runner.run_async("s", "later", message_id="m2")
    with pytest.raises(CorruptSessionError, match="step 1: the row is missing"):
        await runner.run_async("s", "fails", message_id="told")
    assert {turn.message_id: turn.state for turn in await store.pending_turns()} == {"told": "told", "m2": "dead"}
    (taken,) = await store.page_of_set_aside("", 0, 10)
    assert taken.source.startswith("chatflow_journal")
    assert dt.datetime.fromisoformat(taken.set_aside_at).tzinfo is not None


async def test_work_before_a_turn(open_store: OpenStore, connection: psycopg.Connection[Any], schema: str) -> None:
    """A turn that stands behind work that can't be read gives that up, and runs."""
    store = open_store()
    await fill(store)
    change(connection, schema, f"UPDATE chatflow_turns SET work_json = '{SAYS_ELSE}' WHERE message_id = 'm2'")
    runner = Runner(SUPPORT, store, ScriptedEngine(["mine"]))
    assert (await runner.run_async("s", "mine?", message_id="m3")).content == "mine"
    assert {turn.message_id: turn.state for turn in await store.pending_turns()} == {"told": "told", "m2": "dead"}


@pytest.mark.parametrize(("answer", "left"), [("NULL", []), (f"'{SAYS_ELSE}'", [("m2", "dead")])])
async def test_answer_to_be_told(
    open_store: OpenStore, connection: psycopg.Connection[Any], schema: str, answer: str, left: list[Any]
) -> None:
    """An answer that nobody kept, or that can't be read, is not handed on."""
    store = open_store()
    await Runner(SUPPORT, store, ScriptedEngine([])).accept("s", "hello", message_id="m2")
    change(
        connection,
        schema,
        "UPDATE chatflow_turns SET state = 'answered'",
        "INSERT INTO chatflow_processed_messages (session_id, message_id, processed_at, response_json)"
        f" VALUES ('s', 'm2', now(), {answer})",
    )
    assert await store.take_work("Support", 10, 2, answers=True) == ()
    assert [(turn.message_id, turn.state) for turn in await store.pending_turns()] == left


async def test_work_of_many(open_store: OpenStore) -> None:
    """Work is looked for as far as it takes: what may not be taken yet hides none."""
    store = open_store()
    runner = Runner(SUPPORT, store, ScriptedEngine([]))
    held = [await store.get_or_create(str(number), SUPPORT) for number in range(51)]
    turns = [session.turn() for session in held]
    for number, turn in enumerate(turns):
        await turn.__aenter__()
        await runner.accept(str(number), "hello", message_id="m")
    await runner.accept("free", "hello", message_id="m")
    (work,) = await store.take_work("Support", 10, 5, answers=True)
    assert work.key.session_id == "free"
    for turn in turns:
        await turn.__aexit__(None, None, None)
    assert len(await store.take_work("Support", 10, 5, answers=True)) == 5


async def test_taken_meanwhile(open_store: OpenStore) -> None:
    """A row that has gone, or was taken, before its conversation was locked is not taken."""
    store = open_store()
    await Runner(SUPPORT, store, ScriptedEngine([])).accept("s", "hello", message_id="m2")
    (work,) = await store.take_work("Support", 10, 5, answers=True)
    found = await store._database.ask(READ_ROW, turn_id=work.turn.turn_id)
    rows = PostgresRows(found, "other", None)
    session_key = found[0][1]
    assert list(_free(rows, [(session_key, work.turn.turn_id), (session_key, 0)], tuple(State))) == []


async def test_front(open_store: OpenStore, connection: psycopg.Connection[Any], schema: str) -> None:
    """Where only the front of a history goes, the messages behind it stay where they are."""
    store = open_store()
    session = await store.get_or_create("s", SUPPORT)
    for number in range(4):
        await session.add_message(Message((Role.USER, Role.MODEL)[number % 2], str(number)))
    change(connection, schema, "DELETE FROM chatflow_messages WHERE place = 0")
    assert {each.fault.kind for each in await store.repair()} == {"front"}
    places = connection.execute(f'SELECT place FROM "{schema}".chatflow_messages ORDER BY place'.encode()).fetchall()
    assert places == [(2,), (3,)]


async def test_answer_mended_meanwhile(open_store: OpenStore) -> None:
    """What was found of a stored answer is looked at again: it may be gone, or sound, by then."""
    store = open_store()
    await store.mark_message_processed("sound")
    for message_id in ("sound", "gone"):
        found = AnswerDiagnosis(key=Key("", ""), message_id=message_id, columns={}, repairs=(), set_aside=())
        assert await store._database.write(partial(_mend_answer, found, dt.datetime.now(dt.UTC))) == ()
