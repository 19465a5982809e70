from __future__ import annotations

import json
from typing import Any

import pytest

from chatflow.core.messages import Message, Role, ToolCall, ToolResult
from chatflow.engines.common_form import PROVIDER_KEY
from chatflow.engines.litellm_form import CALL_FIELDS_KEY, to_litellm_messages

OLD, NEW = "gemini/gemini-2.5-flash", "gemini/gemini-3-pro-preview"


def asked(*args: Any, **fields: Any) -> list[Message]:
    """Calls with these arguments, and their results, which are numbered as the calls are."""
    calls = [ToolCall(id=f"c{number}", name="look_up", args={"a": each}) for number, each in enumerate(args)]
    results = [ToolResult(tool_call_id=call.id, name=call.name, content=f"r{call.id}") for call in calls]
    return [Message(Role.USER, "Go."), Message(Role.MODEL, "Well.", tool_calls=calls, **fields)] + (
        [Message(Role.TOOL, tool_results=results)] if results else []
    )


def steps(messages: list[dict[str, Any]]) -> list[list[str]]:
    """The ids of the calls of each message, and of the results between them."""
    found: list[list[str]] = []
    for message in messages:
        if message["role"] == "assistant":
            found += [[call["id"] for call in message["tool_calls"]], []]
        elif message["role"] == "tool":
            found[-1].append(message["tool_call_id"])
    return found


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        ((1, 2), [["c0", "c1"]]),
        ((1, 1), [["c0"], ["c1"]]),
        ((1, 2, True, 1.0, 2), [["c0", "c1"], ["c2", "c4"], ["c3"]]),
    ],
)
def test_equal_calls(args: tuple[Any, ...], expected: list[list[str]]) -> None:
    """Calls that are equal to Gemini, which sees no ids, are told one after the other, each before its result."""
    told = steps(to_litellm_messages(asked(*args), OLD))
    assert told == [ids for step in expected for ids in (step, step)]


def test_equal_calls_without_results() -> None:
    """A call without a result is told apart too, and what follows stays where it was."""
    question, calling, results = asked(1, 0, 1)
    fewer = Message(Role.TOOL, tool_results=results.tool_results[:2])
    sent = to_litellm_messages([question, calling, fewer, Message(Role.MODEL, "Sent."), Message(Role.USER, "Hm.")], OLD)
    assert steps(sent[:-2]) == [["c0", "c1"], ["c0", "c1"], ["c2"], []]
    assert [message["content"] for message in sent[-2:]] == ["Sent.", "Hm."]


@pytest.mark.parametrize("model", [NEW, "gemini/gemini-10-flash", "gpt-4o"])
def test_equal_calls_with_ids(model: str) -> None:
    """A model that sees ids is told equal calls as they were made."""
    assert steps(to_litellm_messages(asked(1, 1), model)) == [["c0", "c1"], ["c0", "c1"]]


def test_what_was_said_with_equal_calls() -> None:
    """Text and thoughts are told once, and each call keeps what its provider said of it."""
    signed = [{"provider_specific_fields": {"thought_signature": each}} for each in ("s0", "s1")]
    extra = {PROVIDER_KEY: "gemini", "reasoning_content": "Hm.", CALL_FIELDS_KEY: signed}
    sent = to_litellm_messages(asked(1, 1, extra=extra), OLD)
    first, second = sent[1], sent[3]
    assert (first["content"], first["reasoning_content"]) == ("Well.", "Hm.")
    assert second["content"] is None
    assert "reasoning_content" not in second
    kept = [message["tool_calls"][0]["provider_specific_fields"]["thought_signature"] for message in (first, second)]
    assert kept == ["s0", "s1"]


def test_fields_of_other_calls_stay_away() -> None:
    """No call gets another's signature where a call is gone from the message."""
    extra = {PROVIDER_KEY: "gemini", CALL_FIELDS_KEY: [{"index_of": "another"}]}
    sent = to_litellm_messages(asked(1, 1, extra=extra), OLD)
    assert set(sent[1]["tool_calls"][0]) == set(sent[3]["tool_calls"][0]) == {"id", "type", "function"}


@pytest.mark.parametrize(
    ("content", "fields", "expected"),
    [
        ("sunny", {}, {"content": "sunny"}),
        ('{"a": NaN}', {}, {"content": '{"a": NaN}'}),
        ("[" * 3000, {}, {"content": "[" * 3000}),
        ("data:image/png;base64,AA==", {}, {"content": "data:image/png;base64,AA=="}),
        ("", {}, {"content": '""'}),
        ([1], {}, {"content": "[1]"}),
        ({"a": 1}, {}, {"a": 1}),
        ({"a": 1}, {"is_error": True}, {"content": 'Error: {"a": 1}'}),
    ],
)
@pytest.mark.parametrize("model", [OLD, NEW, "vertex_ai/gemini-2.5-flash"])
def test_result(model: str, content: Any, fields: dict[str, Any], expected: Any) -> None:
    """A result is an object, as Gemini has it: a mapping itself, or one that holds the text as it is."""
    message = Message(Role.TOOL, tool_results=[ToolResult(tool_call_id="c", name="f", content=content, **fields)])
    assert json.loads(to_litellm_messages([message], model)[0]["content"]) == expected
