from __future__ import annotations

import datetime as dt
import uuid
from typing import Any, Final

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chatflow import AgentSession, Role, SessionContext, SessionFormatError
from chatflow.core.envelopes import decode, encode
from chatflow.core.messages import PART_KINDS
from chatflow.core.values import MARK, freeze
from tests import strategies
from tests.forms import Lying, LyingDict, LyingText, in_itself, nested, through_json
from tests.strategies import exactly, same_session


def meaning(value: Any) -> object:
    """What a value in the form says."""
    return exactly(freeze(decode(value)))


def said_by_part(part: Any) -> object:
    """What a part of a message's content says."""
    fields = decode(part)
    kind = fields.pop("type")
    known = {"text": {"text"}, "file": {"url", "data", "media_type", "filename"}}.get(
        kind, {"url", "data", "media_type"}
    )
    if kind in PART_KINDS and fields.keys() <= known:
        fields = dict(sorted((key, value) for key, value in fields.items() if value is not None))
    return kind, exactly(freeze(fields))


def said_by_result(content: Any) -> object:
    """What a result's content says."""
    if isinstance(content, dict) and content.get(MARK) == "parts":
        return [said_by_part(part) for part in content["v"]]
    return meaning(content)


def said_by_message(data: dict[str, Any]) -> object:
    """What a message in the form says, by the codec's rules: what is left out, or null, is as by default."""
    content = data.get("content")
    calls, results = (data.get(name) or () for name in ("tool_calls", "tool_results"))
    time = dt.datetime.fromisoformat(data["timestamp"])
    return [
        data["role"],
        [said_by_part(part) for part in content] if isinstance(content, list) else meaning(content),
        [[meaning(each["id"]), meaning(each["name"]), meaning(each.get("args", {}))] for each in calls],
        [
            [
                meaning(each["tool_call_id"]),
                meaning(each["name"]),
                said_by_result(each["content"]),
                each.get("is_error", False),
            ]
            for each in results
        ],
        meaning(data.get("agent_name")),
        meaning(data.get("usage")),
        meaning(data.get("extra") or {}),
        (time if time.tzinfo else time.replace(tzinfo=dt.UTC)).astimezone(dt.UTC),
    ]


def said(data: dict[str, Any]) -> object:
    """What the form says, whichever of its ways of saying it is used."""
    others = {"messages", "expires_after", "service", "for_client"}
    return {
        **{key: meaning(value) for key, value in data.items() if key not in others},
        "messages": [said_by_message(each) for each in data["messages"]],
        "expires_after": float(data.get("expires_after", 0)),
        "service": {key: meaning(value) for key, value in data.get("service", {}).items()},
    }


def places(data: Any) -> list[tuple[Any, Any]]:
    """Every place in *data* where something stands: what holds it, and its key or index there."""
    found: list[tuple[Any, Any]] = []
    seen: set[int] = set()  # some of it may hold itself
    pending = [data]
    while pending:
        holder = pending.pop()
        if type(holder) in {dict, list} and id(holder) not in seen:
            seen.add(id(holder))
            keys: list[Any] = list(holder) if isinstance(holder, dict) else list(range(len(holder)))
            found += [(holder, key) for key in keys]
            pending += [holder[key] for key in keys]
    return found


sound: Final = strategies.values.map(lambda value: encode(freeze(value)))
odd: Final = st.one_of(
    sound,
    sound,
    strategies.json_values,
    st.sampled_from(
        [
            *(None, True, False, "", "1", 0, 1, -1, 0.5, 2**63, 10**5000, float("nan"), float("-inf"), "\0", "\ud800"),
            *((), b"", {}, [], {5: 1}, uuid.UUID(int=1), LyingDict(), LyingText(), Lying(), in_itself()),
            *(
                "system",
                "user",
                "model",
                "tool",
                "2026-01-02T03:04:05",
                "2026-01-02T03:04:05Z",
                "0001-01-01T00:00:00+09:00",
            ),
        ]
    ),
    st.builds(nested, st.sampled_from([1, 100, 198, 199, 200, 211, 500]), st.sampled_from(["list", "dict", "tuple"])),
)


@st.composite
def mutated(draw: st.DrawFn, *, for_client: bool = False) -> tuple[type[AgentSession], str, Any]:
    """A session's form with up to three changes anywhere in it, its class, and its owner."""
    session = draw(strategies.sessions())
    data = through_json(session.to_dict(for_client=for_client))
    for _ in range(draw(st.sampled_from([1, 1, 1, 2, 3]))):
        # Many changes are within one field, and many move, repeat or remove whole messages.
        part = draw(st.sampled_from([data, *data.values()]))
        messages = [(holder, key) for holder, key in places(data) if holder is data.get("messages")]
        holder, key = draw(st.sampled_from(draw(st.sampled_from([messages, []])) or places(part) or places(data)))
        what = draw(st.sampled_from(["delete", "replace", "repeat", "insert", "swap", "wrap", "move"]))
        if what == "delete":
            del holder[key]
        elif what == "replace":
            holder[key] = draw(odd)
        elif what == "wrap":
            holder[key] = draw(
                st.sampled_from([[holder[key]], {"a": holder[key]}, {MARK: "tuple", "v": [holder[key]]}])
            )
        elif what == "move":
            elsewhere, there = draw(st.sampled_from(places(data)))
            holder[key] = elsewhere[there]
        elif isinstance(holder, list):
            if what == "repeat":
                holder.insert(key, holder[key])
            elif what == "insert":
                holder.insert(key, draw(odd))
            else:
                holder[key], holder[0] = holder[0], holder[key]
        else:
            holder[draw(strategies.keys)] = draw(odd)
        if not places(data):
            break
    return type(session), session.key.owner, data


def check_mutated(kind: type[AgentSession], owner: str, data: Any, **arguments: Any) -> bool:
    """Whether *data*, which stays as it is, was read; then it gave the session that it says, and else the one error."""
    before = [(id(holder), key, id(holder[key])) for holder, key in places(data)]
    try:
        session = kind.from_dict(data, owner=owner, **arguments)
    except SessionFormatError:
        return False
    finally:
        assert before == [(id(holder), key, id(holder[key])) for holder, key in places(data)]
    written = session.to_dict(for_client="for_client" in data or bool(arguments))
    assert said(through_json(written)) == said(data)
    again = kind.from_dict(written, owner=owner, **arguments)
    assert same_session(again, session)
    return True


@settings(max_examples=200)
@given(mutated())
def test_mutated_data_is_read_or_refused(drawn: tuple[type[AgentSession], str, Any]) -> None:
    """Of a form that was changed anywhere comes the session that it says, or the one error."""
    check_mutated(*drawn)


@settings(max_examples=100)
@given(mutated(for_client=True))
def test_mutated_data_of_a_client_is_read_or_refused(drawn: tuple[type[AgentSession], str, Any]) -> None:
    """The same holds for what a client has changed, and then there is nothing in it that a client may not bring."""
    kind, owner, data = drawn
    if not check_mutated(kind, owner, data, from_client=True):
        return
    session = kind.from_dict(data, owner=owner, from_client=True)
    assert session.key.owner == owner
    assert (session.metadata, session.service_session_id) == ({}, None)
    assert not any(key.startswith("_") for key in session.state)
    for each in session.history:
        assert (each.role is not Role.SYSTEM, each.extra, each.usage) == (True, {}, None)


@pytest.mark.slow
@settings(max_examples=10_000)
@given(st.one_of(mutated(), mutated(for_client=True)))
def test_any_mutated_data_is_read_or_refused(drawn: tuple[type[AgentSession], str, Any]) -> None:
    """The same, of ten thousand."""
    check_mutated(*drawn)


@settings(max_examples=200)
@given(odd)
def test_anything_is_refused(data: Any) -> None:
    """What is no form at all is refused, whatever it is."""
    with pytest.raises(SessionFormatError):
        SessionContext.from_dict(data)
