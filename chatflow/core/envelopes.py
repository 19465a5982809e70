"""Plain values to what JSON can hold, and back.

What JSON has no form for stands in an envelope, an object whose only keys are ``"$chatflow"`` (the kind) and ``"v"``.
A dict that has the key ``"$chatflow"`` itself is written as pairs in an envelope, so that no data can be taken for one.
No class is ever looked up by a name in the data.
"""

from __future__ import annotations

import base64
import datetime as dt
import decimal
import math
import uuid
import zoneinfo
from collections.abc import Callable, Iterable, Mapping, Sized
from typing import Any, Final, TypeVar, cast

from chatflow.core.values import MARK, FrozenDict, FrozenList, has_plain_keys, is_plain, join, step
from chatflow.exceptions import SessionFormatError, shorten

_T = TypeVar("_T")


def encode(value: object) -> Any:
    """*value*, which `freeze` has accepted, as what JSON can hold."""
    writer = _WRITERS.get(type(value))
    return value if writer is None else writer(value)


def decode(value: Any) -> Any:
    """What `encode` was given.

    Raises:
        SessionFormatError: An envelope is not one that this version writes; the error names its path.
    """
    if isinstance(value, dict):
        fields = cast("dict[str, Any]", value)
        return _open_envelope(fields) if MARK in fields else decode_fields(fields)
    return _read_list(cast("list[object]", value)) if isinstance(value, list) else value


def decode_fields(fields: dict[str, Any]) -> dict[str, Any]:
    """`decode` for what is no envelope, whatever its keys."""
    found: dict[str, Any] = {}
    key = ""
    try:
        for key, item in fields.items():
            found[key] = decode(item)
    except SessionFormatError as error:
        raise _inside(key, error) from error.__cause__
    return found


def _read_list(items: list[Any]) -> list[Any]:
    found: list[Any] = []
    try:
        for item in items:
            found.append(decode(item))  # noqa: PERF401  # how far it came says where the fault is
    except SessionFormatError as error:
        raise _inside(len(found), error) from error.__cause__
    return found


def _inside(key: str | int, error: SessionFormatError) -> SessionFormatError:
    """*error* as seen from one level above."""
    return SessionFormatError(path=join(step("", key), error.path), reason=error.reason)


def _envelope(kind: str, value: Any) -> dict[str, Any]:
    return {MARK: kind, "v": value}


def _write_str(value: str) -> Any:
    if is_plain(value):
        return value
    return _envelope("str", base64.b64encode(value.encode("utf-8", "surrogatepass")).decode())


def _write_int(value: int) -> Any:
    return value if -(2**63) <= value < 2**63 else _envelope("int", hex(value))


def _write_float(value: float) -> Any:
    return value if math.isfinite(value) else _envelope("float", repr(value))


def _write_dict(value: Mapping[Any, Any]) -> Any:
    if has_plain_keys(value):
        return {key: encode(item) for key, item in value.items()}
    return _envelope("dict", [[encode(key), encode(item)] for key, item in value.items()])


def _write_list(value: Iterable[Any]) -> list[Any]:
    return [encode(item) for item in value]


def _write_datetime(value: dt.datetime) -> Any:
    body: list[Any] = [value.replace(tzinfo=None).isoformat() if _zone(value) else value.isoformat()]
    if _zone(value) or value.fold:
        body += [_zone(value), value.fold]
    return _envelope("datetime", body)


def _zone(value: dt.datetime) -> str | list[int] | None:
    if isinstance(value.tzinfo, zoneinfo.ZoneInfo):
        return value.tzinfo.key
    offset = value.utcoffset()
    # Text would do, but Python's fromisoformat takes an offset of less than a second for none.
    return [offset // dt.timedelta(microseconds=1)] if offset and abs(offset) < dt.timedelta(seconds=1) else None


_WRITERS: Final[dict[type, Callable[[Any], Any]]] = {
    str: _write_str,
    int: _write_int,
    float: _write_float,
    dict: _write_dict,
    FrozenDict: _write_dict,
    list: _write_list,
    FrozenList: _write_list,
    tuple: lambda value: _envelope("tuple", _write_list(value)),
    frozenset: lambda value: _envelope("set", _write_list(value)),
    bytes: lambda value: _envelope("bytes", base64.b64encode(value).decode()),
    dt.datetime: _write_datetime,
    dt.date: lambda value: _envelope("date", value.isoformat()),
    dt.timedelta: lambda value: _envelope("timedelta", [value.days, value.seconds, value.microseconds]),
    uuid.UUID: lambda value: _envelope("uuid", str(value)),
    decimal.Decimal: lambda value: _envelope("decimal", str(value)),
}


def _read_datetime(body: list[Any]) -> dt.datetime:
    value = dt.datetime.fromisoformat(body[0])
    if len(body) == 1:
        return value
    zone, fold = body[1:]
    if isinstance(zone, list):
        (offset,) = cast("list[int]", zone)
        return value.replace(tzinfo=dt.timezone(dt.timedelta(microseconds=offset)), fold=fold)
    return value.replace(tzinfo=value.tzinfo if zone is None else zoneinfo.ZoneInfo(zone), fold=fold)


def _read_pairs(body: list[Any]) -> dict[Any, Any]:
    if not all(isinstance(pair, list) and len(cast("list[object]", pair)) == 2 for pair in body):
        raise TypeError("a dict's items are pairs")
    return _whole(dict(_read_list(body)), body)


def _whole(found: _T, body: list[Any]) -> _T:
    """*found* itself, which lost nothing that stood in *body*: equal members would become one."""
    if len(cast("Sized", found)) != len(body):
        raise ValueError("two members are equal")
    return found


def _read_timedelta(body: list[Any]) -> dt.timedelta:
    days, seconds, microseconds = body
    return dt.timedelta(days, seconds, microseconds)


_READERS: Final[dict[str, tuple[type, Callable[[Any], Any]]]] = {
    "str": (str, lambda body: base64.b64decode(body, validate=True).decode("utf-8", "surrogatepass")),
    "int": (str, lambda body: int(body, 16)),
    "float": (str, lambda body: {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}[body]),
    "dict": (list, _read_pairs),
    "tuple": (list, lambda body: tuple(_read_list(body))),
    "set": (list, lambda body: _whole(frozenset(_read_list(body)), body)),
    "bytes": (str, lambda body: base64.b64decode(body, validate=True)),
    "datetime": (list, _read_datetime),
    "date": (str, dt.date.fromisoformat),
    "timedelta": (list, _read_timedelta),
    "uuid": (str, uuid.UUID),
    "decimal": (str, decimal.Decimal),
}
"""Each kind of envelope: what its body is, and how that is read."""


def _open_envelope(value: dict[str, Any]) -> Any:
    kind = value[MARK]
    known = _READERS.get(kind) if isinstance(kind, str) else None
    if known is None or value.keys() != {MARK, "v"}:
        raise SessionFormatError(path="", reason=f"an envelope of the unknown kind {shorten(kind)}")
    body_type, reader = known
    body = value["v"]
    if not isinstance(body, body_type):
        raise SessionFormatError(path="v", reason=f"an envelope of kind {kind!r} that holds {type(body).__name__}")
    try:
        return reader(body)
    except SessionFormatError as error:
        raise _inside("v", error) from error.__cause__
    except RecursionError:
        raise
    except Exception as error:
        raise SessionFormatError(path="", reason=f"an envelope of kind {kind!r} that can't be read") from error
