"""Every statement on conversations and message ids, named and whole."""

from __future__ import annotations

from typing import Final, LiteralString

# --- conversations ---

LOAD_SESSION: Final[LiteralString] = """
    SELECT
        session_key, version, active_agent_name, metadata_json, state_json, max_turns, service_json, expires_after,
        spent_json
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
        (
            owner, session_id, active_agent_name, metadata_json, max_turns, service_json, service_key, expires_after,
            expires_at, version, created_at, updated_at
        )
    VALUES (
        :owner, :session_id, :active_agent_name, :metadata_json, :max_turns, :service_json, :service_key,
        :expires_after, :expires_at, (SELECT coalesce(max(version), 0) + 1 FROM chatflow_sessions), :now, :now
    )
    ON CONFLICT (owner, session_id) DO NOTHING
"""
"""A new conversation; nothing if somebody was faster."""

UPDATE_SESSION: Final[LiteralString] = """
    UPDATE chatflow_sessions SET
        active_agent_name = coalesce(:active_agent_name, active_agent_name),
        metadata_json = coalesce(:metadata_json, metadata_json),
        state_json = coalesce(:state_json, state_json),
        spent_json = coalesce(:spent_json, spent_json),
        service_json = iif(:changes_service, :service_json, service_json),
        service_key = iif(:changes_service, :service_key, service_key),
        expires_at = :expires_at,
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
    SELECT version, owner, session_id, active_agent_name, metadata_json, created_at, updated_at
    FROM chatflow_sessions WHERE owner = :owner AND version < :before ORDER BY version DESC LIMIT :limit
"""
"""An owner's conversations, newest commit first."""

PAGE_OF_ALL_SESSIONS: Final[LiteralString] = """
    SELECT version, owner, session_id, active_agent_name, metadata_json, created_at, updated_at
    FROM chatflow_sessions
    WHERE version < :before AND (owner < char(0) OR owner >= char(1)) ORDER BY version DESC LIMIT :limit
"""
"""All owners' conversations, but for what is being erased."""

SESSIONS_AT_SERVICE: Final[LiteralString] = """
    SELECT session_id, service_json FROM chatflow_sessions
    WHERE owner = :owner AND service_key = :service_key ORDER BY version DESC
"""
"""An owner's conversations that hold a service's id, newest commit first."""

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
    WHERE processed_at < :expired_before OR (response_json IS NULL AND excluded.response_json IS NOT NULL)
    RETURNING 1
"""
"""Claims an id: one statement, so that of all who try, one gets a row back. An expired one is as good as none. One that
was marked by hand while its turn was waiting gets the turn's answer, which somebody may still have to be told."""

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
