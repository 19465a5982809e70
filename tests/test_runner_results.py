"""What a runner stores of what tools return: parts, and no more of anything than its limits say."""

from __future__ import annotations

from typing import Any

import pytest

from chatflow.core.agent import Agent
from chatflow.core.events import ToolFinished
from chatflow.core.memory import SessionStore
from chatflow.core.messages import Handoff, ImagePart, Message, Role, TextPart, ToolCall, ToolResult
from chatflow.core.tools import ToolContext
from chatflow.engines.scripted import Scripted, ScriptedEngine, last_result
from chatflow.runner import Runner
from tests.runs import results, session_of

CALL = ScriptedEngine.call
PNG = ImagePart(data=b"png", media_type="image/png")
LONG = "b" * 1000 + "e" * 1000
CUT = "b" * 150 + "\n[... 1800 characters were left out here ...]\n" + "e" * 50
LIMIT = len(CUT)


def returning(value: Any, **options: Any) -> tuple[Runner, ScriptedEngine]:
    """A runner whose agent calls a tool that returns *value*, and its engine."""
    support = Agent("Support")

    @support.tool
    async def look() -> Any:
        return value

    replies: list[Scripted] = [CALL("look")]
    engine = ScriptedEngine(replies, default="done")
    return Runner(support, engine=engine, **options), engine


async def stored_of(value: Any, **options: Any) -> Any:
    """What is stored, and sent to the model, of a tool's result."""
    runner, engine = returning(value, **options)
    await runner.run_async("s", "hi")
    (result,) = results(await session_of(runner))
    assert last_result(engine.requests[-1]) == result.content
    assert not result.is_error
    return result.content


async def test_long_text_is_cut(caplog: pytest.LogCaptureFixture) -> None:
    """Of a long text its beginning and its end are stored and sent; the log has sizes, and nothing of the text."""
    assert await stored_of(LONG, max_result_characters=LIMIT) == CUT
    assert [record.getMessage() for record in caplog.records] == [
        "session 's': tool 'look' gave back more than is stored; left out: 1800 characters"
    ]


async def test_large_value_is_cut() -> None:
    """A value whose JSON is too long is stored as its beginning and end, as text; one that is not stays a value."""
    assert await stored_of({"a": [1]}, max_result_characters=100) == {"a": [1]}
    stored = await stored_of({"a": list(range(1000))}, max_result_characters=100)
    assert len(stored) <= 100
    assert stored.startswith('{"a": [0, 1')
    assert stored.endswith("998, 999]}")


async def test_default_limits() -> None:
    """Unless told otherwise, 50,000 characters and 3.75 million bytes of a result are stored."""
    assert len(await stored_of("x" * 50_000)) == 50_000
    assert 49_900 < len(await stored_of("x" * 50_001)) <= 50_000
    fits, too_large = ImagePart(data=bytes(3_750_000)), ImagePart(data=bytes(3_750_001))
    assert await stored_of(fits) == (fits,)
    assert await stored_of(["It:", too_large]) == (
        TextPart("It:"),
        TextPart("[left out: ImagePart of 3750001 bytes; the pictures and files of a result may have 3750000]"),
    )


async def test_no_limits() -> None:
    """With None for a limit all of a result is stored."""
    large = ImagePart(data=bytes(4_000_000))
    assert await stored_of("x" * 60_000, max_result_characters=None) == "x" * 60_000
    assert await stored_of(large, max_result_bytes=None) == (large,)


async def test_parts_are_stored_and_sent() -> None:
    """A tool that returns a picture, alone or with text, has parts for its result."""
    assert await stored_of(PNG) == (PNG,)
    assert await stored_of(["Front:", PNG]) == (TextPart("Front:"), PNG)


async def test_what_is_told_is_what_is_stored() -> None:
    """A stream tells of a call's end with the result as it is stored."""
    runner, _ = returning(LONG, max_result_characters=LIMIT)
    async with runner.run_stream("s", "hi") as stream:
        told = [event.result async for event in stream if isinstance(event, ToolFinished)]
    assert told == results(await session_of(runner))
    assert [result.content for result in told] == [CUT]


async def run_twice(value: Any, first: dict[str, Any], second: dict[str, Any]) -> tuple[list[Any], list[Any]]:
    """What the journal holds of a result where a turn breaks off after it, and what is stored once it has gone on."""
    store = SessionStore()
    runner, engine = returning(value, session_store=store, **first)
    engine = ScriptedEngine([CALL("look"), LookupError])
    with pytest.raises(LookupError):
        await Runner(runner.starting_agent, store, engine, **first).run_async("s", "hi", message_id="m")
    (turn,) = await store.pending_turns()
    noted = [entry.result.content for entry in await store.backend.read_journal(turn.turn_id) if entry.result]
    again = Runner(runner.starting_agent, store, ScriptedEngine(default="done"), **second)
    assert (await again.run_async("s", "hi", message_id="m")).content == "done"
    return noted, [result.content for result in results(await session_of(again))]


async def test_journal_notes_what_is_stored() -> None:
    """The journal holds a result as it is stored, parts too, and a turn that goes on from it stores the same."""
    limit = {"max_result_characters": LIMIT}
    assert await run_twice(LONG, limit, limit) == ([CUT], [CUT])
    assert await run_twice([PNG, "a"], limit, limit) == ([(PNG, TextPart("a"))], [(PNG, TextPart("a"))])


async def test_result_of_a_journal_that_is_too_large_by_now() -> None:
    """A result that the journal holds whole is cut where the turn goes on with a smaller limit."""
    assert await run_twice(LONG, {}, {"max_result_characters": LIMIT}) == ([LONG], [CUT])


async def test_messages_added_by_hand_are_left_alone() -> None:
    """What is added to a session, in a tool or outside, is kept whole: the limits are those of tools' results."""
    support = Agent("Support")
    call = ToolCall(id="mine", name="look")
    by_hand = Message(Role.TOOL, tool_results=[ToolResult(tool_call_id="mine", name="look", content=LONG)])

    @support.tool
    async def look(context: ToolContext) -> None:
        await context.session.add_message(by_hand)

    runner = Runner(support, engine=ScriptedEngine([CALL("look")], default="done"), max_result_characters=100)
    session = await runner.session_store.get_or_create("s", support)
    async with session.turn():
        await session.add_message(Message(Role.USER, "hi"))
        await session.add_message(Message(Role.MODEL, tool_calls=[call, call]))
        await session.add_message(by_hand)
    await runner.run_async("s", "hi")
    assert [result.content for result in results(await session_of(runner))] == [LONG, LONG, None]


async def test_reason_of_a_handoff_is_cut() -> None:
    """The result of a handoff is cut like any other, and the handoff takes effect as it was said."""
    support = Agent("Support", handoffs=[Agent("Billing")])

    @support.tool
    async def escalate() -> Handoff:
        return Handoff(target_agent_name="Billing", reason=LONG)

    runner = Runner(support, engine=ScriptedEngine([CALL("escalate")], default="done"), max_result_characters=200)
    response = await runner.run_async("s", "hi")
    (result,) = results(await session_of(runner))
    assert isinstance(result.content, str)
    assert len(result.content) <= 200
    assert response.active_agent_name == "Billing"
    assert response.handoff is not None
    assert response.handoff.reason == LONG
