"""A turn's commit: the fence, what the turn changed, and the answer to its message, in one flight."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import attrs

from chatflow.core import reading
from chatflow.core.codec import message_to_json, response_to_json, values_to_json
from chatflow.core.messages import Message
from chatflow.core.records import Commit, Committed, Key, Lost, system_place
from chatflow.core.rows import State
from chatflow.core.values import FrozenDict
from chatflow.core.writing import expiry, service_to_json
from chatflow.postgres import operations, statements
from chatflow.postgres.connection import Step, Transaction
from chatflow.postgres.database import Database
from chatflow.postgres.operations import named
from chatflow.postgres.turn_statements import READ_ROW
from chatflow.postgres.turns import At


def texts_of(messages: Iterable[Message]) -> str:
    """*messages* as one list, for one statement to write: each comes out of it as it went in."""
    return f"[{','.join(message_to_json(message) for message in messages)}]"


@attrs.frozen(kw_only=True)
class WriteCommit:
    """A turn's commit, ready to be written."""

    commit: Commit
    key: Key
    at: At
    values: dict[str, Any]
    """The parameters that stay the same, however often it is tried."""

    @classmethod
    def of(cls, commit: Commit, key: Key, at: At) -> WriteCommit:
        """Encode it: an error here has changed nothing."""
        base, claim = commit.snapshot, commit.claim
        values = {
            **named(key),
            "turn_id": commit.turn_id,
            "attempt": commit.attempt,
            "holder": at.holder,
            "hands_on": commit.hands_on,
            "answers": claim is not None,
            "session_key": base.session_key,
            "changes_session": commit.changes_session,
            "active_agent_name": commit.agent_name,
            "state_json": None if commit.state is None else values_to_json(commit.state),
            "spent_json": None if commit.spent is None else values_to_json(commit.spent),
            "changes_service": commit.changes_service,
            "service_json": service_to_json(base.service),
            "service_key": None if base.service is None else base.service.key,
            "expires_at": expiry(at.now, base.expires_after),
            "drop_from": -(2**63) if commit.replace else 0,
            "drop_before": 2**63 - 1 if commit.replace else commit.drop_before or 0,
            "system_place": system_place(commit.system_start),
            "system_texts": texts_of(commit.systems),
            "place": commit.body_start,
            "body_texts": texts_of(commit.bodies),
            "message_id": None if claim is None else claim.message_id,
            "digest": None if claim is None else claim.digest,
            "response_json": None if commit.response is None else response_to_json(commit.response),
            "now": at.now,
            "expired_before": at.expired_before,
        }
        return cls(commit=commit, key=key, at=at, values=values)

    async def write(self, database: Database) -> Committed | Lost:
        """Delete the turn's row, which is the fence, and write what it changed."""
        seen, metadata = self.commit.snapshot.version, self.commit.snapshot.metadata
        while True:
            changing = {"seen": seen, "metadata_json": self._metadata_json(metadata)}
            flight = await database.fly_once(
                Step(statements.LOCK_SESSION, self.values), Step(statements.COMMIT_TURN, {**self.values, **changing})
            )
            if flight is None:
                # It holds, and what it answered was lost with the connection. Under the old version its session will
                # look again.
                return Committed(self.commit.snapshot.version, metadata, None, await self._is_answered(database))
            if flight[1]:
                version, answered, next_turn = flight[1][0]
                return Committed(seen if version is None else version, metadata, next_turn, answered)
            found = await database.read(self._merged)
            if isinstance(found, Lost):
                return found
            seen, metadata = found

    def _metadata_json(self, metadata: FrozenDict) -> str | None:
        changed = self.commit.metadata_set or self.commit.metadata_removed
        return values_to_json(metadata) if changed else None

    async def _merged(self, transaction: Transaction) -> tuple[int, FrozenDict] | Lost:
        """What others have merged since the turn began, without a turn, with ours on top, key by key."""
        commit, base = self.commit, self.commit.snapshot
        turns, sessions = await transaction.ask_all(
            Step(READ_ROW, self.values), Step(statements.READ_METADATA, self.values)
        )
        is_ours = bool(turns) and (turns[0][2:5]) == (State.RUNNING, self.at.holder, commit.attempt)
        if not is_ours or not commit.changes_session:
            return await operations.lost(self.key, base, transaction)
        ((seen, text),) = sessions
        row = f"chatflow_sessions, session_key {base.session_key}, metadata_json"
        theirs = reading.values(self.key.session_id, row, text)
        kept = {name: value for name, value in theirs.items() if name not in commit.metadata_removed}
        return seen, FrozenDict({**kept, **commit.metadata_set})

    async def _is_answered(self, database: Database) -> bool:
        found = await database.ask(READ_ROW, **self.values)
        return bool(found) and found[0][2] == State.ANSWERED
