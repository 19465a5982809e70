"""JSON Schemas as models are shown them, and what pydantic's checks of values come to."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, cast

if TYPE_CHECKING:
    from pydantic import ValidationError
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


MOST_PROBLEMS: Final = 1000
"""How many problems of one value are named."""


def problems_of(refusal: ValidationError, name: str, *, skipped: int = 0) -> Mapping[str, str]:
    """What *refusal* says is wrong, by place from *name* on, less the first *skipped* steps.

    More than `MOST_PROBLEMS` are only counted: pydantic takes seconds to name a million, and the event loop waits.
    """
    count = refusal.error_count()
    if count > MOST_PROBLEMS:
        return {name: f"{count} problems, too many to name"}
    problems: dict[str, str] = {}
    for error in refusal.errors(include_url=False, include_context=False, include_input=False):
        problems.setdefault(path_of(name, error["loc"][skipped:]), error["msg"])
    return problems


@contextmanager
def checking() -> Generator[None]:
    """A check of values, which a cancellation can't reach: one that its validators raise is a failure of theirs."""
    try:
        yield
    except asyncio.CancelledError as error:
        raise RuntimeError("a validator raised CancelledError, though nobody could cancel it") from error
