from __future__ import annotations

import base64
import json
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from chatflow import exceptions
from chatflow.core.engine import EngineReply
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
from chatflow.core.tools import Tool
from chatflow.engines.common_form import INVALID_ARGUMENTS_KEY, PROVIDER_KEY
from chatflow.engines.litellm_form import to_litellm_messages
from chatflow.engines.responses_form import (
    OUTPUT_KEY,
    to_input,
    to_instructions,
    to_responses_settings,
    to_responses_tools,
)
from chatflow.engines.responses_reply import from_responses_response, own_id
from tests.model_server import refusal
from tests.responses_server import ResponsesServer, made_call, message, reasoning
from tests.strategies import any_history, json_values, mappings, messages

MODEL = "gpt-5"
THOUGHT = reasoning(encrypted_content="gAAA", summary=[{"type": "summary_text", "text": "Hm."}])
SENT_THOUGHT = {"type": "reasoning", "encrypted_content": "gAAA", "summary": THOUGHT["summary"]}


def response(*output: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """A response with these items, as litellm's object would be as a dict."""
    return {"id": "resp_1", "status": "completed", "output": list(output), **fields}


def reply(*output: dict[str, Any], **fields: Any) -> EngineReply:
    """What such a response says."""
    return from_responses_response(response(*output, **fields), MODEL)


def kept(said: EngineReply, **fields: Any) -> Message:
    """The message that is stored of a reply."""
    return Message(Role.MODEL, said.text, tool_calls=said.tool_calls, extra=said.extra, **fields)


def again(*output: dict[str, Any], model: str = MODEL) -> list[dict[str, Any]]:
    """How a response with these items is told to a service that has not seen it."""
    return to_input([kept(reply(*output))], model)


def spoken(text: str, **fields: Any) -> dict[str, Any]:
    """A model's message, as it is sent."""
    return {"role": "assistant", "content": text, **fields}


def called(id_: str) -> dict[str, Any]:
    """A call, as it is sent."""
    return {"type": "function_call", "call_id": id_, "name": "look_up", "arguments": "{}"}


def accepted(items: list[dict[str, Any]]) -> str | None:
    """Why a service that has seen nothing yet would refuse these items."""
    refused = ResponsesServer("").refusal({"model": "m", "input": items})
    return None if refused is None else refused.body["error"]["message"]


# -- what is sent ----------------------------------------------------------------------------------------------------


def test_plain_messages() -> None:
    """User and model messages keep their text and their order, and system messages become instructions."""
    said = [Message(Role.SYSTEM, "Be kind."), Message(Role.SYSTEM, " "), Message(Role.SYSTEM, "Be \ud800.")]
    said += [Message(Role.USER, "Hi"), Message(Role.MODEL, "Hello")]
    assert to_input(said, MODEL) == [{"role": "user", "content": "Hi"}, spoken("Hello")]
    assert to_instructions(said) == "Be kind.\n\nBe \ufffd."


def test_no_instructions() -> None:
    """System messages that say nothing are no instructions."""
    assert to_instructions([Message(Role.SYSTEM, " "), Message(Role.USER, "Hi")]) is None


@pytest.mark.parametrize("content", ["", "  ", None, (), [TextPart("")]])
def test_empty_user_message(content: Any) -> None:
    """A user message without text is still a message with text."""
    assert "(empty message)" in json.dumps(to_input([Message(Role.USER, content)], MODEL))


def test_empty_model_message() -> None:
    """A model's message without text and calls has text too."""
    assert to_input([Message(Role.MODEL, "")], MODEL) == [spoken("(empty message)")]


def test_calls_and_results() -> None:
    """A model's calls and their results are items of their own, in order, and an error says that it is one."""
    calls = [ToolCall(id="c1", name="look_up", args={"city": "München"}), ToolCall(id="c2", name="look up")]
    results = [
        ToolResult(tool_call_id="c1", name="look_up", content={"at": 1}),
        ToolResult(tool_call_id="c2", name="look up", content="no", is_error=True),
    ]
    said = [Message(Role.MODEL, "Wait.", tool_calls=calls), Message(Role.TOOL, tool_results=results)]
    assert to_input(said, MODEL) == [
        spoken("Wait."),
        {"type": "function_call", "call_id": "c1", "name": "look_up", "arguments": '{"city": "München"}'},
        {"type": "function_call", "call_id": "c2", "name": "look_up", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": '{"at": 1}'},
        {"type": "function_call_output", "call_id": "c2", "output": "Error: no"},
    ]


@pytest.mark.parametrize(
    ("part", "expected"),
    [
        (TextPart("hi"), {"type": "input_text", "text": "hi"}),
        (ImagePart(url="https://a/b"), {"type": "input_image", "detail": "auto", "image_url": "https://a/b"}),
        (ImagePart(url="file-1"), {"type": "input_image", "detail": "auto", "file_id": "file-1"}),
        (
            ImagePart(data=b"\x00", media_type="image/jpeg"),
            {"type": "input_image", "detail": "auto", "image_url": "data:image/jpeg;base64,AA=="},
        ),
        (
            ImagePart(data=b"\x00"),
            {"type": "input_image", "detail": "auto", "image_url": "data:image/png;base64,AA=="},
        ),
        (
            AudioPart(data=b"\x00", media_type="audio/mpeg"),
            {"type": "input_audio", "input_audio": {"data": "AA==", "format": "mp3"}},
        ),
        (AudioPart(url="https://a/b"), {"type": "input_file", "file_url": "https://a/b"}),
        (FilePart(url="https://a/b.pdf"), {"type": "input_file", "file_url": "https://a/b.pdf"}),
        (FilePart(url="file-1"), {"type": "input_file", "file_id": "file-1"}),
        (
            FilePart(data=b"\x00", media_type="application/pdf", filename="a.pdf"),
            {"type": "input_file", "filename": "a.pdf", "file_data": "data:application/pdf;base64,AA=="},
        ),
        (
            FilePart(data=b"\x00"),
            {"type": "input_file", "filename": "file", "file_data": "data:application/octet-stream;base64,AA=="},
        ),
        (
            UnknownPart("video", {"url": "x"}),
            {"type": "input_text", "text": "(a part of type video, which can't be sent)"},
        ),
    ],
)
def test_parts(part: Part, expected: dict[str, Any]) -> None:
    """Each kind of part is sent in the form that the Responses API has for it, and one of an unknown kind as a note."""
    items = to_input([Message(Role.USER, [part])], MODEL)
    assert items == [{"role": "user", "content": [expected]}]
    assert accepted(items) is None


def test_tools() -> None:
    """A tool is sent with its name, its description and the schema of its arguments, which is no strict one."""

    def look_up(order_id: str) -> str:
        """Look up an order."""
        return order_id

    tool = Tool(look_up)
    assert to_responses_tools([tool]) == [
        {
            "type": "function",
            "name": "look_up",
            "description": "Look up an order.",
            "parameters": tool.parameters,
            "strict": False,
        }
    ]


@given(any_history)
def test_any_history_is_told_validly(history: list[Message]) -> None:
    """Whatever history there is, the service takes what it is told of it, if a user is in it."""
    prompt = to_prompt(history).messages
    items = to_input(prompt, MODEL)
    assert not items or accepted(items) is None
    assert bool(items) == any(message.role is Role.USER for message in history)


@given(st.lists(messages(), max_size=4))
def test_any_message_has_its_form(said: list[Message]) -> None:
    """Whatever a message holds, it becomes JSON that UTF-8 can write, in either form."""
    json.dumps(to_litellm_messages(said, MODEL), ensure_ascii=False, allow_nan=False).encode()
    json.dumps(to_input(said, MODEL), ensure_ascii=False, allow_nan=False).encode()


# -- settings --------------------------------------------------------------------------------------------------------


def test_settings() -> None:
    """Settings keep their names, but for the longest answer, which has two in chat completions."""
    assert to_responses_settings({"temperature": 0, "max_tokens": 10, "store": True}) == {
        "temperature": 0,
        "max_output_tokens": 10,
        "store": True,
    }
    assert to_responses_settings({"max_completion_tokens": 10}) == {"max_output_tokens": 10}


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"previous_response_id": "resp_1"}, "'previous_response_id': the engine itself"),
        ({"extra_body": {"conversation": "conv_1"}}, "'conversation': the engine itself"),
        ({"store": False}, "'store' as False where the service keeps the history"),
        ({"extra_body": {"store": None}}, "'store' as None where"),
        ({"stop": "x"}, "'stop' where the service keeps the history: it is one of chat completions alone"),
    ],
)
def test_refused_settings(settings: dict[str, Any], said: str) -> None:
    """A setting that the engine decides about, that contradicts a kept history, or that would be lost, is refused."""
    with pytest.raises(ValueError, match=said):
        to_responses_settings(settings)


# -- what comes back -------------------------------------------------------------------------------------------------


def test_reply_with_text() -> None:
    """A response's text is the reply's, its id the session's, and where nothing else stands, nothing is added."""
    assert reply(message("Hi")) == EngineReply(text="Hi", service_session_id="resp_1", finish_reason="stop")


def test_usage() -> None:
    """Counts have the names that chat completions give them, so that both kinds add up."""
    usage = {
        "input_tokens": 5,
        "input_tokens_details": {"cached_tokens": 2, "text_tokens": None},
        "output_tokens": 3,
        "output_tokens_details": {"reasoning_tokens": 1},
        "total_tokens": 8,
        "requests": 1,
        "cost": None,
    }
    assert reply(message("Hi"), usage=usage).usage == {
        "prompt_tokens": 5,
        "prompt_tokens_details": {"cached_tokens": 2},
        "completion_tokens": 3,
        "completion_tokens_details": {"reasoning_tokens": 1},
        "total_tokens": 8,
        "requests": 1,
    }


def test_reply_with_calls() -> None:
    """Calls come in the order given, with their own ids and not their items', and none given are no arguments."""
    said = reply(made_call("c1", "look_up", '{"order_id": "404"}'), {**made_call("", "look_up", ""), "id": "fc_2"})
    assert said.tool_calls == (
        ToolCall(id="c1", name="look_up", args={"order_id": "404"}),
        ToolCall(id="fc_2", name="look_up"),
    )
    assert (said.text, said.extra, said.finish_reason) == (None, {}, "tool_calls")


def test_call_without_anything() -> None:
    """A call that lacks its name, ids and arguments becomes one without them, for the runner to answer."""
    assert reply({"type": "function_call"}).tool_calls == (ToolCall(id="", name=""),)


@pytest.mark.parametrize("raw", ['{"order_id": ', "[1]", "null", "9" * 5000, "[" * 10**5])
def test_invalid_arguments(raw: str) -> None:
    """Arguments that are no JSON object are kept as written, at the call's position, and the call has none."""
    said = reply(made_call("c1", "look_up", "{}"), made_call("c2", "look_up", raw))
    assert [call.args for call in said.tool_calls] == [{}, {}]
    assert said.extra == {INVALID_ARGUMENTS_KEY: {"1": raw}}


def test_refusal() -> None:
    """A model that declines answers with its words of refusal, and the reply says that they are that."""
    said = reply(message("", content=[{"type": "refusal", "refusal": "No."}]))
    assert (said.text, said.extra) == ("No.", {"refusal": "No.", PROVIDER_KEY: "openai"})


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"status": None}, "stop"),
        ({"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}}, "length"),
        ({"status": "incomplete", "incomplete_details": None}, "length"),
        ({"status": "incomplete", "incomplete_details": {"reason": "content_filter"}}, "content_filter"),
    ],
)
def test_finish_reason(fields: dict[str, Any], expected: str) -> None:
    """An answer that was cut off says why, in chat completions' words."""
    assert reply(message("Hi"), **fields).finish_reason == expected


def test_nothing_but_thoughts() -> None:
    """An answer cut off before its first word has no text, and empty words are words."""
    assert reply(THOUGHT, status="incomplete").text is None
    assert reply(message("")).text == ""
    assert reply({"type": "message", "content": None}).text == ""


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        ("server_error", exceptions.EngineUnavailableError),
        ("vector_store_timeout", exceptions.EngineUnavailableError),
        (None, exceptions.EngineUnavailableError),
        ("rate_limit_exceeded", exceptions.EngineRateLimitError),
        ("context_length_exceeded", exceptions.ContextWindowError),
        ("invalid_prompt", exceptions.EngineBadRequestError),
        ("image_content_policy_violation", exceptions.EngineBadRequestError),
    ],
)
def test_failed_response(code: str | None, kind: type[exceptions.EngineError]) -> None:
    """A response that failed is an error by its code, which is all that is said of it."""
    with pytest.raises(exceptions.EngineError) as caught:
        reply(status="failed", error={"code": code, "message": "secret"})
    assert type(caught.value) is kind
    assert caught.value.model == MODEL
    assert (code or "gpt-5") in str(caught.value)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("status", ["cancelled", "queued", "in_progress"])
def test_unfinished_response(status: str) -> None:
    """A response that is not there yet, or never will be, is no answer."""
    with pytest.raises(exceptions.EngineUnavailableError, match="holds no answer"):
        reply(status=status)


@pytest.mark.parametrize("fields", [{"output": None}, {"status": "failed", "error": None}])
def test_response_without_output(fields: dict[str, Any]) -> None:
    """A response without output is no answer, whatever else it lacks."""
    with pytest.raises(exceptions.EngineUnavailableError):
        from_responses_response({**response(), **fields}, MODEL)


# -- ids ---------------------------------------------------------------------------------------------------------


def wrapped(id_: str, model_id: str = "None") -> str:
    """An id as litellm hands it out."""
    text = f"litellm:custom_llm_provider:openai;model_id:{model_id};response_id:{id_}"
    return "resp_" + base64.b64encode(text.encode()).decode()


@given(st.text(st.characters(exclude_categories=["Cs"]), min_size=1))
def test_own_id(id_: str) -> None:
    """What litellm puts around an id is taken off, and what it did not put there stays."""
    assert own_id(wrapped(id_)) == id_
    assert own_id(wrapped(id_, "a1b2")) == wrapped(id_, "a1b2")


@given(st.text() | st.binary().map(lambda data: "resp_" + base64.b64encode(data).decode()))
def test_id_of_another_form(id_: str) -> None:
    """An id that litellm has put nothing around stays as it is."""
    assert own_id(id_) == id_


@pytest.mark.parametrize(
    ("session", "fields", "expected"),
    [
        (None, {}, "resp_1"),
        (None, {"store": True}, "resp_1"),
        (None, {"store": False}, None),
        (None, {"id": None}, None),
        ("resp_0", {}, "resp_1"),
        ("resp_0", {"store": False}, "resp_1"),
        ("conv_1", {}, "conv_1"),
        ("conv_1", {"store": False}, "conv_1"),
    ],
)
def test_session_after(session: str | None, fields: dict[str, Any], expected: str | None) -> None:
    """A conversation stays, a response is the next one's, and a first one that is not stored begins nothing."""
    said = from_responses_response(response(message("Hi"), **fields), MODEL, session)
    assert said.service_session_id == expected


# -- there and back --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        ([message("Hi")], [spoken("Hi")]),
        ([message("Wait."), made_call("c1", "look_up", "{}")], [spoken("Wait."), called("c1")]),
        ([made_call("c1", "look_up", "{}"), message("Wait.")], [called("c1"), spoken("Wait.")]),
        ([THOUGHT, message("Hi")], [SENT_THOUGHT, spoken("Hi")]),
        (
            [THOUGHT, made_call("c1", "look_up", "{}"), THOUGHT, made_call("c2", "look_up", "{}")],
            [SENT_THOUGHT, called("c1"), SENT_THOUGHT, called("c2")],
        ),
        (
            [message("Hm", phase="commentary"), message("Hi", phase="final_answer")],
            [spoken("Hm", phase="commentary"), spoken("Hi", phase="final_answer")],
        ),
        ([message("a\n\nb"), message(""), message("c")], [spoken("a\n\nb"), spoken("c")]),
        ([message(""), made_call("c1", "look_up", "{}")], [called("c1")]),
        ([reasoning(), message("Hi")], [spoken("Hi")]),
        ([reasoning(summary=[{"type": "summary_text", "text": "Hm."}]), message("Hi")], [spoken("Hi")]),
        ([THOUGHT], [spoken("(empty message)")]),
        ([message("Hi"), THOUGHT], [spoken("Hi")]),
        (
            [{"type": "reasoning", "id": "rs_1", "status": "completed", "content": [{"text": "Hm."}]}, message("Hi")],
            [{"type": "reasoning", "id": "rs_1", "content": [{"text": "Hm."}], "summary": []}, spoken("Hi")],
        ),
        (
            [{"type": "compaction", "id": "cmp_1", "encrypted_content": "g"}, message("Hi")],
            [{"type": "compaction", "encrypted_content": "g"}, spoken("Hi")],
        ),
        ([{"type": "web_search_call", "id": "ws_1", "status": "completed"}, message("Hi")], [spoken("Hi")]),
    ],
)
def test_replay(output: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    """A response is told again in its order, with what its provider wants back and can't look up by an id."""
    sent = again(*output)
    assert sent == expected
    results = [
        {"type": "function_call_output", "call_id": item["call_id"], "output": ""} for item in sent if "call_id" in item
    ]
    assert accepted([*sent, *results]) is None


def test_replay_to_another_provider() -> None:
    """Another provider gets text and calls alone."""
    assert again(THOUGHT, message("Hi"), model="xai/grok-4") == [spoken("Hi")]


@pytest.mark.parametrize(
    "changed",
    [
        Message(Role.MODEL, "Hello", extra=reply(THOUGHT, message("Hi")).extra),
        Message(Role.MODEL, "Hello", extra=reply(THOUGHT, made_call("c1", "look_up", "{}")).extra),
    ],
)
def test_replay_of_a_changed_message(changed: Message) -> None:
    """What was said with other words, or with a call that is gone, does not go with these."""
    assert to_input([changed], MODEL) == [spoken("Hello")]


def test_replay_as_chat_completion() -> None:
    """What a response says beyond text and calls is nothing that chat completions would refuse."""
    said = [Message(Role.USER, "Hi"), kept(reply(THOUGHT, message("Hi", phase="final_answer")))]
    assert refusal({"model": "m", "messages": to_litellm_messages(said, MODEL)}) is None


items = st.fixed_dictionaries(
    {"type": st.sampled_from(["message", "function_call", "reasoning", "compaction", "system", 1])},
    optional={
        "length": st.integers(-1, 3) | json_values,
        "phase": json_values,
        "content": json_values,
        "encrypted_content": json_values,
        "role": st.just("system"),
    },
)


@example([{"type": "message", "length": 0}, {"type": "function_call"}], "", 1)
@example([{"type": "message", "length": 1}, {"type": "message", "length": 1}], "a--b", 0)
@example([{"type": "reasoning", "content": "Hm.", "role": "system"}, {"type": "message", "length": 1}], "a", 0)
@given(
    st.lists(items | json_values, max_size=4) | json_values,
    st.text("a\n", max_size=5).map(lambda text: text and f"a{text}b"),
    st.integers(0, 2),
)
def test_order_that_somebody_made_up(stored: Any, text: str, calls: int) -> None:
    """Whatever stands in a message's `extra`, its text and its calls are sent, and no message that it does not hold."""
    made = [ToolCall(id=f"c{number}", name="look_up") for number in range(calls)]
    extra = {OUTPUT_KEY: stored, PROVIDER_KEY: "openai"}
    sent = to_input([Message(Role.MODEL, text, tool_calls=made, extra=extra)], MODEL)
    texts = [item["content"] for item in sent if item.get("role") == "assistant"]
    assert "\n\n".join(texts) == (text or ("" if calls else "(empty message)"))
    assert [item["call_id"] for item in sent if item.get("type") == "function_call"] == [call.id for call in made]
    assert all(item.get("role") in {None, "assistant"} for item in sent)


outputs = st.lists(
    st.one_of(
        st.builds(message, st.text(max_size=4)),
        st.builds(lambda text: message(text, phase="commentary"), st.text(max_size=4)),
        st.builds(made_call, st.sampled_from(["c1", "c2"]), st.just("look_up"), mappings.map(repr) | st.just("{}")),
        st.sampled_from([THOUGHT, reasoning(), {"type": "web_search_call", "id": "ws_1"}]),
    ),
    max_size=6,
)


@given(outputs)
def test_whatever_is_said_is_told_again(output: list[dict[str, Any]]) -> None:
    """All texts and calls of a response are told again, in their order, and thoughts only before what they led to."""
    for number, item in enumerate(item for item in output if item["type"] == "function_call"):
        item["call_id"] = f"c{number}"  # drawn ids stand twice, and a service's do not
    sent = again(*output)
    said = [
        item["content"][0]["text"] if item["type"] == "message" else item["call_id"]
        for item in output
        if item["type"] == "function_call" or (item["type"] == "message" and item["content"][0]["text"])
    ]
    told = [item.get("content", item.get("call_id")) for item in sent if item.get("type") != "reasoning"]
    whole = "".join(text for text in said if text not in {f"c{number}" for number in range(6)})
    if whole.strip() or not said:
        blank = [text if text.strip() else "(empty message)" for text in said]
        assert told == (blank or ["(empty message)"])
    assert sent[-1].get("type") != "reasoning"
