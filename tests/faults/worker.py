"""A process of an application: ``python -m tests.faults.worker CONFIG``.

It reads orders from its standard input, a line of JSON each, does them at the same time, and says what came of each. A
message's text is its name and what the model is to do: batches of tools, separated by spaces.
"""

from __future__ import annotations

import asyncio
import ctypes
import datetime as dt
import itertools
import json
import os
import resource
import signal
import socket
import sys
import time
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import anyio
import attrs
from anyio.abc import TaskGroup

from chatflow import (
    Agent,
    AgentResponse,
    EngineRequest,
    PendingTurn,
    Role,
    Runner,
    ScriptedEngine,
    SQLiteSessionStore,
    ToolCall,
    ToolContext,
    tool,
)
from chatflow.core.backend import StoreBackend
from chatflow.engines.scripted import Reply, user_text
from tests.faults import points
from tests.faults.ledger import Ledger


@attrs.frozen(kw_only=True)
class Config:
    """What a worker is told when it starts."""

    address: str
    ledger: str
    agent: str = "Support"
    lease_seconds: float = 1.0
    max_attempts: int = 100
    working: bool = False
    elsewhere: str | None = None
    """The name of a host: others can't see whether this process is gone, and have to watch its beats."""
    point: str | None = None
    nth: int = 1
    stop: bool = False
    """Whether it is only stopped at its point, as by SIGSTOP."""
    uid: int | None = None
    patience: float | None = None
    """How long its operations wait for a server that is away, in seconds, instead of ten."""


def tell(**facts: object) -> None:
    """Say something to the harness."""
    os.write(1, (json.dumps(facts) + "\n").encode())


def store_of(config: Config) -> StoreBackend:
    """The store at its address: a DSN, or a file's path."""
    address = config.address
    if not address.startswith("postgresql://"):
        return SQLiteSessionStore(address, default_max_turns=1_000_000)
    # A worker on a file starts sooner without it.
    from chatflow.postgres import PostgresSessionStore, database

    if config.patience is not None:
        database.BUSY_SECONDS = config.patience  # type: ignore[misc]  # final for all but those who test what comes after
    return PostgresSessionStore(address, default_max_turns=1_000_000)


class Program:
    """One process."""

    def __init__(self, config: Config) -> None:
        self._ledger = Ledger(Path(config.ledger))
        self._config = config
        self._numbers = itertools.count(1)
        self._to_fail: set[str] = set()
        self._gap = 0.0
        self._stack = AsyncExitStack()
        self.store = store_of(config)
        self.runner = Runner(
            Agent(config.agent, "Answer.", "none", tools=self._tools()),
            self.store,
            ScriptedEngine(default=self._reply),
            lease_seconds=config.lease_seconds,
            max_attempts=config.max_attempts,
            turn_timeout=None,
        )

    def _tools(self) -> list[Any]:
        async def run(name: str, message: str, batch: int, context: ToolContext) -> dict[str, str]:
            points.hit(f"{name} tool: before")
            number = f"{os.getpid()}.{next(self._numbers)}"
            self._ledger.note(
                "effect", tool=name, key=context.idempotency_key, message=message, batch=batch, run=number
            )
            points.hit(f"{name} tool: after")
            # Others get on in the middle of a turn.
            await asyncio.sleep(0)
            context.state[f"{message}.{batch}.{name}"] = number
            return {"run": number}

        @tool
        async def plain(message: str, batch: int, context: ToolContext) -> dict[str, str]:
            return await run("plain", message, batch, context)

        @tool(idempotent=True)
        async def idempotent(message: str, batch: int, context: ToolContext) -> dict[str, str]:
            return await run("idempotent", message, batch, context)

        @tool(idempotent=True)
        async def hang(message: str, batch: int, context: ToolContext) -> dict[str, str]:
            # Where this process is told to wait; another one runs it like any idempotent tool.
            if message in self._hanging:
                tell(event="hanging", message=message)
                await self._let_go.wait()
            return await run("idempotent", message, batch, context)

        self._hanging: set[str] = set()
        self._let_go = anyio.Event()
        return [plain, idempotent, hang]

    def _reply(self, request: EngineRequest) -> Reply:
        points.hit("model: before")
        message, *batches = user_text(request).split()
        number = 0
        for earlier in reversed(request.messages):
            if earlier.role is Role.USER:
                break
            number += bool(earlier.tool_calls)
        self._ledger.note("asked", message=message, batch=number, agent=self._config.agent, pid=os.getpid())
        if batches == ["die"]:
            os.kill(os.getpid(), signal.SIGKILL)
        if message in self._to_fail:
            self._to_fail.discard(message)
            raise RuntimeError("as it was told to")
        points.hit("model: after")
        if number < len(batches):
            return [
                ToolCall(id=f"{message}.{number}.{name}", name=name, args={"message": message, "batch": number})
                for name in batches[number].split(",")
            ]
        return f"{message} by {self._config.agent} {os.getpid()}.{next(self._numbers)}"

    async def _heard(self, turn: PendingTurn, response: AgentResponse) -> None:
        points.hit("on_response: before")
        self._ledger.note("heard", message=turn.message_id, session=turn.session_id, content=response.content)
        tell(event="heard", message=turn.message_id, content=response.content)
        points.hit("on_response: after")

    # --- orders ---

    async def run(self, session: str, text: str, message: str, padding: int = 0, **flags: bool) -> object:
        """Answer a message."""
        if flags.get("fails"):
            self._to_fail.add(message)
        noted = {message: "x" * padding}
        response = await self.runner.run_async(session, text, noted, message_id=message)
        return {"content": response.content, "duplicate": response.duplicate, "stop": response.stop_reason}

    async def accept(self, session: str, text: str, message: str, padding: int = 0, **flags: bool) -> object:
        """Accept a message."""
        if flags.get("fails"):
            self._to_fail.add(message)
        receipt = await self.runner.accept(session, text, message_id=message, metadata={message: "x" * padding})
        return {"duplicate": receipt.duplicate}

    async def delete(self, session: str) -> object:
        """Delete a conversation."""
        return await self.store.delete(session)

    async def hold_up(self, message: str) -> object:
        """Wait in the middle of that message's turn, if it comes to it, until `let_go`."""
        self._hanging.add(message)
        return True

    async def let_go(self) -> object:
        """Go on."""
        self._let_go.set()
        self._let_go = anyio.Event()
        self._hanging.clear()
        return True

    async def work(self) -> object:
        """Begin to do accepted work."""
        await self._stack.enter_async_context(self.runner.working(self._heard))
        return True

    async def rest(self) -> object:
        """Do no more of it."""
        await self._stack.aclose()
        return True

    async def pending(self) -> object:
        """What has not been committed."""
        return [[turn.message_id, turn.state, turn.attempts] for turn in await self.store.pending_turns()]

    async def seen(self, session: str) -> object:
        """The messages of a conversation as this process has it in memory."""
        found = await self.store.get(session)
        history = () if found is None else found.history
        return [message.text.split()[0] for message in history if message.role is Role.USER]

    async def clock(self, seconds: int) -> object:
        """Set the store's clock."""
        self.store.clock = lambda: dt.datetime.now(dt.UTC) + dt.timedelta(seconds=seconds)
        return True

    async def limit(self, path: str, room: int | None) -> object:
        """Let no file grow to more than that one's size and so much more."""
        most = resource.RLIM_INFINITY if room is None else Path(path).stat().st_size + room
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, resource.RLIM_INFINITY))
        return True

    async def disk(self, call: str, skip: int, count: int) -> object:
        """Let calls of the system on the database fail: *count* of them, after *skip*. Returns how many have failed."""
        shim = ctypes.CDLL(None)
        return shim.failing_disk(call.encode(), skip, count)

    async def ping(self) -> object:
        """How long the event loop has stood still at most, in seconds, since it was first asked."""
        if not self._gap:
            self._gap = 1e-9
            self._tick(time.monotonic())
        return self._gap

    def _tick(self, before: float) -> None:
        now = time.monotonic()
        self._gap = max(self._gap, now - before - 0.005)
        asyncio.get_running_loop().call_later(0.005, self._tick, now)

    async def _do(self, number: int, do: str, facts: dict[str, Any]) -> None:
        try:
            result = await getattr(self, do)(**facts)
        except Exception as error:  # noqa: BLE001  # the harness is told what it was
            tell(number=number, error=type(error).__name__, text=str(error))
        else:
            tell(number=number, result=result)

    async def main(self) -> None:
        """Do what is ordered, until the orders end."""
        reader = asyncio.StreamReader(limit=2**20)
        await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
        async with self.store:
            try:
                if self._config.working:
                    await self.work()
                tell(event="ready")
                async with anyio.create_task_group() as group:
                    await self._read(reader, group)
            finally:
                await self.rest()

    async def _read(self, reader: asyncio.StreamReader, group: TaskGroup) -> None:
        while line := await reader.readline():
            order = json.loads(line)
            group.start_soon(self._do, order["number"], order["do"], order["facts"])


if __name__ == "__main__":
    _config = Config(**json.loads(sys.argv[1]))
    if _config.elsewhere is not None:
        name = _config.elsewhere
        socket.gethostname = lambda: name
        from chatflow.core import holder

        holder._look_at_this_process()
    if _config.point is not None:
        points.arm(_config.point, _config.nth, stop=_config.stop)
    if _config.uid is not None:
        os.setgid(_config.uid)
        os.setuid(_config.uid)
    asyncio.run(Program(_config).main())
