from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from chatflow import (
    AgentSession,
    FilePart,
    ImagePart,
    Message,
    Role,
    SQLiteSessionStore,
    TextPart,
    ToolCall,
    ToolResult,
    UnknownPart,
)
from chatflow.core.approvals import held_back
from tests.cli.conftest import HOSTILE, SUPPORT, Command, fill, order_404, said
from tests.sqlite.chatflow_agent import old_file


async def of_ann(store: SQLiteSessionStore) -> None:
    """A conversation of Ann's."""
    session = await store.for_owner("ann").get_or_create("hers", SUPPORT)
    await session.add_message(Message(Role.USER, "hello"))


def is_plain(text: str) -> bool:
    """Whether it is text and line ends alone."""
    return all(character.isprintable() or character in "\n\t" for character in text)


# --- list ---


def test_list(command: Command, db: Path) -> None:
    """Conversations are listed a line each, with tabs in between, the newest commit first."""
    fill(db, order_404)
    fill(db, lambda store: said(store, "conversation-8", "hi"))
    ran = command("sessions", "list")
    rows = [line.split("\t") for line in ran.out.splitlines()]
    assert ran.status == 0
    assert [(row[0], row[1], row[3]) for row in rows] == [
        ("conversation-8", "Support", ""),
        ("conversation-7", "Support", '{"channel": "whatsapp"}'),
    ]


def test_list_json(command: Command, db: Path) -> None:
    """As JSON each conversation is an object on a line of its own."""
    fill(db, order_404)
    [found] = command("sessions", "list", "--json").documents
    assert found.pop("created_at") <= found.pop("updated_at")
    assert found == {
        "owner": "",
        "session_id": "conversation-7",
        "active_agent_name": "Support",
        "metadata": {"channel": "whatsapp"},
    }


def test_list_pages(command: Command, db: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many are listed as were asked for, over several pages, and it is said if there are more."""
    monkeypatch.setattr("chatflow.cli.sessions._PAGE", 2)

    async def five(store: SQLiteSessionStore) -> None:
        for number in range(5):
            await said(store, f"s{number}", "hi")

    fill(db, five)
    ran = command("sessions", "list", "--limit", "3")
    assert [line.split("\t")[0] for line in ran.out.splitlines()] == ["s4", "s3", "s2"]
    assert "--limit 30 shows more" in ran.err
    ran = command("sessions", "list", "--limit", "5")
    assert (len(ran.out.splitlines()), ran.err) == (5, "")


def test_list_of_owners(command: Command, db: Path) -> None:
    """Without an owner those without one are listed, with --owner that owner's, with --all-owners all, and whose."""
    fill(db, of_ann)
    ran = command("sessions", "list")
    assert (ran.out, "--all-owners shows the others" in ran.err) == ("", True)
    assert command("sessions", "list", "--owner", "ann").out.startswith("hers\t")
    assert command("sessions", "list", "--all-owners").out.startswith("ann\thers\t")
    assert "of 'bob'" in command("sessions", "list", "--owner", "bob").err
    assert command("sessions", "list", "--all-owners", "--owner", "ann").status == 2


# --- show ---


def test_show(command: Command, db: Path) -> None:
    """A conversation is shown with who spoke, which tools ran, where the window begins and what it cost."""
    fill(db, order_404)
    ran = command("sessions", "show", "conversation-7")
    lines = [line.partition(", 2")[0] for line in ran.out.splitlines()]
    assert (ran.status, ran.err) == (0, "")
    assert lines == [
        "conversation-7",
        "  agent     Support",
        "  window    1 of at most 40 turns",
        "  usage     1,000 prompt tokens",  # cut by the partition above
        '  metadata  {"channel": "whatsapp"}',
        "",
        "turn 1",
        "   user | Where is order 404?",
        'Support | calls check_order_status(order_id="404")',
        '   tool | check_order_status gave {"status": "IN_TRANSIT"}',
        "Support | It arrives tomorrow.",
    ]


def test_show_json(command: Command, db: Path) -> None:
    """As JSON it is one document: the session, from which an equal one can be made, and what else is shown."""
    fill(db, order_404)
    [found] = command("sessions", "show", "conversation-7", "--json").documents
    assert AgentSession.from_dict(found["session"]).history[0].text == "Where is order 404?"
    assert found["window"] == {"max_turns": 40, "turns": 1, "begins": 0}
    assert found["pending_approvals"] == []
    assert found["usage"]["total"]["total_tokens"] == 1234


def test_show_window(command: Command, db: Path) -> None:
    """A full window says so, and system messages stand above it."""

    async def work(store: SQLiteSessionStore) -> None:
        session = await store.get_or_create("s", SUPPORT, max_turns=1)
        for text in ("first", "second"):
            await session.add_message(Message(Role.USER, text))
        await session.add_message(Message(Role.SYSTEM, "Be brief."))
        await session.add_message(Message(Role.SYSTEM, "So far: first.", extra={"chatflow": "summary"}))

    fill(db, work)
    out = command("sessions", "show", "s").out
    assert "1 of at most 1 turns; it is full, and each new turn drops the oldest" in out
    assert out.splitlines()[4:9] == [
        "",
        " system | Be brief.",
        "summary | So far: first.",
        "",
        "---- the window begins here: the last turn is kept ----",
    ]
    assert "user | first" not in out


def test_show_window_that_shrinks(command: Command, db: Path) -> None:
    """What the next commit drops stands above the beginning of the window."""
    fill(db, lambda store: said(store, "s", "first", "second", "third"))
    with closing(sqlite3.connect(db)) as connection, connection:
        connection.execute("UPDATE chatflow_sessions SET max_turns = 2 WHERE session_id = 's'")
    lines = command("sessions", "show", "s").out.splitlines()
    rule = next(number for number, line in enumerate(lines) if line.startswith("----"))
    assert lines[rule - 2 : rule] == ["  user | first", ""]
    assert lines[rule].endswith("the last 2 turns are kept; the next commit drops what stands above ----")
    assert lines[rule + 2] == "  user | second"


def test_show_waiting(command: Command, db: Path) -> None:
    """A call that waits for approval is named at the top, and where it stands."""

    async def work(store: SQLiteSessionStore) -> None:
        session = await store.get_or_create("s", SUPPORT)
        call = ToolCall(id="call_9", name="refund", args={"euros": 20})
        async with session.turn():
            await session.add_message(Message(Role.USER, "refund"))
            message = Message(Role.MODEL, "May I?", tool_calls=[call], agent_name="Support")
            await session.add_message(held_back(message, [0], session.history))

    fill(db, work)
    out = command("sessions", "show", "s").out
    assert "  waits     for approval: refund(euros=20), call call_9" in out
    assert "Support | wants to call refund(euros=20), and waits for approval" in out
    assert "Support | May I?" in out
    [found] = command("sessions", "show", "s", "--json").documents
    assert found["pending_approvals"] == [{"id": "call_9", "name": "refund", "args": {"euros": 20}}]


def test_show_costs_of_several(command: Command, db: Path) -> None:
    """Where several agents or models have answered, what each has cost is shown."""

    async def work(store: SQLiteSessionStore) -> None:
        session = await store.get_or_create("s", SUPPORT)
        await session.add_message(Message(Role.USER, "hi"))
        for name, model in (("Support", "gpt"), ("Billing", "claude")):
            extra = {"chatflow_model": model}
            message = Message(Role.MODEL, "hi", agent_name=name, usage={"total_tokens": 5}, extra=extra)
            await session.add_message(message)
        session.state["order"] = "404"
        await session.save()

    fill(db, work)
    out = command("sessions", "show", "s").out
    for line in ("agents    Support: 5 total tokens", "models    claude: 5 total tokens", 'state     {"order": "404"}'):
        assert line in out
    assert "turn 1" in out
    assert ", 10 total tokens" in out


def test_show_parts_and_failures(command: Command, db: Path) -> None:
    """What is no text is named, a failed tool is said to have failed, and an empty answer is a line."""

    async def work(store: SQLiteSessionStore) -> None:
        session = await store.get_or_create("s", SUPPORT)
        picture, file = ImagePart(url="https://x/y.png"), FilePart(data=b"123", media_type="text/plain")
        await session.add_message(Message(Role.USER, [picture, file, TextPart("look"), UnknownPart("hologram", {})]))
        await session.add_message(Message(Role.MODEL, tool_calls=[ToolCall(id="c", name="look")]))
        seen = ToolResult(tool_call_id="c", name="look", content=["seen:", picture])
        result = ToolResult(tool_call_id="c", name="look", content="dark", is_error=True)
        await session.add_message(Message(Role.TOOL, tool_results=[seen, result]))
        await session.add_message(Message(Role.MODEL))

    fill(db, work)
    lines = command("sessions", "show", "s").out.splitlines()[6:]
    assert lines == [
        "  user | (image: https://x/y.png)",
        "       | (file: text/plain 3 bytes)",
        "       | look",
        "       | (hologram)",
        " model | calls look()",
        "  tool | look gave seen:",
        "       | (image: https://x/y.png)",
        "  tool | look failed: dark",
        " model | ",
    ]


def test_show_where_the_window_begins(command: Command, db: Path) -> None:
    """Where the window begins is said where anything stands above it, and turns stand apart."""
    fill(db, lambda store: said(store, "s", "one", "two"))
    lines = command("sessions", "show", "s").out.splitlines()
    assert [line.partition(", ")[0] for line in lines[4:]] == [
        "",
        "turn 1",
        "  user | one",
        "",
        "turn 2",
        "  user | two",
    ]

    async def with_instructions(store: SQLiteSessionStore) -> None:
        session = await store.get_or_create("t", SUPPORT)
        await session.add_message(Message(Role.SYSTEM, "Be kind."))
        await session.add_message(Message(Role.USER, "hi"))

    fill(db, with_instructions)
    lines = command("sessions", "show", "t").out.splitlines()
    assert [line.partition(", ")[0] for line in lines[4:]] == [
        "",
        "system | Be kind.",
        "",
        "---- the window begins here: the last 40 turns are kept ----",
        "turn 1",
        "  user | hi",
    ]


def test_show_wide_names(command: Command, db: Path) -> None:
    """A name of wide characters takes the cells that it takes on a screen, and is cut by them."""

    async def work(store: SQLiteSessionStore) -> None:
        await said(store, "s", "hi")
        session = await store.get_or_create("s", SUPPORT)
        await session.add_message(Message(Role.MODEL, "one", agent_name="客服"))
        await session.add_message(Message(Role.MODEL, "two", agent_name="客服" * 10))

    fill(db, work)
    assert command("sessions", "show", "s").out.splitlines()[-3:] == [
        f"{'user':>20} | hi",
        f"{'客服':>18} | one",
        f"{'客服' * 4} ... | two",
    ]


def test_show_cuts(command: Command, db: Path) -> None:
    """A long text is cut, which is said, unless all of it is asked for; so is a long name."""

    async def work(store: SQLiteSessionStore) -> None:
        await said(store, "s", "x" * 5000)
        session = await store.get_or_create("s", SUPPORT)
        await session.add_message(Message(Role.MODEL, "hi", agent_name="A" * 50))

    fill(db, work)
    out = command("sessions", "show", "s").out
    assert "(... 4,000 more characters; --full shows them)" in out
    assert "x" * 1001 not in out
    assert f"{'A' * 17}... | hi" in out
    assert "x" * 5000 in command("sessions", "show", "s", "--full").out


def test_hostile(command: Command, db: Path) -> None:
    """What a stored message, id or name holds reaches no terminal as it is, and markup is text."""

    async def work(store: SQLiteSessionStore) -> None:
        session_id = HOSTILE.replace("\ud83d", "")
        agent = type(SUPPORT)(f"A{session_id}")
        session = await store.get_or_create(session_id, agent, {"x": HOSTILE})
        await session.add_message(Message(Role.USER, HOSTILE))
        call = ToolCall(id=HOSTILE, name=HOSTILE, args={HOSTILE: HOSTILE})
        await session.add_message(Message(Role.MODEL, HOSTILE, tool_calls=[call], agent_name=HOSTILE))

    fill(db, work)
    session_id = HOSTILE.replace("\ud83d", "")
    for args in (("list",), ("list", "--json"), ("show", session_id), ("show", session_id, "--json"), ("export",)):
        ran = command("sessions", *args)
        assert ran.status == 0
        assert is_plain(ran.out)
        assert is_plain(ran.err)
    assert "[bold]not bold[/bold] :smile:" in command("sessions", "show", session_id).out
    [found] = command("sessions", "show", session_id, "--json").documents
    assert AgentSession.from_dict(found["session"]).history[0].text == HOSTILE


def test_show_nothing(command: Command, db: Path) -> None:
    """A conversation that is not there, or is another owner's, is one line and a status."""
    fill(db, of_ann)
    for args in (("nope",), ("hers",), ("hers", "--owner", "bob")):
        ran = command("sessions", "show", *args)
        assert (ran.status, ran.out, len(ran.err.splitlines())) == (1, "", 1)
        assert "does not exist; `chatflow sessions list` shows those that do" in ran.err
    assert command("sessions", "show", "hers", "--owner", "ann").status == 0


# --- export ---


def test_export_one(command: Command, db: Path) -> None:
    """A conversation is exported as the JSON that makes an equal one."""
    fill(db, order_404)
    [found] = command("sessions", "export", "conversation-7").documents
    session = AgentSession.from_dict(found)
    assert [message.role for message in session.history] == [Role.USER, Role.MODEL, Role.TOOL, Role.MODEL]


def test_export_all(command: Command, db: Path, tmp_path: Path) -> None:
    """Without an id all of an owner is exported, to a file where one is named."""
    fill(db, order_404)
    fill(db, of_ann)
    kinds = [document["kind"] for document in command("sessions", "export").documents]
    assert kinds == ["export", "conversation"]
    target = tmp_path / "ann.jsonl"
    ran = command("sessions", "export", "--owner", "ann", "-o", str(target))
    assert ran.status == 0, ran.err
    lines = [json.loads(line) for line in target.read_text().splitlines()]
    assert [line.get("session", {}).get("session_id") for line in lines] == [None, "hers"]
    assert (ran.out, "2 lines written to" in ran.err) == ("", True)
    assert "1 line written" in command("sessions", "export", "conversation-7", "-o", str(target)).err


def test_export_nothing(command: Command, db: Path, tmp_path: Path) -> None:
    """Where there is nothing to export, the file that was named stays as it is."""
    fill(db, order_404)
    target = tmp_path / "out.json"
    target.write_text("precious")
    assert command("sessions", "export", "nope", "-o", str(target)).status == 1
    assert target.read_text() == "precious"


# --- delete and purge ---


def test_delete(command: Command, db: Path) -> None:
    """A conversation is deleted once that was confirmed, and then is not there."""
    fill(db, order_404)
    ran = command("sessions", "delete", "conversation-7")
    assert (ran.status, ran.err) == (1, "chatflow: nobody is here to be asked; --yes does it without asking\n")
    assert command("sessions", "delete", "conversation-7", "--yes").out == "deleted conversation-7\n"
    assert command("sessions", "delete", "conversation-7", "--yes").status == 1
    fill(db, order_404)
    [found] = command("sessions", "delete", "conversation-7", "-y", "--json").documents
    assert found == {"session_id": "conversation-7", "deleted": True}


@pytest.mark.parametrize(("typed", "status"), [("y\n", 0), ("n\n", 1), ("", 130)])
def test_delete_asks(command: Command, db: Path, monkeypatch: pytest.MonkeyPatch, typed: str, status: int) -> None:
    """A person is asked before a conversation is deleted."""
    fill(db, order_404)
    monkeypatch.setattr("chatflow.cli.app.is_person", lambda: True)
    ran = command("sessions", "delete", "conversation-7", typed=typed)
    assert ran.status == status
    assert "Delete the conversation 'conversation-7' for good?" in ran.err
    assert bool(command("sessions", "list").out) == bool(status)


def test_purge(command: Command, db: Path) -> None:
    """Conversations left alone for too long are deleted, and those whose own time is over."""
    fill(db, partial(order_404, expires_after=0.000001))
    fill(db, of_ann)
    assert command("sessions", "purge").status == 1
    assert command("sessions", "purge", "--yes").out == "deleted 1 conversation\n"
    assert command("sessions", "purge", "--yes", "--idle-for", "30d").out == "deleted 0 conversations\n"
    ran = command("sessions", "purge", "--yes", "--all-owners", "--idle-for", "0.000001s", "--json")
    assert ran.documents == [{"purged": 1}]


@pytest.mark.parametrize("time", ["soon", "0d", "-1d", "3y", "9" * 400 + "w"])
def test_purge_refuses(command: Command, db: Path, time: str) -> None:
    """What is no time is refused before anything is done."""
    fill(db, order_404)
    ran = command("sessions", "purge", "--yes", f"--idle-for={time}")
    assert (ran.status, len(ran.err.splitlines())) == (2, 1)
    assert command("sessions", "purge", "--yes", "--all-owners", "--owner", "ann").status == 2


# --- files ---


@pytest.mark.parametrize("args", [("list",), ("show", "s"), ("export",), ("delete", "s", "-y"), ("purge", "-y")])
def test_no_file(command: Command, db: Path, args: Any) -> None:
    """A file that does not exist is an error of one line, and is not made."""
    ran = command("sessions", *args)
    assert (ran.status, ran.out, len(ran.err.splitlines())) == (1, "", 1)
    assert "there is no file" in ran.err
    assert not db.exists()


@pytest.mark.parametrize(
    ("args", "given_as"),
    [
        (("sessions", "list", "--db", "."), "--db"),
        (("check", "--db", "."), "--db"),
        (("upgrade", "."), "FILE"),
        (("import", "openai-agents", "."), "FILE"),
        (("copy", "sqlite:///.", "postgresql://localhost/x"), "sqlite:///FILE"),
    ],
)
def test_folder(command: Command, args: tuple[str, ...], given_as: str) -> None:
    """A folder in a file's place is said to be one, and which argument is to name the file."""
    ran = command(*args)
    assert (ran.status, ran.err) == (1, f"chatflow: '.' is a folder; name a file in it as {given_as}\n")


@pytest.mark.parametrize(
    ("args", "given_as"),
    [
        (("sessions", "list", "--db"), "--db"),
        (("import", "openai-agents", __file__, "--db"), "--db"),
        (("upgrade",), "FILE"),
    ],
)
@pytest.mark.parametrize("scheme", ["postgresql", "postgres"])
def test_server(command: Command, args: tuple[str, ...], given_as: str, scheme: str) -> None:
    """A server's address in a file's place is said to be one, without its password, and what looks there."""
    ran = command(*args, f"{scheme}://chat:secret@db.example/chat")
    assert (ran.status, len(ran.err.splitlines()), "secret" in ran.err) == (1, 1, False)
    assert ran.err.startswith(f"chatflow: {given_as} names a file, and this is the address of a PostgreSQL database: ")
    assert "`PostgresSessionStore(...).check()`" in ran.err


def test_old_file(command: Command) -> None:
    """A file that has to be upgraded first is named as it was given, with the command that does it."""
    before = old_file(Path("my chats.db")).read_bytes()
    ran = command("sessions", "list", "--db", "my chats.db")
    assert (ran.status, len(ran.err.splitlines())) == (1, 1)
    assert ran.err.startswith("chatflow: 'my chats.db' can't be used: it was written by chatflow-agent")
    assert "`chatflow upgrade 'my chats.db'`" in ran.err
    assert Path("my chats.db").read_bytes() == before


def test_file_with_a_nul(command: Command) -> None:
    """A name that can be no file's is an error of one line."""
    assert "there is no file 'a\\x00b'" in command("sessions", "list", "--db", "a\0b").err


@pytest.mark.parametrize("args", [("list",), ("list", "--json"), ("show", "conversation-7"), ("export",)])
def test_reading_changes_nothing(command: Command, db: Path, args: Any) -> None:
    """What only reads leaves the file as it was, byte for byte."""
    fill(db, order_404)
    before = db.read_bytes()
    assert command("sessions", *args).status == 0
    assert db.read_bytes() == before
