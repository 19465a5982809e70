"""A session as plain JSON, and back; what is no such thing is refused, whatever it is."""

from __future__ import annotations

import json
import logging
import secrets
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

import pytest
from hypothesis import Phase, given, seed, settings

from chatflow import (
    Agent,
    AgentSession,
    HandoffError,
    Message,
    Role,
    ScriptedEngine,
    SessionContext,
    SessionDeletedError,
    SessionStore,
    ToolResult,
)
from chatflow.core.pruning import prune
from chatflow.core.values import MARK, MAX_DEPTH
from tests import strategies
from tests.forms import CALL, HI, everything, through_json
from tests.strategies import exactly, observed, same_session

ROOT: Final = Path(__file__).parent.parent


def restored(session: AgentSession) -> AgentSession:
    """The session that *session*'s form gives."""
    return type(session).from_dict(through_json(session.to_dict()), owner=session.key.owner)


# --- what is written ---------------------------------------------------------------------------------------------


def test_form() -> None:
    """The form is an object with a version and a field for each thing; values stand in it as they do in a file."""
    assert everything().to_dict() == {
        "chatflow_session": 1,
        "session_id": "c7",
        "active_agent_name": "Support",
        "max_turns": 5,
        "expires_after": 3600.0,
        "metadata": {"channel": "whatsapp"},
        "state": {"theme": "dark", "_secret": {MARK: "set", "v": [1, 2]}},
        "messages": [
            {"role": "system", "content": "Be brief.", "timestamp": "2026-01-02T03:04:05+00:00"},
            HI,
            CALL | {"usage": {"input": 3}, "extra": {"signature": {MARK: "bytes", "v": "cw=="}}},
        ],
    }


def test_form_for_clients() -> None:
    """A client gets neither metadata, hidden state, system messages, nor what providers and services have noted."""
    assert everything().to_dict(for_client=True) == {
        "chatflow_session": 1,
        "session_id": "c7",
        "active_agent_name": "Support",
        "max_turns": 5,
        "expires_after": 3600.0,
        "state": {"theme": "dark"},
        "messages": [HI, CALL],
        "for_client": True,
    }


def test_form_of_a_new_session() -> None:
    """A session in which no agent has run yet says so, and has the number of turns that its store keeps."""
    data = AgentSession("s", service_session_id={"contextId": "c"}).to_dict()
    assert data["active_agent_name"] is None
    assert data["max_turns"] == 40
    assert data["service"] == {"id": {"contextId": "c"}, "agent_name": None, "service": None, "seen": 0}


@given(strategies.sessions())
def test_form_is_plain_json(session: AgentSession) -> None:
    """Nothing but dicts with string keys, lists, text, 64 bit integers, finite numbers and constants is written."""
    data = session.to_dict()
    assert through_json(data) == data
    pending: list[object] = [data]
    while pending:
        item = pending.pop()
        assert item is None or type(item) in {dict, list, str, int, float, bool}
        if isinstance(item, dict):
            pending += [*item.keys(), *item.values()]
        elif isinstance(item, list):
            pending += item
        elif isinstance(item, int):
            assert -(2**63) <= item < 2**63


def test_form_shares_nothing() -> None:
    """What is done to the data changes no session, neither the one that gave it nor the one that came of it."""
    session = everything()
    before = observed(session)
    data = session.to_dict()
    back = SessionContext.from_dict(data)
    data["state"]["theme"] = "light"
    data["messages"][0]["content"] = "?"
    data["messages"].clear()
    assert observed(session) == before
    assert observed(back) == before


async def test_form_shows_the_working_copy() -> None:
    """In a turn, its members write what they see; everybody else the last commit, with what waits."""
    session = everything()
    before = session.to_dict()
    async with session.turn():
        await session.add_message(Message(Role.TOOL, tool_results=[ToolResult(tool_call_id="1", name="r", content=1)]))
        await session.set_active_agent(Agent("Billing"))
        session.state["theme"] = "light"
        inside = session.to_dict()
    assert inside == session.to_dict()
    assert (len(inside["messages"]), inside["active_agent_name"], inside["state"]["theme"]) == (4, "Billing", "light")
    assert len(before["messages"]) == 3
    session.metadata["channel"] = "sms"
    assert session.to_dict()["metadata"] == {"channel": "sms"}


async def test_deleted_session_has_no_form() -> None:
    """A session that was deleted gives nothing away any more."""
    store = SessionStore()
    session = await store.get_or_create("s", Agent("Support"))
    await store.delete("s")
    with pytest.raises(SessionDeletedError):
        session.to_dict()


# --- what comes back ---------------------------------------------------------------------------------------------


@given(strategies.sessions())
def test_session_comes_back(session: AgentSession) -> None:
    """A session comes back from JSON text equal in all that can be seen, and to the types of all values in it."""
    back = restored(session)
    assert same_session(back, session)
    assert back.to_dict() == session.to_dict() or same_session(restored(back), session)  # sets have no order


def drawn(number: int, count: int) -> list[AgentSession]:
    """So many sessions, the same for the same number."""
    found: list[AgentSession] = []

    @seed(number)
    @settings(max_examples=count, database=None, phases=[Phase.generate])
    @given(strategies.sessions())
    def collect(session: AgentSession) -> None:
        found.append(session)

    collect()
    return found


def test_sessions_come_back_in_another_process() -> None:
    """Sessions come back equal in a process that has never seen them."""
    number = secrets.randbits(32)
    print(f"the sessions are those of the seed {number}")  # noqa: T201  # shown where it fails
    sessions = drawn(number, 50)
    lines = [json.dumps([type(each).__name__, each.key.owner, each.to_dict()], allow_nan=False) for each in sessions]
    done = subprocess.run(
        [sys.executable, "-m", "tests.restored"],
        input="\n".join(lines),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        cwd=ROOT,
    )
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(answers) == len(sessions) >= 40
    for session, (seen, data) in zip(sessions, answers, strict=True):
        assert seen == repr(observed(session))
        assert same_session(type(session).from_dict(data, owner=session.key.owner), session)


@given(strategies.sessions())
def test_session_comes_back_from_a_client(session: AgentSession) -> None:
    """What a client was given comes back: the session, less what is no client's business, and whole turns."""
    data = through_json(session.to_dict(for_client=True))
    back = type(session).from_dict(data, owner=session.key.owner)
    assert same_session(back, type(session).from_dict(data, owner=session.key.owner, from_client=True))
    assert same_session(back, type(session).from_dict(back.to_dict(for_client=True), owner=session.key.owner))
    assert back.key == session.key
    assert (back.metadata, back.service_session_id) == ({}, None)
    shown = {key: value for key, value in session.state.items() if not key.startswith("_")}
    assert exactly(dict(back.state)) == exactly(shown)
    said = [message for message in session.history if message.role is not Role.SYSTEM]
    kinds = [(each.role, each.content, each.tool_calls, each.tool_results, each.agent_name) for each in said]
    assert exactly(kinds) == exactly(
        [(each.role, each.content, each.tool_calls, each.tool_results, each.agent_name) for each in back.history]
    )
    assert not any(message.extra or message.usage is not None for message in back.history)
    assert list(prune(back.history, len(said) + 1)) == list(back.history)


async def test_restored_session_goes_on() -> None:
    """A restored session goes on where it was: its agent is asked with all that was said before."""
    engine = ScriptedEngine(default="yes")
    agent = Agent("Support", engine=engine)
    session = agent.create_session()
    await agent.run("My name is Alice.", session=session)
    back = SessionContext.from_dict(through_json(session.to_dict()))
    await agent.run("What is my name?", session=back)
    assert [message.text for message in engine.requests[-1].messages] == [
        "My name is Alice.",
        "yes",
        "What is my name?",
    ]
    assert len(session.history) == 2


async def test_open_call_can_be_answered() -> None:
    """A call that waited for an approval is answered in the restored session."""
    back = restored(everything())
    await back.add_message(Message(Role.TOOL, tool_results=[ToolResult(tool_call_id="1", name="refund", content="ok")]))
    assert back.history[-1].tool_results[0].content == "ok"


def test_deepest_value_comes_back() -> None:
    """A value as deep as one may be comes back, wherever it stands."""
    deepest: Any = b"x"
    for _ in range(MAX_DEPTH - 3):
        deepest = [deepest]
    result = ToolResult(tool_call_id="1", name="refund", content=deepest)
    answered = [*everything().history, Message(Role.TOOL, tool_results=[result])]
    session = everything(history=strategies.history_of(answered))
    session.state["deep"] = session.metadata["deep"] = deepest
    assert same_session(restored(session), session)


# --- agents ------------------------------------------------------------------------------------------------------

billing: Final = Agent("Billing")
support: Final = Agent("Support", handoffs=[billing])


@pytest.mark.parametrize(
    "agents",
    [support, [Agent("Other"), support], (each for each in [support]), {"Support": support}, {"Billing": billing}],
    ids=["one", "several", "a generator", "by name", "by name itself"],
)
def test_agents_are_found(agents: Any) -> None:
    """The active agent is one of those given, or one that they hand over to."""
    data = everything().to_dict() | {"active_agent_name": "Billing"}
    assert SessionContext.from_dict(data, agents=agents).active_agent is billing


def test_agent_by_another_name() -> None:
    """A mapping may know an agent by the name that it had when the session was stored."""
    data = everything().to_dict() | {"active_agent_name": "Accounts"}
    assert SessionContext.from_dict(data, agents={"Accounts": billing}).active_agent is billing


def test_agent_that_is_within_reach_later() -> None:
    """Handoffs that are added after the session was restored count."""
    first, second = Agent("First"), Agent("Second")
    session = SessionContext.from_dict(
        everything().to_dict() | {"active_agent_name": "Second"}, agents=[Agent("X"), first]
    )
    first.add_handoff(second)
    assert session.active_agent is second


def test_unknown_agent(caplog: pytest.LogCaptureFixture) -> None:
    """A name that nobody knows is reported and kept; the first of the agents answers for it."""
    data = everything().to_dict() | {"active_agent_name": "Gone"}
    session = SessionContext.from_dict(data, agents=[support])
    with caplog.at_level(logging.WARNING):
        assert session.active_agent is support
    assert "no agent is named 'Gone'" in caplog.text
    assert session.to_dict() == data


def test_agents_must_be_agents() -> None:
    """Agents that are none, or two of one name, are the caller's mistake."""
    data = everything().to_dict()
    with pytest.raises(TypeError, match="agents must be agents, not str"):
        SessionContext.from_dict(data, agents=["Support"])  # type: ignore[list-item]
    with pytest.raises(HandoffError):
        SessionContext.from_dict(data, agents=[Agent("A"), Agent("A")])
    with pytest.raises(TypeError, match="owner must be a string, not int"):
        SessionContext.from_dict(data, owner=5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="max_characters must be at least 1, not 0"):
        SessionContext.from_dict(data, max_characters=0)
