from __future__ import annotations

from typing import Any

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from chatflow.core.approvals import (
    AWAITS_APPROVAL_KEY,
    Decision,
    find_held,
    held_back,
    open_calls,
    tokens_of,
)
from chatflow.core.messages import Message, Role, ToolCall, ToolResult
from chatflow.core.prompt import AWAITING, INTERRUPTED, to_prompt
from chatflow.core.service_prompt import to_service_prompt

USER = Message(Role.USER, "hi")


def called(*ids: str, **extra: Any) -> Message:
    """A model's message with calls of these ids."""
    return Message(Role.MODEL, tool_calls=[ToolCall(id=each, name=f"t{n}") for n, each in enumerate(ids)], extra=extra)


def answered(*ids: str) -> Message:
    """Results for these ids."""
    return Message(Role.TOOL, tool_results=[ToolResult(tool_call_id=each, name="t0", content="done") for each in ids])


def ids_of(message: Message) -> list[str]:
    """The ids of a message's calls."""
    return [call.id for call in message.tool_calls]


# --- noting ---


def test_nothing_to_hold_back() -> None:
    """A message of which no call waits stays as it is."""
    message = called("a", signature="x")
    assert held_back(message, [], [USER]) is message


def test_note() -> None:
    """A message notes which of its calls wait, each under a token of its own, and keeps all else."""
    held = held_back(called("a", "b", "c", signature="x"), [0, 2], [USER])
    tokens = tokens_of(held)
    assert (list(tokens), len(set(tokens.values())), ids_of(held)) == ([0, 2], 2, ["a", "b", "c"])
    assert held.extra["signature"] == "x"


def test_engines_can_not_note() -> None:
    """What an engine says of waiting calls counts for nothing."""
    forged = called("a", **{AWAITS_APPROVAL_KEY: {"0": "0" * 32}})
    assert tokens_of(held_back(forged, [], [USER])) == {}


@pytest.mark.parametrize(
    "noted",
    [None, 5, [0], {"0": 5}, {"0": ""}, {"0": "\ud800" * 32}, {"1": "0" * 32}, {"-1": "0" * 32}, {"x": "0" * 32}],
)
def test_what_is_no_note(noted: Any) -> None:
    """A note that chatflow can't have written is none."""
    assert tokens_of(called("a", **{AWAITS_APPROVAL_KEY: noted})) == {}


@pytest.mark.parametrize("given_id", ["", " ", "null", "used", "twice", "\ud800", "a\0"])
def test_ids_that_name_no_call(given_id: str) -> None:
    """A call gets an id of its own where nobody could name it by its id, or another has it; the others keep theirs."""
    held = held_back(called(given_id, "twice", "b"), [0], [USER, called("used")])
    assert ids_of(held)[1:] == ["twice", "b"]
    assert ids_of(held)[0] not in {given_id, "used", "twice", "b"}
    assert ids_of(held)[0].isalnum()
    assert len(ids_of(held)[0]) == 9


def test_ids_of_a_service() -> None:
    """Where a service keeps the history, calls keep the ids it knows them by."""
    assert ids_of(held_back(called("a", "a"), [0, 1], None)) == ["a", "a"]


ids = st.sampled_from(["", "a", "b", "c"])


@given(st.lists(st.tuples(st.lists(ids, min_size=1, max_size=4), st.sets(st.integers(0, 3))), max_size=5), st.data())
def test_each_is_named_by_its_id(drawn: list[tuple[list[str], set[int]]], data: st.DataObject) -> None:
    """Whatever ids a provider gives, each call that waits is found by its id, and answered by a result for it alone."""
    history, waiting = [USER], dict[str, str]()
    for given_ids, indexes in drawn:
        message = held_back(called(*given_ids), [index for index in indexes if index < len(given_ids)], history)
        history.append(message)
        tokens = tokens_of(message)
        waiting |= {message.tool_calls[index].id: token for index, token in tokens.items()}
        others = [call.id for index, call in enumerate(message.tool_calls) if index not in tokens]
        if others:
            history.append(answered(*others))
    for call_id in data.draw(st.permutations(sorted(waiting))):
        assert {held.call.id: held.token for held in open_calls(history)} == waiting
        held = find_held(history, call_id)
        assert held is not None
        assert (held.is_open, held.token, held.call.id) == (True, waiting.pop(call_id), call_id)
        history.append(answered(call_id))
        again = find_held(history, call_id)
        assert again == attrs.evolve(held, is_open=False)
    assert open_calls(history) == []


# --- finding ---


def test_found_by_what_a_result_would_answer() -> None:
    """Where a later call has the id, the one that waits is found once that one is answered, as a result would."""
    history = [USER, held_back(called("a"), [0], []), called("a")]
    assert find_held(history, "a") is None
    held = find_held([*history, answered("a")], "a")
    assert held is not None
    assert (held.position, held.is_open) == (1, True)
    assert find_held(history, "b") is None


@pytest.mark.parametrize("later", [(), (answered("a"),)])
def test_found_after_its_id_was_given_again(later: tuple[Message, ...]) -> None:
    """A call that was decided is found by its id also after a call that nobody was asked about has had it."""
    decided = [USER, held_back(called("a"), [0], []), answered("a")]
    assert find_held([*decided, called("a"), *later], "a") == find_held(decided, "a")
    held = find_held(decided, "a")
    assert held is not None
    assert (held.position, held.is_open) == (1, False)


def test_result_without_a_call() -> None:
    """A result that belongs to no call, in a list of messages from elsewhere, answers nothing that waits."""
    held = held_back(called("a"), [0], [])
    assert [each.call for each in open_calls([USER, answered("b"), held, answered("b")])] == list(held.tool_calls)


# --- decisions ---


@pytest.mark.parametrize("reason", [None, "too much"])
@pytest.mark.parametrize("approved", [True, False])
def test_decision_as_data(approved: bool, reason: str | None) -> None:
    """A decision comes back from its data."""
    decision = Decision(call_id="a", approved=approved, reason=reason)
    assert Decision.from_data(decision.to_data()) == decision


@pytest.mark.parametrize("data", [None, {}, {"call_id": "a", "approved": 1, "reason": None}, {"call_id": "a"}])
def test_no_decision(data: object) -> None:
    """What is no decision is refused."""
    with pytest.raises(TypeError, match="a decision names a call"):
        Decision.from_data(data)


# --- what models are sent ---


def test_prompt_tells_waiting_from_interrupted() -> None:
    """In a prompt a call that waits is answered as waiting, and another one as interrupted, which is a repair."""
    prompt = to_prompt([USER, held_back(called("a", "b"), [1], []), USER])
    results = prompt.messages[2].tool_results
    assert [(result.content, result.is_error) for result in results] == [(INTERRUPTED, True), (AWAITING, False)]
    assert prompt.repairs == ("message 1: the call 'a' has no result; answered as interrupted",)


def test_service_is_told_that_a_call_waits() -> None:
    """A service that waits for the results of its calls gets those that are there, and that the others wait."""
    history = [USER, held_back(called("a", "b"), [1], None), answered("a"), Message(Role.USER, "well?")]
    prompt = to_service_prompt(history, 2)
    results, message = prompt.messages
    assert [(result.tool_call_id, result.content) for result in results.tool_results] == [
        ("a", "done"),
        ("b", AWAITING),
    ]
    assert (message.text, prompt.repairs) == ("well?", ())


def test_service_is_told_of_a_late_result() -> None:
    """A service that was told that a call waits gets its result as a user's words: it takes no other for that call."""
    history = [USER, held_back(called("a"), [0], None), Message(Role.USER, "well?"), Message(Role.MODEL, "It waits.")]
    (late,) = to_service_prompt([*history, answered("a")], 4).messages
    assert (late.role, late.text) == (
        Role.USER,
        "(The result of an earlier call of the tool t0 has arrived only now: done)",
    )
