"""The page on scaling, and what the page on the command says of copying: both on the tests' server."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Final

import pytest

from chatflow.core.agent import Agent
from chatflow.postgres.connection import locate
from chatflow.postgres.store import PostgresSessionStore
from tests.cli.page import make_files
from tests.cli.test_page import COPY, run
from tests.pages import texts_of
from tests.postgres import server

PAGE: Final = (Path(__file__).parent.parent.parent / "docs" / "scaling.md").read_text()
ADDRESS: Final = "postgresql://chat@db.example/chat"


async def test_sample(tmp_path: Path) -> None:
    """The line that changes makes a store that takes turns."""
    sample, *_ = texts_of(PAGE, "python")
    assert ADDRESS in sample
    sample = sample.replace(ADDRESS, server.dsn()).replace("=30", f"=30, schema='{server.schema_of(tmp_path)}'")
    namespace: dict[str, Any] = {}
    exec(sample, namespace)
    async with namespace["store"] as store:
        session = await store.get_or_create("s", Agent("Support"))
        assert (session.max_turns, await store.check()) == (30, ())


async def test_hosts() -> None:
    """The address of several hosts is read as the page says, and nobody is asked before the store is used."""
    _, sample = texts_of(PAGE, "python")
    namespace: dict[str, Any] = {"PostgresSessionStore": PostgresSessionStore}
    exec(sample, namespace)
    async with namespace["store"] as store:
        assert store.name == "postgresql://chat@one.example,two.example/chat"


def test_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The copy on the command's page prints what the page says."""
    monkeypatch.chdir(tmp_path)
    make_files(tmp_path)
    schema = server.schema_of(tmp_path)
    (line,) = re.findall(r"^\$ (.*)$", COPY, re.MULTILINE)
    said = run(line.replace(ADDRESS, f"{server.dsn()} --schema {schema}"))
    assert f"$ {line}\n{said.replace(locate(server.dsn(), schema).name, ADDRESS)}" == COPY
