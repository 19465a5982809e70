"""The command at a terminal: a process of its own behind a pseudo-terminal, typed to and read from."""

from __future__ import annotations

import os
import pty
import re
import select
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from tests.cli.processes import ROOT

ESCAPES: Final = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")

_AT_TERMINAL: Final = """
import fcntl, runpy, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
runpy.run_module("chatflow", run_name="__main__", alter_sys=True)
"""
"""Makes the terminal its own, so that Ctrl-C is a signal to it, and to nobody else."""

CTRL_C: Final = "\x03"
CTRL_D: Final = "\x04"


class Terminal:
    """What is on the screen so far, and the keyboard."""

    def __init__(self, process: subprocess.Popen[bytes], descriptor: int) -> None:
        self.process: Final = process
        self._descriptor: Final = descriptor
        self.raw = ""
        self._seen = 0

    def until(self, text: str, *, pressing: str = "") -> str:
        """Read until *text* has come since the last time; what has come up to it, without colours.

        *pressing* is a key that is to have it come. It is pressed again where nothing comes of it: `input` loses a
        signal that arrives between its prompt and its wait for a key, which only a program is quick enough for.
        """
        self.type(pressing)
        while text not in (new := ESCAPES.sub("", self.raw)[self._seen :]):
            while pressing and not select.select([self._descriptor], [], [], 5)[0]:
                self.type(pressing)
            assert self._read(), f"{text!r} has not come: {new!r}"
        end = new.index(text) + len(text)
        self._seen += end
        return new[:end]

    def type(self, text: str) -> None:
        """Press these keys."""
        os.write(self._descriptor, text.encode())

    def status(self, *, pressing: str = "") -> int:
        """Read to the end; how it ended. *pressing* is as in `until`."""
        self.type(pressing)
        while True:
            while pressing and not select.select([self._descriptor], [], [], 5)[0]:
                self.type(pressing)
            if not self._read():
                return self.process.wait()

    def _read(self) -> bool:
        try:
            data = os.read(self._descriptor, 65536)
        except OSError:  # the process has closed its side
            return False
        self.raw += data.decode(errors="replace")
        return True


@contextmanager
def at_terminal(*args: str, folder: Path, **variables: str) -> Iterator[Terminal]:
    """``chatflow`` with these arguments, in *folder*, at a terminal."""
    ours, theirs = pty.openpty()
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TERM": "xterm-256color", "COLUMNS": "120", **variables}
    process = subprocess.Popen(
        [sys.executable, "-c", _AT_TERMINAL, *args],
        cwd=folder,
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env=environment,
        start_new_session=True,
    )
    os.close(theirs)
    try:
        yield Terminal(process, ours)
    finally:
        process.kill()
        process.wait()
        os.close(ours)
