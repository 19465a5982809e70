from __future__ import annotations

import datetime as dt
import decimal
import json
import math
import subprocess
import sys
import uuid
from types import SimpleNamespace
from typing import Any, Final

import pytest

from chatflow import Runner, exceptions
from chatflow.core.agent import Agent
from chatflow.core.engine import EngineReply, EngineRequest
from chatflow.core.messages import (
    MODEL_KEY,
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
from chatflow.core.tools import Tool
from chatflow.engines import LiteLLMEngine
from chatflow.engines.arguments import Asked, completion_arguments, responses_arguments
from chatflow.engines.common_form import INVALID_ARGUMENTS_KEY, PROVIDER_KEY, litellm_name
from chatflow.engines.failures import lacks_key
from chatflow.engines.litellm_form import (
    CALL_FIELDS_KEY,
    from_litellm_response,
    to_litellm_messages,
    to_litellm_tools,
    tools_of_the_past,
)
from tests.engines.failing import FAILURES, KEY, QUESTION, Failure, fails
from tests.model_server import HANG, Status, error, tool_calls
from tests.responses_server import ResponsesServer

KEY_NAMES = ("OPENAI_API_KEY", "OPENAI_ADMIN_KEY", "GEMINI_API_KEY", "GOOGLE_API_KEY", "XAI_API_KEY", "AZURE_API_KEY")


def look_up(order_id: str) -> str:
    """Look up an order."""
    return order_id


LOOK_UP = Tool(look_up)


@pytest.fixture
def engine(server: ResponsesServer) -> LiteLLMEngine:
    """An engine that asks the server."""
    return LiteLLMEngine("openai/test", attempts=1, api_key=KEY, api_base=server.url)


def request(*messages: Message | str, model: str = "openai/test", **fields: Any) -> EngineRequest:
    """A request of these messages (text is a user's), by default of one question."""
    prompt = [Message(Role.USER, message) if isinstance(message, str) else message for message in messages]
    return EngineRequest(
        agent=Agent("Support", model=model), messages=prompt or [Message(Role.USER, QUESTION)], **fields
    )


def answered(*calls: ToolCall, content: Any = "sent", **fields: Any) -> list[Message]:
    """A question, the calls it led to, and their results."""
    results = [ToolResult(tool_call_id=call.id, name=call.name, content=content) for call in calls]
    return [
        Message(Role.USER, "Where is it?"),
        Message(Role.MODEL, tool_calls=calls, **fields),
        Message(Role.TOOL, tool_results=results),
    ]


CALL = ToolCall(id="c1", name="look_up", args={"order_id": "404"})


# -- names ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("gemini-2.5-flash", "gemini/gemini-2.5-flash"),
        ("claude-sonnet-4-5", "anthropic/claude-sonnet-4-5"),
        ("gpt-4o", "openai/gpt-4o"),
        ("ft:gpt-4o:shop::1", "openai/ft:gpt-4o:shop::1"),
        ("chatgpt-4o-latest", "openai/chatgpt-4o-latest"),
        ("o3-mini", "openai/o3-mini"),
        ("grok-4", "xai/grok-4"),
        ("mistral-large-latest", "mistral/mistral-large-latest"),
        ("deepseek-chat", "deepseek/deepseek-chat"),
        ("command-a-03-2025", "cohere/command-a-03-2025"),
        ("vertex_ai/gemini-2.5-flash", "vertex_ai/gemini-2.5-flash"),
        ("openrouter/openai/gpt-4o", "openrouter/openai/gpt-4o"),
        ("olmo-2", "olmo-2"),
    ],
)
def test_bare_names(name: str, expected: str) -> None:
    """A bare model name is led to the provider that people mean, and any other name is left as it is."""
    assert litellm_name(name) == expected


# -- messages ------------------------------------------------------------------------------------------------------


def test_plain_messages() -> None:
    """System, user and model messages keep their text and their order."""
    messages = [Message(Role.SYSTEM, "Be kind."), Message(Role.USER, "Hi"), Message(Role.MODEL, "Hello")]
    assert to_litellm_messages(messages, "gpt-4o") == [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello"},
    ]


@pytest.mark.parametrize("content", ["", "  ", None, (), [TextPart("")]])
def test_empty_user_message(content: Any) -> None:
    """A user message without text is still a message with text."""
    (sent,) = to_litellm_messages([Message(Role.USER, content)], "gpt-4o")
    assert "(empty message)" in json.dumps(sent)


def test_empty_model_message() -> None:
    """A model's message without text and calls has text too."""
    assert to_litellm_messages([Message(Role.MODEL, "")], "gpt-4o")[0]["content"] == "(empty message)"


def test_empty_system_message() -> None:
    """A system message without text is left out."""
    assert to_litellm_messages([Message(Role.SYSTEM, " ")], "gpt-4o") == []


def test_calls_and_results() -> None:
    """A model's calls carry their arguments as JSON, and each result becomes a message of its own, in order."""
    other = ToolCall(id="c2", name="look_up", args={})
    sent = to_litellm_messages(answered(CALL, other, content={"at": "München"}), "gpt-4o")
    function = {"name": "look_up", "arguments": '{"order_id": "404"}'}
    assert sent[1] == {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": "c1", "type": "function", "function": function},
            {"id": "c2", "type": "function", "function": {"name": "look_up", "arguments": "{}"}},
        ],
    }
    assert sent[2:] == [
        {"role": "tool", "tool_call_id": "c1", "content": '{"at": "München"}'},
        {"role": "tool", "tool_call_id": "c2", "content": '{"at": "München"}'},
    ]


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("plain text", "plain text"),
        ("", '""'),
        (" \n", r'" \n"'),
        (None, "null"),
        (True, "true"),
        ([1, 2.5], "[1, 2.5]"),
        (dt.datetime(2026, 1, 2, 3, 4, tzinfo=dt.UTC), '"2026-01-02T03:04:00+00:00"'),
        (dt.date(2026, 1, 2), '"2026-01-02"'),
        (dt.timedelta(seconds=90), '"0:01:30"'),
        (decimal.Decimal("1.10"), '"1.10"'),
        (uuid.UUID(int=1), '"00000000-0000-0000-0000-000000000001"'),
        (b"text", '"text"'),
        (b"\xff\xfe", '"//4="'),
        ({"b", "a"}, '["a", "b"]'),
        ((1, (2,)), "[1, [2]]"),
        ({1: "one", (2, 3): "two", dt.date(2026, 1, 2): "day"}, '{"1": "one", "[2, 3]": "two", "2026-01-02": "day"}'),
        (math.nan, '"nan"'),
        (2**64, "18446744073709551616"),
        ("lone \ud800", "lone \ufffd"),
        (["lone \ud800"], '["lone \ufffd"]'),
    ],
)
def test_result_as_text(content: Any, expected: str) -> None:
    """A result is sent as it is where it is text, else as JSON, with readable text for what JSON lacks."""
    assert to_litellm_messages(answered(CALL, content=content), "gpt-4o")[2]["content"] == expected


def test_result_with_an_enormous_number() -> None:
    """An integer that Python refuses to write as a decimal is sent as hexadecimal."""
    text = to_litellm_messages(answered(CALL, content=[10**5000]), "gpt-4o")[2]["content"]
    assert int(json.loads(text)[0], 16) == 10**5000


@pytest.mark.parametrize(
    ("content", "expected"),
    [("not found", "Error: not found"), ("Error: not found", "Error: not found"), ({"a": 1}, 'Error: {"a": 1}')],
)
def test_error_result(content: Any, expected: str) -> None:
    """The result of a call that failed says so in its text, once."""
    result = ToolResult(tool_call_id="c1", name="look_up", content=content, is_error=True)
    assert to_litellm_messages([Message(Role.TOOL, tool_results=[result])], "gpt-4o")[0]["content"] == expected


@pytest.mark.parametrize(
    ("part", "expected"),
    [
        (TextPart("hi"), {"type": "text", "text": "hi"}),
        (ImagePart(url="https://a/b.png"), {"type": "image_url", "image_url": {"url": "https://a/b.png"}}),
        (
            ImagePart(data=b"\x00", media_type="image/jpeg"),
            {"type": "image_url", "image_url": {"url": "data:image/jpeg;base64,AA==", "format": "image/jpeg"}},
        ),
        (ImagePart(data=b"\x00"), {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}),
        (
            AudioPart(data=b"\x00", media_type="audio/ogg; codecs=opus"),
            {"type": "input_audio", "input_audio": {"data": "AA==", "format": "ogg"}},
        ),
        (
            AudioPart(data=b"\x00", media_type="audio/mpeg"),
            {"type": "input_audio", "input_audio": {"data": "AA==", "format": "mp3"}},
        ),
        (AudioPart(data=b"\x00"), {"type": "input_audio", "input_audio": {"data": "AA==", "format": "wav"}}),
        (
            AudioPart(url="https://a/b", media_type="audio/mp3"),
            {"type": "file", "file": {"file_id": "https://a/b", "format": "audio/mp3"}},
        ),
        (FilePart(url="https://a/b.pdf"), {"type": "file", "file": {"file_id": "https://a/b.pdf"}}),
        (
            FilePart(data=b"\x00", media_type="application/pdf", filename="a.pdf"),
            {
                "type": "file",
                "file": {
                    "file_data": "data:application/pdf;base64,AA==",
                    "filename": "a.pdf",
                    "format": "application/pdf",
                },
            },
        ),
        (
            FilePart(data=b"\x00"),
            {"type": "file", "file": {"file_data": "data:application/octet-stream;base64,AA==", "filename": "file"}},
        ),
        (UnknownPart("video", {"url": "x"}), {"type": "text", "text": "(a part of type video, which can't be sent)"}),
    ],
)
def test_parts(part: Part, expected: dict[str, Any]) -> None:
    """Each kind of part is sent in OpenAI's form, and one of an unknown kind as a note."""
    assert to_litellm_messages([Message(Role.USER, [part])], "gpt-4o") == [{"role": "user", "content": [expected]}]


@pytest.mark.parametrize(("name", "expected"), [("a.b c", "a_b_c"), ("", "unknown"), ("n" * 70, "n" * 64)])
def test_made_up_tool_name(name: str, expected: str) -> None:
    """A tool name that a model made up is sent back in a form that providers accept."""
    sent = to_litellm_messages(answered(ToolCall(id="c1", name=name)), "gpt-4o")
    assert sent[1]["tool_calls"][0]["function"]["name"] == expected


def test_tools() -> None:
    """A tool is sent with its name, its description and the schema of its arguments."""
    (sent,) = to_litellm_tools([LOOK_UP])
    assert sent["type"] == "function"
    assert sent["function"] == {"name": "look_up", "description": "Look up an order.", "parameters": LOOK_UP.parameters}


# -- responses -----------------------------------------------------------------------------------------------------


def response(message: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """A response with this message, as litellm's object would be as a dict."""
    return {"choices": [{"finish_reason": "stop", "message": {"role": "assistant", **message}}], **fields}


def test_reply_with_text() -> None:
    """A response's text and finish reason are the reply's, and where nothing else stands, nothing is added."""
    assert from_litellm_response(response({"content": "Hi"}), "gpt-4o") == EngineReply(text="Hi", finish_reason="stop")


def test_refusal() -> None:
    """A model that declines answers with its words of refusal."""
    assert from_litellm_response(response({"content": None, "refusal": "No."}), "gpt-4o").text == "No."


def test_usage() -> None:
    """Usage is a plain dict of integers, with the details that are there."""
    usage = {
        "prompt_tokens": 1,
        "completion_tokens": 2,
        "total_tokens": 3,
        "cost": 0.1,
        "prompt_tokens_details": {"cached_tokens": 1, "text_tokens": None},
        "completion_tokens_details": {"audio_tokens": None},
    }
    reply = from_litellm_response(response({"content": "Hi"}, usage=usage), "gpt-4o")
    assert reply.usage == {
        "prompt_tokens": 1,
        "completion_tokens": 2,
        "total_tokens": 3,
        "prompt_tokens_details": {"cached_tokens": 1},
    }


def test_reply_with_calls() -> None:
    """Calls come in the order given, with their arguments; none given are none."""
    message = tool_calls(
        ("c1", "look_up", '{"order_id": "404"}'), ("c2", "look_up", ""), ("c3", "look_up", ' {"a": [1.5, {}]} ')
    )
    reply = from_litellm_response(response(message), "gpt-4o")
    assert reply.tool_calls == (
        CALL,
        ToolCall(id="c2", name="look_up", args={}),
        ToolCall(id="c3", name="look_up", args={"a": [1.5, {}]}),
    )
    assert reply.extra == {}


@pytest.mark.parametrize(
    "raw", ['{"order_id": ', "[1]", '"text"', "null", "9" * 5000, "[" * 300 + "]" * 300, "[" * 10**5]
)
def test_invalid_arguments(raw: str) -> None:
    """Arguments that are no JSON object are kept as written, at the call's position, and the call has none."""
    message = tool_calls(("c1", "look_up", "{}"), ("c1", "look_up", raw))
    reply = from_litellm_response(response(message), "gpt-4o")
    assert [call.args for call in reply.tool_calls] == [{}, {}]
    assert reply.extra == {INVALID_ARGUMENTS_KEY: {"1": raw}}


@pytest.mark.parametrize("kept", [{"thought_signature": "sig"}, {}])
def test_signature_in_an_id(kept: dict[str, str]) -> None:
    """A signature that litellm wrote into an id stands in *extra*, and the id is the plain one."""
    message = tool_calls(("c1__thought__sig", "look_up", "{}"))
    message["tool_calls"][0]["provider_specific_fields"] = kept
    reply = from_litellm_response(response(message), "gemini-2.5-flash")
    assert reply.tool_calls[0].id == "c1"
    assert reply.extra[CALL_FIELDS_KEY] == [{"provider_specific_fields": {"thought_signature": "sig"}}]


def test_blank_provider_fields() -> None:
    """Fields in which a provider says nothing are not kept."""
    blank: dict[str, Any] = {
        "reasoning_content": None,
        "annotations": [],
        "provider_specific_fields": {"citations": None},
    }
    assert from_litellm_response(response({"content": "Hi", **blank}), "claude-sonnet-4-5").extra == {}


def test_call_without_a_function() -> None:
    """A call that lacks a name and an id becomes one without them, for the runner to answer."""
    reply = from_litellm_response(response({"content": None, "tool_calls": [{"id": None, "type": "custom"}]}), "gpt-4o")
    assert reply.tool_calls == (ToolCall(id="", name="", args={}),)


@pytest.mark.parametrize("choices", [[], None])
def test_response_without_an_answer(choices: Any) -> None:
    """A response without a choice is a failure of the provider."""
    with pytest.raises(exceptions.EngineUnavailableError, match="no answer"):
        from_litellm_response({"choices": choices}, "gpt-4o")


THINKING = [{"type": "thinking", "thinking": "Hm.", "signature": "s1"}]


def thoughtful_reply() -> EngineReply:
    """What Gemini replied: two calls, with reasoning at the message and signatures at the second call."""
    message = tool_calls(
        ("c1", "look_up", "{}"), ("c2", "look_up", "{}"), thinking_blocks=THINKING, annotations=[{"a": 1}]
    )
    message["tool_calls"][1]["provider_specific_fields"] = {"thought_signature": "s2"}
    message["tool_calls"][1]["function"]["provider_specific_fields"] = {"thought_signature": "s3"}
    return from_litellm_response(response(message), "gemini-2.5-flash")


def test_provider_fields_are_kept() -> None:
    """What a provider says beside text and calls stands in *extra*, with what it said at each call."""
    assert thoughtful_reply().extra == {
        "thinking_blocks": THINKING,
        "annotations": [{"a": 1}],
        PROVIDER_KEY: "gemini",
        CALL_FIELDS_KEY: [
            {},
            {
                "provider_specific_fields": {"thought_signature": "s2"},
                "function": {"provider_specific_fields": {"thought_signature": "s3"}},
            },
        ],
    }


def sent_back(model: str, *, calls: int = 2) -> dict[str, Any]:
    """The message that *model* is sent for that reply, its first *calls* calls renamed."""
    reply = thoughtful_reply()
    renamed = [ToolCall(id=f"n{position}", name=call.name) for position, call in enumerate(reply.tool_calls)]
    return to_litellm_messages(answered(*renamed[:calls], extra=reply.extra), model)[1]


def test_provider_fields_go_back() -> None:
    """A provider gets its fields back with their message and with each call, also where its id has changed."""
    sent = sent_back("gemini/gemini-3-pro")
    assert sent["thinking_blocks"] == THINKING
    assert set(sent) == {"role", "content", "tool_calls", "thinking_blocks"}
    assert sent["tool_calls"][0] == {
        "id": "n0",
        "type": "function",
        "function": {"name": "look_up", "arguments": "{}"},
    }
    assert sent["tool_calls"][1] == {
        "id": "n1",
        "type": "function",
        "provider_specific_fields": {"thought_signature": "s2"},
        "function": {
            "name": "look_up",
            "arguments": "{}",
            "provider_specific_fields": {"thought_signature": "s3"},
        },
    }


@pytest.mark.parametrize(
    ("name", "sent"), [("404", "tool404"), ("-x", "tool-x"), ("9" * 64, "tool" + "9" * 60), ("é!", "__")]
)
def test_names_that_google_refuses(name: str, sent: str) -> None:
    """A name that a model has made up begins as Google wants names to begin."""
    _, calling, _ = to_litellm_messages(answered(ToolCall(id="c1", name=name)), "gemini-2.5-flash")
    assert calling["tool_calls"][0]["function"]["name"] == sent


def test_stand_ins_have_different_names() -> None:
    """Two names that are sent as one give one stand-in."""
    calls = [ToolCall(id=f"c{number}", name=name) for number, name in enumerate(["look up", "look_up"])]
    (tool,) = tools_of_the_past(answered(*calls))
    assert tool["function"]["name"] == "look_up"


@pytest.mark.parametrize(("fields", "expected"), [({"citations": None}, None), ({"a": 1}, {"a": 1})])
def test_thoughts_are_kept_once(fields: dict[str, Any], expected: dict[str, Any] | None) -> None:
    """Of the two places where litellm has thoughts, one is kept."""
    beside = {**fields, "thinking_blocks": [{"type": "thinking", "signature": "s1"}]}
    reply = from_litellm_response(
        response({"content": "Hi", "thinking_blocks": THINKING, "provider_specific_fields": beside}), "claude-opus-5"
    )
    assert reply.extra["thinking_blocks"] == THINKING
    assert reply.extra.get("provider_specific_fields") == expected


def test_what_is_sent_can_be_changed() -> None:
    """What litellm is given is its own to change, though messages are frozen."""
    sent = sent_back("gemini-2.5-flash")
    sent["thinking_blocks"][0].pop("signature")
    assert sent_back("gemini-2.5-flash")["thinking_blocks"] == THINKING


def test_provider_fields_stay_with_their_provider() -> None:
    """Another provider, which would refuse them, is not sent a provider's fields."""
    sent = sent_back("gpt-4o")
    assert set(sent) == {"role", "content", "tool_calls"}
    assert set(sent["tool_calls"][1]) == {"id", "type", "function"}


def test_call_fields_without_their_calls() -> None:
    """No call is sent another call's signature where a call is gone from the message."""
    assert set(sent_back("gemini-2.5-flash", calls=1)["tool_calls"][0]) == {"id", "type", "function"}


# -- arguments -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("timeout", [0, -1, math.inf, math.nan])
def test_timeout_out_of_range(timeout: float) -> None:
    """A timeout that is not above 0, or never comes, is refused with its value."""
    with pytest.raises(ValueError, match=f"not {timeout}"):
        LiteLLMEngine(timeout=timeout)


@pytest.mark.parametrize(
    ("name", "value"), [("timeout", "60"), ("timeout", True), ("model", 4), ("api_key", b"k"), ("settings", "x")]
)
def test_arguments_of_wrong_types(name: str, value: Any) -> None:
    """An argument of a wrong type is refused by name."""
    arguments: dict[str, Any] = {name: value}
    with pytest.raises(TypeError, match=name):
        LiteLLMEngine(**arguments)


def test_settings_of_the_engine() -> None:
    """A setting that the engine itself decides about is refused."""
    with pytest.raises(ValueError, match="'stream'"):
        LiteLLMEngine(settings={"stream": True})


def test_repr_without_the_key() -> None:
    """The key is not in the engine's repr."""
    assert repr(LiteLLMEngine("gpt-4o", api_key=KEY)) == "LiteLLMEngine(models=['gpt-4o'], timeout=60, attempts=3)"


# -- a real server -------------------------------------------------------------------------------------------------


async def test_text(server: ResponsesServer, engine: LiteLLMEngine) -> None:
    """A question is sent once, and its answer comes back with usage and finish reason."""
    server.script("Hello.")
    reply = await engine.generate(request(Message(Role.SYSTEM, "Be kind."), "Hi"))
    assert reply == EngineReply(
        text="Hello.",
        usage={
            "prompt_tokens": 11,
            "completion_tokens": 7,
            "total_tokens": 18,
            "prompt_tokens_details": {"cached_tokens": 4, "audio_tokens": 0},
            "completion_tokens_details": {"reasoning_tokens": 2, "audio_tokens": 0},
        },
        extra={MODEL_KEY: "openai/test"},
        finish_reason="stop",
    )
    messages = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hi"}]
    assert server.requests == [{"model": "test", "messages": messages}]
    assert server.keys == [KEY]


async def test_model_of_the_agent(server: ResponsesServer) -> None:
    """Without a model of its own the engine asks the agent's."""
    server.script("Hello.")
    await LiteLLMEngine(api_key=KEY, api_base=server.url).generate(request(model="gpt-4o"))
    assert server.requests[0]["model"] == "gpt-4o"


async def test_calls_and_back(server: ResponsesServer, engine: LiteLLMEngine) -> None:
    """Parallel calls come back as calls, and their results are taken by a server that checks the order."""
    server.script(tool_calls(("c1", "look_up", '{"order_id": "1"}'), ("c2", "look_up", '{"order_id": "2"}')), "Sent.")
    asked = await engine.generate(request("Where?", tools=[LOOK_UP]))
    assert [call.args for call in asked.tool_calls] == [{"order_id": "1"}, {"order_id": "2"}]
    assert asked.finish_reason == "tool_calls"
    said = await engine.generate(request(*answered(*asked.tool_calls, extra=asked.extra), tools=[LOOK_UP]))
    assert said.text == "Sent."
    assert server.requests[0]["tools"] == to_litellm_tools([LOOK_UP])


async def test_reasoning_goes_back(server: ResponsesServer) -> None:
    """A server that thinks gets its reasoning back with the message."""
    engine = LiteLLMEngine("openai/thinker", api_key=KEY, api_base=server.url)
    server.script(
        {"role": "assistant", "content": "Yes.", "reasoning_content": "Hm.", "reasoning_details": ["d"]}, "Ok"
    )
    reply = await engine.generate(request())
    assert reply.extra["reasoning_content"] == "Hm."
    await engine.generate(request("Q", Message(Role.MODEL, reply.text, extra=reply.extra), "And?"))
    assert server.requests[1]["messages"][1] == {
        "role": "assistant",
        "content": "Yes.",
        "reasoning_content": "Hm.",
        "provider_specific_fields": {"reasoning_details": ["d"]},
    }


def test_reasoning_goes_to_its_own_model_alone() -> None:
    """Every server of OpenAI's language is "openai": another of its models is not sent what one has thought."""
    extra = {PROVIDER_KEY: "openai", MODEL_KEY: "openai/thinker", "reasoning_content": "Hm."}
    messages: list[Message | str] = ["Q", Message(Role.MODEL, "Yes.", extra=extra), "And?"]
    sent = {model: to_litellm_messages(request(*messages).messages, model)[1] for model in ("openai/thinker", "gpt-5")}
    assert ["reasoning_content" in message for message in sent.values()] == [True, False]


async def test_malformed_arguments_over_http(server: ResponsesServer, engine: LiteLLMEngine) -> None:
    """Arguments that are cut off reach the caller as written, and the call can be answered and sent back."""
    server.script(tool_calls(("c1", "look_up", '{"order_id": ')), "Sorry.")
    asked = await engine.generate(request(tools=[LOOK_UP]))
    assert asked.extra == {INVALID_ARGUMENTS_KEY: {"0": '{"order_id": '}, MODEL_KEY: "openai/test"}
    await engine.generate(request(*answered(*asked.tool_calls, extra=asked.extra), tools=[LOOK_UP]))
    assert server.requests[1]["messages"][1]["tool_calls"][0]["function"]["arguments"] == "{}"


async def test_parts_over_http(server: ResponsesServer, engine: LiteLLMEngine) -> None:
    """Text, pictures, sound and files are taken by a server that checks their form."""
    parts: list[Part] = [
        TextPart("Look:"),
        ImagePart(data=b"png", media_type="image/png"),
        AudioPart(data=b"mp3", media_type="audio/mpeg"),
        FilePart(data=b"pdf", media_type="application/pdf", filename="a.pdf"),
        UnknownPart("hologram"),
    ]
    server.script("I see.")
    assert (await engine.generate(request(Message(Role.USER, parts)))).text == "I see."
    kinds = [part["type"] for part in server.requests[0]["messages"][0]["content"]]
    assert kinds == ["text", "image_url", "input_audio", "file", "text"]


async def test_lone_surrogates_over_http(server: ResponsesServer, engine: LiteLLMEngine) -> None:
    """Text that UTF-8 lacks is sent with a mark in its place."""
    server.script("Hello.")
    await engine.generate(request("a\ud800b \U0001f600"))
    assert server.requests[0]["messages"][0]["content"] == "a\ufffdb \U0001f600"


async def test_settings(server: ResponsesServer) -> None:
    """The engine's settings are sent, and those of a request before them."""
    settings = {"temperature": 0, "max_tokens": 10}
    engine = LiteLLMEngine("openai/test", attempts=1, api_key=KEY, api_base=server.url, settings=settings)
    server.script("{}")
    await engine.generate(request(settings={"max_tokens": 20}))
    sent = server.requests[0]
    assert (sent["temperature"], sent["max_tokens"]) == (0, 20)


async def test_settings_of_an_agent(server: ResponsesServer) -> None:
    """An agent's settings go with its requests, before the engine's."""
    settings = {"temperature": 0, "max_tokens": 10}
    engine = LiteLLMEngine("openai/test", api_key=KEY, api_base=server.url, settings=settings)
    server.script("Hello.")
    await Runner(Agent("Support", engine=engine, settings={"max_tokens": 20, "top_p": 0.5})).run_async("c1", "Hi")
    sent = server.requests[0]
    assert (sent["temperature"], sent["max_tokens"], sent["top_p"]) == (0, 20, 0.5)


@pytest.mark.parametrize("service_history", [False, True])
def test_choice_without_tools(service_history: bool) -> None:
    """How to choose among tools is left out of a request that has none, which providers would refuse."""
    engine = LiteLLMEngine("gpt-4o", settings={"tool_choice": "required", "parallel_tool_calls": False})
    chosen: list[set[str]] = []
    for tools in ([LOOK_UP], []):
        asked = Asked(request(tools=tools), "gpt-4o", service_history, session=None)
        chosen.append({"tool_choice", "parallel_tool_calls"} & set(engine._arguments_for(asked)))
    assert chosen == [{"tool_choice", "parallel_tool_calls"}, set()]


FORCED: Final = (
    "required",
    {"type": "function", "function": {"name": "look_up"}},
    {"type": "function", "name": "look_up"},
    "any",
)


@pytest.mark.parametrize("service_history", [False, True])
@pytest.mark.parametrize("choice", [*FORCED, "auto", "none", {"type": "auto"}], ids=str)
def test_forced_call_is_forced_once(choice: Any, service_history: bool) -> None:
    """A choice that forces a call goes until the agent has results in the turn, and again in the next; others stay."""
    engine = LiteLLMEngine(settings={"tool_choice": choice})
    asked_again = answered(CALL, agent_name="Support")
    chosen: list[bool] = []
    for messages in (["Where?"], ["Where?", *asked_again[1:]], [*asked_again, "And?"]):
        asked = Asked(request(*messages, tools=[LOOK_UP]), "gpt-4o", service_history, session=None)
        chosen.append("tool_choice" in engine._arguments_for(asked))
    assert chosen == [True, choice not in FORCED, True]


def test_forced_call_after_a_handoff() -> None:
    """Results of another agent's calls, such as the one that handed over, are none of the agent's own."""
    messages = answered(CALL, agent_name="Reception")
    asked = Asked(request(*messages, tools=[LOOK_UP]), "gpt-4o", at_service=False, session=None)
    assert completion_arguments(asked, {"tool_choice": "required"}, stream=False)["tool_choice"] == "required"


def test_forced_call_where_a_service_has_it() -> None:
    """A service that keeps the history is sent results without their calls, and no choice that forces another."""
    *_, result = answered(CALL)
    asked = Asked(request(result, tools=[LOOK_UP], service_session_id="r1"), "gpt-4o", at_service=True, session="r1")
    assert "tool_choice" not in responses_arguments(asked, {"tool_choice": "required"}, stream=False)


async def test_forced_call_in_a_turn(server: ResponsesServer) -> None:
    """A model that must call a tool does, and then answers."""
    engine = LiteLLMEngine("openai/test", api_key=KEY, api_base=server.url)
    server.script(tool_calls(("c1", "look_up", '{"order_id": "1"}')), "Sent.")
    agent = Agent("Support", engine=engine, tools=[LOOK_UP], settings={"tool_choice": "required"})
    assert (await agent.run("Where?")).content == "Sent."
    assert [sent.get("tool_choice") for sent in server.requests] == ["required", None]


async def test_settings_of_a_request_are_checked(server: ResponsesServer, engine: LiteLLMEngine) -> None:
    """A request's setting that the engine decides about is refused before anything is sent."""
    with pytest.raises(ValueError, match="'max_retries'"):
        await engine.generate(request(settings={"max_retries": 3}))
    assert server.requests == []


@pytest.mark.parametrize("name", ["fallbacks", "context_window_fallback_dict", "num_retries", "retry_policy", "stream"])
def test_settings_that_would_ask_again(name: str) -> None:
    """What would make litellm ask again, or in another way, is refused."""
    with pytest.raises(ValueError, match=name):
        LiteLLMEngine(settings={name: 3})


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ("anthropic/claude-sonnet-4-5", {"tools", "tool_choice"}),
        ("vertex_ai/gemini-2.5-flash", {"tools", "tool_choice"}),
        ("bedrock/anthropic.claude-sonnet-4-5", {"tools"}),
        ("gpt-4o", set()),
    ],
)
def test_history_with_calls_and_no_tools(model: str, expected: set[str]) -> None:
    """Providers that refuse calls where no tools are named get stand-ins, and the model may call none."""
    asked = Asked(request(*answered(CALL)), model, at_service=False, session=None)
    arguments = completion_arguments(asked, {}, stream=False)
    assert {"tools", "tool_choice"} & set(arguments) == expected
    assert arguments.get("tool_choice", "none") == "none"
    assert [tool["function"]["name"] for tool in arguments.get("tools", [])] == ["look_up"] * bool(expected)


def test_no_calls_and_no_tools() -> None:
    """Without calls in the history no tools are made up."""
    asked = Asked(request(), "anthropic/claude-sonnet-4-5", at_service=False, session=None)
    assert "tools" not in completion_arguments(asked, {}, stream=False)


LOOK_UP_CALL: Final = {"type": "function", "function": {"name": "look_up", "arguments": "{}"}}


def completion(**message: Any) -> dict[str, Any]:
    """What a server answers whose message has these fields, of whatever types."""
    choice = {"index": 0, "message": {"role": "assistant", "content": "x", **message}, "finish_reason": "stop"}
    return {"id": "c", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice]}


OWN_FAILURES: Final[tuple[Failure, ...]] = (
    (
        error(400, "This model's maximum context length is 100 tokens.", code="context_length_exceeded"),
        exceptions.ContextWindowError,
        400,
    ),
    (Status(200, {"choices": None}), exceptions.EngineUnavailableError, None),
    (Status(200, completion(tool_calls=[{"id": 7, **LOOK_UP_CALL}])), exceptions.EngineUnavailableError, None),
    (Status(200, completion(content=5)), exceptions.EngineUnavailableError, None),
)


@pytest.mark.parametrize(("answer", "kind", "status"), [*FAILURES, *OWN_FAILURES])
async def test_failures(
    server: ResponsesServer,
    engine: LiteLLMEngine,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
    answer: Any,
    kind: type[exceptions.EngineError],
    status: int | None,
) -> None:
    """Each failure is one request and an error of its kind, and neither shows nor logs the key or the prompt."""
    server.script(answer)
    await fails(engine.generate(request()), server, kind, status, caplog, capsys)


@pytest.mark.parametrize("model", ["gpt4o", "google/gemini-2.5-flash", "Gemini-2.5-flash"])
async def test_model_of_no_provider(model: str) -> None:
    """A model's name that no provider goes with is a bad request, which says how to name it."""
    expected = f"^model '{model}': no provider is known for it; name it as provider/model, such as 'openai/gpt-4o'$"
    with pytest.raises(exceptions.EngineBadRequestError, match=expected):
        await LiteLLMEngine(model).generate(request())


async def test_model_of_a_server_of_ones_own(server: ResponsesServer) -> None:
    """For a server of one's own the error says what its model is to be named."""
    with pytest.raises(exceptions.EngineBadRequestError, match=r"at api_base name it 'openai/qwen3'$"):
        await LiteLLMEngine("qwen3", api_key=KEY, api_base=server.url).generate(request())
    assert server.requests == []


@pytest.mark.parametrize(
    ("model", "settings", "named"),
    [
        ("openai/test", {"thinking": {"type": "enabled"}, "top_p": 1}, "setting 'thinking', or"),
        ("openai/gpt-5", {"temperature": 0.1, "drop_params": False}, "setting 'temperature', or"),
    ],
)
async def test_setting_that_litellm_refuses(
    server: ResponsesServer, model: str, settings: dict[str, Any], named: str
) -> None:
    """A setting that the model does not take, as litellm knows, is a bad request that names it; nothing is sent."""
    engine = LiteLLMEngine(model, api_key=KEY, api_base=server.url, settings=settings)
    with pytest.raises(exceptions.EngineBadRequestError, match=f"it does not take the {named} not with that value$"):
        await engine.generate(request())
    assert server.requests == []


@pytest.mark.parametrize(
    ("param", "said"),
    [
        ("top_p", "it does not take the setting 'top_p', or not with that value (HTTP 400, invalid_request_error)"),
        ("stop.0", "it does not take the setting 'stop', or not with that value (HTTP 400, invalid_request_error)"),
        (QUESTION, "the request is refused as it is; the error's __context__ has the provider's words"),
        (None, "the request is refused as it is; the error's __context__ has the provider's words"),
    ],
)
async def test_setting_that_a_provider_refuses(
    server: ResponsesServer, engine: LiteLLMEngine, param: str | None, said: str
) -> None:
    """A setting that the provider names as the cause of its refusal is named, and nothing else that it says."""
    body = {"error": {"message": f"{KEY} {QUESTION}", "type": "invalid_request_error", "param": param, "code": None}}
    server.script(Status(400, body))
    with pytest.raises(exceptions.EngineBadRequestError) as caught:
        await engine.generate(request(settings={"top_p": 5, "stop": ["x"]}))
    assert str(caught.value).startswith(f"model 'openai/test': {said}")
    assert QUESTION not in str(caught.value)


async def test_code_of_a_failure(server: ResponsesServer, engine: LiteLLMEngine) -> None:
    """The provider's own word for what is wrong is in the error."""
    server.script(error(429, "no", code="insufficient_quota"))
    with pytest.raises(exceptions.EngineRateLimitError, match=r"\(HTTP 429, insufficient_quota\)"):
        await engine.generate(request())


@pytest.mark.parametrize(
    ("header", "expected"), [("7", 7.0), ("0.5", 0.5), ("soon", None), ("-1", None), ("inf", None)]
)
async def test_retry_after(server: ResponsesServer, engine: LiteLLMEngine, header: str, expected: float | None) -> None:
    """The seconds that a provider asks to wait are kept, and nonsense is not."""
    server.script(error(429, "no", headers={"retry-after": header}))
    with pytest.raises(exceptions.EngineRateLimitError) as caught:
        await engine.generate(request())
    assert caught.value.retry_after == expected


async def test_retries_set_globally(
    server: ResponsesServer, engine: LiteLLMEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failure is one request, also where retries are switched on in litellm itself."""
    monkeypatch.setattr(sys.modules["litellm"], "num_retries", 3)
    server.script(*[error(500, "no")] * 4)
    with pytest.raises(exceptions.EngineUnavailableError):
        await engine.generate(request())
    assert len(server.requests) == 1


async def test_hanging_server(server: ResponsesServer) -> None:
    """A server that never answers is asked once, and given up after the timeout."""
    server.script(HANG)
    engine = LiteLLMEngine("openai/test", attempts=1, api_key=KEY, api_base=server.url, timeout=1)
    with pytest.raises(exceptions.EngineTimeoutError, match="within 1 s"):
        await engine.generate(request())
    assert len(server.requests) == 1


async def test_refused_connection(server: ResponsesServer) -> None:
    """A server that is not there is unavailable, though no key is set for it."""
    engine = LiteLLMEngine("xai/test", attempts=1, api_base="http://127.0.0.1:1/v1")
    with pytest.raises(exceptions.EngineUnavailableError):
        await engine.generate(request())


async def test_prompt_that_openai_refuses(server: ResponsesServer, engine: LiteLLMEngine) -> None:
    """A result without its call is a bad request: the test's server refuses what OpenAI does."""
    server.script("never said")
    with pytest.raises(exceptions.EngineBadRequestError):
        await engine.generate(request(*answered(CALL)[2:]))


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ("gpt-4o", "OPENAI_API_KEY"),
        ("gemini-2.5-flash", "GEMINI_API_KEY or GOOGLE_API_KEY"),
        ("azure/gpt", "the provider's key"),
    ],
)
async def test_missing_key(server: ResponsesServer, monkeypatch: pytest.MonkeyPatch, model: str, said: str) -> None:
    """Without a key the error is one of authentication and says which to set, whatever litellm makes of it."""
    for name in KEY_NAMES:
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(exceptions.EngineAuthenticationError, match=f"no API key; set {said}") as caught:
        await LiteLLMEngine(model).generate(request())
    assert caught.value.status is None


@pytest.mark.parametrize(
    ("environment", "globals_", "expected"),
    [({}, {}, True), ({"XAI_API_KEY": "k"}, {}, False), ({}, {"xai_key": "k"}, False), ({}, {"api_key": "k"}, False)],
)
def test_missing_key_without_words(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], globals_: dict[str, str], expected: bool
) -> None:
    """A call that reached no server failed for want of a key where litellm can have none from anywhere."""
    monkeypatch.delenv("XAI_API_KEY", raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert lacks_key(SimpleNamespace(**globals_), "grok-4") is expected


async def test_loaded_once(server: ResponsesServer, engine: LiteLLMEngine) -> None:
    """Warming up twice, or before the first request, loads litellm once."""
    await engine.warm_up()
    loaded = engine._litellm
    await engine.warm_up()
    assert engine._litellm is loaded is sys.modules["litellm"]
    assert loaded.suppress_debug_info is True


def test_import_loads_no_litellm() -> None:
    """Importing the engines, and making one, loads neither litellm nor pydantic."""
    program = (
        "import sys; from chatflow.engines import LiteLLMEngine, ScriptedEngine; LiteLLMEngine(); ScriptedEngine();"
        "sys.exit(bool({'litellm', 'pydantic', 'openai'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
