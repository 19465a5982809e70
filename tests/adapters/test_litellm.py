from __future__ import annotations

import json
from typing import Any

import litellm
import pytest
from hypothesis import given
from hypothesis import strategies as st
from litellm.utils import validate_and_fix_openai_messages

from chatflow import (
    Agent,
    AudioPart,
    FilePart,
    ImagePart,
    Message,
    Role,
    ScriptedEngine,
    SessionStore,
    TextPart,
    ToolCall,
    ToolResult,
    UnknownPart,
    UnstorableValueError,
    prune,
)
from chatflow.adapters.litellm import MESSAGE_KEY, from_litellm, to_litellm
from chatflow.engines.common_form import INVALID_ARGUMENTS_KEY
from tests.judges.hostile import MODELS
from tests.judges.test_judges import refused

PICTURE: Any = {"type": "image_url", "image_url": {"url": "data:image/png;base64,YWJj", "detail": "high"}}


def call(id_: str, arguments: str = '{"order_id":  "4"}', **more: Any) -> dict[str, Any]:
    """A call as chat completions have it."""
    return {"id": id_, "type": "function", "function": {"name": "check", "arguments": arguments}, **more}


CONVERSATION: Any = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": "Where is it?"}, PICTURE], "name": "Ada"},
    {"role": "assistant", "content": None, "tool_calls": [call("call_1"), call("call_2", "{not json")]},
    {"role": "tool", "tool_call_id": "call_1", "name": "check", "content": '{"status": "in transit"}'},
    {"role": "tool", "tool_call_id": "call_2", "content": [{"type": "text", "text": "no such order"}]},
    {"role": "assistant", "content": "In transit.", "refusal": None, "annotations": []},
]

_texts = st.sampled_from(["", " ", "hello", "Grüße"])
_more = st.dictionaries(st.sampled_from(["name", "cache_control", "provider_specific_fields"]), _texts | st.none())
_parts = st.one_of(
    _texts.map(lambda text: {"type": "text", "text": text, "cache_control": {"type": "ephemeral"}}),
    st.just(PICTURE),
    st.just({"type": "image_url", "image_url": "https://example.com/a.png"}),
    st.just({"type": "input_audio", "input_audio": {"data": "YWJj", "format": "wav"}}),
    st.just({"type": "file", "file": {"file_id": "file-1"}}),
    st.just({"type": "video_url", "video_url": {"url": "https://example.com/a.mp4"}}),
)
_calls = st.lists(
    st.builds(call, st.sampled_from(["", "a", "b", "c__thought__sig"]), st.sampled_from(["{}", "", "[1]", '{"a": 1}'])),
    max_size=2,
)


def lists_of(contents: st.SearchStrategy[Any]) -> st.SearchStrategy[list[Any]]:
    """Lists of messages with such contents."""
    messages = st.one_of(
        st.builds(
            lambda role, content, more: {"role": role, "content": content, **more},
            st.sampled_from(["system", "developer", "user", "assistant"]),
            contents,
            _more,
        ),
        st.builds(
            lambda content, calls, more: {"role": "assistant", "content": content, "tool_calls": calls, **more},
            contents,
            _calls,
            _more,
        ),
        st.builds(
            lambda id_, content, more: {"role": "tool", "tool_call_id": id_, "content": content, **more},
            st.sampled_from(["", "a", "b", "c__thought__sig"]),
            contents,
            _more,
        ),
        st.just({"role": "assistant", "content": None, "function_call": {"name": "check", "arguments": "{}"}}),
        st.just({"role": "function", "name": "check", "content": "done"}),
        st.just({"content": "no role"}),
    )
    return st.lists(messages, max_size=8)


_plain = st.none() | _texts


@given(lists_of(_plain | st.lists(_parts, max_size=2)))
def test_lists_come_back(messages: list[Any]) -> None:
    """Any list of such messages comes back equal, its reader's own."""
    found = to_litellm(from_litellm(messages))
    assert found == messages
    for message in found:
        message["mine"] = True
    assert to_litellm(from_litellm(messages)) == messages


@given(lists_of(_plain | st.just([PICTURE])), st.sampled_from(MODELS))
def test_what_is_sent(messages: list[Any], model: str) -> None:
    """What a model is sent of any list, as litellm converts it, is what its provider takes."""
    found = prune(from_litellm(messages), 1000)
    assert refused(model, found) == []
    sent = to_litellm(found, model=model)
    calls = [each["id"] for message in sent for each in message.get("tool_calls") or ()]
    assert calls == [message["tool_call_id"] for message in sent if message["role"] == "tool"]


def test_what_it_means_to_us() -> None:
    """Parts, names, calls and results are ours; arguments that are no JSON object are none, and are kept."""
    system, user, asks, first, second, answer = from_litellm(CONVERSATION, agent_name="Support")
    assert (system.role, system.text) == (Role.SYSTEM, "Be brief.")
    assert user.content == (TextPart("Where is it?"), ImagePart(data=b"abc", media_type="image/png"))
    assert asks.tool_calls == (
        ToolCall(id="call_1", name="check", args={"order_id": "4"}),
        ToolCall(id="call_2", name="check", args={}),
    )
    assert asks.extra[INVALID_ARGUMENTS_KEY] == {"1": "{not json"}
    assert first.tool_results == (ToolResult(tool_call_id="call_1", name="check", content='{"status": "in transit"}'),)
    assert second.tool_results == (ToolResult(tool_call_id="call_2", name="check", content="no such order"),)
    assert (answer.text, answer.agent_name) == ("In transit.", "Support")
    assert answer.extra[MESSAGE_KEY] == [{"role": "assistant", "refusal": None, "annotations": []}]


def test_parts() -> None:
    """A message's parts are parts here, by address or as bytes."""
    content = [
        {"type": "image_url", "image_url": {"url": "https://example.com/a", "format": "image/webp"}},
        {"type": "image_url", "image_url": "https://example.com/a"},
        {"type": "input_audio", "input_audio": {"data": "YWJj", "format": "wav"}},
        {"type": "file", "file": {"file_id": "file-1", "format": "application/pdf"}},
        {"type": "file", "file": {"file_data": "data:text/plain;base64,YWJj", "filename": "a.txt"}},
        {"type": "video_url", "video_url": {"url": "https://example.com/a.mp4"}},
    ]
    [message] = from_litellm([{"role": "user", "content": content}])
    assert message.content == (
        ImagePart(url="https://example.com/a", media_type="image/webp"),
        ImagePart(url="https://example.com/a"),
        AudioPart(data=b"abc", media_type="audio/wav"),
        FilePart(url="file-1", media_type="application/pdf"),
        FilePart(data=b"abc", media_type="text/plain", filename="a.txt"),
        UnknownPart("video_url", {"video_url": {"url": "https://example.com/a.mp4"}}),
    )


def test_calls_of_before() -> None:
    """A ``function_call``, from before there were several at once, is a call, and a function's message its result."""
    _, asks, result = from_litellm(
        [
            {"role": "user", "content": "Where is it?"},
            {"role": "assistant", "content": None, "function_call": {"name": "check", "arguments": '{"a": 1}'}},
            {"role": "function", "name": "check", "content": "here"},
        ]
    )
    assert asks.tool_calls == (ToolCall(id="", name="check", args={"a": 1}),)
    assert result.tool_results == (ToolResult(tool_call_id="", name="check", content="here"),)


def test_what_is_said_twice() -> None:
    """Calls come before a ``function_call`` beside them, and a result's own name before its call's."""
    function = {"name": "of before", "arguments": "{}"}
    asks, result = from_litellm(
        [
            {"role": "assistant", "content": None, "tool_calls": [call("call_1")], "function_call": function},
            {"role": "tool", "tool_call_id": "call_1", "name": "mine", "content": "here"},
        ]
    )
    assert [each.name for each in asks.tool_calls] == ["check"]
    assert result.tool_results[0].name == "mine"


def test_a_model_that_answers_in_parts() -> None:
    """A model's answer may be parts too, as those who keep caches write it."""
    parts = [{"type": "text", "text": "In "}, {"type": "text", "text": "transit."}]
    [answer] = from_litellm([{"role": "assistant", "content": parts}])
    assert answer.content == (TextPart("In "), TextPart("transit."))
    assert answer.text == "In transit."


def test_calls_of_another_kind() -> None:
    """A call of a kind that has no function is a call without a name, and its result belongs to it."""
    custom = {"id": "call_1", "type": "custom", "custom": {"name": "sql", "input": "SELECT 1"}}
    messages: list[Any] = [
        {"role": "user", "content": "Where is it?"},
        {"role": "assistant", "content": None, "tool_calls": [custom]},
        {"role": "tool", "tool_call_id": "call_1", "content": "here"},
    ]
    found = from_litellm(messages)
    assert prune(found, 1) == found
    assert to_litellm(found) == messages


def test_signed_ids() -> None:
    """A signature that litellm has written into a call's id is no part of it, in call and result alike."""
    messages: list[Any] = [
        {"role": "user", "content": "Where is it?"},
        {"role": "assistant", "content": None, "tool_calls": [call("call_1__thought__abc")]},
        {"role": "tool", "tool_call_id": "call_1__thought__abc", "content": "here"},
    ]
    _, asks, result = from_litellm(messages)
    assert (asks.tool_calls[0].id, result.tool_results[0].tool_call_id) == ("call_1", "call_1")
    assert result.tool_results[0].name == "check"


def test_thoughts_go_back() -> None:
    """A named model's thoughts go back to its provider, and to no other."""
    thinking = [{"type": "thinking", "thinking": "hm", "signature": "abc"}]
    messages: list[Any] = [
        {"role": "user", "content": "Where is it?"},
        {"role": "assistant", "content": "Here.", "thinking_blocks": thinking},
        {"role": "user", "content": "Sure?"},
    ]
    found = from_litellm(messages, model="anthropic/claude-sonnet-4-5")
    assert to_litellm(found, model="anthropic/claude-sonnet-4-5")[1]["thinking_blocks"] == thinking
    assert "thinking_blocks" not in to_litellm(found, model="openai/gpt-4o")[1]
    assert "thinking_blocks" not in to_litellm(from_litellm(messages), model="anthropic/claude-sonnet-4-5")[1]
    # Only the model tells the servers apart that speak OpenAI's language.
    local = from_litellm(messages, model="openai/qwen3")
    assert "thinking_blocks" in to_litellm(local, model="openai/qwen3")[1]
    assert "thinking_blocks" not in to_litellm(local, model="openai/gpt-4o")[1]
    assert to_litellm(found) == messages


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        ({"role": "narrator", "content": "x"}, "role 'narrator' is not known"),
        ({"role": 7, "content": "x"}, "its role must be text, not int"),
        ({"role": ["user"], "content": "x"}, "its role must be text, not FrozenList"),
        ({"role": "user", "content": 5}, "its content must be text or a list of parts, not int"),
        ({"role": "user", "content": {"a": 1}}, "its content must be text or a list of parts, not FrozenDict"),
        ({"role": "user", "content": ["x"]}, "a part of its content must be a mapping, not str"),
        ({"role": "user", "content": [{"text": "x"}]}, "it has no 'type'"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": 5}]}, "of another type than is documented"),
        ({"role": "tool", "content": "x"}, "it has no 'tool_call_id'"),
        ({"role": "tool", "tool_call_id": 5, "content": "x"}, "its tool_call_id must be text, not int"),
        ({"role": "assistant", "tool_calls": [{"function": {"name": "x", "arguments": {"a": 1}}}]}, "must be text"),
        ({"role": "assistant", "tool_calls": [{"function": "x"}]}, "a call's function must be a mapping, not str"),
        ({"role": "assistant", "tool_calls": [5]}, "a call must be a mapping, not int"),
        ({"role": "assistant", "tool_calls": 5}, "of another type than is documented"),
    ],
)
def test_what_is_none(message: Any, reason: str) -> None:
    """What is no such message is refused by its place."""
    with pytest.raises(ValueError, match=r"messages\[1\] is no message of a chat completion: .*" + reason):
        from_litellm([{"role": "user", "content": "hi"}, message])


@pytest.mark.parametrize(
    ("message", "path"), [("hi", "messages[0]"), ({"role": "user", "x": object()}, "messages[0].x")]
)
def test_what_cant_be_kept(message: Any, path: str) -> None:
    """What would not come back equal is refused by its path."""
    with pytest.raises(UnstorableValueError) as refusal:
        from_litellm([message])
    assert refusal.value.path == path


def test_too_deep() -> None:
    """What is just too deep to be kept in a message is refused as such."""
    deep: Any = []
    for _ in range(198):
        deep = [deep]
    with pytest.raises(UnstorableValueError, match="nest"):
        from_litellm([{"role": "user", "content": "hi", "deep": deep}])


def test_a_real_conversation() -> None:
    """What litellm's responses hold goes into a list as it is or dumped, and the list goes back to litellm."""
    tools = [{"id": "call_1", "type": "function", "function": {"name": "check", "arguments": '{"a":1}'}}]
    messages: list[Any] = [{"role": "user", "content": "Where is it?"}]
    asked: Any = litellm.completion(model="gpt-4o", messages=messages, mock_response="", mock_tool_calls=tools)
    messages.append(asked.choices[0].message)
    messages.append({"role": "tool", "tool_call_id": "call_1", "content": "in transit"})
    answered: Any = litellm.completion(model="gpt-4o", messages=messages, mock_response="In transit.")
    messages.append(answered.choices[0].message.model_dump())

    found = from_litellm(messages, model="gpt-4o")
    assert [message.role for message in found] == [Role.USER, Role.MODEL, Role.TOOL, Role.MODEL]
    assert found[1].tool_calls == (ToolCall(id="call_1", name="check", args={"a": 1}),)
    kept, sent = to_litellm(found), to_litellm(found, model="gpt-4o")
    assert kept == [messages[0], messages[1].model_dump(), *messages[2:]]
    for each in (kept, sent):
        assert json.loads(json.dumps(each)) == each
        assert len(validate_and_fix_openai_messages(json.loads(json.dumps(each)))) == 4
        assert litellm.token_counter(model="gpt-4o", messages=each) > 20
        again: Any = litellm.completion(model="gpt-4o", messages=each, mock_response="Bye.")
        assert again.choices[0].message.content == "Bye."


def test_calls_without_ids() -> None:
    """A call that has no id is answered by a result that names none."""
    messages: list[Any] = [
        {"role": "user", "content": "Where is it?"},
        {"role": "assistant", "content": None, "tool_calls": [{**call("x"), "id": None}]},
        {"role": "tool", "tool_call_id": None, "content": "here"},
        {"role": "assistant", "content": None, "tool_calls": [call("x__thought__")]},
        {"role": "tool", "tool_call_id": "x__thought__", "content": "here"},
    ]
    found = from_litellm(messages)
    assert prune(found, 1) == found
    assert to_litellm(found) == messages


@pytest.mark.parametrize("cut", range(5))
async def test_what_comes_before_the_user(cut: int) -> None:
    """What a list holds before its first user message is kept by a session too, and no model is sent it."""
    messages: list[Any] = [
        {"role": "assistant", "content": "Welcome!"},
        {"role": "assistant", "content": None, "tool_calls": [call("call_1")]},
        {"role": "tool", "tool_call_id": "call_1", "content": "Ada"},
        {"role": "user", "content": "Where is it?"},
        {"role": "assistant", "content": "Here."},
    ]
    async with SessionStore(default_max_turns=1) as store:
        session = await store.get_or_create("conversation-7", Agent("Support"))
        for piece in (messages[:cut], messages[cut:]):
            for message in from_litellm(piece, history=session.history):
                await session.add_message(message)
        assert to_litellm(session.history) == messages
        assert to_litellm(session.history, model="gpt-4o") == messages[3:]


async def test_results_of_calls_in_the_history() -> None:
    """A result that is added to its call has that one's name."""
    [_, asks] = from_litellm([{"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": [call("call_1")]}])
    [result] = from_litellm([{"role": "tool", "tool_call_id": "call_1", "content": "here"}], history=[asks])
    assert result.role is Role.SYSTEM  # no user message is there
    [_, result] = from_litellm(
        [{"role": "user", "content": "x"}, {"role": "tool", "tool_call_id": "call_1", "content": "here"}],
        history=[asks],
    )
    assert result.tool_results[0].name == "check"


async def test_a_session_goes_on() -> None:
    """A list goes into a session, an agent goes on with it, and its messages come out after those that were there."""
    agent = Agent("Support", engine=ScriptedEngine(["You're welcome."]))
    async with SessionStore() as store:
        session = await store.get_or_create("conversation-7", agent)
        async with session.turn():
            for message in from_litellm(CONVERSATION, history=session.history):
                await session.add_message(message)
        await agent.run("Thanks", session=session)
        assert to_litellm(session.history) == [
            *CONVERSATION,
            {"role": "user", "content": "Thanks"},
            {"role": "assistant", "content": "You're welcome."},
        ]


def test_an_open_call() -> None:
    """A call without a result is kept as it is, and answered where it is sent."""
    messages = [Message(Role.USER, "Where is it?"), Message(Role.MODEL, tool_calls=[ToolCall(id="c", name="check")])]
    assert [message["role"] for message in to_litellm(messages)] == ["user", "assistant"]
    assert [message["role"] for message in to_litellm(messages, model="gpt-4o")] == ["user", "assistant", "tool"]
