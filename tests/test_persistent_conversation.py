from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Final

EXAMPLE: Final = Path(__file__).parent.parent / "examples" / "persistent_conversation.py"


def run(folder: Path) -> subprocess.CompletedProcess[str]:
    """The example in a process of its own, which asks no model and keeps its file in *folder*."""
    paths = [str(EXAMPLE.parent.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {key: value for key, value in os.environ.items() if key not in {"MODEL", "SESSION_FILE"}}
    return subprocess.run(
        [sys.executable, EXAMPLE],
        env=environment | {"PYTHONPATH": os.pathsep.join(paths)},
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )


def test_conversation_goes_on_in_another_process(tmp_path: Path) -> None:
    """The first process begins a conversation, and the next one goes on with it; nothing but the file is left."""
    first, second = run(tmp_path), run(tmp_path)
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
        refused = run(tmp_path)
        assert refused.returncode == 1
        assert fault in refused.stderr.splitlines()[-1]
        assert file.read_text() == text
