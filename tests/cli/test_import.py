from __future__ import annotations

import asyncio
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from agents.memory import SQLiteSession

from chatflow import Role, SQLiteSessionStore
from chatflow.adapters.openai_agents import ChatflowSession
from tests.adapters.runs import parallel_calls
from tests.cli.conftest import SUPPORT, Command, fill, order_404
from tests.cli.openai_file import BRANCHES, ORDER_404, write


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Where openai-agents' sessions are."""
    return tmp_path / "openai.db"


def test_import(command: Command, db: Path, file: Path) -> None:
    """Sessions are brought in with their pairs, the file they come from is not changed."""
    write(file, "conv-1", ORDER_404)
    write(file, "conv-2", [{"role": "user", "content": "hi"}])
    before = file.read_bytes()
    ran = command("import", "openai-agents", str(file), "--agent", "Support")
    assert (ran.status, ran.out) == (0, "conv-1: 4 messages\nconv-2: 1 messages\n")
    assert ran.err == "2 of 2 conversations brought in\n"
    assert file.read_bytes() == before
    out = command("sessions", "show", "conv-1").out
    assert 'Support | calls check(order_id="404")' in out
    assert "   tool | check gave in transit" in out
    assert "turn 1, 2026-03-01 10:00:00Z" in out


def test_again(command: Command, db: Path, file: Path) -> None:
    """Done again it brings in what is new, and leaves alone what is there."""
    write(file, "conv-1", ORDER_404)
    fill(db, lambda store: order_404(store, "conv-2"))
    command("import", "openai-agents", str(file))
    write(file, "conv-2", ORDER_404)
    ran = command("import", "openai-agents", str(file))
    assert ran.status == 0
    assert ran.out == "conv-1: left alone: it is there already\nconv-2: left alone: it is there already\n"
    assert ran.err == "0 of 2 conversations brought in\n"


def test_what_was_left_out(command: Command, file: Path) -> None:
    """What is left out is said item by item, with a status; so is what is kept as something else."""
    search = {"type": "web_search_call", "id": "ws_1"}
    write(file, "conv-1", ["{", {"role": "user", "content": "hi"}, search, {"role": "assistant", "content": "ho"}])
    ran = command("import", "openai-agents", str(file))
    assert ran.status == 1
    first, second, third = ran.out.splitlines()
    assert first == "conv-1: 2 messages"
    assert second.startswith("  item 1 left out: it is no JSON")
    assert third.startswith("  item 3 kept: an item of type 'web_search_call'")
    assert "is still in the file that it came from" in ran.err


def test_json(command: Command, file: Path) -> None:
    """As JSON each session is an object with what became of its items."""
    write(file, "conv-1", ["{", {"role": "user", "content": "hi"}])
    write(file, "", [])
    write(file, b"\xff", [])
    empty, found, blob = command("import", "openai-agents", str(file), "--json").documents
    assert (empty["session_id"], "must not be empty" in empty["failed"]) == ("", True)
    assert (blob["session_id"], "must be a string" in blob["failed"]) == ("b'\\xff'", True)
    [item] = found.pop("items")
    assert found == {"session_id": "conv-1", "messages": 1, "skipped": None, "failed": None}
    assert (item["row"], item["kept"]) == (1, False)
    assert "left out: session_id must not be empty" in command("import", "openai-agents", str(file)).out


def test_long_conversation(command: Command, db: Path, file: Path) -> None:
    """No turn of a long conversation is dropped: it may have as many as it has."""
    write(file, "conv-1", [{"role": "user", "content": str(number)} for number in range(60)])
    assert command("import", "openai-agents", str(file)).out == "conv-1: 60 messages\n"

    async def look(store: SQLiteSessionStore) -> None:
        session = await store.get("conv-1")
        assert session is not None
        assert (session.max_turns, len(session.history), session.history[0].role) == (60, 60, Role.USER)

    fill(db, look)


def test_long_conversation_in_a_short_one(command: Command, db: Path, file: Path) -> None:
    """An empty conversation that would drop turns of it is left alone."""
    write(file, "conv-1", [{"role": "user", "content": str(number)} for number in range(60)])
    fill(db, lambda store: store.get_or_create("conv-1", SUPPORT))
    assert "it is there, empty, and keeps 40 turns of its 60" in command("import", "openai-agents", str(file)).out


def test_owner(command: Command, file: Path) -> None:
    """They can be brought in as an owner's."""
    write(file, "conv-1", ORDER_404)
    command("import", "openai-agents", str(file), "--owner", "ann")
    assert command("sessions", "list", "--owner", "ann").out.startswith("conv-1\tAssistant\t")


def test_branches(command: Command, file: Path) -> None:
    """Of an AdvancedSQLiteSession the main branch is brought in, and what others have is reported."""
    write(file, "conv-1", [{"role": "user", "content": text} for text in ("main", "both", "other", "none")])
    with closing(sqlite3.connect(file)) as connection, connection:
        connection.execute(BRANCHES)
        for row, branch in ((1, "main"), (2, "main"), (2, "branch"), (3, "branch")):
            connection.execute("INSERT INTO message_structure (message_id, branch_id) VALUES (?, ?)", (row, branch))
    ran = command("import", "openai-agents", str(file))
    assert ran.out.splitlines() == ["conv-1: 3 messages", "  item 3 left out: it belongs to another branch than main"]


def test_not_such_a_file(command: Command, db: Path, file: Path) -> None:
    """Another file is refused on one line, and no store is made for it."""
    fill(file, order_404)
    ran = command("import", "openai-agents", str(file))
    assert (ran.status, len(ran.err.splitlines())) == (1, 1)
    assert "no tables agent_sessions and agent_messages" in ran.err
    file.write_text("Dear diary,\n" * 1000)
    assert "it is not an SQLite database" in command("import", "openai-agents", str(file)).err
    assert command("import", "openai-agents", "none.db").status == 1
    assert not db.exists()


def test_real_package(command: Command, db: Path, file: Path) -> None:
    """What openai-agents itself has written is brought in, and a session of its agents gives all of it back equal."""

    async def write() -> list[Any]:
        session = SQLiteSession("conv-1", file)
        try:
            await parallel_calls(session)
            return await session.get_items()
        finally:
            session.close()

    async def read() -> list[Any]:
        async with SQLiteSessionStore(db) as store:
            return await ChatflowSession("conv-1", store).get_items()

    items = asyncio.run(write())
    ran = command("import", "openai-agents", str(file))
    kept = "an item of type 'web_search_call' is kept beside the model's message as it came"
    assert (ran.status, ran.out) == (0, f"conv-1: 8 messages\n  item 3 kept: {kept}\n")
    said = [
        line.partition(" | ")[2] for line in command("sessions", "show", "conv-1").out.splitlines() if " | " in line
    ]
    assert said[-4:] == ["check gave order 3 in transit", "Both.", "Sure?", "As I said."]
    assert asyncio.run(read()) == items
