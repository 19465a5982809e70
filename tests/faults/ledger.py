"""What happened outside the database: one file that every process appends to, a line a fact.

A line is written by one call with O_APPEND, so that lines of several processes don't mix, and their order is that of
the calls. A killed process has written a line or has not.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import attrs


@attrs.frozen
class Ledger:
    """The file at *path*."""

    path: Path

    def note(self, what: str, **facts: object) -> None:
        """Append a line. Its time is for whoever reads it; nothing is judged by it."""
        line = json.dumps({"what": what, "at": round(time.time(), 3), **facts}) + "\n"
        file = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        try:
            os.write(file, line.encode())
        finally:
            os.close(file)

    def lines(self, *what: str) -> list[dict[str, Any]]:
        """The lines of those kinds, in order, or all."""
        if not self.path.exists():
            return []
        found = [json.loads(line) for line in self.path.read_text(encoding="utf-8").splitlines()]
        return [line for line in found if not what or line["what"] in what]


@attrs.define(eq=False)
class Sent:
    """A message, and all that its sender knows of it.

    *plan* is what the model will do: batches of tools, separated by spaces. *way* is how it is delivered: ``run`` waits
    for the answer, ``accept`` for the receipt. *sent_at* and *acked_at* are numbers of one count, which grow with time.
    """

    session: str
    message: str
    plan: str = ""
    way: str = "run"
    agent: str = "Support"
    padding: int = 0
    fails: bool = False
    sent_at: int | None = None
    acked_at: int | None = None
    answers: list[str] = attrs.field(factory=list[str])
    errors: list[str] = attrs.field(factory=list[str])
    hit_at: float | None = None
    recovery: float = 0.0

    @property
    def text(self) -> str:
        """What the user says."""
        return f"{self.message} {self.plan}".strip()

    @property
    def is_answered(self) -> bool:
        """Whether its answer has reached its sender."""
        return bool(self.answers)
