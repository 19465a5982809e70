"""The page on scaling, and what the page on the command says of copying: both on the tests' server."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any, Final

import anyio
import psycopg
import pytest
from psycopg.conninfo import make_conninfo

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


def test_user_and_database() -> None:
    """The user and the database that the page makes are all that a store needs."""
    (statements,) = texts_of(PAGE, "sql")
    name = f"chatflow_page_{os.getpid()}"

    async def use(dsn: str) -> None:
        async with PostgresSessionStore(dsn) as store:
            await store.get_or_create("s", Agent("Support"))
            assert await store.check() == ()

    with psycopg.connect(server.dsn(), autocommit=True) as connection:
        for statement in re.sub(r"\bchat\b", name, statements).split(";")[:-1]:
            connection.execute(statement.encode())
        dsn = make_conninfo(server.dsn(), user=name, password="change me", dbname=name)  # that of the page
        anyio.run(use, dsn)
        connection.execute(f"DROP DATABASE {name}".encode())
        connection.execute(f"DROP ROLE {name}".encode())


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
