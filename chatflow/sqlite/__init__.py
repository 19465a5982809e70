"""Conversations in an SQLite file or in memory."""

from chatflow.sqlite.store import SQLiteSessionStore

__all__ = ["SQLiteSessionStore"]
