"""agent-framework: a file of lines for each conversation, read whole before anything is appended, never flushed."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from agent_framework import Content, FileHistoryProvider, Message

from benchmarks.conversation import ANSWER, FOUND_TEXT, MESSAGES, QUESTION, TOOL, WINDOW, name_of
from benchmarks.systems.base import System


class AgentFramework(System):
    """What its agent does after a run: `save_messages` once, with all four. It never drops any."""

    def __init__(self, folder: Path, window: int = WINDOW) -> None:
        super().__init__(folder, window)
        self._provider = FileHistoryProvider(folder / "histories")
        self._filled: dict[Path, bytes] = {}
        self._calls = 0

    async def fill(self, conversations: range, turns: int) -> None:
        """One file by its own way, and copies of it."""
        first = name_of(conversations[0])
        await self._provider.save_messages(first, [message for _ in range(turns) for message in self._messages()])
        content = self._path(first).read_bytes()
        for conversation in conversations:
            self._filled[self._path(name_of(conversation))] = content
        await self.restore()

    async def restore(self) -> None:
        """Back to the window: a file that grows makes each turn dearer, and it has no way to cut one."""
        for path, content in self._filled.items():
            path.write_bytes(content)

    def _path(self, name: str) -> Path:
        path: Path = self._provider._session_file_path(name)  # noqa: SLF001  # only it knows its files' names
        return path

    def _messages(self) -> list[Any]:
        self._calls += 1
        call = f"call_{self._calls}"
        return [
            Message(role="user", contents=[Content.from_text(QUESTION)]),
            Message(
                role="assistant", contents=[Content.from_function_call(call, TOOL, arguments={"order": self._calls})]
            ),
            Message(role="tool", contents=[Content.from_function_result(call, result=FOUND_TEXT)]),
            Message(role="assistant", contents=[Content.from_text(ANSWER)]),
        ]

    async def turn(self, conversation: int, message_id: str | None = None) -> float:
        """The file is read, compared and appended to."""
        began = time.perf_counter()
        await self._provider.save_messages(name_of(conversation), self._messages())
        return began

    async def load(self, conversation: int) -> int:
        """The file; it keeps none."""
        length = 0
        for message in (await self._provider.get_messages(name_of(conversation)))[-MESSAGES * self.window :]:
            for content in message.contents:
                length += len(content.text or "")
                if content.type == "function_call":
                    length += len(content.arguments)
                if content.type == "function_result":
                    length += len(content.result)
        return length
