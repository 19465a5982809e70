"""Approvals by several processes, and by one that is killed: the tool runs once, as a ledger outside the file shows."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from chatflow.engines.scripted import ScriptedEngine
from chatflow.runner import Runner
from chatflow.sqlite.store import SQLiteSessionStore
from tests.sqlite.files import query, refunding
from tests.sqlite.processes import all_at_once, started

REFUND = ScriptedEngine.call("refund", euros=5)


@pytest.fixture
def ledger(tmp_path: Path) -> Path:
    """What was paid back, a line each."""
    return tmp_path / "ledger"


async def waiting_call(path: Path, ledger: Path) -> str:
    """The id of a call that waits in a file nobody has open."""
    async with SQLiteSessionStore(path) as store:
        response = await Runner(refunding(ledger), store, ScriptedEngine([REFUND])).run_async("s", "refund it")
    return response.awaiting_approval[0].id


async def test_killed_between_tool_and_commit(path: Path, ledger: Path) -> None:
    """A process that is killed after the tool has run leaves a decision that is finished, and not made again."""
    call_id = await waiting_call(path, ledger)
    with started("approve_and_be_gone", path, call_id, ledger) as other:
        assert other.process.wait() == -signal.SIGKILL
    assert (ledger.read_text(), query(path, "SELECT state FROM chatflow_turns")) == ("5\n", ["running"])
    async with SQLiteSessionStore(path) as store:
        runner = Runner(refunding(ledger), store, ScriptedEngine(["Paid.", "Next."]))
        assert (await runner.run_async("s", "next")).content == "Next."
        again = await runner.approve("s", call_id)
        said = [message.text for message in (await store.messages("s")).items]
    assert (again.duplicate, again.content, said) == (True, "Paid.", ["refund it", "", "", "Paid.", "next", "Next."])
    assert ledger.read_text() == "5\n"


async def test_processes_that_approve_at_once(path: Path, ledger: Path) -> None:
    """Of processes that approve the same call at once, one runs the tool, and all get its answer."""
    call_id = await waiting_call(path, ledger)
    told = all_at_once(4, "approve", path, call_id, ledger)
    assert len({content for content, _ in told}) == 1
    assert sorted(duplicate for _, duplicate in told) == [False, True, True, True]
    assert ledger.read_text() == "5\n"
