"""Each store against a plain model for each owner: driven at random, owners never see each other."""

from __future__ import annotations

import asyncio
import base64
import contextvars
import datetime as dt
import json
from collections.abc import Coroutine
from itertools import count
from pathlib import Path
from typing import Any, Final, TypeVar

import anyio.lowlevel
import attrs
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from chatflow.core.agent import Agent
from chatflow.core.backend import StoreBackend
from chatflow.core.messages import Message, Role
from chatflow.core.owners import ALL, Erased
from chatflow.core.records import NewSession
from chatflow.core.service import ServiceSession
from chatflow.core.session import SessionContext
from chatflow.core.store import BaseSessionStore
from chatflow.core.values import EMPTY
from chatflow.engines.scripted import ScriptedEngine
from chatflow.exceptions import SessionDeletedError, SessionNotFoundError
from chatflow.runner import Runner
from chatflow.testing import Backend
from tests import backends
from tests.backends import BACKENDS
from tests.machines import run_machine

_T = TypeVar("_T")

AGENT: Final = Agent(name="Support")
LONG: Final = "x" * 10_000
QUOTES: Final = "'; DROP TABLE chatflow_sessions; --\"`"
OWNERS: Final = ("", "a", "a:b", "a\0", "A", QUOTES, LONG)
SESSION_IDS: Final = ("c", "b:c", "\0", "c\0", QUOTES, LONG)
MESSAGE_IDS: Final = ("m", "b:m", "m\0", LONG)
SERVICE_IDS: Final = ("resp_1", "resp_2")
AT_SERVICE: Final = ("at a service", "at a service\0")
"""Ids of conversations whose history a service keeps: the engine here knows none, and can't answer in them."""


def drawn(name: str) -> st.SearchStrategy[str]:
    """One of the few names that the machine has chosen for this run: so few that they meet."""
    return st.runner().flatmap(lambda machine: st.sampled_from(getattr(machine, name)))


owners = drawn("names")
answerable_ids = drawn("session_ids")
session_ids = answerable_ids | st.sampled_from(AT_SERVICE)
message_ids = drawn("message_ids")


@attrs.define
class Conversation:
    """What is committed of one."""

    committed_at: dt.datetime
    messages: list[str] = attrs.field(factory=list)
    metadata: dict[str, Any] = attrs.field(factory=dict)
    expires_after: float | None = None
    service_id: str | None = None
    turns: dict[str, str] = attrs.field(factory=dict)
    """Accepted messages, and whether they were answered: in order."""


@attrs.define
class Owner:
    """All that one owner has."""

    conversations: dict[str, Conversation] = attrs.field(factory=dict)
    """The one committed last comes last."""
    ids: dict[tuple[str, str], str | None] = attrs.field(factory=dict)
    """Message ids that are known, by session id, empty for none; each with its answer, if that is kept."""

    def renew(self, session_id: str, now: dt.datetime) -> Conversation:
        """The conversation, committed now."""
        conversation = self.conversations.pop(session_id)
        self.conversations[session_id] = conversation
        conversation.committed_at = now
        return conversation

    def forget(self, session_id: str) -> None:
        """The conversation was deleted: its answers go, and their ids stay known."""
        del self.conversations[session_id]
        for place in self.ids:
            if place[0] == session_id:
                self.ids[place] = None


class OwnersMachine(RuleBasedStateMachine):
    """Every operation of a store, of a runner over it, and of administration, for owners and ids drawn at random."""

    def __init__(self, backend: Backend, folder: Path) -> None:
        super().__init__()
        folder.mkdir()
        self.backend = backend
        self.folder = folder
        self.loop = asyncio.Runner()
        self.now = dt.datetime(2030, 1, 1, tzinfo=dt.UTC)
        self.open()
        self.names = self.session_ids = self.message_ids = [""]
        self.owners: dict[str, Owner] = {}
        self.live: dict[tuple[str, str], SessionContext] = {}
        self.gone: list[SessionContext] = []
        self.numbers = count(1)

    def open(self) -> None:
        """Open a store on what is there."""
        self.store: StoreBackend = self.backend.make(self.folder)
        self.store.clock = lambda: self.now
        self.runner = Runner(AGENT, self.store, ScriptedEngine(default="answer"))

    def run(self, operation: Coroutine[Any, Any, _T]) -> _T:
        """Run *operation* as code that belongs to no turn."""
        return self.loop.run(operation, context=contextvars.Context())

    def teardown(self) -> None:
        """Close the store."""
        self.run(self.store.aclose())
        self.loop.close()

    def face(self, owner: str) -> BaseSessionStore:
        """The owner's store, made for this one call."""
        return self.store.for_owner(owner) if owner else self.store

    def runner_of(self, owner: str) -> Runner:
        """The owner's runner, made for this one call."""
        return self.runner.for_owner(owner) if owner else self.runner

    def forget(self, owner: str, session_id: str) -> None:
        """Note that a conversation was deleted, and that its session object says so from now on."""
        self.owners[owner].forget(session_id)
        session = self.live.pop((owner, session_id), None)
        if session is not None:
            self.gone.append(session)

    def begin(self, owner: str, session_id: str) -> Conversation:
        """The model's conversation, made if need be."""
        model = self.owners[owner]
        if session_id not in model.conversations:
            model.conversations[session_id] = Conversation(self.now)
        return model.conversations[session_id]

    def answer(self, owner: str, session_id: str, text: str, message_id: str | None) -> None:
        """Note a turn that was run."""
        self.owners[owner].renew(session_id, self.now).messages += [text, "answer"]
        if message_id is not None:
            self.owners[owner].ids[session_id, message_id] = "answer"

    # --- conversations ---

    @initialize(
        names=st.permutations(OWNERS),
        session_ids=st.permutations(SESSION_IDS),
        message_ids=st.permutations(MESSAGE_IDS),
    )
    def choose(self, names: list[str], session_ids: list[str], message_ids: list[str]) -> None:
        self.names, self.session_ids, self.message_ids = names[:3], session_ids[:2], message_ids[:2]
        self.owners = {name: Owner() for name in self.names}
        self.create(self.names[0], self.session_ids[0], with_metadata=False, expires_after=None)

    @rule(
        owner=owners,
        session_id=session_ids,
        with_metadata=st.booleans(),
        expires_after=st.sampled_from([None, 3600.0, 86_400.0]),
    )
    def create(self, owner: str, session_id: str, with_metadata: bool, expires_after: float | None) -> None:
        metadata = {"of": owner, "n": next(self.numbers)} if with_metadata else {}
        session = self.run(self.face(owner).get_or_create(session_id, AGENT, metadata, expires_after=expires_after))
        before = self.live.setdefault((owner, session_id), session)
        assert before is session
        if session_id not in self.owners[owner].conversations:
            self.begin(owner, session_id).expires_after = expires_after
        if metadata:
            self.owners[owner].renew(session_id, self.now).metadata |= metadata

    @rule(owner=owners, session_id=st.sampled_from(AT_SERVICE), service_id=st.sampled_from(SERVICE_IDS))
    def create_at_service(self, owner: str, session_id: str, service_id: str) -> None:
        new = NewSession(
            agent_name="Support", metadata=EMPTY, max_turns=None, service=ServiceSession(service_id, None, "a service")
        )
        self.run(self.store.create_session(self.face(owner).key_of(session_id), new))
        if session_id not in self.owners[owner].conversations:
            self.begin(owner, session_id).service_id = service_id

    @rule(owner=owners, session_id=session_ids)
    def say(self, owner: str, session_id: str) -> None:
        session = self.live.get((owner, session_id))
        if session is None:
            return
        text = f"{next(self.numbers)} of {owner[:9]}"
        self.run(session.add_message(Message(Role.USER, text)))
        self.owners[owner].renew(session_id, self.now).messages.append(text)

    @precondition(lambda self: self.gone)
    @rule(data=st.data())
    def say_to_a_deleted_one(self, data: st.DataObject) -> None:
        session = data.draw(st.sampled_from(self.gone))
        with pytest.raises(SessionDeletedError):
            self.run(session.add_message(Message(Role.USER, "back")))

    @rule(owner=owners, session_id=session_ids)
    def delete(self, owner: str, session_id: str) -> None:
        there = session_id in self.owners[owner].conversations
        assert self.run(self.face(owner).delete(session_id)) is there
        if there:
            self.forget(owner, session_id)

    @rule(owner=owners)
    def clear(self, owner: str) -> None:
        self.run(self.face(owner).clear())
        for session_id in list(self.owners[owner].conversations):
            self.forget(owner, session_id)

    # --- messages ---

    @rule(owner=owners, session_id=st.none() | answerable_ids, message_id=message_ids)
    def mark(self, owner: str, session_id: str | None, message_id: str) -> None:
        ids, place = self.owners[owner].ids, (session_id or "", message_id)
        marked = self.run(self.face(owner).mark_message_processed(message_id, session_id=session_id))
        assert marked is (place not in ids)
        ids.setdefault(place, None)

    @rule(owner=owners, session_id=answerable_ids, message_id=message_ids)
    def accept(self, owner: str, session_id: str, message_id: str) -> None:
        model = self.owners[owner]
        known = (session_id, message_id) in model.ids
        receipt = self.run(self.runner_of(owner).accept(session_id, f"text of {message_id}", message_id=message_id))
        if known:
            assert receipt.duplicate
            return
        turns = self.begin(owner, session_id).turns
        assert receipt.duplicate is (message_id in turns)
        turns.setdefault(message_id, "accepted")

    @rule(owner=owners, session_id=answerable_ids, message_id=st.none() | message_ids)
    def run_async(self, owner: str, session_id: str, message_id: str | None) -> None:
        model = self.owners[owner]
        text = "hello" if message_id is None else f"text of {message_id}"
        response = self.run(self.runner_of(owner).run_async(session_id, text, message_id=message_id))
        turns = self.begin(owner, session_id).turns
        if (session_id, message_id) in model.ids:
            assert message_id is not None
            assert response.duplicate
            assert response.content == (model.ids[session_id, message_id] or "")
            return
        assert (response.content, response.duplicate) == ("answer", False)
        for waiting in [each for each, state in turns.items() if state == "accepted"]:
            turns[waiting] = "answered"
            self.answer(owner, session_id, f"text of {waiting}", waiting)
            if waiting == message_id:
                return
        self.answer(owner, session_id, text, message_id)

    @rule()
    def work(self) -> None:
        """Do all that was accepted, for everybody, and hear of it."""
        owed = {
            (owner, session_id, message_id)
            for owner, model in self.owners.items()
            for session_id, conversation in model.conversations.items()
            for message_id in conversation.turns
        }
        heard: set[tuple[str, str, str | None]] = set()

        async def until_heard() -> None:
            async def hear(turn: Any, _: Any) -> None:
                heard.add((turn.owner, turn.session_id, turn.message_id))

            async with self.runner.working(hear):
                while await self.store.pending_turns(owner=ALL):
                    await anyio.lowlevel.checkpoint()

        self.run(until_heard())
        assert heard == owed
        for owner, model in self.owners.items():
            # They are done at the same time, so that any may have been the last to commit.
            listed = self.run(self.face(owner).list_sessions()).items
            for session_id in reversed([info.session_id for info in listed]):
                conversation = model.conversations[session_id]
                for message_id, state in conversation.turns.items():
                    if state == "accepted":
                        self.answer(owner, session_id, f"text of {message_id}", message_id)
                conversation.turns.clear()

    # --- upkeep ---

    @rule(
        owner=st.none() | owners,
        idle_for=st.sampled_from([None, 3600, 86_400]),
        hours=st.sampled_from([0, 1, 12, 30]),
    )
    def purge(self, owner: str | None, idle_for: int | None, hours: int) -> None:
        # Not for so long that message ids would be forgotten.
        if self.now < dt.datetime(2030, 1, 7, tzinfo=dt.UTC):
            self.now += dt.timedelta(hours=hours)
        face = self.face(owner or "")
        count_ = self.run(face.purge(idle_for, owner=ALL if owner is None else None))
        gone = [
            (each, session_id)
            for each, model in self.owners.items()
            for session_id, conversation in model.conversations.items()
            if owner in {None, each} and self.may_go(conversation, idle_for)
        ]
        assert count_ == len(gone)
        for each, session_id in gone:
            self.forget(each, session_id)

    def may_go(self, conversation: Conversation, idle_for: float | None) -> bool:
        """Whether a purge deletes it."""
        alone = (self.now - conversation.committed_at).total_seconds()
        return not conversation.turns and any(
            limit is not None and alone >= limit for limit in (idle_for, conversation.expires_after)
        )

    @rule(owner=owners, own=st.booleans())
    def erase(self, owner: str, own: bool) -> None:
        model = self.owners[owner]
        conversations = model.conversations.values()
        expected = Erased(
            conversations=len(conversations),
            messages=sum(len(each.messages) for each in conversations),
            turns=sum(len(each.turns) for each in conversations),
            message_ids=len(model.ids),
            set_aside=0,
        )
        store = self.face(owner) if own else self.store
        assert self.run(store.erase_owner(owner)) == expected
        for session_id in list(model.conversations):
            self.forget(owner, session_id)
        model.ids.clear()

    @precondition(lambda self: self.backend.survives)
    @rule()
    def restart(self) -> None:
        self.run(self.store.aclose())
        self.open()
        self.live.clear()
        self.gone.clear()

    # --- what is seen ---

    @rule(owner=owners)
    def export(self, owner: str) -> None:
        async def lines() -> list[dict[str, Any]]:
            return [json.loads(line) async for line in self.store.export_owner(owner)]

        found = self.run(lines())
        model = self.owners[owner]
        kinds = [each["kind"] for each in found]
        assert kinds == [
            "export",
            *["conversation"] * len(model.conversations),
            *["turn"] * sum(len(each.turns) for each in model.conversations.values()),
            *["message_id"] * len(model.ids),
        ]
        sessions = (each["session"] for each in found if "session" in each)
        said = sorted([shown(message["content"]) for message in each["messages"]] for each in sessions)
        plain = (each.messages for each in model.conversations.values())
        assert said == sorted(list(each) for each in plain)

    @rule(owner=owners, service_id=st.sampled_from(SERVICE_IDS))
    def find_by_service(self, owner: str, service_id: str) -> None:
        session = self.run(self.face(owner).get_by_service_id(AGENT, service_id))
        held = [
            session_id
            for session_id, conversation in self.owners[owner].conversations.items()
            if conversation.service_id == service_id
        ]
        assert (None if session is None else session.session_id) == (held[-1] if held else None)
        if session is not None:
            assert session.key.owner == owner
            assert self.live.setdefault((owner, session.session_id), session) is session

    @rule(owner=owners, session_id=session_ids, message_id=message_ids)
    def look(self, owner: str, session_id: str, message_id: str) -> None:
        face, model = self.face(owner), self.owners[owner]
        session = self.run(face.get(session_id))
        conversation = model.conversations.get(session_id)
        if conversation is None:
            assert session is None
            with pytest.raises(SessionNotFoundError):
                self.run(face.messages(session_id))
        else:
            assert session is not None
            assert self.live.setdefault((owner, session_id), session) is session
            assert [message.text for message in session.history] == conversation.messages
            assert dict(session.metadata) == conversation.metadata
            assert [message.text for message in self.run(face.messages(session_id)).items] == conversation.messages
        for scope in (None, session_id):
            known = (scope or "", message_id) in model.ids
            assert self.run(face.is_message_processed(message_id, session_id=scope)) is known

    @invariant()
    def everybody_sees_only_their_own(self) -> None:
        self.run(self.compare())

    async def compare(self) -> None:
        """What each owner's store lists is what the owner's model has, and administration sees all."""
        everything: set[tuple[str, str]] = set()
        waiting: list[tuple[str, str, str | None, str]] = []
        for owner, model in self.owners.items():
            face = self.face(owner)
            listed = (await face.list_sessions()).items
            assert [info.session_id for info in listed] == list(reversed(model.conversations))
            assert {info.owner for info in listed} <= {owner}
            assert [info.metadata for info in listed] == [
                conversation.metadata for conversation in reversed(model.conversations.values())
            ]
            expected = [
                (owner, session_id, message_id, state)
                for session_id, conversation in model.conversations.items()
                for message_id, state in conversation.turns.items()
            ]
            turns = await face.pending_turns()
            assert sorted(map(row, turns)) == sorted(expected)
            everything |= {(owner, session_id) for session_id in model.conversations}
            waiting += expected
        seen = (await self.store.list_sessions(owner=ALL)).items
        assert {(info.owner, info.session_id) for info in seen} == everything
        assert sorted(map(row, await self.store.pending_turns(owner=ALL))) == sorted(waiting)


def shown(text: Any) -> str:
    """A text of an export, with what JSON has no plain form for shortened to what the model has of it."""
    return base64.b64decode(text["v"]).decode() if isinstance(text, dict) else text


def row(turn: Any) -> tuple[str, str, str | None, str]:
    """A turn as it is compared."""
    return turn.owner, turn.session_id, turn.message_id, turn.state


@pytest.mark.timeout(300)
@pytest.mark.parametrize("backend", BACKENDS, ids=[backend.name for backend in BACKENDS])
def test_owners_never_see_each_other(backend: Backend, tmp_path: Path) -> None:
    """After any sequence of operations each owner's store shows what that owner's own model has, and nothing else."""
    run_machine(OwnersMachine, backend, tmp_path, backends.examples(backend))


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS, ids=[backend.name for backend in BACKENDS])
def test_owners_never_see_each_other_at_length(backend: Backend, tmp_path: Path) -> None:
    """The same after many sequences."""
    run_machine(OwnersMachine, backend, tmp_path, 500)
