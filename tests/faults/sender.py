"""Who sends messages: each again and again until it is answered, as a provider does that hears no 200."""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from typing import Any, Final

from tests.faults.ledger import Sent
from tests.faults.processes import Crew, GoneError, RefusedError, Worker

DELIVERIES: Final = 200
"""How often one message is delivered at most; one that needs more is lost."""

FINAL: Final = {"MessageDeadError", "MessageMismatchError", "SessionDeletedError"}
"""Errors that sending again will not change."""

FAULTS_ERRORS: Final = {
    "RuntimeError",
    "SessionConflictError",
    "MessageInProgressError",
    "StoreError",
    "StoreBusyError",
    "StoreClosedError",
    *FINAL,
}
"""What a worker may say while things go wrong; anything else is a fault of its own."""


class Sender:
    """Sends to a crew, and keeps the record of what was acknowledged."""

    def __init__(self, crew: Crew, choices: random.Random) -> None:
        self.sents: Final[dict[str, Sent]] = {}
        self.unexpected: Final[list[str]] = []
        self.may_repeat: Final = asyncio.Event()
        """Whether messages are sent again; set, unless a scenario holds them back until it has mended the disk."""
        self.may_repeat.set()
        self._crew: Final = crew
        self._choices: Final = choices
        self._count: Final = itertools.count(1)
        self._heard: Final[dict[str, asyncio.Event]] = {}
        self._late: Final[set[asyncio.Task[None]]] = set()
        self._news = asyncio.Event()
        crew.hear = self.hear

    def now(self) -> int:
        """A number that grows."""
        return next(self._count)

    def hear(self, message: str, content: str) -> None:
        """`on_response` was called for that message."""
        if message in self.sents:
            self._answered(self.sents[message], content)
        self._heard.setdefault(message, asyncio.Event()).set()

    def in_flight(self) -> list[Sent]:
        """What was sent and not answered."""
        return [sent for sent in self.sents.values() if sent.sent_at is not None and not sent.is_answered]

    def hit(self) -> list[Sent]:
        """Something has happened, from which those in flight have to recover."""
        hit = self.in_flight()
        for sent in hit:
            sent.hit_at = time.monotonic()
        return hit

    async def send(self, sent: Sent, copies: int = 1) -> None:
        """Deliver *sent*, so many times at once and as often as needed, until it is answered."""
        self.sents[sent.message] = sent
        if sent.sent_at is None:
            sent.sent_at = self.now()
        async with asyncio.TaskGroup() as group:
            for _ in range(copies):
                group.create_task(self._deliver(sent))
        if sent.way == "accept" and sent.acked_at is not None:
            await self._heard.setdefault(sent.message, asyncio.Event()).wait()

    async def _deliver(self, sent: Sent) -> None:
        for number in range(DELIVERIES):
            if number:
                await self.may_repeat.wait()
            worker = await self._crew.any(sent.agent)
            order = asyncio.create_task(self._order(worker, sent))
            stalled = asyncio.create_task(worker.stalled.wait())
            await asyncio.wait({order, stalled}, return_when=asyncio.FIRST_COMPLETED)
            stalled.cancel()
            if not order.done():
                # It may still answer, when it goes on; that answer has to be the same.
                self._late.add(order)
                order.add_done_callback(self._late.discard)
                continue
            await order
            if sent.acked_at is not None or (sent.errors and sent.errors[-1].split(":")[0] in FINAL):
                return
        return

    async def _order(self, worker: Worker, sent: Sent) -> None:
        flags = {"fails": True} if sent.fails and not sent.errors else {}
        try:
            result: Any = await worker.order(
                sent.way, session=sent.session, text=sent.text, message=sent.message, padding=sent.padding, **flags
            )
        except GoneError:
            if sent.hit_at is None:
                sent.hit_at = time.monotonic()
            return
        except RefusedError as error:
            sent.errors.append(str(error))
            self._news.set()
            if error.kind not in FAULTS_ERRORS:
                self.unexpected.append(f"{sent.message}: {error}")
            return
        if sent.acked_at is None:
            sent.acked_at = self.now()
        self._news.set()
        if sent.way == "run" and result["stop"] != "not_stored":
            self._answered(sent, result["content"])

    def _answered(self, sent: Sent, content: str) -> None:
        if not sent.answers and sent.hit_at is not None:
            sent.recovery = time.monotonic() - sent.hit_at
        sent.answers.append(content)
        self._news.set()

    async def news(self) -> None:
        """Wait until somebody is told something."""
        self._news.clear()
        await self._news.wait()

    async def late(self, seconds: float) -> None:
        """Wait for what is answered late, but not for longer than that."""
        if self._late:
            await asyncio.wait(self._late, timeout=seconds)

    async def settled(self) -> None:
        """Wait until nothing that was sent is still to be answered late."""
        while self._late:
            await asyncio.wait(self._late)
