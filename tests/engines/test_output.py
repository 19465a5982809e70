"""Answers of an output type over real HTTP: what a model is told, and how it is asked again."""

from __future__ import annotations

import json
from typing import Any

import attrs
import pytest

from chatflow import Agent, AnswerRejected, EngineOutputError, LiteLLMEngine, Runner, TextDelta
from chatflow.core.output import Output
from tests.model_server import tool_calls
from tests.responses_server import ResponsesServer, calls, output, user

GOOD = '{"id": 404, "status": "sent"}'
BAD = '{"id": "none", "status": "sent"}'


@attrs.frozen
class Order:
    id: int
    status: str


@attrs.frozen
class Defaulted:
    id: int = 7


SCHEMA = Output(Order).schema


def look_up(order_id: str) -> str:
    """Look up an order."""
    return "sent"


def agent_of(server: ResponsesServer, model: str = "gpt-4o", *, output_type: Any = Order, **options: Any) -> Agent:
    """An agent that answers with orders, whose model is on the server."""
    engine = LiteLLMEngine(f"openai/{model}", attempts=1, api_key="k", api_base=server.url, **options)
    return Agent("Support", "Be brief.", engine=engine, tools=[look_up], output_type=output_type)


@pytest.mark.parametrize("streams", [False, True])
async def test_response_format(server: ResponsesServer, streams: bool) -> None:
    """A model that takes a schema is sent it, strictly and beside the tools, streamed or not."""
    server.script(tool_calls(("c1", "look_up", '{"order_id": "404"}')), GOOD)
    runner = Runner(agent_of(server))
    response = await (runner.run_stream("s", "404?").collect() if streams else runner.run_async("s", "404?"))
    assert (response.output, response.tool_calls_executed) == (Order(404, "sent"), ("look_up",))
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA, "strict": True}}
    assert [request["response_format"] for request in server.requests] == [form, form]
    assert [message["role"] for message in server.requests[0]["messages"]] == ["system", "user"]


async def test_system_text(server: ResponsesServer) -> None:
    """A model that litellm does not know is told the schema in the system text."""
    server.script(f"Here it is:\n```json\n{GOOD}\n```")
    response = await agent_of(server, "qwen3").run("404?")
    assert response.output == Order(404, "sent")
    (sent,) = server.requests
    assert "response_format" not in sent
    assert [message["role"] for message in sent["messages"]] == ["system", "system", "user"]
    assert json.loads(sent["messages"][1]["content"].partition("\n")[2]) == SCHEMA


async def test_deepseek(server: ResponsesServer) -> None:
    """DeepSeek, which refuses what litellm believes that it takes, is told the schema in the system text."""
    server.script(GOOD)
    engine = LiteLLMEngine("deepseek/deepseek-chat", attempts=1, api_key="k", api_base=server.url)
    assert (await Agent("Support", engine=engine, output_type=Order).run("404?")).output == Order(404, "sent")
    assert "response_format" not in server.requests[0]


async def test_asked_again(server: ResponsesServer) -> None:
    """A refused answer goes back with what is wrong, in a request without tools, and costs what both have cost."""
    server.script(BAD, GOOD)
    session = (agent := agent_of(server)).create_session()
    response = await agent.run("404?", session=session)
    assert response.output == Order(404, "sent")
    first, again = server.requests
    assert again["messages"][:3] == [*first["messages"], {"role": "assistant", "content": BAD}]
    assert again["messages"][3]["role"] == "user"
    assert "answer.id: Input should be a valid integer" in again["messages"][3]["content"]
    assert "tools" not in again
    assert session.usage.total["total_tokens"] == (response.usage or {})["total_tokens"] == 36


async def test_streamed_and_refused(server: ResponsesServer) -> None:
    """A stream tells the refused answer, that it is refused, and the new one."""
    server.script(BAD, GOOD)
    told = ""
    async with agent_of(server).run_stream("404?") as stream:
        async for event in stream:
            if isinstance(event, TextDelta):
                told += event.text
            if isinstance(event, AnswerRejected):
                assert told == BAD
                told = ""
    assert told == stream.response.content == GOOD


async def test_refused_twice(server: ResponsesServer) -> None:
    """A model that can't do it is asked twice and no more."""
    server.script("no", "no", GOOD)
    with pytest.raises(EngineOutputError, match="is not of its output_type"):
        await agent_of(server).run("404?")
    assert len(server.requests) == 2


# -- where the service keeps the history -----------------------------------------------------------------------------


async def test_text_format(server: ResponsesServer) -> None:
    """The Responses API is sent the schema as the text's format."""
    server.script(calls(("c1", "look_up", '{"order_id": "404"}')), GOOD)
    assert (await agent_of(server, service_history=True).run("404?")).output == Order(404, "sent")
    form = {"format": {"type": "json_schema", "name": "answer", "schema": SCHEMA, "strict": True}}
    assert [request["text"] for request in server.requests] == [form, form]


@pytest.mark.parametrize("streams", [False, True])
async def test_response_is_asked_again(server: ResponsesServer, streams: bool) -> None:
    """A chain of responses is gone on with from before the refused one, which it forgets."""
    server.script(calls(("c1", "look_up", '{"order_id": "404"}')), BAD, GOOD, GOOD)
    agent = agent_of(server, service_history=True)
    session = agent.create_session()
    stream = agent.run_stream("404?", session=session)
    response = await (stream.collect() if streams else agent.run("404?", session=session))
    assert response.output == Order(404, "sent")
    await agent.run("and?", session=session)
    first, refused, again, last = server.chained
    assert (first, again) == (None, refused)
    assert server.inputs == [[user("404?")], [output("c1", "sent")], [output("c1", "sent")], [user("and?")]]
    assert BAD in server.requests[2]["instructions"]
    kept = [item["content"][0]["text"] for item in server.kept[str(last)] if item.get("type") == "message"]
    assert kept == [GOOD]


async def test_conversation_is_asked_again(server: ResponsesServer) -> None:
    """A conversation, which holds the refused answer, is told what is wrong with it, and goes on."""
    id_ = server.new_conversation()
    server.script(BAD, GOOD, GOOD)
    agent = agent_of(server, service_history=True)
    session = agent.get_session(id_)
    assert (await agent.run("404?", session=session)).output == Order(404, "sent")
    await agent.run("and?", session=session)
    assert server.chained == [id_] * 3
    assert [len(items) for items in server.inputs] == [1, 1, 1]
    assert server.inputs[0] + server.inputs[2] == [user("404?"), user("and?")]
    assert "answer.id: Input should be a valid integer" in server.inputs[1][0]["content"]


@pytest.mark.parametrize("kind", [Order, Defaulted, dict[str, int], Order | None, list[Order]])
@pytest.mark.parametrize("service_history", [False, True])
async def test_accepted_schemas(server: ResponsesServer, kind: Any, service_history: bool) -> None:
    """No schema is sent that OpenAI would refuse."""
    server.script("no", "no")
    agent = agent_of(server, output_type=kind, service_history=service_history)
    with pytest.raises(EngineOutputError):
        await agent.run("404?")
    assert len(server.requests) == 2
