"""Conversations in a PostgreSQL database; needs the extra ``postgres``."""

try:
    from chatflow.postgres.store import PostgresSessionStore
except ModuleNotFoundError as error:
    if error.name != "psycopg":
        raise
    hint = 'psycopg is missing; what PostgreSQL needs: pip install "./chatflow[postgres]"'
    raise ModuleNotFoundError(hint, name=error.name) from error

__all__ = ["PostgresSessionStore"]
