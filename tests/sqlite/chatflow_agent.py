"""Files of chatflow-agent 0.3.4: one that it has written, kept as a dump, and how to write one row by row.

``python -m tests.sqlite.chatflow_agent`` prints the dump anew, where chatflow-agent is installed.
"""

from __future__ import annotations

import datetime as dt
import json
import sqlite3
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping
from contextlib import closing
from importlib import import_module
from pathlib import Path
from typing import Any, Final

import attrs

from chatflow.core.messages import Message
from chatflow.core.values import thaw

DUMP: Final = Path(__file__).with_name("schemas") / "chatflow_agent_0_3_4.sql"


def old_file(path: Path) -> Path:
    """The file that chatflow-agent has written."""
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA journal_mode=WAL")
        connection.executescript(DUMP.read_text(encoding="utf-8"))
    return path


def empty_file(path: Path) -> Path:
    """The same with nothing in it."""
    old_file(path)
    with closing(sqlite3.connect(path)) as connection, connection:
        for table in ("sessions", "messages", "processed_messages"):
            connection.execute(f"DELETE FROM chatflow_{table}")
    return path


def add(path: Path, table: str, **columns: Any) -> None:
    """Add a row to one of its tables."""
    add_all(path, table, [columns])


def add_all(path: Path, table: str, rows: Iterable[Mapping[str, Any]]) -> None:
    """Add rows to one of its tables."""
    with closing(sqlite3.connect(path)) as connection, connection:
        for row in rows:
            marks = ", ".join("?" * len(row))
            connection.execute(f"INSERT INTO chatflow_{table} ({', '.join(row)}) VALUES ({marks})", [*row.values()])


def add_messages(path: Path, session_id: str, texts: Iterable[str]) -> None:
    """Add messages, given as JSON."""
    rows = [{"session_id": session_id, "role": "user", "message_json": text} for text in texts]
    add_all(path, "messages", rows)


def written(message: Message) -> str:
    """*message*, of plain values, as chatflow-agent writes it: with nulls for what is not there."""
    calls = [{"id": each.id, "name": each.name, "args": thaw(each.args)} for each in message.tool_calls]
    results = [{**attrs.asdict(each, recurse=False), "content": thaw(each.content)} for each in message.tool_results]
    return json.dumps(
        {
            "role": message.role,
            "content": message.content,
            "tool_calls": calls or None,
            "tool_results": results or None,
            "timestamp": message.timestamp.isoformat().replace("+00:00", "Z"),
        }
    )


def dump(path: Path) -> str:
    """All that a file holds."""
    with closing(sqlite3.connect(path)) as connection:
        return "\n".join(connection.iterdump())


# --- the package itself, which only the slow run has -------------------------------------------------------------


def write_example(path: Path) -> None:
    """Let chatflow-agent write a file with all that it can leave in one."""
    peer: Any = import_module("chatflow_agent")
    role = peer.Role
    store = peer.SQLiteSessionStore(path)
    support, billing = peer.Agent("Support", "Help."), peer.Agent("Billing", "Bill.")

    def say(session: Any, who: Any, content: str | None = None, **fields: Any) -> None:
        moment = dt.datetime(2026, 3, 1, 12, 0, len(session.history), 250_000, tzinfo=dt.UTC)
        session.add_message(peer.Message(role=who, content=content, timestamp=moment, **fields))

    def call(*call_ids: str) -> list[Any]:
        return [peer.ToolCall(id=each, name="look", args={"of": each, "deep": {"$chatflow": 1}}) for each in call_ids]

    def result(*call_ids: str) -> list[Any]:
        return [peer.ToolResult(tool_call_id=each, name="look", content={"$chatflow": [1, None]}) for each in call_ids]

    whole = store.get_or_create("whole", support, {"channel": "whatsapp", "nested": {"ñ": [1, 2.5, None]}})
    say(whole, role.SYSTEM, "Be brief.")
    say(whole, role.USER, "¿Dónde está 404?")
    say(whole, role.MODEL, tool_calls=call("a", "b"))
    say(whole, role.TOOL, tool_results=result("a", "b"))
    say(whole, role.MODEL, "Mañana.")
    whole.set_active_agent(billing)
    say(whole, role.USER, "Gracias")

    broken = store.get_or_create("broken", support)
    say(broken, role.MODEL, "Hello first")
    say(broken, role.TOOL, tool_results=result("x"))
    say(broken, role.USER, "hello")
    say(broken, role.TOOL, tool_results=result("never called"))
    say(broken, role.MODEL, tool_calls=call("c", "unanswered"))
    say(broken, role.TOOL, tool_results=[*result("c"), *result("nor this")])
    say(broken, role.SYSTEM, "Late.")
    say(broken, role.TOOL, "a tool without results")

    store.get_or_create("empty", billing, {"vip": True})
    gone = store.get_or_create("gone", support)
    store.delete("gone")
    say(gone, role.USER, "too late")
    for each in ("wamid.1", "wamid.2"):
        store.record_processed_message(each)


def writes_of(path: Path) -> dict[str, Callable[[], object]]:
    """All that chatflow-agent can write, from objects that are in use on the file *path* already."""
    peer: Any = import_module("chatflow_agent")
    agent = peer.Agent("Support", "Help.")
    store = peer.SQLiteSessionStore(path)
    session = store.get_or_create("whole", agent)
    message = peer.Message(role=peer.Role.USER, content="hello")
    return {
        "start": lambda: peer.SQLiteSessionStore(path),
        "get_or_create": lambda: store.get_or_create("whole", agent),
        "get_or_create a new one": lambda: store.get_or_create("new", agent),
        "get": lambda: store.get("whole"),
        "add_message": lambda: session.add_message(message),
        "rollback_to": lambda: session.rollback_to(0),
        "set_active_agent": lambda: session.set_active_agent(agent),
        "clear_history": session.clear_history,
        "record_processed_message": lambda: store.record_processed_message("wamid.3"),
        "delete": lambda: store.delete("whole"),
        "clear": store.clear,
    }


def main() -> None:
    """Print the dump."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "old.db"
        write_example(path)
        sys.stdout.write(f"PRAGMA user_version = 1;\n{dump(path)}\n")


if __name__ == "__main__":
    main()
