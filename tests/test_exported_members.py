from __future__ import annotations

import inspect
import types
from collections.abc import Iterator
from typing import Any, Final

import pytest

import chatflow
from chatflow import exceptions
from chatflow.core import memory

PROMISED: Final = {
    *("Agent", "Runner", "tool", "Tool", "ToolContext", "Handoff", "AgentResponse"),
    *("Role", "Message", "ToolCall", "ToolResult"),
    *("SessionContext", "BaseSessionStore", "SessionStore", "SQLiteSessionStore", "DEFAULT_DEDUP_TTL_HOURS"),
    *("Fault", "Repair"),
    *("StoreBackend", "ALL", "Erased", "StoreScopeError"),
    *("Engine", "EngineRequest", "EngineReply", "LiteLLMEngine", "ScriptedEngine", "last_result", "user_text"),
    *("RunStream", "RunEvent", "TextDelta", "ReasoningDelta", "ToolStarted", "ToolFinished", "HandedOff"),
    *("UsageReported", "Done"),
    *("AgentResolver", "FaultKind", "Instructions", "OnContextWindow", "OnDuplicate", "OnError"),
    *("OnLostServiceSession", "OnResponse", "Part", "ReplyPart", "ServiceSessionId", "StopReason", "Summarise"),
    *("ChatflowError", "SessionError", "SessionNotFoundError", "SessionDeletedError", "SessionConflictError"),
    *("SessionFormatError", "SessionStateError", "CorruptSessionError", "UnmatchedToolResultError"),
    *("TurnInsideTurnError", "MessageInProgressError", "MessageMismatchError", "MessageDeadError"),
    *("StoreError", "StoreClosedError", "StoreBusyError", "StoreFormatError", "StoreOwnerRequiredError"),
    *("EngineError", "EngineRateLimitError", "EngineTimeoutError", "EngineAuthenticationError"),
    *("EngineBadRequestError", "ContextWindowError", "EngineUnavailableError", "ToolError", "HandoffError"),
}
"""What users were told they can import."""


def documented(name: str, thing: Any) -> Iterator[tuple[str, str | None]]:
    """What needs a docstring: *thing*, and what a class defines by itself for its users; each with what it has."""
    if not (inspect.isclass(thing) or inspect.isfunction(thing)):
        return
    yield name, thing.__doc__
    for member_name, member in vars(thing).items() if inspect.isclass(thing) else ():
        if member_name.startswith("_"):
            continue
        function = getattr(member, "__func__", member)  # a static or class method's own
        stands_in = getattr(function, "__name__", "").startswith("_")  # what it does is said where it is defined
        if isinstance(function, property | types.FunctionType) and not stands_in:
            yield f"{name}.{member_name}", function.__doc__


def test_all() -> None:
    """`__all__` names everything public that the package holds besides its modules, once, and nothing else."""
    public = {
        name
        for name, value in vars(chatflow).items()
        if not inspect.ismodule(value) and (name == "__version__" or not name.startswith("_"))
    }
    assert public == set(chatflow.__all__)
    assert len(chatflow.__all__) == len(public)


def test_promised_names() -> None:
    """Every promised name can be imported from the package."""
    assert set(chatflow.__all__) >= PROMISED


def test_errors() -> None:
    """Every error of the tree can be imported from the package."""
    errors = {name for name, value in vars(exceptions).items() if inspect.isclass(value) and not name.startswith("_")}
    assert {name for name in errors if issubclass(getattr(exceptions, name), Exception)} <= set(chatflow.__all__)


@pytest.mark.parametrize("name", ["SessionContext", "SessionStore", "DEFAULT_DEDUP_TTL_HOURS"])
def test_names_of_chatflow_agent(name: str) -> None:
    """What chatflow-agent's users import from `core.memory` is there too, and the same."""
    assert getattr(memory, name) is getattr(chatflow, name)


@pytest.mark.parametrize("name", sorted(chatflow.__all__))
def test_docstrings(name: str) -> None:
    """Every public class, function and method has a docstring."""
    assert [where for where, text in documented(name, getattr(chatflow, name)) if not (text or "").strip()] == []
