"""What chat completions and the Responses API have in common: values as text, tools' names, arguments, counts."""

from __future__ import annotations

import base64
import datetime as dt
import json
import math
import re
from collections import Counter
from collections.abc import Mapping
from typing import Any, Final, NoReturn, TypeVar, cast

from chatflow.core.messages import AudioPart, FilePart, ImagePart
from chatflow.core.prompt import EMPTY_TEXT
from chatflow.core.values import FrozenDict, freeze_mapping
from chatflow.exceptions import UnstorableValueError, cut, shorten

_T = TypeVar("_T")

PROVIDER_KEY: Final = "chatflow_provider"
"""In `extra`: whose fields these are. They go back to that provider, and to no other, which would refuse them."""

INVALID_ARGUMENTS_KEY: Final = "chatflow_invalid_arguments"
"""In `extra`: arguments that are no JSON object, as the model wrote them, by the call's position: ``{"0": "{..."}``.

The call itself has empty arguments. A position and not an id, since ids may be empty or used twice in one message.
"""

_BARE_NAMES: Final = (
    # Bare Gemini names go to Vertex AI in litellm, whose credentials few people have.
    (re.compile(r"gemini-"), "gemini"),
    (re.compile(r"claude-"), "anthropic"),
    (re.compile(r"(ft:)?gpt-|chatgpt-|o\d"), "openai"),
    (re.compile(r"grok-"), "xai"),
    (re.compile(r"mistral-"), "mistral"),
    (re.compile(r"deepseek-"), "deepseek"),
    (re.compile(r"command-"), "cohere"),
)

_NOT_IN_A_NAME: Final = re.compile(r"[^a-zA-Z0-9_-]")

_BEGINS_A_NAME: Final = re.compile(r"[a-zA-Z_]")

_WORD: Final = re.compile(r"[a-z]+(_[a-z]+)+|[A-Z]+(_[A-Z]+)*")

_LONGEST_INT: Final = 4096
"""Bits; Python refuses to write much longer ones as decimals."""


def litellm_name(model: str) -> str:
    """The name by which litellm knows a model: with its provider in front, where it is clear which one is meant."""
    if "/" not in model:
        for pattern, provider in _BARE_NAMES:
            if pattern.match(model):
                return f"{provider}/{model}"
    return model


def provider_of(model: str) -> str:
    """The provider in litellm's name of a model."""
    return litellm_name(model).partition("/")[0]


def sendable(text: str) -> str:
    """The text, with what UTF-8 lacks replaced: lone surrogates can be stored, but not be sent."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def all_sendable(value: _T) -> _T:
    """The same with all texts in it: ids, URLs and what a provider said before come from elsewhere too."""
    items: Any = value  # checkers know a value's kind in each case, and nothing of what is in it
    made: Any = value
    match value:
        case str() if not value.isascii():
            made = sendable(value)
        case dict():
            made = {all_sendable(key): all_sendable(item) for key, item in items.items()}
        case list():
            made = [all_sendable(item) for item in items]
        case _:
            pass
    return cast("_T", made)


def text_or_mark(text: str) -> str:
    """The text, or where there is none, one that says so."""
    return text if text.strip() else EMPTY_TEXT


def as_json(value: Any) -> str:
    """A value as JSON; what JSON lacks becomes text that a model can read."""
    return json.dumps(_plain(value), ensure_ascii=False)


def function_name(name: str) -> str:
    """A tool's name as providers take it.

    A model may make up a tool's name, and in the history no provider takes back what it would not have taken first.
    """
    # Gemini looks at how a name begins too, and Bedrock wants a letter there.
    plain = _NOT_IN_A_NAME.sub("_", name) or "unknown"
    return (plain if _BEGINS_A_NAME.match(plain) else f"tool{plain}")[:64]


def arguments_of(raw: str) -> FrozenDict | None:
    """A call's arguments from the text that the model wrote, or None if `parse_arguments` refuses it."""
    try:
        return parse_arguments(raw)
    except ValueError:
        return None


def parse_arguments(raw: str) -> FrozenDict:
    """A call's arguments from the text that the model wrote.

    Raises:
        ValueError: It is no JSON object, or one that leaves it open what is meant; the error tells the model why, in a
            line or two.
    """
    try:
        found = json.loads(
            raw if raw.strip() else "{}", object_pairs_hook=_object, parse_float=_number, parse_constant=_no_number
        )
        if not isinstance(found, dict):
            raise ValueError(f"they are {_KINDS[type(found)]}")  # noqa: TRY004, TRY301  # a model's doing, not a caller's
        return freeze_mapping(cast("dict[str, Any]", found), "")
    except RecursionError as error:
        raise ValueError("they nest too deeply") from error
    except UnstorableValueError as error:
        raise ValueError(cut(error.reason, 150)) from error
    except ValueError as error:
        raise ValueError(cut(str(error), 150)) from error


_KINDS: Final = {
    type(None): "null",
    list: "a list",
    str: "a string",
    int: "a number",
    float: "a number",
    bool: "a boolean",
}


def data_uri(part: ImagePart | AudioPart | FilePart, default: str) -> str:
    """The part's bytes in a URI, of the kind *default* where the part says none."""
    return f"data:{part.media_type or default};base64,{base64_text(part.data or b'')}"


def base64_text(data: bytes) -> str:
    """Bytes as base64."""
    return base64.b64encode(data).decode("ascii")


def audio_format(media_type: str | None) -> str:
    """OpenAI's word for a kind of sound."""
    # "audio/ogg; codecs=opus", as voice messages come, is "ogg"
    kind = (media_type or "audio/wav").partition(";")[0].rpartition("/")[2].strip().removeprefix("x-")
    return {"mpeg": "mp3", "wave": "wav"}.get(kind, kind)


def given(fields: Mapping[str, Any], *without: str) -> dict[str, Any]:
    """The fields that hold something, but for these."""
    return {name: value for name, value in fields.items() if name not in without and not _is_blank(value)}


def counts(usage: Mapping[str, Any]) -> dict[str, Any]:
    """The integers in *usage*, also those in mappings inside."""
    counted: dict[str, Any] = {}
    for name, value in usage.items():
        if isinstance(value, int):
            counted[name] = value
        elif isinstance(value, dict) and (details := counts(cast("dict[str, Any]", value))):
            counted[name] = details
    return counted


def plain_code(code: object) -> str | None:
    """The provider's word for what is wrong, where it is a mere word: a text could quote the prompt or the key."""
    return code if isinstance(code, str) and _WORD.fullmatch(code) else None


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        (twice, _), *_ = Counter(key for key, _ in pairs).most_common(1)
        raise ValueError(f"the key {shorten(twice)} stands in them twice")
    return found


def _number(text: str) -> float:
    number = float(text)
    if math.isinf(number):
        raise ValueError(f"the number {cut(text, 40)} is too large")
    return number


def _no_number(text: str) -> NoReturn:
    raise ValueError(f"{text} is no number in JSON")


def _is_blank(value: Any) -> bool:
    values = cast("dict[str, Any]", value).values() if isinstance(value, dict) else [value or None]
    return all(each is None for each in values)


def _plain(value: Any) -> Any:
    items: Any = value  # checkers know a value's kind in each case, and nothing of what is in it
    match value:
        case dict():
            plain: Any = {_key(key): _plain(item) for key, item in items.items()}
        case list() | tuple():
            plain = [_plain(item) for item in items]
        case set() | frozenset():
            plain = [_plain(item) for item in sorted(items, key=repr)]  # one order always: providers cache prompts
        case dt.date():
            plain = value.isoformat()
        case bytes():
            plain = _text_of(value)
        case float() if not math.isfinite(value):
            plain = str(value)
        case int() if value.bit_length() > _LONGEST_INT:
            plain = hex(value)
        case None | str() | int() | float():
            plain = value
        case _:
            plain = str(value)
    return plain


def _text_of(data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return base64_text(data)


def _key(key: Any) -> str:
    plain = _plain(key)
    return plain if isinstance(plain, str) else json.dumps(plain, ensure_ascii=False)
