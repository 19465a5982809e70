from __future__ import annotations

import re
from pathlib import Path

from tests.examples.running import printed


def test_workers_are_killed(tmp_path: Path) -> None:
    """Workers are killed, and each of the messages, which come twice, has one answer, in its place."""
    first, second, third = printed("several_workers.py", "24", "2", folder=tmp_path)
    killed = re.fullmatch("24 messages, each delivered twice; 2 workers, and ([1-9]) that were killed", first)
    assert killed is not None
    assert re.fullmatch("24 answers in the file; each was sent at least once, [0-9]+ of them again", second)
    assert third == "each message has one answer, in its place"
    assert list(tmp_path.iterdir()) == []
