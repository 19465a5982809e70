"""Virtual time: tasks that are generators, run one step at a time, in processes that may be killed and paused.

A task yields what it waits for. A process that is killed is not told: its tasks are never resumed. One that is paused
goes on later, with all that it believed before.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Generator
from typing import Any, TypeVar

import attrs

_T = TypeVar("_T")


class Cancelled(Exception):  # noqa: N818  # as asyncio names it
    """The task was cancelled."""


@attrs.frozen
class Pause:
    """Wait for *signal*, or for *seconds*; where *shielded*, a cancellation waits too."""

    seconds: float
    signal: Signal | None = None
    shielded: bool = False


Flow = Generator[Pause, None, _T]
"""What a task does."""


@attrs.define(eq=False)
class Signal:
    """An event that its only waiter takes note of once."""

    is_set: bool = False
    waiter: tuple[Task, int] | None = None

    def fire(self) -> None:
        """Wake the waiter, or let the next wait return at once."""
        self.is_set = True
        if self.waiter is not None:
            task, step = self.waiter
            self.waiter = None
            task.simulator.at(0.0, task, step)

    def wait(self, seconds: float) -> Flow[bool]:
        """Return once fired (true), or after *seconds*."""
        if not self.is_set:
            yield Pause(seconds, self)
        fired, self.is_set = self.is_set, False
        self.waiter = None
        return fired


@attrs.define(eq=False)
class Machine:
    """A process, as far as time goes."""

    alive: bool = True
    paused_until: float = 0.0


@attrs.define(eq=False)
class Task:
    """A generator that runs in *machine*, or in the outside world, which nobody can kill."""

    simulator: Simulator
    flow: Flow[Any]
    machine: Machine | None
    name: str
    step: int = 0
    shielded: bool = False
    cancelling: bool = False
    is_done: bool = False
    result: Any = None
    error: Exception | None = None
    done: Signal = attrs.field(factory=Signal)

    def cancel(self) -> None:
        """Raise `Cancelled` where it waits, now or once that is no longer shielded."""
        if not self.is_done and not self.cancelling:
            self.cancelling = True
            if self.step and not self.shielded:
                self.simulator.at(0.0, self, self.step)


class Simulator:
    """The clock, and what happens when."""

    def __init__(self, expected: tuple[type[Exception], ...]) -> None:
        self.now = 0.0
        self.steps = 0
        self._expected = expected
        self._due: list[tuple[float, int, Task, int]] = []
        self._count = 0
        self._tasks: list[Task] = []

    def at(self, seconds: float, task: Task, step: int) -> None:
        """Resume the task in so many seconds, unless it has gone on by then."""
        self._count += 1
        heapq.heappush(self._due, (self.now + seconds, self._count, task, step))

    def spawn(self, flow: Flow[Any], machine: Machine | None, name: str) -> Task:
        """A new task, which begins now."""
        task = Task(self, flow, machine, name)
        self._tasks.append(task)
        self.at(0.0, task, 0)
        return task

    def run_until(self, end: float) -> bool:
        """One step; False if nothing is left to do before *end*."""
        if not self._due or self._due[0][0] > end:
            return False
        self.now, _, task, step = heapq.heappop(self._due)
        if task.is_done or task.step != step:
            return True
        machine = task.machine
        if machine is not None:
            if not machine.alive:
                return True
            if machine.paused_until > self.now:
                self.at(machine.paused_until - self.now, task, step)
                return True
        self.steps += 1
        self._resume(task)
        return True

    def close(self) -> None:
        """Nobody goes on, those neither that were killed."""
        for task in self._tasks:
            task.flow.close()

    def _resume(self, task: Task) -> None:
        task.step += 1
        try:
            if task.cancelling and not task.shielded and task.step > 1:
                task.cancelling = False
                pause = task.flow.throw(Cancelled())
            else:
                pause = next(task.flow)
        except StopIteration as end:
            task.is_done, task.result = True, end.value
        except self._expected as error:
            task.is_done, task.error = True, error
        else:
            task.shielded = pause.shielded
            if pause.signal is not None:
                pause.signal.waiter = (task, task.step)
            if task.cancelling and not task.shielded:
                self.at(0.0, task, task.step)
            elif pause.seconds < math.inf:
                self.at(pause.seconds, task, task.step)
            return
        task.done.fire()
