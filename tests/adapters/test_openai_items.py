from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chatflow import Message, Role, ToolCall, ToolResult, UnstorableValueError, prune
from chatflow.adapters.openai_items import ITEMS_KEY, latest, to_items, to_messages
from chatflow.core.history import History
from chatflow.core.pruning import Window
from tests.adapters.items import Conversation, Item, call_id, conversations

USER = {"role": "user", "content": "hello"}


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
    assert not rest or rest[0]["role"] == "user"
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
    """A limit gives as many whole turns as have no more items, the last turn at least, and parts no pair."""
    messages = messages_of(conversation)
    history, items = history_of(messages, 1000), conversation.items
    found = latest(history, limit)
    before = items[: len(items) - len(found)]
    assert [*before, *found] == items
    assert pairs(before) | pairs(found) == pairs(items)
    if len(items) <= limit or not limit or front_of(items) == len(items):
        assert found == (items if limit else [])
        return
    turns = range(1, 1 + sum(message.role is Role.USER for message in messages))
    lengths = [len(items) - front_of(items), *(len(found) for found in map(_turns(messages), turns))]
    assert len(found) == max([length for length in lengths[1:] if length <= limit], default=min(lengths))


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
    call = {"type": "function_call", "call_id": "c", "name": "report", "arguments": "{}"}
    output = {"type": "function_call_output", "call_id": "c", "output": "done"}
    for items in ([call, output, USER], [call, USER, output]):
        for cut in range(3):
            messages = messages_of(Conversation([items[:cut], items[cut:]]))
            assert to_items(history_of(messages, 1)) == items


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
