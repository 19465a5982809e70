from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import anyio
import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from chatflow.core import pruning
from chatflow.core.agent import Agent
from chatflow.core.messages import Message, Role
from chatflow.core.pruning import Window, check_max_turns, prune
from chatflow.core.session import SessionContext
from chatflow.exceptions import UnmatchedToolResultError
from tests.strategies import any_history, calls, exactly, histories, message_lists, results, says, turn_limits

# --- what pruning is judged by: written to be plain, not quick, and sharing nothing with the code -----------------


@attrs.frozen
class Pair:
    """A result and the call it belongs to: positions of their messages, and which of the message's they are."""

    call: int
    call_index: int
    result: int
    result_index: int


def numbered(messages: Sequence[Message]) -> list[Message]:
    """*messages*, each telling its place in its *extra*, and each result in its content."""
    return [
        attrs.evolve(
            message,
            extra={"at": at},
            tool_results=[
                attrs.evolve(result, content=(at, index)) for index, result in enumerate(message.tool_results)
            ],
        )
        for at, message in enumerate(messages)
    ]


def places(messages: Sequence[Message]) -> list[int]:
    """Where the messages of a numbered list stood."""
    return [message.extra["at"] for message in messages]


def result_places(messages: Sequence[Message]) -> set[tuple[int, int]]:
    """Where the results in a numbered list stood."""
    return {result.content for message in messages for result in message.tool_results}


def users(messages: Sequence[Message]) -> list[int]:
    """The positions of the user messages: where turns begin."""
    return [at for at, message in enumerate(messages) if message.role is Role.USER]


def pairs_of(messages: Sequence[Message]) -> list[Pair]:
    """All pairs, by looking back from each result, up to the first user message, for the call it answers."""
    pairs: list[Pair] = []
    first = min(users(messages), default=len(messages))
    for at, message in enumerate(messages):
        for index, result in enumerate(message.tool_results):
            of_this_id = [
                (back, number)
                for back in range(at - 1, first, -1)
                for number, call in enumerate(messages[back].tool_calls)
                if call.id == result.tool_call_id
            ]
            answered = [(pair.call, pair.call_index) for pair in pairs if (pair.call, pair.call_index) in of_this_id]
            still_open = [place for place in of_this_id if place not in answered]
            if of_this_id:
                pairs.append(Pair(*(still_open[0] if still_open else answered[-1]), at, index))
    return pairs


def legal_cuts(messages: Sequence[Message]) -> list[int]:
    """The positions of the user messages that no pair straddles."""
    pairs = pairs_of(messages)
    return [at for at in users(messages) if not any(pair.call < at <= pair.result for pair in pairs)]


def pruned_plainly(messages: Sequence[Message], max_turns: int) -> tuple[list[int], set[tuple[int, int]]]:
    """The places of the messages and of the results that pruning is to keep."""
    turns = users(messages)
    matched = {(pair.result, pair.result_index) for pair in pairs_of(messages)}
    wanted = turns[-max_turns:][0] if turns else len(messages)
    cut = max((at for at in legal_cuts(messages) if at <= wanted), default=len(messages))
    systems = [at for at, message in enumerate(messages) if message.role is Role.SYSTEM]
    body = [
        at
        for at, message in enumerate(messages)
        if at >= cut
        and message.role is not Role.SYSTEM
        and (message.role is not Role.TOOL or any(place == at for place, _ in matched))
    ]
    return systems + body, {place for place in matched if place[0] >= cut}


numbered_histories = any_history.map(numbered)


# --- properties of prune -----------------------------------------------------------------------------------------


@given(numbered_histories, turn_limits)
def test_no_result_without_its_call(messages: list[Message], max_turns: int) -> None:
    """No result stays whose call has gone."""
    kept = prune(messages, max_turns)
    calls_kept = set(places(kept))
    of = {(pair.result, pair.result_index): pair.call for pair in pairs_of(messages)}
    assert all(of.get(place) in calls_kept for place in result_places(kept))


@given(numbered_histories, turn_limits)
def test_no_result_of_a_kept_call_is_lost(messages: list[Message], max_turns: int) -> None:
    """Each result that was given to a call stays as long as the call does."""
    kept = prune(messages, max_turns)
    calls_kept = set(places(kept))
    wanted = {(pair.result, pair.result_index) for pair in pairs_of(messages) if pair.call in calls_kept}
    assert wanted <= result_places(kept)


@given(numbered_histories, turn_limits)
def test_pairs_stay_what_they_were(messages: list[Message], max_turns: int) -> None:
    """A result belongs to the same call after pruning, when only what was kept can be looked at."""
    kept = prune(messages, max_turns)
    before = {(pair.result, pair.result_index): (pair.call, pair.call_index) for pair in pairs_of(messages)}
    for pair in pairs_of(kept):
        result = kept[pair.result].tool_results[pair.result_index].content
        assert before[result] == (kept[pair.call].extra["at"], pair.call_index)


@given(numbered_histories, turn_limits)
def test_system_messages_stay_first(messages: list[Message], max_turns: int) -> None:
    """All system messages stay, in order, before all others."""
    systems = [message for message in messages if message.role is Role.SYSTEM]
    kept = prune(messages, max_turns)
    assert list(kept[: len(systems)]) == systems
    assert all(message.role is not Role.SYSTEM for message in kept[len(systems) :])


@given(any_history, turn_limits)
def test_user_message_comes_first(messages: list[Message], max_turns: int) -> None:
    """After the system messages comes a user message, or nothing."""
    body = [message for message in prune(messages, max_turns) if message.role is not Role.SYSTEM]
    assert not body or body[0].role is Role.USER


@given(numbered_histories, turn_limits)
def test_order_is_kept(messages: list[Message], max_turns: int) -> None:
    """All but system messages keep their order, and from the first one kept on, only orphans are missing."""
    body = [message for message in prune(messages, max_turns) if message.role is not Role.SYSTEM]
    assert places(body) == sorted(set(places(body)))
    since_first = messages[body[0].extra["at"] :] if body else []
    gone = [message.role for message in since_first if message.extra["at"] not in places(body)]
    assert set(gone) <= {Role.SYSTEM, Role.TOOL}


@given(any_history, turn_limits)
def test_newest_user_message_stays(messages: list[Message], max_turns: int) -> None:
    """The newest user message stays, whatever the limit."""
    turns = users(messages)
    assert not turns or messages[turns[-1]] in prune(messages, max_turns)


@given(numbered_histories, turn_limits)
def test_at_most_max_turns(messages: list[Message], max_turns: int) -> None:
    """More turns than *max_turns* stay only where a pair straddles each later place to cut, and then no more."""
    kept = prune(messages, max_turns)
    turns = [at for at in places(kept) if messages[at].role is Role.USER]
    if len(turns) > max_turns:
        assert not set(turns[1 : len(turns) - max_turns + 1]) & set(legal_cuts(messages))


@given(any_history, turn_limits)
def test_no_turn_is_cut_needlessly(messages: list[Message], max_turns: int) -> None:
    """At least *max_turns* turns stay, or all there were."""
    assert len(users(prune(messages, max_turns))) >= min(max_turns, len(users(messages)))


@given(numbered_histories, turn_limits)
def test_agrees_with_plain_search(messages: list[Message], max_turns: int) -> None:
    """What stays is what trying all cuts on all pairs finds."""
    kept = prune(messages, max_turns)
    assert (places(kept), result_places(kept)) == pruned_plainly(messages, max_turns)


@given(any_history, turn_limits)
def test_idempotent(messages: list[Message], max_turns: int) -> None:
    """Pruning what was pruned changes nothing."""
    kept = prune(messages, max_turns)
    assert prune(kept, max_turns) == kept


@given(any_history, turn_limits, turn_limits)
def test_pruning_in_steps(messages: list[Message], max_turns: int, fewer: int) -> None:
    """Pruning to many turns and then to few is pruning to few."""
    assert prune(prune(messages, max_turns + fewer), fewer) == prune(messages, fewer)


@given(any_history, turn_limits)
def test_input_is_untouched(messages: list[Message], max_turns: int) -> None:
    """The list that is pruned, and each message in it, is afterwards what it was."""
    before, forms = list(messages), exactly(messages)
    prune(messages, max_turns)
    assert all(one is other for one, other in zip(messages, before, strict=True))
    assert exactly(messages) == forms


@given(numbered_histories, turn_limits)
def test_messages_are_the_same_objects(messages: list[Message], max_turns: int) -> None:
    """No message is copied but a tool message that loses results, and that one is the same in all else."""
    for message in prune(messages, max_turns):
        original = messages[message.extra["at"]]
        if len(message.tool_results) == len(original.tool_results):
            assert message is original
        else:
            assert attrs.evolve(original, tool_results=message.tool_results) == message


@given(any_history, turn_limits)
def test_any_iterable_is_taken(messages: list[Message], max_turns: int) -> None:
    """Messages may come from a generator, and the answer is a tuple."""
    assert prune(iter(messages), max_turns) == tuple(prune(messages, max_turns))


@given(histories())
def test_enough_turns_keep_everything(messages: list[Message]) -> None:
    """A valid history with no more turns than the limit stays whole, its system messages first."""
    assert prune(messages, 100) == tuple(sorted(messages, key=lambda message: message.role is not Role.SYSTEM))


# --- examples ----------------------------------------------------------------------------------------------------

USER, MODEL, SYSTEM = Role.USER, Role.MODEL, Role.SYSTEM


def history_of(*steps: Role | Message) -> list[Message]:
    """A numbered history of words, calls and results."""
    return numbered([says(step) if isinstance(step, Role) else step for step in steps])


EXAMPLES: dict[str, tuple[list[Message], int, list[int]]] = {
    "nothing": (history_of(), 1, []),
    "one turn": (history_of(USER, MODEL, USER, MODEL), 1, [2, 3]),
    "system messages anywhere": (history_of(USER, SYSTEM, USER, SYSTEM), 1, [1, 3, 2]),
    "greeting before any user": (history_of(MODEL, USER), 5, [1]),
    "only a greeting": (history_of(SYSTEM, MODEL), 5, [0]),
    "call before any user, and its result": (history_of(calls("a"), USER, results("a"), MODEL), 5, [1, 3]),
    "unanswered call stays in its turn": (history_of(USER, calls("a"), USER), 2, [0, 1, 2]),
    "late result keeps its call's turn": (history_of(USER, calls("a"), USER, results("a")), 1, [0, 1, 2, 3]),
    "pairs straddling in a chain": (
        history_of(USER, USER, calls("a"), USER, results("a"), calls("b"), USER, results("b"), USER),
        2,
        [1, 2, 3, 4, 5, 6, 7, 8],
    ),
    "pair beyond the window goes": (history_of(USER, calls("a"), USER, results("a"), USER, USER), 2, [4, 5]),
    "nearest open call of the id": (history_of(USER, calls("a"), USER, calls("a"), results("a")), 1, [2, 3, 4]),
    "second call answered by the second result": (
        history_of(USER, calls("a"), USER, calls("a"), results("a"), results("a")),
        1,
        [0, 1, 2, 3, 4, 5],
    ),
    "further result belongs to the call answered last": (
        history_of(USER, calls("a"), USER, calls("a"), results("a"), USER, results("a"), USER, results("a")),
        1,
        [0, 1, 2, 3, 4, 5, 6, 7, 8],
    ),
    "further result where both calls were answered in their turns": (
        history_of(USER, calls("a"), results("a"), USER, calls("a"), results("a"), USER, results("a")),
        1,
        [3, 4, 5, 6, 7],
    ),
    "result before its call": (history_of(USER, results("a"), calls("a")), 1, [0, 2]),
    "orphaned result": (history_of(USER, results("a"), MODEL), 1, [0, 2]),
    "empty id": (history_of(USER, calls(""), USER, results("")), 1, [0, 1, 2, 3]),
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_example(name: str) -> None:
    """The rules by example: what stays of a small history, by its places."""
    messages, max_turns, kept = EXAMPLES[name]
    assert places(prune(messages, max_turns)) == kept


def test_tool_message_loses_only_its_orphans() -> None:
    """Of a tool message with several results, those with a call stay, and its other fields with them."""
    messages = history_of(USER, calls("a"), results("b", "a", "b"))
    *_, tool = prune(messages, 1)
    assert tool == attrs.evolve(messages[2], tool_results=messages[2].tool_results[1:2])


def test_calls_of_one_message_are_answered_in_order() -> None:
    """Calls of one id within a message are answered in order, so that a window of pairs knows which is open."""
    pairing = pruning.Pairing()
    pairing.call(1, calls("a", "b", "a").tool_calls)
    found = [pairing.answer(each) for each in ("a", "a", "a", "c")]
    assert found == [
        (pruning.CallPlace(1, 0), False),
        (pruning.CallPlace(1, 2), False),
        (pruning.CallPlace(1, 2), True),
        None,
    ]


# --- max_turns ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_turns", [0, -1])
def test_limit_below_one(max_turns: int) -> None:
    """A limit below 1 is refused, also where there is nothing to prune."""
    with pytest.raises(ValueError, match=f"^max_turns must be at least 1, not {max_turns}$"):
        prune([], max_turns)


@pytest.mark.parametrize("max_turns", [True, 2.5, "40", None], ids=repr)
def test_limit_of_another_type(max_turns: Any) -> None:
    """A limit that is no integer is refused, True included."""
    with pytest.raises(TypeError, match=f"^max_turns must be an integer, not {max_turns!r}$"):
        prune([], max_turns)


def test_limit_is_named() -> None:
    """The error names the argument that the caller knows."""
    assert check_max_turns(1) == 1
    with pytest.raises(ValueError, match=r"^default_max_turns must be"):
        check_max_turns(0, "default_max_turns")


# --- the window, step by step ------------------------------------------------------------------------------------


@given(any_history, turn_limits)
def test_window_is_prune_for_every_prefix(messages: list[Message], max_turns: int) -> None:
    """A window that takes message after message shows, after each, what pruning all of them gives."""
    window = Window()
    for at, message in enumerate(messages):
        window.add(message)
        assert window.history(max_turns) == prune(messages[: at + 1], max_turns)


def trimmed_steps(messages: Sequence[Message], max_turns: int, window: Window) -> list[tuple[bool, list[int], int]]:
    """What *window* says and holds when it takes one message after another, trimmed after each."""
    steps = []
    for message in messages:
        kept = window.unmatched(message) is None and window.add(message)
        window.trim(max_turns)
        history = window.history()
        assert history == window.history(max_turns)
        assert window.turns == len(users(history))
        assert window.end - window.start == history.body_length
        steps.append((kept, places(history), window.start))
    return steps


@given(numbered_histories, turn_limits, st.integers(0, 24))
def test_window_made_anew_goes_on_alike(messages: list[Message], max_turns: int, at: int) -> None:
    """A window made of another's history, as after a restart, says and holds the same from there on."""
    window = Window()
    trimmed_steps(messages[:at], max_turns, window)
    again = Window.of(window.history(), window.start)
    assert trimmed_steps(messages[at:], max_turns, window) == trimmed_steps(messages[at:], max_turns, again)


@given(numbered_histories, turn_limits)
def test_copying_the_list_changes_nothing(messages: list[Message], max_turns: int) -> None:
    """A window says and holds the same when it drops what it has cut at once, and histories taken before stay."""
    expected = trimmed_steps(messages, max_turns, Window())
    taken = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pruning, "_COMPACT_AFTER", 0)
        window = Window()
        for message, step in zip(messages, expected, strict=True):
            assert trimmed_steps([message], max_turns, window) == [step]
            taken.append(window.history())
    assert [places(history) for history in taken] == [step[1] for step in expected]


def test_cut_messages_are_let_go() -> None:
    """A window in which thousands of turns have come and gone holds a list of no more than what it keeps, and some."""
    window = Window()
    for _ in range(5_000):
        window.add(says(Role.USER))
        window.trim(10)
    assert len(window.history()) == 10
    assert len(window._body) < 2_500


def test_positions_only_grow() -> None:
    """A message's position counts every message before it but system messages, cut ones included."""
    window = Window(start=7)
    for message in history_of(SYSTEM, USER, MODEL, USER):
        window.add(message)
    window.trim(1)
    assert (window.start, window.end) == (9, 10)


def test_calls_that_were_cut_are_forgotten() -> None:
    """A result of a call that was cut has no call, whether it had been answered or not, unless the id came again."""
    window = Window()
    for message in history_of(USER, calls("a", "b"), results("a"), USER, calls("b"), USER):
        window.add(message)
    window.trim(2)
    assert window.unmatched(results("a")) == "a"
    assert window.unmatched(results("b")) is None
    assert window.unmatched(results("b", "a")) == "a"


# --- a session fed one by one ------------------------------------------------------------------------------------


def new_session(max_turns: int) -> SessionContext:
    """A session on its own."""
    return SessionContext("s", Agent("Support"), max_turns)


def feed(messages: Sequence[Message], max_turns: int) -> None:
    """Feed a session one message after another, and compare with pruning all that it has accepted.

    A result whose call has been cut by then must be refused. If what is left has another call of its id, it is that
    one's, since nobody remembers the first; from there on the two differ, and the comparison ends.
    """

    async def run() -> None:
        session = new_session(max_turns)
        accepted: list[Message] = []
        for message in messages:
            before = session.history
            asked = [*accepted, message]
            pairs = [pair for pair in pairs_of(asked) if pair.result == len(accepted)]
            held = [pair for pair in pairs if asked[pair.call].extra["at"] in places(before)]
            if len(held) == len(message.tool_results):
                await session.add_message(message)
                accepted.append(message)
                assert session.history == prune(accepted, max_turns)
                continue
            ids_held = {call.id for each in before for call in each.tool_calls}
            if ids_held.issuperset(result.tool_call_id for result in message.tool_results):
                await session.add_message(message)
                assert session.history == prune([*before, message], max_turns)
                return
            with pytest.raises(UnmatchedToolResultError):
                await session.add_message(message)
            assert session.history == before
            assert session.history == prune(accepted, max_turns)

    anyio.run(run)


@given(histories().map(numbered), turn_limits)
def test_fed_one_by_one_is_at_once(messages: list[Message], max_turns: int) -> None:
    """A session fed one by one holds what pruning at once gives, but for results that come too late."""
    feed(messages, max_turns)


@given(message_lists.map(numbered), turn_limits)
def test_fed_anything_one_by_one(messages: list[Message], max_turns: int) -> None:
    """A session fed anything refuses results without a call, whole, and holds what pruning the rest gives."""
    feed(messages, max_turns)


@given(st.lists(st.tuples(histories(max_size=8), st.booleans()), min_size=1, max_size=5), turn_limits)
def test_fed_in_turns(batches: list[tuple[list[Message], bool]], max_turns: int) -> None:
    """A turn of several messages commits what pruning the history with them gives, and nothing if it fails."""

    async def run() -> None:
        session = new_session(max_turns)
        for batch, fails in batches:
            before = session.history
            expected = prune([*before, *batch], max_turns)
            try:
                async with session.turn():
                    for message in batch:
                        await session.add_message(message)
                    assert session.history == expected
                    if fails:
                        raise InterruptedError
            except InterruptedError:
                expected = tuple(before)
            assert session.history == expected

    anyio.run(run)


def test_more_turns_than_a_number_can_tell() -> None:
    """A window larger than any storage can write down is refused."""
    with pytest.raises(ValueError, match="max_turns must be at most"):
        prune([], 2**63)
