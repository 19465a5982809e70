"""Every statement on conversations, turns and message ids, named and whole."""

from __future__ import annotations

from typing import Final, LiteralString

# --- conversations ---

LOAD_SESSION: Final[LiteralString] = """
    SELECT session_key, version, active_agent_name, metadata_json, state_json, max_turns
    FROM chatflow_sessions WHERE owner = :owner AND session_id = :session_id
"""
"""A conversation without its messages."""

FIRST_PLACES: Final[LiteralString] = """
    SELECT
        (SELECT min(place) FROM chatflow_messages WHERE session_key = :session_key AND place < 0),
        (SELECT min(place) FROM chatflow_messages WHERE session_key = :session_key AND place >= 0)
"""
"""Where a conversation's system messages begin, and the others."""

LOAD_MESSAGES: Final[LiteralString] = """
    SELECT place, message_json FROM chatflow_messages
    WHERE session_key = :session_key AND place >= :system_place AND place < 0
    UNION ALL
    SELECT place, message_json FROM chatflow_messages
    WHERE session_key = :session_key AND place >= :place
    ORDER BY place
"""
"""A conversation's messages from two places on, system messages first: their places are below all others."""

CREATE_SESSION: Final[LiteralString] = """
    INSERT INTO chatflow_sessions
        (owner, session_id, active_agent_name, metadata_json, max_turns, version, created_at, updated_at)
    VALUES (
        :owner, :session_id, :active_agent_name, :metadata_json, :max_turns,
        (SELECT coalesce(max(version), 0) + 1 FROM chatflow_sessions), :now, :now
    )
    ON CONFLICT (owner, session_id) DO NOTHING
"""
"""A new conversation; nothing if somebody was faster."""

UPDATE_SESSION: Final[LiteralString] = """
    UPDATE chatflow_sessions SET
        active_agent_name = coalesce(:active_agent_name, active_agent_name),
        metadata_json = coalesce(:metadata_json, metadata_json),
        state_json = coalesce(:state_json, state_json),
        version = (SELECT max(version) + 1 FROM chatflow_sessions),
        updated_at = :now
    WHERE session_key = :session_key AND version = :seen
    RETURNING version
"""
"""What changed of a conversation since the version seen; None leaves a column. The new version is above all."""

READ_METADATA: Final[LiteralString] = """
    SELECT version, metadata_json FROM chatflow_sessions WHERE session_key = :session_key
"""
"""What a commit merges its metadata into: others may have merged theirs since the turn began."""

INSERT_MESSAGES: Final[LiteralString] = """
    INSERT INTO chatflow_messages (session_key, place, message_json)
    SELECT :session_key, :place + key, value FROM json_each(:texts)
"""
"""Messages in a row. One statement for all: between two, the thread may have to wait for the interpreter's lock."""

DELETE_MESSAGES_BEFORE: Final[LiteralString] = """
    DELETE FROM chatflow_messages WHERE session_key = :session_key AND place >= 0 AND place < :place
"""
"""The turns that left the window. System messages stand below 0 and stay."""

DELETE_ALL_MESSAGES: Final[LiteralString] = """
    DELETE FROM chatflow_messages WHERE session_key = :session_key
"""
"""All messages, before those that remain are written again."""

DELETE_SESSION: Final[LiteralString] = """
    DELETE FROM chatflow_sessions WHERE session_key = :session_key
"""
"""A conversation; its messages and turns go with it."""

SESSIONS_AFTER: Final[LiteralString] = """
    SELECT version, session_key, session_id FROM chatflow_sessions
    WHERE owner = :owner AND version > :after ORDER BY version LIMIT :limit
"""
"""A slice of an owner's conversations, oldest commit first: one that is changed meanwhile comes again, later."""

PAGE_OF_SESSIONS: Final[LiteralString] = """
    SELECT version, session_id, active_agent_name, metadata_json, created_at, updated_at
    FROM chatflow_sessions WHERE owner = :owner AND version < :before ORDER BY version DESC LIMIT :limit
"""
"""An owner's conversations, newest commit first."""

PAGE_OF_MESSAGES: Final[LiteralString] = """
    SELECT place, message_json FROM chatflow_messages
    WHERE session_key = :session_key AND place < :before ORDER BY place DESC LIMIT :limit
"""
"""The last messages before a place."""

FORGET_SET_ASIDE: Final[LiteralString] = """
    DELETE FROM chatflow_set_aside WHERE owner = :owner AND session_id = :session_id
"""
"""What was set aside of a deleted conversation."""

FORGET_SET_ASIDE_OF_OWNER: Final[LiteralString] = """
    DELETE FROM chatflow_set_aside WHERE owner = :owner
"""
"""What was set aside of an owner's conversations."""

# --- turns ---

QUEUE_TURN: Final[LiteralString] = """
    INSERT INTO chatflow_turns
        (session_key, state, holder, attempt, agent_name, message_id, digest, parent, queued_at)
    SELECT
        line.session_key, iif(line.is_empty, 'running', 'queued'), :holder, line.is_empty,
        :agent_name, :message_id, :digest, :parent, :now
    FROM (
        SELECT session_key, NOT EXISTS (SELECT 1 FROM chatflow_turns WHERE session_key = :session_key) AS is_empty
        FROM chatflow_sessions WHERE session_key = :session_key
    ) AS line
    RETURNING
        turn_id, state = 'running',
        (SELECT version FROM chatflow_sessions WHERE chatflow_sessions.session_key = chatflow_turns.session_key)
"""
"""A place in the conversation's line, running at once where the line is empty; none if the conversation is gone."""

START_TURN: Final[LiteralString] = """
    UPDATE chatflow_turns SET state = 'running', attempt = attempt + 1
    WHERE turn_id = :turn_id AND state = 'queued' AND holder = :holder AND NOT EXISTS (
        SELECT 1 FROM chatflow_turns AS ahead
        WHERE ahead.session_key = chatflow_turns.session_key AND ahead.turn_id < chatflow_turns.turn_id
    )
    RETURNING attempt
"""
"""A queued row runs once no smaller one of its conversation is left."""

READ_TURN: Final[LiteralString] = """
    SELECT state = 'running', attempt, session_key FROM chatflow_turns WHERE turn_id = :turn_id AND holder = :holder
"""
"""One row of ours."""

HOLDER_AHEAD: Final[LiteralString] = """
    SELECT holder FROM chatflow_turns
    WHERE session_key = :session_key AND turn_id < :turn_id ORDER BY turn_id DESC LIMIT 1
"""
"""Whose row stands directly before a place."""

TURN_EXISTS: Final[LiteralString] = "SELECT holder FROM chatflow_turns WHERE turn_id = :turn_id"
"""Whether a row is still there, and whose it is."""

TURN_OF_MESSAGE: Final[LiteralString] = """
    SELECT turn_id, digest, holder FROM chatflow_turns WHERE session_key = :session_key AND message_id = :message_id
"""
"""The turn that answers a message right now."""

TURNS_OF_SESSION: Final[LiteralString] = "SELECT turn_id FROM chatflow_turns WHERE session_key = :session_key"
"""All of a conversation's turns."""

END_TURN: Final[LiteralString] = """
    DELETE FROM chatflow_turns
    WHERE turn_id = :turn_id AND state = 'running' AND holder = :holder AND attempt = :attempt
    RETURNING turn_id, (
        SELECT iif(next.holder = :holder, next.turn_id, NULL) FROM chatflow_turns AS next
        WHERE next.session_key = chatflow_turns.session_key AND next.turn_id > chatflow_turns.turn_id
        ORDER BY next.turn_id LIMIT 1
    )
"""
"""The fence: a commit deletes its own row, and changes nothing where there is none. Tells which row of ours is next."""

LEAVE_TURN: Final[LiteralString] = """
    DELETE FROM chatflow_turns WHERE turn_id = :turn_id AND holder = :holder
    RETURNING turn_id, (
        SELECT iif(next.holder = :holder, next.turn_id, NULL) FROM chatflow_turns AS next
        WHERE next.session_key = chatflow_turns.session_key AND next.turn_id > chatflow_turns.turn_id
        ORDER BY next.turn_id LIMIT 1
    )
"""
"""A place given back. Tells which row of ours is next, which may still have others before it."""

LEAVE_LINE: Final[LiteralString] = """
    DELETE FROM chatflow_turns WHERE session_key = :session_key AND holder = :holder
"""
"""The places that a process which is gone had in a conversation's line."""

WAITS_FOR: Final[LiteralString] = """
    WITH RECURSIVE awaited (turn_id, session_key) AS (
        SELECT turn_id, session_key FROM chatflow_turns WHERE session_key = :session_key
        UNION
        SELECT child.turn_id, child.session_key FROM awaited
        JOIN chatflow_turns AS child ON child.parent = awaited.turn_id
        UNION
        SELECT ahead.turn_id, ahead.session_key FROM awaited
        JOIN chatflow_turns AS ahead ON ahead.session_key = awaited.session_key AND ahead.turn_id < awaited.turn_id
    )
    SELECT turn_id FROM awaited
"""
"""All turns that one queued now would wait for: its line, what those asked for inside, and who is before that."""

# --- message ids ---

READ_PROCESSED: Final[LiteralString] = """
    SELECT digest, response_json FROM chatflow_processed_messages
    WHERE owner = :owner AND session_id = :session_id AND message_id = :message_id AND processed_at >= :expired_before
"""
"""A message id that is remembered."""

MARK_PROCESSED: Final[LiteralString] = """
    INSERT INTO chatflow_processed_messages (owner, session_id, message_id, processed_at, digest, response_json)
    VALUES (:owner, :session_id, :message_id, :now, :digest, :response_json)
    ON CONFLICT (owner, session_id, message_id) DO UPDATE SET
        processed_at = excluded.processed_at, digest = excluded.digest, response_json = excluded.response_json
    WHERE processed_at < :expired_before
    RETURNING 1
"""
"""Claims an id: one statement, so that of all who try, one gets a row back. An expired one is as good as none."""

FORGET_RESPONSES: Final[LiteralString] = """
    UPDATE chatflow_processed_messages SET response_json = NULL
    WHERE response_json IS NOT NULL AND (owner, session_id) = (
        SELECT owner, session_id FROM chatflow_sessions WHERE session_key = :session_key
    )
"""
"""Before a conversation is deleted: its stored answers go, the ids stay known."""

PURGE_PROCESSED: Final[LiteralString] = """
    DELETE FROM chatflow_processed_messages WHERE (owner, session_id, message_id) IN (
        SELECT owner, session_id, message_id FROM chatflow_processed_messages
        WHERE processed_at < :expired_before ORDER BY processed_at LIMIT :limit
    )
"""
"""A slice of the expired ids, oldest first."""
