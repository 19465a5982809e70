"""JSON Schemas as models are shown them, and the places in a value that pydantic names."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Final, cast

if TYPE_CHECKING:
    from pydantic.json_schema import GenerateJsonSchema


@functools.cache
def schema_generator() -> type[GenerateJsonSchema]:
    """What pydantic is to make schemas with. Loads pydantic."""
    from pydantic.json_schema import GenerateJsonSchema, JsonSchemaWarningKind

    class Generator(GenerateJsonSchema):
        # A default that is not JSON is the program's own affair: the model need not know it.
        ignored_warning_kinds: set[JsonSchemaWarningKind] = {"skipped-choice", "non-serializable-default"}  # noqa: RUF012

    return Generator


_HOLDS_DATA: Final = {"default", "const", "enum", "examples", "required", "discriminator"}
_HOLDS_NAMES: Final = {"properties", "patternProperties", "$defs"}


def without_titles(schema: Any) -> Any:
    """*schema* without titles: pydantic makes them from names, and a model pays for each."""
    if isinstance(schema, list):
        return [without_titles(each) for each in cast("Iterable[Any]", schema)]
    if not isinstance(schema, dict):
        return schema
    cleaned: dict[str, Any] = {}
    for keyword, value in cast("dict[str, Any]", schema).items():
        if keyword in _HOLDS_DATA:
            cleaned[keyword] = value
        elif keyword in _HOLDS_NAMES:
            cleaned[keyword] = {name: without_titles(each) for name, each in value.items()}
        elif keyword != "title":
            cleaned[keyword] = without_titles(value)
    return cleaned


def path_of(name: str, steps: Iterable[int | str]) -> str:
    """The place that *steps* lead to from *name*, such as ``items[3].amount``."""
    return name + "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in steps)
