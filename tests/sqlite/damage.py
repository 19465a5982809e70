"""Ways to damage a file, from outside, and what a file holds."""

from __future__ import annotations

import re
import sqlite3
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import attrs

from chatflow.core.messages import Message, Role, ToolCall, ToolResult
from chatflow.engines.scripted import ScriptedEngine
from chatflow.runner import Runner
from chatflow.sqlite.store import SQLiteSessionStore
from tests.sqlite.files import SUPPORT, connect, say

TABLES: Final = (
    *("chatflow_sessions", "chatflow_messages", "chatflow_processed_messages"),
    *("chatflow_turns", "chatflow_journal", "chatflow_set_aside"),
)
S: Final = "(SELECT session_key FROM chatflow_sessions WHERE session_id = 's')"


def calls(*call_ids: str) -> Message:
    """A model's message that calls."""
    return Message(Role.MODEL, tool_calls=[ToolCall(id=each, name="look") for each in call_ids])


def results(*call_ids: str) -> Message:
    """A tool's message that answers."""
    return Message(Role.TOOL, tool_results=[ToolResult(tool_call_id=each, name="look", content=1) for each in call_ids])


async def fill(path: Path) -> None:
    """Two conversations: "other", and "s", whose messages stand at the places named here."""
    async with SQLiteSessionStore(path) as store:
        await say(await store.get_or_create("other", SUPPORT, {"a": 1}), "hello")
        await Runner(SUPPORT, store, ScriptedEngine(["hi"])).run_async("other", "hello", message_id="m1")
        session = await store.get_or_create("s", SUPPORT, {"a": 1})
        await session.add_message(Message(Role.SYSTEM, "be brief"))
        await session.add_message(Message(Role.SYSTEM, "be kind"))
        session.state["b"] = 2
        await session.add_message(Message(Role.USER, "zero"))  # 0
        await session.add_message(calls("one", "also one"))  # 1
        await session.add_message(results("one", "also one"))  # 2
        await session.add_message(Message(Role.MODEL, "three"))  # 3
        await session.add_message(Message(Role.USER, "four"))  # 4
        await session.add_message(Message(Role.MODEL, "five"))  # 5


@contextmanager
def unguarded(path: Path) -> Iterator[sqlite3.Connection]:
    """Let nothing that guards the tables look on meanwhile: what damages a file asks no check and fires no trigger."""
    with connect(path) as connection:
        triggers = connection.execute("SELECT name, sql FROM sqlite_master WHERE type = 'trigger'").fetchall()
        for name, _ in triggers:
            connection.execute(f"DROP TRIGGER {name}")
        connection.execute("PRAGMA ignore_check_constraints=ON")
        yield connection
        for _, text in triggers:
            connection.execute(text)


@contextmanager
def loosely(path: Path) -> Iterator[sqlite3.Connection]:
    """Let tables take values of any type meanwhile, as a damaged page may hold them."""
    with connect(path) as connection:
        schema = connection.execute("SELECT name, sql FROM sqlite_master WHERE sql LIKE '%STRICT%'").fetchall()
        version = connection.execute("PRAGMA schema_version").fetchone()[0]
        connection.execute("PRAGMA writable_schema=ON")
        for name, sql in schema:
            weak = re.sub("STRICT, |STRICT|(?<!IS) NOT NULL", "", sql).replace(" TEXT", " BLOB")
            weak = re.sub("(version|place|max_turns|step) INTEGER", r"\1 BLOB", weak)
            connection.execute("UPDATE sqlite_master SET sql = ? WHERE name = ?", (weak, name))
        connection.execute(f"PRAGMA schema_version={version + 1}")
    with unguarded(path) as connection:
        yield connection
        connection.execute("PRAGMA writable_schema=ON")
        for name, sql in schema:
            connection.execute("UPDATE sqlite_master SET sql = ? WHERE name = ?", (sql, name))
        connection.execute(f"PRAGMA schema_version={version + 2}")


Damaging = Callable[[Path], None]


def sql(*statements: str) -> Damaging:
    """Damage done by statements, of which each changes something."""

    def damage(path: Path) -> None:
        with unguarded(path) as connection:
            for statement in statements:
                assert connection.execute(statement).rowcount > 0, statement

    return damage


def loose(*statements: str) -> Damaging:
    """Damage done by statements that put values of wrong types."""

    def damage(path: Path) -> None:
        with loosely(path) as connection:
            for statement in statements:
                assert connection.execute(statement).rowcount > 0, statement

    return damage


def empty_index(name: str) -> Damaging:
    """Make an index forget its rows, by a byte in its page."""

    def damage(path: Path) -> None:
        size, page = _page_of(path, name)
        with path.open("r+b") as file:
            file.seek((page - 1) * size + 3)
            file.write(b"\0\0")

    return damage


def _page_of(path: Path, name: str) -> tuple[int, int]:
    with connect(path) as connection:
        size = connection.execute("PRAGMA page_size").fetchone()[0]
        page = connection.execute("SELECT rootpage FROM sqlite_master WHERE name = ?", (name,)).fetchone()[0]
    return size, page


def smash(name: str) -> Damaging:
    """Make the first page of a table or index unreadable."""

    def damage(path: Path) -> None:
        size, page = _page_of(path, name)
        with path.open("r+b") as file:
            file.seek((page - 1) * size)
            file.write(b"\xff" * 64)

    return damage


def message(place: int, value: str) -> str:
    """The statement that writes *value* into a message's row."""
    return f"UPDATE chatflow_messages SET message_json = {value} WHERE session_key = {S} AND place = {place}"


def column(name: str, value: str) -> str:
    """The statement that writes *value* into a column of the conversation's row."""
    return f"UPDATE chatflow_sessions SET {name} = {value} WHERE session_id = 's'"


def lost(*places: int) -> Damaging:
    """Rows that are gone."""
    return sql(*(f"DELETE FROM chatflow_messages WHERE session_key = {S} AND place = {place}" for place in places))


NO_UTF8: Final = "CAST(x'63ff66' AS TEXT)"
SYSTEMS: Final = ["be brief", "be kind"]
ALL: Final = [*SYSTEMS, "zero", "one,also one", "one,also one", "three", "four", "five"]


@attrs.frozen
class Damage:
    """What is done to a file, what `check` says of it, what `repair` does, and what the history then is."""

    damage: Damaging
    faults: tuple[tuple[str, str, str], ...]
    """Of each its kind, a part of its row, and a part of its reason."""
    actions: tuple[str, ...]
    history: list[str] | None = ALL
    """None, where the conversation is gone."""
    keeps_places: bool = True
    session_id: str = "s"


ANSWER: Final = "UPDATE chatflow_processed_messages SET"
MENDABLE: Final = {
    "message that is no JSON": Damage(
        sql(message(3, "'x'")),
        (("message", "place 3", "not JSON"),),
        ("set aside",),
        [each for each in ALL if each != "three"],
        keeps_places=False,
    ),
    "message that is no UTF-8": Damage(
        sql(message(3, NO_UTF8)),
        (("message", "place 3", "not text in UTF-8"),),
        ("set aside",),
        [each for each in ALL if each != "three"],
        keeps_places=False,
    ),
    "message that is bytes": Damage(
        loose(message(3, "x'7b7d'")),
        (("file", "the file", "non-TEXT value"), ("message", "place 3", "not text but bytes")),
        ("set aside", "set aside"),
        [each for each in ALL if each != "three"],
        keeps_places=False,
    ),
    "message that is nothing": Damage(
        loose(message(5, "NULL")),
        (("file", "the file", "NULL value"), ("message", "place 5", "not text but nothing")),
        ("set aside", "set aside"),
        ALL[:-1],
        keeps_places=False,
    ),
    "message of another type": Damage(
        sql(message(3, "'[]'")),
        (("message", "place 3", "must be an object"),),
        ("set aside",),
        [each for each in ALL if each != "three"],
        keeps_places=False,
    ),
    "system message": Damage(
        sql(f"UPDATE chatflow_messages SET message_json = 'x' WHERE session_key = {S} AND place = -(1 << 62)"),
        (("message", "place -4611686018427387904", "not JSON"),),
        ("set aside",),
        ALL[1:],
        keeps_places=False,
    ),
    "call that can't be read": Damage(
        sql(message(1, "'x'")),
        (("message", "place 1", "not JSON"), ("result", "place 2", "names the call 'one'")),
        ("set aside", "set aside"),
        [*SYSTEMS, "zero", "three", "four", "five"],
        keeps_places=False,
    ),
    "one of two calls gone": Damage(
        sql(
            message(
                1, """'{"role":"model","tool_calls":[{"id":"one","name":"x","args":{}}],"timestamp":"2026-01-01"}'"""
            )
        ),
        (("result", "place 2", "names the call 'also one'"),),
        ("set aside",),
        [*SYSTEMS, "zero", "one", "one", "three", "four", "five"],
        keeps_places=False,
    ),
    "first user message that can't be read": Damage(
        sql(message(0, "'x'")),
        (
            ("message", "place 0", "not JSON"),
            ("front", "place 1", "before the first user message"),
            ("front", "place 2", "before the first user message"),
            ("front", "place 3", "before the first user message"),
        ),
        ("set aside",) * 4,
        [*SYSTEMS, "four", "five"],
    ),
    "first user message gone": Damage(
        lost(0),
        (
            ("front", "place 1", "before the first user message"),
            ("front", "place 2", "before the first user message"),
            ("front", "place 3", "before the first user message"),
        ),
        ("set aside",) * 3,
        [*SYSTEMS, "four", "five"],
    ),
    "all user messages gone": Damage(
        lost(0, 4),
        (("gap", "place 4", "missing"), *((("front", f"place {place}", "before the first")) for place in (1, 2, 3, 5))),
        ("moved", *("set aside",) * 4),
        SYSTEMS,
        keeps_places=False,
    ),
    "missing row": Damage(
        lost(3),
        (("gap", "place 3", "missing"),),
        ("moved",),
        [each for each in ALL if each != "three"],
        keeps_places=False,
    ),
    "missing rows": Damage(
        lost(2, 3),
        (("gap", "place 2 to 3", "missing"),),
        ("moved",),
        [*SYSTEMS, "zero", "one,also one", "four", "five"],
        keeps_places=False,
    ),
    "gap and front": Damage(
        lost(0, 2),
        (("gap", "place 2", "missing"), ("front", "place 1", "before"), ("front", "place 3", "before")),
        ("moved", "set aside", "set aside"),
        [*SYSTEMS, "four", "five"],
    ),
    "missing system message": Damage(
        sql(
            f"UPDATE chatflow_messages SET place = place + 1 WHERE session_key = {S} AND place = 1 - (1 << 62)",
        ),
        (("gap", "place -4611686018427387903", "missing"),),
        ("moved",),
        keeps_places=False,
    ),
    "system message among the others": Damage(
        sql(f"UPDATE chatflow_messages SET place = 6 WHERE session_key = {S} AND place = 1 - (1 << 62)"),
        (("place", "place 6", "a system message stands among the other messages"),),
        ("moved",),
        keeps_places=False,
    ),
    "user message among the system messages": Damage(
        sql(f"UPDATE chatflow_messages SET place = 2 - (1 << 62) WHERE session_key = {S} AND place = 0"),
        (("place", "place -4611686018427387902", "a user message stands among the system messages"),),
        ("moved",),
        keeps_places=False,
    ),
    "only message among the system messages": Damage(
        sql(
            f"DELETE FROM chatflow_messages WHERE session_key = {S} AND (place > 0 OR place < 0)",
            f"UPDATE chatflow_messages SET place = -(1 << 62) WHERE session_key = {S}",
        ),
        (("place", "place -4611686018427387904", "a user message stands among the system messages"),),
        ("moved",),
        ["zero"],
        keeps_places=False,
    ),
    "stray row far away": Damage(
        sql(f"UPDATE chatflow_messages SET place = 9223372036854775807 WHERE session_key = {S} AND place = 5"),
        (("gap", "place 5 to 9223372036854775806", "missing"),),
        ("moved",),
        keeps_places=False,
    ),
    "place that is no number": Damage(
        loose(f"UPDATE chatflow_messages SET place = 'x' WHERE session_key = {S} AND place = 5"),
        (("file", "the file", "non-INTEGER value"), ("message", "place x", "not a number")),
        ("set aside", "set aside"),
        ALL[:-1],
        keeps_places=False,
    ),
    "swapped call and result": Damage(
        sql(
            f"UPDATE chatflow_messages SET place = 100 WHERE session_key = {S} AND place = 1",
            f"UPDATE chatflow_messages SET place = 1 WHERE session_key = {S} AND place = 2",
            f"UPDATE chatflow_messages SET place = 2 WHERE session_key = {S} AND place = 100",
        ),
        (("result", "place 1", "names the call 'one'"),),
        ("set aside",),
        [*SYSTEMS, "zero", "one,also one", "three", "four", "five"],
        keeps_places=False,
    ),
    "metadata": Damage(sql(column("metadata_json", "'{'")), (("session", "metadata_json", "not JSON"),), ("replaced",)),
    "state": Damage(sql(column("state_json", "'[1]'")), (("session", "state_json", "mapping"),), ("replaced",)),
    "state that is no UTF-8": Damage(
        sql(column("state_json", NO_UTF8)), (("session", "state_json", "not text in UTF-8"),), ("replaced",)
    ),
    "agent that is no UTF-8": Damage(
        sql(column("active_agent_name", NO_UTF8)), (("session", "active_agent_name", "UTF-8"),), ("replaced",)
    ),
    "agent without a name": Damage(
        sql(column("active_agent_name", "''")), (("session", "active_agent_name", "empty"),), ("replaced",)
    ),
    "number of turns": Damage(sql(column("max_turns", "0")), (("session", "max_turns", "at least 1"),), ("replaced",)),
    "number of turns that is text": Damage(
        loose(column("max_turns", "'many'")),
        (("file", "the file", "non-INTEGER value"), ("session", "max_turns", "must be an integer")),
        ("replaced", "set aside"),
    ),
    "moments": Damage(
        sql(column("created_at", "'yesterday'"), column("updated_at", "'today'")),
        (
            ("file", "the file", "CHECK constraint failed in chatflow_sessions"),
            ("session", "updated_at", "no moment"),
            ("session", "created_at", "no moment"),
        ),
        ("replaced", "replaced", "set aside"),
    ),
    "one moment": Damage(
        sql(column("created_at", "'yesterday'")), (("session", "created_at", "no moment"),), ("replaced",)
    ),
    "version": Damage(
        loose(column("version", "'x'")),
        (("file", "the file", "non-INTEGER value"), ("session", "version", "not a number")),
        ("replaced", "set aside"),
    ),
    "id that is no UTF-8": Damage(
        sql(column("session_id", NO_UTF8)),
        (("session", "session_id", "repair() calls it 'c\ufffdf (session_key 2)'"),),
        ("replaced",),
        session_id="c\ufffdf (session_key 2)",
    ),
    "id that is taken once it can be read": Damage(
        sql(
            "UPDATE chatflow_sessions SET session_id = 'c\ufffdf (session_key 2)' WHERE session_id = 'other'",
            column("session_id", NO_UTF8),
        ),
        (("session", "session_id", "repair() calls it 'c\ufffdf (session_key 2)*'"),),
        ("replaced",),
        session_id="c\ufffdf (session_key 2)*",
    ),
    "id that is empty": Damage(
        sql(column("session_id", "''")),
        (("session", "session_id", "it is empty; repair() calls it '(session_key 2)'"),),
        ("replaced",),
        session_id="(session_key 2)",
    ),
    "owner that is no UTF-8": Damage(
        sql(column("owner", NO_UTF8)),
        (("session", "owner", "repair() calls it 'c\ufffdf (session_key 2)'"),),
        ("replaced",),
        None,
    ),
    "answer": Damage(
        sql(f"{ANSWER} response_json = 'x'"), (("answer", "'m1', response_json", "not JSON"),), ("replaced",)
    ),
    "answer, digest and moment": Damage(
        sql(f"{ANSWER} response_json = {NO_UTF8}, digest = {NO_UTF8}, processed_at = 'x'"),
        (("answer", "processed_at", "moment"), ("answer", "digest", "UTF-8"), ("answer", "response_json", "UTF-8")),
        ("replaced",) * 3,
    ),
    "message id that is no UTF-8": Damage(
        sql(f"{ANSWER} message_id = {NO_UTF8}"), (("answer", "c\ufffdf", "its key is not text"),), ("set aside",)
    ),
    "session gone": Damage(
        sql("DELETE FROM chatflow_sessions WHERE session_id = 's'"),
        tuple(("reference", f"session_key 2, place {place}", "does not exist") for place in ("-46", "-46", *"012345")),
        ("set aside",) * 8,
        None,
    ),
    "turn without a session": Damage(
        sql(
            """
            INSERT INTO chatflow_turns (
                turn_id, session_key, state, holder, attempt, attempts, lease_seconds, accepted, agent_name, queued_at
            )
            VALUES (7, 99, 'running', 'somebody', 1, 1, 10, 0, 'Support', 'now')
            """
        ),
        (("reference", "chatflow_turns, turn_id 7", "does not exist"),),
        ("set aside",),
    ),
    "index": Damage(
        empty_index("chatflow_sessions_by_commit"),
        (
            ("file", "the file", "Fragmentation"),
            ("file", "index chatflow_sessions_by_commit", "row 1 missing"),
            ("file", "index chatflow_sessions_by_commit", "row 2 missing"),
            ("file", "index chatflow_sessions_by_commit", "wrong # of entries"),
        ),
        ("reindexed",) * 4,
    ),
}
"""Damage of which nothing is left after a repair, each to the file that `fill` makes."""


def holds(path: Path) -> dict[str, list[Any]]:
    """All rows of all our tables, with the types and bytes of what they hold."""
    found = {}
    with connect(path) as connection:
        connection.text_factory = bytes
        for table in TABLES:
            found[table] = connection.execute(f"SELECT * FROM {table} ORDER BY 1, 2").fetchall()
    return found


def messages_in(path: Path) -> Counter[Any]:
    """The texts of all messages, wherever they stand."""
    return Counter(text for *_, text in holds(path)["chatflow_messages"])


def messages_set_aside(path: Path) -> Counter[Any]:
    """The texts of all messages that were set aside."""
    rows = holds(path)["chatflow_set_aside"]
    return Counter(content for _, _, _, source, content, *_ in rows if source.startswith(b"chatflow_messages"))


def smash_page_with(marker: str) -> Damaging:
    """Make every page unreadable on which *marker* stands, and from which no other pages are found."""

    def damage(path: Path) -> None:
        with connect(path) as connection:
            size = connection.execute("PRAGMA page_size").fetchone()[0]
        content = bytearray(path.read_bytes())
        for start in range(0, len(content), size):
            if content[start] == 10 and marker.encode() in content[start : start + size]:
                content[start : start + 64] = b"\xff" * 64
        path.write_bytes(content)

    return damage
