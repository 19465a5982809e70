from __future__ import annotations

import re
from pathlib import Path

from tests.examples.running import EXAMPLES, printed


def test_three_agents_share_a_state(tmp_path: Path) -> None:
    """In one message the conversation passes from agent to agent, and each finds what those before it have noted."""
    lines = printed("swarm.py", "I would like to see Lisbon for 3 nights.", folder=tmp_path)
    hotel = {"hotel": "Casa do Miradouro", "room": 285}
    state = {"city": "Lisbon", "nights": 3, "flight": "TP 571", "fare": 180, **hotel}
    assert lines == [
        "you: I would like to see Lisbon for 3 nights.",
        "  Planner calls plan_journey {'city': 'Lisbon', 'nights': '3'}",
        "  handed over to Flights: there is a city",
        "  Flights calls book_flight {}",
        "  handed over to Hotels: there is a flight",
        "  Hotels calls book_hotel {}",
        "Hotels: Flight TP 571, then 3 nights at the Casa do Miradouro.",
        f"(Hotels has the conversation; {state})",
    ]


def test_written_conversation(tmp_path: Path) -> None:
    """What is written down in the example goes round all agents and back to the first."""
    lines = printed("swarm.py", folder=tmp_path)
    assert "Hotels: 465 euros in all." in lines
    assert "  handed over to Planner: another city" in lines
    assert lines[-2] == "Hotels: Flight JL 408, then 5 nights at the Ryokan Kamo."


def test_another_process_goes_on(tmp_path: Path) -> None:
    """A later process goes on with the agent that has the conversation, and with its state."""
    printed("swarm.py", "Lisbon, 3 nights", folder=tmp_path)
    lines = printed("swarm.py", "And what does it come to?", folder=tmp_path)
    assert lines[1:3] == ["  Hotels calls add_up {}", "Hotels: 465 euros in all."]


def test_its_own_suggestion(tmp_path: Path) -> None:
    """What the example suggests to say next is understood, whichever comes first, the city or the nights."""
    found = re.search(r'^    python swarm.py "(.*)"', (EXAMPLES / "swarm.py").read_text(), re.MULTILINE)
    assert found is not None
    printed("swarm.py", folder=tmp_path)
    lines = printed("swarm.py", found[1], folder=tmp_path)
    assert lines[-2] == "Hotels: Flight TP 571, then 3 nights at the Casa do Miradouro."
