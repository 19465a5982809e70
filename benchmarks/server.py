"""The PostgreSQL server of a run: one that is started for it, as its package ships it, or one that is named."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final
from unittest.mock import patch

import attrs

from benchmarks.systems.on_server import DSN

COUNTERS: Final = 16
"""Bytes that the processes share which count their fsyncs."""

_SHIPPED: Final = {"fsync": "on", "full_page_writes": "on", "autovacuum": "on"}
"""What the tests' servers have otherwise."""

_MORE: Final = {"max_connections": "300"}
"""The processes of all systems are connected at the same time, and those of one are at work."""


@attrs.frozen
class Server:
    """Where it is. One that was started for the run counts its fsyncs, which can be slowed down."""

    dsn: str
    shim: Path | None = None
    counters: Path | None = None

    @property
    def environment(self) -> dict[str, str]:
        """What a system's process has to know: it counts with the server, or not at all."""
        counting = {"LD_PRELOAD": str(self.shim), "SLOW_FSYNC_FILE": str(self.counters)}
        return {DSN: self.dsn} | (counting if self.counters is not None else {})


@contextmanager
def server_of(dsn: str | None, folder: Path, shim: Path | None) -> Iterator[Server]:
    """The server at *dsn*, or one that has its data in *folder* and ends with the run."""
    if dsn is not None:
        yield Server(dsn)
        return
    # Only here: a run without it needs neither the tests' packages nor a server.
    from tests.postgres import server as servers  # noqa: PLC0415

    environment: dict[str, str] = {}
    counters = None
    if shim is not None:
        # The server runs as another user, who may not look into the run's own folder.
        shared = servers.guarded(folder)
        shim = Path(shutil.copy(shim, shared))
        counters = shared / "fsyncs"
        counters.write_bytes(bytes(COUNTERS))
        counters.chmod(0o666)
        environment = {"LD_PRELOAD": str(shim), "SLOW_FSYNC_FILE": str(counters)}
    with patch.dict(os.environ, environment):
        options = [f"-c{name}={value}" for name, value in (_SHIPPED | _MORE).items()]
        started = servers.another(*options, inside=folder)
    try:
        yield Server(started.dsn, shim, counters)
    finally:
        started.remove()
