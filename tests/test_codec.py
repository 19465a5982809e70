from __future__ import annotations

import datetime as dt
import decimal
import json
import math
import zoneinfo
from collections.abc import Callable
from typing import Any, NoReturn

import msgspec
import pytest
from attrs.exceptions import FrozenInstanceError
from hypothesis import example, given
from hypothesis import strategies as st

from chatflow.core.codec import (
    _build_message,
    _read,
    message_from_data,
    message_from_json,
    message_to_data,
    message_to_json,
    response_from_json,
    response_to_json,
    values_from_json,
    values_to_json,
)
from chatflow.core.envelopes import decode, encode
from chatflow.core.messages import (
    AgentResponse,
    FilePart,
    Handoff,
    ImagePart,
    Message,
    Part,
    Role,
    TextPart,
    ToolCall,
    ToolResult,
    UnknownPart,
)
from chatflow.core.plain import plain_copy
from chatflow.core.quick import usual_message
from chatflow.core.values import MARK, MAX_DEPTH, freeze, freeze_mapping
from chatflow.exceptions import SessionFormatError
from tests import strategies
from tests.strategies import exactly

CALLED = ToolCall(id="2", name="look")
USER = {"role": "user", "content": "hello", "timestamp": "2026-01-02T03:04:05+00:00"}


def refuse_constant(name: str) -> NoReturn:
    """What strict JSON does with NaN and Infinity."""
    raise AssertionError(f"{name} is not JSON")


def read_strictly(text: str) -> Any:
    """*text* as a strict reader of JSON finds it, if that is what every reader finds."""
    found = json.loads(text, parse_constant=refuse_constant)
    assert msgspec.json.decode(text) == found
    assert "\0" not in text
    assert "\\u0000" not in text
    text.encode()
    return found


def fault(data: Any) -> tuple[str, str]:
    """The path and the reason that reading *data* as a message is refused with."""
    with pytest.raises(SessionFormatError) as caught:
        message_from_json(json.dumps(data))
    return caught.value.path, caught.value.reason


# --- round trips -------------------------------------------------------------------------------------------------


@given(strategies.messages())
def test_message_comes_back(message: Message) -> None:
    """A message comes back equal, to the types of all values in it, from strict JSON."""
    text = message_to_json(message)
    read_strictly(text)
    back = message_from_json(text)
    assert exactly(back) == exactly(message)
    assert back == message


@given(strategies.responses)
def test_response_comes_back(response: AgentResponse) -> None:
    """A stored answer comes back equal, to the types of all values in it, from strict JSON."""
    text = response_to_json(response)
    read_strictly(text)
    back = response_from_json(text)
    assert back == response
    assert exactly(freeze(back)) == exactly(freeze(response))


@given(strategies.mappings)
def test_mapping_comes_back(values: dict[str, Any]) -> None:
    """State and metadata come back frozen and equal, to the types of all values in them, from strict JSON."""
    frozen = freeze_mapping(values, "state")
    text = values_to_json(frozen)
    read_strictly(text)
    assert exactly(values_from_json(text)) == exactly(frozen)


@given(strategies.values)
def test_encoded_value_is_what_json_has(value: Any) -> None:
    """What a value is encoded as consists of nothing but dicts with string keys, lists, text, numbers and constants."""
    pending = [encode(freeze(value))]
    while pending:
        item = pending.pop()
        assert item is None or type(item) in {dict, list, str, int, float, bool}
        if isinstance(item, dict):
            pending += [*item.keys(), *item.values()]
        elif isinstance(item, list):
            pending += item


@pytest.mark.parametrize(
    "value",
    [
        decimal.Decimal("sNaN123"),
        decimal.Decimal("-Infinity"),
        2**70000,
        -(2**70000),
        {2**70000: {MARK: {MARK: 1, "v": 2}}},
        {"a": math.nan},
        dt.datetime(2026, 10, 25, 2, 30, tzinfo=zoneinfo.ZoneInfo("Europe/Berlin"), fold=1),
        dt.datetime(2026, 1, 2, tzinfo=zoneinfo.ZoneInfo("UTC")),
        dt.datetime(2026, 1, 2, tzinfo=dt.timezone(dt.timedelta(microseconds=-1))),
        "\ud83d\ude00",
    ],
    ids=[
        "sNaN",
        "infinity",
        "large",
        "large negative",
        "marks in marks",
        "NaN",
        "fold",
        "named UTC",
        "near UTC",
        "surrogates",
    ],
)
def test_value_on_the_edge_comes_back(value: Any) -> None:
    """A value on the edge of what its type can hold comes back, exactly."""
    frozen = freeze_mapping({"value": value}, "")
    assert exactly(values_from_json(values_to_json(frozen))) == exactly(frozen)


DEEPEST: dict[str, Callable[[Any], Any]] = {
    "list": lambda value: [value],
    "dict": lambda value: {"a": value},
    "tuple": lambda value: (value,),
    "set": lambda value: frozenset({value}),
    "int key": lambda value: {1: value},
    "our mark": lambda value: {MARK: value},
    "NUL key": lambda value: {"\0": value},
    "key in key": lambda value: {(tuple(value),): 1} if isinstance(value, dict) else {"a": value},
}


@pytest.mark.parametrize("name", DEEPEST)
def test_what_freezing_accepts_can_be_written_and_read(name: str) -> None:
    """The deepest value of each kind that freezing accepts is written, and read back, within a message."""
    value: Any = dt.date(2026, 1, 2)
    deepest: Any = None
    for _ in range(MAX_DEPTH + 1):
        try:
            deepest = freeze(value)
        except TypeError:
            break
        value = DEEPEST[name](value)
    message = Message("tool", tool_results=[ToolResult(tool_call_id="1", name="look", content=deepest)])
    assert exactly(message_from_json(message_to_json(message))) == exactly(message)


def test_defaults_are_left_out() -> None:
    """A message is written as its role, its time, and what differs from a message of nothing else."""
    assert json.loads(message_to_json(Message("user", "hello", timestamp=strategies.LONG_AGO))) == USER


def test_subclass_is_written_as_a_message() -> None:
    """An application's own kind of message is written as the message it is."""

    class Mine(Message):
        pass

    assert json.loads(message_to_json(Mine("user", "hello", timestamp=strategies.LONG_AGO))) == USER


def test_parts_are_written_by_type() -> None:
    """Parts are objects with their type and what they hold; one of an unknown kind is as it was read."""
    parts: list[Part] = [
        TextPart("a"),
        ImagePart(url="u"),
        FilePart(data=b"f", filename="f.txt"),
        UnknownPart("x", {"y": [1]}),
    ]
    message = Message("user", parts)
    assert json.loads(message_to_json(message))["content"] == [
        {"type": "text", "text": "a"},
        {"type": "image", "url": "u"},
        {"type": "file", "data": {MARK: "bytes", "v": "Zg=="}, "filename": "f.txt"},
        {"type": "x", "y": [1]},
    ]


@pytest.mark.parametrize("key", [MARK, "\0", "\ud800"], ids=["our mark", "NUL", "surrogate"])
def test_unknown_part_comes_back_whatever_its_keys(key: str) -> None:
    """A part of an unknown kind comes back also with keys that JSON, or the codec, has another use for."""
    message = Message("user", [UnknownPart("x", {key: "tuple", "v": [1]})])
    assert exactly(message_from_json(message_to_json(message))) == exactly(message)


# --- other writers -----------------------------------------------------------------------------------------------


def test_unknown_fields_are_kept() -> None:
    """Fields that a newer version has written are kept in *extra*, by path, and written again."""
    data = USER | {
        "role": "model",
        "tool_calls": [{"id": "1", "name": "look", "args": {}, "signature": "s"}],
        "shade": {"a": [None, {MARK: "bytes", "v": "YQ=="}]},
        "nothing": None,
        "extra": {"own": 1},
    }
    message = message_from_json(json.dumps(data))
    assert message.extra == {
        "shade": {"a": [None, b"a"]},
        "nothing": None,
        "tool_calls[0].signature": "s",
        "own": 1,
    }
    assert message_from_json(message_to_json(message)) == message


def test_parts_of_a_result_stand_in_an_envelope() -> None:
    """A result's parts are written as a message's are, in an envelope that no value of a user's can be taken for."""
    result = ToolResult(tool_call_id="1", name="look", content=["a", ImagePart(data=b"png", media_type="image/png")])
    message = Message("tool", tool_results=[result], timestamp=strategies.LONG_AGO)
    (written,) = json.loads(message_to_json(message))["tool_results"]
    assert written["content"] == {
        MARK: "parts",
        "v": [
            {"type": "text", "text": "a"},
            {"type": "image", "data": {MARK: "bytes", "v": "cG5n"}, "media_type": "image/png"},
        ],
    }
    assert message_from_json(message_to_json(message)) == message


@pytest.mark.parametrize("name", DEEPEST)
def test_deepest_part_of_a_result_comes_back(name: str) -> None:
    """The deepest fields that a part may have are written, and read back, also where the part stands in a result."""
    value: Any = dt.date(2026, 1, 2)
    deepest: Any = None
    for _ in range(MAX_DEPTH + 1):
        try:
            deepest = UnknownPart("deep", {"a": value})
        except TypeError:
            break
        value = DEEPEST[name](value)
    message = Message("tool", tool_results=[ToolResult(tool_call_id="1", name="look", content=deepest)])
    assert exactly(message_from_json(message_to_json(message))) == exactly(message)
    assert exactly(message_from_data(plain_copy([[message_to_data(message)]], 10**6)[0][0])) == exactly(message)


@pytest.mark.parametrize(
    ("body", "path"),
    [
        ({MARK: "parts", "v": []}, ""),
        ({MARK: "parts"}, ""),
        ({MARK: "parts", "v": [{"type": "text", "text": "a"}], "more": 1}, ""),
        ({MARK: "parts", "v": 5}, ""),
        ({MARK: "parts", "v": ["a"]}, ".v[0]"),
        ({MARK: "parts", "v": [{"type": "text", "text": "a"}, {"type": "image"}]}, ".v[1]"),
        ({MARK: "parts", "v": [{"type": "hologram", "a": {MARK: "parts", "v": [{"type": "text"}]}}]}, ".v[0].a"),
        ([{MARK: "parts", "v": [{"type": "text", "text": "a"}]}], "[0]"),
    ],
    ids=repr,
)
def test_envelope_of_parts_that_is_none(body: Any, path: str) -> None:
    """What stands in an envelope of parts and is none, or such an envelope elsewhere, is refused by its path."""
    results = [{"tool_call_id": "1", "name": "look", "content": body}]
    found, _ = fault(USER | {"role": "tool", "content": None, "tool_results": results})
    assert found == f"tool_results[0].content{path}"


def test_unknown_fields_of_results_are_kept() -> None:
    """Unknown fields of a result are kept in its message's *extra*, by path."""
    result = {"tool_call_id": "1", "name": "look", "content": None, "took": 0.5}
    message = message_from_json(json.dumps(USER | {"role": "tool", "content": None, "tool_results": [result, result]}))
    assert message.extra == {"tool_results[0].took": 0.5, "tool_results[1].took": 0.5}


@given(st.dictionaries(st.text(), strategies.json_values, max_size=3), strategies.messages())
def test_unknown_fields_survive_a_round_trip(unknown: dict[str, Any], message: Message) -> None:
    """Whatever a newer version has added, a message that can be read at all keeps it through writing and reading."""
    text = json.dumps({**unknown, **json.loads(message_to_json(message))})
    try:
        first = message_from_json(text)
    except SessionFormatError:
        return
    assert exactly(message_from_json(message_to_json(first))) == exactly(first)
    known = {"role", "content", "tool_calls", "tool_results", "agent_name", "usage", "extra", "timestamp"}
    assert unknown.keys() - known <= first.extra.keys()


def test_chatflow_agents_user_message_is_read() -> None:
    """A message of chatflow-agent is read: nulls for what is not there, a naive time that means UTC."""
    data = {
        "role": "user",
        "content": "hola",
        "tool_calls": None,
        "tool_results": None,
        "timestamp": "2026-01-02T03:04:05",
    }
    assert message_from_json(json.dumps(data)) == Message("user", "hola", timestamp=strategies.LONG_AGO)


def test_chatflow_agents_calls_and_results_are_read() -> None:
    """A call of chatflow-agent and its result are read as ours."""
    call = {
        "role": "model",
        "content": None,
        "tool_calls": [{"id": "1", "name": "look", "args": {"q": "x"}}],
        "tool_results": None,
        "timestamp": "2026-01-02T03:04:05Z",
    }
    result = {
        "role": "tool",
        "content": None,
        "tool_calls": None,
        "tool_results": [{"tool_call_id": "1", "name": "look", "content": "found", "is_error": False}],
        "timestamp": "2026-01-02 03:04:05",
    }
    assert message_from_json(json.dumps(call)) == Message(
        "model", tool_calls=[ToolCall(id="1", name="look", args={"q": "x"})], timestamp=strategies.LONG_AGO
    )
    assert message_from_json(json.dumps(result)) == Message(
        "tool", tool_results=[ToolResult(tool_call_id="1", name="look", content="found")], timestamp=strategies.LONG_AGO
    )


def test_another_offset_is_read_as_utc() -> None:
    """A time in another zone is the same moment in UTC."""
    message = message_from_json(json.dumps(USER | {"timestamp": "2026-01-02T05:04:05+02:00"}))
    assert exactly(message.timestamp) == exactly(strategies.LONG_AGO)


def test_bytes_are_read() -> None:
    """JSON is read as bytes too."""
    assert message_from_json(json.dumps(USER).encode()).content == "hello"


def nested(levels: int) -> Any:
    """That many lists around nothing."""
    value: Any = None
    for _ in range(levels):
        value = [value]
    return value


# --- the shorter way ---------------------------------------------------------------------------------------------


def same_both_ways(text: str) -> None:
    """What the shorter way reads, the converter reads too, and the same."""
    quick = usual_message(text)
    if quick is not None:
        assert exactly(quick) == exactly(_read(text, _build_message))
        assert hash(quick.role) == hash(Role(quick.role))


@given(strategies.messages())
def test_shorter_way_reads_the_same(message: Message) -> None:
    """A message that is read without the converter is what the converter would have read."""
    same_both_ways(message_to_json(message))


@pytest.mark.parametrize(
    "message",
    [
        Message("user", "hi"),
        Message("system", "Be brief."),
        Message("model", "hello", agent_name="Support", usage={"prompt_tokens": 5}, extra={"reasoning": "short"}),
        Message("model", tool_calls=[ToolCall(id="1", name="look", args={"a": [1, {"b": None}]}), CALLED]),
        Message("tool", tool_results=[ToolResult(tool_call_id="1", name="look", content={"a": [{"b": 1.5}]})]),
        Message("tool", tool_results=[ToolResult(tool_call_id="1", name="look", content="no", is_error=True)]),
    ],
    ids=["user", "system", "model", "calls", "result", "error"],
)
def test_shorter_way_reads_the_usual(message: Message) -> None:
    """Messages as most are need no converter, and nobody can change what is in them."""
    quick = usual_message(message_to_json(message))
    assert exactly(quick) == exactly(message)
    assert quick is not None
    for part in (quick, *quick.tool_calls, *quick.tool_results):
        assert type(part) in {Message, ToolCall, ToolResult}
        with pytest.raises(FrozenInstanceError):
            setattr(part, "name", "another")  # noqa: B010  # a checker knows that it is refused


# --- what is no message ------------------------------------------------------------------------------------------

CALL = {"id": "1", "name": "look", "args": {}}
RESULT = {"tool_call_id": "1", "name": "look", "content": None}


@pytest.mark.parametrize(
    ("change", "path", "reason"),
    [
        ({"role": "assistant"}, "role", "'assistant' is not a valid Role"),
        ({"role": None}, "role", "it is missing"),
        ({"timestamp": None}, "timestamp", "it is missing"),
        ({"timestamp": 5}, "timestamp", "a timestamp must be ISO 8601 text"),
        ({"timestamp": "today"}, "timestamp", "Invalid isoformat string: 'today'"),
        ({"timestamp": "0001-01-01T00:00:00+23:00"}, "", "lies in no year of UTC"),
        ({"content": 5}, "content", "content must be text, parts or null, not int"),
        ({"content": ["text"]}, "content[0]", "a part must be an object with a type"),
        ({"content": [{"text": "a"}]}, "content[0]", "a part must be an object with a type"),
        ({"content": [{"type": 5}]}, "content[0]", "type must be a string, not int"),
        ({"content": [{"type": "image"}]}, "content[0]", "ImagePart takes either url or data"),
        ({"content": [{"type": "image", "data": "YQ=="}]}, "content[0]", "data must be bytes, not str"),
        ({"tool_calls": [CALL]}, "", "tool_calls belong to a message of role model, not user"),
        ({"role": "model", "tool_calls": 5}, "tool_calls", "a list is needed here, not int"),
        ({"role": "model", "tool_calls": [{"id": "1"}]}, "tool_calls[0].name", "it is missing"),
        ({"role": "model", "tool_calls": [CALL, CALL | {"id": 5}]}, "tool_calls[1]", "id must be a string, not int"),
        (
            {"role": "model", "tool_calls": [CALL | {"args": []}]},
            "tool_calls[0].args",
            "a mapping is needed here, not list",
        ),
        ({"role": "tool"}, "", "a message of role tool needs tool_results"),
        ({"role": "tool", "tool_results": [RESULT | {"is_error": 1}]}, "tool_results[0].is_error", "true or false"),
        ({"role": "tool", "tool_results": [RESULT | {"content": {MARK: 1}}]}, "tool_results[0].content", "envelope"),
        ({"extra": {MARK: "uuid", "v": "5"}}, "extra", "an envelope of kind 'uuid' that can't be read"),
        ({"extra": {"a": [0, {MARK: "uuid", "v": 5}]}}, "extra.a[1].v", "an envelope of kind 'uuid' that holds int"),
        ({"extra": {"a": {MARK: "set", "v": [{MARK: 1}]}}}, "extra.a.v[0]", "an envelope of the unknown kind 1"),
        ({"extra": {"a": {MARK: "set", "v": [1, True]}}}, "extra.a", "an envelope of kind 'set' that can't be read"),
        ({"extra": []}, "extra", "a mapping is needed here, not list"),
        ({"unheard": {MARK: "unheard", "v": 5}}, "unheard", "an envelope of the unknown kind 'unheard'"),
    ],
    ids=lambda value: json.dumps(value) if isinstance(value, dict) else None,
)
def test_fault_is_named(change: dict[str, Any], path: str, reason: str) -> None:
    """Data that is no message is refused by the path where it goes wrong, with a reason that a person can read."""
    found_path, found_reason = fault(USER | change)
    assert found_path == path
    assert reason in found_reason


@pytest.mark.parametrize(
    "change",
    [
        {"agent_name": 5},
        {"role": "model", "tool_calls": [5]},
        {"role": "tool", "tool_results": [5]},
        {"role": "tool", "tool_results": [RESULT | {"name": None}]},
        {"extra": {"a": nested(MAX_DEPTH)}},
    ],
    ids=["agent_name", "call", "result", "name", "depth"],
)
def test_shorter_way_leaves_faults_to_the_converter(change: dict[str, Any]) -> None:
    """What is no message is none by the shorter way either."""
    assert usual_message(json.dumps(USER | change)) is None


@pytest.mark.parametrize("data", [None, [], "user", 5, [USER]], ids=json.dumps)
def test_message_must_be_an_object(data: Any) -> None:
    """JSON that is no object is no message."""
    assert fault(data) == ("", "a message must be an object")


READERS: list[Callable[[str | bytes], object]] = [message_from_json, response_from_json, values_from_json]


@pytest.mark.parametrize("read", READERS)
@pytest.mark.parametrize("text", ["", "{", '{"a": NaN}', '{"a": "\\ud800"}', "\ud800", b"\xff", '{"a": 1}}'], ids=ascii)
def test_not_json(read: Callable[[str | bytes], object], text: str | bytes) -> None:
    """What is not JSON is refused by an error that says so, with the parser's error as its cause."""
    with pytest.raises(SessionFormatError, match="it is not JSON: ") as caught:
        read(text)
    assert isinstance(caught.value.__cause__, ValueError)


@pytest.mark.parametrize("levels", [MAX_DEPTH + 1, 250, 400, 900, 1000, 10_000])
@pytest.mark.parametrize("opening", ["[", '{"a":', '{"$chatflow":"tuple","v":[', '{"$chatflow":"dict","v":[[1,'])
@pytest.mark.parametrize("where", ["content", "extra", "unheard"])
def test_hostile_depth_is_refused(where: str, opening: str, levels: int) -> None:
    """JSON that is nested too deeply is refused, wherever it stands, never a RecursionError."""
    closing = "".join({"[": "]", "{": "}"}[each] for each in reversed(opening) if each in "[{")
    deep = opening * levels + "1" + closing * levels
    with pytest.raises(SessionFormatError):
        message_from_json(json.dumps(USER)[:-1] + f', "{where}": {deep}}}')
    with pytest.raises(SessionFormatError):
        values_from_json(f'{{"a": {deep}}}')


@pytest.mark.parametrize(
    "body",
    [
        {MARK: "none", "v": 1},
        {MARK: 5, "v": 1},
        {MARK: ["tuple"], "v": []},
        {MARK: "tuple"},
        {MARK: "tuple", "v": [], "more": 1},
        {MARK: "tuple", "v": 5},
        {MARK: "tuple", "v": "ab"},
        {MARK: "tuple", "v": {"a": 1}},
        {MARK: "set", "v": [[]]},
        {MARK: "dict", "v": [[[], 1]]},
        {MARK: "dict", "v": [[1]]},
        {MARK: "dict", "v": ["ab"]},
        {MARK: "dict", "v": [[1, "a"], [True, "b"]]},
        {MARK: "set", "v": [1, 1]},
        {MARK: "int", "v": "1g"},
        {MARK: "int", "v": 5},
        {MARK: "float", "v": "1"},
        {MARK: "float", "v": []},
        {MARK: "str", "v": "/w=="},
        {MARK: "bytes", "v": "YQ"},
        {MARK: "bytes", "v": "é"},
        {MARK: "uuid", "v": 5},
        {MARK: "uuid", "v": "5"},
        {MARK: "decimal", "v": "five"},
        {MARK: "decimal", "v": 5},
        {MARK: "date", "v": "2026-02-30"},
        {MARK: "timedelta", "v": [10**10, 0, 0]},
        {MARK: "timedelta", "v": [1]},
        {MARK: "timedelta", "v": [1, 2, 3, 4, 5, 6, 7, 8]},
        {MARK: "datetime", "v": []},
        {MARK: "datetime", "v": ["2026-01-02T03:04:05", "Nowhere/Unheard", 0]},
        {MARK: "datetime", "v": ["2026-01-02T03:04:05", "../../etc/passwd", 0]},
        {MARK: "datetime", "v": ["2026-01-02T03:04:05", 5, 0]},
        {MARK: "datetime", "v": ["2026-01-02T03:04:05", None, 2]},
    ],
    ids=json.dumps,
)
def test_envelope_that_cannot_be_read(body: Any) -> None:
    """An envelope of a kind or with a body that this version does not write is refused, at any level."""
    with pytest.raises(SessionFormatError, match="an envelope of"):
        decode([{"a": body}])
    with pytest.raises(SessionFormatError, match="an envelope of"):
        values_from_json(json.dumps({"a": {MARK: "tuple", "v": [body]}}))


def test_values_must_be_an_object() -> None:
    """State and metadata that are no object with string keys are refused."""
    with pytest.raises(SessionFormatError, match="data: a mapping is needed here, not list"):
        values_from_json("[]")
    with pytest.raises(SessionFormatError, match=r"\[1\]: keys must be strings here"):
        values_from_json(json.dumps({MARK: "dict", "v": [[1, 1]]}))


@pytest.mark.parametrize(
    ("change", "path", "reason"),
    [
        ({"content": None}, "", "content must be a string, not NoneType"),
        ({"stop_reason": "tired"}, "stop_reason", "tired"),
        ({"duplicate": "no"}, "duplicate", "true or false is needed here, not 'no'"),
        ({"handoff": {}}, "handoff.target_agent_name", "it is missing"),
        ({"tool_calls_executed": [5]}, "", "tool_calls_executed[0] must be a string, not int"),
    ],
    ids=lambda value: json.dumps(value) if isinstance(value, dict) else None,
)
def test_fault_of_a_response_is_named(change: dict[str, Any], path: str, reason: str) -> None:
    """Data that is no stored answer is refused by the path where it goes wrong, with a readable reason."""
    data = {"content": "hello", "active_agent_name": "Support"} | change
    with pytest.raises(SessionFormatError) as caught:
        response_from_json(json.dumps(data))
    assert caught.value.path == path
    assert reason in caught.value.reason


# --- damaged data ------------------------------------------------------------------------------------------------


@st.composite
def damaged_texts(draw: st.DrawFn) -> str:
    """A message's JSON with a few characters lost, doubled, or changed."""
    written = message_to_json(draw(strategies.messages()))
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, len(written)))
        until = draw(st.integers(at, min(at + 4, len(written))))
        middle = draw(st.one_of(st.text(max_size=3), st.sampled_from(["{", "}", "[", '"', ",", "null", "1e999", "-"])))
        written = written[:at] + middle + written[until:]
    return written


@st.composite
def damaged_data(draw: st.DrawFn) -> Any:
    """A message's data with one thing in it replaced, removed, renamed, or wrapped."""
    data = json.loads(message_to_json(draw(strategies.messages())))
    inner: Any = data
    while True:
        key = draw(st.sampled_from([*inner] if isinstance(inner, dict) else range(len(inner))))
        if not (isinstance(inner[key], dict | list) and inner[key] and draw(st.booleans())):
            break
        inner = inner[key]
    change = draw(st.sampled_from(["replace", "remove", "rename", "wrap"]))
    if change == "replace":
        inner[key] = draw(strategies.json_values)
    elif change == "wrap":
        inner[key] = draw(st.sampled_from([lambda it: [it], lambda it: {MARK: it, "v": it}, lambda it: {"a": it}]))(
            inner[key]
        )
    else:
        value = inner.pop(key)
        if change == "rename" and isinstance(inner, dict):
            inner[draw(strategies.keys)] = value
    return data


def reads_or_refuses(text: str) -> None:
    """*text* is read as a message that can be written and read again, or refused as it should be."""
    same_both_ways(text)
    try:
        message = message_from_json(text)
    except SessionFormatError:
        return
    assert exactly(message_from_json(message_to_json(message))) == exactly(message)


@given(damaged_texts())
def test_damaged_text_is_read_or_refused(text: str) -> None:
    """A message's JSON with damaged characters gives a message or SessionFormatError, and nothing else."""
    reads_or_refuses(text)


@given(damaged_data())
@example(USER | {"content": {MARK: "str", "v": 5}})
def test_damaged_data_is_read_or_refused(data: Any) -> None:
    """A message's JSON with damaged structure gives a message or SessionFormatError, and nothing else."""
    reads_or_refuses(json.dumps(data))


@given(
    st.dictionaries(st.sampled_from([*USER, "tool_calls", "tool_results", "extra", "usage"]), strategies.json_values)
)
def test_anything_is_read_or_refused(data: Any) -> None:
    """Any object gives a message or SessionFormatError, and nothing else."""
    reads_or_refuses(json.dumps(USER | data))


@given(strategies.envelopes(strategies.json_values))
def test_any_envelope_is_read_or_refused(envelope: Any) -> None:
    """Any envelope gives values that can be written and read again, or SessionFormatError, and nothing else."""
    text = json.dumps({"a": envelope})
    try:
        values = values_from_json(text)
    except SessionFormatError:
        return
    assert exactly(values_from_json(values_to_json(values))) == exactly(values)


@given(
    st.dictionaries(
        st.sampled_from(["content", "active_agent_name", "handoff", "usage", "stop_reason"]), strategies.json_values
    )
)
def test_any_response_is_read_or_refused(data: Any) -> None:
    """Any object gives a stored answer or SessionFormatError, and nothing else."""
    try:
        response = response_from_json(json.dumps({"content": "", "active_agent_name": "", **data}))
    except SessionFormatError:
        return
    assert response_from_json(response_to_json(response)) == response


def test_response_with_a_handoff() -> None:
    """A handoff's reason and updates are part of the stored answer."""
    handoff = Handoff(target_agent_name="Billing", reason="money", context_updates={"amount": decimal.Decimal("1.50")})
    response = AgentResponse(content="", active_agent_name="Billing", handoff=handoff, tool_calls_executed=["a", "b"])
    assert response_from_json(response_to_json(response)) == response


def test_roles_are_written_by_value() -> None:
    """Roles stand in the JSON by the names of the documentation."""
    found = {
        role: json.loads(
            message_to_json(
                Message(
                    role,
                    tool_results=[ToolResult(tool_call_id="", name="", content=None)] if role is Role.TOOL else (),
                )
            )
        )["role"]
        for role in Role
    }
    assert found == {Role.USER: "user", Role.MODEL: "model", Role.SYSTEM: "system", Role.TOOL: "tool"}
