"""A schedule: who sends what to whom, who is killed, paused or cancelled, and when. A seed decides it all."""

from __future__ import annotations

import datetime as dt
import random
from collections.abc import Callable
from typing import Final

from chatflow import AgentResponse
from chatflow.core.records import Key
from tests.model.ledger import Ledger, Message, Nested, Script, Step
from tests.model.process import ALL_HABITS, Habits, Process, Shared, Told
from tests.model.runs import accept, bare, run
from tests.model.settings import Setting
from tests.model.simulator import Cancelled, Flow, Pause, Simulator, Task
from tests.model.storage import Clock, Memory, Storage
from tests.model.worker import Worker

EPOCH: Final = dt.datetime(2026, 1, 1, tzinfo=dt.UTC)

PATIENCE: Final = 150.0
"""Virtual seconds after the last disturbance in which everybody has to have been answered or told."""

PASSED_BY: Final = 12
"""Bare turns that may pass accepted work while somebody is there to do it."""


class World:
    """One schedule."""

    def __init__(
        self, seed: int, setting: Setting, storage: Callable[[Clock], Storage] = Memory, habits: Habits = ALL_HABITS
    ) -> None:
        self.random = random.Random(seed)
        self.setting = setting
        self.simulator = Simulator((Told, Cancelled))
        self.storage = storage(lambda: EPOCH + dt.timedelta(seconds=self.simulator.now))
        ledger = Ledger(self.storage, max_attempts=3, clock=lambda: self.simulator.now)
        self.ledger = ledger
        self.shared = Shared(
            self.simulator, self.storage, ledger, self.random, habits, ledger.max_attempts, 8.0, setting.latency
        )
        self.shared.dies = self._dies
        ledger.on_passing = self._check_passing
        self.workers: dict[str, Worker] = {}
        self.tasks: list[Task] = []
        self.keys = [Key("", f"c{number}") for number in range(1, setting.conversations + 1)]

    # --- processes ---

    def _start(self, agent: str, *, works: bool) -> Process:
        shared, name = self.shared, f"p{len(self.shared.processes) + 1}"
        process = Process(shared, name, agent, self.random.choice(self.setting.leases), self.setting.slots)
        shared.processes[name] = process
        self.ledger.say(f"{name} of {agent} starts, lease {process.lease}, works: {works}")
        if works:
            self._work(process)
        return process

    def _work(self, process: Process) -> None:
        worker = self.workers[process.name] = Worker(process, since=self.simulator.now)
        self.simulator.spawn(worker.run(), process, f"{process} works")

    def _living(self, agent: str) -> Process | None:
        living = [process for process in self.shared.processes.values() if process.alive and process.agent == agent]
        return self.random.choice(living) if living else None

    def _any(self) -> Process | None:
        living = [process for process in self.shared.processes.values() if process.alive]
        return self.random.choice(living) if living else None

    def _dies(self, process: Process) -> None:
        if not process.alive:
            return
        process.alive = False
        for message in self.ledger.messages.values():
            message.failed_at = None
        seen = self.random.random() < self.setting.seen
        self.ledger.say(f"{process} is killed{', as anybody can see' if seen else ''}")
        if seen:
            self.storage.gone.add(process.holder)
            self.ledger.killed_at = self.simulator.now
        works = process.name in self.workers and not self.workers[process.name].is_stopping
        self.simulator.spawn(self._restart(process.agent, works=works), None, "restart")

    def _restart(self, agent: str, *, works: bool) -> Flow[None]:
        yield Pause(self.random.uniform(0.05, 1.5))
        self._start(agent, works=works)

    # --- the outside world ---

    def _go(self, flow: Flow[object], name: str, process: Process | None = None) -> Task:
        task = self.simulator.spawn(flow, process, name)
        self.tasks.append(task)
        return task

    def _send(self, message: Message, start: float) -> Flow[None]:
        """Deliver until it is answered, or until a sender that was told gives up."""
        yield Pause(start)
        told = 0
        while True:
            process = self._living(message.agent)
            if process is None:
                yield Pause(0.5)
                continue
            self.ledger.say(f"{message.message_id} for {message.key.session_id} is sent to {process}")
            task = self._go(run(process, message.key, message.script, message), f"run {message.message_id}", process)
            hurry = self.random.random() < self.setting.impatient
            yield from task.done.wait(self.random.uniform(0.3, 6.0) if hurry else 10.0)
            if not task.is_done:
                if self.random.random() < self.setting.cancelled:
                    task.cancel()
                continue
            if task.error is None:
                self._answered(message, task.result)
                return
            told += 1
            if isinstance(task.error, Told):
                self._told(message, task.error, process)
                if task.error.what == "dead":
                    return
            if told > 8 or self.random.random() < 0.2:
                return
            yield Pause(self.random.uniform(0.1, 2.0))

    def _answered(self, message: Message, response: AgentResponse) -> None:
        self.ledger.say(f"{message.message_id} got {response.content!r}")
        message.is_answered = True
        wanted = {message.message_id, ""} if message.was_deleted else {message.message_id}
        if response.content not in wanted:
            raise self.ledger.fail("answer", f"{message.message_id} got {response.content!r}")

    def _told(self, message: Message, error: Told, process: Process) -> None:
        self.ledger.say(f"{message.message_id} was told: {error.what}")
        if error.whose not in {None, message.message_id}:
            raise self.ledger.fail("others' error", f"{message.message_id} was told that {error.whose} {error.what}")
        if error.what == "conflict" and process.disturbed_at < 0.0:
            raise self.ledger.fail("robbed", f"{message.message_id} lost its turn, and nothing had disturbed {process}")
        if error.what == "in progress":
            raise self.ledger.fail("in progress", f"{message.message_id} was not told how its duplicate ended")
        if error.what == "timeout":
            raise self.ledger.fail("timeout", f"{message.message_id} was out of time, for having waited")
        if error.what == "mismatch" and not message.was_deleted:
            raise self.ledger.fail("answer", f"{message.message_id} is taken for another message")

    def _accept(self, message: Message, start: float) -> Flow[None]:
        yield Pause(start)
        while True:
            process = self._living(message.agent)
            if process is None:
                yield Pause(0.5)
                continue
            task = self._go(accept(process, message), f"accept {message.message_id}", process)
            yield from task.done.wait(1.0)
            if task.is_done and self.random.random() < 0.9:
                return

    def _bare(self, key: Key, start: float) -> Flow[None]:
        yield Pause(start)
        process = self._any()
        if process is not None:
            task = self._go(bare(process, key, self.random.uniform(0.05, 2.0)), "bare", process)
            if self.random.random() < self.setting.cancelled:
                yield Pause(self.random.uniform(0.0, 1.5))
                task.cancel()

    def _anonymous(self, key: Key, start: float) -> Flow[None]:
        """A message without an id: sent once."""
        yield Pause(start)
        agent = self.random.choice(self.agents)
        process = self._living(agent)
        if process is not None:
            self._go(run(process, key, self._script(key, nested=False), None), "anonymous", process)

    def _stream(self, key: Key, start: float) -> Flow[None]:
        """Bare turns without end, as it seems to who waits behind them."""
        yield Pause(start)
        for _ in range(3 * PASSED_BY):
            process = self._any()
            if process is not None:
                task = self._go(bare(process, key, self.random.uniform(0.1, 0.3)), "stream", process)
                yield from task.done.wait(20.0)

    def _impostor(self, message: Message, start: float) -> Flow[None]:
        """Another text under the same id, once that has been seen."""
        yield Pause(start)
        process = self._living(message.agent)
        if process is None or not (message.runs or message.place) or message.was_deleted:
            return
        task = self._go(run(process, message.key, message.script, message, "another"), "impostor", process)
        yield from task.done.wait(60.0)
        if task.is_done and task.error is None and not message.was_deleted:
            raise self.ledger.fail("answer", f"another text under the id {message.message_id} was answered")

    def _kill(self, start: float) -> Flow[None]:
        yield Pause(start)
        process = self._any()
        if process is not None:
            self._dies(process)

    def _pause(self, start: float) -> Flow[None]:
        yield Pause(start)
        process = self._any()
        if process is not None:
            process.paused_until = self.simulator.now + process.lease * self.random.uniform(0.3, 4.0)
            process.disturbed_at = max(process.disturbed_at, process.paused_until)
            self.ledger.say(f"{process} is paused until {process.paused_until:.2f}")

    def _slow(self, start: float) -> Flow[None]:
        yield Pause(start)
        process = self._any()
        if process is not None:
            process.slow_until = self.simulator.now + process.lease * self.random.uniform(0.2, 1.2)
            process.disturbed_at = max(process.disturbed_at, process.slow_until)

    def _stall(self, start: float) -> Flow[None]:
        """Somebody else holds the storage."""
        yield Pause(start)
        self.shared.stalled_from = self.simulator.now
        self.shared.stalled_until = self.simulator.now + self.random.uniform(0.1, 6.0)
        for process in self.shared.processes.values():
            process.disturbed_at = max(process.disturbed_at, self.shared.stalled_until + 0.5)
        self.ledger.say(f"the storage is held until {self.shared.stalled_until:.2f}")

    def _delete(self, key: Key, start: float) -> Flow[None]:
        yield Pause(start)
        process = self._any()
        if process is not None:
            self._go(self._delete_by(process, key), "delete", process)

    def _delete_by(self, process: Process, key: Key) -> Flow[None]:
        def operation() -> None:
            turns = self.storage.delete(process.holder, key)
            if turns is not None:
                self.ledger.say(f"{process} deletes {key.session_id}")
                self.ledger.deleted(key)
                session = process.sessions.get(key)
                if session is not None:
                    session.is_deleted = True
                process.wake(*turns)

        yield from process.op(operation)

    def _stop(self, start: float) -> Flow[None]:
        yield Pause(start)
        working = [worker for worker in self.workers.values() if worker.process.alive and not worker.is_stopping]
        if working:
            worker = self.random.choice(working)
            self.ledger.say(f"{worker.process} stops working")
            worker.is_stopping = True
            worker.signal.fire()

    # --- the schedule ---

    @property
    def agents(self) -> list[str]:
        """The applications, by their starting agents."""
        return [f"app{number}" for number in range(1, self.setting.applications + 1)]

    def _count(self, most: float) -> int:
        whole = int(most)
        return self.random.randint(0, whole) if most == whole else int(self.random.random() < most)

    def _script(self, key: Key, *, nested: bool = True) -> Script:
        draw, setting = self.random, self.setting
        steps = []
        for _ in range(draw.choice((0, 0, 1, 1, 2, 3))):
            inner = None
            others = [other for other in self.keys if other != key]
            if nested and others and draw.random() < setting.nested:
                inner = self._nested(draw.choice(others))
            steps.append(
                Step(draw.uniform(0.05, 0.6), draw.uniform(0.05, 0.8), idempotent=draw.random() < 0.4, nested=inner)
            )
        failures = draw.choice((1, 1, 2, 99)) if draw.random() < setting.failing else 0
        return Script(
            tuple(steps), draw.uniform(0.05, setting.thinking), failures, kills=draw.random() < setting.poison
        )

    def _nested(self, key: Key) -> Nested:
        kind = self.random.random()
        if kind < 0.4:
            return Nested(key, None, bare=True)
        if kind < 0.7:
            return Nested(key, None, bare=False)
        known = [message for message in self.ledger.messages.values() if message.key == key]
        if self.setting.shared_nested and known:
            message = self.random.choice(known)
            return Nested(key, message.message_id, bare=False)
        return Nested(key, self._message(key, Script((), 0.2)).message_id, bare=False)

    def _message(self, key: Key, script: Script | None = None) -> Message:
        script = self._script(key) if script is None else script
        number = len(self.ledger.messages) + 1
        agent = self.random.choice(self.agents)
        message = Message(key, f"m{number}", f"text {number}", agent, script)
        self.ledger.messages[key, message.message_id] = message
        return message

    def _when(self, share: float = 1.0) -> float:
        return self.random.uniform(0.0, self.setting.seconds * share)

    def _plan(self) -> None:
        for agent in self.agents:
            works = self.random.random() < self.setting.working
            for number in range(max(1, self._count(self.setting.processes))):
                self._start(agent, works=works and number == 0)
        for _ in range(max(1, self._count(self.setting.messages))):
            self._plan_message(self._message(self.random.choice(self.keys)))
        for flow, most in ((self._bare, self.setting.bare), (self._anonymous, self.setting.anonymous)):
            for _ in range(self._count(most)):
                self._go(flow(self.random.choice(self.keys), self._when(0.7)), "bare or anonymous")
        for _ in range(self.setting.streams):
            self._go(self._stream(self.keys[0], self.random.uniform(0.0, 0.5)), "stream")
        self._plan_disturbances()

    def _plan_message(self, message: Message) -> None:
        draw, name, start = self.random, message.message_id, self._when(0.7)
        if draw.random() < self.setting.accepted:
            self._go(self._accept(message, start), f"accept {name}")
            if draw.random() < 0.3:
                self._go(self._send(message, self._when(0.7)), f"send {name}")
        else:
            self._go(self._send(message, start), f"send {name}")
            if draw.random() < 0.3:
                self._go(self._send(message, start + draw.uniform(0.0, 1.0)), f"send {name} too")
        if draw.random() < self.setting.impostors:
            self._go(self._impostor(message, start + draw.uniform(0.1, 3.0)), "impostor")

    def _plan_disturbances(self) -> None:
        setting = self.setting
        for flow, most in (
            (self._kill, setting.kills),
            (self._pause, setting.pauses),
            (self._slow, setting.slow),
            (self._stall, setting.stalls),
            (self._stop, setting.stops),
        ):
            for _ in range(self._count(most)):
                self._go(flow(self._when()), "disturbance")
        for _ in range(self._count(setting.deletes)):
            self._go(self._delete(self.random.choice(self.keys), self._when()), "delete")

    def _check_passing(self, key: Key) -> None:
        """A bare turn begins: accepted work that somebody could do has not been passed by too often."""
        for message in self.ledger.messages.values():
            if message.key != key or not message.is_accepted or message.runs or message.commits:
                continue
            first = not any(
                other.place is not None and message.place is not None and other.place < message.place
                for other in self.ledger.messages.values()
                if other.key == key and other.agent == message.agent
            )
            could = first and any(
                worker.process.alive
                and not worker.is_stopping
                and worker.process.agent == message.agent
                and self.simulator.now > max(worker.process.disturbed_at, worker.since) + 1.0
                for worker in self.workers.values()
            )
            message.passed_by = message.passed_by + 1 if could else 0
            if message.passed_by > PASSED_BY:
                raise self.ledger.fail("starved", f"{message.message_id} was passed by {message.passed_by} times")

    def run(self) -> None:
        """All of it; raises `Violation` at the first broken promise."""
        self._plan()
        self._run_until(lambda: False, self.setting.seconds)
        self.shared.calm = True
        self._run_until(self._all_told, self.simulator.now + PATIENCE)
        waiting = [task.name for task in self.tasks if not task.is_done and self._lives(task)]
        if waiting:
            for row in self.storage.rows():
                self.ledger.say(str(row))
            raise self.ledger.fail("blocked", f"nobody answers {', '.join(waiting[:8])}")
        self.ledger.say("the last workers start")
        for agent in self.agents:
            self._start(agent, works=True)
        self._run_until(self._nothing_left, self.simulator.now + PATIENCE)
        self.ledger.close()

    def _run_until(self, done: Callable[[], bool], end: float) -> None:
        steps = 0
        while self.simulator.run_until(end):
            steps += 1
            if steps % 64 == 0 and done():
                return

    def _lives(self, task: Task) -> bool:
        return task.machine is None or task.machine.alive

    def _all_told(self) -> bool:
        self.tasks = [task for task in self.tasks if not task.is_done and self._lives(task)]
        return not self.tasks

    def _nothing_left(self) -> bool:
        return all(row.state.value in {"told", "dead"} for row in self.storage.rows())


def play(
    seed: int, setting: Setting, storage: Callable[[Clock], Storage] = Memory, habits: Habits = ALL_HABITS
) -> World:
    """Run the schedule of that seed; a broken promise comes with its story."""
    world = World(seed, setting, storage, habits)
    try:
        world.run()
    except Exception as error:
        error.add_note("\n".join(["", *world.ledger.trace[-80:], f"seed {seed}, {setting}"]))
        raise
    finally:
        world.simulator.close()
        world.storage.close()
    return world
