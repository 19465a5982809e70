"""What ``chatflow copy`` says before it needs a server; the rest is in tests/postgres/test_copying.py."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import pytest

from tests.cli.conftest import Command, fill, order_404
from tests.cli.processes import ROOT
from tests.cli.test_start import python
from tests.sqlite.chatflow_agent import old_file

NOBODY: Final = "postgresql://chat:secret@localhost:1/chat"
"""Where no server is."""


@pytest.mark.parametrize(
    ("source", "target", "reason"),
    [
        ("chat.db", NOBODY, "'chat.db' is not of the form sqlite:///FILE"),
        ("sqlite:///", NOBODY, "'sqlite:///' is not of the form sqlite:///FILE"),
        ("sqlite:///{db}", "host=db.example", "'host=db.example' does not begin with postgresql://"),
    ],
)
def test_usage(command: Command, db: Path, source: str, target: str, reason: str) -> None:
    """What neither side can be is an error of one line, and status 2."""
    fill(db, order_404)
    ran = command("copy", source.format(db=db), target)
    assert (ran.status, ran.out, len(ran.err.splitlines())) == (2, "", 1)
    assert reason in ran.err


def test_no_file(command: Command, db: Path) -> None:
    """A file that is not there is an error, and is not made."""
    ran = command("copy", f"sqlite:///{db}", NOBODY)
    assert (ran.status, f"there is no file {str(db)!r}; sqlite:///FILE names" in ran.err, db.exists()) == (
        1,
        True,
        False,
    )


def test_old_file(command: Command, db: Path) -> None:
    """A file of an older format is refused untouched, with advice."""
    before = old_file(db).read_bytes()
    ran = command("copy", f"sqlite:///{db}", NOBODY)
    assert (ran.status, len(ran.err.splitlines())) == (1, 1)
    assert f"has to be upgraded first: `chatflow upgrade {db}` does that" in ran.err
    assert db.read_bytes() == before


def test_bad_schema(command: Command, db: Path) -> None:
    """A schema that can't be a name is an error."""
    fill(db, order_404)
    ran = command("copy", f"sqlite:///{db}", NOBODY, "--schema", "No")
    assert (ran.status, "schema must be of small letters" in ran.err) == (1, True)


def test_no_server(command: Command, db: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that can't be reached is an error, which does not tell the password."""
    monkeypatch.setattr("chatflow.postgres.database.BUSY_SECONDS", 0.0)
    fill(db, order_404)
    ran = command("copy", f"sqlite:///{db}", NOBODY)
    assert (ran.status, ran.out, "secret" in ran.err) == (1, "", False)
    assert "store 'postgresql://chat@localhost:1/chat': the server can't be reached" in ran.err


@pytest.mark.parametrize(
    ("missing", "said"),
    [
        ("psycopg", 'chatflow: psycopg is missing; what PostgreSQL needs: pip install "./chatflow[postgres]"'),
        ("typing_extensions_of_somebody", "ModuleNotFoundError: "),
    ],
)
def test_missing_extra(tmp_path: Path, missing: str, said: str) -> None:
    """Without the driver the command says on one line how to install it."""
    fill(tmp_path / "chat.db", order_404)
    (tmp_path / "psycopg.py").write_text(
        f"raise ModuleNotFoundError(\"No module named '{missing}'\", name='{missing}')"
    )
    ran = python(
        *("-m", "chatflow", "copy", f"sqlite:///{tmp_path / 'chat.db'}", NOBODY), PYTHONPATH=f"{tmp_path}:{ROOT}"
    )
    assert (ran.returncode, ran.stdout, len(ran.stderr.splitlines())) == (1, "", 1)
    assert said in ran.stderr


def test_missing_driver(tmp_path: Path) -> None:
    """Without the driver the store can't be imported, and the error says how to install it."""
    (tmp_path / "psycopg.py").write_text("raise ModuleNotFoundError(\"No module named 'psycopg'\", name='psycopg')")
    ran = python("-c", "from chatflow.postgres import PostgresSessionStore", PYTHONPATH=f"{tmp_path}:{ROOT}")
    assert ran.returncode == 1
    assert ran.stderr.endswith('Error: psycopg is missing; what PostgreSQL needs: pip install "./chatflow[postgres]"\n')
