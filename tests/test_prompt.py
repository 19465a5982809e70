from __future__ import annotations

import datetime as dt
import random
from collections.abc import Sequence
from itertools import dropwhile
from typing import Any, Final

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mistral_common.protocol.instruct import messages as mistral
from mistral_common.protocol.instruct import tool_calls as mistral_tools
from mistral_common.protocol.instruct.validator import MistralRequestValidatorV13, ValidationMode

from chatflow.core.history import History
from chatflow.core.messages import Content, ImagePart, Message, Role, TextPart, ToolCall, ToolResult
from chatflow.core.prompt import ARRIVED, EMPTY_TEXT, INTERRUPTED, Prompt, _as_it_stands, _mended, to_prompt
from chatflow.core.pruning import prune
from tests.strategies import any_history

SECRET: Final = "account 4711"
"""Part of all drawn text, so that a quotation shows."""


# --- two judges that know nothing of how a prompt is made -------------------------------------------------------------


def is_blank(content: Content) -> bool:
    """Whether a provider would see nothing in *content*."""
    if content is None or isinstance(content, str):
        return (content or "").strip() == ""
    return not any(not isinstance(part, TextPart) or part.text.strip() for part in content)


def faults(messages: Sequence[Message]) -> list[str]:
    """What a provider would refuse in *messages*, by the rules of OpenAI, Anthropic and Gemini."""
    systems = [message for message in messages if message.role is Role.SYSTEM]
    body = messages[len(systems) :]
    ids = [call.id for message in messages for call in message.tool_calls]
    found = {
        "a system message after the others": any(message.role is Role.SYSTEM for message in body),
        "the first to speak is not the user": body and body[0].role is not Role.USER,
        "an empty id": not all(call_id.strip() for call_id in ids),
        "an id that stands twice": len(set(ids)) < len(ids),
        "a message that says nothing": any(
            is_blank(message.content)
            for message in messages
            if message.role is not Role.TOOL and not message.tool_calls
        ),
    }
    return [fault for fault, is_there in found.items() if is_there] + unanswered(body)


def unanswered(messages: Sequence[Message]) -> list[str]:
    """Where calls and the results directly after them differ."""
    found: list[str] = []
    waiting: list[tuple[str, str]] = []
    for message in messages:
        given = [(result.tool_call_id, result.name) for result in message.tool_results]
        if given != waiting:
            found.append(f"calls {waiting} are answered by {given}")
        waiting = [(call.id, call.name) for call in message.tool_calls]
    return [*found, *(f"call {call} is not answered at the end" for call in waiting)]


def as_mistral(message: Message) -> list[Any]:
    """*message* as Mistral's own client has it."""
    if message.role is Role.SYSTEM:
        return [mistral.SystemMessage(content=message.text)]
    if message.role is Role.USER:
        return [mistral.UserMessage(content=message.text)]
    if message.role is Role.TOOL:
        return [
            mistral.ToolMessage(tool_call_id=result.tool_call_id, name=result.name, content=repr(result.content))
            for result in message.tool_results
        ]
    calls = [
        mistral_tools.ToolCall(id=call.id, function=mistral_tools.FunctionCall(name=call.name, arguments="{}"))
        for call in message.tool_calls
    ]
    return [mistral.AssistantMessage(content=message.text or None, tool_calls=calls or None)]


def check_valid(messages: Sequence[Message]) -> None:
    """Fail unless both judges take *messages*; a list that ends with a model's words is a conversation, no question."""
    assert faults(messages) == []
    if any(message.role is not Role.SYSTEM for message in messages):
        mode = ValidationMode.agnostic if messages[-1].role is Role.MODEL else ValidationMode.test
        theirs = [each for message in messages for each in as_mistral(message)]
        MistralRequestValidatorV13(mode=mode).validate_messages(theirs)


# --- any list of messages ---------------------------------------------------------------------------------------------

IDS: Final = st.sampled_from(["a", "b", "c", "", " ", "null", "call00001", "call00002"])
NAMES: Final = st.sampled_from(["f", "g"])
TEXTS: Final = st.sampled_from([None, "", " \n", f"hello, {SECRET}", f"well, {SECRET}"])
PARTS: Final = st.lists(
    st.sampled_from([TextPart(""), TextPart(SECRET), ImagePart(url="https://example.com/a.png")]), max_size=3
).map(tuple)
CONTENTS: Final = TEXTS | PARTS
CALLS: Final = st.builds(ToolCall, id=IDS, name=NAMES, args=st.just({"q": SECRET}))
RESULTS: Final = st.builds(ToolResult, tool_call_id=IDS, name=NAMES, content=st.just(SECRET), is_error=st.booleans())
MESSAGES: Final = st.one_of(
    st.builds(Message, st.just(Role.USER), CONTENTS),
    st.builds(Message, st.just(Role.USER), CONTENTS),
    st.builds(Message, st.just(Role.MODEL), CONTENTS, tool_calls=st.lists(CALLS, max_size=3)),
    st.builds(Message, st.just(Role.MODEL), CONTENTS, tool_calls=st.lists(CALLS, min_size=1, max_size=3)),
    st.builds(Message, st.just(Role.TOOL), tool_results=st.lists(RESULTS, min_size=1, max_size=3)),
    st.builds(Message, st.just(Role.TOOL), tool_results=st.lists(RESULTS, min_size=1, max_size=3)),
    st.builds(Message, st.just(Role.SYSTEM), CONTENTS),
)


def numbered(messages: list[Message]) -> list[Message]:
    """*messages*, each with a timestamp, an extra, and results of its own, by which it can be told from the others."""
    return [
        attrs.evolve(
            message,
            timestamp=at(position),
            extra={"position": position},
            tool_results=[
                attrs.evolve(result, content=f"{SECRET} {position}.{index}")
                for index, result in enumerate(message.tool_results)
            ],
        )
        for position, message in enumerate(messages)
    ]


def at(position: int) -> dt.datetime:
    """The time of the message at *position*."""
    return dt.datetime(2026, 1, 1, tzinfo=dt.UTC) + dt.timedelta(minutes=position)


HISTORIES: Final = (st.lists(MESSAGES, max_size=14) | any_history).map(numbered)
INSTRUCTIONS: Final = st.sampled_from([None, "", " ", f"Help with {SECRET}."])


@attrs.define
class Pair:
    """A call, where it stands, and the results that belong to it, with where those stand."""

    position: int
    call: ToolCall
    results: list[tuple[int, ToolResult]]


def pairs(history: Sequence[Message]) -> list[Pair]:
    """All calls after the first user message: the rule of pairing, written as slowly as it reads."""
    found: list[Pair] = []
    answered: dict[str, Pair] = {}
    begun = False
    for position, message in enumerate(history):
        begun = begun or message.role is Role.USER
        if not begun:
            continue
        found += [Pair(position, call, []) for call in message.tool_calls]
        for result in message.tool_results:
            open_pairs = [pair for pair in found if pair.call.id == result.tool_call_id and not pair.results]
            nearest = [pair for pair in open_pairs if pair.position == open_pairs[-1].position][:1]
            pair = nearest[0] if nearest else answered.get(result.tool_call_id)
            if pair is not None:
                pair.results.append((position, result))
                answered[result.tool_call_id] = pair
    return found


def sent_calls(prompt: Prompt) -> list[tuple[ToolCall, ToolResult]]:
    """The calls of a prompt, in order, each with its result."""
    calls = [call for message in prompt.messages for call in message.tool_calls]
    results = [result for message in prompt.messages for result in message.tool_results]
    return list(zip(calls, results, strict=True))


def body_of(prompt: Prompt) -> list[Message]:
    """What follows the system messages."""
    return [message for message in prompt.messages if message.role is not Role.SYSTEM]


# --- properties -------------------------------------------------------------------------------------------------------


@given(HISTORIES, INSTRUCTIONS)
def test_any_list_gives_a_valid_prompt(history: list[Message], instructions: str | None) -> None:
    """Whatever messages there are, what is sent is valid: the row "always-valid prompt" of our peers' faults."""
    check_valid(to_prompt(history, instructions).messages)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_hundred_thousand_lists_give_valid_prompts() -> None:
    """None of 100,000 random histories gives a prompt that is refused."""
    chance = random.Random(4711)
    ids = ["a", "b", "c", "d", "e", "", " ", "null", "call00001", "call00002"]
    says = [user(), user(), user(""), model("hello"), model(" "), Message(Role.SYSTEM, "s"), Message(Role.SYSTEM, "")]
    calls = [model(None, *map(call, chance.choices(ids, k=count))) for count in [1, 1, 2, 3] * 5]
    answers = [tool(*map(result, chance.choices(ids, k=count))) for count in [1, 1, 2, 3] * 5]
    for _ in range(100_000):
        kinds = chance.choices([says, calls, answers], k=chance.randrange(30))
        check_valid(to_prompt([chance.choice(kind) for kind in kinds], "Help.").messages)


@given(HISTORIES)
def test_each_call_goes_out_in_order_with_its_last_result(history: list[Message]) -> None:
    """All calls after the first user message are sent, in order, each with the last result that belongs to it."""
    sent = [(call.name, call.args, result.content) for call, result in sent_calls(to_prompt(history))]
    expected = [
        (pair.call.name, pair.call.args, pair.results[-1][1].content if pair.results else INTERRUPTED)
        for pair in pairs(history)
    ]
    assert sent == expected


@given(HISTORIES)
def test_an_error_stays_an_error(history: list[Message]) -> None:
    """A result is sent as an error if it is one, or if it is missing."""
    sent = [result.is_error for _, result in sent_calls(to_prompt(history))]
    assert sent == [not pair.results or pair.results[-1][1].is_error for pair in pairs(history)]


@given(HISTORIES)
def test_what_users_and_models_said_is_sent_in_order(history: list[Message]) -> None:
    """Every user message is sent, and every model message after it that has text or calls; in order, in its words."""
    begun = dropwhile(lambda message: message.role is not Role.USER, history)
    spoken = [message for message in begun if message.role in {Role.USER, Role.MODEL}]
    expected = [
        (message.role, EMPTY_TEXT if message.role is Role.USER and is_blank(message.content) else message.text)
        for message in spoken
        if message.role is Role.USER or message.tool_calls or not is_blank(message.content)
    ]
    sent = [message for message in body_of(to_prompt(history)) if message.role is not Role.TOOL]
    assert [(message.role, message.text) for message in sent if message.content != ARRIVED] == expected


@given(HISTORIES)
def test_provider_fields_stay_with_their_message(history: list[Message]) -> None:
    """A user's or model's message that is sent has the extra, the calls in number and order, and the time it had."""
    for message in to_prompt(history).messages:
        if message.role in {Role.USER, Role.MODEL} and message.content != ARRIVED:
            stored = history[message.extra["position"]]
            assert (message.extra, message.timestamp) == (stored.extra, stored.timestamp)
            assert [call.args for call in message.tool_calls] == [call.args for call in stored.tool_calls]


@given(HISTORIES, INSTRUCTIONS)
def test_a_prompt_depends_on_its_arguments_alone(history: list[Message], instructions: str | None) -> None:
    """The same arguments give the same prompt, and are left as they were."""
    before = list(history)
    prompt = to_prompt(history, instructions)
    assert to_prompt(tuple(history), instructions) == prompt
    assert history == before


@given(HISTORIES)
def test_a_valid_history_is_sent_as_it_is(history: list[Message]) -> None:
    """A history that is valid already, as every prompt is, is sent message by message, and nothing is repaired."""
    valid = to_prompt(history).messages
    prompt = to_prompt(valid)
    assert all(mine is theirs for mine, theirs in zip(prompt.messages, valid, strict=True))
    assert prompt.repairs == ()


@given(st.lists(HISTORIES, min_size=1, max_size=3))
def test_what_is_sent_as_it_stands_needs_no_mending(histories: list[list[Message]]) -> None:
    """A history that is found valid in one look is one that mending leaves as it is, message by message."""
    for history in (*histories, [message for each in histories for message in each]):
        for valid in (history, to_prompt(history).messages):
            found = _as_it_stands(valid)
            mended = _mended(valid, 0)
            if found is not None:
                assert list(map(id, found)) == list(map(id, mended.messages))
                assert mended.repairs == ()
        assert _as_it_stands(to_prompt(history).messages) is not None


@given(HISTORIES)
def test_nothing_is_changed_without_a_repair(history: list[Message]) -> None:
    """Where no repair is reported, each message's content, call and result goes out as it is stored."""

    def inside(messages: Sequence[Message]) -> list[str]:
        items: list[Any] = []
        for message in messages:
            items += [(message.role, message.content)] if message.role is not Role.TOOL else []
            items += [*message.tool_calls, *message.tool_results]
        return sorted(map(repr, items))

    prompt = to_prompt(history)
    if not prompt.repairs:
        assert inside(prompt.messages) == inside(history)


@given(HISTORIES, st.data())
def test_a_longer_history_begins_as_the_shorter_one_did(history: list[Message], data: st.DataObject) -> None:
    """What a shorter history gives stays as it is when messages follow, up to the first call that they answer."""
    cut = data.draw(st.integers(0, len(history)))
    shorter, longer = body_of(to_prompt(history[:cut])), body_of(to_prompt(history))
    answered_later = [
        pair.position
        for pair in pairs(history)
        if pair.position < cut and any(position >= cut for position, _ in pair.results)
    ]
    unchanged = len(shorter)
    if answered_later:
        unchanged = [message.timestamp for message in shorter].index(at(min(answered_later)))
    assert longer[:unchanged] == shorter[:unchanged]


@given(HISTORIES)
def test_repairs_quote_nothing(history: list[Message]) -> None:
    """Repairs name messages by place and calls by id, and never quote what was said."""
    assert SECRET not in str(to_prompt(history).repairs)


@given(HISTORIES, st.integers(1, 3))
def test_pruning_before_changes_no_pair_that_stays(history: list[Message], max_turns: int) -> None:
    """What is sent of a pruned history is the end of what is sent of the whole one, pair by pair."""
    kept = sent_calls(to_prompt(prune(history, max_turns)))
    whole = sent_calls(to_prompt(history))
    contents = [result.content for _, result in kept]
    assert contents == [result.content for _, result in whole[len(whole) - len(kept) :]]


# --- examples ---------------------------------------------------------------------------------------------------------


def user(content: Any = "hi") -> Message:
    """A user's message."""
    return Message(Role.USER, content)


def model(content: str | None = None, *calls: ToolCall, **extra: Any) -> Message:
    """A model's message."""
    return Message(Role.MODEL, content, tool_calls=calls, extra=extra)


def call(call_id: str, name: str = "f") -> ToolCall:
    """A call."""
    return ToolCall(id=call_id, name=name, args={"for": call_id})


def tool(*results: ToolResult, **extra: Any) -> Message:
    """A tool's message."""
    return Message(Role.TOOL, tool_results=results, extra=extra)


def result(call_id: str, content: Any = "ok", name: str = "f") -> ToolResult:
    """A result."""
    return ToolResult(tool_call_id=call_id, name=name, content=content)


def test_instructions_come_first() -> None:
    """The instructions stand before the stored system messages, which keep their order, wherever they stood."""
    first, second = Message(Role.SYSTEM, "one"), Message(Role.SYSTEM, "two")
    prompt = to_prompt([first, user(), second, model("hello")], "Be kind.")
    assert [message.text for message in prompt.messages] == ["Be kind.", "one", "two", "hi", "hello"]
    assert prompt.messages[0].role is Role.SYSTEM
    assert prompt.repairs == ()


@pytest.mark.parametrize("instructions", [None, "", " \n"])
def test_no_instructions(instructions: str | None) -> None:
    """Without instructions no message stands for them."""
    assert to_prompt([user("a")], instructions).messages[0].role is Role.USER


def test_system_message_without_content() -> None:
    """A system message that says nothing is left out."""
    prompt = to_prompt([Message(Role.SYSTEM, None), user()])
    assert [message.role for message in prompt.messages] == [Role.USER]
    assert prompt.repairs == ("message 0: a system message without content; left out",)


def test_what_comes_before_the_user() -> None:
    """What stands before the first user message is not sent, nor a result whose call stood there."""
    prompt = to_prompt([model("greeting"), model(None, call("a")), user(), tool(result("a")), model("hello")])
    assert [message.text for message in prompt.messages] == ["hi", "hello"]
    assert prompt.repairs == (
        "message 0: a model message before the first user message; left out",
        "message 1: a model message before the first user message; left out",
        "message 3: the result for 'a' has no call; left out",
    )


def test_no_user_message() -> None:
    """Without a user message only system messages are sent."""
    system = Message(Role.SYSTEM, "s")
    assert to_prompt([system, tool(result("a")), model("hello")]).messages == (system,)
    assert to_prompt([]) == Prompt(())


def test_complete_history_is_untouched() -> None:
    """A valid history goes out as the very messages that are stored, also when it is a session's own."""
    messages = [user(), model("let me see", call("a"), call("b")), tool(result("a"), result("b")), model("done")]
    prompt = to_prompt(History([], 0, messages, 0, len(messages)))
    assert all(mine is theirs for mine, theirs in zip(prompt.messages, messages, strict=True))
    assert prompt.repairs == ()


def test_results_stored_apart_are_gathered() -> None:
    """Results in several tool messages, in any order, go out in one, in call order; that is no repair."""
    prompt = to_prompt(
        [user(), model(None, call("a"), call("b")), tool(result("b", 2), late=1), tool(result("a", 1), late=2, own=3)]
    )
    assert [each.content for each in prompt.messages[2].tool_results] == [1, 2]
    assert prompt.messages[2].extra == {"late": 2, "own": 3}
    assert len(prompt.messages) == 3
    assert prompt.repairs == ()


def test_late_result_is_moved_to_its_call() -> None:
    """A result that came turns later stands directly after its call."""
    question, answer = user("second"), tool(result("a", "late"))
    prompt = to_prompt([user(), model(None, call("a")), question, answer, model("done")])
    assert prompt.messages[2:4] == (answer, question)
    assert prompt.repairs == ("message 3: the result for 'a' came late; moved to its call",)


def test_late_result_after_the_models_words() -> None:
    """Where a late result comes and the model spoke last, a note stands for it: a prompt never ends with a model's."""
    history = [user(), model(None, call("a")), user("meanwhile"), model("yes?"), tool(result("a", "late"))]
    prompt = to_prompt(history)
    assert [message.text for message in body_of(prompt)] == ["hi", "", "", "meanwhile", "yes?", ARRIVED]
    assert prompt.messages[-1].role is Role.USER
    assert prompt.messages[-1].timestamp == history[-1].timestamp
    assert prompt.repairs == (
        "message 4: the result for 'a' came late; moved to its call",
        "message 4: a note to the model stands where a late result came",
    )


def test_unanswered_call() -> None:
    """A call without a result is answered as interrupted, at the time of the call; what is stored stays open."""
    question = model("running", call("a"), call("b"))
    prompt = to_prompt([user(), question, tool(result("b")), user("hello?")])
    first, second = prompt.messages[2].tool_results
    assert (first.tool_call_id, first.content, first.is_error) == ("a", INTERRUPTED, True)
    assert (second.tool_call_id, second.content, second.is_error) == ("b", "ok", False)
    assert prompt.repairs == ("message 1: the call 'a' has no result; answered as interrupted",)


def test_unanswered_calls_alone() -> None:
    """Where no call of a message has a result, the message that answers them is of the caller's time and agent."""
    question = Message(Role.MODEL, tool_calls=[call("a")], agent_name="Support")
    answer = to_prompt([user(), question]).messages[-1]
    assert (answer.role, answer.agent_name, answer.timestamp) == (Role.TOOL, "Support", question.timestamp)


def test_repeated_result() -> None:
    """Of two results of one call the later one is sent, in the place of the first: it is the news."""
    prompt = to_prompt(
        [user(), model(None, call("a")), tool(result("a", "pending")), model("wait"), user(), tool(result("a", "done"))]
    )
    assert [each.content for message in prompt.messages for each in message.tool_results] == ["done"]
    assert [message.role.value for message in prompt.messages] == ["user", "model", "tool", "model", "user"]
    assert prompt.repairs == ("message 5: another result for 'a'; sent in place of the one before",)


def test_result_without_a_call() -> None:
    """A result that answers nothing is left out, and those beside it stay."""
    prompt = to_prompt([user(), model(None, call("a")), tool(result("ghost"), result("a"), own=1)])
    assert [each.tool_call_id for each in prompt.messages[2].tool_results] == ["a"]
    assert prompt.messages[2].extra == {"own": 1}
    assert prompt.repairs == ("message 2: the result for 'ghost' has no call; left out",)


def test_ids_used_again() -> None:
    """An id that was sent before becomes a new one, in call and result; the first of its kind stays."""
    turn = [model(None, call("X"), signature="s"), tool(result("X"))]
    prompt = to_prompt([user(), *turn, *turn, *turn])
    assert [each.id for each, _ in sent_calls(prompt)] == ["X", "call00001", "call00002"]
    assert [each.tool_call_id for _, each in sent_calls(prompt)] == ["X", "call00001", "call00002"]
    assert prompt.messages[1] is turn[0]
    assert prompt.messages[3].extra == {"signature": "s"}
    assert prompt.repairs[0] == "message 3: the call id 'X' is empty or stands before; sent as call00001"


def test_one_id_twice_in_a_message() -> None:
    """Two calls of one id in one message are told apart, each with its own result."""
    prompt = to_prompt([user(), model(None, call("X"), call("X")), tool(result("X", 1), result("X", 2))])
    assert [(each.id, answer.content) for each, answer in sent_calls(prompt)] == [("X", 1), ("call00001", 2)]


@pytest.mark.parametrize("call_id", ["", " ", "null"])
def test_ids_that_are_none(call_id: str) -> None:
    """An empty id, or what a missing one turns into on the way, becomes one of nine letters and digits."""
    prompt = to_prompt([user(), model(None, call(call_id)), tool(result(call_id))])
    assert [(each.id, answer.tool_call_id) for each, answer in sent_calls(prompt)] == [("call00001", "call00001")]


def test_new_ids_give_way() -> None:
    """A new id is none that was sent before; a provider's id that comes later gives way itself."""
    prompt = to_prompt([user(), model(None, call("call00001"), call(""), call("call00002"))])
    assert [each.id for each, _ in sent_calls(prompt)] == ["call00001", "call00002", "call00003"]


def test_result_under_another_name() -> None:
    """A result goes out under the name of the tool that was called: Gemini matches by it."""
    prompt = to_prompt([user(), model(None, call("a")), tool(result("a", name="other"))])
    assert prompt.messages[2].tool_results[0].name == "f"
    assert prompt.repairs == ("message 2: the result for 'a' names another tool; renamed",)


@pytest.mark.parametrize("content", [None, "", " \n", (), (TextPart(""), TextPart(" "))])
def test_user_message_without_content(content: Content) -> None:
    """A user message without content is sent with words that say so."""
    prompt = to_prompt([user(content), model("hm")])
    assert [message.text for message in prompt.messages] == [EMPTY_TEXT, "hm"]
    assert prompt.repairs == ("message 0: a user message without content; sent as '(empty message)'",)


def test_empty_text_among_parts() -> None:
    """Empty text beside a picture is left out, which providers refuse, and the picture stays."""
    picture = ImagePart(url="https://example.com/a.png")
    prompt = to_prompt([user([TextPart(""), picture, TextPart("this?")])])
    assert prompt.messages[0].content == (picture, TextPart("this?"))
    assert prompt.repairs == ("message 0: empty text among the parts of a user message; left out",)


def test_model_message_that_says_nothing() -> None:
    """A model message with neither text nor calls is left out, and its extra with it."""
    prompt = to_prompt([user(), model("", reasoning="deep"), user("still there?")])
    assert [message.text for message in prompt.messages] == ["hi", "still there?"]
    assert prompt.repairs == ("message 1: a model message with neither text nor calls; left out",)


def test_long_ids_are_shortened_in_repairs() -> None:
    """An id of 10,000 characters does not drown a repair."""
    (repair,) = to_prompt([user(), model(None, call("x" * 10_000))]).repairs
    assert len(repair) < 200


# --- the judges -------------------------------------------------------------------------------------------------------


INVALID: Final = {
    "model first": [model("hello")],
    "system message inside": [user(), Message(Role.SYSTEM, "late")],
    "empty system message": [Message(Role.SYSTEM, " "), user()],
    "empty user message": [user(""), model("hm")],
    "empty model message": [user(), model("")],
    "result without call": [user(), tool(result("a"))],
    "unanswered call": [user(), model(None, call("a"))],
    "call answered after the user": [user(), model(None, call("a")), user(), tool(result("a"))],
    "wrong order": [user(), model(None, call("a"), call("b")), tool(result("b"), result("a"))],
    "answered twice": [user(), model(None, call("a")), tool(result("a")), tool(result("a"))],
    "empty id": [user(), model(None, call("")), tool(result(""))],
    "id used twice": [user(), model(None, call("a"), call("a")), tool(result("a"), result("a"))],
}


@pytest.mark.parametrize("messages", INVALID.values(), ids=INVALID)
def test_the_judge_refuses(messages: list[Message]) -> None:
    """The judge of these tests refuses what providers refuse."""
    assert faults(messages) != []
