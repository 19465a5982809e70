"""Rows of turns as tests ask for them, past the turn that would hold them."""

from __future__ import annotations

from typing import Any

from chatflow.core.backend import StoreBackend
from chatflow.core.records import Claim, Key, Leaving, Left, NewSession, Place, Ticket
from chatflow.core.rows import End
from chatflow.core.session import SessionContext
from chatflow.core.values import EMPTY

FIRST = NewSession(agent_name="Support", metadata=EMPTY, max_turns=None)


def ticket(session: SessionContext, message_id: str | None = None, text: str = "hello", **details: Any) -> Ticket:
    """Asks for a place in the conversation's line, for a message or for none."""
    claim = None if message_id is None else Claim(message_id, text)
    return _ticket(key=session.key, known=session.known, new=None, claim=claim, **details)


def first_ticket(session_id: str, **details: Any) -> Ticket:
    """Asks for a place in the line of a conversation that the asking session has not seen yet."""
    return _ticket(key=Key("", session_id), known=None, new=FIRST, **details)


def _ticket(**details: Any) -> Ticket:
    usual = {"agent_name": "Support", "claim": None, "ancestors": (), "lease_seconds": 10.0, "max_attempts": 5}
    return Ticket(**(usual | details))


async def place_of(store: StoreBackend, asks: Ticket) -> Place:
    """The place that is given out, as code outside every turn asks for it."""
    place = await store.queue_turn(asks)
    assert isinstance(place, Place)
    return place


async def start(session: SessionContext, place: Place) -> Any:
    """Ask for the right to run."""
    return await session.store.start_turn(place.turn_id, place.attempt, session.key, session.known, 5)


async def leave(store: StoreBackend, place: Place, end: End = End.TOLD, **details: Any) -> Left:
    """Give a place back."""
    return await store.leave_turn(Leaving(turn_id=place.turn_id, attempt=place.attempt, end=end, **details))


async def take_away(session: SessionContext) -> None:
    """Remove the row of the turn that is open, as if it had been taken and finished by somebody else."""
    turn = session.member_turn
    assert turn is not None
    assert turn.turn_id is not None
    leaving = Leaving(turn_id=turn.turn_id, attempt=turn.attempt, end=End.TOLD)
    left = await session.store.leave_turn(leaving)
    session.store.line.ended(turn.turn_id, left.next_turn)
