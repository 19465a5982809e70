"""The page on scaling: its sample, on the tests' server."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from chatflow.core.agent import Agent
from tests.pages import texts_of
from tests.postgres import server

PAGE: Final = (Path(__file__).parent.parent.parent / "docs" / "scaling.md").read_text()


async def test_sample(tmp_path: Path) -> None:
    """The line that changes makes a store that takes turns."""
    (sample,) = texts_of(PAGE, "python")
    address = "postgresql://chat@db.example/chat"
    assert address in sample
    sample = sample.replace(address, server.dsn()).replace("=30", f"=30, schema='{server.schema_of(tmp_path)}'")
    namespace: dict[str, Any] = {}
    exec(sample, namespace)
    async with namespace["store"] as store:
        session = await store.get_or_create("s", Agent("Support"))
        assert (session.max_turns, await store.check()) == (30, ())
