"""The 56 histories of `cases/`, each the shape of a fault that users of other libraries reported."""

from __future__ import annotations

import dataclasses
import datetime as dt
import decimal
import enum
import json
from collections.abc import AsyncIterator, Callable, Iterable
from pathlib import Path
from typing import Any, Final, Literal

import attrs
import pytest

from chatflow.core.agent import Agent
from chatflow.core.codec import message_from_json, message_to_json
from chatflow.core.messages import Message, Role, ToolCall, ToolResult
from chatflow.core.prompt import INTERRUPTED, to_prompt
from chatflow.core.pruning import prune
from chatflow.core.session import SessionContext
from chatflow.core.store import BaseSessionStore
from chatflow.exceptions import HandoffError, UnmatchedToolResultError
from chatflow.testing import Backend
from tests.backends import BACKENDS
from tests.test_prompt import check_valid

CASES: Final[dict[str, dict[str, Any]]] = {
    case["id"]: case for case in json.loads((Path(__file__).parent / "cases" / "histories.json").read_bytes())
}

CHECKED: Final = {
    "also_acceptable_when_fed_one_by_one",
    "active_agent",
    "idempotent",
    "must_retain",
    "preserve_extra",
    "prose",
    "provider_valid",
    "raises",
    "retained_indexes",
    "roundtrip",
}
"""The expectations that a test below looks at."""

AGENT: Final = Agent(name="a")
B: Final = Agent(name="b")


def cases(*with_expectations: str, operations: bool | None = None) -> Callable[[Any], Any]:
    """Run a test for each case that has these expectations, and operations that follow if that is asked for."""
    found = [
        case
        for case in CASES.values()
        if case["expect"].keys() >= set(with_expectations) and operations in {None, "ops_after" in case}
    ]
    return pytest.mark.parametrize("case", found, ids=[case["id"] for case in found])


# --- from JSON to messages --------------------------------------------------------------------------------------------


class Status(enum.Enum):
    IN_TRANSIT = "IN_TRANSIT"


@attrs.frozen
class AttrsOrder:
    order_id: str
    total: float


@dataclasses.dataclass
class DataclassOrder:
    order_id: str
    total: float


VALUES: Final[dict[str, Callable[[Any], Any]]] = {
    "datetime": dt.datetime.fromisoformat,
    "float": float,
    "decimal": decimal.Decimal,
    "set": set,
    "tuple": tuple,
    "enum": Status,
    "attrs": lambda fields: AttrsOrder(**fields),
    "dataclass": lambda fields: DataclassOrder(**fields),
}


def value(written: Any) -> Any:
    """The Python value that *written* stands for."""
    if isinstance(written, dict):
        if "$py" in written:
            return VALUES[written["$py"]](written["v"])
        return {key: value(item) for key, item in written.items()}
    if isinstance(written, list):
        return [value(item) for item in written]
    return written


def message(written: dict[str, Any], position: int = 0) -> Message:
    """The message that *written* stands for, with a time by which it can be told from its equals."""
    return Message(
        written["role"],
        written.get("content"),
        tool_calls=[ToolCall(**{**call, "args": value(call["args"])}) for call in written.get("tool_calls", ())],
        tool_results=[
            ToolResult(**{**result, "content": value(result["content"])}) for result in written.get("tool_results", ())
        ],
        extra=value(written.get("extra", {})),
        timestamp=dt.datetime(2026, 1, 1, tzinfo=dt.UTC) + dt.timedelta(minutes=position),
    )


def messages(case: dict[str, Any]) -> list[Message]:
    """The case's history."""
    return [message(written, position) for position, written in enumerate(case["history"])]


def same(one: Message, other: Message) -> bool:
    """Whether two messages are equal down to the types of what they hold; NaN, which equals nothing, included."""
    return repr(one) == repr(other)


def indexes(kept: Iterable[Message], history: list[Message]) -> list[int]:
    """Where the messages that were *kept* stand in *history*, each of them unchanged."""
    places = {each.timestamp: position for position, each in enumerate(history)}
    found = [places[each.timestamp] for each in kept]
    assert all(same(each, history[position]) for each, position in zip(kept, found, strict=True))
    return found


# --- pure functions ---------------------------------------------------------------------------------------------------


@cases()
def test_each_expectation_is_looked_at(case: dict[str, Any]) -> None:
    """No case expects what no test here looks at."""
    assert case.keys() <= {"id", "source", "kind", "history", "max_turns", "ops_after", "expect"}
    assert case["expect"].keys() <= CHECKED
    assert case["expect"].keys() & {"retained_indexes", "must_retain", "raises"}


@cases("retained_indexes", operations=False)
def test_pruned_at_once(case: dict[str, Any]) -> None:
    """Pruning keeps what the case says, in the order it says."""
    history = messages(case)
    assert indexes(prune(history, case["max_turns"]), history) == case["expect"]["retained_indexes"]


@cases("retained_indexes")
def test_pruned_twice(case: dict[str, Any]) -> None:
    """Pruning what was pruned changes nothing: also where the case says *idempotent*."""
    once = prune(messages(case), case["max_turns"])
    assert all(mine is theirs for mine, theirs in zip(prune(once, case["max_turns"]), once, strict=True))


@cases("must_retain")
def test_what_must_stay(case: dict[str, Any]) -> None:
    """Where more than one answer is right, what must stay stays."""
    history = messages(case)
    assert set(indexes(prune(history, case["max_turns"]), history)) >= set(case["expect"]["must_retain"])


@cases("raises")
def test_window_refused(case: dict[str, Any]) -> None:
    """A window that is none is refused by pruning and by a session."""
    assert case["expect"]["raises"] == "ValueError"
    with pytest.raises(ValueError, match="max_turns"):
        prune(messages(case), case["max_turns"])
    with pytest.raises(ValueError, match="max_turns"):
        SessionContext("s", AGENT, max_turns=case["max_turns"])


@cases()
def test_prompt_of_all(case: dict[str, Any]) -> None:
    """What is sent of the whole history, never pruned, is valid."""
    check_valid(to_prompt(messages(case), "Help.").messages)


@cases("retained_indexes")
def test_prompt_of_what_is_kept(case: dict[str, Any]) -> None:
    """What is sent of the pruned history is valid at each of its lengths: also where the case says *provider_valid*."""
    kept = prune(messages(case), case["max_turns"])
    for length in range(len(kept) + 1):
        check_valid(to_prompt(kept[:length], "Help.").messages)


@cases("preserve_extra")
def test_extra_is_sent(case: dict[str, Any]) -> None:
    """What a provider wants back with its call is sent with it, byte for byte."""
    sent = [each for each in to_prompt(messages(case)).messages if each.tool_calls]
    written = [each for each in case["history"] if each.get("tool_calls")]
    assert [json.dumps(each.extra) for each in sent] == [json.dumps(each["extra"]) for each in written]


@cases("roundtrip")
def test_through_json(case: dict[str, Any]) -> None:
    """Each message comes back from strict JSON as it was, down to its types."""
    for each in messages(case):
        text = message_to_json(each)
        json.loads(text, parse_constant=pytest.fail)
        text.encode()
        assert same(message_from_json(text), each)


@cases("roundtrip")
def test_what_a_message_holds(case: dict[str, Any]) -> None:
    """A message holds what it was given; only enum, attrs and dataclass values become plain ones, at once."""
    for written, made in zip(case["history"], messages(case), strict=True):
        assert made.content == written["content"]
        given = [call["args"] for call in written.get("tool_calls", ())]
        given += [result["content"] for result in written.get("tool_results", ())]
        held = [call.args for call in made.tool_calls] + [result.content for result in made.tool_results]
        assert repr(held) == repr([shown(each) for each in given])


def shown(written: Any) -> Any:
    """What a message shows of what was *written* into it."""
    if isinstance(written, dict):
        kind = written.get("$py")
        if kind in {"enum", "attrs", "dataclass"}:
            return written["v"]
        if kind is not None:
            return frozenset(written["v"]) if kind == "set" else value(written)
        return {key: shown(item) for key, item in written.items()}
    return [shown(item) for item in written] if isinstance(written, list) else written


# --- sessions, on every store -----------------------------------------------------------------------------------------


class Data:
    """A store that can be opened anew on its data, where its kind can."""

    def __init__(self, backend: Backend, folder: Path) -> None:
        self._backend = backend
        self._folder = folder
        self.store: BaseSessionStore = backend.make(folder)

    async def reload(self) -> SessionContext:
        """The conversation, by another store object where two can have the same data."""
        if self._backend.shares:
            before, self.store = self.store, self._backend.make(self._folder)
            # Opened before the other is closed: a database in memory goes with the last store.
            await self.store.list_sessions()
            await before.aclose()
        session = await self.store.get("s")
        assert session is not None
        return session


@pytest.fixture(params=BACKENDS, ids=[backend.name for backend in BACKENDS])
async def data(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Data]:
    """Data on each backend."""
    data = Data(request.param, tmp_path)
    yield data
    await data.store.aclose()


async def feed(session: SessionContext, history: Iterable[Message]) -> None:
    """Add messages one by one, each in a turn of its own, and pass over those that are refused."""
    for each in history:
        try:
            await session.add_message(each)
        except UnmatchedToolResultError:
            assert each.role is Role.TOOL


async def fail(session: SessionContext, history: Iterable[Message]) -> None:
    """Add messages in a turn that fails."""
    async with session.turn():
        await feed(session, history)
        raise ZeroDivisionError


async def test_fed_one_by_one(data: Data) -> None:
    """A session keeps what pruning at once keeps, or what the case accepts; and so does the store."""
    for case in CASES.values():
        expect = case["expect"]
        if "ops_after" in case or "raises" in expect:
            continue
        history = messages(case)
        await data.store.delete("s")
        session = await data.store.get_or_create("s", AGENT, max_turns=case["max_turns"])
        await feed(session, history)
        kept = indexes(session.history, history)
        if "must_retain" in expect:
            assert set(kept) >= set(expect["must_retain"]), case["id"]
        else:
            accepted = [expect["retained_indexes"], *expect.get("also_acceptable_when_fed_one_by_one", ())]
            assert kept in accepted, case["id"]
        check_valid(to_prompt(session.history).messages)
        shown = list(session.history)
        assert list(map(repr, (await data.reload()).history)) == list(map(repr, shown)), case["id"]


async def test_fed_in_one_turn(data: Data) -> None:
    """A session fed in one turn shows and stores exactly what pruning at once keeps."""
    for case in CASES.values():
        if "retained_indexes" not in case["expect"] or "ops_after" in case:
            continue
        history = messages(case)
        await data.store.delete("s")
        session = await data.store.get_or_create("s", AGENT, max_turns=case["max_turns"])
        async with session.turn():
            await feed(session, history)
            assert indexes(session.history, history) == case["expect"]["retained_indexes"], case["id"]
        assert indexes(session.history, history) == case["expect"]["retained_indexes"], case["id"]
        assert indexes((await data.reload()).history, history) == case["expect"]["retained_indexes"], case["id"]


Way = Literal["operations apart", "one turn", "failed turn"]


@pytest.mark.parametrize("way", ["operations apart", "one turn", "failed turn"])
@cases("retained_indexes", operations=True)
async def test_rolled_back(data: Data, case: dict[str, Any], way: Way) -> None:
    """After a rollback, or a turn that failed, memory and store hold exactly what was there before."""
    history = messages(case)
    session = await data.store.get_or_create("s", AGENT, max_turns=case["max_turns"])
    await feed(session, history)
    operations = list(case["ops_after"])
    if operations[0] == "reload":
        session = await data.reload()
        del operations[0]
    assert (operations[0], operations[-1]) == ("checkpoint", "rollback")
    added = [message(operation["add"], 1000) for operation in operations[1:-1]]
    if way == "operations apart":
        token = session.checkpoint()
        await feed(session, added)
        await session.rollback_to(token)
    elif way == "one turn":
        async with session.turn():
            token = session.checkpoint()
            await feed(session, added)
            await session.rollback_to(token)
    else:
        with pytest.raises(ZeroDivisionError):
            await fail(session, added)
    assert indexes(session.history, history) == case["expect"]["retained_indexes"]
    assert indexes((await data.reload()).history, history) == case["expect"]["retained_indexes"]


@cases("active_agent")
async def test_active_agent(data: Data, case: dict[str, Any]) -> None:
    """The agent that was handed to is active when the conversation is read back, and sees what the first one got."""
    assert case["expect"]["active_agent"] == B.name
    session = await data.store.get_or_create("s", AGENT, max_turns=case["max_turns"])
    async with session.turn():
        await feed(session, messages(case))
        await session.set_active_agent(B)
    session = await data.reload()
    assert session.active_agent_name == B.name
    assert [each.content for message in session.history for each in message.tool_results] == ["data", "ok"]


# --- what the prose says and no field does ----------------------------------------------------------------------------


def test_b01_interrupted_call() -> None:
    """b01: a call whose turn was cancelled is answered as an interrupted one, and only in what is sent."""
    (sent,) = [each for each in to_prompt(messages(CASES["b01"])).messages if each.role is Role.TOOL]
    assert [(each.tool_call_id, each.content, each.is_error) for each in sent.tool_results] == [
        ("c1", INTERRUPTED, True)
    ]


def test_a25_one_result_a_call() -> None:
    """a25: of a call's two results, "pending" and "final", one is sent."""
    sent = to_prompt(messages(CASES["a25"])).messages
    assert [result.content for each in sent for result in each.tool_results] == ["final"]


def test_a28_sent_unchanged() -> None:
    """a28: a history that ends on a tool result is sent as it is."""
    history = messages(CASES["a28"])
    assert to_prompt(history).messages == tuple(history)


def test_g05_active_agents_instructions() -> None:
    """g05: the active agent's instructions come first, once; what was stored as a system message follows in order."""
    sent = to_prompt(prune(messages(CASES["g05"]), 1), "You are Billing, indeed").messages
    systems = [each.text for each in sent if each.role is Role.SYSTEM]
    assert systems == ["You are Billing, indeed", "You are Triage", "You are Billing"]


def test_g08_one_tool_for_two_agents() -> None:
    """g08: two agents whose handoff tools would have one name are refused."""
    with pytest.raises(HandoffError):
        Agent("Support", handoffs=[Agent("Ventas!"), Agent("ventas")])
