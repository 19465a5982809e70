"""The server that stands for Google refuses what Google does."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import pytest

from tests.gemini_rules import UNSIGNED, Part, as_json_names, refusal

OLD: Final = "gemini-2.5-flash"
NEW: Final = "gemini-3-pro-preview"

QUESTION: Final[dict[str, Any]] = {"role": "user", "parts": [{"text": "Where is 1?"}]}
CALL: Final[Part] = {"functionCall": {"name": "look_up", "args": {}}}
RESPONSE: Final[Part] = {"functionResponse": {"name": "look_up", "response": {"content": "sent"}}}
SIGNED: Final[Part] = {**CALL, "thoughtSignature": "s1"}
TOOLS: Final = [{"functionDeclarations": [{"name": "look_up"}]}]


def model(*parts: Part) -> dict[str, Any]:
    """What the model said."""
    return {"role": "model", "parts": list(parts)}


def user(*parts: Part) -> dict[str, Any]:
    """What the user said, or a function."""
    return {"role": "user", "parts": list(parts)}


def body(*contents: Mapping[str, Any], **fields: Any) -> dict[str, Any]:
    """A request."""
    return {"contents": list(contents), **fields}


@pytest.mark.parametrize(
    "request_body",
    [
        body(QUESTION, tools=TOOLS, systemInstruction={"parts": [{"text": "You help."}]}),
        body(QUESTION, QUESTION),
        body(QUESTION, model({"text": "Hm.", "thought": True}, CALL), user(RESPONSE)),
        body(QUESTION, model(CALL), user(RESPONSE), QUESTION),
        body(QUESTION, model(CALL), user(RESPONSE), model(CALL, CALL), user(RESPONSE, RESPONSE)),
        body(QUESTION, model({"text": "One"}), model({"text": "Two"}), QUESTION),
    ],
)
def test_takes(request_body: dict[str, Any]) -> None:
    """What Google takes is taken."""
    assert refusal(request_body, OLD) is None


@pytest.mark.parametrize(
    ("request_body", "said"),
    [
        (body(), "contents is not specified"),
        (body(QUESTION, messages=[]), "Unknown name"),
        (body({**QUESTION, "role": "tool"}), "valid role"),
        (body(user()), "must not be empty"),
        (body(user({"text": ""})), "one initialized field"),
        (body(user({"thought": True})), "one initialized field"),
        (body(user({"text": "x", **CALL})), "one initialized field"),
        (body(user({"text": "x", "kind": "y"})), "Unknown name"),
        (body(QUESTION, systemInstruction={"parts": [{"text": ""}]}), "system_instruction"),
        (body(QUESTION, model({"text": "Hi"})), "ends with a user role"),
        (body(model(CALL), user(RESPONSE)), "function call turn comes immediately after"),
        (body(QUESTION, model({"text": "Hi"}), model(CALL), user(RESPONSE)), "function call turn comes immediately"),
        (body(QUESTION, user(RESPONSE)), "function response turn comes immediately after"),
        (body(QUESTION, model(CALL), QUESTION), "number of function response parts"),
        (body(QUESTION, model(CALL)), "number of function response parts"),
        (body(QUESTION, model(CALL, CALL), user(RESPONSE)), "number of function response parts"),
        (body(QUESTION, model(CALL), user(RESPONSE, RESPONSE)), "number of function response parts"),
        (body(QUESTION, user(CALL), user(RESPONSE)), "of the model"),
        (body(QUESTION, model({"functionCall": {"name": "404"}}), user(RESPONSE)), "Must start with a letter"),
        (body(QUESTION, model({"functionCall": {"name": "other"}}), user(RESPONSE)), "names of the function call"),
        (body(QUESTION, model({"functionCall": {"name": "look_up", "id": "f1"}}), user(RESPONSE)), 'name "id"'),
        (body(QUESTION, model({"functionCall": {"name": "look_up", "args": []}}), user(RESPONSE)), "not repeating"),
        (body(QUESTION, model(CALL), user({"functionResponse": {"name": "look_up", "response": []}})), "not repeating"),
        (body(QUESTION, tools=[]), "tool_type"),
        (body(QUESTION, tools=TOOLS * 2), "Duplicate"),
        (body(QUESTION, tools=[{"functionDeclarations": [{"name": "-"}]}]), "Invalid function name"),
        (body(QUESTION, toolConfig={"functionCallingConfig": {"mode": "ANY"}}), "without function_declarations"),
    ],
)
def test_refuses(request_body: dict[str, Any], said: str) -> None:
    """What Google refuses is refused, with its words."""
    assert said in str(refusal(request_body, OLD))


def test_ids() -> None:
    """A response has its call's id."""
    call = {"functionCall": {"name": "look_up", "id": "f1"}, "thoughtSignature": "s1"}
    right = {"functionResponse": {"name": "look_up", "id": "f1", "response": {}}}
    assert refusal(body(QUESTION, model(call), user(right)), NEW) is None
    assert "ids of the function call" in str(refusal(body(QUESTION, model(call), user(RESPONSE)), NEW))


def test_missing_signature() -> None:
    """Newer models want the signature of the first call of each step since the user spoke last."""
    assert refusal(body(QUESTION, model(SIGNED, CALL), user(RESPONSE, RESPONSE)), NEW) is None
    assert refusal(body(QUESTION, model(CALL), user(RESPONSE), QUESTION), NEW) is None
    missing = "is missing a thought_signature"
    assert missing in str(refusal(body(QUESTION, model(CALL), user(RESPONSE)), NEW))
    assert missing in str(refusal(body(QUESTION, model(SIGNED), user(RESPONSE), model(CALL), user(RESPONSE)), NEW))
    assert refusal(body(QUESTION, model(CALL), user(RESPONSE)), OLD) is None


def test_signatures() -> None:
    """A signature must be one that was given, and stand where it stood; another model's call may have none."""
    request = body(QUESTION, model(SIGNED), user(RESPONSE))
    assert refusal(request, NEW, {"s1": CALL}) is None
    assert "Corrupted" in str(refusal(request, NEW, {}))
    assert "Corrupted" in str(refusal(request, NEW, {"s1": {"text": "Hi"}}))
    for word in UNSIGNED:
        unsigned = body(QUESTION, model({**CALL, "thoughtSignature": word}), user(RESPONSE))
        assert refusal(unsigned, NEW, {}) is None


def test_names_of_fields() -> None:
    """Fields may have the names that they have in protocol buffers; what is the user's stays as it is."""
    request = {"system_instruction": {"parts": []}, "contents": [{"function_call": {"args": {"order_id": 1}}}]}
    assert as_json_names(request) == {
        "systemInstruction": {"parts": []},
        "contents": [{"functionCall": {"args": {"order_id": 1}}}],
    }
