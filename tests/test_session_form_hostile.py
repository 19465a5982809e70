from __future__ import annotations

import datetime as dt
import sys
from collections.abc import Iterator
from typing import Any, Final

import pytest

from chatflow import AgentSession, SessionContext, SessionFormatError
from chatflow.core.plain import MAX_LEVELS
from chatflow.core.values import MARK, MAX_DEPTH, freeze
from tests.forms import CALL, HI, Lying, LyingDict, LyingText, everything, in_itself, nested
from tests.strategies import observed, same_session


def of_one_hash(count: int) -> list[Any]:
    """So many different numbers that share a hash, as envelopes."""
    return [{MARK: "int", "v": hex((2**61 - 1) * number)} for number in range(1, count + 1)]


def message(**fields: Any) -> dict[str, Any]:
    """A message of a model, after that of a user."""
    return {"messages": [HI, {"role": "model", "timestamp": "2026-01-02T03:04:05+00:00"} | fields]}


def result(call_id: str) -> dict[str, Any]:
    """A result of a tool."""
    return {"tool_call_id": call_id, "name": "refund", "content": None}


TOOL: Final = {"role": "tool", "timestamp": "2026-01-02T03:04:05+00:00"}
HUGE: Final = "x" * 100_000_000
GONE: Final = object()

HOSTILE: Final[dict[str, tuple[dict[Any, Any], str]]] = {
    "no version": ({"chatflow_session": GONE}, "chatflow_session"),
    "a later version": ({"chatflow_session": 2}, "chatflow_session"),
    "a version that only seems right": ({"chatflow_session": True}, "chatflow_session"),
    "an unknown field": ({"more": 1}, "more"),
    "no id": ({"session_id": GONE}, "session_id"),
    "an empty id": ({"session_id": ""}, "session_id"),
    "an id that is no text": ({"session_id": 5}, "session_id"),
    "an id with half a surrogate pair": ({"session_id": "\ud800"}, "session_id"),
    "the same in an envelope": ({"session_id": {MARK: "str", "v": "7aCA"}}, "session_id"),
    "an id in an envelope that can't be read": ({"session_id": {MARK: "str", "v": "?"}}, "session_id"),
    "no agent": ({"active_agent_name": GONE}, "active_agent_name"),
    "an agent that is no text": ({"active_agent_name": ["A"]}, "active_agent_name"),
    "no limit": ({"max_turns": GONE}, "max_turns"),
    "a limit of nothing": ({"max_turns": 0}, "max_turns"),
    "a limit that is no number": ({"max_turns": True}, "max_turns"),
    "a limit of no integer": ({"max_turns": 2.0}, "max_turns"),
    "a limit of more than is counted": ({"max_turns": 2**63 - 1}, "max_turns"),
    "a limit that would fill a page": ({"max_turns": ["x" * 100_000]}, "max_turns"),
    "no time": ({"expires_after": 0}, "expires_after"),
    "less than a moment": ({"expires_after": 1e-300}, "expires_after"),
    "more than all times": ({"expires_after": 1e300}, "expires_after"),
    "a time that is none": ({"expires_after": "1"}, "expires_after"),
    "no metadata": ({"metadata": GONE}, "metadata"),
    "metadata that are a list": ({"metadata": []}, "metadata"),
    "no state": ({"state": GONE}, "state"),
    "state of no mapping": ({"state": {MARK: "tuple", "v": []}}, "state"),
    "state with other keys": ({"state": {MARK: "dict", "v": [[1, 1]]}}, "state[1]"),
    "an unknown envelope": ({"state": {"a": [0, {MARK: "class", "v": "os.system"}]}}, "state.a[1]"),
    "an envelope with more in it": ({"state": {"a": {MARK: "tuple", "v": [], "w": 1}}}, "state.a"),
    "an envelope in an envelope": (
        {"state": {"a": {MARK: "tuple", "v": [1, {MARK: "int", "v": "?"}]}}},
        "state.a.v[1]",
    ),
    "a path for a time zone": (
        {"state": {"a": {MARK: "datetime", "v": ["2026-01-02", "../../../etc/passwd", 0]}}},
        "state.a",
    ),
    "a decimal beyond all": ({"state": {"a": {MARK: "decimal", "v": "1E+9999999999999999999"}}}, "state.a"),
    "a member that can't be hashed": (
        {"state": {"a": {MARK: "set", "v": [{MARK: "decimal", "v": "sNaN"}]}}},
        "state.a",
    ),
    "a set that loses members": ({"state": {"a": {MARK: "set", "v": [1, 1]}}}, "state.a"),
    "members of one hash": ({"state": {"a": {MARK: "set", "v": of_one_hash(101)}}}, "state.a"),
    "keys of one hash": ({"state": {"a": {MARK: "dict", "v": [[key, 0] for key in of_one_hash(101)]}}}, "state.a"),
    "a large set that can't be read": ({"state": {"a": {MARK: "set", "v": [[]] * 101}}}, "state.a"),
    "no messages": ({"messages": GONE}, "messages"),
    "messages that are none": ({"messages": {}}, "messages"),
    "a message that is none": ({"messages": [HI, 5]}, "messages[1]"),
    "an unknown role": (message(role="assistant"), "messages[1].role"),
    "a role that is no text": (message(role=["model"]), "messages[1].role"),
    "no role": (message(role=None), "messages[1].role"),
    "no time of a message": (message(timestamp=None), "messages[1].timestamp"),
    "a number for a time": (message(timestamp=5), "messages[1].timestamp"),
    "an unknown field of a message": (message(more=1), "messages[1].more"),
    "an unknown field of a call": (
        message(tool_calls=[{"id": "1", "name": "r", "more": 1}]),
        "messages[1].tool_calls[0].more",
    ),
    "calls that are no list": (message(tool_calls={}), "messages[1].tool_calls"),
    "a call that is none": (message(tool_calls=[5]), "messages[1].tool_calls[0]"),
    "a call without an id": (message(tool_calls=[{"name": "r"}]), "messages[1].tool_calls[0].id"),
    "a million calls without an id": (message(tool_calls=[{}] * 1000), "messages[1].tool_calls[0].id"),
    "an argument that can't be read": (
        message(tool_calls=[{"id": "1", "name": "r", "args": {"a": {MARK: 1}}}]),
        "messages[1].tool_calls[0].args.a",
    ),
    "a part of no type": (message(content=[{"text": "a"}]), "messages[1].content[0]"),
    "a result without a call": (
        {"messages": [HI, CALL, TOOL | {"tool_results": [result("1"), result("2")]}]},
        "messages[2].tool_results[1]",
    ),
    "a result before its call": (
        {"messages": [HI, TOOL | {"tool_results": [result("1")]}, CALL]},
        "messages[1].tool_results[0]",
    ),
    "a message before the first of a user": ({"messages": [CALL, HI]}, "messages[0]"),
    "a system message among the others": ({"messages": [HI, HI | {"role": "system"}]}, "messages[1].role"),
    "a tool's message without results": ({"messages": [HI, TOOL]}, "messages[1]"),
    "a service that is none": ({"service": "resp_1"}, "service"),
    "a service without an id": ({"service": {"agent_name": None, "service": None, "seen": 0}}, "service.id"),
    "an empty id of a service": ({"service": {"id": "", "agent_name": None, "service": None, "seen": 0}}, "service.id"),
    "a service's id that is a number": (
        {"service": {"id": 5, "agent_name": None, "service": None, "seen": 0}},
        "service.id",
    ),
    "a service's id with other keys": (
        {"service": {"id": {MARK: "dict", "v": [[1, 1]]}, "agent_name": None, "service": None, "seen": 0}},
        "service.id[1]",
    ),
    "a service's agent that is none": (
        {"service": {"id": "r", "agent_name": 5, "service": None, "seen": 0}},
        "service.agent_name",
    ),
    "a service that has seen too much": (
        {"service": {"id": "r", "agent_name": None, "service": None, "seen": 10**6}},
        "service.seen",
    ),
    "a service that has seen half a message": (
        {"service": {"id": "r", "agent_name": None, "service": None, "seen": 0.5}},
        "service.seen",
    ),
    "an unknown field of a service": (
        {"service": {"id": "r", "agent_name": None, "service": None, "seen": 0, "key": "sk-"}},
        "service.key",
    ),
    "an owner that is none": ({"owner": 5}, "owner"),
    "an owner who is another": ({"owner": "alice"}, "owner"),
    "a mark that says no": ({"for_client": False}, "for_client"),
    "10,000 lists": ({"state": {"a": nested(10_000, "list")}}, "state.a[0][0]..."),
    "10,000 dicts": ({"messages": nested(10_000, "dict")}, "messages.a.a.a..."),
    "10,000 envelopes": ({"metadata": {"a": nested(10_000, "tuple")}}, "metadata.a.v[0].v[0]..."),
    "a level too many": ({"state": {"a": nested(MAX_DEPTH, "list")}}, "state.a[0][0]..."),
    "one more than is looked at": ({"state": {"a": nested(MAX_LEVELS - 1, "list")}}, "state.a[0][0]..."),
    "a value in itself": ({"state": {"a": in_itself()}}, "state.a[0].again[0].again..."),
    "100 MB of text": ({"state": {"a": HUGE}}, "state.a"),
    "100 MB for an id": ({"session_id": HUGE}, "session_id"),
    "a key of 100 MB": ({"metadata": {HUGE: 1}}, "metadata"),
    "millions of values": ({"messages": [0] * 2_000_000}, "messages"),
    "a value that stands in many places": ({"state": {"a": [[[0] * 1000] * 1000] * 1000}}, "state.a[1]..."),
    "a number of any size": ({"state": {"a": 10**10_000}}, "state.a"),
    "no number": ({"state": {"a": float("nan")}}, "state.a"),
    "no finite number": ({"expires_after": float("inf")}, "expires_after"),
    "half a surrogate pair": ({"state": {"a": "\ud800"}}, "state.a"),
    "NUL": ({"state": {"a": "\0"}}, "state.a"),
    "half a surrogate pair in a key": ({"state": {"\ud800": 1}}, "state"),
    "a key that is no text": ({"state": {5: 1}}, "state"),
    "a field that is no text": ({5: 1}, ""),
    "a dict that lies": ({"state": LyingDict(a=1)}, "state"),
    "text that lies": ({"state": {"a": LyingText("b")}}, "state.a"),
    "a value of a class that lies": ({"state": {"a": Lying()}}, "state.a"),
    "a tuple": ({"messages": ()}, "messages"),
    "a time": ({"state": {"at": dt.datetime(2026, 1, 2, tzinfo=dt.UTC)}}, "state.at"),
    "bytes": ({"session_id": b"s"}, "session_id"),
    "a function": ({"active_agent_name": print}, "active_agent_name"),
    "no cost": ({"spent": {}}, "spent"),
    "a cost that is no object": ({"spent": 5}, "spent"),
    "a cost of another kind": ({"spent": {"by_user": {}}}, "spent"),
    "a cost that is no mapping": ({"spent": {"total": 5}}, "spent"),
    "an agent's cost that is none": ({"spent": {"by_agent": {"Support": 5}}}, "spent"),
}


def changed(change: dict[Any, Any]) -> dict[Any, Any]:
    """The form of a session with some of it changed."""
    data = everything().to_dict() | change
    return {key: value for key, value in data.items() if value is not GONE}


def fault(data: Any, **arguments: Any) -> SessionFormatError:
    """What reading *data* is refused with."""
    with pytest.raises(SessionFormatError) as caught:
        SessionContext.from_dict(data, **arguments)
    assert caught.type is SessionFormatError
    assert len(str(caught.value)) < 2000
    return caught.value


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_data_is_refused(name: str) -> None:
    """Data that is no session is refused by the path where it goes wrong, and changes no session."""
    change, path = HOSTILE[name]
    live = everything()
    before = observed(live)
    with pytest.raises(SessionFormatError) as caught:
        live.from_dict(changed(change))
    assert len(str(caught.value)) < 2000
    found = caught.value.path
    assert found.startswith(path[:-3]) if path.endswith("...") else found == path
    assert observed(live) == before


@pytest.mark.parametrize(
    "data", [None, 5, "{}", [], b"{}", LyingDict(), {LyingText("a"): 1}, Lying(), everything()], ids=range(9)
)
def test_what_is_no_object_is_refused(data: Any) -> None:
    """What is no dict at all is refused as the whole."""
    assert fault(data).path == ""


def test_error_says_which_session() -> None:
    """The error names the session where the data does, whatever else is wrong with it."""
    good = everything().to_dict()
    assert fault(good | {"max_turns": 0}).session_id == "c7"
    assert fault(good | {"state": in_itself()}).session_id == "c7"
    assert fault(good | {"session_id": {MARK: "str", "v": "YwA="}, "max_turns": 0}).session_id == "c\0"
    for unknown in ({}, {"session_id": 5}, {"session_id": ""}, {"session_id": "\ud800"}):
        assert fault(unknown).session_id is None


def test_owner() -> None:
    """A session is read for its owner, and the owner's name is told to nobody else."""
    data = {**everything().to_dict(), "owner": "alice"}
    assert AgentSession.from_dict(data, owner="alice").to_dict() == data
    for other, mine in ((data, ""), (data, "bob"), (everything().to_dict(), "bob")):
        refused = fault(other, owner=mine)
        assert refused.path == "owner"
        assert "alice" not in str(refused)


@pytest.mark.parametrize(
    ("change", "path"),
    [
        ({"owner": "alice"}, "owner"),
        ({"metadata": {}}, "metadata"),
        ({"service": {"id": "resp_1", "agent_name": None, "service": None, "seen": 0}}, "service"),
        ({"spent": {"total": {"prompt_tokens": -1}}}, "spent"),
        ({"state": {"a": 1, "_a": 1}}, "state._a"),
        ({"messages": [HI | {"role": "system"}, HI]}, "messages[0].role"),
        ({"messages": [HI, HI | {"extra": {"a": 1}}]}, "messages[1].extra"),
        ({"messages": [HI | {"usage": {}}]}, "messages[0].usage"),
    ],
    ids=["owner", "metadata", "service", "spent", "state", "system", "extra", "usage"],
)
@pytest.mark.parametrize("marked", [True, False])
def test_client_may_not_bring(change: dict[str, Any], path: str, marked: bool) -> None:
    """What is left out for clients is refused where a client brings it: one that says so, or is known to be one."""
    data = everything().to_dict(for_client=True) | change
    if not marked:
        del data["for_client"]
    for owner in ("", "alice"):
        assert fault(data, owner=owner, from_client=not marked).path == path


def test_client_gets_an_owner() -> None:
    """What a client brings is of the owner that the application says it is of."""
    assert SessionContext.from_dict(everything().to_dict(for_client=True), owner="alice").key.owner == "alice"


def test_limit_of_characters() -> None:
    """The limit is the caller's: each value counts as many as its text and key have, and 32."""
    data = AgentSession("s", state={"a": "x" * 1000}).to_dict()
    needed = sum(map(len, data)) + len("s" + "a") + 1000 + 32 * (1 + len(data) + 1)
    assert AgentSession.from_dict(data, max_characters=needed).state == {"a": "x" * 1000}
    assert "max_characters" in fault(data, max_characters=needed - 1).reason


def test_little_stack_is_left() -> None:
    """Where the caller has left too little of the stack for what nests deeply, that is refused too."""
    data = AgentSession("s", state={"a": [freeze(nested(MAX_DEPTH - 2, "list"))]}).to_dict()

    def deep_down(levels: int) -> SessionFormatError:
        return fault(data) if levels == 0 else deep_down(levels - 1)

    left = sys.getrecursionlimit() - len(list(frames()))
    refused = deep_down(left - 150)
    assert (refused.session_id, refused.path) == ("s", "")


def frames() -> Iterator[object]:
    """The frames of the running code."""
    frame = sys._getframe()
    while frame is not None:
        yield frame
        frame = frame.f_back  # type: ignore[assignment]


@pytest.mark.parametrize("values", [frozenset(range(1000)), {(number,): number for number in range(1000)}])
def test_large_sets_come_back(values: Any) -> None:
    """A large set, or a dict with other keys than text, is not taken for an attack."""
    session = AgentSession("s", state={"a": values})
    assert same_session(AgentSession.from_dict(session.to_dict()), session)
