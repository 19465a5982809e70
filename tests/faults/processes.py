"""The workers as the harness sees them: started, ordered about, killed, stopped, and started again."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import random
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import attrs

from tests.faults.worker import Config

ROOT: Final = Path(__file__).parents[2]


class GoneError(Exception):
    """The worker has ended before it answered."""


class RefusedError(Exception):
    """The worker says that an order has failed, by an error of that *kind*."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(f"{kind}: {text}")
        self.kind = kind


Hear = Callable[[str, str], None]


class Worker:
    """One process of `worker`."""

    def __init__(self, process: asyncio.subprocess.Process, hear: Hear | None) -> None:
        self.process: Final = process
        self.ready: Final = asyncio.Event()
        self.hanging: Final = asyncio.Event()
        self.stalled: Final = asyncio.Event()
        self._hear = hear
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._is_gone = False
        self._listening: Final = asyncio.create_task(self._listen())

    @classmethod
    async def start(cls, config: Config, hear: Hear | None = None, shim: Path | None = None) -> Worker:
        """Start one. It may have ended before this returns."""
        # What it does is not measured: most of them are killed, some while they would write what was measured.
        env = {name: value for name, value in os.environ.items() if not name.startswith("COV")}
        if shim is not None:
            env["LD_PRELOAD"] = str(shim)
        with Path(config.ledger).with_name("workers.log").open("ab") as log:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "tests.faults.worker",
                json.dumps(attrs.asdict(config)),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                cwd=ROOT,
                env=env,
                limit=2**20,
            )
        worker = cls(process, hear)
        await worker.ready.wait()
        return worker

    @property
    def is_gone(self) -> bool:
        """Whether it has ended."""
        return self._is_gone

    @property
    def is_stopped(self) -> bool:
        """Whether a signal has stopped it."""
        stat = Path(f"/proc/{self.process.pid}/stat")
        return stat.exists() and stat.read_text(encoding="utf-8").rpartition(")")[2].split()[0] == "T"

    async def _listen(self) -> None:
        assert self.process.stdout is not None
        while line := await self.process.stdout.readline():
            said = json.loads(line)
            if "event" in said:
                self._note(said)
                continue
            waiting = self._waiting.pop(said["number"], None)
            if waiting is None or waiting.done():
                continue
            if "error" in said:
                waiting.set_exception(RefusedError(said["error"], said["text"]))
            else:
                waiting.set_result(said["result"])
        await self.process.wait()
        self._is_gone = True
        self.ready.set()
        self.stalled.set()
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(GoneError())

    def _note(self, said: dict[str, Any]) -> None:
        if said["event"] == "heard" and self._hear is not None:
            self._hear(said["message"], said["content"])
        elif said["event"] in {"ready", "hanging"}:
            getattr(self, said["event"]).set()

    async def order(self, do: str, **facts: object) -> Any:
        """Have something done.

        Raises:
            RefusedError: It failed.
            GoneError: The worker ended before it said so.
        """
        if self._is_gone:
            raise GoneError
        assert self.process.stdin is not None
        number = next(self._numbers)
        waiting = self._waiting[number] = asyncio.get_running_loop().create_future()
        self.process.stdin.write((json.dumps({"number": number, "do": do, "facts": facts}) + "\n").encode())
        return await waiting

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal, unless it has ended."""
        if self.process.returncode is None:
            self.process.send_signal(number)

    async def ended(self) -> int:
        """Wait for its end, and tell its exit status."""
        await self._listening
        return await self.process.wait()

    async def kill(self) -> None:
        """As the name says."""
        self.send_signal(signal.SIGKILL)
        await self.ended()

    async def end(self) -> int:
        """Let it end by itself."""
        assert self.process.stdin is not None
        if not self._is_gone:
            self.process.stdin.close()
        return await self.ended()


async def until(condition: Callable[[], bool]) -> None:
    """Wait until *condition* holds, for what nobody can tell us of."""
    for _ in itertools.count():
        if condition():
            return
        await asyncio.sleep(0.02)


class Crew:
    """Several workers on one file, some of which may be down."""

    def __init__(self, configs: list[Config], choices: random.Random, shim: Path | None = None) -> None:
        self._configs: Final = configs
        self._choices: Final = choices
        self._shim: Final = shim
        self._machines: Final = itertools.count(1)
        self._changed = asyncio.Event()
        self.workers: Final[dict[int, Worker]] = {}
        self.hear: Hear | None = None
        self.bad_ends: Final[list[str]] = []

    def agent(self, slot: int) -> str:
        """Whose application the worker in that slot is."""
        return self._configs[slot].agent

    async def start(self, slot: int) -> None:
        """Start the worker of that slot."""

        def hear(message: str, content: str) -> None:
            if self.hear is not None:
                self.hear(message, content)

        config = self._configs[slot]
        if config.elsewhere is not None:
            # Another machine each time: nobody there can tell what has become of the one before.
            config = attrs.evolve(config, elsewhere=f"{config.elsewhere}-{next(self._machines)}")
        self.workers[slot] = await Worker.start(config, hear, self._shim)
        self._changed.set()

    async def any(self, agent: str) -> Worker:
        """One that is up."""
        while True:
            up = [
                worker
                for slot, worker in sorted(self.workers.items())
                if self._configs[slot].agent == agent and not worker.stalled.is_set()
            ]
            if up:
                return self._choices.choice(up)
            self._changed.clear()
            await self._changed.wait()

    def wake(self) -> None:
        """Somebody else is up."""
        self._changed.set()

    async def kill(self, slot: int) -> None:
        """Kill that worker and start another."""
        worker = self.workers.pop(slot)
        await worker.kill()
        await self.start(slot)

    def stop(self, slot: int) -> None:
        """Stop that worker (SIGSTOP); its senders send again, to others."""
        worker = self.workers[slot]
        worker.send_signal(signal.SIGSTOP)
        worker.stalled.set()

    def go_on(self, slot: int) -> None:
        """Let that worker go on."""
        worker = self.workers[slot]
        worker.stalled.clear()
        worker.send_signal(signal.SIGCONT)
        self._changed.set()

    async def end(self) -> None:
        """Let all end by themselves."""
        for slot, worker in sorted(self.workers.items()):
            status = await worker.end()
            if status:
                self.bad_ends.append(f"worker {slot} ended with status {status}; see workers.log")
        self.workers.clear()


@asynccontextmanager
async def crew_of(configs: list[Config], choices: random.Random, shim: Path | None = None) -> AsyncIterator[Crew]:
    """Workers that run meanwhile; none is left over."""
    crew = Crew(configs, choices, shim)
    try:
        async with asyncio.TaskGroup() as group:
            for slot in range(len(configs)):
                group.create_task(crew.start(slot))
        yield crew
    finally:
        for worker in crew.workers.values():
            await worker.kill()
