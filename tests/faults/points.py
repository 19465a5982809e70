"""Points at which a process kills or stops itself: before, within and after each step of a turn's row.

Functions of chatflow are wrapped from outside, so that it holds nothing for the sake of this. Each step is one
operation of the store and has five points:

- ``before``: on the event loop, nothing has been asked of the storage;
- ``begun``: on the writing thread, in the transaction, before the first statement;
- ``done``: after its last statement, before COMMIT;
- ``committed``: after COMMIT, before anybody was told;
- ``after``: back on the event loop.
"""

from __future__ import annotations

import functools
import os
import signal
import threading
from collections.abc import Awaitable, Callable
from types import ModuleType
from typing import Any, Final

from chatflow.sqlite import commit, database, operations, rows, schema, turns
from chatflow.sqlite.store import SQLiteSessionStore

_STEPS: Final[dict[str, tuple[ModuleType | type, str, str]]] = {
    "create": (operations, "create", "create_session"),
    "queue": (turns, "queue", "queue_turn"),
    "start": (turns, "start", "start_turn"),
    "journal": (turns, "write_journal", "write_journal"),
    "commit": (commit.WriteCommit, "__call__", "commit_turn"),
    "accept": (turns, "accept", "accept_turn"),
    "take": (turns, "take_work", "take_work"),
    "hand on": (turns, "end_answered", "end_answered"),
    "leave": (turns, "leave", "leave_turn"),
    "beat": (turns, "beat", "beat_turns"),
    "interrupt": (turns, "interrupt", "interrupt_turn"),
    "delete": (operations, "delete", "delete_session"),
}
_PHASES: Final = ("before", "begun", "done", "committed", "after")

POINTS: Final = (
    *(f"{step}: {phase}" for step in _STEPS for phase in _PHASES),
    *(f"open: {phase}" for phase in ("before", "done", "after")),
    *(f"release: {phase}" for phase in ("begun", "done")),
    *(
        f"{what}: {phase}"
        for what in ("model", "plain tool", "idempotent tool", "on_response")
        for phase in ("before", "after")
    ),
)
"""All there are. ``release`` frees what a process that is gone had in hand; ``open`` makes the tables of a new file."""

_armed: dict[str, int] = {}
_what = [signal.SIGKILL]
_ran = threading.local()


def hit(name: str) -> None:
    """The process has come to that point."""
    assert name in POINTS, name
    if name in _armed:
        _armed[name] -= 1
        if _armed[name] == 0:
            os.kill(os.getpid(), _what[0])


def arm(name: str, nth: int, *, stop: bool = False) -> None:
    """Kill this process when it comes to that point for the *nth* time, or *stop* it."""
    assert name in POINTS, name
    _what[0] = signal.SIGSTOP if stop else signal.SIGKILL
    _armed[name] = nth
    for step, (owner, function, method) in _STEPS.items():
        setattr(owner, function, _operation(step, getattr(owner, function)))
        setattr(SQLiteSessionStore, method, _primitive(step, getattr(SQLiteSessionStore, method)))
    database._deliver = _delivering(database._deliver)
    _surround(rows, "release", "release: begun", "release: done")
    _surround(schema, "release_the_gone", None, "open: done")
    _surround(database.Database, "_open_prepared", "open: before", "open: after")


def _surround(owner: ModuleType | type, name: str, before: str | None, after: str) -> None:
    function = getattr(owner, name)

    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if before is not None:
            hit(before)
        result = function(*args, **kwargs)
        hit(after)
        return result

    setattr(owner, name, wrapped)


def _operation(step: str, operation: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(operation)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        _ran.__dict__.setdefault("steps", set()).add(step)
        hit(f"{step}: begun")
        result = operation(*args, **kwargs)
        hit(f"{step}: done")
        return result

    return wrapped


def _delivering(deliver: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(deliver)
    def wrapped(group: Any) -> None:
        # On the thread that ran them, after COMMIT.
        steps: set[str] = _ran.__dict__.pop("steps", set())
        for step in sorted(steps):
            hit(f"{step}: committed")
        deliver(group)

    return wrapped


def _primitive(step: str, primitive: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    @functools.wraps(primitive)
    async def wrapped(*args: Any, **kwargs: Any) -> Any:
        hit(f"{step}: before")
        result = await primitive(*args, **kwargs)
        hit(f"{step}: after")
        return result

    return wrapped
