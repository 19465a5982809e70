"""The pytest plugin: stores for tests of bots, and the option that names the stores of the conformance suite.

It is not loaded by itself: a project asks for it with ``pytest_plugins = ["chatflow.testing.plugin"]`` in its topmost
``conftest.py``, or with ``-p chatflow.testing.plugin``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from chatflow.core.memory import SessionStore
from chatflow.sqlite.store import SQLiteSessionStore

# Before any of it is imported: its modules' own asserts shall tell what they compared.
pytest.register_assert_rewrite("chatflow.testing.conformance")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option."""
    parser.getgroup("chatflow").addoption(
        "--chatflow-store",
        metavar="MODULE:NAME",
        help="the stores that the tests of chatflow.testing.conformance run on: a chatflow.testing.Backend, or several",
    )


# Neither fixture is async, so that any plugin, or `asyncio.run` in the test itself, may run the tests.


@pytest.fixture
def chatflow_store() -> Iterator[SessionStore]:
    """An empty store in memory."""
    store = SessionStore()
    yield store
    asyncio.run(store.aclose(grace=0))


@pytest.fixture
def open_chatflow_store(tmp_path: Path) -> Iterator[Callable[..., SQLiteSessionStore]]:
    """Opens a store, with the options it is given, on the test's own file; again, as another process would.

    All are closed at the end, and in between whenever a test closes one.
    """
    opened: list[SQLiteSessionStore] = []

    def open_one(**options: Any) -> SQLiteSessionStore:
        opened.append(SQLiteSessionStore(tmp_path / "chat.db", **options))
        return opened[-1]

    yield open_one
    for store in opened:
        asyncio.run(store.aclose(grace=0))
