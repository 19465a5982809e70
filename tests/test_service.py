from __future__ import annotations

from typing import Any

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from chatflow.core.codec import message_from_json, message_to_json, values_from_json, values_to_json
from chatflow.core.messages import Message, Role
from chatflow.core.service import SERVICE_KEY, ServiceSession, id_key, service_session_of, unseen
from chatflow.core.values import FrozenDict, thaw
from chatflow.exceptions import UnstorableValueError

names = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=4)
service_ids = st.one_of(names, st.dictionaries(names, st.one_of(names, st.integers(), st.none()), min_size=1))
sessions = st.builds(ServiceSession, service_ids, st.none() | names, st.none() | names)


def reply(session: ServiceSession, text: str = "yes") -> Message:
    """A model's message that came from that session."""
    return Message(Role.MODEL, text, extra={SERVICE_KEY: session.to_data()})


@given(sessions)
def test_comes_back_from_text(session: ServiceSession) -> None:
    """A service's session comes back equal from its stored form, and from a message that carries it."""
    assert ServiceSession.from_data(values_from_json(values_to_json(session.to_data()))) == session
    assert service_session_of(message_from_json(message_to_json(reply(session)))) == session


@given(service_ids, service_ids)
def test_key_tells_ids_apart(one: Any, other: Any) -> None:
    """Two ids have the same key where they are equal, and only there."""
    assert (id_key(one) == id_key(other)) == (type(one) is type(other) and one == other)


def test_key_and_order() -> None:
    """The order of a mapping's keys makes no other id, and text that looks like a mapping is none."""
    assert id_key({"taskId": "t", "contextId": "c"}) == id_key({"contextId": "c", "taskId": "t"})
    assert id_key('{"contextId":"c"}') != id_key({"contextId": "c"})


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 2)), max_size=6), st.integers(0, 2))
def test_unseen_is_what_follows(script: list[tuple[bool, int]], asked: int) -> None:
    """What a service has not seen are the messages after the last one that it made in that session."""
    known = [ServiceSession(f"resp_{number}") for number in range(3)]
    history = [
        reply(known[number]) if is_reply else Message(Role.USER, str(position))
        for position, (is_reply, number) in enumerate(script)
    ]
    made = [position for position, (is_reply, number) in enumerate(script) if is_reply and number == asked]
    expected = tuple(history[made[-1] + 1 :]) if made else None
    assert unseen(history, known[asked]) == expected
    assert unseen(history, attrs.evolve(known[asked], agent_name="whoever")) == expected


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


@pytest.mark.parametrize(
    "data",
    [
        None,
        [],
        {},
        {"id": "a"},
        {"id": 1, "agent_name": None, "service": None},
        {"id": "a", "agent_name": 1, "service": None},
    ],
)
def test_other_data(data: Any) -> None:
    """What is no form of a service's session is refused, and under our key in a message is none."""
    with pytest.raises(TypeError):
        ServiceSession.from_data(data)
    assert service_session_of(Message(Role.MODEL, "hi", extra={SERVICE_KEY: data})) is None


def test_only_models_speak_for_a_service() -> None:
    """A user's message carries no service's session, whatever it holds."""
    session = ServiceSession("resp_1")
    assert service_session_of(Message(Role.USER, "hi", extra={SERVICE_KEY: session.to_data()})) is None


def test_frozen() -> None:
    """An id that was given as a mapping can't be changed from outside."""
    given_id = {"contextId": "c", "taskId": "t"}
    session = ServiceSession(given_id)
    given_id["taskId"] = "u"
    assert session.id == {"contextId": "c", "taskId": "t"}
    assert isinstance(session.id, FrozenDict)
    assert thaw(session.id) == {"contextId": "c", "taskId": "t"}
