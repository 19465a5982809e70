"""Every statement of a copy, named and whole: what is held is read, and what is given is written in many rows at once.

A row of what is held comes after the key of what it belongs to. What stays in a slice is named by *keys*.
"""

from __future__ import annotations

from typing import Final, LiteralString

LOCK_NOTE: Final[LiteralString] = "SELECT 1 FROM chatflow_meta WHERE key = 'format' FOR UPDATE"
"""One copy at a time begins: there may be no note yet to be locked."""

LOOK: Final[LiteralString] = """
    SELECT
        (SELECT value FROM chatflow_meta WHERE key = 'copy'),
        EXISTS (
            SELECT 1 FROM chatflow_sessions
            UNION ALL
            SELECT 1 FROM chatflow_processed_messages
            UNION ALL
            SELECT 1 FROM chatflow_set_aside
        ),
        (SELECT CASE WHEN is_called THEN last_value ELSE 0 END FROM chatflow_versions),
        (SELECT CASE WHEN is_called THEN last_value ELSE 0 END FROM chatflow_turn_ids)
"""
"""What is known of a copy, whether anything is there, and the last version and turn that were given out."""

NOTE_COPY: Final[LiteralString] = """
    INSERT INTO chatflow_meta (key, value) VALUES ('copy', %(note)s)
    ON CONFLICT (key) DO UPDATE SET value = excluded.value
"""
"""What is here is a copy, of what, by whom, and up to which numbers."""

READ_NOTE: Final[LiteralString] = """
    SELECT
        value,
        (SELECT CASE WHEN is_called THEN last_value ELSE 0 END FROM chatflow_versions),
        (SELECT CASE WHEN is_called THEN last_value ELSE 0 END FROM chatflow_turn_ids)
    FROM chatflow_meta WHERE key = 'copy'
"""
"""The note, and the last version and turn that were given out."""

READ_NOTE_ALONE: Final[LiteralString] = "SELECT value FROM chatflow_meta WHERE key = 'copy'"
"""The note, for a store that is to use what is here: its user need not be able to read the sequences."""

HOLD_NOTE: Final[LiteralString] = """
    SELECT
        value,
        (SELECT CASE WHEN is_called THEN last_value ELSE 0 END FROM chatflow_versions),
        (SELECT CASE WHEN is_called THEN last_value ELSE 0 END FROM chatflow_turn_ids)
    FROM chatflow_meta WHERE key = 'copy' FOR SHARE
"""
"""The same, and nobody changes the note before the transaction has ended."""

RAISE_NUMBERS: Final[LiteralString] = """
    SELECT
        setval('chatflow_versions', greatest(%(version)s, 1), %(version)s > 0),
        setval('chatflow_turn_ids', greatest(%(turn_id)s, 1), %(turn_id)s > 0),
        setval(pg_get_serial_sequence('chatflow_sessions', 'session_key'), greatest(%(session_key)s, 1), true),
        setval(pg_get_serial_sequence('chatflow_set_aside', 'set_aside_id'), greatest(%(set_aside_id)s, 1), true)
"""
"""Numbers that were given out in the other store are not given out again."""

# --- conversations ---

HELD_SESSIONS: Final[LiteralString] = """
    SELECT
        session_key, session_key, owner, session_id, active_agent_name, metadata_json, state_json, max_turns,
        service_json, service_key, spent_json, expires_after, expires_at, version, created_at, updated_at
    FROM chatflow_sessions WHERE session_key = ANY(%(keys)s::bigint[]) ORDER BY session_key
"""
"""Some conversations' own rows, each after its key."""

HELD_MESSAGES: Final[LiteralString] = """
    SELECT session_key, session_key, place, message_json FROM chatflow_messages
    WHERE session_key = ANY(%(keys)s::bigint[]) ORDER BY session_key, place
"""
"""Their messages."""

HELD_TURNS: Final[LiteralString] = """
    SELECT
        session_key, turn_id, session_key, state, attempt, attempts, lease_seconds, accepted, agent_name, message_id,
        digest, work_json, queued_at, ended_at
    FROM chatflow_turns WHERE session_key = ANY(%(keys)s::bigint[]) ORDER BY session_key, turn_id
"""
"""Their turns."""

HELD_JOURNALS: Final[LiteralString] = """
    SELECT turn.session_key, turn_id, noted.step, noted.entry_json
    FROM chatflow_journal AS noted JOIN chatflow_turns AS turn USING (turn_id)
    WHERE turn.session_key = ANY(%(keys)s::bigint[]) ORDER BY turn.session_key, turn_id, noted.step
"""
"""Their turns' journals."""

OTHER_SESSIONS: Final[LiteralString] = """
    SELECT owner, session_id FROM chatflow_sessions
    WHERE session_key > %(after)s AND session_key <= %(last)s AND NOT session_key = ANY(%(keys)s::bigint[])
    ORDER BY session_key LIMIT %(limit)s
"""
"""Conversations in between that the other store has not got."""

DELETE_SESSIONS: Final[LiteralString] = """
    DELETE FROM chatflow_sessions
    WHERE session_key > %(after)s AND session_key <= %(last)s AND NOT session_key = ANY(%(keys)s::bigint[])
        OR version = ANY(%(versions)s::bigint[])
"""
"""All of a slice but what stays, with all that is theirs; and who still has a version that another has by now."""

INSERT_SESSIONS: Final[LiteralString] = """
    INSERT INTO chatflow_sessions (
        session_key, owner, session_id, active_agent_name, metadata_json, state_json, max_turns, service_json,
        service_key, spent_json, expires_after, expires_at, version, created_at, updated_at
    )
    OVERRIDING SYSTEM VALUE
    SELECT
        session_key, owner, session_id, active_agent_name, metadata::json, state::json, max_turns, service::json,
        service_key, spent::json, expires_after, expires_at, version, created_at, updated_at
    FROM unnest(
        %(session_key)s::bigint[], %(owner)s::text[], %(session_id)s::text[], %(active_agent_name)s::text[],
        %(metadata_json)s::text[], %(state_json)s::text[], %(max_turns)s::bigint[], %(service_json)s::text[],
        %(service_key)s::text[], %(spent_json)s::text[], %(expires_after)s::double precision[],
        %(expires_at)s::timestamptz[], %(version)s::bigint[], %(created_at)s::timestamptz[],
        %(updated_at)s::timestamptz[]
    ) AS given (
        session_key, owner, session_id, active_agent_name, metadata, state, max_turns, service, service_key, spent,
        expires_after, expires_at, version, created_at, updated_at
    )
"""
"""Conversations, under the keys that they had."""

INSERT_MESSAGES: Final[LiteralString] = """
    INSERT INTO chatflow_messages (session_key, place, message_json)
    SELECT session_key, place, message::json
    FROM unnest(%(session_key)s::bigint[], %(place)s::bigint[], %(message_json)s::text[])
        AS given (session_key, place, message)
"""
"""Their messages."""

INSERT_TURNS: Final[LiteralString] = """
    INSERT INTO chatflow_turns (
        turn_id, session_key, state, attempt, attempts, lease_seconds, accepted, agent_name, message_id, digest,
        work_json, queued_at, ended_at
    )
    SELECT
        turn_id, session_key, state, attempt, attempts, lease_seconds, accepted, agent_name, message_id, digest,
        work::json, queued_at, ended_at
    FROM unnest(
        %(turn_id)s::bigint[], %(session_key)s::bigint[], %(state)s::text[], %(attempt)s::bigint[],
        %(attempts)s::bigint[], %(lease_seconds)s::double precision[], %(accepted)s::boolean[], %(agent_name)s::text[],
        %(message_id)s::text[], %(digest)s::text[], %(work_json)s::text[], %(queued_at)s::timestamptz[],
        %(ended_at)s::timestamptz[]
    ) AS given (
        turn_id, session_key, state, attempt, attempts, lease_seconds, accepted, agent_name, message_id, digest, work,
        queued_at, ended_at
    )
"""
"""Their turns, in the hands of nobody, under the ids that they had."""

INSERT_JOURNALS: Final[LiteralString] = """
    INSERT INTO chatflow_journal (turn_id, step, entry_json)
    SELECT turn_id, step, entry::json
    FROM unnest(%(turn_id)s::bigint[], %(step)s::bigint[], %(entry_json)s::text[]) AS given (turn_id, step, entry)
"""
"""Their turns' journals."""

# --- message ids ---

HELD_IDS: Final[LiteralString] = """
    SELECT
        owner, session_id, message_id, processed_at, digest, response_json
    FROM chatflow_processed_messages
    WHERE (owner, session_id, message_id) IN (
        SELECT * FROM unnest(%(owners)s::text[], %(session_ids)s::text[], %(message_ids)s::text[])
    )
"""
"""What is kept of some message ids."""

OTHER_IDS: Final[LiteralString] = """
    SELECT owner, session_id FROM chatflow_processed_messages
    WHERE (owner, session_id, message_id) > (%(after_owner)s, %(after_session_id)s, %(after_message_id)s)
        AND (owner, session_id, message_id) <= (%(last_owner)s, %(last_session_id)s, %(last_message_id)s)
        AND (owner, session_id, message_id) NOT IN (
            SELECT * FROM unnest(%(owners)s::text[], %(session_ids)s::text[], %(message_ids)s::text[])
        )
    ORDER BY owner, session_id, message_id LIMIT %(limit)s
"""
"""Message ids in between that the other store has not got."""

OTHER_IDS_TO_THE_END: Final[LiteralString] = """
    SELECT owner, session_id FROM chatflow_processed_messages
    WHERE (owner, session_id, message_id) > (%(after_owner)s, %(after_session_id)s, %(after_message_id)s)
        AND (owner, session_id, message_id) NOT IN (
            SELECT * FROM unnest(%(owners)s::text[], %(session_ids)s::text[], %(message_ids)s::text[])
        )
    ORDER BY owner, session_id, message_id LIMIT %(limit)s
"""
"""The same of the last slice: no text is above all others."""

DELETE_IDS: Final[LiteralString] = """
    DELETE FROM chatflow_processed_messages
    WHERE (owner, session_id, message_id) > (%(after_owner)s, %(after_session_id)s, %(after_message_id)s)
        AND (owner, session_id, message_id) <= (%(last_owner)s, %(last_session_id)s, %(last_message_id)s)
        AND (owner, session_id, message_id) NOT IN (
            SELECT * FROM unnest(%(owners)s::text[], %(session_ids)s::text[], %(message_ids)s::text[])
        )
"""
"""All of a slice but what stays."""

DELETE_IDS_TO_THE_END: Final[LiteralString] = """
    DELETE FROM chatflow_processed_messages
    WHERE (owner, session_id, message_id) > (%(after_owner)s, %(after_session_id)s, %(after_message_id)s)
        AND (owner, session_id, message_id) NOT IN (
            SELECT * FROM unnest(%(owners)s::text[], %(session_ids)s::text[], %(message_ids)s::text[])
        )
"""
"""The same of the last slice."""

INSERT_IDS: Final[LiteralString] = """
    INSERT INTO chatflow_processed_messages (owner, session_id, message_id, processed_at, digest, response_json)
    SELECT owner, session_id, message_id, processed_at, digest, response::json
    FROM unnest(
        %(owner)s::text[], %(session_id)s::text[], %(message_id)s::text[], %(processed_at)s::timestamptz[],
        %(digest)s::text[], %(response_json)s::text[]
    ) AS given (owner, session_id, message_id, processed_at, digest, response)
"""
"""What is kept of message ids, as old as it is."""

# --- what was set aside ---

HELD_SET_ASIDE: Final[LiteralString] = """
    SELECT set_aside_id, set_aside_id, owner, session_id, source, content, reason, set_aside_at
    FROM chatflow_set_aside WHERE set_aside_id = ANY(%(keys)s::bigint[])
"""
"""Some of what was set aside, each after its key."""

OTHER_SET_ASIDE: Final[LiteralString] = """
    SELECT owner, coalesce(session_id, '') FROM chatflow_set_aside
    WHERE set_aside_id > %(after)s AND set_aside_id <= %(last)s AND NOT set_aside_id = ANY(%(keys)s::bigint[])
    ORDER BY set_aside_id LIMIT %(limit)s
"""
"""What is in between that the other store has not got."""

DELETE_SET_ASIDE: Final[LiteralString] = """
    DELETE FROM chatflow_set_aside
    WHERE set_aside_id > %(after)s AND set_aside_id <= %(last)s AND NOT set_aside_id = ANY(%(keys)s::bigint[])
"""
"""All of a slice but what stays."""

INSERT_SET_ASIDE: Final[LiteralString] = """
    INSERT INTO chatflow_set_aside (set_aside_id, owner, session_id, source, content, reason, set_aside_at)
    OVERRIDING SYSTEM VALUE
    SELECT * FROM unnest(
        %(set_aside_id)s::bigint[], %(owner)s::text[], %(session_id)s::text[], %(source)s::text[], %(content)s::text[],
        %(reason)s::text[], %(set_aside_at)s::timestamptz[]
    )
"""
"""What was set aside, under its numbers."""
