"""A reply that comes in pieces: told as they come, then taken as a whole."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import cast

import attrs

from chatflow.core.engine import EngineReply, EngineRequest
from chatflow.core.events import ReasoningDelta, Report, TextDelta


async def joined(parts: object, request: EngineRequest, report: Report, engine: str) -> EngineReply:
    """The reply that *parts* end with; its pieces are told to *report* as they come. *engine* is whose they are.

    Raises:
        TypeError: They are not what `Engine` says of ``stream``.
        Exception: Whatever the engine raises, unchanged.
    """
    if not isinstance(parts, AsyncGenerator):
        raise TypeError(f"{engine}.stream() must be an async generator, not return {type(parts).__name__}")
    pieces = cast("AsyncGenerator[object]", parts)
    whole: EngineReply | None = None
    told: list[str] = []
    async with aclosing(pieces):
        async for piece in pieces:
            if whole is not None:
                raise TypeError(f"{engine}.stream() must end with its EngineReply, and gave {_kind(piece)} after it")
            if isinstance(piece, EngineReply):
                whole = piece
            elif not isinstance(piece, TextDelta | ReasoningDelta):
                raise TypeError(
                    f"{engine}.stream() must give TextDelta, ReasoningDelta and at the end an EngineReply, not"
                    f" {_kind(piece)}"
                )
            elif piece.text:  # providers send empty ones
                if isinstance(piece, TextDelta):
                    told.append(piece.text)
                report(attrs.evolve(piece, agent_name=request.agent.name))
    if whole is None:
        raise TypeError(f"{engine}.stream() must end with an EngineReply, and gave none")
    rest = _untold(whole.text or "", told, engine)
    if rest:
        report(TextDelta(rest, request.agent.name))
    return whole


def _untold(text: str, told: list[str], engine: str) -> str:
    """What is still to be told of a reply's text: all or nothing."""
    if told and "".join(told) != text:
        raise TypeError(
            f"{engine}.stream() must end with an EngineReply whose text is what its TextDelta pieces told, joined; its"
            " text is another"
        )
    return "" if told else text


def _kind(value: object) -> str:
    return type(value).__name__
