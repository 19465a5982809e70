from __future__ import annotations

from typing import Any

import pytest

from chatflow.core.store import BaseSessionStore
from chatflow.exceptions import SessionNotFoundError
from chatflow.testing.conformance.conftest import Clock, OpenStore, Restart
from chatflow.testing.conformance.conversation import BILLING, SUPPORT, say, system, texts, user


async def ids(store: BaseSessionStore, limit: int = 100) -> list[str]:
    """All conversations' ids, page by page."""
    found: list[str] = []
    after: int | None = None
    while True:
        page = await store.list_sessions(limit=limit, after=after)
        assert len(page.items) <= limit
        found += [info.session_id for info in page.items]
        after = page.next
        if after is None:
            return found


async def test_empty_list(store: BaseSessionStore) -> None:
    """A store without conversations lists one empty page."""
    page = await store.list_sessions()
    assert (page.items, page.next) == ((), None)


async def test_newest_commit_first(store: BaseSessionStore) -> None:
    """Conversations are listed by their last commit, the newest first, whether it was a turn, a merge or a creation."""
    for session_id in ("a", "b", "c", "d"):
        await store.get_or_create(session_id, SUPPORT)
    assert await ids(store) == ["d", "c", "b", "a"]
    await (await store.get_or_create("b", SUPPORT)).add_message(user("hello"))
    await store.get_or_create("a", SUPPORT, {"x": 1})
    assert await ids(store) == ["a", "b", "d", "c"]


async def test_reading_is_no_commit(store: BaseSessionStore) -> None:
    """Reading a conversation, or ending a turn that changed nothing, leaves its place in the list."""
    first = await store.get_or_create("first", SUPPORT)
    await say(first, "hello")
    await store.get_or_create("second", SUPPORT)
    await store.get("first")
    await store.get_or_create("first", SUPPORT)
    await store.messages("first")
    async with first.turn():
        pass
    assert await ids(store) == ["second", "first"]


@pytest.mark.parametrize("limit", [1, 2, 3, 5, 6, 100])
async def test_pages(store: BaseSessionStore, limit: int) -> None:
    """Pages of any size give each conversation once, in order."""
    for number in range(6):
        await store.get_or_create(str(number), SUPPORT)
    assert await ids(store, limit) == ["5", "4", "3", "2", "1", "0"]


async def test_last_full_page(store: BaseSessionStore) -> None:
    """A page that ends with the last conversation says that nothing follows."""
    for number in range(4):
        await store.get_or_create(str(number), SUPPORT)
    page = await store.list_sessions(limit=2)
    assert page.next is not None
    assert (await store.list_sessions(limit=2, after=page.next)).next is None


async def test_paging_goes_on_while_turns_commit(store: BaseSessionStore) -> None:
    """A conversation that commits between two pages moves to the front, and no other is missed or given twice."""
    for number in range(6):
        await store.get_or_create(str(number), SUPPORT)
    page = await store.list_sessions(limit=2)
    await store.get_or_create("0", SUPPORT, {"x": 1})
    await store.delete("3")
    rest = await store.list_sessions(limit=10, after=page.next)
    assert [info.session_id for info in (*page.items, *rest.items)] == ["5", "4", "2", "1"]


async def test_what_a_list_shows(store: BaseSessionStore, clock: Clock) -> None:
    """A list shows id, agent, metadata, and when the conversation was created and last committed, in UTC."""
    created = clock.now
    session = await store.get_or_create("s", SUPPORT, {"channel": "web"})
    clock.passes(hours=1)
    await session.set_active_agent(BILLING)
    (info,) = (await store.list_sessions()).items
    assert (info.session_id, info.active_agent_name, info.metadata) == ("s", "Billing", {"channel": "web"})
    assert (info.created_at, info.updated_at) == (created, clock.now)
    assert info.created_at.utcoffset() == clock.now.utcoffset()


async def test_list_survives(store: BaseSessionStore, restart: Restart) -> None:
    """The list is the same after a restart."""
    for session_id in ("a", "b", "c"):
        await store.get_or_create(session_id, SUPPORT, {"of": session_id})
    await store.get_or_create("b", SUPPORT, {"x": 1})
    before = await store.list_sessions()
    assert await (await restart(store)).list_sessions() == before


@pytest.mark.parametrize(
    ("wrong", "error"), [(0, ValueError), (-1, ValueError), (True, TypeError), ("1", TypeError), (None, TypeError)]
)
async def test_bad_limit(store: BaseSessionStore, wrong: Any, error: type[Exception]) -> None:
    """A limit that is no whole number of at least 1 is refused."""
    await store.get_or_create("s", SUPPORT)
    with pytest.raises(error, match="limit"):
        await store.list_sessions(limit=wrong)
    with pytest.raises(error, match="limit"):
        await store.messages("s", limit=wrong)


# --- messages ---


async def pages(store: BaseSessionStore, session_id: str, limit: int) -> list[list[str]]:
    """The conversation's messages, page by page."""
    found: list[list[str]] = []
    before: int | None = None
    while True:
        page = await store.messages(session_id, limit=limit, before=before)
        found.append(texts(page.items))
        before = page.next
        if before is None:
            return found


async def test_messages(store: BaseSessionStore) -> None:
    """messages() gives the committed messages in the history's order."""
    session = await store.get_or_create("s", SUPPORT)
    await say(session, "one", "two")
    page = await store.messages("s")
    assert list(page.items) == list(session.history)
    assert page.next is None


async def test_no_messages(store: BaseSessionStore) -> None:
    """A conversation in which nothing was said has one empty page of messages."""
    await store.get_or_create("s", SUPPORT)
    page = await store.messages("s")
    assert (page.items, page.next) == ((), None)


async def test_messages_of_absent(store: BaseSessionStore) -> None:
    """messages() of a conversation that does not exist is an error that names it."""
    with pytest.raises(SessionNotFoundError) as caught:
        await store.messages("s")
    assert caught.value.session_id == "s"
    assert isinstance(caught.value, LookupError)


async def test_pages_of_messages(store: BaseSessionStore) -> None:
    """Pages go from the newest messages back, each in the history's order, system messages before all."""
    session = await store.get_or_create("s", SUPPORT)
    await say(session, "one")
    await session.add_message(system("be brief"))
    await say(session, "two")
    await session.add_message(system("be kind"))
    assert texts(session.history) == ["be brief", "be kind", "one", "one!", "two", "two!"]
    assert await pages(store, "s", 2) == [["two", "two!"], ["one", "one!"], ["be brief", "be kind"]]
    assert await pages(store, "s", 4) == [["one", "one!", "two", "two!"], ["be brief", "be kind"]]
    assert await pages(store, "s", 5) == [["be kind", "one", "one!", "two", "two!"], ["be brief"]]
    assert await pages(store, "s", 6) == [["be brief", "be kind", "one", "one!", "two", "two!"]]


async def test_pages_of_pruned_history(open_store: OpenStore) -> None:
    """Pages show what pruning has left, also after a clearing and a rollback."""
    store = open_store(default_max_turns=2)
    session = await store.get_or_create("s", SUPPORT)
    await session.add_message(system("be brief"))
    await say(session, "one", "two", "three")
    assert await pages(store, "s", 3) == [["two!", "three", "three!"], ["be brief", "two"]]
    async with session.turn():
        token = session.checkpoint()
        await say_inside(session, "four", "five")
        await session.rollback_to(token)
        await say_inside(session, "six")
    assert await pages(store, "s", 2) == [["three!", "six"], ["be brief", "three"]]
    await session.clear_history()
    await say(session, "seven")
    assert await pages(store, "s", 1) == [["seven!"], ["seven"]]


async def say_inside(session: Any, *said: str) -> None:
    """Users' messages in the turn that is open."""
    for text in said:
        await session.add_message(user(text))


async def test_pages_while_turns_commit(store: BaseSessionStore) -> None:
    """A page goes on where the one before began, whatever was committed in between."""
    session = await store.get_or_create("s", SUPPORT)
    await say(session, "one", "two")
    page = await store.messages("s", limit=3)
    await say(session, "three")
    await session.add_message(system("be brief"))
    assert texts((await store.messages("s", before=page.next)).items) == ["be brief", "one"]


async def test_messages_wait_for_no_turn(store: BaseSessionStore) -> None:
    """messages() shows the last commit while a turn is open, to its members too."""
    session = await store.get_or_create("s", SUPPORT)
    await say(session, "one")
    async with session.turn():
        await session.add_message(user("two"))
        assert texts((await store.messages("s")).items) == ["one", "one!"]


async def test_cursor_of_a_wrong_type(store: BaseSessionStore) -> None:
    """A cursor that no page has given is refused, rather than taken for the first page."""
    await store.get_or_create("s", SUPPORT)
    with pytest.raises(TypeError, match="after must be the `next` of the page before, not 'x'"):
        await store.list_sessions(after="x")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="before must be the `next` of the page before, not True"):
        await store.messages("s", before=True)


async def test_numbers_past_all_pages(store: BaseSessionStore) -> None:
    """A limit past all counting gives what there is; a cursor that no page can have given is refused."""
    await store.get_or_create("s", SUPPORT)
    assert len((await store.list_sessions(limit=10**30)).items) == 1
    with pytest.raises(ValueError, match="no page has given"):
        await store.list_sessions(after=10**30)
