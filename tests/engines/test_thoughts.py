"""Thoughts and their signatures over real HTTP: they go back as they came, with their call, and leave with it."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import pytest

from chatflow import Agent, Runner, SQLiteSessionStore, tool
from tests.anthropic_rules import blocks_of
from tests.anthropic_server import AnthropicServer, redacted, text, thinking, tool_use
from tests.engines.protocols import BINDING, CLAUDE, GEMINI, RESPONSES, Protocol, asked
from tests.gemini_rules import UNSIGNED, as_json_names
from tests.gemini_server import GeminiServer, function_call, thought
from tests.responses_server import ResponsesServer, call, made_call, reasoning

LOOK_UP: Final = ("look_up", {"order_id": "1"})
THOUGHTS: Final = ("thinking", "redacted_thinking")


@tool
async def look_up(order_id: str) -> str:
    """Look up an order."""
    return f"{order_id} is sent"


@pytest.fixture(scope="module")
async def anthropic(anyio_backend: str) -> AsyncIterator[AnthropicServer]:
    """Anthropic's server."""
    async with asked(CLAUDE) as server:
        assert isinstance(server, AnthropicServer)
        yield server


@pytest.fixture(scope="module")
async def gemini(anyio_backend: str) -> AsyncIterator[GeminiServer]:
    """Google's server."""
    async with asked(GEMINI) as server:
        assert isinstance(server, GeminiServer)
        yield server


@pytest.fixture(params=[False, True], ids=["whole", "streamed"])
def streamed(request: pytest.FixtureRequest) -> bool:
    """Whether answers come in pieces."""
    chosen: bool = request.param
    return chosen


async def ask(agent: Agent, path: Path, message: str, *, streamed: bool, max_turns: int = 40) -> None:
    """One turn of a process that opens the file, answers, and ends."""
    async with SQLiteSessionStore(path, default_max_turns=max_turns) as store:
        runner = Runner(agent, session_store=store)
        await (runner.run_stream("c", message).collect() if streamed else runner.run_async("c", message))


def thoughts_in(request: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The thoughts that Anthropic is sent."""
    return [block for _, block in blocks_of(request) if block["type"] in THOUGHTS]


def turns_of(names: str) -> Iterator[list[dict[str, Any]]]:
    """A thoughtful call and a thoughtful answer for each turn."""
    for name in names:
        yield [thinking(f"{name}1"), tool_use(f"t{name}", *LOOK_UP)]
        yield [thinking(f"{name}2"), text("Sent.")]


def told_by(server: AnthropicServer, *thought: str) -> list[dict[str, Any]]:
    """What the server has told of these thoughts, with its signatures."""
    blocks = [each.block for each in server.told.values()]
    return [block for said in thought for block in blocks if block.get("thinking", block.get("data")) == said]


def parts_in(request: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What Google is sent of what its model has said."""
    contents = as_json_names(request)["contents"]
    return [part for content in contents if content["role"] == "model" for part in content["parts"]]


# -- Anthropic -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("protocol", [CLAUDE, BINDING], ids=lambda each: each.name)
async def test_thinking_blocks(anthropic: AnthropicServer, protocol: Protocol, tmp_path: Path, streamed: bool) -> None:
    """All blocks of thoughts come back as they were told, those that say nothing or can't be read too."""
    anthropic.told.clear()
    anthropic.script(
        [thinking("First."), thinking(""), redacted("c2VjcmV0"), text("Wait."), tool_use("t1", *LOOK_UP)],
        [thinking("Second."), tool_use("t2", *LOOK_UP), tool_use("t3", *LOOK_UP)],
        [thinking("Third."), text("Sent.")],
        [text("You are welcome.")],
    )
    agent = Agent("Support", "You help.", tools=[look_up], engine=protocol.engine(anthropic))
    await ask(agent, tmp_path / "chat.db", "Where is 1?", streamed=streamed)
    await ask(agent, tmp_path / "chat.db", "Thanks.", streamed=streamed)
    assert len(anthropic.requests) == 4
    everything = told_by(anthropic, "First.", "", "c2VjcmV0", "Second.", "Third.")
    assert [thoughts_in(request) for request in anthropic.requests[:3]] == [[], everything[:3], everything[:4]]
    assert thoughts_in(anthropic.requests[3]) == everything
    assert [block["type"] for _, block in blocks_of(anthropic.requests[1])][1:] == [
        *("thinking", "thinking", "redacted_thinking", "text", "tool_use", "tool_result")
    ]


async def test_thoughts_leave_with_their_call(anthropic: AnthropicServer, tmp_path: Path, streamed: bool) -> None:
    """A turn that is pruned takes its thoughts with it; the others' stay."""
    anthropic.told.clear()
    agent = Agent("Support", "You help.", tools=[look_up], engine=CLAUDE.engine(anthropic))
    anthropic.script(
        *(
            answer
            for turn in "ABC"
            for answer in (
                [thinking(f"{turn}1"), tool_use(f"t{turn}", *LOOK_UP)],
                [thinking(f"{turn}2"), text("Sent.")],
            )
        )
    )
    for turn in range(3):
        await ask(agent, tmp_path / "chat.db", f"Number {turn}?", streamed=streamed, max_turns=2)
    assert thoughts_in(anthropic.requests[-1]) == told_by(anthropic, "B1", "B2", "C1")


async def test_thoughts_after_another_beginning(anthropic: AnthropicServer, tmp_path: Path, streamed: bool) -> None:
    """A model that binds thoughts to what came before them is not sent those before which a turn was pruned."""
    anthropic.told.clear()
    agent = Agent("Support", "You help.", tools=[look_up], engine=BINDING.engine(anthropic))
    anthropic.script(
        *(
            answer
            for turn in "ABCD"
            for answer in (
                [thinking(f"{turn}1"), tool_use(f"t{turn}", *LOOK_UP)],
                [thinking(f"{turn}2"), text("Sent.")],
            )
        )
    )
    for turn in range(4):
        await ask(agent, tmp_path / "chat.db", f"Number {turn}?", streamed=streamed, max_turns=2)
    assert len(anthropic.requests) == 8
    assert [thoughts_in(request) for request in anthropic.requests] == [
        [],
        told_by(anthropic, "A1"),
        told_by(anthropic, "A1", "A2"),
        told_by(anthropic, "A1", "A2", "B1"),
        [],  # the first turn has gone
        told_by(anthropic, "C1"),
        [],  # the second too
        told_by(anthropic, "D1"),
    ]


async def test_thoughts_of_another_agent(anthropic: AnthropicServer, tmp_path: Path, streamed: bool) -> None:
    """Nor is it sent those of an agent with other instructions."""
    anthropic.told.clear()
    engine = BINDING.engine(anthropic)
    support = Agent("Support", "You help.", tools=[look_up], engine=engine)
    support.add_handoff(Agent("Billing", "You bill.", tools=[look_up], engine=engine))
    anthropic.script(
        [thinking("Not mine."), tool_use("t1", "transfer_to_billing", {})],
        [thinking("Mine."), tool_use("t2", *LOOK_UP)],
        [thinking("So."), text("Paid.")],
    )
    await ask(support, tmp_path / "chat.db", "Is it paid?", streamed=streamed)
    assert [thoughts_in(request) for request in anthropic.requests] == [[], [], told_by(anthropic, "Mine.")]


@pytest.mark.parametrize(
    "settings", [CLAUDE.settings, {"reasoning_effort": "low"}, {"thinking": {"type": "disabled"}}, {}]
)
async def test_call_of_another_provider(
    anthropic: AnthropicServer, gemini: GeminiServer, tmp_path: Path, streamed: bool, settings: Mapping[str, Any]
) -> None:
    """Within a turn whose calls another provider's model has begun to make, without thoughts, there are none."""
    support = Agent("Support", "You help.", engine=GEMINI.engine(gemini))
    billing = Agent("Billing", "You bill.", tools=[look_up], engine=CLAUDE.engine(anthropic, settings=settings))
    support.add_handoff(billing)
    gemini.script([thought("Not mine."), function_call("transfer_to_billing", {}, "f1")])
    anthropic.script([tool_use("t1", *LOOK_UP)], [text("Paid.")], [thinking("Hm."), text("Bye.")])
    await ask(support, tmp_path / "chat.db", "Is it paid?", streamed=streamed)
    await ask(support, tmp_path / "chat.db", "Thanks.", streamed=streamed)
    assert [thoughts_in(request) for request in anthropic.requests] == [[], [], []]
    kinds = [(request.get("thinking") or {"type": "disabled"})["type"] for request in anthropic.requests]
    assert kinds[:2] == ["disabled", "disabled"]
    assert kinds[2] == ("enabled" if settings in (CLAUDE.settings, {"reasoning_effort": "low"}) else "disabled")


# -- Google ----------------------------------------------------------------------------------------------------------


async def test_thought_signatures(gemini: GeminiServer, tmp_path: Path, streamed: bool) -> None:
    """Signatures come back on the parts that they came on, and nothing stands in for one."""
    gemini.told.clear()
    gemini.script(
        [
            thought("Two."),
            text("Wait."),
            function_call("look_up", {"order_id": "1"}, "f1"),
            function_call("look_up", {"order_id": "2"}, "f2"),
            function_call("look_up", {"order_id": "1"}, "f3"),
        ],
        [function_call("look_up", {"order_id": "3"}, "f4")],
        [thought("Done."), text("All are sent.")],
        "Bye.",
    )
    agent = Agent("Support", "You help.", tools=[look_up], engine=GEMINI.engine(gemini))
    await ask(agent, tmp_path / "chat.db", "Where are they?", streamed=streamed)
    await ask(agent, tmp_path / "chat.db", "Thanks.", streamed=streamed)
    assert len(gemini.requests) == 4
    first, second, answer, _ = gemini.told
    signed = [(part, part.get("thoughtSignature")) for part in parts_in(gemini.requests[-1])]
    calls = [(part["functionCall"]["id"], signature) for part, signature in signed if "functionCall" in part]
    assert calls == [("f1", first), ("f2", None), ("f3", None), ("f4", second)]
    texts = [(part["text"], signature) for part, signature in signed if "text" in part and "thought" not in part]
    assert texts == [("Wait.", None), ("All are sent.", answer)]


async def test_signatures_leave_with_their_call(gemini: GeminiServer, tmp_path: Path, streamed: bool) -> None:
    """A turn that is pruned takes its signatures with it; the others' stay."""
    gemini.told.clear()
    agent = Agent("Support", "You help.", tools=[look_up], engine=GEMINI.engine(gemini))
    gemini.script(*([function_call(*LOOK_UP, f"f{turn}")] if asked else "Sent." for turn in "ABC" for asked in (1, 0)))
    for turn in range(3):
        await ask(agent, tmp_path / "chat.db", f"Number {turn}?", streamed=streamed, max_turns=2)
    told = list(gemini.told)
    sent = [part["thoughtSignature"] for part in parts_in(gemini.requests[-1]) if "thoughtSignature" in part]
    assert sent == told[2:5]


async def test_refused_signature(gemini: GeminiServer, tmp_path: Path, streamed: bool) -> None:
    """Where Google refuses a signature, as one of another account, litellm asks once more, without it."""
    gemini.told.clear()
    agent = Agent("Support", "You help.", tools=[look_up], engine=GEMINI.engine(gemini))
    gemini.script([function_call(*LOOK_UP, "f1")], "Sent.", "Bye.")
    await ask(agent, tmp_path / "chat.db", "Where is it?", streamed=streamed)
    gemini.told.clear()
    await ask(agent, tmp_path / "chat.db", "Thanks.", streamed=streamed)
    assert len(gemini.requests) == 4
    sent = {part["thoughtSignature"] for part in parts_in(gemini.requests[-1]) if "thoughtSignature" in part}
    assert sent <= UNSIGNED


# -- OpenAI ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
async def responses(anyio_backend: str) -> AsyncIterator[ResponsesServer]:
    """OpenAI's server."""
    async with asked(RESPONSES) as server:
        assert isinstance(server, ResponsesServer)
        yield server


async def test_reasoning_items(responses: ResponsesServer, tmp_path: Path, streamed: bool) -> None:
    """An item that holds a model's thoughts stands before its call again when a service is told the history anew."""
    thoughts = reasoning(encrypted_content="gAAA")
    responses.script(
        {"output": [thoughts, made_call("c1", "look_up", '{"order_id": "1"}')]}, "Sent.", "You are welcome."
    )
    agent = Agent("Support", "You help.", tools=[look_up], engine=RESPONSES.engine(responses))
    await ask(agent, tmp_path / "chat.db", "Where is 1?", streamed=streamed)
    responses.forget()
    async with SQLiteSessionStore(tmp_path / "chat.db") as store:
        runner = Runner(agent, session_store=store, on_lost_service_session="replay")
        await runner.run_async("c", "Thanks.")
    known = {name: thoughts[name] for name in ("type", "summary", "encrypted_content")}
    assert responses.inputs[-1][1:3] == [known, call("c1", "look_up", '{"order_id": "1"}')]


# -- several ---------------------------------------------------------------------------------------------------------


async def test_thoughts_stay_with_their_provider(
    anthropic: AnthropicServer, gemini: GeminiServer, tmp_path: Path, streamed: bool
) -> None:
    """Agents of two providers that hand over to each other are each sent their own thoughts, and no others."""
    anthropic.told.clear()
    gemini.told.clear()
    support = Agent("Support", "You help.", tools=[look_up], engine=CLAUDE.engine(anthropic))
    billing = Agent("Billing", "You bill.", tools=[look_up], handoffs=[support], engine=GEMINI.engine(gemini))
    support.add_handoff(billing)
    anthropic.script(
        [thinking("A puzzle."), tool_use("t1", *LOOK_UP)],
        [thinking("Theirs."), tool_use("t2", "transfer_to_billing", {})],
        [text("Here again.")],
        [thinking("Mine."), text("Bye.")],
    )
    gemini.script(
        [thought("A riddle."), function_call(*LOOK_UP, "f1")],
        "It is paid.",
        [function_call("transfer_to_support", {}, "f2")],
    )
    path = tmp_path / "chat.db"
    await ask(support, path, "Where is 1, and is it paid?", streamed=streamed)
    await ask(support, path, "Let me talk to support.", streamed=streamed)
    await ask(support, path, "Thanks.", streamed=streamed)
    assert (len(anthropic.requests), len(gemini.requests)) == (4, 3)
    assert thoughts_in(anthropic.requests[-1]) == told_by(anthropic, "A puzzle.", "Theirs.")
    own, paid, _ = gemini.told
    signatures = [part.get("thoughtSignature") for part in parts_in(gemini.requests[-1])]
    assert [each for each in signatures if each not in {None, *UNSIGNED}] == [own, paid]
    for server, others in ((anthropic, ["A riddle.", *gemini.told]), (gemini, ["A puzzle.", *anthropic.told])):
        assert not any(word in json.dumps(server.requests) for word in others)
