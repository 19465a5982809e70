"""The page on joining quick messages: what it promises when its recipe is broken off, at any of its steps."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from chatflow import Agent, AgentResponse, PendingTurn, Role, Runner, ScriptedEngine, SQLiteSessionStore
from chatflow.testing import Faults
from chatflow.testing.conformance.stepping import MOMENTS, Moment, cancelled_by_asyncio
from tests.pages import ROOT, blocks_of, run

PAGE = ROOT / "docs" / "howto" / "joining.md"
MOST_STEPS = 200


async def inbox_class() -> Any:
    """The page's class."""
    names: dict[str, Any] = {"__name__": "page"}
    await run(next(block for block in blocks_of(PAGE.read_text()) if "class Inbox" in block.text), PAGE, names)
    return names["Inbox"]


async def users_lines(runner: Runner) -> list[str]:
    """Answer all that is accepted, and return what the user has said, line by line."""
    everything = anyio.Event()

    async def on_response(turn: PendingTurn, response: AgentResponse) -> None:
        others = [each for each in await runner.session_store.pending_turns() if each.turn_id != turn.turn_id]
        if not others:
            everything.set()

    async with runner.working(on_response=on_response):
        await everything.wait()
    session = await runner.get_session("ann")
    assert session is not None
    return [line for message in session.history if message.role is Role.USER for line in message.text.splitlines()]


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("broken_off", ["flush", "receive"])
async def test_broken_off(broken_off: str, moment: Moment, tmp_path: Path) -> None:
    """Broken off at any step, and with every message delivered again, each is answered once and in order."""
    make = await inbox_class()
    for step in range(MOST_STEPS):
        async with SQLiteSessionStore(tmp_path / f"{step}.db") as store:
            runner = Runner(Agent("Support"), store, ScriptedEngine(default="Yes."))
            first = make(runner)
            for message in ("one", "two"):
                await first.receive("ann", message, message_id=message)
            if broken_off == "flush":
                operation = partial(first.flush, "ann")
            else:
                operation = partial(first.receive, "ann", "three", message_id="three")
            reached = await cancelled_by_asyncio(operation, step, moment)
            second = make(runner)  # as in the next process
            for message in ("three", "one", "two"):
                await second.receive("ann", message, message_id=message)
            await second.flush_what_is_left(0)
            for message in ("one", "two", "three"):
                await second.receive("ann", message, message_id=message)
            await second.flush("ann")
            assert await users_lines(runner) == ["one", "two", "three"], f"broken off at step {step}"
        if not reached:
            return
    pytest.fail(f"more than {MOST_STEPS} steps")


async def test_two_processes(tmp_path: Path) -> None:
    """Two that flush the same inbox at once answer each message once."""
    make = await inbox_class()
    async with SQLiteSessionStore(tmp_path / "chat.db") as store, SQLiteSessionStore(tmp_path / "chat.db") as other:
        runner = Runner(Agent("Support"), store, ScriptedEngine(default="Yes."))
        inboxes = make(runner), make(Runner(Agent("Support"), other, ScriptedEngine(default="Yes.")))
        for number in range(5):
            async with anyio.create_task_group() as tasks:
                for inbox in inboxes:
                    tasks.start_soon(partial(inbox.receive, "ann", str(number), message_id=str(number)))
            async with anyio.create_task_group() as tasks:
                for inbox in inboxes:
                    tasks.start_soon(inbox.flush, "ann")
        assert await users_lines(runner) == ["0", "1", "2", "3", "4"]


@pytest.mark.parametrize("accepted", ["one", "two"])
@pytest.mark.parametrize("is_answered", [False, True])
async def test_accepted_without_the_inbox(accepted: str, *, is_answered: bool, tmp_path: Path) -> None:
    """A message that another process has accepted by itself is not joined with others, and answered once."""
    make = await inbox_class()
    async with SQLiteSessionStore(tmp_path / "chat.db") as store:
        runner = Runner(Agent("Support"), store, ScriptedEngine(default="Yes."))
        await runner.accept("ann", accepted, message_id=accepted)
        if is_answered:
            await users_lines(runner)
        inbox = make(runner)
        for message in ("one", "two"):
            await inbox.receive("ann", message, message_id=message)
        await inbox.flush("ann")
        assert sorted(await users_lines(runner)) == ["one", "two"]


async def test_id_taken_meanwhile(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """An id that is taken after its batch was closed is left out, which the log says, and the rest is accepted."""
    make = await inbox_class()
    async with SQLiteSessionStore(tmp_path / "chat.db") as store, SQLiteSessionStore(tmp_path / "chat.db") as other:
        runner, another = (Runner(Agent("Support"), each, ScriptedEngine(default="Yes.")) for each in (store, other))
        inbox = make(runner)
        for message in ("one", "two", "three"):
            await inbox.receive("ann", message, message_id=message)
        Faults(store).before("accept_turn", partial(another.accept, "ann", "uno", message_id="one"))
        await inbox.flush("ann")
        assert "message 'one' of 'ann' was accepted before in another way" in caplog.text
        assert await users_lines(runner) == ["uno", "two", "three"]


async def test_erased_while_it_is_flushed(tmp_path: Path) -> None:
    """An inbox that is erased at any moment of its flushing stays erased, and those of others are flushed."""
    make = await inbox_class()
    for step in ("load_session", "queue_turn", "commit_turn", "accept_turn", "mark_processed"):
        path = tmp_path / f"{step}.db"
        async with SQLiteSessionStore(path) as store, SQLiteSessionStore(path) as other:
            runner = Runner(Agent("Support"), store, ScriptedEngine(default="Yes."))
            inbox = make(runner)
            await inbox.receive("ann", "of ann", message_id="ann")
            await inbox.receive("ben", "of ben", message_id="ben")
            Faults(store).before(step, partial(other.for_owner("inbox").delete, "ben"))
            await inbox.flush_what_is_left(0)
            assert await inbox.inboxes.get("ben") is None, step
            assert "of ann" in [turn.user_message for turn in await store.pending_turns()], step


async def test_one_fault_stays_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """What goes wrong in one inbox is logged and ends nobody's work; what waits there is accepted at the next look."""
    make = await inbox_class()
    async with SQLiteSessionStore(tmp_path / "chat.db") as store:
        runner = Runner(Agent("Support"), store, ScriptedEngine(default="Yes."))
        inbox = make(runner, quiet=0)
        Faults(store).before("accept_turn", OSError("a fault"), OSError("a fault"))
        async with inbox.working():
            for person in ("ann", "ben"):
                await inbox.receive(person, f"of {person}", message_id="1")
            while caplog.text.count("OSError: a fault") < 2:
                await anyio.lowlevel.checkpoint()
        assert not await store.pending_turns()
        async with inbox.working():
            found = {turn.user_message for turn in await store.pending_turns()}
        assert found == {"of ann", "of ben"}


async def test_nothing_to_join(tmp_path: Path) -> None:
    """A message without text is refused before anything is kept."""
    make = await inbox_class()
    async with SQLiteSessionStore(tmp_path / "chat.db") as store:
        inbox = make(Runner(Agent("Support"), store, ScriptedEngine()))
        with pytest.raises(TypeError, match="message 'picture' has no text to join"):
            await inbox.receive("ann", None, message_id="picture")
        assert await inbox.inboxes.get("ann") is None
