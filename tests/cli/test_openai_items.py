from __future__ import annotations

import datetime as dt
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chatflow import AudioPart, FilePart, ImagePart, Role, TextPart, UnknownPart, prune
from chatflow.cli.openai_items import Converted, Note, convert
from chatflow.core.values import thaw
from chatflow.engines.responses_form import OUTPUT_KEY, to_input
from chatflow.sqlite.openai_agents import StoredItem
from tests.cli.openai_file import ORDER_404

USER = {"role": "user", "content": "hello"}


def converted(*items: Any, created_at: Any = "2026-03-01 10:00:00") -> Converted:
    """The conversation of these items."""
    rows = (
        StoredItem(number, item if isinstance(item, str | bytes) else json.dumps(item), created_at, is_main=True)
        for number, item in enumerate(items, 1)
    )
    return convert(rows, "Support")


def call(kind: str, **fields: Any) -> dict[str, Any]:
    """A call of some kind."""
    return {"type": kind, "id": "x", "call_id": "call_1", **fields}


def test_a_run() -> None:
    """A run is its messages, the call with its result, the reasoning beside the call, in UTC."""
    found = converted(*ORDER_404)
    user, asks, tool, answer = found.messages
    assert [message.role for message in found.messages] == [Role.USER, Role.MODEL, Role.TOOL, Role.MODEL]
    assert (user.text, answer.text) == ("Where is order 404?", "It comes tomorrow.")
    assert (asks.tool_calls[0].id, asks.tool_calls[0].args, asks.agent_name) == (
        "call_1",
        {"order_id": "404"},
        "Support",
    )
    assert (tool.tool_results[0].name, tool.tool_results[0].content) == ("check", "in transit")
    assert user.timestamp == dt.datetime(2026, 3, 1, 10, tzinfo=dt.UTC)
    assert found.notes == ()


def test_reasoning_goes_back() -> None:
    """What the model thought goes back to OpenAI, before its call, as it came."""
    sent = to_input(converted(*ORDER_404).messages, "gpt-5")
    assert [item.get("type", item.get("role")) for item in sent] == [
        "user",
        "reasoning",
        "function_call",
        "function_call_output",
        "assistant",
    ]
    assert sent[1]["encrypted_content"] == "abc"


def test_calls_side_by_side() -> None:
    """Calls that were made together are one message, and so are their results."""
    calls = [call("function_call", call_id=f"c{n}", name=f"t{n}", arguments="{}") for n in (1, 2)]
    results = [{"type": "function_call_output", "call_id": f"c{n}", "output": [{"type": "input_text"}]} for n in (1, 2)]
    _, asks, tool = converted(USER, *calls, *results).messages
    assert [each.name for each in asks.tool_calls] == ["t1", "t2"]
    assert [each.name for each in tool.tool_results] == ["t1", "t2"]
    assert thaw(tool.tool_results[0].content) == [{"type": "input_text"}]


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        ([{"type": "input_image", "image_url": "https://x/y.png"}], (ImagePart(url="https://x/y.png"),)),
        ([{"type": "input_text", "text": "hi"}], "hi"),
        ([{"type": "input_image"}], [{"type": "input_image"}]),
        ([{"stdout": "hi"}], [{"stdout": "hi"}]),
        (["hi"], ["hi"]),
        ([], []),
    ],
)
def test_outputs(output: Any, expected: Any) -> None:
    """A tool's pictures and texts are parts, as a user's are; what is none of these stays the value that it is."""
    asks = call("function_call", name="look", arguments="{}")
    found = converted(USER, asks, {"type": "function_call_output", "call_id": "call_1", "output": output})
    assert thaw(found.messages[2].tool_results[0].content) == expected


@pytest.mark.parametrize(
    ("asked", "answered", "name"),
    [
        (call("custom_tool_call", name="sql", input="select 1"), call("custom_tool_call_output", output="1"), "sql"),
        (call("shell_call", action={}), call("shell_call_output", output=[]), "shell"),
        (
            call("computer_call", action={}),
            call("computer_call_output", output={"type": "computer_screenshot"}),
            "computer",
        ),
        (
            call("local_shell_call", action={}),
            {"type": "local_shell_call_output", "id": "call_1", "output": ""},
            "local_shell",
        ),
        (call("tool_search_call", arguments={}), call("tool_search_output", tools=[]), "tool_search"),
    ],
)
def test_pairs_of_every_kind(asked: dict[str, Any], answered: dict[str, Any], name: str) -> None:
    """Calls of other kinds are calls with results too, which is reported."""
    found = converted(USER, asked, answered)
    _, asks, tool = found.messages
    assert (asks.tool_calls[0].name, asks.tool_calls[0].id) == (name, "call_1")
    assert (tool.tool_results[0].name, tool.tool_results[0].tool_call_id) == (name, "call_1")
    assert [(note.row, note.is_kept) for note in found.notes] == [(2, True)]
    assert "is a call of a tool now" in found.notes[0].reason


def test_what_has_no_pair_is_kept() -> None:
    """An item that is neither text nor call stays beside the model's message as it came, which is reported."""
    search = {
        "type": "web_search_call",
        "id": "ws_1",
        "status": "completed",
        "action": {"type": "search", "query": "q"},
    }
    found = converted(USER, search, {"role": "assistant", "content": "A cat."})
    assert thaw(found.messages[1].extra[OUTPUT_KEY])[0] == search
    assert found.messages[1].text == "A cat."
    assert found.notes == (
        Note(2, "an item of type 'web_search_call' is kept beside the model's message as it came", is_kept=True),
    )


def test_user_parts() -> None:
    """A user's parts are parts here, pictures and files by address or as bytes."""
    content = [
        {"type": "input_text", "text": "look"},
        {"type": "input_image", "image_url": "https://x/y.png", "detail": "auto"},
        {"type": "input_image", "image_url": "data:image/png;base64,YWJj"},
        {"type": "input_file", "file_id": "file-1"},
        {"type": "input_file", "file_data": "data:text/plain;base64,YWJj", "filename": "a.txt"},
        {"type": "input_file", "file_data": "YWJj"},
        {"type": "input_audio", "input_audio": {"data": "YWJj", "format": "mp3"}},
        {"type": "hologram", "depth": 3},
    ]
    [message] = converted({"role": "user", "type": "message", "content": content}).messages
    assert message.content == (
        TextPart("look"),
        ImagePart(url="https://x/y.png"),
        ImagePart(data=b"abc", media_type="image/png"),
        FilePart(url="file-1"),
        FilePart(data=b"abc", media_type="text/plain", filename="a.txt"),
        FilePart(data=b"abc"),
        AudioPart(data=b"abc", media_type="audio/mp3"),
        UnknownPart("hologram", {"depth": 3}),
    )
    [plain] = converted({"role": "user", "content": [{"type": "input_text", "text": "hi"}]}).messages
    assert plain.content == "hi"


def test_system_messages() -> None:
    """System and developer messages stand in front, which is reported where they did not."""
    found = converted({"role": "system", "content": "one"}, USER, {"role": "developer", "content": "two"})
    assert [message.text for message in found.messages] == ["one", "two", "hello"]
    assert [(note.row, note.is_kept) for note in found.notes] == [(1, True), (3, True)]


def test_what_the_rules_take_out() -> None:
    """What stands before the first user message, and a result without its call, is left out and reported."""
    orphan = {"type": "function_call_output", "call_id": "gone", "output": "x"}
    found = converted({"role": "assistant", "content": "Welcome!"}, USER, orphan)
    assert [message.text for message in found.messages] == ["hello"]
    assert [(note.row, note.is_kept) for note in found.notes] == [(1, False), (3, False)]
    assert "before the first user message" in found.notes[0].reason
    assert "names the call 'gone'" in found.notes[1].reason


def test_call_without_result() -> None:
    """A call that a run has left without its result stays, and is reported."""
    found = converted(USER, call("function_call", name="check", arguments="{}"))
    assert found.messages[1].tool_calls[0].name == "check"
    assert [note.reason for note in found.notes] == ["the call 'call_1' of check has no result, which a model is told"]


@pytest.mark.parametrize(
    ("item", "reason"),
    [
        ("{", "it is no JSON"),
        (b"\xff", "it must be text"),
        ("[]", "an item must be an object, not list"),
        ({"__enc__": 1, "payload": "x"}, "it is encrypted"),
        ({"role": "narrator", "content": "x"}, "role 'narrator' is not known"),
        ({"type": 5}, "type 5"),
        ({"role": "user"}, "it has no 'content'"),
        ({"role": "user", "content": 5}, "its content must be text or a list of parts, not int"),
        ({"role": "user", "content": [{"type": "input_image"}]}, "file_id"),
        ({"role": "user", "content": [{"type": "input_file", "file_data": "?"}]}, "no base64"),
        ({"role": "assistant", "content": [{"text": 5}]}, "must be text"),
        ({"role": "assistant", "content": 5}, "it is not as its kind should be: "),
        (call("function_call_output", call_id=None, id=None), "it is not as its kind should be: "),
        ('{"type": "web_search_call", "deep": ' + "[" * 2000 + "]" * 2000 + "}", "it is nested too deeply"),
    ],
)
def test_unreadable(item: Any, reason: str) -> None:
    """An item that is not what its kind is documented to be is left out and reported, and spoils nothing beside it."""
    found = converted(USER, item, {"role": "assistant", "content": "hi"})
    assert [message.text for message in found.messages] == ["hello", "hi"]
    [note] = found.notes
    assert (note.row, note.is_kept) == (2, False)
    assert reason in note.reason


@pytest.mark.parametrize("moment", [None, "yesterday", 5])
def test_without_a_time(moment: Any) -> None:
    """Where no time was noted that can be read, a message has the time of now."""
    before = dt.datetime.now(dt.UTC)
    assert converted(USER, created_at=moment).messages[0].timestamp >= before
    assert converted(USER, created_at="2026-03-01T10:00:00+02:00").messages[0].timestamp.hour == 8


_scalars = st.none() | st.booleans() | st.integers(-5, 5) | st.sampled_from(["", "call_1", "c", "user", "text"])
_values = st.recursive(
    _scalars, lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(["type", "text"]), inner)
)
_names = ["type", "role", "content", "call_id", "id", "name", "arguments", "output", "text", "summary"]
_kinds = ["message", "function_call", "function_call_output", "reasoning", "web_search_call", "shell_call", "x_output"]
_items = st.fixed_dictionaries(
    {},
    optional=dict.fromkeys(_names, _values)
    | {"type": st.sampled_from(_kinds), "role": st.sampled_from(["user", "assistant", "system"])},
)


@given(st.lists(st.just(USER) | st.sampled_from(ORDER_404) | _items, max_size=8))
def test_any_items(items: list[Any]) -> None:
    """Whatever the items, what comes of them keeps the rules of `prune`, and each that is left out has a note."""
    found = converted(*items)
    assert prune(found.messages, 1000) == found.messages
    rows = {note.row for note in found.notes if not note.is_kept}
    assert len(found.messages) <= len(items)
    assert rows <= set(range(1, len(items) + 1))
