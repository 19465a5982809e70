"""A file that is driven at random, copied again and again, and at some moment left for its copy."""

from __future__ import annotations

from itertools import count
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule, run_state_machine_as_test

from chatflow.cli.copier import Copied, open_copier
from tests.backends import BACKENDS
from tests.postgres import server
from tests.test_owners_machine import OwnersMachine

FILE, SERVER = (next(each for each in BACKENDS if each.name == name) for name in ("sqlite-file", "postgres"))


async def copy(folder: Path) -> Copied:
    """Copy the file of a folder to the schema of that folder."""
    async with open_copier(folder / "chat.db", server.dsn(), server.schema_of(folder)) as copier:
        await copier.begin()
        await copier.write(lambda: None)
        return await copier.compare(lambda: None)


class Moving(OwnersMachine):
    """Everything that can happen to a file's conversations, before and after they move."""

    def __init__(self, folder: Path) -> None:
        super().__init__(FILE, folder)

    @precondition(lambda self: self.backend is FILE)
    @rule(moves=st.booleans())
    def copy(self, moves: bool) -> None:
        self.run(self.store.aclose())
        copied = self.run(copy(self.folder))
        assert (copied.differing, copied.has_changed) == ((), False)
        assert all((each.rows, each.checksum) == (each.copied_rows, each.copied_checksum) for each in copied.tables)
        if moves:
            self.backend = SERVER
        self.open()
        self.live.clear()
        self.gone.clear()


@pytest.mark.timeout(300)
def test_moving(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever has happened in a file, its copy is equal, and goes on as the file would have."""
    monkeypatch.setattr("chatflow.sqlite.copying._CONVERSATIONS", 2)
    folders = count()
    run_state_machine_as_test(
        lambda: Moving(tmp_path / str(next(folders))),  # type: ignore[arg-type]  # any factory will do
        settings=settings(max_examples=25, stateful_step_count=30, suppress_health_check=list(HealthCheck)),
    )
