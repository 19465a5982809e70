from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.faults.postgres import running
from tests.faults.storage import SQLiteFile, Storage


@pytest.fixture(params=["sqlite-file", "postgres"])
async def storage(anyio_backend: str, request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Storage]:
    """Each storage that several processes share."""
    if request.param == "sqlite-file":
        yield SQLiteFile(tmp_path)
        return
    async with running(tmp_path) as (_, database):
        yield database
