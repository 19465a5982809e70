from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

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
from tests.test_pruning import history_of, legal_cuts, numbered, places

USER, MODEL, SYSTEM = Role.USER, Role.MODEL, Role.SYSTEM

histories_at = any_history.map(numbered).flatmap(
    lambda messages: st.tuples(st.just(messages), st.integers(0, len(messages)))
)
"""A history, and where in it the running turn begins, which need not be at a user message."""

weights = st.lists(st.integers(0, 5), min_size=32, max_size=32)
limits = st.integers(0, 90)


def is_body(message: Message) -> bool:
    """Whether a window may leave it out."""
    return message.role is not SYSTEM


def windows_plainly(messages: Sequence[Message], begun: int) -> list[list[int]]:
    """All windows that may be sent, by the places of their messages, from the largest on: by trying all cuts."""
    whole = prune(messages, len(messages) + 1)
    own = [at for at in places([*filter(is_body, whole)]) if at >= begun]
    cuts = [cut for cut in legal_cuts(messages) if cut <= min(own, default=len(messages))]
    windows = [
        [message.extra["at"] for message in whole if not is_body(message) or message.extra["at"] >= cut] for cut in cuts
    ]
    return [places(messages), *windows[1:]]


def counting(windows: Windows, weights: Sequence[int], counted: list[int]) -> Callable[[int], Any]:
    """Counts a window by its messages' weights, and notes which one."""

    async def count(index: int) -> int:
        counted.append(index)
        return sum(weights[message.extra["at"]] for message in windows.window(index))

    return count


@given(histories_at)
def test_windows_are_all_that_pruning_allows(drawn: tuple[list[Message], int]) -> None:
    """The windows are those of all legal cuts that leave the running turn whole."""
    messages, begun = drawn
    windows = Windows(messages[:begun], messages[begun:])
    found = [places(windows.window(index)) for index in reversed(range(windows.last + 1))]
    assert found == windows_plainly(messages, begun)


@given(histories_at)
def test_system_messages_and_the_running_turn_are_in_all(drawn: tuple[list[Message], int]) -> None:
    """System messages, and what pruning would ever keep of the running turn, are in every window."""
    messages, begun = drawn
    windows = Windows(messages[:begun], messages[begun:])
    kept = {at for at in places(prune(messages, len(messages) + 1)) if at >= begun or messages[at].role is SYSTEM}
    for index in range(windows.last + 1):
        assert kept <= set(places(windows.window(index)))


@given(histories_at)
def test_what_is_left_out(drawn: tuple[list[Message], int]) -> None:
    """What a window leaves out are messages of before the turn that are not in it."""
    messages, begun = drawn
    windows = Windows(messages[:begun], messages[begun:])
    for index in range(windows.last + 1):
        sent = {id(message) for message in windows.window(index)}
        assert windows.left_out(index) == tuple(
            message for message in messages[:begun] if is_body(message) and id(message) not in sent
        )


@given(histories_at)
def test_half(drawn: tuple[list[Message], int]) -> None:
    """Half of a window is the largest smaller one with at most half of its turns, or the least."""
    messages, begun = drawn
    windows = Windows(messages[:begun], messages[begun:])
    assert windows.half(0) == 0
    for index in range(1, windows.last + 1):
        small = [each for each in range(index) if windows.turns[each] * 2 <= windows.turns[index]]
        assert windows.half(index) == max(small, default=0) < index


@given(histories_at, weights, limits)
async def test_the_largest_that_fits(drawn: tuple[list[Message], int], weights: list[int], limit: int) -> None:
    """What is chosen is the largest window within the limit, as trying all of them finds, or none."""
    messages, begun = drawn
    plainly = windows_plainly(messages, begun)
    within = [window for window in plainly if sum(weights[at] for at in window) <= limit]
    windows = Windows(messages[:begun], messages[begun:])
    index, tokens = await fit(windows, limit, counting(windows, weights, []))
    if index is None:
        assert not within
        assert tokens == sum(weights[at] for at in plainly[-1])
    else:
        assert places(windows.window(index)) == within[0]


@given(histories_at, weights, limits)
async def test_few_counts(drawn: tuple[list[Message], int], weights: list[int], limit: int) -> None:
    """Where all fits it is counted once, else as often as their number is halved down to one, and none twice."""
    messages, begun = drawn
    windows, counted = Windows(messages[:begun], messages[begun:]), list[int]()
    index, _ = await fit(windows, limit, counting(windows, weights, counted))
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
    "a turn that only adds the result of an earlier call": (
        history_of(USER, MODEL, USER, calls("a"), USER, MODEL, results("a"), MODEL),
        6,
        [[2, 3, 4, 5, 6, 7], [0, 1, 2, 3, 4, 5, 6, 7]],
    ),
    "a turn in which the user speaks twice": (history_of(USER, USER, MODEL, USER), 1, [[1, 2, 3], [0, 1, 2, 3]]),
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_example(name: str) -> None:
    """The rules by example: the windows of a small conversation, from the least on."""
    messages, begun, expected = EXAMPLES[name]
    windows = Windows(messages[:begun], messages[begun:])
    assert [places(windows.window(index)) for index in range(windows.last + 1)] == expected


async def test_many_turns() -> None:
    """Of ten thousand turns a dozen windows are counted."""
    messages = numbered([says(USER) for _ in range(10_000)])
    windows, counted = Windows(messages[:-1], messages[-1:]), list[int]()
    index, _ = await fit(windows, 123, counting(windows, [1] * len(messages), counted))
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
