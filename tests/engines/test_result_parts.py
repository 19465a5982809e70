"""Pictures in tool results over real HTTP, through litellm's own conversions for each provider."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from typing import Any

import pytest

from chatflow import Agent, Runner
from chatflow.core.messages import AudioPart, FilePart, ImagePart
from chatflow.engines import LiteLLMEngine
from tests.engines.protocols import ALL, Protocol, asked
from tests.model_server import Events, ModelServer, Status, serving, tool_calls
from tests.responses_server import ResponsesServer, calls

PNG = ImagePart(data=b"png", media_type="image/png")
PDF = FilePart(data=b"pdf", media_type="application/pdf", filename="bill.pdf")
SOUND = AudioPart(data=b"wav", media_type="audio/wav")
BESIDE = "(What tools have returned. It does not come from the user.)"


class OtherServer(ModelServer):
    """One that speaks another language: it gives the bodies that it is told to, and notes what it was asked."""

    def answer(self, path: str, request: Mapping[str, Any]) -> Status | Events | str:
        """The next body."""
        return Status(200, self.next_scripted())


@pytest.fixture(scope="module")
async def other_server(running_server: ResponsesServer) -> AsyncIterator[OtherServer]:
    """The server of another language, which stops before litellm's connections are closed."""
    async with serving(OtherServer) as server:
        yield server


def support(engine: LiteLLMEngine, *results: Any) -> Runner:
    """A runner whose agent can look, and sees what stands in *results* in turn."""
    agent = Agent("Support", "Look, and say what you see.", engine=engine)

    @agent.tool
    def look(at: int) -> Any:
        return results[at]

    return Runner(agent)


TWO_LOOKS = (("c0", "look", '{"at": 0}'), ("c1", "look", '{"at": 1}'))


async def test_chat_completions(server: ResponsesServer) -> None:
    """A server that is as strict as OpenAI takes the pictures of several results, in this request and in later ones."""
    runner = support(LiteLLMEngine("openai/test", api_key="k", api_base=server.url), ["Front:", PNG, PDF], "none")
    server.script(tool_calls(*TWO_LOOKS), "I see.", "Yes.")
    assert (await runner.run_async("s", "Look.")).content == "I see."
    assert (await runner.run_async("s", "Really?")).content == "Yes."
    roles = [message["role"] for message in server.requests[2]["messages"]]
    assert roles == ["system", "user", "assistant", "tool", "tool", "user", "assistant", "user"]
    first, second, beside = server.requests[2]["messages"][3:6]
    assert first["content"].startswith("Front:\n(image 1, which follows the results)")
    assert second["content"] == "none"
    assert [part["type"] for part in beside["content"]] == ["text", "text", "image_url", "text", "file"]
    assert beside["content"][0]["text"] == BESIDE
    assert beside["content"][2]["image_url"]["url"] == "data:image/png;base64,cG5n"


async def test_responses(server: ResponsesServer) -> None:
    """The Responses API takes pictures and files in the result itself."""
    engine = LiteLLMEngine("openai/test", api_key="k", api_base=server.url, service_history=True)
    server.script(calls(*TWO_LOOKS), "I see.")
    assert (await support(engine, ["Front:", PNG, PDF], "none").run_async("s", "Look.")).content == "I see."
    first, second = server.inputs[1]
    assert [part["type"] for part in first["output"]] == ["input_text", "input_image", "input_file"]
    assert first["output"][1]["image_url"] == "data:image/png;base64,cG5n"
    assert second["output"] == "none"


ANTHROPIC_CALLS = {
    "content": [
        {"type": "tool_use", "id": "toolu_0", "name": "look", "input": {"at": 0}},
        {"type": "tool_use", "id": "toolu_1", "name": "look", "input": {"at": 1}},
    ],
    "stop_reason": "tool_use",
}


def anthropic(answer: Mapping[str, Any]) -> dict[str, Any]:
    """A message of Anthropic's."""
    usage = {"input_tokens": 1, "output_tokens": 1}
    return {"id": "msg_1", "type": "message", "role": "assistant", "model": "claude", "usage": usage, **answer}


GEMINI_CALLS = {
    "parts": [
        {"functionCall": {"name": "look", "args": {"at": 0}}, "thoughtSignature": "c2ln"},
        {"functionCall": {"name": "look", "args": {"at": 1}}},
    ],
}


def gemini(answer: Mapping[str, Any]) -> dict[str, Any]:
    """A response of Gemini's."""
    usage = {"promptTokenCount": 1, "candidatesTokenCount": 1, "totalTokenCount": 2}
    candidate = {"content": {"role": "model", **answer}, "finishReason": "STOP", "index": 0}
    return {"candidates": [candidate], "usageMetadata": usage}


async def asked_of(server: OtherServer, model: str, *bodies: Mapping[str, Any]) -> dict[str, Any]:
    """The last request for *model*, whose tool has returned text, a picture, a PDF and a recording, and then none."""
    server.script(*bodies)
    engine = LiteLLMEngine(model, attempts=1, api_key="k", api_base=server.url.removesuffix("/v1"))
    response = await support(engine, ["Front:", PNG, PDF, SOUND], "none").run_async("s", "Look.")
    assert response.content == "I see."
    return server.requests[-1]


async def test_anthropic(other_server: OtherServer) -> None:
    """Anthropic is sent pictures and PDFs as blocks of the result, directly after the calls."""
    said = anthropic({"content": [{"type": "text", "text": "I see."}], "stop_reason": "end_turn"})
    sent = await asked_of(other_server, "claude-sonnet-4-5", anthropic(ANTHROPIC_CALLS), said)
    assert [message["role"] for message in sent["messages"]] == ["user", "assistant", "user"]
    words = "Front:\n(image 1)\n(file 1, bill.pdf)\n(recording 1, which can't be shown to this model)"
    assert sent["messages"][-1]["content"] == [
        {
            "type": "tool_result",
            "tool_use_id": "toolu_0",
            "content": [
                {"type": "text", "text": words},
                {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "cG5n"}},
                {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": "cGRm"}},
            ],
        },
        {"type": "tool_result", "tool_use_id": "toolu_1", "content": "none"},
    ]


SAID_BY_GEMINI = gemini({"parts": [{"text": "I see."}]})
BLOBS = [
    {"inline_data": {"data": "cG5n", "mime_type": "image/png"}},
    {"inline_data": {"data": "cGRm", "mime_type": "application/pdf"}},
    {"inline_data": {"data": "d2F2", "mime_type": "audio/wav"}},
]


async def test_gemini_3(other_server: OtherServer) -> None:
    """Gemini 3 is sent pictures and PDFs as parts of the function's response, and a recording after all responses."""
    sent = await asked_of(other_server, "gemini-3-pro-preview", gemini(GEMINI_CALLS), SAID_BY_GEMINI)
    responses, beside = sent["contents"][-2:]
    first, second = (part["function_response"] for part in responses["parts"])
    assert first["parts"] == BLOBS[:2]
    assert first["response"]["content"].startswith("Front:\n(image 1)\n(file 1, bill.pdf)\n(recording 1, which follows")
    assert (second["response"], "parts" in second) == ({"content": "none"}, False)
    assert beside == {"role": "user", "parts": [{"text": BESIDE}, {"text": "recording 1:"}, BLOBS[2]]}


async def test_gemini_before_3(other_server: OtherServer) -> None:
    """An earlier Gemini, whose function responses hold JSON alone, is sent those and then what tools have shown."""
    sent = await asked_of(other_server, "gemini-2.5-flash", gemini(GEMINI_CALLS), SAID_BY_GEMINI)
    responses, beside = sent["contents"][-2:]
    assert [list(part) for part in responses["parts"]] == [["function_response"]] * 2
    assert [part for part in beside["parts"] if "inline_data" in part] == BLOBS


async def test_mistral(other_server: OtherServer) -> None:
    """Mistral is sent text in results, and the pictures in a user's message after them."""

    def completion(message: Mapping[str, Any], reason: str) -> dict[str, Any]:
        choice = {"index": 0, "message": message, "finish_reason": reason}
        return {"id": "1", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice]}

    said = completion({"role": "assistant", "content": "I see."}, "stop")
    sent = await asked_of(other_server, "mistral-large-latest", completion(tool_calls(*TWO_LOOKS), "tool_calls"), said)
    assert [message["role"] for message in sent["messages"][1:]] == ["user", "assistant", "tool", "tool", "user"]
    assert [part["type"] for part in sent["messages"][-1]["content"] if part["type"] != "text"] == [
        "image_url",
        "file",
        "input_audio",
    ]


# --- servers that are strict ---


@pytest.fixture(scope="module", params=ALL, ids=lambda each: each.name)
async def strict(request: pytest.FixtureRequest, anyio_backend: str) -> AsyncIterator[tuple[Protocol, ModelServer]]:
    """Each of the languages, and a server that refuses what its provider would."""
    protocol: Protocol = request.param
    async with asked(protocol) as server:
        yield protocol, server


@pytest.mark.parametrize("parts", [["Front:", PNG, PDF], [PNG], ["Listen:", SOUND]], ids=["several", "one", "sound"])
@pytest.mark.parametrize("streamed", [False, True])
async def test_strict_servers_take_them(strict: tuple[Protocol, ModelServer], parts: list[Any], streamed: bool) -> None:
    """Every provider's server takes the results in the request after them, and in those of the next turn."""
    protocol, server = strict
    looks = [(f"c{at}", "look", {"at": at}) for at in (0, 1)]
    server.script(protocol.said(None, "Hm.", looks), protocol.said("I see.", None, []), protocol.said("Yes.", None, []))
    runner = support(protocol.engine(server), parts, "none")
    for question, answer in (("Look.", "I see."), ("Really?", "Yes.")):
        asked_for = runner.run_stream("s", question).collect() if streamed else runner.run_async("s", question)
        assert (await asked_for).content == answer
