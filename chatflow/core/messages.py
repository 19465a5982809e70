"""The values a conversation is made of: Message, ToolCall, ToolResult, Handoff, AgentResponse."""

from __future__ import annotations

import datetime as dt
import enum
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, Literal, TypeVar, cast, get_args

import attrs

from chatflow.core.values import EMPTY, freeze, freeze_mapping
from chatflow.exceptions import UnstorableValueError

_T = TypeVar("_T")


class Role(enum.StrEnum):
    """Who speaks in a message."""

    USER = "user"
    MODEL = "model"
    SYSTEM = "system"
    TOOL = "tool"


ADDED_BY_KEY: Final = "chatflow_added_by"
"""In a message's `extra`: the context provider that has added it."""

MODEL_KEY: Final = "chatflow_model"
"""In a message's `extra`: the name of the model that has answered, as it was asked for."""


def _require_str(value: object, path: str) -> str:
    if type(value) is str:
        return value
    if isinstance(value, str):
        return str.__str__(value)
    raise TypeError(f"{path} must be a string, not {type(value).__name__}")


def _string(value: Any, field: attrs.Attribute[Any]) -> str:
    return _require_str(value, field.name)


def _optional_string(value: Any, field: attrs.Attribute[Any]) -> str | None:
    return None if value is None else _require_str(value, field.name)


def _boolean(value: Any, field: attrs.Attribute[Any]) -> bool:
    if not isinstance(value, bool):
        raise TypeError(f"{field.name} must be True or False, not {value!r}")
    return value


def _optional_bytes(value: Any, field: attrs.Attribute[Any]) -> bytes | None:
    if value is None:
        return None
    if not isinstance(value, bytes):
        raise TypeError(f"{field.name} must be bytes, not {type(value).__name__}")
    return bytes(value)


def _converter(function: Callable[[Any, attrs.Attribute[Any]], _T]) -> Any:
    return attrs.Converter(function, takes_field=True)


def _mapping(value: Any, field: attrs.Attribute[Any]) -> Mapping[str, Any]:
    return freeze_mapping(value, field.name)


def _optional_mapping(value: Any, field: attrs.Attribute[Any]) -> Mapping[str, Any] | None:
    return None if value is None else freeze_mapping(value, field.name)


@attrs.frozen
class TextPart:
    """Text among other parts."""

    text: str = attrs.field(converter=_converter(_string))


@attrs.frozen(kw_only=True)
class _MediaPart:
    url: str | None = attrs.field(default=None, converter=_converter(_optional_string))
    data: bytes | None = attrs.field(default=None, converter=_converter(_optional_bytes))
    media_type: str | None = attrs.field(default=None, converter=_converter(_optional_string))

    def __attrs_post_init__(self) -> None:
        if (self.url is None) == (self.data is None):
            raise ValueError(f"{type(self).__name__} takes either url or data")


@attrs.frozen(kw_only=True)
class ImagePart(_MediaPart):
    """A picture, by *url* or as bytes (*data*, whose *media_type* says what it is)."""


@attrs.frozen(kw_only=True)
class AudioPart(_MediaPart):
    """A recording, by *url* or as bytes (*data*, whose *media_type* says what it is)."""


@attrs.frozen(kw_only=True)
class FilePart(_MediaPart):
    """A document, by *url* or as bytes (*data*, whose *media_type* says what it is)."""

    filename: str | None = attrs.field(default=None, converter=_converter(_optional_string))


@attrs.frozen
class UnknownPart:
    """A part of a kind this version does not know, carried along unchanged."""

    type: str = attrs.field(converter=_converter(_string))
    fields: Mapping[str, Any] = attrs.field(factory=lambda: EMPTY, converter=_converter(_mapping))

    def __attrs_post_init__(self) -> None:
        known = PART_KINDS.get(self.type)
        if known is not None and self.fields.keys() <= {field.name for field in attrs.fields(known)}:
            raise ValueError(f"a part of type {self.type!r} with these fields is a {known.__name__}")
        if "type" in self.fields:
            raise ValueError("a part's type is its first argument, not one of its fields")


PART_KINDS: Final[dict[str, type[Any]]] = {"text": TextPart, "image": ImagePart, "audio": AudioPart, "file": FilePart}
"""The kinds of parts by the name they are written under."""

Part = TextPart | ImagePart | AudioPart | FilePart | UnknownPart
Content = str | tuple[Part, ...] | None

_PARTS: Final = frozenset(get_args(Part))


@attrs.frozen(kw_only=True)
class ToolCall:
    """A model asks for a tool. *id* is the provider's and may be empty or used again; pairing copes with both."""

    id: str = attrs.field(converter=_converter(_string))
    name: str = attrs.field(converter=_converter(_string))
    args: Mapping[str, Any] = attrs.field(factory=lambda: EMPTY)


@attrs.frozen(kw_only=True)
class ToolResult:
    """What a tool gave back for the call *tool_call_id*: any value chatflow keeps (`freeze`), or parts.

    A part, or a list or tuple of parts and text in which at least one is a part, becomes a tuple of parts in the
    message that holds the result. A part anywhere else in a value is one like any other attrs instance.
    """

    tool_call_id: str = attrs.field(converter=_converter(_string))
    name: str = attrs.field(converter=_converter(_string))
    content: Any
    is_error: bool = attrs.field(default=False, converter=_converter(_boolean))

    @property
    def parts(self) -> tuple[Part, ...]:
        """The content where it is made of parts, as a message holds them; empty where it is another value."""
        return parts_of(self.content)


def parts_of(content: Any) -> tuple[Part, ...]:
    """A kept result's content where it is made of parts; empty where it is another value."""
    items: Any = content
    return items if isinstance(content, tuple) and items and type(items[0]) in _PARTS else ()


def freeze_result(content: Any, path: str) -> Any:
    """What a message keeps of a result's content: a tuple of parts, or what `freeze` makes of it.

    Raises:
        UnstorableValueError: As `freeze` does, or something else stands among parts; the error names its path.
    """
    if type(content) in _PARTS:
        return (content,)
    if type(content) not in {list, tuple} or not any(type(item) in _PARTS for item in content):
        return freeze(content, path)
    parts = tuple(TextPart(item) if isinstance(item, str) else item for item in content)
    for index, part in enumerate(parts):
        if type(part) not in _PARTS:
            reason = f"{type(part).__qualname__} is neither a part nor text, as all must be where one is a part"
            raise UnstorableValueError(path=f"{path}[{index}]", reason=reason)
    return parts


def _role(value: Role | str) -> Role:
    if type(value) is Role:  # a look-up by value takes as long as the rest of a message
        return value
    try:
        return Role(value)
    except ValueError:
        allowed = ", ".join(role.value for role in Role)
        raise ValueError(f"role must be one of {allowed}, not {value!r}") from None


def _content(value: str | Iterable[Part] | None) -> Content:
    if value is None or isinstance(value, str):
        return value if value is None else _require_str(value, "content")
    if not isinstance(value, Iterable) or isinstance(value, bytes | Mapping):
        raise TypeError(f"content must be text, parts or None, not {type(cast('object', value)).__name__}")
    parts = tuple(TextPart(part) if isinstance(part, str) else part for part in value)
    for index, part in enumerate(parts):
        if type(part) not in _PARTS:
            raise TypeError(f"content[{index}] must be a part or text, not {type(part).__name__}")
    return parts


def _each(kind: type[_T], items: Iterable[_T], path: str) -> tuple[_T, ...]:
    found = tuple(items)
    for index, item in enumerate(found):
        if not isinstance(item, kind):
            raise TypeError(f"{path}[{index}] must be a {kind.__name__}, not {type(item).__name__}")
    return found


def _calls(items: Iterable[ToolCall], field: attrs.Attribute[Any]) -> tuple[ToolCall, ...]:
    # Frozen here and not in ToolCall, so that a refusal can name the path from the message on.
    if items == ():
        return ()
    return tuple(
        ToolCall(id=call.id, name=call.name, args=freeze_mapping(call.args, f"{field.name}[{index}].args"))
        for index, call in enumerate(_each(ToolCall, items, field.name))
    )


def _results(items: Iterable[ToolResult]) -> tuple[ToolResult, ...]:
    if items == ():
        return ()
    return tuple(
        ToolResult(
            tool_call_id=result.tool_call_id,
            name=result.name,
            content=freeze_result(result.content, f"tool_results[{index}].content"),
            is_error=result.is_error,
        )
        for index, result in enumerate(_each(ToolResult, items, "tool_results"))
    )


def _utc(value: dt.datetime) -> dt.datetime:
    if type(value) is dt.datetime and value.tzinfo is dt.UTC and not value.fold:
        return value
    if not isinstance(value, dt.datetime):
        raise TypeError(f"timestamp must be a datetime, not {type(value).__name__}")
    if value.utcoffset() is None:
        raise ValueError(f"timestamp must have a time zone, and {value!r} has none")
    exact: dt.datetime = value if type(value) is dt.datetime and not value.fold else freeze(value, "timestamp")
    try:
        return exact.astimezone(dt.UTC)
    except OverflowError as error:
        raise ValueError(f"timestamp {value!r} lies in no year of UTC") from error


def _now() -> dt.datetime:
    return dt.datetime.now(dt.UTC)


@attrs.frozen
class Message:
    """One message of a conversation, frozen: what it holds are copies that nobody else can change.

    Only a model's message has *tool_calls*, and only a tool's message has *tool_results* (at least one). *extra* holds
    what a provider wants back unchanged (reasoning, thought signatures), *usage* what the answer cost. Enum, attrs,
    dataclass and pydantic values become plain values here, so that a message in memory is what a file will give back.

    Raises:
        UnstorableValueError: A value can't be kept; the error names its path.
        TypeError: A field is of a wrong type.
        ValueError: An unknown role, or calls and results on a message of the wrong role.
    """

    role: Role = attrs.field(converter=_role)
    content: Content = attrs.field(default=None, converter=_content)
    tool_calls: tuple[ToolCall, ...] = attrs.field(default=(), converter=_converter(_calls), kw_only=True)
    tool_results: tuple[ToolResult, ...] = attrs.field(default=(), converter=_results, kw_only=True)
    agent_name: str | None = attrs.field(default=None, converter=_converter(_optional_string), kw_only=True)
    usage: Mapping[str, Any] | None = attrs.field(default=None, converter=_converter(_optional_mapping), kw_only=True)
    extra: Mapping[str, Any] = attrs.field(factory=lambda: EMPTY, converter=_converter(_mapping), kw_only=True)
    timestamp: dt.datetime = attrs.field(factory=_now, converter=_utc, kw_only=True)

    def __attrs_post_init__(self) -> None:
        if self.tool_calls and self.role is not Role.MODEL:
            raise ValueError(f"tool_calls belong to a message of role model, not {self.role.value}")
        if bool(self.tool_results) != (self.role is Role.TOOL):
            raise ValueError(
                f"tool_results belong to a message of role tool, not {self.role.value}"
                if self.tool_results
                else "a message of role tool needs tool_results"
            )

    def __deepcopy__(self, memo: dict[int, Any]) -> Message:
        return self  # nothing in it can change; a copy's values would be thawed, and could

    @property
    def text(self) -> str:
        """The message's text: its content, or its text parts joined; empty where there is none."""
        if isinstance(self.content, tuple):
            return "".join(part.text for part in self.content if isinstance(part, TextPart))
        return self.content or ""


@attrs.frozen(kw_only=True)
class Handoff:
    """A tool that returns one hands the conversation to another agent; *context_updates* are merged into the state."""

    target_agent_name: str = attrs.field(converter=_converter(_string))
    reason: str | None = attrs.field(default=None, converter=_converter(_optional_string))
    context_updates: Mapping[str, Any] = attrs.field(factory=lambda: EMPTY, converter=_converter(_mapping))


StopReason = Literal["answer", "tool_limit", "approval", "not_stored"]


def _names(items: Iterable[str]) -> tuple[str, ...]:
    if isinstance(items, str):
        raise TypeError(f"tool_calls_executed must be names, not the text {items!r}")
    return tuple(_require_str(item, f"tool_calls_executed[{index}]") for index, item in enumerate(items))


@attrs.frozen(kw_only=True)
class AgentResponse:
    """What a turn answered.

    *tool_calls_executed* are tools' names in call order; *handoff* is the turn's last one. *duplicate* says that the
    message had been answered before and this is the stored answer. *stop_reason* is ``"answer"``, ``"tool_limit"``
    (the model was cut off from its tools), ``"approval"`` (the calls of *awaiting_approval* wait for a person;
    *content* is what the model said with them, often nothing), or ``"not_stored"`` (a duplicate whose answer nobody
    kept; *content* is empty).

    *output* is what *content* says as the output type of the agent that has answered, where it has one; for a checker
    ``assert isinstance(response.output, Order)`` says which. It is not stored but read from *content* each time, and no
    part of what makes two responses equal; None where a stored answer is not of the type any more, which is logged.
    """

    content: str = attrs.field(converter=_converter(_string))
    active_agent_name: str = attrs.field(converter=_converter(_string))
    tool_calls_executed: tuple[str, ...] = attrs.field(default=(), converter=_names)
    handoff: Handoff | None = attrs.field(
        default=None, validator=attrs.validators.optional(attrs.validators.instance_of(Handoff))
    )
    usage: Mapping[str, Any] | None = attrs.field(default=None, converter=_converter(_optional_mapping))
    duplicate: bool = attrs.field(default=False, converter=_converter(_boolean))
    stop_reason: StopReason = attrs.field(default="answer", validator=attrs.validators.in_(get_args(StopReason)))
    awaiting_approval: tuple[ToolCall, ...] = attrs.field(default=(), converter=_converter(_calls))
    output: Any = attrs.field(default=None, eq=False)
