"""The systems by name: which module has the class, and whose interpreter runs it. A new system is one line."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any, Final

import attrs

from benchmarks.conversation import WINDOW
from benchmarks.systems.base import System


@attrs.frozen
class Entry:
    """A system. Its class is imported only by the process that runs it."""

    title: str
    module: str
    class_name: str
    options: dict[str, Any] = attrs.field(factory=dict)
    package: str | None = None
    """What it is installed from, by the peers' interpreter; None for what runs by this one."""

    imports: str | None = None
    """The module that a program imports to use it."""

    on_server: bool = False
    """It keeps its conversations on the PostgreSQL server of the run."""

    lacks: dict[str, str] = attrs.field(factory=dict)
    """The themes that it can't take part in, and what its rows say there."""

    def make(self, folder: Path, window: int = WINDOW) -> System:
        """The system, over an empty folder."""
        kind = getattr(importlib.import_module(f"benchmarks.systems.{self.module}"), self.class_name)
        made: System = kind(folder, window, **self.options)
        return made


FLOOR: Final = "floor-full"
"""What others are divided by, in the same round."""

_NO_FILE: Final = {"disk": "keeps nothing on disk"}
_NO_IDS: Final = {"dedup": "keeps no message ids"}
_NO_LIST: Final = {"listing": "lists no conversations"}
_SDK: Final = "openai-agents"
SYSTEMS: Final[dict[str, Entry]] = {
    FLOOR: Entry("sqlite3 by hand, FULL (the floor)", "handwritten", "Handwritten", {"level": "FULL"}),
    "floor-normal": Entry("sqlite3 by hand, NORMAL", "handwritten", "Handwritten", {"level": "NORMAL"}),
    "floor-memory": Entry("sqlite3 by hand, in memory", "handwritten", "Handwritten", {"in_memory": True}),
    "sqlite-file": Entry("chatflow, file", "ours", "Chatflow", {"backend": "sqlite-file"}, imports="chatflow"),
    "no-places": Entry("chatflow, file, no place or beat", "no_places", "ChatflowWithoutPlaces"),
    "sqlite-memory": Entry('chatflow, ":memory:"', "ours", "Chatflow", {"backend": "sqlite-memory"}, lacks=_NO_FILE),
    "memory": Entry("chatflow, SessionStore", "ours", "Chatflow", {"backend": "memory"}, lacks=_NO_FILE),
    "chatflow-agent": Entry(
        "chatflow-agent", "chatflow_agent", "ChatflowAgent", package="chatflow-agent", imports="chatflow_agent"
    ),
    "openai-sqlite": Entry(
        "openai-agents SQLiteSession",
        "openai_agents",
        "SyncSessions",
        package=_SDK,
        imports="agents",
        lacks=_NO_IDS | _NO_LIST,
    ),
    "openai-async": Entry(
        "openai-agents AsyncSQLiteSession",
        "openai_agents",
        "AsyncSessions",
        package=_SDK,
        imports="agents.extensions.memory",
        lacks=_NO_IDS | _NO_LIST,
    ),
    "google-adk": Entry(
        "google-adk SqliteSessionService",
        "google_adk",
        "GoogleAdk",
        package="google-adk",
        imports="google.adk.sessions.sqlite_session_service",
        lacks=_NO_IDS,
    ),
    "langgraph": Entry(
        "langgraph AsyncSqliteSaver",
        "langgraph",
        "Langgraph",
        package="langgraph-checkpoint-sqlite",
        imports="langgraph.checkpoint.sqlite.aio",
        lacks=_NO_IDS | {"listing": "lists checkpoints, not conversations"},
    ),
    "agent-framework": Entry(
        "agent-framework FileHistoryProvider",
        "agent_framework",
        "AgentFramework",
        package="agent-framework-core",
        imports="agent_framework",
        lacks=_NO_IDS | _NO_LIST | {"store": "a file each: none notices the others"},
    ),
    "floor-postgres": Entry("PostgreSQL by hand", "by_psycopg", "HandwrittenOnServer", on_server=True),
    "postgres": Entry(
        "chatflow, PostgreSQL", "by_psycopg", "ChatflowOnServer", imports="chatflow.postgres", on_server=True
    ),
    "openai-sqlalchemy": Entry(
        "openai-agents SQLAlchemySession",
        "openai_sqlalchemy",
        "SqlAlchemySessions",
        package=_SDK,
        imports="agents.extensions.memory.sqlalchemy_session",
        on_server=True,
        lacks=_NO_IDS | _NO_LIST,
    ),
}
"""In the order of the tables."""

ON_SERVER: Final = tuple(name for name, entry in SYSTEMS.items() if entry.on_server)
PEERS: Final = tuple(name for name, entry in SYSTEMS.items() if entry.package is not None)
OURS: Final = ("sqlite-file", "sqlite-memory", "memory", "postgres")
ALL_BUT_VARIANTS: Final = (FLOOR, "floor-normal", *OURS, "floor-postgres", *PEERS)
"""Those that a table has unless its theme says otherwise."""
