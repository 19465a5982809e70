"""Owners: each one's conversations are its own, and nobody else can tell that they exist (P11)."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Coroutine
from typing import Any, Final

import pytest

from chatflow.core import upkeep
from chatflow.core.agent import Agent
from chatflow.core.backend import StoreBackend
from chatflow.core.owners import ALL
from chatflow.core.records import Key, NewSession
from chatflow.core.service import ServiceSession
from chatflow.core.store import BaseSessionStore
from chatflow.core.values import EMPTY
from chatflow.engines.scripted import ScriptedEngine
from chatflow.exceptions import (
    SessionDeletedError,
    SessionNotFoundError,
    StoreOwnerRequiredError,
    StoreScopeError,
)
from chatflow.runner import Runner
from chatflow.testing.conformance.conftest import Restart
from chatflow.testing.conformance.conversation import BILLING, SUPPORT, say, texts, user
from chatflow.testing.conformance.work import Heard

Use = Callable[[BaseSessionStore], Coroutine[Any, Any, object]]

USES: Final[dict[str, Use]] = {
    "get_or_create": lambda store: store.get_or_create("s", SUPPORT),
    "get": lambda store: store.get("s"),
    "get_by_service_id": lambda store: store.get_by_service_id(SUPPORT, "resp_1"),
    "delete": lambda store: store.delete("s"),
    "clear": lambda store: store.clear(),
    "list_sessions": lambda store: store.list_sessions(),
    "messages": lambda store: store.messages("s"),
    "is_message_processed": lambda store: store.is_message_processed("m"),
    "is_message_processed in a session": lambda store: store.is_message_processed("m", session_id="s"),
    "mark_message_processed": lambda store: store.mark_message_processed("m"),
    "mark_message_processed in a session": lambda store: store.mark_message_processed("m", session_id="s"),
    "pending_turns": lambda store: store.pending_turns(),
    "purge": lambda store: store.purge(1),
    "run_async": lambda store: Runner(SUPPORT, store, ScriptedEngine(["hi"])).run_async("s", "hello"),
    "accept": lambda store: Runner(SUPPORT, store).accept("s", "hello", message_id="m"),
}
ADMINISTRATION: Final[dict[str, Use]] = {
    "list_sessions": lambda store: store.list_sessions(owner=ALL),
    "pending_turns": lambda store: store.pending_turns(owner=ALL),
    "purge": lambda store: store.purge(1, owner=ALL),
    "purge_processed_messages": lambda store: store.purge_processed_messages(),
    "check": lambda store: store.check(),
    "repair": lambda store: store.repair(),
    "erase_owner": lambda store: store.erase_owner("bob"),
    "erase those without an owner": lambda store: store.erase_owner(""),
    "export_owner": lambda store: anext(store.export_owner("bob")),
}


async def held(store: BaseSessionStore) -> list[tuple[str, str]]:
    """All owners' conversations, by their names."""
    return sorted((info.owner, info.session_id) for info in (await store.list_sessions(owner=ALL)).items)


# --- apart ---


async def test_same_id(store: StoreBackend) -> None:
    """The same session id under two owners, and without one, is three conversations."""
    for face in (store, store.for_owner("ann"), store.for_owner("bob")):
        session = await face.get_or_create("s", SUPPORT, {"whose": face.owner})
        await session.add_message(user(face.owner))
    for face in (store, store.for_owner("ann"), store.for_owner("bob")):
        session = await face.get_or_create("s", SUPPORT)
        assert (texts(session.history), dict(session.metadata)) == ([face.owner], {"whose": face.owner})
        assert texts((await face.messages("s")).items) == [face.owner]
        assert [(info.owner, info.session_id) for info in (await face.list_sessions()).items] == [(face.owner, "s")]


async def test_names_that_run_together(store: StoreBackend) -> None:
    """An owner's name and an id are never taken for others that together read the same."""
    await store.for_owner("a").get_or_create("b:c", SUPPORT)
    assert await store.for_owner("a:b").get("c") is None
    assert await store.for_owner("a:b").delete("c") is False


async def test_survives(store: StoreBackend, restart: Restart) -> None:
    """What an owner has is that owner's after a restart."""
    await say(await store.for_owner("ann").get_or_create("s", SUPPORT), "hello")
    again = await restart(store)
    assert await again.get("s") is None
    assert texts((await again.for_owner("ann").messages("s")).items) == ["hello", "hello!"]


@pytest.mark.parametrize("face", ["", "bob"])
async def test_absent_and_not_yours(store: StoreBackend, face: str) -> None:
    """Whatever is asked about a conversation of somebody else's is answered as if there were none."""
    owned = store.for_owner("ann")
    runner = Runner(SUPPORT, owned, ScriptedEngine(["hi"]))
    await runner.run_async("s", "hello", message_id="m")
    await runner.accept("s", "later", message_id="m2")
    await owned.mark_message_processed("m3")
    other = store if not face else store.for_owner(face)
    for session_id in ("s", "nobody's"):
        assert await other.get(session_id) is None
        assert await other.delete(session_id) is False
        assert await other.is_message_processed("m", session_id=session_id) is False
        with pytest.raises(SessionNotFoundError) as caught:
            await other.messages(session_id)
        assert str(caught.value) == str(SessionNotFoundError(session_id=session_id))
    assert await other.is_message_processed("m3") is False
    assert await other.pending_turns() == ()
    assert (await other.list_sessions()).items == ()
    assert await other.purge(0.001) == 0
    await other.clear()
    assert await held(store) == [("ann", "s")]
    assert await owned.is_message_processed("m", session_id="s") is True
    assert [turn.message_id for turn in await owned.pending_turns()] == ["m2"]


async def test_same_message_id(store: StoreBackend) -> None:
    """The same message id in the same session id of two owners is two messages."""
    runner = Runner(SUPPORT, store, ScriptedEngine(["one", "two"]))
    first = await runner.for_owner("ann").run_async("s", "hello", message_id="m")
    second = await runner.for_owner("bob").run_async("s", "goodbye", message_id="m")
    assert [(first.content, first.duplicate), (second.content, second.duplicate)] == [("one", False), ("two", False)]
    assert await store.for_owner("ann").mark_message_processed("m4") is True
    assert await store.for_owner("bob").mark_message_processed("m4") is True
    assert await store.for_owner("ann").mark_message_processed("m4") is False


async def test_turns_at_once(store: StoreBackend) -> None:
    """Turns of the same session id under two owners do not wait for each other, not even inside each other."""
    ann = await store.for_owner("ann").get_or_create("s", SUPPORT)
    bob = await store.for_owner("bob").get_or_create("s", SUPPORT)
    async with ann.turn(), bob.turn():
        await bob.add_message(user("of bob"))
        await ann.add_message(user("of ann"))
    assert (texts(ann.history), texts(bob.history)) == (["of ann"], ["of bob"])


async def test_delete(store: StoreBackend) -> None:
    """What one owner deletes or clears is only that owner's, also of those handed out."""
    ann, bob = store.for_owner("ann"), store.for_owner("bob")
    sessions = [await face.get_or_create("s", SUPPORT) for face in (ann, bob, store)]
    await ann.delete("s")
    await store.clear()
    await sessions[1].save()
    for gone in (sessions[0], sessions[2]):
        with pytest.raises(SessionDeletedError):
            await gone.save()
    assert await held(store) == [("bob", "s")]


async def test_live_sessions(store: StoreBackend) -> None:
    """Stores made anew for an owner hand out the session object that is alive."""
    session = await store.for_owner("ann").get_or_create("s", SUPPORT)
    assert await store.for_owner("ann").get("s") is session
    assert await store.for_owner("bob").get_or_create("s", SUPPORT) is not session
    assert session.store is store
    assert session.key == Key("ann", "s")


async def test_pages_of_all(store: StoreBackend) -> None:
    """Administration pages through all owners' conversations, newest commit first, each with its owner."""
    for number in range(6):
        face = store.for_owner(f"o{number % 2}") if number % 3 else store
        await face.get_or_create(str(number), SUPPORT)
    found: list[tuple[str, str]] = []
    after = None
    while True:
        page = await store.list_sessions(limit=2, after=after, owner=ALL)
        found += [(info.owner, info.session_id) for info in page.items]
        after = page.next
        if after is None:
            break
    assert found == [("o1", "5"), ("o0", "4"), ("", "3"), ("o0", "2"), ("o1", "1"), ("", "0")]


# --- the face ---


@pytest.mark.parametrize(
    ("owner", "error"),
    [("", ValueError), ("\0", ValueError), ("\0ann", ValueError), ("\ud800", ValueError), (1, TypeError)],
    ids=["empty", "NUL", "NUL first", "lone surrogate", "number"],
)
async def test_no_owner(store: StoreBackend, owner: Any, error: type[Exception]) -> None:
    """What can't be an owner's name is refused, by everything that takes one."""
    with pytest.raises(error, match="owner must"):
        store.for_owner(owner)
    if owner != "":
        for ask in (store.erase_owner, lambda name: anext(store.export_owner(name))):
            with pytest.raises(error, match="owner must"):
                await ask(owner)


@pytest.mark.parametrize("owner", ["ann\0", "a" * 10_000, "'; --", "é", "e\u0301", " ", "ALL"])
async def test_any_name(store: StoreBackend, owner: str) -> None:
    """Any other text is an owner's name, and no other's."""
    await store.for_owner(owner).get_or_create("s", SUPPORT)
    assert await held(store) == [(owner, "s")]
    assert await store.for_owner(f"{owner}x").get("s") is None


async def test_face_of_face(store: StoreBackend) -> None:
    """An owner's store gives itself for its owner, and is refused for another."""
    ann = store.for_owner("ann")
    assert ann.for_owner("ann").owner == "ann"
    with pytest.raises(StoreScopeError, match="for_owner"):
        ann.for_owner("bob")


async def test_what_it_is(store: StoreBackend) -> None:
    """An owner's store says of itself what the whole store does, and whose it is."""
    ann = store.for_owner("ann")
    assert (ann.owner, ann.name, ann.default_max_turns, ann.dedup_ttl_hours, ann.is_closing) == (
        "ann",
        store.name,
        store.default_max_turns,
        store.dedup_ttl_hours,
        False,
    )
    assert repr(ann) == f"<{type(store).__name__} {store.name!r} of owner 'ann'>"


async def test_resolver(store: StoreBackend) -> None:
    """The agents' resolver is one for the whole store, whoever sets it."""
    mine = Agent(name="Mine")
    ann = store.for_owner("ann")
    assert not ann.has_agent_resolver
    ann.set_agent_resolver({"Support": mine}.get)
    assert store.has_agent_resolver
    assert (await ann.get_or_create("s", SUPPORT)).active_agent is mine
    assert (await store.get_or_create("s", SUPPORT)).active_agent is mine


async def test_closes_nothing(store: StoreBackend) -> None:
    """Leaving an owner's store, or closing it, closes nothing."""
    async with store.for_owner("ann") as ann:
        await ann.get_or_create("s", SUPPORT)
    await ann.aclose()
    with pytest.raises(ValueError, match="grace"):
        await ann.aclose(-1)
    assert await ann.get("s") is not None
    await store.aclose()
    assert ann.is_closing


async def test_keeps_the_store(store: StoreBackend, open_store: Callable[..., StoreBackend]) -> None:
    """An owner's store keeps the whole one alive."""
    face = open_store().for_owner("ann")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        gc.collect()
        await face.get_or_create("s", SUPPORT)


@pytest.mark.parametrize("use", ADMINISTRATION.values(), ids=ADMINISTRATION.keys())
async def test_administration_of_a_face(store: StoreBackend, use: Use) -> None:
    """What concerns other owners, or all, is refused by one owner's store."""
    await store.for_owner("bob").get_or_create("s", SUPPORT)
    await store.get_or_create("s", SUPPORT)
    with pytest.raises(StoreScopeError, match="for_owner"):
        await use(store.for_owner("ann"))
    with pytest.raises(StoreScopeError, match="require_owner"):
        store.for_owner("ann").require_owner()
    assert await held(store) == [("", "s"), ("bob", "s")]


@pytest.mark.parametrize("wrong", ["ann", 1, True])
async def test_owner_that_is_not_all(store: StoreBackend, wrong: Any) -> None:
    """A question is asked of all owners, or of those whose store it is asked."""
    with pytest.raises(TypeError, match="owner must be ALL"):
        await store.list_sessions(owner=wrong)
    assert repr(ALL) == "ALL"


# --- an owner is required ---


@pytest.mark.parametrize("use", USES.values(), ids=USES.keys())
async def test_required(store: StoreBackend, use: Use) -> None:
    """Once an owner is required, each call without one is refused, and nothing has happened."""
    await store.get_or_create("s", SUPPORT)
    store.require_owner()
    with pytest.raises(StoreOwnerRequiredError):
        await use(store)
    assert await held(store) == [("", "s")]
    assert await store.pending_turns(owner=ALL) == ()
    await store.for_owner("ann").get_or_create("s", SUPPORT)
    await use(store.for_owner("ann"))


@pytest.mark.parametrize("use", ADMINISTRATION.values(), ids=ADMINISTRATION.keys())
async def test_administration_where_required(store: StoreBackend, use: Use) -> None:
    """Administration names its owners, or none, and goes on where an owner is required."""
    store.require_owner()
    await use(store)


async def test_required_of_a_new_session(store: StoreBackend) -> None:
    """A session that an agent begins in a store which requires an owner has one."""
    store.require_owner()
    with pytest.raises(StoreOwnerRequiredError):
        SUPPORT.create_session("s", store)
    session = SUPPORT.create_session("s", store.for_owner("ann"))
    await session.add_message(user("hello"))
    assert await held(store) == [("ann", "s")]


async def test_session_from_before(store: StoreBackend) -> None:
    """A session that was handed out before goes on."""
    session = await store.get_or_create("s", SUPPORT)
    store.require_owner()
    await say(session, "hello")
    assert texts(session.history) == ["hello", "hello!"]


# --- runners ---


async def test_runner(store: StoreBackend) -> None:
    """An owner's runner is the same runner over the owner's conversations."""
    runner = Runner(SUPPORT, store, ScriptedEngine(["one", "two"]), max_handoffs_per_turn=3)
    ann = runner.for_owner("ann")
    await ann.run_async("s", "hello")
    await runner.run_async("s", "hello")
    assert ann.max_handoffs_per_turn == 3
    assert texts((await store.for_owner("ann").messages("s")).items) == ["hello", "one"]
    assert texts((await store.messages("s")).items) == ["hello", "two"]
    assert await ann.get_session("s") is not await runner.get_session("s")
    with pytest.raises(StoreScopeError):
        ann.for_owner("bob")


async def test_work_of_all_owners(store: StoreBackend) -> None:
    """One worker does the work of all owners, and tells whose it was."""
    runner = Runner(SUPPORT, store, ScriptedEngine(["a", "a"]))
    for owner in ("ann", "bob"):
        await runner.for_owner(owner).accept("s", "hello", message_id="m")
    assert {turn.owner for turn in await store.pending_turns(owner=ALL)} == {"ann", "bob"}
    heard = Heard()
    async with runner.working(heard):
        await heard.of(2)
    assert sorted(turn.owner for turn in heard.turns) == ["ann", "bob"]
    for owner in ("ann", "bob"):
        assert texts((await store.for_owner(owner).messages("s")).items) == ["hello", "a"]


async def test_working_for_one_owner(store: StoreBackend) -> None:
    """An owner's runner does no work: it would do other owners' too."""
    await Runner(SUPPORT, store).for_owner("ann").accept("s", "hello", message_id="m")
    for runner in (Runner(SUPPORT, store).for_owner("ann"), Runner(SUPPORT, store.for_owner("ann"))):
        with pytest.raises(StoreScopeError, match="working"):
            async with runner.working():
                pass
    assert [turn.state for turn in await store.pending_turns(owner=ALL)] == ["accepted"]


async def test_work_where_an_owner_is_required(store: StoreBackend) -> None:
    """Work goes on where an owner is required."""
    runner = Runner(SUPPORT, store, ScriptedEngine(["hi"]))
    store.require_owner()
    await runner.for_owner("ann").accept("s", "hello", message_id="m")
    heard = Heard()
    async with runner.working(heard):
        await heard.of(1)
    assert texts((await store.for_owner("ann").messages("s")).items) == ["hello", "hi"]


# --- services' ids ---


async def at_service(store: BaseSessionStore, session_id: str, service_id: Any, agent_name: str | None = None) -> None:
    """A conversation that begins with a service's id."""
    service = None if service_id is None else ServiceSession(service_id, agent_name, "openai")
    new = NewSession(agent_name="Support", metadata=EMPTY, max_turns=None, service=service)
    await store.backend.create_session(store.key_of(session_id), new)


async def found(store: BaseSessionStore, agent: Agent, service_id: Any) -> str | None:
    """The id of the conversation that is found by a service's id."""
    session = await store.get_by_service_id(agent, service_id)
    return None if session is None else session.session_id


@pytest.mark.parametrize("service_id", ["resp_1", {"context": "c", "task": [1, "\0"]}], ids=["text", "mapping"])
async def test_by_service_id(store: StoreBackend, service_id: Any) -> None:
    """An owner finds its own conversation by the service's id, and no other's."""
    ann = store.for_owner("ann")
    await at_service(ann, "s", service_id)
    await at_service(ann, "other", "resp_2")
    await at_service(ann, "third", None)
    assert await found(ann, SUPPORT, service_id) == "s"
    session = await ann.get_by_service_id(SUPPORT, service_id)
    assert session is await ann.get("s")
    assert session is not None
    assert session.active_agent is SUPPORT
    for face in (store, store.for_owner("bob")):
        assert await found(face, SUPPORT, service_id) is None
    assert await found(ann, SUPPORT, "resp_3") is None


async def test_by_service_id_and_agent(store: StoreBackend) -> None:
    """It is found by the agent it was given to, by one that hands over to that, and by any if it was given to none."""
    await at_service(store, "s", "of billing", "Billing")
    await at_service(store, "t", "of any")
    assert await found(store, BILLING, "of billing") == "s"
    assert await found(store, SUPPORT, "of billing") == "s"
    assert await found(store, Agent(name="Other"), "of billing") is None
    assert await found(store, Agent(name="Other"), "of any") == "t"


async def test_newest_by_service_id(store: StoreBackend) -> None:
    """Of several the one with the newest commit is found, whichever was created last."""
    for session_id in ("s", "t", "u"):
        await at_service(store, session_id, "resp_1", "Other" if session_id == "u" else None)
    assert await found(store, SUPPORT, "resp_1") == "t"
    await store.get_or_create("s", SUPPORT, {"a": 1})
    assert await found(store, SUPPORT, "resp_1") == "s"


async def test_service_id_that_changes(store: StoreBackend) -> None:
    """It is found by the id that it has, not by those that it had, nor once it is deleted."""
    await at_service(store, "s", "resp_1")
    session = await store.get_or_create("s", SUPPORT)
    async with session.turn():
        await session.add_message(user("hello"))
        assert session.member_turn is not None
        session.member_turn.working.go_on_at_service(ServiceSession("resp_2", "Support", "openai"))
    assert [await found(store, SUPPORT, each) for each in ("resp_1", "resp_2")] == [None, "s"]
    await session.clear_history()
    assert await found(store, SUPPORT, "resp_2") is None
    await at_service(store, "t", "resp_2")
    await store.delete("t")
    assert await found(store, SUPPORT, "resp_2") is None


@pytest.mark.parametrize("change", ["deleted", "another id"])
async def test_service_id_between(store: StoreBackend, monkeypatch: pytest.MonkeyPatch, change: str) -> None:
    """One that goes, or gets another id, between being found and being read is not given out."""
    await at_service(store, "old", "resp_1")
    await at_service(store, "s", "resp_1")
    find = store.find_service_session

    async def and_then(*args: Any) -> Any:
        key = await find(*args)
        if key == Key("", "s"):
            session = await store.get_or_create("s", SUPPORT)
            await (session.clear_history() if change == "another id" else store.delete("s"))
        return key

    monkeypatch.setattr(store, "find_service_session", and_then)
    assert await found(store, SUPPORT, "resp_1") == "old"


@pytest.mark.parametrize(("wrong", "error"), [("", ValueError), ({}, ValueError), (1, TypeError)])
async def test_no_service_id(store: StoreBackend, wrong: Any, error: type[Exception]) -> None:
    """What can't be a service's id is refused."""
    with pytest.raises(error, match="service_session_id"):
        await store.get_by_service_id(SUPPORT, wrong)
    no_agent: Any = "Support"
    with pytest.raises(TypeError, match="agent must be"):
        await store.get_by_service_id(no_agent, "resp_1")


async def test_pending_turns_page_by_page(store: StoreBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many turns are pending, each is listed once, in the order they came."""
    monkeypatch.setattr(upkeep, "SLICE", 2)
    runner = Runner(SUPPORT, store)
    for number in range(5):
        await runner.for_owner("ann" if number % 2 else "bob").accept("s", "hello", message_id=f"m{number}")
    assert [turn.message_id for turn in await store.pending_turns(owner=ALL)] == [f"m{number}" for number in range(5)]
    assert [turn.message_id for turn in await store.for_owner("ann").pending_turns()] == ["m1", "m3"]
