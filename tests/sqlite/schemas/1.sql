CREATE TABLE chatflow_meta (
            key TEXT PRIMARY KEY,
            value TEXT NOT NULL
        ) STRICT, WITHOUT ROWID
        ;
CREATE TABLE chatflow_sessions (
            session_key INTEGER PRIMARY KEY AUTOINCREMENT,
            owner TEXT NOT NULL DEFAULT '',
            session_id TEXT NOT NULL,
            active_agent_name TEXT NOT NULL,
            metadata_json TEXT NOT NULL DEFAULT '{}',
            state_json TEXT NOT NULL DEFAULT '{}',
            max_turns INTEGER,
            service_json TEXT,
            service_key TEXT,
            spent_json TEXT,
            expires_after REAL,
            expires_at TEXT,
            version INTEGER NOT NULL UNIQUE,
            created_at TEXT NOT NULL,
            updated_at TEXT NOT NULL CONSTRAINT "chatflow-agent can no longer write to this file"
                CHECK (updated_at GLOB '????-??-??T*'),
            UNIQUE (owner, session_id)
        ) STRICT
        ;
CREATE INDEX chatflow_sessions_by_commit ON chatflow_sessions (owner, version);
CREATE INDEX chatflow_sessions_by_service ON chatflow_sessions (owner, service_key, version)
        WHERE service_key IS NOT NULL
        ;
CREATE INDEX chatflow_sessions_by_expiry ON chatflow_sessions (owner, expires_at)
        WHERE expires_at IS NOT NULL
        ;
CREATE INDEX chatflow_sessions_expiring ON chatflow_sessions (expires_at) WHERE expires_at IS NOT NULL;
CREATE TABLE chatflow_messages (
            session_key INTEGER NOT NULL REFERENCES chatflow_sessions (session_key) ON DELETE CASCADE,
            place INTEGER NOT NULL,
            message_json TEXT NOT NULL,
            PRIMARY KEY (session_key, place)
        ) STRICT, WITHOUT ROWID
        ;
CREATE TRIGGER chatflow_sessions_deleting BEFORE DELETE ON chatflow_sessions BEGIN
            INSERT OR IGNORE INTO chatflow_messages (session_key, place, message_json)
            VALUES (OLD.session_key, 9223372036854775807, '');
        END;
CREATE TRIGGER chatflow_sessions_deleted AFTER DELETE ON chatflow_sessions
        WHEN EXISTS (SELECT 1 FROM chatflow_messages WHERE session_key = OLD.session_key) BEGIN
            SELECT RAISE(ABORT, 'foreign keys are off: PRAGMA foreign_keys=ON makes messages go with their session');
        END;
CREATE TABLE chatflow_processed_messages (
            owner TEXT NOT NULL DEFAULT '',
            session_id TEXT NOT NULL,
            message_id TEXT NOT NULL,
            processed_at TEXT NOT NULL,
            digest TEXT,
            response_json TEXT,
            PRIMARY KEY (owner, session_id, message_id)
        ) STRICT, WITHOUT ROWID
        ;
CREATE INDEX chatflow_processed_by_age ON chatflow_processed_messages (processed_at);
CREATE TABLE chatflow_turns (
            turn_id INTEGER PRIMARY KEY AUTOINCREMENT,
            session_key INTEGER NOT NULL REFERENCES chatflow_sessions (session_key) ON DELETE CASCADE,
            state TEXT NOT NULL CHECK (
                state IN ('queued', 'running', 'accepted', 'interrupted', 'told', 'dead', 'answered')
            ),
            holder TEXT,
            attempt INTEGER NOT NULL,
            attempts INTEGER NOT NULL,
            beat INTEGER NOT NULL DEFAULT 0,
            lease_seconds REAL NOT NULL,
            accepted INTEGER NOT NULL,
            agent_name TEXT,
            message_id TEXT,
            digest TEXT,
            work_json TEXT,
            parent INTEGER,
            queued_at TEXT NOT NULL,
            ended_at TEXT,
            CHECK (holder IS NOT NULL OR state NOT IN ('queued', 'running'))
        ) STRICT
        ;
CREATE INDEX chatflow_turns_in_line ON chatflow_turns (session_key);
CREATE UNIQUE INDEX chatflow_turns_one_runs ON chatflow_turns (session_key) WHERE state = 'running';
CREATE UNIQUE INDEX chatflow_turns_one_a_message ON chatflow_turns (session_key, message_id)
        WHERE message_id IS NOT NULL
        ;
CREATE INDEX chatflow_turns_by_parent ON chatflow_turns (parent) WHERE parent IS NOT NULL;
CREATE INDEX chatflow_turns_held ON chatflow_turns (holder) WHERE holder IS NOT NULL;
CREATE INDEX chatflow_turns_at_hand ON chatflow_turns (agent_name, state) WHERE holder IS NULL;
CREATE INDEX chatflow_turns_by_end ON chatflow_turns (ended_at) WHERE ended_at IS NOT NULL;
CREATE TABLE chatflow_journal (
            turn_id INTEGER NOT NULL REFERENCES chatflow_turns (turn_id) ON DELETE CASCADE,
            step INTEGER NOT NULL,
            entry_json TEXT NOT NULL,
            PRIMARY KEY (turn_id, step)
        ) STRICT, WITHOUT ROWID
        ;
CREATE TABLE chatflow_set_aside (
            set_aside_id INTEGER PRIMARY KEY,
            owner TEXT NOT NULL DEFAULT '',
            session_id TEXT,
            source TEXT NOT NULL,
            content ANY,
            reason TEXT NOT NULL,
            set_aside_at TEXT NOT NULL
        ) STRICT
        ;
CREATE INDEX chatflow_set_aside_by_session ON chatflow_set_aside (owner, session_id);
