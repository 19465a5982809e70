"""`Runner.working`: the flow of running/worker.py, with its real back-off."""

from __future__ import annotations

import attrs

from chatflow import AgentResponse
from chatflow.core.records import Answered, NewSession, Work
from chatflow.core.rows import WAITING
from chatflow.core.values import EMPTY
from chatflow.running.worker import delay
from tests.model.process import Failed, Process, Session, Told
from tests.model.runs import do_first, run_work
from tests.model.simulator import Cancelled, Flow, Pause, Signal, Task
from tests.model.turn import Turn

AT_ONCE = 8
LOOK_FOR_WORK = 0.25


@attrs.define(eq=False)
class Worker:
    """`Runner.working`."""

    process: Process
    since: float
    is_stopping: bool = False
    signal: Signal = attrs.field(factory=Signal)
    doing: list[Task] = attrs.field(factory=list)

    def run(self) -> Flow[None]:
        """Take, and do."""
        process, shared = self.process, self.process.shared
        process.beats.everything += 1
        process.beats.look_soon()
        process.for_work.append(self.signal)
        while not self.is_stopping:
            self.doing = [task for task in self.doing if not task.is_done]
            free = AT_ONCE - len(self.doing)
            works: tuple[Work, ...] = ()
            if free:
                works = yield from process.op(
                    lambda free=free: shared.storage.take_work(process.holder, process.agent, process.lease, free)  # type: ignore[misc]
                )
            for work in works:
                shared.ledger.say(f"{process} takes turn {work.turn.turn_id}")
                self.doing.append(
                    shared.simulator.spawn(self._do(work), process, f"{process} does {work.turn.turn_id}")
                )
            if not works:
                yield from self.signal.wait(LOOK_FOR_WORK)
        process.for_work.remove(self.signal)
        process.beats.everything -= 1
        for task in self.doing:
            task.cancel()

    def _do(self, work: Work) -> Flow[None]:
        process, shared = self.process, self.process.shared
        session = yield from _session_of(process, work)
        if session is None:
            return
        turn = Turn.of_work(process, session, work)
        turn.hands_on = True
        try:
            response = work.response or (yield from self._answer(turn))
            if response is not None:
                yield from self._hand_on(turn, response)
        except (Told, Cancelled):
            pass
        yield from turn.let_go()
        self.signal.fire()
        shared.ledger.say(f"{process} is done with turn {work.turn.turn_id}")

    def _answer(self, turn: Turn) -> Flow[AgentResponse | None]:
        failures = 0
        while True:
            try:
                found = yield from turn.take()
                if isinstance(found, Turn):
                    yield from do_first(found, ())
                    continue
                if isinstance(found, Answered):
                    return None
                response = yield from run_work(turn)
            except Told as error:
                failures += 1
                if turn.turn_id is None or turn.left not in {None, *WAITING}:
                    return None
                yield Pause(delay(failures, error))
            else:
                return None if turn.turn_id is None else response

    def _hand_on(self, turn: Turn, response: AgentResponse) -> Flow[None]:
        shared = self.process.shared
        message = shared.ledger.messages[turn.session.key, turn.name]
        failures = 0
        while True:
            yield Pause(shared.random.random() * 0.3)
            if shared.calm or shared.random.random() < 0.8:
                break
            failures += 1
            yield Pause(delay(failures, Failed("on_response")))
        message.handed_on += 1
        if response.content != message.message_id:
            raise shared.ledger.fail("answer", f"{message.message_id} got {response.content!r}")
        yield from turn.handed_on()


def _session_of(process: Process, work: Work) -> Flow[Session | None]:
    """The conversation of a row that was taken; None if it is gone."""
    storage = process.shared.storage
    new = NewSession(agent_name=process.agent, metadata=EMPTY, max_turns=None)
    snapshot = yield from process.op(
        lambda: None if storage.find(work.turn.turn_id) is None else storage.create(process.holder, work.key, new)
    )
    return None if snapshot is None else process.hand_out(work.key, snapshot)
