"""Every statement on conversations and message ids, named and whole. `connection` puts the schema before the tables."""

from __future__ import annotations

from typing import Final, LiteralString

# --- conversations ---

LOCK_SESSION: Final[LiteralString] = """
    SELECT session_key FROM chatflow_sessions WHERE owner = %(owner)s AND session_id = %(session_id)s
    FOR NO KEY UPDATE
"""
"""Whoever changes a conversation, or its line, holds its row: what the statements after this one read stays so."""

LOAD_SESSION: Final[LiteralString] = """
    SELECT
        session_key, version, active_agent_name, metadata_json, state_json, max_turns, service_json, expires_after,
        spent_json, created_at, updated_at,
        (SELECT min(place) FROM chatflow_messages AS system WHERE system.session_key = session.session_key),
        (SELECT min(place) FROM chatflow_messages AS body WHERE body.session_key = session.session_key AND place >= 0)
    FROM chatflow_sessions AS session WHERE owner = %(owner)s AND session_id = %(session_id)s
"""
"""A conversation without its messages, and where its system messages begin (or, without any, the others), and the
others."""

LOAD_MESSAGES: Final[LiteralString] = """
    WITH asked AS (
        SELECT
            session_key,
            CASE WHEN session_key = %(known_key)s AND %(known_system)s <= (
                SELECT min(place) FROM chatflow_messages AS system WHERE system.session_key = session.session_key
            ) THEN %(system_place)s ELSE -9223372036854775808 END AS system_from,
            CASE WHEN session_key = %(known_key)s AND %(known_place)s <= (
                SELECT min(place) FROM chatflow_messages AS body
                WHERE body.session_key = session.session_key AND place >= 0
            ) THEN %(place)s ELSE 0 END AS body_from
        FROM chatflow_sessions AS session WHERE owner = %(owner)s AND session_id = %(session_id)s
    )
    SELECT place, message_json FROM asked JOIN chatflow_messages USING (session_key)
    WHERE place >= system_from AND place < 0
    UNION ALL
    SELECT place, message_json FROM asked JOIN chatflow_messages USING (session_key)
    WHERE place >= body_from AND place >= 0
    ORDER BY place
"""
"""A conversation's messages, system messages first: their places are below all others. Of the incarnation that is known
only those that came after it, unless they stand before what is known: where there was no message, nothing told where
the first one would stand."""

CREATE_SESSION: Final[LiteralString] = """
    INSERT INTO chatflow_sessions (
        owner, session_id, active_agent_name, metadata_json, max_turns, service_json, service_key, expires_after,
        expires_at, version, created_at, updated_at
    )
    VALUES (
        %(owner)s, %(session_id)s, %(active_agent_name)s, %(metadata_json)s, %(max_turns)s, %(service_json)s,
        %(service_key)s, %(expires_after)s, %(expires_at)s, nextval('chatflow_versions'), %(now)s, %(now)s
    )
    ON CONFLICT (owner, session_id) DO NOTHING
    RETURNING session_key
"""
"""A new conversation; nothing if somebody was faster."""

MERGE_METADATA: Final[LiteralString] = """
    UPDATE chatflow_sessions SET
        metadata_json = %(metadata_json)s, expires_at = %(expires_at)s, version = nextval('chatflow_versions'),
        updated_at = %(now)s
    WHERE session_key = %(session_key)s
    RETURNING version
"""
"""Metadata outside a turn. The row is locked: nobody else has changed it since it was read."""

READ_METADATA: Final[LiteralString] = """
    SELECT version, metadata_json FROM chatflow_sessions WHERE session_key = %(session_key)s
"""
"""What a commit merges its metadata into: others may have merged theirs since the turn began."""

FORGET_RESPONSES: Final[LiteralString] = """
    UPDATE chatflow_processed_messages SET response_json = NULL
    WHERE response_json IS NOT NULL AND (owner, session_id) IN (
        SELECT owner, session_id FROM chatflow_sessions WHERE session_key = ANY(%(session_keys)s)
    )
"""
"""Before conversations are deleted: their stored answers go, the ids stay known."""

FORGET_SET_ASIDE: Final[LiteralString] = """
    DELETE FROM chatflow_set_aside WHERE (owner, session_id) IN (
        SELECT owner, session_id FROM chatflow_sessions WHERE session_key = ANY(%(session_keys)s)
    )
"""
"""What was set aside of conversations that are about to be deleted."""

FORGET_SET_ASIDE_OF: Final[LiteralString] = """
    DELETE FROM chatflow_set_aside WHERE owner = %(owner)s AND session_id = %(session_id)s
"""
"""What was set aside of a conversation that may be gone."""

FORGET_SET_ASIDE_OF_OWNER: Final[LiteralString] = "DELETE FROM chatflow_set_aside WHERE owner = %(owner)s"
"""What was set aside of an owner's conversations."""

DELETE_SESSIONS: Final[LiteralString] = """
    DELETE FROM chatflow_sessions WHERE session_key = ANY(%(session_keys)s) RETURNING nextval('chatflow_versions')
"""
"""Conversations; their messages and turns go with them. A version is drawn, as by all that another copy would undo."""

SESSIONS_AFTER: Final[LiteralString] = """
    SELECT session_key FROM chatflow_sessions
    WHERE owner = %(owner)s AND session_key > %(after)s ORDER BY session_key LIMIT %(limit)s
    FOR UPDATE
"""
"""A slice of an owner's conversations, to be deleted."""

PAGE_OF_SESSIONS: Final[LiteralString] = """
    SELECT version, owner, session_id, active_agent_name, metadata_json, created_at, updated_at
    FROM chatflow_sessions WHERE owner = %(owner)s AND version < %(before)s ORDER BY version DESC LIMIT %(limit)s
"""
"""An owner's conversations, newest commit first."""

PAGE_OF_ALL_SESSIONS: Final[LiteralString] = """
    SELECT version, owner, session_id, active_agent_name, metadata_json, created_at, updated_at
    FROM chatflow_sessions
    WHERE version < %(before)s AND NOT (owner >= %(hidden)s AND owner < %(shown)s)
    ORDER BY version DESC LIMIT %(limit)s
"""
"""All owners' conversations, but for what is being erased."""

SESSIONS_AT_SERVICE: Final[LiteralString] = """
    SELECT session_id, service_json FROM chatflow_sessions
    WHERE owner = %(owner)s AND service_key = %(service_key)s ORDER BY version DESC
"""
"""An owner's conversations that hold a service's id, newest commit first."""

PAGE_OF_MESSAGES: Final[LiteralString] = """
    SELECT session.session_key, message.place, message.message_json
    FROM chatflow_sessions AS session LEFT JOIN LATERAL (
        SELECT place, message_json FROM chatflow_messages
        WHERE chatflow_messages.session_key = session.session_key AND place < %(before)s
        ORDER BY place DESC LIMIT %(limit)s
    ) AS message ON true
    WHERE session.owner = %(owner)s AND session.session_id = %(session_id)s
    ORDER BY message.place DESC
"""
"""The last messages before a place; one row without a message where the conversation has none."""

# --- a turn's commit ---

COMMIT_TURN: Final[LiteralString] = """
    WITH base AS MATERIALIZED (
        SELECT session_key, version FROM chatflow_sessions
        WHERE session_key = %(session_key)s AND (NOT %(changes_session)s OR version = %(seen)s)
    ), ended AS (
        DELETE FROM chatflow_turns USING base
        WHERE turn_id = %(turn_id)s AND state = 'running' AND holder = %(holder)s AND attempt = %(attempt)s
            AND chatflow_turns.session_key = base.session_key AND NOT (accepted AND %(answers)s)
        RETURNING turn_id, chatflow_turns.session_key
    ), answered AS (
        UPDATE chatflow_turns SET
            state = 'answered', holder = CASE WHEN %(hands_on)s THEN holder END, ended_at = %(now)s
        FROM base
        WHERE turn_id = %(turn_id)s AND state = 'running' AND holder = %(holder)s AND attempt = %(attempt)s
            AND chatflow_turns.session_key = base.session_key AND accepted AND %(answers)s
        RETURNING turn_id, chatflow_turns.session_key
    ), fence AS (
        SELECT turn_id, session_key FROM ended UNION ALL SELECT turn_id, session_key FROM answered
    ), forgotten AS (
        DELETE FROM chatflow_journal USING answered WHERE chatflow_journal.turn_id = answered.turn_id
    ), changed AS (
        UPDATE chatflow_sessions SET
            active_agent_name = coalesce(%(active_agent_name)s, active_agent_name),
            metadata_json = coalesce(%(metadata_json)s, metadata_json),
            state_json = coalesce(%(state_json)s, state_json),
            spent_json = coalesce(%(spent_json)s, spent_json),
            service_json = CASE WHEN %(changes_service)s THEN %(service_json)s ELSE service_json END,
            service_key = CASE WHEN %(changes_service)s THEN %(service_key)s ELSE service_key END,
            expires_at = %(expires_at)s,
            version = nextval('chatflow_versions'),
            updated_at = %(now)s
        FROM fence WHERE chatflow_sessions.session_key = fence.session_key AND %(changes_session)s
        RETURNING version
    ), dropped AS (
        DELETE FROM chatflow_messages USING fence
        WHERE chatflow_messages.session_key = fence.session_key
            AND place >= %(drop_from)s AND place < %(drop_before)s
    ), added AS (
        INSERT INTO chatflow_messages (session_key, place, message_json)
        SELECT fence.session_key, %(system_place)s + number - 1, message
        FROM fence, json_array_elements(%(system_texts)s::json) WITH ORDINALITY AS systems (message, number)
        UNION ALL
        SELECT fence.session_key, %(place)s + number - 1, message
        FROM fence, json_array_elements(%(body_texts)s::json) WITH ORDINALITY AS bodies (message, number)
    ), remembered AS (
        INSERT INTO chatflow_processed_messages AS known
            (owner, session_id, message_id, processed_at, digest, response_json)
        SELECT %(owner)s, %(session_id)s, %(message_id)s, %(now)s, %(digest)s, %(response_json)s
        FROM fence WHERE %(answers)s
        ON CONFLICT (owner, session_id, message_id) DO UPDATE SET
            processed_at = excluded.processed_at, digest = excluded.digest, response_json = excluded.response_json
        WHERE known.processed_at < %(expired_before)s
            OR (known.response_json IS NULL AND excluded.response_json IS NOT NULL)
    ), marked AS (
        INSERT INTO chatflow_marks AS mark (mark_id, number) SELECT %(mark_id)s, %(mark)s FROM fence
        ON CONFLICT (mark_id) DO UPDATE SET
            number = CASE WHEN mark.number < excluded.number THEN excluded.number END, marked_at = now()
    )
    SELECT
        (SELECT version FROM changed),
        EXISTS (SELECT 1 FROM answered),
        (
            SELECT min(next.turn_id) FROM chatflow_turns AS next
            WHERE next.session_key = fence.session_key AND next.state = 'queued' AND next.holder = %(holder)s
        )
    FROM fence
"""
"""All that a turn's commit is, after the conversation is locked. The fence is the turn's own row: where it is not there
any more, or the version is another one than what the turn was merged into, nothing happens. A waiting row of ours comes
back, to look whether its place has come."""

# --- message ids ---

READ_PROCESSED: Final[LiteralString] = """
    SELECT digest, response_json FROM chatflow_processed_messages
    WHERE owner = %(owner)s AND session_id = %(session_id)s AND message_id = %(message_id)s
        AND processed_at >= %(expired_before)s
"""
"""A message id that is remembered."""

MARK_PROCESSED: Final[LiteralString] = """
    INSERT INTO chatflow_processed_messages AS known (owner, session_id, message_id, processed_at)
    VALUES (%(owner)s, %(session_id)s, %(message_id)s, %(now)s)
    ON CONFLICT (owner, session_id, message_id) DO UPDATE SET
        processed_at = excluded.processed_at, digest = NULL, response_json = NULL
    WHERE known.processed_at < %(expired_before)s
    RETURNING nextval('chatflow_versions')
"""
"""Claims an id by hand: of all who try, one gets a row back. An expired one is as good as none."""

PURGE_PROCESSED: Final[LiteralString] = """
    WITH old AS (
        SELECT owner, session_id, message_id FROM chatflow_processed_messages
        WHERE processed_at < %(expired_before)s ORDER BY processed_at LIMIT %(limit)s FOR UPDATE SKIP LOCKED
    ), gone AS (
        DELETE FROM chatflow_processed_messages AS known USING old
        WHERE known.owner = old.owner AND known.session_id = old.session_id AND known.message_id = old.message_id
        RETURNING 1
    )
    SELECT count(*) FROM gone
"""
"""A slice of the expired ids, oldest first."""

# --- what a transaction leaves behind ---

MARK: Final[LiteralString] = """
    INSERT INTO chatflow_marks AS mark (mark_id, number) VALUES (%(mark_id)s, %(mark)s)
    ON CONFLICT (mark_id) DO UPDATE SET
        number = CASE WHEN mark.number < excluded.number THEN excluded.number END, marked_at = now()
"""
"""Says that the connection's transaction of that number holds. Where the mark was closed meanwhile there is no number,
which the column refuses, and the transaction with it."""

CLOSE_MARK: Final[tuple[LiteralString, ...]] = (
    "INSERT INTO chatflow_marks (mark_id, number) VALUES (%(mark_id)s, 0) ON CONFLICT DO NOTHING",
    "SELECT mod(number, 4611686018427387904) FROM chatflow_marks WHERE mark_id = %(mark_id)s FOR UPDATE",
    """
    UPDATE chatflow_marks SET number = number + 4611686018427387904
    WHERE mark_id = %(mark_id)s AND number < 4611686018427387904
    """,
)
"""Which transaction of a connection was its last one. From then on none of it can commit any more: one that the server
has not got to yet either has left its number by now, or fails. Its number stays in it, for whoever has to ask again."""

DELETE_MARKS: Final[LiteralString] = "DELETE FROM chatflow_marks WHERE mark_id = ANY(%(mark_ids)s)"
"""The marks of connections that are closed, with all their transactions ended."""

PURGE_MARKS: Final[LiteralString] = """
    DELETE FROM chatflow_marks WHERE mark_id IN (
        SELECT mark_id FROM chatflow_marks WHERE marked_at < now() - interval '8 days' LIMIT 100 FOR UPDATE SKIP LOCKED
    )
"""
"""The marks of connections that nobody has used for longer than any transaction takes."""
