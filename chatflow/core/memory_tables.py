"""What a store in memory holds, and the operations on it: each one whole, under the store's lock."""

from __future__ import annotations

import datetime as dt
from collections import OrderedDict
from collections.abc import Callable
from heapq import nsmallest
from itertools import chain, islice
from typing import Any, Final

import attrs

from chatflow.core import lines
from chatflow.core.journal import Entry
from chatflow.core.memory_rows import MemoryRows
from chatflow.core.memory_sessions import Conversation, MemorySessions, is_idle, is_over
from chatflow.core.messages import AgentResponse
from chatflow.core.owners import Erased, Hidden, Purged, RememberedId
from chatflow.core.records import (
    Accepted,
    Answered,
    Beat,
    Beaten,
    Commit,
    Committed,
    Cycle,
    Dead,
    InProgress,
    Key,
    Leaving,
    Left,
    Lost,
    PendingTurn,
    Place,
    Snapshot,
    Ticket,
    Work,
)
from chatflow.core.rows import WAITING, Row, State, taken
from chatflow.core.values import FrozenDict
from chatflow.core.working import merged

_PURGED_WITH_EACH_MARK: Final = 10


@attrs.frozen
class Processed:
    """A message id that is remembered, and what was answered."""

    at: dt.datetime
    digest: str | None
    response: AgentResponse | None


class MemoryTables:
    """All of one store: conversations, turns, message ids. The rules of turns are those of core/lines.py."""

    def __init__(self, clock: Callable[[], dt.datetime], dedup_ttl_hours: float) -> None:
        self.rows = MemoryRows(clock)
        self._clock = clock
        self._dedup_ttl_hours = dedup_ttl_hours
        self.sessions = MemorySessions(clock)
        self._processed: OrderedDict[tuple[Key, str], Processed] = OrderedDict()

    def clear(self) -> None:
        """Forget everything."""
        self.sessions.clear()
        self.rows.clear()
        self._processed.clear()

    def interrupt(self, beat: Beat) -> bool:
        """Change the row, if its beat is the same."""
        return lines.interrupt_silent(self.rows, beat)

    def delete(self, key: Key) -> tuple[int, ...] | None:
        """Delete one conversation."""
        session = self.sessions.find(key)
        if session is None:
            return None
        self.sessions.remove(session)
        turns = self.rows.turn_ids(session.snapshot.session_key)
        for turn_id in turns:
            self.rows.delete(self.rows.turn(turn_id).row)
        for message_id in session.answered:
            processed = self._processed[key, message_id]
            self._processed[key, message_id] = attrs.evolve(processed, response=None)
        return turns

    def delete_slice(self, owner: str, limit: int) -> tuple[int | None, tuple[int, ...]]:
        """Delete up to *limit* conversations."""
        keys = list(islice(self.sessions.keys_of(owner), limit))
        turns = [turn for key in keys for turn in self.delete(key) or ()]
        return (0 if len(keys) == limit else None), tuple(turns)

    def purge_sessions(
        self, owner: str | None, idle_for: float | None, after: tuple[Key, ...] | None, limit: int
    ) -> Purged:
        """Look at up to *limit* conversations of those that were listed when it began."""
        now = self._clock()
        if after is None:
            after = tuple(session.key for session in self.sessions.left_alone(owner, idle_for, now))
        gone: list[tuple[Key, int]] = []
        turns: list[int] = []
        for key in after[:limit]:
            session = self.sessions.find(key)
            if session is not None and self._may_go(session, idle_for, now):
                gone.append((key, session.snapshot.session_key))
                turns += self.delete(key) or ()
        return Purged(tuple(gone), tuple(turns), after[limit:] or None)

    def _may_go(self, session: Conversation, idle_for: float | None, now: dt.datetime) -> bool:
        alone = is_over(session, now) or is_idle(session, idle_for, now)
        return alone and not self.rows.holds(session.snapshot.session_key)

    def erase(self, owner: str) -> Hidden:
        """Delete all of an owner's."""
        keys = list(self.sessions.keys_of(owner))
        messages = sum(len(self.sessions.of(key).snapshot.history) for key in keys)
        turns = [turn for key in keys for turn in self.delete(key) or ()]
        message_ids = [place for place in self._processed if place[0].owner == owner]
        for place in message_ids:
            del self._processed[place]
        counts = Erased(
            conversations=len(keys), messages=messages, turns=len(turns), message_ids=len(message_ids), set_aside=0
        )
        return Hidden(counts, tuple(turns))

    def page_of_processed(self, owner: str, after: tuple[str, str], limit: int) -> tuple[RememberedId, ...]:
        """The next ids in order."""
        found = (
            (scope.session_id, message_id)
            for scope, message_id in self._processed
            if scope.owner == owner and (scope.session_id, message_id) > after
        )
        return tuple(self._remembered(owner, *place) for place in nsmallest(limit, found))

    def _remembered(self, owner: str, session_id: str, message_id: str) -> RememberedId:
        processed = self._processed[Key(owner, session_id), message_id]
        return RememberedId(
            session_id=session_id,
            message_id=message_id,
            processed_at=processed.at,
            response=processed.response,
        )

    def queue(self, ticket: Ticket) -> Place | Answered | InProgress | Dead | Cycle | Lost:
        """Insert a row, or take the message's own."""
        answered = self._find_answer(ticket)
        if answered is not None:
            return answered
        session = self._find_session(ticket)
        if session is None:
            return Lost.SESSION
        found = lines.queue(self.rows, session.snapshot.session_key, ticket)
        return self._place(found, session, ticket.known, ticket.max_attempts) if isinstance(found, Row) else found

    def _find_answer(self, ticket: Ticket) -> Answered | None:
        if ticket.claim is None:
            return None
        processed = self.find_processed(ticket.key, ticket.claim.message_id)
        return None if processed is None else Answered(processed.digest, processed.response)

    def _find_session(self, ticket: Ticket) -> Conversation | None:
        """The conversation that the ticket means; made, if it may be."""
        session = self.sessions.find(ticket.key)
        if ticket.known is not None:
            same = session is not None and session.snapshot.session_key == ticket.known.session_key
            return session if same else None
        if session is None:
            assert ticket.new is not None
            self.sessions.create(ticket.key, ticket.new)
        return self.sessions.of(ticket.key)

    def _place(self, row: Row, session: Conversation, known: Snapshot | None, max_attempts: int | None) -> Place | Dead:
        found = lines.start(self.rows, row, max_attempts)
        if isinstance(found, Dead):
            return found
        row, runs = found
        snapshot = session.snapshot
        return Place(
            turn_id=row.turn_id,
            running=runs is not None,
            attempt=row.attempt,
            behind_own=True,
            session=None if runs is None or snapshot.same_as(known) else snapshot,
            work=None if runs is None or runs is row else self.rows.work(self.rows.turn(runs.turn_id)),
            journal=() if runs is None else tuple(self.rows.turn(runs.turn_id).journal),
        )

    def start(
        self, turn_id: int, attempt: int, key: Key, known: Snapshot | None, max_attempts: int | None
    ) -> Place | Dead | Lost:
        """Start what may run."""
        row = self._own(turn_id, attempt)
        return self._lost(key, known) if row is None else self._place(row, self.sessions.of(key), known, max_attempts)

    def _own(self, turn_id: int, attempt: int) -> Row | None:
        row = self.rows.find(turn_id)
        return row if row is not None and row.is_of(self.rows.holder, attempt) else None

    def _lost(self, key: Key, known: Snapshot | None) -> Lost:
        session = self.sessions.find(key)
        gone = session is None or (known is not None and session.snapshot.session_key != known.session_key)
        return Lost.SESSION if gone else Lost.TURN

    def accept(self, ticket: Ticket) -> Accepted | Answered | Dead:
        """Insert work to be done."""
        answered = self._find_answer(ticket)
        if answered is not None:
            return answered
        session = self._find_session(ticket)
        assert session is not None
        return lines.accept(self.rows, session.snapshot.session_key, ticket)

    def commit(self, commit: Commit, key: Key) -> Committed | Lost:
        """Take the snapshot."""
        row = self._own(commit.turn_id, commit.attempt)
        if row is None or row.state is not State.RUNNING:
            return self._lost(key, commit.snapshot)
        session = self.sessions.of(key)
        snapshot = session.snapshot
        if commit.changes_session:
            changes: dict[str, Any] = {**commit.metadata_set}
            metadata = merged(snapshot.metadata, changes)
            for name in commit.metadata_removed:
                metadata.pop(name, None)
            snapshot = self.sessions.renew(session, attrs.evolve(commit.snapshot, metadata=FrozenDict(metadata)))
        if commit.claim is not None:
            # Noted first: the mark purges, and what it purges is no longer noted.
            session.answered.add(commit.claim.message_id)
            self._mark(key, commit.claim.message_id, commit.claim.digest, commit.response)
        if row.accepted:
            holder = row.holder if commit.hands_on else None
            self.rows.write(attrs.evolve(row, state=State.ANSWERED, holder=holder))
            self.rows.drop_journal(row)
        else:
            self.rows.delete(row)
        return Committed(snapshot.version, snapshot.metadata, self.rows.next_of(row.session_key), row.accepted)

    def leave(self, leaving: Leaving) -> Left:
        """Change or delete the row."""
        row = self.rows.find(leaving.turn_id)
        if row is None:
            return Left(None, None)
        left = lines.leave(self.rows, leaving)
        return Left(None if left is None else left.state, self.rows.next_of(row.session_key))

    def look(self, turn_id: int, attempt: int, key: Key, known: Snapshot | None) -> Lost | None:
        """What is gone, if the row does not run."""
        row = self._own(turn_id, attempt)
        return None if row is not None and row.state is State.RUNNING else self._lost(key, known)

    def note(self, turn_id: int, attempt: int, entry: Entry, key: Key, known: Snapshot | None) -> Lost | None:
        """Keep the entry."""
        lost = self.look(turn_id, attempt, key, known)
        if lost is None:
            self.rows.turn(turn_id).journal.append(entry)
        return lost

    def beat(self, held: frozenset[int], watched: frozenset[int], everything: bool) -> Beaten:
        """Count, and read the others' counts."""
        own: dict[int, int] = {}
        lines_watched: set[int] = set()
        for turn in self.rows:
            row = turn.row
            if row.turn_id in held and row.holder is not None:
                turn.beat += 1
                own[row.turn_id] = row.attempt
                if row.state is State.QUEUED:
                    lines_watched.add(row.session_key)
        others = tuple(
            Beat(
                turn_id=turn.row.turn_id,
                attempt=turn.row.attempt,
                beat=turn.beat,
                lease_seconds=turn.lease_seconds,
            )
            for turn in self.rows
            if turn.row.holder is not None
            and turn.row.turn_id not in own
            and (everything or turn.row.turn_id in watched or turn.row.session_key in lines_watched)
        )
        return Beaten(own=own, others=others)

    def take(self, agent_name: str, lease_seconds: float, limit: int, answers: bool) -> tuple[Work, ...]:
        """Take answers to hand on, then work to do."""
        at_hand = [turn for turn in self.rows if turn.row.holder is None and turn.row.agent_name == agent_name]
        answered = [turn for turn in at_hand if answers and turn.row.state is State.ANSWERED]
        todo = (turn for turn in at_hand if turn.row.state in WAITING and lines.first_to_take(self.rows, turn.row))
        found: list[Work] = []
        for turn in islice(chain(answered, todo), limit):
            row, answer = turn.row, None
            if row.state is State.ANSWERED:
                assert row.message_id is not None
                # Also one that has expired in the meantime, as long as it is there.
                processed = self._processed.get((turn.key, row.message_id))
                answer = None if processed is None else processed.response
                if answer is None:
                    self.rows.delete(row)
                    continue
                self.rows.write(attrs.evolve(row, holder=self.rows.holder, attempt=row.attempt + 1))
            else:
                self.rows.write(taken(row, self.rows.holder))
            turn.lease_seconds = lease_seconds
            found.append(attrs.evolve(self.rows.work(turn), response=answer))
        return tuple(found)

    def is_next_to_tell(self, turn_id: int, attempt: int) -> bool | None:
        """Whether no answered row stands before it."""
        row = self._own(turn_id, attempt)
        if row is None:
            return None
        before = (self.rows.turn(other) for other in self.rows.turn_ids(row.session_key) if other < turn_id)
        return all(turn.row.state is not State.ANSWERED for turn in before)

    def end_answered(self, turn_id: int, attempt: int) -> None:
        """Drop the row."""
        row = self._own(turn_id, attempt)
        if row is not None:
            self.rows.delete(row)

    def page_of_turns(self, owner: str | None, after: int, limit: int) -> tuple[PendingTurn, ...]:
        """A slice of the rows."""
        found = (turn for turn in self.rows if turn.row.turn_id > after and owner in {None, turn.key.owner})
        return tuple(self.rows.pending(turn) for turn in islice(found, limit))

    def find_processed(self, scope: Key, message_id: str) -> Processed | None:
        """What is remembered of the id."""
        processed = self._processed.get((scope, message_id))
        return None if processed is None or processed.at < self._expired_before() else processed

    def _expired_before(self) -> dt.datetime:
        return self._clock() - dt.timedelta(hours=self._dedup_ttl_hours)

    def _mark(self, scope: Key, message_id: str, digest: str | None, response: AgentResponse | None) -> None:
        self._processed[scope, message_id] = Processed(self._clock(), digest, response)
        self._processed.move_to_end((scope, message_id))
        self.purge(_PURGED_WITH_EACH_MARK)

    def mark_new(self, scope: Key, message_id: str) -> bool:
        """Mark the id, unless it is marked."""
        if self.find_processed(scope, message_id) is not None:
            return False
        self._mark(scope, message_id, None, None)
        return True

    def purge(self, limit: int) -> int:
        """Drop the oldest."""
        expired_before = self._expired_before()
        self.rows.purge(expired_before, limit)
        oldest = islice(self._processed.items(), limit)
        expired = [place for place, processed in oldest if processed.at < expired_before]
        for scope, message_id in expired:
            del self._processed[scope, message_id]
            session = self.sessions.find(scope)
            if session is not None:
                session.answered.discard(message_id)
        return len(expired)
