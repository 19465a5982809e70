"""The pytest plugin: the option that tells the conformance suite which stores to test."""

from __future__ import annotations

import pytest

# Before any of it is imported: its modules' own asserts shall tell what they compared.
pytest.register_assert_rewrite("chatflow.testing.conformance")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option."""
    parser.getgroup("chatflow").addoption(
        "--chatflow-store",
        metavar="MODULE:NAME",
        help="the stores that the tests of chatflow.testing.conformance run on: a chatflow.testing.Backend, or several",
    )
