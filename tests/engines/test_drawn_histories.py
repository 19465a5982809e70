"""Drawn histories over real HTTP: no provider refuses the prompt of any, and all that it says arrives."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, Final

import attrs
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from chatflow import Agent
from chatflow.core.engine import EngineRequest
from chatflow.core.messages import Message, Role, ToolCall, ToolResult
from chatflow.core.prompt import to_prompt
from chatflow.core.tools import Tool
from chatflow.engines.common_form import sendable
from tests.engines.protocols import ALL, Protocol, asked
from tests.gemini_rules import as_json_names
from tests.model_server import ModelServer
from tests.strategies import any_history, mappings, text, values


def look_up(order_id: str) -> str:
    """Look up an order."""
    return order_id


LOOK_UP: Final = Tool(look_up)

names: Final = st.one_of(st.sampled_from(["look_up", "look-up", "look up", "404", ""]), text)
ids: Final = st.sampled_from(["", "a", "b", "a.b", "a:b", "functions.look_up:0", "x" * 65, "null"])


@st.composite
def talks(draw: st.DrawFn) -> list[Message]:
    """A history whose messages say something: any words, calls of any names and arguments, results of any value."""
    called = {id_: draw(ids) for id_ in ("", "a", "b")}  # so that results keep their calls
    talk: list[Message] = []
    for message in [*draw(any_history), Message(Role.USER)]:
        made = [ToolCall(id=called[each.id], name=draw(names), args=draw(mappings)) for each in message.tool_calls]
        given = [
            ToolResult(tool_call_id=called[each.tool_call_id], name="look", content=draw(values))
            for each in message.tool_results
        ]
        said = None if given else draw(text)
        talk.append(attrs.evolve(message, content=said, tool_calls=made, tool_results=given))
    return talk


@pytest.fixture(scope="module", params=ALL, ids=lambda each: each.name)
def protocol(request: pytest.FixtureRequest) -> Protocol:
    """Each of the languages in turn."""
    chosen: Protocol = request.param
    return chosen


@pytest.fixture(scope="module")
async def running(anyio_backend: str, protocol: Protocol) -> AsyncIterator[ModelServer]:
    """Its server."""
    async with asked(protocol) as server:
        yield server


Part = Mapping[str, Any]

CALLS: Final = {"tool_use", "function_call", "function"}
RESULTS: Final = {"tool_result", "function_call_output"}


def parts_of(item: Part) -> list[Part]:
    """What a message or an item holds, whatever its language."""
    content = item.get("parts", ()) if item.get("content") is None else item["content"]
    parts: Sequence[Part] = [{"text": content}] if isinstance(content, str) else content
    return [*parts, *(item.get("tool_calls") or ()), *([item] if "call_id" in item else [])]


def said_in(request: Mapping[str, Any]) -> tuple[list[str], int, int]:
    """The texts of users in a request, and how many calls and how many results there are."""
    items: list[Part] = as_json_names(request).get("contents") or request.get("messages") or request["input"]
    texts: list[str] = []
    calls = results = 0
    for item in items:
        for part in parts_of(item):
            calls += part.get("type") in CALLS or "functionCall" in part
            results += part.get("type") in RESULTS or "functionResponse" in part or item.get("role") == "tool"
            if item.get("role") == "user" and part.get("text") is not None:
                texts.append(part["text"])
    return texts, calls, results


@given(talk=talks(), with_tools=st.booleans())
@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
async def test_drawn_histories(running: ModelServer, protocol: Protocol, talk: list[Message], with_tools: bool) -> None:
    """The prompt of a history is taken by each provider, with every user's words, every call and every result."""
    messages = to_prompt(talk, "You help.").messages
    running.script("Yes.")
    tools = [LOOK_UP] if with_tools else []
    # No thoughts are asked for: calls that were made up have none.
    engine = protocol.engine(running, settings={})
    await engine.generate(EngineRequest(agent=Agent("Support"), messages=messages, tools=tools))
    assert len(running.requests) == 1
    texts, calls, results = said_in(running.requests[0])
    assert texts == [sendable(message.text) for message in messages if message.role is Role.USER]
    assert calls == results == sum(len(message.tool_calls) for message in messages)
