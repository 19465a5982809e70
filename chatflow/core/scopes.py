"""Entering and leaving a turn: the block that users write, and the one around each single operation."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from chatflow.core.beats import DEFAULT_LEASE_SECONDS
from chatflow.core.membership import refuse_left_over
from chatflow.core.turn import Turn
from chatflow.core.working import Working
from chatflow.exceptions import TurnInsideTurnError

if TYPE_CHECKING:
    from chatflow.core.session import AgentSession


class TurnScope:
    """``async with session.turn():``, entered once."""

    def __init__(self, session: AgentSession, lease_seconds: float = DEFAULT_LEASE_SECONDS) -> None:
        self._session = session
        self._lease_seconds = lease_seconds
        self._turn: Turn | None = None

    async def __aenter__(self) -> AgentSession:
        if self._turn is not None and self._turn.is_open:
            raise TurnInsideTurnError(session_id=self._session.session_id, reason="this turn has been entered already")
        turn = Turn(self._session, lease_seconds=self._lease_seconds)
        await turn.take()
        self._turn = turn
        return self._session

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        assert self._turn is not None
        if kind is None:
            await self._turn.commit()
        else:
            await self._turn.drop()


class OwnTurn:
    """One operation: inside the running code's turn if it has one, else as a turn of its own."""

    __slots__ = ("_session", "_turn")

    def __init__(self, session: AgentSession) -> None:
        self._session = session
        self._turn: Turn | None = None

    async def __aenter__(self) -> Working:
        session = self._session
        session.refuse_deleted()
        await asyncio.sleep(
            0
        )  # as every store operation, it yields once; anyio's checkpoint does it at four times the cost
        member = session.member_turn
        if member is not None:
            await member.look()
            return member.working
        refuse_left_over(session)
        turn = Turn(session)
        await turn.take()
        self._turn = turn
        return turn.working

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._turn is None:
            return
        if kind is not None:
            await self._turn.drop()
            return
        try:
            await self._turn.commit()
        finally:
            # Also where a cancellation has come in the meantime, which is raised after the commit.
            if self._turn.made is not None:
                self._session.follow(self._turn.working.base.known, self._turn.made)
