"""Which calls of a model a person is asked about, and what the model is told of those that a person refuses."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from chatflow.core.approvals import held_back
from chatflow.core.messages import Message, ToolCall, ToolResult
from chatflow.core.tools import Tool
from chatflow.engines.common_form import INVALID_ARGUMENTS_KEY
from chatflow.running.batch import error_result


def hold_back(message: Message, tools: Mapping[str, Tool], history: Iterable[Message] | None) -> Message:
    """*message* with a note of its calls that wait for a person: see `held_back`.

    Those whose tool requires it and would take their arguments. Nobody should approve what can't run; what can't, the
    model is told at once.
    """
    invalid: Mapping[str, Any] = message.extra.get(INVALID_ARGUMENTS_KEY, {})
    indexes = [
        index
        for index, call in enumerate(message.tool_calls)
        if str(index) not in invalid and _is_to_wait(tools.get(call.name), call)
    ]
    return held_back(message, indexes, history)


def _is_to_wait(tool: Tool | None, call: ToolCall) -> bool:
    if tool is None or not tool.requires_approval:
        return False
    try:
        tool.check(call.args)
    except Exception:  # noqa: BLE001  # whatever it is, the batch meets it too, and tells the model
        return False
    return True


def refusal(call: ToolCall, reason: str | None) -> ToolResult:
    """What the model is told of a call that a person has refused."""
    text = "A person has refused this call; it was not run, and should not be made again as it is."
    return error_result(call, text if reason is None else f"{text} The reason given: {reason}")
