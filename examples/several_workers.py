"""Several processes work on one file, and are killed: each message is answered once, in order, also if it comes twice.

    python several_workers.py            40 messages, 3 workers
    python several_workers.py 200 5      200 messages, 5 workers

This process delivers the messages, as a webhook would, and kills a worker now and then; it starts another one, and what
the dead one had begun goes on there. So it does where you kill one. At the end it reads from the file what became of
them all.

Set in the environment: MODEL, the model that answers, and its provider's key (without a model a script answers).
"""

import os
import subprocess
import sys
import tempfile
from collections import Counter
from contextlib import suppress
from pathlib import Path

import anyio
from anyio.abc import Process, TaskGroup
from anyio.streams.buffered import BufferedByteReceiveStream

from chatflow import (
    Agent,
    AgentResponse,
    ChatflowError,
    LiteLLMEngine,
    PendingTurn,
    Role,
    Runner,
    ScriptedEngine,
    SQLiteSessionStore,
    last_result,
    tool,
)

MODEL = os.environ.get("MODEL")
CUSTOMERS = 8
KILLS = 3


@tool(idempotent=True)  # it only reads: what a kill has cut off is looked up again
async def check_order_status(order_id: str) -> str:
    """Check shipment tracking for an order ID."""
    await anyio.sleep(0.05)  # stands for the carrier's service
    return f"Order {order_id} arrives tomorrow."


def scripted() -> ScriptedEngine:
    """What the agent says where no model is named."""
    engine = ScriptedEngine()
    engine.when(r"order (?P<order_id>\d+)", call="check_order_status")
    engine.when(result_of="check_order_status", reply=last_result)
    return engine


def runner_on(store: SQLiteSessionStore) -> Runner:
    """The same in every process: its starting agent's name says whose work it is."""
    support = Agent("Support", "Look orders up. Be brief.", model=MODEL or "gpt-4o", tools=[check_order_status])
    return Runner(support, store, LiteLLMEngine() if MODEL else scripted(), max_concurrent_turns=4)


async def work(path: str) -> None:
    """A worker: it answers what is in the file, and says so, until its input is closed."""

    async def on_response(turn: PendingTurn, response: AgentResponse) -> None:
        print(turn.message_id, flush=True)  # stands for sending the answer

    async with SQLiteSessionStore(path) as store, runner_on(store).working(on_response):
        await anyio.to_thread.run_sync(sys.stdin.read, abandon_on_cancel=True)


class Workers:
    """The processes that work, and what they have told."""

    def __init__(self, path: str, messages: int, tasks: TaskGroup) -> None:
        self.told: Counter[str] = Counter()
        self.all_told = anyio.Event()
        self.killed = 0
        self._path = path
        self._messages = messages
        self._tasks = tasks
        self._alive: set[Process] = set()

    async def start(self) -> None:
        """Start one, and listen to it until it ends."""
        command = [sys.executable, __file__, "work", self._path]
        async with await anyio.open_process(command, stdin=subprocess.PIPE, stderr=None) as process:
            assert process.stdin is not None
            assert process.stdout is not None
            self._alive.add(process)
            if self.all_told.is_set():  # nothing is left for it
                await process.stdin.aclose()
            lines = BufferedByteReceiveStream(process.stdout)
            with suppress(anyio.EndOfStream, anyio.IncompleteRead):
                while True:  # also what one that is dead has said before
                    self.told[(await lines.receive_until(b"\n", 1000)).decode()] += 1
                    if len(self.told) == self._messages:
                        self.all_told.set()
                    elif process in self._alive and len(self.told) > self._messages * (self.killed + 1) / (KILLS + 1):
                        process.kill()
                        self._replace(process)
            if process in self._alive and not self.all_told.is_set():  # somebody else has killed it
                if await process.wait() > 0:
                    raise RuntimeError("a worker has failed, for the reason above")
                self._replace(process)
            self._alive.discard(process)

    def _replace(self, process: Process) -> None:
        """Start another one in the place of one that was killed, whatever it did."""
        self._alive.discard(process)
        self.killed += 1
        self._tasks.start_soon(self.start)

    async def stop(self) -> None:
        """Let all end what they do, and then themselves."""
        for process in [*self._alive]:
            assert process.stdin is not None
            await process.stdin.aclose()


async def answers(store: SQLiteSessionStore, customer: str) -> list[tuple[str, str]]:
    """The conversation from the file: each thing that was asked, and what has answered it."""
    session = await store.get(customer)
    assert session is not None
    said = [each.text for each in session.history if each.role in {Role.USER, Role.MODEL} and each.text]
    return [*zip(said[::2], said[1::2], strict=True)]


async def main(messages: int, workers: int) -> bool:
    """Deliver, kill, and look; returns whether each message was answered once, in its place."""
    asked: dict[str, list[str]] = {}
    for number in range(messages):
        asked.setdefault(f"customer-{number % CUSTOMERS}", []).append(f"Where is order {number}?")
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "chat.db")
        async with SQLiteSessionStore(path, default_max_turns=messages) as store:
            runner = runner_on(store)
            if MODEL:  # what can't be asked ends all here, where the workers would try again and again
                await runner.run_async("nobody", "Hello")
            async with anyio.create_task_group() as tasks:
                crowd = Workers(path, messages, tasks)
                for _ in range(workers):
                    tasks.start_soon(crowd.start)
                for customer, texts in [*asked.items()] * 2:  # those of the second time are known, answered or not
                    for text in texts:
                        await runner.accept(customer, text, message_id=text)
                await crowd.all_told.wait()
                await crowd.stop()
            found = {customer: await answers(store, customer) for customer in asked}
            left = [turn for turn in await store.pending_turns() if turn.state != "answered"]
    count = sum(map(len, found.values()))
    print(f"{messages} messages, each delivered twice; {workers} workers, and {crowd.killed} that were killed")
    again = crowd.told.total() - messages
    print(f"{count} answers in the file, all sent; {again} times one was sent again, after a kill")
    is_right = not left and all([text for text, _ in found[customer]] == asked[customer] for customer in asked)
    print("each message has one answer, in its place" if is_right else f"something is wrong: {found}, {left}")
    return is_right


if __name__ == "__main__":
    if sys.argv[1:2] == ["work"]:
        anyio.run(work, sys.argv[2])
    else:
        messages, workers = map(int, sys.argv[1:] or (40, 3))
        try:
            is_right = anyio.run(main, max(1, messages), max(1, workers))
        except ChatflowError as error:
            sys.exit(f"several_workers: {error}")
        sys.exit(0 if is_right else 1)
