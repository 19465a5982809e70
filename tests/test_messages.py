from __future__ import annotations

import copy
import datetime as dt
import enum
import pickle
from collections.abc import Callable
from typing import Any

import attrs
import pytest
from hypothesis import given

from chatflow.core import messages
from chatflow.core.codec import message_from_json, message_to_json
from chatflow.core.messages import (
    AgentResponse,
    FilePart,
    ImagePart,
    Message,
    Part,
    Role,
    TextPart,
    ToolCall,
    ToolResult,
    UnknownPart,
)
from chatflow.core.values import EMPTY, MARK, FrozenDict, FrozenList, freeze
from chatflow.exceptions import UnstorableValueError
from tests import strategies
from tests.strategies import LONG_AGO, exactly

door: Any = messages
"""The values, for arguments that a type checker would refuse."""

CALL = ToolCall(id="1", name="look", args={"q": ["x"]})
RESULT = ToolResult(tool_call_id="1", name="look", content={"found": [1]})


class Word(enum.StrEnum):
    HELLO = "hello"


class Bytes(bytes):
    __slots__ = ()


class MyCall(ToolCall):
    pass


class MyResult(ToolResult):
    pass


class MyText(TextPart):
    pass


# --- what a message is made of -----------------------------------------------------------------------------------


def test_role_and_content_are_positional() -> None:
    """Role and content are given by position, a role also by its name, and the rest has defaults."""
    message = Message("user", "hello")
    assert message == Message(Role.USER, content="hello", timestamp=message.timestamp)
    assert (message.tool_calls, message.tool_results, message.agent_name, message.usage) == ((), (), None, None)
    assert message.extra is EMPTY


def test_the_rest_is_keyword_only() -> None:
    """What would be mistaken by position can't be given by it."""
    with pytest.raises(TypeError):
        door.Message("model", "hello", [CALL])
    with pytest.raises(TypeError):
        door.ToolCall("1", "look")


def test_timestamp_is_now_in_utc() -> None:
    """A message that is given no time is of now, in UTC."""
    before = dt.datetime.now(dt.UTC)
    timestamp = Message("user").timestamp
    assert before <= timestamp <= dt.datetime.now(dt.UTC)
    assert timestamp.tzinfo is dt.UTC


def test_timestamp_becomes_utc() -> None:
    """A time in another zone becomes the same moment in UTC."""
    there = LONG_AGO.astimezone(dt.timezone(dt.timedelta(hours=5, minutes=45)))
    assert exactly(Message("user", timestamp=there).timestamp) == exactly(LONG_AGO)


def test_timestamp_of_a_subclass_becomes_plain() -> None:
    """A time of a library's own kind becomes a plain datetime."""

    class Moment(dt.datetime):
        pass

    moment = Moment(2026, 1, 2, 3, 4, 5, tzinfo=dt.UTC)
    assert exactly(Message("user", timestamp=moment).timestamp) == exactly(LONG_AGO)


def test_any_iterable_is_taken() -> None:
    """Calls, results and parts may come from any iterable, and are tuples inside; text among parts is a part."""
    message = door.Message("model", iter(["a", TextPart("b")]), tool_calls=iter([CALL]))
    assert message.content == (TextPart("a"), TextPart("b"))
    assert message.tool_calls == (CALL,)
    assert Message("tool", tool_results=iter([RESULT])).tool_results == (RESULT,)


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (None, ""),
        ("", ""),
        ("hello", "hello"),
        ([], ""),
        (["a", ImagePart(url="u"), "b", UnknownPart("text", {"text": "c", "more": 1})], "ab"),
    ],
    ids=repr,
)
def test_text(content: Any, text: str) -> None:
    """A message's text is its content, or its text parts joined, and never None."""
    assert Message("user", content).text == text


def test_strings_become_plain() -> None:
    """Enums and other kinds of str become plain str in every field that holds text."""
    message = Message("model", Word.HELLO, agent_name=Word.HELLO, tool_calls=[ToolCall(id=Word.HELLO, name=Word.HELLO)])
    found = [message.content, message.agent_name, message.tool_calls[0].id, message.tool_calls[0].name]
    part = ImagePart(url=Word.HELLO, media_type=Word.HELLO)
    response = AgentResponse(content=Word.HELLO, active_agent_name=Word.HELLO, tool_calls_executed=[Word.HELLO])
    found += [part.url, part.media_type, response.content, response.active_agent_name, *response.tool_calls_executed]
    assert [exactly(each) for each in found] == [exactly("hello")] * len(found)


def test_bytes_become_plain() -> None:
    """A part's data of another kind of bytes becomes plain bytes."""
    assert exactly(FilePart(data=Bytes(b"a")).data) == exactly(b"a")


def test_calls_and_results_become_plain() -> None:
    """An application's own kinds of call and result become ours, as a file would give them back."""
    call, result = MyCall(id="1", name="look"), MyResult(tool_call_id="1", name="look", content=None, is_error=True)
    assert Message("model", tool_calls=[call]).tool_calls == (ToolCall(id="1", name="look"),)
    assert Message("tool", tool_results=[result]).tool_results == (
        ToolResult(tool_call_id="1", name="look", content=None, is_error=True),
    )


# --- nobody else's -----------------------------------------------------------------------------------------------


def test_fields_cannot_be_set() -> None:
    """A message's fields can't be set, deleted or added to."""
    message = Message("user", "hello")
    for name in ("content", "something"):
        with pytest.raises(AttributeError):
            setattr(message, name, "changed")
    with pytest.raises(AttributeError):
        del message.content


def test_what_is_inside_cannot_be_changed() -> None:
    """Arguments, results, usage and extra are frozen copies, at every level."""
    message = Message("model", tool_calls=[CALL], usage={"tokens": {"in": 1}}, extra={"signatures": ["s"]})
    result = Message("tool", tool_results=[RESULT])
    for container in (
        message.tool_calls[0].args["q"],
        message.usage and message.usage["tokens"],
        message.extra["signatures"],
        result.tool_results[0].content["found"],
    ):
        assert isinstance(container, FrozenDict | FrozenList)


def test_what_it_was_made_of_may_change() -> None:
    """A message stays as it is when the objects it was made of change."""
    args: dict[str, Any] = {"q": ["x"]}
    call = ToolCall(id="1", name="look", args=args)
    message = Message("model", tool_calls=[call], extra=args)
    args["q"].append("y")
    args["r"] = 1
    assert message.tool_calls[0].args == message.extra == {"q": ["x"]}


@given(strategies.messages())
def test_copies_are_as_frozen(message: Message) -> None:
    """A copy, a deep copy and a pickled message are exactly the same, frozen at every level."""
    for again in (
        copy.copy(message),
        copy.deepcopy(message),
        pickle.loads(pickle.dumps(message)),
        attrs.evolve(message),
    ):
        assert exactly(again) == exactly(message)


# --- what is refused at the door ---------------------------------------------------------------------------------

REFUSED: dict[str, tuple[Callable[[], object], type[Exception], str]] = {
    "unknown role": (
        lambda: door.Message("assistant", "hello"),
        ValueError,
        "role must be one of user, model, system, tool, not 'assistant'",
    ),
    "role of another type": (lambda: door.Message(None), ValueError, "role must be one of .* not None"),
    "number as content": (lambda: door.Message("user", 5), TypeError, "content must be text, parts or None, not int"),
    "bytes as content": (lambda: door.Message("user", b"a"), TypeError, "content must be .* not bytes"),
    "dict as content": (lambda: door.Message("user", {"a": "b"}), TypeError, "content must be .* not dict"),
    "part of another type": (
        lambda: door.Message("user", ["a", 5]),
        TypeError,
        r"content\[1\] must be a part or text, not int",
    ),
    "part of a subclass": (lambda: door.Message("user", [MyText("a")]), TypeError, r"content\[0\] .* not MyText"),
    "calls of a user": (
        lambda: door.Message("user", tool_calls=[CALL]),
        ValueError,
        "tool_calls belong to a message of role model, not user",
    ),
    "results of a model": (
        lambda: door.Message("model", tool_results=[RESULT]),
        ValueError,
        "tool_results belong to a message of role tool, not model",
    ),
    "tool without results": (
        lambda: door.Message("tool", "hello"),
        ValueError,
        "a message of role tool needs tool_results",
    ),
    "calls that are none": (
        lambda: door.Message("model", tool_calls=[CALL, {"id": "1"}]),
        TypeError,
        r"tool_calls\[1\] must be a ToolCall, not dict",
    ),
    "results that are none": (
        lambda: door.Message("tool", tool_results=[CALL]),
        TypeError,
        r"tool_results\[0\] must be a ToolResult, not ToolCall",
    ),
    "agent that is no name": (
        lambda: door.Message("model", agent_name=5),
        TypeError,
        "agent_name must be a string, not int",
    ),
    "text as timestamp": (
        lambda: door.Message("user", timestamp="now"),
        TypeError,
        "timestamp must be a datetime, not str",
    ),
    "naive timestamp": (
        lambda: door.Message("user", timestamp=LONG_AGO.replace(tzinfo=None)),
        ValueError,
        "timestamp must have a time zone, and .* has none",
    ),
    "timestamp before all years": (
        lambda: door.Message("user", timestamp=dt.datetime.min.replace(tzinfo=dt.timezone(dt.timedelta(hours=1)))),
        ValueError,
        "lies in no year of UTC",
    ),
    "call id": (lambda: door.ToolCall(id=1, name="a"), TypeError, "id must be a string, not int"),
    "call name": (lambda: door.ToolCall(id="1", name=None), TypeError, "name must be a string, not NoneType"),
    "result id": (
        lambda: door.ToolResult(tool_call_id=None, name="a", content=1),
        TypeError,
        "tool_call_id must be a string, not NoneType",
    ),
    "error that is no bool": (
        lambda: door.ToolResult(tool_call_id="1", name="a", content=1, is_error=1),
        TypeError,
        "is_error must be True or False, not 1",
    ),
    "text part": (lambda: door.TextPart(5), TypeError, "text must be a string, not int"),
    "image of nothing": (door.ImagePart, ValueError, "ImagePart takes either url or data"),
    "audio by url and as data": (
        lambda: door.AudioPart(url="u", data=b""),
        ValueError,
        "AudioPart takes either url or data",
    ),
    "data that is text": (lambda: door.FilePart(data="a"), TypeError, "data must be bytes, not str"),
    "url that is bytes": (lambda: door.FilePart(url=b"a"), TypeError, "url must be a string, not bytes"),
    "known part as an unknown one": (
        lambda: door.UnknownPart("image", {"url": "u"}),
        ValueError,
        "a part of type 'image' with these fields is a ImagePart",
    ),
    "unknown part with two types": (
        lambda: door.UnknownPart("x", {"type": "y"}),
        ValueError,
        "a part's type is its first argument",
    ),
    "handoff to an object": (
        lambda: door.Handoff(target_agent_name=CALL),
        TypeError,
        "target_agent_name must be a string, not ToolCall",
    ),
    "response without text": (
        lambda: door.AgentResponse(content=None, active_agent_name="a"),
        TypeError,
        "content must be a string, not NoneType",
    ),
    "text as tools' names": (
        lambda: door.AgentResponse(content="", active_agent_name="a", tool_calls_executed="look"),
        TypeError,
        "tool_calls_executed must be names, not the text 'look'",
    ),
    "tools' names that are none": (
        lambda: door.AgentResponse(content="", active_agent_name="a", tool_calls_executed=[5]),
        TypeError,
        r"tool_calls_executed\[0\] must be a string, not int",
    ),
    "handoff that is none": (
        lambda: door.AgentResponse(content="", active_agent_name="a", handoff="Billing"),
        TypeError,
        "'handoff' must be .*Handoff",
    ),
    "duplicate that is no bool": (
        lambda: door.AgentResponse(content="", active_agent_name="a", duplicate=None),
        TypeError,
        "duplicate must be True or False, not None",
    ),
    "unknown stop reason": (
        lambda: door.AgentResponse(content="", active_agent_name="a", stop_reason="tired"),
        ValueError,
        "'stop_reason' must be in",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_is_refused(name: str) -> None:
    """A field that is wrong is refused when the value is made, by an error that names it."""
    make, kind, message = REFUSED[name]
    with pytest.raises(kind, match=message):
        make()


UNSTORABLE: dict[str, tuple[Callable[[], object], str]] = {
    "result": (
        lambda: door.Message(
            "tool",
            tool_results=[
                RESULT,
                door.ToolResult(tool_call_id="1", name="a", content={"items": [0, 1, 2, object()]}),
            ],
        ),
        "tool_results[1].content.items[3]",
    ),
    "whole result": (
        lambda: door.Message("tool", tool_results=[door.ToolResult(tool_call_id="1", name="a", content=object())]),
        "tool_results[0].content",
    ),
    "argument": (
        lambda: door.Message("model", tool_calls=[CALL, door.ToolCall(id="1", name="a", args={"q": {1: object()}})]),
        "tool_calls[1].args.q[1]",
    ),
    "arguments that are no mapping": (
        lambda: door.Message("model", tool_calls=[door.ToolCall(id="1", name="a", args=[1])]),
        "tool_calls[0].args",
    ),
    "arguments without names": (
        lambda: door.Message("model", tool_calls=[door.ToolCall(id="1", name="a", args={1: 1})]),
        "tool_calls[0].args[1]",
    ),
    "usage": (lambda: door.Message("model", usage={"cost": object()}), "usage.cost"),
    "usage that is no mapping": (lambda: door.Message("model", usage=5), "usage"),
    "extra": (lambda: door.Message("model", extra={"raw": [object()]}), "extra.raw[0]"),
    "extra that is None": (lambda: door.Message("model", extra=None), "extra"),
    "unknown part": (lambda: door.UnknownPart("x", {"raw": object()}), "fields.raw"),
    "handoff": (
        lambda: door.Handoff(target_agent_name="a", context_updates={"cart": object()}),
        "context_updates.cart",
    ),
    "response": (lambda: door.AgentResponse(content="", active_agent_name="a", usage={"cost": object()}), "usage.cost"),
}


@pytest.mark.parametrize("name", UNSTORABLE)
def test_value_that_cannot_be_kept_is_refused_by_path(name: str) -> None:
    """A value inside that can't be kept is refused when the message is made, and the path leads from it on."""
    make, path = UNSTORABLE[name]
    with pytest.raises(UnstorableValueError) as caught:
        make()
    assert caught.value.path == path


# --- parts in results ---

PNG = ImagePart(data=b"png", media_type="image/png")


def kept(content: Any) -> ToolResult:
    """A result of this content, as a message keeps it."""
    return Message(Role.TOOL, tool_results=[ToolResult(tool_call_id="c", name="look", content=content)]).tool_results[0]


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (PNG, (PNG,)),
        ([PNG], (PNG,)),
        (("Front:", PNG), (TextPart("Front:"), PNG)),
        ([TextPart("only text")], (TextPart("only text"),)),
        ([UnknownPart("hologram", {"of": [1]}), "a"], (UnknownPart("hologram", {"of": [1]}), TextPart("a"))),
    ],
    ids=["a part", "a list", "a tuple with text", "text as a part", "of an unknown kind"],
)
def test_parts_of_a_result(content: Any, expected: tuple[Part, ...]) -> None:
    """A part, or a list or tuple of parts and text with at least one part, is kept as a tuple of parts."""
    result = kept(content)
    assert result.content == result.parts == expected
    assert kept(result.content) == result


@pytest.mark.parametrize(
    "content",
    [
        [],
        (),
        ["a", "b"],
        ("a",),
        "text",
        None,
        {"type": "image", "data": b"png"},
        [{"type": "image", "url": "https://pictures.example/1"}],
        {MARK: "parts", "v": [{"type": "text", "text": "a"}]},
    ],
    ids=repr,
)
def test_values_that_are_no_parts(content: Any) -> None:
    """Lists of text, and a user's own dicts that look like parts, stay what they are, also when they are written."""
    result = kept(content)
    assert (result.content, result.parts) == (content, ())
    assert exactly(result.content) == exactly(freeze(content))
    message = Message(Role.TOOL, tool_results=[result], timestamp=LONG_AGO)
    assert exactly(message_from_json(message_to_json(message))) == exactly(message)


def test_part_inside_a_value() -> None:
    """A part elsewhere in a value is one like any other attrs instance: it becomes a dict of its fields."""
    assert kept({"picture": TextPart("a")}).content == {"picture": {"text": "a"}}


@pytest.mark.parametrize(
    ("content", "place"), [([PNG, 5], 1), (({"a": 1}, PNG), 0), ([PNG, "a", [PNG]], 2)], ids=["int", "dict", "list"]
)
def test_something_else_among_parts(content: Any, place: int) -> None:
    """What is neither a part nor text can't stand in a list in which a part does; the error names its place."""
    with pytest.raises(UnstorableValueError, match="neither a part nor text") as caught:
        kept(content)
    assert caught.value.path == f"tool_results[0].content[{place}]"


def test_parts_of_a_result_are_frozen() -> None:
    """A result's parts belong to the message: a list that is changed later changes nothing, and a hash can be taken."""
    content = [PNG, "a"]
    result = kept(content)
    content.append("b")
    assert result.parts == (PNG, TextPart("a"))
    assert hash(result) == hash(kept([PNG, "a"]))
