# Without `from __future__ import annotations`: test_tools_future.py has what differs with it.
import contextvars
import dataclasses
import datetime as dt
import decimal
import enum
import functools
import pickle
import re
import subprocess
import sys
import threading
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, Optional, TypedDict, Union  # noqa: F401  # some are named in the table only

import anyio
import anyio.from_thread
import attrs
import pydantic
import pytest
import typing_extensions
from pydantic import BaseModel, Field

import chatflow
from chatflow.core.messages import Message, Role, ToolCall
from chatflow.core.tools import Tool, ToolContext, tool
from chatflow.exceptions import ToolArgumentError, ToolError


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Size(enum.IntEnum):
    SMALL = 1
    LARGE = 2


@dataclasses.dataclass
class Point:
    x: int
    y: int = 0


class Order(BaseModel):
    order_id: str
    title: str = "none"
    lines: list[Point] = Field(default_factory=list[Point])


class Address(typing_extensions.TypedDict):
    street: str
    number: typing_extensions.NotRequired[int]


class StandardAddress(TypedDict):
    street: str


class Card(BaseModel):
    kind: Literal["card"]
    digits: str


class Cash(BaseModel):
    kind: Literal["cash"]


class Tree(BaseModel):
    children: list["Tree"] = []


class Unknowable:
    pass


COLOUR = {"type": "string", "enum": ["red", "blue"]}
POINT = {
    "type": "object",
    "properties": {"x": {"type": "integer"}, "y": {"type": "integer", "default": 0}},
    "required": ["x"],
}
ORDER = {
    "type": "object",
    "properties": {
        "order_id": {"type": "string"},
        "title": {"type": "string", "default": "none"},
        "lines": {"type": "array", "items": {"$ref": "#/$defs/Point"}},
    },
    "required": ["order_id"],
}
ADDRESS = {
    "type": "object",
    "properties": {"street": {"type": "string"}, "number": {"type": "integer"}},
    "required": ["street"],
}
CARD = {
    "type": "object",
    "properties": {"kind": {"const": "card", "type": "string"}, "digits": {"type": "string"}},
    "required": ["kind", "digits"],
}
CASH = {"type": "object", "properties": {"kind": {"const": "cash", "type": "string"}}, "required": ["kind"]}
NOON = dt.datetime(2024, 5, 1, 12, tzinfo=dt.UTC)
ID = "12345678-1234-5678-1234-567812345678"
NOTHING_REFUSED: Any = object()


@attrs.frozen
class Case:
    """One annotation: what a model is shown, what it may send, what the function then receives, what is refused."""

    annotation: str
    schema: dict[str, Any]
    given: Any
    received: Any
    refused: Any
    shared: dict[str, Any] = attrs.field(factory=dict)


CASES = [
    Case("int", {"type": "integer"}, 5, 5, "five"),
    Case("int", {"type": "integer"}, "5", 5, 5.5),
    Case("int", {"type": "integer"}, 2**70, 2**70, None),
    Case("float", {"type": "number"}, 1, 1.0, "much"),
    Case("str", {"type": "string"}, "red", "red", 404),
    Case("bool", {"type": "boolean"}, True, True, "perhaps"),
    Case("None", {"type": "null"}, None, None, 0),
    Case("Any", {}, {"a": [1]}, {"a": [1]}, NOTHING_REFUSED),
    Case("object", {}, [1, "a"], [1, "a"], NOTHING_REFUSED),
    Case("int | None", {"anyOf": [{"type": "integer"}, {"type": "null"}]}, None, None, "none"),
    Case("Optional[str]", {"anyOf": [{"type": "string"}, {"type": "null"}]}, "a", "a", 1),
    Case("Union[int, str]", {"anyOf": [{"type": "integer"}, {"type": "string"}]}, "5", "5", None),
    Case('Literal["a", 2]', {"enum": ["a", 2]}, 2, 2, "b"),
    Case("Colour", {"$ref": "#/$defs/Colour"}, "red", Colour.RED, "green", {"Colour": COLOUR}),
    Case("Size", {"$ref": "#/$defs/Size"}, 2, Size.LARGE, 3, {"Size": {"type": "integer", "enum": [1, 2]}}),
    Case("list", {"type": "array", "items": {}}, [1, "a"], [1, "a"], "a"),
    Case("list[int]", {"type": "array", "items": {"type": "integer"}}, [1, "2"], [1, 2], [1, "b"]),
    Case("dict", {"type": "object", "additionalProperties": True}, {"a": 1}, {"a": 1}, [1]),
    Case(
        "dict[str, int]",
        {"type": "object", "additionalProperties": {"type": "integer"}},
        {"a": 1},
        {"a": 1},
        {"a": "b"},
    ),
    Case(
        "dict[int, str]",
        {"type": "object", "additionalProperties": {"type": "string"}},
        {"1": "a"},
        {1: "a"},
        {"a": "b"},
    ),
    Case("set[int]", {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}, [1, 2, 1], {1, 2}, ["b"]),
    Case(
        "tuple[int, str]",
        {"type": "array", "prefixItems": [{"type": "integer"}, {"type": "string"}], "minItems": 2, "maxItems": 2},
        [1, "a"],
        (1, "a"),
        [1],
    ),
    Case("tuple[int, ...]", {"type": "array", "items": {"type": "integer"}}, [1, 2, 3], (1, 2, 3), ["a"]),
    Case("Address", {"$ref": "#/$defs/Address"}, {"street": "A"}, {"street": "A"}, {"number": 1}, {"Address": ADDRESS}),
    Case("Point", {"$ref": "#/$defs/Point"}, {"x": "1"}, Point(1, 0), {"y": 1}, {"Point": POINT}),
    Case(
        "Order",
        {"$ref": "#/$defs/Order"},
        {"order_id": "a", "lines": [{"x": 1, "y": 2}]},
        Order(order_id="a", lines=[Point(1, 2)]),
        {"order_id": "a", "lines": [{}]},
        {"Order": ORDER, "Point": POINT},
    ),
    Case(
        "Tree",
        {"$ref": "#/$defs/Tree"},
        {"children": [{}]},
        Tree(children=[Tree()]),
        {"children": [1]},
        {
            "Tree": {
                "type": "object",
                "properties": {"children": {"type": "array", "items": {"$ref": "#/$defs/Tree"}, "default": []}},
            }
        },
    ),
    Case(
        'Annotated[Card | Cash, Field(discriminator="kind")]',
        {
            "oneOf": [{"$ref": "#/$defs/Card"}, {"$ref": "#/$defs/Cash"}],
            "discriminator": {"propertyName": "kind", "mapping": {"card": "#/$defs/Card", "cash": "#/$defs/Cash"}},
        },
        {"kind": "cash"},
        Cash(kind="cash"),
        {"kind": "cheque"},
        {"Card": CARD, "Cash": CASH},
    ),
    Case("dt.datetime", {"type": "string", "format": "date-time"}, "2024-05-01T12:00:00Z", NOON, "noon"),
    Case("dt.date", {"type": "string", "format": "date"}, "2024-05-01", dt.date(2024, 5, 1), "May"),
    Case("dt.timedelta", {"type": "string", "format": "duration"}, "PT90S", dt.timedelta(seconds=90), "long"),
    Case("uuid.UUID", {"type": "string", "format": "uuid"}, ID, uuid.UUID(ID), "1"),
    Case("bytes", {"type": "string", "format": "binary"}, "a", b"a", 1),
    Case("Annotated[int, Field(gt=0)]", {"type": "integer", "exclusiveMinimum": 0}, 1, 1, 0),
    Case('Annotated[str, Field(description="An id.")]', {"type": "string", "description": "An id."}, "a", "a", 1),
    Case(
        'Annotated[str, Field(title="Id", examples=["title"])]', {"type": "string", "examples": ["title"]}, "a", "a", 1
    ),
]


def declare(parameter: str, header: str = "") -> Tool:
    """The tool of a function with this parameter, written in a module of its own that knows the names of this one."""
    module: dict[str, Any] = dict(globals())
    source = f"{header}\nasync def take({parameter}):\n    return x"
    exec(compile(source, "<declared>", "exec", dont_inherit=True), module)
    return tool(module["take"])


@pytest.fixture
def context() -> ToolContext:
    """The context of a call that has no session or agent to look at."""
    nothing: Any = object()
    return ToolContext(session=nothing, state={"seen": 0}, agent=nothing, idempotency_key="key-1")


headers = pytest.mark.parametrize("header", ["", "from __future__ import annotations"], ids=["now", "future"])


def each(cases: list[Case]) -> pytest.MarkDecorator:
    """The mark that runs a test once for each of *cases*."""
    ids = [f"{number}-{case.annotation}" for number, case in enumerate(cases)]
    return pytest.mark.parametrize("case", cases, ids=ids)


cases = each(CASES)
refusing_cases = each([case for case in CASES if case.refused is not NOTHING_REFUSED])


@headers
@cases
def test_schema_of_each_annotation(case: Case, header: str) -> None:
    """Each annotation is shown to the model as this schema, with all it refers to inside and no titles."""
    expected = {"type": "object", "properties": {"x": case.schema}, "required": ["x"], "additionalProperties": False}
    if case.shared:
        expected["$defs"] = case.shared
    assert declare(f"x: {case.annotation}", header).parameters == expected


@headers
@cases
async def test_accepted_value_of_each_annotation(case: Case, header: str, context: ToolContext) -> None:
    """A value that fits is received as the type that the annotation asks for."""
    received = await declare(f"x: {case.annotation}", header).invoke({"x": case.given}, context)
    assert received == case.received
    assert type(received) is type(case.received)


@headers
@refusing_cases
async def test_refused_value_of_each_annotation(case: Case, header: str, context: ToolContext) -> None:
    """A value that does not fit is refused, and the message names the argument."""
    with pytest.raises(ToolArgumentError, match=r"take can't be called with these arguments: x"):
        await declare(f"x: {case.annotation}", header).invoke({"x": case.refused}, context)


@pytest.mark.parametrize(
    ("parameter", "schema", "received"),
    [
        ("x=3", {"default": 3}, 3),
        ("x: int = 3", {"type": "integer", "default": 3}, 3),
        ("x: int | None = None", {"anyOf": [{"type": "integer"}, {"type": "null"}], "default": None}, None),
        ("x: Colour = Colour.RED", {"$ref": "#/$defs/Colour", "default": "red"}, Colour.RED),
        ("x: Any = NOTHING_REFUSED", {}, NOTHING_REFUSED),
        ("x: Any = {'title': 'kept'}", {"default": {"title": "kept"}}, {"title": "kept"}),
        ("x: int = Field(default=3, gt=0)", {"type": "integer", "default": 3, "exclusiveMinimum": 0}, 3),
        ("x: list = Field(default_factory=list)", {"type": "array", "items": {}}, []),
        ("x: Annotated[int, Field(default=3)]", {"type": "integer", "default": 3}, 3),
        ("x: int = 3, /", {"type": "integer", "default": 3}, 3),
        ("*, x: int = 3", {"type": "integer", "default": 3}, 3),
    ],
)
async def test_default(parameter: str, schema: dict[str, Any], received: object, context: ToolContext) -> None:
    """A parameter with a default need not be sent, whichever way the default is written."""
    declared = declare(parameter)
    assert declared.parameters["properties"]["x"] == schema
    assert "required" not in declared.parameters
    assert await declared.invoke({}, context) == received


async def test_field_as_default_may_be_required(context: ToolContext) -> None:
    """A pydantic Field without a default of its own leaves its parameter required."""
    declared = declare('x: int = Field(description="How many.")')
    assert declared.parameters["required"] == ["x"]
    with pytest.raises(ToolArgumentError, match="x: missing"):
        await declared.invoke({}, context)


async def test_unannotated_parameter_takes_anything(context: ToolContext) -> None:
    """A parameter without an annotation has an empty schema and takes any value."""
    declared = declare("x")
    assert declared.parameters["properties"] == {"x": {}}
    assert await declared.invoke({"x": {"a": [None]}}, context) == {"a": [None]}


async def test_positional_only_parameters(context: ToolContext) -> None:
    """Parameters that can only be given by position are filled in by name, gaps by their defaults."""

    @tool
    async def place(first: int, second: int = 2, third: int = 3, /, fourth: int = 4, *, fifth: int = 5) -> list[int]:
        return [first, second, third, fourth, fifth]

    assert place.parameters["required"] == ["first"]
    assert await place.invoke({"first": 1, "third": 30}, context) == [1, 2, 30, 4, 5]


async def test_parameter_names_that_pydantic_reserves(context: ToolContext) -> None:
    """A parameter may have a name that a pydantic model could not use for a field."""

    @tool
    async def odd(_under: int, model_config: int, json: int, title: int, self: int, context: int) -> list[int]:
        return [_under, model_config, json, title, self, context]

    names = ["_under", "model_config", "json", "title", "self", "context"]
    assert list(odd.parameters["properties"]) == odd.parameters["required"] == names
    assert await odd.invoke(dict.fromkeys(names, 1), context) == [1] * 6


def test_two_types_of_one_name() -> None:
    """Two types that share a name each keep their own schema."""
    other = dataclasses.make_dataclass("Point", [("z", int)])

    def measure(one: Point, two: Any) -> None: ...

    measure.__annotations__["two"] = other
    schema = tool(measure).parameters
    one, two = (schema["properties"][name]["$ref"].rpartition("/")[2] for name in ("one", "two"))
    assert schema["$defs"][one] == POINT
    assert list(schema["$defs"][two]["properties"]) == ["z"]


def test_no_parameters() -> None:
    """A function that takes nothing has the schema of an empty object."""

    @tool
    def now() -> None: ...

    assert now.parameters == {"type": "object", "properties": {}, "additionalProperties": False}


def test_parameters_are_a_copy() -> None:
    """Changing the schema that a tool gave changes the tool in nothing."""
    declared = declare("x: int")
    declared.parameters["properties"]["x"]["type"] = "string"
    assert declared.parameters["properties"]["x"] == {"type": "integer"}


@pytest.mark.parametrize(
    ("parameter", "named"),
    [
        ("x: Unknowable", "x"),
        ("x: list[Unknowable]", "x"),
        ("x: Callable[[], int]", "x"),
        ("x: type", "x"),
        ("x: 5", "x"),
        ("x: 'Nowhere'", "x"),
        ("x: 'list['", "x"),
        ("x: 'list[Nowhere]'", "x"),
        ("x: StandardAddress", "x"),
        ('x: Annotated[str, Field(pattern="[")]', "x"),
        ("x: list[ToolContext]", "x"),
        ("x: ToolContext | int", "x"),
        ("x, *args", r"\*args"),
        ("x, **kwargs", r"\*\*kwargs"),
    ],
)
@headers
def test_refused_annotation(parameter: str, named: str, header: str) -> None:
    """What can't be described to a model is refused when the tool is made, and tool and parameter are named."""
    if parameter == "x: StandardAddress" and sys.version_info >= (3, 12):
        pytest.skip("pydantic takes the standard TypedDict from Python 3.12 on")
    with pytest.raises(
        ToolError, match=f"^tool take: the parameter {named} can't be described to a model: ."
    ) as caught:
        declare(parameter, header)
    assert caught.value.tool == "take"


def test_missing_and_unknown_arguments_are_told_together() -> None:
    """One refusal names all that is wrong, by place, so that a model can mend its call at once."""

    @tool
    async def order(item: str, points: list[Point], count: int = 1) -> None: ...

    async def call() -> None:
        nothing: Any = None
        await order.invoke({"points": [{"x": 1}, {"x": "a"}], "count": "b", "colour": "red"}, nothing)

    with pytest.raises(ToolArgumentError) as caught:
        anyio.run(call)
    assert caught.value.tool == "order"
    assert caught.value.problems == {
        "colour": "unknown; the tool takes item, points, count",
        "item": "missing",
        "points[1].x": "Input should be a valid integer, unable to parse string as an integer",
        "count": "Input should be a valid integer, unable to parse string as an integer",
    }
    assert str(caught.value).startswith("tool order can't be called with these arguments: colour: unknown; ")


async def test_refusal_stays_short(context: ToolContext) -> None:
    """Of many faults the message shows the first few and counts the others."""
    with pytest.raises(ToolArgumentError, match=r"x\[5\]: [^;]*; and 94 more$") as caught:
        await declare("x: list[int]").invoke({"x": ["a"] * 100}, context)
    assert len(caught.value.problems) == 100


async def test_too_many_faults_are_counted(context: ToolContext) -> None:
    """Of a value with more than a thousand faults none is named: the event loop would wait for the list."""
    with pytest.raises(ToolArgumentError) as caught:
        await declare("x: list[int], y: int").invoke({"x": ["a"] * 1001, "y": "b"}, context)
    assert list(caught.value.problems) == ["x", "y"]
    assert caught.value.problems["x"] == "1001 problems, too many to name"


@pytest.mark.parametrize(
    ("parameters", "args"),
    [
        ("x: int", {"y" * 10_000: 1}),
        ("x: int = 1", {f"{number}": 1 for number in range(10_000)}),
        ("x: dict[str, int]", {"x": {"k" * 10_000: "a", "l" * 10_000: "b"}}),
        ("x: Literal[" + ", ".join(f"'{'v' * 60}{number}'" for number in range(100)) + "]", {"x": "a" * 100_000}),
        (", ".join(f"parameter_{number}: int = 1" for number in range(200)), {"x": 1}),
        ("x: list[list[int]]", {"x": [[["a"] * 1000] * 100] * 10}),
    ],
    ids=["long name", "many names", "long keys", "many choices", "many parameters", "many places"],
)
async def test_refusal_of_hostile_arguments_stays_short(
    context: ToolContext, parameters: str, args: dict[str, Any]
) -> None:
    """Whatever a model has sent, and however much, the message for it is of a few hundred characters."""
    with pytest.raises(ToolArgumentError) as caught:
        await declare(parameters).invoke(args, context)
    assert len(str(caught.value)) < 700
    assert re.search(r"arguments: (?!and ).*: ", str(caught.value))


async def test_unknown_argument_of_a_tool_with_many(context: ToolContext) -> None:
    """Of many parameters the first are named to a model that has made one up, and the others counted."""
    parameters = ", ".join(f"parameter_{number}: int = 1" for number in range(200))
    with pytest.raises(ToolArgumentError, match=r"y: unknown; the tool takes parameter_0, .* and 193 more$"):
        await declare(parameters).invoke({"y": 1}, context)


async def test_tool_without_parameters_refuses_arguments(context: ToolContext) -> None:
    """A tool that takes nothing says so when it is sent something."""

    @tool
    async def now() -> None: ...

    with pytest.raises(ToolArgumentError, match="when: unknown; the tool takes no arguments"):
        await now.invoke({"when": 1}, context)


async def test_arguments_must_be_an_object(context: ToolContext) -> None:
    """Arguments that are no object are refused as a model's mistake."""
    sent: Any = ["a"]
    with pytest.raises(ToolArgumentError, match="arguments: must be an object, not list"):
        await declare("x").invoke(sent, context)


def test_refusal_survives_pickling() -> None:
    """A ToolArgumentError keeps its facts through pickle."""
    error = pickle.loads(pickle.dumps(ToolArgumentError(tool="take", problems={"x": "missing"})))
    assert (str(error), error.tool, error.problems) == (
        "tool take can't be called with these arguments: x: missing",
        "take",
        {"x": "missing"},
    )


async def test_arguments_are_the_functions_own(context: ToolContext) -> None:
    """A function may change what it receives; the stored call keeps what the model sent."""

    @tool
    async def grow(items: Any, table: dict[str, Any]) -> None:
        items.append(1)
        table["inner"]["a"] = 1

    call = Message(
        Role.MODEL, tool_calls=[ToolCall(id="1", name="grow", args={"items": [], "table": {"inner": {}}})]
    ).tool_calls[0]
    await grow.invoke(call.args, context)
    assert call.args == {"items": [], "table": {"inner": {}}}


@pytest.mark.parametrize(
    "annotation",
    ["ToolContext", "ToolContext | None", "Optional[ToolContext]", "'ToolContext'", "Annotated[ToolContext, 1]"],
)
@pytest.mark.parametrize("default", ["", " = None"])
@headers
async def test_context_is_filled_in_and_hidden(
    annotation: str, default: str, header: str, context: ToolContext
) -> None:
    """A parameter annotated ToolContext is filled in, and a model is not shown it."""
    declared = declare(f"*, x: {annotation}{default}, y: int = 1", header)
    assert list(declared.parameters["properties"]) == ["y"]
    assert await declared.invoke({}, context) is context


async def test_model_can_not_send_the_context(context: ToolContext) -> None:
    """An argument that has the name of the context's parameter is refused as unknown."""
    with pytest.raises(ToolArgumentError, match="x: unknown"):
        await declare("x: ToolContext").invoke({"x": {"idempotency_key": "mine"}}, context)


async def test_sync_function_runs_off_the_loop(context: ToolContext) -> None:
    """A function that is not async runs in another thread than the loop's."""

    @tool
    def where() -> int:
        return threading.get_ident()

    assert await where.invoke({}, context) != threading.get_ident()


async def test_context_variables_travel(context: ToolContext) -> None:
    """A function in a worker thread sees its caller's context variables."""
    request: contextvars.ContextVar[str] = contextvars.ContextVar("request")

    @tool
    def read() -> str:
        return request.get()

    request.set("a")
    assert await read.invoke({}, context) == "a"


async def test_cancelled_call_leaves_its_thread(context: ToolContext) -> None:
    """A cancelled call of a function that is not async ends at once, while its thread still waits."""
    started = anyio.Event()
    release = threading.Event()

    @tool
    def wait() -> None:
        anyio.from_thread.run_sync(started.set)
        release.wait()

    try:
        async with anyio.create_task_group() as group:
            group.start_soon(wait.invoke, {}, context)
            await started.wait()
            group.cancel_scope.cancel()
    finally:
        release.set()


@pytest.mark.parametrize("kind", ["async", "sync"])
async def test_errors_of_the_function_propagate(kind: str, context: ToolContext) -> None:
    """What the function raises reaches the caller as the very same exception."""
    error = KeyError("order")

    def fail() -> None:
        raise error

    async def fail_async() -> None:
        raise error

    with pytest.raises(KeyError) as caught:
        await tool(fail if kind == "sync" else fail_async).invoke({}, context)
    assert caught.value is error


async def double(x: int) -> int:
    """Twice x."""
    return 2 * x


def double_in_thread(x: int) -> int:
    """Twice x."""
    return 2 * x


def logged(function: Callable[..., Any]) -> Callable[..., Any]:
    """A decorator as people write them: not async, with all arguments passed on."""

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return wrapper


class Doubler:
    """Twice x."""

    async def double(self, x: int) -> int:
        """Twice x."""
        return 2 * x

    @classmethod
    def double_class(cls, x: int) -> int:
        """Twice x."""
        return 2 * x

    @staticmethod
    def double_static(x: int) -> int:
        """Twice x."""
        return 2 * x

    def __call__(self, x: int) -> int:
        return 2 * x


class DocumentedCall:
    """Something else."""

    async def __call__(self, x: int) -> int:
        """Twice x."""
        return 2 * x


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (double, "double"),
        (double_in_thread, "double_in_thread"),
        (Doubler().double, "double"),
        (Doubler.double_class, "double_class"),
        (Doubler.double_static, "double_static"),
        (Doubler.__dict__["double_static"], "double_static"),
        (Doubler(), "Doubler"),
        (DocumentedCall(), "DocumentedCall"),
        (functools.partial(double), "double"),
        (functools.partial(functools.partial(Doubler().double)), "double"),
        (functools.partial(Doubler()), "Doubler"),
        (functools.lru_cache(double_in_thread), "double_in_thread"),
        (logged(double), "double"),
        (logged(double_in_thread), "double_in_thread"),
    ],
    ids=[
        "async",
        "sync",
        "method",
        "classmethod",
        "staticmethod",
        "staticmethod-in-class",
        "object",
        "documented-object",
        "partial",
        "partial-of-partial-of-method",
        "partial-of-object",
        "cached",
        "decorated-async",
        "decorated-sync",
    ],
)
async def test_kinds_of_functions(function: Callable[..., Any], name: str, context: ToolContext) -> None:
    """Functions, methods, callable objects, partials and decorated functions become tools alike, async or not."""
    made = tool(function)
    assert (made.name, made.description) == (name, "Twice x.")
    assert made.parameters["properties"] == {"x": {"type": "integer"}}
    assert await made.invoke({"x": "4"}, context) == 8


async def test_wrapped_async_function_is_awaited(context: ToolContext) -> None:
    """A lambda that returns an awaitable is awaited."""
    assert await tool(lambda x: double(x + 1), name="twice").invoke({"x": 3}, context) == 8


async def test_what_partial_bound_stays_bound(context: ToolContext) -> None:
    """What functools.partial bound is neither shown to a model nor taken from it."""

    async def fetch(host: str, path: str, key: str, retries: int = 1) -> list[Any]:
        return [host, path, key, retries]

    made = tool(functools.partial(fetch, "host", key="secret"))
    assert list(made.parameters["properties"]) == ["path", "retries"]
    assert "secret" not in str(made.parameters)
    assert await made.invoke({"path": "/"}, context) == ["host", "/", "secret", 1]
    with pytest.raises(ToolArgumentError, match="key: unknown"):
        await made.invoke({"path": "/", "key": "mine"}, context)


class Warehouse:
    def __init__(self, stock: int) -> None:
        self.stock = stock

    @tool(name="look_up", idempotent=True, requires_approval=True)
    async def look(self, item: str) -> str:
        """How much there is.

        Args:
            item: What to look for.
        """
        return f"{self.stock} {item}"

    shared = tool(double)


async def test_decorated_method_is_the_tool_of_each_instance(context: ToolContext) -> None:
    """A decorated method, read from an instance, is a tool bound to it with the same name and description."""
    bound = Warehouse(3).look
    assert (bound.name, bound.description) == ("look_up", "How much there is.")
    assert (bound.idempotent, bound.requires_approval) == (True, True)
    assert bound.parameters["properties"] == {"item": {"type": "string", "description": "What to look for."}}
    assert await bound.invoke({"item": "nails"}, context) == "3 nails"


def test_decorated_method_read_from_its_class_is_unbound() -> None:
    """A decorated method, read from its class, has no instance to be called on, and says so."""
    assert Warehouse.look.is_unbound
    assert not Warehouse(1).look.is_unbound


async def test_tool_kept_in_a_class_is_not_bound(context: ToolContext) -> None:
    """A tool made elsewhere and kept as a class attribute stays itself on instances."""
    assert Warehouse(3).shared is Warehouse.shared
    assert await Warehouse(3).shared.invoke({"x": 1}, context) == 2


async def test_decorated_function_can_be_called_by_hand() -> None:
    """Calling a tool calls its function as written."""
    assert await tool(double)(4) == 8
    assert tool(double_in_thread)(x=4) == 8


def test_decorator_with_arguments() -> None:
    """Name, description, idempotent and requires_approval can be given to the decorator."""

    @tool(name="twice-2", description="Doubles.", idempotent=True, requires_approval=True)
    def function(x: int) -> int:
        """Something else."""
        return 2 * x

    assert isinstance(function, Tool)
    assert (function.name, function.description) == ("twice-2", "Doubles.")
    assert (function.idempotent, function.requires_approval) == (True, True)


def test_plain_decorator() -> None:
    """Without a word of it, running a tool twice is not harmless, and no person is asked."""
    assert (tool(double).idempotent, tool(double).requires_approval) == (False, False)


async def test_check_runs_nothing(context: ToolContext) -> None:
    """Arguments can be checked without running the function, also where it takes the context."""
    ran: list[int] = []

    @tool
    def note(number: int, context: ToolContext) -> None:
        ran.append(number)

    note.check({"number": "5"})
    with pytest.raises(ToolArgumentError, match="number: missing"):
        note.check({})
    with pytest.raises(ToolArgumentError, match="must be an object"):
        note.check([])  # type: ignore[arg-type]  # as models do
    assert ran == []
    await note.invoke({"number": 5}, context)
    assert ran == [5]


@pytest.mark.parametrize(
    "attribute", ["name", "description", "parameters", "idempotent", "requires_approval", "is_unbound"]
)
def test_tool_is_read_only(attribute: str) -> None:
    """A tool's attributes can't be set."""
    with pytest.raises(AttributeError):
        setattr(tool(double), attribute, "other")


def test_repr() -> None:
    """A tool's repr is short and has its name."""
    assert repr(tool(double)) == "<Tool double>"


def test_context_is_frozen(context: ToolContext) -> None:
    """A tool can't replace the parts of its context."""
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        context.idempotency_key = "other"  # type: ignore[misc]


@pytest.mark.parametrize("name", ["", "has space", "búsqueda", "a.b", "x" * 65, "line\n", "404", "-"])
def test_refused_name(name: str) -> None:
    """A name that providers would refuse is refused when the tool is made."""
    with pytest.raises(ToolError, match="is no tool name that providers accept"):
        tool(name=name)(double)


@pytest.mark.parametrize("name", ["x" * 64, "look-up_2", "_"])
def test_accepted_name(name: str) -> None:
    """A name of 1 to 64 letters, digits, underscores and hyphens that begins with a letter or underscore is kept."""
    assert tool(name=name)(double).name == name


def test_lambda_needs_a_name() -> None:
    """A function without a usable name needs one given."""
    with pytest.raises(ToolError, match=r"'<lambda>' is no tool name.*name="):
        tool(lambda: None)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (5, "not int"),
        ("double", "not str"),
        (Order, "not the class Order"),
        (functools.partial(Order, order_id="1"), "not the class Order"),
        (tool(double), "<Tool double> is a tool already"),
        (functools.partial(tool(double), x=1), "<Tool double> is a tool already"),
    ],
)
def test_refused_function(function: Any, message: str) -> None:
    """What is no function, method or callable object is refused."""
    with pytest.raises(TypeError, match=message):
        tool(function)


@pytest.mark.parametrize("option", [{"name": 5}, {"description": b"a"}, {"idempotent": 1}, {"requires_approval": 1}])
def test_refused_option(option: dict[str, Any]) -> None:
    """An option of a wrong type is refused."""
    with pytest.raises(TypeError, match=f"^{next(iter(option))} must be a"):
        Tool(double, **option)


def test_generators_are_refused() -> None:
    """A function that yields has no one result, so it is no tool."""

    def count() -> Iterator[int]:
        yield 1

    async def count_async() -> AsyncIterator[int]:
        yield 1

    for function in (count, count_async):
        with pytest.raises(ToolError, match="yields; a tool returns its result"):
            tool(function)


def test_function_without_a_signature_is_refused() -> None:
    """A built-in function that does not tell its parameters is refused."""
    with pytest.raises(ToolError, match="tool min: its parameters can't be read"):
        tool(min)


def test_description_is_the_docstring() -> None:
    """The docstring, unindented, is the description; a function without one has an empty description."""

    def documented() -> None:
        """Do it.

        Twice:
            if needed
        """

    def silent() -> None: ...

    assert tool(documented).description == "Do it.\n\nTwice:\n    if needed"
    assert tool(silent).description == ""


def test_args_section_describes_parameters() -> None:
    """Each text of the Args section becomes its parameter's description, and the section leaves the description."""

    def buy(item: str, count: int, size: Size, note: Annotated[str, Field(description="Kept.")], other: int) -> None:
        """Buy something.

        Args:
            item (str, optional): What: the name
                in the catalogue.

                Never a number.
            count (dict[str, tuple(int)]):
                How many.
            size: How large.
            note: Replaced.
            other:
            unknown: Not a parameter.

        Returns:
            Nothing.
        """

    made = tool(buy)
    assert made.description == "Buy something.\n\nReturns:\n    Nothing."
    assert {name: schema.get("description") for name, schema in made.parameters["properties"].items()} == {
        "item": "What: the name in the catalogue. Never a number.",
        "count": "How many.",
        "size": "How large.",
        "note": "Kept.",
        "other": None,
    }


def test_args_section_without_entries() -> None:
    """A section whose lines name no parameter, or that starts without any, describes none."""

    def odd(x: int) -> None:
        """Do it.

        Args:
            see the manual
        Args:
        Then go on.
        """

    assert tool(odd).description == "Do it.\n\nThen go on."
    assert tool(odd).parameters["properties"] == {"x": {"type": "integer"}}


def test_line_of_an_entry_may_stand_at_the_entries_indent() -> None:
    """A line of the Args section that names no parameter goes on with the one before."""

    def odd(x: int) -> None:
        """Do it.

        Args:
            x: As many
            as you like.
        """

    assert tool(odd).parameters["properties"]["x"]["description"] == "As many as you like."


async def test_decimal(context: ToolContext) -> None:
    """A Decimal is taken from a text without loss."""
    assert await declare("x: decimal.Decimal").invoke({"x": "1.10"}, context) == decimal.Decimal("1.10")


async def test_validator_of_the_user(context: ToolContext) -> None:
    """What a user's validator says is told to the model."""

    def even(value: int) -> int:
        if value % 2:
            raise ValueError("must be even")
        return value

    async def take(x: Annotated[int, pydantic.AfterValidator(even)]) -> int:
        return x

    with pytest.raises(ToolArgumentError, match="x: Value error, must be even"):
        await tool(take).invoke({"x": 1}, context)


def test_pydantic_is_loaded_with_the_first_tool() -> None:
    """An agent without tools loads no pydantic; the first tool does."""
    program = """
import sys
from chatflow.core.agent import Agent
from chatflow.core.tools import tool
Agent("Support")
assert "pydantic" not in sys.modules
tool(lambda: None, name="nothing")
assert "pydantic" in sys.modules
"""
    subprocess.run([sys.executable, "-c", program], check=True, cwd=Path(chatflow.__file__).parent.parent)
