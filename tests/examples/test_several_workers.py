from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Final

from tests.examples.running import EXAMPLES, environment, printed

NAME: Final = "several_workers.py"
RIGHT: Final = "each message has one answer, in its place"


def test_workers_are_killed(tmp_path: Path) -> None:
    """Workers are killed, and each of the messages, which come twice, has one answer, in its place."""
    first, second, third = printed(NAME, "24", "2", folder=tmp_path)
    killed = re.fullmatch("24 messages, each delivered twice; 2 workers, and ([1-9]) that were killed", first)
    assert killed is not None
    assert re.fullmatch("24 answers in the file, all sent; [0-9]+ times one was sent again, after a kill", second)
    assert third == RIGHT
    assert list(tmp_path.iterdir()) == []


def children(parent: int) -> list[int]:
    """The processes that a process has started, and that are still there."""
    listed = subprocess.run(["ps", "-A", "-o", "pid=", "-o", "ppid="], capture_output=True, text=True, check=True)
    pairs = (map(int, line.split()) for line in listed.stdout.splitlines())
    return [pid for pid, of in pairs if of == parent]


def test_somebody_else_kills_them_all(tmp_path: Path) -> None:
    """Where all workers are killed at once, by no doing of the example's, others take their places."""
    command = [sys.executable, str(EXAMPLES / NAME), "24", "2"]
    with subprocess.Popen(
        command, env=environment(), cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as example:
        try:
            while len(workers := children(example.pid)) < 2:
                pass
            for worker in workers:
                os.kill(worker, signal.SIGKILL)
            said, complained = example.communicate()
        finally:
            example.kill()
    assert (example.returncode, complained) == (0, "")
    assert said.splitlines()[-1] == RIGHT
