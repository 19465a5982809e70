"""A system's own process, seen from the one that compares them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

from benchmarks.plan import ROOT, Plan
from benchmarks.server import COUNTERS
from benchmarks.systems import SYSTEMS

PATIENCE: Final = 20
"""Seconds that a process has to end. Some packages leave threads that keep theirs alive for ever."""


class Process:
    """It is started when it is made, by the interpreter that has the system's package."""

    def __init__(self, theme: str, system: str, plan: Plan) -> None:
        folder = plan.folder / f"{theme}-{system}"
        folder.mkdir()
        is_ours = SYSTEMS[system].package is None
        python = Path(sys.executable) if is_ours else plan.peers
        paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH") if is_ours else None])]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
        if SYSTEMS[system].on_server:
            assert plan.server is not None
            environment |= plan.server.environment
        elif plan.shim is not None:
            counters = folder / "fsyncs"
            counters.write_bytes(bytes(COUNTERS))
            environment |= {"LD_PRELOAD": str(plan.shim), "SLOW_FSYNC_FILE": str(counters)}
        with plan.log.open("a") as log:
            self._process = subprocess.Popen(  # noqa: S603  # an interpreter, and a module of ours
                [str(python), "-m", "benchmarks.worker", theme, system, str(folder), str(plan.seconds)],
                cwd=ROOT,
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )

    def ask(self, what: str, settings: dict[str, Any]) -> dict[str, Any]:
        """Let it do something, and wait for its answer."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps({"do": what, "settings": settings}) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            return {"failed": "its process has ended"}
        line = self._process.stdout.readline()
        answer: dict[str, Any] = json.loads(line) if line else {"failed": "its process has ended"}
        return answer

    def end(self) -> None:
        """Let it close its system and end."""
        try:
            self._process.communicate(timeout=PATIENCE)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.communicate()
