"""The session objects in use: one for a conversation and event loop, so that a session asked for twice is the same."""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections import OrderedDict
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

    def all_of(self, key: Key) -> list[SessionContext]:
        """Every loop's session of that key."""
        with self._lock:
            found = [sessions.get(key) for sessions in list(self._by_loop.values())]
        return [session for session in found if session is not None]

    def all_of_owner(self, owner: str) -> list[SessionContext]:
        """Every session of *owner*."""
        with self._lock:
            found = [session for sessions in list(self._by_loop.values()) for session in list(sessions.values())]
        return [session for session in found if session.key.owner == owner]

    def remove(self, session: SessionContext) -> None:
        """Forget *session*, and no other that has its key by now."""
        with self._lock:
            for sessions in list(self._by_loop.values()):
                if sessions.get(session.key) is session:
                    del sessions[session.key]
            self._recent.pop(id(session), None)
