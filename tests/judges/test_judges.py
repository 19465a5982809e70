"""What a model is sent, judged by others: Mistral's own validator, litellm's conversions, the providers' rules."""

from __future__ import annotations

import json
import os
import random
import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chatflow.core.messages import ImagePart, Message, Part, Role, TextPart, ToolCall, ToolResult
from chatflow.core.prompt import EMPTY_TEXT, INTERRUPTED, to_prompt
from chatflow.core.pruning import prune
from chatflow.core.service_prompt import to_service_prompt
from chatflow.engines.responses_form import to_input
from tests.judges.conversions import Body, body_for
from tests.judges.hostile import MODELS, history
from tests.judges.rules import JUDGES, Told
from tests.responses_server import ResponsesServer
from tests.test_cases import CASES, messages
from tests.test_prompt import INVALID, pairs

HISTORIES: Final = 100_000

PARTS: Final = 40
"""The tests that share them, so that they run at the same time."""

SERVICE: Final = "openai/gpt-5"
INSTRUCTIONS: Final = "<instructions>"
MARK: Final = re.compile(r"<instructions>|<[a-z]\d+(?:\.\d+)?>")


def refused(model: str, stored: Sequence[Message]) -> list[str]:
    """What its provider would refuse in what the model is sent of a history."""
    body = asked(model, stored)
    return [] if body is None else JUDGES[model.partition("/")[0]].faults(body)


def judged(model: str, stored: Sequence[Message]) -> list[str]:
    """What is wrong with what the model is sent of a history: what its provider refuses, and what is lost."""
    body = asked(model, stored)
    judge = JUDGES[model.partition("/")[0]]
    return [] if body is None else [*judge.faults(body), *lost(judge.read(body), stored)]


def asked(model: str, stored: Sequence[Message]) -> Body | None:
    """The request to the model's provider; None without a user's message, since then there is no question."""
    prompt = to_prompt(stored, INSTRUCTIONS).messages
    return None if all(message.role is Role.SYSTEM for message in prompt) else body_for(model, prompt)


def lost(told: Told, stored: Sequence[Message]) -> list[str]:
    """What of a history a request does not tell, or tells otherwise."""
    found: list[str] = []
    begun = next(position for position, message in enumerate(stored) if message.role is Role.USER)
    if [marks_of(text) for text in told.systems] != [
        ["<instructions>"],
        *(marks_of(message.text) for message in stored if message.role is Role.SYSTEM and message.text.strip()),
    ]:
        found.append("system messages")
    for role in (Role.USER, Role.MODEL):
        kept = [message.text for message in stored[begun:] if message.role is role]
        said = [block.text for turn in told.turns if turn.role == role.value for block in turn.of("text")]
        if marks_of("".join(said)) != marks_of("".join(kept)):
            found.append(f"words of the {role}")
    users = [message for message in stored if message.role is Role.USER]
    said = [block.text for turn in told.turns if turn.role == "user" for block in turn.of("text")]
    if said.count(EMPTY_TEXT) != sum(all(map(is_blank, parts(message))) for message in users):
        found.append("users' empty messages")
    pictures = [part for message in users for part in parts(message) if isinstance(part, ImagePart)]
    if sum(len(turn.of("image")) for turn in told.turns) != len(pictures):
        found.append("pictures")
    return [*found, *lost_pairs(told, stored)]


def lost_pairs(told: Told, stored: Sequence[Message]) -> Iterator[str]:
    """The calls of a history that a request does not tell with their arguments and their last result."""
    sent = answered(told)
    for pair in pairs(stored):
        (mark,) = set(marks_in(pair.call.args))
        given = pair.results[-1][1] if pair.results else None
        found = next((each for each in sent if each[0] == mark and tells(each[1], given)), None)
        if found is None:
            yield f"the call {mark} and its result"
        else:
            sent.remove(found)
    yield from (f"the call {mark} once more" for mark, _ in sent)


def answered(told: Told) -> list[tuple[str, str]]:
    """The mark of each call that is told, and the result under its id."""
    blocks = [block for turn in told.turns for block in turn.blocks]
    results = {block.id: block.text for block in blocks if block.kind == "result"}
    calls = [block for block in blocks if block.kind == "call"]
    return [(json.loads(call.text)["mark"], results[call.id]) for call in calls if call.id in results]


def tells(text: str, result: ToolResult | None) -> bool:
    """Whether *text* says what the result said, or for want of one, that there was none."""
    if result is None:
        return INTERRUPTED in text
    if result.is_error and not text.startswith("Error"):
        return False
    if not isinstance(result.content, str):
        return set(marks_of(text)) == set(marks_in(result.content))
    said = result.content.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text.removeprefix("Error: ") in {said, said.removeprefix("Error: "), json.dumps(said)}


def marks_of(text: str) -> list[str]:
    """The marks in a text, in order."""
    return MARK.findall(text)


def marks_in(value: Any) -> list[str]:
    """The marks in all texts of a value."""
    if isinstance(value, Mapping):
        value = [*value, *value.values()]
    if isinstance(value, list | tuple | frozenset):
        return [mark for item in value for mark in marks_in(item)]
    return marks_of(value) if isinstance(value, str) else []


def parts(message: Message) -> tuple[Part, ...]:
    """What a message says, as parts."""
    return message.content if isinstance(message.content, tuple) else (TextPart(message.content or ""),)


def is_blank(part: Part) -> bool:
    """Whether nobody would see anything of it."""
    return isinstance(part, TextPart) and not part.text.strip()


def told_to_a_service(chance: random.Random) -> list[str]:
    """What is wrong with what a service is sent that has seen a history up to something it said itself."""
    stored = [message for message in history(chance) if message.role is not Role.SYSTEM]
    seen = chance.choice([0, *(n for n, message in enumerate(stored, 1) if message.role is Role.MODEL)])
    asked = [call.id for call in stored[seen - 1].tool_calls] if seen else []
    if not all(0 < len(id_) <= 64 and id_.isascii() for id_ in asked) or len(set(asked)) < len(asked):
        return []  # no service gives such ids
    items = to_input(to_service_prompt(stored, seen, INSTRUCTIONS).messages, SERVICE)
    server = ResponsesServer("")
    server.kept["resp_1"] = tuple({"type": "function_call", "call_id": id_} for id_ in asked)
    if not items:
        return []
    refused = server.refusal({"model": SERVICE, "input": items, "previous_response_id": "resp_1"})
    found = [] if refused is None else [refused.body["error"]["message"]]
    answered = [item["call_id"] for item in items[: len(asked)] if item.get("type") == "function_call_output"]
    if answered != asked:
        found.append(f"the service's calls {asked} are answered by {answered}")
    said = [mark for item in items if item.get("role") == "user" for mark in MARK.findall(json.dumps(item))]
    users = [mark for message in stored[seen:] if message.role is Role.USER for mark in marks_of(message.text)]
    if [mark for mark in said if mark.startswith("<u")] != users:
        found.append("words of the user")
    return found


# --- the proof --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))
def test_reported_histories(case: dict[str, Any], model: str) -> None:
    """Of each history that broke another library, whole, pruned and cut off anywhere, nothing is refused."""
    stored = messages(case)
    for length in range(1, len(stored) + 1):
        assert refused(model, stored[:length]) == []
    if "raises" not in case["expect"]:
        assert refused(model, prune(stored, case["max_turns"])) == []


@pytest.mark.parametrize("model", MODELS)
@given(chance=st.randoms(use_true_random=False))
def test_drawn_histories(model: str, chance: random.Random) -> None:
    """Whatever history there is, its provider takes what is sent of it, and is told all of it."""
    assert judged(model, history(chance)) == []


@given(st.randoms(use_true_random=False))
def test_drawn_histories_at_a_service(chance: random.Random) -> None:
    """Whatever has come since a service has last spoken, it takes it, with its own calls answered first."""
    assert told_to_a_service(chance) == []


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_a_hundred_thousand_histories(part: int) -> None:
    """Of 100,000 histories none is refused and none loses anything, whoever goes on with it.

    JUDGES_SEED in the environment, as a failure prints it, draws the same ones again.
    """
    seed = os.environ.get("JUDGES_SEED") or str(secrets.randbits(32))
    print(f"JUDGES_SEED={seed}")  # noqa: T201  # shown where it fails
    for number in range(part, HISTORIES, PARTS):
        stored = history(random.Random(f"{seed}.{number}"))
        faults = {model: found for model in MODELS if (found := judged(model, stored))}
        assert not faults, f"history {number}"
        assert told_to_a_service(random.Random(f"{seed}.{number}")) == [], f"history {number}"


# --- the judges -------------------------------------------------------------------------------------------------------


BROKEN: Final = (
    "model first",
    "result without call",
    "unanswered call",
    "call answered after the user",
    "answered twice",
)

MENDED: Final = {("bedrock", "result without call"), ("bedrock", "answered twice")}
"""What litellm leaves out by itself."""


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("name", BROKEN)
def test_the_judges_refuse(name: str, model: str) -> None:
    """A list of messages that no provider takes is refused by each one's judge, or by litellm itself."""
    provider = model.partition("/")[0]
    try:
        body = body_for(model, INVALID[name])
    except Exception:  # noqa: BLE001  # litellm's errors have no kind of their own here
        return
    assert (JUDGES[provider].faults(body) == []) == ((provider, name) in MENDED)


GOOD: Final = [
    Message(Role.USER, "<u0>"),
    Message(Role.MODEL, tool_calls=[ToolCall(id="abcDEF123", name="look_up", args={"mark": "<c1.0>"})]),
    Message(Role.TOOL, tool_results=[ToolResult(tool_call_id="abcDEF123", name="look_up", content="<r2.0>")]),
    Message(Role.MODEL, "<m3>"),
    Message(Role.USER, [TextPart("<u4>"), ImagePart(data=b"\x89PNG")]),
]


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("gone", [1, 2, 3, 4])
def test_the_judges_miss_what_is_lost(gone: int, model: str) -> None:
    """A request that tells less than the history holds is found out: a pair, a result, words, a picture."""
    prompt = to_prompt(GOOD, INSTRUCTIONS).messages
    judge = JUDGES[model.partition("/")[0]]
    assert lost(judge.read(body_for(model, prompt)), GOOD) == []
    less = [message for place, message in enumerate(GOOD) if place != gone and (gone != 1 or place != 2)]
    assert lost(judge.read(body_for(model, to_prompt(less, INSTRUCTIONS).messages)), GOOD) != []


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(("was", "becomes"), [("look_up", "süß"), ("<u0>", ""), ("<m3>", "")])
def test_the_judges_read_words(was: str, becomes: str, model: str) -> None:
    """A name or a text that a provider would refuse is found in its body."""
    body = json.loads(json.dumps(body_for(model, to_prompt(GOOD).messages)).replace(was, becomes))
    assert JUDGES[model.partition("/")[0]].faults(body) != []


@pytest.mark.parametrize(
    ("model", "id_"), [(MODELS[0], "x" * 41), (MODELS[1], "a b"), (MODELS[4], "call_1"), (MODELS[6], "x" * 65)]
)
def test_the_judges_read_ids(model: str, id_: str) -> None:
    """An id that a provider would refuse is found in its body."""
    body = json.loads(json.dumps(body_for(model, to_prompt(GOOD).messages)).replace("abcDEF123", id_))
    assert JUDGES[model.partition("/")[0]].faults(body) != []
