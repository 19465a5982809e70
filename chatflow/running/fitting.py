"""How much of a conversation fits into a prompt, as an engine counts."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from chatflow.core.agent import Agent
from chatflow.core.engine import Engine, EngineRequest, awaited, counter_of
from chatflow.exceptions import ContextWindowError, shorten


async def count_of(engine: Engine, request: EngineRequest) -> int:
    """How many tokens *engine* counts in *request*.

    Raises:
        TypeError: It can't count, or what it gave is no count.
    """
    count, name = counter_of(engine), type(engine).__name__
    if count is None:
        raise TypeError(
            f"max_prompt_tokens is for an engine that counts, and {name}, which answers for agent"
            f" {shorten(request.agent.name)}, can't: give it an async method count_tokens(request) that returns the"
            " number, or leave max_prompt_tokens out"
        )
    tokens: object = await awaited(count(request), f"{name}.count_tokens()")
    if not isinstance(tokens, int) or isinstance(tokens, bool) or tokens < 0:
        raise TypeError(f"{name}.count_tokens() must return a number of tokens, not {shorten(tokens)}")
    return tokens


async def fit(last: int, limit: int, count: Callable[[int], Awaitable[int]]) -> tuple[int | None, int]:
    """The largest of 0 to *last* that *count* finds within *limit*, None where there is none, and the last count.

    It counts once where all of it fits, else as often as it takes to halve their number down to one.
    """
    tokens = await count(last)
    if tokens <= limit:
        return last, tokens
    low, high = 0, last  # all below the one fit, and all from the other on are over
    while low < high:
        middle = (low + high) // 2
        tokens = await count(middle)
        if tokens <= limit:
            low = middle + 1
        else:
            high = middle
    return low - 1 if low else None, tokens


def too_long(
    session_id: str, agent: Agent, tokens: int, limit: int, what: str, undone: str = "sent"
) -> ContextWindowError:
    """The error for *what* has *tokens*, which are more than the *limit*, and can't be cut; so nothing was *undone*."""
    return ContextWindowError(
        f"session {shorten(session_id)}: {what} and what goes with it have {tokens} tokens, and max_prompt_tokens of"
        f" agent {shorten(agent.name)} is {limit}; nothing was {undone}. Shorten instructions, tools or the message, or"
        " raise max_prompt_tokens",
        model=agent.model,
        session_id=session_id,
        tokens=tokens,
        max_prompt_tokens=limit,
    )
