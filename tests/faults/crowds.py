"""Many processes on one conversation, deletions while turns run, and a message that kills whoever takes it up."""

from __future__ import annotations

import asyncio
import random
from collections import defaultdict
from typing import Any, Final

from tests.faults.judge import judge, nothing_left, read
from tests.faults.kills import PLANS, config
from tests.faults.ledger import Ledger, Sent
from tests.faults.processes import Crew, GoneError, RefusedError, Worker, crew_of, until
from tests.faults.sender import Sender
from tests.faults.storage import Storage
from tests.faults.table import Row

PROCESSES: Final = 8
EACH: Final = 25


# --- one conversation ---


async def one_conversation(storage: Storage, seed: int, each: int = EACH) -> list[Row]:
    """Each process asks for its turns all at once, and gets them in the order in which it asked."""
    choices = random.Random(seed)
    fault = f"{PROCESSES} processes, one conversation, {PROCESSES * each} messages at once"
    row = Row(fault=fault, layer="none", injected=0)
    sents: list[Sent] = []
    # The usual lease: nobody is frozen here, so nobody's turn may be taken over.
    async with crew_of([config(storage, lease_seconds=10)] * PROCESSES, choices) as crew, asyncio.timeout(55):
        async with asyncio.TaskGroup() as group:
            for number in range(each):
                for slot, worker in crew.workers.items():
                    sent = Sent("c", f"p{slot}.{number}", choices.choice(PLANS))
                    sents.append(sent)
                    group.create_task(_ask(worker, sent))
        row.injected = len(sents)
        left = await nothing_left(storage)
        await crew.end()
    verdict = judge(storage, sents)
    verdict.broken += [*crew.bad_ends, *left, *overlapping(storage.ledger)]
    turns: dict[str, list[int]] = defaultdict(list)
    for name, _ in read(storage)["c"].turns:
        process, _, number_text = name.partition(".")
        turns[process].append(int(number_text))
    verdict.out_of_order += [f"the turns of {process}: {its}" for process, its in turns.items() if its != sorted(its)]
    return [row.add(verdict)]


async def _ask(worker: Worker, sent: Sent) -> None:
    result = await worker.order("run", session=sent.session, text=sent.text, message=sent.message)
    sent.sent_at, sent.acked_at = 1, 2
    sent.answers.append(result["content"])


def overlapping(ledger: Ledger) -> list[str]:
    """Models asked for one message, then for another, then for the first again: two turns ran at the same time."""
    ended: set[str] = set()
    now = ""
    found: list[str] = []
    for line in ledger.lines("asked"):
        if line["message"] != now:
            ended.add(now)
            now = line["message"]
            if now in ended:
                found.append(f"{now} ran while another turn did")
    return found


# --- deletions ---


async def deleted(storage: Storage, seed: int, rounds: int = 12) -> list[Row]:
    """Conversations are deleted by one process while turns of theirs run in others, some of which are killed."""
    choices = random.Random(seed)
    ledger = storage.ledger
    row = Row(fault="delete while turns run elsewhere, and the id used anew", layer="another process", injected=0)
    sents: list[Sent] = []
    async with crew_of([config(storage, working=True) for _ in range(3)], choices) as crew, asyncio.timeout(55):
        for turn in range(rounds):
            session = f"c{turn % 2}"
            now = [
                Sent(session, f"{session}.{turn}.{number}", choices.choice(PLANS), choices.choice(("run", "accept")))
                for number in range(6)
            ]
            sents += now
            async with asyncio.TaskGroup() as group:
                asking = [group.create_task(_ask_once(crew, sent)) for sent in now]
                await asyncio.wait(asking, return_when=asyncio.FIRST_COMPLETED)
                group.create_task(_delete(crew, ledger, session, turn))
                if turn % 4 == 3:
                    await crew.kill(choices.randrange(3))
            row.injected += 1
        last = [Sent(f"c{number % 2}", f"last.{number}", choices.choice(PLANS)) for number in range(4)]
        async with asyncio.TaskGroup() as group:
            for sent in last:
                group.create_task(_ask_once(crew, sent, until_answered=True))
        left = await nothing_left(storage)
        # A message that was answered is known although its conversation was deleted, and is not run again.
        known = next(sent for sent in sents if sent.answers)
        again = await crew.workers[0].order("run", session=known.session, text=known.text, message=known.message)
        if again["stop"] not in {"not_stored", "answer"} or not again["duplicate"]:
            row.details.append(f"{known.message} was answered and is run again: {again}")
        await crew.end()
    row.acknowledged = sum(sent.acked_at is not None for sent in (*sents, *last))
    row.details += [*crew.bad_ends, *left, *_come_back(storage, last)]
    return [row]


async def _ask_once(crew: Crew, sent: Sent, *, until_answered: bool = False) -> None:
    while True:
        worker = await crew.any("Support")
        try:
            result = await worker.order(sent.way, session=sent.session, text=sent.text, message=sent.message)
        except GoneError:
            if until_answered:
                continue
            return
        except RefusedError as error:
            sent.errors.append(str(error))
            if until_answered:
                continue
            if error.kind not in {"SessionDeletedError", "SessionConflictError"}:
                raise
            return
        sent.acked_at = 1
        if sent.way == "run":
            sent.answers.append(result["content"])
        return


async def _delete(crew: Crew, ledger: Ledger, session: str, turn: int) -> None:
    ledger.note("deleting", session=session, turn=turn)
    while True:
        try:
            done = await (await crew.any("Support")).order("delete", session=session)
        except GoneError:
            continue
        # Where a process was killed in between, the first try may have done it.
        ledger.note("deleted", session=session, turn=turn, found=done)
        return


def _come_back(storage: Storage, last: list[Sent]) -> list[str]:
    """What is stored of a turn that had begun before its conversation was deleted."""
    begun: dict[str, int] = {}
    deleting: dict[str, int] = {}
    for number, line in enumerate(storage.ledger.lines()):
        if line["what"] == "asked":
            begun.setdefault(line["message"], number)
        elif line["what"] == "deleting":
            start = number
            deleting[line["session"]] = start
    broken = storage.damage()
    for session, conversation in read(storage).items():
        end = deleting.get(session, -1)
        names = [name for name, _ in conversation.turns]
        noted = {key.partition(" ")[0] for key in conversation.metadata}
        stated = {key.rsplit(".", 2)[0] for key in conversation.state}
        for name in {*names, *noted, *stated}:
            if begun.get(name, end) < end:
                broken.append(f"{name} began before {session} was deleted, and is in it")
        broken += [f"{name} left something in {session}, and has no turn" for name in (noted | stated) - set(names)]
        broken += [f"{name} has two turns" for name in set(names) if names.count(name) > 1]
        wanted = [sent for sent in last if sent.session == session]
        broken += [f"{sent.message} was acknowledged and is lost" for sent in wanted if sent.message not in names]
        for name, messages in conversation.turns:
            if messages[-1].tool_calls or messages[-1].tool_results:
                broken.append(f"{name}: half a turn")
    return broken


# --- a poisonous message ---

ATTEMPTS: Final = 3


async def poisoned(storage: Storage, seed: int) -> list[Row]:
    """A message that kills its process each time is given up; the conversation goes on, and so do the others."""
    choices = random.Random(seed)
    ledger = storage.ledger
    fault = f"a message that kills its process (max_attempts={ATTEMPTS})"
    row = Row(fault=fault, layer="inside the process", injected=0)
    others: list[Sent] = []
    poison: list[Sent] = []
    configs = [config(storage, working=True, max_attempts=ATTEMPTS) for _ in range(2)]
    async with crew_of(configs, choices) as crew, asyncio.timeout(55):
        sender = Sender(crew, choices)
        reviving = asyncio.create_task(_revive(crew))
        for way in ("accept", "run"):
            bad = Sent(f"c-{way}", f"bad-{way}", "die", way)
            behind = [
                Sent(bad.session, f"b{number}-{way}", "plain", ("run", "accept")[number % 2]) for number in range(4)
            ]
            poison.append(bad)
            others += behind
            sending = asyncio.create_task(sender.send(bad))
            await until(lambda: bad.message in [line["message"] for line in ledger.lines("asked")])  # noqa: B023  # at once
            async with asyncio.TaskGroup() as group:
                for sent in behind:
                    group.create_task(sender.send(sent))
            sending.cancel()
            await asyncio.wait([sending])
        pending = await (await crew.any("Support")).order("pending")
        for bad in poison:
            row.details += await _given_up(crew, bad, pending)
        left = await nothing_left(storage, *(bad.message for bad in poison))
        await until(lambda: not any(worker.is_gone for worker in crew.workers.values()))
        reviving.cancel()
        await asyncio.wait([reviving])
        await crew.end()
    asked = [line["message"] for line in ledger.lines("asked")]
    for bad in poison:
        row.injected += asked.count(bad.message)
        if asked.count(bad.message) != ATTEMPTS:
            row.details.append(f"{bad.message} was begun {asked.count(bad.message)} times")
    verdict = judge(storage, others)
    verdict.broken += [*sender.unexpected, *crew.bad_ends, *left]
    return [row.add(verdict)]


async def _revive(crew: Crew) -> None:
    """Start a worker for each that has died."""
    while True:
        for slot, worker in list(crew.workers.items()):
            if worker.is_gone:
                await crew.start(slot)
        await asyncio.sleep(0.02)


async def _given_up(crew: Crew, bad: Sent, pending: list[list[Any]]) -> list[str]:
    listed = [[state, attempts] for message, state, attempts in pending if message == bad.message]
    found = [] if listed == [["dead", ATTEMPTS]] else [f"{bad.message} is listed as {listed}"]
    try:
        await (await crew.any("Support")).order("run", session=bad.session, text=bad.text, message=bad.message)
    except RefusedError as error:
        if error.kind == "MessageDeadError":
            return found
        return [*found, f"{bad.message}, sent again: {error}"]
    return [*found, f"{bad.message} was answered"]
