"""A session of OpenAI's Agents SDK (openai-agents) whose conversation is one of a chatflow store's."""

from __future__ import annotations

import asyncio
import logging
import weakref
from typing import TYPE_CHECKING, cast

from agents.memory import SessionSettings

from chatflow.adapters.openai_items import latest, to_messages, without_last
from chatflow.core.agent import Agent
from chatflow.core.beats import DEFAULT_LEASE_SECONDS
from chatflow.core.records import check_id
from chatflow.core.scopes import OwnTurn, TurnScope
from chatflow.core.session import SessionContext
from chatflow.core.store import BaseSessionStore
from chatflow.exceptions import shorten

if TYPE_CHECKING:
    from agents import TResponseInputItem

logger = logging.getLogger("chatflow.adapters")


class ChatflowSession:
    """The SDK's ``Session`` over *store*: ``await Runner.run(agent, "Hello", session=ChatflowSession("7", store))``.

    Items come back equal and in order, by whole turns: as many as the conversation keeps, which is the store's number,
    or *max_turns* where this session creates it. A call and its result leave together. The conversation is one of the
    store's like any other: the command shows it, and a chatflow Runner goes on with it. *agent_name* is what is noted
    of the model's messages, since items don't say who answered. For an owner's conversation give the store of
    `BaseSessionStore.for_owner`.

    Each call of the SDK is a commit of its own, as with the SDK's own sessions, so that a run that fails leaves its
    input; to have all or nothing of a run, and one run at a time, see `turn`.

    One object may be used in several tasks and event loops, several objects and processes in one conversation. Once the
    conversation was deleted from the store every method of it raises `SessionDeletedError`.

    Raises:
        TypeError: An argument is of a wrong type.
        ValueError: *session_id* or *agent_name* is empty, or *max_turns* below 1.
        StoreOwnerRequiredError: The store requires an owner.
    """

    session_id: str
    session_settings: SessionSettings | None

    def __init__(
        self,
        session_id: str,
        store: BaseSessionStore,
        *,
        agent_name: str = "Assistant",
        max_turns: int | None = None,
        session_settings: SessionSettings | None = None,
    ) -> None:
        if session_settings is not None and not isinstance(session_settings, SessionSettings):
            raise TypeError(f"session_settings must be SessionSettings, not {type(session_settings).__name__}")
        self._agent = Agent(agent_name)
        self._store = store
        self._max_turns = max_turns
        self.session_id = check_id(session_id, "session_id")
        self.session_settings = session_settings
        self._sessions: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, SessionContext] = (
            weakref.WeakKeyDictionary()
        )
        self._new_session()  # refuses bad arguments here, where they were written

    async def get_items(self, limit: int | None = None) -> list[TResponseInputItem]:
        """The conversation's items, the oldest first; in a turn, what it has come to.

        With a *limit*, or one of the *session_settings*, at least so many of the last ones: as few whole turns as have
        them, or all where there are no more. A call without a result is among them, as it was added; the SDK leaves it
        out of what it sends.

        Raises:
            ValueError: *limit* is below 0.
            SessionDeletedError: The conversation was deleted.
        """
        if limit is None and self.session_settings is not None:
            limit = self.session_settings.limit
        if limit is not None and limit < 0:
            raise ValueError(f"limit must be at least 0, not {limit}")
        session = await self._caught_up()
        return cast("list[TResponseInputItem]", latest(session.history, limit))

    async def add_items(self, items: list[TResponseInputItem]) -> None:
        """Add all of the items in one commit, durable on return, or none of them. In a turn they join its commit.

        A result whose call is neither here nor among them is left out, and a warning logged: its call has left the
        conversation in the meantime, and no model is sent the one without the other.

        Raises:
            UnstorableValueError: An item holds what can't be kept; the error names its path.
            SessionDeletedError: The conversation was deleted.
        """
        if not items:
            return
        async with OwnTurn(self._session) as working:
            # All of it, also what the commit will prune: a result may come late in a turn.
            for message in to_messages(items, working.window.history(), self._agent.name, self._leave_out):
                working.add(message, self.session_id)

    async def pop_item(self) -> TResponseInputItem | None:
        """Remove the last item and return it; None where there is none.

        Raises:
            SessionDeletedError: The conversation was deleted.
        """
        if not (await self._caught_up()).history:
            return None
        async with OwnTurn(self._session) as working:
            history = working.history
            if not history:
                return None
            popped, left = without_last(history, self._agent.name)
            working.restore_length(len(history) - 1)
            if left is not None:
                working.add(left, self.session_id)
            return cast("TResponseInputItem", popped)

    async def clear_session(self) -> None:
        """Remove all items. The conversation stays, with its state and metadata; `BaseSessionStore.delete` removes it.

        Raises:
            SessionDeletedError: The conversation was deleted.
        """
        session = await self._caught_up()
        if session.history:
            await session.clear_history()

    def turn(self, *, lease_seconds: float = DEFAULT_LEASE_SECONDS) -> TurnScope:
        """``async with session.turn():`` around a run makes one commit of all that it adds, or leaves no trace of it.

        Runs of one conversation, in any task and process, go one after another then. A streamed run is to be read to
        its end inside. It is `AgentSession.turn`, whose session it gives: its state and metadata join the commit.
        """
        return self._session.turn(lease_seconds=lease_seconds)

    def _leave_out(self, call_id: str) -> None:
        logger.warning(
            "session %s: the result of call %s was left out: its call has left the conversation, which was pruned or"
            " cleared in the meantime",
            shorten(self.session_id),
            shorten(call_id),
        )

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {shorten(self.session_id)} in {self._store!r}>"

    @property
    def _session(self) -> SessionContext:
        """The running loop's."""
        loop = asyncio.get_running_loop()
        session = self._sessions.get(loop)
        if session is None:
            session = self._sessions[loop] = self._new_session()
        return session

    def _new_session(self) -> SessionContext:
        return self._agent.create_session(self.session_id, self._store, max_turns=self._max_turns)

    async def _caught_up(self) -> SessionContext:
        session = self._session
        await session.catch_up()
        return session
