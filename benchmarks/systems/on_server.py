"""What systems on a PostgreSQL server have in common: a schema of their own, and questions past the system."""

from __future__ import annotations

import os
from abc import abstractmethod
from pathlib import Path
from typing import Any, Final
from urllib.parse import parse_qs, urlsplit

from benchmarks.conversation import WINDOW
from benchmarks.systems.base import System

DSN: Final = "CHATFLOW_BENCH_POSTGRES"
"""The variable in which a system's process is told where the server is."""


def socket_of(dsn: str) -> Path | None:
    """The folder of the Unix socket that *dsn* leads to: the server is on this machine then."""
    host = parse_qs(urlsplit(dsn).query).get("host", [""])[0]
    return Path(host) if host.startswith("/") else None


class OnServer(System):
    """Its folder stays empty, and gives its schema the name."""

    def __init__(self, folder: Path, window: int = WINDOW, **options: Any) -> None:
        self.dsn = os.environ[DSN]
        self.schema = folder.name
        super().__init__(folder, window, **options)

    @abstractmethod
    async def ask(self, *statements: str) -> list[tuple[Any, ...]]:
        """What the last of *statements* answers, asked by a connection of their own."""

    async def remove(self) -> None:
        """The schema."""
        await self.ask(f"DROP SCHEMA IF EXISTS {self.schema} CASCADE")

    async def bytes_on_disk(self) -> int:
        """Its tables with their indexes."""
        ((size,),) = await self.ask(
            "SELECT sum(pg_total_relation_size(oid))::bigint FROM pg_class"
            f" WHERE relkind = 'r' AND relnamespace = '{self.schema}'::regnamespace"
        )
        return int(size)
