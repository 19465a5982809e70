"""Classes of every sort that a user may keep in a session's state, and what Hypothesis draws of them."""

from __future__ import annotations

import dataclasses
import datetime as dt
import decimal
import enum
import uuid
from collections.abc import Mapping, Sequence
from typing import Any, Final, Generic, Literal, NamedTuple, NewType, TypedDict, TypeVar

import attrs
import pydantic
from hypothesis import strategies as st

T = TypeVar("T")

UserId = NewType("UserId", str)


class Theme(enum.StrEnum):
    DARK = "dark"
    LIGHT = "light"


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


class Shape(enum.Enum):
    PAIR = (1, "one")
    LIST = [1, {"a": 2}]  # noqa: RUF012  # a member's value, and one that can't be hashed
    NOTHING = None


class Access(enum.Flag):
    READ = 1
    WRITE = 2


class Point(NamedTuple):
    x: int
    y: int | None


class Number(TypedDict):
    number: str


class Card(Number, total=False):
    expires: dt.date


class Invoice(pydantic.BaseModel):
    number: int = pydantic.Field(alias="invoiceNumber")
    due: dt.date
    theme: Theme = Theme.DARK
    tags: set[str] = set()


class Shown(pydantic.BaseModel):
    """What it gives away is not what it was made of."""

    secret: str = pydantic.Field(default="", exclude=True)


@dataclasses.dataclass
class Order:
    id: UserId
    lines: list[Invoice]
    by_theme: dict[Theme, Order | None] = dataclasses.field(default_factory=dict)
    total: decimal.Decimal = dataclasses.field(init=False, default=decimal.Decimal(0))
    note: str | None = dataclasses.field(default=None, kw_only=True)


@attrs.define
class Customer:
    order: Order | None
    _token: uuid.UUID = attrs.field(alias="token")
    level: Level
    where: Point
    points: Sequence[Point] = attrs.field(converter=tuple, default=())
    kind: Literal["b", 1] = "b"
    extra: Mapping[str, Any] = attrs.Factory(dict)


@attrs.define
class Box(Generic[T]):
    item: T
    items: list[T] = attrs.Factory(list)


@attrs.define
class Leaf:
    value: int


@attrs.define
class Named:
    name: str


@dataclasses.dataclass
class Short:
    """Keeps the first of its items."""

    items: list[int]

    def __post_init__(self) -> None:
        del self.items[1:]


@dataclasses.dataclass
class Loud:
    """Changes what it is given."""

    text: str

    def __post_init__(self) -> None:
        self.text = self.text.upper()


numbers: Final = st.integers(-(2**65), 2**65)
words: Final = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
finite: Final = st.decimals(allow_nan=False, allow_infinity=False)
themes: Final = st.sampled_from(Theme)
points: Final = st.builds(Point, numbers, st.none() | numbers)
invoices: Final = st.builds(
    lambda number, due, tags: Invoice(invoiceNumber=number, due=due, tags=tags),
    numbers,
    st.dates(),
    st.sets(words, max_size=3),
)


@st.composite
def orders(draw: st.DrawFn, deep: int = 2) -> Order:
    """An order, and orders in it."""
    inner = draw(st.dictionaries(themes, st.none() | orders(deep - 1) if deep else st.none(), max_size=2))
    order = Order(UserId(draw(words)), draw(st.lists(invoices, max_size=2)), inner, note=draw(st.none() | words))
    order.total = draw(finite)
    return order


customers: Final = st.builds(
    Customer,
    order=st.none() | orders(),
    token=st.uuids(),
    level=st.sampled_from(Level),
    where=points,
    points=st.lists(points, max_size=3),
    kind=st.sampled_from(["b", 1]),
    extra=st.dictionaries(words, st.lists(numbers, max_size=2), max_size=2),
)

SCALARS: Final[dict[Any, st.SearchStrategy[Any]]] = {
    type(None): st.none(),
    bool: st.booleans(),
    int: numbers,
    float: st.floats(allow_nan=False),
    str: st.text(st.characters(), max_size=8),
    bytes: st.binary(max_size=8),
    dt.datetime: st.datetimes(timezones=st.just(dt.UTC)),
    dt.date: st.dates(),
    dt.timedelta: st.timedeltas(),
    uuid.UUID: st.uuids(),
    decimal.Decimal: finite,
}
KINDS: Final[dict[Any, st.SearchStrategy[Any]]] = {
    **SCALARS,
    Theme: themes,
    Level: st.sampled_from(Level),
    Shape: st.sampled_from(Shape),
    Access: st.sampled_from([Access(number) for number in range(4)]),
    UserId: words,
    Point: points,
    Card: st.fixed_dictionaries({"number": words}, optional={"expires": st.dates()}),
    Invoice: invoices,
    Order: orders(),
    Customer: customers,
    Literal["a", 1]: st.sampled_from(["a", 1]),
    Leaf | Named: st.builds(Leaf, numbers) | st.builds(Named, words),
    Leaf | None: st.none() | st.builds(Leaf, numbers),
    int | str | None: st.none() | numbers | words,
}
HASHABLE: Final[tuple[Any, ...]] = (str, int, Theme, dt.date, tuple[int, str])
_OF_HASHABLE: Final = {**KINDS, tuple[int, str]: st.tuples(numbers, words)}


def of(generic: Any, *kinds: Any) -> Any:
    """*generic*, filled in with types that are known only when the test runs."""
    return generic[kinds[0] if len(kinds) == 1 else kinds]


_Drawn = tuple[Any, st.SearchStrategy[Any]]


def _containers(inner: st.SearchStrategy[_Drawn]) -> st.SearchStrategy[_Drawn]:
    return st.one_of(
        inner.map(lambda each: (of(list, each[0]), st.lists(each[1], max_size=3))),
        inner.map(lambda each: (of(tuple, each[0], ...), st.lists(each[1], max_size=3).map(tuple))),
        inner.map(lambda each: (of(Sequence, each[0]), st.lists(each[1], max_size=2))),
        inner.map(lambda each: (of(Box, each[0]), st.builds(Box, each[1], st.lists(each[1], max_size=2)))),
        st.tuples(inner, inner).map(lambda two: (of(tuple, two[0][0], two[1][0]), st.tuples(two[0][1], two[1][1]))),
        st.tuples(st.sampled_from(HASHABLE), inner).map(
            lambda two: (of(dict, two[0], two[1][0]), st.dictionaries(_OF_HASHABLE[two[0]], two[1][1], max_size=3))
        ),
        st.sampled_from(HASHABLE).map(lambda kind: (of(set, kind), st.sets(_OF_HASHABLE[kind], max_size=3))),
    )


kinds_and_strategies: Final = st.recursive(st.sampled_from([*KINDS.items()]), _containers, max_leaves=3)
"""A type, and a strategy of values of it."""

typed_values: Final = kinds_and_strategies.flatmap(lambda each: st.tuples(st.just(each[0]), each[1]))
"""A type, and a value of it."""
