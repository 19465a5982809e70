"""What 10,000 conversations on one store take: threads, open files, memory.

python benchmarks/resources.py [--backend sqlite-file] [--conversations 10000]

Every conversation has taken a turn of four messages, and its session object is held. Ends with status 1 where there are
more than 4 threads or 10 open files or more.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import platform
import sqlite3
import sys
import tempfile
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Final

sys.path.append(str(Path(__file__).parent.parent))

from chatflow.core.agent import Agent
from chatflow.core.messages import Message, Role, ToolCall, ToolResult
from chatflow.core.session import SessionContext
from chatflow.core.store import BaseSessionStore
from tests.backends import BACKENDS

MOST_THREADS: Final = 4
MOST_FILES: Final = 9
AT_ONCE: Final = 256
"""Conversations that are in a turn at the same time."""


def messages(number: int) -> Iterator[Message]:
    """A turn, with nothing in it that another turn shares."""
    call = f"call_{number}"
    yield Message(Role.USER, f"Where is order {number}? I was told that it would come on Monday.")
    yield Message(Role.MODEL, tool_calls=[ToolCall(id=call, name="find_order", args={"order": number})])
    found = {"status": "in transit", "carrier": "DHL", "depot": f"Depot {number}"}
    yield Message(Role.TOOL, tool_results=[ToolResult(tool_call_id=call, name="find_order", content=found)])
    yield Message(Role.MODEL, f"Order {number} left the depot this morning; it will be with you by six.")


def threads() -> int:
    """All threads of this process, Python's or not."""
    return sum(1 for _ in Path("/proc/self/task").iterdir())


def open_files() -> list[str]:
    """What this process has open."""
    found: list[str] = []
    for link in Path("/proc/self/fd").iterdir():
        try:
            found.append(str(link.readlink()))
        except FileNotFoundError:
            # The folder itself was open while it was listed.
            continue
    return found


def allocated() -> int:
    """Bytes that Python holds, without garbage."""
    gc.collect()
    return tracemalloc.get_traced_memory()[0]


async def talk(store: BaseSessionStore, numbers: range, sessions: list[SessionContext]) -> None:
    """Start a conversation for each number, and take its first turn."""
    for number in numbers:
        session = await store.get_or_create(f"conversation {number}", Agent("assistant"))
        async with session.turn():
            for message in messages(number):
                await session.add_message(message)
        sessions.append(session)


async def watch(most: dict[str, int]) -> None:
    """Note the most threads and open files there are at any time."""
    while True:
        most["threads"] = max(most["threads"], threads())
        most["files"] = max(most["files"], len(open_files()))
        await asyncio.sleep(0.05)


async def measure(backend: str, conversations: int, folder: Path) -> bool:
    """Print the figures; whether they are as low as they should be."""
    before = open_files()
    most = {"threads": 0, "files": 0}
    sessions: list[SessionContext] = []
    watching = asyncio.create_task(watch(most))
    (make,) = (each.make for each in BACKENDS if each.name == backend)
    tracemalloc.start()
    start = allocated()
    async with make(folder) as store:
        async with asyncio.TaskGroup() as group:
            for first in range(AT_ONCE):
                group.create_task(talk(store, range(first, conversations, AT_ONCE), sessions))
        await asyncio.sleep(0.1)
        watching.cancel()
        live = (allocated() - start) / conversations
        bare = allocated()
        copies = [list(messages(number)) for number in range(conversations)]
        own = (allocated() - bare) / conversations
        tracemalloc.stop()
        files = open_files()
        print(f"{len(sessions):,} conversations on one store ({backend}), {AT_ONCE} in a turn at once, all held\n")
        of_the_store = most["files"] - len(before)
        print(f"  threads of the process, at most  {most['threads']:8}    (goal: at most {MOST_THREADS})")
        print(f"  files open in the process        {most['files']:8}    at most")
        print(f"    before there was a store       {len(before):8}")
        print(f"    of the store                   {of_the_store:8}    (goal: at most {MOST_FILES})")
        for name in sorted(set(files) - set(before)):
            print(f"      {files.count(name)} x {Path(name).name}")
        print(f"  bytes a live conversation        {live:8,.0f}")
        print(f"    its {len(copies[0])} messages               {own:8,.0f}")
        print(f"    beyond its messages            {live - own:8,.0f}")
    return most["threads"] <= MOST_THREADS and of_the_store <= MOST_FILES


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", choices=[backend.name for backend in BACKENDS], default="sqlite-file")
    parser.add_argument("--conversations", type=int, default=10_000)
    arguments = parser.parse_args()
    if not Path("/proc/self/fd").exists():
        raise SystemExit("Threads and open files are counted in /proc, which is Linux's.")
    print(f"python {platform.python_version()}, sqlite {sqlite3.sqlite_version}, {platform.platform()}")
    with tempfile.TemporaryDirectory() as folder:
        is_low = asyncio.run(measure(arguments.backend, arguments.conversations, Path(folder)))
    if not is_low:
        raise SystemExit("More threads or open files than there should be.")


if __name__ == "__main__":
    main()
