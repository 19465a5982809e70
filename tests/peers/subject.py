"""A library that keeps conversations, seen through as little of it as it takes to show a fault."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any, Final, Protocol, TypeAlias

import attrs


@attrs.frozen
class Call:
    """A model asks for a tool."""

    id: str
    name: str
    args: Mapping[str, Any] = attrs.field(factory=dict)


@attrs.frozen
class Result:
    """What a tool gave."""

    call_id: str
    name: str
    content: Any


@attrs.frozen
class Said:
    """A message, in no library's own form: its values are as the caller gave them."""

    role: str
    text: str | None = None
    calls: tuple[Call, ...] = ()
    results: tuple[Result, ...] = ()


Prompt: TypeAlias = list[dict[str, Any]]
"""What a model is sent, in OpenAI's form; the agent's instructions stand first."""

Reply: TypeAlias = "str | Sequence[Call]"
Model: TypeAlias = Callable[[Prompt], Awaitable[Reply]]
Tool: TypeAlias = Callable[..., Awaitable[Any]]

AGENT: Final = "Support"
"""Every bot's starting agent."""


def instructions(agent: str) -> str:
    """What the prompt begins with when *agent* answers."""
    return f"You are {agent}."


class Conversation(Protocol):
    """A conversation in hand."""

    @property
    def history(self) -> list[Said]:
        """What this object shows, without asking the storage."""

    async def add(self, said: Said) -> None:
        """Add a message, outside any turn."""


class Bot(Protocol):
    """A runner, and the model behind it."""

    async def answer(self, session_id: str, text: str, message_id: str | None = None) -> str | None:
        """Answer in one turn, as a webhook would; None where the message is known by its id."""


class Store(Protocol):
    """An open store."""

    async def conversation(self, session_id: str) -> Conversation:
        """The conversation as it is stored, created with the starting agent if need be."""

    async def session_ids(self) -> list[str]:
        """All conversations."""

    async def delete(self, session_id: str) -> None:
        """Delete a conversation."""

    def bot(self, model: Model, *, tools: Sequence[Tool] = (), specialists: Sequence[str] = ()) -> Bot:
        """A bot whose starting agent has *tools* and can hand over to *specialists*, all answered for by *model*."""


class Subject(Protocol):
    """A library. Instances are picklable: worker processes get one."""

    error: type[Exception]
    """The root of the errors it raises on purpose."""

    def open(self, db_path: str | Path, max_turns: int = 40) -> AbstractAsyncContextManager[Store]:
        """A SQLite store, closed when left."""
