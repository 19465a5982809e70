"""What is left of turns when they end: rows to be given back, and a store that waits for its turns before it closes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

import anyio

from chatflow.core.membership import open_turns
from chatflow.exceptions import StoreClosedError, StoreError

if TYPE_CHECKING:
    from chatflow.core.backend import StoreBackend
    from chatflow.core.turn import Turn

logger = logging.getLogger("chatflow.turn")

_LAST_WORDS: Final = 1.0
"""Seconds that a cancelled turn has to end when its store is closed."""

_LOOK: Final = 0.25
"""Seconds between looks whether a turn has ended: one in another thread may end just before it is waited for."""


async def give_back(store: StoreBackend) -> None:
    """Give back the rows whose turns have ended without a commit.

    A row that can't be given back now, because the disk is full for instance, goes before the next turn queues: the
    error that ended its turn is the one to show, and a row left standing would hold up the conversation.
    """
    abandoned = store.line.abandoned
    while abandoned:
        leaving, turn = abandoned.pop()
        try:
            left = await store.leave_turn(leaving)
        except StoreClosedError:
            return
        except StoreError:
            logger.warning("store %s: the place of turn %d will be given back later", store.name, leaving.turn_id)
            abandoned.append((leaving, turn))
            return
        except BaseException:
            abandoned.append((leaving, turn))
            raise
        turn.ended_as(left.state)
        store.line.ended(leaving.turn_id, left.next_turn)


async def end_turns(store: StoreBackend, grace: float) -> None:
    """Wait until the turns under way have ended, those of the calling code excepted; after *grace* seconds cancel them.

    Whoever has not ended a second after that is left alone: its commit will fail.
    """
    own, me = open_turns(), asyncio.current_task()

    def others() -> list[Turn]:
        return [turn for turn in store.turns if turn.is_under_way and turn not in own and turn.task is not me]

    def cancel() -> None:
        for turn in others():
            turn.cancel()

    if store.turns:
        store.line.wake_all()  # those that wait for their place are refused it
    await _until_ended(others, grace)
    cancel()
    await _until_ended(others, _LAST_WORDS)


async def _until_ended(others: Callable[[], list[Turn]], seconds: float) -> None:
    with anyio.move_on_after(seconds):
        while turns := others():
            with turns[0].session.store.line.waiting(turns[0].turn_id or 0) as waiter:
                while turns[0].is_under_way:
                    await waiter.wait(_LOOK)
