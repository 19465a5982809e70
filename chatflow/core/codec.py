"""Messages, and the other values that are kept, to JSON and back: with `envelopes`, what decides the wire format.

JSON is written strict (RFC 8259), whatever the value. Wire format 1, as ``chatflow_meta`` and ``to_dict`` name it.
Fields equal to their default are left out; fields that are not known are kept in a message's *extra* under their path,
since a newer version may have written them.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Mapping
from typing import Any, Final, TypeVar, cast

import attrs
import msgspec
from cattrs import Converter, transform_error
from cattrs.gen import make_dict_structure_fn, make_dict_unstructure_fn, override

from chatflow.core.envelopes import decode, decode_fields, encode
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
    parts_of,
)
from chatflow.core.quick import usual_message
from chatflow.core.service import ServiceStep
from chatflow.core.values import MARK, FrozenDict, freeze, freeze_mapping, join
from chatflow.exceptions import SessionFormatError, UnstorableValueError, shorten

FORMAT_VERSION: Final = 1

_T = TypeVar("_T")

_PARTS: Final = "parts"
"""The kind of envelope that a result's parts stand in."""

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


def _each(read: Callable[[Any], _T]) -> Callable[[Any, Any], tuple[_T, ...]]:
    """A hook that reads a list, up to the first item that can't be read: there may be millions of them."""

    def hook(value: Any, _: Any) -> tuple[_T, ...]:
        if not isinstance(value, list):
            raise TypeError(f"a list is needed here, not {type(value).__name__}")
        found: list[_T] = []
        for index, item in enumerate(cast("list[object]", value)):
            try:
                found.append(read(item))
            except Exception as error:
                path, reason = _first_fault(error)
                raise SessionFormatError(path=join(f"[{index}]", path), reason=reason) from error
        return tuple(found)

    return hook


_read_parts: Final = _each(_read_part)


def _read_content(value: Any, _: Any) -> Content:
    if isinstance(value, list):
        return _read_parts(value, None)
    content = decode(value)
    if content is not None and not isinstance(content, str):
        raise TypeError(f"content must be text, parts or null, not {type(content).__name__}")
    return content


def _write_result_content(content: Any) -> Any:
    parts = parts_of(content)
    return {MARK: _PARTS, "v": [_write_part(part) for part in parts]} if parts else encode(content)


def _read_result_content(value: Any, _: Any) -> Any:
    """Parts stand in an envelope that nothing else may stand in, and that stands nowhere else."""
    if not isinstance(value, dict) or cast("dict[str, Any]", value).get(MARK) != _PARTS:
        return decode(value)
    fields = cast("dict[str, Any]", value)
    if fields.keys() != {MARK, "v"} or not fields["v"]:
        raise SessionFormatError(path="", reason="an envelope of parts that holds none, or something else")
    try:
        return _read_parts(fields["v"], None)
    except SessionFormatError as error:
        raise SessionFormatError(path=f"v{error.path}", reason=error.reason) from error


def _read_value(value: Any, _: Any) -> Any:
    return decode(value)


def _read_bool(value: Any, _: Any) -> bool:
    if not isinstance(value, bool):
        raise TypeError(f"true or false is needed here, not {shorten(value)}")
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


def _write_step(step: ServiceStep | None) -> Any:
    return None if step is None else encode(step.to_data())


def _read_step(value: Any, _: Any) -> ServiceStep | None:
    found = decode(value)
    return None if found is None else ServiceStep.from_data(freeze(found, "service"))


_VALUE: Final = override(unstruct_hook=encode, struct_hook=_read_value)
"""A field that holds any value `freeze` accepts; what it must be is checked by the class, whoever makes one."""

_converter = Converter(detailed_validation=True)
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
_register(ToolResult, content=override(unstruct_hook=_write_result_content, struct_hook=_read_result_content))
_register(Handoff, reason=_VALUE, context_updates=_VALUE)
_register(
    AgentResponse,
    usage=_VALUE,
    output=override(omit=True),
    awaiting_approval=override(struct_hook=_each(lambda item: _converter.structure(item, ToolCall))),
)
_register(
    Message,
    content=override(unstruct_hook=_write_content, struct_hook=_read_content),
    tool_calls=override(struct_hook=_each(lambda item: _converter.structure(item, ToolCall))),
    tool_results=override(struct_hook=_each(lambda item: _converter.structure(item, ToolResult))),
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
_register(
    Entry,
    iteration=override(struct_hook=_read_count),
    service=override(unstruct_hook=_write_step, struct_hook=_read_step),
    index=override(struct_hook=_read_count),
)

_FIELDS: Final = {kind: {field.name for field in attrs.fields(kind)} for kind in (Message, ToolCall, ToolResult)}


def _unknown_fields(data: dict[str, Any]) -> dict[str, Any]:
    """What a newer version, or another program, has written into a message beside the fields known here, by path."""
    unknown = {name: value for name, value in data.items() if name not in _FIELDS[Message]}
    for name, kind in (("tool_calls", ToolCall), ("tool_results", ToolResult)):
        items: list[dict[str, Any]] = data.get(name) or []
        for index, item in enumerate(items):
            unknown |= {f"{name}[{index}].{key}": item[key] for key in item if key not in _FIELDS[kind]}
    return unknown


def message_to_data(message: Message) -> dict[str, Any]:
    """One message as what JSON can hold."""
    data: dict[str, Any] = _converter.unstructure(message, Message)
    return data


def message_from_data(data: object) -> Message:
    """The message that `message_to_data` wrote. Unlike `message_from_json`, it takes no field that is not known.

    Raises:
        SessionFormatError: The data is no such message; the error names the path.
    """
    return _built(data, _build_known_message)


def message_to_json(message: Message) -> str:
    """One message as strict JSON."""
    return msgspec.json.encode(message_to_data(message)).decode()


def message_from_json(text: str | bytes) -> Message:
    """The message that `message_to_json` wrote.

    Raises:
        SessionFormatError: The text is no such message; the error names the path.
    """
    return usual_message(text) or _read(text, _build_message)


def _build_message(data: Any) -> Message:
    if not isinstance(data, dict):
        raise SessionFormatError(path="", reason="a message must be an object")
    fields = cast("dict[str, Any]", data)
    present = {name: value for name, value in fields.items() if value is not None}
    if "timestamp" not in present:
        raise SessionFormatError(path="timestamp", reason=_MISSING)
    message = _converter.structure(present, Message)
    unknown = _unknown_fields(fields)
    return attrs.evolve(message, extra={**decode_fields(unknown), **message.extra}) if unknown else message


def _build_known_message(data: Any) -> Message:
    message = _build_message(data)
    unknown = next(iter(_unknown_fields(data)), None)
    if unknown is not None:
        raise SessionFormatError(path=unknown, reason="a message has no such field")
    return message


def response_to_json(response: AgentResponse) -> str:
    """A stored answer as strict JSON."""
    return msgspec.json.encode(_converter.unstructure(response, AgentResponse)).decode()


def response_from_json(text: str | bytes) -> AgentResponse:
    """The answer that `response_to_json` wrote; `SessionFormatError` for anything else."""
    return _read(text, lambda data: _converter.structure(data, AgentResponse))


def entry_to_json(entry: Entry) -> str:
    """A line of a turn's journal as strict JSON."""
    return msgspec.json.encode(_converter.unstructure(entry, Entry)).decode()


def entry_from_json(text: str | bytes) -> Entry:
    """The line that `entry_to_json` wrote; `SessionFormatError` for anything else."""
    return _read(text, lambda data: _converter.structure(data, Entry))


def values_to_json(values: Mapping[str, Any]) -> str:
    """A frozen state or metadata mapping as strict JSON."""
    return msgspec.json.encode(encode(values)).decode()


def values_from_json(text: str | bytes) -> FrozenDict:
    """The mapping that `values_to_json` wrote; `SessionFormatError` for anything else."""
    return _read(text, lambda data: freeze_mapping(decode(data), ""))


_MISSING: Final = "it is missing"


def _read(text: str | bytes, build: Callable[[Any], _T]) -> _T:
    return _built(text, lambda found: build(msgspec.json.decode(found)))


def _built(data: Any, build: Callable[[Any], _T]) -> _T:
    try:
        return build(data)
    except Exception as error:
        path, reason = _first_fault(error)
        raise SessionFormatError(path=path, reason=reason) from error


def _first_fault(error: Exception) -> tuple[str, str]:
    if isinstance(error, SessionFormatError | UnstorableValueError):
        return error.path, error.reason
    if isinstance(error, msgspec.DecodeError | UnicodeEncodeError):
        return "", f"it is not JSON: {error}"
    if isinstance(error, RecursionError):
        return "", "it is nested too deeply"
    fault = transform_error(error, format_exception=_reason)[0]
    reason, _, found = fault.rpartition(" @ ")
    path = found.removeprefix("$").removeprefix(".")
    first: BaseException = error
    while isinstance(first, BaseExceptionGroup):
        first = cast("BaseExceptionGroup[BaseException]", first).exceptions[0]
    if isinstance(first, SessionFormatError | UnstorableValueError):
        return join(path, first.path), first.reason
    return path, reason


def _reason(error: BaseException, _: type | None) -> str:
    return _MISSING if isinstance(error, KeyError) else str(error) or repr(error)
