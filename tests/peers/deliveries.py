"""The same webhooks, delivered to several worker processes at the same moments."""

from __future__ import annotations

import asyncio
import multiprocessing
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Final

import attrs

from tests.peers.subject import Prompt, Subject

PATIENCE: Final = 50.0
"""Seconds until a worker that never comes is given up: a test that fails, and not one that hangs."""

_barriers: Final[list[Barrier]] = []
"""In a worker, the one it meets the others at: it can only be handed over when the process starts."""


@attrs.frozen
class Deliveries:
    """What came of them: how often each id was run, and what was raised."""

    ran: Counter[str]
    errors: list[str]


def deliver(subject: Subject, db_path: Path, message_ids: Sequence[str], workers: int) -> Deliveries:
    """Deliver each id to all *workers* at once; each is a message of its own conversation. Blocks until all is done."""
    spawn = multiprocessing.get_context("spawn")
    barrier = spawn.Barrier(workers)
    with ProcessPoolExecutor(workers, spawn, initializer=_take_barrier, initargs=(barrier,)) as pool:
        # Each takes a worker of its own, since none can end before all have met.
        work = [pool.submit(_work, subject, db_path, message_ids) for _ in range(workers)]
        found = [each.result(PATIENCE) for each in work]
    return Deliveries(
        Counter(message_id for ran, _ in found for message_id in ran),
        [error for _, errors in found for error in errors],
    )


def _take_barrier(barrier: Barrier) -> None:
    _barriers.append(barrier)


def _work(subject: Subject, db_path: Path, message_ids: Sequence[str]) -> tuple[list[str], list[str]]:
    try:
        return asyncio.run(_deliver_all(subject, db_path, message_ids))
    except BaseException:
        _barriers[0].abort()  # the others need not wait
        raise


async def _deliver_all(subject: Subject, db_path: Path, message_ids: Sequence[str]) -> tuple[list[str], list[str]]:
    ran: list[str] = []
    errors: list[str] = []
    async with subject.open(db_path) as store:
        for message_id in message_ids:

            async def model(prompt: Prompt, message_id: str = message_id) -> str:
                ran.append(message_id)
                return "hello"

            bot = store.bot(model)
            _barriers[0].wait(PATIENCE)
            try:
                await bot.answer(f"chat of {message_id}", "hi", message_id)
            except Exception as error:  # noqa: BLE001  # the parent judges
                errors.append(f"{message_id}: {error!r}")
    return ran, errors
