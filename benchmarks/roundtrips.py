"""How often a client waits for the server: a proxy between them counts when it begins to speak after the server has."""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from unittest.mock import patch

import attrs

from benchmarks.systems.on_server import DSN, socket_of

_SOCKET = ".s.PGSQL.5432"


@attrs.define(eq=False)
class RoundTrips:
    """The proxy's count, of all connections."""

    server: Path
    count: int = 0

    async def serve(self, from_client: asyncio.StreamReader, to_client: asyncio.StreamWriter) -> None:
        """One connection."""
        from_server, to_server = await asyncio.open_unix_connection(self.server / _SOCKET)
        has_spoken = True

        async def answer() -> None:
            nonlocal has_spoken
            while data := await from_server.read(2**16):
                has_spoken = True
                to_client.write(data)
            to_client.close()

        async def ask() -> None:
            nonlocal has_spoken
            while data := await from_client.read(2**16):
                self.count += has_spoken
                has_spoken = False
                to_server.write(data)
            to_server.close()

        # Each end may be closed first.
        with suppress(ConnectionError):
            await asyncio.gather(ask(), answer())


@asynccontextmanager
async def counted_round_trips() -> AsyncIterator[RoundTrips]:
    """Let the systems that are made meanwhile reach the server through the proxy."""
    dsn = os.environ[DSN]
    server = socket_of(dsn)
    assert server is not None
    with tempfile.TemporaryDirectory() as folder:
        trips = RoundTrips(server)
        listening = await asyncio.start_unix_server(trips.serve, Path(folder) / _SOCKET)
        with patch.dict(os.environ, {DSN: dsn.replace(str(server), folder)}):
            yield trips
        listening.close()
