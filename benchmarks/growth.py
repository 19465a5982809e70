"""Does a long history make a message dearer? 100,000 messages into one conversation that keeps them all.

Run as `python benchmarks/growth.py` (a few minutes). Prints, for each store, how long the last 1,000 `add_message` took
against the first 1,000, and whether the history is what `prune` makes of all messages at once.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from pathlib import Path

from chatflow import Agent, Message, Role, SessionStore, SQLiteSessionStore, ToolCall, ToolResult, prune
from chatflow.core.store import BaseSessionStore

TURN = 4
"""Messages a turn: a question, a call, its result, an answer."""


def message(number: int) -> Message:
    """The message at that place: turns of four, each with a call of its own."""
    turn, step = divmod(number, TURN)
    if step == 0:
        return Message(Role.USER, f"Where is order {turn}?")
    if step == 1:
        call = ToolCall(id=f"c{turn}", name="check_order_status", args={"order_id": str(turn)})
        return Message(Role.MODEL, tool_calls=[call])
    if step == 2:
        result = ToolResult(tool_call_id=f"c{turn}", name="check_order_status", content={"status": "IN_TRANSIT"})
        return Message(Role.TOOL, tool_results=[result])
    return Message(Role.MODEL, "It arrives tomorrow.")


async def grow(store: BaseSessionStore, total: int, sample: int) -> tuple[float, bool]:
    """The last *sample* additions' time over the first ones', and whether the history is what it should be."""
    async with store:
        session = await store.get_or_create("long", Agent("Support"), max_turns=total)
        messages = [message(number) for number in range(total)]
        seconds: list[float] = []
        for each in messages:
            start = time.perf_counter()
            await session.add_message(each)
            seconds.append(time.perf_counter() - start)
        # Medians, since a garbage collection or another program strikes here or there.
        ratio = statistics.median(seconds[-sample:]) / statistics.median(seconds[:sample])
        return ratio, session.history == prune(messages, total)


def main() -> None:
    """Print a line a store."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--total", type=int, default=100_000, help="messages in all (default 100,000)")
    parser.add_argument("--sample", type=int, default=1_000, help="messages compared at each end (default 1,000)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        stores = {"SessionStore": SessionStore(), "SQLite file": SQLiteSessionStore(Path(folder) / "chat.db")}
        for name, store in stores.items():
            ratio, same = asyncio.run(grow(store, options.total, options.sample))
            print(
                f"{name:12}  last/first {options.sample:,} of {options.total:,}: {ratio:.2f}  equals prune(all): {same}"
            )


if __name__ == "__main__":
    main()
