from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

import pytest
from psycopg.conninfo import make_conninfo

from benchmarks.__main__ import main, refuse_weaker_promise
from benchmarks.goals import GOALS, Goal
from benchmarks.machine import compile_shim
from benchmarks.results import Cell, Results, Table
from benchmarks.systems import ON_SERVER
from benchmarks.tables import show
from benchmarks.themes import THEMES
from tests.postgres import server

pytestmark = pytest.mark.timeout(300)  # each test is many processes, which share the machine with other tests

SYSTEMS: Final = ("floor-full", "sqlite-file", "floor-postgres", "postgres")
SMALLEST: Final = ("--rounds", "1", "--seconds", "0.001", "--scale", "0.0001")


HEAVY_ON_SERVER: Final = ("resources", "server", "together")
"""Themes that take up to a minute on a server, however little they measure, since they fill it first."""


@pytest.mark.parametrize("theme", [theme for theme in THEMES if theme != "server"])
def test_each_theme_measures_the_floor_and_chatflow(theme: str, tmp_path: Path) -> None:
    """A theme at its smallest has every figure of its tables."""
    _measure(theme, [name for name in SYSTEMS if theme not in HEAVY_ON_SERVER or name not in ON_SERVER], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("theme", HEAVY_ON_SERVER)
def test_each_theme_measures_a_server(theme: str, tmp_path: Path) -> None:
    """The themes that take long on a server have every figure of their tables there too."""
    _measure(theme, SYSTEMS, tmp_path)


def _measure(theme: str, names: Sequence[str], tmp_path: Path) -> None:
    systems = [name for name in names if name in THEMES[theme].systems]
    folder = ["--folder", str(tmp_path), "--output", str(tmp_path / "output"), "--peers", str(tmp_path / "none")]
    on_server = ["--server", server.dsn()] if {*systems} & {*ON_SERVER} else []
    results = main(["--themes", theme, "--systems", *systems, *SMALLEST, *folder, *on_server])
    assert results.failures == []
    assert len(results.tables) == len(THEMES[theme].cases(0.0001))
    for table in results.tables:
        for cell in table.cells.values():
            assert cell.note is not None or len(cell.rounds) == 1
        measured = {name for cell in table.cells.values() for figures in cell.rounds for name in figures}
        assert {column.key for column in THEMES[theme].columns} <= measured
    assert {f"{theme}.json", f"{theme}.md", "goals.md"} <= {path.name for path in (tmp_path / "output").iterdir()}


def test_what_a_commit_promises_is_read_from_the_connection_that_commits(tmp_path: Path) -> None:
    """A turn of a file commits at FULL, in a write-ahead log, and one in memory nowhere."""
    folder = ["--folder", str(tmp_path), "--output", str(tmp_path / "output"), "--peers", str(tmp_path / "none")]
    found = {
        "floor-normal": "NORMAL, WAL",
        "floor-memory": "in memory",
        "sqlite-file": "FULL, WAL",
        "no-places": "FULL, WAL",
        "sqlite-memory": "in memory",
        "memory": "in memory",
    }
    (table, _) = main(["--themes", "turn", "--systems", *found, *SMALLEST, *folder]).tables
    assert {name: cell.facts["commits at"] for name, cell in table.cells.items()} == found


@pytest.mark.parametrize("level", ["on", "off"])
def test_what_a_commit_promises_is_read_from_the_session_that_commits(level: str, tmp_path: Path) -> None:
    """What a server of the tests' own promises, which never flushes, is told of it, and what its client has set."""
    folder = ["--folder", str(tmp_path), "--output", str(tmp_path / "output"), "--peers", str(tmp_path / "none")]
    dsn = make_conninfo(server.dsn(), options=f"-c synchronous_commit={level}")
    (table, _) = main(["--themes", "turn", "--systems", "postgres", *SMALLEST, *folder, "--server", dsn]).tables
    assert table.cells["postgres"].facts["commits at"] == f"weaker: fsync off, synchronous_commit {level}"


def test_a_run_starts_a_server_of_its_own(tmp_path: Path) -> None:
    """A server of the run's own flushes every commit, and its fsyncs are counted."""
    folder = ["--output", str(tmp_path / "output"), "--peers", str(tmp_path / "none")]
    (table, _) = main(["--themes", "turn", "--systems", "postgres", *SMALLEST, *folder]).tables
    cell = table.cells["postgres"]
    assert cell.facts["commits at"] == "FULL: fsync on, synchronous_commit on"
    are_counted = compile_shim(tmp_path) is not None
    assert [figures["fsyncs_per_1000"] >= 1000 for figures in cell.rounds] == [are_counted]


def test_figures_of_a_weaker_promise_are_refused() -> None:
    """A system that says FULL and flushes less often than it commits ends the run."""
    cell = Cell(rounds=[{"fsyncs_per_1000": 990.0}], facts={"commits at": "FULL, WAL"})
    with pytest.raises(SystemExit, match="sqlite-file says FULL"):
        refuse_weaker_promise(Table("turn", "without a message id", {}, {"sqlite-file": cell}))


@pytest.mark.parametrize("goal", GOALS, ids=lambda goal: goal.says)
def test_each_goal_finds_its_figure(goal: Goal) -> None:
    """Where all themes have run in full, no goal is left without a figure."""
    results = Results({}, [])
    for name, theme in THEMES.items():
        figures = {column.key: 7.0 for column in theme.columns}
        for case in theme.cases(1):
            cells = {system: Cell(rounds=[dict(figures)]) for system in case.systems or theme.systems}
            results.tables.append(Table(name, case.name, case.settings, cells))
    assert list(goal.measured(results)) != []


def test_a_system_that_can_not_take_part_says_so_in_its_row() -> None:
    """A table has a row for a package that has no such thing, with the reason."""
    cells = {"floor-full": Cell(rounds=[{"median_us": 12.0}]), "langgraph": Cell(note="keeps no message ids")}
    lines = show(Table("dedup", "0 ids stored", {}, cells)).splitlines()
    assert lines[2].startswith("| sqlite3 by hand, FULL (the floor)")
    assert lines[3].startswith("| langgraph AsyncSqliteSaver (keeps no message ids) |")
