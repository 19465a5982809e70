"""Runner: a user message in, an answer out, and in between one turn of models, tools and handoffs.

One class with all that users call to have messages answered, which is why it is long.
"""

from __future__ import annotations

import copy
import hashlib
import logging
import uuid
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from typing import Any, Final, get_args

import anyio
import attrs

from chatflow.core.agent import Agent
from chatflow.core.approvals import Decision
from chatflow.core.beats import DEFAULT_LEASE_SECONDS
from chatflow.core.budget import OnContextWindow, check_max_prompt_tokens
from chatflow.core.engine import Engine, check_engine
from chatflow.core.events import Report
from chatflow.core.finish import apart, finish
from chatflow.core.memory import SessionStore
from chatflow.core.messages import AgentResponse
from chatflow.core.records import (
    Answered,
    Claim,
    Dead,
    NewSession,
    Receipt,
    Ticket,
    check_grace,
    check_message_id,
    check_seconds,
)
from chatflow.core.rows import State
from chatflow.core.service import OnLostServiceSession
from chatflow.core.session import AgentSession, SessionContext
from chatflow.core.store import BaseSessionStore
from chatflow.core.turn import Turn
from chatflow.core.values import EMPTY, FrozenDict
from chatflow.exceptions import (
    MessageDeadError,
    MessageMismatchError,
    SessionDeletedError,
    SessionNotFoundError,
    StoreClosedError,
    StoreError,
    StoreScopeError,
    shorten,
)
from chatflow.running.asked import (
    Asked,
    OnDuplicate,
    about,
    asked_at,
    asked_in,
    check_count,
    check_count_or_none,
    check_seconds_or_none,
    checked_metadata,
    decided,
    require_session,
)
from chatflow.running.asking import Asking, AskingRules
from chatflow.running.compacting import Compactor, Summarise, as_compactor
from chatflow.running.loop import Loop
from chatflow.running.providing import Providing
from chatflow.running.registry import Registry
from chatflow.running.results import LEAST_CHARACTERS, ResultLimits
from chatflow.running.slots import TurnSlots, give_back_slots
from chatflow.running.stream import RunStream
from chatflow.running.worker import Doing, OnResponse, Worker, delay, log_failure

logger = logging.getLogger("chatflow.runner")

_AT_ONCE: Final = 64
"""Accepted turns done at once where *max_concurrent_turns* says nothing."""


class Runner:
    """Answers user messages in conversations, each in one turn: it commits as a whole or leaves no trace.

    Agents are known by name: *starting_agent* and all that handoffs lead to, as things stand when they are needed. A
    store that has no agent resolver gets one that knows them. Without a *session_store* conversations live in memory.
    An agent's own engine answers for it, else *engine*, else a `LiteLLMEngine` by the agent's model.

    A runner may be used in several event loops and threads, and several runners may share a store.

    Args:
        starting_agent: Answers in a new conversation, and where the stored agent's name is unknown.
        session_store: Where conversations are kept. The runner does not close it.
        engine: Asks the model for agents without an engine of their own.
        max_handoffs_per_turn: Further handoffs are answered with an error, and the agent stays.
        max_tool_iterations: How often a model may be asked with tools; then it is asked once more, without.
        turn_timeout: Seconds for one turn, from its start (not while it waits in line); None for no limit.
        tool_timeout: Seconds for one tool call; None for no limit.
        lease_seconds: How long a turn's process may give no sign of life, since it was stopped or its event loop was
            blocked, before others take the turn over.
        max_attempts: How often a message is started, ends that its caller was told of not counted, before it is dead.
        max_concurrent_turns: Turns that run at once in one event loop. One that waits for a slot has its place already,
            and others of its conversation wait behind it. A run inside a tool uses the slot of the run around it.
        max_prompt_tokens: How many tokens a model is sent at most, instructions and tools included, as its engine
            counts. The oldest whole turns are not sent where all would be more; they stay in the conversation. An
            agent's own number comes before it.
        on_context_window: Where a provider finds the prompt too long: "raise" the error, or "shrink", which asks again
            with at most half of the turns, until it fits or only the running one is left, and never after a piece was
            told. Later turns of the same session object begin with what fitted.
        compactor: Makes a summary of turns that leave the window: a `Compactor`, or what one is made of.
        on_lost_service_session: Where a service keeps a conversation's history and does not know it any more: "raise"
            the error, or "replay", which begins a new session there from the local copy.
        max_concurrent_tool_calls: Calls of one model message that run at once; further ones wait, in call order, and
            their *tool_timeout* with them. None for no limit.
        max_result_characters: Of a tool's result. What is longer keeps its beginning and its end around a marker that
            says how much is missing; a value whose JSON is longer becomes text so. None for no limit.
        max_result_bytes: Of the pictures, recordings and files in a tool's result; what has no room gives way to a text
            that says so. None for no limit.

    Raises:
        TypeError: An argument is of a wrong type.
        ValueError: A number is too small.
        HandoffError: Two different agents have one name.
    """

    def __init__(
        self,
        starting_agent: Agent,
        session_store: BaseSessionStore | None = None,
        engine: Engine | None = None,
        max_handoffs_per_turn: int = 5,
        max_tool_iterations: int = 10,
        turn_timeout: float | None = 300,
        tool_timeout: float | None = 60,
        lease_seconds: float = DEFAULT_LEASE_SECONDS,
        max_attempts: int = 5,
        max_concurrent_turns: int | None = None,
        on_lost_service_session: OnLostServiceSession = "raise",
        max_prompt_tokens: int | None = None,
        on_context_window: OnContextWindow = "raise",
        compactor: Compactor | Agent | Summarise | None = None,
        max_concurrent_tool_calls: int | None = 8,
        max_result_characters: int | None = 50_000,
        max_result_bytes: int | None = 3_750_000,
    ) -> None:
        if not isinstance(starting_agent, Agent):
            raise TypeError(f"starting_agent must be an Agent, not {type(starting_agent).__name__}")
        if session_store is not None and not isinstance(session_store, BaseSessionStore):
            raise TypeError(f"session_store must be a session store, not {type(session_store).__name__}")
        if engine is not None:
            check_engine(engine)
        if on_lost_service_session not in get_args(OnLostServiceSession):
            raise ValueError(f"on_lost_service_session must be 'raise' or 'replay', not {on_lost_service_session!r}")
        if on_context_window not in get_args(OnContextWindow):
            raise ValueError(f"on_context_window must be 'raise' or 'shrink', not {on_context_window!r}")
        starting_agent.reachable()
        self.starting_agent: Final = starting_agent
        self.session_store: Final[BaseSessionStore] = SessionStore() if session_store is None else session_store
        self.max_handoffs_per_turn: Final = check_count("max_handoffs_per_turn", max_handoffs_per_turn, 0)
        self.max_tool_iterations: Final = check_count("max_tool_iterations", max_tool_iterations, 1)
        self.turn_timeout: Final = check_seconds_or_none("turn_timeout", turn_timeout)
        self.tool_timeout: Final = check_seconds_or_none("tool_timeout", tool_timeout)
        self.lease_seconds: Final = check_seconds("lease_seconds", lease_seconds)
        self.max_attempts: Final = check_count("max_attempts", max_attempts, 1)
        self.max_concurrent_turns: Final = check_count_or_none("max_concurrent_turns", max_concurrent_turns, 1)
        self.on_lost_service_session: Final[OnLostServiceSession] = on_lost_service_session
        self.max_prompt_tokens: Final = check_max_prompt_tokens(max_prompt_tokens)
        self.on_context_window: Final[OnContextWindow] = on_context_window
        self.compactor: Final = None if compactor is None else as_compactor(compactor)
        self.max_concurrent_tool_calls: Final = check_count_or_none(
            "max_concurrent_tool_calls", max_concurrent_tool_calls, 1
        )
        self.max_result_characters: Final = check_count_or_none(
            "max_result_characters", max_result_characters, LEAST_CHARACTERS
        )
        self.max_result_bytes: Final = check_count_or_none("max_result_bytes", max_result_bytes, 0)
        self._registry: Final = Registry(starting_agent, engine)
        self._slots: Final = TurnSlots(max_concurrent_turns)
        if not self.session_store.has_agent_resolver:
            # Holds the agent and not the runner: a store that is forgotten unclosed must be able to say so at once.
            self.session_store.set_agent_resolver(lambda name: starting_agent.reachable().get(name))

    def __repr__(self) -> str:
        return f"<Runner starting_agent={self.starting_agent!r} session_store={self.session_store!r}>"

    def for_owner(self, owner: str) -> Runner:
        """The same runner over that owner's conversations alone: `BaseSessionStore.for_owner`.

        Made in a few microseconds, for each request; it shares agents, engine and slots. Work is done for all owners by
        whoever is inside `working` of the runner that this was called on; `PendingTurn.owner` says whose a turn is.

        Raises:
            TypeError: *owner* is not a string.
            ValueError: It can't be an owner's name.
            StoreScopeError: This runner is another owner's.
        """
        scoped = copy.copy(self)
        scoped.__dict__["session_store"] = self.session_store.for_owner(owner)
        return scoped

    async def get_session(self, session_id: str) -> SessionContext | None:
        """The conversation as the store has it now, or None if there is none."""
        return await self.session_store.get(session_id)

    async def run_async(
        self,
        session_id: str,
        user_message: str,
        metadata: Mapping[str, Any] | None = None,
        *,
        message_id: str | None = None,
        on_duplicate: OnDuplicate = "response",
    ) -> AgentResponse:
        """Answer *user_message* in the conversation *session_id*, which is created if need be.

        Waits for the conversation's turn; everything that happens then, *metadata* included, is one commit, durable on
        return. On any exception or cancellation nothing of it remains; the exception leaves as it is.

        A *message_id* runs once in its conversation: a second delivery waits for the first and gets its answer, with
        `duplicate` set; if the first fails, the second tries again. With ``on_duplicate="raise"`` a message that is
        under way is refused at once, and one that was answered gets its stored answer as well. However it ended before,
        it goes on: what its tools had done is not done again.

        Accepted messages of this conversation, and those that a killed process has left, are done first.

        Raises:
            ValueError: An id is empty, or UTF-8 can't encode it; *message_id* begins with a NUL, as chatflow's own do;
                *on_duplicate* is unknown.
            MessageInProgressError: With ``on_duplicate="raise"``, the message is being answered. Also where it was
                accepted by, or is left over of, a runner whose starting agent has another name: it waits for that one.
            MessageMismatchError: The id was used before with another text.
            MessageDeadError: The message was given up after *max_attempts*.
            CorruptSessionError: The stored conversation, or the journal of this message, can't be read.
            SessionConflictError: The process was stopped, or its event loop blocked, for longer than its lease, and
                somebody else has gone on; nothing was written.
            StoreError: The storage failed; nothing was written.
            EngineError: The model could not be asked, or its answer not be used (`EngineOutputError`: it was not of the
                agent's output type, twice).
            TimeoutError: The turn took longer than *turn_timeout*.
            SessionStateError: *metadata* holds what can't be kept; nothing was changed.
            SessionDeletedError: The conversation was deleted meanwhile.
            TurnInsideTurnError: The calling code is inside a turn that this one would have to wait for.
        """
        asked = asked_in(session_id, user_message, metadata, message_id, on_duplicate)
        return await self._answer_in(session_id, asked)

    def run_stream(
        self,
        session_id: str,
        user_message: str,
        metadata: Mapping[str, Any] | None = None,
        *,
        message_id: str | None = None,
        on_duplicate: OnDuplicate = "response",
    ) -> RunStream:
        """As `run_async`, and what happens is told while it happens: see `RunStream`.

        Arguments are looked at now, and what else `run_async` raises is raised by the stream. Of a message that was
        answered before, or is being answered, only `Done` is told, with the answer.

        Raises:
            TypeError: An argument is of a wrong type.
            ValueError: As `run_async` says.
            SessionStateError: *metadata* holds what can't be kept.
        """
        asked = asked_in(session_id, user_message, metadata, message_id, on_duplicate)
        return RunStream(session_id, self.session_store, lambda report: self._answer_in(session_id, asked, report))

    async def _answer_in(self, session_id: str, asked: Asked, report: Report | None = None) -> AgentResponse:
        store = self.session_store
        session = store.backend.session_at_hand(store.key_of(session_id), self.starting_agent)
        if session is not None:
            turn = self._turn(session, asked)
            try:
                return await self._answer(turn, asked, report=report)
            except SessionDeletedError:
                if turn.has_waited:
                    raise
                # It was deleted before, by somebody else: this message begins it anew.
        session = await store.get_or_create(session_id, self.starting_agent)
        return await self._answer(self._turn(session, asked), asked, report=report)

    async def run_session(
        self,
        session: AgentSession,
        user_message: str,
        metadata: Mapping[str, Any] | None = None,
        *,
        message_id: str | None = None,
        on_duplicate: OnDuplicate = "response",
    ) -> AgentResponse:
        """Answer *user_message* in a session at hand, of whatever store, as `run_async` does.

        Raises:
            SessionError: Its active agent is not within reach of the starting agent's handoffs; nothing was changed.
            StoreScopeError: This is one owner's runner, and the session another's.
            ChatflowError: As `run_async` does.
        """
        return await self._answer_at(session, asked_at(session, user_message, metadata, message_id, on_duplicate))

    def stream_session(
        self,
        session: AgentSession,
        user_message: str,
        metadata: Mapping[str, Any] | None = None,
        *,
        message_id: str | None = None,
        on_duplicate: OnDuplicate = "response",
    ) -> RunStream:
        """As `run_session`, and what happens is told while it happens: see `run_stream`."""
        asked = asked_at(session, user_message, metadata, message_id, on_duplicate)
        return RunStream(session.session_id, session.store, lambda report: self._answer_at(session, asked, report))

    async def approve(
        self, session_id: str, call_id: str, *, metadata: Mapping[str, Any] | None = None
    ) -> AgentResponse:
        """Run the call *call_id*, which waits for approval, and go on with what comes of it, in one turn.

        Its result is added to the history, and once all calls of the same model message are decided, the active agent
        is asked. As long as others of them wait, the response says which, and no model is asked.

        A call is decided once. Approved again, at once or within the time that message ids are remembered, the stored
        answer comes back, with `duplicate` set, and a decision that was broken off goes on: the tool runs at most once,
        unless it is idempotent. *metadata* joins the turn's commit.

        Raises:
            ApprovalNotFoundError: No call of this id waits: nobody was asked, it was answered, or it has left the
                history.
            ApprovalDecidedError: It was rejected before.
            SessionNotFoundError: There is no such conversation.
            ChatflowError: As `run_async` does.
        """
        return await self._decide_in(session_id, decided(session_id, call_id, None, metadata, approved=True))

    async def reject(
        self, session_id: str, call_id: str, reason: str | None = None, *, metadata: Mapping[str, Any] | None = None
    ) -> AgentResponse:
        """Refuse the call *call_id*, which waits for approval, and go on without it, in one turn.

        The model is told that a person has refused, and the *reason*, unless that is blank; of a long one as much as of
        other results. All else is as with `approve`.

        Raises:
            ApprovalDecidedError: It was approved before.
            ChatflowError: As `approve` does.
        """
        return await self._decide_in(session_id, decided(session_id, call_id, reason, metadata, approved=False))

    def approve_stream(self, session_id: str, call_id: str, *, metadata: Mapping[str, Any] | None = None) -> RunStream:
        """As `approve`, and what happens is told while it happens: see `run_stream`.

        Of the calls of the same message that still wait only the response tells: they were told of when they were made.
        """
        return self._stream_decision(session_id, decided(session_id, call_id, None, metadata, approved=True))

    def reject_stream(
        self, session_id: str, call_id: str, reason: str | None = None, *, metadata: Mapping[str, Any] | None = None
    ) -> RunStream:
        """As `reject`, and what happens is told while it happens: see `run_stream`."""
        return self._stream_decision(session_id, decided(session_id, call_id, reason, metadata, approved=False))

    def _stream_decision(self, session_id: str, asked: Asked) -> RunStream:
        return RunStream(session_id, self.session_store, lambda report: self._decide_in(session_id, asked, report))

    async def approve_session(
        self, session: AgentSession, call_id: str, *, metadata: Mapping[str, Any] | None = None
    ) -> AgentResponse:
        """Run a call that waits in a session at hand, of whatever store, as `approve` does.

        Raises:
            ChatflowError: As `approve` and `run_session` do.
        """
        return await self._decide_at(session, call_id, None, metadata, approved=True)

    async def reject_session(
        self,
        session: AgentSession,
        call_id: str,
        reason: str | None = None,
        *,
        metadata: Mapping[str, Any] | None = None,
    ) -> AgentResponse:
        """Refuse a call that waits in a session at hand, of whatever store, as `reject` does.

        Raises:
            ChatflowError: As `reject` and `run_session` do.
        """
        return await self._decide_at(session, call_id, reason, metadata, approved=False)

    async def _decide_in(self, session_id: str, asked: Asked, report: Report | None = None) -> AgentResponse:
        session = await self.session_store.get(session_id)
        if session is None:
            raise SessionNotFoundError(session_id=session_id)
        asked = about(asked, session)
        return await self._answer(self._turn(session, asked), asked, report=report)

    async def _decide_at(
        self,
        session: AgentSession,
        call_id: str,
        reason: str | None,
        metadata: Mapping[str, Any] | None,
        *,
        approved: bool,
    ) -> AgentResponse:
        require_session(session)
        decision = decided(session.session_id, call_id, reason, metadata, approved=approved)
        self._take_in(session)
        await session.catch_up()
        asked = about(decision, session)
        return await self._answer(self._turn(session, asked), asked, strict=True)

    async def _answer_at(self, session: AgentSession, asked: Asked, report: Report | None = None) -> AgentResponse:
        self._take_in(session)
        return await self._answer(self._turn(session, asked), asked, strict=True, report=report)

    def _take_in(self, session: AgentSession) -> None:
        """Refuse a session of another owner, and let the store know of one that was made elsewhere."""
        store = self.session_store
        if store.is_of_owner and session.store is store.backend and session.key.owner != store.owner:
            raise StoreScopeError(store=store.name, what="a session of another owner")
        if isinstance(session, SessionContext):
            session.store.adopt(session)

    def _turn(self, session: AgentSession, asked: Asked) -> Turn:
        return Turn(
            session,
            asked.claim,
            self.starting_agent.name,
            lease_seconds=self.lease_seconds,
            max_attempts=self.max_attempts,
        )

    async def _answer(
        self, turn: Turn, asked: Asked, *, strict: bool = False, report: Report | None = None
    ) -> AgentResponse:
        """Take the conversation's turn, and answer in it."""
        while True:
            found = await turn.take(wait_for_duplicate=asked.waits)
            if isinstance(found, Answered):
                return self._registry.with_output(await _answered_before(found, turn.session), turn.session.session_id)
            if found is None:
                return await self._run(turn, asked.input, asked.metadata, strict=strict, report=report)
            try:
                await self._do_first(found)
            except BaseException as error:
                await turn.drop(error)
                raise

    async def accept(
        self,
        session_id: str,
        user_message: str,
        *,
        message_id: str,
        metadata: Mapping[str, Any] | None = None,
    ) -> Receipt:
        """Store *user_message* as a turn to be done, durably, and return: what a webhook does before it answers 200.

        Whoever is inside `working` does it, in this process or another, now or after a restart; so does the next
        `run_async` in its conversation. A message that is known already, whether it waits, runs or was answered, is a
        duplicate, and nothing is added.

        Raises:
            ValueError: An id is empty, or UTF-8 can't encode it; *message_id* begins with a NUL, as chatflow's own do.
            MessageMismatchError: The id was used before with another text.
            MessageDeadError: The message was given up after *max_attempts*.
            SessionStateError: *metadata* holds what can't be kept; nothing was stored.
            StoreError: Nothing was stored.
        """
        noted = checked_metadata(session_id, user_message, metadata)
        claim = Claim(check_message_id(message_id), user_message, noted)
        store = self.session_store.backend
        ticket = Ticket(
            key=self.session_store.key_of(session_id),
            known=None,
            new=NewSession(agent_name=self.starting_agent.name, metadata=EMPTY, max_turns=None),
            agent_name=self.starting_agent.name,
            claim=claim,
            ancestors=(),
            lease_seconds=self.lease_seconds,
            max_attempts=self.max_attempts,
        )
        found = await finish(store.accept_turn(ticket))
        if found.digest is not None and found.digest != claim.digest:
            raise MessageMismatchError(session_id=session_id, message_id=message_id)
        if isinstance(found, Dead):
            raise MessageDeadError(session_id=session_id, message_id=message_id, attempts=found.attempts)
        if isinstance(found, Answered):
            return Receipt(None, duplicate=True)
        store.line.wake_workers()
        return Receipt(found.turn_id, duplicate=found.known)

    @asynccontextmanager
    async def working(self, on_response: OnResponse | None = None, *, grace: float = 10) -> AsyncGenerator[None]:
        """``async with runner.working(on_response=...):`` does accepted turns, and those of processes that are gone.

        Those of this runner's application: of its starting agent's name. In order within a conversation, at the same
        time across conversations, up to *max_concurrent_turns* at once, or 64. A turn that was accepted and fails is
        tried again in its place after 1, 4, 16, ... seconds, *max_attempts* times in all; then it is dead, and
        `pending_turns` lists it.

        ``await on_response(turn, response)`` is called for each accepted turn that was answered, in the order of the
        answers within a conversation, at least once: if it raises, or its process is killed before it returns, it is
        called again. A conversation's next turn may run meanwhile. Without *on_response* turns are done, and answers
        are left to workers that have one: the first of them is given all that wait, which may be as old as the
        store's *dedup_ttl_hours*, after which they are forgotten. *turn* holds the message's id, text and metadata as
        they were accepted.

        At the end no more is taken; what is under way may end within *grace* seconds, is then cancelled, and waits for
        the next one who works.

        It does the work of all owners, with one worker for them together.

        Raises:
            StoreClosedError: The store is closed. Or, logged at once and raised at the end, it was opened before this
                process was forked.
            StoreScopeError: This is one owner's runner.
        """
        self.session_store.refuse_owners("working()")
        if on_response is not None and not callable(on_response):
            raise TypeError(f"on_response must be a function of a turn and its response, not {on_response!r}")
        check_grace(grace)
        if self.session_store.is_closing:
            raise StoreClosedError(store=self.session_store.name)
        worker = Worker(
            Doing(
                store=self.session_store.backend,
                agent_name=self.starting_agent.name,
                lease_seconds=self.lease_seconds,
                max_attempts=self.max_attempts,
                at_once=self.max_concurrent_turns or _AT_ONCE,
                run=self._run_work,
                first=self._do_first,
                with_output=self._registry.with_output,
            ),
            on_response,
        )
        try:
            yield
        finally:
            await worker.close(grace)

    async def _do_first(self, first: Turn) -> None:
        """Do work that another turn has to wait for; that turn's caller is not told how it ends."""
        assert first.work is not None
        # It is nobody's nested turn, and takes a slot of its own.
        give_back_slots()
        try:
            await apart(self._begin_work(first))
        except StoreError:
            raise
        except Exception as error:  # noqa: BLE001  # logged, and never shown to the caller who only waits for it
            again = first.left is State.ACCEPTED
            what = "done before the next one, failed" + ("; it is tried again" if again else "")
            log_failure(first, what, error)
            if again:
                await anyio.sleep(delay(first.work.turn.attempts, error))
        finally:
            # Of one that was cancelled before it could begin.
            await first.let_go()

    async def _begin_work(self, turn: Turn) -> None:
        assert turn.place is not None
        turn.begin(turn.place)
        await self._run_work(turn)

    async def _run_work(self, turn: Turn) -> AgentResponse:
        claim = turn.claim
        assert claim is not None
        return await self._run(turn, claim.input, claim.metadata)

    async def _run(
        self,
        turn: Turn,
        asked: str | Decision,
        metadata: FrozenDict,
        *,
        strict: bool = False,
        report: Report | None = None,
    ) -> AgentResponse:
        """What happens in a turn that has begun, to its commit."""
        providing = Providing(turn)
        rules = AskingRules(
            on_lost=self.on_lost_service_session,
            max_prompt_tokens=self.max_prompt_tokens,
            on_context_window=self.on_context_window,
        )
        with self._slots.entered() as slot:
            try:
                await slot.hold()
                loop = Loop(
                    registry=self._registry,
                    turn=turn,
                    slot=slot,
                    key=_key(turn),
                    max_handoffs=self.max_handoffs_per_turn,
                    max_tool_iterations=self.max_tool_iterations,
                    tool_timeout=self.tool_timeout,
                    tools_at_once=self.max_concurrent_tool_calls,
                    result_limits=ResultLimits(characters=self.max_result_characters, size=self.max_result_bytes),
                    asking=Asking(turn, rules, report),
                    providing=providing,
                    strict=strict,
                    report=report,
                )
                turn.session.metadata.update(metadata)
                response = await self._in_time(loop, asked)
                if self.compactor is not None:
                    response = await loop.compact(self.compactor, response)
                turn.response = attrs.evolve(response, output=None)  # it is read anew from what is stored
            except BaseException as error:
                try:
                    await providing.fail(error)
                finally:
                    await turn.drop(error)
                raise
            await turn.commit()
        return response

    async def _in_time(self, loop: Loop, asked: str | Decision) -> AgentResponse:
        with anyio.move_on_after(self.turn_timeout):
            return await (loop.answer(asked) if isinstance(asked, str) else loop.go_on(asked))
        raise TimeoutError(
            f"session {shorten(loop.session.session_id)}: the turn took longer than turn_timeout="
            f"{self.turn_timeout:g} s; nothing of it was stored"
        )


def _key(turn: Turn) -> str:
    """What tells this turn from all others, and is the same when its message is tried again."""
    if turn.claim is None:
        return uuid.uuid4().hex
    key = turn.session.key
    parts = (key.owner, key.session_id, turn.claim.message_id)
    return hashlib.sha256("".join(f"{len(part)}:{part}" for part in parts).encode()).hexdigest()


async def _answered_before(answered: Answered, session: AgentSession) -> AgentResponse:
    if answered.response is not None:
        return attrs.evolve(answered.response, duplicate=True)
    await session.catch_up()  # whose agent it is now, no turn has found out
    return AgentResponse(
        content="", active_agent_name=session.active_agent_name, duplicate=True, stop_reason="not_stored"
    )
