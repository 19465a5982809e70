"""Import time."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Sequence
from typing import Any, Final

from benchmarks.stage import Stage
from benchmarks.systems import PEERS
from benchmarks.themes.base import Case, Column, Theme

_PROGRAM: Final = """
import sys, time
began = time.perf_counter()
import {module}
took = time.perf_counter() - began
import json
print(json.dumps([took, len(sys.modules), "litellm" in sys.modules, "pydantic" in sys.modules]))
"""


class Imports(Theme):
    """What the first line of a program waits for."""

    title = "Importing the package"
    tells = "In a fresh interpreter each time, from byte code that is there already; and whether others come along."
    columns = (
        Column("s", "seconds", ".2f", spread=True),
        Column("modules", "modules"),
        Column("litellm", "litellm"),
        Column("pydantic", "pydantic"),
    )
    systems = ("sqlite-file", *PEERS)

    def cases(self, scale: float) -> Sequence[Case]:
        """Just one."""
        return (Case("import"),)

    async def prepare(self, stage: Stage, settings: dict[str, Any]) -> dict[str, Any]:
        """Once before, for its byte code."""
        await self.measure(stage, settings)
        return {"module": stage.entry.imports}

    async def measure(self, stage: Stage, settings: dict[str, Any]) -> dict[str, float]:
        """In a process of its own."""
        program = _PROGRAM.format(module=stage.entry.imports)
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-c",
            program,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            # Where byte code may not be written, a package that no pip has installed would be compiled each time.
            env={name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"},
        )
        output, _ = await process.communicate()
        seconds, modules, litellm, pydantic = json.loads(output.splitlines()[-1])
        return {"seconds": seconds, "modules": modules, "litellm": float(litellm), "pydantic": float(pydantic)}
