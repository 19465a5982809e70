from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Callable, Coroutine
from typing import Any

import anyio
import pytest

from chatflow.core.agent import Agent
from chatflow.core.memory import DEFAULT_DEDUP_TTL_HOURS
from chatflow.core.session import SessionContext
from chatflow.core.store import BaseSessionStore
from chatflow.exceptions import StoreClosedError
from chatflow.testing.conformance.conftest import OpenStore, Restart
from chatflow.testing.conformance.conversation import BILLING, SUPPORT, outside, queued, say, stored, texts, user

ODD_IDS = {
    "quotes": "'; DROP TABLE chatflow_sessions; --\"`",
    "path": "../../etc/passwd",
    "NUL": "a\x00b",
    "long": "x" * 10_000,
    "not ASCII": "señor-日本-🙂",
    "pattern": "%_*?[a]",
    "blank": " ",
    "number": "1",
}


async def test_created_with_agent(store: BaseSessionStore) -> None:
    """A new conversation is empty and has the default agent."""
    session = await store.get_or_create("s", SUPPORT)
    assert session.session_id == "s"
    assert session.active_agent is SUPPORT
    assert (list(session.history), dict(session.state), dict(session.metadata)) == ([], {}, {})
    assert session.max_turns == 40


async def test_created_durably(store: BaseSessionStore) -> None:
    """A conversation exists once get_or_create has returned, although nothing was said in it."""
    await store.get_or_create("s", SUPPORT)
    assert await store.get("s") is not None


async def test_created_is_seen_by_others(store: BaseSessionStore, second: BaseSessionStore) -> None:
    """Another store on the same data finds the conversation once get_or_create has returned."""
    await store.get_or_create("s", SUPPORT, {"channel": "whatsapp"}, max_turns=7)
    session = await second.get("s")
    assert session is not None
    assert (session.metadata, session.max_turns) == ({"channel": "whatsapp"}, 7)


async def test_survives_restart(store: BaseSessionStore, restart: Restart) -> None:
    """A conversation is the same after the store was closed and opened again."""
    session = await store.get_or_create("s", SUPPORT, {"channel": "whatsapp"}, max_turns=7)
    async with session.turn():
        await session.add_message(user("hello"))
        await session.set_active_agent(BILLING)
        session.state["step"] = 2
    before = await stored(store, "s")
    assert await stored(await restart(store), "s") == before


async def test_absent(store: BaseSessionStore) -> None:
    """Asking for a conversation that does not exist gives None and creates nothing."""
    assert await store.get("s") is None
    assert (await store.list_sessions()).items == ()


async def test_existing_agent_stays(store: BaseSessionStore) -> None:
    """The agent of a conversation that exists is not replaced by get_or_create's default."""
    await store.get_or_create("s", SUPPORT)
    assert (await store.get_or_create("s", BILLING)).active_agent_name == "Support"


async def test_same_object(store: BaseSessionStore) -> None:
    """The same id asked for twice in one loop gives the same object."""
    session = await store.get_or_create("s", SUPPORT)
    assert await store.get_or_create("s", SUPPORT) is session
    assert await store.get_or_create("s", SUPPORT, {"a": 1}) is session
    assert await store.get("s") is session


async def test_same_object_when_asked_at_once(store: BaseSessionStore) -> None:
    """Tasks that ask for a new id at the same moment get one object."""
    found: list[SessionContext] = []

    async def ask() -> None:
        found.append(await store.get_or_create("s", SUPPORT))

    async with anyio.create_task_group() as group:
        for _ in range(8):
            group.start_soon(ask)
    assert len(found) == 8
    assert all(session is found[0] for session in found)


async def test_recent_sessions_stay_alive(store: BaseSessionStore) -> None:
    """The store keeps a session it has handed out alive, though nobody else holds it."""
    session = weakref.ref(await store.get_or_create("s", SUPPORT))
    gc.collect()
    assert session() is not None
    assert await store.get("s") is session()


async def test_only_512_stay_alive(store: BaseSessionStore) -> None:
    """The store lets go of a session once 512 others have been used since."""
    session = weakref.ref(await store.get_or_create("s", SUPPORT))
    for number in range(512):
        await store.get_or_create(str(number), SUPPORT)
    gc.collect()
    assert session() is None


async def test_object_that_was_let_go_comes_back_equal(store: BaseSessionStore) -> None:
    """A conversation whose object is gone is read again as it was committed."""
    session = await store.get_or_create("s", SUPPORT, {"channel": "web"})
    await say(session, "hello")
    before, last = await stored(store, "s"), weakref.ref(session)
    del session
    for number in range(512):
        await store.get_or_create(str(number), SUPPORT)
    gc.collect()
    assert last() is None
    assert await stored(store, "s") == before


async def test_get_shows_what_others_committed(store: BaseSessionStore, second: BaseSessionStore) -> None:
    """A session handed out before shows another store's commit once it is asked for again."""
    session = await store.get_or_create("s", SUPPORT)
    other = await second.get_or_create("s", SUPPORT)
    await say(other, "hello")
    assert session.history == []
    assert await store.get("s") is session
    assert texts(session.history) == ["hello", "hello!"]


async def test_get_or_create_shows_what_others_committed(store: BaseSessionStore, second: BaseSessionStore) -> None:
    """get_or_create brings a session handed out before up to date as well."""
    session = await store.get_or_create("s", SUPPORT)
    await say(await second.get_or_create("s", SUPPORT), "hello")
    await store.get_or_create("s", SUPPORT)
    assert texts(session.history) == ["hello", "hello!"]


@pytest.mark.parametrize("session_id", ODD_IDS.values(), ids=ODD_IDS.keys())
async def test_any_text_is_an_id(store: BaseSessionStore, session_id: str) -> None:
    """An id is data, whatever characters it has."""
    await say(await store.get_or_create("other", SUPPORT), "stays")
    await say(await store.get_or_create(session_id, SUPPORT), "hello")
    assert texts((await store.messages(session_id)).items) == ["hello", "hello!"]
    assert [info.session_id for info in (await store.list_sessions()).items] == [session_id, "other"]
    assert await store.delete(session_id)
    assert [info.session_id for info in (await store.list_sessions()).items] == ["other"]


async def test_ids_are_told_apart_exactly(store: BaseSessionStore) -> None:
    """Ids that differ in case, in Unicode form, in a blank or after a NUL are different ids."""
    ids = ["a", "A", "a ", "a\x00", "a\x00b", "é", "e\u0301", "1", "1.0", "01"]
    for session_id in ids:
        await (await store.get_or_create(session_id, SUPPORT)).add_message(user(repr(session_id)))
    for session_id in ids:
        assert texts((await store.messages(session_id)).items) == [repr(session_id)]


AsksById = Callable[[BaseSessionStore, Any], Coroutine[Any, Any, object]]
ASKED_BY_SESSION_ID: dict[str, AsksById] = {
    "get_or_create": lambda store, wrong: store.get_or_create(wrong, SUPPORT),
    "get": lambda store, wrong: store.get(wrong),
    "delete": lambda store, wrong: store.delete(wrong),
    "messages": lambda store, wrong: store.messages(wrong),
    "is processed, session id": lambda store, wrong: store.is_message_processed("m", session_id=wrong),
    "mark processed, session id": lambda store, wrong: store.mark_message_processed("m", session_id=wrong),
    "is processed, message id": lambda store, wrong: store.is_message_processed(wrong),
    "mark processed, message id": lambda store, wrong: store.mark_message_processed(wrong),
}


@pytest.mark.parametrize("ask", ASKED_BY_SESSION_ID.values(), ids=ASKED_BY_SESSION_ID.keys())
@pytest.mark.parametrize(
    ("wrong", "error"),
    [("", ValueError), ("\ud800", ValueError), (1, TypeError), (b"s", TypeError), (["s"], TypeError)],
    ids=["empty", "lone surrogate", "number", "bytes", "list"],
)
async def test_no_id(store: BaseSessionStore, ask: AsksById, wrong: object, error: type[Exception]) -> None:
    """What is no id is refused by every operation that takes one."""
    with pytest.raises(error, match=r"(session|message)_id must"):
        await ask(store, wrong)
    assert (await store.list_sessions()).items == ()


async def test_id_may_be_of_a_string_class(store: BaseSessionStore) -> None:
    """An id of a class derived from str names the same conversation as the plain text."""

    class Id(str):
        __slots__ = ()

        def __hash__(self) -> int:
            return 1

    session = await store.get_or_create(Id("s"), SUPPORT)
    assert await store.get("s") is session
    assert type(session.session_id) is str


@pytest.mark.parametrize("wrong", [None, "Support", Agent])
async def test_no_agent(store: BaseSessionStore, wrong: Any) -> None:
    """A default agent that is none is refused, and nothing is created."""
    with pytest.raises(TypeError, match="default_agent"):
        await store.get_or_create("s", wrong)
    assert await store.get("s") is None


@pytest.mark.parametrize(
    ("wrong", "error"),
    [(0, ValueError), (-1, ValueError), (True, TypeError), (2.5, TypeError), ("40", TypeError)],
)
async def test_bad_max_turns(store: BaseSessionStore, wrong: Any, error: type[Exception]) -> None:
    """A max_turns that is no whole number of at least 1 is refused, and nothing is created."""
    with pytest.raises(error, match="max_turns"):
        await store.get_or_create("s", SUPPORT, max_turns=wrong)
    assert await store.get("s") is None


@pytest.mark.parametrize(
    ("wrong", "error"),
    [(0, ValueError), (-1, ValueError), (True, TypeError), (2.5, TypeError), ("40", TypeError), (None, TypeError)],
)
def test_bad_default_max_turns(open_store: OpenStore, wrong: object, error: type[Exception]) -> None:
    """A store refuses a default_max_turns that is no whole number of at least 1 when it is made."""
    with pytest.raises(error, match="default_max_turns"):
        open_store(default_max_turns=wrong)


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        (0, ValueError),
        (-1, ValueError),
        (float("nan"), ValueError),
        (float("inf"), ValueError),
        (True, TypeError),
        ("1", TypeError),
    ],
)
def test_bad_ttl(open_store: OpenStore, wrong: object, error: type[Exception]) -> None:
    """A store refuses a dedup_ttl_hours that is no number above 0 when it is made."""
    with pytest.raises(error, match="dedup_ttl_hours"):
        open_store(dedup_ttl_hours=wrong)


def test_unknown_option(open_store: OpenStore) -> None:
    """A store refuses an option it does not have."""
    with pytest.raises(TypeError, match="busy_timeout"):
        open_store(busy_timeout=5000)


def test_made_without_loop(open_store: OpenStore) -> None:
    """A store is made where no event loop runs, with the documented defaults."""
    store = open_store()
    assert (store.default_max_turns, store.dedup_ttl_hours) == (40, DEFAULT_DEDUP_TTL_HOURS)


async def test_own_max_turns_wins(open_store: OpenStore) -> None:
    """A conversation created with a max_turns keeps that many turns, whatever the store's default is."""
    store = open_store(default_max_turns=1)
    session = await store.get_or_create("s", SUPPORT, max_turns=2)
    await say(session, "one", "two", "three")
    assert session.max_turns == 2
    assert texts(session.history) == ["two", "two!", "three", "three!"]


async def test_default_max_turns(open_store: OpenStore) -> None:
    """A conversation without a max_turns of its own keeps as many turns as the store's default says."""
    session = await open_store(default_max_turns=1).get_or_create("s", SUPPORT)
    await say(session, "one", "two")
    assert texts(session.history) == ["two", "two!"]


async def test_max_turns_is_for_creation(store: BaseSessionStore) -> None:
    """A max_turns given for a conversation that exists changes nothing."""
    await store.get_or_create("s", SUPPORT, max_turns=2)
    await store.get_or_create("t", SUPPORT)
    assert (await store.get_or_create("s", SUPPORT, {"a": 1}, max_turns=9)).max_turns == 2
    assert (await store.get_or_create("t", SUPPORT, {"a": 1}, max_turns=9)).max_turns == 40


async def test_own_max_turns_is_stored(store: BaseSessionStore, restart: Restart) -> None:
    """After a restart a conversation's own max_turns still wins over the new default, which counts for the others."""
    await store.get_or_create("own", SUPPORT, max_turns=2)
    await store.get_or_create("default", SUPPORT)
    store = await restart(store, default_max_turns=3)
    assert (await store.get_or_create("own", SUPPORT)).max_turns == 2
    assert (await store.get_or_create("default", SUPPORT)).max_turns == 3


async def test_resolver_gives_agents(store: BaseSessionStore) -> None:
    """The store's resolver gives the live agent for a stored name."""
    session = await store.get_or_create("s", SUPPORT)
    other = Agent(name="Support")
    store.set_agent_resolver({"Support": other}.get)
    assert session.active_agent is other


@pytest.mark.parametrize("wrong", [None, "Support", {}])
def test_no_resolver(store: BaseSessionStore, wrong: Any) -> None:
    """A resolver that can't be called is refused."""
    with pytest.raises(TypeError, match="resolver"):
        store.set_agent_resolver(wrong)


async def test_colleague_is_found(store: BaseSessionStore, second: BaseSessionStore) -> None:
    """An agent that the default agent can hand over to is found by its stored name without a resolver."""
    await (await store.get_or_create("s", SUPPORT)).set_active_agent(BILLING)
    assert (await second.get_or_create("s", SUPPORT)).active_agent is BILLING


async def test_unknown_agent(store: BaseSessionStore, caplog: pytest.LogCaptureFixture) -> None:
    """An agent nobody knows is answered for by the default one, with a warning, and its name stays stored (P10)."""
    await (await store.get_or_create("s", Agent(name="Gone"))).save()
    session = await outside(store.get_or_create("t", SUPPORT))
    await session.set_active_agent(Agent(name="Lost"))
    session._agents.clear()
    assert session.active_agent is SUPPORT
    assert session.active_agent is SUPPORT
    assert [record.getMessage() for record in caplog.records if "'t'" in record.getMessage()] == [
        (
            "session 't': no agent is named 'Lost'; 'Support' answers for it. Give the store a resolver:"
            " store.set_agent_resolver(...)"
        )
    ]
    await say(session, "hello")
    assert session.active_agent_name == "Lost"


async def test_stand_in(store: BaseSessionStore, second: BaseSessionStore, caplog: pytest.LogCaptureFixture) -> None:
    """A session from `get` has a stand-in for an agent nobody knows, of that name and without tools, and warns."""
    await store.get_or_create("s", SUPPORT)
    session = await second.get("s")
    assert session is not None
    agent = session.active_agent
    assert (agent.name, agent.tools) == ("Support", ())
    assert "a stand-in answers for it" in caplog.text


async def test_default_agent_after_get(store: BaseSessionStore, second: BaseSessionStore) -> None:
    """The default agent answers in a session that `get` gave first and get_or_create after it."""
    await store.get_or_create("s", SUPPORT)
    session = await second.get("s")
    assert session is not None
    assert await second.get_or_create("s", SUPPORT) is session
    assert session.active_agent is SUPPORT


async def test_every_operation_yields(store: BaseSessionStore) -> None:
    """Each operation lets the event loop run at least once, even when it need not wait."""
    session = await store.get_or_create("s", SUPPORT)
    await session.add_message(user("hello"))
    token = session.checkpoint()
    operations: dict[str, Coroutine[Any, Any, object]] = {
        "get_or_create": store.get_or_create("s", SUPPORT),
        "get": store.get("s"),
        "list_sessions": store.list_sessions(),
        "messages": store.messages("s"),
        "is_message_processed": store.is_message_processed("m"),
        "mark_message_processed": store.mark_message_processed("m"),
        "purge_processed_messages": store.purge_processed_messages(),
        "rollback_to": session.rollback_to(token),
        "add_message": session.add_message(user("hello")),
        "set_active_agent": session.set_active_agent(SUPPORT),
        "clear_history": session.clear_history(),
        "save": session.save(),
        "delete": store.delete("s"),
        "clear": store.clear(),
        "aclose": store.aclose(),
    }
    did_not_yield = []
    for name, operation in operations.items():
        ran: list[str] = []
        asyncio.get_running_loop().call_soon(ran.append, name)
        await operation
        if not ran:
            did_not_yield.append(name)
    assert did_not_yield == []


USES_OF_A_STORE: dict[str, Callable[[BaseSessionStore], Coroutine[Any, Any, object]]] = {
    "get_or_create": lambda store: store.get_or_create("s", SUPPORT),
    "get_or_create with metadata": lambda store: store.get_or_create("s", SUPPORT, {"a": 1}),
    "get": lambda store: store.get("s"),
    "delete": lambda store: store.delete("s"),
    "clear": lambda store: store.clear(),
    "list_sessions": lambda store: store.list_sessions(),
    "messages": lambda store: store.messages("s"),
    "is_message_processed": lambda store: store.is_message_processed("m"),
    "mark_message_processed": lambda store: store.mark_message_processed("m"),
    "purge_processed_messages": lambda store: store.purge_processed_messages(),
}


@pytest.mark.parametrize("use", USES_OF_A_STORE.values(), ids=USES_OF_A_STORE.keys())
async def test_closed_store(
    store: BaseSessionStore, use: Callable[[BaseSessionStore], Coroutine[Any, Any, object]]
) -> None:
    """Every operation of a closed store is refused."""
    await store.get_or_create("s", SUPPORT)
    await store.aclose()
    with pytest.raises(StoreClosedError):
        await use(store)


async def test_closed_before_first_use(store: BaseSessionStore) -> None:
    """A store that was closed before anything was done with it stays closed."""
    await store.aclose()
    with pytest.raises(StoreClosedError):
        await store.get_or_create("s", SUPPORT)


USES_OF_A_SESSION: dict[str, Callable[[SessionContext], Coroutine[Any, Any, object]]] = {
    "add_message": lambda session: session.add_message(user("hello")),
    "set_active_agent": lambda session: session.set_active_agent(BILLING),
    "clear_history": lambda session: session.clear_history(),
    "save": lambda session: session.save(),
    "rollback_to": lambda session: session.rollback_to(session.checkpoint()),
    "turn": lambda session: say(session, "hello"),
}


@pytest.mark.parametrize("use", USES_OF_A_SESSION.values(), ids=USES_OF_A_SESSION.keys())
async def test_session_of_closed_store(
    store: BaseSessionStore, use: Callable[[SessionContext], Coroutine[Any, Any, object]]
) -> None:
    """Every awaited method of a session is refused once its store is closed."""
    session = await store.get_or_create("s", SUPPORT)
    await store.aclose()
    with pytest.raises(StoreClosedError):
        await use(session)


async def test_closed_during_turn(store: BaseSessionStore) -> None:
    """A turn whose store is closed under it can't commit, and the error says so."""
    session = await store.get_or_create("s", SUPPORT)
    with pytest.raises(StoreClosedError):  # noqa: PT012  # the turn fails at its end
        async with session.turn():
            await session.add_message(user("hello"))
            await store.aclose()
    assert session.history == []


async def test_closed_under_waiter(store: BaseSessionStore) -> None:
    """A turn that waits for its place is refused when the store is closed."""
    session = await store.get_or_create("s", SUPPORT)
    waiting: list[asyncio.Task[None]] = []
    with pytest.raises(StoreClosedError):  # noqa: PT012  # the turn fails at its end
        async with session.turn():
            waiting.append(asyncio.create_task(outside(session.add_message(user("later")))))
            await session.add_message(user("hello"))
            await queued(store, 1)
            await store.aclose()
    with pytest.raises(StoreClosedError):
        await waiting[0]


async def test_closing_twice(store: BaseSessionStore) -> None:
    """Closing a store that is closed is no error."""
    await store.aclose()
    await store.aclose()


async def test_closes_with_block(open_store: OpenStore) -> None:
    """A store used as an async context manager is closed at the end of the block."""
    async with open_store() as store:
        await store.get_or_create("s", SUPPORT)
    with pytest.raises(StoreClosedError):
        await store.get("s")


async def test_closing_one_of_two(store: BaseSessionStore, second: BaseSessionStore) -> None:
    """Closing a store leaves another one on the same data in use."""
    await say(await store.get_or_create("s", SUPPORT), "hello")
    await second.get("s")
    await store.aclose()
    await say(await second.get_or_create("s", SUPPORT), "again")
    assert texts((await second.messages("s")).items) == ["hello", "hello!", "again", "again!"]


def test_initial_agent_of_a_wrong_type() -> None:
    """A session on its own takes an agent, and refuses a name of one."""
    with pytest.raises(TypeError, match="initial_agent must be an Agent, not str"):
        SessionContext("s", "Support")  # type: ignore[arg-type]
