"""What the outside world knows, beside any storage, and what it holds the rules to: the promises to be broken."""

from __future__ import annotations

from collections.abc import Callable

import attrs

from chatflow.core.records import Key, Snapshot
from chatflow.core.rows import IN_LINE, WAITING, End, Row, State
from tests.model.storage import Storage

_AT_ONCE = 1.0
"""Seconds in which a waiting turn starts once it can."""

_BACK_OFF = 0.99
"""Seconds that pass before what has failed is tried again."""

_FOR_EVER = 40
"""Starts of one message after which nobody believes in an end."""


class Violation(AssertionError):  # noqa: N818  # it is what a schedule is searched for, and no error of the program
    """A promise was broken: which, and how."""

    def __init__(self, invariant: str, text: str) -> None:
        super().__init__(f"{invariant}: {text}")
        self.invariant = invariant


@attrs.frozen
class Nested:
    """A turn asked for by a tool: of another conversation, as a bare turn or for a message."""

    key: Key
    message_id: str | None
    bare: bool


@attrs.frozen
class Step:
    """One call of a tool that the model asks for, after so many seconds."""

    model_seconds: float
    tool_seconds: float
    idempotent: bool
    nested: Nested | None


@attrs.frozen
class Script:
    """What answering a message takes. It fails in its first so many runs, or kills its process in each."""

    steps: tuple[Step, ...]
    last_seconds: float
    failures: int = 0
    kills: bool = False


@attrs.define(eq=False)
class Message:
    """A message of the outside world, and what has become of it."""

    key: Key
    message_id: str
    text: str
    agent: str
    script: Script
    is_accepted: bool = False
    """Somebody got a receipt for it, and its conversation was not deleted since."""
    is_answered: bool = False
    """Somebody got its answer."""
    is_told: bool = False
    """Its end was told, and nobody has sent it since."""
    was_deleted: bool = False
    commits: int = 0
    handed_on: int = 0
    runs: int = 0
    strikes: int = 0
    """Starts, less those whose end was told, in this incarnation of its conversation."""
    place: int | None = None
    """When it came to where it stands in its line."""
    passed_by: int = 0
    """Bare turns that began before its first run, while somebody could have done it."""
    failed_at: float | None = None
    """When its last run failed, as long as whoever did it keeps it to try again."""
    owed: bool = False
    """An accepted turn was committed, and its answer has to be handed on."""


@attrs.define(eq=False)
class Ledger:
    """Everything that was acknowledged, paid for, or done."""

    storage: Storage
    max_attempts: int
    clock: Callable[[], float]
    messages: dict[tuple[Key, str], Message] = attrs.field(factory=dict)
    log: dict[int, list[str]] = attrs.field(factory=dict)
    states: dict[int, dict[str, object]] = attrs.field(factory=dict)
    effects: dict[tuple[int, str, int], int] = attrs.field(factory=dict)
    changed: dict[int, float] = attrs.field(factory=dict)
    """When a row of a conversation last gave up its place."""
    killed_at: float = 0.0
    """When a process last died for all to see, and gave up all its places."""
    finished: dict[tuple[int, str, int], float] = attrs.field(factory=dict)
    trace: list[str] = attrs.field(factory=list)
    on_passing: Callable[[Key], None] = lambda key: None
    _arrivals: int = 0

    def say(self, text: str) -> None:
        """A line of the story."""
        self.trace.append(f"{self.clock():8.3f} {text}")

    def fail(self, invariant: str, text: str) -> Violation:
        """The error to raise."""
        return Violation(invariant, text)

    def message(self, row: Row, key: Key) -> Message | None:
        """The message of a row."""
        return None if row.message_id is None else self.messages.get((key, row.message_id))

    def arrived(self, message: Message) -> None:
        """It has a place in the line, unless it had one, since somebody sent it."""
        message.is_told = False
        if message.place is None:
            self._arrivals += 1
            message.place = self._arrivals

    # --- what is true at every step ---

    def check_line(self, session_key: int) -> None:
        """One turn runs at a time."""
        running = [row.turn_id for row in self.storage.rows(session_key) if row.state is State.RUNNING]
        if len(running) > 1:
            raise self.fail("overlap", f"turns {running} of conversation {session_key} run at once")

    def started(self, turn_id: int, key: Key, agent: str) -> None:
        """The row has just begun to run, by that application."""
        row = self.storage.find(turn_id)
        assert row is not None
        self.check_line(row.session_key)
        if row.agent_name not in {None, agent}:
            raise self.fail("agents", f"turn {turn_id} of {row.agent_name} is done by {agent}")
        others = self.storage.rows(row.session_key)
        for other in others:
            if other.turn_id < turn_id and other.state in IN_LINE and not _may_be_passed(other, row.agent_name):
                raise self.fail("order", f"turn {turn_id} runs before {other.turn_id} ({other.state}) of {key}")
        message = self.message(row, key)
        if message is not None:
            self._started_message(row, message, others)
        elif row.agent_name is None:
            self.on_passing(key)

    def _started_message(self, row: Row, message: Message, others: list[Row]) -> None:
        rows = {other.message_id: other for other in others}
        for other in self.messages.values():
            if other.key != message.key or other.place is None or message.place is None or other is message:
                continue
            found = rows.get(other.message_id)
            if found is not None and found.state is State.DEAD:
                self.died(other)
            elif other.place < message.place and (found is None or not _may_be_passed(found, row.agent_name)):
                raise self.fail("order", f"{message.message_id} runs before {other.message_id}, which came first")
        message.runs += 1
        message.strikes += 1
        if row.attempts != message.strikes:
            raise self.fail(
                "attempts", f"{row.message_id} counts {row.attempts} and was started {message.strikes} times"
            )
        if message.runs > _FOR_EVER:
            raise self.fail("endless", f"{message.message_id} is started for ever")
        if message.failed_at is not None and self.clock() - message.failed_at < _BACK_OFF:
            raise self.fail("hurried", f"{message.message_id} is tried again at once")
        message.failed_at = None
        if message.is_told:
            raise self.fail("unasked", f"{message.message_id} runs, though its end was told and nobody sent it again")
        if message.commits:
            raise self.fail("doubled", f"{message.message_id} runs again after its commit")

    def left(self, row: Row, key: Key, end: End, left: State | None) -> None:
        """The row's holder, whose fence held, has let go of it."""
        message = self.message(row, key)
        if message is None:
            return
        told = end is End.TOLD and not message.is_accepted
        if row.state is State.RUNNING and (told or end is End.LET_GO):
            message.strikes -= 1
        if row.state in IN_LINE - WAITING:
            message.is_told = told
            if end is not End.LET_GO and not message.is_accepted:
                message.place = None
        message.failed_at = self.clock() if end is End.FAILED and message.is_accepted else None
        if left is State.DEAD:
            self.died(message)

    def died(self, message: Message) -> None:
        """Somebody was told that it is dead."""
        message.place = None
        if message.strikes < self.max_attempts:
            raise self.fail("attempts", f"{message.message_id} is dead after {message.strikes} attempts")

    def committed(self, name: str, message: Message | None, base: Snapshot, entries: tuple[str, ...]) -> None:
        """A commit was acknowledged by the storage: *entries* is what the conversation holds now."""
        log = self.log.setdefault(base.session_key, [])
        log.append(name)
        if list(entries) != log:
            raise self.fail("overlap", f"conversation {base.session_key} holds {entries} instead of {log}")
        if message is None:
            if log.count(name) > 1:
                raise self.fail("doubled", f"{name} was committed twice")
            return
        message.commits += 1
        message.place = None
        if message.commits > 1:
            raise self.fail("doubled", f"{name} was committed {message.commits} times")

    def called(self, session_key: int, name: str, index: int, *, idempotent: bool, since: float) -> None:
        """A tool begins, in a run that began at *since*."""
        call = (session_key, name, index)
        self.effects[call] = self.effects.get(call, 0) + 1
        if self.effects[call] > 1 and not idempotent:
            raise self.fail("effects", f"call {index} of {name} was made twice")
        if self.finished.get(call, since) < since:
            raise self.fail("effects", f"call {index} of {name} was made again after its end was noted")

    def deleted(self, key: Key) -> None:
        """A conversation is gone."""
        for message in self.messages.values():
            if message.key == key:
                message.is_accepted = False
                message.owed = False
                message.was_deleted = True
                message.strikes = 0
                message.place = None
                message.failed_at = None

    def begins(self, row: Row, waiting_since: float) -> None:
        """Somebody who waits for nothing but the line begins, or has work begun."""
        since = max(self.changed.get(row.session_key, 0.0), self.killed_at, waiting_since)
        if self.clock() - since > _AT_ONCE:
            raise self.fail("late", f"turn {row.turn_id} begins {self.clock() - since:.2f} s after it could")

    # --- what is true at the end ---

    def close(self) -> None:
        """Everybody has been answered or told, and the last workers have done all there was to do."""
        for row in self.storage.rows():
            if row.state not in {State.TOLD, State.DEAD}:
                raise self.fail("left over", f"turn {row.turn_id} of {row.message_id} is left {row.state}")
        for message in self.messages.values():
            name = message.message_id
            if message.is_answered and not message.commits and not message.was_deleted:
                raise self.fail("lost", f"{name} was answered and never committed")
            if message.owed and not message.handed_on:
                raise self.fail("handed on", f"the answer to {name} has reached nobody")
            if message.is_accepted and not message.commits and message.strikes < self.max_attempts:
                raise self.fail("lost", f"{name} was accepted, and never committed after {message.strikes} attempts")


def _may_be_passed(other: Row, agent_name: str | None) -> bool:
    # Told here in its own words, so that a fault in `passes` is seen.
    return other.state in {State.ACCEPTED, State.INTERRUPTED} and other.agent_name != agent_name
