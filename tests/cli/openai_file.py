"""Files as openai-agents' SQLiteSession writes them, by its documented schema."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path
from typing import Any, Final

SCHEMA: Final = """
    PRAGMA journal_mode=WAL;
    CREATE TABLE IF NOT EXISTS agent_sessions (
        session_id TEXT PRIMARY KEY,
        created_at TIMESTAMP DEFAULT CURRENT_TIMESTAMP,
        updated_at TIMESTAMP DEFAULT CURRENT_TIMESTAMP
    );
    CREATE TABLE IF NOT EXISTS agent_messages (
        id INTEGER PRIMARY KEY AUTOINCREMENT,
        session_id TEXT NOT NULL,
        message_data TEXT NOT NULL,
        created_at TIMESTAMP DEFAULT CURRENT_TIMESTAMP,
        FOREIGN KEY (session_id) REFERENCES agent_sessions (session_id) ON DELETE CASCADE
    );
    CREATE INDEX IF NOT EXISTS idx_agent_messages_session_id ON agent_messages (session_id, id);
"""

BRANCHES: Final = """
    CREATE TABLE message_structure (
        id INTEGER PRIMARY KEY AUTOINCREMENT,
        session_id TEXT,
        message_id INTEGER,
        branch_id TEXT NOT NULL DEFAULT 'main'
    )
"""

ORDER_404: Final[list[Any]] = [
    {"content": "Where is order 404?", "role": "user"},
    {"id": "rs_1", "summary": [], "type": "reasoning", "encrypted_content": "abc"},
    {
        "arguments": '{"order_id": "404"}',
        "call_id": "call_1",
        "name": "check",
        "type": "function_call",
        "id": "fc_1",
        "status": "completed",
    },
    {"call_id": "call_1", "output": "in transit", "type": "function_call_output"},
    {
        "id": "msg_1",
        "content": [{"annotations": [], "text": "It comes tomorrow.", "type": "output_text"}],
        "role": "assistant",
        "status": "completed",
        "type": "message",
    },
]
"""A run with a tool, as openai-agents 0.24.0 has stored it."""


def write(path: Path, session_id: Any, items: Iterable[Any], *, created_at: Any = "2026-03-01 10:00:00") -> Path:
    """Add a session with these items; text is stored as it is, and anything else as JSON."""
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.executescript(SCHEMA)
        connection.execute("INSERT OR IGNORE INTO agent_sessions (session_id) VALUES (?)", (session_id,))
        for item in items:
            data = item if isinstance(item, str | bytes) else json.dumps(item)
            connection.execute(
                "INSERT INTO agent_messages (session_id, message_data, created_at) VALUES (?, ?, ?)",
                (session_id, data, created_at),
            )
    return path
