"""The server that stands for Anthropic refuses what Anthropic does."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import pytest

from tests.anthropic_rules import Block, Told, beginning, refusal

QUESTION: Final[dict[str, Any]] = {"role": "user", "content": [{"type": "text", "text": "Where is 1?"}]}
THOUGHT: Final[Block] = {"type": "thinking", "thinking": "Hm.", "signature": "s1"}
CALL: Final[Block] = {"type": "tool_use", "id": "t1", "name": "look_up", "input": {}}
RESULT: Final[Block] = {"type": "tool_result", "tool_use_id": "t1", "content": "sent"}
TOOL: Final = {"name": "look_up", "description": "", "input_schema": {"type": "object"}}
ENABLED: Final = {"type": "enabled", "budget_tokens": 1024}


def model(*blocks: Block) -> dict[str, Any]:
    """What the model said."""
    return {"role": "assistant", "content": list(blocks)}


def user(*blocks: Block) -> dict[str, Any]:
    """What the user said, or a tool."""
    return {"role": "user", "content": list(blocks)}


def text(said: str) -> Block:
    """A text."""
    return {"type": "text", "text": said}


def body(*messages: Mapping[str, Any], **fields: Any) -> dict[str, Any]:
    """A request; None leaves a field out."""
    known = {"model": "claude-sonnet-4-5", "max_tokens": 2048, "tools": [TOOL], "messages": list(messages), **fields}
    return {name: value for name, value in known.items() if value is not None}


CALLED: Final = (QUESTION, model(THOUGHT, CALL), user(RESULT))


@pytest.mark.parametrize(
    "request_body",
    [
        body(QUESTION),
        body({"role": "user", "content": "Hi"}, tools=None),
        body(*CALLED, thinking=ENABLED),
        body(QUESTION, QUESTION),
        body(QUESTION, model(text("Wait.")), model(CALL), user(RESULT), user(text("Well?"))),
        body(QUESTION, model(CALL), user(RESULT, text("Well?")), thinking={"type": "adaptive"}),
        body(QUESTION, model(CALL), user(RESULT), QUESTION, thinking=ENABLED),
    ],
)
def test_takes(request_body: dict[str, Any]) -> None:
    """What Anthropic takes is taken: neighbours of one role are joined."""
    assert refusal(request_body) is None


@pytest.mark.parametrize(
    ("request_body", "said"),
    [
        (body(QUESTION, max_tokens=None), "max_tokens: Field required"),
        (body(QUESTION, stop="x"), "Extra inputs are not permitted"),
        (body(), "at least one message"),
        (body({"role": "system", "content": "x"}), "Unexpected role"),
        (body({**QUESTION, "name": "x"}), "Extra inputs"),
        (body(user()), "non-empty content"),
        (body(user(text(" "))), "non-whitespace"),
        (body(user({**text("x"), "index": 0})), "Extra inputs"),
        (body(user({"type": "text"})), "Field required"),
        (body(user(CALL)), "does not match any of the expected tags"),
        (body(user(THOUGHT)), "does not match any of the expected tags"),
        (body(model(text("Hi")), QUESTION), "first message"),
        (body(QUESTION, model(text("Hi"))), "prefill"),
        (body(QUESTION, model(CALL), QUESTION), "without `tool_result` blocks immediately after: t1"),
        (body(QUESTION, model(CALL), user(text("So."), RESULT)), "without `tool_result` blocks immediately after"),
        (body(QUESTION, user(RESULT)), "unexpected `tool_use_id`"),
        (body(*CALLED, model(text("Sent.")), user(RESULT)), "unexpected `tool_use_id`"),
        (body(QUESTION, model(CALL), user(RESULT, RESULT)), "single result"),
        (body(QUESTION, model(CALL, CALL), user(RESULT)), "ids must be unique"),
        (body(*CALLED, model(CALL), user(RESULT)), "ids must be unique"),
        (body(QUESTION, model({**CALL, "id": "a.b"}), user({**RESULT, "tool_use_id": "a.b"})), "match pattern"),
        (body(QUESTION, model({**CALL, "name": "a b"}), user(RESULT)), "match pattern"),
        (body(QUESTION, model({**CALL, "input": []}), user(RESULT)), "valid dictionary"),
        (body(QUESTION, model(CALL), user({**RESULT, "content": [text("")]})), "non-whitespace"),
        (body(*CALLED, tools=None), "must define tools"),
        (body(QUESTION, tools=None, tool_choice={"type": "none"}), "tool_choice"),
        (body(QUESTION, tools=[TOOL, TOOL]), "names must be unique"),
        (body(QUESTION, tools=[{**TOOL, "name": ""}]), "match pattern"),
        (body(QUESTION, tools=[{**TOOL, "input_schema": {}}]), "input_schema"),
        (body(QUESTION, model(CALL), user(RESULT), thinking=ENABLED), "Expected `thinking`"),
        (body(QUESTION, model(text("Well."), CALL), user(RESULT), thinking=ENABLED), "found `text`"),
        (body(QUESTION, model(THOUGHT), QUESTION), "cannot be `thinking`"),
        (body(QUESTION, model({**THOUGHT, "thinking": None}, CALL), user(RESULT)), "valid string"),
        (body(QUESTION, thinking={**ENABLED, "budget_tokens": 2048}), "greater than"),
        (body(QUESTION, thinking=ENABLED, temperature=0), "temperature"),
        (body(QUESTION, thinking=ENABLED, tool_choice={"type": "any"}), "forces tool use"),
    ],
)
def test_refuses(request_body: dict[str, Any], said: str) -> None:
    """What Anthropic refuses is refused, with the meaning of its words."""
    assert said in str(refusal(request_body))


def told(request: Mapping[str, Any], place: int) -> dict[str, Told]:
    """The thought, told after so many blocks of a request."""
    return {"s1": Told(THOUGHT, beginning(request, place))}


def test_signatures() -> None:
    """A thought must come back as it was told, with the signature it got."""
    request = body(*CALLED)
    assert refusal(request, told(request, 1)) is None
    assert "Invalid `signature`" in str(refusal(request, {}))
    changed = body(QUESTION, model({**THOUGHT, "thinking": "Hm"}, CALL), user(RESULT))
    assert "cannot be modified" in str(refusal(changed, told(request, 1)))


@pytest.mark.parametrize("fields", [{"system": "Other."}, {"tools": [TOOL, {**TOOL, "name": "other"}]}])
def test_bound_thoughts(fields: dict[str, Any]) -> None:
    """Newer models take a thought after the same instructions, tools and messages alone, however they are parted."""
    request = body(QUESTION, user(text("And?")), model(THOUGHT, CALL), user(RESULT), model="claude-fable-5-2")
    known = told(request, 2)
    assert refusal(request, known) is None
    assert (
        refusal({**request, "messages": [user(*QUESTION["content"], text("And?")), *request["messages"][2:]]}, known)
        is None
    )
    assert "different conversation" in str(refusal({**request, **fields}, known))
    assert "different conversation" in str(refusal({**request, "messages": request["messages"][1:]}, known))
    assert refusal({**request, **fields, "model": "claude-opus-4-6"}, known) is None
