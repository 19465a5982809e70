"""Values to JSON and back: the one place that decides the wire format.

JSON is written strict (RFC 8259), whatever the value. What JSON has no form for stands in an envelope, an object whose
only keys are ``"$chatflow"`` (the kind) and ``"v"``. A dict that has the key ``"$chatflow"`` itself is written as pairs
in an envelope, so that no data can be taken for one. No class is ever looked up by a name in the data.

Wire format 1, as ``chatflow_meta`` and ``to_dict`` name it. Fields equal to their default are left out; fields that are
not known are kept in a message's *extra* under their path, since a newer version may have written them.
"""

from __future__ import annotations

import base64
import datetime as dt
import decimal
import math
import uuid
import zoneinfo
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, TypeVar, cast

import attrs
import orjson
from cattrs import transform_error
from cattrs.gen import make_dict_structure_fn, make_dict_unstructure_fn, override
from cattrs.preconf.orjson import make_converter

from chatflow.core.journal import Deed, Entry
from chatflow.core.messages import (
    PART_KINDS,
    AgentResponse,
    Content,
    Handoff,
    Message,
    Part,
    Role,
    ToolCall,
    ToolResult,
    UnknownPart,
)
from chatflow.core.values import MARK, FrozenDict, FrozenList, freeze, freeze_mapping, is_plain, is_plain_key
from chatflow.exceptions import SessionFormatError, UnstorableValueError

FORMAT_VERSION: Final = 1

_T = TypeVar("_T")


# --- plain values ------------------------------------------------------------------------------------------------


def encode(value: object) -> Any:
    """*value*, which `freeze` has accepted, as what JSON can hold."""
    writer = _WRITERS.get(type(value))
    return value if writer is None else writer(value)


def decode(value: Any) -> Any:
    """What `encode` was given.

    Raises:
        SessionFormatError: An envelope is not one that this version writes.
    """
    if isinstance(value, dict):
        fields = cast("dict[str, Any]", value)
        return _open_envelope(fields) if MARK in fields else {key: decode(item) for key, item in fields.items()}
    if isinstance(value, list):
        items = cast("list[object]", value)
        return [decode(item) for item in items]
    return value


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
    if all(map(is_plain_key, value)):
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


_READERS: Final[dict[str, Callable[[Any], Any]]] = {
    "str": lambda body: base64.b64decode(body, validate=True).decode("utf-8", "surrogatepass"),
    "int": lambda body: int(body, 16),
    "float": lambda body: {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}[body],
    "dict": lambda body: {decode(key): decode(item) for key, item in body},
    "tuple": lambda body: tuple(decode(item) for item in body),
    "set": lambda body: frozenset(decode(item) for item in body),
    "bytes": lambda body: base64.b64decode(body, validate=True),
    "datetime": _read_datetime,
    "date": dt.date.fromisoformat,
    "timedelta": lambda body: dt.timedelta(*body),
    "uuid": uuid.UUID,
    "decimal": decimal.Decimal,
}


def _open_envelope(value: dict[str, Any]) -> Any:
    kind = value[MARK]
    reader = _READERS.get(kind) if isinstance(kind, str) else None
    if reader is None or value.keys() != {MARK, "v"}:
        raise SessionFormatError(path=MARK, reason=f"an envelope of the unknown kind {kind!r}")
    try:
        return reader(value["v"])
    except (SessionFormatError, RecursionError):
        raise
    except Exception as error:
        raise SessionFormatError(path=MARK, reason=f"an envelope of kind {kind!r} that can't be read") from error


# --- messages ----------------------------------------------------------------------------------------------------

_PART_NAMES: Final = {kind: name for name, kind in PART_KINDS.items()}


def _write_part(part: Part) -> Any:
    if isinstance(part, UnknownPart):
        return encode({"type": part.type, **part.fields})
    fields = attrs.asdict(part, recurse=False, filter=lambda _, value: value is not None)
    return encode({"type": _PART_NAMES[type(part)], **fields})


def _read_part(value: Any) -> Part:
    found = decode(value)
    if not isinstance(found, dict) or "type" not in found:
        raise TypeError("a part must be an object with a type")
    fields = cast("dict[str, Any]", found)
    name = fields.pop("type")
    kind = PART_KINDS.get(name) if isinstance(name, str) else None
    if kind is None or not fields.keys() <= {field.name for field in attrs.fields(kind)}:
        return UnknownPart(name, fields)
    part: Part = kind(**fields)
    return part


def _write_content(content: Content) -> Any:
    return [_write_part(part) for part in content] if isinstance(content, tuple) else encode(content)


def _read_content(value: Any, _: Any) -> Content:
    if isinstance(value, list):
        parts = cast("list[object]", value)
        return tuple(_read_part(part) for part in parts)
    content = decode(value)
    if content is not None and not isinstance(content, str):
        raise TypeError(f"content must be text, parts or null, not {type(content).__name__}")
    return content


def _read_value(value: Any, _: Any) -> Any:
    return decode(value)


def _read_bool(value: Any, _: Any) -> bool:
    if not isinstance(value, bool):
        raise TypeError(f"true or false is needed here, not {value!r}")
    return value


def _read_count(value: Any, _: Any) -> int | None:
    if value is not None and type(value) is not int:
        raise TypeError(f"a whole number is needed here, not {value!r}")
    return value


def _read_timestamp(value: Any, _: Any) -> dt.datetime:
    if not isinstance(value, str):
        raise TypeError("a timestamp must be ISO 8601 text")
    stamp = dt.datetime.fromisoformat(value)
    # chatflow-agent wrote UTC without saying so.
    return stamp if stamp.tzinfo is not None else stamp.replace(tzinfo=dt.UTC)


_VALUE: Final = override(unstruct_hook=encode, struct_hook=_read_value)
"""A field that holds any value `freeze` accepts; what it must be is checked by the class, whoever makes one."""

_converter = make_converter(detailed_validation=True)
_converter.register_structure_hook(str, _read_value)
_converter.register_unstructure_hook(str, encode)
_converter.register_structure_hook(bool, _read_bool)
_converter.register_structure_hook(Role, lambda value, _: Role(value))
_converter.register_unstructure_hook(Role, lambda role: role.value)


def _register(kind: type[Any], /, **fields: Any) -> None:
    _converter.register_unstructure_hook(
        kind, make_dict_unstructure_fn(kind, _converter, _cattrs_omit_if_default=True, **fields)
    )
    _converter.register_structure_hook(kind, make_dict_structure_fn(kind, _converter, **fields))


_register(ToolCall, args=_VALUE)
_register(ToolResult, content=_VALUE)
_register(Handoff, reason=_VALUE, context_updates=_VALUE)
_register(AgentResponse, usage=_VALUE)
_register(
    Message,
    content=override(unstruct_hook=_write_content, struct_hook=_read_content),
    agent_name=_VALUE,
    usage=_VALUE,
    extra=_VALUE,
    timestamp=override(omit_if_default=False, unstruct_hook=dt.datetime.isoformat, struct_hook=_read_timestamp),
)
_register(
    Deed,
    kind=_VALUE,
    key=_VALUE,
    inner=_VALUE,
    # Frozen when it is read, since no class does it: it becomes a value of the session's as it is.
    value=override(unstruct_hook=encode, struct_hook=lambda value, _: freeze(decode(value), "value")),
)
_register(Entry, iteration=override(struct_hook=_read_count), index=override(struct_hook=_read_count))

_FIELDS: Final = {kind: {field.name for field in attrs.fields(kind)} for kind in (Message, ToolCall, ToolResult)}


def _unknown_fields(data: dict[str, Any]) -> dict[str, Any]:
    """What a newer version, or another program, has written into a message beside the fields known here, by path."""
    unknown = {name: decode(value) for name, value in data.items() if name not in _FIELDS[Message]}
    for name, kind in (("tool_calls", ToolCall), ("tool_results", ToolResult)):
        items: list[dict[str, Any]] = data.get(name) or []
        for index, item in enumerate(items):
            unknown |= {f"{name}[{index}].{key}": decode(item[key]) for key in item if key not in _FIELDS[kind]}
    return unknown


def message_to_json(message: Message) -> str:
    """One message as strict JSON."""
    return orjson.dumps(_converter.unstructure(message, Message)).decode()


def message_from_json(text: str | bytes) -> Message:
    """The message that `message_to_json` wrote.

    Raises:
        SessionFormatError: The text is no such message; the error names the path.
    """
    return _read(text, _build_message)


def _build_message(data: Any) -> Message:
    if not isinstance(data, dict):
        raise SessionFormatError(path="", reason="a message must be an object")
    fields = cast("dict[str, Any]", data)
    present = {name: value for name, value in fields.items() if value is not None}
    if "timestamp" not in present:
        raise SessionFormatError(path="timestamp", reason=_MISSING)
    message = _converter.structure(present, Message)
    unknown = _unknown_fields(fields)
    return attrs.evolve(message, extra={**unknown, **message.extra}) if unknown else message


def response_to_json(response: AgentResponse) -> str:
    """A stored answer as strict JSON."""
    return orjson.dumps(_converter.unstructure(response, AgentResponse)).decode()


def response_from_json(text: str | bytes) -> AgentResponse:
    """The answer that `response_to_json` wrote; `SessionFormatError` for anything else."""
    return _read(text, lambda data: _converter.structure(data, AgentResponse))


def entry_to_json(entry: Entry) -> str:
    """A line of a turn's journal as strict JSON."""
    return orjson.dumps(_converter.unstructure(entry, Entry)).decode()


def entry_from_json(text: str | bytes) -> Entry:
    """The line that `entry_to_json` wrote; `SessionFormatError` for anything else."""
    return _read(text, lambda data: _converter.structure(data, Entry))


def values_to_json(values: Mapping[str, Any]) -> str:
    """A frozen state or metadata mapping as strict JSON."""
    return orjson.dumps(encode(values)).decode()


def values_from_json(text: str | bytes) -> FrozenDict:
    """The mapping that `values_to_json` wrote; `SessionFormatError` for anything else."""
    return _read(text, lambda data: freeze_mapping(decode(data), ""))


_MISSING: Final = "it is missing"


def _read(text: str | bytes, build: Callable[[Any], _T]) -> _T:
    try:
        return build(orjson.loads(text))
    except Exception as error:
        path, reason = _first_fault(error)
        raise SessionFormatError(path=path, reason=reason) from error


def _first_fault(error: Exception) -> tuple[str, str]:
    if isinstance(error, SessionFormatError | UnstorableValueError):
        return error.path, error.reason
    if isinstance(error, orjson.JSONDecodeError):
        return "", f"it is not JSON: {error}"
    if isinstance(error, RecursionError):
        return "", "it is nested too deeply"
    fault = transform_error(error, format_exception=_reason)[0]
    reason, _, path = fault.rpartition(" @ ")
    return path.removeprefix("$").removeprefix("."), reason


def _reason(error: BaseException, _: type | None) -> str:
    return _MISSING if isinstance(error, KeyError) else str(error) or repr(error)
