from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from chatflow.sqlite import holder
from chatflow.sqlite.holder import is_gone, new_holder


def test_unlike_any_other() -> None:
    """Two holders of one process differ."""
    assert new_holder() != new_holder()


def test_living_here() -> None:
    """A holder that this process has open is not gone, and one of its own that is closed is."""
    mine, closed = new_holder(), new_holder()
    assert not is_gone(mine, {mine})
    assert is_gone(closed, {mine})


def test_dead_process() -> None:
    """The holder of a process that has ended is gone."""
    code = "from chatflow.sqlite.holder import new_holder; print(new_holder())"
    ended = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=True)
    assert is_gone(ended.stdout.strip(), set())


def test_living_process() -> None:
    """The holder of another process that lives is not gone."""
    started = Path(f"/proc/{os.getppid()}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[19]
    assert not is_gone(f"{socket.gethostname()}/{os.getppid()}/{started}/x", set())


def test_number_given_out_again() -> None:
    """A holder whose process number another process has today is gone."""
    assert is_gone(f"{socket.gethostname()}/{os.getppid()}/1/x", set())


@pytest.mark.parametrize("name", ["another.example/1/1/x", "", "/", f"{socket.gethostname()}/x/1/x"])
def test_cannot_tell(name: str) -> None:
    """A process of another host counts as alive, and so does a name that is none of ours."""
    assert not is_gone(name, set())


def test_somebody_elses_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that may not be signalled is alive."""

    def refuse(pid: int, signal: int) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "kill", refuse)
    started = holder._started(os.getppid())
    assert not is_gone(f"{socket.gethostname()}/{os.getppid()}/{started}/x", set())


def test_no_such_process() -> None:
    """Of a process that is not there, no start is known."""
    assert holder._started(2**30) == ""


def test_name_with_spaces_and_parentheses(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A process's start is read past a name that holds spaces and parentheses."""
    program = tmp_path / "a) 1 (b"
    program.symlink_to("/bin/sleep")
    with subprocess.Popen([str(program), "1000"]) as process:
        try:
            assert holder._started(process.pid).isdigit()
        finally:
            process.kill()
