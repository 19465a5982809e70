"""Other processes, which keep in step with the test by lines on their pipes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).parents[2]


class Program:
    """One of `program.py`'s programs, in a process of its own."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process

    def heard(self) -> Any:
        """What it says next."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, "the program ended without a word"
        return json.loads(line)

    def go_on(self) -> None:
        """Tell it to."""
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def stop(self) -> None:
        """Stop it: it runs no more until `resume`, and knows nothing of it."""
        self.process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self.process.pid, os.WSTOPPED | os.WNOWAIT)

    def resume(self) -> None:
        """Let it run again."""
        self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """End it as a crash would."""
        self.process.kill()
        self.process.wait()


@contextmanager
def started(name: str, *arguments: object) -> Iterator[Program]:
    """A program that runs meanwhile."""
    with subprocess.Popen(
        [sys.executable, "-m", "tests.sqlite.program", name, *(str(each) for each in arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    ) as process:
        try:
            yield Program(process)
        except BaseException:
            process.kill()
            raise


def all_at_once(count: int, name: str, *arguments: object) -> list[Any]:
    """Run so many copies of a program, which begin together, and return what they say in the end."""
    with ExitStack() as stack:
        programs = [stack.enter_context(started(name, *arguments)) for _ in range(count)]
        for each in programs:
            assert each.heard() == "ready"
        for each in programs:
            each.go_on()
        return [each.heard() for each in programs]
