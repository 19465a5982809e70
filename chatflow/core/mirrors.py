"""attrs classes for pydantic, which does not know them: each is read as a model of the same fields, then made.

What a field takes is what its annotation says; then the class itself is called, so that its converters, validators and
defaults are its own. As attrs does, a field that the class does not have is refused.
"""

from __future__ import annotations

import sys
import types
import typing
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final, ForwardRef

import attrs

from chatflow.core.inspection import nearby_names, resolve

if TYPE_CHECKING:
    from pydantic import BaseModel
    from pydantic.fields import FieldInfo

_SHOWN: Final = (str, int, float, bool, type(None))
"""Defaults that a model is told; others are the class's own affair."""


def readable(hint: Any) -> Any:
    """*hint*, with what pydantic can read in place of attrs classes: by themselves, in one another, in containers.

    Loads pydantic if there are any.

    Raises:
        NameError: An annotation of theirs names what is not there.
    """
    mirrors = _Mirrors()
    replaced = mirrors.replaced(hint)
    if not mirrors.models:
        return hint
    for model in mirrors.models.values():
        model.model_rebuild(force=True, _types_namespace=mirrors.models)
    return resolve(replaced, mirrors.models, {})


class _Mirrors:
    """The models that stand for attrs classes, by the names that they refer to one another by."""

    def __init__(self) -> None:
        self.models: Final[dict[str, type[BaseModel]]] = {}
        self._names: Final[dict[Any, str]] = {}

    def replaced(self, hint: Any) -> Any:
        """*hint* with mirrors for attrs classes."""
        origin, arguments = typing.get_origin(hint), typing.get_args(hint)
        if attrs.has(origin or hint):
            return self._mirror(hint, origin or hint, arguments)
        if origin is None or origin is typing.Literal:
            return hint
        if origin is typing.Annotated:
            return _of(typing.Annotated, [self.replaced(arguments[0]), *arguments[1:]])
        inner = [self.replaced(each) for each in arguments]
        if all(mine is theirs for mine, theirs in zip(inner, arguments, strict=True)):
            return hint
        return _of(typing.Union if origin is types.UnionType else origin, inner)

    def _mirror(self, kind: Any, cls: type[Any], arguments: tuple[Any, ...]) -> Any:
        from pydantic import AfterValidator, BaseModel, ConfigDict, create_model

        name = self._names.get(kind)
        if name is None:
            name = self._names[kind] = f"mirror_{len(self._names)}"
            fields: dict[str, Any] = {}
            for place, (field, hint) in enumerate(_fields_of(cls, arguments)):
                alias = typing.cast("str", field.alias)
                own = alias.startswith("_") or hasattr(BaseModel, alias)  # pydantic has other plans for such names
                fields[f"field_{place}" if own else alias] = (self.replaced(hint), _described(field, alias))
            self.models[name] = create_model(
                cls.__name__,
                __config__=ConfigDict(extra="forbid", protected_namespaces=()),
                __module__=cls.__module__,
                __doc__=cls.__doc__,
                **fields,
            )
        return _of(typing.Annotated, [ForwardRef(name), AfterValidator(_maker(cls))])


def _of(generic: Any, arguments: list[Any]) -> Any:
    return generic[tuple(arguments)]


def _fields_of(cls: type[Any], arguments: tuple[Any, ...]) -> list[tuple[attrs.Attribute[Any], Any]]:
    """What the class is made of where it is filled in with *arguments*, each with its type."""
    module = getattr(sys.modules.get(cls.__module__), "__dict__", {})
    hints = typing.get_type_hints(cls, None, nearby_names(module, cls.__qualname__), include_extras=True)
    types_in, owners = _types_in(cls, arguments), _owners(cls)
    return [
        (field, _filled(hints.get(field.name, field.type or Any), types_in.get(owners.get(field.name, cls), {})))
        for field in attrs.fields(cls)
        if field.init
    ]


def _owners(cls: type[Any]) -> dict[str, type[Any]]:
    """The classes that say what each field is: *cls*, or one that it inherits from."""
    own: dict[str, type[Any]] = {}
    for each in reversed(cls.__mro__):
        fields: tuple[Any, ...] = each.__dict__.get("__attrs_attrs__", ())  # attrs' stubs know of no `inherited`
        own |= {field.name: each for field in fields if not field.inherited}
    return own


def _types_in(cls: type[Any], arguments: tuple[Any, ...]) -> dict[type[Any], dict[Any, Any]]:
    """What type variables stand for, by the class that uses them: *cls* and all that it inherits from.

    One and the same variable may stand for another type in each.
    """
    own: dict[Any, Any] = dict(zip(getattr(cls, "__parameters__", ()), arguments, strict=False))
    found = {cls: own}
    for base in cls.__dict__.get("__orig_bases__", cls.__bases__):
        filled_in = tuple(_filled(each, own) for each in typing.get_args(base))
        for each, types_of in _types_in(typing.get_origin(base) or base, filled_in).items():
            found[each] = types_of | found.get(each, {})
    return found


def _filled(hint: Any, types_of: Mapping[Any, Any]) -> Any:
    """*hint* with types in place of type variables."""
    if isinstance(hint, typing.TypeVar):
        return types_of.get(hint, hint)
    # A class has parameters of its own, which mean nothing here; of pydantic's, M[T] is the class M itself.
    uses_ours = typing.get_origin(hint) is not None or hasattr(hint, "__pydantic_generic_metadata__")
    parameters: tuple[Any, ...] = getattr(hint, "__parameters__", ()) if uses_ours else ()
    if not parameters or not all(isinstance(each, typing.TypeVar) for each in parameters):
        return hint
    return hint[tuple(types_of.get(each, each) for each in parameters)]


def _described(field: attrs.Attribute[Any], alias: str) -> FieldInfo:
    from pydantic import Field

    if field.default is attrs.NOTHING:
        return typing.cast("FieldInfo", Field(alias=alias))
    if isinstance(field.default, _SHOWN):
        return typing.cast("FieldInfo", Field(alias=alias, default=field.default))
    return typing.cast("FieldInfo", Field(alias=alias, default_factory=lambda: None))


def _maker(cls: type[Any]) -> Callable[[BaseModel], Any]:
    def make(read: BaseModel) -> Any:
        fields = type(read).model_fields
        given = {fields[name].alias or name: getattr(read, name) for name in read.model_fields_set}
        try:
            return cls(**given)
        except TypeError as error:
            # attrs' own validators raise one, with facts beside the text; pydantic takes a ValueError for a refusal.
            raise ValueError(error.args[0] if error.args else repr(error)) from error

    return make
