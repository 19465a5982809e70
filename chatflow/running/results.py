"""How much of a tool's result is stored: what is larger is cut by rule, with a marker that says how much is missing."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator
from typing import Any, Final

import attrs

from chatflow.core.messages import Part, TextPart, UnknownPart, parts_of
from chatflow.engines.common_form import as_json
from chatflow.exceptions import cut

LEAST_CHARACTERS: Final = 100
"""The smallest limit: room for the marker, and for a few words around it."""

_LONGEST_CHARACTER: Final = 32
"""Code points that one character is taken to have at most; what has more is no language's."""

_JOINER: Final = "\u200d"


@attrs.frozen(kw_only=True)
class ResultLimits:
    """What one result may have: *characters* of text, and *size*, bytes of pictures and the like; None for any number.

    - Text that is longer keeps its beginning, three quarters of what there is room for, and its end. The marker between
      them counts towards the limit. No character is torn that consists of several code points.
    - A value whose JSON is longer becomes that JSON, as text, and is cut as such.
    - Among parts the texts count together, and are cut as if they were one; what else stands where they are cut stays.
    - A picture, recording or file that *size* has no room for, after those before it, gives way to a text that says so.
    """

    characters: int | None
    size: int | None

    def cut(self, content: Any) -> tuple[Any, str]:
        """What is stored of *content*, which `freeze_result` made; and what was left out, for a log: empty for nothing.

        What is within the limits is returned as it is, the same object.
        """
        parts = parts_of(content)
        if parts:
            return self._cut_parts(parts)
        if self.characters is None:
            return content, ""
        text = content if isinstance(content, str) else as_json(content)
        gap = self._gap(text)
        return (text[: gap[0]] + _marker(gap) + text[gap[1] :], _left_out(gap)) if gap else (content, "")

    def _cut_parts(self, parts: tuple[Part, ...]) -> tuple[tuple[Part, ...], str]:
        fitting = parts if self.size is None else tuple(self._fitting(parts, self.size))
        large = sum(new is not old for new, old in zip(fitting, parts, strict=True))
        left_out = [f"pictures or files: {large}"] if large else []
        gap = self._gap("".join(part.text for part in fitting if isinstance(part, TextPart)))
        if gap:
            fitting = tuple(_without(gap, fitting))
            left_out.append(_left_out(gap))
        return (fitting, ", ".join(left_out)) if left_out else (parts, "")

    @staticmethod
    def _fitting(parts: tuple[Part, ...], most: int) -> Iterator[Part]:
        room = most
        for part in parts:
            size = 0 if isinstance(part, TextPart) else _size(part)
            if size > room:
                yield TextPart(
                    f"[left out: {_kind(part)} of {size} bytes; the pictures and files of a result may have {most}]"
                )
                continue
            room -= size
            yield part

    def _gap(self, text: str) -> tuple[int, int] | None:
        """From where to where *text* is left out; None where it is short enough."""
        if self.characters is None or len(text) <= self.characters:
            return None
        room = self.characters - len(_marker((0, len(text))))
        start = room * 3 // 4
        end = len(text) - (room - start)
        return _untorn(text, start, -1), _untorn(text, end, 1)


def _marker(gap: tuple[int, int]) -> str:
    return f"\n[... {gap[1] - gap[0]} characters were left out here ...]\n"


def _left_out(gap: tuple[int, int]) -> str:
    return f"{gap[1] - gap[0]} characters"


def _without(gap: tuple[int, int], parts: tuple[Part, ...]) -> Iterator[Part]:
    """*parts* without what stands in the *gap* of their joined texts."""
    start, end = gap
    place = 0
    for part in parts:
        if not isinstance(part, TextPart):
            yield part
            continue
        begin, place = place, place + len(part.text)
        marker = _marker(gap) if begin <= start < place else ""
        text = part.text[: max(0, start - begin)] + marker + part.text[max(0, end - begin) :]
        if text:
            yield part if text == part.text else TextPart(text)


def _kind(part: Part) -> str:
    named = part.type if isinstance(part, UnknownPart) else getattr(part, "media_type", None)
    return cut(named or type(part).__name__, 80)


def _size(part: Part) -> int:
    if isinstance(part, UnknownPart):
        return len(as_json(part.fields))
    fields: dict[str, Any] = attrs.asdict(part, recurse=False)
    return sum(len(value) for value in fields.values() if value is not None)


def _untorn(text: str, place: int, step: int) -> int:
    """The place nearest to *place*, in the direction of *step*, where text can be cut and no character is torn."""
    last = place + _LONGEST_CHARACTER * step
    for nearest in range(place, last, step):
        if not 0 < nearest < len(text) or not _tears(text, nearest):
            return nearest
    return last + step * (0 < last < len(text) and _tears_pair(text, last))


def _tears(text: str, place: int) -> bool:
    before, after = text[place - 1], text[place]
    return (
        _JOINER in {before, after}
        or unicodedata.category(after).startswith("M")
        or "\U0001f3fb" <= after <= "\U0001f3ff"  # a colour of skin
        or _tears_pair(text, place)
    )


def _tears_pair(text: str, place: int) -> bool:
    """Whether half of a surrogate pair stands on either side; Python has them where a text came in UTF-16."""
    return "\ud800" <= text[place - 1] <= "\udbff" and "\udc00" <= text[place] <= "\udfff"
