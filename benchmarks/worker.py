"""The process that measures one system: `python -m benchmarks.worker THEME SYSTEM FOLDER SECONDS`.

It answers requests, a line of JSON each, until there are no more. What the system prints goes to standard error.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.stage import Stage
from benchmarks.themes import THEMES
from benchmarks.themes.base import Theme


async def answer(theme: Theme, stage: Stage, request: dict[str, Any]) -> dict[str, Any]:
    """Do what is asked; what went wrong is an answer too."""
    try:
        if request["do"] == "prepare":
            return {"facts": await theme.prepare(stage, request["settings"])}
        return {"figures": await theme.measure(stage, request["settings"])}
    except Exception as error:  # noqa: BLE001  # of whatever package; the other systems go on
        traceback.print_exc()
        first: BaseException = error
        while isinstance(first, BaseExceptionGroup):
            first = first.exceptions[0]
        return {"failed": f"{type(first).__name__}: {first}"}


def requests() -> Iterator[dict[str, Any]]:
    """What comes on standard input."""
    for line in sys.stdin:
        yield json.loads(line)


def main() -> None:
    """Answer on what was standard output."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    theme, system, folder, seconds = sys.argv[1:]
    stage = Stage(system, Path(folder), float(seconds))
    with asyncio.Runner() as runner:
        for request in requests():
            print(json.dumps(runner.run(answer(THEMES[theme], stage, request))), file=answers, flush=True)
        runner.run(stage.close())


if __name__ == "__main__":
    main()
