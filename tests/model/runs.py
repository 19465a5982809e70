"""What happens in a turn, and who asks for it inside a process: runs, bare turns, receipts."""

from __future__ import annotations

import math

from chatflow import AgentResponse, Role, ToolCall, ToolResult
from chatflow import Message as Said
from chatflow.core.journal import Deed, Entry, Journal
from chatflow.core.records import Accepted, Answered, Claim, Dead, Key, NewSession, Ticket
from chatflow.core.rows import State
from chatflow.core.values import EMPTY
from chatflow.running.worker import delay
from tests.model.ledger import Message, Script, Step
from tests.model.process import Failed, Process, Slot, Told
from tests.model.simulator import Cancelled, Flow, Pause
from tests.model.turn import Turn

CALLED = Said(Role.MODEL, tool_calls=[ToolCall(id="c", name="t")])
RETURNED = ToolResult(tool_call_id="c", name="t", content="done")


def run(
    process: Process, key: Key, script: Script, message: Message | None, text: str = "", outer: tuple[Turn, ...] = ()
) -> Flow[AgentResponse]:
    """`Runner.run_async`."""
    claim = None if message is None else Claim(message.message_id, text or message.text)
    session = yield from process.session(key)
    turn = Turn(process, session, claim, process.agent, outer)
    while True:
        if not process.shared.habits.slot_at_head:
            yield from _slot(turn).hold()
        found = yield from turn.take()
        if isinstance(found, Answered):
            return found.response or AgentResponse(
                content="", active_agent_name=process.agent, stop_reason="not_stored"
            )
        if found is None:
            return (yield from _run(turn, script))
        try:
            yield from do_first(found, outer)
        except (Told, Cancelled) as error:
            yield from turn.drop(error)
            raise


def _slot(turn: Turn) -> Slot:
    """That of the run around it, or one of its own."""
    if turn.slot is None:
        around = next((outer.slot for outer in turn.outer if outer.slot is not None and outer.slot.users), None)
        turn.slot = around or Slot(turn.process.slots)
        turn.slot.users += 1
    return turn.slot


def do_first(first: Turn, outer: tuple[Turn, ...]) -> Flow[None]:
    """Do work that a turn has to wait for."""
    shared = first.shared
    assert first.work is not None
    assert first.place is not None
    try:
        if shared.habits.slot_given_back:
            for turn in outer:
                if turn.slot is not None:
                    turn.slot.give_back()
        yield from _step_apart()
        first.begin(first.place)
        yield from run_work(first)
    except Told as error:
        if shared.habits.tells_others_errors:
            raise
        if first.left is State.ACCEPTED:
            try:
                yield Pause(delay(first.work.turn.attempts, error))
            except Cancelled:
                yield from first.let_go()
                raise
        yield from first.let_go()
    except Cancelled:
        if not shared.habits.cancelled_keeps_work:
            yield from first.let_go()
        raise


def _step_apart() -> Flow[None]:
    """It begins in a task of its own, and can be cancelled before."""
    yield Pause(0.0)


def run_work(turn: Turn) -> Flow[AgentResponse]:
    """Do what was taken."""
    message = turn.shared.ledger.messages[turn.session.key, turn.name]
    return (yield from _run(turn, message.script))


def _run(turn: Turn, script: Script) -> Flow[AgentResponse]:
    slot = _slot(turn)
    try:
        yield from slot.hold()
        response = yield from _answer(turn, script, slot)
    except (Told, Cancelled) as error:
        if turn.shared.habits.cancelled_keeps_work and isinstance(error, Cancelled) and turn.work is not None:
            turn.is_open = False
        else:
            yield from turn.drop(error)
        raise
    else:
        yield from turn.commit(response)
        return response
    finally:
        turn.slot = None
        slot.users -= 1
        if not slot.users:
            slot.give_back()


def _answer(turn: Turn, script: Script, slot: Slot) -> Flow[AgentResponse]:
    shared, process = turn.shared, turn.process
    journal = Journal(turn.journal)
    message = None if turn.claim is None else shared.ledger.messages[turn.session.key, turn.name]
    ends = message is not None and (script.kills or message.runs <= script.failures)
    at = shared.random.randrange(len(script.steps) + 1) if ends else -1
    for index, step in enumerate(script.steps):
        if index == at:
            yield from _end(turn, script)
        called = journal.called(index)
        ended = None if called is None else journal.returned(index)
        if called is None:
            yield from _ask(turn, slot, step.model_seconds)
            if turn.claim is not None:
                yield from turn.note(Entry(iteration=index, message=CALLED))
        if ended:
            for deed in ended[0].deeds:
                _redo(turn, deed)
        elif ended is None or step.idempotent:
            yield from _call(turn, index, step)
        _check_time(turn, script)
    if at == len(script.steps):
        yield from _end(turn, script)
    yield from _ask(turn, slot, script.last_seconds)
    _check_time(turn, script)
    _check_deeds(turn, script)
    return AgentResponse(content=turn.name, active_agent_name=process.agent)


def _end(turn: Turn, script: Script) -> Flow[None]:
    yield Pause(turn.shared.random.random() * 0.2)
    if script.kills:
        turn.shared.dies(turn.process)
        yield Pause(math.inf, shielded=True)
    raise Failed("failed", turn.name)


def _ask(turn: Turn, slot: Slot, seconds: float) -> Flow[None]:
    """Pay for a call of the model."""
    shared = turn.shared
    yield from slot.hold()
    yield from turn.look()
    assert turn.turn_id is not None
    row = shared.storage.find(turn.turn_id)
    if row is None or row.state is not State.RUNNING or not row.is_of(turn.process.holder, turn.attempt):
        raise shared.ledger.fail("paid", f"{turn.process} asks for turn {turn.turn_id}, which it has lost")
    yield Pause(seconds)


def _call(turn: Turn, index: int, step: Step) -> Flow[None]:
    shared, ledger = turn.shared, turn.shared.ledger
    session_key = turn.base.session_key
    if turn.claim is not None:
        ledger.called(session_key, turn.name, index, idempotent=step.idempotent, since=turn.begun_at)
    ledger.say(f"{turn.process} calls {index} of {turn.name}")
    if step.nested is not None:
        outer = (*turn.outer, turn)
        nested = step.nested
        try:
            if nested.bare:
                yield from bare(turn.process, nested.key, 0.3, outer)
            else:
                message = None if nested.message_id is None else ledger.messages[nested.key, nested.message_id]
                script = Script((), 0.3) if message is None else message.script
                yield from run(turn.process, nested.key, script, message, outer=outer)
        except Told as error:
            ledger.say(f"{turn.process} call {index} of {turn.name} got: {error.what}")
    yield Pause(step.tool_seconds)
    deed = Deed(what="set", kind="state", key=f"{turn.name}:{index}", value=index)
    _redo(turn, deed)
    if shared.habits.journal_of_states:
        deed = Deed(what="set", kind="state", key="", value=dict(turn.state))
    if turn.claim is not None:
        yield from turn.note(Entry(iteration=index, index=0, result=RETURNED, deeds=(deed,)))


def _redo(turn: Turn, deed: Deed) -> None:
    if deed.key:
        turn.state[deed.key] = deed.value
    else:
        turn.state = dict(deed.value)


def _check_deeds(turn: Turn, script: Script) -> None:
    """What the tools did is there, that of former attempts too, in order."""
    if turn.claim is None:
        return
    done = [value for key, value in turn.state.items() if key.startswith(f"{turn.name}:")]
    finished = [
        index
        for index in range(len(script.steps))
        if (turn.base.session_key, turn.name, index) in turn.shared.ledger.finished
    ]
    if done != finished:
        raise turn.shared.ledger.fail("journal", f"{turn.name} has done {done}, and {finished} had ended")


def _check_time(turn: Turn, script: Script) -> None:
    """Only what is slow itself is out of time."""
    shared = turn.shared
    since = turn.begun_at if shared.habits.timeout_from_start else turn.queued_at
    nested = any(step.nested for step in script.steps)
    disturbed = max(turn.process.disturbed_at, turn.process.slow_until) > since
    if shared.simulator.now - since > shared.turn_timeout and not (nested or disturbed):
        raise Told("timeout", turn.name)


def bare(process: Process, key: Key, seconds: float, outer: tuple[Turn, ...] = ()) -> Flow[None]:
    """A turn without a runner, as ``async with session.turn()`` takes it."""
    session = yield from process.session(key)
    turn = Turn(process, session, None, None, outer)
    yield from turn.take()
    try:
        yield Pause(seconds)
    except Cancelled as error:
        yield from turn.drop(error)
        raise
    yield from turn.commit(None)


def accept(process: Process, message: Message) -> Flow[None]:
    """`Runner.accept`."""
    shared = process.shared
    ticket = Ticket(
        key=message.key,
        known=None,
        new=NewSession(agent_name=process.agent, metadata=EMPTY, max_turns=None),
        agent_name=process.agent,
        claim=Claim(message.message_id, message.text),
        ancestors=(),
        lease_seconds=process.lease,
        max_attempts=shared.max_attempts,
    )

    def operation() -> Accepted | Answered | Dead:
        found = shared.storage.accept(process.holder, ticket)
        if isinstance(found, Accepted) and found.digest == ticket.claim.digest:  # type: ignore[union-attr]
            message.is_accepted = True
            shared.ledger.say(f"{process} accepts {message.message_id}: turn {found.turn_id}")
            shared.ledger.arrived(message)
        elif isinstance(found, Dead):
            shared.ledger.died(message)
        return found

    found = yield from process.op(operation)
    if isinstance(found, Dead):
        raise Told("dead")
    process.wake_workers()
