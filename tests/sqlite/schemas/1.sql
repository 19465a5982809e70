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
            version INTEGER NOT NULL UNIQUE,
            created_at TEXT NOT NULL,
            updated_at TEXT NOT NULL,
            UNIQUE (owner, session_id)
        ) STRICT
        ;
CREATE INDEX chatflow_sessions_by_commit ON chatflow_sessions (owner, version);
CREATE TABLE chatflow_messages (
            session_key INTEGER NOT NULL REFERENCES chatflow_sessions (session_key) ON DELETE CASCADE,
            place INTEGER NOT NULL,
            message_json TEXT NOT NULL,
            PRIMARY KEY (session_key, place)
        ) STRICT, WITHOUT ROWID
        ;
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
            state TEXT NOT NULL CHECK (state IN ('queued', 'running')),
            holder TEXT NOT NULL,
            attempt INTEGER NOT NULL,
            agent_name TEXT NOT NULL,
            message_id TEXT,
            digest TEXT,
            parent INTEGER,
            queued_at TEXT NOT NULL
        ) STRICT
        ;
CREATE INDEX chatflow_turns_in_line ON chatflow_turns (session_key);
CREATE UNIQUE INDEX chatflow_turns_one_runs ON chatflow_turns (session_key) WHERE state = 'running';
CREATE UNIQUE INDEX chatflow_turns_one_a_message ON chatflow_turns (session_key, message_id)
        WHERE message_id IS NOT NULL
        ;
CREATE INDEX chatflow_turns_by_parent ON chatflow_turns (parent) WHERE parent IS NOT NULL;
CREATE TABLE chatflow_set_aside (
            set_aside_id INTEGER PRIMARY KEY,
            owner TEXT NOT NULL,
            session_id TEXT NOT NULL,
            source TEXT NOT NULL,
            content ANY,
            reason TEXT NOT NULL,
            set_aside_at TEXT NOT NULL
        ) STRICT
        ;
CREATE INDEX chatflow_set_aside_by_session ON chatflow_set_aside (owner, session_id);
