"""Ids, owners and names that an index has no room for, refused before a turn begins.

How much an index takes hangs on how well it compresses, which only the server can tell. It would tell at the commit.
"""

from __future__ import annotations

import secrets
from typing import Final, LiteralString

from chatflow.core.records import Key, Ticket
from chatflow.exceptions import StoreError, UnstorableValueError, shorten
from chatflow.postgres.connection import Step, stored_size
from chatflow.postgres.database import Database
from chatflow.postgres.failures import is_too_long
from chatflow.postgres.operations import named

ROOM: Final = 2500
"""Bytes that any index takes, compressed or not.

An entry has at most a third of a page, which is 2,704, with its header
(https://www.postgresql.org/docs/current/btree.html).
"""

TRY: Final[LiteralString] = """
    INSERT INTO chatflow_processed_messages (owner, session_id, message_id, processed_at)
    VALUES (%(owner)s, %(session_id)s, %(message_id)s, now())
"""
"""The index of this table has the longest entries: owner, session id and message id."""

TAKE_BACK: Final[LiteralString] = """
    DELETE FROM chatflow_processed_messages
    WHERE owner = %(owner)s AND session_id = %(session_id)s AND message_id = %(message_id)s
"""


async def refuse_long(database: Database, key: Key, message_id: str = "") -> None:
    """Refuse what the server's indexes have no room for.

    Raises:
        UnstorableValueError: Its path is that of the longest, *owner*, *session_id* or *message_id*.
    """
    sizes = {
        "session_id": stored_size(key.session_id),
        "message_id": stored_size(message_id),
        "owner": stored_size(key.owner),
    }
    if not await _has_room(database, key, message_id, sum(sizes.values())):
        path = max(sizes, key=sizes.__getitem__)
        beside = "" if path == "session_id" else f" for session {shorten(key.session_id)}"
        reason = f"its {sizes[path]} bytes{beside} are more than an index of PostgreSQL has room for"
        raise UnstorableValueError(path=path, reason=f"{reason}; up to {ROOM}, with owner and ids, always have room")


async def refuse_long_ticket(database: Database, ticket: Ticket) -> None:
    """The same for a turn, whose agent's name stands in an index, too."""
    await refuse_long(database, ticket.key, "" if ticket.claim is None else ticket.claim.message_id)
    name = ticket.agent_name or ""
    size = stored_size(name)
    if not await _has_room(database, Key("", ""), name, size):
        reason = f"its {size} bytes, for session {shorten(ticket.key.session_id)}, are more than an index of PostgreSQL"
        raise UnstorableValueError(path="agent.name", reason=f"{reason} has room for; up to {ROOM} always have room")


async def _has_room(database: Database, key: Key, message_id: str, size: int) -> bool:
    if size <= ROOM:
        return True
    # An id that nobody else has: what is tried is in nobody's way, and is gone again with its transaction. It leaves
    # room for the name that hides an owner who is erased.
    tried = {**named(key), "message_id": f"{message_id}{secrets.token_hex()}"}
    try:
        await database.fly(Step(TRY, tried), Step(TAKE_BACK, tried))
    except StoreError as error:
        if not is_too_long(error.__cause__):
            raise
        return False
    return True
