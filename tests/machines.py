"""Running a state machine over a store. Not in `backends`, which the benchmarks load too."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from pathlib import Path

from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test

from chatflow.testing import Backend


def run_machine(
    machine: Callable[[Backend, Path], RuleBasedStateMachine], backend: Backend, folder: Path, examples: int
) -> None:
    """Try so many sequences of a machine's operations, each on a store in a folder of its own."""
    folders = count()
    run_state_machine_as_test(
        lambda: machine(backend, folder / str(next(folders))),  # type: ignore[arg-type]  # any factory will do
        settings=settings(max_examples=examples, stateful_step_count=40, suppress_health_check=list(HealthCheck)),
    )
