from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chatflow.core.messages import Message, Role, ToolCall, ToolResult
from chatflow.core.prompt import to_prompt
from chatflow.engines.call_ids import with_ids_for
from tests.strategies import any_history

MISTRAL = "mistral/mistral-large-latest"


def asked(*ids: str) -> list[Message]:
    """Calls of these ids, and their results."""
    return [
        Message(Role.MODEL, tool_calls=[ToolCall(id=id_, name="look_up") for id_ in ids]),
        Message(Role.TOOL, tool_results=[ToolResult(tool_call_id=id_, name="look_up", content=id_) for id_ in ids]),
    ]


def sent(model: str, *ids: str) -> list[str]:
    """The ids that a model is sent for these; those of calls and of results are the same."""
    calls, results = with_ids_for(model, asked(*ids))
    found = [call.id for call in calls.tool_calls]
    assert found == [result.tool_call_id for result in results.tool_results]
    assert [result.content for result in results.tool_results] == list(ids)
    return found


@pytest.mark.parametrize(
    ("model", "id_"),
    [
        (MISTRAL, "D681PevKs"),
        ("gpt-4o", "call_PTLP8xhu3uwZk4l3nlnrrJha"),
        ("openai/gpt-4o", "x" * 40),
        ("claude-sonnet-4-5", "toolu_01A09q90qw90lq917835lq9"),
        ("openai/kimi-k2", "functions.look_up:0"),
        ("ollama_chat/qwen3", "x" * 64),
        ("gemini-3-pro-preview", "call_0123456789abcdef0123456789ab"),
    ],
)
def test_id_that_the_provider_takes(model: str, id_: str) -> None:
    """An id that will do goes as it is."""
    assert sent(model, id_) == [id_]


@pytest.mark.parametrize(
    ("model", "id_"),
    [
        (MISTRAL, "toolu_01A09q90qw90lq917835lq9"),
        ("openrouter/mistralai/devstral-medium", "call_1"),
        ("vertex_ai/mixtral-8x22b", "call_1"),
        ("gpt-4o", "x" * 41),
        ("github_copilot/gpt-5-mini", "x" * 46),
        ("azure/our-deployment", "x" * 41),
        ("openrouter/openai/o3", "x" * 41),
        ("claude-sonnet-4-5", "functions.look_up:0"),
        ("bedrock/anthropic.claude-sonnet-4-5-20250929-v1:0", "a b"),
        ("ollama_chat/qwen3", "x" * 65),
        ("ollama_chat/qwen3", "ä"),
        ("gemini-3-pro-preview", "call_1__thought__AAAA"),
    ],
)
def test_id_that_the_provider_refuses(model: str, id_: str) -> None:
    """Another provider's id becomes one of nine letters and digits where it would be refused, in call and result."""
    assert sent(model, id_) == ["call00001"]


def test_ids_that_would_become_one() -> None:
    """Ids that differ in a letter that is refused stay apart, also from one that looks like a new one."""
    assert sent("claude-sonnet-4-5", "a b", "a.b", "a_b") == ["call00001", "call00002", "a_b"]
    assert sent("claude-sonnet-4-5", "a b", "call00001") == ["call00001", "call00002"]


def test_id_of_a_services_call() -> None:
    """A result whose call the service itself has keeps its id, and no new id is the same."""
    _, result = asked("call00001")
    answer, call, _ = with_ids_for("gpt-4o", [result, *asked("x" * 41)])
    assert answer.tool_results[0].tool_call_id == "call00001"
    assert call.tool_calls[0].id == "call00002"


@given(any_history, st.sampled_from([MISTRAL, "gpt-4o", "claude-sonnet-4-5"]), st.integers(0, 16))
def test_a_longer_history_begins_as_the_shorter_one_did(history: list[Message], model: str, cut: int) -> None:
    """Providers cache by the beginning: it gets the same ids, whatever follows."""
    prompt = to_prompt(history).messages
    assert with_ids_for(model, prompt)[:cut] == with_ids_for(model, prompt[:cut])
