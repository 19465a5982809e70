"""One of several processes that use one store: `python -m benchmarks.client SYSTEM FOLDER FIRST COUNT`.

It has conversations of its own, from number FIRST on. It says `ready`, and then, for each line of standard input, takes
turns in all of them as the line says, and answers. Lines are JSON.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import sys
import time
import uuid
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Final

from benchmarks.conversation import WINDOW
from benchmarks.systems import SYSTEMS
from benchmarks.systems.base import System

AT_ONCE: Final = 64
"""Tasks that take turns, each in some of the conversations, one after the other."""


async def take_turns(
    system: System, conversations: Sequence[int], seconds: float, *, ids: bool = False, runs: bool = False
) -> dict[str, object]:
    """Each task at least one, with message ids or without, and with all that is above the store or without it.

    How long each turn took comes back, and how long it took in all, and the processor's time.
    """
    took: list[float] = []
    prefix = uuid.uuid4().hex
    step: Callable[[int, str | None], Awaitable[object]] = system.run if runs else system.turn

    async def talk(mine: Sequence[int]) -> None:
        while True:
            for conversation in mine:
                began = time.perf_counter()
                await asyncio.sleep(0)  # the loop's other work comes first
                await step(conversation, f"{prefix}-{len(took)}-{conversation}" if ids else None)
                took.append(time.perf_counter() - began)
                if time.perf_counter() > until:
                    return

    cpu, start = time.process_time(), time.perf_counter()
    until = start + seconds
    async with asyncio.TaskGroup() as group:
        for number in range(min(AT_ONCE, len(conversations))):
            group.create_task(talk(conversations[number::AT_ONCE]))
    return {"took": took, "seconds": time.perf_counter() - start, "cpu": time.process_time() - cpu}


async def main() -> None:
    """Answer on what was standard output."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    name, folder, first, count = sys.argv[1:]
    system = SYSTEMS[name].make(Path(folder))
    conversations = range(int(first), int(first) + int(count))
    await system.open()
    await system.fill(conversations, WINDOW)
    # Not one beside the other, as they were stored; in the same order each time.
    scattered = random.Random(first).sample(conversations, len(conversations))  # noqa: S311
    await take_turns(system, scattered, 0)
    print("ready", file=answers, flush=True)
    while line := await asyncio.to_thread(sys.stdin.readline):
        print(json.dumps(await take_turns(system, scattered, **json.loads(line))), file=answers, flush=True)
    await system.close()


if __name__ == "__main__":
    asyncio.run(main())
