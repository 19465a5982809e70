"""Each store against a plain model: dicts and lists, and `prune` for what a commit keeps."""

from __future__ import annotations

import asyncio
import contextvars
import copy
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from itertools import count
from pathlib import Path
from typing import Any, Final, TypeVar

import anyio
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
from chatflow.core.engine import EngineReply, EngineRequest
from chatflow.core.handle import Checkpoint
from chatflow.core.messages import AgentResponse, Message, Role, ToolCall, ToolResult
from chatflow.core.pruning import prune
from chatflow.core.records import Claim, PendingTurn
from chatflow.core.session import SessionContext
from chatflow.core.store import BaseSessionStore
from chatflow.core.turn import Turn
from chatflow.exceptions import SessionDeletedError, UnmatchedToolResultError
from chatflow.runner import Runner
from chatflow.testing import Backend
from tests import backends
from tests.backends import BACKENDS
from tests.machines import run_machine

_T = TypeVar("_T")

AGENTS: Final = {name: Agent(name=name) for name in ("Support", "Billing")}
REMOVED: Final = object()
DEFAULT_MAX_TURNS: Final = 2
MANY: Final = 1000
"""Attempts: none of the messages is given up."""

ids = st.sampled_from(["a", "b"])
message_ids = st.sampled_from(["m1", "m2", "m3", "m4"])
kinds = st.sampled_from(["state", "metadata"])
keys = st.sampled_from(["k1", "k2", "k3"])
call_ids = st.sampled_from(["c1", "c2", ""])
messages = st.one_of(
    st.builds(lambda: Message(Role.USER, "hello")),
    st.builds(lambda: Message(Role.MODEL, "hello!")),
    st.builds(lambda: Message(Role.SYSTEM, "be brief")),
    st.lists(call_ids, min_size=1, max_size=2).map(
        lambda found: Message(Role.MODEL, tool_calls=[ToolCall(id=each, name="t") for each in found])
    ),
    st.lists(call_ids, min_size=1, max_size=2).map(
        lambda found: Message(
            Role.TOOL, tool_results=[ToolResult(tool_call_id=each, name="t", content=[each]) for each in found]
        )
    ),
)

Values = dict[str, Any]


class Answers:
    """An engine that repeats what the user has said, unless it is to fail."""

    def __init__(self) -> None:
        self.failing: set[str] = set()

    async def generate(self, request: EngineRequest) -> EngineReply:
        """Repeat it, or fail."""
        said = next(message.text for message in reversed(request.messages) if message.role is Role.USER)
        if said in self.failing:
            raise ZeroDivisionError
        return EngineReply(text=f"{said}!")


@attrs.define
class Waiting:
    """A message in its conversation's line that nobody does at the moment."""

    state: str
    accepted: bool


def plain(messages: Iterable[Message]) -> list[Any]:
    """What was said, without when and by which agent."""
    return [(each.role, each.text, each.tool_calls, each.tool_results) for each in messages]


def changed(values: Values, changes: Values) -> Values:
    """*values* with *changes*, of which some remove keys."""
    return {key: value for key, value in {**values, **changes}.items() if value is not REMOVED}


@attrs.define
class Working:
    """What a turn's members see."""

    max_turns: int
    messages: list[Message]
    agent: str
    values: dict[str, Values]

    @property
    def history(self) -> list[Message]:
        """What the turn would commit."""
        return list(prune(self.messages, self.max_turns))

    def takes(self, message: Message) -> bool:
        """Add *message*, unless it holds a result without a call; one before any user message is dropped."""
        calls = {call.id for each in self.messages for call in each.tool_calls}
        if any(result.tool_call_id not in calls for result in message.tool_results):
            return False
        if message.role is not Role.MODEL or any(each.role is Role.USER for each in self.messages):
            self.messages.append(message)
        return True


@attrs.define
class Conversation:
    """What is committed, and what waits in the session object."""

    max_turns: int | None
    agent: str
    values: dict[str, Values]
    messages: list[Message] = attrs.field(factory=list)
    pending: dict[str, Values] = attrs.field(factory=lambda: {"state": {}, "metadata": {}})
    line: dict[str, Waiting] = attrs.field(factory=dict)
    """Messages that wait to be answered, in order."""
    told: set[str] = attrs.field(factory=set)
    """Messages that failed, and whose callers know."""
    owed: set[str] = attrs.field(factory=set)
    """Accepted messages that were answered, and whose answers nobody has heard yet."""

    def seen(self, kind: str) -> Values:
        """State or metadata as it is seen outside of turns."""
        return changed(self.values[kind], self.pending[kind])


class Held:
    """A turn that is open across steps, in a task of its own that does what it is told."""

    def __init__(
        self,
        conversation: Conversation,
        session: SessionContext,
        default_max_turns: int,
        message_id: str | None = None,
    ) -> None:
        self.conversation = conversation
        self.message_id = message_id
        self.session = session
        self.deleted = False
        self.taken = {kind: dict(waiting) for kind, waiting in conversation.pending.items()}
        self.base = dict(conversation.values["metadata"])
        self.working = Working(
            conversation.max_turns or default_max_turns,
            list(conversation.messages),
            conversation.agent,
            {kind: conversation.seen(kind) for kind in ("state", "metadata")},
        )
        self.tokens: list[tuple[Checkpoint, Working]] = []
        self.orders: asyncio.Queue[tuple[Callable[[], Awaitable[Any]] | None, asyncio.Future[Any]]] = asyncio.Queue()

    async def hold(self, began: asyncio.Event) -> None:
        """Take the turn, do what is ordered, and end when nothing more is."""
        claim = None if self.message_id is None else Claim(self.message_id, self.message_id)
        turn = Turn(self.session, claim, None if claim is None else "Support", max_attempts=MANY)
        assert await turn.take() is None
        began.set()
        try:
            await self.do()
        except BaseException as error:
            await turn.drop(error)
            raise
        turn.response = None if claim is None else AgentResponse(content="yes", active_agent_name="Support")
        await turn.commit()

    async def do(self) -> None:
        """Do what is ordered."""
        while True:
            order, answer = await self.orders.get()
            if order is None:
                answer.set_result(None)
                return
            try:
                answer.set_result(await order())
            except ZeroDivisionError:
                answer.set_result(None)
                raise
            except Exception as error:  # noqa: BLE001  # the step that gave the order looks at it
                answer.set_exception(error)

    async def tell(self, order: Callable[[], Awaitable[_T]] | None) -> _T:
        """Have *order* done inside the turn; None ends it."""
        answer: asyncio.Future[_T] = asyncio.get_running_loop().create_future()
        await self.orders.put((order, answer))
        return await answer

    def commit(self) -> None:
        """Make what the turn did the conversation."""
        conversation, working = self.conversation, self.working
        conversation.messages = working.history
        conversation.agent = working.agent
        conversation.values["state"] = working.values["state"]
        mine = working.values["metadata"]
        changes = {key: value for key, value in mine.items() if self.base.get(key, REMOVED) != value}
        changes |= {key: REMOVED for key in self.base if key not in mine}
        conversation.values["metadata"] = changed(conversation.values["metadata"], changes)
        for kind, taken in self.taken.items():
            waiting = conversation.pending[kind]
            for key, value in taken.items():
                if key in waiting and waiting[key] is value:
                    del waiting[key]


class StoreMachine(RuleBasedStateMachine):
    """Conversations "a" and "b", each with at most one turn that is open across steps."""

    def __init__(self, backend: Backend, folder: Path) -> None:
        super().__init__()
        folder.mkdir()
        self.backend = backend
        self.folder = folder
        self.loop = asyncio.Runner()
        self.engine = Answers()
        self.open(DEFAULT_MAX_TURNS)
        self.conversations: dict[str, Conversation] = {}
        self.held: dict[str, tuple[Held, asyncio.Task[None]]] = {}
        self.processed: set[tuple[str | None, str]] = set()
        self.values = count(1)
        self.newest: str | None = None

    def open(self, default_max_turns: int) -> None:
        """Open a store on what is there, and a runner on it."""
        self.store: BaseSessionStore = self.backend.make(self.folder, default_max_turns=default_max_turns)
        self.runner = Runner(AGENTS["Support"], self.store, self.engine, max_attempts=MANY)
        self.default_max_turns = default_max_turns

    def run(self, operation: Coroutine[Any, Any, _T]) -> _T:
        """Run *operation* as code that belongs to no turn."""
        return self.loop.run(operation, context=contextvars.Context())

    def teardown(self) -> None:
        """End the open turns and close the store."""
        for held, task in self.held.values():
            self.run(self.end_of(held, task))
        self.run(self.store.aclose())
        self.loop.close()

    async def end_of(self, held: Held, task: asyncio.Task[None], order: Any = None) -> BaseException | None:
        """End an open turn, and return the error it ended with."""
        await held.tell(order)
        await asyncio.wait([task])
        return task.exception()

    def session(self, session_id: str) -> SessionContext:
        """The session object of a conversation that is there."""
        session = self.run(self.store.get(session_id))
        assert session is not None
        return session

    def is_free(self, session_id: str) -> bool:
        """Whether the conversation is there and no turn of it is open."""
        held = self.held.get(session_id)
        return session_id in self.conversations and (held is None or held[0].deleted)

    def commit(self, session_id: str, held: Held) -> None:
        """Make what a turn did the conversation, which is the newest in the list then, if anything was changed."""
        conversation = held.conversation
        if (held.working.history, held.working.agent) != (conversation.messages, conversation.agent):
            self.newest = session_id
        elif self.newest != session_id:
            self.newest = None
        held.commit()

    def alone(self, session_id: str) -> Held:
        """The model of a turn that begins and ends within one step."""
        return Held(self.conversations[session_id], self.session(session_id), self.default_max_turns)

    # --- conversations ---

    @initialize(metadata=st.booleans())
    def begin_with_one(self, metadata: bool) -> None:
        self.create("a", "Support", metadata, None)

    @rule(
        session_id=ids,
        agent=st.sampled_from(sorted(AGENTS)),
        with_metadata=st.booleans(),
        max_turns=st.sampled_from([None, 1, 3]),
    )
    def create(self, session_id: str, agent: str, with_metadata: bool, max_turns: int | None) -> None:
        metadata = {"k1": next(self.values), "k2": [next(self.values)]} if with_metadata else {}
        self.run(self.store.get_or_create(session_id, AGENTS[agent], metadata, max_turns=max_turns))
        conversation = self.conversations.get(session_id)
        if conversation is None:
            conversation = Conversation(max_turns, agent, {"state": {}, "metadata": {}})
            self.conversations[session_id] = conversation
            self.newest = session_id
        if metadata:
            conversation.values["metadata"] |= metadata
            self.newest = session_id

    @rule(session_id=ids)
    def delete(self, session_id: str) -> None:
        assert self.run(self.store.delete(session_id)) is (session_id in self.conversations)
        self.forget(session_id)

    @rule()
    def clear(self) -> None:
        self.run(self.store.clear())
        for session_id in list(self.conversations):
            self.forget(session_id)

    def forget(self, session_id: str) -> None:
        if self.conversations.pop(session_id, None) is not None:
            self.newest = None
            if session_id in self.held:
                self.held[session_id][0].deleted = True

    @precondition(lambda self: not self.held and self.backend.shares)
    @rule(default_max_turns=st.sampled_from([1, 2, 4]))
    def restart(self, default_max_turns: int) -> None:
        old = self.store
        self.open(default_max_turns)
        if self.backend.survives:
            self.run(old.aclose())
        else:
            self.run(self.store.list_sessions())
            self.run(old.aclose())
        for conversation in self.conversations.values():
            conversation.pending = {"state": {}, "metadata": {}}

    @precondition(lambda self: self.backend.survives)
    @rule(default_max_turns=st.sampled_from([1, 2, 4]))
    def crash(self, default_max_turns: int) -> None:
        """Go on with the files as they are, as if the process had been killed, and what it held were nobody's."""
        old, before = self.store, self.folder
        self.folder = before.with_name(f"{before.name}x")
        backends.copy(self.backend, before, self.folder)
        self.run(self.kill(old))
        self.open(default_max_turns)
        for held, _ in self.held.values():
            if held.message_id is not None and not held.deleted:
                # It keeps its place, which is before all that have come since.
                line = held.conversation.line
                held.conversation.line = {held.message_id: Waiting("interrupted", accepted=False), **line}
        self.held.clear()
        for conversation in self.conversations.values():
            conversation.pending = {"state": {}, "metadata": {}}

    async def kill(self, store: BaseSessionStore) -> None:
        """End what the store has under way; none of it reaches the files that are gone on with."""
        tasks = [task for _, task in self.held.values()]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        await store.aclose()

    # --- messages, sent and accepted ---

    def is_under_way(self, session_id: str, message_id: str) -> bool:
        """Whether the message has a place in the line."""
        held = self.held.get(session_id)
        if held is not None and held[0].message_id == message_id and not held[0].deleted:
            return True
        conversation = self.conversations.get(session_id)
        return conversation is not None and message_id in conversation.line

    def begin_with(self, session_id: str) -> None:
        """The conversation that a message begins, if there is none."""
        if session_id not in self.conversations:
            self.conversations[session_id] = Conversation(None, "Support", {"state": {}, "metadata": {}})
            self.newest = session_id

    def answered(self, session_id: str, message_id: str) -> None:
        """The model of a message's turn that has committed."""
        held = self.alone(session_id)
        held.working.takes(Message(Role.USER, message_id))
        held.working.takes(Message(Role.MODEL, f"{message_id}!"))
        self.commit(session_id, held)
        conversation = self.conversations[session_id]
        waited = conversation.line.pop(message_id, None)
        if waited is not None and waited.accepted:
            conversation.owed.add(message_id)
        conversation.told.discard(message_id)
        self.processed.add((session_id, message_id))

    def adopt(self, session_id: str) -> None:
        """Take over the messages that were made meanwhile, which are those of the model but for when."""
        conversation = self.conversations[session_id]
        found = list(self.session(session_id).history)
        assert plain(found) == plain(conversation.messages)
        conversation.messages = found

    @rule(session_id=ids, message_id=message_ids, fails=st.booleans())
    def send(self, session_id: str, message_id: str, fails: bool) -> None:
        held = self.held.get(session_id)
        if held is not None and not held[0].deleted:
            return
        known = (session_id, message_id) in self.processed
        self.begin_with(session_id)
        line = self.conversations[session_id].line
        before = [] if known else list(line)
        if message_id in before:
            before = before[: before.index(message_id)]
        self.engine.failing = {message_id} if fails else set()
        try:
            response = self.run(self.runner.run_async(session_id, message_id, message_id=message_id))
        except ZeroDivisionError:
            assert fails
            assert not known
            for each in before:
                self.answered(session_id, each)
            waited = line.pop(message_id, None)
            if waited is not None and waited.accepted:
                # In its place still, which is the first.
                self.conversations[session_id].line = {message_id: Waiting("accepted", accepted=True), **line}
            else:
                self.conversations[session_id].told.add(message_id)
        else:
            assert not fails or known
            assert response.duplicate is known
            for each in [] if known else [*before, message_id]:
                self.answered(session_id, each)
        self.adopt(session_id)

    @rule(session_id=ids, message_id=message_ids)
    def accept(self, session_id: str, message_id: str) -> None:
        held = self.held.get(session_id)
        if held is not None and held[0].message_id == message_id and not held[0].deleted:
            return
        receipt = self.run(self.runner.accept(session_id, message_id, message_id=message_id))
        if (session_id, message_id) in self.processed:
            assert (receipt.turn_id, receipt.duplicate) == (None, True)
            return
        self.begin_with(session_id)
        conversation = self.conversations[session_id]
        waited = conversation.line.get(message_id)
        assert receipt.duplicate is (waited is not None)
        if waited is None:
            conversation.line[message_id] = Waiting("accepted", accepted=True)
            conversation.told.discard(message_id)
        else:
            waited.accepted = True

    @precondition(lambda self: not self.held)
    @rule()
    def work(self) -> None:
        """Do all that waits, in order in each conversation."""
        told: list[tuple[str, str | None]] = []
        self.engine.failing = set()

        async def on_response(turn: PendingTurn, response: AgentResponse) -> None:
            told.append((turn.session_id, turn.message_id))

        async def work() -> None:
            with anyio.fail_after(20):
                async with self.runner.working(on_response):
                    while len(told) < owed or any(turn.state != "told" for turn in await self.store.pending_turns()):
                        await anyio.lowlevel.checkpoint()

        owed = 0
        for session_id, conversation in self.conversations.items():
            for message_id in list(conversation.line):
                self.answered(session_id, message_id)
            owed += len(conversation.owed)
        self.run(work())
        assert sorted(told) == sorted(
            (session_id, message_id)
            for session_id, conversation in self.conversations.items()
            for message_id in conversation.owed
        )
        self.newest = None  # conversations are worked on at the same time
        for session_id, conversation in self.conversations.items():
            conversation.owed.clear()
            self.adopt(session_id)

    # --- outside of turns ---

    @rule(session_id=ids, kind=kinds, key=keys)
    def change(self, session_id: str, kind: str, key: str) -> None:
        if session_id in self.conversations:
            value = next(self.values)
            getattr(self.session(session_id), kind)[key] = value
            self.conversations[session_id].pending[kind][key] = value

    @rule(session_id=ids, kind=kinds, key=keys)
    def remove(self, session_id: str, kind: str, key: str) -> None:
        if session_id in self.conversations and key in self.conversations[session_id].seen(kind):
            del getattr(self.session(session_id), kind)[key]
            self.conversations[session_id].pending[kind][key] = REMOVED

    @rule(session_id=ids, message=messages)
    def add(self, session_id: str, message: Message) -> None:
        if self.is_free(session_id):
            held = self.alone(session_id)
            if held.working.takes(message):
                self.run(held.session.add_message(message))
                self.commit(session_id, held)
            else:
                with pytest.raises(UnmatchedToolResultError):
                    self.run(held.session.add_message(message))

    @rule(session_id=ids, agent=st.sampled_from(sorted(AGENTS)))
    def set_agent(self, session_id: str, agent: str) -> None:
        if self.is_free(session_id):
            held = self.alone(session_id)
            self.run(held.session.set_active_agent(AGENTS[agent]))
            held.working.agent = agent
            self.commit(session_id, held)

    @rule(session_id=ids)
    def clear_history(self, session_id: str) -> None:
        if self.is_free(session_id):
            held = self.alone(session_id)
            self.run(held.session.clear_history())
            held.working.messages = []
            self.commit(session_id, held)

    @rule(session_id=ids)
    def save(self, session_id: str) -> None:
        if self.is_free(session_id):
            held = self.alone(session_id)
            self.run(held.session.save())
            self.commit(session_id, held)

    @rule(session_id=ids, texts=st.lists(st.just("hello"), max_size=4))
    def add_and_roll_back(self, session_id: str, texts: list[str]) -> None:
        if self.is_free(session_id):
            held = self.alone(session_id)

            async def add_and_roll_back() -> None:
                token = held.session.checkpoint()
                for text in texts:
                    await held.session.add_message(Message(Role.USER, text))
                await held.session.rollback_to(token)

            self.run(add_and_roll_back())
            self.newest = None
            held.working.max_turns = 10**6  # back to exactly what it was, though the store's default may be smaller now
            self.commit(session_id, held)

    @rule(session_id=ids, message_id=message_ids, fails=st.booleans())
    def answer(self, session_id: str, message_id: str, fails: bool) -> None:
        if not self.is_free(session_id) or self.is_under_way(session_id, message_id):
            return
        held = self.alone(session_id)
        message = Message(Role.USER, message_id)

        async def answer() -> bool:
            turn = Turn(held.session, claim=Claim(message_id, message_id))
            if await turn.take() is not None:
                return False
            await held.session.add_message(message)
            if fails:
                await turn.drop()
            else:
                turn.response = AgentResponse(content="yes", active_agent_name="Support")
                await turn.commit()
            return True

        ran = self.run(answer())
        assert ran is ((session_id, message_id) not in self.processed)
        if ran and fails:
            self.conversations[session_id].told.add(message_id)
        if ran and not fails:
            self.conversations[session_id].told.discard(message_id)
            self.processed.add((session_id, message_id))
            held.working.takes(message)
            self.commit(session_id, held)

    @rule(session_id=st.one_of(st.none(), ids), message_id=message_ids)
    def mark(self, session_id: str | None, message_id: str) -> None:
        if session_id is not None and self.is_open_message(session_id, message_id):
            return
        won = self.run(self.store.mark_message_processed(message_id, session_id=session_id))
        assert won is ((session_id, message_id) not in self.processed)
        self.processed.add((session_id, message_id))

    def is_open_message(self, session_id: str, message_id: str) -> bool:
        """Whether the message is not answered yet; marked by hand then, it would be both."""
        conversation = self.conversations.get(session_id)
        is_told = conversation is not None and message_id in conversation.told
        return is_told or self.is_under_way(session_id, message_id)

    # --- turns that are open across steps ---

    @rule(session_id=ids)
    def begin_turn(self, session_id: str) -> None:
        self.begin(session_id, None)

    @rule(session_id=ids, message_id=message_ids)
    def begin_turn_of_message(self, session_id: str, message_id: str) -> None:
        self.begin(session_id, message_id)

    def begin(self, session_id: str, message_id: str | None) -> None:
        """Open a turn that stays open."""
        if not self.is_free(session_id) or session_id in self.held:
            return
        conversation = self.conversations[session_id]
        if message_id is not None and ((session_id, message_id) in self.processed or conversation.line):
            return
        held = self.alone(session_id)
        held.message_id = message_id
        conversation.told.discard(message_id or "")

        async def begin() -> asyncio.Task[None]:
            began = asyncio.Event()
            task = asyncio.create_task(held.hold(began))
            await began.wait()
            return task

        self.held[session_id] = (held, self.run(begin()))

    def in_turn(self, session_id: str, order: Callable[[Held], Awaitable[_T]]) -> Held | None:
        """Have *order* done in the conversation's open turn; None if there is none, or it was deleted."""
        if session_id not in self.held:
            return None
        held, _ = self.held[session_id]
        if held.deleted:
            with pytest.raises(SessionDeletedError):
                self.run(held.tell(lambda: order(held)))
            return None
        self.run(held.tell(lambda: order(held)))
        return held

    @rule(session_id=ids, message=messages)
    def add_in_turn(self, session_id: str, message: Message) -> None:
        async def add(held: Held) -> None:
            if held.deleted or held.working.takes(message):
                await held.session.add_message(message)
            else:
                with pytest.raises(UnmatchedToolResultError):
                    await held.session.add_message(message)

        self.in_turn(session_id, add)

    @rule(session_id=ids, agent=st.sampled_from(sorted(AGENTS)))
    def set_agent_in_turn(self, session_id: str, agent: str) -> None:
        held = self.in_turn(session_id, lambda held: held.session.set_active_agent(AGENTS[agent]))
        if held is not None:
            held.working.agent = agent

    @rule(session_id=ids)
    def clear_history_in_turn(self, session_id: str) -> None:
        held = self.in_turn(session_id, lambda held: held.session.clear_history())
        if held is not None:
            held.working.messages = []

    @rule(session_id=ids, kind=kinds, key=keys, remove=st.booleans())
    def change_in_turn(self, session_id: str, kind: str, key: str, remove: bool) -> None:
        value = REMOVED if remove else next(self.values)

        async def change(held: Held) -> None:
            values = getattr(held.session, kind)
            if value is not REMOVED:
                values[key] = value
            elif key in held.working.values[kind]:
                del values[key]
            held.working.values[kind] = changed(held.working.values[kind], {key: value})

        if session_id in self.held and not self.held[session_id][0].deleted:
            self.in_turn(session_id, change)

    @rule(session_id=ids)
    def checkpoint_in_turn(self, session_id: str) -> None:
        async def take(held: Held) -> None:
            held.tokens.append((held.session.checkpoint(), copy.deepcopy(held.working)))

        if session_id in self.held and not self.held[session_id][0].deleted:
            self.in_turn(session_id, take)

    @rule(session_id=ids, number=st.integers(0, 3))
    def roll_back_in_turn(self, session_id: str, number: int) -> None:
        if session_id in self.held and number < len(self.held[session_id][0].tokens):
            held = self.in_turn(session_id, lambda held: held.session.rollback_to(held.tokens[number][0]))
            if held is not None:
                held.working = copy.deepcopy(held.tokens[number][1])

    @rule(session_id=ids, length=st.integers(0, 5))
    def roll_back_to_length_in_turn(self, session_id: str, length: int) -> None:
        async def roll_back(held: Held) -> None:
            try:
                await held.session.rollback_to(length)
            except ValueError:
                return
            held.working.messages = held.working.history[:length]

        self.in_turn(session_id, roll_back)

    @rule(session_id=ids, fails=st.booleans())
    def end_turn(self, session_id: str, fails: bool) -> None:
        if session_id not in self.held:
            return

        async def fail() -> None:
            raise ZeroDivisionError

        held, task = self.held.pop(session_id)
        error = self.run(self.end_of(held, task, fail if fails else None))
        expected = ZeroDivisionError if fails else SessionDeletedError if held.deleted else None
        assert type(error) is (expected or type(None))
        if error is None:
            self.commit(session_id, held)
        if held.message_id is not None and not held.deleted:
            if error is None:
                self.processed.add((session_id, held.message_id))
            else:
                held.conversation.told.add(held.message_id)

    # --- what must be true after each step ---

    @invariant()
    def agrees(self) -> None:
        self.run(self.compare())

    async def compare(self) -> None:
        """The store shows to outsiders and to members what the model has."""
        for session_id in ("a", "b"):
            session = await self.store.get(session_id)
            conversation = self.conversations.get(session_id)
            assert (session is None) is (conversation is None)
            if session is None or conversation is None:
                continue
            shown = (list(session.history), session.active_agent_name, dict(session.state), dict(session.metadata))
            assert shown == (
                conversation.messages,
                conversation.agent,
                conversation.seen("state"),
                conversation.seen("metadata"),
            )
            assert session.max_turns == (conversation.max_turns or self.default_max_turns)
            assert list((await self.store.messages(session_id, limit=3)).items) == conversation.messages[-3:]
            assert list((await self.store.messages(session_id)).items) == conversation.messages
        for held, _ in self.held.values():
            if not held.deleted:
                await held.tell(lambda held=held: self.compare_inside(held))  # type: ignore[misc]
        listed = (await self.store.list_sessions()).items
        assert {info.session_id for info in listed} == self.conversations.keys()
        for info in listed:
            conversation = self.conversations[info.session_id]
            assert (info.active_agent_name, info.metadata) == (conversation.agent, conversation.values["metadata"])
        if self.newest is not None:
            assert listed[0].session_id == self.newest
        await self.compare_pending()
        for scope, message_id in self.processed:
            assert await self.store.is_message_processed(message_id, session_id=scope)

    async def compare_pending(self) -> None:
        expected: list[tuple[str, str | None, str]] = []
        for session_id, conversation in self.conversations.items():
            expected += [(session_id, each, waiting.state) for each, waiting in conversation.line.items()]
            expected += [(session_id, each, "told") for each in conversation.told]
            expected += [(session_id, each, "answered") for each in conversation.owed]
        expected += [(each, held.message_id, "running") for each, (held, _) in self.held.items() if not held.deleted]
        found = await self.store.pending_turns()
        assert sorted((turn.session_id, turn.message_id or "", turn.state) for turn in found) == sorted(
            (session_id, message_id or "", state) for session_id, message_id, state in expected
        )
        for session_id, conversation in self.conversations.items():
            in_line = [turn.message_id for turn in found if turn.session_id == session_id]
            assert [each for each in in_line if each in conversation.line] == list(conversation.line)

    async def compare_inside(self, held: Held) -> None:
        session, working = held.session, held.working
        shown = (list(session.history), session.active_agent_name, dict(session.state), dict(session.metadata))
        assert shown == (working.history, working.agent, working.values["state"], working.values["metadata"])


@pytest.mark.timeout(300)
@pytest.mark.parametrize("backend", BACKENDS, ids=[backend.name for backend in BACKENDS])
def test_agrees_with_model(backend: Backend, tmp_path: Path) -> None:
    """After any sequence of operations the store holds what a plain model of it holds."""
    run_machine(StoreMachine, backend, tmp_path, backends.examples(backend))


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS, ids=[backend.name for backend in BACKENDS])
def test_agrees_with_model_at_length(backend: Backend, tmp_path: Path) -> None:
    """The same after many sequences."""
    run_machine(StoreMachine, backend, tmp_path, 500)
