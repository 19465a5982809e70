"""A turn's commit: the fence, what the turn changed, and the answer to its message, in one transaction."""

from __future__ import annotations

from collections.abc import Iterable

import attrs
import msgspec

from chatflow.core import reading
from chatflow.core.codec import message_to_json
from chatflow.core.messages import Message
from chatflow.core.records import Commit, Committed, Key, Lost, system_place
from chatflow.core.values import FrozenDict
from chatflow.sqlite import operations, statements
from chatflow.sqlite.database import Connection
from chatflow.sqlite.turn_statements import ANSWER_ROW, DROP_JOURNAL, END_TURN
from chatflow.sqlite.turns import At


def texts_of(messages: Iterable[Message]) -> str:
    """*messages* as one list of their texts, for one statement to write."""
    return msgspec.json.encode([message_to_json(message) for message in messages]).decode()


@attrs.frozen(kw_only=True)
class WriteCommit:
    """A turn's commit, ready to be written."""

    commit: Commit
    key: Key
    system_texts: str
    body_texts: str
    state_json: str | None
    spent_json: str | None
    response_json: str | None
    purged: int
    at: At

    def __call__(self, connection: Connection) -> Committed | Lost:
        """Delete the turn's row, which is the fence, and write what it changed."""
        commit, base = self.commit, self.commit.snapshot
        ended, answered = self._end_turn(connection)
        if ended is None:
            return operations.lost(self.key, base, connection)
        version, metadata = base.version, base.metadata
        if commit.changes_session:
            version, metadata = self._write_session(connection)
            self._write_messages(connection)
        if commit.claim is not None:
            operations.mark(
                self.key,
                commit.claim.message_id,
                commit.claim.digest,
                self.response_json,
                self.at.now,
                self.at.expired_before,
                self.purged,
                connection,
            )
        return Committed(version, metadata, ended[1], answered)

    def _end_turn(self, connection: Connection) -> tuple[tuple[int, int | None] | None, bool]:
        """The row's id and who is next, if the fence holds; and whether the row stays, since it was accepted."""
        commit = self.commit
        fence = {"turn_id": commit.turn_id, "holder": self.at.holder, "attempt": commit.attempt}
        ended = connection.execute(END_TURN, fence).fetchone()
        if ended is not None or commit.claim is None:
            return ended, False
        answer = {**fence, "hands_on": commit.hands_on, "now": self.at.now}
        answered = connection.execute(ANSWER_ROW, answer).fetchone()
        if answered is None:
            return None, False
        connection.execute(DROP_JOURNAL, {"turn_id": commit.turn_id})
        return answered, True

    def _write_session(self, connection: Connection) -> tuple[int, FrozenDict]:
        commit, base = self.commit, self.commit.snapshot
        changed = bool(commit.metadata_set or commit.metadata_removed)
        version = self._update(connection, base.version, base.metadata if changed else None)
        if version is not None:
            return version, base.metadata
        # Somebody has merged metadata since the turn began, without a turn: ours joins it, key by key.
        seen, text = connection.execute(statements.READ_METADATA, {"session_key": base.session_key}).fetchone()
        row = f"chatflow_sessions, session_key {base.session_key}, metadata_json"
        theirs = reading.values(self.key.session_id, row, text)
        kept = {name: value for name, value in theirs.items() if name not in commit.metadata_removed}
        merged = FrozenDict({**kept, **commit.metadata_set})
        version = self._update(connection, seen, merged)
        assert version is not None
        return version, merged

    def _update(self, connection: Connection, seen: int, metadata: FrozenDict | None) -> int | None:
        return operations.update(
            connection,
            self.commit.snapshot,
            seen,
            self.at.now,
            metadata=metadata,
            agent_name=self.commit.agent_name,
            state_json=self.state_json,
            spent_json=self.spent_json,
            changes_service=self.commit.changes_service,
        )

    def _write_messages(self, connection: Connection) -> None:
        commit, session_key = self.commit, self.commit.snapshot.session_key
        if commit.replace:
            connection.execute(statements.DELETE_ALL_MESSAGES, {"session_key": session_key})
        elif commit.drop_before is not None:
            connection.execute(
                statements.DELETE_MESSAGES_BEFORE, {"session_key": session_key, "place": commit.drop_before}
            )
        if commit.systems:
            place = system_place(commit.system_start)
            connection.execute(
                statements.INSERT_MESSAGES, {"session_key": session_key, "place": place, "texts": self.system_texts}
            )
        if commit.bodies:
            connection.execute(
                statements.INSERT_MESSAGES,
                {"session_key": session_key, "place": commit.body_start, "texts": self.body_texts},
            )
