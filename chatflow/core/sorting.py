"""The message rows of one conversation: what is wrong with them, and which are to be there. Reads nothing itself."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, Final

from chatflow.core import reading
from chatflow.core.codec import message_to_json
from chatflow.core.notes import Notes
from chatflow.core.records import system_place
from chatflow.core.repairs import Row, Sorted, sort_out
from chatflow.exceptions import CorruptSessionError

_POSITIONS: Final = 2**61
"""No message ever had a position from here on: a row that has one was put there by what damaged the file."""


def history_of(
    session_key: int, found: list[tuple[Any, Any]], fresh: int, notes: Notes
) -> tuple[int | None, tuple[tuple[int, str], ...] | None]:
    """Before which place rows are to go, or all that are to be there; neither where the history is sound."""
    where = f"chatflow_messages, session_key {session_key}, place"
    numbered = _numbered(where, found, notes)
    places = [place for place, _ in numbered]
    _note_gaps(where, places, notes)
    history = sort_out(_readable(session_key, numbered, notes))
    changed = _note_verdicts(where, history, notes)
    systems, bodies = (
        [(row.key[0], message_to_json(row.message) if row.key[0] in changed else row.key[1]) for row in each]
        for each in (history.systems, history.bodies)
    )
    if _stand(systems, among_systems=True) and _stand(bodies, among_systems=False):
        if [*systems, *bodies] == found:
            return None, None
        front = len(found) - len(bodies)
        stay = bodies and found[front:] == bodies and numbered == found
        if stay and [row for row in found[:front] if row[0] < 0] == systems:
            return bodies[0][0], None
    return None, _anew(places, fresh, systems, bodies)


def _numbered(where: str, found: list[tuple[Any, Any]], notes: Notes) -> list[tuple[int, Any]]:
    numbered: list[tuple[int, Any]] = []
    for place, text in found:
        if isinstance(place, int):
            numbered.append((place, text))
        else:
            notes.take("message", f"{where} {reading.shown(place)}", "its place is not a number", text)
    return numbered


def _note_gaps(where: str, places: list[int], notes: Notes) -> None:
    for before, after in pairwise(places):
        if after - before > 1 and (before < 0) == (after < 0):
            missing = f"{before + 1}" if after - before == 2 else f"{before + 1} to {after - 1}"
            notes.note("gap", f"{where} {missing}", "the row is missing", "moved")


def _readable(session_key: int, found: list[tuple[int, Any]], notes: Notes) -> list[Row[tuple[int, str]]]:
    readable: list[Row[tuple[int, str]]] = []
    for place, text in found:
        try:
            message = reading.message(notes.now.session_id, session_key, place, text)
        except CorruptSessionError as error:
            notes.take("message", error.row, error.reason, text)
        else:
            readable.append(Row(key=(place, text), among_systems=place < 0, message=message))
    return readable


def _note_verdicts(where: str, history: Sorted[tuple[int, str]], notes: Notes) -> set[int]:
    """Returns the places of messages that stay as others than they were."""
    changed: set[int] = set()
    for verdict in history.verdicts:
        place, text = verdict.row.key
        if verdict.kind == "place":
            notes.note("place", f"{where} {place}", verdict.reason, "moved")
        else:
            notes.take(verdict.kind, f"{where} {place}", verdict.reason, text)
            if verdict.stays:
                changed.add(place)
    return changed


def _stand(kept: list[tuple[int, str]], *, among_systems: bool) -> bool:
    """Whether the messages stand where messages of their kind do, one directly after the other."""
    return all((place < 0) == among_systems for place, _ in kept) and all(
        after - before == 1 for (before, _), (after, _) in pairwise(kept)
    )


def _anew(
    places: list[int], fresh: int, systems: list[tuple[int, str]], bodies: list[tuple[int, str]]
) -> tuple[tuple[int, str], ...]:
    """The messages at places that no message has ever had: whoever has seen the old ones takes none for another."""
    used = [place for place in places if 0 <= place < _POSITIONS]
    used_by_systems = [place - system_place(0) for place in places if place < system_place(_POSITIONS)]
    start = max(fresh, *(place + 1 for place in used), 0)
    system_start = max(fresh, *(position + 1 for position in used_by_systems), 0)
    return (
        *((system_place(system_start + index), text) for index, (_, text) in enumerate(systems)),
        *((start + index, text) for index, (_, text) in enumerate(bodies)),
    )
