"""What it was measured on and with."""

from __future__ import annotations

import json
import os
import platform
import shutil
import sqlite3
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any, Final

from benchmarks.systems import SYSTEMS

OURS: Final = ("chatflow", "aiosqlite", "anyio", "attrs", "cattrs", "msgspec")
_VERSIONS: Final = """
import json, sys
from importlib import metadata
print(json.dumps({name: metadata.version(name) for name in sys.argv[1:]}))
"""
_SHIM: Final = Path(__file__).parent / "slow_fsync.c"


def machine(folder: Path, peers: Path | None) -> dict[str, Any]:
    """Processor, system, file system of *folder*, versions, and how busy the machine was."""
    processor, file_system = platform.processor(), "unknown"
    if sys.platform.startswith("linux"):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        processor = next((line.split(": ")[1] for line in lines if line.startswith("model name")), processor)
        mounts = [line.split()[1:3] for line in Path("/proc/mounts").read_text().splitlines()]
        inside = [(len(point), kind) for point, kind in mounts if folder.is_relative_to(point)]
        file_system = max(inside)[1] if inside else file_system
    return {
        "processor": processor,
        "processors": os.cpu_count(),
        "system": platform.system() + " " + platform.release(),
        "file system": file_system,
        "python": platform.python_version(),
        "sqlite": sqlite3.sqlite_version,
        "versions": {name: metadata.version(name) for name in OURS} | ({} if peers is None else _of_peers(peers)),
        "load before": round(os.getloadavg()[0], 2),
    }


def _of_peers(python: Path) -> dict[str, str]:
    names = sorted({entry.package for entry in SYSTEMS.values() if entry.package is not None})
    output = subprocess.run([str(python), "-c", _VERSIONS, *names], check=True, capture_output=True, text=True).stdout  # noqa: S603
    found: dict[str, str] = json.loads(output)
    return found


def compile_shim(folder: Path) -> Path | None:
    """The library that counts fsyncs and slows them down, or None where it can't be had."""
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if not sys.platform.startswith("linux") or compiler is None:
        print("No slowed fsync, no count of fsyncs: that takes Linux and a C compiler (cc, or what CC names).\n")
        return None
    shim = folder / "slow_fsync.so"
    subprocess.run([compiler, "-O2", "-shared", "-fPIC", "-o", str(shim), str(_SHIM), "-ldl"], check=True)  # noqa: S603
    return shim
