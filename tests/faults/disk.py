"""A disk that is full, fails, or may not be written to; then it is mended, and everything is sent again."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import random
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import Final

from tests.faults.judge import judge, nothing_left, read
from tests.faults.kills import PLANS, config
from tests.faults.ledger import Sent
from tests.faults.processes import Crew, crew_of
from tests.faults.sender import Sender
from tests.faults.storage import SQLiteFile, Storage
from tests.faults.table import Row

ROUNDS: Final = 3
MESSAGES: Final = 10

LONGEST: Final = 1.5
"""Seconds that a fault lasts at most."""

Change = Callable[[Crew], Awaitable[object]]


async def disturbed(
    storage: Storage,
    seed: int,
    row: Row,
    fault: Change,
    mend: Change,
    *,
    says: str,
    rounds: int = ROUNDS,
    shim: Path | None = None,
    patience: float | None = None,
) -> Row:
    """Send while *fault* is there, then *mend* it and send again what was refused.

    *says* stands in at least one error: the user has to be told what it was. *patience* is how long the workers'
    operations wait for a server that is away, where it is.
    """
    choices = random.Random(seed)
    configs = [config(storage, working=working, patience=patience) for working in (True, False)]
    async with crew_of(configs, choices, shim) as crew:
        sender = Sender(crew, choices)
        async with asyncio.timeout(50):
            await _send(sender, [Sent(f"c{number}", f"w{number}", "plain") for number in range(3)])
            for turn in range(rounds):
                sender.may_repeat.clear()
                sender.hit()
                await fault(crew)
                sents = _messages(choices, turn)
                sending = asyncio.create_task(_send(sender, sents))
                await _felt(sender, sents, at_least_one=patience is not None)
                result = await mend(crew)
                row.injected += result if isinstance(result, int) else 1
                row.details += await _differ(crew, storage)
                sender.hit()
                sender.may_repeat.set()
                await sending
        await sender.settled()
        left = await nothing_left(storage)
        await crew.end()
    everything = list(sender.sents.values())
    verdict = judge(storage, everything)
    verdict.broken += [*sender.unexpected, *crew.bad_ends, *left]
    errors = [error for sent in everything for error in sent.errors]
    if row.injected and not any(says in error for error in errors):
        verdict.broken.append(f"no error says {says!r}: {errors[:3]}")
    # Not how many: that differs each time.
    row.notes += sorted({f"said: {storage.general(error)}" for error in errors})
    return row.add(verdict)


async def _felt(sender: Sender, sents: list[Sent], *, at_least_one: bool) -> None:
    """Wait until every sender was told something, or for a while: who stands behind work that fails waits with it."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(LONGEST):
            while not all(sent.errors or sent.acked_at for sent in sents):
                await sender.news()
    while at_least_one and not any(sent.errors for sent in sents):
        await sender.news()


def _messages(choices: random.Random, turn: int) -> list[Sent]:
    return [
        Sent(
            f"c{number % 3}",
            f"m{turn}.{number}",
            choices.choice(PLANS),
            choices.choice(("run", "run", "accept")),
            padding=choices.choice((10, 20_000)),
        )
        for number in range(MESSAGES)
    ]


async def _send(sender: Sender, sents: list[Sent]) -> None:
    async with asyncio.TaskGroup() as group:
        for sent in sents:
            group.create_task(sender.send(sent))


async def _differ(crew: Crew, storage: Storage) -> list[str]:
    """Where a process has in memory what is not stored.

    A refused message may be there by now: whoever watched its row go silent has finished it.
    """
    found: list[str] = []
    for number in range(3):
        for worker in crew.workers.values():
            seen = await worker.order("seen", session=f"c{number}")
            stored = [name for name, _ in read(storage)[f"c{number}"].turns]
            if stored[: len(seen)] != seen:
                found.append(f"c{number} is {seen} in memory, and {stored} is stored")
    return found


# --- a full disk ---


async def full(folder: Path, seed: int, rounds: int = ROUNDS) -> list[Row]:
    """No room: on a small file system, where one can be mounted, and by a limit of the process."""
    limited = folder / "limited"
    limited.mkdir()
    return [await _small_file_system(folder, seed, rounds), await _limit(limited, seed, rounds)]


async def _small_file_system(folder: Path, seed: int, rounds: int) -> Row:
    row = Row(fault="disk full", layer="file system (tmpfs, 16 MB)", injected=0)
    with ExitStack() as stack:
        small = folder / "small"
        small.mkdir()
        if not mounted(small, "16m", stack):
            row.notes.append(NOT_MOUNTED)
            return row

        async def take_room(_crew: Crew) -> None:
            fill(small)

        async def make_room(_crew: Crew) -> None:
            empty(small)

        storage = SQLiteFile(folder, small / "chat.db")
        says = "make room on the disk"
        return await disturbed(storage, seed, row, take_room, make_room, says=says, rounds=rounds)


NOT_MOUNTED: Final = "left out: no file system can be mounted here"


def mounted(place: Path, size: str, stack: ExitStack) -> bool:
    """Mount a file system of that *size* on a folder, which stays whose it is; False where one can't be mounted."""
    owner = place.stat().st_uid
    try:
        _run("mount", "-t", "tmpfs", "-o", f"size={size},mode=0700,uid={owner}", "tmpfs", str(place))
    except (OSError, subprocess.CalledProcessError):
        return False
    stack.callback(_run, "umount", "--lazy", str(place))
    return True


def fill(disk: Path) -> None:
    """Leave no room on it."""
    with contextlib.suppress(OSError), (disk / "ballast").open("wb", buffering=0) as file:
        while True:
            file.write(b"x" * 4096)


def empty(disk: Path) -> None:
    """Make room again."""
    (disk / "ballast").unlink()


async def _limit(folder: Path, seed: int, rounds: int) -> Row:
    async def limit(crew: Crew, room: int | None) -> None:
        for worker in crew.workers.values():
            await worker.order("limit", path=str(folder / "chat.db-wal"), room=room)

    row = Row(fault="no file may grow (RLIMIT_FSIZE)", layer="system calls of the process", injected=0)
    narrow, wide = functools.partial(limit, room=9000), functools.partial(limit, room=None)
    return await disturbed(SQLiteFile(folder), seed, row, narrow, wide, says="StoreError", rounds=rounds)


# --- a disk that fails ---

KINDS: Final = {
    "write": "write: I/O error",
    "sync": "fsync: I/O error",
    "read": "read: I/O error",
    "full": "write: no room",
    "short": "half a write, then no room",
}


async def failing(folder: Path, seed: int, rounds: int = ROUNDS, kinds: Iterable[str] = KINDS) -> list[Row]:
    """Single calls of the system that fail, below SQLite."""
    shim = folder / "failing_disk.so"
    try:
        _run("cc", "-O2", "-shared", "-fPIC", "-o", str(shim), str(Path(__file__).with_name("failing_disk.c")), "-ldl")
    except (OSError, subprocess.CalledProcessError):
        row = Row(fault="I/O errors", layer="below SQLite (LD_PRELOAD)", injected=0)
        row.notes.append("left out: there is no C compiler here")
        return [row]
    return [await _failing(folder, seed, shim, kind, rounds) for kind in kinds]


async def _failing(folder: Path, seed: int, shim: Path, kind: str, rounds: int) -> Row:
    place = folder / kind
    place.mkdir()
    choices = random.Random(seed)

    async def arm(crew: Crew) -> None:
        for worker in crew.workers.values():
            await worker.order("disk", call=kind, skip=choices.randrange(12), count=choices.choice((1, 1, 3)))

    async def disarm(crew: Crew) -> int:
        return sum([await worker.order("disk", call="", skip=0, count=0) for worker in crew.workers.values()])

    row = Row(fault=f"disk, {KINDS[kind]}", layer="below SQLite (LD_PRELOAD)", injected=0)
    return await disturbed(SQLiteFile(place), seed, row, arm, disarm, says="", rounds=rounds, shim=shim)


# --- permissions ---


async def forbidden(folder: Path, seed: int, rounds: int = ROUNDS) -> list[Row]:
    """The file may not be written to any more, neither by those who have it open nor by one that starts now."""
    row = Row(fault="permissions taken away", layer="file system", injected=0)
    files = [folder / name for name in ("chat.db", "chat.db-wal")]
    may, may_not = (["chattr", "-i"], ["chattr", "+i"]) if os.getuid() == 0 else (["chmod", "0644"], ["chmod", "0444"])
    row.layer = f"file system ({' '.join(may_not)})"
    (folder / "try").touch()
    try:
        _run(*may_not, str(folder / "try"))
        _run(*may, str(folder / "try"))
    except (OSError, subprocess.CalledProcessError):
        row.notes.append(f"left out: {may_not[0]} does not work here")
        return [row]

    async def change(crew: Crew, how: list[str], *, replace: bool) -> None:
        if replace:
            await crew.workers.pop(0).kill()
        for file in files:
            if file.exists():
                _run(*how, str(file))
        if replace:
            await crew.start(0)

    async with _undone(files, may):
        return [
            await disturbed(
                SQLiteFile(folder),
                seed,
                row,
                functools.partial(change, how=may_not, replace=True),
                functools.partial(change, how=may, replace=False),
                says="writable",
                rounds=rounds,
            )
        ]


@asynccontextmanager
async def _undone(files: list[Path], may: list[str]) -> AsyncIterator[None]:
    try:
        yield
    finally:
        for file in files:
            if file.exists():
                _run(*may, str(file))


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)
