from __future__ import annotations

import json
from pathlib import Path
from typing import Final

from tests.examples.running import run

NAME: Final = "persistent_conversation.py"


def test_conversation_goes_on_in_another_process(tmp_path: Path) -> None:
    """The first process begins a conversation, and the next one goes on with it; nothing but the file is left."""
    first, second = run(NAME, folder=tmp_path), run(NAME, folder=tmp_path)
    assert (first.returncode, first.stderr) == (0, "")
    assert (second.returncode, second.stderr) == (0, "")
    assert first.stdout.splitlines()[0] == "you: Plan a trip to Kyoto."
    assert second.stdout.splitlines()[:2] == [
        "you: Continue from where we left off.",
        "Guide: We were at this: Plan a trip to Kyoto.",
    ]
    assert [each.name for each in tmp_path.iterdir()] == ["session.json"]
    assert len(json.loads((tmp_path / "session.json").read_text())["messages"]) == 4


def test_damaged_file_is_left_alone(tmp_path: Path) -> None:
    """A file that holds no conversation is reported, and not written over."""
    file = tmp_path / "session.json"
    for text, fault in (("{", "is not JSON"), ('{"chatflow_session": 2}', "reads form 1, not 2")):
        file.write_text(text)
        refused = run(NAME, folder=tmp_path)
        assert refused.returncode == 1
        [said] = refused.stderr.splitlines()
        assert said.startswith("persistent_conversation: ")
        assert fault in said
        assert file.read_text() == text
