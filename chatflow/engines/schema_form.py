"""How a model is told what its answer is to be: by a parameter, or in the system text. Pure functions."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, cast

from chatflow.core.messages import Message, Role
from chatflow.core.values import thaw
from chatflow.engines.common_form import provider_of

NAME: Final = "answer"
"""What the form of the answer is called; providers want a name."""

_STRICT: Final = frozenset({"azure", "openai"})
"""Providers that hold a model to its schema, if the schema is one that they can; and beside tools too."""

_REFUSES_SCHEMAS: Final = frozenset({"deepseek"})
"""Providers of which litellm believes that they take a schema."""

_KNOWN_TO_STRICT: Final = frozenset(
    {
        "$defs",
        "$ref",
        "additionalProperties",
        "anyOf",
        "const",
        "description",
        "enum",
        "items",
        "properties",
        "required",
        "type",
    }
)
"""Keywords of JSON Schema that OpenAI has taken in its strict mode from the beginning; one more, and it refuses all."""


def may_take_schema(model: str) -> bool:
    """Whether litellm is to be believed if it says that this model takes a schema."""
    return provider_of(model) not in _REFUSES_SCHEMAS


def takes_both(model: str) -> bool:
    """Whether the model's provider takes a schema for the answer beside tools, which most refuse."""
    return provider_of(model) in _STRICT


def form_of(schema: Mapping[str, Any], model: str) -> dict[str, Any]:
    """The form of an answer of this *schema*, by name; a strict one where the model's provider can be strict."""
    strict = strict_schema(schema) if provider_of(model) in _STRICT else None
    if strict is not None:
        return {"name": NAME, "schema": strict, "strict": True}
    return {"name": NAME, "schema": thaw(schema)}


def with_schema(messages: Sequence[Message], schema: Mapping[str, Any]) -> tuple[Message, ...]:
    """*messages* with the schema of the answer as the last of the system messages that they begin with."""
    place = next((each for each, message in enumerate(messages) if message.role is not Role.SYSTEM), len(messages))
    text = (
        "Whatever you answer is one JSON value that is valid by this JSON Schema, with no words around it:\n"
        f"{json.dumps(thaw(schema), ensure_ascii=False)}"
    )
    return (*messages[:place], Message(Role.SYSTEM, text), *messages[place:])


def strict_schema(schema: Mapping[str, Any]) -> dict[str, Any] | None:
    """*schema* as OpenAI's strict mode wants it, None if that can't be said.

    Every object has to name all of its fields, require them, and take no others. Where a schema does not speak of
    others they are shut out: what a model can't write nobody has to ignore.
    """
    try:
        strict: dict[str, Any] = _strict(thaw(schema))
    except ValueError:
        return None
    return strict


def _strict(schema: dict[str, Any]) -> dict[str, Any]:
    if not schema or schema.keys() - _KNOWN_TO_STRICT or ("$ref" in schema and len(schema) > 1):
        raise ValueError("keywords that are not known or not beside one another, or none, which is any value")
    closed = dict(schema)
    for keyword in ("$defs", "properties"):
        if keyword in schema:
            closed[keyword] = {name: _strict(each) for name, each in schema[keyword].items()}
    if "anyOf" in schema:
        closed["anyOf"] = [_strict(each) for each in schema["anyOf"]]
    kind = schema.get("type")
    if kind == "array":
        closed["items"] = _strict(schema.get("items", {}))
    elif kind == "object":
        named = cast("Iterable[str]", schema.get("properties", ()))
        if schema.get("additionalProperties", False) is not False or set(schema.get("required", ())) != set(named):
            raise ValueError("fields that have no name or may be left out")
        closed["properties"] = closed.get("properties", {})
        closed["required"] = list(named)
        closed["additionalProperties"] = False
    return closed
