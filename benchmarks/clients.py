"""Processes that use one store at the same time, seen from the one that compares what they get done."""

from __future__ import annotations

import asyncio
import json
import sys
from asyncio.subprocess import PIPE, Process
from pathlib import Path
from typing import Any, Final

import attrs

_LINE: Final = 2**26
"""Bytes that an answer may have: a number for each turn."""


@attrs.define
class Clients:
    """So many processes, each with conversations of its own."""

    processes: list[Process] = attrs.field(factory=list[Process])

    async def add(self, system: str, folder: Path, first: int, count: int) -> None:
        """Start another one, and wait until its conversations are there."""
        arguments = ["-m", "benchmarks.client", system, str(folder), str(first), str(count)]
        process = await asyncio.create_subprocess_exec(sys.executable, *arguments, stdin=PIPE, stdout=PIPE, limit=_LINE)
        self.processes.append(process)
        await self._line_of(process)

    async def take_turns(self, **asked: Any) -> list[dict[str, Any]]:
        """Let all of them take turns, as `client.take_turns` is *asked* to; what each of them measured."""
        for process in self.processes:
            assert process.stdin is not None
            process.stdin.write(json.dumps(asked).encode() + b"\n")
        answers = await asyncio.gather(*map(self._line_of, self.processes))
        return [json.loads(answer) for answer in answers]

    async def _line_of(self, process: Process) -> bytes:
        assert process.stdout is not None
        line = await process.stdout.readline()
        if not line:
            raise RuntimeError("a client has ended")
        return line

    async def end(self) -> None:
        """Let them close what they have open."""
        processes, self.processes = self.processes, []
        for process in processes:
            assert process.stdin is not None
            process.stdin.close()
            await process.wait()
