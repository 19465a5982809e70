"""Every statement on turns and their journals, named and whole."""

from __future__ import annotations

from typing import Final, LiteralString

LOCK_FOR_A_PLACE: Final[LiteralString] = """
    SELECT session_key, set_config('synchronous_commit', 'off', true) FROM chatflow_sessions
    WHERE session_key = %(session_key)s AND owner = %(owner)s
    FOR NO KEY UPDATE
"""
"""The conversation's row, for a place in its line, which need not be flushed: a commit flushes all before it."""

LIMITED: Final[LiteralString] = "SELECT set_config('idle_in_transaction_session_timeout', '5s', true)"
"""A transaction whose client is gone without the server's knowing ends soon, and its locks with it."""

NOT_FLUSHED: Final[LiteralString] = "SELECT set_config('synchronous_commit', 'off', true)"
"""The transaction need not be on the disk when it is acknowledged: places and beats go with the server."""

QUEUE_FIRST: Final[LiteralString] = """
    WITH placed AS (
        INSERT INTO chatflow_turns (
            session_key, state, holder, attempt, attempts, lease_seconds, accepted, agent_name, message_id, digest,
            work_json, parent, queued_at
        )
        SELECT
            session_key, 'running', %(holder)s, %(attempt)s, 1, %(lease_seconds)s, false, %(agent_name)s,
            %(message_id)s, %(digest)s, %(work_json)s, %(parent)s, %(now)s
        FROM chatflow_sessions AS session
        WHERE session_key = %(session_key)s AND owner = %(owner)s AND NOT EXISTS (
            SELECT 1 FROM chatflow_turns AS other
            WHERE other.session_key = session.session_key AND (
                other.state IN ('queued', 'running')
                OR (other.state IN ('accepted', 'interrupted') AND other.agent_name IS NOT DISTINCT FROM %(agent_name)s)
                OR other.message_id = %(message_id)s
            )
        ) AND NOT EXISTS (
            SELECT 1 FROM chatflow_processed_messages AS known
            WHERE known.owner = session.owner AND known.session_id = session.session_id
                AND known.message_id = %(message_id)s AND known.processed_at >= %(expired_before)s
        )
        RETURNING turn_id, session_key
    ), marked AS (
        INSERT INTO chatflow_marks AS mark (mark_id, number) SELECT %(mark_id)s, %(mark)s FROM placed
        ON CONFLICT (mark_id) DO UPDATE SET
            number = CASE WHEN mark.number < excluded.number THEN excluded.number END, marked_at = now()
    )
    SELECT turn_id, version FROM placed JOIN chatflow_sessions USING (session_key)
"""
"""A turn that runs at once, since nothing of its conversation is before it and its message is new: the usual case, in
one statement after the lock."""

RUNS_FOR: Final[LiteralString] = """
    SELECT turn_id, version FROM chatflow_turns JOIN chatflow_sessions USING (session_key)
    WHERE session_key = %(session_key)s AND state = 'running' AND holder = %(holder)s AND attempt = %(attempt)s
"""
"""The row that QUEUE_FIRST has made, where it holds and its answer was lost."""

LOCK_ROWS_SESSION: Final[LiteralString] = """
    SELECT session.session_key FROM chatflow_sessions AS session JOIN chatflow_turns AS turn USING (session_key)
    WHERE turn.turn_id = %(turn_id)s
    FOR NO KEY UPDATE OF session
"""
"""The row of the conversation that a turn is of."""

LOCK_CYCLES: Final[LiteralString] = "SELECT pg_advisory_xact_lock(hashtext(%(schema)s), 1)"
"""Only with ancestors: of two turns that would wait for each other, the second one to queue sees the first."""

READ_LINE: Final[LiteralString] = """
    SELECT
        turn_id, session_key, state, holder, attempt, attempts, accepted, agent_name, message_id, digest, beat,
        EXISTS (SELECT 1 FROM chatflow_journal AS noted WHERE noted.turn_id = turn.turn_id)
    FROM chatflow_turns AS turn
    WHERE session_key = (
        SELECT session_key FROM chatflow_sessions WHERE owner = %(owner)s AND session_id = %(session_id)s
    ) AND (
        state IN ('queued', 'running', 'accepted', 'interrupted') OR turn_id = %(turn_id)s
        OR message_id = %(message_id)s
    )
    ORDER BY turn_id
"""
"""A conversation's line, with the rows that are asked for by name though they are out of it."""

READ_ROWS_LINE: Final[LiteralString] = """
    SELECT
        turn_id, session_key, state, holder, attempt, attempts, accepted, agent_name, message_id, digest, beat,
        EXISTS (SELECT 1 FROM chatflow_journal AS noted WHERE noted.turn_id = turn.turn_id)
    FROM chatflow_turns AS turn
    WHERE session_key = (SELECT session_key FROM chatflow_turns WHERE turn_id = %(turn_id)s) AND (
        state IN ('queued', 'running', 'accepted', 'interrupted') OR turn_id = %(turn_id)s
    )
    ORDER BY turn_id
"""
"""The line that a row stands in."""

READ_LINES: Final[LiteralString] = """
    SELECT
        turn_id, session_key, state, holder, attempt, attempts, accepted, agent_name, message_id, digest, beat,
        EXISTS (SELECT 1 FROM chatflow_journal AS noted WHERE noted.turn_id = turn.turn_id)
    FROM chatflow_turns AS turn WHERE session_key = ANY(%(session_keys)s)
    ORDER BY turn_id
"""
"""All rows of some conversations."""

NEXT_TURN_ID: Final[LiteralString] = "SELECT nextval('chatflow_turn_ids')"
"""An id above all that were ever given out; asked for under the lock of its line."""

WAITS_FOR: Final[LiteralString] = """
    WITH RECURSIVE awaited (turn_id, session_key) AS (
        SELECT turn_id, session_key FROM chatflow_turns
        WHERE session_key = (
            SELECT session_key FROM chatflow_sessions WHERE owner = %(owner)s AND session_id = %(session_id)s
        ) AND state IN ('queued', 'running', 'accepted', 'interrupted')
        UNION
        SELECT found.turn_id, found.session_key FROM awaited CROSS JOIN LATERAL (
            SELECT child.turn_id, child.session_key FROM chatflow_turns AS child WHERE child.parent = awaited.turn_id
            UNION ALL
            SELECT ahead.turn_id, ahead.session_key FROM chatflow_turns AS ahead
            WHERE ahead.session_key = awaited.session_key AND (
                ahead.state = 'running'
                OR (ahead.turn_id < awaited.turn_id AND ahead.state IN ('queued', 'accepted', 'interrupted'))
            )
        ) AS found
    )
    SELECT turn_id FROM awaited
"""
"""All turns that one queued now would wait for: its line, what those asked for inside, and who is before that. What
runs may have passed a row while that was waiting work, and stands behind it then."""

INSERT_ROW: Final[LiteralString] = """
    INSERT INTO chatflow_turns (
        turn_id, session_key, state, holder, attempt, attempts, lease_seconds, accepted, agent_name, message_id, digest,
        work_json, parent, queued_at
    )
    VALUES (
        %(turn_id)s, %(session_key)s, %(state)s, %(holder)s, %(attempt)s, %(attempts)s, %(lease_seconds)s, %(accepted)s,
        %(agent_name)s, %(message_id)s, %(digest)s, %(work_json)s, %(parent)s, %(now)s
    )
"""
"""A row at the end of its line."""

WRITE_ROW: Final[LiteralString] = """
    UPDATE chatflow_turns SET
        state = %(state)s, holder = %(holder)s, attempt = %(attempt)s, attempts = %(attempts)s,
        accepted = %(accepted)s, message_id = %(message_id)s,
        parent = CASE WHEN %(holder)s::text IS NULL THEN NULL ELSE parent END,
        ended_at = CASE WHEN %(state)s IN ('told', 'dead', 'answered') THEN coalesce(ended_at, %(now)s) END
    WHERE turn_id = %(turn_id)s
"""
"""What a rule has made of a row."""

AWAIT_ROW: Final[LiteralString] = """
    UPDATE chatflow_turns SET parent = %(parent)s, lease_seconds = %(lease_seconds)s WHERE turn_id = %(turn_id)s
"""
"""Who awaits a row that was taken."""

TAKE_LEASE: Final[LiteralString] = """
    UPDATE chatflow_turns SET lease_seconds = %(lease_seconds)s WHERE turn_id = %(turn_id)s
"""
"""How long whoever has taken a row may be silent."""

SHARE_LEASE: Final[LiteralString] = """
    UPDATE chatflow_turns SET lease_seconds = (
        SELECT shared.lease_seconds FROM chatflow_turns AS shared WHERE shared.turn_id = %(shared)s
    )
    WHERE turn_id = %(turn_id)s
"""
"""The same, of one who holds another row already."""

DELETE_ROW: Final[LiteralString] = "DELETE FROM chatflow_turns WHERE turn_id = %(turn_id)s"
"""A row, and with it its journal."""

READ_ROW: Final[LiteralString] = """
    SELECT
        turn_id, session_key, state, holder, attempt, attempts, accepted, agent_name, message_id, digest, beat, false
    FROM chatflow_turns WHERE turn_id = %(turn_id)s
"""
"""One row."""

KEY_OF_TURN: Final[LiteralString] = """
    SELECT session.owner, session.session_id
    FROM chatflow_turns AS turn JOIN chatflow_sessions AS session USING (session_key)
    WHERE turn.turn_id = %(turn_id)s
"""
"""Whose a row is."""

READ_WORK: Final[LiteralString] = """
    SELECT
        turn.turn_id, session.owner, session.session_id, turn.message_id, turn.work_json, turn.agent_name, turn.state,
        turn.attempts, turn.queued_at, turn.attempt
    FROM chatflow_turns AS turn JOIN chatflow_sessions AS session USING (session_key)
    WHERE turn.turn_id = %(turn_id)s
"""
"""A row with all that is needed to do it."""

PAGE_OF_TURNS: Final[LiteralString] = """
    SELECT
        turn.turn_id, session.owner, session.session_id, turn.message_id, turn.work_json, turn.agent_name, turn.state,
        turn.attempts, turn.queued_at, turn.attempt
    FROM chatflow_turns AS turn JOIN chatflow_sessions AS session USING (session_key)
    WHERE turn.turn_id > %(after)s AND (%(owner)s::text IS NULL OR session.owner = %(owner)s)
    ORDER BY turn.turn_id LIMIT %(limit)s
"""
"""An owner's turns, or all."""

TURNS_OF_SESSIONS: Final[LiteralString] = """
    SELECT turn_id FROM chatflow_turns WHERE session_key = ANY(%(session_keys)s) ORDER BY turn_id
"""
"""All turns of conversations."""

IS_NEXT_TO_TELL: Final[LiteralString] = """
    SELECT NOT EXISTS (
        SELECT 1 FROM chatflow_turns AS before
        WHERE before.session_key = answered.session_key AND before.turn_id < answered.turn_id
            AND before.state = 'answered'
    )
    FROM chatflow_turns AS answered
    WHERE answered.turn_id = %(turn_id)s AND answered.holder = %(holder)s AND answered.attempt = %(attempt)s
"""
"""Whether all answers before one have been heard."""

END_ANSWERED: Final[LiteralString] = """
    DELETE FROM chatflow_turns
    WHERE turn_id = %(turn_id)s AND state = 'answered' AND holder = %(holder)s AND attempt = %(attempt)s
    RETURNING nextval('chatflow_versions')
"""
"""An answer has been handed on."""

BEAT: Final[LiteralString] = """
    UPDATE chatflow_turns SET beat = beat + 1
    WHERE turn_id IN (
        SELECT turn_id FROM chatflow_turns
        WHERE turn_id = ANY(%(held)s::bigint[]) AND holder = %(holder)s
        ORDER BY turn_id FOR NO KEY UPDATE SKIP LOCKED
    )
"""
"""Signs of life of those rows that are awaited. One that is just being changed is passed over, and raised the next
time: a beat waits for nobody, who might wait for it."""

STILL_HELD: Final[LiteralString] = """
    SELECT turn_id, attempt FROM chatflow_turns
    WHERE turn_id = ANY(%(held)s::bigint[]) AND holder = %(holder)s
"""
"""Those of them that are still this holder's."""

BEATS_IN_LINES: Final[LiteralString] = """
    SELECT turn_id, attempt, beat, lease_seconds FROM chatflow_turns
    WHERE holder IS NOT NULL AND session_key IN (
        SELECT own.session_key FROM chatflow_turns AS own
        WHERE own.turn_id = ANY(%(held)s::bigint[]) AND own.state = 'queued'
    )
    UNION
    SELECT turn_id, attempt, beat, lease_seconds FROM chatflow_turns
    WHERE holder IS NOT NULL AND turn_id = ANY(%(watched)s::bigint[])
"""
"""The beats of held rows that those waiting have to watch."""

BEATS_OF_ALL: Final[LiteralString] = """
    SELECT turn_id, attempt, beat, lease_seconds FROM chatflow_turns WHERE holder IS NOT NULL
"""
"""The beats of all held rows."""

HOLDERS: Final[LiteralString] = "SELECT DISTINCT holder FROM chatflow_turns WHERE holder IS NOT NULL"
"""Who holds anything."""

SESSIONS_OF_HOLDERS: Final[LiteralString] = """
    SELECT DISTINCT session_key FROM chatflow_turns WHERE holder = ANY(%(holders)s) ORDER BY session_key
"""
"""Where somebody holds anything."""

LOCK_SESSIONS: Final[LiteralString] = """
    SELECT session_key FROM chatflow_sessions WHERE session_key = ANY(%(session_keys)s)
    ORDER BY session_key FOR NO KEY UPDATE
"""
"""Conversations, in an order that is everybody's."""

IS_WORK_AT_HAND: Final[LiteralString] = """
    SELECT EXISTS (
        SELECT 1 FROM chatflow_turns
        WHERE holder IS NULL AND agent_name = %(agent_name)s AND state IN ('accepted', 'interrupted')
    ) OR (%(answers)s AND EXISTS (
        SELECT 1 FROM chatflow_turns WHERE holder IS NULL AND agent_name = %(agent_name)s AND state = 'answered'
    ))
"""
"""Whether there is anything that nobody does."""

ANSWERED_AT_HAND: Final[LiteralString] = """
    SELECT turn.session_key, turn.turn_id
    FROM chatflow_turns AS turn JOIN chatflow_sessions AS session USING (session_key)
    WHERE turn.holder IS NULL AND turn.agent_name = %(agent_name)s AND turn.state = 'answered'
    ORDER BY turn.turn_id LIMIT %(limit)s
    FOR NO KEY UPDATE OF session SKIP LOCKED
"""
"""Answers that nobody hands on. Where somebody else is at a conversation, it is the next one's turn."""

WORK_AT_HAND: Final[LiteralString] = """
    SELECT work.session_key, work.turn_id
    FROM chatflow_turns AS work JOIN chatflow_sessions AS session USING (session_key)
    WHERE work.turn_id > %(after)s AND work.holder IS NULL AND work.agent_name = %(agent_name)s
        AND work.state IN ('accepted', 'interrupted') AND NOT EXISTS (
            SELECT 1 FROM chatflow_turns AS earlier
            WHERE earlier.session_key = work.session_key AND earlier.turn_id < work.turn_id
                AND earlier.agent_name = work.agent_name
                AND earlier.state IN ('queued', 'running', 'accepted', 'interrupted')
        )
    ORDER BY work.turn_id LIMIT %(limit)s
    FOR NO KEY UPDATE OF session SKIP LOCKED
"""
"""The first piece of work in each line that nobody does, and that nobody else is at."""

LOCK_TURN: Final[LiteralString] = """
    SELECT CASE WHEN NOT %(flushed)s THEN set_config('synchronous_commit', 'off', true) END
    FROM chatflow_turns WHERE turn_id = %(turn_id)s
    FOR NO KEY UPDATE
"""
"""A turn's row, for a line of its journal: lines are numbered one after the other, and nobody takes it meanwhile."""

WRITE_JOURNAL: Final[LiteralString] = """
    WITH noted AS (
        INSERT INTO chatflow_journal (turn_id, step, entry_json)
        SELECT
            turn_id,
            (SELECT coalesce(max(step), 0) + 1 FROM chatflow_journal AS before WHERE before.turn_id = %(turn_id)s),
            %(entry_json)s
        FROM chatflow_turns
        WHERE turn_id = %(turn_id)s AND state = 'running' AND holder = %(holder)s AND attempt = %(attempt)s
        RETURNING step
    ), marked AS (
        INSERT INTO chatflow_marks AS mark (mark_id, number) SELECT %(mark_id)s, %(mark)s FROM noted
        ON CONFLICT (mark_id) DO UPDATE SET
            number = CASE WHEN mark.number < excluded.number THEN excluded.number END, marked_at = now()
    )
    SELECT step FROM noted
"""
"""A line of a journal; none where the fence has changed."""

READ_JOURNAL: Final[LiteralString] = """
    SELECT step, entry_json FROM chatflow_journal WHERE turn_id = %(turn_id)s ORDER BY step
"""
"""A journal, in order."""

MOVE_JOURNAL: Final[LiteralString] = "UPDATE chatflow_journal SET turn_id = %(new)s WHERE turn_id = %(old)s"
"""The journal of a message that takes a new place."""

DROP_JOURNAL: Final[LiteralString] = "DELETE FROM chatflow_journal WHERE turn_id = %(turn_id)s"
"""The journal of a message that was given up."""

PURGE_TURNS: Final[LiteralString] = """
    DELETE FROM chatflow_turns WHERE turn_id = ANY(ARRAY(
        SELECT turn_id FROM chatflow_turns
        WHERE ended_at IS NOT NULL AND ended_at < %(expired_before)s ORDER BY ended_at LIMIT %(limit)s
        FOR UPDATE SKIP LOCKED
    ))
"""
"""A slice of the rows that left the line longer ago than ids are remembered."""
