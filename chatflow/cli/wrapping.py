"""Text in a column of a terminal, broken between words, whole or in pieces as they come."""

from __future__ import annotations

import unicodedata
from typing import Final

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from chatflow.cli.safe import shown

_NARROWEST: Final = 20
"""Cells of a column, however little room there is beside what stands before it."""

_TAB: Final = " " * 4

_OPENING: Final = frozenset({"Ps", "Pi"})
_CLOSING: Final = frozenset({"Pe", "Pf", "Po"})
"""Unicode's categories of what stays with the character after it, and of what stays with the one before."""


class Column:
    """Breaks text into lines of at most *width* cells; None for lines of any length.

    A line is broken between words and beside wide characters, which have no spaces between them; a word that is wider
    than a line is broken where it has to be. Spaces at a break go, those at the beginning of a line stay.
    """

    # rich breaks only text that is whole, and a model's answer is to be seen as it comes.

    def __init__(self, width: int | None) -> None:
        self._width: Final = width
        self._lines: list[str] = []
        self._used = 0
        self._word = ""
        """The beginning of a word whose end has not come."""

    def add(self, text: str) -> list[str]:
        """What may be shown now: the first of it stands in the line that has begun, all other are new lines."""
        if self._width is None:
            return text.split("\n")
        self._lines = [""]
        for each in text.replace("\t", _TAB):
            self._take(each, self._width)
        return self._lines

    def end(self) -> list[str]:
        """What is left to be shown, as `add` gives it."""
        self._lines = [""]
        if self._width is not None:
            self._put_word(self._width)
        return self._lines

    def _take(self, character: str, width: int) -> None:
        cells = cell_len(character)
        if character == "\n":
            self._put_word(width)
            self._break()
        elif character.isspace():
            self._put_word(width)
            if self._used + cells <= width:
                self._put(character, cells)
        else:
            if cell_len(self._word) + cells > width or (self._word and _may_part(self._word[-1], character)):
                self._put_word(width)
            self._word += character

    def _put_word(self, width: int) -> None:
        cells = cell_len(self._word)
        if self._used and self._used + cells > width:
            self._break()
        self._put(self._word, cells)
        self._word = ""

    def _put(self, text: str, cells: int) -> None:
        self._lines[-1] += text
        self._used += cells

    def _break(self) -> None:
        self._lines.append("")
        self._used = 0


def _may_part(before: str, after: str) -> bool:
    """Whether a line may end between two characters that are no spaces."""
    cells = {cell_len(before), cell_len(after)}
    if 0 in cells or max(cells) == 1:  # a mark without a place of its own, or two letters
        return False
    return unicodedata.category(before) not in _OPENING and unicodedata.category(after) not in _CLOSING


class Flow:
    """Text that is printed behind *begin*, in pieces as they come.

    At a terminal its lines are broken between words, and further ones stand behind *margin*, which is as wide as
    *begin*; elsewhere they are as long as they are.
    """

    def __init__(self, console: Console, begin: Text, margin: Text) -> None:
        self._console: Final = console
        self._margin: Final = margin
        self._style = ""
        self._column: Final = Column(max(_NARROWEST, console.width - begin.cell_len) if console.is_terminal else None)
        self._print(begin)

    def add(self, text: str, style: str = "") -> None:
        """Print it; at a terminal all but its last word, which may go on."""
        self._style = style
        self._show(self._column.add(shown(text, lines=True)))

    def end(self) -> None:
        """Print what is left, and end the line."""
        self._show(self._column.end())
        self._console.print()

    def _show(self, lines: list[str]) -> None:
        first, *others = lines
        self._print(Text(first, self._style))
        for line in others:
            self._console.print()
            self._print(self._margin)
            self._print(Text(line, self._style))

    def _print(self, text: Text) -> None:
        self._console.print(text, end="")
