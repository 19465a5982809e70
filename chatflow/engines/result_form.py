"""Tool results as providers take them: text, and the pictures, recordings and files that it names. Pure functions.

Where a result may hold them they stand in it; where it may hold text alone they follow the results of the message, as a
user's message that says where they come from. Between two results nothing may stand.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Final, Literal, TypeAlias

import attrs

from chatflow.core.messages import AudioPart, FilePart, ImagePart, Part, TextPart, ToolResult, UnknownPart
from chatflow.engines.common_form import as_json, litellm_name, provider_of
from chatflow.exceptions import cut

Media: TypeAlias = ImagePart | AudioPart | FilePart

Place: TypeAlias = Literal["inside", "beside", "nowhere"]
"""Where a provider takes a part of a result: in the result, in a user's message after the results, or not at all."""

_WITH_PARTS_IN_RESULTS: Final = re.compile(r"(anthropic|bedrock)/|(gemini|vertex_ai)/(.*/)?gemini-([3-9]|\d\d)")
"""Models, by litellm's names, whose results may hold pictures and PDFs, and for which litellm puts them there."""

_WITHOUT_SOUND: Final = frozenset({"anthropic", "bedrock"})
"""Providers for which litellm drops recordings without a word, and whose models take no other files than PDFs."""

_NOUNS: Final[dict[type[Media], str]] = {ImagePart: "image", AudioPart: "recording", FilePart: "file"}

FROM_TOOLS: Final = "(What tools have returned. It does not come from the user.)"
"""How a user's message begins that holds the pictures of results: the turn under way goes on."""


@attrs.frozen
class SentResult:
    """A result's *text*, which names the parts that come with it, and those that stand *inside* it."""

    result: ToolResult
    text: str
    inside: tuple[Part, ...]


def place_in_completion(part: Media, model: str) -> Place:
    """Where there is room for *part* in what litellm makes of a chat completion's request for *model*.

    In OpenAI's form there is none in results. What litellm would have to fetch by its URL is never inside: there it
    would wait for it in the event loop, or leave it out where it can't be had.
    """
    if part.data is None:
        return "beside"
    is_shown = isinstance(part, ImagePart) or part.media_type == "application/pdf"
    if is_shown and _WITH_PARTS_IN_RESULTS.match(litellm_name(model)):
        return "inside"
    return "nowhere" if provider_of(model) in _WITHOUT_SOUND else "beside"


def place_in_response(part: Media) -> Place:
    """Where there is room for *part* in a request of the Responses API."""
    return "beside" if isinstance(part, AudioPart) else "inside"


def result_text(result: ToolResult) -> str:
    """What a tool gave back as text alone, in which its pictures and the like are only named."""
    (sent,), _ = to_sent_results([result], lambda _: "inside")
    return sent.text


def to_sent_results(
    results: Iterable[ToolResult], place_of: Callable[[Media], Place]
) -> tuple[list[SentResult], list[Part]]:
    """The results that answer one message, and what a user's message after them says: nothing where it is empty.

    Text is sent as it is, blank text and other values as JSON (what JSON lacks as readable text), an error marked as
    one. Pictures are numbered over all of the results.
    """
    sent: list[SentResult] = []
    beside: list[Part] = []
    numbers: Counter[str] = Counter()
    for result in results:
        lines: list[str] = []
        inside: list[Part] = []
        for part in result.parts:
            if isinstance(part, TextPart):
                lines.append(part.text)
                continue
            if isinstance(part, UnknownPart):
                lines.append(f"(part of type {cut(part.type, 80)}{_NOTES['nowhere']})")
                continue
            place, name = place_of(part), _name(part, numbers)
            lines.append(f"({name}{_NOTES[place]})")
            if place == "inside":
                inside.append(part)
            elif place == "beside":
                beside += [TextPart(f"{name}:"), part]
        text = _text("\n".join(filter(str.strip, lines)) if result.parts else result.content)
        if result.is_error and not text.startswith("Error"):
            text = f"Error: {text}"
        sent.append(SentResult(result, text, tuple(inside)))
    return sent, [TextPart(FROM_TOOLS), *beside] if beside else []


_NOTES: Final[dict[Place, str]] = {
    "inside": "",
    "beside": ", which follows the results",
    "nowhere": ", which can't be shown to this model",
}


def _text(content: object) -> str:
    return content if isinstance(content, str) and content.strip() else as_json(content)


def _name(part: Media, numbers: Counter[str]) -> str:
    noun = _NOUNS[type(part)]
    numbers[noun] += 1
    name = f"{noun} {numbers[noun]}"
    return f"{name}, {cut(part.filename, 80)}" if isinstance(part, FilePart) and part.filename else name
