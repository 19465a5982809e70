"""chatflow-agent 0.3.4, put through the scenarios of the faults it is known for: each of them bites."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

import pytest

from tests.peers import test_faults as faults
from tests.peers.subject import Subject

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),  # what it warns of, and what it imports, is no concern of ours
]

Scenario = Callable[..., Awaitable[None]]

KNOWN: Final[dict[Scenario, dict[Any, str] | str]] = {
    faults.test_late_result: "orphaned: {'c1'}",
    faults.test_failed_turn_in_a_full_window: "text='q3'",
    faults.test_failed_turn_after_a_handoff: "^Billing$",
    faults.test_timed_out_tool: "Call",
    faults.test_conversation_goes_on_after_a_timeout: "no result for",
    faults.test_messages_at_once: "text='q0'.*text='q1'.*text='to q",
    faults.test_webhook_delivered_twice: "run more than once",
    faults.test_deleted_during_a_run: "too late",
    faults.test_deleted_and_used_anew_during_a_run: "anew.*too late",
    faults.test_value: {
        "datetime": "on disk",
        "date": "on disk",
        "timedelta": "on disk",
        "UUID": "on disk",
        "Decimal": "on disk",
        "bytes": "refused, and yet there",
        "set": "on disk",
        "tuple": "on disk",
        "int keys": "on disk",
        "NaN": "nan in memory is None on disk",
        "infinity": "on disk",
        "lone surrogate": "refused, and yet there",
        "600 levels": "refused, and yet there",
    },
    faults.test_value_of_a_class: {faults.Colour.RED: "on disk", faults.Point(1): "on disk"},
    faults.test_corrupt_row: "validation error",
    faults.test_prompt: {
        "open call": "no result for",
        "late result": "no result for",
        "reused id": "stands twice",
        "empty id": "empty",
        "half a batch": "no result for",
    },
    faults.test_prompt_keeps_every_message: "'assistant']",
    faults.test_unknown_agent: "^Support$",
    faults.test_memory: "no such table",
    faults.test_shared_memory: dict.fromkeys(faults.SHARED_URIS, "no such table|made"),
}
"""What shows, for each scenario that it fails; where the scenario has cases, for each of those."""

OTHERS: Final = {
    faults.test_window_of_whole_turns,
    faults.test_ids_reused_across_turns,
    faults.test_retried_message,
    faults.test_equal_texts,
    faults.test_other_conversations_beside_a_corrupt_row,
    faults.test_agent_after_a_restart,
    faults.test_path_like_an_address,
}
"""Faults that other libraries have, and it has not."""

CASES: Final = [
    pytest.param(scenario, case, shows, id=scenario.__name__ + (f"-{case}" if case is not None else ""))
    for scenario, known in KNOWN.items()
    for case, shows in (known.items() if isinstance(known, dict) else [(None, known)])
]


@pytest.fixture(autouse=True)
def fence() -> None:
    """No fence: it is not chatflow that runs here."""


@pytest.fixture
def subject() -> Subject:
    """chatflow-agent, which `make slow` installs."""
    from tests.peers.chatflow_agent import ChatflowAgent

    assert version("chatflow-agent") == "0.3.4"
    return ChatflowAgent()


@pytest.mark.parametrize(("scenario", "case", "shows"), CASES)
async def test_known_fault(
    scenario: Scenario,
    case: Any,
    shows: str,
    subject: Subject,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """chatflow-agent has the fault, and the scenario shows it."""
    given = {"subject": subject, "path": tmp_path / "chat.db", "tmp_path": tmp_path, "monkeypatch": monkeypatch}
    arguments = {name: given.get(name, case) for name in inspect.signature(scenario).parameters}
    with pytest.raises(faults.FaultShown, match=shows):
        await scenario(**arguments)


def test_all_scenarios() -> None:
    """Every scenario is run here, or is about a fault that chatflow-agent does not have."""
    scenarios = {value for name, value in vars(faults).items() if name.startswith("test_")}
    assert scenarios == KNOWN.keys() | OTHERS
