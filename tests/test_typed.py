from __future__ import annotations

import dataclasses
import datetime as dt
import pickle
import subprocess
import sys
from pathlib import Path
from random import randrange
from typing import Annotated, Any, Final, Literal

import attrs
import pydantic
import pytest
from hypothesis import given, seed, settings
from hypothesis import strategies as st

from chatflow.core.codec import values_from_json, values_to_json
from chatflow.core.session import AgentSession
from chatflow.core.typed import MismatchError, typed
from chatflow.core.values import FrozenDict, FrozenList, freeze, freeze_mapping
from chatflow.exceptions import SessionKeyError, SessionStateError, UnstorableValueError
from tests import strategies
from tests.kinds import (
    SCALARS,
    Access,
    Box,
    Card,
    Invoice,
    Leaf,
    Level,
    Loud,
    Named,
    Order,
    Point,
    Short,
    Shown,
    Theme,
    UserId,
    of,
    typed_values,
)


class Text(str):
    """A kind of text, which comes back as text."""

    __slots__ = ()


def keep(value: Any) -> Any:
    """*value* as it comes out of a file."""
    return values_from_json(values_to_json(freeze_mapping({"k": value}, "")))["k"]


# --- what comes back ---------------------------------------------------------------------------------------------


@given(typed_values)
def test_comes_back(drawn: tuple[Any, Any]) -> None:
    """A value of any type comes back from a file as that type and equal."""
    kind, value = drawn
    back = typed(keep(value), kind, "k")
    assert back == value
    assert type(back) is type(value)


CHILD: Final = """
import pickle, sys
from chatflow.core.codec import values_from_json
from chatflow.core.typed import typed
for kind, value, text in pickle.load(sys.stdin.buffer):
    assert typed(values_from_json(text)["k"], kind, "k") == value, (kind, text)
print("ok")
"""


def test_comes_back_in_another_process() -> None:
    """200 values of drawn types are read by another process from what this one wrote."""
    drawn: list[tuple[Any, Any, str]] = []
    number = randrange(2**32)
    print("seed", number)  # noqa: T201  # pytest shows it if the test fails

    @seed(number)
    @settings(max_examples=200, database=None)
    @given(typed_values)
    def draw(pair: tuple[Any, Any]) -> None:
        drawn.append((*pair, values_to_json(freeze_mapping({"k": pair[1]}, ""))))

    draw()
    done = subprocess.run(
        [sys.executable, "-c", CHILD],
        input=pickle.dumps(drawn),
        capture_output=True,
        check=False,
        cwd=Path(__file__).parent.parent,
    )
    assert done.stdout == b"ok\n", done.stderr.decode()


@given(strategies.values, st.sampled_from([Any, object]))
def test_any_value_as_the_callers_own(value: Any, kind: Any) -> None:
    """Read as `Any` or `object`, a value comes back equal, with nothing frozen in it."""
    back = typed(keep(value), kind, "k")
    assert strategies.exactly(freeze(back)) == strategies.exactly(freeze(value))
    assert "Frozen" not in repr(strategies.exactly(back))


@given(typed_values)
def test_nothing_frozen_comes_back(drawn: tuple[Any, Any]) -> None:
    """No frozen container is in what comes back, so that its owner may change it."""
    kind, value = drawn
    seen = [typed(keep(value), kind, "k")]
    while seen:
        item = seen.pop()
        assert type(item) not in {FrozenDict, FrozenList}
        if isinstance(item, dict):
            seen += item.values()
        elif isinstance(item, list | tuple):
            seen += item
        elif attrs.has(type(item)):
            seen += [getattr(item, field.name) for field in attrs.fields(type(item))]
        elif isinstance(item, pydantic.BaseModel) or dataclasses.is_dataclass(item):
            seen += vars(item).values()


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        ([1], list),
        ((1, [2]), tuple),
        ({1}, set),
        ({"a": [1]}, dict),
        ("a", Annotated[str, "what it is"]),
        (UserId("a"), UserId | None),
        (1, float),
        ([1, 0.5], list[float]),
        (Box([1]), Box),
        (Access.READ | Access.WRITE, Access),
        (Named("a"), Leaf | Named),
        ([Leaf(1)], list[Leaf] | None),
        (Point(1, 2), Point),
    ],
)
def test_kinds(value: Any, kind: Any) -> None:
    """What can stand in an annotation can be asked for."""
    assert typed(keep(value), kind, "k") == value


def test_class_that_has_grown() -> None:
    """Fields that a class has got since a value was kept take their defaults."""
    assert typed(keep({"item": 1}), Box[int], "k") == Box(1, [])


# --- what is refused ---------------------------------------------------------------------------------------------


@st.composite
def misread(draw: st.DrawFn) -> tuple[Any, Any]:
    """A scalar type, and a value of another one."""
    kind, other = draw(st.lists(st.sampled_from([*SCALARS]), min_size=2, max_size=2, unique=True))
    if (kind, other) == (float, int):
        kind, other = int, float
    return kind, draw(SCALARS[other])


@given(misread(), st.sampled_from(["k", "k.item", "k.items[1]"]))
def test_wrong_scalar_is_refused(drawn: tuple[Any, Any], path: str) -> None:
    """A value of another scalar type is refused at its path, wherever it stands."""
    kind, value = drawn
    kept, asked = {
        "k": (value, kind),
        "k.item": ({"item": value}, of(Box, kind)),
        "k.items[1]": ({"item": None, "items": [None, value]}, of(Box, kind | None)),
    }[path]
    if value is None and path == "k.items[1]":
        return
    with pytest.raises(MismatchError) as caught:
        typed(keep(kept), asked, "k")
    assert caught.value.path == path


@given(strategies.values, typed_values)
def test_nothing_is_coerced(value: Any, drawn: tuple[Any, Any]) -> None:
    """Any value read as any type is refused, or is what would be kept as the same, but for fields with defaults."""
    kept = keep(value)
    try:
        back = typed(kept, drawn[0], "k")
    except (MismatchError, TypeError):
        return
    if not isinstance(kept, dict):
        assert strategies.exactly(freeze(back)) == strategies.exactly(kept)
    else:
        assert freeze(back).items() >= kept.items()


@pytest.mark.parametrize(
    ("value", "kind", "path", "reason"),
    [
        ("5", int, "k", "it is no int but of type str"),
        (True, int, "k", "it is no int but of type bool"),
        (1, bool, "k", "it is no bool but of type int"),
        (1, None, "k", None),
        ([None, 1], list[None], "k[1]", None),
        ("purple", Theme, "k", "'purple' is not a valid Theme"),
        (True, Level, "k", "as Level it would be another value than what is kept"),
        ("abc", list[str], "k", "as list[str] it would be another value than what is kept"),
        ([1], tuple[int, ...], "k", "as tuple[int, ...] it would be another value than what is kept"),
        ({}, Leaf, "k.value", "it is missing"),
        ({"value": 1, "b": 2}, Leaf, "k", "the class has no field 'b'"),
        (5, Leaf, "k", "it is no Leaf but of type int"),
        ([{"value": 1}, {"value": "x"}], list[Leaf], "k[1].value", "it is no int but of type str"),
        ({"number": 1}, Card, "k.number", "it is no str but of type int"),
        ({"number": "x", "due": dt.date(2026, 1, 2)}, Invoice, "k.number", None),
        ([{"number": 1, "due": dt.date(2026, 1, 2), "tags": {1}}], list[Invoice], "k[0].tags[0]", None),
        ({"number": "7", "due": dt.date(2026, 1, 2)}, Invoice, "k.number", None),
        ({"text": "loud"}, Loud, "k.text", "as Loud it would be another value than what is kept"),
        ({1: "loud"}, dict[int, Loud], "k[1]", "it is no Loud but of type str"),
        ({1: {"text": "loud"}}, dict[int, Loud], "k[1].text", None),
        ([{"text": "loud"}], list[Loud], "k[0].text", None),
        ((1, 2, 3), Point, "k", None),
        (2, Literal["a", 1], "k", "it is none of 'a', 1"),
        (True, Literal["a", 1], "k", "it is none of 'a', 1"),
        ({True}, set[Level], "k", "as set[tests.kinds.Level] it would be another value than what is kept"),
        ({(True,)}, set[tuple[Level]], "k", None),
        ({True: 1}, dict[Level, int], "k[True]", None),
        ({"items": [1, 2]}, Short, "k.items", "as Short it would be another value than what is kept"),
        ({"loud": True}, Shown, "k.loud", None),
    ],
)
def test_refusal(value: Any, kind: Any, path: str, reason: str | None) -> None:
    """What is no such value is refused by the path to what is wrong with it, and the reason says what that is."""
    with pytest.raises(MismatchError) as caught:
        typed(keep(value), kind, "k")
    assert caught.value.path == path
    assert reason in {None, caught.value.reason}


@pytest.mark.parametrize("kind", [complex, "Order", Order | complex, list[complex]])
def test_type_that_does_not_come_back(kind: Any) -> None:
    """A type that no kept value comes back as is a TypeError that names it."""
    with pytest.raises(TypeError, match=r"k can't be read as .*(complex|Order)"):
        typed(keep([1]), kind, "k")


def test_too_deep() -> None:
    """A value that is nested more deeply than a type can be followed is refused."""

    @attrs.define
    class Chain:
        rest: Any

        def __attrs_post_init__(self) -> None:
            raise RecursionError

    with pytest.raises(MismatchError, match="nested too deeply"):
        typed(keep({"rest": None}), Chain, "k")


def test_what_a_class_makes_can_not_be_kept() -> None:
    """A class that makes something that can't be kept of a value is refused at that place."""

    @attrs.define
    class Odd:
        item: Any

        def __attrs_post_init__(self) -> None:
            self.item = object()

    with pytest.raises(MismatchError, match="is no value chatflow keeps") as caught:
        typed(keep({"item": 1}), Odd, "k")
    assert caught.value.path == "k.item"
    with pytest.raises(UnstorableValueError):
        freeze(Odd(1))

    class Number(pydantic.RootModel[Any]):
        @pydantic.model_serializer
        def _odd(self) -> object:
            return object()

    with pytest.raises(MismatchError) as caught:
        typed(keep(1), Number, "k")
    assert caught.value.path == "k"


# --- in a session ------------------------------------------------------------------------------------------------


@given(typed_values)
def test_set_and_get(drawn: tuple[Any, Any]) -> None:
    """What is set in a session's state is what it gives back."""
    kind, value = drawn
    session = AgentSession()
    session.set("k", value)
    assert session.get("k", kind) == value


def test_three_ways_of_not_being_there() -> None:
    """A missing key, one of another type and a deleted one are told apart, and a default is no value."""
    session = AgentSession(state={"theme": "dark", "nothing": None})
    with pytest.raises(KeyError, match="its state has no key 'size'"):
        session.get("size", int)
    assert session.get("size", int, 7) == 7
    assert session.get("size", int, None) is None
    assert session.get("nothing", int | None, 7) is None
    with pytest.raises(SessionStateError, match=r"state\.theme: it is no int but of type str") as caught:
        session.get("theme", int, 7)
    assert not isinstance(caught.value, KeyError)
    assert session.delete("theme") is True
    assert session.delete("theme") is False
    with pytest.raises(SessionKeyError):
        session.get("theme")


def test_users_dict_is_data() -> None:
    """A dict with a key that looks like a class's name comes back as the dict that it is."""
    session = AgentSession()
    mine = {"type": "Order", "$chatflow": "uuid", "__class__": "Order"}
    session.set("k", mine)
    assert session.get("k") == mine
    assert session.get("k", dict[str, str]) == mine


@pytest.mark.parametrize(
    "value",
    [
        Loud("x"),
        Shown(secret="s"),
        [Shown(secret="s")],
        {"a": (1, Shown(secret="s"))},
        [object()],
        Text("a"),
        Box(object()),
    ],
)
def test_what_would_not_come_back_is_refused(value: Any) -> None:
    """A value that would come back as another one, or not at all, is refused when it is set; nothing has changed."""
    if isinstance(value, Loud):
        value.text = "quiet"
    session = AgentSession(state={"k": 1})
    with pytest.raises(SessionStateError, match="state"):
        session.set("k", value)
    assert session.state == {"k": 1}


def test_a_class_that_can_not_be_read_is_refused() -> None:
    """An instance of a class whose fields nobody can tell apart is refused when it is set."""

    @attrs.define
    class Either:
        one: Nowhere  # type: ignore[name-defined]  # noqa: F821

    session = AgentSession()
    with pytest.raises(SessionStateError, match=r"Either.*Nowhere"):
        session.set("k", Either(1))


def test_a_class_without_equality() -> None:
    """An instance that is equal only to itself comes back with the same fields."""

    @attrs.define(eq=False)
    class Plain:
        item: int

    session = AgentSession()
    session.set("k", Plain(3))
    assert session.get("k", Plain).item == 3
