from __future__ import annotations

import datetime as dt
from typing import Any, Final

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from chatflow.core.codec import entry_from_json, entry_to_json, values_from_json, values_to_json
from chatflow.core.journal import Entry
from chatflow.core.messages import ImagePart, Message, Role, TextPart, ToolCall, ToolResult
from chatflow.core.prompt import INTERRUPTED
from chatflow.core.service import ServiceSession, ServiceStep, digest_of, id_key
from chatflow.core.service_prompt import to_service_prompt
from chatflow.core.values import FrozenDict, thaw
from chatflow.exceptions import SessionFormatError, UnstorableValueError
from tests.strategies import calls, histories, results, says

NOW: Final = dt.datetime(2026, 1, 2, tzinfo=dt.UTC)

names = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=4)
service_ids = st.one_of(names, st.dictionaries(names, st.one_of(names, st.integers(), st.none()), min_size=1))
sessions = st.builds(ServiceSession, service_ids, st.none() | names, st.none() | names, st.integers(0, 2**40))
steps = st.builds(ServiceStep, sessions, st.none() | names, names)


@given(sessions, steps)
def test_comes_back_from_text(session: ServiceSession, step: ServiceStep) -> None:
    """A service's session comes back equal from its stored form, and so does a step from a journal."""
    assert ServiceSession.from_data(values_from_json(values_to_json(session.to_data()))) == session
    entry = Entry(iteration=0, message=says(Role.MODEL, "hi"), service=step)
    assert entry_from_json(entry_to_json(entry)) == entry


@given(service_ids, service_ids)
def test_key_tells_ids_apart(one: Any, other: Any) -> None:
    """Two ids have the same key where they are equal, and only there."""
    assert (id_key(one) == id_key(other)) == (type(one) is type(other) and one == other)


def test_key_and_order() -> None:
    """The order of a mapping's keys makes no other id, and text that looks like a mapping is none."""
    assert id_key({"taskId": "t", "contextId": "c"}) == id_key({"contextId": "c", "taskId": "t"})
    assert id_key('{"contextId":"c"}') != id_key({"contextId": "c"})


def test_found_once_it_was_used() -> None:
    """An id that no engine has used yet is not one to be found by: nobody has said that it is anybody's."""
    assert ServiceSession("resp_1").key is None
    assert ServiceSession("resp_1", service="openai").key == id_key("resp_1")


@pytest.mark.parametrize("empty", ["", {}])
def test_empty_id_is_refused(empty: Any) -> None:
    """An id must not be empty."""
    with pytest.raises(ValueError, match="must not be empty"):
        ServiceSession(empty)


def test_wrong_id_is_refused() -> None:
    """An id is text or a mapping of values that can be kept."""
    wrong: Any = 7
    with pytest.raises(TypeError, match="a string or a mapping, not int"):
        ServiceSession(wrong)
    with pytest.raises(UnstorableValueError, match=r"service_session_id\.task"):
        ServiceSession({"task": object()})


SESSION: Any = {"id": "a", "agent_name": None, "service": None, "seen": 0}


@pytest.mark.parametrize(
    "data",
    [None, [], {}, {"id": "a"}, {**SESSION, "id": 1}, {**SESSION, "service": 1}, {**SESSION, "seen": -1}],
)
def test_other_data(data: Any) -> None:
    """What is no form of a service's session is refused."""
    with pytest.raises(TypeError):
        ServiceSession.from_data(data)


@pytest.mark.parametrize("change", [{"after": 1}, {"digest": 1}, {"session": None}, {"more": 1}])
def test_other_step(change: Any) -> None:
    """A journal's line with what is no step is refused as a whole."""
    data = {"session": SESSION, "after": None, "digest": "d", **change}
    text = '{"iteration":0,"service":' + values_to_json(FrozenDict(data)) + "}"
    with pytest.raises(SessionFormatError):
        entry_from_json(text)


def test_frozen() -> None:
    """An id that was given as a mapping can't be changed from outside."""
    given_id = {"contextId": "c", "taskId": "t"}
    session = ServiceSession(given_id)
    given_id["taskId"] = "u"
    assert session.id == {"contextId": "c", "taskId": "t"}
    assert isinstance(session.id, FrozenDict)
    assert thaw(session.id) == {"contextId": "c", "taskId": "t"}


@given(histories(max_size=4), histories(max_size=4))
def test_digest_tells_what_was_said(one: list[Message], other: list[Message]) -> None:
    """Two lists of messages have one digest where they say the same, whenever that was, and only there."""

    def said(messages: list[Message]) -> list[Message]:
        return [attrs.evolve(message, timestamp=NOW, extra={}, agent_name=None, usage=None) for message in messages]

    assert (digest_of(one) == digest_of(other)) == (said(one) == said(other))
    assert digest_of(one) == digest_of(said(one))


# --- what is sent ------------------------------------------------------------------------------------------------


def sent(history: list[Message], seen: int) -> list[Any]:
    """What a service is sent, in short."""
    return [
        message.text or [(result.tool_call_id, result.content) for result in message.tool_results] or message.role
        for message in to_service_prompt(history, seen).messages
    ]


@given(histories(), st.integers(0, 16))
def test_valid_for_a_service_that_keeps_the_rest(history: list[Message], seen: int) -> None:
    """Each call that the service has made last is answered once, first, and under its own id; then come valid pairs."""
    bodies = [message for message in history if message.role is not Role.SYSTEM]
    seen = max((n for n in range(min(seen, len(bodies)) + 1) if not n or bodies[n - 1].role is Role.MODEL), default=0)
    prompt = to_service_prompt(bodies, seen, "Be brief.")
    assert prompt.messages[0] == attrs.evolve(prompt.messages[0], role=Role.SYSTEM, content="Be brief.")
    rest = list(prompt.messages[1:])
    asked = bodies[seen - 1].tool_calls if seen else ()
    if asked:
        assert [result.tool_call_id for result in rest[0].tool_results] == [call.id for call in asked]
        del rest[0]
    for position, message in enumerate(rest):
        if message.tool_calls:
            answers = rest[position + 1].tool_results
            assert [result.tool_call_id for result in answers] == [call.id for call in message.tool_calls]
        elif message.role is Role.TOOL:
            assert rest[position - 1].tool_calls
    new_users = [message for message in bodies[seen:] if message.role is Role.USER and message.text.strip()]
    assert [message for message in rest if message in new_users] == new_users


def test_results_of_the_last_calls() -> None:
    """Results of the service's last calls come first and under its own ids, also where it uses an id again."""
    used_before = [says(Role.USER, "one"), calls("c1"), results("c1"), says(Role.MODEL, "hm")]
    history = [*used_before, says(Role.USER, "two"), calls("c1", ""), results("c1", "")]
    shown = sent(history, 6)
    assert [each[0] for each in shown[0]] == ["c1", ""]
    assert len(shown) == 1


def test_call_without_a_result() -> None:
    """A call of the service's that nobody has answered is answered as interrupted before what is new."""
    history = [says(Role.USER, "one"), calls("c1"), says(Role.USER, "two")]
    assert sent(history, 2) == [[("c1", INTERRUPTED)], "two"]


def test_late_result() -> None:
    """A result that comes after the service was told that there is none reaches it as text."""
    late = Message(
        Role.TOOL,
        tool_results=[
            ToolResult(tool_call_id="c1", name="look", content={"eta": "now"}),
            ToolResult(tool_call_id="c2", name="look", content="soon"),
        ],
    )
    called = Message(Role.MODEL, tool_calls=[ToolCall(id="c2", name="look")])
    history = [says(Role.USER, "one"), calls("c1"), says(Role.USER, "two"), says(Role.MODEL, "hm"), called, late]
    first, text = sent(history, 5)
    assert first == [("c2", "soon")]
    assert text == '(The result of an earlier call of the tool look has arrived only now: {"eta":"now"})'
    again = [*history, says(Role.MODEL, "ok"), Message(Role.TOOL, tool_results=[late.tool_results[1]])]
    assert sent(again, 7) == ["(The result of an earlier call of the tool look has arrived only now: soon)"]


def test_nothing_seen() -> None:
    """A service that has seen nothing is sent everything, as a prompt of its own."""
    history = [says(Role.SYSTEM, "Be brief."), says(Role.USER, "one"), calls("c1"), results("c1")]
    assert sent(history, 1)[:2] == ["Be brief.", "one"]
    assert len(sent(history, 1)) == 4


def test_late_result_with_a_picture() -> None:
    """A result of an earlier call that holds a picture comes as a user's message that holds it."""
    picture = ImagePart(data=b"png", media_type="image/png")
    history = [
        Message(Role.USER, "a"),
        Message(Role.MODEL, tool_calls=[ToolCall(id=id_, name="look") for id_ in ("1", "2")]),
        Message(Role.USER, "b"),
        Message(Role.MODEL, "yes?"),
        Message(
            Role.TOOL,
            tool_results=[
                ToolResult(tool_call_id="1", name="look", content=["Front:", picture]),
                ToolResult(tool_call_id="2", name="look", content={"a": 1}),
            ],
        ),
    ]
    (late,) = to_service_prompt(history, 4).messages
    begun = "(The result of an earlier call of the tool look has arrived only now"
    assert late.role is Role.USER
    assert late.content == (
        TextPart(f"{begun}, and follows)"),
        TextPart("Front:"),
        picture,
        TextPart(f'{begun}: {{"a":1}})'),
    )


def test_digest_of_parts_in_results() -> None:
    """Messages whose results hold other pictures have another digest."""

    def digest(data: bytes) -> str:
        result = ToolResult(tool_call_id="1", name="look", content=ImagePart(data=data))
        return digest_of([Message(Role.TOOL, tool_results=[result])])

    assert digest(b"a") == digest(b"a") != digest(b"b")
