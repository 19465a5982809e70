"""Another process that runs agents in a conversation: ``python -m tests.adapters.program PATH RUNS``.

It says that it is ready, goes on when it is told, and prints how much its model was sent in each run.
"""

from __future__ import annotations

import asyncio
import json
import sys

from agents import Agent, Runner

from chatflow import SQLiteSessionStore
from chatflow.adapters.openai_agents import ChatflowSession
from tests.adapters.runs import inputs, model, said


async def main(path: str, runs: int) -> None:
    """Answer so many messages, each in a turn."""
    script = model(*(said(f"answer {number}") for number in range(runs)))
    agent = Agent(name="Support", model=script)
    async with SQLiteSessionStore(path, default_max_turns=1000) as store:
        session = ChatflowSession("conversation-7", store)
        await session.get_items()
        print("ready", flush=True)  # noqa: T201  # that is how the test is told
        await asyncio.to_thread(sys.stdin.readline)
        for number in range(runs):
            async with session.turn():
                await Runner.run(agent, f"question {number}", session=session)
    print(json.dumps([len(sent) for sent in inputs(script)]))  # noqa: T201  # as above


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2])))
