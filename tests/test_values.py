from __future__ import annotations

import array
import collections
import copy
import dataclasses
import datetime as dt
import decimal
import enum
import json
import math
import pickle
import subprocess
import sys
import uuid
import zoneinfo
from collections.abc import Callable
from typing import Any, NamedTuple

import attrs
import msgspec
import pydantic
import pytest
from hypothesis import given

from chatflow.core.values import EMPTY, MARK, MAX_DEPTH, FrozenDict, FrozenList, freeze, freeze_mapping, thaw
from chatflow.exceptions import UnstorableValueError
from tests import strategies
from tests.strategies import exactly


class Number(enum.IntEnum):
    ONE = 1


class Colour(enum.StrEnum):
    RED = "red"


class Plain(enum.Enum):
    PAIR = (1, "one")
    WORD = "red"


class Access(enum.Flag):
    READ = 1
    WRITE = 2


@attrs.frozen
class Point:
    x: int
    y: Any = None


@attrs.define
class Unset:
    late: int = attrs.field(init=False)


@dataclasses.dataclass
class Order:
    order_id: str
    lines: list[Any]


class Invoice(pydantic.BaseModel):
    number: int
    due: dt.date


class Broken(pydantic.BaseModel):
    def model_dump(self, **_: Any) -> Any:
        raise RuntimeError("no")


class Endless(pydantic.BaseModel):
    def model_dump(self, **_: Any) -> Any:
        return self


class Pair(NamedTuple):
    left: int
    right: str


class Text(str):
    __slots__ = ()

    def __str__(self) -> str:
        return "another text"


class Whole(int):
    def __int__(self) -> int:
        return 0


class Real(float):
    def __float__(self) -> float:
        return 0.0


class Moment(dt.datetime):
    pass


class Day(dt.date):
    pass


class Id(uuid.UUID):
    pass


class Unsure(dt.tzinfo):
    def utcoffset(self, moment: dt.datetime | None) -> None:
        return None

    def tzname(self, moment: dt.datetime | None) -> None:
        return None

    def dst(self, moment: dt.datetime | None) -> None:
        return None


class Unprintable:
    def __repr__(self) -> str:
        raise RuntimeError("no repr")


class Scalar:
    """What numpy's numbers look like: they convert to ours, and are none."""

    def __int__(self) -> int:
        return 1

    __index__ = __int__


class Disguised:
    """What a proxy or a mock with a spec looks like to isinstance."""

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return dict


def nested(levels: int, wrap: Callable[[Any], Any], core: Any = 1) -> Any:
    """*core*, wrapped *levels* times."""
    value = core
    for _ in range(levels):
        value = wrap(value)
    return value


def refusal(value: Any, path: str = "v") -> tuple[str, str]:
    """The path and the reason that freezing *value* is refused with."""
    with pytest.raises(UnstorableValueError) as caught:
        freeze(value, path)
    return caught.value.path, caught.value.reason


# --- what is kept ------------------------------------------------------------------------------------------------


@given(strategies.values)
def test_frozen_equals_given(value: Any) -> None:
    """What freezing gives equals what was given, to the types of its leaves, but for NaN, which equals nothing."""
    frozen = freeze(value)
    assert frozen == value or "nan" in repr(frozen)


@given(strategies.values)
def test_freezing_again_changes_nothing(value: Any) -> None:
    """A frozen value, frozen again or thawed and frozen again, is exactly the same."""
    frozen = freeze(value)
    assert exactly(freeze(frozen)) == exactly(frozen) == exactly(freeze(thaw(frozen)))


@given(strategies.values)
def test_nothing_mutable_is_left(value: Any) -> None:
    """No dict, list or set of the given value can be reached from its frozen copy."""
    seen = [freeze(value)]
    while seen:
        item = seen.pop()
        assert type(item) not in {dict, list, set, bytearray}
        if isinstance(item, dict):
            seen += [*item.keys(), *item.values()]
        elif isinstance(item, list | tuple | frozenset):
            seen += item


def test_changes_of_the_given_value_do_not_show() -> None:
    """A frozen copy stays as it is when what it was made of changes."""
    inner: list[Any] = [1]
    given_value = {"a": inner, "b": (inner,), "c": {1}}
    frozen = freeze(given_value)
    inner.append(2)
    given_value["c"].add(2)  # type: ignore[attr-defined]
    assert frozen == {"a": [1], "b": ([1],), "c": {1}}


@pytest.mark.parametrize(
    ("value", "plain"),
    [
        (Number.ONE, 1),
        (Colour.RED, "red"),
        (Plain.PAIR, (1, "one")),
        (Access.READ | Access.WRITE, 3),
        (Point(1, [Point(2)]), {"x": 1, "y": [{"x": 2, "y": None}]}),
        (Order("7", [Pair(1, "a")]), {"order_id": "7", "lines": [(1, "a")]}),
        (Invoice(number=1, due=dt.date(2026, 1, 2)), {"number": 1, "due": dt.date(2026, 1, 2)}),
        (Pair(1, "a"), (1, "a")),
        (collections.OrderedDict(b=1, a=2), {"b": 1, "a": 2}),
        (collections.defaultdict(list, a=[1]), {"a": [1]}),
        (collections.Counter("aab"), {"a": 2, "b": 1}),
        (Text("a"), "a"),
        (Whole(7), 7),
        (Real(0.5), 0.5),
        (Real("nan"), math.nan),
        (bytearray(b"a"), b"a"),
        (memoryview(b"abc")[1:], b"bc"),
        (Moment(2026, 1, 2, tzinfo=dt.UTC), dt.datetime(2026, 1, 2, tzinfo=dt.UTC)),
        (Day(2026, 1, 2), dt.date(2026, 1, 2)),
        (Id(int=7), uuid.UUID(int=7)),
        ({Colour.RED: 1, Text("b"): 2}, {"red": 1, "b": 2}),
        ({Number.ONE, Pair(1, "a")}, frozenset({1, (1, "a")})),
    ],
)
def test_becomes_plain(value: Any, plain: Any) -> None:
    """Instances of enums, attrs, dataclasses, pydantic and of subclasses become the plain values they stand for."""
    assert exactly(thaw(freeze(value))) == exactly(thaw(freeze(plain)))


@pytest.mark.parametrize(
    "value",
    [
        math.nan,
        -0.0,
        math.inf,
        -math.inf,
        "\0",
        "\ud800",
        "",
        2**64,
        2**70000,
        -(2**63) - 1,
        True,
        b"\0\xff",
        dt.timedelta.min,
        uuid.UUID(int=1),
        decimal.Decimal("sNaN123"),
        decimal.Decimal("-NaN"),
        decimal.Decimal("Infinity"),
        decimal.Decimal("-0.00"),
        dt.date.min,
        dt.datetime.max,  # noqa: DTZ901  # naive ones are kept too
        dt.datetime(2026, 10, 25, 2, 30, fold=1),  # noqa: DTZ001  # as above
        dt.datetime(2026, 10, 25, 2, 30, fold=1, tzinfo=zoneinfo.ZoneInfo("Europe/Berlin")),
        dt.datetime(2026, 3, 29, 2, 30, fold=1, tzinfo=zoneinfo.ZoneInfo("Europe/Berlin")),
        dt.datetime.min.replace(tzinfo=dt.timezone(dt.timedelta(seconds=-1, microseconds=1))),
        (),
        frozenset(),
    ],
    ids=lambda value: repr(exactly(value))[:60],
)
def test_is_kept_as_it_is(value: Any) -> None:
    """A value on the edge of what its type can hold is kept, exactly."""
    assert exactly(freeze(value)) == exactly(value)


@pytest.mark.parametrize(
    "value",
    [
        {MARK: "tuple", "v": [1]},
        {1: "int", "1": "str"},
        {None: 0, (1, (2,)): 1, b"k": 2, dt.date(2026, 1, 2): 3, 2**70000: 4},
        {frozenset({frozenset({1}), 2}): {frozenset({1})}},
    ],
    ids=["user's mark", "mixed keys", "keys of all kinds", "sets of sets"],
)
def test_dicts_are_kept(value: dict[Any, Any]) -> None:
    """A dict is kept whatever its keys, also such as the codec itself uses."""
    assert freeze(value) == value


def test_nan_is_always_the_same_object() -> None:
    """A NaN becomes the one NaN that a file gives back too, so that containers of it equal each other."""
    assert freeze([float("nan")]) == freeze([-float("nan")])


@pytest.mark.parametrize(
    "offset", [dt.timedelta(0), dt.timedelta(hours=5, minutes=45), dt.timedelta(microseconds=-1)], ids=str
)
def test_foreign_zone_becomes_its_offset(offset: dt.timedelta) -> None:
    """A zone of a kind that has no name to find it by is kept as its offset at that time."""

    class Foreign(Unsure):
        def utcoffset(self, moment: dt.datetime | None) -> dt.timedelta:  # type: ignore[override]
            return offset

    frozen = freeze(dt.datetime(2026, 1, 2, tzinfo=Foreign(), fold=1))
    assert exactly(frozen) == exactly(dt.datetime(2026, 1, 2, tzinfo=dt.timezone(offset)))


def test_zone_without_an_offset_goes() -> None:
    """A datetime whose zone knows no offset is a naive one, as for Python."""
    assert freeze(dt.datetime(2026, 1, 2, tzinfo=Unsure())).tzinfo is None


@pytest.mark.parametrize("key", [None, "Nowhere/Unheard", "../Europe/Berlin", "Asia/Tokyo"])
def test_zone_whose_name_does_not_lead_to_it_becomes_its_offset(key: str | None) -> None:
    """A zone read from a file is kept by name only where the name leads to a zone of the same offset."""
    path = zoneinfo.TZPATH[0] + "/Europe/Berlin"
    with open(path, "rb") as file:  # noqa: PTH123  # zoneinfo takes an open file
        zone = zoneinfo.ZoneInfo.from_file(file, key)
    frozen = freeze(dt.datetime(2026, 7, 1, tzinfo=zone))
    assert frozen.tzinfo == dt.timezone(dt.timedelta(hours=2))


def test_zone_is_the_one_its_name_leads_to() -> None:
    """A zone that is no shared one is kept as the shared one of its name, which a file gives back too."""
    frozen = freeze(dt.datetime(2026, 7, 1, tzinfo=zoneinfo.ZoneInfo.no_cache("Europe/Berlin")))
    assert frozen.tzinfo is zoneinfo.ZoneInfo("Europe/Berlin")


# --- what is refused, and where ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "value",
    [
        object(),
        len,
        lambda: None,
        Point,
        Order,
        Invoice,
        Colour,
        int,
        Scalar(),
        array.array("d", [1.0]),
        range(3),
        iter([1]),
        {}.keys(),
        collections.deque([1]),
        1j,
        dt.time(1),
        dt.UTC,
        Disguised(),
        Exception("x"),
    ],
)
def test_is_refused_by_its_path(value: Any) -> None:
    """A value of a kind that would not come back is refused, and the error names where it stands and its type."""
    path, reason = refusal({"items": [0, (0, value)]}, "tool_results[0].content")
    assert path == "tool_results[0].content.items[1][1]"
    assert type(value).__qualname__ in reason


@pytest.mark.parametrize(
    ("value", "path"),
    [
        (object(), "v"),
        ({"a": {"b": object()}}, "v.a.b"),
        ({5: object()}, "v[5]"),
        ({(1, "a"): object()}, "v[(1, 'a')]"),
        ({Colour.RED: object()}, "v.red"),
        ({Text("a"): object()}, "v.a"),
        ({2**70000: object()}, "v[int]"),
        ({"k" * 10: object()}, "v.kkkkkkkkkk"),
        ({b"k" * 100: object()}, f"v[b'{'k' * 36}...{'k' * 37}']"),
        ({object: 1}, "v[<class 'object'>]"),
        ({Unprintable(): 1}, "v[Unprintable]"),
        ({(1, object): 1}, "v[(1, <class 'object'>)][1]"),
        ({object}, "v[0]"),
        (Point(1, object()), "v.y"),
        (Order("7", [object()]), "v.lines[0]"),
        ((1, object()), "v[1]"),
    ],
)
def test_path(value: Any, path: str) -> None:
    """The path of what is refused leads through keys, indexes and fields, and is built whatever a key is."""
    assert refusal(value)[0] == path


def test_path_through_a_long_key() -> None:
    """A path shows the beginning of a long key."""
    assert refusal({"k" * 1000: object()})[0] == f"v.{'k' * 80}..."


def test_path_of_a_bare_value() -> None:
    """Where the value has no name of its own the path begins with the key."""
    assert refusal({"a": [object()]}, "")[0] == "a[0]"


@pytest.mark.parametrize(
    "value",
    [
        {Plain.WORD: 1, "red": 2},
        {Plain.WORD, "red"},
        {float("nan"): 1, float("nan"): 2},
        {float("nan"), float("nan")},
        {Plain.PAIR: 1, (1, "one"): 2},
    ],
)
def test_keys_and_members_that_would_fall_together_are_refused(value: Any) -> None:
    """A dict or set is refused if two of its keys or members become the same plain value: one would be lost."""
    refusal(value)


@pytest.mark.parametrize("value", [{Point(1): 1}, {Point(1)}, {frozenset({Point(1)})}, {(1, Point(1))}])
def test_what_becomes_a_dict_is_no_key_or_member(value: Any) -> None:
    """A hashable object that becomes a dict is refused where only what is hashable can stand."""
    assert "can't be a key or a set's member" in refusal(value)[1]


@pytest.mark.parametrize(
    "value", [Unset(), Broken(), dataclasses.replace(Order("7", []))], ids=["attrs", "pydantic", "dataclass"]
)
def test_object_that_cannot_be_read_is_refused(value: Any) -> None:
    """An object whose fields can't be read is refused by path, with its own error as the cause."""
    if isinstance(value, Order):
        del value.lines
    with pytest.raises(UnstorableValueError, match=r"v\[0\] can't be stored: \w+ can't be read") as caught:
        freeze([value], "v")
    assert caught.value.__cause__ is not None


WRAPS: dict[str, Callable[[Any], Any]] = {
    "list": lambda value: [value],
    "dict": lambda value: {"a": value},
    "tuple": lambda value: (value,),
    "int key": lambda value: {1: value},
    "our mark": lambda value: {MARK: value},
    "NUL key": lambda value: {"\0": value},
    "attrs": lambda value: Point(1, value),
    "dict subclass": lambda value: collections.defaultdict(int, a=value),
}


@pytest.mark.parametrize("levels", [MAX_DEPTH + 1, 600, 10_000])
@pytest.mark.parametrize("name", WRAPS)
def test_too_deep_is_refused(name: str, levels: int) -> None:
    """Nesting deeper than can be written is refused by an error that says so, never a RecursionError."""
    path, reason = refusal(nested(levels, WRAPS[name]))
    assert path.startswith("v")
    assert len(path) < 100
    assert reason == f"nested deeper than {MAX_DEPTH} levels, or in itself"


@pytest.mark.parametrize("name", ["list", "dict"])
def test_as_deep_as_said_is_kept(name: str) -> None:
    """Lists and dicts may be nested exactly as deep as MAX_DEPTH says."""
    value = nested(MAX_DEPTH, WRAPS[name])
    assert freeze(value) == value


def test_depth_counts_what_a_key_holds() -> None:
    """A key's own levels count from where the key stands."""
    refusal(nested(MAX_DEPTH // 2, WRAPS["dict"], {nested(MAX_DEPTH // 3, WRAPS["tuple"]): 1}))


def cycles() -> list[Any]:
    """A value of each kind that can hold itself."""
    looped_list: list[Any] = []
    looped_list += [looped_list, looped_list]
    looped_dict: dict[str, Any] = {}
    looped_dict["a"] = [looped_dict]
    looped_order = Order("7", [])
    looped_order.lines.append((looped_order,))
    return [looped_list, looped_dict, looped_order, Endless()]


@pytest.mark.parametrize("value", cycles(), ids=["list", "dict", "dataclass", "pydantic"])
def test_cycle_is_refused(value: Any) -> None:
    """A value that holds itself is refused."""
    assert "in itself" in refusal(value)[1]


# --- mappings ----------------------------------------------------------------------------------------------------


@given(strategies.mappings)
def test_mapping_is_frozen(value: dict[str, Any]) -> None:
    """Any mapping with string keys is frozen as a dict of the same items is."""
    assert exactly(freeze_mapping(collections.ChainMap(value), "v")) == exactly(
        freeze(dict(collections.ChainMap(value)))
    )


def test_empty_mapping_is_one_object() -> None:
    """All empty mappings are the same object, so that a message without arguments costs nothing for them."""
    assert freeze_mapping({}, "v") is EMPTY


@pytest.mark.parametrize("value", [None, [("a", 1)], "a", Point(1), 5])
def test_mapping_is_demanded(value: Any) -> None:
    """What is no mapping is refused where a mapping is needed."""
    with pytest.raises(UnstorableValueError, match="a mapping is needed here, not") as caught:
        freeze_mapping(value, "tool_calls[0].args")
    assert caught.value.path == "tool_calls[0].args"


@pytest.mark.parametrize(
    ("key", "path"),
    [(5, "v[5]"), (None, "v[None]"), (b"a", "v[b'a']"), (2**70000, "v[int]"), (Unprintable(), "v[Unprintable]")],
    ids=["int", "None", "bytes", "large int", "unprintable"],
)
def test_string_keys_are_demanded(key: Any, path: str) -> None:
    """A mapping with another key than a string is refused by that key, whatever its repr does."""
    with pytest.raises(UnstorableValueError, match="keys must be strings here") as caught:
        freeze_mapping({"a": 1, key: 2}, "v")
    assert caught.value.path == path


# --- frozen containers -------------------------------------------------------------------------------------------


DICT_CHANGES: dict[str, Callable[[Any], object]] = {
    "__setitem__": lambda value: value.__setitem__("a", 2),
    "__delitem__": lambda value: value.__delitem__("a"),
    "__ior__": lambda value: value.__ior__({"b": 1}),
    "clear": lambda value: value.clear(),
    "pop": lambda value: value.pop("a"),
    "popitem": lambda value: value.popitem(),
    "setdefault": lambda value: value.setdefault("b", 1),
    "update": lambda value: value.update(b=1),
    "setattr": lambda value: setattr(value, "field", 1),
}


@pytest.mark.parametrize("method", DICT_CHANGES)
def test_frozen_dict_refuses_changes(method: str) -> None:
    """Each method that would change a frozen dict raises and leaves it as it is."""
    value = freeze({"a": 1})
    with pytest.raises((TypeError, AttributeError)):
        DICT_CHANGES[method](value)
    assert value == {"a": 1}


LIST_CHANGES: dict[str, Callable[[Any], object]] = {
    "__setitem__": lambda value: value.__setitem__(0, 2),
    "__setitem__ slice": lambda value: value.__setitem__(slice(0, 1), []),
    "__delitem__": lambda value: value.__delitem__(0),
    "__iadd__": lambda value: value.__iadd__([2]),
    "__imul__": lambda value: value.__imul__(2),
    "append": lambda value: value.append(2),
    "clear": lambda value: value.clear(),
    "extend": lambda value: value.extend([2]),
    "insert": lambda value: value.insert(0, 2),
    "pop": lambda value: value.pop(),
    "remove": lambda value: value.remove(1),
    "reverse": lambda value: value.reverse(),
    "sort": lambda value: value.sort(),
    "setattr": lambda value: setattr(value, "field", 1),
}


@pytest.mark.parametrize("method", LIST_CHANGES)
def test_frozen_list_refuses_changes(method: str) -> None:
    """Each method that would change a frozen list raises and leaves it as it is."""
    value = freeze([1, 0])
    with pytest.raises((TypeError, AttributeError)):
        LIST_CHANGES[method](value)
    assert value == [1, 0]


@pytest.mark.parametrize(("kind", "base"), [(FrozenDict, dict), (FrozenList, list)])
def test_no_changing_method_is_forgotten(kind: type, base: type) -> None:
    """Every method of the built-in type is refused or known not to change anything."""
    harmless = {"copy", "fromkeys", "get", "items", "keys", "values", "count", "index"}
    changing = {name for name in vars(base) if not name.startswith("__")} - harmless
    changing |= {
        name for name in ("__setitem__", "__delitem__", "__ior__", "__iadd__", "__imul__") if name in vars(base)
    }
    assert changing <= vars(kind).keys()


def test_refusal_says_what_to_do() -> None:
    """Whoever tries to change a stored value is told how to get one that can be changed."""
    with pytest.raises(TypeError, match=r"a stored dict can't be changed; change a copy, made with copy.deepcopy\(\)"):
        freeze({}).update(a=1)
    with pytest.raises(TypeError, match="a stored list can't be changed"):
        freeze([]).append(1)


@given(strategies.values)
def test_deepcopy_is_the_callers(value: Any) -> None:
    """A deep copy equals the frozen value and holds nothing frozen at any level."""
    copied = copy.deepcopy(freeze(value))
    assert exactly(freeze(copied)) == exactly(freeze(value))
    assert "Frozen" not in repr(exactly(copied))


@pytest.mark.parametrize(("value", "inside"), [({"a": [1]}, "a"), ([{"a": 1}], 0)])
def test_copy_is_ordinary_outside(value: Any, inside: Any) -> None:
    """A shallow copy can be changed, and what is in it still can't."""
    copied = copy.copy(freeze(value))
    assert copied == value
    assert type(copied) is type(value)
    assert isinstance(copied[inside], FrozenDict | FrozenList)


def test_deepcopy_thaws_sets() -> None:
    """A deep copy gives back sets as sets, also within tuples."""
    assert exactly(copy.deepcopy(freeze({"a": ({1},)}))["a"]) == ("tuple", [("set", repr({1}))])


@given(strategies.values)
def test_pickled_stays_frozen(value: Any) -> None:
    """A frozen value that travels between processes arrives frozen and exactly the same."""
    frozen = freeze(value)
    assert exactly(pickle.loads(pickle.dumps(frozen))) == exactly(frozen)


def test_json_writes_frozen_values() -> None:
    """Frozen containers are dicts and lists to whoever writes JSON."""
    value = {"a": [1, {"b": []}]}
    assert json.loads(json.dumps(freeze(value))) == msgspec.json.decode(msgspec.json.encode(freeze(value))) == value


def test_merging_gives_an_ordinary_dict() -> None:
    """``|`` makes a new, ordinary dict, whichever side is frozen."""
    frozen = freeze({"a": 1})
    assert frozen | {"b": 2} == {"a": 1, "b": 2}
    assert type(frozen | {"b": 2}) is type({"b": 2} | frozen) is dict


def test_pydantic_is_not_imported() -> None:
    """Freezing an unknown object imports nothing: without pydantic there can be no instance of a pydantic class."""
    script = (
        "import sys; sys.modules.pop('pydantic', None); from chatflow.core.values import freeze\n"
        "try: freeze(object())\nexcept TypeError as error: print(error, 'pydantic' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "value can't be stored: builtins.object is no value chatflow keeps False"
