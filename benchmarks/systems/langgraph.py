"""langgraph: the whole state anew at each step, in one connection with one lock for all conversations."""

from __future__ import annotations

import time
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from langchain_core.messages import AIMessage, AnyMessage, HumanMessage, ToolMessage
from langgraph.checkpoint.base import empty_checkpoint
from langgraph.checkpoint.sqlite.aio import AsyncSqliteSaver

from benchmarks.conversation import ANSWER, FOUND_TEXT, MESSAGES, QUESTION, TOOL, WINDOW, name_of
from benchmarks.systems.copying import CopyingSystem


class Langgraph(CopyingSystem):
    """What a graph does with its default durability: a checkpoint after each step, here the four messages.

    The writes of each step, which it stores beside them, are left out. The window is cut here, since it has none; it
    never drops a checkpoint.
    """

    tables = (("checkpoints", "thread_id"),)

    def __init__(self, folder: Path, window: int = WINDOW) -> None:
        super().__init__(folder, window)
        self._opened = AsyncExitStack()
        self._saver: Any = None
        self._states: dict[int, list[AnyMessage]] = {}
        self._configs: dict[int, Any] = {}
        self._calls = 0

    async def open(self) -> None:
        """Its one connection."""
        self._saver = await self._opened.enter_async_context(AsyncSqliteSaver.from_conn_string(str(self.path)))
        await self._saver.setup()

    async def begin(self, name: str, turns: int) -> None:
        """One checkpoint."""
        await self._put(_config(name), [message for _ in range(turns) for message in self._messages()], 0)

    async def attach(self, conversation: int) -> None:
        """The state, as a graph has it while it runs."""
        found = await self._saver.aget_tuple(_config(name_of(conversation)))
        self._states[conversation] = found.checkpoint["channel_values"]["messages"]
        self._configs[conversation] = found.config

    def _messages(self) -> list[AnyMessage]:
        self._calls += 1
        call = f"call_{self._calls}"
        calls: list[Any] = [{"id": call, "name": TOOL, "args": {"order": self._calls}}]
        return [
            HumanMessage(QUESTION, id=f"{call}-1"),
            AIMessage("", tool_calls=calls, id=f"{call}-2"),
            ToolMessage(FOUND_TEXT, tool_call_id=call, name=TOOL, id=f"{call}-3"),
            AIMessage(ANSWER, id=f"{call}-4"),
        ]

    async def _put(self, config: Any, messages: list[AnyMessage], step: int) -> Any:
        checkpoint = empty_checkpoint()
        checkpoint["channel_values"] = {"messages": messages}
        checkpoint["channel_versions"] = {"messages": str(step)}
        metadata: Any = {"source": "loop", "step": step, "parents": {}}
        return await self._saver.aput(config, checkpoint, metadata, {"messages": str(step)})

    async def turn(self, conversation: int, message_id: str | None = None) -> float:
        """A checkpoint after each message."""
        began = time.perf_counter()
        messages = self._states[conversation]
        for step, message in enumerate(self._messages()):
            messages = [*messages, message][-MESSAGES * self.window :]
            self._configs[conversation] = await self._put(self._configs[conversation], messages, step)
        self._states[conversation] = messages
        return began

    async def load(self, conversation: int) -> int:
        """The newest checkpoint; it keeps none."""
        found = await self._saver.aget_tuple(_config(name_of(conversation)))
        length = 0
        for message in found.checkpoint["channel_values"]["messages"]:
            length += len(message.content)
            for call in getattr(message, "tool_calls", ()):
                length += len(call["args"])
        return length

    async def close(self) -> None:
        """The connection."""
        await self._opened.aclose()


def _config(name: str) -> Any:
    return {"configurable": {"thread_id": name, "checkpoint_ns": ""}}
