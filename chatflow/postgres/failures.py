"""Failures: what an error of the driver means for an operation, and how it is told, with the server's own word for it.

A server gives each error a code, once it has let somebody in. Who does not get so far is only told why, in a sentence:
it is known by its words, where they are English, and is shown in any language.
"""

from __future__ import annotations

import re
from typing import Final

from chatflow.exceptions import StoreBusyError, StoreError, cut
from chatflow.postgres.connection import Connection, Error, OperationalError

_GONE: Final = ("08", "57P")
"""The connection failed, or the server closes it: it is going down, or just coming up."""

_FATAL: Final = ("FATAL", "PANIC")
"""Whatever the reason, the server closes the connection, and what was under way on it may have become anything."""

_PASSING: Final = frozenset({"40P01", "40001", "53300", "55P03", "25006"})
"""A deadlock, a transaction that met another one, no connection left, a lock that somebody holds, a server that only
lets one read."""

_UNDEFINED: Final = frozenset({"42P01", "3F000"})

# --- servers that let nobody in ---

_FULL: Final = re.compile("too many (clients|connections)|connection slots|no more connections allowed")
_UNSAFE: Final = re.compile("does not support SSL|SSL (connection is )?required|certificate")
_REFUSED: Final = re.compile(
    "authentication failed|pg_hba.conf|does not exist|no password supplied|no such (database|user)"
)
# These two are the client's own: of servers that do not fit target_session_attrs, and of a name that leads nowhere.
_READ_ONLY: Final = re.compile("session is read-only|server is in hot standby mode")
_UNKNOWN_HOST: Final = re.compile("failed to resolve host|could not translate host name")

_NO_CONNECTION: Final = "end some of its connections, or raise the limit, then try again"

_TOLD: Final = (
    (
        _UNSAFE,
        "client and server do not agree on TLS",
        "check sslmode and the certificates, here and at the server",
    ),
    (
        _REFUSED,
        "the server refuses the connection",
        "check the user, the password, the database's name and pg_hba.conf",
    ),
    (_READ_ONLY, "no server was found that may be written to", "look which of them is the primary"),
    (_UNKNOWN_HOST, "the host's name leads nowhere", "check the address"),
    (re.compile(""), "the server can't be reached, or has closed the connection", "look whether it runs"),
)
"""What is found in the sentence, what is wrong then, and what to do. The first that fits counts."""

_BEFORE_THE_WORD: Final = re.compile(
    r"(connection (failed|is bad): )?(connection to server .*? failed: )?((FATAL|ERROR): +)?"
)


def _said(error: Error) -> str:
    """The sentence, without the address before it and the guesses after it."""
    if not isinstance(error, OperationalError):
        # The driver's own, which may quote a value.
        return type(error).__name__
    return cut(_BEFORE_THE_WORD.sub("", str(error).partition("\n")[0], count=1), 200)


# --- what follows ---


def is_lost(error: Error, connection: Connection | None) -> bool:
    """Whether the connection is gone, or was never there."""
    state = error.sqlstate
    if state is not None:
        return state.startswith(_GONE) or error.diag.severity_nonlocalized in _FATAL
    if connection is None:
        text = str(error)
        return isinstance(error, OperationalError) and not (_REFUSED.search(text) or _UNSAFE.search(text))
    return isinstance(error, OperationalError) and not connection.is_usable


def is_worth_another_try(error: Error) -> bool:
    """Whether the same transaction may go through a moment later: it met another one, or a server without a place."""
    return error.sqlstate in _PASSING


def is_undefined(error: BaseException | None) -> bool:
    """Whether a table or a schema that a statement names is not there."""
    return isinstance(error, Error) and error.sqlstate in _UNDEFINED


def is_too_long(error: BaseException | None) -> bool:
    """Whether an index has no room for a value."""
    return isinstance(error, Error) and error.sqlstate == "54000"


def refused_value(error: BaseException | None) -> str | None:
    """Why the server can't keep a value that it was given; None for an error of another kind."""
    if isinstance(error, Error) and (error.sqlstate or "").startswith(("22", "23", "54")):
        return _primary(error)
    return None


_BUSY: Final[dict[str, str]] = {
    "53300": _NO_CONNECTION,
    "55P03": "find which transaction holds the lock (pg_blocking_pids), then try again",
    "57014": "find what it waited for or why it is slow, or raise the timeout, then try again",
}

_ADVICE: Final[dict[str, str]] = {
    "53100": "make room on the server's disk and try again",
    "53200": "the server lacks memory; look at its settings, then try again",
    "42501": "grant the user what it needs in the schema, and CREATE on the database when the tables are first made",
    "28P01": "check the user's name and password",
    "28000": "check how the server lets this user in (pg_hba.conf)",
    "3D000": "create the database first",
    "25006": "the server only lets one read; name the one that may be written to, as with"
    " target_session_attrs=read-write",
}


def word_of(error: Error) -> str | None:
    """What the server has said that its user has to see to, where it did: it may be away after that."""
    state = error.sqlstate or ""
    advice = _ADVICE.get(state)
    if error.diag.severity_nonlocalized == "PANIC" and not state.startswith("53"):
        # The same words mean something else there: it may not write its own files.
        advice = "the server has ended; look at its log"
    return None if advice is None else f"{_primary(error)} ({state}); {advice}"


def _primary(error: Error) -> str:
    return error.diag.message_primary or type(error).__name__


def translate(error: Error, name: str, waited_seconds: float) -> StoreError:
    """The driver's error in our words. It quotes neither values nor the address, which the driver's own may do."""
    state = error.sqlstate
    if state in _BUSY:
        reason = f"{_primary(error)} ({state}); {_BUSY[state]}"
        return StoreBusyError(store=name, waited_seconds=waited_seconds, reason=reason)
    if state is not None:
        told = word_of(error) or f"{_primary(error)} ({state}); nothing was written"
        return StoreError(f"store {name!r}: {told}", store=name)
    text, said = str(error), _said(error)
    if _FULL.search(text):
        return StoreBusyError(store=name, waited_seconds=waited_seconds, reason=f"{said}; {_NO_CONNECTION}")
    wrong, advice = next((wrong, advice) for pattern, wrong, advice in _TOLD if pattern.search(text))
    return StoreError(f"store {name!r}: {wrong}: {said}; {advice}", store=name)
