from __future__ import annotations

import base64
import json
import sys
from typing import Any, Final

import pytest

from chatflow import exceptions
from chatflow.core.agent import Agent
from chatflow.core.engine import EngineReply, EngineRequest
from chatflow.core.messages import (
    MODEL_KEY,
    AudioPart,
    FilePart,
    ImagePart,
    Message,
    Part,
    Role,
    TextPart,
    ToolCall,
    ToolResult,
    UnknownPart,
)
from chatflow.core.prompt import AWAITING
from chatflow.core.tools import Tool
from chatflow.engines import LiteLLMEngine
from chatflow.engines.common_form import INVALID_ARGUMENTS_KEY
from tests.engines.failing import FAILURES, KEY, QUESTION, Failure, fails
from tests.model_server import HANG, Status, error
from tests.responses_server import (
    ResponsesServer,
    Unheard,
    assistant,
    call,
    calls,
    message,
    output,
    reasoning,
    user,
)


def look_up(order_id: str) -> str:
    """Look up an order."""
    return order_id


LOOK_UP = Tool(look_up)
CALLED = calls(("c1", "look_up", '{"order_id": "404"}'))
SENT = Message(Role.TOOL, tool_results=[ToolResult(tool_call_id="c1", name="look_up", content="sent")])


@pytest.fixture
def engine(server: ResponsesServer) -> LiteLLMEngine:
    """An engine that asks the server, which keeps every history."""
    return LiteLLMEngine("openai/test", attempts=1, api_key=KEY, api_base=server.url, service_history=True)


def request(*said: Message | str, session: Any = None, model: str = "openai/test", **fields: Any) -> EngineRequest:
    """A request of these messages (text is a user's), by default of one question."""
    prompt = [Message(Role.USER, each) if isinstance(each, str) else each for each in said]
    return EngineRequest(
        agent=Agent("Support", model=model),
        messages=prompt or [Message(Role.USER, QUESTION)],
        service_session_id=session,
        **fields,
    )


def kept(reply: EngineReply) -> Message:
    """The message that is stored of a reply."""
    return Message(Role.MODEL, reply.text, tool_calls=reply.tool_calls, extra=reply.extra)


# -- which way a request goes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("service_history", "fields", "field"),
    [
        (False, {}, "messages"),
        (False, {"keep_at_service": True}, "input"),
        (False, {"session": "conv_1"}, "input"),
        (True, {}, "input"),
    ],
)
async def test_way(server: ResponsesServer, service_history: bool, fields: dict[str, Any], field: str) -> None:
    """A request goes to the Responses API if the service is to keep its history, and to chat completions if not."""
    server.conversations["conv_1"] = ()
    server.script("Hello.")
    engine = LiteLLMEngine("openai/test", attempts=1, api_key=KEY, api_base=server.url, service_history=service_history)
    assert (await engine.generate(request(**fields))).text == "Hello."
    assert field in server.requests[0]


def test_service() -> None:
    """The service is the provider of the model that answers, the engine's own or the agent's."""
    assert LiteLLMEngine().service_of(Agent("Support", model="gpt-5")) == "openai"
    assert LiteLLMEngine("xai/grok-4").service_of(Agent("Support", model="gpt-5")) == "xai"


@pytest.mark.parametrize("model", ["gemini-2.5-flash", "perplexity/sonar"])
async def test_provider_that_keeps_nothing(model: str) -> None:
    """A provider without a Responses API, or with one that keeps nothing, is not asked to keep a history."""
    with pytest.raises(exceptions.EngineBadRequestError, match=r"knows no service of '(gemini|perplexity)'"):
        await LiteLLMEngine(model, api_key=KEY, api_base="http://127.0.0.1:1/v1").generate(
            request(keep_at_service=True)
        )


async def test_provider_that_is_unknown() -> None:
    """A model whose provider litellm does not know is a bad request."""
    with pytest.raises(exceptions.EngineBadRequestError, match="no provider is known for it; name it as"):
        await LiteLLMEngine("olmo-2", api_key=KEY).generate(request(keep_at_service=True))


# -- a conversation --------------------------------------------------------------------------------------------------


async def test_first_request(server: ResponsesServer, engine: LiteLLMEngine) -> None:
    """A question is sent once, to be stored, and its answer comes back with usage, finish reason and session."""
    server.script("Hello.")
    reply = await engine.generate(request(Message(Role.SYSTEM, "Be kind."), "Hi"))
    assert server.requests == [{"model": "test", "input": [user("Hi")], "instructions": "Be kind.", "store": True}]
    assert server.keys == [KEY]
    (id_,) = server.kept
    assert reply == EngineReply(
        text="Hello.",
        usage={
            "prompt_tokens": 11,
            "prompt_tokens_details": {"cached_tokens": 4},
            "completion_tokens": 7,
            "completion_tokens_details": {"reasoning_tokens": 2},
            "total_tokens": 18,
        },
        extra={MODEL_KEY: "openai/test"},
        service_session_id=id_,
        finish_reason="stop",
    )


async def test_chain(server: ResponsesServer, engine: LiteLLMEngine) -> None:
    """Each request goes on from the response before it, with what is new alone, and instructions of its own."""
    server.script("Hello.", CALLED, "It is on its way.")
    first = await engine.generate(request(Message(Role.SYSTEM, "Be kind."), "Hi"))
    second = await engine.generate(
        request(Message(Role.SYSTEM, "Be brief."), "Where is 404?", session=first.service_session_id, tools=[LOOK_UP])
    )
    assert second.tool_calls == (ToolCall(id="c1", name="look_up", args={"order_id": "404"}),)
    third = await engine.generate(request(SENT, session=second.service_session_id, tools=[LOOK_UP]))
    assert third.text == "It is on its way."
    assert server.inputs == [[user("Hi")], [user("Where is 404?")], [output("c1", "sent")]]
    assert server.chained == [None, first.service_session_id, second.service_session_id]
    assert [asked.get("instructions") for asked in server.requests] == ["Be kind.", "Be brief.", None]
    assert [len(asked.get("tools", ())) for asked in server.requests] == [0, 1, 1]
    assert len(server.kept[str(third.service_session_id)]) == 6


async def test_conversation(server: ResponsesServer, engine: LiteLLMEngine) -> None:
    """A conversation is named in each request, which goes on from nothing else, and keeps its id."""
    id_ = server.new_conversation()
    server.script("Hello.", "Bye.")
    first = await engine.generate(request("Hi", session=id_))
    second = await engine.generate(request("That was all.", session=first.service_session_id))
    assert first.service_session_id == second.service_session_id == id_
    assert [asked["conversation"] for asked in server.requests] == [id_, id_]
    assert all("previous_response_id" not in asked for asked in server.requests)
    assert server.inputs == [[user("Hi")], [user("That was all.")]]
    assert len(server.conversations[id_]) == 4


HEX = "resp_0ad2d29c24eaf56b0068ffe707a7908193b7afc6351d80e23c"


def encoded(text: str) -> str:
    """A response's id with this text in it."""
    return "resp_" + base64.b64encode(text.encode()).decode()


@pytest.mark.parametrize(
    "id_",
    [
        HEX,
        "67cb71b3-not-openai",
        encoded("a;b;response_id:c"),
        encoded(f"litellm:custom_llm_provider:openai;model_id:a1b2;response_id:{HEX}"),
    ],
)
async def test_ids_on_the_wire(server: ResponsesServer, engine: LiteLLMEngine, id_: str) -> None:
    """A response's id is the provider's own, in the reply and in the next request, a litellm proxy's too."""
    server.script({"id": id_, "output": [message("Hello.")]}, "Bye.")
    reply = await engine.generate(request("Hi"))
    assert reply.service_session_id == id_
    await engine.generate(request("Bye", session=id_))
    assert server.chained == [None, id_]


async def test_whole_history(server: ResponsesServer, engine: LiteLLMEngine) -> None:
    """A history from elsewhere is told to a new session as a whole, in the provider's own items."""
    thought = reasoning(encrypted_content="gAAA")
    server.script({"output": [thought, *CALLED["output"]]}, {"output": [message("Sent.", phase="final_answer")]}, "Bye")
    asked = await engine.generate(request("Where?", tools=[LOOK_UP]))
    said = await engine.generate(request("Where?", kept(asked), SENT, tools=[LOOK_UP]))
    await engine.generate(request("Where?", kept(asked), SENT, kept(said), "Thanks", keep_at_service=True))
    assert server.inputs[2] == [
        user("Where?"),
        {"type": "reasoning", "summary": [], "encrypted_content": "gAAA"},
        call("c1", "look_up", '{"order_id": "404"}'),
        output("c1", "sent"),
        {**assistant("Sent."), "phase": "final_answer"},
        user("Thanks"),
    ]


async def test_history_of_both_kinds(server: ResponsesServer, engine: LiteLLMEngine) -> None:
    """What was said in one way can be told in the other: chat completions take a response, and the other way round."""
    completions = LiteLLMEngine("openai/test", attempts=1, api_key=KEY, api_base=server.url)
    server.script({"output": [reasoning(encrypted_content="g"), message("Hello.")]}, "Yes?", "Bye.")
    first = await engine.generate(request("Hi"))
    second = await completions.generate(request("Hi", kept(first), "Well"))
    third = await engine.generate(request("Hi", kept(first), "Well", kept(second), "Bye"))
    assert (first.text, second.text, third.text) == ("Hello.", "Yes?", "Bye.")


async def test_service_that_stores_nothing(server: ResponsesServer, engine: LiteLLMEngine) -> None:
    """Where the service says that it has stored nothing, there is no session to go on with."""
    server.script({"output": [message("Hello.")], "store": False})
    assert (await engine.generate(request())).service_session_id is None


async def test_parts(server: ResponsesServer, engine: LiteLLMEngine) -> None:
    """Text, pictures, sound and files are taken by a server that checks their form."""
    parts: list[Part] = [
        TextPart("Look \ud800:"),
        ImagePart(data=b"png", media_type="image/png"),
        AudioPart(data=b"mp3", media_type="audio/mpeg"),
        FilePart(data=b"pdf", media_type="application/pdf", filename="a.pdf"),
        UnknownPart("hologram"),
    ]
    server.script("I see.")
    assert (await engine.generate(request(Message(Role.USER, parts)))).text == "I see."
    kinds = [part["type"] for part in server.inputs[0][0]["content"]]
    assert kinds == ["input_text", "input_image", "input_audio", "input_file", "input_text"]


async def test_malformed_arguments(server: ResponsesServer, engine: LiteLLMEngine) -> None:
    """Arguments that are cut off reach the caller as written, and the call can be answered."""
    server.script(calls(("c1", "look_up", '{"order_id": ')), "Sorry.")
    asked = await engine.generate(request(tools=[LOOK_UP]))
    assert asked.extra == {INVALID_ARGUMENTS_KEY: {"0": '{"order_id": '}, MODEL_KEY: "openai/test"}
    assert (await engine.generate(request(SENT, session=asked.service_session_id))).text == "Sorry."


async def test_cut_off_answer(server: ResponsesServer, engine: LiteLLMEngine) -> None:
    """An answer that reached its longest length says so."""
    details = {"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}}
    server.script({"output": [message("Hel")], **details})
    reply = await engine.generate(request())
    assert (reply.text, reply.finish_reason) == ("Hel", "length")


# -- settings --------------------------------------------------------------------------------------------------------


async def test_settings(server: ResponsesServer) -> None:
    """The engine's settings are sent, and those of a request before them."""
    settings = {"temperature": 0, "max_tokens": 100, "text": {"verbosity": "low"}, "extra_body": {"truncation": "auto"}}
    engine = LiteLLMEngine("openai/test", attempts=1, api_key=KEY, api_base=server.url, settings=settings)
    server.kept["resp_1"] = ()
    server.script("{}")
    await engine.generate(request(session="resp_1", settings={"max_tokens": 200}, tools=[LOOK_UP]))
    (sent,) = server.requests
    assert (sent["temperature"], sent["max_output_tokens"], sent["truncation"]) == (0, 200, "auto")
    assert sent["text"] == {"verbosity": "low"}
    assert sent["previous_response_id"] == "resp_1"


@pytest.mark.parametrize("settings", [{"store": False}, {"previous_response_id": "resp_1"}, {"stop": "x"}])
async def test_refused_settings(server: ResponsesServer, settings: dict[str, Any]) -> None:
    """A setting that can't be is refused when the engine is made, or when a request brings it, before it is sent."""
    (name,) = settings
    with pytest.raises(ValueError, match=f"'{name}'"):
        LiteLLMEngine(service_history=True, settings=settings)
    engine = LiteLLMEngine("openai/test", attempts=1, api_key=KEY, api_base=server.url)
    with pytest.raises(ValueError, match=f"'{name}'"):
        await engine.generate(request(keep_at_service=True, settings=settings))
    assert server.requests == []


def test_service_history_of_another_type() -> None:
    """Whether the service keeps the history is True or False."""
    wrong: Any = "yes"
    with pytest.raises(TypeError, match="service_history must be True or False, not 'yes'"):
        LiteLLMEngine(service_history=wrong)


# -- sessions that can't be gone on with -----------------------------------------------------------------------------


async def test_mapping(server: ResponsesServer, engine: LiteLLMEngine) -> None:
    """A session that is a mapping is refused by the engine's name and its keys, and nothing is sent."""
    with pytest.raises(exceptions.EngineBadRequestError, match=r"LiteLLMEngine .*'context_id', 'task_id'") as caught:
        await engine.generate(request(session={"context_id": "secret", "task_id": "secret"}))
    assert type(caught.value) is exceptions.EngineBadRequestError
    assert "secret" not in str(caught.value)
    assert server.requests == []


@pytest.mark.parametrize(("id_", "status"), [("resp_9", 400), ("conv_9", 404), ("another", 400)])
async def test_unknown_session(server: ResponsesServer, engine: LiteLLMEngine, id_: str, status: int) -> None:
    """A session that the service does not know is lost, and the error says what to do."""
    with pytest.raises(exceptions.ServiceSessionLostError, match="on_lost_service_session='replay'") as caught:
        await engine.generate(request(session=id_))
    assert (caught.value.status, id_ in str(caught.value)) == (status, True)
    assert len(server.requests) == 1


@pytest.mark.parametrize(
    "answer",
    [
        error(400, "gone", code="previous_response_not_found"),
        error(404, "Response with id 'resp_1' not found."),
        error(404, "resp_1 does not exist", code="not_found"),
        Status(404, {"message": "response resp_1 not found"}),
    ],
)
async def test_unknown_session_in_other_words(server: ResponsesServer, engine: LiteLLMEngine, answer: Status) -> None:
    """Services that say it in other words than OpenAI are understood if they name the session."""
    server.kept["resp_1"] = ()
    server.script(answer)
    with pytest.raises(exceptions.ServiceSessionLostError):
        await engine.generate(request(session="resp_1"))


@pytest.mark.parametrize(
    "answer",
    [
        error(404, "The model 'test' does not exist", code="model_not_found"),
        Status(404, b"no such page: resp_1"),
        Status(404, b'{"detail": "not found"}'),
        Status(404, b'{"error":' * 10_000),
        error(400, "Invalid 'previous_response_id': 'resp_1'."),
    ],
)
async def test_what_is_no_lost_session(server: ResponsesServer, engine: LiteLLMEngine, answer: Status) -> None:
    """Another thing that is not found, or that is wrong, does not make the session a lost one."""
    server.kept["resp_1"] = ()
    server.script(answer)
    with pytest.raises(exceptions.EngineBadRequestError) as caught:
        await engine.generate(request(session="resp_1"))
    assert type(caught.value) is exceptions.EngineBadRequestError


async def test_failure_that_names_the_session(server: ResponsesServer, engine: LiteLLMEngine) -> None:
    """A service that fails has lost nothing, whatever it says."""
    server.kept["resp_1"] = ()
    server.script(error(503, "The shard of resp_1 was not found."))
    with pytest.raises(exceptions.EngineUnavailableError):
        await engine.generate(request(session="resp_1"))


async def test_not_found_without_a_session(server: ResponsesServer, engine: LiteLLMEngine) -> None:
    """Where no session was named none can be lost."""
    server.script(error(400, "No tool output found for function call c1.", code="previous_response_not_found"))
    with pytest.raises(exceptions.EngineBadRequestError) as caught:
        await engine.generate(request())
    assert type(caught.value) is exceptions.EngineBadRequestError


@pytest.mark.parametrize(
    ("items", "said"), [([call("c1", "look_up", "{}")], "And now?"), ([user("Hi"), assistant("Hello.")], SENT)]
)
async def test_session_that_does_not_fit(
    server: ResponsesServer, engine: LiteLLMEngine, items: list[Any], said: Message | str
) -> None:
    """A conversation with a call that was never answered, or without the one that is, can't be gone on with."""
    with pytest.raises(exceptions.ServiceSessionLostError):
        await engine.generate(request(said, session=server.new_conversation(*items)))


async def test_answer_that_nobody_heard(server: ResponsesServer, engine: LiteLLMEngine) -> None:
    """A conversation holds what was answered to nobody, so that a question asked again stands in it twice."""
    id_ = server.new_conversation()
    server.script(Unheard("I am."), "I am.")
    with pytest.raises(exceptions.EngineUnavailableError):
        await engine.generate(request("Are you there?", session=id_))
    await engine.generate(request("Are you there?", session=id_))
    assert server.conversations[id_].count(user("Are you there?")) == 2


async def test_answer_that_nobody_heard_in_a_chain(server: ResponsesServer, engine: LiteLLMEngine) -> None:
    """What was answered to nobody is no part of what goes on from the response before it."""
    server.script("Hello.", Unheard("I am."), "I am.")
    session = (await engine.generate(request("Hi"))).service_session_id
    with pytest.raises(exceptions.EngineUnavailableError):
        await engine.generate(request("Are you there?", session=session))
    reply = await engine.generate(request("Are you there?", session=session))
    assert server.kept[str(reply.service_session_id)].count(user("Are you there?")) == 1


async def test_busy_conversation(server: ResponsesServer, engine: LiteLLMEngine) -> None:
    """A conversation that another request is at work on is to be tried again."""
    words = "Another process is currently operating on this conversation. Please retry in a few seconds."
    server.script(error(400, words, code="conversation_locked"))
    with pytest.raises(exceptions.EngineUnavailableError, match=r"try again .*HTTP 400, conversation_locked"):
        await engine.generate(request(session=server.new_conversation()))


# -- failures ------------------------------------------------------------------------------------------------------


OWN_FAILURES: Final[tuple[Failure, ...]] = (
    (
        error(400, "Your input exceeds the context window of this model.", code="context_length_exceeded"),
        exceptions.ContextWindowError,
        400,
    ),
    (Status(200, {"output": None}), exceptions.EngineUnavailableError, None),
)


@pytest.mark.parametrize(("answer", "kind", "status"), [*FAILURES, *OWN_FAILURES])
async def test_failures(
    server: ResponsesServer,
    engine: LiteLLMEngine,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
    answer: Any,
    kind: type[exceptions.EngineError],
    status: int | None,
) -> None:
    """Each failure is one request and an error of its kind, and neither shows nor logs the key or the prompt."""
    server.script(answer, "never said")
    await fails(engine.generate(request(session=server.new_conversation())), server, kind, status, caplog, capsys)


@pytest.mark.parametrize(
    ("fields", "kind"),
    [
        (
            {"status": "failed", "error": {"code": "server_error", "message": QUESTION}},
            exceptions.EngineUnavailableError,
        ),
        (
            {"status": "failed", "error": {"code": "rate_limit_exceeded", "message": QUESTION}},
            exceptions.EngineRateLimitError,
        ),
        ({"status": "cancelled"}, exceptions.EngineUnavailableError),
        ({"output": None}, exceptions.EngineUnavailableError),
    ],
)
async def test_response_that_failed(
    server: ResponsesServer, engine: LiteLLMEngine, fields: dict[str, Any], kind: type[exceptions.EngineError]
) -> None:
    """A response that says itself that it failed is an error too, of one request, without the provider's text."""
    server.script(fields)
    with pytest.raises(kind) as caught:
        await engine.generate(request())
    assert QUESTION not in str(caught.value)
    assert len(server.requests) == 1


async def test_retry_after(server: ResponsesServer, engine: LiteLLMEngine) -> None:
    """The seconds that a provider asks to wait are kept."""
    server.script(error(429, "no", headers={"retry-after": "7"}))
    with pytest.raises(exceptions.EngineRateLimitError) as caught:
        await engine.generate(request())
    assert caught.value.retry_after == 7


async def test_retries_set_globally(
    server: ResponsesServer, engine: LiteLLMEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failure is one request, also where retries are switched on in litellm itself."""
    monkeypatch.setattr(sys.modules["litellm"], "num_retries", 3)
    server.script(*[error(500, "no")] * 4)
    with pytest.raises(exceptions.EngineUnavailableError):
        await engine.generate(request())
    assert len(server.requests) == 1


async def test_hanging_server(server: ResponsesServer) -> None:
    """A server that never answers is asked once, and given up after the timeout."""
    server.script(HANG)
    engine = LiteLLMEngine("openai/test", attempts=1, api_key=KEY, api_base=server.url, timeout=1, service_history=True)
    with pytest.raises(exceptions.EngineTimeoutError, match="within 1 s"):
        await engine.generate(request())
    assert len(server.requests) == 1


async def test_refused_connection() -> None:
    """A server that is not there is unavailable."""
    engine = LiteLLMEngine(
        "openai/test", attempts=1, api_key=KEY, api_base="http://127.0.0.1:1/v1", service_history=True
    )
    with pytest.raises(exceptions.EngineUnavailableError):
        await engine.generate(request())


# -- the server of the tests -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "status", "said"),
    [
        ({"input": []}, 400, "must be provided"),
        ({"input": [user("Hi")], "max_tokens": 1}, 400, "Unknown parameter: 'max_tokens'"),
        ({"input": [{"role": "user"}]}, 400, "Missing required parameter: 'input[0].content'"),
        ({"input": [{**user("Hi"), "phase": "commentary"}]}, 400, "Unknown parameter: 'input[0].phase'"),
        ({"input": [{"role": "system", "content": "x"}]}, 400, "Invalid value: 'system'"),
        ({"input": [{"type": "bogus"}]}, 400, "Invalid value: 'bogus'"),
        ({"input": [user("Hi"), reasoning()]}, 400, "Item with id 'rs_1' not found"),
        ({"input": [call("c1", "f", "{}")]}, 400, "No tool output found for function call c1"),
        ({"input": [output("c1", "x")]}, 400, "No tool call found for function call output with call_id c1"),
        ({"input": [call("c1", "f", "{}"), output("c1", "x"), output("c1", "x")]}, 400, "No tool call found"),
        ({"input": [], "previous_response_id": "resp_0"}, 400, "Previous response with id 'resp_0' not found"),
        ({"input": [], "conversation": "conv_0"}, 404, "Conversation with id 'conv_0' not found"),
        ({"input": [], "conversation": "c", "previous_response_id": "r"}, 400, "Mutually exclusive parameters"),
        ({"input": [user("Hi")], "tools": [{"type": "function", "function": {}}]}, 400, "'tools[0].name'"),
        ({"input": [user("Hi")], "text": {"format": {"type": "json_schema"}}}, 400, "'text.format.name'"),
    ],
)
def test_server_refuses(body: dict[str, Any], status: int, said: str) -> None:
    """The test's server refuses what OpenAI does, with its status and its words."""
    refused = ResponsesServer("").refusal({"model": "m", **body})
    assert refused is not None
    assert refused.status == status
    assert said in json.dumps(refused.body, ensure_ascii=False)


# -- calls that wait for a person ------------------------------------------------------------------------------------


def paying(engine: LiteLLMEngine) -> Agent:
    """An agent whose refund a person has to approve."""

    def refund(euros: int) -> str:
        """Pay it back."""
        return f"{euros} paid"

    return Agent("Support", tools=[Tool(refund, requires_approval=True)], engine=engine)


async def test_approved_call(engine: LiteLLMEngine, server: ResponsesServer) -> None:
    """A call that was approved is answered where the service waits for it."""
    server.script(calls(("c1", "refund", '{"euros": 5}')), "Paid.")
    agent = paying(engine)
    session = agent.create_session()
    assert (await agent.run("refund it", session=session)).stop_reason == "approval"
    assert (await agent.approve("c1", session=session)).content == "Paid."
    assert server.inputs == [[user("refund it")], [output("c1", "5 paid")]]
    assert [after is None for after in server.chained] == [True, False]


async def test_call_approved_after_a_message(engine: LiteLLMEngine, server: ResponsesServer) -> None:
    """With a message in between the service is told that the call waits, and later of its result, in a user's words."""
    server.script(calls(("c1", "refund", '{"euros": 5}')), "It waits.", "Paid.")
    agent = paying(engine)
    session = agent.create_session()
    await agent.run("refund it", session=session)
    assert (await agent.run("well?", session=session)).content == "It waits."
    assert (await agent.approve("c1", session=session)).content == "Paid."
    late = "(The result of an earlier call of the tool refund has arrived only now: 5 paid)"
    assert server.inputs == [[user("refund it")], [output("c1", AWAITING), user("well?")], [user(late)]]
    assert [after is None for after in server.chained] == [True, False, False]


@pytest.mark.parametrize(
    "output",
    [
        {"type": "message", "id": "m", "role": "assistant", "content": [{"type": "output_text", "text": 1.5}]},
        {"type": "message", "id": "m", "role": "assistant", "content": True},
        {"type": "function_call", "id": "f", "call_id": 5, "name": "look_up", "arguments": "{}"},
        {"type": "function_call", "id": "f", "call_id": "c", "name": "look_up", "arguments": {"n": 1}},
        "text",
    ],
    ids=["text", "content", "id", "arguments", "item"],
)
async def test_answer_of_another_form(server: ResponsesServer, engine: LiteLLMEngine, output: object) -> None:
    """An answer whose fields are of other types than they should be is an error like any that can't be read."""
    server.script(
        Status(200, {"id": "resp_1", "object": "response", "created_at": 1, "output": [output], "model": "m"})
    )
    with pytest.raises(exceptions.EngineUnavailableError, match=r"can't be read|failed"):
        await engine.generate(request("Hi"))
