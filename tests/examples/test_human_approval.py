from __future__ import annotations

import re
from pathlib import Path
from typing import Final

import pytest

from tests.examples.running import printed, run

NAME: Final = "human_approval.py"


@pytest.fixture
def call(tmp_path: Path) -> str:
    """The id of a call that waits for approval, in a process that has ended."""
    [waits] = printed(NAME, "say", "ann", "Order 404 came broken. I want my 20 euros back.", folder=tmp_path)
    found = re.fullmatch(r"(\S+) waits for approval: refund \{'order_id': '404', 'euros': '20'\}", waits)
    assert found is not None
    return found[1]


def test_approved(tmp_path: Path, call: str) -> None:
    """A call is listed until a later process approves it, and then runs; approved again it gives the same answer."""
    assert printed(NAME, "waiting", folder=tmp_path) == [f"ann {call}: refund {{'order_id': '404', 'euros': '20'}}"]
    paying, answer = printed(NAME, "approve", "ann", call, folder=tmp_path)
    assert paying.startswith("[paying 20 euros back for order 404, key ")
    assert answer == "Support: Yes: 20 euros are on their way."
    assert printed(NAME, "waiting", folder=tmp_path) == []
    assert printed(NAME, "approve", "ann", call, folder=tmp_path) == ["(decided before)", answer]


def test_rejected(tmp_path: Path, call: str) -> None:
    """A call that a person has refused does not run, and the agent knows why."""
    [answer] = printed(NAME, "reject", "ann", call, "It was opened.", folder=tmp_path)
    assert answer.startswith("Support: I am sorry, we can't pay that back: A person has refused this call")
    assert answer.endswith("The reason given: It was opened.")


def test_other_decision(tmp_path: Path, call: str) -> None:
    """What was decided is not turned round."""
    printed(NAME, "reject", "ann", call, folder=tmp_path)
    refused = run(NAME, "approve", "ann", call, folder=tmp_path)
    assert (refused.returncode, refused.stdout) == (1, "")
    assert "was rejected before" in refused.stderr


def test_message_meanwhile(tmp_path: Path, call: str) -> None:
    """A customer who says something while the call waits is answered, and the call still waits."""
    said = printed(NAME, "say", "ann", "Are you there?", folder=tmp_path)
    assert said == ["Support: Which order is it, and how much has it cost?"]
    assert len(printed(NAME, "waiting", folder=tmp_path)) == 1


@pytest.mark.parametrize("command", ["approve", "reject"])
@pytest.mark.parametrize("customer", ["ann", "bob"])
def test_mistyped(tmp_path: Path, call: str, customer: str, command: str) -> None:
    """A call that does not wait, or not of that customer, is told of in words of the command line."""
    refused = run(NAME, command, customer, f"{call}0", folder=tmp_path)
    said = f"human_approval: {customer} has no such call that waits; `waiting` lists those that do\n"
    assert (refused.returncode, refused.stderr) == (1, said)
