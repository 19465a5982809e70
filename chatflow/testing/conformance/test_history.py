from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

import attrs
import pytest

from chatflow.core.messages import Message, Role, ToolResult
from chatflow.core.pruning import prune
from chatflow.core.session import SessionContext
from chatflow.core.store import BaseSessionStore
from chatflow.exceptions import SessionConflictError, UnmatchedToolResultError
from chatflow.testing.conformance.conftest import OpenStore, Restart
from chatflow.testing.conformance.conversation import (
    BILLING,
    SUPPORT,
    call,
    model,
    outside,
    result,
    say,
    stored,
    system,
    texts,
    user,
)

# --- pruning ---


async def test_memory_and_storage_agree(open_store: OpenStore) -> None:
    """After each commit the history in memory, the stored one and prune() of all messages are the same (P1)."""
    store = open_store(default_max_turns=3)
    session = await store.get_or_create("s", SUPPORT)
    said: list[Message] = []
    for number in range(12):
        turn = [user(f"u{number}"), call(f"c{number}"), result(f"c{number}"), model(f"m{number}")]
        if number % 4 == 1:
            turn.append(system(f"s{number}"))
        for message in turn:
            await session.add_message(message)
            said.append(message)
            expected = list(prune(said, 3))
            assert list(session.history) == expected
            assert list((await store.messages("s")).items) == expected


async def test_late_result_keeps_its_call(open_store: OpenStore) -> None:
    """A result that comes turns later keeps the turn of its call in the history."""
    session = await open_store(default_max_turns=2).get_or_create("s", SUPPORT)
    for message in (user("a"), call("c"), user("b"), result("c"), user("c"), user("d")):
        await session.add_message(message)
    assert texts(session.history) == ["c", "d"]


async def test_straddling_pair_widens_window(open_store: OpenStore) -> None:
    """As long as a kept result's call stands in an older turn, that turn is kept as well."""
    session = await open_store(default_max_turns=2).get_or_create("s", SUPPORT)
    for message in (user("a"), call("c"), user("b"), result("c"), user("d")):
        await session.add_message(message)
    assert texts(session.history) == ["a", "c", "b", "c", "d"]
    assert texts((await session.store.messages("s")).items) == ["a", "c", "b", "c", "d"]


async def test_prune_history_finds_nothing(open_store: OpenStore) -> None:
    """_prune_history() is a plain function and finds nothing to do."""
    session = await open_store(default_max_turns=1).get_or_create("s", SUPPORT)
    await say(session, "one", "two")
    session._prune_history()
    assert texts(session.history) == ["two", "two!"]


async def test_loading_prunes_nothing(store: BaseSessionStore, restart: Restart) -> None:
    """A store opened with a smaller default shows the whole history, and the next commit prunes it."""
    await say(await store.get_or_create("s", SUPPORT), "one", "two", "three")
    store = await restart(store, default_max_turns=1)
    session = await store.get_or_create("s", SUPPORT)
    assert texts(session.history) == ["one", "one!", "two", "two!", "three", "three!"]
    await say(session, "four")
    assert texts(session.history) == ["four", "four!"]
    assert texts((await store.messages("s")).items) == ["four", "four!"]


async def test_goes_on_after_restart(store: BaseSessionStore, restart: Restart) -> None:
    """A history that was read from the storage goes on as one that never left memory, results included."""
    session = await store.get_or_create("s", SUPPORT, max_turns=2)
    said = [user("a"), system("be brief"), user("b"), call("c")]
    for message in said:
        await session.add_message(message)
    store = await restart(store)
    session = await store.get_or_create("s", SUPPORT)
    for message in (result("c"), user("d"), system("be kind"), user("e")):
        said.append(message)
        await session.add_message(message)
        assert list(session.history) == list(prune(said, 2))
        assert list((await store.messages("s")).items) == list(prune(said, 2))


# --- what is not taken ---


async def test_greeting_is_dropped(store: BaseSessionStore, caplog: pytest.LogCaptureFixture) -> None:
    """A model's greeting before any user message is not stored, and a warning names session and rule."""
    session = await store.get_or_create("s", SUPPORT)
    await session.add_message(model("welcome"))
    assert session.history == []
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        (
            "WARNING",
            (
                "session 's': a model message before the first user message was not stored (rule: after the system"
                " messages, a history begins with a user message)"
            ),
        )
    ]
    await session.add_message(user("hello"))
    assert texts((await store.messages("s")).items) == ["hello"]


async def test_greeting_in_turn(store: BaseSessionStore, caplog: pytest.LogCaptureFixture) -> None:
    """A greeting dropped inside a turn leaves the turn's other messages alone."""
    session = await store.get_or_create("s", SUPPORT)
    async with session.turn():
        await session.add_message(system("be brief"))
        await session.add_message(model("welcome"))
        await session.add_message(user("hello"))
    assert texts(session.history) == ["be brief", "hello"]
    assert len(caplog.records) == 1


async def test_unmatched_result(store: BaseSessionStore) -> None:
    """A result without a call is refused, and nothing changes."""
    session = await store.get_or_create("s", SUPPORT)
    await session.add_message(user("hello"))
    with pytest.raises(UnmatchedToolResultError) as caught:
        await session.add_message(result("nothing"))
    assert (caught.value.session_id, caught.value.tool_call_id) == ("s", "nothing")
    assert texts(session.history) == ["hello"]
    assert texts((await store.messages("s")).items) == ["hello"]


async def test_unmatched_among_several(store: BaseSessionStore) -> None:
    """A tool message with one result too many is refused whole, and its calls stay open."""
    session = await store.get_or_create("s", SUPPORT)
    async with session.turn():
        await session.add_message(user("hello"))
        await session.add_message(call("c1"))
        with pytest.raises(UnmatchedToolResultError):
            await session.add_message(result("c1", "c2"))
        await session.add_message(result("c1"))
    assert texts(session.history) == ["hello", "c1", "c1"]


async def test_result_of_pruned_call(open_store: OpenStore) -> None:
    """A result whose call was pruned is refused, and nothing changes."""
    session = await open_store(default_max_turns=1).get_or_create("s", SUPPORT)
    for message in (user("a"), call("c"), user("b")):
        await session.add_message(message)
    with pytest.raises(UnmatchedToolResultError):
        await session.add_message(result("c"))
    assert texts(session.history) == ["b"]


async def test_result_of_cleared_call(store: BaseSessionStore) -> None:
    """A result whose call was cleared is refused."""
    session = await store.get_or_create("s", SUPPORT)
    async with session.turn():
        await session.add_message(user("a"))
        await session.add_message(call("c"))
        await session.clear_history()
        await session.add_message(user("b"))
        with pytest.raises(UnmatchedToolResultError):
            await session.add_message(result("c"))


async def test_result_of_call_rolled_back(store: BaseSessionStore) -> None:
    """A result whose call was rolled back is refused."""
    session = await store.get_or_create("s", SUPPORT)
    async with session.turn():
        await session.add_message(user("a"))
        token = session.checkpoint()
        await session.add_message(call("c"))
        await session.rollback_to(token)
        with pytest.raises(UnmatchedToolResultError):
            await session.add_message(result("c"))


async def test_result_of_failed_turns_call(store: BaseSessionStore) -> None:
    """A result whose call was added by a turn that failed is refused."""
    session = await store.get_or_create("s", SUPPORT)
    await session.add_message(user("a"))
    with suppress(ZeroDivisionError):
        async with session.turn():
            await session.add_message(call("c"))
            raise ZeroDivisionError
    with pytest.raises(UnmatchedToolResultError):
        await session.add_message(result("c"))


async def test_second_result(store: BaseSessionStore) -> None:
    """A second result for a call is kept beside the first."""
    session = await store.get_or_create("s", SUPPORT)
    for message in (user("a"), call("c"), result("c"), result("c")):
        await session.add_message(message)
    assert texts(session.history) == ["a", "c", "c", "c"]


# --- read-only ---

CHANGES: dict[str, Any] = {
    "append": lambda history: history.append(user("x")),
    "extend": lambda history: history.extend([user("x")]),
    "insert": lambda history: history.insert(0, user("x")),
    "pop": lambda history: history.pop(),
    "remove": lambda history: history.remove(history[0]),
    "clear": lambda history: history.clear(),
    "sort": lambda history: history.sort(),
    "reverse": lambda history: history.reverse(),
    "set item": lambda history: history.__setitem__(0, user("x")),
    "delete item": lambda history: history.__delitem__(0),
    "delete slice": lambda history: history.__delitem__(slice(None)),
    "add in place": lambda history: history.__iadd__([user("x")]),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
async def test_history_is_read_only(store: BaseSessionStore, change: Any) -> None:
    """What would change the history is refused and names what to use, in a turn and outside."""
    session = await store.get_or_create("s", SUPPORT)
    await session.add_message(user("hello"))
    with pytest.raises(TypeError, match="add_message"):
        change(session.history)
    async with session.turn():
        with pytest.raises(TypeError, match="rollback_to"):
            change(session.history)
    assert texts(session.history) == ["hello"]


async def test_history_is_a_snapshot(open_store: OpenStore) -> None:
    """A history once taken shows the same messages whatever happens later."""
    session = await open_store(default_max_turns=2).get_or_create("s", SUPPORT)
    await session.add_message(system("be brief"))
    await say(session, "one", "two")
    taken = session.history
    async with session.turn():
        inside = session.history
        await session.add_message(user("three"))
        await session.add_message(system("be kind"))
    await session.clear_history()
    for history in (taken, inside):
        assert texts(history) == ["be brief", "one", "one!", "two", "two!"]


async def test_what_was_handed_out_stays(open_store: OpenStore) -> None:
    """A conversation that the storage has handed out stays as it was, whatever is committed later."""
    store = open_store(default_max_turns=1)
    session = await store.get_or_create("s", SUPPORT, {"channel": "web"})
    handed_out: list[tuple[Any, Any]] = []

    def shown(snapshot: Any) -> dict[str, Any]:
        return attrs.asdict(
            attrs.evolve(snapshot, history=list(snapshot.history), metadata={**snapshot.metadata}), recurse=False
        ) | {"state": {**snapshot.state}}

    for number in range(3):
        found = await store.load_session(session.key, None)
        handed_out.append((found, shown(found)))
        session.state["number"] = number
        await say(session, str(number))
        await store.get_or_create("s", SUPPORT, {"number": number})
    await session.clear_history()
    assert [shown(found) for found, _ in handed_out] == [before for _, before in handed_out]


async def test_history_can_not_be_assigned(store: BaseSessionStore) -> None:
    """session.history can't be replaced."""
    session = await store.get_or_create("s", SUPPORT)
    with pytest.raises(AttributeError):
        session.history = []  # type: ignore[misc, assignment]


# --- clear_history ---


async def test_clear_history(store: BaseSessionStore) -> None:
    """clear_history removes all messages, system messages too, and leaves agent, state and metadata."""
    session = await store.get_or_create("s", SUPPORT, {"a": 1})
    await session.add_message(system("be brief"))
    await say(session, "hello")
    await session.set_active_agent(BILLING)
    session.state["x"] = 1
    await session.clear_history()
    after = await stored(store, "s")
    assert after == {"history": [], "agent": "Billing", "state": {"x": 1}, "metadata": {"a": 1}, "max_turns": 40}


async def test_clear_history_is_durable(store: BaseSessionStore, restart: Restart) -> None:
    """A history that was cleared and begun anew has only the new messages after a restart."""
    session = await store.get_or_create("s", SUPPORT)
    await say(session, "old")
    await session.clear_history()
    await say(session, "new")
    assert texts((await (await restart(store)).messages("s")).items) == ["new", "new!"]


async def test_history_begun_anew_in_one_turn(store: BaseSessionStore, restart: Restart) -> None:
    """A turn that clears the history and says something else has all of that, system messages too, after a restart."""
    session = await store.get_or_create("s", SUPPORT)
    await session.add_message(system("be brief"))
    await say(session, "old")
    async with session.turn():
        await session.clear_history()
        await session.add_message(user("new"))
        await session.add_message(system("be kind"))
    assert texts((await (await restart(store)).messages("s")).items) == ["be kind", "new"]


async def test_clear_history_in_failed_turn(store: BaseSessionStore) -> None:
    """A turn that clears the history and fails leaves it."""
    session = await store.get_or_create("s", SUPPORT)
    await say(session, "hello")
    with suppress(ZeroDivisionError):
        async with session.turn():
            await session.clear_history()
            assert session.history == []
            raise ZeroDivisionError
    assert texts(session.history) == ["hello", "hello!"]


# --- checkpoint and rollback ---


async def test_rollback_in_turn(store: BaseSessionStore) -> None:
    """A rollback inside a turn goes back to exactly the checkpoint: history, agent, state and metadata."""
    session = await store.get_or_create("s", SUPPORT, {"a": 1})
    async with session.turn():
        await session.add_message(user("hello"))
        session.state["x"] = 1
        token = session.checkpoint()
        await session.add_message(model("wrong"))
        await session.add_message(system("wrong"))
        await session.set_active_agent(BILLING)
        session.state.update(x=2, y=2)
        del session.metadata["a"]
        await session.rollback_to(token)
        assert texts(session.history) == ["hello"]
        await session.add_message(model("right"))
    after = await stored(store, "s")
    assert after is not None
    assert texts(after.pop("history")) == ["hello", "right"]
    assert after == {"agent": "Support", "state": {"x": 1}, "metadata": {"a": 1}, "max_turns": 40}


async def test_rollback_is_durable(store: BaseSessionStore, restart: Restart) -> None:
    """What a turn left after a rollback is what is there after a restart."""
    session = await store.get_or_create("s", SUPPORT, max_turns=2)
    await say(session, "one", "two")
    async with session.turn():
        token = session.checkpoint()
        await session.add_message(user("wrong"))
        await session.rollback_to(token)
        await session.add_message(user("three"))
    before = await stored(store, "s")
    assert before is not None
    assert texts(before["history"]) == ["two", "two!", "three"]
    assert await stored(await restart(store), "s") == before


async def test_rollback_past_pruning(open_store: OpenStore) -> None:
    """A rollback brings back the turns that were pruned since the checkpoint."""
    session = await open_store(default_max_turns=2).get_or_create("s", SUPPORT)
    await say(session, "one", "two")
    async with session.turn():
        token = session.checkpoint()
        for text in ("three", "four", "five"):
            await session.add_message(user(text))
        assert texts(session.history) == ["four", "five"]
        await session.rollback_to(token)
        assert texts(session.history) == ["one", "one!", "two", "two!"]
    assert texts((await session.store.messages("s")).items) == ["one", "one!", "two", "two!"]


async def test_rollback_past_clearing(store: BaseSessionStore) -> None:
    """A rollback brings back the messages that were cleared since the checkpoint."""
    session = await store.get_or_create("s", SUPPORT)
    await session.add_message(system("be brief"))
    await say(session, "hello")
    async with session.turn():
        token = session.checkpoint()
        await session.clear_history()
        await session.add_message(user("new"))
        await session.rollback_to(token)
    assert texts((await store.messages("s")).items) == ["be brief", "hello", "hello!"]


async def test_rollback_twice(store: BaseSessionStore) -> None:
    """One checkpoint can be gone back to several times, and an older one after it."""
    session = await store.get_or_create("s", SUPPORT)
    async with session.turn():
        empty = session.checkpoint()
        await session.add_message(user("hello"))
        token = session.checkpoint()
        for text in ("wrong", "wrong again"):
            await session.add_message(model(text))
            await session.rollback_to(token)
            assert texts(session.history) == ["hello"]
        await session.rollback_to(empty)
        assert session.history == []
        await session.rollback_to(token)
    assert texts((await store.messages("s")).items) == ["hello"]


async def test_rollback_outside_turn(open_store: OpenStore) -> None:
    """Outside a turn a rollback undoes the task's own operations since the checkpoint, pruned turns included."""
    session = await open_store(default_max_turns=2).get_or_create("s", SUPPORT, {"a": 1})
    await say(session, "one", "two")
    before = await stored(session.store, "s")
    token = session.checkpoint()
    await session.add_message(user("three"))
    await session.add_message(user("four"))
    await session.set_active_agent(BILLING)
    session.state["x"] = 1
    session.metadata["a"] = 2
    await session.save()
    await session.rollback_to(token)
    assert await stored(session.store, "s") == before


async def test_rollback_outside_is_durable(store: BaseSessionStore, restart: Restart) -> None:
    """A rollback outside a turn is durable when it returns."""
    session = await store.get_or_create("s", SUPPORT)
    await session.add_message(user("hello"))
    token = session.checkpoint()
    await session.add_message(user("wrong"))
    await session.rollback_to(token)
    assert texts((await (await restart(store)).messages("s")).items) == ["hello"]


def test_rollback_to_checkpoint_without_loop(store: BaseSessionStore) -> None:
    """A checkpoint can be taken where no event loop runs, and is good as long as nobody commits."""

    async def begin() -> SessionContext:
        session = await store.get_or_create("s", SUPPORT)
        await session.add_message(user("hello"))
        return session

    session = asyncio.run(begin())
    session.state["x"] = 1
    token = session.checkpoint()
    session.state.update(x=2, y=2)
    asyncio.run(session.rollback_to(token))
    assert (texts(session.history), session.state) == (["hello"], {"x": 1})
    asyncio.run(session.add_message(user("more")))
    with pytest.raises(SessionConflictError):
        asyncio.run(session.rollback_to(token))


async def test_rollback_outside_prunes_nothing(open_store: OpenStore, restart: Restart) -> None:
    """Outside a turn, going back restores what was stored, also where the store keeps fewer turns by now."""
    store = open_store()
    await say(await store.get_or_create("s", SUPPORT), "a", "b")
    store = await restart(store, default_max_turns=1)
    session = await store.get_or_create("s", SUPPORT)
    before = texts(session.history)
    await session.rollback_to(session.checkpoint())
    assert texts(session.history) == before == ["a", "a!", "b", "b!"]
    await say(session, "c")
    assert texts(session.history) == ["c", "c!"]


async def test_rollback_drops_waiting_changes(store: BaseSessionStore) -> None:
    """A rollback outside a turn goes back on changes that wait, and keeps those that waited at the checkpoint."""
    session = await store.get_or_create("s", SUPPORT)
    session.state["x"] = 1
    token = session.checkpoint()
    session.state.update(x=2, y=2)
    await session.rollback_to(token)
    assert session.state == {"x": 1}
    seen = await stored(store, "s")
    assert seen is not None
    assert seen["state"] == {"x": 1}


async def test_rollback_after_another_turn(store: BaseSessionStore) -> None:
    """Outside a turn a rollback is refused once somebody else's turn has committed, and nothing changes."""
    session = await store.get_or_create("s", SUPPORT)
    await session.add_message(user("hello"))
    token = session.checkpoint()
    await asyncio.create_task(outside(session.add_message(user("theirs"))))
    with pytest.raises(SessionConflictError):
        await session.rollback_to(token)
    assert texts(session.history) == ["hello", "theirs"]


async def test_rollback_after_turn_between_own(store: BaseSessionStore) -> None:
    """A rollback is refused also where the task itself has added messages after somebody else's turn."""
    session = await store.get_or_create("s", SUPPORT)
    token = session.checkpoint()
    await session.add_message(user("mine"))
    await outside(session.add_message(user("theirs")))
    await session.add_message(user("mine again"))
    with pytest.raises(SessionConflictError):
        await session.rollback_to(token)
    assert texts(session.history) == ["mine", "theirs", "mine again"]


async def test_rollback_after_turn_of_other_store(store: BaseSessionStore, second: BaseSessionStore) -> None:
    """A rollback is refused once another store on the same data has committed, though the session hadn't seen it."""
    session = await store.get_or_create("s", SUPPORT)
    token = session.checkpoint()
    await say(await second.get_or_create("s", SUPPORT), "theirs")
    with pytest.raises(SessionConflictError):
        await session.rollback_to(token)
    assert texts((await store.messages("s")).items) == ["theirs", "theirs!"]


async def test_rollback_to_ended_turn(store: BaseSessionStore) -> None:
    """A checkpoint taken in a turn is refused after that turn, and in another one."""
    session = await store.get_or_create("s", SUPPORT)
    async with session.turn():
        token = session.checkpoint()
        await session.add_message(user("hello"))
    with pytest.raises(SessionConflictError):
        await session.rollback_to(token)
    async with session.turn():
        with pytest.raises(SessionConflictError):
            await session.rollback_to(token)
    assert texts(session.history) == ["hello"]


async def test_outer_checkpoint_in_turn(store: BaseSessionStore) -> None:
    """A checkpoint taken before a turn can be gone back to inside it, if nobody has committed in between."""
    session = await store.get_or_create("s", SUPPORT)
    await session.add_message(user("hello"))
    token = session.checkpoint()
    async with session.turn():
        await session.add_message(user("wrong"))
        await session.rollback_to(token)
    assert texts((await store.messages("s")).items) == ["hello"]


async def test_rollback_in_failed_turn(store: BaseSessionStore) -> None:
    """A turn that rolls back and then fails leaves the last commit."""
    session = await store.get_or_create("s", SUPPORT)
    await say(session, "one")
    with suppress(ZeroDivisionError):
        async with session.turn():
            await session.rollback_to(0)
            raise ZeroDivisionError
    assert texts(session.history) == ["one", "one!"]


async def test_rollback_to_length(store: BaseSessionStore) -> None:
    """A length of the history is gone back to where the history has only grown since."""
    session = await store.get_or_create("s", SUPPORT)
    await say(session, "one")
    length = len(session.history)
    await say(session, "two")
    await session.rollback_to(length)
    assert texts(session.history) == ["one", "one!"]
    async with session.turn():
        await session.add_message(user("three"))
        await session.rollback_to(len(session.history) - 1)
        await session.add_message(user("four"))
    assert texts((await store.messages("s")).items) == ["one", "one!", "four"]


async def test_rollback_to_length_keeps_the_rest(store: BaseSessionStore) -> None:
    """A rollback to a length is about messages: agent, state and metadata stay."""
    session = await store.get_or_create("s", SUPPORT)
    async with session.turn():
        await session.add_message(user("one"))
        await session.set_active_agent(BILLING)
        session.state["x"] = 1
        await session.rollback_to(0)
    after = await stored(store, "s")
    assert after == {"history": [], "agent": "Billing", "state": {"x": 1}, "metadata": {}, "max_turns": 40}


async def test_length_after_pruning(open_store: OpenStore) -> None:
    """A length is refused once a turn was pruned, and nothing changes."""
    session = await open_store(default_max_turns=2).get_or_create("s", SUPPORT)
    await say(session, "one", "two", "three")
    with pytest.raises(ValueError, match="checkpoint"):
        await session.rollback_to(2)
    assert texts(session.history) == ["two", "two!", "three", "three!"]


async def test_length_in_pruning_turn(open_store: OpenStore) -> None:
    """A length is refused inside the turn that prunes."""
    session = await open_store(default_max_turns=2).get_or_create("s", SUPPORT)
    await say(session, "one", "two")
    async with session.turn():
        length = len(session.history)
        await session.add_message(user("three"))
        with pytest.raises(ValueError, match="checkpoint"):
            await session.rollback_to(min(length, len(session.history)))
    assert texts(session.history) == ["two", "two!", "three"]


async def test_length_after_system_message(store: BaseSessionStore) -> None:
    """A length is refused once a system message has moved to the front."""
    session = await store.get_or_create("s", SUPPORT)
    await say(session, "one")
    length = len(session.history)
    await session.add_message(system("be brief"))
    with pytest.raises(ValueError, match="checkpoint"):
        await session.rollback_to(length)
    assert texts(session.history) == ["be brief", "one", "one!"]


@pytest.mark.parametrize("wrong", [-1, 3, 10**30])
async def test_length_never_reached(store: BaseSessionStore, wrong: int) -> None:
    """A length the history never had is refused, and nothing changes."""
    session = await store.get_or_create("s", SUPPORT)
    await say(session, "one")
    with pytest.raises(ValueError, match="2 messages"):
        await session.rollback_to(wrong)
    assert texts(session.history) == ["one", "one!"]


@pytest.mark.parametrize("wrong", [True, 1.0, "1", None], ids=repr)
async def test_no_checkpoint(store: BaseSessionStore, wrong: Any) -> None:
    """What is neither a checkpoint nor a length is refused, and nothing changes."""
    session = await store.get_or_create("s", SUPPORT)
    await say(session, "one")
    with pytest.raises(TypeError, match="rollback_to"):
        await session.rollback_to(wrong)
    assert texts(session.history) == ["one", "one!"]


async def test_checkpoint_of_other_conversation(store: BaseSessionStore) -> None:
    """A checkpoint of another conversation is refused, and nothing changes."""
    session, other = await store.get_or_create("s", SUPPORT), await store.get_or_create("t", SUPPORT)
    await say(session, "one")
    await say(other, "two")
    with pytest.raises((SessionConflictError, ValueError)):
        await session.rollback_to(other.checkpoint())
    assert texts(session.history) == ["one", "one!"]


async def test_result_content_is_kept_whole(store: BaseSessionStore) -> None:
    """A tool message with several results for calls of one message is kept as it is."""
    session = await store.get_or_create("s", SUPPORT)
    answered = Message(
        Role.TOOL,
        tool_results=[ToolResult(tool_call_id=each, name="look_up", content={"of": each}) for each in ("b", "a")],
    )
    for message in (user("a"), call("a", "b"), answered):
        await session.add_message(message)
    assert (await store.messages("s")).items[-1] == answered
