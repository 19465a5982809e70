"""Stores with one fault each, and one without: what the conformance suite is to tell apart."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import attrs
from anyio.lowlevel import checkpoint as yield_once

from chatflow import Message, SessionStore
from chatflow.core.history import History
from chatflow.core.journal import Entry
from chatflow.core.records import Commit, Committed, Key, Lost, Seen, Snapshot
from chatflow.core.values import FrozenDict
from chatflow.testing import Backend


class Aliasing(SessionStore):
    """What it has handed out changes with the next commit."""

    async def commit_turn(self, commit: Commit, key: Key) -> Committed | Lost:
        """Commit, and change the snapshot before into the one after."""
        before = await self.load_session(key, None)
        committed = await super().commit_turn(commit, key)
        after = await self.load_session(key, None)
        if isinstance(before, Snapshot) and isinstance(after, Snapshot):
            for field in attrs.fields(Snapshot):
                object.__setattr__(before, field.name, getattr(after, field.name))
        return committed


def _history(systems: Sequence[Message], body: Sequence[Message]) -> History:
    return History([*systems], len(systems), [*body], 0, len(body))


def _before(store: SessionStore, key: Key) -> Snapshot | None:
    session = store._tables.sessions.find(key)
    return None if session is None else session.snapshot


class LostOrder(SessionStore):
    """The messages of one commit come back in another order."""

    async def commit_turn(self, commit: Commit, key: Key) -> Committed | Lost:
        """Keep the last message of a commit first."""
        history = commit.snapshot.history
        kept = history.body_from(0)[: history.body_length - len(commit.bodies)]
        turned = _history(history.systems_from(0), [*kept, *reversed(commit.bodies)])
        return await super().commit_turn(
            attrs.evolve(commit, snapshot=attrs.evolve(commit.snapshot, history=turned)), key
        )


class CheckThenMark(SessionStore):
    """Whether an id is marked is one operation, and marking it another one."""

    async def mark_processed(self, scope: Key, message_id: str) -> bool:
        """Look first, and mark then."""
        if await self.is_processed(scope, message_id):
            return False
        await yield_once()
        await super().mark_processed(scope, message_id)
        return True


class NoCascade(SessionStore):
    """The turns of a conversation that is deleted stay."""

    async def delete_session(self, key: Key) -> tuple[int, ...] | None:
        """Delete the conversation alone."""
        if await self.load_session(key, None) is Seen.ABSENT:
            return None
        self._tables.sessions.remove(self._tables.sessions.of(key))
        return ()


class DirtyRead(SessionStore):
    """What a turn has noted can be seen before it commits."""

    async def write_journal(
        self, turn_id: int, attempt: int, entry: Entry, key: Key, known: Snapshot | None, *, durable: bool
    ) -> Lost | None:
        """Note the entry, and show what it has set in the state."""
        lost = await super().write_journal(turn_id, attempt, entry, key, known, durable=durable)
        before = _before(self, key)
        if lost is None and before is not None:
            noted = {each.key: each.value for each in entry.deeds if each.what == "set" and each.kind == "state"}
            shown = attrs.evolve(before, state=FrozenDict({**before.state, **noted}))
            self._tables.sessions.renew(self._tables.sessions.of(key), shown)
        return lost


class Unpruned(SessionStore):
    """What leaves the window stays."""

    async def commit_turn(self, commit: Commit, key: Key) -> Committed | Lost:
        """Keep what is to be dropped."""
        before = _before(self, key)
        if before is not None and not commit.replace:
            history = _history(commit.snapshot.history.systems_from(0), [*before.history.body_from(0), *commit.bodies])
            whole = attrs.evolve(commit.snapshot, history=history, start=before.start)
            commit = attrs.evolve(commit, snapshot=whole)
        return await super().commit_turn(commit, key)


class Blocking(SessionStore):
    """An operation holds up the event loop."""

    async def is_processed(self, scope: Key, message_id: str) -> bool:
        """Wait a moment, as for a disk."""
        time.sleep(0.000_001)  # noqa: ASYNC251  # that is the fault
        return await super().is_processed(scope, message_id)


class Counting(SessionStore):
    """A sound one, which counts its commits."""

    commits = 0

    async def commit_turn(self, commit: Commit, key: Key) -> Committed | Lost:
        """Commit, and count."""
        committed = await super().commit_turn(commit, key)
        self.commits += isinstance(committed, Committed)
        return committed


def _backend(kind: type[SessionStore]) -> Backend:
    def make(folder: Path, **options: Any) -> SessionStore:
        return kind(**options)

    return Backend(kind.__name__, make)


SOUND: Final = _backend(Counting)
ALIASING, LOST_ORDER, CHECK_THEN_MARK, NO_CASCADE, DIRTY_READ, UNPRUNED, BLOCKING = map(
    _backend, (Aliasing, LostOrder, CheckThenMark, NoCascade, DirtyRead, Unpruned, Blocking)
)
NONE: Final[tuple[Backend, ...]] = ()
