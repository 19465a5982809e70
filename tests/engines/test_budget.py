from __future__ import annotations

import socket
import threading
from typing import Any, Final

import pytest

from chatflow import Runner
from chatflow.core.agent import Agent
from chatflow.core.engine import EngineRequest
from chatflow.core.memory import SessionStore
from chatflow.core.messages import AudioPart, FilePart, ImagePart, Message, Part, Role, ToolCall, ToolResult
from chatflow.core.tools import Tool
from chatflow.engines import LiteLLMEngine
from chatflow.exceptions import ContextWindowError, EngineBadRequestError
from chatflow.running.compacting import Compactor
from tests.model_server import error
from tests.responses_server import ResponsesServer
from tests.runs import session_of, texts

KEY: Final = "sk-the-key"
TOO_LONG: Final = error(400, f"{KEY}: this model takes less than that", code="context_length_exceeded")
MODELS: Final = (
    *("gpt-4o", "claude-sonnet-4-5", "gemini-2.5-flash", "deepseek-chat", "command-r-plus", "mistral-large-latest"),
    *("openai/llama-3-8b", "replicate/meta/llama-2-70b-chat", "bedrock/anthropic.claude-sonnet-4-5", "azure/mine"),
)
"""One of each provider, some of which litellm would download a tokenizer for."""


def look_up(order_id: str) -> str:
    """Look up an order."""
    return order_id


LOOK_UP: Final = Tool(look_up)


def engine_at(server: ResponsesServer) -> LiteLLMEngine:
    """An engine that asks the server."""
    return LiteLLMEngine(api_key=KEY, api_base=server.url)


def words(count: int) -> str:
    """Text of so many tokens."""
    return " hello" * count


def request(*messages: Message | str, model: str = "gpt-4o", **arguments: Any) -> EngineRequest:
    """A request of these messages; text is a user's."""
    return EngineRequest(
        agent=Agent("Support", model=model),
        messages=[Message(Role.USER, each) if isinstance(each, str) else each for each in messages],
        **arguments,
    )


def part(kind: Part) -> Message:
    """A user's message of one part."""
    return Message(Role.USER, [kind])


# --- counting ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", MODELS)
async def test_no_network(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens are counted without a look at the network, whatever the model."""
    asked: list[Any] = []

    def refuse(*arguments: Any, **options: Any) -> Any:
        asked.append(arguments)
        raise OSError("there is no network")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    few = await LiteLLMEngine().count_tokens(request(words(100), model=model))
    many = await LiteLLMEngine().count_tokens(request(words(1100), model=model))
    assert 990 < many - few < 1010
    assert asked == []


async def test_everything_counts() -> None:
    """Instructions, calls, results and tools count besides what was said."""
    made = [
        Message(Role.MODEL, tool_calls=[ToolCall(id="1", name="look_up", args={"order_id": words(50)})]),
        Message(Role.TOOL, tool_results=[ToolResult(tool_call_id="1", name="look_up", content=words(50))]),
    ]
    engine = LiteLLMEngine()
    counts = [
        await engine.count_tokens(request("hi")),
        await engine.count_tokens(request(Message(Role.SYSTEM, words(50)), "hi")),
        await engine.count_tokens(request("hi", *made[:1])),
        await engine.count_tokens(request("hi", *made)),
        await engine.count_tokens(request("hi", *made, tools=[LOOK_UP])),
    ]
    assert all(later - sooner > 40 for sooner, later in zip(counts[:1] * 2 + counts[2:3], counts[1:4], strict=True))
    assert counts[4] > counts[3]


@pytest.mark.parametrize("model", ["gpt-4o", "deepseek-chat"])
async def test_schema_counts(model: str) -> None:
    """What an answer is to be counts, whichever way the model is told."""
    schema = {"type": "object", "properties": {f"name_{number}": {"type": "string"} for number in range(20)}}
    engine = LiteLLMEngine()
    plain = await engine.count_tokens(request("hi", model=model))
    assert await engine.count_tokens(request("hi", model=model, output_schema=schema)) > plain + 100


async def test_parts_count(server: ResponsesServer) -> None:
    """Pictures, sound and documents count, and none is fetched."""
    engine = LiteLLMEngine()
    plain = await engine.count_tokens(request("hi"))
    for each in (
        ImagePart(url=f"{server.url}/a.png"),
        ImagePart(data=b"no picture"),
        FilePart(data=b"%PDF-1.4 no document", filename="a.pdf", media_type="application/pdf"),
    ):
        assert await engine.count_tokens(request("hi", part(each))) > plain + 3
    short, long = AudioPart(data=bytes(1000)), AudioPart(data=bytes(101_000))
    counts = [await engine.count_tokens(request(part(each))) for each in (short, long)]
    assert counts[1] - counts[0] == 1000
    assert server.requests == []


async def test_counted_in_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokenizers, which take their time, run in a thread."""
    engine = LiteLLMEngine()
    await engine.warm_up()
    threads: list[threading.Thread] = []

    def counter(**arguments: Any) -> int:
        threads.append(threading.current_thread())
        return 1

    monkeypatch.setattr(engine._litellm, "token_counter", counter)
    await engine.count_tokens(request("hi"))
    assert threads[0] is not threading.current_thread()


async def test_first_model_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is counted is for the model that is asked first."""
    engine = LiteLLMEngine(models=["claude-sonnet-4-5", "gpt-4o"])
    await engine.warm_up()
    asked: list[Any] = []

    def counter(**arguments: Any) -> int:
        asked.append(arguments["model"])
        return 1

    monkeypatch.setattr(engine._litellm, "token_counter", counter)
    await engine.count_tokens(request("hi"))
    assert asked == ["claude-sonnet-4-5"]


async def test_what_can_not_be_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """What litellm can't count is a bad request, whose message quotes nothing."""
    engine = LiteLLMEngine()
    await engine.warm_up()

    def counter(**arguments: Any) -> int:
        raise ValueError(f"what is {arguments}?")

    monkeypatch.setattr(engine._litellm, "token_counter", counter)
    with pytest.raises(EngineBadRequestError, match=r"^model 'gpt-4o': the tokens of a request can't be counted; the"):
        await engine.count_tokens(request("secret"))


# --- over HTTP ---------------------------------------------------------------------------------------------------


async def test_oldest_turns_are_not_sent(server: ResponsesServer) -> None:
    """What the server is sent has as many whole turns as the limit of tokens lets through."""
    server.script("one", "two", "three", "four")
    runner = Runner(Agent("Support", "Be kind.", "openai/gpt-4o"), engine=engine_at(server), max_prompt_tokens=1100)
    for _ in range(4):
        await runner.run_async("s", words(500))
    assert [[each["content"][-5:] for each in asked["messages"]] for asked in server.requests] == [
        ["kind.", "hello"],
        ["kind.", "hello", "one", "hello"],
        ["kind.", "hello", "two", "hello"],
        ["kind.", "hello", "three", "hello"],
    ]


async def test_turn_alone_is_over(server: ResponsesServer) -> None:
    """A turn that is over by itself reaches no server."""
    runner = Runner(Agent("Support", model="openai/gpt-4o"), engine=engine_at(server), max_prompt_tokens=100)
    with pytest.raises(ContextWindowError) as caught:
        await runner.run_async("s", words(500))
    assert 500 < (caught.value.tokens or 0) < 520
    assert server.requests == []


@pytest.mark.parametrize("streams", [False, True], ids=["whole", "streamed"])
async def test_provider_finds_it_too_long(server: ResponsesServer, streams: bool) -> None:
    """A provider that finds the prompt too long is asked again with half of the turns, down to the running one."""
    server.script("one", "two", "three", TOO_LONG, "four", TOO_LONG, TOO_LONG)
    runner = Runner(Agent("Support", model="openai/gpt-4o"), engine=engine_at(server), on_context_window="shrink")

    async def ask(text: str) -> str:
        if streams:
            return (await runner.run_stream("s", text).collect()).content
        return (await runner.run_async("s", text)).content

    assert [await ask(text) for text in ("a", "b", "c", "d")] == ["one", "two", "three", "four"]
    with pytest.raises(ContextWindowError):
        await ask("e")
    sent = [[each["content"] for each in asked["messages"]] for asked in server.requests]
    assert sent[3:] == [
        ["a", "one", "b", "two", "c", "three", "d"],
        ["c", "three", "d"],
        ["c", "three", "d", "four", "e"],
        ["e"],
    ]
    assert texts(await session_of(runner))[-2:] == ["d", "four"]


async def test_summary(server: ResponsesServer) -> None:
    """A summary is a request without tools, of text alone, and its model and cost stand in the message."""
    server.script("one", "two", "They greeted each other twice.", "three")
    agent = Agent("Support", "Be kind.", "openai/gpt-4o", tools=[LOOK_UP])
    runner = Runner(agent, SessionStore(default_max_turns=1), engine_at(server), compactor=Compactor())
    await runner.run_async("s", "hello")
    response = await runner.run_async("s", "hello again")
    asked = server.requests[2]
    assert [each["role"] for each in asked["messages"]] == ["system", "user"]
    assert "tools" not in asked
    summary = (await session_of(runner)).history[0]
    assert (summary.text, summary.extra["chatflow_model"]) == ("They greeted each other twice.", "openai/gpt-4o")
    assert (summary.usage or {})["total_tokens"] == 18
    assert (response.usage or {})["total_tokens"] == 36
    await runner.run_async("s", "bye")
    assert [each["content"] for each in server.requests[3]["messages"]][:2] == [
        "Be kind.",
        "They greeted each other twice.",
    ]
