from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from chatflow.core import holder
from chatflow.core.holder import is_gone, new_holder

HERE: Final = new_holder().partition("/")[0]
GONE: Final = 2**22 + 1
"""A number that no process has: Linux gives out none above 2**22."""


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
    code = "from chatflow.core.holder import new_holder; print(new_holder())"
    ended = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=True)
    assert is_gone(ended.stdout.strip(), set())


def test_living_process() -> None:
    """The holder of another process that lives is not gone."""
    started = Path(f"/proc/{os.getppid()}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[19]
    assert not is_gone(f"{HERE}/{os.getppid()}/{started}/x", set())


def test_number_given_out_again() -> None:
    """A holder whose process number another process has today is gone."""
    assert is_gone(f"{HERE}/{os.getppid()}/1/x", set())


@pytest.mark.parametrize("name", ["another.example/1/1/x", "", "/", f"{HERE}/x/1/x"])
def test_cannot_tell(name: str) -> None:
    """A process of another host counts as alive, and so does a name that is none of ours."""
    assert not is_gone(name, set())


def test_somebody_elses_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that may not be signalled is alive."""

    def refuse(pid: int, signal: int) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "kill", refuse)
    started = holder._started(os.getppid())
    assert not is_gone(f"{HERE}/{os.getppid()}/{started}/x", set())


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


def test_machine() -> None:
    """A holder's name tells the host, the boot and the namespace in which its process has its number."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
    namespace = str(Path("/proc/self/ns/pid").readlink())
    assert f"{socket.gethostname()},{boot},{namespace}" == HERE
    assert is_gone(f"{HERE}/{GONE}/1/x", set())


@pytest.mark.parametrize("part", ["boot", "namespace"])
def test_another_container(part: str) -> None:
    """A process of another boot, or of another namespace, of a host of the same name counts as alive."""
    host, boot, namespace = HERE.split(",")
    other = f"{host},{boot},pid:[1]" if part == "namespace" else f"{host},{boot[::-1]},{namespace}"
    assert not is_gone(f"{other}/{GONE}/1/x", set())


def test_without_proc(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Where the system tells neither boot nor namespace the host's name alone decides."""
    monkeypatch.setattr(holder, "_BOOT_ID", tmp_path / "missing")
    monkeypatch.setattr(holder, "_PID_NAMESPACE", tmp_path / "missing")
    assert holder._machine() == f"{socket.gethostname()},,"


def test_host_with_a_slash(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host's name with a slash in it does not move the process's number to another place."""
    monkeypatch.setattr(socket, "gethostname", lambda: "a/b")
    assert holder._machine().startswith("a_b,")
