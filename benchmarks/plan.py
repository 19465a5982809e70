"""Plan: how much is measured, and with what."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import attrs

from benchmarks.server import Server

ROOT: Final = Path(__file__).parent.parent


@attrs.frozen
class Plan:
    """One run."""

    systems: tuple[str, ...]
    rounds: int
    scale: float
    seconds: float
    folder: Path
    peers: Path | None
    """The interpreter that has the other packages, None where they are not installed."""
    shim: Path | None
    """The library that counts fsyncs and slows them down."""
    server: Server | None
    """The PostgreSQL server, None where nothing of the run is on one."""
    log: Path
    """What the systems say, and their tracebacks."""
