"""What an agent's answers are to be where it has an *output_type*: the schema a model is told, and the check.

Both are pydantic's, as those of tools' arguments are. pydantic is loaded with the first output type, not by
`import chatflow`.
"""

from __future__ import annotations

import inspect
import json
import re
import types
import typing
from collections.abc import Mapping
from typing import Any, Final, cast

from chatflow.core.mirrors import readable
from chatflow.core.schemas import checking, problems_of, schema_generator, without_titles
from chatflow.core.values import FrozenDict, freeze_mapping

ANSWER: Final = "answer"
"""The field that an answer stands in which is no object by itself: models answer with objects. Paths begin with it."""

_OF_HINTS: Final = ("typing", "typing_extensions")
"""Where the kinds of annotations are from that are no classes, such as those of `typing.NewType`."""

LONGEST_ANSWER: Final = 1_000_000
"""Characters. What is longer is not even looked at: as long as it is checked, the event loop waits."""

_OPENS: Final = re.compile(r"[\[{]")
_BRACKET: Final = re.compile(r"[\[\]{}]")


class OutputError(Exception):
    """An answer is not of the type that was asked for.

    Attributes:
        problems: What is wrong, by place, such as ``answer.items[3].amount``.
    """

    def __init__(self, problems: Mapping[str, str]) -> None:
        self.problems: Final = FrozenDict(problems)
        super().__init__("; ".join(f"{path}: {problem}" for path, problem in problems.items()))


class Output:
    """What the answers of an agent with *output_type* are to be.

    Raises:
        Exception: Whatever stands in the way of describing the type to a model, or of checking that a value is of it.
    """

    def __init__(self, output_type: Any) -> None:
        from pydantic import TypeAdapter, ValidationError

        _refuse_what_is_no_type(output_type)
        self._refusal: Final = ValidationError
        hint = readable(output_type)
        self._adapter: Final = TypeAdapter[Any](hint)
        schema = _object_of(without_titles(self._adapter.json_schema(schema_generator=schema_generator())))
        by_name: Any = types.GenericAlias(dict, (str, hint))
        self._in_field: Final = None if schema.get("type") == "object" else TypeAdapter[dict[str, Any]](by_name)
        self.schema: Final = freeze_mapping(schema if self._in_field is None else _in_field(schema), "output_type")
        """The JSON Schema of an answer, always an object's."""

    def read(self, text: str) -> Any:
        """The value that *text* holds: as JSON, or in the one JSON object or array among words without brackets.

        Checked as pydantic does, laxly unless the type says otherwise: the text ``"5"`` is taken for an int. An answer
        that is no object stands in the field ``answer`` of one, or by itself.

        Raises:
            OutputError: It holds no such value, or is longer than `LONGEST_ANSWER`.
            Exception: Whatever the type's own validators raise other than `ValueError` and `AssertionError`.
                `RuntimeError` in place of a cancellation that nobody asked for.
        """
        if len(text) > LONGEST_ANSWER:
            raise OutputError({ANSWER: f"it has {len(text)} characters, and may have {LONGEST_ANSWER}"})
        found, value = _json_in(text)
        is_in_field = isinstance(value, dict) and list(cast("dict[str, Any]", value)) == [ANSWER]
        in_field = self._in_field if is_in_field else None
        try:
            with checking():
                if in_field is not None:
                    return in_field.validate_json(found)[ANSWER]
                return self._adapter.validate_json(found)
        except self._refusal as refusal:
            problems = problems_of(refusal, ANSWER, skipped=0 if in_field is None else 1)
        raise OutputError(problems)


def _refuse_what_is_no_type(output_type: Any) -> None:
    if output_type is str:
        raise TypeError("text is what an agent answers without one; leave it out")
    if inspect.isroutine(output_type):
        raise TypeError("it is a function, and an output type is a type")  # pydantic would call it
    made_of: type[object] = type(cast("object", output_type))
    is_hint = typing.get_origin(output_type) is not None or made_of.__module__ in _OF_HINTS
    if not isinstance(output_type, type) and not is_hint:
        raise TypeError(f"it is an instance of {made_of.__name__}, and an output type is a type")


def _json_in(text: str) -> tuple[bytes, Any]:
    """The JSON in *text*, and what it means."""
    whole = text.strip()
    try:
        try:
            return whole.encode(), json.loads(whole)
        except json.JSONDecodeError:
            begins = _OPENS.search(whole)
            if begins is None:
                raise
        start = begins.start()
        value, end = json.JSONDecoder().raw_decode(whole, start)
    except UnicodeEncodeError:
        raise OutputError({ANSWER: "it holds half a surrogate pair, which is no text"}) from None
    except RecursionError:
        raise OutputError({ANSWER: "it is nested too deeply"}) from None
    except ValueError as error:
        raise OutputError({ANSWER: f"it is no JSON: {error}"}) from None
    if _BRACKET.search(whole, end):
        raise OutputError({ANSWER: "there are brackets outside of the JSON, so that nobody can tell which is meant"})
    return whole[start:end].encode(), value


def _object_of(schema: dict[str, Any]) -> dict[str, Any]:
    """*schema* with what it refers to as a whole in its place, as for a type that holds itself."""
    reference = schema.get("$ref")
    if reference is None:
        return schema
    rest = {keyword: value for keyword, value in schema.items() if keyword != "$ref"}
    return {**schema["$defs"][reference.rpartition("/")[2]], **rest}


def _in_field(schema: dict[str, Any]) -> dict[str, Any]:
    shared = {"$defs": schema["$defs"]} if "$defs" in schema else {}
    inner = {keyword: value for keyword, value in schema.items() if keyword != "$defs"}
    properties = {ANSWER: inner}
    return {"type": "object", "properties": properties, "required": [ANSWER], "additionalProperties": False, **shared}
