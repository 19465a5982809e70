"""Processes that are killed or stopped at random moments, and other blows to a storage under load."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any, Final

from tests.faults.judge import judge, nothing_left
from tests.faults.ledger import Sent
from tests.faults.processes import Crew, crew_of
from tests.faults.sender import Sender
from tests.faults.storage import Storage
from tests.faults.table import Row
from tests.faults.worker import Config

PLANS: Final = ("", "plain", "idempotent", "plain,idempotent", "idempotent plain", "plain plain")
LONGEST_STOP: Final = 4.0
"""Seconds. A worker that is stopped while it holds the file holds up everyone; nobody can take over then."""

Blow = Callable[[Crew, Sender, random.Random], Awaitable[object]]
"""What is done to the workers, or to what they stand on."""


def config(storage: Storage, **more: object) -> Config:
    """A worker on that storage."""
    facts: dict[str, Any] = {"address": storage.address, "ledger": str(storage.ledger.path), **more}
    return Config(**facts)


async def storm(
    storage: Storage,
    seed: int,
    fault: str,
    blows: Sequence[Blow],
    *,
    layer: str = "process",
    agents: tuple[str, ...] = ("Support",),
) -> Row:
    """Several workers on one storage, messages delivered twice and at once, and meanwhile the *blows*, in any order."""
    choices = random.Random(seed)
    configs = [
        config(storage, agent=agent, working=True, elsewhere=f"host-{agent}-{number}" if number == 1 else None)
        for agent in agents
        for number in range(3 if len(agents) == 1 else 2)
    ]
    names = (f"m{number}" for number in itertools.count(1))
    stopping = asyncio.Event()
    async with crew_of(configs, choices) as crew:
        sender = Sender(crew, choices)
        # A worker that is killed takes seconds to come back on a machine that is busy otherwise.
        async with asyncio.timeout(30 + 5 * len(blows)), asyncio.TaskGroup() as group:
            for conversation in range(4):
                for lane in range(2):
                    agent = agents[(conversation + lane) % len(agents)]
                    group.create_task(_talk(sender, f"c{conversation}", agent, names, choices, stopping))
            try:
                for blow in choices.sample(blows, len(blows)):
                    await asyncio.sleep(choices.uniform(0.02, 0.4))  # the moment is the fault's, and random
                    await blow(crew, sender, choices)
            finally:
                stopping.set()
        await sender.settled()
        left = await nothing_left(storage)
        await crew.end()
    verdict = judge(storage, list(sender.sents.values()))
    verdict.broken += [*sender.unexpected, *crew.bad_ends, *left]
    return Row(fault=fault, layer=layer, injected=len(blows)).add(verdict)


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


async def kill(crew: Crew, sender: Sender, choices: random.Random) -> None:
    """Kill a worker, and start another one."""
    sender.hit()
    await crew.kill(choices.choice(sorted(crew.workers)))


async def stop(crew: Crew, sender: Sender, choices: random.Random) -> None:
    """Stop a worker until others have done what it was about to do; then let it go on, or kill it."""
    slot = choices.choice(sorted(crew.workers))
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


async def killed(storage: Storage, seed: int, times: int = 10) -> list[Row]:
    """By ``kill -9``."""
    return [await storm(storage, seed, "kill -9 at random moments, messages twice and at once", [kill] * times)]


async def stopped(storage: Storage, seed: int) -> list[Row]:
    """SIGSTOP."""
    fault = "SIGSTOP for longer than the lease, then SIGCONT or kill -9"
    return [await storm(storage, seed, fault, [*[stop] * 4, kill])]


async def two_applications(storage: Storage, seed: int, times: int = 8) -> list[Row]:
    """Each finishes its own work only."""
    fault = "kill -9, two applications with different agents on one storage"
    return [await storm(storage, seed, fault, [kill] * times, agents=("Support", "Sales"))]
