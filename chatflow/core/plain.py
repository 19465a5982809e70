"""What comes from outside as plain JSON: a copy that holds nothing else, made within bounds.

Nothing that is looked at is trusted. No method of it is called, so that no class of somebody's can lie, and what takes
more than its share of time or memory is refused before it is copied.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any, Final, cast

import attrs

from chatflow.core.envelopes import decode
from chatflow.core.values import MARK, MAX_DEPTH, FrozenDict, FrozenList, is_plain, step
from chatflow.exceptions import SessionFormatError

MAX_LEVELS: Final = MAX_DEPTH + 12
"""Levels of nesting: those of a value, which may end in an envelope, and those of the form that it stands in."""

_VALUE_COSTS: Final = 32
"""Characters that a value counts for beside its text, since whatever it is it takes time and memory."""

_SAME_HASH: Final = 100
"""Members of a set, or keys of a dict, that may share a hash: each is looked for among all that do."""

_name_of: Final = vars(type)["__qualname__"].__get__
"""A class's name, as no class can tell it."""


def plain_copy(data: object, max_characters: int) -> Any:
    """A copy of *data*, which is plain JSON: dicts with string keys, lists, text, numbers, true, false and null.

    Each value counts as many characters as its text and its key have, and 32.

    Raises:
        SessionFormatError: It holds something else, text that JSON has no form for, an integer of more than 64 bits, a
            number that is not finite, nests too deeply (as does what holds itself), or counts more than
            *max_characters*. The error names the path.
    """
    return _Copying(max_characters).copy(data)


@attrs.define(eq=False)
class _Level:
    """A dict or list around the value that is looked at: what of it is still to come, its copy, and where we are."""

    items: Iterator[tuple[str | int, object]]
    copy: dict[str | int, object] | list[object]
    key: str | int = 0


class _Copying:
    """Step by step, and not by recursion, whose end is not ours to tell."""

    def __init__(self, max_characters: int) -> None:
        self._most: Final = max_characters
        self._left = max_characters
        self._levels: list[_Level] = []

    def copy(self, data: object) -> Any:
        whole: list[object] = []
        self._levels.append(_Level(iter([(0, data)]), whole))
        while self._levels:
            level = self._levels[-1]
            found = next(level.items, None)
            if found is None:
                self._levels.pop()
                self._refuse_collisions(level.copy)
                continue
            level.key, value = found
            kept = self._take(value)
            if isinstance(level.copy, list):
                level.copy.append(kept)
            else:
                level.copy[level.key] = kept
        return whole[0]

    def _take(self, value: object) -> object:
        """A copy of *value*; of what holds others an empty one, to be filled next."""
        self._spend(_VALUE_COSTS)
        kind = type(value)
        # Compared by `is`: a metaclass may say that its class is equal to any.
        if kind is str:
            self._check_text(cast("str", value))
        elif kind is int:
            if not -(2**63) <= cast("int", value) < 2**63:
                raise self._fault("an integer of more than 64 bits")
        elif kind is float:
            if not math.isfinite(cast("float", value)):
                raise self._fault("a number that is not finite")
        elif kind is dict or kind is FrozenDict:
            return self._open_dict(cast("dict[object, object]", value))
        elif kind is list or kind is FrozenList:
            return self._open_list(cast("list[object]", value))
        elif value is not None and kind is not bool:
            raise self._fault(f"{_name_of(kind)} is no type of plain JSON")
        return value

    def _open_dict(self, value: dict[object, object]) -> object:
        self._spend(0, ahead=len(value))
        items = tuple(value.items())  # at once: another thread may be changing it
        for key, _ in items:
            if type(key) is not str:
                raise self._fault("a key that is no string")
            self._check_text(key)
        return self._open(cast("tuple[tuple[str, object], ...]", items), {})

    def _open_list(self, value: list[object]) -> object:
        self._spend(0, ahead=len(value))
        return self._open(enumerate(tuple(value)), [])

    def _open(self, items: Iterable[tuple[str | int, object]], copy: dict[str | int, object] | list[object]) -> object:
        if len(self._levels) > MAX_LEVELS:
            raise self._fault(f"nested deeper than {MAX_LEVELS} levels, or in itself")
        self._levels.append(_Level(iter(items), copy))
        return copy

    def _check_text(self, text: str) -> None:
        self._spend(len(text))
        if not is_plain(text):
            raise self._fault("text with a NUL or half a surrogate pair, which stands in an envelope")

    def _spend(self, characters: int, *, ahead: int = 0) -> None:
        """Count, or refuse; also what has so many values *ahead* that they can't all be counted."""
        self._left -= characters
        if self._left < ahead * _VALUE_COSTS:
            raise self._fault(f"the whole is larger than {self._most} characters, which max_characters allows")

    def _refuse_collisions(self, copy: dict[str | int, object] | list[object]) -> None:
        """Refuse a set, or a dict's keys, whose members were made to share a hash: time grows with their square."""
        if not isinstance(copy, dict) or copy.get(MARK) not in ("set", "dict") or not isinstance(copy.get("v"), list):
            return
        body = cast("list[list[object]]", copy["v"])
        if len(body) <= _SAME_HASH:
            return
        try:
            members = body if copy[MARK] == "set" else [pair[0] for pair in body]
            hashes = Counter(hash(decode(member)) for member in members)
        except Exception:  # noqa: BLE001  # what can't be read is refused with its path when it is
            return
        if max(hashes.values()) > _SAME_HASH:
            raise self._fault(f"more than {_SAME_HASH} members that share a hash")

    def _fault(self, reason: str) -> SessionFormatError:
        path = ""
        for level in self._levels[1:]:  # the first one holds the whole
            path = step(path, level.key)
        return SessionFormatError(path=path, reason=reason)
