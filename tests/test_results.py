from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from chatflow.core.messages import (
    AudioPart,
    FilePart,
    ImagePart,
    Part,
    TextPart,
    UnknownPart,
    freeze_result,
)
from chatflow.core.values import freeze
from chatflow.engines.common_form import as_json
from chatflow.running.results import LEAST_CHARACTERS, ResultLimits
from tests import strategies

MARKER = re.compile(r"\n\[\.\.\. (\d+) characters were left out here \.\.\.\]\n")
FAMILY = "👩\u200d👩\u200d👧"

long_texts = st.builds(
    lambda pieces, times: "".join(pieces) * times,
    st.lists(st.one_of(st.text(max_size=30), st.sampled_from([FAMILY, "e\u0301", "👍🏽", "\ud83d\ude00"])), min_size=1),
    st.integers(1, 40),
)
limits = st.integers(LEAST_CHARACTERS, 400)


def of_characters(characters: int | None) -> ResultLimits:
    """Limits on text alone."""
    return ResultLimits(characters=characters, size=None)


def cut(content: Any, characters: int | None = None, size: int | None = None) -> Any:
    """What is stored of a tool's result."""
    return ResultLimits(characters=characters, size=size).cut(freeze_result(content, "result"))[0]


def image(size: int) -> ImagePart:
    """A picture of so many bytes."""
    return ImagePart(data=bytes(size), media_type="image/png")


# --- text ---


def check_cut(text: str, stored: str, limit: int) -> None:
    """Check that *stored* is *text* by the rule that is documented."""
    assert len(stored) <= limit
    (marker,) = MARKER.finditer(stored)
    begin, end = stored[: marker.start()], stored[marker.end() :]
    assert text.startswith(begin)
    assert text.endswith(end)
    assert int(marker[1]) == len(text) - len(begin) - len(end)


@given(long_texts, limits)
@example("x" * 101, 100)
def test_any_text_is_cut_by_the_rule(text: str, limit: int) -> None:
    """Of any text at most so much is stored; it begins and ends as the text does, and the number between is right."""
    stored, left_out = of_characters(limit).cut(text)
    if len(text) <= limit:
        assert (stored, left_out) == (text, "")
        return
    assume("characters were left out" not in text)
    check_cut(text, stored, limit)
    assert left_out == f"{len(text) - len(MARKER.sub('', stored))} characters"


def test_beginning_and_end() -> None:
    """Three quarters of what there is room for are the text's beginning, a quarter its end."""
    stored = cut("b" * 1000 + "e" * 1000, 246)
    assert stored == "b" * 150 + "\n[... 1800 characters were left out here ...]\n" + "e" * 50


@given(st.text(max_size=300))
def test_short_text_is_the_same_object(text: str) -> None:
    """What is within the limits is returned as it is."""
    assert of_characters(300).cut(text)[0] is text
    assert of_characters(None).cut(text * 10)[0] == text * 10


@pytest.mark.parametrize("character", [FAMILY, "e\u0301\u0323", "👍🏽", "\ud83d\ude00", "☎\ufe0f"], ids=ascii)
@pytest.mark.parametrize("offset", range(6))
def test_no_character_is_torn(character: str, offset: int) -> None:
    """A character of several code points, or surrogates, is kept whole or left out whole."""
    stored = cut("x" * offset + character * 300, 200)
    marker = MARKER.search(stored)
    assert marker is not None
    begin, end = stored[offset : marker.start()], stored[marker.end() :]
    assert begin == character * (len(begin) // len(character))
    assert end == character * (len(end) // len(character))


@given(limits, st.integers(0, 3))
def test_endless_character_is_cut(limit: int, offset: int) -> None:
    """What is written as one character without end is cut too, and no surrogate pair in it torn."""
    text = "x" * offset + "\u200d\ud83d\ude00" * 2000
    stored = cut(text, limit)
    check_cut(text, stored, limit)
    assert not re.search("[\ud800-\udbff](?![\udc00-\udfff])|(?<![\ud800-\udbff])[\udc00-\udfff]", stored)


@given(long_texts, limits)
def test_cutting_again_changes_nothing(text: str, limit: int) -> None:
    """What was cut is within the limit."""
    once = of_characters(limit).cut(text)[0]
    assert of_characters(limit).cut(once) == (once, "")


# --- other values ---


@given(strategies.values, limits)
def test_any_value_is_kept_or_becomes_its_json(value: Any, limit: int) -> None:
    """A value stays what it is unless its JSON is longer than the limit: then it becomes that JSON, cut as text is."""
    frozen = freeze({"a": [value] * 10})
    stored, left_out = of_characters(limit).cut(frozen)
    text = as_json(frozen)
    if len(text) <= limit:
        assert stored is frozen
        assert left_out == ""
    else:
        assert stored == of_characters(limit).cut(text)[0]


def test_value_without_a_limit() -> None:
    """Without a limit a value of any size stays what it is."""
    value = freeze([1] * 100_000)
    assert of_characters(None).cut(value)[0] is value


# --- parts ---


def texts_of(parts: tuple[Part, ...]) -> str:
    """The texts among parts, joined."""
    return "".join(part.text for part in parts if isinstance(part, TextPart))


@given(st.lists(st.one_of(strategies.parts, long_texts.map(TextPart)), min_size=1, max_size=8), limits)
def test_texts_among_parts_are_cut_as_one(parts: list[Part], limit: int) -> None:
    """The texts among parts are cut as if they were one, and what else stands among them stays, in order."""
    text = texts_of(tuple(parts))
    assume("characters were left out" not in text)
    stored = cut(parts, limit)
    others = [part for part in parts if not isinstance(part, TextPart)]
    assert [part for part in stored if not isinstance(part, TextPart)] == others
    assert texts_of(stored) == cut(text, limit)
    if len(text) <= limit:
        assert stored == tuple(parts)


def test_text_that_begins_where_is_cut() -> None:
    """The marker stands once, also where one text ends and another begins there; what is left out whole is gone."""
    stored = cut([TextPart("b" * 150), "x" * 900, "y" * 900, "e" * 50], 246)
    assert [part.text for part in stored] == [
        "b" * 150,
        "\n[... 1800 characters were left out here ...]\n",
        "e" * 50,
    ]


def test_picture_in_what_is_cut() -> None:
    """A picture between two texts of which a part is left out stands where it stood."""
    stored = cut(["b" * 1000, image(1), "e" * 1000], 246)
    assert stored == (
        TextPart("b" * 150 + "\n[... 1800 characters were left out here ...]\n"),
        image(1),
        TextPart("e" * 50),
    )


@pytest.mark.parametrize(
    ("part", "named"),
    [
        (image(101), "image/png of 110 bytes"),
        (ImagePart(data=bytes(101)), "ImagePart of 101 bytes"),
        (ImagePart(url="data:image/png;base64," + "A" * 101), "ImagePart of 123 bytes"),
        (AudioPart(data=bytes(101), media_type="audio/wav"), "audio/wav of 110 bytes"),
        (FilePart(data=bytes(101), filename="a.pdf"), "FilePart of 106 bytes"),
        (FilePart(data=b"", media_type="m" * 200), "m" * 77 + "... of 200 bytes"),
        (UnknownPart("video", {"of": "x" * 100}), "video of 110 bytes"),
    ],
    ids=["image", "of no type", "URL that holds data", "recording", "file", "type", "unknown"],
)
def test_part_that_is_too_large(part: Part, named: str) -> None:
    """A part of more bytes than a result may have gives way to a text that says what it was, and how large."""
    stored, left_out = ResultLimits(characters=None, size=100).cut((TextPart("It:"), part))
    text = f"[left out: {named}; the pictures and files of a result may have 100]"
    assert stored == (TextPart("It:"), TextPart(text))
    assert left_out == "pictures or files: 1"


def test_parts_count_together() -> None:
    """Pictures are kept in order as long as there is room; a smaller one after a larger may still have some."""
    stored = cut([image(40), image(60), image(20), image(30)], size=100)
    assert [type(part).__name__ for part in stored] == ["ImagePart", "TextPart", "ImagePart", "TextPart"]


def test_both_limits() -> None:
    """What says that a picture was left out counts as text, and both are told of."""
    parts = [image(1000)] * 20
    stored, left_out = ResultLimits(characters=200, size=10).cut(tuple(parts))
    assert len(texts_of(stored)) <= 200
    assert re.fullmatch(r"pictures or files: 20, \d+ characters", left_out)


@given(st.lists(strategies.parts, min_size=1, max_size=5))
def test_parts_without_limits(parts: list[Part]) -> None:
    """Without limits parts are returned as they are."""
    kept = tuple(parts)
    assert ResultLimits(characters=None, size=None).cut(kept)[0] is kept
