from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from typing import Any

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from chatflow.core.agent import Agent
from chatflow.core.budget import Windows
from chatflow.core.messages import Message, Role
from chatflow.core.pruning import prune
from chatflow.runner import Runner
from chatflow.running.fitting import fit
from tests.strategies import any_history, calls, results, says
from tests.test_pruning import history_of, numbered, pairs_of, places, users

USER, MODEL, SYSTEM = Role.USER, Role.MODEL, Role.SYSTEM


@attrs.frozen
class Drawn:
    """A history, and what of it the running turn has to send: all from a place on, and perhaps a turn before that."""

    messages: list[Message]
    begun: int
    again: range

    @property
    def own(self) -> list[int]:
        """The places of what has to be sent."""
        return [at for at in range(len(self.messages)) if at >= self.begun or at in self.again]

    def windows(self, refused: Collection[int] = ()) -> Windows:
        """The windows of it."""
        messages = self.messages
        return Windows(messages, {id(messages[at]) for at in self.own}, frozenset(id(messages[at]) for at in refused))


def drawn_at(messages: list[Message]) -> st.SearchStrategy[Drawn]:
    """Where in it the running turn begins, which need not be at a user message, and which one it goes on with."""
    turns = users(messages)
    return st.builds(
        Drawn,
        messages=st.just(messages),
        begun=st.integers(0, len(messages)),
        again=st.sampled_from([range(0), *map(range, turns, [*turns[1:], len(messages)])]),
    )


drawn_histories = any_history.map(numbered).flatmap(drawn_at)

weights = st.lists(st.integers(0, 5), min_size=32, max_size=32)
limits = st.integers(0, 90)


def is_body(message: Message) -> bool:
    """Whether a window may leave it out."""
    return message.role is not SYSTEM


def windows_plainly(drawn: Drawn, refused: Collection[int] = ()) -> list[list[int]]:
    """All windows that may be sent, by the places of their messages, from the largest on: turns leave one by one."""
    messages, own = drawn.messages, set(drawn.own)
    whole = prune(messages, len(messages) + 1)
    body = [message.extra["at"] for message in whole if is_body(message)]
    turns = [at for at in users(messages) if at not in own]

    def turn_of(at: int) -> int | None:
        """The user message that it goes with; None for the running turn."""
        return None if at in own else max(turn for turn in users(messages) if turn <= at)

    joins: list[set[int | None]] = [{turn_of(pair.call), turn_of(pair.result)} for pair in pairs_of(messages)]
    first_said = min((at for at in own if messages[at].role is USER), default=len(messages))
    joins += [{None, max(turn for turn in turns if turn <= at)} for at in body if at in own and at < first_said]
    groups: list[set[int | None]] = [{turn} for turn in [None, *turns]]
    for join in joins:
        met = [group for group in groups if group & join]
        groups = [group for group in groups if not group & join] + [set().union(*met)]
    running = next(group for group in groups if None in group)
    others = sorted((group for group in groups if group is not running), key=lambda group: max(map(int, group)))  # type: ignore[arg-type]
    dropped = {at for group in others if any(turn_of(at) in group for at in refused if at in body) for at in group}
    others = [group for group in others if not group & dropped]
    windows: list[list[int]] = []
    for first in range(len(others) + 1):
        sent = running.union(*others[first:])
        windows.append([at for at in places(whole) if not is_body(messages[at]) or turn_of(at) in sent])
    return windows if refused else [places(messages), *windows[1:]]


def counting(windows: Windows, weights: Sequence[int], counted: list[int]) -> Callable[[int], Any]:
    """Counts a window by its messages' weights, and notes which one."""

    async def count(index: int) -> int:
        counted.append(index)
        return sum(weights[message.extra["at"]] for message in windows.window(index))

    return count


@given(drawn_histories)
def test_windows_are_all_that_pairs_allow(drawn: Drawn) -> None:
    """The oldest turns go, one after the other, each with those that pairs join it with, and never the running one."""
    windows = drawn.windows()
    found = [places(windows.window(index)) for index in reversed(range(windows.last + 1))]
    assert found == windows_plainly(drawn)


@given(drawn_histories, st.sets(st.integers(0, 31), min_size=1))
def test_turns_that_are_refused(drawn: Drawn, refused: set[int]) -> None:
    """Turns of messages that are not to be sent any more are in no window, unless the running one needs them."""
    refused = {at for at in refused if at < len(drawn.messages)}
    windows = drawn.windows(refused)
    found = [places(windows.window(index)) for index in reversed(range(windows.last + 1))]
    assert found == windows_plainly(drawn, refused)
    assert refused == set() or windows.window(None) == windows.window(windows.last)


@given(drawn_histories)
def test_no_half_pair(drawn: Drawn) -> None:
    """No window holds a call without a result that was given, or a result without its call."""
    windows = drawn.windows()
    for index in range(windows.last):
        sent = set(places(windows.window(index)))
        assert all((pair.call in sent) is (pair.result in sent) for pair in pairs_of(drawn.messages))


@given(drawn_histories)
def test_system_messages_and_the_running_turn_are_in_all(drawn: Drawn) -> None:
    """System messages, and what pruning would ever keep of the running turn, are in every window."""
    messages, windows = drawn.messages, drawn.windows()
    whole = places(prune(messages, len(messages) + 1))
    kept = {at for at in whole if at in drawn.own or messages[at].role is SYSTEM}
    for index in range(windows.last + 1):
        assert kept <= set(places(windows.window(index)))


@given(drawn_histories)
def test_what_is_left_out(drawn: Drawn) -> None:
    """What a window leaves out are messages of before the turn that are not in it."""
    windows, own = drawn.windows(), drawn.own
    for index in range(windows.last + 1):
        sent = {id(message) for message in windows.window(index)}
        assert windows.left_out(index) == tuple(
            message
            for at, message in enumerate(drawn.messages)
            if at not in own and is_body(message) and id(message) not in sent
        )


@given(drawn_histories)
def test_half(drawn: Drawn) -> None:
    """Half of a window is the largest smaller one with at most half of its turns, or the least."""
    windows = drawn.windows()
    assert windows.half(0) == 0
    for index in range(1, windows.last + 1):
        small = [each for each in range(index) if windows.turns[each] * 2 <= windows.turns[index]]
        assert windows.half(index) == max(small, default=0) < index


@given(drawn_histories, weights, limits)
async def test_the_largest_that_fits(drawn: Drawn, weights: list[int], limit: int) -> None:
    """What is chosen is the largest window within the limit, as trying all of them finds, or none."""
    plainly = windows_plainly(drawn)
    within = [window for window in plainly if sum(weights[at] for at in window) <= limit]
    windows = drawn.windows()
    index, tokens = await fit(windows.last, limit, counting(windows, weights, []))
    if index is None:
        assert not within
        assert tokens == sum(weights[at] for at in plainly[-1])
    else:
        assert places(windows.window(index)) == within[0]


@given(drawn_histories, weights, limits)
async def test_few_counts(drawn: Drawn, weights: list[int], limit: int) -> None:
    """Where all fits it is counted once, else as often as their number is halved down to one, and none twice."""
    windows, counted = drawn.windows(), list[int]()
    index, _ = await fit(windows.last, limit, counting(windows, weights, counted))
    assert (len(counted) == 1) if index == windows.last else (len(counted) == len(set(counted)))
    assert len(counted) <= 1 + math.ceil(math.log2(windows.last + 1))


EXAMPLES: dict[str, tuple[list[Message], int, list[list[int]]]] = {
    "whole turns go": (history_of(USER, MODEL, USER, MODEL, USER), 4, [[4], [2, 3, 4], [0, 1, 2, 3, 4]]),
    "system messages stay": (history_of(SYSTEM, USER, SYSTEM, USER), 3, [[0, 2, 3], [0, 1, 2, 3]]),
    "nothing before": (history_of(USER, MODEL), 0, [[0, 1]]),
    "nothing at all": (history_of(), 0, [[]]),
    "only system messages": (history_of(SYSTEM, SYSTEM), 1, [[0, 1]]),
    "a pair that straddles": (
        history_of(USER, MODEL, USER, calls("a"), USER, MODEL, results("a"), USER),
        7,
        [[7], [2, 3, 4, 5, 6, 7], [0, 1, 2, 3, 4, 5, 6, 7]],
    ),
    "a pair that straddles others": (
        history_of(USER, calls("a"), USER, MODEL, USER, MODEL, results("a"), USER),
        7,
        [[7], [0, 1, 4, 5, 6, 7], [0, 1, 2, 3, 4, 5, 6, 7]],
    ),
    "the result of an earlier turn's call": (
        history_of(USER, MODEL, USER, calls("a"), USER, MODEL, USER, results("a")),
        6,
        [[2, 3, 6, 7], [2, 3, 4, 5, 6, 7], [0, 1, 2, 3, 4, 5, 6, 7]],
    ),
    "a turn that only adds the result of an earlier call": (
        history_of(USER, MODEL, USER, calls("a"), USER, MODEL, results("a"), MODEL),
        6,
        [[2, 3, 4, 5, 6, 7], [0, 1, 2, 3, 4, 5, 6, 7]],
    ),
    "a turn in which the user speaks twice": (history_of(USER, USER, MODEL, USER), 1, [[1, 2, 3], [0, 1, 2, 3]]),
}


def test_turn_that_is_gone_on_with() -> None:
    """Of a turn that goes on with an earlier one, turns before that leave first, and then those in between."""
    messages = history_of(USER, MODEL, USER, calls("a"), USER, MODEL, USER, MODEL, results("a"), MODEL)
    windows = Drawn(messages, 8, range(2, 4)).windows()
    assert [places(windows.window(index)) for index in range(windows.last + 1)] == [
        [2, 3, 8, 9],
        [2, 3, 6, 7, 8, 9],
        [2, 3, 4, 5, 6, 7, 8, 9],
        [*range(10)],
    ]


@pytest.mark.parametrize("name", EXAMPLES)
def test_example(name: str) -> None:
    """The rules by example: the windows of a small conversation, from the least on."""
    messages, begun, expected = EXAMPLES[name]
    windows = Drawn(messages, begun, range(0)).windows()
    assert [places(windows.window(index)) for index in range(windows.last + 1)] == expected


async def test_many_turns() -> None:
    """Of ten thousand turns a dozen windows are counted."""
    messages = numbered([says(USER) for _ in range(10_000)])
    windows, counted = Drawn(messages, len(messages) - 1, range(0)).windows(), list[int]()
    index, _ = await fit(windows.last, 123, counting(windows, [1] * len(messages), counted))
    assert index is not None
    assert (windows.turns[index], len(counted)) == (123, 15)


# --- max_prompt_tokens as an argument ----------------------------------------------------------------------------

AGENT = Agent("Support")
TAKES: dict[str, Callable[[Any], object]] = {
    "agent": lambda value: Agent("Support", max_prompt_tokens=value),
    "runner": lambda value: Runner(AGENT, max_prompt_tokens=value),
}


@pytest.mark.parametrize("takes", TAKES)
@pytest.mark.parametrize("value", [True, 2.5, "8000"], ids=repr)
def test_limit_of_another_type(takes: str, value: Any) -> None:
    """A limit that is no integer is refused, True included."""
    with pytest.raises(TypeError, match=f"^max_prompt_tokens must be an integer or None, not {value!r}$"):
        TAKES[takes](value)


@pytest.mark.parametrize("takes", TAKES)
def test_limit_below_one(takes: str) -> None:
    """A limit below 1 is refused."""
    with pytest.raises(ValueError, match=r"^max_prompt_tokens must be at least 1, not 0$"):
        TAKES[takes](0)


def test_limit_can_be_read() -> None:
    """An agent and a runner say what their limit is."""
    assert Agent("Support", max_prompt_tokens=5).max_prompt_tokens == 5
    assert (AGENT.max_prompt_tokens, Runner(AGENT, max_prompt_tokens=7).max_prompt_tokens) == (None, 7)


def test_unknown_answer_to_a_full_window() -> None:
    """What is neither raise nor shrink is refused."""
    with pytest.raises(ValueError, match=r"^on_context_window must be 'raise' or 'shrink', not 'retry'$"):
        Runner(AGENT, on_context_window="retry")  # type: ignore[arg-type]
