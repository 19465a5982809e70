"""A process that kills itself at a named point, and another one that has to go on from there."""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from tests.faults.judge import Verdict, judge, nothing_left, read
from tests.faults.kills import config
from tests.faults.ledger import Sent
from tests.faults.points import POINTS
from tests.faults.processes import Crew, GoneError, Worker, crew_of, until
from tests.faults.sender import Sender
from tests.faults.storage import SQLiteFile
from tests.faults.table import Row

LAYER: Final = "inside the process"
SHORT_LEASE: Final = 0.3
"""Seconds, for the process whose silence is to be noticed."""


async def at_points(folder: Path, seed: int, points: Sequence[str] = POINTS, nth: int = 1) -> list[Row]:
    """Kill a process at each of *points*, when it comes there for the *nth* time; a row each."""
    rows: list[Row] = []
    left = list(points)[::-1]

    async def course(number: int) -> None:
        place = folder / f"course-{number}"
        place.mkdir()
        # The second one lives through all: it has the conversations in memory, and the file changes under it.
        async with crew_of([config(SQLiteFile(place))], random.Random(seed)) as crew:
            while left:
                point = left.pop()
                if point.startswith("open"):
                    rows.append(await _on_a_new_file(place, seed, point, nth))
                else:
                    rows.append(await _through(place, crew, seed, point, nth))
            await crew.end()

    async with asyncio.TaskGroup() as group:
        for number in range(2):
            group.create_task(course(number))
    return sorted(rows, key=lambda row: POINTS.index(row.fault.removeprefix("SIGKILL at ")))


async def _on_a_new_file(place: Path, seed: int, point: str, nth: int) -> Row:
    new = place / f"new {point}".replace(":", "")
    new.mkdir()
    # Not before the first one: the file is to be new.
    crew = Crew([config(SQLiteFile(new))], random.Random(seed))
    try:
        return await _through(new, crew, seed, point, nth)
    finally:
        for worker in crew.workers.values():
            await worker.kill()


async def _through(place: Path, crew: Crew, seed: int, point: str, nth: int) -> Row:
    """Let one process come to the point, and the other one finish what it leaves."""
    sender = Sender(crew, random.Random(seed))
    name = f"{point} {nth} {seed}".replace(": ", "-").replace(" ", "-")
    session, gone = f"c-{name}", f"d-{name}"
    sents = _messages(name, session)
    second = crew.workers.pop(0, None)
    async with asyncio.timeout(40):
        if point.startswith(("interrupt", "release")):
            sents.insert(0, Sent(session, f"v-{name}", "hang"))
            await _leave_a_turn(place, sents[0], elsewhere=point.startswith("interrupt"))
        first = await Worker.start(config(SQLiteFile(place), working=True, point=point, nth=nth), crew.hear)
        crew.workers[0] = first
        sending = asyncio.create_task(_send(crew, sender, sents, Sent(gone, f"e-{name}", "plain")))
        ended = asyncio.create_task(first.ended())
        tasks: set[asyncio.Task[Any]] = {sending, ended}
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        status = await first.end()
        crew.workers.pop(0)
        if second is None:
            await crew.start(0)
        else:
            crew.workers[0] = second
            crew.wake()
        await crew.workers[0].order("work")
        await sending
        left = await nothing_left(SQLiteFile(place))
        await crew.workers[0].order("rest")
    row = Row(fault=f"SIGKILL at {point}", layer=LAYER, injected=int(status == -signal.SIGKILL))
    return row.add(_judged(place, sender, sents, gone, status, left))


def _messages(name: str, session: str) -> list[Sent]:
    return [
        Sent(session, f"a1-{name}", "plain idempotent", "accept"),
        Sent(session, f"r1-{name}", "plain,idempotent plain"),
        Sent(session, f"r2-{name}", "idempotent", fails=True),
        Sent(session, f"a2-{name}", "plain", "accept", fails=False),
        Sent(session, f"r3-{name}"),
    ]


async def _leave_a_turn(place: Path, sent: Sent, *, elsewhere: bool) -> None:
    """Have a third process die in the middle of a turn."""
    third = await Worker.start(
        config(SQLiteFile(place), lease_seconds=SHORT_LEASE, elsewhere=sent.message if elsewhere else None)
    )
    await third.order("hold_up", message=sent.message)
    order = asyncio.create_task(third.order("run", session=sent.session, text=sent.text, message=sent.message))
    await third.hanging.wait()
    await third.kill()
    await asyncio.wait([order])
    order.exception()


async def _send(crew: Crew, sender: Sender, sents: list[Sent], to_delete: Sent) -> None:
    async with asyncio.TaskGroup() as group:
        group.create_task(_send_all(sender, sents))
        group.create_task(_delete(crew, sender, to_delete))


async def _delete(crew: Crew, sender: Sender, sent: Sent) -> None:
    """Have a conversation with a turn in it, and delete it."""
    await sender.send(sent)
    while True:
        try:
            await (await crew.any("Support")).order("delete", session=sent.session)
        except GoneError:
            continue
        return


def _judged(place: Path, sender: Sender, sents: list[Sent], gone: str, status: int, left: list[str]) -> Verdict:
    storage = SQLiteFile(place)
    verdict = judge(storage, sents)
    verdict.broken += [*sender.unexpected, *left]
    if gone in read(storage):
        verdict.broken.append("the conversation that was deleted is there again")
    if status not in {0, -signal.SIGKILL}:
        verdict.broken.append(f"the process ended with status {status}; see workers.log")
    return verdict


# --- stopped instead of killed ---

STOPS: Final = (
    *(f"{step}: {phase}" for step in ("queue", "start", "take", "commit") for phase in ("committed", "after")),
    *(f"journal: {phase}" for phase in ("before", "committed", "after")),
    *(f"{what}: {phase}" for what in ("model", "plain tool", "idempotent tool") for phase in ("before", "after")),
    *(f"{step}: before" for step in ("commit", "leave", "hand on", "on_response")),
)
"""Where a process holds no lock on the file: one that is stopped in a transaction holds up all others."""


async def stops_at_points(folder: Path, seed: int, points: Sequence[str] = STOPS, nth: int = 1) -> list[Row]:
    """Stop a process at each of *points* for longer than its lease; it goes on in the middle of another one's turn."""
    row = Row(fault="SIGSTOP at a named point, SIGCONT while another does the same turn", layer=LAYER, injected=0)
    async with crew_of([config(SQLiteFile(folder), working=False)], random.Random(seed)) as crew:
        for point in points:
            await _stopped(folder, crew, seed, point, nth, row)
        await crew.end()
    return [row]


async def _stopped(place: Path, crew: Crew, seed: int, point: str, nth: int, row: Row) -> None:
    sender = Sender(crew, random.Random(seed))
    name = f"{point} {nth} {seed}".replace(": ", "-").replace(" ", "-")
    sents = [Sent(f"c-{name}", f"h-{name}", "plain,idempotent hang plain"), *_messages(name, f"d-{name}")]
    second = crew.workers.pop(0)
    await second.order("hold_up", message=sents[0].message)
    second.hanging.clear()
    async with asyncio.timeout(40):
        first = await Worker.start(
            config(SQLiteFile(place), working=True, lease_seconds=SHORT_LEASE, point=point, nth=nth, stop=True),
            crew.hear,
        )
        crew.workers[0] = first
        try:
            sending = asyncio.create_task(_send_all(sender, sents))
            await until(lambda: first.is_stopped or sending.done())
            row.injected += first.is_stopped
            crew.workers[0] = second
            first.stalled.set()
            sender.hit()
            crew.wake()
            await second.order("work")
            with contextlib.suppress(TimeoutError):
                # Stopped while it wrote something else, the first one holds the file, and nobody gets anywhere.
                async with asyncio.timeout(3):
                    await until(lambda: second.hanging.is_set() or sents[0].is_answered)
            first.send_signal(signal.SIGCONT)
            # The first one goes on while the second one is in the middle of the turn, and has the time to do harm.
            await first.order("ping")
            await sender.late(0.5)
            await second.order("let_go")
            await sending
            await sender.settled()
            left = await nothing_left(SQLiteFile(place))
            status = await first.end()
            await second.order("rest")
        finally:
            await first.kill()
    verdict = judge(SQLiteFile(place), sents)
    verdict.broken += [*sender.unexpected, *left]
    if status:
        verdict.broken.append(f"the process that was stopped ended with status {status}; see workers.log")
    for kind in (verdict.lost, verdict.doubled, verdict.out_of_order, verdict.broken):
        kind[:] = [f"at {point}: {what}" for what in kind]
    row.add(verdict)


async def _send_all(sender: Sender, sents: list[Sent]) -> None:
    async with asyncio.TaskGroup() as group:
        for sent in sents:
            group.create_task(sender.send(sent))


def never_hit(rows: Sequence[Row]) -> list[str]:
    """The points at which no process has ever been killed."""
    hit = {row.fault.removeprefix("SIGKILL at ") for row in rows if row.injected}
    return [point for point in POINTS if point not in hit]
