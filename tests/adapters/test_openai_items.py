from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chatflow import AudioPart, Message, Role, ToolCall, ToolResult, UnstorableValueError, prune
from chatflow.adapters.openai_items import ITEMS_KEY, latest, to_items, without_last
from chatflow.adapters.openai_items import to_messages as to_some_messages
from chatflow.core.history import History
from chatflow.core.pruning import Window
from chatflow.engines.common_form import PROVIDER_KEY
from chatflow.engines.responses_form import OUTPUT_KEY
from tests.adapters.items import Conversation, Item, call_id, conversations

USER = {"role": "user", "content": "hello"}
DEVELOPER = {"role": "developer", "content": "The user is Ada."}
CALL = {"type": "function_call", "call_id": "c", "name": "report", "arguments": "{}"}
OUTPUT = {"type": "function_call_output", "call_id": "c", "output": "done"}
ANSWER = {"role": "assistant", "content": "Bye."}


def to_messages(items: Sequence[Item], history: Sequence[Message], agent_name: str) -> list[Message]:
    """The messages of items of which none may be left out."""
    return to_some_messages(items, history, agent_name, pytest.fail)


def messages_of(conversation: Conversation) -> list[Message]:
    """The messages of the conversation, each piece added to those before."""
    messages: list[Message] = []
    for piece in conversation.pieces:
        messages.extend(to_messages(piece, messages, "Support"))
    return messages


def history_of(messages: Sequence[Message], max_turns: int) -> History:
    """The history that a session keeps of these messages."""
    window = Window()
    for message in messages:
        assert window.unmatched(message) is None
        assert window.add(message), "nothing that is added is lost"
    return window.history(max_turns)


def pairs(items: Sequence[Item]) -> set[str]:
    """The ids of calls whose results are among the items too."""
    found = [pair for item in items if (pair := call_id(item)) is not None]
    return {id_ for id_, answers in found if answers} & {id_ for id_, answers in found if not answers}


def front_of(items: Sequence[Item]) -> int:
    """How many items stand before the first user message."""
    return next((place for place, item in enumerate(items) if item.get("role") == "user"), len(items))


@given(conversations)
def test_items_come_back(conversation: Conversation) -> None:
    """Whatever the items, and in whatever pieces they come, all come back equal and in order."""
    messages = messages_of(conversation)
    assert to_items(history_of(messages, 1000)) == conversation.items
    assert prune(messages, 1000) == tuple(messages)


@given(conversations)
def test_items_are_json(conversation: Conversation) -> None:
    """What comes back is plain, and its reader's own."""
    items = to_items(messages_of(conversation))
    assert json.loads(json.dumps(items)) == conversation.items
    for item in items:
        item["mine"] = True


@given(conversations, st.integers(1, 4))
def test_whole_turns(conversation: Conversation, max_turns: int) -> None:
    """Pruning takes items away from a user message to the next, and never one of a pair; the front stays."""
    items = conversation.items
    front = front_of(items)
    left = latest(history_of(messages_of(conversation), max_turns), None)
    cut = len(items) - len(left)
    assert left == [*items[:front], *items[front + cut :]]
    rest = left[front:]
    questions = [item for item in rest if item.get("role") not in {"system", "developer"}]
    assert not rest or questions[0]["role"] == "user"
    assert sum(item.get("role") == "user" for item in rest) >= min(
        max_turns, sum(each.get("role") == "user" for each in items)
    )
    gone = items[front : front + cut]
    split = {pair[0] for item in gone if (pair := call_id(item))} & {
        pair[0] for item in rest if (pair := call_id(item))
    }
    assert split == set()


@given(conversations, st.integers(0, 12))
def test_limit(conversation: Conversation, limit: int) -> None:
    """A limit gives as few whole turns as have so many items, or all that there is, and parts no pair."""
    messages = messages_of(conversation)
    history, items = history_of(messages, 1000), conversation.items
    found = latest(history, limit)
    before = items[: len(items) - len(found)]
    assert [*before, *found] == items
    assert pairs(before) | pairs(found) == pairs(items)
    turns = range(1, 1 + sum(message.role is Role.USER for message in messages))
    lengths = [*(len(found) for found in map(_turns(messages), turns)), len(items)]
    assert len(found) == (min(length for length in lengths if length >= min(limit, len(items))) if limit else 0)


def _turns(messages: Sequence[Message]) -> Callable[[int], list[Item]]:
    """The items of the last so many turns."""
    systems = sum(message.role is Role.SYSTEM for message in messages)
    return lambda turns: to_items(prune(messages, turns)[systems:])


def test_what_it_means_to_us() -> None:
    """Calls side by side are one message, their results another, by their tools' names; an answer is the agent's."""
    calls = [{"type": "function_call", "call_id": f"c{n}", "name": f"t{n}", "arguments": '{"n": 1}'} for n in (1, 2)]
    results = [{"type": "function_call_output", "call_id": f"c{n}", "output": "done"} for n in (2, 1)]
    messages = to_messages([USER, *calls], [], "Support")
    messages += to_messages([*results, {"role": "assistant", "content": "Both."}], messages, "Support")
    user, asks, tool, answer = messages
    assert (user.role, user.text) == (Role.USER, "hello")
    assert asks.tool_calls == tuple(ToolCall(id=f"c{n}", name=f"t{n}", args={"n": 1}) for n in (1, 2))
    assert tool.tool_results == tuple(ToolResult(tool_call_id=f"c{n}", name=f"t{n}", content="done") for n in (2, 1))
    assert (answer.text, answer.agent_name) == ("Both.", "Support")


def test_texts_are_kept_once() -> None:
    """What a message says itself is not kept beside it a second time."""
    output = {"type": "function_call_output", "call_id": "c", "output": "a long report"}
    call = {"type": "function_call", "call_id": "c", "name": "report", "arguments": "{}"}
    messages = to_messages([{"role": "system", "content": "Be brief."}, USER, call, output], [], "Support")
    kept = [message.extra[ITEMS_KEY] for message in messages]
    assert kept[0] == [{"role": "system"}]
    assert kept[1] == [{"role": "user"}]
    assert kept[3] == [{"type": "function_call_output", "call_id": "c"}]


def test_a_pair_in_front() -> None:
    """A result whose call stands before the first user message stays with it, wherever it comes."""
    for items in ([CALL, OUTPUT, USER], [CALL, USER, OUTPUT]):
        for cut in range(3):
            messages = messages_of(Conversation([items[:cut], items[cut:]]))
            assert to_items(history_of(messages, 1)) == items


def test_a_limit_and_a_pair_in_front() -> None:
    """No limit parts a result from its call before the first user message, nor keeps a later turn with them."""
    items = [CALL, USER, OUTPUT, USER, ANSWER]
    history = history_of(messages_of(Conversation([items])), 1000)
    assert [latest(history, limit) for limit in (1, 2, 3)] == [items[3:], items[3:], items]


def test_an_id_of_the_front_again() -> None:
    """A later call with the id of one in front has a result of its own."""
    items = [CALL, OUTPUT, USER, CALL, OUTPUT]
    for cut in range(6):
        messages = messages_of(Conversation([items[:cut], items[cut:]]))
        assert messages[-1].tool_results[0].tool_call_id == "c"
        assert latest(history_of(messages, 1), 1) == items[2:]


def test_instructions_with_a_question() -> None:
    """Instructions that come directly before a user message come and go with it, and stand where they stood."""
    items = [USER, ANSWER, DEVELOPER, DEVELOPER, USER, ANSWER, DEVELOPER]
    messages = to_messages(items, [], "Support")
    assert [message.role for message in messages] == [Role.USER, Role.MODEL, Role.USER, Role.MODEL]
    assert to_items(messages) == items
    history = history_of(messages, 1)
    assert to_items(history) == items[2:]
    assert latest(history_of(messages, 2), 1) == items[2:]
    assert messages[2].text == "hello"
    assert messages[2].extra[ITEMS_KEY][-1] == {"role": "user"}
    for number in range(6, 1, -1):
        popped, left = without_last(history, "Support")
        assert popped == items[number]
        history = history_of([*history[:-1], *([] if left is None else [left])], 1)
        assert to_items(history) == items[2:number]


@pytest.mark.parametrize("items", [[OUTPUT, USER], [USER, OUTPUT, CALL], [USER, {**CALL, "call_id": "other"}, OUTPUT]])
def test_a_result_without_its_call(items: list[Item]) -> None:
    """A result whose call is nowhere is left out alone, and told of."""
    left_out: list[str] = []
    messages = to_some_messages(items, [], "Support", left_out.append)
    assert left_out == ["c"]
    assert to_items(history_of(messages, 1)) == [item for item in items if item != OUTPUT]


@pytest.mark.parametrize("field", [{"arguments": None}, {"arguments": {"n": 1}}, {"name": None}, {"name": 5}])
def test_a_call_not_as_documented(field: Item) -> None:
    """A call is one by its id, whatever else it has, so that its result has its place."""
    items = [USER, {**CALL, **field}, OUTPUT, USER]
    messages = to_messages(items, [], "Support")
    assert to_items(messages) == items
    [call] = messages[1].tool_calls
    assert call.args == (field.get("arguments") or {})
    assert messages[2].tool_results[0].name == call.name


def test_our_own_messages() -> None:
    """Messages that a chatflow Runner has written are items as OpenAI takes them, ids the same in call and result."""
    messages = [
        Message(Role.SYSTEM, "Be brief."),
        Message(Role.USER, "Where is it?"),
        Message(Role.MODEL, "I'll look.", tool_calls=[ToolCall(id="no id: " * 9, name="look", args={"n": 1})]),
        Message(Role.TOOL, tool_results=[ToolResult(tool_call_id="no id: " * 9, name="look", content={"at": "home"})]),
        Message(Role.MODEL, "At home."),
    ]
    system, user, said, call, output, answer = to_items(messages)
    assert system == {"role": "system", "content": "Be brief."}
    assert user == {"role": "user", "content": "Where is it?"}
    assert [said["content"], answer["content"]] == ["I'll look.", "At home."]
    assert (call["name"], json.loads(call["arguments"])) == ("look", {"n": 1})
    assert json.loads(output["output"]) == {"at": "home"}
    assert call["call_id"] == output["call_id"]
    assert len(call["call_id"]) <= 64


@pytest.mark.parametrize("ids", ["xx", ["", ""], ["null", "a"], ["a b", "c"]])
def test_taking_back_our_own_messages(ids: Sequence[str]) -> None:
    """Of messages that a chatflow Runner has written, items are taken back one by one, and the others stay the same."""
    recording = AudioPart(data=b"abc", media_type="audio/mpeg")
    thoughts = [{"type": "reasoning", "encrypted_content": "abc", "summary": []}]
    order = [{"type": "message", "length": 4}, *[{"type": "function_call"}, *thoughts, {"type": "function_call"}]]
    extra = {OUTPUT_KEY: order, PROVIDER_KEY: "openai"}
    messages: list[Message] = []
    for id_, content in zip(ids, ("y", [recording]), strict=True):
        calls = [ToolCall(id=id_, name="look", args={"n": 1}), ToolCall(id=f"{id_}2", name="look")]
        results = [
            ToolResult(tool_call_id=calls[0].id, name="look", content={"at": "home"}),
            ToolResult(tool_call_id=calls[1].id, name="look", content=content),
        ]
        messages += [
            Message(Role.USER, "Where is it?"),
            Message(Role.MODEL, "Well", tool_calls=calls, extra=extra if content == "y" else {}),
            Message(Role.TOOL, tool_results=results),
        ]
    messages.append(Message(Role.MODEL, "At home."))
    history = history_of(messages, 1000)
    items = to_items(history)
    while items:
        popped, left = without_last(history, "Support")
        assert popped == items.pop()
        history = history_of([*history[:-1], *([] if left is None else [left])], 1000)
        assert to_items(history) == items


def test_pruning_after_taking_back() -> None:
    """What is left of a chatflow Runner's message has its call's id also when the turns before it have gone."""
    messages: list[Message] = []
    for _ in range(2):
        messages += [
            Message(Role.USER, "Where are they?"),
            Message(Role.MODEL, tool_calls=[ToolCall(id=id_, name="look") for id_ in "xy"]),
            Message(Role.TOOL, tool_results=[ToolResult(tool_call_id=id_, name="look", content=1) for id_ in "xy"]),
        ]
    history = history_of(messages, 1000)
    popped, left = without_last(history, "Support")
    assert left is not None
    for max_turns in (1, 2):
        items = to_items(history_of([*history[:-1], left], max_turns))
        assert items[-1]["call_id"] == items[-3]["call_id"]
        assert (popped["call_id"] == items[-2]["call_id"]) == (max_turns == 2)


@pytest.mark.parametrize("extra", [[], ["x"], "x", [{"role": "user"}, {"role": "user"}], None])
def test_what_others_have_written(extra: Any) -> None:
    """Where what was kept does not fit the message, the message speaks for itself."""
    call = Message(Role.MODEL, tool_calls=[ToolCall(id="c", name="look")])
    result = ToolResult(tool_call_id="c", name="look", content="done")
    tool = Message(Role.TOOL, tool_results=[result], extra={ITEMS_KEY: extra})
    assert to_items([call, tool])[1] == {"type": "function_call_output", "call_id": "c", "output": "done"}


@pytest.mark.parametrize(
    ("item", "path"),
    [("hello", "items[1]"), ({"role": "user", "content": [{"text": object()}]}, "items[1].content[0].text")],
)
def test_what_cant_be_kept(item: Any, path: str) -> None:
    """An item that would not come back equal is refused, by its path."""
    with pytest.raises(UnstorableValueError) as refusal:
        to_messages([USER, item], [], "Support")
    assert refusal.value.path == path


def test_too_deep() -> None:
    """What is just too deep to be kept in a message is refused as such."""
    deep: Any = []
    for _ in range(198):
        deep = [deep]
    with pytest.raises(UnstorableValueError, match="nest"):
        to_messages([USER, {"type": "of next year", "deep": deep}], [], "Support")
