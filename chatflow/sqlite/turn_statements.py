"""Every statement on turns and their journals, named and whole."""

from __future__ import annotations

from typing import Final, LiteralString

QUEUE_FIRST: Final[LiteralString] = """
    INSERT INTO chatflow_turns (
        session_key, state, holder, attempt, attempts, lease_seconds, accepted, agent_name, message_id, digest,
        work_json, parent, queued_at
    )
    SELECT
        session_key, 'running', :holder, 1, 1, :lease_seconds, 0, :agent_name, :message_id, :digest,
        :work_json, :parent, :now
    FROM chatflow_sessions
    WHERE session_key = :session_key AND owner = :owner AND NOT EXISTS (
        SELECT 1 FROM chatflow_turns AS other
        WHERE other.session_key = :session_key AND (
            other.state IN ('queued', 'running')
            OR (other.state IN ('accepted', 'interrupted') AND other.agent_name IS :agent_name)
        )
    )
    RETURNING
        turn_id,
        (SELECT version FROM chatflow_sessions WHERE chatflow_sessions.session_key = chatflow_turns.session_key)
"""
"""A turn that runs at once, since nothing of its conversation is before it: the usual case, in one statement. A
conversation that is being erased has another owner by then."""

READ_ROW: Final[LiteralString] = """
    SELECT turn_id, session_key, state, holder, attempt, attempts, accepted, agent_name, message_id, digest
    FROM chatflow_turns WHERE turn_id = :turn_id
"""
"""One row, as the rules look at it."""

ROW_OF_MESSAGE: Final[LiteralString] = """
    SELECT turn_id, session_key, state, holder, attempt, attempts, accepted, agent_name, message_id, digest
    FROM chatflow_turns WHERE session_key = :session_key AND message_id = :message_id
"""
"""The row of a message."""

RUNNING_ROW: Final[LiteralString] = """
    SELECT turn_id, session_key, state, holder, attempt, attempts, accepted, agent_name, message_id, digest
    FROM chatflow_turns WHERE session_key = :session_key AND state = 'running'
"""
"""The row that runs in a conversation."""

NEXT_IN_LINE: Final[LiteralString] = """
    SELECT turn_id, session_key, state, holder, attempt, attempts, accepted, agent_name, message_id, digest
    FROM chatflow_turns
    WHERE session_key = :session_key AND turn_id > :above AND turn_id < :below
        AND state IN ('queued', 'running', 'accepted', 'interrupted')
    ORDER BY turn_id LIMIT 1
"""
"""The first row in line between two ids."""

ROWS_OF_HOLDER: Final[LiteralString] = """
    SELECT turn_id, session_key, state, holder, attempt, attempts, accepted, agent_name, message_id, digest
    FROM chatflow_turns WHERE holder = :holder
"""
"""All that somebody holds."""

INSERT_ROW: Final[LiteralString] = """
    INSERT INTO chatflow_turns (
        session_key, state, holder, attempt, attempts, lease_seconds, accepted, agent_name, message_id, digest,
        work_json, parent, queued_at
    )
    VALUES (
        :session_key, :state, :holder, :attempt, :attempts, :lease_seconds, :accepted, :agent_name, :message_id,
        :digest, :work_json, :parent, :now
    )
    RETURNING turn_id
"""
"""A row at the end of its line."""

WRITE_ROW: Final[LiteralString] = """
    UPDATE chatflow_turns SET
        state = :state, holder = :holder, attempt = :attempt, attempts = :attempts, accepted = :accepted,
        message_id = :message_id,
        parent = iif(:holder IS NULL, NULL, parent),
        ended_at = iif(:state IN ('told', 'dead', 'answered'), coalesce(ended_at, :now), NULL)
    WHERE turn_id = :turn_id
"""
"""What a rule has made of a row."""

AWAIT_ROW: Final[LiteralString] = """
    UPDATE chatflow_turns SET parent = :parent, lease_seconds = :lease_seconds WHERE turn_id = :turn_id
"""
"""Who awaits a row that was taken."""

TAKE_LEASE: Final[LiteralString] = """
    UPDATE chatflow_turns SET lease_seconds = :lease_seconds WHERE turn_id = :turn_id
"""
"""How long whoever has taken a row may be silent."""

SHARE_LEASE: Final[LiteralString] = """
    UPDATE chatflow_turns SET lease_seconds = (
        SELECT of.lease_seconds FROM chatflow_turns AS of WHERE of.turn_id = :of
    )
    WHERE turn_id = :turn_id
"""
"""The same, of one who holds another row already."""

DELETE_ROW: Final[LiteralString] = "DELETE FROM chatflow_turns WHERE turn_id = :turn_id"
"""A row, and with it its journal."""

HOLDER_BEFORE: Final[LiteralString] = """
    SELECT holder FROM chatflow_turns
    WHERE session_key = :session_key AND turn_id < :turn_id AND state IN ('queued', 'running')
    ORDER BY turn_id DESC LIMIT 1
"""
"""Whose row stands directly before a place. Waiting work does not count, also where a worker of ours holds it until it
tries again: its doer need not be the next who ends, and others may pass it."""

KEY_OF_TURN: Final[LiteralString] = """
    SELECT session.owner, session.session_id
    FROM chatflow_turns AS turn JOIN chatflow_sessions AS session USING (session_key)
    WHERE turn.turn_id = :turn_id
"""
"""Whose a row is."""

READ_WORK: Final[LiteralString] = """
    SELECT
        turn.turn_id, session.owner, session.session_id, turn.message_id, turn.work_json, turn.agent_name, turn.state,
        turn.attempts, turn.queued_at, turn.attempt
    FROM chatflow_turns AS turn JOIN chatflow_sessions AS session USING (session_key)
    WHERE turn.turn_id = :turn_id
"""
"""A row with all that is needed to do it."""

PAGE_OF_TURNS: Final[LiteralString] = """
    SELECT
        turn.turn_id, session.owner, session.session_id, turn.message_id, turn.work_json, turn.agent_name, turn.state,
        turn.attempts, turn.queued_at, turn.attempt
    FROM chatflow_turns AS turn CROSS JOIN chatflow_sessions AS session USING (session_key)
    WHERE turn.turn_id > :after AND (:owner IS NULL OR session.owner = :owner)
    ORDER BY turn.turn_id LIMIT :limit
"""
"""An owner's turns, or all."""

TURNS_OF_SESSION: Final[LiteralString] = "SELECT turn_id FROM chatflow_turns WHERE session_key = :session_key"
"""All of a conversation's turns."""

ANSWER_ROW: Final[LiteralString] = """
    UPDATE chatflow_turns SET state = 'answered', holder = iif(:hands_on, holder, NULL), ended_at = :now
    WHERE turn_id = :turn_id AND state = 'running' AND holder = :holder AND attempt = :attempt AND accepted
    RETURNING turn_id, (
        SELECT min(next.turn_id) FROM chatflow_turns AS next
        WHERE next.session_key = chatflow_turns.session_key AND next.state = 'queued' AND next.holder = :holder
    )
"""
"""The commit of an accepted turn: its row stays until its answer has been handed on."""

END_TURN: Final[LiteralString] = """
    DELETE FROM chatflow_turns
    WHERE turn_id = :turn_id AND state = 'running' AND holder = :holder AND attempt = :attempt AND NOT accepted
    RETURNING turn_id, (
        SELECT min(next.turn_id) FROM chatflow_turns AS next
        WHERE next.session_key = chatflow_turns.session_key AND next.state = 'queued' AND next.holder = :holder
    )
"""
"""The fence: a commit deletes its own row, unless it was accepted, and changes nothing where there is none. Tells which
row of ours is to look whether its place has come."""

NEXT_OF_HOLDER: Final[LiteralString] = """
    SELECT min(turn_id) FROM chatflow_turns WHERE session_key = :session_key AND state = 'queued' AND holder = :holder
"""
"""Which row of ours is to look first whether its place has come."""

IS_NEXT_TO_TELL: Final[LiteralString] = """
    SELECT NOT EXISTS (
        SELECT 1 FROM chatflow_turns AS before
        WHERE before.session_key = answered.session_key AND before.turn_id < :turn_id AND before.state = 'answered'
    )
    FROM chatflow_turns AS answered
    WHERE answered.turn_id = :turn_id AND answered.holder = :holder AND answered.attempt = :attempt
"""
"""Whether all answers before one have been heard."""

END_ANSWERED: Final[LiteralString] = """
    DELETE FROM chatflow_turns
    WHERE turn_id = :turn_id AND state = 'answered' AND holder = :holder AND attempt = :attempt
"""
"""An answer has been handed on."""

WAITS_FOR: Final[LiteralString] = """
    WITH RECURSIVE awaited (turn_id, session_key) AS (
        SELECT turn_id, session_key FROM chatflow_turns
        WHERE session_key = :session_key AND state IN ('queued', 'running', 'accepted', 'interrupted')
        UNION
        SELECT child.turn_id, child.session_key FROM awaited
        JOIN chatflow_turns AS child ON child.parent = awaited.turn_id
        UNION
        SELECT ahead.turn_id, ahead.session_key FROM awaited
        JOIN chatflow_turns AS ahead ON ahead.session_key = awaited.session_key AND (
            ahead.state = 'running'
            OR (ahead.turn_id < awaited.turn_id AND ahead.state IN ('queued', 'accepted', 'interrupted'))
        )
    )
    SELECT turn_id FROM awaited
"""
"""All turns that one queued now would wait for: its line, what those asked for inside, and who is before that. What
runs may have passed a row while that was waiting work, and stands behind it then."""

BEAT: Final[LiteralString] = """
    UPDATE chatflow_turns SET beat = beat + 1
    WHERE turn_id IN (SELECT value FROM json_each(:held)) AND holder = :holder
    RETURNING turn_id, attempt
"""
"""Signs of life of those rows that are awaited; the ones that are still this holder's come back."""

READ_BEAT: Final[LiteralString] = "SELECT beat FROM chatflow_turns WHERE turn_id = :turn_id"
"""One row's beat."""

BEATS_IN_LINES: Final[LiteralString] = """
    SELECT turn_id, attempt, beat, lease_seconds FROM chatflow_turns
    WHERE holder IS NOT NULL AND session_key IN (
        SELECT own.session_key FROM chatflow_turns AS own
        WHERE own.turn_id IN (SELECT value FROM json_each(:held)) AND own.state = 'queued'
    )
    UNION
    SELECT turn_id, attempt, beat, lease_seconds FROM chatflow_turns
    WHERE holder IS NOT NULL AND turn_id IN (SELECT value FROM json_each(:watched))
"""
"""The beats of held rows that those waiting have to watch."""

BEATS_OF_ALL: Final[LiteralString] = """
    SELECT turn_id, attempt, beat, lease_seconds FROM chatflow_turns WHERE holder > ''
"""
"""The beats of all held rows."""

ANSWERED_AT_HAND: Final[LiteralString] = """
    SELECT turn_id FROM chatflow_turns
    WHERE holder IS NULL AND agent_name = :agent_name AND state = 'answered' ORDER BY turn_id LIMIT :limit
"""
"""Answers that nobody hands on."""

WORK_AT_HAND: Final[LiteralString] = """
    SELECT turn_id FROM chatflow_turns AS work
    WHERE holder IS NULL AND agent_name = :agent_name AND state IN ('accepted', 'interrupted') AND NOT EXISTS (
        SELECT 1 FROM chatflow_turns AS earlier
        WHERE earlier.session_key = work.session_key AND earlier.turn_id < work.turn_id
            AND earlier.agent_name = :agent_name
            AND earlier.state IN ('queued', 'running', 'accepted', 'interrupted')
    )
    ORDER BY turn_id
"""
"""The first piece of work in each line that nobody does."""

IS_WORK_AT_HAND: Final[LiteralString] = """
    SELECT EXISTS (
        SELECT 1 FROM chatflow_turns
        WHERE holder IS NULL AND agent_name = :agent_name AND state IN ('accepted', 'interrupted')
    ) OR :answers AND EXISTS (
        SELECT 1 FROM chatflow_turns WHERE holder IS NULL AND agent_name = :agent_name AND state = 'answered'
    )
"""
"""Whether there is anything that nobody does."""

WRITE_JOURNAL: Final[LiteralString] = """
    INSERT INTO chatflow_journal (turn_id, step, entry_json)
    SELECT
        turn_id,
        (SELECT coalesce(max(step), 0) + 1 FROM chatflow_journal AS noted WHERE noted.turn_id = :turn_id),
        :entry_json
    FROM chatflow_turns
    WHERE turn_id = :turn_id AND state = 'running' AND holder = :holder AND attempt = :attempt
    RETURNING step
"""
"""A line of a journal; none where the fence has changed."""

READ_JOURNAL: Final[LiteralString] = """
    SELECT step, entry_json FROM chatflow_journal WHERE turn_id = :turn_id ORDER BY step
"""
"""A journal, in order."""

MOVE_JOURNAL: Final[LiteralString] = "UPDATE chatflow_journal SET turn_id = :new WHERE turn_id = :old"
"""The journal of a message that takes a new place."""

HAS_JOURNAL: Final[LiteralString] = "SELECT 1 FROM chatflow_journal WHERE turn_id = :turn_id LIMIT 1"
"""Whether a turn that ends has done anything that may not be done twice."""

DROP_JOURNAL: Final[LiteralString] = "DELETE FROM chatflow_journal WHERE turn_id = :turn_id"
"""The journal of a message that was given up."""

PURGE_TURNS: Final[LiteralString] = """
    DELETE FROM chatflow_turns WHERE turn_id IN (
        SELECT turn_id FROM chatflow_turns
        WHERE ended_at IS NOT NULL AND ended_at < :expired_before ORDER BY ended_at LIMIT :limit
    )
"""
"""A slice of the rows that left the line longer ago than ids are remembered."""

HOLDERS: Final[LiteralString] = "SELECT DISTINCT holder FROM chatflow_turns WHERE holder > ''"
"""Who holds anything."""
