"""What is said in every system: a turn of four messages, about 1.3 KB, into a window of 40 turns."""

from __future__ import annotations

import json
from typing import Any, Final

WINDOW: Final = 40
"""Turns that a conversation keeps."""
MESSAGES: Final = 4
"""Messages of a turn: a question, a call, its result, an answer."""

AGENT: Final = "assistant"
TOOL: Final = "find_order"
QUESTION: Final = "Where is my order? I was told that it would come on Monday, and nobody rang. " * 3
FOUND: Final[dict[str, Any]] = {
    "status": "in transit",
    "carrier": "DHL",
    "events": [{"at": "2025-03-01T08:00:00Z", "place": f"Depot {number}"} for number in range(4)],
}
FOUND_TEXT: Final = json.dumps(FOUND)
"""For packages that keep a tool's result as text."""
ANSWER: Final = "Your order left the depot this morning and is out for delivery; it will be with you by six. " * 4


def name_of(conversation: int) -> str:
    """The id of the conversation with that number."""
    return f"conversation-{conversation}"
