from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chatflow.core.agent import Agent
from chatflow.core.compaction import SUMMARY, SUMMARY_KEY, is_summary, leaving
from chatflow.core.messages import ImagePart, Message, Role, TextPart, ToolCall, ToolResult
from chatflow.core.pruning import Window, prune
from chatflow.runner import Runner
from chatflow.running.compacting import Compactor
from chatflow.running.transcript import LONGEST, transcript
from tests.strategies import any_history, calls, results, turn_limits
from tests.test_pruning import history_of, legal_cuts, numbered, pairs_of, places, users

USER, MODEL, SYSTEM = Role.USER, Role.MODEL, Role.SYSTEM


def window_of(messages: Sequence[Message]) -> Window:
    """The window that holds *messages*."""
    window = Window()
    for message in messages:
        window.add(message)
    return window


# --- which turns leave -------------------------------------------------------------------------------------------

histories_at = any_history.map(lambda drawn: numbered([*prune(drawn, len(drawn) + 1)])).flatmap(
    lambda messages: st.tuples(
        st.just(messages), st.integers(0, len(messages)), st.none() | st.integers(0, len(messages))
    )
)
"""A history as one is stored, where the running turn begins in it, and up to where it was not sent, if it was not."""

keeps = st.none() | st.integers(1, 6)


def left_plainly(
    messages: Sequence[Message], begun: int, unsent: int | None, max_turns: int, keep_turns: int | None
) -> list[int]:
    """The places of the messages that are to leave, by the rules one after the other."""
    turns = users(messages)
    body = [at for at, message in enumerate(messages) if message.role is not SYSTEM]
    after = [at for at in turns if unsent is None or at >= unsent]
    stays = max(1, min(len(after), max_turns))
    if len(turns) <= stays:
        return []
    own = len([at for at in turns if at >= begun])
    keep = min(max(stays // 2 if keep_turns is None else keep_turns, own, 1), stays)
    cuts = legal_cuts(messages)
    answered = {(pair.call, pair.call_index) for pair in pairs_of(messages)}
    waiting = [
        at
        for at, message in enumerate(messages)
        for index in range(len(message.tool_calls))
        if (at, index) not in answered
    ]
    by_lot = max(cut for cut in cuts if cut <= min([turns[-keep], *waiting]))
    by_max_turns = max(cut for cut in cuts if cut <= turns[-min(max_turns, len(turns))])
    return [at for at in body if at < max(by_lot, by_max_turns)]


@given(histories_at, turn_limits, keeps)
def test_what_leaves(drawn: tuple[list[Message], int, int | None], max_turns: int, keep_turns: int | None) -> None:
    """What leaves is what the rules say, one after the other."""
    messages, begun, unsent = drawn
    left_out = [] if unsent is None else [message for message in messages[:unsent] if message.role is not SYSTEM]
    found = leaving(window_of(messages), max_turns, earlier=messages[:begun], left_out=left_out, keep_turns=keep_turns)
    unsent = max(places(left_out)) + 1 if left_out else None
    assert ([] if found is None else places(found.messages)) == left_plainly(
        messages, begun, unsent, max_turns, keep_turns
    )


@given(histories_at, turn_limits, keeps)
def test_what_stays_is_a_history(
    drawn: tuple[list[Message], int, int | None], max_turns: int, keep_turns: int | None
) -> None:
    """What stays begins with a user message and holds every call of its results; no commit would drop more of it."""
    messages, begun, _ = drawn
    found = leaving(window_of(messages), max_turns, earlier=messages[:begun], keep_turns=keep_turns)
    gone = 0 if found is None else found.start
    stays = [message for message in messages if message.role is not SYSTEM][gone:]
    assert tuple(stays) == prune(stays, max_turns)


@given(histories_at, turn_limits, keeps)
def test_parts_of_what_leaves(
    drawn: tuple[list[Message], int, int | None], max_turns: int, keep_turns: int | None
) -> None:
    """What leaves may be parted wherever pruning may cut it; what has to leave is what the commit would drop."""
    messages, begun, _ = drawn
    found = leaving(window_of(messages), max_turns, earlier=messages[:begun], keep_turns=keep_turns)
    if found is None:
        return
    body = [message for message in messages if message.role is not SYSTEM]
    parts = [found.between(begin, end) for begin, end in itertools.pairwise([found.begin, *found.cuts])]
    assert [message for part in parts for message in part] == list(found.messages) == body[: found.start]
    assert [*found.cuts] == [cut for cut in legal_cuts(body) if 0 < cut <= found.start] or found.start == len(body)
    assert body[found.forced :] == list(prune(body, max_turns))


EXAMPLES: dict[str, tuple[list[Message], int, int, dict[str, Any], list[int]]] = {
    "as many as may stay": (history_of(USER, USER, USER), 2, 3, {}, []),
    "half leaves": (history_of(USER, USER, USER, USER, USER), 4, 4, {}, [0, 1, 2]),
    "all but those asked for": (history_of(USER, USER, USER, USER, USER), 4, 4, {"keep_turns": 3}, [0, 1]),
    "no more than may stay": (history_of(USER, USER, USER, USER, USER), 4, 4, {"keep_turns": 9}, [0]),
    "the running turn stays": (history_of(USER, USER, MODEL, USER, USER), 1, 3, {"keep_turns": 1}, [0]),
    "of a running turn that is longer than the window": (history_of(USER, USER, USER), 1, 1, {}, [0, 1]),
    "system messages stay": (history_of(SYSTEM, USER, SYSTEM, USER), 3, 1, {}, [1]),
    "turns that a pair joins": (
        history_of(USER, USER, calls("a"), USER, results("a"), USER),
        5,
        3,
        {"keep_turns": 2},
        [0],
    ),
    "all joined": (history_of(USER, calls("a"), USER, USER, results("a")), 3, 2, {}, []),
    "a call that waits": (history_of(USER, USER, calls("a"), USER, USER, USER), 5, 4, {}, [0]),
    "a call that waited too long": (history_of(USER, calls("a"), USER, USER, USER), 4, 3, {}, [0, 1]),
    "a call that waits in the first turn": (history_of(USER, calls("a"), USER), 2, 5, {"unsent": 2}, []),
    "what was not sent": (history_of(USER, MODEL, USER, USER, USER), 4, 9, {"unsent": 2}, [0, 1, 2, 3]),
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_example(name: str) -> None:
    """The rules by example: what leaves a small conversation."""
    messages, begun, max_turns, arguments, expected = EXAMPLES[name]
    found = leaving(
        window_of(messages),
        max_turns,
        earlier=messages[:begun],
        left_out=messages[: arguments.get("unsent", 0)],
        keep_turns=arguments.get("keep_turns"),
    )
    assert ([] if found is None else places(found.messages)) == expected


def test_positions_go_on() -> None:
    """What leaves is told by its position, also where others have left before."""
    window = window_of(history_of(USER, MODEL, USER, MODEL, USER, MODEL))
    window.trim(2)
    found = leaving(window, 1, earlier=())
    assert found is not None
    assert (found.begin, found.start, places(found.messages)) == (window.start, 4, [2, 3]) == (2, 4, [2, 3])
    assert (found.cuts, found.forced) == ((4,), 4)


def test_summaries_are_marked() -> None:
    """A summary is a system message with its mark, and nothing else is."""
    marked = {SUMMARY_KEY: SUMMARY}
    assert is_summary(Message(SYSTEM, "so far", extra={"chatflow": "summary"}))
    assert not any(map(is_summary, [Message(SYSTEM, "x"), Message(USER, "x", extra=marked)]))


# --- a conversation as text --------------------------------------------------------------------------------------


def test_transcript() -> None:
    """A transcript says who said what, which tools were called with what, and what they gave."""
    said = [
        Message(SYSTEM, "They met.", extra={"chatflow": "summary"}),
        Message(SYSTEM, "Be kind."),
        Message(USER, [TextPart("Where is it?"), ImagePart(url="https://example.com/a.png")]),
        Message(
            MODEL, "I look.", agent_name="Support", tool_calls=[ToolCall(id="1", name="look", args={"order": 404})]
        ),
        Message(
            Role.TOOL,
            tool_results=[
                ToolResult(tool_call_id="1", name="look", content={"status": "late"}),
                ToolResult(tool_call_id="2", name="find", content="nothing there", is_error=True),
            ],
        ),
        Message(MODEL, "It is late."),
    ]
    assert transcript(said).split("\n\n") == [
        "Summary of what came before: They met.",
        "System: Be kind.",
        "User: Where is it?\n[image]",
        "Support: I look.",
        'Support calls look: {"order": 404}',
        'Result of look: {"status": "late"}',
        "Result of find: Error: nothing there",
        "Assistant: It is late.",
    ]


def test_transcript_cuts_what_is_long() -> None:
    """What is long is cut in its middle, and it says how much is missing."""
    long = Message(USER, "a" * LONGEST + "b" * LONGEST)
    half = LONGEST // 2
    assert transcript([long]) == f"User: {'a' * half} [... {LONGEST} characters left out ...] {'b' * half}"
    assert transcript([Message(USER, "a" * LONGEST)]) == f"User: {'a' * LONGEST}"


# --- a compactor's arguments -------------------------------------------------------------------------------------


async def first_words(messages: Sequence[Message]) -> str:
    """The first words of each."""
    return " ".join(message.text.partition(" ")[0] for message in messages)


@pytest.mark.parametrize(
    "given", [Agent("Short"), first_words, Compactor(first_words)], ids=["agent", "function", "it"]
)
def test_what_a_runner_takes(given: Any) -> None:
    """A runner takes a compactor, or what one is made of."""
    made = Runner(Agent("Support"), compactor=given).compactor
    assert made is given or (made is not None and made.summariser is given)
    assert Runner(Agent("Support")).compactor is None


@pytest.mark.parametrize("make", [Compactor, lambda given: Runner(Agent("Support"), compactor=given)])
def test_summariser_of_wrong_type(make: Any) -> None:
    """What can't summarise is refused."""
    with pytest.raises(TypeError, match="a compactor needs an agent, or an async function of messages, not str"):
        make("Short")


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"keep_turns": 0}, "keep_turns must be at least 1, not 0"),
        ({"keep_turns": 2.5}, r"keep_turns must be an integer, not 2\.5"),
        ({"timeout": 0}, "timeout must be above 0, not 0"),
        ({"timeout": "30"}, "timeout must be a number of seconds or None, not '30'"),
    ],
    ids=str,
)
def test_numbers(arguments: Any, error: str) -> None:
    """Numbers that make no sense are refused."""
    with pytest.raises((TypeError, ValueError), match=f"^{error}$"):
        Compactor(**arguments)


def test_repr() -> None:
    """A compactor shows what it was made of."""
    assert repr(Compactor(Agent("Short"), keep_turns=3)) == "Compactor(<Agent 'Short'>, keep_turns=3, timeout=30)"
