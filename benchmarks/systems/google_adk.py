"""google-adk: a new connection and a transaction for each event."""

from __future__ import annotations

import sqlite3
import time
from contextlib import closing
from pathlib import Path
from typing import Any, Final

from google.adk.events.event import Event
from google.adk.sessions.base_session_service import GetSessionConfig
from google.adk.sessions.sqlite_session_service import SqliteSessionService
from google.genai import types

from benchmarks.conversation import AGENT, ANSWER, FOUND, MESSAGES, QUESTION, TOOL, WINDOW, name_of
from benchmarks.systems.copying import BUSY_SECONDS, CopyingSystem

_WHOSE: Final = {"app_name": "benchmark", "user_id": "somebody"}


class GoogleAdk(CopyingSystem):
    """What its runner does: `append_event` for each event of the turn. It never drops any."""

    tables = (("sessions", "id"), ("events", "session_id"))

    def __init__(self, folder: Path, window: int = WINDOW) -> None:
        super().__init__(folder, window)
        self._service = SqliteSessionService(str(self.path))
        self._sessions: dict[int, Any] = {}
        self._calls = 0

    async def begin(self, name: str, turns: int) -> None:
        """Its rows as it writes them; its own way takes a second for 40 turns."""
        await self._service.create_session(session_id=name, **_WHOSE)
        rows = [
            (
                event.id,
                *_WHOSE.values(),
                name,
                event.invocation_id,
                event.timestamp,
                event.model_dump_json(exclude_none=True),
            )
            for _ in range(turns)
            for event in self._events()
        ]
        with closing(sqlite3.connect(self.path, timeout=BUSY_SECONDS)) as connection, connection:
            connection.executemany("INSERT INTO events VALUES (?, ?, ?, ?, ?, ?, ?)", rows)

    async def attach(self, conversation: int) -> None:
        """The session object, without the events it has not been asked for."""
        self._sessions[conversation] = await self._service.get_session(
            session_id=name_of(conversation), config=GetSessionConfig(num_recent_events=0), **_WHOSE
        )

    def _events(self) -> list[Any]:
        self._calls += 1
        call, invocation = f"call_{self._calls}", f"invocation-{self._calls}"
        parts = (
            ("user", "user", types.Part(text=QUESTION)),
            (
                AGENT,
                "model",
                types.Part(function_call=types.FunctionCall(id=call, name=TOOL, args={"order": self._calls})),
            ),
            (
                AGENT,
                "user",
                types.Part(function_response=types.FunctionResponse(id=call, name=TOOL, response=FOUND)),
            ),
            (AGENT, "model", types.Part(text=ANSWER)),
        )
        return [
            Event(
                id=Event.new_id(),
                invocation_id=invocation,
                author=author,
                content=types.Content(role=role, parts=[part]),
            )
            for author, role, part in parts
        ]

    async def turn(self, conversation: int, message_id: str | None = None) -> float:
        """Each event in a transaction of its own, by a connection of its own."""
        session = self._sessions[conversation]
        began = time.perf_counter()
        for event in self._events():
            await self._service.append_event(session, event)
        return began

    async def load(self, conversation: int) -> int:
        """The last events; it keeps none."""
        session = await self._service.get_session(
            session_id=name_of(conversation),
            config=GetSessionConfig(num_recent_events=MESSAGES * self.window),
            **_WHOSE,
        )
        length = 0
        for event in session.events:
            for part in event.content.parts:
                length += len(part.text or "")
                if part.function_call is not None:
                    length += len(part.function_call.args)
                if part.function_response is not None:
                    length += len(part.function_response.response)
        return length

    async def page(self, after: Any) -> tuple[int, Any]:
        """All at once: it knows no pages."""
        return len((await self._service.list_sessions(**_WHOSE)).sessions), None

    async def close(self) -> None:
        """Nothing is open."""
        await self._service.close()
