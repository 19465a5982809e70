"""The session objects in use: one for a conversation and event loop, so that a session asked for twice is the same."""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections import OrderedDict
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from chatflow.core.records import Key

if TYPE_CHECKING:
    from chatflow.core.session import SessionContext

KEPT_ALIVE: Final = 512
"""Sessions kept alive although nobody holds them, last used first: their histories need not be read again."""


class LiveSessions:
    """The living sessions of one store, by event loop and key. Safe in several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._by_loop: weakref.WeakKeyDictionary[
            asyncio.AbstractEventLoop, weakref.WeakValueDictionary[Key, SessionContext]
        ] = weakref.WeakKeyDictionary()
        self._recent: OrderedDict[int, SessionContext] = OrderedDict()

    def get(self, key: Key) -> SessionContext | None:
        """The running loop's session of that key."""
        with self._lock:
            sessions = self._by_loop.get(asyncio.get_running_loop())
            session = None if sessions is None else sessions.get(key)
            if session is not None:
                self._use(session)
            return session

    def add(self, session: SessionContext) -> None:
        """Make *session* the running loop's session of its key."""
        with self._lock:
            loop = asyncio.get_running_loop()
            self._by_loop.setdefault(loop, weakref.WeakValueDictionary())[session.key] = session
            self._use(session)

    def _use(self, session: SessionContext) -> None:
        self._recent[id(session)] = session
        self._recent.move_to_end(id(session))
        if len(self._recent) > KEPT_ALIVE:
            self._recent.popitem(last=False)

    def remove(self, key: Key) -> list[SessionContext]:
        """Forget every loop's session of that key, and return them."""
        with self._lock:
            found = [sessions.pop(key, None) for sessions in list(self._by_loop.values())]
            return self._without(session for session in found if session is not None)

    def remove_owner(self, owner: str) -> list[SessionContext]:
        """Forget every session of *owner*, and return them."""
        with self._lock:
            found: list[SessionContext] = []
            for sessions in list(self._by_loop.values()):
                for key in [key for key in sessions if key.owner == owner]:
                    session = sessions.pop(key, None)
                    if session is not None:
                        found.append(session)
            return self._without(iter(found))

    def _without(self, sessions: Iterator[SessionContext]) -> list[SessionContext]:
        removed = list(sessions)
        for session in removed:
            self._recent.pop(id(session), None)
        return removed
