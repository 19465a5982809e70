"""The files that docs/cli.md looks at."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import anyio

from chatflow import Agent, Message, Role, Runner, ScriptedEngine, SQLiteSessionStore, tool
from tests.cli.conftest import SUPPORT, fill, order_404
from tests.cli.openai_file import ORDER_404, write
from tests.sqlite.chatflow_agent import old_file


@tool(requires_approval=True)
async def refund(order_id: str, euros: int) -> str:
    """Pay an order back."""
    return f"{euros} euros of order {order_id} are on their way."


async def _chats(store: SQLiteSessionStore) -> None:
    await order_404(store)
    call = ScriptedEngine.call("refund", order_id="404", euros=20)
    runner = Runner(Agent("Support", tools=[refund], engine=ScriptedEngine([call])), store)
    await runner.run_async("conversation-7", "It is broken. I want my 20 euros back.")
    ann = await store.for_owner("ann").get_or_create("main", SUPPORT)
    await ann.add_message(Message(Role.USER, "hello"))
    runner = Runner(Agent("Orders", engine=ScriptedEngine([RuntimeError("down")])), store, max_attempts=1)
    await runner.accept("conversation-8", "Where is order 505?", message_id="wamid.8")
    async with runner.working():
        while all(turn.state != "dead" for turn in await store.pending_turns()):  # noqa: ASYNC110  # nobody is told
            await anyio.sleep(0.01)
    await Runner(SUPPORT, store).accept("conversation-9", "Good morning!", message_id="wamid.9")


def make_files(folder: Path) -> None:
    """Make them in *folder*."""
    fill(folder / "chatflow.db", _chats)
    fill(folder / "damaged.db", order_404)
    with closing(sqlite3.connect(folder / "damaged.db")) as connection, connection:
        connection.execute(
            "UPDATE chatflow_messages SET message_json = '{}' WHERE message_json LIKE '%arrives tomorrow%'"
        )
    old_file(folder / "old.db")
    search = {"type": "web_search_call", "id": "ws_1", "status": "completed"}
    write(folder / "openai.db", "conversation-1", ORDER_404)
    items = [
        ["Any", "news?"],
        {"role": "user", "content": "Any news?"},
        search,
        {"role": "assistant", "content": "None."},
    ]
    write(folder / "openai.db", "conversation-2", items)
