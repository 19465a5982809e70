"""A turn's working copy: what its members see and change, and the difference to the last commit that comes of it."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any, Final, Literal, cast

import attrs

from chatflow.core.compaction import is_summary
from chatflow.core.history import History
from chatflow.core.journal import Deed, record
from chatflow.core.messages import AgentResponse, Message
from chatflow.core.pruning import Window
from chatflow.core.records import Claim, Commit, Snapshot
from chatflow.core.service import ServiceSession, ServiceStep, digest_of, id_key
from chatflow.core.usage import spent_on
from chatflow.core.values import EMPTY, FrozenDict
from chatflow.exceptions import UnmatchedToolResultError, shorten

logger = logging.getLogger("chatflow.turn")

Kind = Literal["metadata", "state"]


@attrs.frozen(eq=False)
class Change:
    """A change that waits for a turn. Another object each time, so that the same value set again is another change."""

    value: Any


class _Removed:
    """Stands for a key that is to go."""


REMOVED: Final = _Removed()
_ABSENT: Final = object()


def merged(values: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """*values* with *changes* made to them, key by key."""
    result = {**values, **changes}
    return {key: value for key, value in result.items() if value is not REMOVED}


def with_inner(found: object, inner: str, value: Any) -> Any:
    """The mapping *found*, or an empty one, with one key set, or removed; `REMOVED` if that leaves nothing."""
    before: Mapping[str, Any] = cast("Mapping[str, Any]", found) if isinstance(found, Mapping) else EMPTY
    return FrozenDict(merged(before, {inner: value})) or REMOVED


def with_changes(values: Mapping[str, Any], changes: Mapping[str, Change]) -> dict[str, Any]:
    """*values* with *changes* that wait made to them."""
    return merged(values, {key: change.value for key, change in changes.items()})


def _kept(before: FrozenDict, now: Mapping[str, Any]) -> FrozenDict:
    """*now*, frozen: *before* itself if it holds the very same objects (True and 1 are equal, and not the same)."""
    if len(before) == len(now) and all(before.get(key, _ABSENT) is value for key, value in now.items()):
        return before
    return FrozenDict(now)


class Working:
    """What the members of a turn see and change: a copy of the last commit that nobody else sees."""

    def __init__(
        self, base: Snapshot, window: Window, max_turns: int, pending: Mapping[Kind, Mapping[str, Change]]
    ) -> None:
        self.base = base
        self.max_turns = max_turns
        self.window = window
        self.agent_name = base.agent_name
        self.service = base.service
        self.spent = base.spent
        self.changes = 0
        """How often the messages have changed."""
        # By a service's id: up to where it has seen the history.
        self._reached = {} if base.service is None else {id_key(base.service.id): base.service.seen}
        self._pending = pending
        self._marks: dict[int, Snapshot] = {}
        self.values = self._first_values()
        self._restored = False
        self._front = window.start

    def _first_values(self) -> dict[Kind, dict[str, Any]]:
        return {
            "metadata": with_changes(self.base.metadata, self._pending["metadata"]),
            "state": with_changes(self.base.state, self._pending["state"]),
        }

    @property
    def history(self) -> History:
        """What the conversation's history would be, were the turn to commit now."""
        return self.window.history(self.max_turns)

    def set(self, kind: Kind, key: str, value: Any) -> None:
        """Set one key of metadata or state, or remove it."""
        if value is REMOVED:
            del self.values[kind][key]
            record(self, "remove", kind=kind, key=key)
        else:
            self.values[kind][key] = value
            record(self, "set", kind=kind, key=key, value=value)

    def set_inside(self, key: str, inner: str, value: Any) -> None:
        """Set one key of the mapping that the state has under *key*, or remove it."""
        self._put_inside(key, inner, value)
        if value is REMOVED:
            record(self, "remove", kind="state", key=key, inner=inner)
        else:
            record(self, "set", kind="state", key=key, inner=inner, value=value)

    def _put_inside(self, key: str, inner: str, value: Any) -> None:
        state = self.values["state"]
        after = with_inner(state.get(key), inner, value)
        if after is REMOVED:
            state.pop(key, None)
        else:
            state[key] = after

    def hand_to(self, agent_name: str) -> None:
        """Let another agent answer from now on."""
        self.agent_name = agent_name
        record(self, "agent", value=agent_name)

    def add(self, message: Message, session_id: str) -> None:
        """Add *message*, or change nothing and say why."""
        if not isinstance(message, Message):
            raise TypeError(f"add_message takes a Message, not {type(message).__name__}")
        unmatched = self.window.unmatched(message)
        if unmatched is not None:
            raise UnmatchedToolResultError(session_id=session_id, tool_call_id=unmatched)
        self.changes += 1
        if not self.window.add(message):
            logger.warning(
                "session %s: a %s message before the first user message was not stored (rule: after the system"
                " messages, a history begins with a user message)",
                shorten(session_id),
                message.role.value,
            )
        record(self, "add", message=message)

    def go_on_at_service(self, session: ServiceSession, since: int | None = None) -> None:
        """Note the session that a service's reply has come to, which is the last message now.

        If more than that message has changed *since* it was asked, the service knows another history than this one, and
        is left.
        """
        self.service = None
        if since is None or self.changes == since + 1:
            self.service = attrs.evolve(session, seen=self.window.end)
            self._reached[id_key(session.id)] = self.window.end

    def resumes(self, step: ServiceStep) -> bool:
        """Whether a reply that was noted as *step*, and is to be added now, is still what the service would go on from.

        Others may have committed since it was made.
        """
        after = None if self.service is None else id_key(self.service.id)
        return after == step.after and digest_of(self.unseen) == step.digest

    @property
    def unseen(self) -> tuple[Message, ...]:
        """The messages that the service has not seen, system messages aside; also those that pruning will drop."""
        return self.window.history().body_from(self.seen)

    @property
    def seen(self) -> int:
        """How many messages the service has seen of those that are kept until the commit; system messages aside."""
        return 0 if self.service is None else max(0, self.service.seen - self.window.start)

    @property
    def start(self) -> int:
        """The position of the first message of the history after the system messages."""
        return self.window.end - self.history.body_length

    def clear(self) -> None:
        """Remove all messages. A service would remember them, so that what follows begins a new session there."""
        self.service = None
        self.changes += 1
        self.spent = spent_on(self.window.history(), self.spent)
        self.window = Window(self.window.end)
        self._front = self.window.start
        self._restored = True
        record(self, "clear")

    def compact(self, start: int, summary: Message) -> None:
        """Have *summary* stand for all before the position *start*, in the place of a summary that was there before."""
        history = self.window.history()
        systems = list(history.systems_from(0))
        places = [place for place, message in enumerate(systems) if is_summary(message)]
        body, gone = history.body_from(0), start - self.window.start
        self.spent = spent_on([*filter(is_summary, systems), *body[:gone]], self.spent)
        systems.insert(places[0] if places else len(systems), summary)
        kept = [message for message in systems if message is summary or not is_summary(message)]
        self.window = Window(start)
        for message in (*kept, *body[gone:]):
            self.window.add(message)
        self.changes += 1
        self._restored = True

    def redo(self, deeds: Iterable[Deed], session_id: str) -> None:
        """Do again what a tool did in an attempt that did not commit, on what the conversation is like now."""
        for deed in deeds:
            if deed.key is not None and deed.inner is not None:
                self._put_inside(deed.key, deed.inner, deed.value if deed.what == "set" else REMOVED)
            elif deed.kind is not None and deed.key is not None:
                if deed.what == "set":
                    self.values[deed.kind][deed.key] = deed.value
                else:
                    self.values[deed.kind].pop(deed.key, None)
            elif deed.message is not None:
                self._redo_add(deed.message, session_id)
            elif deed.what == "clear":
                self.clear()
            elif deed.what == "drop":
                self._drop(deed.value)
            elif deed.what == "mark":
                self._marks[deed.value] = self.snapshot()
            elif deed.what == "restore":
                self._redo_restore(deed.value, session_id)
            else:
                self.agent_name = deed.value

    def _redo_add(self, message: Message, session_id: str) -> None:
        try:
            self.add(message, session_id)
        except UnmatchedToolResultError as error:
            # Others have committed since, and the call has gone from the history.
            logger.warning("%s; it is left out", error)

    def _redo_restore(self, number: int, session_id: str) -> None:
        snapshot = self._marks.get(number) if number else self._first()
        if snapshot is not None:
            self.go_back(snapshot)
            return
        # Taken outside of every tool, or by one that had not ended: nobody can tell when that was.
        logger.warning("session %s: a rollback to a checkpoint that was not noted is left out", shorten(session_id))

    def mark(self) -> Snapshot:
        """The state that `restore` takes."""
        snapshot = self.snapshot()
        number = max(self._marks, default=0) + 1
        self._marks[number] = snapshot
        record(self, "mark", value=number)
        return snapshot

    def _first(self) -> Snapshot:
        """The state that the turn began with."""
        values = self._first_values()
        return attrs.evolve(self.base, metadata=FrozenDict(values["metadata"]), state=FrozenDict(values["state"]))

    def snapshot(self) -> Snapshot:
        """The state that `go_back` takes."""
        return attrs.evolve(
            self.base,
            agent_name=self.agent_name,
            service=self.service,
            spent=self.spent,
            history=self.window.history(),
            start=self.window.start,
            metadata=FrozenDict(self.values["metadata"]),
            state=FrozenDict(self.values["state"]),
        )

    def restore(self, snapshot: Snapshot) -> None:
        """Go back to exactly *snapshot*: one that `mark` gave, or the state that the turn began with."""
        self.go_back(snapshot)
        number = next((number for number, marked in self._marks.items() if marked is snapshot), 0)
        record(self, "restore", value=number)

    def go_back(self, snapshot: Snapshot) -> None:
        """Undo all that was done since *snapshot*, which `snapshot` gave, as if it had never been."""
        self.window = Window.of(snapshot.history, snapshot.start)
        self._front = self.window.start
        self.agent_name = snapshot.agent_name
        self.service = snapshot.service
        self.spent = snapshot.spent
        self.changes += 1
        if self.service is not None and self._reached.get(id_key(self.service.id), 0) > self.service.seen:
            self.service = None  # it has one id for all of it, and can't go back
        self.values = {"metadata": dict(snapshot.metadata), "state": dict(snapshot.state)}
        self._restored = True

    def restore_length(self, length: int) -> None:
        """Go back to the first *length* messages of the history."""
        count = len(self.history) - length
        self._drop(count)
        record(self, "drop", value=count)

    def _drop(self, count: int) -> None:
        messages = self.window.history()
        self._keep(messages[: max(0, len(messages) - count)])

    def _keep(self, messages: Iterable[Message]) -> None:
        window = Window(self.window.start)
        for message in messages:
            window.add(message)
        self.window = window
        self.changes += 1
        self._restored = True
        if self.service is not None and self.service.seen > window.end:
            self.service = None  # it would remember what is gone here

    @property
    def front_stays(self) -> bool:
        """Whether the history begins as it did when the turn began: nothing was pruned, or moved before the others."""
        history, base = self.history, self.base.history
        if not history:
            return True
        if not base:
            return history.body_length == self.window.end - self._front
        same_systems = history.system_count == base.system_count
        if not same_systems or not history.body_length or not base.body_length:
            return same_systems
        return history[history.system_count] is base[base.system_count]

    def _continues(self, history: History) -> bool:
        """Whether *history* is the committed one, less whole turns at its front, plus what was added at its end."""
        return not self._restored or history.grows_from(self.base.history, self.window.start - self.base.start)

    def _trim(self) -> FrozenDict:
        """Prune, and return what was spent on messages that are gone then."""
        before, start = self.window.history(), self.window.start
        self.window.trim(self.max_turns)
        return spent_on(before.body_before(self.window.start - start), self.spent)

    def commit(
        self, turn_id: int, attempt: int, claim: Claim | None, response: AgentResponse | None, *, hands_on: bool
    ) -> Commit:
        """The difference to the last commit, pruned."""
        base = self.base
        spent = self._trim()
        history = self.window.history()
        base_end, system_end, service = base.end, base.system_end, self.service
        replace = not self._continues(history)
        if replace and service is not None:
            service = attrs.evolve(service, seen=base_end + max(0, service.seen - self.window.start))
        if replace:
            # New positions, past all that were given out: a row's position never means two messages.
            start, system_start = base_end, system_end
            bodies, systems = history.body_from(0), history.systems_from(0)
            body_start, new_system_start = start, system_start
            self.window = Window.of(history, start)
            history = self.window.history()
        else:
            start, system_start = self.window.start, base.system_start
            body_start, new_system_start = max(base_end, start), system_end
            bodies = history.body_from(body_start - start)
            systems = history.systems_from(base.history.system_count)
        metadata, state = _kept(base.metadata, self.values["metadata"]), _kept(base.state, self.values["state"])
        return Commit(
            turn_id=turn_id,
            attempt=attempt,
            snapshot=attrs.evolve(
                base,
                agent_name=self.agent_name,
                service=service,
                spent=spent,
                metadata=metadata,
                state=state,
                history=history,
                start=start,
                system_start=system_start,
            ),
            agent_name=self.agent_name if self.agent_name != base.agent_name else None,
            state=None if state is base.state else state,
            spent=None if spent is base.spent else spent,
            metadata_set={
                key: value for key, value in metadata.items() if base.metadata.get(key, _ABSENT) is not value
            },
            metadata_removed=tuple(key for key in base.metadata if key not in metadata),
            body_start=body_start,
            bodies=bodies,
            system_start=new_system_start,
            systems=systems,
            drop_before=start if start > base.start and not replace else None,
            replace=replace,
            changes_service=service != base.service,
            claim=claim,
            response=response,
            hands_on=hands_on,
        )
