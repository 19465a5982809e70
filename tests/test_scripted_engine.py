from __future__ import annotations

import re
from typing import Any

import anyio
import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from chatflow.core.agent import Agent
from chatflow.core.engine import EngineReply, EngineRequest
from chatflow.core.events import ReasoningDelta, TextDelta
from chatflow.core.memory import SessionStore
from chatflow.core.messages import ImagePart, Message, Role, TextPart, ToolCall, ToolResult
from chatflow.core.tools import tool
from chatflow.engines import ScriptedEngine
from chatflow.engines.scripted import last_result, user_text
from chatflow.exceptions import EngineError, EngineRateLimitError
from chatflow.runner import Runner

SUPPORT = Agent("Support")
BILLING = Agent("Billing")


def request(*messages: Message | str, agent: Agent = SUPPORT) -> EngineRequest:
    """A request of these messages; text is a user's."""
    return EngineRequest(
        agent=agent,
        messages=[Message(Role.USER, message) if isinstance(message, str) else message for message in messages],
    )


@tool
def look() -> str:
    """Look."""
    return "found"


def answered(name: str, content: Any) -> tuple[Message, Message]:
    """A call of this tool, and its result."""
    return (
        Message(Role.MODEL, tool_calls=[ToolCall(id="c", name=name)]),
        Message(Role.TOOL, tool_results=[ToolResult(tool_call_id="c", name=name, content=content)]),
    )


# -- fixed replies -------------------------------------------------------------------------------------------------


async def test_replies_in_order() -> None:
    """Fixed replies are given in order, whatever is asked."""
    engine = ScriptedEngine(["one", "two"])
    assert [(await engine.generate(request("?"))).text for _ in range(2)] == ["one", "two"]


async def test_out_of_replies() -> None:
    """A request for which nothing is left is an error that says which one it was, and not what it asked."""
    engine = ScriptedEngine(["one"])
    await engine.generate(request("first"))
    with pytest.raises(EngineError, match=r"request 2, of agent 'Billing', that ends with user message") as caught:
        await engine.generate(request("second", agent=BILLING))
    assert "second" not in str(caught.value)
    assert caught.value.model == BILLING.model


async def test_out_of_replies_without_messages() -> None:
    """A request without messages that has no reply is an error too."""
    with pytest.raises(EngineError, match="ends with no message"):
        await ScriptedEngine().generate(request())


async def test_requests_are_recorded() -> None:
    """Each request is kept, in order, also one that has no reply."""
    engine = ScriptedEngine(["one"])
    asked = [request("a"), request("b")]
    await engine.generate(asked[0])
    with pytest.raises(EngineError):
        await engine.generate(asked[1])
    assert engine.requests == asked


async def test_text() -> None:
    """Text is a reply that stops."""
    assert await ScriptedEngine(["Hi"]).generate(request("?")) == EngineReply(text="Hi", finish_reason="stop")


async def test_whole_reply() -> None:
    """A whole reply is given as it is."""
    reply = EngineReply(text="Hi", usage={"total_tokens": 3}, extra={"a": 1}, finish_reason="length")
    assert await ScriptedEngine([reply]).generate(request("?")) == reply


async def test_ids_are_unique() -> None:
    """Calls without an id get one each, also inside a whole reply, and no two are the same."""
    call = ScriptedEngine.call("look_up", order_id="404")
    engine = ScriptedEngine([call, [call, call], EngineReply(tool_calls=[call])])
    calls = [found for _ in range(3) for found in (await engine.generate(request("?"))).tool_calls]
    assert len({found.id for found in calls} - {""}) == 4
    assert {(found.name, found.args["order_id"]) for found in calls} == {("look_up", "404")}


async def test_ids_are_new_in_their_conversation() -> None:
    """A call without an id gets none that stands in the conversation already, from an earlier process say."""
    call = ScriptedEngine.call("look_up", order_id="404")
    store = SessionStore()
    for _ in range(2):
        await Runner(Agent("Support"), store, ScriptedEngine([call, "Found."])).run_async("s", "Look it up.")
    history = (await store.messages("s")).items
    assert len({found.id for message in history for found in message.tool_calls}) == 2


async def test_given_id() -> None:
    """A call that has an id keeps it."""
    reply = await ScriptedEngine([ToolCall(id="same", name="look_up")]).generate(request("?"))
    assert [call.id for call in reply.tool_calls] == ["same"]
    assert reply.finish_reason == "tool_calls"


@pytest.mark.parametrize("error", [EngineRateLimitError("slow down", model="m"), TimeoutError, KeyboardInterrupt()])
async def test_error(error: BaseException | type[BaseException]) -> None:
    """An exception, or a class of them, is raised."""
    with pytest.raises(error if isinstance(error, type) else type(error)):
        await ScriptedEngine([error]).generate(request("?"))


async def test_function() -> None:
    """A function makes its reply from the request."""
    engine = ScriptedEngine([lambda asked: user_text(asked).upper()])
    assert (await engine.generate(request("hello"))).text == "HELLO"


async def test_async_function() -> None:
    """An async function is awaited."""

    async def reply(asked: EngineRequest) -> list[ToolCall]:
        await anyio.lowlevel.checkpoint()
        return [ScriptedEngine.call(user_text(asked))]

    assert (await ScriptedEngine([reply]).generate(request("look_up"))).tool_calls[0].name == "look_up"


@pytest.mark.parametrize("returned", [None, 5, [], ["text"], lambda _: "text"])
async def test_function_that_returns_no_reply(returned: Any) -> None:
    """A function that returns something else is an error that says so."""
    with pytest.raises(TypeError, match="scripted function"):
        await ScriptedEngine([lambda _: returned]).generate(request("?"))


async def test_conversations_at_once() -> None:
    """Requests made at the same time get a fixed reply each."""
    engine = ScriptedEngine(str(number) for number in range(20))
    said: list[str | None] = []

    async def ask() -> None:
        said.append((await engine.generate(request("?"))).text)

    async with anyio.create_task_group() as tasks:
        for _ in range(20):
            tasks.start_soon(ask)
    assert sorted(said, key=str) == sorted(map(str, range(20)))


async def test_cancellation() -> None:
    """A cancelled request ends there."""
    with anyio.CancelScope() as scope:
        scope.cancel()
        await ScriptedEngine(["never"]).generate(request("?"))
    assert scope.cancelled_caught


# -- rules ---------------------------------------------------------------------------------------------------------


def shop() -> ScriptedEngine:
    """The engine of the class's docstring."""
    engine = ScriptedEngine(default="How can I help?")
    engine.when(r"order (?P<order_id>\d+)", call="check_order_status")
    engine.when(result_of="check_order_status", reply=lambda asked: f"It is {last_result(asked)['status']}.")
    engine.when("invoice", call="transfer_to_billing")
    engine.when(agent="Billing", reply="Billing here. Which invoice is it?")
    return engine


async def test_named_groups_are_arguments() -> None:
    """A rule that calls a tool takes the arguments from the expression's named groups, and ignores case."""
    (call,) = (await shop().generate(request("Where is ORDER 404?"))).tool_calls
    assert (call.name, call.args) == ("check_order_status", {"order_id": "404"})


async def test_rule_for_a_result() -> None:
    """A rule for a tool's result answers once the result is there, and the rule for the question does not again."""
    asked = request("Where is order 404?", *answered("check_order_status", {"status": "IN_TRANSIT"}))
    assert (await shop().generate(asked)).text == "It is IN_TRANSIT."


async def test_result_of_an_earlier_question() -> None:
    """A result of an earlier turn neither answers a new question nor keeps a tool from being called for it."""
    asked = request(
        "order 1", *answered("check_order_status", {"status": "SENT"}), Message(Role.MODEL, "It is SENT."), "order 2"
    )
    assert (await shop().generate(asked)).tool_calls[0].args == {"order_id": "2"}


async def test_rule_for_an_agent() -> None:
    """A rule for an agent answers when that agent is asked, as after a handoff."""
    asked = request("My invoice is wrong", *answered("transfer_to_billing", "ok"), agent=BILLING)
    assert (await shop().generate(asked)).text == "Billing here. Which invoice is it?"


async def test_default() -> None:
    """The default answers where no rule applies."""
    assert (await shop().generate(request("Hello"))).text == "How can I help?"


async def test_rules_after_fixed_replies() -> None:
    """Fixed replies are given before any rule is tried."""
    engine = ScriptedEngine(["fixed"]).when("x", reply="rule")
    assert [(await engine.generate(request("x"))).text for _ in range(2)] == ["fixed", "rule"]


async def test_first_rule_wins() -> None:
    """Of several rules that apply the first one answers."""
    engine = ScriptedEngine().when("a", reply="first").when("a", reply="second")
    assert (await engine.generate(request("a"))).text == "first"


@pytest.mark.parametrize(
    ("condition", "said"),
    [(re.compile("Hello"), "rule"), (re.compile("HELLO"), "default"), (lambda asked: len(asked.messages) == 1, "rule")],
)
async def test_compiled_expression_or_function(condition: Any, said: str) -> None:
    """A condition may be a compiled expression, used as it is, or a function of the request."""
    engine = ScriptedEngine(default="default").when(condition, reply="rule")
    assert (await engine.generate(request("Hello"))).text == said


async def test_more_arguments() -> None:
    """Arguments given with a rule are added to those found, and a group that found nothing is left out."""
    engine = ScriptedEngine().when(r"(?P<a>\d)(?P<b>x)?", call="look_up", args={"c": 3})
    assert (await engine.generate(request("1"))).tool_calls[0].args == {"a": "1", "c": 3}


async def test_result_with_an_expression() -> None:
    """With an expression, a rule for a result applies when the question matches too."""
    engine = ScriptedEngine(default="no").when("please", result_of="look_up", reply="yes")
    said = [(await engine.generate(request(text, *answered("look_up", 1)))).text for text in ("please", "now")]
    assert said == ["yes", "no"]


@pytest.mark.parametrize("replies", ["text", 5, ["fine", 5], [int], [[]], [["text"]]], ids=str)
def test_wrong_replies(replies: Any) -> None:
    """What is no list of replies is refused when the engine is made."""
    with pytest.raises(TypeError, match="replies"):
        ScriptedEngine(replies)


def test_wrong_default() -> None:
    """A default that is no reply is refused when the engine is made."""
    with pytest.raises(TypeError, match="default must be text"):
        ScriptedEngine(default=[])


@pytest.mark.parametrize(
    ("rule", "problem"),
    [
        ({}, "either reply= or call="),
        ({"reply": "a", "call": "b"}, "either reply= or call="),
        ({"reply": "a", "args": {}}, "args= only"),
        ({"reply": [5]}, "reply must be text"),
    ],
    ids=str,
)
def test_wrong_rules(rule: dict[str, Any], problem: str) -> None:
    """A rule that can't work is refused when it is made, with what is wrong with it."""
    with pytest.raises(TypeError, match=problem):
        ScriptedEngine().when("x", **rule)


def test_wrong_condition() -> None:
    """A condition that is neither an expression nor a function is refused when the rule is made."""
    condition: Any = 5
    with pytest.raises(TypeError, match="regular expression or a function, not int"):
        ScriptedEngine().when(condition, reply="a")


def test_no_result_and_no_question() -> None:
    """What the functions that read a request say where it holds nothing: no text, and an error."""
    assert user_text(request()) == ""
    with pytest.raises(LookupError):
        last_result(request("?"))


# -- in pieces -----------------------------------------------------------------------------------------------------


@given(st.text(), st.text())
async def test_pieces(text: str, thought: str) -> None:
    """A scripted reply comes word by word, what was thought first, and then whole: nothing of it is lost or added."""
    reply = EngineReply(text=text, extra={"reasoning_content": thought})
    *pieces, whole = [piece async for piece in ScriptedEngine([reply]).stream(request("?"))]
    assert whole == await ScriptedEngine([reply]).generate(request("?"))
    kinds = [type(piece) for piece in pieces]
    assert kinds == sorted(kinds, key=lambda kind: kind is TextDelta)
    for kind, said in ((ReasoningDelta, thought), (TextDelta, text)):
        assert "".join(piece.text for piece in pieces if isinstance(piece, kind)) == said


async def test_pieces_are_words() -> None:
    """A piece is a word with the space before it."""
    pieces = [piece async for piece in ScriptedEngine(["How can I help? "]).stream(request("?"))]
    assert [piece.text for piece in pieces] == ["How", " can", " I", " help?", " ", "How can I help? "]


async def test_error_in_pieces() -> None:
    """A scripted error is raised before the first piece, and each stream counts as one request."""
    engine = ScriptedEngine([LookupError])
    with pytest.raises(LookupError):
        await anext(engine.stream(request("?")))
    assert len(engine.requests) == 1


# -- counting ------------------------------------------------------------------------------------------------------


async def test_counts_words() -> None:
    """Each word counts as a token: of texts, of a call's name and arguments, of results; so does each tool."""
    engine = ScriptedEngine()
    call, result = answered("look", {"found": "two words"})
    counts = [
        (request("where is it?"), 3),
        (request(Message(Role.SYSTEM, "Be kind."), ""), 2),
        (request(call), 2),
        (request(result), 3),
        (request(Message(Role.USER, [TextPart("two words"), ImagePart(url="https://example.com/a.png")])), 2),
        (attrs.evolve(request("hi"), tools=[look]), 2),
    ]
    assert [await engine.count_tokens(each) for each, _ in counts] == [count for _, count in counts]
    assert engine.requests == []
