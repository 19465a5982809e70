from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from tests.cli.processes import ROOT
from tests.postgres import server
from tests.postgres.bouncer import PROGRAM, bouncer_to

WHAT_HOLDS: Final = {
    "contract": ("chatflow/testing/conformance",),
    "machines": ("tests/test_state_machine.py", "tests/test_owners_machine.py", "tests/test_cases.py"),
    "processes": tuple(
        f"tests/postgres/test_{each}.py" for each in ("processes", "moving", "copying", "repair", "pool")
    ),
}
"""All but what looks at the connections themselves, or makes databases of its own."""


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.skipif(PROGRAM is None, reason="there is no pgbouncer: its package is called so")
@pytest.mark.parametrize("what", WHAT_HOLDS)
def test_through_a_bouncer(what: str, tmp_path: Path) -> None:
    """Through PgBouncer in transaction mode, with fewer connections than there are clients, all promises hold."""
    with bouncer_to(server.dsn(), tmp_path) as address:
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-n",
            "2",
            "--no-cov",
            "-o",
            "timeout=600",
            "-k",
            "postgres",
            *WHAT_HOLDS[what],
        ]
        environment = {**os.environ, "CHATFLOW_TEST_POSTGRES": address}
        ran = subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, check=False)
    assert ran.returncode == 0, ran.stdout
