"""What a message or a state may hold: frozen copies of plain values, or a refusal that names the path.

`freeze` is the one door. What comes out of it is equal to what went in (enums, attrs, dataclass and pydantic instances
become plain values first), belongs to nobody else, and is what the codec can write and read back.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
import decimal
import enum
import math
import sys
import uuid
import zoneinfo
from collections.abc import Callable, Iterable, Mapping
from itertools import count, repeat
from operator import attrgetter
from typing import Any, Final, NoReturn

import attrs

from chatflow.exceptions import UnstorableValueError, shorten

MAX_DEPTH: Final = 200
"""Levels of nesting that a value may have once written. They are read and written by recursion, which Python ends at
1,000 calls, and whoever calls has used some of them."""

MARK: Final = "$chatflow"
"""The key that tells an envelope, the codec's form for what JSON has none for, from a dict."""


def _refuse_change(self: object, *_args: object, **_kwargs: object) -> NoReturn:
    message = f"a stored {type(self).__bases__[0].__name__} can't be changed; change a copy, made with copy.deepcopy()"
    raise TypeError(message)


class FrozenDict(dict[Any, Any]):
    """A dict that can't be changed: equal to any dict of the same items. `copy.deepcopy` of it is an ordinary dict."""

    __slots__ = ()
    __setitem__ = __delitem__ = __ior__ = _refuse_change
    clear = pop = popitem = setdefault = update = _refuse_change

    def __copy__(self) -> dict[Any, Any]:
        return dict(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[Any, Any]:
        return {key: thaw(value) for key, value in self.items()}

    def __reduce__(self) -> tuple[Any, ...]:
        return FrozenDict, (dict(self),)


class FrozenList(list[Any]):
    """A list that can't be changed: equal to any list of the same items. `copy.deepcopy` of it is an ordinary list."""

    __slots__ = ()
    __setitem__ = __delitem__ = __iadd__ = __imul__ = _refuse_change
    append = clear = extend = insert = pop = remove = reverse = sort = _refuse_change

    def __copy__(self) -> list[Any]:
        return list(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> list[Any]:
        return [thaw(value) for value in self]

    def __reduce__(self) -> tuple[Any, ...]:
        return FrozenList, (list(self),)


EMPTY: Final = FrozenDict()


def thaw(value: object) -> Any:
    """A copy of a frozen value that its owner may change."""
    thawer = _THAWERS.get(type(value))
    return value if thawer is None else thawer(value)


_THAWERS: Final[dict[type, Callable[[Any], Any]]] = {
    FrozenDict: lambda value: {key: thaw(item) for key, item in value.items()},
    FrozenList: lambda value: [thaw(item) for item in value],
    tuple: lambda value: tuple(thaw(item) for item in value),
    frozenset: set,
}


def freeze(value: Any, path: str = "") -> Any:
    """A frozen copy of *value* that the codec can keep.

    Raises:
        UnstorableValueError: The value, or one inside it, would not come back equal; the error names its path.
    """
    return _freeze(value, (None, path), 0)


def freeze_mapping(value: Mapping[str, Any], path: str) -> FrozenDict:
    """`freeze` for what must be a mapping with string keys, such as a call's arguments."""
    if not isinstance(value, Mapping):
        raise UnstorableValueError(path=path, reason=f"a mapping is needed here, not {type(value).__name__}")
    for key in value:
        if not isinstance(key, str):
            raise UnstorableValueError(path=step(path, key), reason="keys must be strings here")
    if not value:
        return EMPTY
    frozen = _freeze(dict(value), (None, path), 0)
    assert isinstance(frozen, FrozenDict)
    return frozen


def is_plain(text: str) -> bool:
    """Whether JSON holds *text* as it stands, and every program that reads it finds the same."""
    if "\0" in text:
        return False  # valid JSON, and yet SQLite's and PostgreSQL's JSON functions lose it
    if text.isascii():
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def has_plain_keys(value: Mapping[Any, Any]) -> bool:
    """Whether a dict can be written as an object."""
    try:
        return MARK not in value and is_plain("".join(value))
    except TypeError:
        return False


def step(path: str, key: object) -> str:
    """The path of what stands at *path* under *key*: a dict's key, or an index."""
    if isinstance(key, str):
        name = str.__str__(key)
        name = name if len(name) <= _LONGEST_NAME else f"{name[:_LONGEST_NAME]}..."
        return f"{path}.{name}" if path else name
    try:
        return f"{path}[{shorten(key)}]"
    except Exception:  # noqa: BLE001  # a repr may do anything; that of an int refuses to write 5,000 digits
        return f"{path}[{type(key).__name__}]"


def join(path: str, inner: str) -> str:
    """The path of what stands at *inner* within what stands at *path*."""
    return f"{path}.{inner}" if path and inner and not inner.startswith("[") else path + inner


_LONGEST_NAME: Final = 80
"""Characters of a key that a path shows."""

_Place = tuple[Any, object]
"""Where a value stands: the place it is in (None for the whole) and its key there. Text is made of it in an error only,
since a path for each value would take time that grows with the square of what is frozen: a key may be of any length."""


def _path(place: _Place) -> str:
    keys: list[object] = []
    while place[0] is not None:
        keys.append(place[1])
        place = place[0]
    path = place[1]
    assert isinstance(path, str)
    for key in reversed(keys):
        path = step(path, key)
    return path


def _freeze(value: object, place: _Place, depth: int) -> Any:
    kind = type(value)
    if kind is str or value is None or kind is bool or kind is int:
        return value
    if kind is float and isinstance(value, float):
        return math.nan if math.isnan(value) else value  # always the same one, as from a file: equal by identity
    if depth >= MAX_DEPTH:
        reason = f"nested deeper than {MAX_DEPTH} levels, or in itself"
        raise UnstorableValueError(path=_path(place)[:80] + "...", reason=reason)
    handler = _EXACT.get(kind) or _handler_for(kind)
    if handler is None:
        reason = f"{kind.__module__}.{kind.__qualname__} is no value chatflow keeps"
        raise UnstorableValueError(path=_path(place), reason=reason)
    return handler(value, place, depth)


def _freeze_dict(value: dict[Any, Any], place: _Place, depth: int) -> FrozenDict:
    # A dict with other keys than plain strings is written as a list of pairs, which takes three levels instead of one.
    inside = depth + (1 if has_plain_keys(value) else 3)
    frozen: dict[Any, Any] = {}
    for key, item in value.items():
        here = (place, key)
        kept = key if type(key) is str else _freeze_hashable(key, here, inside)
        if kept in frozen:
            raise UnstorableValueError(path=_path(here), reason="another key is the same plain value")
        frozen[kept] = _freeze(item, here, inside)
    return FrozenDict(frozen)


def _freeze_hashable(value: Any, place: _Place, depth: int) -> Any:
    frozen = _freeze(value, place, depth)
    try:
        hash(frozen)
    except TypeError as error:
        reason = f"{type(value).__qualname__} becomes a plain value that can't be a key or a set's member"
        raise UnstorableValueError(path=_path(place), reason=reason) from error
    return frozen


def _freeze_items(value: Iterable[Any], place: _Place, depth: int) -> Iterable[Any]:
    return map(_freeze, value, zip(repeat(place), count()), repeat(depth))


def _freeze_list(value: list[Any], place: _Place, depth: int) -> FrozenList:
    return FrozenList(_freeze_items(value, place, depth + 1))


def _freeze_tuple(value: tuple[Any, ...], place: _Place, depth: int) -> tuple[Any, ...]:
    return tuple(_freeze_items(value, place, depth + 2))


def _freeze_set(value: set[Any] | frozenset[Any], place: _Place, depth: int) -> frozenset[Any]:
    frozen = frozenset(_freeze_hashable(item, (place, index), depth + 2) for index, item in enumerate(value))
    if len(frozen) != len(value):
        raise UnstorableValueError(path=_path(place), reason="two members are the same plain value")
    return frozen


def _freeze_datetime(value: dt.datetime, place: _Place, depth: int) -> dt.datetime:
    offset = value.utcoffset()
    named = None if offset is None else _named_zone(value)
    return dt.datetime(
        value.year,
        value.month,
        value.day,
        value.hour,
        value.minute,
        value.second,
        value.microsecond,
        dt.timezone(offset) if named is None and offset is not None else named,
        fold=value.fold if offset is None or named is not None else 0,
    )


def _named_zone(value: dt.datetime) -> zoneinfo.ZoneInfo | None:
    """The zone of *value* if its name leads to it again. Of any other zone, the offset is what can be kept."""
    zone = value.tzinfo
    if not isinstance(zone, zoneinfo.ZoneInfo) or zone.key is None:
        return None
    try:
        found = zoneinfo.ZoneInfo(zone.key)
    except (LookupError, OSError, ValueError):
        return None
    return found if value.replace(tzinfo=found).utcoffset() == value.utcoffset() else None


def _same(value: Any, place: _Place, depth: int) -> Any:
    return value


_Handler = Callable[[Any, _Place, int], Any]

_EXACT: Final[dict[type, _Handler]] = {
    dict: _freeze_dict,
    FrozenDict: _freeze_dict,
    list: _freeze_list,
    FrozenList: _freeze_list,
    tuple: _freeze_tuple,
    set: _freeze_set,
    frozenset: _freeze_set,
    bytes: _same,
    dt.datetime: _freeze_datetime,
    dt.date: _same,
    dt.timedelta: _same,
    uuid.UUID: _same,
    decimal.Decimal: _same,
}


def _plain_form(read: Callable[[Any], Any]) -> _Handler:
    """The handler of values that become what *read*, which runs code of theirs, makes of them."""

    def handler(value: Any, place: _Place, depth: int) -> Any:
        try:
            plain = read(value)
        except Exception as error:
            reason = f"{type(value).__qualname__} can't be read: {error!r}"
            raise UnstorableValueError(path=_path(place), reason=reason) from error
        return _freeze(plain, place, depth + 1)

    return handler


_SUBCLASSES: Final[tuple[tuple[type | tuple[type, ...], _Handler], ...]] = (
    (enum.Enum, _plain_form(attrgetter("value"))),
    (str, lambda value, place, depth: str.__str__(value)),
    (int, lambda value, place, depth: int.__int__(value)),
    (float, lambda value, place, depth: _freeze(float.__float__(value), place, depth)),
    ((bytes, bytearray, memoryview), lambda value, place, depth: bytes(value)),
    (dt.datetime, _freeze_datetime),
    (dt.date, lambda value, place, depth: dt.date(value.year, value.month, value.day)),
    (uuid.UUID, lambda value, place, depth: uuid.UUID(int=value.int)),
    (dict, _freeze_dict),
    (list, _freeze_list),
    (tuple, _freeze_tuple),
    ((set, frozenset), _freeze_set),
)

_freeze_attrs = _plain_form(
    lambda value: {field.name: getattr(value, field.name) for field in attrs.fields(value.__class__)}
)
_freeze_dataclass = _plain_form(
    lambda value: {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
)
_freeze_pydantic = _plain_form(lambda value: value.model_dump())


def _handler_for(kind: type[Any]) -> _Handler | None:
    for kinds, handler in _SUBCLASSES:
        if issubclass(kind, kinds):
            return handler
    if attrs.has(kind):
        return _freeze_attrs
    if dataclasses.is_dataclass(kind):
        return _freeze_dataclass
    pydantic: Any = sys.modules.get("pydantic")  # a pydantic instance can only exist where pydantic was imported
    if pydantic is not None and issubclass(kind, pydantic.BaseModel):
        return _freeze_pydantic
    return None
