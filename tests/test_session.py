"""Sessions of their own: made without a store."""

from __future__ import annotations

import datetime as dt
from typing import Any

import pytest

from chatflow import Agent, AgentSession, ScriptedEngine, SessionContext, SessionError, SessionStateError, SessionStore
from chatflow.engines.scripted import user_text


def answering(name: str = "Support") -> Agent:
    """An agent that repeats what it is told."""
    return Agent(name=name, engine=ScriptedEngine(default=lambda request: f"{user_text(request)}!"))


async def test_carries_its_own_history() -> None:
    """A session without a store remembers what was said in it."""
    agent = answering()
    session = agent.create_session()
    first = await agent.run("My name is Alice.", session=session)
    await agent.run("What is my name?", session=session)
    assert first.content == "My name is Alice.!"
    assert [message.text for message in session.history][::2] == ["My name is Alice.", "What is my name?"]


async def test_run_without_a_session() -> None:
    """Without a session, each run is one turn of a fresh one."""
    engine = ScriptedEngine(default="yes")
    agent = Agent("Support", engine=engine)
    await agent.run("one")
    await agent.run("two")
    assert [len(request.messages) for request in engine.requests] == [1, 1]


def test_session_context_is_an_agent_session() -> None:
    """There is one class of sessions."""
    assert isinstance(answering().create_session(), SessionContext)
    assert issubclass(SessionContext, AgentSession)


def test_ids_are_random() -> None:
    """An id that is not given has 128 bits, and another one each time."""
    ids = {answering().create_session().session_id for _ in range(100)} | {AgentSession().session_id}
    assert len(ids) == 101
    assert all(len(bytes.fromhex(each)) == 16 for each in ids)


def test_made_outside_of_a_loop() -> None:
    """A session can be made, and its state set, where no event loop runs."""
    session = answering().create_session("s", store=SessionStore())
    session.set("theme", "dark")
    assert session.state == {"theme": "dark"}


async def test_first_agent_takes_it() -> None:
    """A session that was made without an agent belongs to the first one that runs in it."""
    session = AgentSession(state={"theme": "dark"})
    assert session.active_agent_name == ""
    with pytest.raises(SessionError, match="no agent has run in it yet"):
        session.active_agent  # noqa: B018
    agent = answering()
    await agent.run("one", session=session)
    assert session.active_agent_name == "Support"
    assert session.state == {"theme": "dark"}


def test_service_session_id() -> None:
    """A session says the service's id that it was made with, as it was given."""
    assert AgentSession(service_session_id="conv_1").service_session_id == "conv_1"
    id_ = {"contextId": "c", "taskId": "t"}
    assert answering().get_session(service_session_id=id_).service_session_id == id_
    assert AgentSession().service_session_id is None


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"session_id": ""}, ValueError),
        ({"session_id": 7}, TypeError),
        ({"service_session_id": ""}, ValueError),
        ({"service_session_id": 7}, TypeError),
        ({"state": {"a": object()}}, SessionStateError),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], error: type[Exception]) -> None:
    """What can't be is refused when the session is made."""
    with pytest.raises(error):
        AgentSession(**arguments)


async def test_run_takes_sessions_alone() -> None:
    """Something else than a session is refused by its type."""
    wrong: Any = "s"
    with pytest.raises(TypeError, match="must be an AgentSession or left out, not str"):
        await answering().run("one", session=wrong)


async def test_wrong_choice_for_lost_sessions() -> None:
    """What to do about a lost session is one of two words."""
    wrong: Any = "ignore"
    with pytest.raises(ValueError, match="'raise' or 'replay'"):
        await answering().run("one", on_lost_service_session=wrong)


def test_what_cannot_be_kept() -> None:
    """Setting what can't be kept is refused by its path, and changes nothing."""
    session = AgentSession(state={"a": 1})
    with pytest.raises(SessionStateError) as caught:
        session.set("prefs", {"theme": object()})
    assert caught.value.path == "state.prefs.theme"
    assert session.state == {"a": 1}


async def test_run_refuses_none() -> None:
    """None is no session: whoever looked for one and found none is not given one that forgets."""
    nobody: Any = await SessionStore().for_owner("alice").get_by_service_id(answering(), "resp_1")
    with pytest.raises(TypeError, match="or left out, not NoneType"):
        await answering().run("one", session=nobody)
    with pytest.raises(TypeError, match="must be a string or a mapping, not NoneType"):
        answering().get_session(nobody)


def test_limits_of_a_new_conversation() -> None:
    """A session that an agent makes may have a number of turns and a retention of its own."""
    session = answering().create_session(max_turns=3, expires_after=60)
    assert (session.max_turns, session.expires_after) == (3, dt.timedelta(minutes=1))
    with pytest.raises(ValueError, match="max_turns must be at least 1"):
        answering().create_session(max_turns=0)
    with pytest.raises(ValueError, match="must be a microsecond at least"):
        answering().create_session(expires_after=1e-9)


def test_store_that_is_none() -> None:
    """A store's class, or something else, is refused when the session is made."""
    wrong: Any = SessionStore
    with pytest.raises(TypeError, match="store must be a session store"):
        answering().create_session("s", store=wrong)


@pytest.mark.parametrize("default", [0, None, "dark", [], {}])
def test_default_in_the_place_of_the_kind(default: Any) -> None:
    """A default that is given where the kind belongs is refused, and the error says where it goes."""
    session = AgentSession(state={"a": 1})
    for key in ("a", "missing"):
        with pytest.raises(TypeError, match="a default is given as default="):
            session.get(key, default)
    assert session.get("missing", default=default) == default
