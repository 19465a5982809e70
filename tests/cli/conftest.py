"""The command in process, on a file of its own, and what fills such a file."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Final, Protocol

import anyio
import attrs
import pytest
from click.testing import CliRunner

from chatflow import Agent, Message, Role, SQLiteSessionStore, ToolCall, ToolResult
from chatflow.cli.commands import chatflow

SUPPORT: Final = Agent("Support")

HOSTILE: Final = "\x1b]0;owned\x07\x1b[2J\x9b31mred\u202eback[bold]not bold[/bold] :smile: \ud83d\x00\r"
"""What a message may hold that a terminal must not be given as it is."""


@attrs.frozen
class Ran:
    """How a command ended, and what it has said."""

    status: int
    out: str
    err: str

    @property
    def documents(self) -> list[Any]:
        """The lines of its output, each of which is JSON."""
        return [json.loads(line) for line in self.out.splitlines()]


class Command(Protocol):
    """Runs ``chatflow`` in process."""

    def __call__(self, *args: str, typed: str = "") -> Ran: ...


@pytest.fixture
def db(tmp_path: Path) -> Path:
    """Where the conversations are, or are to be."""
    return tmp_path / "chat.db"


@pytest.fixture
def command(db: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Command:
    """The command, with *db* as its file unless another is named, in an empty folder."""
    monkeypatch.setenv("CHATFLOW_DB", str(db))
    folder = tmp_path / "folder"
    folder.mkdir()
    monkeypatch.chdir(folder)

    def run(*args: str, typed: str = "") -> Ran:
        result = CliRunner().invoke(chatflow, args, input=typed, prog_name="chatflow")
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return Ran(result.exit_code, result.stdout, result.stderr)

    return run


Fill = Callable[[SQLiteSessionStore], Awaitable[object]]


def fill(path: Path, work: Fill) -> None:
    """Do *work* with a store on *path*, and close it."""

    async def main() -> None:
        async with SQLiteSessionStore(path) as store:
            await work(store)

    anyio.run(main)


async def order_404(store: SQLiteSessionStore, session_id: str = "conversation-7", **settings: Any) -> None:
    """A conversation of one turn with a tool in it."""
    session = await store.get_or_create(session_id, SUPPORT, {"channel": "whatsapp"}, **settings)
    counts = {"prompt_tokens": 1000, "completion_tokens": 234, "total_tokens": 1234}
    call = ToolCall(id="call_1", name="check_order_status", args={"order_id": "404"})
    result = ToolResult(tool_call_id="call_1", name="check_order_status", content={"status": "IN_TRANSIT"})
    async with session.turn():
        for message in (
            Message(Role.USER, "Where is order 404?"),
            Message(Role.MODEL, tool_calls=[call], agent_name="Support", usage=counts),
            Message(Role.TOOL, tool_results=[result]),
            Message(Role.MODEL, "It arrives tomorrow.", agent_name="Support"),
        ):
            await session.add_message(message)


async def said(store: SQLiteSessionStore, session_id: str, *texts: str) -> None:
    """A conversation in which a user says this, each in a turn."""
    session = await store.get_or_create(session_id, SUPPORT)
    for text in texts:
        await session.add_message(Message(Role.USER, text))
