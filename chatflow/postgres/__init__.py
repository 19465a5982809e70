"""Conversations in a PostgreSQL database; needs the extra ``postgres``."""

from chatflow.postgres.store import PostgresSessionStore

__all__ = ["PostgresSessionStore"]
