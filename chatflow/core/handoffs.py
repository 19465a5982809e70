"""The tools by which one agent hands a conversation over to another: what they are called, and what a model is told."""

from __future__ import annotations

import hashlib
import re
import unicodedata
from typing import TYPE_CHECKING, Final

from chatflow.core.messages import Handoff
from chatflow.core.tools import Tool

if TYPE_CHECKING:
    from chatflow.core.agent import Agent

_HANDOFF_PREFIX: Final = "transfer_to_"
_LONGEST_TOOL_NAME: Final = 64
_INSTRUCTIONS_SHOWN: Final = 120


def handoff_tool_name(name: str) -> str:
    """``transfer_to_`` and what providers accept of *name*; where letters are lost, a digest keeps names apart."""
    folded = "".join(char for char in unicodedata.normalize("NFKD", name.casefold()) if not unicodedata.combining(char))
    cleaned = re.sub(r"[^a-z0-9]+", "_", folded).strip("_")
    room = _LONGEST_TOOL_NAME - len(_HANDOFF_PREFIX)
    if not cleaned or any(char.isalnum() and not char.isascii() for char in folded):
        digest = hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()[:8]
        cleaned = f"{cleaned[: room - 9].rstrip('_')}_{digest}".lstrip("_")
    return _HANDOFF_PREFIX + cleaned[:room].rstrip("_")


def handoff_tool(name: str, agent: Agent) -> Tool:
    """The tool that hands a conversation over to *agent*."""

    async def hand_over(reason: str | None = None) -> Handoff:
        """Hand over.

        Args:
            reason: Why, in a few words.
        """
        return Handoff(target_agent_name=agent.name, reason=reason)

    description = f'Hand the conversation over to the agent "{agent.name}".'
    if isinstance(agent.instructions, str) and agent.instructions.strip():
        text = " ".join(agent.instructions.split())
        if len(text) > _INSTRUCTIONS_SHOWN:
            text = text[: _INSTRUCTIONS_SHOWN - 1] + "…"
        description += f" It is told: {text}"
    return Tool(hand_over, name=name, description=description, idempotent=True)
