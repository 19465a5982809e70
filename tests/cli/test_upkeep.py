from __future__ import annotations

import shutil
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Final

import pytest

from tests.cli.conftest import Command, fill, order_404
from tests.cli.processes import holding_a_turn
from tests.sqlite.chatflow_agent import add_messages, empty_file, old_file


def damage(path: Path, statement: str) -> None:
    """Change the file behind the store's back."""
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute(statement)


UNREADABLE: Final = "UPDATE chatflow_messages SET message_json = 'not json' WHERE message_json LIKE '%arrives%'"


def test_whole(command: Command, db: Path) -> None:
    """A whole file has nothing wrong with it, which is said, and no status."""
    fill(db, order_404)
    ran = command("check")
    assert (ran.status, ran.out, ran.err) == (0, "", "nothing is wrong\n")
    ran = command("repair")
    assert (ran.status, ran.out, ran.err) == (0, "", "nothing was wrong\n")


def test_damaged(command: Command, db: Path) -> None:
    """A fault is a line and a status; checking changes nothing, and repairing mends it once."""
    fill(db, order_404)
    damage(db, UNREADABLE)
    before = db.read_bytes()
    ran = command("check")
    assert ran.status == 1
    assert ran.out.startswith("message\t\tconversation-7\tchatflow_messages, ")
    assert "1 fault; `chatflow repair` mends" in ran.err
    [fault] = command("check", "--json").documents
    assert {fault[name] for name in ("kind", "owner", "session_id")} == {"message", "", "conversation-7"}
    assert db.read_bytes() == before
    ran = command("repair")
    assert (ran.status, ran.out, ran.err) == (
        1,
        "",
        "chatflow: nobody is here to be asked; --yes does it without asking\n",
    )
    assert db.read_bytes() == before
    ran = command("repair", "--yes")
    assert (ran.status, ran.out.startswith("set aside\tmessage\t\tconversation-7\t")) == (0, True)
    assert ran.err == "1 message set aside, whole or in part, in the table chatflow_set_aside\n1 fault mended\n"
    assert command("repair", "--json").documents == []
    assert command("check").status == 0


@pytest.mark.parametrize(("typed", "status"), [("y\n", 0), ("n\n", 1), ("", 130)])
def test_repair_asks(command: Command, db: Path, monkeypatch: pytest.MonkeyPatch, typed: str, status: int) -> None:
    """A person is asked before anything is mended, and told how many messages leave their conversations."""
    fill(db, order_404)
    damage(db, "UPDATE chatflow_messages SET message_json = '{}' WHERE message_json LIKE '%Where is order%'")
    monkeypatch.setattr("chatflow.cli.app.is_person", lambda: True)
    ran = command("repair", typed=typed)
    assert ran.status == status
    asked = (
        "Mend 4 faults: 4 messages leave their conversations, whole or in part, and can be found in chatflow_set_aside?"
    )
    assert ran.err.startswith(asked)
    assert ("4 messages set aside" in ran.err) == (status == 0)
    assert command("check").status == (status != 0)


def test_repair_takes_nothing_out(command: Command, db: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no message leaves a conversation, nothing is said of any."""
    fill(db, order_404)
    damage(db, "UPDATE chatflow_sessions SET metadata_json = 'not json'")
    monkeypatch.setattr("chatflow.cli.app.is_person", lambda: True)
    ran = command("repair", typed="y\n")
    assert (ran.status, "Mend 1 fault? [y/N]" in ran.err, "message" in ran.err) == (0, True, False)
    assert ran.err.endswith("1 fault mended\n")


def test_shown_while_damaged(command: Command, db: Path) -> None:
    """A conversation that can't be read says what is wrong with it, and what mends it."""
    fill(db, order_404)
    damage(db, UNREADABLE)
    ran = command("sessions", "show", "conversation-7")
    assert (ran.status, len(ran.err.splitlines())) == (1, 1)
    assert "can't be loaded: chatflow_messages" in ran.err
    assert ran.err.endswith("`chatflow repair` mends it\n")


def test_repair_json(command: Command, db: Path) -> None:
    """As JSON each thing done is an object with its fault."""
    fill(db, order_404)
    damage(db, UNREADABLE)
    [done] = command("repair", "--yes", "--json").documents
    assert (done["action"], done["done"], done["kind"]) == ("set aside", True, "message")


def test_repair_beside_a_turn(command: Command, db: Path) -> None:
    """A conversation with a turn under way is left alone, which is said, and a status."""
    fill(db, order_404)
    with holding_a_turn(db):
        damage(db, UNREADABLE)
        ran = command("repair", "--yes")
    assert (ran.status, ran.out.startswith("left alone\tmessage\t")) == (1, True)
    assert "1 fault left; those of turns under way are mended when they have ended" in ran.err


def test_no_store(command: Command, db: Path) -> None:
    """What is no store is refused on one line, untouched."""
    db.write_text("Dear diary,\n" * 1000)
    for name in ("check", "repair"):
        ran = command(name)
        assert (ran.status, ran.out, len(ran.err.splitlines())) == (1, "", 1)
        assert "it is not an SQLite database; it was left untouched" in ran.err
    assert db.read_text().startswith("Dear diary")


def test_upgrade(command: Command, tmp_path: Path) -> None:
    """A file of chatflow-agent is upgraded in place, and what was set aside is listed."""
    path = old_file(tmp_path / "old.db")
    add_messages(path, "conversation-7", ["not json"])
    sessions = command("sessions", "list", "--db", str(path))
    assert (sessions.status, f"`chatflow upgrade {path}` does that" in sessions.err) == (1, True)
    copy = shutil.copy(path, tmp_path / "copy.db")
    ran = command("upgrade", str(path))
    assert ran.status == 0
    assert ran.out.splitlines()[0].startswith(f"{path} was chatflow-agent's, and holds ")
    assert any("not json" in line or "chatflow_messages" in line for line in ran.out.splitlines()[1:])
    [found] = command("upgrade", str(copy), "--json").documents
    assert found["was"] == "chatflow-agent's"
    assert found["conversations"] == len(command("sessions", "list", "--db", str(path)).out.splitlines()) > 0
    assert {"session_id", "source", "reason"} == found["set_aside"][0].keys()


def test_upgrade_pages(command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Conversations are counted over several pages."""
    monkeypatch.setattr("chatflow.cli.upkeep._PAGE", 1)
    path = old_file(tmp_path / "old.db")
    command("upgrade", str(path))
    count = len(command("sessions", "list", "--db", str(path)).out.splitlines())
    assert f"holds {count} conversation" in command("upgrade", str(path)).out


def test_upgrade_of_what_needs_none(command: Command, db: Path, tmp_path: Path) -> None:
    """A file of this version stays as it is; an empty one, or another program's, is refused."""
    fill(db, order_404)
    assert "was of this version, and holds 1 conversation" in command("upgrade", str(db)).out
    empty = tmp_path / "empty.db"
    empty.touch()
    assert "is empty, and there is nothing to upgrade" in command("upgrade", str(empty)).err
    other = tmp_path / "other.db"
    with closing(sqlite3.connect(other)) as connection:
        connection.execute("CREATE TABLE orders (id)")
    assert "it is another program's database" in command("upgrade", str(other)).err
    assert command("upgrade", str(tmp_path / "none.db")).status == 1
    assert "holds 0 conversations" in command("upgrade", str(empty_file(tmp_path / "old.db"))).out
