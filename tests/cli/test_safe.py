from __future__ import annotations

import json
import unicodedata
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chatflow.cli.safe import ascii_json, one_line, shown, value_text
from tests.cli.conftest import HOSTILE

any_text = st.text(st.characters(), max_size=50) | st.just(HOSTILE)


@given(any_text)
def test_nothing_steers_the_terminal(text: str) -> None:
    """Whatever the text, what is shown of it holds no control character, no turn of direction, nothing unprintable."""
    categories = {unicodedata.category(character) for character in shown(text) if character not in "\u200c\u200d"}
    assert not categories & {"Cc", "Cf", "Cs", "Zl", "Zp"}


@given(any_text)
def test_lines_stay(text: str) -> None:
    """Where lines are shown as lines, line ends and tabs are all that stays."""
    rest = shown(text, lines=True).replace("\n", "").replace("\t", "")
    assert rest == shown(rest)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("¿Dónde está el pedido?", "¿Dónde está el pedido?"),
        ("👩\u200d👩\u200d👧", "👩\u200d👩\u200d👧"),
        ("\x1b[31m", "\\x1b[31m"),
        ("a\r\nb", "a\\nb"),
        ("\u202e\u2028\ud800", "\\u202e\\u2028\\ud800"),
    ],
)
def test_shown(text: str, expected: str) -> None:
    """What people write stays as it is, what steers a terminal is written out."""
    assert shown(text) == expected


@given(any_text, st.integers(4, 20))
def test_one_line(text: str, limit: int) -> None:
    """The beginning of a text is one safe line, no longer than was asked for."""
    line = one_line(text, limit)
    assert len(line) <= limit
    assert line == shown(line)


@given(
    st.recursive(st.none() | any_text | st.integers(), lambda inner: st.lists(inner) | st.dictionaries(any_text, inner))
)
def test_ascii_json(value: Any) -> None:
    """JSON in ASCII is the same JSON, and holds nothing that a terminal would act on."""
    text = json.dumps(value, ensure_ascii=False)
    plain = ascii_json(text)
    assert json.loads(plain) == json.loads(json.dumps(value))
    assert plain == shown(plain)
    assert plain.isascii()


def test_value_text() -> None:
    """A value is shown as text if it is text, and else as JSON."""
    assert value_text("a") == "a"
    assert value_text({"a": [1]}) == '{"a": [1]}'
