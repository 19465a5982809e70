from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

import chatflow
from chatflow import Message, Role, SQLiteSessionStore
from chatflow.cli.app import Commands
from chatflow.cli.commands import chatflow as command_tree
from chatflow.cli.output import forgive_encodings
from tests.cli.conftest import SUPPORT, Command, fill, order_404
from tests.cli.processes import ROOT

LOADED: Final = """
import sys
from chatflow.cli import main
sys.argv = ["chatflow", "--help"]
try:
    main()
finally:
    print(sorted({"litellm", "pydantic"} & sys.modules.keys()), file=sys.stderr)
"""


def python(*args: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Python with these arguments."""
    return subprocess.run(
        [sys.executable, *args],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), **variables},
        capture_output=True,
        text=True,
        check=False,
    )


def test_help_loads_little() -> None:
    """Help loads neither litellm nor pydantic."""
    ran = python("-c", LOADED)
    assert (ran.returncode, ran.stderr) == (0, "[]\n")
    assert ran.stdout.startswith("Usage: chatflow [OPTIONS] COMMAND [ARGS]...")


def test_as_module(tmp_path: Path) -> None:
    """``python -m chatflow`` is the command, in any encoding."""
    ran = python("-m", "chatflow", "--version")
    assert (ran.returncode, ran.stdout) == (0, f"chatflow, version {chatflow.__version__}\n")
    fill(tmp_path / "¿.db", order_404)
    ran = python("-m", "chatflow", "sessions", "show", "¿", "--db", str(tmp_path / "¿.db"), PYTHONIOENCODING="ascii")
    assert (ran.returncode, "session '\\xbf' does not exist" in ran.stderr) == (1, True)


@pytest.mark.parametrize("args", [("list",), ("list", "--json"), ("show", "s"), ("export",)])
def test_closed_pipe(tmp_path: Path, args: tuple[str, ...]) -> None:
    """Whoever reads the output and has read enough ends the command, without a word."""

    async def work(store: SQLiteSessionStore) -> None:
        session = await store.get_or_create("s", SUPPORT, {"long": "x" * 200_000})
        await session.add_message(Message(Role.USER, "x\n" * 400))

    fill(tmp_path / "chat.db", work)
    reading, writing = os.pipe()
    os.close(reading)
    ran = subprocess.run(
        [sys.executable, "-m", "chatflow", "sessions", *args, "--db", str(tmp_path / "chat.db")],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=writing,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    os.close(writing)
    assert (ran.returncode, ran.stderr) == (1, "")


@pytest.mark.parametrize("missing", ["rich", "click"])
def test_missing_extra(tmp_path: Path, missing: str) -> None:
    """Without the extra the command says on one line how to install it; `import chatflow` does without."""
    (tmp_path / f"{missing}.py").write_text(
        f"raise ModuleNotFoundError(\"No module named '{missing}'\", name='{missing}')"
    )
    ran = python("-m", "chatflow", PYTHONPATH=f"{tmp_path}:{ROOT}")
    assert (ran.returncode, ran.stdout, len(ran.stderr.splitlines())) == (1, "", 1)
    assert ran.stderr.endswith(": pip install click rich\n")
    assert python("-c", "import chatflow", PYTHONPATH=f"{tmp_path}:{ROOT}").returncode == 0


def test_another_missing_module(tmp_path: Path) -> None:
    """A module that is missing for another reason is no matter of the extra."""
    (tmp_path / "rich.py").write_text("import nothing_of_that_name")
    ran = python("-m", "chatflow", PYTHONPATH=f"{tmp_path}:{ROOT}")
    assert "ModuleNotFoundError: No module named 'nothing_of_that_name'" in ran.stderr


@pytest.mark.parametrize(
    ("args", "reason"),
    [
        (("sessions", "lost"), "No such command 'lost'"),
        (("sessions", "list", "--nope"), "No such option"),
        (("sessions", "show"), "Missing argument 'SESSION_ID'"),
        (("sessions", "list", "--limit", "0"), "0 is not in the range"),
    ],
)
def test_usage(command: Command, args: tuple[str, ...], reason: str) -> None:
    """What is typed wrongly is an error of one line, which names the help, and status 2."""
    ran = command(*args)
    assert (ran.status, ran.out, len(ran.err.splitlines())) == (2, "", 1)
    assert reason in ran.err
    assert "--help` shows what there is" in ran.err


@pytest.mark.parametrize("words", [(), ("sessions",), ("turns",), ("import",)])
def test_group_alone(command: Command, words: tuple[str, ...]) -> None:
    """A group without a command shows its help, as it is, and status 2."""
    ran = command(*words)
    assert (ran.status, ran.out, ran.err) == (2, "", command(*words, "--help").out)
    assert len(ran.err.splitlines()) > 5


def test_debug(command: Command, db: Path) -> None:
    """With --debug an error is raised as it is."""
    fill(db, order_404)
    with pytest.raises(chatflow.SessionNotFoundError):
        command("sessions", "show", "nope", "--debug")


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ZeroDivisionError("oops"), "ZeroDivisionError: oops; --debug shows where it comes from"),
        (PermissionError(13, "Permission denied", "/x\x1b"), "Permission denied: '/x\\x1b'"),
        (OSError("odd"), "odd"),
        (TimeoutError("the turn took longer"), "the turn took longer"),
        (ValueError("session_id must not be empty"), "session_id must not be empty"),
    ],
)
def test_errors(command: Command, db: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, said: str) -> None:
    """An error of whatever kind is one line, and says what to do, or which file it is about."""

    def broken(*_: object, **__: object) -> None:
        raise error

    fill(db, order_404)
    monkeypatch.setattr("chatflow.cli.sessions.print_session", broken)
    ran = command("sessions", "show", "conversation-7")
    assert (ran.status, ran.err) == (1, f"chatflow: {said}\n")


def test_streams_of_another_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a program has put something else in the place of a stream, that stays as it is."""
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stdin", stream)
    forgive_encodings()
    assert sys.stdin is stream


def commands(group: Commands, prefix: str = "") -> list[str]:
    """All commands of a group, by their words."""
    found: list[str] = []
    for name, each in group.commands.items():
        found += commands(each, f"{prefix}{name} ") if isinstance(each, Commands) else [f"{prefix}{name}"]
    return found


@pytest.mark.parametrize("words", commands(command_tree))
def test_help(command: Command, words: str) -> None:
    """Each command says what it does, and has --debug; all but chat have --json."""
    ran = command(*words.split(), "--help")
    assert (ran.status, ran.err) == (0, "")
    assert "--debug" in ran.out
    assert ("--json" in ran.out) == (words != "chat")
