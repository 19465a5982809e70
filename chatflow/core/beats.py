"""Signs of life: the rows that somebody awaits are beaten, and whoever waits behind a row watches its beat.

No clock is compared with another process's. A turn may be silent for its lease; a watcher counts by its own beats, each
of which has written to the storage: where it was stopped itself, or the storage was held by somebody else, nobody's
silence counts.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
import math
import weakref
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

import attrs

from chatflow.core.records import Beat
from chatflow.exceptions import StoreClosedError, StoreError

if TYPE_CHECKING:
    from chatflow.core.backend import StoreBackend
    from chatflow.core.turn import Turn

logger = logging.getLogger("chatflow.turn")

DEFAULT_LEASE_SECONDS: Final = 10.0
"""How long a turn's holder may be silent before others may take its place."""

_STILL: Final = 4
"""Beats of the watcher in which another's has to stand still."""

_PARTS: Final = 3
"""Beats in a lease."""

_CLOSEST: Final = 0.1
"""Beats are not closer than this part of their distance, however many watchers have just begun."""


@attrs.define
class _Observed:
    beat: Beat
    at: float
    still: int = 0


class Watch:
    """What a watcher has seen of others' beats. *now* is its own clock, and each look has to have come with a write."""

    def __init__(self) -> None:
        self._observed: dict[int, _Observed] = {}

    def look(self, others: Iterable[Beat], now: float, *, asked: float | None = None) -> list[Beat]:
        """Take note of *others*, all that are watched, and return those that have stood still for long enough.

        *asked* is when the beat began that has read them: the watcher may have been stopped since, or have waited for
        its turn to write, and neither may count as others' silence.
        """
        asked = now if asked is None else asked
        before, self._observed = self._observed, {}
        silent: list[Beat] = []
        for beat in others:
            seen = before.get(beat.turn_id)
            if seen is None or seen.beat != beat:
                seen = _Observed(beat, now)
            elif asked >= seen.at + beat.lease_seconds / _PARTS:
                seen.at = now
                seen.still += 1
                if seen.still >= _STILL:
                    silent.append(beat)
            self._observed[beat.turn_id] = seen
        return silent

    def due(self) -> float | None:
        """When to look again."""
        return min((seen.at + seen.beat.lease_seconds / _PARTS for seen in self._observed.values()), default=None)


class Beats:
    """The signs of life of one store's turns in one event loop.

    There is no task as long as nothing is due: a timer starts one for each beat, and nothing is left over where the
    loop ends.
    """

    def __init__(self, store: StoreBackend, loop: asyncio.AbstractEventLoop) -> None:
        # Neither keeps the other: a store that is forgotten unclosed must be able to say so.
        self._store = weakref.ref(store)
        self._loop = loop
        self._held: dict[int, Turn] = {}
        self._watched: dict[int, int] = {}
        self._all: list[float] = []
        self._watch = Watch()
        self._timer: asyncio.TimerHandle | None = None
        self._beating: asyncio.Task[None] | None = None
        self._wanted = math.inf
        self._due = 0.0
        self._last = -math.inf
        self._silent = 0.0

    @property
    def is_over(self) -> bool:
        """Whether the event loop is closed, and nothing is beaten any more."""
        return self._loop.is_closed()

    @property
    def silent_seconds(self) -> float:
        """How long the event loop had not run when the last beat was due, or has not run since this one is."""
        return self._silent if self._timer is None else max(0.0, self._loop.time() - self._due)

    @property
    def turns(self) -> list[Turn]:
        """The turns that are beaten: those that run, and those that wait for their place."""
        return list(self._held.values())

    def hold(self, turn_id: int, turn: Turn) -> None:
        """Beat the row *turn_id* until `release`."""
        self._held[turn_id] = turn
        self._plan(self._loop.time() + turn.lease_seconds / _PARTS)

    def release(self, turn_id: int, turn: Turn) -> None:
        """The row is gone, or somebody else's; that may be another turn of this store, which goes on to beat it."""
        if self._held.get(turn_id) is turn:
            del self._held[turn_id]

    def look_soon(self) -> None:
        """Begin to watch the rows before those that are held."""
        self._plan(self._loop.time())

    @contextmanager
    def watching(self, turn_id: int) -> Generator[None]:
        """Watch the row *turn_id*."""
        self._watched[turn_id] = self._watched.get(turn_id, 0) + 1
        self.look_soon()
        try:
            yield
        finally:
            self._watched[turn_id] -= 1
            if not self._watched[turn_id]:
                del self._watched[turn_id]

    @contextmanager
    def watching_all(self, lease_seconds: float) -> Generator[None]:
        """Watch every held row of the store."""
        self._all.append(lease_seconds)
        self.look_soon()
        try:
            yield
        finally:
            self._all.remove(lease_seconds)

    def _plan(self, due: float) -> None:
        """Beat at *due*, or before."""
        if self._loop.is_closed():
            return
        if self._beating is not None:
            # What is wanted meanwhile may not be in it; the next one is planned at its end.
            self._wanted = min(self._wanted, due)
            return
        if self._timer is not None:
            if self._due <= due:
                return
            self._timer.cancel()
        self._due = max(due, self._last + self._distance() * _CLOSEST)
        # In a context of its own: the code that began a turn is not what beats.
        self._timer = self._loop.call_at(self._due, self._start, context=contextvars.Context())

    @property
    def _is_needed(self) -> bool:
        return bool(self._held or self._watched or self._all)

    def _distance(self) -> float:
        leases = [turn.lease_seconds for turn in self._held.values()]
        return min((*leases, *self._all), default=DEFAULT_LEASE_SECONDS) / _PARTS

    def _start(self) -> None:
        self._timer = None
        self._silent = self._loop.time() - self._due
        if self._is_needed:
            self._beating = self._loop.create_task(self._beat())
            # A loop that is stopped just then, with turns left open in it, drops the beat: nobody need be told of it.
            self._beating._log_destroy_pending = False  # type: ignore[attr-defined]  # noqa: SLF001  # as in gather()

    async def _beat(self) -> None:
        try:
            store = self._store()
            if store is not None and self._is_needed:
                await self._beat_once(store)
        except StoreClosedError:
            self._held.clear()
        except StoreError as error:
            logger.warning("no beat of the turns under way could be written: %s", error)
        finally:
            self._last = self._loop.time()
            self._beating = None
            if self._is_needed:
                due, self._wanted = self._wanted, math.inf
                watched = self._watch.due()
                self._plan(min(due, self._last + self._distance(), math.inf if watched is None else watched))

    async def _beat_once(self, store: StoreBackend) -> None:
        asked = self._loop.time()
        held = [(turn_id, turn, turn.attempt) for turn_id, turn in self._held.items()]
        beaten = await store.beat_turns(
            frozenset(turn_id for turn_id, _, _ in held), frozenset(self._watched), everything=bool(self._all)
        )
        for turn_id, turn, before in held:
            attempt = beaten.own.get(turn_id)
            # A row that is just being started has a new fence already; whoever waits for it will see by itself. And one
            # that was started or taken anew since the beat has a newer fence than the beat has seen.
            is_lost = attempt is None or (turn.is_open and attempt != before)
            # The row of one that is ending may be gone by its own commit, whose answer is still on its way.
            if is_lost and not turn.is_ending and turn.attempt == before and self._held.get(turn_id) is turn:
                self.release(turn_id, turn)
                turn.lose(self._silent)
        for beat in self._watch.look(beaten.others, self._loop.time(), asked=asked):
            if await store.interrupt_turn(beat):
                logger.warning(
                    "turn %d was interrupted: its holder gave no sign of life for longer than its lease of %g s",
                    beat.turn_id,
                    beat.lease_seconds,
                )
                store.line.wake_all()
