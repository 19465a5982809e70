"""What Claude's thoughts are bound to: the functions themselves; `test_thoughts.py` has them over HTTP."""

from __future__ import annotations

from typing import Any, Final

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chatflow.core.messages import Message, Role
from chatflow.engines.litellm_form import to_litellm_messages
from chatflow.engines.result_form import FROM_TOOLS
from chatflow.engines.thoughts import AFTER_KEY, thought_after, without_thinking_where_none_began
from tests.strategies import whole_histories

BINDING: Final = "anthropic/claude-fable-5-2"
SIGNED: Final = {"thinking_blocks": [{"type": "thinking", "thinking": "Hm.", "signature": "s1"}]}
TOOLS: Final = [{"type": "function", "function": {"name": "look_up"}}]
QUESTION: Final = {"role": "user", "content": "Hi"}


@pytest.mark.parametrize(
    "model",
    [
        "claude-opus-5",
        "claude-fable-5-2",
        "bedrock/anthropic.claude-sonnet-5-5-v1:0",
        "openrouter/anthropic/claude-opus-5.5",
    ],
)
def test_binding_models(model: str) -> None:
    """A signed thought of Claude from version 5 on is noted with what it was thought after."""
    arguments = {"messages": [QUESTION], "tools": TOOLS}
    noted = thought_after(SIGNED, arguments, model)
    assert set(noted) == {AFTER_KEY}
    assert thought_after(SIGNED, {**arguments, "tools": []}, model) != noted
    assert thought_after(SIGNED, {**arguments, "messages": []}, model) != noted
    assert thought_after({"thinking_blocks": [{"type": "redacted_thinking", "data": "x"}]}, arguments, model) == noted


@pytest.mark.parametrize(
    ("model", "extra"),
    [
        ("claude-opus-4-6", SIGNED),
        ("claude-haiku-4-5-20251001", SIGNED),
        ("claude-3-7-sonnet-latest", SIGNED),
        ("gemini-3-pro", SIGNED),
        (BINDING, {}),
        (BINDING, {"thinking_blocks": None}),
        (BINDING, {"thinking_blocks": [{"type": "thinking", "thinking": "Hm."}]}),
    ],
)
def test_nothing_is_noted(model: str, extra: dict[str, Any]) -> None:
    """Older models bind nothing, and what has no signature is not bound."""
    assert thought_after(extra, {"messages": [QUESTION]}, model) == {}


@given(whole_histories, st.integers(0, 3))
@settings(max_examples=50)
def test_fits_after_the_same(history: list[Message], dropped: int) -> None:
    """A thought goes back after exactly what it was thought after, and after nothing else."""
    before = [message for message in history if message.role is not Role.TOOL]
    sent = to_litellm_messages(before, BINDING, TOOLS)
    noted = thought_after(SIGNED, {"messages": sent, "tools": TOOLS}, BINDING)
    extra = {**SIGNED, **noted, "chatflow_provider": "anthropic"}
    thought = Message(Role.MODEL, "Hello.", extra=extra)
    assert "thinking_blocks" in to_litellm_messages([*before, thought], BINDING, TOOLS)[-1]
    fewer = before[dropped:]
    same = to_litellm_messages(fewer, BINDING, TOOLS) == sent
    assert ("thinking_blocks" in to_litellm_messages([*fewer, thought], BINDING, TOOLS)[-1]) is same
    assert "thinking_blocks" not in to_litellm_messages([*before, thought], BINDING)[-1]


THINKS: Final = {"thinking": {"type": "enabled", "budget_tokens": 1024}, "reasoning_effort": "low"}
THOUGHTFUL: Final[dict[str, Any]] = {"role": "assistant", "content": None, "tool_calls": [{}], **SIGNED}
THOUGHTLESS: Final[dict[str, Any]] = {"role": "assistant", "content": None, "tool_calls": [{}]}
RESULT: Final = {"role": "tool", "content": "sent"}
SHOWN: Final = {"role": "user", "content": [{"type": "text", "text": FROM_TOOLS}, {"type": "image_url"}]}
"""What follows a result that has a picture."""

SENT: Final = {"role": "user", "content": [{"type": "image_url"}]}
"""A picture that the user has sent."""


@pytest.mark.parametrize(
    ("messages", "model", "thinks"),
    [
        ([QUESTION], "claude-sonnet-4-5", True),
        ([QUESTION, THOUGHTFUL, RESULT], "claude-sonnet-4-5", True),
        ([QUESTION, THOUGHTLESS, RESULT], "claude-sonnet-4-5", False),
        ([QUESTION, THOUGHTLESS, RESULT, THOUGHTFUL, RESULT], "claude-sonnet-4-5", False),
        ([QUESTION, THOUGHTLESS, RESULT, QUESTION], "claude-sonnet-4-5", True),
        ([QUESTION, THOUGHTLESS, RESULT, SHOWN], "claude-sonnet-4-5", False),
        ([QUESTION, THOUGHTFUL, RESULT, SHOWN], "claude-sonnet-4-5", True),
        ([QUESTION, THOUGHTLESS, RESULT, SENT], "claude-sonnet-4-5", True),
        ([QUESTION, THOUGHTLESS, RESULT], BINDING, True),
        ([QUESTION, THOUGHTLESS, RESULT], "gpt-5", True),
        ([THOUGHTFUL], "claude-3-7-sonnet-latest", True),
    ],
)
def test_thinking_that_can_not_begin(messages: list[dict[str, Any]], model: str, thinks: bool) -> None:
    """Older models are asked for no thoughts in the midst of a turn whose calls came without them."""
    arguments = {**THINKS, "messages": messages}
    without_thinking_where_none_began(arguments, model)
    assert arguments == {**(THINKS if thinks else {}), "messages": messages}


@pytest.mark.parametrize("thinking", [None, {"type": "disabled"}])
def test_thinking_that_is_off(thinking: Any) -> None:
    """A setting that asks for no thoughts stays."""
    arguments = {"thinking": thinking, "messages": [QUESTION, THOUGHTLESS, RESULT]}
    without_thinking_where_none_began(arguments, "claude-sonnet-4-5")
    assert arguments["thinking"] == thinking
