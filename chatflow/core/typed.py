"""Kept values as instances of the type they were made of: what `AgentSession.get` does.

No class is named in what is kept: the caller says which one it is, and cattrs makes it. Nothing is coerced on the way,
whatever a class or cattrs would do: what was made is frozen again, and has to be what was kept. Only fields that a
class has got since then, with a default, may come on top.
"""

from __future__ import annotations

import datetime as dt
import decimal
import enum
import sys
import types
import uuid
from collections.abc import Callable, Iterable, Sequence
from dataclasses import is_dataclass
from typing import Any, Final, Literal, TypeVar, cast, get_args, get_origin, get_type_hints, overload

import attrs
from cattrs import Converter, StructureHandlerNotFoundError, transform_error
from cattrs.errors import ForbiddenExtraKeysError
from cattrs.gen import make_dict_structure_fn
from cattrs.strategies import configure_union_passthrough

from chatflow.core.values import freeze, thaw
from chatflow.exceptions import UnstorableValueError

_T = TypeVar("_T")

_SCALARS: Final = (str, int, float, bool, bytes, dt.datetime, dt.date, dt.timedelta, uuid.UUID, decimal.Decimal)


class MismatchError(Exception):
    """A value is not of the type that was asked for.

    Attributes:
        path: Where in the value it goes wrong, such as ``user_prefs.theme`` or ``items[3].amount``.
        reason: What is wrong there.
    """

    def __init__(self, *, path: str, reason: str) -> None:
        self.path = path
        self.reason = reason
        super().__init__(f"{path}: {reason}")


class _ModelError(Exception):
    """A pydantic model refuses a value, at the place *inside* it."""

    def __init__(self, inside: str, reason: str) -> None:
        self.inside = inside
        super().__init__(reason)


@overload
def typed(value: Any, kind: type[_T], path: str) -> _T: ...
@overload
def typed(value: Any, kind: Any, path: str) -> Any: ...
def typed(value: Any, kind: Any, path: str) -> Any:
    """*value*, as `freeze` keeps it, as an instance of *kind* that belongs to the caller alone.

    *kind* is a class or whatever stands in an annotation: attrs classes, dataclasses, pydantic models, enums, typed
    dicts, scalars and containers of these; of a union, the member that can be told from the fields it has.

    Raises:
        MismatchError: The value is no *kind*; the error names the path, which begins with *path*.
        TypeError: No kept value can be told to be a *kind*, such as a union of classes with the same fields.
    """
    try:
        made = _converter.structure(thaw(value), kind)
        again = freeze(made)
    except Exception as error:
        unknown = _unknown_type(error)
        if unknown is not None:
            raise TypeError(f"{path} can't be read as {_name(kind)}: {unknown}") from error
        where, reason = _first_fault(error, path)
        raise MismatchError(path=where, reason=reason) from error
    changed = _first_change(value, again, path)
    if changed is not None:
        raise MismatchError(path=changed, reason=f"as {_name(kind)} it would be another value than what is kept")
    return made


def check_comes_back(value: Any, kept: Any, path: str) -> None:
    """Raise `MismatchError` if an instance in *value*, which `freeze` has *kept*, would not come back equal.

    A class may leave out, rename or convert what its instances hold; that is better known when a value is set than when
    it is asked for.
    """
    kind: Any = cast("Any", type(value))
    if issubclass(kind, list | tuple):
        for index, (item, theirs) in enumerate(zip(value, kept, strict=True)):
            check_comes_back(item, theirs, f"{path}[{index}]")
        return
    if issubclass(kind, dict):
        for (key, item), theirs in zip(value.items(), kept.values(), strict=True):
            check_comes_back(item, theirs, _below(path, key))
        return
    if isinstance(value, _SCALARS) and kind is not type(kept) and not isinstance(value, enum.Enum):
        raise MismatchError(path=path, reason=f"a {_name(kind)} would come back as a {type(kept).__name__}")
    if not (isinstance(value, enum.Enum) or _is_class_with_fields(kind) or _is_model(kind)):
        return
    try:
        made = typed(kept, kind, path)
    except TypeError as error:
        raise MismatchError(path=path, reason=str(error)) from error
    is_told_apart = kind.__eq__ is not object.__eq__ and not getattr(kind, "__parameters__", ())
    if is_told_apart and made != value:
        raise MismatchError(
            path=path, reason=f"{_name(kind)} would come back as another value than the one that was set"
        )


def _name(kind: Any) -> str:
    return kind.__qualname__ if isinstance(kind, type) else str(kind)


# --- making ------------------------------------------------------------------------------------------------------

_converter: Final = Converter(detailed_validation=True, forbid_extra_keys=True)


def _scalar(value: Any, kind: Any) -> Any:
    if isinstance(kind, enum.EnumMeta):  # as of a StrEnum, which cattrs takes for a kind of str
        return kind(value)
    if type(value) is kind or (kind is float and type(value) is int):
        return value
    raise TypeError(f"it is no {kind.__name__} but of type {type(value).__name__}")


def _as_it_is(value: Any, _: Any) -> Any:
    return value


def _nothing(value: Any, _: Any) -> None:
    if value is not None:
        raise TypeError(f"it is not None but of type {type(value).__name__}")


def _literal(value: Any, kind: Any) -> Any:
    for member in get_args(kind):
        plain = freeze(member)
        if type(plain) is type(value) and plain == value:
            return member
    raise ValueError(f"it is none of {', '.join(map(repr, get_args(kind)))}")


def _origin(kind: Any) -> Any:
    return get_origin(kind) or kind


def _is_class_with_fields(kind: Any) -> bool:
    origin = _origin(kind)
    return isinstance(origin, type) and (attrs.has(origin) or is_dataclass(origin))


def _fields_of(kind: Any) -> Callable[[Any, Any], Any]:
    """How a class is made of the mapping of its fields, also of those that its constructor does not take."""
    open_types = getattr(kind, "__parameters__", ())
    if open_types:
        filled_in = kind[(Any,) * len(open_types)]
        return lambda value, _: _converter.structure(value, filled_in)
    make = make_dict_structure_fn(
        kind,
        _converter,
        _cattrs_forbid_extra_keys=True,
        _cattrs_include_init_false=True,
        _cattrs_detailed_validation=True,
    )

    def hook(value: Any, asked: Any) -> Any:
        if not isinstance(value, dict):
            raise TypeError(f"it is no {_name(kind)} but of type {type(value).__name__}")
        return make(cast("dict[str, Any]", value), asked)

    return hook


def _is_named_tuple(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, tuple) and hasattr(cast("object", kind), "_fields")


def _named_tuple(value: Any, kind: Any) -> Any:
    hints = get_type_hints(kind)
    return kind._make(_converter.structure(value, _tuple_of(hints.get(name, Any) for name in kind._fields)))


def _tuple_of(kinds: Iterable[Any]) -> Any:
    return types.GenericAlias(tuple, tuple(kinds))


def _is_model(kind: Any) -> bool:
    pydantic: Any = sys.modules.get("pydantic")  # whoever asks for a model has imported it
    return pydantic is not None and isinstance(kind, type) and issubclass(kind, pydantic.BaseModel)


def _model(value: Any, kind: Any) -> Any:
    pydantic: Any = sys.modules["pydantic"]
    try:
        return kind.model_validate(value, by_alias=False, by_name=True)
    except pydantic.ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        raise _ModelError(_joined(first["loc"]), first["msg"]) from error


def _joined(steps: Iterable[str | int]) -> str:
    return "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in steps)


def _sequence(value: Any, kind: Any) -> Any:
    """A list or a tuple, whichever it was: both are sequences, and neither comes back as the other."""
    (item_kind,) = get_args(kind) or (Any,)
    as_kind: Any = _tuple_of((item_kind, ...)) if isinstance(value, tuple) else types.GenericAlias(list, item_kind)
    return _converter.structure(value, as_kind)


# What is registered last is asked first.
for _kind in _SCALARS:
    _converter.register_structure_hook(_kind, _scalar)
_converter.register_structure_hook_func(lambda kind: kind is None or kind is type(None), _nothing)
_converter.register_structure_hook_func(lambda kind: kind is Any or kind is object, _as_it_is)
_converter.register_structure_hook_func(lambda kind: _origin(kind) is Sequence, _sequence)
_converter.register_structure_hook_func(lambda kind: _origin(kind) is Literal, _literal)
_converter.register_structure_hook_func(_is_named_tuple, _named_tuple)
_converter.register_structure_hook_factory(_is_class_with_fields, _fields_of)
_converter.register_structure_hook_func(_is_model, _model)
configure_union_passthrough(
    str | int | float | bool | bytes | None | dt.datetime | dt.date | dt.timedelta | uuid.UUID | decimal.Decimal,
    _converter,
)


# --- faults ------------------------------------------------------------------------------------------------------


def _unknown_type(error: BaseException) -> str | None:
    """What is wrong with the type, where the error says that nobody can make one, and nothing of the value."""
    if isinstance(error, BaseExceptionGroup):
        group = cast("BaseExceptionGroup[BaseException]", error)
        return next(filter(None, map(_unknown_type, group.exceptions)), None)
    if isinstance(error, StructureHandlerNotFoundError):
        return f"no kept value can be told to be a {_name(error.type_)}"
    return str(error) if isinstance(error, NameError) else None


def _first_fault(error: Exception, path: str) -> tuple[str, str]:
    if isinstance(error, UnstorableValueError):
        return f"{path}.{error.path}" if error.path else path, error.reason
    inside = ""

    def reason_of(fault: BaseException, _: type | None) -> str:
        nonlocal inside
        if isinstance(fault, _ModelError):
            inside = inside or fault.inside
        if isinstance(fault, ForbiddenExtraKeysError):
            return f"the class has no field {', '.join(map(repr, sorted(fault.extra_fields)))}"
        if isinstance(fault, RecursionError):
            return "it is nested too deeply for this type"
        return "it is missing" if isinstance(fault, KeyError) else str(fault) or repr(fault)

    found = transform_error(error, path=path, format_exception=reason_of)[0]
    reason, _, where = found.rpartition(" @ ")
    return where + inside, reason


def _first_change(kept: Any, again: Any, path: str) -> str | None:
    """Where *again* is another plain value than *kept*, by types too; fields on top of the kept ones are none."""
    if type(kept) is not type(again):
        return path
    if isinstance(kept, dict):
        others = {_typed_form(key): item for key, item in again.items()}
        for key, item in cast("dict[Any, Any]", kept).items():  # type: ignore[redundant-cast]  # not for pyright
            place = _below(path, key)
            changed = place if _typed_form(key) not in others else _first_change(item, others[_typed_form(key)], place)
            if changed is not None:
                return changed
        return None
    if isinstance(kept, list | tuple):
        items = cast("Sequence[Any]", kept)
        if len(items) != len(again):
            return path
        changes = (_first_change(item, again[index], f"{path}[{index}]") for index, item in enumerate(items))
        return next(filter(None, changes), None)
    return None if kept is again or _typed_form(kept) == _typed_form(again) else path


def _below(path: str, key: object) -> str:
    return f"{path}.{key}" if isinstance(key, str) else f"{path}[{key!r}]"


def _typed_form(value: Any) -> Any:
    """A plain value that can be a key, in a form in which types count: 1, 1.0 and True are three values."""
    kind: Any = cast("Any", type(value))
    if kind is tuple or kind is frozenset:
        return kind, kind(map(_typed_form, value))
    return kind, value
