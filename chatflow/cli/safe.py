"""Text that a terminal may be given: in a stored message there could be anything. Pure functions."""

from __future__ import annotations

import re
import unicodedata
from typing import Any, Final

from chatflow.engines.common_form import as_json

_NOT_SHOWN: Final = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})
"""Unicode's categories of what steers a terminal, turns the direction of text, or is no character at all."""

_JOINERS: Final = frozenset("\u200c\u200d")
"""Within words of some scripts, and within pictures that are made of several."""

_BEYOND_ASCII: Final = re.compile("[\x7f-\U0010ffff]")


def shown(text: str, *, lines: bool = False) -> str:
    r"""*text* with what a terminal would act on written out, as ``\x1b``; with *lines* line ends and tabs stay."""
    if text.isprintable():
        return text
    stays = "\n\t" if lines else ""
    return "".join(each if each in stays else _shown(each) for each in text.replace("\r\n", "\n"))


def _shown(character: str) -> str:
    if unicodedata.category(character) not in _NOT_SHOWN or character in _JOINERS:
        return character
    return character.encode("unicode_escape").decode()


def one_line(text: str, limit: int) -> str:
    """The beginning of *text* on one line, as it may be shown."""
    line = shown(" ".join(text[: 4 * limit].split()))
    return line if len(line) <= limit else f"{line[: limit - 3]}..."


def value_text(value: Any) -> str:
    """A value of a message, for a person: text as it is, anything else as the JSON that a model is sent."""
    return value if isinstance(value, str) else as_json(value)


def ascii_json(text: str) -> str:
    """The same JSON in ASCII, without a character that a terminal acts on or can't show."""
    return _BEYOND_ASCII.sub(_escaped, text)


def _escaped(found: re.Match[str]) -> str:
    units = found[0].encode("utf-16-be", "surrogatepass").hex()
    return "".join(f"\\u{units[start : start + 4]}" for start in range(0, len(units), 4))
