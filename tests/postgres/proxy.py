"""A proxy before the server that cuts connections at a chosen moment, or gives their numbers out as a bouncer does."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from typing import Any, Final, Literal

import attrs
from psycopg import conninfo

How = Literal["after", "before", "late", "mute"]
"""The bytes reach the server and its answer nobody; they do not reach it; they reach it once the client has looked; as
the first, and the connection stays."""

COMMITS: Final = (b"COMMIT\0", b"WITH base AS MATERIALIZED", b"WITH noted AS")
"""What a client's bytes hold where they end a transaction: a statement of its own, or a flight that is one."""

_PREPARED: Final = re.compile(rb"P.{4}(_pg3_[0-9]+\0)\s*(?:" + b"|".join(COMMITS) + b")", re.DOTALL)
"""Where a client gives such a statement a name, to send that alone from then on."""

_KEY: Final = re.compile(rb"K\0\0\0\x0c.{4}", re.DOTALL)
"""Where the server tells a client the number of its process."""


@attrs.define(eq=False)
class Proxy:
    """Where to connect, and what is to be cut next."""

    behind: dict[str, Any]
    """The server's address."""
    port: int = 0
    refuses_after_cut: bool = False
    serving: set[asyncio.Task[Any]] = attrs.field(factory=set[asyncio.Task[Any]])
    plan: list[How] = attrs.field(factory=list[How])
    served: int = 0
    cut: int = 0
    refuses: bool = False
    """Nobody gets a connection."""
    is_bouncer: bool = False
    """A client is not told the number of its server's process, but another one."""
    is_silent: bool = False
    """Nothing reaches the server."""
    late: dict[asyncio.StreamWriter, bytes] = attrs.field(factory=dict[asyncio.StreamWriter, bytes])
    """What was held back, by where it is to go."""

    @property
    def dsn(self) -> str:
        """The server's address through this proxy."""
        # In the clear, so that it sees what is sent.
        here = {"host": "127.0.0.1", "port": self.port, "sslmode": "disable", "gssencmode": "disable"}
        return conninfo.make_conninfo(**{**self.behind, **here})

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        host, port = self.behind.get("host", "localhost"), self.behind.get("port", 5432)
        if host.startswith("/"):
            return await asyncio.open_unix_connection(f"{host}/.s.PGSQL.{port}")
        return await asyncio.open_connection(host, port)

    async def deliver_late(self) -> None:
        """Hand on what was held back."""
        late, self.late = self.late, {}
        for to_server, data in late.items():
            # The server may have given up waiting for it.
            with suppress(OSError):
                to_server.write(data)
                await to_server.drain()
            to_server.close()
            with suppress(OSError):
                await to_server.wait_closed()

    async def serve(self, from_client: asyncio.StreamReader, to_client: asyncio.StreamWriter) -> None:
        """One connection."""
        task = asyncio.current_task()
        assert task is not None
        self.serving.add(task)
        self.served += 1
        task.add_done_callback(self.serving.discard)
        if self.refuses:
            to_client.transport.abort()
            return
        try:
            from_server, to_server = await self._connect()
        except OSError:
            to_client.close()
            return
        answers = asyncio.create_task(self._pump(from_server, to_client))
        try:
            # A server that gives up on somebody closes its end.
            with suppress(OSError):
                await self._hand_on(from_client, to_client, to_server, answers)
        finally:
            answers.cancel()
            for writer in (to_client, to_server):
                if writer not in self.late:
                    writer.close()
                    with suppress(OSError):
                        await writer.wait_closed()

    async def _hand_on(
        self,
        from_client: asyncio.StreamReader,
        to_client: asyncio.StreamWriter,
        to_server: asyncio.StreamWriter,
        answers: asyncio.Task[None],
    ) -> None:
        commits = list(COMMITS)
        while data := await from_client.read(2**20):
            commits += _PREPARED.findall(data)
            if self.plan and any(commit in data for commit in commits):
                how = self.plan.pop(0)
                self.cut += 1
                answers.cancel()
                if how == "mute":
                    to_server.write(data)
                    continue
                if how == "after":
                    to_server.write(data)
                    await to_server.drain()
                elif how == "late":
                    self.late[to_server] = data
                to_client.transport.abort()
                self.refuses = self.refuses_after_cut
                return
            if self.is_silent:
                continue
            to_server.write(data)
            await to_server.drain()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while data := await reader.read(2**20):
                writer.write(_KEY.sub(b"K\0\0\0\x0c\0\0\0\0", data, count=1) if self.is_bouncer else data)
                await writer.drain()


@asynccontextmanager
async def proxy_to(dsn: str) -> AsyncGenerator[Proxy]:
    """A proxy before the server at *dsn*."""
    proxy = Proxy(dict(conninfo.conninfo_to_dict(dsn)))
    server = await asyncio.start_server(proxy.serve, "127.0.0.1", 0)
    proxy.port = server.sockets[0].getsockname()[1]
    try:
        yield proxy
    finally:
        server.close()
        await proxy.deliver_late()
        for task in proxy.serving:
            task.cancel()
        if proxy.serving:
            await asyncio.wait(proxy.serving)
