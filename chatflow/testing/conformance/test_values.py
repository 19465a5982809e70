from __future__ import annotations

import asyncio
import datetime as dt
import decimal
import uuid
from contextlib import suppress
from typing import Any

import anyio
import pytest

from chatflow.core.messages import FilePart, ImagePart, Message, Part, Role, TextPart, ToolCall, ToolResult
from chatflow.core.store import BaseSessionStore
from chatflow.exceptions import SessionConflictError, SessionStateError, UnstorableValueError
from chatflow.testing.conformance.conftest import Restart
from chatflow.testing.conformance.conversation import SUPPORT, outside, queued, say, stored, texts, user


async def test_metadata_given_at_creation(store: BaseSessionStore) -> None:
    """A new conversation has the metadata it was created with."""
    assert (await store.get_or_create("s", SUPPORT, {"channel": "web"})).metadata == {"channel": "web"}


async def test_metadata_merged_by_key(store: BaseSessionStore, second: BaseSessionStore) -> None:
    """Metadata given for a conversation that exists is merged by top-level key, durably and at once."""
    session = await store.get_or_create("s", SUPPORT, {"a": {"x": 1}, "b": 1})
    await store.get_or_create("s", SUPPORT, {"a": {"y": 2}, "c": None})
    expected = {"a": {"y": 2}, "b": 1, "c": None}
    assert session.metadata == expected
    seen = await stored(second, "s")
    assert seen is not None
    assert seen["metadata"] == expected


async def test_metadata_merged_during_turn(store: BaseSessionStore) -> None:
    """Metadata is merged without waiting for the turn that is open."""
    session = await store.get_or_create("s", SUPPORT, {"a": 1})
    async with session.turn():
        await outside(store.get_or_create("s", SUPPORT, {"b": 2}))
        seen = await stored(store, "s")
        assert seen is not None
        assert seen["metadata"] == {"a": 1, "b": 2}


async def test_commit_keeps_merged_metadata(store: BaseSessionStore) -> None:
    """A turn's commit keeps what was merged meanwhile, and wins only for the keys it has set itself."""
    session = await store.get_or_create("s", SUPPORT, {"theirs": 1, "mine": 1, "both": 1, "gone": 1})
    async with session.turn():
        await session.add_message(user("hello"))
        session.metadata["mine"] = 2
        session.metadata["both"] = 2
        del session.metadata["gone"]
        await outside(store.get_or_create("s", SUPPORT, {"theirs": 3, "both": 3, "new": 3}))
    expected = {"theirs": 3, "mine": 2, "both": 2, "new": 3}
    assert session.metadata == expected
    seen = await stored(store, "s")
    assert seen is not None
    assert seen["metadata"] == expected


async def test_failed_turn_keeps_merged_metadata(store: BaseSessionStore) -> None:
    """What was merged during a turn stays when the turn fails."""
    session = await store.get_or_create("s", SUPPORT)
    with suppress(ZeroDivisionError):
        async with session.turn():
            await outside(store.get_or_create("s", SUPPORT, {"a": 1}))
            raise ZeroDivisionError
    assert session.metadata == {"a": 1}


async def test_merges_at_once(store: BaseSessionStore) -> None:
    """Merges of different keys at the same moment are all kept."""
    async with anyio.create_task_group() as group:
        for number in range(8):
            group.start_soon(store.get_or_create, "s", SUPPORT, {str(number): number})
    assert (await store.get_or_create("s", SUPPORT)).metadata == {str(number): number for number in range(8)}


async def test_change_outside_waits(store: BaseSessionStore) -> None:
    """A change of state or metadata outside a turn is seen through the session and not yet stored."""
    session = await store.get_or_create("s", SUPPORT, {"a": 1})
    session.state["x"] = 1
    session.metadata["b"] = 2
    del session.metadata["a"]
    assert (session.state, session.metadata) == ({"x": 1}, {"b": 2})
    assert (await store.list_sessions()).items[0].metadata == {"a": 1}


async def test_save(store: BaseSessionStore, second: BaseSessionStore) -> None:
    """save() makes waiting changes durable."""
    session = await store.get_or_create("s", SUPPORT, {"a": 1})
    session.state["x"] = 1
    session.metadata["b"] = 2
    del session.metadata["a"]
    await session.save()
    seen = await stored(second, "s")
    assert seen is not None
    assert (seen["state"], seen["metadata"]) == ({"x": 1}, {"b": 2})


async def test_save_without_changes(store: BaseSessionStore) -> None:
    """save() of nothing is no commit: the order of list_sessions stays."""
    first = await store.get_or_create("first", SUPPORT)
    await store.get_or_create("second", SUPPORT)
    await first.save()
    assert [info.session_id for info in (await store.list_sessions()).items] == ["second", "first"]


async def test_waiting_change_joins_next_turn(store: BaseSessionStore) -> None:
    """A change that waits is part of the next turn, whose members see it."""
    session = await store.get_or_create("s", SUPPORT)
    session.state["x"] = 1
    async with session.turn():
        assert session.state == {"x": 1}
        await session.add_message(user("hello"))
    seen = await stored(store, "s")
    assert seen is not None
    assert seen["state"] == {"x": 1}


async def test_waiting_change_outlasts_failed_turn(store: BaseSessionStore, second: BaseSessionStore) -> None:
    """A change that waits goes on waiting when the turn it joined fails."""
    session = await store.get_or_create("s", SUPPORT, {"a": 1})
    session.state["x"] = 1
    del session.metadata["a"]
    with suppress(ZeroDivisionError):
        async with session.turn():
            session.state["x"] = 2
            raise ZeroDivisionError
    assert (session.state, session.metadata) == ({"x": 1}, {})
    await session.save()
    seen = await stored(second, "s")
    assert seen is not None
    assert (seen["state"], seen["metadata"]) == ({"x": 1}, {})


async def test_waiting_changes_join_key_by_key(store: BaseSessionStore, second: BaseSessionStore) -> None:
    """Changes that wait leave keys alone that others have committed in the meantime."""
    session = await store.get_or_create("s", SUPPORT)
    other = await second.get_or_create("s", SUPPORT)
    session.state["mine"] = 1
    other.state["theirs"] = 2
    await other.save()
    await session.save()
    assert session.state == {"mine": 1, "theirs": 2}


async def test_change_by_outsider_during_turn(store: BaseSessionStore) -> None:
    """A change made by an outsider during a turn is not part of it, and joins the next one."""
    session = await store.get_or_create("s", SUPPORT)

    async def change() -> None:
        session.state["x"] = "outside"

    async with session.turn():
        await outside(change())
        assert session.state == {}
        session.state["y"] = "inside"
    seen = await stored(store, "s")
    assert seen is not None
    assert seen["state"] == {"x": "outside", "y": "inside"}
    assert [dict((await store.get_or_create("s", SUPPORT)).state)] == [{"x": "outside", "y": "inside"}]
    assert session.pending["state"].keys() == {"x"}
    await session.save()
    assert session.pending["state"] == {}


async def test_same_change_again_during_turn(store: BaseSessionStore) -> None:
    """A change made by an outsider during a turn waits for the next one also if it had made the same before."""
    session = await store.get_or_create("s", SUPPORT)

    async def change() -> None:
        session.state["x"] = "outside"

    session.state["x"] = "outside"
    async with session.turn():
        session.state["x"] = "inside"
        await outside(change())
    await session.save()
    assert session.state == {"x": "outside"}


async def test_assigning_replaces_all(store: BaseSessionStore) -> None:
    """Assigning to session.state or session.metadata replaces all keys, as one change that waits."""
    session = await store.get_or_create("s", SUPPORT, {"a": 1, "b": 1})
    session.state = {"x": 1, "y": 1}
    await session.save()
    session.metadata = {"b": 2}
    session.state = {"y": 2, "z": 2}
    await session.save()
    seen = await stored(store, "s")
    assert seen is not None
    assert (seen["state"], seen["metadata"]) == ({"y": 2, "z": 2}, {"b": 2})


async def test_values_behave_like_a_dict(store: BaseSessionStore) -> None:
    """State takes part in what a dict can do: pop, setdefault, update, clear, length, iteration while it changes."""
    state = (await store.get_or_create("s", SUPPORT)).state
    state.update(a=1, b=2, c=3)
    assert (state.pop("a"), state.setdefault("b", 9), state.setdefault("d", 4), len(state)) == (1, 2, 4, 3)
    for key in state:
        del state[key]
    assert (len(state), "b" in state, state.get("b")) == (0, False, None)
    with pytest.raises(KeyError):
        del state["b"]
    with pytest.raises(KeyError):
        state["b"]


async def test_values_equal_mappings_only(store: BaseSessionStore) -> None:
    """State equals a mapping with the same items, and nothing else."""
    state = (await store.get_or_create("s", SUPPORT)).state
    state["a"] = 1
    others: list[object] = [{"a": 2}, {}, [("a", 1)], "a", 1, None]
    assert state == {"a": 1}
    assert state not in others


async def test_values_show_their_items(store: BaseSessionStore) -> None:
    """State and metadata are shown as the dict they stand for."""
    session = await store.get_or_create("s", SUPPORT, {"channel": "web"})
    session.state["a"] = 1
    assert (repr(session.metadata), repr(session.state)) == ("{'channel': 'web'}", "{'a': 1}")


async def test_values_are_copies(store: BaseSessionStore) -> None:
    """What is put into state or metadata can't be changed from outside afterwards, nor through what is read."""
    items = [1]
    session = await store.get_or_create("s", SUPPORT, {"items": items})
    session.state["items"] = items
    items.append(2)
    assert (session.state, session.metadata) == ({"items": [1]}, {"items": [1]})
    with pytest.raises(TypeError, match="can't be changed"):
        session.state["items"].append(3)
    await session.save()
    assert session.state == {"items": [1]}


UNSTORABLE = {"object": object(), "function": print, "nested": {"list": [1, {2, 3}, object()]}, "class": int}


@pytest.mark.parametrize("wrong", UNSTORABLE.values(), ids=UNSTORABLE.keys())
async def test_unstorable_state(store: BaseSessionStore, wrong: object) -> None:
    """A value that can't be kept is refused by its path when it is set, and nothing changes (P8)."""
    session = await store.get_or_create("s", SUPPORT)
    session.state["x"] = 1
    for values in (session.state, session.metadata):
        with pytest.raises(SessionStateError) as caught:
            values["x"] = wrong
        assert caught.value.session_id == "s"
    assert (session.state, session.metadata) == ({"x": 1}, {})


async def test_path_of_unstorable_state(store: BaseSessionStore) -> None:
    """The error about a value that can't be kept names the kind, the key and the place in its value."""
    session = await store.get_or_create("s", SUPPORT)
    with pytest.raises(SessionStateError) as caught:
        session.state["cart"] = {"items": [1, object()]}
    assert caught.value.path == "state.cart.items[1]"
    with pytest.raises(SessionStateError) as caught:
        session.metadata["cart"] = object()
    assert caught.value.path == "metadata.cart"


async def test_unstorable_replacement(store: BaseSessionStore) -> None:
    """Assigning a mapping with one value that can't be kept changes no key."""
    session = await store.get_or_create("s", SUPPORT, {"a": 1})
    with pytest.raises(SessionStateError):
        session.metadata = {"b": 2, "c": object()}
    assert session.metadata == {"a": 1}


@pytest.mark.parametrize("wrong", [{"a": object()}, {1: "a"}, [("a", 1)], "a"], ids=["object", "key", "pairs", "text"])
async def test_unstorable_metadata_at_creation(store: BaseSessionStore, wrong: Any) -> None:
    """Metadata that can't be kept is refused by get_or_create, and nothing is created or merged."""
    with pytest.raises(SessionStateError):
        await store.get_or_create("s", SUPPORT, wrong)
    assert await store.get("s") is None
    session = await store.get_or_create("s", SUPPORT, {"old": 1})
    with pytest.raises(SessionStateError):
        await store.get_or_create("s", SUPPORT, wrong)
    assert session.metadata == {"old": 1}


async def test_unstorable_message_in_turn(store: BaseSessionStore) -> None:
    """A message that can't be kept is refused by its path when it is made, and the turn can go on without it."""
    session = await store.get_or_create("s", SUPPORT)
    async with session.turn():
        await session.add_message(user("hello"))
        with pytest.raises(UnstorableValueError) as caught:
            await session.add_message(Message(Role.USER, "x", extra={"a": [object()]}))
    assert caught.value.path == "extra.a[0]"
    assert texts(session.history) == ["hello"]


@pytest.mark.parametrize("wrong", ["hello", None, {"role": "user", "content": "hello"}], ids=repr)
async def test_no_message(store: BaseSessionStore, wrong: Any) -> None:
    """What is no Message is refused by add_message, and nothing changes."""
    session = await store.get_or_create("s", SUPPORT)
    with pytest.raises(TypeError, match="add_message takes a Message"):
        await session.add_message(wrong)
    assert session.history == []


@pytest.mark.parametrize("wrong", ["Billing", None], ids=repr)
async def test_no_active_agent(store: BaseSessionStore, wrong: Any) -> None:
    """What is no Agent is refused by set_active_agent, and nothing changes."""
    session = await store.get_or_create("s", SUPPORT)
    with pytest.raises(TypeError, match="set_active_agent takes an Agent"):
        await session.set_active_agent(wrong)
    assert session.active_agent is SUPPORT


DEEP: list[Any] = []
for _ in range(150):
    DEEP = [DEEP]

KEPT: dict[str, Any] = {
    "NaN": float("nan"),
    "infinity": float("-inf"),
    "minus zero": -0.0,
    "integer past 64 bits": 2**200,
    "NUL": "a\x00b",
    "lone surrogate": "\ud800",
    "datetime": dt.datetime(2030, 1, 2, 3, 4, 5, 6, tzinfo=dt.timezone(dt.timedelta(hours=-3))),
    "date": dt.date(2030, 1, 2),
    "UUID": uuid.UUID(int=7),
    "decimal": decimal.Decimal("1.10"),
    "bytes": bytes(range(256)),
    "set": {1, "a"},
    "tuple": (1, (2, ())),
    "keys": {1: "a", None: "b", "c": {2.5: "d"}},
    "null": None,
    "true": True,
    "one": 1,
    "envelope": {"$type": "datetime", "$value": "2030-01-02", "__chatflow__": 1},
    "deep": DEEP,
    "empty": {"": [[], {}, (), ""]},
}


@pytest.mark.parametrize("value", KEPT.values(), ids=KEPT.keys())
async def test_values_come_back_equal(store: BaseSessionStore, restart: Restart, value: Any) -> None:
    """A value in state, metadata, a tool's arguments and its result is the same after a restart (P8)."""
    session = await store.get_or_create("s", SUPPORT, {"v": value})
    called = Message(Role.MODEL, tool_calls=[ToolCall(id="c", name="t", args={"v": value})])
    answered = Message(Role.TOOL, tool_results=[ToolResult(tool_call_id="c", name="t", content=value)])
    async with session.turn():
        session.state["v"] = value
        for message in (user("go"), called, answered):
            await session.add_message(message)
    before = await stored(store, "s")
    after = await stored(await restart(store), "s")
    assert repr(after) == repr(before)
    assert repr(before and before["state"]["v"]) == repr(session.state["v"])


async def test_messages_come_back_equal(store: BaseSessionStore, restart: Restart) -> None:
    """Every field of a message is the same after a restart."""
    parts: list[Part] = [
        TextPart("a"),
        ImagePart(url="https://x/y.png"),
        FilePart(data=b"\x00", media_type="a/b", filename="f"),
    ]
    messages = [
        Message(Role.SYSTEM, "be brief", timestamp=dt.datetime(2020, 1, 1, tzinfo=dt.UTC)),
        Message(Role.USER, parts),
        Message(
            Role.MODEL,
            "",
            tool_calls=[ToolCall(id="", name="t"), ToolCall(id="", name="t", args={"a": 1})],
            agent_name="Support",
            usage={"tokens": 2},
            extra={"signature": b"\xff"},
        ),
        Message(
            Role.TOOL,
            tool_results=[
                ToolResult(tool_call_id="", name="t", content=None, is_error=True),
                ToolResult(tool_call_id="", name="t", content=parts),
            ],
        ),
        Message(Role.MODEL, None),
    ]
    session = await store.get_or_create("s", SUPPORT)
    async with session.turn():
        for message in messages:
            await session.add_message(message)
    assert list((await (await restart(store)).messages("s")).items) == messages


async def test_true_is_not_one(store: BaseSessionStore, restart: Restart) -> None:
    """Replacing 1 by True, which is equal to it, is a change that is stored."""
    session = await store.get_or_create("s", SUPPORT, {"x": 1})
    session.state["x"] = 1
    await session.save()
    session.state["x"] = True
    session.metadata["x"] = True
    await session.save()
    after = await stored(await restart(store), "s")
    assert after is not None
    assert (after["state"]["x"], after["metadata"]["x"]) == (True, True)
    assert (type(after["state"]["x"]), type(after["metadata"]["x"])) == (bool, bool)


async def test_pending_of_two_turns(store: BaseSessionStore) -> None:
    """A change that waits behind a turn already queued joins that turn, since it begins later."""
    session = await store.get_or_create("s", SUPPORT)
    waiting: list[asyncio.Task[None]] = []

    async def change() -> None:
        session.state["x"] = 1

    async with session.turn():
        waiting.append(asyncio.create_task(outside(session.add_message(user("next")))))
        await queued(store, 1)
        await outside(change())
    await waiting[0]
    assert session.pending["state"] == {}
    await say(session, "again")
    assert session.state == {"x": 1}


async def test_update_is_all_or_nothing(store: BaseSessionStore) -> None:
    """Setting several keys at once sets none if one of the values can't be kept."""
    session = await store.get_or_create("s", SUPPORT)
    with pytest.raises(SessionStateError):
        session.state.update(kept=1, refused=object())
    assert session.state == {}
    session.state.update({"a": 1}, b=2)
    assert session.state == {"a": 1, "b": 2}


async def test_turn_without_a_net_change_settles_what_waited(store: BaseSessionStore) -> None:
    """A change that waited and was undone in the turn that took it up is gone, and does not come back with the next."""
    session = await store.get_or_create("s", SUPPORT)
    session.state["x"] = 1
    async with session.turn():
        del session.state["x"]
    assert session.state == {}
    await session.save()
    assert session.state == {}


async def test_left_over_of_a_failed_turn(store: BaseSessionStore) -> None:
    """What still runs of a turn that failed can change nothing: not by setting values, not by adding messages."""
    session = await store.get_or_create("s", SUPPORT)
    go_on = anyio.Event()
    refused: list[str] = []

    async def left_over() -> None:
        await go_on.wait()
        try:
            session.state["x"] = 1
        except SessionConflictError as error:
            refused.append(error.reason)
        try:
            await session.add_message(user("late"))
        except SessionConflictError as error:
            refused.append(error.reason)

    async with anyio.create_task_group() as group:

        async def fail() -> None:
            async with session.turn():
                group.start_soon(left_over)
                raise LookupError

        with pytest.raises(LookupError):
            await fail()
        go_on.set()
    assert refused == ["the turn that this code belongs to has ended without a commit"] * 2
    await session.save()
    assert (session.state, len(session.history)) == ({}, 0)
