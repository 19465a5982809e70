from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chatflow.core.messages import (
    AudioPart,
    FilePart,
    ImagePart,
    Message,
    Part,
    Role,
    TextPart,
    ToolCall,
    ToolResult,
    UnknownPart,
)
from chatflow.core.prompt import to_prompt
from chatflow.engines.common_form import as_json
from chatflow.engines.gemini_form import is_for_gemini
from chatflow.engines.litellm_form import to_litellm_messages
from chatflow.engines.responses_form import to_input
from chatflow.engines.result_form import result_text
from tests import strategies
from tests.model_server import refusal
from tests.responses_server import ResponsesServer

PNG = ImagePart(data=b"png", media_type="image/png")
FAR = ImagePart(url="https://pictures.example/1.png")
SOUND = AudioPart(data=b"wav", media_type="audio/wav")
PDF = FilePart(data=b"pdf", media_type="application/pdf", filename="bill.pdf")
SHEET = FilePart(data=b"xls", media_type="application/vnd.ms-excel", filename="bill.xls")

SENT_PNG = {"type": "image_url", "image_url": {"url": "data:image/png;base64,cG5n", "format": "image/png"}}
SENT_FAR = {"type": "image_url", "image_url": {"url": "https://pictures.example/1.png"}}
SENT_SOUND = {"type": "input_audio", "input_audio": {"data": "d2F2", "format": "wav"}}
SENT_PDF = {
    "type": "file",
    "file": {
        "file_data": "data:application/pdf;base64,cGRm",
        "filename": "bill.pdf",
        "format": "application/pdf",
    },
}
FROM_TOOLS = {"type": "text", "text": "(What tools have returned. It does not come from the user.)"}


def history(*contents: Any, is_error: bool = False) -> list[Message]:
    """A question, a call for each content of a result, and the results."""
    calls = [ToolCall(id=f"call{number:05}", name="look", args={"at": number}) for number in range(len(contents))]
    results = [
        ToolResult(tool_call_id=call.id, name="look", content=content, is_error=is_error)
        for call, content in zip(calls, contents, strict=True)
    ]
    return [
        Message(Role.USER, "Show me."),
        Message(Role.MODEL, tool_calls=calls),
        Message(Role.TOOL, tool_results=results),
    ]


def sent(*contents: Any, model: str = "gpt-4o", **fields: Any) -> list[dict[str, Any]]:
    """What stands in a chat completion after the calls whose results have these contents."""
    return to_litellm_messages(history(*contents, **fields), model)[2:]


def text(words: str) -> dict[str, Any]:
    """Text among parts, as it is sent."""
    return {"type": "text", "text": words}


def as_said_to(model: str, words: str) -> str:
    """The text of a result, which is an object for Gemini."""
    return as_json({"content": words}) if is_for_gemini(model) else words


def result(number: int, content: Any) -> dict[str, Any]:
    """A result, as it is sent."""
    return {"role": "tool", "tool_call_id": f"call{number:05}", "content": content}


# --- where results may hold text alone ---


@pytest.mark.parametrize(
    "model", ["gpt-4o", "mistral-large-latest", "openrouter/google/gemini-3-pro", "unheard-of", "gemini-2.5-pro"]
)
def test_pictures_follow_the_results(model: str) -> None:
    """Where results take text alone, each names its pictures, and a user's message after all of them holds those."""
    assert sent(["Front:", PNG, "Back:", FAR], "no picture", PNG, model=model) == [
        result(
            0,
            as_said_to(
                model, "Front:\n(image 1, which follows the results)\nBack:\n(image 2, which follows the results)"
            ),
        ),
        result(1, as_said_to(model, "no picture")),
        result(2, as_said_to(model, "(image 3, which follows the results)")),
        {
            "role": "user",
            "content": [
                FROM_TOOLS,
                text("image 1:"),
                SENT_PNG,
                text("image 2:"),
                SENT_FAR,
                text("image 3:"),
                SENT_PNG,
            ],
        },
    ]


def test_other_kinds_follow_the_results() -> None:
    """Recordings and files follow the results as pictures do, each kind with numbers of its own."""
    assert sent([SOUND, PDF, FilePart(url="file-1")]) == [
        result(
            0,
            "(recording 1, which follows the results)\n(file 1, bill.pdf, which follows the results)"
            "\n(file 2, which follows the results)",
        ),
        {
            "role": "user",
            "content": [
                FROM_TOOLS,
                text("recording 1:"),
                SENT_SOUND,
                text("file 1, bill.pdf:"),
                SENT_PDF,
                text("file 2:"),
                {"type": "file", "file": {"file_id": "file-1"}},
            ],
        },
    ]


def test_texts_alone() -> None:
    """A result of texts alone is their lines, without those that are blank."""
    assert sent([TextPart("a"), " ", TextPart("b")]) == [result(0, "a\nb")]


def test_part_of_an_unknown_kind() -> None:
    """A part of a kind that nobody knows is named, and no more."""
    assert sent(UnknownPart("hologram", {"of": "a"})) == [
        result(0, "(part of type hologram, which can't be shown to this model)")
    ]


def test_failed_call_with_a_picture() -> None:
    """The result of a call that failed says so before it names a picture."""
    assert sent(["It broke:", PNG], is_error=True)[0]["content"].startswith("Error: It broke:\n(image 1")


def test_users_next_message_stays_its_own() -> None:
    """What the user says next comes after the pictures, in a message of its own."""
    said = to_litellm_messages([*history(PNG), Message(Role.USER, "Thanks.")], "gpt-4o")
    assert [message["role"] for message in said] == ["user", "assistant", "tool", "user", "user"]
    assert said[-1]["content"] == "Thanks."


# --- where results may hold pictures ---


@pytest.mark.parametrize("model", ["claude-sonnet-4-5", "gemini-3-pro", "bedrock/a.claude", "vertex_ai/gemini-10-pro"])
def test_pictures_stand_in_their_results(model: str) -> None:
    """Where litellm has a place for them in results, pictures and PDFs stand there, after the text that names them."""
    assert sent(["Front:", PNG, "Bill:", PDF], "none", model=model) == [
        result(0, [text(as_said_to(model, "Front:\n(image 1)\nBill:\n(file 1, bill.pdf)")), SENT_PNG, SENT_PDF]),
        result(1, as_said_to(model, "none")),
    ]


@pytest.mark.parametrize("model", ["claude-sonnet-4-5", "gemini-3-pro"])
def test_picture_by_its_url(model: str) -> None:
    """A picture that is known by its URL follows the results: inside, litellm would wait for it in the event loop."""
    assert sent(FAR, model=model) == [
        result(0, as_said_to(model, "(image 1, which follows the results)")),
        {"role": "user", "content": [FROM_TOOLS, text("image 1:"), SENT_FAR]},
    ]


def test_recording_for_a_model_that_can_hear() -> None:
    """A recording follows the results where the model may hear it."""
    assert sent(SOUND, model="gemini-3-pro")[1]["content"][2] == SENT_SOUND


@pytest.mark.parametrize("part", [SOUND, SHEET, FilePart(data=b"x")])
@pytest.mark.parametrize("model", ["claude-sonnet-4-5", "bedrock/a.claude"])
def test_part_that_would_be_lost(model: str, part: Part) -> None:
    """What litellm would leave out, or the provider refuse, is named as something that can't be shown."""
    (only,) = sent(["It:", part], model=model)
    assert only["content"].startswith("It:\n(")
    assert only["content"].endswith(", which can't be shown to this model)")


# --- the Responses API ---


def test_outputs_hold_pictures_and_files() -> None:
    """In the Responses API a result holds its pictures and files; a recording, which it can't hold, follows."""
    items = to_input(history(["Front:", PNG, FAR, PDF], ["Listen:", SOUND], "none"), "gpt-5")[4:]
    assert items == [
        {
            "type": "function_call_output",
            "call_id": "call00000",
            "output": [
                {"type": "input_text", "text": "Front:\n(image 1)\n(image 2)\n(file 1, bill.pdf)"},
                {"type": "input_image", "detail": "auto", "image_url": "data:image/png;base64,cG5n"},
                {"type": "input_image", "detail": "auto", "image_url": "https://pictures.example/1.png"},
                {"type": "input_file", "filename": "bill.pdf", "file_data": "data:application/pdf;base64,cGRm"},
            ],
        },
        {
            "type": "function_call_output",
            "call_id": "call00001",
            "output": "Listen:\n(recording 1, which follows the results)",
        },
        {"type": "function_call_output", "call_id": "call00002", "output": "none"},
        {
            "role": "user",
            "content": [
                {"type": "input_text", "text": FROM_TOOLS["text"]},
                {"type": "input_text", "text": "recording 1:"},
                {"type": "input_audio", "input_audio": {"data": "d2F2", "format": "wav"}},
            ],
        },
    ]


# --- text alone ---


def test_text_of_a_result() -> None:
    """As text alone a result is what it is sent as, and its parts are named."""
    answers = history(["Front:", PNG, SOUND, UnknownPart("hologram")], {"a": 1})[-1].tool_results
    assert [result_text(each) for each in answers] == [
        "Front:\n(image 1)\n(recording 1)\n(part of type hologram, which can't be shown to this model)",
        '{"a": 1}',
    ]


# --- any results ---


def any_of(contents: Sequence[Any]) -> list[Message]:
    """The prompt of a conversation with these results."""
    return list(to_prompt(history(*contents)).messages)


@given(st.lists(strategies.result_contents, min_size=1, max_size=4))
def test_any_results_keep_the_order_that_openai_asks_for(contents: list[Any]) -> None:
    """Whatever tools returned, all results of a message come first, in call order, and then at most one message."""
    for model in ("gpt-4o", "claude-sonnet-4-5", "gemini-3-pro"):
        said = to_litellm_messages(any_of(contents), model)[2:]
        ids = [message["tool_call_id"] for message in said[: len(contents)]]
        assert ids == [f"call{number:05}" for number in range(len(contents))]
        assert [message["role"] for message in said[len(contents) :]] in ([], ["user"])
        json.dumps(said, ensure_ascii=False, allow_nan=False).encode()


strict_parts: st.SearchStrategy[Part] = st.sampled_from([PNG, FAR, SOUND, PDF, SHEET, TextPart("a"), TextPart(" ")])


@given(st.lists(st.one_of(strategies.values, st.lists(strict_parts, min_size=1, max_size=4)), min_size=1, max_size=4))
def test_results_that_strict_servers_take(contents: list[Any]) -> None:
    """Results of parts that a provider knows are refused by no server that is as strict as OpenAI."""
    messages = any_of(contents)
    body = [
        {**message, "content": [_without_format(part) for part in message["content"]]}
        if isinstance(message["content"], list)
        else message
        for message in to_litellm_messages(messages, "gpt-4o")
    ]
    assert refusal({"model": "gpt-4o", "messages": body}) is None
    assert ResponsesServer("").refusal({"model": "gpt-5", "input": to_input(messages, "gpt-5")}) is None


def _without_format(part: dict[str, Any]) -> dict[str, Any]:
    """A part as litellm sends it to OpenAI: without the kind, which is litellm's own."""
    kind = part["type"]
    inner = part[kind]
    return (
        {**part, kind: {key: value for key, value in inner.items() if key != "format"}}
        if kind in {"image_url", "file"}
        else part
    )
