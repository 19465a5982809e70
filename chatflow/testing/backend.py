"""Backend: how the conformance suite gets the stores that it tests."""

from __future__ import annotations

from collections.abc import Callable

import attrs

from chatflow.core.backend import StoreBackend


@attrs.frozen
class Backend:
    """A way to make stores of one kind. It chooses which tests can run, and no test asks it anything."""

    name: str
    """What stands in the tests' ids."""

    make: Callable[..., StoreBackend]
    """Takes a folder of the test's own, where stores that share data find each other, and the store's options.

    They are *default_max_turns* and *dedup_ttl_hours*, by name, and may be left out.
    """

    shares: bool = False
    """A second store made in the same folder has the same conversations."""

    survives: bool = False
    """The conversations are still there when a store is made after all others were closed."""
