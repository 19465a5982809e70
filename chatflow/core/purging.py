"""When expired message ids are forgotten, beside a purge that somebody asks for."""

from __future__ import annotations

from itertools import count
from typing import Final

_MARKS_BETWEEN: Final = 16
_AT_ONCE: Final = 160
"""Ten times as many as were added meanwhile, so that none pile up."""


class Purging:
    """Counts a store's marks: now and then one of them takes expired ids along.

    The first one does, since a process may mark no second one. Not each does: a look for what is expired takes as long
    as the mark itself.
    """

    def __init__(self) -> None:
        self._marks = count()

    def due(self) -> int:
        """How many expired ids go with the mark that is made now; mostly none."""
        return 0 if next(self._marks) % _MARKS_BETWEEN else _AT_ONCE
