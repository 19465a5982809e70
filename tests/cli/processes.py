"""A program that holds a turn of a conversation until it is told to let go, in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[2]

_HOLDING: Final = """
import sys
import anyio
from chatflow import Agent, Message, Role, Runner, ScriptedEngine, SQLiteSessionStore

async def main(path):
    async with SQLiteSessionStore(path) as store:
        agent = Agent("Support", engine=ScriptedEngine(default="hello"))
        await Runner(agent, store).accept("conversation-7", "And order 405?", message_id="wamid.2")
        session = await store.get_or_create("conversation-7", agent)
        async with session.turn():
            await session.add_message(Message(Role.USER, "not yet committed"))
            print("held", flush=True)
            await anyio.to_thread.run_sync(sys.stdin.readline)

anyio.run(main, sys.argv[1])
"""


@contextmanager
def holding_a_turn(path: Path) -> Iterator[None]:
    """Another process holds a turn of "conversation-7", and has accepted a message in it."""
    with subprocess.Popen(
        [sys.executable, "-c", _HOLDING, str(path)],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        yield
        process.communicate("go on\n")
    assert process.returncode == 0
