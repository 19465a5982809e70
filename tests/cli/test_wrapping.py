from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from chatflow.cli.wrapping import Column

_BITS = ["a", "bc", "long", " ", "  ", "\n", "\t", "-", "好", "。", "\uff08", "e\u0301", "\U0001f600"]
TEXTS = st.lists(st.sampled_from(_BITS)).map("".join)
WIDTHS = st.integers(4, 30)


def broken(width: int | None, *pieces: str) -> list[str]:
    """The lines of a text that comes in these pieces."""
    column, lines = Column(width), [""]
    for first, *others in [*(column.add(piece) for piece in pieces), column.end()]:
        lines[-1] += first
        lines += others
    return lines


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("", [""]),
        ("one two", ["one two"]),
        ("one two three", ["one two ", "three"]),
        ("seven77 seven77", ["seven77 ", "seven77"]),
        ("eight888 x", ["eight888", "x"]),
        ("one two   x", ["one two ", "x"]),
        ("a\n\nb", ["a", "", "b"]),
        ("  if x:\n\tgo", ["  if x:", "    go"]),
        ("see abcdefghijklmnopqr st", ["see ", "abcdefgh", "ijklmnop", "qr st"]),
        ("好世界好世界", ["好世界好", "世界"]),
        ("abc好世界好", ["abc好世", "界好"]),
        ("ab e\u0301e\u0301e\u0301e\u0301", ["ab e\u0301e\u0301e\u0301e\u0301"]),
        ("好\u0301 x", ["好\u0301 x"]),
        ("abc好世。好", ["abc好", "世。好"]),
        ("ab好世\uff08界\uff09", ["ab好世", "\uff08界\uff09"]),
    ],
)
def test_examples(text: str, lines: list[str]) -> None:
    """Lines end between words and beside wide characters, and within a word only where it is wider than they are."""
    assert broken(8, text) == lines


def test_no_width() -> None:
    """Without a width nothing is broken, held back or changed."""
    assert broken(None, "a\tb " * 50, "c\n", "d") == ["a\tb " * 50 + "c", "d"]


@given(text=TEXTS, width=WIDTHS)
def test_all_of_it_is_there(text: str, width: int) -> None:
    """Nothing is lost but spaces, and no line is wider than there is room."""
    lines = broken(width, text)
    assert "".join("".join(lines).split()) == "".join(text.split())
    assert all(cell_len(line) <= width for line in lines)
    assert len(lines) > text.count("\n")


@given(pieces=st.lists(TEXTS), width=WIDTHS)
def test_pieces(pieces: list[str], width: int) -> None:
    """A text in pieces is broken as it is when it is whole."""
    assert broken(width, *pieces) == broken(width, "".join(pieces))


@given(words=st.lists(st.text("abc-", min_size=1, max_size=10)), width=st.integers(10, 30))
def test_words(words: list[str], width: int) -> None:
    """Words that fit into a line stay whole, and a line holds as many as it can."""
    lines = broken(width, " ".join(words))
    assert " ".join(lines).split() == words
    for line, following in pairwise(lines):
        assert len(line.rstrip()) + 1 + len(following.split()[0]) > width


def test_at_once() -> None:
    """What has come is shown, but for a word whose end has not come."""
    column = Column(20)
    assert column.add("I am he") == ["I am "]
    assert column.add("re. 好") == ["here. "]
    assert column.add("世") == ["好"]
    assert column.end() == ["世"]
