"""What an agent's answers are to be: the schema that a model is told, and how an answer is read."""

from __future__ import annotations

import dataclasses
import datetime as dt
import enum
import json
import typing
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Annotated, Any, Final, Generic, Literal, NewType, TypeVar

import attrs
import jsonschema
import pydantic
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typing_extensions import TypedDict  # pydantic knows no other before Python 3.12

from chatflow.core.agent import Agent
from chatflow.core.output import Output, OutputError
from chatflow.core.values import thaw

T = TypeVar("T")
U = TypeVar("U")


class Size(enum.Enum):
    SMALL = "small"
    LARGE = "large"


def stripped(value: str) -> str:
    """What a converter makes of a name."""
    return value.strip()


@attrs.define
class Item:
    """Something to be sent.

    It has a price.
    """

    name: str = attrs.field(converter=stripped)
    count: int = attrs.field(default=1, validator=attrs.validators.ge(1))
    size: Size = Size.SMALL
    _note: Annotated[str | None, pydantic.Field(description="For the driver.")] = None
    schema: bool = False


@attrs.frozen(kw_only=True)
class Parcel(Item):
    """A parcel, which may hold others."""

    items: list[Item] = attrs.field(factory=list)
    inside: tuple[Parcel, ...] = ()
    due: dt.datetime
    around: Parcel | None = None
    by_size: dict[str, Item] = attrs.field(factory=dict)
    weight: float = attrs.field(init=False, default=1.5)


@attrs.define
class Box(Generic[T]):
    it: T
    others: Sequence[T] = ()


@attrs.define
class Cat:
    kind: Literal["cat"]
    lives: int


@attrs.define
class Dog:
    kind: Literal["dog"]
    name: str


@dataclasses.dataclass
class Order:
    id: int
    due: dt.date
    lines: list[Order] = dataclasses.field(default_factory=list)


class Invoice(pydantic.BaseModel):
    number: int = pydantic.Field(alias="invoiceNumber", gt=0)
    orders: list[Order]
    size: Size = Size.LARGE


class Card(TypedDict, total=False):
    number: str


names: Final = st.text(max_size=5).map(stripped)
items: Final = st.builds(
    Item, name=names, count=st.integers(1, 9), size=st.sampled_from(Size), note=st.none() | names, schema=st.booleans()
)
parcels: Final[st.SearchStrategy[Parcel]] = st.deferred(
    lambda: st.builds(
        Parcel,
        name=names,
        items=st.lists(items, max_size=1),
        inside=st.lists(parcels, max_size=1).map(tuple),
        due=st.datetimes(timezones=st.just(dt.UTC)),
        around=st.none() | parcels,
        by_size=st.dictionaries(names, items, max_size=1),
    )
)
orders: Final[st.SearchStrategy[Order]] = st.deferred(
    lambda: st.builds(Order, st.integers(-9, 9), st.dates(), st.just(list[Order]()) | st.lists(orders, max_size=2))
)
invoices: Final = st.builds(
    lambda number, orders, size: Invoice(invoiceNumber=number, orders=orders, size=size),
    st.integers(1, 9),
    st.lists(orders, max_size=2),
    st.sampled_from(Size),
)


def attrs_json(value: Any) -> str:
    """An attrs instance, or a list of them, as JSON, written by others than those who read it."""

    def plain(item: Any) -> Any:
        if attrs.has(type(item)):
            fields = [field for field in attrs.fields(type(item)) if field.init]
            return {field.alias: plain(getattr(item, field.name)) for field in fields}
        if isinstance(item, list | tuple):
            return [plain(each) for each in item]
        if isinstance(item, dict):
            return {key: plain(each) for key, each in item.items()}
        if isinstance(item, enum.Enum):
            return item.value
        return item.isoformat() if isinstance(item, dt.datetime) else item

    return json.dumps(plain(value))


def pydantic_json(value: Any) -> str:
    """A dataclass or model as JSON."""
    return pydantic.TypeAdapter(type(value)).dump_json(value, by_alias=True).decode()


KINDS: Final[list[tuple[Any, st.SearchStrategy[Any], Callable[[Any], str]]]] = [
    (Item, items, attrs_json),
    (Parcel, parcels, attrs_json),
    (list[Parcel], st.lists(parcels, max_size=2), attrs_json),
    (Box[Item], st.builds(Box, items, st.lists(items, max_size=2)), attrs_json),
    (Parcel | None, st.none() | parcels, attrs_json),
    (Order, orders, pydantic_json),
    (Invoice, invoices, pydantic_json),
]
OUTPUTS: Final = [Output(kind) for kind, _, _ in KINDS]
JUDGES: Final = [jsonschema.Draft202012Validator(thaw(output.schema)) for output in OUTPUTS]


@given(st.data())
@settings(max_examples=40)  # for each of these classes
@pytest.mark.parametrize("place", range(len(KINDS)), ids=[str(kind) for kind, _, _ in KINDS])
def test_comes_back(place: int, data: st.DataObject) -> None:
    """A value of any of these classes, told as JSON, is read as an equal one."""
    _, strategy, to_json = KINDS[place]
    value = data.draw(strategy)
    assert OUTPUTS[place].read(to_json(value)) == value


@given(st.data())
@settings(max_examples=40)  # for each of these classes
@pytest.mark.parametrize("place", range(len(KINDS)), ids=[str(kind) for kind, _, _ in KINDS])
def test_schema_tells_what_is_read(place: int, data: st.DataObject) -> None:
    """What can be read is valid by the schema that the model is told."""
    _, strategy, to_json = KINDS[place]
    told = json.loads(to_json(data.draw(strategy)))
    in_field = "answer" in OUTPUTS[place].schema["properties"]
    JUDGES[place].validate({"answer": told} if in_field else told)


@pytest.mark.parametrize("kind", [int, list[Item], Item | Order, Literal["a", "b"], dict[str, int], Card, Any, Item])
def test_schema_is_of_an_object(kind: Any) -> None:
    """Whatever the type is, the schema is that of an object, without references in its place and without titles."""
    schema = thaw(Output(kind).schema)
    assert schema["type"] == "object"
    assert "title" not in json.dumps(schema)


def test_schema_of_an_attrs_class() -> None:
    """Of an attrs class a model is told its docstring, and its fields as its constructor names them."""

    @attrs.define
    class Ticket:
        """A ticket."""

        subject: str
        _note: Annotated[str | None, pydantic.Field(description="For us.")] = None
        size: Size = Size.SMALL
        tags: list[str] = attrs.field(factory=list)
        number: int = attrs.field(init=False, default=7)

    assert thaw(Output(Ticket).schema) == {
        "type": "object",
        "description": "A ticket.",
        "properties": {
            "subject": {"type": "string"},
            "note": {"anyOf": [{"type": "string"}, {"type": "null"}], "default": None, "description": "For us."},
            "size": {"$ref": "#/$defs/Size"},
            "tags": {"type": "array", "items": {"type": "string"}},
        },
        "required": ["subject"],
        "additionalProperties": False,
        "$defs": {"Size": {"type": "string", "enum": ["small", "large"]}},
    }


def read(kind: Any, text: str) -> Any:
    """What *text* says as a *kind*."""
    return Output(kind).read(text)


def problems(kind: Any, text: str) -> dict[str, str]:
    """What is wrong with *text* as a *kind*."""
    with pytest.raises(OutputError) as caught:
        read(kind, text)
    return dict(caught.value.problems)


@pytest.mark.parametrize("value", [Item("a"), Size.SMALL, 5, "Item", [Item], {"name": str}], ids=repr)
def test_instance_in_place_of_a_type(value: Any) -> None:
    """What is an instance and no type is refused, and the error says so."""
    with pytest.raises(TypeError, match=f"it is an instance of {type(value).__name__}, and an output type is a type$"):
        Agent("Support", output_type=value)


def test_text_is_no_output_type() -> None:
    """Text is what an agent answers without an output type, and is refused as one."""
    with pytest.raises(TypeError, match=r"text is what an agent answers without one; leave it out$"):
        Agent("Support", output_type=str)


@pytest.mark.parametrize("kind", [str | None, NewType("OrderId", str), Annotated[str, pydantic.Field(max_length=3)]])
def test_annotations_that_are_no_classes(kind: Any) -> None:
    """An annotation that is no class is an output type too, also one of text."""
    assert read(kind, '"ab"') == "ab"


# --- attrs classes ---


def test_attrs_class_makes_itself() -> None:
    """Defaults and converters are the class's own, and only what the model has said is handed to it."""
    assert read(Item, '{"name": " a "}') == Item("a")


def test_values_are_converted_by_the_annotation() -> None:
    """A text is taken for a number, as in a tool's arguments."""
    assert read(Item, '{"name": "a", "count": "3", "note": "b"}') == Item("a", 3, note="b")


@pytest.mark.parametrize(
    ("text", "path", "problem"),
    [
        ('{"name": "a", "count": 0}', "answer", "Value error, 'count' must be >= 1: 0"),
        ('{"name": "a", "colour": "red"}', "answer.colour", "Extra inputs are not permitted"),
        ('{"count": 3}', "answer.name", "Field required"),
        ('{"name": "a", "note": 5}', "answer.note", "Input should be a valid string"),
    ],
)
def test_attrs_class_refuses(text: str, path: str, problem: str) -> None:
    """What the class, or its annotations, refuse is a problem with its place."""
    assert problems(Item, text) == {path: problem}


def test_places_in_nested_classes() -> None:
    """A place inside is told by names and numbers from the answer on."""
    text = '{"name": "a", "due": "2026-01-01T00:00:00Z", "items": [{"name": "b"}, {"name": "c", "count": "x"}]}'
    assert list(problems(Parcel, text)) == ["answer.items[1].count"]
    assert list(problems(list[Parcel], f"[{text}]")) == ["answer[0].items[1].count"]
    assert list(problems(list[Parcel], f'{{"answer": [{text}]}}')) == ["answer[0].items[1].count"]


def test_type_error_of_a_validator() -> None:
    """Validators of attrs raise TypeError with facts beside the text, of which the text is told."""

    @attrs.define
    class Loose:
        it: Any = attrs.field(validator=attrs.validators.instance_of(int))

    (problem,) = problems(Loose, '{"it": "x"}').values()
    assert problem == "Value error, 'it' must be <class 'int'> (got 'x' that is a <class 'str'>)."


def test_other_errors_of_a_class() -> None:
    """What else a class raises is its own fault and not the model's, and is raised as it is; so without a text."""

    @attrs.define
    class Failing:
        it: str

        def __attrs_post_init__(self) -> None:
            raise LookupError if self.it == "look" else TypeError

    with pytest.raises(LookupError):
        read(Failing, '{"it": "look"}')
    assert problems(Failing, '{"it": "other"}') == {"answer": "Value error, TypeError()"}


def test_field_without_an_annotation() -> None:
    """A field without an annotation takes anything, and one that attrs knows the type of takes that."""
    old = attrs.make_class("Old", {"anything": attrs.field(), "number": attrs.field(type=int)})
    made = read(old, '{"anything": [1], "number": "2"}')
    assert (made.anything, made.number) == ([1], 2)


def test_classes_of_a_function() -> None:
    """Classes that refer to one another inside a function are found."""

    @attrs.define
    class Outer:
        inner: Inner

    @attrs.define
    class Inner:
        number: int

    assert read(Outer, '{"inner": {"number": 1}}') == Outer(Inner(1))


def test_discriminated_union_of_attrs_classes() -> None:
    """A union that is told apart by a field says so to the model, and is read by it."""
    kind = Annotated[Cat | Dog, pydantic.Field(discriminator="kind")]
    assert "discriminator" in json.dumps(thaw(Output(kind).schema))
    assert read(kind, '{"answer": {"kind": "dog", "name": "Rex"}}') == Dog("dog", "Rex")


def test_generic_attrs_class() -> None:
    """A generic class is read as what it is filled in with; left open, it takes anything."""
    assert read(Box[Box[int]], '{"it": {"it": "1"}, "others": [{"it": 2}]}') == Box(Box(1), [Box(2)])
    assert read(Box, '{"it": "1"}') == Box("1")


@attrs.define
class Line(Box[int]):
    number: int = 0


@attrs.define
class Last(Line):
    pass


class Undecorated(Box[int]):
    pass


@attrs.define
class Pair(Generic[T, U]):
    left: T
    right: U
    both: dict[str, T | U] = attrs.field(factory=dict)


@attrs.define
class Half(Pair[int, T]):
    rest: list[T] = attrs.field(factory=list)


@attrs.define
class Swapped(Pair[U, T], Generic[T, U]):
    mine: T | None = None


class Model(pydantic.BaseModel, Generic[T]):
    it: T


@attrs.define
class Mixed(Generic[T]):
    model: Model[T]
    box: Box[T]
    text: T | str = ""


@attrs.define
class Open(Box):  # type: ignore[type-arg]  # as people write it
    pass


@attrs.define
class Overriding(Box[int]):
    others: str  # type: ignore[assignment]  # as people write it


@pytest.mark.parametrize(
    ("kind", "text", "expected"),
    [
        (Line, '{"it": "1", "others": ["2"]}', Line(1, [2])),
        (Last, '{"it": "1", "others": ["2"]}', Last(1, [2])),
        (Undecorated, '{"it": "1", "others": ["2"]}', Undecorated(1, [2])),
        (Half[bool], '{"left": "1", "right": "no", "rest": ["yes"]}', Half(1, False, rest=[True])),
        (Half, '{"left": "1", "right": "no"}', Half(1, "no")),
        (Pair[int, T][bool], '{"left": "1", "right": "no"}', Pair(1, False)),  # type: ignore[valid-type]
        (Swapped[int, bool], '{"left": "no", "right": "5", "mine": "6"}', Swapped(False, 5, mine=6)),
        (Mixed[int], '{"model": {"it": "1"}, "box": {"it": "2"}}', Mixed(Model[int](it=1), Box(2))),
        (Open, '{"it": "1"}', Open("1")),
        (Overriding, '{"it": "1", "others": "2"}', Overriding(1, "2")),
    ],
)
def test_filled_in_above(kind: Any, text: str, expected: Any) -> None:
    """What a generic class is filled in with where it is inherited from, or used, is what its fields are read as."""
    assert read(kind, text) == expected


def test_one_generic_class_filled_in_twice() -> None:
    """Classes inside a generic one are filled in anew for each type that it is filled in with."""
    text = '[{"model": {"it": 1}, "box": {"it": 1}}, {"model": {"it": "a"}, "box": {"it": "a"}}]'
    numbers, words = read(tuple[Mixed[int], Mixed[str]], text)
    assert (numbers.box, words.box) == (Box(1), Box("a"))


def test_inherited_from_filled_in_refuses() -> None:
    """What the filled in type does not take is refused, and the model told the type."""
    assert list(problems(Last, '{"it": "a"}')) == ["answer.it"]
    assert Output(Last).schema["properties"]["it"] == {"type": "integer"}


# --- how much of it ---


def test_too_many_problems_are_counted() -> None:
    """Of an answer with more than a thousand problems none is named: the event loop would wait for the list."""
    assert len(problems(list[int], json.dumps(["a"] * 1000))) == 1000
    for answer in (["a"] * 1001, {"answer": ["a"] * 1001}):
        assert problems(list[int], json.dumps(answer)) == {"answer": "1001 problems, too many to name"}


def test_too_long() -> None:
    """An answer of more than a million characters is refused for its length, whatever it says."""
    text = json.dumps(["a" * 999_996])
    assert read(list[str], text) == ["a" * 999_996]
    assert problems(list[str], f"{text} ") == {"answer": "it has 1000001 characters, and may have 1000000"}


# --- where the JSON is ---


@pytest.mark.parametrize(
    "text",
    [
        '{"id": 1, "due": "2026-01-02"}',
        '\n{"id": 1, "due": "2026-01-02"}  \n',
        '```json\n{"id": 1, "due": "2026-01-02"}\n```',
        'Here is the order:\n\n```\n{"id": "1", "due": "2026-01-02"}\n```\nAnything else?',
        'It is {"id": 1, "due": "2026-01-02"}.',
    ],
)
def test_json_among_words(text: str) -> None:
    """The answer is the JSON that the text is, or the one object or array in it, fenced or not."""
    assert read(Order, text) == Order(1, dt.date(2026, 1, 2))


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "it is no JSON: Expecting value"),
        ("I don't know.", "it is no JSON: Expecting value"),
        ('{"id": 1, "due": "2026-01-02"', "it is no JSON: Expecting ',' delimiter"),
        ('{"id": 1, "due": "2026-01-02", "lines": [{"id": 2, "due": "2026-01-02"}', "it is no JSON: Expecting ','"),
        ('{"id": 1} {"id": 2}', "there are brackets outside of the JSON"),
        ('{"id": 1}]', "there are brackets outside of the JSON"),
        ("[" * 100_000, "it is nested too deeply"),
        ('{"id": "\ud800"}', "it holds half a surrogate pair, which is no text"),
        ('{"id": ' + "1" * 5000 + "}", "it is no JSON: Exceeds the limit"),
    ],
)
def test_no_json(text: str, problem: str) -> None:
    """A text without JSON, or where nobody can tell which JSON is meant, or a part of one, is no answer."""
    (found,) = problems(Order, text).values()
    assert found.startswith(problem)


@given(st.text(st.sampled_from('{}[]",:0a \\udn-.\ud800'), max_size=20))
def test_any_text(text: str) -> None:
    """Any text is read or refused."""
    for output in OUTPUTS:
        with suppress(OutputError):
            output.read(text)


@pytest.mark.parametrize("text", ["42", '{"answer": 42}', '{"answer": "42"}', '```\n{"answer": 42}\n```'])
def test_answer_that_is_no_object(text: str) -> None:
    """An answer that is no object stands in the field answer of one, or by itself."""
    assert read(int, text) == 42


def test_object_with_a_field_named_answer() -> None:
    """A class with a field of that name is read as it is."""

    @attrs.define
    class Quiz:
        answer: int

    assert read(Quiz, '{"answer": 42}') == Quiz(42)
    assert read(Quiz | None, '{"answer": {"answer": 42}}') == Quiz(42)


def test_strictness_is_the_types_own() -> None:
    """A type that is strict refuses what others take, and takes what JSON has no form for by its text."""

    class Strict(pydantic.BaseModel, strict=True):
        number: int
        due: dt.date

    assert read(Strict, '{"number": 1, "due": "2026-01-02"}').due == dt.date(2026, 1, 2)
    assert list(problems(Strict, '{"number": "1", "due": "2026-01-02"}')) == ["answer.number"]


def test_problems_are_the_errors_text() -> None:
    """The error says all that is wrong."""
    with pytest.raises(OutputError, match=r"answer.id: Field required; answer.due: Field required"):
        read(Order, "{}")


# --- what is no type ---


@dataclasses.dataclass
class Holds:
    """A dataclass around an attrs class, which pydantic looks into by itself."""

    item: Item


@pytest.mark.parametrize("kind", [typing.Callable[[], int], "Order", Order(1, dt.date.max), read, len, Holds])
def test_refused_types(kind: Any) -> None:
    """What has no schema is refused when the output is made."""
    with pytest.raises(Exception, match=r".") as caught:
        Output(kind)
    assert not isinstance(caught.value, AssertionError)
