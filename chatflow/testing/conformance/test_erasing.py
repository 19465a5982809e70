"""Erasing and exporting: all that is kept of an owner goes at once, or is handed out."""

from __future__ import annotations

import asyncio
import base64
import datetime as dt
import json
from collections.abc import Awaitable, Callable
from typing import Any, Final

import attrs
import pytest

from chatflow.core import backend, export
from chatflow.core.agent import Agent
from chatflow.core.backend import StoreBackend
from chatflow.core.codec import message_from_json, values_from_json
from chatflow.core.messages import Message, Role
from chatflow.core.owners import ALL, Erased
from chatflow.core.records import Lost, NewSession
from chatflow.core.service import ServiceSession
from chatflow.core.session import SessionContext
from chatflow.core.store import BaseSessionStore
from chatflow.core.tools import tool
from chatflow.core.values import EMPTY
from chatflow.engines.scripted import ScriptedEngine
from chatflow.exceptions import SessionDeletedError
from chatflow.runner import Runner
from chatflow.testing.conformance.conftest import Clock, Restart
from chatflow.testing.conformance.conversation import SUPPORT, outside, queued, say, texts, user
from chatflow.testing.conformance.places import ticket
from chatflow.testing.conformance.test_owners import held
from chatflow.testing.conformance.work import Heard

NOTHING: Final = Erased(conversations=0, messages=0, turns=0, message_ids=0, set_aside=0)


async def fill(store: BaseSessionStore) -> None:
    """Two conversations with five messages, one answered, one accepted, and a mark of none."""
    runner = Runner(SUPPORT, store, ScriptedEngine(["hi"]))
    await runner.run_async("s", "hello", message_id="m")
    await runner.accept("s", "later", message_id="m2")
    session = await store.get_or_create("t", SUPPORT, {"a": 1})
    await say(session, "hello")
    await session.add_message(Message(Role.SYSTEM, "be brief"))
    await store.mark_message_processed("m3")
    await store.mark_message_processed("m3", session_id="nobody's")


FILLED: Final = Erased(conversations=2, messages=5, turns=1, message_ids=3, set_aside=0)


async def nothing_of(store: StoreBackend, owner: str) -> None:
    """Assert that nothing of an owner can be seen, in any way that there is."""
    face = store.for_owner(owner) if owner else store
    assert (await face.list_sessions()).items == ()
    assert await face.pending_turns() == ()
    for session_id in ("s", "t"):
        assert await face.get(session_id) is None
    assert await face.is_message_processed("m", session_id="s") is False
    assert await face.is_message_processed("m3") is False
    assert owner not in {info.owner for info in (await store.list_sessions(owner=ALL)).items}
    assert [json.loads(line)["kind"] async for line in store.export_owner(owner)] == ["export"]


# --- erasing ---


@pytest.mark.parametrize("owner", ["ann", ""])
async def test_erases(store: StoreBackend, owner: str) -> None:
    """All that is kept of an owner goes, is counted, and nothing of another owner goes with it."""
    faces = {name: store.for_owner(name) if name else store for name in ("ann", "bob", "")}
    for face in faces.values():
        await fill(face)
    assert await store.erase_owner(owner) == FILLED
    await nothing_of(store, owner)
    assert await held(store) == sorted((name, each) for name in faces if name != owner for each in ("s", "t"))
    for name, face in faces.items():
        if name != owner:
            assert await face.is_message_processed("m", session_id="s") is True
            assert await face.is_message_processed("m3") is True
            assert len(await face.pending_turns()) == 1
    assert await store.check() == ()
    assert await store.erase_owner(owner) == NOTHING


async def test_by_its_own_store(store: StoreBackend) -> None:
    """An owner's store erases and exports its own."""
    ann = store.for_owner("ann")
    await fill(ann)
    assert len([line async for line in ann.export_owner("ann")]) == 1 + 2 + 1 + 3
    assert await ann.erase_owner("ann") == FILLED
    await nothing_of(store, "ann")


async def test_survives(store: StoreBackend, restart: Restart) -> None:
    """What was erased is gone after a restart."""
    await fill(store.for_owner("ann"))
    await store.erase_owner("ann")
    await nothing_of(await restart(store), "ann")


@pytest.mark.parametrize("rewrite", [False, True])
async def test_rewrites(store: StoreBackend, rewrite: bool) -> None:
    """Whether the file is written anew or not, all others' conversations stay as they are, and go on."""
    await fill(store.for_owner("ann"))
    session = await store.get_or_create("s", SUPPORT)
    await say(session, "hello")
    assert (await store.erase_owner("ann", rewrite_file=rewrite)).flushed is True
    await say(session, "again")
    assert texts((await store.messages("s")).items) == ["hello", "hello!", "again", "again!"]


async def test_sessions_in_use(store: StoreBackend) -> None:
    """Whoever uses an erased conversation is told that it was deleted, and brings nothing back."""
    ann = store.for_owner("ann")
    await fill(ann)
    session = await ann.get_or_create("s", SUPPORT)
    mine = await store.get_or_create("s", SUPPORT)
    await store.erase_owner("ann")
    assert (session.deleted, mine.deleted) == (True, False)
    with pytest.raises(SessionDeletedError):
        await session.add_message(user("back"))
    await mine.add_message(user("hello"))
    await nothing_of(store, "ann")


async def test_sessions_of_another_store(store: StoreBackend, second: StoreBackend) -> None:
    """Another store finds out with the next use, also while the rows are still there."""
    await fill(store.for_owner("ann"))
    session = await second.for_owner("ann").get_or_create("t", SUPPORT)
    again = await second.for_owner("ann").get_or_create("s", SUPPORT)
    await store.hide_owner("ann")
    with pytest.raises(SessionDeletedError):
        await session.add_message(user("back"))
    await nothing_of(store, "ann")
    await store.erase_owner("ann")
    with pytest.raises(SessionDeletedError):
        await again.save()
    await nothing_of(second, "ann")


async def test_turn_under_way(store: StoreBackend, second: StoreBackend) -> None:
    """A turn under way, in this store or in another, can't commit, and those that wait behind it are told."""
    session = await store.for_owner("ann").get_or_create("s", SUPPORT)
    with pytest.raises(SessionDeletedError):  # noqa: PT012  # the turn fails at its end
        async with session.turn():
            await session.add_message(user("hello"))
            waiting = asyncio.create_task(outside(session.add_message(user("next"))))
            await queued(store, 1)
            await second.erase_owner("ann")
            store.line.wake_all()
            await asyncio.wait([waiting])
    assert isinstance(waiting.exception(), SessionDeletedError)
    await nothing_of(store, "ann")


async def test_hidden_turn(store: StoreBackend) -> None:
    """A turn that is open when its owner is hidden can't commit while the rows are still there, nor note anything."""
    session = await store.for_owner("ann").get_or_create("s", SUPPORT)
    with pytest.raises(SessionDeletedError):  # noqa: PT012  # the turn fails at its end
        async with session.turn():
            await session.add_message(user("hello"))
            await store.hide_owner("ann")
    await nothing_of(store, "ann")


async def test_waiting_turns(store: StoreBackend) -> None:
    """Turns that wait for their places are woken, and told."""
    session = await store.for_owner("ann").get_or_create("s", SUPPORT)
    other = await store.get_or_create("s", SUPPORT)
    waiting: list[asyncio.Task[Any]] = []
    with pytest.raises(SessionDeletedError):  # noqa: PT012  # the turn fails at its end
        async with session.turn(), other.turn():
            for each in (session, session, other):
                waiting.append(asyncio.create_task(outside(each.add_message(user("next")))))
                await queued(store, len(waiting))
            await store.erase_owner("ann")
            await asyncio.wait(waiting[:2])
    await asyncio.wait(waiting)
    assert [type(task.exception()) for task in waiting] == [SessionDeletedError, SessionDeletedError, type(None)]


async def test_work(store: StoreBackend) -> None:
    """Accepted work of an erased owner is not done any more."""
    runner = Runner(SUPPORT, store, ScriptedEngine(["hi"]))
    await runner.for_owner("ann").accept("s", "hello", message_id="m")
    await runner.accept("s", "hello", message_id="m")
    await store.erase_owner("ann")
    heard = Heard()
    async with runner.working(heard):
        await heard.of(1)
    assert [turn.owner for turn in heard.turns] == [""]
    await nothing_of(store, "ann")


async def test_begins_anew(store: StoreBackend) -> None:
    """What an owner begins afterwards is new, has nothing of the old, and stays."""
    ann = store.for_owner("ann")
    await fill(ann)
    old = await ann.get_or_create("s", SUPPORT)
    await store.erase_owner("ann")
    session = await ann.get_or_create("s", SUPPORT)
    await session.add_message(user("new"))
    response = await Runner(SUPPORT, ann, ScriptedEngine(["new answer"])).run_async("s", "hello", message_id="m")
    assert (response.duplicate, response.content) == (False, "new answer")
    with pytest.raises(SessionDeletedError):
        await old.save()
    await store.purge()
    assert texts((await ann.messages("s")).items) == ["new", "hello", "new answer"]


async def test_begun_while_it_is_erased(store: StoreBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    """What an owner begins while the rows go is not touched."""
    ann = store.for_owner("ann")
    await fill(ann)
    drop = store.drop_hidden
    sessions: list[Any] = []

    async def and_then(limit: int) -> bool:
        if not sessions:
            sessions.append(await ann.get_or_create("s", SUPPORT))
            await sessions[0].add_message(user("new"))
        return await drop(limit)

    monkeypatch.setattr(store, "drop_hidden", and_then)
    assert await store.erase_owner("ann") == FILLED
    assert await ann.get("s") is sessions[0]
    assert texts((await ann.messages("s")).items) == ["new"]


async def test_slices(store: StoreBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    """However small the slices are, everything goes, and between them nothing is seen."""
    monkeypatch.setattr(backend, "_ERASED_AT_ONCE", 1)
    for owner in ("ann", "bob"):
        await fill(store.for_owner(owner))
    drop = store.drop_hidden

    async def look_first(limit: int) -> bool:
        await nothing_of(store, "ann")
        assert await store.check() == ()
        assert await store.repair() == ()
        return await drop(limit)

    monkeypatch.setattr(store, "drop_hidden", look_first)
    assert await store.erase_owner("ann") == FILLED
    assert await held(store) == [("bob", "s"), ("bob", "t")]


@pytest.mark.parametrize("finish", ["purge", "erase of another", "erase of the same", "purge of another"])
async def test_left_in_the_middle(store: StoreBackend, finish: str) -> None:
    """Erasing that ended after its first commit is finished by the next purge or erasing, of whatever owner."""
    for owner in ("ann", "bob"):
        await fill(store.for_owner(owner))
    await store.hide_owner("ann")
    await nothing_of(store, "ann")
    finishing: dict[str, Callable[[], Awaitable[object]]] = {
        "purge": store.purge,
        "erase of another": lambda: store.erase_owner("bob"),
        "erase of the same": lambda: store.erase_owner("ann"),
        "purge of another": store.for_owner("cid").purge,
    }
    await finishing[finish]()
    assert await store.drop_hidden(1) is False
    await nothing_of(store, "ann")


async def test_purge_counts_nothing_hidden(store: StoreBackend, clock: Clock) -> None:
    """A purge counts no conversations that are being erased."""
    for owner in ("ann", "bob"):
        await store.for_owner(owner).get_or_create("s", SUPPORT, expires_after=1)
        await store.for_owner(owner).get_or_create("t", SUPPORT)
    await store.hide_owner("ann")
    clock.passes(days=1)
    assert await store.purge(1, owner=ALL) == 2


async def test_cancelled(store: StoreBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    """Erasing that is cancelled at any moment has hidden everything or nothing, and can be finished."""
    monkeypatch.setattr(backend, "_ERASED_AT_ONCE", 1)
    for steps in range(40):
        await fill(store.for_owner("ann"))
        task = asyncio.create_task(store.erase_owner("ann"))
        for _ in range(steps):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        found = [info for info in (await store.list_sessions(owner=ALL)).items if info.owner == "ann"]
        assert len(found) in {0, 2}
        await store.erase_owner("ann")
        await nothing_of(store, "ann")


async def test_two_at_once(store: StoreBackend, second: StoreBackend) -> None:
    """Two that erase the same owner at once: one has erased it, the other found nothing, and nothing is left."""
    await fill(store.for_owner("ann"))
    tasks = [asyncio.create_task(each.erase_owner("ann")) for each in (store, second)]
    await asyncio.wait(tasks)
    counts = [attrs.evolve(task.result(), flushed=True) for task in tasks]
    assert sorted(counts, key=lambda each: each.conversations) == [NOTHING, FILLED]
    await nothing_of(store, "ann")


# --- exporting ---


async def exported(store: StoreBackend, owner: str) -> dict[str, list[dict[str, Any]]]:
    """An export's lines, read, by their kind."""
    found: dict[str, list[dict[str, Any]]] = {}
    async for line in store.export_owner(owner):
        assert "\n" not in line
        fields = json.loads(line)
        found.setdefault(fields.pop("kind"), []).append(fields)
    return found


@pytest.mark.parametrize("owner", ["ann", ""])
async def test_exports(store: StoreBackend, clock: Clock, owner: str) -> None:
    """Everything of an owner is in its export, and nothing of another's."""
    for name in ("ann", "bob", ""):
        await fill(store.for_owner(name) if name else store)
    found = await exported(store, owner)
    assert found["export"] == [{"format": 1, "owner": owner}]
    first, second = found["conversation"]
    assert (first["created_at"], first["updated_at"]) == (clock.now.isoformat(), clock.now.isoformat())
    face = store.for_owner(owner) if owner else store
    for line, session_id in ((first, "s"), (second, "t")):
        session = await face.get(session_id)
        assert session is not None
        assert line["session"] == session.to_dict()
        again = SessionContext.from_dict(line["session"], agents=[SUPPORT], owner=owner)
        assert again.history == session.history
    (turn,) = found["turn"]
    assert (turn["session_id"], turn["message_id"], turn["user_message"], turn["state"], turn["journal"]) == (
        "s",
        "m2",
        "later",
        "accepted",
        [],
    )
    assert [(each["session_id"], each["message_id"]) for each in found["message_id"]] == [
        (None, "m3"),
        ("nobody's", "m3"),
        ("s", "m"),
    ]
    answers = [each["response"] for each in found["message_id"]]
    assert answers[:2] == [None, None]
    assert answers[2]["content"] == "hi"


async def test_exported_values(store: StoreBackend) -> None:
    """Values of all kinds, and names that JSON has no plain form for, are in an export as they are in the store."""
    ann = store.for_owner("ann")
    values = {"when": dt.datetime(2030, 1, 1, tzinfo=dt.UTC), "lone": "\ud800", "$chatflow": 1, "nul": "a\0b"}
    service = ServiceSession({"context": "c"}, "Support", "a2a")
    new = NewSession(agent_name="Support", metadata=EMPTY, max_turns=3, service=service, expires_after=60.0)
    await store.create_session(ann.key_of("s\0'"), new)
    session = await ann.get_or_create("s\0'", SUPPORT)
    session.state.update(values)
    await session.add_message(user("\ud800"))
    (found,) = (await exported(store, "ann"))["conversation"]
    line = found["session"]
    assert line["session_id"] == {"$chatflow": "str", "v": base64.b64encode(b"s\0'").decode()}
    assert values_from_json(json.dumps(line["state"])) == values
    assert ServiceSession.from_data(values_from_json(json.dumps(line["service"]))) == service
    assert (line["max_turns"], line["expires_after"]) == (3, 60.0)
    assert message_from_json(json.dumps(line["messages"][0])).content == "\ud800"


async def test_exported_journal(store: StoreBackend) -> None:
    """What the tools of an unfinished turn have done is in its owner's export."""

    @tool
    async def look_up() -> str:
        """Look it up."""
        return "found it"

    agent = Agent(name="Support", tools=[look_up])
    engine = ScriptedEngine([ScriptedEngine.call("look_up"), OSError("no")])
    with pytest.raises(OSError, match="no"):
        await Runner(agent, store.for_owner("ann"), engine).run_async("s", "hello", message_id="m")
    (turn,) = (await exported(store, "ann"))["turn"]
    assert turn["state"] == "told"
    assert "found it" in json.dumps(turn["journal"])
    assert await store.read_journal(turn["turn_id"] + 1) == ()


async def test_exports_page_by_page(store: StoreBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    """However small the pages are, each thing is in an export once."""
    monkeypatch.setattr(export, "_PAGE", 1)
    await fill(store.for_owner("ann"))
    found = await exported(store, "ann")
    assert {kind: len(lines) for kind, lines in found.items()} == {
        "export": 1,
        "conversation": 2,
        "turn": 1,
        "message_id": 3,
    }


async def test_exports_what_changes(store: StoreBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is committed meanwhile changes no other line: each conversation is there once, one that has gone is not."""
    monkeypatch.setattr(export, "_PAGE", 2)
    ann = store.for_owner("ann")
    for number in range(6):
        await say(await ann.get_or_create(str(number), SUPPORT), "hello")
    found: list[str] = []
    async for line in store.export_owner("ann"):
        fields = json.loads(line)
        if fields["kind"] == "conversation":
            found.append(fields["session"]["session_id"])
            await (await ann.get_or_create("4", SUPPORT)).add_message(user("more"))
            await (await ann.get_or_create("0", SUPPORT)).add_message(user("more"))
            for session_id in ("1", "3"):
                await ann.delete(session_id)
    assert found == ["0", "2", "4", "5"]


async def test_exports_as_committed(store: StoreBackend) -> None:
    """A turn under way is not in its conversation's line; it is a line of its own."""
    session = await store.for_owner("ann").get_or_create("s", SUPPORT)
    async with session.turn():
        await session.add_message(user("hello"))
        found = await outside(exported(store, "ann"))
    assert found["conversation"][0]["session"]["messages"] == []
    assert [(turn["state"], turn["message_id"]) for turn in found["turn"]] == [("running", None)]


async def test_a_queued_turn(store: StoreBackend) -> None:
    """Asked for between the first commit and the rows' going, a place in an erased conversation is refused."""
    session = await store.for_owner("ann").get_or_create("s", SUPPORT)
    asks = ticket(session)
    await store.hide_owner("ann")
    assert await store.queue_turn(asks) is Lost.SESSION
    assert await store.pending_turns(owner=ALL) == ()


async def test_session_that_has_yet_to_begin(store: StoreBackend) -> None:
    """A session whose conversation is created with its first turn had nothing to erase, and begins afterwards."""
    session = SUPPORT.create_session("s", store.for_owner("ann"))
    store.adopt(session)
    assert await store.erase_owner("ann") == NOTHING
    await session.add_message(user("hello"))
    assert await store.for_owner("ann").get("s") is session
