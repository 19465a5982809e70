from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chatflow import Agent, AgentSession, EngineReply, Message, Role, Runner, ScriptedEngine, ToolCall, tool
from chatflow.core.messages import MODEL_KEY
from chatflow.core.usage import added, checked_spent, spent_on, usage_of
from chatflow.core.values import EMPTY, MAX_DEPTH, freeze
from tests import strategies as drawn
from tests.strategies import exactly

counts = st.recursive(
    st.dictionaries(st.sampled_from("abc"), st.integers(0, 2**70)),
    lambda inner: st.dictionaries(st.sampled_from("xyz"), inner),
)


def costing(agent: str | None = "Support", model: str | None = "gpt-4o", **usage: Any) -> Message:
    """A model's message and what it has cost."""
    return Message(Role.MODEL, "hi", agent_name=agent, usage=usage, extra={} if model is None else {MODEL_KEY: model})


@given(counts, counts)
def test_sum_does_not_hang_on_the_order(one: dict[str, Any], other: dict[str, Any]) -> None:
    """Counts add up in any order, also those in mappings inside."""
    assert added(added(EMPTY, one), other) == added(added(EMPTY, other), one)


@pytest.mark.parametrize("other", [True, "5", None, [5]], ids=repr)
def test_leaves_out_what_is_no_number(other: object) -> None:
    """What a provider says beside numbers is not counted, and a number after it is."""
    assert added({"a": 1}, {"a": other, "b": 2}) == {"a": 1, "b": 2}
    assert added({"a": other}, {"a": 3}) == {"a": 3}


def test_more_than_a_float_holds() -> None:
    """Counts that no float can hold add up to infinity with a float, and fail nothing."""
    assert added({"a": 10**400}, {"a": 0.5}) == {"a": math.inf}


def test_nested_deeper_than_any_provider_counts() -> None:
    """What nests deeper than is summed is left out, so that a sum never nests deeper than can be kept."""
    deep: dict[str, Any] = {"n": 1}
    for _ in range(MAX_DEPTH - 2):
        deep = {"in": deep}
    spent = spent_on([costing(n=2, deep=deep)])
    assert spent["total"]["n"] == 2
    assert freeze(spent, "") == spent


def test_by_agent_model_and_turn() -> None:
    """Each message counts for its agent, its model and its turn; what names none of them counts in the total."""
    history = [
        Message(Role.SYSTEM, "Before.", usage={"t": 1}),
        Message(Role.USER, "a"),
        costing(t=2),
        costing("Billing", t=4),
        Message(Role.USER, "b"),
        Message(Role.USER, "c"),
        costing(None, None, t=8),
    ]
    usage = usage_of(EMPTY, history)
    assert usage.total == {"t": 15}
    assert usage.by_agent == {"Support": {"t": 2}, "Billing": {"t": 4}}
    assert usage.by_model == {"gpt-4o": {"t": 6}}
    assert usage.by_turn == ({"t": 6}, {}, {"t": 8})


def test_model_that_is_no_name() -> None:
    """A message from elsewhere whose model is no text counts for none."""
    assert usage_of(EMPTY, [Message(Role.MODEL, "hi", usage={"t": 1}, extra={MODEL_KEY: 5})]).by_model == {}


@given(drawn.whole_histories, st.integers(0, 10))
def test_what_has_left_counts_on(history: list[Message], cut: int) -> None:
    """The whole is the same wherever the window begins, and what is kept of it is what is read back."""
    spent = spent_on(history[:cut])
    assert checked_spent(freeze(spent, "")) == spent
    now, whole = usage_of(spent, history[cut:]), usage_of(EMPTY, history)
    assert exactly(now.total) == exactly(whole.total)
    assert exactly(now.by_agent) == exactly(whole.by_agent)
    assert exactly(now.by_model) == exactly(whole.by_model)


def test_nothing_spent_is_the_same_object() -> None:
    """Messages without counts change nothing, so that nothing is written."""
    spent = spent_on([costing(t=1)])
    assert spent_on([Message(Role.USER, "hi")], spent) is spent


async def test_of_a_run() -> None:
    """A turn's response and its session tell the same sum: of calls, of the answer, by whoever was asked."""

    @tool
    def look() -> str:
        return "found"

    first = EngineReply(tool_calls=[ToolCall(id="", name="look")], usage={"prompt_tokens": 10, "cached": {"read": 4}})
    engine = ScriptedEngine([first, EngineReply(text="Here.", usage={"prompt_tokens": 20})])
    runner = Runner(Agent("Support", tools=[look]), engine=engine)
    response = await runner.run_async("s", "hi")
    session = await runner.get_session("s")
    assert session is not None
    assert response.usage == session.usage.total == {"prompt_tokens": 30, "cached": {"read": 4}}
    assert session.usage.by_agent == {"Support": response.usage}
    assert session.usage.by_turn == (response.usage,)


def test_of_a_new_session() -> None:
    """A session in which nothing was said has cost nothing."""
    usage = AgentSession().usage
    assert (usage.total, usage.by_agent, usage.by_model, usage.by_turn) == ({}, {}, {}, ())
