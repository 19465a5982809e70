from __future__ import annotations

import dataclasses
import enum
from typing import TYPE_CHECKING, Annotated, Any, Literal

import pytest
from pydantic import BaseModel, Field

import chatflow.core.tools as tools_module
from chatflow.core.tools import Tool, tool
from chatflow.exceptions import ToolError

if TYPE_CHECKING:
    from decimal import Decimal

    from chatflow.core.tools import ToolContext


class Item(BaseModel):
    name: str
    tags: list[Tag] = Field(default_factory=list["Tag"])


class Tag(enum.Enum):
    NEW = "new"


@pytest.fixture
def context() -> ToolContext:
    """The context of a call that has no session or agent to look at."""
    nothing: Any = object()
    return tools_module.ToolContext(session=nothing, state={}, agent=nothing, idempotency_key="key-1")


async def test_annotations_of_a_module(context: ToolContext) -> None:
    """Annotations that are text mean what their module means by them."""

    @tool
    async def put(item: Item, where: Literal["shop", "store"], count: Annotated[int, Field(gt=0)] = 1) -> list[Any]:
        return [item, where, count]

    assert put.parameters["required"] == ["item", "where"]
    assert put.parameters["properties"]["count"] == {"type": "integer", "exclusiveMinimum": 0, "default": 1}
    received = await put.invoke({"item": {"name": "a", "tags": ["new"]}, "where": "shop", "count": "2"}, context)
    assert received == [Item(name="a", tags=[Tag.NEW]), "shop", 2]


async def test_context_imported_for_type_checking_only(context: ToolContext) -> None:
    """ToolContext is known although the module imports it for type checkers only."""

    @tool
    async def read(key: str, context: ToolContext | None = None) -> object:
        return context

    assert list(read.parameters["properties"]) == ["key"]
    assert await read.invoke({"key": "a"}, context) is context


def test_other_class_of_that_name() -> None:
    """A module's own class named ToolContext is that class."""
    module: dict[str, Any] = {}
    exec(
        "from __future__ import annotations\n"
        "import dataclasses\n"
        "@dataclasses.dataclass\n"
        "class ToolContext:\n"
        "    city: str\n"
        "def visit(context: ToolContext): ...\n",
        module | {"__name__": __name__},
        module,
    )
    visit = module["visit"]
    visit.__globals__.update(module)
    assert tool(visit).parameters["properties"] == {"context": {"$ref": "#/$defs/ToolContext"}}


def test_return_annotation_is_not_looked_at() -> None:
    """A return annotation that can't be resolved does no harm."""

    @tool
    def price(item: str) -> Decimal:
        raise NotImplementedError

    assert price.parameters["required"] == ["item"]


def test_name_that_can_not_be_resolved() -> None:
    """A name imported for type checkers only is refused, with tool, parameter and name."""

    def pay(amount: Decimal) -> None: ...

    with pytest.raises(ToolError, match=r"tool pay: the parameter amount .*name 'Decimal' is not defined"):
        tool(pay)


async def test_local_types_by_their_frame(context: ToolContext) -> None:
    """Types local to the functions around a tool are found while those run."""

    @dataclasses.dataclass
    class Outer:
        a: int

    def declare() -> Tool:
        @dataclasses.dataclass
        class Inner:
            b: int

        @tool
        async def join(outer: Outer, inner: Inner) -> object:
            return (type(inner) is Inner, outer)

        return join

    made = declare()
    assert await made.invoke({"outer": {"a": 1}, "inner": {"b": 2}}, context) == (True, Outer(1))


async def test_local_type_by_closure(context: ToolContext) -> None:
    """A local type that the function uses is found after the function around it has returned."""

    def declare() -> Any:
        @dataclasses.dataclass
        class Local:
            a: int

        async def same(value: Local) -> bool:
            return type(value) is Local

        return same

    assert await tool(declare()).invoke({"value": {"a": 1}}, context)


def test_local_type_out_of_reach() -> None:
    """A local type that is gone, or not there yet, is refused by name."""

    def declare() -> Any:
        class Local: ...

        def take(value: Local) -> None: ...

        return take

    def declare_early() -> Tool:
        @tool
        def take(value: Later) -> type:
            return Later

        class Later: ...

        return take

    with pytest.raises(ToolError, match=r"the parameter value .*'Local' is not defined"):
        tool(declare())
    with pytest.raises(ToolError, match=r"the parameter value .*'Later' is not defined"):
        declare_early()
