"""What others do to the file: a log that is cut or deleted, a clock that is set, a writer that holds it."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Final

from tests.faults.judge import judge, nothing_left, read
from tests.faults.kills import PLANS, config
from tests.faults.ledger import Sent
from tests.faults.processes import crew_of
from tests.faults.sender import Sender
from tests.faults.storage import SQLiteFile
from tests.faults.table import Row

ROUNDS: Final = 2


async def _send(sender: Sender, sents: list[Sent], copies: int = 1) -> None:
    async with asyncio.TaskGroup() as group:
        for sent in sents:
            group.create_task(sender.send(sent, copies))


def _messages(choices: random.Random, prefix: str, count: int, way: str | None = None) -> list[Sent]:
    return [
        Sent(
            f"c{number % 3}",
            f"{prefix}.{number}",
            choices.choice(PLANS),
            way or choices.choice(("run", "run", "accept")),
        )
        for number in range(count)
    ]


# --- the write-ahead log ---


async def log_cut(storage: SQLiteFile, seed: int, rounds: int = ROUNDS) -> list[Row]:
    """The WAL is cut short, or deleted, after all processes were killed."""
    rows: list[Row] = []
    for fault in ("cut short at a random byte", "deleted"):
        place = storage.folder / fault.split()[0]
        place.mkdir()
        rows.append(await _log_cut(SQLiteFile(place), seed, fault, rounds))
    return rows


async def _log_cut(storage: SQLiteFile, seed: int, fault: str, rounds: int) -> Row:
    """What SQLite promises then: the database as of some earlier commit.

    So that much is judged: what had been written to the database itself (a checkpoint) is there, what is missing is the
    end of each conversation and nothing in between, no turn is half there, and what is sent again is answered.
    """
    choices = random.Random(seed)
    row = Row(fault=f"WAL {fault}, all processes killed", layer="file system, between processes' lives", injected=0)
    async with crew_of([config(storage, working=True), config(storage)], choices) as crew, asyncio.timeout(50):
        sender = Sender(crew, choices)
        for turn in range(rounds):
            await _send(sender, _messages(choices, f"safe{turn}", 6))
            _checkpoint(storage)
            await _send(sender, _messages(choices, f"m{turn}", 9, "run"))
            # Some are to be under way.
            sending = asyncio.create_task(_send(sender, _messages(choices, f"n{turn}", 6, "run")))
            await sender.news()
            for slot in list(crew.workers):
                await crew.workers.pop(slot).kill()
            _damage(storage.path.with_name("chat.db-wal"), fault, choices)
            row.injected += 1
            row.details += _forget_the_missing(storage, list(sender.sents.values()), row)
            for slot in range(2):
                await crew.start(slot)
            await sending
            await _send(sender, [sent for sent in sender.sents.values() if not sent.answers])
        left = await nothing_left(storage)
        await crew.end()
    verdict = judge(storage, list(sender.sents.values()), journals_lost=True)
    verdict.broken += [*sender.unexpected, *crew.bad_ends, *left]
    return row.add(verdict)


def _checkpoint(storage: SQLiteFile) -> None:
    """Write all that is in the log into the database itself."""
    with storage.connected() as query:
        query("PRAGMA wal_checkpoint(TRUNCATE)")


def _damage(log: Path, fault: str, choices: random.Random) -> None:
    if fault == "deleted":
        log.unlink()
        return
    size = log.stat().st_size
    with log.open("r+b") as file:
        file.truncate(choices.randrange(size))


def _forget_the_missing(storage: SQLiteFile, sents: list[Sent], row: Row) -> list[str]:
    """Look at what the fault has left, and send again, in their own order, what it has taken."""
    broken, stored = storage.damage(), read(storage)
    for session in {sent.session for sent in sents}:
        conversation = stored.get(session)
        there = [] if conversation is None else [name for name, _ in conversation.turns]
        acked = sorted(
            (sent for sent in sents if sent.session == session and sent.acked_at is not None),
            key=lambda sent: sent.acked_at or 0,
        )
        missing = [sent for sent in acked if sent.message not in there]
        for sent in missing:
            assert sent.acked_at is not None
            if sent.message.startswith("safe"):
                broken.append(f"{sent.message} was in the database itself, and is gone")
            later = [each for each in acked if each.sent_at is not None and sent.acked_at < each.sent_at]
            broken += [f"{sent.message} is gone, and {each.message} is not" for each in later if each not in missing]
        row.taken += len(missing)
        for sent in missing:
            # Its row may still be there, and keeps its place.
            sent.acked_at = None
            sent.answers.clear()
    return broken


# --- the clock ---


async def clock(storage: SQLiteFile, seed: int, rounds: int = 6) -> list[Row]:
    """The clocks of the processes are set back and forth by an hour, each on its own."""
    choices = random.Random(seed)
    row = Row(fault="clock set back and forth by an hour", layer="the store's clock", injected=0)
    async with crew_of([config(storage, working=True) for _ in range(3)], choices) as crew, asyncio.timeout(50):
        sender = Sender(crew, choices)
        for turn in range(rounds):
            sents = _messages(choices, f"m{turn}", 8)
            sending = asyncio.create_task(_send(sender, sents, copies=2))
            await sender.news()
            for worker in crew.workers.values():
                await worker.order("clock", seconds=choices.choice((-3600, 0, 3600)))
                row.injected += 1
            await sending
        # All ids are known, whatever the clocks say.
        again = [sent for sent in sender.sents.values() if sent.way == "run"]
        await _send(sender, again)
        left = await nothing_left(storage)
        await crew.end()
    verdict = judge(storage, list(sender.sents.values()))
    verdict.broken += [*sender.unexpected, *crew.bad_ends, *left]
    return [row.add(verdict)]


# --- a foreign writer ---


async def foreign_writer(storage: SQLiteFile, seed: int, rounds: int = ROUNDS) -> list[Row]:
    """Another program holds the file for two seconds (BEGIN IMMEDIATE)."""
    choices = random.Random(seed)
    row = Row(fault="foreign writer holds the file for 2 s", layer="SQLite lock", injected=0)
    gaps: list[float] = []
    async with crew_of([config(storage, working=True), config(storage)], choices) as crew, asyncio.timeout(50):
        sender = Sender(crew, choices)
        await _send(sender, _messages(choices, "w", 3))
        for worker in crew.workers.values():
            await worker.order("ping")
        for turn in range(rounds):
            with storage.connected() as query:
                query("BEGIN IMMEDIATE")
                row.injected += 1
                sender.hit()
                sents = _messages(choices, f"m{turn}", 12)
                sending = asyncio.create_task(_send(sender, sents))
                # The loops answer while the file is held; the answers of turns can't come before it is let go.
                for worker in crew.workers.values():
                    await worker.order("ping")
                await asyncio.sleep(2)
                if any(sent.acked_at for sent in sents):
                    row.details.append("a turn was acknowledged while the file was held by another program")
                query("ROLLBACK")
            for sent in sents:
                sent.hit_at = asyncio.get_running_loop().time()
            await sending
        gaps = [await worker.order("ping") for worker in crew.workers.values()]
        left = await nothing_left(storage)
        await crew.end()
    verdict = judge(storage, list(sender.sents.values()))
    verdict.broken += [*sender.unexpected, *crew.bad_ends, *left]
    row.notes.append(f"longest gap of an event loop in the meantime: {max(gaps) * 1000:.0f} ms")
    return [row.add(verdict)]
