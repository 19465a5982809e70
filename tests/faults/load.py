"""Many conversations in many processes, which are killed all the time: nothing is broken but processes."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from typing import Final

from tests.faults.judge import judge, nothing_left
from tests.faults.kills import PLANS, config, kill
from tests.faults.ledger import Sent
from tests.faults.processes import Crew, crew_of
from tests.faults.sender import Sender
from tests.faults.storage import Storage
from tests.faults.table import Row

AT_ONCE: Final = 200
"""Conversations in which somebody says something at the same time."""


async def loaded(
    storage: Storage, seed: int, *, processes: int = 8, conversations: int = 1000, messages: int = 20_000
) -> list[Row]:
    """Each message is delivered twice: at once, or again while the next one is under way."""
    choices = random.Random(seed)
    said = [
        [
            Sent(
                f"c{conversation}",
                f"c{conversation}.{number}",
                choices.choice(PLANS),
                choices.choice(("run", "accept")),
            )
            for number in range(messages // conversations)
        ]
        for conversation in range(conversations)
    ]
    fault = f"{processes} processes, {conversations:,} conversations, {messages:,} messages twice, kill -9 throughout"
    row = Row(fault=fault, layer="process", injected=0)
    async with crew_of([config(storage, working=True)] * processes, choices) as crew:
        sender = Sender(crew, choices)
        talking, ended = asyncio.Semaphore(AT_ONCE), asyncio.Event()
        async with asyncio.TaskGroup() as group:
            group.create_task(_kill_throughout(crew, sender, choices, row, ended))
            try:
                async with asyncio.TaskGroup() as talks:
                    for its in said:
                        talks.create_task(_talk(sender, its, choices, talking))
            finally:
                ended.set()
        await sender.settled()
        left = await nothing_left(storage)
        await crew.end()
    verdict = judge(storage, list(sender.sents.values()))
    verdict.broken += [*sender.unexpected, *crew.bad_ends, *left]
    return [row.add(verdict)]


async def _talk(sender: Sender, its: Sequence[Sent], choices: random.Random, talking: asyncio.Semaphore) -> None:
    async with talking:
        again: Sent | None = None
        for sent in its:
            copies = choices.choice((1, 2))
            async with asyncio.TaskGroup() as group:
                group.create_task(sender.send(sent, copies))
                if again is not None:
                    group.create_task(sender.send(again))
            again = sent if copies == 1 else None
        if again is not None:
            await sender.send(again)


async def _kill_throughout(crew: Crew, sender: Sender, choices: random.Random, row: Row, ended: asyncio.Event) -> None:
    while not ended.is_set():
        await kill(crew, sender, choices)
        row.injected += 1
        await asyncio.sleep(choices.uniform(1, 5))  # the moment is the fault's, and random
