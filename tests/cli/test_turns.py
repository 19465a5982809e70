from __future__ import annotations

import datetime as dt
from pathlib import Path

import anyio
import pytest

from chatflow import MessageDeadError, Runner, ScriptedEngine, SQLiteSessionStore, tool
from chatflow.cli.turns import age_text
from chatflow.core.agent import Agent
from tests.cli.conftest import Command, fill, order_404
from tests.cli.processes import holding_a_turn


def test_nothing(command: Command, db: Path) -> None:
    """Where nothing waits and nothing was given up, that is said."""
    fill(db, order_404)
    assert (command("turns", "pending").err, command("turns", "dead").err) == (
        "nothing waits\n",
        "nothing was given up\n",
    )
    assert command("turns", "pending", "--json").documents == []
    assert command("turns", "dead", "--owner", "a", "--all-owners").status == 2


def test_beside_another_process(command: Command, db: Path) -> None:
    """Beside a program that holds a turn, everything that reads goes on, and shows what is committed."""
    fill(db, order_404)
    with holding_a_turn(db):
        accepted, running = (line.split("\t") for line in command("turns", "pending").out.splitlines())
        shown = command("sessions", "show", "conversation-7")
        listed = command("sessions", "list")
        checked = command("check")
        purged = command("sessions", "purge", "--yes", "--idle-for", "0.000001s")
    assert accepted[1:5] == ["accepted", "conversation-7", "wamid.2", "0"]
    assert accepted[6] == "And order 405?"
    assert running[1:4] == ["running", "conversation-7", ""]
    assert "not yet committed" not in shown.out
    assert (shown.status, listed.status, checked.status) == (0, 0, 0)
    assert purged.out == "deleted 0 conversations\n"
    assert "not yet committed" in command("sessions", "show", "conversation-7").out


def test_accepted(command: Command, db: Path) -> None:
    """What was accepted is listed with all that is known of it, whoever's it is."""

    async def work(store: SQLiteSessionStore) -> None:
        runner = Runner(Agent("Support"), store).for_owner("ann")
        await runner.accept("s", "x" * 100, message_id="m1", metadata={"channel": "sms"})

    fill(db, work)
    assert command("turns", "pending").out == ""
    [row] = command("turns", "pending", "--all-owners").out.splitlines()
    cells = row.split("\t")
    assert cells[1:5] == ["accepted", "ann", "s", "m1"]
    assert cells[7] == f"{'x' * 57}..."
    [found] = command("turns", "pending", "--owner", "ann", "--json").documents
    for name in ("queued_at", "age_seconds", "turn_id"):
        found.pop(name)
    assert found == {
        "state": "accepted",
        "owner": "ann",
        "session_id": "s",
        "message_id": "m1",
        "user_message": "x" * 100,
        "decision": None,
        "metadata": {"channel": "sms"},
        "agent_name": "Support",
        "attempts": 0,
    }


def test_decisions(command: Command, db: Path) -> None:
    """A decision that failed is listed as what it is."""

    @tool(requires_approval=True)
    async def refund() -> str:
        """Pay back."""
        return "paid"

    async def work(store: SQLiteSessionStore) -> None:
        engine = ScriptedEngine([ScriptedEngine.call("refund"), RuntimeError("down"), RuntimeError("down")])
        runner = Runner(Agent("Support", tools=[refund], engine=engine), store)
        response = await runner.run_async("s", "refund")
        [call] = response.awaiting_approval
        with pytest.raises(RuntimeError):
            await runner.approve("s", call.id)

    fill(db, work)
    [row] = command("turns", "pending").out.splitlines()
    cells = row.split("\t")
    assert (cells[1], cells[3], cells[6].startswith("(approves call_")) == ("interrupted", "", True)
    [found] = command("turns", "pending", "--json").documents
    assert found["decision"]["approved"] is True


def test_dead(command: Command, db: Path) -> None:
    """What was given up is listed as dead, and not as pending."""

    async def work(store: SQLiteSessionStore) -> None:
        runner = Runner(Agent("Support", engine=ScriptedEngine([RuntimeError("down")])), store, max_attempts=1)
        await runner.accept("s", "hello", message_id="m1")
        async with runner.working():
            while not [turn for turn in await store.pending_turns() if turn.state == "dead"]:  # noqa: ASYNC110
                await anyio.sleep(0.01)
        with pytest.raises(MessageDeadError):
            await runner.run_async("s", "hello", message_id="m1")

    fill(db, work)
    [row] = command("turns", "dead").out.splitlines()
    assert row.split("\t")[1:5] == ["dead", "s", "m1", "1"]
    assert command("turns", "pending").out == ""


@pytest.mark.parametrize(
    ("seconds", "expected"), [(-3, "0s"), (59.9, "59s"), (60, "1m"), (7200, "2h"), (3 * 24 * 3600 + 5, "3d")]
)
def test_age(seconds: float, expected: str) -> None:
    """An age is shown in its largest unit."""
    assert age_text(dt.timedelta(seconds=seconds)) == expected
