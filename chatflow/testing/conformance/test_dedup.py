from __future__ import annotations

import asyncio
import datetime as dt
from collections.abc import Awaitable, Callable
from contextlib import suppress
from itertools import count

import anyio
import pytest

from chatflow.core.backend import StoreBackend
from chatflow.core.messages import AgentResponse, Handoff
from chatflow.core.records import Answered, Claim
from chatflow.core.session import SessionContext
from chatflow.core.turn import Turn
from chatflow.exceptions import MessageInProgressError, MessageMismatchError, SessionDeletedError
from chatflow.testing.conformance.conftest import Clock, OpenStore, Restart
from chatflow.testing.conformance.conversation import SUPPORT, outside, queued, texts, until, user

RESPONSE = AgentResponse(
    content="On its way.",
    active_agent_name="Billing",
    tool_calls_executed=["look_up"],
    handoff=Handoff(target_agent_name="Billing", reason="asked", context_updates={"order": (1, 2)}),
    usage={"tokens": 3},
    stop_reason="tool_limit",
)


def claim(message_id: str, text: str = "hello") -> Claim:
    """The claim of a message of that text."""
    return Claim(message_id, text)


async def answer(session: SessionContext, message_id: str, text: str = "hello") -> Answered | None:
    """Take a turn for the message and answer it; or what was answered before, or None."""
    turn = Turn(session, claim=claim(message_id, text))
    answered = await turn.take()
    assert not isinstance(answered, Turn)
    if answered is None:
        try:
            await session.add_message(user(text))
            turn.response = RESPONSE
        except BaseException:
            await turn.drop()
            raise
        await turn.commit()
    return answered


# --- marks ---


async def test_unknown_id(store: StoreBackend) -> None:
    """An id that nobody marked is not processed."""
    assert not await store.is_message_processed("m")


async def test_mark(store: StoreBackend) -> None:
    """Marking gives True once, and the id is processed from then on."""
    assert await store.mark_message_processed("m") is True
    assert await store.is_message_processed("m") is True
    assert await store.mark_message_processed("m") is False


async def test_one_winner_of_eight(store: StoreBackend) -> None:
    """Of eight tasks that mark the same id at once, exactly one is told True, for each of a hundred ids (P4)."""
    won: list[str] = []

    async def mark(message_id: str) -> None:
        if await store.mark_message_processed(message_id):
            won.append(message_id)

    ids = [f"m{number}" for number in range(100)]
    async with anyio.create_task_group() as group:
        for message_id in ids:
            for _ in range(8):
                group.start_soon(mark, message_id)
    assert sorted(won) == sorted(ids)


async def test_mark_is_durable(store: StoreBackend, restart: Restart) -> None:
    """A mark is still known after a restart, in its scope and in no other."""
    await store.mark_message_processed("m", session_id="s")
    store = await restart(store)
    assert await store.is_message_processed("m", session_id="s")
    assert not await store.is_message_processed("m")


async def test_mark_is_seen_by_others(store: StoreBackend, second: StoreBackend) -> None:
    """A mark is known to another store on the same data."""
    await store.mark_message_processed("m")
    assert await second.mark_message_processed("m") is False


async def test_scopes(store: StoreBackend) -> None:
    """The same id in another conversation, and one without a conversation, are different ids."""
    assert await store.mark_message_processed("m", session_id="s")
    assert not await store.is_message_processed("m", session_id="t")
    assert not await store.is_message_processed("m")
    assert await store.mark_message_processed("m", session_id="t")
    assert await store.mark_message_processed("m")
    assert not await store.mark_message_processed("m", session_id="s")


async def test_mark_needs_no_conversation(store: StoreBackend) -> None:
    """An id can be marked for a conversation that does not exist, which doesn't create it."""
    assert await store.mark_message_processed("m", session_id="s")
    assert await store.get("s") is None


@pytest.mark.parametrize("message_id", ["'; --", "../m", "a\x00b", "x" * 10_000, "señal-日本"], ids=ascii)
async def test_any_text_is_a_message_id(store: StoreBackend, message_id: str) -> None:
    """A message id is data, whatever characters it has."""
    assert await store.mark_message_processed(message_id)
    assert await store.is_message_processed(message_id)
    assert not await store.is_message_processed(message_id[:1])


# --- time ---


async def test_forgotten_after_ttl(store: StoreBackend, clock: Clock) -> None:
    """An id is remembered for 192 hours and then can be marked anew."""
    await store.mark_message_processed("m")
    clock.passes(hours=192)
    assert await store.is_message_processed("m")
    assert not await store.mark_message_processed("m")
    clock.passes(microseconds=1)
    assert not await store.is_message_processed("m")
    assert await store.mark_message_processed("m")
    assert await store.is_message_processed("m")


async def test_own_ttl(open_store: OpenStore) -> None:
    """A store remembers ids for as long as it was told to, fractions of an hour included."""
    store = open_store(dedup_ttl_hours=0.5)
    store.clock = clock = Clock()
    await store.mark_message_processed("m")
    clock.passes(minutes=30)
    assert await store.is_message_processed("m")
    clock.passes(seconds=1)
    assert not await store.is_message_processed("m")


async def test_marking_again_keeps_the_time(store: StoreBackend, clock: Clock) -> None:
    """A second mark does not make an id be remembered for longer."""
    await store.mark_message_processed("m")
    clock.passes(hours=100)
    await store.mark_message_processed("m")
    clock.passes(hours=100)
    assert not await store.is_message_processed("m")


async def test_purge(store: StoreBackend, clock: Clock) -> None:
    """A purge forgets the expired ids, however many they are, says how many, and keeps the others."""
    for number in range(1_203):
        await store.mark_message_processed(f"old{number}")
    clock.passes(hours=193)
    before_purge = await store.purge_processed_messages()
    await store.mark_message_processed("new")
    assert before_purge == 1_203
    assert await store.purge_processed_messages() == 0
    assert await store.is_message_processed("new")
    assert not await store.is_message_processed("old7")


async def test_purge_slice(store: StoreBackend, clock: Clock) -> None:
    """One operation of a purge removes no more ids than it was asked for."""
    for number in range(25):
        await store.mark_message_processed(str(number))
    clock.passes(hours=193)
    assert [await store.purge_processed(10) for _ in range(4)] == [10, 10, 5, 0]


async def test_backlog_shrinks_by_itself(store: StoreBackend, clock: Clock) -> None:
    """Marks forget expired ids by themselves, so that a store in use needs no purge."""
    for number in range(20):
        await store.mark_message_processed(f"old{number}")
    clock.passes(hours=193)
    for number in range(20):
        await store.mark_message_processed(f"new{number}")
    assert await store.purge_processed_messages() == 0


# --- claims ---


async def test_claim_is_answered_once(store: StoreBackend) -> None:
    """A message's second turn is not taken; it gets the stored response, equal in every field."""
    session = await store.get_or_create("s", SUPPORT)
    assert await answer(session, "m") is None
    answered = await answer(session, "m")
    assert answered is not None
    assert answered.response == RESPONSE
    assert answered.digest == claim("m").digest
    assert texts(session.history) == ["hello"]


async def test_response_survives(store: StoreBackend, restart: Restart) -> None:
    """A stored response is equal after a restart."""
    await answer(await store.get_or_create("s", SUPPORT), "m")
    store = await restart(store)
    answered = await answer(await store.get_or_create("s", SUPPORT), "m")
    assert answered is not None
    assert answered.response == RESPONSE


async def test_claim_of_eight_tasks(store: StoreBackend) -> None:
    """Of eight deliveries of one message at once, one takes a turn and seven get its answer (P4)."""
    session = await store.get_or_create("s", SUPPORT)
    found: list[Answered | None] = []

    async def deliver() -> None:
        found.append(await answer(session, "m"))

    async with anyio.create_task_group() as group:
        for _ in range(8):
            group.start_soon(deliver)
    assert [each.response for each in found if each is not None] == [RESPONSE] * 7
    assert texts(session.history) == ["hello"]


async def test_claim_of_two_stores(store: StoreBackend, second: StoreBackend) -> None:
    """Of deliveries through two stores on the same data, one takes a turn and the others get its answer."""
    sessions = [await each.get_or_create("s", SUPPORT) for each in (store, second)]
    found: list[Answered | None] = []

    async def deliver(number: int) -> None:
        found.append(await answer(sessions[number % 2], "m"))

    async with anyio.create_task_group() as group:
        for number in range(8):
            group.start_soon(deliver, number)
    assert found.count(None) == 1
    assert texts((await store.messages("s")).items) == ["hello"]


async def test_claim_is_processed_once_committed(store: StoreBackend) -> None:
    """A message is processed, in its conversation's scope, when its turn has committed and not before."""
    session = await store.get_or_create("s", SUPPORT)
    turn = Turn(session, claim=claim("m"))
    await turn.take()
    assert not await store.is_message_processed("m", session_id="s")
    await turn.commit()
    assert await store.is_message_processed("m", session_id="s")
    assert not await store.is_message_processed("m")
    assert not await store.mark_message_processed("m", session_id="s")


async def test_claims_in_two_conversations(store: StoreBackend) -> None:
    """The same id in two conversations is two messages."""
    for session_id in ("s", "t"):
        assert await answer(await store.get_or_create(session_id, SUPPORT), "m") is None


async def test_mark_without_conversation_is_no_claim(store: StoreBackend) -> None:
    """Who marks an id without a conversation and then takes a turn for it is not turned away."""
    session = await store.get_or_create("s", SUPPORT)
    assert await store.mark_message_processed("m")
    assert await answer(session, "m") is None
    assert await store.mark_message_processed("m") is False


async def test_mark_by_hand_turns_away(store: StoreBackend) -> None:
    """An id that was marked by hand for the conversation takes no turn and has no stored response."""
    session = await store.get_or_create("s", SUPPORT)
    await store.mark_message_processed("m", session_id="s")
    assert await answer(session, "m") == Answered(None, None)
    assert session.history == []


async def test_other_text(store: StoreBackend) -> None:
    """The id of an answered message with another text is refused, and nothing runs."""
    session = await store.get_or_create("s", SUPPORT)
    await answer(session, "m")
    with pytest.raises(MessageMismatchError) as caught:
        await answer(session, "m", "something else")
    assert (caught.value.session_id, caught.value.message_id) == ("s", "m")
    assert texts(session.history) == ["hello"]


async def test_other_text_under_way(store: StoreBackend) -> None:
    """The id of a message under way with another text is refused at once."""
    session = await store.get_or_create("s", SUPPORT)
    turn = Turn(session, claim=claim("m"))
    await turn.take()
    with pytest.raises(MessageMismatchError):
        await outside(answer(session, "m", "something else"))
    await turn.drop()


async def test_under_way_and_not_waiting(store: StoreBackend) -> None:
    """A duplicate that does not want to wait is told that the message is being answered."""
    session = await store.get_or_create("s", SUPPORT)
    turn = Turn(session, claim=claim("m"))
    await turn.take()
    with pytest.raises(MessageInProgressError) as caught:
        await outside(Turn(session, claim=claim("m")).take(wait_for_duplicate=False))
    assert (caught.value.session_id, caught.value.message_id) == ("s", "m")
    await turn.drop()


async def test_duplicate_takes_no_place(store: StoreBackend) -> None:
    """A duplicate does not stand in the line: the turn queued after it runs directly after the first."""
    session = await store.get_or_create("s", SUPPORT)
    turn = Turn(session, claim=claim("m"))
    await turn.take()
    duplicate = asyncio.create_task(outside(answer(session, "m")))
    await queued(store, 1)
    behind = asyncio.create_task(outside(session.add_message(user("behind"))))
    await queued(store, 2)
    turn.response = RESPONSE
    await turn.commit()
    assert await duplicate is not None
    await behind
    assert texts(session.history) == ["behind"]


async def test_failed_turn_can_be_tried_again(store: StoreBackend) -> None:
    """A message whose turn failed is not processed and takes a turn when it is sent again (P5)."""
    session = await store.get_or_create("s", SUPPORT)
    turn = Turn(session, claim=claim("m"))
    await turn.take()
    await session.add_message(user("lost"))
    await turn.drop()
    assert not await store.is_message_processed("m", session_id="s")
    assert await answer(session, "m") is None
    assert texts(session.history) == ["hello"]


async def test_waiting_duplicate_of_failed_turn(store: StoreBackend) -> None:
    """When a message's turn fails, one of the duplicates that wait for it takes the turn, the others get its answer."""
    session = await store.get_or_create("s", SUPPORT)
    turn = Turn(session, claim=claim("m"))
    await turn.take()
    duplicates = [asyncio.create_task(outside(answer(session, "m"))) for _ in range(3)]
    await until(lambda: sum(len(each) for each in store.line._waiters.values()) == 3)
    await turn.drop()
    found = [await duplicate for duplicate in duplicates]
    assert [each.response for each in found if each is not None] == [RESPONSE] * 2
    assert texts(session.history) == ["hello"]


async def test_cancelled_duplicate(store: StoreBackend) -> None:
    """A duplicate that is cancelled while it waits changes nothing for the first."""
    session = await store.get_or_create("s", SUPPORT)
    turn = Turn(session, claim=claim("m"))
    await turn.take()
    duplicate = asyncio.create_task(outside(answer(session, "m")))
    await queued(store, 1)
    duplicate.cancel()
    await asyncio.wait([duplicate])
    turn.response = RESPONSE
    await turn.commit()
    assert await store.is_message_processed("m", session_id="s")


async def test_claim_expires(store: StoreBackend, clock: Clock) -> None:
    """A message can be answered anew once its id is forgotten."""
    session = await store.get_or_create("s", SUPPORT)
    await answer(session, "m")
    clock.passes(hours=193)
    assert await answer(session, "m") is None
    assert texts(session.history) == ["hello", "hello"]


async def test_empty_turn_marks_its_claim(store: StoreBackend) -> None:
    """A turn with a claim that changes nothing marks its message all the same."""
    session = await store.get_or_create("s", SUPPORT)
    turn = Turn(session, claim=claim("m"))
    await turn.take()
    await turn.commit()
    assert await store.is_message_processed("m", session_id="s")


# --- deleting ---

DELETE: dict[str, Callable[[StoreBackend], Awaitable[object]]] = {
    "delete": lambda store: store.delete("s"),
    "clear": lambda store: store.clear(),
}


@pytest.mark.parametrize("delete", DELETE.values(), ids=DELETE.keys())
async def test_answered_id_outlasts_conversation(
    store: StoreBackend, delete: Callable[[StoreBackend], Awaitable[object]]
) -> None:
    """Delete and clear remove stored answers and keep the ids: a duplicate still takes no turn (P7)."""
    await answer(await store.get_or_create("s", SUPPORT), "m")
    await delete(store)
    assert await store.is_message_processed("m", session_id="s")
    session = await store.get_or_create("s", SUPPORT)
    answered = await answer(session, "m")
    assert answered is not None
    assert answered.response is None
    assert session.history == []


@pytest.mark.parametrize("delete", DELETE.values(), ids=DELETE.keys())
async def test_unfinished_id_goes_with_conversation(
    store: StoreBackend, delete: Callable[[StoreBackend], Awaitable[object]]
) -> None:
    """Delete and clear forget the ids of turns that had not finished."""
    session = await store.get_or_create("s", SUPPORT)
    turn = Turn(session, claim=claim("m"))
    await turn.take()
    await delete(store)
    with pytest.raises(SessionDeletedError):
        await turn.commit()
    assert not await store.is_message_processed("m", session_id="s")
    assert await answer(await store.get_or_create("s", SUPPORT), "m") is None


@pytest.mark.parametrize("delete", DELETE.values(), ids=DELETE.keys())
async def test_marks_outlast_conversations(
    store: StoreBackend, delete: Callable[[StoreBackend], Awaitable[object]]
) -> None:
    """Delete and clear keep marks, with and without a conversation."""
    await store.get_or_create("s", SUPPORT)
    await store.mark_message_processed("m")
    await store.mark_message_processed("m", session_id="s")
    await delete(store)
    assert await store.is_message_processed("m")
    assert await store.is_message_processed("m", session_id="s")


async def test_waiting_duplicate_of_deleted(store: StoreBackend) -> None:
    """A duplicate that waits when the conversation is deleted is told so."""
    session = await store.get_or_create("s", SUPPORT)
    turn = Turn(session, claim=claim("m"))
    await turn.take()
    duplicate = asyncio.create_task(outside(answer(session, "m")))
    await queued(store, 1)
    await store.delete("s")
    with pytest.raises(SessionDeletedError):
        await duplicate
    with suppress(SessionDeletedError):
        await turn.commit()


async def test_delete_after_purge(store: StoreBackend, clock: Clock) -> None:
    """A conversation some of whose answered ids have been purged is deleted with the answers that are left."""
    session = await store.get_or_create("s", SUPPORT)
    await answer(session, "old")
    clock.passes(hours=193)
    await answer(session, "new")
    await store.purge_processed_messages()
    assert await store.delete("s")
    new = await store.get_or_create("s", SUPPORT)
    assert await answer(new, "new") == Answered(claim("new").digest, None)
    assert await answer(new, "old") is None


async def test_delete_after_answer_expired_at_once(store: StoreBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    """A conversation can be deleted whose answered id expired, and was purged, while its turn was committed."""
    session = await store.get_or_create("s", SUPPORT)
    hours = count(step=200)
    monkeypatch.setattr(
        store, "clock", lambda: dt.datetime(2030, 1, 1, tzinfo=dt.UTC) + dt.timedelta(hours=next(hours))
    )
    await answer(session, "m")
    assert texts(session.history) == ["hello"]
    assert await store.delete("s")
