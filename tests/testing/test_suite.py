"""The conformance suite as those run it who write a store: in a project of their own, with none of our settings."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from tests.testing import broken_stores

ROOT: Final = Path(__file__).parents[2]
SUITE: Final = "chatflow.testing.conformance"

NEVER_ENDS: Final = """
import threading

import anyio
import pytest

from chatflow import SessionStore
from chatflow.testing.fence import fence


def never():
    while True:
        pass


async def main():
    store = SessionStore()
    store.clock = never
    with fence():
        await store.mark_message_processed("m")


@pytest.mark.timeout(0.5)
def test():
    threading.Thread(target=threading.Event().wait, daemon=True).start()
    anyio.run(main)
"""


def run(folder: Path, store: str, *modules: str, plugin: bool = True, code: int = 0) -> str:
    """What pytest says of a store of broken_stores.py, in a project in *folder*, which is to end with *code*."""
    assert hasattr(broken_stores, store)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "--tb=line",
        "--pyargs",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:xdist",
    ]
    command += ["-p", "chatflow.testing.plugin"] if plugin else []
    command += ["--chatflow-store", f"{broken_stores.__name__}:{store}", *modules]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    ran = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == code, ran.stdout + ran.stderr
    return ran.stdout


@pytest.mark.parametrize(
    ("store", "module", "caught"),
    [
        ("ALIASING", "test_history", {"test_what_was_handed_out_stays"}),
        ("LOST_ORDER", "test_turns", {"test_call_and_result_in_one_turn"}),
        ("CHECK_THEN_MARK", "test_dedup", {"test_one_winner_of_eight"}),
        ("NO_CASCADE", "test_deleted_meanwhile", {"test_unfinished_messages", "test_commit_of_a_deleted_message"}),
        ("DIRTY_READ", "test_resuming", {"test_journal_is_no_history", "test_steps_aside"}),
        ("UNPRUNED", "test_history", {"test_memory_and_storage_agree"}),
        ("BLOCKING", "test_dedup", {"test_mark"}),
    ],
)
def test_broken_store(tmp_path: Path, store: str, module: str, caught: set[str]) -> None:
    """A store with one fault is caught by the tests of the promise that it breaks."""
    said = run(tmp_path, store, f"{SUITE}.{module}", code=1)
    assert caught <= set(re.findall(r"^FAILED .*::(\w+)\[", said, re.MULTILINE)), said


def test_sound_store(tmp_path: Path) -> None:
    """A sound store passes, in a project whose conftest.py asks for the plugin, and without blockbuster."""
    (tmp_path / "conftest.py").write_text(
        'import sys\nsys.modules["blockbuster"] = None\npytest_plugins = ["chatflow.testing.plugin"]\n'
    )
    said = run(tmp_path, "SOUND", f"{SUITE}.test_dedup", f"{SUITE}.test_resuming", plugin=False)
    assert re.search(r"^[1-9]\d+ passed", said, re.MULTILINE)


def test_helpers_tell_what_they_compared(tmp_path: Path) -> None:
    """An assert in one of the suite's helpers tells its two sides, as one in a test does."""
    (tmp_path / "test_helper.py").write_text(
        "from chatflow.testing.conformance import work\n\n\n"
        "def test() -> None:\n    assert '@py_assert' in repr(work.lose_all.__code__.co_varnames)\n"
    )
    run(tmp_path, "SOUND", "test_helper.py")


def test_time_limit(tmp_path: Path) -> None:
    """A test that never ends fails at pytest-timeout's limit, also where that finds it within the fence in chatflow."""
    (tmp_path / "test_never.py").write_text(NEVER_ENDS)
    assert "Failed: Timeout" in run(tmp_path, "SOUND", "test_never.py", code=1)


def test_no_store_named(tmp_path: Path) -> None:
    """Without a store there is an error that says how to name one."""
    command = [sys.executable, "-m", "pytest", "-p", "chatflow.testing.plugin", "--pyargs", f"{SUITE}.test_usage"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    ran = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 2
    assert "UsageError: name the stores to test" in ran.stdout


def test_no_store_in_the_list(tmp_path: Path) -> None:
    """An empty list of stores is an error, and not a success that has tested nothing."""
    said = run(tmp_path, "NONE", f"{SUITE}.test_usage", code=2)
    assert "NONE names no store to test" in said


@pytest.mark.slow
def test_whole_suite(tmp_path: Path) -> None:
    """A sound store passes all of it."""
    run(tmp_path, "SOUND", SUITE)
