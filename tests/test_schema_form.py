"""How a model is told what its answer is to be."""

from __future__ import annotations

import dataclasses
import enum
import json
from typing import Annotated, Any, Final

import jsonschema
import pydantic
import pytest
from hypothesis import given
from hypothesis import strategies as st

from chatflow.core.agent import Agent
from chatflow.core.engine import EngineRequest
from chatflow.core.messages import Message, Role, ToolCall, ToolResult
from chatflow.core.output import Output
from chatflow.core.tools import Tool
from chatflow.engines.arguments import Asked, completion_arguments, responses_arguments
from chatflow.engines.schema_form import form_of, strict_schema, with_schema
from tests.test_output import KINDS, pydantic_json


class Size(enum.Enum):
    SMALL = "small"
    LARGE = "large"


@dataclasses.dataclass
class Item:
    name: str
    size: Size | None
    parts: list[Item]


@dataclasses.dataclass
class Empty:
    """Nothing."""


def look_up(order_id: str) -> str:
    """Look up an order."""
    return order_id


# --- strictly ---


def test_strict_schema() -> None:
    """A class whose fields are all required is told strictly: no object in it has other fields."""
    strict = strict_schema(Output(Item).schema)
    assert strict is not None
    for schema in (strict, strict["$defs"]["Item"]):
        assert schema["additionalProperties"] is False
        assert schema["required"] == ["name", "size", "parts"]
    assert strict["properties"]["parts"] == {"type": "array", "items": {"$ref": "#/$defs/Item"}}


def test_strict_schema_of_nothing() -> None:
    """An object without fields names and requires none."""
    strict = strict_schema(Output(Empty).schema)
    assert strict is not None
    assert (strict["properties"], strict["required"], strict["additionalProperties"]) == ({}, [], False)


@pytest.mark.parametrize("kind", [int, list[Item], Item | Empty, bool | None])
def test_strict_kinds(kind: Any) -> None:
    """Numbers, lists and unions of what can be told strictly can be too."""
    assert strict_schema(Output(kind).schema) is not None


class Open(pydantic.BaseModel, extra="allow"):
    number: int


class Defaulted(pydantic.BaseModel):
    number: int = 3


class Described(pydantic.BaseModel):
    size: Annotated[Size, pydantic.Field(description="How large.")]


@pytest.mark.parametrize(
    "kind", [Open, Defaulted, Described, dict[str, int], list[Any], Annotated[int, pydantic.Field(gt=0)], Any]
)
def test_not_strict(kind: Any) -> None:
    """Open objects, fields that may be left out, and keywords that OpenAI may not take, are told as they are."""
    schema = Output(kind).schema
    assert strict_schema(schema) is None
    assert form_of(schema, "gpt-4o") == {"name": "answer", "schema": schema}


items: Final[st.SearchStrategy[Item]] = st.deferred(
    lambda: st.builds(Item, st.text(), st.none() | st.sampled_from(Size), st.just(list[Item]()) | st.lists(items))
)


@given(items)
def test_strict_says_the_same(item: Item) -> None:
    """What is written whole is valid by the strict schema too."""
    jsonschema.validate(json.loads(pydantic_json(item)), strict_schema(Output(Item).schema) or {"not": {}})


@pytest.mark.parametrize("model", ["claude-sonnet-4-5", "gemini-2.5-flash", "mistral-large-latest"])
def test_strict_for_openai_alone(model: str) -> None:
    """Other providers are told the schema as it is."""
    schema = Output(Item).schema
    assert form_of(schema, model) == {"name": "answer", "schema": schema}
    assert form_of(schema, "azure/gpt-4o")["strict"] is True


# --- by parameter, or in the system text ---


def asked(model: str = "gpt-4o", *, takes_schema: bool = True, **fields: Any) -> Asked:
    """A request for an item."""
    fields = {"messages": [Message(Role.SYSTEM, "Be brief."), Message(Role.USER, "Hi")], **fields}
    request = EngineRequest(agent=Agent("Support"), output_schema=Output(Item).schema, **fields)
    return Asked(request, model, at_service=False, session=None, takes_schema=takes_schema)


def told_by_parameter(arguments: dict[str, Any]) -> bool:
    """Whether the schema goes as a parameter; it goes one way, and only one."""
    forms = [arguments.get("response_format"), (arguments.get("text") or {}).get("format")]
    by_parameter = any(form is not None and form["type"] == "json_schema" for form in forms)
    assert ("JSON Schema" in json.dumps([arguments.get("messages"), arguments.get("instructions")])) is not by_parameter
    return by_parameter


TOOLS = [Tool(look_up)]
CALLED = [
    Message(Role.USER, "Hi"),
    Message(Role.MODEL, tool_calls=[ToolCall(id="c1", name="look_up", args={"order_id": "1"})]),
    Message(Role.TOOL, tool_results=[ToolResult(tool_call_id="c1", name="look_up", content="sent")]),
]


@pytest.mark.parametrize(
    ("request_", "expected"),
    [
        (asked(), True),
        (asked(takes_schema=False), False),
        (asked(tools=TOOLS), True),
        (asked("claude-sonnet-4-5"), True),
        (asked("claude-sonnet-4-5", tools=TOOLS), False),
        (asked("claude-sonnet-4-5", messages=CALLED), False),  # the tools of the past go along
        (asked("gemini-2.5-flash"), True),
        (asked("gemini-2.5-flash", tools=TOOLS), False),
        (asked("gemini-2.5-flash", messages=CALLED), True),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_way_of_the_schema(request_: Asked, expected: bool, stream: bool) -> None:
    """The schema is a parameter where the model takes one, beside tools with OpenAI alone, and else a system text."""
    assert told_by_parameter(completion_arguments(request_, {}, stream=stream)) is expected


def test_way_of_the_schema_at_a_service() -> None:
    """Where the service keeps the history the schema goes the same ways."""
    assert told_by_parameter(responses_arguments(asked(tools=TOOLS), {}, stream=False))
    assert told_by_parameter(responses_arguments(asked("xai/grok-4"), {}, stream=False))
    assert not told_by_parameter(responses_arguments(asked("xai/grok-4", tools=TOOLS), {}, stream=False))
    assert not told_by_parameter(responses_arguments(asked(takes_schema=False), {}, stream=False))


@pytest.mark.parametrize("form", [{"type": "json_object"}, None])
def test_response_format_of_the_settings(form: Any) -> None:
    """A response format in the settings is sent as it is, None for none, and the schema stands in the system text."""
    for given_by in (
        completion_arguments(asked(settings={"response_format": form}), {}, stream=False),
        completion_arguments(asked(), {"response_format": form}, stream=False),
    ):
        assert given_by["response_format"] == form
        assert not told_by_parameter(given_by)


def test_text_format_of_the_settings() -> None:
    """At a service the same holds for the text's format; what else the setting holds goes along."""
    ours = responses_arguments(asked(settings={"text": {"verbosity": "low"}}), {}, stream=False)
    assert ours["text"]["verbosity"] == "low"
    assert told_by_parameter(ours)
    theirs = responses_arguments(asked(), {"text": {"format": {"type": "json_object"}}}, stream=False)
    assert theirs["text"] == {"format": {"type": "json_object"}}
    assert not told_by_parameter(theirs)


def test_system_text() -> None:
    """The schema stands after the system messages at the beginning, before anybody has spoken."""
    schema = Output(Item).schema
    first, told, question = with_schema(asked().request.messages, schema)
    assert (first.text, question.text, told.role) == ("Be brief.", "Hi", Role.SYSTEM)
    assert json.loads(told.text.partition("\n")[2]) == schema
    assert [message.role for message in with_schema([question], schema)] == [Role.SYSTEM, Role.USER]
    assert [message.role for message in with_schema([], schema)] == [Role.SYSTEM]


def test_kinds_are_told() -> None:
    """A schema of any kind can be told, and the original is left as it was."""
    for kind, _, _ in KINDS:
        schema = Output(kind).schema
        before = json.dumps(schema)
        form_of(schema, "gpt-4o")
        assert json.dumps(schema) == before
