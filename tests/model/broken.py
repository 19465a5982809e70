"""Storages that leave out a rule."""

from __future__ import annotations

import attrs
import pytest

from chatflow.core import lines
from chatflow.core.journal import Entry
from chatflow.core.memory_rows import MemoryRows
from chatflow.core.records import Commit, Committed, Key, Lost, Snapshot, Work
from chatflow.core.rows import LIVE, Row, State
from tests.model.storage import Memory


class UnfencedCommit(Memory):
    """A commit is not asked for its fence."""

    def commit(self, holder: str, commit: Commit, key: Key) -> Committed | Lost:
        row = self.find(commit.turn_id)
        if row is not None and row.holder is not None:
            holder, commit = row.holder, attrs.evolve(commit, attempt=row.attempt)
        return super().commit(holder, commit, key)


class CommitWithoutRow(Memory):
    """A commit changes the conversation also where its row is gone."""

    def commit(self, holder: str, commit: Commit, key: Key) -> Committed | Lost:
        found = super().commit(holder, commit, key)
        snapshot = self.tables.overwrite(key, commit.snapshot) if isinstance(found, Lost) else None
        return found if snapshot is None else Committed(snapshot.version, snapshot.metadata, None)


class UnfencedJournal(Memory):
    """A line of a journal is not asked for its fence."""

    def note(
        self, holder: str, turn_id: int, attempt: int, entry: Entry, key: Key, known: Snapshot | None
    ) -> Lost | None:
        row = self.find(turn_id)
        if row is not None and row.holder is not None:
            holder, attempt = row.holder, row.attempt
        return super().note(holder, turn_id, attempt, entry, key, known)


class NoJournal(Memory):
    """Nothing is noted."""

    def note(
        self, holder: str, turn_id: int, attempt: int, entry: Entry, key: Key, known: Snapshot | None
    ) -> Lost | None:
        return self.look(holder, turn_id, attempt, key, known)


class TakenWhileIdle(Memory):
    """A worker takes work only where nothing runs."""

    def take_work(self, holder: str, agent_name: str, lease: float, limit: int) -> tuple[Work, ...]:
        first = lines.first_to_take

        def mutated(rows: lines.Rows, row: Row) -> bool:
            return rows.running(row.session_key) is None and first(rows, row)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(lines, "first_to_take", mutated)
            return super().take_work(holder, agent_name, lease, limit)


class TakenFromOthers(Memory):
    """A worker takes what others have in hand."""

    def take_work(self, holder: str, agent_name: str, lease: float, limit: int) -> tuple[Work, ...]:
        rows = self.tables.of(holder).rows
        for row in self.rows():
            if row.state in LIVE and row.accepted and row.holder != holder:
                rows.write(attrs.evolve(row, state=State.ACCEPTED, holder=None))
        return super().take_work(holder, agent_name, lease, limit)


class ForgottenAnswer(Memory):
    """The row of an accepted turn goes with its commit."""

    def commit(self, holder: str, commit: Commit, key: Key) -> Committed | Lost:
        found = super().commit(holder, commit, key)
        row = self.find(commit.turn_id)
        if row is not None and row.state is State.ANSWERED:
            self.tables.rows.delete(row)
        return found


class ForgottenIds(Memory):
    """A deleted conversation takes its answered ids along."""

    def delete(self, holder: str, key: Key) -> tuple[int, ...] | None:
        self.tables.forget_answers(key)
        return super().delete(holder, key)


class RowsStay(Memory):
    """A deleted conversation leaves its turns behind."""

    def delete(self, holder: str, key: Key) -> tuple[int, ...] | None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(MemoryRows, "turn_ids", lambda self, session_key: ())
            return super().delete(holder, key)
