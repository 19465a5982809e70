from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.faults.postgres import running
from tests.faults.storage import SQLiteFile, Storage


@pytest.fixture(params=["sqlite-file", pytest.param("postgres", marks=pytest.mark.slow)])
async def storage(anyio_backend: str, request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Storage]:
    """Each storage that several processes share; what breaks a server, or kills its workers, is in test_postgres.py."""
    if request.param == "sqlite-file":
        yield SQLiteFile(tmp_path)
        return
    async with running(tmp_path) as (_, database):
        yield database
