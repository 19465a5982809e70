"""Processes that are killed or stopped at random moments."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from tests.faults.judge import judge, nothing_left
from tests.faults.ledger import Ledger, Sent
from tests.faults.processes import Crew, crew_of
from tests.faults.sender import Sender
from tests.faults.table import Row
from tests.faults.worker import Config

PLANS: Final = ("", "plain", "idempotent", "plain,idempotent", "idempotent plain", "plain plain")
LONGEST_STOP: Final = 4.0
"""Seconds. A worker that is stopped while it holds the file holds up everyone; nobody can take over then."""


def config(folder: Path, **more: object) -> Config:
    """A worker on the folder's file."""
    facts: dict[str, Any] = {"path": str(folder / "chat.db"), "ledger": str(folder / "ledger"), **more}
    return Config(**facts)


async def storm(
    folder: Path, seed: int, fault: str, *, kills: int = 0, stops: int = 0, agents: tuple[str, ...] = ("Support",)
) -> Row:
    """Several workers on one file, messages delivered twice and at once, and some workers killed or stopped."""
    choices = random.Random(seed)
    configs = [
        config(folder, agent=agent, working=True, elsewhere=f"host-{agent}-{number}" if number == 1 else None)
        for agent in agents
        for number in range(3 if len(agents) == 1 else 2)
    ]
    ledger = Ledger(folder / "ledger")
    names = (f"m{number}" for number in itertools.count(1))
    stopping = asyncio.Event()
    async with crew_of(configs, choices) as crew:
        sender = Sender(crew, choices)
        async with asyncio.timeout(50), asyncio.TaskGroup() as group:
            for conversation in range(4):
                for lane in range(2):
                    agent = agents[(conversation + lane) % len(agents)]
                    group.create_task(_talk(sender, f"c{conversation}", agent, names, choices, stopping))
            try:
                for what in choices.sample(["kill"] * kills + ["stop"] * stops, kills + stops):
                    await asyncio.sleep(choices.uniform(0.02, 0.4))  # the moment is the fault's, and random
                    slot = choices.randrange(len(configs))
                    await (_kill(crew, sender, slot) if what == "kill" else _stop(crew, sender, slot, choices))
            finally:
                stopping.set()
        await sender.settled()
        left = await nothing_left(folder / "chat.db")
        await crew.end()
    verdict = judge(folder / "chat.db", ledger, list(sender.sents.values()))
    verdict.broken += [*sender.unexpected, *crew.bad_ends, *left]
    return Row(fault=fault, layer="process", injected=kills + stops).add(verdict)


async def _talk(
    sender: Sender,
    session: str,
    agent: str,
    names: Iterator[str],
    choices: random.Random,
    stopping: asyncio.Event,
) -> None:
    while not stopping.is_set():
        sent = Sent(session, next(names), choices.choice(PLANS), choices.choice(("run", "run", "accept")), agent)
        await sender.send(sent, copies=choices.choice((1, 1, 2)))


async def _kill(crew: Crew, sender: Sender, slot: int) -> None:
    sender.hit()
    await crew.kill(slot)


async def _stop(crew: Crew, sender: Sender, slot: int, choices: random.Random) -> None:
    """Stop a worker until others have done what it was about to do; then let it go on, or kill it."""
    hit = sender.hit()
    crew.stop(slot)
    try:
        async with asyncio.timeout(LONGEST_STOP):
            while not all(sent.is_answered for sent in hit):
                await sender.news()
    except TimeoutError:
        pass
    if choices.random() < 0.3:
        await crew.kill(slot)
    else:
        crew.go_on(slot)


async def killed(folder: Path, seed: int) -> list[Row]:
    """By ``kill -9``."""
    return [await storm(folder, seed, "kill -9 at random moments, messages twice and at once", kills=10)]


async def stopped(folder: Path, seed: int) -> list[Row]:
    """SIGSTOP."""
    return [await storm(folder, seed, "SIGSTOP for longer than the lease, then SIGCONT or kill -9", stops=4, kills=1)]


async def two_applications(folder: Path, seed: int) -> list[Row]:
    """Each finishes its own work only."""
    fault = "kill -9, two applications with different agents on one file"
    return [await storm(folder, seed, fault, kills=8, agents=("Support", "Sales"))]
