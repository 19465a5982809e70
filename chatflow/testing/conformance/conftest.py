"""Stores for the conformance tests, one run of each test for each backend, and what the tests need to run anywhere.

Whoever runs them may have other settings, and other plugins, than chatflow's own tests have.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from chatflow.core.backend import StoreBackend
from chatflow.testing.backend import Backend

OpenStore = Callable[..., StoreBackend]
Restart = Callable[..., Awaitable[StoreBackend]]


def pytest_collectstart(collector: pytest.Collector) -> None:
    """Let anyio run the tests that are coroutines, whether or not it runs the project's own."""
    if isinstance(collector, pytest.Module):
        collector.add_marker("anyio")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run a test on every backend that has what the test asks for by its fixtures."""
    if "backend" in metafunc.fixturenames:
        backends = [
            backend
            for backend in _backends(metafunc.config)
            if (backend.shares or "second" not in metafunc.fixturenames)
            and (backend.survives or "restart" not in metafunc.fixturenames)
        ]
        metafunc.parametrize("backend", backends, ids=[backend.name for backend in backends])


def _backends(config: pytest.Config) -> tuple[Backend, ...]:
    where: str | None = config.getoption("--chatflow-store")
    module, _, name = (where or "").partition(":")
    if where is None or not name:
        raise pytest.UsageError(
            "name the stores to test, a chatflow.testing.Backend or several: --chatflow-store my_package.my_module:NAME"
        )
    found = getattr(import_module(module), name)
    backends = (found,) if isinstance(found, Backend) else tuple(found)
    if not backends:  # every test would be skipped, and the run a success
        raise pytest.UsageError(f"{where} names no store to test; list one chatflow.testing.Backend at least")
    return backends


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    """The only backend chatflow runs on: aiosqlite fails under trio."""
    return "asyncio"


@pytest.fixture(autouse=True)
def fence() -> Iterator[None]:
    """Fails a test in which the store blocks the event loop, where blockbuster is installed."""
    if find_spec("blockbuster") is None:
        yield
    else:
        from chatflow.testing.fence import fence as around_the_loop  # noqa: PLC0415  # blockbuster may not be there

        with around_the_loop():
            yield


@pytest.fixture
async def open_store(anyio_backend: str, backend: Backend, tmp_path: Path) -> AsyncIterator[OpenStore]:
    """Makes stores with the options a test wants, on the same data where the backend can; all are closed at the end."""
    made: list[StoreBackend] = []

    def open_one(**options: Any) -> StoreBackend:
        made.append(backend.make(tmp_path, **options))
        return made[-1]

    # Sync tests use it too: it asks for *anyio_backend* by itself, and so runs for them as well.
    yield open_one
    for store in made:
        await store.aclose()


@pytest.fixture
def store(open_store: OpenStore) -> StoreBackend:
    """A store with its default options."""
    return open_store()


@pytest.fixture
def second(store: StoreBackend, open_store: OpenStore) -> StoreBackend:
    """Another store on the same data, as another part of the program would open it."""
    return open_store()


@pytest.fixture
def restart(open_store: OpenStore) -> Restart:
    """Closes a store and opens another on what it left."""

    async def close_and_open(store: StoreBackend, **options: Any) -> StoreBackend:
        await store.aclose()
        return open_store(**options)

    return close_and_open


class Clock:
    """The time, which passes when a test says so."""

    def __init__(self) -> None:
        self.now = dt.datetime(2030, 1, 1, tzinfo=dt.UTC)

    def __call__(self) -> dt.datetime:
        return self.now

    def passes(self, **time: float) -> None:
        """Let some time go by."""
        self.now += dt.timedelta(**time)


@pytest.fixture
def clock(store: StoreBackend) -> Clock:
    """The store's clock."""
    store.clock = clock = Clock()
    return clock
